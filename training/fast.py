"""
Faster versions of parts of a training step: the model's operators (`model.TORCH_OPS` with faster
attention and loss and, on a GPU, a bfloat16 residual stream), the optimizer Muon, and a step as one
CUDA graph.

    logits, loss = model(tokens, targets, training_ops(device))
    Muon(maps_of(block), process, lr=0.02, momentum=0.95, weight_decay=0.0).step()
    train_step = CudaGraph(train_step)

They work for all model families. The letters are those of model.py, and N = B T rows.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import (
    TORCH_OPS,
    Attention,
    Block,
    Ops,
    RMSNorm,
    WholeTexts,
    add_norm,
    linear,
    may_see,
    soft_cap,
)

SHORT = 512  # with at most this many tokens T, scores (T, T) fit in a CPU's cache


def training_ops(device: torch.device | str, compiled=False) -> Ops:
    """
    Return the operators for training on a device. On a GPU, `compiled` also compiles the loss.
    """
    # these are only for CPUs, because on a GPU, torch.compile fuses the reference operators
    if torch.device(device).type == "cpu":
        return TORCH_OPS._replace(
            rotate=rotate,
            add_norm=add_rms_norm,
            norm=lambda x, norm: add_rms_norm(x, None, norm)[1],
            attend=attention_on_cpu,
            linear=gated_linear,
            loss=partial(chunked_loss, chunks=CPU_CHUNKS),
        )
    chunks = GPU_CHUNKS
    if compiled:
        chunks = chunks._replace(derive=torch.compile(to_gradients, dynamic=False))
    loss = partial(chunked_loss, chunks=chunks)
    return TORCH_OPS._replace(embed=embed, attend=fused_attention, loss=loss)


def embed(tokens, positions, wte, wpe, scale: float) -> Tensor:
    """
    Like `model.embed`, but in the dtype used for matrix products. The residual stream keeps this
    dtype, which halves its memory traffic (a GPT-2 step on an H100 takes 62.9 instead of 66.5 ms).
    """
    x = TORCH_OPS.embed(tokens, positions, wte, wpe, scale)
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    return x


def fused_attention(q, kv, attn: Attention, batch: WholeTexts) -> Tensor:
    """
    Compute attention with torch's flash attention: q (B, T, H, D), k and v (B, T, Hk, D) -> the
    shape of q. Flash attention does not support soft caps, so Gemma 2 uses the reference.
    """
    if attn.softcap:
        return TORCH_OPS.attend(q, kv, attn, batch)
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
    Like `fused_attention`, but for a CPU. For short bfloat16 texts, and models like those that
    train.py creates, attention uses two batched matrix products. Forward and backward passes then
    take at most half as long as flash attention (26 instead of 59 ms at B=32, H=4, T=256, D=64; 14
    instead of 66 ms at H=2).
    """
    B, T, H, D = q.shape
    is_plain = q.dtype == torch.bfloat16 and attn.Hk == H
    if T > SHORT or attn.window or attn.softcap or not is_plain:
        return fused_attention(q, kv, attn, batch)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, *kv))  # (B H, T, D)
    mask = torch.full((T, T), -torch.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(mask, q, k.mT, alpha=attn.scale)  # (B H, T, T), scaled and masked
    weights = F.dropout(scores.softmax(-1), batch.dropout)
    mixed = (weights @ v).view(B, H, T, D)
    return mixed.transpose(1, 2)


def to_gradients(logits, V: int, targets, is_scored, softcap: float):
    """
    Overwrite logits (rows, >= V): the first V columns with their softmax, the rest with 0. This is
    the gradient of each row's loss, except for the target, whose gradient is 1 less. Rows that are
    not scored become 0. targets and is_scored are (rows, 1). Return the losses and the targets'
    gradients, (rows, 1) fp32.
    """
    scores = logits.float()
    if softcap:
        scores = soft_cap(scores, softcap)
        slope = 1 - (scores / softcap).square()
    # one buffer holds logits, exponentials and gradients in turn, so it stays in a CPU's cache
    scores[:, V:] = -torch.inf
    scores -= scores.amax(-1, keepdim=True)
    wanted = scores.gather(1, targets)
    scores.exp_()
    total = scores.sum(-1, keepdim=True)
    losses = (total.log() - wanted) * is_scored
    wanted_grads = (-losses).expm1()  # exp(-loss) is the target's probability
    scores *= is_scored / total
    if softcap:
        scores *= slope
        wanted_grads *= slope.gather(1, targets)
    logits.copy_(scores)
    return losses, wanted_grads


class Chunks(NamedTuple):
    """The chunks in which a device processes the logits."""

    rows: int  # number of rows at a time
    multiple: int  # the vocabulary is padded to a multiple of this
    derive: Callable = to_gradients  # or its compiled version


CPU_CHUNKS = Chunks(256, 1)  # fits in the cache
# A GPU is slow to read rows that are not aligned to 16 bytes. A GPT-2 step on an H200 takes 73.4 ms
# and 12.5 GiB. With 4,096 rows, it takes 73.7 ms and 12.1 GiB, and with 16,384 rows, 73.1 ms and
# 13.3 GiB. Without dropout, it takes 67.7 ms and 11.7 GiB; with `model.loss`, compiled, 71.2 ms and
# 16.7 GiB.
GPU_CHUNKS = Chunks(8192, 128)


def chunked_loss(
    x, layer: torch.nn.Linear, targets, softcap: float = 0.0, *, chunks: Chunks
) -> Tensor:
    """
    Like `model.loss`, but in chunks. x is (B, T, C), the layer's weight is (V, C), and targets are
    (B, T) int64, with -100 where there is no target.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    # evaluation needs no gradient, but the weight would still require one
    weight = layer.weight if torch.is_grad_enabled() else layer.weight.detach()
    rows = x.flatten(0, 1), targets.flatten()
    return ChunkedHeadLoss.apply(*rows, weight, dtype, softcap, chunks)


class ChunkedHeadLoss(torch.autograd.Function):
    """
    Fused linear cross-entropy in chunks: the mean loss over the rows of x @ head.T, computed a few
    rows at a time. Without chunks, the logits of 4,096 tokens with a vocabulary of 4,096 are 64 MB,
    and passing them through memory for softmax, loss and gradients took half of a training step on
    a CPU. With GPT-2's vocabulary, the logits of 32 x 1,024 tokens are 3.3 GB. Here, a chunk's
    gradient (softmax - one hot) replaces its logits and is used immediately. The backward pass only
    scales the results.
    """

    @staticmethod
    def forward(ctx, x, targets, head, dtype, softcap: float, chunks: Chunks):
        """
        x is (N, C), targets are (N,), with -100 where there is no target, and head is (V, C).
        Matrix products use `dtype`.
        """
        V = len(head)
        w = head.to(dtype)
        if V % chunks.multiple:
            w = F.pad(w, (0, 0, 0, -V % chunks.multiple))
        buffer = w.new_empty(min(chunks.rows, len(x)), len(w))
        count = (targets >= 0).sum().clamp(min=1)
        total = torch.zeros((), device=x.device)
        dx = torch.empty_like(x)
        dw = torch.zeros_like(w, dtype=head.dtype)
        for first in range(0, len(x), chunks.rows):
            rows = slice(first, first + chunks.rows)
            x_rows = x[rows].to(dtype)
            t = targets[rows, None]
            is_scored = t >= 0
            t = t.clamp(min=0)
            logits = torch.mm(x_rows, w.T, out=buffer[: len(t)])
            losses, wanted_grads = chunks.derive(logits, V, t, is_scored, softcap)
            total += losses.sum()
            if any(ctx.needs_input_grad):
                grad = logits.scatter_(1, t, wanted_grads.to(dtype))
                dx[rows] = grad @ w
                dw += grad.T @ x_rows
        ctx.save_for_backward(dx, dw[:V], count)
        return total / count

    @staticmethod
    def backward(ctx, grad):
        dx, dw, count = ctx.saved_tensors
        scale = grad / count
        return dx * scale, None, dw * scale, None, None, None


# --------------------------------------------------------------------------------------------------
# Operators for Llama-like models: autograd would pass over memory for each small operation


def add_rms_norm(x, delta, norm: torch.nn.Module):
    """Like `model.add_norm`, but as one autograd operation."""
    # x has lower precision if it comes from a matrix product (Gemma's post-norms)
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
        # the result does not depend on the length of x, so there is no gradient along x
        mean = along @ weight / x.shape[-1]
        dx = grad * weight
        dx.mul_(shrink)
        share = mean[..., None] * shrink**3
        dx.addcmul_(x, share, value=-1)
        return dx, dweight, None


def rotate(q, k, rotation):
    """Like `model.rotate`, but as one autograd operation each for q and k."""
    cos, sin = (x.to(q.dtype) for x in rotation)
    return Rotate.apply(q, cos, sin), Rotate.apply(k, cos, sin)


class Rotate(torch.autograd.Function):
    """Rotate x (B, T, heads, D). The backward pass rotates the gradient back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate_halves(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotate_halves(grad, cos, -sin), None, None


def rotate_halves(x, cos, sin):
    turned = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = x.chunk(2, -1)
    left, right = turned.chunk(2, -1)
    torch.mul(first, cos, out=left)
    left.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right)
    right.addcmul_(first, sin)
    return turned


def gated_linear(x, layer, activation=None, gated=False, partial_sums=False):
    """Like `model.linear`, but with SwiGLU as one autograd operation."""
    if gated and activation == "silu":
        return SwiGLU.apply(layer(x))
    return linear(x, layer, activation, gated)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, where gate and up are the two halves of x."""

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
# Muon, the optimizer for matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's a, b, c: s becomes a s + b s^3 + c s^5


def maps_of(block: Block) -> dict[Tensor, int]:
    """
    Return a block's matrices, each with the number of maps stacked in it: 3 for queries, keys and
    values, 2 for the gate and the values that it gates, otherwise 1.
    """
    maps = {p: 1 for p in block.parameters() if p.ndim == 2}
    maps[block.attn.c_attn.weight] = 3
    if block.mlp.gated:
        maps[block.mlp.c_fc.weight] = 2
    return maps


class Muon(torch.optim.Optimizer):
    """
    SGD with Nesterov momentum and orthogonalized updates. Every direction of a matrix then moves
    equally far, so rare directions are also learnt. Weight decay is cautious (Liang et al. 2024):
    it applies only to weights that the update makes smaller. torch's own Muon multiplies in
    bfloat16, which many CPUs only emulate, and processes matrices one at a time. Here, the process
    determines the dtype, maps of the same size are orthogonalized as one batch, and processes share
    the work.
    """

    def __init__(self, matrices: dict[Tensor, int], process, **settings: float):
        """
        matrices: see `maps_of`
        process: see training/machine.py
        settings: lr, momentum, weight_decay
        """
        self.maps = matrices
        self.process = process
        alike = {}
        for p in matrices:
            alike.setdefault(tuple(sorted(self.size(p))), []).append(p)
        groups = [{"params": same} for same in alike.values()]
        super().__init__(groups, settings)
        for p in matrices:
            self.state[p]["momentum"] = torch.zeros_like(p)

    def size(self, p: Tensor) -> tuple[int, int]:
        """Return the number of rows and columns of each map in a matrix."""
        return len(p) // self.maps[p], p.shape[1]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.update_group(**group)

    def update_group(self, params: list, lr, momentum: float, weight_decay: float, rate=1.0):
        """
        Update matrices in place from their gradients. lr is the learning rate, a number or a tensor
        (), and `rate` is its fraction of the peak.
        """
        grads = [p.grad for p in params]
        means = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(means, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, means, momentum)  # Nesterov: look one step ahead
        batch = []
        for p, update in zip(params, updates, strict=True):
            rows, columns = self.size(p)
            maps = update.view(-1, rows, columns)
            batch.append(maps.mT if rows > columns else maps)
        # one pass over memory: `out` both converts the maps and concatenates them
        batch = torch.cat(batch, out=batch[0].new_empty(0, dtype=self.process.dtype))
        batch = orthogonalize_together(batch, self.process)
        batch = batch.split([self.maps[p] for p in params])
        lr = torch.as_tensor(lr, device=batch[0].device)
        for p, maps in zip(params, batch, strict=True):
            rows, columns = self.size(p)
            maps = maps.mT if rows > columns else maps
            stretch = max(1, rows / columns) ** 0.5
            update = maps.reshape(p.shape)
            if weight_decay:
                update = update + p * (p * update > 0) * (weight_decay * rate / stretch)
            p.addcmul_(update, lr, value=-stretch)  # in float32, even if the update is not


def orthogonalize_together(batch: Tensor, process) -> Tensor:
    """Like `orthogonalize`, but each process computes an equal share of the zero-padded batch."""
    missing = -len(batch) % process.world
    batch = F.pad(batch, (0, 0, 0, 0, 0, missing))
    own = batch.chunk(process.world)[process.rank]
    return process.gather(orthogonalize(own))[: len(batch) - missing]


def orthogonalize(x: Tensor) -> Tensor:
    """
    Newton-Schulz iteration: apply the quintic five times to every singular value of the matrices x
    (N, rows, columns), rows <= columns. The values are then between 0.7 and 1.2, which is close
    enough to 1 for an update.
    """
    a, b, c = QUINTIC
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    for _ in range(5):
        square = x @ x.mT
        odd = torch.baddbmm(square, square, square, beta=b, alpha=c)  # b x x' + c (x x')^2
        x = torch.baddbmm(x, odd, x, beta=a)
    return x


# --------------------------------------------------------------------------------------------------
# The step as one CUDA graph

WARM_UP = 3  # number of ordinary steps before the capture, which compile and choose kernels


class CudaGraph:
    """
    `step(x, y, rate)`, captured once and then replayed. Python would launch the step's hundreds of
    kernels more slowly than a GPU runs them. (With Shakespeare on an H200, a step takes 6.3 instead
    of 10.2 ms.) A batch with another shape causes a new capture. Each replay draws new random
    numbers from the current seed.
    """

    def __init__(self, step: Callable):
        self.step = step
        self.shape = None

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        if x.shape != self.shape:
            self.shape = x.shape
            self.inputs = (x.clone(), y.clone(), torch.ones((), device=x.device))
            self.graph = torch.cuda.CUDAGraph()
            self.calls = 0
        static_x, static_y, static_rate = self.inputs
        static_x.copy_(x)
        static_y.copy_(y)
        static_rate.fill_(rate)
        self.calls += 1
        if self.calls <= WARM_UP:
            return self.step(*self.inputs)
        if self.calls == WARM_UP + 1:
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.result = self.step(*self.inputs)  # captured, not yet run
        self.graph.replay()
        return self.result.clone()
