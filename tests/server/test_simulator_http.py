"""
Runs of the simulator of the HTTP side: random clients and faults, and that it can fail at all.
"""

import pytest
import simulator_http as simulator

from server import client


def run(settings: dict, events: list[dict]) -> simulator.World:
    world = simulator.World(settings, events)
    world.run()
    return world


def play(seeds: range, steps: int):
    for seed in seeds:
        problem = simulator.violation(*simulator.draw(seed, steps))
        assert not problem, (
            f"{problem}: python -m tests.simulator_http --seed {seed} --steps {steps}"
        )


@pytest.mark.parametrize("first", range(0, 60, 5))
def test_random_clients_and_faults(first):
    """
    Each call gets exactly one end, and the answer that its seed gives; whatever was lost, when all
    is quiet the counters add up, nothing is left of any call, everybody is served again, and the
    server can be stopped.
    """
    play(range(first, first + 5), steps=20)


@pytest.mark.slow
def test_many_random_clients_and_faults():
    play(range(20_000, 20_150), steps=30)


def test_a_failure_is_shrunk_and_played_again(monkeypatch, capsys, tmp_path):
    """
    A bug is planted: the simulator must find it, and leave a trace that plays it again in a few
    events.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client.EngineClient, "abort", aborts_here_alone)
    monkeypatch.setattr("sys.argv", ["simulator_http", "--minutes", "1", "--steps", "20"])
    assert simulator.main() == 1
    (trace,) = tmp_path.glob("simulator-http-*.jsonl")
    assert f"--replay {trace.name}" in capsys.readouterr().out
    settings, events = simulator.read_trace(trace)
    assert len(events) <= 3  # none at all: each run ends with some requests of its own
    monkeypatch.setattr("sys.argv", ["simulator_http", "--replay", str(trace)])
    assert simulator.main() == 1
    assert "for which nobody waits" in capsys.readouterr().out
    monkeypatch.undo()
    assert not simulator.violation(settings, events), "without the bug it does not fail"


def aborts_here_alone(self, choice):
    return self.choices.pop(choice.engine_id, None) is not None


def test_a_seed_is_always_the_same_run():
    """What every client received, and when: to the byte and to the virtual microsecond."""
    first, second = (run(*simulator.draw(5, 20)) for _ in range(2))
    assert first.callers and [caller.received for caller in first.callers] == [
        c.received for c in second.callers
    ]
    assert [caller.ended_at for caller in first.callers] == [
        caller.ended_at for caller in second.callers
    ]
