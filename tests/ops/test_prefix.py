"""
Decodes that begin with the same blocks: what the host finds, and what the kernels make of it,
judged as in test_kernels.py. Blocks that only the first of a group may be read through are NaN for
the others.
"""

import doctest
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreting import quick_on_a_cpu
from test_kernels import DEVICE, KERNEL_FLOATS, Shape, Step, needs_triton

import kernels
from ops import deterministic, prefix
from ops.choice import DETERMINISTIC, TRITON, tables_for
from ops.inputs import StepShape, pack, sizes
from paged import Plan, Request

# --------------------------------------------------------------------------------------------------
# The host


def test_examples_in_docstrings_are_true():
    assert doctest.testmod(prefix).failed == 0


def requests(*tables: list[int], filled: int = 10**6) -> list[Request]:
    """That decode in such tables."""
    made = []
    for i, table in enumerate(tables):
        request = Request(i, [1], 9, row=i, block_table=table)
        request.num_filled_slots = min(filled, len(table) * 16)
        made.append(request)
    return made


FEW_BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(
    st.lists(st.tuples(FEW_BLOCKS, st.integers(0, 5)), min_size=1, max_size=12), st.integers(1, 5)
)
def test_a_group_has_its_blocks_in_common(texts, most):
    """A block that one of them has elsewhere, or is still to fill; a request in two groups."""
    tables = [table for table, _ in texts]
    full = [min(count, len(table)) for table, count in texts]
    groups = prefix.find_groups(tables, full, most)
    end_before = 0
    for first, end, blocks in groups:
        assert end_before <= first
        assert 2 <= end - first <= most
        assert 1 <= blocks <= min(full[first:end])
        assert {tuple(table[:blocks]) for table in tables[first:end]} == {
            tuple(tables[first][:blocks])
        }
        end_before = end


def test_choices_share_the_full_blocks_of_their_prompt_by_whole_tiles():
    """
    300 requests: 256 choices of a prompt of 770 tokens, whose last block is each one's own, then 44
    others. One head: 64 rows are 64 requests; six: 10.
    """
    prompt = [*range(48)]
    tables = [[*prompt, 1000 + i] for i in range(256)] + [[2000 + i] for i in range(44)]
    for G, members in (1, 64), (6, 10):
        groups = prefix.GroupFinder(G, 16).find(requests(*tables, filled=770))
        firsts = [*range(0, 256, members)]
        assert groups.first == firsts[: prefix.num_groups(300, G)]
        assert groups.end == [min(first + members, 256) for first in groups.first]
        assert groups.shared == [768] * groups.end[-1] + [0] * (300 - groups.end[-1])
    tables = [[*range(47), 1000 + i] for i in range(256)]
    groups = prefix.GroupFinder(1, 16).find(requests(*tables))
    assert groups.shared == [704] * 256  # of 752


def test_little_in_common_is_not_shared():
    """A step that shares is a kernel more in each layer, and more padding."""
    own = [[100 + i] for i in range(32)]
    system_prompt = [[*range(40), i] for i in own]
    finder = prefix.GroupFinder(1, 16)
    assert finder.find(requests(*system_prompt)).shared == [640] * 32
    assert finder.find(requests(*system_prompt[:15])) is None
    assert finder.find(requests(*own)) is None
    assert finder.find(requests(*([*range(32), 50 + i] for i in range(33)))) is not None
    assert finder.find(requests(*([*range(32), 50 + i] for i in range(32)))) is None
    assert finder.find(requests(*system_prompt, filled=639)).shared == [576] * 32


def test_where_there_are_too_many_groups_the_best_are_taken():
    """24 requests have room for 3 groups, of 12 pairs."""
    pairs = [[100 * pair + i for i in range(600 + 40 * pair)] for pair in range(12)]
    tables = [[*blocks, -i] for blocks in pairs for i in (1, 2)]
    groups = prefix.GroupFinder(1, 16).find(requests(*tables))
    assert prefix.num_groups(24, 1) == 3
    assert groups.first == [22, 20, 18]
    assert groups.end == [24, 22, 20]
    assert groups.shared == [0] * 18 + [960 * 16] * 2 + [1000 * 16] * 2 + [1040 * 16] * 2


def test_the_groups_are_found_anew_when_a_request_comes_goes_or_moves(monkeypatch):
    """
    And not for a new block: it would cost a step's time, each step. One that was preempted has
    other blocks when it is back.
    """
    counts = []
    find_groups = prefix.find_groups

    def counted(*args):
        counts.append(args)
        return find_groups(*args)

    monkeypatch.setattr(prefix, "find_groups", counted)
    finder = prefix.GroupFinder(1, 16)
    running = requests(*([*range(48), 100 + i] for i in range(32)))
    first = finder.find(running)
    for r in running:
        r.block_table.append(200 + r.row)
        r.num_filled_slots += 16
    assert finder.find([*running]) is first
    assert len(counts) == 1
    assert finder.find(running[1:]).shared == [768] * 31
    assert finder.find(running) == first
    running[3].block_table = [*range(500, 550)]
    groups = finder.find(running)
    assert groups.shared == [768] * 3 + [0] + [768] * 28
    assert sorted(zip(groups.first, groups.end, strict=True)) == [(0, 3), (4, 32)]
    assert len(counts) == 4


def test_the_groups_of_a_step_are_among_its_inputs():
    running = requests([7, 2], [7, 3], [5])
    shape = StepShape(4, 0, 0, groups=2)
    groups = prefix.Groups([16, 16, 0], [0], [2])
    packed = pack(Plan(decodes=running), shape, 9, 64, groups=groups).tolist()
    nothing_given = [-1] * 4 + [0] * 4
    assert packed == [0, 1, 2, 9, 2, 3, 5, 64, *nothing_given, 16, 16, 0, 0, 0, 0, 2, 0]
    assert sum(sizes(shape)) == len(packed)
    assert sum(sizes(StepShape(4, 0, 0))) == 16


def test_only_the_table_of_a_gpu_shares():
    """--deterministic has one order of additions, so it shares nothing."""
    tables = [*tables_for(on_gpu=True).values(), *tables_for(on_gpu=False).values()]
    for ops in (*tables, DETERMINISTIC):
        assert bool(ops.group_finder) == (ops.attend is prefix.attend)
    assert TRITON.group_finder
    assert DETERMINISTIC.attend is deterministic.attend


# --------------------------------------------------------------------------------------------------
# The device


def shared_prefixes(shape: Shape, groups: list[tuple[range, int]]) -> Step:
    """
    A step of decodes, in which such requests share so many tokens. Through a table that is not the
    first's there is nothing to be read of them.
    """
    step = Step(shape, "triton")
    step.store()
    garbage = step.kv.shape[1] - 1
    assert step.kv[:, garbage].isnan().all()
    shared = [0] * len(shape.decodes)
    for members, tokens in groups:
        blocks = -(-tokens // shape.S)
        for i in members:
            shared[i] = tokens
            step.tables[i][:blocks] = step.tables[members[0]][:blocks]
            step.batch.block_tables[i, :blocks] = step.batch.block_tables[members[0], :blocks]
            if i > members[0]:
                step.batch.block_tables[i, : tokens // shape.S] = garbage
    firsts = [members[0] for members, _ in groups]
    ends = [members[-1] + 1 for members, _ in groups]
    lists = (shared, [*firsts, 0, 0], [*ends, 0, 0])  # two groups are padding
    step.batch.groups = [torch.tensor(values, device=DEVICE) for values in lists]
    step.prepare()
    return step


SHARING = [
    (Shape([200] * 16, Hk=2), [(range(16), 192)]),
    # some in no group; groups of other lengths; the newest token is the first behind the prefix
    (Shape([65, 129, 70, 300, 66, 65, 5, 1], Hk=1), [(range(1, 3), 64), (range(4, 6), 64)]),
    (Shape([130, 150, 140, 400, 399], Hk=2, G=3, D=80), [(range(3), 128), (range(3, 5), 320)]),
    (Shape([330] * 23, Hk=1, G=3, D=16, dtype=torch.float16), [(range(21), 320)]),
    (Shape([150] * 9, Hk=1, G=8, S=1), [(range(8), 128)]),
    (Shape([150, 170] * 2, Hk=1, G=16, S=24), [(range(4), 128)]),
    (Shape([150] * 5, Hk=1, G=5, S=100), [(range(5), 64)]),
    (Shape([700] * 65, Hk=1, D=16), [(range(64), 640)]),
    (replace(Shape([200] * 6, Hk=2), dtype=KERNEL_FLOATS[-1]), [(range(6), 192)]),
]


@needs_triton
@pytest.mark.parametrize("at_once", [1, 20], ids=["whole", "splits"])
@pytest.mark.parametrize(("shape", "groups"), SHARING, ids=str)
@quick_on_a_cpu("[45689]+0-*", "23+0-*-splits")
def test_a_prefix_is_attended_to_once_for_a_group(shape, groups, at_once, monkeypatch):
    """
    A key that is attended to twice or by nobody, a row that gets its neighbour's result, a split
    too many that begins with the prefix; counters that are not zero for the next layer.
    """
    monkeypatch.setattr(kernels, "programs_at_once", lambda D: at_once)
    step = shared_prefixes(shape, groups)
    plan = step.batch.prepared[0]
    assert plan.prefix
    reference, allowed = step.reference()
    allowed = max(allowed, 2 * (step.plain_torch() - reference).abs().max())
    out = step.attend()
    assert (out - reference).abs().max() <= allowed
    assert not plan.finished.any()
    assert torch.equal(step.attend(), out)


@needs_triton
def test_what_else_a_step_that_shares_may_have(monkeypatch):
    """A soft cap, the padding of a CUDA graph, and layers with a window, which read all of it."""
    step = shared_prefixes(Shape([150] * 6, Hk=1), [(range(5), 128)])
    step.attn.softcap = 2.0
    step.batch.context_lens[-1] = 0
    out = step.attend()
    whole = Step(Shape([150] * 6, Hk=1), "triton")
    whole.store()
    whole.attn.softcap = 2.0
    for i, table in enumerate(step.tables):
        whole.batch.block_tables[i, : len(table)] = torch.tensor(table, device=DEVICE)
    assert (out[:5] - whole.attend()[:5]).abs().max() < 1e-6
    assert not out[5].any()
    step = Step(Shape([150] * 6, Hk=1, window=40), "triton")
    step.batch.groups = [torch.tensor(values, device=DEVICE) for values in ([64] * 6, [0], [6])]
    step.prepare()
    assert not step.batch.prepared[40].prefix
    step.store()
    reference, allowed = step.reference()
    assert (step.attend() - reference).abs().max() <= allowed


@needs_triton
@pytest.mark.parametrize(("Hk", "G", "parts"), [(1, 1, 4), (3, 1, 4), (4, 1, 2), (8, 1, 1)])
def test_as_many_parts_as_processors_want(Hk, G, parts):
    """The interpreter has 8 processors; these decodes are one group, or two."""
    if DEVICE == "cuda":
        pytest.skip("needs Triton's interpreter: a GPU has its own number of processors")
    kv = torch.zeros(2, 1, Hk, 16, 16)
    fields = {"num_decodes": 64, "block_tables": torch.zeros(64, 1, dtype=torch.int32)}
    fields |= {"context_lens": torch.zeros(64, dtype=torch.int32), "query_lens_host": [1] * 64}
    fields |= {"query_start": torch.arange(65), "groups": ([], [], [])}
    plan = prefix.prepare(SimpleNamespace(**fields), Hk * G, kv)
    assert plan.prefix["PARTS"] == parts
