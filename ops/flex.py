"""
FlexAttention: torch's compiler writes the attention kernel around our mask over the paged pool.

`--attention flex` is the device's table of operators (ops/choice.py) with `prepare_flex` and
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

import model
from kernels import Batch
from ops.gather import pool_rows

FLEX_ROWS = 128  # queries in a tile
NO_LIMIT = 2**40  # tokens that a layer without a window sees: more than any text has
NO_TILE = torch.iinfo(torch.int32).max  # in a list of tiles, no tile: sorted, it comes last


class FlexCall(NamedTuple):
    """
    Requests that go through FlexAttention together, decodes or chunks: b requests of up to n
    queries each.
    """

    tokens: slice  # where their t queries are on the flat axis
    request: Tensor  # [t] which of the b each belongs to
    offset: Tensor  # [t] its number among that request's queries
    n: int
    mask: BlockMask  # which tiles of keys each request and KV head reads, which keys count in them


class FlexPlan(NamedTuple):
    """What `prepare_flex` leaves in batch.prepared, for a window."""

    store_rows: Tensor  # as in gather.GatherPlan
    calls: list[FlexCall]


def prepare_flex(batch: Batch, H: int, kv: Tensor, window: int = 0) -> FlexPlan:
    """Build the masks of the step, on the device and without a loop over requests."""
    n = batch.num_decodes
    B = len(batch.query_lens_host)
    calls = []
    for requests in (slice(0, n), slice(n, B)):  # decodes, chunks
        if requests.start < requests.stop:
            calls.append(flex_call(batch, requests, kv, window))
    store_rows = pool_rows(batch.slot_mapping[:, None], kv).flatten()
    return FlexPlan(store_rows, calls)


def flex_call(batch: Batch, requests: slice, kv: Tensor, window: int) -> FlexCall:
    """Plan one call for these requests, before which there are only decodes, of one query each."""
    query_lens_host = batch.query_lens_host[requests]
    n = max(query_lens_host)
    t = sum(query_lens_host)
    tokens = slice(requests.start, requests.start + t)
    tables = batch.block_tables[requests].long()  # [b, M]
    lens = batch.context_lens[requests].long()  # [b]
    query_lens = batch.query_start.diff()[requests].long()
    begin = lens - query_lens  # [b] position of each first query
    request = torch.repeat_interleave(query_lens, output_size=t)
    offset = batch.positions[tokens] - begin[request]
    mask = pool_mask(tables, lens, begin, n, kv, window)
    return FlexCall(tokens, request, offset, n, mask)


def pool_mask(tables, lens, begin, n: int, kv: Tensor, window: int) -> BlockMask:
    """
    The mask of requests with block tables [b, M], context lengths [b] and first queries' positions
    [b]. To FlexAttention the pool is one long sequence of keys, [1, 1, pages * S, D] with page =
    block * Hk + head, and each (request, KV head) a batch entry of its own. The mask turns a place
    in that sequence back into a position: [request, physical block] -> logical block.
    """
    _, all_blocks, Hk, S, _ = kv.shape  # the sink included
    num_keys = all_blocks * Hk * S
    seen, whole = blocks_seen(tables, lens, begin, n, S, window)
    logical = logical_blocks(tables, seen.any(1), all_blocks)
    # the compiler would take numbers for sizes that change, so these are tensors
    heads, block_size, reach = torch.tensor([Hk, S, window or NO_LIMIT], device=tables.device)

    def sees(entry, _, query, key):
        request = entry // heads
        page = key // block_size
        block = logical[request, page // heads]
        is_own = (block >= 0) & (page % heads == entry % heads)
        position = begin[request] + query
        key_position = block * block_size + key % block_size
        is_before = key_position <= position
        is_near = key_position > position - reach
        return is_own & is_before & is_near

    # a tile of keys is a block where FlexAttention's kernels can do that
    is_tile = S >= 16 and S.bit_count() == 1
    size = S if is_tile else FLEX_ROWS
    if not is_tile:  # then tiles also have keys of other blocks: every key is to be asked for
        whole = torch.zeros_like(whole)
    head = torch.arange(Hk, device=tables.device)
    pages = tables[:, None] * Hk + head[:, None]  # [b, Hk, M]
    in_part = tile_list(pages, seen & ~whole, size, S, num_keys)
    in_full = tile_list(pages, seen & whole, size, S, num_keys)
    torch._dynamo.mark_static(logical, 1)
    for count, tiles in (in_part, in_full):
        torch._dynamo.mark_static(count, 1)
        torch._dynamo.mark_static(tiles, (1, 3))
    return BlockMask.from_kv_blocks(
        *in_part,
        *in_full,
        BLOCK_SIZE=(FLEX_ROWS, size),
        mask_mod=sees,
        seq_lengths=(n, num_keys),
        compute_q_blocks=False,
    )


def logical_blocks(tables: Tensor, used: Tensor, all_blocks: int) -> Tensor:
    """
    [request, physical block] -> logical block, -1 for the blocks of others: int32 [b, all_blocks +
    1]. The last column means nothing: what a table has where it is not `used`, bool [b, M], goes
    there. Before its windows and behind its end a table may name a block that it has elsewhere.
    """
    b, M = tables.shape
    numbers = torch.arange(M, dtype=torch.int32, device=tables.device)
    columns = torch.where(used, tables, all_blocks)
    logical = numbers.new_full((b, all_blocks + 1), -1)
    return logical.scatter_(1, columns, numbers.expand(b, M))


def blocks_seen(tables, lens, begin, n: int, S: int, window: int) -> tuple[Tensor, Tensor]:
    """
    Which logical blocks some query of a tile sees, and of which blocks all its queries see all
    keys: bool [b, rows, M] each, for `rows` tiles of queries.
    """
    first = torch.arange(0, n, FLEX_ROWS, device=tables.device)
    lowest = begin[:, None] + first  # [b, rows] position of the first query of the tile
    highest = torch.minimum(lowest + FLEX_ROWS, lens[:, None]) - 1  # and of its last
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


def tile_list(pages: Tensor, chosen: Tensor, size: int, S: int, num_keys: int):
    """
    Which tiles of `size` keys hold the logical blocks chosen, bool [b, rows, M], each tile once;
    pages [b, Hk, M], each of S keys, may straddle tiles. Returns how many, [b * Hk, 1, rows], and
    which, [b * Hk, 1, rows, all tiles], int32.
    """
    start = pages[:, :, None, :, None] * S  # [b, Hk, 1, M, 1] first key of each page
    last = (start + S - 1) // size
    most = 1 if size == S else (S - 1) // size + 2  # tiles that a page may touch
    tiles = start // size + torch.arange(most, device=pages.device)
    is_wanted = chosen[:, None, :, :, None] & (tiles <= last)
    tiles = torch.where(is_wanted, tiles, NO_TILE)  # [b, Hk, rows, M, most]
    tiles = tiles.flatten(3).flatten(0, 1)  # [b * Hk, rows, width]
    tiles = tiles.sort().values
    again = tiles.diff() == 0
    again = F.pad(again, (1, 0))
    tiles = tiles.masked_fill(again, NO_TILE).sort().values
    is_tile = tiles < NO_TILE
    count = is_tile.sum(-1, dtype=torch.int32)
    tiles = tiles.masked_fill(~is_tile, 0).int()
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
    # fullgraph: where it cannot be compiled there is an error, not the slow way
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@cache
def capped(softcap: float, device: torch.device) -> Callable | None:
    """FlexAttention's score_mod for model.soft_cap; None: scores stay as they are."""
    if not softcap:
        return None
    cap = torch.tensor(softcap, device=device)  # the compiler cannot read a number here
    return lambda score, *_: cap * (score / cap).tanh()


def paged_attention_flex(q: Tensor, kv: Tensor, attn: model.Attention, batch: Batch) -> Tensor:
    """
    As paged_attention_torch, but K and V stay where they are; only q is padded, to the longest
    chunk. Unlike the others it needs a pool without NaN: masked keys in a tile that is read have
    weight 0, and 0 * NaN is NaN.
    """
    _, H, D = q.shape
    Hk = kv.shape[2]
    grouped = q.to(kv.dtype).unflatten(1, (Hk, H // Hk))  # [T, Hk, G, D]
    k, v = kv.reshape(2, 1, 1, -1, D)  # views: [1, 1, pages * S, D]
    torch._dynamo.mark_static(k)
    torch._dynamo.mark_static(v)
    out = torch.zeros_like(q)
    for tokens, request, offset, n, mask in batch.prepared[attn.window].calls:
        b = mask.kv_indices.shape[0] // Hk
        queries = grouped.new_zeros(b, n, *grouped.shape[1:])  # [b, n, Hk, G, D]
        queries[request, offset] = grouped[tokens]
        queries = queries.permute(0, 2, 3, 1, 4)  # [b, Hk, G, n, D]
        queries = queries.flatten(0, 1)  # [b * Hk, G, n, D]
        torch._dynamo.mark_static(queries, (1, 3))
        options = None
        if q.is_cuda:
            options = {"BLOCK_N": min(64, mask.BLOCK_SIZE[1])}  # keys at a time: of one tile
        mixed = compiled_flex()(
            queries,
            k,
            v,
            score_mod=capped(attn.softcap, q.device),
            block_mask=mask,
            scale=attn.scale,
            enable_gqa=True,
            kernel_options=options,
        )
        mixed = mixed.unflatten(0, (b, Hk))  # [b, Hk, G, n, D]
        mixed = mixed.permute(0, 3, 1, 2, 4)  # [b, n, Hk, G, D]
        mixed = mixed[request, offset]  # [t, Hk, G, D]
        out[tokens] = mixed.flatten(1, 2)
    return out
