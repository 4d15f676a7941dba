"""
The OpenAI-compatible HTTP surface: who may come in, and what each path answers.

The way of a request: a `Connection` (connection.py) reads it, the `Gate` lets it in, a method of
`Service` answers its path. For a completion that is a `Job` with a `Choice` for each continuation
of each prompt: `EngineClient` (in client.py) carries token ids to the engine's process and back;
protocol.py has the rules of what is taken, makes text of tokens and shapes what is said. Not run by
itself: serve.py starts it. Only these rooms import the HTTP packages.
"""

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial

import uvicorn
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serving import protocol, welcome
from serving.connection import ROOM_SECONDS, Connection, LastAnswers, check_head, make_room
from serving.encoder import Encoder, EncoderBusy, read_ids
from serving.protocol import ApiError, Choice, error_body, error_response
from serving.workers import METRICS_FOLDER, Seat, Workers
from tokenizer import TokenizerError

OPEN_PATHS = (
    "/livez",
    "/readyz",
    "/",
)  # for supervisors and newcomers; all else needs the key, if there is one
PING_SECONDS = (
    10  # a stream that has nothing to say says so this often, or proxies take it for dead
)
LINGER_SECONDS = 2  # when the server stops, how long clients have to send or to fetch what is left
RETRY = {"Retry-After": "1"}  # seconds
GONE = "the client is gone"
STOPPED = "the server stopped before this was finished"
SEED_BITS = 48  # of seeds that are drawn: readers of the log that take all numbers for floats keep so many whole
MODEL_PATH = "/v1/models/"  # before a model's name, which may have slashes of its own
PING = b": ping\n\n"
MAX_LONG_ANSWERS = (
    4  # in memory at once: of /tokenize and /detokenize, and with many log-probabilities
)
SLICE = 2**18  # bytes of such an answer that go out at a time
PIECE = 64  # tokens whose log-probabilities become JSON at a time
SCORES_IN_PLACE = 1000  # log-probabilities that take 5 ms to tell; more are told by a thread, beside the event loop
REQUEST_ID = "x-request-id"

# Upper bounds of the histograms in /metrics: vLLM's, so that its rules and boards find them, and
# finer ones in front for what is faster here. The same for every model: only so can histograms of
# several servers be added up.
TOKEN_GAPS = (0.0005, 0.001, 0.0025, 0.005)
TOKEN_GAPS += (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
FIRST_TOKENS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
FIRST_TOKENS += (160, 640, 2560)
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
LATENCIES += (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
LENGTHS = [m * 10**e for e in range(6) for m in (1, 2, 5)]  # 1 to 500,000 tokens

compact = json.JSONEncoder(separators=(",", ":")).encode


def log(event: str, **fields):
    """One line of JSON on stderr: nothing that a client sends can look like a line of its own."""
    print(
        json.dumps({"time": round(time.time(), 3), "event": event, **fields}),
        file=sys.stderr,
        flush=True,
    )


def json_response(content: dict) -> Response:
    return Response(compact(content), media_type="application/json")


def json_parts(value) -> Iterator[str]:
    """
    compact(value) in pieces, for a thread: while the encoder is at one, up to a second, nothing
    else has a turn.
    """
    if isinstance(value, dict):
        yield "{"
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else ''}{compact(name)}:"
            yield from json_parts(item)
        yield "}"
    elif isinstance(value, list) and len(value) > PIECE:
        yield "["
        for start in range(0, len(value), PIECE):
            yield ("," if start else "") + compact(value[start : start + PIECE])[1:-1]
        yield "]"
    else:
        yield compact(value)


def long_json(value: dict) -> str:
    return "".join(json_parts(value))


async def send_json(send, data: bytes):
    """An answer that is long perhaps; each `send` waits until the slice before is on its way."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(data), SLICE):
        more = start + SLICE < len(data)
        await send(
            {"type": "http.response.body", "body": data[start : start + SLICE], "more_body": more}
        )


# --------------------------------------------------------------------------------------------------
# The answer to one call


class Job:
    """
    The answer to one call, as an ASGI application: whole, or a stream of server-sent events. While
    a client reads slowly `send` waits and tokens gather; they then go out as one event. However it
    ends, nothing of it goes on running in the engine.
    """

    def __init__(self, service: "Service", request, prompts: list[list[int]], salt: str, id: str):
        self.service, self.client, self.request, self.salt = service, service.client, request, salt
        self.changed, self.error, self.silent = asyncio.Event(), None, False
        # without a seed each prompt gets its own, this plus its number: equal prompts of a call get
        # different answers
        self.seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
        self.choices: list[Choice] = []
        for number, prompt in enumerate(prompts):
            own = (
                request
                if request.seed is not None
                else request.model_copy(update={"seed": self.seed + number})
            )
            shared = own, prompt, [], service.tokenizer, self.client.info["eos_token_ids"]
            self.choices += [Choice(self, len(self.choices) + i, *shared) for i in range(request.n)]
        self.id = f"{request.id_prefix}{request.request_id or id}"
        self.head = {
            "id": self.id,
            "object": request.objects[request.stream],
            "created": int(time.time()),
        }
        self.head["model"] = service.name
        self.started, self.num_unfinished = time.monotonic(), len(self.choices)

    async def __call__(self, scope, receive, send):
        self.service.check_room(
            len(self.choices)
        )  # here: nothing is awaited between this and the submission
        for i in range(0, len(self.choices), self.request.n):
            choices = self.choices[i : i + self.request.n]
            if self.request.max_tokens != 0 or self.request.prompt_candidates is not None:
                self.client.submit(choices)
            else:  # echo of the prompt alone is no work for the engine
                for choice in choices:
                    self.take(choice, [], "length", 0)
        tasks = [asyncio.create_task(self.watch(receive))]
        try:
            if self.request.stream:
                tasks.append(asyncio.create_task(self.ping()))
                await self.stream(send)
            else:
                await self.changed.wait()
                if self.error:
                    raise self.error
                await self.tell_whole(scope, receive, send)
        finally:
            for task in tasks:
                task.cancel()
            self.abort()

    async def tell_whole(self, scope, receive, send):
        if self.num_scores(self.choices) <= SCORES_IN_PLACE:
            answer = self.request.answer(self.choices)
            return await json_response(self.head | answer | {"usage": self.usage()})(
                scope, receive, send
            )
        async with self.service.telling:
            if self.error:  # it took too long, or the client hung up
                raise self.error
            data = await asyncio.to_thread(self.long_answer)
            await send_json(send, data)

    def long_answer(self) -> bytes:
        answer = self.head | self.request.answer(self.choices) | {"usage": self.usage()}
        choices = ",".join(map(long_json, answer.pop("choices")))
        return f'{{"choices":[{choices}],{long_json(answer)[1:]}'.encode()

    def num_scores(self, choices: list[Choice]) -> int:
        """How many log-probabilities there are to tell of these choices."""
        request = self.request
        if request.candidates is None and request.prompt_candidates is None:
            return 0
        generated = sum(len(c.scores) for c in choices)
        of_prompts = sum(len(c.prompt_scores) for c in choices if c.is_first)
        return generated * (1 + (request.candidates or 0)) + of_prompts * (
            1 + (request.prompt_candidates or 0)
        )

    def take(self, choice: Choice, tokens: list[int], *output):
        """EngineClient brings what a step made of a choice."""
        choice.take(tokens, *output)
        self.service.metrics.took(choice, len(tokens))
        self.num_unfinished -= choice.finish_reason is not None
        if self.request.stream or self.is_done:
            self.changed.set()

    def refuse(self, kind: str, message: str):
        """The engine does not take a choice, or failed at it."""
        match kind:
            case "invalid":
                self.fail(400, message)
            case "full":
                self.fail(429, message, None, "queue_full", RETRY)
            case _:
                self.fail(500, message)

    def fail(self, *error):
        """End the call, all its choices, with ApiError(*error)."""
        self.error = self.error or ApiError(*error)
        self.abort()
        self.changed.set()

    def abort(self):
        is_gone = self.error is None or self.error.status == 499
        reason = "abort" if is_gone else "error"
        for choice in self.choices:
            if self.client.abort(choice):
                self.service.metrics.finished[reason].inc()

    async def watch(self, receive):
        """
        End the call when it takes too long, or when the client hangs up, which ASGI only tells
        those who ask.
        """
        limit = self.service.args.request_seconds
        try:
            async with asyncio.timeout(limit):
                while (await receive())["type"] != "http.disconnect":
                    pass
            self.fail(499, GONE)  # nobody reads it, but the log does
        except TimeoutError:
            self.fail(
                503,
                f"not finished within {limit:g} s, what the server allows",
                None,
                "timeout",
                RETRY,
            )

    async def ping(self):
        """
        Now and then have the stream say something: a timeout for each of its tokens would cost more
        than a token.
        """
        while True:
            await asyncio.sleep(PING_SECONDS)
            self.silent = True
            self.changed.set()

    @property
    def is_done(self) -> bool:
        return self.error is not None or self.num_unfinished == 0

    async def stream(self, send):
        """
        Headers go out with the first event, so what fails before it still has a status of its own.
        """
        started = done = False
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        while not done:
            await self.changed.wait()
            if self.error and not started:
                raise self.error
            # Until the choices are told nothing is awaited, so no token comes between what is told
            # and remembered.
            choices = [choice for choice in self.choices if choice.has_news()]
            is_long = self.num_scores(choices) > SCORES_IN_PLACE
            news = (
                [copy(choice) for choice in choices] if is_long else self.chunks(choices, compact)
            )
            for choice in choices:
                choice.told()
            end = self.last_events()
            done, silent = self.is_done, self.silent
            self.silent = False
            self.changed.clear()
            if is_long:
                news = await asyncio.to_thread(self.chunks, news, long_json)
            events = "".join(f"data: {event}\n\n" for event in news + end).encode()
            events = events or (PING if silent else b"")  # b"": new text is all held back
            if events and not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": not done})

    def chunks(self, choices: list[Choice], encode: Callable) -> list[str]:
        """All that is new of these choices, as JSON."""
        head = self.head | ({"usage": None} if self.request.stream_options.include_usage else {})
        return [encode(head | chunk) for choice in choices for chunk in self.request.chunks(choice)]

    def last_events(self) -> list[str]:
        """After the last tokens the usage, if asked for, and the end."""
        if self.error:
            return [error_body(self.error).decode()]
        if not self.is_done:
            return []
        if self.request.stream_options.include_usage:
            return [compact(self.head | {"choices": [], "usage": self.usage()}), "[DONE]"]
        return ["[DONE]"]

    def usage(self) -> dict:
        # tokens after a stop string are not in num_tokens, so nobody is charged for them
        firsts = self.choices[:: self.request.n]
        prompt, completion = (
            sum(len(c.prompt) for c in firsts),
            sum(c.num_tokens for c in self.choices),
        )
        return protocol.token_counts(prompt, completion) | {
            "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in firsts)}
        }


# --------------------------------------------------------------------------------------------------
# The server


class Metrics:
    """What /metrics shows, under vLLM's names, so that its dashboards work."""

    def __init__(self, model_name: str):
        self.registry, self.totals = CollectorRegistry(), {}

        def metric(kind, name: str, about: str, **options):
            return kind(
                f"vllm:{name}", about, ["model_name"], registry=self.registry, **options
            ).labels(model_name)

        # by their names in Engine.stats(), which one process alone takes in
        gauge = partial(metric, Gauge, multiprocess_mode="mostrecent")
        self.gauges = {
            "running": gauge("num_requests_running", "Choices being computed."),
            "waiting": gauge("num_requests_waiting", "Choices waiting for their turn."),
            "kv_usage": gauge(
                "kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0..1."
            ),
        }
        self.counters = {
            "queries": metric(
                Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
            ),
            "hits": metric(
                Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache."
            ),
            "preemptions": metric(
                Counter, "num_preemptions", "Requests sent back to the queue for lack of blocks."
            ),
        }
        self.prompt_tokens = metric(Counter, "prompt_tokens", "Prompt tokens computed or found.")
        self.generation_tokens = metric(Counter, "generation_tokens", "Tokens generated.")

        # of each choice that has finished
        timing = partial(metric, Histogram, buckets=LATENCIES)
        length = partial(metric, Histogram, buckets=LENGTHS)
        self.first_token = metric(
            Histogram,
            "time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=FIRST_TOKENS,
        )
        self.inter_token = metric(
            Histogram,
            "inter_token_latency_seconds",
            "From one token of a choice to the next.",
            buckets=TOKEN_GAPS,
        )
        self.latency = timing("e2e_request_latency_seconds", "From the request to its last token.")
        self.decode_time = timing(
            "request_decode_time_seconds", "From the first token of a choice to its last."
        )
        self.prompt_length = length(
            "request_prompt_tokens", "Tokens of the prompt, for each choice."
        )
        self.generation_length = length(
            "request_generation_tokens", "Tokens of the answer, for each choice."
        )
        self.longest_choice = length(
            "request_max_num_generation_tokens", "Tokens of the longest of n choices."
        )
        self.num_choices = metric(
            Histogram, "request_params_n", "The parameter n.", buckets=(1, 2, 5, 10, 20)
        )
        self.max_tokens = length(
            "request_params_max_tokens", "The parameter max_tokens, where it was given."
        )
        # by their names in Engine.stats(): of each request, whose n choices share a prompt
        self.delays = {
            "waited": timing("request_queue_time_seconds", "From the request to its first step."),
            "prefilled": timing(
                "request_prefill_time_seconds", "From the first step to the first token."
            ),
        }
        labels = ["model_name", "finished_reason"]
        success = Counter(
            "vllm:request_success", "Choices finished, and how.", labels, registry=self.registry
        )
        self.finished = {
            reason: success.labels(model_name, reason)
            for reason in ("stop", "length", "abort", "error")
        }
        about = "Calls refused or failed, by HTTP status; the access log says why."
        refused = Counter(
            "pagedgpt:requests_refused", about, ["model_name", "status"], registry=self.registry
        )
        self.refused = partial(refused.labels, model_name)

    def text(self) -> bytes:
        """
        All metrics; where several HTTP processes write theirs to files, of all processes that ever
        were.
        """
        registry = self.registry
        if METRICS_FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)

    def took(self, choice: Choice, num_tokens: int):
        """A choice took so many tokens of a step."""
        now = time.monotonic()
        self.generation_tokens.inc(num_tokens)
        if choice.first_step:
            self.inter_token.observe((now - choice.last_step) / max(1, num_tokens))
        else:
            choice.first_step = now
            self.first_token.observe(now - choice.job.started)
            self.prompt_tokens.inc(0 if choice.index % choice.request.n else len(choice.prompt))
        choice.last_step = now
        if choice.finish_reason:
            self.completed(choice)

    def completed(self, choice: Choice):
        """A choice came to its own end, at its last step."""
        self.finished[choice.finish_reason].inc()
        self.latency.observe(choice.last_step - choice.job.started)
        self.decode_time.observe(choice.last_step - choice.first_step)
        self.prompt_length.observe(len(choice.prompt))
        self.generation_length.observe(choice.num_tokens)
        n = choice.request.n
        first = choice.index - choice.index % n
        siblings = choice.job.choices[first : first + n]
        if all(sibling.finish_reason for sibling in siblings):
            self.longest_choice.observe(max(sibling.num_tokens for sibling in siblings))
            self.num_choices.observe(n)
            if choice.request.max_tokens:
                self.max_tokens.observe(choice.request.max_tokens)

    def answered(self, status: int):
        """A call has ended with this status; 499 is a client that hung up, whom nobody refused."""
        if status >= 400 and status != 499:
            self.refused(status).inc()

    def update(self, stats: dict):
        """
        Take in Engine.stats(). Its totals begin at 0 again when the engine is started again, ours
        must not.
        """
        for name, gauge in self.gauges.items():
            gauge.set(stats[name])
        for name, counter in self.counters.items():
            new, self.totals[name] = stats[name] - self.totals.get(name, 0), stats[name]
            counter.inc(new if new >= 0 else stats[name])
        for name, histogram in self.delays.items():
            for delay in stats[name]:
                histogram.observe(delay)


class Service:
    """
    What all requests share: the engine's client, the encoder, the flags, and whether new work is
    taken.
    """

    def __init__(
        self,
        client,
        encoder: Encoder,
        args: argparse.Namespace,
        keys: list[str],
        key_in_shell: str = "",
        seat: Seat | None = None,
        workers: Workers | None = None,
    ):
        self.client, self.encoder, self.args, self.keys = client, encoder, args, keys
        self.key_in_shell = key_in_shell  # how a shell spells a key, where there is one
        self.seat = seat or Seat()
        self.workers = workers  # of the first HTTP process; None: there are none
        self.tokenizer = encoder.tokenizer
        self.telling = asyncio.Semaphore(MAX_LONG_ANSWERS)
        self.name, self.created = args.served_model_name or args.model, int(time.time())
        self.metrics, self.draining, self.deadline = Metrics(self.name), False, 0.0
        client.on_state = self.engine_changed
        if self.seat.is_first:  # all hear them, but they count once
            client.on_stats = self.metrics.update
        self.routes = {
            ("POST", "/v1/completions"): partial(self.complete, protocol.CompletionRequest),
            ("POST", "/v1/chat/completions"): partial(self.complete, protocol.ChatRequest),
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/models/{id}"): self.model,
            ("GET", "/"): self.welcome,
            ("GET", "/livez"): self.alive,
            ("GET", "/readyz"): self.ready,
            ("GET", "/health"): self.ready,
            ("GET", "/metrics"): self.show_metrics,
            ("GET", "/openapi.json"): self.describe,
        }

    def check_ready(self):
        """Raises ApiError (503) while the server takes no work: it is loading, draining or dead."""
        state = "draining" if self.draining else self.client.state
        if state != "ready":
            why = self.client.reason if state in ("restarting", "dead") else "try again later"
            raise ApiError(503, f"the server is {state}: {why}", None, state, RETRY)

    def check_room(self, count: int):
        """
        Raises ApiError for `count` choices more than the queue can take: now (429), or ever (400).
        """
        self.check_ready()  # again: the engine may have died while the prompts were encoded
        # of other HTTP processes' choices the engine tells now and then; it has the last word, see
        # Job.refuse
        waiting = max(len(self.client.choices), self.client.at_work)
        capacity = self.client.info["max_num_seqs"] + self.args.max_queue
        if count > capacity:
            raise ApiError(
                400,
                f"{count} prompts x n in one call, at most {capacity} are taken: split it",
                "prompt",
            )
        if count + waiting > capacity:
            message = f"{count} prompts x n beside {waiting} in work are more than {capacity}: try again later"
            raise ApiError(429, message, None, "queue_full", RETRY)

    async def read(self, http: Request, kind: type[protocol.Strict]):
        """The request's body, as one of protocol.py's requests to this model. Raises ApiError."""
        # what a page of another origin may send without asking first is of another type
        media_type = http.headers.get("content-type", "").partition(";")[
            0
        ]  # without its parameters
        if media_type.strip().lower() != "application/json":
            raise ApiError(
                400, "the body must be JSON, sent with the header Content-Type: application/json"
            )
        self.check_ready()  # before the body is read, as it is long perhaps
        body, limit = bytearray(), self.args.max_body_mib * 2**20
        too_long = ApiError(
            413, f"the body has more than {int(limit)} bytes: shorten it or raise --max-body-mib"
        )
        if int(http.headers.get("content-length", 0)) > limit:
            raise too_long
        async for part in http.stream():  # counted: a chunked body announces no length
            body += part
            if len(body) > limit:
                raise too_long
        try:
            request = kind.model_validate_json(body)
        except ValidationError as found:
            raise protocol.body_refusal(found) from None
        self.check_ready()
        self.check_model(request.model)
        return request

    def check_model(self, name: str | None):
        """Raises ApiError (404) for another model than the one there is; None is that one."""
        if name not in (None, self.name):
            message = f"there is no model {name!r:.200} here; there is {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def encoding(self, request) -> tuple[dict, int]:
        """
        The encoder's job for a request's texts or messages, and how many characters they have.
        """
        if not request.messages:
            texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
            return {"texts": texts}, sum(map(len, texts))
        if not self.encoder.has_chat:
            message = f"{self.name} has no chat template: use /v1/completions or put one into the checkpoint"
            raise ApiError(400, message, "messages")
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        options = {"add_generation_prompt": request.add_generation_prompt}
        size = sum(len(text) for message in messages for text in message.values())
        return {"messages": messages, "options": options}, size

    async def ask_encoder(self, job: dict, size: int, param: str) -> tuple[dict, bytes]:
        """What encoder.py makes of a job. Raises ApiError, about the field `param`."""
        try:
            return await self.encoder.ask(job, size)
        except TokenizerError as error:
            raise ApiError(400, str(error), param) from None
        except EncoderBusy:
            message = "too much text is waiting to be encoded: try again later"
            raise ApiError(429, message, None, "encoder_busy", RETRY) from None
        except RuntimeError as error:
            raise ApiError(503, f"{error}: try again", None, "encoder_ended", RETRY) from None

    async def encode(self, request) -> list[list[int]]:
        """Token ids of each prompt. Raises ApiError."""
        if not request.messages and isinstance(request.prompt[0], list):
            return request.prompt  # given as token ids
        limit = self.client.info["max_model_len"]
        job, size = self.encoding(request)
        param = "messages" if request.messages else "prompt"
        head, data = await self.ask_encoder(job | {"limit": limit}, size, param)
        request.check_length(
            max(head["counts"]), limit
        )  # of a prompt that is too long there are no ids
        return read_ids(head, data)

    # what the routes answer: an ASGI application each

    async def complete(self, kind: type[protocol.Strict], http: Request) -> Job:
        request = await self.read(http, kind)
        count = 1 if request.messages else len(request.prompt)
        self.check_room(
            count * request.n
        )  # before they are encoded: a million prompts take seconds
        prompts = await self.encode(request)
        info = self.client.info
        request.check_fits(
            prompts, info["vocab_size"], info["max_model_len"], info["eos_token_ids"]
        )
        salt = f"{http.scope['salt']}:{request.cache_salt or ''}"
        job = Job(self, request, prompts, salt, http.scope["request_id"])
        http.scope["logged"]["seed"] = job.seed  # with it anybody gets this answer again
        if self.args.log_requests:
            fields = request.model_dump(exclude_defaults=True, exclude={"cache_salt"})  # a secret
            log("request", id=job.id, **fields | {"seed": job.seed})
        return job

    async def tokenize(self, http: Request) -> Response:
        request = await self.read(http, protocol.TokenizeRequest)
        job, size = self.encoding(request)
        answer = {
            "names": request.return_token_strs,
            "max_model_len": self.client.info["max_model_len"],
        }
        return self.told(
            job | {"answer": answer}, size, "messages" if request.messages else "prompt"
        )

    async def detokenize(self, http: Request) -> Response:
        tokens, V = (
            (await self.read(http, protocol.DetokenizeRequest)).tokens,
            self.client.info["vocab_size"],
        )
        if max(tokens, default=0) >= V:
            raise ApiError(
                400, f"token id {max(tokens)} is outside the vocabulary, 0..{V - 1}", "tokens"
            )
        return self.told({"tokens": tokens}, len(tokens), "tokens")

    def told(self, job: dict, size: int, param: str) -> Callable:
        """
        The ASGI application that answers with the JSON which the encoder makes. Of long ones only a
        few are there at once, until their clients have read them: each may have 30 MB.
        """

        async def answer(scope, receive, send):
            async with (
                contextlib.nullcontext() if self.encoder.is_short(job, size) else self.telling
            ):
                _, data = await self.ask_encoder(job, size, param)
                await send_json(send, data)

        return answer

    async def models(self, http: Request) -> Response:
        return json_response({"object": "list", "data": [self.description()]})

    async def model(self, http: Request) -> Response:
        self.check_model(http.scope["path"].removeprefix(MODEL_PATH))
        return json_response(self.description())

    def description(self) -> dict:
        """The model, as OpenAI's API describes one. Raises ApiError (503)."""
        self.check_ready()
        model = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "pagedgpt",
        }
        return model | {"max_model_len": self.client.info["max_model_len"]}

    async def welcome(self, http: Request) -> Response:
        """The page for a browser, which asked for it under some name of ours."""
        url = f"{http.scope['scheme']}://{http.headers.get('host', '')}"
        state = "draining" if self.draining else self.client.state
        page = welcome.page(self.name, state, url, self.encoder.has_chat, bool(self.keys))
        return Response(page, headers=welcome.PAGE_HEADERS, media_type="text/html")

    async def ready(self, http: Request) -> Response:
        self.check_ready()
        return json_response({"status": "ready"})

    async def alive(self, http: Request) -> Response:
        if trouble := self.client.trouble():
            raise ApiError(503, f"the engine is not alive: {trouble}", None, "dead")
        return json_response({"status": "alive"})

    async def show_metrics(self, http: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def describe(self, http: Request) -> Response:
        return json_response(openapi(self.routes))

    # its life

    async def run(self, sock: socket.socket) -> str | None:
        """
        Serve until a signal or until the engine is gone for good. Returns what went wrong, None if
        nothing did.
        """
        flags = {
            "log_level": "error",
            "access_log": False,
            "lifespan": "off",
            "ws": "none",
            "http": Connection,
        }
        config = uvicorn.Config(
            LastAnswers(Gate(self)), timeout_graceful_shutdown=LINGER_SECONDS, **flags
        )
        self.server, self.loop, self.sock = uvicorn.Server(config), asyncio.get_running_loop(), sock
        self.server.handle_exit = self.on_signal  # ours drains first
        if self.seat.orders:
            self.loop.add_reader(self.seat.orders.fileno(), self.take_order)
        if self.workers:
            self.workers.on_death = lambda process: log(
                "worker_died", pid=process.pid, code=process.exitcode
            )
            self.workers.watch()
        self.room_keeper = asyncio.create_task(
            self.keep_room()
        )  # kept: the loop itself holds tasks weakly
        # HTTP is served while the model loads, so that a supervisor can tell "loading" from "dead"
        await self.client.attach()
        await self.server.serve(sockets=[sock])
        if self.workers:
            self.workers.stop()
            await self.workers.ended(LINGER_SECONDS + 1)
        self.client.close()
        self.encoder.close()
        return self.client.reason if self.client.state == "dead" else None

    def on_signal(self, *_):
        """Signals are for the first HTTP process; the others take its orders."""
        if self.seat.is_first:
            self.loop.call_soon_threadsafe(self.stop)

    def take_order(self):
        """The first HTTP process says stop, once or twice, or is gone."""
        order = os.read(self.seat.orders.fileno(), 1)
        self.stop()
        if not order:
            self.loop.remove_reader(self.seat.orders.fileno())
            self.stop()

    async def keep_room(self):
        """Close idle connections here for those that come to other HTTP processes."""
        while len(self.seat.counts.open) > 1:
            await asyncio.sleep(ROOM_SECONDS)
            make_room(self.server.server_state.connections, self.seat, self.args.max_connections)

    def engine_changed(self, state: str):
        if state == "dead":
            self.server.should_exit = True
        elif not self.seat.is_first:
            return  # one process says it
        elif state == "ready" and not self.draining:
            chats = self.encoder.has_chat
            print(
                welcome.greeting(self.name, base_url(self.sock), chats, self.key_in_shell),
                flush=True,
            )
        elif state == "restarting":
            log("engine_died", reason=self.client.reason)

    def stop(self):
        """
        The first time: take no new work and let what runs finish, for a while. The second: the
        while is over.
        """
        if self.workers:
            self.workers.stop()
        if self.draining:
            self.deadline = 0.0
            return
        self.draining, self.deadline = True, time.monotonic() + self.args.drain_seconds
        running = max(len(self.client.choices), self.client.at_work)
        if running and self.seat.is_first:
            print(f"finishing {running} requests; a second signal ends them", file=sys.stderr)
        self.drainer = asyncio.create_task(
            self._drain()
        )  # kept: the loop itself holds tasks weakly

    async def _drain(self):
        while self.is_busy() and time.monotonic() < self.deadline:
            await asyncio.sleep(0.02)
        self.client.fail_all(503, STOPPED, None, "stopping", RETRY)
        self.server.should_exit = (
            True  # uvicorn closes its sockets and waits until the last answers are out
        )

    def is_busy(self) -> bool:
        """Something runs here, or, for the first HTTP process, in another one."""
        return bool(self.client.choices or (self.workers and self.workers.processes))


def base_url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


REQUESTS = {
    "/v1/completions": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatRequest,
}
REQUESTS |= {"/tokenize": protocol.TokenizeRequest, "/detokenize": protocol.DetokenizeRequest}
ANSWERS = dict.fromkeys(
    ("/v1/completions", "/v1/chat/completions"), "id object created model choices usage"
)
ANSWERS |= {
    "/tokenize": "count max_model_len tokens",
    "/detokenize": "prompt",
    "/v1/models": "object data",
}
ANSWERS |= {"/v1/models/{id}": "id object created owned_by max_model_len"}
ANSWERS |= {
    "/livez": "status",
    "/readyz": "status",
    "/health": "status",
    "/openapi.json": "openapi info paths",
}


def openapi(routes: dict[tuple[str, str], Callable]) -> dict:
    """
    The OpenAPI document: what each path takes, by protocol.py's models, and the fields of what it
    answers.
    """

    def content(kind: str, schema: dict) -> dict:
        return {"content": {kind: {"schema": schema}}}

    def answer(fields: str) -> dict:
        names = fields.split()
        return content(
            "application/json",
            {"type": "object", "required": names, "properties": {name: {} for name in names}},
        )

    models, paths = [(model, "validation") for model in REQUESTS.values()], {}
    refs, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    error = {"description": "what was wrong, and what to change"} | answer("error")
    for method, path in routes:
        text = "text/html" if path == "/" else "text/plain"
        good = answer(ANSWERS[path]) if path in ANSWERS else content(text, {"type": "string"})
        call: dict = {"responses": {"200": {"description": "the answer"} | good}}
        call["responses"] |= dict.fromkeys(
            ("400", "401", "403", "404", "405", "408", "413", "429", "503"), error
        )
        if model := REQUESTS.get(path):
            call["requestBody"] = {"required": True} | content(
                "application/json", refs[model, "validation"]
            )
        if path.endswith("{id}"):
            call["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if path.endswith("completions"):
            good["content"] |= content("text/event-stream", {"type": "string"})["content"]
        paths[path] = {method.lower(): call}
    info = {"title": "pagedGPT", "version": "1"}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


# --------------------------------------------------------------------------------------------------
# Who may come in


class Gate:
    """
    The ASGI application: who may come in, errors in the one shape they have, and a line of log for
    each request.
    """

    def __init__(self, service: Service):
        self.args, self.routes, self.service = service.args, service.routes, service
        self.salts = {
            hashlib.sha256(key.encode()).digest(): f"key {i}" for i, key in enumerate(service.keys)
        }
        self.hosts = {"localhost", self.args.host.lower(), *map(str.lower, self.args.allowed_hosts)}

        # pages of these origins may read what is answered, errors too, and ask first, without the
        # key, if they may
        self.origins = frozenset(self.args.allowed_origins)
        self.shared = CORSMiddleware(
            self.respond,
            allow_origins=self.origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID, "retry-after"),
            allow_private_network=True,
        )

    async def __call__(self, scope, receive, send):
        """
        Name the call, for its client and for the log, and tell browsers which pages may read the
        answer.
        """
        headers = dict(scope["headers"])
        scope["request_id"] = request_id(headers.get(REQUEST_ID.encode(), b""))
        scope["logged"] = {"id": scope["request_id"]}  # more that the log is to say of this call
        named = REQUEST_ID.encode(), scope["request_id"].encode()

        async def send_named(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], named]
                scope["is_answered"] = True
            await send(message)

        origin = headers.get(b"origin")
        respond = self.shared if self.is_allowed(origin) else self.respond
        await respond(scope, receive, send_named)

    async def respond(self, scope, receive, send):
        started = time.perf_counter()
        status = 200
        error: ApiError | None = None
        try:
            check_head(scope["headers"])
            scope["salt"] = self.admit(scope)
            answer = await self.route(scope["method"], scope["path"])(Request(scope, receive))
            await answer(scope, receive, send)
            error = getattr(answer, "error", None)  # of a stream that had begun
        except ClientDisconnect:  # who sends half a body and goes is told no more
            error = ApiError(499, GONE)
            status = error.status
        except asyncio.CancelledError:  # the server stops
            if scope.get("is_answered"):  # to a client that does not read
                error = ApiError(499, GONE)
            else:
                error = ApiError(503, STOPPED, None, "stopping", RETRY)
                await error_response(error)(scope, receive, send)
            status = error.status
        except ApiError as refusal:
            error = refusal
            status = error.status
            await error_response(error)(scope, receive, send)
        except Exception as bug:
            error = ApiError(500, f"a bug of this server: {type(bug).__name__}")
            status = error.status
            await error_response(error)(scope, receive, send)
            raise  # uvicorn logs its traceback
        finally:
            self.service.metrics.answered(status)
            self.log_access(scope, started, status, error)

    def not_http(self, client: tuple[str, int] | None, why: str):
        """
        A connection was answered with a 400 and closed: no call, but counted and logged like one.
        """
        self.service.metrics.answered(400)
        if self.args.access_log:
            log("access", client=(client or [None])[0], status=400, error=why)

    def log_access(self, scope, started: float, status: int, error: ApiError | None):
        path = scope["path"]
        if not self.args.access_log or path in OPEN_PATHS:
            return
        client = (scope["client"] or [None])[0]
        ms = round(1000 * (time.perf_counter() - started), 1)
        more = scope["logged"] | ({"error": error.reason} if error else {})
        log(
            "access",
            client=client,
            method=scope["method"],
            path=path[:200],
            status=status,
            ms=ms,
            **more,
        )

    def route(self, method: str, path: str) -> Callable:
        """
        The method of Service that answers. Raises ApiError (404, 405) that says what to call
        instead.
        """
        known = "/v1/models/{id}" if path.startswith(MODEL_PATH) and path != MODEL_PATH else path
        call = (
            ("GET" if method == "HEAD" else method),
            known,
        )  # to HEAD, uvicorn sends the headers alone
        if call not in self.routes:
            methods = [method for method, other in self.routes if other == known]
            methods += ["HEAD"] if "GET" in methods else []
            header = {"Allow": ", ".join(methods)} if methods else None
            message = welcome.not_found(method, path, list(self.routes))
            raise ApiError(405 if methods else 404, message, None, None, header)
        return self.routes[call]

    def is_allowed(self, origin: bytes | None) -> bool:
        """
        Whether --allowed-origins has the origin of the page that calls; null is one like any other.
        """
        return origin is not None and (
            "*" in self.origins or origin.decode("latin-1") in self.origins
        )

    def admit(self, scope) -> str:
        """The salt of the client's part of the prefix cache. Raises ApiError (401, 403)."""
        values = dict(scope["headers"])
        host = host_name(values.get(b"host", b""))
        # A page in a browser can reach us under a name of its own that it made point here: no name
        # but ours is served. With a key this gains it nothing.
        if not (self.salts or host in self.hosts or is_address(host)):
            raise ApiError(
                403, f"the Host {host!r:.200} is not served here: --allowed-hosts adds names"
            )
        self.check_origin(scope["scheme"], values)
        if not self.salts or scope["path"] in OPEN_PATHS:
            return ""
        scheme, _, key = values.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else b""
        salts = [salt for digest, salt in self.salts.items() if hmac.compare_digest(digest, given)]
        if not salts:
            what = {"WWW-Authenticate": "Bearer"}
            raise ApiError(
                401,
                "send a valid API key: Authorization: Bearer KEY",
                None,
                "invalid_api_key",
                what,
            )
        return salts[0]

    def check_origin(self, scheme: str, headers: dict[bytes, bytes]):
        """
        Raises ApiError (403) for a page of another origin (scheme, host and port) than ours and
        those allowed.
        """
        origin = headers.get(b"origin")
        ours = scheme.encode() + b"://" + headers.get(b"host", b"")
        if origin is None or origin.lower() == ours.lower() or self.is_allowed(origin):
            return
        name = origin.decode("latin-1")[:200]
        message = f"pages of another origin, {name!r}, are not served here: --allowed-origins {name} would let them in"
        raise ApiError(403, message)


def request_id(given: bytes) -> str:
    """The client's own X-Request-Id if it is printable ASCII and not long, else a new one."""
    return given.decode() if re.fullmatch(b"[!-~]{1,128}", given) else uuid.uuid4().hex


def host_name(value: bytes) -> str:
    """The name in a Host header: without the port, and without the brackets of an IPv6 address."""
    text = value.decode("latin-1").lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.rpartition(":")[0] or text


def is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False
