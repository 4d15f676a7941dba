"""
Muon, the optimizer of the matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon):
momentum whose update is orthogonalized, so that every direction of a matrix moves equally far, and
the rare ones are learnt, too.

    Muon(matrices, torch.float32, lr=0.02, momentum=0.95, weight_decay=0.0).step()

torch's own Muon always multiplies in bfloat16, which many CPUs only emulate, and takes the matrices
one by one.
"""

import torch


class Muon(torch.optim.Optimizer):
    """
    SGD with Nesterov momentum, each update orthogonalized in `dtype`; decoupled weight decay.
    Parameters are matrices (rows, columns), those of one shape are updated as one batch.
    """

    def __init__(self, parameters: list[torch.Tensor], dtype: torch.dtype, **settings: float):
        """settings: lr, momentum, weight_decay"""
        by_shape: dict[torch.Size, list] = {}
        for p in parameters:
            by_shape.setdefault(p.shape, []).append(p)
        super().__init__([{"params": same} for same in by_shape.values()], settings)
        self.dtype = dtype

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
        # c_attn stores the maps to q, k and v as one matrix: each is orthogonalized on its own
        maps = 3 if rows == 3 * columns else 1
        update = torch.stack(updates).view(-1, rows // maps, columns)  # (N * maps, rows / maps, ..)
        update = orthogonalize(update.to(self.dtype)).float()
        update = update.view(-1, rows, columns)  # (N, rows, columns)
        scale = lr * max(1, rows / maps / columns) ** 0.5
        for p, u in zip(params, update, strict=True):
            p.mul_(1 - lr * weight_decay)
            p.sub_(u, alpha=scale)


def orthogonalize(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """
    Newton-Schulz iteration with Jordan's quintic: each step maps every singular value s of the
    matrices x (N, rows, columns) to 3.4445 s - 4.7750 s^3 + 2.0315 s^5. Five steps bring them
    between 0.7 and 1.2, near enough to 1 for an update.
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT, steps).mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        a = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)  # -4.775 x x' + 2.0315 (x x')^2
        x = torch.baddbmm(x, a, x, beta=3.4445)
    return x
