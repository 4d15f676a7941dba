"""
A step's norms and linear layers in Triton, for GPUs. Operations are fused into few launches,
because launches take most of the time in a small model's decode step.

    x, y = add_norm(x, delta, norm)                 # x += delta; y = norm(x)
    y = linear(y, layer, activation="gelu_new")     # one launch; the activation is in its epilogue
    y = linear(y, layer, "silu", gated=True)        # also one launch, for both gate and up
    delta = linear(y, layer, partial_sums=True)     # split-K: more programs run in parallel

Each operator has the same signature as its torch twin in model.py. If there is only one row, its
norm is computed by the product that reads it (see `LazyNorm`). Letters, for one layer: R rows, K
inputs, N outputs, P parts of a sum (split-K).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import model
from kernels import (
    gdc_launch_dependents,
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

# --------------------------------------------------------------------------------------------------
# Norms


@jit
def load_row(numbers, k, K: tl.constexpr):
    """Load elements k of a row of K numbers as fp32, zero-padded."""
    return tl.load(numbers + k, mask=k < K, other=0.0).to(tl.float32)


@jit
def normalised(value, weight, bias, eps, k, K: tl.constexpr, RMS: tl.constexpr):
    """
    Normalise a zero-padded row of K numbers like nn.LayerNorm (bias may be None) or model.RMSNorm.
    """
    if not RMS:
        value = tl.where(k < K, value - tl.sum(value, axis=0) / K, 0.0)
    value *= inverse_rms(value, eps, K)
    value *= weight
    return value if bias is None else value + bias


@jit
def inverse_rms(value, eps, K: tl.constexpr):
    return tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)


@jit
def add_norm_kernel(
    x, delta, weight, bias, out, eps, R,
    P: tl.constexpr, K: tl.constexpr, RMS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """
    Grid (R,): each program adds up the P parts of a row of delta [P, R, K], and adds the sum to the
    row of x [R, K], in place. It stores the norm of the result to `out`. The norm is model.RMSNorm
    if RMS, else nn.LayerNorm; bias may be None.
    """
    k, row = tl.arange(0, WIDTH), tl.program_id(0).to(tl.int64) * K
    w = load_row(weight, k, K)
    b = load_row(bias, k, K) if bias is not None else None
    pdl_wait(PDL)
    value = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range(P):
        value += load_row(delta + part * R * K + row, k, K)
    value += load_row(x + row, k, K)  # added last, as if delta were a single sum
    if P:
        tl.store(x + row + k, value.to(x.dtype.element_ty), mask=k < K)
    value = normalised(value, w, b, eps, k, K, RMS)
    tl.store(out + row + k, value.to(out.dtype.element_ty), mask=k < K)


@dataclass
class LazyNorm:
    """
    A deferred norm(x + delta) for a single row x [1, K]. The product that reads it computes the
    norm itself, which saves a launch, and also stores x + delta in `total` [1, K].
    """

    x: Tensor
    delta: Tensor
    norm: nn.Module
    total: Tensor

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index) -> Tensor:
        """
        Return the selected rows, normalised immediately. x is left unchanged, for later calls.
        """
        _, y = norm_now(self.x.clone(), self.delta, self.norm)
        return y[index]


def add_norm(x: Tensor, delta: Tensor | None, norm: nn.Module):
    """
    Add delta [R, K], [P, R, K] or None to x [R, K]. Returns the sum (which may be x, changed in
    place) and norm(sum). For a single row, norm(sum) is usually a `LazyNorm`, which `linear`,
    `head` and `project_qkv` accept.
    """
    is_norm = not isinstance(norm, nn.Identity)
    if len(x) > 1 or delta is None or x.shape[1] > NORMED_ROW or not is_norm:
        return norm_now(x, delta, norm)
    total = torch.empty_like(x)
    return total, LazyNorm(x, delta, norm, total)


def norm_now(x: Tensor, delta: Tensor | None, norm: nn.Module):
    """Like add_norm, but compute the norm immediately, without a `LazyNorm`."""
    contiguous = x.is_contiguous() and (delta is None or delta.is_contiguous())
    assert contiguous, "x and delta must be contiguous"
    if isinstance(norm, nn.Identity):
        x = x if delta is None else x + delta
        return x, x
    R, K = x.shape
    P = 0 if delta is None else delta.numel() // x.numel()
    y = torch.empty_like(x)
    add_norm_kernel[(R,)](
        x, delta, norm.weight, norm.bias, y, norm.eps, R,
        P=P, K=K, RMS=isinstance(norm, model.RMSNorm), WIDTH=triton.next_power_of_2(K),
        **pdl_options(x),
    )  # fmt: skip
    return x, y


def normalise(x: Tensor, norm: nn.Module) -> Tensor:
    return norm_now(x, None, norm)[1]


# --------------------------------------------------------------------------------------------------
# Linear layers: the kernels


@jit
def activate(y, ACTIVATION: tl.constexpr):
    """Apply one of model.ACTIVATIONS. "gelu_new" uses tanh(u) = 2 sigmoid(2 u) - 1."""
    if ACTIVATION == "gelu_new":
        return y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # 2 sqrt(2 / pi)
    if ACTIVATION == "gelu":
        return 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACTIVATION == "silu":
        return y * tl.sigmoid(y)
    y = tl.maximum(y, 0.0)
    return y * y if ACTIVATION == "relu2" else y


@jit
def wait(PDL: tl.constexpr, QKV: tl.constexpr):
    """
    Wait as pdl_wait does. But the QKV product is followed by attention, which is started later
    (`let_attention_start`). Otherwise the many attention programs would all be placed on the first
    multiprocessors that become free.
    """
    if PDL and QKV:
        gdc_wait()
    else:
        pdl_wait(PDL)


@jit
def let_attention_start(PDL: tl.constexpr, QKV: tl.constexpr):
    if PDL and QKV:
        gdc_launch_dependents()


@jit
def epilogue(
    acc, up, out, kv, slots, k_to_v, r, n, part, R,
    N: tl.constexpr, ACTIVATION: tl.constexpr, Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """
    Epilogue of both matrix kernels, for rows r and columns n. Apply the activation. If the layer is
    gated, multiply by `up`, the product with the other half of the layer's rows; otherwise `up` is
    None. Store the result to this part of out [P, R, N]. The QKV product passes kv. In this case,
    store q to out [R, H D], and k and v directly to their slots in the layer's pool.
    """
    if ACTIVATION is not None:
        acc = activate(acc, ACTIVATION)
    if up is not None:
        acc *= up
    real, wide = (r < R)[:, None] & (n < N)[None, :], N
    if kv is not None:
        wide = N - 2 * Hk * D  # number of columns for q
        i, slot = n[None, :] - wide, slots[:, None]
        of_k = pool_offset(slot // S, slot % S, i // D % Hk, Hk, S, D) + i % D
        target = kv + i // (Hk * D) * k_to_v + of_k
        tl.store(target, acc.to(kv.dtype.element_ty), mask=real & (i >= 0))
        real &= i < 0
    index = (part * R + r).to(tl.int64)[:, None] * wide + n[None, :]
    tl.store(out + index, acc.to(out.dtype.element_ty), mask=real)


@jit
def vector_kernel(
    x, delta, norm_weight, norm_bias, total, eps, weight, bias, out, kv, slot_mapping, k_to_v,
    positions, frequencies,
    P: tl.constexpr, RMS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """
    Matrix-vector product (GEMV). Grid (N / COLS,): each program computes COLS outputs for the only
    row, which is too little work for tensor cores. Before waiting for its predecessor, it starts to
    load its first weights, and everything else that the predecessor does not write. If there is a
    norm_weight, the row is norm(x + delta) (see `LazyNorm`): each program computes this norm
    itself, and the first program also stores x + delta. If there are `frequencies`, heads of q and
    k are rotated as in model.rotate, and the program computes both numbers of COLS pairs.
    """
    k, row = tl.arange(0, BLOCK), tl.arange(0, 1)
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    apart = N  # from gate to up
    if frequencies is not None:
        apart = D // 2  # from the first number of a pair to the second
        angle = tl.load(positions).to(tl.float32) * tl.load(frequencies + n % apart)
        n = n // apart * D + n % apart
        angle = tl.where(n < N - Hk * D, angle, 0.0)  # v is not rotated
        cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    PAIRS: tl.constexpr = GATED or frequencies is not None
    half = tl.arange(0, 2 if PAIRS else 1)[:, None]
    m = half * apart + n[None, :]  # [1 or 2, COLS]
    weight += m.to(tl.int64)[:, :, None] * K
    real = (n < N)[None, :, None]
    w = tl.load(weight + k, mask=real & (k < K), other=0.0)  # [1 or 2, COLS, BLOCK]
    if bias is not None:
        b = tl.load(bias + m, mask=n[None, :] < N, other=0.0).to(tl.float32)
    slots = tl.load(slot_mapping + row) if kv is not None else None
    if norm_weight is not None:
        norm_w = load_row(norm_weight, k, K)
        norm_b = load_row(norm_bias, k, K) if norm_bias is not None else None
    wait(PDL, kv is not None)
    acc = tl.zeros([2 if PAIRS else 1, COLS, BLOCK], tl.float32)
    scale = tl.full([], 1.0, tl.float32)
    for _ in range(0, K, BLOCK):
        value = load_row(x, k, K)
        for part in tl.static_range(P):
            value += load_row(delta + part * K, k, K)
        if norm_weight is not None:  # BLOCK >= K: this is the whole row
            if tl.program_id(0) == 0:
                tl.store(total + k, value.to(total.dtype.element_ty), mask=k < K)
            if RMS:  # the products need not wait for the scale, which is applied to their sum
                scale = inverse_rms(value, eps, K)
                value *= norm_w
            else:
                value = normalised(value, norm_w, norm_b, eps, k, K, RMS)
        k += BLOCK
        acc += w.to(tl.float32) * value
        w = tl.load(weight + k, mask=real & (k < K), other=0.0)
    let_attention_start(PDL, kv is not None)
    acc = tl.sum(acc, axis=2) * scale
    if bias is not None:
        acc += b
    y = tl.sum(tl.where(half == 0, acc, 0.0), axis=0)[None, :]
    z = tl.sum(tl.where(half == 1, acc, 0.0), axis=0)[None, :] if PAIRS else None
    if frequencies is None:
        epilogue(y, z, out, kv, slots, k_to_v, row, n, 0, 1, N, ACTIVATION, Hk, S, D)
    else:
        y, z = y * cos - z * sin, z * cos + y * sin
        epilogue(y, None, out, kv, slots, k_to_v, row, n, 0, 1, N, ACTIVATION, Hk, S, D)
        epilogue(z, None, out, kv, slots, k_to_v, row, n + apart, 0, 1, N, ACTIVATION, Hk, S, D)


@jit
def load_weights(weight, n, k, N: tl.constexpr, K: tl.constexpr, masked: tl.constexpr):
    """Load a tile of weights: rows n, inputs k. Loading without a mask is faster."""
    if masked:
        w = tl.load(weight + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    else:
        w = tl.load(weight + k[None, :])
    return w


@jit
def prefetch_weights(weight, n, first, last, N: tl.constexpr, K: tl.constexpr):
    """Prefetch the weights of rows n for inputs first .. last into L2, in lines of 64 numbers."""
    n = tl.minimum(n, N - 1).to(tl.int64)
    for start in range(first, last, 512):
        k = tl.minimum(start + 64 * tl.arange(0, 8), K - 1)
        lines = weight + n[:, None] * K + k[None, :]
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l",
            [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def dot(x, w, acc, SWAPPED: tl.constexpr):
    if SWAPPED:
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@jit
def matrix_kernel(
    x, weight, bias, out, kv, slot_mapping, k_to_v, R,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr, Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, LENGTH: tl.constexpr,
    PARTS: tl.constexpr, SWAPPED: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """
    Split-K matrix product. Grid (N / COLS, R / ROWS, P): each program computes COLS outputs for
    ROWS rows, for one of the P parts of out [P, R, N], BLOCK inputs at a time. This part is itself
    a sum of PARTS parts of LENGTH inputs each, added in the same order as in add_norm_kernel.
    SWAPPED: compute the transposed product, because Hopper's tensor cores need 64 rows in the first
    factor, which the weights have even if x has fewer. PREFETCH: fetch weights from memory while
    waiting for the predecessor.
    """
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(2)
    begin = part * LENGTH * PARTS
    end = tl.minimum(begin + LENGTH * PARTS, K)
    if PDL and PREFETCH:
        prefetch_weights(weight, n, begin, end, N, K)
        if GATED:
            prefetch_weights(weight + N * K, n, begin, end, N, K)
    if bias is not None:
        of_part_0 = load_row(bias, n + part * N, N)  # zeros for other parts, which are out of range
        if GATED:
            of_up = load_row(bias + N, n, N)
    slots = tl.load(slot_mapping + r, mask=r < R, other=0) if kv is not None else None
    wait(PDL, kv is not None)
    x += r.to(tl.int64)[:, None] * K
    weight += n.to(tl.int64)[:, None] * K
    first: tl.constexpr = COLS if SWAPPED else ROWS
    second: tl.constexpr = ROWS if SWAPPED else COLS
    masked: tl.constexpr = K % BLOCK != 0 or N % COLS != 0
    up = tl.zeros([first, second], tl.float32) if GATED else None
    whole = tl.zeros([first, second], tl.float32)
    for i in range(PARTS):
        acc = tl.zeros([first, second], tl.float32)
        for start in range(begin + i * LENGTH, tl.minimum(begin + (i + 1) * LENGTH, K), BLOCK):
            k = start + tl.arange(0, BLOCK)
            value = tl.load(x + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0)
            w = load_weights(weight, n, k, N, K, masked)
            acc = dot(value, w, acc, SWAPPED)
            if GATED:
                w = load_weights(weight + N * K, n, k, N, K, masked)
                up = dot(value, w, up, SWAPPED)
        if bias is not None:
            b = tl.where(i == 0, of_part_0, 0.0)
            acc += b[:, None] if SWAPPED else b[None, :]
        whole += acc
    let_attention_start(PDL, kv is not None)
    if SWAPPED:
        whole = whole.T
        up = up.T if GATED else None
    if GATED and bias is not None:
        up += of_up[None, :]
    epilogue(whole, up, out, kv, slots, k_to_v, r, n, part, R, N, ACTIVATION, Hk, S, D)


@jit
def gate_kernel(x, out, N: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """
    Grid (R, N / BLOCK): store activation(gate) * up to out [R, N], where gate and up are the halves
    of x [R, 2 N].
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + 2 * row * N + n, mask=n < N).to(tl.float32)
    up = tl.load(x + (2 * row + 1) * N + n, mask=n < N).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(out + row * N + n, y.to(out.dtype.element_ty), mask=n < N)


def gate(x: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up [R, N] for x [R, 2 N], which has gate and up side by side."""
    R = len(x)
    N = x.shape[1] // 2
    out = x.new_empty(R, N)
    gate_kernel[(R, triton.cdiv(N, 1024))](x, out, N, ACTIVATION=activation, BLOCK=1024)
    return out


# --------------------------------------------------------------------------------------------------
# Linear layers: choosing kernels and tiles, and launching

# Tuned on an H200, 2026-11-27, for the layer sizes of gpt2-124M, SmolLM2-135M, Qwen3-0.6B and
# Llama-3.2-1B. `python bench.py overhead` measures the time of all linear layers.
LINEAR_ROWS = 256  # with more rows, a product fills the chip, and cuBLAS is used
FEW_ROWS = 64  # up to this many rows, these kernels are used for layers of any size
LINEAR_PRODUCTS = 600_000_000  # with more rows, they are used up to this many multiplications
SMALL_WEIGHT = 2_000_000  # layers with up to this many weights use small tiles even for many rows
TILES_MEMORY = 210_000  # maximum bytes of shared memory for the tiles in flight
SPLIT_K = 256  # minimum number of inputs per part
MOST_PARTS = 4  # maximum number of parts in a sum
PART_BLOCK = 128  # a part's inputs are a multiple of this, as this is of every `block`
ENOUGH_PROGRAMS = 95  # with more programs, K is not split further
PREFETCHED = 2_500_000  # layers with up to this many weights are prefetched if there are few rows
NORMED_ROW = 1024  # maximum length of a row that is normalised by the product that reads it


class Tiles(NamedTuple):
    """The tiles of a product: ROWS x COLS outputs per program, BLOCK inputs at a time."""

    rows: int
    cols: int
    block: int
    warps: int
    stages: int = 1  # number of tiles in flight
    swapped: bool = False
    apart: int = 1  # number of parts of a sum that are computed by different programs
    together: int = 1  # number of parts that one program computes and adds up

    def options(self) -> dict:
        return {"COLS": self.cols, "BLOCK": self.block, "num_warps": self.warps}


def one_row_tiles(x: Tensor | LazyNorm, N: int, K: int, gated: bool, is_head: bool) -> Tiles:
    """Return the tuned tiles for one row."""
    width = triton.next_power_of_2(K)
    if isinstance(x, LazyNorm):  # the norm needs the whole row in one block
        if gated:
            return Tiles(1, 4, width, warps=4)
        if K > 768:
            return Tiles(1, 8, width, warps=2)
        return Tiles(1, 4, width, warps=1)
    if is_head:
        return Tiles(1, 4, 512, warps=2)
    if K > 4096:
        return Tiles(1, 4, 2048, warps=8)
    if K <= 1024:
        return Tiles(1, 4, width, warps=4)
    if gated:
        return Tiles(1, 1, 1024, warps=4)
    if N > 1024 or K <= 2048:
        return Tiles(1, 2, 1024, warps=4)
    return Tiles(1, 2, 2048, warps=8)


def layer_tiles(R: int, N: int, numbers: int) -> Tiles:
    """Return the tuned tiles for R rows, N outputs, and a layer with this many weights."""
    if R <= 16:  # with 6 stages, only one program fits on a multiprocessor, so they spread evenly
        return Tiles(16, 64, 128, warps=4, stages=6, swapped=True)
    if R <= 32:
        return Tiles(32, 64, 128, warps=4, stages=5, swapped=True)
    if R <= 64 and N <= 4096:
        return Tiles(64, 32, 128, warps=4, stages=6)
    if R <= 128 or numbers <= SMALL_WEIGHT:
        return Tiles(64, 64, 64, warps=4, stages=8, swapped=True)
    return Tiles(128, 64, 64, warps=8, stages=6)


def head_tiles(R: int) -> Tiles:
    """Return the tiles for the head, which has many more outputs than other layers."""
    rows = min(256, padded(R))
    warps = 8 if rows >= 128 else 4
    return Tiles(rows, 128, 64, warps, stages=3)


def num_parts(K: int, programs: int) -> int:
    """Return how many parts to split the K inputs into (split-K), so that enough programs run."""
    P = 1
    while P < MOST_PARTS and programs * P <= ENOUGH_PROGRAMS and K >= 2 * P * SPLIT_K:
        P *= 2
    return P


def use_triton(R: int, layer: nn.Module) -> bool:
    """Return whether these kernels are faster than cuBLAS for R rows."""
    return R <= FEW_ROWS or (R <= LINEAR_ROWS and R * layer.weight.numel() <= LINEAR_PRODUCTS)


def linear(x: Tensor, layer, activation=None, gated=False, partial_sums=False) -> Tensor:
    """
    Return activation(layer(x)) [R, N] for x [R, K] and a layer with weight [N, K] and bias [N] or
    None. A gated layer has twice as many rows, and the result is activation(gate) * up. With
    `partial_sums`, the result may instead be several fp32 matrices [P, R, N], which `add_norm` adds
    up.
    """
    if use_triton(len(x), layer):
        return launch_linear(x, layer, activation, gated, partial_sums)
    if gated:
        return gate(layer(x), activation)
    if activation == "gelu_new" and layer.bias is not None:  # cuBLAS has an epilogue for this
        return torch._addmm_activation(layer.bias, x, layer.weight.T, use_gelu=True)
    return model.linear(x, layer, activation)


def head(x: Tensor | LazyNorm, layer, softcap: float = 0.0) -> Tensor:
    """
    Return logits [R, V] for x [R, K], computed by these kernels unless cuBLAS is faster. In 16
    bits, cuBLAS takes five times as long if the vocabulary size is not a multiple of 8.
    """
    in_16_bits = layer.weight.element_size() == 2
    if len(x) == 1 or (in_16_bits and (len(x) <= FEW_ROWS or len(layer.weight) % 8)):
        logits = launch_linear(x, layer, is_head=True)
    else:
        logits = layer(x)
    return model.soft_cap(logits, softcap)


def launch_linear(
    x: Tensor | LazyNorm,
    layer,
    activation: str | None = None,
    gated=False,
    partial_sums=False,
    targets: tuple | None = None,
    is_head=False,
    tiles: Tiles | None = None,
) -> Tensor:
    """
    Like `linear`, but always use these kernels. If `targets` is given, do the same as project_qkv,
    but return q as [R, H D]. It consists of one layer's pool, the slots [R] in it, and the two
    results of fused.rotation (for a single row; otherwise None, None, and nothing is rotated). If
    `tiles` is given, use matrix_kernel even for one row.
    """
    N, K = layer.weight.shape
    if gated:
        N //= 2
    assert layer.weight.is_contiguous(), "weights must be contiguous"
    assert not (partial_sums and activation), "an activation applies to the sum, not to its parts"
    Hk, S, D = 1, 1, 0  # without a pool, D is 0, so no columns belong to k or v
    pool = (None, None, None)
    rotation = (None, None)
    if targets:
        kv, slots, *rotation = targets
        assert kv.is_contiguous(), "the pool of a layer must be contiguous"
        Hk, S, D = kv.shape[2:]
        pool = (kv, slots, kv.stride(0))  # offset from K to V
    shape = {"N": N, "K": K, "ACTIVATION": activation, "GATED": gated, "Hk": Hk, "S": S, "D": D}
    width = N - 2 * Hk * D  # number of columns in the result
    dtype = torch.float32 if partial_sums else layer.weight.dtype
    R = len(x)
    if R == 1 and tiles is None:
        out = layer.weight.new_empty(1, width, dtype=dtype)
        tiles = one_row_tiles(x, N, K, gated, is_head)
        launch_vector(x, layer, out, pool, rotation, shape, tiles)
        return out
    if tiles is None:
        tiles = head_tiles(R) if is_head else layer_tiles(R, N, layer.weight.numel())
        programs = triton.cdiv(N, tiles.cols) * triton.cdiv(R, tiles.rows)
        if partial_sums:
            tiles = tiles._replace(apart=num_parts(K, programs))
    out = x.new_empty(tiles.apart, R, width, dtype=dtype)
    launch_matrix(x, layer, out, pool, shape, tiles)
    return out if partial_sums else out[0]


def launch_vector(x, layer, out: Tensor, pool: tuple, rotation: tuple, shape: dict, tiles: Tiles):
    """Launch vector_kernel for x, which has a single row."""
    row = (x, None, None, None, None, 0.0)
    P = 0
    rms = False
    if isinstance(x, LazyNorm):
        norm = x.norm
        row = (x.x, x.delta, norm.weight, norm.bias, x.total, norm.eps)
        P = x.delta.numel() // x.total.numel()
        rms = isinstance(norm, model.RMSNorm)
    columns = shape["N"]
    if rotation[0] is not None:  # each column is a pair, with twice as many weights
        columns //= 2
        tiles = tiles._replace(cols=max(1, tiles.cols // 2))
    programs = triton.cdiv(columns, tiles.cols)
    vector_kernel[(programs,)](
        *row, layer.weight, layer.bias, out, *pool, *rotation,
        P=P, RMS=rms, **shape, **tiles.options(), **pdl_options(out),
    )  # fmt: skip


def launch_matrix(x: Tensor, layer, out: Tensor, pool: tuple, shape: dict, tiles: Tiles):
    """Launch matrix_kernel for the R rows of x. The kernel writes out [P, R, columns]."""
    assert x.is_contiguous(), "rows must be contiguous"
    R = len(x)
    column_tiles = triton.cdiv(shape["N"], tiles.cols)
    row_tiles = triton.cdiv(R, tiles.rows)
    blocks = triton.cdiv(shape["K"], tiles.apart * tiles.together * PART_BLOCK)  # per part
    weight_tiles = 2 * tiles.cols if shape["GATED"] else tiles.cols
    stage_bytes = (tiles.rows + weight_tiles) * tiles.block * x.element_size()
    available = min(TILES_MEMORY, shared_memory(x.device))
    stages = max(1, min(tiles.stages, available // stage_bytes))
    matrix_kernel[(column_tiles, row_tiles, tiles.apart)](
        x, layer.weight, layer.bias, out, *pool, R, **shape, **tiles.options(),
        ROWS=tiles.rows, LENGTH=blocks * PART_BLOCK, PARTS=tiles.together, SWAPPED=tiles.swapped,
        PREFETCH=R <= FEW_ROWS and layer.weight.numel() <= PREFETCHED, num_stages=stages,
        **pdl_options(x),
    )  # fmt: skip
