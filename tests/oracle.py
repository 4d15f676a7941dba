"""
Which token a request may get: the rules of `SamplingParams` and the design's noise, recomputed in
float64.

Two programs that follow the same rules may choose differently where rounding decides, but only
there. So the answer here is a set. It nearly always has one token, and several if the best scores,
or a filter's threshold, lie within a stated distance. A sampler's token must be in the set; ties
are counted.

    assert token in possible_tokens(logits, params, position, prompt=prompt, generated=text)
"""

import math
import random
from collections import Counter

import torch
from torch import Tensor

from ops.sampling import philox
from params import NO_TOKEN, SamplingParams

TIE = 1e-4  # between the best two perturbed scores: closer ones are a tie
ROUNDING = 2e-5  # between a score and a filter's threshold; relative, for a share of probability
MASK32 = 0xFFFFFFFF

counts = Counter()  # tokens judged, and ties among them


def noise(seed: int, position: int, choice: int, V: int) -> Tensor:
    """
    Return Gumbel noise [V], with the design's key, counter and words. test_sampling.py compares
    `philox` with the paper.
    """
    numbers = (position, choice, 0, seed, seed >> 32)
    position, choice, zero, low, high = (torch.tensor([x & MASK32]) for x in numbers)
    quads = torch.arange(math.ceil(V / 4))
    words = philox((quads, position, choice, zero), (low, high))
    bits = torch.stack(words, dim=-1).flatten()[:V] >> 9
    u = (bits.double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def count_of(tokens, V: int) -> Tensor:
    """Return [V]: how often each token occurs."""
    return torch.tensor(list(tokens), dtype=torch.int64).bincount(minlength=V)


def adjusted(logits: Tensor, p: SamplingParams, prompt, generated, stops) -> Tensor:
    """Return logits [V] float64 after bias, bans and penalties, by vLLM's formulas."""
    V = len(logits)
    scores = logits.double().cpu()
    count = count_of(generated, V)
    seen = count + count_of(prompt, V) > 0
    for token, bias in (p.logit_bias or {}).items():
        scores[token] += bias
    if len(generated) < p.min_tokens:
        scores[[t for t in stops if 0 <= t < V]] = -torch.inf
    penalty = p.repetition_penalty
    repeated = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where(seen, repeated, scores)
    return scores - p.frequency_penalty * count - p.presence_penalty * (count > 0)


def thresholds(scores: Tensor, p: SamplingParams, rounding: float) -> list[tuple[float, float]]:
    """
    Return, for each filter, the smallest score it keeps: the lowest and the highest value that
    rounding may give it.
    """
    ranked = scores.sort(descending=True).values
    bounds = []
    kept = [ranked]
    if 0 < p.top_k < len(ranked):
        bar = ranked[p.top_k - 1]
        bounds.append((bar.item(), bar.item()))
        kept = [ranked[ranked >= bar - rounding], ranked[ranked >= bar]]
    if p.top_p < 1:
        bars = []
        for some in kept:
            weights = (some - some[0]).exp()
            before = weights.cumsum(0) - weights
            for share in p.top_p * (1 - ROUNDING), p.top_p * (1 + ROUNDING):
                needed = (before < share * weights.sum()).sum().clamp(min=1)
                bars.append(some[needed - 1].item())
        bounds.append((min(bars), max(bars)))
    if p.min_p > 0:
        bar = ranked[0].item() + math.log(p.min_p)
        bounds.append((bar, bar))
    return bounds


def kept_tokens(scores: Tensor, p: SamplingParams, rounding: float) -> tuple[Tensor, Tensor]:
    """Return which tokens [V] the filters certainly keep, and which they may keep."""
    surely = scores > -torch.inf
    maybe = surely.clone()
    for low, high in thresholds(scores, p, rounding):
        near = (scores - high).abs() < rounding
        # equal scores are kept or dropped together; close ones need not be
        torn = (scores[near] != high).any() or not near.any()
        surely &= scores >= high + rounding if torn else scores >= high
        maybe &= scores > low - rounding
    return surely, maybe


def possible_tokens(
    logits: Tensor,
    params: SamplingParams,
    position: int,
    *,
    seed: int | None = None,
    choice: int = 0,
    prompt=(),
    generated=(),
    stops=(),
    rounding: float = ROUNDING,
) -> set[int]:
    """
    Return the tokens that may follow, given logits [V]. The seed is that of `params` by default.
    NO_TOKEN stands for a row without a finite maximum.
    """
    scores = adjusted(logits, params, prompt, generated, stops)
    best = scores.max()
    if not best.isfinite() or scores.isnan().any():
        return {NO_TOKEN}
    if params.temperature < 1e-5:
        near = (scores >= best - rounding).nonzero()[:, 0].tolist()
        first = {scores[t].item(): t for t in reversed(near)}  # the lowest token among equal scores
        possible = set(first.values())
    else:
        scores = scores / params.temperature
        surely, maybe = kept_tokens(scores, params, rounding / min(params.temperature, 1))
        seed = (params.seed or 0) if seed is None else seed
        perturbed = scores + noise(seed, position, choice, len(scores))
        bar = perturbed[surely].max() if surely.any() else -torch.inf
        may_win = maybe & (perturbed >= bar - TIE)
        possible = set(may_win.nonzero()[:, 0].tolist())
    counts["tokens"] += 1
    counts["ties"] += len(possible) > 1
    return possible


def random_params(choose: random.Random, V: int, likely: list[int]) -> SamplingParams:
    """
    Return random parameters. Half of the requests set only one, so that no other can hide it; the
    others set several.
    """
    biases = [{0: 5, V // 2: -5}, {likely[0]: -3.5}]
    several = {
        "top_k": [1, 2, 5, 50, V - 1, V, 2**31 - 1],
        "top_p": [0.1, 0.5, 0.9, 0.99],
        "min_p": [0.02, 0.1, 0.5, 1],
        "presence_penalty": [-1.0, 1.0],
        "frequency_penalty": [-0.5, 0.7],
        "repetition_penalty": [0.5, 1.3],
        "logit_bias": biases,
        "min_tokens": [4],
    }
    temperature = choose.choice([0, 0.3, 0.7, 1, 1.7, 2])
    names = choose.sample(sorted(several), choose.choice([1, 1, 1, 2, 3, len(several)]))
    fields = {name: choose.choice(several[name]) for name in names}
    return SamplingParams(temperature, **fields)
