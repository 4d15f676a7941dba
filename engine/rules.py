"""
Checks a Lark grammar for two faults that the grammar library would notice too late: rules that
never end, and naming a token that ends the answer. `endless` is also used for schemas.

    check_ends('start: "a" start | "b"')   # ok
    check_ends('start: "a" start')         # ValueError: start cannot end: ..

Not run by itself; engine/matcher.py uses it to check what clients send.
"""

import re
from collections.abc import Callable, Container, Iterable

# parts of a rule that do not contain rule names: strings, comments, and regular expressions
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"(?:i\b)?|(?://|#).*|/(?:\\.|[^/\\\n])+/[a-z]*')
# the start of a rule, terminal or %ignore
RULE = re.compile(r"(?m)^\s*(?:[?!]*([a-zA-Z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:|%ignore)")
ITEM = re.compile(r"~ *\d+(?:\.\.\d+)?|\{\d*,?\d*\}|<[^>\s]*>|[\w@-]+|\S")  # ~2..3 is {2,3}
OPTIONAL = re.compile(r"[?*]|[{~] *[0,]")  # the item before it may occur zero times
TOKENS = re.compile(r"<\[([^\]>\s]*)\]>")  # tokens by id: <[5]>, <[1-9,12]>, <[^5]>, <[*]>
SPAN = re.compile(r"(\d+)(?:-(\d+))?")


def endless(parts: dict, has_end: Callable) -> str:
    """
    Return the names of the parts that cannot end, or "" if all can. `parts` maps names to parts.
    `has_end(part, names)` says whether a part can end without using the parts with these names.
    """
    count = 0
    while count != len(parts):
        count = len(parts)
        # alternate the direction, because a chain of parts may be in either order
        parts = dict(reversed(parts.items()))
        for name, part in [*parts.items()]:
            if has_end(part, parts):
                del parts[name]
    return ", ".join(sorted(parts))


def check_ends(lark: str):
    """Raise ValueError if a rule does not match any finite text."""
    text = LITERAL.sub(" 0 ", lark)
    if "%lark" in text or "::" in text:  # nested grammars, or rules with parameters
        return
    _, *parts = RULE.split(text)
    named = zip(parts[::2], parts[1::2], strict=True)
    rules = {name: ITEM.findall(body) for name, body in named if name}
    names = endless(rules, has_end)
    if names:
        raise ValueError(f"{names:.99} cannot end: add an alternative without that rule")


def has_end(items: Iterable[str], endless: Container[str]) -> bool:
    """
    Return whether a rule, or a bracketed part of it, matches a finite text without using the rules
    in `endless`.
    """
    items = iter(items)  # a bracketed part consumes its own items
    can_end = [True]  # whether each alternative can end
    before = True  # whether the last alternative can end without its last item
    for item in items:
        if item in ")]}":
            break
        if item == "|":
            can_end.append(True)
        elif OPTIONAL.match(item):
            can_end[-1] = before
        else:
            before = can_end[-1]
            if item in "([{":
                can_end[-1] = (has_end(items, endless) or item == "[") and before
            else:
                can_end[-1] = before and item not in endless
    return any(can_end)


def check_tokens(lark: str, ends: dict[int, str]):
    """Raise ValueError if a grammar names a token that ends an answer. `ends` maps ids to names."""
    text = LITERAL.sub(" 0 ", lark)
    found = [name for name in ends.values() if name in text]
    for ids in TOKENS.findall(text):
        spans = [(int(first), int(last or first)) for first, last in SPAN.findall(ids)]
        for end in ends:
            is_among = "*" in ids or any(first <= end <= last for first, last in spans)
            if is_among != ids.startswith("^"):
                found.append(f"<[{ids}]>")
    if found:
        raise ValueError(
            f"{found[0]:.99} would end the answer, and an answer ends where its grammar does: "
            "leave the end-of-text token out"
        )
