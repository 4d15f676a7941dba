"""
Converts the engine's tokens to the client's answer: text, log-probabilities, JSON, events.

    choice = CompletionChoice(job, 0, body, prompt, tokenizer, eos)     # or ChatChoice
    choice.add_tokens([12, 7], None, 0)        # tokens from a step
    choice.text, choice.chunks()               # the unsent text, and its JSON for events
    choice.mark_sent()

Each call has a `Job`, which has a `Choice` for each of the n continuations of each prompt.
`EngineClient` (client.py) passes each step's tokens to `Job.on_tokens`. The choice converts the
tokens to text, looks for stop strings, and counts tokens. The job is an ASGI application. It sends
all choices as one answer, or streams new text as server-sent events. Answers have OpenAI's format,
with vLLM's extensions. Not run by itself: app.py creates a Job for each completion.
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

SEED_BITS = 48  # size of random seeds; JSON parsers that use doubles are exact up to 53 bits
SLICE = 2**18  # number of bytes of a long answer to send at a time


# --------------------------------------------------------------------------------------------------
# One continuation of a prompt


class Choice:
    """
    One continuation of a prompt. The engine's steps add tokens. These attributes hold what has not
    been sent yet:

    text       the new text
    tokens     the new tokens
    entries    the tokens' log-probabilities in the answer's format, if requested
    deltas     the new text as parsed by `reader`, if there are tools or thoughts

    `prompt_entries` are the entries for an echoed prompt. Entries are created as the tokens arrive.
    Creating all entries of a long answer at its end would block the event loop for a second.

    Each path has its own subclass, which knows the format of that path's answers.
    """

    def __init__(self, job, index: int, body, prompt: list[int], tokenizer, eos: list[int]):
        self.job = job
        self.index = index
        self.body = body  # protocol.SamplingRequest
        self.prompt = prompt
        self.num_logprobs = body.num_logprobs
        # An answer that stops at one of these tokens has no stop_reason. With ignore_eos, they are
        # ordinary tokens.
        self.eos = () if body.ignore_eos else eos
        self.siblings = [self]  # all choices for the prompt
        self.engine_id = None  # id of this choice's request in the engine
        self.num_tokens = 0  # tokens in the answer, without those after a stop string
        self.num_sent = 0  # tokens sent in chunks
        self.cached_tokens = 0  # prompt tokens found in the prefix cache
        self.prompt_entries = []
        self.finish_reason = None  # "stop" or "length" once the choice has ended
        self.stop_reason = None  # for "stop": the stop string or token id; None for end of text
        self.first_step = self.last_step = 0.0  # times of its first and last tokens, for metrics.py
        self.spell = tokenizer.spelled_bytes  # also spells control tokens, such as "<|endoftext|>"
        context = () if body.echo else prompt
        self.stream = tokenizer.stream(context, body.skip_special_tokens and not body.echo)
        self.reader = None
        self.markers = {}  # token id -> its text, for tokens that mark parts of an answer
        if body.tools or job.ahead:
            self.reader = tools.Reader(job.call_tags, job.ahead, job.hidden)
            self.markers = job.markers
        self.mark_sent()
        self.is_first = True  # nothing has been sent yet
        if body.echo:
            self._echo(tokenizer)

    def _echo(self, tokenizer):
        """
        Begin the answer with the prompt as the client sent it. Control tokens are shown by name,
        and a BOS that the tokenizer added is left out. The prompt is not searched for stop strings,
        but a character may begin in the prompt and end in the answer. If log-probabilities are
        requested, the prompt is processed token by token, because each token needs its offset.
        (MAX_SCORES limits the length of such a prompt.) Other prompts may be long, so they are
        processed in one call.
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
            self.prompt_entries = [self.entry(self.prompt[0], None, 0)]  # has no prediction
        if self.body.skip_special_tokens:  # hide control tokens only in the answer
            self.stream.token_bytes = tokenizer.token_bytes

    def add_tokens(self, tokens, finish_reason, cached_tokens, scores=None, prompt_scores=None):
        """
        Add the new tokens from one or more steps: convert them to text, and search the text for
        stop strings. If finish_reason is "stop", the last token is a stop token, which has no text.
        Scores are passed only if they were requested. A score is a list: the token's
        log-probability, the ids of the likeliest tokens, and their log-probabilities. `scores` has
        a score for each new token. `prompt_scores` has a score for each prompt token except the
        first, and is passed only once, with the first tokens of one of the prompt's choices.
        """
        self.cached_tokens = cached_tokens
        if prompt_scores:
            rows = zip(self.prompt[1:], prompt_scores, self.prompt_offsets[1:], strict=True)
            entries = self.prompt_entries[:1] + [self.entry(*row) for row in rows]
            for sibling in self.siblings:
                sibling.prompt_entries = entries
        if self.body.max_tokens == 0:  # only the prompt's scores were requested
            tokens = []
            finish_reason = "length"
        num_shown = len(tokens) - (finish_reason == "stop")  # number of tokens with text
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
            self.stop_reason = self.stream.matched  # U+FFFD for an incomplete character can match
            self.finish_reason = finish_reason if self.stop_reason is None else "stop"
            if finish_reason == "stop" and self.stop_reason is None and tokens[-1] not in self.eos:
                self.stop_reason = tokens[-1]

    def has_unsent(self) -> bool:
        """
        Return whether there is anything to send: text, the end of the answer, or tokens if they
        were requested.
        """
        # an echo must wait for the prompt's scores, which arrive with one of the choices' tokens
        if 0 < len(self.prompt_entries) < len(self.prompt):
            return False
        if self.finish_reason:
            return not self.is_end_sent
        if self.tokens and (self.body.return_token_ids or self.num_logprobs is not None):
            return True
        return bool(self.text or self.deltas)

    def mark_sent(self):
        """Clear the text, tokens and entries that have been sent to the client."""
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
        and `tokens` are the new tokens. A non-streaming answer has one chunk for each choice.
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
        """Return the fields about the prompt, which are sent only once."""
        return {"prompt_token_ids": self.prompt} if self.body.return_token_ids else {}

    def name(self, token) -> str:
        return token_name(self.spell(token))


def token_counts(prompt_tokens, completion_tokens) -> dict:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def likeliest(token, score) -> dict[int, float]:
    """
    Return {id: log-probability} for the likeliest tokens (likeliest first) and for the token
    itself.
    """
    logprob, ids, logprobs = score
    candidates = dict(zip(ids, logprobs, strict=True))
    candidates.setdefault(token, logprob)
    return candidates


class CompletionChoice(Choice):
    """A choice in the format of /v1/completions."""

    id_prefix = "cmpl-"
    objects = ("text_completion", "text_completion")  # `object` in a whole answer, in a chunk

    def chunks(self) -> list[dict]:
        """Return everything unsent, as a chunk for each event."""
        content = {"text": self.text}
        if self.is_first:
            content |= self.prompt_fields()
        return [self.chunk(content, self.tokens, self.finish_reason)]

    def entry(self, token, score, offset) -> tuple:
        """Return a token's values for the four lists in `logprobs`."""
        if not score:
            return self.name(token), None, None, offset
        candidates = likeliest(token, score)
        top = {self.name(i): p for i, p in candidates.items()}
        return self.name(token), candidates[token], top, offset

    def logprobs(self, tokens) -> dict:
        """
        Return OpenAI's format for completions: four lists with a value for each token, including
        the tokens of an echoed prompt. The log-probabilities of the prompt's first token are null,
        because the model does not predict it.
        """
        entries = self.prompt_entries + self.entries if self.is_first else self.entries
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[i] for entry in entries] for i, name in enumerate(names)}


class ChatChoice(Choice):
    """A choice in the format of /v1/chat/completions."""

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
        Return everything unsent, as a chunk for each event. In a stream, the first event has only
        the role, and the last event has only the finish_reason. The events between them have the
        text. Fields about the prompt are placed next to `choices`, because a chat has only one
        prompt. A non-streaming answer has one chunk with the whole message.
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
        """Return a token's log-probabilities as OpenAI's object."""
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
    The answer to one call, as an ASGI application. It is sent whole, or as a stream of server-sent
    events. If a client reads slowly, `send` waits and tokens accumulate (backpressure). They are
    then sent as one event. However the call ends, it leaves no requests in the engine.

    service    app.Service
    call       connection.Call
    """

    def __init__(self, service, body, prompts: list[list[int]], call):
        self.service = service
        self.client = service.client
        self.body = body
        self.call = call
        self.salt = f"{call.salt}:{body.cache_salt or ''}"  # for the prefix cache
        self.started = time.monotonic()
        self.changed = asyncio.Event()  # set when there may be something to send
        self.is_silent = False  # a ping is due if there is nothing else to send
        self.is_done = False  # all choices have ended, or there is an error
        self.error = None  # an ApiError
        self.seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
        self.grammar = body.response_format or body.structured_outputs
        self.headers = []  # extra headers for the answer
        self.call_tags = None
        self.ahead = []  # thought markers that may still appear
        if body.messages:
            self._read_chat(service.encoder, prompts[0])
        kind = ChatChoice if body.messages else CompletionChoice
        tokenizer = service.encoder.tokenizer
        eos = self.client.info["eos_token_ids"]
        self.choices = []
        for number, prompt in enumerate(prompts):
            seeded = body
            if body.seed is None:  # otherwise, equal prompts in a call would get equal answers
                seeded = body.model_copy(update={"seed": self.seed + number})
            first = number * body.n
            siblings = [
                kind(self, first + i, seeded, prompt, tokenizer, eos) for i in range(body.n)
            ]
            for choice in siblings:
                choice.siblings = siblings
            self.choices += siblings
        self.num_unfinished = len(self.choices)
        self.id = f"{kind.id_prefix}{body.request_id or call.id}"
        self.head = {
            "id": self.id,
            "object": kind.objects[body.stream],
            "created": int(time.time()),
            "model": service.name,
        }
        # if usage is requested, it is null in all chunks before the last
        usage = {"usage": None} if body.stream_options.include_usage else {}
        self.chunk_head = self.head | usage

    def _read_chat(self, encoder, prompt: list[int]):
        """
        Find out whether the answer may contain thoughts or calls, and constrain the answer if the
        call asks for it. Raises ApiError.
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
        Constrain the answer, after its thoughts, to the tools' schemas or to a grammar. Raises
        ApiError if tool_choice is "auto" and the template has no tags for calls.
        """
        is_free = bool(self.body.tools) and self.body.tool_choice == "auto"
        if self.body.tools:
            self.call_tags = chat.call_tags
            if is_free and not any(self.call_tags):
                why = "this model's chat template does not support tools, or JSON calls in tags"
                remedy = 'send "required", "none" or a function'
                raise ApiError(400, f'tool_choice is "auto", but {why}: {remedy}', "tool_choice")
            lark = tools.grammar_of_calls(self.body, self.call_tags, chat.tokens)
            dump = partial(json.dumps, ensure_ascii=False)  # a socket message has at most 400 KB
            schemas = [dump(tools.schema_of(function)) for function in self.body.functions]
            self.grammar = {"kind": "tools", "text": dump([lark, schemas])}
        if self.ahead and self.grammar:
            before = tools.grammar_before(self.ahead, chat.tokens, is_free)
            self.grammar = self.grammar | {"before": before}

    async def __call__(self, scope, receive, send):
        # Checked here because nothing is awaited between here and the submission. So not even a
        # burst of calls can exceed the queue.
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
            self.call.logged["tokens"] = sum(choice.num_tokens for choice in self.choices)

    def submit(self):
        if self.body.needs_engine:
            for choice in self.choices[:: self.body.n]:
                self.client.submit(choice.siblings)
        else:
            for choice in self.choices:
                self.on_tokens(choice, [], "length", 0)

    # called by the engine's client

    def on_tokens(self, choice, tokens, *output):
        """Handle a choice's new tokens, and the other values in its row (see link.py)."""
        choice.add_tokens(tokens, *output)
        self.service.metrics.count_tokens(choice, len(tokens))
        self.num_unfinished -= choice.finish_reason is not None
        self.is_done = self.num_unfinished == 0
        if self.body.stream or self.is_done:
            self.changed.set()  # wakes a task, which sends once the round's messages are all read

    def on_refusal(self, kind, message, refused):
        """
        Fail the call, because the engine refused a choice or failed to compute it. There is one
        exception. If the engine refused the schemas of some tools, and the model need not call a
        tool, the call is submitted again. These tools then accept any object as their arguments.
        `refused` has their numbers.
        """
        if kind != "invalid":  # not something the client can fix
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
        """Submit the call again without these functions' schemas. A header lists the functions."""
        names = ", ".join(function.name for function in functions)
        self.headers.append((b"x-unheld-tools", names.encode()))
        for function in functions:
            function.parameters = {}
        self._constrain(self.service.encoder.chat)
        for choice in self.choices:
            self.client.abort(choice)
        self.submit()

    # ending the call

    def fail(self, error: ApiError):
        """
        End the call with an error. Does nothing if the call has already ended, because its last
        tokens may still be waiting to be sent.
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
        End the call if it takes too long, or if the client disconnects. ASGI reports a disconnect
        only through `receive`.
        """
        limit = self.service.args.request_seconds
        try:
            async with asyncio.timeout(limit):
                while (await receive())["type"] != "http.disconnect":
                    pass
            self.fail(ClientGone())
        except TimeoutError:
            message = f"not finished within {limit:g} s, this server's limit"
            self.fail(ApiError(503, message, code="timeout"))

    # sending a whole answer

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

    # sending a stream

    async def ping(self):
        """
        Keep the connection alive: every PING_SECONDS, make `send_stream` send a comment unless
        there is something else to send. The whole stream needs only this one timer. A timeout for
        each token would cost more than the token itself.
        """
        while True:
            await asyncio.sleep(PING_SECONDS)
            self.is_silent = True
            self.changed.set()

    async def send_stream(self, send):
        """
        Send server-sent events until all choices have ended. Each time, everything unsent is sent.
        The headers go out with the first event, so an earlier error still gets its own HTTP status.
        A later error is sent as the last event.
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
        """
        Return the events after the last tokens: the error, or the usage (if requested) and [DONE].
        """
        if self.error:
            return [error_body(self.error)]
        if self.body.stream_options.include_usage:
            return [orjson.dumps(self.head | {"choices": [], "usage": self.usage()}), b"[DONE]"]
        return [b"[DONE]"]


async def send_json(send, data: bytes, more_headers=()):
    """
    Send JSON in slices, because it may be long. Each `send` waits until the previous slice has been
    passed on.
    """
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    headers += more_headers
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(data), SLICE):
        end = start + SLICE
        more = end < len(data)
        await send({"type": "http.response.body", "body": data[start:end], "more_body": more})
