"""
examples/beam_search.py against a textbook version, which recomputes the whole text of every beam,
over random scores (simulated_device.py).
"""

import random

from examples.beam_search import beam_search
from test_paged import assert_idle, raises
from tests.simulated_device import VOCABULARY as V
from tests.simulated_device import greedy, score, simulated_engine


def tight_engine(S: int, P: int, width: int, max_tokens: int, eos=()):
    """
    Return an engine with as many blocks and rows as the beams need when each has its own blocks
    after the full blocks of the prompt.
    """
    shared = P // S
    own = -(-(P + max_tokens) // S) - shared
    sizes = {"num_blocks": shared + width * own, "max_num_seqs": width, "token_budget": 4}
    return simulated_engine(eos, block_size=S, watermark=0, **sizes)


def textbook(start: list[int], width: int, max_tokens: int, ends: set[int]) -> list[tuple]:
    """
    Return the answers straight from the definition: all extensions of all beams, without blocks,
    forks or an early end. Of the best 2 * width, those that end are answers, and the best `width`
    of the others are the next beams.
    """
    going = [([], 0.0)]
    answers = []
    for length in range(1, max_tokens + 1):
        extended = []
        for tokens, total in going:
            _, ids, logprobs = score(bytes(start + tokens), 0, V, V)
            for token, logprob in zip(ids, logprobs, strict=True):
                extended.append(([*tokens, token], total + logprob))
        extended.sort(key=lambda one: -one[1])
        best = extended[: 2 * width]
        ended = [one for one in best if one[0][-1] in ends or length == max_tokens]
        going = [one for one in best if one not in ended][:width]
        answers = sorted(answers + ended, key=lambda one: -one[1])[:width]
    return answers


def test_over_random_scores():
    """
    Would catch: a search that ends while a beam can still beat the answers, or with fewer than
    `width` answers, or that goes on when none can; an end of text that is ignored, or taken for an
    ordinary token; a pool too small for what was accepted.
    """
    rng = random.Random(0)
    steps_saved = 0
    for trial in range(150):
        P = rng.randint(1, 9)
        S = rng.choice([1, 2, 4])
        width = rng.randint(1, 4)
        max_tokens = rng.randint(1, 9)
        eos = tuple(rng.sample(range(V), rng.choice([0, 1, 2, 4])))
        start = [rng.randrange(V) for _ in range(P)]
        engine = tight_engine(S, P, width, max_tokens, eos)
        answers = beam_search(engine, start, width, max_tokens)
        assert answers == textbook(start, width, max_tokens, set(eos)), f"trial {trial}"
        assert_idle(engine)
        assert engine.scheduler.num_preemptions == 0
        steps_saved += P + max_tokens - engine.num_steps
    assert steps_saved > 500, "it ends once no beam can win"


def test_a_block_or_a_row_less_than_beams_need_is_refused():
    start = [*range(9)]
    small = simulated_engine(num_blocks=7, max_num_seqs=3)
    with raises(ValueError, "3 beams need 8 blocks, but the pool has 7"):
        beam_search(small, start, 3, 4)
    for wrong in 4, 0:
        with raises(ValueError, f"the beam width is {wrong}, wanted 1 to 3"):
            beam_search(small, start, wrong, 4)
    small.add_request("a", start, greedy(1))
    with raises(ValueError, "needs the engine to itself, but it has 1 request"):
        beam_search(small, start, 2, 4)
