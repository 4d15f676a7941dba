"""
Beam search with `Scheduler.fork`. Beams share the blocks of their common prefix, and copy-on-write
gives each beam its own last block. The log-probabilities of the most likely next tokens are
computed as for any request with `logprobs`. The server does not offer beam search. To use it in
Python, from the root folder:

    from examples.beam_search import beam_search
    answers = beam_search(engine, prompt_tokens, width=4, max_tokens=32)
"""

import sys
from dataclasses import replace

if __name__ == "__main__":
    sys.exit("this is a library: its first lines show how to use it")

from common import plural
from engine.engine import Engine
from engine.scores import rows_of
from paged import Plan, Request
from params import GREEDY

Answer = tuple[list[int], float]  # tokens, log-probability
# each beam needs twice as many candidates as there are beams, and `SamplingParams` allows 20
MOST_BEAMS = 10


def beam_search(
    engine: Engine, prompt_tokens: list[int], width: int, max_tokens: int
) -> list[Answer]:
    """
    Return the `width` most likely answers that beam search finds, each with its log-probability,
    best first. An answer ends at max_tokens or after an end-of-text token. The engine must not have
    any other requests. Raises ValueError if the beams do not fit.
    """
    check_beams_fit(engine, len(prompt_tokens), width, max_tokens)
    # Twice the width: at most `width` of the best 2 * width extensions end, one for each beam. So
    # enough of them are left to continue.
    candidates = min(2 * width, engine.config.vocab_size)
    params = replace(GREEDY, max_tokens=max_tokens, ignore_eos=True)
    beams = {engine.add_request("beam", prompt_tokens, params): 0.0}  # request -> log-probability
    answers = []  # best first
    try:
        # A beam's log-probability can only decrease. So once `width` answers are better than the
        # best beam, they stay better.
        while beams and (len(answers) < width or max(beams.values()) > answers[-1][1]):
            plan = engine.scheduler.plan()
            engine.num_steps += 1
            launched = engine.runner.launch(plan)
            if not plan.sampled:  # a long prompt takes several steps
                engine.scheduler.update(plan, [])
                continue
            indices = list(launched.token_indices().values())
            scores = rows_of(engine.device.sampled_logprobs(launched, indices, candidates))
            beams, ended = extend_beams(engine, plan, beams, scores, width)
            answers = sorted(answers + ended, key=lambda answer: -answer[1])[:width]
    finally:
        for id in list(engine.requests):
            engine.abort(id)
    return answers


def check_beams_fit(engine: Engine, P: int, width: int, max_tokens: int):
    """
    Raise ValueError unless the engine has enough rows and blocks for `width` beams of P +
    max_tokens tokens.
    """
    scheduler = engine.scheduler
    rows = min(scheduler.max_num_seqs, MOST_BEAMS)
    if engine.has_work:
        raise ValueError(
            "beam search needs the engine to itself, but it has "
            f"{plural(len(engine.requests), 'request')}"
        )
    if not 1 <= width <= rows:
        raise ValueError(
            f"the beam width is {width}, wanted 1 to {rows}: no more than the engine's "
            f"rows, and at most {MOST_BEAMS}"
        )
    shared = P // scheduler.block_size  # full blocks of the prompt
    needed = shared + width * (scheduler.blocks_for(P + max_tokens) - shared)
    if needed > engine.num_blocks:
        raise ValueError(
            f"{width} beams need {needed} blocks, but the pool has {engine.num_blocks}: lower the "
            "width or enlarge the pool"
        )


def extend_beams(
    engine: Engine,
    plan: Plan,
    beams: dict[Request, float],
    scores: list[list],
    width: int,
) -> tuple[dict[Request, float], list[Answer]]:
    """
    Replace the beams with their `width` best extensions. `scores` has a score (see
    engine/scores.py) for each beam, in the order of plan.sampled. Returns the new beams as
    {request: log-probability}, and the answers that end in this step.
    """
    extensions = []  # beam, next token, log-probability
    for beam, (_, ids, logprobs) in zip(plan.sampled, scores, strict=True):
        for token, logprob in zip(ids, logprobs, strict=True):
            extensions.append((beam, token, beams[beam] + logprob))
    extensions.sort(key=lambda extension: -extension[2])
    answers = []
    going = []
    for beam, token, score in extensions[: 2 * width]:
        is_last = beam.num_generated + 1 == beam.max_new_tokens
        if is_last or token in engine.config.eos_token_ids:
            answers.append(([*beam.generated_tokens, token], score))
        else:
            going.append((beam, token, score))
    going = going[:width]
    if not going:
        return {}, answers
    # each beam continues with its best token, the first in `going`; forks take the others
    best = {beam: token for beam, token, _ in reversed(going)}
    engine.scheduler.update(plan, [best.get(beam, 0) for beam in plan.sampled])
    for beam in plan.sampled:
        if beam not in best:
            engine.abort(beam.id)
    extended = {}
    for beam, token, score in going:
        if beam in extended:
            beam = engine.scheduler.fork(beam, f"beam-{engine.scheduler.num_forks}")
            beam.generated_tokens[-1] = token
            engine.requests[beam.id] = beam
        engine.device.fill_rows(beam)
        extended[beam] = score
    return extended, answers
