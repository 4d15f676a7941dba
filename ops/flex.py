"""
FlexAttention: torch's compiler writes the attention kernel around our mask over the paged pool.

`--attention flex` is the device's table of operators (ops/choice.py) with `prepare_flex` and
`paged_attention_flex` in place of its own. It needs a compiler: Triton on CUDA, a C++ compiler
elsewhere. With block sizes under 16, or not powers of two, every call reads the whole pool and
masks most of it: right, and slow. Letters as in kernels.py; and b requests of up to n queries each.
"""

import math
import os
import shutil
import sys
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

TILE = 128  # queries in a tile of FlexAttention, and keys where a tile is not a block
NO_LIMIT = 2**40  # tokens, more than any text has


class FlexCall(NamedTuple):
    """Requests that go through FlexAttention together, decodes or chunks."""

    places: Tensor  # [b, n] of each request's queries on the flat axis; of padding T, behind it
    mask: BlockMask  # which tiles of keys each request and KV head reads, which keys count in them


def prepare_flex(batch: Batch, H: int, kv: Tensor, window: int = 0) -> GatherPlan:
    """
    Build the masks of the step, on the device and without a loop over requests: a `FlexCall` for
    all decodes, one for all chunks.
    """
    n = batch.num_decodes
    B = len(batch.query_lens_host)
    calls = []
    for requests in (slice(0, n), slice(n, B)):  # decodes, chunks
        if requests.start < requests.stop:
            calls.append(flex_call(batch, requests, kv, window))
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
    n = max(batch.query_lens_host[requests])
    tables = batch.block_tables[requests].long()  # [b, M]
    lens = batch.context_lens[requests]  # [b]
    query_lens = batch.query_start.diff()[requests]
    begin = lens - query_lens  # [b] position of each first query
    queries = torch.arange(n, device=kv.device)
    is_padding = queries >= query_lens[:, None]
    starts = batch.query_start[:-1][requests]
    places = starts[:, None] + queries
    places.masked_fill_(is_padding, len(batch.tokens))

    b, M = tables.shape
    numbers = torch.arange(M, device=kv.device)  # of logical blocks
    is_own = numbers * S < lens[:, None]  # [b, M]: behind its end a table may name any block
    columns = torch.where(is_own, tables, all_blocks)  # the last one means nothing
    logical = numbers.new_full((b, all_blocks + 1), NO_LIMIT)  # not its own: never seen
    # a block that left the window may have come back as a later one: that counts
    logical.scatter_reduce_(1, columns, numbers.expand(b, M), "amax", include_self=False)
    reach = window or NO_LIMIT
    # the compiler would take numbers for sizes that change, so these are tensors
    heads, block_size, limit = torch.tensor([Hk, S, reach], device=kv.device)

    def sees(entry, _, query, key):
        request = entry // heads
        page = key // block_size
        block = logical[request, page // heads]
        position = begin[request] + query
        key_position = block * block_size + key % block_size
        is_head = page % heads == entry % heads
        is_before = key_position <= position
        is_near = key_position > position - limit
        return is_head & is_before & is_near

    rows = math.ceil(n / TILE)
    count, tiles, size = tile_lists(tables, lens, kv, rows)
    for x, axes in ((logical, 1), (count, 1), (tiles, (1, 3))):
        torch._dynamo.mark_static(x, axes)
    lengths = (n, all_blocks * Hk * S)
    tile = (TILE, size)
    options = {"BLOCK_SIZE": tile, "seq_lengths": lengths, "compute_q_blocks": False}
    mask = BlockMask.from_kv_blocks(count, tiles, mask_mod=sees, **options)
    return FlexCall(places, mask)


def tile_lists(tables: Tensor, lens: Tensor, kv: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """
    How many tiles of keys each batch entry reads for each of `rows` tiles of queries, [b * Hk, 1,
    rows]; which they are, [b * Hk, 1, rows, all tiles], int32; and how many keys a tile has. A tile
    is a page where FlexAttention's kernels can do that, else all tiles are read.
    """
    _, all_blocks, Hk, S, _ = kv.shape
    b, M = tables.shape
    pages = all_blocks * Hk
    if S < 16 or S.bit_count() > 1:
        every = math.ceil(pages * S / TILE)
        tiles = torch.arange(every, dtype=torch.int32, device=kv.device)
        tiles = tiles.repeat(b * Hk, 1, rows, 1)
        return torch.full_like(tiles[..., 0], every), tiles, TILE
    heads = torch.arange(Hk, device=kv.device)[:, None]
    tiles = tables[:, None] * Hk + heads  # [b, Hk, M]
    # FlexAttention wants room for every tile of the pool in each row of a list, and reads only what
    # counts: so the rows may overlap
    tiles = F.pad(tiles.int().flatten(), (0, pages))
    tiles = tiles.as_strided((b * Hk, 1, rows, pages), (M, M, 0, 1))
    count = (lens + S - 1) // S
    count = count.repeat_interleave(Hk)
    count = count[:, None, None].repeat(1, 1, rows)
    return count, tiles, S


def cpp_compiler() -> str | None:
    """The C++ compiler, which torch.compile needs on a CPU."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX") or usual)


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
    return lambda score, *_: model.soft_cap(score, cap)


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
    padded = F.pad(q, (0, 0, 0, 0, 0, 1))  # [T + 1, H, D]
    padded = padded.to(k.dtype)
    out = torch.zeros_like(padded)
    options = {"enable_gqa": True, "scale": attn.scale}
    options["score_mod"] = capped(attn.softcap, q.device)
    for places, mask in batch.prepared[attn.window].calls:
        b, n = places.shape
        queries = padded[places]  # [b, n, H, D]
        queries = queries.transpose(1, 2)  # [b, H, n, D]
        queries = queries.reshape(b * Hk, H // Hk, n, D)
        torch._dynamo.mark_static(queries, (1, 3))
        if q.is_cuda:  # keys at a time: of one tile
            options["kernel_options"] = {"BLOCK_N": min(64, mask.BLOCK_SIZE[1])}
        mixed = compiled_flex()(queries, k, v, block_mask=mask, **options)
        mixed = mixed.reshape(b, H, n, D)
        out[places] = mixed.transpose(1, 2)
    return out[:-1].to(q.dtype)
