"""Half a minute of soak.py, and that its verdict notices."""

import json
import subprocess
import sys

import pytest
from soak import problems
from test_clients import ROOT, checkpoint  # noqa: F401  a fixture

COUNTS = {"200": 7, "400": 2, "hung up": 1, "whole streams": 3, "429": 1}
IDLE = {"num_requests_running": 0.0, "kv_cache_usage_perc": 0.0}
RESULT = {"counts": COUNTS, "idle": IDLE, "growth in MB": [20.0, -3.0]}


@pytest.mark.parametrize(
    "changes, most_growth, verdict",
    [
        ({}, 20.0, []),
        ({}, 19.9, ["grown by 20.0 MB"]),
        ({"counts": {"200": 7, "500": 1}}, 20.0, ["1 times 500"]),
        ({"counts": {"broken streams": 2}}, 20.0, ["2 times broken streams"]),
        ({"counts": {"ReadError": 3}}, 20.0, ["3 times ReadError"]),
        ({"idle": {"blocks": 0.5}}, 20.0, ["blocks is 0.5 when all is quiet"]),
    ],
)
def test_the_soaks_verdict(changes, most_growth, verdict):
    """A soak that cannot fail would run through the night for nothing."""
    assert problems(RESULT | changes, most_growth) == verdict


@pytest.mark.slow
def test_half_a_minute_of_everything_at_once(checkpoint):  # noqa: F811
    """
    Of memory only a leak of many megabytes shows in so short a time: caches are still filling.
    """
    flags = ["--minutes", "0.5", "--growth", "200"]
    command = [sys.executable, "tests/soak.py", "--model", str(checkpoint), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])["counts"]
    assert min(counts[name] for name in ("200", "400", "hung up", "whole streams")) > 0
