"""
Serve a trained model as vLLM would: OpenAI's HTTP interface in front, the paged engine in a process of its own.

    python serve.py                                     # out/stdlib at http://127.0.0.1:8000
    python serve.py --model out/shakespeare_char --port 9000
    python serve.py --prompt "def " --max-tokens 100    # no HTTP: continues the text at the terminal

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def "}'

The way of a request: `create_app` checks it (the rules are in protocol.py), a `Job` is its answer, with one `Choice`
for each prompt; `EngineClient` carries token ids to the engine's process and back, and a `TextStream` makes them text.
The HTTP packages are imported where they are used, so that neither `--prompt` nor the engine's process needs them, and
torch only in `build_engine`, so that the HTTP process stays small and never waits for a step.
"""

import argparse
import asyncio
import codecs
import contextlib
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

from tokenizer import load_tokenizer

PING_SECONDS = 10  # a stream that has nothing to say says so this often, or proxies take it for dead
STALL_SECONDS = 120  # an engine with work and no word for so long is not alive
LINGER_SECONDS = 2  # when the server stops, how long clients have to send or to fetch what is left
RETRY_SECONDS = 1  # what Retry-After advises
PING = b": ping\n\n"


def at_least(least: int, number: type = int) -> Callable:
    """The type of flags that count or measure something; argparse makes its errors messages."""

    def parse(text: str):
        if not number(text) >= least:  # not <, of which NaN is none either
            raise argparse.ArgumentTypeError(f"{text} is too small, wanted at least {least}")
        return number(text)

    parse.__name__ = number.__name__  # argparse: "invalid int value"
    return parse


positive = at_least(1)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    about = "Serve a trained model over HTTP, or continue a --prompt at the terminal."
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default="out/stdlib", help="checkpoint directory, of train.py or of a GPT-2 downloaded from the hub")
    add("--device", help="cpu, cuda, cuda:1; not given: a GPU where there is one")
    # the engine's own options: each `dest` is the name of an argument of Engine
    add("--attention", default="auto", help="attention backend; auto takes the fastest that works here")
    add("--kv-blocks", dest="num_blocks", type=positive, help="KV blocks in the pool; not given: all that are useful")
    add("--block-size", type=positive, default=16, help="tokens in a KV block")
    add("--max-model-len", type=positive, help="longest prompt plus answer, in tokens; not given: what fits")
    add("--max-num-seqs", type=positive, default=64, help="requests that run at once")
    add("--token-budget", type=positive, default=512, help="tokens computed in one step, prefill and decode together")
    add("--prefill-share", type=float, default=0.25, help="of that budget, for prompts while some are under way")
    add("--no-prefix-cache", dest="prefix_cache", action="store_false", help="compute each prompt from its first token")
    add("--trace", action="store_true", help="print what each step does")
    add("--check", action="store_true", help="verify the scheduler's invariants after each step")

    http = parser.add_argument_group("HTTP").add_argument
    http("--host", default="127.0.0.1", help="address to listen at")
    http("--port", type=int, default=8000, help="port to listen at; 0: any free one")
    http("--allow-remote", action="store_true", help="let --host be an address that other machines reach: no password")
    http("--served-model-name", help="the model's name in the API; not given: what --model says")
    http("--max-queue", type=at_least(0), default=256, help="prompts that may wait for their turn; more are a 429")
    http("--max-body-mib", type=at_least(0, float), default=4.0, help="largest request body; a larger one is a 413")
    http("--drain-seconds", type=at_least(0, float), default=30.0, help="how long SIGTERM lets running requests go on")

    text = parser.add_argument_group("at the terminal").add_argument
    text("--prompt", metavar="TEXT", help="continue TEXT here and now instead of serving HTTP")
    text("--max-tokens", type=positive, help="length of the answer; not given: up to 200, as far as the context goes")
    text("--temperature", type=float, default=0.8, help="0: always the most likely token")
    text("--seed", type=int, help="same seed, same text")
    return parser.parse_args(argv)


# ----------------------------------------------------------------------------------------------------------------------
# Tokens to text


# ----------------------------------------------------------------------------------------------------------------------
# The engine, here or in a process of its own


def build_engine(args: argparse.Namespace):
    """Load the model and build its Engine. Raises ValueError that says what to change (CheckpointError is one)."""
    import torch

    from engine import Engine
    from model import load_checkpoint

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no GPU here; leave the flag out to serve on the CPU")
    model = load_checkpoint(args.model, device, torch.float32 if device == "cpu" else torch.bfloat16)
    names = "attention num_blocks block_size max_model_len max_num_seqs token_budget prefill_share prefix_cache"
    return Engine(model, **{name: getattr(args, name) for name in [*names.split(), "trace", "check"]})


def engine_process(args: argparse.Namespace, inbox, outbox):
    """What the engine's process runs: its loop, until "stop" or until the HTTP process is gone."""
    try:
        engine = build_engine(args)
    except Exception as error:  # whatever it is, one line says it to whoever started the server
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(BrokenPipeError):  # unless whoever it was has gone
            outbox.send_bytes(json.dumps({"op": "fatal", "message": message}).encode())
        return
    from engine import run

    run(engine, inbox, outbox)


def start_engine(args: argparse.Namespace):
    """Start the engine's process. Returns it and the EngineClient that talks to it."""
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
    return process, EngineClient(to_engine, from_engine, args.max_num_seqs + args.max_queue)


class EngineClient:
    """
    The HTTP side of the engine's two pipes, and the table of who waits for what. It belongs to the event loop and
    never blocks it: reading is done when there is something to read, writing by a thread.

        HTTP process  -- add, abort, stop -->  engine process
                      <-- ready, step, error, fatal --

    `state` goes loading -> ready -> dead; `info` is the engine's "ready" message, `reason` says why it is dead.
    `capacity` counts the choices that may run and wait together.
    """

    def __init__(self, to_engine, from_engine, capacity: int):
        self.to_engine, self.from_engine, self.capacity = to_engine, from_engine, capacity
        self.state, self.info, self.reason = "loading", {}, ""
        self.settled = asyncio.Event()  # no longer loading
        self.choices: dict[str, Choice] = {}  # engine's request id -> who waits for its tokens
        self.ids = map(str, itertools.count())  # ours: a client may send the same request_id twice
        self.heard = time.monotonic()
        self.letters = queue.SimpleQueue()

    def attach(self):
        """Begin to read and write, on the running event loop."""
        asyncio.get_running_loop().add_reader(self.from_engine.fileno(), self._read)
        threading.Thread(target=self._write, daemon=True).start()

    def close(self):
        """Tell the engine to stop, and read no more from it."""
        asyncio.get_running_loop().remove_reader(self.from_engine.fileno())
        self.letters.put({"op": "stop"})
        self.letters.put(None)

    def submit(self, choice: "Choice"):
        if not self.choices:
            self.heard = time.monotonic()  # an idle engine says nothing: its silence counts from here
        choice.engine_id = next(self.ids)
        self.choices[choice.engine_id] = choice
        params = choice.request.sampling_params()
        self.letters.put({"op": "add", "id": choice.engine_id, "prompt": choice.prompt, "params": params})

    def abort(self, choice: "Choice"):
        """Stop a choice's request; what it still sends is dropped. No error if it has ended or was never submitted."""
        if self.choices.pop(choice.engine_id, None):
            self.letters.put({"op": "abort", "id": choice.engine_id})

    def fail_all(self, *error):
        """End everything that waits. `error` is the arguments of protocol.ApiError: status, message, ..."""
        for choice in list(self.choices.values()):
            self.abort(choice)
            choice.job.fail(*error)

    def is_alive(self) -> bool:
        """The engine's process exists, and if it has work it spoke within STALL_SECONDS."""
        silence = time.monotonic() - self.heard
        return self.state != "dead" and (not self.choices or silence < STALL_SECONDS)

    def _write(self):
        # a full pipe blocks the writer until the engine reads, which it does once a step
        with contextlib.suppress(OSError):  # the engine is gone: `_read` will say so
            while (letter := self.letters.get()) is not None:
                self.to_engine.send_bytes(json.dumps(letter).encode())

    def _read(self):
        """One message from the engine; the event loop calls again while there are more."""
        try:
            message = json.loads(self.from_engine.recv_bytes())
        except (EOFError, OSError):
            message = {"op": "fatal", "message": "the engine's process ended, the server must be restarted"}
        self.heard = time.monotonic()
        match message["op"]:
            case "step":
                for output in message["out"]:
                    self._output(*output)
            case "ready":
                self.state, self.info = "ready", message
                self.settled.set()
            case "error":
                if choice := self.choices.pop(message["id"], None):
                    choice.job.fail(400 if message["kind"] == "invalid" else 500, message["message"])
            case "fatal":
                asyncio.get_running_loop().remove_reader(self.from_engine.fileno())
                self.state, self.reason = "dead", message["message"]
                self.fail_all(500, self.reason, None, "engine_dead")
                self.settled.set()

    def _output(self, id: str, tokens: list[int], finish_reason: str | None, cached_tokens: int):
        choice = self.choices.get(id)
        if choice is None:  # aborted: this was already under way
            return
        choice.take(tokens, finish_reason, cached_tokens)
        if finish_reason:
            del self.choices[id]
        elif choice.finish_reason:  # a stop string, which the engine knows nothing of
            self.abort(choice)


# ----------------------------------------------------------------------------------------------------------------------
# One call of /v1/completions


class Choice:
    """One prompt of a Job and what the engine made of it. EngineClient puts tokens in, the Job takes text out."""

    def __init__(self, job: "Job", index: int, prompt: list[int]):
        self.job, self.index, self.prompt, self.request = job, index, prompt, job.request
        # to vLLM the end of text is a stop without a reason, and with ignore_eos a token like any other
        self.eos = None if self.request.ignore_eos else job.client.info["eos_token_id"]
        self.engine_id: str | None = None
        self.tokens: list[int] = []  # those that count: none after a stop string
        self.num_told = self.cached_tokens = 0  # of the answer's tokens, of the prompt's
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None  # of finish_reason "stop": the stop string or id; None: end of text
        self.end_is_told = False
        token_bytes = job.service.tokenizer.token_bytes
        self.text = TextStream(token_bytes, self.request.stop, self.request.include_stop_str_in_output)
        # an echo is not searched for stop strings, but a character may begin in it and end in the answer
        echo = self.prompt if self.request.echo else []
        self.untold = self.text.decoder.decode(b"".join(map(token_bytes, echo)))

    def take(self, tokens: list[int], finish_reason: str | None, cached_tokens: int):
        """Add what a step brought. With finish_reason "stop" the last token is the one that stopped: it is no text."""
        self.cached_tokens = cached_tokens
        stop_token = tokens[-1] if finish_reason == "stop" else None
        hidden = stop_token is not None and not self.request.include_stop_str_in_output
        for number, token in enumerate(tokens, 1):
            self.tokens.append(token)
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
        self.job.on_change()

    def news(self) -> dict | None:
        """
        What the client was not told yet, as a CompletionChoice; None if nothing. Asked only once, after the end, this
        is the answer in one piece.
        """
        ids = self.tokens[self.num_told :] if self.request.return_token_ids else []
        end_is_news = self.finish_reason is not None and not self.end_is_told
        if not (self.untold or ids or end_is_news):
            return None
        news = {"index": self.index, "text": self.untold, "logprobs": None}
        news |= {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}
        if self.request.return_token_ids:
            news |= {"token_ids": ids} | ({} if self.num_told else {"prompt_token_ids": self.prompt})
        self.untold, self.num_told, self.end_is_told = "", len(self.tokens), end_is_news
        return news


class Job:
    """
    The answer to one call, as an ASGI application: whole, or a stream of server-sent events. While a client reads
    slowly `send` waits and tokens gather; they then go out as one event. However it ends, nothing of it goes on
    running in the engine.
    """

    def __init__(self, service: "Service", request, prompts: list[list[int]]):
        self.service, self.client, self.request = service, service.client, request
        self.changed, self.error = asyncio.Event(), None
        self.choices = [Choice(self, index, prompt) for index, prompt in enumerate(prompts)]
        self.id, self.created = f"cmpl-{request.request_id or uuid.uuid4().hex}", int(time.time())

    async def __call__(self, scope, receive, send):
        self.service.check_room(len(self.choices))  # here: nothing is awaited between this and the submission
        for choice in self.choices:
            if self.request.max_tokens:
                self.client.submit(choice)
            else:  # echo of the prompt alone is no work for the engine
                choice.take([], "length", 0)
        # Two tasks race: one answers, one waits for the client to hang up, which ASGI only tells those who ask.
        answer = asyncio.create_task(self.stream(send) if self.request.stream else self.whole(send))
        gone = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()  # raises what it raised
        finally:
            answer.cancel(), gone.cancel()
            for choice in self.choices:
                self.client.abort(choice)

    def fail(self, *error):
        """End the call, all its prompts, with ApiError(*error)."""
        from protocol import ApiError

        self.error = ApiError(*error)
        self.changed.set()

    def on_change(self):
        if self.request.stream or self.is_done:
            self.changed.set()

    @property
    def is_done(self) -> bool:
        return self.error is not None or all(choice.finish_reason for choice in self.choices)

    async def whole(self, send):
        await self.changed.wait()
        if self.error:
            raise self.error
        body = self.body([choice.news() for choice in self.choices], usage=self.usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def stream(self, send):
        """Headers go out with the first event, so what fails before it still has a status of its own."""
        started = done = False
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        while not done:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_SECONDS):
                    await self.changed.wait()
            if self.error and not started:
                raise self.error
            # From here to `send` nothing is awaited, so no token comes between what is told and what is remembered.
            events = self.events() or (b"" if self.changed.is_set() else PING)  # b"": new text is all held back
            done = self.is_done
            self.changed.clear()
            if events and not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": not done})

    def events(self) -> bytes:
        """All that is new, one event for each choice; after the last tokens the usage, if asked for, and the end."""
        from protocol import error_body

        no_usage = {"usage": None} if self.request.include_usage else {}
        events = [self.body([news], **no_usage) for choice in self.choices if (news := choice.news())]
        if self.error:
            events.append(error_body(self.error))
        elif self.is_done:
            events += [self.body([], usage=self.usage())] if self.request.include_usage else []
            events.append(b"[DONE]")
        return b"".join(b"data: " + event + b"\n\n" for event in events)

    def body(self, choices: list[dict], **usage) -> bytes:
        from protocol import CompletionAnswer

        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.service.name}
        return CompletionAnswer(**head, choices=choices, **usage).model_dump_json(exclude_unset=True).encode()

    def usage(self) -> dict:
        # tokens after a stop string are in no choice.tokens, so nobody is charged for them
        prompt = sum(len(choice.prompt) for choice in self.choices)
        completion = sum(len(choice.tokens) for choice in self.choices)
        cached = {"cached_tokens": sum(choice.cached_tokens for choice in self.choices)}
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return counts | {"prompt_tokens_details": cached}


async def client_gone(receive):
    """Returns when the client has closed the connection, or the answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


# ----------------------------------------------------------------------------------------------------------------------
# The HTTP server


class Service:
    """What all requests share: the engine's client, the tokenizer, the flags, and whether new work is taken."""

    def __init__(self, client: EngineClient, tokenizer, args: argparse.Namespace):
        self.client, self.tokenizer, self.args = client, tokenizer, args
        self.name, self.created = args.served_model_name or args.model, int(time.time())
        self.draining = False

    def check_ready(self):
        """Raises ApiError (503) while the server takes no work: it is loading, draining or dead."""
        from protocol import ApiError

        state = "draining" if self.draining else self.client.state
        if state != "ready":
            why = self.client.reason if state == "dead" else "try again later"
            raise ApiError(503, f"the server is {state}: {why}", None, state, RETRY_SECONDS)

    def check_room(self, count: int):
        """Raises ApiError for `count` prompts more than the queue can take: now (429), or ever (400)."""
        from protocol import ApiError

        self.check_ready()  # again: the engine may have died while the prompts were encoded
        waiting, capacity = len(self.client.choices), self.client.capacity
        if count > capacity:
            raise ApiError(400, f"{count} prompts in one call, at most {capacity} are taken: split it", "prompt")
        if count + waiting > capacity:
            message = f"{count} prompts beside {waiting} in work are more than {capacity}: try again later"
            raise ApiError(429, message, None, "queue_full", RETRY_SECONDS)

    async def answer(self, request) -> Job:
        """Check what a request asks for beyond its own JSON. Raises ApiError."""
        from protocol import ApiError

        self.check_ready()
        if request.model not in (None, self.name):
            message = f"there is no model {request.model!r:.200} here; there is {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        self.check_room(len(request.prompt))  # before they are encoded: a million prompts are seconds of work
        try:
            prompts = await asyncio.to_thread(self.encode, request.prompt)  # a long text takes a while
        except ValueError as error:
            raise ApiError(400, str(error), "prompt") from None
        request.check_fits(prompts, self.client.info["vocab_size"], self.client.info["max_model_len"])
        return Job(self, request, prompts)

    def encode(self, prompts: list[str | list[int]]) -> list[list[int]]:
        """Token ids of each prompt. Raises ValueError for text that the tokenizer does not know."""
        return [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def run(self, sock: socket.socket) -> str | None:
        """Serve until a signal or until the engine cannot start. Returns what went wrong, None if nothing did."""
        import uvicorn

        flags = {"log_level": "warning", "access_log": False, "lifespan": "off"}
        config = uvicorn.Config(create_app(self), timeout_graceful_shutdown=LINGER_SECONDS, **flags)
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)
        self.server, self.loop = uvicorn.Server(config), asyncio.get_running_loop()
        self.server.handle_exit = lambda *_: self.loop.call_soon_threadsafe(self.stop)  # ours drains first
        # HTTP is served while the model loads, so that a supervisor can tell "loading" from "dead"
        self.client.attach()
        serving = asyncio.create_task(self.server.serve(sockets=[sock]))
        loading = asyncio.create_task(self.client.settled.wait())
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if self.client.state == "ready" and not self.draining:
            print(greeting(self.name, sock), flush=True)
        elif self.client.state == "dead":
            self.server.should_exit = True
        await serving
        loading.cancel()
        self.client.close()
        return self.client.reason or None

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


def create_app(service: Service):
    """The FastAPI application: its routes."""
    from fastapi import FastAPI
    from fastapi.responses import Response

    import protocol

    class Answer(Response):
        """A Job as FastAPI wants it: only what is a Response is handed on as it is."""

        def __init__(self, job: Job):
            self.job, self.background = job, None

        async def __call__(self, scope, receive, send):
            await self.job(scope, receive, send)

    # without FastAPI's documentation pages, which load scripts from elsewhere; /openapi.json says the same
    app = FastAPI(title="pagedGPT", docs_url=None, redoc_url=None, redirect_slashes=False)

    shape_errors(app)
    errors = {status: {"model": protocol.ErrorAnswer} for status in (400, 404, 413, 429, 500, 503)}

    @app.post("/v1/completions", response_model=protocol.CompletionAnswer, responses=errors)
    async def completions(request: protocol.CompletionRequest):
        return Answer(await service.answer(request))

    @app.get("/v1/models")
    async def models():
        service.check_ready()
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "pagedgpt"}
        return {"object": "list", "data": [model | {"max_model_len": service.client.info["max_model_len"]}]}

    @app.get("/readyz")
    @app.get("/health")
    async def ready():
        service.check_ready()
        return {"status": "ready"}

    @app.get("/livez")
    async def alive():
        if not service.client.is_alive():
            reason = service.client.reason or f"no step in {STALL_SECONDS} s"
            raise protocol.ApiError(503, f"the engine is not alive: {reason}", None, "dead")
        return {"status": "alive"}

    app.add_middleware(limit_body, limit=service.args.max_body_mib * 2**20)
    return app


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


def limit_body(app, limit: float):
    """ASGI middleware: reading a body of more than `limit` bytes ends with ApiError (413)."""
    from protocol import ApiError

    # Counting, since a chunked body announces no length and an announced one need not be true.
    async def limited(scope, receive, send):
        size = 0

        async def counted():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise ApiError(413, f"the body has more than {int(limit)} bytes: shorten it or raise --max-body-mib")
            return message

        await app(scope, counted if scope["type"] == "http" else receive, send)

    return limited


def listen(args: argparse.Namespace) -> socket.socket:
    """Open the listening socket before anything is loaded. Exits with one message if it cannot be had."""
    if not 0 <= args.port < 65536:  # getaddrinfo would take it modulo 65536
        sys.exit(f"--port {args.port} does not exist: choose 0 to 65535")
    local = args.host == "localhost"
    with contextlib.suppress(ValueError):  # other names count as remote: what they resolve to may change
        local = local or ipaddress.ip_address(args.host).is_loopback
    if not local and not args.allow_remote:
        sys.exit(f"--host {args.host} opens the model to other machines, without a password: add --allow-remote if so")
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


def serve_http(args: argparse.Namespace) -> str | None:
    """Serve until a signal. Returns None for exit code 0, or the message of what went wrong."""
    try:
        import uvicorn  # noqa: F401  found missing now, not after the model is loaded

        import protocol  # noqa: F401
    except ImportError as error:
        return f"{error.name} is missing: `pip install fastapi uvicorn` to serve HTTP, or use --prompt without it"
    sock = listen(args)
    tokenizer = load_tokenizer(args.model)
    process, client = start_engine(args)
    try:
        return asyncio.run(Service(client, tokenizer, args).run(sock))
    finally:
        process.join(5 if client.state == "ready" else 0)  # one that is loading does not hear us
        process.kill()


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
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
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
