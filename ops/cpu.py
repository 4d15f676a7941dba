"""
What only a CPU needs: matrices packed for oneDNN.

    # a copy with PackedLinear, or Int8Linear, for its linear layers
    model = packed_for_cpu(model, quantize="none")

`--quantize int8` are linear layers of 8-bit integers. The compiled step (`--compile`) is in
compiled.py.
"""

import os
import shutil
import sys
import timeit
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import GPT, RMSNorm

# rows of x for which oneDNN chooses the layout; measured, other numbers differ little
PACKED_FOR_ROWS = 64
BEYOND_CACHES = 2**28  # bytes
LARGEST = 127  # of the 8-bit integers; the smallest is -127
MUCH_FASTER = 0.85  # of the packed time: plain weights are kept, too, if they take less


def cpp_compiler() -> str | None:
    """The C++ compiler, which torch.compile needs on a CPU."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX") or usual)


class PackedLinear(nn.Module):
    """
    A linear layer whose weights [out, in] are kept in the layout that oneDNN multiplies fastest, in
    fp32 or bf16; x and the result are fp32. No compiler needed, and no gradients. On an AMD EPYC
    with AVX-512, from 1 to 256 rows, packed fp32 is 2 to 3 times as fast as `F.linear` at width 768
    (equally fast at one row of width 384), and packed bf16 1.1 to 1.9 times as fast as packed fp32.
    Up to `plain_rows` rows are multiplied with `plain`, the same weights [in, out], by `F.linear`:
    see `rows_of_plain`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, plain=None, plain_rows=0):
        super().__init__()
        weight = weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        # no parameter: it has the dtype of the weights
        self.bias = None if bias is None else bias.detach()
        self.plain = plain
        self.plain_rows = plain_rows

    def forward(self, x: Tensor) -> Tensor:
        if self.plain_rows and x.shape[:-1].numel() <= self.plain_rows:
            return F.linear(x, self.plain.t(), self.bias)
        x = x.to(self.weight.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "").float()


class UnpackedLinear(nn.Module):
    """As PackedLinear where oneDNN packs no weights of this dtype: bf16 needs AVX-512."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()


def int8_is_exact() -> bool:
    """
    Whether oneDNN adds up products of 8-bit integers exactly here. Without VNNI instructions it
    adds two of them in 16 bits, which 2 * 255 * 127 overflows. The product is tried: unlike a list
    of what the CPU can do, it also knows ONEDNN_MAX_CPU_ISA.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    linear = Int8Linear(torch.ones(1, 2), None)
    return linear(torch.ones(1, 2)).item() > 1.9  # and not 0.02


def int8_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [out, in] as integers from -127 to 127, and the fp32 scale of each output, [out]."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).clamp(min=1e-12) / LARGEST
    integers = (weight / scale[:, None]).round().to(torch.int8)
    return integers, scale


class Int8Linear(nn.Module):
    """
    A linear layer of 8-bit integers, by oneDNN (W8A8, dynamic quantization). Weights [out, in] take
    a quarter of fp32's bytes and have one scale for each output. Rows of x, fp32 as the result is,
    are rounded as well, each with a scale of its own: whatever else is in the batch, a row gets the
    same result, to the last bit. At width 768 the layer takes 0.3 to 0.7 of fp32's time. Rounding
    takes 15 us, more than one row of width 384 saves. (torch's own product, of int8 weights and
    bf16 rows, takes a third of fp32's time there, but from 64 rows on more than all of it.)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.bias = bias
        integers, scale = int8_weights(weight)
        self.weight = torch.ops.onednn.qlinear_prepack(integers, None)
        self.scale = scale / LARGEST  # x has integers of the same range
        self.half = torch.tensor(128.5)
        self.zero = torch.zeros_like(scale, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        # (.., 1); where it is 0 the row's integers mean nothing, and the result is 0 times them
        largest = x.abs().amax(-1, keepdim=True)
        # rounded to 1 .. 255, where 128 stands for 0; a number for `half` would take twice as long
        steps = torch.add(self.half, x / largest, alpha=LARGEST).to(torch.uint8)
        rows = (steps, 1.0, 128)
        weights = (self.weight, self.scale, self.zero)
        no_bias = None  # y is not scaled yet
        result = (1.0, 0, torch.float32, "none", [], "")
        y = torch.ops.onednn.qlinear_pointwise(*rows, *weights, no_bias, *result)
        y *= largest
        return y if self.bias is None else y.add_(self.bias)


def rows_of_plain(weights: list[Tensor]) -> int:
    """
    Up to how many rows (0, 1 or 16) torch's own product with plain fp32 weights is so much faster
    than the packed one that it is worth to keep them, too. It depends on the CPU and the width, so
    both are timed, for some milliseconds: on an Intel Xeon one row takes 0.5 (width 384) to 0.75
    (width 576) of the packed time and 16 rows 0.7 (width 384) to 1.1, on an AMD EPYC plain weights
    are no faster. The weights are all of several layers, in turn: what a cache still holds of one
    is multiplied in another time, and some shapes gain less than others.
    """
    packed = [PackedLinear(weight, None) for weight in weights]
    plain = [partial(F.linear, weight=weight.t().contiguous().t()) for weight in weights]

    def seconds(layers: list[Callable], rows: int) -> float:
        inputs = [torch.ones(rows, weight.shape[1]) for weight in weights]

        def sweep():
            for layer, x in zip(layers, inputs, strict=True):
                layer(x)

        return min(timeit.repeat(sweep, number=1, repeat=5))

    for rows in 16, 1:
        if seconds(plain, rows) < MUCH_FASTER * seconds(packed, rows):
            return rows
    return 0


class ShortRMSNorm(nn.Module):
    """
    As model.RMSNorm of fp32, in four operations, where a CPU's F.rms_norm takes nine: a token has
    two to four norms in each layer. x / sqrt(mean of x^2 + eps) is sqrt(n) x / sqrt(|x|^2 + n eps).
    """

    def __init__(self, norm: RMSNorm):
        super().__init__()
        n = len(norm.weight)
        self.weight = nn.Parameter(norm.weight * n**0.5)
        self.register_buffer("least", torch.tensor((n * norm.eps) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(self.least)
        return (x / length).mul_(self.weight)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN is here and packs weights of this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def packed_for_cpu(model: GPT, quantize: str = "none") -> GPT:
    """
    A copy of the model for serving on a CPU, its matrices packed, if oneDNN can, in the dtype that
    they have or, with `quantize` "int8", as integers; all else is fp32. Raises ValueError for
    "int8" without oneDNN or VNNI instructions, and for what is neither.
    """
    weight = model.wte.weight
    if quantize == "int8":
        if weight.device.type != "cpu" or not int8_is_exact():
            needs = "needs a CPU with VNNI instructions, and oneDNN"
            raise ValueError(f"--quantize int8 {needs}, not {weight.device}")
        return with_short_norms(with_layers(model, Int8Linear))
    if quantize != "none":
        raise ValueError(f"quantize is {quantize!r}: there is none and int8")
    if not can_pack(weight):
        return with_short_norms(with_layers(model, UnpackedLinear))
    rows = 0
    if weight.dtype == torch.float32:
        count = 1 + BEYOND_CACHES // sum(weight.nbytes for weight in model.h[0].parameters())
        enough = [w.detach() for w in model.h[:count].parameters() if w.ndim == 2]
        rows = rows_of_plain(enough)

    def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        plain = weight.detach().t().contiguous() if rows else None
        return PackedLinear(weight, bias, plain, rows)

    def pack_head(weight: Tensor, bias: None) -> PackedLinear:
        plain = weight.detach().t() if rows else None  # of a tied head the embedding: no copy
        return PackedLinear(weight, None, plain, min(rows, 1))

    return with_short_norms(with_layers(model, pack, pack_head))


def pack_if_quantized(model: GPT, quantize: str = "none") -> GPT:
    """`Ops.pack_weights` of all but CPUs: the model itself, unless 8-bit integers are asked for."""
    return model if quantize == "none" else packed_for_cpu(model, quantize)


def with_short_norms(model: GPT) -> GPT:
    """The model itself, changed in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                setattr(parent, name, ShortRMSNorm(child))
    return model


def with_layers(model: GPT, layer: Callable, head: Callable | None = None) -> GPT:
    """
    A copy of the model with layer(weight, bias) for each linear layer, `head` for the last one,
    fp32 for all else. Unchanged weights share their memory with the model.
    """
    shared = {id(weight): nn.Parameter(weight.detach(), False) for weight in model.parameters()}
    model = deepcopy(model, shared)  # which takes these for copies
    for block in model.h:
        for parent in (block.attn, block.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, layer(child.weight, child.bias))
    model.lm_head = (head or layer)(model.lm_head.weight, None)
    # packed weights are no parameters, and stay what they are
    return model.float()
