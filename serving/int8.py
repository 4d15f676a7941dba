"""
`--quantize int8`: linear layers of 8-bit integers, on CPUs with VNNI instructions.

    y = Int8Linear(weight, bias)(x)      # x [.., in] and y [.., out] fp32, weight [out, in]
"""

import torch
import torch.nn as nn
from torch import Tensor

LARGEST = 127  # of the integers, and the smallest is -127


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
