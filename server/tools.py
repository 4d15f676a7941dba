"""
Tools: how a chat template writes their calls, a grammar for the answer, and the calls in its text.
And thoughts, which some models write before an answer.

    tags = find_tags(source)                               # ["<tool_call>", "</tool_call>"]
    grammar_of_calls(body, tags, {"<tool_call>": 3})       # Lark, for the engine
    reader = Reader(tags, find_thoughts(source))
    reader.read('<tool_call>\\n{"name": "f", "argu', False)  # []
    reader.read('ments": {"a"', False)                     # a call's first delta, and its next one

Not run by itself: answers.py makes a reader for each choice. A call is written as in Hermes' and
Qwen's templates, so its parts are found by what stands between them; without tags, on one line.

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
# Written as json.dumps writes it, as in the templates. So a newline stands only after a call. The
# key replaces the client's own, which could switch checks off.
AS_PYTHON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# </think>, </thinking>, </seed:think>, [/THINK], or <think> where a template only begins thoughts
THOUGHTS = re.compile(r"(?i)(<|[<\[]/)(\w+:)?(think|thinking|thought|reasoning)[>\]]")
NO_TAGS = ["", ""]  # of a template whose calls are in no form that we know
START, THINKING, TEXT, NAME = range(-2, 2)  # places of a reader
NEVER = "\ud800"  # half a character, which is in no text


def find_tags(source: str) -> list[str]:
    """
    The tags before and after a call, if a chat template has the model write them as Hermes',
    Qwen2.5's and Qwen3's do. NO_TAGS if it does not show tools, or has calls in another form, as
    Qwen3-Coder's in XML.
    """
    source = source.replace("\\", "")  # a quote may be escaped
    parts = ["tools", "<tool_call>", '"arguments": ']
    is_known = all(part in source for part in parts)
    return ["<tool_call>", "</tool_call>"] if is_known else NO_TAGS


def schema_of(function) -> dict:
    """The schema of a function's arguments."""
    return drop_neutral(function.parameters) | {"type": "object"}


def symbol(marker: str, tokens: dict[str, int]) -> str:
    """
    A marker in Lark. Where the tokenizer has a token of this name, the model learnt that token, and
    not how to spell it.
    """
    return f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)


def lazy_text(marker: str) -> str:
    """Lark for TEXT, and for `text`, which ends with the first marker."""
    return f"text[lazy]: TEXT {json.dumps(marker)}\nTEXT: /(.|\\n)*/\n"


def grammar_of_calls(body, tags: list[str], tokens: dict[str, int]) -> str:
    """
    Lark for the answer to a protocol.ChatRequest with tools. Where it is free to call none, the
    opening tag begins a call. `tokens`: see Chat.
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
        start = f"start: TEXT | (text | TEXT {before}) call {more}\n"  # spelled, or the token
        start += lazy_text(opening)
    return f"{start}\ncall: {' | '.join(calls)}\n"


def find_thoughts(source: str) -> list[str]:
    """
    Return the markers before and after what a model thinks, by its chat template or by the names of
    its tokens. [] if they know of none.
    """
    found = THOUGHTS.search(source)
    if not found:
        return []
    opening = found[0].replace("/", "")
    return [opening, f"{opening[0]}/{opening[1:]}"]


def grammar_before(markers: list[str], tokens: dict[str, int], may_end: bool) -> str:
    """
    Return Lark for thoughts, if there are any, and then another grammar, `@answer`. `markers` are
    those to come: without the first the prompt has begun the thoughts. may_end: the text may end
    within them.
    """
    *opening, closing = markers
    start = "thought @answer" + " | TEXT" * may_end
    for marker in opening:
        start = f"{symbol(marker, tokens)} ({start}) | @answer"
    thought = f"(text | TEXT {symbol(closing, tokens)}) /\\n{{0,2}}/"
    return f"start: {start}\nthought: {thought}\n{lazy_text(closing)}"


class Reader:
    """
    Reads an answer as it comes: thoughts, the text before its calls, and each call piece by piece.
    `tags` is None without tools; `ahead`: see grammar_before; `hidden`: markers that are not shown
    where they mark nothing.
    """

    def __init__(self, tags: list[str] | None, ahead: list[str], hidden: Iterable[str]):
        self.hidden = hidden
        before, after = tags or (NEVER, "")
        # the third: after the arguments; the last: those of thoughts
        self.markers = [before, '", "arguments": ', "}\n" + after, *ahead]
        self.place = -len(ahead)  # before which of them the text is
        self.at_border = self.place == THINKING  # newlines beside a thought are not part of it
        self.text = ""  # not read yet
        self.thought = self.content = ""
        self.calls = []

    def is_text(self, text: str, token: str) -> bool:
        """Return whether this token after this text may be text, which stop strings end."""
        if self.calls:
            return False
        ahead = copy(self)  # a deep copy would take 18 us for each token
        ahead.calls = []
        ahead.read(text, False)
        if ahead.calls or ahead.place not in (START, TEXT):
            return False
        return not ahead.at_border or bool(token.strip("\n"))

    def read(self, text: str, is_end: bool) -> list[dict]:
        """OpenAI's deltas for more text. What may be the beginning of a marker is held back."""
        self.text += text
        if self.place == START:
            start, opening = self.text.lstrip(), self.markers[START]
            if opening.startswith(start) and start != opening and not is_end:
                return []
            self.at_border = start.startswith(opening)
            self.place = THINKING if self.at_border else TEXT
            if self.at_border:
                self.text = start.removeprefix(opening)
        deltas = []
        is_found = True
        while is_found:
            if self.at_border:
                self.text = self.text.lstrip("\n")
                self.at_border = not self.text
            marker = self.markers[self.place]
            end = self.text.find(marker)
            is_found = end >= 0
            if not is_found:
                is_over = is_end and not self.calls  # it was text
                end = len(self.text) - (0 if is_over else begun(self.text, marker))
            if self.place == NAME and not is_found:
                break  # the name has not all come
            piece = self.text[:end]
            if self.place == THINKING:
                piece = piece.rstrip("\n")
                self.at_border |= is_found
            if piece and (self.place or not self.calls):  # between calls is space
                deltas.append(self.take(piece))
            self.text = self.text[end + len(marker) if is_found else len(piece) :]
            if is_found:
                self.place = (self.place + 1) % 3
        return deltas

    def take(self, piece: str) -> dict:
        """The delta of what was read."""
        if self.place <= TEXT:
            for marker in self.hidden:
                piece = piece.replace(marker, "")
        if self.place == THINKING:
            self.thought += piece
            return thought(piece)
        if self.place == TEXT:
            self.content += piece
            return {"content": piece}
        if self.place == NAME:
            function = {"name": piece.rpartition('"')[2], "arguments": ""}
            id = f"call_{secrets.token_hex(12)}"
            new = {"id": id, "type": "function", "function": function}
            self.calls.append(deepcopy(new))
        else:
            new = {"function": {"arguments": piece}}
            self.calls[-1]["function"]["arguments"] += piece
        return {"tool_calls": [{"index": len(self.calls) - 1} | new]}

    def message(self) -> dict:
        """The fields of a whole message."""
        nothing = None if self.calls or self.markers[3:] else ""
        message = {"content": self.content or nothing} | thought(self.thought)
        return message | {"tool_calls": self.calls} if self.calls else message


def thought(text: str) -> dict:
    """The fields of what was thought: vLLM's name now, and its older one."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def begun(text: str, marker: str) -> int:
    """How many characters of the marker the text ends with."""
    count = len(marker) - 1
    while count > 0 and not text.endswith(marker[:count]):
        count -= 1
    return max(count, 0)
