"""
Speculative decoding without a draft model: the text so far guesses how it goes on.

    drafts.planned(step)        # guess, in the room that the plan leaves
    ...                         # compute the step, guesses and all
    drafts.settled(step)        # keep the tokens up to the first wrong guess, and one more

A step reads all weights even for one token, and hardly takes longer for a few. So if the last
tokens of a text occurred in it before, the tokens that followed them there are its draft (prompt
lookup, Saxena 2023; vLLM's method "ngram"). After the last token t and a draft a b c, four tokens
are sampled at once:

    computed    t  a  b  c
    sampled     a  b  x  y      a and b were right; x comes after them; y follows a wrong c: dropped

The noise of a token depends on its request's seed and on its position. So a wrong guess costs time,
never a token, greedy or sampled; and where logits do not depend on the rows beside them (ops/cpu.c,
ops/deterministic.py) a text is to the bit what it would be without drafts.

A guess needs all tokens before it, but with overlap a step is planned before the last one is known.
So the engine overlaps steps until the known tokens promise a draft, and then waits for each step
before it plans the next, as long as there are drafts.
"""

from engine.step import Answer, Stage, Step
from paged import Plan, Request
from params import GREEDY

MATCHED = 3  # the n of the n-grams: the last n tokens must have occurred in the text before
LONGEST_PAUSE = 64  # tokens without a draft, after many wrong guesses in a row


class GrowingText:
    """A request's text, and where in it each n-gram occurred last."""

    def __init__(self, request: Request):
        self.request = request
        self.can_guess = can_guess(request)
        self.tokens: list[int] = []  # as far as they were known at the last guess
        self.place_after: dict[tuple, int] = {}  # n-gram -> the place after it
        self.num_indexed = MATCHED  # the next place to enter; never the end of the text
        # what its guesses were worth
        self.length = 1  # of the next draft
        self.pause = 1  # tokens without a draft, after the next wrong guess
        self.pause_ends = 0  # when the text has this many tokens

    def guess(self, most: int) -> list[int]:
        """
        At most `most` tokens that may follow the known ones; [] if the last MATCHED of these have
        not occurred before.
        """
        if not self.can_guess or most < 1:
            return []
        request = self.request
        tokens = self.tokens
        tokens += request.tokens_between(len(tokens), request.num_tokens - request.num_to_come)
        for place in range(self.num_indexed, len(tokens)):
            self.place_after[tuple(tokens[place - MATCHED : place])] = place
        self.num_indexed = max(self.num_indexed, len(tokens))
        place = self.place_after.get(tuple(tokens[-MATCHED:]))
        if place is None or len(tokens) < self.pause_ends:
            return []
        # a text that repeats a few tokens over and over goes on with them
        period = len(tokens) - place
        return [tokens[place + i % period] for i in range(min(most, self.length))]

    def learn(self, num_right: int):
        """
        Longer drafts after right guesses, longer pauses after wrong ones: while half of the guesses
        are wrong, or more, guessing does not pay.
        """
        self.length = 2 * num_right + 1
        if num_right:
            self.pause = max(1, self.pause // 2)
        else:
            self.pause_ends = len(self.tokens) + 1 + self.pause
            self.pause = min(LONGEST_PAUSE, 2 * self.pause)


class Drafts(Stage):
    """The drafts of an engine, if its settings want them."""

    def __init__(self, engine):
        super().__init__(engine)
        self.is_on = engine.settings.speculate
        self.texts: dict[Request, GrowingText] = {}
        self.promised: set[Request] = set()  # the engine has waited for drafts of these
        self.num_guessed = 0  # tokens, and of these the right ones
        self.num_right = 0

    def stats(self) -> dict:
        return {"guessed": self.num_guessed, "right": self.num_right}

    def ended(self, request: Answer):
        self.texts.pop(request, None)
        self.promised.discard(request)

    def waits_for(self, step: Step) -> bool:
        """
        Return whether the step under way must end before the next one is planned: it has drafts, or
        some text is likely to get one.
        """
        if not self.is_on or step.plan.guesses:
            return self.is_on
        scheduler = self.engine.scheduler
        room = self._room(scheduler.active)
        if room <= 0 or scheduler.prefilling:
            return False
        self.promised = {r for r in scheduler.active if self._guess(r, room)}
        return bool(self.promised)

    def planned(self, step: Step):
        """
        Add guesses to a plan that only has decodes, as far as the rows of a step, the budget and
        free blocks allow.
        """
        plan = step.plan
        room = self._room(plan.decodes) if self.is_on else 0
        if room <= 0 or plan.chunks:
            return
        for request in plan.decodes:
            if request.num_to_come:
                continue
            draft = self._guess(request, room)
            if draft:
                self._add_draft(plan, request, draft)
                room -= len(draft)

    def _room(self, decodes: list[Request]) -> int:
        """How many guesses there is room for beside these decodes."""
        engine = self.engine
        return min(engine.device.cheap_rows, engine.scheduler.token_budget) - len(decodes)

    def _guess(self, request: Request, room: int) -> list[int]:
        """Return the draft of a request, for so much room."""
        if request not in self.texts:
            self.texts[request] = GrowingText(request)
        wanted = min(room, request.max_new_tokens - request.num_generated - 1)
        return self.texts[request].guess(wanted)

    def _add_draft(self, plan: Plan, request: Request, draft: list[int]):
        """Put the draft into the plan, as much of it as there are free blocks for."""
        num_blocks = len(request.block_table)
        num_slots = self.engine.scheduler.extend_if_free(request, 1 + len(draft))
        if len(request.block_table) > num_blocks:
            plan.grown.append(request)
        if num_slots > 1:
            plan.guesses[request] = draft[: num_slots - 1]

    def launched(self, step: Step):
        """Waiting for a draft that did not come was as bad as a wrong guess."""
        if not self.promised:
            return
        for request in self.promised - step.plan.guesses.keys():
            if request in step.plan.decodes:
                self.texts[request].learn(0)
        self.promised = set()

    def settled(self, step: Step):
        """Keep the tokens that right guesses led to, and the one after the last of them."""
        for request, draft in step.plan.guesses.items():
            self.num_guessed += len(draft)
            tokens = step.tokens.get(request)
            if tokens:
                n = num_right(draft, tokens, request.stop_token_ids)
                step.tokens[request] = tokens[: n + 1]
                self.num_right += n
                self.texts[request].learn(n)


def num_right(draft: list[int], sampled: list[int], stop_token_ids: frozenset[int]) -> int:
    """How many tokens of a draft, up to the first stop token, equal those that were sampled."""
    for i, token in enumerate(draft):
        if token != sampled[i] or token in stop_token_ids:
            return i
    return len(draft)


def can_guess(request: Request) -> bool:
    """
    False if the choice of a token needs more than its logits and its position, as the counts of a
    penalty or a grammar's mask before filters; and if its tokens are to be scored.
    """
    params = getattr(request, "params", GREEDY)
    masked_first = params.grammar and params.filters
    return not (masked_first or params.penalises or params.logprobs is not None)
