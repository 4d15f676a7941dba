"""
The HTTP side on a clock that the tests control: no sockets, no threads, no sleeping, no engine.

    with House("--max-queue", "2") as house:
        caller = house.call("/v1/completions", {"prompt": "ab", "max_tokens": 3})
        house.engine.step(b"xyz", "length")
        assert caller.status == 200
        house.clock.run(30)                    # seconds, which take no time

Connections, gate, jobs and the engine's client are the real ones. A test has the other ends of
their wires: it decides byte by byte what a client sends, and message by message what the engine
does, and it knows when everything happened. simulator_http.py has whole random runs, with the real
scheduler.
"""

import atexit
import functools
import json
import shutil
import tempfile
from types import SimpleNamespace
from typing import NamedTuple

import h11
import pytest
import uvicorn
from uvicorn.server import ServerState
from virtual import Listener, Loop, Socket, Transport, pair

import serve
from engine.link import to_line
from engine.stages import STAGES
from server import answers, gate, metrics
from server import app as api
from server import client as client_module
from server.client import EngineClient
from server.connection import Connection
from server.text import Encoder
from training.corpus import bpe_tokenizer

EOS = 256
HELLO = [{"role": "user", "content": "hello"}]
TIMED = (answers, api, client_module, gate, metrics)  # modules that ask for the time


# --------------------------------------------------------------------------------------------------
# Clients


class Answer(NamedTuple):
    status: int | None  # None: not even a head has come
    headers: dict[str, str]
    body: str
    whole: bool  # all of it has come

    @property
    def json(self):
        """Return the parsed body, or None if it is not JSON."""
        is_json = self.headers.get("content-type") == "application/json" and self.body
        return json.loads(self.body) if is_json else None

    @property
    def error(self) -> dict:
        """Return the error, after checking that it has OpenAI's shape and nothing else."""
        assert list(self.json) == ["error"]
        assert list(self.json["error"]) == ["message", "type", "param", "code"]
        return self.json["error"]

    @property
    def refusal(self) -> tuple:
        """
        Return status, code and message of a refusal, which says when to retry if that may help.
        """
        assert ("retry-after" in self.headers) == (self.status in (429, 503))
        return self.status, self.error["code"], self.error["message"]


def read_answers(data: bytes, method="GET") -> list[Answer]:
    """Return the answers that a server has sent; the last may be incomplete."""
    answers = []
    while data:
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method=method, target="/", headers={"Host": "localhost"}.items()))
        reader.send(h11.EndOfMessage())
        reader.receive_data(data)
        answer = Answer(None, {}, "", False)
        body = b""
        while not answer.whole and isinstance(event := reader.next_event(), h11.Event):
            if isinstance(event, h11.Response):
                headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                answer = answer._replace(status=event.status_code, headers=headers)
            body += getattr(event, "data", b"")
            answer = answer._replace(whole=isinstance(event, h11.EndOfMessage))
        answers.append(answer._replace(body=body.decode(errors="ignore")))
        data = reader.trailing_data[0] if answer.whole else b""
    return answers


def request(
    path: str, body: dict | bytes | None = None, method: str | None = None, **headers: str
) -> bytes:
    """
    Return a request as it goes over the wire. With a body it is a POST. Names of headers are
    written with _ instead of -.
    """
    method = method or ("POST" if body else "GET")
    data = json.dumps(body).encode() if isinstance(body, dict) else body or b""
    lines = {"Host": "localhost"}
    if data:
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = [f"{name}: {value}\r\n" for name, value in lines.items() if value is not None]
    text = f"{method} {path} HTTP/1.1\r\n{''.join(head)}\r\n"
    return text.encode(errors="surrogateescape") + data


ASK = request("/v1/completions", {"prompt": "ab", "max_tokens": 4})


class Client:
    """A client of the server: its end of a connection. It reads immediately what comes."""

    def __init__(self, loop: Loop, sock: Socket):
        self.clock = loop
        self.sock = sock
        self.began = loop.now
        self.ended_at: float | None = None
        self.received = b""
        sock.on_change = lambda: loop.call_soon(self.look)

    def look(self):
        while self.read(2**18):
            pass

    def read(self, size: int) -> bool:
        """Read some bytes, and return True if there may be more."""
        if self.ended_at is not None:
            return False
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self.finish()
        self.received += data
        return bool(data)

    def finish(self):
        self.ended_at = self.clock.now
        self.sock.close()


class Caller(Client):
    """A client that the test controls; everything it does is immediately carried out."""

    def __init__(self, house: "House"):
        sock, theirs = pair()
        super().__init__(house.clock, sock)
        self.method = "GET"  # or HEAD, whose answer has no body
        protocol = Connection(house.config, house.state, {}, house.clock)
        self.wire = Transport(house.clock, theirs, protocol)
        self.clock.settle()

    def send(self, data: bytes):
        self.method = "HEAD" if data.startswith(b"HEAD ") else self.method
        if self.ended_at is None:
            self.sock.send(data)
            self.clock.settle()

    def hang_up(self):
        self.finish()
        self.clock.settle()

    def reset(self):
        self.sock.peer.reset()
        self.hang_up()

    def stop_reading(self):
        """Stop reading. Data that arrives from now on fills the system's buffers."""
        self.sock.room = 0

    def read_on(self):
        self.sock.room = 2**30
        self.sock.peer.on_change()
        self.clock.settle()

    @property
    def said(self) -> str:
        """Return everything that the server sent."""
        return self.received.decode("latin-1")

    @property
    def closed(self) -> tuple[str | None, float | None]:
        """Return how the server closed the connection, and after how many seconds."""
        at = self.wire.closed_at
        return self.wire.closed, None if at is None else pytest.approx(at - self.began)

    @property
    def answers(self) -> list[Answer]:
        answers = read_answers(self.received, self.method)
        assert all(answer.whole for answer in answers)
        return answers

    @property
    def answer(self) -> Answer:
        (only,) = self.answers
        return only

    @property
    def status(self) -> int | None:
        return self.answer.status

    @property
    def json(self):
        return self.answer.json

    @property
    def choice(self) -> dict:
        (only,) = self.json["choices"]
        return only

    @property
    def refusal(self) -> tuple:
        return self.answer.refusal

    @property
    def events(self) -> list:
        """
        Return the events of the stream so far, parsed. The last is "[DONE]" if the stream has
        ended.
        """
        lines = [text for text in self.said.split("\n") if text.startswith("data: ")]
        texts = [text.removeprefix("data: ").strip() for text in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


# --------------------------------------------------------------------------------------------------
# The engine


class Engine:
    """The engine, as the client sees it: the test reads what it received and speaks for it."""

    def __init__(self, house: "House"):
        self.house = house
        self.sock, self.link = pair(hard=False)
        self.received = b""
        self.stats = dict.fromkeys(["running", "waiting", "kv_usage", "queries", "hits"], 0)
        self.stats |= {"preemptions": 0, "guessed": 0, "right": 0, "waited": [], "prefilled": []}

    @property
    def heard(self) -> list[dict]:
        self.received += bytes(self.sock.arrived)
        self.sock.arrived.clear()
        return [json.loads(text) for text in self.received.splitlines()]

    def of(self, op: str) -> list[dict]:
        return [message for message in self.heard if message["op"] == op]

    @property
    def added(self) -> dict:
        """Return the last request that it was sent."""
        return self.of("add")[-1]

    def send(self, data: bytes):
        self.sock.send(data)
        self.house.clock.settle()

    def say(self, *messages: dict):
        """Send messages in one round."""
        self.send(b"".join(map(to_line, messages)))

    def ready(self, max_model_len: int | None = None):
        vocab_size = self.house.encoder.tokenizer.vocab_size
        limits = {"vocab_size": vocab_size, "eos_token_ids": [EOS], "stages": [*STAGES]}
        limits["max_model_len"] = max_model_len or self.house.max_model_len
        max_num_seqs = self.house.args.max_num_seqs or 256
        self.say({"op": "ready", "max_num_seqs": max_num_seqs, **limits})

    def step(
        self,
        tokens: dict[str, bytes] | bytes | list[int] | None = None,
        finish: str | None = None,
        cached: int = 0,
        **stats,
    ):
        """
        Send a step that brings each request these bytes, or lists of token ids; without ids, bring
        them to all that wait for the engine. `finish` applies to all of them.
        """
        if isinstance(tokens, bytes | list):
            tokens = dict.fromkeys(self.house.choices, tokens)
        rows = [[id, list(data), finish, cached, None, None] for id, data in (tokens or {}).items()]
        self.say({"op": "step", "out": rows, "stats": self.stats | stats})

    def steps(self, tokens: list[int], size: int, finish: str):
        """Send steps that bring this many tokens each, until all have come."""
        for start in range(0, len(tokens), size):
            is_last = start + size >= len(tokens)
            self.step(tokens[start : start + size], finish if is_last else None)

    def fail(self, message="no", id: str | None = None, kind: str = "invalid", **more):
        """Send an error for this request, or else for the last one that it was sent."""
        error = {"op": "error", "id": id or self.added["id"], "message": message, "kind": kind}
        self.say(error | more)

    def die(self):
        """Close its end of the link."""
        self.sock.close()
        self.house.clock.settle()


# --------------------------------------------------------------------------------------------------
# The server


@functools.cache
def bytes_directory() -> str:
    """
    Return a directory with only a tokenizer: one token per byte, so that every character beyond
    ASCII is split over several tokens.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    bpe_tokenizer([]).save(folder)
    return folder


class House:
    """A server whose clients and engine are played by the test."""

    max_model_len = 1000

    def __init__(
        self,
        *flags: str,
        keys=(),
        ready: bool = True,
        directory=None,
    ):
        self.args = serve.parse_args(["--model", "fake", "--no-access-log", *flags])
        self.clock = Loop()
        self.is_ready = ready
        self.engines: list[Engine] = []
        self.patches = pytest.MonkeyPatch()
        for module in TIMED:
            self.patches.setattr(module, "time", self.clock.clock)
        variables = self.args.default_chat_template_kwargs
        self.encoder = Encoder(directory or bytes_directory(), variables)
        client = EngineClient(self.start_engine)
        self.service = api.Service(client, self.encoder, self.args, list(keys))
        self.config = uvicorn.Config(gate.Gate(self.service), log_level="critical", ws="none")
        self.config.load()
        self.state = ServerState()
        self.service.server = SimpleNamespace(should_exit=False, server_state=self.state)
        self.service.sock = Listener(pair)
        self.service.loop = self.clock

    def start_engine(self) -> tuple[None, Socket]:
        self.engines.append(Engine(self))
        return None, self.engine.link

    @property
    def engine(self) -> Engine:
        """Return the current engine."""
        return self.engines[-1]

    def __enter__(self) -> "House":
        self.clock.run_until_complete(self.service.client.attach())
        if self.is_ready:
            self.engine.ready()
        return self

    def __exit__(self, *exception):
        for connection in list(self.state.connections):
            connection.transport.abort()
        self.clock.settle()
        self.clock.end_tasks()
        self.encoder.close()
        self.clock.close()
        self.patches.undo()
        assert not self.clock.errors, self.clock.errors

    def connect(self) -> Caller:
        return Caller(self)

    def call(self, *call, **headers: str) -> Caller:
        """Return a connection that has sent this `request`."""
        caller = self.connect()
        caller.send(request(*call, **headers))
        return caller

    def ask(self, prompt="ab", **fields) -> Caller:
        return self.call("/v1/completions", {"prompt": prompt, "max_tokens": 4} | fields)

    def get(self, path: str, **headers: str) -> Answer:
        caller = self.call(path, **headers)
        answer = caller.answer
        caller.hang_up()
        return answer

    @property
    def choices(self) -> dict:
        """Return the choices that wait for the engine, by id."""
        return self.service.client.choices
