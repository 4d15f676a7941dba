"""
The fields of `SamplingParams`: each default and each range stated a second time, and how a value is
refused.
"""

import json
import math

import pytest

from params import RANGES, SamplingParams

LARGEST = 2**31 - 1
# a field, its default, the smallest and the largest number that is accepted
FIELDS = """
temperature        1    0      2
top_k              0    0      2147483647
top_p              1    1e-300 1
min_p              0    0      1
max_tokens         16   1      2147483647
min_tokens         0    0      2147483647
presence_penalty   0    -2     2
frequency_penalty  0    -2     2
repetition_penalty 1    1e-300 10
seed               null -9223372036854775808 9223372036854775807
logprobs           null 0      20
"""
FIELDS = {
    name: [*map(json.loads, rest)] for name, *rest in map(str.split, FIELDS.split("\n")[1:-1])
}
WHOLE = ("top_k", "max_tokens", "min_tokens", "seed", "logprobs")
NUMBERS = dict.fromkeys((0, 12), 0.0)


def refusal(**fields) -> str:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**fields)
    return str(caught.value)


@pytest.mark.parametrize("name", RANGES)
def test_a_range_reaches_from_edge_to_edge(name):
    """
    A value exactly at an edge passes, one beyond it does not. NaN would pass `x < 0 or x > 2`, True
    is an int in Python, and "1" would only fail on the device, in the step of all requests.
    """
    default, least, most = FIELDS[name]
    assert getattr(SamplingParams(), name) == default
    for value in (least, most):
        params = SamplingParams(**{"max_tokens": LARGEST} | {name: value})
        assert getattr(params, name) == value
    wrong = [least - 1, most + 1, math.nan, math.inf, True, "1", [1]]
    wrong += [1.0] if name in WHOLE else []
    wrong += [None] if default is not None else []
    for value in wrong:
        expected = f"{name} is {value!r}; it must be {RANGES[name].wanted}"
        assert refusal(**{name: value}) == expected


WRONG = {
    "min_tokens": [17],  # more than max_tokens
    "stop_token_ids": [None, "abc", [True], [1.5]],
    "ignore_eos": [None, 1],
    "logit_bias": [[1], {True: 1}, {"1": 1}, {1: 101}, {1: -101}],
}


@pytest.mark.parametrize("name", WRONG)
def test_other_fields_have_their_type(name):
    for value in WRONG[name]:
        assert refusal(**{name: value}).startswith(f"{name} is {value!r}; it must be ")
    SamplingParams(min_tokens=16, stop_token_ids=[5], ignore_eos=True, logit_bias={1: 100, 2: -100})


@pytest.mark.parametrize("token", [13, -1])
def test_a_token_id_outside_the_vocabulary_is_refused(token):
    """It would be written beyond a row of the device's arrays, into another request's."""
    SamplingParams(logit_bias=NUMBERS).check_vocabulary(13)
    with pytest.raises(ValueError, match=f"logit_bias has token {token}, outside 0..12"):
        SamplingParams(logit_bias=NUMBERS | {token: 0.0}).check_vocabulary(13)
