"""
A conversation -> token ids, by the chat template that a checkpoint brings.

    chat = load_chat("out/chatty", tokenizer)              # None where the checkpoint has no template
    ids = chat.encode([{"role": "user", "content": "hello"}])

The template is a program that comes with the checkpoint, from anywhere: it runs in jinja2's
sandbox, without the filters and globals that only make text, and its text is limited. Time and
memory are limited by encoder.py, which runs this in a process of its own. Templates see what
transformers shows them, and their text becomes the same tokens.
"""

import json
from datetime import datetime
from pathlib import Path

from tokenizer import Tokenizer, TokenizerError, read_json, token_text

MAX_RENDERED = (
    2**24
)  # characters that a template may make of a conversation: four times the largest body
USELESS_GLOBALS = (
    "lipsum",
    "cycler",
    "joiner",
)  # jinja2's own, which templates of chats do not use
PRIVATE_USE = range(0xF0000, 0x10FFFE)  # characters without a meaning, 131,070 of them


def read_template(directory: str | Path) -> str | None:
    """
    The template's source: chat_template.jinja, or in tokenizer_config.json. None where there is
    none. Raises TokenizerError for what is no template.
    """
    own_path = Path(directory) / "chat_template.jinja"
    if own_path.is_file():
        return own_path.read_text(encoding="utf-8")
    path = Path(directory) / "tokenizer_config.json"
    try:
        template = read_json(path).get("chat_template")
        if isinstance(template, list):  # several, each with a name
            named = {t["name"]: t["template"] for t in template}
            template = named.get("default")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is broken ({type(error).__name__}: {error}): restore it"
        ) from None
    if not isinstance(template, str | None):
        raise TokenizerError(f"{path} has a chat_template that is no text: restore it")
    return template


def load_chat(directory: str | Path, tokenizer: Tokenizer) -> "Chat | None":
    """The chat of a checkpoint directory. Raises TokenizerError for a template that is broken."""
    source = read_template(directory)
    if source is None:
        return None
    tokens = read_json(Path(directory) / "tokenizer_config.json")
    names = {"bos_token": "", "eos_token": ""}
    for name, value in tokens.items():
        if name.endswith("_token") and isinstance(value, str | dict):
            names[name] = token_text(value)
    return Chat(source, names, tokenizer)


class Chat:
    """A compiled template, and the tokenizer of its text."""

    def __init__(self, source: str, token_names: dict[str, str], tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.names = ControlNames(tokenizer)
        environment = make_environment()
        environment.globals |= token_names
        try:
            self.template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # jinja2's own, and those of constants that it computes
            raise TokenizerError(f"the chat template is broken: {error}") from None

    def encode(self, messages: list[dict], **options) -> list[int]:
        """
        Token ids of a conversation; options, such as add_generation_prompt, are variables of the
        template. The names of control tokens in the template's own text are these tokens, those in
        a message are text: or a user could end his turn, and speak as the system. Raises
        TokenizerError.
        """
        disguised, originals = disguise(messages, self.names)
        ids = self.tokenizer.encode(
            self.render(disguised, **options), allow_special=True, stand_ins=originals
        )
        if not ids:
            raise TokenizerError("the chat template makes no text of this conversation")
        return ids

    def render(self, messages: list[dict], **options) -> str:
        """
        The text of a conversation. Raises TokenizerError for whatever the template finds wrong with
        it.
        """
        pieces, size = [], 0
        try:
            for piece in self.template.generate(
                messages=messages, tools=None, documents=None, **options
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise TokenizerError(
                        f"the chat template makes more than {MAX_RENDERED} characters of this"
                    )
        except (TokenizerError, MemoryError):
            raise
        except (
            Exception
        ) as error:  # whatever a template does wrong with a conversation is no fault of ours
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from None
        return "".join(pieces)


def make_environment():
    """jinja2's sandbox with what transformers adds to it, so that the hub's templates run."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise TokenizerError(
            "this checkpoint has a chat template, which needs jinja2: pip install jinja2"
        ) from None
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """
        {% generation %} .. {% endgeneration %} marks what the model said, for training: here it is
        just text.
        """

        tags = frozenset(["generation"])

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja2's own escapes for HTML
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str):
        raise TokenizerError(message)

    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    for name in USELESS_GLOBALS:
        del environment.globals[name]
    return environment


# --------------------------------------------------------------------------------------------------
# What users write stays text


class ControlNames:
    """Where a message spells the names of control tokens."""

    def __init__(self, tokenizer: Tokenizer):
        names = tokenizer.control
        self.pattern = tokenizer.control_names
        # a name may begin in one message and end in the next, or in the template's text
        self.beginnings = {name[:n] for name in names for n in range(1, len(name))}
        self.ends = {name[n:] for name in names for n in range(1, len(name))}
        self.longest = max(map(len, names), default=0)

    def places(self, text: str) -> set[int]:
        """Where names begin in a text, and parts of names at its two ends."""
        found = set()
        match = self.pattern.search(text) if self.pattern else None
        while match:
            found.add(match.start())
            match = self.pattern.search(text, match.start() + 1)  # names may overlap
        for n in range(1, min(self.longest, len(text) + 1)):
            if text[-n:] in self.beginnings:
                found.add(len(text) - n)
            if text[:n] in self.ends:
                found.add(0)
        return found


def disguise(messages: list[dict], names: ControlNames) -> tuple[list[dict], dict[int, str]]:
    """
    The messages, with a stand-in for the first character of each name of a control token that they
    spell; and what the stand-ins stand for, for `str.translate`. A stand-in is a private-use
    character that no message of this conversation has, so none can spell it. Whatever the template
    does with the messages, the names in its text are then its own.

    Marking where a message begins and ends would not do: templates strip messages, split and
    compare them. Nor would encoding the messages apart from the template's text: a token may reach
    from one into the other.
    """
    texts = [
        text for message in messages for field, text in message.items() if is_free(field, text)
    ]
    used = set().union(*texts)
    free = (chr(i) for i in PRIVATE_USE if chr(i) not in used)
    stand_ins: dict[str, str] = {}

    def disguised(text: str) -> str:
        characters = list(text)
        for place in names.places(text):
            character = text[place]
            if character not in stand_ins:
                stand_ins[character] = next(free, "")
            characters[place] = stand_ins[character]
        return "".join(characters)

    changed = [
        {
            field: disguised(text) if is_free(field, text) else text
            for field, text in message.items()
        }
        for message in messages
    ]
    if "" in stand_ins.values():
        raise TokenizerError(
            "this conversation uses all private-use characters of Unicode: leave some out"
        )
    return changed, {ord(stand_in): character for character, stand_in in stand_ins.items()}


def is_free(field: str, text) -> bool:
    """
    Users write what they like, but a role is one of a few words, and templates make control tokens
    of it.
    """
    return field != "role" and isinstance(text, str)
