"""
A step's batch (`Batch`), and the two operations on the KV pool: storing K and V
(`store_kv_kernel`), and attending to them through block tables (`attention_kernel`).

A step puts the tokens of all its requests on one flat axis, without padding. One token of each
decoding request comes first, followed by the prefill chunks. So decodes and chunks share a single
forward pass:

    request           r0   r1   r2            r3
    tokens     [T]    a    b    c0 c1 c2 c3   d0 d1        T = 8
    query_start       0    1    2             6     8      [B + 1], B = 4, num_decodes = 2

The Triton versions in this file read K and V in place, without a gather. The torch versions in
ops/gather.py have the same signatures and effects: `store_kv` writes to the pool, and
`paged_attention` only reads it. The output for a request with context length 0 is zero. (CUDA
graphs, for example, are padded with such requests.)

The file is in this order: the batch, the store, attention, the launches, and what only Hopper and
later GPUs have. `pdl_wait` and `PDL` let a kernel start before the previous one ends (programmatic
dependent launch); ignore both until the last section. Letters: B requests, T tokens, R rows of
logits, H query heads, Hk KV heads, G = H / Hk, D head size, M blocks per table, S block size. The
pool's layout, [2, blocks, Hk, S, D] in each layer, is the one that vLLM calls HND.
"""

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model import Attention

# since Triton 3.10, a multiplication and an addition are only fused with this setting
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    # with TRITON_INTERPRET=1, kernels run (slowly) on CPU tensors
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:  # only the Triton kernels need it
    triton = gdc_wait = gdc_launch_dependents = None
    INTERPRETED = False

    class tl:
        constexpr = float  # for the kernels' signatures and constants


constexpr = tl.constexpr


def patch_interpreter():
    """
    Let kernels call `range` with scalars. Triton's interpreter stores a scalar as an array of one
    number, which Triton 3.6 (torch 2.11) converts in a way that numpy 2.4 no longer allows.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if INTERPRETED:
    patch_interpreter()


@dataclass
class Batch:
    """
    The model's input for one step. Tensors are on the model's device, and are int64 unless noted
    otherwise. Lists are copies on the host.
    """

    tokens: Tensor  # [T] token ids
    positions: Tensor  # [T] position of each token in its own request
    slot_mapping: Tensor  # [T] block * S + offset: where to store each token's K and V
    query_start: Tensor  # [B + 1] int32: index of each request's first token, then T
    # [B] int32: number of tokens in the pool after this step (vLLM calls it seq_lens)
    context_lens: Tensor
    block_tables: Tensor  # [B, M] int32: [request, logical block] -> physical block
    logits_index: Tensor  # [R] int32: indices of the tokens that need logits
    # The first num_decodes requests are decodes with one token each. Each token of a draft counts
    # as a separate decode.
    num_decodes: int
    query_lens_host: list[int]  # [B]
    context_lens_host: list[int]  # [B]
    ops: NamedTuple  # model.Ops, the operators that compute this step
    # window -> result of ops.plan_attention for the layers with that window, in this step
    attention_plans: dict | None = None
    rotations: dict | None = None  # window -> rotation of the heads, see model.GPT.hidden
    # (shared [B], first [groups], end [groups]) int64: the number of tokens that each request
    # shares with its group, each group's first request, and its exclusive end (ops/prefix.py)
    groups: tuple | None = None
    dropout: float = 0.0  # only used in training, see model.WholeTexts


# --------------------------------------------------------------------------------------------------
# The store: write each token's K and V to the token's slot


def jit(function):
    """
    Decorate a kernel with `triton.jit`. Without triton, the decorator does nothing, and the kernels
    are never called. Do not specialize on arguments that change from step to step, because the
    kernel would be recompiled for new values.
    """
    return triton.jit(function, do_not_specialize=["M", "B", "R", "PLACES"]) if triton else function


@jit
def pool_offset(block, offset, head, Hk: constexpr, S: constexpr, D: constexpr):
    """
    Return where a KV head's K begins in slot block * S + offset, counted in elements from the start
    of one layer's pool [2, num_blocks + 1, Hk, S, D]. V is `k_to_v` elements further on. Offsets
    are int64, because they can exceed 2^31.
    """
    return ((block.to(tl.int64) * Hk + head) * S + offset) * D


@jit
def store_kv_kernel(
    k, v, kv, slot_mapping, k_stride, v_stride, k_to_v,
    Hk: constexpr, D: constexpr, S: constexpr, WIDTH: constexpr, PDL: constexpr,
):  # fmt: skip
    """Copy each token's K and V to its slot. Grid (T,): one program per token, for all heads."""
    pdl_wait(PDL)
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    slot, real = tl.load(slot_mapping + token), i < Hk * D
    target = kv + pool_offset(slot // S, slot % S, i // D, Hk, S, D) + i % D
    tl.store(target, tl.load(k + token * k_stride + i, mask=real), mask=real)
    tl.store(target + k_to_v, tl.load(v + token * v_stride + i, mask=real), mask=real)


def store_kv_triton(k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """Triton version of gather.store_kv_torch."""
    check_layout(k, kv, batch)
    T, Hk, D = k.shape
    store_kv_kernel[(T,)](
        k, v, kv, batch.slot_mapping, k.stride(0), v.stride(0), kv.stride(0),
        Hk=Hk, D=D, S=kv.shape[3], WIDTH=triton.next_power_of_2(Hk * D), **pdl_options(k),
    )  # fmt: skip
    return kv


# --------------------------------------------------------------------------------------------------
# Attention, which reads K and V in place, without a gather, one split of TILE keys at a time

INF = constexpr(math.inf)
# Weights (0 to 1) are summed as integers, in multiples of UNIT. A sum of floats would depend on the
# order of addition, and therefore on the layout of the tile. A weight's integer is the bit pattern
# of 1 + weight, minus ONE, which is the bit pattern of 1.
UNIT = constexpr(2.0**-23)
ONE = constexpr(0x3F800000)


@jit
def capped(score, softcap_scale):
    """
    Return the tanh in Gemma 2's soft cap, cap * tanh(score / cap), computed as 2 sigmoid(2 u) - 1.
    `attend_to_split` multiplies by the cap, which is a factor of its `scale`. If softcap_scale is
    None, return the score unchanged.
    """
    return score if softcap_scale is None else 2.0 * tl.sigmoid(2.0 * softcap_scale * score) - 1.0


@jit
def empty_state(ROWS: constexpr, WIDTH: constexpr):
    """
    Return the state of rows that have not attended to any keys yet. A state is a tuple of acc
    [ROWS, WIDTH], the weighted sum of V; total [ROWS], the sum of the weights; and top [ROWS], the
    largest score so far, rounded up to a whole number. (FlashAttention calls total and top l and
    m.) A weight is 2 ** (score - top).
    """
    acc, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    return acc, total, tl.full([ROWS], -INF, tl.float32)


@jit
def attend_to_split(queries, keys, k_to_v, mask, visible, scale, softcap_scale):
    """
    Return the state of queries [ROWS, WIDTH] after attending only to the keys of one split. `keys`
    [TILE, WIDTH] points to K. `mask` says which numbers may be loaded; if it is None, all are
    loaded, which is faster. `visible` [ROWS, TILE] says which keys each row may see (None: all).
    """
    zero = None if mask is None else 0.0
    k, v = tl.load(keys, mask, zero), tl.load(keys + k_to_v, mask, zero)
    score = capped(tl.dot(queries, k.T, input_precision="ieee"), softcap_scale)
    if visible is not None:
        score = tl.where(visible, score, -INF)
    top = tl.ceil(tl.max(score, axis=1) * scale)
    reference = tl.where(top == -INF, 0.0, top)  # -inf if the row sees none of these keys
    weight = tl.exp2(tl.fma(score, scale, -reference[:, None]))
    units = tl.sum((weight + 1.0).to(tl.int32, bitcast=True) - ONE, axis=1)
    return tl.dot(weight.to(v.dtype), v, input_precision="ieee"), units.to(tl.float32) * UNIT, top


@jit
def merge(state, states):
    """
    Merge the states of several splits, in order, into the state of the splits before them (online
    softmax, Milakov and Gimelshein 2018): rescale all of them to the highest top, then add.

    Only the additions round. Tops are whole numbers, so the factors are powers of two and the
    products are exact. (The only exceptions are numbers below 2 ** -126, which are too small to
    matter.) So the result is the same to the bit no matter when a state is rescaled, how many are
    merged at once, or whether the compiler fuses a product with an addition. A split in which a row
    does not see any keys leaves that row's bits unchanged.
    """
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
def merge_stored(
    state, split_acc, split_sums, place, begin, end, real, WIDTH: constexpr, AT_ONCE: constexpr
):
    """
    Merge the stored states of splits `begin` to `end` - 1 into `state`, in this order. `place`
    [ROWS] is the index of each row's state for split 0. AT_ONCE states are loaded together, because
    a chain of merges would wait for each load in turn.
    """
    for several in range(begin, end, AT_ONCE):
        states = ()
        for i in tl.static_range(AT_ONCE):
            each = place + several + i
            real_state = real & (each < place + end)
            states += (load_state(split_acc, split_sums, each, real_state, WIDTH),)
        state = merge(state, states)
    return state


@jit
def store_state(state, split_acc, split_sums, index, real, WIDTH: constexpr):
    """Store a state for another program to load: row i at index[i], if real[i]."""
    acc, total, top = state
    tl.store(split_acc + index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc, real[:, None])
    tl.store(split_sums + 2 * index, total, real)
    tl.store(split_sums + 2 * index + 1, top, real)


@jit
def load_state(split_acc, split_sums, index, real, WIDTH: constexpr):
    """Load a state that another program has stored. Rows that are not `real` are empty."""
    parts = split_acc + index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    acc = tl.load(parts, real[:, None], 0.0, cache_modifier=".cg")
    total = tl.load(split_sums + 2 * index, real, 0.0, cache_modifier=".cg")
    return acc, total, tl.load(split_sums + 2 * index + 1, real, -INF, cache_modifier=".cg")


@jit
def finishes_last(finished, programs):
    """
    Add one to the counter `finished`, which starts at zero. Return true in the last of `programs`
    programs to do so. That program may merge what the others have stored, but its loads must bypass
    L1 (cache_modifier=".cg"), because L1 may be stale.
    """
    tl.debug_barrier()  # all threads must have stored before one of them counts
    return tl.atomic_add(finished, 1, sem="acq_rel") == programs - 1


@jit
def order_kernel(
    context_lens, order, finished, B,
    WIDTH: constexpr, Hk: constexpr, HEADS: constexpr, PDL: constexpr,
):  # fmt: skip
    """
    Prepare for attention_kernel: fill `order` with the requests sorted by context length, longest
    first, and zero their counters in `finished` [B, Hk]. Grid (B,): one program per request.
    """
    pdl_wait(PDL)
    i, j, head = tl.program_id(0), tl.arange(0, WIDTH), tl.arange(0, HEADS)
    length, lengths = tl.load(context_lens + i), tl.load(context_lens + j, mask=j < B, other=-1)
    before = (lengths > length) | ((lengths == length) & (j < i))
    tl.store(order + tl.sum(before.to(tl.int32), axis=0), i)
    tl.store(finished + i * Hk + head, 0, mask=head < Hk)


@jit
def attention_kernel(
    q, kv, out, split_acc, split_sums, finished, block_tables, context_lens, query_start, shared,
    tile_request, tile_start, group_end, scale, softcap_scale, q_stride, k_to_v, M, PLACES,
    H: constexpr, Hk: constexpr, D: constexpr, S: constexpr, WINDOW: constexpr,
    HEADS: constexpr, ROWS: constexpr, TILE: constexpr, WIDTH: constexpr,
    PROGRAMS: constexpr, MERGED: constexpr, AT_ONCE: constexpr, PDL: constexpr,
    ALONE: constexpr,
):  # fmt: skip
    """
    Attend from ROWS rows of queries to the keys of one request and KV head. The grid is (H / HEADS,
    PROGRAMS, tiles). The rows of a tile belong to one of these:

        a decode    the G = H / Hk query heads that share a KV head, so K and V are only read once.
                    If tile_request is given, it is the order of the decodes (see order_kernel)
        a chunk     one head of consecutive tokens of request tile_request, from tile_start on
        a group     G heads of each decode from tile_request to group_end - 1. Their texts begin
                    with the same `shared` tokens, and the group attends only to those tokens
                    (cascade attention)

    Each program attends to one split of TILE keys at a time. Splits are counted from the beginning
    of the text, and merged in that order. So a request's sums are the same to the last bit, no
    matter which other requests are in the batch.

    If PROGRAMS is 1, the program keeps its state in registers. Otherwise (split-KV, flash-decoding)
    program p takes splits p, p + PROGRAMS, .. and stores their states, and the last program to
    finish merges all of them. Here is a decode with 300 keys and two programs:

        keys       0 ..  63   64 .. 127  128 .. 191  192 .. 255  256 .. 299        TILE = 64
        program 0  s0                    s2                      s4     -> split_acc, split_sums
        program 1             s1                     s3                 -> split_acc, split_sums
                   the last of the two to finish: s0 + s1 + s2 + s3 + s4             -> out

    A group's program stores its state in the place of the last shared split's state. For example,
    if 128 tokens are shared, it stores s0 + s1 in the place of s1. Each decode in the group then
    adds its own s2, s3, ..

    Tensors: q and out are [T, H, D], and consecutive tokens of q are q_stride numbers apart. kv is
    one layer's pool, in which V comes k_to_v numbers after K. split_acc is [B, H, PLACES, WIDTH];
    split_sums [B, H, PLACES, 2] has the totals and tops. `finished` [B, Hk] counts the programs
    that have finished, and is zero before and after the kernel. For WINDOW, see TritonPlan. ALONE:
    the step has only one token. The grid depends only on B and T, so the host can launch the kernel
    without knowing any lengths.
    """
    is_chunk: constexpr = tile_start is not None
    is_group: constexpr = group_end is not None
    tile, program = tl.program_id(2), tl.program_id(1)
    if is_chunk:  # start with the last tiles, which see the most keys and so take longest
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
    first_position = context - (stop - begin)  # of the first row
    first = tl.maximum(first_position - WINDOW + 1, 0) // TILE if WINDOW else 0
    # exclusive ends: of the splits that any row sees, and of those in which all rows of a chunk see
    # all keys
    end = tl.cdiv(tl.minimum(first_position + ROWS, context), TILE)
    full = (first_position + 1) // TILE
    prefix_splits = 0
    if shared is not None:
        prefix_splits = tl.load(shared + request).to(tl.int32) // TILE
        first = prefix_splits
    if is_group:
        first, end = 0, tl.where(begin < stop, prefix_splits, 0)
        full = end
        # Padding groups return without waiting for the previous kernel. But the first group always
        # waits: the decodes, which wait only for this kernel, also read the previous one's output.
        if (end == 0) & (tile > 0):
            return
    to_merge = first - tl.minimum(prefix_splits, 1)  # first state to merge: the group's, if any
    num_splits = tl.maximum(end - first, 1)
    if program >= num_splits:
        return
    table = block_tables + request.to(tl.int64) * M
    t = (first + program) * TILE + tl.arange(0, TILE)
    # masked by M, not by `context`, so that without a window, this load need not wait for `context`
    block = tl.load(table + t // S, mask=t // S < M, other=0)

    # Everything read so far was written before embed_kernel, which no later kernel can overtake.
    # Everything from here on may read the previous kernel's output.
    if PDL:
        if ALONE:
            gdc_launch_dependents()
        gdc_wait()
    token, head = begin + row // HEADS, tl.program_id(0) * HEADS + row % HEADS
    real, kv_head = token < stop, tl.program_id(0) * HEADS // (H // Hk)
    offsets = (token.to(tl.int64) * q_stride + head * D)[:, None] + d[None, :]
    queries = tl.load(q + offsets, mask=real[:, None] & (d < D)[None, :], other=0.0)
    state = empty_state(ROWS, WIDTH)
    place = (token * H + head).to(tl.int64) * PLACES  # index in split_acc of each row's split 0
    if shared is not None and PROGRAMS == 1 and not is_group:
        begun = token < tl.where(prefix_splits > 0, stop, 0)
        state = load_state(split_acc, split_sums, place, begun, WIDTH)
    unmasked: constexpr = is_group or (is_chunk and WINDOW == 0)
    for masked in tl.static_range(0 if unmasked else 1, 1 if is_group else 2):
        last = end if masked else full
        for split in range(first + program, last, PROGRAMS):
            keys = kv + pool_offset(block, t % S, kv_head, Hk, S, D)[:, None] + d[None, :]
            mask, visible = None, None
            if masked:
                in_context = t < context
                visible = t[None, :] <= first_position + row[:, None] // HEADS
                if WINDOW:
                    in_context &= t > first_position - WINDOW
                    visible &= t[None, :] > first_position - WINDOW + row[:, None] // HEADS
                mask = in_context[:, None] & (d < D)[None, :]
            elif WIDTH > D:
                mask = (d < D)[None, :]
            t += PROGRAMS * TILE
            block = tl.load(table + t // S, mask=t // S < M, other=0)  # prefetch for the next split
            more = attend_to_split(queries, keys, k_to_v, mask, visible, scale, softcap_scale)
            if PROGRAMS == 1:
                state = merge(state, (more,))
            else:
                store_state(more, split_acc, split_sums, place + split, real, WIDTH)
        first = last
    # If launched earlier, the next kernel's programs would occupy shared memory while they wait.
    # After a single token comes vector_kernel, which uses hardly any (except with --deterministic).
    if PDL and not ALONE:
        gdc_launch_dependents()
    if is_group:
        # PLACES is 1 if the decodes themselves do not store any states
        last_shared = place + (prefix_splits - 1) % PLACES
        store_state(state, split_acc, split_sums, last_shared, real, WIDTH)
        return

    if PROGRAMS > 1:
        counter = finished + request * Hk + kv_head
        if not finishes_last(counter, tl.minimum(num_splits, PROGRAMS)):
            return
        tl.store(counter, 0)
        row = tl.arange(0, MERGED)  # not padded to a tensor core's tile
        token, head, real = request, tl.program_id(0) * HEADS + row, row < HEADS
        place = (token * H + head).to(tl.int64) * PLACES
        state = merge_stored(
            empty_state(MERGED, WIDTH),
            split_acc, split_sums, place, to_merge, end, real, WIDTH, AT_ONCE,
        )  # fmt: skip
    acc, total, _ = state
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = out + ((token * H + head).to(tl.int64) * D)[:, None] + d[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


# --------------------------------------------------------------------------------------------------
# The host's part: prepare and launch a step's kernels

NO_REQUEST = -1  # tile_request for a padding tile


class TritonPlan(NamedTuple):
    """
    The programs of a step's attention, and the tensors that attention_kernel needs.
    `plan_attention_triton` makes one plan per window, for batch.attention_plans.
    """

    window: int  # sliding-window attention: how many of the last tokens a token sees; 0: all
    programs: int  # number per decode and KV head
    num_stages: int  # for decodes: number of pipelined tiles of K and V
    order: Tensor | None  # [B] int32, see order_kernel; None: the batch's order
    splits: int  # scratch space: number of states per decode and head
    split_acc: Tensor  # [B * H * splits * WIDTH] fp32
    split_sums: Tensor  # [B * H * splits * 2] fp32
    finished: Tensor  # [B * Hk] int32 zeros, see finishes_last
    shares: bool  # whether decodes share prefixes
    tile_request: Tensor | None  # [tiles] int32, see prefill_tiles
    tile_start: Tensor | None  # [tiles] int32
    # a second stream, on which chunks compute while decodes wait for memory
    side: torch.cuda.Stream | None


def padded(n: int) -> int:
    """Round n up to a power of two of at least 16, as required by tensor cores."""
    return max(16, triton.next_power_of_2(n))


def plan_attention_triton(batch: Batch, H: int, kv: Tensor, window: int = 0) -> TritonPlan:
    """
    Divide a step's attention among programs: allocate scratch space, sort the decodes, and map
    tiles to chunks. All this work runs on the device, without the host waiting for it. Layers with
    a window do not share prefixes.
    """
    _, _, Hk, S, D = kv.shape
    B = batch.num_decodes
    width = padded(D)
    assert width <= 256, f"head size {D} exceeds the kernels' limit of 256"
    processors = num_processors(kv.device)
    at_once = processors * programs_at_once(width)

    # Use at most 5/8 of the programs that the chip can run at once, which measured fastest.
    programs = 1
    while programs < MAX_PROGRAMS and 2 * programs * B * Hk <= at_once * 5 // 8:
        programs *= 2
    # 3 stages are too many for a program with only a tile or two. Also, each multiprocessor can run
    # two more programs if there are only 2 stages. Take 2 if all programs can then run at once.
    launched = B * Hk * programs
    few = at_once if width <= 64 else at_once // 2
    num_stages = max(2, stages_that_fit(kv))  # 2 always fit, as a decode's query tile is small
    if programs > 8 or few < launched <= few + 2 * processors:
        num_stages = 2
    splits = triton.cdiv(batch.block_tables.shape[1] * S, TILE) if programs > 1 else 0
    shares = bool(batch.groups) and not window
    if shares:
        num_stages = 2  # after the shared prefix, most decodes have only a tile or two left
        splits = max(splits, 1)

    order = batch.block_tables.new_empty(B)
    finished = order.new_empty(B * Hk)
    if B:
        order_kernel[(B,)](
            batch.context_lens, order, finished, B,
            WIDTH=triton.next_power_of_2(B), Hk=Hk, HEADS=triton.next_power_of_2(Hk), num_warps=1,
            **pdl_options(order),
        )  # fmt: skip
    if launched <= at_once:  # all programs start together, so order does not matter
        order = None
    split_sums = torch.empty(B * H * splits * 2, device=kv.device)
    split_acc = split_sums.new_empty(B * H * splits * width)
    side = None
    if kv.is_cuda and 0 < B < len(batch.query_lens_host):
        side = torch.cuda.Stream(kv.device)
    return TritonPlan(
        window, programs, num_stages, order, splits, split_acc, split_sums, finished, shares,
        *prefill_tiles(batch), side
    )  # fmt: skip


def prefill_tiles(batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """
    Cut chunks into tiles of PREFILL_ROWS tokens. Return two tensors [tiles] int32: each tile's
    request (NO_REQUEST for padding), and where in its chunk the tile begins. The number of tiles
    depends only on how many tokens and chunks there are, so the host does not wait for the device.
    """
    decodes = batch.num_decodes
    chunks = len(batch.query_start) - 1 - decodes
    if not chunks:
        return None, None
    lens = batch.query_start[decodes:].diff()
    ends = ((lens + PREFILL_ROWS - 1) // PREFILL_ROWS).cumsum(0)  # end of each chunk in tiles
    most = triton.cdiv(len(batch.tokens) - decodes, PREFILL_ROWS) + chunks
    tile = torch.arange(most, device=lens.device)
    chunk = torch.searchsorted(ends, tile, right=True)
    request = torch.where(chunk < chunks, chunk + decodes, NO_REQUEST)
    starts = torch.cat([ends.new_zeros(1), ends])[chunk]
    return request.int(), ((tile - starts) * PREFILL_ROWS).int()


def check_layout(x: Tensor, kv: Tensor, batch: Batch):
    """Assert what kernels assume about x [T, heads, D] and kv [2, num_blocks + 1, Hk, S, D]."""
    tables = batch.block_tables
    D = kv.shape[4]
    floats = x.is_floating_point() and kv.is_floating_point()
    assert x.device == kv.device == tables.device, f"tensors on {x.device} and {kv.device}"
    assert x.shape[2] == D, f"heads of size {x.shape[2]}, but the pool's have size {D}"
    assert floats, f"wanted floating point, got {x.dtype} and {kv.dtype}"
    assert kv.element_size() <= 4, f"the kernels compute in float32, but the pool is {kv.dtype}"
    assert x.stride()[1:] == (D, 1), f"strides {x.stride()}: a token's heads must be contiguous"
    assert kv.is_contiguous(), "a layer's pool must be contiguous"
    assert tables.dtype == torch.int32, f"block tables are {tables.dtype}, wanted int32"
    assert tables.stride(1) == 1, "block tables must be contiguous along blocks"


def factors(attn: Attention) -> tuple[float, float | None]:
    """Return attention_kernel's `scale` (for powers of 2, not of e) and its `softcap_scale`."""
    if attn.softcap:
        return attn.softcap * math.log2(math.e), attn.scale / attn.softcap
    return attn.scale * math.log2(math.e), None


def paged_attention_triton(q: Tensor, kv: Tensor, attn: Attention, batch: Batch) -> Tensor:
    """
    Triton version of gather.paged_attention_torch. It makes one or two launches: one for all chunks
    and one for all decodes, or one for the prefixes that decodes share and one for the decodes.
    """
    check_layout(q, kv, batch)
    plan = batch.attention_plans[attn.window]
    T, H, D = q.shape
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
                HEADS=1, ROWS=PREFILL_ROWS, PROGRAMS=1, PDL=False, ALONE=False,
                num_warps=4 if width <= 128 else 8, num_stages=stages_that_fit(kv),
            )  # fmt: skip
    options = {"HEADS": G, "ALONE": T == 1, **pdl_options(q)}
    if plan.shares:
        launch(
            (Hk, 1, len(first)), first, None, end, PROGRAMS=1, ROWS=PREFILL_ROWS,
            num_warps=4, num_stages=stages_that_fit(kv), **options,
        )  # fmt: skip
    if B := batch.num_decodes:
        few_warps = width <= 64 and T > 1  # more programs then run at once
        launch(
            (Hk, plan.programs, B), plan.order, None, None, ROWS=padded(G), PROGRAMS=plan.programs,
            num_warps=2 if few_warps else 4, num_stages=plan.num_stages, **options,
        )  # fmt: skip
    if plan.side:
        torch.cuda.current_stream().wait_stream(plan.side)
    return out.to(q.dtype)


# --------------------------------------------------------------------------------------------------
# Tuning for an H200, and programmatic dependent launch, which GPUs before Hopper do not have

# Tuned on an H200, 2026-11-27, using whole decode steps of gpt2-124M, SmolLM2-135M, Qwen3-0.6B and
# Llama-3.2-1B, with 1 to 256 requests and contexts of 640 and 860 tokens.
TILE = 64  # keys per split
PREFILL_ROWS = 64  # chunk tokens per tile
MAX_PROGRAMS = 32  # number per decode and KV head
MERGED_AT_ONCE = 4096  # numbers to load together: at most 8 states of one row, or 16 of more rows
TILES_OF_STAGES = (1.76, 3.5)  # tiles of K and V in shared memory, with 2 stages and with 3


def programs_at_once(width: int) -> int:
    """Return how many decode programs run concurrently on each multiprocessor."""
    return 6 if width <= 64 else 4


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors on a GPU."""
    if device.type != "cuda":
        return 8  # any number will do for the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Return how many bytes of shared memory one program (thread block) may use."""
    if device.type != "cuda":
        return 2**20  # for the interpreter, which has no limit
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def stages_that_fit(kv: Tensor) -> int:
    """Return the number of pipeline stages for attention_kernel: 3, the fastest, or what fits."""
    tile = 2 * TILE * padded(kv.shape[-1]) * kv.element_size()
    return 1 + sum(tiles * tile <= shared_memory(kv.device) for tiles in TILES_OF_STAGES)


@jit
def pdl_wait(PDL: constexpr):
    """
    Let the next kernel start, then wait until the previous kernel's writes are visible. With
    programmatic dependent launch (PDL, on Hopper and later), a kernel may start before the previous
    one ends. This hides the launch latency, which is as long as a small kernel takes to run.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def pdl_options(x: Tensor) -> dict:
    """Return the launch options for a kernel with a PDL argument, on the device of x."""
    if not x.is_cuda:
        return {"PDL": False}
    pdl = torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"PDL": pdl, "launch_pdl": pdl}
