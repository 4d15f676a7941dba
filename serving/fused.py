"""
The fused Triton operators of a step: its inputs, embeddings, norms and linear layers. In plain
torch a decode step of a small model is some 230 launches and spends its time on them; here it is
91, and programmatic dependent launch overlaps most. Attention and the KV pool are in kernels.py;
serving/ops.py makes a table of all of them.

    x, y = add_norm(x, delta, norm)                 # x += delta, in place; y = norm(x)
    q, kv = project_qkv(y, attention, kv, batch)    # one launch, which also stores K and V
    y = linear(y, layer, activation="gelu_new")     # one launch, the activation in its epilogue
    delta = linear(y, layer, partial_sums=True)     # split-K: more programs at once

Each has the signature of its torch twin in model.py. Letters: n requests that decode, M blocks per
table, S block size; of a layer, R rows, K inputs, N outputs, P parts of a sum (split-K).
"""

from typing import NamedTuple

import torch
from torch import Tensor

import model
from kernels import (
    Batch,
    gdc_wait,
    jit,
    padded,
    pdl_options,
    pdl_wait,
    pool_offset,
    shared_memory,
    tl,
    triton,
)
from serving.inputs import KnownRows, ModelInputs

# --------------------------------------------------------------------------------------------------
# Inputs and embeddings


@jit
def decode_inputs_kernel(
    rows, last_blocks, last_token, context_len, block_tables,
    tokens, positions, slots, lens, tables, padding_row, M,
    WIDTH: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n,): a program does what decode_inputs does for one request."""
    pdl_wait(PDL)
    i, m = tl.program_id(0), tl.arange(0, WIDTH)
    row, last_block = tl.load(rows + i), tl.load(last_blocks + i)
    position, table = tl.load(context_len + row), block_tables + row * M
    blocks = tl.load(table + m, mask=m < M, other=0).to(tl.int64)
    blocks = tl.where(m == position // S, last_block, blocks)
    tl.store(table + position // S, last_block.to(tl.int32))
    tl.store(tables + i.to(tl.int64) * M + m, blocks.to(tl.int32), mask=m < M)
    tl.store(tokens + i, tl.load(last_token + row))
    tl.store(positions + i, position)
    tl.store(slots + i, last_block * S + position % S)
    tl.store(lens + i, (position + 1).to(tl.int32))
    tl.store(context_len + row, position + 1, mask=row != padding_row)


def decode_inputs(rows: Tensor, last_blocks: Tensor, known: KnownRows) -> ModelInputs:
    """As inputs.decode_inputs, in one launch instead of a dozen."""
    last_token, context_len, block_tables, _, S = known
    n = len(rows)
    M = block_tables.shape[1]
    tokens, positions, slots = rows.new_empty(3, n)
    lens = block_tables.new_empty(n)
    tables = block_tables.new_empty(n, M)
    found = ModelInputs(tokens, positions, slots, lens, tables)
    if n == 0:
        return found
    given = (rows, last_blocks, last_token, context_len, block_tables)
    padding_row = len(last_token) - 1
    width = triton.next_power_of_2(M)
    decode_inputs_kernel[(n,)](
        *given, *found, padding_row, M, WIDTH=width, S=S, **pdl_options(rows)
    )
    return found


@jit
def embed_kernel(
    tokens, positions, wte, wpe, out, scale,
    C: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """
    Grid (T,): a program does what embed does for one token. Does not let its successor start early,
    unlike pdl_wait: later kernels read the step's inputs without waiting, which is safe only if
    everything before this kernel has ended.
    """
    if PDL:
        gdc_wait()
    t, c = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    x = tl.load(wte + tl.load(tokens + t) * C + c, mask=c < C).to(tl.float32) * scale
    if wpe is not None:
        x += tl.load(wpe + tl.load(positions + t) * C + c, mask=c < C).to(tl.float32)
    tl.store(out + t * C + c, x.to(out.dtype.element_ty), mask=c < C)


def embed(tokens: Tensor, positions: Tensor, wte, wpe, scale: float) -> Tensor:
    """scale * wte(tokens) + wpe(positions), if there is one: [T] int64 each -> [T, C]."""
    wpe_weight = None if wpe is None else wpe.weight
    contiguous = wte.weight.is_contiguous() and (wpe is None or wpe_weight.is_contiguous())
    assert contiguous, "embeddings must be contiguous"
    T = len(tokens)
    C = wte.weight.shape[1]
    out = wte.weight.new_empty(T, C)
    given = (tokens, positions, wte.weight, wpe_weight)
    width = triton.next_power_of_2(C)
    embed_kernel[(T,)](*given, out, scale, C=C, WIDTH=width, **pdl_options(out))
    return out


@jit
def add_norm_kernel(
    x, delta, weight, bias, out, eps, R,
    P: tl.constexpr, K: tl.constexpr, RMS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """
    Grid (R,): a program adds P rows, those of delta [P, R, K], to its row of x [R, K], and
    normalises that to `out` as nn.LayerNorm does, or model.RMSNorm; bias may be None.
    """
    pdl_wait(PDL)
    k = tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * K + k
    value = tl.load(x + at, mask=k < K, other=0.0).to(tl.float32)
    for part in tl.static_range(P):
        value += tl.load(delta + part * R * K + at, mask=k < K, other=0.0).to(tl.float32)
    if P:
        tl.store(x + at, value.to(x.dtype.element_ty), mask=k < K)
    if not RMS:
        value = tl.where(k < K, value - tl.sum(value, axis=0) / K, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    value *= tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=k < K)


def add_norm(x: Tensor, delta: Tensor | None, norm: torch.nn.LayerNorm | model.RMSNorm):
    """Add delta [R, K], [P, R, K] or None to x [R, K], in place. Returns x and norm(x)."""
    contiguous = x.is_contiguous() and (delta is None or delta.is_contiguous())
    assert contiguous, "x and delta must be contiguous"
    R, K = x.shape
    P = 0 if delta is None else delta.numel() // x.numel()
    y = torch.empty_like(x)
    given = (x, delta, norm.weight, norm.bias)
    width = triton.next_power_of_2(K)
    shape = {"P": P, "K": K, "RMS": isinstance(norm, model.RMSNorm), "WIDTH": width}
    add_norm_kernel[(R,)](*given, y, norm.eps, R, **shape, **pdl_options(x))
    return x, y


# --------------------------------------------------------------------------------------------------
# Linear layers


@jit
def activate(y, ACTIVATION: tl.constexpr):
    """As model.ACTIVATIONS; GELU's tanh(u) is 2 sigmoid(2 u) - 1."""
    if ACTIVATION == "gelu_new":
        return y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # 2 sqrt(2 / pi)
    if ACTIVATION == "gelu":
        return 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACTIVATION == "silu":
        return y * tl.sigmoid(y)
    y = tl.maximum(y, 0.0)
    return y * y if ACTIVATION == "relu2" else y


@jit
def epilogue(
    acc, bias, out, kv, slot_mapping, k_to_v, r, n, part, R,
    N: tl.constexpr, ACTIVATION: tl.constexpr, Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """
    Epilogue of both matrix kernels, for rows r and columns n: add the bias (part 0 only; None: no
    bias), apply the activation, store to that part of out [P, R, N]. For the QKV product (kv given)
    q goes to out [R, H D], k and v straight to their slots in the layer's pool.
    """
    if bias is not None:
        of_part_0 = tl.load(bias + n, mask=n + part * N < N, other=0.0).to(tl.float32)
        acc += of_part_0[None, :]
    if ACTIVATION is not None:
        acc = activate(acc, ACTIVATION)
    real, wide = (r < R)[:, None] & (n < N)[None, :], N
    if kv is not None:
        wide = N - 2 * Hk * D  # columns of q
        i, slot = n[None, :] - wide, tl.load(slot_mapping + r, mask=r < R, other=0)[:, None]
        of_k = pool_offset(slot // S, slot % S, i // D % Hk, Hk, S, D) + i % D
        to = kv + i // (Hk * D) * k_to_v + of_k
        tl.store(to, acc.to(kv.dtype.element_ty), mask=real & (i >= 0))
        real &= i < 0
    at = (part * R + r).to(tl.int64)[:, None] * wide + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=real)


@jit
def vector_kernel(
    x, weight, bias, out, kv, slot_mapping, k_to_v,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
    Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """
    Matrix-vector product (GEMV). Grid (N / COLS,): a program computes COLS outputs of the one row
    there is, too little for tensor cores. Its first weights are under way before it waits for its
    predecessor.
    """
    n, k = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, BLOCK)
    weight += n.to(tl.int64)[:, None] * K
    w = tl.load(weight + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    pdl_wait(PDL)
    acc = tl.zeros([COLS, BLOCK], tl.float32)
    for _ in range(0, K, BLOCK):
        acc += w.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        k += BLOCK
        w = tl.load(weight + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    acc = tl.sum(acc, axis=1)[None, :]
    row = tl.arange(0, 1)
    epilogue(acc, bias, out, kv, slot_mapping, k_to_v, row, n, 0, 1, N, ACTIVATION, Hk, S, D)


@jit
def matrix_kernel(
    x, weight, bias, out, kv, slot_mapping, k_to_v, R,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
    Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """
    Split-K matrix product. Grid (N / COLS, R / ROWS, P): a program computes COLS outputs of ROWS
    rows from LENGTH = K / P inputs, BLOCK at a time: one of the P parts of out [P, R, N].
    """
    pdl_wait(PDL)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(2)
    x += r.to(tl.int64)[:, None] * K
    weight += n.to(tl.int64)[:, None] * K
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(part * LENGTH, tl.minimum(part * LENGTH + LENGTH, K), BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(x + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(weight + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(value, w.T, acc, input_precision="ieee")
    epilogue(acc, bias, out, kv, slot_mapping, k_to_v, r, n, part, R, N, ACTIVATION, Hk, S, D)


# Tuned on an H200, 2026-11-21, within decode steps of GPT-2's sizes (768 to 50,257 outputs):
# `python bench.py overhead` measures the time of all linear layers.
LINEAR_ROWS = 256  # up to here these kernels; beyond, the products fill the chip and are cuBLAS's
TILES_MEMORY = 150_000  # bytes of shared memory that the tiles under way may take
SPLIT_K = 768  # inputs of a part, at least


class Tiles(NamedTuple):
    """How a product is cut: ROWS x COLS outputs to a program, from BLOCK inputs at a time."""

    rows: int
    cols: int
    block: int
    warps: int
    stages: int = 1  # tiles under way at once

    def options(self) -> dict:
        return {"COLS": self.cols, "BLOCK": self.block, "num_warps": self.warps}


ONE_ROW = Tiles(1, 2, 1024, warps=4)
ONE_ROW_HEAD = Tiles(1, 4, 256, warps=1)


def layer_tiles(R: int) -> Tiles:
    """As tuned, for the R rows of a layer's input."""
    if R <= 64:  # all of 768 inputs are under way at once
        return Tiles(padded(R), 32, 128, warps=4, stages=6)
    if R <= 128:
        return Tiles(64, 64, 128, warps=4, stages=4)
    return Tiles(128, 64, 64, warps=8, stages=6)


def head_tiles(R: int) -> Tiles:
    """The same for the head, whose outputs are many more."""
    rows = min(256, padded(R))
    warps = 8 if rows >= 128 else 4
    return Tiles(rows, 128, 64, warps, stages=3)


def num_parts(R: int, K: int, programs: int) -> int:
    """Split-K: into how many parts the K inputs are cut so that more programs run at once."""
    enough = 96 if R <= 32 else 48  # programs
    P = 1
    while programs * P <= enough and K >= SPLIT_K * P:
        P *= 2
    return P


def linear(x: Tensor, layer, activation=None, gated=False, partial_sums=False) -> Tensor:
    """
    activation(layer(x)): x [R, K], a layer with weight [N, K] and bias [N] or None -> [R, N]. With
    `partial_sums` the result may also be several fp32 matrices [P, R, N], for `add_norm` to add up.
    """
    if gated:
        return model.linear(x, layer, activation, gated)
    if len(x) <= LINEAR_ROWS:
        return launch_linear(x, layer, activation, partial_sums)
    if activation == "gelu_new" and layer.bias is not None:  # cuBLAS has an epilogue for it
        return torch._addmm_activation(layer.bias, x, layer.weight.T, use_gelu=True)
    return model.linear(x, layer, activation)


def head(x: Tensor, layer) -> Tensor:
    """
    Logits [R, V] of x [R, K], by these kernels for any number of rows in 16 bits: cuBLAS takes five
    times as long where 8 does not divide the vocabulary.
    """
    if len(x) == 1 or x.element_size() == 2:
        return launch_linear(x, layer, is_head=True)
    return layer(x)


def project_qkv(y: Tensor, attn: model.Attention, kv: Tensor, batch: Batch):
    """
    Queries [T, H, D] of y [T, C]; keys and values go to their slots in one layer's pool kv [2,
    num_blocks + 1, Hk, S, D], which is returned, too.
    """
    if len(y) > LINEAR_ROWS or batch.rotations or attn.q_norm is not None:
        return model.project_qkv(y, attn, kv, batch)
    q = launch_linear(y, attn.c_attn, kv=kv, slot_mapping=batch.slot_mapping)
    return q.view(len(y), attn.H, attn.D), kv


def launch_linear(
    x, layer, activation=None, partial_sums=False, kv=None, slot_mapping=None, is_head=False
):
    """
    As linear; or, with a layer's pool and the slots of the rows, as project_qkv, but q is [R, H D].
    """
    R, K = x.shape
    N = len(layer.weight)
    assert x.is_contiguous() and layer.weight.is_contiguous(), "rows and weights must be contiguous"
    assert not (partial_sums and activation), "the activation is of the sum, not of its parts"
    assert kv is None or kv.is_contiguous(), "the pool of a layer must be contiguous"
    # D is 0 without a pool: no columns are of k and v
    shape = {"N": N, "K": K, "ACTIVATION": activation, "Hk": 1, "S": 1, "D": 0}
    k_to_v = None  # from K to V in the pool
    if kv is not None:
        shape["Hk"], shape["S"], shape["D"] = kv.shape[2:]
        k_to_v = kv.stride(0)
    width = N - 2 * shape["Hk"] * shape["D"]  # columns of the result
    given = (x, layer.weight, layer.bias)
    pool = (kv, slot_mapping, k_to_v)
    options = shape | pdl_options(x)
    dtype = torch.float32 if partial_sums else x.dtype
    if R == 1:
        tiles = ONE_ROW_HEAD if is_head else ONE_ROW
        out = x.new_empty(R, width, dtype=dtype)
        programs = triton.cdiv(N, tiles.cols)
        vector_kernel[(programs,)](*given, out, *pool, **options, **tiles.options())
        return out
    tiles = head_tiles(R) if is_head else layer_tiles(R)
    column_tiles = triton.cdiv(N, tiles.cols)
    row_tiles = triton.cdiv(R, tiles.rows)
    P = num_parts(R, K, column_tiles * row_tiles) if partial_sums else 1
    blocks = triton.cdiv(triton.cdiv(K, P), tiles.block)  # of a part
    stage_bytes = (tiles.rows + tiles.cols) * tiles.block * x.element_size()
    room = min(TILES_MEMORY, shared_memory(x.device))
    stages = max(1, min(tiles.stages, room // stage_bytes))
    out = x.new_empty(P, R, width, dtype=dtype)
    matrix_kernel[(column_tiles, row_tiles, P)](
        *given, out, *pool, R, **options, **tiles.options(),
        ROWS=tiles.rows, LENGTH=blocks * tiles.block, num_stages=stages,
    )  # fmt: skip
    return out if partial_sums else out[0]
