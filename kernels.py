"""
What a step carries (`Batch`), and the two operations on the KV pool: store K, V and attend through block tables.

A step lays its requests out on one flat token axis, without padding: first one token of each decoding request, then
the prefill chunks. Decodes and chunks so share one forward pass:

    request           r0   r1   r2            r3
    tokens     [T]    a    b    c0 c1 c2 c3   d0 d1        T = 8
    query_start       0    1    2             6     8      [B + 1], B = 4, num_decodes = 2

A `Backend` is one way to do both operations. Here is torch's, which gathers; it runs anywhere. Backends have one
signature and one in-place effect: `store_kv` writes the pool, `paged_attention` only reads it.
Letters: B requests, T tokens, H query heads, Hk KV heads, D head size, M blocks per table, S block size,
C context length, G = H / Hk.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Gather(NamedTuple):
    """Requests that the torch path serves in one SDPA: b requests of n queries each, contexts padded to C."""

    tokens: slice | torch.Tensor  # where their b * n queries are on the flat axis
    kv_rows: torch.Tensor  # [b, Hk, C] int64: rows of the pool seen as [.., D]
    mask: torch.Tensor  # [b, 1, G * n, C] bool: may this query see this key?


@dataclass
class Batch:
    """One step for the model. Tensors are on its device, int64 unless said otherwise; lists are the host's copy."""

    tokens: torch.Tensor  # [T] token ids
    positions: torch.Tensor  # [T] of each token in its own request
    slot_mapping: torch.Tensor  # [T] block * S + offset: where the token's K, V go
    query_start: torch.Tensor  # [B + 1] int32: request i has tokens query_start[i] .. query_start[i + 1] - 1
    context_lens: torch.Tensor  # [B] int32: tokens in the pool after this step
    block_tables: torch.Tensor  # [B, M] int32: [request, logical block] -> physical block
    rows: torch.Tensor  # [B] the requests' rows in the engine's device arrays
    logits_index: torch.Tensor  # [R] places on the flat axis whose logits are wanted
    num_decodes: int  # the first requests, with one token each
    query_lens_host: list[int]  # [B]
    context_lens_host: list[int]  # [B]
    backend: "Backend"
    # worked out once per step by the torch backend, used in every layer
    store_rows: torch.Tensor | None = None  # [T * Hk] int64: rows of the pool seen as [.., D]
    gathers: list[Gather] = field(default_factory=list)


class Backend(NamedTuple):
    name: str
    prepare: Callable  # (batch, H, Hk, S): once per step, before the first layer
    store_kv: Callable  # (k [T, Hk, D], v [T, Hk, D], kv [2, num_blocks + 1, Hk, S, D], batch): writes kv
    paged_attention: Callable  # (q [T, H, D], kv, batch) -> [T, H, D]


def choose_backend(name: str = "auto") -> Backend:
    """The backend of that name, or the best there is. Raises ValueError for one that is not there."""
    backends = {"torch": Backend("torch", prepare_torch, store_kv_torch, paged_attention_torch)}
    name = "torch" if name == "auto" else name
    if name not in backends:
        raise ValueError(f"attention backend {name!r} is not available here; there is auto, {', '.join(backends)}")
    return backends[name]


# ----------------------------------------------------------------------------------------------------------------------
# torch: gather the context of each request, then SDPA


def pool_rows(slots: torch.Tensor, Hk: int, S: int) -> torch.Tensor:
    """Rows of slots [...] in one layer's K, [num_blocks + 1, Hk, S, D] seen as [.., D], for each head: [..., Hk]."""
    blocks, offsets = slots[..., None] // S, slots[..., None] % S
    return (blocks * Hk + torch.arange(Hk, device=slots.device)) * S + offsets


def may_see(query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """Causality: a token sees itself and what came before. [..., n], [C] -> bool [..., n, C]"""
    return key_positions <= query_positions[..., None]


def length_classes(lens: list[int]) -> list[list[int]]:
    """
    Group requests so that padding each to the longest of its group at most doubles the memory: all together where
    that holds already, else by the power of two of their context lengths, so in at most log2(longest) groups.

    >>> length_classes([500, 512, 300]), length_classes([4096, 16, 17, 31])
    ([[0, 1, 2]], [[0], [1, 2, 3]])
    """
    if max(lens) * len(lens) <= 2 * sum(lens):
        return [list(range(len(lens)))]
    classes = defaultdict(list)
    for i, n in enumerate(lens):
        classes[n.bit_length()].append(i)
    return list(classes.values())


def prepare_torch(batch: Batch, H: int, Hk: int, S: int):
    """Work out, once for all layers, which rows of the pool the step writes and which it reads."""
    batch.store_rows = pool_rows(batch.slot_mapping, Hk, S).flatten()
    decodes = batch.context_lens_host[: batch.num_decodes]
    groups = length_classes(decodes) if decodes else []
    if len(groups) == 1:
        batch.gathers.append(gather(batch, slice(0, len(decodes)), slice(0, len(decodes)), H, Hk, S))
    else:  # a decoding request has one token: its place on the token axis is its number
        for group in groups:
            index = torch.tensor(group, device=batch.tokens.device)
            batch.gathers.append(gather(batch, index, index, H, Hk, S))
    start = batch.num_decodes
    for i in range(batch.num_decodes, len(batch.query_lens_host)):
        end = start + batch.query_lens_host[i]
        batch.gathers.append(gather(batch, slice(i, i + 1), slice(start, end), H, Hk, S))
        start = end


def gather(batch: Batch, requests, tokens, H: int, Hk: int, S: int) -> Gather:
    """Plan one SDPA. The padding of shorter contexts repeats their last token, masked: nothing else is ever read."""
    lens = batch.context_lens[requests].long()  # [b]
    tables, b = batch.block_tables[requests].long(), len(lens)
    C = max(batch.context_lens_host[requests]) if isinstance(requests, slice) else int(lens.max())
    keys = torch.arange(C, device=lens.device)
    slots_at = torch.minimum(keys, lens[:, None] - 1)  # [b, C]
    slots = tables.gather(1, slots_at // S) * S + slots_at % S
    kv_rows = pool_rows(slots, Hk, S).transpose(1, 2).contiguous()  # [b, C, Hk] -> [b, Hk, C]
    mask = may_see(batch.positions[tokens].view(b, -1), keys)  # [b, n, C]
    return Gather(tokens, kv_rows, mask.repeat(1, H // Hk, 1)[:, None])


def store_kv_torch(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, batch: Batch):
    """Write k, v [T, Hk, D] into one layer's pool kv [2, num_blocks + 1, Hk, S, D], in place, at `slot_mapping`."""
    D = k.shape[-1]
    kv[0].view(-1, D).index_copy_(0, batch.store_rows, k.reshape(-1, D).to(kv.dtype))
    kv[1].view(-1, D).index_copy_(0, batch.store_rows, v.reshape(-1, D).to(kv.dtype))


def paged_attention_torch(q: torch.Tensor, kv: torch.Tensor, batch: Batch) -> torch.Tensor:
    """
    Attention of q [T, H, D] to the keys and values in one layer's pool, through the block tables; scale 1 / sqrt(D).
    The G query heads that share a KV head become G * n queries of it, so K and V are gathered once and not repeated.
    """
    out, D = torch.empty_like(q), q.shape[-1]
    for tokens, kv_rows, mask in batch.gathers:
        b, Hk, _ = kv_rows.shape
        k, v = F.embedding(kv_rows, kv[0].view(-1, D)), F.embedding(kv_rows, kv[1].view(-1, D))  # [b, Hk, C, D]
        grouped = q[tokens].reshape(b, -1, Hk, q.shape[1] // Hk, D).permute(0, 2, 3, 1, 4)  # [b, Hk, G, n, D]
        y = F.scaled_dot_product_attention(grouped.flatten(2, 3).to(k.dtype), k, v, attn_mask=mask)
        out[tokens] = y.view(grouped.shape).permute(0, 3, 1, 2, 4).reshape(-1, *q.shape[1:]).to(q.dtype)
    return out
