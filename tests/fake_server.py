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
    Speaks the engine's protocol over one link. The prompt is the script: "say TEXT" answers the
    bytes of TEXT and the end of text, with scores that `fake_score` makes up if asked for;
    "say3 TEXT" three tokens a step; "loop" (and anything else) x after x; "invalid", "internal",
    "full" are refused; "break" fails after two tokens.
    """

    def __init__(self, pace: float = 0.0005):
        super().__init__(daemon=True)
        self.pace = pace  # seconds from step to step
        self.max_num_seqs = 256
        self.links: Links | None = None  # set before it is started
        self.running: dict[str, list] = {}  # id -> steps to come, each (tokens, finish_reason)
        self.added: list[dict] = []
        self.scores: dict[str, list] = {}
        self.prompt_scores: dict[str, list | None] = {}

    def run(self):
        limits = {"max_model_len": 100_000, "max_num_seqs": self.max_num_seqs}
        self.links.accept()
        self.links.set_greeting(
            {"op": "ready", **limits, "vocab_size": 257, "eos_token_ids": [EOS]}
        )
        while self.links.is_wanted:
            for link, message in self.links.receive(timeout=0 if self.running else 0.005):
                self.handle(link, message)
            if self.running:
                time.sleep(self.pace)
                self.step()
            self.links.flush(self.stats())
        self.links.close()

    def handle(self, link, message):
        if message["op"] == "add":
            self.added.append(message)
            for choice in range(message["options"]["n"]):
                self.add(f"{message['id']}.{choice}" if choice else message["id"], message)
        elif message["op"] == "abort":
            self.running.pop(message["id"], None)

    def refuse(self, id, message, kind):
        self.links.links[0].queue({"op": "error", "id": id, "message": message, "kind": kind})

    def add(self, id, message):
        params = message["params"]
        command, _, text = bytes(t for t in message["prompt"] if t < 256).decode().partition(" ")
        if command in ("invalid", "internal", "full"):
            return self.refuse(id, f"the engine finds this {command}", command)
        limit = params["max_tokens"]
        tokens = [*text.encode(), EOS] if command.startswith("say") else [ord("x")] * limit
        ends = [i for i, t in enumerate(tokens, 1) if t in [EOS, *params["stop_token_ids"]]]
        stop = min([*ends, limit + 1])
        tokens = tokens[: min(stop, limit)]
        per_step = 3 if command == "say3" else 1
        parts = [tokens[i : i + per_step] for i in range(0, len(tokens), per_step)]
        self.running[id] = [(part, None) for part in parts]
        self.running[id][-1] = (parts[-1], "stop" if stop <= limit else "length")
        if command == "break":
            self.running[id][2:] = [("the step failed", "break")]
        n, scored = params["logprobs"], message["options"]["prompt_logprobs"]
        self.scores[id] = [n if n is None else [fake_score(t, n) for t in part] for part in parts]
        if scored is not None:
            self.prompt_scores[id] = [fake_score(t, scored) for t in message["prompt"][1:]]

    def step(self):
        cached = len(self.added[-1]["prompt"]) // 2
        for id, steps in list(self.running.items()):
            tokens, reason = steps.pop(0)
            if reason == "break":
                self.refuse(id, tokens, "internal")
            else:
                scores = [self.scores[id].pop(0), self.prompt_scores.pop(id, None)]
                self.links.links[0].queue_row([id, tokens, reason, cached, *scores])
            if reason:
                del self.running[id]

    def stats(self):
        stats = dict.fromkeys(["kv_usage", "hits", "preemptions", "waiting", "queries"], 0)
        running = len(self.running)
        return stats | {"running": running, "at_work": running, "waited": [], "prefilled": []}


@functools.cache
def bytes_directory() -> str:
    """A directory whose tokens are bytes as well: what the encoder's thread opens."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    bpe_tokenizer([]).save(folder)
    return folder


class Server:
    """api.Service on a free port, in a thread."""

    def __init__(self, *flags, engine=None, directory=None, tokenizer=None):
        self.engine = engine or FakeEngine()
        self.args = args = serve.parse_args(
            ["--model", "fake", "--port", "0", "--no-access-log", *flags]
        )
        self.engine.max_num_seqs = args.max_num_seqs or self.engine.max_num_seqs
        self.sock = serve.listen(args)
        self.address = self.sock.getsockname()
        self.folder = tempfile.TemporaryDirectory()
        self.listener = serve.listen_for_links(self.folder.name)
        self.engine.links = Links(self.listener)
        variables = args.default_chat_template_kwargs
        encoder = Encoder(directory or bytes_directory(), tokenizer or ByteTokenizer(), variables)
        client = EngineClient(self.listener.getsockname())
        self.service = api.Service(client, encoder, args, serve.api_keys(args))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.http = httpx.Client(
            base_url="http://{}:{}".format(*self.address), timeout=30, verify=False
        )

    def run(self):
        serve.run_on_loop(self.service.run(self.sock))

    def __enter__(self):
        self.engine.start()
        self.thread.start()
        wait_until(lambda: self.get("/livez") == 200)
        wait_until(lambda: self.get("/readyz") == 200)
        return self

    def __exit__(self, *exception):
        self.http.close()
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
