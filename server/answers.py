"""
From the engine's tokens to the client's answer: text, log-probabilities, JSON, events.

    choice = CompletionChoice(job, 0, body, prompt, tokenizer, eos)     # or ChatChoice
    choice.add_tokens([12, 7], None, 0)        # the tokens of a step
    choice.text, choice.chunks()               # unsent text; the same as JSON for events
    choice.mark_sent()

A call is a `Job`, with a `Choice` for each of the n continuations of each prompt. `EngineClient`
(client.py) passes the tokens of every step to `Job.on_tokens`. The choice converts them to text,
finds stop strings, and counts. The job is an ASGI application. It sends all choices as one answer,
or streams what is new as server-sent events. Answers have the form of OpenAI's API, with vLLM's
extensions. Not run by itself: app.py makes a Job for each completion.
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

SEED_BITS = 48  # of random seeds; JSON parsers that use doubles represent up to 53 bits exactly
SLICE = 2**18  # bytes of a long answer that are sent at a time


# --------------------------------------------------------------------------------------------------
# One continuation of a prompt


class Choice:
    """
    One continuation of a prompt. The engine's steps add tokens. These attributes have what was not
    sent yet:

    text       the new text
    tokens     the new tokens
    entries    their log-probabilities in the form of the answer, if requested
    deltas     with tools or thoughts: the new text as parsed by `reader`

    `prompt_entries` are the entries of an echoed prompt. Entries are made as the tokens arrive.
    Making all of a long answer's entries at its end would block the event loop for a second.

    There is a subclass for each path, which knows the form of its answers.
    """

    def __init__(self, job, index: int, body, prompt: list[int], tokenizer, eos: list[int]):
        self.job = job
        self.index = index
        self.body = body  # protocol.SamplingRequest
        self.prompt = prompt
        self.num_logprobs = body.num_logprobs
        # An answer that stops at one of these has no stop_reason. With ignore_eos they are tokens
        # like any other.
        self.eos = () if body.ignore_eos else eos
        self.siblings = [self]  # all choices of the prompt
        self.engine_id = None  # the id of its request in the engine
        self.num_tokens = 0  # of the answer, without tokens after a stop string
        self.num_sent = 0  # tokens sent, in chunks
        self.cached_tokens = 0  # tokens of the prompt that were found in the prefix cache
        self.prompt_entries = []
        self.finish_reason = None  # "stop" or "length", once it has ended
        self.stop_reason = None  # after "stop": the stop string or id; None: the end of text
        self.first_step = self.last_step = 0.0  # times of its first and last tokens, for metrics.py
        self.spell = tokenizer.spelled_bytes  # spells control tokens too: "<|endoftext|>"
        context = () if body.echo else prompt
        self.stream = tokenizer.stream(context, body.skip_special_tokens and not body.echo)
        self.reader = None
        self.markers = {}  # token id -> its text, for tokens that mark parts of an answer
        if body.tools or job.ahead:
            self.reader = tools.Reader(job.call_tags, job.ahead, job.hidden)
            self.markers = job.markers
        self.mark_sent()
        self.is_first = True  # nothing was sent yet
        if body.echo:
            self._echo(tokenizer)

    def _echo(self, tokenizer):
        """
        Begin the answer with the prompt as the client sent it. Control tokens are shown by name; a
        BOS that the tokenizer added is left out. Stop strings are not searched in the prompt, but a
        character may begin in it and end in the answer. With log-probabilities the prompt is
        processed token by token, because each token needs its offset. (The number of
        log-probabilities is limited.) Other prompts may be long, and are processed in one call.
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
            self.prompt_entries = [self.entry(self.prompt[0], None, 0)]  # no prediction for it
        if self.body.skip_special_tokens:  # only in the answer: the echo shows their names
            self.stream.token_bytes = tokenizer.token_bytes

    def add_tokens(self, tokens, finish_reason, cached_tokens, scores=None, prompt_scores=None):
        """
        Add the new tokens of one or several steps: convert them to text, and search it for stop
        strings. With finish_reason "stop" the last token is a stop token, which has no text. The
        scores are given if they were requested, as lists of [log-probability of the token, ids of
        the likeliest tokens, their log-probabilities]. `scores` has one for each new token.
        `prompt_scores` has one for each token of the prompt except the first. It comes once, with
        the first tokens of one of the prompt's choices.
        """
        self.cached_tokens = cached_tokens
        if prompt_scores:
            rows = zip(self.prompt[1:], prompt_scores, self.prompt_offsets[1:], strict=True)
            entries = self.prompt_entries[:1] + [self.entry(*row) for row in rows]
            for sibling in self.siblings:
                sibling.prompt_entries = entries
        if self.body.max_tokens == 0:  # only the prompt's scores were wanted
            tokens = []
            finish_reason = "length"
        num_shown = len(tokens) - (finish_reason == "stop")  # these have text
        for number, token in enumerate(tokens):
            self.num_tokens += 1
            self.tokens.append(token)
            if scores:
                self.entries.append(self.entry(token, scores[number], self.stream.num_characters))
            if self.body.stop and self.num_tokens > self.body.min_tokens:
                text = self.text + self.stream.held_back
                is_text = not self.reader or self.reader.is_text(text, self.name(token))
                self.stream.stop_at(self.body.stop if is_text else [])  # not in calls or thoughts
            if number < num_shown:
                if token in self.markers:  # a stop string cannot extend into a marker
                    self.text += self.stream.flush() + self.markers[token]
                else:
                    self.text += self.stream.push(token)
            if self.stream.matched is not None:
                self.finish_reason = "stop"
                self.stop_reason = self.stream.matched
                return  # tokens after a stop string are dropped
        if finish_reason:
            self.text += self.stream.flush()
            self.stop_reason = self.stream.matched  # of U+FFFD, for an incomplete character
            self.finish_reason = finish_reason if self.stop_reason is None else "stop"
            if finish_reason == "stop" and self.stop_reason is None and tokens[-1] not in self.eos:
                self.stop_reason = tokens[-1]

    def has_unsent(self) -> bool:
        """
        Return whether there is something to send: text, the end, or tokens if they were requested.
        """
        if self.finish_reason:
            return not self.is_end_sent
        if self.tokens and (self.body.return_token_ids or self.num_logprobs is not None):
            return True
        # an echo must wait for the prompt's scores, which come with the first token
        waits = self.prompt_entries and not self.tokens
        return bool(self.text or self.deltas) and not waits

    def mark_sent(self):
        """Forget text, tokens and entries, after they were sent to the client."""
        self.text = ""
        self.deltas = []
        self.tokens = []
        self.entries = []
        self.is_first = False
        self.is_end_sent = self.finish_reason is not None

    # the answer as plain dictionaries; each subclass has its own `chunks`

    def chunk(self, content, tokens, finish_reason) -> dict:
        """
        Return one event as a dictionary. `content` has the fields that differ between the paths,
        `tokens` are the new tokens. An answer that is not streamed has one chunk for each choice.
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
        if options.include_usage and options.continuous_usage_stats:  # vLLM's extension
            chunk["usage"] = token_counts(len(self.prompt), self.num_sent)
        return chunk

    def prompt_fields(self) -> dict:
        """Return the fields about the prompt, which are sent once."""
        return {"prompt_token_ids": self.prompt} if self.body.return_token_ids else {}

    def name(self, token) -> str:
        return token_name(self.spell(token))


def token_counts(prompt_tokens, completion_tokens) -> dict:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return counts | {"total_tokens": prompt_tokens + completion_tokens}


def likeliest(token, score) -> dict[int, float]:
    """
    Return {id: log-probability} of the likeliest tokens, likeliest first, and of the token itself.
    """
    logprob, ids, logprobs = score
    candidates = dict(zip(ids, logprobs, strict=True))
    candidates.setdefault(token, logprob)
    return candidates


class CompletionChoice(Choice):
    """A choice in the form of /v1/completions."""

    id_prefix = "cmpl-"
    objects = ("text_completion", "text_completion")  # `object` of a whole answer, of a chunk

    def chunks(self) -> list[dict]:
        """Return everything new, as a chunk for each event."""
        content = {"text": self.text}
        if self.is_first:
            content |= self.prompt_fields()
        return [self.chunk(content, self.tokens, self.finish_reason)]

    def entry(self, token, score, offset) -> tuple:
        """Return a token's values for the four lists of `logprobs`."""
        if not score:
            return self.name(token), None, None, offset
        candidates = likeliest(token, score)
        top = {self.name(i): p for i, p in candidates.items()}
        return self.name(token), candidates[token], top, offset

    def logprobs(self, tokens) -> dict:
        """
        Return OpenAI's form for completions: four lists with a value for each token, including the
        tokens of an echoed prompt. The values for the prompt's first token are null, because there
        is no prediction for it.
        """
        entries = self.prompt_entries + self.entries if self.is_first else self.entries
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[i] for entry in entries] for i, name in enumerate(names)}


class ChatChoice(Choice):
    """A choice in the form of /v1/chat/completions."""

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
        Return the finish_reason as OpenAI defines it. It is "tool_calls" if the answer has calls,
        but "stop" if tool_choice names the function.
        """
        called = self.reader and self.reader.calls and not self.body.is_named
        return "tool_calls" if called and self.finish_reason == "stop" else self.finish_reason

    def chunks(self) -> list[dict]:
        """
        Return everything new, as a chunk for each event. In a stream, the first event has only the
        role and the last only the finish_reason; those between have the text. Fields about the
        prompt are next to `choices`, because a chat has only one prompt. An answer that is not
        streamed has one chunk with the whole message.
        """
        if not self.body.stream:
            fields = self.reader.message() if self.reader else {"content": self.text}
            content = {"message": {"role": "assistant"} | fields}
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
        """Return OpenAI's object for a token."""
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
    The answer to one call, as an ASGI application. It is sent as a whole, or as a stream of
    server-sent events. While a client reads slowly, `send` waits and tokens accumulate
    (backpressure); they are then sent as one event. However the call ends, none of its requests
    stays in the engine.

    service    app.Service
    salt       of the prefix cache, from the client's API key
    id         the call's X-Request-Id
    owner      the client's API key or address; owners take turns to have grammars compiled
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
        self.is_silent = False  # a ping is due if there is nothing else to send
        self.is_done = False  # all choices have ended, or there is an error
        self.error = None  # an ApiError
        self.seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
        self.grammar = body.response_format or body.structured_outputs
        self.headers = []  # of the answer, in addition to the usual ones
        self.call_tags = None
        self.ahead = []  # markers of thoughts that may still come
        if body.messages:
            self._read_chat(service.encoder, prompts[0])
        kind = ChatChoice if body.messages else CompletionChoice
        tokenizer = service.encoder.tokenizer
        eos = self.client.info["eos_token_ids"]
        self.choices = []
        for number, prompt in enumerate(prompts):
            seeded = body
            if body.seed is None:  # otherwise equal prompts of a call would get equal answers
                seeded = body.model_copy(update={"seed": self.seed + number})
            first = number * body.n
            siblings = [
                kind(self, first + i, seeded, prompt, tokenizer, eos) for i in range(body.n)
            ]
            for choice in siblings:
                choice.siblings = siblings
            self.choices += siblings
        self.num_unfinished = len(self.choices)
        self.id = f"{kind.id_prefix}{body.request_id or id}"
        self.head = {"id": self.id, "object": kind.objects[body.stream]}
        self.head |= {"created": int(time.time()), "model": service.name}
        # if usage is requested, it is null in all chunks before the last
        usage = {"usage": None} if body.stream_options.include_usage else {}
        self.chunk_head = self.head | usage

    def _read_chat(self, encoder, prompt: list[int]):
        """
        Find out whether the answer may have thoughts and calls, and constrain it to the tools.
        Raises ApiError.
        """
        chat = encoder.chat
        self.markers = {id: name for name, id in chat.tokens.items()}
        hidden = chat.tokens.keys() & chat.tokenizer.control.keys()
        self.hidden = hidden if self.body.skip_special_tokens else ()
        if chat.thoughts and self.service.args.reasoning == "on":
            opening, closing = chat.thoughts
            end = encoder.tokenizer.decode(prompt[-32:], False).rstrip()
            if not end.endswith(closing):  # otherwise the template has ended the thoughts itself
                self.ahead = chat.thoughts[end.endswith(opening) :]
        self._constrain(chat)

    def _constrain(self, chat):
        """
        Constrain the answer after its thoughts to the schemas of the tools, or to a grammar. Raises
        ApiError if tool_choice is "auto" and the template has no tags for calls.
        """
        is_free = bool(self.body.tools) and self.body.tool_choice == "auto"
        if self.body.tools:
            self.call_tags = chat.call_tags
            if is_free and not any(self.call_tags):
                why = "this model's chat template supports no tools, or no calls as JSON in tags"
                remedy = 'send "required", "none" or a function'
                raise ApiError(400, f'tool_choice is "auto", but {why}: {remedy}', "tool_choice")
            lark = tools.grammar_of_calls(self.body, self.call_tags, chat.tokens)
            dump = partial(json.dumps, ensure_ascii=False)  # a socket takes 400 KB
            schemas = [dump(tools.schema_of(function)) for function in self.body.functions]
            self.grammar = {"kind": "tools", "text": dump([lark, schemas])}
        if self.ahead and self.grammar:
            before = tools.grammar_before(self.ahead, chat.tokens, is_free)
            self.grammar = self.grammar | {"before": before}

    async def __call__(self, scope, receive, send):
        # Checked here, because nothing is awaited from here to the submission. So even a burst of
        # calls cannot exceed the queue.
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
        """Take a choice's new tokens, and the other values of its row (see link.py)."""
        choice.add_tokens(tokens, *output)
        self.service.metrics.count_tokens(choice, len(tokens))
        self.num_unfinished -= choice.finish_reason is not None
        self.is_done = self.num_unfinished == 0
        if self.body.stream or self.is_done:
            self.changed.set()  # wakes a task, which sends after all messages of the round are read

    def on_refusal(self, kind, message, refused):
        """
        Fail the call, because the engine refused a choice or failed to compute it. There is one
        exception: if the schemas of some tools are the reason, and the model need not call a tool,
        the call is submitted again. Any object is then accepted as the arguments of these tools.
        `refused` has their numbers.
        """
        if kind != "invalid":  # the client cannot correct it
            return self.fail(ApiError(500, message))
        refused = [self.body.functions[number] for number in refused]
        if refused and self.body.tool_choice == "auto":
            return self._submit_again(refused)
        logged = message.partition(": ")[0]  # the rest may quote the client's grammar
        if refused:
            number = [tool.function for tool in self.body.tools].index(refused[0])
            message = f"tools.{number}.function.parameters ({refused[0].name}): {message}"
        self.fail(ApiError(400, message, *self.body.constraints[:1], logged=logged))

    def _submit_again(self, functions: list):
        """Submit the call without the schemas of these functions. A header names them."""
        names = ", ".join(function.name for function in functions)
        self.headers.append((b"x-unheld-tools", names.encode()))
        for function in functions:
            function.parameters = {}
        self._constrain(self.service.encoder.chat)
        for choice in self.choices:
            self.client.abort(choice)
        self.submit()

    # its end

    def fail(self, error: ApiError):
        """
        End the call with an error. Does nothing if the call has ended: its last tokens may still
        wait to be sent.
        """
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
        End the call if it takes too long, or if the client hangs up. ASGI reports a hang-up only to
        `receive`.
        """
        limit = self.service.args.request_seconds
        try:
            async with asyncio.timeout(limit):
                while (await receive())["type"] != "http.disconnect":
                    pass
            self.fail(ClientGone())
        except TimeoutError:
            message = f"not finished within {limit:g} s, the limit of this server"
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
        Keep the connection alive: every PING_SECONDS, have `send_stream` send a comment unless
        there is something else to send. This is one timer for the whole stream. A timeout for each
        token would cost more than the token.
        """
        while True:
            await asyncio.sleep(PING_SECONDS)
            self.is_silent = True
            self.changed.set()

    async def send_stream(self, send):
        """
        Send server-sent events until all choices have ended, each time everything new. The headers
        are sent with the first event, so an earlier error still has its own HTTP status. A later
        error is sent as the last event.
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
            if not data:  # all of the new text is held back
                continue
            if not is_started:
                is_started = True
                headers = EVENTS + self.headers
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": not is_done})

    def last_events(self) -> list[bytes]:
        """Return the events after the last tokens: the usage, if requested, and the end."""
        if self.error:
            return [error_body(self.error)]
        if self.body.stream_options.include_usage:
            return [orjson.dumps(self.head | {"choices": [], "usage": self.usage()}), b"[DONE]"]
        return [b"[DONE]"]


async def send_json(send, data: bytes, more_headers=()):
    """
    Send JSON, which may be long, in slices. Each `send` waits until the previous slice is on its
    way.
    """
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    headers += more_headers
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(data), SLICE):
        end = start + SLICE
        message = {"type": "http.response.body", "body": data[start:end]}
        await send(message | {"more_body": end < len(data)})
