"""
The real engine through a million faults: allocator, prefix cache, scheduler, engine, and the loop
that a server runs. Everything that could make two runs differ is replaced. The clock is virtual,
and the runner has no model (simulated_device.py): it answers with a hash of the text that it reads
through the block table. So the right answer is known beforehand, and a single wrong table, slot,
copy, commit, hit or stale row changes it.

    python -m tests.simulator --seed 7               # one life of an engine, some hundred steps
    python -m tests.simulator --seed 7 --steps 1e6   # lives 7, 8, .. up to 1e6 steps, on all cores
    python -m tests.simulator --replay FILE          # a failure again, from the trace that it left

A seed decides a life: which features and faults it has (a random subset, called swarm testing:
Groce et al. 2012), the settings of the engine, and a list of events. Everything else follows from
these, on any machine. A failing list is shrunk and written as a trace. Its first line has the
settings, every other line an event.

After each step `Scheduler.check()` must pass, and more: every answer is exact, each token is sent
once, the queue is in order, no request starves, counters and stats are true, and an idle engine has
nothing left.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, takewhile
from typing import NamedTuple
from unittest import mock

from assets.records import PoolState
from common import end_with_one_line
from engine import engine as engine_module
from engine import process as loop
from engine.drafts import GrowingText
from engine.runner import Runner
from engine.stages import STAGES
from paged import Plan, Request
from params import Settings
from test_paged import reachable_requests
from tests.shrink import shrink
from tests.simulated_device import (
    NoModel,
    SimulatedDevice,
    answer,
    noise_key,
    score,
    scores_of,
    seen,
)
from tests.swarm import a_life, longest_text, simpler
from tests.virtual import Clock

# --------------------------------------------------------------------------------------------------
# The truth about a text that a client waits for


@dataclass(eq=False, slots=True)
class Text:
    """
    One choice of a request, derived from what was asked. Only times and first hits come from the
    engine.
    """

    id: str
    tokens: list[int]  # the right answer
    reason: str  # and how it ends
    choice: int
    prompt: list[int]
    params: dict
    stops: set[int]
    priority: int
    salt: str
    arrival: float
    prompt_logprobs: int | None = None
    number: int = 0  # the order of arrival
    urgency: tuple[float, int] = (0.0, 0)  # the smallest goes first
    others: list["Text"] = field(default_factory=list)  # choices to be forked after its first token
    num_sent: int = 0  # tokens so far
    runs: bool = False  # has a row
    added_at: int = 0  # step
    ended_at: int | None = None
    hits: int | None = None  # tokens of the prompt that were found when it was first admitted
    admitted: float | None = None  # when
    broken_at: int | None = None  # which of its tokens came from logits that are not numbers

    @property
    def length(self) -> int:
        return len(self.prompt) + self.params["max_tokens"]

    def writer(self, index: int) -> "Writer":
        return Writer(self.prompt, self.tokens, self.salt, index)


URGENCY = {  # the smallest goes first: written independently from the README, in seconds
    "fcfs": lambda t: (t.arrival, t.number),
    "priority": lambda t: (t.arrival + 240 * t.priority / (abs(t.priority) + 3), t.number),
    "sjf": lambda t: (t.arrival + 0.05 * t.length, t.number),
}


class Writer(NamedTuple):
    """The text that last wrote a block, and which of its blocks that is."""

    prompt: list[int]
    answer: list[int]
    salt: str
    index: int

    def text(self, S: int) -> tuple[str, bytes]:
        """
        Return salt and text up to the end of the block: what a hit must have in common with it.
        """
        return self.salt, bytes((self.prompt + self.answer)[: (self.index + 1) * S])


class FaultyDevice(SimulatedDevice):
    """Its logits are not numbers when its `world` says so."""

    def __init__(self, *args, world: "World"):
        super().__init__(*args, padded=world.settings["padded"])
        self.world = world

    def breaks(self, request: Request):
        text = self.world.live[request.id]
        if text.broken_at is None:
            text.broken_at = request.num_generated


class FaultyRunner(Runner):
    """Raises or is late when its `world` says so."""

    def __init__(self, device: FaultyDevice, settings: Settings):
        super().__init__(device, settings)
        self.world = device.world

    def launch(self, plan: Plan):
        self.world.writes(plan)
        fault = self.world.armed.pop("launch", None)
        if fault:
            self.world.must_fail(plan)
        if fault == "before":
            raise FloatingPointError("simulated, before anything was computed")
        flight = super().launch(plan)
        if fault:
            raise FloatingPointError("simulated, after all was computed")
        return flight

    def wait_for(self, flight):
        world = self.world
        world.clock.now += world.armed.pop("late", 0.0)
        if world.armed.pop("collect", None):
            world.must_fail(flight.packed.plan)
            raise FloatingPointError("simulated, when it was waited for")
        world.truth["guessed"] += sum(map(len, flight.packed.plan.guesses.values()))
        return super().wait_for(flight)


class World:
    """
    Everything around one engine. The engine's loop takes it for its link, so the loop itself is the
    real one. `run` plays all events, waits until the engine is idle, and raises AssertionError if
    anything is wrong.
    """

    def __init__(self, settings: dict, events: list[dict]):
        self.settings = settings
        self.events = events
        self.clock = Clock()
        self.V = settings["V"]
        self.S = settings["engine"]["block_size"]
        self.overlap = settings["engine"]["overlap"]
        self.window = settings["window"]
        self.eos = set() if settings["eos"] is None else {settings["eos"]}
        self.urgency = URGENCY[settings["engine"]["policy"]]
        self.next_event = 0
        self.countdown = 0  # steps until the next event
        self.patience = 0  # steps that it has waited beyond that
        self.counts = Counter()  # what happened
        self.steps = 0  # that computed at least one token
        self.unsent = b""  # a link that is never behind
        self.is_over = False

    def renew(self):
        """Reset everything that belongs to one engine."""
        self.live: dict[str, Text] = {}  # waiting or running
        self.promised: dict[str, Text] = {}  # choices to be forked
        self.armed: dict[str, object] = {}  # faults of the next step
        self.truth = Counter()  # what the engine's counts must be
        self.waited: list[float] = []  # what its stats must say, since they were last requested
        self.prefilled: list[float] = []
        self.failing: list[Text] = []  # those that must get an error in this step
        self.writers: dict[int, Writer] = {}  # block -> who wrote it last
        self.first_computed: dict[Request, int] = {}  # position, since it was admitted
        self.everybody: list[Text] = []
        self.reported_idle = True
        self.restarting = False

    def run(self) -> Counter:
        """Play all events. Returns how often each thing happened."""
        settings = self.settings
        guess = mock.patch.object(GrowingText, "guess", lambda *args: self.guess(*args))
        device = partial(FaultyDevice, world=self)
        stand_ins = {"time": self.clock, "Device": device, "Runner": FaultyRunner}
        with mock.patch.multiple(engine_module, **stand_ins), guess:
            while not self.is_over:
                self.renew()
                model = NoModel(self.V, settings["context"], tuple(self.eos), self.window)
                self.engine = engine_module.Engine(model, Settings(**settings["engine"]))
                self.longest = longest_text(settings)
                self.watch_scheduler()
                loop.serve(self.engine, self)
        self.counts["steps"] = self.steps
        return self.counts

    def guess(self, text: GrowingText, most: int) -> list[int]:
        """
        Replaces a text's own guess by what will come, even beyond its end, but every third guess is
        wrong. Now and then there is none, more often if the engine then continues with overlap.
        """
        is_silent = self.steps % 5 == 0 or (text.request.num_to_come and self.steps % 3)
        if not text.can_guess or most < 1 or is_silent:
            return []
        right = self.live[text.request.id].tokens[text.request.num_generated :] + [0] * most
        return [(t + (i % 3 == 0)) % self.V for i, t in enumerate(right[:most], self.steps)]

    def watch_scheduler(self):
        scheduler = self.engine.scheduler
        plan = scheduler.plan
        resolve = scheduler.resolve

        def watched() -> Plan:
            # their blocks come back with the running step, so no request needs to be preempted for
            # these
            ending = [r.id for r in scheduler.finishing]
            made = plan()
            assert not (ending and made.preempted), f"preempted, while {ending} are about to end"
            self.saw(made)
            return made

        def resolved(plan: Plan, tokens: dict[Request, list[int]]) -> list[Request]:
            filled = self.filled_by(plan, tokens)
            finished = resolve(plan, tokens)
            self.check_cached(filled)
            return finished

        def heard(flight) -> list:
            # with drafts the next plan may come before the step is over
            outputs = {output.id: output for output in resolve_flight(flight)}
            for id in [r.id for r in flight.plan.sampled if r.id in outputs]:  # in fork order
                loop.queue_output(self, outputs.pop(id))
            for output in outputs.values():
                loop.queue_output(self, output)
            return []

        scheduler.plan = watched
        scheduler.resolve = resolved
        resolve_flight = self.engine._resolve
        self.engine._resolve = heard

    # -- the engine's link -------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return not self.restarting and not self.is_over

    def send(self, message: dict):
        sizes = {"max_num_seqs": self.settings["engine"]["max_num_seqs"], "vocab_size": self.V}
        limits = {
            "max_model_len": self.longest,
            "eos_token_ids": tuple(self.eos),
            "stages": [*STAGES],
        }
        assert message == {"op": "ready"} | sizes | limits

    def receive(self, timeout: float | None):
        """
        Yield what arrives before the next step, one message at a time. The engine handles each
        message before the next one is made.
        """
        assert (timeout is None) == (not self.engine.has_work), f"the loop waits for {timeout} s"
        if timeout is None:
            self.check_idle()
            self.countdown = 0
        while self.countdown <= 0 and self.is_open:
            if self.next_event == len(self.events):
                self.is_over = not self.engine.has_work
                return
            event = self.events[self.next_event]
            if self.patience < event.get("patience", 0) and not self.is_time_for(event):
                self.patience += 1
                return
            self.patience = 0
            self.next_event += 1
            yield from getattr(self, event["do"])(event)
            if self.next_event < len(self.events):
                self.countdown += self.events[self.next_event]["after"]
        self.countdown -= 1

    def is_time_for(self, event: dict) -> bool:
        """
        Return True if this event may happen. Some events wait for a while for a text in a certain
        state.
        """
        if not self.engine.has_work:
            return True
        return self.find(event) is not None

    def flush(self, stats: dict):
        self.check(stats)
        self.clock.now += self.settings["tick"]

    # -- what arrives: events ----------------------------------------------------------------------

    def add(self, event: dict):
        """Add a request. Its right answer is computed here, before the engine gets the request."""
        id = event["id"]
        prompt = event["prompt"]
        params = event["params"]
        options = event["options"]
        n = options.get("n", 1)
        ids = [id, *(f"{id}.{i}" for i in range(1, n))]
        self.refusal = self.why_refused(ids, prompt, params)
        self.answered = None
        self.explained = ""
        if not self.refusal:
            self.accept(ids, prompt, params, options)
        asked = {"prompt": prompt, "params": dict(params), "options": options}
        yield {"op": "add", "id": id} | asked
        assert self.answered == self.refusal, (
            f"request {id}: right is {self.refusal!r}, the engine answered {self.answered!r} "
            f"{self.explained}"
        )
        self.counts["refused"] += self.refusal is not None

    def why_refused(self, ids: list[str], prompt: list[int], params: dict) -> str | None:
        taken = any(id in self.live or id in self.promised for id in ids)
        fits = prompt and len(prompt) + params["max_tokens"] <= self.longest
        return None if fits and not taken and max(prompt) < self.V else "invalid"

    def accept(self, ids: list[str], prompt: list[int], params: dict, options: dict):
        stops = set(params.get("stop_token_ids", ()))
        if not params.get("ignore_eos"):
            stops |= self.eos
        texts = []
        for choice, id in enumerate(ids):
            key = noise_key(params["seed"], choice)
            right = answer(prompt, params["max_tokens"], stops, key, self.V, self.window)
            text = Text(id, *right, choice, prompt, params, stops, 0, "", self.clock.now)
            text.priority = options.get("priority", 0)
            text.salt = options.get("cache_salt", "")
            texts.append(text)
        first, *others = texts
        first.prompt_logprobs = options.get("prompt_logprobs")
        first.others = others
        self.promised |= {text.id: text for text in others}
        self.comes_alive(first)

    def comes_alive(self, text: Text):
        self.live[text.id] = text
        self.everybody.append(text)
        text.added_at = self.steps
        self.truth["added"] += 1
        text.number = self.truth["added"]
        text.urgency = self.urgency(text)

    def find(self, event: dict) -> Text | None:
        """Return the text that an event aims at: one of those in a certain state."""
        candidates = []
        for id, text in self.live.items():
            r = self.engine.requests[id]
            states = {r.status}
            if r.num_to_come:
                states.add("to come")
            if r.num_preemptions and r.status == "waiting":
                states.add("preempted")
            if text.prompt_logprobs is not None and r.status == "prefilling":
                states.add("scoring")
            if text.others:
                states.add("promising")
            if event["state"] in states or event["state"] == "any":
                candidates.append(text)
        return candidates[event["pick"] % len(candidates)] if candidates else None

    def abort(self, event: dict):
        text = self.find(event)
        if text:
            yield from self.hang_up(text)
            self.counts["abort"] += 1
            self.counts[f"abort: {event['state']}"] += 1

    def hang_up(self, text: Text):
        self.ends(text)
        yield {"op": "abort", "id": text.id}

    def replace(self, event: dict):
        """
        Abort, and reuse the id immediately, before the step in which the first owner took part is
        over.
        """
        text = self.find(event)
        if text:
            yield from self.hang_up(text)
            yield from self.add(event | {"id": text.id})
            self.counts["id used again"] += 1

    def fault(self, event: dict):
        """Make the next step late, or make it raise when it is launched or collected."""
        self.armed[event["where"]] = event["how"]
        self.counts["late step"] += event["where"] == "late"
        return ()

    def broken(self, event: dict):
        """Make the next logits of a request not numbers."""
        text = self.find(event)
        if text:
            self.engine.device.broken_logits.add(self.engine.requests[text.id])
        return ()

    def jump(self, event: dict):
        self.clock.now += event["seconds"]
        self.counts["clock jump"] += 1
        return ()

    def restart(self, event: dict):
        """Stop the engine, in any state, and build another."""
        self.restarting = True
        self.counts["restart"] += 1
        return ()

    def fork(self, event: dict):
        """Fork a second continuation in the middle of an answer, like beam search."""
        parent = self.find(event)
        engine = self.engine
        if parent is None or self.overlap or not engine.scheduler.free_rows:
            return ()
        child = engine.scheduler.fork(
            engine.requests[parent.id],
            f"{parent.id}/{event['id']}",
            index=event["choice"],
            prompt_logprobs=None,
        )
        engine._announce(child)
        engine.device.fill_rows(child)
        so_far = parent.tokens[: parent.num_sent]
        key = noise_key(child.params.seed, event["choice"])
        left = parent.params["max_tokens"] - parent.num_sent
        text = parent.prompt + so_far
        tokens, reason = answer(text, left, parent.stops, key, self.V, self.window)
        own = {"id": child.id, "tokens": so_far + tokens, "reason": reason, "prompt_logprobs": None}
        self.comes_alive(replace(parent, admitted=None, others=[], broken_at=None, **own))
        self.counts["forks"] += 1
        return ()

    # -- what the engine says ----------------------------------------------------------------------

    def queue_row(self, row: list):
        id, tokens, reason, cached, *scores = row
        text = self.live.get(id)
        assert text, f"{row} is for an unknown request"
        assert text not in self.failing and text.num_sent != text.broken_at, (
            f"{text.id} was to fail, and got {row}"
        )
        end = text.num_sent + len(tokens)
        right = text.tokens[text.num_sent : end]
        end = text.reason if end == len(text.tokens) else None
        assert tokens and tokens == right, (
            f"{id} got {tokens} after {text.num_sent} tokens, right is {right}"
        )
        assert reason == end, f"{id} ends with {reason}, right is {end}"
        assert cached == text.hits, f"{id}: {cached} cached tokens, {text.hits} were found at first"
        self.check_scores(text, right, *scores)
        self.has_tokens(text, len(tokens))
        for name in ("right", "decode tokens"):
            self.truth[name] += len(tokens) - 1
        self.counts["drafts"] += len(tokens) > 1
        if end:
            self.counts["stop tokens" if reason == "stop" else "full length"] += 1
            self.ends(text)

    def check_scores(self, text: Text, tokens: list[int], logprobs, prompt_logprobs):
        right = None
        n = text.params.get("logprobs")
        if n is not None:
            [token] = tokens
            so_far = bytes(text.prompt + text.tokens[: text.num_sent])
            right = [score(seen(so_far, self.window), token, n, self.V)]
        assert logprobs == right, f"{text.id}: log-probabilities {logprobs}, right: {right}"
        right = None
        n = text.prompt_logprobs
        if n is not None and text.num_sent == 0 and len(text.prompt) > 1:
            right = scores_of(text.prompt, n, self.V, self.window)
        assert prompt_logprobs == right, (
            f"{text.id}: scores of the prompt {prompt_logprobs}, right: {right}"
        )

    def has_tokens(self, text: Text, n: int):
        text.num_sent += n
        if text.num_sent > n:
            return
        if n and text.admitted is not None:
            self.prefilled.append(self.clock.now - text.admitted)
        for other in text.others:
            del self.promised[other.id]
            # a fork, otherwise it waits for a row
            other.runs = self.engine.requests[other.id].status == "active"
            other.hits = text.hits if other.runs else None
            self.comes_alive(other)
        text.others = []

    def queue(self, message: dict):
        """Receive an error."""
        kind = message["kind"]
        if kind != "internal":
            self.answered = kind
            self.explained = message["message"]
            return
        text = self.live.get(message["id"])
        assert text, f"{message} is for an unknown request"
        if text in self.failing:
            self.failing.remove(text)
            assert message["message"].startswith("FloatingPointError: simulated"), (
                f"{text.id} ends with {message}"
            )
            self.counts["step raises"] += 1
        else:
            assert text.num_sent == text.broken_at, (
                f"{text.id} fails after {text.num_sent} tokens: {message}"
            )
            assert "not numbers" in message["message"], f"{text.id} ends with {message}"
            self.has_tokens(text, 0)  # the step went well, and its other choices go on
            self.counts["broken logits"] += 1
        self.ends(text)

    def ends(self, text: Text):
        del self.live[text.id]
        text.ended_at = self.steps
        for other in text.others:
            del self.promised[other.id]

    # -- what must hold ----------------------------------------------------------------------------

    def saw(self, plan: Plan):
        """Check a plan as the scheduler made it, before anything is computed."""
        scheduler = self.engine.scheduler
        computes = plan.num_tokens > 0
        self.steps += computes
        self.truth["steps"] += computes
        self.truth["preemptions"] += len(plan.preempted)
        for request in plan.admitted:
            self.truth["queried tokens"] += request.num_tokens
            self.truth["hit tokens"] += request.num_filled_slots
        assert computes or scheduler.is_done() or self.engine.in_flight, (
            "a step without a token, while there is work"
        )
        if "launch" not in self.armed:
            self.truth["decode tokens"] += len(plan.decodes)
            self.truth["prefill tokens"] += plan.num_tokens - len(plan.decodes)
        if plan.preempted:
            self.check_preempted(plan)
        for request in plan.admitted:
            self.check_admitted(self.live[request.id], request)
        if scheduler.waiting:
            self.check_queue(plan)

    def writes(self, plan: Plan):
        """Note who writes each block, including drafts."""
        self.engine.scheduler.check_plan(plan)
        for request, _ in plan.work:
            text = self.live[request.id]
            for i in range(request.num_filled_slots // self.S, len(request.block_table)):
                self.writers[request.block_table[i]] = text.writer(i)

    def urgencies(self, requests: Iterable[Request]) -> list:
        return [self.live[r.id].urgency for r in requests]

    def check_preempted(self, plan: Plan):
        """Check that preempted requests come after all that stay."""
        self.counts["tiny pool"] += len(plan.preempted)
        for request in plan.preempted:
            self.live[request.id].runs = False
        stay = self.urgencies(self.engine.scheduler.running)
        away = self.urgencies(plan.preempted)
        assert not stay or max(stay) < min(away), f"preempted: {away}, while {stay} stay"

    def check_queue(self, plan: Plan):
        """
        Check that the most urgent come first, and that no admitted request is less urgent than one
        that waits.
        """
        order = self.urgencies(self.engine.scheduler.waiting)
        assert order == sorted(order), f"the queue is out of order: {order}"
        admitted = self.urgencies(plan.admitted)
        assert not admitted or max(admitted) < order[0], (
            f"{admitted} were admitted before {order[0]}"
        )

    def check_admitted(self, text: Text, request: Request):
        text.runs = True
        S = self.S
        hits = request.num_filled_slots
        right = self.longest_hit(text, request.num_tokens)
        assert hits == right, f"{text.id}: {hits} tokens found in the cache, {right} are there"
        self.first_computed[request] = hits
        for index in range(hits // S):
            writer = self.writers[request.block_table[index]]
            assert writer.text(S) == text.writer(index).text(S), (
                f"{text.id} of salt {text.salt!r} finds {writer.text(S)}"
            )
        self.counts["prefix cache"] += hits > 0
        if text.hits is None:
            text.hits = hits
            text.admitted = self.clock.now
            self.waited.append(self.clock.now - text.arrival)

    def longest_hit(self, text: Text, num_tokens: int) -> int:
        """
        Return how many of its first tokens the cache has, in whole blocks. At least one token is
        computed.
        """
        if not self.settings["engine"]["prefix_cache"] or text.prompt_logprobs is not None:
            return 0
        S = self.S
        held = self.engine.scheduler.block_cache.contents
        cached = {self.writers[block].text(S) for block in held}
        most = (num_tokens - 1) // S
        hits = takewhile(lambda i: text.writer(i).text(S) in cached, range(most))
        return len([*hits]) * S

    def must_fail(self, plan: Plan):
        """
        Note that this step raises: each request that takes part must get an error before it is
        over.
        """
        took_part = dict.fromkeys([*plan.decodes, *(r for r, _ in plan.chunks), *plan.admitted])
        self.failing += [self.live[r.id] for r in took_part if self.engine.requests.get(r.id) is r]

    def check(self, stats: dict):
        """Check everything after a step, once its tokens and errors are sent."""
        engine = self.engine
        engine.scheduler.check()
        for r in engine.scheduler.running:
            assert (len(r.block_table) - 1) * self.S < r.num_tokens, (
                f"{r.id} holds a block too many"
            )
        assert not self.failing, (
            f"{[text.id for text in self.failing]} got no error for the step's failure"
        )
        assert engine.requests.keys() == self.live.keys(), (
            f"{[*engine.requests]} are in work, not {[*self.live]}"
        )
        scored = {r.id for r in engine.stages["scores"].prompt_scores}
        assert scored <= self.live.keys(), f"scores of {scored} are kept"
        self.check_stats(stats)
        if self.window:
            self.check_windows()
        counts = engine.counts()
        right = {name: self.truth[name] for name in counts}
        assert counts == right, f"counts {counts}, right: {right}"
        if self.steps % 64 == 0 and self.live:
            self.check_age(next(iter(self.live.values())))

    def filled_by(self, plan: Plan, tokens: dict) -> list[Writer]:
        """
        Return the blocks that a step has filled. They must be in the cache once it is resolved,
        unless other requests also hold them, or its logits were broken.
        """
        if not self.settings["engine"]["prefix_cache"]:
            return []
        filled = []
        for request, n in plan.work:
            if request.row is None or (request in plan.sampled and request not in tokens):
                continue  # preempted or aborted meanwhile
            n -= len(plan.guesses.get(request, ()))  # only some are right
            num_full = (request.num_computed_slots + n) // self.S
            for i in range(request.num_committed, num_full):
                block = request.block_table[i]
                if self.engine.scheduler.block_allocator.ref_counts[block] == 1:
                    filled.append(self.live[request.id].writer(i))
        return filled

    def check_cached(self, filled: list[Writer]):
        held = self.engine.scheduler.block_cache.contents
        cached = {self.writers[block].text(self.S) for block in held}
        for block in filled:
            assert block.text(self.S) in cached, f"{block} was filled, and is not in the cache"

    def check_windows(self):
        """
        Check that blocks which no token sees any more were freed, and no others; the first block
        stands in for them. A request that has computed nothing since its admission still has all
        hits.
        """
        S = self.S
        for request in self.engine.scheduler.running:
            computed = request.num_computed_slots
            if computed == self.first_computed.get(request):
                continue
            table = request.block_table
            last_seen = max(1, (computed // S * S - self.window) // S)  # in the last commit
            next_seen = max(1, (computed + 1 - self.window) // S)
            left = table.count(table[0])
            self.counts["windows"] += left > 1
            assert last_seen <= left <= next_seen, (
                f"{request.id} has freed {left} blocks, but of {table} the next token sees those "
                f"from {next_seen} on"
            )

    def check_stats(self, stats: dict):
        engine = self.engine
        running = sum(text.runs for text in self.live.values())
        held = {block for r in engine.requests.values() for block in r.block_table}
        right = {
            "running": running,
            "waiting": len(self.live) - running,
            "kv_usage": 1 - (engine.num_blocks - len(held)) / engine.num_blocks,
            "queries": self.truth["queried tokens"],
            "hits": self.truth["hit tokens"],
            "preemptions": self.truth["preemptions"],
            "guessed": self.truth["guessed"],
            "right": self.truth["right"],
            "steps": self.truth["steps"],
            "waited": self.waited,
            "prefilled": self.prefilled,
        }
        assert stats == right, f"stats {stats}, right: {right}"
        self.waited = []
        self.prefilled = []
        self.reported_idle = not self.live

    def check_age(self, text: Text):
        """
        Check that no request starves. While the most urgent text waits, none is admitted, and each
        step computes a token that will not be computed again. With R rows and L tokens of the
        longest text, all rows are empty after R * L steps. Then the text runs and is never
        preempted. Its prompt takes at most as many steps again, and its answer one token per turn.
        Then another text is first. Each more urgent text can be first once, or twice if another one
        arrives.
        """
        R = self.settings["engine"]["max_num_seqs"]
        L = self.longest
        scheduler = self.engine.scheduler
        turn = -(-R // max(1, scheduler.token_budget - scheduler.prefill_tokens))
        first = 2 * R * L + 1 + turn * L  # steps
        age = self.steps - text.added_at
        if age > first:
            before = 0
            for other in self.everybody:
                beside = other.ended_at is None or other.ended_at >= text.added_at
                before += beside and other.urgency < text.urgency
            assert age <= (1 + 2 * before) * first, (
                f"{text.id} is {age} steps old, {before} texts go before it"
            )

    def check_idle(self):
        engine = self.engine
        allocator = engine.scheduler.block_allocator
        assert not self.live and not self.promised, (
            f"the engine is idle, but {[*self.live, *self.promised]} wait"
        )
        assert allocator.num_free == engine.num_blocks, (
            f"{allocator.num_free} of {engine.num_blocks} blocks are free"
        )
        kept = reachable_requests(engine, self, engine.device.broken_logits)
        assert len(kept) <= 1, f"the engine is idle, and has kept {kept}"
        assert self.reported_idle, "the engine is idle, and its stats were not sent"


# --------------------------------------------------------------------------------------------------
# Lives by their seeds, their traces, and what they have in common


def play(settings: dict, events: list[dict]) -> tuple[World, str]:
    """Play a life, and return why it fails, or ""."""
    world = World(settings, events)
    try:
        world.run()
    except Exception as error:
        return world, f"step {world.steps}: {type(error).__name__}: {error}"
    return world, ""


def fails(settings: dict, events: list[dict]) -> str:
    _, why = play(settings, events)
    return why


def write_trace(path: str, settings: dict, events: list[dict]):
    """Write a trace: the first line has the settings, every other line an event."""
    with open(path, "w") as file:
        for line in (settings, *events):
            print(json.dumps(line), file=file)


def read_trace(path: str) -> tuple[dict, list[dict]]:
    with open(path) as file:
        settings, *events = map(json.loads, file)
    return settings, events


class RecordedWorld(World):
    """
    Keeps a record of everything its engines do, as `serve.py --record` would write it, and reads it
    as it grows. After every step the reader's state must equal the allocator's.
    """

    def __init__(self, *life):
        super().__init__(*life)
        self.lines: list[str] = []
        self.pool_state: PoolState | None = None

    def watch_scheduler(self):
        super().watch_scheduler()
        self.begin_record()

    def begin_record(self):
        self.recorder = self.engine.stages["record"]
        self.recorder.listen(self.hear, tokens=True)
        self.hear(self.recorder.snapshot())

    def hear(self, text: str):
        self.lines.append(text)
        line = json.loads(text)
        if line["event"] == "snapshot":
            self.pool_state = PoolState(line)
        elif line["event"] == "step":
            self.pool_state.apply(line)

    def flush(self, stats: dict):
        super().flush(stats)
        self.check_pool_state()

    def check_pool_state(self):
        """Check that the lines so far describe the real state."""
        scheduler = self.engine.scheduler
        allocator = scheduler.block_allocator
        everyone = scheduler.waiting + scheduler.running
        read = self.pool_state
        tables = {r.arrival_number: r.block_table for r in everyone}
        assert read.tables == tables, f"tables {read.tables}, right: {tables}"
        entries = Counter(chain(*read.tables.values()))
        counts = [entries[block] for block in range(read.num_blocks)]
        assert counts == allocator.ref_counts, f"{counts}, right: {allocator.ref_counts}"
        held = allocator.block_cache.contents
        assert read.committed == held.keys(), f"committed {read.committed}, right: {held.keys()}"
        idle = [*allocator.idle]
        assert [*read.idle] == idle, f"idle {[*read.idle]}, right: {idle}"

    def fork(self, event: dict):
        """Fork a running request, which only tests do between two steps."""
        yield from super().fork(event)
        self.recorder.between()

    def record(self) -> bytes:
        return "".join(f"{line}\n" for line in self.lines).encode()


def shrunk_trace(seed: int) -> tuple[str, str, int]:
    """
    Shrink the life of a failing seed into a file. Returns why it fails, the file, and the number of
    events.
    """
    settings, events = a_life(seed)
    few = shrink(events, lambda events: bool(fails(settings, events)), simpler)
    path = f"simulator-{seed}.jsonl"
    write_trace(path, settings, few)
    return fails(settings, few), path, len(few)


def life_of(seed: int) -> tuple[int, str, Counter]:
    """Return (seed, why its life failed or "", how often each thing happened)."""
    world, why = play(*a_life(seed))
    return seed, why, world.counts


def campaign(seed: int, steps: float, processes: int) -> tuple[int, str, Counter]:
    """
    Run lives `seed`, `seed` + 1, .. until this many steps are done or one has failed. Returns the
    same as `life_of`, for all of them.
    """
    counts = Counter()
    quiet = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends them too, without a traceback each
    with multiprocessing.get_context("fork").Pool(processes, signal.signal, quiet) as pool:
        for last, failure, new in pool.imap(life_of, count(seed), chunksize=8):
            counts += new
            if failure or counts["steps"] >= steps:
                pool.terminate()
                return last, failure, counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument(
        "--steps", type=float, default=1, help="play the next seeds until this many are done"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="lives in parallel")
    parser.add_argument("--replay", metavar="FILE", help="play a trace that a failure left")
    args = parser.parse_args()
    if args.replay:
        why = fails(*read_trace(args.replay))
        print(why or "it does not fail")
        return bool(why)
    last, failure, counts = campaign(args.seed, args.steps, args.processes)
    for name, n in sorted(counts.items()):
        print(f"{name:24}{n:14,}")
    print(f"seeds {args.seed} to {last}")
    if not failure:
        return 0
    print(f"seed {last} fails, {failure}\nshrinking ..", flush=True)
    why, path, events = shrunk_trace(last)
    print(f"{events} events are enough: {why}\npython -m tests.simulator --replay {path}")
    return 1


if __name__ == "__main__":
    end_with_one_line()
    sys.exit(main())
