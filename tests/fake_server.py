"""
A server with a fake engine behind it, for all tests of the HTTP side that want real sockets: real
uvicorn, the real pipes and messages, and an engine that says what the test's prompt tells it to. So
these tests take milliseconds and know which token comes when. conftest.py has the fixtures;
wires.py is the same without sockets, on a clock of the test's own.
"""

import atexit
import contextlib
import functools
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

import serve
from engine.links import Links
from server import app as api
from server.client import EngineClient
from server.text import Encoder
from tokenizer import TextStream, TokenizerError
from training.corpus import bpe_tokenizer

ROOT = Path(__file__).parents[1]
EOS = 256
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HELLO = [{"role": "user", "content": "hello"}]


class ByteTokenizer:
    """
    A token a byte, so that every character beyond ASCII is split over tokens. It does not know the
    character \\0.
    """

    vocab_size, eos_token_id = 257, EOS
    has_known_pattern = True

    bos = ()

    def encode(self, text, allow_special=False, add_special_tokens=False):
        if "\0" in text:
            raise TokenizerError("character '\\x00' is not in the vocabulary")
        return list(text.encode("utf-8", "replace"))

    def token_bytes(self, token):
        return b"" if token == EOS else bytes([token])

    def spelled_bytes(self, token):
        return b"<end>" if token == EOS else bytes([token])

    def decode(self, ids, skip_special_tokens=True):
        spell = self.token_bytes if skip_special_tokens else self.spelled_bytes
        return b"".join(map(spell, ids)).decode("utf-8", "replace")

    def stream(self, context=(), skip_special_tokens=True, stop=()):
        spell = self.token_bytes if skip_special_tokens else self.spelled_bytes
        return TextStream(spell, stop)


def fake_score(token, n):
    """
    The likeliest token is the next one, and each of the others half as likely as the one before.
    """
    return [
        -2.0,
        [(token + i) % 257 for i in range(1, n + 1)],
        [-float(i) for i in range(1, n + 1)],
    ]


class FakeEngine(threading.Thread):
    """
    Speaks the engine's protocol over links. The prompt is the script: "say TEXT" answers the bytes
    of TEXT and the end of text, with scores that `fake_score` makes up if asked for; "say3 TEXT"
    three tokens a step; "loop" (and anything else) x after x; "invalid", "internal", "full" are
    refused; "break" fails after two tokens. Nothing moves while `gate` is closed.
    """

    def __init__(self, ready=True, max_model_len=100_000, pace=0.0005, successor=None, per_step=1):
        super().__init__(daemon=True)
        self.per_step = per_step  # tokens
        self.successor, self.max_num_seqs = successor, 256  # who comes after it dies
        self.links: Links | None = None  # set before it is started
        self.gate, self.ready, self.max_model_len, self.pace = (
            threading.Event(),
            ready,
            max_model_len,
            pace,
        )
        self.gate.set()
        self.running: dict[str, list] = {}  # id -> steps to come, each (tokens, finish_reason)
        self.added, self.aborted, self.died = [], [], False
        self.scores, self.prompt_scores = {}, {}
        self.owners: dict[str, tuple] = {}  # id -> its link, and the link's own id for it

    def say_ready(self):
        limits = {"max_model_len": self.max_model_len, "max_num_seqs": self.max_num_seqs}
        self.ready = {"op": "ready", **limits, "vocab_size": 257, "eos_token_ids": [EOS]}

    def run(self):
        if self.ready:
            self.say_ready()
        self.links.accept()
        while not self.died and self.links.is_wanted:
            if self.ready and not self.links.greeting:
                self.links.set_greeting(self.ready)
            moves = bool(self.running) and self.gate.is_set()
            for link, message in self.links.receive(timeout=0 if moves else 0.005):
                self.handle(link, message)
            if moves:
                time.sleep(self.pace)
                self.step()
            if moves or not self.running:  # one that hangs in a step says nothing
                self.links.flush(self.stats())
        self.links.close()

    def handle(self, link, message):
        if message["op"] == "add":
            self.added.append(message | {"link": link.number})
            for choice in range(message["options"]["n"]):
                id = f"{message['id']}.{choice}" if choice else message["id"]
                name = (
                    id if link.number == 0 else f"{link.number}:{id}"
                )  # in the tests that have one link, its own
                self.owners[name] = link, id
                self.add(
                    name, bytes(t for t in message["prompt"] if t < 256).decode(), message["params"]
                )
        elif message["op"] == "abort":
            name = message["id"] if link.number == 0 else f"{link.number}:{message['id']}"
            self.aborted.append(name)
            self.running.pop(name, None)
        elif message["op"] == "gone":
            for name in [name for name in self.running if self.owners[name][0] is link]:
                self.aborted.append(name)
                del self.running[name]

    def refuse(self, name, message, kind):
        link, id = self.owners[name]
        link.queue({"op": "error", "id": id, "message": message, "kind": kind})

    def add(self, id, prompt, params):
        command, _, text = prompt.partition(" ")
        limit, per_step = params["max_tokens"], 3 if command == "say3" else self.per_step
        tokens = [*text.encode(), EOS] if command.startswith("say") else [ord("x")] * limit
        if command in ("invalid", "internal", "full"):
            return self.refuse(id, f"the engine finds this {command}", command)
        stop = next(
            (i for i, t in enumerate(tokens, 1) if t in [EOS, *params["stop_token_ids"]]),
            len(tokens) + 1,
        )
        reason = "stop" if stop <= limit else "length"
        tokens = tokens[: min(stop, limit)]
        steps = [tokens[i : i + per_step] for i in range(0, len(tokens), per_step)]
        self.running[id] = [
            (step, reason if i == len(steps) else None) for i, step in enumerate(steps, 1)
        ]
        if command == "break":
            self.running[id][2:] = [("the step failed", "break")]
        n, scored = params["logprobs"], self.added[-1]["options"]["prompt_logprobs"]
        self.scores[id] = [
            None if n is None else [fake_score(token, n) for token in step] for step in steps
        ]
        self.prompt_scores[id] = (
            None
            if scored is None
            else [fake_score(t, scored) for t in self.added[-1]["prompt"][1:]]
        )

    def step(self):
        for id, steps in list(self.running.items()):
            tokens, reason = steps.pop(0)
            if reason == "break":
                self.refuse(id, tokens, "internal")
            else:
                scores = [self.scores[id].pop(0), self.prompt_scores.pop(id, None)]
                link, own = self.owners[id]
                link.queue_row([own, tokens, reason, len(self.added[-1]["prompt"]) // 2, *scores])
            if reason:
                del self.running[id]

    def stats(self):
        stats = dict.fromkeys(["kv_usage", "hits", "preemptions", "waiting"], 0)
        stats |= {"queries": sum(len(message["prompt"]) for message in self.added)}
        return stats | {
            "running": len(self.running),
            "at_work": len(self.running),
            "waited": [],
            "prefilled": [],
        }

    def die(self):
        """As a killed process would: all links are closed."""
        self.died = True
        self.join()


@functools.cache
def bytes_directory() -> str:
    """A directory whose tokens are bytes as well: what the encoder's thread opens."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    bpe_tokenizer([]).save(folder)
    return folder


class Server:
    """api.Service on a free port, in a thread."""

    def __init__(self, *flags, engine=None, send_buffer=None, directory=None, tokenizer=None):
        self.engine = engine or FakeEngine()
        self.args = args = serve.parse_args(
            ["--model", "fake", "--port", "0", "--no-access-log", *flags]
        )
        for fake in filter(None, (self.engine, self.engine.successor)):
            fake.max_num_seqs = args.max_num_seqs or fake.max_num_seqs
        self.sock = serve.listen(args)
        if send_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.address = self.sock.getsockname()
        self.engines = iter([self.engine, self.engine.successor])
        self.folder = tempfile.TemporaryDirectory()
        self.listener = serve.listen_for_links(self.folder.name)
        client = EngineClient(self.listener.getsockname(), self.start_engine)
        variables = args.default_chat_template_kwargs
        encoder = Encoder(directory or bytes_directory(), tokenizer or ByteTokenizer(), variables)
        self.service = api.Service(client, encoder, args, serve.api_keys(args))
        self.result = "still running"
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.http = httpx.Client(
            base_url="http://{}:{}".format(*self.address), timeout=30, verify=False
        )

    def start_engine(self):
        engine = next(self.engines)
        engine.links = Links(self.listener)
        if engine is not self.engine:
            engine.start()

    def run(self):
        self.result = serve.run_on_loop(self.service.run(self.sock))

    def __enter__(self):
        self.engine.start()
        self.thread.start()
        wait_until(lambda: self.get("/livez") == 200)
        if self.engine.ready:
            wait_until(lambda: self.get("/readyz") == 200)
        return self

    def __exit__(self, *exception):
        self.http.close()
        self.engine.gate.set()
        for _ in range(2):
            self.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.listener.close()
        self.folder.cleanup()

    def stop(self):
        """What the signal handler does on SIGTERM."""
        with contextlib.suppress(RuntimeError):  # its loop has ended already
            self.service.loop.call_soon_threadsafe(self.service.stop)

    def get(self, path):
        return self.http.get(path).status_code

    def post(self, prompt="say hi", **fields):
        return self.http.post(
            "/v1/completions", json={"prompt": prompt, "max_tokens": 1000} | fields
        )

    def answer(self, prompt="say hi", **fields):
        response = self.post(prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, prompt="say hi", **fields):
        """The events of a stream, parsed; the last one is "[DONE]" if all went well."""
        response = self.post(prompt, stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [
            line.removeprefix("data: ")
            for line in response.text.split("\n\n")
            if line.startswith("data: ")
        ]
        return [json.loads(event) if event != "[DONE]" else event for event in events]

    def connect(self, **body) -> socket.socket:
        """A raw connection that has sent its request, to be dropped or read slowly."""
        body = json.dumps(body)
        sock = socket.create_connection(self.address, timeout=30)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return sock


def wait_until(condition, seconds=30, pause=0.002):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


def text_of(events, index=0):
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def error_of(response):
    """The error of a response, after a check that it has OpenAI's shape and nothing else."""
    body = response.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]


def read_until(sock, end):
    data = b""
    while end not in data and (part := sock.recv(65536)):
        data += part
    return data


def ask(server, messages=HELLO, **fields):
    return server.http.post("/v1/chat/completions", json={"messages": messages} | fields)


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
