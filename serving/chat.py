"""
A conversation -> token ids, by the chat template that a checkpoint brings.

    chat = load_chat("out/chatty", tokenizer)              # None where there is no template
    ids = chat.encode([{"role": "user", "content": "hello"}])

The template is a program of unknown origin: it runs in jinja2's sandbox, without the globals that
only make text, and its text is limited. Its time and memory are limited by encoder.py, which runs
this module in a process of its own. Templates see what transformers shows them, and their text
becomes the same tokens.
"""

import json
import re
from datetime import datetime
from pathlib import Path

from files import MALFORMED, read_json
from tokenizer import Tokenizer, TokenizerError, named_tokens, read_config, token_text

# Characters that a template may make of a conversation: four times the largest body.
MAX_RENDERED = 2**24
# Globals of jinja2 that generate text and that chat templates do not use.
UNUSED_GLOBALS = ("lipsum", "cycler", "joiner")
PRIVATE_USE = range(0xF0000, 0x10FFFE)  # characters without a meaning, 131,070 of them
# Variables that are not a caller's: the conversation, what has a field of its own or is not served,
# and the template's functions. (The names of control tokens, bos_token, are not, either.)
OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
OWN_VARIABLES |= {"continue_final_message", "tokenize", "raise_exception", "strftime_now"}
MAX_VARIABLES = 2**14  # characters of a caller's variables as JSON

Messages = list[dict[str, str]]  # [{"role", "content"}, ..], perhaps with a "name"


def read_template(directory: str | Path) -> str | None:
    """
    The template's source, None where there is none: a file of its own, else what the tokenizer's
    configuration has, or the older file beside it; of several templates the one named "default".
    Raises TokenizerError for a template that is no text.
    """
    for name in ("additional_chat_templates/default.jinja", "chat_template.jinja"):
        if (path := Path(directory) / name).is_file():
            return path.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = Path(directory) / name
        try:
            template = read_json(path).get("chat_template")
            if isinstance(template, list):  # several, each with a name
                template = {t["name"]: t["template"] for t in template}
            if isinstance(template, dict):
                template = template.get("default")
        except MALFORMED as error:
            raise TokenizerError(
                f"{path} is broken ({type(error).__name__}: {error}): restore it"
            ) from None
        if not isinstance(template, str | None):
            raise TokenizerError(f"{path} has a chat_template that is no text: restore it")
        if template is not None:
            return template
    return None


def check_variables(variables: dict) -> dict:
    """
    A caller's variables for the template, as they are. Raises ValueError for a name that is not the
    caller's, and for too much of them.
    """
    if not isinstance(variables, dict):
        raise ValueError("must be a JSON object")
    for name in variables:
        if name in OWN_VARIABLES or name.endswith("_token"):
            raise ValueError(f"has {name!r:.100}, which is not a caller's to set: leave it out")
    length = len(json.dumps(variables, allow_nan=False, ensure_ascii=False))
    if length > MAX_VARIABLES:
        raise ValueError(f"has {length} characters, at most {MAX_VARIABLES} are taken: shorten it")
    return variables


def load_chat(directory: str | Path, tokenizer: Tokenizer) -> "Chat | None":
    """The chat of a checkpoint directory. Raises TokenizerError for a template that is broken."""
    source = read_template(directory)
    if source is None:
        return None
    named = named_tokens(read_config(Path(directory)))
    names = {name: token_text(value) for name, value in named.items()}
    return Chat(source, {"bos_token": "", "eos_token": ""} | names, tokenizer)


class Chat:
    """A compiled template, and the tokenizer of its text."""

    def __init__(self, source: str, token_names: dict[str, str], tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.control_names = ControlNames(tokenizer)
        environment = make_environment()
        environment.globals |= token_names
        try:
            self.template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # jinja2's own, and those of constants that it computes
            raise TokenizerError(f"the chat template is broken: {error}") from None

    def encode(
        self, messages: Messages, add_special_tokens: bool = False, /, **options
    ) -> list[int]:
        """
        Token ids of a conversation. Options, such as add_generation_prompt, are variables of the
        template. What it makes has all control tokens that it wants, a BOS too; only with
        add_special_tokens does it get a second one. Raises TokenizerError.

        Against prompt injection: the name of a control token becomes that token only in the
        template's own text and in roles. In all else, options too, it stays text, so that a user
        cannot end the turn and speak as the system.
        """
        disguised, options, originals = disguise(messages, options, self.control_names)
        text = self.render(disguised, **options)
        ids = self.tokenizer.encode(text, True, add_special_tokens, originals)
        if not ids:
            raise TokenizerError("the chat template makes no text of this conversation")
        return ids

    def render(self, messages: Messages, /, **options) -> str:
        """The text of a conversation. Raises TokenizerError where the template fails at it."""
        pieces = []
        size = 0
        options |= {"messages": messages, "tools": None, "documents": None}
        try:
            for piece in self.template.generate(options):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED:
                    raise TokenizerError(
                        f"the chat template makes more than {MAX_RENDERED} characters of this"
                    )
        except (TokenizerError, MemoryError):
            raise
        except Exception as error:  # a template is a program, so any exception may come
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from None
        return "".join(pieces)


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

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja2's own filter would escape for HTML
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
    for name in UNUSED_GLOBALS:
        del environment.globals[name]
    return environment


# --------------------------------------------------------------------------------------------------
# Against prompt injection: what users write stays text


class ControlNames:
    """Finds where a text spells names of control (special) tokens."""

    def __init__(self, tokenizer: Tokenizer):
        names = tokenizer.control
        # with a look-ahead matches may overlap: in <<< the name << begins twice
        self.pattern = re.compile(f"(?={tokenizer.control_names.pattern})")
        # a name may begin in one message and end in the next, or in the template's own text
        self.beginnings = {name[:n] for name in names for n in range(1, len(name))}
        self.ends = {name[n:] for name in names for n in range(1, len(name))}
        self.longest = max(map(len, names), default=0)

    def starts(self, text: str) -> set[int]:
        """Where names begin in a text; parts of names at its two ends count, too."""
        found = {match.start() for match in self.pattern.finditer(text)}
        for n in range(1, min(self.longest, len(text) + 1)):
            if text[-n:] in self.beginnings:
                found.add(len(text) - n)
            if text[:n] in self.ends:
                found.add(0)
        return found


def disguise(
    messages: Messages, options: dict, names: ControlNames
) -> tuple[Messages, dict, dict[int, str]]:
    """
    Replace, in all that users write freely, the first character of each control token's name by a
    stand-in: a private-use character that occurs nowhere in this conversation. Whatever the
    template does with the messages and options, all names in its text are then its own. Returns
    both, and a table for `str.translate` that turns stand-ins back.

    Marking where messages begin and end would not do: templates strip messages, split and compare
    them. Nor would encoding messages apart from the template's text: a token may reach from one
    into the other.
    """
    used = set(json.dumps([messages, options], ensure_ascii=False))
    unused = (character for character in map(chr, PRIVATE_USE) if character not in used)
    stand_ins: dict[str, str] = {}

    def disguised(text: str) -> str:
        characters = list(text)
        for start in names.starts(text):
            original = text[start]
            if original not in stand_ins:
                stand_ins[original] = next(unused, "")
            characters[start] = stand_ins[original]
        return "".join(characters)

    def all_disguised(value):
        """The same for plain data: each text in it."""
        if isinstance(value, list):
            return [all_disguised(item) for item in value]
        if isinstance(value, dict):
            return {disguised(name): all_disguised(item) for name, item in value.items()}
        return disguised(value) if isinstance(value, str) else value

    # a template looks its variables up by their names: these stay
    options = {name: all_disguised(value) for name, value in options.items()}
    changed = []
    for message in messages:
        # a role is one of a few words; templates make control tokens of it
        own = {field: disguised(text) for field, text in message.items() if field != "role"}
        changed.append(message | own)
    if "" in stand_ins.values():
        raise TokenizerError(
            "this conversation uses all private-use characters of Unicode: leave some out"
        )
    return changed, options, {ord(stand_in): original for original, stand_in in stand_ins.items()}
