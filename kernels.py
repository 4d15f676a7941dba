"""
The batch of a step (`Batch`), and the two operations on the KV pool: store K and V
(`store_kv_kernel`), and attend through block tables (`attention_kernel`).

A step puts the tokens of all its requests on one flat axis, without padding: first one token of
each decoding request, then the prefill chunks. So decodes and chunks share one forward pass:

    request           r0   r1   r2            r3
    tokens     [T]    a    b    c0 c1 c2 c3   d0 d1        T = 8
    query_start       0    1    2             6     8      [B + 1], B = 4, num_decodes = 2

The Triton versions here read K and V in place, without a gather. The torch versions in
ops/gather.py have the same signatures and effects: `store_kv` writes the pool, `paged_attention`
only reads it. A request with context length 0 gets zeros; for example, CUDA graphs pad with these.

In order: the batch, the store, attention, the launches, and what only GPUs from Hopper on have.
Ignore `pdl_wait` and `PDL` until the last section. Letters: B requests, T tokens, R rows of logits,
H query heads, Hk KV heads, G = H / Hk, D head size, M blocks per table, S block size.
"""

import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model import Attention

# from Triton 3.10 on, a multiplication and an addition are fused only with this setting
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    # with TRITON_INTERPRET=1 the kernels run on CPU tensors, slowly
    INTERPRETED = triton.knobs.runtime.interpret
except ImportError:  # only the Triton kernels need it
    triton = gdc_wait = gdc_launch_dependents = None
    INTERPRETED = False

    class tl:
        constexpr = float  # for the kernels' signatures and constants


constexpr = tl.constexpr


def patch_interpreter():
    """
    Let kernels call `range` with scalars. Triton's interpreter stores scalars as arrays of one
    number; Triton 3.6 (torch 2.11) converts these in a way that numpy 2.4 no longer allows.
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
    The input of one step for the model. Tensors are on the model's device, and int64 unless noted;
    lists are copies on the host.
    """

    tokens: Tensor  # [T] token ids
    positions: Tensor  # [T] position of each token in its own request
    slot_mapping: Tensor  # [T] block * S + offset: where to store the token's K and V
    query_start: Tensor  # [B + 1] int32: index of each request's first token, and T
    context_lens: Tensor  # [B] int32: number of tokens in the pool after this step
    block_tables: Tensor  # [B, M] int32: [request, logical block] -> physical block
    logits_index: Tensor  # [R] int32: indices of the tokens whose logits are computed
    # The first requests are decodes, with one token each. Each token of a draft counts as a decode.
    num_decodes: int
    query_lens_host: list[int]  # [B]
    context_lens_host: list[int]  # [B]
    ops: NamedTuple  # model.Ops, the operators that compute this step
    # window -> result of ops.plan_attention for this step, for the layers with that window
    attention_plans: dict | None = None
    rotations: dict | None = None  # window -> rotation of the heads, see model.GPT.hidden
    # (shared [B], first [groups], end [groups]) int64: number of tokens that a request shares with
    # its group; a group's first request, and its exclusive end (ops/prefix.py)
    groups: tuple | None = None
    dropout: float = 0.0  # only used in training, see model.WholeTexts


# --------------------------------------------------------------------------------------------------
# The store: K and V of each token go to its slot


def jit(function):
    """
    Decorate a kernel with `triton.jit`. Without triton the decorator does nothing, and the kernels
    are never called. Do not specialize on arguments that change from step to step, because each new
    value would compile the kernel again.
    """
    return triton.jit(function, do_not_specialize=["M", "B", "R", "PLACES"]) if triton else function


@jit
def pool_offset(block, offset, head, Hk: constexpr, S: constexpr, D: constexpr):
    """
    Return where K of a KV head begins for slot block * S + offset, in elements from the beginning
    of one layer's pool [2, num_blocks + 1, Hk, S, D]. V is `k_to_v` elements further. Offsets can
    exceed 2^31, so they are int64.
    """
    return ((block.to(tl.int64) * Hk + head) * S + offset) * D


@jit
def store_kv_kernel(
    k, v, kv, slot_mapping, k_stride, v_stride, k_to_v,
    Hk: constexpr, D: constexpr, S: constexpr, WIDTH: constexpr, PDL: constexpr,
):  # fmt: skip
    """Grid (T,): each program copies K and V of one token, all heads, to the token's slot."""
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
# Attention: K and V are read in place, without a gather, one split of TILE keys at a time

INF = constexpr(math.inf)
# Weights (0 to 1) are summed as integers, in multiples of UNIT, because a sum of floats depends on
# its order, and so on the layout of the tile. The integer is the bit pattern of 1 + weight, minus
# ONE, the bit pattern of 1.
UNIT = constexpr(2.0**-23)
ONE = constexpr(0x3F800000)


@jit
def capped(score, squeeze):
    """
    Return the tanh of Gemma 2's soft cap, cap * tanh(score / cap), computed as 2 sigmoid(2 u) - 1.
    `attend_to_split` multiplies by the cap, which is a factor of its `scale`. squeeze None: no cap.
    """
    return score if squeeze is None else 2.0 * tl.sigmoid(2.0 * squeeze * score) - 1.0


@jit
def empty_state(ROWS: constexpr, WIDTH: constexpr):
    """
    Return the state of rows that have not attended to any key yet. A state is a tuple: acc [ROWS,
    WIDTH], the weighted sum of V; total [ROWS], the sum of the weights; top [ROWS], the largest
    score so far, rounded up to a whole number. A weight is 2 ** (score - top).
    """
    acc, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    return acc, total, tl.full([ROWS], -INF, tl.float32)


@jit
def attend_to_split(queries, keys, k_to_v, mask, visible, scale, squeeze):
    """
    Return the state of queries [ROWS, WIDTH] that have attended only to the keys of one split.
    `keys` [TILE, WIDTH] points to K. `mask` tells which numbers may be loaded; None: all, and the
    load is faster. `visible` [ROWS, TILE] tells which keys a row may see; None: all.
    """
    zero = None if mask is None else 0.0
    k, v = tl.load(keys, mask, zero), tl.load(keys + k_to_v, mask, zero)
    score = capped(tl.dot(queries, k.T, input_precision="ieee"), squeeze)
    if visible is not None:
        score = tl.where(visible, score, -INF)
    top = tl.ceil(tl.max(score, axis=1) * scale)
    reference = tl.where(top == -INF, 0.0, top)  # -inf if the row sees none of these keys
    weight = tl.exp2(tl.fma(score, scale, -reference[:, None]))
    units = tl.sum((weight + 1.0).to(tl.int32, bitcast=True) - ONE, axis=1)
    return tl.dot(weight.to(v.dtype), v, input_precision="ieee"), units.to(tl.float32) * UNIT, top


@jit
def merge(state, more):
    """
    Merge a split's state `more` into the state of the splits before it (online softmax, Milakov and
    Gimelshein 2018): rescale both to the higher top, then add them.

    Only the addition rounds. Tops are whole numbers, so the factors are powers of two and the
    products are exact. (Numbers below 2 ** -126 are an exception, too small to matter.) Therefore
    the bits do not depend on when a state is rescaled, nor on whether the compiler fuses a product
    with the addition. A split without a visible key leaves the bits of a row unchanged.
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
    Merge the stored states of splits `begin` to `end` - 1 into `state`, in this order. `place`
    [ROWS] is the index of a row's state for split 0. AT_ONCE states are loaded together and then
    rescaled to their highest top, because a chain of merges would wait for one load after another.
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
    """Merge a tuple of states, in order. The bits are the same as by `merge`, one by one."""
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
def store_state(state, split_acc, split_sums, index, real, WIDTH: constexpr):
    """Store a state for another program: row i at index[i], if real[i]."""
    acc, total, top = state
    tl.store(split_acc + index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc, real[:, None])
    tl.store(split_sums + 2 * index, total, real)
    tl.store(split_sums + 2 * index + 1, top, real)


@jit
def load_state(split_acc, split_sums, index, real, WIDTH: constexpr):
    """Load a state that another program has stored; rows that are not `real` are empty."""
    parts = split_acc + index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    acc = tl.load(parts, real[:, None], 0.0, cache_modifier=".cg")
    total = tl.load(split_sums + 2 * index, real, 0.0, cache_modifier=".cg")
    return acc, total, tl.load(split_sums + 2 * index + 1, real, -INF, cache_modifier=".cg")


@jit
def finishes_last(finished, programs):
    """
    Add one to the counter `finished`, which starts at zero. Return true for the last of `programs`
    to do so: it may merge what the others have stored. Its loads must bypass L1, which may be
    stale: cache_modifier=".cg".
    """
    tl.debug_barrier()  # all threads store before one of them counts
    return tl.atomic_add(finished, 1, sem="acq_rel") == programs - 1


@jit
def order_kernel(
    context_lens, order, finished, B,
    WIDTH: constexpr, Hk: constexpr, HEADS: constexpr, PDL: constexpr,
):  # fmt: skip
    """
    Prepare attention_kernel. Grid (B,): each program writes its request into `order`, which is
    sorted by context length, the longest first, and zeroes the request's counters in `finished`
    [B, Hk].
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
    tile_request, tile_start, group_end, scale, squeeze, q_stride, k_to_v, M, PLACES,
    H: constexpr, Hk: constexpr, D: constexpr, S: constexpr, WINDOW: constexpr,
    HEADS: constexpr, ROWS: constexpr, TILE: constexpr, WIDTH: constexpr,
    PROGRAMS: constexpr, MERGED: constexpr, AT_ONCE: constexpr, PDL: constexpr,
):  # fmt: skip
    """
    Attend from ROWS rows of queries to keys of one request and KV head. The grid is (H / HEADS,
    PROGRAMS, tiles). A tile's rows are one of these:

        a decode    the G = H / Hk query heads that share a KV head, so K and V are read once.
                    If tile_request is given, it has the order of decodes: see order_kernel
        a chunk     one head of consecutive tokens of request tile_request, from tile_start on
        a group     G heads of each decode from tile_request to group_end - 1. Their texts begin
                    with the same `shared` tokens, and the group attends only to these

    Keys are summed one split of TILE keys at a time. Splits are counted from the beginning of the
    text, and merged in order. So a request's sums are the same to the last bit, whatever other
    requests are in the batch.

    If PROGRAMS is 1, a program keeps its state in registers. Otherwise (split-KV, flash-decoding)
    program p takes splits p, p + PROGRAMS, .. and stores their states, and the program that
    finishes last merges them. For example, a decode with 300 keys and two programs:

        keys       0 ..  63   64 .. 127  128 .. 191  192 .. 255  256 .. 299        TILE = 64
        program 0  s0                    s2                      s4     -> split_acc, split_sums
        program 1             s1                     s3                 -> split_acc, split_sums
                   the last of the two to finish: s0 + s1 + s2 + s3 + s4             -> out

    A group stores its state in place of the last shared split's. For example, if 128 tokens are
    shared, it stores s0 + s1 in place of s1. Each of its decodes then adds its own s2, s3, ..

    Tensors: q and out are [T, H, D], with q_stride numbers from one token of q to the next. kv is
    one layer's pool, where V is k_to_v numbers after K. split_acc is [B, H, PLACES, WIDTH], and
    split_sums [B, H, PLACES, 2] has totals and tops. `finished` [B, Hk] counts programs; it is zero
    before and after. For WINDOW see TritonPlan. The grid depends only on B and T, so the host can
    launch without knowing any length.
    """
    is_chunk: constexpr = tile_start is not None
    is_group: constexpr = group_end is not None
    tile, program = tl.program_id(2), tl.program_id(1)
    if is_chunk:  # start with the last tiles: they see the most keys, so they take longest
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
    end = tl.cdiv(tl.minimum(lowest + ROWS, context), TILE)  # exclusive: splits that any row sees
    full = (lowest + 1) // TILE  # exclusive: splits of which every row of a chunk sees all keys
    in_prefix = 0
    if shared is not None:
        in_prefix = tl.load(shared + request).to(tl.int32) // TILE
        first = in_prefix
    if is_group:
        first, end = 0, tl.where(begin < stop, in_prefix, 0)
        full = end
        # Padding groups return without waiting for the predecessor. The first group always waits:
        # the decodes wait for this kernel, but read what its predecessor wrote.
        if (end == 0) & (tile > 0):
            return
    to_merge = first - tl.minimum(in_prefix, 1)  # first state to merge: the group's, if any
    used = tl.maximum(end - first, 1)
    if program >= used:
        return
    table = block_tables + request.to(tl.int64) * M
    t = (first + program) * TILE + tl.arange(0, TILE)
    # Masked by M rather than by `context`: so without a window, this load need not wait for context
    block = tl.load(table + t // S, mask=t // S < M, other=0)

    # Everything read so far was written before embed_kernel, which no later kernel can overtake.
    # From now on the predecessor's output is read.
    if PDL:
        gdc_wait()
    token, head = begin + row // HEADS, tl.program_id(0) * HEADS + row % HEADS
    real, kv_head = token < stop, tl.program_id(0) * HEADS // (H // Hk)
    offsets = (token.to(tl.int64) * q_stride + head * D)[:, None] + d[None, :]
    queries = tl.load(q + offsets, mask=real[:, None] & (d < D)[None, :], other=0.0)
    state = empty_state(ROWS, WIDTH)
    place = (token * H + head).to(tl.int64) * PLACES  # index of a row's split 0 in split_acc
    if shared is not None and PROGRAMS == 1 and not is_group:
        begun = token < tl.where(in_prefix > 0, stop, 0)
        state = load_state(split_acc, split_sums, place, begun, WIDTH)
    unmasked: constexpr = is_group or (is_chunk and WINDOW == 0)
    for masked in tl.static_range(0 if unmasked else 1, 1 if is_group else 2):
        last = end if masked else full
        for split in range(first + program, last, PROGRAMS):
            keys = kv + pool_offset(block, t % S, kv_head, Hk, S, D)[:, None] + d[None, :]
            mask, visible = None, None
            if masked:
                in_context, visible = t < context, t[None, :] <= lowest + row[:, None] // HEADS
                if WINDOW:
                    in_context &= t > lowest - WINDOW
                    visible &= t[None, :] > lowest - WINDOW + row[:, None] // HEADS
                mask = in_context[:, None] & (d < D)[None, :]
            elif WIDTH > D:
                mask = (d < D)[None, :]
            t += PROGRAMS * TILE
            block = tl.load(table + t // S, mask=t // S < M, other=0)  # prefetch for the next round
            more = attend_to_split(queries, keys, k_to_v, mask, visible, scale, squeeze)
            if PROGRAMS == 1:
                state = merge(state, more)
            else:
                store_state(more, split_acc, split_sums, place + split, real, WIDTH)
        first = last
    # Not earlier: the next kernel's programs would wait, and occupy shared memory meanwhile.
    if PDL:
        gdc_launch_dependents()
    if is_group:
        last_shared = place + (in_prefix - 1) % PLACES  # PLACES is 1 if decodes store nothing else
        store_state(state, split_acc, split_sums, last_shared, real, WIDTH)
        return

    if PROGRAMS > 1:
        counter = finished + request * Hk + kv_head
        if not finishes_last(counter, tl.minimum(used, PROGRAMS)):
            return
        tl.store(counter, 0)
        row = tl.arange(0, MERGED)  # not padded to the tile of a tensor core
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
# The host's part: prepare a step's launches, and launch

NO_REQUEST = -1  # tile_request of a padding tile


class TritonPlan(NamedTuple):
    """
    The division of a step's attention into programs, and the tensors that attention_kernel needs
    for it. `plan_attention_triton` makes one for each window, in batch.attention_plans.
    """

    window: int  # sliding-window attention: a token sees this many last tokens; 0: all
    programs: int  # per decode and KV head
    num_stages: int  # for decodes: pipelined tiles of K and V
    order: Tensor | None  # [B] int32, see order_kernel; None: the batch's order
    splits: int  # scratch: number of states per decode and head
    split_acc: Tensor  # [B * H * splits * WIDTH] fp32
    split_sums: Tensor  # [B * H * splits * 2] fp32
    finished: Tensor  # [B * Hk] int32 zeros, see finishes_last
    shares: bool  # decodes share prefixes
    tile_request: Tensor | None  # [tiles] int32, see prefill_tiles
    tile_start: Tensor | None  # [tiles] int32
    # a second stream: chunks compute there while decodes wait for memory
    side: torch.cuda.Stream | None


def padded(n: int) -> int:
    """Round n up to a power of two of at least 16, as the tiles of tensor cores need."""
    return max(16, triton.next_power_of_2(n))


def plan_attention_triton(batch: Batch, H: int, kv: Tensor, window: int = 0) -> TritonPlan:
    """
    Divide a step's attention among programs: allocate scratch, sort the decodes and map tiles to
    chunks. All this runs on the device, and the host does not wait for it. Layers with a window do
    not share prefixes.
    """
    _, _, Hk, S, D = kv.shape
    B = batch.num_decodes
    assert padded(D) <= 256, f"head size {D} is more than the kernels' 256"
    processors = num_processors(kv.device)
    at_once = processors * programs_at_once(D)

    # Use at most 5/8 of the programs that the chip can run at once: that was the fastest.
    programs = 1
    while programs < MAX_PROGRAMS and 2 * programs * B * Hk <= at_once * 5 // 8:
        programs *= 2
    # 3 stages are too many for a program with only a tile or two. And with 2 stages, each
    # multiprocessor runs two more programs: take 2 if all programs then run at once.
    launched = B * Hk * programs
    few = at_once if padded(D) <= 64 else at_once // 2
    num_stages = max(2, stages_that_fit(kv))  # 2 always fit: a decode's tile of queries is small
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
    if launched <= at_once:  # all programs start together, so their order does not matter
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
    Cut chunks into tiles of PREFILL_ROWS tokens. Return two tensors [tiles] int32: the request of
    each tile (NO_REQUEST if it is padding), and where in its chunk the tile begins. The number of
    tiles depends only on the numbers of tokens and chunks, so the host does not wait for the
    device.
    """
    decodes = batch.num_decodes
    chunks = len(batch.query_start) - 1 - decodes
    if not chunks:
        return None, None
    lens = batch.query_start[decodes + 1 :] - batch.query_start[decodes:-1]
    ends = ((lens + PREFILL_ROWS - 1) // PREFILL_ROWS).cumsum(0)  # end of each chunk in tiles
    most = triton.cdiv(len(batch.tokens) - decodes, PREFILL_ROWS) + chunks
    tile = torch.arange(most, device=lens.device)
    chunk = torch.searchsorted(ends, tile, right=True)
    request = torch.where(chunk < chunks, chunk + decodes, NO_REQUEST)
    starts = torch.cat([ends.new_zeros(1), ends])[chunk]
    return request.int(), ((tile - starts) * PREFILL_ROWS).int()


def check_layout(x: Tensor, kv: Tensor, batch: Batch):
    """Assert what the kernels assume about x [T, heads, D] and kv [2, num_blocks + 1, Hk, S, D]."""
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
    """Return attention_kernel's `scale`, for powers of two instead of e, and `squeeze`."""
    if attn.softcap:
        return attn.softcap * math.log2(math.e), attn.scale / attn.softcap
    return attn.scale * math.log2(math.e), None


def paged_attention_triton(q: Tensor, kv: Tensor, attn: Attention, batch: Batch) -> Tensor:
    """
    Triton version of gather.paged_attention_torch, in one or two launches: one for all chunks and
    one for all decodes, or one for the prefixes that decodes share and one for the decodes.
    """
    check_layout(q, kv, batch)
    plan = batch.attention_plans[attn.window]
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
# Tuning for an H200, and programmatic dependent launch, which GPUs before Hopper do not have

# Tuned on an H200, 2026-11-27, in whole decode steps of gpt2-124M, SmolLM2-135M, Qwen3-0.6B and
# Llama-3.2-1B: 1 to 256 requests, contexts of 640 and 860 tokens.
TILE = 64  # keys per split
PREFILL_ROWS = 64  # tokens of a chunk per tile
MAX_PROGRAMS = 32  # per decode and KV head
MERGED_AT_ONCE = 4096  # numbers to load together: at most 8 states of one row, or 16 of more rows
TILES_OF_STAGES = (1.76, 3.5)  # tiles of K and V in shared memory with 2 and with 3 stages


def programs_at_once(D: int) -> int:
    """Return how many programs for decodes one multiprocessor runs at once."""
    return 6 if padded(D) <= 64 else 4


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return 8  # for the interpreter any number will do
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program (thread block) may use."""
    if device.type != "cuda":
        return 2**20  # for the interpreter, which has no limit
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def stages_that_fit(kv: Tensor) -> int:
    """Return the pipeline stages of attention_kernel, 1 to 3. 3 are fastest if they fit."""
    tile = 2 * TILE * padded(kv.shape[-1]) * kv.element_size()
    return 1 + sum(tiles * tile <= shared_memory(kv.device) for tiles in TILES_OF_STAGES)


@jit
def pdl_wait(PDL: constexpr):
    """
    Let the next kernel start, then wait until the previous kernel's writes are visible. This is
    programmatic dependent launch (PDL, from Hopper on): a kernel may start before the previous one
    ends. It hides the latency of a launch, which is as long as a small kernel takes.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def pdl_options(x: Tensor) -> dict:
    """Return the launch options of a kernel that has an argument PDL, on the device of x."""
    if not x.is_cuda:
        return {"PDL": False}
    pdl = torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"PDL": pdl, "launch_pdl": pdl}
