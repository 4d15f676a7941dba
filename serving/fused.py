"""
What else of a decode step is worth a kernel: its inputs, linear layers, norms. A small model's step
is otherwise spent on launches: plain torch has some 230 of them, here are 91, and most start before
the one before has ended.

    y = add_norm(x, delta, norm)                      # x += the sum of delta's parts, in place; returns norm(x)
    q = project_qkv(y, attention, kv, batch)          # stores K and V; up to 256 rows on CUDA: one launch
    y = linear(y, layer, activation="gelu_new")       # as well
    delta = linear(y, layer, parts=True)              # K inputs cut into parts: more programs at once

Each has torch's operations as its fallback, with the same name, signature and in-place effect.
Letters: n requests that decode, M blocks per table, S block size; of a layer, R rows, K inputs, N
outputs, P parts of a sum.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels import Batch, early, gdc_wait, jit, padded, shared_memory, tl, triton, wait

# --------------------------------------------------------------------------------------------------
# The inputs of decodes, from what the engine knows of each row


class DecodeInputs(NamedTuple):
    tokens: torch.Tensor  # [n] int64, and so on as in Batch
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor  # int32
    block_tables: torch.Tensor  # [n, M] int32


def decode_inputs(rows, new_blocks, last_token, context_len, block_tables, S: int) -> DecodeInputs:
    """
    The inputs of requests that decode one token each, in place of a dozen launches one with Triton.
    rows and new_blocks [n] int64: their places in last_token and context_len [N + 1] int64 and
    block_tables [N + 1, M] int32, and the block that the new token begins, or -1. In place:
    block_tables get the new blocks, context_len grows by one, but for the last row, which is
    nobody's.
    """
    positions = context_len[rows]
    blocks = torch.where(new_blocks >= 0, new_blocks, block_tables[rows, positions // S])
    block_tables[rows, positions // S] = blocks.int()
    context_len[rows] = positions + 1
    context_len[-1:].zero_()
    slots = blocks * S + positions % S
    return DecodeInputs(
        last_token[rows], positions, slots, (positions + 1).int(), block_tables[rows]
    )


@jit
def decode_inputs_kernel(
    rows, new_blocks, last_token, context_len, block_tables, tokens, positions, slots, lens, tables, nobody, M,
    WIDTH: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (n,): a program does what decode_inputs does for one request."""
    wait(EARLY)
    i, m = tl.program_id(0), tl.arange(0, WIDTH)
    row, new_block = tl.load(rows + i), tl.load(new_blocks + i)
    position, table = tl.load(context_len + row), block_tables + row * M
    blocks = tl.load(table + m, mask=m < M, other=0).to(tl.int64)
    blocks = tl.where((m == position // S) & (new_block >= 0), new_block, blocks)
    block = tl.sum(tl.where(m == position // S, blocks, 0), axis=0)
    tl.store(table + position // S, block.to(tl.int32), mask=new_block >= 0)
    tl.store(tables + i.to(tl.int64) * M + m, blocks.to(tl.int32), mask=m < M)
    tl.store(tokens + i, tl.load(last_token + row))
    tl.store(positions + i, position)
    tl.store(slots + i, block * S + position % S)
    tl.store(lens + i, (position + 1).to(tl.int32))
    tl.store(context_len + row, position + 1, mask=row != nobody)


def decode_inputs_triton(
    rows, new_blocks, last_token, context_len, block_tables, S: int
) -> DecodeInputs:
    """As decode_inputs."""
    n, M = len(rows), block_tables.shape[1]
    tokens, positions, slots = rows.new_empty(3, n)
    lens, tables = block_tables.new_empty(n), block_tables.new_empty(n, M)
    decode_inputs_kernel[(n,)](
        rows, new_blocks, last_token, context_len, block_tables, tokens, positions, slots, lens, tables,
        len(last_token) - 1, M, WIDTH=triton.next_power_of_2(M), S=S, **early(rows),
    )  # fmt: skip
    return DecodeInputs(tokens, positions, slots, lens, tables)


def embed(
    tokens: torch.Tensor, positions: torch.Tensor, wte: torch.nn.Embedding, wpe: torch.nn.Embedding
):
    """
    wte(tokens) + wpe(positions): tokens and positions [T] int64 -> [T, C], in one launch on CUDA.
    """
    if tokens.is_cuda and triton:
        return embed_triton(tokens, positions, wte, wpe)
    return wte(tokens) + wpe(positions)


@jit
def embed_kernel(
    tokens, positions, wte, wpe, out, C: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr
):
    """
    Grid (T,): a program does what embed does for one token. Nobody starts before all have ended:
    unlike `wait`, for the kernels that follow read the step's inputs, and those were written before
    this one, without waiting.
    """
    if EARLY:
        gdc_wait()
    t, c = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    token = tl.load(wte + tl.load(tokens + t) * C + c, mask=c < C).to(tl.float32)
    position = tl.load(wpe + tl.load(positions + t) * C + c, mask=c < C).to(tl.float32)
    tl.store(out + t * C + c, (token + position).to(out.dtype.element_ty), mask=c < C)


def embed_triton(tokens: torch.Tensor, positions: torch.Tensor, wte, wpe) -> torch.Tensor:
    """As embed."""
    assert wte.weight.is_contiguous() and wpe.weight.is_contiguous(), (
        "embeddings must be contiguous"
    )
    T, C = len(tokens), wte.weight.shape[1]
    out = wte.weight.new_empty(T, C)
    embed_kernel[(T,)](
        tokens, positions, wte.weight, wpe.weight, out, C=C, WIDTH=triton.next_power_of_2(C), **early(out)
    )  # fmt: skip
    return out


# --------------------------------------------------------------------------------------------------
# Linear layers with what stands around them

ACTIVATIONS = {
    "gelu_new": partial(F.gelu, approximate="tanh"),  # GPT-2's own, transformers' name for it
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
LINEAR_ROWS = (
    256  # up to here the kernels; beyond, the matrix products fill the chip and are cuBLAS's
)
HEAD = 8192  # outputs above which a layer is the head: cuBLAS takes five times as long where 8 does not divide them


def linear(
    x: torch.Tensor, layer, activation: str | None = None, parts: bool = False
) -> torch.Tensor:
    """
    activation(layer(x)): x [R, K], a layer with weight [N, K] and bias [N] or None -> [R, N], in
    one launch on CUDA for up to LINEAR_ROWS rows, and for any number of them if it is the head, in
    16 bits. With `parts`, the result may also be several fp32 matrices [P, R, N], whose sum it is:
    `add_norm` adds them.
    """
    ours = len(x) <= LINEAR_ROWS
    if len(layer.weight) > HEAD:
        ours = len(x) == 1 or x.element_size() == 2
    if x.is_cuda and triton and ours:
        return linear_triton(x, layer, activation, parts)
    if (
        activation == "gelu_new" and x.is_cuda and layer.bias is not None
    ):  # cuBLAS does it as it stores the product
        return torch._addmm_activation(layer.bias, x, layer.weight.T, use_gelu=True)
    y = layer(x) if callable(layer) else F.linear(x, layer.weight, layer.bias)
    return ACTIVATIONS[activation](y) if activation else y


def project_qkv(x: torch.Tensor, attention, kv: torch.Tensor, batch: Batch) -> torch.Tensor:
    """
    The queries [T, H, D] of x [T, C], an `Attention` of model.py; keys and values go to their slots
    in one layer's pool kv [2, num_blocks + 1, Hk, S, D].
    """
    if x.is_cuda and triton and len(x) <= LINEAR_ROWS:
        return linear_triton(x, attention.c_attn, kv=kv, slot_mapping=batch.slot_mapping).view(
            len(x), -1, attention.D
        )
    q, k, v = attention.heads(linear(x, attention.c_attn))
    batch.backend.store_kv(k, v, kv, batch)
    return q


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, norm: torch.nn.LayerNorm) -> torch.Tensor:
    """
    Add `delta`, of `linear` or None, to x [R, K] in place. Returns norm(x), in the same launch on
    CUDA.
    """
    if x.is_cuda and triton:
        return add_norm_triton(x, delta, norm)
    return norm(x if delta is None else x.add_(delta))


@jit
def activate(y, ACTIVATION: tl.constexpr):
    """As ACTIVATIONS; GELU's tanh(u) is 2 sigmoid(2 u) - 1."""
    if ACTIVATION == "gelu_new":
        return y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # 2 sqrt(2 / pi)
    if ACTIVATION == "gelu":
        return 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    y = tl.maximum(y, 0.0)
    return y * y if ACTIVATION == "relu2" else y


@jit
def finish(
    acc, bias, out, kv, slot_mapping, which_stride, r, n, part, R,
    N: tl.constexpr, ACTIVATION: tl.constexpr, Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """
    activation(acc + bias) to rows r and columns n of a part of out [P, R, N]; bias, for the first,
    may be None. With kv, one layer's pool, the columns are those of q, k and v: out [R, H D] gets
    q, the slots of the rows get k and v.
    """
    if bias is not None:
        acc += tl.load(bias + n, mask=n + part * N < N, other=0.0).to(tl.float32)[
            None, :
        ]  # for part 0
    if ACTIVATION is not None:
        acc = activate(acc, ACTIVATION)
    real, wide = (r < R)[:, None] & (n < N)[None, :], N
    if kv is not None:
        wide = N - 2 * Hk * D
        i, slot = n[None, :] - wide, tl.load(slot_mapping + r, mask=r < R, other=0)[:, None]
        to = (
            kv
            + i // (Hk * D) * which_stride
            + ((slot // S * Hk + i // D % Hk) * S + slot % S) * D
            + i % D
        )
        tl.store(to, acc.to(kv.dtype.element_ty), mask=real & (i >= 0))
        real &= i < 0
    at = (part * R + r).to(tl.int64)[:, None] * wide + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=real)


@jit
def vector_kernel(
    x, weight, bias, out, kv, slot_mapping, which_stride,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
    Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """
    Grid (N / COLS,): a program computes COLS outputs of the one row there is, too little for tensor
    cores. Its weights are under way before the kernel before has ended.
    """
    n, k = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, BLOCK)
    weight += n.to(tl.int64)[:, None] * K
    w = tl.load(weight + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    wait(EARLY)
    acc = tl.zeros([COLS, BLOCK], tl.float32)
    for _ in range(0, K, BLOCK):
        acc += w.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        k += BLOCK
        w = tl.load(weight + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    acc = tl.sum(acc, axis=1)[None, :]
    finish(
        acc,
        bias,
        out,
        kv,
        slot_mapping,
        which_stride,
        tl.arange(0, 1),
        n,
        0,
        1,
        N,
        ACTIVATION,
        Hk,
        S,
        D,
    )


@jit
def matrix_kernel(
    x, weight, bias, out, kv, slot_mapping, which_stride, R,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
    Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """
    Grid (N / COLS, R / ROWS, P): a program computes COLS outputs of ROWS rows from LENGTH = K / P
    inputs, BLOCK at a time: one of the P parts of out [P, R, N].
    """
    wait(EARLY)
    r, n = (
        tl.program_id(1) * ROWS + tl.arange(0, ROWS),
        tl.program_id(0) * COLS + tl.arange(0, COLS),
    )
    part = tl.program_id(2)
    x += r.to(tl.int64)[:, None] * K
    weight += n.to(tl.int64)[:, None] * K
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(part * LENGTH, tl.minimum(part * LENGTH + LENGTH, K), BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(x + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(weight + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(value, w.T, acc, input_precision="ieee")
    finish(acc, bias, out, kv, slot_mapping, which_stride, r, n, part, R, N, ACTIVATION, Hk, S, D)


@jit
def add_norm_kernel(
    x, delta, weight, bias, out, eps, R,
    P: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """
    Grid (R,): a program adds P rows, those of delta [P, R, K], to its row of x [R, K], and
    normalises that to `out` as nn.LayerNorm does; bias may be None.
    """
    wait(EARLY)
    k = tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * K + k
    value = tl.load(x + at, mask=k < K, other=0.0).to(tl.float32)
    for part in tl.static_range(P):
        value += tl.load(delta + part * R * K + at, mask=k < K, other=0.0).to(tl.float32)
    if P:
        tl.store(x + at, value.to(x.dtype.element_ty), mask=k < K)
    value = tl.where(k < K, value - tl.sum(value, axis=0) / K, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    value *= tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=k < K)


def add_norm_triton(x: torch.Tensor, delta: torch.Tensor | None, norm) -> torch.Tensor:
    """As add_norm."""
    assert x.is_contiguous() and (delta is None or delta.is_contiguous()), (
        "x and delta must be contiguous"
    )
    (R, K), out = x.shape, torch.empty_like(x)
    add_norm_kernel[(R,)](
        x, delta, norm.weight, norm.bias, out, norm.eps, R,
        P=0 if delta is None else delta.numel() // x.numel(), K=K, WIDTH=triton.next_power_of_2(K), **early(x),
    )  # fmt: skip
    return out


def linear_triton(
    x: torch.Tensor, layer, activation: str | None = None, parts=False, kv=None, slot_mapping=None
) -> torch.Tensor:
    """
    As linear; or with a layer's pool and the slots of the rows as project_qkv, but q is [R, H D].
    """
    (R, K), N = x.shape, len(layer.weight)
    assert x.is_contiguous() and layer.weight.is_contiguous(), "rows and weights must be contiguous"
    assert not (parts and activation), "the activation is of the sum, not of its parts"
    assert kv is None or kv.is_contiguous(), "the pool of a layer must be contiguous"
    _, _, Hk, S, D = (1, 1, 1, 1, 0) if kv is None else kv.shape
    given = {"N": N, "K": K, "ACTIVATION": activation, "Hk": Hk, "S": S, "D": D} | early(x)
    store = kv, slot_mapping, None if kv is None else kv.stride(0)
    wide, out_dtype = N - 2 * Hk * D, torch.float32 if parts else x.dtype
    if R == 1:
        out = x.new_empty(R, wide, dtype=out_dtype)
        cols, block, warps = (4, 256, 1) if N > HEAD else (2, 1024, 4)
        vector_kernel[(-(-N // cols),)](
            x, layer.weight, layer.bias, out, *store, **given, COLS=cols, BLOCK=block, num_warps=warps
        )  # fmt: skip
        return out
    rows, cols, block, warps, stages = linear_tiles(R, N)
    room = min(150_000, shared_memory(x.device))  # as tuned on an H200
    stages = max(1, min(stages, room // ((rows + cols) * block * x.element_size())))
    programs, P = -(-N // cols) * -(-R // rows), 1
    while parts and programs * P <= (96 if R <= 32 else 48) and K >= 768 * P:
        P *= 2
    out = x.new_empty(*([P] if parts else []), R, wide, dtype=out_dtype)
    matrix_kernel[(-(-N // cols), -(-R // rows), P)](
        x, layer.weight, layer.bias, out, *store, R, **given, LENGTH=-(-K // P // block) * block,
        ROWS=rows, COLS=cols, BLOCK=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def linear_tiles(R: int, N: int) -> tuple[int, int, int, int, int]:
    """
    ROWS, COLS, BLOCK, warps and stages: measured on an H200 within decode steps, widths 768 to
    50257.
    """
    if N > HEAD:
        rows = min(256, padded(R))
        return rows, 128, 64, 8 if rows >= 128 else 4, 3
    if R <= 64:  # all of 768 inputs are under way at once
        return padded(R), 32, 128, 4, 6
    return (64, 64, 128, 4, 4) if R <= 128 else (128, 64, 64, 8, 6)
