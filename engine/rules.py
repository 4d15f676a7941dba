"""
What the rules of a Lark grammar say, as far as the grammar library finds it out too late: that they
go on without an end, or name the token that ends an answer. `endless` also serves schemas.

    check_ends('start: "a" start | "b"')   # ok
    check_ends('start: "a" start')         # ValueError: the rule start never ends: ..

Not run by itself: engine/matcher.py checks what clients send.
"""

import re
from collections.abc import Callable, Container, Iterable

# what stands in a rule and is no rule: texts, comments, and regular expressions
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"(?:i\b)?|//.*|/(?:\\.|[^/\\\n])+/[a-z]*')
RULE = re.compile(r"(?m)^\s*[?!]*([a-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:")
WORD = re.compile(r"~ *\d+(?:\.\.\d+)?|\{\d*,?\d*\}|[\w@-]+|\S")  # ~2..3 is {2,3}
NONE_WILL_DO = re.compile(r"[?*]|[{~] *[0,]")
TOKENS = re.compile(r"<\[([^\]>\s]*)\]>")  # by their numbers: <[5]>, <[1-9,12]>, <[^5]>, <[*]>
SPAN = re.compile(r"(\d+)(?:-(\d+))?")


def endless(parts: dict, has_end: Callable) -> str:
    """
    Return the names of the parts without an end, "" if all have one. `has_end(part, names)` tells
    whether a part has an end without those of these names.
    """
    count = 0
    while count != len(parts):
        count = len(parts)
        # to and fro: a chain of parts may stand in either order
        parts = dict(reversed(parts.items()))
        for name, part in [*parts.items()]:
            if has_end(part, parts):
                del parts[name]
    return ", ".join(sorted(parts))


def check_ends(lark: str):
    """Raise ValueError for a rule of which no text has an end."""
    text = LITERAL.sub(" T ", lark)
    if "%lark" in text or "::" in text:  # grammars within it, or rules with parameters
        return
    _, *parts = RULE.split(text)
    rules = {name: WORD.findall(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}
    names = endless(rules, has_end)
    if names:
        raise ValueError(f"no text of {names:.99} has an end: add a way without that rule")


def has_end(words: Iterable[str], endless: Container[str]) -> bool:
    """Return whether a rule, or a part in brackets, has a finite text without these rules."""
    words = iter(words)  # a part in brackets takes its own
    ways = [True]  # whether each of its alternatives has one
    before = True  # the last of them, without its last item
    for word in words:
        if word in ")]}":
            break
        if word == "|":
            ways.append(True)
        elif NONE_WILL_DO.match(word):
            ways[-1] = before
        else:
            before = ways[-1]
            if word in "([{":
                ways[-1] = (has_end(words, endless) or word == "[") and before
            else:
                ways[-1] = before and word not in endless
    return any(ways)


def check_tokens(lark: str, ends: dict[int, str]):
    """Raise ValueError for a grammar that names a token that ends an answer. `ends`: id -> name."""
    text = LITERAL.sub(" T ", lark)
    found = [name for name in ends.values() if name in text]
    for ids in TOKENS.findall(text):
        spans = [(int(first), int(last or first)) for first, last in SPAN.findall(ids)]
        for end in ends:
            is_among = "*" in ids or any(first <= end <= last for first, last in spans)
            if is_among != ids.startswith("^"):
                found.append(f"<[{ids}]>")
    if found:
        reason = "an answer ends where its grammar does: leave the end-of-text token out"
        raise ValueError(f"{found[0]:.99} would end the answer, and {reason}")
