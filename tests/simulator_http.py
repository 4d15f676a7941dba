"""
The HTTP side through a million faults. The gate, jobs, connections, client and link are real, and
so is the scheduler after them. Callers of every kind use them, all on a virtual clock.

    World(settings, events).run()      # raises AssertionError if a rule is broken

server/test_simulator_http.py draws settings and events. The engine's answers are in
scripted_engine.py, the rules for clients in http_oracle.py. An answer is a pure function of prompt,
seed and choice, so every answer is known. A run is a function of its settings and its events.
"""

import asyncio
import itertools
import math
import random
from collections import defaultdict
from functools import partial

import pytest
import uvicorn.server
from http_oracle import Judge, check_metrics, prompts_of
from scripted_engine import EngineProcess, ScriptedDevice, call_of
from virtual import Listener, Loop, Socket, pair, selectors_of_memory
from wires import TIMED, Answer, Client, bytes_directory, read_answers, request

import serve
from engine import engine
from engine import link as engine_link
from engine import process as serving_loop
from engine.engine import Engine
from server import answers, client, gate
from server import app as api
from server import text as encoder
from server.connection import Connection
from test_paged import assert_idle

KEYS = ["sesame", "simsim"]
PATIENCE = 10_000.0  # seconds: no client reads more slowly
NOTHING = Answer(None, {}, "", False)


class NumberedConnection(Connection):
    """
    A connection with a number as its hash. uvicorn keeps connections in a set, which would
    otherwise be ordered by addresses that differ in each run.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.number = next(self.loop.numbers)

    def __hash__(self) -> int:
        return self.number


def as_bytes(call: dict, is_last: bool) -> bytes:
    """Return the request as it goes over the wire."""
    headers = {"X-Request-Id": f"r{call['id']}", "Authorization": f"Bearer {call['key']}"}
    if is_last:
        headers["Connection"] = "close"
    if "type" in call:
        headers["Content-Type"] = call["type"]
    return request(call["path"], call.get("body"), **headers)


class Caller(Client):
    """Sends its calls at its own pace, reads immediately or slowly, and may hang up."""

    pieces = (1, 0.0)  # how many, and seconds between two
    sips = None  # or (bytes, seconds): it reads this many bytes after this many seconds, repeatedly
    how = "close"  # or "reset": how it leaves, at the first of these:
    stays = math.inf  # seconds
    sends = math.inf  # bytes
    waits_for = "\0"  # this text in an answer

    def __init__(self, world: "World", calls: list[dict], **manners):
        super().__init__(world.loop, world.listener.connect())
        self.world = world
        self.calls = calls
        vars(self).update(manners)
        # it sends and reads as soon as it can, and stays
        self.is_quick = manners.keys() <= {"pieces", "how"} and math.prod(self.pieces) <= 0.5
        self.unsent = b"".join(as_bytes(call, call is calls[-1]) for call in calls)
        self.piece = -(-len(self.unsent) // self.pieces[0])
        self.num_sent = 0
        self.sent_at = math.inf
        self.clock.call_later(self.stays, self.leave)
        if self.sips:
            self.clock.call_later(self.sips[1], self.sip)
        self.send()

    def send(self):
        """Send the next piece."""
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
            self.clock.call_later(max(self.pieces[1], 0.001), self.send)
        else:
            self.sent_at = self.world.now

    def look(self):
        if not self.sips:
            super().look()

    def sip(self):
        size, seconds = self.sips
        self.read(size)
        if self.ended_at is None:
            self.clock.call_later(seconds, self.sip)

    def read(self, size: int) -> bool:
        is_more = super().read(size)
        self.leave_if_due()
        return is_more

    def leave_if_due(self):
        if self.num_sent >= self.sends or self.waits_for.encode() in self.received:
            self.leave()

    def leave(self):
        if self.ended_at is None:
            self.clock.call_later(2.5 + self.world.pause, self.check_forgotten)
            if self.how == "reset":
                self.sock.peer.reset()
            self.finish()

    def check_forgotten(self):
        """
        Check that a client that has left is noticed, and nothing more is computed for it. A call
        that has just been encoded may take some turns.
        """
        names = {f"r{call['id']}" for call in self.calls}
        since = self.world.now - 10 * self.world.args.turn_seconds
        for choice in self.world.client.choices.values() if self.world.is_running else ():
            assert choice.job.call.id not in names or choice.job.started > since, (
                f"call {choice.job.call.id} is still in work, although its client left long ago"
            )


class World:
    """One run: a server with some settings, its clients, and the events that happen to them."""

    def __init__(self, settings: dict, events: list[dict]):
        self.args = serve.parse_args(["--model", "sim"])
        vars(self.args).update(settings, access_log=True)  # the log goes to `log`
        self.events = list(events)
        self.loop = Loop()
        self.loop.turn_seconds = self.args.turn_seconds
        self.loop.job_seconds = self.args.encode_seconds
        self.loop.high = self.args.link_high
        self.rng = random.Random(0)  # of sizes of pieces
        self.most = self.args.max_num_seqs + self.args.max_queue  # choices in work together
        self.listener = Listener(partial(self.make_pair, "tcp", True))
        self.engines: list[EngineProcess] = []
        self.states: list[tuple[float, str]] = [(self.now, "loading")]  # of the client
        self.is_running = True  # the HTTP process
        self.jobs: list[api.Job] = []
        self.callers: list[Caller] = []
        self.calls: dict[int, dict] = {}
        self.statuses: dict[str, list[int]] = defaultdict(list)  # statuses logged for each call
        self.failed: set[int] = set()  # calls whose steps have failed
        self.stopped_at = math.inf
        self.drained_at = math.inf  # when the server may end what still runs
        self.pause = sum(event.get("seconds", 0) for event in events)  # of a stalled engine

    @property
    def now(self) -> float:
        return self.loop.now

    @property
    def ends(self) -> list[float]:
        """
        Return when the server began to end, if it did: because it was stopped, or its engine is
        gone.
        """
        return [self.stopped_at, *(at for at, state in self.states if state == "dead")]

    def make_pair(self, kind: str, hard: bool) -> tuple[Socket, Socket]:
        most = getattr(self.args, f"{kind}_piece")
        return pair(getattr(self.args, f"{kind}_room"), lambda: self.rng.randint(1, most), hard)

    # what the HTTP process asks for

    def make_job(self, *args) -> api.Job:
        self.jobs.append(answers.Job(*args))
        return self.jobs[-1]

    def start_engine(self) -> tuple[EngineProcess, Socket]:
        ours, theirs = self.make_pair("link", False)
        self.engines.append(EngineProcess(self, theirs))
        assert len(self.engines) <= 2, "an engine that dies for the second time is started again"
        return self.engines[-1], ours

    def log(self, event: str, **fields):
        if event == "access" and "id" in fields:
            self.statuses[fields["id"]].append(fields["status"])

    def handle_message(self, running: Engine, link, message: dict):
        """Check that the engine gets the fields that the client sent."""
        if message["op"] == "add":
            call = self.calls[call_of(message["prompt"])]
            body = call["body"]
            key = KEYS.index(call["key"])
            asked = {"n": body.get("n", 1), "priority": body.get("priority", 0)}
            asked |= {"name": f"r{call['id']}", "prompt_logprobs": None}
            asked["cache_salt"] = f"key {key}:{body.get('cache_salt', '')}"
            assert message["options"] == asked, f"the engine gets {message}, wanted {asked}"
            assert message["prompt"] in prompts_of(call), "the engine gets another prompt"
        handle_message(running, link, message)
        count = len(running.requests) + sum(map(len, running.promised.values()))
        assert count <= self.most, f"the engine has {count} choices, at most {self.most}"

    # what happens

    def happen(self):
        event = dict(self.events.pop(0))
        del event["after"]
        name = event.pop("do")
        actor = self if name in ("visit", "stop") else self.engines[-1]
        getattr(actor, name)(**event)

    def visit(self, calls: list[dict], **manners):
        self.calls |= {call["id"]: call for call in calls}
        self.callers.append(Caller(self, calls, **manners))

    def stop(self):
        """Send SIGTERM."""
        if self.is_running:
            seconds = 0.0 if self.stopped_at <= self.now else self.args.drain_seconds
            self.stopped_at = min(self.stopped_at, self.now)
            self.drained_at = min(self.drained_at, self.now + seconds)
            self.service.server.handle_exit()

    # the run

    def run(self):
        with pytest.MonkeyPatch.context() as patches:
            stand_in(self, patches)
            try:
                self.play()
            finally:
                self.loop.turn_seconds = 0.0
                self.loop.end_tasks()

    def start_server(self):
        """Start the server as serve.py does."""
        self.client = client.EngineClient(self.start_engine)
        texts = encoder.Encoder(bytes_directory())
        self.service = api.Service(self.client, texts, self.args, KEYS)
        self.client.on_state = self.note_state
        task = self.loop.create_task(self.service.run(self.listener))
        task.add_done_callback(self.end_server)

    def note_state(self, state: str):
        self.states.append((self.now, state))
        self.service.engine_changed(state)

    def end_server(self, task: asyncio.Task):
        """Note that the server has ended by itself."""
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
        at = self.now
        for event in self.events:
            at += event["after"]
            self.loop.call_at(at, self.happen)
        self.wait(self.is_quiet, "some calls do not come to an end", PATIENCE)
        self.rest(15.0)  # also for full links, which are read one piece per few turns
        self.judge(self.callers)
        if self.stopped_at == math.inf and self.client.state == "ready":
            self.probe()
            self.check_idle()
            check_metrics(self)
            # the end comes while something in work takes too long
            self.engines[-1].stall(self.args.drain_seconds + 10.0)
            self.ask(11_000)
            self.rest(self.args.encode_seconds + 0.5)
        elif self.engines[-1].is_dead:
            self.wait(self.has_ended, "the engine is gone for good, but the server stays")
        self.stop()
        self.wait(self.has_ended, "the server does not end")
        self.judge(self.callers[-1:])
        late = self.ended_at - self.drained_at
        assert late <= 3 * gate.LINGER_SECONDS + 3 + self.pause, "the HTTP process ends too late"
        assert not self.client.choices, f"the HTTP process has ended, but has {self.client.choices}"

    def wait(self, is_over, what: str, seconds: float = 30.0):
        self.rest(seconds, is_over)
        assert is_over(), what

    def rest(self, seconds: float, is_over=lambda: False):
        self.loop.run(seconds, lambda: self.has_errors() or is_over())
        for context in self.loop.errors:
            raise context.get("exception") or AssertionError(context["message"])

    def has_errors(self) -> bool:
        count = len(self.client.choices)
        assert count <= self.most, f"{count} choices are in work, at most {self.most} may be"
        return bool(self.loop.errors)

    def is_quiet(self) -> bool:
        return not self.events and all(caller.ended_at is not None for caller in self.callers)

    def beside(self, caller: Caller) -> list[Caller]:
        """
        Return the other callers that the server may have seen at the same time. It may notice late
        that one has left.
        """
        since = caller.began - 3.0 - self.pause
        others = [other for other in self.callers if other is not caller]
        others = [other for other in others if other.began <= caller.ended_at]
        return [other for other in others if other.ended_at is None or other.ended_at >= since]

    def has_ended(self) -> bool:
        return not self.is_running and self.engines[-1].is_dead

    def judge(self, callers: list[Caller]):
        for caller in callers:
            received = read_answers(caller.received)
            assert len(received) <= len(caller.calls), "there are more answers than calls"
            # after an answer that closes the connection, a client must send the next call again
            is_closed = received and received[-1].headers.get("connection") == "close"
            calls = caller.calls[: len(received)] if is_closed else caller.calls
            for call, answer in itertools.zip_longest(calls, received, fillvalue=NOTHING):
                try:
                    Judge(self, caller, call, answer).check()
                except AssertionError as error:
                    error.add_note(f"in {call}, answered by {answer}")
                    raise

    def probe(self):
        """Check that a call is served again, now that all is quiet."""
        self.engines[-1].fail("")
        self.ask(10_000)
        self.wait(self.is_quiet, "the server serves no call any more", 5.0)
        (answer,) = read_answers(self.callers.pop().received)
        assert answer.status == 200, f"when all is quiet, a call is refused: {answer.body}"
        self.rest(1.5)

    def ask(self, id: int):
        """Make an ordinary call."""
        body = {"prompt": [f"~{id}"], "max_tokens": 2, "seed": 1, "ignore_eos": True}
        self.visit([{"id": id, "path": "/v1/completions", "body": body, "key": KEYS[0]}])

    def check_idle(self):
        assert_idle(self.engines[-1].engine)
        state = self.service.server.server_state
        left = [self.client.choices, self.client.unsent, state.connections, state.tasks]
        left += [lane.sizes for lane in self.service.encoder.lanes]
        assert not any(left), f"the HTTP process is idle, but has {left}"
        tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks(self.loop)]
        assert tasks == ["Service.run"], f"the HTTP process is idle, but runs {tasks}"


handle_message = serving_loop.handle_message  # the real one


def stand_in(world: World, patches: pytest.MonkeyPatch):
    """
    Replace time, chance, sockets and processes of the code under test by the world's, and make
    limits small.
    """
    clock = world.loop.clock
    device = partial(ScriptedDevice, failed=world.failed)
    changes = [
        *((module, "time", clock) for module in TIMED),
        (api, "log", world.log),
        (api, "say", lambda *_: None),
        (api, "Job", world.make_job),
        (api, "Connection", NumberedConnection),
        (answers, "PING_SECONDS", world.args.ping_seconds),
        (gate, "log", world.log),
        (client, "STALL_SECONDS", 1.0),
        (engine_link, "selectors", selectors_of_memory),
        (engine, "time", clock),
        (engine, "Device", device),
        (serving_loop, "handle_message", world.handle_message),
        (encoder, "SHORT", 20),
        (uvicorn.server, "HANDLED_SIGNALS", ()),
    ]
    for change in changes:
        patches.setattr(*change)
