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
    settings |= {"load_seconds": 0.3, "turn_seconds": 0.0}
    calls = [{"id": 0, "key": None, "path": "/livez"}]
    world = run(settings, [{"do": "call", "calls": calls, "t": 0.01}])
    (caller,) = world.callers[:1]
    assert caller.ended_at - caller.began < 0.1


@pytest.mark.parametrize("encode_seconds, slow", [(3.0, {}), (0.0, {"sip": 50, "rest": 0.5})])
def test_the_stop_of_a_call_may_come_early_or_late(encode_seconds, slow):
    """
    The oracle took two right answers for wrong: of a call that was still being encoded, refused
    before --drain-seconds were over, as no call was in work; and of a client that reads slowly.
    """
    settings, _ = simulator.draw(0, 0)
    settings |= {"load_seconds": 0.0, "turn_seconds": 0.0, "client_seconds": 9.0}
    settings |= {"encode_seconds": encode_seconds, "drain_seconds": 5.0 if encode_seconds else 0.0}
    settings |= {"step_seconds": 0.05, "request_seconds": 60.0}
    body = {"prompt": ["bbbb~0.0"], "max_tokens": 40, "seed": 0, "ignore_eos": True}
    calls = [{"id": 0, "key": "sesame", "path": "/v1/completions", "body": body}]
    events = [{"do": "call", "calls": calls, "t": 0.5} | slow, {"do": "stop", "t": 0.7}]
    (caller,) = run(settings, events).callers
    assert b"stopping" in caller.received


def test_a_call_that_is_encoded_after_its_client_has_left_takes_some_turns():
    """It is handed to the engine and aborted at once: the oracle looked just between the two."""
    settings, _ = simulator.draw(0, 0)
    settings |= {"load_seconds": 0.0, "turn_seconds": 0.01}
    calls = [
        {"id": 0, "key": "sesame", "path": "/v1/completions", "body": {"prompt": ["bbbb~0.0"]}}
    ]
    calls[0]["body"] |= {"max_tokens": 4, "seed": 0}
    event = {"do": "call", "calls": calls, "leaves": ["sent", 1], "how": "close", "t": 0.5}
    for hundredths in range(235, 255):
        run(settings | {"encode_seconds": hundredths / 100}, [event])
