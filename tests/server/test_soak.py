"""Half a minute of soak.py, and that its verdict notices."""

import json
import subprocess
import sys

import pytest
from soak import problems
from test_clients import ROOT, checkpoint  # noqa: F401  a fixture


def a_result(**changes) -> dict:
    idle = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}
    idle |= {"generation_tokens_total": 9.0, "num_preemptions_total": 3.0}
    result = {
        "counts": {"200": 7, "400": 2, "hung up": 1, "whole streams": 3, "429": 1},
        "idle": idle,
    }
    return result | {"growth in MB, server and engine": [20.0, -3.0]} | changes


def test_the_soaks_verdict():
    """A soak that cannot fail would run through the night for nothing."""
    assert problems(a_result(), 20.0) == []
    assert problems(a_result(), 19.9) == ["grown by 20.0 MB"]
    broken = {"200": 7, "500": 1, "broken streams": 2, "ReadError": 3}
    assert problems(a_result(counts=broken), 20.0) == [
        "1 times 500",
        "2 times broken streams",
        "3 times ReadError",
    ]
    for name in "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc":
        idle = a_result()["idle"] | {name: 0.5}
        assert problems(a_result(idle=idle), 20.0) == [f"{name} is 0.5 when all is quiet"]


@pytest.mark.slow
def test_half_a_minute_of_everything_at_once(checkpoint):  # noqa: F811
    """
    Of memory only a leak of many megabytes shows in so short a time: caches are still filling.
    """
    flags = ["--minutes", "0.5", "--warm-up", "0.2", "--growth", "200", "--clients", "8"]
    command = [sys.executable, "tests/soak.py", "--model", str(checkpoint), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert min(result["counts"][name] for name in ("200", "400", "hung up", "whole streams")) > 0
    assert result["idle"]["generation_tokens_total"] > 0
