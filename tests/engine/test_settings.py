"""
Ranges of the settings, each stated once. Their defaults are stated in test_flags.py, since each is
a flag's; that they reach scheduler and runner is in test_engine_words.py.
"""

import dataclasses

import pytest

from engine.settings import Settings
from paged import SchedulerSettings
from test_paged import raises

AT_LEAST_1 = [
    "max_num_seqs", "block_size", "num_blocks", "token_budget", "max_model_len",
]  # fmt: skip


def test_the_numbers_that_have_a_least():
    """Would catch: a new number of things that may be 0."""
    found = {
        f.name: f.metadata["least"] for f in dataclasses.fields(Settings) if "least" in f.metadata
    }
    assert found == dict.fromkeys(AT_LEAST_1, 1)


@pytest.mark.parametrize("name", AT_LEAST_1)
def test_one_is_enough_and_none_is_not(name):
    assert getattr(Settings(**{name: 1}), name) == 1
    for wrong in 0, -1:
        with raises(ValueError, f"{name} is {wrong}, wanted at least 1"):
            Settings(**{name: wrong})


@pytest.mark.parametrize("wrong", [2**31, 10**30, 1.5, float("nan"), "1", []])
def test_a_count_is_a_whole_number(wrong):
    """NaN passed, 10**30 ended in an OverflowError, and others in a TypeError without the name."""
    with raises(ValueError, f"max_num_seqs is {wrong!r}, wanted at least 1, a whole number"):
        Settings(max_num_seqs=wrong)
    with raises(ValueError, "block_size is None"):  # not a value that is found from the machine
        Settings(block_size=None)


def test_a_scheduler_refuses_what_the_engine_refuses():
    with raises(ValueError, "max_num_seqs is 0"):
        SchedulerSettings(max_num_seqs=0)


@pytest.mark.parametrize("share", [0, 0.0, 0.25, 0.999])
def test_a_share_that_is_one(share):
    assert Settings(prefill_share=share).prefill_share == share


@pytest.mark.parametrize("share", [-0.001, 1, 1.5, float("nan")])
def test_a_share_that_is_none(share):
    with raises(ValueError, "prefill_share is", "0 or more, below 1"):
        Settings(prefill_share=share)


def test_settings_stay_as_they_are():
    """Would catch: an engine that changes the settings of another that shares them."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().block_size = 32
    with pytest.raises(TypeError):
        Settings(block_sise=32)
