"""
Linear layers in the weight formats used on a CPU: fp32 in panels (for cpu.c), 8-bit integers (for
cpu.c or torch), and bf16 packed by oneDNN (for torch).

    model = pack_weights(model, "int8")             # a copy with weights as 8-bit integers
    model = pack_weights(model, layer=Bf16Linear)   # a copy with matrices in bf16, the rest in fp32
    model = pack_weights(model, layer=PanelLinear)  # a copy with matrices in panels for cpu.c

If the model has no weights yet (meta device), neither does the copy. checkpoint.py then calls
`fill` for each layer as it loads the weights.
"""

import mmap
from contextlib import suppress
from copy import deepcopy
from math import prod

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import GPT

# oneDNN chooses the layout for this many rows of x; other numbers make little difference
PACKED_FOR_ROWS = 64
LARGEST = 127  # the largest 8-bit weight; the smallest is -127
PANEL = 32  # number of outputs whose weights are stored together, as in cpu.c
ARENA = 2**26  # number of bytes to map at a time


class Packed(nn.Module):
    """
    Base class of linear layers that store their weights in another layout. `allocate` reserves
    memory for weights [out, in], and `fill(weight)` copies the weights into that memory. `parts` is
    2 for a gated layer, whose halves have N outputs each.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int = 1, arena=None):
        super().__init__()
        self.parts = parts
        self.N = len(weight) // parts
        self.bias = None if bias is None else nn.Parameter(bias.detach(), False)
        self.allocate(weight.detach(), arena)


def can_pack() -> bool:
    """Return whether oneDNN is available and can multiply bf16, which requires AVX-512."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Bf16Linear(Packed):
    """
    A linear layer with bf16 weights; x and the result are fp32. If oneDNN can multiply bf16, the
    weights are stored in its fastest layout. This layer needs no compiler, and has no gradients.
    """

    def allocate(self, weight: Tensor, arena=None):
        self.weight = nn.Parameter(weight, False)

    def fill(self, weight: Tensor):
        if can_pack():
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        else:
            weight = weight.clone()  # the caller reuses its memory
        self.allocate(weight)

    def _apply(self, *_):
        """Stay in bf16 when the rest of the model is converted to fp32."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight, self.bias).float()
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "").float()


class Arena:
    """
    Memory that holds a model's weights back to back. It uses 2 MB pages if the system has them,
    because a step reads all the weights, and spends less time on page lookups if there are fewer
    pages. A page takes up memory only once it has been written to.
    """

    def __init__(self):
        self.memory = b""
        self.used = 0

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        count = prod(shape)
        size = count * dtype.itemsize  # a multiple of 32, because there are only whole panels
        if self.used + size > len(self.memory):
            self.memory = mmap.mmap(-1, max(size, ARENA), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):  # a system without such pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            self.used = 0
        zeros = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.used)
        self.used += size
        return nn.Parameter(zeros.view(shape), False)


def panels_of(weight: Tensor, parts: int) -> list[Tensor]:
    """Split weights [out, in] into panels [32 or fewer, in]. Each part starts a new panel."""
    return [rows for part in weight.chunk(parts) for rows in part.split(PANEL)]


class PanelLinear(Packed):
    """A linear layer in cpu.c's layout: fp32 weights [panels, in, 32], zero-padded."""

    def allocate(self, weight: Tensor, arena: Arena):
        panels = len(panels_of(weight, self.parts))
        self.weight = arena.zeros(panels, weight.shape[1], PANEL)

    def fill(self, weight: Tensor):
        for panel, rows in zip(self.weight, panels_of(weight, self.parts), strict=True):
            panel[:, : len(rows)] = rows.T


def largest_activation(K: int) -> int:
    """
    Return the largest integer that activations are rounded to. It has 16 bits, or fewer if K is
    large, because a sum of K products with 8-bit weights must stay below 2^31.
    """
    return min(2**15 - 1, (2**31 - 1) // (LARGEST * K))


class Int8Linear(Packed):
    """
    A linear layer with 8-bit weights [out, in]. There is one scale per output, and also one per
    input: some inputs are large and have small weights, which would be rounded to only a few steps
    by output scales alone. Each row of x is multiplied by the input scales and rounded to a sign
    and 11 to 15 bits. Sums of products of these integers are exact, so it does not matter which
    code computes them. Normally cpu.c does; `forward` needs no compiler, but is slow.
    """

    def allocate(self, weight: Tensor, arena: Arena):
        rows = PANEL * len(panels_of(weight, self.parts))
        self.weight = arena.zeros(rows, weight.shape[1], dtype=torch.int8)
        self.scale = arena.zeros(rows)
        self.columns = nn.Parameter(torch.zeros(weight.shape[1]), False)
        if self.parts == 1:  # cpu.c reads whole panels; the outputs for the padding are ignored
            self.weight.data = self.weight[: self.N]
            self.scale.data = self.scale[: self.N]

    def fill(self, weight: Tensor):
        """
        Quantize these weights. Input j's scale is the maximum of |w[i, j]| / max |w[i, :]| over all
        outputs i.
        """
        panels = []
        for rows in panels_of(weight, self.parts):
            first = PANEL * len(panels)
            panels.append((slice(first, first + len(rows)), rows))
        self.columns.fill_(1e-12)
        for outputs, rows in panels:
            shares = rows.float().abs()
            largest = shares.amax(1).clamp(min=1e-12)
            self.scale[outputs] = largest / LARGEST
            shares /= largest[:, None]
            shares.nan_to_num_()  # NaN or infinity in one output must not affect the others
            torch.maximum(self.columns, shares.amax(0), out=self.columns)
        for outputs, rows in panels:
            steps = rows.float() / self.scale[outputs, None]
            steps /= self.columns
            self.weight[outputs] = steps.round_()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.columns
        most = largest_activation(x.shape[-1])
        largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        steps = torch.full_like(largest, most) / largest  # most / largest would round twice
        integers = (x * steps).round()
        # sums in fp64 are exact here
        sums = F.linear(integers.double(), self.weight.double()).float()
        y = sums * (self.scale * (largest / most))
        y = y.unflatten(-1, (self.parts, -1))[..., : self.N].flatten(-2)
        return y if self.bias is None else y + self.bias


class Int8Embedding(Packed):
    """An embedding that shares the weights of an `Int8Linear`."""

    def __init__(self, layer: Int8Linear):
        nn.Module.__init__(self)
        self.weight = layer.weight
        self.scale = layer.scale
        self.columns = layer.columns
        self.fill = layer.fill

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens] * self.scale[tokens, None] * self.columns


def pack_weights(model: GPT, quantize: str = "none", layer: type[Packed] | None = None) -> GPT:
    """
    Return a copy of the model whose linear layers are instances of `layer`. With quantize="int8",
    they are `Int8Linear`, and the embedding is an `Int8Embedding`. Everything else is fp32. If the
    model already has such layers, the copy shares their weights. If there is nothing to convert to,
    return the model itself.
    """
    if quantize not in ("none", "int8"):
        raise ValueError(f"quantize is {quantize!r}: use none or int8")
    if quantize == "int8":
        layer = Int8Linear
    if layer is None:
        return model
    # make deepcopy share the weights instead of copying them
    shared = {id(weight): nn.Parameter(weight.detach(), False) for weight in model.parameters()}
    model = deepcopy(model, shared)
    arena = Arena()

    def packed(linear: nn.Module, parts: int = 1) -> Packed:
        bias = getattr(linear, "bias", None)  # an embedding has no bias
        new = layer(linear.weight, bias, parts, arena)
        if not linear.weight.is_meta:
            new.fill(linear.weight.detach())
        return new

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                parts = 2 if name == "c_fc" and parent.gated else 1
                setattr(parent, name, packed(child, parts))
    if layer is PanelLinear and model.config.tied:
        model.wte = model.lm_head
    if layer is Int8Linear and isinstance(model.wte, nn.Embedding):
        model.wte = Int8Embedding(model.lm_head if model.config.tied else packed(model.wte))
    return model.float()
