"""
Decodes that begin with the same blocks: what the host finds. test_kernels.py and test_runner.py
test what the kernel does with it.
"""

from hypothesis import given, seed
from hypothesis import strategies as st

from ops import prefix
from paged import Request


def requests(*tables: list[int], filled: int = 10**6) -> list[Request]:
    """Return requests that decode with these block tables."""
    made = []
    for i, table in enumerate(tables):
        request = Request(i, [1], 9, row=i, block_table=table)
        request.num_filled_slots = min(filled, len(table) * 16)
        made.append(request)
    return made


FEW_BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@seed(0)
@given(
    st.lists(st.tuples(FEW_BLOCKS, st.integers(0, 5)), min_size=1, max_size=12), st.integers(1, 5)
)
def test_a_group_has_its_blocks_in_common(texts, most):
    """
    Would catch: a block that one of them has elsewhere, or has not filled yet; a request in two
    groups.
    """
    tables = [table for table, _ in texts]
    full = [min(count, len(table)) for table, count in texts]
    groups = prefix.find_groups(tables, full, most)
    end_before = 0
    for first, end, blocks in groups:
        assert end_before <= first
        assert 2 <= end - first <= most
        assert 1 <= blocks <= min(full[first:end])
        assert all(table[:blocks] == tables[first][:blocks] for table in tables[first:end])
        end_before = end


def test_choices_share_the_full_blocks_of_their_prompt_by_whole_tiles():
    """
    There are 300 requests: 256 choices of a prompt of 770 tokens, each with its own last block,
    then 44 others. With one head, 64 rows are 64 requests; with six heads they are 10.
    """
    prompt = [*range(48)]
    tables = [[*prompt, 1000 + i] for i in range(256)] + [[2000 + i] for i in range(44)]
    for G, members in (1, 64), (6, 10):
        groups = prefix.GroupFinder(G, 16).find(requests(*tables, filled=770))
        firsts = [*range(0, 256, members)]
        assert groups.first == firsts[: prefix.num_groups(300, G)]
        assert groups.end == [min(first + members, 256) for first in groups.first]
        assert groups.shared == [768] * groups.end[-1] + [0] * (300 - groups.end[-1])
    groups = prefix.GroupFinder(1, 16).find(requests(*([*range(47), -i] for i in range(256))))
    assert groups.shared == [704] * 256  # of 752


def test_little_in_common_is_not_shared():
    """Sharing costs one more kernel per layer, and more padding."""
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
    """24 requests have room for 3 groups, and there are 12 pairs."""
    pairs = [[100 * pair + i for i in range(600 + 40 * pair)] for pair in range(12)]
    tables = [[*blocks, -i] for blocks in pairs for i in (1, 2)]
    groups = prefix.GroupFinder(1, 16).find(requests(*tables))
    assert prefix.num_groups(24, 1) == 3
    assert groups.first == [22, 20, 18]
    assert groups.end == [24, 22, 20]
    assert groups.shared == [0] * 18 + [960 * 16] * 2 + [1000 * 16] * 2 + [1040 * 16] * 2


def test_the_groups_are_found_anew_when_a_request_comes_goes_or_moves():
    """
    A new block alone does not trigger a search, which would cost time in each step. A preempted
    request has other blocks when it returns.
    """
    finder = prefix.GroupFinder(1, 16)
    running = requests(*([*range(48), 100 + i] for i in range(32)))
    first = finder.find(running)
    for r in running:
        r.block_table.append(200 + r.row)
        r.num_filled_slots += 16
    assert finder.find([*running]) is first
    assert finder.find(running[1:]).shared == [768] * 31
    assert finder.find(running) == first
    running[3].block_table = [*range(500, 550)]
    groups = finder.find(running)
    assert groups.shared == [768] * 3 + [0] + [768] * 28
    assert sorted(zip(groups.first, groups.end, strict=True)) == [(0, 3), (4, 32)]
