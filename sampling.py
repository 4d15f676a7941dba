"""
From logits to tokens, for a batch in which every request has its own parameters.

Randomness is a function, not a state: the noise of a token depends on the request's seed, its position and the choice
index, never on what else is in the batch. So the same request with the same seed gives the same tokens, alone or in a
crowd, preempted or not. Letters: R rows of logits, V vocabulary.

    rows = SamplingRows(num_rows=4, vocab_size=V, device="cpu")
    rows.set(2, SamplingParams(top_p=0.9), seed=7, choice=0)
    tokens = sample(logits, torch.tensor([2]), positions, rows)     # logits [1, V], positions [1] -> [1]

Two paths, one meaning: torch's sorts and runs anywhere, Triton's is two launches whatever the batch asks for, and
decides on the device, so that a CUDA graph can hold it.
"""

import math
from dataclasses import dataclass

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # nothing but the Triton path needs it
    triton = None

    class tl:
        constexpr = int  # for the kernels' signatures


@dataclass(frozen=True)
class SamplingParams:
    """
    How one request is continued. Applied in this order: logit_bias and allowed_token_ids, min_tokens, the penalties
    (repetition, frequency, presence), temperature, top_k, top_p, min_p. Raises ValueError.
    """

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # sample among the k most likely tokens, and those that tie with the last; 0: among all
    top_p: float = 1.0  # sample among the most likely tokens that together have this probability
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # go on after the end-of-text token
    seed: int | None = None  # 64 bits; None: the engine draws one
    presence_penalty: float = 0.0  # taken off the logit of each token that was generated,
    frequency_penalty: float = 0.0  # once more for each time it was
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens in prompt or answer
    logit_bias: dict[int, float] | None = None  # added to the logits of these tokens
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is ever chosen
    min_tokens: int = 0  # no stop token before so many tokens
    logprobs: int | None = None  # how many log-probabilities are wanted besides the chosen token's; None: not even that

    def __post_init__(self):
        number = int | float
        self._require("temperature", number, lambda x: 0 <= x <= 2, "a number from 0 (greedy) to 2")
        self._require("top_k", int, lambda x: 0 <= x < 2**31, "a whole number, 0 for all tokens")
        self._require("top_p", number, lambda x: 0 < x <= 1, "a number above 0, up to 1")
        self._require("min_p", number, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        self._require("max_tokens", int, lambda x: x >= 1, "a whole number, at least 1")
        self._require("stop_token_ids", tuple | list, lambda x: all(type(t) is int for t in x), "a tuple of token ids")
        self._require("ignore_eos", bool, lambda x: True, "True or False")
        self._require("presence_penalty", number, lambda x: -2 <= x <= 2, "a number from -2 to 2")
        self._require("frequency_penalty", number, lambda x: -2 <= x <= 2, "a number from -2 to 2")
        self._require("repetition_penalty", number, lambda x: 0 < x < math.inf, "a finite number above 0")
        self._require("min_tokens", int, lambda x: 0 <= x <= self.max_tokens, "a whole number, 0 to max_tokens")
        if self.seed is not None:
            self._require("seed", int, lambda x: -(2**63) <= x < 2**63, "a whole number of 64 bits, or None")
        if self.logit_bias is not None:
            self._require("logit_bias", dict, is_bias, "a dict from token ids to numbers from -100 to 100, or None")
        if self.allowed_token_ids is not None:
            wanted = "a tuple of token ids, at least one, or None"
            self._require("allowed_token_ids", tuple | list, lambda x: x and all(type(t) is int for t in x), wanted)
        if self.logprobs is not None:
            self._require("logprobs", int, lambda x: 0 <= x <= 20, "a whole number, 0 to 20, or None")

    def _require(self, name: str, kind, in_range, wanted: str):
        value = getattr(self, name)
        misfit = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if misfit or not in_range(value):
            raise ValueError(f"{name} is {value!r}; it must be {wanted}")

    def check_vocabulary(self, V: int):
        """Raises ValueError for a token id outside 0..V-1 among those that must exist."""
        for name in "logit_bias", "allowed_token_ids":
            for t in getattr(self, name) or ():
                if not 0 <= t < V:
                    raise ValueError(f"{name} has token {t}, outside 0..{V - 1}: leave it out")

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def biases(self) -> bool:
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def filters(self) -> bool:
        return bool(self.top_k or self.top_p < 1 or self.min_p)


def is_bias(bias: dict) -> bool:
    values = [x for x in bias.values() if isinstance(x, int | float) and not isinstance(x, bool)]
    return all(type(t) is int for t in bias) and len(values) == len(bias) and all(-100 <= x <= 100 for x in values)


GREEDY = SamplingParams(temperature=0.0)
ALMOST_GREEDY = 1e-5  # temperatures below are 0: dividing by less would overflow


class SamplingRows:
    """
    The parameters of every running request in device arrays, indexed by the request's row. The tensors stay the same
    for ever, for CUDA graphs know them by address. What a row does not ask for is never read, so never cleared either.
    """

    def __init__(self, num_rows: int, vocab_size: int, device):
        self.floats = torch.zeros(num_rows, 6, device=device)
        self.ints = torch.zeros(num_rows, 6, dtype=torch.int64, device=device)
        self.bias = torch.zeros(num_rows, vocab_size, device=device)  # -inf: not allowed
        # of each token: 4 * times generated + 2 if a stop token + 1 if in the prompt
        self.marks = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        # views of the columns, each [num_rows]; kernels read them by number
        self.temperature, self.top_p, self.min_p, self.repetition, self.frequency, self.presence = self.floats.unbind(1)
        self.top_k, self.seed, self.choice, self.stop_from, self.biased, self.penalised = self.ints.unbind(1)

    def set(
        self, row: int, params: SamplingParams, seed: int, choice: int,
        prompt_tokens=(), generated_tokens=(), stop_token_ids=(),
    ):  # fmt: skip
        """
        Give a row to a request, the choice-th fork of its prompt: two small copies to the device, and one of V numbers
        each for bias and marks if it asks for them. Nobody waits. generated_tokens: so far, after a preemption.
        """
        p, stop_from = params, 0
        if p.min_tokens:  # the position of the first token that may be a stop token
            stop_from = len(prompt_tokens) + p.min_tokens
        repetition = min(max(p.repetition_penalty, 1e-6), 1e6)  # beyond, logits would overflow
        penalties = repetition, p.frequency_penalty, p.presence_penalty
        self._upload(self.floats[row], [p.temperature, p.top_p, p.min_p, *penalties])
        self._upload(self.ints[row], [p.top_k, seed, choice, stop_from, p.biases, p.penalises])
        V = self.bias.shape[1]
        if p.biases:
            bias = torch.zeros(V)
            if p.allowed_token_ids is not None:
                bias.fill_(-torch.inf)[list(p.allowed_token_ids)] = 0.0
            for token, value in (p.logit_bias or {}).items():
                bias[token] += value
            self._upload(self.bias[row], bias)
        if p.penalises or stop_from:
            stops = [t for t in set(stop_token_ids) if 0 <= t < V]
            marks = 4 * torch.tensor(generated_tokens, dtype=torch.int64).bincount(minlength=V)
            marks[torch.tensor(prompt_tokens, dtype=torch.int64)] += 1  # once, however often it is there
            marks[torch.tensor(stops, dtype=torch.int64)] += 2
            self._upload(self.marks[row], marks)

    @staticmethod
    def _upload(to: torch.Tensor, values):
        """Fill `to` from the host without waiting for the device: that takes pinned memory."""
        host = torch.as_tensor(values, dtype=to.dtype)
        to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


def sample(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: SamplingRows, asked=None
) -> torch.Tensor:
    """
    Pick a token for each row of logits [R, V] (fp32, bf16 or fp16): argmax of logits / temperature + Gumbel noise, over
    the tokens that the filters keep, is a sample of the softmax (the Gumbel-max trick, Gumbel 1954). rows [R] are the
    requests' rows in `params`, positions [R] the places of the new tokens in their texts; `asked`, the SamplingParams
    of the rows, lets the host of the torch path skip what nobody asked for. Returns [R] int64: ties go to the lowest
    token, and a row without a finite maximum (NaN anywhere, all -inf) gives -1. Counts the tokens of penalised rows.
    """
    path = sample_torch
    return path(logits, rows, positions, params, asked)


FLOOR = -9999.0  # JSON knows no infinity


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Log-softmax of the raw logits [R, V], before temperature and penalties: of the chosen tokens [R] -> [R] fp32, and
    the n largest, [R, n] token ids and [R, n] fp32, best first. At least FLOOR.
    """
    total = logits.float().logsumexp(-1, keepdim=True)
    top, top_ids = logits.topk(min(n, logits.shape[-1]))
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])

    def relative(x):
        return (x.float() - total).nan_to_num(FLOOR).clamp(FLOOR, 0.0)

    return relative(chosen)[:, 0], top_ids, relative(top)


# ----------------------------------------------------------------------------------------------------------------------
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
        greedy = temperature < ALMOST_GREEDY
        scores = scores / torch.where(greedy, 1.0, temperature)
        if anybody(lambda p: p.filters):
            scores = drop_unlikely(scores, params.top_k[rows], params.top_p[rows], params.min_p[rows])
        noise = gumbel_noise(params.seed[rows], positions, params.choice[rows], scores.shape[-1])
        scores = torch.where(greedy, scores, scores + noise)
    best, tokens = scores.max(-1)
    valid = best.isfinite()
    if anybody(lambda p: p.penalises):
        at = rows * params.marks.shape[1] + tokens
        params.marks.view(-1).scatter_add_(0, at, (4 * params.penalised[rows] * valid).int())
    return torch.where(valid, tokens, -1)


def adjust(scores: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    """
    scores [R, V] fp32 after bias, ban of stop tokens and penalties; the formulas are vLLM's. What is forbidden is
    added as -inf, so that a NaN stays one.
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


def threshold(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """
    The least score [R] that the filters [R] keep, of scores [R, V]: the largest of three. top_k: the k-th largest
    score. top_p (Holtzman et al. 2020): the score of the last token needed for that share of what top_k keeps. min_p
    (Nguyen et al. 2024): the largest score + log(min_p). Ties with the threshold stay, so the best token always does.
    """
    ranked, V = scores.sort(dim=-1, descending=True).values, scores.shape[-1]
    k = torch.where(top_k > 0, top_k, V).clamp(max=V)[:, None]
    kth, top = ranked.gather(1, k - 1), ranked[:, :1]  # [R, 1]
    weights = (ranked - top).exp().masked_fill(ranked < kth, 0.0)
    mass = weights.cumsum(-1)
    needed = mass - weights < top_p[:, None] * mass[:, -1:]  # what the more likely tokens have is not enough
    pth = ranked.gather(1, needed.sum(-1, keepdim=True).clamp(min=1) - 1)
    pth = torch.where(top_p[:, None] < 1, pth, -torch.inf)  # rounded sums reach 1 before the last token
    return torch.maximum(torch.maximum(kth, pth), top + min_p.log()[:, None])[:, 0]


def drop_unlikely(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """scores [R, V] with -inf below the threshold of the filters [R]."""
    return scores.masked_fill(scores < threshold(scores, top_k, top_p, min_p)[:, None], -torch.inf)


# ----------------------------------------------------------------------------------------------------------------------
# Noise: Philox4x32-10, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
ROUNDS = 10


def philox(counter: tuple, key: tuple) -> tuple:
    """
    Four random words from four 32-bit counter words and two key words, all int64 tensors that broadcast. Words 0 and 2
    go through a round alike, and so do 1 and 3: each pair is one tensor, which halves the operations.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    even, odd = torch.stack([c0, c2]), torch.stack([c1, c3])  # [2, ...]

    def pair(words):  # two numbers as [2, 1, ...]
        return torch.tensor(words, device=even.device).view(2, *[1] * (even.dim() - 1))

    multipliers, steps, key = pair(MULTIPLIERS), pair(KEY_STEPS), torch.stack(torch.broadcast_tensors(*key))
    round_keys = [(key + i * steps) & MASK32 for i in range(ROUNDS)]
    for round_key in round_keys:
        product = even * multipliers  # 64 bits; the sign bit is a bit like any other
        even = ((product >> 32) & MASK32).flip(0) ^ odd ^ round_key
        odd = (product & MASK32).flip(0)
    return even[0], odd[0], even[1], odd[1]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, V: int) -> torch.Tensor:
    """
    Standard Gumbel noise [R, V] fp32 for seeds, positions and choices [R] int64. Key: the seed. Counter: (token id //
    4, position, choice, 0); token id t takes word t % 4. A word's upper 23 bits are a u in (0, 1), exact in fp32.
    """
    seeds, positions, choices = seeds[:, None], positions[:, None], choices[:, None]
    quads = torch.arange(math.ceil(V / 4), device=seeds.device)  # [V / 4]
    counter = (quads, positions & MASK32, choices & MASK32, torch.zeros_like(positions))
    words = philox(counter, (seeds & MASK32, (seeds >> 32) & MASK32))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :V]  # [R, V / 4, 4] -> [R, V]
    u = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))
