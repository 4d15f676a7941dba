"""The benchmarks that need no quiet machine: workloads are what they are said to be, and waste is counted right."""

import pytest

from bench import fill_pool, offline_workload, padded


def test_the_workload_is_the_one_that_others_measure_and_its_parts_fit():
    """Other lengths, and no figure could be compared; `bench.py batching` has room for 128 + 128 tokens a text."""
    requests = offline_workload()
    assert (sum(len(prompt) for prompt, _ in requests), sum(n for _, n in requests)) == (142_827, 133_966)
    small = offline_workload(96, 8, 65)
    assert [(len(prompt), n) for prompt, n in small] == [(len(prompt) // 8, n // 8) for prompt, n in requests[:96]]
    assert max(len(prompt) for prompt, _ in small) <= 128 and max(max(prompt) for prompt, _ in small) == 64


def test_a_padded_batch_is_a_rectangle():
    """Were a short one to end early, a static batch would look better than it is."""
    assert padded([([1, 2, 3], 4), ([5], 9)]) == [([1, 2, 3], 9), ([0, 0, 5], 9)]


@pytest.mark.parametrize(("S", "at_once", "inside"), [(2048, 16, 56.3), (16, 36.2, 0.8), (4, 36.4, 0.2)])
def test_waste_is_half_a_block_of_each_text(S, at_once, inside):
    """Slabs: 32,768 / 2,048 requests. Blocks: on average half a block of each request is empty, S / 2 * 36 tokens."""
    row = fill_pool(S, 32_768)
    assert row["at once"] == at_once
    assert row["waste inside, %"] == inside
    assert row["tokens, %"] + row["waste inside, %"] + row["waste outside, %"] == pytest.approx(100, abs=0.2)
