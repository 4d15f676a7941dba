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
    LONGEST,
    SEEDS,
    Campaign,
    Reply,
    Run,
    Server,
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
    reached = str(campaign.reached)
    for name in ("num_preemptions", "prefix_cache_hits", '"abort"', "num_requests_waiting"):
        assert name in reached


def test_a_seed_is_the_same_trace():
    """JSON gives it back, so a file replays it; every request fits into the smallest pool."""

    def trace(seed):
        rng = random.Random(seed)
        requests = SEEDS["fill and squeeze"]
        for _ in range(100):
            requests = mutate(rng, requests, SEEDS["flood"])
            lengths = [len(request["prompt"]) for request in requests]
            most = [LONGEST - request["max_tokens"] for request in requests]
            assert all(0 < a <= b for a, b in zip(lengths, most, strict=True))
        return requests

    assert json.loads(json.dumps(trace(3))) == trace(3) != trace(4)


def reply(*tokens, end="length") -> Reply:
    return Reply(200, tokens={0: list(tokens)}, ends={0: end})


RIGHT = reply(("a", -1.0), ("b", -2.0))
WRONG = {
    "choices": Reply(200),
    "token 0": reply(("a", -1.1), ("b", -2.0)),
    "token 1": reply(("a", -1.0), ("c", -2.1)),
    "ends with (1": reply(("a", -1.0)),
    "ends with (2": reply(("a", -1.0), ("b", -2.0), end="stop"),
}


@pytest.mark.parametrize("words", WRONG)
def test_another_answer_is_a_fault(words):
    assert words in wrong_answer(WRONG[words], RIGHT)


def test_a_tie_is_no_fault():
    """Another token that was as likely, whatever follows it."""
    for right in RIGHT, reply(("c", -1.0001), ("d", -9.0)):
        assert not wrong_answer(right, RIGHT)


STREAM = 'data: {"choices": []}\n\n'
RESPONSES = [
    (httpx.Response(500, text="engine_dead"), "engine_dead"),
    (httpx.Response(429, text="full"), "full"),  # without Retry-After
    (httpx.Response(429, headers={"retry-after": "1"}), ""),
    (httpx.Response(200, text=STREAM), "the stream ends with"),
    (httpx.Response(200, text=f"{STREAM}data: [DONE]\n\n"), ""),
]


@pytest.mark.parametrize(("response", "error"), RESPONSES)
def test_a_crash_is_a_fault(response, error):
    reply = Reply()
    reply.read(response)
    assert reply.error.startswith(error)
    assert bool(reply.error) == bool(error)


def test_a_server_that_is_gone_is_a_fault():
    assert Server("http://127.0.0.1:9", {}).play([ask(0, "a", 1)]).faults


def test_a_late_answer_is_a_fault():
    assert is_slow(12, alone=1)
    assert not is_slow(10, alone=1)


def test_tokens_of_another_key_are_a_fault():
    """Own ones are none; answers, which are not looked at, can add less than a block."""
    request = ask(1, "abcdefgh", 9)
    own = ask(0, "abcd", 9)
    sent = [request, ask(0, "abcdefg", 9, key=1), ask(0, "abcdefg", 9, cache_salt="pepper")]
    hit = Reply(200, cached=4)
    assert leak(request, hit, sent, 4)
    assert not leak(request, hit, [own, *sent], 4)
    assert leak(request, replace(hit, cached=8), [own, *sent], 4)
    assert not leak(request, Reply(200), sent, 4)


def test_a_request_that_stands_twice_is_two():
    """A mutation had put one in twice, so the second's hit in the first's blocks was a leak."""
    twice = [ask(0, "abcd", 9)] * 2
    first, second = Run(None, twice).requests
    assert leak(second, Reply(200, cached=4), [first, second], 4) == ""
