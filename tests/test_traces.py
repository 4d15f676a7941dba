"""
The fuzzer (traces.py) as a test: a minute of it against a real server, and that its oracles can
fail.
"""

import pytest

from tests.traces import (
    Campaign,
    Reply,
    Server,
    ask,
    leak,
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


def reply(*tokens, end="length") -> Reply:
    return Reply(200, tokens={0: list(tokens)}, ends={0: end})


RIGHT = reply(("a", -1.0), ("b", -2.0))
WRONG = {
    "choices": Reply(200),
    "token 0": reply(("a", -1.1), ("b", -2.0)),
    "ends with (1": reply(("a", -1.0)),
}


def test_the_oracles_can_fail():
    """Tokens that are as likely are no fault, nor are hits in what its own key has sent."""
    for words, wrong in WRONG.items():
        assert words in wrong_answer(wrong, RIGHT)
    assert not wrong_answer(reply(("c", -1.0001), ("d", -9.0)), RIGHT)
    assert Server("http://127.0.0.1:9", {}).play([ask(0, "a", 1)]).faults
    request = ask(1, "abcdefgh", 9)
    sent = [request, ask(0, "abcdefg", 9, key=1), ask(0, "abcdefg", 9, cache_salt="pepper")]
    hit = Reply(200, cached=4)
    assert leak(request, hit, sent, 4) and not leak(request, hit, [ask(0, "abcd", 9), *sent], 4)
