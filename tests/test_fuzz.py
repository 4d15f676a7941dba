"""
A seeded, model-free fuzz of the scheduler: random pools, budgets and requests, and a KV store that
cannot be fooled.

    python tests/test_fuzz.py                 # 800 trials
    python tests/test_fuzz.py TRIALS SEED     # trial i has seed SEED + i; a failure prints its own

The fake store remembers for each slot *which text up to and including that token* wrote it, as one
running hash. So whatever goes wrong between a request and its K, V (a wrong share, a missed
copy-on-write, a stale block, a commit before K, V exist, a hit on another prefix or another salt)
shows up as a context that is not the request's own. Tokens are a function of what a request reads
there, so a wrong context also gives wrong answers. In a third of the trials every layer slides:
then a request reads its window alone, and texts may be longer than the pool.

Half of the trials overlap: as the engine does, they plan and compute a step before they take in the
tokens of the one before, and fork a prompt when its first token is known, with the parent's next
one on its way.
"""

import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `python tests/test_fuzz.py`

from paged import BlockAllocator, Plan, Request, Scheduler, SchedulerSettings

MUST_HAPPEN = [
    *(
        "preempted",
        "evicted",
        "hit",
        "hit after preemption",
        "forked",
        "no row to fork",
        "copied",
        "took turns",
    ),
    *("overtook", "refused", "failed", "finished by stop", "finished by length"),
    *(
        "aborted waiting",
        "aborted prefilling",
        "aborted active",
        "aborted ending",
        "aborted with a token to come",
    ),
    *(
        "sat out",
        "preempted with a token to come",
        "failed after launch",
        "choice forked",
        "late stop",
    ),
    *(
        "slid",
        "longer than the pool",
        "hit without its beginning",
        "prompt had to grow",
        "slid in need",
    ),
]


def extend(text: int, token: int) -> int:
    """The running hash of a text that goes on with `token`."""
    return hash((text, token))


class Allocator(BlockAllocator):
    """
    Notes what it hands out, so that the store can poison it: a new owner must find nothing of use
    there.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.handed_out: list[int] = []

    def allocate_n(self, n: int) -> list[int]:
        blocks = super().allocate_n(n)
        self.handed_out += blocks
        return blocks


class Trial:
    """One scheduler with random settings, fed random requests until all of them have ended."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.counts = Counter()
        S = rng.randint(1, 8)
        num_blocks = rng.randint(1, 12) if rng.random() < 0.9 else rng.randint(13, 40)
        self.room = num_blocks * S
        self.window = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 40)] + 8 * [0])
        # any text fits into the blocks that a window can touch
        if self.window and -(-(self.window - 1) // S) + 1 <= num_blocks:
            self.room *= 3
        self.scheduler = Scheduler(
            rng.choice(["fcfs", "priority", "sjf"]),
            token_budget=rng.choice([1, 2, 3, rng.randint(1, 8), rng.randint(4, 40)]),
            max_kv_tokens=num_blocks * S,
            block_size=S,
            settings=SchedulerSettings(
                max_num_seqs=rng.randint(1, 8),
                watermark=rng.choice([0, 0, 1, 2]) / num_blocks,
                prefill_share=rng.choice([0.0, 0.25, 0.9]),
                max_num_partial_prefills=rng.randint(1, 4),
                max_long_partial_prefills=rng.choice([1, 1, 2, 3]),
                long_prefill_threshold=rng.choice([1, 2, 4, 8, 40]),
                prefix_cache=rng.random() < 0.8,
                window=self.window,
            ),
        )
        self.scheduler.block_allocator = self.allocator = Allocator(num_blocks, S)
        self.kv: list[list[int | None]] = [
            [None] * S for _ in range(num_blocks)
        ]  # what wrote each slot; None: poison
        self.tables = [
            [0] * (self.room // S) for _ in range(self.scheduler.max_num_seqs)
        ]  # the engine's, indexed by row
        self.texts: dict[int, list[int]] = {}  # request id -> running hash at each of its tokens
        self.expected: dict[
            int, tuple[list[int], str]
        ] = {}  # request id -> its whole answer, and how it ends
        self.accepted: list[Request] = []
        self.ended: set[int] = set()
        self.added_at: dict[int, int] = {}  # request id -> step
        self.turns_missed: dict[Request, int] = defaultdict(
            int
        )  # steps in a row without a token, while decoding
        self.seen: list[list[int]] = []  # texts that later prompts may start with
        self.V = rng.choice([1, 2, 2, 3, 50])
        self.time_per_step = rng.choice([0.0, 1.0, 30.0])  # one unit of priority is worth 60
        self.p_abort, self.p_fork = rng.choice([0.0, 0.03]), rng.choice([0.0, 0.08])
        self.p_fail = rng.choice([0.0, 0.0, 0.05])
        self.overlap = rng.random() < 0.5
        self.slid_in_need: set[Request] = set()
        self.under_way: tuple[Plan, list[int]] | None = (
            None  # with overlap: the step before, and its tokens
        )
        self.first_hits: dict[
            int, int
        ] = {}  # request id -> tokens found in the cache when it was first admitted
        self.num_hits = self.num_queried = self.num_preempted = self.num_copied = (
            self.num_forked
        ) = self.peak = 0
        self.step_number = 0

    def run(self):
        to_come, p_arrive = self.rng.randint(2, 12), self.rng.choice([0.2, 0.5, 1.0])
        while to_come or self.under_way or not self.scheduler.is_done():
            while to_come and self.rng.random() < p_arrive:
                self.submit()
                to_come -= 1
            if self.rng.random() < self.p_abort:
                self.abort()
            if self.rng.random() < self.p_fork:
                self.fork()
            if self.under_way or not self.scheduler.is_done():
                self.step()
            self.step_number += 1
        self.check_counts()
        assert not any(self.allocator.ref_counts), "nobody is left, but blocks are still held"
        assert self.allocator.num_free == self.allocator.num_blocks, (
            "nobody is left, but the pool is not whole"
        )
        self.counts["evicted"] = self.allocator.num_evictions
        self.counts["preempted"] = self.scheduler.num_preemptions
        self.counts["copied"], self.counts["forked"] = (
            self.scheduler.num_copies,
            self.scheduler.num_forks,
        )

    # -- requests come, fork, and are aborted ------------------------------------------------------

    def submit(self):
        rng, room = self.rng, self.room
        if (
            rng.random() < 0.1
            and self.room == self.allocator.num_blocks * self.allocator.block_size
        ):
            self.refused(rng.choice([0, room + 1, room + rng.randint(2, 9)]))
        length = rng.choice(
            [
                1,
                room,
                rng.randint(1, room),
                rng.randint(1, min(room, 24)),
                rng.randint(1, min(room, 24)),
            ]
        )
        start = rng.choice(self.seen) if self.seen and rng.random() < 0.7 else []
        prompt = start[: min(length, rng.randint(0, len(start)))]
        prompt = prompt + [rng.randrange(self.V) for _ in range(length - len(prompt))]
        longest = room + 1 - length  # the K, V of the last token are never needed
        max_new = rng.choice([1, min(longest, 40), rng.randint(1, min(longest, 40))])
        request = Request(
            len(self.accepted),
            prompt,
            max_new,
            arrival_time=self.step_number * self.time_per_step,
            priority=rng.choice([0, 0, 1, -2]),
            stop_token_ids=frozenset([rng.randrange(self.V)] if rng.random() < 0.2 else []),
            cache_salt=rng.choice(["", "", "", "pepper"]),
            params=rng.randrange(3),  # takes part in the choice of each token
            prompt_logprobs=rng.choice([None] * 8 + [0, 2]),
        )
        self.scheduler.add_request(request)
        texts = [
            extend(hash((len(request.cache_salt),)), prompt[0])
        ]  # other salts must share nothing
        for token in prompt[1:]:
            texts.append(extend(texts[-1], token))
        self.accept(request, texts)
        self.seen.append(prompt)

    def accept(self, request: Request, texts: list[int]):
        self.accepted.append(request)
        self.added_at[request.id] = self.step_number
        self.texts[request.id] = texts
        answer, text = list(request.generated_tokens), texts[-1]
        while True:
            answer.append(self.sample(text, request))
            text = extend(text, answer[-1])
            if answer[-1] in request.stop_token_ids or len(answer) == request.max_new_tokens:
                break
        self.expected[request.id] = (
            answer,
            "stop" if answer[-1] in request.stop_token_ids else "length",
        )

    def sample(self, text: int, request: Request) -> int:
        return hash((text, request.params, 1)) % self.V

    def refused(self, prompt_length: int):
        """
        No prompt, or one past the capacity; that exactly the capacity is accepted, `submit` shows
        all the time.
        """
        with pytest.raises(ValueError):
            self.scheduler.add_request(Request("refused", [0] * prompt_length, 1))
        self.counts["refused"] += 1

    def abort(self):
        alive = [r for r in self.accepted if r.id not in self.ended]
        if alive:
            request = self.rng.choice(alive)
            self.counts[f"aborted {request.status}"] += 1
            self.counts["aborted with a token to come"] += request.num_to_come > 0
            self.end(request)
            self.scheduler.check()

    def end(self, request: Request):
        self.scheduler.complete(request)
        self.ended.add(request.id)
        assert request.status == "done" and request.row is None and not request.block_table

    def fork(self):
        if not self.scheduler.active:
            return
        parent = self.rng.choice(self.scheduler.active)
        if parent.num_to_come:
            with pytest.raises(ValueError, match="token to come"):
                self.scheduler.fork(parent, "too early")
            return
        if not self.scheduler.free_rows:
            with pytest.raises(RuntimeError):
                self.scheduler.fork(parent, "no row")
            self.counts["no row to fork"] += 1
            return
        self.begin_fork(
            self.scheduler.fork(parent, len(self.accepted), params=self.rng.randrange(3)), parent
        )

    def fork_choice(self, parent: Request):
        """
        Another choice of a prompt, as the engine forks it: it computes the prompt's last token once
        more.
        """
        S, P = self.scheduler.block_size, len(parent.prompt_tokens)
        if (
            parent.status != "active"
            or parent.num_committed * S >= P
            or not self.scheduler.free_rows
        ):
            return
        table = parent.block_table[: -(-P // S)]
        if self.allocator.num_blocks in table[self.first_seen(P - 1) // S :]:
            self.counts["choice has no block"] += 1
            return
        own = {
            "generated_tokens": [],
            "num_filled_slots": P - 1,
            "block_table": table,
            "params": self.rng.randrange(3),
        }
        self.begin_fork(self.scheduler.fork(parent, len(self.accepted), **own), parent)
        self.counts["choice forked"] += 1

    def begin_fork(self, child: Request, parent: Request):
        self.tables[child.row][: len(child.block_table)] = child.block_table
        self.accept(child, self.texts[parent.id][: child.num_tokens])
        self.first_hits[child.id] = self.first_hits[parent.id]
        self.num_forked += 1
        self.scheduler.check()

    # -- one step ----------------------------------------------------------------------------------

    def step(self):
        scheduler = self.scheduler
        if len(scheduler.active) > scheduler.token_budget:
            self.counts["took turns"] += 1
        queue, prefilling, ending = (
            list(x) for x in (scheduler.waiting, scheduler.prefilling, scheduler.ending)
        )
        before = {r: (len(r.block_table), self.num_left(r)) for r in scheduler.running}
        plan = scheduler.plan(self.step_number)
        scheduler.check(plan)
        for request, (length, left) in before.items():
            if request.row is not None:
                grows = request.status == "prefilling" and len(request.block_table) > length
                self.counts["prompt had to grow"] += grows
                if self.num_left(request) > left:
                    self.counts["slid in need"] += 1
                    self.slid_in_need.add(request)
        self.check_order(plan, queue, prefilling, ending)
        self.count(plan)
        launched = None
        if plan.num_tokens and self.rng.random() < self.p_fail:
            self.fail(plan)
        else:
            tokens = self.execute(plan)
            before = {request: request.num_filled_slots + n for request, n in work_of(plan)}
            scheduler.advance(plan)
            assert all(r.num_filled_slots == filled for r, filled in before.items())
            launched = (plan, tokens) if plan.num_tokens else None
            self.counts["steps"] += 1
            self.counts["tokens"] += plan.num_tokens
        if self.overlap:
            launched, self.under_way = self.under_way, launched
        if launched:  # the step before is taken in, though this one failed: as the engine does
            self.collect(*launched)

    def collect(self, plan: Plan, tokens: list[int]):
        """The tokens of a step are known, with overlap one step late."""
        scheduler = self.scheduler
        scheduler.check()
        if self.overlap and self.rng.random() < self.p_fail:
            self.end_all(r for r in took_part(plan) if r.status != "done")
            self.counts["failed after launch"] += 1
            return
        full = self.full_blocks(plan)
        finished = scheduler.resolve(plan, tokens)
        scheduler.check()
        self.check_windows()
        cached = {self.kv[block][-1] for block in scheduler.block_cache.held}
        assert full <= cached, "a block was filled, and is not in the cache"
        self.check_finished(finished)
        self.check_conservation()
        for block in scheduler.block_cache.held:
            assert None not in self.kv[block], (
                f"block {block} was committed before its K, V existed"
            )
        for request in plan.completed:
            if (
                request.num_generated - request.num_to_come == 1
                and self.rng.random() < 3 * self.p_fork
            ):
                self.fork_choice(request)

    def full_blocks(self, plan: Plan) -> set[int]:
        """
        The texts of blocks that this step has filled, unless others hold them, too, or no block was
        free when they were left behind.
        """
        if not self.scheduler.settings.prefix_cache:
            return set()
        S = self.scheduler.block_size
        texts = set()
        for request, n in work_of(plan):
            if request.row is None:
                continue
            for index in range(request.num_committed, (request.num_computed_slots + n) // S):
                block = request.block_table[index]
                if block == self.allocator.num_blocks:
                    is_lost = request in self.slid_in_need
                else:
                    is_lost = self.allocator.ref_counts[block] > 1
                if not is_lost:
                    texts.add(self.texts[request.id][(index + 1) * S - 1])
        return texts

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) if self.window else 0

    def num_left(self, request: Request) -> int:
        """Blocks of its table that are given back."""
        return request.block_table.count(self.allocator.num_blocks)

    def check_windows(self):
        """
        What no token sees any more was given back at the end of its last block, and nothing else
        was.
        """
        S = self.scheduler.block_size
        for request in self.scheduler.running:
            left = self.num_left(request)
            ended = request.num_computed_slots // S * S
            seen = self.first_seen(request.num_filled_slots)
            assert self.first_seen(ended) // S <= left <= seen // S, (
                f"{request.id} at {request.num_filled_slots} has given back {left} blocks"
            )
            sinks = [self.allocator.num_blocks] * left
            assert request.block_table[:left] == sinks
            self.counts["slid"] += left > 0
            self.counts["longer than the pool"] += (
                len(request.block_table) > self.allocator.num_blocks
            )

    def count(self, plan: Plan):
        """What the scheduler's own counts must come to, from what can be seen of its plans."""
        self.num_preempted += len(plan.preempted)
        self.num_copied += len(plan.copies)
        self.peak = max(self.peak, sum(count > 0 for count in self.allocator.ref_counts))
        self.counts["preempted with a token to come"] += sum(
            r.num_to_come > 0 for r in plan.preempted
        )
        for request in plan.admitted:
            hits = self.longest_hit(request)
            assert request.num_filled_slots == hits, (
                f"{request.id}: {hits} tokens are cached, and not all were found"
            )
            self.first_hits.setdefault(request.id, hits)
            self.num_queried += request.num_tokens
            self.num_hits += hits
            self.counts["hit"] += hits > 0
            cached = {self.kv[block][-1] for block in self.scheduler.block_cache.held}
            first = self.texts[request.id][self.scheduler.block_size - 1 :][:1]
            self.counts["hit without its beginning"] += hits > 0 and not cached.issuperset(first)
            self.counts["hit after preemption"] += hits > 0 and request.num_preemptions > 0

    def longest_hit(self, request: Request) -> int:
        """
        How many of its tokens the cache holds, in whole blocks, less the last one: that is always
        computed. With a window it needs to hold what the first of the others sees.
        """
        if not self.scheduler.settings.prefix_cache or request.prompt_logprobs is not None:
            return 0
        S, texts = self.scheduler.block_size, self.texts[request.id]
        cached = {self.kv[block][-1] for block in self.scheduler.block_cache.held}
        ends = range(S, request.num_tokens, S)
        if not self.window:
            return next((end - S for end in ends if texts[end - 1] not in cached), len(ends) * S)
        for hits in reversed(ends):
            seen = range(self.first_seen(hits) // S * S + S, hits + 1, S)  # ends of blocks
            if all(texts[end - 1] in cached for end in seen):
                return hits
        return 0

    def check_counts(self):
        counted = {
            name: getattr(self.scheduler, f"num_{name}")
            for name in ("queried_tokens", "hit_tokens")
        }
        assert counted == {"queried_tokens": self.num_queried, "hit_tokens": self.num_hits}
        scheduler = self.scheduler
        counted = (
            scheduler.num_preemptions,
            scheduler.num_copies,
            scheduler.num_forks,
            scheduler.peak_blocks,
        )
        assert counted == (self.num_preempted, self.num_copied, self.num_forked, self.peak)

    def check_order(
        self, plan: Plan, queue: list[Request], prefilling: list[Request], ending: list[Request]
    ):
        """
        What `bound_on_steps` builds on: somebody advances, nobody is overtaken, the first in line
        is safe.
        """
        scheduler, work, urgency = self.scheduler, work_of(plan), self.scheduler.queue_key
        assert work or self.under_way, "a step without a token, while there is work"
        assert all(n >= 1 for _, n in work), "a request is scheduled for nothing"
        assert len({r for r, _ in work}) == len(work), "a request is scheduled twice"
        assert queue == sorted(queue, key=urgency), "the queue is out of order"
        assert not plan.admitted or plan.admitted == queue[: len(plan.admitted)], (
            "admitted out of turn"
        )
        most_urgent = min(
            (r for r in self.accepted if r.id not in self.ended), key=urgency, default=None
        )
        assert most_urgent not in plan.preempted, "the first in line was preempted"
        prefilling = [r for r in prefilling if r.status == "prefilling"]
        waits = self.window and ending  # for their blocks
        if prefilling and scheduler.token_budget > 1 and not waits:
            assert plan.chunks and plan.chunks[0][0] is prefilling[0], (
                "the first prompt got no token"
            )
        self.counts["overtook"] += [r for r, _ in plan.chunks] != scheduler.prefilling[
            : len(plan.chunks)
        ]
        for request in plan.preempted:  # it comes back at the end of the line
            self.turns_missed[request] = 0
        sat_out = (
            ending and self.allocator.num_free == 0
        )  # those who end give their blocks back: nobody is sent away
        self.counts["sat out"] += bool(sat_out)
        assert not (ending and plan.preempted), "preempted, while blocks were about to come back"
        for request in scheduler.active:
            if request in plan.decodes:
                self.turns_missed[request] = 0
            elif not sat_out:
                self.turns_missed[request] += 1
            assert self.turns_missed[request] < self.steps_per_turn(), (
                f"{request.id} was passed over"
            )

    def steps_per_turn(self) -> int:
        """
        Who decodes goes to the end of the line, and each step serves at least so many from its
        start.
        """
        scheduler = self.scheduler
        return -(
            -scheduler.max_num_seqs // max(1, scheduler.token_budget - scheduler.prefill_tokens)
        )

    def execute(self, plan: Plan) -> list[int]:
        """
        What the engine and its kernels do with a plan, in their order. Returns the sampled tokens.
        """
        S, kv = self.scheduler.block_size, self.kv
        copied = {to: list(kv[source]) for to, source in plan.copies.items()}
        for block in self.allocator.handed_out:
            kv[block] = [None] * S
        self.allocator.handed_out.clear()
        for to, slots in copied.items():
            kv[to] = slots
        for request in plan.admitted + [r for r, _ in plan.chunks]:
            self.tables[request.row][: len(request.block_table)] = request.block_table
        for request in plan.decodes:
            self.tables[request.row][len(request.block_table) - 1] = request.block_table[-1]
        work = work_of(plan)
        for request, n in work:
            table, texts, start = (
                self.tables[request.row],
                self.texts[request.id],
                request.num_filled_slots,
            )
            for position in range(start, start + n):
                kv[table[position // S]][position % S] = texts[position]
        for request, n in work:  # all K, V of a layer are written before anybody attends
            table, end = self.tables[request.row], request.num_filled_slots + n
            for p in range(self.first_seen(request.num_filled_slots), end):
                assert kv[table[p // S]][p % S] == self.texts[request.id][p], (
                    f"request {request.id} ({request.status}) attends to what is not its own: of "
                    f"{end} tokens, position {p} is the first wrong one"
                )
        return [self.sampled_token(r, n) for r, n in work if r in plan.sampled]

    def sampled_token(self, request: Request, n: int) -> int:
        texts, end = self.texts[request.id], request.num_filled_slots + n
        assert end == len(texts), f"request {request.id} samples at {end} of {len(texts)} tokens"
        S = self.scheduler.block_size
        read = self.kv[self.tables[request.row][(end - 1) // S]][(end - 1) % S]
        token = self.sample(read, request)
        texts.append(extend(read, token))
        return token

    def fail(self, plan: Plan):
        """
        As the engine does: whoever took part ends with an error. The device may or may not have
        computed.
        """
        if self.rng.random() < 0.5:
            self.execute(plan)
        self.end_all(took_part(plan))
        self.counts["failed"] += 1

    def end_all(self, requests):
        for request in requests:
            self.end(request)
        self.scheduler.check()

    # -- what must hold afterwards -----------------------------------------------------------------

    def check_finished(self, finished: list[Request]):
        for request in finished:
            answer, reason = self.expected[request.id]
            assert request.generated_tokens == answer, (
                f"request {request.id}: {request.generated_tokens} != {answer}"
            )
            assert (
                request.finish_reason == reason and request.status == "done" and request.row is None
            )
            assert request.num_hit_tokens == self.first_hits[request.id], (
                "cached tokens are those of its first admission"
            )
            self.counts["late stop"] += len(self.texts[request.id]) > request.num_tokens
            waited, bound = (
                self.step_number - self.added_at[request.id],
                self.bound_on_steps(request),
            )
            assert waited <= bound, f"request {request.id} took {waited} steps, bound {bound}"
            self.counts[f"finished by {reason}"] += 1
            self.ended.add(request.id)
            self.seen.append(request.tokens_so_far[: self.room])

    def bound_on_steps(self, request: Request) -> int:
        """
        From its arrival to its end. Let W be all tokens of all requests, and `first` the most
        urgent unfinished one.
        - While `first` waits no request is admitted, so none starts again, and each step computes a
          token that it will not compute again: after W steps the pool is empty, and one step later
          `first` is in. It stays: a victim is the least urgent.
        - Its prefill: each step computes a token of a prompt admitted before it or its own (with a
          budget of 1: or of a decode), and a preempted one comes back behind it: at most W steps.
        - Its answer: with more running than budget, a token each time its turn comes.
        Then somebody else is first. Of k requests more urgent than `request`, each can be first
        once, or twice when another arrives after it and goes before it. With overlap tokens are
        known a step later, and every second step may compute nothing: all wait for blocks that are
        about to come back.
        """
        urgency = self.scheduler.queue_key
        W = sum(len(r.prompt_tokens) + r.max_new_tokens for r in self.accepted)
        answer = self.steps_per_turn() * max(r.max_new_tokens for r in self.accepted)
        k = sum(urgency(r) < urgency(request) for r in self.accepted)
        return (1 + self.overlap) * (1 + 2 * k) * (2 * W + 1 + answer) + self.overlap

    def check_conservation(self):
        """Each accepted request is in exactly one of waiting, running and ended."""
        alive = [r.id for r in self.scheduler.waiting + self.scheduler.running]
        assert sorted([*alive, *self.ended]) == list(range(len(self.accepted))), (
            "a request was lost or doubled"
        )


def work_of(plan: Plan) -> list[tuple[Request, int]]:
    return [(r, 1) for r in plan.decodes] + plan.chunks


def took_part(plan: Plan) -> list[Request]:
    return list(dict.fromkeys(plan.decodes + [r for r, _ in plan.chunks] + plan.admitted))


def fuzz(trials: int, seed: int, steps: int | None = None) -> Counter:
    """
    Run trials with seeds seed, seed + 1, ..., or until so many steps are done. Returns what
    happened how often.
    """
    total = Counter()
    for i in range(trials):
        trial = Trial(seed + i)
        try:
            trial.run()
        except Exception as error:
            error.add_note(
                f"in step {trial.step_number} of: python tests/test_fuzz.py 1 {seed + i}"
            )
            raise
        total += trial.counts
        total["trials"] += 1
        if not trial.window:  # a text that slides holds few blocks, and is seldom preempted
            total["trials where none slides"] += 1
            total["of these, preempt"] += trial.counts["preempted"] > 0
        if steps is not None and total["steps"] >= steps:
            break
    return total


def report(counts: Counter, seconds: float) -> str:
    lines = [
        f"{name:22}{counts[name]:12,}"
        for name in (
            "trials",
            "trials where none slides",
            "of these, preempt",
            "steps",
            "tokens",
            *MUST_HAPPEN,
        )
    ]
    return "\n".join([*lines, f"{seconds:.1f} s, {counts['steps'] / seconds:,.0f} steps/s"])


def check_that_all_happened(counts: Counter):
    """A fuzz that never evicts proves nothing about eviction."""
    never = [name for name in MUST_HAPPEN if counts[name] == 0]
    assert not never, f"in {counts['trials']} trials nothing was ever {', '.join(never)}"
    assert counts["of these, preempt"] >= 0.3 * counts["trials where none slides"], (
        "fewer than 30% of the trials preempt in which no text slides"
    )


def run_and_report(trials: int, seed: int, steps: int | None = None):
    start = time.perf_counter()
    counts = fuzz(trials, seed, steps)
    print("\n" + report(counts, time.perf_counter() - start))
    check_that_all_happened(counts)


def test_fuzz():
    """
    Any of: a wrong share, a missed copy, a stale block, an early commit, a lost or starved request,
    a stall.
    """
    run_and_report(trials=400, seed=0)


@pytest.mark.slow
def test_fuzz_a_million_steps():
    """The same, long enough for what happens once in 100,000 steps."""
    run_and_report(trials=10**9, seed=10**6, steps=10**6)


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    run_and_report(*(given + [800, 0][len(given) :]))
