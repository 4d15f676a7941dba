"""
Sampling: the noise word for word, the frequencies against the softmax, the filters against a naive reference.

Everything here is seeded, so a check of frequencies passes always or never. That it can fail is shown beside it: the
same counts are held against the distribution of a wrong sampler.
"""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sampling
from sampling import GREEDY, SamplingParams, SamplingRows, drop_unlikely, gumbel_noise, philox, sample

# ----------------------------------------------------------------------------------------------------------------------
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
    """Another generator would be random too, but other backends and other readers could not repeat its tokens."""
    assert philox_in_integers(counter, key) == answer
    assert philox_in_torch(counter, key) == answer


WORD = st.integers(0, ONES)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_philox_equals_integer_arithmetic(counter, key):
    """A product of two 32-bit words fills int64 up to the sign bit: a shift that drags the sign along is wrong."""
    assert philox_in_torch(counter, key) == philox_in_integers(counter, key)


def expected_noise(seed: int, position: int, choice: int, V: int) -> list[float]:
    """DESIGN's rule, in Python's own numbers."""
    noise = []
    for t in range(V):
        words = philox_in_integers((t // 4, position, choice, 0), (seed % 2**32, (seed >> 32) % 2**32))
        u = ((words[t % 4] >> 9) + 0.5) * 2.0**-23
        noise.append(-math.log(-math.log(u)))
    return noise


SEEDS = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), -(2**31), 0x123456789ABCDEF]


def noise(seeds, positions, choices, V):
    return gumbel_noise(torch.tensor(seeds), torch.tensor(positions), torch.tensor(choices), V)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_function_that_design_states(seed):
    """Key: all 64 bits of the seed, also of a negative one. Counter: (token // 4, position, choice, 0)."""
    found = noise([seed], [7], [3], 10)[0].tolist()
    assert found == pytest.approx(expected_noise(seed, 7, 3, 10), rel=1e-5, abs=1e-6)


def test_every_part_of_seed_position_and_choice_gives_other_noise():
    """A seed cut to 32 bits, or a choice left out, gives two requests the same tokens."""
    keys = [(seed, position, choice) for seed in SEEDS for position in (0, 1, 1023) for choice in (0, 1, 5)]
    rows = noise(*([key[i] for key in keys] for i in range(3)), 8)
    assert len({tuple(row) for row in rows.tolist()}) == len(keys)
    assert len(set(noise([1], [2], [3], 1000)[0].tolist())) >= 995  # 23 bits: hardly two tokens alike


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
    """Four tokens share a counter, so a vocabulary that 4 does not divide must only cut off words."""
    longest = noise([5], [6], [0], 12)
    for V in 1, 2, 3, 4, 5, 11:
        assert torch.equal(noise([5], [6], [0], V), longest[:, :V])


@pytest.mark.parametrize(("word", "u"), [(0, 2.0**-24), (ONES, 1 - 2.0**-24)])
def test_noise_is_finite_at_both_ends(monkeypatch, word, u):
    """A u of 0 or 1 is infinite noise: once in some million tokens, a token of probability zero."""
    monkeypatch.setattr(sampling, "philox", lambda counter, key: (torch.full((1, 1), word),) * 4)
    assert noise([0], [0], [0], 1).item() == pytest.approx(-math.log(-math.log(u)), rel=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Frequencies

N, V = 20_000, 13
LOGITS = torch.tensor([2.0, 1.5, 1.5, 1.0, 0.7, 0.3, 0.0, -0.4, -0.5, -1.0, -1.0, -2.0, -3.0])


def rows_of(params: list[SamplingParams], choice: int = 0) -> SamplingRows:
    rows = SamplingRows(len(params), vocab_size, DEVICE)
    for row, p in enumerate(params):
        rows.set(row, p, p.seed or 0, choice)
    return rows


def draw(params: SamplingParams, seeds: torch.Tensor, positions: torch.Tensor, logits=LOGITS) -> torch.Tensor:
    """One token for each pair of seed and position, all with the same logits and parameters."""
    rows = SamplingRows(len(seeds), logits.shape[-1], DEVICE)
    for name in "temperature", "top_k", "top_p", "min_p":
        getattr(rows, name)[:] = getattr(params, name)
    rows.seed[:] = seeds
    return sample(logits.expand(len(seeds), -1), torch.arange(len(seeds)), positions, rows, [params])


def probabilities(logits, params: SamplingParams) -> list[float]:
    """What a token's frequency should be: the rule of `SamplingParams`, naively and in Python's numbers."""
    scores = [float(x) / params.temperature for x in logits]
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    if params.top_k:
        order = order[: params.top_k]
    weights = {t: math.exp(scores[t] - scores[order[0]]) for t in order}
    total, kept, mass = sum(weights.values()), [], 0.0
    for t in order:
        if not kept or mass < params.top_p:
            kept.append(t)
        mass += weights[t] / total
    kept = [t for t in kept if weights[t] >= params.min_p * weights[order[0]]]
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(scores))]


def critical_value(df: int) -> float:
    """
    Of chi-square at the level 0.001, by Wilson and Hilferty (1931): df (1 - 2 / (9 df) + z sqrt(2 / (9 df)))^3, where
    z = 3.09 is the normal distribution's own. Within 2% of the tables from 3 degrees of freedom on, 3% too large for 1.
    """
    return df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3


def fits(tokens: torch.Tensor, expected: list[float]) -> bool:
    """Pearson's chi-square; tokens expected fewer than 5 times count as one. What should never come must never come."""
    n, counts = len(tokens), torch.bincount(tokens, minlength=len(expected)).tolist()
    if any(count > 0 and p == 0 for count, p in zip(counts, expected, strict=True)):
        return False
    bins = [(count, n * p) for count, p in zip(counts, expected, strict=True) if n * p >= 5]
    rare = [(count, n * p) for count, p in zip(counts, expected, strict=True) if 0 < n * p < 5]
    if rare:
        bins.append(tuple(map(sum, zip(*rare, strict=True))))
    return sum((count - wanted) ** 2 / wanted for count, wanted in bins) < critical_value(max(1, len(bins) - 1))


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
    """Noise that is not Gumbel, a temperature applied twice, a filter in the wrong order, seeds that are correlated."""
    params, many, one = CASES[name], torch.arange(N), torch.full((N,), 11)
    tokens = draw(params, many, one) if over == "seeds" else draw(params, one, many)
    assert fits(tokens, probabilities(LOGITS, params))
    for other in CASES:  # and the check can tell: no other case's distribution fits
        if other != name:
            assert not fits(tokens, probabilities(LOGITS, CASES[other])), f"{name} passes for {other}"


@pytest.mark.parametrize("over", ["seeds", "positions", "choices"])
def test_neighbours_are_independent(over):
    """Counters that overlap give the next position, seed or fork the noise of this one, moved by some tokens."""
    logits, n = torch.tensor([0.5, 0.0, -0.3, 0.2]), torch.arange(N)
    one, zero = torch.full((N,), 11), torch.zeros(N, dtype=torch.int64)
    first = {"seeds": (n, one, zero), "positions": (one, n, zero), "choices": (n, one, zero)}[over]
    step = {"seeds": (1, 0, 0), "positions": (0, 1, 0), "choices": (0, 0, 1)}[over]
    a, b = (
        (logits + gumbel_noise(*(x + k * dx for x, dx in zip(first, step, strict=True)), 4)).argmax(-1) for k in (0, 1)
    )
    p = probabilities(logits, ALL)
    pairs = [x * y for x in p for y in p]
    assert fits(4 * a + b, pairs)
    assert not fits(4 * a + a, pairs)


def test_draws_of_a_text_use_all_words_alike():
    """With one of Philox's four words used for four tokens, they would always come with the same noise."""
    rows = gumbel_noise(torch.arange(N), torch.zeros(N, dtype=torch.int64), torch.zeros(N, dtype=torch.int64), 8)
    assert fits(rows.argmax(-1), [1 / 8] * 8)
    correlation = torch.corrcoef(rows.T) - torch.eye(8)
    assert correlation.abs().max() < 4 / math.sqrt(N)


# ----------------------------------------------------------------------------------------------------------------------
# The filters


def kept_by(scores, top_k, top_p, min_p) -> list[set[int]]:
    kept = drop_unlikely(torch.tensor(scores), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))
    return [{t for t, x in enumerate(row) if x > -math.inf} for row in kept.tolist()]


ROW = st.tuples(
    st.lists(st.integers(-8, 8), min_size=9, max_size=9),  # few values: ties are the rule
    st.integers(0, 11),
    st.sampled_from([1e-6, 0.1, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99, 1.0]),
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5))
def test_filters_equal_a_naive_reference_row_by_row(rows):
    """A filter that uses the wrong row's k, drops one token too many or too few, or breaks ties by chance."""
    scores, top_k, top_p, min_p = ([row[i] for row in rows] for i in range(4))
    scores = [[x / 4 for x in row] for row in scores]
    found = kept_by(scores, top_k, top_p, min_p)
    for i, row in enumerate(rows):
        params = SamplingParams(top_k=row[1], top_p=row[2], min_p=row[3])
        for eps in -1e-5, 1e-5:  # where fp32 and Python may round to different sides, either is right
            if params.top_p < 1:
                near = SamplingParams(top_k=row[1], top_p=row[2] + eps if row[2] > 1e-5 else row[2], min_p=row[3])
                assume(probabilities(scores[i], near) == probabilities(scores[i], params))
        assert found[i] == {t for t, p in enumerate(probabilities(scores[i], params)) if p > 0}


def test_filters_at_their_edges():
    """One token more or less than asked for."""
    tie = [[1.0, 2.0, 2.0, 1.0]]
    assert kept_by(tie, [1], [1.0], [0.0]) == [{1}]
    assert kept_by(tie, [2], [1.0], [0.0]) == [{1, 2}]
    assert kept_by(tie, [3], [1.0], [0.0]) == [{0, 1, 2}]
    assert kept_by(tie, [4], [1.0], [0.0]) == kept_by(tie, [0], [1.0], [0.0]) == [{0, 1, 2, 3}]
    even = [[0.0, 0.0, 0.0, 0.0]]  # a quarter each, exactly
    assert kept_by(even, [0], [0.25], [0.0]) == [{0}]
    assert kept_by(even, [0], [0.26], [0.0]) == [{0, 1}]
    assert kept_by(even, [0], [0.5], [0.0]) == [{0, 1}]
    assert kept_by(even, [2], [0.5], [0.0]) == [{0}]  # top_p counts what top_k has left
    assert kept_by(tie, [0], [1.0], [1.0]) == [{1, 2}]
    assert kept_by(tie, [0], [1.0], [math.exp(-1) - 1e-3]) == [{0, 1, 2, 3}]
    assert kept_by(tie, [0], [1.0], [math.exp(-1) + 1e-3]) == [{1, 2}]


def test_no_filter_keeps_every_token():
    """
    In fp32 the sum over 50,000 tokens reaches 1 before the last of them: a request with top_p 1 lost its rarest tokens
    as soon as another one in its batch asked for a filter, so its answer depended on its neighbours.
    """
    scores = 4 * torch.randn(4, 50_257, generator=torch.Generator().manual_seed(0))
    before = scores.double().softmax(-1).float().sort(descending=True).values.cumsum(-1)
    assert (before >= 1).any()  # or this test shows nothing
    zero = torch.zeros(4)
    assert torch.equal(drop_unlikely(scores, zero.long(), torch.ones(4), zero), scores)


# ----------------------------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("chosen", [range(8), [7, 2, 5, 0, 3], [1, 2], [0, 6], [6, 1], [3, 3, 3]])
def test_a_mixed_batch_equals_each_request_alone(chosen):
    """Parameters by batch position instead of by row, a filter or a temperature that spills over to a neighbour."""
    logits = 3 * torch.randn(40, 8, 101, generator=torch.Generator().manual_seed(1))
    rows, chosen = rows_of(MIXED), list(chosen)
    for position in range(40):
        asked, at = [MIXED[i] for i in chosen], torch.tensor([position])
        together = sample(logits[position][chosen], torch.tensor(chosen), at.repeat(len(chosen)), rows, asked)
        alone = [
            sample(logits[position][i : i + 1], torch.tensor([0]), at, rows_of([p]), [p])
            for i, p in zip(chosen, asked, strict=True)
        ]
        assert together.tolist() == torch.cat(alone).tolist()
        for i, token in zip(chosen, together.tolist(), strict=True):
            if MIXED[i].temperature == 0:
                assert token == logits[position][i].argmax()


def test_the_choice_index_of_a_row_reaches_the_noise():
    """Forks of one request with one seed would all continue alike."""
    logits, position = torch.zeros(1, 1000), torch.tensor([3])
    tokens = [sample(logits, torch.tensor([0]), position, rows_of([ALL], choice), [ALL]).item() for choice in range(5)]
    assert len(set(tokens)) == 5


@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-40, 1e-38, 1e-6])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_hardly_any_temperature_means_the_most_likely_token(temperature, top_p):
    """Divided by 1e-40, all positive logits are infinite, and the first of them won."""
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
    logits = torch.tensor([[1.0, 5.0, 3.0, -2.0]])
    assert sample(logits, torch.tensor([0]), torch.tensor([0]), rows_of([params]), [params]).tolist() == [1]


def test_half_precision_logits_are_sampled_in_single():
    """Gumbel noise rounded to bf16 ties half of the vocabulary."""
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    params = [SamplingParams(seed=i) for i in range(5)]
    rows, places, positions = rows_of(params), torch.arange(5), torch.arange(5)
    expected = logits.double() + torch.tensor([expected_noise(i, i, 0, 64) for i in range(5)])
    assert sample(logits, places, positions, rows, params).tolist() == expected.argmax(-1).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# SamplingParams


NAN, INF = math.nan, math.inf
REFUSED = [
    *(("temperature", x, "a number from 0 (greedy) to 2") for x in (-0.1, 2.1, NAN, INF, -INF, True, "1", None, [1])),
    *(("top_k", x, "a whole number, 0 for all tokens") for x in (-1, 2**31, 1.0, NAN, True, "5", None)),
    *(("top_p", x, "a number above 0, up to 1") for x in (0, 0.0, -0.5, 1.01, NAN, INF, True, "0.5", None)),
    *(("min_p", x, "a number from 0 to 1") for x in (-0.01, 1.01, NAN, INF, False, "0", None)),
    *(("max_tokens", x, "a whole number, at least 1") for x in (0, -1, 1.5, NAN, INF, True, "16", None)),
    *(("stop_token_ids", x, "a tuple of token ids") for x in (None, 5, "abc", (1.5,), [True], ([1],))),
    *(("ignore_eos", x, "True or False") for x in (None, 1, "yes")),
    *(("seed", x, "a whole number of 64 bits, or None") for x in (2**63, -(2**63) - 1, 1.0, NAN, True, "0")),
]


@pytest.mark.parametrize(("name", "value", "wanted"), REFUSED)
def test_a_wrong_parameter_is_refused_with_its_name_its_value_and_what_is_wanted(name, value, wanted):
    """NaN passes `x < 0 or x > 2`, True is an int to Python, "1" fails only on the device, in everybody's step,
    and a stop token that is a character never stops anything."""
    with pytest.raises(ValueError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; it must be {wanted}"


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
    ],
)
def test_parameters_exactly_at_their_limits_are_accepted(name, value):
    """The edge's other side: what is accepted must also reach the device arrays, and here drop no token."""
    params = SamplingParams(**{name: value})
    rows, positions = rows_of([params]), torch.arange(5000)
    tokens = sample(LOGITS.expand(5000, -1), 0 * positions, positions, rows, [params])
    assert set(tokens.tolist()) == set(range(V))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 0.0), ("temperature", 1e-300), ("top_k", 1), ("top_p", 1e-300), ("min_p", 1)],
)
def test_parameters_that_leave_only_the_most_likely_token(name, value):
    """A top_p of 1e-300 is 0 in fp32: the filter alone would drop all tokens, and answer token 0."""
    params = SamplingParams(**{name: value})
    rows, positions = rows_of([params]), torch.arange(100)
    tokens = sample(LOGITS.flip(0).expand(100, -1), 0 * positions, positions, rows, [params])
    assert set(tokens.tolist()) == {V - 1}
