"""
Log-probabilities of sampled tokens and of a prompt's tokens.

    engine.add_request("a", prompt, SamplingParams(logprobs=5), prompt_logprobs=0)

A score is a list of three items: the token's log-probability, the ids of the most likely tokens,
and their log-probabilities. The device computes the scores after the step, and the host reads them
together with the step's tokens. A prompt is scored chunk by chunk. Its scores are sent with the
first token of the answer.
"""

from torch import Tensor

from engine.step import Answer, Stage, Step
from paged import Request


class Scores(Stage):
    """Computes scores for an engine's requests."""

    def __init__(self, engine):
        super().__init__(engine)
        self.wanted: set[Request] = set()  # requests that want scores for the prompt or the answer
        self.prompt_scores: dict[Request, list] = {}  # the scores so far, until they are sent

    def added(self, request: Answer):
        if request.params.logprobs is not None or request.prompt_logprobs is not None:
            self.wanted.add(request)

    def ended(self, request: Answer):
        self.wanted.discard(request)
        self.prompt_scores.pop(request, None)

    def launched(self, step: Step):
        """Start computing scores, and copying them to the host as tensors (see `rows_of`)."""
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
                tensors = device.prompt_logprobs(launched, rows, targets, request.prompt_logprobs)
                prompts.append((request, start, to_host(tensors)))
            first += n
        # without overlap, it is too early to score sampled tokens, because a grammar may replace
        # them
        sampled = None
        if self.engine.overlap:
            scored, tensors = self._score_sampled(step)
            sampled = scored, to_host(tensors)
        step.notes[self] = prompts, sampled

    def _score_sampled(self, step: Step) -> tuple[list[Request], list[Tensor]]:
        """
        Score the sampled tokens on the device, for the requests that want scores. Returns these
        requests and the tensors from `Device.sampled_logprobs`.
        """
        scored = [r for r in step.plan.sampled if r.params.logprobs is not None]
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
                kept = self.prompt_scores.setdefault(request, [])
                kept[start:] = rows_of(tensors)  # after a preemption, `start` is 0 again

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
        for request in [r for r in self.prompt_scores if r in outputs]:
            scores = self.prompt_scores.pop(request)
            outputs[request] = outputs[request]._replace(prompt_logprobs=scores)


def to_host(tensors) -> list[Tensor]:
    """Start copying tensors to the host. The copies are valid once the step is settled."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]


def rows_of(tensors: list[Tensor]) -> list[list]:
    """Convert tensors [R, ..] to R lists. List i has row i of each tensor."""
    columns = [tensor.tolist() for tensor in tensors]
    return [list(row) for row in zip(*columns, strict=True)]


def num_scored(request: Request, n: int) -> int:
    """
    Return how many of a request's next n prefill tokens predict a prompt token that must be scored.
    """
    # the prompt of a request that was preempted after its first token has already been scored
    if request.prompt_logprobs is None or request.generated_tokens:
        return 0
    return min(n, len(request.prompt_tokens) - 1 - request.prefill_cursor)
