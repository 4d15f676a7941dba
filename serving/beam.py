"""
Beam search: what `Scheduler.fork` is for. The beams share the blocks of what they have in common,
and copy-on-write gives each its own last block. Shown here and in test_paged.py, not served.

    answers = beam_search(engine, prompt_tokens, width=4, max_tokens=32)
"""

from dataclasses import replace

import torch

from paged import Plan, Request, blocks_held
from serving.engine import Engine
from serving.params import GREEDY

Answer = tuple[list[int], float]  # tokens, log-probability


@torch.inference_mode()
def beam_search(
    engine: Engine, prompt_tokens: list[int], width: int, max_tokens: int
) -> list[Answer]:
    """
    The `width` likeliest answers that beam search finds, best first, each with its log-probability;
    an answer ends at max_tokens or after the end-of-text token. Needs the engine for itself; raises
    ValueError for what does not fit.
    """
    check_beams_fit(engine, len(prompt_tokens), width, max_tokens)
    params = replace(GREEDY, max_tokens=max_tokens, ignore_eos=True)
    beams = {engine.add_request("beam", prompt_tokens, params): 0.0}  # request -> log-probability
    answers: list[Answer] = []  # best first
    try:
        # log-probabilities only fall: a beam behind the worst of enough answers stays behind
        while beams and (len(answers) < width or max(beams.values()) > answers[-1][1]):
            plan = engine.scheduler.plan(engine.num_steps)
            engine.num_steps += 1
            flight = engine.runner.launch(plan)
            if not plan.sampled:  # a long prompt takes several steps
                engine.scheduler.update(plan, [])
                continue
            logprobs = flight.logits[flight.wanted].float().log_softmax(-1)
            beams, ended = extend_beams(engine, plan, beams, logprobs, width)
            answers = sorted(answers + ended, key=lambda answer: -answer[1])[:width]
    finally:
        for request in list(engine.requests.values()):
            engine.abort(request.id)
    return answers


def check_beams_fit(engine: Engine, P: int, width: int, max_tokens: int):
    """Raises ValueError unless `width` beams of P + max_tokens tokens have rows and blocks."""
    scheduler = engine.scheduler
    rows = scheduler.max_num_seqs
    if engine.has_work:
        raise ValueError(
            f"beam search needs the engine for itself, {len(engine.requests)} requests are under "
            "way"
        )
    if not 1 <= width <= rows:
        raise ValueError(
            f"a beam width of {width} needs as many rows, there are {rows}: change width or "
            "max_num_seqs"
        )
    shared = P // scheduler.block_size  # full blocks of the prompt
    needed = shared + width * (scheduler.blocks_for(P + max_tokens) - shared)
    held = blocks_held(P + max_tokens, scheduler.block_size, scheduler.window)
    needed = min(needed, width * held)
    if needed > engine.num_blocks:
        raise ValueError(
            f"{width} beams need {needed} blocks, the pool has {engine.num_blocks}: change width "
            "or pool"
        )


def extend_beams(
    engine: Engine, plan: Plan, beams: dict[Request, float], logprobs: torch.Tensor, width: int
) -> tuple[dict[Request, float], list[Answer]]:
    """
    Replace the beams by their best `width` extensions, given the log-probabilities [R, V] of their
    next tokens. Returns these, {request: log-probability}, and the answers that end here.
    """
    totals = torch.tensor([[beams[r]] for r in plan.sampled], device=logprobs.device)
    scores = logprobs + totals  # [R, V]
    V = scores.shape[1]
    best = scores.flatten().topk(min(2 * width, scores.numel()))  # at most `width` are ends
    answers: list[Answer] = []
    going: list[tuple[Request, int, float]] = []  # beam, next token, log-probability: best first
    for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        beam = plan.sampled[index // V]
        token = index % V
        is_last = beam.num_generated + 1 == beam.max_new_tokens
        if is_last or token in engine.config.eos_token_ids:
            answers.append(([*beam.generated_tokens, token], score))
        else:
            going.append((beam, token, score))
    going = going[:width]
    if not going:
        return {}, answers
    # each beam goes on with its best token itself, which is the first in `going`
    own = {beam: token for beam, token, _ in reversed(going)}
    engine.scheduler.update(plan, [own.get(beam, 0) for beam in plan.sampled])
    for beam in plan.sampled:
        if beam not in own:
            engine.abort(beam.id)
    extended: dict[Request, float] = {}
    for beam, token, score in going:
        if beam in extended:  # a fork of it goes the other ways
            beam = engine.scheduler.fork(beam, f"beam-{engine.scheduler.num_forks}")
            beam.generated_tokens[-1] = token
            engine.requests[beam.id] = beam
        engine.runner.fill_rows(beam)
        extended[beam] = score
    return extended, answers
