"""
Shared prefixes (cascade attention): if consecutive decoding requests begin with the same blocks,
the K and V in these are read once for the group, not once for each request. Such requests are the
choices of one prompt, and requests with the same system prompt.

    prefix_kernel    64 rows of queries, of a group's requests, attend to the tokens they share
    decode_kernel    each request goes on from there (kernels.py)

256 choices of a prompt of 768 tokens, G = 1:

    requests    0 .. 63    64 .. 127    128 .. 191    192 .. 255
    tokens      ▓▓▓▓▓▓▓▓   ▓▓▓▓▓▓▓▓     ▓▓▓▓▓▓▓▓      ▓▓▓▓▓▓▓▓      0 .. 767, by 4 groups
                ││││││││   ││││││││     ││││││││      ││││││││      768 .., by 256 requests

The host, which knows all block tables, finds the groups and decides whether sharing pays. A step
with groups has a shape of its own (`StepShape.groups`); all others are as they would be without
this file. ops/choice.py has the table of operators. Letters as in kernels.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import kernels
from kernels import (
    INF,
    PREFILL_ROWS,
    PREFILL_WARPS,
    TILE,
    Batch,
    TritonPlan,
    check_layout,
    constexpr,
    factors,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    num_processors,
    online_softmax,
    padded,
    pdl_options,
    prepare_triton,
    read_tile,
    stages_that_fit,
    tl,
    triton,
)
from model import Attention, Ops
from ops.inputs import StepShape

ROWS = PREFILL_ROWS  # of queries in a program
MAX_PARTS = 4  # programs that divide up what a group shares

# --------------------------------------------------------------------------------------------------
# The host: who shares what

LEAST_REQUESTS = 16  # decodes in a step with groups: with fewer there is no time to save
LEAST_SPARED = 16384  # tokens whose K and V such a step need not read again, all groups together
LEAST_MEMBERS = 8  # of a group, on average, if a step has as many groups as it has room for


class Groups(NamedTuple):
    """The groups of a step, as lists that become inputs of the step (inputs.StepInputs)."""

    # [n] tokens that a request shares with its group, a multiple of TILE; 0: it is in none
    shared: list[int]
    first: list[int]  # [groups] the first request of each
    end: list[int]  # [groups] the request after its last


def most_members(G: int) -> int:
    """Requests whose queries for one KV head fit into the rows of a program."""
    return max(1, ROWS // G)


def num_groups(n: int, G: int) -> int:
    """Groups that a step of n decodes has room for."""
    return -(-n // min(most_members(G), LEAST_MEMBERS))


def num_common(a: list[int], b: list[int], most: int) -> int:
    """
    The number of blocks that two tables have in common before they differ, at most `most`.

    >>> num_common([4, 7, 1, 9], [4, 7, 2, 9], 4)
    2
    """
    if not most or a[0] != b[0]:
        return 0
    if a[:most] == b[:most]:
        return most
    return next(i for i in range(most) if a[i] != b[i])


def find_groups(tables: list[list[int]], full: list[int], most: int) -> list[tuple[int, int, int]]:
    """
    [(first, end, blocks)]: requests first .. end - 1, at most `most` of them, begin with so many
    blocks in common. Only full blocks are shared; `full` [n] counts those of each request. A
    request that has fewer in common than those before it joins them if that saves more reads.

    >>> tables = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 6], [1, 2, 7], [1, 2, 8], [1, 9, 9]]
    >>> find_groups(tables, [2, 2, 1, 2, 2, 2, 3], most=64)
    [(0, 2, 2), (3, 6, 2)]
    """
    found = []
    first = 0
    common = full[0]
    for i in range(1, len(tables) + 1):
        members = i - first
        joint = 0
        if i < len(tables) and members < most:
            joint = num_common(tables[first], tables[i], min(common, full[i]))
        if joint * members > common * (members - 1):
            common = joint
            continue
        if members > 1:
            found.append((first, i, common))
        if i < len(tables):
            first = i
            common = full[i]
    return found


class GroupFinder:
    """
    Finds the groups of a step, of a model with G query heads to a KV head and blocks of S. Most
    steps have the requests and groups of the one before.
    """

    def __init__(self, G: int, S: int):
        self.G = G
        self.S = S
        self.tables: list[list[int]] = []
        self.groups: Groups | None = None

    def find(self, requests: list) -> Groups | None:
        """The groups of requests that decode; None where sharing does not pay."""
        tables = [r.block_table for r in requests]
        # A table stays the same list while its request runs, and its full blocks do not change. So
        # a table that has only grown compares as equal, and the comparison is fast.
        if tables != self.tables:
            self.tables = tables
            full = [r.num_filled_slots // self.S for r in requests]
            self.groups = self.worth_it(find_groups(tables, full, most_members(self.G)))
        return self.groups

    def shape(self, n: int) -> StepShape:
        """Return the shape of a step with groups: for n decodes, unpadded."""
        return StepShape(n, 0, 0, num_groups(n, self.G))

    def shapes(self, N: int) -> list[StepShape]:
        """
        Return the shapes that steps with groups are padded to, of at most N decodes. They are few,
        because each needs a graph of its own, and a step that shares has time for padding.
        """
        least = LEAST_REQUESTS
        if least > N:
            return []
        fewer = [n for n in (least, *range(2 * least, N, 2 * least)) if n < N]
        return [self.shape(n) for n in (*fewer, N)]

    def worth_it(self, found: list[tuple[int, int, int]]) -> Groups | None:
        """The groups that save most reads, or None if together they save too few."""
        n = len(self.tables)
        if n < LEAST_REQUESTS:
            return None
        spared = {}
        for first, end, blocks in found:
            tokens = blocks * self.S // TILE * TILE
            spared[first, end, tokens] = (end - first - 1) * tokens
        best = sorted(spared, key=spared.get, reverse=True)[: num_groups(n, self.G)]
        if sum(spared[group] for group in best) < LEAST_SPARED:
            return None
        groups = Groups([0] * n, [], [])
        for first, end, tokens in best:
            groups.shared[first:end] = [tokens] * (end - first)
            groups.first.append(first)
            groups.end.append(end)
        return groups


# --------------------------------------------------------------------------------------------------
# The device


@jit
def prefix_kernel(
    q, kv, prefix_out, prefix_lse, block_tables, shared, firsts, ends,
    scale, squeeze, q_stride, k_to_v, M,
    H: constexpr, Hk: constexpr, D: constexpr, S: constexpr, PARTS: constexpr, TILE: constexpr,
    ROWS: constexpr, WIDTH: constexpr, PDL: constexpr,
):  # fmt: skip
    """
    Grid (Hk, PARTS, groups): a program attends from ROWS rows, the G = H / Hk query heads of one KV
    head for each request of a group, to every PARTS-th tile of the tokens they share, through the
    block table of the first request. Results go to prefix_out [B, H, PARTS, WIDTH], and their
    log-sum-exp to prefix_lse [B, H, PARTS]. Otherwise as decode_kernel.
    """
    head, part, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: constexpr = H // Hk
    first, end = tl.load(firsts + group).to(tl.int32), tl.load(ends + group).to(tl.int32)
    # The first group's programs wait in any case: decode_kernel, which waits for this one, reads
    # what this one's predecessor wrote.
    if (end == 0) & (group > 0):
        return
    tokens = tl.load(shared + first).to(tl.int32)
    row, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    request, query = first + row // G, head * G + row % G
    real = request < end
    t = part * TILE + tl.arange(0, TILE)
    table = block_tables + first.to(tl.int64) * M
    block = tl.load(table + t // S, mask=t < tokens, other=0)
    if PDL:
        gdc_wait()
    at = (request.to(tl.int64) * q_stride + query * D)[:, None] + d[None, :]
    queries = tl.load(q + at, mask=real[:, None] & (d < D)[None, :], other=0.0)  # [ROWS, WIDTH]
    acc, total = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -INF, tl.float32)
    for _ in range(part * TILE, tokens, PARTS * TILE):
        k, v = read_tile(kv, block, t, head, None, k_to_v, Hk, S, D, WIDTH)
        t += PARTS * TILE
        block = tl.load(table + t // S, mask=t < tokens, other=0)  # for the next round, in time
        acc, top, total = online_softmax(queries, k, v, None, scale, squeeze, acc, top, total)
    if PDL:
        gdc_launch_dependents()
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = (request * H + query).to(tl.int64) * PARTS + part
    tl.store(prefix_out + to[:, None] * WIDTH + d[None, :], acc, mask=real[:, None])
    tl.store(prefix_lse + to, top + tl.log2(tl.maximum(total, 1e-30)), mask=real)


def sharing(ops: Ops) -> Ops:
    """Return Triton's table of operators with those that share prefixes."""
    return ops._replace(attend=attend, prepare=prepare, group_finder=GroupFinder)


def prepare(batch: Batch, H: int, kv: Tensor, window: int = 0) -> TritonPlan:
    """Prepare a step, also one with groups, for `attend`. Layers with a window share nothing."""
    plan = prepare_triton(batch, H, kv, window)
    if batch.groups is None or window:
        return plan
    Hk, _, D = kv.shape[2:]
    B = batch.num_decodes
    processors = num_processors(kv.device)
    parts = 1  # enough that each processor has a program
    while parts < MAX_PARTS and parts * triton.cdiv(B, most_members(H // Hk)) * Hk < processors:
        parts *= 2
    lse = torch.empty(B, H, parts, device=kv.device)
    out = lse.new_empty(*lse.shape, padded(D))
    prefix = {"shared": batch.groups[0], "prefix_out": out, "prefix_lse": lse, "PARTS": parts}
    # After the prefix most requests have a tile or two left. With two stages more programs run at
    # once, which is faster then.
    return plan._replace(num_stages=2, prefix=prefix)


def attend(q: Tensor, kv: Tensor, attn: Attention, batch: Batch) -> Tensor:
    """Do what kernels.paged_attention_triton does, also for steps that share: one more launch."""
    prefix = batch.prepared[attn.window].prefix
    if prefix:
        check_layout(q, kv, batch)
        shared, first, end = batch.groups
        queries = q.to(kv.dtype)
        H = q.shape[1]
        Hk, S, D = kv.shape[2:]
        outputs = (prefix["prefix_out"], prefix["prefix_lse"])
        tables = batch.block_tables
        strides = (queries.stride(0), kv.stride(0), tables.stride(0))
        shape = {"H": H, "Hk": Hk, "D": D, "S": S, "WIDTH": padded(D)}
        shape |= {"PARTS": prefix["PARTS"], "TILE": TILE, "ROWS": ROWS}
        options = {"num_warps": PREFILL_WARPS, "num_stages": stages_that_fit(kv)}
        grid = (Hk, prefix["PARTS"], len(first))
        operands = (queries, kv, *outputs, tables, shared, first, end, *factors(attn), *strides)
        prefix_kernel[grid](*operands, **shape, **options, **pdl_options(q))
    return kernels.paged_attention_triton(q, kv, attn, batch)
