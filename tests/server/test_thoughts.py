"""
Thoughts: what a model writes between <think> and </think> is a field of its own, in whole answers
and in streams, however the steps cut them; and what holds an answer begins after it.
"""

import json
import re

import pytest
from callers import SHOWN, TALK, save_tokens, with_tokens
from test_tools import HELLO, ONE, TOOLS
from wires import House

from engine.matcher import Library
from server.tools import find_thoughts
from tokenizer import load_tokenizer

# In the manner of Qwen3's, which writes empty thoughts where a model is not to think. With `opens`
# it begins them, as that of the thinking variant.
TEMPLATE = SHOWN + TALK.replace("CALL", "").replace("assistant:", "a:")
TEMPLATE += "{% if enable_thinking is false %}<think>\n\n</think>\n\n"
TEMPLATE += "{% elif opens %}<think>\n{% endif %}"
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# Whether the tokenizer has the markers as tokens, and whether these are control tokens.
KINDS = {
    "text": {},
    "plain": dict.fromkeys(MARKERS, False),
    "control": dict.fromkeys(MARKERS, True),
}


def house_of(folder, kind: str, *flags: str) -> House:
    save_tokens(folder, KINDS[kind], TEMPLATE)
    return House(*flags, directory=folder, tokenizer=load_tokenizer(folder))


def call(house, **fields):
    body = {"messages": HELLO, "max_tokens": 99} | fields
    return house.call("/v1/chat/completions", body)


def told(caller, stream: bool) -> dict:
    """What the client was told: a message, whole or put together of deltas, and the reason."""
    if not stream:
        choice = caller.choice
        return choice["message"] | {"reason": choice["finish_reason"]}
    *events, _ = caller.events
    message = {"content": None, "reason": events[-1]["choices"][0]["finish_reason"]}
    for delta in [event["choices"][0]["delta"] for event in events]:
        for name in {"content", "reasoning", "reasoning_content"} & delta.keys():
            message[name] = (message.get(name) or "") + delta[name] or None
    return message


# Fields, an answer, how the engine ends it -> what is thought, what is said, the reason.
OPENS = {"chat_template_kwargs": {"opens": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ROWS = r"""
{} <think>\nhm\n\nso\n\n</think>\n\n5\n stop -> ["hm\n\nso", "5\n", "stop"]
{} <think>hm</think>5 stop -> ["hm", "5", "stop"]
{} 5 </thi stop -> [null, "5 </thi", "stop"]
{} \n 5 stop -> [null, "\n 5", "stop"]
{} <thin length -> [null, "<thin", "length"]
{} <think>\n length -> [null, null, "length"]
{} \n<think>hm\n</thi length -> ["hm\n</thi", null, "length"]
{} <think>never closed stop -> ["never closed", null, "stop"]
{} <think>\n\n</think>\n\n5 stop -> [null, "5", "stop"]
OPENS \nhm\n</think>\n\n5 stop -> ["hm", "5", "stop"]
OPENS hm length -> ["hm", null, "length"]
OPENS </think>5 stop -> [null, "5", "stop"]
OFF \n5 <thi stop -> [null, "\n5 <thi", "stop"]
{"stop": "5"} <think>45</think>a5b stop -> ["45", "a", "stop"]
{"stop": ["<", "n", "\n"]} <think>a\n\nb</think>\n\nc<d stop -> ["a\n\nb", "c", "stop"]
{"stop": "5", "min_tokens": 12} <think>45</think>a stop -> ["45", "a", "stop"]
{"stop": "5", "tools": TOOLS} <think>5 <tool_call></think>aONE stop -> ["5 <tool_call>", "a", "tool_calls"]
{"stop": "5", "tools": TOOLS} <think>5</think>a5ONE stop -> ["5", "a", "stop"]
OPENS {"tools": TOOLS} hm</think>ONE stop -> ["hm", null, "tool_calls"]
"""  # noqa: E501


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_thoughts_are_a_field_of_their_own(row, kind, stream, tmp_path):
    """
    Would catch: a piece of a marker sent as text, a stop string that ends thoughts, a call in them,
    newlines that depend on how the steps cut a text.
    """
    kwargs, fields, text, finish, expected = re.fullmatch(
        r"(OPENS|OFF)? ?(\{.*\})? ?(.*) (stop|length) -> (.*)", row
    ).groups()
    fields = json.loads((fields or "{}").replace("TOOLS", json.dumps(TOOLS)))
    fields |= {"OPENS": OPENS, "OFF": OFF, None: {}}[kwargs] | {"stream": stream}
    text = text.replace(r"\n", "\n").replace("ONE", ONE)
    tokens = with_tokens(text, KINDS[kind])
    if fields.get("stop") and "<" in fields["stop"] and kind == "text":
        return  # it ends the text, which is not known to begin thoughts
    thought, said, reason = json.loads(expected)
    if kind == "control" and thought:
        thought = thought.replace("<tool_call>", "")  # it is hidden where it begins no call
    with house_of(tmp_path, kind) as house:
        for size in (1, 3, 200):
            caller = call(house, **fields)
            house.engine.steps(tokens + [256] * (finish == "stop"), size, finish)
            message = told(caller, stream)
            assert message.get("reasoning") == message.get("reasoning_content") == thought
            assert (message["content"], message["reason"]) == (said, reason)


# What holds the answer; an answer that fits it, and one that does not. ONE is a call.
HELD = r"""
{"response_format": {"type": "json_object"}} ¦ {"a": 1} ¦ x
{"structured_outputs": {"json": {"enum": ["ab"]}}} ¦ "ab" ¦ ab
{"structured_outputs": {"regex": "[ab]+"}} ¦ ab ¦ c
{"structured_outputs": {"choice": ["ab", "{"]}} ¦ { ¦ a
{"structured_outputs": {"grammar": "start: \"a\" \"b\""}} ¦ ab ¦ b
{"structured_outputs": {"grammar": "root ::= \"a\" x\nx ::= \"b\""}} ¦ ab ¦ b
{"tools": TOOLS} ¦ say ONE ¦ say <tool_call>x
{"tools": TOOLS, "tool_choice": "required"} ¦ ONE ¦ x
"""


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", HELD.strip().splitlines())
def test_what_holds_an_answer_begins_after_thoughts(row, kind, opens, tmp_path):
    """
    A model that thinks by default would be held from it, and would answer worse. Its thoughts may
    mention calls; where none need follow, the text may end within them.
    """
    fields, right, wrong = row.replace("TOOLS", json.dumps(TOOLS)).split(" ¦ ")
    fields = json.loads(fields)
    with house_of(tmp_path, kind) as house:
        call(house, **fields, chat_template_kwargs={"opens": opens})
        grammar = house.engine.added["grammar"]
        tokenizer = house.encoder.tokenizer
    library = Library(tokenizer, tokenizer.vocab_size, [256])

    def fits(text: str) -> bool:
        """Whether an answer may have this text, and end after it."""
        tokens = with_tokens(text.replace("ONE", ONE), KINDS[kind])
        matcher = library.compile(**grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    thought = "" if opens else "<think>\n"
    thought += "call <tool_call>" if kind == "plain" else "x < y"
    for newlines in ("", "\n\n"):
        assert fits(f"{thought}</think>{newlines}{right}")
        assert not fits(f"{thought}</think>{newlines}{wrong}")
    assert fits(right) != opens or fields.keys() == {"tools"}
    assert fits(thought) == (fields.keys() == {"tools"})


def test_thoughts_stay_in_the_text_where_they_are_not_wanted_apart(tmp_path):
    with house_of(tmp_path, "plain", "--reasoning", "off") as house:
        caller = call(house, response_format={"type": "json_object"})
        assert "before" not in house.engine.added["grammar"]
        house.engine.step(with_tokens("<think>hm</think>5", KINDS["plain"]), "length")
        assert told(caller, False)["content"] == "<think>hm</think>5"


def test_a_tool_that_is_not_served_leaves_room_for_thoughts(tmp_path):
    """The call begins again, with another grammar for the same answer."""
    with house_of(tmp_path, "control") as house:
        call(house, tools=TOOLS)
        (first,) = house.engine.of("add")
        house.engine.fail(tools=[0])
        again = house.engine.added["grammar"]
        assert again["text"] != first["grammar"]["text"]
        assert again["before"] == first["grammar"]["before"]


def test_each_choice_has_thoughts_and_all_tokens_are_scored_and_counted(tmp_path):
    with house_of(tmp_path, "control") as house:
        caller = call(house, n=2, logprobs=True)
        tokens = with_tokens("<think>hm</think>5", KINDS["control"])
        score = [-1.0, [], []]
        for id, part in zip([*house.choices], (tokens, tokens[:2]), strict=True):
            row = [id, part, "length", 0, [score] * len(part), None]
            house.engine.say({"op": "step", "out": [row], "stats": house.engine.stats})
        answer = caller.json
        first, second = answer["choices"]
        assert (first["message"]["reasoning"], first["message"]["content"]) == ("hm", "5")
        assert (second["message"]["reasoning"], second["message"]["content"]) == ("h", None)
        assert [len(one["logprobs"]["content"]) for one in (first, second)] == [5, 2]
        assert answer["usage"]["completion_tokens"] == 7


def test_markers_that_mark_nothing_are_hidden_where_they_are_control_tokens(tmp_path):
    text = "<think>a</think>b<think>c</think><tool_call>"
    for kind, skips, said in (
        ("control", True, "bc"),
        ("control", False, "b<think>c</think><tool_call>"),
        ("plain", True, "b<think>c</think><tool_call>"),
    ):
        with house_of(tmp_path, kind) as house:
            caller = call(house, skip_special_tokens=skips)
            house.engine.step(with_tokens(text, KINDS[kind]), "length")
            assert told(caller, False)["content"] == said


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_finds_thoughts_in_answers(kind, tmp_path):
    """Under both names, and in the text, as Qwen3's looks for them."""
    shows = "{% for m in messages %}{{ m.reasoning_content or m.content.split('</think>')[-1] }}"
    save_tokens(tmp_path, KINDS[kind], shows + "{% endfor %}")
    with House(directory=tmp_path, tokenizer=load_tokenizer(tmp_path)) as house:
        for fields in ({"reasoning": "h"}, {"reasoning_content": "h"}, {"content": "x</think>h"}):
            call(house, messages=[{"role": "assistant", "content": "5"} | fields])
            assert house.engine.added["prompt"] == [*b"h"]


FOUND = """
{% if '</think>' in content %} -> <think> </think>
[THINK]{{ thought }}[/THINK] -> [THINK] [/THINK]
<seed:think>{{ x }}</seed:think> -> <seed:think> </seed:think>
<Thinking></Thinking> -> <Thinking> </Thinking>
<b></b> <tool_call></tool_call> ->
"""


@pytest.mark.parametrize("row", FOUND.strip().splitlines())
def test_the_markers_of_thoughts_are_read_off_the_template(row):
    source, markers = row.split(" ->")
    assert find_thoughts(source) == markers.split()
