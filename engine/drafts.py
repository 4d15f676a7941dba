"""
Speculative decoding without a draft model: the text so far guesses how it goes on.

    plan = scheduler.plan(step)
    speculator.plan_drafts(plan)                     # guess, in the room that the plan leaves
    ...                                              # compute the step, guesses and all
    places = speculator.take_drafts(plan, tokens)    # accept what was guessed right

A step reads all weights even for one token, and hardly takes longer for a few. So if the last
tokens of a text occurred in it before, the tokens that followed them there are its draft (prompt
lookup, Saxena 2023; vLLM's method "ngram"). After the last token t and a draft a b c, four tokens
are sampled at once:

    computed    t  a  b  c
    sampled     a  b  x  y      a and b were right; x comes after them; y follows a wrong c: dropped

The noise of a token depends on its request's seed and on its position. So a wrong guess costs time,
never a token, greedy or sampled; and where logits do not depend on the rows beside them (ops/cpu.c,
ops/deterministic.py) a text is to the bit what it would be without drafts. A draft ends before the
first token that the request's grammar forbids.

A guess needs all tokens before it, but with overlap a step is planned before the last one is known.
So the engine overlaps steps until the known tokens promise a draft, and then waits for each step
before it plans the next, as long as there are drafts.
"""

from itertools import takewhile

from paged import TO_COME, Plan, Request, Scheduler

MATCHED = 3  # the n of the n-grams: the last n tokens must have occurred in the text before
MOST_ROWS = 8  # of a step with drafts, all requests together: ops/cpu.c multiplies 8 at once
MOST_ROWS_ON_GPU = 16  # likewise: the smallest tiles of ops/linear.py have 16
LONGEST_PAUSE = 64  # tokens without a draft, after many wrong guesses in a row


class GrowingText:
    """A request's text, and where in it each n-gram occurred last."""

    def __init__(self, request: Request):
        self.request = request
        self.can_guess = can_guess(request)
        self.tokens = list(request.prompt_tokens)
        self.num_generated = 0  # tokens of the answer among them
        self.place_after: dict[tuple, int] = {}  # n-gram -> the place behind it
        self.num_indexed = MATCHED  # the next such place to enter; never the end of the text
        # what its guesses were worth
        self.length = 1  # of the next draft
        self.pause = 1  # tokens without a draft, after the next wrong guess
        self.pause_ends = 0  # once the text has so many tokens
        self.promised = False  # whether the engine waits for a step because this text has a draft

    def guess(self, most: int) -> list[int]:
        """
        At most `most` tokens that may follow the known ones; [] if the last MATCHED of these have
        not occurred before.
        """
        if not self.can_guess or most < 1:
            return []
        request = self.request
        num_known = request.num_generated - request.num_to_come
        new = request.generated_tokens[self.num_generated : num_known]
        self.num_generated = num_known
        self.tokens += new
        tokens = self.tokens
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


class Speculator:
    """The drafts of an engine."""

    def __init__(self, scheduler: Scheduler, most_rows: int = MOST_ROWS):
        self.scheduler = scheduler
        self.most_rows = most_rows  # of a step with drafts
        self.texts: dict[Request, GrowingText] = {}
        self.num_guessed = 0  # tokens, and of these the right ones
        self.num_right = 0

    def waits_for(self, plan: Plan) -> bool:
        """
        Whether this plan's step, which is under way, must end before the next one is planned: it
        has drafts, or the known tokens of a text promise one.
        """
        if plan.drafts:
            return True
        scheduler = self.scheduler
        room = self._room(scheduler.active)
        if room <= 0 or scheduler.prefilling:
            return False
        for request in scheduler.active:
            draft = self._guess(request, room)
            self.texts[request].promised = bool(draft)
        return any(self.texts[r].promised for r in scheduler.active)

    def plan_drafts(self, plan: Plan):
        """
        Add drafts to a plan that has decodes alone, as far as `most_rows`, the budget and free
        blocks allow. `plan.sampled` then has a request once for each of its tokens.
        """
        room = self._room(plan.decodes)
        if room <= 0 or plan.chunks:
            return
        for request in plan.decodes:
            if request.num_to_come:
                continue
            draft = self._guess(request, room)
            if draft and request.grammar:
                draft = request.grammar.allowed_part(draft)
            if draft:
                self._add_draft(plan, request, draft)
                room -= len(draft)
            elif self.texts[request].promised:
                self.texts[request].learn(0)
            self.texts[request].promised = False
        if plan.drafts:
            plan.sampled = [r for r, n in plan.work for _ in range(n)]
            allocator = self.scheduler.block_allocator
            plan.evicted += allocator.evicted  # for the drafts
            allocator.evicted = []

    def _room(self, decodes: list[Request]) -> int:
        """How many tokens of drafts there is room for beside these decodes."""
        return min(self.most_rows, self.scheduler.token_budget) - len(decodes)

    def _guess(self, request: Request, room: int) -> list[int]:
        """The draft of a request. Texts of ended requests are dropped when a new one comes."""
        if request not in self.texts:
            self.texts = {r: text for r, text in self.texts.items() if r.status != "done"}
            self.texts[request] = GrowingText(request)
        wanted = min(room, request.max_new_tokens - request.num_generated - 1)
        return self.texts[request].guess(wanted)

    def _add_draft(self, plan: Plan, request: Request, draft: list[int]):
        """Put the draft into the plan, as much of it as there are free blocks for."""
        num_blocks = len(request.block_table)
        num_slots = self.scheduler.extend(request, 1 + len(draft))
        if len(request.block_table) > num_blocks:
            plan.grown.append(request)
        if num_slots > 1:
            plan.drafts[request] = draft[: num_slots - 1]

    def take_drafts(self, plan: Plan, tokens: list[int]) -> list[int]:
        """
        Accept the right tokens of each draft and forget the others. Call it between the scheduler's
        `advance` and `resolve`. `tokens` were sampled for plan.sampled, which afterwards has each
        request once. Returns, for each, the place of its last token in `tokens`; `plan.drafts`
        keeps the tokens accepted before that one, none if the request was aborted meanwhile.
        """
        places = []
        start = 0
        for request in plan.decodes:
            draft = plan.drafts.get(request, [])
            n = num_right(draft, tokens[start:], request.stop_token_ids)
            if request.grammar:  # `allowed_part` does not count a rule's tokens (max_tokens)
                n = len([*takewhile(request.grammar.accept, draft[:n])])
            if not request.num_to_come:
                n = 0
            places.append(start + n)
            start += 1 + len(draft)
            if draft:
                self.num_guessed += len(draft)
                plan.drafts[request] = draft[:n]
            if draft and request.num_to_come:
                self.num_right += n
                self.texts[request].learn(n)
                self._accept(request, plan, len(draft))
        plan.sampled = plan.decodes.copy()
        return places

    def _accept(self, request: Request, plan: Plan, num_guessed: int):
        """
        The guesses that are left in the plan are right: they become known tokens, and one to come
        follows them. The slots and blocks of the others are given back.
        """
        scheduler = self.scheduler
        right = plan.drafts[request]
        request.generated_tokens[-request.num_to_come :] = [*right, TO_COME]
        request.num_to_come = 1
        request.num_computed_slots += len(right)
        request.num_filled_slots -= num_guessed - len(right)
        if request.status == "ending" and not request.is_done:
            scheduler.move(request, "active")
        scheduler.give_back_unused(request)
        plan.committed += scheduler.commit(request)


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
    params = request.params
    if params is None:
        return True
    masked_first = request.grammar and params.filters
    return not (masked_first or params.penalises or params.logprobs is not None)


def with_drafts(plan: Plan, last: list[tuple[Request, list]]) -> list[tuple[Request, list[int]]]:
    """
    The new tokens of each request: the accepted ones of its draft, then those in `last`, which has
    no entry for a request whose grammar refused its last token.
    """
    drafts = dict(plan.drafts)
    new = [(r, drafts.pop(r, []) + tokens) for r, tokens in last]
    return new + [(r, draft) for r, draft in drafts.items() if draft]
