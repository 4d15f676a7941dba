"""
sizes.py: which size a machine gets, what it may expect, and how far a busy machine stretches the
clock.
"""

import pytest
import torch

import train
from model import GPT, GPTConfig
from training.clock import end_of_run
from training.report import minutes_and_seconds
from training.sizes import PROBE, RESERVE, SIZES, choose_size, gated_width, model_fields

TIME = 125.0  # seconds that the default run has for its steps, about


def fastest(name: str) -> float:
    """The slowest step of the probe, in seconds, at which a size is still chosen."""
    return TIME / (RESERVE * SIZES[name].least_steps * SIZES[name].cost)


@pytest.mark.parametrize(
    ("step_seconds", "expected"),
    [
        (0.0001, "large"),
        (fastest("large") * 0.999, "large"),
        (fastest("large") * 1.001, "medium"),
        (0.080, "medium"),  # AVX-512
        (fastest("medium") * 0.999, "medium"),
        (fastest("medium") * 1.001, "small"),
        (0.150, "small"),  # AVX2
        (fastest("small") * 0.999, "small"),
        (fastest("small") * 1.001, "tiny"),
        (100.0, "tiny"),  # nothing fits: the least of all
    ],
)
def test_the_largest_size_whose_steps_fit_is_chosen(step_seconds, expected):
    assert choose_size(step_seconds, TIME) == expected


def test_more_time_is_as_good_as_a_faster_machine():
    assert [choose_size(0.15, seconds) for seconds in (-5, 30, 125, 300, 3000)] == [
        "tiny", "tiny", "small", "medium", "large",
    ]  # fmt: skip


def test_sizes_are_in_order_and_name_flags_that_exist():
    costs = [size.cost for size in SIZES.values()]
    assert costs == [0.55, 1.0, 1.25, 3.3]  # as measured, in steps of the probe
    assert SIZES[PROBE].cost == 1 and RESERVE == 1.15
    knobs = {action.dest for action in train.build_parser()._actions}
    assert all(set(size.flags()) <= knobs for size in SIZES.values())


def blocks(arch: str, n_embd: int) -> int:
    """Weights of two blocks of that width."""
    flags = [f"--arch={arch}", f"--n_embd={n_embd}", "--n_head=1", "--n_layer=2", "--device=cpu"]
    config = GPTConfig(5, **model_fields(train.parse_args(flags)))
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).h.parameters())


@pytest.mark.parametrize(
    ("n_embd", "tile"), [(64, 8), (128, 8), (192, 8), (256, 8), (384, 64), (512, 64), (768, 64)]
)
def test_a_llama_is_of_the_same_size_as_nearly_as_its_tiles_allow(n_embd, tile):
    gpt2 = blocks("gpt2", n_embd)
    assert gpt2 == 2 * (12 * n_embd**2 + 2 * n_embd)
    assert abs(blocks("llama", n_embd) - gpt2) <= 2 * 3 * n_embd * tile / 2
    assert gated_width(n_embd) % tile == 0


def test_a_model_of_a_few_numbers_has_an_mlp():
    assert [gated_width(n) for n in (1, 2, 3, 6)] == [8, 8, 8, 16]


def test_more_steps_and_larger_sizes_are_better():
    """Otherwise the choice of the largest that there is time for would be none."""
    for arch in ("gpt2", "llama"):
        tables = [size.results[arch] for size in SIZES.values() if arch in size.results]
        for table in tables:
            results = [table[steps] for steps in sorted(table)]
            assert results == sorted(results, reverse=True) and len(set(results)) == len(results)
        best = [min(table.values()) for table in tables]
        assert best == sorted(best, reverse=True)


def test_the_expectation_is_the_measured_one_and_between_two_of_them():
    small = SIZES["small"]
    half_way = (450 * 850) ** 0.5  # in the logarithm
    # nothing is promised beyond what was measured
    wanted = {850: 1.49, 200: 1.82, half_way: (1.61 + 1.49) / 2, 5: 1.82, 10**6: 1.38}
    told = {steps: small.expected("gpt2", steps) for steps in wanted}
    assert told == pytest.approx(wanted)
    assert small.expected("llama", 450) == 1.58 and SIZES["medium"].expected("llama", 9) == 1.32
    assert SIZES["tiny"].expected("llama", 450) is SIZES["large"].expected("llama", 450) is None


@pytest.mark.parametrize(
    ("elapsed", "steps_left", "step_seconds", "expected"),
    [
        (0, 800, 0.15, 140),  # a quiet machine: as planned
        (100, 200, 0.2, 140),  # exactly in time
        (100, 200, 0.3, 160),  # busy: until the steps are done
        (100, 200, 0.9, 180),  # too busy: not beyond the limit
        (100, -50, 0.9, 140),  # the steps are done: as planned
    ],
)
def test_a_busy_machine_stretches_the_clock_within_the_limit(
    elapsed, steps_left, step_seconds, expected
):
    assert end_of_run(elapsed, steps_left, step_seconds, planned=140, latest=180) == pytest.approx(
        expected
    )


def test_a_limit_before_the_plan_changes_nothing():
    assert end_of_run(0, 10**6, 1.0, planned=140, latest=100) == 140


def test_times_are_told_in_minutes_and_seconds():
    assert [minutes_and_seconds(s) for s in (4.8, 59.4, 60, 141, 183.2)] == [
        "5 s", "59 s", "1 min 0 s", "2 min 21 s", "3 min 3 s",
    ]  # fmt: skip
