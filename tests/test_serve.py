"""
The HTTP side with a fake engine behind it: real sockets, real uvicorn, the real pipes and messages,
and an engine that says what the test's prompt tells it to. So every test here takes milliseconds
and knows which token comes when.
"""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import httpx
import pytest
import uvicorn.server
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

import serve
from serving import api, encoder, load, welcome
from serving import client as client_module
from serving.client import EngineClient
from serving.encoder import Encoder
from serving.links import Links, line
from serving.protocol import ApiError, Choice, CompletionRequest
from tokenizer import TextStream, TokenizerError, bpe_tokenizer

ROOT = Path(__file__).parents[1]
EOS = 256


class ByteTokenizer:
    """
    A token a byte, so that every character beyond ASCII is split over tokens. It does not know the
    character \\0.
    """

    vocab_size, eos_token_id = 257, EOS
    has_known_pattern = True

    def encode(self, text, allow_special=False):
        if "\0" in text:
            raise TokenizerError("character '\\x00' is not in the vocabulary")
        return list(text.encode("utf-8", "replace"))

    def token_bytes(self, token):
        return b"" if token == EOS else bytes([token])

    def spelled_bytes(self, token):
        return b"<end>" if token == EOS else bytes([token])


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
                self.links.greet(self.ready)
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
        link.put({"op": "error", "id": id, "message": message, "kind": kind})

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
                link.put_row([own, tokens, reason, len(self.added[-1]["prompt"]) // 2, *scores])
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
    """A directory whose tokens are bytes as well: what the encoding process opens."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    bpe_tokenizer([]).save(folder)
    return folder


class Server:
    """api.Service on a free port, in a thread."""

    def __init__(self, *flags, engine=None, send_buffer=None, directory=None):
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
        self.listener = serve.listen_to_http(self.folder.name)
        client = EngineClient(self.listener.getsockname(), self.start_engine)
        encoder = Encoder(directory or bytes_directory(), ByteTokenizer())
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


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def text_of(events, index=0):
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def error_of(response):
    """The error of a response, after a check that it has OpenAI's shape and nothing else."""
    body = response.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]


@pytest.fixture(scope="module", autouse=True)
def uvicorn_ends_soon():
    """
    It looks every 0.1 s whether it is to end, and then waits as long again: 5 s for all servers of
    this file.
    """
    quick = SimpleNamespace(
        **vars(asyncio) | {"sleep": lambda seconds: asyncio.sleep(seconds / 20)}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", quick)
        yield


@pytest.fixture(scope="module")
def server():
    with Server("--max-num-seqs", "8", "--max-queue", "8", "--max-body-mib", "0.1") as server:
        yield server
    assert not server.service.client.choices, "some test left a request behind"


# --------------------------------------------------------------------------------------------------
# Tokens to text


def naive_stop(text, stops):
    """
    Where the text ends if read a character at a time: (start, end, stop) of the first stop string
    to be complete.
    """
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), end, stop
    return len(text), len(text), None


def certain(text, stops):
    """
    What of a text without stop strings can be shown already: all but the longest end that may
    become one.
    """
    return next(
        text[:i]
        for i in range(len(text) + 1)
        if i == len(text) or any(s.startswith(text[i:]) for s in stops)
    )


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab€", max_size=14),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=8),
    cuts=st.sets(st.integers(1, 40)),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_tokens(text, stops, cuts, include):
    """
    However the bytes of a text are cut into tokens, through characters too, it ends where the plain
    text does; each token releases exactly what is certain by then, and the token that completes the
    stop string is the last taken.
    """
    data = text.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    tokens = [data[a:b] for a, b in pairwise(edges)]
    start, end, stop = naive_stop(text, stops)
    stream, shown, read = TextStream(tokens.__getitem__, stops, include), "", b""
    for number, token in enumerate(tokens):
        shown, read = shown + stream.push(number), read + token
        so_far = read.decode("utf-8", "ignore")
        if stream.matched is not None:
            assert (
                len(so_far) >= end
                and len(b"".join(tokens[:number]).decode("utf-8", "ignore")) < end
            )
            break
        assert shown == certain(so_far, stops)
    else:
        shown += stream.flush()
    assert (shown, stream.matched) == (text[: end if include else start], stop)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=3)))
def test_any_bytes_become_text(tokens):
    """
    A model may utter bytes that are no UTF-8: the pieces then still join to what decoding all at
    once gives.
    """
    stream = TextStream(tokens.__getitem__)
    pieces = [stream.push(i) for i in range(len(tokens))]
    assert "".join(pieces) + stream.flush() == b"".join(tokens).decode("utf-8", "replace")


# --------------------------------------------------------------------------------------------------
# Answers


def test_whole_answer_has_exactly_these_fields(server):
    answer = server.answer("say hello", model="fake")
    assert answer.pop("id").startswith("cmpl-") and abs(answer.pop("created") - time.time()) < 60
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 6,  # the end of text is a token too
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_stream_says_the_same_in_pieces(server):
    events = server.stream("say hello", stream_options={"include_usage": True})
    assert (
        events[-1] == "[DONE]"
        and len({(event["id"], event["created"]) for event in events[:-1]}) == 1
    )
    assert text_of(events) == "hello"
    *chunks, last = events[:-1]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (
        len(chunks) - 1
    ) + ["stop"]
    assert last["choices"] == [] and last["usage"] == server.answer("say hello")["usage"]


def test_stream_without_usage_never_mentions_it(server):
    assert all("usage" not in event for event in server.stream() if event != "[DONE]")
    alone = server.stream(
        stream_options={"continuous_usage_stats": True}
    )  # means nothing alone, as in vLLM
    assert all("usage" not in event for event in alone if event != "[DONE]")


def test_usage_in_every_chunk(server):
    """
    guidellm counts tokens by it; every request of it was refused. Each chunk has that of its own
    choice.
    """
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = server.stream(["say one", "say three"], stream_options=options)
    for index, (prompt_tokens, count) in enumerate([(7, 4), (9, 6)]):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(set(counts)) and counts[-1] == count  # more with each chunk
        assert all(usage["prompt_tokens"] == prompt_tokens for usage in usages)
        assert all(
            usage["total_tokens"] == prompt_tokens + usage["completion_tokens"] for usage in usages
        )
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10 and done == "[DONE]"


def test_parameters_reach_the_engine(server):
    fields = {
        "temperature": 0.0,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 7,
        "stop_token_ids": [1],
        "ignore_eos": True,
    }
    fields |= {
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
    }
    fields |= {"allowed_token_ids": [3], "logprobs": 4, "logit_bias": {"5": 1.5}}
    server.post(**fields, top_k=-1, n=2, prompt_logprobs=6, priority=-7, cache_salt="s")
    added = server.engine.added[-1]
    assert added["params"] == fields | {"top_k": 0, "max_tokens": 1000}
    assert added["options"] == {"n": 2, "priority": -7, "cache_salt": ":s", "prompt_logprobs": 6}


def test_finish_reason_length(server):
    answer = server.answer("say hello", max_tokens=2)
    assert (
        answer["choices"][0]["finish_reason"] == "length" and answer["choices"][0]["text"] == "he"
    )


@pytest.mark.parametrize("include, text", [(False, "a"), (True, "ab")])
def test_stop_token_id_ends_the_text(server, include, text):
    """vLLM's meaning: stop_reason is the id, and its text is left out unless asked for."""
    choice = server.answer(
        "say abc", stop_token_ids=[ord("b")], include_stop_str_in_output=include
    )["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        text,
        "stop",
        ord("b"),
    )


@pytest.mark.parametrize("command, count", [("say", 5), ("say3", 5)])
@pytest.mark.parametrize("include, text", [(False, "one"), (True, "oneTW")])
def test_stop_string_over_tokens(server, command, count, include, text):
    """
    The stop string lies across tokens: none of it is shown, the tokens after it are neither shown
    nor counted (also when they came in the same step), and the engine hears at once that it need
    not go on.
    """
    fields = {"stop": ["zzz", "TW"], "include_stop_str_in_output": include}
    answer = server.answer(f"{command} oneTWO" + "more" * 500, **fields)
    assert answer["choices"][0] | {"index": 0} == answer["choices"][0]
    assert (answer["choices"][0]["text"], answer["choices"][0]["stop_reason"]) == (text, "TW")
    assert answer["usage"]["completion_tokens"] == count
    wait_until(lambda: server.engine.aborted[-1:] == [server.engine.added[-1]["id"]])
    assert text_of(server.stream(f"{command} oneTWO" + "more" * 500, **fields)) == text


def test_no_stop_string_before_min_tokens(server):
    """
    As in vLLM: what the first min_tokens say is no stop string, nor is a part of it the beginning
    of one.
    """
    assert server.answer("say abab", stop="b", min_tokens=2)["choices"][0]["text"] == "aba"
    assert server.answer("say abab", stop="ba", min_tokens=2)["choices"][0]["text"] == "abab"


def seconds_for_each_thousand(count: int) -> list[float]:
    """Of tokens told one by one, with stop strings, in this process's time."""
    request = CompletionRequest(prompt="x", stop=["never", "xxxy"], logprobs=1)
    choice, times = Choice(None, 0, request, [120], [], ByteTokenizer(), [EOS]), []
    for _ in range(count):
        started = time.process_time()
        for _ in range(1000):
            choice.take([120], None, 0, [fake_score(120, 1)])
            assert choice.has_news() and request.chunks(choice)
            choice.told()
        times.append(time.process_time() - started)
    return times


def test_late_tokens_cost_as_little_as_early_ones():
    """
    Of 10,000 tokens: nothing grows with the text. A busy machine may spoil some measurements,
    growth would all.
    """
    measured = (seconds_for_each_thousand(10) for _ in range(8))
    assert any(min(times[-3:]) < 2 * min(times[:3]) for times in measured)


def test_many_stop_strings_cost_as_little_as_few():
    """
    Each token's text was searched for each stop string, and each end of it tried as the beginning
    of each: 64 long ones took 80 times as long as one, where the text begins like them a thousand
    times as long.
    """
    text = ("the quick brown fox " * 250).encode()
    tokens = [text[i : i + 4] for i in range(0, len(text), 4)]

    def seconds(stops, tokens):
        stream = TextStream(tokens.__getitem__, stops)
        started = time.process_time()
        for number in range(len(tokens)):
            stream.push(number)
        assert stream.matched is None
        return time.process_time() - started

    few = min(seconds(["\nclass"], tokens) for _ in range(5))
    letters = [letter + "ZQ" * 120 for letter in "abcdefghijklmnopqrstuvwxyz\n0123456789"]
    assert min(seconds(letters, tokens) for _ in range(3)) < 60 * few
    alike = ["xy" * 4000 + "z", *["y" * 100 + "z"] * 60]
    assert min(seconds(alike, [b"xyxy"] * len(tokens)) for _ in range(3)) < 60 * few


def test_stop_string_ends_its_own_prompt_only():
    """
    In a call of several prompts, one that met its stop string is aborted at once, not when the last
    one is done.
    """
    with Server(engine=FakeEngine(max_model_len=10**9)) as server:
        sock = server.connect(
            prompt=["loop", "say oneTWO" + "more" * 5000], stop="TWO", max_tokens=20_000
        )
        wait_until(lambda: server.engine.aborted == ["1"])
        assert list(server.engine.running) == ["0"]
        sock.close()


def test_the_end_of_text_that_is_ignored_is_a_stop_token_like_others():
    """With ignore_eos it ends a text only where stop_token_ids name it, and is then the reason."""
    for ignored, reason in ((True, EOS), (False, None)):
        request = CompletionRequest(prompt="x", ignore_eos=ignored, stop_token_ids=[EOS])
        choice = Choice(None, 0, request, [120], [], ByteTokenizer(), [EOS])
        choice.take([120, EOS], "stop", 0, None)
        assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)


def test_of_several_ends_of_text_only_the_first_is_no_reason():
    """As in vLLM: its stop_reason is null, that of the others is their id."""
    request = CompletionRequest(prompt="x")
    for last, reason in ((7, None), (8, 8), (9, 9)):
        choice = Choice(None, 0, request, [120], [], ByteTokenizer(), [7, 8])
        choice.take([120, last], "stop", 0)
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("x", "stop", reason)


def test_text_that_only_looked_like_a_stop_string(server):
    """Held back while it could become one, given out when the answer ends instead."""
    choice = server.answer("say abc", stop="cde")["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", None)


def test_characters_arrive_whole(server):
    """Each of these characters is two to four tokens; no event may show a part of one."""
    text = "é€😀" * 20
    events = server.stream("say " + text)
    assert text_of(events) == text
    assert all("\ufffd" not in event["choices"][0]["text"] for event in events[:-1])


def test_half_a_character_at_the_end(server):
    assert server.answer("say a€", max_tokens=3)["choices"][0]["text"] == "a\ufffd"


def test_several_prompts_in_one_call(server):
    answer = server.answer(["say one", "say three"])
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "one"), (1, "three")]
    assert answer["usage"]["prompt_tokens"] == 16 and answer["usage"]["completion_tokens"] == 10
    events = server.stream(["say one", "say three"])
    assert (text_of(events, 0), text_of(events, 1)) == ("one", "three")


def test_prompts_as_token_ids(server):
    ids = [list(b"say one"), list(b"say two")]
    assert server.answer(ids[0])["choices"][0]["text"] == "one"
    assert [c["text"] for c in server.answer(ids)["choices"]] == ["one", "two"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server, stream):
    def text(*args, **fields):
        return text_of(
            server.stream(*args, **fields) if stream else [server.answer(*args, **fields)]
        )

    assert text("say hi", echo=True) == "say hihi"
    before = len(server.engine.added)
    assert text("say hi", echo=True, max_tokens=0) == "say hi"
    assert len(server.engine.added) == before  # nothing to compute
    assert text(list("say €".encode())[:-1], echo=True, max_tokens=0) == "say \ufffd"


def test_a_long_echo_is_text_at_once(monkeypatch):
    """
    128 choices that begin with a prompt of 30,000 tokens were spelled token by token, with nobody
    else served.
    """
    request, prompt = (
        CompletionRequest(prompt="x", echo=True, stop="x"),
        list("xé€".encode() * 500)[:-1],
    )
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", lambda *_: 1 / 0)
        choice = Choice(None, 0, request, prompt, [], ByteTokenizer(), [EOS])
    assert choice.text == "xé€" * 499 + "xé"
    choice.take(
        [0xAC, ord("y")], "length", 0
    )  # the character that began in the prompt ends in the answer
    assert choice.text == "xé€" * 500 + "y"


def test_token_ids_in_the_answer(server):
    choice = server.answer("say ab", return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == list(b"say ab") and choice["token_ids"] == [*b"ab", EOS]
    chunks = [event["choices"][0] for event in server.stream("say ab", return_token_ids=True)[:-1]]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [*b"ab", EOS]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [list(b"say ab")] + [None] * (
        len(chunks) - 1
    )


def test_request_id_names_the_answer_and_may_repeat(server):
    """Two clients may choose the same name; inside, requests have names of their own."""
    first, second = (
        server.connect(prompt="loop", max_tokens=300, request_id="x"),
        server.answer(request_id="x"),
    )
    assert second["id"] == "cmpl-x" and second["choices"][0]["text"] == "hi"
    assert b'"cmpl-x"' in read_until(first, b"}}}")


def read_until(sock, end):
    data = b""
    while end not in data and (part := sock.recv(65536)):
        data += part
    return data


def test_choices_of_several_prompts(server):
    """
    Prompt-major: all choices of the first prompt, then those of the second. A prompt is charged
    once.
    """
    answer = server.answer(["say a", "say bc"], n=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a"),
        (1, "a"),
        (2, "bc"),
        (3, "bc"),
    ]
    assert answer["usage"]["prompt_tokens"] == 11 and answer["usage"]["completion_tokens"] == 2 * (
        2 + 3
    )
    events = server.stream(["say a", "say bc"], n=2)
    assert [text_of(events, index) for index in range(4)] == ["a", "a", "bc", "bc"]


def test_logprobs(server):
    """
    Four lists; the token itself is among its candidates even where it is none of the likeliest;
    bytes that are no character are spelled out, and offsets count characters of the text.
    """
    choice = server.answer("say a€b", logprobs=1)["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "<end>"],
        "token_logprobs": [-2.0] * 6,
        "top_logprobs": [
            {"b": -1.0, "a": -2.0},
            {"bytes:\\xe3": -1.0, "bytes:\\xe2": -2.0},
            {"bytes:\\x83": -1.0, "bytes:\\x82": -2.0},
            {"bytes:\\xad": -1.0, "bytes:\\xac": -2.0},
            {"c": -1.0, "b": -2.0},
            {"\0": -1.0, "<end>": -2.0},
        ],
        "text_offset": [0, 1, 1, 1, 2, 3],
    }  # fmt: skip
    assert server.answer("say a", logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [
        {"a": -2.0},
        {"<end>": -2.0},
    ]


def test_streamed_logprobs_are_the_same(server):
    """Each token's once, though its text may be held back for a while."""
    fields = {"logprobs": 3, "echo": True, "stop": ["xyz", "!"]}
    whole = server.answer("say a€bxy b", **fields)["choices"][0]["logprobs"]
    chunks = [
        event["choices"][0]["logprobs"] for event in server.stream("say a€bxy b", **fields)[:-1]
    ]
    assert {name: [x for chunk in chunks for x in chunk[name]] for name in whole} == whole


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_many_log_probabilities_are_told_beside_the_event_loop(chat, monkeypatch, path, stream):
    """
    12,000 prompt tokens with 20 log-probabilities each took 1.9 s to tell, in which nobody else was
    served. A thread tells them now, piece by piece, and says the same.
    """
    call = {
        "prompt": "say hello",
        "echo": True,
        "logprobs": 3,
        "prompt_logprobs": None if stream else 2,
    }
    if path != "/v1/completions":
        call = {
            "messages": HELLO,
            "logprobs": True,
            "top_logprobs": 3,
            "prompt_logprobs": None if stream else 2,
        }
    call |= {
        "max_tokens": 50,
        "n": 2,
        "stream": stream,
        "return_token_ids": True,
        "request_id": "r",
    }
    said, threads = [], []
    encode = api.long_json
    monkeypatch.setattr(
        api, "long_json", lambda value: threads.append(threading.current_thread()) or encode(value)
    )
    monkeypatch.setattr(api, "PIECE", 2)
    for number in (10**6, 0):
        monkeypatch.setattr(api, "SCORES_IN_PLACE", number)
        text = chat.http.post(path, json=call).text
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        answer = events if stream else [json.loads(text)]
        by_index = {0: [], 1: []}
        for event in answer:
            for choice in event["choices"]:
                by_index[choice["index"]].append(choice)
        said.append(
            (
                by_index if not stream else joined(by_index),
                answer[0].keys(),
                answer[-1].get("usage"),
            )
        )
        assert bool(threads) == (number == 0)
    assert said[0] == said[1] and chat.thread not in threads


def joined(by_index: dict[int, list[dict]]) -> tuple:
    """What the chunks of each choice say together, however many they are."""
    texts = {
        i: "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in own)
        for i, own in by_index.items()
    }
    ids = {i: [token for c in own for token in c["token_ids"]] for i, own in by_index.items()}
    parts = {i: [c["logprobs"] for c in own if c["logprobs"]] for i, own in by_index.items()}
    scores = {
        i: {name: [x for part in own for x in part[name] or []] for name in own[0]}
        for i, own in parts.items()
    }
    return texts, ids, scores


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs(server, max_tokens):
    """
    What evaluation harnesses ask for: the prompt's log-probabilities, the first one null as nothing
    predicts it.
    """
    answer = server.answer(["say x", "say y"], echo=True, logprobs=2, max_tokens=max_tokens, n=2)
    for choice, text in zip(answer["choices"], "xxyy", strict=True):
        logprobs, total = choice["logprobs"], 5 + max_tokens
        assert choice["text"] == f"say {text}" + text * max_tokens
        assert logprobs["tokens"] == list(choice["text"]) and logprobs["text_offset"] == list(
            range(total)
        )
        assert logprobs["token_logprobs"] == [None] + [-2.0] * (total - 1)
        assert logprobs["top_logprobs"][:2] == [None, {"b": -1.0, "c": -2.0, "a": -2.0}]
    assert answer["usage"]["completion_tokens"] == 4 * max_tokens


def test_a_streamed_echo_waits_for_its_prompts_scores(server):
    """
    One prompt's tokens came while the other's scores were still to come: its echo had none, a 500.
    """
    fields = {"echo": True, "logprobs": 0, "max_tokens": 2}
    for _ in range(10):
        events = server.stream(["say x and so on", "y"], **fields)
        assert events[-1] == "[DONE]"
        for index, start in enumerate(["say x and so on", "y"]):
            choices = [c for event in events[:-1] for c in event["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in choices).startswith(start)


def test_prompt_logprobs(server):
    """vLLM's shape, whole answers only."""
    places = server.answer([1, 2], prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert places == [
        None,
        {
            "3": {"logprob": -1.0, "rank": 1, "decoded_token": "\x03"},
            "2": {"logprob": -2.0, "rank": None, "decoded_token": "\x02"},
        },
    ]


def test_control_tokens_have_text_when_asked(server):
    fields = {"include_stop_str_in_output": True}
    assert server.answer("say a", **fields)["choices"][0]["text"] == "a"
    assert (
        server.answer("say a", **fields, skip_special_tokens=False)["choices"][0]["text"]
        == "a<end>"
    )


def test_tokenize_and_back(server):
    def post(path, **body):
        return server.http.post(path, json=body)

    answer = post("/tokenize", prompt="a€", model="fake", return_token_strs=True).json()
    assert answer == {
        "count": 4, "max_model_len": 100_000, "tokens": [97, 226, 130, 172],
        "token_strs": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"],
    }  # fmt: skip
    assert post("/tokenize", prompt="").json()["tokens"] == []
    assert post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "a€"}
    assert (
        error_of(post("/detokenize", tokens=[257]))["message"]
        == "token id 257 is outside the vocabulary, 0..256"
    )
    assert error_of(post("/tokenize"))["message"] == "give either prompt or messages"
    assert error_of(post("/tokenize", prompt="\0"))["param"] == "prompt"
    assert post("/tokenize", prompt="a", model="other").status_code == 404
    assert (
        "no chat template"
        in error_of(post("/tokenize", messages=[{"role": "user", "content": "x"}]))["message"]
    )


@pytest.mark.parametrize("size", [2**18, pytest.param(2**22, marks=pytest.mark.slow)])
def test_no_text_holds_up_the_server(size):
    """
    8 runs of 499,999 blanks stopped the server for minutes, six calls with 4 MiB of one rare
    character for 60 s (with 869 MiB of memory): texts were encoded, and tokens named, where the
    interpreter was held. /livez answers within a second meanwhile, and so do short calls.
    """
    runs = (" " * (size // 8 - 1) + "x") * 8
    rare = "\U0001f9ff" * (size // 4)
    calls = [("/tokenize", {"prompt": text}) for text in (runs, rare, rare, rare)]
    calls.append(("/tokenize", {"prompt": rare, "return_token_strs": True}))
    calls.append(("/detokenize", {"tokens": [200] * (size // 5)}))
    calls.append(("/v1/completions", {"prompt": runs}))
    with Server("--max-body-mib", "16") as server, ThreadPoolExecutor(len(calls)) as pool:
        longest = 0.0
        answers = [
            pool.submit(server.http.post, path, json=body, timeout=250) for path, body in calls
        ]
        while not all(answer.done() for answer in answers):
            started = (
                time.process_time()
            )  # the server's, which is ours: another process's load is not counted
            assert server.get("/livez") == 200
            assert server.http.post("/tokenize", json={"prompt": "short"}).json()["count"] == 5
            longest = max(longest, time.process_time() - started)
            time.sleep(0.01)
        assert longest < 1
        results = [answer.result() for answer in answers]
    statuses = [200, 200, 200, 200, 200 if size <= 2**18 else 400, 200, 400]
    assert [result.status_code for result in results] == statuses
    assert results[0].json()["tokens"] == list(runs.encode())
    assert results[1].json()["tokens"] == list(rare.encode())
    assert results[5].json() == {"prompt": "\ufffd" * (size // 5)}
    assert error_of(results[6])["code"] == "context_length_exceeded"


def test_long_texts_are_not_encoded_where_clients_are_served(server):
    """
    With the process that encodes stopped, only calls with long texts wait: others, and /livez, are
    answered.
    """
    long = {"prompt": "a" * 5000}
    assert server.http.post("/tokenize", json=long).status_code == 200  # it has started
    pid = server.service.encoder.process.pid
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(3) as pool:
        calls = [
            ("/tokenize", long),
            ("/v1/completions", long),
            ("/detokenize", {"tokens": [97] * 5000}),
        ]
        answers = [pool.submit(server.http.post, path, json=body) for path, body in calls]
        try:
            for _ in range(20):
                assert server.get("/livez") == 200
                assert server.http.post("/tokenize", json={"prompt": "short"}).json()["count"] == 5
            assert not any(answer.done() for answer in answers)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [answer.result().status_code for answer in answers] == [200, 200, 200]


def test_what_cannot_be_encoded_now_is_refused_at_once(server, monkeypatch):
    monkeypatch.setattr(encoder, "MAX_WAITING", 0)
    response = server.http.post("/tokenize", json={"prompt": "a" * 5000})
    assert response.status_code == 429 and response.headers["retry-after"]
    assert "too much text is waiting to be encoded" in error_of(response)["message"]


def test_all_of_a_message_counts_as_waiting_text(chat, monkeypatch):
    """Only the contents were counted: names of 4 MiB each got past the limit of what waits."""
    monkeypatch.setattr(encoder, "MAX_WAITING", 100)
    assert ask(chat, max_tokens=1).status_code == 200
    response = ask(chat, [HELLO[0] | {"name": "n" * 100}])
    assert response.status_code == 429 and error_of(response)["code"] == "encoder_busy"


def test_the_process_that_encodes_is_started_again(server):
    """The client whose text it was working at gets one error, the next call another process."""
    long = {"prompt": "a" * 5000}
    assert server.http.post("/tokenize", json=long).status_code == 200
    server.service.encoder.process.kill()
    response = server.http.post("/tokenize", json=long)
    assert (
        response.status_code == 503
        and "the encoding process ended" in error_of(response)["message"]
    )
    assert server.http.post("/tokenize", json=long).json()["count"] == 5000


# --------------------------------------------------------------------------------------------------
# Chats

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A server whose checkpoint has a template: it makes the engine say the last message."""
    folder = tmp_path_factory.mktemp("chat")
    template = "{{ 'say ' if add_generation_prompt }}{{ messages[-1].content }}"
    template += (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    )
    bpe_tokenizer([]).save(folder)  # its tokens are the bytes, too
    (folder / "chat_template.jinja").write_text(template)
    with Server(directory=folder) as server:
        yield server


def ask(server, messages=HELLO, **fields):
    return server.http.post("/v1/chat/completions", json={"messages": messages} | fields)


def test_chat(chat):
    answer = ask(chat, max_tokens=50).json()
    assert answer.pop("id").startswith("chatcmpl-") and answer.pop("created")
    message = {"role": "assistant", "content": "hello"}
    assert answer == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [{"message": message, "index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }  # fmt: skip
    assert chat.engine.added[-1]["params"]["max_tokens"] == 50


def test_chat_may_be_as_long_as_the_context(chat):
    ask(chat)
    assert chat.engine.added[-1]["params"]["max_tokens"] == 100_000 - 9


def test_chat_stream(chat):
    """
    First the role, then the text, last an empty delta with the reason; then the usage, if asked
    for.
    """
    response = ask(
        chat, stream=True, n=2, stream_options={"include_usage": True}, return_token_ids=True
    )
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and {chunk["object"] for chunk in chunks} == {
        "chat.completion.chunk"
    }
    assert chunks.pop()["usage"]["completion_tokens"] == 12
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in own[1:-1]) == "hello"
        assert own[-1]["delta"] == {} and [c["finish_reason"] for c in own] == [None] * (
            len(own) - 1
        ) + ["stop"]
        assert [token for choice in own for token in choice["token_ids"]] == [*b"hello", EOS]
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [
        list(b"say hello")
    ] * 2


def test_usage_in_every_chunk_of_a_chat(chat):
    """The role costs no token yet."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = ask(chat, stream=True, stream_options=options)
    chunks = [
        json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")
    ]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-3:] == [6, 6, 6]
    assert all(chunk["usage"]["prompt_tokens"] == 9 for chunk in chunks)


# What `vllm bench serve` of vLLM's commit 02cfb53 sends, which comes only with all of vLLM:
# --backend openai and
# --backend openai-chat, with and without --ignore-eos.
VLLM_BENCH = {"stream": True, "stream_options": {"include_usage": True}}
VLLM_BENCH_TEXT = {
    "model": "fake",
    "prompt": "say hello",
    "repetition_penalty": 1.0,
    "max_tokens": 4,
    "logprobs": None,
}
VLLM_BENCH_CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "max_completion_tokens": 4,
}


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True, "temperature": 0.0}])
def test_vllms_load_generator_counts_its_tokens(chat, more):
    """
    It takes a request for failed that has no chunk with a choice, and its number of tokens from a
    last chunk that has a usage and no choice.
    """
    calls = {"/v1/completions": VLLM_BENCH_TEXT, "/v1/chat/completions": VLLM_BENCH_CHAT}
    for path, body in calls.items():
        response = chat.http.post(
            path, json=VLLM_BENCH | body | more, headers={"x-request-id": "bench-0"}
        )
        assert response.status_code == 200, response.text
        *chunks, done = [
            event.removeprefix("data: ") for event in response.text.strip().split("\n\n")
        ]
        *chunks, last = [json.loads(chunk) for chunk in chunks]
        assert done == "[DONE]" and any(chunk["choices"] for chunk in chunks)
        assert not any(chunk["usage"] for chunk in chunks)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


def test_chat_logprobs(chat):
    content = ask(chat, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    top = {"token": "i", "logprob": -1.0, "bytes": [105]}
    assert content[0] == {"token": "h", "logprob": -2.0, "bytes": [104], "top_logprobs": [top]}
    assert [entry["token"] for entry in content] == [*"hello", "<end>"]
    content = ask(chat, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_chats_refused(chat, server):
    error = error_of(ask(server))
    assert "fake has no chat template" in error["message"] and error["param"] == "messages"
    assert (
        error_of(ask(chat, [{"role": "system", "content": "x"}]))["message"] == "no system message"
    )
    assert error_of(ask(chat, tools=[{"type": "function"}]))["param"] == "tools"
    assert ask(chat, model="other").status_code == 404


def test_models(server):
    models = server.http.get("/v1/models").json()
    assert models["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [
        ("fake", "model", 100_000)
    ]
    assert server.http.get("/v1/models/fake").json() == models["data"][0]


@pytest.mark.parametrize("name", ["out/stdlib", "/data/model", "models/", "a b%2F"])
def test_one_model_by_its_name(name):
    """
    `models.retrieve` was a 404. The name of a model may be a path; clients write its slashes as
    they are, or not.
    """
    with Server("--served-model-name", name) as server:
        for path in (quote(name), quote(name, safe="")):
            assert server.http.get(f"/v1/models/{path}").json()["id"] == name
        missing = server.http.get("/v1/models/other")
    assert missing.status_code == 404 and error_of(missing)["code"] == "model_not_found"
    assert error_of(missing)["message"] == f"there is no model 'other' here; there is {name!r}"


def test_the_page_in_a_browser():
    """It was an error in JSON. A name cannot become markup, and nothing on the page can run."""
    with Server("--served-model-name", "<script>alert(1)</script>") as server:
        page = server.http.get("/", headers={"Host": "localhost:9"})
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.text and "<script" not in page.text
    assert "state: ready" in page.text and "curl http://localhost:9/v1/completions" in page.text


def test_the_page_tells_no_secrets(tmp_path):
    """
    It needs no key, so where there is one the model's name, its place and the key's are not on it.
    """
    keys = tmp_path / "secret keys"
    keys.write_text("sesame")
    with Server("--api-key-file", str(keys)) as server:
        page = server.http.get("/", headers={"Host": '"><b>x'})
    assert page.status_code == 200 and "<b>x" not in page.text
    assert "Authorization: Bearer YOUR_KEY" in page.text
    assert all(secret not in page.text for secret in ("fake", "sesame", "secret"))


def as_curl_sees_it(greeting, environment):
    """The arguments that a shell makes of the greeting's command."""
    command = greeting.splitlines()[1].strip().removeprefix("curl ")
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {command}"], env=environment, capture_output=True, text=True
    )
    return done.stdout.splitlines() if done.returncode == 0 else done.stderr


def test_the_greetings_command_works_as_it_stands(tmp_path):
    """
    With a key it lacked it, and with a chat template it asked for a completion. The key itself is
    not printed.
    """
    keys = tmp_path / "my keys"
    keys.write_text("\n sesame \nsimsim\n")

    def greeting(*flags, chats=False):
        args = serve.parse_args(list(flags))
        return welcome.greeting("m", "http://h:1", chats, serve.key_in_shell(args))

    text = ["http://h:1/v1/completions", "-H", "Content-Type: application/json"]
    body = ["-d", '{"prompt": "def ", "max_tokens": 64, "temperature": 0.6}']
    assert as_curl_sees_it(greeting(), {}) == [*text, *body]
    with_key = greeting("--api-key-file", str(keys))
    assert "sesame" not in with_key
    assert as_curl_sees_it(with_key, os.environ) == [
        *text,
        "-H",
        "Authorization: Bearer  sesame ",
        *body,
    ]
    with_key = greeting("--api-key", "sesame")
    assert "sesame" not in with_key
    set = {"PAGEDGPT_API_KEY": "sesame"}
    assert as_curl_sees_it(with_key, set) == [*text, "-H", "Authorization: Bearer sesame", *body]
    assert "set it to the key of the server" in as_curl_sees_it(with_key, {})
    url, *_, body = as_curl_sees_it(greeting(chats=True), {})
    assert url == "http://h:1/v1/chat/completions"
    assert json.loads(body)["messages"] == [{"role": "user", "content": "Hello"}]


# --------------------------------------------------------------------------------------------------
# Refusals

JSON = {"content-type": "application/json"}
NO_TYPE = "the body must be JSON, sent with the header Content-Type: application/json"
NOT_JSON = "the body is not JSON: {} at line 1 column {}"
TOO_LONG = "the body has more than 104857 bytes: shorten it or raise --max-body-mib"
POST, GET = ("POST", "/v1/completions"), ("GET", "/v1/completions")


@pytest.fixture
def listener(tmp_path):
    with serve.listen_to_http(str(tmp_path)) as listener:
        yield listener


def test_a_message_larger_than_a_link_takes_at_a_time(listener):
    """
    The rest of a long message was an error once, taken for the engine's death; the
    log-probabilities of a prompt are such a message. It comes in many parts, and so does a long
    prompt on its way to the engine.
    """
    client, links = EngineClient(listener.getsockname()), Links(listener)
    states, found, long = [], [], "x" * 2**22
    client.on_state = states.append

    def engine():
        links.accept()
        links.greet({"op": "ready", "padding": long})
        while not found:
            found.extend(links.receive(timeout=1))

    async def attached():
        await client.attach()
        client._write(op="add", padding=long)
        await asyncio.to_thread(engine)
        while not states:
            await asyncio.sleep(0.001)

    serve.run_on_loop(asyncio.wait_for(attached(), 10))
    assert states == ["ready"] and client.info["padding"] == long
    assert found[0][1] == {"op": "add", "padding": long}


def test_openapi_describes_what_is_taken_and_answered(server):
    """
    Fuzzers and client generators read it: a path or a limit that is not in it is none to them.
    """
    document = server.http.get("/openapi.json").json()
    assert {(m.upper(), path) for path, calls in document["paths"].items() for m in calls} == set(
        server.service.routes
    )
    completions, schemas = (
        document["paths"]["/v1/completions"]["post"],
        document["components"]["schemas"],
    )
    assert completions["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/CompletionRequest"
    )
    assert schemas["CompletionRequest"]["properties"]["temperature"]["maximum"] == 2
    assert {"200", "400", "401", "404", "429", "503"} <= completions["responses"].keys()


def nowhere(call, instead):
    return f"there is no {call} here; call {instead}; /openapi.json lists what there is"


@pytest.mark.parametrize(
    "call, headers, body, status, message",
    [
        (POST, JSON, b'{"prompt": ', 400, NOT_JSON.format("EOF while parsing a value", 11)),
        (POST, JSON, b"", 400, NOT_JSON.format("EOF while parsing a value", 0)),
        (POST, JSON, b"[1]", 400, "the body must be a JSON object"),
        (POST, JSON, b"null", 400, "the body must be a JSON object"),
        (POST, {}, b'{"prompt": "a"}', 400, NO_TYPE),
        (POST, {"content-type": "text/plain"}, b'{"prompt": "a"}', 400, NO_TYPE),
        (
            POST,
            {"content-type": "Application/JSON; charset=utf-8"},
            b"[1]",
            400,
            "the body must be a JSON object",
        ),
        (POST, JSON, b'{"prompt": "\xff"}', 400, NOT_JSON.format("invalid unicode code point", 13)),
        (
            POST,
            JSON,
            b'{"seed": ' + b"9" * 5000 + b"}",
            400,
            NOT_JSON.format("number out of range", 4311),
        ),
        (POST, JSON, b"[" * 90_000, 400, NOT_JSON.format("recursion limit exceeded", 202)),
        (
            POST,
            JSON,
            b'{"prompt": "a", "top_p": NaN}',
            400,
            "top_p: input should be a finite number, got nan",
        ),
        (POST, JSON, b'{"prompt": "a", "\\ud800": 1}', 400, None),  # half a character is no JSON
        (POST, JSON, b'{"prompt": "\\ud800"}', 400, None),
        (POST, JSON, b" " * 110_000, 413, TOO_LONG),
        (POST, {"content-type": "application/jsonp"}, b'{"prompt": "a"}', 400, NO_TYPE),
        (
            POST,
            {"content-type": "application/json-seq; charset=utf-8"},
            b'{"prompt": "a"}',
            400,
            NO_TYPE,
        ),
        (GET, {}, b"", 405, nowhere("GET /v1/completions", "POST /v1/completions")),
        (
            ("POST", "/v1/completion"),
            JSON,
            b"{}",
            404,
            nowhere("POST /v1/completion", "POST /v1/completions"),
        ),
        (("GET", "/v1/models/"), {}, b"", 404, nowhere("GET /v1/models/", "GET /v1/models")),
    ],
)
def test_bad_calls(server, call, headers, body, status, message):
    response = server.http.request(*call, headers=headers, content=body)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error" and error["message"] == (
        message or error["message"]
    )


IN_OPENAI = ", as this is OpenAI's API"


@pytest.mark.parametrize(
    "call, hint",
    [
        ("POST /chat/completions", "call /v1/chat/completions, a base URL ends in /v1"),
        ("GET /models", "call /v1/models, a base URL ends in /v1"),
        ("POST /v1/v1/completions", "call POST /v1/completions"),
        ("POST /v1/tokenize", "call POST /tokenize"),
        ("GET /v1/", "call GET /v1/models"),
        ("POST /v1/completions/", "call POST /v1/completions"),
        ("POST /api/generate", f"call POST /v1/completions{IN_OPENAI}"),
        ("POST /api/chat", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("GET /api/tags", f"call GET /v1/models{IN_OPENAI}"),
        ("POST /v1/responses", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("GET /v1/responses/resp_1", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("POST /v1/messages", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("POST /v1/messages/count_tokens", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("POST /v1/embeddings", "embeddings are not served, vLLM serves them"),
    ],
)
def test_paths_of_other_servers_are_told_what_to_call(server, call, hint):
    response = server.http.request(*call.split())
    assert response.status_code == 404
    assert (
        error_of(response)["message"]
        == f"there is no {call} here; {hint}; /openapi.json lists what there is"
    )


def test_unknown_paths_are_quoted_shortly(server):
    response = server.http.get("/" + "x" * 10_000)
    assert response.status_code == 404 and len(response.content) < 1000
    assert error_of(response)["message"].endswith("x here; /openapi.json lists what there is")


def test_other_methods_are_told_which_there_are(server):
    for method, path, allowed in [
        ("DELETE", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/fake", "GET, HEAD"),
    ]:
        response = server.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path", ["/", "/livez", "/v1/models", "/v1/models/fake", "/openapi.json", "/nowhere"]
)
def test_head_is_get_without_a_body(server, path):
    """It was a 405: load balancers and download tools ask with it first."""
    whole, head = server.http.get(path), server.http.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_chunked_body_is_refused_too(server):
    """It announces no length."""
    parts = (b" " * 1000 for _ in range(1000))
    assert server.http.post("/v1/completions", headers=JSON, content=parts).status_code == 413


@pytest.mark.parametrize(
    "sizes, fits", [([10], True), ([6, 4], True), ([11], False), ([6, 5], False), ([4] * 9, False)]
)
def test_body_is_counted_as_it_comes(sizes, fits):
    """
    What counts is the sum of the parts, at most the limit; reading stops with the part that exceeds
    it.
    """
    parts, read = iter(sizes), []

    async def receive():
        read.append(next(parts))
        return {
            "type": "http.request",
            "body": b" " * read[-1],
            "more_body": sum(read) < sum(sizes),
        }

    service = SimpleNamespace(
        args=serve.parse_args(["--max-body-mib", str(10 / 2**20)]), check_ready=lambda: None
    )
    http = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
    with pytest.raises(ApiError) as caught:
        asyncio.run(api.Service.read(service, http, CompletionRequest))
    assert sum(read[:-1]) <= 10
    wanted = (400, "the body is not JSON") if fits else (413, "the body has more than 10 bytes")
    assert caught.value.status == wanted[0] and caught.value.message.startswith(wanted[1])


@pytest.mark.parametrize(
    "fields, status, param, code, message",
    [
        ({"model": "gpt-5"}, 404, "model", "model_not_found", "there is no model 'gpt-5' here; there is 'fake'"),
        ({"model": ""}, 404, "model", "model_not_found", "there is no model '' here; there is 'fake'"),
        ({"prompt": "a\0b"}, 400, "prompt", None, "character '\\x00' is not in the vocabulary"),
        ({"prompt": [1, 257]}, 400, "prompt", None, "token id 257 is outside the vocabulary, 0..256"),
        ({"prompt": [-1]}, 400, "prompt", None, "token id -1 is outside the vocabulary, 0..256"),
        ({"stop_token_ids": [300]}, 400, "stop_token_ids", None, "token id 300 is outside the vocabulary, 0..256"),
        (
            {"prompt": "abcd", "max_tokens": 99_997}, 400, "max_tokens", "context_length_exceeded",
            "this model's maximum context length is 100000 tokens, 4 prompt tokens and max_tokens 99997 make 100001: "
            "shorten the prompt or lower max_tokens",
        ),
        ({"prompt": ["a"] * 17}, 400, "prompt", None, "17 prompts x n in one call, at most 16 are taken: split it"),
        ({"prompt": "invalid"}, 400, None, None, "the engine finds this invalid"),
        ({"prompt": "internal"}, 500, None, None, "the engine finds this internal"),
        ({"prompt": "full"}, 429, None, "queue_full", "the engine finds this full"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests(server, fields, status, param, code, message, stream):
    """A stream is refused with the same status: its headers wait for the first event."""
    response = server.post(stream=stream, **fields)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert (error["param"], error["code"], error["message"]) == (param, code, message)
    assert error["type"] == {429: "rate_limit_error", 500: "server_error"}.get(
        status, "invalid_request_error"
    )
    assert response.headers.get("retry-after") == ("1" if status == 429 else None)


def test_too_many_prompts_are_counted_before_they_are_encoded(server, monkeypatch):
    """
    A body of 4 MB holds 800,000 prompts; encoding them to say that they are too many held all
    clients up for 5 s.
    """
    monkeypatch.setattr(server.service, "encode", lambda request: 1 / 0)
    response = server.post(["a"] * 17)
    assert response.status_code == 400 and error_of(response)["message"].startswith("17 prompts")


@pytest.mark.parametrize("fields", [{"model": "x" * 90_000}, {"x" * 90_000: 1}])
def test_refusals_quote_little(server, fields):
    """The answer to a model's or a field's name of 4 MB was 4 and 8 MB long."""
    assert len(server.post(**fields).content) < 1000


def test_exactly_what_fits_is_served(server):
    """The positive control of the length check above."""
    assert server.answer("say", max_tokens=100_000 - 3)["choices"][0]["finish_reason"] == "stop"


def test_one_bad_prompt_ends_the_others(server):
    assert server.post(["loop", "invalid"]).status_code == 400
    wait_until(lambda: not server.engine.running)


def test_error_after_the_headers(server):
    """Too late for a status: the stream tells, and ends without [DONE]."""
    events = server.stream("break")
    assert text_of(events[:-1]) == "xx"
    assert (
        events[-1]["error"]["message"] == "the step failed"
        and events[-1]["error"]["type"] == "server_error"
    )


def test_a_bug_has_the_shape_of_an_error():
    """
    Should a bug of ours slip through, the client still gets JSON that its library can read, and no
    internals.
    """
    with Server() as server:
        server.service.encode = lambda request: {}["a bug"]
        response = server.post()
        assert response.status_code == 500
        assert error_of(response)["message"] == "a bug of this server: KeyError"
        assert error_of(response)["type"] == "server_error"


# --------------------------------------------------------------------------------------------------
# Many at once


def test_the_load_generator_measures_what_it_says():
    """A row for each request, in their order; a slow client has none, and nobody waits for it."""
    with Server(engine=FakeEngine(pace=0.02)) as server:
        requests = [load.completion(list(b"loop"), 5 + i, at=0.1 * (i == 4)) for i in range(5)]
        requests.insert(1, load.completion(list(b"loop"), 4000, speed=100))
        rows = load.load(*map(str, server.address), requests, processes=2)
        assert [row and row["tokens"] for row in rows] == [5, None, 6, 7, 8, 9]
        for row in filter(None, rows):
            waited = row["first"] + sum(row["gaps"])
            assert 0 < row["first"] < waited and 0 < len(row["gaps"]) < row["tokens"]
            assert row["end"] == pytest.approx(waited + 0.1 * (row["tokens"] == 9))
        wait_until(lambda: not server.service.client.choices)
        with pytest.raises(ValueError, match="wanted 3 tokens, the answer ends with HTTP"):
            load.load(*map(str, server.address), [load.completion([300], 3)], processes=1)


class Listening:
    """A link's transport that only notes whether it is read."""

    is_read = True

    def pause_reading(self):
        self.is_read = False

    def resume_reading(self):
        self.is_read = True


@pytest.mark.parametrize(("took", "rests"), [(0.0, False), (0.005, True), (3.0, True)])
def test_after_a_round_the_engine_is_not_listened_to_for_as_long(
    listener, monkeypatch, took, rests
):
    """
    With a write for each token of 256 streams the loop did nothing else, and the requests of a
    burst were read after up to 2 s. A stream that is alone is never made to wait, and nobody for
    longer than MAX_PAUSE.
    """
    client, clock = EngineClient(listener.getsockname()), [100.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    client.transport = Listening()
    client.choices["a"] = choice = SimpleNamespace(finish_reason=None)
    waits = []

    def take(*_):
        clock[0] += took

    async def one_round():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(
            loop, "call_later", lambda wait, call, *args: waits.append((wait, call, args))
        )
        choice.job = SimpleNamespace(take=take)
        client.data_received(
            line({"op": "step", "out": [["a", [1], None, 0]], "stats": {"at_work": 1}})
        )
        assert (
            client.transport.is_read
        )  # until all that it wrote is out, and what had arrived was read
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(one_round())
    assert client.transport.is_read != rests and len(waits) == rests
    for wait, call, args in waits:
        assert wait == pytest.approx(min(took, client_module.MAX_PAUSE))
        call(*args)
        assert client.transport.is_read


def test_what_several_steps_brought_is_told_at_once(listener):
    """And an error comes after the tokens before it, as it was sent."""
    client, told = EngineClient(listener.getsockname()), []
    client.transport = Listening()
    job = SimpleNamespace(
        take=lambda choice, *row: told.append(row), refuse=lambda *error: told.append(error)
    )
    client.choices = {id: SimpleNamespace(job=job, finish_reason=None) for id in "ab"}

    def step(*rows):
        return line({"op": "step", "out": rows, "stats": {"at_work": 2}})

    data = step(["a", [1], None, 5, [["s"]], ["p"]], ["b", [7], None, 0]) + step(
        ["a", [2], None, 5, [["t"]], None]
    )
    error = line({"op": "error", "id": "b", "message": "broken", "kind": "internal"})
    data += error + step(["a", [3], "length", 5, [["u"]], None])

    async def receive():
        client.data_received(data[:50])
        client.data_received(data[50:])

    asyncio.run(receive())
    assert told == [
        ([1, 2], None, 5, [["s"], ["t"]], ["p"]),
        ([7], None, 0),
        ("internal", "broken"),
        ([3], "length", 5, [["u"]], None),
    ]


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2}, {"stop": ["never", "lo w"], "logprobs": 0}]
)
def test_joined_tokens_say_the_same(fields):
    """
    Text, log-probabilities, stop strings and usage do not depend on how many tokens came at a time.
    """

    def events(per_step):
        engine = FakeEngine(per_step=per_step)
        with Server(engine=engine) as server:
            found = server.stream(
                "say h\u20acllo world", stream_options={"include_usage": True}, **fields
            )
        logprobs = [
            choice["logprobs"]
            for event in found[:-1]
            for choice in event["choices"]
            if choice["logprobs"]
        ]
        joined = {
            name: [x for part in logprobs for x in part[name]] for name in (logprobs or [{}])[0]
        }
        return text_of(found), joined, found[-2]["usage"], len(found)

    *single, count = events(1)
    *several, fewer = events(4)
    assert (
        several == single and fewer <= count
    )  # on a busy machine tokens of several steps are one event, too
    assert single[0] == ("h\u20acl" if "stop" in fields else "h\u20acllo world")


def test_a_newcomer_is_served_while_128_streams_write():
    """
    All of them have news all the time; who comes meanwhile gets a whole answer long before any of
    them ends.
    """
    with Server(engine=FakeEngine(pace=0.02)) as server:
        socks = [server.connect(prompt="loop", max_tokens=2000, stream=True) for _ in range(128)]
        wait_until(lambda: len(server.engine.running) == 128)
        for path in ("/livez", "/metrics"):
            assert server.get(path) == 200
        assert server.answer("say hi")["choices"][0]["text"] == "hi"
        assert len(server.engine.running) == 128
        for sock in socks:
            sock.close()
        wait_until(lambda: not server.service.client.choices)


def test_percentiles_are_of_all_rows():
    rows = [
        {"first": i / 1000, "gaps": [i / 500] * 2, "end": i, "tokens": 3} for i in range(1, 101)
    ]
    assert load.summary(rows) == {
        "output tok/s": 3,
        "s": 100,
        "first token, ms": {"p50": 51, "p90": 91, "p99": 100},
        "gaps, ms": {"p50": 102, "p90": 182, "p99": 200},
        "tokens an event": 1,
    }


# --------------------------------------------------------------------------------------------------
# Clients that go away, or read slowly


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_disconnect_aborts(stream, started):
    """
    Streaming or not, before the first token or after: closing the connection ends all the work of
    the call.
    """
    with Server(engine=FakeEngine(max_model_len=10**9)) as server:
        if not started:
            server.engine.gate.clear()
        sock = server.connect(prompt=["loop", "loop"], max_tokens=20_000, stream=stream)
        wait_until(lambda: len(server.engine.added) == 2)
        if started and stream:
            read_until(sock, b"x")
        assert server.engine.aborted == []
        sock.close()
        wait_until(lambda: sorted(server.engine.aborted) == ["0", "1"])
        assert not server.service.client.choices


def test_late_tokens_of_an_aborted_request_are_dropped(listener):
    """
    Between our abort and the engine's reading it, tokens of the request still come; they must do no
    harm.
    """
    client, stats = EngineClient(listener.getsockname()), {"at_work": 0}
    message = {
        "op": "step",
        "out": [["gone", [1], None, 0], ["gone", [2], "stop", 0]],
        "stats": stats,
    }

    async def receive():
        client.data_received(line(message))

    asyncio.run(receive())
    assert client.choices == {}


# --------------------------------------------------------------------------------------------------
# Who may come in, and how long clients may take


def test_api_key(tmp_path):
    """
    With a key everything but what a supervisor asks needs it, and each key has a prefix cache of
    its own.
    """
    keys = tmp_path / "keys"
    keys.write_text("sesame\n\n simsim \n")
    with Server("--api-key-file", str(keys)) as server:
        paths = ["/v1/models", "/health", "/metrics", "/nowhere"]
        for header in (
            None,
            "sesame",
            "Bearer",
            "Bearer wrong",
            "Basic sesame",
            "Bearer sesame2",
            "Bearer s\u00e9same",
        ):
            headers = {"Authorization": header.encode()} if header else {}
            for path in paths:
                response = server.http.get(path, headers=headers)
                assert (
                    response.status_code == 401 and error_of(response)["code"] == "invalid_api_key"
                )
        assert response.headers["www-authenticate"] == "Bearer"
        assert server.post().status_code == 401
        assert [server.http.get(path).status_code for path in ("/livez", "/readyz")] == [200, 200]
        salts = set()
        for key in ("sesame", "simsim"):
            server.http.headers["Authorization"] = f"Bearer {key}"
            assert [server.get(path) for path in paths] == [200, 200, 200, 404]
            server.answer(cache_salt="x")
            salts.add(server.engine.added[-1]["options"]["cache_salt"])
        assert len(salts) == 2 and all(
            "sesame" not in salt and salt.endswith(":x") for salt in salts
        )


def test_a_key_may_stand_in_the_command():
    with Server("--api-key", " sesame ") as server:
        assert server.get("/v1/models") == 401
        server.http.headers["Authorization"] = "Bearer sesame"
        assert server.get("/v1/models") == 200
    with pytest.raises(ValueError, match="--api-key is blank"):
        serve.api_keys(serve.parse_args(["--api-key", " "]))


def test_two_places_of_keys_are_refused(capsys):
    with pytest.raises(SystemExit):
        serve.parse_args(["--api-key", "a", "--api-key-file", "f"])
    assert "--api-key-file: not allowed with argument --api-key" in capsys.readouterr().err


def test_keys_come_from_environment_or_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDGPT_API_KEY", "one")
    assert serve.api_keys(serve.parse_args([])) == ["one"]
    serve.listen(
        serve.parse_args(["--host", "0.0.0.0", "--port", "0"])
    ).close()  # it has a key: no need to force
    for blank in ("", " \n"):
        monkeypatch.setenv("PAGEDGPT_API_KEY", blank)
        with pytest.raises(
            ValueError, match="PAGEDGPT_API_KEY is blank: give it a key, or unset it"
        ):
            serve.listen(serve.parse_args(["--host", "0.0.0.0", "--port", "0"]))
    several = tmp_path / "several"
    several.write_text("\ufeffone\n\n  two \none\n")
    assert serve.api_keys(serve.parse_args(["--api-key-file", str(several)])) == ["one", "two"]
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="has no key in it"):
        serve.api_keys(serve.parse_args(["--api-key-file", str(empty)]))


def test_a_key_file_that_others_can_read_is_told(tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text("sesame")
    for mode, is_told in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        path.chmod(mode)
        serve.warn_of_readable_keys(path)
        assert (f"chmod 600 {path}" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize("before, ended_by", [("SIG_DFL", "SIGTERM"), ("SIG_IGN", None)])
def test_a_terminal_that_closes_ends_the_server_as_sigterm_does(before, ended_by):
    """
    SIGHUP cut all streams without a drain; under nohup, which ignores it, the server must go on.
    """
    code = f"""
import serve, signal
caught = []
signal.signal(signal.SIGHUP, signal.{before})
signal.signal(signal.SIGTERM, lambda *_: caught.append("SIGTERM"))
serve.terminate_on_hang_up()
signal.raise_signal(signal.SIGHUP)
assert caught == {[ended_by] if ended_by else []}
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:8000"}, 200),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "gpt.example:80"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:8", "Origin": "http://localhost:8"}, 200),
        ({"Host": "localhost:8", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:8", "Origin": "null"}, 403),
        ({"Host": "localhost:8", "Origin": "HTTP://LocalHost:8"}, 200),
        ({"Host": "localhost:8", "Origin": "http://localhost:9"}, 403),
        ({"Host": "localhost:8", "Origin": "http://localhost"}, 403),
        ({"Host": "localhost:8", "Origin": "https://localhost:8"}, 403),
        ({"Host": "localhost:8", "Origin": "http://127.0.0.1:8"}, 403),
        ({"Host": "localhost:8", "Origin": "http://localhost:8.evil.example"}, 403),
        ({"Host": "localhost:8", "Origin": "tauri://localhost"}, 200),
        ({"Host": "localhost:8", "Origin": "tauri://localhost:8"}, 403),
        ({"Host": "evil.example", "Origin": "tauri://localhost"}, 403),
    ],
)
def test_hosts_and_origins(headers, status):
    """
    A page on the web can make its own name point to 127.0.0.1: its requests then say so in Host or
    Origin. Only the name of an origin was compared: another server's pages on this machine, at
    another port, passed for ours.
    """
    args = serve.parse_args(
        ["--allowed-hosts", "GPT.example", "--allowed-origins", "tauri://localhost"]
    )
    gate = api.Gate(SimpleNamespace(args=args, keys=[], routes={}))
    scope = {
        "path": "/v1/models",
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
    }
    scope["scheme"] = "http"
    if status == 200:
        assert gate.admit(scope) == ""
    else:
        with pytest.raises(ApiError) as caught:
            gate.admit(scope)
        assert caught.value.status == status


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ORIGINS = [
    "http://localhost:3000",
    "moz-extension://1f",
    "chrome-extension://abc",
    "tauri://localhost",
    "null",
]


@pytest.fixture(scope="module")
def shared_server():
    flags = ["--api-key", "sesame", "--max-num-seqs", "1", "--max-queue", "0"]
    with Server("--allowed-origins", *ORIGINS, *flags) as server:
        yield server


@pytest.mark.parametrize("origin", ORIGINS)
def test_pages_of_allowed_origins_are_served(shared_server, origin):
    """
    They got a 403, with a valid key too, and no flag could change it. A browser first asks, without
    the key, and shows the page nothing that does not name its origin: errors do too, so that it can
    say what was wrong.
    """
    http, key = shared_server.http, {"Authorization": "Bearer sesame"}
    asked = http.options("/v1/completions", headers=PREFLIGHT | {"Origin": origin})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == origin
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in asked.headers["access-control-allow-methods"] and asked.headers["x-request-id"]
    body = {"prompt": "say hi", "max_tokens": 9}
    answers = {
        200: http.post(
            "/v1/completions", json=body | {"stream": True}, headers={"Origin": origin} | key
        ),
        401: http.post("/v1/completions", json=body, headers={"Origin": origin}),
        400: http.post("/v1/completions", json={}, headers={"Origin": origin} | key),
        404: http.get("/nowhere", headers={"Origin": origin} | key),
    }
    shared_server.engine.gate.clear()
    waiting = threading.Thread(
        target=http.post, args=["/v1/completions"], kwargs={"json": body, "headers": key}
    )
    waiting.start()
    wait_until(lambda: shared_server.service.client.choices)
    answers[429] = http.post("/v1/completions", json=body, headers={"Origin": origin} | key)
    shared_server.engine.gate.set()
    waiting.join()
    for status, answer in answers.items():
        assert answer.status_code == status
        assert (
            answer.headers["access-control-allow-origin"] == origin
            and answer.headers["vary"] == "Origin"
        )
        assert answer.headers["access-control-expose-headers"] == "x-request-id, retry-after"


@pytest.mark.parametrize(
    "origin", ["http://localhost:3001", "https://localhost:3000", "moz-extension://2f"]
)
def test_pages_of_other_origins_are_told_of_the_flag(shared_server, origin):
    for method, headers in (
        ("GET", {}),
        ("OPTIONS", PREFLIGHT),
        ("GET", {"Authorization": "Bearer sesame"}),
    ):
        refused = shared_server.http.request(
            method, "/v1/models", headers=headers | {"Origin": origin}
        )
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
        message = f"pages of another origin, {origin!r}, are not served here: --allowed-origins {origin} would let them in"
        assert error_of(refused)["message"] == message


def test_any_origin_may_be_allowed():
    with Server("--allowed-origins", "*") as server:
        for origin in ("http://any.example", "null"):
            answer = server.http.get("/v1/models", headers={"Origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
            assert (
                server.http.options(
                    "/v1/models", headers=PREFLIGHT | {"Origin": origin}
                ).status_code
                == 200
            )
        assert server.http.get("/livez", headers={"Host": "evil.example"}).status_code == 403


def test_without_the_flag_nothing_speaks_of_origins(server):
    own = {"Origin": str(server.http.base_url).rstrip("/")}
    answer = server.http.post("/v1/completions", json={"prompt": "say hi"}, headers=own)
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert server.http.options("/v1/models", headers=PREFLIGHT | own).status_code == 405


@pytest.mark.parametrize(
    "given, taken",
    [
        ("http://LocalHost:3000", "http://localhost:3000"),
        ("http://a.example:80", "http://a.example"),
        ("https://a.example:443", "https://a.example"),
        ("https://a.example:80", "https://a.example:80"),
        ("http://[::1]:80", "http://[::1]"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_origins_are_taken_as_browsers_send_them(given, taken):
    assert serve.parse_args(["--allowed-origins", given]).allowed_origins == [taken]


@pytest.mark.parametrize(
    "text", ["localhost:3000", "http://localhost:3000/", "http://", "https://*.example", ""]
)
def test_what_is_no_origin_is_refused(text, capsys):
    """
    A path or a missing scheme would never match what a browser sends, and nobody would know why.
    """
    with pytest.raises(SystemExit):
        serve.parse_args(["--allowed-origins", text])
    wanted = f"{text!r} is no origin, wanted SCHEME://HOST or SCHEME://HOST:PORT without a path, null or *"
    assert wanted in capsys.readouterr().err


@pytest.fixture
def logging_server(monkeypatch):
    """
    A server with the lines of its log in `server.log`, of its own: another test's last call may be
    logged when that test has ended. Tests read the log while it is written, which pytest's
    capturing does not allow: it empties its file after reading, and what is written in between is
    lost.
    """
    lines = []

    def note(line, file=None, flush=False):
        if file is not None:  # else it is the greeting
            lines.append(line)

    monkeypatch.setattr(api, "print", note, raising=False)
    with Server() as server:
        server.log = lines
        server.args.access_log = True
        yield server


def access_log(server, count: int) -> list[dict]:
    """
    The log's first `count` lines. A call is logged when it has ended, which may be after its client
    knows it.
    """
    wait_until(lambda: len(server.log) >= count)
    return [json.loads(line) for line in server.log[:count]]


def test_every_answer_has_an_id(logging_server):
    """
    The client's own, or else a new one, also in the log and in the name of a completion: so a
    user's report, the answer and the line of the log are brought together.
    """
    server = logging_server
    ids = []
    for call in (("GET", "/"), ("GET", "/nowhere"), ("HEAD", "/livez"), ("OPTIONS", "/v1/models")):
        ids.append(server.http.request(*call).headers["x-request-id"])
    completion = server.post()
    assert completion.json()["id"] == f"cmpl-{completion.headers['x-request-id']}"
    ids += [completion.headers["x-request-id"], server.post(stream=True).headers["x-request-id"]]
    assert len(set(ids)) == len(ids) and all(len(id) == 32 for id in ids)
    own = {"X-Request-Id": "my-request:1"}
    assert server.http.get("/v1/models", headers=own).headers["x-request-id"] == "my-request:1"
    logged = [line["id"] for line in access_log(server, 5)]
    assert sorted(logged) == sorted(
        [ids[1], *ids[3:], "my-request:1"]
    )  # but those of the page and of /livez
    for other in ("a b", "x" * 129, "", "caf\u00e9"):
        answer = server.http.get("/livez", headers={"X-Request-Id": other.encode()})
        assert len(answer.headers["x-request-id"]) == 32


def test_an_unseeded_answer_can_be_had_again(logging_server):
    """
    Each start of the server said the same, and no two starts in a row anything else. Now each call
    draws a seed, which is in the log; equal prompts of a call have seeds of their own, so that
    their answers differ.
    """

    def seeds(prompt, **fields):
        added = logging_server.engine.added
        before = len(added)
        logging_server.answer(prompt, **fields)
        return [message["params"]["seed"] for message in added[before:]]

    (first,), (second,) = seeds("say hi"), seeds("say hi")
    several = seeds(["say hi"] * 3)
    given = seeds(["say hi"] * 2, seed=7)
    assert first != second and all(0 <= seed < 2**53 for seed in (first, second))
    assert several == [several[0], several[0] + 1, several[0] + 2] and given == [7, 7]
    logged = [line["seed"] for line in access_log(logging_server, 4)]
    assert sorted(logged) == sorted([first, second, several[0], 7])


def test_slow_readers_are_cut_off():
    """Who does not read keeps neither a connection nor blocks."""
    engine = FakeEngine(pace=0, max_model_len=10**9)
    with Server("--client-seconds", "0.3", engine=engine, send_buffer=4096) as server:
        sock = server.connect(prompt="loop", max_tokens=10**5, stream=True, return_token_ids=True)
        wait_until(lambda: server.engine.aborted == ["0"])
        wait_until(lambda: not server.service.client.choices)
        sock.close()


def test_log_lines(capfd):
    """
    One line of JSON each; texts only with --log-requests; nothing a client sends makes a line of
    its own.
    """
    with Server("--log-requests") as server:
        server.args.access_log = True
        server.answer("say hi", user="me", request_id="r", cache_salt="a secret")
        server.get("/v1/x%0d%0aevil")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert all(line.pop("time") and line.pop("ms", 1) for line in lines)
    drawn = lines[0]["seed"]
    assert all(len(line.pop("id")) == 32 for line in lines if line["event"] == "access")
    # a call is logged when it has ended, which may be after its client sent the next
    client = {"event": "access", "client": "127.0.0.1"}
    missing = "there is no GET /v1/x\r\nevil here; /openapi.json lists what there is"
    assert sorted(lines, key=lambda line: line.get("path", "")) == [
        {
            "event": "request",
            "id": "cmpl-r",
            "max_tokens": 1000,
            "prompt": ["say hi"],
            "request_id": "r",
            "seed": drawn,
        },
        client | {"method": "POST", "path": "/v1/completions", "status": 200, "seed": drawn},
        client | {"method": "GET", "path": "/v1/x\r\nevil", "status": 404, "error": missing},
    ]


def test_the_log_says_why_a_call_was_refused(capfd):
    """
    It had the status alone: with 400 for every wrong field, nobody could help whom a server
    refused.
    """
    calls = [
        ({"model": 'x"}\n{"event": "forged"}'}, 404, "model_not_found"),
        ({"temperature": "secret"}, 400, "temperature: input should be a valid number"),
        ({"prompt": "break"}, 500, "the step failed"),
        (
            {"prompt": "break", "stream": True},
            200,
            "the step failed",
        ),  # after the headers, if these are out by then
    ]
    with Server() as server:
        server.args.access_log = True
        answered = [server.post(**fields).status_code for fields, _, _ in calls]
    wanted = [status for _, status, _ in calls]
    assert answered in (wanted, [*wanted[:-1], 500])
    text = capfd.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["event"] for line in lines] == ["access"] * len(calls)
    assert [line["status"] for line in lines] == answered
    assert all(
        line["error"].startswith(error) for line, (_, _, error) in zip(lines, calls, strict=True)
    )
    assert "secret" not in text


def test_texts_are_not_logged(capfd):
    with Server() as server:
        server.args.access_log = True
        server.answer("say secret")
    assert "secret" not in capfd.readouterr().err


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET /livez HTTP/1.1\r\nHost localhost\r\n\r\n"]
)
def test_what_is_no_http_gets_an_error_in_json(server, data):
    """It was uvicorn's own plain text."""
    with socket.create_connection(server.address, timeout=30) as sock:
        sock.sendall(data)
        head, _, body = read_until(sock, b"no such end").partition(b"\r\n\r\n")
    assert (
        head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        and b"Content-Type: application/json" in head
    )
    error = {
        "message": "Invalid HTTP request received.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert json.loads(body) == {"error": error} and f"Content-Length: {len(body)}".encode() in head
    assert b"\r\nx-request-id: " in head


# --------------------------------------------------------------------------------------------------
# Loading, draining, dying


def test_stopped_while_loading(capsys):
    """
    The engine was ready while the server ended: the greeting asked a closed socket for its address.
    """
    with Server(engine=FakeEngine(ready=False)) as server:
        server.stop()
        wait_until(lambda: server.service.draining)
        server.engine.say_ready()
        server.thread.join(30)
    assert server.result is None and "serving" not in capsys.readouterr().out


def test_signals_do_not_reach_the_engine(listener):
    """
    Ctrl-C at a terminal is for both processes; the engine's left a traceback if it came while
    Python started up.
    """
    before = signal.getsignal(signal.SIGINT)
    link = client_module.connect(listener.getsockname())
    process = serve.start_process(
        serve.engine_process, serve.parse_args(["--model", "/no/model"]), listener
    )
    assert signal.getsignal(signal.SIGINT) is before
    for sig in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, sig)
    link.settimeout(60)
    assert "no model in /no/model" in json.loads(read_until(link, b"\n"))["message"]
    assert link.recv(1) == b""
    process.join(30)
    assert process.exitcode == 0


def test_drain():
    """
    After SIGTERM: not ready, new work refused, running work finished, then the end without
    complaint.
    """
    with Server() as server:
        server.engine.gate.clear()
        running = [
            server.connect(prompt="say hi", max_tokens=9, stream=stream) for stream in (False, True)
        ]
        wait_until(lambda: len(server.engine.added) == 2)
        server.stop()
        wait_until(lambda: server.get("/readyz") == 503)
        assert (server.get("/livez"), server.get("/health")) == (200, 503)
        response = server.post()
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert error_of(response) == {
            "message": "the server is draining: try again later",
            "type": "server_error", "param": None, "code": "draining",
        }  # fmt: skip
        server.engine.gate.set()
        assert b'"text":"hi"' in read_until(running[0], b"}}}")
        assert b"[DONE]" in read_until(running[1], b"[DONE]")
        server.thread.join(30)
        assert server.result is None and server.engine.aborted == []


def test_drain_has_a_limit():
    """What does not finish in time ends with an error, not with a closed connection."""
    with Server("--drain-seconds", "0.1") as server:
        server.engine.gate.clear()
        whole = server.connect(prompt="loop", max_tokens=10**4)
        wait_until(lambda: len(server.engine.added) == 1)
        server.stop()
        answer = read_until(whole, b"}}")
        assert b" 503 " in answer and b"the server stopped before this was finished" in answer
        server.thread.join(30)
        assert server.result is None


def test_second_signal_stops_now():
    """Whoever cannot wait signals again; the clients still get an answer."""
    with Server("--drain-seconds", "60") as server:
        server.engine.gate.clear()
        sock = server.connect(prompt="loop", max_tokens=10**4)
        wait_until(lambda: len(server.engine.added) == 1)
        server.stop()
        wait_until(lambda: server.get("/readyz") == 503)
        assert server.thread.is_alive()
        server.stop()
        assert b"stopped before this was finished" in read_until(sock, b"}}")
        server.thread.join(30)
        assert server.result is None


def test_who_is_still_being_encoded_when_the_server_stops_is_told(monkeypatch):
    """
    With a long text being encoded, or half of it sent, SIGTERM ended in uvicorn's own 500, no JSON,
    after the linger. It is a 503 as for whatever else is not finished: clients try again.
    """
    monkeypatch.setattr(api, "LINGER_SECONDS", 0.2)
    with Server() as server, ThreadPoolExecutor(1) as pool:
        asked = threading.Event()

        async def ask(job, size):
            asked.set()
            await asyncio.sleep(30)

        monkeypatch.setattr(server.service.encoder, "ask", ask)
        with socket.create_connection(server.address, timeout=30) as half:
            half.sendall(HEAD + b"Content-Length: 99\r\n\r\n{")
            wait_until(lambda: server.service.server.server_state.tasks)
            answer = pool.submit(server.post)
            assert asked.wait(30)
            server.stop()
            assert b'"code": "stopping"' in read_until(half, b"}}")
        assert (
            answer.result(30).status_code == 503 and error_of(answer.result())["code"] == "stopping"
        )


def test_stopping_does_not_wait_for_those_who_neither_read_nor_send(capfd, monkeypatch):
    """
    Half a body, and an answer that nobody reads, each left a traceback of 60 lines when the server
    was stopped.
    """
    monkeypatch.setattr(api, "LINGER_SECONDS", 0.2)
    with Server(engine=FakeEngine(pace=0), send_buffer=4096) as server:
        unread = server.connect(
            prompt=["loop"] * 8, max_tokens=3000, stream=True, return_token_ids=True
        )
        half = socket.create_connection(server.address)
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        half.sendall(b'Content-Length: 99\r\n\r\n{"prompt": ')
        wait_until(lambda: len(server.engine.added) == 8 and not server.engine.running)
    unread.close(), half.close()
    error = capfd.readouterr().err
    assert "Cancel 2 running task(s)" in error and "Traceback" not in error


def test_death_of_the_engine():
    """
    Whoever waits gets an error, streaming or not, and the health pages say so. The first time
    another engine is started, and serves; when that one dies too, the server ends with exit code 1.
    """
    second = FakeEngine(ready=False)
    with Server(engine=FakeEngine(successor=second)) as server:
        server.engine.gate.clear()
        waiting = [
            server.connect(prompt="loop", max_tokens=9, stream=stream) for stream in (False, True)
        ]
        wait_until(lambda: len(server.engine.added) == 2)
        server.engine.die()
        for sock in waiting:
            answer = read_until(sock, b"}}")
            assert (
                b" 500 " in answer
                and b'"engine_dead"' in answer
                and b"it is started again" in answer
            )
        assert (server.get("/livez"), server.get("/health"), server.get("/readyz")) == (
            503,
            503,
            503,
        )
        assert (
            server.post().status_code == 503
            and error_of(server.http.get("/livez"))["code"] == "dead"
        )
        second.say_ready()
        wait_until(lambda: server.get("/readyz") == 200)
        assert server.get("/livez") == 200 and server.answer()["choices"][0]["text"] == "hi"
        second.die()
        server.thread.join(30)
        assert server.result == "the engine's process ended"  # exit code 1


def test_an_engine_that_does_not_read_costs_no_memory(listener):
    """
    40 calls that hung up while the engine was stopped left 300 MiB of requests for it, of which
    nobody waited.
    """
    client, links, heard = EngineClient(listener.getsockname()), Links(listener), []
    client.info["max_model_len"] = 10**6
    job = SimpleNamespace(salt="")

    def choices(n):
        request = CompletionRequest(prompt="x", n=n)
        return [SimpleNamespace(request=request, prompt=[7] * 50_000, job=job) for _ in range(n)]

    def waiting():
        return client.transport.get_write_buffer_size() + sum(map(len, client.unsent.values()))

    async def talk():
        await client.attach()
        calls = [choices(1 + i % 3) for i in range(40)]
        for call in calls:
            client.submit(call)
        before = waiting()
        for call in calls[:-2]:
            for choice in call:
                assert client.abort(choice)
        client.abort(calls[-2][-1])  # one choice of 3
        after = waiting()
        links.accept()
        while not heard or heard[-1].get("id") != "38.2":
            heard.extend(message for _, message in links.receive(timeout=0))
            await asyncio.sleep(0)
        return before, after

    before, after = serve.run_on_loop(asyncio.wait_for(talk(), 30))
    assert before > 3_000_000 > 5 * after
    added, aborted = ([m["id"] for m in heard if m["op"] == op] for op in ("add", "abort"))
    assert added[-2:] == ["38", "39"] and len(added) < 10 and set(added[:-2]) <= set(aborted)


def test_engine_that_cannot_start():
    """
    Its one line becomes the server's, and the server ends; that its link then ends too says nothing
    more.
    """
    engine = FakeEngine(ready=False)
    server = Server(engine=engine)
    engine.links.accept()
    engine.links.greet({"op": "fatal", "message": "no model here: run `python train.py`"})
    engine.links.close()
    assert (
        serve.run_on_loop(server.service.run(server.sock)) == "no model here: run `python train.py`"
    )


# --------------------------------------------------------------------------------------------------
# The command line


def test_answers_do_not_wait_for_acknowledgements():
    """
    A listening socket that did not name its protocol made asyncio leave Nagle's algorithm on:
    header and body went out in two writes, and the second waited up to 40 ms for the client to
    acknowledge the first.
    """
    with (
        serve.listen(serve.parse_args(["--port", "0"])) as sock,
        socket.create_connection(sock.getsockname()),
    ):
        accepted, _ = sock.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        accepted.close()


def test_port_in_use():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(SystemExit, match="choose another --port"),
    ):
        serve.listen(serve.parse_args(["--port", str(taken.getsockname()[1])]))


@pytest.mark.parametrize("port", ["-1", "70000"])
def test_port_that_does_not_exist(port):
    """The resolver takes ports modulo 65536, so --port 70000 listened at 4464."""
    with pytest.raises(SystemExit, match="port must be 0-65535"):
        serve.listen(serve.parse_args(["--port", port]))


@pytest.mark.parametrize(
    "host, refused", [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_other_machines_are_kept_out(host, refused):
    flags = ["--host", host, "--port", "0"]
    with pytest.raises(SystemExit, match="--allow-remote") if refused else contextlib.nullcontext():
        serve.listen(serve.parse_args(flags)).close()


def test_remote_when_forced():
    serve.listen(serve.parse_args(["--host", "0.0.0.0", "--port", "0", "--allow-remote"])).close()


@pytest.mark.parametrize(
    "flag", ["--block-size", "--kv-blocks", "--max-model-len", "--max-num-seqs", "--token-budget"]
)
def test_sizes_are_positive(flag, capsys):
    """A block size of 0 used to end in a ZeroDivisionError in the engine's process."""
    assert serve.parse_args([flag, "1"])
    with pytest.raises(SystemExit):
        serve.parse_args([flag, "0"])
    assert f"argument {flag}: 0 is too small, wanted at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-queue", "--max-body-mib", "--drain-seconds"])
def test_limits_are_not_negative(flag, capsys):
    """
    --max-body-mib nan and inf ended in a traceback, and a negative queue refused every request.
    """
    assert serve.parse_args([flag, "0"])
    for value in ["-1"] if flag == "--max-queue" else ["-0.1", "nan"]:
        with pytest.raises(SystemExit):
            serve.parse_args([flag, value])
        assert (
            f"argument {flag}: {value} is too small, wanted at least 0" in capsys.readouterr().err
        )


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_http_process_imports_no_torch():
    """The HTTP process must start at once and stay small; only the engine's process needs torch."""
    done = python("import sys, serve, serving.api; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_serve_itself_imports_no_http_packages():
    """
    `--prompt` and the engine's process do without starlette, uvicorn and pydantic; serving says
    what to install.
    """
    code = "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = sys.modules['pydantic'] = None; import serve"
    assert python(code).returncode == 0
    done = python(f"{code}; serve.main([])")
    assert (
        done.returncode == 1
        and done.stderr.count("\n") == 1
        and "pip install starlette pydantic uvicorn" in done.stderr
    )
