"""
FlexAttention: torch's compiler writes the attention kernel around our mask over the paged pool.

`--attention flex` is the device's table of operators (serving/ops.py) with `prepare_flex` and
`paged_attention_flex` in place of its own. It needs a compiler: Triton on CUDA, a C++ compiler
elsewhere. Letters as in kernels.py; and b requests of up to n queries each, in tiles of FLEX_ROWS
queries.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kernels import Batch, check_ranges
from serving.gather import store_rows

FLEX_ROWS = 128  # queries in a tile
NO_LIMIT = 2**40  # more tokens than any text has: the reach of a layer without a window
NO_TILE = torch.iinfo(torch.int32).max  # sorted, it comes behind all tiles


class FlexCall(NamedTuple):
    """
    Requests that go through FlexAttention together, decodes or chunks: b requests of up to n
    queries each.
    """

    tokens: slice  # where their t queries are on the flat axis
    request: Tensor  # [t] which of the b each belongs to
    offset: Tensor  # [t] and which of its queries it is
    n: int
    mask: BlockMask  # which tiles of the pool each request and head visits, and what counts there


class FlexPlan(NamedTuple):
    store_rows: Tensor  # as in gather.GatherPlan
    calls: list[FlexCall]


def prepare_flex(batch: Batch, H: int, kv: Tensor, window: int = 0) -> FlexPlan:
    """Build the masks of the step, on the device and without a loop over requests."""
    check_ranges(batch, H, kv)
    lens = batch.query_lens_host
    calls = []
    for first, last in ((0, batch.num_decodes), (batch.num_decodes, len(lens))):
        if first < last:
            n = max(lens[first:last])
            calls.append(flex_call(batch, first, last, n, kv, window))
    return FlexPlan(store_rows(batch, kv), calls)


def flex_call(batch: Batch, first: int, last: int, n: int, kv: Tensor, window: int) -> FlexCall:
    """
    The pool is one long sequence of keys for FlexAttention, [1, 1, pages * S, D] with page = block
    * Hk + head, and each (request, KV head) a batch entry of its own. The mask turns a place in
    that sequence back into a position: [request, physical block] -> logical block.
    """
    start = batch.query_start[first:last].long()
    lens = batch.context_lens[first:last].long()
    tokens = slice(first, last) if n == 1 else slice(first, len(batch.tokens))
    places = torch.arange(tokens.start, tokens.stop, device=start.device)
    request = torch.searchsorted(start, places, right=True) - 1
    query_lens = batch.query_start[first + 1 : last + 1] - start
    begin = lens - query_lens  # [b] position of each first query
    mask = pool_mask(batch.block_tables[first:last].long(), lens, begin, n, kv, window)
    return FlexCall(tokens, request, places - start[request], n, mask)


def pool_mask(tables, lens, begin, n: int, kv: Tensor, window: int) -> BlockMask:
    """
    For requests with block tables [b, M], context lengths [b] and first queries' positions [b].
    """
    _, num_blocks, Hk, S, _ = kv.shape
    num_keys = num_blocks * Hk * S
    logical = logical_blocks(tables, lens, num_blocks, S)
    # the compiler would take numbers for sizes that change, so these are tensors
    heads, block_size, reach = torch.tensor([Hk, S, window or NO_LIMIT], device=tables.device)

    def sees(entry, _, query, key):
        request = entry // heads
        page = key // block_size
        block = logical[request, page // heads]
        block = torch.where(page % heads == entry % heads, block, -1)  # another head's page
        position = begin[request] + query
        key_position = block * block_size + key % block_size
        return (block >= 0) & (key_position <= position) & (key_position > position - reach)

    # of a tile of keys, as its kernels want it: a power of two, 16 at least
    size = S if S >= 16 and S.bit_count() == 1 else FLEX_ROWS
    seen, whole = blocks_seen(tables, lens, begin, n, S, window)
    whole &= seen if size == S else False
    head = torch.arange(Hk, device=tables.device)
    pages = tables[:, None] * Hk + head[:, None]  # [b, Hk, M]
    part_count, part_tiles = tile_list(pages, seen & ~whole, size, S, num_keys)
    full_count, full_tiles = tile_list(pages, whole, size, S, num_keys)
    for counts in (part_count, full_count, logical):
        torch._dynamo.mark_static(counts, 1)
    for tiles in (part_tiles, full_tiles):
        torch._dynamo.mark_static(tiles, (1, 3))
    return BlockMask.from_kv_blocks(
        part_count,
        part_tiles,
        full_count,
        full_tiles,
        BLOCK_SIZE=(FLEX_ROWS, size),
        mask_mod=sees,
        seq_lengths=(n, num_keys),
        compute_q_blocks=False,
    )


def logical_blocks(tables: Tensor, lens: Tensor, num_blocks: int, S: int) -> Tensor:
    """
    [request, physical block] -> logical block, -1 for the blocks of others: int32 [b, num_blocks +
    1].
    """
    b, M = tables.shape
    numbers = torch.arange(M, dtype=torch.int32, device=tables.device)
    used = numbers * S < lens[:, None]  # [b, M]
    unused = num_blocks  # all unused entries of the tables write into the last column
    logical = torch.full((b, num_blocks + 1), -1, dtype=torch.int32, device=tables.device)
    return logical.scatter_(1, torch.where(used, tables, unused), numbers.expand(b, M))


def blocks_seen(tables, lens, begin, n: int, S: int, window: int) -> tuple[Tensor, Tensor]:
    """
    Which logical blocks some query of a tile sees, and which all of them see whole: bool [b, rows,
    M] each.
    """
    first = torch.arange(0, n, FLEX_ROWS, device=tables.device)
    lowest = begin[:, None] + first  # [b, rows] first query
    highest = torch.minimum(lowest + FLEX_ROWS, lens[:, None]) - 1  # last query
    lowest = lowest[..., None]
    highest = highest[..., None]
    block_start = torch.arange(tables.shape[1], device=tables.device) * S  # [M]
    block_end = block_start + S - 1
    seen = block_start <= highest
    whole = block_end <= lowest
    if window:
        seen &= block_end > lowest - window
        whole &= block_start > highest - window
    return seen, whole


def tile_list(pages: Tensor, blocks: Tensor, size: int, S: int, num_keys: int):
    """
    Which tiles of `size` keys hold the logical blocks chosen by blocks [b, rows, M], each once;
    pages [b, Hk, M], each of S keys, may straddle tiles. Returns how many, [b * Hk, 1, rows], and
    which, [b * Hk, 1, rows, all tiles], int32.
    """
    first = pages * S // size
    last = (pages * S + S - 1) // size
    span = 1 if size == S else (S - 1) // size + 2  # so many tiles a page may touch
    tiles = first[..., None] + torch.arange(span, device=pages.device)  # [b, Hk, M, span]
    tiles = torch.where(tiles <= last[..., None], tiles, NO_TILE)[:, :, None]  # [b, Hk, 1, M, span]
    tiles = torch.where(blocks[:, None, :, :, None], tiles, NO_TILE)  # [b, Hk, rows, M, span]
    tiles = tiles.flatten(3).sort().values
    again = tiles[..., 1:] == tiles[..., :-1]
    again = F.pad(again, (1, 0))
    tiles = torch.where(again, NO_TILE, tiles).sort().values
    tiles = tiles.flatten(0, 1)  # [b * Hk, rows, width]
    count = (tiles < NO_TILE).sum(-1, dtype=torch.int32)
    tiles = torch.where(tiles < NO_TILE, tiles, 0).int()
    # FlexAttention wants room for every tile of the pool in each row of a list, and reads only what
    # counts: so the rows may overlap
    entries, rows, width = tiles.shape
    every = -(-num_keys // size)
    shape = (entries, 1, rows, every)
    strides = (rows * width, rows * width, width, 1)
    tiles = F.pad(tiles.flatten(), (0, every))
    return count[:, None], tiles.as_strided(shape, strides)


@cache
def compiled_flex() -> Callable:
    """
    FlexAttention that adapts to any number of requests and queries; compiled in its first calls,
    seconds each.
    """
    # fullgraph: an error, not the slow way
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def paged_attention_flex(q: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """
    As paged_attention_torch, but K and V stay where they are; only q is padded, to the longest
    chunk. One thing less is promised: FlexAttention weighs what the mask hides in a tile by zero,
    so there the pool must hold no NaN.
    """
    _, H, D = q.shape
    Hk = kv.shape[2]
    G = H // Hk
    out = torch.zeros_like(q)
    k, v = kv.reshape(2, 1, 1, -1, D)  # views: [1, 1, pages * S, D]
    for tokens, request, offset, n, mask in batch.prepared.calls:
        b = mask.kv_indices.shape[0] // Hk
        queries = q.new_zeros(b, n, H, D)
        queries[request, offset] = q[tokens]
        queries = queries.view(b, n, Hk, G, D)
        queries = queries.permute(0, 2, 3, 1, 4)  # [b, Hk, G, n, D]
        queries = queries.flatten(0, 1).to(kv.dtype)  # [b * Hk, G, n, D]
        torch._dynamo.mark_static(queries, (1, 3))
        torch._dynamo.mark_static(k)
        torch._dynamo.mark_static(v)
        options = None
        if q.is_cuda:
            options = {"BLOCK_N": min(64, mask.BLOCK_SIZE[1])}  # keys at a time: of one tile
        y = compiled_flex()(queries, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
        y = y.view(b, Hk, G, n, D).permute(0, 3, 1, 2, 4)  # [b, n, Hk, G, D]
        y = y.reshape(b, n, H, D)
        out[tokens] = y[request, offset].to(q.dtype)
    return out
