"""
FlexAttention: torch's compiler writes the attention kernel around our mask over the paged pool.

`--attention flex` is the device's table of operators (ops/choice.py) with `prepare_flex` and
`paged_attention_flex` in place of its own. It needs a compiler: Triton on CUDA, a C++ compiler
elsewhere. Letters as in kernels.py; and b requests of up to n queries each, in tiles of FLEX_ROWS
queries.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import model
from kernels import Batch
from ops.gather import GatherPlan, pool_rows

FLEX_ROWS = 128  # queries in a tile
NO_LIMIT = 2**40  # tokens that a layer without a window sees: more than any text has


class FlexCall(NamedTuple):
    """
    Requests that go through FlexAttention together, decodes or chunks: b requests of up to n
    queries each.
    """

    tokens: slice  # where their t queries are on the flat axis
    request: Tensor  # [t] which of the b each belongs to
    offset: Tensor  # [t] its number among that request's queries
    mask: BlockMask  # which tiles of keys each request and KV head reads, which keys count in them


def prepare_flex(batch: Batch, H: int, kv: Tensor, window: int = 0) -> GatherPlan:
    """
    Build the masks of the step, on the device and without a loop over requests. The calls of the
    plan are `FlexCall`s: one for all decodes, one for all chunks.
    """
    n = batch.num_decodes
    B = len(batch.query_lens_host)
    calls = []
    for requests in (slice(0, n), slice(n, B)):  # decodes, chunks
        if requests.start < requests.stop:
            calls.append(flex_call(batch, requests, kv, window or NO_LIMIT))
    store_rows = pool_rows(batch.slot_mapping[:, None], kv).flatten()
    return GatherPlan(store_rows, calls)


def flex_call(batch: Batch, requests: slice, kv: Tensor, window: int) -> FlexCall:
    """
    Plan one call for these requests, before which there are only decodes, of one query each. To
    FlexAttention the pool is one long sequence of keys, [1, 1, pages * S, D] with page = block * Hk
    + head, and each (request, KV head) a batch entry of its own. The mask turns a place in that
    sequence back into a position: [request, physical block] -> logical block.
    """
    _, all_blocks, Hk, S, _ = kv.shape  # the sink included
    device = kv.device
    query_lens_host = batch.query_lens_host[requests]
    n = max(query_lens_host)
    t = sum(query_lens_host)
    tokens = slice(requests.start, requests.start + t)
    tables = batch.block_tables[requests].long()  # [b, M]
    b, M = tables.shape
    lens = batch.context_lens[requests].long()  # [b]
    query_lens = batch.query_start.diff()[requests].long()
    begin = lens - query_lens  # [b] position of each first query
    request = torch.repeat_interleave(query_lens, output_size=t)
    offset = batch.positions[tokens] - begin[request]

    # logical blocks that some query of a tile sees: [b, rows, M] for `rows` tiles of queries
    first_rows = torch.arange(0, n, FLEX_ROWS, device=device)
    lowest = begin[:, None, None] + first_rows[:, None]
    numbers = torch.arange(M, device=device)
    start = numbers * S
    highest = torch.minimum(lowest + FLEX_ROWS, lens[:, None, None]) - 1
    begins_before_end = start <= highest
    ends_in_window = start + S > lowest - window + 1
    seen = begins_before_end & ends_in_window
    # Before its windows and behind its end a table may name a block that it has elsewhere: these go
    # to the last column, which means nothing.
    columns = torch.where(seen.any(1), tables, all_blocks)
    logical = numbers.new_full((b, all_blocks + 1), -1, dtype=torch.int32)  # -1: not its own
    logical.scatter_(1, columns, numbers.int().expand(b, M))
    # the compiler would take numbers for sizes that change, so these are tensors
    heads, block_size, reach = torch.tensor([Hk, S, window], device=device)

    def sees(entry, _, query, key):
        request = entry // heads
        page = key // block_size
        block = logical[request, page // heads]
        is_head = page % heads == entry % heads
        is_own = (block >= 0) & is_head
        position = begin[request] + query
        key_position = block * block_size + key % block_size
        is_before = key_position <= position
        is_near = key_position > position - reach
        return is_own & is_before & is_near

    count, tiles, size = tile_lists(tables, seen, kv)
    for x, axes in ((logical, 1), (count, 1), (tiles, (1, 3))):
        torch._dynamo.mark_static(x, axes)
    lengths = (n, all_blocks * Hk * S)
    tile = (FLEX_ROWS, size)
    options = {"BLOCK_SIZE": tile, "seq_lengths": lengths, "compute_q_blocks": False}
    mask = BlockMask.from_kv_blocks(count, tiles, mask_mod=sees, **options)
    return FlexCall(tokens, request, offset, mask)


def tile_lists(tables: Tensor, seen: Tensor, kv: Tensor) -> tuple[Tensor, Tensor, int]:
    """
    How many tiles of keys each batch entry reads for each tile of queries, [b * Hk, 1, rows]; which
    they are, [b * Hk, 1, rows, all tiles], int32; and how many keys a tile has. A tile is a page
    where FlexAttention's kernels can do that; with other block sizes all tiles are read.
    """
    _, all_blocks, Hk, S, _ = kv.shape
    b, rows, M = seen.shape
    pages = all_blocks * Hk
    if S < 16 or S.bit_count() > 1:
        every = math.ceil(pages * S / FLEX_ROWS)
        tiles = torch.arange(every, dtype=torch.int32, device=kv.device)
        tiles = tiles.repeat(b * Hk, 1, rows, 1)
        return torch.full_like(tiles[..., 0], every), tiles, FLEX_ROWS
    order = seen.sort(descending=True, stable=True).indices  # blocks that are seen come first
    blocks = tables[:, None].expand_as(order).gather(2, order)
    head = torch.arange(Hk, device=kv.device)[:, None, None]
    tiles = blocks[:, None] * Hk + head  # [b, Hk, rows, M]
    count = seen.sum(-1, dtype=torch.int32)
    count = count.repeat_interleave(Hk, 0)
    # FlexAttention wants room for every tile of the pool in each row of a list, and reads only what
    # counts: so the rows may overlap
    tiles = F.pad(tiles.int().flatten(), (0, pages))
    strides = (rows * M, rows * M, M, 1)
    return count[:, None], tiles.as_strided((b * Hk, 1, rows, pages), strides), S


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
    k, v = kv.reshape(2, 1, 1, -1, D)  # views: [1, 1, pages * S, D]
    torch._dynamo.mark_static(k)
    torch._dynamo.mark_static(v)
    out = torch.zeros_like(q)
    for tokens, request, offset, mask in batch.prepared[attn.window].gathers:
        b = len(mask.kv_indices) // Hk
        n, _ = mask.seq_lengths
        queries = k.new_zeros(b, n, H, D)
        queries[request, offset] = q[tokens].to(k.dtype)
        queries = queries.transpose(1, 2)  # [b, H, n, D]
        queries = queries.reshape(b * Hk, H // Hk, n, D)
        torch._dynamo.mark_static(queries, (1, 3))
        options = {"scale": attn.scale, "score_mod": capped(attn.softcap, q.device)}
        if q.is_cuda:  # keys at a time: of one tile
            options["kernel_options"] = {"BLOCK_N": min(64, mask.BLOCK_SIZE[1])}
        mixed = compiled_flex()(queries, k, v, block_mask=mask, enable_gqa=True, **options)
        mixed = mixed.reshape(b, H, n, D)
        mixed = mixed.transpose(1, 2)  # [b, n, H, D]
        out[tokens] = mixed[request, offset].to(q.dtype)
    return out
