"""
The way of the engine's tokens to the client's answer: text, log-probabilities, JSON, events.

    choice = CompletionChoice(job, 0, body, prompt, tokenizer, eos)     # or ChatChoice
    choice.add_tokens([12, 7], None, 0)        # what a step brought
    choice.text, choice.chunks()               # not sent yet; as the JSON of events
    choice.mark_sent()

A call is a `Job`, with a `Choice` for each of n continuations of each prompt. `EngineClient`
(client.py) hands every step's tokens to `Job.on_tokens`; the choice makes text of them, finds stop
strings and counts; the job, an ASGI application, sends all choices as one answer, or their
news as server-sent events. The shapes of answers are those of OpenAI's API, and vLLM's.
Not run by itself: app.py makes a Job for each completion.
"""

import asyncio
import json
import secrets
import time
from functools import partial

import orjson

from server.live import EVENTS, PING, PING_SECONDS
from server.protocol import ApiError, ClientGone, error_body
from server.text import tools
from tokenizer import token_name

SEED_BITS = 48  # of drawn seeds: readers of JSON that take numbers for doubles keep 53 exactly
SLICE = 2**18  # bytes of a long answer that go out at a time


# --------------------------------------------------------------------------------------------------
# One continuation of a prompt


class Choice:
    """
    One continuation of a prompt: steps of the engine put tokens in; `text`, `tokens` and `entries`
    (the log-probabilities of each token, if asked for, in the shape of the answer) were not sent
    yet, `prompt_entries` are those of an echoed prompt. Entries are made as their tokens come: all
    of a long answer's at its end would hold up the event loop for a second. With tools or
    thoughts the text is read as it comes (`reader`), and `deltas` were not sent yet.

    A subclass for each path knows the shapes of its answers.
    """

    def __init__(self, job, index: int, body, prompt: list[int], tokenizer, eos: list[int]):
        self.job = job
        self.index = index
        self.body = body  # protocol.SamplingRequest
        self.prompt = prompt
        self.num_logprobs = body.num_logprobs
        # An end of text, whichever of several, is a stop without a reason; with ignore_eos it is a
        # token like any other.
        self.eos = () if body.ignore_eos else eos
        self.siblings = [self]  # all choices of the prompt
        self.engine_id = None  # its name in the engine
        self.num_tokens = 0  # of the answer; tokens after a stop string do not count
        self.num_sent = 0  # of them, in chunks
        self.cached_tokens = 0  # of the prompt
        self.prompt_entries = []
        self.finish_reason = None  # "stop" or "length", once it has ended
        self.stop_reason = None  # of a "stop": the stop string or id; None: the end of text
        self.first_step = self.last_step = 0.0  # when tokens came; metrics.py keeps these
        self.spell = tokenizer.spelled_bytes  # of control tokens too: "<|endoftext|>"
        context = () if body.echo else prompt
        self.stream = tokenizer.stream(context, body.skip_special_tokens and not body.echo)
        self.reader = None
        self.markers = {}  # tokens that mark parts of an answer: what they are called in its text
        if body.tools or job.ahead:
            self.reader = tools.Reader(job.call_tags, job.ahead, job.hidden)
            self.markers = job.markers
        self.mark_sent()
        self.is_first = True  # nothing was sent yet
        if body.echo:
            self._echo(tokenizer)

    def _echo(self, tokenizer):
        """
        Begin with the prompt as it was sent: with the names of control tokens, but without a BOS
        that encoding has added. It is not searched for stop strings, but a character may begin in
        it and end in the answer. With log-probabilities it goes token by token,
        because each has an offset: their number is limited, other prompts may be long.
        """
        was_text = isinstance(self.body.prompt[0], str) and self.body.add_special_tokens
        was_added = was_text and self.prompt[:1] == tokenizer.bos != []
        self.prompt_offsets = []
        if self.num_logprobs is None:
            self.text = self.stream.push_all(self.prompt[was_added:])
        else:
            for number, token in enumerate(self.prompt):
                self.prompt_offsets.append(self.stream.num_characters)
                if number or not was_added:
                    self.text += self.stream.push(token)
            self.prompt_entries = [self.entry(self.prompt[0], None, 0)]  # nothing predicts it
        if self.body.skip_special_tokens:  # in the answer; the echo has their names
            self.stream.token_bytes = tokenizer.token_bytes

    def add_tokens(self, tokens, finish_reason, cached_tokens, scores=None, prompt_scores=None):
        """
        Make text of the tokens that one step brought, or several; search it for stop strings. With
        finish_reason "stop" the last is a stop token, which is no text. `scores`, if asked for, has
        one for each token: [log-probability of the token, the likeliest ids, their
        log-probabilities]. prompt_scores has one for each token of the prompt but the first, and
        comes once, with the first tokens of one of the prompt's choices.
        """
        self.cached_tokens = cached_tokens
        if prompt_scores:
            rows = zip(self.prompt[1:], prompt_scores, self.prompt_offsets[1:], strict=True)
            entries = self.prompt_entries[:1] + [self.entry(*row) for row in rows]
            for sibling in self.siblings:
                sibling.prompt_entries = entries
        if self.body.max_tokens == 0:  # the prompt's scores were all that was asked for
            tokens = []
            finish_reason = "length"
        num_shown = len(tokens) - (finish_reason == "stop")  # whose text is part of the answer
        for number, token in enumerate(tokens):
            self.num_tokens += 1
            self.tokens.append(token)
            if scores:
                self.entries.append(self.entry(token, scores[number], self.stream.num_characters))
            if self.body.stop and self.num_tokens > self.body.min_tokens:
                text = self.text + self.stream.held_back
                is_text = not self.reader or self.reader.is_text(text, self.name(token))
                self.stream.stop_at(self.body.stop if is_text else [])  # no calls, no thoughts
            if number < num_shown:
                if token in self.markers:  # no stop string reaches into a marker
                    self.text += self.stream.flush() + self.markers[token]
                else:
                    self.text += self.stream.push(token)
            if self.stream.matched is not None:
                self.finish_reason = "stop"
                self.stop_reason = self.stream.matched
                return  # the tokens after a stop string do not count
        if finish_reason:
            self.text += self.stream.flush()
            self.stop_reason = self.stream.matched  # of half a character's U+FFFD
            self.finish_reason = finish_reason if self.stop_reason is None else "stop"
            if finish_reason == "stop" and self.stop_reason is None and tokens[-1] not in self.eos:
                self.stop_reason = tokens[-1]

    def has_unsent(self) -> bool:
        """
        Return whether there is something to send: text, the end, or tokens if they were asked for.
        """
        if self.finish_reason:
            return not self.is_end_sent
        if self.tokens and (self.body.return_token_ids or self.num_logprobs is not None):
            return True
        # an echo waits for its prompt's scores, which come with the first token
        waits = self.prompt_entries and not self.tokens
        return bool(self.text or self.deltas) and not waits

    def mark_sent(self):
        """Forget text, tokens and their entries: the client was sent them."""
        self.text = ""
        self.deltas = []
        self.tokens = []
        self.entries = []
        self.is_first = False
        self.is_end_sent = self.finish_reason is not None

    # its answer, as plain dictionaries; each subclass has its own `chunks`

    def chunk(self, content, tokens, finish_reason) -> dict:
        """
        One event, as a dictionary: `content` is what differs between the paths, `tokens` are what
        is new. An answer that is no stream is made of one chunk for each choice.
        """
        logprobs = None if self.num_logprobs is None else self.logprobs(tokens)
        choice = {
            "index": self.index,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": self.stop_reason if finish_reason else None,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = tokens
        chunk = {"choices": [content | choice]}
        self.num_sent += len(tokens)
        options = self.body.stream_options
        if options.include_usage and options.continuous_usage_stats:  # vLLM's
            chunk["usage"] = token_counts(len(self.prompt), self.num_sent)
        return chunk

    def prompt_fields(self) -> dict:
        """The fields about the prompt, which come once."""
        return {"prompt_token_ids": self.prompt} if self.body.return_token_ids else {}

    def name(self, token) -> str:
        return token_name(self.spell(token))


def token_counts(prompt_tokens, completion_tokens) -> dict:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return counts | {"total_tokens": prompt_tokens + completion_tokens}


def likeliest(token, score) -> dict[int, float]:
    """{id: log-probability} of the likeliest tokens and of the token itself, likeliest first."""
    logprob, ids, logprobs = score
    candidates = dict(zip(ids, logprobs, strict=True))
    candidates.setdefault(token, logprob)
    return candidates


class CompletionChoice(Choice):
    """A choice, in the shape of /v1/completions."""

    id_prefix = "cmpl-"
    objects = ("text_completion", "text_completion")  # of a whole answer, of a chunk

    def chunks(self) -> list[dict]:
        """All that is new, for one event each."""
        content = {"text": self.text}
        if self.is_first:
            content |= self.prompt_fields()
        return [self.chunk(content, self.tokens, self.finish_reason)]

    def entry(self, token, score, offset) -> tuple:
        """A token's place in the four lists of `logprobs`."""
        if not score:
            return self.name(token), None, None, offset
        candidates = likeliest(token, score)
        top = {self.name(i): p for i, p in candidates.items()}
        return self.name(token), candidates[token], top, offset

    def logprobs(self, tokens) -> dict:
        """
        OpenAI's shape for completions: four lists with an entry for each token, those of an echoed
        prompt included. The entry of a prompt's first token is null: nothing predicts it.
        """
        entries = self.prompt_entries + self.entries if self.is_first else self.entries
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[i] for entry in entries] for i, name in enumerate(names)}


class ChatChoice(Choice):
    """A choice, in the shape of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    objects = ("chat.completion", "chat.completion.chunk")

    def add_tokens(self, *step):
        super().add_tokens(*step)
        if self.reader:
            self.deltas += self.reader.read(self.text, bool(self.finish_reason))
            self.text = ""

    @property
    def shown_reason(self) -> str | None:
        """
        Return the reason as OpenAI has it: a call of the function that tool_choice names is a
        "stop".
        """
        called = self.reader and self.reader.calls and not self.body.is_named
        return "tool_calls" if called and self.finish_reason == "stop" else self.finish_reason

    def chunks(self) -> list[dict]:
        """
        Return all that is new. In a stream the first event has only the role, the last only the
        finish_reason, those between have the text. Fields about the prompt stand beside `choices`,
        as a chat is one prompt. An answer that is no stream has one chunk with the whole message.
        """
        if not self.body.stream:
            said = self.reader.message() if self.reader else {"content": self.text}
            content = {"message": {"role": "assistant"} | said}
            return [self.chunk(content, self.tokens, self.shown_reason) | self.prompt_fields()]
        chunks = []
        if self.is_first:
            role = {"delta": {"role": "assistant", "content": ""}}
            chunks.append(self.chunk(role, [], None) | self.prompt_fields())
        if self.text or self.tokens:
            tokens = self.tokens
            for delta in self.deltas or [{} if self.reader else {"content": self.text}]:
                chunks.append(self.chunk({"delta": delta}, tokens, None))
                tokens = []
        if self.finish_reason:
            chunks.append(self.chunk({"delta": {}}, [], self.shown_reason))
        return chunks

    def entry(self, token, score, offset) -> dict:
        """OpenAI's object for a token."""
        candidates = likeliest(token, score)
        top = [self.scored(*item) for item in list(candidates.items())[: self.num_logprobs]]
        return self.scored(token, candidates[token]) | {"top_logprobs": top}

    def logprobs(self, tokens) -> dict | None:
        return {"content": self.entries, "refusal": None} if tokens else None

    def scored(self, token, logprob) -> dict:
        data = self.spell(token)
        return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}


# --------------------------------------------------------------------------------------------------
# The answer to a call


class Job:
    """
    The answer to one call, as an ASGI application: whole, or a stream of server-sent events. While
    a client reads slowly `send` waits and tokens gather (backpressure); they then go out as one
    event. However it ends, nothing of it goes on running in the engine.

    `service` is app.Service, `salt` that of the prefix cache of the client's key, `id` the call's
    X-Request-Id, `owner` the client's key or address: owners take turns where grammars wait.
    """

    def __init__(self, service, body, prompts: list[list[int]], salt: str, id: str, owner: str):
        self.service = service
        self.client = service.client
        self.body = body
        self.salt = salt
        self.owner = owner
        self.call_id = id
        self.started = time.monotonic()
        self.changed = asyncio.Event()  # there may be something to send
        self.is_silent = False  # if there is nothing, send a ping
        self.is_done = False  # all choices have ended, or there is an error
        self.error = None  # an ApiError
        self.seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
        self.grammar = body.response_format or body.structured_outputs
        self.headers = []  # of its answer, beside the usual ones
        self.call_tags = None
        self.ahead = []  # the markers of thoughts that may come
        if body.messages:
            self._read_chat(service.encoder, prompts[0])
        kind = ChatChoice if body.messages else CompletionChoice
        tokenizer = service.encoder.tokenizer
        eos = self.client.info["eos_token_ids"]
        self.choices = []
        for number, prompt in enumerate(prompts):
            own = body
            if body.seed is None:  # or equal prompts of a call would get equal answers
                own = body.model_copy(update={"seed": self.seed + number})
            first = number * body.n
            siblings = [kind(self, first + i, own, prompt, tokenizer, eos) for i in range(body.n)]
            for choice in siblings:
                choice.siblings = siblings
            self.choices += siblings
        self.num_unfinished = len(self.choices)
        self.id = f"{kind.id_prefix}{body.request_id or id}"
        self.head = {"id": self.id, "object": kind.objects[body.stream]}
        self.head |= {"created": int(time.time()), "model": service.name}
        # where usage is asked for, chunks before the last have it, too, as null
        usage = {"usage": None} if body.stream_options.include_usage else {}
        self.chunk_head = self.head | usage

    def _read_chat(self, encoder, prompt: list[int]):
        """Find out what the answer may have beside text; hold it to tools. Raises ApiError."""
        chat = encoder.chat
        self.markers = {id: name for name, id in chat.tokens.items()}
        hidden = chat.tokens.keys() & chat.tokenizer.control.keys()
        self.hidden = hidden if self.body.skip_special_tokens else ()
        if chat.thoughts and self.service.args.reasoning == "on":
            opening, closing = chat.thoughts
            end = encoder.tokenizer.decode(prompt[-32:], False).rstrip()
            if not end.endswith(closing):  # else the template has ended them
                self.ahead = chat.thoughts[end.endswith(opening) :]
        self._hold(chat)

    def _hold(self, chat):
        """
        Hold the answer to the tools' schemas or to a grammar, after its thoughts. Raises ApiError
        for "auto" without tags.
        """
        is_free = bool(self.body.tools) and self.body.tool_choice == "auto"
        if self.body.tools:
            self.call_tags = chat.call_tags
            if is_free and not any(self.call_tags):
                why = "this model's chat template does not show tools, or has no JSON in tags for"
                remedy = 'calls: send "required", "none" or a function'
                raise ApiError(400, f'tool_choice is "auto", but {why} {remedy}', "tool_choice")
            lark = tools.grammar_of_calls(self.body, self.call_tags, chat.tokens)
            dump = partial(json.dumps, ensure_ascii=False)  # a socket takes 400 KB
            schemas = [dump(tools.schema_of(function)) for function in self.body.functions]
            self.grammar = {"kind": "tools", "text": dump([lark, schemas])}
        if self.ahead and self.grammar:
            before = tools.grammar_before(self.ahead, chat.tokens, is_free)
            self.grammar = self.grammar | {"before": before}

    async def __call__(self, scope, receive, send):
        # here: nothing is awaited between this and the submission, so a burst cannot pass the queue
        self.service.check_room(len(self.choices))
        tasks = []
        try:
            self.submit()
            tasks.append(asyncio.create_task(self.watch(receive)))
            if self.body.stream:
                tasks.append(asyncio.create_task(self.ping()))
                await self.send_stream(send)
            else:
                await self.changed.wait()
                await self.send_whole(send)
        finally:
            for task in tasks:
                task.cancel()
            self.abort()
            scope["call"].logged["tokens"] = sum(choice.num_tokens for choice in self.choices)

    def submit(self):
        if self.body.needs_engine:
            for choice in self.choices[:: self.body.n]:
                self.client.submit(choice.siblings)
        else:
            for choice in self.choices:
                self.on_tokens(choice, [], "length", 0)

    # called by the engine's client

    def on_tokens(self, choice, tokens, *output):
        """A step brought these tokens of a choice, and the rest of its row."""
        choice.add_tokens(tokens, *output)
        self.service.metrics.count_tokens(choice, len(tokens))
        self.num_unfinished -= choice.finish_reason is not None
        self.is_done = self.num_unfinished == 0
        if self.body.stream or self.is_done:
            self.changed.set()  # a task sends it, once all messages of this round are read

    def on_refusal(self, kind, message, refused):
        """
        The engine does not accept a choice, or failed at it: the call fails. If it is for the
        schemas of tools, whose numbers are `refused`, and none must be called, the call begins
        again, and any object will do for these tools.
        """
        if kind != "invalid":  # the client cannot change it
            return self.fail(ApiError(500, message))
        refused = [self.body.functions[number] for number in refused]
        if refused and self.body.tool_choice == "auto":
            return self._begin_again(refused)
        logged = message.partition(": ")[0]  # a grammar may be quoted
        if refused:
            number = [tool.function for tool in self.body.tools].index(refused[0])
            message = f"tools.{number}.function.parameters ({refused[0].name}): {message}"
        self.fail(ApiError(400, message, *self.body.constraints[:1], logged=logged))

    def _begin_again(self, unheld: list):
        names = ", ".join(function.name for function in unheld)
        self.headers.append((b"x-unheld-tools", names.encode()))
        for function in unheld:
            function.parameters = {}
        self._hold(self.service.encoder.chat)
        for choice in self.choices:
            self.client.abort(choice)
        self.submit()

    # its end

    def fail(self, error: ApiError):
        """End the call, unless it has ended: its last tokens may still wait to be sent."""
        if not self.is_done:
            self.error = error
            self.is_done = True
            self.abort()
            self.changed.set()

    def abort(self):
        is_gone = isinstance(self.error, ClientGone | None)
        reason = "abort" if is_gone else "error"
        for choice in self.choices:
            if self.client.abort(choice):
                self.service.metrics.finished[reason].inc()

    async def watch(self, receive):
        """
        End the call when it takes too long, or when the client hangs up, which ASGI reports only to
        `receive`.
        """
        limit = self.service.args.request_seconds
        try:
            async with asyncio.timeout(limit):
                while (await receive())["type"] != "http.disconnect":
                    pass
            self.fail(ClientGone())
        except TimeoutError:
            message = f"not finished within {limit:g} s, what the server allows"
            self.fail(ApiError(503, message, code="timeout"))

    # a whole answer

    async def send_whole(self, send):
        if self.error:
            raise self.error
        chunks = [choice.chunks()[0] for choice in self.choices]
        choices = [chunk.pop("choices")[0] for chunk in chunks]
        answer = self.head | {"choices": choices} | chunks[0] | {"usage": self.usage()}
        await send_json(send, orjson.dumps(answer), self.headers)

    def usage(self) -> dict:
        firsts = self.choices[:: self.body.n]
        prompt = sum(len(choice.prompt) for choice in firsts)
        cached = sum(choice.cached_tokens for choice in firsts)
        counts = token_counts(prompt, sum(choice.num_tokens for choice in self.choices))
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}

    # a stream

    async def ping(self):
        """
        Keep-alive: every PING_SECONDS have `send_stream` send a comment if there is nothing else.
        One timer: a timeout around each wait for a token would cost more than the token.
        """
        while True:
            await asyncio.sleep(PING_SECONDS)
            self.is_silent = True
            self.changed.set()

    async def send_stream(self, send):
        """
        Server-sent events until all choices have ended, each time all that is new. Headers go out
        with the first event, so an error before it still has an HTTP status of its own; a later one
        is the last event.
        """
        is_started = is_done = False
        while not is_done:
            await self.changed.wait()
            self.changed.clear()
            if self.error and not is_started:
                raise self.error
            is_done = self.is_done
            events = []
            for choice in self.choices:
                if choice.has_unsent():
                    events += [orjson.dumps(self.chunk_head | chunk) for chunk in choice.chunks()]
                    choice.mark_sent()
            if is_done:
                events += self.last_events()
            data = b"".join(b"data: %b\n\n" % event for event in events)
            if self.is_silent:
                data = data or PING
            self.is_silent = False
            if not data:  # the new text is all held back
                continue
            if not is_started:
                is_started = True
                headers = EVENTS + self.headers
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": not is_done})

    def last_events(self) -> list[bytes]:
        """After the last tokens the usage, if asked for, and the end."""
        if self.error:
            return [error_body(self.error)]
        if self.body.stream_options.include_usage:
            return [orjson.dumps(self.head | {"choices": [], "usage": self.usage()}), b"[DONE]"]
        return [b"[DONE]"]


async def send_json(send, data: bytes, more=()):
    """Send JSON, perhaps long, in slices: each `send` waits until the one before is on its way."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    headers += more
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(data), SLICE):
        end = start + SLICE
        message = {"type": "http.response.body", "body": data[start:end]}
        await send(message | {"more_body": end < len(data)})
