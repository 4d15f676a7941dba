"""
Log-probabilities of sampled tokens, and of a prompt's.

    engine.add_request("a", prompt, SamplingParams(logprobs=5), prompt_logprobs=0)

A score is [log-probability of the token, ids of the likeliest tokens, log-probabilities of these].
The device computes them after the step, and the host reads them together with its tokens. A prompt
is scored chunk by chunk; its scores come with the first token of the answer.
"""

from torch import Tensor

from engine.step import Answer, Stage, Step
from paged import Request


class Scores(Stage):
    """The scores of an engine's requests."""

    def __init__(self, engine):
        super().__init__(engine)
        self.wanted: set[Request] = set()  # whose tokens are scored, or those of their prompts
        self.of_prompts: dict[Request, list] = {}  # so far, until the first token

    def added(self, request: Answer):
        if request.params.logprobs is not None or request.prompt_logprobs is not None:
            self.wanted.add(request)

    def ended(self, request: Answer):
        self.wanted.discard(request)
        self.of_prompts.pop(request, None)

    def launched(self, step: Step):
        """Start to score, and to copy the scores to the host: tensors, which `rows_of` reads."""
        if not self.wanted:
            return
        prompts = []
        device = self.engine.device
        launched = step.launched
        first = launched.packed.shape.n
        for request, n in step.plan.chunks:
            count = num_scored(request, n)
            if count:
                start = request.prefill_cursor
                targets = request.prompt_tokens[start + 1 : start + 1 + count]
                rows = slice(first, first + count)
                most = request.prompt_logprobs
                tensors = device.prompt_logprobs(launched, rows, targets, most)
                prompts.append((request, start, to_host(tensors)))
            first += n
        sampled = None  # without overlap not yet: a grammar may have tokens sampled again
        if self.engine.overlap:
            scored, tensors = self._score_sampled(step)
            sampled = scored, to_host(tensors)
        step.notes[self] = prompts, sampled

    def _score_sampled(self, step: Step) -> tuple[list[Request], list[Tensor]]:
        """Score the tokens of those who want it, on the device. Returns these requests."""
        scored = [r for r in step.plan.sampled if r in self.wanted]
        scored = [r for r in scored if r.params.logprobs is not None]
        tensors = []
        if scored:
            index_of = step.launched.token_indices()
            indices = [index_of[r] for r in scored]
            most = max(r.params.logprobs for r in scored)
            tensors = self.engine.device.sampled_logprobs(step.launched, indices, most)
        return scored, tensors

    def settled(self, step: Step):
        if self not in step.notes:
            return
        prompts, sampled = step.notes[self]
        step.notes[self] = sampled or self._score_sampled(step)
        for request, start, tensors in prompts:
            if request.status != "done":
                kept = self.of_prompts.setdefault(request, [])
                kept[start:] = rows_of(tensors)  # after a preemption from 0 again

    def resolved(self, step: Step):
        """Add the scores to the outputs."""
        if self not in step.notes:
            return
        scored, tensors = step.notes[self]
        outputs = step.outputs
        for request, (logprob, ids, candidates) in zip(scored, rows_of(tensors), strict=True):
            if request in outputs:
                most = request.params.logprobs
                score = [logprob, ids[:most], candidates[:most]]
                outputs[request] = outputs[request]._replace(logprobs=score)
        for request in [r for r in self.of_prompts if r in outputs]:
            of_prompt = self.of_prompts.pop(request)
            outputs[request] = outputs[request]._replace(prompt_logprobs=of_prompt)


def to_host(tensors) -> list[Tensor]:
    """Start to copy tensors to the host: they are valid once the step is settled."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]


def rows_of(tensors: list[Tensor]) -> list[list]:
    """Tensors [R, ..] as R lists, each with one row of all of them."""
    columns = [tensor.tolist() for tensor in tensors]
    return [list(row) for row in zip(*columns, strict=True)]


def num_scored(request: Request, n: int) -> int:
    """
    How many of a request's next n prefill tokens predict a token of its prompt that is to be
    scored.
    """
    # after a preemption, with tokens generated before it, the prompt was scored already
    if request.prompt_logprobs is None or request.generated_tokens:
        return 0
    return min(n, len(request.prompt_tokens) - 1 - request.prefill_cursor)
