"""The shrinking of failing event lists."""

from tests.shrink import shrink


def test_what_the_failure_needs_is_left_and_nothing_else():
    """Would catch: an event lost that is needed, or one left that is not; their order changed."""
    needed = [3, 50, 97]
    runs = []

    def fails(events):
        runs.append(events)
        return [e for e in events if e in needed] == needed

    assert shrink(list(range(100)), fails) == needed
    assert len(runs) < 300


def test_events_become_as_simple_as_the_failure_allows():
    few = shrink([9, 7, 3], lambda events: sum(events) >= 8, simpler=range)
    assert few == [5, 3]
