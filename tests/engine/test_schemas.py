"""
Schemas that the grammar library would misread, not obey, or never finish are refused by name; those
that it obeys are served.
"""

import json
import random
import re

import pytest

from engine.matcher import Library, mask_of
from engine.rules import endless
from engine.schemas import all_schemas, drop_neutral
from tokenizer import load_tokenizer
from training.corpus import bpe_tokenizer

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    """Return a library with one token per byte, and two end tokens."""
    directory = tmp_path_factory.mktemp("bytes")
    bpe_tokenizer([]).save(directory)
    return Library(load_tokenizer(directory), 258, [256, 257])


# a schema, or a kind and another grammar -> why it is refused
REFUSED = r"""
{"type": "integer", "minimum": 10000000000000000000} -> minimum is 10000000000000000000, wanted at most 2^53
{"type": "integer", "minimum": 1e19, "maximum": 2e19} -> minimum is 1e+19, wanted
{"type": "integer", "minimum": 9223372036854775808, "maximum": 9223372036854775810} -> minimum is 9223372036854775808
{"type": "integer", "minimum": -2e19, "maximum": 5} -> minimum is -2e+19
{"type": "integer", "maximum": -9223372036854775808} -> maximum is -9223372036854775808
{"type": "integer", "maximum": 9007199254740995} -> maximum is 9007199254740995
{"type": "integer", "exclusiveMinimum": 9007199254740993} -> exclusiveMinimum is 9007199254740993
{"items": {"anyOf": [{"type": "number", "minimum": 1e400}]}} -> minimum is inf
{"type": "number", "maximum": 1e300} -> a bound is too large: choose one of at most 2^53 in size
{"type": "integer", "maximum": "3"} -> Expected a number for 'maximum', got "3"
{"const": 1234567890123456789} -> a constant is 1234567890123456789, wanted at most 2^53
{"enum": ["a", {"b": [-9007199254740993]}]} -> a constant is -9007199254740993
{"type": "string", "maxLength": 4294967296} -> a length or count above 4,294,967,295
{"type": "integer", "multipleOf": -2} -> multipleOf is -2, wanted above 0
{"type": "number", "multipleOf": 0} -> multipleOf is 0, wanted above 0
{"type": "number", "multipleOf": -0.5} -> multipleOf is -0.5
{"type": "integer", "multipleOf": 99991} -> multipleOf is 99991, wanted above 0, and at most 20,000
{"type": "number", "multipleOf": 99.991} -> multipleOf is 99.991
{"minProperties": 2} -> minProperties is 2, wanted at most 1, because
{"minProperties": 2, "additionalProperties": {}} -> minProperties is 2, wanted at most 1
{"minProperties": 3, "required": ["a", "a"], "additionalProperties": {"type": "null"}} -> minProperties is 3, wanted at most 2
{"minProperties": 2, "patternProperties": {"^x": {}}, "additionalProperties": false} -> minProperties is 2
{"properties": {"a": {"type": "integer", "required": true}}} -> required is true, wanted a list of names
{"$defs": {"a": {"required": "b"}}} -> required is "b"
{"type": "integer", "divisibleBy": 5} -> divisibleBy is from draft 3
{"$schema": "http://json-schema.org/draft-03/schema#"} -> $schema is http://json-schema.org/draft-03/schema#, wanted the address of draft 4
{"$schema": "\ud800"} -> $schema is ?, wanted
{"properties": {"a": {"$schema": "draft-07"}}} -> $schema is draft-07
{"$ref": "#/x/y", "x": {"y": {"multipleOf": -1}}} -> multipleOf is -1
{"$ref": "#/\udfff"} -> it has no schema at #/?
{"$ref": "#/$defs/a"} -> it has no schema at #/$defs/a: a $ref must be
{"$ref": "#a"} -> it has no schema at #a
{"$ref": "#None"} -> it has no schema at #None
{"$ref": "http://a.example/b"} -> it has no schema at http://a.example/b
{"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://a.example/b", "items": {"$ref": "#/$defs/c"}}}} -> an $id around a $ref
true -> the schema is true, wanted an object: {} for any JSON
3 -> the schema is 3
[] -> the schema is []
{"type": -> the schema is not JSON
regex ( -> invalid regex: unclosed group
regex (?=a)b -> invalid regex: look-around
{"type": "string", "pattern": "(?=a)b"} -> invalid regex: look-around
{"not": {"type": "string"}} -> Unimplemented keys: ["not"]
{"type": "array", "uniqueItems": true} -> Unimplemented keys: ["uniqueItems"]
{"type": "string", "format": "foo"} -> Unknown format: foo
{"allOf": [{"type": "string", "format": "email"}, {"type": "string", "format": "uri"}]} -> Regex is empty
{"$ref": "#"} -> values of # never end
{"oneOf": [{}, {}]} -> oneOf is not supported if its schemas may overlap: use anyOf
{"type": "foo"} -> Invalid type: foo
{"x-guidance": {"lenient": true, "whitespace_pattern": "[ \\n]*"}, "not": {}} -> ["not"]
{"allOf": [{"x-guidance": {"lenient": true, "whitespace_pattern": "[ \\n]*"}, "not": {}}]} -> ["not"]
grammar start "a" -> Expected token ':'
grammar start: a b⏎a[lazy]: /x*/⏎b: "y" -> the grammar library crashes on it
grammar start: %json {"x-guidance": {"lenient": true}} -> the grammar has x-guidance, whose options clients may not set
grammar start: %json {"\u0078\u002Dguidance": {"lenient": true}} -> x-guidance
grammar start: %json {"\u0078-guidance": {"lenient": true}, "uniqueItems": true} -> x-guidance
{"properties": {"a": {"type": "boolean"}}, "patternProperties": {"^a$": {"type": "boolean"}}, "additionalProperties": false} -> its patternProperties match only properties that are also declared: leave them out
{"properties": {"b": {}, "a": {}}, "required": ["a"], "patternProperties": {"^(a|b)$": true}, "additionalProperties": false} -> its patternProperties match only properties that are also declared: leave them out
{"required": ["a"], "patternProperties": {"^a$": {}}, "additionalProperties": false} -> its patternProperties match only properties that are also declared: leave them out
{"properties": {"a": {}}, "allOf": [{"patternProperties": {"^a$": {}}, "additionalProperties": false}]} -> its patternProperties match only properties that are also declared: leave them out
{"type": "array", "items": {"properties": {"é": {}}, "patternProperties": {"^é$": {"$ref": "#/items"}}, "additionalProperties": false}} -> its patternProperties match only properties that are also declared: leave them out
{"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}} -> values of # never end: allow null there, or require less
{"type": "array", "minItems": 1, "items": {"$ref": "#"}} -> values of # never end
{"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#", "description": "d"}]} -> values of # never end
{"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}} -> values of # never end
{"type": "object", "allOf": [{"required": ["a"]}, {"properties": {"a": {"$ref": "#"}}}]} -> values of # never end
{"anyOf": [{"type": "array", "minItems": 1, "items": {"$ref": "#"}}, {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}]} -> values of # never end
{"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "object", "required": ["c"], "properties": {"c": {"$ref": "#/$defs/d"}}}, "d": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a~1b"}}}} -> values of #, #/$defs/a~1b, #/$defs/d never end
{"properties": {"a": {"type": "object", "required": ["b"], "properties": {"b": {"$ref": "#/properties/a"}}}}} -> values of #/properties/a never end
{"anyOf": [{"type": "integer"}, {"type": "array", "minItems": 1, "items": {"$ref": "#/anyOf/1"}}]} -> values of #/anyOf/1 never end
{"items": {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/items"}}}} -> values of #/items never end
{"$ref": "#a", "$defs": {"b": {"$anchor": "a", "type": "array", "minItems": 1, "items": {"$ref": "#a"}}}} -> values of #, #a never end
{"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a%20b"}}}} -> values of #, #/$defs/a%20b never end
{"$id": "http://a.example/b", "type": "array", "minItems": 1, "items": {"$ref": "http://a.example/b"}} -> values of #, http://a.example/b never end
"""  # noqa: E501
# a schema -> a text that fits -> a text that does not
SERVED = r"""
{"type": "integer", "maximum": 18446744073709551615} -> 9007199254740993 -> 18446744073709551616
{"type": "integer", "maximum": 9223372036854775807} -> 9223372036854775806 -> 9223372036854775808
{"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991} -> -9007199254740991 -> 9007199254740992
{"type": "integer", "minimum": 0, "maximum": 1000000000000000000} -> 1000000000000000000 -> 1000000000000000001
{"enum": [9007199254740992, 0.1, true]} -> 9007199254740992 -> 9007199254740993
{"type": "integer", "multipleOf": 100000} -> 300000 -> 50000
{"type": "number", "multipleOf": 0.01} -> 1.25 -> 1.255
{"minProperties": 1} -> {"a": 1} -> {}
{"minProperties": 2, "required": ["a"]} -> {"a": 1, "b": 2} -> {"a": 1}
{"minProperties": 2, "properties": {"a": {}, "b": {}}, "required": ["a", "b"]} -> {"a": 1, "b": 2} -> {"a": 1}
{"properties": {"required": {"const": true}, "multipleOf": {"const": -2}}} -> {"required": true, "multipleOf": -2} -> {"required": 1}
{"const": {"minimum": 1, "required": true, "$ref": "#/no", "multipleOf": 0}} -> {"minimum": 1, "required": true, "$ref": "#/no", "multipleOf": 0} -> {}
{"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 1, "exclusiveMinimum": true} -> 2 -> 1
{"$schema": "https://json-schema.org/draft/2020-12/schema", "const": 1} -> 1 -> 2
{"$ref": "#/$defs/a%20b~1~01", "$defs": {"a b/~1": {"const": 1}}} -> 1 -> 2
{"$ref": "#a", "$defs": {"b": {"$anchor": "a", "const": 1}}} -> 1 -> 2
{"$id": "http://a.example/b", "type": "object", "properties": {"a": {"$ref": "http://a.example/b"}}} -> {"a": {}} -> {"a": 1}
{"type": "object", "required": ["v", "next"], "properties": {"v": {}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}} -> {"v": 1, "next": {"v": 2, "next": null}} -> {"v": 1}
{"type": "object", "required": ["a"], "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}} -> {"a": [{"a": []}]} -> {"a": [1]}
{"type": "object", "properties": {"a": {"$ref": "#"}}} -> {"a": {"a": {}}} -> {"a": 1}
{"required": ["a"], "properties": {"a": {"$ref": "#"}}} -> {"a": 1} -> {}
{"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}} -> [[1], 2] -> [[]]
{"type": "object", "properties": {"a": {"$ref": "#"}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]} -> {"a": {"b": 1}} -> {}
{"type": "object", "const": {"$ref": "#"}} -> {"$ref": "#"} -> {}
{"type": "object", "enum": [{"a": {"$ref": "#"}}]} -> {"a": {"$ref": "#"}} -> {}
{"type": "object", "required": ["$ref"], "properties": {"$ref": {"type": "string"}}} -> {"$ref": "a"} -> {}
{"type": "object", "required": ["const"], "properties": {"const": {"type": "object", "properties": {"a": {"$ref": "#"}}}}} -> {"const": {"a": {"const": {}}}} -> {"const": {"a": {}}}
{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "required": ["b"], "properties": {"b": {"$ref": "#/$defs/b"}}}, "b": {"type": "array", "items": {"$ref": "#/$defs/a"}}}} -> {"b": [{"b": []}]} -> {"b": [{}]}
{"type": "object", "properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 0.01}, "c": {"multipleOf": 0.01}, "d": {"multipleOf": 0.01}, "e": {"multipleOf": 100}}} -> {"a": 0.01, "e": 200} -> {"a": 0.011}
{} -> [1, 2] -> [1,  2]
{} -> [1, 2] -> [1,⏎2]
"""  # noqa: E501


def rows(table: str) -> list[list[str]]:
    return [line.replace("⏎", "\n").split(" -> ") for line in table.strip().splitlines()]


@pytest.mark.parametrize("grammar, reason", rows(REFUSED))
def test_what_cannot_be_obeyed_is_refused(library, grammar, reason):
    """
    Each schema is tested by itself, within a client's own grammar, and as a tool's. Previously half
    of an answer had been sent when nothing could follow, or it went on for ever. Would catch: a
    keyword that is ignored; a client's options that turn checks off; messages that only the
    library's authors understand. A lone surrogate in a message ended the engine, which could not
    send it.
    """
    kind, _, text = grammar.partition(" ")
    if kind not in ("regex", "grammar"):
        kind, text = "json", grammar
    matcher, said = library.try_to_compile(kind, text)
    assert not matcher
    assert reason in said
    assert not re.search(r"<|panic|NoExtension|backtrace|\(And", said)
    if kind == "json":
        tools = json.dumps(["", ['{"type": "object"}', text]])
        assert library.refusal("", "tools", tools) == (said, [1])
        if text.startswith("{") and "not JSON" not in reason and "x-guidance" not in text:
            assert reason in library.try_to_compile("grammar", f'start: "a" %json {text}')[1]


@pytest.mark.parametrize("schema, right, wrong", rows(SERVED))
def test_what_is_obeyed_is_served(library, schema, right, wrong):
    """
    Would catch: ordinary words taken for keywords; bounds refused although the library keeps them;
    every schema that names itself taken for endless; endless newlines, or two blanks between parts.
    """
    matcher, said = library.try_to_compile("json", schema)
    assert matcher, said
    for text, fits in (right, True), (wrong, False):
        assert takes(matcher, text) == fits


def takes(matcher, text: str) -> bool:
    """Return True if this text is a whole answer, whichever token ends it."""
    answers = [[*text.encode(), end] for end in (256, 257)]
    first, second = [matcher.deep_copy().validate_tokens(a) == len(a) for a in answers]
    assert first == second
    return first


@pytest.mark.parametrize("step", [1, -1])
def test_each_part_of_a_chain_is_looked_at_twice(step):
    """
    This holds in either order. Would catch: finding one part per pass, until the time for compiling
    is over.
    """
    chain = {i: i + 1 for i in range(300)[::step]}
    looks = []

    def has_end(following: int, parts: dict) -> bool:
        looks.append(following)
        return following not in parts

    assert endless(chain, has_end) == ""
    assert len(looks) <= 600


NEUTRAL = r"""
{"uniqueItems": false, "not": false} -> {}
{"uniqueItems": true, "propertyNames": {"maxLength": 3}} -> {"uniqueItems": true, "propertyNames": {"maxLength": 3}}
{"properties": {"default": {"uniqueItems": false}, "enum": {"not": false}, "not": {"uniqueItems": false}}} -> {"properties": {"default": {}, "enum": {}, "not": {}}}
{"properties": {"propertyNames": {"type": "string"}, "unevaluatedProperties": {}}} -> {"properties": {"propertyNames": {"type": "string"}, "unevaluatedProperties": {}}}
{"propertyNames": {"type": "string"}} -> {}
{"items": {"propertyNames": {}, "additionalProperties": {"not": false}}} -> {"items": {"additionalProperties": {}}}
{"$defs": {"examples": {"anyOf": [{"not": false}, true]}}, "definitions": {"const": {"uniqueItems": false}}} -> {"$defs": {"examples": {"anyOf": [{}, true]}}, "definitions": {"const": {}}}
{"patternProperties": {"default": {"uniqueItems": false}}, "dependentSchemas": {"a": {"not": false}}} -> {"patternProperties": {"default": {}}, "dependentSchemas": {"a": {}}}
{"default": {"uniqueItems": false}, "examples": [{"not": false}], "x-mine": {"a": {"not": false}}} -> {"default": {"uniqueItems": false}, "examples": [{"not": false}], "x-mine": {"a": {"not": false}}}
{"enum": [{"not": false}], "const": {"properties": {"a": {"not": false}}}} -> {"enum": [{"not": false}], "const": {"properties": {"a": {"not": false}}}}
"""  # noqa: E501


@pytest.mark.parametrize("schema, lean", rows(NEUTRAL))
def test_what_asks_for_nothing_is_dropped_from_schemas_alone(schema, lean):
    """Would catch: a property mistaken for the keyword of the same name, or the other way round."""
    schema = json.loads(schema)
    before = json.dumps(schema)
    assert drop_neutral(schema) == json.loads(lean)
    assert json.dumps(schema) == before


def test_each_schema_is_read_once():
    """Would catch: a schema that refers to itself and is read for ever."""
    root = {"$ref": "#/items", "items": {"$ref": "#"}, "const": {"items": {}}}
    assert [*all_schemas(root, with_targets=True)] == [root, root["items"]]


SCHEMAS_TO_FINISH = r"""
{}
{"type": "object"}
{"type": "string"}
{"type": "number"}
{"type": "integer"}
{"type": "boolean"}
{"type": "null"}
{"type": "array"}
{"type": ["string", "null", "integer"]}
{"enum": ["a", 1, null, {"b": [2]}]}
{"const": {"a": [1, {"b": null}], "required": true, "patternProperties": 5}}
{"type": "string", "minLength": 2, "maxLength": 4}
{"type": "string", "pattern": "^[a-f]+$"}
{"type": "string", "pattern": "^a.b$"}
{"type": "string", "pattern": "^[^ -~]$"}
{"type": "string", "pattern": "^[a-z]{2,5}$", "maxLength": 3}
{"type": "string", "format": "date"}
{"type": "string", "format": "date-time"}
{"type": "string", "format": "uuid"}
{"type": "string", "format": "email"}
{"type": "string", "format": "ipv4"}
{"type": "integer", "minimum": 3, "maximum": 12}
{"type": "integer", "exclusiveMinimum": -7, "exclusiveMaximum": 7}
{"type": "integer", "multipleOf": 5, "minimum": 1}
{"type": "number", "minimum": 0.25, "maximum": 0.75}
{"type": "number", "multipleOf": 0.1}
{"type": "array", "items": {"type": "integer", "minimum": 6, "maximum": 9, "multipleOf": 5}}
{"type": "array", "items": {"type": "integer", "minimum": 1.2, "maximum": 1.8}}
{"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}
{"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": false}
{"type": "array", "prefixItems": [{"type": "null"}, false]}
{"type": "array", "items": false}
{"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}}
{"type": "array", "items": {"type": "string", "pattern": "^abc$", "maxLength": 2}}
{"type": "array", "items": {"type": "string", "format": "uuid", "maxLength": 3}}
{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}
{"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]}
{"type": "object", "properties": {"a": {}, "b": {}}, "required": ["c"]}
{"type": "object", "properties": {"a": false, "b": {}}, "additionalProperties": false}
{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}}
{"type": "object", "properties": {"a b": {}, "é": {}}, "additionalProperties": false}
{"type": "object", "additionalProperties": {"type": "integer"}}
{"type": "object", "additionalProperties": false}
{"type": "object", "maxProperties": 2}
{"type": "object", "minProperties": 1, "additionalProperties": false, "properties": {"a": {}, "b": {}}}
{"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": false}
{"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}}
{"type": "object", "properties": {"a": {}}, "patternProperties": {"^[ab]$": {}}, "additionalProperties": false}
{"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}, "additionalProperties": {"type": "null"}}
{"type": "object", "patternProperties": {"^b": false}}
{"type": "object", "patternProperties": {"^a": {"type": "null"}, "^b": {"type": "null"}}, "additionalProperties": false}
{"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}]}
{"anyOf": [false, {"type": "string", "maxLength": 1}]}
{"oneOf": [{"type": "integer"}, {"type": "string"}]}
{"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}, {"type": "null"}]}
{"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]}
{"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}
{"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": false}}}
{"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
{"type": "object", "properties": {"t": {"type": ["array", "null"], "items": {"$ref": "#"}}}, "additionalProperties": false}
"""  # noqa: E501
SHORT = b'",:{}[] 01aen'  # bytes that bring answers to an end, or into a corner


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS_TO_FINISH.strip().splitlines())
def test_no_answer_gets_stuck(library, schema):
    """Take forty random walks, one byte per token: each must end, or go on for long."""
    first, _ = library.try_to_compile("json", schema)
    ends = 0
    for seed in range(40):
        choose = random.Random(seed)
        matcher = first.deep_copy()
        text = []
        while 256 not in text and len(text) < 150:
            mask = mask_of(matcher)
            assert isinstance(mask, bytes), bytes(text)
            bits = int.from_bytes(mask, "little")
            allowed = [i for i in range(257) if bits >> i & 1]
            short = [i for i in allowed if i == 256 or i in SHORT]
            text.append(choose.choice(short if short and choose.random() < 0.7 else allowed))
            matcher.consume_token(text[-1])
        if 256 in text:
            ends += 1
            json.loads(bytes(text[:-1]))
    assert ends
