"""
What the grammar library would take for something else, or not obey, is refused by name; and what
it does obey is served.
"""

import json

import pytest

from engine.matcher import Library
from engine.schemas import all_schemas, drop_neutral
from tokenizer import load_tokenizer
from training.corpus import bpe_tokenizer

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    """Of a token a byte, and an end."""
    directory = tmp_path_factory.mktemp("bytes")
    bpe_tokenizer([]).save(directory)
    return Library(load_tokenizer(directory), 257, [256])


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
{"minProperties": 2} -> minProperties is 2, at most 1 is served
{"minProperties": 2, "additionalProperties": {}} -> minProperties is 2, at most 1
{"minProperties": 3, "required": ["a", "a"], "additionalProperties": {"type": "null"}} -> minProperties is 3, at most 2
{"minProperties": 2, "patternProperties": {"^x": {}}, "additionalProperties": false} -> minProperties is 2
{"properties": {"a": {"type": "integer", "required": true}}} -> required is true, wanted a list of names
{"$defs": {"a": {"required": "b"}}} -> required is "b"
{"type": "integer", "divisibleBy": 5} -> divisibleBy is draft 3's
{"$schema": "http://json-schema.org/draft-03/schema#"} -> $schema is http://json-schema.org/draft-03/schema#, wanted the address of draft 4
{"properties": {"a": {"$schema": "draft-07"}}} -> $schema is draft-07
{"$ref": "#/x/y", "x": {"y": {"multipleOf": -1}}} -> multipleOf is -1
{"$ref": "#/$defs/a"} -> nothing in it is #/$defs/a: a $ref must be
{"$ref": "#a"} -> nothing in it is #a
{"$ref": "#None"} -> nothing in it is #None
{"$ref": "http://a.example/b"} -> nothing in it is http://a.example/b
{"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://a.example/b", "items": {"$ref": "#/$defs/c"}}}} -> an $id around a $ref
true -> the schema is true, wanted an object: {} for any JSON
3 -> the schema is 3
[] -> the schema is []
{"type": -> the schema is no JSON
"""  # noqa: E501
# and a text that fits, one that does not
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
{"$ref": "#/$defs/a%20b~1c", "$defs": {"a b/c": {"const": 1}}} -> 1 -> 2
{"$ref": "#a", "$defs": {"b": {"$anchor": "a", "const": 1}}} -> 1 -> 2
{"$id": "http://a.example/b", "type": "object", "properties": {"a": {"$ref": "http://a.example/b"}}} -> {"a": {}} -> {"a": 1}
"""  # noqa: E501


def rows(table: str) -> list[list[str]]:
    return [line.split(" -> ") for line in table.strip().splitlines()]


@pytest.mark.parametrize("schema, reason", rows(REFUSED))
def test_what_cannot_be_obeyed_is_refused(library, schema, reason):
    """In a schema, and within a client's own grammar."""
    matcher, said = library.try_to_compile("json", schema)
    assert not matcher
    assert reason in said
    if schema.startswith("{") and "no JSON" not in reason:
        assert reason in library.try_to_compile("grammar", f'start: "a" %json {schema}')[1]


@pytest.mark.parametrize("schema, right, wrong", rows(SERVED))
def test_what_is_obeyed_is_served(library, schema, right, wrong):
    """Would catch: words that are taken for keywords, and bounds that the library does keep."""
    matcher, said = library.try_to_compile("json", schema)
    assert matcher, said
    for text, fits in (right, True), (wrong, False):
        assert takes(matcher, text) == fits


def takes(matcher, text: str) -> bool:
    """Return whether this text is a whole answer."""
    tokens = [*text.encode(), 256]
    return matcher.deep_copy().validate_tokens(tokens) == len(tokens)


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
    """Would catch: a property taken for the keyword of its name, and the other way round."""
    schema = json.loads(schema)
    before = json.dumps(schema)
    assert drop_neutral(schema) == json.loads(lean)
    assert json.dumps(schema) == before


def test_each_schema_is_read_once():
    """Would catch: a schema that names itself, read for ever."""
    root = {"$ref": "#/items", "items": {"$ref": "#"}, "const": {"items": {}}}
    assert [*all_schemas(root, with_targets=True)] == [root, root["items"]]
