"""
Muon, the optimizer of the matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon):
momentum whose update is orthogonalized, so that every direction of a matrix moves equally far, and
the rare ones are learnt, too.

    Muon(maps_of(block), torch.float32, lr=0.02, momentum=0.95, weight_decay=0.0).step()

torch's own Muon always multiplies in bfloat16, which many CPUs only emulate, and takes the matrices
one by one.
"""

import torch
from torch import Tensor

from model import Block

# Jordan's quintic maps a singular value s to A s + B s^3 + C s^5.
A = 3.4445
B = -4.7750
C = 2.0315


def maps_of(block: Block) -> dict[Tensor, int]:
    """
    The matrices of a block, each with the number of maps that are stacked in it: to queries, keys
    and values, and to the gate and the values that it lets through.
    """
    maps = {p: 1 for p in block.parameters() if p.ndim == 2}
    maps[block.attn.c_attn.weight] = 3
    if block.mlp.gated:
        maps[block.mlp.c_fc.weight] = 2
    return maps


class Muon(torch.optim.Optimizer):
    """
    SGD with Nesterov momentum, each update orthogonalized in `dtype`; decoupled weight decay.
    Parameters are matrices (rows, columns), those of one shape are updated as one batch.
    """

    def __init__(self, matrices: dict[Tensor, int], dtype: torch.dtype, **settings: float):
        """
        matrices: see `maps_of`
        settings: lr, momentum, weight_decay
        """
        alike: dict[tuple, list] = {}
        for p, maps in matrices.items():
            alike.setdefault((p.shape, maps), []).append(p)
        groups = [{"params": same} for same in alike.values()]
        super().__init__(groups, settings)
        self.dtype = dtype
        self.maps = matrices

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.update_group(**group)

    def update_group(self, params: list, lr: float, momentum: float, weight_decay: float):
        """Update N matrices of one shape (rows, columns) in place, by their gradients."""
        updates = []
        for p in params:
            mean = self.state[p].setdefault("momentum", torch.zeros_like(p))
            mean.lerp_(p.grad, 1 - momentum)
            updates.append(p.grad.lerp(mean, momentum))  # Nesterov: one step ahead
        rows, columns = params[0].shape
        rows //= self.maps[params[0]]  # each map is orthogonalized on its own, all as one batch
        batch = torch.stack(updates).view(-1, rows, columns)
        batch = orthogonalize(batch.to(self.dtype)).float()
        stretch = max(1, rows / columns) ** 0.5
        for p, update in zip(params, batch.reshape(len(params), *params[0].shape), strict=True):
            p.mul_(1 - lr * weight_decay)
            p.sub_(update, alpha=lr * stretch)


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """
    Newton-Schulz iteration: applies the quintic five times to every singular value of the matrices
    x (N, rows, columns), which leaves them between 0.7 and 1.2, near enough to 1 for an update.
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(5):
        square = x @ x.mT
        odd = torch.baddbmm(square, square, square, beta=B, alpha=C)  # B x x' + C (x x')^2
        x = torch.baddbmm(x, odd, x, beta=A)
    return x
