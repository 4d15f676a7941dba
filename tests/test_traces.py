"""
The fuzzer (traces.py) as a test: a minute of it against a real server, and that each of its oracles
can fail.
"""

import json
import random
from dataclasses import replace

import httpx
import pytest

from tests.traces import (
    SEEDS,
    Campaign,
    Choice,
    Reply,
    ask,
    is_slow,
    leak,
    mutate,
    save_models,
    wrong_answer,
)


@pytest.mark.slow
def test_a_minute_of_traces(tmp_path):
    """No fault, and much has happened: the first of SEEDS see to that."""
    save_models(tmp_path)
    campaign = Campaign(0, tmp_path)
    campaign.run(60)
    print(f"\n{campaign.summary()}")
    assert not campaign.faults
    reached = {name for name, _ in campaign.reached}
    assert {"preemptions", "prefix hits", "hang-ups", "waiting"} <= reached


def test_a_seed_is_the_same_trace():
    """JSON gives it back, so a file replays it; every request fits into the smallest context."""

    def trace(seed):
        rng = random.Random(seed)
        requests = SEEDS["fill and squeeze"]
        for _ in range(100):
            requests = mutate(rng, requests, SEEDS["flood"])
            assert all(r["prompt"] and len(r["prompt"]) + r["max_tokens"] <= 480 for r in requests)
        return requests

    assert json.loads(json.dumps(trace(3))) == trace(3) != trace(4)


RIGHT = Reply(200, "", {0: Choice(["a", "b"], [-1.0, -2.0], "length")})
WRONG = {
    "choices": {},
    "token 1": {0: Choice(["a", "c"], [-1.0, -2.1], "length")},
    "token 0": {0: Choice(["a", "b"], [-1.1, -2.0], "length")},
    "ends with": {0: Choice(["a"], [-1.0], "length")},
    "stop": {0: Choice(["a", "b"], [-1.0, -2.0], "stop")},
}


@pytest.mark.parametrize("words", WRONG)
def test_another_answer_is_a_fault(words):
    """Beside it the ones that are none: the same, and another token that was as likely."""
    assert words in wrong_answer(replace(RIGHT, choices=WRONG[words]), RIGHT)
    tie = {0: Choice(["c", "d"], [-1.0001, -9.0], "length")}
    for choices in (RIGHT.choices, tie):
        assert not wrong_answer(replace(RIGHT, choices=choices), RIGHT)


STREAM = 'data: {"choices": []}\n\n'


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(500, text="engine_dead"), "engine_dead"),
        (httpx.Response(429, text="full"), "full"),  # without Retry-After
        (httpx.Response(429, headers={"retry-after": "1"}), ""),
        (httpx.Response(200, text=STREAM), "the stream ends with"),
        (httpx.Response(200, text=STREAM + "data: [DONE]\n\n"), ""),
    ],
)
def test_a_crash_is_a_fault(response, error):
    reply = Reply()
    reply.read(response)
    assert error in reply.error
    assert bool(error) == bool(reply.error)


def test_a_late_answer_is_a_fault():
    assert is_slow(12, alone=1)
    assert not is_slow(10, alone=1)


def test_tokens_of_another_key_are_a_fault():
    """Own ones are none; answers, which are not looked at, can add less than a block."""
    request = ask(1, "abcdefgh", 9)
    own = ask(0, "abcd", 9)
    foreign = [ask(0, "abcdefg", 9, key=1), ask(0, "abcdefg", 9, cache_salt="pepper")]
    reply = Reply(200, cached=4)
    assert "sent before were 0" in leak(request, reply, [request, *foreign], 4)
    assert not leak(request, reply, [request, own, *foreign], 4)
    assert "sent before were 4" in leak(request, replace(reply, cached=8), [own, request], 4)
