"""
Sampling: the noise word for word, the frequencies against the softmax, the filters and the tokens
against the float64 rules of oracle.py.

Everything here is seeded, so a check of frequencies passes always or never. That it can fail is
shown beside it: the same counts are held against the distribution of a wrong sampler.
"""

import math
import random
from dataclasses import replace

import oracle
import pytest
import torch
from oracle import possible_tokens

from ops import sampling, sampling_kernels
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


def arange(n: int) -> torch.Tensor:
    return torch.arange(n, device=DEVICE)


def randn(*shape: int, seed: int) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def filled(V: int, requests: list[Row]) -> SamplingRows:
    rows = SamplingRows(len(requests), V, DEVICE)
    rows.fill(*requests)
    return rows


def rows_of(params: list[SamplingParams], V: int) -> SamplingRows:
    return filled(V, [Row(row, p, p.seed or 0) for row, p in enumerate(params)])


def shrink_tiles(monkeypatch, width: int, quads: int):
    """So that a row has several tiles and a small batch several programs for each."""
    monkeypatch.setattr(sampling_kernels, "THRESHOLD_WIDTH", width)
    monkeypatch.setattr(sampling_kernels, "QUADS", quads)


# --------------------------------------------------------------------------------------------------
# Noise

KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""  # counter, key, answer: those of Random123, the authors' own library
SEEDS = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), -(2**31), 0x123456789ABCDEF]
POSITIONS, CHOICES = [7, 5, 9, 0, 100, 3, 2**31, 2**32 - 1], [3, 1, 0, 0, 2, 0, 5, 1]


@pytest.mark.parametrize("line", KNOWN_ANSWERS.split("\n")[1:-1])
def test_philox_gives_the_known_answers(line):
    """
    Another generator would be random too, but other backends and other readers could not repeat its
    tokens.
    """
    words = [torch.tensor([int(word, 16)]) for word in line.split()]
    assert philox(tuple(words[:4]), tuple(words[4:6])) == tuple(words[6:])


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
            alone = gumbel_noise(*(tensor([number]) for number in key), V)
            assert torch.equal(alone[0], row)


@pytest.mark.parametrize(("word", "u"), [(0, 2.0**-24), (0xFFFFFFFF, 1 - 2.0**-24)])
def test_noise_is_finite_at_both_ends(monkeypatch, word, u):
    """A u of 0 or 1 is infinite noise: once in some million tokens, a token of probability zero."""
    monkeypatch.setattr(sampling, "philox", lambda counter, key: (torch.full((1, 1), word),) * 4)
    noise = gumbel_noise(*tensor([[0], [0], [0]]), 1)
    assert noise.item() == pytest.approx(-math.log(-math.log(u)), rel=1e-6)


@sampling_kernels.jit
def noise_kernel(seeds, positions, choices, noise, QUADS: tl.constexpr):
    """Grid (R,): noise [R, 4 * QUADS], as gumbel_max_kernel has it."""
    r, quad = tl.program_id(0), tl.arange(0, QUADS)
    position, choice = tl.load(positions + r), tl.load(choices + r)
    w0, w1, w2, w3 = philox_words(tl.load(seeds + r), quad, position, choice)
    at = noise + r * 4 * QUADS + 4 * quad
    tl.store(at, gumbel(w0))
    tl.store(at + 1, gumbel(w1))
    tl.store(at + 2, gumbel(w2))
    tl.store(at + 3, gumbel(w3))


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

N, V = 20_000, 13
LOGITS = tensor([2.0, 1.5, 1.5, 1.0, 0.7, 0.3, 0.0, -0.4, -0.5, -1.0, -1.0, -2.0, -3.0])
# chi-square at the level 0.001, from the tables: degrees of freedom -> the most that fits
CRITICAL = {2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458, 12: 32.909}
CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=4),
    "top_k in a tie": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.8),
    "min_p": SamplingParams(min_p=0.1),
    "all of them": SamplingParams(temperature=1.4, top_k=8, top_p=0.9, min_p=0.15),
}


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's, of counts against probabilities; those that are 0 must not be chosen."""
    expected = len(tokens) * probabilities.cpu()
    counts = tokens.cpu().bincount(minlength=len(expected))
    possible = expected > 0
    if counts[~possible].any():
        return math.inf
    return (((counts - expected) ** 2) / expected)[possible].sum().item()


def fits(tokens: torch.Tensor, params: SamplingParams) -> bool:
    """Against the rule of `SamplingParams`."""
    scores = LOGITS.double().cpu() / params.temperature
    kept, _ = oracle.kept_tokens(scores, params, 1e-6)
    probabilities = scores.where(kept, -torch.inf).softmax(0)
    return chi_square(tokens, probabilities) < CRITICAL[kept.sum().item() - 1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_frequencies_are_those_of_the_softmax(name, over):
    """
    Noise that is not Gumbel, a temperature applied twice, a filter in the wrong order, seeds that
    are correlated. The check can tell: no other case's distribution fits.
    """
    params = CASES[name]
    requests = rows_of([params] * N, V)
    requests.ints.seed[:] = arange(N) if over == "seeds" else 11
    positions = arange(N) if over == "positions" else torch.full_like(arange(N), 11)
    tokens = sample(LOGITS.expand(N, -1), arange(N), positions, requests, [params])
    assert [other for other in CASES if fits(tokens, CASES[other])] == [name]


@pytest.mark.parametrize("part", ["seeds", "positions", "choices"])
def test_neighbours_are_independent(part):
    """
    Counters that overlap give the next position, seed or fork the noise of this one, moved by some
    tokens.
    """
    logits = tensor([0.5, 0.0, -0.3, 0.2])
    keys = {"seeds": arange(N), "positions": 0 * arange(N) + 11, "choices": 0 * arange(N)}
    if part == "positions":
        keys["seeds"], keys["positions"] = keys["positions"], keys["seeds"]
    a = (logits + gumbel_noise(*keys.values(), 4)).argmax(-1)
    keys[part] = keys[part] + 1
    b = (logits + gumbel_noise(*keys.values(), 4)).argmax(-1)
    p = logits.double().softmax(0)
    assert chi_square(4 * a + b, torch.outer(p, p).flatten()) < 37.697  # of 15 degrees
    assert chi_square(4 * a + a, torch.outer(p, p).flatten()) > 1000


def test_draws_of_a_text_use_all_words_alike():
    """With one of Philox's four words used for four tokens, they would have the same noise."""
    rows = gumbel_noise(arange(N), 0 * arange(N), 0 * arange(N), 8)
    assert chi_square(rows.argmax(-1), torch.full((8,), 1 / 8)) < 24.322  # of 7 degrees
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
    R, V = scores.shape
    rows, width = arange(R), 16 if V < 100 else 128
    params = SamplingRows(R, V, DEVICE)
    params.ints.top_k[:], params.floats.top_p[:], params.floats.min_p[:] = top_k, top_p, min_p
    params.floats.temperature[:] = tensor([2.0, 1.0, 0.5]).repeat(R)[:R]
    scores = scores * params.floats.temperature[:, None]
    thresholds, finished = torch.full((2, R), torch.nan, device=DEVICE)
    scratch = torch.full((R, -(-V // width) * width), torch.nan, device=DEVICE)
    arrays = params.packed_floats, params.packed_ints, params.bias, params.marks
    sampling_kernels.threshold_kernel[(R,)](
        *(scores, rows, rows, *arrays, thresholds, finished, scratch),
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


@both_thresholds
@pytest.mark.parametrize("V", [1, 9, 37, 300])
def test_filters_equal_the_oracle_row_by_row(threshold, V):
    """
    A filter that uses the wrong row's k, drops one token too many or too few, or tears a tie apart;
    bounds that hold for a handful of scores only: a flat or a steep row, an outlier.
    """
    c, R = random.Random(V).choice, 40
    top_k = [c([0, 0, 1, 2, 5, 50, V - 1, V, V + 3]) for _ in range(R)]
    top_p = [c([1e-30, 1e-6, 0.1, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0, 1.0]) for _ in range(R)]
    min_p = [c([0.0, 0.0, 0.0, 0.01, 0.1, 0.5, 0.99, 1.0]) for _ in range(R)]
    scores = randn(R, V, seed=V)
    scores[::4] = scores[::4].mul(2).round() / 2  # many ties
    scores[1::4] *= 8
    scores[2::4] *= 1e-3
    scores[5::12, V // 2] = 1e30
    scores[6::12, V // 3] = -1e30
    scores[::7, : V // 2] = -torch.inf  # as of forbidden tokens
    kept = scores >= threshold(scores, tensor(top_k), tensor(top_p), tensor(min_p))[:, None]
    for row, stays, *numbers in zip(
        scores.double().cpu(), kept.cpu(), top_k, top_p, min_p, strict=True
    ):
        p = SamplingParams(1.0, *numbers)
        surely, maybe = oracle.kept_tokens(row, p, 1e-6)
        assert (stays | ~surely).all(), (p, row)
        assert (surely | maybe | ~stays | row.isinf()).all(), (p, row)


EDGES = """
1 2 2 1 | 1 1 0     | 1 2         a tie with the last one stays
1 2 2 1 | 2 1 0     | 1 2
1 2 2 1 | 3 1 0     | 0 1 2 3
1 2 2 1 | 4 1 0     | 0 1 2 3
1 2 2 1 | 0 1 0     | 0 1 2 3
1 8 2 4 | 1 1 0     | 1
1 8 2 4 | 2 1 0     | 1 3
1 8 2 4 | 3 1 0     | 1 2 3
1 8 2 4 | 4 1 0     | 0 1 2 3
4 2 1 1 | 0 .49 0   | 0
4 2 1 1 | 0 .51 0   | 0 1
4 2 1 1 | 0 .74 0   | 0 1
4 2 1 1 | 0 .76 0   | 0 1 2 3
4 2 1 1 | 2 .66 0   | 0           two thirds of what top_k left
4 2 1 1 | 2 .67 0   | 0 1
4 2 1 1 | 0 1e-30 0 | 0
1 2 2 1 | 0 1 1     | 1 2
1 2 2 1 | 0 1 .499  | 0 1 2 3
1 2 2 1 | 0 1 .501  | 1 2
"""  # weights; top_k, top_p, min_p; the tokens that are kept


@both_thresholds
def test_filters_at_their_edges(threshold):
    """One token more or less than asked for."""
    for line in EDGES.split("\n")[1:-1]:
        weights, filters, kept = line.split("|")
        scores = tensor([[float(x) for x in weights.split()]]).log()
        k, p, min_p = (tensor([float(x)]) for x in filters.split())
        stays = scores >= threshold(scores, k.long(), p, min_p)
        assert stays[0].nonzero()[:, 0].tolist() == [int(x) for x in kept.split() if x < "9"], line


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
# Tokens: each path's token is one that float64 finds

STOPS = (2, 8, 11, 99, -3)
LIKELY = SamplingParams(top_p=0.5, seed=1)


def random_params(choose: random.Random, V: int, likely: list[int]) -> SamplingParams:
    """
    Half of the requests ask for one thing, so that nothing else hides it; the others for several.
    """
    c = choose.choice
    several = {
        "top_k": c([1, 2, 5, 50, V - 1, V, 2**31 - 1]),
        "top_p": c([0.1, 0.5, 0.9, 0.99]),
        "min_p": c([0.02, 0.1, 0.5, 1]),
        "presence_penalty": c([-1.0, 1.0]),
        "frequency_penalty": c([-0.5, 0.7]),
        "repetition_penalty": c([0.5, 1.3]),
        "logit_bias": c([{0: 5, V // 2: -5}, {likely[0]: -3.5}]),
        "min_tokens": 4,
    }
    names = choose.sample(sorted(several), c([1, 1, 1, 2, 3, len(several)]))
    return SamplingParams(c([0, 0.3, 0.7, 1, 1.7, 2]), **{name: several[name] for name in names})


def random_requests(R: int, V: int, dtype, seed: int) -> tuple[torch.Tensor, list[Row]]:
    """Logits [R, V] and requests; some rows are flat, some steep, and bf16 has many ties."""
    choose, requests = random.Random(seed), []
    logits = (randn(R, V, seed=seed) * tensor([[0.3], [1.0], [3.0]]).repeat(R, 1)[:R]).to(dtype)
    for row, best in enumerate(logits.topk(min(V, 4)).indices.tolist()):
        # the tokens that a penalty or a ban must change
        prompt, generated = (choose.choices(best, k=choose.randrange(5)) for _ in range(2))
        params, key = random_params(choose, V, best), choose.getrandbits(64) - 2**63
        stops = best[0], V - 1, V + 7
        requests.append(Row(row, params, key, row % 3, prompt, generated, stops))
    return logits, requests


def check_tokens(pick, R: int, V: int, dtype, seed: int):
    """In any order of rows; the rows remember their tokens and count them."""
    logits, requests = random_requests(R, V, dtype, seed)
    rows, order = filled(V, requests), random.Random(seed).sample(range(R), R)
    position = [len(r.prompt_tokens) + len(r.generated_tokens) for r in requests]
    positions = tensor([position[row] for row in order])
    tokens = pick(logits[order], tensor(order), positions, rows).tolist()
    assert rows.last_token[order].tolist() == [max(token, 0) for token in tokens]
    for row, token in zip(order, tokens, strict=True):
        _, params, key, choice, prompt, generated, stops = requests[row]
        texts = {"prompt": prompt, "generated": generated, "stops": stops}
        possible = possible_tokens(
            logits[row], params, position[row], seed=key, choice=choice, **texts
        )
        assert token in possible, f"{token}, in float64 {possible}: {requests[row]}"
        if params.penalises:
            text = [*generated, token] if token >= 0 else generated
            count = torch.tensor(text, dtype=torch.int64).bincount(minlength=V)
            assert torch.equal(rows.marks[row].cpu() >> 2, count), f"{requests[row]} got {token}"


@both_paths
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("R", "V", "dtype", "width", "quads"),
    [
        (24, 2, torch.float32, 2048, 256),
        (24, 5, torch.bfloat16, 2048, 256),
        (24, 127, torch.float32, 64, 16),
        (20, 1000, torch.bfloat16, 512, 128),
        (12, 301, torch.float16, 128, 32),
    ],
)
def test_every_token_is_one_that_the_rules_allow(monkeypatch, pick, R, V, dtype, width, quads):
    """
    Whatever is mixed. Where float64 finds several, because rounding decides, either is right. min_p
    or top_p applied as if every temperature were 1 changed a third of the tokens at 1.7.
    """
    shrink_tiles(monkeypatch, width, quads)
    before = oracle.counts.copy()
    check_tokens(pick, R, V, dtype, seed=0)
    new = oracle.counts - before
    assert new["ties"] <= new["tokens"] / 4, f"{new}: what is compared must be decided"


@pytest.mark.slow
@both_paths
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_is_allowed_at_length(pick, dtype):
    """With the tiles of a GPU, vocabularies up to GPT-2's, and many more mixtures."""
    many = 160 if DEVICE == "cuda" else 3  # the interpreter takes a second a row
    for R, V in (1, 50257), (3, 50257), (40, 1000), (7, 4099), (64, 127), (200, 5), (200, 2):
        for seed in range(-(-many // R)):
            check_tokens(pick, R, V, dtype, 100 + seed)


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


@both_paths
@pytest.mark.parametrize("chosen", [[*range(8)], [7, 2, 5, 0, 3], [1, 2], [6, 1], [3, 3, 3]])
def test_a_mixed_batch_equals_each_request_alone(pick, chosen):
    """
    Parameters by batch position instead of by row, a filter or a temperature that spills over to a
    neighbour.
    """
    rows, asked = rows_of(MIXED, 101), [MIXED[i] for i in chosen]
    for position in range(2 if pick is not sampling.sample_torch else 40):
        logits, at = 3 * randn(8, 101, seed=position), tensor([position])
        together = pick(logits[chosen], tensor(chosen), at.repeat(len(chosen)), rows, asked)
        for i, token in zip(chosen, together.tolist(), strict=True):
            p = MIXED[i]
            alone = pick(logits[i : i + 1], tensor([0]), at, rows_of([p], 101), [p])
            assert alone.item() == token and token in possible_tokens(logits[i], p, position)


@both_paths
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        *[({"temperature": x}, 1) for x in (0, 1e-300, 1e-45, 1e-40, 1e-38, 1e-6)],
        *[({"temperature": x, "top_p": 0.5}, 1) for x in (1e-40, 1e-6)],
        *[({name: x}, 1) for name, x in (("top_k", 1), ("top_p", 1e-300), ("min_p", 1))],
        ({"temperature": 0, "repetition_penalty": 1e-300}, 1),
        ({"temperature": 0, "repetition_penalty": 10}, 2),
    ],
)
def test_numbers_that_leave_one_token(pick, fields, expected):
    """
    Beyond single precision: divided by 1e-40 all positive logits are infinite, and the first of
    them won; a top_p of 0 dropped all tokens; a logit over a penalty of 0 is no number.
    """
    params, logits = SamplingParams(**fields), tensor([[0.0, 5.0, 3.0, -2.0]])
    rows = filled(4, [Row(i, params, i, 0, [1, 3], [0]) for i in range(20)])
    tokens = pick(logits.expand(20, -1), arange(20), arange(20) + 3, rows, [params] * 20)
    assert tokens.tolist() == [expected] * 20


@both_paths
def test_a_tie_goes_to_the_lowest_token(monkeypatch, pick):
    """
    A reduction in the order of arrival makes greedy answers differ from run to run. Within a lane,
    a tile and a program there are ties here, and between programs.
    """
    shrink_tiles(monkeypatch, width=64, quads=16)
    for dtype in torch.float32, torch.bfloat16, torch.float16:
        logits = torch.zeros(3, 300, device=DEVICE, dtype=dtype)
        logits[0, [299, 131, 130]], logits[1, [64, 7, 298]] = 2.0, 2.0
        tokens = pick(logits, arange(3), arange(3), rows_of([GREEDY] * 3, 300), [GREEDY] * 3)
        assert tokens.tolist() == [130, 7, 0]


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
    tokens = sampling_kernels.sample_triton(logits, arange(12), arange(12), rows_of(params, 64))
    for i, token in enumerate(tokens.tolist()):
        assert token in possible_tokens(logits[i], params[i], i)


@both_paths
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    "params", [GREEDY, LIKELY, SamplingParams(top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0)]
)
def test_a_row_without_a_finite_maximum_gives_no_token(pick, params):
    """
    A model that overflowed went on with token 0, or with the NaN's place, without an error.
    """
    logits, infinity = randn(6, 50, seed=3), torch.inf
    logits[0, 49], logits[1], logits[2, 5] = torch.nan, -infinity, infinity
    logits[3, :49], logits[4, [0, 17]] = -infinity, torch.nan
    rows = rows_of([params] * 6, 50)
    *tokens, last = pick(logits, arange(6), arange(6), rows, [params] * 6).tolist()
    assert tokens == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 49, NO_TOKEN] and 0 <= last < 50
    counted = (rows.marks >> 2).sum(1).tolist()
    assert counted == ([0, 0, 0, 1, 0, 1] if params.penalises else [0] * 6)


# --------------------------------------------------------------------------------------------------
# Bias, bans, penalties

ADJUSTED = [
    GREEDY,
    replace(GREEDY, presence_penalty=1.5),
    replace(GREEDY, presence_penalty=-2.0),
    replace(GREEDY, frequency_penalty=0.7),
    replace(GREEDY, repetition_penalty=1.9),
    replace(GREEDY, repetition_penalty=0.4),
    replace(GREEDY, logit_bias={3: 1.0, 5: -100, 0: 0.25}),
    replace(GREEDY, logit_bias={9: 2.5, 1: 100.0}, min_tokens=3),
    replace(GREEDY, presence_penalty=0.3, frequency_penalty=-0.4, repetition_penalty=1.2),
    replace(GREEDY, frequency_penalty=0.2, logit_bias={1: 1.5}, min_tokens=4),
]


@both_paths
def test_penalties_bias_and_bans_follow_a_text_token_by_token(pick):
    """
    Greedy texts of 12 tokens: the prompt counted for presence or not for repetition, a count that
    lags, a ban that ends a token early. Half way every request is preempted and set anew, in the
    row of another, whose bias and counts must be gone.
    """
    prompt, texts = [1, 2, 2, 7], [[] for _ in ADJUSTED]
    places, rows = arange(len(ADJUSTED)), SamplingRows(len(ADJUSTED), 12, DEVICE)
    logits = (0.7 * randn(12, 12, seed=5)).round(decimals=2)  # close together: every rule matters
    for step in range(12):
        if step in (0, 6):
            places = places.flip(0)
            requests = zip(places.tolist(), ADJUSTED, texts, strict=True)
            rows.fill(*(Row(row, p, 0, 0, prompt, text, STOPS) for row, p, text in requests))
        at = torch.full_like(places, len(prompt) + step)
        tokens = pick(logits[step].expand(len(places), -1), places, at, rows, ADJUSTED)
        for p, text, token in zip(ADJUSTED, texts, tokens.tolist(), strict=True):
            scores = oracle.adjusted(logits[step], p, prompt, text, STOPS)
            assert scores[token] >= scores.max() - 1e-5, (p, text, token)
            text.append(token)
    unlike = {tuple(text) for text in texts}
    assert len(unlike) >= len(texts) - 1, "every rule must matter here, or nothing is shown"


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
    logits, requests = random_requests(48, 41, torch.float32, seed=3)
    positions = tensor([len(r.prompt_tokens) + len(r.generated_tokens) for r in requests])
    scores = adjust(logits.flip(0), arange(48).flip(0), positions.flip(0), filled(41, requests))
    for found, row, request in zip(scores.flip(0).cpu().double(), logits, requests, strict=True):
        _, params, _, _, prompt, generated, stops = request
        exact = oracle.adjusted(row, params, prompt, generated, stops)
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=2e-6)


@both_paths
def test_what_is_forbidden_is_never_chosen_however_likely(pick):
    """
    A ban that only takes 100 off a logit, as a bias may, holds until a model is sure of the token.
    """
    rows = filled(V, [Row(0, SamplingParams(min_tokens=12), 4, stop_token_ids=(4,))])
    logits, positions = LOGITS.clone(), tensor([0, 5, 11, 12])
    logits[4] = 1000.0
    *banned, free = pick(logits.expand(4, -1), 0 * positions, positions, rows).tolist()
    assert 4 not in banned and free == 4


def test_the_torch_path_skips_only_what_no_row_asks_for():
    """`asked` is a hint: with it or without, tokens and counts are the same."""
    for p in ADJUSTED:
        results = []
        for asked in [p, LIKELY], None:
            rows = filled(V, [Row(0, p, 0, 0, [1, 2, 2, 7], [0], (0, 1)), Row(1, LIKELY, 0)])
            logits, at = LOGITS.expand(2, -1), tensor([5, 5])
            tokens = sampling.sample_torch(logits, tensor([0, 1]), at, rows, asked)
            results.append((tokens.tolist(), rows.marks.tolist()))
        assert results[0] == results[1]


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
    rows, texts = SamplingRows(4, 1000, DEVICE), (5, 0, [1, 2], [3], [4])
    rows.fill(*(Row(i, SamplingParams(top_p=0.5, top_k=3 + i), *texts) for i in (1, 3, 2)))
    assert sizes == [7 * 3, 6 * 3] and rows.ints.top_k.tolist() == [0, 4, 5, 6]
    rows.fill(Row(1, SamplingParams(logit_bias={3: 1}, min_tokens=1), *texts))
    assert sizes[2:] == [1000, 1000, 7, 6]


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs and their streams")
def test_a_cuda_graph_serves_whatever_is_asked_later():
    """
    A decision on the host, a synchronisation or a new tensor for a row is frozen into the graph, or
    breaks it.
    """
    V, R = 50257, len(ADJUSTED)
    rows, places = rows_of([GREEDY] * R, V), arange(R)
    logits, positions = randn(R, V, seed=7).bfloat16(), places + 9
    sampling_kernels.sample_triton(logits, places, positions, rows)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampling_kernels.sample_triton(logits, places, positions, rows)
    drawn = {}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
    for i, fields in enumerate(drawn):
        other = SamplingRows(R, V, DEVICE)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for each in rows, other:
                for row, p in enumerate(ADJUSTED):
                    each.fill(Row(row, replace(p, **fields), row, i, [1, 2, 3], [4] * i, STOPS))
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
    best = expected.sort(descending=True).values[:, :n]
    torch.testing.assert_close(chosen.double(), expected[range(4), tokens], atol=1e-5, rtol=0)
    torch.testing.assert_close(top.double(), best, atol=1e-5, rtol=0)
    assert ids.shape == (4, n) and torch.equal(expected.gather(1, ids), best)


def test_logprobs_are_finite_whatever_the_logits():
    """
    No JSON has an infinity; a row that went wrong has no token, and must not break the others'.
    """
    logits = torch.zeros(4, 6, device=DEVICE)
    logits[0, 2], logits[1, :], logits[2, 3] = -torch.inf, torch.nan, torch.inf
    chosen, ids, top = sampling.logprobs(logits, tensor([2, NO_TOKEN, NO_TOKEN, 5]), 20)
    assert chosen[0] == LOWEST_LOGPROB == top.min()
    assert chosen.isfinite().all() and top.isfinite().all()
    assert chosen[3].item() == pytest.approx(-math.log(6)) and ids.shape == (4, 6)
