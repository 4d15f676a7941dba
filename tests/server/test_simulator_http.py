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


def test_a_failure_is_shrunk(monkeypatch, capsys):
    """A bug is planted: the simulator must find it, and print the few events that are enough."""
    monkeypatch.setattr(client.EngineClient, "abort", aborts_here_alone)
    monkeypatch.setattr("sys.argv", ["simulator_http", "--minutes", "1", "--steps", "20"])
    assert simulator.main() == 1
    _, _, why, _, *events = capsys.readouterr().out.splitlines()
    assert "for which nobody waits" in why
    assert len(events) <= 3  # none at all: each run ends with some requests of its own


def aborts_here_alone(self, choice):
    return self.choices.pop(choice.engine_id, None) is not None


def test_a_seed_is_always_the_same_run():
    """Every client receives the same, to the byte, at the same virtual microsecond."""
    first, second = (run(*simulator.draw(5, 20)) for _ in range(2))
    assert first.callers
    assert [caller.received for caller in first.callers] == [c.received for c in second.callers]
    assert [caller.ended_at for caller in first.callers] == [
        caller.ended_at for caller in second.callers
    ]


def test_the_server_answers_while_the_model_loads():
    """A supervisor asks whether it lives."""
    settings, _ = simulator.draw(0, 0)
    settings |= {"start_seconds": 0.1, "load_seconds": 0.3, "turn_seconds": 0.0}
    calls = [{"id": 0, "key": None, "path": "/livez"}]
    world = run(settings, [{"do": "call", "calls": calls, "t": 0.01}])
    (caller,) = world.callers[:1]
    assert caller.ended_at - caller.began < 0.1
