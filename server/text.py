"""
Texts and conversations -> token ids, and back.

    chat = load_chat("out/chatty", tokenizer)      # None without a chat template
    ids = chat.encode([{"role": "user", "content": "hello"}])

    encoder = Encoder("out/chatty")                # for an event loop: work is done in two threads
    [ids] = await encoder.encode(["def"], True)

The `tokenizers` library releases the GIL while it encodes, so a thread keeps a long text from
blocking the event loop, and a second thread keeps short texts from waiting for long ones. A chat
template is a program that comes with the checkpoint: it runs in jinja2's sandbox and for a limited
time, sees the variables that transformers shows it, and its text becomes the same tokens. Against
prompt injection, a user's text never becomes a control token (`disguise`).
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

# what belongs to grammars in the HTTP process; None where there are none
tools = import_module("server.tools") if "grammar" in STAGES else None

# Encoding takes 0.1 to 2 us a character, whatever the text: for 1,024 or so many ids at most 2 ms.
SHORT = 1024
LONG = 2**16  # characters and ids: what has more waits in a lane of its own, for up to 0.2 s each
MAX_WAITING = 2**26  # characters and ids of all that waits in a lane: they are in memory
MAX_RENDER_SECONDS = 2  # of CPU time: 4 MiB take 0.2 s
NO_DEFAULT = "{{ raise_exception('this model has a chat template for tools alone: send some') }}"
PRIVATE_USE = "[\U000f0000-\U0010fffd]"  # characters without a meaning, 131,070 of them

Messages = list[dict]  # [{"role", "content"}, ..], perhaps with "name", "tool_calls"


# --------------------------------------------------------------------------------------------------
# Without blocking the event loop


class EncoderBusy(RuntimeError):
    """Too much is waiting to be encoded."""


class TooLong(TokenizerError):
    """A text that has more tokens than the model takes."""


class Lane:
    """
    A thread that does one piece of work at a time. Whenever it is free it takes the smallest piece
    that waits. So a flood of longer texts delays a short one by at most one of them.
    """

    def __init__(self, directory: str | Path, variables: dict | None):
        # Encoding changes fields of a tokenizer, so each thread has one of its own.
        self.tokenizer = load_tokenizer(directory)
        self.chat = load_chat(directory, self.tokenizer, variables)
        self.thread = ThreadPoolExecutor(1)
        # The size of each piece of work, by a future that is done when its turn has come.
        self.sizes: dict[asyncio.Future, int] = {}

    async def run(self, work: Callable, size: int):
        """Return `work(self)`. Raises EncoderBusy if too much waits already."""
        if sum(self.sizes.values()) + size > MAX_WAITING:
            raise EncoderBusy("too much text is waiting to be encoded: try again later")
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self.sizes[turn] = size
        try:
            self._start_smallest()
            await turn
            return await loop.run_in_executor(self.thread, work, self)
        finally:
            del self.sizes[turn]
            self._start_smallest()

    def _start_smallest(self):
        if self.sizes and not any(turn.done() for turn in self.sizes):
            min(self.sizes, key=self.sizes.get).set_result(None)


class Encoder:
    """
    A checkpoint's tokenizer and chat template for an event loop: the shortest texts are encoded in
    place, all else in one of two lanes, one for short texts and one for long ones. `variables`: see
    Chat. Raises TokenizerError, also for a chat template that is broken, or missing.
    """

    def __init__(self, directory: str | Path, variables: dict | None = None):
        self.tokenizer = load_tokenizer(directory)
        self.lanes = [Lane(directory, variables) for _ in range(2)]  # of short texts, of long ones
        self.chat = self.lanes[0].chat

    async def encode(
        self, texts: list[str], add_special_tokens: bool, most_tokens: float = math.inf
    ) -> list[list[int]]:
        """
        Token ids of each text; add_special_tokens: with the tokenizer's BOS, if it has one. Raises
        TooLong, before it encodes, for a text that certainly has more than most_tokens.
        """
        for text in texts:
            check_length(self.tokenizer, text, most_tokens)

        def work(lane) -> list[list[int]]:
            return [lane.tokenizer.encode(text, True, add_special_tokens) for text in texts]

        # beside its characters, each text costs a call: as much as some 16 characters
        return await self._run(work, sum(len(text) + 16 for text in texts))

    async def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, with control tokens by their names."""
        return await self._run(lambda lane: lane.tokenizer.decode(ids, False), len(ids))

    async def encode_chat(self, messages: Messages, /, *limits, **options) -> list[int]:
        """Return the token ids of a conversation. The arguments are those of Chat.encode."""

        def work(lane) -> list[int]:
            return lane.chat.encode(messages, *limits, **options)

        # templates also show options: a tool's description may be longer than all messages
        size = len(str([messages, options]))
        return await self.lanes[size > LONG].run(work, size)

    async def _run(self, work: Callable, size: int):
        """
        Return `work(lane)`: done in place if it takes at most 2 ms, which a regular expression of
        the checkpoint may not. Raises EncoderBusy if too much waits already.
        """
        if size <= SHORT and self.tokenizer.has_known_pattern:
            return work(self)
        return await self.lanes[size > LONG].run(work, size)

    def close(self):
        """Drop what the threads have not begun."""
        for lane in self.lanes:
            lane.thread.shutdown(wait=False, cancel_futures=True)


def check_length(tokenizer: Tokenizer, text: str, most_tokens: float):
    """Raise TooLong for a text that certainly has more tokens, without encoding it."""
    least = tokenizer.least_tokens(text)
    if least > most_tokens:
        # client libraries look for the first words
        limit = f"this model's maximum context length is {most_tokens} tokens"
        raise TooLong(f"{limit}, the prompt has at least {least:,}: shorten it")


# --------------------------------------------------------------------------------------------------
# Chat templates


def read_templates(directory: Path) -> dict[str, str]:
    """
    Return the sources of the templates by their names, as transformers finds them: in files of
    their own, or else in the tokenizer's configuration. A single one is the "default". Raises
    TokenizerError for a template that is no text.
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
                raise TypeError("its chat_template is no text")
    except MALFORMED as error:
        raise TokenizerError(
            f"{path} is broken ({type(error).__name__}: {error}): restore it"
        ) from None
    return templates


def load_chat(
    directory: str | Path, tokenizer: Tokenizer, variables: dict | None = None
) -> "Chat | None":
    """
    The chat of a checkpoint directory, None without a template. Raises TokenizerError for a
    template that is broken, and for variables without a template.
    """
    directory = Path(directory)
    templates = read_templates(directory)
    if templates.keys().isdisjoint({"default", "tool_use"}):
        if variables:
            raise TokenizerError(
                f"--default-chat-template-kwargs: {directory} has no chat template, leave it out"
            )
        return None
    named = {"bos_token": "", "eos_token": ""} | named_tokens(read_config(directory))
    names = {name: token_text(value) for name, value in named.items()}
    source = templates.get("default", NO_DEFAULT)
    return Chat(source, names, tokenizer, variables, templates.get("tool_use"))


class Chat:
    """
    A compiled template, and the tokenizer of its text. `variables` are those of the template that
    a conversation does not set itself. `tool_source` is the template for conversations with tools,
    if they have one of their own.

    call_tags   see tools.find_tags
    thoughts    see tools.find_thoughts
    tokens      the markers in the model's answers that are tokens, by their names
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
        # OpenAI's newer name of the role: most templates would leave its messages out
        self.system_role = "developer" if "developer" in "".join(sources) else "system"
        markers = self.call_tags + self.thoughts
        self.tokens = {m: id for m in markers if (id := backend.token_to_id(m)) is not None}
        self.control_names = ControlNames(tokenizer.control)
        self.names_in_answers = ControlNames(tokenizer.control.keys() - self.tokens)
        environment = make_environment()
        environment.globals |= token_names
        try:  # the templates without and with tools
            self.templates = [environment.from_string(with_clock(environment, s)) for s in sources]
        except Exception as error:  # jinja2's own, and those of constants that it computes
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
        Return the token ids of a conversation. Options, such as add_generation_prompt, are
        variables of the template. The template writes its own control tokens, BOS included;
        add_special_tokens would add a second BOS. Raises TokenizerError, and TooLong as
        Encoder.encode does.

        Against prompt injection: the name of a control token becomes that token only in the
        template's own text and in roles. In all else, options too, it stays text, so that a user
        cannot end the turn and speak as the system. Only the markers in the model's own answers are
        tokens again: templates look for them.
        """
        options = self.variables | options
        roles = {"developer": self.system_role}
        messages = [m | {"role": roles.get(m["role"], m["role"])} for m in messages]
        disguised, options, originals = disguise(
            messages, options, self.control_names, self.names_in_answers
        )
        text = self.render(disguised, **options)
        check_length(self.tokenizer, text, most_tokens)
        ids = self.tokenizer.encode(text, True, add_special_tokens, originals)
        if not ids:
            raise TokenizerError("the chat template makes no text of this conversation")
        return ids

    def render(self, messages: Messages, /, **options) -> str:
        """
        The text of a conversation. Raises TokenizerError where the template fails at it, or takes
        more than MAX_RENDER_SECONDS of its thread's time.
        """
        end = time.thread_time() + MAX_RENDER_SECONDS

        def check_clock():
            if time.thread_time() > end:
                limit = f"takes more than {MAX_RENDER_SECONDS} s for this conversation"
                raise TokenizerError(f"the chat template {limit}: shorten it")

        unset = {"tools": None, "documents": None}
        has_tools = options.get("tools") is not None
        if has_tools:
            unset["xml_tools"] = options["tools"]  # SmolLM3's name
        own = {"messages": messages, "check_clock": check_clock}
        try:
            return self.templates[has_tools].render(unset | options | own)
        except TokenizerError:
            raise
        except Exception as error:  # a template is a program, so any exception may come
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from None


def make_environment():
    """jinja2's sandbox with what transformers adds to it, so that the hub's templates run."""
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise TokenizerError(
            "this checkpoint has a chat template, which needs jinja2: `pip install jinja2`, or add "
            "--raw to have text continued as it stands at the terminal"
        ) from None

    class Generation(Extension):
        """
        {% generation %} .. {% endgeneration %} marks the model's words, for training. Here they are
        just text.
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

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def with_clock(environment, source: str):
    """Parse a template, so that each turn of a loop and each call of a macro looks at the clock."""
    from jinja2 import nodes

    check = environment.parse("{% if check_clock() %}{% endif %}").body
    template = environment.parse(source)
    for node in [*template.find_all((nodes.For, nodes.Macro))]:
        node.body[:0] = check
    return template


# --------------------------------------------------------------------------------------------------
# Against prompt injection: what users write stays text


class ControlNames:
    """The names of a tokenizer's control (special) tokens."""

    def __init__(self, names):
        self.names = [*names]
        # a name may begin in one message and end in the next, or in the template's own text
        self.beginnings = {name[:n] for name in names for n in range(1, len(name))}
        self.ends = {name[n:] for name in names for n in range(1, len(name))}
        self.longest = max(map(len, names), default=0)

    def disguise(self, value, stand_ins: dict[str, str]):
        """Plain data with each text in it disguised, also names of fields."""
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
        The text with a stand-in for the first character of each name, also of parts of names at its
        ends. (One regular expression of 256 names would hold the GIL for seconds over 4 MiB.)
        """
        for name in self.names:
            while name in text:  # again: in <<< the name << begins twice
                text = text.replace(name, stand_ins[name[0]] + name[1:])
        for n in range(1, min(self.longest, len(text) + 1)):
            start = len(text) - n
            if text[start:] in self.beginnings:
                text = text[:start] + stand_ins[text[start]] + text[start + 1 :]
            if text[:n] in self.ends:
                text = stand_ins[text[0]] + text[1:]
        return text


def disguise(
    messages: Messages, options: dict, names: ControlNames, names_in_answers: ControlNames
) -> tuple[Messages, dict, dict[int, str]]:
    """
    Replace, in all that users write freely, the first character of each control token's name by a
    stand-in: a private-use character that occurs nowhere in this conversation. The template may
    then do what it likes with the messages and options: all names in its text are its own. Returns
    both, and a table for `str.translate` that turns stand-ins back.

    Marking where messages begin and end would not do: templates strip messages, split and compare
    them. Nor would encoding messages apart from the template's text: a token may reach from one
    into the other.
    """
    everything = json.dumps([messages, options], ensure_ascii=False)
    used = set(re.findall(PRIVATE_USE, everything))
    unused = (c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in used)
    # the stand-in of each character, made when it is needed
    stand_ins = defaultdict(lambda: next(unused, ""))
    # a template looks its variables up by their names: these stay
    options = {name: names.disguise(value, stand_ins) for name, value in options.items()}

    def disguise_field(message: dict, field: str):
        if field == "role":  # one of a few words, of which templates make control tokens
            return message[field]
        is_answer = field == "content" and message["role"] == "assistant"
        return (names_in_answers if is_answer else names).disguise(message[field], stand_ins)

    messages = [
        {field: disguise_field(message, field) for field in message} for message in messages
    ]
    if "" in stand_ins.values():
        raise TokenizerError(
            "this conversation uses all private-use characters of Unicode: leave some out"
        )
    return messages, options, {ord(stand_in): original for original, stand_in in stand_ins.items()}
