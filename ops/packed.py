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
ROUNDED_AT_ONCE = 2**18  # weights


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


def int8_weights(weight: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """
    Weights [out, in] as integers from -127 to 127, and the fp32 scale of each output, [out]. A few
    rows at a time: larger temporaries would leave gaps in memory, between the integers.
    """
    count = max(1, ROUNDED_AT_ONCE // weight.shape[1])
    integers = torch.empty_like(weight, dtype=torch.int8)
    scale = torch.empty_like(weight[:, 0], dtype=torch.float32)
    if not weight.is_meta:  # else there is nothing to round, and torch would import its compiler
        parts = (tensor.split(count) for tensor in (weight.detach(), integers, scale))
        for rows, integers_of_rows, scale_of_rows in zip(*parts, strict=True):
            rows = rows.float()
            largest = rows.abs().amax(1)
            scale_of_rows.copy_(largest.clamp(min=1e-12) / LARGEST)
            steps = rows / scale_of_rows[:, None]
            integers_of_rows.copy_(steps.round())
    return nn.Parameter(integers, False), nn.Parameter(scale, False)


def largest_activation(K: int) -> int:
    """Of 16 bits, or so large that a sum of K products with 8-bit weights stays below 2^31."""
    return min(2**15 - 1, (2**31 - 1) // (LARGEST * K))


class Int8Weights(nn.Module):
    """
    Weights of 8 bits, one scale for each row. A state dict may have them in fp32 or bf16: they are
    quantized when they are loaded, so a model without weights (meta device) is quantized first.
    """

    def __init__(self, weight: nn.Parameter, scale: nn.Parameter):
        super().__init__()
        self.out_features = len(weight)
        self.weight = weight
        self.scale = scale

    def _load_from_state_dict(self, state: dict, prefix: str, *rest):
        weight = state.get(prefix + "weight")
        if weight is not None and weight.is_floating_point():
            state[prefix + "weight"], state[prefix + "scale"] = int8_weights(weight)
        super()._load_from_state_dict(state, prefix, *rest)


class Int8Linear(Int8Weights):
    """
    A linear layer of 8-bit weights, one scale for each output. Each row of x is rounded, too, to 11
    to 15 bits and a sign; the sums of the products of these integers are exact, whoever computes
    them: cpu.c, which is meant to, or `forward`, which needs no compiler and is slow.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(*int8_weights(weight))
        if bias is not None:
            bias = nn.Parameter(bias.detach().float(), False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        most = largest_activation(x.shape[-1])
        largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        steps = torch.full_like(largest, most) / largest  # most / largest would round twice
        integers = (x * steps).round()
        # in fp64 no sum is rounded
        sums = F.linear(integers.double(), self.weight.double()).float()
        y = sums * (self.scale * (largest / most))
        return y if self.bias is None else y + self.bias


class Int8Embedding(Int8Weights):
    """An embedding of 8-bit weights."""

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


def check_quantize(quantize: str, device: torch.device):
    """Raises ValueError for 8-bit integers on a GPU, and for other formats."""
    if quantize not in ("none", "int8"):
        raise ValueError(f"quantize is {quantize!r}: there is none and int8")
    if quantize != "none" and device.type == "cuda":
        raise ValueError(f"--quantize int8 is for CPUs, here the device is {device}: leave it out")


def is_quantized(model: GPT) -> bool:
    return isinstance(model.wte, Int8Embedding)


def quantized_if_asked(model: GPT, quantize: str = "none") -> GPT:
    """The model itself, or a copy in 8-bit integers. Raises ValueError for these on a GPU."""
    check_quantize(quantize, model.wte.weight.device)
    return model if quantize == "none" else quantized(model)


def packed_for_cpu(model: GPT, quantize: str = "none") -> GPT:
    """
    A copy of the model for serving on a CPU with torch: its matrices packed, if oneDNN can, in the
    dtype that they have, or quantized; all else is fp32.
    """
    if quantize != "none" or is_quantized(model):
        return with_short_norms(quantized(model))
    packed = PackedLinear if can_pack(model.wte.weight) else UnpackedLinear
    return with_short_norms(with_layers(model, packed))


def quantized(model: GPT) -> GPT:
    """
    A copy of the model with `Int8Linear` and `Int8Embedding`; all else is fp32. If it has these
    already, their integers are shared.
    """
    model = with_layers(model, Int8Linear)
    if is_quantized(model):
        return model
    head = model.lm_head
    is_tied = model.config.tied
    weights = (head.weight, head.scale) if is_tied else int8_weights(model.wte.weight)
    model.wte = Int8Embedding(*weights)
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
    model = shared_copy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, layer(child.weight, child.bias))
    # packed weights are no parameters, and stay what they are
    return model.float()


def shared_copy(model: GPT) -> GPT:
    """A copy of the model whose weights are the same memory."""
    shared = {id(weight): nn.Parameter(weight.detach(), False) for weight in model.parameters()}
    return deepcopy(model, shared)  # which takes these for copies
