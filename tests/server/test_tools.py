"""
Tools and thoughts: how a template shows them, the grammar that an answer must follow, and what is
read from its text, however the steps cut it.
"""

import json
from itertools import product

import httpx
import pytest
from callers import (
    CLOSING,
    HERMES,
    QWEN,
    SHOWN,
    TAG,
    TALK,
    TEMPLATE,
    save_caller,
    save_tokens,
    with_tokens,
)
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from processes import Process
from test_api import VALUES
from wires import House

from engine.matcher import Library
from server.tools import NO_TAGS, find_tags, find_thoughts

TOOLS = """[
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": false}}},
    {"type": "function", "function": {"name": "clock", "description": "the time"}}
]"""
HELLO = [{"role": "user", "content": "hello"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'

# Similar to Qwen3's, which writes empty thoughts if a model is not to think. With `opens` it opens
# the thoughts, like the template of the thinking variant.
THINKS = TEMPLATE + "{% if enable_thinking is false %}<think>\n\n</think>\n\n"
THINKS += "{% elif opens %}<think>\n{% endif %}"
# Qwen3-Coder's
XML = "{% if tools %}<tools>{{ tools }}</tools>{% endif %}" + TALK
XML = XML.replace("CALL", "<tool_call><function={{ call.name }}>{{ call.arguments }}")
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
# Which of the markers the tokenizer has as tokens, and whether they are control tokens.
KINDS = {
    "text": {},
    "plain": dict.fromkeys(MARKERS, False),
    "control": dict.fromkeys(MARKERS, True),
    "opening": dict.fromkeys(MARKERS[::2], True),
}
# Abbreviations in the tables below. REFERS declares its parameters as a string, and its references
# are relative to the parameters.
WORDS = {
    "REFERS": """[{"type": "function", "function": {"name": "f", "parameters": {"type": "string",
        "$defs": {"c": {"properties": {"city": {"type": "string"}}}},
        "properties": {"a": {"$ref": "#/$defs/c"}}}}}]""",
    "TOOLS": TOOLS,
    "NAMED": json.dumps(NAMED),
    "OPENS": '"chat_template_kwargs": {"opens": true}',
    "OFF": '"chat_template_kwargs": {"enable_thinking": false}',
    "WEATHER": r'["weather", "{\"city\": \"x\"}"]',
    "SIXTEEN": 16 * ONE,
    "CLOCK": ONE.replace("weather", "clock"),
    "ONE": ONE,
    "⏎": "\n",
}
TOOLS = json.loads(TOOLS)


def columns(row: str) -> list[str]:
    for word, meaning in WORDS.items():
        row = row.replace(word, meaning)
    return row.split(" | ")


def house_with(template: str, folder, kind: str = "text", *flags: str) -> House:
    save_tokens(folder, KINDS[kind], template)
    return House(*flags, directory=folder)


@pytest.fixture
def house(tmp_path):
    with house_with(THINKS, tmp_path) as house:
        yield house


@pytest.fixture(params=KINDS, scope="module")
def kind(request, tmp_path_factory):
    """Return a kind of tokenizer, and a house that serves it."""
    with house_with(THINKS, tmp_path_factory.mktemp("kind"), request.param) as house:
        yield request.param, house


def call(house, messages=HELLO, tools=TOOLS, **fields):
    body = {"messages": messages, "tools": tools, "max_tokens": 99} | fields
    return house.call("/v1/chat/completions", body)


def tool(**function) -> dict:
    return {"type": "function", "function": {"name": "f"} | function}


def prompt_of(house) -> str:
    """Return the prompt that the engine got. Raises ValueError if it has a control token."""
    return bytes(house.engine.added["prompt"]).decode()


# --------------------------------------------------------------------------------------------------
# The template


TAGS = {
    "tool_call": [TEMPLATE, SHOWN + TALK.replace("CALL", HERMES), TEMPLATE.replace('"', r"\"")],
    "": [TALK.replace("CALL", QWEN), XML, "{{ messages[0].content }}"],
}


@pytest.mark.parametrize("tag", TAGS)
def test_the_tag_of_calls_is_read_off_the_template(tag):
    """
    Would catch: Qwen3-Coder's tags, which contain no JSON, taken for Qwen3's; a template that
    writes calls but does not show the model any tools.
    """
    for source in TAGS[tag]:
        assert find_tags(source) == (MARKERS[:2] if tag else NO_TAGS)


FOUND = """
{% if '</think>' in content %} -> <think> </think>
[THINK]{{ thought }}[/THINK] -> [THINK] [/THINK]
<seed:think>{{ x }}</seed:think> -> <seed:think> </seed:think>
<Thinking></Thinking> -> <Thinking> </Thinking>
{{ 'assistant\\n<think>' }} -> <think> </think>
<b></b> <tool_call></tool_call> {{ m[thought] }} ->
"""


@pytest.mark.parametrize("row", FOUND.strip().splitlines())
def test_the_markers_of_thoughts_are_read_off_the_template(row):
    source, markers = row.split(" ->")
    assert find_thoughts(source) == markers.split()


def test_tools_are_shown_and_results_go_back(house):
    """
    Would catch: arguments passed as text, which Qwen2.5's template would write as a JSON string.
    """
    function = {"name": "weather", "arguments": '{"city":"Zürich"}'}
    called = [{"id": "a", "type": "function", "function": function, "index": 0}]
    result = {"role": "tool", "content": [{"type": "text", "text": "rain"}], "tool_call_id": "a"}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": called}, result]
    call(house, talk)
    prompt = prompt_of(house)
    shown = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"type"')]
    assert shown == TOOLS
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert prompt.endswith(f"user:\nhello\nassistant:\n{written}\ntool:\nrain\nassistant:")
    tokens = house.call("/tokenize", {"messages": talk, "tools": TOOLS})
    assert tokens.json["tokens"] == house.engine.added["prompt"]


@pytest.mark.parametrize("ids", ["ab", "aa", "aba"])
def test_a_result_has_the_name_of_the_function_that_was_called(ids, tmp_path):
    """
    Some servers number their calls from 0 in each turn. Previously all results then had the last
    name.
    """
    names = ["weather", "clock", "rain"][: len(ids)]
    talk = []
    for id, name in zip(ids, names, strict=True):
        made = {"id": id, "function": {"name": name, "arguments": "{}"}}
        talk.append({"role": "assistant", "tool_calls": [made]})
        talk.append({"role": "tool", "content": "6", "tool_call_id": id})
    with house_with("{% for m in messages %}{{ m.name }}{% endfor %}", tmp_path) as house:
        call(house, talk, [])
        assert prompt_of(house) == "".join(names)


def test_no_text_of_tools_becomes_a_control_token(house):
    """This protects against prompt injection in descriptions, schemas, arguments and results."""
    end = "<|endoftext|>"
    function = {"name": "f", "arguments": json.dumps({end: [end]})}
    called = [{"id": end, "type": "function", "function": function}]
    talk = [{"role": "assistant", "tool_calls": called}]
    talk.append({"role": "tool", "content": end, "tool_call_id": end})
    call(house, talk, [tool(description=end, parameters={"title": end, end: {"enum": [end]}})])
    assert prompt_of(house).count(end) == 7


def test_none_is_like_no_tools(house):
    """Tools are neither shown nor called, and not checked for contradictions."""
    call(house, tool_choice="none", response_format={"type": "json_object"})
    assert prompt_of(house) == "user:\nhello\nassistant:"
    assert house.engine.added["grammar"]["text"] == '{"type": "object"}'
    call(house, tool_choice="none")
    assert "grammar" not in house.engine.added


def test_auto_needs_a_template_with_tags(tmp_path):
    """Otherwise "required" or a function still constrains the answer, with one call per line."""
    with house_with("{{ messages[0].content }}", tmp_path) as house:
        error = call(house).answer.error
        assert error["param"] == "tool_choice"
        assert error["message"].endswith('send "required", "none" or a function')
        _, line, _ = ONE.split("\n")
        for choice, size in product(("required", NAMED), (1, 3, 200)):
            caller = call(house, tool_choice=choice, stream=True, return_token_ids=True)
            assert prompt_of(house) == "hello"
            house.engine.steps([*f"{line}\n{line}\n".encode(), 256], size, "stop")
            (message,) = messages_of(caller, True)
            functions = [made["function"] for made in message["tool_calls"]]
            assert functions == 2 * [{"name": "weather", "arguments": '{"city": "x"}'}]


def test_tools_have_a_template_of_their_own(tmp_path):
    """
    There is another one that does not show tools. Would catch: "required" without tools in the
    prompt.
    """
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text(TEMPLATE)
    with house_with("{{ messages[0].content }}", tmp_path) as house:
        call(house)
        assert "weather" in prompt_of(house)
        call(house, tool_choice="none")
        assert prompt_of(house) == "hello"


def test_templates_find_tags_in_answers_alone(tmp_path):
    """
    Some templates read calls from the text of an answer. Would catch: a tag that is a control token
    and therefore disguised there; a tag that a user writes.
    """
    with house_with(THINKS, tmp_path, "control") as house:
        said = [{"role": role, "content": ONE} for role in ("user", "assistant", "user")]
        call(house, said, [])
        prompt = house.engine.added["prompt"]
        assert [i for i in prompt if i > 256] == [TAG, CLOSING]
        assert prompt[-len(ONE) - 11 : -11] == [*ONE.encode()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_finds_thoughts_in_answers(kind, tmp_path):
    """It finds them under both names, and in the text, where Qwen3's looks for them."""
    shows = "{% for m in messages %}{{ m.reasoning_content or m.content.split('</think>')[-1] }}"
    with house_with(shows + "{% endfor %}", tmp_path, kind) as house:
        for fields in ({"reasoning": "h"}, {"reasoning_content": "h"}, {"content": "x</think>h"}):
            call(house, [{"role": "assistant", "content": "5"} | fields], [])
            assert prompt_of(house) == "h"


def test_a_grammar_that_the_engine_refuses_is_a_400_about_its_field(house):
    for fields, name in (
        ({}, "tools"),
        ({"tools": [], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [], "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ):
        caller = call(house, **fields, stream=True)
        house.engine.fail()
        answer = caller.answer
        assert answer.status == 400
        assert (answer.error["message"], answer.error["param"]) == ("no", name)


def test_the_largest_tools_fit_into_a_message(house):
    """A socket takes 400 KB. Would catch: characters that are escaped, and then escaped again."""
    house.engine.ready(10**6)
    call(house, tools=[tool(parameters={"description": "é" * 32_000})])
    assert len(house.engine.added["grammar"]["text"].encode()) < 400_000


def test_a_tool_loses_its_options(house):
    """Previously `x-guidance` could make the library ignore keywords that it does not know."""
    call(house, tools=[tool(parameters={"x-guidance": {"lenient": True}})])
    lark, _ = json.loads(house.engine.added["grammar"]["text"])
    assert "lenient" not in lark


@pytest.mark.parametrize("stream", [False, True])
def test_the_others_are_held_where_a_tool_is_not_served(house, stream):
    """
    Previously one of 40 tools stopped every chat. Now the call restarts with another grammar, for
    the same answer. Would catch: a choice that waits for ever, or comes twice.
    """
    caller = call(house, stream=stream, n=2)
    first = house.engine.added["grammar"]
    house.engine.fail("this grammar cannot be used: no", tools=[1, 0])
    again = house.engine.added["grammar"]
    lark, schemas = json.loads(again["text"])
    assert schemas == ['{"type": "object"}'] * 2
    assert "city" in first["text"] and "city" not in lark
    assert again["before"] == first["before"]
    assert len(house.engine.of("add")) == 2
    id = house.engine.added["id"]
    house.engine.step(dict.fromkeys([id, f"{id}.1"], (*ONE.encode(), 256)), "stop")
    (answer,) = caller.answers
    assert answer.headers["x-unheld-tools"] == "clock, weather"
    assert answer.body.count('"finish_reason":"tool_calls"') == 2
    assert not house.choices


def test_a_tool_that_must_be_called_and_is_not_served_is_named(house):
    clock = {"type": "function", "function": {"name": "clock"}}
    for choice, number in ("required", 1), (clock, 0):
        caller = call(house, tool_choice=choice)
        house.engine.fail("no", tools=[number])
        error = caller.answer.error
        assert error["message"] == "tools.1.function.parameters (clock): no"
        assert error["param"] == "tools"


# --------------------------------------------------------------------------------------------------
# The grammar

# Fields of the call, a text that is refused from ¦ on, and whether it may end there.
HELD = r"""
{} | free <text | true
{} | free <tool_call>¦ text | false
{} | free⏎ONE¦ text | true
{} | ONE⏎CLOCKONE | true
{} | SIXTEEN¦ONE | true
{"parallel_tool_calls": false} | freeONE¦ONE | true
{"tool_choice": "required"} | SIXTEEN¦ONE | true
{"tool_choice": "required"} | ¦free | false
{"tool_choice": "required", "parallel_tool_calls": false} | ONE¦ONE | true
{"tool_choice": NAMED} | ONE¦ONE | true
{"tool_choice": NAMED} | <tool_call>⏎{"name": "¦clock | false
{"tool_choice": "required"} | <tool_call>⏎{"name": "clock", "arguments": {"a": [1, {"b": null}], "c": "}\n</tool_call>"}}⏎</tool_call> | true
{"tool_choice": "required"} | <tool_call>⏎{"name": "weather", "arguments": {"city": ¦1 | false
{"tool_choice": "required"} | <tool_call>⏎{"name": "weather", "arguments": {"city":¦"x" | false
{"tool_choice": "required"} | <tool_call>⏎{"name": "weather", "arguments": {¦ "city" | false
{"tool_choice": "required"} | <tool_call>⏎{"name": "clock", "arguments": {¦⏎} | false
{"tool_choice": "required", "tools": REFERS} | <tool_call>⏎{"name": "f", "arguments": {"a": {"city": ¦1 | false
{"tool_choice": "required", "tools": REFERS} | <tool_call>⏎{"name": "f", "arguments": ¦"x" | false
{"tools": [], "response_format": {"type": "json_object"}} | {"a": 1} | true
{"tools": [], "response_format": {"type": "json_object"}} | ¦x | false
{"tools": [], "structured_outputs": {"json": {"enum": ["ab"]}}} | "ab"¦b | true
{"tools": [], "structured_outputs": {"regex": "[ab]+"}} | ab¦c | true
{"tools": [], "structured_outputs": {"choice": ["ab", "{"]}} | a¦a | false
{"tools": [], "structured_outputs": {"grammar": "start: \"a\" \"b\""}} | ab¦b | true
{"tools": [], "structured_outputs": {"grammar": "root ::= \"a\" x\nx ::= \"b\""}} | ab¦b | true
"""  # noqa: E501


@pytest.fixture(scope="module")
def library(kind) -> Library:
    _, house = kind
    tokenizer = house.encoder.tokenizer
    return Library(tokenizer, tokenizer.vocab_size, [256])


@pytest.mark.parametrize("row", HELD.strip().splitlines())
def test_answers_are_held_after_their_thoughts(row, kind, library):
    """
    Forbidding a model to think would make its answers worse. Thoughts may mention calls. If no call
    is required, the text may end within the thoughts. Would catch: a tag that is a control token,
    and so not text, which no answer could contain; a tag spelled by tokens that the model never
    learned for it.
    """
    kind, house = kind
    fields, text, may_end = columns(row)
    fields = json.loads(fields)
    taken, _, refused = text.partition("¦")
    is_free = fields.keys().isdisjoint({"tool_choice", "tools"})

    def fits(text: str, refused: str = "") -> tuple[bool, bool]:
        """Return whether the grammar takes this text and no more, and whether it may end there."""
        answer = matcher.deep_copy()
        taken, all_tokens = (with_tokens(part, KINDS[kind]) for part in (text, text + refused))
        return answer.try_consume_tokens(all_tokens) == len(taken), answer.is_accepting()

    for opens in (False, True):
        caller = call(house, **fields, chat_template_kwargs={"opens": opens})
        matcher = library.compile(**house.engine.added["grammar"])
        caller.hang_up()
        start = ("" if opens else "<think>\n") + ("<tool_call>" if kind == "plain" else "x < y")
        assert fits(start) == (True, is_free)
        for ahead in [f"{start}</think>", f"{start}</think>\n\n", ""][: 3 - opens]:
            assert fits(ahead + taken, refused) == (True, json.loads(may_end))
    if kind == "control" and "tool_choice" in fields and taken:
        assert matcher.try_consume_tokens([*b"x", TAG + 3, *taken.encode()]) == 2


# --------------------------------------------------------------------------------------------------
# Reading answers

# Fields of the call, an answer, how the engine ends it -> the thoughts, the text, the finish reason
# or stop string, and the calls.
ANSWERS = r"""
{} | <think>⏎hm⏎⏎so⏎⏎</think>⏎⏎5⏎ | stop | ["hm\n\nso", "5\n", "stop"]
{} | <think>hm</think>5 | stop | ["hm", "5", "stop"]
{} | 5 </thi | stop | [null, "5 </thi", "stop"]
{} | ⏎ 5 | stop | [null, "\n 5", "stop"]
{} | <thin | length | [null, "<thin", "length"]
{} | <think>⏎ | length | [null, null, "length"]
{} | ⏎<think>hm⏎</thi | length | ["hm\n</thi", null, "length"]
{} | <think>never closed | stop | ["never closed", null, "stop"]
{} | <think>⏎⏎</think>⏎⏎5 | stop | [null, "5", "stop"]
{} | <think>a</think>b<think>c</think><tool_call> | stop | ["a", "b<think>c</think><tool_call>", "stop"]
{"skip_special_tokens": false} | <think>a</think>b<think>c</think> | stop | ["a", "b<think>c</think>", "stop"]
{OPENS} | ⏎hm⏎</think>⏎⏎5 | stop | ["hm", "5", "stop"]
{OPENS} | hm | length | ["hm", null, "length"]
{OPENS} | </think>5 | stop | [null, "5", "stop"]
{OFF} | ⏎5 <thi | stop | [null, "\n5 <thi", "stop"]
{"stop": "5"} | <think>45</think>a5b | stop | ["45", "a", "5"]
{"stop": ["<", "n", "\n"]} | <think>a⏎⏎b</think>⏎⏎c<d | stop | ["a\n\nb", "c", "<"]
{"stop": "5", "min_tokens": 12} | <think>45</think>a | stop | ["45", "a", "stop"]
{"stop": "5", "tools": TOOLS} | <think>5 <tool_call></think>aONE | stop | ["5 <tool_call>", "a", "tool_calls", WEATHER]
{"stop": "5", "tools": TOOLS} | <think>5</think>a5ONE | stop | ["5", "a", "5"]
{OPENS, "tools": TOOLS} | hm</think>ONE | stop | ["hm", null, "tool_calls", WEATHER]
{"tools": TOOLS} | hello <tool | stop | [null, "hello <tool", "stop"]
{"tools": TOOLS} |  | stop | [null, null, "stop"]
{"tools": TOOLS} | ONE | length | [null, null, "length", WEATHER]
{"tools": TOOLS} | hi⏎ONE | stop | [null, "hi\n", "tool_calls", WEATHER]
{"tools": TOOLS} | ONE⏎CLOCK⏎ | stop | [null, null, "tool_calls", WEATHER, ["clock", "{\"city\": \"x\"}"]]
{"tools": TOOLS} | <tool_call>⏎{"name": "clock", "arguments": {"a": "}\n</tool_call>"}}⏎</tool_call> | stop | [null, null, "tool_calls", ["clock", "{\"a\": \"}\\n</tool_call>\"}"]]
{"tools": TOOLS} | a<tool_call>⏎{ | length | [null, "a", "length"]
{"tools": TOOLS} | a<tool_call>⏎{"name": "clo | length | [null, "a", "length"]
{"tools": TOOLS} | a<tool_call>⏎{"name": "clock", "arguments":  | length | [null, "a", "length", ["clock", ""]]
{"tools": TOOLS} | <tool_call>⏎{"name": "clock", "arguments": {"a": "b | length | [null, null, "length", ["clock", "{\"a\": \"b"]]
{"tools": TOOLS} | <tool_call>⏎{"name": "clock", "arguments": {"a": 1}} | length | [null, null, "length", ["clock", "{\"a\": 1}"]]
{"tools": TOOLS} | ONE<tool_call>⏎{"name": "clock", "arguments": {}}⏎</tool | length | [null, null, "length", WEATHER, ["clock", "{}"]]
{"tools": TOOLS, "tool_choice": NAMED} | ONE | stop | [null, null, "stop", WEATHER]
{"tools": TOOLS, "tool_choice": NAMED} | <tool_call> | length | [null, null, "length"]
{"tools": TOOLS, "stop": ["\"name\"", "weather", "}\n</tool_call>"]} | ONE | stop | [null, null, "tool_calls", WEATHER]
{"tools": TOOLS, "stop": ">\n{"} | ONE | stop | [null, null, "tool_calls", WEATHER]
{"tools": TOOLS, "stop": ["weather", "<"], "tool_choice": NAMED} | ONE | stop | [null, null, "stop", WEATHER]
{"tools": TOOLS, "stop": ["weather", "<"], "tool_choice": "required"} | ONE | stop | [null, null, "tool_calls", WEATHER]
{"tools": TOOLS, "stop": ["<", "a<"]} | aONE | stop | [null, "a", "tool_calls", WEATHER]
{"tools": TOOLS, "stop": " now"} | I call now ONE | stop | [null, "I call", " now"]
"""  # noqa: E501


def messages_of(caller, stream: bool) -> list[dict]:
    """Return the message of each choice, whole or assembled from its deltas, and how it ended."""
    if not stream:
        return [choice.pop("message") | choice for choice in caller.json["choices"]]
    messages = {}
    for event in caller.events[:-1]:
        (choice,) = event["choices"]
        message = messages.setdefault(choice["index"], {"token_ids": [], "tool_calls": []})
        message["token_ids"] += choice.pop("token_ids")
        delta = choice.pop("delta")
        calls = message["tool_calls"]
        for new in delta.pop("tool_calls", []):
            if new.pop("index") == len(calls):
                assert new["function"]["arguments"] == ""
                calls.append(new)
            else:  # of the last one
                calls[-1]["function"]["arguments"] += new["function"].pop("arguments")
                assert new == {"function": {}}
        assert not (delta and calls)
        for name, value in delta.items():
            message[name] = message.get(name, "") + value
        message |= choice
    return [*messages.values()]


@pytest.mark.parametrize("row", ANSWERS.strip().splitlines())
def test_answers_are_read_however_they_are_cut(row, kind):
    """
    They are read whole and as streams, two choices side by side. As with OpenAI, the reason is
    "tool_calls", except for a function that the caller named. Stop strings, which smolagents sends
    with each call, end neither calls nor thoughts. Would catch: a piece of a marker sent as text;
    tags that are control tokens, and so hidden even from the server; a call in thoughts; newlines
    that depend on how the steps cut a text; a brace after the arguments; tokens that are sent
    twice.
    """
    kind, house = kind
    fields, text, finish, expected = columns(row)
    fields = {"tools": []} | json.loads(fields)
    if kind == "text" and fields.get("stop", [""])[0] == "<":
        return  # it ends the text before it is known to begin thoughts or a call
    thought, said, reason, *expected = json.loads(expected)
    for marker in KINDS[kind] if kind in ("control", "opening") else ():
        if fields.get("skip_special_tokens", True):  # hidden where it marks nothing
            thought, said = (part and part.replace(marker, "") for part in (thought, said))
    tokens = with_tokens(text, KINDS[kind]) + [256] * (finish == "stop")
    for stream, size in product((False, True), (1, 3, 200)):
        caller = call(house, **fields, stream=stream, n=2, return_token_ids=True)
        house.engine.steps(tokens, size, finish)
        both = messages_of(caller, stream)
        assert len(both) == 2
        for message in both:
            assert message["role"] == "assistant"
            assert message.get("reasoning") == message.get("reasoning_content") == thought
            ended_by = message["stop_reason"] or message["finish_reason"]
            assert (message["content"] or None, ended_by) == (said, reason)
            calls = message.get("tool_calls", [])
            assert [[*made["function"].values()] for made in calls] == expected
            assert all(made.keys() == {"id", "type", "function"} for made in calls)
            assert len({made["id"] for made in calls}) == len(calls)
            ids = message["token_ids"]
            assert ids == (tokens[: len(ids)] if message["stop_reason"] else tokens)


def test_arguments_come_as_they_are_written(house):
    """They are sent before the call is complete. Text that is held back sends nothing."""
    caller = call(house, stream=True)
    seen = []
    text = 'hi|<tool_|call>\n{"name": "weather", |"arguments": {"ci|ty": "x"}|}\n'
    for piece in text.split("|"):
        house.engine.step(piece.encode())
        seen.append(len(caller.events))
    assert seen == [2, 2, 2, 4, 5, 6]


def test_thoughts_stay_in_the_text_where_they_are_not_wanted_apart(tmp_path):
    with house_with(THINKS, tmp_path, "plain", "--reasoning", "off") as house:
        for text in ("<think>hm</think>5", ""):
            caller = call(house)
            assert "before" not in house.engine.added["grammar"]
            house.engine.step([*with_tokens(text, KINDS["plain"]), 256], "stop")
            assert caller.choice["message"]["content"] == text


# --------------------------------------------------------------------------------------------------
# What clients send


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    with house_with(THINKS, tmp_path_factory.mktemp("patient")) as house:
        house.engine.ready(9000)
        yield house


def status_of(house, fields: str) -> int:
    """Return the status of the answer to a chat with these fields, as JSON."""
    start = json.dumps({"messages": HELLO, "max_tokens": 5})[:-1]
    caller = house.call("/v1/chat/completions", f"{start}, {fields[1:]}".encode())
    house.engine.step(b"x", "length")
    caller.hang_up()
    return caller.answer.status


@seed(0)
@settings(max_examples=75, deadline=None)
@given(
    values=st.tuples(*[VALUES] * 5),
    choice=st.sampled_from(["none", "auto", "required", {}]),
)
def test_no_tools_make_a_500(patient, values, choice):
    """Any JSON as schema, arguments or result leads to an answer or a refusal."""
    parameters, arguments, result, schema, options = values
    calls = [{"id": "a", "function": {"name": "f", "arguments": json.dumps(arguments)}}]
    talk = [{"role": "assistant", "tool_calls": calls}]
    talk.append({"role": "tool", "tool_call_id": "a", "content": result})
    for fields in (
        {"messages": talk},
        {"tools": [tool(parameters={"a": parameters})], "tool_choice": choice},
        {"tools": [{"type": "function", "function": options}], "tool_choice": schema},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"structured_outputs": {"json": schema, "regex": options}},
    ):
        assert status_of(patient, json.dumps(fields)) in (200, 400)


NESTED = """
{"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}
{"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}
{"structured_outputs": {"json": DEEP}}
{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": TEXT}}]}]}
{"structured_outputs": {"json": TEXT}}
"""  # noqa: E501


@pytest.mark.parametrize("depth", [150, 190, 250, 100_000])
def test_nesting_is_served_or_refused(patient, depth):
    """The body's parser stops at some 200 levels, and no later step may stop earlier."""
    deep = '{"a":' * depth + "1" + "}" * depth
    bodies = NESTED.replace("DEEP", deep).replace("TEXT", json.dumps(deep))
    statuses = [status_of(patient, body) for body in bodies.strip().splitlines()]
    assert statuses[:4] == [200 if depth < 200 else 400] * 4
    assert statuses[4] == (200 if depth < 10_000 else 400)  # the engine parses it if it is text


# --------------------------------------------------------------------------------------------------
# With an engine

DAYS = [{"days": 1}, {"days": 2.5}, {"days": None}]
SHORT = {"type": "object", "required": ["days"], "additionalProperties": False}
SHORT["properties"] = {"days": {"enum": [1, 2.5, None]}}


def test_a_model_that_knows_no_json_calls_and_answers_by_schema(tmp_path):
    """
    The tag is a single control token, and only the grammar makes the model produce it. A tool whose
    schema the library does not support runs without a grammar.
    """
    tools = [tool(name="weather", parameters=SHORT | {"propertyNames": {"type": "string"}})]
    bad = [*tools, tool(name="bad", parameters={"contains": {}})]
    form = {"type": "json_schema", "json_schema": {"name": "short", "schema": SHORT}}
    save_caller(tmp_path, dict.fromkeys(MARKERS[:2], True))
    with Process(tmp_path) as server:

        def ask(**fields) -> tuple[dict, dict]:
            body = {"messages": HELLO, "max_tokens": 250, "seed": 5} | fields
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            (choice,) = answer.json()["choices"]
            return choice, answer.headers

        choice, _ = ask(tools=tools, tool_choice=NAMED, return_token_ids=True)
        (called,) = choice["message"]["tool_calls"]
        assert choice["token_ids"][0] == TAG
        assert json.loads(called["function"]["arguments"]) in DAYS
        choice, headers = ask(tools=bad, logit_bias={TAG: 100})  # it begins with the tag
        assert headers["x-unheld-tools"] == "bad"
        assert choice["message"]["tool_calls"]
        choice, _ = ask(response_format=form)
        assert json.loads(choice["message"]["content"]) in DAYS
        assert choice["finish_reason"] == "stop"
