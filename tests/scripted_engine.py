"""
The engine of simulator_http.py: the real one with the real scheduler and link, in a process that
is played; but what its model says to a prompt is a script, known beforehand. `world` is the
simulator's `World`, which has the clock and all processes.
"""

import functools
import random
import zlib
from collections import Counter
from unittest import mock

from simulated_device import HostTokens, NoModel
from virtual import Socket
from wires import EOS, fake_score

from engine import engine, process
from engine.device import Launched, PackedPlan
from engine.link import Link
from params import NO_TOKEN, Settings


class Violation(AssertionError):
    """A rule is broken."""


@functools.lru_cache(10_000)
def script(prompt: tuple[int, ...], seed: int, choice: int) -> list[int]:
    """The model's answer to a prompt: texts of up to 30 characters, each with an end of text."""
    rng = random.Random(zlib.crc32(repr((prompt, seed, choice)).encode()))
    tokens = []
    while len(tokens) < 200:
        text = "".join(rng.choices("ab c€", k=rng.randint(0, 30)))
        tokens += [*text.encode(), EOS]
    return tokens


def call_of(prompt: list[int]) -> int:
    """The number of the call whose prompt this is: "abc~17.0"."""
    return int(bytes(prompt).decode().rpartition("~")[2].partition(".")[0])


def logprob_of(token: int) -> float:
    """It tells tokens apart."""
    return -0.5 - token


class Runner:
    """
    Knows each request's next token, without a model. `fault` is what goes wrong at the next step
    that can.
    """

    def __init__(self, world):
        self.world = world
        self.fault = ""

    def launch(self, plan):
        self.fail("launch", plan)
        tokens = {}
        for request in plan.sampled:
            said = script(tuple(request.prompt_tokens), request.params.seed, request.index)
            tokens[request] = [said[len(request.generated_tokens)]]
        places = range(len(plan.decodes), len(plan.sampled))
        return Launched(PackedPlan(plan, None, places, None), tokens, None, None)

    def send(self, launched):
        pass

    def wait_for(self, launched):
        plan = launched.packed.plan
        self.fail("collect", plan)
        tokens = launched.tokens
        if self.fault == "logits" and tokens:
            self.has_failed(plan.sampled[:1])
            tokens[plan.sampled[0]] = [NO_TOKEN]
        return tokens

    def sampled_logprobs(self, launched, places, most):
        sampled = launched.packed.plan.sampled
        chosen = [launched.tokens[sampled[i]][0] for i in places]
        scores = [fake_score(token, most, logprob_of(token)) for token in chosen]
        return [HostTokens(column) for column in zip(*scores, strict=True)]

    def fail(self, where: str, plan):
        if self.fault == where:
            self.has_failed(plan.decodes + [request for request, _ in plan.chunks] + plan.admitted)
            raise RuntimeError("planned")

    def has_failed(self, requests: list):
        self.fault = ""
        self.world.failed |= {call_of(request.prompt_tokens) for request in requests}

    def fill_rows(self, *requests):
        pass


class ScriptedEngine(engine.Engine):
    """The real engine, which counts the delays of its stats, with the runner above."""

    def __init__(self, world):
        settings = {"block_size": 4}
        for name in ("num_blocks", "max_num_seqs", "token_budget", "overlap"):
            settings[name] = world.settings[name]
        self.num_delays = Counter()
        runner = Runner(world)  # and its device
        both = {name: lambda *args: runner for name in ("Device", "Runner")}
        with mock.patch.multiple(engine, **both):
            model = NoModel(257, 4 * settings["num_blocks"], (EOS,))
            super().__init__(model, Settings(**settings))

    def stats(self) -> dict:
        stats = super().stats()
        self.num_delays.update({name: len(stats[name]) for name in self.delays})
        return stats

    def assert_idle(self):
        for name in ("requests", "promised"):
            if getattr(self, name):
                raise Violation(f"the engine is idle, but has {name} {getattr(self, name)}")
        num_free = self.scheduler.block_allocator.num_free
        if num_free != self.num_blocks or not self.scheduler.is_done():
            raise Violation("the engine is idle, but blocks are still held")


class EngineProcess:
    """
    The engine's process: it takes its time to start and to load, goes round its loop, and may end
    at any time.
    """

    def __init__(self, world, sock: Socket):
        self.world = world
        self.loop = world.loop
        self.sock = sock
        self.state = "starting"
        self.engine: ScriptedEngine | None = None
        self.stalled_until = 0.0
        self.is_due = False
        self.loop.call_later(0.1, self.load)

    @property
    def is_dead(self) -> bool:
        return self.state == "dead"

    def load(self):
        if not self.is_dead:
            self.state = "loading"
            self.link = Link(self.sock)
            self.loop.call_later(self.world.settings["load_seconds"], self.begin)

    def begin(self):
        if not self.is_dead:
            self.state = "ready"
            self.engine = ScriptedEngine(self.world)
            self.link.selector.on_ready = self.wake
            process.greet(self.engine, self.link, "")
            self.wake()

    def cannot_load(self):
        """As a process that finds no model."""
        if self.state == "loading":
            self.link.send({"op": "fatal", "message": "no model is there"})
            self.die()

    def wake(self, seconds: float = 0.0):
        if not self.is_due and not self.is_dead:
            self.is_due = True
            self.loop.call_later(seconds, self.turn)

    def turn(self):
        self.is_due = False
        if self.is_dead:
            return
        wait = self.stalled_until - self.loop.time()
        if wait > 0:
            return self.wake(wait)
        if not self.link.is_open:
            return self.die()
        process.serve_step(self.engine, self.link)
        self.check_link(self.link)
        if self.engine.has_work or self.link.selector.select(0) or not self.link.is_open:
            self.wake(self.world.settings["step_seconds"])

    def check_link(self, link: Link):
        """
        When nothing is on its way, the engine works at what the HTTP process waits for, and at
        nothing else.
        """
        http = self.world.client
        theirs = http.sock
        if not (self.world.is_running and theirs is link.sock.peer and http.transport):
            return
        if http.unsent or http.transport.unsent or link.sock.arrived or link.incoming.unread:
            return  # the engine has not heard all
        mine = {*self.engine.requests}
        for choices in self.engine.promised.values():
            mine |= {choice.id for choice in choices}
        waiting = http.choices.keys()
        if mine - waiting:
            raise Violation(f"the engine works at {mine - waiting}, for which nobody waits")
        is_behind = link.rows or link.messages or link.unsent
        if is_behind or theirs.arrived or http.incoming.unread:
            return  # nor has the HTTP process
        if waiting - mine:
            raise Violation(
                f"the HTTP process waits for {waiting - mine}, of which the engine knows nothing"
            )

    def stall(self, seconds: float):
        self.stalled_until = self.loop.time() + seconds

    def die(self):
        self.sock.close()
        self.state = "dead"

    def join(self, seconds=None):
        pass

    kill = die
