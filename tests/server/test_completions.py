"""
/v1/completions and /v1/chat/completions over HTTP, as tables: the fields of a call, whose prompt
is the fake engine's script, and the answer, which says the same whole and as a stream.
"""

import json

import pytest
from tokenizers.processors import TemplateProcessing
from wires import EOS, HELLO, ByteTokenizer, Server, ask, error_of

from server.answers import CompletionChoice
from server.protocol import CompletionRequest
from tokenizer import TextStream, load_tokenizer
from training.corpus import bpe_tokenizer


def post(server, **body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = server.http.post(path, json={"max_tokens": 1000} | body)
    assert response.status_code == 200, response.text
    return response


def stream(server, **body) -> list[dict]:
    """The events of a stream, which share id, date and kind, but for the end."""
    response = post(server, stream=True, **body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    events = [*map(json.loads, events)]
    assert done == "[DONE]" and len({(event["id"], event["created"]) for event in events}) == 1
    kind = "chat.completion.chunk" if "messages" in body else "text_completion"
    assert {event["object"] for event in events} == {kind}
    return events


def summary(events: list[dict]) -> list[tuple]:
    """The text, the end and the log-probabilities of each choice."""
    choices = {}
    for event in events:
        for part in event["choices"]:
            choices.setdefault(part["index"], []).append(part)
    return [summary_of(choices[index]) for index in sorted(choices)]


def summary_of(parts: list[dict]) -> tuple:
    shown = [part.get("message") or part.get("delta") or part for part in parts]
    texts = [part.get("text") or part.get("content") or "" for part in shown]
    assert not any("\ufffd" in text for text in texts[:-1]), "half a character"
    scored = [part["logprobs"] for part in parts if part["logprobs"]]
    lists = {name: [x for part in scored for x in part[name] or ()] for name in (scored or [{}])[0]}
    ends = [(part["finish_reason"], part["stop_reason"]) for part in parts]
    assert ends[:-1] == [(None, None)] * (len(parts) - 1)
    return "".join(texts), *ends[-1], lists


# fields -> tokens of all prompts (n choices share one) and of all answers (the end of text is one,
# too), the reason of all ends, the choices' texts. LONG is 500 words; CHAT's message is "hello".
# The last four are calls of `vllm bench serve` (vLLM's commit 02cfb53).
ANSWERS = """
{"prompt": "say hello"} -> [9, 6, "stop", null, "hello"]
{"prompt": "say hello", "max_tokens": 2} -> [9, 2, "length", null, "he"]
{"prompt": "say é€😀é€😀"} -> [22, 19, "stop", null, "é€😀é€😀"]
{"prompt": "say a€", "max_tokens": 3} -> [8, 3, "length", null, "a\ufffd"]
{"prompt": [115, 97, 121, 32, 111]} -> [5, 2, "stop", null, "o"]
{"prompt": [[115, 97, 121, 32, 111], [115, 97, 121, 32, 112]]} -> [10, 4, "stop", null, "o", "p"]
{"prompt": ["say a", "say bc"], "n": 2} -> [11, 10, "stop", null, "a", "a", "bc", "bc"]
{"prompt": "say hi", "echo": true} -> [6, 3, "stop", null, "say hihi"]
{"prompt": "say hi", "echo": true, "max_tokens": 0} -> [6, 0, "length", null, "say hi"]
{"prompt": [115, 226, 130], "echo": true, "max_tokens": 0} -> [3, 0, "length", null, "s\ufffd"]
{"prompt": "say oneTWOLONG", "stop": ["zzz", "TW"]} -> [2010, 5, "stop", "TW", "one"]
{"prompt": "say3 oneTWOLONG", "stop": ["zzz", "TW"]} -> [2011, 5, "stop", "TW", "one"]
{"prompt": "say abc", "stop": "cde"} -> [7, 4, "stop", null, "abc"]
{"prompt": "say abab", "stop": "b", "min_tokens": 2} -> [8, 4, "stop", "b", "aba"]
{"prompt": "say abab", "stop": "ba", "min_tokens": 2} -> [8, 5, "stop", null, "abab"]
{"prompt": "say abc", "stop_token_ids": [98]} -> [7, 2, "stop", 98, "a"]
{CHAT} -> [9, 6, "stop", null, "hello"]
{CHAT, "n": 2, "max_tokens": 3} -> [9, 6, "length", null, "hel", "hel"]
{"prompt": "say hi", "repetition_penalty": 1.0, "logprobs": null} -> [6, 3, "stop", null, "hi"]
{"prompt": "say hi", "ignore_eos": true, "temperature": 0.0} -> [6, 3, "stop", 256, "hi"]
{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]} -> [6, 3, "stop", null, "hi"]
{CHAT, "ignore_eos": true, "temperature": 0.0} -> [9, 6, "stop", 256, "hello"]
"""  # noqa: E501
CHAT = '"messages": [{"role": "user", "content": "hello"}]'
ROWS = ANSWERS.replace("LONG", "more" * 500).replace("CHAT", CHAT).strip().splitlines()


@pytest.mark.parametrize("row", ROWS)
def test_answers(chat, row):
    fields, expected = map(json.loads, row.split(" -> "))
    asked, answered, *reasons = expected[:4]
    answer = post(chat, **fields).json()
    assert summary([answer]) == [(text, *reasons, {}) for text in expected[4:]]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (asked, answered)
    *events, last = stream(chat, **fields, stream_options={"include_usage": True})
    assert summary(events) == summary([answer])
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in events)
    assert last["choices"] == [] and last["usage"] == usage


# Whole answers, field by field, but for their id and date. A token's offset counts characters;
# bytes that are no character are spelled out.
WHOLE = r"""
{"prompt": "say hello", "return_token_ids": true, "request_id": "cmpl"} ->
{"object": "text_completion", "model": "fake", "choices": [{
    "index": 0, "text": "hello", "logprobs": null, "finish_reason": "stop", "stop_reason": null,
    "prompt_token_ids": [115, 97, 121, 32, 104, 101, 108, 108, 111],
    "token_ids": [104, 101, 108, 108, 111, 256]
}], "usage": {
    "prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4}
}}

{"prompt": "say a€", "logprobs": 1} ->
{"object": "text_completion", "model": "fake", "choices": [{
    "index": 0, "text": "a€", "finish_reason": "stop", "stop_reason": null, "logprobs": {
        "tokens": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<end>"],
        "token_logprobs": [-2.0, -2.0, -2.0, -2.0, -2.0],
        "top_logprobs": [
            {"b": -1.0, "a": -2.0}, {"bytes:\\xe3": -1.0, "bytes:\\xe2": -2.0},
            {"bytes:\\x83": -1.0, "bytes:\\x82": -2.0}, {"bytes:\\xad": -1.0, "bytes:\\xac": -2.0},
            {"\u0000": -1.0, "<end>": -2.0}
        ], "text_offset": [0, 1, 1, 1, 2]
    }
}], "usage": {
    "prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4}
}}

{"prompt": "say x", "echo": true, "logprobs": 0, "max_tokens": 0} ->
{"object": "text_completion", "model": "fake", "choices": [{
    "index": 0, "text": "say x", "finish_reason": "length", "stop_reason": null, "logprobs": {
        "tokens": ["s", "a", "y", " ", "x"], "token_logprobs": [null, -2.0, -2.0, -2.0, -2.0],
        "top_logprobs": [null, {"a": -2.0}, {"y": -2.0}, {" ": -2.0}, {"x": -2.0}],
        "text_offset": [0, 1, 2, 3, 4]
    }
}], "usage": {
    "prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2}
}}

{CHAT, "logprobs": true, "top_logprobs": 1, "max_tokens": 1, "request_id": "chatcmpl"} ->
{"object": "chat.completion", "model": "fake", "choices": [{
    "index": 0, "message": {"role": "assistant", "content": "h"}, "finish_reason": "length",
    "stop_reason": null, "logprobs": {"content": [{
        "token": "h", "logprob": -2.0, "bytes": [104],
        "top_logprobs": [{"token": "i", "logprob": -1.0, "bytes": [105]}]
    }], "refusal": null}
}], "usage": {
    "prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4}
}}"""


@pytest.mark.parametrize("row", WHOLE.replace("CHAT", CHAT).split("\n\n"))
def test_whole_answers_have_exactly_these_fields(chat, row):
    fields, expected = map(json.loads, row.split(" ->\n"))
    answer = post(chat, model="fake", **fields).json()
    name, _, id = answer.pop("id").partition("-")
    assert answer.pop("created") == int(chat.clock.clock.time())
    assert answer == expected
    if "request_id" in fields:
        assert name == id == fields["request_id"]
    assert summary(stream(chat, **fields)) == summary([answer])


def test_usage_may_be_in_every_chunk(chat):
    """guidellm counts tokens by it. Each chunk has that of its own choice; a role costs none."""
    for fields, asked in (
        ({"prompt": ["say one", "say three"]}, [7, 9]),
        ({"messages": HELLO}, [9]),
    ):
        for options in ({}, {"stream_options": {"continuous_usage_stats": True}}):
            assert all("usage" not in event for event in stream(chat, **fields, **options))
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = stream(chat, **fields, stream_options=options)
        ends = {event["choices"][0]["index"]: event["usage"] for event in events}
        assert [ends[index]["prompt_tokens"] for index in sorted(ends)] == asked
        counts = [usage["completion_tokens"] for usage in ends.values()]
        assert last["usage"]["completion_tokens"] == sum(counts)
        assert last["usage"]["prompt_tokens"] == sum(asked)


def test_a_long_echo_is_text_at_once(monkeypatch):
    """128 choices with a prompt of 30,000 tokens were spelled token by token."""
    body = CompletionRequest(prompt="x", echo=True, stop="x")
    prompt = [*("xé€".encode() * 500)[:-1]]
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", lambda *_: 1 / 0)
        choice = CompletionChoice(None, 0, body, prompt, ByteTokenizer(), [EOS])
    assert choice.text == "xé€" * 499 + "xé"
    choice.add_tokens([0xAC, ord("y")], "length", 0)  # a character that began in the prompt
    assert choice.text == "xé€" * 500 + "y"


# --------------------------------------------------------------------------------------------------
# Chats


def test_variables_of_the_template(chat, tmp_path):
    """They were refused by name; the server's own hold where a request has none."""
    bpe_tokenizer([]).save(tmp_path)
    template = "say {{ messages[0].content }}{{ ' thinks' if thinks }}{{ more }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    flags = ["--default-chat-template-kwargs", '{"thinks": true}']
    with Server(*flags, directory=tmp_path) as server:
        for variables, said in (
            (None, " thinks"),
            ({"more": [1, "<end>"]}, " thinks[1, '<end>']"),
            ({"thinks": False, "self": 1, "more": "."}, "."),
        ):
            fields = {"chat_template_kwargs": variables}
            answer = ask(server, **fields).json()
            assert answer["choices"][0]["message"]["content"] == f"hello{said}"
            tokens = server.http.post("/tokenize", json={"messages": HELLO} | fields).json()
            assert bytes(tokens["tokens"]) == f"say hello{said}".encode()
            assert tokens["count"] == answer["usage"]["prompt_tokens"]


def test_chats_are_refused_with_reasons(chat, server):
    error = error_of(ask(server))
    assert "fake has no chat template" in error["message"] and error["param"] == "messages"
    error = error_of(ask(chat, [{"role": "system", "content": "x"}]))
    assert error["message"] == "no system message"


def test_a_bos_comes_once_to_prompts_and_chats(tmp_path):
    """
    A tokenizer puts it before a prompt, a template before a conversation: a chat had two of them,
    and none of the tokenizer's where its text could be part of a control token's name ("a <"). An
    echo has it only where it was sent.
    """
    tokenizer = bpe_tokenizer([])
    end = tokenizer.names[256]
    template = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 256)])
    tokenizer.backend.post_processor = template
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}say {{ messages[0].content }}")
    cut_name = [{"role": "user", "content": "a <"}]
    with Server(directory=tmp_path, tokenizer=load_tokenizer(tmp_path)) as server:
        for fields, tokens in (
            ({"prompt": "hi"}, [256, *b"hi"]),
            ({"prompt": "hi", "add_special_tokens": False}, [*b"hi"]),
            ({"messages": HELLO}, [256, *b"say hello"]),
            ({"messages": HELLO, "add_special_tokens": True}, [256, 256, *b"say hello"]),
            ({"messages": cut_name, "add_special_tokens": True}, [256, 256, *b"say a <"]),
        ):
            assert server.http.post("/tokenize", json=fields).json()["tokens"] == tokens
            post(server, **fields)
            assert server.engine.added[-1]["prompt"] == tokens
        for prompt, bos in (("say hi", ""), (f"{end}say hi", end), ([256, *b"say hi"], end)):
            answer = server.answer(prompt, echo=True, return_token_ids=True)
            assert answer["choices"][0]["text"] == f"{bos}say hihi"
        logprobs = server.answer("say hi", echo=True, logprobs=0)["choices"][0]["logprobs"]
        assert logprobs["tokens"][:2] == [end, "s"] and logprobs["text_offset"][:3] == [0, 0, 1]
