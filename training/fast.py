"""
The arithmetic of a training step that torch has slower: the operators of the model, which are
`model.TORCH` with faster attention and a loss that needs less memory, and the optimizer Muon.

    logits, loss = model(tokens, targets, training_ops(device))
    Muon(maps_of(block), torch.float32, lr=0.02, momentum=0.95).step()

They take the models of all families. Letters as in model.py; N = B T rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model import TORCH, Attention, Block, Ops, RMSNorm, WholeTexts, add_norm, linear, may_see

SHORT = 512  # up to so many tokens T, scores (T, T) fit into a CPU's cache
ROWS = 256  # so many rows of logits fit, too


def training_ops(device: torch.device | str) -> Ops:
    """The operators to train with on a device."""
    # these are for CPUs: on a GPU torch.compile fuses the reference's
    if torch.device(device).type == "cpu":
        return TORCH._replace(
            rotate=rotate,
            add_norm=add_rms_norm,
            attend=attention_on_cpu,
            linear=gated_linear,
            loss=chunked_loss,
        )
    return TORCH._replace(attend=fused_attention)


def fused_attention(q, kv, attn: Attention, batch: WholeTexts) -> Tensor:
    """
    torch's flash attention: q (B, T, H, D), k and v (B, T, Hk, D) -> as q. It has no soft cap:
    Gemma 2's scores are the reference's.
    """
    if attn.softcap:
        return TORCH.attend(q, kv, attn, batch)
    seen = None  # causal, without a mask
    if 0 < attn.window < q.shape[1]:
        seen = may_see(batch.positions[:, None], batch.positions, attn.window)  # (T, T)
    q, k, v = (x.transpose(1, 2) for x in (q, *kv))  # (B, H, T, D), k and v (B, Hk, T, D)
    mixed = F.scaled_dot_product_attention(
        q, k, v, seen, batch.dropout, is_causal=seen is None, scale=attn.scale, enable_gqa=True
    )
    return mixed.transpose(1, 2)


def attention_on_cpu(q, kv, attn: Attention, batch: WholeTexts) -> Tensor:
    """
    As `fused_attention`; in bfloat16, for texts that are not long, by two batched matrix products
    where the model is one that train.py makes. Forward and backward then take half the time of
    flash attention (26 against 59 ms at B=32, H=4, T=256, D=64; 14 against 66 at H=2).
    """
    B, T, H, D = q.shape
    is_plain = q.dtype == torch.bfloat16 and attn.Hk == H
    if T > SHORT or attn.window or attn.softcap or not is_plain:
        return fused_attention(q, kv, attn, batch)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, *kv))  # (B H, T, D)
    future = torch.full((T, T), -torch.inf, dtype=q.dtype).triu(1)
    mask = future.expand(B * H, T, T)
    scores = torch.baddbmm(mask, q, k.mT, alpha=attn.scale)  # (B H, T, T), scaled and masked
    weights = F.dropout(scores.softmax(-1), batch.dropout)
    mixed = (weights @ v).view(B, H, T, D)
    return mixed.transpose(1, 2)


def chunked_loss(x, layer: torch.nn.Linear, targets, softcap: float = 0.0) -> Tensor:
    """
    As `model.loss`: x (B, T, C), a layer with weight (V, C), targets (B, T) int64, -100 where there
    is none. A capped loss (Gemma 2) is the reference's.
    """
    if softcap:
        return TORCH.loss(x, layer, targets, softcap)
    dtype = x.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    return ChunkedHeadLoss.apply(x.flatten(0, 1), layer.weight, targets.flatten(), dtype)


class ChunkedHeadLoss(torch.autograd.Function):
    """
    Fused linear cross-entropy in chunks: the mean over the rows of x @ head.T, a few rows at a
    time. Logits of 4,096 tokens by 4,096 words are 64 MB, and passing them through memory for
    softmax, loss and gradients took half of a training step on a CPU. Here the gradient of a chunk,
    softmax - one hot, is made while its logits are in the cache; backward only scales it.
    """

    @staticmethod
    def forward(ctx, x, head, targets, dtype):
        """
        x (N, C), head (V, C), targets (N,) with -100 where there is none; matrix products in
        `dtype`.
        """
        w = head.to(dtype)
        count = (targets >= 0).sum().clamp(min=1)
        total = x.new_zeros(())
        dx = torch.empty_like(x)
        dw = torch.zeros_like(head)
        for first in range(0, len(x), ROWS):
            rows = slice(first, first + ROWS)
            x_rows = x[rows].to(dtype)
            t = targets[rows, None]
            is_scored = t >= 0
            t = t.clamp(min=0)
            # one buffer (rows, V) is in turn logits, exponentials and gradient: each pass finds it
            # in the cache
            scores = (x_rows @ w.T).float()
            scores -= scores.amax(-1, keepdim=True)
            target_scores = scores.gather(1, t)
            scores.exp_()
            norm = scores.sum(-1, keepdim=True)
            losses = norm.log() - target_scores
            total += (losses * is_scored).sum()
            if any(ctx.needs_input_grad):
                scores *= is_scored / norm
                scores.scatter_add_(1, t, -is_scored.float())
                grad = scores.to(dtype)
                dx[rows] = grad @ w
                dw += grad.T @ x_rows
        ctx.save_for_backward(dx, dw, count)
        return total / count

    @staticmethod
    def backward(ctx, grad):
        dx, dw, count = ctx.saved_tensors
        scale = grad / count
        return dx * scale, dw * scale, None, None


# --------------------------------------------------------------------------------------------------
# Operators of Llama alone: autograd would pass over memory for each small operation


def add_rms_norm(x, delta, norm: torch.nn.Module):
    """As `model.add_norm`."""
    # in lower precision x is what a matrix product made (Gemma's post-norms)
    if not isinstance(norm, RMSNorm) or x.dtype != torch.float32:
        return add_norm(x, delta, norm)
    if delta is not None:
        x = x + delta
    return x, FusedRMSNorm.apply(x, norm.weight, norm.eps)


class FusedRMSNorm(torch.autograd.Function):
    """x (.., n) / sqrt(mean x^2 + eps) * weight (n,), in fp32."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (.., 1)
        mean_square = length.square() / x.shape[-1]
        shrink = (mean_square + eps).rsqrt()
        ctx.save_for_backward(x, weight, shrink)
        return (x * shrink).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, shrink = ctx.saved_tensors
        along = grad * x
        rows = along.flatten(0, -2)
        dweight = shrink.flatten() @ rows
        # the result does not depend on the length of x: no gradient along x
        mean = along @ weight / x.shape[-1]
        dx = grad * weight
        dx.mul_(shrink)
        share = mean[..., None] * shrink**3
        dx.addcmul_(x, share, value=-1)
        return dx, dweight, None


def rotate(q, k, rotation):
    """As `model.rotate`."""
    cos, sin = (x.to(q.dtype) for x in rotation)
    return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)


class Rotate(torch.autograd.Function):
    """x (B, T, heads, D), turned; the gradient is turned back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return turn(grad, *ctx.saved_tensors, -1), None, None


def turn(x, cos, sin, sign: int):
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = x.chunk(2, -1)
    left, right = turned.chunk(2, -1)
    torch.mul(first, cos, out=left)
    left.addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=right)
    right.addcmul_(first, sin, value=sign)
    return turned


def gated_linear(x, layer, activation=None, gated=False, partial_sums=False):
    """As `model.linear`."""
    if gated and activation == "silu":
        return SwiGLU.apply(layer(x))
    return linear(x, layer, activation, gated)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of the two halves of x."""

    @staticmethod
    def forward(ctx, x):
        gate, up = x.chunk(2, -1)
        opened = F.silu(gate)
        ctx.save_for_backward(x, opened)
        return opened * up

    @staticmethod
    def backward(ctx, grad):
        x, opened = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        torch.mul(grad, opened, out=dup)
        torch.mul(grad, up, out=dgate)
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        return dx


# --------------------------------------------------------------------------------------------------
# Muon, the optimizer of the matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's a, b, c: of a singular value s, a s + b s^3 + c s^5


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
    SGD with Nesterov momentum. Each update is orthogonalized, so that every direction of a matrix
    moves equally far, and the rare ones are learnt, too. Weight decay is cautious (Liang et al.
    2024): it takes only from weights that the update makes smaller. torch's own Muon multiplies in
    bfloat16, which many CPUs only emulate, and takes matrices one by one; here the dtype is chosen,
    and matrices (rows, columns) of one shape are updated as one batch.
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

    def update_group(self, params: list, lr: float, momentum: float, weight_decay: float, rate=1.0):
        """
        Update N matrices of one shape (rows, columns) in place, by their gradients. `rate`: the
        part of the peak learning rate that lr is.
        """
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
        batch = batch.reshape(len(params), *params[0].shape)
        for p, update in zip(params, batch, strict=True):
            if weight_decay:
                p.sub_(p * (p * update > 0), alpha=weight_decay * lr * rate)
            p.sub_(update, alpha=lr * stretch)


def orthogonalize(x: Tensor) -> Tensor:
    """
    Newton-Schulz iteration: applies the quintic five times to every singular value of the matrices
    x (N, rows, columns), which leaves them between 0.7 and 1.2, near enough to 1 for an update.
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    a, b, c = QUINTIC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(5):
        square = x @ x.mT
        odd = torch.baddbmm(square, square, square, beta=b, alpha=c)  # b x x' + c (x x')^2
        x = torch.baddbmm(x, odd, x, beta=a)
    return x
