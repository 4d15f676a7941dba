"""
The simulator (simulator.py) as a test: some thousand steps of random lives, the failures found so
far, and a check that it can fail at all. `python -m tests.simulator` runs more of it.
"""

from pathlib import Path
from zlib import crc32

import pytest

import paged
from tests.simulator import campaign, fails, main, play, read_trace
from tests.swarm import FAULTS, a_life

LIVES = sorted((Path(__file__).parents[1] / "lives").glob("*.jsonl"))
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_random_lives(first):
    """
    Would catch: a wrong answer, a wrong count, a wrong order of service; anything kept too long.
    """
    for seed in range(first, first + 20):
        settings, events = a_life(seed)
        assert not fails(settings, events), f"python -m tests.simulator --seed {seed}"


@forks
@pytest.mark.slow
def test_a_million_steps_of_random_lives():
    """
    Run the same for long enough to meet what happens once in 100,000 steps; every fault occurs in
    it.
    """
    last, failure, counts = campaign(10**6, steps=1e6, processes=2)
    print(f"\n{counts}")
    assert not failure, f"python -m tests.simulator --seed {last}: {failure}"
    rare = [
        name
        for name in (*FAULTS, "forks", "windows", "prefix cache", "drafts")
        if counts[name] < 500
    ]
    assert not rare, f"hardly met: {rare}"


@pytest.mark.parametrize("path", LIVES, ids=lambda path: path.stem)
def test_what_it_has_found_stays_mended(path):
    """The traces are shrunk from earlier failures, and from bugs that random lives rarely meet."""
    assert not fails(*read_trace(path))


def test_a_seed_is_the_same_life_on_any_machine():
    """
    Would catch: anything in it that depends on a clock, the order of a set, or hash(), which
    differs between processes.
    """
    texts = []  # for each text: when it came, when it ended, and what it was sent
    for seed in range(5):
        world, _ = play(*a_life(seed))
        texts += world.everybody
    assert crc32(repr(texts).encode()) == 226290745
    assert len(texts) > 100


@forks
def test_a_failure_is_shrunk_and_played_again(monkeypatch, capsys, tmp_path):
    """
    Plant a bug. The simulator must find it, and leave a trace that reproduces it in a few events.
    """
    monkeypatch.chdir(tmp_path)
    clear_cache = paged.Request.clear_cache

    def forget_the_last_block(request, block_allocator):
        request.block_table = request.block_table[:-1]
        clear_cache(request, block_allocator)

    monkeypatch.setattr(paged.Request, "clear_cache", forget_the_last_block)
    monkeypatch.setattr("sys.argv", ["simulator", "--steps", "10000", "--processes", "1"])
    assert main() == 1
    (trace,) = tmp_path.glob("simulator-*.jsonl")
    assert f"--replay {trace.name}" in capsys.readouterr().out
    settings, events = read_trace(trace)
    assert 1 <= len(events) <= 3
    monkeypatch.setattr("sys.argv", ["simulator", "--replay", str(trace)])
    assert main() == 1
    assert "block tables hold" in capsys.readouterr().out
    monkeypatch.undo()
    world, why = play(settings, events)
    assert world.steps and not why, "without the bug it does not fail"
