"""
Windows: which blocks a request gives back, and when. The simulator and test_engine.py show that no
token misses one of them.
"""

import pytest

from engine.stages import STAGES
from test_paged import assert_idle
from tests.simulated_runner import finish, greedy, simulated_engine

# window | computed tokens -> the block table then, of a prompt of 9 tokens, in blocks of 4
TABLES = {
    5: {12: [0, 1, 2], 16: [0, 0, 2, 3], 20: [0, 0, 0, 3, 4], 24: [0, 0, 0, 0, 4, 5]},
    8: {12: [0, 1, 2], 16: [0, 0, 2, 3], 20: [0, 0, 0, 3, 4], 24: [0, 0, 0, 0, 4, 5]},
    9: {12: [0, 1, 2], 16: [0, 1, 2, 3], 20: [0, 0, 2, 3, 4], 24: [0, 0, 0, 3, 4, 5]},
    0: {12: [0, 1, 2], 16: [0, 1, 2, 3], 20: [0, 1, 2, 3, 4], 24: [0, 1, 2, 3, 4, 5]},
}


@pytest.mark.parametrize("window", TABLES)
def test_the_first_block_stands_in_for_those_that_no_token_sees_any_more(window):
    """
    After 16 tokens the last one, at 15, sees 8..15 with a window of 8, and 7..15 with one of 9.
    Would catch: a block that is given back a token too early, or too late, or is still counted; one
    that was not committed before.
    """
    engine = simulated_engine(window=window, num_blocks=16)
    request = engine.add_request("r", [1] * 9, greedy(20))
    tables = {}
    while request.num_computed_slots < 24:
        engine.step()
        if request.num_computed_slots % 4 == 0:
            tables[request.num_computed_slots] = request.block_table.copy()
    assert tables == TABLES[window]
    assert len(engine.scheduler.block_cache.held) == 6
    finish(engine)
    assert_idle(engine)


def test_without_windows_answers_are_the_same_and_hold_all_blocks(monkeypatch):
    """As if engine/window.py were not there."""
    prompts = [[i % 7] * 20 for i in range(4)]
    answers, most_blocks = [], []
    for _ in range(2):
        engine = simulated_engine(window=6, num_blocks=64)
        answers.append(engine.generate(prompts, greedy(40), progress=False))
        most_blocks.append(engine.scheduler.peak_blocks)
        monkeypatch.delitem(STAGES, "windows", raising=False)
    assert answers[0] == answers[1]
    assert most_blocks == [20, 60]
