"""
Beam search against a textbook's, over hundreds of random distributions (pretend.py has them in
place of a model).
"""

import random

import pytest
from pretend import VOCABULARY, greedy, logprobs_after, pretend_engine, texts_of

from serving.beam import beam_search
from test_paged import assert_idle, raises


def textbook(
    prompt: list[int], width: int, max_tokens: int, eos: tuple
) -> list[tuple[list[int], float]]:
    """
    All extensions of all beams, sorted; no early end, no blocks. Of the best 2 * width those that
    end are answers, and the best `width` that do not are the next beams.
    """
    beams, answers = [([], 0.0)], []
    for length in range(1, max_tokens + 1):
        extended = [
            ([*tokens, token], score + logprob)
            for tokens, score in beams
            for token, logprob in enumerate(logprobs_after(texts_of(prompt + tokens)))
        ]
        extended.sort(key=lambda beam: -beam[1])
        ends = [
            beam for beam in extended[: 2 * width] if beam[0][-1] in eos or length == max_tokens
        ]
        answers = sorted(answers + ends, key=lambda beam: -beam[1])[:width]
        beams = [beam for beam in extended if beam[0][-1] not in eos][:width]
    return answers


def tight_engine(S: int, P: int, width: int, max_tokens: int, eos: tuple, budget: int):
    """
    With as many blocks and rows as the beams need when each has its own from the prompt's last full
    block on.
    """
    blocks = P // S + width * (-(-(P + max_tokens) // S) - P // S)
    sizes = {"num_blocks": blocks, "max_num_seqs": width, "token_budget": max(width, budget)}
    return pretend_engine(eos, block_size=S, watermark=0, **sizes)


def test_beam_search_is_the_textbooks():
    """
    Would catch: a search that ends while a beam can still beat the answers, or with fewer than
    `width`; an end of text passed over, or taken for any token; beams of another parent, or with
    another's score; a pool that is too small for what was accepted.
    """
    rng, early, whole = random.Random(0), 0, 0
    for trial in range(150):
        P, S, width, max_tokens = (
            rng.randint(1, 9),
            rng.choice([1, 2, 4]),
            rng.randint(1, 4),
            rng.randint(1, 7),
        )
        eos = tuple(rng.sample(range(VOCABULARY), rng.choice([0, 1, 2, 4])))
        prompt = [rng.randrange(VOCABULARY) for _ in range(P)]
        engine = tight_engine(S, P, width, max_tokens, eos, budget=rng.choice([1, 4, 16]))
        found, wanted = (
            beam_search(engine, prompt, width, max_tokens),
            textbook(prompt, width, max_tokens, eos),
        )
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted], f"trial {trial}"
        assert [score for _, score in found] == pytest.approx(
            [score for _, score in wanted], abs=1e-4
        )
        assert_idle(engine)
        assert engine.scheduler.num_preemptions == 0
        early += any(len(tokens) < max_tokens for tokens, _ in found)
        whole += any(len(tokens) == max_tokens for tokens, _ in found)
    assert early > 50 and whole > 50


def test_the_search_goes_on_while_the_best_beam_can_win_and_no_longer():
    """
    It ended when the worst beam was behind the answers, though the best was not: 1 of 192 searches
    differed.
    """
    rng, steps_saved = random.Random(1), 0
    for _ in range(60):
        prompt, eos = [rng.randrange(VOCABULARY) for _ in range(3)], (0, 1, 2)
        engine = tight_engine(4, 3, 3, 12, eos, budget=3)
        found, wanted = beam_search(engine, prompt, 3, 12), textbook(prompt, 3, 12, eos)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        assert 1 <= engine.num_steps <= 12
        steps_saved += 12 - engine.num_steps
    assert steps_saved > 60, "and it ends once no beam can win"


@pytest.mark.parametrize(
    ("S", "P", "max_tokens", "width"), [(4, 8, 4, 3), (4, 9, 4, 3), (4, 7, 1, 2), (1, 3, 3, 2)]
)
def test_what_beams_need_is_accepted_and_a_block_or_a_row_less_is_refused(S, P, max_tokens, width):
    prompt = list(range(P))
    exact = tight_engine(S, P, width, max_tokens, (), 4)
    assert beam_search(exact, prompt, width, max_tokens) == beam_search(
        exact, prompt, width, max_tokens
    )
    needed = exact.num_blocks
    small = pretend_engine(block_size=S, num_blocks=needed - 1, max_num_seqs=width)
    with raises(ValueError, f"{width} beams need {needed} blocks, the pool has {needed - 1}"):
        beam_search(small, prompt, width, max_tokens)
    with raises(ValueError, f"a beam width of {width + 1} needs as many rows, there are {width}"):
        beam_search(exact, prompt, width + 1, max_tokens)
    with raises(ValueError, "a beam width of 0"):
        beam_search(exact, prompt, 0, max_tokens)
    exact.add_request("a", prompt, greedy(1))
    with raises(ValueError, "needs the engine for itself, 1 requests are under way"):
        beam_search(exact, prompt, width, max_tokens)
