"""
The HTTP side on a clock that the tests turn: no sockets, no threads, no sleeping, no engine.

    with House("--max-queue", "2") as house:
        caller = house.call("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 3})
        house.engine.step({"0": b"xyz"}, "length")
        assert caller.answer().status == 200
        house.clock.run(30)                    # seconds, at once

Connections, gate, jobs and the engine's client are the real ones. A test has the other ends of
their wires: it says byte by byte what a client sends, and message by message what the engine does,
and knows at what time what happened. For whole random runs, with the real scheduler, see
simulator_http.py.
"""

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import uvicorn
from fake_server import EOS, ByteTokenizer, bytes_directory
from uvicorn.server import ServerState
from virtual import Loop, Machine

import serve
from engine.links import to_line
from server import answers, gate, metrics
from server import app as api
from server import client as client_module
from server.client import EngineClient
from server.connection import Connection
from server.text import Encoder
from server.workers import WorkerSlot


class Clock(Loop):
    """The event loop of virtual.py, whose time passes only in `run`."""

    def __init__(self):
        super().__init__(Machine())
        self.machine.loops.append(self)
        self.failures = self.errors  # exceptions that nobody caught

    @property
    def now(self) -> float:
        return self.clock.now

    @now.setter
    def now(self, seconds: float):
        self.clock.now = seconds

    def settle(self):
        """Do all that is ready, and what becomes ready by that."""
        while self.due() <= self.now:  # a callback may turn the clock
            self.machine.run(self.now)

    def run(self, seconds: float):
        """Have so much time pass; each timer finds the clock at its own time."""
        self.machine.run(self.now + seconds)

    async def create_unix_connection(self, factory, sock):
        """The other end of an engine's link belongs to the test: `sock` is a Wire."""
        sock.join(factory())


class Wire(asyncio.Transport):
    """
    A transport that keeps what is written, for the test to read, and notes how and when it was
    closed.
    """

    def __init__(self, clock: Clock):
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 8000)})
        self.clock = clock
        self.written = bytearray()
        self.closed: str | None = None  # close or abort
        self.closed_at: float | None = None
        self.is_reading = True
        self.limits: dict = {}

    def join(self, protocol):
        self.protocol = protocol
        protocol.connection_made(self)

    def write(self, data: bytes):
        if not self.closed:
            self.written += data

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def set_write_buffer_limits(self, high=None, low=None):
        self.limits = {"high": high, "low": low}

    def is_closing(self) -> bool:
        return self.closed is not None

    def close(self):
        self._end("close")

    def abort(self):
        self._end("abort")

    def _end(self, how: str):
        if not self.closed:
            self.closed = how
            self.closed_at = self.clock.now
            self.clock.call_soon(self.protocol.connection_lost, None)


class Answer(NamedTuple):
    status: int | None  # None: not even a head has come
    headers: dict[str, str]
    body: str
    whole: bool  # all of it has come

    @property
    def json(self):
        """None: it is no JSON."""
        is_json = self.headers.get("content-type") == "application/json" and self.body
        return json.loads(self.body) if is_json else None


def read_answers(data: bytes, method: str = "GET") -> list[Answer]:
    """What a server has sent, up to where it breaks off."""
    answers = []
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        if not separator:
            answers.append(Answer(None, {}, "", False))
            break
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        if status == 100:
            continue
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        if method == "HEAD":
            body, whole = b"", True
        elif headers.get("transfer-encoding") == "chunked":
            body, data, whole = unchunked(data)
        else:
            size = int(headers["content-length"])
            body, data, whole = data[:size], data[size:], len(data) >= size
        answers.append(Answer(status, headers, body.decode(errors="ignore"), whole))
    return answers


def unchunked(data: bytes) -> tuple[bytes, bytes, bool]:
    """A chunked body, what comes after it, and whether its end has come."""
    body = b""
    while True:
        size, separator, rest = data.partition(b"\r\n")
        length = int(size, 16) if separator else 0
        if not separator or len(rest) < length + 2:
            return body, b"", False
        body += rest[:length]
        data = rest[length + 2 :]
        if length == 0:
            return body, data, True


class Caller:
    """A client of the server, and its connection."""

    def __init__(self, house: "House"):
        self.house = house
        self.clock = house.clock
        self.began = self.clock.now
        self.wire = Wire(self.clock)
        protocol = Connection(
            config=house.config, server_state=house.state, app_state={}, _loop=self.clock
        )
        self.do(self.wire.join, protocol)

    def do(self, call, *args):
        """Have the event loop call it, and all that follows."""
        self.clock.call_soon(call, *args)
        self.clock.settle()

    def send(self, data: bytes):
        if not self.wire.closed:
            self.do(self.wire.protocol.data_received, data)

    def hang_up(self):
        self.do(self.wire.abort)

    def end_side(self):
        """It sends no more."""
        self.do(self.wire.protocol.eof_received)

    def stop_reading(self):
        """What it was sent fills the system's buffers: asyncio says so."""
        self.do(self.wire.protocol.pause_writing)

    def read_on(self):
        self.do(self.wire.protocol.resume_writing)

    @property
    def said(self) -> str:
        """All that the server said."""
        return self.wire.written.decode("latin-1")

    @property
    def closed(self) -> tuple[str | None, float | None]:
        """How the server closed the connection, and after how many seconds."""
        at = self.wire.closed_at
        return self.wire.closed, None if at is None else pytest.approx(at - self.began)

    def answers(self, method: str = "GET") -> list[Answer]:
        answers = read_answers(bytes(self.wire.written), method)
        assert all(answer.whole for answer in answers)
        return answers

    def answer(self, method: str = "GET") -> Answer:
        (only,) = self.answers(method)
        return only

    @property
    def events(self) -> list:
        """Those of the stream so far, parsed; the last one is "[DONE]" if it came to its end."""
        lines = [text for text in self.said.split("\n") if text.startswith("data: ")]
        texts = [text.removeprefix("data: ").strip() for text in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


class Engine:
    """The engine, as the client sees it: the test reads what it heard and speaks for it."""

    def __init__(self, house: "House", wire: Wire):
        self.house = house
        self.wire = wire
        self.stats = {
            "running": 0,
            "waiting": 0,
            "kv_usage": 0.0,
            "queries": 0,
            "hits": 0,
            "preemptions": 0,
        }
        self.stats |= {"at_work": 0, "waited": [], "prefilled": []}

    @property
    def heard(self) -> list[dict]:
        return [json.loads(text) for text in self.wire.written.splitlines()]

    def of(self, op: str) -> list[dict]:
        return [message for message in self.heard if message["op"] == op]

    def say(self, *messages: dict):
        """In one round."""
        self.house.clock.call_soon(
            self.wire.protocol.data_received, b"".join(map(to_line, messages))
        )
        self.house.clock.settle()

    def ready(self, max_model_len: int = 1000):
        limits = {
            "max_model_len": max_model_len,
            "max_num_seqs": self.house.args.max_num_seqs or 256,
        }
        self.say({"op": "ready", **limits, "vocab_size": 257, "eos_token_ids": [EOS]})

    def step(
        self,
        tokens: dict[str, bytes] | None = None,
        finish: str | None = None,
        cached: int = 0,
        **stats,
    ):
        """
        A step that brings each request these bytes, or lists of token ids; `finish` is of all of
        them.
        """
        rows = [[id, list(data), finish, cached, None, None] for id, data in (tokens or {}).items()]
        self.say({"op": "step", "out": rows, "stats": self.stats | stats})

    def die(self):
        """Its end of the link is closed."""
        self.wire.close()
        self.house.clock.settle()


class House:
    """A server whose clients and whose engine the test plays."""

    def __init__(
        self,
        *flags: str,
        keys=(),
        ready: bool = True,
        slot: WorkerSlot | None = None,
        directory=None,
    ):
        self.args = serve.parse_args(["--model", "fake", "--no-access-log", *flags])
        self.clock = Clock()
        self.is_ready = ready
        self.engines: list[Engine] = []
        self.patches = pytest.MonkeyPatch()
        self.patch_clocks()
        link = EngineClient("nowhere", lambda: None)
        self.encoder = Encoder(directory or bytes_directory(), ByteTokenizer())
        self.service = api.Service(link, self.encoder, self.args, list(keys), slot=slot)
        self.config = uvicorn.Config(gate.Gate(self.service), log_level="critical", ws="none")
        self.config.load()
        self.state = ServerState()
        self.service.server = SimpleNamespace(should_exit=False, server_state=self.state)
        self.service.sock = SimpleNamespace(
            getsockname=lambda: ("127.0.0.1", 8000), family=socket.AF_INET
        )
        self.service.loop = self.clock

    def patch_clocks(self):
        for module in (answers, api, client_module, gate, metrics):
            self.patches.setattr(module, "time", self.clock.clock)
        self.patches.setattr(client_module, "connect", self.connect_engine)

    def connect_engine(self, path: str) -> Wire:
        self.engines.append(Engine(self, Wire(self.clock)))
        return self.engines[-1].wire

    @property
    def engine(self) -> Engine:
        """The one there is now."""
        return self.engines[-1]

    def __enter__(self) -> "House":
        self.clock.run_until_complete(self.service.client.attach())
        if self.is_ready:
            self.engine.ready()
        return self

    def __exit__(self, *exception):
        for held in list(self.state.connections):
            held.transport.abort()
        self.clock.settle()
        for task in asyncio.all_tasks(self.clock):
            task.cancel()
        self.clock.settle()
        self.encoder.close()
        self.clock.close()
        self.patches.undo()
        assert not self.clock.failures, self.clock.failures

    def connect(self) -> Caller:
        return Caller(self)

    def call(
        self, method: str, path: str, body: dict | bytes | None = None, **headers: str
    ) -> Caller:
        """A connection that has sent this request. Names of headers are written with _ for -."""
        caller = self.connect()
        caller.send(request(method, path, body, **headers))
        return caller

    def ask(self, prompt="ab", **fields) -> Caller:
        return self.call("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 4} | fields)

    def get(self, path: str, **headers: str) -> Answer:
        caller = self.call("GET", path, **headers)
        answer = caller.answer()
        caller.hang_up()
        return answer

    @property
    def choices(self) -> dict:
        """What waits for the engine, by id."""
        return self.service.client.choices


def request(method: str, path: str, body: dict | bytes | None = None, **headers: str) -> bytes:
    """As it goes over the wire."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
    given = {"Host": "localhost"}
    if data:
        given |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in given.items() if value is not None),
    ]
    return "\r\n".join([*lines, "\r\n"]).encode() + data
