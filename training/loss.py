"""
The loss of a training step on a GPU, in Triton: softmax, loss and its gradient in one launch. The
gradient takes the place of the logits, which for 32 x 1024 tokens of GPT-2 are 3.3 GB: to pass over
them takes less than 3 ms of a step, and took 4.4 in what torch.compile makes.

    loss = head_loss(x, layer, targets)     # as model.loss

Letters: N rows of logits, V vocabulary, C width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import jit, tl, triton

BLOCK = 4096  # logits that a program takes at a time, at most; more was slower


@jit
def load_logits(logits, t, V, stride, CAP: tl.constexpr):
    """
    Numbers t of a row, capped where CAP is not 0, -inf from V on. To load up to the stride, a
    multiple of 128, a thread takes several at once; V may be odd.
    """
    x = tl.load(logits + t, mask=t < stride).to(tl.float32)
    if CAP > 0:
        x = CAP * (2.0 * tl.sigmoid(2.0 / CAP * x) - 1.0)  # CAP * tanh(x / CAP)
    return tl.where(t < V, x, -float("inf"))


@jit
def loss_kernel(
    logits, targets, losses, V, stride, CAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """
    Grid (N,): a program takes a row of logits (N, stride). Its cross-entropy goes to losses (N,)
    fp32, 0 where there is no target; the row becomes the gradient, softmax - one hot, 0 from V on.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)

    # of each column of the blocks: the greatest logit, and the sum of exponentials below it
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = load_logits(logits, start + columns, V, stride, CAP)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    greatest = tl.max(top)
    total = tl.sum(total * tl.exp(top - greatest))

    scored = target >= 0
    wanted = load_logits(logits, tl.maximum(target, 0), V, stride, CAP)
    tl.store(losses + row, tl.where(scored, tl.log(total) + greatest - wanted, 0.0))
    scale = tl.where(scored, 1.0 / total, 0.0)
    tl.debug_barrier()  # no thread writes what another still reads
    for start in range(0, stride, BLOCK):  # now from the L2 cache
        t = start + columns
        x = load_logits(logits, t, V, stride, CAP)
        grad = tl.exp(x - greatest) * scale - (t == target)
        if CAP > 0:
            grad *= tl.where(t < V, 1.0 - x / CAP * (x / CAP), 0.0)  # the slope of the cap
        tl.store(logits + t, grad, mask=t < stride)


class HeadLoss(torch.autograd.Function):
    """The mean cross-entropy of x (N, C) @ weight (>= V, C) transposed, and targets (N,)."""

    @staticmethod
    def forward(ctx, x, weight, targets, V: int, softcap: float):
        grads = x @ weight.T  # logits, soon their gradient
        targets = targets.contiguous()  # windows of one token have every other number
        losses = torch.empty(len(x), device=x.device, dtype=torch.float32)
        stride = grads.stride(0)
        block = min(BLOCK, triton.next_power_of_2(stride))
        loss_kernel[(len(x),)](grads, targets, losses, V, stride, softcap, block, num_warps=8)
        count = (targets >= 0).sum().clamp(min=1)
        ctx.save_for_backward(x, weight, grads, count)
        return losses.sum() / count

    @staticmethod
    def backward(ctx, grad):
        x, weight, grads, count = ctx.saved_tensors
        scale = grad / count
        return (grads @ weight) * scale, (grads.T @ x) * scale, None, None, None


def head_loss(x: Tensor, layer: torch.nn.Linear, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """
    As `model.loss`. The vocabulary is filled up to a multiple of 128, since a GPU reads other rows
    slowly.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    V = len(layer.weight)
    weight = F.pad(layer.weight.to(dtype), (0, 0, 0, -V % 128))
    x = x.flatten(0, 1).to(dtype)
    return HeadLoss.apply(x, weight, targets.flatten(), V, softcap)
