"""
The HTTP side through a million faults: real gate, jobs, connections, client and link, the real
scheduler behind them, and callers of every kind, all on a virtual clock.

    python -m tests.simulator_http --seed 7                 # one run
    python -m tests.simulator_http --seed 7 --minutes 30    # seed 7, 8, 9 .. for so long

The engine's answers are in scripted_engine.py, the rules for clients in http_oracle.py, and
http_draws.py makes a run of a seed.

A run is a function of its settings and its events, both drawn from the seed: calls that come and
go, and faults. An answer is a pure function of prompt, seed and choice, so every answer is known. A
run that breaks a rule is shrunk to a few events, which are printed.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import math
import random
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import prometheus_client.metrics
import uvicorn.server

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from http_draws import KEYS, draw
from http_oracle import Books, Judge, prompts_of
from scripted_engine import EngineProcess, ScriptedDevice, call_of
from shrink import shrink
from virtual import Listener, Loop, Socket, pair, selectors_of_memory
from wires import TIMED, ByteTokenizer, Client, bytes_directory, read_answers, request

import serve
from engine import engine
from engine import link as engine_link
from engine import process as serving_loop
from engine.engine import Engine
from server import answers, client, connection, gate
from server import app as api
from server import text as encoder
from test_paged import assert_idle

FLAGS = ("max_queue", "request_seconds", "client_seconds", "drain_seconds", "max_connections")
QUIET_SECONDS = 30.0  # after the last event all may take so long, besides what settings allow


class NumberedConnection(connection.Connection):
    """uvicorn keeps connections in a set: ordered by their addresses, which differ in each run."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.number = next(self.loop.numbers)

    def __hash__(self) -> int:
        return self.number


def as_bytes(call: dict, is_last: bool) -> bytes:
    """The request as it goes over the wire."""
    headers = {"X-Request-Id": f"r{call['id']}", "Authorization": f"Bearer {call['key']}"}
    if is_last:
        headers["Connection"] = "close"
    if "type" in call:
        headers["Content-Type"] = call["type"]
    body = call.get("body") or call.get("raw", "").encode()
    return request(call["path"], body, **headers)


class Caller(Client):
    """Sends its calls at its own pace, reads at once or slowly, and perhaps hangs up."""

    def __init__(self, world: "World", event: dict):
        super().__init__(world.loop, world.connect())
        self.world = world
        self.event = event
        self.calls = event["calls"]
        self.unsent = b"".join(as_bytes(call, call is self.calls[-1]) for call in self.calls)
        self.piece = -(-len(self.unsent) // event.get("pieces", 1))
        self.num_sent = 0
        self.sent_at: float | None = None
        self.has_left = False
        kind, seconds = event.get("leaves", ("", 0))
        if kind == "seconds":
            self.clock.call_later(seconds, self.leave)
        if event.get("sip"):
            self.clock.call_later(event["rest"], self.read_slowly)
        self.send()

    @property
    def is_quick(self) -> bool:
        """It sends and reads as soon as it can, and stays."""
        slow = self.event.get("sip") or self.event.get("gap", 0) * self.event.get("pieces", 1) > 0.5
        return not slow and "leaves" not in self.event

    def send(self):
        """The next piece."""
        if self.ended_at is not None:
            return
        try:
            sent = self.sock.send(self.unsent[: self.piece])
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            return self.finish()
        self.unsent = self.unsent[sent:]
        self.num_sent += sent
        self.leave_if_due()
        if self.unsent:
            self.clock.call_later(self.event.get("gap", 0.001), self.send)
        elif self.sent_at is None:
            self.sent_at = self.world.now

    def look(self):
        if not self.event.get("sip"):
            super().look()

    def read_slowly(self):
        before = len(self.received)
        while len(self.received) < before + self.event["sip"] and self.read(self.event["sip"]):
            pass
        if self.ended_at is None:
            self.clock.call_later(self.event["rest"], self.read_slowly)

    def read(self, size: int) -> bool:
        is_more = super().read(size)
        self.leave_if_due()
        return is_more

    def leave_if_due(self):
        kind, limit = self.event.get("leaves", ("", 0))
        if (
            (kind == "sent" and self.num_sent >= limit)
            or (kind == "read" and len(self.received) >= limit)
            or (kind == "said" and limit.encode() in self.received)
        ):
            self.leave()

    def leave(self):
        if self.ended_at is None:
            self.has_left = True
            self.clock.call_later(2.5 + self.world.pause, self.check_forgotten)
            if self.event.get("how") == "reset":
                self.sock.peer.reset()
            self.finish()

    def check_forgotten(self):
        """
        A client that has left is noticed, and nothing is computed for it any more; a call that has
        just been encoded takes some turns.
        """
        names = {f"r{call['id']}" for call in self.calls}
        since = self.world.now - 10 * self.world.settings["turn_seconds"]
        for choice in self.world.client.choices.values() if self.world.is_running else ():
            assert choice.job.call_id not in names or choice.job.started > since, (
                f"call {choice.job.call_id} is still in work, its client has left long ago"
            )


class World:
    """One run: a server of some settings, its clients, and the events that happen to them."""

    def __init__(self, settings: dict, events: list[dict]):
        self.settings = settings
        self.events = events
        self.loop = Loop()
        self.loop.turn_seconds = settings["turn_seconds"]
        self.loop.job_seconds = settings["encode_seconds"]
        self.loop.high = settings["link_high"]
        self.start = self.now
        self.rng = random.Random(settings["seed"])  # of sizes of pieces, and of seeds
        self.most = settings["max_num_seqs"] + settings["max_queue"]  # choices at once
        flags = ["--model", "sim", "--no-access-log"]
        for name in FLAGS:
            flags += ["--" + name.replace("_", "-"), str(settings[name])]
        self.args = serve.parse_args(flags)
        self.args.access_log = True  # it comes to `log`
        self.listener = Listener(partial(self.make_pair, "tcp", True))
        self.engines: list[EngineProcess] = []
        self.states: list[tuple[float, str]] = [(self.now, "loading")]  # of the client
        self.is_running = True  # the HTTP process
        self.ended_at = 0.0
        self.jobs: list[api.Job] = []
        self.callers: list[Caller] = []
        self.calls: dict[int, dict] = {}
        self.access: dict[str, list[dict]] = {}
        self.failed: set[int] = set()  # calls whose steps have failed
        self.stopped_at: float | None = None
        self.drained_at = math.inf  # when the server may end what still runs
        self.num_happened = 0
        self.pause = sum(event["seconds"] for event in events if event["do"] == "stall_engine")
        # seconds by which the server may know late that a client has left
        self.lag = 3.0 + self.pause

    @property
    def now(self) -> float:
        return self.loop.now

    def make_pair(self, kind: str, hard: bool) -> tuple[Socket, Socket]:
        most = self.settings[f"{kind}_piece"]
        return pair(self.settings[f"{kind}_room"], lambda: self.rng.randint(1, most), hard)

    def connect(self) -> Socket:
        """A connection to the server; one that it refuses is reset."""
        try:
            return self.listener.connect()
        except ConnectionRefusedError:
            sock, _ = pair()
            sock.reset()
            return sock

    # what the HTTP process asks for

    def make_job(self, *args) -> answers.Job:
        self.jobs.append(answers.Job(*args))
        return self.jobs[-1]

    def start_engine(self) -> tuple[EngineProcess, Socket]:
        ours, theirs = self.make_pair("link", False)
        self.engines.append(EngineProcess(self, theirs))
        assert len(self.engines) <= 2, "an engine that dies for the second time is started again"
        return self.engines[-1], ours

    def log(self, event: str, **fields):
        if event == "access" and "id" in fields:
            self.access.setdefault(fields["id"], []).append(fields)

    def handle_message(self, running: Engine, link, message: dict):
        """The engine must get the fields that the client sent."""
        if message["op"] == "add":
            call = self.calls[call_of(message["prompt"])]
            body = call["body"]
            asked = {"n": body.get("n", 1), "priority": body.get("priority", 0)}
            asked["name"] = f"r{call['id']}"
            key = KEYS.index(call["key"])
            asked["cache_salt"] = f"key {key}:{body.get('cache_salt', '')}"
            for name, value in asked.items():
                sent = message["options"][name]
                what = f"the engine gets {name} {sent!r}, wanted {value!r}"
                assert sent == value, f"call {call['id']}: {what}"
            assert message["prompt"] in prompts_of(call), (
                f"call {call['id']}: the engine gets another prompt"
            )
        handle_message(running, link, message)
        count = len(running.requests) + sum(map(len, running.promised.values()))
        assert count <= self.most, f"the engine has {count} choices, at most {self.most}"

    # what happens

    def happen(self, event: dict):
        self.num_happened += 1
        running = self.engines[-1]
        match event["do"]:
            case "call":
                self.call(event)
            case "stop":
                self.stop()
            case "kill_engine":
                running.die()
            case "stall_engine":
                running.stall(event["seconds"])
            case "cannot_load":
                running.cannot_load()
            case "fail_step":
                if running.engine:
                    running.engine.device.fault = event["where"]

    def call(self, event: dict):
        for call in event["calls"]:
            self.calls[call["id"]] = call
        self.callers.append(Caller(self, event))

    def stop(self):
        """SIGTERM."""
        if self.is_running:
            seconds = 0.0 if self.stopped_at else self.settings["drain_seconds"]
            self.stopped_at = self.stopped_at or self.now
            self.drained_at = min(self.drained_at, self.now + seconds)
            self.service.server.handle_exit()

    # the run

    def run(self):
        """Raises AssertionError."""
        with stand_ins(self):
            try:
                self.play()
            finally:
                self.loop.turn_seconds = 0.0
                self.loop.end_tasks()

    def start_server(self):
        """As serve.py does."""
        self.client = client.EngineClient(self.start_engine)
        texts = encoder.Encoder(bytes_directory())
        texts.tokenizer = ByteTokenizer()
        self.service = api.Service(self.client, texts, self.args, KEYS)
        self.client.on_state = self.note_state
        task = self.loop.create_task(self.service.run(self.listener))
        task.add_done_callback(self.end_server)

    def note_state(self, state: str):
        self.states.append((self.now, state))
        self.service.engine_changed(state)

    def end_server(self, task: asyncio.Task):
        """It has come to its end by itself."""
        error = not task.cancelled() and task.exception()
        assert not error, f"the HTTP process ended by {error!r}"
        self.is_running = False
        self.ended_at = self.now
        for transport in self.loop.transports:
            transport.abort()
        self.client.sock.close()
        self.listener.close()

    def play(self):
        self.start_server()
        for event in self.events:
            self.loop.call_at(self.start + event["t"], self.happen, event)
        last = max((event["t"] for event in self.events), default=0)
        self.wait(last + self.longest(), self.is_quiet, "some calls do not come to an end")
        self.rest(3.0)
        self.judge(self.callers)
        if self.is_serving():
            self.probe()
            self.check_idle()
            self.check_metrics()
            # the end comes while something is in work that takes too long
            self.engines[-1].stall(self.settings["drain_seconds"] + 10.0)
            self.ask(11_000)
            self.rest(self.settings["encode_seconds"] + 0.5)
        elif self.engines[-1].is_dead:
            self.wait(
                self.longest(), self.has_ended, "the engine is gone for good, but the server stays"
            )
        self.stop()
        self.wait(self.longest(), self.has_ended, "the server does not end")
        self.judge(self.callers[-1:])
        self.check_end()

    def longest(self) -> float:
        """How many seconds the last event may take."""
        names = ("load", "request", "client", "drain")
        seconds = QUIET_SECONDS + sum(self.settings[f"{name}_seconds"] for name in names)
        seconds += self.lag + sum(event.get("rest", 0) * 100 for event in self.events)
        each = self.settings["encode_seconds"] + self.settings["turn_seconds"] * 2000
        return seconds + each * len(self.events)

    def wait(self, seconds: float, is_over, what: str):
        self.loop.run(seconds, lambda: self.has_errors() or is_over())
        self.raise_errors()
        callers = [caller.calls[0]["id"] for caller in self.callers if caller.ended_at is None]
        assert is_over(), f"{what}: after {seconds:.0f} s the calls {callers} are open"

    def rest(self, seconds: float):
        self.loop.run(seconds, self.has_errors)
        self.raise_errors()

    def has_errors(self) -> bool:
        count = len(self.client.choices)
        assert count <= self.most, f"{count} choices are in work, at most {self.most} may be"
        return bool(self.loop.errors)

    def raise_errors(self):
        for context in self.loop.errors:
            error = context.get("exception")
            if isinstance(error, AssertionError):
                raise error
            raise AssertionError(f"nobody caught: {context['message']}: {error!r}") from error

    def is_quiet(self) -> bool:
        return self.num_happened == len(self.events) and all(
            caller.ended_at is not None for caller in self.callers
        )

    def beside(self, caller: Caller) -> list[Caller]:
        """The other callers that the server may have seen at the same time."""
        since = caller.began - self.lag
        others = [other for other in self.callers if other is not caller]
        others = [other for other in others if other.began <= caller.ended_at]
        return [other for other in others if other.ended_at is None or other.ended_at >= since]

    def is_serving(self) -> bool:
        """It has not been stopped, and the engine lives."""
        return self.stopped_at is None and self.client.state == "ready"

    def has_ended(self) -> bool:
        return not self.is_running and self.engines[-1].is_dead

    def judge(self, callers: list[Caller]):
        for caller in callers:
            received = read_answers(caller.received)
            name = caller.calls[0]["id"]
            assert len(received) <= len(caller.calls), (
                f"call {name}: {len(received)} answers, {len(caller.calls)} calls"
            )
            for call, answer in itertools.zip_longest(caller.calls, received):
                # after an answer that closes, a client has to send the next call again
                if answer or not received or received[-1].headers.get("connection") != "close":
                    Judge(self, caller, call, answer).check()

    def probe(self):
        """Now that all is quiet, a call is served again."""
        self.engines[-1].engine.device.fault = ""
        # what full links hold is read first, a piece in a few turns
        pieces = self.settings["link_room"] / self.settings["link_piece"]
        self.rest(4 * pieces * self.settings["turn_seconds"])
        caller = self.ask(10_000)
        self.wait(5.0, self.is_quiet, "the server serves no call any more")
        (answer,) = read_answers(caller.received)
        assert answer.status == 200, f"when all is quiet, a call is refused: {answer.body}"
        self.callers.pop()
        self.rest(1.5)

    def ask(self, id: int) -> Caller:
        """A call like any other."""
        body = {"prompt": [f"~{id}"], "max_tokens": 2, "seed": 1, "ignore_eos": True}
        call = {"id": id, "path": "/v1/completions", "body": body, "key": KEYS[0]}
        self.call({"calls": [call]})
        return self.callers[-1]

    # what is left

    def check_idle(self):
        assert_idle(self.engines[-1].engine)
        state = self.service.server.server_state
        lanes = self.service.encoder.lanes
        left = {
            "choices": self.client.choices,
            "messages to the engine": self.client.unsent,
            "characters to be encoded": [lane for lane in lanes if lane.sizes],
            "connections": state.connections,
            "calls": state.tasks,
        }
        for name, value in left.items():
            assert not value, f"the HTTP process is idle, but has {name}: {value}"
        tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks(self.loop)]
        assert tasks == ["Service.run"], f"the HTTP process is idle, but runs {tasks}"

    def check_metrics(self):
        books = Books(self)
        books.check()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            books.expect(name, 0)
        if len(self.engines) > 1:
            return
        running = self.engines[0].engine
        books.expect("prefix_cache_queries_total", running.scheduler.num_queried_tokens)
        books.expect("prefix_cache_hits_total", running.scheduler.num_hit_tokens)
        books.expect("num_preemptions_total", running.scheduler.num_preemptions)
        books.expect("request_queue_time_seconds_count", running.num_delays["waited"])
        books.expect("request_prefill_time_seconds_count", running.num_delays["prefilled"])

    def check_end(self):
        """The server was stopped, or its engine is gone for good."""
        late = self.ended_at - self.drained_at
        assert late <= 3 * gate.LINGER_SECONDS + 3 + self.pause, (
            f"the HTTP process ends {late:.1f} s after it had to"
        )
        assert not self.client.choices, f"the HTTP process has ended, but has {self.client.choices}"


handle_message = serving_loop.handle_message  # the real one


@contextlib.contextmanager
def stand_ins(world: World):
    """
    Time, chance, sockets and processes of the code under test are the world's, and limits are
    small.
    """
    settings, clock = world.settings, world.loop.clock
    chance = SimpleNamespace(randbits=world.rng.getrandbits)
    ids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{world.rng.getrandbits(128):032x}"))
    changes = {
        api: {
            "log": world.log,
            "say": lambda *args: None,
            "Job": world.make_job,
        },
        answers: {"secrets": chance, "PING_SECONDS": settings["ping_seconds"]},
        gate: {"log": world.log, "Connection": NumberedConnection},
        client: {"STALL_SECONDS": 1.0},
        engine_link: {"selectors": selectors_of_memory},
        connection: {"uuid": ids},
        engine: {"time": clock, "Device": partial(ScriptedDevice, failed=world.failed)},
        serving_loop: {"handle_message": world.handle_message},
        encoder: {"SHORT": 20},
        prometheus_client.metrics: {"time": clock},
        uvicorn.server: {"time": clock, "HANDLED_SIGNALS": ()},
    }
    with contextlib.ExitStack() as stack:
        for module in TIMED:
            stack.enter_context(mock.patch.object(module, "time", clock))
        for module, values in changes.items():
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value, create=True))
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        yield


def violation(settings: dict, events: list[dict]) -> str | None:
    """The rule that a run breaks, if it does."""
    try:
        World(settings, events).run()
    except AssertionError as broken:
        return str(broken)


def main() -> int:
    """One seed after the other, at least one, until a run breaks a rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--steps", type=int, default=30, help="events of a run")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="play the next seeds for so long"
    )
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    for seed in itertools.count(args.seed):
        settings, events = draw(seed, args.steps)
        why = violation(settings, events)
        if why:
            print(f"seed {seed}: {why}\nshrinking ..", flush=True)
            events = shrink(events, lambda fewer, of=settings: violation(of, fewer) is not None)
            print(violation(settings, events), settings, *events, sep="\n")
            return 1
        if time.monotonic() >= end:
            print(f"seeds {args.seed} to {seed} break no rule")
            return 0


if __name__ == "__main__":
    sys.exit(main())
