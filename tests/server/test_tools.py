"""
Tools: what a template shows of them, the grammar that an answer with calls is held to, and the
calls that are read off its text, however the steps cut it.
"""

import json
import re
from itertools import accumulate, pairwise

import llguidance
import pytest
from callers import (
    CLOSING,
    HERMES,
    QWEN,
    SHOWN,
    TAG,
    TALK,
    TEMPLATE,
    ids_of,
    save_caller,
    save_tokens,
    with_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI
from processes import Process
from test_api import VALUES
from wires import House

from server.protocol import ChatRequest
from server.tools import NO_TAGS, Reader, find_tags, grammar_of_calls
from tokenizer import load_tokenizer

TOOLS = """[
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": false}}},
    {"type": "function", "function": {"name": "clock", "description": "the time"}}
]"""
TOOLS = json.loads(TOOLS)
HELLO = [{"role": "user", "content": "hello"}]
NAMED = {"type": "function", "function": {"name": "weather"}}

# Qwen3-Coder's
XML = "{% if tools %}<tools>{{ tools }}</tools>{% endif %}" + TALK
XML = XML.replace("CALL", "<tool_call><function={{ call.name }}>{{ call.arguments }}")


def body_of(**fields) -> ChatRequest:
    return ChatRequest(**{"messages": HELLO, "tools": TOOLS} | fields)


# --------------------------------------------------------------------------------------------------
# The template


KINDS = {
    "tool_call": [TEMPLATE, SHOWN + TALK.replace("CALL", HERMES), TEMPLATE.replace('"', r"\"")],
    "": [TALK.replace("CALL", QWEN), XML, "{{ messages[0].content }}"],
}
TAGS = {"tool_call": ["<tool_call>", "</tool_call>"], "": NO_TAGS}


@pytest.mark.parametrize("tag, source", [(tag, one) for tag in KINDS for one in KINDS[tag]])
def test_the_tag_of_calls_is_read_off_the_template(tag, source):
    """
    Would catch: Qwen3-Coder's tags, which have no JSON inside, taken for Qwen3's; a template that
    writes calls, but would not tell the model of any tool.
    """
    assert find_tags(source) == TAGS[tag]


# Which of the tags the tokenizer has as tokens, and whether these are control tokens.
MARKERS = {
    "text": {},
    "both": {"<tool_call>": True, "</tool_call>": True},
    "plain": {"<tool_call>": False, "</tool_call>": False},
    "opening": {"<tool_call>": True},
    "closing": {"</tool_call>": True},
    "mixed": {"<tool_call>": False, "</tool_call>": True},
}


def house_with(template: str, folder, kind: str = "text") -> House:
    save_tokens(folder, MARKERS[kind], template)
    return House(directory=folder, tokenizer=load_tokenizer(folder) if MARKERS[kind] else None)


@pytest.fixture
def house(tmp_path):
    with house_with(TEMPLATE, tmp_path) as house:
        yield house


def call(house, messages=HELLO, tools=TOOLS, **fields):
    body = {"messages": messages, "tools": tools, "max_tokens": 99} | fields
    return house.call("/v1/chat/completions", body)


def prompt_of(house) -> str:
    return bytes(house.engine.added["prompt"]).decode()


def test_tools_are_shown_and_results_go_back(house):
    """Would catch: arguments as text, which Qwen2.5's template would write as a string of JSON."""
    function = {"name": "weather", "arguments": '{"city":"Zürich"}'}
    called = [{"id": "a", "type": "function", "function": function, "index": 0}]
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": called}]
    talk.append(
        {"role": "tool", "content": [{"type": "text", "text": "rain"}], "tool_call_id": "a"}
    )
    call(house, talk)
    prompt = prompt_of(house)
    shown = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"type"')]
    assert shown == TOOLS
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert prompt.endswith(f"user:\nhello\nassistant:\n{written}\ntool:\nrain\nassistant:")
    tokens = house.call("/tokenize", {"messages": talk, "tools": TOOLS})
    assert tokens.json["tokens"] == house.engine.added["prompt"]


@pytest.mark.parametrize("ids", ["ab", "aa", "aba"])
def test_a_result_has_the_name_of_the_function_that_was_called(house, ids):
    """Some servers count their calls anew in each turn: the last name stood at all results."""
    talk = [*HELLO]
    names = ["weather", "clock", "weather"][: len(ids)]
    for id, name in zip(ids, names, strict=True):
        made = {"id": id, "function": {"name": name, "arguments": "{}"}}
        talk.append({"role": "assistant", "tool_calls": [made]})
        talk.append({"role": "tool", "content": "6", "tool_call_id": id})
    named = "{% for m in messages %}{{ m.name }}{% endfor %}"
    chat = house.encoder.chat
    chat.templates = [None, chat.templates[0].environment.from_string(named)]
    call(house, talk, tool_choice="required")
    assert prompt_of(house) == "".join(names)


def test_no_text_of_tools_becomes_a_control_token(house):
    """Against prompt injection: in descriptions, schemas, arguments and results, too."""
    end = "<|endoftext|>"
    tool = {"name": "f", "description": end, "parameters": {"title": end, end: {"enum": [end]}}}
    function = {"name": "f", "arguments": json.dumps({end: [end]})}
    called = [{"id": end, "type": "function", "function": function}]
    talk = [*HELLO, {"role": "assistant", "tool_calls": called}]
    talk.append({"role": "tool", "content": end, "tool_call_id": end})
    call(house, talk, [{"type": "function", "function": tool}])
    assert 256 not in house.engine.added["prompt"]
    assert prompt_of(house).count(end) == 7


def test_none_is_like_no_tools(house):
    """Neither shown nor called, and not looked at for contradictions."""
    form = {"type": "json_object"}
    call(house, tool_choice="none", response_format=form)
    assert prompt_of(house) == "user:\nhello\nassistant:"
    assert house.engine.added["grammar"] == {"kind": "json", "text": '{"type": "object"}'}
    call(house, tool_choice="none")
    assert "grammar" not in house.engine.added


def test_auto_needs_a_template_with_tags(tmp_path):
    """Else "required" or a function holds the answer all the same, a call a line."""
    with house_with("{{ messages[0].content }}", tmp_path) as house:
        error = call(house).answer.error
        assert error["param"] == "tool_choice"
        assert error["message"].startswith('tool_choice is "auto", but this model\'s chat template')
        assert error["message"].endswith('send "required", "none" or a function')
        for choice in ("required", NAMED):
            caller = call(house, tool_choice=choice)
            assert prompt_of(house) == "hello"
            line = '{"name": "weather", "arguments": {"city": "x"}}\n'
            house.engine.step([*line.encode(), 256], "stop")
            (called,) = caller.choice["message"]["tool_calls"]
            assert called["function"] == {"name": "weather", "arguments": '{"city": "x"}'}


def test_tools_have_a_template_of_their_own(tmp_path):
    """Beside one that does not show them. Would catch "required" without any tool in the prompt."""
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text(TEMPLATE)
    with house_with("{{ messages[0].content }}", tmp_path) as house:
        call(house)
        assert "weather" in prompt_of(house)
        call(house, tool_choice="none")
        assert prompt_of(house) == "hello"


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
    """A socket takes 400 KB. Would catch characters that are spelled, and the spelling escaped."""
    house.engine.ready(10**6)
    function = {"name": "f", "parameters": {"description": "é" * 32_000}}
    call(house, tools=[{"type": "function", "function": function}])
    assert len(house.engine.added["grammar"]["text"].encode()) < 400_000


def refuse(house, *numbers: int):
    """As the engine does where these tools have schemas that are not served."""
    house.engine.fail("this grammar cannot be served: no", tools=numbers)


@pytest.mark.parametrize("stream", [False, True])
def test_the_others_are_held_where_a_tool_is_not_served(house, stream):
    """One of 40 stopped every chat. Would catch: a choice that waits for ever, or comes twice."""
    caller = call(house, stream=stream, n=2)
    refuse(house, 1, 0)
    lark, schemas = json.loads(house.engine.added["grammar"]["text"])
    assert schemas == ['{"type": "object"}'] * 2
    assert "city" not in lark
    assert len(house.engine.of("add")) == 2
    id = house.engine.added["id"]
    house.engine.step({id: [*ONE.encode(), 256], f"{id}.1": [*ONE.encode(), 256]}, "stop")
    (answer,) = caller.answers
    assert answer.headers["x-unheld-tools"] == "clock, weather"
    assert answer.body.count('"finish_reason":"tool_calls"') == 2
    assert not house.choices
    call(house)
    assert "city" in house.engine.added["grammar"]["text"]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}]
)
def test_a_tool_that_must_be_called_and_is_not_served_is_named(house, choice):
    caller = call(house, tool_choice=choice)
    refuse(house, 1 if choice == "required" else 0)
    error = caller.answer.error
    message = "tools.1.function.parameters (clock): this grammar cannot be served: no"
    assert (error["message"], error["param"]) == (message, "tools")


# --------------------------------------------------------------------------------------------------
# The grammar


class Bytes:
    """A vocabulary for llguidance: a token a byte, an end, and tags."""

    def __init__(self, markers: dict[str, bool]):
        self.bos_token_id = None
        self.eos_token_id = 256
        self.special_token_ids = [256]
        self.special_token_ids += [i for i, name in enumerate(markers, 257) if markers[name]]
        self.tokens = [*(bytes([i]) for i in range(256)), b"<|end|>", *map(str.encode, markers)]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


def tokens_of(kind: str) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(MARKERS[kind])))


def allowed(body: ChatRequest, tag: str, tokens: list[int], kind: str = "text") -> tuple[int, bool]:
    """How many of the tokens the grammar takes, and whether it may end there."""
    lark = grammar_of_calls(body, TAGS[tag], ids_of(MARKERS[kind]))
    lark = llguidance.LLMatcher.grammar_from_lark(lark)
    matcher = llguidance.LLMatcher(tokens_of(kind), lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens), matcher.is_accepting()


ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def spelled(text: str, tag: str = "tool_call") -> str:
    """A text of the tables below, without a tag as lines."""
    text = text.replace("SIXTEEN", 16 * "ONE").replace("ONE", ONE).replace("CLOCK", CLOCK)
    text = re.sub(r"(?<!\\)\\n", "\n", text).replace(r"\\n", r"\n")
    if not tag:
        text = text.replace("<tool_call>\n", "").replace("\n</tool_call>", "\n")
    return text


# Fields of the call; a text, whose part behind ¦ is refused; whether it may end there.
# ONE is a call, CLOCK another one.
HELD = r"""
{} free <text -> true
{} free <tool_call>¦ text -> false
{} free\nONE¦ text -> true
{} ONE\nCLOCKONE -> true
{} SIXTEEN¦ONE -> true
{"parallel_tool_calls": false} freeONE¦ONE -> true
{"tool_choice": "required"} SIXTEEN¦ONE -> true
{"tool_choice": "required"} ¦free -> false
{"tool_choice": "required", "parallel_tool_calls": false} ONE¦ONE -> true
{"tool_choice": NAMED} ONE¦ONE -> true
{"tool_choice": NAMED} <tool_call>\n{"name": "¦clock -> false
{"tool_choice": "required"} <tool_call>\n{"name": "clock", "arguments": {"a": [1, {"b": null}], "c": "}\\n</tool_call>"}}\n</tool_call> -> true
{"tool_choice": "required"} <tool_call>\n{"name": "weather", "arguments": {"city": ¦1 -> false
{"tool_choice": "required"} <tool_call>\n{"name": "weather", "arguments": {"city":¦"x" -> false
{"tool_choice": "required"} <tool_call>\n{"name": "weather", "arguments": {¦ "city" -> false
{"tool_choice": "required"} <tool_call>\n{"name": "clock", "arguments": {¦\n} -> false
"""  # noqa: E501


@pytest.mark.parametrize("tag, kind", [("", "text"), *(("tool_call", kind) for kind in MARKERS)])
@pytest.mark.parametrize("row", HELD.strip().splitlines())
def test_answers_are_held_to_calls(row, tag, kind):
    """
    Would catch: a tag that is a control token, and so no text, which no answer could have; or that
    would be spelled by tokens that no model has learnt for it.
    """
    fields, text, may_end = re.fullmatch(r"(\{.*?\}+) (.*) -> (\w+)", row).groups()
    fields = json.loads(fields.replace("NAMED", json.dumps(NAMED)))
    if not tag and "tool_choice" not in fields:
        return  # the call is refused
    taken, _, refused = spelled(text, tag).partition("¦")
    expected = len(with_tokens(taken, MARKERS[kind])), json.loads(may_end)
    assert (
        allowed(body_of(**fields), tag, with_tokens(taken + refused, MARKERS[kind]), kind)
        == expected
    )
    if (kind, fields) == ("both", {"tool_choice": "required"}):
        assert allowed(body_of(**fields), tag, list(taken.encode()), kind)[0] == 0


def test_a_schema_keeps_its_references_and_loses_its_options():
    """
    `$ref` is meant from the parameters on, not from the whole; `x-guidance` could have keywords
    ignored that the library does not know. Arguments are an object, whatever the schema says.
    """

    city = TOOLS[0]["function"]["parameters"]

    def body(**more) -> ChatRequest:
        parameters = {"$defs": {"c": city}, "properties": {"a": {"$ref": "#/$defs/c"}}} | more
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return body_of(tools=[tool], tool_choice="required")

    start = b'{"name": "f", "arguments": '
    assert allowed(body(), "", [*start, *b'{"a": {"city": "x"}}}\n'])[1]
    assert allowed(body(), "", [*start, *b'{"a": {"x'])[0] == len(start + b'{"a": {"')
    assert allowed(body(type="string"), "", [*start, *b'"'])[0] == len(start)
    schema = {"x-guidance": {"lenient": True}, "not": {}}
    lark = llguidance.LLMatcher.grammar_from_lark(grammar_of_calls(body(**schema), NO_TAGS, {}))
    assert '["not"]' in llguidance.LLMatcher.validate_grammar(lark, tokens_of("text"))


# --------------------------------------------------------------------------------------------------
# Reading calls

# a text -> its content and its calls; the last ones are cut off by the length
ANSWERS = r"""
hello <tool -> ["hello <tool"]
 -> [""]
ONE -> [null, "weather", "{\"city\": \"x\"}"]
hi é\nONE -> ["hi é\n", "weather", "{\"city\": \"x\"}"]
ONE\nCLOCK -> [null, "weather", "{\"city\": \"x\"}", "clock", "{}"]
ONE\n -> [null, "weather", "{\"city\": \"x\"}"]
<tool_call>\n{"name": "clock", "arguments": {"a": "}\\n</tool_call>"}}\n</tool_call> -> [null, "clock", "{\"a\": \"}\\n</tool_call>\"}"]
a<tool_call>\n{ -> ["a"]
a<tool_call>\n{"name": "clo -> ["a"]
a<tool_call>\n{"name": "clock", "arguments":  -> ["a", "clock", ""]
<tool_call>\n{"name": "clock", "arguments": {"a": "é -> [null, "clock", "{\"a\": \"é"]
<tool_call>\n{"name": "clock", "arguments": {"a": 1}} -> [null, "clock", "{\"a\": 1}"]
ONE<tool_call>\n{"name": "clock", "arguments": {}}\n</tool -> [null, "weather", "{\"city\": \"x\"}", "clock", "{}"]
"""  # noqa: E501
ANSWERS = ANSWERS[1:-1].split("\n")


def parsed(row: str) -> tuple:
    """The text, its content, [[name, arguments], ..]."""
    text, expected = row.split(" -> ")
    content, *calls = json.loads(expected)
    return text, content, [[*pair] for pair in zip(calls[::2], calls[1::2], strict=True)]


def names_and_arguments(calls: list[dict]) -> list[list[str]]:
    return [[*call["function"].values()] for call in calls]


@pytest.fixture(params=MARKERS, scope="module")
def kind(request, tmp_path_factory):
    """A kind of MARKERS, and a house of such a directory."""
    with house_with(TEMPLATE, tmp_path_factory.mktemp("kind"), request.param) as house:
        yield request.param, house


@pytest.mark.parametrize("row", ANSWERS)
def test_a_whole_answer_has_its_calls(kind, row):
    """Would catch: tags that are control tokens, and so hidden from the server, too."""
    kind, house = kind
    text, content, expected = parsed(row)
    caller = call(house)
    house.engine.step(with_tokens(spelled(text), MARKERS[kind]), "length")
    choice = caller.choice
    message = choice["message"]
    calls = message.pop("tool_calls", [])
    assert choice["finish_reason"] == "length"
    assert message == {"role": "assistant", "content": content}
    assert names_and_arguments(calls) == expected
    assert len({called["id"] for called in calls}) == len(calls)
    for called in calls:
        assert called.keys() == {"id", "type", "function"}


@settings(max_examples=300, deadline=None)
@given(
    row=st.sampled_from(ANSWERS),
    cuts=st.lists(st.integers(1, 30), max_size=80),
    tag=st.sampled_from(["tool_call", ""]),
)
def test_a_stream_of_calls_is_the_same_however_it_is_cut(row, cuts, tag):
    """
    The first delta of a call has all but its arguments, which come as they are written. Would
    catch: a piece of a tag sent as text, a brace behind the arguments, a call without its index.
    """
    text, content, expected = parsed(row)
    if not tag and content is not None:
        return
    text = spelled(text, tag)
    reader = Reader(TAGS[tag], [], ())
    said = ""
    calls = []
    places = [0, *accumulate(cuts)]
    for start, end in pairwise([*places, max(len(text), places[-1])]):
        is_end = end >= len(text)
        for delta in reader.read(text[start:end], is_end):
            if "content" in delta:
                assert delta["content"]
                assert not calls
                said += delta["content"]
                continue
            (new,) = delta["tool_calls"]
            if new["index"] == len(calls):
                assert new.keys() == {"index", "id", "type", "function"}
                assert new["function"]["arguments"] == ""
                calls.append(new)
            else:
                assert new.keys() == {"index", "function"}
                assert new["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += new["function"].pop("arguments")
                assert not new["function"]
        if is_end:
            break
    assert said == (content or "")
    assert names_and_arguments(calls) == expected


def test_arguments_come_as_they_are_written(house):
    """Not when all of a call is there; and nothing is sent for text that is held back."""
    caller = call(house, stream=True)
    seen = []
    text = 'hi|<tool_|call>\n{"name": "weather", |"arguments": {"ci|ty": "x"}|}\n'
    for piece in text.split("|"):
        house.engine.step(piece.encode())
        seen.append(len(caller.events))
    assert seen == [2, 2, 2, 4, 5, 6]
    house.engine.step([*b"</tool_call>", 256], "stop")
    deltas = [event["choices"][0]["delta"] for event in caller.events[:-1]]
    (first,) = deltas[2]["tool_calls"]
    function = {"name": "weather", "arguments": ""}
    assert first == {"index": 0, "id": first["id"], "type": "function", "function": function}
    pieces = [{"role": "assistant", "content": ""}, {"content": "hi"}, deltas[2]]
    for arguments in ('{"ci', 'ty": "x"', "}"):
        pieces.append({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]})
    assert deltas[:6] == pieces
    assert not any(deltas[6:])
    assert caller.events[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 7, 200])
@pytest.mark.parametrize("tool_choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("stop", ['"name"', "weather", "<", ">\n{", "}\n</tool_call>"])
def test_stop_strings_do_not_end_calls(house, stop, tool_choice, size):
    """
    As OpenAI has it: smolagents send some with each call. Would catch an empty message, arguments
    that are no JSON, and an end that depends on how many tokens a step brings.
    """
    if (stop, tool_choice) == ("<", "auto"):
        return  # it ends the text, before there is a call
    caller = call(house, tool_choice=tool_choice, stop=stop)
    house.engine.steps([*ONE.encode(), 256], size, "stop")
    choice = caller.choice
    expected = [["weather", '{"city": "x"}']]
    assert names_and_arguments(choice["message"]["tool_calls"]) == expected
    assert choice["stop_reason"] is None


@pytest.mark.parametrize("size", [1, 200])
def test_no_stop_string_reaches_into_a_tag_that_is_a_token(kind, size):
    kind, house = kind
    caller = call(house, stop=["<", "a<"])
    tokens = with_tokens(f"a{ONE}", MARKERS[kind])
    for start in range(0, len(tokens), size):
        house.engine.step({house.engine.added["id"]: tokens[start : start + size]})
    is_token = "<tool_call>" in MARKERS[kind]
    if is_token:
        house.engine.step([256], "stop")
    choice = caller.choice
    assert choice["message"]["content"] == ("a" if is_token else "")
    assert ("tool_calls" in choice["message"]) == is_token


def test_templates_find_tags_in_answers_alone(tmp_path):
    """
    Some read calls off the text of an answer. Would catch: a tag that is a control token and
    therefore disguised there; one that a user writes.
    """
    with house_with(TEMPLATE, tmp_path, "both") as house:
        said = [{"role": role, "content": ONE} for role in ("user", "assistant", "user")]
        call(house, said, tool_choice="none")
        prompt = house.engine.added["prompt"]
        assert [i for i in prompt if i > 256] == [TAG, CLOSING]
        assert prompt[-len(ONE) - 11 : -11] == [*ONE.encode()]


@pytest.mark.parametrize("size", [1, 200])
def test_stop_strings_end_the_text_before_calls(house, size):
    caller = call(house, stop=" now")
    text = f"I call now {ONE}".encode()
    for start in range(0, len(text), size):
        house.engine.step({house.engine.added["id"]: text[start : start + size]})
    choice = caller.choice
    assert choice["message"] == {"role": "assistant", "content": "I call"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " now")


# tool_choice, the text, how the engine ends it -> what the client is told
REASONS = r"""
"auto" ONE stop -> tool_calls
"auto" ONE length -> length
"auto" hello stop -> stop
"required" ONE stop -> tool_calls
NAMED ONE stop -> stop
NAMED <tool_call> length -> length
"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("row", REASONS.strip().splitlines())
def test_the_reason_of_an_end_with_calls(house, row, stream):
    """OpenAI's: "tool_calls", but for the function that the caller named. Metrics keep "stop"."""
    tool_choice, text, finish, _, reason = row.split()
    tool_choice = json.loads(tool_choice.replace("NAMED", json.dumps(NAMED)))
    caller = call(house, tool_choice=tool_choice, stream=stream)
    end = [256] if finish == "stop" else []
    house.engine.step([*spelled(text).encode(), *end], finish)
    last = caller.events[-2] if stream else caller.json
    assert last["choices"][0]["finish_reason"] == reason
    assert house.service.metrics.finished[finish]._value.get() == 1


@pytest.mark.parametrize("size", [1, 50])
def test_tokens_and_their_scores_are_sent_once(house, size):
    """Though text is held back, and though the tokens of a step make several deltas."""
    caller = call(house, stream=True, logprobs=True, return_token_ids=True)
    tokens = [*ONE.encode(), 256]
    for start in range(0, len(tokens), size):
        new = tokens[start : start + size]
        row = [house.engine.added["id"], new, "stop" if new[-1] == 256 else None, 0]
        row += [[[-1.0, [], []]] * len(new), None]
        house.engine.say({"op": "step", "out": [row], "stats": house.engine.stats})
    choices = [event["choices"][0] for event in caller.events[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == tokens
    scored = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    assert sum(map(len, scored)) == len(tokens)


def test_each_choice_has_calls_of_its_own(house):
    caller = call(house, n=2)
    id = house.engine.added["id"]
    house.engine.step({id: ONE.encode(), f"{id}.1": b"hello"}, "length")
    first, second = [choice["message"] for choice in caller.json["choices"]]
    assert first["tool_calls"][0]["function"]["name"] == "weather"
    assert second == {"role": "assistant", "content": "hello"}


# --------------------------------------------------------------------------------------------------
# What clients send


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    with house_with(TEMPLATE, tmp_path_factory.mktemp("patient")) as house:
        house.engine.ready(9000)
        yield house


def status_of(house, body: str) -> int:
    """The status of the answer to a chat."""
    caller = house.call("/v1/chat/completions", body.encode())
    house.engine.step(b"x", "length")
    caller.hang_up()
    answer = caller.answer
    assert answer.status in (200, 400), answer.body
    return answer.status


def ask_patient(house, fields: dict) -> int:
    """With these fields."""
    return status_of(house, json.dumps({"messages": HELLO, "max_tokens": 5} | fields))


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(VALUES, min_size=5, max_size=5),
    choice=st.sampled_from(["none", "auto", "required", {}]),
)
def test_no_tools_make_a_500(patient, values, choice):
    """Any JSON in the places of schemas, arguments and results: an answer or a refusal."""
    parameters, arguments, result, schema, options = values
    function = {"name": "f", "arguments": json.dumps(arguments)}
    calls = [{"id": "a", "function": function}]
    talk = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    talk.append({"role": "tool", "tool_call_id": "a", "content": result})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": parameters}}}
    ask_patient(patient, {"messages": talk})
    ask_patient(patient, {"tools": [tool], "tool_choice": choice})
    ask_patient(patient, {"tools": [tool | {"function": options}], "tool_choice": schema})
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    ask_patient(patient, {"response_format": form})
    ask_patient(patient, {"structured_outputs": {"json": schema, "regex": options}})


@pytest.mark.parametrize("depth", [150, 190, 250, 100_000])
def test_nesting_is_served_or_refused(patient, depth):
    """The body's reader stops at some 200 levels: nothing behind it may stop earlier."""
    deep = '{"a":' * depth + "1" + "}" * depth
    function = {"name": "f", "arguments": deep}
    calls = [{"id": "a", "type": "function", "function": function}]
    bodies = ['{"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}']
    bodies.append('{"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}')
    bodies.append('{"structured_outputs": {"json": DEEP}}')
    bodies.append(json.dumps({"messages": [{"role": "assistant", "tool_calls": calls}]}))
    bodies.append(json.dumps({"structured_outputs": {"json": deep}}))
    statuses = []
    for body in bodies:
        start = json.dumps({"messages": HELLO, "max_tokens": 5})[:-1]
        body = f"{start}, {body[1:]}".replace("DEEP", deep)
        statuses.append(status_of(patient, body))
    assert statuses[:4] == [200 if depth < 200 else 400] * 4
    assert statuses[4] == (200 if depth < 10_000 else 400)  # as text it is the engine's to read


# --------------------------------------------------------------------------------------------------
# With an engine


@pytest.fixture(scope="module", params=["opening", "both", "plain"])
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    save_caller(folder, MARKERS[request.param])
    with Process(folder, "--served-model-name", "tiny") as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


SHORT = """{
    "type": "object", "required": ["city", "days"], "additionalProperties": false,
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2.5, null]}}
}"""
SHORT = json.loads(SHORT)


def ask(served, **fields):
    function = {"name": "weather", "parameters": SHORT}
    call = {"model": "tiny", "messages": HELLO, "max_tokens": 250}
    call |= {"seed": 5, "tools": [{"type": "function", "function": function}]} | fields
    return served.chat.completions.create(**call)


def check_short(text: str):
    value = json.loads(text)
    assert value.keys() == {"city", "days"}
    assert len(value["city"]) <= 9
    assert value["days"] in (1, 2.5, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": NAMED},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"logit_bias": {TAG: 100}, "parallel_tool_calls": False},  # it begins with the tag
    ],
)
def test_a_model_that_knows_no_json_calls(served, fields):
    """
    Whole, and in a stream, where the same seed has the same arguments. The tag is the token for it,
    also where that is a control token and nothing but the grammar asks for it.
    """
    (choice,) = ask(served, **fields, extra_body={"return_token_ids": True}).choices
    (called,) = choice.message.tool_calls
    assert choice.token_ids[0] == TAG
    assert choice.message.content is None
    check_short(called.function.arguments)
    chunks = [*ask(served, **fields, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    functions = [delta.tool_calls[0].function for delta in deltas if delta.tool_calls]
    assert functions[0].name == "weather"
    assert "".join(f.arguments for f in functions) == called.function.arguments
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_a_tool_that_is_not_served_is_named_or_goes_unheld(served):
    """With nothing of the server's own grammar."""
    bad = {"name": "bad", "parameters": {"type": "object", "contains": {}}}
    good = {"name": "weather", "parameters": SHORT | {"propertyNames": {"type": "string"}}}
    tools = [{"type": "function", "function": function} for function in (good, bad)]
    with pytest.raises(BadRequestError) as caught:
        ask(served, tools=tools, tool_choice="required")
    reason = 'this grammar cannot be served: Unimplemented keys: ["contains"]'
    assert caught.value.body["message"] == f"tools.1.function.parameters (bad): {reason}"
    more = {"logit_bias": {TAG: 100}, "parallel_tool_calls": False, "tools": tools}
    for seed in range(9):
        answer = ask(served.with_raw_response, **more, seed=seed)
        assert answer.headers["x-unheld-tools"] == "bad"
        function = answer.parse().choices[0].message.tool_calls[0].function
        if function.name == "weather":
            return check_short(function.arguments)
    raise AssertionError("no call of it")


def test_a_model_that_knows_no_json_answers_by_schema(served):
    """And a schema that the library does not know is refused by its keyword, before any token."""
    form = {"type": "json_schema", "json_schema": {"name": "short", "schema": SHORT}}
    (choice,) = ask(served, tools=[], response_format=form).choices
    check_short(choice.message.content)
    assert choice.finish_reason == "stop"
    for keyword in ("not", "uniqueItems"):
        form["json_schema"]["schema"] = SHORT | {keyword: {}}
        with pytest.raises(BadRequestError, match=keyword) as caught:
            ask(served, tools=[], response_format=form, stream=True)
        assert caught.value.param == "response_format"
