"""
Checks a JSON schema before the grammar library gets it: finds the schemas within it, drops keywords
that have no effect, and refuses what the library would silently ignore.

    drop_neutral({"type": "array", "uniqueItems": False})  # {"type": "array"}
    check_schema('{"multipleOf": -2}')                     # ValueError: multipleOf is -2, wanted ..

Not run by itself; the server drops neutral keywords, and engine/matcher.py checks the schema.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from urllib.parse import unquote

# Keywords whose values are schemas, lists of schemas, or maps from names to schemas. No other value
# is a schema: for example, constants are not, nor are properties that happen to be named like a
# keyword.
SCHEMAS = {"items", "additionalItems", "prefixItems", "contains", "additionalProperties"}
SCHEMAS |= {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}
SCHEMAS |= {"allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
MAPS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
# Unsupported keywords, each with the values that have no effect. For example, zod declares for
# every record that its names are strings.
NEUTRAL = {
    "uniqueItems": [False],
    "unevaluatedProperties": [True, {}],
    "not": [False],
    "propertyNames": [True, {}, {"type": "string"}],
}
DRAFTS = (
    r"https://json-schema.org/draft/20(19-09|20-12)/schema#?|"
    r"http://json-schema.org/draft-0[467]/schema#?|"
)
DRAFT_3 = ("divisibleBy", "disallow", "extends")
UPPER = {"maximum", "exclusiveMaximum"}
BOUNDS = UPPER | {"minimum", "exclusiveMinimum"}
MOST = 2**63  # the library computes with integers below this, and with doubles
EXACT = "wanted at most 2^53 in size, because larger numbers are rounded"
MOST_REMAINDERS = 20_000  # most remainders of a multipleOf; each is a state of an automaton


def all_schemas(root, with_targets: bool = False) -> Iterator[dict]:
    """
    Yield a schema, then all schemas within it. If `with_targets`, also yield the targets of
    references, and the schemas within these targets.
    """
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for key, value in node.items():
            if key in MAPS and isinstance(value, dict):
                waiting += value.values()
            elif key in SCHEMAS:
                waiting += value if isinstance(value, list) else [value]
        if with_targets and "$ref" in node:
            waiting.append(target_of(str(node["$ref"]), root))


def target_of(ref: str, root):
    """Return the target of a reference within the root. Raises ValueError if there is none."""
    first, *path = unquote(ref).split("/")
    found = root
    if first not in ("", "#"):  # an anchor, or the $id of a schema
        path = []
        named = (node for node in all_schemas(root) if ref in names_of(node))
        found = next(named, None)
    with suppress(LookupError, TypeError, ValueError):
        for name in path:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found[int(name) if isinstance(found, list) else name]
        if found is not None:
            return found
    raise ValueError(f"it has no schema at {ref:.99}: a $ref must be #/ and the path of a schema")


def names_of(schema: dict) -> tuple:
    """Return the names by which references can refer to this schema: its $id and its $anchor."""
    anchor = schema.get("$anchor")
    return schema.get("$id"), anchor and f"#{anchor}"


def drop_neutral(schema):
    """Return a copy of a schema without neutral keywords (see NEUTRAL)."""
    schema = deepcopy(schema)
    for node in all_schemas(schema):
        for key in NEUTRAL.keys() & node.keys():
            if node[key] in NEUTRAL[key]:
                del node[key]
    return schema


def check_schema(text: str):
    """Raise ValueError for anything that the library would misunderstand or ignore."""
    try:
        root = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON ({error}): send an object") from None
    if not isinstance(root, dict):
        raise ValueError(f"the schema is {text:.40}, wanted an object: {{}} for any JSON")
    for node in all_schemas(root, with_targets=True):
        check_keywords(node)
        check_numbers(node)
        check_count(node)
        # a reference within such a schema is relative to that schema, not to the root
        is_base = node is not root and not str(node.get("$id", "#")).startswith("#")
        if is_base and any("$ref" in part for part in all_schemas(node)):
            raise ValueError("it has an $id around a $ref: leave it out, except at the root")


def check_keywords(node: dict):
    """Raise ValueError for keywords from unsupported drafts."""
    for key in DRAFT_3:
        if key in node:
            raise ValueError(f"{key} is from draft 3, wanted draft 4 or a later one: rewrite it")
    required = node.get("required", [])
    if not isinstance(required, list):
        raise ValueError(
            f"required is {json.dumps(required):.40}, wanted a list of names, next to the "
            "properties"
        )
    draft = node.get("$schema", "")
    if isinstance(draft, str) and not re.fullmatch(DRAFTS, draft):
        raise ValueError(
            f"$schema is {draft:.99}, wanted the address of draft 4, 6, 7, 2019-09 or 2020-12: "
            "leave it out"
        )


def check_numbers(node: dict):
    """Raise ValueError for numbers that the library would round or take too long to handle."""
    for key in BOUNDS & node.keys():
        value = node[key]
        # A larger upper bound is allowed. The library replaces it with the largest integer, and
        # numbers in an answer never exceed either of them.
        is_kept = is_number(value) and key in UPPER and value >= MOST - 1
        if is_number(value) and not (is_exact(value) or is_kept):
            raise ValueError(f"{key} is {value!r:.40}, {EXACT}: choose another bound")
    constants = json.dumps([node.get("const"), node.get("enum")])
    json.loads(constants, parse_int=check_constant)
    step = node.get("multipleOf", 1)
    if is_number(step):
        digits = re.sub(r"e.*|\D", "", repr(step)).strip("0")
        if step <= 0 or int(digits or 0) > MOST_REMAINDERS:
            raise ValueError(
                f"multipleOf is {step!r:.40}, wanted above 0, and at most {MOST_REMAINDERS:,} "
                "without trailing zeros: choose another step"
            )


def check_constant(digits: str):
    """Raise ValueError for an integer that the library would round."""
    if not is_exact(int(digits)):
        raise ValueError(f"a constant is {digits:.40}, {EXACT}: write it as a string")


def is_number(value) -> bool:
    return type(value) in (int, float)  # isinstance would accept True as an int


def is_exact(number: float) -> bool:
    return abs(number) < MOST and float(number) == number


def check_count(node: dict):
    """
    Raise ValueError if minProperties is larger than the number of properties that are guaranteed to
    have different names. These are the required properties plus one more, because an answer may
    repeat any other name.
    """
    least = node.get("minProperties", 0)
    most = len({*map(str, node.get("required", []))}) + 1
    is_open = node.get("additionalProperties") is not False or node.get("patternProperties")
    if is_number(least) and least > most and is_open:
        raise ValueError(
            f"minProperties is {least}, wanted at most {most}, because other names may occur "
            "twice: lower it, or name more in required"
        )
