"""
`--deterministic` on a GPU: Triton operators whose results for a request are the same to the last
bit, whatever is served beside it and however its tokens are divided into steps. A sum of floats
depends on the order of its additions, so here that order never depends on the batch:

- A matrix product is a sum of parts (split-K), first to last. Their number depends on the layer
  alone. A part is summed in the order of its inputs, in tiles of any shape, because tensor cores
  add up alike in all of them. So the tiles, and which program adds the parts, may depend on the
  number of rows.
- Attention sums SPLIT_KEYS keys at a time, divided by position in the text, then these sums, first
  to last. One kernel does so for decodes and chunks.
- The weights of a softmax are summed as integers, because the order of a sum of floats would depend
  on the layout of the tile.

ops/choice.py makes the table. Letters as in kernels.py and linear.py.
"""

import torch
from torch import Tensor

import model
from kernels import (
    INF,
    PREFILL_ROWS,
    PREFILL_WARPS,
    TILE,
    Batch,
    TritonPlan,
    capped,
    check_layout,
    factors,
    finishes_last,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    padded,
    pdl_options,
    pool_offset,
    prepare_triton,
    stages_that_fit,
    tl,
    triton,
)
from ops import fused
from ops.linear import ENOUGH_PROGRAMS, Tiles, head_tiles, launch_linear, layer_tiles, num_parts

# --------------------------------------------------------------------------------------------------
# Products

# Up to APART_ROWS rows the tiles are those of linear.py, and each part of a sum has a program of
# its own. With more rows a program computes all parts, in the largest tiles that still make
# enough programs.
APART_ROWS = 512
MOST_PARTS = 4  # of a sum
LARGE = Tiles(128, 128, 64, warps=8, stages=4)
MIDDLE = Tiles(128, 64, 64, warps=8, stages=6)
SMALL = Tiles(64, 64, 64, warps=4, stages=8, swapped=True)


def tiles_for(R: int, layer, P=1) -> Tiles:
    """How a product of R rows, the sum of P parts, is cut; no bit of it depends on R."""
    N = len(layer.weight)
    if R <= APART_ROWS:
        tiles = layer_tiles(R, N, layer.weight.numel())
        return tiles._replace(apart=P)
    for tiles in (LARGE, MIDDLE, SMALL):
        programs = triton.cdiv(R, tiles.rows) * triton.cdiv(N, tiles.cols)
        if programs >= ENOUGH_PROGRAMS:
            break
    return tiles._replace(together=P)


def linear(x: Tensor, layer, activation=None, gated=False, partial_sums=False) -> Tensor:
    """As linear.linear; the number of parts follows from the layer alone."""
    N, K = layer.weight.shape
    P = 1
    if partial_sums:
        programs = N // 64  # for one part: most tiles have so many columns
        P = min(MOST_PARTS, num_parts(K, programs))
    tiles = tiles_for(len(x), layer, P)
    return launch_linear(x, layer, activation, gated, partial_sums, tiles=tiles)


def head(x: Tensor, layer, softcap: float = 0.0) -> Tensor:
    """As linear.head."""
    logits = launch_linear(x, layer, tiles=head_tiles(len(x)))
    return model.soft_cap(logits, softcap) if softcap else logits


def project_qkv(y: Tensor, attn: model.Attention, kv: Tensor, batch: Batch):
    """As fused.project_qkv."""
    if batch.rotations or attn.q_norm is not None:
        return fused.project_qkv(y, attn, kv, batch)
    tiles = tiles_for(len(y), attn.c_attn)
    targets = (kv, batch.slot_mapping)
    q = launch_linear(y, attn.c_attn, targets=targets, tiles=tiles)
    return q.view(len(y), attn.H, attn.D), kv


# --------------------------------------------------------------------------------------------------
# Attention

SPLIT_KEYS = 128  # keys of a split, which is summed by itself
AT_ONCE = 8  # splits whose sums are loaded at once
WIDE_WARPS = 8  # of a program for a chunk, with heads of more than 128 numbers
# Weights, 0 to 1, are summed as whole numbers of UNIT: the bits of 1 + weight, less ONE, which are
# the bits of 1, are that number.
UNIT = tl.constexpr(2.0**-23)
ONE = tl.constexpr(0x3F800000)


@jit
def add_split(acc, total, top, more_acc, more_total, more_top):
    """
    Add a split's state, see kernels.online_softmax, to that of the splits before. The additions are
    spelled out as fma: otherwise the compiler chooses which of the two products is rounded, and may
    choose differently in two places.
    """
    highest = tl.maximum(top, more_top)
    reference = tl.where(highest == -INF, 0.0, highest)
    shrink, weight = tl.exp2(top - reference), tl.exp2(more_top - reference)
    acc = tl.fma(more_acc, tl.broadcast_to(weight[:, None], acc.shape), acc * shrink[:, None])
    return acc, tl.fma(more_total, weight, total * shrink), highest


@jit
def attention_kernel(
    q, kv, out, split_acc, split_sums, finished, block_tables, context_lens, query_start,
    tile_request, tile_start, scale, squeeze, k_to_v, M,
    H: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, PROGRAMS: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """
    Grid (H / HEADS, PROGRAMS, tiles): a program attends from ROWS rows, HEADS query heads of one KV
    head for each of consecutive tokens of one request, to every PROGRAMS-th split of SPLIT keys.
    Tiles are those of prefill_kernel; without tile_start each is a request that decodes. One of
    several programs, the last to finish, adds up the splits, from split_acc [B, H, SPLITS, WIDTH]
    and split_sums [B, H, SPLITS, 2], the sums of weights and the largest exponents. A key that a
    row may not see changes no bit of it: rows begin and end in the middle of a tile or a split.
    """
    tile = tl.program_id(2)
    if tile_start is not None:  # those that see most keys first, see prefill_kernel
        tile = tl.num_programs(2) - 1 - tile
    request = tl.load(tile_request + tile)
    if request < 0:
        return
    begin, stop, offset = request, request + 1, 0
    if tile_start is not None:
        offset = tl.load(tile_start + tile)
        begin, stop = tl.load(query_start + request), tl.load(query_start + request + 1)
    context = tl.load(context_lens + request)
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    lowest = context - (stop - begin) + offset  # position of the first row
    position, token = lowest + row // HEADS, begin + offset + row // HEADS
    head, kv_head = tl.program_id(0) * HEADS + row % HEADS, tl.program_id(0) * HEADS // (H // Hk)
    first = tl.maximum(lowest - WINDOW + 1, 0) if WINDOW else 0
    end = tl.minimum(lowest + (ROWS + HEADS - 1) // HEADS, context)
    first_split = first // SPLIT
    used = tl.maximum(tl.cdiv(end, SPLIT) - first_split, 1)
    program = tl.program_id(1) if PROGRAMS > 1 else 0
    if program >= used:
        return
    table = block_tables + request.to(tl.int64) * M
    real = (token < stop)[:, None] & (d < D)[None, :]
    at = ((token * H + head) * D)[:, None] + d[None, :]
    if PDL:
        gdc_wait()
    queries = tl.load(q + at, mask=real, other=0.0)
    acc, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -INF, tl.float32)
    mine = (request * H + head).to(tl.int64) * SPLITS  # where the splits of each row begin
    # of a chunk: every row sees all tiles before its first row's
    some_unmasked: tl.constexpr = tile_start is not None and WINDOW == 0 and WIDTH == D
    for split in range(program, used if PROGRAMS > 1 else 1, PROGRAMS):
        more_acc, more_total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
        more_top = tl.full([ROWS], -INF, tl.float32)
        from_key = tl.maximum((first_split + split) * SPLIT, first // TILE * TILE)
        to_key = tl.minimum((first_split + split + 1) * SPLIT, end) if PROGRAMS > 1 else end
        for masked in tl.static_range(0 if some_unmasked else 1, 2):
            last = to_key if masked else tl.maximum(lowest + 1, 0) // TILE * TILE
            t = from_key + tl.arange(0, TILE)
            block = tl.load(table + t // S, mask=t // S < M, other=0)
            for start in range(from_key, last, TILE):
                if PROGRAMS == 1 and start % SPLIT == 0:
                    acc, total, top = add_split(acc, total, top, more_acc, more_total, more_top)
                    more_acc, more_total = tl.zeros_like(acc), tl.zeros_like(total)
                    more_top = tl.full([ROWS], -INF, tl.float32)
                there, visible = t < to_key, t[None, :] <= position[:, None]
                if WINDOW:
                    there &= t >= first
                    visible &= t[None, :] > position[:, None] - WINDOW
                keys = kv + pool_offset(block, t % S, kv_head, Hk, S, D)[:, None] + d[None, :]
                t += TILE
                block = tl.load(table + t // S, mask=t // S < M, other=0)  # for the next round
                if masked:
                    mask = there[:, None] & (d < D)[None, :]
                    k = tl.load(keys, mask=mask, other=0.0)  # [TILE, WIDTH]
                    v = tl.load(keys + k_to_v, mask=mask, other=0.0)
                else:  # a load without a mask is faster
                    k = tl.load(keys)
                    v = tl.load(keys + k_to_v)
                score = capped(tl.dot(queries, k.T, input_precision="ieee"), squeeze)
                if masked:
                    score = tl.where(visible, score, -INF)
                highest = tl.maximum(more_top, tl.max(score, axis=1) * scale)
                reference = tl.where(highest == -INF, 0.0, highest)
                weight = tl.exp2(tl.fma(score, scale, -reference[:, None]))
                shrink, more_top = tl.exp2(more_top - reference), highest
                units = tl.sum((weight + 1.0).to(tl.int32, bitcast=True) - ONE, axis=1)
                more_total = tl.fma(more_total, shrink, units.to(tl.float32) * UNIT)
                more_acc *= shrink[:, None]
                more_acc = tl.dot(weight.to(v.dtype), v, more_acc, input_precision="ieee")
            from_key = last
        if PROGRAMS == 1:
            acc, total, top = add_split(acc, total, top, more_acc, more_total, more_top)
        else:
            to = mine + split
            tl.store(split_acc + to[:, None] * WIDTH + d[None, :], more_acc, mask=real)
            tl.store(split_sums + 2 * to, more_total, mask=token < stop)
            tl.store(split_sums + 2 * to + 1, more_top, mask=token < stop)
    if PDL:
        gdc_launch_dependents()
    if PROGRAMS > 1:
        counter = finished + request * Hk + kv_head
        if not finishes_last(counter, tl.minimum(used, PROGRAMS)):
            return
        tl.store(counter, 0)
        for several in range(0, used, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                at_split = mine + several + i
                of_row = (token < stop) & (at_split < mine + used)
                parts = split_acc + at_split[:, None] * WIDTH + d[None, :]
                seen = of_row[:, None] & (d < D)[None, :]
                more_acc = tl.load(parts, mask=seen, other=0.0, cache_modifier=".cg")
                sums = split_sums + 2 * at_split
                more_total = tl.load(sums, mask=of_row, other=0.0, cache_modifier=".cg")
                more_top = tl.load(sums + 1, mask=of_row, other=-INF, cache_modifier=".cg")
                acc, total, top = add_split(acc, total, top, more_acc, more_total, more_top)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=real)


def most_splits(batch: Batch, S: int) -> int:
    """The splits of the longest text that the block tables have room for."""
    M = batch.block_tables.shape[1]
    return triton.cdiv(M * S, SPLIT_KEYS)


def prepare(batch: Batch, H: int, kv: Tensor, window: int = 0) -> TritonPlan:
    """
    As kernels.prepare_triton: its `splits` are the programs that share the splits of a request, its
    partial results those of `attention_kernel`.
    """
    plan = prepare_triton(batch, H, kv, window)
    *_, S, D = kv.shape
    splits = most_splits(batch, S)
    programs = min(plan.splits, triton.next_power_of_2(splits))
    if programs == 1:
        splits = 0  # one program needs no scratch
    count = batch.num_decodes * H * splits
    sums = torch.empty(2 * count, device=kv.device)
    acc = sums.new_empty(count * padded(D))
    return plan._replace(splits=programs, partial_out=acc, partial_lse=sums)


def attend(q: Tensor, kv: Tensor, attn: model.Attention, batch: Batch) -> Tensor:
    """As kernels.paged_attention_triton."""
    check_layout(q, kv, batch)
    plan = batch.prepared[attn.window]
    H = q.shape[1]
    Hk, S, D = kv.shape[2:]
    tables = batch.block_tables
    queries = q.to(kv.dtype).contiguous()
    out = torch.empty_like(queries)
    assert out.numel() < 2**31, f"the kernel counts in int32, the step has {q.shape} queries"
    tensors = (queries, kv, out)
    tensors += (plan.partial_out, plan.partial_lse, plan.finished)
    tensors += (tables, batch.context_lens, batch.query_start)
    scale, squeeze = factors(attn)
    numbers = (scale, squeeze, kv.stride(0), tables.stride(0))
    width = padded(D)
    shape = {"H": H, "Hk": Hk, "D": D, "S": S}
    shape |= {"WIDTH": width, "WINDOW": plan.window, "TILE": TILE}
    shape |= {"SPLIT": SPLIT_KEYS, "SPLITS": most_splits(batch, S), "AT_ONCE": AT_ONCE}

    def launch(tiles, start, **options):
        heads = H // options["HEADS"]
        grid = (heads, options["PROGRAMS"], len(tiles))
        attention_kernel[grid](*tensors, tiles, start, *numbers, **shape, **options)

    if plan.side:
        plan.side.wait_stream(torch.cuda.current_stream())
    if plan.tile_request is not None:
        options = {"HEADS": 1, "ROWS": PREFILL_ROWS, "PROGRAMS": 1}
        warps = WIDE_WARPS if width > 128 else PREFILL_WARPS
        options |= {"num_warps": warps, "num_stages": stages_that_fit(kv)}
        options["PDL"] = False
        with torch.cuda.stream(plan.side):
            launch(plan.tile_request, plan.tile_start, **options)
    if batch.num_decodes:
        G = H // Hk
        options = {"HEADS": G, "ROWS": padded(G), "PROGRAMS": plan.splits}
        warps = 2 if width <= 64 else 4
        options |= {"num_warps": warps, "num_stages": plan.num_stages}
        options |= pdl_options(q)
        launch(plan.order, None, **options)
    if plan.side:
        torch.cuda.current_stream().wait_stream(plan.side)
    return out.to(q.dtype)
