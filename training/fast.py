"""
The operators that train: `model.TORCH` with faster attention and a loss that needs less memory.

    logits, loss = model(tokens, targets, training_ops(device))

They know the models that train.py makes: no windows, no soft caps, one KV head a query head.

Letters as in model.py; N = B T rows.
"""

import torch
import torch.nn.functional as F

from model import TORCH, Attention, Ops, RMSNorm, WholeTexts, add_norm, linear

SHORT = 512  # up to so many tokens T, scores (T, T) fit into a CPU's cache
ROWS = 256  # so many rows of logits fit, too


def training_ops(device: torch.device | str) -> Ops:
    """The operators to train with on a device."""
    # these are for CPUs: on a GPU torch.compile fuses the reference's
    if torch.device(device).type == "cpu":
        return TORCH._replace(
            name="training on a CPU",
            rotate=rotate,
            add_norm=add_rms_norm,
            attend=attend_on_cpu,
            linear=gated_linear,
            loss=chunked_loss,
        )
    return TORCH._replace(name="training on a GPU", attend=fused_attention)


def attend_on_cpu(q, kv, attn: Attention, batch: WholeTexts) -> torch.Tensor:
    """As `fused_attention`, by the faster of two ways."""
    if q.dtype == torch.bfloat16 and q.shape[1] <= SHORT:
        return attention_by_products(q, kv, attn, batch)
    return fused_attention(q, kv, attn, batch)


def fused_attention(q, kv, attn: Attention, batch: WholeTexts) -> torch.Tensor:
    """torch's flash attention, causal: q, k and v (B, T, H, D) -> as q."""
    assert not (attn.window or attn.softcap), "training has no windows and no soft caps"
    q, k, v = (x.transpose(1, 2) for x in (q, *kv))  # (B, H, T, D)
    mixed = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=batch.dropout, scale=attn.scale
    )
    return mixed.transpose(1, 2)


def attention_by_products(q, kv, attn: Attention, batch: WholeTexts) -> torch.Tensor:
    """
    Two batched matrix products. In bfloat16 on a CPU, forward and backward take half
    the time of flash attention (26 against 59 ms at B=32, H=4, T=256, D=64; 14 against 66 at H=2).
    """
    B, T, H, D = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, *kv))  # (B H, T, D)
    future = torch.full((T, T), -torch.inf, dtype=q.dtype).triu(1)
    mask = future.expand(B * H, T, T)
    scores = torch.baddbmm(mask, q, k.mT, alpha=attn.scale)  # (B H, T, T), scaled and masked
    weights = F.dropout(scores.softmax(-1), batch.dropout)
    mixed = (weights @ v).view(B, H, T, D)
    return mixed.transpose(1, 2)


def chunked_loss(x, layer: torch.nn.Linear, targets, softcap: float = 0.0) -> torch.Tensor:
    """
    As `model.loss`: x (B, T, C), a layer with weight (V, C), targets (B, T) int64, -100 where there
    is none.
    """
    assert not softcap, "training has no soft caps"
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
        count = (targets >= 0).sum()
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
    if not isinstance(norm, RMSNorm):
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
        # x may change its direction alone: what goes along it is taken away
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
