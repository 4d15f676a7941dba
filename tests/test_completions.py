"""
What /v1/completions answers: fields, streams, usage, several prompts, echoes and log-probabilities.
"""

import json
import threading
import time

import pytest
from server import EOS, HELLO, ByteTokenizer, read_until, text_of

from serving import answers
from serving.answers import CompletionChoice
from serving.protocol import CompletionRequest
from tokenizer import TextStream


def test_whole_answer_has_exactly_these_fields(server):
    answer = server.answer("say hello", model="fake")
    assert answer.pop("id").startswith("cmpl-") and abs(answer.pop("created") - time.time()) < 60
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 6,  # the end of text is a token too
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_stream_says_the_same_in_pieces(server):
    events = server.stream("say hello", stream_options={"include_usage": True})
    assert (
        events[-1] == "[DONE]"
        and len({(event["id"], event["created"]) for event in events[:-1]}) == 1
    )
    assert text_of(events) == "hello"
    *chunks, last = events[:-1]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (
        len(chunks) - 1
    ) + ["stop"]
    assert last["choices"] == [] and last["usage"] == server.answer("say hello")["usage"]


def test_stream_without_usage_never_mentions_it(server):
    assert all("usage" not in event for event in server.stream() if event != "[DONE]")
    alone = server.stream(
        stream_options={"continuous_usage_stats": True}
    )  # means nothing alone, as in vLLM
    assert all("usage" not in event for event in alone if event != "[DONE]")


def test_usage_may_be_in_every_chunk(server):
    """
    guidellm counts tokens by it; every request of it was refused. Each chunk has that of its own
    choice.
    """
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = server.stream(["say one", "say three"], stream_options=options)
    for index, (prompt_tokens, count) in enumerate([(7, 4), (9, 6)]):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(set(counts)) and counts[-1] == count  # more with each chunk
        assert all(usage["prompt_tokens"] == prompt_tokens for usage in usages)
        assert all(
            usage["total_tokens"] == prompt_tokens + usage["completion_tokens"] for usage in usages
        )
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10 and done == "[DONE]"


def test_parameters_reach_the_engine(server):
    fields = {
        "temperature": 0.0,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 7,
        "stop_token_ids": [1],
        "ignore_eos": True,
    }
    fields |= {
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
    }
    fields |= {"allowed_token_ids": [3], "logprobs": 4, "logit_bias": {"5": 1.5}}
    server.post(**fields, top_k=-1, n=2, prompt_logprobs=6, priority=-7, cache_salt="s")
    added = server.engine.added[-1]
    assert added["params"] == fields | {"top_k": 0, "max_tokens": 1000}
    assert added["options"].pop("name") != ""  # its X-Request-Id
    assert added["options"] == {"n": 2, "priority": -7, "cache_salt": ":s", "prompt_logprobs": 6}


def test_a_text_at_its_limit_ends_for_its_length(server):
    answer = server.answer("say hello", max_tokens=2)
    assert (
        answer["choices"][0]["finish_reason"] == "length" and answer["choices"][0]["text"] == "he"
    )


def test_characters_arrive_whole(server):
    """Each of these characters is two to four tokens; no event may show a part of one."""
    text = "é€😀" * 20
    events = server.stream("say " + text)
    assert text_of(events) == text
    assert all("\ufffd" not in event["choices"][0]["text"] for event in events[:-1])


def test_half_a_character_at_the_end_becomes_the_replacement_character(server):
    assert server.answer("say a€", max_tokens=3)["choices"][0]["text"] == "a\ufffd"


def test_several_prompts_in_one_call_are_answered_in_their_order(server):
    answer = server.answer(["say one", "say three"])
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "one"), (1, "three")]
    assert answer["usage"]["prompt_tokens"] == 16 and answer["usage"]["completion_tokens"] == 10
    events = server.stream(["say one", "say three"])
    assert (text_of(events, 0), text_of(events, 1)) == ("one", "three")


def test_prompts_may_be_token_ids(server):
    ids = [list(b"say one"), list(b"say two")]
    assert server.answer(ids[0])["choices"][0]["text"] == "one"
    assert [c["text"] for c in server.answer(ids)["choices"]] == ["one", "two"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt(server, stream):
    def text(*args, **fields):
        return text_of(
            server.stream(*args, **fields) if stream else [server.answer(*args, **fields)]
        )

    assert text("say hi", echo=True) == "say hihi"
    before = len(server.engine.added)
    assert text("say hi", echo=True, max_tokens=0) == "say hi"
    assert len(server.engine.added) == before  # nothing to compute
    assert text(list("say €".encode())[:-1], echo=True, max_tokens=0) == "say \ufffd"


def test_a_long_echo_is_text_at_once(monkeypatch):
    """
    128 choices that begin with a prompt of 30,000 tokens were spelled token by token, with nobody
    else served.
    """
    request, prompt = (
        CompletionRequest(prompt="x", echo=True, stop="x"),
        list("xé€".encode() * 500)[:-1],
    )
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", lambda *_: 1 / 0)
        choice = CompletionChoice(None, 0, request, prompt, ByteTokenizer(), [EOS])
    assert choice.text == "xé€" * 499 + "xé"
    choice.add_tokens(
        [0xAC, ord("y")], "length", 0
    )  # the character that began in the prompt ends in the answer
    assert choice.text == "xé€" * 500 + "y"


def test_token_ids_are_in_the_answer_if_asked_for(server):
    choice = server.answer("say ab", return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == list(b"say ab") and choice["token_ids"] == [*b"ab", EOS]
    chunks = [event["choices"][0] for event in server.stream("say ab", return_token_ids=True)[:-1]]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == [*b"ab", EOS]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [list(b"say ab")] + [None] * (
        len(chunks) - 1
    )


def test_request_id_names_the_answer_and_may_repeat(server):
    """Two clients may choose the same name; inside, requests have names of their own."""
    first, second = (
        server.connect(prompt="loop", max_tokens=300, request_id="x"),
        server.answer(request_id="x"),
    )
    assert second["id"] == "cmpl-x" and second["choices"][0]["text"] == "hi"
    assert b'"cmpl-x"' in read_until(first, b"}}}")


def test_choices_of_several_prompts_are_prompt_major(server):
    """
    Prompt-major: all choices of the first prompt, then those of the second. A prompt is charged
    once.
    """
    answer = server.answer(["say a", "say bc"], n=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a"),
        (1, "a"),
        (2, "bc"),
        (3, "bc"),
    ]
    assert answer["usage"]["prompt_tokens"] == 11 and answer["usage"]["completion_tokens"] == 2 * (
        2 + 3
    )
    events = server.stream(["say a", "say bc"], n=2)
    assert [text_of(events, index) for index in range(4)] == ["a", "a", "bc", "bc"]


def test_logprobs_are_four_lists_of_the_same_tokens(server):
    """
    Four lists; the token itself is among its candidates even where it is none of the likeliest;
    bytes that are no character are spelled out, and offsets count characters of the text.
    """
    choice = server.answer("say a€b", logprobs=1)["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "<end>"],
        "token_logprobs": [-2.0] * 6,
        "top_logprobs": [
            {"b": -1.0, "a": -2.0},
            {"bytes:\\xe3": -1.0, "bytes:\\xe2": -2.0},
            {"bytes:\\x83": -1.0, "bytes:\\x82": -2.0},
            {"bytes:\\xad": -1.0, "bytes:\\xac": -2.0},
            {"c": -1.0, "b": -2.0},
            {"\0": -1.0, "<end>": -2.0},
        ],
        "text_offset": [0, 1, 1, 1, 2, 3],
    }  # fmt: skip
    assert server.answer("say a", logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] == [
        {"a": -2.0},
        {"<end>": -2.0},
    ]


def test_streamed_logprobs_are_the_same(server):
    """Each token's once, though its text may be held back for a while."""
    fields = {"logprobs": 3, "echo": True, "stop": ["xyz", "!"]}
    whole = server.answer("say a€bxy b", **fields)["choices"][0]["logprobs"]
    chunks = [
        event["choices"][0]["logprobs"] for event in server.stream("say a€bxy b", **fields)[:-1]
    ]
    assert {name: [x for chunk in chunks for x in chunk[name]] for name in whole} == whole


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_many_log_probabilities_are_told_beside_the_event_loop(chat, monkeypatch, path, stream):
    """
    12,000 prompt tokens with 20 log-probabilities each took 1.9 s to tell, in which nobody else was
    served. A thread tells them now, piece by piece, and says the same.
    """
    call = {
        "prompt": "say hello",
        "echo": True,
        "logprobs": 3,
        "prompt_logprobs": None if stream else 2,
    }
    if path != "/v1/completions":
        call = {
            "messages": HELLO,
            "logprobs": True,
            "top_logprobs": 3,
            "prompt_logprobs": None if stream else 2,
        }
    call |= {
        "max_tokens": 50,
        "n": 2,
        "stream": stream,
        "return_token_ids": True,
        "request_id": "r",
    }
    said, threads = [], []
    encode = answers.long_json
    monkeypatch.setattr(
        answers,
        "long_json",
        lambda value: threads.append(threading.current_thread()) or encode(value),
    )
    monkeypatch.setattr(answers, "PIECE", 2)
    for number in (10**6, 0):
        monkeypatch.setattr(answers, "SCORES_IN_PLACE", number)
        text = chat.http.post(path, json=call).text
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        answer = events if stream else [json.loads(text)]
        by_index = {0: [], 1: []}
        for event in answer:
            for choice in event["choices"]:
                by_index[choice["index"]].append(choice)
        said.append(
            (
                by_index if not stream else joined(by_index),
                answer[0].keys(),
                answer[-1].get("usage"),
            )
        )
        assert bool(threads) == (number == 0)
    assert said[0] == said[1] and chat.thread not in threads


def joined(by_index: dict[int, list[dict]]) -> tuple:
    """What the chunks of each choice say together, however many they are."""
    texts = {
        i: "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in own)
        for i, own in by_index.items()
    }
    ids = {i: [token for c in own for token in c["token_ids"]] for i, own in by_index.items()}
    parts = {i: [c["logprobs"] for c in own if c["logprobs"]] for i, own in by_index.items()}
    scores = {
        i: {name: [x for part in own for x in part[name] or []] for name in own[0]}
        for i, own in parts.items()
    }
    return texts, ids, scores


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_with_logprobs_scores_the_prompt(server, max_tokens):
    """
    What evaluation harnesses ask for: the prompt's log-probabilities, the first one null as nothing
    predicts it.
    """
    answer = server.answer(["say x", "say y"], echo=True, logprobs=2, max_tokens=max_tokens, n=2)
    for choice, text in zip(answer["choices"], "xxyy", strict=True):
        logprobs, total = choice["logprobs"], 5 + max_tokens
        assert choice["text"] == f"say {text}" + text * max_tokens
        assert logprobs["tokens"] == list(choice["text"]) and logprobs["text_offset"] == list(
            range(total)
        )
        assert logprobs["token_logprobs"] == [None] + [-2.0] * (total - 1)
        assert logprobs["top_logprobs"][:2] == [None, {"b": -1.0, "c": -2.0, "a": -2.0}]
    assert answer["usage"]["completion_tokens"] == 4 * max_tokens


def test_a_streamed_echo_waits_for_its_prompts_scores(server):
    """
    One prompt's tokens came while the other's scores were still to come: its echo had none, a 500.
    """
    fields = {"echo": True, "logprobs": 0, "max_tokens": 2}
    for _ in range(10):
        events = server.stream(["say x and so on", "y"], **fields)
        assert events[-1] == "[DONE]"
        for index, start in enumerate(["say x and so on", "y"]):
            choices = [c for event in events[:-1] for c in event["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in choices).startswith(start)


def test_prompt_logprobs_have_vllms_shape(server):
    """vLLM's shape, whole answers only."""
    places = server.answer([1, 2], prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert places == [
        None,
        {
            "3": {"logprob": -1.0, "rank": 1, "decoded_token": "\x03"},
            "2": {"logprob": -2.0, "rank": None, "decoded_token": "\x02"},
        },
    ]


def test_control_tokens_have_text_when_asked(server):
    fields = {"include_stop_str_in_output": True}
    assert server.answer("say a", **fields)["choices"][0]["text"] == "a"
    assert (
        server.answer("say a", **fields, skip_special_tokens=False)["choices"][0]["text"]
        == "a<end>"
    )
