"""
The fields of `SamplingParams`: each default and each range stated once more, what is refused and
how.
"""

import dataclasses
import math
import subprocess
import sys
from array import array
from dataclasses import replace

import pytest

from serving.params import RANGES, SamplingParams


def test_defaults():
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 16,
        "min_tokens": 0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None, "stop_token_ids": (), "ignore_eos": False, "seed": None,
        "logprobs": None,
    }  # fmt: skip


# field, the smallest number that is accepted, the largest
EDGES = [
    ("temperature", 0, 2),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 1e-300, 1),
    ("min_p", 0, 1),
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 1e-300, 10),
    ("seed", -(2**63), 2**63 - 1),
    ("logprobs", 0, 20),
]


@pytest.mark.parametrize(("name", "least", "most"), EDGES)
def test_each_range_reaches_from_edge_to_edge(name, least, most):
    """Exactly at an edge passes, one past it does not; the HTTP fields take theirs from here."""
    for value in (least, most):
        params = SamplingParams(**{"max_tokens": 2**31 - 1} | {name: value})
        assert getattr(params, name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be "):
            SamplingParams(**{name: value})


def test_every_range_has_edges():
    assert sorted(RANGES) == sorted(name for name, _, _ in EDGES)


def test_an_http_process_can_import_the_parameters():
    """torch takes a second and 200 MB, in each of the HTTP processes."""
    code = "import serving.params, sys; print(*sys.modules.keys() & {'torch', 'numpy', 'pydantic'})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""


NAN, INF = math.nan, math.inf
REFUSED = [
    *(
        ("temperature", x, "a number from 0 (greedy) to 2")
        for x in (-0.1, 2.1, NAN, INF, -INF, True, "1", None, [1])
    ),
    *(
        ("top_k", x, "a whole number, 0 for all tokens, below 2**31")
        for x in (-1, 2**31, 1.0, NAN, True, "5", None)
    ),
    *(
        ("top_p", x, "a number above 0, up to 1")
        for x in (0, 0.0, -0.5, 1.01, NAN, INF, True, "0.5", None)
    ),
    *(("min_p", x, "a number from 0 to 1") for x in (-0.01, 1.01, NAN, INF, False, "0", None)),
    *(
        ("max_tokens", x, "a whole number, at least 1, below 2**31")
        for x in (0, -1, 2**31, 1.5, NAN, INF, True, "16", None)
    ),
    *(
        ("stop_token_ids", x, "a tuple of token ids")
        for x in (None, 5, "abc", (1.5,), [True], ([1],))
    ),
    *(("ignore_eos", x, "True or False") for x in (None, 1, "yes")),
    *(
        ("seed", x, "a whole number of 64 bits, or None")
        for x in (2**63, -(2**63) - 1, 1.0, NAN, True, "0")
    ),
    *(
        ("presence_penalty", x, "a number from -2 to 2")
        for x in (-2.1, 2.1, NAN, INF, True, "1", None)
    ),
    *(
        ("frequency_penalty", x, "a number from -2 to 2")
        for x in (-2.1, 2.1, NAN, INF, True, "1", None)
    ),
    *(
        ("repetition_penalty", x, "a number above 0, up to 10")
        for x in (0, -1, 10.1, NAN, INF, True, "1", None)
    ),
    *(
        ("min_tokens", x, "a whole number, 0 to max_tokens")
        for x in (-1, 17, 1.0, NAN, True, "1", None)
    ),
    *(("logprobs", x, "a whole number, 0 to 20, or None") for x in (-1, 21, 1.0, True, "1")),
    *(
        ("logit_bias", x, "a dict from token ids to numbers from -100 to 100, or None")
        for x in (
            {"1": 1.0},
            {1: 101},
            {1: -100.5},
            {1: NAN},
            {1: True},
            {True: 1},
            {1: "1"},
            {1: None},
            {1.0: 1},
            [1],
            1,
        )
    ),
    *(
        ("allowed_token_ids", x, "a tuple of token ids, at least one, or None")
        for x in ((), [], (1.0,), (True,), ("1",), 1, "1", {1}, array("i", [1]))
    ),
]


@pytest.mark.parametrize(("name", "value", "wanted"), REFUSED)
def test_a_wrong_parameter_is_refused_with_its_name_its_value_and_what_is_wanted(
    name, value, wanted
):
    """
    NaN passes `x < 0 or x > 2`, True is an int to Python, "1" fails only on the device, in
    the step of all requests, and a stop token that is a character never stops anything.
    """
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; it must be {wanted}"


def test_token_ids_outside_the_vocabulary_are_refused():
    """They would write beyond a row of the device's arrays, into another request's."""
    params = SamplingParams(logit_bias={0: 1.0, 12: 1.0}, allowed_token_ids=[0, 12])
    params.check_vocabulary(13)
    for bad, name in (
        (replace(params, logit_bias={13: 0.0}), "logit_bias"),
        (
            replace(params, allowed_token_ids=(3, -1)),
            "allowed_token_ids",
        ),
    ):
        with pytest.raises(
            ValueError, match=rf"{name} has token (13|-1), outside 0..12: leave it out"
        ):
            bad.check_vocabulary(13)
