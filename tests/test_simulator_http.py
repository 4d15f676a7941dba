"""Runs of the simulator of the HTTP side: random clients and faults, and traces of what it once found."""

import pytest
import simulator_http as simulator


def run(settings: dict, events: list[dict]) -> simulator.World:
    world = simulator.World(settings, events)
    world.run()
    return world


def play(seeds: range, steps: int):
    """Each of these seeds; of one that breaks a rule, the shrunk trace is printed."""
    for seed in seeds:
        settings, events = simulator.draw(seed, steps)
        problem = simulator.violation(settings, events)
        if problem:
            simulator.report(settings, events, problem)
            pytest.fail(f"seed {seed}: {problem}")


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_clients_and_faults(first):
    """Each call gets exactly one end, and the answer that its seed gives; whatever was lost, when all is quiet the
    counters add up, nothing is left of any call, everybody is served again, and the server can be stopped."""
    play(range(first, first + 20), steps=20)


@pytest.mark.slow
def test_many_random_clients_and_faults():
    play(range(1_000, 3_000), steps=30)


def test_a_seed_is_always_the_same_run():
    """What every client received, and when: to the byte and to the virtual microsecond."""
    first, second = (run(*simulator.draw(5, 20)) for _ in range(2))
    assert first.callers and [caller.received for caller in first.callers] == [c.received for c in second.callers]
    assert [caller.ended_at for caller in first.callers] == [caller.ended_at for caller in second.callers]
