"""
From logits to tokens, for a batch in which every request has its own parameters.

Randomness is a function, not a state: the noise of a token depends on the request's seed, its position and the choice
index, never on what else is in the batch. So the same request with the same seed gives the same tokens, alone or in a
crowd, preempted or not. Letters: R rows of logits, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. Applied in this order: temperature, top_k, top_p, min_p. Raises ValueError."""

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # sample among the k most likely tokens; 0: among all
    top_p: float = 1.0  # sample among the most likely tokens that together have this probability
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # go on after the end-of-text token
    seed: int | None = None  # 64 bits; None: the engine draws one

    def __post_init__(self):
        number = int | float
        self._require("temperature", number, lambda x: 0 <= x <= 2, "a number from 0 (greedy) to 2")
        self._require("top_k", int, lambda x: 0 <= x < 2**31, "a whole number, 0 for all tokens")
        self._require("top_p", number, lambda x: 0 < x <= 1, "a number above 0, up to 1")
        self._require("min_p", number, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        self._require("max_tokens", int, lambda x: x >= 1, "a whole number, at least 1")
        self._require("stop_token_ids", tuple | list, lambda x: all(type(t) is int for t in x), "a tuple of token ids")
        self._require("ignore_eos", bool, lambda x: True, "True or False")
        if self.seed is not None:
            self._require("seed", int, lambda x: -(2**63) <= x < 2**63, "a whole number of 64 bits, or None")

    def _require(self, name: str, kind, in_range, wanted: str):
        value = getattr(self, name)
        misfit = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if misfit or not in_range(value):
            raise ValueError(f"{name} is {value!r}; it must be {wanted}")


GREEDY = SamplingParams(temperature=0.0)


class SamplingRows:
    """The parameters of every running request in device arrays, indexed by the request's row."""

    def __init__(self, num_rows: int, device):
        self.temperature = torch.zeros(num_rows, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)  # 0: no limit
        self.top_p = torch.ones(num_rows, device=device)
        self.min_p = torch.zeros(num_rows, device=device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.choice = torch.zeros(num_rows, dtype=torch.int64, device=device)  # which of a request's forks this is

    def set(self, row: int, params: SamplingParams, seed: int, choice: int):
        self.temperature[row] = params.temperature
        self.top_k[row], self.top_p[row], self.min_p[row] = params.top_k, params.top_p, params.min_p
        self.seed[row], self.choice[row] = seed, choice


def sample(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: SamplingRows, asked
) -> torch.Tensor:
    """
    Pick a token for each row of logits [R, V]: argmax of logits / temperature + Gumbel noise, over the tokens that the
    filters keep, is a sample of the softmax (the Gumbel-max trick, Gumbel 1954). rows [R] are the requests' rows in
    `params`, positions [R] the places of the new tokens in their texts, `asked` the SamplingParams of the rows, from
    which the host sees what nobody asked for. Returns [R] int64.
    """
    scores = logits.float()
    if all(p.temperature == 0 for p in asked):
        return scores.argmax(-1)
    temperature = params.temperature[rows][:, None]  # [R, 1]
    greedy = temperature < 1e-5  # dividing by less would overflow
    scores = scores / torch.where(greedy, 1.0, temperature)
    if any(p.top_k or p.top_p < 1 or p.min_p for p in asked):
        scores = drop_unlikely(scores, params.top_k[rows], params.top_p[rows], params.min_p[rows])
    noise = gumbel_noise(params.seed[rows], positions, params.choice[rows], scores.shape[-1])
    return torch.where(greedy, scores, scores + noise).argmax(-1)


def drop_unlikely(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """
    scores [R, V] with -inf where top_k, then top_p (Holtzman et al. 2020), then min_p (Nguyen et al. 2024), [R] each,
    drop a token. The most likely token always stays.
    """
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ranked = ranked.masked_fill((rank >= top_k[:, None]) & (top_k[:, None] > 0), -torch.inf)
    probs = ranked.softmax(-1)
    before = probs.cumsum(-1) - probs  # what the more likely tokens have together
    limited = top_p[:, None] < 1  # else keep all: rounded sums reach 1 before the last token
    dropped = (limited & (before >= top_p[:, None])) | (probs < min_p[:, None] * probs[:, :1])
    ranked = ranked.masked_fill(dropped & (rank > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ranked)


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
