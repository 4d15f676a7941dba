"""
From logits to tokens, for a batch in which every request has its own parameters.

Randomness is a function, not a state: the noise of a token depends on the request's seed, its
position and the choice index, never on what else is in the batch. So the same request with the same
seed gives the same tokens, alone or in a crowd, preempted or not. Letters: R rows of logits, V
vocabulary.

    rows = SamplingRows(num_rows=4, vocab_size=V, device="cpu")
    rows.set(Row(2, SamplingParams(top_p=0.9), seed=7))
    tokens = sample(logits, torch.tensor([2]), positions, rows)     # logits [1, V], positions [1] -> [1]

Two paths, one meaning: torch's sorts and runs anywhere, Triton's is two launches whatever the batch
asks for, and decides on the device, so that a CUDA graph can hold it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kernels import INTERPRETED, early, jit, tl, triton, wait
from serving.params import GREEDY_BELOW, LOWEST_LOGPROB, SamplingParams


def upload(values, device, dtype=torch.int64, to: torch.Tensor | None = None) -> torch.Tensor:
    """
    Numbers of the host, a list, a tensor or an array of that type, on a device, in a tensor of
    their own or at the beginning of `to`. Nobody waits for it: that takes pinned memory.
    """
    host = torch.asarray(values, dtype=dtype)
    host = host.pin_memory() if torch.device(device).type == "cuda" else host
    return (
        host.to(device, non_blocking=True)
        if to is None
        else to[: len(host)].copy_(host, non_blocking=True)
    )


class Row(NamedTuple):
    """Who gets a row of `SamplingRows`."""

    row: int
    params: SamplingParams
    seed: int
    choice: int = 0  # which answer to its prompt, the first is 0
    prompt_tokens: Sequence[int] = ()
    generated_tokens: Sequence[int] = ()  # so far, after a preemption
    stop_token_ids: Iterable[int] = ()


class SamplingRows:
    """
    The parameters of every running request, and its last token, in device arrays, indexed by the
    request's row. The tensors stay the same for ever, for CUDA graphs know them by address. What a
    row does not ask for is never read, so never cleared either.
    """

    def __init__(self, num_rows: int, vocab_size: int, device):
        self.floats = torch.zeros(num_rows, 6, device=device)
        self.ints = torch.zeros(num_rows, 6, dtype=torch.int64, device=device)
        self.bias = torch.zeros(num_rows, vocab_size, device=device)  # -inf: not allowed
        # of each token: 4 * times generated + 2 if a stop token + 1 if in the prompt
        self.marks = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(
            num_rows, dtype=torch.int64, device=device
        )  # the next input of a decode
        # views of the columns, each [num_rows]; kernels read them by number
        self.temperature, self.top_p, self.min_p, self.repetition, self.frequency, self.presence = (
            self.floats.unbind(1)
        )
        self.top_k, self.seed, self.choice, self.stop_from, self.biased, self.penalised = (
            self.ints.unbind(1)
        )

    def set(self, *requests: Row):
        """
        Give rows to requests: two small uploads for all of them, and one of V numbers each for bias
        and marks of those that ask for them. Nobody waits.
        """
        device, V = self.floats.device, self.bias.shape[1]
        floats, ints = [], []
        for row, p, seed, choice, prompt_tokens, generated_tokens, stop_token_ids in requests:
            # the position of the first token that may be a stop token
            stop_from = len(prompt_tokens) + p.min_tokens if p.min_tokens else 0
            repetition = max(p.repetition_penalty, 1e-6)  # below, logits would overflow
            floats.append(
                (
                    p.temperature,
                    p.top_p,
                    p.min_p,
                    repetition,
                    p.frequency_penalty,
                    p.presence_penalty,
                )
            )
            ints.append((row, p.top_k, seed, choice, stop_from, p.biases, p.penalises))
            if p.biases:
                bias = torch.zeros(V)
                if p.allowed_token_ids is not None:
                    allowed = torch.asarray(p.allowed_token_ids, dtype=torch.int64)
                    bias.fill_(-torch.inf)[allowed] = 0.0
                if p.logit_bias:
                    tokens = torch.tensor(list(p.logit_bias))
                    bias[tokens] += torch.tensor(list(p.logit_bias.values()), dtype=bias.dtype)
                self.bias[row] = upload(bias, device, bias.dtype)
            if p.penalises or stop_from:
                stops = [t for t in set(stop_token_ids) if 0 <= t < V]
                marks = 4 * torch.tensor(generated_tokens, dtype=torch.int64).bincount(minlength=V)
                marks[torch.tensor(prompt_tokens, dtype=torch.int64)] += (
                    1  # once, however often it is there
                )
                marks[torch.tensor(stops, dtype=torch.int64)] += 2
                self.marks[row] = upload(marks, device, torch.int32)
        rows, ints = upload(ints, device).split((1, 6), dim=1)
        self.floats[rows[:, 0]] = upload(floats, device, torch.float32)
        self.ints[rows[:, 0]] = ints


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: SamplingRows,
    asked=None,
) -> torch.Tensor:
    """
    Pick a token for each row of logits [R, V] (fp32, bf16 or fp16): argmax of logits / temperature
    + Gumbel noise, over the tokens that the filters keep, is a sample of the softmax (the
    Gumbel-max trick, Gumbel 1954). rows [R] are the requests' rows in `params`, positions [R] the
    places of the new tokens in their texts; `asked`, the SamplingParams of the rows, lets the host
    of the torch path skip what nobody asked for. Returns [R] int64: ties go to the lowest token,
    and a row without a finite maximum (NaN anywhere, all -inf) gives -1. The rows remember their
    last token (0 for -1), those that are penalised count all of them.
    """
    path = sample_triton if triton and logits.is_cuda else sample_torch
    return path(logits, rows, positions, params, asked)


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Log-softmax of the raw logits [R, V], before temperature and penalties: of the chosen tokens [R]
    -> [R] fp32, and the n largest, [R, n] token ids and [R, n] fp32, best first, LOWEST_LOGPROB at least.
    """
    total = logits.float().logsumexp(-1, keepdim=True)
    top, top_ids = logits.topk(min(n, logits.shape[-1]))
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])

    def relative(x):
        return (x.float() - total).nan_to_num(LOWEST_LOGPROB).clamp(LOWEST_LOGPROB, 0.0)

    return relative(chosen)[:, 0], top_ids, relative(top)


# --------------------------------------------------------------------------------------------------
# torch


def sample_torch(logits, rows, positions, params: SamplingRows, asked=None) -> torch.Tensor:
    """`sample` on any device; the filters sort."""

    def anybody(wants) -> bool:
        return asked is None or any(wants(p) for p in asked)

    scores = logits.float()
    if anybody(lambda p: p.biases or p.penalises or p.min_tokens):
        scores = adjust(scores, rows, positions, params)
    if anybody(lambda p: p.temperature > 0):
        temperature = params.temperature[rows][:, None]  # [R, 1]
        greedy = temperature < GREEDY_BELOW
        scores = scores / torch.where(greedy, 1.0, temperature)
        if anybody(lambda p: p.filters):
            scores = drop_unlikely(
                scores, params.top_k[rows], params.top_p[rows], params.min_p[rows]
            )
        noise = gumbel_noise(params.seed[rows], positions, params.choice[rows], scores.shape[-1])
        scores = torch.where(greedy, scores, scores + noise)
    best, tokens = scores.max(-1)
    valid = best.isfinite()
    if anybody(lambda p: p.penalises):
        at = rows * params.marks.shape[1] + tokens
        params.marks.view(-1).scatter_add_(0, at, (4 * params.penalised[rows] * valid).int())
    params.last_token[rows] = torch.where(valid, tokens, 0)
    return torch.where(valid, tokens, -1)


def adjust(
    scores: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: SamplingRows
) -> torch.Tensor:
    """
    scores [R, V] fp32 after bias, ban of stop tokens and penalties; the formulas are vLLM's. What
    is forbidden is added as -inf, so that a NaN stays one.
    """
    marks = params.marks[rows]
    count = marks >> 2
    scores = scores + torch.where(params.biased[rows][:, None] > 0, params.bias[rows], 0.0)
    banned = (marks & 2 > 0) & (positions < params.stop_from[rows])[:, None]
    scores = scores + torch.where(banned, -torch.inf, 0.0)
    repetition = torch.where((marks & 1) + count > 0, params.repetition[rows][:, None], 1.0)
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = scores - params.frequency[rows][:, None] * count
    return scores - params.presence[rows][:, None] * (count > 0)


def threshold(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """
    The least score [R] that the filters [R] keep, of scores [R, V]: the largest of three. top_k:
    the k-th largest score. top_p (Holtzman et al. 2020): the score of the last token needed for
    that share of what top_k keeps. min_p (Nguyen et al. 2024): the largest score + log(min_p). Ties
    with the threshold stay, so the best token always does.
    """
    ranked, V = scores.sort(dim=-1, descending=True).values, scores.shape[-1]
    k = torch.where(top_k > 0, top_k, V).clamp(max=V)[:, None]
    kth, top = ranked.gather(1, k - 1), ranked[:, :1]  # [R, 1]
    weights = (ranked - top).exp().masked_fill(ranked < kth, 0.0)
    mass = weights.cumsum(-1)
    needed = (
        mass - weights < top_p[:, None] * mass[:, -1:]
    )  # what the more likely tokens have is not enough
    pth = ranked.gather(1, needed.sum(-1, keepdim=True).clamp(min=1) - 1)
    pth = torch.where(
        top_p[:, None] < 1, pth, -torch.inf
    )  # rounded sums reach 1 before the last token
    return torch.maximum(torch.maximum(kth, pth), top + min_p.log()[:, None])[:, 0]


def drop_unlikely(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """scores [R, V] with -inf below the threshold of the filters [R]."""
    return scores.masked_fill(scores < threshold(scores, top_k, top_p, min_p)[:, None], -torch.inf)


# --------------------------------------------------------------------------------------------------
# Noise: Philox4x32-10, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as
# easy as 1, 2, 3")

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
ROUNDS = 10


def philox(counter: tuple, key: tuple) -> tuple:
    """
    Four random words from four 32-bit counter words and two key words, all int64 tensors that
    broadcast. Words 0 and 2 go through a round alike, and so do 1 and 3: each pair is one tensor,
    which halves the operations.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    even, odd = torch.stack([c0, c2]), torch.stack([c1, c3])  # [2, ...]

    def pair(words):  # two numbers as [2, 1, ...]
        return torch.tensor(words, device=even.device).view(2, *[1] * (even.dim() - 1))

    multipliers, steps, key = (
        pair(MULTIPLIERS),
        pair(KEY_STEPS),
        torch.stack(torch.broadcast_tensors(*key)),
    )
    round_keys = [(key + i * steps) & MASK32 for i in range(ROUNDS)]
    for round_key in round_keys:
        product = even * multipliers  # 64 bits; the sign bit is a bit like any other
        even = ((product >> 32) & MASK32).flip(0) ^ odd ^ round_key
        odd = (product & MASK32).flip(0)
    return even[0], odd[0], even[1], odd[1]


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, V: int
) -> torch.Tensor:
    """
    Standard Gumbel noise [R, V] fp32 for seeds, positions and choices [R] int64. Key: the seed.
    Counter: (token id // 4, position, choice, 0); token id t takes word t % 4. A word's upper 23
    bits are a u in (0, 1), exact in fp32.
    """
    seeds, positions, choices = seeds[:, None], positions[:, None].long(), choices[:, None]
    quads = torch.arange(math.ceil(V / 4), device=seeds.device)  # [V / 4]
    counter = (quads, positions & MASK32, choices & MASK32, torch.zeros_like(positions))
    words = philox(counter, (seeds & MASK32, (seeds >> 32) & MASK32))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :V]  # [R, V / 4, 4] -> [R, V]
    u = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


# --------------------------------------------------------------------------------------------------
# Triton: the same in two launches, without sorting; what a row did not ask for is skipped on the
# device

GREEDY_BELOW_IN_KERNELS: tl.constexpr = tl.constexpr(GREEDY_BELOW)


@jit
def source_of(r, logits, rows, positions, floats, ints, bias, marks, stride, V):
    """
    Row r of logits and what is asked of it, as load_scores wants them; the pointers are the row's
    own.
    """
    row = tl.load(rows + r)
    floats, ints, logits = floats + row * 6, ints + row * 6, logits + r.to(tl.int64) * stride
    banned = tl.load(positions + r) < tl.load(ints + 3)
    biased, penalised = tl.load(ints + 4) != 0, tl.load(ints + 5) != 0
    return logits, floats, ints, bias + row * V, marks + row * V, V, biased, banned, penalised


@jit
def load_scores(source, t):
    """
    Logits of tokens t, fp32, after bias, ban of stop tokens and penalties, as `adjust`; -inf beyond
    the last.
    """
    logits, floats, _, bias, marks, V, biased, banned, penalised = source
    score = tl.load(logits + t, mask=t < V, other=-float("inf")).to(tl.float32)
    if biased:
        score += tl.load(bias + t, mask=t < V, other=0.0)
    if banned | penalised:
        mark = tl.load(marks + t, mask=t < V, other=0)
        count = mark >> 2
        score += tl.where(((mark & 2) > 0) & banned, -float("inf"), 0.0)
        repetition = tl.where((mark & 1) + count > 0, tl.load(floats + 3), 1.0)
        score = tl.where(score > 0, score / repetition, score * repetition)
        score -= tl.load(floats + 4) * count.to(tl.float32) + tl.where(
            count > 0, tl.load(floats + 5), 0.0
        )
    return score


@jit
def survey(
    scores, n, low, high, p1, p2, p3, top, rate, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr
):
    """
    One pass over n scores: how much lies at or above three pivots, counted or, if WEIGHTED, as the
    sum of 2^((score - top) * rate); and the least score from `low` on, the largest below `high`.
    """
    f1, f2, f3 = (
        tl.zeros([WIDTH], tl.float32),
        tl.zeros([WIDTH], tl.float32),
        tl.zeros([WIDTH], tl.float32),
    )
    least, most = (
        tl.full([WIDTH], float("inf"), tl.float32),
        tl.full([WIDTH], -float("inf"), tl.float32),
    )
    for start in range(0, n, WIDTH):
        score = tl.load(scores + start + tl.arange(0, WIDTH))
        weight = tl.exp2((score - top) * rate) if WEIGHTED else 1.0
        f1 += tl.where(score >= p1, weight, 0.0)
        f2 += tl.where(score >= p2, weight, 0.0)
        f3 += tl.where(score >= p3, weight, 0.0)
        least = tl.minimum(least, tl.where(score >= low, score, float("inf")))
        most = tl.maximum(most, tl.where(score < high, score, -float("inf")))
    return (
        tl.sum(f1, axis=0),
        tl.sum(f2, axis=0),
        tl.sum(f3, axis=0),
        tl.min(least, axis=0),
        tl.max(most, axis=0),
    )


@jit
def search(scores, n, least, top, wanted, rate, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr):
    """
    The largest of n scores, among `least` .. `top`, that has at least `wanted` at or above it. A
    pass quarters the bracket low <= answer < high, and finds the scores at the ends of the one
    before; when these are one, that is it.
    """
    low, high, most, rounds = least, top + float("inf"), top, 0
    while (least < most) & (
        rounds < 300
    ):  # floats have 2^8 binades: 300 are never needed, but nothing may hang
        step = most * 0.25 - least * 0.25
        p1, p2, p3 = least + step, least + 2 * step, least + 3 * step
        f1, f2, f3, least, most = survey(
            scores, n, low, high, p1, p2, p3, top, rate, WEIGHTED, WIDTH
        )
        low = tl.where(
            f3 >= wanted, p3, tl.where(f2 >= wanted, p2, tl.where(f1 >= wanted, p1, low))
        )
        high = tl.where(f1 < wanted, p1, tl.where(f2 < wanted, p2, tl.where(f3 < wanted, p3, high)))
        least, most = tl.maximum(least, low), tl.minimum(most, high)
        rounds += 1
    return least


@jit
def collect(source, V, floor, scores, WIDTH: tl.constexpr):
    """
    Write a row's scores from `floor` on to `scores`: each lane piles up its own, so no lane waits
    for another, and the piles are filled up with -inf to the highest of them. Returns how many
    scores there are now, with these.
    """
    lane = tl.arange(0, WIDTH)
    height = tl.zeros([WIDTH], tl.int32)
    for start in range(0, V, WIDTH):
        score = load_scores(source, start + lane)
        tl.store(scores + height * WIDTH + lane, score, mask=score >= floor)
        height += (score >= floor).to(tl.int32)
    highest = tl.max(height, axis=0)
    for i in range(0, highest):
        tl.store(
            scores + i * WIDTH + lane, tl.full([WIDTH], -float("inf"), tl.float32), mask=i >= height
        )
    tl.debug_barrier()  # other threads may read them
    return highest * WIDTH


@jit
def threshold_kernel(
    logits, rows, positions, floats, ints, bias, marks, thresholds, arrived, scratch, stride, scratch_stride, V,
    WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """
    Grid (R,): a program finds the least score that the filters of its row keep, as `threshold` but
    before the temperature; -inf where there is nothing to filter. Two or three passes over the row
    leave only the scores that come into question, in its `scratch`, and these are searched.
    """
    wait(EARLY)
    r, lane = tl.program_id(0), tl.arange(0, WIDTH)
    source = source_of(r, logits, rows, positions, floats, ints, bias, marks, stride, V)
    floats, scratch = source[1], scratch + r.to(tl.int64) * scratch_stride
    temperature, top_p, min_p, k = (
        tl.load(floats),
        tl.load(floats + 1),
        tl.load(floats + 2),
        tl.load(source[2]),
    )
    limited = (k > 0) & (k < V)
    tl.store(arrived + r, 0)
    tl.store(thresholds + r, -float("inf"))
    if (temperature < GREEDY_BELOW_IN_KERNELS) | ((top_p >= 1) & (min_p <= 0) & (limited == 0)):
        return

    peak, least = (
        tl.full([WIDTH], -float("inf"), tl.float32),
        tl.full([WIDTH], float("inf"), tl.float32),
    )
    for start in range(0, V, WIDTH):
        score = load_scores(source, start + lane)
        peak = tl.maximum(peak, score)
        least = tl.minimum(least, tl.where(score > -float("inf"), score, float("inf")))
    top, floor = tl.max(peak, axis=0), tl.min(least, axis=0)
    floor = tl.where(
        top < float("inf"), floor, top
    )  # an infinite row has no token: leave nothing to search
    rate = 1.4426950408889634 / temperature  # log2(e): weights are powers of two
    if limited | (top_p < 1):
        mass = 0.0
        if limited:  # k lanes have a score as good as the k-th best lane's best
            if tl.sum((peak > -float("inf")).to(tl.int32), axis=0) >= k:
                tl.store(scratch + lane, peak)
                tl.debug_barrier()
                floor = search(scratch, WIDTH, floor, top, k.to(tl.float32), rate, False, WIDTH)
        else:  # V tokens of a weight below (1 - top_p) * mass / V cannot make up what top_p drops
            weights = tl.zeros([WIDTH], tl.float32)
            for start in range(0, V, WIDTH):
                score = load_scores(source, start + lane)
                weights += tl.exp2((score - top) * rate)
            mass = tl.sum(weights, axis=0)
            floor = tl.maximum(floor, top + (tl.log2((1 - top_p) * mass / V) - 0.01) / rate)
        n = collect(source, V, floor, scratch, WIDTH)
        if limited:
            floor = search(scratch, n, floor, top, k.to(tl.float32), rate, False, WIDTH)
            mass, _, _, _, _ = survey(
                scratch, n, floor, floor, floor, floor, floor, top, rate, True, WIDTH
            )
        if top_p < 1:  # of what top_k left
            floor = search(scratch, n, floor, top, top_p * mass, rate, True, WIDTH)
    if min_p > 0:
        floor = tl.maximum(floor, top + tl.log(min_p) * temperature)
    tl.store(thresholds + r, floor)


@jit
def four_words(seed, quad, position, choice):
    """
    The words of tokens 4 * quad .. 4 * quad + 3, uint32 each, as in gumbel_noise; tl.philox has the
    same rounds.
    """
    return tl.philox(seed, quad, position.to(tl.int32), choice.to(tl.int32), 0)


if triton and not INTERPRETED:
    from triton.language.extra.cuda.libdevice import fast_log2f as fast_log2
else:

    @jit
    def fast_log2(x):
        return tl.log2(x)


@jit
def gumbel(word):
    """
    As in gumbel_noise, of words uint32: -log(E) with E = -log(u). The chip's own logarithm is three
    times as fast as an exact one, but not good where u is close to 1, for the tokens that win:
    there E is a series in 1 - u.
    """
    v = ((~word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 1 - u, exactly; 2^-23
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6 + v / 7))))))
    minus_log_2: tl.constexpr = -0.6931471805599453
    return minus_log_2 * fast_log2(tl.where(v < 0.125, series, minus_log_2 * fast_log2(1.0 - v)))


@jit
def better(best, token, score, t, noise, inverse, floor):
    """
    The best score and its token so far, each lane its own, and tokens t. A NaN is better than all,
    as infinity.
    """
    score = tl.where(score < floor, -float("inf"), score * inverse + noise)
    score = tl.where(score == score, score, float("inf"))
    return tl.where(score > best, score, best), tl.where(score > best, t, token)


@jit
def pick_kernel(
    logits, rows, positions, floats, ints, bias, marks, thresholds, arrived,
    partial, partial_token, tokens, last_token, stride, V,
    SPLITS: tl.constexpr, QUADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """
    Grid (R, SPLITS): a program takes every SPLITS-th tile of a row, QUADS Philox calls with four
    tokens each. Whoever arrives last of a row picks the best of all, remembers and counts it;
    `arrived` is zero before.
    """
    wait(EARLY)
    r, split = tl.program_id(0), tl.program_id(1)
    source = source_of(r, logits, rows, positions, floats, ints, bias, marks, stride, V)
    _, floats, ints, _, marks, _, _, _, penalised = source
    seed, choice, position = tl.load(ints + 1), tl.load(ints + 2), tl.load(positions + r)
    temperature, floor = tl.load(floats), tl.load(thresholds + r)
    drawn = temperature >= GREEDY_BELOW_IN_KERNELS
    inverse = 1.0 / tl.where(drawn, temperature, 1.0)
    best, token = tl.full([QUADS], -float("inf"), tl.float32), tl.zeros([QUADS], tl.int32)
    for start in range(split * QUADS * 4, V, SPLITS * QUADS * 4):
        quad = start // 4 + tl.arange(0, QUADS)
        t, zero = 4 * quad, tl.zeros([QUADS], tl.float32)
        s0, s1 = load_scores(source, t), load_scores(source, t + 1)
        s2, s3 = load_scores(source, t + 2), load_scores(source, t + 3)
        n0, n1, n2, n3 = zero, zero, zero, zero
        noisy = drawn
        if floor > -float(
            "inf"
        ):  # noise is most of the work, and few tiles have a token that the filters keep
            noisy = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), axis=0) >= floor
        if noisy:
            w0, w1, w2, w3 = four_words(seed, quad, position, choice)
            n0, n1, n2, n3 = gumbel(w0), gumbel(w1), gumbel(w2), gumbel(w3)
        best, token = better(best, token, s0, t, n0, inverse, floor)
        best, token = better(best, token, s1, t + 1, n1, inverse, floor)
        best, token = better(best, token, s2, t + 2, n2, inverse, floor)
        best, token = better(best, token, s3, t + 3, n3, inverse, floor)
    most = tl.max(best, axis=0)
    tl.store(partial + r * SPLITS + split, most)
    tl.store(partial_token + r * SPLITS + split, tl.min(tl.where(best == most, token, V), axis=0))
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(arrived + r, 1, sem="acq_rel") == SPLITS - 1:
        part = r * SPLITS + tl.arange(0, SPLITS)
        scores = tl.load(partial + part, cache_modifier=".cg")  # from L2: L1 may be stale
        found = tl.load(partial_token + part, cache_modifier=".cg")
        most = tl.max(scores, axis=0)
        winner = tl.min(tl.where(scores == most, found, V), axis=0)  # of a tie the lowest
        valid = (most > -float("inf")) & (most < float("inf"))
        tl.store(tokens + r, tl.where(valid, winner, -1).to(tl.int64))
        tl.store(last_token + tl.load(rows + r), tl.where(valid, winner, 0).to(tl.int64))
        if valid & penalised:
            tl.atomic_add(marks + winner, 4)


WIDTH, THRESHOLD_WARPS = 2048, 16  # tokens a program of the threshold kernel takes at a time
QUADS, PICK_WARPS, PICK_PROGRAMS = (
    256,
    4,
    4096,
)  # of the pick kernel: four times what an H200 runs at a time


def sample_triton(logits, rows, positions, params: SamplingRows, asked=None) -> torch.Tensor:
    """
    `sample` on CUDA: two launches that depend on the shapes alone, so a graph of them serves
    whatever is asked.
    """
    R, V = logits.shape
    assert logits.stride(1) == 1, (
        f"logits have strides {logits.stride()}: wanted the scores of a row together"
    )
    assert params.bias.shape[1] == V, f"logits for {V} tokens, rows for {params.bias.shape[1]}"
    assert rows.is_contiguous() and positions.is_contiguous(), (
        "rows and positions must be contiguous"
    )
    quads = min(QUADS, triton.next_power_of_2(-(-V // 4)))
    splits = triton.next_power_of_2(max(1, min(PICK_PROGRAMS // max(1, R), -(-V // (4 * quads)))))
    thresholds, partial = (
        logits.new_empty(R, dtype=torch.float32),
        logits.new_empty(R * splits, dtype=torch.float32),
    )
    arrived, partial_token = (
        rows.new_empty(R, dtype=torch.int32),
        rows.new_empty(R * splits, dtype=torch.int32),
    )
    tokens = rows.new_empty(R, dtype=torch.int64)
    if R == 0:
        return tokens
    given = (
        logits,
        rows,
        positions,
        params.floats,
        params.ints,
        params.bias,
        params.marks,
        thresholds,
        arrived,
    )
    width = min(WIDTH, triton.next_power_of_2(V))
    scratch = thresholds.new_empty(
        R, -(-V // width) * width
    )  # fp32, of which little is ever written
    threshold_kernel[(R,)](
        *given, scratch, logits.stride(0), scratch.stride(0), V,
        WIDTH=width, num_warps=THRESHOLD_WARPS, **early(logits),
    )  # fmt: skip
    pick_kernel[(R, splits)](
        *given, partial, partial_token, tokens, params.last_token, logits.stride(0), V,
        SPLITS=splits, QUADS=quads, num_warps=PICK_WARPS, **early(logits),
    )  # fmt: skip
    return tokens
