"""Random clients and faults on the HTTP side: hypothesis draws runs for simulator_http.py."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_http import KEYS, World

SETTINGS = {
    "max_num_seqs": [1, 2, 3, 4],
    "max_queue": [0, 2, 8, 20],
    "num_blocks": [24, 48],
    "token_budget": [4, 64],
    "overlap": [True, False],
    "load_seconds": [0.0, 0.3],
    "step_seconds": [0.001, 0.02, 0.05],
    "encode_seconds": [0.0, 0.01, 0.2],
    "turn_seconds": [0.0, 0.0, 0.0005, 0.002],
    "request_seconds": [2.0, 5.0, 60.0],
    "client_seconds": [1.0, 4.0],
    "drain_seconds": [0.0, 1.0, 5.0],
    "ping_seconds": [0.05, 10.0],
    "max_connections": [4, 100, 100],
    "tcp_room": [1000, 2**16],
    "tcp_piece": [200, 2**18],
    "link_room": [100, 1000, 2**16],
    "link_piece": [50, 2**18],
    "link_high": [0, 2**16],
}
STARTS = ["abcabcabcabc" * 3, "abcabc", "€", "bbbb"]  # of prompts
FIELDS = {
    "stream": [True],
    "stream_options": [{"include_usage": True}],
    "n": [1, 2, 3, 4],
    "stop": ["a", "bc", "ccc€"],
    "ignore_eos": [True],
    "cache_salt": ["x", "y"],
    "priority": [-5, 5],
    "logprobs": [0, 2],
}
OTHERS = [{"path": path} for path in ("/metrics", "/livez", "/readyz", "/v1/models", "/nowhere")]
OTHERS[-1]["refused"] = 404
OTHERS += [
    {"body": b"{", "refused": 400},
    {"body": b'{"prompt": "a"}', "type": "text/plain", "refused": 400},
    {"body": b'{"prompt": "a", "model": "other"}', "refused": 404},
    {"body": b'{"prompt": "a"}', "key": "wrong", "refused": 401},
]
MANNERS = {
    "pieces": [(2, 0.001), (6, 0.01), (3, 0.4)],
    "sips": [(50, 0.02), (300, 0.1), (5000, 1.5)],
    "stays": [0.001, 0.01, 0.1, 0.5, 1.0],
    "sends": [1, 100, 250],
    "waits_for": ["HTTP", "data", "finish_reason", '"stop"', "DONE"],
    "how": ["reset"],
}
FAULTS = {
    "die": {},
    "stall": {"seconds": [0.05, 0.5, 3.0]},
    "fail": {"where": ["launch", "collect", "logits", "logits"]},
    "cannot_load": {},
    "stop": {},
}
SHORT = [0.0, 0.001, 0.01, 0.05, 0.15]  # pauses


def draw_run(one: Callable, most: int) -> tuple[dict, list[dict]]:
    """
    Return settings, and at most this many events; `one` chooses from a list. This is swarm testing:
    a run has only a random half of all features, clients and faults, because some would hide
    others.
    """

    def some(table: dict) -> dict:
        return {name: table[name] for name in table if one([False, True])}

    def drawn(table: dict) -> dict:
        return {name: one(table[name]) for name in table}

    fields = some(FIELDS)
    manners = some(MANNERS)
    faults = some(FAULTS)
    sizes = one([[1, 4, 12], [16, 40]])
    most_prompts = one([1, 1, 3])
    most_calls = one([1, 1, 4])
    pauses = one([SHORT, [0.1, 0.2, 0.3, 0.4]])
    num_calls = 0

    def call() -> dict:
        nonlocal num_calls
        num_calls += 1
        start = {"id": num_calls, "key": one(KEYS), "path": "/v1/completions"}
        if one(range(6)) == 5:
            return start | one(OTHERS)
        body = drawn(some(fields)) | {"max_tokens": one(sizes), "seed": one(range(100))}
        if "stream" not in body:
            body.pop("stream_options", None)
        ends = [f"~{num_calls}.{i}" for i in range(one(range(most_prompts)) + 1)]
        return start | {"body": body | {"prompt": [one(STARTS) + end for end in ends]}}

    def event() -> dict:
        if faults and one(range(7)) == 6:
            name = one(list(faults))
            return {"do": name, "after": one(SHORT)} | drawn(faults[name])
        after = one(pauses if num_calls else [0.01, 0.5, 1.0])
        calls = [call() for _ in range(one(range(most_calls)) + 1)]
        how = drawn(some(manners)) if one([False, True]) else {}
        return {"do": "visit", "after": after, "calls": calls} | how

    num_events = one([*range(most), *[most] * 3 * most])
    return drawn(SETTINGS), [event() for _ in range(num_events)]


@pytest.mark.parametrize("first", range(0, 60, 5))
def test_random_clients_and_faults(first):
    """
    Each call ends exactly once, with the answer that its seed gives. Whatever was lost, once all is
    quiet the counters add up, nothing is left of any call, new calls are served, and the server can
    be stopped.
    """
    for seed in range(first, first + 5):
        World(*draw_run(random.Random(seed).choice, 20)).run()


@st.composite
def runs(draw):
    return draw_run(lambda values: draw(st.sampled_from(values)), 30)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=False, database=None)
@given(runs())
def test_many_random_clients_and_faults(run):
    """
    The runs are new each time. If one breaks a rule, hypothesis looks for a short run that does.
    """
    World(*run).run()
