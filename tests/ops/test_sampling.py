"""
Sampling: the noise is compared word by word, frequencies with the softmax, filters and tokens with
the float64 rules of oracle.py.

All tests are seeded, so a check of frequencies passes always or never. To show that it can fail,
the same counts are also compared with the distribution of a wrong sampler.
"""

import json
import math
import random
import tomllib
from functools import cache, partial
from unittest.mock import Mock

import oracle
import pytest
import torch
from oracle import possible_tokens
from torch import Tensor

from ops import cpu, sampling, sampling_kernels
from ops.choice import choose_ops
from ops.sampling import SamplingRow, SamplingRows, gumbel_noise, masked, philox
from ops.sampling_kernels import sample_triton, triton
from params import GREEDY, LOWEST_LOGPROB, NO_TOKEN, SamplingParams

# On a GPU every test here runs there, with compiled kernels; elsewhere Triton's interpreter runs
# them on CPU tensors.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
sample = sample_triton if DEVICE == "cuda" else sampling.sample_torch


@cache
def machine():
    return choose_ops("cpu")[0]


def sample_cpu(*arguments) -> Tensor:
    return machine().sample(*arguments)


needs_triton = pytest.mark.skipif(triton is None, reason="needs triton")
needs_cpu = pytest.mark.skipif(
    DEVICE == "cuda" or not cpu.c_compiler(), reason="needs a C compiler: and no GPU"
)
triton_path = pytest.param(sample_triton, id="triton", marks=needs_triton)
cpu_path = pytest.param(sample_cpu, id="cpu", marks=needs_cpu)
torch_path = pytest.param(sampling.sample_torch, id="torch")
all_paths = pytest.mark.parametrize("pick", [torch_path, triton_path, cpu_path])
no_warning = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
tensor = partial(torch.tensor, device=DEVICE)
arange = partial(torch.arange, device=DEVICE)


def randn(*shape: int, seed: int) -> Tensor:
    """Return the same numbers on every device."""
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
    """Return the tokens picked from logits [R, V], with row i at position i."""
    R, V = logits.shape
    return pick(logits, arange(R), arange(R), rows_of(params, V), params).tolist()


def shrink_tiles(monkeypatch, width: int, quads: int):
    """Make a row have several tiles, and a small batch several programs per row."""
    monkeypatch.setattr(sampling_kernels, "THRESHOLD_WIDTH", width)
    monkeypatch.setattr(sampling_kernels, "QUADS", quads)


# --------------------------------------------------------------------------------------------------
# Noise

ONES = 0xFFFFFFFF
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
# counter and key; the answers are those of Random123, the authors' own library
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
    Another generator would also be random, but other backends and readers could not reproduce its
    tokens.
    """
    *counter, low, high = torch.tensor(words)[:, None]
    assert torch.stack(philox(counter, (low, high)))[:, 0].tolist() == ANSWERS[words]


def test_noise_is_the_function_that_design_states():
    """
    The key is all 64 bits of the seed, also if it is negative. The counter is (token // 4,
    position, choice, 0), whatever the batch row. If V is no multiple of 4, only the surplus words
    are cut off.
    """
    keys = list(zip(SEEDS, POSITIONS, CHOICES, strict=True))
    for V in 1, 2, 3, 4, 13:
        noise = gumbel_noise(tensor(SEEDS), tensor(POSITIONS), tensor(CHOICES), V)
        expected = torch.stack([oracle.noise(*key, V) for key in keys])
        torch.testing.assert_close(noise.cpu().double(), expected, rtol=1e-5, atol=1e-6)
        for row, key in zip(noise, keys, strict=True):
            alone = gumbel_noise(*tensor(key)[:, None], V)
            assert torch.equal(alone[0], row)


def test_noise_is_finite_at_both_ends(monkeypatch):
    """A u of 0 or 1 would be infinite noise: an impossible token, once in some million."""
    words = tensor([0, ONES, 0, 0])[:, None, None]
    monkeypatch.setattr(sampling, "philox", lambda counter, key: words.unbind())
    noise = gumbel_noise(*tensor([[0], [0], [0]]), 2)
    expected = [-math.log(-math.log(u)) for u in (2.0**-24, 1 - 2.0**-24)]
    assert noise[0].tolist() == pytest.approx(expected, rel=1e-6)


@all_paths
def test_noise_bias_and_penalties_of_every_token_are_exact(pick):
    """
    The logits undo all of them, so that a difference of 2e-5 in one token decides. Would catch: a
    part of the noise's key that is cut off; an inaccurate logarithm; a presence penalty that counts
    the prompt.
    """
    prompt = [*range(100)]
    text = [*range(50, 150), *range(120, 200)]
    requests, logits, best = [], [], []
    for row, key in enumerate(zip(SEEDS, POSITIONS, CHOICES, strict=True)):
        seed, _, choice = key
        sign = (-1) ** row
        params = SamplingParams(
            logit_bias={7: 2.5 * sign},
            presence_penalty=sign,
            frequency_penalty=0.7 * sign,
            repetition_penalty=1 + 0.3 * sign,
        )
        requests.append(SamplingRow(row, params, seed, choice, prompt, text))
        noise = oracle.noise(*key, 300)
        x = -noise
        for _ in range(40):  # it converges step by step
            x -= oracle.adjusted(x.clone(), params, prompt, text, ()) + noise
        best.append(noise.argmax().item())
        x[best[-1]] += 2e-5
        logits.append(x)
    logits = torch.stack(logits).to(DEVICE, torch.float32)
    assert pick(logits, arange(8), tensor(POSITIONS), filled(300, requests)).tolist() == best


# --------------------------------------------------------------------------------------------------
# Frequencies

N = 20_000
LOGITS = tensor([2.0, 1.5, 1.5, 1.0, 0.7, 0.3, 0.0, -0.4, -0.5, -1.0, -1.0, -2.0, -3.0])
V = len(LOGITS)
# critical values of chi-square at the level 0.001: degrees of freedom -> the largest that fits
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
    Return Pearson's chi-square of counts against probabilities, divided by its critical value. It
    is infinite if a token without probability was chosen.
    """
    expected = len(tokens) * probabilities.cpu()
    counts = tokens.cpu().bincount(minlength=len(expected))
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    terms = (counts - expected) ** 2 / expected
    return terms[possible].sum().item() / CRITICAL[possible.sum().item() - 1]


def fits(tokens: Tensor, params: SamplingParams) -> bool:
    """Return True if the tokens fit the rule of `SamplingParams`."""
    scores = LOGITS.double().cpu() / params.temperature
    kept, _ = oracle.kept_tokens(scores, params, 1e-6)
    probabilities = scores.where(kept, -torch.inf).softmax(0)
    return chi_square(tokens, probabilities) < 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_frequencies_are_those_of_the_softmax(name, over):
    """
    Would catch: noise that is not Gumbel; a temperature applied twice; filters in the wrong order;
    correlated seeds. The check is sharp: the distribution of no other case fits.
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
    Return what `sampling.threshold` does, from the kernel, with several tiles per row. The kernel
    works on scores before they are divided by their row's temperature. The temperatures here are
    powers of two, so nothing is rounded.
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
    of_rows = (params.packed_floats, params.packed_ints, params.bias, params.token_flags)
    arrays = (scores, rows, rows, *of_rows, thresholds, finished, scratch)
    strides = (scores.stride(0), scratch.stride(0))
    sampling_kernels.threshold_kernel[(R,)](*arrays, *strides, V, PDL=False, WIDTH=width)
    return thresholds / temperature


@pytest.mark.parametrize(
    "threshold", [sampling.threshold, pytest.param(threshold_triton, marks=needs_triton)]
)
@pytest.mark.parametrize("V", [1, 9, 37, 300])
@no_warning
def test_filters_equal_the_oracle_row_by_row(threshold, V):
    """
    Would catch: a filter that uses another row's k, drops one token too many or too few, or splits
    a tie; bounds that only hold for ordinary scores, and not for a flat row, a steep row or an
    outlier.
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
    scores[::7, : V // 2] = -torch.inf  # like forbidden tokens
    scores[3::5, torch.arange(V) % 16 > 2] = -torch.inf  # most of the kernel's 16 lanes are empty
    top_k[3::5] = 8 * [12]
    least = threshold(scores, tensor(top_k), tensor(top_p), tensor(min_p))
    kept = (scores >= least[:, None]).cpu()
    for row, stays, *numbers in zip(scores.cpu().double(), kept, top_k, top_p, min_p, strict=True):
        p = SamplingParams(1.0, *numbers)
        surely, maybe = oracle.kept_tokens(row, p, 1e-6)
        assert (stays | ~surely).all(), (p, row)
        assert (surely | maybe | ~stays | row.isinf()).all(), (p, row)


# --------------------------------------------------------------------------------------------------
# Tokens: the token of each path is one that float64 finds

LIKELY = SamplingParams(top_p=0.5, seed=1)


def random_requests(R: int, V: int, dtype, seed: int) -> tuple[Tensor, list[SamplingRow]]:
    """
    Return logits [R, V] and requests. Some rows are flat, some steep, some sure of one token; bf16
    has many ties.
    """
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
        if row % 4 == 1:
            logits[row, best[0]] += 200
    return logits, requests


def possible(logits: Tensor, request: SamplingRow) -> set[int]:
    _, params, seed, choice, prompt, generated, stops = request
    texts = {"prompt": prompt, "generated": generated, "stops": stops}
    position = len(prompt) + len(generated)
    return possible_tokens(logits, params, position, seed=seed, choice=choice, **texts)


def check_tokens(pick, R: int, V: int, dtype, seed: int):
    """
    Check tokens with rows in any order, with masks like those of grammars. Rows were used before,
    and remember and count their tokens. The first request is also checked by itself, because the
    filters, temperature and noise of its neighbours must not matter.
    """
    rows = SamplingRows(R, V, DEVICE)
    for of_round in range(2):
        seed = 2 * seed + of_round
        logits, requests = random_requests(R, V, dtype, seed)
        rows.fill(*requests)
        alone = filled(V, requests)
        random.Random(seed).shuffle(requests)
        order = tensor([request.row for request in requests])
        positions = tensor([len(r.prompt_tokens + r.generated_tokens) for r in requests])
        words = random.Random(seed).choices(range(-(2**31), 2**31), k=R * -(-V // 32))
        bits = tensor(words, dtype=torch.int32).view(R, -1)
        bits[arange(R) % 5 > 0] = -1
        tokens = pick(logits[order], order, positions, rows, None, bits).tolist()
        first = (x[:1] for x in (logits[order], order, positions))
        token = pick(*first, alone, [requests[0].params], bits[:1]).item()
        logits[order] = masked(logits[order], bits)
        assert token in possible(logits[order[0]], requests[0])
        assert rows.last_token[order].tolist() == [max(token, 0) for token in tokens]
        for request, token in zip(requests, tokens, strict=True):
            allowed = possible(logits[request.row], request)
            assert token in allowed, f"{token}, in float64 {allowed}: {request}"
            if request.params.penalises:
                text = [*request.generated_tokens, *[token][: token + 1]]
                count = rows.token_flags[request.row].cpu() >> 2
                assert torch.equal(count, oracle.count_of(text, V)), f"{request} got {token}"


MIXTURES = [
    (12, 2, torch.float32, 2048, 256),
    (12, 5, torch.bfloat16, 2048, 256),
    (16, 127, torch.float32, 64, 16),
    (10, 1000, torch.bfloat16, 512, 128),
    (8, 301, torch.float16, 128, 32),
]
LONG = [(1, 50257), (3, 50257), (40, 1000), (7, 4099), (64, 127), (200, 5), (200, 2)]
for sizes in LONG:
    for dtype in FLOATS[:2]:  # with a GPU's tiles and vocabularies up to GPT-2's
        case = pytest.param(*sizes, dtype, 2048, 256, marks=pytest.mark.slow)
        MIXTURES.append(case)


@all_paths
@no_warning
@pytest.mark.parametrize(("R", "V", "dtype", "width", "quads"), MIXTURES)
def test_every_token_is_one_that_the_rules_allow(monkeypatch, pick, R, V, dtype, width, quads):
    """
    Check any mixture of parameters. If rounding decides and float64 finds several tokens, each is
    right. Previously min_p or top_p was applied as if every temperature were 1, which changed a
    third of the tokens at 1.7.
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


@all_paths
def test_numbers_that_leave_one_token(pick):
    """
    These exceed single precision. Previously, divided by 1e-40, all positive logits were infinite,
    and the first of them won; a top_p of 0 dropped all tokens; a logit divided by a penalty of 0
    was NaN.
    """
    params = [SamplingParams(**json.loads(row)) for row in ONE_TOKEN.strip().splitlines()]
    places = arange(len(params))
    logits = tensor([[0.0, 5.0, 3.0, -2.0]]).expand(len(params), -1)
    for position in range(3, 11):
        rows = filled(4, [SamplingRow(i, p, 0, 0, [1, 3], [0]) for i, p in enumerate(params)])
        tokens = pick(logits, places, torch.full_like(places, position), rows)
        assert tokens.tolist() == [1] * (len(params) - 1) + [2]


@all_paths
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_tie_goes_to_the_lowest_token(monkeypatch, pick, dtype):
    """
    A reduction in order of arrival would make greedy answers differ from run to run. There are ties
    here within a lane, a tile and a program, and between programs.
    """
    shrink_tiles(monkeypatch, width=64, quads=16)
    logits = torch.zeros(3, 300, device=DEVICE, dtype=dtype)
    logits[0, [299, 131, 130]] = 2.0
    logits[1, [64, 7, 298]] = 2.0
    assert tokens_of(pick, logits, [GREEDY] * 3) == [130, 7, 0]


@needs_triton
def test_a_tile_has_noise_wherever_the_filters_keep_a_token(monkeypatch):
    """
    Noise is most of the work, so it is skipped for a tile without such a token. Four tokens share a
    counter. Here only the first of each four is kept, or only the second, and so on. Their logits
    differ little, except at a low temperature.
    """
    shrink_tiles(monkeypatch, width=64, quads=8)
    params = [SamplingParams([0.2, 1.0][i // 4 % 2], top_k=16, seed=i) for i in range(12)]
    logits = 0.2 * randn(12, 64, seed=8)
    logits[8:] = 0  # a tie: every token that is kept equals the smallest
    for i in range(12):
        logits[i, i % 4 :: 4] += 5
    for i, token in enumerate(tokens_of(sample_triton, logits, params)):
        assert token in possible_tokens(logits[i], params[i], i)


ALL_FILTERS = SamplingParams(top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0)


@all_paths
@no_warning
@pytest.mark.parametrize("params", [GREEDY, LIKELY, ALL_FILTERS])
def test_a_row_without_a_finite_maximum_gives_no_token(pick, params):
    """
    A model that overflowed used to continue with token 0, or with the position of the NaN, without
    an error.
    """
    logits = randn(6, 50, seed=3)
    logits[0, 49] = -torch.nan  # with the other sign
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    logits[3, :49] = -torch.inf
    logits[4, [0, 17]] = torch.nan
    rows = rows_of([params] * 6, 50)
    *tokens, last = pick(logits, arange(6), arange(6), rows).tolist()
    assert tokens == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 49, NO_TOKEN]
    assert 0 <= last < 50
    assert rows.last_token.tolist() == [0, 0, 0, 49, 0, last]
    counted = (rows.token_flags >> 2).sum(1).tolist()
    assert counted == [0, 0, 0, params.penalises, 0, params.penalises]


# --------------------------------------------------------------------------------------------------
# The host


def test_placing_requests_takes_two_small_uploads(monkeypatch):
    """
    Uploading rows of V numbers would take 400 kB per admitted request, while the engine waits. An
    upload per request added 24 ms to a first step of 256.
    """
    upload = Mock(side_effect=sampling.upload)
    monkeypatch.setattr(sampling, "upload", upload)
    rows = SamplingRows(4, 1000, DEVICE)
    rows.fill(*(SamplingRow(i, SamplingParams(top_p=0.5, top_k=3 + i), 5) for i in (1, 3, 2)))
    assert upload.call_count == 2
    assert rows.ints.top_k.tolist() == [0, 4, 5, 6]
    rows.fill(SamplingRow(1, SamplingParams(logit_bias={3: 1}, min_tokens=1), 5))
    assert upload.call_count == 2 + 4


# --------------------------------------------------------------------------------------------------
# Log-probabilities


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(dtype, n):
    """
    Would catch: log-probabilities after temperature or penalties; ranks that have moved. The API
    promises those of the raw logits.
    """
    logits = (3 * randn(4, 40, seed=6)).to(dtype)
    tokens = tensor([0, 39, 7, 7])
    chosen, ids, top = sampling.logprobs(logits, tokens, n)
    expected = logits.double().log_softmax(-1)
    best = expected.sort(descending=True).values[:, :n]
    assert torch.equal(expected.gather(1, ids), best)
    exact = torch.cat([expected.gather(1, tokens[:, None]), best], 1)
    assert (torch.cat([chosen[:, None], top], 1) - exact).abs().max() < 1e-5


def test_logprobs_are_finite_for_any_logits():
    """JSON has no infinity. A row that went wrong has no token, and must not affect the others."""
    logits = torch.zeros(4, 6, device=DEVICE)
    logits[0, 2] = -torch.inf
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    chosen, ids, top = sampling.logprobs(logits, tensor([2, NO_TOKEN, NO_TOKEN, 5]), 20)
    assert chosen.tolist() == pytest.approx([*3 * [LOWEST_LOGPROB], -math.log(6)])
    assert top.min() == LOWEST_LOGPROB
    assert top.isfinite().all()
    assert ids.shape == (4, 6)
