"""
What the engine says of itself and of each request, compared with what a bystander counts:
`Engine.stats()` and `counts()` after every step, every field of every Output, and nothing left when
it is idle. Random requests of all kinds in small pools, with aborts, failing steps and ids that are
used again, with overlap and without, by a clock of the test's own. No model: see pretend.py. The
simulator (simulator.py) goes through more faults and the whole loop; here each block that the cache
has must be found, not only no wrong one.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from pretend import VOCABULARY, answer_to, finish, greedy, pretend_engine, score, texts_of

from serving import engine as engine_module
from serving.engine import Output
from serving.params import SamplingParams
from test_paged import assert_idle

MUST_HAPPEN = [
    *(
        "stop",
        "length",
        "error",
        "abort",
        "logits that are not numbers",
        "failed step",
        "id used again late",
    ),
    *(
        "forked",
        "choice that waits",
        "choices never forked",
        "preempted",
        "scored prompt",
        "score",
        "hit",
    ),
    *("aborted while scored", "salted choice that waits", "urgent choice that waits"),
]


@dataclass
class Expected:
    """A choice, as whoever asked for it knows it, and what it has been told so far."""

    id: str
    prompt: list[int]
    params: SamplingParams
    choice: int
    salt: str
    priority: int
    arrival: float
    prompt_logprobs: int | None
    eos: tuple
    tokens: list[int] = field(default_factory=list)
    admitted: float | None = None
    cached_tokens: int | None = None  # None: not yet admitted
    promised: bool = False  # to be forked, or to wait, once its prompt is computed

    def __post_init__(self):
        self.answer, self.reason, self.scores = answer_to(
            self.prompt, self.params, self.choice, self.salt, self.eos
        )
        self.prompt_scores = None
        if self.prompt_logprobs is not None and len(self.prompt) > 1:
            texts = texts_of(self.prompt, self.salt)
            ends = range(1, len(texts))
            self.prompt_scores = [
                score(texts[:end], self.prompt[end], self.prompt_logprobs) for end in ends
            ]

    def next_output(self) -> Output:
        """What the engine must say of it next, unless a step fails."""
        at = len(self.tokens)
        if at == len(self.answer):
            return Output(
                self.id,
                [],
                "error",
                error="the model's logits are not numbers: its weights are broken",
            )
        is_last = at + 1 == len(self.answer) and self.reason != "error"
        prompt_scores = self.prompt_scores if at == 0 else None
        reason = self.reason if is_last else None
        return Output(
            self.id,
            [self.answer[at]],
            reason,
            self.cached_tokens,
            None,
            self.scores[at],
            prompt_scores,
        )

    @property
    def urgency(self) -> float:
        """By the policy "priority": seconds, as the README tells it."""
        return self.arrival + 240 * self.priority / (abs(self.priority) + 3)


class Trial:
    def __init__(self, seed: int, monkeypatch):
        self.rng = rng = random.Random(seed)
        self.clock = SimpleNamespace(now=100.0)
        monkeypatch.setattr(
            engine_module, "time", SimpleNamespace(monotonic=lambda: self.clock.now)
        )
        self.block_size = rng.choice([1, 2, 4])
        self.num_blocks = rng.randint(8, 24)
        self.room = min(self.block_size * self.num_blocks, 30)
        rows = rng.randint(1, 6)
        self.eos = rng.choice([(), (3,), (3, 7)])
        self.policy = rng.choice(["fcfs", "priority"])
        self.engine = pretend_engine(
            eos=self.eos,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=rows,
            token_budget=rng.randint(rows, rows + 12),
            policy=self.policy,
            watermark=rng.choice([0.0, 0.1]),
            prefix_cache=rng.random() < 0.8,
            overlap=rng.random() < 0.6,
        )
        self.counts = Counter()
        self.live: dict[str, Expected] = {}
        self.seen: list[list[int]] = []
        self.totals = Counter()  # what counts() must say
        self.waited: list[float] = []
        self.prefilled: list[float] = []
        self.fault = None
        self.failing = None  # the plan whose step fails now
        self.p_abort = rng.choice([0.0, 0.1])
        self.p_fail = rng.choice([0.0, 0.04])
        self.watch()

    # -- in ----------------------------------------------------------------------------------------

    def submit(self, again: str | None = None):
        """A request of any kind, by a free id, or by one that was free `again` a moment ago."""
        rng = self.rng
        length = rng.randint(1, self.room - 1)
        start = rng.choice(self.seen)[:length] if self.seen and rng.random() < 0.7 else []
        prompt = start + [rng.randrange(VOCABULARY) for _ in range(length - len(start))]
        params = SamplingParams(
            max_tokens=rng.randint(1, self.room - length),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(5),
            stop_token_ids=rng.choice([(), (5,)]),
            ignore_eos=rng.random() < 0.2,
            logprobs=rng.choice([None, None, 0, 2]),
        )
        free = [
            id for id in "abcdefghijkl" if not any(live.split(".")[0] == id for live in self.live)
        ]
        if not free:
            return
        id = again if again in free else rng.choice(free)
        n = rng.choice([1, 1, 3])
        salt = rng.choice(["", "", "pepper"])
        priority = rng.choice([0, 0, -2, 5])
        scored = rng.choice([None, None, None, 0, 1])
        flight = self.engine.in_flight
        late = flight is not None and any(r.id == id for r in flight.plan.sampled)
        self.counts["id used again late"] += late
        self.engine.add_request(
            id, prompt, params, priority, n=n, prompt_logprobs=scored, cache_salt=salt
        )
        now = self.clock.now
        self.live[id] = Expected(id, prompt, params, 0, salt, priority, now, scored, self.eos)
        for choice in range(1, n):
            name = f"{id}.{choice}"
            self.live[name] = Expected(
                name, prompt, params, choice, salt, priority, now, None, self.eos, promised=True
            )
        self.seen.append(prompt)

    def abort(self):
        id = self.rng.choice(
            [id for id, live in self.live.items() if not live.promised] or ["nobody"]
        )
        if id in self.live:
            self.counts["aborted while scored"] += id in self.engine.prompt_scores
            self.counts["abort"] += 1
            self.end(id)
        self.engine.abort(id)
        if self.rng.random() < 0.7:
            self.submit(again=id)

    def end(self, id: str):
        """It is over; choices that were promised with it never come."""
        self.live.pop(id)
        for name in [
            name for name, live in self.live.items() if live.promised and name.startswith(f"{id}.")
        ]:
            self.counts["choices never forked"] += 1
            del self.live[name]

    # -- a step, watched ---------------------------------------------------------------------------

    def watch(self):
        """Count what goes from the scheduler to the runner and back, and let some steps fail."""
        scheduler = self.engine.scheduler
        runner = self.engine.runner
        plan, launch, wait_for = scheduler.plan, runner.launch, runner.wait_for  # the real ones

        def planned(step):
            made = plan(step)
            self.totals["preemptions"] += len(made.preempted)
            for r in made.admitted:
                self.note_admission(r)
            return made

        def launched(made):
            self.totals["steps"] += 1
            if self.fault == "launch":
                self.failing = made
                raise FloatingPointError("bad number")
            self.totals["decode tokens"] += len(made.decodes)
            self.totals["prefill tokens"] += sum(n for _, n in made.chunks)
            return launch(made)

        def collected(flight):
            if self.fault == "collect":
                self.failing = flight.plan
                raise FloatingPointError("bad number")
            return wait_for(flight)

        scheduler.plan = planned
        runner.launch = launched
        runner.wait_for = collected

    def note_admission(self, request):
        expected = self.live[request.id]
        hits = self.longest_hit(expected, request.num_tokens)
        assert request.num_filled_slots == hits, f"{request.id}: {hits} tokens are cached"
        self.counts["hit"] += hits > 0
        self.totals["queried tokens"] += request.num_tokens
        self.totals["hit tokens"] += hits
        if expected.cached_tokens is None:
            expected.cached_tokens = hits
            expected.admitted = self.clock.now
            self.waited.append(self.clock.now - expected.arrival)

    def longest_hit(self, expected: Expected, num_tokens: int) -> int:
        """
        Tokens in whole blocks whose text, and salt, is that of a block in the cache; the last token
        is computed.
        """
        S, scheduler = self.block_size, self.engine.scheduler
        if not scheduler.settings.prefix_cache or expected.prompt_logprobs is not None:
            return 0
        cached = {self.engine.runner.kv[block][-1] for block in scheduler.block_cache.held}
        texts = texts_of(expected.prompt + expected.answer, expected.salt)
        ends = range(S, num_tokens, S)
        return next((end - S for end in ends if texts[end - 1] not in cached), len(ends) * S)

    def step(self):
        self.fault = (
            self.rng.choice(["launch", "collect"]) if self.rng.random() < self.p_fail else None
        )
        self.failing = None
        self.clock.now += self.rng.choice([0.5, 1.0, 30.0])
        outputs = self.engine.step()
        failed = []
        if self.failing:
            self.counts["failed step"] += 1
            took_part = [
                *self.failing.decodes,
                *(r for r, _ in self.failing.chunks),
                *self.failing.admitted,
            ]
            failed = list(dict.fromkeys(r.id for r in took_part if r.finish_reason == "error"))
            assert all(r.status == "done" for r in took_part)
        for output in outputs:
            self.hear(output, failed)
        for name in failed:
            assert name not in self.live, f"{name} was not told that its step failed"
        self.check_stats()

    def hear(self, output: Output, failed: list[str]):
        expected = self.live[output.id]
        assert not expected.promised
        if output.id in failed and output.error == "FloatingPointError: bad number":
            assert output == Output(output.id, [], "error", error=output.error)
            self.counts["error"] += 1
            self.end(output.id)
            return
        assert output == expected.next_output()
        if not output.tokens:
            self.counts["logits that are not numbers"] += 1
        if len(expected.tokens) == 0:
            self.note_first_output(expected)
        expected.tokens += output.tokens
        self.counts["score"] += output.logprobs is not None
        self.counts["scored prompt"] += output.prompt_logprobs is not None
        if output.finish_reason:
            self.counts[output.finish_reason] += 1
            self.end(output.id)

    def note_first_output(self, expected: Expected):
        if expected.admitted is not None:
            self.prefilled.append(self.clock.now - expected.admitted)
        for name, choice in self.live.items():
            if choice.promised and name.startswith(f"{expected.id}."):
                choice.promised = False
                request = self.engine.requests[name]
                if request.row is None:
                    self.counts["choice that waits"] += 1
                    self.counts["salted choice that waits"] += choice.salt != ""
                    self.counts["urgent choice that waits"] += choice.priority != 0
                else:
                    choice.cached_tokens = expected.cached_tokens
                    self.counts["forked"] += 1

    def check_stats(self):
        engine = self.engine
        totals = self.totals
        requests = engine.requests.values()
        assert set(engine.requests) == {id for id, live in self.live.items() if not live.promised}
        first_of = {name.split(".")[0] for name, live in self.live.items() if live.promised}
        assert set(engine.num_choices) == first_of and set(engine.prompt_scores) <= set(
            engine.requests
        )
        stats = engine.stats()
        held = {block for r in requests for block in r.block_table}
        assert stats.pop("kv_usage") == pytest.approx(len(held) / self.num_blocks, abs=1e-12)
        assert sorted(stats.pop("waited")) == sorted(self.waited)
        assert sorted(stats.pop("prefilled")) == sorted(self.prefilled)
        assert stats == {
            "running": sum(r.row is not None for r in requests),
            "waiting": sum(r.row is None for r in requests),
            "queries": totals["queried tokens"],
            "hits": totals["hit tokens"],
            "preemptions": totals["preemptions"],
            "at_work": len(self.live),
        }
        counts = engine.counts()
        assert len(counts) == 6 and counts == {name: totals[name] for name in counts}
        self.waited = []
        self.prefilled = []
        if self.policy == "priority":
            urgencies = [self.live[r.id].urgency for r in engine.scheduler.waiting]
            assert urgencies == sorted(urgencies), "the queue is out of order"

    def run(self):
        to_come = self.rng.randint(3, 14)
        turns = 0
        while to_come or self.engine.has_work:
            turns += 1
            assert turns < 5000, f"{[*self.live]} never end"  # it takes some hundred at most
            while to_come and self.rng.random() < 0.4:
                to_come -= 1
                self.submit()
            if self.rng.random() < self.p_abort:
                self.abort()
            self.step()
        assert not self.live and self.engine.in_flight is None
        assert_idle(self.engine)
        self.counts["preempted"] += self.totals["preemptions"]
        self.counts["steps"] += self.totals["steps"]


def test_the_engine_tells_what_a_bystander_counts(monkeypatch):
    """
    Would catch: a gauge that counts cached blocks as used, or that stays after the last abort;
    choices that wait without their salt or priority; scores of an aborted prompt kept, or given to
    the next of its name; cached tokens of another admission than the first; a log-probability of
    another token or another request; a delay told twice.
    """
    counts = Counter()
    for seed in range(120):
        trial = Trial(seed, monkeypatch)
        try:
            trial.run()
        except Exception as error:
            error.add_note(f"in the trial of seed {seed}, step {trial.totals['steps']}")
            raise
        counts += trial.counts
    never = [name for name in MUST_HAPPEN if not counts[name]]
    assert not never, f"never: {', '.join(never)} in {counts}"


def test_a_late_prefill_of_an_aborted_request_forks_and_tells_nothing():
    """
    Preempted with a token, it had computed its prompt again when it was aborted, before that step's
    token was known: the step then told its delay a second time, and forked the choices of whoever
    had its id by now, from its prompt.
    """
    engine = pretend_engine(
        block_size=1, num_blocks=9, max_num_seqs=2, watermark=0, prefix_cache=False, overlap=True
    )
    engine.add_request("long", [1, 2, 3, 4], greedy(5))
    old = engine.add_request("a", [5, 6], greedy(5))
    while not (old.num_preemptions and old.num_to_come):
        engine.step()
    assert old.num_generated > old.num_to_come == 1
    engine.stats()
    engine.abort("a")
    engine.add_request("a", [7, 8], greedy(2), n=2)
    outputs = engine.step()
    assert "a.1" not in engine.requests and not engine.stats()["prefilled"]
    outputs += finish(engine)
    told = {
        id: [t for output in outputs if output.id == id for t in output.tokens]
        for id in ("a", "a.1")
    }
    assert told["a"] == told["a.1"] == answer_to([7, 8], greedy(2))[0]


def test_a_failed_step_ends_who_was_admitted_in_it_without_a_token():
    """
    Its row was not filled on the device: it would have gone on with the block table of who had the
    row before.
    """
    engine = pretend_engine(token_budget=3, max_num_seqs=3, max_num_partial_prefills=1)
    launch = engine.runner.launch

    def fail(plan):
        engine.runner.launch = launch
        assert [r.id for r in plan.admitted] == ["a", "b"] and [r.id for r, _ in plan.chunks] == [
            "a"
        ]
        raise FloatingPointError("bad number")

    engine.runner.launch = fail
    for id in "ab":
        engine.add_request(id, [1, 2, 3, 4, 5], greedy(2))
    assert engine.step() == [
        Output(id, [], "error", error="FloatingPointError: bad number") for id in "ab"
    ]
    assert_idle(engine)


def test_a_late_failure_is_not_that_of_who_has_the_id_now():
    """
    A step that fails when its tokens are fetched ends those who took part, not others by their ids.
    """
    engine = pretend_engine(overlap=True)
    wait_for = engine.runner.wait_for

    def fail(flight):
        engine.runner.wait_for = wait_for
        raise FloatingPointError("bad number")

    engine.add_request("a", [1, 2, 3], greedy(5))
    engine.add_request("b", [1, 2, 4], greedy(5))
    engine.step()
    engine.abort("a")
    engine.add_request("a", [7, 8], greedy(3))
    engine.runner.wait_for = fail
    assert engine.step() == [Output("b", [], "error", error="FloatingPointError: bad number")]
    assert [t for output in finish(engine) for t in output.tokens] == answer_to([7, 8], greedy(3))[
        0
    ]
    assert_idle(engine)
