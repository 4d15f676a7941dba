"""
Converts texts and conversations to token ids, and token ids to text.

    chat = load_chat("out/chatty", tokenizer)      # None if there is no chat template
    ids = chat.encode([{"role": "user", "content": "hello"}])

    encoder = Encoder("out/chatty")                # for use in an event loop; has two threads
    [ids] = await encoder.encode(["def"], True)

The `tokenizers` library releases the GIL while it encodes. So a thread can encode a long text
without blocking the event loop. Because there is a second thread, short texts need not wait for
long ones.

A chat template is a program that comes with the checkpoint. It runs in jinja2's sandbox, for a
limited time. It gets the same variables as in transformers, so that conversations are tokenized
identically. To prevent prompt injection, a user's text never becomes a control token (`disguise`).
"""

import asyncio
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib import import_module
from pathlib import Path

from common import MALFORMED, read_json
from engine.stages import STAGES
from tokenizer import (
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    named_tokens,
    read_config,
    token_text,
)

# tools need grammars, so this is None if the grammar stage was deleted
tools = import_module("server.tools") if "grammar" in STAGES else None

# The size of a piece of work is its number of characters or ids. Encoding takes 0.1 to 2 us for
# each, whatever the text. So work up to size SHORT takes at most 2 ms, and work up to size LONG
# takes at most 0.2 s.
SHORT = 1024
LONG = 2**16  # larger work has its own lane
MAX_WAITING = 2**26  # limits the total size of work waiting in a lane, as its texts are in memory
MAX_RENDER_SECONDS = 2  # CPU time; rendering 4 MiB takes 0.2 s
NO_DEFAULT = "{{ raise_exception('this model has a chat template only for tools: send some') }}"
PRIVATE_USE = "[\U000f0000-\U0010fffd]"  # 131,070 characters with no assigned meaning

Messages = list[dict]  # [{"role", "content"}, ..], perhaps with "name", "tool_calls", ..


# --------------------------------------------------------------------------------------------------
# Without blocking the event loop


class EncoderBusy(RuntimeError):
    """Too much text is waiting to be encoded."""


class TooLong(TokenizerError):
    """A text has more tokens than the model accepts."""


class Lane:
    """
    A thread that does one piece of work at a time. When the thread is free, it takes the smallest
    waiting piece. So however many longer texts there are, a short text waits for at most one of
    them.
    """

    def __init__(self, directory: str | Path, variables: dict | None):
        # encoding changes fields of a tokenizer, so each thread needs its own
        self.tokenizer = load_tokenizer(directory)
        self.chat = load_chat(directory, self.tokenizer, variables)
        self.thread = ThreadPoolExecutor(1)
        # future that is done when the lane starts a piece of work -> the size of that piece
        self.sizes: dict[asyncio.Future, int] = {}

    async def run(self, work: Callable, size: int):
        """Return `work(self)`. Raises EncoderBusy if too much work is already waiting."""
        if sum(self.sizes.values()) + size > MAX_WAITING:
            raise EncoderBusy("too much text is waiting to be encoded: try again later")
        loop = asyncio.get_running_loop()
        started = loop.create_future()
        self.sizes[started] = size
        try:
            self._start_smallest()
            await started
            return await loop.run_in_executor(self.thread, work, self)
        finally:
            del self.sizes[started]
            self._start_smallest()

    def _start_smallest(self):
        if self.sizes and not any(started.done() for started in self.sizes):
            min(self.sizes, key=self.sizes.get).set_result(None)


class Encoder:
    """
    A checkpoint's tokenizer and chat template, for use in an event loop. The shortest texts are
    encoded immediately. All others are encoded in one of two lanes: one for short texts, and one
    for long texts. `variables`: see Chat. Raises TokenizerError, for example if the chat template
    is broken, or if there are variables but no template.
    """

    def __init__(self, directory: str | Path, variables: dict | None = None):
        self.tokenizer = load_tokenizer(directory)
        self.lanes = [Lane(directory, variables) for _ in range(2)]  # for short, long texts
        self.chat = self.lanes[0].chat

    async def encode(
        self, texts: list[str], add_special_tokens: bool, most_tokens: float = math.inf
    ) -> list[list[int]]:
        """
        Return the token ids of each text. `add_special_tokens`: whether to add the tokenizer's BOS,
        if it has one. Raises TooLong before encoding a text that certainly has more than
        `most_tokens`.
        """
        for text in texts:
            check_length(self.tokenizer, text, most_tokens)

        def work(lane) -> list[list[int]]:
            return [lane.tokenizer.encode(text, True, add_special_tokens) for text in texts]

        # each text also needs a call, which costs about as much as 16 characters
        return await self._run(work, sum(len(text) + 16 for text in texts))

    async def decode(self, ids: list[int]) -> str:
        """Return the text of tokens. Control tokens are shown by name."""
        return await self._run(lambda lane: lane.tokenizer.decode(ids, False), len(ids))

    async def encode_chat(self, messages: Messages, /, *limits, **options) -> list[int]:
        """Return the token ids of a conversation. The arguments are the same as for Chat.encode."""
        # templates also include options: a tool's description may be longer than all messages
        size = len(str([messages, options]))
        return await self.lanes[size > LONG].run(
            lambda lane: lane.chat.encode(messages, *limits, **options), size
        )

    async def _run(self, work: Callable, size: int):
        """
        Return `work(lane)`. Work that certainly takes at most 2 ms is done immediately. (With a
        tokenizer that has its own regular expression, this is never certain.) Raises EncoderBusy if
        too much work is already waiting.
        """
        if size <= SHORT and self.tokenizer.has_known_pattern:
            return work(self)
        return await self.lanes[size > LONG].run(work, size)

    def close(self):
        """Drop all work that the threads have not started yet."""
        for lane in self.lanes:
            lane.thread.shutdown(wait=False, cancel_futures=True)


def check_length(tokenizer: Tokenizer, text: str, most_tokens: float):
    """Raise TooLong if a text certainly has more than `most_tokens`, without encoding it."""
    least = tokenizer.least_tokens(text)
    if least > most_tokens:
        # client libraries search for exactly the first words
        raise TooLong(
            f"this model's maximum context length is {most_tokens} tokens, but the prompt has at "
            f"least {least:,}: shorten it"
        )


# --------------------------------------------------------------------------------------------------
# Chat templates


def read_templates(directory: Path) -> dict[str, str]:
    """
    Return the template sources by name. As in transformers, look first for template files, then in
    the tokenizer's configuration. A single template is named "default". Raises TokenizerError if a
    template cannot be read or is not a string.
    """
    files = [*directory.glob("chat_template.jinja")]
    files += directory.glob("additional_chat_templates/*.jinja")
    templates = {}
    try:
        for path in files:
            name = "default" if path.parent == directory else path.stem
            templates[name] = path.read_text(encoding="utf-8")
        if not files:
            path = directory / "tokenizer_config.json"
            templates = read_json(path).get("chat_template") or {}
            if isinstance(templates, list):
                templates = {t["name"]: t["template"] for t in templates}
            elif isinstance(templates, str):
                templates = {"default": templates}
            if not all(isinstance(source, str) for source in templates.values()):
                raise TypeError("its chat_template is not a string")
    except MALFORMED as error:
        raise TokenizerError(
            f"{path} is broken ({type(error).__name__}: {error}): restore it"
        ) from None
    return templates


def load_chat(
    directory: str | Path, tokenizer: Tokenizer, variables: dict | None = None
) -> "Chat | None":
    """
    Return a checkpoint directory's Chat, or None if it has no template. Raises TokenizerError if
    the template is broken, or if there are variables but no template.
    """
    directory = Path(directory)
    templates = read_templates(directory)
    if templates.keys().isdisjoint({"default", "tool_use"}):
        if variables:
            raise TokenizerError(
                f"--default-chat-template-kwargs: {directory} has no chat template: leave it out"
            )
        return None
    named = {"bos_token": "", "eos_token": ""} | named_tokens(read_config(directory))
    names = {name: token_text(value) for name, value in named.items()}
    source = templates.get("default", NO_DEFAULT)
    return Chat(source, names, tokenizer, variables, templates.get("tool_use"))


class Chat:
    """
    A compiled template, and the tokenizer for its text. `variables` are default values for the
    template's variables; a conversation may override them. `tool_source` is the template for
    conversations with tools, if there is a separate one.

    call_tags   see tools.find_tags
    thoughts    see tools.find_thoughts
    tokens      {marker: token id} for those markers that are tokens
    """

    def __init__(
        self,
        source: str,
        token_names: dict[str, str],
        tokenizer: Tokenizer,
        variables: dict | None = None,
        tool_source: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.variables = variables or {}
        backend = tokenizer.backend
        self.call_tags = self.thoughts = []
        if tools:
            self.call_tags = tools.find_tags(tool_source or source)
            texts = f"{source}{tool_source}{backend.get_added_tokens_decoder()}"
            self.thoughts = tools.find_thoughts(texts)
        sources = [source, tool_source or source]
        # OpenAI's newer name for the system role; most templates would leave its messages out
        self.system_role = "developer" if "developer" in "".join(sources) else "system"
        markers = self.call_tags + self.thoughts
        self.tokens = {m: id for m in markers if (id := backend.token_to_id(m)) is not None}
        self.control_names = ControlNames(tokenizer.control)
        self.names_in_answers = ControlNames(tokenizer.control.keys() - self.tokens)
        environment = make_environment()
        environment.globals |= token_names
        try:  # the templates for conversations without and with tools
            self.templates = [environment.from_string(with_clock(environment, s)) for s in sources]
        except Exception as error:  # from jinja2, or from an expression that it evaluates early
            raise TokenizerError(f"the chat template is broken: {error}") from None

    def encode(
        self,
        messages: Messages,
        add_special_tokens: bool = False,
        most_tokens: float = math.inf,
        /,
        **options,
    ) -> list[int]:
        """
        Return the token ids of a conversation. Options, such as add_generation_prompt, are template
        variables. A template usually writes its own control tokens, including BOS, so
        `add_special_tokens` would add a second BOS. Raises TokenizerError, and TooLong as in
        Encoder.encode.

        To prevent prompt injection, the name of a control token becomes that token only in the
        template's own text and in roles. Everywhere else, including options, the name remains text,
        so a user cannot end the turn and speak as the system. There is one exception: markers in
        the model's own answers become tokens, because templates look for them.
        """
        options = self.variables | options
        role = {"role": self.system_role}
        messages = [m | role if m.get("role") == "developer" else m for m in messages]
        disguised, options, originals = disguise(
            messages, options, self.control_names, self.names_in_answers
        )
        text = self.render(disguised, **options)
        check_length(self.tokenizer, text, most_tokens)
        ids = self.tokenizer.encode(text, True, add_special_tokens, originals)
        if not ids:
            raise TokenizerError("the chat template produces no text for this conversation")
        return ids

    def render(self, messages: Messages, /, **options) -> str:
        """
        Return the text of a conversation. Raises TokenizerError if the template fails, or uses more
        than MAX_RENDER_SECONDS of the thread's CPU time.
        """
        end = time.thread_time() + MAX_RENDER_SECONDS

        def check_clock():
            if time.thread_time() > end:
                raise TokenizerError(
                    f"the chat template takes more than {MAX_RENDER_SECONDS} s for this "
                    "conversation: shorten it"
                )

        unset = {"tools": None, "documents": None}
        has_tools = options.get("tools") is not None
        if has_tools:
            unset["xml_tools"] = options["tools"]  # SmolLM3's name for the tools
        own = {"messages": messages, "check_clock": check_clock}
        try:
            return self.templates[has_tools].render(unset | options | own)
        except TokenizerError:
            raise
        except Exception as error:  # a template is a program that can raise any exception
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from None


def make_environment():
    """Return jinja2's sandbox with transformers' additions, for templates from the hub."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise TokenizerError(
            "this checkpoint has a chat template, which needs jinja2: run `pip install jinja2`, or "
            "add --raw, so that --prompt is a text to continue"
        ) from None

    class Generation(Extension):
        """
        The tag {% generation %} .. {% endgeneration %}, which marks the model's text for training.
        It has no effect here.
        """

        tags = frozenset(["generation"])

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def tojson(value, ensure_ascii=False, indent=None, **options) -> str:
        # jinja2's own filter would escape for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def raise_exception(message: str):
        raise TokenizerError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def with_clock(environment, source: str):
    """Parse a template so that each loop iteration and each macro call checks the clock."""
    from jinja2 import nodes

    check = environment.parse("{% if check_clock() %}{% endif %}").body
    template = environment.parse(source)
    for node in [*template.find_all((nodes.For, nodes.Macro))]:
        node.body[:0] = check
    return template


# --------------------------------------------------------------------------------------------------
# Protection against prompt injection: what users write remains text


class ControlNames:
    """The names of a tokenizer's control (special) tokens."""

    def __init__(self, names):
        self.names = [*names]
        # a name could begin in one message and end in the next, or in the template's own text
        self.prefixes = {name[:n] for name in names for n in range(1, len(name))}
        self.suffixes = {name[n:] for name in names for n in range(1, len(name))}
        self.longest = max(map(len, names), default=0)

    def disguise(self, value, stand_ins: dict[str, str]):
        """Return plain data with all strings disguised, including keys."""
        if isinstance(value, list):
            return [self.disguise(item, stand_ins) for item in value]
        if isinstance(value, dict):
            return {
                self.disguise(name, stand_ins): self.disguise(item, stand_ins)
                for name, item in value.items()
            }
        return self._disguise_text(value, stand_ins) if isinstance(value, str) else value

    def _disguise_text(self, text: str, stand_ins: dict[str, str]) -> str:
        """
        Return the text with a stand-in for the first character of each name. Parts of names at
        either end of the text are also disguised. (A regular expression with 256 names would hold
        the GIL for seconds on 4 MiB of text.)
        """
        for name in self.names:
            while name in text:  # may take several rounds: << begins twice in <<<
                text = text.replace(name, stand_ins[name[0]] + name[1:])
        for n in range(1, min(self.longest, len(text) + 1)):
            start = len(text) - n
            if text[start:] in self.prefixes:
                text = text[:start] + stand_ins[text[start]] + text[start + 1 :]
            if text[:n] in self.suffixes:
                text = stand_ins[text[0]] + text[1:]
        return text


def disguise(
    messages: Messages, options: dict, names: ControlNames, names_in_answers: ControlNames
) -> tuple[Messages, dict, dict[int, str]]:
    """
    Disguise the names of control tokens in everything that users can write freely. The first
    character of each name is replaced with a stand-in, a private-use character that occurs nowhere
    in this conversation. The template may then do anything with the messages and options: any name
    in its output comes from the template itself. Returns the messages, the options, and a table for
    `str.translate` that replaces stand-ins with the original characters.

    Two simpler ways would not work. One is to mark where messages begin and end, but templates
    strip, split and compare messages. The other is to encode messages separately from the
    template's text, but a token may extend from one into the other.
    """
    everything = json.dumps([messages, options], ensure_ascii=False)
    used = set(re.findall(PRIVATE_USE, everything))
    unused = (c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in used)
    # character -> its stand-in, chosen when first needed
    stand_ins = defaultdict(lambda: next(unused, ""))
    # variable names are not disguised, because templates look variables up by name
    options = {name: names.disguise(value, stand_ins) for name, value in options.items()}

    def disguise_field(message: dict, field: str):
        if field == "role":  # one of a few fixed words, which templates convert to control tokens
            return message[field]
        is_answer = field == "content" and message["role"] == "assistant"
        return (names_in_answers if is_answer else names).disguise(message[field], stand_ins)

    messages = [
        {field: disguise_field(message, field) for field in message} for message in messages
    ]
    if "" in stand_ins.values():
        raise TokenizerError(
            "this conversation uses all of Unicode's private-use characters: leave some out"
        )
    return messages, options, {ord(stand_in): original for original, stand_in in stand_ins.items()}
