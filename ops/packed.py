"""
Linear layers of a CPU in torch, for what cpu.c does not compute: weights in bf16, and all weights
where there is no C compiler.

    model = packed_for_cpu(model)                          # a copy, its matrices packed for oneDNN
    model = quantized(model)                               # a copy with weights of 8-bit integers

cpu.c computes with the same `Int8Linear`, equal to the bit, and much faster.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import GPT, RMSNorm

# rows of x for which oneDNN chooses the layout; measured, other numbers differ little
PACKED_FOR_ROWS = 64
LARGEST = 127  # of the 8-bit integers; the smallest is -127


class PackedLinear(nn.Module):
    """
    A linear layer whose weights [out, in] are kept in the layout that oneDNN multiplies fastest, in
    fp32 or bf16; x and the result are fp32. No compiler needed, and no gradients. On an AMD EPYC
    with AVX-512, from 1 to 256 rows, packed fp32 is 2 to 3 times as fast as `F.linear` at width 768
    (equally fast at one row of width 384), and packed bf16 1.1 to 1.9 times as fast as packed fp32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        weight = weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        # no parameter: it has the dtype of the weights
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
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


def int8_weights(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [out, in] as integers from -127 to 127, and the fp32 scale of each output, [out]."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).clamp(min=1e-12) / LARGEST
    integers = (weight / scale[:, None]).round().to(torch.int8)
    return integers, scale


def largest_activation(K: int) -> int:
    """Of 16 bits, or so large that a sum of K products with 8-bit weights stays below 2^31."""
    return min(2**15 - 1, (2**31 - 1) // (LARGEST * K))


class Int8Linear(nn.Module):
    """
    A linear layer of 8-bit weights, one scale for each output. Each row of x is rounded, too, to 11
    to 15 bits and a sign; the sums of the products of these integers are exact, whoever computes
    them: cpu.c, which is meant to, or `forward`, which needs no compiler and is slow.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.scale = int8_weights(weight)
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        most = largest_activation(x.shape[-1])
        largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        integers = (x * (most / largest)).round()
        # in fp64 no sum is rounded
        sums = F.linear(integers.double(), self.weight.double()).float()
        y = sums * (self.scale * (largest / most))
        return y if self.bias is None else y + self.bias


class Int8Embedding(nn.Module):
    """An embedding of 8-bit weights, those of `linear`: the head, if it is tied."""

    def __init__(self, linear: Int8Linear):
        super().__init__()
        self.weight = linear.weight
        self.scale = linear.scale

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens] * self.scale[tokens, None]


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


def quantized_if_asked(model: GPT, quantize: str = "none") -> GPT:
    """The model itself, or a copy in 8-bit integers. Raises ValueError for these on a GPU."""
    if quantize == "none":
        return model
    device = model.wte.weight.device
    if device.type != "cpu":
        raise ValueError(f"--quantize int8 is for CPUs, here the device is {device}: leave it out")
    return quantized(model)


def packed_for_cpu(model: GPT, quantize: str = "none") -> GPT:
    """
    A copy of the model for serving on a CPU with torch: its matrices packed, if oneDNN can, in the
    dtype that they have, or quantized; all else is fp32.
    """
    if quantize != "none":
        return with_short_norms(quantized(model))
    packed = PackedLinear if can_pack(model.wte.weight) else UnpackedLinear
    return with_short_norms(with_layers(model, packed))


def quantized(model: GPT) -> GPT:
    """A copy of the model with `Int8Linear` and `Int8Embedding`; all else is fp32."""
    is_tied = model.config.tied
    model = with_layers(model, Int8Linear)
    model.wte = Int8Embedding(model.lm_head if is_tied else Int8Linear(model.wte.weight, None))
    return model


def with_short_norms(model: GPT) -> GPT:
    """The model itself, changed in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, RMSNorm):
                setattr(parent, name, ShortRMSNorm(child))
    return model


def with_layers(model: GPT, layer: Callable) -> GPT:
    """
    A copy of the model with layer(weight, bias) for each linear layer, the head too, and fp32 for
    all else. Unchanged weights share their memory with the model.
    """
    shared = {id(weight): nn.Parameter(weight.detach(), False) for weight in model.parameters()}
    model = deepcopy(model, shared)  # which takes these for copies
    for block in model.h:
        for parent in (block.attn, block.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, layer(child.weight, child.bias))
    model.lm_head = layer(model.lm_head.weight, None)
    # packed weights are no parameters, and stay what they are
    return model.float()
