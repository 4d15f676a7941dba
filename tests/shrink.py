"""
Reduces a long list of events that makes a test fail to a short one: delta debugging (Zeller and
Hildebrandt, 2002).

    few = shrink(events, fails)    # fails(events): is the failure still there? It is for `few`

Not run by itself: the simulators use it.
"""

from collections.abc import Callable, Iterable


def shrink(
    events: list,
    fails: Callable[[list], bool],
    simpler: Callable[[dict], Iterable[dict]] = lambda event: (),
) -> list:
    """
    Leave out whatever the failure does not need, larger runs of events first. Then replace single
    events by simpler ones, which `simpler(event)` proposes. Repeat until nothing more can go.
    """
    assert fails(events), "nothing to shrink: these events do not fail"
    before = None
    while events != before:
        before = events
        events = leave_out(events, fails)
        events = simplify(events, fails, simpler)
    return events


def leave_out(events: list, fails: Callable[[list], bool]) -> list:
    """Remove each run of events that is not needed: halves, quarters, .. , single events."""
    size = max(1, len(events) // 2)
    while size:
        start = 0
        while start < len(events):
            fewer = events[:start] + events[start + size :]
            if fails(fewer):
                events = fewer
            else:
                start += size
        size //= 2
    return events


def simplify(
    events: list, fails: Callable[[list], bool], simpler: Callable[[dict], Iterable[dict]]
) -> list:
    """Make each event as simple as possible: the first of its proposals that still fails."""
    for i in range(len(events)):
        for proposal in simpler(events[i]):
            changed = [*events[:i], proposal, *events[i + 1 :]]
            if fails(changed):
                events = changed
                break
    return events
