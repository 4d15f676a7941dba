"""
Serve a trained model as vLLM would: OpenAI's HTTP interface in front, the paged engine in a process of its own.

    python serve.py                                     # out/stdlib at http://127.0.0.1:8000
    python serve.py --model out/shakespeare_char --port 9000
    python serve.py --prompt "def " --max-tokens 100    # no HTTP: continues the text at the terminal

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def "}'

The way of a request: a `Connection` reads it, the `Gate` lets it in, `create_app` checks it (the rules are in
protocol.py), a `Job` is its answer, with `Choice`s for each prompt; `EngineClient` carries token ids to the engine's
process and back, and a `TextStream` makes them text. The HTTP packages are imported where they are used, so that
neither `--prompt` nor the engine's process needs them, and torch only in `build_engine`, so that the HTTP process stays
small and never waits for a step.
"""

import argparse
import asyncio
import codecs
import contextlib
import gc
import hashlib
import hmac
import ipaddress
import itertools
import json
import logging
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial

from tokenizer import TextStream, load_chat_template, load_tokenizer

KEY_VARIABLE = "PAGEDGPT_API_KEY"
OPEN_PATHS = ("/livez", "/readyz")  # what a supervisor asks; everything else needs the key, if there is one
PING_SECONDS = 10  # a stream that has nothing to say says so this often, or proxies take it for dead
STALL_SECONDS = 120  # an engine with work and no word for so long is not alive
LINGER_SECONDS = 2  # when the server stops, how long clients have to send or to fetch what is left
RETRY_SECONDS = 1  # what Retry-After advises
SHORT_TEXT = 4000  # characters that are encoded in less time than it takes to ask a thread
MAX_HEAD = 2**16  # bytes of a request before its body
PING = b": ping\n\n"


def at_least(least: int, number: type = int) -> Callable:
    """The type of flags that count or measure something; argparse makes its errors messages."""

    def parse(text: str):
        if not number(text) >= least:  # not <, of which NaN is none either
            raise argparse.ArgumentTypeError(f"{text} is too small, wanted at least {least}")
        return number(text)

    parse.__name__ = number.__name__  # argparse: "invalid int value"
    return parse


positive, seconds = at_least(1), at_least(0, float)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = "Serve a trained model over HTTP, or continue a --prompt at the terminal."
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default="out/stdlib", help="checkpoint directory, of train.py or of a GPT-2 downloaded from the hub")
    add("--device", help="cpu, cuda, cuda:1; not given: a GPU where there is one")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "fp32", "bf16", "fp16"],
        help="of weights; auto: bf16 on a GPU, else fp32",
    )
    # the engine's own options: each `dest` is the name of an argument of Engine
    add("--quantize", default="none", choices=["none", "int8"], help="weights as integers, on a CPU")
    add("--attention", default="auto", help="attention backend: triton, flex or torch; auto takes the fastest here")
    add("--kv-blocks", dest="num_blocks", type=positive, help="KV blocks in the pool; not given: all that are useful")
    add("--block-size", type=positive, default=16, help="tokens in a KV block")
    add("--max-model-len", type=positive, help="longest prompt plus answer, in tokens; not given: what fits")
    add("--max-num-seqs", type=positive, help="requests that run at once; not given: 256 on a GPU, 64 on a CPU")
    add("--token-budget", type=positive, help="tokens computed in a step; not given: 8192 on a GPU, 512 on a CPU")
    add("--prefill-share", type=float, default=0.25, help="of that budget, for prompts while some are under way")
    add("--policy", default="priority", choices=["fcfs", "priority", "sjf"], help="who is served first")
    add("--max-num-partial-prefills", type=positive, default=4, help="prompts that share a step's prefill tokens")
    add("--max-long-partial-prefills", type=positive, default=1, help="long ones among them")
    add("--long-prefill-threshold", type=positive, default=512, help="tokens above which a prompt is long")
    add("--no-graphs", dest="graphs", action="store_false", help="on a GPU: no CUDA graphs, for debugging")
    add("--no-prefix-cache", dest="prefix_cache", action="store_false", help="compute each prompt from its first token")
    add("--trace", action="store_true", help="print what each step does")
    add("--check", action="store_true", help="verify the scheduler's invariants after each step")

    http = parser.add_argument_group("HTTP").add_argument
    http("--host", default="127.0.0.1", help="address to listen at; one that other machines reach wants an API key")
    http("--port", type=int, default=8000, help="port to listen at; 0: any free one")
    http("--api-key-file", metavar="FILE", help=f"API keys, one a line; not given: that in ${KEY_VARIABLE}, or none")
    http("--allow-remote", action="store_true", help="let other machines in without an API key")
    http("--allowed-hosts", nargs="*", default=[], metavar="NAME", help="more names that the Host header may have")
    http("--served-model-name", help="the model's name in the API; not given: what --model says")
    http("--max-queue", type=at_least(0), default=256, help="choices that may wait for their turn; more are a 429")
    http("--max-body-mib", type=seconds, default=4.0, help="largest request body; a larger one is a 413")
    http("--max-connections", type=positive, default=512, help="connections at once; more are closed at once")
    http("--client-seconds", type=seconds, default=30.0, help="how long a client may take to send or to read")
    http("--request-seconds", type=seconds, default=600.0, help="how long an answer may take, its waiting included")
    http("--drain-seconds", type=seconds, default=30.0, help="how long SIGTERM lets running requests go on")
    http("--log-requests", action="store_true", help="log the fields of each request, texts included")
    http("--no-access-log", dest="access_log", action="store_false", help="log no line for each request")

    text = parser.add_argument_group("at the terminal").add_argument
    text("--prompt", metavar="TEXT", help="continue TEXT here and now instead of serving HTTP")
    text("--max-tokens", type=positive, help="length of the answer; not given: up to 200, as far as the context goes")
    text("--temperature", type=float, default=0.8, help="0: always the most likely token")
    text("--seed", type=int, help="same seed, same text")
    return parser.parse_args(argv)


compact = json.JSONEncoder(separators=(",", ":")).encode


def log(event: str, **fields):
    """One line of JSON on stderr: nothing that a client sends can look like a line of its own."""
    print(json.dumps({"time": round(time.time(), 3), "event": event, **fields}), file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# The engine, here or in a process of its own


def build_engine(args: argparse.Namespace):
    """Load the model and build its Engine. Raises ValueError that says what to change (CheckpointError is one)."""
    import torch

    from engine import Engine
    from model import load_checkpoint, serving_dtype

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no GPU here; leave the flag out to serve on the CPU")
    model = load_checkpoint(args.model, device, serving_dtype(args.dtype, device))
    names = (
        "attention num_blocks block_size max_model_len max_num_seqs token_budget prefill_share prefix_cache quantize"
    )
    names += " policy max_num_partial_prefills max_long_partial_prefills long_prefill_threshold graphs trace check"
    return Engine(model, **{name: getattr(args, name) for name in names.split()})


def engine_process(args: argparse.Namespace, inbox, outbox):
    """What the engine's process runs: its loop, until "stop" or until the HTTP process is gone."""
    try:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # one core is HTTP's: on two, a p99 of 5 ms, not 30
        engine = build_engine(args)
        print(engine.statement(), file=sys.stderr, flush=True)
    except Exception as error:  # whatever it is, one line says it to whoever started the server
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(BrokenPipeError):  # unless whoever it was has gone
            outbox.send_bytes(json.dumps({"op": "fatal", "message": message}).encode())
        return
    from engine import run

    run(engine, inbox, outbox)


def start_engine(args: argparse.Namespace):
    """Start the engine's process. Returns it and our ends of its two pipes."""
    # not a fork, which would inherit our sockets and keep the port open; and CUDA does not survive one
    context = multiprocessing.get_context("spawn")
    inbox, to_engine = context.Pipe(duplex=False)
    from_engine, outbox = context.Pipe(duplex=False)
    process = context.Process(target=engine_process, args=(args, inbox, outbox), daemon=True)
    # A terminal signals both processes, but when to stop is HTTP's to say. The engine's inherits that both are ignored.
    handlers = {sig: signal.signal(sig, signal.SIG_IGN) for sig in (signal.SIGINT, signal.SIGTERM)}
    process.start()
    for sig, handler in handlers.items():
        signal.signal(sig, handler)
    inbox.close(), outbox.close()  # the process has its own: with ours closed, its death is an end of file here
    return process, to_engine, from_engine


class EngineClient:
    """
    The HTTP side of the engine's two pipes, and the table of who waits for what. It belongs to the event loop and
    never blocks it: reading is done when there is something to read, writing by a thread.

        HTTP process  -- add, abort, stop -->  engine process
                      <-- ready, step, error, fatal --

    `start` is called for the engine's process and our ends of its pipes: once, and once more if the engine dies.
    `state` goes loading -> ready -> restarting -> ready -> dead; `info` is the engine's "ready" message, `reason` says
    what happened to it. `capacity` counts the choices that may run and wait together.
    """

    def __init__(self, start: Callable, capacity: int):
        self.start, self.capacity, self.restarts = start, capacity, 1
        self.state, self.info, self.reason = "loading", {}, ""
        self.settled, self.dead = asyncio.Event(), asyncio.Event()  # settled: no longer loading
        self.choices: dict[str, Choice] = {}  # engine's request id -> who waits for its tokens
        self.ids = map(str, itertools.count())  # ours: a client may send the same request_id twice
        self.heard = time.monotonic()
        self.on_stats: Callable[[dict], None] = lambda stats: None
        self._connect()

    def _connect(self):
        self.process, self.to_engine, self.from_engine = self.start()
        self.letters = queue.SimpleQueue()

    def attach(self):
        """Begin to read and write, on the running event loop."""
        asyncio.get_running_loop().add_reader(self.from_engine.fileno(), self._read)
        threading.Thread(target=self._write, args=(self.to_engine, self.letters), daemon=True).start()

    def close(self):
        """Tell the engine to stop, and read no more from it."""
        asyncio.get_running_loop().remove_reader(self.from_engine.fileno())
        self.letters.put({"op": "stop"})
        self.letters.put(None)

    def submit(self, choices: list["Choice"]):
        """Have the choices of one prompt computed."""
        if not self.choices:
            self.heard = time.monotonic()  # an idle engine says nothing: its silence counts from here
        first, id = choices[0], next(self.ids)
        for number, choice in enumerate(choices):
            choice.engine_id = f"{id}.{number}" if number else id  # the engine names its forks so
            self.choices[choice.engine_id] = choice
        request, salt = first.request, first.job.salt
        options = {"n": len(choices), "priority": request.priority, "cache_salt": salt}
        options["prompt_logprobs"] = request.prompt_candidates
        params = request.sampling_params(first.max_tokens)
        self.letters.put({"op": "add", "id": id, "prompt": first.prompt, "params": params, "options": options})

    def abort(self, choice: "Choice") -> bool:
        """Stop a choice's request; what it still sends is dropped. False if it has ended or was never submitted."""
        if not self.choices.pop(choice.engine_id, None):
            return False
        self.letters.put({"op": "abort", "id": choice.engine_id})
        return True

    def fail_all(self, *error):
        """End everything that waits. `error` is the arguments of protocol.ApiError: status, message, ..."""
        for choice in list(self.choices.values()):
            choice.job.fail(*error)

    def is_alive(self) -> bool:
        """The engine's process exists, and if it has work it spoke within STALL_SECONDS."""
        silence = time.monotonic() - self.heard
        return self.state in ("loading", "ready") and (not self.choices or silence < STALL_SECONDS)

    @staticmethod
    def _write(to_engine, letters):
        # a full pipe blocks the writer until the engine reads, which it does once a step
        with contextlib.suppress(OSError):  # the engine is gone: `_read` will say so
            while (letter := letters.get()) is not None:
                to_engine.send_bytes(json.dumps(letter).encode())

    def _read(self):
        """All messages that are there: when this process is behind, the tokens of several steps go out as one event."""
        reader = self.from_engine
        try:
            for _ in range(4):  # not for ever: others have a turn too
                self._take(json.loads(reader.recv_bytes()))
                if self.from_engine is not reader or self.dead.is_set() or not reader.poll():
                    break
        except (EOFError, OSError):
            self._end("the engine's process ended")

    def _take(self, message: dict):
        self.heard = time.monotonic()
        match message["op"]:
            case "step":
                for output in message["out"]:
                    self._output(*output)
                self.on_stats(message["stats"])
            case "ready":
                self.state, self.info = "ready", message
                self.settled.set()
            case "error":
                if choice := self.choices.get(message["id"]):
                    choice.job.fail(400 if message["kind"] == "invalid" else 500, message["message"])
            case "fatal":
                self._end(message["message"], restart=False)

    def _end(self, reason: str, restart: bool = True):
        """The engine is gone: so is all it was working at. The first time, start another one."""
        asyncio.get_running_loop().remove_reader(self.from_engine.fileno())
        restart = restart and self.state == "ready" and self.restarts > 0
        self.reason = f"{reason}, it is started again" if restart else reason
        self.state = "restarting" if restart else "dead"
        self.fail_all(500, self.reason, None, "engine_dead")
        self.letters.put(None)
        if restart:
            log("engine_died", reason=self.reason)
            self.restarts -= 1
            self._connect()
            self.attach()
        else:
            self.settled.set(), self.dead.set()

    def _output(self, id: str, tokens: list[int], finish_reason: str | None, cached_tokens: int, *scores):
        choice = self.choices.get(id)
        if choice is None:  # aborted: this was already under way
            return
        choice.take(tokens, finish_reason, cached_tokens, *scores)
        if finish_reason:
            del self.choices[id]
        elif choice.finish_reason:  # a stop string, which the engine knows nothing of
            self.abort(choice)


# ----------------------------------------------------------------------------------------------------------------------
# The answer to one call


class Choice:
    """One continuation of a prompt: EngineClient puts tokens in, the Job takes text out."""

    def __init__(self, job: "Job", index: int, prompt: list[int], max_tokens: int, first: "Choice | None"):
        self.job, self.index, self.prompt, self.request, self.max_tokens = job, index, prompt, job.request, max_tokens
        self.first = first or self  # of this prompt: it has the prompt's scores
        # to vLLM the end of text is a stop without a reason, and with ignore_eos a token like any other
        self.eos = None if self.request.ignore_eos else job.client.info["eos_token_id"]
        self.engine_id: str | None = None
        self.tokens: list[int] = []  # those that count: none after a stop string
        self.scores: list = []  # one for each token, if asked for
        self.prompt_scores: list | None = None
        self.num_told = self.cached_tokens = 0  # of the answer's tokens, of the prompt's
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # of finish_reason "stop": the stop string or id; None: end of text
        self.is_told = self.end_is_told = False
        self.last_step = 0.0  # when tokens came last
        tokenizer = job.service.tokenizer
        self.token_bytes = tokenizer.token_bytes if self.request.skip_special_tokens else tokenizer.spelled_bytes
        self.text = TextStream(self.token_bytes, [], self.request.include_stop_str_in_output)
        self.counter, self.num_characters = codecs.getincrementaldecoder("utf-8")("replace"), 0
        # an echo is not searched for stop strings, but a character may begin in it and end in the answer
        echo = self.prompt if self.request.echo else []
        self.untold = self.text.decoder.decode(b"".join(map(self.token_bytes, echo)))

    def take(self, tokens: list[int], finish_reason: str | None, cached_tokens: int, score=None, prompt_scores=None):
        """Add what a step brought. With finish_reason "stop" the last token is the one that stopped: it is no text."""
        self.cached_tokens = cached_tokens
        if prompt_scores is not None:
            self.prompt_scores = prompt_scores
        if score is not None:
            self.scores.append(score)
        if self.max_tokens == 0:  # the prompt's scores were all that was wanted
            tokens, finish_reason = [], "length"
        stop_token = tokens[-1] if finish_reason == "stop" else None
        hidden = stop_token is not None and not self.request.include_stop_str_in_output
        for number, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if len(self.tokens) > self.request.min_tokens:
                self.text.stop = self.request.stop
            if not (hidden and number == len(tokens)):
                self.untold += self.text.push(token)
            if self.text.matched is not None:
                break  # the tokens after a stop string do not count
        else:
            if finish_reason:
                self.untold += self.text.flush()
                self.finish_reason = finish_reason
                self.stop_reason = None if stop_token == self.eos else stop_token
        if self.text.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self.text.matched
        self.job.service.metrics.took(self, len(tokens))
        self.job.on_change(self)

    def news(self):
        """
        What the client was not told yet, as protocol.News; None if nothing. Asked only once, after the end, this is
        the answer in one piece.
        """
        from protocol import News

        if self.request.prompt_candidates is not None and not (self.tokens or self.finish_reason):
            return None  # an echo waits for its prompt's scores
        told, self.num_told = self.num_told, len(self.tokens)
        tokens, wants_tokens = self.tokens[told:], self.request.return_token_ids or self.request.candidates is not None
        end_is_news = self.finish_reason is not None and not self.end_is_told
        if not (self.untold or (tokens and wants_tokens) or end_is_news):
            return None
        reasons = (self.finish_reason, self.stop_reason)
        spell = self.job.service.tokenizer.spelled_bytes
        news = News(self.index, self.untold, tokens, *reasons, not self.is_told, self.prompt, spell)
        news.prompt_scores = self.first.prompt_scores
        if self.request.candidates is not None:
            news.scored, news.scores = tokens, self.scores[told : told + len(tokens)]
            if self.request.echo and not self.is_told:
                news.scored = self.prompt + tokens
                news.scores = [None, *(self.first.prompt_scores or []), *news.scores]
            news.offsets = list(map(self._offset, news.scored))
        self.untold, self.is_told, self.end_is_told = "", True, end_is_news
        return news

    def _offset(self, token: int) -> int:
        """Where in the text the token begins, asked for one after the other."""
        offset = self.num_characters
        self.num_characters += len(self.counter.decode(self.token_bytes(token)))
        return offset


class Job:
    """
    The answer to one call, as an ASGI application: whole, or a stream of server-sent events. While a client reads
    slowly `send` waits and tokens gather; they then go out as one event. However it ends, nothing of it goes on
    running in the engine.
    """

    def __init__(self, service: "Service", request, prompts: list[list[int]], limits: list[int], salt: str):
        self.service, self.client, self.request = service, service.client, request
        self.changed, self.error, self.silent, self.salt = asyncio.Event(), None, False, salt
        self.choices: list[Choice] = []
        for prompt, limit in zip(prompts, limits, strict=True):
            first = None
            for _ in range(request.n):
                self.choices.append(choice := Choice(self, len(self.choices), prompt, limit, first))
                first = first or choice
        self.id, self.created = f"{request.id_prefix}{request.request_id or uuid.uuid4().hex}", int(time.time())
        head = {"id": self.id, "object": request.objects[request.stream], "created": self.created}
        self.head = compact(head | {"model": service.name})[:-1]
        self.started, self.num_unfinished = time.monotonic(), len(self.choices)

    async def __call__(self, scope, receive, send):
        self.service.check_room(len(self.choices))  # here: nothing is awaited between this and the submission
        for i in range(0, len(self.choices), self.request.n):
            choices = self.choices[i : i + self.request.n]
            if choices[0].max_tokens or self.request.prompt_candidates is not None:
                self.client.submit(choices)
            else:  # echo of the prompt alone is no work for the engine
                for choice in choices:
                    choice.take([], "length", 0)
        limit = self.service.args.request_seconds
        late = (503, f"not finished within {limit:g} s, what the server allows", None, "timeout", RETRY_SECONDS)
        timer = asyncio.get_running_loop().call_later(limit, self.fail, *late)
        # Two tasks race: one answers, one waits for the client to hang up, which ASGI only tells those who ask.
        answer = asyncio.create_task(self.stream(send) if self.request.stream else self.whole(send))
        gone = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()  # raises what it raised
        finally:
            timer.cancel(), answer.cancel(), gone.cancel()
            self.abort()

    def abort(self):
        for choice in self.choices:
            if self.client.abort(choice):
                self.service.metrics.finished["abort"].inc()

    def fail(self, *error):
        """End the call, all its choices, with ApiError(*error)."""
        from protocol import ApiError

        self.error = self.error or ApiError(*error)
        self.abort()
        self.changed.set()

    def on_change(self, choice: Choice):
        """Called by a choice that took what a step brought."""
        self.num_unfinished -= choice.finish_reason is not None
        if self.request.stream or self.is_done:
            self.changed.set()

    @property
    def is_done(self) -> bool:
        return self.error is not None or self.num_unfinished == 0

    async def whole(self, send):
        await self.changed.wait()
        if self.error:
            raise self.error
        news = [choice.news() for choice in self.choices]
        body = self.body([self.request.whole(n) for n in news], usage=self.usage(), **self.request.outside(news[0]))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def stream(self, send):
        """Headers go out with the first event, so what fails before it still has a status of its own."""
        started = done = False
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        pinger = asyncio.create_task(self.ping())
        try:
            while not done:
                await self.changed.wait()
                if self.error and not started:
                    raise self.error
                # Until `send` nothing is awaited, so no token comes between what is told and what is remembered.
                events = self.events() or (PING if self.silent else b"")  # b"": new text is all held back
                done, self.silent = self.is_done, False
                self.changed.clear()
                if events and not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": not done})
        finally:
            pinger.cancel()

    async def ping(self):
        """Now and then have the stream say something: a timeout for each of its tokens would cost more than a token."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            self.silent = True
            self.changed.set()

    def events(self) -> bytes:
        """All that is new, for each choice; after the last tokens the usage, if asked for, and the end."""
        from protocol import error_body

        no_usage = {"usage": None} if self.request.include_usage else {}
        events = []
        for choice in self.choices:
            if news := choice.news():
                first, *rest = self.request.chunks(news)
                events.append(self.body([first], **self.request.outside(news), **no_usage))
                events += [self.body([chunk], **no_usage) for chunk in rest]
        if self.error:
            events.append(error_body(self.error))
        elif self.is_done:
            events += [self.body([], usage=self.usage())] if self.request.include_usage else []
            events.append(b"[DONE]")
        return b"".join(b"data: " + event + b"\n\n" for event in events)

    def body(self, choices: list[dict], **more) -> bytes:
        return f"{self.head},{compact({'choices': choices} | more)[1:]}".encode()

    def usage(self) -> dict:
        # tokens after a stop string are in no choice.tokens, so nobody is charged for them
        firsts = self.choices[:: self.request.n]
        prompt = sum(len(choice.prompt) for choice in firsts)
        completion = sum(len(choice.tokens) for choice in self.choices)
        cached = {"cached_tokens": sum(choice.cached_tokens for choice in firsts)}
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return counts | {"prompt_tokens_details": cached}


async def client_gone(receive):
    """Returns when the client has closed the connection, or the answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


# ----------------------------------------------------------------------------------------------------------------------
# The HTTP server


class Metrics:
    """What /metrics shows, under vLLM's names, so that its dashboards work."""

    def __init__(self, model_name: str):
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry, self.totals = CollectorRegistry(), {}

        def metric(kind, name: str, about: str, **options):
            return kind(f"vllm:{name}", about, ["model_name"], registry=self.registry, **options).labels(model_name)

        # by their names in Engine.stats()
        self.gauges = {
            "running": metric(Gauge, "num_requests_running", "Choices being computed."),
            "waiting": metric(Gauge, "num_requests_waiting", "Choices waiting for their turn."),
            "kv_usage": metric(Gauge, "kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0..1."),
        }
        self.counters = {
            "queries": metric(Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            "hits": metric(Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            "preemptions": metric(Counter, "num_preemptions", "Requests sent back to the queue for lack of blocks."),
        }
        self.prompt_tokens = metric(Counter, "prompt_tokens", "Prompt tokens computed or found.")
        self.generation_tokens = metric(Counter, "generation_tokens", "Tokens generated.")
        bounds = [m * 10**e for e in range(-3, 3) for m in (1, 2.5, 5)]  # 1 ms .. 500 s
        timing = partial(metric, Histogram, buckets=bounds)
        self.first_token = timing("time_to_first_token_seconds", "From the request to its first token.")
        self.inter_token = timing("inter_token_latency_seconds", "From one token of a choice to the next.")
        self.latency = timing("e2e_request_latency_seconds", "From the request to its last token.")
        self.queue_time = timing("request_queue_time_seconds", "From the request to its first step.")
        labels = ["model_name", "finished_reason"]
        success = Counter("vllm:request_success", "Choices finished, and how.", labels, registry=self.registry)
        self.finished = {reason: success.labels(model_name, reason) for reason in ("stop", "length", "abort")}

    def took(self, choice: Choice, num_tokens: int):
        """A choice took so many tokens of a step."""
        now, before, choice.last_step = time.monotonic(), choice.last_step, time.monotonic()
        self.generation_tokens.inc(num_tokens)
        if before:
            self.inter_token.observe((now - before) / max(1, num_tokens))
        else:
            self.first_token.observe(now - choice.job.started)
            self.prompt_tokens.inc(len(choice.prompt) if choice.first is choice else 0)
        if choice.finish_reason:
            self.finished[choice.finish_reason].inc()
            self.latency.observe(now - choice.job.started)

    def update(self, stats: dict):
        """Take in Engine.stats(). Its totals begin at 0 again when the engine is started again, ours must not."""
        for name, gauge in self.gauges.items():
            gauge.set(stats[name])
        for name, counter in self.counters.items():
            new, self.totals[name] = stats[name] - self.totals.get(name, 0), stats[name]
            counter.inc(new if new >= 0 else stats[name])
        for waited in stats["waited"]:
            self.queue_time.observe(waited)


class Service:
    """What all requests share: the engine's client, the tokenizer, the flags, and whether new work is taken."""

    def __init__(
        self, client: EngineClient, tokenizer, args: argparse.Namespace, chat_template: Callable | None = None
    ):
        self.client, self.tokenizer, self.args, self.chat_template = client, tokenizer, args, chat_template
        self.name, self.created = args.served_model_name or args.model, int(time.time())
        self.metrics, self.draining = Metrics(self.name), False
        client.on_stats = self.metrics.update

    def check_ready(self):
        """Raises ApiError (503) while the server takes no work: it is loading, draining or dead."""
        from protocol import ApiError

        state = "draining" if self.draining else self.client.state
        if state != "ready":
            why = self.client.reason if state in ("restarting", "dead") else "try again later"
            raise ApiError(503, f"the server is {state}: {why}", None, state, RETRY_SECONDS)

    def check_room(self, count: int):
        """Raises ApiError for `count` choices more than the queue can take: now (429), or ever (400)."""
        from protocol import ApiError

        self.check_ready()  # again: the engine may have died while the prompts were encoded
        waiting, capacity = len(self.client.choices), self.client.capacity
        if count > capacity:
            raise ApiError(400, f"{count} prompts x n in one call, at most {capacity} are taken: split it", "prompt")
        if count + waiting > capacity:
            message = f"{count} prompts x n beside {waiting} in work are more than {capacity}: try again later"
            raise ApiError(429, message, None, "queue_full", RETRY_SECONDS)

    def check_model(self, name: str | None):
        from protocol import ApiError

        self.check_ready()
        if name not in (None, self.name):
            message = f"there is no model {name!r:.200} here; there is {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def complete(self, request, salt: str) -> Job:
        """The answer to a CompletionRequest. Raises ApiError."""
        self.check_model(request.model)
        self.check_room(len(request.prompt) * request.n)  # before they are encoded: a million prompts take seconds
        return await self.job(request, salt, sum(map(len, request.prompt)), self.encode, request.prompt)

    async def chat(self, request, salt: str) -> Job:
        """The answer to a ChatRequest. Raises ApiError."""
        self.check_model(request.model)
        self.check_room(request.n)
        size, what = sum(len(m.content) for m in request.messages), (request.messages, request.add_generation_prompt)
        return await self.job(request, salt, size, self.encode_chat, *what)

    async def job(self, request, salt: str, size: int, encode: Callable, *what) -> Job:
        prompts = await self.encoded(size, encode, *what)
        info = self.client.info
        limits = request.check_fits(prompts, info["vocab_size"], info["max_model_len"], info["eos_token_id"])
        job = Job(self, request, prompts, limits, f"{salt}:{request.cache_salt or ''}")
        if self.args.log_requests:
            log("request", id=job.id, **request.model_dump(exclude_defaults=True))
        return job

    async def encoded(self, size: int, encode: Callable, *what):
        """encode(*what), in a thread if the texts are long. Raises ApiError for what the tokenizer does not know."""
        from protocol import ApiError

        try:
            return await asyncio.to_thread(encode, *what) if size > SHORT_TEXT else encode(*what)
        except ValueError as error:
            raise ApiError(400, str(error), "messages" if encode == self.encode_chat else "prompt") from None

    def encode(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """Token ids of each prompt. Raises ValueError for text that the tokenizer does not know."""
        return [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def encode_chat(self, messages: list, add_generation_prompt: bool) -> list[list[int]]:
        """The conversation as one prompt; what the template writes may name control tokens."""
        if self.chat_template is None:
            raise ValueError(f"{self.name} has no chat template: use /v1/completions, or put one into the checkpoint")
        plain = [message.model_dump(exclude_none=True) for message in messages]
        text = self.chat_template(messages=plain, add_generation_prompt=add_generation_prompt)
        if not (ids := self.tokenizer.encode(text, allow_special=True)):
            raise ValueError("the chat template makes no text of this conversation")
        return [ids]

    async def run(self, sock: socket.socket) -> str | None:
        """Serve until a signal or until the engine is gone for good. Returns what went wrong, None if nothing did."""
        import uvicorn

        flags = {"log_level": "error", "access_log": False, "lifespan": "off", "ws": "none", "http": connection(self)}
        config = uvicorn.Config(create_app(self), timeout_graceful_shutdown=LINGER_SECONDS, **flags)
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)
        self.server, self.loop = uvicorn.Server(config), asyncio.get_running_loop()
        self.server.handle_exit = lambda *_: self.loop.call_soon_threadsafe(self.stop)  # ours drains first
        # HTTP is served while the model loads, so that a supervisor can tell "loading" from "dead"
        self.client.attach()
        watching = asyncio.create_task(self._watch(sock))
        await self.server.serve(sockets=[sock])
        watching.cancel()
        self.client.close()
        return self.client.reason or None if self.client.state == "dead" else None

    async def _watch(self, sock: socket.socket):
        """Greet when the engine is ready, and end the server with it."""
        await self.client.settled.wait()
        if self.client.state == "ready" and not self.draining:
            print(greeting(self.name, sock), flush=True)
        await self.client.dead.wait()
        self.server.should_exit = True

    def stop(self):
        """The first time: take no new work and let what runs finish, for a while. The second: the while is over."""
        if self.draining:
            self.deadline = 0.0
            return
        self.draining, self.deadline = True, time.monotonic() + self.args.drain_seconds
        if running := len(self.client.choices):
            print(f"finishing {running} requests; a second signal ends them", file=sys.stderr)
        self.drainer = asyncio.create_task(self._drain())  # kept: the loop itself holds tasks weakly

    async def _drain(self):
        while self.client.choices and time.monotonic() < self.deadline:
            await asyncio.sleep(0.02)
        self.client.fail_all(503, "the server stopped before this was finished", None, "stopping", RETRY_SECONDS)
        self.server.should_exit = True  # uvicorn closes its sockets and waits until the last answers are out


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """Calls that LINGER_SECONDS cut off, because a client stopped reading or sending, are worth no traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def connection(service: Service):
    """
    The class of a client's connection: uvicorn's, cut off when it takes longer than --client-seconds to send a whole
    request or to read what waits for it, and when there are too many. What it was computing ends with it.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Connection(HttpToolsProtocol):
        def connection_made(self, transport):
            super().connection_made(transport)
            self.sending = self.reading = None  # timers: of the client's request, of our answer
            self.in_head, self.head_size = False, 0
            if len(self.connections) > service.args.max_connections:
                return transport.abort()
            self.sending = self.cut_off_later()

        def cut_off_later(self):
            return self.loop.call_later(service.args.client_seconds, self.transport.abort)

        def data_received(self, data):
            self.sending = self.sending or self.cut_off_later()
            super().data_received(data)
            self.head_size += len(data) if self.in_head else 0
            if self.head_size > MAX_HEAD:
                self.transport.abort()

        def on_message_begin(self):
            super().on_message_begin()
            self.in_head, self.head_size = True, 0

        def on_headers_complete(self):
            self.in_head = False
            super().on_headers_complete()

        def on_message_complete(self):
            super().on_message_complete()
            self.sending = self.sending and self.sending.cancel()

        def pause_writing(self):
            super().pause_writing()
            self.reading = self.reading or self.cut_off_later()

        def resume_writing(self):
            super().resume_writing()
            self.reading = self.reading and self.reading.cancel()

        def timeout_keep_alive_handler(self):
            super().timeout_keep_alive_handler()  # which waits until the client has read all
            self.reading = self.reading or self.cut_off_later()

        def connection_lost(self, exc):
            super().connection_lost(exc)
            for timer in (self.sending, self.reading):
                if timer:
                    timer.cancel()

    return Connection


class Gate:
    """
    ASGI middleware around everything: who may come in, how large a body may be, and a line of log for each request.
    """

    def __init__(self, app, service: Service):
        self.app, self.args = app, service.args
        self.salts = {hashlib.sha256(key.encode()).digest(): f"key {i}" for i, key in enumerate(api_keys(self.args))}
        self.hosts = {"localhost", self.args.host.lower(), *map(str.lower, self.args.allowed_hosts)}
        self.limit = self.args.max_body_mib * 2**20

    async def __call__(self, scope, receive, send):
        from protocol import ApiError, error_response

        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, size, status = time.perf_counter(), 0, 0

        async def counted():  # since a chunked body announces no length and an announced one need not be true
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                what = f"the body has more than {int(self.limit)} bytes"
                raise ApiError(413, f"{what}: shorten it or raise --max-body-mib")
            return message

        async def noted(message):
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            scope.setdefault("state", {})["salt"] = self.admit(scope)
            await self.app(scope, counted, noted)
        except ApiError as error:
            await error_response(error)(scope, receive, noted)
        finally:
            if self.args.access_log and scope["path"] not in OPEN_PATHS:
                ms = round(1000 * (time.perf_counter() - started), 1)
                client, path = (scope.get("client") or [None])[0], scope["path"][:200]
                log("access", client=client, method=scope["method"], path=path, status=status, ms=ms)

    def admit(self, scope) -> str:
        """The salt of the client's part of the prefix cache. Raises ApiError (401, 403)."""
        from protocol import ApiError

        values = dict(scope["headers"])
        host = host_name(values.get(b"host", b""))
        # A page in a browser can reach us under a name of its own that it made point here: no name but ours is served.
        # With a key this gains it nothing.
        if not (self.salts or host in self.hosts or is_address(host)):
            raise ApiError(403, f"the Host {host!r:.200} is not served here: --allowed-hosts adds names")
        if (origin := values.get(b"origin")) is not None and host_name(origin.partition(b"://")[2]) != host:
            raise ApiError(403, "pages of another origin are not served here")
        if not self.salts or scope["path"] in OPEN_PATHS:
            return ""
        scheme, _, key = values.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else b""
        salts = [salt for digest, salt in self.salts.items() if hmac.compare_digest(digest, given)]
        if not salts:
            error = ApiError(401, "send a valid API key: Authorization: Bearer KEY", None, "invalid_api_key")
            error.headers = {"WWW-Authenticate": "Bearer"}
            raise error
        return salts[0]


def api_keys(args: argparse.Namespace) -> list[str]:
    """The keys of --api-key-file, one a line, or the one in the environment. Raises ValueError or OSError."""
    if args.api_key_file is None:
        return [os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else []
    with open(args.api_key_file, encoding="utf-8") as f:
        keys = [line.strip() for line in f if line.strip()]
    if not keys:
        raise ValueError(f"--api-key-file {args.api_key_file} has no key in it: write one a line")
    return keys


def host_name(value: bytes) -> str:
    """The name in a Host header: without the port, and without the brackets of an IPv6 address."""
    text = value.decode("latin-1").lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.rpartition(":")[0] or text


def is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def create_app(service: Service):
    """The FastAPI application: the routes that compute something."""
    from fastapi import FastAPI, Request
    from fastapi.responses import Response

    import protocol

    class Answer(Response):
        """A Job as FastAPI wants it: only what is a Response is handed on as it is."""

        def __init__(self, job: Job):
            self.job, self.background = job, None

        async def __call__(self, scope, receive, send):
            await self.job(scope, receive, send)

    statuses = (400, 401, 403, 404, 413, 429, 500, 503)
    errors = {status: {"model": protocol.ErrorAnswer} for status in statuses}
    events = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
    # without FastAPI's documentation pages, which load scripts from elsewhere; /openapi.json says the same
    app = FastAPI(title="pagedGPT", docs_url=None, redoc_url=None, redirect_slashes=False, responses=errors)
    shape_errors(app)
    add_state(app, service)
    app.add_middleware(Gate, service=service)

    @app.post("/v1/completions", response_model=protocol.CompletionAnswer, responses=events)
    async def completions(request: protocol.CompletionRequest, http: Request):
        return Answer(await service.complete(request, http.state.salt))

    @app.post("/v1/chat/completions", response_model=protocol.ChatAnswer, responses=events)
    async def chat_completions(request: protocol.ChatRequest, http: Request):
        return Answer(await service.chat(request, http.state.salt))

    @app.post("/tokenize", response_model=protocol.TokenizeAnswer)
    async def tokenize(request: protocol.TokenizeRequest):
        service.check_model(request.model)
        if request.messages:
            what = service.encode_chat, request.messages, request.add_generation_prompt
        else:
            what = service.encode, [request.prompt]
        (ids,) = await service.encoded(SHORT_TEXT + 1, *what)
        names = [protocol.token_name(service.tokenizer.spelled_bytes(i)) for i in ids]
        limit = service.client.info["max_model_len"]
        named = {"token_strs": names if request.return_token_strs else None}
        return {"count": len(ids), "max_model_len": limit, "tokens": ids} | named

    @app.post("/detokenize", response_model=protocol.DetokenizeAnswer)
    async def detokenize(request: protocol.DetokenizeRequest):
        service.check_model(request.model)
        V = service.client.info["vocab_size"]
        if max(request.tokens, default=0) >= V:
            message = f"token id {max(request.tokens)} is outside the vocabulary, 0..{V - 1}"
            raise protocol.ApiError(400, message, "tokens")
        return {"prompt": b"".join(map(service.tokenizer.spelled_bytes, request.tokens)).decode("utf-8", "replace")}

    return app


def add_state(app, service: Service):
    """The routes that tell how the server is."""
    from fastapi.responses import PlainTextResponse

    from protocol import ApiError

    @app.get("/v1/models")
    async def models() -> dict:
        service.check_ready()
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "pagedgpt"}
        return {"object": "list", "data": [model | {"max_model_len": service.client.info["max_model_len"]}]}

    @app.get("/readyz")
    @app.get("/health")
    async def ready() -> dict[str, str]:
        service.check_ready()
        return {"status": "ready"}

    @app.get("/livez")
    async def alive() -> dict[str, str]:
        if not service.client.is_alive():
            reason = service.client.reason or f"no step in {STALL_SECONDS} s"
            raise ApiError(503, f"the engine is not alive: {reason}", None, "dead")
        return {"status": "alive"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics():
        from prometheus_client import generate_latest

        return PlainTextResponse(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")


def shape_errors(app):
    """Give every error OpenAI's shape: ours, the framework's 404 and 405, pydantic's findings, and bugs."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    from protocol import ApiError, error_response, validation_error

    @app.exception_handler(HTTPException)
    async def refuse(request, error):
        if error.status_code in (404, 405) and not isinstance(error, ApiError):
            error.detail = f"there is no {request.method} {request.url.path} here; /openapi.json lists what there is"
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request, error):
        return error_response(validation_error(error.errors()))

    # Starlette raises the exception again after this answer, so its traceback is still in the log.
    @app.exception_handler(Exception)
    async def admit_a_bug(request, error):
        return error_response(ApiError(500, f"a bug of this server: {type(error).__name__}"))


def listen(args: argparse.Namespace) -> socket.socket:
    """Open the listening socket before anything is loaded. Exits with one message if it cannot be had."""
    if not 0 <= args.port < 65536:  # getaddrinfo would take it modulo 65536
        sys.exit(f"--port {args.port} does not exist: choose 0 to 65535")
    local = args.host == "localhost" or (is_address(args.host) and ipaddress.ip_address(args.host).is_loopback)
    if not (local or api_keys(args) or args.allow_remote):  # what other names resolve to may change
        how = f"set ${KEY_VARIABLE} or --api-key-file, or add --allow-remote"
        sys.exit(f"--host {args.host} opens the model to other machines, without a password: {how} if so")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)  # asyncio spares only sockets that say TCP the 40 ms of Nagle
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # take over from a server that just ended
        sock.bind(address)
        sock.listen(128)  # from here on a second server at this port fails
    except (OSError, OverflowError) as error:
        sys.exit(f"cannot listen at {args.host}:{args.port} ({error}): stop what is there, or choose another --port")
    return sock


def greeting(name: str, sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    example = """{"prompt": "def ", "max_tokens": 32}"""
    return f"""serving {name} at {url}
    curl {url}/v1/completions -H 'Content-Type: application/json' -d '{example}'"""


def run_on_loop(main):
    """asyncio.run, on uvloop where it is installed: a quarter more tokens a second at 32 streams on 2 cores."""
    import uvicorn

    with asyncio.Runner(loop_factory=uvicorn.Config(None).get_loop_factory()) as runner:
        return runner.run(main)


def serve_http(args: argparse.Namespace) -> str | None:
    """Serve until a signal. Returns None for exit code 0, or the message of what went wrong."""
    try:  # found missing now, not after the model is loaded
        import httptools  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401

        import protocol  # noqa: F401
    except ImportError as error:
        packages = "fastapi uvicorn httptools prometheus-client jinja2"
        return f"{error.name} is missing: `pip install {packages}` to serve HTTP, or use --prompt without it"
    gc.set_threshold(50_000)  # a body of a million lists is read in 0.2 s, not in 0.6, with nobody served meanwhile
    sock = listen(args)
    tokenizer, chat_template = load_tokenizer(args.model), load_chat_template(args.model)
    client = EngineClient(partial(start_engine, args), (args.max_num_seqs or 256) + args.max_queue)
    try:
        return run_on_loop(Service(client, tokenizer, args, chat_template).run(sock))
    finally:
        client.process.join(5 if client.state == "ready" else 0)  # one that is loading does not hear us
        client.process.kill()


# ----------------------------------------------------------------------------------------------------------------------
# At the terminal


def complete_at_terminal(args: argparse.Namespace):
    """Continue --prompt on stdout as the tokens come, with the engine in this process; Ctrl-C ends it."""
    from sampling import SamplingParams

    tokenizer, engine = load_tokenizer(args.model), build_engine(args)
    prompt = tokenizer.encode(args.prompt)
    room = max(1, min(200, engine.max_model_len - len(prompt)))
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens or room, seed=args.seed)
    engine.add_request("terminal", prompt, params)
    text, started, count = TextStream(tokenizer.token_bytes), time.perf_counter(), 0
    print(args.prompt, end="", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while engine.has_work:
            for output in engine.step():
                if output.error:
                    raise RuntimeError(output.error)
                count += len(output.tokens)
                print("".join(map(text.push, output.tokens)), end="", flush=True)
    print(text.flush())
    print(f"[{count} tokens, {count / (time.perf_counter() - started):.1f} a second]", file=sys.stderr)


def main(argv: list[str] | None = None):
    # Read when torch loads OpenMP: threads that wait spin less before they sleep, as HTTP needs the cores too.
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")
    # oneDNN keeps code for each number of rows it has met: without a limit that is 500 MB after a minute of mixed load.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "64")
    args = parse_args(argv)
    try:
        problem = serve_http(args) if args.prompt is None else complete_at_terminal(args)
    except (ValueError, RuntimeError, OSError) as error:  # no model, a broken one, or flags that do not go together
        problem = str(error)
    except KeyboardInterrupt:
        problem = "interrupted"
    sys.exit(problem)


if __name__ == "__main__":
    main()
