"""
`--compile`: on a CPU, the decode step of a request that runs alone as one compiled function.

    decode_one = compile_decode_one(model, quantize, kv)      # 10 to 60 s
    logits = decode_one(batch)                                # stores K and V, too

Letters: T = 1 token, C context length, L layers, H query heads, Hk KV heads, D head size, V
vocabulary.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import Batch
from model import GPT, TORCH, Attention, Ops, attention
from ops.cpu import LARGEST, UnpackedLinear, cpp_compiler, int8_weights, with_layers


def materialized(x: Tensor) -> Tensor:
    """
    x itself; the compiler stores it before it is used. Else it would compute a norm, or what a row
    is rounded to, anew for each row of the weights: half of the time in int8, a tenth in fp32.
    """
    return x.as_strided(x.shape, x.stride())


class OneRowLinear(UnpackedLinear):
    """
    As PackedLinear or Int8Linear, but for one row (GEMV): x [1, in] -> [1, out] fp32. Written as a
    sum of products, of which the compiler makes a loop that reads the weights as fast as memory
    can; libraries reach half of that.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, quantize: str):
        super().__init__(weight, bias)
        self.scale = None
        if quantize == "int8":
            self.weight, scale = int8_weights(self.weight)
            self.scale = scale / LARGEST

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            rounded = x.to(self.weight.dtype).float()
            y = (self.weight * materialized(rounded)).sum(-1)
        else:
            largest = x.abs().amax().clamp(min=1e-30)
            steps = (x * (LARGEST / largest) + 128.5).floor() - 128
            y = (self.weight * materialized(steps)).sum(-1) * self.scale * largest
        if self.bias is not None:
            y = y + self.bias
        return y[None]


@dataclass
class OneToken:
    """The batch of the compiled step."""

    tokens: Tensor  # [1]
    positions: Tensor  # [1]
    # window -> [2, 1, Hk, C]: pool rows of what its layers see, new token excluded
    kv_rows: dict[int, Tensor]
    new: list[Tensor]  # K and V of the new token, of each layer so far: [2, 1, Hk, D]
    ops: Ops
    dropout: float = 0.0
    rotations: dict | None = None  # as in model.WholeTexts


def store_kv(k: Tensor, v: Tensor, kv: Tensor, batch: OneToken) -> Tensor:
    """
    As model.store_kv, but k and v [1, Hk, D] are kept in batch.new: a compiled graph that wrote
    them into the layer's pool kv, which is returned, would copy the pool.
    """
    batch.new.append(torch.stack((k, v)))
    return kv


def attend(q: Tensor, kv: Tensor, attn: Attention, batch: OneToken) -> Tensor:
    """q [1, H, D] attends to the context in one layer's pool kv and to the new token."""
    _, H, D = q.shape
    context = F.embedding(batch.kv_rows[attn.window], kv.view(-1, D))  # [2, 1, Hk, C, D]
    new = batch.new[-1][:, :, :, None]  # [2, 1, Hk, 1, D]
    k, v = torch.cat([context, new], dim=3)
    Hk = k.shape[1]
    queries = q.view(1, Hk, H // Hk, D)
    if attn.softcap:
        mixed = attention(queries, k, v, None, scale=attn.scale, softcap=attn.softcap)
    else:
        mixed = F.scaled_dot_product_attention(queries, k, v, scale=attn.scale)
    return mixed.reshape(1, H, D)


ONE_TOKEN = TORCH._replace(name="compiled", store_kv=store_kv, attend=attend)


def compiled_step(model: GPT, quantize: str) -> Callable:
    """
    Returns a function step(tokens [1], positions [1], kv_rows {window: [2, 1, Hk, C]}, kv [L, 2,
    num_blocks + 1, Hk, S, D]) -> (logits [1, V], new K, V [L, 2, 1, Hk, D]), where kv_rows are pool
    rows of the context, without the new token. It compiles in its first call, in which each C must
    be marked as dynamic; after that only values and C may vary: guards are off, so another shape
    gives wrong results silently.
    """
    model = with_layers(model, partial(OneRowLinear, quantize=quantize))

    def step(tokens, positions, kv_rows, kv):
        batch = OneToken(tokens, positions, kv_rows, [], ONE_TOKEN)
        x = model.hidden(batch, kv)
        return model.logits(x, ONE_TOKEN), torch.stack(batch.new)

    # torch keeps what it compiled at the code object: a copy, so that no other model's is found
    step.__code__ = step.__code__.replace()
    no_guards = torch.compiler.skip_all_guards_unsafe  # to check all took 0.2 ms a step
    return torch.compile(step, fullgraph=True, options={"guard_filter_fn": no_guards})


def check_can_compile(ops: Ops, device: torch.device):
    """Raises ValueError, with what to change, where --compile cannot work."""
    if device.type != "cpu":
        raise ValueError(f"--compile is for CPUs, here the device is {device}: leave --compile out")
    if ops.name != "cpu":
        raise ValueError(f"--compile wants --attention auto, not {ops.name}: leave one of them out")
    if not cpp_compiler():
        named = os.environ.get("CXX")
        missing = f"CXX names {named!r}" if named else "there is no g++"
        mend = "let CXX name one, or leave --compile out"
        raise ValueError(f"--compile needs a C++ compiler, {missing}: {mend}")


def compile_decode_one(model: GPT, quantize: str, kv: Tensor) -> Callable:
    """
    The step of one decoding request as decode_one(batch) -> logits [1, V], compiled now; it stores
    K and V in the pool. Raises ValueError if the compiler fails.
    """
    L, _, _, Hk, _, D = kv.shape
    # two tensors: one, given twice, would become one input of the graph
    token = torch.zeros(1, dtype=torch.int64)
    position = torch.zeros(1, dtype=torch.int64)
    rows = {}
    for C, window in enumerate(set(model.config.windows), 3):  # of equal C one size would be made
        rows[window] = torch.zeros(2, 1, Hk, C, dtype=torch.int64)
        torch._dynamo.mark_dynamic(rows[window], 3)  # the context length
    started = time.perf_counter()
    print("compiling ..", end="", file=sys.stderr, flush=True)
    try:
        step = compiled_step(model, quantize)
        step(token, position, rows, kv)
    except Exception as error:  # of the compiler, its cache on disk, or torch
        print(file=sys.stderr)
        lines = [line for line in str(error).splitlines() if not line.startswith("backend=")]
        why = next(filter(None, lines), "")
        raise ValueError(
            f"--compile failed ({type(error).__name__}: {why}): mend the C++ compiler, let "
            "TORCHINDUCTOR_CACHE_DIR name a folder with room to write, or leave --compile out"
        ) from error
    print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr)

    def decode_one(batch: Batch) -> Tensor:
        rows = {}
        for window, plan in batch.prepared.items():
            (context,) = plan.calls
            rows[window] = context.kv_rows[..., :-1].contiguous()
        logits, new = step(batch.tokens, batch.positions, rows, kv)
        pool = kv.view(L, -1, D)
        pool.index_copy_(1, plan.store_rows, new.view(L, -1, D))
        return logits

    return decode_one
