"""
Sampling: the noise word for word, the frequencies against the softmax, the filters and the tokens
against the float64 rules of oracle.py.

Everything here is seeded, so a check of frequencies passes always or never. That it can fail is
shown beside it: the same counts are held against the distribution of a wrong sampler.
"""

import json
import math
import random
import re
import tomllib
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import oracle
import pytest
import torch
from oracle import possible_tokens
from torch import Tensor

from ops import sampling, sampling_kernels
from ops.sampling import SamplingRow, SamplingRows, gumbel_noise, philox
from ops.sampling_kernels import gumbel, philox_words, sample_triton, tl, triton
from params import GREEDY, LOWEST_LOGPROB, NO_TOKEN, SamplingParams

# On a GPU every test here runs there, the kernels compiled; elsewhere Triton's interpreter runs
# them on CPU tensors.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
needs_triton = pytest.mark.skipif(triton is None, reason="needs triton")
sample = sample_triton if DEVICE == "cuda" else sampling.sample_torch


def both(name: str, of_torch, of_triton):
    """A test of two functions that do the same."""
    paths = [pytest.param(of_torch, id="torch")]
    paths.append(pytest.param(of_triton, id="triton", marks=needs_triton))
    return pytest.mark.parametrize(name, paths)


both_paths = both("pick", sampling.sample_torch, sample_triton)
no_warning = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
tensor = partial(torch.tensor, device=DEVICE)
arange = partial(torch.arange, device=DEVICE)


def randn(*shape: int, seed: int) -> Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def filled(V: int, requests: list[SamplingRow]) -> SamplingRows:
    rows = SamplingRows(len(requests), V, DEVICE)
    rows.fill(*requests)
    return rows


def rows_of(params: list[SamplingParams], V: int) -> SamplingRows:
    requests = [SamplingRow(row, p, p.seed or 0) for row, p in enumerate(params)]
    return filled(V, requests)


def tokens_of(pick, logits: Tensor, params: list[SamplingParams]) -> list[int]:
    """Of logits [R, V], row i at position i."""
    R, V = logits.shape
    return pick(logits, arange(R), arange(R), rows_of(params, V), params).tolist()


def shrink_tiles(monkeypatch, width: int, quads: int):
    """So that a row has several tiles and a small batch several programs for each."""
    monkeypatch.setattr(sampling_kernels, "THRESHOLD_WIDTH", width)
    monkeypatch.setattr(sampling_kernels, "QUADS", quads)


# --------------------------------------------------------------------------------------------------
# Noise

ONES = 0xFFFFFFFF
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
# counter and key; answer: those of Random123, the authors' own library
ANSWERS = {
    (0,) * 6: [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    (ONES,) * 6: [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    (*PI,): [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
}
SEEDS = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), -(2**31), 0x123456789ABCDEF]
POSITIONS = [7, 5, 9, 0, 100, 3, 2**31, 2**32 - 1]
CHOICES = [3, 1, 0, 0, 2, 0, 5, 1]


@pytest.mark.parametrize("words", ANSWERS)
def test_philox_gives_the_known_answers(words):
    """
    Another generator would be random too, but other backends and other readers could not repeat its
    tokens.
    """
    *counter, low, high = torch.tensor(words)[:, None]
    assert torch.stack(philox(counter, (low, high)))[:, 0].tolist() == ANSWERS[words]


def test_noise_is_the_function_that_design_states():
    """
    Key: all 64 bits of the seed, also of a negative one. Counter: (token // 4, position, choice,
    0), whatever the batch row. A vocabulary that 4 does not divide only cuts off words.
    """
    keys = list(zip(SEEDS, POSITIONS, CHOICES, strict=True))
    for V in 1, 2, 3, 4, 13:
        noise = gumbel_noise(tensor(SEEDS), tensor(POSITIONS), tensor(CHOICES), V)
        expected = torch.stack([oracle.noise(*key, V) for key in keys])
        torch.testing.assert_close(noise.cpu().double(), expected, rtol=1e-5, atol=1e-6)
        for row, key in zip(noise, keys, strict=True):
            alone = gumbel_noise(*tensor(key)[:, None], V)
            assert torch.equal(alone[0], row)


@pytest.mark.parametrize(("word", "u"), [(0, 2.0**-24), (ONES, 1 - 2.0**-24)])
def test_noise_is_finite_at_both_ends(monkeypatch, word, u):
    """A u of 0 or 1 is infinite noise: once in some million tokens, a token of probability zero."""
    words = (torch.full((1, 1), word),) * 4
    monkeypatch.setattr(sampling, "philox", lambda counter, key: words)
    noise = gumbel_noise(*tensor([[0], [0], [0]]), 1)
    assert noise.item() == pytest.approx(-math.log(-math.log(u)), rel=1e-6)


@sampling_kernels.jit
def noise_kernel(seeds, positions, choices, noise, QUADS: tl.constexpr):
    """Grid (R,): noise [R, 4 * QUADS], as gumbel_max_kernel has it."""
    r = tl.program_id(0)
    quad = tl.arange(0, QUADS)
    position = tl.load(positions + r)
    choice = tl.load(choices + r)
    words = philox_words(tl.load(seeds + r), quad, position, choice)
    at = noise + r * 4 * QUADS + 4 * quad
    for i in tl.static_range(4):
        tl.store(at + i, gumbel(words[i]))


@needs_triton
def test_both_paths_have_the_same_noise():
    """
    A signed shift, a seed cut to 32 bits, positions and choices swapped: other tokens on a GPU than
    on a CPU.
    """
    keys = tensor(SEEDS), tensor(POSITIONS), tensor(CHOICES)
    noise = torch.zeros(8, 32, device=DEVICE)
    noise_kernel[(8,)](*keys, noise, QUADS=8)
    # rounding, and the chip's own logarithm
    torch.testing.assert_close(noise, gumbel_noise(*keys, 32), rtol=3e-6, atol=3e-6)


# --------------------------------------------------------------------------------------------------
# Frequencies

N = 20_000
LOGITS = tensor([2.0, 1.5, 1.5, 1.0, 0.7, 0.3, 0.0, -0.4, -0.5, -1.0, -1.0, -2.0, -3.0])
V = len(LOGITS)
# chi-square at the level 0.001, from the tables: degrees of freedom -> the most that fits
CRITICAL = {2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458, 7: 24.322, 12: 32.909}
CASES = tomllib.loads("""
plain = {}
cold = {temperature = 0.6}
hot = {temperature = 1.7}
top_k = {top_k = 4}
"top_k in a tie" = {top_k = 2}
top_p = {top_p = 0.8}
min_p = {min_p = 0.1}
"all of them" = {temperature = 1.4, top_k = 8, top_p = 0.9, min_p = 0.15}
""")
CASES = {name: SamplingParams(**fields) for name, fields in CASES.items()}


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """
    Pearson's, of counts against probabilities, as a share of what fits; infinite if a token is
    chosen that has none.
    """
    expected = len(tokens) * probabilities.cpu()
    counts = tokens.cpu().bincount(minlength=len(expected))
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    terms = (counts - expected) ** 2 / expected
    return terms[possible].sum().item() / CRITICAL[possible.sum().item() - 1]


def fits(tokens: Tensor, params: SamplingParams) -> bool:
    """Against the rule of `SamplingParams`."""
    scores = LOGITS.double().cpu() / params.temperature
    kept, _ = oracle.kept_tokens(scores, params, 1e-6)
    probabilities = scores.where(kept, -torch.inf).softmax(0)
    return chi_square(tokens, probabilities) < 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_frequencies_are_those_of_the_softmax(name, over):
    """
    Noise that is not Gumbel, a temperature applied twice, a filter in the wrong order, seeds that
    are correlated. The check can tell: no other case's distribution fits.
    """
    params = CASES[name]
    requests = rows_of([params] * N, V)
    constant = torch.full((N,), 11, device=DEVICE)
    requests.ints.seed[:] = arange(N) if over == "seeds" else constant
    positions = arange(N) if over == "positions" else constant
    tokens = sample(LOGITS.expand(N, -1), arange(N), positions, requests, [params])
    assert [other for other in CASES if fits(tokens, CASES[other])] == [name]


# --------------------------------------------------------------------------------------------------
# The filters


def threshold_triton(scores, top_k, top_p, min_p) -> Tensor:
    """
    As `sampling.threshold`, from the kernel, in several tiles a row. The kernel finds it among
    scores that are still to be divided by their row's temperature: powers of two here, so that
    nothing is rounded.
    """
    R, V = scores.shape
    rows = arange(R)
    width = 16 if V < 100 else 128
    params = SamplingRows(R, V, DEVICE)
    params.ints.top_k[:] = top_k
    params.floats.top_p[:] = top_p
    params.floats.min_p[:] = min_p
    temperature = params.floats.temperature
    temperature[:] = tensor([2.0, 1.0, 0.5]).repeat(R)[:R]
    scores = scores * temperature[:, None]
    thresholds, finished = torch.full((2, R), torch.nan, device=DEVICE)
    scratch = torch.full((R, V + width), torch.nan, device=DEVICE)
    of_rows = (params.packed_floats, params.packed_ints, params.bias, params.marks)
    arrays = (scores, rows, rows, *of_rows, thresholds, finished, scratch)
    strides = (scores.stride(0), scratch.stride(0))
    sampling_kernels.threshold_kernel[(R,)](*arrays, *strides, V, PDL=False, WIDTH=width)
    return thresholds / temperature


both_thresholds = both("threshold", sampling.threshold, threshold_triton)


@both_thresholds
@pytest.mark.parametrize("V", [1, 9, 37, 300])
def test_filters_equal_the_oracle_row_by_row(threshold, V):
    """
    A filter that uses the wrong row's k, drops one token too many or too few, or tears a tie apart;
    bounds that hold for a handful of scores only: a flat or a steep row, an outlier.
    """
    R = 40
    draw = partial(random.Random(V).choices, k=R)
    top_k = draw([0, 0, 1, 2, 5, 50, V - 1, V, V + 3])
    top_p = draw([1e-30, 1e-6, 0.1, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0, 1.0])
    min_p = draw([0.0, 0.0, 0.0, 0.01, 0.1, 0.5, 0.99, 1.0])
    scores = randn(R, V, seed=V)
    scores[::4] = scores[::4].mul(2).round() / 2  # many ties
    scores[1::4] *= 8
    scores[2::4] *= 1e-3
    scores[5::12, V // 2] = 1e30
    scores[6::12, V // 3] = -1e30
    scores[::7, : V // 2] = -torch.inf  # as of forbidden tokens
    least = threshold(scores, tensor(top_k), tensor(top_p), tensor(min_p))
    kept = (scores >= least[:, None]).cpu()
    for row, stays, *numbers in zip(scores.cpu().double(), kept, top_k, top_p, min_p, strict=True):
        p = SamplingParams(1.0, *numbers)
        surely, maybe = oracle.kept_tokens(row, p, 1e-6)
        assert (stays | ~surely).all(), (p, row)
        assert (surely | maybe | ~stays | row.isinf()).all(), (p, row)


@both_thresholds
def test_top_k_counts_tokens_that_are_allowed(threshold):
    """
    Twelve tokens in three of sixteen lanes of the kernel. Would catch: a bound by the best scores
    of lanes of which most have none.
    """
    allowed = torch.arange(64) % 16 < 3
    scores = torch.where(allowed, torch.arange(64.0), -torch.inf)[None].to(DEVICE)
    for k in range(1, 13):
        least = threshold(scores, tensor([k]), tensor([1.0]), tensor([0.0]))
        assert int((scores >= least[:, None]).sum()) == k


# what tokens weigh | top_k, top_p, min_p -> those that stay
EDGES = """
1 2 2 1 | 1 1 0     -> 1 2
1 2 2 1 | 2 1 0     -> 1 2
1 2 2 1 | 3 1 0     -> 0 1 2 3
1 2 2 1 | 4 1 0     -> 0 1 2 3
1 2 2 1 | 0 1 0.499 -> 0 1 2 3
1 2 2 1 | 0 1 0.501 -> 1 2
1 2 2 1 | 0 1 1     -> 1 2
4 2 1 1 | 1 1 0     -> 0
4 2 1 1 | 2 1 0     -> 0 1
4 2 1 1 | 0 0.49 0  -> 0
4 2 1 1 | 0 0.51 0  -> 0 1
4 2 1 1 | 0 0.74 0  -> 0 1
4 2 1 1 | 0 0.76 0  -> 0 1 2 3
4 2 1 1 | 2 0.66 0  -> 0
4 2 1 1 | 2 0.67 0  -> 0 1
4 2 1 1 | 0 1e-30 0 -> 0
"""


@both_thresholds
def test_filters_at_their_edges(threshold):
    """
    One token more or less than asked for: a tie with the last one stays, and top_p is a share of
    what top_k left, here of two thirds.
    """
    rows = [re.split(r" *\| *| *-> *", row) for row in EDGES.strip().splitlines()]
    weights, filters, kept = (
        [[*map(float, x.split())] for x in part] for part in zip(*rows, strict=True)
    )
    top_k, top_p, min_p = tensor(filters).unbind(1)
    scores = tensor(weights).log()
    stays = scores >= threshold(scores, top_k.long(), top_p, min_p)[:, None]
    assert [row.nonzero()[:, 0].tolist() for row in stays] == kept


def test_no_filter_keeps_every_token():
    """
    In fp32 the sum over 50,000 tokens reaches 1 before the last of them: a request with top_p 1
    lost its rarest tokens as soon as another one in its batch asked for a filter, so its answer
    depended on its neighbours.
    """
    scores = 4 * randn(4, 50_257, seed=0)
    weights = scores.cpu().double().softmax(-1).float()
    assert (weights.sort(descending=True).values.cumsum(-1) >= 1).any()  # or this shows nothing
    zero = torch.zeros(4, device=DEVICE)
    least = sampling.threshold(scores, zero.long(), zero + 1, zero)
    assert (scores >= least[:, None]).all()


# --------------------------------------------------------------------------------------------------
# Tokens: each path's token is one that float64 finds

STOPS = (2, 8, 11, 99, -3)
LIKELY = SamplingParams(top_p=0.5, seed=1)


def random_requests(R: int, V: int, dtype, seed: int) -> tuple[Tensor, list[SamplingRow]]:
    """Logits [R, V] and requests; some rows are flat, some steep, and bf16 has many ties."""
    choose = random.Random(seed)
    scale = tensor([0.3, 1.0, 3.0]).repeat(R)[:R]
    logits = (randn(R, V, seed=seed) * scale[:, None]).to(dtype)
    requests = []
    for row, best in enumerate(logits.topk(min(V, 4)).indices.tolist()):
        # the tokens that a penalty or a ban must change
        prompt = choose.choices(best, k=choose.randrange(5))
        generated = choose.choices(best, k=choose.randrange(5))
        params = oracle.random_params(choose, V, best)
        seed = choose.getrandbits(64) - 2**63
        stops = (best[0], V - 1, V + 7, -2)
        requests.append(SamplingRow(row, params, seed, row % 3, prompt, generated, stops))
    return logits, requests


def position_of(request: SamplingRow) -> int:
    return len(request.prompt_tokens) + len(request.generated_tokens)


def possible(logits: Tensor, request: SamplingRow) -> set[int]:
    _, params, seed, choice, prompt, generated, stops = request
    texts = {"prompt": prompt, "generated": generated, "stops": stops}
    position = position_of(request)
    return possible_tokens(logits, params, position, seed=seed, choice=choice, **texts)


def check_tokens(pick, R: int, V: int, dtype, seed: int):
    """
    In any order of rows; the rows remember their tokens and count them. The first request is also
    judged alone: no filter, temperature or noise of its neighbours may matter.
    """
    logits, requests = random_requests(R, V, dtype, seed)
    rows = filled(V, requests)
    alone = filled(V, requests)
    random.Random(seed).shuffle(requests)
    order = [request.row for request in requests]
    positions = tensor([position_of(request) for request in requests])
    arguments = (logits[order], tensor(order), positions)
    tokens = pick(*arguments, rows).tolist()
    first = (x[:1] for x in arguments)
    token = pick(*first, alone, [requests[0].params]).item()
    assert token in possible(logits[order[0]], requests[0])
    assert rows.last_token[order].tolist() == [max(token, 0) for token in tokens]
    for request, token in zip(requests, tokens, strict=True):
        allowed = possible(logits[request.row], request)
        assert token in allowed, f"{token}, in float64 {allowed}: {request}"
        if request.params.penalises:
            text = [*request.generated_tokens, *[token][: token + 1]]
            count = rows.marks[request.row].cpu() >> 2
            assert torch.equal(count, oracle.count_of(text, V)), f"{request} got {token}"


MIXTURES = [
    (24, 2, torch.float32, 2048, 256),
    (24, 5, torch.bfloat16, 2048, 256),
    (24, 127, torch.float32, 64, 16),
    (20, 1000, torch.bfloat16, 512, 128),
    (12, 301, torch.float16, 128, 32),
]
LONG = [(1, 50257), (3, 50257), (40, 1000), (7, 4099), (64, 127), (200, 5), (200, 2)]
for sizes in LONG:
    for dtype in FLOATS[:2]:  # with the tiles of a GPU, vocabularies up to GPT-2's
        case = pytest.param(*sizes, dtype, 2048, 256, marks=pytest.mark.slow)
        MIXTURES.append(case)


@both_paths
@no_warning
@pytest.mark.parametrize(("R", "V", "dtype", "width", "quads"), MIXTURES)
def test_every_token_is_one_that_the_rules_allow(monkeypatch, pick, R, V, dtype, width, quads):
    """
    Any mixture. If float64 finds several tokens, because rounding decides, each is right. min_p
    or top_p applied as if every temperature were 1 changed a third of the tokens at 1.7.
    """
    shrink_tiles(monkeypatch, width, quads)
    before = oracle.counts.copy()
    repeats = math.ceil(160 / R) if DEVICE == "cuda" else 1
    for seed in range(repeats):
        check_tokens(pick, R, V, dtype, seed)
    new = oracle.counts - before
    assert new["ties"] <= new["tokens"] / 4, f"{new}: what is compared must be decided"


ONE_TOKEN = """
{"temperature": 0}
{"temperature": 1e-300}
{"temperature": 1e-45}
{"temperature": 1e-40}
{"temperature": 1e-38}
{"temperature": 1e-6}
{"temperature": 1e-40, "top_p": 0.5}
{"temperature": 1e-6, "top_p": 0.5}
{"top_k": 1}
{"top_p": 1e-300}
{"min_p": 1}
{"temperature": 0, "repetition_penalty": 1e-300}
{"temperature": 0, "repetition_penalty": 10}
"""


@both_paths
@pytest.mark.parametrize("row", ONE_TOKEN.strip().splitlines())
def test_numbers_that_leave_one_token(pick, row):
    """
    Beyond single precision: divided by 1e-40 all positive logits are infinite, and the first of
    them won; a top_p of 0 dropped all tokens; a logit over a penalty of 0 is no number.
    """
    fields = json.loads(row)
    params = [SamplingParams(**fields)] * 20
    logits = tensor([[0.0, 5.0, 3.0, -2.0]]).expand(20, -1)
    rows = filled(4, [SamplingRow(i, params[0], i, 0, [1, 3], [0]) for i in range(20)])
    tokens = pick(logits, arange(20), arange(20) + 3, rows, params)
    expected = 2 if fields.get("repetition_penalty", 0) > 1 else 1
    assert tokens.tolist() == [expected] * 20


@both_paths
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_tie_goes_to_the_lowest_token(monkeypatch, pick, dtype):
    """
    A reduction in the order of arrival makes greedy answers differ from run to run. Within a lane,
    a tile and a program there are ties here, and between programs.
    """
    shrink_tiles(monkeypatch, width=64, quads=16)
    logits = torch.zeros(3, 300, device=DEVICE, dtype=dtype)
    logits[0, [299, 131, 130]] = 2.0
    logits[1, [64, 7, 298]] = 2.0
    assert tokens_of(pick, logits, [GREEDY] * 3) == [130, 7, 0]


@needs_triton
def test_a_tile_has_noise_wherever_the_filters_keep_a_token(monkeypatch):
    """
    Noise is most of the work, and is left out where a tile has no such token. Four tokens share a
    counter: here only the first of each four is kept, or the second ..; and their logits differ
    little, but by a low temperature.
    """
    shrink_tiles(monkeypatch, width=64, quads=8)
    params = [SamplingParams([0.2, 1.0][i // 4 % 2], top_k=16, seed=i) for i in range(12)]
    logits = 0.2 * randn(12, 64, seed=8)
    for i in range(12):
        logits[i, i % 4 :: 4] += 5
    for i, token in enumerate(tokens_of(sample_triton, logits, params)):
        assert token in possible_tokens(logits[i], params[i], i)


ALL_FILTERS = SamplingParams(top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0)


@both_paths
@no_warning
@pytest.mark.parametrize("params", [GREEDY, LIKELY, ALL_FILTERS])
def test_a_row_without_a_finite_maximum_gives_no_token(pick, params):
    """
    A model that overflowed went on with token 0, or with the NaN's place, without an error.
    """
    logits = randn(6, 50, seed=3)
    logits[0, 49] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    logits[3, :49] = -torch.inf
    logits[4, [0, 17]] = torch.nan
    rows = rows_of([params] * 6, 50)
    *tokens, last = pick(logits, arange(6), arange(6), rows).tolist()
    assert tokens == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 49, NO_TOKEN]
    assert 0 <= last < 50
    assert rows.last_token.tolist() == [0, 0, 0, 49, 0, last]
    counted = (rows.marks >> 2).sum(1).tolist()
    assert counted == [0, 0, 0, params.penalises, 0, params.penalises]


# --------------------------------------------------------------------------------------------------
# Bias, bans, penalties

ADJUSTED = [
    {},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.9},
    {"repetition_penalty": 0.4},
    {"logit_bias": {3: 1.0, 5: -100, 0: 0.25}},
    {"logit_bias": {9: 2.5, 1: 100.0}, "min_tokens": 3},
    {"presence_penalty": 0.3, "frequency_penalty": -0.4, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.2, "logit_bias": {1: 1.5}, "min_tokens": 4},
]
ADJUSTED = [replace(GREEDY, **fields) for fields in ADJUSTED]


@both_paths
def test_penalties_bias_and_bans_follow_a_text_token_by_token(pick):
    """
    Greedy texts of 12 tokens: the prompt counted for presence or not for repetition, a count that
    lags, a ban that ends a token early. Half way every request is preempted and set anew, in the
    row of another, whose bias and counts must be gone.
    """
    prompt = [1, 2, 2, 7]
    R = len(ADJUSTED)
    texts = [[] for _ in ADJUSTED]
    places = arange(R)
    rows = SamplingRows(R, 12, DEVICE)
    logits = (0.7 * randn(12, 12, seed=5)).round(decimals=2)  # close together: every rule matters
    logits[1::2] -= 3  # and the penalty of logits below zero
    for step in range(12):
        if step in (0, 6):
            places = places.flip(0)
            for row, p, text in zip(places.tolist(), ADJUSTED, texts, strict=True):
                rows.fill(SamplingRow(row, p, 0, 0, prompt, text, STOPS))
        at = torch.full_like(places, len(prompt) + step)
        tokens = pick(logits[step].expand(R, -1), places, at, rows, ADJUSTED)
        for p, text, token in zip(ADJUSTED, texts, tokens.tolist(), strict=True):
            scores = oracle.adjusted(logits[step], p, prompt, text, STOPS)
            assert scores[token] >= scores.max() - 1e-5, (p, text, token)
            text.append(token)
    unlike = {tuple(text) for text in texts}
    assert len(unlike) >= R - 1, "every rule must matter here, or nothing is shown"


def test_every_logit_is_adjusted_by_the_rules():
    """A token shows a wrong penalty only where it decides; here every number is compared."""
    logits, requests = random_requests(48, 41, torch.float32, seed=3)
    rows = filled(41, requests)
    requests.reverse()
    positions = tensor([position_of(request) for request in requests])
    scores = sampling.adjust(logits.flip(0), arange(48).flip(0), positions, rows)
    for row, request in zip(scores.cpu().double(), requests, strict=True):
        number, params, _, _, *texts = request
        exact = oracle.adjusted(logits[number], params, *texts)
        torch.testing.assert_close(row, exact, rtol=1e-6, atol=2e-6)


@both_paths
def test_a_forbidden_token_is_never_chosen_however_likely(pick):
    """
    A ban that only takes 100 off a logit, as a bias may, holds until a model is sure of the token.
    """
    rows = filled(V, [SamplingRow(0, SamplingParams(min_tokens=12), 4, stop_token_ids=(4,))])
    logits = LOGITS.repeat(4, 1)
    logits[:, 4] = 1000.0
    positions = tensor([0, 5, 11, 12])
    *banned, free = pick(logits, 0 * positions, positions, rows).tolist()
    assert 4 not in banned
    assert free == 4


def test_placing_requests_takes_two_small_uploads(monkeypatch):
    """
    Rows of V numbers for every request that is admitted are 400 kB for each, in the engine's way;
    an upload for each request made 24 ms of a first step of 256.
    """
    upload = Mock(side_effect=sampling.upload)
    monkeypatch.setattr(sampling, "upload", upload)
    rows = SamplingRows(4, 1000, DEVICE)
    rows.fill(*(SamplingRow(i, SamplingParams(top_p=0.5, top_k=3 + i), 5) for i in (1, 3, 2)))
    assert upload.call_count == 2
    assert rows.ints.top_k.tolist() == [0, 4, 5, 6]
    rows.fill(SamplingRow(1, SamplingParams(logit_bias={3: 1}, min_tokens=1), 5))
    assert upload.call_count == 2 + 4


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: CUDA graphs and their streams")
def test_a_cuda_graph_serves_parameters_that_come_later():
    """
    A decision on the host, a synchronisation or a new tensor for a row is frozen into the graph, or
    breaks it.
    """
    V = 50257
    R = len(ADJUSTED)
    rows = rows_of([GREEDY] * R, V)
    places = arange(R)
    logits = randn(R, V, seed=7).bfloat16()
    arguments = (logits, places, places + 9)
    sample_triton(*arguments, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_triton(*arguments, rows)
    drawn = {}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
    for i, fields in enumerate(drawn):
        other = SamplingRows(R, V, DEVICE)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for row, p in enumerate(ADJUSTED):
                request = SamplingRow(row, replace(p, **fields), row, i, [1, 2, 3], [4] * i, STOPS)
                rows.fill(request)
                other.fill(request)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = sampling.sample_torch(*arguments, other)
        assert (tokens != expected).sum() <= 1
        assert i == 0 or len(set(tokens.tolist())) > 3


# --------------------------------------------------------------------------------------------------
# Log-probabilities


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(dtype, n):
    """
    Those of the tempered or penalised distribution, or of ranks that moved, are not what the API
    promises.
    """
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=0)
    logits = (3 * randn(4, 40, seed=6)).to(dtype)
    tokens = tensor([0, 39, 7, 7])
    chosen, ids, top = sampling.logprobs(logits, tokens, n)
    expected = logits.double().log_softmax(-1)
    best = expected.sort(descending=True).values[:, :n]
    close(chosen.double(), expected[range(4), tokens])
    close(top.double(), best)
    assert ids.shape == (4, n)
    assert torch.equal(expected.gather(1, ids), best)


def test_logprobs_are_finite_for_any_logits():
    """
    No JSON has an infinity; a row that went wrong has no token, and must not break the others'.
    """
    logits = torch.zeros(4, 6, device=DEVICE)
    logits[0, 2] = -torch.inf
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    chosen, ids, top = sampling.logprobs(logits, tensor([2, NO_TOKEN, NO_TOKEN, 5]), 20)
    assert chosen[:3].tolist() == [LOWEST_LOGPROB] * 3
    assert top.min() == LOWEST_LOGPROB
    assert chosen.isfinite().all()
    assert top.isfinite().all()
    assert chosen[3].item() == pytest.approx(-math.log(6))
    assert ids.shape == (4, 6)
