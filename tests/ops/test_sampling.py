"""
Sampling: the noise word for word, the frequencies against the softmax, the filters against a naive
reference.

Everything here is seeded, so a check of frequencies passes always or never. That it can fail is
shown beside it: the same counts are held against the distribution of a wrong sampler.
"""

import math
import random
from dataclasses import replace
from functools import cache

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import possible_tokens

import kernels
from ops import sampling, sampling_kernels
from ops.choice import choose_ops
from ops.sampling import Row, SamplingRows, gumbel_noise, philox
from ops.sampling_kernels import gumbel, philox_words, tl, triton
from params import GREEDY, LOWEST_LOGPROB, NO_TOKEN, SamplingParams

# On a GPU every test here runs there, the kernels compiled; elsewhere Triton's interpreter runs
# them on CPU tensors.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")
PATHS = [sampling.sample_torch, pytest.param(sampling_kernels.sample_triton, marks=needs_triton)]
sample = sampling_kernels.sample_triton if DEVICE == "cuda" else sampling.sample_torch
both_paths = pytest.mark.parametrize("pick", PATHS, ids=["torch", "triton"])


def tensor(values, dtype=None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def randn(*shape: int, seed: int) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# --------------------------------------------------------------------------------------------------
# Philox


def philox_in_integers(counter, key) -> tuple[int, ...]:
    """Philox4x32-10 word by word, as the paper has it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def philox_in_torch(counter, key) -> tuple[int, ...]:
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    return tuple(int(word) for word in words)


ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # counter, key, answer: those of Random123, the authors' own library
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, answer):
    """
    Another generator would be random too, but other backends and other readers could not repeat its
    tokens.
    """
    assert philox_in_integers(counter, key) == answer
    assert philox_in_torch(counter, key) == answer


WORD = st.integers(0, ONES)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_philox_equals_integer_arithmetic(counter, key):
    """
    A product of two 32-bit words fills int64 up to the sign bit: a shift that drags the sign along
    is wrong.
    """
    assert philox_in_torch(counter, key) == philox_in_integers(counter, key)


def expected_noise(seed: int, position: int, choice: int, V: int) -> list[float]:
    """DESIGN's rule, in Python's own numbers."""
    noise = []
    for t in range(V):
        words = philox_in_integers(
            (t // 4, position, choice, 0), (seed % 2**32, (seed >> 32) % 2**32)
        )
        u = ((words[t % 4] >> 9) + 0.5) * 2.0**-23
        noise.append(-math.log(-math.log(u)))
    return noise


SEEDS = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), -(2**31), 0x123456789ABCDEF]


def noise(seeds, positions, choices, V):
    return gumbel_noise(tensor(seeds), tensor(positions), tensor(choices), V)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_function_that_design_states(seed):
    """
    Key: all 64 bits of the seed, also of a negative one. Counter: (token // 4, position, choice,
    0).
    """
    found = noise([seed], [7], [3], 10)[0].tolist()
    assert found == pytest.approx(expected_noise(seed, 7, 3, 10), rel=1e-5, abs=1e-6)


def test_every_part_of_seed_position_and_choice_gives_other_noise():
    """A seed cut to 32 bits, or a choice left out, gives two requests the same tokens."""
    keys = [
        (seed, position, choice)
        for seed in SEEDS
        for position in (0, 1, 1023)
        for choice in (0, 1, 5)
    ]
    rows = noise(*([key[i] for key in keys] for i in range(3)), 8)
    assert len({tuple(row) for row in rows.tolist()}) == len(keys)
    assert (
        len(set(noise([1], [2], [3], 1000)[0].tolist())) >= 995
    )  # 23 bits: hardly two tokens alike


def test_noise_depends_neither_on_the_row_nor_on_the_batch():
    """Noise by batch row changes a request's tokens with whatever else is running."""
    seeds, positions, choices = SEEDS, [5, 5, 9, 0, 100, 3, 3, 3], [0, 1, 0, 0, 2, 0, 0, 1]
    together = noise(seeds, positions, choices, 13)
    order = [3, 7, 0, 1, 6, 2, 5, 4]
    mixed = noise(*([values[i] for i in order] for values in (seeds, positions, choices)), 13)
    assert torch.equal(mixed, together[order])
    for i in range(len(seeds)):
        assert torch.equal(noise([seeds[i]], [positions[i]], [choices[i]], 13)[0], together[i])


def test_noise_of_a_token_does_not_depend_on_the_vocabulary():
    """
    Four tokens share a counter, so a vocabulary that 4 does not divide must only cut off words.
    """
    longest = noise([5], [6], [0], 12)
    for V in 1, 2, 3, 4, 5, 11:
        assert torch.equal(noise([5], [6], [0], V), longest[:, :V])


@pytest.mark.parametrize(("word", "u"), [(0, 2.0**-24), (ONES, 1 - 2.0**-24)])
def test_noise_is_finite_at_both_ends(monkeypatch, word, u):
    """A u of 0 or 1 is infinite noise: once in some million tokens, a token of probability zero."""
    monkeypatch.setattr(sampling, "philox", lambda counter, key: (torch.full((1, 1), word),) * 4)
    assert noise([0], [0], [0], 1).item() == pytest.approx(-math.log(-math.log(u)), rel=1e-6)


# --------------------------------------------------------------------------------------------------
# Frequencies

N, V = 20_000, 13
LOGITS = tensor([2.0, 1.5, 1.5, 1.0, 0.7, 0.3, 0.0, -0.4, -0.5, -1.0, -1.0, -2.0, -3.0])


def rows_of(params: list[SamplingParams], choice: int = 0, vocab_size: int = V) -> SamplingRows:
    rows = SamplingRows(len(params), vocab_size, DEVICE)
    for row, p in enumerate(params):
        rows.fill(Row(row, p, p.seed or 0, choice))
    return rows


def draw(
    params: SamplingParams, seeds: torch.Tensor, positions: torch.Tensor, logits=LOGITS
) -> torch.Tensor:
    """One token for each pair of seed and position, all with the same logits and parameters."""
    rows = SamplingRows(len(seeds), logits.shape[-1], DEVICE)
    rows.floats.temperature[:] = params.temperature
    rows.ints.top_k[:] = params.top_k
    rows.floats.top_p[:] = params.top_p
    rows.floats.min_p[:] = params.min_p
    rows.floats.repetition[:] = 1.0
    rows.ints.seed[:] = seeds
    places = torch.arange(len(seeds), device=DEVICE)
    return sample(logits.expand(len(seeds), -1), places, positions.to(DEVICE), rows, [params])


def lowest_kept(scores: list[float], params: SamplingParams) -> float:
    """The threshold of the filters, naively and in Python's numbers."""
    ranked = sorted(scores, reverse=True)
    bar = ranked[min(params.top_k, len(ranked)) - 1] if params.top_k else -math.inf
    if params.top_p < 1:
        weights = [math.exp(x - ranked[0]) for x in ranked if x >= bar]
        bar = next(
            ranked[i]
            for i in range(len(weights))
            if math.fsum(weights[: i + 1]) >= params.top_p * math.fsum(weights)
        )
    return max(bar, ranked[0] + math.log(params.min_p)) if params.min_p else bar


def probabilities(logits, params: SamplingParams) -> list[float]:
    """What a token's frequency should be: the rule of `SamplingParams`."""
    scores = [float(x) / params.temperature for x in logits]
    bar, top = lowest_kept(scores, params), max(scores)
    weights = [math.exp(x - top) if x >= bar else 0.0 for x in scores]
    return [weight / sum(weights) for weight in weights]


def critical_value(df: int) -> float:
    """
    Of chi-square at the level 0.001, by Wilson and Hilferty (1931): df (1 - 2 / (9 df) + z sqrt(2 /
    (9 df)))^3, where z = 3.09 is the normal distribution's own. Within 2% of the tables from 3
    degrees of freedom on, 3% too large for 1.
    """
    return df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3


def fits(tokens: torch.Tensor, expected: list[float]) -> bool:
    """
    Pearson's chi-square; tokens expected fewer than 5 times count as one. What should never come
    must never come.
    """
    n, counts = len(tokens), torch.bincount(tokens, minlength=len(expected)).tolist()
    if any(count > 0 and p == 0 for count, p in zip(counts, expected, strict=True)):
        return False
    bins = [(count, n * p) for count, p in zip(counts, expected, strict=True) if n * p >= 5]
    rare = [(count, n * p) for count, p in zip(counts, expected, strict=True) if 0 < n * p < 5]
    if rare:
        bins.append(tuple(map(sum, zip(*rare, strict=True))))
    return sum((count - wanted) ** 2 / wanted for count, wanted in bins) < critical_value(
        max(1, len(bins) - 1)
    )


ALL = SamplingParams()
CASES = {
    "plain": ALL,
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=4),
    "top_k in a tie": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "all of them": SamplingParams(temperature=1.4, top_k=8, top_p=0.9, min_p=0.15),
}


def test_the_critical_values_are_those_of_the_tables():
    """The formula mistyped, every check of frequencies below would pass or fail with it."""
    for df, table in (1, 10.828), (3, 16.266), (12, 32.909), (30, 59.703):
        assert critical_value(df) == pytest.approx(table, rel=0.02 if df > 1 else 0.04)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_frequencies_are_those_of_the_softmax(name, over):
    """
    Noise that is not Gumbel, a temperature applied twice, a filter in the wrong order, seeds that
    are correlated.
    """
    params, many, one = (
        CASES[name],
        torch.arange(N, device=DEVICE),
        torch.full((N,), 11, device=DEVICE),
    )
    tokens = draw(params, many, one) if over == "seeds" else draw(params, one, many)
    assert fits(tokens, probabilities(LOGITS, params))
    for other in CASES:  # and the check can tell: no other case's distribution fits
        if other != name:
            assert not fits(tokens, probabilities(LOGITS, CASES[other])), (
                f"{name} passes for {other}"
            )


@pytest.mark.parametrize("over", ["seeds", "positions", "choices"])
def test_neighbours_are_independent(over):
    """
    Counters that overlap give the next position, seed or fork the noise of this one, moved by some
    tokens.
    """
    logits, n = tensor([0.5, 0.0, -0.3, 0.2]), torch.arange(N, device=DEVICE)
    one, zero = torch.full_like(n, 11), torch.zeros_like(n)
    first = {"seeds": (n, one, zero), "positions": (one, n, zero), "choices": (n, one, zero)}[over]
    step = {"seeds": (1, 0, 0), "positions": (0, 1, 0), "choices": (0, 0, 1)}[over]
    a, b = (
        (logits + gumbel_noise(*(x + k * dx for x, dx in zip(first, step, strict=True)), 4)).argmax(
            -1
        )
        for k in (0, 1)
    )
    p = probabilities(logits, ALL)
    pairs = [x * y for x in p for y in p]
    assert fits(4 * a + b, pairs)
    assert not fits(4 * a + a, pairs)


def test_draws_of_a_text_use_all_words_alike():
    """
    With one of Philox's four words used for four tokens, they would always come with the same
    noise.
    """
    seeds = torch.arange(N, device=DEVICE)
    rows = gumbel_noise(seeds, 0 * seeds, 0 * seeds, 8)
    assert fits(rows.argmax(-1), [1 / 8] * 8)
    correlation = torch.corrcoef(rows.T).cpu() - torch.eye(8)
    assert correlation.abs().max() < 4 / math.sqrt(N)


# --------------------------------------------------------------------------------------------------
# The filters


def threshold_triton(scores, top_k, top_p, min_p) -> torch.Tensor:
    """
    What `sampling.threshold` gives, from the kernel, in several tiles a row. The kernel finds it
    among scores that are still to be divided by their row's temperature: powers of two here, so
    that nothing is rounded.
    """
    (R, V), rows = scores.shape, torch.arange(len(scores), device=DEVICE)
    width = 16 if V < 100 else 128
    params = SamplingRows(R, V, DEVICE)
    params.ints.top_k[:], params.floats.top_p[:], params.floats.min_p[:] = top_k, top_p, min_p
    params.floats.temperature[:] = tensor([2.0, 1.0, 0.5]).repeat(R)[:R]
    scores = scores * params.floats.temperature[:, None]
    thresholds, finished = torch.full((2, R), torch.nan, device=DEVICE)
    scratch = torch.full((R, -(-V // width) * width), torch.nan, device=DEVICE)
    sampling_kernels.threshold_kernel[(R,)](
        *(
            scores,
            rows,
            rows,
            params.packed_floats,
            params.packed_ints,
            params.bias,
            params.marks,
            thresholds,
            finished,
            scratch,
        ),
        *(scores.stride(0), scratch.stride(0), V),
        PDL=False,
        WIDTH=width,
    )
    return thresholds / params.floats.temperature


both_thresholds = pytest.mark.parametrize(
    "threshold",
    [sampling.threshold, pytest.param(threshold_triton, marks=needs_triton)],
    ids=["torch", "triton"],
)


def kept_by(threshold, scores, top_k, top_p, min_p) -> list[set[int]]:
    scores = tensor(scores)
    kept = scores >= threshold(scores, tensor(top_k), tensor(top_p), tensor(min_p))[:, None]
    return [{t for t, stays in enumerate(row) if stays} for row in kept.tolist()]


@both_thresholds
@pytest.mark.parametrize("V", [1, 9, 37])
def test_filters_equal_a_naive_reference_row_by_row(threshold, V):
    """
    A filter that uses the wrong row's k, drops one token too many or too few, or tears a tie apart.
    """
    choose = random.Random(V)
    asked = [
        SamplingParams(
            top_k=choose.choice([0, 0, 1, 2, 5, V - 1, V, V + 3]),
            top_p=choose.choice([1e-30, 1e-6, 0.1, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0, 1.0]),
            min_p=choose.choice([0.0, 0.0, 0.0, 0.01, 0.1, 0.5, 0.99, 1.0]),
        )
        for _ in range(40)
    ]
    few = [2, 8, 1000][choose.randrange(3) :][0]  # values: the fewer, the more ties
    scores = [[choose.randint(-few, few) / 4 for _ in range(V)] for _ in asked]
    for row in scores[::7]:  # whatever is forbidden is -inf
        row[: V // 2] = [-math.inf] * (V // 2)
    found = kept_by(
        threshold,
        scores,
        *([getattr(p, name) for p in asked] for name in ("top_k", "top_p", "min_p")),
    )
    compared = 0
    for i, p in enumerate(asked):
        bar = lowest_kept(scores[i], p)
        # where fp32 and Python may round to different sides, either is right
        near = [
            replace(p, top_p=min(1.0, p.top_p * x), min_p=min(1.0, p.min_p * x))
            for x in (1 - 1e-5, 1 + 1e-5)
        ]
        if all(lowest_kept(scores[i], q) in (bar, -math.inf) or p.min_p for q in near):
            compared += 1
            finite = {t for t, x in enumerate(scores[i]) if x > -math.inf}
            assert found[i] & finite == {
                t for t in finite if scores[i][t] >= bar - 1e-6 * (p.min_p > 0)
            }, (
                p,
                scores[i],
            )
    assert compared >= 30


@both_thresholds
def test_filters_at_their_edges(threshold):
    """One token more or less than asked for; a tie with the last one stays."""

    def kept(*row) -> set[int]:
        return kept_by(threshold, *([x] for x in row))[0]

    tie = [1.0, 2.0, 2.0, 1.0]
    assert kept(tie, 1, 1.0, 0.0) == kept(tie, 2, 1.0, 0.0) == {1, 2}
    assert (
        kept(tie, 3, 1.0, 0.0) == kept(tie, 4, 1.0, 0.0) == kept(tie, 0, 1.0, 0.0) == {0, 1, 2, 3}
    )
    steps = [0.0, 3.0, 1.0, 2.0]
    assert kept(steps, 1, 1.0, 0.0) == {1} and kept(steps, 2, 1.0, 0.0) == {1, 3}
    assert kept(steps, 3, 1.0, 0.0) == {1, 2, 3} and kept(steps, 4, 1.0, 0.0) == {0, 1, 2, 3}
    powers = [math.log(x) for x in (4, 2, 1, 1)]  # a half, a quarter, an eighth each
    assert kept(powers, 0, 0.49, 0.0) == {0} and kept(powers, 0, 0.51, 0.0) == {0, 1}
    assert kept(powers, 0, 0.74, 0.0) == {0, 1} and kept(powers, 0, 0.76, 0.0) == {0, 1, 2, 3}
    assert kept(powers, 2, 0.66, 0.0) == {0} and kept(powers, 2, 0.67, 0.0) == {
        0,
        1,
    }  # two thirds of what top_k left
    assert kept(powers, 0, 1e-30, 0.0) == {0}
    assert kept(tie, 0, 1.0, 1.0) == {1, 2}
    assert kept(tie, 0, 1.0, math.exp(-1) - 1e-3) == {0, 1, 2, 3}
    assert kept(tie, 0, 1.0, math.exp(-1) + 1e-3) == {1, 2}


@both_thresholds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_of_a_large_vocabulary(threshold, dtype):
    """
    Bounds that hold for a handful of scores only: a k beyond the lanes, a flat or a steep row, an
    outlier.
    """
    rows, V = 6, 300
    scores = randn(rows, V, seed=4) * tensor([[1e-3], [8.0]] * 3)
    scores[2:4, 7] = 1e30
    scores[4:, 9] = -1e30
    scores = scores.to(dtype).float()
    for k, p in (1, 1.0), (50, 1.0), (200, 1.0), (0, 0.3), (0, 0.95), (40, 0.9):
        asked = SamplingParams(top_k=k, top_p=p)
        found = threshold(scores, *(torch.full((rows,), x, device=DEVICE) for x in (k, p, 0.0)))
        for i, row in enumerate(scores.tolist()):
            near = [
                lowest_kept(row, replace(asked, top_p=min(1.0, p * x)))
                for x in (1 - 1e-5, 1 + 1e-5)
            ]
            assert near[1] <= found[i].item() <= near[0], (k, p, i)


def test_no_filter_keeps_every_token():
    """
    In fp32 the sum over 50,000 tokens reaches 1 before the last of them: a request with top_p 1
    lost its rarest tokens as soon as another one in its batch asked for a filter, so its answer
    depended on its neighbours.
    """
    scores = 4 * randn(4, 50_257, seed=0)
    before = scores.cpu().double().softmax(-1).float().sort(descending=True).values.cumsum(-1)
    assert (before >= 1).any()  # or this test shows nothing
    zero = torch.zeros(4, device=DEVICE)
    assert (scores >= sampling.threshold(scores, zero.long(), zero + 1, zero)[:, None]).all()


# --------------------------------------------------------------------------------------------------
# A batch of mixed parameters


MIXED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=1, temperature=0.5),
    SamplingParams(seed=-5, top_k=3),
    SamplingParams(seed=2**62, top_p=0.7),
    SamplingParams(seed=7, min_p=0.3, temperature=2),
    SamplingParams(temperature=0, top_k=2, seed=3),
    SamplingParams(seed=9, top_k=5, top_p=0.5, min_p=0.1),
]


@cache
def alone(pick, i: int, position: int) -> int:
    """What request i of MIXED gets at `position` in a batch of its own."""
    logits, p = mixed_logits()[position][i : i + 1], MIXED[i]
    return pick(logits, tensor([0]), tensor([position]), rows_of([p], vocab_size=101), [p]).item()


@cache
def mixed_logits() -> torch.Tensor:
    return 3 * randn(40, len(MIXED), 101, seed=1)


@both_paths
@pytest.mark.parametrize("chosen", [range(8), [7, 2, 5, 0, 3], [1, 2], [0, 6], [6, 1], [3, 3, 3]])
def test_a_mixed_batch_equals_each_request_alone(pick, chosen):
    """
    Parameters by batch position instead of by row, a filter or a temperature that spills over to a
    neighbour.
    """
    logits, rows, chosen = mixed_logits(), rows_of(MIXED, vocab_size=101), list(chosen)
    for position in range(3 if pick is not sampling.sample_torch else 40):
        asked, at = [MIXED[i] for i in chosen], tensor([position])
        together = pick(
            logits[position][chosen], tensor(chosen), at.repeat(len(chosen)), rows, asked
        )
        assert together.tolist() == [alone(pick, i, position) for i in chosen]
        for i, token in zip(chosen, together.tolist(), strict=True):
            if MIXED[i].temperature == 0:
                assert token == logits[position][i].argmax()


@both_paths
def test_the_choice_index_of_a_row_reaches_the_noise(pick):
    """Forks of one request with one seed would all continue alike."""
    logits, one = torch.zeros(1, 1000, device=DEVICE), tensor([0])
    tokens = [
        pick(logits, one, one + 3, rows_of([ALL], i, vocab_size=1000), [ALL]).item()
        for i in range(5)
    ]
    assert len(set(tokens)) == 5


@both_paths
@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-40, 1e-38, 1e-6])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_hardly_any_temperature_means_the_most_likely_token(pick, temperature, top_p):
    """Divided by 1e-40, all positive logits are infinite, and the first of them won."""
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
    logits = tensor([[1.0, 5.0, 3.0, -2.0]])
    assert pick(
        logits, tensor([0]), tensor([0]), rows_of([params], vocab_size=4), [params]
    ).tolist() == [1]


@both_paths
@pytest.mark.parametrize(("penalty", "wanted"), [(1e-300, 1), (10, 2)])
def test_a_penalty_beyond_single_precision_leaves_a_token(pick, penalty, wanted):
    """
    In fp32 it is 0 or infinite: a logit over it is no number, and the request ended with an error.
    """
    params, rows = replace(GREEDY, repetition_penalty=penalty), SamplingRows(1, 4, DEVICE)
    rows.fill(Row(0, params, 0, prompt_tokens=[1, 3], generated_tokens=[0]))
    logits = tensor([[0.0, 5.0, 3.0, -2.0]])
    assert pick(logits, tensor([0]), tensor([3]), rows, [params]).tolist() == [wanted]


@both_paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tie_goes_to_the_lowest_token(monkeypatch, pick, dtype):
    """
    A reduction in the order of arrival makes greedy answers differ from run to run. Within a lane,
    a tile and a program there are ties here, and between programs.
    """
    shrink_tiles(monkeypatch, width=64, quads=16)
    logits = torch.zeros(3, 300, device=DEVICE, dtype=dtype)
    logits[0, [299, 131, 130]], logits[1, [64, 7, 298]] = 2.0, 2.0
    places = torch.arange(3, device=DEVICE)
    assert pick(
        logits, places, places, rows_of([GREEDY] * 3, vocab_size=300), [GREEDY] * 3
    ).tolist() == [130, 7, 0]


@both_paths
def test_half_precision_logits_are_sampled_in_single(pick):
    """Gumbel noise rounded to bf16 ties half of the vocabulary."""
    logits = randn(5, 64, seed=2).bfloat16()
    params = [SamplingParams(seed=i) for i in range(5)]
    rows, places = rows_of(params, vocab_size=64), torch.arange(5, device=DEVICE)
    expected = logits.double().cpu() + torch.tensor([expected_noise(i, i, 0, 64) for i in range(5)])
    assert pick(logits, places, places, rows, params).tolist() == expected.argmax(-1).tolist()


@both_paths
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    "params", [GREEDY, ALL, SamplingParams(top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0)]
)
def test_a_row_without_a_finite_maximum_gives_no_token(pick, params):
    """
    A model that overflowed went on with token 0, or with the NaN's place, without an error.
    """
    logits = randn(6, 50, seed=3)
    logits[0, 49], logits[1], logits[2, 5], logits[3, :49] = (
        torch.nan,
        -torch.inf,
        torch.inf,
        -torch.inf,
    )
    logits[4, [0, 17]] = torch.nan
    rows, places = rows_of([params] * 6, vocab_size=50), torch.arange(6, device=DEVICE)
    tokens = pick(logits, places, places, rows, [params] * 6).tolist()
    assert (
        tokens[:3] == [NO_TOKEN] * 3
        and tokens[3] == 49
        and tokens[4] == NO_TOKEN
        and 0 <= tokens[5] < 50
    )
    counted = [(marks >> 2).sum().item() for marks in rows.marks]
    assert counted == ([0, 0, 0, 1, 0, 1] if params.penalises else [0] * 6)


# --------------------------------------------------------------------------------------------------
# Bias, bans, penalties


def adjusted(logits: list[float], p: SamplingParams, prompt, generated, stops) -> list[float]:
    """What the filters see, by vLLM's formulas, in Python's numbers."""
    scores = []
    for t, x in enumerate(logits):
        x += (p.logit_bias or {}).get(t, 0.0)
        if t in stops and len(generated) < p.min_tokens:
            x = -math.inf
        if t in prompt or t in generated:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        x -= p.frequency_penalty * generated.count(t)
        x -= p.presence_penalty * (t in generated)
        scores.append(x)
    return scores


ADJUSTED = {
    "nothing": GREEDY,
    "presence": replace(GREEDY, presence_penalty=1.5),
    "reward": replace(GREEDY, presence_penalty=-2.0),
    "frequency": replace(GREEDY, frequency_penalty=0.7),
    "repetition": replace(GREEDY, repetition_penalty=1.9),
    "repetition below 1": replace(GREEDY, repetition_penalty=0.4),
    "all penalties": replace(
        GREEDY, presence_penalty=0.3, frequency_penalty=-0.4, repetition_penalty=1.2
    ),
    "bias": replace(GREEDY, logit_bias={3: 1.0, 5: -100, 0: 0.25}),
    "bias and min_tokens": replace(GREEDY, logit_bias={9: 2.5, 1: 100.0}, min_tokens=3),
    "min_tokens": replace(GREEDY, min_tokens=6),
    "everything": replace(
        GREEDY,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        logit_bias={1: 1.5},
        min_tokens=4,
    ),
}
PROMPT, STOPS = [1, 2, 2, 7], (2, 8, 11, 99, -3)


@both_paths
def test_penalties_bias_and_bans_follow_a_text_token_by_token(pick):
    """
    Greedy texts of 12 tokens against a naive model of the rules: the prompt counted for presence or
    not for repetition, a count that lags, a ban that ends a token early. Half way every request is
    preempted and set anew, in the row of another, whose bias and counts must be gone.
    """
    asked, V, steps = list(ADJUSTED.values()), 12, 12
    logits = (0.7 * randn(steps, V, seed=5)).round(decimals=2)  # close together: every rule matters
    rows, texts = SamplingRows(len(asked), V, DEVICE), [[] for _ in asked]
    for step in range(steps):
        if step in (0, 6):
            places = torch.arange(len(asked), device=DEVICE)
            places = places if step == 0 else places.flip(0)
            for row, p, text in zip(places.tolist(), asked, texts, strict=True):
                rows.fill(Row(row, p, 0, 0, PROMPT, text, STOPS))
        at = torch.full_like(places, len(PROMPT) + step)
        tokens = pick(logits[step].expand(len(asked), -1), places, at, rows, asked)
        for p, text, token in zip(asked, texts, tokens.tolist(), strict=True):
            scores = adjusted(logits[step].tolist(), p, PROMPT, text, STOPS)
            assert scores[token] >= max(scores) - 1e-5, (p, text, token)
            text.append(token)
    unlike = {tuple(text) for text in texts}
    assert len(unlike) >= len(asked) - 1, "every rule must matter here, or nothing is shown"


@both_paths
def test_sampling_is_of_the_adjusted_logits(pick):
    """Filters that look at the raw logits keep what a bias has forbidden."""
    bias = dict.fromkeys({*range(V)} - {3, 6}, -100.0)
    params = SamplingParams(top_k=2, top_p=0.999, logit_bias=bias | {6: 2.0}, seed=4)
    rows, n = rows_of([params]), 12
    zeros = torch.zeros(n, dtype=torch.int64, device=DEVICE)
    tokens = pick(LOGITS.expand(n, -1), zeros, torch.arange(n, device=DEVICE), rows, [params] * n)
    assert set(tokens.tolist()) == {3, 6}


@both_paths
def test_what_is_forbidden_is_never_chosen_however_likely(pick):
    """
    A ban that only takes 100 off a logit, as a bias may, holds until a model is sure of the token.
    """
    rows = SamplingRows(1, V, DEVICE)
    rows.fill(Row(0, SamplingParams(min_tokens=12), 4, stop_token_ids=(4,)))
    logits, positions = LOGITS.clone(), tensor([0, 5, 11, 12])
    logits[4] = 1000.0
    *banned, free = pick(logits.expand(4, -1), 0 * positions, positions, rows).tolist()
    assert 4 not in banned and free == 4


def test_on_a_gpu_the_sampler_is_tritons(monkeypatch):
    """
    Torch's is right there too, and waits for the device: the same answers, a third slower, and no
    graph.
    """
    for there, device, wanted in (
        (True, "cuda", sampling_kernels.sample_triton),
        (True, "cpu", sampling.sample_torch),
        (None, "cuda", sampling.sample_torch),
    ):
        monkeypatch.setattr(kernels, "triton", there)
        ops, _ = choose_ops("auto", device)
        assert ops.sample is wanted


def test_the_torch_path_skips_only_what_no_row_asks_for():
    """`asked` is a hint: with it or without, tokens and counts are the same."""
    for p in ADJUSTED.values():
        found = []
        for asked in [p, ALL], None:
            rows = SamplingRows(2, V, DEVICE)
            rows.fill(Row(0, p, 0, 0, PROMPT, [0], (0, 1)), Row(1, ALL, 0))
            logits, at = LOGITS.expand(2, -1), tensor([5, 5])
            found.append(
                (sampling.sample_torch(logits, tensor([0, 1]), at, rows, asked), rows.marks)
            )
        (tokens, marks), (hinted_tokens, hinted_marks) = found
        assert torch.equal(tokens, hinted_tokens) and torch.equal(marks, hinted_marks)


def test_placing_requests_takes_two_small_uploads(monkeypatch):
    """
    Rows of V numbers for every request that is admitted are 400 kB for each, in the engine's way;
    an upload for each request made 24 ms of a first step of 256.
    """
    sizes, upload = [], sampling.upload

    def count(values, *where):
        sizes.append(upload(values, *where).numel())
        return upload(values, *where)

    monkeypatch.setattr(sampling, "upload", count)
    rows = SamplingRows(4, 1000, DEVICE)
    rows.fill(
        *(Row(i, SamplingParams(top_p=0.5, top_k=3 + i), 5, 0, [1, 2], [3], [4]) for i in (1, 3, 2))
    )
    assert sizes == [7 * 3, 6 * 3] and rows.ints.top_k.tolist() == [0, 4, 5, 6]
    rows.fill(Row(1, SamplingParams(logit_bias={3: 1}, min_tokens=1), 5, 0, [1, 2], [3], [4]))
    assert sizes[2:] == [1000, 1000, 7, 6]


# --------------------------------------------------------------------------------------------------
# Triton and torch


@sampling_kernels.jit
def noise_kernel(seeds, positions, choices, words, noise, V, QUADS: tl.constexpr):
    """Grid (R,): words [R, 4 * QUADS] and noise of a row, as gumbel_max_kernel has them."""
    r, quad = tl.program_id(0), tl.arange(0, QUADS)
    position, choice = tl.load(positions + r), tl.load(choices + r)
    w0, w1, w2, w3 = philox_words(tl.load(seeds + r), quad, position, choice)
    at = r * 4 * QUADS + 4 * quad
    tl.store(words + at, w0.to(tl.int64))
    tl.store(words + at + 1, w1.to(tl.int64))
    tl.store(words + at + 2, w2.to(tl.int64))
    tl.store(words + at + 3, w3.to(tl.int64))
    tl.store(noise + at, gumbel(w0))


@needs_triton
def test_both_paths_draw_the_same_words_and_the_same_noise():
    """
    A signed shift, a seed cut to 32 bits, positions and choices swapped: other tokens on a GPU than
    on a CPU.
    """
    keys = [
        (seed, p, c)
        for seed in [*SEEDS, 12345]
        for p in (0, 7, 2**31 - 1, 2**31, 2**32 - 1)
        for c in (0, 3)
    ]
    seeds, positions, choices = (tensor([key[i] for key in keys]) for i in range(3))
    words = torch.zeros(len(keys), 32, dtype=torch.int64, device=DEVICE)
    noise = torch.zeros(len(keys), 32, device=DEVICE)
    noise_kernel[(len(keys),)](seeds, positions, choices, words, noise, 32, QUADS=8)
    counter = (
        torch.arange(8, device=DEVICE),
        positions[:, None],
        choices[:, None],
        0 * positions[:, None],
    )
    key = (seeds & ONES)[:, None], ((seeds >> 32) & ONES)[:, None]
    assert torch.equal(words, torch.stack(philox(counter, key), dim=-1).flatten(1))
    found, expected = noise[:, ::4], gumbel_noise(seeds, positions, choices, 32)[:, ::4]
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=3e-6)  # the chip's own logarithm


@needs_triton
@pytest.mark.parametrize("V", [1, 2, 3, 5, 13, 61])
def test_both_paths_pick_by_noise_alone(V):
    """
    With equal logits only the noise decides: each word must meet its own token, also where 4 does
    not divide V.
    """
    asked = [SamplingParams(seed=seed) for seed in SEEDS]
    rows, places = rows_of(asked, choice=2, vocab_size=V), torch.arange(len(asked), device=DEVICE)
    logits = torch.zeros(len(asked), V, device=DEVICE)
    for position in range(3):
        given = logits, places, torch.full_like(places, position), rows
        assert (
            sampling_kernels.sample_triton(*given).tolist()
            == sampling.sample_torch(*given).tolist()
        )


TEMPERATURES = [0, 0.3, 0.7, 1, 1.7, 5]  # 5 is beyond what is accepted, not beyond the formulas


def random_params(choose: random.Random, V: int, likely: list[int]) -> SamplingParams:
    """
    Half of the requests ask for one thing, so that nothing else hides it; the others for several.
    """
    c = choose.choice
    several = {
        "top_k": c([1, 2, 5, 50, V - 1, V, 10**6]),
        "top_p": c([0.1, 0.5, 0.9, 0.99]),
        "min_p": c([0.02, 0.1, 0.5, 1]),
        "presence_penalty": c([-1.0, 1.0]),
        "frequency_penalty": c([-0.5, 0.7]),
        "repetition_penalty": c([0.5, 1.3]),
        "logit_bias": c([{0: 5, V // 2: -5}, {likely[0]: -3.5}]),
        "min_tokens": 4,
    }
    number = c([1, 1, 1, 2, 3, len(several)])
    return SamplingParams(
        **{name: several[name] for name in choose.sample(sorted(several), number)}
    )


class Twins:
    """R requests of mixed parameters over V tokens, in two `SamplingRows`: one for each path."""

    def __init__(self, R: int, V: int, dtype: torch.dtype, seed: int):
        choose = random.Random(seed)
        # some rows are flat, some steep; bf16 has many ties
        logits = (randn(R, V, seed=seed) * tensor([[0.3], [1.0], [3.0]]).repeat(R, 1)[:R]).to(dtype)
        self.V, self.rows, self.requests = V, [SamplingRows(R, V, DEVICE) for _ in range(2)], []
        for row in range(R):
            likely = (
                logits[row].topk(min(V, 4)).indices.tolist()
            )  # what a penalty or a ban must change
            prompt, generated = (choose.choices(likely, k=choose.randrange(5)) for _ in range(2))
            key, stops = choose.getrandbits(64) - 2**63, (likely[0], V - 1, V + 7)
            request = Row(
                row, random_params(choose, V, likely), key, row % 3, prompt, generated, stops
            )
            self.requests.append((request, choose.choice(TEMPERATURES)))
        for rows in self.rows:
            rows.fill(*(request for request, _ in self.requests))
            rows.floats.temperature[:] = tensor([temperature for _, temperature in self.requests])
        self.places = choose.sample(range(R), R)
        self.logits = logits[self.places]
        requests = [self.requests[i][0] for i in self.places]
        self.positions = [len(r.prompt_tokens) + len(r.generated_tokens) for r in requests]

    def possible(self, i: int) -> set[int]:
        """The tokens that place i of the batch may get."""
        request, temperature = self.requests[self.places[i]]
        _, params, seed, choice, prompt, generated, stops = request
        texts = {"prompt": prompt, "generated": generated, "stops": stops}
        keys = {"seed": seed, "choice": choice, "temperature": temperature}
        return possible_tokens(self.logits[i], params, self.positions[i], **keys, **texts)

    def check(self):
        """
        Both paths choose possible tokens, so they differ in proven ties alone; and they remember
        and count them.
        """
        places, positions = tensor(self.places), tensor(self.positions)
        picked = [
            pick(self.logits, places, positions, rows)
            for pick, rows in zip(
                (sampling.sample_torch, sampling_kernels.sample_triton), self.rows, strict=True
            )
        ]
        for i, pair in enumerate(zip(*(tokens.tolist() for tokens in picked), strict=True)):
            possible = self.possible(i)
            assert possible.issuperset(pair), (
                f"torch {pair[0]}, triton {pair[1]}, in float64 {possible}: {self.told(i)}"
            )
        for rows, tokens in zip(self.rows, picked, strict=True):
            self.check_memory(rows, tokens.tolist())

    def check_memory(self, rows: SamplingRows, tokens: list[int]):
        assert rows.last_token[self.places].tolist() == [max(token, 0) for token in tokens]
        for place, token in zip(self.places, tokens, strict=True):
            request, _ = self.requests[place]
            if request.params.penalises:
                generated = [*request.generated_tokens, *([token] if token >= 0 else [])]
                count = torch.tensor(generated, dtype=torch.int64).bincount(minlength=self.V)
                assert torch.equal(rows.marks[place].cpu() >> 2, count), f"{request} got {token}"

    def told(self, i: int) -> str:
        request, temperature = self.requests[self.places[i]]
        return f"place {i}, temperature {temperature}, {request}"


@sampling_kernels.jit
def scores_kernel(
    logits, rows, positions, floats, ints, bias, marks, scores, stride, V, WIDTH: tl.constexpr
):
    """Grid (R,): what the kernels of a row work with, [R, V]."""
    r, t = tl.program_id(0), tl.arange(0, WIDTH)
    view = sampling_kernels.row_view(
        r, logits, rows, positions, floats, ints, bias, marks, stride, V
    )
    tl.store(scores + r * V + t, sampling_kernels.load_adjusted(view, t), mask=t < V)


def scores_triton(logits, rows, positions, params: SamplingRows) -> torch.Tensor:
    """As `sampling.adjust`."""
    R, V = logits.shape
    scores = torch.full((R, V), torch.nan, device=DEVICE)
    arrays = params.packed_floats, params.packed_ints, params.bias, params.marks
    scores_kernel[(R,)](logits, rows, positions, *arrays, scores, logits.stride(0), V, WIDTH=64)
    return scores


@pytest.mark.parametrize(
    "adjust",
    [sampling.adjust, pytest.param(scores_triton, marks=needs_triton)],
    ids=["torch", "triton"],
)
def test_every_logit_is_adjusted_by_the_rules(adjust):
    """A token tells of a wrong penalty only where it decides; here every number is looked at."""
    twins = Twins(48, 41, torch.float32, seed=3)
    places, positions = tensor(twins.places), tensor(twins.positions)
    found = adjust(twins.logits, places, positions, twins.rows[0]).cpu().double()
    for i, place in enumerate(twins.places):
        _, params, _, _, prompt, generated, stops = twins.requests[place][0]
        exact = oracle.adjusted(twins.logits[i], params, prompt, generated, stops)
        torch.testing.assert_close(found[i], exact, rtol=1e-6, atol=2e-6)


@needs_triton
def test_a_tile_has_noise_wherever_the_filters_keep_a_token(monkeypatch):
    """
    Noise is most of the work, and is left out where a tile has no such token. Four tokens share a
    counter: here only the first of each four is kept, or the second ..; and their logits differ
    little, but by a low temperature.
    """
    shrink_tiles(monkeypatch, width=64, quads=8)
    params = [
        SamplingParams(top_k=16, seed=i, temperature=[0.2, 1.0][i // 4 % 2]) for i in range(12)
    ]
    rows, places, logits = (
        rows_of(params, vocab_size=64),
        torch.arange(12, device=DEVICE),
        0.2 * randn(12, 64, seed=8),
    )
    for i in range(12):
        logits[i, i % 4 :: 4] += 5
    for i, token in enumerate(
        sampling_kernels.sample_triton(logits, places, places + 5, rows).tolist()
    ):
        assert token in possible_tokens(logits[i], params[i], i + 5)


def shrink_tiles(monkeypatch, width: int, quads: int):
    """So that a row has several tiles and a small batch several programs for each."""
    monkeypatch.setattr(sampling_kernels, "THRESHOLD_WIDTH", width)
    monkeypatch.setattr(sampling_kernels, "QUADS", quads)


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("R", "V", "dtype", "width", "quads"),
    [
        (12, 2, torch.float32, 2048, 256),
        (12, 5, torch.bfloat16, 2048, 256),
        (24, 127, torch.float32, 64, 16),
        (20, 1000, torch.bfloat16, 512, 128),
        (12, 301, torch.float16, 128, 32),
    ],
)
def test_both_paths_choose_alike(monkeypatch, R, V, dtype, width, quads):
    """
    Whatever is mixed, in any order of rows: each path's token is the one that float64 finds. Where
    that has several, because rounding decides, they may differ. min_p or top_p applied as if every
    temperature were 1 changed a third of the tokens at 1.7, and one row in sixteen was allowed to
    differ without a reason.
    """
    shrink_tiles(monkeypatch, width, quads)
    before = oracle.counts.copy()
    for seed in range(2 if V < 100 else 1):
        Twins(R, V, dtype, seed).check()
    new = oracle.counts - before
    assert new["ties"] <= new["tokens"] / 4, f"{new}: what is compared must be decided"


@pytest.mark.slow
@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_both_paths_choose_alike_at_length():
    """The same with the tiles of a GPU, vocabularies up to GPT-2's, and many more mixtures."""
    before, rows_of_each = (
        oracle.counts.copy(),
        160 if DEVICE == "cuda" else 3,
    )  # the interpreter takes a second a row
    for R, V in (1, 50257), (3, 50257), (40, 1000), (7, 4099), (64, 127), (200, 5), (200, 2):
        for dtype in torch.float32, torch.bfloat16:
            for seed in range(-(-rows_of_each // R)):
                Twins(R, V, dtype, 100 + seed).check()
    print(f"{oracle.counts - before}: 0 differences that are no ties")


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs and their streams")
def test_a_cuda_graph_serves_whatever_is_asked_later():
    """
    A decision on the host, a synchronisation or a new tensor for a row is frozen into the graph, or
    breaks it.
    """
    V, asked = 50257, list(ADJUSTED.values())
    rows, places = SamplingRows(len(asked), V, DEVICE), torch.arange(len(asked), device=DEVICE)
    logits, positions = randn(len(asked), V, seed=7).bfloat16(), places + 9
    for row in places.tolist():
        rows.fill(Row(row, GREEDY, 0, 0))
    sampling_kernels.sample_triton(logits, places, positions, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampling_kernels.sample_triton(logits, places, positions, rows)
    for i, drawn in enumerate(
        [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9}]
    ):
        other = SamplingRows(len(asked), V, DEVICE)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for each in rows, other:
                for row, p in enumerate(asked):
                    each.fill(Row(row, replace(p, **drawn), row, i, [1, 2, 3], [4] * i, STOPS))
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = sampling.sample_torch(logits, places, positions, other)
        assert (tokens != expected).sum() <= 1
        assert i == 0 or len(set(tokens.tolist())) > 3


# --------------------------------------------------------------------------------------------------
# Log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(dtype, n):
    """
    Those of the tempered or penalised distribution, or of ranks that moved, are not what the API
    promises.
    """
    logits, tokens = (3 * randn(4, 40, seed=6)).to(dtype), tensor([0, 39, 7, 7])
    chosen, ids, top = sampling.logprobs(logits, tokens, n)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), expected[range(4), tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        top.double(), expected.sort(descending=True).values[:, :n], atol=1e-5, rtol=0
    )
    assert ids.shape == (4, n) and torch.equal(
        expected.gather(1, ids), expected.sort(descending=True).values[:, :n]
    )


def test_logprobs_are_finite_whatever_the_logits():
    """
    No JSON has an infinity; a row that went wrong has no token, and must not break the others'.
    """
    logits = torch.zeros(4, 6, device=DEVICE)
    logits[0, 2], logits[1, :], logits[2, 3] = -torch.inf, torch.nan, torch.inf
    chosen, ids, top = sampling.logprobs(logits, tensor([2, NO_TOKEN, NO_TOKEN, 5]), 20)
    assert (
        chosen[0] == LOWEST_LOGPROB == top.min()
        and chosen.isfinite().all()
        and top.isfinite().all()
    )
    assert chosen[3].item() == pytest.approx(-math.log(6)) and ids.shape == (4, 6)


# --------------------------------------------------------------------------------------------------
# SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", x) for x in (1, 2, 2.0)),
        *(("top_k", x) for x in (0, 2**31 - 1)),
        *(("top_p", x) for x in (1, 1.0)),
        *(("min_p", x) for x in (0, 0.0)),
        *(("max_tokens", x) for x in (1, 10**9)),
        *(("stop_token_ids", x) for x in ((), [], (1, 2), [0])),
        *(("ignore_eos", x) for x in (False, True)),
        *(("seed", x) for x in (None, 0, -1, 2**63 - 1, -(2**63))),
        *(("presence_penalty", x) for x in (-2, 2, 0.0)),
        *(("frequency_penalty", x) for x in (0, 0.0)),
        *(("repetition_penalty", x) for x in (1, 1.5, 2)),
        *(("min_tokens", x) for x in (0, 16)),
        *(("logit_bias", x) for x in (None, {}, {12: 3, 0: -2.0})),
        *(("logprobs", x) for x in (None, 0, 20)),
    ],
)
def test_parameters_exactly_at_their_limits_are_accepted(name, value):
    """
    The edge's other side: what is accepted must also reach the device arrays, and here drop no
    token.
    """
    params = SamplingParams(**{name: value})
    rows, positions = rows_of([params]), torch.arange(5000, device=DEVICE)
    tokens = sample(LOGITS.expand(5000, -1), 0 * positions, positions, rows, [params])
    assert set(tokens.tolist()) == set(range(V))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 0.0),
        ("temperature", 1e-300),
        ("top_k", 1),
        ("top_p", 1e-300),
        ("min_p", 1),
    ],
)
def test_parameters_that_leave_only_the_most_likely_token(name, value):
    """
    A top_p of 1e-300 is 0 in fp32: the filter alone would drop all tokens, and answer token 0.
    """
    params = SamplingParams(**{name: value})
    rows, positions = rows_of([params]), torch.arange(100, device=DEVICE)
    tokens = sample(LOGITS.flip(0).expand(100, -1), 0 * positions, positions, rows, [params])
    assert set(tokens.tolist()) == {V - 1}
