"""
What a JSON schema says, before the grammar library reads it: which of its parts are schemas, what
in it asks for nothing, and what the library would take without a word and not obey.

    drop_neutral({"type": "array", "uniqueItems": False})  # {"type": "array"}
    check_schema('{"multipleOf": -2}')                     # ValueError: multipleOf is -2, wanted ..

Not run by itself: the server drops what is neutral, and engine/matcher.py checks.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from urllib.parse import unquote

# Keywords whose values are schemas, lists of schemas, or maps of names to schemas. Nothing else in
# a schema is one: not a constant, and not a property that is named as a keyword.
SCHEMAS = {"items", "additionalItems", "prefixItems", "contains", "additionalProperties"}
SCHEMAS |= {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}
SCHEMAS |= {"allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
MAPS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
# Keywords that are not served, with values that ask for nothing. zod says of each record that its
# names are strings.
NEUTRAL = {
    "uniqueItems": [False],
    "unevaluatedProperties": [True, {}],
    "not": [False],
    "propertyNames": [True, {}, {"type": "string"}],
}
DRAFTS = r"https://json-schema.org/draft/20(19-09|20-12)/schema#?|"
DRAFTS += r"http://json-schema.org/draft-0[467]/schema#?|"
DRAFT_3 = ("divisibleBy", "disallow", "extends")
UPPER = {"maximum", "exclusiveMaximum"}
BOUNDS = UPPER | {"minimum", "exclusiveMinimum"}
MOST = 2**63  # with integers below it the library computes, and with doubles
EXACT = "wanted at most 2^53 in size, as larger numbers are rounded"
MOST_REMAINDERS = 20_000  # of a multipleOf: each is a state of the library's automaton


def all_schemas(root, with_targets: bool = False) -> Iterator[dict]:
    """Yield the schemas in a schema, itself first. with_targets: what references name, too."""
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
    """Return what a reference names in the root. Raises ValueError if that is nothing."""
    first, *path = unquote(ref).split("/")
    found = root
    if first not in ("", "#"):  # an anchor, or the name of a whole schema
        path = []
        named = (node for node in all_schemas(root) if ref in names_of(node))
        found = next(named, None)
    with suppress(LookupError, TypeError, ValueError):
        for name in path:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found[int(name) if isinstance(found, list) else name]
        if found is not None:
            return found
    raise ValueError(f"nothing in it is {ref:.99}: a $ref must be #/ and the way to a schema in it")


def names_of(schema: dict) -> tuple:
    anchor = schema.get("$anchor")
    return schema.get("$id"), anchor and f"#{anchor}"


def drop_neutral(schema):
    """Return a schema without what asks for nothing."""
    schema = deepcopy(schema)
    for node in all_schemas(schema):
        for key in NEUTRAL.keys() & node.keys():
            if node[key] in NEUTRAL[key]:
                del node[key]
    return schema


def check_schema(text: str):
    """Raise ValueError for what the library would take for something else, or not obey."""
    try:
        root = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema is no JSON ({error}): send an object") from None
    if not isinstance(root, dict):
        raise ValueError(f"the schema is {text:.40}, wanted an object: {{}} for any JSON")
    for node in all_schemas(root, with_targets=True):
        check_words(node)
        check_numbers(node)
        check_count(node)
        # its references begin at it, not at the root
        is_base = node is not root and not str(node.get("$id", "#")).startswith("#")
        if is_base and any("$ref" in part for part in all_schemas(node)):
            raise ValueError("it has an $id around a $ref, wanted at the root alone: leave it out")


def check_words(node: dict):
    """Raise ValueError for words of drafts that are not served."""
    for key in DRAFT_3:
        if key in node:
            raise ValueError(f"{key} is draft 3's, wanted draft 4 or a later one: say it anew")
    required = node.get("required", [])
    if not isinstance(required, list):
        wanted = "wanted a list of names, beside the properties"
        raise ValueError(f"required is {json.dumps(required):.40}, {wanted}")
    draft = node.get("$schema", "")
    if isinstance(draft, str) and not re.fullmatch(DRAFTS, draft):
        wanted = "wanted the address of draft 4, 6, 7, 2019-09 or 2020-12"
        raise ValueError(f"$schema is {draft:.99}, {wanted}: leave it out")


def check_numbers(node: dict):
    """Raise ValueError for numbers that the library rounds, or counts to for too long."""
    for key in BOUNDS & node.keys():
        value = node[key]
        # it computes with the largest integer in place of a larger one: no answer is above either
        is_kept = is_number(value) and key in UPPER and value >= MOST - 1
        if is_number(value) and not (is_exact(value) or is_kept):
            raise ValueError(f"{key} is {value!r:.40}, {EXACT}: choose another bound")
    constants = json.dumps([node.get("const"), node.get("enum")])
    json.loads(constants, parse_int=check_constant)
    step = node.get("multipleOf", 1)
    if is_number(step):
        digits = re.sub(r"e.*|\D", "", repr(step)).strip("0")
        if step <= 0 or int(digits or 0) > MOST_REMAINDERS:
            wanted = f"wanted above 0, and at most {MOST_REMAINDERS:,} without zeros at its end"
            raise ValueError(f"multipleOf is {step!r:.40}, {wanted}: choose another step")


def check_constant(digits: str):
    """Raise ValueError for an integer that the library rounds."""
    if not is_exact(int(digits)):
        raise ValueError(f"a constant is {digits:.40}, {EXACT}: say it as a text")


def is_number(value) -> bool:
    return type(value) in (int, float)  # True is an int, too


def is_exact(number: float) -> bool:
    return abs(number) < MOST and float(number) == number


def check_count(node: dict):
    """Raise ValueError for more properties than are sure to differ: open names may come twice."""
    least = node.get("minProperties", 0)
    most = len({*map(str, node.get("required", []))}) + 1
    is_open = node.get("additionalProperties") is not False or node.get("patternProperties")
    if is_number(least) and least > most and is_open:
        wanted = f"at most {most} is served, as other names may come twice"
        raise ValueError(f"minProperties is {least}, {wanted}: lower it, or name more in required")
