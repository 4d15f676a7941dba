"""
What a step carries (`Batch`), and the two operations on the KV pool: store K, V (`store_kv_kernel`)
and attend through block tables (`attention_kernel`).

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
    # common with its group, the group's first request, and the end, exclusive (ops/prefix.py)
    groups: tuple | None = None
    dropout: float = 0.0  # only used in training, see model.WholeTexts


# --------------------------------------------------------------------------------------------------
# The store: K and V of each token go to its slot


def jit(function):
    """
    `triton.jit`. Without triton the decorator does nothing, and the kernels are never called. M,
    the width of the block tables, B and R, the number of rows, change from step to step and must
    not make the kernels compile again.
    """
    return triton.jit(function, do_not_specialize=["M", "B", "R", "PLACES"]) if triton else function


@jit
def pool_offset(block, offset, head, Hk: constexpr, S: constexpr, D: constexpr):
    """
    Return where K of a KV head begins in one layer's pool [2, num_blocks + 1, Hk, S, D], in
    elements, for slots block * S + offset. V is `k_to_v` further on. int64: offsets pass 2^31.
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
    """Store K and V: the Triton version of gather.store_kv_torch."""
    check_layout(k, kv, batch)
    T, Hk, D = k.shape
    store_kv_kernel[(T,)](
        k, v, kv, batch.slot_mapping, k.stride(0), v.stride(0), kv.stride(0),
        Hk=Hk, D=D, S=kv.shape[3], WIDTH=triton.next_power_of_2(Hk * D), **pdl_options(k),
    )  # fmt: skip
    return kv


# --------------------------------------------------------------------------------------------------
# Attention: no gather, K and V are read where they are, a split of TILE keys at a time

INF = constexpr(math.inf)
# Weights, 0 to 1, are summed as whole numbers of UNIT, because the order of a sum of floats would
# depend on the layout of the tile. The bits of 1 + weight, less ONE, the bits of 1, are that number
UNIT = constexpr(2.0**-23)
ONE = constexpr(0x3F800000)


@jit
def capped(score, squeeze):
    """
    Gemma 2's soft cap is cap * tanh(score / cap). This is the tanh, as 2 sigmoid(2 u) - 1;
    `attend_to_split` multiplies by the cap through `scale`. None: no cap.
    """
    return score if squeeze is None else 2.0 * tl.sigmoid(2.0 * squeeze * score) - 1.0


@jit
def empty_state(ROWS: constexpr, WIDTH: constexpr):
    """
    Return the state of rows that have attended to no key: acc [ROWS, WIDTH], the weighted sum of V;
    total [ROWS], the sum of weights; top [ROWS], the largest score so far, rounded up to a whole
    number. A score is an exponent of two, and a weight is 2 ** (score - top).
    """
    acc, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    return acc, total, tl.full([ROWS], -INF, tl.float32)


@jit
def attend_to_split(queries, keys, k_to_v, real, visible, scale, squeeze):
    """
    Return the state of queries [ROWS, WIDTH] that have attended to the keys of one split, and no
    others. `keys` [TILE, WIDTH] points to K; `real` says which numbers are there, `visible` [ROWS,
    TILE] which keys a row may see. None: all, and a load without a mask is faster.
    """
    zero = None if real is None else 0.0
    k, v = tl.load(keys, real, zero), tl.load(keys + k_to_v, real, zero)
    score = capped(tl.dot(queries, k.T, input_precision="ieee"), squeeze)
    if visible is not None:
        score = tl.where(visible, score, -INF)
    top = tl.ceil(tl.max(score, axis=1) * scale)
    reference = tl.where(top == -INF, 0.0, top)  # -inf: the row sees none of these keys
    weight = tl.exp2(tl.fma(score, scale, -reference[:, None]))
    units = tl.sum((weight + 1.0).to(tl.int32, bitcast=True) - ONE, axis=1)
    return tl.dot(weight.to(v.dtype), v, input_precision="ieee"), units.to(tl.float32) * UNIT, top


@jit
def merge(state, more):
    """
    Merge a split's state into that of the splits before (online softmax, Milakov and Gimelshein
    2018): both are brought to the higher top, then added. Tops are whole numbers, so the factors
    are powers of two and the products are exact (except for numbers below 2 ** -126, which do not
    count beside the others): only the addition rounds. So the bits depend neither on when a state
    is brought to a higher top, nor on whether the compiler fuses a product with the addition. And a
    split of which a row sees no key changes none of them.
    """
    acc, total, top = state
    more_acc, more_total, more_top = more
    highest = tl.maximum(top, more_top)
    reference = tl.where(highest == -INF, 0.0, highest)
    shrink, weight = tl.exp2(top - reference), tl.exp2(more_top - reference)
    acc = acc * shrink[:, None] + more_acc * weight[:, None]
    return acc, total * shrink + more_total * weight, highest


@jit
def merge_stored(
    state, split_acc, split_sums, place, begin, end, real, WIDTH: constexpr, AT_ONCE: constexpr
):
    """
    Merge the states of the splits from `begin` to `end` that programs have stored at `place`
    [ROWS], in this order, AT_ONCE at a time. All of these are loaded first, and brought to the
    highest top together: a chain of merges would wait for one load after the other.
    """
    for several in range(begin, end, AT_ONCE):
        states = ()
        for i in tl.static_range(AT_ONCE):
            each = place + several + i
            real_state = real & (each < place + end)
            states += (load_state(split_acc, split_sums, each, real_state, WIDTH),)
        state = add_states(state, states)
    return state


@jit
def add_states(state, states):
    """Merge `states`, a tuple, in their order: to the bit what `merge` would, one by one."""
    acc, total, top = state
    highest = top
    for i in tl.static_range(len(states)):
        highest = tl.maximum(highest, states[i][2])
    reference = tl.where(highest == -INF, 0.0, highest)
    shrink = tl.exp2(top - reference)
    acc, total = acc * shrink[:, None], total * shrink
    for i in tl.static_range(len(states)):
        more_acc, more_total, more_top = states[i]
        weight = tl.exp2(more_top - reference)
        acc += more_acc * weight[:, None]
        total += more_total * weight
    return acc, total, highest


@jit
def store_state(state, split_acc, split_sums, at, real, WIDTH: constexpr):
    """Store a state at `at` [ROWS], where `real` [ROWS], for another program."""
    acc, total, top = state
    tl.store(split_acc + at[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc, real[:, None])
    tl.store(split_sums + 2 * at, total, real)
    tl.store(split_sums + 2 * at + 1, top, real)


@jit
def load_state(split_acc, split_sums, at, real, WIDTH: constexpr):
    """Load a state that another program has stored; of other rows than `real`, an empty one."""
    parts = split_acc + at[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    acc = tl.load(parts, real[:, None], 0.0, cache_modifier=".cg")
    total = tl.load(split_sums + 2 * at, real, 0.0, cache_modifier=".cg")
    return acc, total, tl.load(split_sums + 2 * at + 1, real, -INF, cache_modifier=".cg")


@jit
def finishes_last(finished, programs):
    """
    Count this program in `finished`, zero at first; true for the last of `programs` to do so. That
    one may then merge what all of them have stored, if it loads past L1, which may be stale:
    cache_modifier=".cg".
    """
    tl.debug_barrier()  # all threads have stored before one of them counts
    return tl.atomic_add(finished, 1, sem="acq_rel") == programs - 1


@jit
def order_kernel(
    context_lens, order, finished, B,
    WIDTH: constexpr, Hk: constexpr, HEADS: constexpr, PDL: constexpr,
):  # fmt: skip
    """
    Grid (B,): a program finds the place of its request in `order`, the longest context first, and
    sets its counters [B, Hk] in `finished` to zero, both for attention_kernel.
    """
    pdl_wait(PDL)
    i, other, head = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, HEADS)
    mine, lens = tl.load(context_lens + i), tl.load(context_lens + other, mask=other < B, other=-1)
    before = (lens > mine) | ((lens == mine) & (other < i))
    tl.store(order + tl.sum(before.to(tl.int32), axis=0), i)
    tl.store(finished + i * Hk + head, 0, mask=head < Hk)


@jit
def attention_kernel(
    q, kv, out, split_acc, split_sums, finished, block_tables, context_lens, query_start, shared,
    tile_request, tile_start, group_end, scale, squeeze, q_stride, k_to_v, M, PLACES,
    H: constexpr, Hk: constexpr, D: constexpr, S: constexpr, WINDOW: constexpr,
    HEADS: constexpr, ROWS: constexpr, TILE: constexpr, WIDTH: constexpr,
    PROGRAMS: constexpr, MERGED: constexpr, AT_ONCE: constexpr, PDL: constexpr,
):  # fmt: skip
    """
    Grid (H / HEADS, PROGRAMS, tiles): a program attends from ROWS rows of queries to keys of one
    request and KV head. The rows of a tile are one of three:

        a decode    the G = H / Hk query heads that share a KV head, so K and V are read once.
                    tile_request may say whose turn it is: the longest first, see order_kernel
        a chunk     one head of consecutive tokens of tile_request, from tile_start on
        a group     the G heads of each decode from tile_request to group_end. These begin with
                    the same `shared` tokens, and the group attends to no others

    Keys are summed a split of TILE at a time, counted from the beginning of the text, and splits
    are merged first to last. So the sums are the same to the last bit whatever is beside a request.
    One program keeps its state in registers. Of several (split-KV, flash-decoding) each takes every
    PROGRAMS-th split, and the last to finish merges them all. 300 keys of a decode, two programs:

        keys       0 ..  63   64 .. 127  128 .. 191  192 .. 255  256 .. 299        TILE = 64
        program 0  s0                    s2                      s4     -> split_acc, split_sums
        program 1             s1                     s3                 -> split_acc, split_sums
                   the last of the two to finish: s0 + s1 + s2 + s3 + s4             -> out

    A group leaves its state where that of the last shared split would be, s0 + s1 if 128 tokens are
    shared; then each of its decodes adds s2, s3, .. of its own.

    q is [T, H, D], q_stride numbers from token to token, and out [T, H, D]; kv is one layer's pool,
    V k_to_v numbers after K. split_acc is [B, H, PLACES, WIDTH]; split_sums [B, H, PLACES, 2] has
    totals and tops. `finished` [B, Hk] counts programs, from zero to zero. For WINDOW see
    TritonPlan. The grid depends only on B and T, so the host needs no length to launch it.
    """
    is_chunk: constexpr = tile_start is not None
    is_group: constexpr = group_end is not None
    tile, program = tl.program_id(2), tl.program_id(1)
    if is_chunk:  # the last tiles see most keys: one that started last would run alone at the end
        tile = tl.num_programs(2) - 1 - tile
    request = tile
    if tile_request is not None:
        request = tl.load(tile_request + tile).to(tl.int32)
        if request < 0:
            return
    begin, stop, row, d = request, request + 1, tl.arange(0, ROWS), tl.arange(0, WIDTH)
    if is_chunk:
        begin = tl.load(query_start + request) + tl.load(tile_start + tile)
        stop = tl.load(query_start + request + 1)
    if is_group:
        stop = tl.load(group_end + tile).to(tl.int32)
    context = tl.load(context_lens + request)
    lowest = context - (stop - begin)  # position of the first row
    first = tl.maximum(lowest - WINDOW + 1, 0) // TILE if WINDOW else 0
    end = tl.cdiv(tl.minimum(lowest + ROWS, context), TILE)  # of the splits that any row sees
    full = (lowest + 1) // TILE  # of those that all rows see whole, in a chunk
    in_prefix = 0
    if shared is not None:
        in_prefix = tl.load(shared + request).to(tl.int32) // TILE
        first = in_prefix
    if is_group:
        first, end = 0, tl.where(begin < stop, in_prefix, 0)
        full = end
        # Padding. The first group waits in any case: the decodes, which wait for this kernel, read
        # what its predecessor wrote.
        if (end == 0) & (tile > 0):
            return
    to_merge = first - tl.minimum(in_prefix, 1)  # where the states that make up the answer begin
    used = tl.maximum(end - first, 1)
    if program >= used:
        return
    table = block_tables + request.to(tl.int64) * M
    t = (first + program) * TILE + tl.arange(0, TILE)
    # masked by M: does not depend on `context`, if there is no window, so need not wait for it
    block = tl.load(table + t // S, mask=t // S < M, other=0)

    # Everything read above was written before embed_kernel, which no kernel overtakes. From here on
    # the predecessor's output is read.
    if PDL:
        gdc_wait()
    token, head = begin + row // HEADS, tl.program_id(0) * HEADS + row % HEADS
    real, kv_head = token < stop, tl.program_id(0) * HEADS // (H // Hk)
    at = (token.to(tl.int64) * q_stride + head * D)[:, None] + d[None, :]
    queries = tl.load(q + at, mask=real[:, None] & (d < D)[None, :], other=0.0)
    state = empty_state(ROWS, WIDTH)
    place = (token * H + head).to(tl.int64) * PLACES  # of a row's first split in split_acc
    if shared is not None and PROGRAMS == 1 and not is_group:
        begun = token < tl.where(in_prefix > 0, stop, 0)
        state = load_state(split_acc, split_sums, place, begun, WIDTH)
    unmasked: constexpr = is_group or (is_chunk and WINDOW == 0)
    for masked in tl.static_range(0 if unmasked else 1, 1 if is_group else 2):
        last = end if masked else full
        for split in range(first + program, last, PROGRAMS):
            keys = kv + pool_offset(block, t % S, kv_head, Hk, S, D)[:, None] + d[None, :]
            there, visible = None, None
            if masked:
                in_context, visible = t < context, t[None, :] <= lowest + row[:, None] // HEADS
                if WINDOW:
                    in_context &= t > lowest - WINDOW
                    visible &= t[None, :] > lowest - WINDOW + row[:, None] // HEADS
                there = in_context[:, None] & (d < D)[None, :]
            elif WIDTH > D:
                there = (d < D)[None, :]
            t += PROGRAMS * TILE
            block = tl.load(table + t // S, mask=t // S < M, other=0)  # for the next round, in time
            more = attend_to_split(queries, keys, k_to_v, there, visible, scale, squeeze)
            if PROGRAMS == 1:
                state = merge(state, more)
            else:
                store_state(more, split_acc, split_sums, place + split, real, WIDTH)
        first = last
    # only now: programs of the next kernel that merely wait would occupy shared memory
    if PDL:
        gdc_launch_dependents()
    if is_group:
        to = place + (in_prefix - 1) % PLACES  # if PLACES is 1, its decodes keep no other state
        store_state(state, split_acc, split_sums, to, real, WIDTH)
        return

    if PROGRAMS > 1:
        counter = finished + request * Hk + kv_head
        if not finishes_last(counter, tl.minimum(used, PROGRAMS)):
            return
        tl.store(counter, 0)
        row = tl.arange(0, MERGED)  # without the padding of a tensor core's tile
        token, head, real = request, tl.program_id(0) * HEADS + row, row < HEADS
        place = (token * H + head).to(tl.int64) * PLACES
        state = merge_stored(
            empty_state(MERGED, WIDTH),
            split_acc, split_sums, place, to_merge, end, real, WIDTH, AT_ONCE,
        )  # fmt: skip
    acc, total, _ = state
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = out + ((token * H + head).to(tl.int64) * D)[:, None] + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


# --------------------------------------------------------------------------------------------------
# The host half: what a step's launches need, and the launches

NO_REQUEST = -1  # of a tile that is padding


class TritonPlan(NamedTuple):
    """
    How a step's attention is cut into programs, and what attention_kernel needs for that.
    `prepare_triton` leaves one in batch.prepared for each window.
    """

    window: int  # sliding-window attention: number of last tokens seen, with itself; 0: all
    programs: int  # for each decode and KV head
    num_stages: int  # for decodes: tiles of K and V under way
    order: Tensor | None  # [B] int32, see order_kernel; None: as they are
    splits: int  # of each decode and head in scratch
    split_acc: Tensor  # [B * H * splits * WIDTH] fp32
    split_sums: Tensor  # [B * H * splits * 2] fp32
    finished: Tensor  # [B * Hk] int32 zeros, see finishes_last
    shares: bool  # decodes share prefixes
    tile_request: Tensor | None  # [tiles] int32, see prefill_tiles
    tile_start: Tensor | None  # [tiles] int32
    # beside decodes, which wait for memory, chunks compute on a stream of their own
    side: torch.cuda.Stream | None


def padded(n: int) -> int:
    """n rounded up to the side of a tensor core's tile: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(n))


def prepare_triton(batch: Batch, H: int, kv: Tensor, window: int = 0) -> TritonPlan:
    """
    Allocate scratch, sort the decodes and map tiles to chunks, on the device, without waiting for
    it. Layers with a window share no prefixes.
    """
    _, _, Hk, S, D = kv.shape
    B = batch.num_decodes
    assert padded(D) <= 256, f"head size {D} is more than the kernels' 256"
    processors = num_processors(kv.device)
    at_once = processors * programs_at_once(D)

    # Fastest: at most 5/8 of those that the chip runs at once.
    programs = 1
    while programs < MAX_PROGRAMS and 2 * programs * B * Hk <= at_once * 5 // 8:
        programs *= 2
    # 3 stages are too many for a tile or two, and two programs more run at once with 2.
    launched = B * Hk * programs
    few = at_once if padded(D) <= 64 else at_once // 2
    num_stages = max(2, stages_that_fit(kv))  # its tile of queries is small
    if programs > 8 or few < launched <= few + 2 * processors:
        num_stages = 2
    splits = triton.cdiv(batch.block_tables.shape[1] * S, TILE) if programs > 1 else 0
    shares = bool(batch.groups) and not window
    if shares:
        num_stages = 2  # most decodes have a tile or two of their own
        splits = max(splits, 1)

    order = batch.block_tables.new_empty(B)
    finished = order.new_empty(B * Hk)
    if B:
        order_kernel[(B,)](
            batch.context_lens, order, finished, B,
            WIDTH=triton.next_power_of_2(B), Hk=Hk, HEADS=triton.next_power_of_2(Hk), num_warps=1,
            **pdl_options(order),
        )  # fmt: skip
    if launched <= at_once:  # all start at once, and need not wait for the order
        order = None
    split_sums = torch.empty(B * H * splits * 2, device=kv.device)
    split_acc = split_sums.new_empty(B * H * splits * padded(D))
    side = None
    if kv.is_cuda and 0 < B < len(batch.query_lens_host):
        side = torch.cuda.Stream(kv.device)
    return TritonPlan(
        window, programs, num_stages, order, splits, split_acc, split_sums, finished, shares,
        *prefill_tiles(batch), side
    )  # fmt: skip


def prefill_tiles(batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """
    Return two of [tiles] int32: the request that a tile of PREFILL_ROWS tokens belongs to, or
    NO_REQUEST, and where in its chunk the tile begins. The number of tiles depends only on the
    number of tokens and of chunks, so the host does not wait for the device.
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
    Attend: the Triton version of gather.paged_attention_torch, in at most two launches. These are
    one for all decodes and one for all chunks; or one for the prefixes that decodes share, then one
    for the decodes.
    """
    check_layout(q, kv, batch)
    plan = batch.prepared[attn.window]
    _, H, D = q.shape
    Hk, S = kv.shape[2:4]
    G = H // Hk
    width = padded(D)
    queries = q.to(kv.dtype)
    out = queries.new_empty(q.shape)
    shared, first, end = batch.groups if plan.shares else (None, None, None)
    tables = batch.block_tables
    merged = triton.next_power_of_2(G)
    states = max(1, min(16 if merged > 1 else 8, MERGED_AT_ONCE // (merged * width)))

    def launch(grid, *tiles, **options):
        attention_kernel[grid](
            queries, kv, out, plan.split_acc, plan.split_sums, plan.finished, tables,
            batch.context_lens, batch.query_start, shared, *tiles, *factors(attn),
            queries.stride(0), kv.stride(0), tables.stride(0), plan.splits,
            H=H, Hk=Hk, D=D, S=S, WINDOW=plan.window, TILE=TILE, WIDTH=width, MERGED=merged,
            AT_ONCE=states, **options,
        )  # fmt: skip

    if plan.side:
        plan.side.wait_stream(torch.cuda.current_stream())
    if plan.tile_request is not None:
        with torch.cuda.stream(plan.side):
            launch(
                (H, 1, len(plan.tile_request)), plan.tile_request, plan.tile_start, None,
                HEADS=1, ROWS=PREFILL_ROWS, PROGRAMS=1, PDL=False,
                num_warps=4 if width <= 128 else 8, num_stages=stages_that_fit(kv),
            )  # fmt: skip
    options = {"HEADS": G, **pdl_options(q)}
    if plan.shares:
        launch(
            (Hk, 1, len(first)), first, None, end, PROGRAMS=1, ROWS=PREFILL_ROWS,
            num_warps=4, num_stages=stages_that_fit(kv), **options,
        )  # fmt: skip
    if B := batch.num_decodes:
        launch(
            (Hk, plan.programs, B), plan.order, None, None, ROWS=padded(G), PROGRAMS=plan.programs,
            num_warps=2 if width <= 64 else 4, num_stages=plan.num_stages, **options,
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
MAX_PROGRAMS = 32  # for one decode and KV head
MERGED_AT_ONCE = 4096  # numbers of stored states under way; 8 states of one row, else 16
STAGES_ROOM = (1.76, 3.5)  # tiles of K and V in shared memory with 2 and 3 stages, as compiled


def programs_at_once(D: int) -> int:
    """Programs for decodes that one multiprocessor runs at once."""
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
    its predecessor ended. Let the successor start too, then block until the predecessor's
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
