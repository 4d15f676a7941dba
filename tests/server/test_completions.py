"""
/v1/completions and /v1/chat/completions over HTTP, as a table: the fields of a call, whose prompt
is the fake engine's script, and the answer, which says the same whole and as a stream.
"""

import json
import time

import pytest
from fake_server import EOS, HELLO, ByteTokenizer, Server, read_until

from server.answers import CompletionChoice
from server.protocol import CompletionRequest
from tokenizer import TextStream

CHAT = {"messages": HELLO}


def post(server, **body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = server.http.post(path, json={"max_tokens": 1000} | body)
    assert response.status_code == 200, response.text
    return response


def stream(server, **body) -> list[dict]:
    """The events of a stream, which share id and date, but for the end."""
    response = post(server, stream=True, **body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    events = [*map(json.loads, events)]
    assert done == "[DONE]" and len({(event["id"], event["created"]) for event in events}) == 1
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


SAY_TWO = {"prompt": ["say a", "say bc"], "n": 2}
TWO = "say oneTWO" + "more" * 500
STOP = {"stop": ["zzz", "TW"]}
MIXED = "é€😀" * 20
ANSWERS = [  # fields, the choices' texts, their reasons, tokens of all prompts and of all answers
    ({"prompt": "say hello"}, ["hello"], "stop", None, 9, 6),  # the end of text is a token too
    ({"prompt": "say hello", "max_tokens": 2}, ["he"], "length", None, 9, 2),
    ({"prompt": f"say {MIXED}"}, [MIXED], "stop", None, 184, 181),
    ({"prompt": "say a€", "max_tokens": 3}, ["a\ufffd"], "length", None, 8, 3),
    ({"prompt": [*b"say one"]}, ["one"], "stop", None, 7, 4),
    ({"prompt": [[*b"say one"], [*b"say two"]]}, ["one", "two"], "stop", None, 14, 8),
    (SAY_TWO, ["a", "a", "bc", "bc"], "stop", None, 11, 10),  # a prompt is counted once
    ({"prompt": "say hi", "echo": True}, ["say hihi"], "stop", None, 6, 3),
    ({"prompt": "say hi", "echo": True, "max_tokens": 0}, ["say hi"], "length", None, 6, 0),
    ({"prompt": [*b"s\xe2\x82"], "echo": True, "max_tokens": 0}, ["s\ufffd"], "length", None, 3, 0),
    ({"prompt": TWO} | STOP, ["one"], "stop", "TW", 2010, 5),
    ({"prompt": TWO.replace("say", "say3")} | STOP, ["one"], "stop", "TW", 2011, 5),
    ({"prompt": "say abc", "stop": "cde"}, ["abc"], "stop", None, 7, 4),
    ({"prompt": "say abab", "stop": "b", "min_tokens": 2}, ["aba"], "stop", "b", 8, 4),
    ({"prompt": "say abab", "stop": "ba", "min_tokens": 2}, ["abab"], "stop", None, 8, 5),
    ({"prompt": "say abc", "stop_token_ids": [98]}, ["a"], "stop", 98, 7, 2),
    (CHAT, ["hello"], "stop", None, 9, 6),
    (CHAT | {"n": 2, "max_tokens": 3}, ["hel", "hel"], "length", None, 9, 6),
]


@pytest.mark.parametrize("fields, texts, reason, stop_reason, asked, answered", ANSWERS)
def test_answers(chat, fields, texts, reason, stop_reason, asked, answered):
    answer = post(chat, **fields).json()
    assert summary([answer]) == [(text, reason, stop_reason, {}) for text in texts]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (asked, answered)
    *events, last = stream(chat, **fields, stream_options={"include_usage": True})
    assert summary(events) == summary([answer])
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in events)
    assert last["choices"] == [] and last["usage"] == usage


A = [97, 226, 130, 172, EOS]
NAMES = ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<end>"]
TOP = ["b", "bytes:\\xe3", "bytes:\\x83", "bytes:\\xad", "\0"]
WITH_TOP = [{top: -1.0, name: -2.0} for top, name in zip(TOP, NAMES, strict=True)]
SCORES = {
    "tokens": NAMES, "token_logprobs": [-2.0] * 5, "top_logprobs": WITH_TOP,
    "text_offset": [0, 1, 1, 1, 2],
}  # fmt: skip
ECHO = {
    "tokens": [*"say x"], "token_logprobs": [None, *[-2.0] * 4],
    "top_logprobs": [None, *({name: -2.0} for name in "ay x")], "text_offset": [0, 1, 2, 3, 4],
}  # fmt: skip
NEXT = {"token": "i", "logprob": -1.0, "bytes": [105]}
H = {"token": "h", "logprob": -2.0, "bytes": [104]}
SCORED = [
    ({"prompt": "say a€", "logprobs": 1}, SCORES),
    ({"prompt": "say x", "echo": True, "logprobs": 0, "max_tokens": 0}, ECHO),
    (
        CHAT | {"logprobs": True, "top_logprobs": 1, "max_tokens": 1},
        {"content": [H | {"top_logprobs": [NEXT]}], "refusal": []},
    ),
    (
        CHAT | {"logprobs": True, "max_tokens": 1},
        {"content": [H | {"top_logprobs": []}], "refusal": []},
    ),
]


@pytest.mark.parametrize("fields, logprobs", SCORED)
def test_log_probabilities(chat, fields, logprobs):
    """A token's offset counts characters; bytes that are no character are spelled out."""
    ((*_, found),) = summary([post(chat, **fields).json()])
    assert found == logprobs
    ((*_, found),) = summary(stream(chat, **fields))
    assert found == logprobs


def test_streamed_echoes_wait_for_their_prompts_scores(server):
    """One prompt's tokens came while the other's scores were still to come: a 500."""
    fields = {"prompt": ["say x and so on", "y"], "echo": True, "logprobs": 0, "max_tokens": 2}
    for _ in range(10):
        found = summary(stream(server, **fields))
        for (text, *_, lists), prompt in zip(found, fields["prompt"], strict=True):
            assert text.startswith(prompt) and "".join(lists["tokens"]) == text


WHOLE = {
    "object": "text_completion",
    "model": "fake",
    "choices": [
        {
            "index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": {
        "prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}  # fmt: skip
IDS = {"token_ids": [*b"hello", EOS], "prompt_token_ids": [*b"say hello"]}


def test_whole_answers_have_exactly_these_fields(chat):
    (text_choice,) = WHOLE["choices"]
    chat_choice = text_choice | {"message": {"role": "assistant", "content": "hello"}}
    del chat_choice["text"]
    for fields, prefix, expected in (
        ({"prompt": "say hello"}, "cmpl-", WHOLE),
        (CHAT, "chatcmpl-", WHOLE | {"object": "chat.completion", "choices": [chat_choice]}),
    ):
        answer = post(chat, model="fake", **fields, request_id="x").json()
        assert answer.pop("id") == f"{prefix}x" and abs(answer.pop("created") - time.time()) < 60
        assert answer == expected
        with_ids = post(chat, **fields, return_token_ids=True).json()
        (choice,) = with_ids["choices"]
        assert {name: (choice | with_ids)[name] for name in IDS} == IDS


def test_usage_may_be_in_every_chunk(chat):
    """guidellm counts tokens by it. Each chunk has that of its own choice; a role costs none."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"prompt": ["say one", "say three"]}
    for call, asked, least, answered in ((fields, [7, 9], 1, [4, 6]), (CHAT, [9], 0, [6])):
        *events, last = stream(chat, **call, stream_options=options)
        for index, (prompt_tokens, count) in enumerate(zip(asked, answered, strict=True)):
            usages = [e["usage"] for e in events if e["choices"][0]["index"] == index]
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts) and counts[0] >= least and counts[-1] == count
            assert all(usage["prompt_tokens"] == prompt_tokens for usage in usages)
        assert last["usage"]["completion_tokens"] == sum(answered)
    for alone in ({}, {"stream_options": {"continuous_usage_stats": True}}):
        assert all("usage" not in event for event in stream(chat, **CHAT, **alone))


def test_a_chats_stream_begins_with_the_role_and_ends_with_the_reason(chat):
    events = stream(chat, **CHAT, return_token_ids=True)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert all(delta.keys() == {"content"} for delta in deltas[1:-1])
    assert [token for choice in choices for token in choice["token_ids"]] == IDS["token_ids"]
    assert [e.get("prompt_token_ids") for e in events[:2]] == [IDS["prompt_token_ids"], None]


def test_a_path_that_is_not_utf_8_names_its_model(uvicorn_ends_soon):
    """Python has lone surrogates for its bytes, which are no JSON."""
    with Server("--served-model-name", "a\udcff") as server:
        assert server.answer()["model"] == "a?"


def test_a_request_id_may_repeat(server):
    """Two clients may choose the same name; inside, requests have names of their own."""
    first = server.connect(prompt="loop", max_tokens=300, request_id="x")
    assert server.answer(request_id="x")["choices"][0]["text"] == "hi"
    assert b'"cmpl-x"' in read_until(first, b"}}}")


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


# The calls of `vllm bench serve` (vLLM's commit 02cfb53): --backend openai and openai-chat.
BENCH = {"stream_options": {"include_usage": True}, "max_tokens": 4}
BENCH_TEXT = {"prompt": "say hello", "repetition_penalty": 1.0, "logprobs": None}
BENCH_CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}


@pytest.mark.parametrize("call", [BENCH_TEXT, BENCH_CHAT])
@pytest.mark.parametrize("more", [{}, {"ignore_eos": True, "temperature": 0.0}])
def test_vllms_load_generator_counts_its_tokens(chat, call, more):
    """It needs a chunk with a choice, and a last one that has a usage and no choice."""
    *events, last = stream(chat, **BENCH, **call, **more)
    assert any(event["choices"] for event in events)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
