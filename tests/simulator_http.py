"""
The HTTP side through a million faults: real gate, jobs, connections, clients and links, one or
three HTTP processes, the real scheduler behind them, and clients of every kind, all on a virtual
clock.

    python -m tests.simulator_http --seed 7                 # one run; prints what happened
    python -m tests.simulator_http --seed 7 --minutes 30    # seed 7, 8, 9 .. for so long
    python -m tests.simulator_http --replay FILE            # a run that failed, from the trace that it left

A run is a function of its settings and its events, both drawn from the seed: calls that come and
go, and faults. What a prompt is answered is a pure function of prompt, seed and choice, so every
answer is known. A run that breaks a rule is shrunk to a few events, which are written to a file, as
JSON, a line each, for --replay.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import math
import random
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import prometheus_client.metrics
import uvicorn.server
from shrink import shrink
from virtual import (
    Listener,
    Machine,
    Share,
    Signal,
    make_pipe,
    os_of_pipes,
    pair,
    selectors_of_memory,
)

import serve
from paged import Scheduler, SchedulerSettings
from serving import api, client, connection, encoder, engine, links, workers
from serving.engine import Engine
from tokenizer import TokenizerError

EOS = 256
KEYS = ["sesame", "simsim"]
QUIET_SECONDS = (
    30.0  # how long after the last event all may take at most, besides what the settings allow
)
SLACK = 0.5  # seconds that an answer may be late


class Violation(AssertionError):
    """A rule is broken."""


# --------------------------------------------------------------------------------------------------
# The engine: the real one, but what it computes is a script


class ByteTokenizer:
    """A token a byte, so that the character € is three. It does not know the character \\0."""

    vocab_size, eos_token_id = 257, EOS
    has_known_pattern = True

    def encode(self, text, allow_special=False):
        if "\0" in text:
            raise TokenizerError("character '\\x00' is not in the vocabulary")
        return list(text.encode())

    def token_bytes(self, token):
        return b"" if token == EOS else bytes([token])

    def spelled_bytes(self, token):
        return b"<end>" if token == EOS else bytes([token])


class FakeChat:
    def encode(self, messages, **options):
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
    """
    [log-probability, the likeliest ids, their log-probabilities]; the first tells tokens apart.
    """
    return [
        -0.5 - token,
        [(token + i) % 257 for i in range(1, n + 1)],
        [-float(i) for i in range(1, n + 1)],
    ]


class Runner:
    """
    Knows each request's next token, without a model. `fault` is what goes wrong at the next step
    that can.
    """

    def __init__(self, world: "World"):
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

    def collect(self, flight):
        plan, tokens = flight.plan, flight.tokens
        self.fail("collect", plan)
        if (self.fault == "logits" and tokens) or (self.fault == "one of many" and len(tokens) > 1):
            self.has_failed(plan.sampled[:1])
            tokens[0] = -1
        for request, token in zip(plan.sampled, tokens, strict=True):
            if request.params.logprobs is not None:
                plan.logprobs[request] = score(token, request.params.logprobs)
        for request, start, n in flight.prompts:
            if request.prompt_logprobs is not None:
                targets = request.prompt_tokens[start + 1 : start + 1 + n]
                plan.prompt_scores[request] = (
                    start,
                    [score(token, request.prompt_logprobs) for token in targets],
                )
        return tokens

    def fail(self, where: str, plan):
        if self.fault == where:
            self.has_failed(plan.decodes + [request for request, _ in plan.chunks] + plan.admitted)
            raise RuntimeError("planned")

    def has_failed(self, requests: list):
        self.fault = ""
        self.world.failed |= {call_of(request.prompt_tokens) for request in requests}

    def place(self, *requests):
        pass


class ScriptedEngine(Engine):
    """The real engine on a scheduler of the settings' sizes, with the runner above."""

    def __init__(self, settings: dict, runner: Runner):
        S, num_blocks = settings["block_size"], settings["num_blocks"]
        self.config = SimpleNamespace(vocab_size=257, eos_token_ids=[EOS])
        self.num_blocks = num_blocks
        self.max_model_len = num_blocks * S
        self.scheduler = Scheduler(
            "priority",
            settings["token_budget"],
            num_blocks * S,
            S,
            settings=SchedulerSettings(max_num_seqs=settings["max_num_seqs"]),
        )
        self.runner = runner
        self.overlap = settings["overlap"]
        self.in_flight = None
        self.requests = {}
        self.num_choices = {}
        self.prompt_scores = {}
        self.seeds = random.Random(0)
        self.delays = {"waited": [], "prefilled": []}
        self.trace, self.check = False, False
        self.num_steps = self.num_prefill_tokens = self.num_decode_tokens = 0
        self.num_told = Counter()  # of the delays

    def stats(self) -> dict:
        stats = super().stats()
        self.num_told.update({name: len(stats[name]) for name in self.delays})
        return stats

    def assert_idle(self):
        for name in ("requests", "num_choices", "prompt_scores"):
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

    def __init__(self, world: "World"):
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
        self.links.selector.on_ready = self.wake
        limits = {
            "max_model_len": self.engine.max_model_len,
            "max_num_seqs": self.settings["max_num_seqs"],
        }
        self.links.greet({"op": "ready", **limits, "vocab_size": 257, "eos_token_ids": [EOS]})
        self.wake()

    def cannot_load(self):
        """As a process that finds no model."""
        if self.state == "loading":
            self.links.greet({"op": "fatal", "message": "no model is there"})
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
        engine.turn(self.engine, self.links, self.settings["max_queue"])
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
        owners = [
            p
            for p in self.world.processes
            if p.is_running and p.client.sock is theirs and p.client.transport
        ]
        if not owners:
            return
        http = owners[0].client
        mine = {id for id in self.engine.requests if id.startswith(f"{link.number}:")}
        for first, n in self.engine.num_choices.items():
            mine |= {f"{first}.{number}" for number in range(1, n) if first in mine}
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
                f"HTTP process {owners[0].number} waits for {waiting - mine}, of which the engine knows nothing"
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


# --------------------------------------------------------------------------------------------------
# The HTTP processes


class NumberedConnection(connection.Connection):
    """
    uvicorn keeps connections in a set: in the order of their addresses, which differ from run to
    run.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.number = len(self.loop.sockets)

    def __hash__(self) -> int:
        return self.number


class InlineEncoder(encoder.Encoder):
    """Its process's jobs are done here, after the time that they take."""

    def __init__(self, world: "World"):
        super().__init__("/nowhere", ByteTokenizer())
        self.has_chat = True
        self.world = world

    def _exchange(self, job):
        if self.world.encoder_fault:
            self.world.encoder_fault = False
            raise RuntimeError("the encoding process ended (exit code -9)")
        return encoder.work(job, self.tokenizer, FakeChat())


class WatchedClient(client.EngineClient):
    """Notes what becomes of the engine, as this HTTP process sees it."""

    def __init__(self, process: "HttpProcess", start):
        self.owner = process
        super().__init__(process, start)

    def submit(self, choices):
        super().submit(choices)
        self.owner.check_queue()


class HttpProcess:
    """What serve.py runs in an HTTP process, on a loop of its own; number 0 leads."""

    def __init__(self, world: "World", number: int, orders=None):
        self.world = world
        self.number = number
        self.listening = Share(world.listeners[number])
        self.orders = orders
        self.pid = number
        self.exitcode: int | None = None
        self.sentinel = Signal()
        self.was_killed = False
        self.loop = world.machine.new_loop()
        self.loop.process = self
        self.loop.high = world.settings["link_high"]
        self.loop.job_seconds = world.settings["encode_seconds"]
        self.jobs: list[api.Job] = []
        self.refused: Counter = Counter()  # calls by status
        self.is_known = True  # of all calls that are not logged, what they were told
        self.states: list[tuple[float, str]] = [(world.now, "loading")]
        world.processes.append(self)
        world.by_number[number] = self
        self.client = WatchedClient(self, world.start_engine if number == 0 else lambda: None)
        self.workers = None
        if number == 0:
            sockets = [Share(listener) for listener in world.listeners[1:]]
            self.workers = workers.Workers(world.start_worker, sockets, world.counts)
        seat = workers.Seat(number, world.counts, orders)
        self.encoder = InlineEncoder(world)
        self.service = api.Service(
            self.client, self.encoder, world.args, world.keys, "", seat, self.workers
        )
        self.client.on_state = self.note_state
        self.task = self.loop.create_task(self.service.run(self.listening))
        self.task.add_done_callback(self.end)

    def note_state(self, state: str):
        self.states.append((self.world.now, state))
        self.service.engine_changed(state)

    def connect_to_engine(self):
        sock = self.world.link_listener.connect()
        self.loop.sockets.append(sock)
        return sock

    def check_queue(self):
        most = self.world.settings["max_num_seqs"] + self.world.settings["max_queue"]
        if len(self.client.choices) > most:
            self.world.broken(
                f"{len(self.client.choices)} choices are in work, at most {most} may be"
            )

    @property
    def is_running(self) -> bool:
        return self.exitcode is None

    def end(self, task: asyncio.Task):
        """It has come to its end by itself."""
        if not task.cancelled() and task.exception():
            self.world.broken(f"HTTP process {self.number} ended by {task.exception()!r}")
        self.leave(0)

    def kill(self):
        if self.is_running:
            self.was_killed = True
            self.leave(-9)

    def leave(self, code: int):
        self.exitcode = code
        self.ended_at = self.world.now
        self.loop.kill()
        self.listening.close()
        if self.workers:
            for sock in self.workers.sockets:
                sock.close()
            for orders in self.workers.orders.values():
                orders.close()
        if self.orders:
            self.orders.signal.is_broken = True
        self.sentinel.end()

    def join(self):
        pass


# --------------------------------------------------------------------------------------------------
# The clients


def as_bytes(call: dict, is_last: bool) -> bytes:
    """The request as it goes over the wire."""
    method = "POST" if "body" in call or "raw" in call else "GET"
    body = json.dumps(call["body"]).encode() if "body" in call else call.get("raw", "").encode()
    head = [f"{method} {call['path']} HTTP/1.1", "Host: localhost", f"X-Request-Id: r{call['id']}"]
    if method == "POST":
        head += [f"Content-Type: {call.get('type', 'application/json')}"]
        head += (
            ["Transfer-Encoding: chunked"]
            if call.get("chunked")
            else [f"Content-Length: {len(body)}"]
        )
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if call.get("chunked") else body
    if call.get("key") is not None:
        head += [f"Authorization: Bearer {call['key']}"]
    if is_last:
        head += ["Connection: close"]
    return "\r\n".join([*head, "", ""]).encode() + body


class Answer(SimpleNamespace):
    """status (None: not even a head has come), headers, body, whole: whether all of it has come."""


def answers(data: bytes) -> list[Answer]:
    """What a server has sent, up to where it breaks off."""
    found = []
    while data:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            found.append(Answer(status=None, headers={}, body=b"", whole=False))
            break
        first, *lines = head.decode().split("\r\n")
        status = int(first.split()[1])
        headers = dict(line.lower().split(": ", 1) for line in lines)
        if status == 100:
            data = rest
            continue
        if headers.get("transfer-encoding") == "chunked":
            body, data, whole = unchunked(rest)
        else:
            size = int(headers["content-length"])
            body, data, whole = rest[:size], rest[size:], len(rest) >= size
        found.append(Answer(status=status, headers=headers, body=body, whole=whole))
    return found


def unchunked(data: bytes) -> tuple[bytes, bytes, bool]:
    """A chunked body, what comes after it, and whether its end is there."""
    body = b""
    while True:
        size, separator, rest = data.partition(b"\r\n")
        if not separator or len(rest) < int(size, 16) + 2:
            return body, b"", False
        length = int(size, 16)
        body += rest[:length]
        data = rest[length + 2 :]
        if length == 0:
            return body, data, True


class Caller:
    """One connection of one client, and what has come of it."""

    def __init__(self, world: "World", event: dict):
        self.world = world
        self.loop = world.loop
        self.event = event
        self.calls = event["calls"]
        self.unsent = b"".join(as_bytes(call, call is self.calls[-1]) for call in self.calls)
        self.piece = -(-len(self.unsent) // event.get("pieces", 1))
        self.received = b""
        self.num_sent = 0
        self.began = world.now
        self.sent_at = self.ended_at = None
        self.has_left = False
        self.is_cut = False  # by a reset
        self.sock = None
        try:
            self.sock = world.listeners[event["worker"]].connect()
        except ConnectionRefusedError:
            self.ended_at = world.now
            return
        self.sock.on_change = lambda: self.loop.call_soon(self.look)
        if "leaves" in event and event["leaves"][0] == "seconds":
            self.loop.call_later(event["leaves"][1], self.leave)
        if event.get("sip"):
            self.loop.call_later(event["rest"], self.read_slowly)
        self.send()

    @property
    def process(self) -> HttpProcess:
        """Who has taken in the connection; if nobody has, who would."""
        loop = self.sock.peer.loop if self.sock else None
        return loop.process if loop else self.world.by_number[self.event["worker"]]

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
            return self.finish(is_cut=True)
        self.unsent = self.unsent[sent:]
        self.num_sent += sent
        self.leave_if("sent", self.num_sent)
        if self.unsent:
            self.loop.call_later(self.event.get("gap", 0.001), self.send)
        elif self.sent_at is None:
            self.sent_at = self.world.now
            if self.event.get("half") and self.ended_at is None:
                self.sock.shutdown()

    def look(self):
        if not self.event.get("sip"):
            while self.read(2**18):
                pass

    def read_slowly(self):
        before = len(self.received)
        while len(self.received) < before + self.event["sip"] and self.read(self.event["sip"]):
            pass
        if self.ended_at is None:
            self.loop.call_later(self.event["rest"], self.read_slowly)

    def read(self, size: int) -> bool:
        if self.ended_at is not None:
            return False
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return False
        except ConnectionError:
            self.finish(is_cut=True)
            return False
        if not data:
            self.finish()
            return False
        self.received += data
        self.leave_if("read", len(self.received))
        if (
            self.event.get("leaves", [""])[0] == "said"
            and self.event["leaves"][1].encode() in self.received
        ):
            self.leave()
        return True

    def leave_if(self, what: str, count: int):
        kind, most = self.event.get("leaves", ["", 0])
        if kind == what and count >= most:
            self.leave()

    def leave(self):
        if self.ended_at is None:
            self.has_left = True
            self.loop.call_later(2.5 + self.world.pause, self.check_forgotten)
            if self.event.get("how") == "reset":
                self.sock.peer.reset()
            self.finish()

    def check_forgotten(self):
        """A client that has left is noticed, and nothing is computed for it any more."""
        names = {f"r{call['id']}" for call in self.calls}
        for process in self.world.processes:
            for choice in process.client.choices.values() if process.is_running else ():
                if choice.job.http_id in names:
                    raise Violation(
                        f"call {choice.job.http_id} is still in work, its client has left long ago"
                    )

    def finish(self, is_cut=False):
        self.is_cut = is_cut
        self.ended_at = self.world.now
        self.sock.close()


# --------------------------------------------------------------------------------------------------
# What must come


class Expected(SimpleNamespace):
    """
    Of one choice: text, finish_reason, stop_reason, num_tokens, logprobs (of the tokens, or None).
    """


def prompts_of(call: dict) -> list[list[int]]:
    body = call["body"]
    if "messages" in body:
        return [FakeChat().encode(body["messages"])]
    prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
    return [list(prompt.encode()) for prompt in prompts]


def count_of(call: dict) -> int:
    """How many choices a call asks for."""
    if not call["path"].endswith("completions") or "body" not in call:
        return 0
    return len(prompts_of(call)) * call["body"].get("n", 1)


def expected(call: dict, seed: int, room: int) -> list[Expected]:
    """
    All choices of a call, by an oracle as plain as can be. `room`: tokens of the longest text.
    """
    body, found = call["body"], []
    for number, prompt in enumerate(prompts_of(call)):
        own_seed = seed if body.get("seed") is not None else seed + number
        for choice in range(body.get("n", 1)):
            found.append(
                one_expected(
                    body, prompt, script(tuple(prompt), own_seed, choice), room - len(prompt)
                )
            )
    return found


def one_expected(body: dict, prompt: list[int], said: list[int], room: int) -> Expected:
    limit = body.get(
        "max_completion_tokens", body.get("max_tokens", 16 if "prompt" in body else room)
    )
    stops = {*body.get("stop_token_ids", ()), *([] if body.get("ignore_eos") else [EOS])}
    tokens, text, reason, stop_reason = [], "", "length", None
    for token in said[:limit]:
        tokens.append(token)
        if token in stops:
            reason, stop_reason = "stop", None if token == EOS else token
            break
        shown = bytes(t for t in tokens if t != EOS)
        text = shown.decode("utf-8", "ignore")
        if matched := [stop for stop in body.get("stop", ()) if stop in text]:
            place = min(text.index(stop) + len(stop) for stop in matched)
            stop_reason = max((stop for stop in matched if text[:place].endswith(stop)), key=len)
            reason, text = "stop", text[: place - len(stop_reason)]
            break
    if not (reason == "stop" and isinstance(stop_reason, str)):
        last_is_hidden = tokens and tokens[-1] in stops
        shown = tokens[:-1] if last_is_hidden else tokens
        text = bytes(t for t in shown if t != EOS).decode("utf-8", "replace")
    logprobs = None
    if body.get("logprobs") is not None and body["logprobs"] is not False:
        logprobs = [-0.5 - token for token in tokens]
        if body.get("echo"):
            logprobs = [None, *(-0.5 - token for token in prompt[1:]), *logprobs]
    if body.get("echo"):
        text = bytes(prompt).decode() + text
    return Expected(
        text=text,
        finish_reason=reason,
        stop_reason=stop_reason,
        num_tokens=len(tokens),
        logprobs=logprobs,
    )


def told(answer: Answer, call: dict) -> tuple[dict[int, Expected], dict | None, dict | None, bool]:
    """
    What an answer of status 200 says: its choices by index, its usage, its error, and whether it
    says its end.
    """
    body = call["body"]
    if not body.get("stream"):
        content = json.loads(answer.body)
        choices = {
            c["index"]: said_of(c, "text" if "prompt" in body else "message")
            for c in content["choices"]
        }
        return choices, content["usage"], None, True
    choices: dict[int, Expected] = {}
    usage = error = None
    is_done = False
    events = answer.body.decode("utf-8", "ignore").split("\n\n")
    for event in events[:-1]:  # what is behind the last blank line has not all come
        if event.startswith(": "):
            continue
        if is_done or error:
            raise Violation(f"call {call['id']}: something comes after the end: {event!r}")
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
            continue
        content = json.loads(data)
        error = content.get("error")
        usage = content.get("usage") or usage
        for choice in content.get("choices", ()):
            add(
                choices,
                choice["index"],
                said_of(choice, "text" if "prompt" in body else "delta"),
                call,
            )
    return choices, usage, error, is_done or error is not None


def said_of(choice: dict, kind: str) -> Expected:
    text = choice["text"] if kind == "text" else choice[kind].get("content", "")
    logprobs = choice["logprobs"]
    if logprobs is not None:
        chat = logprobs.get("content")
        logprobs = (
            logprobs["token_logprobs"] if chat is None else [entry["logprob"] for entry in chat]
        )
    return Expected(
        text=text,
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=logprobs,
    )


def add(choices: dict[int, Expected], index: int, more: Expected, call: dict):
    """Put a chunk behind those before it."""
    so_far = choices.setdefault(
        index, Expected(text="", finish_reason=None, stop_reason=None, logprobs=None)
    )
    if so_far.finish_reason is not None:
        raise Violation(f"call {call['id']}: choice {index} goes on after its end")
    so_far.text += more.text
    so_far.finish_reason = more.finish_reason
    so_far.stop_reason = more.stop_reason
    if more.logprobs is not None:
        so_far.logprobs = (so_far.logprobs or []) + more.logprobs


class Judge:
    """Of one call: whether what came of it may be."""

    def __init__(self, world: "World", caller: Caller, call: dict, answer: Answer | None):
        self.world = world
        self.settings = world.settings
        self.caller = caller
        self.call = call
        self.answer = answer
        self.process = caller.process
        self.log = world.access.get(f"r{call['id']}", [])

    def wrong(self, what: str):
        raise Violation(f"call {self.call['id']}: {what}")

    def check(self):
        answer = self.answer
        if len(self.log) > 1:
            self.wrong(f"is logged {len(self.log)} times")
        if answer is None or not answer.whole:
            self.process.is_known = (
                self.process.is_known and self.call["path"] not in api.OPEN_PATHS
            )
            self.check_cut()
        if answer is None or answer.status is None:
            return
        self.world.seen[answer.status] += 1
        if answer.headers.get("x-request-id") != f"r{self.call['id']}":
            self.wrong(f"its answer is named {answer.headers.get('x-request-id')}")
        if self.log and self.log[0]["status"] != answer.status and self.log[0]["status"] != 499:
            self.wrong(f"the log says {self.log[0]['status']}, the client was told {answer.status}")
        if (
            answer.whole
            and not self.log
            and not self.was_killed
            and self.call["path"] not in api.OPEN_PATHS
        ):
            self.wrong("has an answer, but is not logged")
        if answer.status >= 400 and self.call["path"] in api.OPEN_PATHS:
            self.process.refused[answer.status] += 1  # which is not logged
        if answer.status != 200:
            if answer.whole:
                self.check_error(answer.status, json.loads(answer.body)["error"])
        elif self.call.get("refused"):
            self.wrong(f"is served, wanted {self.call['refused']}")
        elif self.call["path"].endswith("completions"):
            self.check_completion()
            self.check_time()
        elif self.call["path"] == "/tokenize" and answer.whole:
            tokens = list(self.call["body"]["prompt"].encode())
            content = json.loads(answer.body)
            if content["tokens"] != tokens or content["count"] != len(tokens):
                self.wrong(f"wrong tokens {content}")
        elif self.call["path"] == "/livez" and answer.whole:
            self.check_alive()

    @property
    def was_killed(self) -> bool:
        return self.process.was_killed

    def check_time(self):
        """
        No answer takes longer than --request-seconds, and none begins when the server has been
        stopped.
        """
        world, settings, caller = self.world, self.settings, self.caller
        if world.stopped_at is not None and caller.began > world.stopped_at + 0.3 + world.pause:
            self.wrong(
                f"is served, {caller.began - world.stopped_at:.2f} s after the server was stopped"
            )
        is_plain = caller.is_quick and len(caller.calls) == 1 and settings["scores_in_place"] > 100
        encoding = settings["encode_seconds"] * len(world.callers)
        frozen = sum(event["seconds"] for event in world.events if event["do"] == "freeze")
        most = settings["request_seconds"] + encoding + frozen + 1.0
        if (
            is_plain
            and self.answer.whole
            and caller.ended_at - caller.began > most + 1000 * settings["turn_seconds"]
        ):
            self.wrong(
                f"took {caller.ended_at - caller.began:.1f} s, at most {most:.1f} are allowed"
            )

    def check_cut(self):
        """The answer is not there, or not all of it."""
        if self.caller.has_left or not self.caller.is_quick or self.was_killed:
            return
        stopped = self.world.stopped_at
        if stopped is not None and (
            self.caller.sent_at is None or self.caller.sent_at > stopped - 0.1 - self.world.pause
        ):
            return
        if self.world.pause >= self.settings["client_seconds"]:
            return
        if len(self.world.beside(self.caller)) >= self.settings["max_connections"]:
            return  # a newcomer is the one that is idle
        dead = [
            at
            for process in self.world.processes
            for at, state in process.states
            if state == "dead"
        ]
        if dead and (self.caller.sent_at is None or self.caller.sent_at > min(dead) - 0.1):
            return  # one of them notices first, and has all end
        self.wrong(f"has no whole answer; {self.caller.received[-200:]!r}")

    def check_completion(self):
        if not (self.answer.whole or self.call["body"].get("stream")):
            return
        choices, usage, error, is_over = told(self.answer, self.call)
        if self.answer.whole and not is_over:
            self.wrong("ends without an end")
        seed = self.call["body"].get("seed")
        if seed is None:
            seed = self.log[0].get("seed") if self.log else None
        if seed is None:
            return
        wanted = dict(enumerate(expected(self.call, seed, self.world.room)))
        is_whole = self.answer.whole and not error
        if not set(choices) <= set(wanted) or (is_whole and set(choices) != set(wanted)):
            self.wrong(f"has choices {sorted(choices)}, wanted {sorted(wanted)}")
        for index, choice in choices.items():
            self.compare(index, choice, wanted[index], is_whole)
        if is_whole:
            self.check_usage(usage, list(wanted.values()))
            self.world.counts_of["answers"] += 1
        if error:
            self.world.seen["error in a stream"] += 1
            status = {"engine_dead": 500, None: 500, "queue_full": 429}.get(error["code"], 503)
            self.check_error(status, error)

    def compare(self, index: int, choice: Expected, wanted: Expected, is_whole: bool):
        ended = choice.finish_reason is not None
        if is_whole and not ended:
            self.wrong(f"choice {index} has no end")
        if not (choice.text == wanted.text if ended else wanted.text.startswith(choice.text)):
            self.wrong(f"choice {index} is {choice.text!r}, wanted {wanted.text!r}")
        if ended and (choice.finish_reason, choice.stop_reason) != (
            wanted.finish_reason,
            wanted.stop_reason,
        ):
            self.wrong(
                f"choice {index} ended by {choice.finish_reason}, {choice.stop_reason}, wanted {wanted}"
            )
        logprobs = choice.logprobs or []
        all_wanted = wanted.logprobs or []
        if logprobs != (all_wanted if ended else all_wanted[: len(logprobs)]):
            self.wrong(f"choice {index} has log-probabilities {logprobs}, wanted {all_wanted}")

    def check_usage(self, usage: dict | None, wanted: list[Expected]):
        body = self.call["body"]
        asked = not body.get("stream") or body.get("stream_options", {}).get("include_usage")
        if not asked:
            if usage is not None:
                self.wrong("tells of usage, which nobody asked for")
            return
        if usage is None:
            self.wrong("does not tell the usage")
        prompts = prompts_of(self.call)
        counts = sum(map(len, prompts)), sum(choice.num_tokens for choice in wanted)
        if (usage["prompt_tokens"], usage["completion_tokens"]) != counts or usage[
            "total_tokens"
        ] != sum(counts):
            self.wrong(f"its usage is {usage}, wanted {counts}")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        most = sum(self.most_cached(prompt) for prompt in prompts)
        if cached > most:
            self.wrong(f"{cached} tokens are said to be cached, at most {most} can be")

    def most_cached(self, prompt: list[int]) -> int:
        """Tokens of the longest beginning that some other prompt of the same salt has."""
        own = self.world.salt_of(self.call)
        others = [
            p
            for call in self.world.calls.values()
            if self.world.salt_of(call) == own
            for p in prompts_of(call)
        ]
        return max((common(prompt, other) for other in others if other != prompt), default=0)

    def check_alive(self):
        """A dead or stalled engine makes no healthy server."""
        if self.was_killed:
            return
        before = self.state_at(self.caller.began)
        state = (
            self.state_at(self.caller.ended_at) if self.caller.is_quick else before
        )  # who reads late, hears of then
        if state == "dead" or before == state == "restarting":
            self.wrong(f"is told that all is well, the engine is {state}")

    def state_at(self, moment: float) -> str:
        return (["loading"] + [state for at, state in self.process.states if at <= moment])[-1]

    def check_error(self, status: int, error: dict):
        """Each error needs its reason."""
        code, message = error["code"], error["message"]
        self.world.seen[f"{status} {code}"] += 1
        refused = self.call.get("refused")
        if status == refused:
            return
        if refused == 401 or not self.may_be(status, code, message):
            self.wrong(f"is refused with {status} {code} {message!r}, without a reason")

    def may_be(self, status: int, code: str | None, message: str) -> bool:
        world, caller = self.world, self.caller
        began, ended = caller.began, caller.ended_at
        stopped = world.stopped_at is not None and world.stopped_at <= ended
        states = [state for at, state in self.process.states if at <= ended]
        match status, code:
            case 503, "loading":
                return self.was_killed or not any(
                    s == "ready" and at < began for at, s in self.process.states
                )
            case 503, "restarting" | "dead":
                found = code in states or (self.call["path"] == "/livez" and "restarting" in states)
                return found or ("no step in" in message and world.pause > 0)
            case 503, "stopping" if world.stopped_at is not None and not world.leader_died:
                return (
                    world.drained_at <= ended + 1e-6
                    and ended <= world.drained_at + 1.5 + world.pause
                )
            case 503, "draining" | "stopping":
                return stopped or "dead" in states or self.was_killed or world.leader_died
            case 503, "timeout":
                return (
                    ended - began > self.settings["request_seconds"] - 1e-6 and self.is_unfinished()
                )
            case 503, "encoder_ended":
                return world.encoder_faults > 0
            case 429, "encoder_busy":
                return True
            case 429, "queue_full":
                return self.may_be_full(message)
            case 400, None:
                most = self.settings["max_num_seqs"] + self.settings["max_queue"]
                return "in one call" in message and count_of(self.call) > most
            case 500, "engine_dead":
                return any(
                    state in ("restarting", "dead") and at >= began
                    for at, state in self.process.states
                )
            case 500, None:
                planned = "RuntimeError: planned" in message or "not numbers" in message
                return planned and self.call["id"] in world.failed
        return False

    def is_unfinished(self) -> bool:
        """The engine has not done all of it, or it is long to tell."""
        jobs = [job for job in self.process.jobs if job.http_id == f"r{self.call['id']}"]
        choices = [choice for job in jobs for choice in job.choices]
        return (
            any(not choice.finish_reason for choice in choices)
            or self.settings["scores_in_place"] < 100
        )

    def may_be_full(self, message: str) -> bool:
        """The most choices that other calls can have had in work meanwhile are counted."""
        most = self.settings["max_num_seqs"] + self.settings["max_queue"]
        others = self.world.beside(self.caller)
        return (
            sum(count_of(call) for caller in [self.caller, *others] for call in caller.calls) > most
        )


def common(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


# --------------------------------------------------------------------------------------------------
# A run


class World:
    """One run: all processes and clients of some settings, and the events that happen to them."""

    def __init__(self, settings: dict, events: list[dict]):
        self.settings = settings
        self.events = events
        self.machine = Machine()
        self.machine.turn_seconds = settings["turn_seconds"]
        self.loop = self.machine.new_loop()  # of clients, events and the engine's process
        self.loop.process = None
        self.start = self.machine.clock.now
        self.rng = random.Random(settings["seed"])  # of sizes of pieces, and of seeds
        self.keys = KEYS[: settings["keys"]]
        self.counts = workers.Counts([0] * settings["workers"], [0] * settings["workers"])
        self.room = settings["num_blocks"] * settings["block_size"]
        flags = ["--model", "sim", "--no-access-log"]
        for name in (
            "max_queue",
            "request_seconds",
            "client_seconds",
            "drain_seconds",
            "max_connections",
        ):
            flags += ["--" + name.replace("_", "-"), str(settings[name])]
        self.args = serve.parse_args(flags)
        self.args.access_log = True  # it comes to `log`
        self.listeners = [self.listener("tcp", True) for _ in range(settings["workers"])]
        self.link_listener = self.listener("link", False)
        self.processes: list[HttpProcess] = []
        self.by_number: dict[int, HttpProcess] = {}
        self.engines: list[EngineProcess] = []
        self.callers: list[Caller] = []
        self.calls: dict[int, dict] = {}
        self.access: dict[str, list[dict]] = {}
        self.seen: Counter = Counter()
        self.counts_of: Counter = Counter()
        self.failed: set[int] = set()  # calls whose steps have failed
        self.encoder_fault = False
        self.encoder_faults = 0
        self.stopped_at: float | None = None
        self.drained_at = math.inf  # when the server may end what still runs
        self.leader_died = False
        self.num_happened = 0
        self.problems: list[str] = []
        stops = [event["seconds"] for event in events if event["do"] in ("freeze", "stall_engine")]
        self.pause = sum(stops)
        self.lag = (
            3.0 + self.pause
        )  # seconds by which the server may know late that a client has left

    @property
    def now(self) -> float:
        return self.machine.clock.now

    def listener(self, kind: str, hard: bool) -> Listener:
        most = self.settings[f"{kind}_piece"]
        return Listener(
            lambda: pair(self.settings[f"{kind}_room"], lambda: self.rng.randint(1, most), hard)
        )

    def broken(self, what: str):
        self.problems.append(what)

    # what the HTTP processes ask for

    def start_engine(self) -> EngineProcess:
        self.engines.append(EngineProcess(self))
        if len(self.engines) > 2:
            self.broken("an engine that dies for the second time is started again")
        return self.engines[-1]

    def start_worker(self, sock: Share, seat: workers.Seat) -> HttpProcess:
        return HttpProcess(self, seat.number, seat.orders)

    def log(self, event: str, **fields):
        if event == "access" and "id" in fields:
            self.access.setdefault(fields["id"], []).append(fields)
        process = asyncio.get_running_loop().process
        if event == "access" and fields["status"] >= 400 and fields["status"] != 499:
            process.refused[fields["status"]] += 1

    def salt_of(self, call: dict) -> str:
        name = f"key {KEYS.index(call['key'])}" if self.keys and call.get("key") in KEYS else ""
        return f"{name}:{call['body'].get('cache_salt', '')}" if "body" in call else ""

    def take_in(self, running: Engine, link, message: dict, max_queue: int):
        """What comes to the engine is what was asked for."""
        if message["op"] == "add":
            call = self.calls[call_of(message["prompt"])]
            body, options = call["body"], message["options"]
            wanted = {
                "n": body.get("n", 1),
                "priority": body.get("priority", 0),
                "cache_salt": self.salt_of(call),
            }
            for name, value in wanted.items():
                if options[name] != value:
                    raise Violation(
                        f"call {call['id']}: the engine gets {name} {options[name]!r}, wanted {value!r}"
                    )
            if message["prompt"] not in prompts_of(call):
                raise Violation(f"call {call['id']}: the engine gets another prompt")
        take_in(running, link, message, max_queue)
        most = self.settings["max_num_seqs"] + self.settings["max_queue"]
        if running.num_at_work > most:
            raise Violation(f"{running.num_at_work} choices are at work, at most {most} may be")

    # what happens

    def happen(self, event: dict):
        self.num_happened += 1
        running = self.engines[-1]
        match event["do"]:
            case "call":
                self.call(event)
            case "kill_engine":
                running.die()
            case "stall_engine":
                running.stall(event["seconds"])
            case "cannot_load":
                running.cannot_load()
            case "fail_step":
                if running.engine:
                    running.engine.runner.fault = event["where"]
            case "fail_encoder":
                self.encoder_fault = True
                self.encoder_faults += 1
            case "stop":
                self.stop()
            case "kill_worker":
                if event["worker"] == 0:
                    self.leader_died = True
                    self.drained_at = self.now
                    self.stopped_at = self.stopped_at or self.now
                self.by_number[event["worker"]].kill()
            case "freeze":
                self.by_number[event["worker"]].loop.frozen_until = self.now + event["seconds"]

    def call(self, event: dict):
        for call in event["calls"]:
            self.calls[call["id"]] = call
        self.callers.append(Caller(self, event))

    def stop(self):
        """SIGTERM."""
        if self.by_number[0].is_running:
            is_second = self.stopped_at is not None
            self.stopped_at = self.stopped_at or self.now
            self.drained_at = min(
                self.drained_at, self.now + (0.0 if is_second else self.settings["drain_seconds"])
            )
            self.by_number[0].service.on_signal()

    # the run

    def run(self):
        """Raises Violation."""
        with stand_ins(self):
            try:
                self.play()
            finally:
                for loop in self.machine.loops:
                    loop.kill()
                for loop in self.machine.loops:
                    loop.bury()

    def play(self):
        HttpProcess(self, 0)
        for event in self.events:
            self.loop.call_at(self.start + event["t"], self.happen, event)
        last = max((event["t"] for event in self.events), default=0)
        self.wait(last + self.longest(), self.is_quiet, "some calls do not come to an end")
        self.rest(3.0)
        self.judge()
        if self.is_serving():
            self.probe()
            self.probe_failure()
            self.probe_limit()
            self.check_idle()
            self.check_metrics()
            self.part()
        elif self.engines[-1].is_dead:
            self.wait(
                self.longest(), self.has_ended, "the engine is gone for good, but the server stays"
            )
        self.stop()
        self.wait(self.longest(), self.has_ended, "the server does not end")
        self.check_end()

    def longest(self) -> float:
        """How many seconds the last event may take."""
        names = "start_seconds load_seconds request_seconds client_seconds drain_seconds"
        seconds = QUIET_SECONDS + sum(self.settings[name] for name in names.split())
        seconds += self.lag + sum(event.get("rest", 0) * 100 for event in self.events)
        return seconds + len(self.events) * (
            self.settings["encode_seconds"] + self.settings["turn_seconds"] * 2000
        )

    def wait(self, seconds: float, is_over, what: str):
        self.machine.run(self.now + seconds, lambda: self.has_problem() or is_over())
        self.raise_problems()
        if not is_over():
            callers = [caller.calls[0]["id"] for caller in self.callers if caller.ended_at is None]
            raise Violation(f"{what}: after {seconds:.0f} s the calls {callers} are open")

    def rest(self, seconds: float):
        self.machine.run(self.now + seconds, self.has_problem)
        self.raise_problems()

    def has_problem(self) -> bool:
        return bool(self.problems) or any(loop.errors for loop in self.machine.loops)

    def raise_problems(self):
        for loop in self.machine.loops:
            for context in loop.errors:
                error = context.get("exception")
                if isinstance(error, Violation):
                    raise error
                raise Violation(f"nobody caught: {context['message']}: {error!r}") from error
        if self.problems:
            raise Violation(self.problems[0])

    def is_quiet(self) -> bool:
        return self.num_happened == len(self.events) and all(
            caller.ended_at is not None for caller in self.callers
        )

    def beside(self, caller: Caller) -> list[Caller]:
        """Whoever else may have been there at the same time, as the server knows it."""
        since = caller.began - self.lag
        others = [
            other
            for other in self.callers
            if other is not caller and other.began <= caller.ended_at
        ]
        return [other for other in others if other.ended_at is None or other.ended_at >= since]

    def is_serving(self) -> bool:
        """Nobody has stopped it, and the engine lives."""
        return self.stopped_at is None and all(
            p.is_running and p.client.state == "ready" for p in self.living()
        )

    def living(self) -> list[HttpProcess]:
        return list(self.by_number.values())

    def has_ended(self) -> bool:
        return not any(process.is_running for process in self.living()) and self.engines[-1].is_dead

    def judge(self):
        for caller in self.callers:
            found = answers(caller.received)
            if len(found) > len(caller.calls):
                raise Violation(
                    f"call {caller.calls[0]['id']}: {len(found)} answers to {len(caller.calls)} calls"
                )
            for number, call in enumerate(caller.calls):
                answer = found[number] if number < len(found) else None
                if answer is None and found and found[-1].headers.get("connection") == "close":
                    continue  # to a call before: a client has to send this one again
                Judge(self, caller, call, answer).check()

    def probe(self):
        """Now that all is quiet, everybody is served again."""
        before = len(self.callers)
        self.encoder_fault = False
        self.engines[-1].engine.runner.fault = ""
        for number in range(self.settings["workers"]):
            self.ask(number, 10_000 + number)
            self.wait(5.0, self.is_quiet, "the server serves nobody any more")
            self.rest(0.5)
        for caller in self.callers[before:]:
            (answer,) = answers(caller.received)
            if answer.status != 200:
                raise Violation(f"when all is quiet, a call is refused: {answer.body.decode()}")
        del self.callers[before:]
        self.rest(1.0)

    def ask(self, worker: int, id: int, max_tokens: int = 2) -> Caller:
        """A call like any other."""
        body = {"prompt": f"~{id}", "max_tokens": max_tokens, "seed": 1, "ignore_eos": True}
        key = self.keys[0] if self.keys else None
        self.call(
            {
                "worker": worker,
                "calls": [{"id": id, "path": "/v1/completions", "body": body, "key": key}],
            }
        )
        return self.callers[-1]

    def probe_failure(self):
        """The engine fails at one of two calls: the other one's answer is whole."""
        if self.settings["max_num_seqs"] < 2 or self.settings["request_seconds"] < 10:
            return
        self.engines[-1].engine.runner.fault = "one of many"
        asked = [self.ask(0, 14_000 + number, max_tokens=20) for number in range(2)]
        self.rest(8.0)
        for caller in asked:
            (answer,) = answers(caller.received)
            Judge(self, caller, caller.calls[0], answer).check()

    def probe_limit(self):
        """An engine that does nothing for a while: the calls end when their time is over."""
        seconds = self.settings["request_seconds"]
        self.engines[-1].stall(seconds + 5.0)
        asked = [self.ask(number, 11_000 + number) for number in range(self.settings["workers"])]
        self.rest(seconds + 4.0)
        for caller in asked:
            self.expect_refusal(caller, "timeout", "queue_full")
        self.rest(4.0)

    def expect_refusal(self, caller: Caller, *codes: str):
        """It must have been told one of these by now."""
        told = [
            json.loads(answer.body)["error"]["code"]
            for answer in answers(caller.received)
            if answer.status != 200
        ]
        if len(told) != 1 or told[0] not in codes:
            name = caller.calls[0]["id"]
            raise Violation(
                f"call {name} should be refused with {codes} by now, its answer is {caller.received!r}"
            )

    # how it ends

    def part(self):
        """In three ways, each while something is in work that takes too long."""
        self.engines[-1].stall(self.settings["drain_seconds"] + 10.0)
        asked = [self.ask(number, 12_000 + number) for number in range(self.settings["workers"])]
        self.rest(self.settings["encode_seconds"] + 0.5)
        way = self.settings["seed"] % 3
        if way == 2:
            return self.lose_engines()
        self.stop()
        if self.settings["drain_seconds"]:
            self.rest(0.5)
            newcomers = [
                self.ask(number, 13_000 + number) for number in range(self.settings["workers"])
            ]
            self.rest(0.4)
            for caller in newcomers:
                self.expect_refusal(caller, "draining")
        if way == 1:
            self.stop()
        self.rest(self.drained_at - self.now + 0.5)
        is_timed_out = asked[0].began + self.settings["request_seconds"] < self.drained_at
        for caller in asked:
            self.expect_refusal(caller, "timeout" if is_timed_out else "stopping", "queue_full")

    def lose_engines(self):
        """The engine dies, and the next one too, before it has taken in any link."""
        self.engines[-1].die()
        self.machine.run(self.now + 1.0, lambda: self.engines[-1].state == "starting")
        self.engines[-1].die()
        self.wait(self.longest(), self.has_ended, "two engines are gone, but the server stays")

    # what is left

    def check_idle(self):
        self.engines[-1].engine.assert_idle()
        for process in self.living():
            service = process.service
            left = {
                "choices": process.client.choices,
                "messages to the engine": process.client.unsent,
                "characters that wait to be encoded": process.encoder.waiting,
                "long answers": api.MAX_LONG_ANSWERS - service.telling._value,
                "connections": service.server.server_state.connections,
                "calls": service.server.server_state.tasks,
                "open connections in the count": self.counts.open[process.number],
                "idle connections in the count": self.counts.idle[process.number],
            }
            for name, value in left.items():
                if value:
                    raise Violation(
                        f"HTTP process {process.number} is idle, but has {name}: {value}"
                    )
            tasks = sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks(process.loop))
            wanted = ["Service.keep_room"] * (self.settings["workers"] > 1) + ["Service.run"]
            if tasks != wanted:
                raise Violation(f"HTTP process {process.number} is idle, but runs {tasks}")

    def check_metrics(self):
        for process in self.living():
            Books(process).check()
        self.check_engines_metrics()

    def check_engines_metrics(self):
        books = Books(self.by_number[0])
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            books.expect(name, 0)
        if len(self.engines) > 1 or self.by_number[0].was_killed:
            return
        running = self.engines[0].engine
        books.expect("prefix_cache_queries_total", running.scheduler.num_queried_tokens)
        books.expect("prefix_cache_hits_total", running.scheduler.num_hit_tokens)
        books.expect("num_preemptions_total", running.scheduler.num_preemptions)
        books.expect("request_queue_time_seconds_count", running.num_told["waited"])
        books.expect("request_prefill_time_seconds_count", running.num_told["prefilled"])

    def check_end(self):
        """The server was stopped, or its engine is gone for good."""
        for process in self.processes:
            if process.was_killed:
                continue
            late = process.ended_at - self.drained_at
            if late > 3 * api.LINGER_SECONDS + 3 + self.pause:
                raise Violation(f"HTTP process {process.number} ends {late:.1f} s after it had to")
            if process.client.choices:
                raise Violation(
                    f"HTTP process {process.number} has ended, but has choices {process.client.choices}"
                )


class Books:
    """What an HTTP process counts, beside what its jobs say."""

    def __init__(self, process: HttpProcess):
        self.process = process
        self.values: dict = {}
        for family in process.service.metrics.registry.collect():
            for sample in family.samples:
                label = sample.labels.get("finished_reason") or sample.labels.get("status")
                if "le" not in sample.labels:
                    self.values[sample.name.partition(":")[2], label] = sample.value

    def expect(self, name: str, wanted: float, label: str | None = None):
        found = self.values.get((name, label), 0)
        if found != wanted:
            what = f"{name} {label or ''}".strip()
            raise Violation(
                f"HTTP process {self.process.number} counts {what} as {found}, wanted {wanted}"
            )

    def check(self):
        jobs = self.process.jobs
        choices = [choice for job in jobs for choice in job.choices]
        ended = [choice for choice in choices if choice.finish_reason]
        reasons = Counter(choice.finish_reason for choice in ended)
        for choice in choices:
            if choice.engine_id is not None and not choice.finish_reason:
                error = choice.job.error
                reasons["abort" if error is None or error.status == 499 else "error"] += 1
        for reason in ("stop", "length", "abort", "error"):
            self.expect("request_success_total", reasons[reason], reason)
        begun = [choice for choice in choices if choice.num_tokens or choice.finish_reason]
        self.expect("time_to_first_token_seconds_count", len(begun))
        firsts = [choice for choice in begun if choice.index % choice.request.n == 0]
        self.expect("prompt_tokens_total", sum(len(choice.prompt) for choice in firsts))
        for name in ("e2e_request_latency_seconds", "request_decode_time_seconds"):
            self.expect(f"{name}_count", len(ended))
        self.expect("request_prompt_tokens_sum", sum(len(choice.prompt) for choice in ended))
        self.expect("request_generation_tokens_sum", sum(choice.num_tokens for choice in ended))
        self.expect("request_generation_tokens_count", len(ended))
        self.check_prompts(jobs)
        if not any(choice.request.stop or choice.request.max_tokens == 0 for choice in choices):
            self.expect("generation_tokens_total", sum(choice.num_tokens for choice in choices))
        for status, count in self.process.refused.items() if self.process.is_known else ():
            self.expect("requests_refused_total", count, str(status))

    def check_prompts(self, jobs: list):
        """Counted once all choices of a prompt have ended."""
        whole = []
        for job in jobs:
            n = job.request.n
            groups = [job.choices[i : i + n] for i in range(0, len(job.choices), n)]
            whole += [group for group in groups if all(choice.finish_reason for choice in group)]
        self.expect("request_params_n_sum", sum(len(group) for group in whole))
        self.expect("request_params_n_count", len(whole))
        longest = sum(max(choice.num_tokens for choice in group) for group in whole)
        self.expect("request_max_num_generation_tokens_sum", longest)
        limits = [group[0].request.max_tokens for group in whole if group[0].request.max_tokens]
        self.expect("request_params_max_tokens_sum", sum(limits))


class NotedJob(api.Job):
    """Its process keeps it."""

    def __init__(self, service, request, prompts, salt, id):
        super().__init__(service, request, prompts, salt, id)
        self.http_id = id
        asyncio.get_running_loop().process.jobs.append(self)


take_in = engine.take_in  # the real one


@contextlib.contextmanager
def stand_ins(world: World):
    """
    Time, chance, sockets and processes of the code under test are the world's, and limits are
    small.
    """
    settings, clock = world.settings, world.machine.clock
    chance = SimpleNamespace(randbits=world.rng.getrandbits)
    ids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{world.rng.getrandbits(128):032x}"))
    changes = {
        api: {
            "time": clock,
            "secrets": chance,
            "uuid": ids,
            "os": os_of_pipes,
            "log": world.log,
            "print": lambda *args, **options: None,
            "Connection": NumberedConnection,
            "Job": NotedJob,
            "PING_SECONDS": settings["ping_seconds"],
            "SCORES_IN_PLACE": settings["scores_in_place"],
            "MAX_LONG_ANSWERS": settings["max_long_answers"],
        },
        client: {
            "time": clock,
            "connect": lambda process: process.connect_to_engine(),
            "STALL_SECONDS": settings["stall_seconds"],
        },
        links: {"time": clock, "selectors": selectors_of_memory},
        connection: {"time": clock, "uuid": ids},
        engine: {"time": clock, "take_in": world.take_in},
        encoder: {"SHORT": settings["short"], "MAX_WAITING": settings["max_waiting"]},
        workers: {"os": os_of_pipes, "context": SimpleNamespace(Pipe=make_pipe)},
        prometheus_client.metrics: {"time": clock},
        uvicorn.server: {"time": clock, "HANDLED_SIGNALS": ()},
    }
    with contextlib.ExitStack() as stack:
        for module, values in changes.items():
            for name, value in values.items():
                stack.enter_context(mock.patch.object(module, name, value, create=True))
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        yield


# --------------------------------------------------------------------------------------------------
# From a seed to a run

CALLS = [
    "stream",
    "n",
    "stop",
    "echo",
    "scored_echo",
    "logprobs",
    "chat",
    "prompts",
    "salt",
    "priority",
    "seedless",
]
CALLS += ["ignore_eos", "usage", "long", "big", "chunked", "bad", "get", "tokenize"]
CLIENTS = ["burst", "slow", "vanish", "pieces", "half", "pipeline"]
FAULTS = [
    "kill_engine",
    "stall_engine",
    "cannot_load",
    "fail_step",
    "fail_encoder",
    "stop",
    "kill_worker",
    "freeze",
]


def draw(seed: int, steps: int) -> tuple[dict, list[dict]]:
    """The settings and the events of a seed."""
    rng = random.Random(seed)
    chosen = {name for name in CALLS + CLIENTS + FAULTS if rng.random() < 0.5}
    for name in ("stop", "kill_worker", "cannot_load"):  # after these little is left of a run
        if rng.random() < 0.5:
            chosen.discard(name)
    settings = draw_settings(rng, seed, chosen)
    events, t = [], rng.choice([0.01, 0.5, 1.0])
    for number in range(steps):
        event = draw_event(rng, number, settings, chosen)
        if (
            events and events[-1]["do"] == "kill_engine" and rng.random() < 0.3
        ):  # while it is started again
            event = {"do": "kill_engine"}
        if event["do"] != "call" or (
            "burst" in chosen and rng.random() < 0.7
        ):  # while the call before is in work
            t += rng.choice([0.0, 0.001, 0.01, 0.05, 0.15])
        else:
            t += rng.random() * 0.4
        events.append(event | {"t": round(t, 4)})
    return settings, events


def draw_settings(rng: random.Random, seed: int, chosen: set[str]) -> dict:
    block_size = rng.choice([2, 4, 8])
    return {
        "seed": seed,
        "workers": rng.choice([1, 1, 3]),
        "keys": rng.choice([0, 2]),
        "max_num_seqs": rng.randint(1, 4),
        "max_queue": rng.choice([0, 2, 8, 20]),
        "block_size": block_size,
        "num_blocks": rng.choice([96, 128, 192]) // block_size,
        "token_budget": rng.choice([4, 8, 64]),
        "overlap": rng.random() < 0.5,
        "start_seconds": rng.choice([0.0, 0.1]),
        "load_seconds": rng.choice([0.0, 0.3]),
        "step_seconds": rng.choice([0.001, 0.02, 0.05]),
        "encode_seconds": rng.choice([0.0, 0.01, 0.2]),
        "turn_seconds": rng.choice([0.0, 0.0, 0.0005, 0.002]),
        "request_seconds": rng.choice([2.0, 5.0, 60.0]),
        "client_seconds": rng.choice([1.0, 4.0]),
        "drain_seconds": rng.choice([0.0, 1.0, 5.0]),
        "ping_seconds": rng.choice([0.05, 10.0]),
        "stall_seconds": 1.0,
        "max_connections": rng.choice([4, 100, 100]),
        "short": rng.choice([20, 4096]),
        "max_waiting": rng.choice([120, 2**26]),
        "scores_in_place": rng.choice([5, 1000]),
        "max_long_answers": rng.choice([1, 4]),
        "tcp_room": rng.choice([1000, 2**16]),
        "tcp_piece": rng.choice([200, 2**18]),
        "link_room": rng.choice([100, 1000, 2**16]),
        "link_piece": rng.choice([50, 2**18]),
        "link_high": rng.choice([0, 2**16]),
    }


def draw_event(rng: random.Random, number: int, settings: dict, chosen: set[str]) -> dict:
    faults = [fault for fault in FAULTS if fault in chosen]
    if not faults or rng.random() > 0.15:
        return draw_visit(rng, number, settings, chosen)
    fault = rng.choice(faults)
    event = {"do": fault}
    if fault in ("kill_worker", "freeze"):
        event["worker"] = rng.randrange(settings["workers"])
        if fault == "kill_worker" and event["worker"] == 0 and rng.random() < 0.8:
            event["worker"] = settings["workers"] - 1
    if fault in ("stall_engine", "freeze"):
        event["seconds"] = rng.choice([0.05, 0.5, 3.0])
    if fault == "fail_step":
        event["where"] = rng.choice(["launch", "collect", "logits", "logits"])
    return event


def draw_visit(rng: random.Random, number: int, settings: dict, chosen: set[str]) -> dict:
    """A client's connection."""
    count = rng.randint(2, 4) if "pipeline" in chosen and rng.random() < 0.3 else 1
    calls = [draw_call(rng, 10 * number + i, settings, chosen) for i in range(count)]
    event = {"do": "call", "worker": rng.randrange(settings["workers"]), "calls": calls}
    if "pieces" in chosen and rng.random() < 0.4:
        event |= {"pieces": rng.randint(2, 6), "gap": rng.choice([0.001, 0.01, 0.4])}
    if "slow" in chosen and rng.random() < 0.3:
        sip, rest = rng.choice([(50, 0.02), (300, 0.1), (5000, 1.5)])
        event |= {"sip": sip, "rest": rest}
    if "half" in chosen and rng.random() < 0.2:
        event["half"] = True
    if "vanish" in chosen and rng.random() < 0.4:
        kind = rng.choice(["sent", "read", "seconds", "said"])
        amounts = {
            "sent": [1, 100, 250],
            "read": [1, 300, 1000],
            "said": ["finish_reason", '"stop"', "DONE"],
        }
        amounts["seconds"] = [0.001, 0.01, 0.1, 0.5, 1.0]
        event |= {
            "leaves": [kind, rng.choice(amounts[kind])],
            "how": rng.choice(["reset", "close"]),
        }
    return event


BAD = [
    {"path": "/v1/completions", "raw": "{", "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": 1}', "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": "a"}', "type": "text/plain", "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": "a\\u0000"}', "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": "a", "max_tokens": 100000}', "refused": 400},
    {"path": "/v1/completions", "raw": '{"prompt": "a", "model": "other"}', "refused": 404},
    {"path": "/nowhere", "refused": 404},
    {"path": "/tokenize", "refused": 405},
    {"path": "/v1/completions", "raw": '{"prompt": "a"}', "key": "wrong", "refused": 401},
]


def draw_call(rng: random.Random, id: int, settings: dict, chosen: set[str]) -> dict:
    key = rng.choice(KEYS[: settings["keys"]]) if settings["keys"] else None
    if "bad" in chosen and rng.random() < 0.15:
        bad = rng.choice(BAD[: None if settings["keys"] else -1])
        return {"id": id, "key": key} | bad
    if "get" in chosen and rng.random() < 0.2:
        path = rng.choice(["/metrics", "/health", "/livez", "/readyz", "/v1/models", "/"])
        return {"id": id, "key": key, "path": path}
    if "tokenize" in chosen and rng.random() < 0.1:
        return {"id": id, "key": key, "path": "/tokenize", "body": {"prompt": f"ab€~{id}"}}
    call = {"id": id, "key": key, "path": "/v1/completions", "body": draw_body(rng, id, chosen)}
    if "messages" in call["body"]:
        call["path"] = "/v1/chat/completions"
    if "chunked" in chosen and rng.random() < 0.3:
        call["chunked"] = True
    return call


def draw_body(rng: random.Random, id: int, chosen: set[str]) -> dict:
    """Of a completion. Every prompt ends with its call's number."""

    def text(place: int) -> str:
        start = rng.choice(["abcabcabcabc", "abcabc", "€", "bbbb"])
        return start * (3 if "long" in chosen and rng.random() < 0.3 else 1) + f"~{id}.{place}"

    def has(name: str, chance: float = 0.4) -> bool:
        return name in chosen and rng.random() < chance

    body: dict = {"max_tokens": rng.choice([16, 40] if "big" in chosen else [1, 4, 12])}
    if has("chat"):
        body["messages"] = [{"role": "user", "content": text(0)}]
    else:
        body["prompt"] = [text(i) for i in range(rng.randint(1, 3))] if has("prompts") else text(0)
    if not has("seedless"):
        body["seed"] = rng.randint(0, 99)
    if has("stream", 0.6):
        body["stream"] = True
        if has("usage"):
            body["stream_options"] = {"include_usage": True}
    if has("n"):
        body["n"] = rng.randint(1, 4)
    if has("stop"):
        body["stop"] = rng.choice([["a"], ["b ", "€"], ["ab", "bc", "abc"], ["ccc€"]])
    if has("ignore_eos"):
        body["ignore_eos"] = True
    if has("salt"):
        body["cache_salt"] = rng.choice(["x", "y"])
    if has("priority"):
        body["priority"] = rng.choice([-5, 5])
    if "prompt" in body and has("echo"):
        body["echo"] = True
        if has("scored_echo", 0.2):
            body["max_tokens"] = 0
    if has("logprobs"):
        body |= (
            {"logprobs": rng.choice([0, 2])}
            if "prompt" in body
            else {"logprobs": True, "top_logprobs": 2}
        )
    return body


def violation(settings: dict, events: list[dict]) -> str | None:
    """The rule that a run breaks, if it does."""
    try:
        World(settings, events).run()
    except Violation as found:
        return str(found)


def shrunk_trace(settings: dict, events: list[dict]) -> tuple[str, Path, int]:
    """
    Of a run that breaks a rule: what the few events break that are enough for it, their file, and
    their number.
    """
    events = shrink(events, lambda fewer: violation(settings, fewer) is not None)
    path = Path(f"simulator-http-{settings['seed']}.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in (settings, *events)))
    return violation(settings, events), path, len(events)


def read_trace(path: Path | str) -> tuple[dict, list[dict]]:
    settings, *events = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return settings, events


def campaign(seed: int, steps: int, minutes: float) -> bool:
    """One seed after the other, at least this one; whether none breaks a rule."""
    first = seed
    until = time.monotonic() + 60 * minutes
    seen: Counter = Counter()
    while seed == first or time.monotonic() < until:
        settings, events = draw(seed, steps)
        world = World(settings, events)
        try:
            world.run()
        except Violation as found:
            print(f"seed {seed}: {found}\nshrinking ..", flush=True)
            why, path, count = shrunk_trace(settings, events)
            print(
                f"{count} events are enough: {why}\npython -m tests.simulator_http --replay {path}"
            )
            return False
        seen["whole answers"] += world.counts_of["answers"]
        seen.update({str(name): count for name, count in world.seen.items()})
        seed += 1
    print(json.dumps({"seeds": [first, seed - 1], **seen}))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--steps", type=int, default=30, help="events of a run")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="one seed after the other for so long"
    )
    parser.add_argument("--replay", metavar="FILE", help="play a trace that a failure left")
    args = parser.parse_args()
    if args.replay:
        problem = violation(*read_trace(args.replay))
        print(problem or "it does not fail")
        return int(problem is not None)
    return int(not campaign(args.seed, args.steps, args.minutes))


if __name__ == "__main__":
    sys.exit(main())
