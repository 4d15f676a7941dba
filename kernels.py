"""
What a step carries (`Batch`), and the two operations on the KV pool: store K, V and attend through
block tables.

A step lays its requests out on one flat token axis, without padding: first one token of each
decoding request, then the prefill chunks. So decodes and chunks share one forward pass:

    request           r0   r1   r2            r3
    tokens     [T]    a    b    c0 c1 c2 c3   d0 d1        T = 8
    query_start       0    1    2             6     8      [B + 1], B = 4, num_decodes = 2

Both operations are in Triton here, and read K and V where they are; ops/gather.py has them in
torch, with the same signatures and in-place effects: `store_kv` writes the pool, `paged_attention`
only reads it. A request with context length 0, such as the padding of chunks in a CUDA graph, gets
zeros. In order: the batch, the store, attention, the launches, and last what GPUs from Hopper on
add; skip `pdl_wait` and `PDL` until there. Letters: B requests, T tokens, R rows of logits, H query
heads, Hk KV heads, G = H / Hk, D head size, M blocks per table, S block size.
"""

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model import Attention

# From Triton 3.10 on a multiplication and an addition are fused only where that is asked for
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    # TRITON_INTERPRET=1: the kernels run on CPU tensors, slowly
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:  # nothing but the Triton kernels needs it
    triton = gdc_wait = gdc_launch_dependents = None
    INTERPRETED = False

    class tl:
        constexpr = float  # for the kernels' signatures and constants


constexpr = tl.constexpr


def mend_the_interpreter():
    """
    A kernel's `range` takes scalars, which Triton's interpreter holds as arrays of one number. That
    of Triton 3.6 (torch 2.11) makes them numbers in a way that numpy refuses since 2.4.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if INTERPRETED:
    mend_the_interpreter()


@dataclass
class Batch:
    """
    One step for the model. Tensors are on its device, int64 unless noted; lists are the
    host's copy.
    """

    tokens: Tensor  # [T] token ids
    positions: Tensor  # [T] of each token in its own request
    slot_mapping: Tensor  # [T] block * S + offset: where the token's K, V go
    query_start: Tensor  # [B + 1] int32: where each request's tokens begin, and the end
    context_lens: Tensor  # [B] int32: tokens in the pool after this step
    block_tables: Tensor  # [B, M] int32: [request, logical block] -> physical block
    logits_index: Tensor  # [R] int32: places on the flat axis whose logits are wanted
    num_decodes: int  # the first requests, with one token each; each token of a draft is one
    query_lens_host: list[int]  # [B]
    context_lens_host: list[int]  # [B]
    ops: NamedTuple  # model.Ops, the table of operators that computes this step
    # window -> what ops.prepare worked out for this step and the layers with that window
    prepared: dict | None = None
    rotations: dict | None = None  # window -> rotary positions, see model.GPT.hidden
    # (shared [B], first [groups], end [groups]) int64: tokens of the prefix that a request has in
    # common with its group, the group's first request, and the one behind it (prefix.py)
    groups: tuple | None = None
    dropout: float = 0.0  # training alone drops, see model.WholeTexts


# --------------------------------------------------------------------------------------------------
# The store: K and V of each token go to its slot


def jit(function):
    """
    `triton.jit`. Without triton the decorator does nothing, and the kernels are never called. M,
    the width of the block tables, B and R, the number of rows, change from step to step and must
    not make the kernels compile again.
    """
    return triton.jit(function, do_not_specialize=["M", "B", "R"]) if triton else function


@jit
def pool_offset(block, offset, head, Hk: constexpr, S: constexpr, D: constexpr):
    """
    Where K of a KV head begins in one layer's pool [2, num_blocks + 1, Hk, S, D], in elements, for
    slots block * S + offset; V is `k_to_v` further on. int64: offsets pass 2^31.
    """
    return ((block.to(tl.int64) * Hk + head) * S + offset) * D


@jit
def store_kv_kernel(
    k, v, kv, slot_mapping, k_stride, v_stride, k_to_v,
    Hk: constexpr, D: constexpr, S: constexpr, WIDTH: constexpr, PDL: constexpr,
):  # fmt: skip
    """Grid (T,): a program copies K and V of one token, all heads, to its slot."""
    pdl_wait(PDL)
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    slot, real = tl.load(slot_mapping + token), i < Hk * D
    to = kv + pool_offset(slot // S, slot % S, i // D, Hk, S, D) + i % D
    tl.store(to, tl.load(k + token * k_stride + i, mask=real), mask=real)
    tl.store(to + k_to_v, tl.load(v + token * v_stride + i, mask=real), mask=real)


def store_kv_triton(k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """As gather.store_kv_torch."""
    check_layout(k, kv, batch)
    T, Hk, D = k.shape
    store_kv_kernel[(T,)](
        k, v, kv, batch.slot_mapping, k.stride(0), v.stride(0), kv.stride(0),
        Hk=Hk, D=D, S=kv.shape[3], WIDTH=triton.next_power_of_2(Hk * D), **pdl_options(k),
    )  # fmt: skip
    return kv


# --------------------------------------------------------------------------------------------------
# Attention: no gather, K and V are read where they are

INF = constexpr(math.inf)


@jit
def capped(score, squeeze):
    """
    Gemma 2's soft cap is cap * tanh(score / cap). This is the tanh, as 2 sigmoid(2 u) - 1;
    online_softmax multiplies by the cap through `scale`. None: no cap.
    """
    return score if squeeze is None else 2.0 * tl.sigmoid(2.0 * squeeze * score) - 1.0


@jit
def read_tile(
    kv, block, t, head, seen, k_to_v, Hk: constexpr, S: constexpr, D: constexpr, WIDTH: constexpr
):
    """
    K and V [TILE, WIDTH] of tokens t [TILE], which are in these blocks, of one KV head; zeros where
    not `seen` [TILE] (None: all are, and a load without a mask is faster).
    """
    d = tl.arange(0, WIDTH)[None, :]
    keys = kv + pool_offset(block, t % S, head, Hk, S, D)[:, None] + d
    mask, zero = None, None
    if seen is not None:
        mask, zero = seen[:, None] & (d < D), 0.0
    elif WIDTH > D:
        mask, zero = d < D, 0.0
    return tl.load(keys, mask, zero), tl.load(keys + k_to_v, mask, zero)


@jit
def online_softmax(queries, k, v, visible, scale, squeeze, acc, top, total):
    """
    Online softmax (Milakov and Gimelshein 2018), one more tile of keys, k and v [TILE, WIDTH], of
    which queries [ROWS, WIDTH] see what is `visible` [ROWS, TILE] or [1, TILE] (None: all). score *
    scale is an exponent of two. State of each row so far: acc [ROWS, WIDTH], the weighted sum of v;
    top [ROWS], the largest exponent; total [ROWS], the sum of weights.
    """
    score = capped(tl.dot(queries, k.T, input_precision="ieee"), squeeze)
    if visible is not None:
        score = tl.where(visible, score, -INF)
    new_top = tl.maximum(top, tl.max(score, axis=1) * scale)
    reference = tl.where(new_top == -INF, 0.0, new_top)  # -inf: a row that has seen no key yet
    weight, shrink = tl.exp2(score * scale - reference[:, None]), tl.exp2(top - reference)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total * shrink + tl.sum(weight, axis=1)


@jit
def finishes_last(finished, programs):
    """
    Count this program in `finished`, zero at first; true for the last of `programs` to do so. That
    one may then combine what all of them have stored, if it loads past L1, which may be stale:
    cache_modifier=".cg".
    """
    tl.debug_barrier()  # all threads have stored before one of them counts
    return tl.atomic_add(finished, 1, sem="acq_rel") == programs - 1


@jit
def sum_of_parts(partial_out, partial_lse, at, real, WIDTH: constexpr):
    """
    Of partial results `at` [n, parts], where `real`, each weighted by its share of the softmax,
    which its log-sum-exp gives: the sum [n, WIDTH], and its log-sum-exp [n].
    """
    lse = tl.load(partial_lse + at, mask=real, other=-1e30, cache_modifier=".cg")
    parts = partial_out + at.to(tl.int64)[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    parts = tl.load(parts, mask=real[:, :, None], other=0.0, cache_modifier=".cg")
    top = tl.max(lse, axis=1)
    weight = tl.exp2(lse - top[:, None])
    total = tl.sum(weight, axis=1)
    share = weight / total[:, None]
    return tl.sum(parts * share[:, :, None], axis=1), top + tl.log2(total)


@jit
def combine_splits(
    partial_out, partial_lse, out, first_head, used,
    heads: constexpr, D: constexpr, SPLITS: constexpr, WIDTH: constexpr,
    AT_ONCE: constexpr,
):  # fmt: skip
    """
    Second half of split-KV: add up the first `used` of SPLITS partial results of AT_ONCE query
    heads. Of these, the first at `out`, `heads` are there; the others are padding.
    """
    h, s, d = tl.arange(0, AT_ONCE), tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    real = (h < heads)[:, None] & (s < used)[None, :]
    at = ((first_head + h)[:, None] * SPLITS).to(tl.int64) + s[None, :]  # [AT_ONCE, SPLITS]
    whole, _ = sum_of_parts(partial_out, partial_lse, at, real, WIDTH)
    mask = (h < heads)[:, None] & (d < D)[None, :]
    tl.store(out + h[:, None] * D + d[None, :], whole.to(out.dtype.element_ty), mask=mask)


@jit
def order_kernel(
    context_lens, order, finished, B,
    WIDTH: constexpr, Hk: constexpr, HEADS: constexpr, PDL: constexpr,
):  # fmt: skip
    """
    Grid (B,): a program finds the place of its request in `order`, the longest context first, and
    sets its counters [B, Hk] in `finished` to zero, both for decode_kernel.
    """
    pdl_wait(PDL)
    i, other, head = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, HEADS)
    mine, lens = tl.load(context_lens + i), tl.load(context_lens + other, mask=other < B, other=-1)
    before = (lens > mine) | ((lens == mine) & (other < i))
    tl.store(order + tl.sum(before.to(tl.int32), axis=0), i)
    tl.store(finished + i * Hk + head, 0, mask=head < Hk)


@jit
def decode_kernel(
    q, kv, out, partial_out, partial_lse, finished, block_tables, context_lens, order,
    scale, squeeze, q_stride, out_stride, k_to_v, M,
    H: constexpr, Hk: constexpr, D: constexpr, S: constexpr, WINDOW: constexpr,
    SPLITS: constexpr, TILE: constexpr, ROWS: constexpr, WIDTH: constexpr,
    AT_ONCE: constexpr, ORDERED: constexpr, PDL: constexpr,
    shared=None, prefix_out=None, prefix_lse=None, PARTS: constexpr = 0,
):  # fmt: skip
    """
    Split-KV decoding (flash-decoding). Grid (Hk, SPLITS, B): a program attends from the G = H / Hk
    query heads of one KV head, padded to ROWS, to every SPLITS-th tile of one request's context, so
    K and V are read once. The grid depends on B alone and each program works out how many splits
    the context uses, so the host needs no length to launch it. ORDERED takes the requests as
    `order` has them, longest first: a long one that started last would run alone at the end. The
    last split of a request and KV head to finish combines all of them, without a second launch.
    `finished` [B, Hk] counts them, from zero, and is zero again afterwards. q and out are [T, H,
    D], their strides numbers from token to token; kv is one layer's pool, V `k_to_v` numbers after
    K; for WINDOW see TritonPlan. 300 keys of one request and KV head, by SPLITS = 2 programs:

        keys     0 ..  63   64 .. 127  128 .. 191  192 .. 255  256 .. 299        TILE = 64
        split 0  ████████              ██████████              ████████  -> partial_out, partial_lse
        split 1             █████████              ██████████            -> partial_out, partial_lse
                 the last of the two to finish weighs both by 2 ** lse (combine_splits)  -> out

    One request with 4 KV heads is 4 programs without splits, of 132 processors; with 32, 128.

    With `shared` [B], prefix.prefix_kernel has attended to the first shared[request] tokens, and
    left PARTS partial results: split 0 begins with these.
    """
    head, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ORDERED:
        request = tl.load(order + request)
    G: constexpr = H // Hk
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query = request * H + head * G + row
    context = tl.load(context_lens + request)
    first = tl.maximum(context - WINDOW, 0) if WINDOW else 0
    begin = first // TILE * TILE
    if shared is not None:
        begin = tl.load(shared + request).to(tl.int32)
    t = begin + split * TILE + tl.arange(0, TILE)
    table = block_tables + request.to(tl.int64) * M
    # masked by M: does not depend on `context`, if there is no window, so need not wait for it
    block = tl.load(table + t // S, mask=t // S < M, other=0)
    real = (row < G)[:, None] & (d < D)[None, :]
    at = (head * G + row)[:, None] * D + d[None, :]
    used = tl.minimum(tl.maximum(tl.cdiv(context - begin, TILE), 1), SPLITS)
    if split >= used:
        return

    # Everything read above was written before embed_kernel, which no kernel overtakes. From here on
    # the predecessor's output is read.
    if PDL:
        gdc_wait()
    queries = tl.load(q + request * q_stride + at, mask=real, other=0.0)  # [ROWS, WIDTH]
    acc, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -INF, tl.float32)
    if shared is not None:
        # true for the G heads of split 0, if there is a prefix: then it has more than G tokens
        begins = row < tl.minimum(begin, G) - split * G
        parts = query[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
        acc, top = sum_of_parts(prefix_out, prefix_lse, parts, begins[:, None], WIDTH)
        total += 1.0  # elsewhere `top` is close to -inf, so the first key shrinks this to zero
    for _ in range(begin + split * TILE, context, SPLITS * TILE):
        visible = (t < context) & (t >= first)
        k, v = read_tile(kv, block, t, head, visible, k_to_v, Hk, S, D, WIDTH)
        t += SPLITS * TILE
        block = tl.load(table + t // S, mask=t // S < M, other=0)  # for the next round, in time
        acc, top, total = online_softmax(
            queries, k, v, visible[None, :], scale, squeeze, acc, top, total
        )
    # only now: programs of the next kernel that merely wait would occupy shared memory
    if PDL:
        gdc_launch_dependents()
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if used == 1:
        tl.store(out + request * out_stride + at, acc.to(out.dtype.element_ty), mask=real)
        return

    mine = (query * SPLITS + split).to(tl.int64)
    tl.store(partial_out + mine[:, None] * WIDTH + d[None, :], acc, mask=(row < G)[:, None])
    tl.store(partial_lse + mine, top + tl.log2(total), mask=row < G)
    counter = finished + request * Hk + head
    if finishes_last(counter, used):
        tl.store(counter, 0)
        for g in tl.static_range(0, G, AT_ONCE):  # as many query heads at once as registers hold
            first_head = request * H + head * G + g
            to = out + request * out_stride + (head * G + g) * D
            combine_splits(
                partial_out, partial_lse, to, first_head, used, G - g, D, SPLITS, WIDTH, AT_ONCE
            )


@jit
def prefill_kernel(
    q, kv, out, block_tables, context_lens, query_start, tile_request, tile_start,
    scale, squeeze, q_stride, out_stride, k_to_v, M,
    H: constexpr, Hk: constexpr, D: constexpr, S: constexpr, WINDOW: constexpr,
    ROWS: constexpr, TILE: constexpr, WIDTH: constexpr,
):  # fmt: skip
    """
    Grid (H, tiles): a program attends from ROWS consecutive tokens of one prefill chunk, one query
    head, to all keys they may see. `tile_request` is the request of each tile, or NO_REQUEST,
    `tile_start` where in its chunk the tile begins. The last tiles, which see most keys, come
    first, all heads of them: a long one that started last would run alone at the end. Otherwise as
    decode_kernel.
    """
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head, request = tl.program_id(0), tl.load(tile_request + tile)
    if request < 0:
        return
    kv_head = head // (H // Hk)
    begin, stop = tl.load(query_start + request), tl.load(query_start + request + 1)
    context, offset = tl.load(context_lens + request), tl.load(tile_start + tile)
    row, d = offset + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    lowest = context - (stop - begin) + offset  # position of the first row
    position = lowest + tl.arange(0, ROWS)
    real = (begin + row < stop)[:, None] & (d < D)[None, :]
    token, at = (begin + row).to(tl.int64), head * D + d
    queries = tl.load(q + token[:, None] * q_stride + at[None, :], mask=real, other=0.0)
    acc, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -INF, tl.float32)
    table = block_tables + request.to(tl.int64) * M
    first = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0
    end = tl.minimum(lowest + ROWS, context)  # one past the last key that any row may see
    # up to here every row sees every key
    unmasked = first if WINDOW else (lowest + 1) // TILE * TILE
    t = first + tl.arange(0, TILE)
    block = tl.load(table + t // S, mask=t < end, other=0)
    for _ in range(first, unmasked, TILE):
        k, v = read_tile(kv, block, t, kv_head, None, k_to_v, Hk, S, D, WIDTH)
        t += TILE
        block = tl.load(table + t // S, mask=t < end, other=0)  # for the next round, in time
        acc, top, total = online_softmax(queries, k, v, None, scale, squeeze, acc, top, total)
    for n in range(unmasked, end, TILE):
        t = n + tl.arange(0, TILE)
        in_context = t < end
        if WINDOW:
            in_context &= t > lowest - WINDOW
        block = tl.load(table + t // S, mask=in_context, other=0)
        k, v = read_tile(kv, block, t, kv_head, in_context, k_to_v, Hk, S, D, WIDTH)
        visible = t[None, :] <= position[:, None]
        if WINDOW:
            visible &= t[None, :] > position[:, None] - WINDOW
        acc, top, total = online_softmax(queries, k, v, visible, scale, squeeze, acc, top, total)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = out + token[:, None] * out_stride + at[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real)


# --------------------------------------------------------------------------------------------------
# The host half: what a step's launches need, and the launches

NO_REQUEST = -1  # of a tile that is padding


class TritonPlan(NamedTuple):
    """
    What `prepare_triton` leaves in batch.prepared, for a window: how the step's decodes are cut,
    scratch of the decode kernel, and the tile map of the prefill kernel.
    """

    window: int  # sliding-window attention: so many last tokens are seen, itself included; 0: all
    splits: int
    num_stages: int  # of the decode kernel: tiles of K and V under way
    order: Tensor  # [B] int32, see order_kernel
    ordered: bool  # whether the decode kernel takes requests in that order
    partial_out: Tensor  # [B * H * splits * WIDTH] fp32
    partial_lse: Tensor  # [B * H * splits] fp32
    finished: Tensor  # [B * Hk] int32 zeros, see finishes_last
    tile_request: Tensor | None  # [tiles] int32, see prefill_tiles
    tile_start: Tensor | None  # [tiles] int32
    # beside decodes, which wait for memory, chunks compute on a stream of their own
    side: torch.cuda.Stream | None
    prefix: dict  # the last arguments of decode_kernel, where requests share a prefix


def padded(n: int) -> int:
    """n rounded up to the side of a tensor core's tile: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(n))


def prepare_triton(batch: Batch, H: int, kv: Tensor, window: int = 0) -> TritonPlan:
    """
    Allocate scratch, sort the decodes and map tiles to chunks, on the device, without waiting for
    it.
    """
    _, _, Hk, _, D = kv.shape
    B = batch.num_decodes
    assert padded(D) <= 256, f"head size {D} is more than the kernels' 256"
    processors = num_processors(kv.device)
    at_once = processors * programs_at_once(D)

    # Fastest: as many splits as the chip runs at once, less a quarter.
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * B * Hk <= at_once * 3 // 4:
        splits *= 2
    # 3 stages are too many for a tile or two, and two programs more run at once with 2.
    programs = B * Hk * splits
    few = at_once if padded(D) <= 64 else at_once // 2
    num_stages = max(2, stages_that_fit(kv))  # its tile of queries is small
    if splits > 8 or few < programs <= few + 2 * processors:
        num_stages = 2

    ordered = programs > at_once  # else all start at once, and need not wait for the order
    order = batch.block_tables.new_empty(B)
    finished = order.new_empty(B * Hk)
    if B:
        order_kernel[(B,)](
            batch.context_lens, order, finished, B,
            WIDTH=triton.next_power_of_2(B), Hk=Hk, HEADS=triton.next_power_of_2(Hk), num_warps=1,
            **pdl_options(order),
        )  # fmt: skip
    partial_lse = torch.empty(B * H * splits, device=kv.device)
    partial_out = partial_lse.new_empty(len(partial_lse) * padded(D))
    side = None
    if kv.is_cuda and 0 < B < len(batch.query_lens_host):
        side = torch.cuda.Stream(kv.device)
    return TritonPlan(
        window, splits, num_stages, order, ordered, partial_out, partial_lse, finished,
        *prefill_tiles(batch), side, {}
    )  # fmt: skip


def prefill_tiles(batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """
    [tiles] int32 each: the request that a tile of PREFILL_ROWS tokens belongs to or NO_REQUEST, and
    where in its chunk the tile begins. The number of tiles depends on the number of tokens and
    chunks alone, so the host does not wait for the device.
    """
    decodes = batch.num_decodes
    chunks = len(batch.query_start) - 1 - decodes
    if not chunks:
        return None, None
    lens = batch.query_start[decodes + 1 :] - batch.query_start[decodes:-1]
    ends = ((lens + PREFILL_ROWS - 1) // PREFILL_ROWS).cumsum(0)  # tiles up to and with each chunk
    most = triton.cdiv(len(batch.tokens) - decodes, PREFILL_ROWS) + chunks
    tile = torch.arange(most, device=lens.device)
    chunk = torch.searchsorted(ends, tile, right=True)
    request = torch.where(chunk < chunks, chunk + decodes, NO_REQUEST)
    starts = torch.cat([ends.new_zeros(1), ends])[chunk]
    return request.int(), ((tile - starts) * PREFILL_ROWS).int()


def check_layout(x: Tensor, kv: Tensor, batch: Batch):
    """Assert what the kernels assume of x [T, heads, D] and kv [2, num_blocks + 1, Hk, S, D]."""
    tables = batch.block_tables
    D = kv.shape[4]
    floats = x.is_floating_point() and kv.is_floating_point()
    assert x.device == kv.device == tables.device, f"tensors on {x.device} and {kv.device}"
    assert x.shape[2] == D, f"heads of {x.shape[2]} for a pool of heads of {D}"
    assert floats, f"wanted floating point, got {x.dtype} and {kv.dtype}"
    assert kv.element_size() <= 4, f"the kernels compute in float32, the pool is {kv.dtype}"
    assert x.stride()[1:] == (D, 1), f"strides {x.stride()}: wanted the heads of a token together"
    assert kv.is_contiguous(), "the pool of a layer must be contiguous"
    assert tables.dtype == torch.int32, f"block tables are {tables.dtype}, wanted int32"
    assert tables.stride(1) == 1, "block tables must be contiguous along blocks"


def factors(attn: Attention) -> tuple[float, float | None]:
    """`scale`, as the kernels work in powers of two, and `squeeze`, see `capped`."""
    if attn.softcap:
        return attn.softcap * math.log2(math.e), attn.scale / attn.softcap
    return attn.scale * math.log2(math.e), None


def paged_attention_triton(q: Tensor, kv: Tensor, attn: Attention, batch: Batch) -> Tensor:
    """
    As gather.paged_attention_torch, in at most two launches: one for all decodes, one for all
    chunks.
    """
    check_layout(q, kv, batch)
    plan = batch.prepared[attn.window]
    _, H, D = q.shape
    Hk, S = kv.shape[2:4]
    width = padded(D)
    queries = q.to(kv.dtype)
    out = queries.new_empty(q.shape)
    tables = batch.block_tables
    lengths = tables, batch.context_lens
    numbers = *factors(attn), queries.stride(0), out.stride(0), kv.stride(0), tables.stride(0)
    shape = {"H": H, "Hk": Hk, "D": D, "S": S, "WIDTH": width, "TILE": TILE, "WINDOW": plan.window}
    if plan.side:
        plan.side.wait_stream(torch.cuda.current_stream())
    if plan.tile_request is not None:
        tiles = plan.tile_request, plan.tile_start
        with torch.cuda.stream(plan.side):
            prefill_kernel[(H, len(plan.tile_request))](
                queries, kv, out, *lengths, batch.query_start, *tiles, *numbers,
                **shape, ROWS=PREFILL_ROWS, num_warps=PREFILL_WARPS, num_stages=stages_that_fit(kv),
            )  # fmt: skip
    if B := batch.num_decodes:
        group = triton.next_power_of_2(H // Hk)
        heads_at_once = max(1, min(group, COMBINED_AT_ONCE // (plan.splits * width)))
        scratch = plan.partial_out, plan.partial_lse, plan.finished
        decode_kernel[(Hk, plan.splits, B)](
            queries, kv, out, *scratch, *lengths, plan.order, *numbers,
            **shape, SPLITS=plan.splits, ROWS=padded(H // Hk), AT_ONCE=heads_at_once,
            ORDERED=plan.ordered, **plan.prefix, **pdl_options(q),
            num_warps=2 if width <= 64 else 4, num_stages=plan.num_stages,
        )  # fmt: skip
    if plan.side:
        torch.cuda.current_stream().wait_stream(plan.side)
    return out.to(q.dtype)


# --------------------------------------------------------------------------------------------------
# Hopper's matters: what was tuned on an H200, and what its kind of GPU has and older ones lack

# Tuned on an H200, 2026-11-27, in whole decode steps of gpt2-124M, SmolLM2-135M, Qwen3-0.6B and
# Llama-3.2-1B: 1 to 256 requests, contexts of 640 and 860 tokens.
TILE = 64  # keys at a time
PREFILL_ROWS = 64  # tokens of a chunk in a tile
PREFILL_WARPS = 4
MAX_SPLITS = 32
COMBINED_AT_ONCE = 8192  # numbers of partial results that a program combines at a time
STAGES_ROOM = (1.76, 3.5)  # tiles of K and V in shared memory with 2 and 3 stages, as compiled


def programs_at_once(D: int) -> int:
    """Programs of the decode kernel that one multiprocessor runs at once."""
    return 6 if padded(D) <= 64 else 4


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return 8  # for the interpreter: any number will do
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program (thread block) may take."""
    if device.type != "cuda":
        return 2**20  # for the interpreter, which has no limit
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def stages_that_fit(kv: Tensor) -> int:
    """Pipeline stages of the attention kernels: 3 are fastest, where shared memory has room."""
    tile = 2 * TILE * padded(kv.shape[-1]) * kv.element_size()
    return 1 + sum(tiles * tile <= shared_memory(kv.device) for tiles in STAGES_ROOM)


@jit
def pdl_wait(PDL: constexpr):
    """
    Programmatic dependent launch (PDL, from Hopper on): this kernel may have been started before
    its predecessor ended. Let the successor start likewise, then block until the predecessor's
    writes are visible. This hides the latency of a launch, which is as long as a small kernel.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def pdl_options(x: Tensor) -> dict:
    """The launch options of a kernel with an argument PDL, on the device of x."""
    if not x.is_cuda:
        return {"PDL": False}
    pdl = torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"PDL": pdl, "launch_pdl": pdl}
