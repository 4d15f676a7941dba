"""
Windows: which blocks a request frees, and when. The simulator and test_families.py show that no
token misses one of them.
"""

import pytest

from engine.stages import STAGES
from test_paged import assert_idle
from tests.simulated_device import finish, greedy, simulated_engine

# window | the block tables once 12, 16, 20 and 24 tokens are computed, for a prompt of 9 tokens and
# blocks of 4
TABLES = """
5 | 0 1 2 | 0 0 2 3 | 0 0 0 3 4 | 0 0 0 0 4 5
8 | 0 1 2 | 0 0 2 3 | 0 0 0 3 4 | 0 0 0 0 4 5
9 | 0 1 2 | 0 1 2 3 | 0 0 2 3 4 | 0 0 0 3 4 5
0 | 0 1 2 | 0 1 2 3 | 0 1 2 3 4 | 0 1 2 3 4 5
"""


@pytest.mark.parametrize("row", TABLES.strip().splitlines())
def test_the_first_block_stands_in_for_those_that_no_token_sees_any_more(row):
    """
    After 16 tokens the last one, at position 15, sees 8..15 with a window of 8, and 7..15 with a
    window of 9. Would catch: a block freed one token too early or too late, or still counted; a
    block freed before it was committed.
    """
    window, *expected = row.split(" | ")
    engine = simulated_engine(window=int(window), num_blocks=16)
    request = engine.add_request("r", [1] * 9, greedy(20))
    tables = []
    while request.num_computed_slots < 24:
        engine.step()
        if request.num_computed_slots % 4 == 0:
            tables.append(" ".join(map(str, request.block_table)))
    assert tables == expected
    assert len(engine.scheduler.block_cache.contents) == 6
    finish(engine)
    assert_idle(engine)


def test_without_windows_answers_are_the_same_and_hold_all_blocks(monkeypatch):
    """
    Check that answers are the same, with all blocks kept, as if engine/window.py were not there.
    """
    prompts = [[i % 7] * 20 for i in range(4)]
    answers, most_blocks = [], []
    for _ in range(2):
        engine = simulated_engine(window=6, num_blocks=64)
        answers.append(engine.generate(prompts, greedy(40), progress=False))
        most_blocks.append(engine.scheduler.peak_blocks)
        monkeypatch.delitem(STAGES, "windows", raising=False)
    assert answers[0] == answers[1]
    assert most_blocks == [20, 60]
