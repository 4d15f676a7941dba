"""
Speculative decoding without a draft model: the text so far is used to guess how it continues.

    drafts.planned(step)        # add as many guesses to the plan as fit
    ...                         # compute the step, including the guesses
    drafts.settled(step)        # keep the tokens up to the first wrong guess, plus one more

A step must read all of the model's weights, so it takes hardly longer for a few tokens than for
one. If the last tokens of a text have occurred earlier in it, the tokens that followed that
occurrence become the draft (prompt lookup, Saxena 2023; vLLM's "ngram" method). For example, with
the last token t and the draft a b c, four tokens are sampled in one step:

    computed    t  a  b  c
    sampled     a  b  x  y      a, b and x are kept; y is dropped, because it follows a wrong c

A token's sampling noise depends on its request's seed and on its position. So a wrong guess costs
time but never changes a token, whether or not sampling is greedy. If logits do not depend on the
other rows of a batch (ops/cpu.c, ops/deterministic.py), a text is exactly what it would be without
drafts.

A guess can only be made once all tokens before it are known, but with overlap, a step is planned
before the last token is known. So the engine overlaps steps until the known tokens of some text
suggest a draft. From then on, as long as there are drafts, it waits for each step before planning
the next one.
"""

from engine.step import Answer, Stage, Step
from paged import Plan, Request
from params import GREEDY

MATCHED = 3  # n of the n-grams: the last n tokens must have occurred earlier in the text
LONGEST_PAUSE = 64  # maximum number of tokens without a draft, after many wrong guesses in a row


class GrowingText:
    """The text of a request, with an index of where each n-gram last occurred."""

    def __init__(self, request: Request):
        self.request = request
        self.can_guess = can_guess(request)
        self.tokens: list[int] = []  # prompt and answer, as far as known at the last guess
        self.place_after: dict[tuple, int] = {}  # n-gram -> place after its last occurrence
        # set by `learn`, according to how well the text has been guessed so far
        self.length = 1  # maximum length of the next draft
        self.pause = 1  # number of tokens without a draft, after the next wrong draft
        self.pause_ends = 0  # no draft until the text has this many tokens

    def guess(self, most: int) -> list[int]:
        """
        Return a draft: up to `most` tokens that may follow the known ones. Returns [] during a
        pause, or if the last MATCHED tokens have not occurred before.
        """
        if not self.can_guess or most < 1:
            return []
        request = self.request
        tokens = self.tokens
        start = len(tokens)
        tokens += request.tokens_between(start, request.num_tokens - request.num_to_come)
        # the last n-gram of the text is indexed next time, or else it would find itself
        for place in range(max(start, MATCHED), len(tokens)):
            self.place_after[tuple(tokens[place - MATCHED : place])] = place
        place = self.place_after.get(tuple(tokens[-MATCHED:]))
        if place is None or len(tokens) < self.pause_ends:
            return []
        # If the draft reaches the end of the text, it starts over at `place`, because a text that
        # keeps repeating a few tokens is expected to go on repeating them.
        period = len(tokens) - place
        return [tokens[place + i % period] for i in range(min(most, self.length))]

    def learn(self, num_right: int):
        """
        Adapt to the last draft, in which `num_right` guesses were right. After right guesses,
        drafts get longer. After a wrong draft, pauses get longer, because guessing does not pay off
        while half of the guesses or more are wrong.
        """
        self.length = 2 * num_right + 1
        if num_right:
            self.pause = max(1, self.pause // 2)
        else:
            self.pause_ends = len(self.tokens) + 1 + self.pause
            self.pause = min(LONGEST_PAUSE, 2 * self.pause)


class Drafts(Stage):
    """Adds drafts to an engine's steps, if its settings turn them on (`speculate`)."""

    def __init__(self, engine):
        super().__init__(engine)
        self.texts: dict[Request, GrowingText] = {}
        self.promised: set[Request] = set()  # requests whose drafts the engine has waited for
        self.num_guessed = 0  # tokens
        self.num_right = 0  # tokens guessed right

    def stats(self) -> dict:
        return {"guessed": self.num_guessed, "right": self.num_right}

    def ended(self, request: Answer):
        self.texts.pop(request, None)
        self.promised.discard(request)

    def waits_for(self, step: Step) -> bool:
        """
        Return whether the step in flight must end before the next one is planned, because it has
        drafts or because some text is likely to get one.
        """
        if step.plan.guesses:
            return True
        scheduler = self.engine.scheduler
        capacity = self._capacity(scheduler.active)
        if capacity <= 0 or scheduler.prefilling:
            return False
        self.promised = {r for r in scheduler.active if self._guess(r, capacity)}
        return bool(self.promised)

    def planned(self, step: Step):
        """
        Add guesses to a plan that only has decodes: as many as the step's cheap rows, the token
        budget and the free blocks allow.
        """
        plan = step.plan
        capacity = self._capacity(plan.decodes)
        if capacity <= 0 or plan.chunks:
            return
        for request in plan.decodes:
            if request.num_to_come:
                continue
            draft = self._guess(request, capacity)
            if draft:
                self._add_draft(plan, request, draft)
                capacity -= len(draft)

    def _capacity(self, decodes: list[Request]) -> int:
        """
        Return how many guesses a step can compute in addition to these decodes: none if the
        settings do not turn drafts on.
        """
        engine = self.engine
        if not engine.settings.speculate:
            return 0
        return min(engine.device.cheap_rows, engine.scheduler.token_budget) - len(decodes)

    def _guess(self, request: Request, capacity: int) -> list[int]:
        """Return the draft for a request, with at most `capacity` tokens."""
        if request not in self.texts:
            self.texts[request] = GrowingText(request)
        wanted = min(capacity, request.max_new_tokens - request.num_generated - 1)
        return self.texts[request].guess(wanted)

    def _add_draft(self, plan: Plan, request: Request, draft: list[int]):
        """Add as much of the draft to the plan as there are free blocks for."""
        num_blocks = len(request.block_table)
        num_slots = self.engine.scheduler.extend_if_free(request, 1 + len(draft))
        if len(request.block_table) > num_blocks:
            plan.tables_changed.append(request)
        if num_slots > 1:
            plan.guesses[request] = draft[: num_slots - 1]

    def launched(self, step: Step):
        """Treat a draft that never arrived, although the engine waited for it, as wrong."""
        if not self.promised:
            return
        for request in self.promised - step.plan.guesses.keys():
            if request in step.plan.decodes:
                self.texts[request].learn(0)
        self.promised = set()

    def settled(self, step: Step):
        """Keep the tokens that confirm guesses, plus the one sampled after the last of these."""
        for request, draft in step.plan.guesses.items():
            self.num_guessed += len(draft)
            tokens = step.tokens.get(request)
            if tokens:
                n = num_right(draft, tokens, request.stop_token_ids)
                step.tokens[request] = tokens[: n + 1]
                self.num_right += n
                self.texts[request].learn(n)


def num_right(draft: list[int], sampled: list[int], stop_token_ids: frozenset[int]) -> int:
    """
    Return how many tokens of a draft match the sampled ones, before the first difference or stop
    token.
    """
    for i, token in enumerate(draft):
        if token != sampled[i] or token in stop_token_ids:
            return i
    return len(draft)


def can_guess(request: Request) -> bool:
    """
    Return whether a request's tokens can be guessed. They cannot if sampling depends on more than
    the logits and the position, for example on the token counts for a penalty, or on a grammar's
    mask that is applied before filters. Nor can they if log-probabilities are requested.
    """
    params = getattr(request, "params", GREEDY)
    masked_first = params.grammar and params.filters
    return not (masked_first or params.penalises or params.logprobs is not None)
