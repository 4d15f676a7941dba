"""
The operators that train: `model.TORCH` with attention and loss that are faster, each on its own
kind of machine.

    logits, loss = model(tokens, targets, training_ops(device))

Letters as in model.py; N = B * T rows.
"""

import torch
import torch.nn.functional as F

from model import TORCH, Ops, WholeTexts

SHORT = 512  # tokens up to which a CPU attends in bf16 by matrix products: their T x T scores fit its cache


def training_ops(device: str | torch.device) -> Ops:
    if torch.device(device).type == "cpu":
        return TORCH._replace(name="training on a CPU", attend=attend_on_cpu, loss=chunked_loss)
    # the compiler fuses the reference's loss
    return TORCH._replace(name="training on a GPU", attend=fused_attention)


def fused_attention(q: torch.Tensor, kv: tuple, batch: WholeTexts) -> torch.Tensor:
    """As model.attend, by torch's fused kernel: q (B, T, H, D) -> as q."""
    k, v = kv
    grouped = q.shape[2] != k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
    mixed = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=batch.dropout, enable_gqa=grouped
    )
    return mixed.transpose(1, 2)


def attend_on_cpu(q: torch.Tensor, kv: tuple, batch: WholeTexts) -> torch.Tensor:
    _, T, H, _ = q.shape
    k, v = kv
    if q.dtype == torch.bfloat16 and T <= SHORT and k.shape[2] == H:
        return attend_by_products(q, k, v, batch.dropout)
    return fused_attention(q, kv, batch)


def attend_by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> torch.Tensor:
    """
    Causal attention (B, T, H, D) with its T x T scores: on a CPU, forward and backward in bfloat16
    take half the time of torch's fused one (26 against 59 ms at B=32, H=4, T=256, D=64; 14 against
    66 at H=2).
    """
    B, T, H, D = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B H, T, D)
    future = torch.full((T, T), -torch.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(future.expand(B * H, T, T), q, k.mT, alpha=D**-0.5)
    weights = F.dropout(scores.softmax(-1), dropout)
    mixed = (weights @ v).view(B, H, T, D)
    return mixed.transpose(1, 2)


def chunked_loss(x: torch.Tensor, layer: torch.nn.Linear, targets: torch.Tensor) -> torch.Tensor:
    """
    As model.loss: x (B, T, C), a layer with weight (V, C), targets (B, T) int64, -100 where there
    is none.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    return ChunkedHeadLoss.apply(x.flatten(0, 1), layer.weight, targets.flatten(), dtype)


class ChunkedHeadLoss(torch.autograd.Function):
    """
    Mean cross-entropy of the logits x @ head.T, a few rows at a time. Logits of 4,096 tokens by
    4,096 words are 64 MB, and passing them through memory for softmax, loss and gradients took half
    of a training step on a CPU. Here the gradient of a chunk, softmax - one hot, is made while its
    logits are in the cache; backward only scales it.
    """

    ROWS = 256

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
    ):
        """
        x (N, C), head (V, C), targets (N,) with -100 where there is none; matrix products in
        `dtype`.
        """
        rows = ChunkedHeadLoss.ROWS
        w = head.to(dtype)
        count = (targets >= 0).sum()
        total = x.new_zeros(())
        dx = torch.empty_like(x)
        dw = torch.zeros_like(head)
        for x_rows, dx_rows, t in zip(
            x.split(rows), dx.split(rows), targets.split(rows), strict=True
        ):
            x_rows = x_rows.to(dtype)
            there = (t >= 0)[:, None]
            t = t.clamp(min=0)[:, None]
            # one buffer (rows, V) is in turn logits, exponentials and gradient: each pass finds it
            # in the cache
            scores = (x_rows @ w.T).float()
            scores -= scores.amax(-1, keepdim=True)
            target_scores = scores.gather(1, t)
            scores.exp_()
            norm = scores.sum(-1, keepdim=True)
            total += ((norm.log() - target_scores) * there).sum()
            if any(ctx.needs_input_grad):
                scores.mul_(there / norm).scatter_add_(1, t, -there.float())
                grad = scores.to(dtype)
                dx_rows.copy_(grad @ w)
                dw += grad.T @ x_rows
        ctx.save_for_backward(dx, dw, count)
        return total / count

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        dx, dw, count = ctx.saved_tensors
        scale = grad / count
        return dx * scale, dw * scale, None, None
