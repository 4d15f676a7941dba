"""
Shared prefixes (cascade attention). If consecutive decoding requests begin with the same blocks, K
and V in these blocks are read once for the whole group, not once per request. Examples include
multiple completions of one prompt, and requests with the same system prompt.

kernels.attention_kernel works in two parts: first, all queries in a group attend to the tokens that
they share, then each request continues from there. A request on its own would make the same
additions in the same order, so its answer is identical to the last bit. In this example, a prompt
of 768 tokens has 256 completions, and G = 1:

    requests    0 .. 63    64 .. 127    128 .. 191    192 .. 255
    tokens      ▓▓▓▓▓▓▓▓   ▓▓▓▓▓▓▓▓     ▓▓▓▓▓▓▓▓      ▓▓▓▓▓▓▓▓      0 .. 767, by 4 groups
                ││││││││   ││││││││     ││││││││      ││││││││      768 .., by 256 requests

The host, which knows all block tables, finds the groups and decides whether sharing pays off. A
step with groups has its own shape (`StepShape.groups`). All other steps are the same as they would
be without this file. ops/choice.py has the table of operators. Letters are as in kernels.py.
"""

from typing import NamedTuple

import kernels
from ops.inputs import StepShape

LEAST_REQUESTS = 16  # minimum number of decodes in a step with groups; fewer would not save time
LEAST_SPARED = 16384  # number of reads of a token's K and V that all groups must save together
LEAST_MEMBERS = 8  # average per group, if a step has the maximum number of groups


class Groups(NamedTuple):
    """A step's groups, as lists that become inputs to the step (inputs.StepInputs)."""

    # [n] number of tokens that a request shares with its group, a multiple of TILE; 0: no group
    shared: list[int]
    first: list[int]  # [groups] the first request of each group
    end: list[int]  # [groups] the end of each group (exclusive)


def most_members(G: int) -> int:
    """Return how many requests' queries for one KV head fit into one program's rows."""
    return max(1, kernels.PREFILL_ROWS // G)


def num_groups(n: int, G: int) -> int:
    """Return the maximum number of groups in a step with n decodes."""
    return -(-n // min(most_members(G), LEAST_MEMBERS))


def num_common(a: list[int], b: list[int], most: int) -> int:
    """
    Return how many leading blocks two tables have in common, at most `most`.

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
    Return the groups as [(first, end, blocks)]: requests first .. end - 1, at most `most` of them,
    have their first `blocks` blocks in common. Only full blocks are shared; `full` [n] is each
    request's number of full blocks. A request that shares fewer blocks than the group so far still
    joins the group if that saves more reads.

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
    Finds a step's groups, for a model with G query heads per KV head and blocks of S tokens. Most
    steps have the same requests and groups as the step before, so groups are cached.
    """

    def __init__(self, G: int, S: int):
        self.G = G
        self.S = S
        self.tables: list[list[int]] = []
        self.groups: Groups | None = None

    def find(self, requests: list) -> Groups | None:
        """Return the groups of the decoding requests, or None if sharing does not pay off."""
        tables = [r.block_table for r in requests]
        # A table remains the same list object while its request runs, and its full blocks do not
        # change. So a table that has only grown still compares as equal, and the comparison is
        # fast.
        if tables != self.tables:
            self.tables = tables
            full = [r.num_filled_slots // self.S for r in requests]
            self.groups = self.worth_it(find_groups(tables, full, most_members(self.G)))
        return self.groups

    def shape(self, n: int) -> StepShape:
        """Return the shape of a step with groups, for n decodes without padding."""
        return StepShape(n, 0, 0, num_groups(n, self.G))

    def shapes(self, N: int) -> list[StepShape]:
        """
        Return the shapes that steps with groups are padded to, for up to N decodes. There are only
        a few shapes, because each needs its own CUDA graph, and a step that shares prefixes has
        time to spare for padding.
        """
        least = LEAST_REQUESTS
        numbers = {least, *range(2 * least, N, 2 * least), N}
        return [self.shape(n) for n in sorted(numbers) if least <= n <= N]

    def worth_it(self, found: list[tuple[int, int, int]]) -> Groups | None:
        """Return the groups that save the most reads, or None if together they save too few."""
        n = len(self.tables)
        if n < LEAST_REQUESTS:
            return None
        spared = {}
        for first, end, blocks in found:
            tokens = blocks * self.S // kernels.TILE * kernels.TILE
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
