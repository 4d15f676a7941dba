"""
Tools: finds out how a chat template writes calls, creates a grammar for the answer, and parses the
calls in the answer's text. Does the same for thoughts, which some models write before an answer.

    tags = find_tags(source)                               # ["<tool_call>", "</tool_call>"]
    grammar_of_calls(body, tags, {"<tool_call>": 3})       # Lark, for the engine
    reader = Reader(tags, find_thoughts(source))
    reader.read('<tool_call>\\n{"name": "f", "argu', False)  # []
    reader.read('ments": {"a"', False)                     # a call's first two deltas

Not run by itself: answers.py creates a reader for each choice. Calls have the format used in the
templates of Hermes and Qwen, shown below. The grammar enforces this format, so a call can be split
at its fixed parts. If the template has no tags, a call is a single line without tags.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>
"""

import json
import re
import secrets
from collections.abc import Iterable
from copy import copy, deepcopy

from engine.schemas import drop_neutral

MAX_CALLS = 16  # in one answer
# Options for the library. JSON has the format of json.dumps, as in the templates, so there is no
# newline before the end of a call. These options replace a client's own, which could disable
# checks.
AS_PYTHON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# </think>, </thinking>, </seed:think>, [/THINK], or <think> if a template only opens thoughts
THOUGHTS = re.compile(r"(?i)(<|[<\[]/)(\w+:)?(think|thinking|thought|reasoning)[>\]]")
NO_TAGS = ["", ""]  # for templates that write calls in an unknown format
START, THINKING, TEXT, NAME = range(-2, 2)  # states of a reader; 2: inside the arguments
NEVER = "\ud800"  # a marker that never occurs, because no text contains a lone surrogate


def find_tags(source: str) -> list[str]:
    """
    Return the tags before and after a call, if a chat template writes calls as Hermes, Qwen2.5 and
    Qwen3 do. Return NO_TAGS if the template does not support tools, or writes calls in another
    format, such as XML (Qwen3-Coder).
    """
    source = source.replace("\\", "")  # quotes may be escaped
    if all(part in source for part in ("tools", "<tool_call>", '"arguments": ')):
        return ["<tool_call>", "</tool_call>"]
    return NO_TAGS


def schema_of(function) -> dict:
    """Return the schema for a function's arguments."""
    return drop_neutral(function.parameters) | {"type": "object"}


def symbol(marker: str, tokens: dict[str, int]) -> str:
    """
    Return a marker in Lark. If the tokenizer has a token for the marker, the grammar must refer to
    that token, because the model was trained to use it.
    """
    return f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)


def lazy_text(marker: str) -> str:
    """
    Return Lark rules for TEXT, which matches any text, and `text`, which ends with the marker.
    """
    return f"text[lazy]: TEXT {json.dumps(marker)}\nTEXT: /(.|\\n)*/\n"


def grammar_of_calls(body, tags: list[str], tokens: dict[str, int]) -> str:
    """
    Return a Lark grammar for the answer to a protocol.ChatRequest with tools. If the answer need
    not call a tool, a call starts at the opening tag. `tokens`: see Chat.
    """
    opening, closing = tags
    before, after = symbol(opening, tokens), '"}\\n" ' + symbol(closing, tokens)
    calls = []
    for function in body.functions:
        start = json.dumps("\n" * bool(opening) + f'{{"name": "{function.name}", "arguments": ')
        schema = schema_of(function) | {"x-guidance": AS_PYTHON}
        calls.append(f"{start} %json {json.dumps(schema)} {after}")
    is_one = body.is_named or not body.parallel_tool_calls
    more = "" if is_one else f"(/\\n?/ {before} call){{0,{MAX_CALLS - 1}}}"
    start = f"start: {before} call {more}"
    if body.tool_choice == "auto":
        # the tag is either spelled out (at the end of `text`) or a token (`before`)
        start = f"start: TEXT | (text | TEXT {before}) call {more}\n"
        start += lazy_text(opening)
    return f"{start}\ncall: {' | '.join(calls)}\n"


def find_thoughts(source: str) -> list[str]:
    """
    Return the markers before and after a model's thoughts. `source` contains the chat template and
    the names of the model's tokens. Return [] if there are no markers in it.
    """
    found = THOUGHTS.search(source)
    if not found:
        return []
    opening = found[0].replace("/", "")
    return [opening, f"{opening[0]}/{opening[1:]}"]


def grammar_before(markers: list[str], tokens: dict[str, int], may_end: bool) -> str:
    """
    Return a Lark grammar for an answer that may begin with thoughts, and then follows another
    grammar, `@answer`. `markers` are the markers still to come: only the closing marker if the
    prompt ends with the opening one. `may_end`: whether the answer may end within its thoughts.
    """
    *opening, closing = markers
    start = "thought @answer" + " | TEXT" * may_end
    for marker in opening:
        start = f"{symbol(marker, tokens)} ({start}) | @answer"
    thought = f"(text | TEXT {symbol(closing, tokens)}) /\\n{{0,2}}/"
    return f"start: {start}\nthought: {thought}\n{lazy_text(closing)}"


class Reader:
    """
    Parses an answer as it arrives: thoughts, the text before the calls, and each call piece by
    piece. `tags` is None without tools. `ahead` has the thought markers still to come, like
    `markers` in grammar_before. `hidden` markers are removed from text and thoughts.
    """

    def __init__(self, tags: list[str] | None, ahead: list[str], hidden: Iterable[str]):
        self.hidden = hidden
        before, after = tags or (NEVER, "")
        # the text before a call, after its name, and after its arguments; then the thought markers
        self.markers = [before, '", "arguments": ', "}\n" + after, *ahead]
        self.state = -len(ahead)  # also the next marker's index in `markers`
        self.at_border = self.state == THINKING  # whether to drop newlines, which surround thoughts
        self.text = ""  # text not parsed yet
        self.thought = self.content = ""
        self.calls = []

    def is_text(self, text: str, token: str) -> bool:
        """
        Return whether a token after this text may be ordinary text, in which stop strings apply.
        """
        if self.calls:
            return False
        probe = copy(self)  # a deep copy would cost 18 us for each token
        probe.calls = []
        probe.read(text, False)
        if probe.calls or probe.state not in (START, TEXT):
            return False
        return not probe.at_border or bool(token.strip("\n"))

    def read(self, text: str, is_end: bool) -> list[dict]:
        """
        Return OpenAI's deltas for new text. The end of the text is held back while it may be the
        start of a marker.
        """
        self.text += text
        if self.state == START:
            start, opening = self.text.lstrip(), self.markers[START]
            if opening.startswith(start) and start != opening and not is_end:
                return []
            self.at_border = start.startswith(opening)
            self.state = THINKING if self.at_border else TEXT
            if self.at_border:
                self.text = start.removeprefix(opening)
        deltas = []
        is_found = True
        while is_found:
            if self.at_border:
                self.text = self.text.lstrip("\n")
                self.at_border = not self.text
            marker = self.markers[self.state]
            end = self.text.find(marker)
            is_found = end >= 0
            if not is_found:
                is_over = is_end and not self.calls  # if so, nothing is held back
                end = len(self.text) - (0 if is_over else begun(self.text, marker))
            if self.state == NAME and not is_found:
                break  # the name is incomplete
            piece = self.text[:end]
            if self.state == THINKING:
                piece = piece.rstrip("\n")
                self.at_border |= is_found
            if piece and (self.state or not self.calls):  # skip the space between calls
                deltas.append(self.take(piece))
            self.text = self.text[end + len(marker) if is_found else len(piece) :]
            if is_found:
                self.state = (self.state + 1) % 3
        return deltas

    def take(self, piece: str) -> dict:
        """Return the delta for a piece of text in the current state."""
        if self.state <= TEXT:
            for marker in self.hidden:
                piece = piece.replace(marker, "")
        if self.state == THINKING:
            self.thought += piece
            return thought(piece)
        if self.state == TEXT:
            self.content += piece
            return {"content": piece}
        if self.state == NAME:
            function = {"name": piece.rpartition('"')[2], "arguments": ""}
            id = f"call_{secrets.token_hex(12)}"
            new = {"id": id, "type": "function", "function": function}
            self.calls.append(deepcopy(new))
        else:
            new = {"function": {"arguments": piece}}
            self.calls[-1]["function"]["arguments"] += piece
        return {"tool_calls": [{"index": len(self.calls) - 1} | new]}

    def message(self) -> dict:
        """Return the fields of the whole message."""
        empty = None if self.calls or self.markers[3:] else ""
        message = {"content": self.content or empty} | thought(self.thought)
        return message | {"tool_calls": self.calls} if self.calls else message


def thought(text: str) -> dict:
    """Return the fields for a thought, under vLLM's current and older names."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def begun(text: str, marker: str) -> int:
    """Return how many of the marker's first characters the text ends with."""
    count = len(marker) - 1
    while not text.endswith(marker[:count]):  # at the latest, it ends with none of them
        count -= 1
    return count
