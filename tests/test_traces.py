"""The fuzzer (traces.py) as a test: a round of it against a real server."""

import pytest

from tests.traces import play_round, save_models


@pytest.mark.slow
def test_a_round_of_traces(tmp_path):
    """
    There must be no fault, and much must have happened: on a busy machine clients are slower, and a
    round may preempt no request, so there are up to three.
    """
    save_models(tmp_path)
    wanted = {"num_preemptions", "prefix_cache_hits", '"abort"', "num_requests_waiting"}
    for number in range(3):
        round = play_round(number, tmp_path)
        assert not round.faults
        wanted -= {name for name in wanted if name in str(round.seen)}
        if not wanted:
            break
    assert not wanted
