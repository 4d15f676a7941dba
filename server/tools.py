"""
Tools: how a chat template writes their calls, a grammar for the answer, and the calls in its text.

    tag = find_tag(source)                                 # "tool_call"; "": not a form we know
    grammar_of_calls(body, tag, {"<tool_call>": 3})        # Lark, for the engine
    reader = CallReader(tag)
    reader.read('<tool_call>\\n{"name": "f", "argu', False)  # []
    reader.read('ments": {"a"', False)                     # a call's first delta, and its next one

Not run by itself: answers.py makes a reader for each choice. A call is written as in Hermes' and
Qwen's templates, so its parts are found by what stands between them; without a tag, on one line.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>
"""

import json
import secrets
from copy import deepcopy

MAX_CALLS = 16  # in one answer
NO_PARAMETERS = {"type": "object", "properties": {}}
# Written as json.dumps writes it, as in the templates. So a newline stands behind a call alone. The
# key replaces the client's own, which could switch checks off.
AS_PYTHON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def find_tag(source: str) -> str:
    """
    The tag in which a chat template has the model write calls, as Hermes', Qwen2.5's and Qwen3's
    do. "" if it does not show tools, or has calls in another form, as Qwen3-Coder's in XML.
    """
    source = source.replace("\\", "")  # a quote may be escaped
    parts = ["tools", "<tool_call>", '"arguments": ']
    return "tool_call" if all(part in source for part in parts) else ""


def tags(tag: str) -> list[str]:
    """What stands before a call, and after it."""
    return [f"<{tag}>", f"</{tag}>"] if tag else ["", ""]


def symbol(marker: str, tokens: dict[str, int]) -> str:
    """
    A marker in Lark. Where the tokenizer has a token of this name, the model learnt that token, and
    not how to spell it.
    """
    return f"<[{tokens[marker]}]>" if marker in tokens else json.dumps(marker)


def grammar_of_calls(body, tag: str, tokens: dict[str, int]) -> str:
    """
    Lark for the answer to a protocol.ChatRequest with tools. Where it is free to call none, the
    opening tag begins a call. `tokens`: see Chat.
    """
    opening, closing = tags(tag)
    before, after = symbol(opening, tokens), '"}\\n" ' + symbol(closing, tokens)
    calls = []
    for function in body.functions:
        start = json.dumps("\n" * bool(tag) + f'{{"name": "{function.name}", "arguments": ')
        schema = function.parameters | {"type": "object", "x-guidance": AS_PYTHON}
        calls.append(f"{start} %json {json.dumps(schema)} {after}")
    is_one = body.is_named or not body.parallel_tool_calls
    more = "" if is_one else f"(/\\n?/ {before} call){{0,{MAX_CALLS - 1}}}"
    start = f"start: {before} call {more}"
    if body.tool_choice == "auto":
        start = f"start: TEXT | (text | TEXT {before}) call {more}\n"  # spelled, or the token
        start += f"text[lazy]: TEXT {json.dumps(opening)}\nTEXT: /(.|\\n)*/"
    return f"{start}\ncall: {' | '.join(calls)}\n"


class CallReader:
    """Reads an answer as it comes: the text before its calls, and each call piece by piece."""

    def __init__(self, tag: str):
        before, after = tags(tag)
        # the last: after the arguments
        self.markers = [before, '", "arguments": ', "}\n" + after]
        self.place = 0  # before which of them the text is
        self.text = ""  # not read yet
        self.content = ""
        self.calls = []

    def has_call(self, text: str) -> bool:
        """Whether a call has begun, where this text comes next."""
        return bool(self.place or self.calls or self.markers[0] in self.text + text)

    def read(self, text: str, is_end: bool) -> list[dict]:
        """OpenAI's deltas for more text. What may be the beginning of a marker is held back."""
        self.text += text
        deltas = []
        is_found = True
        while is_found:
            marker = self.markers[self.place]
            end = self.text.find(marker)
            is_found = end >= 0
            if not is_found:
                is_over = is_end and not self.calls  # it was text
                end = len(self.text) - (0 if is_over else begun(self.text, marker))
            if self.place == 1 and not is_found:
                break  # the name has not all come
            if end and (self.place or not self.calls):  # between calls is space
                deltas.append(self.take(self.text[:end]))
            self.text = self.text[end + is_found * len(marker) :]
            self.place = (self.place + is_found) % 3
        return deltas

    def take(self, piece: str) -> dict:
        """The delta of what was read."""
        if self.place == 0:
            self.content += piece
            return {"content": piece}
        if self.place == 1:
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
        if not self.calls:
            return {"content": self.content}
        return {"content": self.content or None, "tool_calls": self.calls}


def begun(text: str, marker: str) -> int:
    """How many characters of the marker the text ends with."""
    count = len(marker) - 1
    while count > 0 and not text.endswith(marker[:count]):
        count -= 1
    return max(count, 0)
