"""
The engine of simulator_http.py. It is the real engine with the real scheduler and link, in a
simulated process. But the model's answer to a prompt is a script, known beforehand. `world` is the
simulator's `World`, which has the clock and all processes.
"""

import functools
import random
import zlib
from types import SimpleNamespace

from simulated_device import HostTokens, NoModel, SimulatedDevice
from virtual import Socket
from wires import EOS

from engine import process
from engine.device import Launched
from engine.engine import Engine
from engine.link import Link
from params import NO_TOKEN, Settings


@functools.lru_cache(10_000)
def script(prompt: tuple[int, ...], seed: int, choice: int) -> list[int]:
    """
    Return the model's answer to a prompt: texts of up to 30 characters, each with an end of text.
    """
    rng = random.Random(zlib.crc32(repr((prompt, seed, choice)).encode()))
    tokens = []
    while len(tokens) < 200:
        text = "".join(rng.choices("ab c€", k=rng.randint(0, 30)))
        tokens += [*text.encode(), EOS]
    return tokens


def call_of(prompt: list[int]) -> int:
    """Return the number of the call with this prompt, for example 17 for "abc~17.0"."""
    return int(bytes(prompt).decode().rpartition("~")[2].partition(".")[0])


class ScriptedDevice(SimulatedDevice):
    """
    Says what the script has, whatever the logits. `fault` is what goes wrong at the next step that
    can fail; the calls that it may end are put into `failed`.
    """

    def __init__(self, *args, failed: set[int]):
        super().__init__(*args)
        self.failed = failed
        self.fault = ""

    def run_batch(self, packed):
        self.fail("launch", packed.plan)
        done = SimpleNamespace(synchronize=lambda: self.fail("collect", packed.plan))
        tokens = HostTokens([0] * (packed.shape.n + packed.shape.C))
        launched = Launched(packed, tokens, [b""] * len(tokens), None, done=done)
        for request, index in launched.token_indices().items():
            said = script(tuple(request.prompt_tokens), request.params.seed, request.index)
            is_broken = self.fails("logits", [request])
            tokens[index] = NO_TOKEN if is_broken else said[len(request.generated_tokens)]
        return launched

    def fail(self, where: str, plan):
        if self.fails(where, [request for request, _ in plan.work] + plan.admitted):
            raise RuntimeError("planned")

    def fails(self, where: str, requests: list) -> bool:
        if self.fault != where:
            return False
        self.fault = ""
        self.failed |= {call_of(request.prompt_tokens) for request in requests}
        return True


class EngineProcess:
    """
    The engine's process. It takes time to start and to load, runs its loop, and may end at any
    time.
    """

    def __init__(self, world, sock: Socket):
        self.world = world
        self.loop = world.loop
        self.sock = sock
        self.state = "starting"
        self.engine: Engine | None = None
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
            self.loop.call_later(self.world.args.load_seconds, self.begin)

    def begin(self):
        if not self.is_dead:
            self.state = "ready"
            names = ("num_blocks", "max_num_seqs", "token_budget", "overlap")
            sizes = {name: getattr(self.world.args, name) for name in names}
            settings = Settings(block_size=4, **sizes)
            self.engine = Engine(NoModel(257, 4 * settings.num_blocks, (EOS,)), settings)
            self.link.selector.on_ready = self.wake
            process.greet(self.engine, self.link, "")
            self.wake()

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
            self.wake(self.world.args.step_seconds)

    def check_link(self, link: Link):
        """
        Check that, when no message is on its way, the engine works on exactly what the HTTP process
        waits for.
        """
        http = self.world.client
        theirs = http.sock
        if not (self.world.is_running and theirs is link.sock.peer and http.transport):
            return
        if http.unsent or http.transport.unsent or link.sock.arrived or link.unread:
            return  # the engine has not received everything
        working = {*self.engine.requests}
        for choices in self.engine.promised.values():
            working |= {choice.id for choice in choices}
        waiting = http.choices.keys()
        assert working <= waiting, (
            f"the engine works at {working - waiting}, for which nobody waits"
        )
        is_behind = link.rows or link.messages or link.unsent
        if is_behind or theirs.arrived or http.unread:
            return  # the HTTP process has not, either
        assert waiting <= working, (
            f"the HTTP process waits for {waiting - working}, of which the engine knows nothing"
        )

    # what may happen to it

    def fail(self, where: str):
        if self.engine:
            self.engine.device.fault = where

    def stall(self, seconds: float):
        self.stalled_until = self.loop.time() + seconds

    def cannot_load(self):
        """End like a process that finds no model."""
        if self.state == "loading":
            self.link.send({"op": "fatal", "message": "no model is there"})
            self.die()

    def die(self):
        self.sock.close()
        self.state = "dead"
