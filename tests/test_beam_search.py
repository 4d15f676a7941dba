"""
examples/beam_search.py against a textbook's, which computes every beam's whole text again: with a
model, and over hundreds of random scores (simulated_runner.py). The simulator has beams, too.
"""

import random

import pytest
import torch

from examples.beam_search import beam_search
from test_paged import assert_idle, new_engine, prompt, raises, trained_model
from tests.simulated_runner import VOCABULARY as V
from tests.simulated_runner import beams, greedy, simulated_engine


def test_with_a_model():
    """
    Would catch: a beam that continues another's text, scores that belong to another beam, a beam
    that ends early. A wider search finds at least as good an answer here.
    """
    for seed, eos_at in ((12, None), (12, 6), (13, 4)):
        start = prompt(seed, 17)
        # a letter that the model expects soon: some beams end there
        eos = None if eos_at is None else start[eos_at]
        model = trained_model(eos_token_id=eos)
        engine = new_engine(model, num_blocks=40, token_budget=8)  # the prompt comes in chunks
        best = []
        for width, max_tokens in ((1, 9), (3, 9), (5, 9)):
            answers = beam_search(engine, start, width, max_tokens)
            assert len({tuple(tokens) for tokens, _ in answers}) == width
            for tokens, score in answers:
                with torch.no_grad():
                    logits = model(torch.tensor([start + tokens]))[0][0, 16:-1]
                own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
                assert score == pytest.approx(own.sum().item(), abs=1e-3)
                assert len(tokens) == max_tokens or tokens[-1] == eos
            best.append(answers[0][1])
            assert eos is None or any(tokens[-1] == eos for tokens, _ in answers)
            assert_idle(engine)
        assert best == pytest.approx(sorted(best))
        assert engine.scheduler.num_copies > 0 and engine.scheduler.num_forks > 0


def tight_engine(S: int, P: int, width: int, max_tokens: int, eos=(), budget=4):
    """
    With as many blocks and rows as the beams need when each has its own from the prompt's last full
    block on.
    """
    blocks = P // S + width * (-(-(P + max_tokens) // S) - P // S)
    sizes = {"num_blocks": blocks, "max_num_seqs": width, "token_budget": max(width, budget)}
    return simulated_engine(eos, block_size=S, watermark=0, **sizes)


def test_over_random_scores():
    """
    Would catch: a search that ends while a beam can still beat the answers, or with fewer than
    `width`, or goes on when none can; an end of text passed over, or taken for any token; a pool
    that is too small for what was accepted.
    """
    rng = random.Random(0)
    steps_saved = 0
    for trial in range(150):
        P, S = rng.randint(1, 9), rng.choice([1, 2, 4])
        width, max_tokens = rng.randint(1, 4), rng.randint(1, 9)
        eos = tuple(rng.sample(range(V), rng.choice([0, 1, 2, 4])))
        start = [rng.randrange(V) for _ in range(P)]
        engine = tight_engine(S, P, width, max_tokens, eos)
        answers = beam_search(engine, start, width, max_tokens)
        right = beams(start, width, max_tokens, set(eos), V)
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in right], (
            f"trial {trial}"
        )
        assert_idle(engine)
        assert engine.scheduler.num_preemptions == 0
        steps_saved += P + max_tokens - engine.num_steps
    assert steps_saved > 500, "it ends once no beam can win"


def test_a_block_or_a_row_less_than_beams_need_is_refused():
    """The simulator knows whether; here are the words."""
    start, max_tokens, width = [*range(9)], 4, 3
    exact = tight_engine(4, 9, width, max_tokens)
    small = simulated_engine(num_blocks=exact.num_blocks - 1, max_num_seqs=width)
    with raises(ValueError, "3 beams need 8 blocks, the pool has 7"):
        beam_search(small, start, width, max_tokens)
    for wrong in width + 1, 0:
        with raises(ValueError, f"a beam width of {wrong}: wanted 1 to {width}"):
            beam_search(exact, start, wrong, max_tokens)
    exact.add_request("a", start, greedy(1))
    with raises(ValueError, "needs the engine for itself, not beside 1 request"):
        beam_search(exact, start, width, max_tokens)
