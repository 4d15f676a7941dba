"""
The OpenAI-compatible HTTP interface: how each path is answered, and how the server starts and
drains.

A `Connection` (connection.py) reads each call, and the `Gate` (gate.py) checks who sent it.
Starlette's router then finds the `Service` method for the path, and protocol.py parses the body. A
completion becomes a `Job` (answers.py), which converts the engine's tokens to text. Not run by
itself: serve.py creates a Service for the HTTP process.
"""

import asyncio
import contextlib
import json
import math
import sys
import time
from functools import partial

import orjson
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from common import plural, say
from engine.stages import absent
from server import live, protocol
from server.answers import Job, send_json
from server.connection import Connection
from server.gate import LINGER_SECONDS, STOPPED, Gate, base_url, log
from server.metrics import Metrics
from server.protocol import ApiError
from server.text import LONG, EncoderBusy, TooLong
from tokenizer import TokenizerError, token_name

MAX_LONG_ANSWERS = 4  # maximum number of long /tokenize and /detokenize answers in memory
MAX_NAMES = 2**14  # maximum number of tokens to name in one answer; more would block the event loop


class Service:
    """
    State shared by all calls: the engine's client, the encoder, the flags, and whether new work is
    accepted.

    client, encoder    EngineClient and Encoder
    args, keys         the flags, and the API keys
    """

    def __init__(self, client, encoder, args, keys):
        name = args.served_model_name or args.model
        self.name = name.encode(errors="replace").decode()  # JSON must be UTF-8, a path need not
        self.args = args
        self.keys = keys
        self.metrics = Metrics(self.name)
        self.router = Router(self.routes(), redirect_slashes=False)
        self.client = client
        self.encoder = encoder
        self.created = int(time.time())
        self.long_answers = asyncio.Semaphore(MAX_LONG_ANSWERS)
        self.listeners = live.Listeners(client, args.log_requests)
        self.draining = False
        self.server = None  # created by `run`; None if another program's server runs this service
        client.on_state = self.engine_changed
        client.on_stats = self.metrics.update

    def check_ready(self):
        """Raise ApiError (503) if no work is accepted: the server is loading, draining or dead."""
        state = "draining" if self.draining else self.client.state
        if state != "ready":
            why = self.client.reason or "try again later"
            raise ApiError(503, f"the server is {state}: {why}", code=state)

    def check_room(self, count: int):
        """
        Raise ApiError if the queue has no room for `count` more choices: 429 if there is currently
        no room, 400 if there never will be.
        """
        self.check_ready()  # again, as the engine may have died while the prompts were encoded
        waiting = len(self.client.choices)
        capacity = self.client.info["max_num_seqs"] + self.args.max_queue
        if count > capacity:
            message = f"{count} prompts x n in one call, but the limit is {capacity}: split it"
            raise ApiError(400, message, "prompt")
        if count + waiting > capacity:
            choices = plural(count, "choice")
            message = f"{choices} on top of {waiting} in progress: at most {capacity} are accepted"
            raise ApiError(429, f"{message}, try again later", code="queue_full")

    async def parse_body(self, http, kind):
        """Parse the call's JSON as a body of class `kind` (see protocol.py). Raises ApiError."""
        # CSRF protection: a page from another origin can send requests with certain media types
        # without a preflight, but JSON is not one of these types.
        media_type = http.headers.get("content-type", "").partition(";")[0]
        if media_type.strip().lower() != "application/json":
            message = "the body must be JSON, sent with the header Content-Type: application/json"
            raise ApiError(400, message)
        self.check_ready()  # before reading the body, which may be long
        limit = int(min(self.args.max_body_mib * 2**20, sys.maxsize))  # the flag may be inf
        message = f"the body has more than {limit} bytes: shorten it or raise --max-body-mib"
        too_long = ApiError(413, message)
        if int(http.headers.get("content-length", 0)) > limit:
            raise too_long
        data = bytearray()
        async for part in http.stream():  # counted, as a chunked body has no content-length
            data += part
            if len(data) > limit:
                raise too_long
        try:
            body = kind.model_validate_json(data, context=self.args.sampling)
        except ValidationError as findings:
            protocol.check_encoding(http.headers.get("content-encoding", ""), data)
            raise protocol.body_refusal(findings) from None
        self.check_model(body.model)
        return body

    def check_model(self, name):
        """Raise ApiError (404) unless `name` is the name of the served model, or None."""
        if name not in (None, self.name):
            message = f"there is no model {name!r:.200} here, only {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def encode(self, body, most_tokens: float = math.inf) -> list[list[int]]:
        """
        Return the token ids of each prompt. Raises ApiError, for example if a prompt has more than
        `most_tokens`.
        """
        add = not body.messages if body.add_special_tokens is None else body.add_special_tokens
        if not body.messages:
            texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            with refusals_about("prompt"):
                return await self.encoder.encode(texts, add, most_tokens)
        if not self.encoder.chat:
            message = f"{self.name} has no chat template: use /v1/completions"
            raise ApiError(400, message, "messages")
        # Hermes' template needs the function's name in each result. Some servers restart the
        # numbering of calls from 0 in each turn, so the names are collected message by message.
        names = {}  # id of a call -> name of its function
        for message in body.messages:
            names |= {call.id: call.function.name for call in message.tool_calls or ()}
            message.name = message.name or names.get(message.tool_call_id)
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        options = body.chat_template_kwargs | {"add_generation_prompt": body.add_generation_prompt}
        if body.tools:
            options["tools"] = [tool.model_dump(exclude_unset=True) for tool in body.tools]
        with refusals_about("messages"):
            return [await self.encoder.encode_chat(messages, add, most_tokens, **options)]

    # Methods for the paths. Each returns the ASGI application that sends the answer. `http` is
    # Starlette's request, and `kind` is the class for the body.

    def routes(self) -> list[Route]:
        posts = {
            "/v1/completions": partial(self.complete, protocol.CompletionRequest),
            "/v1/chat/completions": partial(self.complete, protocol.ChatRequest),
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets = {
            "/v1/models": self.list_models,
            "/v1/models/{id:path}": self.show_model,  # a name may have slashes
            "/": self.show_page,
            "/events": self.show_events,
            "/livez": self.show_liveness,
            "/readyz": self.show_readiness,
            "/health": self.show_readiness,
            "/metrics": self.show_metrics,
            "/server_info": self.show_info,
            "/model_info": self.show_info,
            "/v1/loads": self.show_loads,
        }
        routes = [Route(path, answer, methods=["POST"]) for path, answer in posts.items()]
        return routes + [Route(path, answer) for path, answer in gets.items()]

    async def complete(self, kind, http) -> Job:
        body = await self.parse_body(http, kind)
        num_prompts = 1 if body.messages else len(body.prompt)
        self.check_room(num_prompts * body.n)  # early, as encoding a million prompts takes seconds
        info = self.client.info
        if body.messages or isinstance(body.prompt[0], str):
            prompts = await self.encode(body, info["max_model_len"])
        else:
            prompts = body.prompt  # token ids
        body.check_fits(prompts, info["vocab_size"], info["max_model_len"], info["eos_token_ids"])
        call = http.scope["call"]
        job = Job(self, body, prompts, call)
        # the first prompt's; with its own seed, a prompt gets the same answer again (see Job)
        call.logged["seed"] = job.seed
        if self.args.log_requests:
            # these include the model's own defaults, but not the salt, which is secret
            fields = body.model_dump(exclude_unset=True, exclude={"cache_salt"})
            log("request", id=job.id, **fields | {"seed": job.seed})
        call.job = job
        return job

    async def tokenize(self, http):
        body = await self.parse_body(http, protocol.TokenizeRequest)

        async def answer() -> dict:
            (ids,) = await self.encode(body)
            names = None
            if body.return_token_strs:
                if len(ids) > MAX_NAMES:
                    message = f"works for at most {MAX_NAMES} tokens, not {len(ids)}: leave it out"
                    raise ApiError(400, f"return_token_strs {message}", "return_token_strs")
                names = [token_name(self.encoder.tokenizer.spelled_bytes(i)) for i in ids]
            return {
                "count": len(ids),
                "max_model_len": self.client.info["max_model_len"],
                "tokens": ids,
                "token_strs": names,
            }

        return self.json_answer(answer, len(str(body)))

    async def detokenize(self, http):
        body = await self.parse_body(http, protocol.DetokenizeRequest)
        protocol.check_vocabulary("tokens", body.tokens, self.client.info["vocab_size"])

        async def answer() -> dict:
            with refusals_about("tokens"):
                return {"prompt": await self.encoder.decode(body.tokens)}

        return self.json_answer(answer, len(body.tokens))

    def json_answer(self, answer, size: int):
        """
        Return the ASGI application that sends the result of `answer()`. The answer to a long body
        may take 30 MB, so at most MAX_LONG_ANSWERS of these are in memory at the same time. An
        answer counts from its encoding until the client has read it. `size` is the body's, in
        characters or ids.
        """

        async def respond(scope, receive, send):
            async with self.long_answers if size > LONG else contextlib.nullcontext():
                await send_json(send, orjson.dumps(await answer()))

        return respond

    async def list_models(self, http):
        return JSONResponse({"object": "list", "data": [self.describe_model()]})

    async def show_model(self, http):
        if not http.path_params["id"]:
            raise HTTPException(404)
        self.check_model(http.path_params["id"])
        return JSONResponse(self.describe_model())

    def describe_model(self) -> dict:
        """Return a description of the model in OpenAI's format. Raises ApiError (503)."""
        self.check_ready()
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "max_model_len": self.client.info["max_model_len"],
            "owned_by": "pagedgpt",
            "chat": self.encoder.chat is not None,  # if False, chat completions are refused
        }

    async def show_page(self, http):
        """Send the page. Everyone gets the same page, and the page itself asks for the API key."""
        try:
            page = live.page()
        except FileNotFoundError:  # everything else works without it
            raise ApiError(404, "this server has no page (server/page)") from None
        headers = live.page_headers(page) | {"Vary": "Accept-Encoding"}
        if "gzip" in http.headers.get("accept-encoding", "").replace(" ", "").split(","):
            headers["Content-Encoding"] = "gzip"
            page = live.zipped_page()
        return Response(page, headers=headers, media_type="text/html")

    async def show_events(self, http):
        self.check_ready()
        if "record" not in self.client.info["stages"]:
            raise ApiError(400, absent("record"))
        if http.method == "HEAD":
            return Response(media_type="text/event-stream")
        call = http.scope["call"]
        return self.listeners.join(call.salt, call.owner)

    async def show_readiness(self, http):
        self.check_ready()
        return JSONResponse({"status": "ready"})

    async def show_liveness(self, http):
        if trouble := self.client.trouble():
            raise ApiError(503, f"the engine is down: {trouble}", code="dead")
        return JSONResponse({"status": "alive"})

    async def show_metrics(self, http):
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    # SGLang's paths, which routers in front of several servers call.

    async def show_info(self, http):
        self.check_ready()
        answer = {
            "served_model_name": self.name,
            "model_path": self.name,
            "is_generation": True,
            "context_length": self.client.info["max_model_len"],
            "max_running_requests": self.client.info["max_num_seqs"],
        }
        return JSONResponse(answer)

    async def show_loads(self, http):
        self.check_ready()
        stats = self.client.stats
        load = {
            "dp_rank": 0,
            "num_running_reqs": stats["running"],
            "num_waiting_reqs": stats["waiting"],
            "num_total_reqs": stats["running"] + stats["waiting"],
            "token_usage": stats["kv_usage"],
        }
        return JSONResponse({"dp_rank_count": 1, "loads": [load]})

    # starting and stopping

    async def run(self, sock) -> str | None:
        """
        Serve until a signal arrives or the engine is dead. Returns the reason the engine is dead,
        or None.
        """
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            Gate(self),
            http=Connection,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=LINGER_SECONDS,
        )
        self.server = uvicorn.Server(config)
        # on a signal, drain first
        self.server.handle_exit = lambda *_: loop.call_soon_threadsafe(self.stop)
        self.sock = sock
        # HTTP is served while the model loads, so that a supervisor can tell "loading" from "dead"
        await self.client.attach()
        await self.server.serve(sockets=[sock])
        self.client.close()
        return self.client.reason if self.client.state == "dead" else None

    def engine_changed(self, state):
        """
        Handle a new engine state (see `EngineClient.on_state`): print the greeting when the engine
        is ready, log a restart, and end the server if the engine is dead.
        """
        if state == "ready":
            self.listeners.engine_started()
            if self.server and not self.draining:
                url = base_url(self.sock)
                message = greeting(self.name, url, self.encoder.chat is not None, bool(self.keys))
                say(message, sys.stdout)
            return
        self.listeners.engine_ended()
        if state == "restarting":
            log("engine_died", reason=self.client.reason)
        else:
            self.listeners.end()
            if self.server:
                self.server.should_exit = True

    def stop(self):
        """
        Drain: accept no new work, and give running calls at most --drain-seconds to finish. If
        called a second time, end the running calls immediately.
        """
        if self.draining:
            self.deadline = 0.0
            return
        self.draining = True
        self.deadline = time.monotonic() + self.args.drain_seconds
        if self.client.choices:
            requests = plural(len(self.client.choices), "request")
            say(f"finishing {requests}; a second signal ends them")
        # keep a reference to the task, because the event loop has only a weak one
        self.drainer = asyncio.create_task(self._drain())

    async def _drain(self):
        while (self.client.choices or self.listeners.behind) and time.monotonic() < self.deadline:
            await asyncio.sleep(0.02)
        self.client.refuse_all(ApiError(503, STOPPED, code="stopping"))
        self.listeners.end()
        # uvicorn closes its sockets and waits until the last answers have been sent
        self.server.should_exit = True


@contextlib.contextmanager
def refusals_about(field: str):
    """
    Convert the encoder's errors in the `with` block to ApiError: 400 about this field, or 429 if
    too many texts are waiting to be encoded.
    """
    try:
        yield
    except TokenizerError as error:
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        # a template's message may quote the client's text, which must not be logged
        raise ApiError(400, str(error), field, code, logged=f"{field} cannot be encoded") from None
    except EncoderBusy as error:
        raise ApiError(429, str(error), code="encoder_busy") from None


def greeting(name: str, url: str, chats: bool, has_key: bool) -> str:
    """
    Return what the server prints when it is ready: a line that scripts wait for, and a command to
    try.
    """
    if chats:
        path = "chat/completions"
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    else:  # a small model writes better below temperature 1
        path = "completions"
        body = {"prompt": "def", "max_tokens": 64, "temperature": 0.6}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_key else ""
    command = f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key}"
    return f"serving {name} at {url}\n    {command} -d '{json.dumps(body)}'"
