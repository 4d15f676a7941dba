"""The fuzzer (traces.py) as a test: a round of it against a real server."""

import pytest

from tests.traces import play_round, save_models


@pytest.mark.slow
def test_a_round_of_traces(tmp_path):
    """There must be no fault, and much must have happened."""
    save_models(tmp_path)
    round = play_round(0, tmp_path)
    assert not round.faults
    reached = str(round.seen)
    for name in ("num_preemptions", "prefix_cache_hits", '"abort"', "num_requests_waiting"):
        assert name in reached
