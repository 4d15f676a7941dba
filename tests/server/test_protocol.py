"""
The rules of a request body, as tables: values that pass, and refusals with their messages. There is
no server, so a rule costs one line here. A row is `kind fields -> expected`. The required fields of
a kind of body (LEAST) are added. `context` is no field: it has the defaults of the model.
"""

import json
import re
import time
from dataclasses import fields as fields_of
from typing import Any

import pytest
from openai.types import completion_create_params as text_create_params
from openai.types.chat import completion_create_params
from pydantic import TypeAdapter, ValidationError

from params import SamplingParams
from server import protocol
from server.protocol import (
    IGNORED,
    NOT_SERVED,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    body_refusal,
    error_body,
)

HELLO = [{"role": "user", "content": "x"}]
LEAST = {CompletionRequest: {"prompt": "p"}, ChatRequest: {"messages": HELLO}}
LEAST |= {TokenizeRequest: {"prompt": "p"}, DetokenizeRequest: {"tokens": [1]}}
KINDS = dict(zip(("text", "chat", "tokenize", "detokenize"), LEAST, strict=True))
BOTH = pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])


def parse(kind=CompletionRequest, context=None, **body):
    return kind.model_validate(LEAST[kind] | body, context=context)


def refusal_of(call, *args, **fields) -> ApiError:
    """Return the error that a call raises, converted as in app.py."""
    with pytest.raises((ApiError, ValidationError)) as caught:
        call(*args, **fields)
    error = caught.value
    error = body_refusal(error) if isinstance(error, ValidationError) else error
    assert error.status == 400
    assert len(error_body(error)) < 1000
    return error


def refusal(kind=CompletionRequest, **body) -> ApiError:
    return refusal_of(parse, kind, **body)


def rows(table: str) -> list[tuple]:
    """Return (kind, fields, expected) of each line."""
    parts = re.findall(r"^(\w+) (\{.*\}) -> (.*)$", table, re.MULTILINE)
    return [(KINDS[kind], json.loads(fields), expected) for kind, fields, expected in parts]


# --------------------------------------------------------------------------------------------------
# Values of fields

# field, kind of body, other fields that it needs; its smallest and largest value, one beyond each
NUMBERS = """
temperature both {} 0 2 -0.001 2.001
top_p both {} 1e-9 1 0 1.001
top_k both {} -1 2147483647 -2 2147483648
min_p both {} 0 1 -0.001 1.001
n both {} 1 128 0 129
seed both {} -9223372036854775808 9223372036854775807 -9223372036854775809 9223372036854775808
presence_penalty both {} -2 2 -2.001 2.001
frequency_penalty both {} -2 2 -2.001 2.001
repetition_penalty both {} 1e-9 10 0 10.001
min_tokens both {"max_tokens":2147483647} 0 2147483647 -1 2147483648
priority both {} -1000 1000 -1001 1001
max_tokens text {"echo":true} 0 2147483647 -1 2147483648
logprobs text {} 0 20 -1 21
max_tokens chat {} 1 2147483647 0 2147483648
max_completion_tokens chat {} 1 2147483647 0 2147483648
top_logprobs chat {"logprobs":true} 0 20 -1 21
"""


@pytest.mark.parametrize("row", NUMBERS.strip().splitlines())
def test_numbers_have_ranges(row):
    """A number exactly at an edge passes, one beyond it is refused. A bool is no number."""
    name, kinds, *values = row.split()
    needed, *values = map(json.loads, values)
    for kind in LEAST if kinds == "both" else [KINDS[kinds]]:
        if name not in kind.model_fields:
            continue
        for value in values[:2]:
            assert getattr(parse(kind, **needed | {name: value}), name) == value
        wrong = [True, "1", [1], {}, float("nan"), float("inf"), float("-inf")]
        for value in values[2:] + wrong:
            message = refusal(kind, **needed | {name: value}).message
            assert message.startswith(f"{name}: Input should be ")
            assert message.endswith(f", got {value!r}")


@BOTH
def test_null_and_ignored_fields_count_as_not_sent(kind):
    nothing = dict.fromkeys(kind.model_fields.keys() - LEAST[kind])
    assert parse(kind, **nothing, **dict.fromkeys(IGNORED, "anything")) == parse(kind)


NEUTRAL = """{
    "best_of": 1, "suffix": "", "echo": false,
    "modalities": ["text"], "use_beam_search": false, "length_penalty": 1, "early_stopping": false,
    "spaces_between_special_tokens": true, "include_stop_str_in_output": false,
    "include_reasoning": true,
    "return_token_strs": false, "continue_final_message": false, "tools": [],
    "tool_choice": "none", "functions": [], "function_call": "none",
    "images": [], "audio": null, "prefix": false
}"""


@pytest.mark.parametrize("kind", LEAST)
def test_fields_that_are_not_served(kind):
    """
    The neutral value passes. Any other value would change the answer, so it is refused by name. So
    is a bool instead of a number, although Python treats True as 1.
    """
    assert json.loads(NEUTRAL) == NOT_SERVED
    for name in NOT_SERVED.keys() - kind.model_fields:
        neutral = NOT_SERVED[name]
        assert parse(kind, **{name: neutral}) == parse(kind)
        wrong = ["other", {"other": 1}, 7]
        wrong += [int(neutral), not neutral] if isinstance(neutral, bool) else []
        wrong += [True] if type(neutral) is int else []
        for value in wrong:
            error = refusal(kind, **{name: value})
            assert error.param == name
            assert error.message.startswith(f"{name} is not supported: leave it out or send ")


def test_every_field_of_the_openai_client_is_known():
    """
    A field that a new version adds, and that changes no answer, should be ignored, not refused.
    """
    pairs = {CompletionRequest: text_create_params, ChatRequest: completion_create_params}
    for kind, module in pairs.items():
        names = module.CompletionCreateParamsBase.__annotations__.keys()
        unknown = names - kind.model_fields.keys() - IGNORED - NOT_SERVED.keys()
        assert unknown <= {"reasoning_effort", "web_search_options", "moderation"}


# Messages without a role are a user's; "..." stands for any text. (instructor, pydantic-ai and
# llama-index send tool_choice together with tools.)
REFUSED = """
text {"prompt": 3} -> prompt must be a string, a list of strings, a list of token ids, or a list of such lists
text {"prompt": {"a": 1}} -> prompt must be a string, ...
text {"prompt": [true]} -> prompt must be a string, ...
text {"prompt": [1.0]} -> prompt must be a string, ...
text {"prompt": ["a", 1]} -> prompt must be a string, ...
text {"prompt": [[1], "a"]} -> prompt must be a string, ...
text {"prompt": [["a"]]} -> prompt must be a string, ...
text {"prompt": [[[1]]]} -> prompt must be a string, ...
text {"prompt": ""} -> prompt is empty: each prompt needs at least one character or token id
text {"prompt": []} -> prompt is empty: ...
text {"prompt": ["a", ""]} -> prompt is empty: ...
text {"prompt": [[1], []]} -> prompt is empty: ...
text {"prompt": null} -> prompt: Field required, ...
text {"context": {"temperature": 0.5}, "prompt": 3} -> prompt must be a string, ...
text {"stream": 1} -> stream: Input should be a valid boolean, got 1
text {"echo": 1} -> echo: Input should be a valid boolean, got 1
text {"ignore_eos": 1} -> ignore_eos: Input should be a valid boolean, got 1
text {"return_token_ids": 1} -> return_token_ids: Input should be a valid boolean, got 1
text {"skip_special_tokens": 1} -> skip_special_tokens: Input should be a valid boolean, got 1
text {"add_special_tokens": 1} -> add_special_tokens: Input should be a valid boolean, got 1
text {"request_id": ""} -> request_id: String should match pattern ...
text {"request_id": "a "} -> request_id: String should match pattern ...
text {"request_id": "a\\n"} -> request_id: String should match pattern ...
text {"request_id": "\\r\\na"} -> request_id: String should match pattern ...
text {"request_id": "a\\u007f"} -> request_id: String should match pattern ...
text {"request_id": "é"} -> request_id: String should match pattern ...
text {"stop": ""} -> stop.0: String should have at least 1 character, got ''
text {"stop": ["a", 1]} -> stop.1: Input should be a valid string, got 1
text {"stop_token_ids": [true]} -> stop_token_ids.0: Input should be a valid integer, got True
text {"max_tokens": 0} -> max_tokens is 0, wanted at least 1; 0 is only for echo
text {"min_tokens": 17} -> min_tokens is 17, above max_tokens (16)
text {"stream_options": {}} -> stream_options is only for streams: send stream true or leave it out
text {"stream": true, "stream_options": {"usage": 1}} -> stream_options.usage is not a known field: leave it out
text {"xyzzy": null, "plugh": 0} -> plugh is not a known field: leave it out
text {"best_of": 2} -> best_of is not supported: leave it out or send 1
text {"logit_bias": [1]} -> logit_bias must be an object with at most 1024 token ids
text {"logit_bias": {"0": -100, "50256": 100, "12345678901": 0.5, "": 1}} -> logit_bias has a key that is not a token id, got ''
text {"logit_bias": {" 1": 1}} -> logit_bias has a key that is not a token id, got ' 1'
text {"logit_bias": {"+1": 1}} -> logit_bias has a key that is not a token id, got '+1'
text {"logit_bias": {"-1": 1}} -> logit_bias has a key that is not a token id, got '-1'
text {"logit_bias": {"1.0": 1}} -> logit_bias has a key that is not a token id, got '1.0'
text {"logit_bias": {"1_0": 1}} -> logit_bias has a key that is not a token id, got '1_0'
text {"logit_bias": {"0x1": 1}} -> logit_bias has a key that is not a token id, got '0x1'
text {"logit_bias": {"\u0663": 1}} -> logit_bias has a key that is not a token id, got '\u0663'
text {"logit_bias": {"\u00b2": 1}} -> logit_bias has a key that is not a token id, got '\u00b2'
text {"logit_bias": {"111111111111": 1}} -> logit_bias has a key that is not a token id, got '111111111111'
text {"logit_bias": {"1": -100.1}} -> logit_bias.1 must be a number from -100 to 100, got -100.1
text {"logit_bias": {"1": 100.1}} -> logit_bias.1 must be a number from -100 to 100, got 100.1
text {"logit_bias": {"1": NaN}} -> logit_bias.1 must be a number from -100 to 100, got nan
text {"logit_bias": {"1": "1"}} -> logit_bias.1 must be a number from -100 to 100, got '1'
text {"logit_bias": {"1": null}} -> logit_bias.1 must be a number from -100 to 100, got None
text {"logit_bias": {"1": [1]}} -> logit_bias.1 must be a number from -100 to 100, got [1]
text {"logit_bias": {"1": true}} -> logit_bias.1 must be a number from -100 to 100, got True
text {"cache_salt": ""} -> cache_salt: String should have at least 1 character, got ''
chat {"prompt": "x"} -> prompt is not a known field: leave it out
chat {"messages": []} -> messages: List should have at least 1 item after validation, not 0, got []
chat {"messages": [{"role": "function", "content": "x"}]} -> messages.0.role: Input should be ...
chat {"messages": [{"role": "user", "content": "x"}, {"role": "user"}]} -> messages.1.content is missing
chat {"messages": [{"role": "user", "content": null}]} -> messages.0.content: Input should be a valid string, got None
chat {"messages": [{"role": "tool", "tool_call_id": "a", "output": "x"}]} -> messages.0.content is missing
chat {"messages": [{"role": "tool", "content": "x"}]} -> messages.0.tool_call_id is for the role tool only, ...
chat {"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]} -> messages.0.tool_call_id is for ...
chat {"messages": [{"role": "assistant", "tool_calls": [{}]}]} -> messages.0.tool_calls.0.id: Field required, ...
chat {"messages": [{"role": "user", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}]} -> messages.0.tool_calls are only for the role assistant: leave them out
chat {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[]"}}]}]} -> messages.0.tool_calls.0.function.arguments: Input should be a valid dictionary, ...
chat {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{} {}"}}]}]} -> messages.0.tool_calls.0.function.arguments trailing characters at ...
chat {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]} -> messages.0.tool_calls.0.function.arguments: Field required, ...
chat {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f g", "arguments": "{}"}}]}]} -> messages.0.tool_calls.0.function.name: String should match pattern ...
chat {"messages": [{"role": "user", "audio": {"id": "a"}}]} -> messages.0.audio is not ...
chat {"messages": [{"content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}]}]} -> messages.0.content.1 cannot be read: only parts of type text are supported, got {'image_url': {'url': 'data:,'}, 'type': 'image_url'}
chat {"messages": [{"content": [{"type": "text", "text": 1}]}]} -> messages.0.content.0 cannot be read: only parts of type text are supported, got {'text': 1, 'type': 'text'}
chat {"messages": [{"content": [3]}]} -> messages.0.content.0 cannot be read: ...
chat {"logprobs": 2} -> logprobs: Input should be a valid boolean, got 2
chat {"top_logprobs": 1} -> top_logprobs needs logprobs: send logprobs true or leave it out
text {"tools": [{}]} -> tools is not supported: leave it out or send []
chat {"tools": [{}]} -> tools.0.type: Field required, ...
chat {"tools": [{"type": "function", "function": {"name": ""}}]} -> tools.0.function.name: String should match pattern '^[a-zA-Z0-9_-]{1,64}$', got ''
chat {"tools": [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}]} -> tools has two functions with the same name
chat {"tool_choice": "auto"} -> tool_choice needs tools, and may only name one of them
chat {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [{"type": "function", "function": {"name": "f"}}]} -> tool_choice needs tools, ...
chat {"tool_choice": "f", "tools": [{"type": "function", "function": {"name": "f"}}]} -> tool_choice must be "none", "auto", "required", or {"type": "function", "function": {"name": ..}}
chat {"tool_choice": {"type": "allowed_tools"}} -> tool_choice must be ...
chat {"functions": [{"name": "f"}]} -> functions is not supported: ...
text {"response_format": "json"} -> response_format must be of type text, json_object, or json_schema with an object as json_schema.schema
text {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}} -> response_format must be ...
text {"response_format": {"type": "structural_tag"}} -> response_format must be ...
text {"response_format": {"type": "json_object", "schema": "{}"}} -> response_format must be ...
text {"response_format": {"type": "json_object", "json_schema": {}}} -> response_format.json_schema is not a known field: leave it out
chat {"response_format": {"type": "text", "schema": {}}} -> response_format.schema is not a known field: leave it out
text {"response_format": {"type": "text", "json_schema": {}}} -> response_format.json_schema is not a known field: leave it out
text {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "strict": true}} -> response_format.strict is not a known field: leave it out
text {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "schemas": {}}}} -> response_format.json_schema.schemas is not a known field: did you mean schema?
text {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}} -> structured_outputs.whitespace_pattern is not a known field: leave it out
chat {"tool_choice": {"type": "function", "function": {"name": "f", "arguments": {}}}} -> tool_choice.function.arguments is not a known field: leave it out
chat {"tool_choice": {"type": "function", "function": {"name": "f"}, "name": "g"}} -> tool_choice.name is not a known field: leave it out
chat {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]} -> tools.0.function.paramters is not a known field: did you mean parameters?
chat {"tools": [{"type": "function", "function": {"name": "f", "metadata": {}}}]} -> tools.0.function.metadata is not a known field: leave it out
chat {"tools": [{"type": "function", "prefix": false, "function": {"name": "f"}}]} -> tools.0.prefix is not a known field: leave it out
chat {"stream": true, "stream_options": {"user": "a"}} -> stream_options.user is not a known field: leave it out
text {"temprature": 1} -> temprature is not a known field: did you mean temperature?
text {"maxTokens": 1} -> maxTokens is not a known field: did you mean max_tokens?
chat {"guided_regex": "a"} -> guided_regex is not a known field: did you mean structured_outputs.regex?
tokenize {"json_schema": {}} -> json_schema is not a known field: leave it out
text {"structured_outputs": "{}"} -> structured_outputs: Input should be a valid dictionary, ...
text {"structured_outputs": {}} -> structured_outputs must have one of json (an object, or JSON in a string), regex, choice (a list of strings), grammar; structural_tag and others are not supported
text {"structured_outputs": {"structural_tag": "{}"}} -> structured_outputs must have ...
text {"structured_outputs": {"json": {}, "regex": "a"}} -> structured_outputs must have ...
text {"structured_outputs": {"json": [1]}} -> structured_outputs must have ...
text {"structured_outputs": {"regex": {}}} -> structured_outputs must have ...
text {"structured_outputs": {"choice": []}} -> structured_outputs must have ...
text {"structured_outputs": {"choice": ["a", {}]}} -> structured_outputs must have ...
chat {"chat_template_kwargs": []} -> chat_template_kwargs: Input should be a valid dictionary, got []
chat {"chat_template_kwargs": {"chat_template": "x"}} -> chat_template_kwargs has a name that a caller may not set: leave it out, got 'chat_template'
chat {"chat_template": "x"} -> chat_template is not a known field: leave it out
text {"n": 129} -> n: Input should be less than or equal to 128, got 129
text {"logprobs": -1} -> logprobs: Input should be greater than or equal to 0, got -1
text {"logprobs": 21} -> logprobs: Input should be less than or equal to 20, got 21
text {"logprob_token_ids": [1]} -> logprob_token_ids is not a known field: leave it out
chat {"chat_template_kwargs": {"tools": []}} -> chat_template_kwargs has a name that ...
chat {"chat_template_kwargs": {"eos_token": "x"}} -> chat_template_kwargs has a name ...
tokenize {"prompt": null} -> prompt or messages must be sent, but not both
tokenize {"messages": [{"role": "user", "content": "x"}]} -> prompt or messages must be sent, but not both
detokenize {"tokens": [true]} -> tokens.0: Input should be a valid integer, got True
"""  # noqa: E501


@pytest.mark.parametrize("kind, fields, expected", rows(REFUSED))
def test_refusals_name_field_and_remedy(kind, fields, expected):
    for message in fields.get("messages", ()):
        message.setdefault("role", "user")
    error = refusal(kind, **fields)
    assert error.param == re.match(r"\w+", expected)[0]
    assert error.message.startswith(expected.removesuffix("..."))
    assert expected.endswith("...") or error.message == expected


def tool(name: str, **function) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


def calls(count: int) -> dict:
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "tool_calls": [call] * count}


SIZES = [  # kind, the largest size that passes, fields of that size; the last is at fault
    (CompletionRequest, 4096, lambda size: {"prompt": ["a"] * size}),
    (CompletionRequest, 64, lambda size: {"stop": ["a"] * size}),
    (CompletionRequest, 2**14, lambda size: {"stop": ["a" * (size - 4), "€", "b"]}),  # in bytes
    (CompletionRequest, 64, lambda size: {"stop_token_ids": [1] * size}),
    (CompletionRequest, 1024, lambda size: {"logit_bias": {str(i): 0 for i in range(size)}}),
    (CompletionRequest, 1000, lambda size: {"cache_salt": "a" * size}),
    (CompletionRequest, 128, lambda size: {"request_id": ("!~" * size)[:size]}),
    (ChatRequest, 4096, lambda size: {"messages": HELLO * size}),
    (ChatRequest, 4096, lambda size: {"messages": [*HELLO, calls(size - 9), calls(9)]}),
    (ChatRequest, 4096, lambda size: {"messages": [HELLO[0] | {"content": ["x"] * size}]}),
    (ChatRequest, 2**14, lambda size: {"chat_template_kwargs": {"a": "x" * (size - 9)}}),  # as JSON
    (ChatRequest, 128, lambda size: {"tools": [tool(f"f{i}") for i in range(size)]}),
    # a grammar, in bytes
    (
        CompletionRequest,
        2**16,
        lambda size: {"structured_outputs": {"regex": "é" + "a" * (size - 2)}},
    ),
]


@pytest.mark.parametrize("kind, most, make", SIZES)
def test_lists_and_texts_have_a_largest_size(kind, most, make):
    """
    Exactly this size passes; one more is refused, with a message that names the field and the
    limit.
    """
    parse(kind, **make(most))
    error = refusal(kind, **make(most + 1))
    assert error.param == [*make(0)][-1]
    assert str(most) in error.message


CONSTRAINED = [  # fields that the engine compiles
    (CompletionRequest, {"response_format": {"type": "json_object"}}),
    (ChatRequest, {"structured_outputs": {"json": {}}}),
    (CompletionRequest, {"structured_outputs": {"regex": "x"}}),
    (ChatRequest, {"tools": [tool("f")]}),
]


@pytest.mark.parametrize("kind, fields", CONSTRAINED)
def test_what_grammars_need(kind, fields, monkeypatch):
    """They need an end of text, and the library, which a plain request does not import."""
    body = parse(kind, **fields)
    (name,) = body.constraints
    assert name in fields
    body.check_fits([[1]], 5, 99, [4])
    error = refusal_of(body.check_fits, [[1]], 5, 99)
    assert error.param == name
    assert error.message.startswith(f"{name} cannot be combined with a model without an end")
    monkeypatch.setattr(protocol, "HAS_GRAMMARS", False)
    parse(kind, response_format={"type": "text"})
    error = refusal(kind, **fields)
    assert error.param == name
    assert error.message == (
        f"{name} is not supported here: run `pip install llguidance`, or leave it out"
    )


def test_the_first_problem_is_the_only_one():
    """
    Previously pydantic collected one problem for each of a million items, which blocked the server
    for nine seconds. Only the beginning of a long name is quoted.
    """
    many = {f"x{i}": 1 for i in range(10**5)}
    long = "x" * 3 * 10**7
    started = time.process_time()
    for fields in (many, {"stream_options": many}, {"stop": [1] * 10**6}, {"stop": {long: 1}}):
        assert refusal(**fields)
    assert refusal(**{long: 1}).message.startswith(f"{long[:200]} is not a known field")
    assert refusal(ChatRequest, messages=[{"role": "user", "content": [{"type": long}]}])
    assert time.process_time() - started < 1


LARGE = [  # bodies with very many items
    ('{"messages": [{"role": "user", "content": [%s]}]}', '"", ' * 10**6 + '""'),
    ('{"messages": [{"role": "user", %s}]}', ", ".join(f'"{i}": 1' for i in range(10**5))),
    ('{"chat_template_kwargs": {"a": [%s]}}', "1, " * 10**6 + "1"),
]


@pytest.mark.parametrize("form, items", LARGE, ids=["parts", "fields", "variables"])
def test_a_large_body_takes_little_more_time_than_its_json(form, items):
    """
    Previously a message with 1.4 million parts blocked the server for two seconds, and one with
    120,000 unknown fields for half a second. Reading the JSON of 4 MiB takes pydantic 0.07 s.
    """
    text = form % items
    read_json = TypeAdapter(dict[str, Any]).validate_json

    def seconds(call, *args) -> float:
        started = time.process_time()
        call(*args)
        return time.process_time() - started

    turns = [
        (seconds(refusal_of, ChatRequest.model_validate_json, text), seconds(read_json, text))
        for _ in range(5)
    ]
    ours, reading = map(min, zip(*turns, strict=True))
    assert ours < 1.75 * reading  # now 1.0 to 1.3 times as long, before 2.2 to 12 times


def check_json(kind, text: str):
    kind.model_validate_json(text).check_fits([[1]], vocab_size=5, max_model_len=9)


@BOTH
@pytest.mark.parametrize("number", ["9" * 4300, "-" + "9" * 4300, "9" * 5000, "1e999", "-1e999"])
def test_numbers_of_any_length_are_refused(kind, number):
    """Previously max_tokens of 4,300 nines, the longest number that JSON may have, caused a 500."""
    start = json.dumps(LEAST[kind])[:-1]
    # a template's variables may be anything
    for name in kind.model_fields.keys() - {"chat_template_kwargs"}:
        for value in (number, f"[{number}]", f'{{"1": {number}}}'):
            refusal_of(check_json, kind, f'{start}, "{name}": {value}}}')


# Several forms of one value. The model's defaults, which a request overrides, also with 0 and with
# vLLM's own default (null counts as not sent). And answers, which clients keep as their history and
# send back.
ACCEPTED = r"""
text {"prompt": "ab"} -> {"prompt": ["ab"]}
text {"context": {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}} -> {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
text {"context": {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}, "temperature": null, "top_k": null, "top_p": null, "min_p": null, "repetition_penalty": null} -> {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
text {"context": {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1} -> {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
chat {"context": {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}} -> {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
chat {"context": {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}, "temperature": null, "top_k": null, "top_p": null, "min_p": null, "repetition_penalty": null} -> {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
chat {"context": {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1} -> {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
tokenize {"context": {"temperature": 0.5}} -> {"prompt": "p"}
text {"stream": true, "echo": true, "ignore_eos": true, "return_token_ids": true, "skip_special_tokens": true, "add_special_tokens": true} -> {"stream": true, "echo": true, "ignore_eos": true, "return_token_ids": true, "skip_special_tokens": true, "add_special_tokens": true}
text {"stream": false, "echo": false, "ignore_eos": false, "return_token_ids": false, "skip_special_tokens": false, "add_special_tokens": false} -> {"stream": false, "echo": false, "ignore_eos": false, "return_token_ids": false, "skip_special_tokens": false, "add_special_tokens": false}
text {"prompt": ["ab", "c"]} -> {"prompt": ["ab", "c"]}
text {"prompt": [0, 2]} -> {"prompt": [[0, 2]]}
text {"prompt": [[1], [3]]} -> {"prompt": [[1], [3]]}
text {"stop": "ab"} -> {"stop": ["ab"]}
text {"response_format": {"type": "text"}} -> {"response_format": null}
text {"response_format": {"type": "json_object"}} -> {"response_format": {"kind": "json", "text": "{\"type\": \"object\"}"}}
text {"response_format": {"type": "json_object", "schema": null, "json_schema": null}} -> {"response_format": {"kind": "json", "text": "{\"type\": \"object\"}"}}
chat {"response_format": {"type": "json_object", "schema": {"enum": [1]}}} -> {"response_format": {"kind": "json", "text": "{\"enum\": [1]}"}}
chat {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "description": "y", "strict": true, "schema": {}}}} -> {"response_format": {"kind": "json", "text": "{}"}}
chat {"stream": true, "stream_options": {"include_obfuscation": false}} -> {"stream_options": {"include_usage": false, "continuous_usage_stats": false}}
chat {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": {"é": 1}}}} -> {"response_format": {"kind": "json", "text": "{\"é\": 1}"}}
text {"structured_outputs": {"json": {"a": 1}, "regex": null}} -> {"structured_outputs": {"kind": "json", "text": "{\"a\": 1}"}}
text {"structured_outputs": {"json": "{ }"}} -> {"structured_outputs": {"kind": "json", "text": "{}"}}
text {"structured_outputs": {"json": "{\"const\": \"\\ud800\"}"}} -> {"structured_outputs": {"kind": "json", "text": "{\"const\": \"\\ud800\"}"}}
text {"structured_outputs": {"json": "{\"const\": 1e999}"}} -> {"structured_outputs": {"kind": "json", "text": "{\"const\": 1e999}"}}
text {"structured_outputs": {"json": "{"}} -> {"structured_outputs": {"kind": "json", "text": "{"}}
text {"structured_outputs": {"json": {"properties": {"a": {"type": "array", "uniqueItems": false}, "propertyNames": {"type": "string"}}}}} -> {"structured_outputs": {"kind": "json", "text": "{\"properties\": {\"a\": {\"type\": \"array\"}, \"propertyNames\": {\"type\": \"string\"}}}"}}
text {"structured_outputs": {"json": "{\"type\": \"object\", \"propertyNames\": {\"type\": \"string\"}, \"uniqueItems\": true}"}} -> {"structured_outputs": {"kind": "json", "text": "{\"type\": \"object\", \"uniqueItems\": true}"}}
text {"structured_outputs": {"json": {"const": {"not": false, "n": 1}, "anyOf": [{"enum": [{"not": false, "n": 1}], "not": false}]}}} -> {"structured_outputs": {"kind": "json", "text": "{\"const\": {\"not\": false, \"n\": 1}, \"anyOf\": [{\"enum\": [{\"not\": false, \"n\": 1}]}]}"}}
chat {"structured_outputs": {"regex": "a+"}} -> {"structured_outputs": {"kind": "regex", "text": "a+"}}
text {"structured_outputs": {"choice": ["a", "b"]}} -> {"structured_outputs": {"kind": "choice", "text": "[\"a\", \"b\"]"}}
text {"structured_outputs": {"grammar": "start: /a/"}} -> {"structured_outputs": {"kind": "grammar", "text": "start: /a/"}}
chat {"logprobs": false, "top_logprobs": 0} -> {"top_logprobs": 0}
chat {"tools": [], "tool_choice": "none", "parallel_tool_calls": false} -> {"tools": []}
chat {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"} -> {"tools": []}
chat {"tools": [{"type": "function", "function": {"name": "f-_9", "strict": true}}]} -> {"tool_choice": "auto", "tools": [{"type": "function", "function": {"name": "f-_9", "strict": true, "description": null, "parameters": {"type": "object", "properties": {}}}}]}
tokenize {"prompt": ""} -> {"prompt": ""}
tokenize {"prompt": null, "messages": [{"role": "user", "content": "x"}]} -> {"messages": [{"role": "user", "content": "x", "reasoning": null, "reasoning_content": null, "name": null, "tool_calls": null, "tool_call_id": null}]}
detokenize {"tokens": [0, 2147483647]} -> {"tokens": [0, 2147483647]}
chat {"messages": [{"role": "system", "content": "x", "tool_calls": []}]} -> {"messages": [{"role": "system", "content": "x", "reasoning": null, "reasoning_content": null, "name": null, "tool_calls": [], "tool_call_id": null}]}
chat {"messages": [{"role": "developer", "content": "x", "prefix": false}]} -> {"messages": [{"role": "developer", "content": "x", "reasoning": null, "reasoning_content": null, "name": null, "tool_calls": null, "tool_call_id": null}]}
chat {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "annotations": []}, {"type": "text", "text": "y"}]}]} -> {"messages": [{"role": "user", "content": "xy", "reasoning": null, "reasoning_content": null, "name": null, "tool_calls": null, "tool_call_id": null}]}
chat {"messages": [{"role": "assistant", "content": "x", "name": "bot", "id": "m1", "refusal": null, "annotations": [], "audio": null, "reasoning_content": "hm", "timestamp": 1.5, "metadata": {"a": 1}}]} -> {"messages": [{"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": "hm", "name": "bot", "tool_calls": null, "tool_call_id": null}]}
"""  # noqa: E501


@pytest.mark.parametrize("kind, fields, expected", rows(ACCEPTED))
def test_forms_that_are_accepted(kind, fields, expected):
    values = parse(kind, **fields).model_dump()
    assert values == values | json.loads(expected)


# What servers answer and what client libraries turn it into, sent back as messages -> their text
# and the arguments of their calls. CALL is a call without the last fields of its function.
HISTORY = r"""
{"role": "assistant", "content": null} -> ["", []]
{"role": "assistant", "content": null, "reasoning_content": "hm", "reasoning": "hm"} -> ["", []]
{"role": "assistant", "reasoning_content": "hm"} -> ["", []]
{"role": "assistant", "content": null, "refusal": "no", "parsed": null, "tool_calls": null} -> ["", []]
{"role": "assistant", "content": "{}", "parsed": {"a": 1}, "refusal": null, "annotations": [], "function_call": null} -> ["{}", []]
{"role": "assistant", "content": [{"type": "text", "text": "a", "annotations": [{}]}, {"type": "refusal", "refusal": "b"}]} -> ["ab", []]
{"role": "assistant", "content": [], "index": 0, "finish_reason": "stop"} -> ["", []]
{"role": "tool", "tool_call_id": "a", "content": null} -> ["", []]
{"role": "assistant", "content": null, "tool_calls": [CALL "arguments": "{\"a\": 1}", "parsed_arguments": {"a": 1}}}]} -> ["", [{"a": 1}]]
{"role": "assistant", "tool_calls": [CALL "arguments": "{}", "parsed_arguments": null, "strict": true, "description": "x", "user": 1}}]} -> ["", [{}]]
{"role": "assistant", "content": "x", "tool_calls": [CALL "arguments": ""}}, CALL "arguments": null}}, CALL "arguments": {"a": [1]}}}]} -> ["x", [{}, {}, {"a": [1]}]]
{"role": "assistant", "content": "x", "tool_calls": [CALL "arguments": "  \n{\"a\": null}"}}, CALL "arguments": "null"}}]} -> ["x", [{"a": null}, {}]]
{"role": "assistant", "tool_calls": [CALL "arguments": "{"}}, CALL "arguments": "{\"a\""}}, CALL "arguments": "{\"a\": "}}, CALL "arguments": "{\"a\": [1, 2"}}]} -> ["", [{}, {}, {}, {"a": [1, 2]}]]
{"role": "assistant", "tool_calls": [CALL "arguments": "{\"a\": \"Par"}}, CALL "arguments": "{\"a\": 1, \"b\": \"\\u00"}}, CALL "arguments": "{\"a\": {\"b\": tru"}}]} -> ["", [{"a": "Par"}, {"a": 1, "b": ""}, {"a": {}}]]
{"role": "assistant", "content": ["a", {"type": "text", "text": "b"}, "c"]} -> ["abc", []]
"""  # noqa: E501


@pytest.mark.parametrize("row", HISTORY.strip().splitlines())
def test_answers_come_back_as_history(row):
    """
    This is tested at each depth. Previously openai-python's parse() and stream() could not continue
    after a call, and no client after a call cut by max_tokens.
    """
    call = '{"id": "a", "index": 0, "type": "function", "prefix": 1, "function": {"name": "f",'
    sent, expected = row.replace("CALL", call).split(" -> ")
    (message,) = parse(ChatRequest, messages=[json.loads(sent)]).messages
    arguments = [call.function.arguments for call in message.tool_calls or ()]
    assert [message.content, arguments] == json.loads(expected)


# --------------------------------------------------------------------------------------------------
# The parameters that are sent to the engine

SENT = """{
    "temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "top_k": 7, "seed": -11, "min_tokens": 3,
    "presence_penalty": 0.75, "frequency_penalty": -0.75, "repetition_penalty": 1.5,
    "ignore_eos": true, "logit_bias": {"2": -1.5}, "stop_token_ids": [9], "max_tokens": 12
}"""


@BOTH
def test_each_field_reaches_the_sampler_under_its_name(kind):
    """Each field has a distinct value, so that none can stand in for another."""
    sent = json.loads(SENT)
    fields = {"logprobs": 6} if kind is CompletionRequest else {"logprobs": True, "top_logprobs": 6}
    params = parse(kind, **sent, **fields).sampling_params(0, 99)
    assert params == sent | {"logit_bias": {2: -1.5}, "logprobs": 6}
    names = {field.name for field in fields_of(SamplingParams)}
    assert params.keys() == names - {"grammar"}  # compiled by the engine's process
    SamplingParams(**params)
    plain = parse(kind, top_k=-1).sampling_params(0, 16)
    assert SamplingParams(**plain) == SamplingParams(max_tokens=16, stop_token_ids=[])


# For a prompt of 5 tokens: the model's context, the length sent to the engine, candidates per
# prompt token (null: the prompt is not scored), log-probabilities in the answer. Each token has 1 +
# candidates, and each choice repeats those of its prompt. Scores for an echo take a step, so a
# token. Previously, in Llama's context of 131,072 tokens, every chat with top_logprobs was refused.
# The model's own length is a default for chats, not a limit for requests; like vLLM, completions
# prefer OpenAI's default of 16.
ASKED = """
text {} -> [100, 16, null, 0]
text {"max_tokens": 5} -> [100, 5, null, 0]
text {"max_tokens": 0, "echo": true} -> [100, 1, null, 0]
text {"logprobs": 0, "max_tokens": 7} -> [100, 7, null, 7]
text {"logprobs": 2, "max_tokens": 7, "n": 3} -> [100, 7, null, 63]
text {"logprobs": 0, "max_tokens": 0, "echo": true} -> [100, 1, 0, 5]
text {"logprobs": 1, "max_tokens": 7, "n": 2, "echo": true} -> [100, 7, 1, 48]
chat {} -> [100, 95, null, 0]
chat {"max_tokens": 3, "max_completion_tokens": 5} -> [100, 5, null, 0]
chat {"max_tokens": 9, "max_completion_tokens": 5} -> [100, 5, null, 0]
chat {"max_tokens": 3, "max_completion_tokens": null} -> [100, 3, null, 0]
chat {"logprobs": true, "top_logprobs": 2} -> [100, 95, null, 285]
chat {"context": {"max_tokens": 30}} -> [100, 30, null, 0]
chat {"context": {"max_tokens": 30}} -> [20, 15, null, 0]
chat {"context": {"max_tokens": 30}, "max_tokens": null} -> [100, 30, null, 0]
chat {"context": {"max_tokens": 30}, "max_tokens": 50} -> [100, 50, null, 0]
chat {"context": {"max_tokens": 30}, "max_tokens": 3} -> [100, 3, null, 0]
chat {"context": {"max_tokens": 30}, "max_completion_tokens": 50} -> [100, 50, null, 0]
chat {"context": {"max_tokens": 30}, "min_tokens": 40} -> [100, 40, null, 0]
text {"context": {"max_tokens": 30}} -> [100, 16, null, 0]
chat {} -> [131072, 131067, null, 0]
chat {"logprobs": true, "n": 2} -> [131072, 131067, null, 262134]
chat {"logprobs": true, "n": 4} -> [131072, 65536, null, 262144]
chat {"logprobs": true, "top_logprobs": 20} -> [131072, 12483, null, 262143]
chat {"logprobs": true, "top_logprobs": 20, "max_tokens": 12000} -> [131072, 12000, null, 252000]
"""


@pytest.mark.parametrize("kind, fields, expected", rows(ASKED))
def test_what_is_asked_of_the_engine(kind, fields, expected):
    limit, *expected = json.loads(expected)
    body = parse(kind, **fields)
    body.check_fits([[1] * 5], 10, limit)
    length = body.sampling_params(5, limit)["max_tokens"]
    assert [length, body.num_prompt_logprobs, body.num_scores(5, limit)] == expected


# The vocabulary is 5, and its end of text is 4. `limit` is the context, `prompt` has tokens. Some
# of these used to be internal errors: all tokens forbidden; and 183 MB of JSON, which took 21 s,
# during which /livez was silent.
LIMITS = """
text {"max_tokens": 6, "limit": 10, "prompt": [[1], [1, 1, 1, 1], [1]]} -> null
text {"max_tokens": 6, "limit": 10, "prompt": [[1], [1, 1, 1, 1, 1], [1]]} -> this model's maximum context length is 10 tokens, 5 prompt tokens and max_tokens 6 make 11: shorten the prompt or lower max_tokens
text {"max_tokens": 0, "echo": true, "limit": 10, "prompt": [[1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1]]} -> null
text {"max_tokens": 0, "echo": true, "limit": 10, "prompt": [[1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1]]} -> this model's maximum context length is 10 tokens, 11 prompt tokens and max_tokens 0 make 11: shorten the prompt or lower max_tokens
text {"max_tokens": 0, "echo": true, "logprobs": 0, "limit": 10, "prompt": [[1], [1, 1, 1, 1, 1, 1, 1, 1, 1], [1]]} -> null
text {"max_tokens": 0, "echo": true, "logprobs": 0, "limit": 10, "prompt": [[1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1]]} -> this model's maximum context length is 10 tokens, 10 prompt tokens and max_tokens 1 make 11: shorten the prompt or lower max_tokens
chat {"max_tokens": null, "limit": 10, "prompt": [[1], [1, 1, 1, 1, 1, 1, 1, 1, 1], [1]]} -> null
chat {"max_tokens": null, "limit": 10, "prompt": [[1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1]]} -> this model's maximum context length is 10 tokens, 10 prompt tokens and max_tokens 1 make 11: shorten the prompt or lower max_tokens
chat {"max_tokens": null, "min_tokens": 6, "limit": 10, "prompt": [[1], [1, 1, 1, 1], [1]]} -> null
chat {"max_tokens": null, "min_tokens": 6, "limit": 10, "prompt": [[1], [1, 1, 1, 1, 1], [1]]} -> this model's maximum context length is 10 tokens, 5 prompt tokens and max_tokens 6 make 11: shorten the prompt or lower max_tokens
text {"max_tokens": 1, "limit": 2, "prompt": [[5, 5]]} -> this model's maximum context length is 2 tokens, 2 prompt
text {"prompt": [[1], [4, 0]]} -> null
text {"prompt": [[1], [1, 5, 1]]} -> token id 5 is outside the vocabulary, 0..4
text {"prompt": [[1], [1, -1, 1]]} -> token id -1 is outside the vocabulary, 0..4
text {"stop_token_ids": [0, 4]} -> null
text {"stop_token_ids": [1, 1073741824]} -> token id 1073741824 is outside the vocabulary, 0..4
text {"stop_token_ids": [1, -1]} -> token id -1 is outside the vocabulary, 0..4
text {"logit_bias": {"0": 1, "4": 1}} -> null
text {"logit_bias": {"1": 1, "5": 1}} -> token id 5 is outside the vocabulary, 0..4
text {"min_tokens": 1, "stop_token_ids": [0, 1, 2]} -> null
text {"stop_token_ids": [0, 1, 2, 3]} -> null
text {"min_tokens": 1, "stop_token_ids": [0, 1, 2, 3]} -> min_tokens is above 0, but all tokens are stop tokens
text {"n": 64, "max_tokens": 195, "logprobs": 20} -> null
text {"logprobs": 20, "n": 128, "max_tokens": 250} -> 672000 log-probabilities in one answer, but the limit is 262144: lower
text {"n": 128, "logprobs": 15, "echo": true, "max_tokens": 0, "prompt": [[1], [1]]} -> null
text {"prompt": [[1], [1]], "n": 128, "logprobs": 20, "echo": true, "max_tokens": 48} -> 263424 log-probabilities in one answer, but the limit is 262144: lower
chat {"logprobs": true, "top_logprobs": 20, "max_tokens": 12484} -> 262164 log-probabilities in one answer, but the limit is 262144: lower
text {"response_format": {"type": "json_object"}} -> null
text {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}} -> response_format cannot be combined with structured_outputs: leave one of them out
chat {"structured_outputs": {"regex": "a"}, "tools": [{"type": "function", "function": {"name": "f"}}]} -> structured_outputs cannot be combined with tools: leave one of them out
chat {"structured_outputs": {"regex": "a"}, "tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]} -> null
chat {"tools": [{"type": "function", "function": {"name": "f"}}], "ignore_eos": true} -> tools cannot be combined with ignore_eos: leave one of them out
text {"structured_outputs": {"choice": ["a"]}, "echo": true, "max_tokens": 0} -> structured_outputs cannot be combined with max_tokens 0: leave one of them out
chat {"logprobs": true, "top_logprobs": 20, "min_tokens": 12484} -> 262164 log-probabilities in one answer, but the limit is 262144: lower
"""  # noqa: E501


@pytest.mark.parametrize("kind, fields, expected", rows(LIMITS))
def test_what_the_model_and_an_answer_can_hold(kind, fields, expected):
    """A refusal names the field with which the row begins."""
    first = next(iter(fields))
    limits = fields.pop("prompt", [[1]]), 5, fields.pop("limit", 131_072), [4]
    body = parse(kind, **fields)
    if expected == "null":
        return body.check_fits(*limits)
    error = refusal_of(body.check_fits, *limits)
    assert error.message.startswith(expected)
    assert error.param == first
    # litellm recognises an error of length by its message, others by the code
    is_long = error.message.startswith("this model's maximum context length is ")
    assert error.code == ("context_length_exceeded" if is_long else None)


# --------------------------------------------------------------------------------------------------
# Errors


KINDS_OF_ERRORS = [(400, "invalid_request_error"), (429, "rate_limit_error")]
KINDS_OF_ERRORS += [(500, "server_error"), (503, "server_error")]


@pytest.mark.parametrize("status, kind", KINDS_OF_ERRORS)
def test_the_shape_of_errors(status, kind):
    """Client libraries choose exceptions by status and type, and some retry."""
    error = {"message": "no", "type": kind, "param": "n", "code": "why"}
    assert json.loads(error_body(ApiError(status, "no", "n", "why"))) == {"error": error}
