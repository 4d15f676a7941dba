"""
The engine's scores compared with transformers'. A `Judge` serves texts and compares every
log-probability.

    judge = Judge(hf_model, ours, attention="torch")
    judge.ask(prompt, max_tokens=14)
    judge.finish()        # raises AssertionError if one differs
"""

from collections import Counter

import torch
from torch import Tensor

from engine.engine import Engine
from model import GPT
from params import SamplingParams, Settings
from test_paged import assert_idle, poison

TOLERANCE = 1e-4  # of log-probabilities; if the best two are this close, either token is right
counted = Counter()


@torch.no_grad()
def log_probabilities(hf_model, tokens: list[int], last: int = 0) -> Tensor:
    """
    Return transformers' log-probabilities of the tokens that may follow each token of a text, (T,
    V); with `last`, only for that many last tokens.
    """
    logits = hf_model(torch.tensor([tokens]), use_cache=False, logits_to_keep=last).logits
    return logits[0].float().log_softmax(-1)


@torch.no_grad()
def dense(ours: GPT, tokens: list[int]) -> Tensor:
    """Return the same from our model, without a cache, (T, V)."""
    logits, _ = ours(torch.tensor([tokens]))
    return logits[0].float().log_softmax(-1)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def scores_of(scores: Tensor, tokens: list[int]) -> Tensor:
    """Return the scores (T,) of one token at each position, from all scores (T, V)."""
    ids = torch.tensor(tokens)
    return scores.gather(1, ids[:, None])[:, 0]


def shortfall(scores: Tensor, tokens: list[int]) -> Tensor:
    """Return by how much the best score exceeds that of each token."""
    return scores.amax(-1) - scores_of(scores, tokens)


def report():
    """Print how often rounding chose the other one of two equally good tokens."""
    print(f"\n{counted['tokens']} tokens were compared, {counted['ties']} of them ties")
    assert counted["ties"] <= 0.01 * counted["tokens"]


class Judge:
    """
    Serves texts with `ours`, and judges the answers by `hf_model`: the chosen tokens to within
    TOLERANCE, and the other candidates, which may be unlikely, to within `candidates`.
    """

    def __init__(self, hf_model, ours: GPT, candidates: float = TOLERANCE, **settings):
        self.hf_model = hf_model
        self.candidates = candidates
        self.engine = Engine(ours, Settings(check=True, **settings))
        poison(self.engine.device, self.engine.scheduler)
        self.num_asked = 0
        self.asked = {}  # id: prompt, temperature, outputs

    def ask(self, prompt: list[int], max_tokens: int, temperature=0.0, n=1, **how):
        id = str(self.num_asked)
        self.num_asked += 1
        params = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": 20, "seed": 3}
        params = SamplingParams(temperature=temperature, **params)
        self.engine.add_request(id, prompt, params, n=n, **how)
        for choice in [id, *(f"{id}.{i}" for i in range(1, n))]:
            self.asked[choice] = prompt, temperature, []

    def finish(self) -> list[list[int]]:
        """Step until idle, then judge. Returns the answers."""
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None, output.error
                self.asked[output.id][2].append(output)
        assert_idle(self.engine)
        answers = [self.judge(*asked) for asked in self.asked.values()]
        self.asked.clear()
        return answers

    def judge(self, prompt: list[int], temperature: float, outputs: list) -> list[int]:
        answer = [token for output in outputs for token in output.tokens]
        scored = outputs[0].prompt_logprobs
        last = 0 if scored else len(answer) + 1
        expected = log_probabilities(self.hf_model, prompt + answer, last)
        if scored:
            self.compare(expected[: len(prompt) - 1], prompt[1:], scored)
        expected = expected[-len(answer) - 1 : -1]
        self.compare(expected, answer, [output.logprobs for output in outputs])
        if temperature == 0:
            lost = shortfall(expected, answer)
            assert lost.max() <= TOLERANCE
            counted["tokens"] += len(answer)
            counted["ties"] += int(lost.count_nonzero())
        return answer

    def compare(self, expected: Tensor, tokens: list[int], scores: list):
        """Compare the score of the chosen token, and those of the candidates, at each position."""
        assert len(scores) == len(expected) == len(tokens)
        chosen, ids, best = map(torch.tensor, zip(*scores, strict=True))
        assert distance(scores_of(expected, tokens), chosen) <= TOLERANCE
        assert distance(expected.gather(1, ids), best) <= self.candidates
        assert distance(expected.topk(ids.shape[1]).values, best) <= self.candidates
