"""
Attention through block tables in plain torch: gather each request's context, then compute scaled
dot-product attention. This code runs anywhere; ops/choice.py chooses it on CPUs without cpu.c, and
for `--attention torch`. Its Triton twins in kernels.py have the same signatures and in-place
effects, but read K and V directly from the pool.

    # once per step, for each window: find the rows of the pool that are written and read
    batch.attention_plans = {0: plan_attention_torch(batch, H, kv)}
    store_kv_torch(k, v, kv, batch)                     # in each layer
    y = paged_attention_torch(q, kv, attn, batch)

Letters: T tokens, H query heads, Hk KV heads, G = H / Hk, D head size, M blocks per table, S block
size; for one call, b requests with n queries each and C context length (padded).
"""

from collections import defaultdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import model
from kernels import Batch


class Gather(NamedTuple):
    """One attention call: b requests with n queries each, and contexts padded to C."""

    tokens: slice | Tensor  # indices of the b * n queries on the flat token axis
    kv_rows: Tensor  # [2, b, Hk, C] int64: rows of K and V, from `pool_rows`
    mask: Tensor | None  # [b, 1, G * n, C]: 0 if a query may see a key, else -inf; None: all 0


class GatherPlan(NamedTuple):
    """The result of `plan_attention_torch`. batch.attention_plans has one plan per window."""

    store_rows: Tensor  # [2 * T * Hk] int64: rows of K and V that the step writes
    calls: list  # list of `Gather`


def pool_rows(slots: Tensor, kv: Tensor) -> Tensor:
    """
    Find the rows for slots [..., C] in one layer's pool kv [2, num_blocks + 1, Hk, S, D], viewed as
    a table with D numbers per row. Returns [2, ..., Hk, C]: the rows of K and of V, for each head.
    For example, if a pool has 6 blocks plus the padding block, with S = 4 and Hk = 2, then slot 21
    is in block 5, at offset 1:

        rows of K    .. | 40 [41] 42 43   44 [45] 46 47 | 48 ..       V: 7 * 2 * 4 = 56 rows on
        block 5         |     head 0          head 1    | the padding block

    >>> pool_rows(torch.tensor([21]), torch.zeros(2, 7, 2, 4, 1)).tolist()
    [[[41], [45]], [[97], [101]]]
    """
    _, all_blocks, Hk, S, _ = kv.shape  # including the padding block
    blocks = slots // S
    other_heads = (Hk - 1) * S
    first = slots + blocks * other_heads  # the row of head 0: block * Hk * S + offset
    heads = torch.arange(0, Hk * S, S, device=slots.device)
    k_rows = first[..., None, :] + heads[:, None]
    v_rows = k_rows + all_blocks * Hk * S
    return torch.stack((k_rows, v_rows))


def length_classes(lens: list[int]) -> list[list[int]]:
    """
    Group requests so that padding each to the longest in its group at most doubles the memory. If a
    single group achieves this, all requests go into one group. Otherwise, requests are grouped by
    the number of bits in their context lengths, which gives at most log2(longest) + 1 groups.

    >>> length_classes([500, 512, 300]), length_classes([4096, 16, 17, 31])
    ([[0, 1, 2]], [[0], [1, 2, 3]])
    """
    count = len(lens)
    if lens and max(lens) * count <= 2 * sum(lens):
        return [list(range(count))]
    classes = defaultdict(list)
    for i, n in enumerate(lens):
        classes[n.bit_length()].append(i)
    return list(classes.values())


def plan_attention_torch(batch: Batch, H: int, kv: Tensor, window: int = 0) -> GatherPlan:
    """Find, once for all layers, the rows of the pool that the step writes and reads."""
    lens = batch.context_lens_host
    calls = []
    num_decodes = batch.num_decodes
    decodes = [i for i in range(num_decodes) if lens[i]]  # without padding
    seen = [min(lens[i], window or lens[i]) for i in decodes]
    for group in length_classes(seen):
        requests = [decodes[i] for i in group]
        longest = max(seen[i] for i in group)
        # a decode has one token, so requests and tokens have the same indices
        indices = slice(0, len(requests))
        if len(requests) < num_decodes:
            indices = torch.tensor(requests, device=batch.tokens.device)
        calls.append(gather(batch, indices, indices, longest, H, kv, window))
    start = num_decodes
    for i in range(num_decodes, len(lens)):
        end = start + batch.query_lens_host[i]
        chunk = slice(i, i + 1)
        tokens = slice(start, end)
        calls.append(gather(batch, chunk, tokens, lens[i], H, kv, window))
        start = end
    store_rows = pool_rows(batch.slot_mapping[:, None], kv).flatten()
    return GatherPlan(store_rows, calls)


def gather(batch: Batch, requests, tokens, longest: int, H: int, kv: Tensor, window: int) -> Gather:
    """
    Plan one call for some of the batch's requests, and for their tokens on the flat axis (both are
    slices or tensors of indices). A context shorter than `longest` is padded with its own last
    token, which is masked, so that another request's slots are never read.
    """
    Hk, S = kv.shape[2:4]
    lens = batch.context_lens[requests].long()[:, None]  # [b, 1]
    positions = batch.positions[tokens]
    positions = positions.view(len(lens), -1)  # [b, n]
    n = positions.shape[1]
    keys = torch.arange(longest, device=lens.device)[None]  # [1, C]
    if window:
        first_seen = positions[:, :1] - window + 1  # [b, 1] the first key that any query sees
        keys = first_seen.clamp(min=0) + keys[:, : window + n - 1]
    real_keys = torch.minimum(keys, lens - 1)  # [b, C]
    tables = batch.block_tables[requests].long()
    blocks = tables.gather(1, real_keys // S)
    slots = blocks * S + real_keys % S
    rows = pool_rows(slots, kv)
    if positions.numel() == 1:  # one token, which sees all keys
        return Gather(tokens, rows, None)
    seen = model.may_see(positions[:, :, None], keys[:, None], window)  # [b, n, C]
    mask = torch.zeros_like(seen, dtype=kv.dtype)
    mask.masked_fill_(~seen, -torch.inf)
    mask = mask.repeat(1, H // Hk, 1)  # [b, G * n, C]
    return Gather(tokens, rows, mask[:, None])


def store_kv_torch(k: Tensor, v: Tensor, kv: Tensor, batch: Batch) -> Tensor:
    """
    Write k and v [T, Hk, D] to the slots in `slot_mapping`, in place in one layer's pool kv [2,
    num_blocks + 1, Hk, S, D]. Returns the pool.
    """
    D = k.shape[-1]
    pool = kv.view(-1, D)
    new = torch.stack((k, v)).to(kv.dtype)
    plan = next(iter(batch.attention_plans.values()))  # store_rows is the same for every window
    pool.index_copy_(0, plan.store_rows, new.view(-1, D))
    return kv


def paged_attention_torch(q: Tensor, kv: Tensor, attn: model.Attention, batch: Batch) -> Tensor:
    """
    Compute the attention of q [T, H, D] to the keys and values in one layer's pool, through the
    block tables. The G query heads that share a KV head are treated as G * n queries for that head,
    so K and V are gathered only once. Returns [T, H, D], with zeros for padding.
    """
    _, H, D = q.shape
    pool = kv.view(-1, D)
    out = None
    for tokens, kv_rows, mask in batch.attention_plans[attn.window].calls:
        _, b, Hk, _ = kv_rows.shape
        G = H // Hk
        k, v = F.embedding(kv_rows, pool).unbind()  # [b, Hk, C, D] each
        queries = q[tokens].reshape(b, -1, Hk, G, D)  # [b, n, Hk, G, D]
        queries = queries.permute(0, 2, 3, 1, 4)  # [b, Hk, G, n, D]
        grouped = queries.flatten(2, 3).to(k.dtype)  # [b, Hk, G * n, D]
        mixed = model.attention(grouped, k, v, mask, attn.scale, softcap=attn.softcap)
        mixed = mixed.view(queries.shape)  # [b, Hk, G, n, D]
        mixed = mixed.permute(0, 3, 1, 2, 4)  # [b, n, Hk, G, D]
        mixed = mixed.reshape(-1, H, D).to(q.dtype)
        if len(mixed) == len(q):  # this call covers all requests
            return mixed
        if out is None:
            out = torch.zeros_like(q)
        out[tokens] = mixed
    return torch.zeros_like(q) if out is None else out


# model.TORCH_OPS, with keys and values in the pool
TORCH_OPS = model.TORCH_OPS._replace(
    store_kv=store_kv_torch, attend=paged_attention_torch, plan_attention=plan_attention_torch
)
