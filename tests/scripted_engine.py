"""
The engine of simulator_http.py: the real one with the real scheduler and links, in a process that
is played; but what its model says to a prompt is a script, known beforehand. `world` is the
simulator's `World`, which has the clock and all processes.
"""

import functools
import random
import zlib
from collections import Counter
from types import SimpleNamespace

from virtual import Signal
from wires import EOS, fake_score

from engine import links
from engine import process as loop
from engine.engine import Engine
from engine.events import Subscribers
from engine.runner import StepResult
from paged import Scheduler, SchedulerSettings
from params import NO_TOKEN, Settings


class Violation(AssertionError):
    """A rule is broken."""


class FakeChat:
    def encode(self, messages, add_special_tokens=False, /, **options):
        return list("".join(message["content"] for message in messages).encode())


@functools.lru_cache(10_000)
def script(prompt: tuple[int, ...], seed: int, choice: int) -> list[int]:
    """What the model says to a prompt: texts of up to 30 characters, each with an end of text."""
    rng = random.Random(zlib.crc32(repr((prompt, seed, choice)).encode()))
    tokens = []
    while len(tokens) < 200:
        text = "".join(rng.choices("ab c€", k=rng.randint(0, 30)))
        tokens += [*text.encode(), EOS]
    return tokens


def call_of(prompt: list[int]) -> int:
    """The number of the call whose prompt this is: "abc~17.0"."""
    return int(bytes(prompt).decode().rpartition("~")[2].partition(".")[0])


def score(token: int, n: int) -> list:
    """Log-probabilities that tell tokens apart."""
    return fake_score(token, n, -0.5 - token)


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
        tokens = []
        for request in plan.sampled:
            said = script(tuple(request.prompt_tokens), request.params.seed, request.choice)
            tokens.append(said[len(request.generated_tokens)])
        prompts = [(request, request.prefill_cursor, n) for request, n in plan.chunks]
        return SimpleNamespace(plan=plan, tokens=tokens, prompts=prompts)

    def wait_for(self, flight):
        plan, tokens = flight.plan, flight.tokens
        result = StepResult(tokens, [], {}, {})
        self.fail("collect", plan)
        if (self.fault == "logits" and tokens) or (self.fault == "one of many" and len(tokens) > 1):
            self.has_failed(plan.sampled[:1])
            tokens[0] = NO_TOKEN
            result.broken.append(plan.sampled[0])
        for request, token in zip(plan.sampled, tokens, strict=True):
            if request.params.logprobs is not None:
                result.logprobs[request] = score(token, request.params.logprobs)
        for request, start, n in flight.prompts:
            if request.prompt_logprobs is not None:
                targets = request.prompt_tokens[start + 1 : start + 1 + n]
                result.prompt_scores[request] = (
                    start,
                    [score(token, request.prompt_logprobs) for token in targets],
                )
        return result

    def fail(self, where: str, plan):
        if self.fault == where:
            self.has_failed(plan.decodes + [request for request, _ in plan.chunks] + plan.admitted)
            raise RuntimeError("planned")

    def has_failed(self, requests: list):
        self.fault = ""
        self.world.failed |= {call_of(request.prompt_tokens) for request in requests}

    def fill_rows(self, *requests):
        pass


class ScriptedEngine(Engine):
    """The real engine on a scheduler of the settings' sizes, with the runner above."""

    def __init__(self, settings: dict, runner: Runner):
        S = settings["block_size"]
        num_tokens = settings["num_tokens"]
        self.config = SimpleNamespace(vocab_size=257, eos_token_ids=[EOS])
        self.num_blocks = num_tokens // S
        self.max_model_len = num_tokens
        self.scheduler = Scheduler(
            "priority",
            settings["token_budget"],
            num_tokens,
            S,
            settings=SchedulerSettings(max_num_seqs=settings["max_num_seqs"]),
        )
        self.runner = runner
        self.overlap = settings["overlap"]
        self.in_flight = self.recorder = None
        self.requests = {}
        self.promised = {}
        self.prompt_scores = {}
        self.seeds = random.Random(0)
        self.delays = {"waited": [], "prefilled": []}
        self.settings = Settings()
        self.num_steps = self.num_prefill_tokens = self.num_decode_tokens = 0
        self.num_told = Counter()  # of the delays

    def stats(self) -> dict:
        stats = super().stats()
        self.num_told.update({name: len(stats[name]) for name in self.delays})
        return stats

    def assert_idle(self):
        for name in ("requests", "promised", "prompt_scores"):
            if getattr(self, name):
                raise Violation(f"the engine is idle, but has {name} {getattr(self, name)}")
        if (
            self.scheduler.block_allocator.num_free != self.num_blocks
            or not self.scheduler.is_done()
        ):
            raise Violation("the engine is idle, but blocks are still held")


class EngineProcess:
    """
    The engine's process: it takes its time to start and to load, goes round its loop, and may end
    at any time.
    """

    def __init__(self, world):
        self.world = world
        self.settings = world.settings
        self.loop = world.loop
        self.sentinel = Signal()
        self.state = "starting"
        self.links: links.Links | None = None
        self.engine: ScriptedEngine | None = None
        self.stalled_until = 0.0
        self.is_due = False
        self.loop.call_later(self.settings["start_seconds"], self.load)

    @property
    def is_dead(self) -> bool:
        return self.state == "dead"

    def load(self):
        if not self.is_dead:
            self.state = "loading"
            self.links = links.Links(self.world.link_listener)
            self.links.accept()
            self.loop.call_later(self.settings["load_seconds"], self.begin)

    def begin(self):
        if self.is_dead:
            return
        self.state = "ready"
        self.engine = ScriptedEngine(self.settings, Runner(self.world))
        self.audience = Subscribers(self.engine)
        self.links.selector.on_ready = self.wake
        limits = {
            "max_model_len": self.engine.max_model_len,
            "max_num_seqs": self.settings["max_num_seqs"],
        }
        self.links.set_greeting(
            {"op": "ready", **limits, "vocab_size": 257, "eos_token_ids": [EOS]}
        )
        self.wake()

    def cannot_load(self):
        """As a process that finds no model."""
        if self.state == "loading":
            self.links.set_greeting({"op": "fatal", "message": "no model is there"})
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
        if not self.links.is_wanted:
            self.engine.assert_idle()
            return self.die()
        loop.serve_step(self.engine, self.links, self.audience, self.settings["max_queue"])
        for link in self.links.links.values():
            self.check_link(link)
        if self.engine.has_work or self.links.selector.select(0) or not self.links.is_wanted:
            self.wake(self.settings["step_seconds"])

    def check_link(self, link: links.Link):
        """
        When nothing is on its way, the engine works at what an HTTP process waits for, and at
        nothing else.
        """
        theirs = link.sock.peer
        http = self.world.client
        if not (self.world.is_running and http.sock is theirs and http.transport):
            return
        mine = {id for id in self.engine.requests if id.startswith(f"{link.number}:")}
        for first, choices in self.engine.promised.items():
            mine |= {choice.id for choice in choices if first in mine}
        waiting = {f"{link.number}:{id}" for id in http.choices}
        all_heard = not (
            http.unsent or http.transport.unsent or link.sock.arrived or link.incoming.unread
        )
        all_told = not (
            link.rows or link.messages or link.unsent or theirs.arrived or http.incoming.unread
        )
        if all_heard and mine - waiting:
            raise Violation(f"the engine works at {mine - waiting}, for which nobody waits")
        if all_heard and all_told and waiting - mine:
            raise Violation(
                f"the HTTP process waits for {waiting - mine}, of which the engine knows nothing"
            )

    def stall(self, seconds: float):
        self.stalled_until = self.loop.time() + seconds

    def die(self):
        if self.is_dead:
            return
        was, self.state = self.state, "dead"
        if was != "starting":
            for link in self.links.links.values():
                link.sock.close()
        self.sentinel.end()

    def join(self, seconds=None):
        pass

    kill = die
