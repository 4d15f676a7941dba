"""
answers.py: what a choice makes of its tokens, as a table. A stream must say the same as a whole
answer, however the engine's steps cut the tokens, and whenever the client is sent something.
"""

import json
import re
from itertools import accumulate, pairwise
from types import SimpleNamespace

import orjson
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from server.answers import ChatChoice, Choice, CompletionChoice
from server.protocol import ChatRequest, CompletionRequest
from tokenizer import TextStream
from training.corpus import bpe_tokenizer

TOKENIZER = bpe_tokenizer([])  # one token per byte; 256 is <|endoftext|>
END = 256
HELLO = [{"role": "user", "content": "x"}]
LEAST = {CompletionRequest: {"prompt": "x"}, ChatRequest: {"messages": HELLO}}


def choice_of(body, prompt: list[int]) -> Choice:
    ends = (END, 254)  # several, as in Llama's config.json
    kind = ChatChoice if body.messages else CompletionChoice
    return kind(SimpleNamespace(ahead=[]), 7, body, prompt, TOKENIZER, ends)


def score(place: int, token: int, n: int) -> list:
    """
    Return a score as the engine does: [log-probability of the token, the n likeliest ids, their
    log-probabilities]. The token is the likeliest, the third, or not among the six.
    """
    likeliest = [99, 100, 101, 102, 103]
    if place % 3 < 2:
        likeliest.insert(2 * (place % 3), token)
    values = [-0.5 - place - rank for rank in range(len(likeliest))]
    own = values[likeliest.index(token)] if token in likeliest else -99.0
    return [own, likeliest[:n], values[:n]]


def scores_of(tokens: list[int], n: int | None, first: int = 0) -> list[list] | None:
    if n is None:
        return None
    return [score(first + place, token, n) for place, token in enumerate(tokens)]


def chunks_of(choice: Choice, tokens, finish_reason, cuts=(), pauses=()) -> list[dict]:
    """
    Return the chunks, decoded from JSON, that a client gets if the engine's steps end at `cuts` and
    the client is busy during `pauses`.
    """
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    chunks = []
    for step, (start, end) in enumerate(pairwise(edges)):
        part = tokens[start:end]
        scores = scores_of(part, choice.num_logprobs, start)
        n = None if step else choice.body.num_prompt_logprobs
        of_prompt = scores_of(choice.prompt[1:], n)
        reason = finish_reason if end == len(tokens) else None
        choice.add_tokens(part, reason, 3, scores, of_prompt)
        if choice.has_unsent() and (step not in pauses or choice.finish_reason):
            chunks += orjson.loads(orjson.dumps(choice.chunks()))
            choice.mark_sent()
        if choice.finish_reason:  # because of a stop string: the engine is sent an abort
            break
    assert not choice.has_unsent()
    assert choice.cached_tokens == 3
    return chunks


def rows(table: str, end="\n"):
    """Yield (fields, tokens, how the engine ends them, what is expected) for each row."""
    for row in table.strip().split(end):
        form = r"({.*}) (\[[0-9, ]+\]) (\w+) ->\s(.*)"
        fields, tokens, reason, expected = re.fullmatch(form, row, re.DOTALL).groups()
        yield json.loads(fields), json.loads(tokens), reason, json.loads(expected)


# fields, tokens, how the engine ends them -> the text, finish_reason, stop_reason, number of
# tokens. é is the two tokens 195 and 169; 255 is no character.
TEXTS = """
{} [97, 98] length -> ["ab", "length", null, 2]
{} [97, 256] stop -> ["a", "stop", null, 2]
{"ignore_eos": true} [97, 256] stop -> ["a", "stop", 256, 2]
{"stop_token_ids": [98]} [97, 98] stop -> ["a", "stop", 98, 2]
{"stop_token_ids": [254]} [97, 254] stop -> ["a", "stop", null, 2]
{"stop_token_ids": [254], "ignore_eos": true} [97, 254] stop -> ["a", "stop", 254, 2]
{} [97, 195, 169, 255, 98] length -> ["aé\\ufffdb", "length", null, 5]
{} [97, 195] length -> ["a\\ufffd", "length", null, 2]
{} [195, 256] stop -> ["\\ufffd", "stop", null, 2]
{"prompt": [97, 195]} [169, 97] length -> ["éa", "length", null, 2]
{"prompt": [97, 195]} [97] length -> ["a", "length", null, 1]
{} [97, 256, 98] length -> ["ab", "length", null, 3]
{"skip_special_tokens": false} [97, 256, 98] length -> ["a<|endoftext|>b", "length", null, 3]
{"stop": "b"} [97, 98, 99] length -> ["a", "stop", "b", 2]
{"stop": "b"} [97, 98] stop -> ["a", "stop", 98, 2]
{"stop": ["b", "ab"]} [98, 97, 98, 99] length -> ["", "stop", "b", 1]
{"stop": ["b", "ab"], "min_tokens": 1} [98, 97, 98, 99] length -> ["b", "stop", "ab", 3]
{"stop": "ba", "min_tokens": 2} [97, 98, 97, 98] length -> ["abab", "length", null, 4]
{"stop": "é"} [97, 195, 169, 98] length -> ["a", "stop", "é", 3]
{"stop": "a\\ufffd"} [97, 195] length -> ["", "stop", "a\\ufffd", 2]
{"stop": "\\ufffd"} [97, 195, 256] stop -> ["a", "stop", "\\ufffd", 3]
{"stop": "zz"} [97, 122] length -> ["az", "length", null, 2]
{"stop": "<|end"} [97, 256, 98] length -> ["ab", "length", null, 3]
{"prompt": [195, 169, 256], "echo": true} [97, 256, 98] length -> ["é<|endoftext|>ab", "length", null, 3]
{"prompt": [97, 195], "echo": true} [169] length -> ["aé", "length", null, 1]
{"prompt": [98], "echo": true, "stop": "b"} [97, 98] length -> ["ba", "stop", "b", 2]
"""  # noqa: E501


@pytest.mark.parametrize("fields, tokens, reason, expected", [*rows(TEXTS)])
def test_the_text_of_an_answer(fields, tokens, reason, expected):
    for kind in LEAST if fields.keys().isdisjoint({"prompt", "echo"}) else [CompletionRequest]:
        choice = choice_of(kind(**LEAST[kind] | fields), fields.get("prompt", [120]))
        (chunk,) = chunks_of(choice, tokens, reason)
        (answer,) = chunk["choices"]
        shown = answer["text"] if kind is CompletionRequest else answer["message"]["content"]
        ends = [answer["finish_reason"], answer["stop_reason"]]
        assert [shown, *ends, choice.num_tokens] == expected
        assert answer["index"] == 7


# Log-probabilities: the content of `logprobs`. Each token is among its candidates in completions,
# but not in chats. A token's offset is the length of the text before it.
LOGPROBS = r"""
{"prompt": [120], "logprobs": 2} [97, 98, 256] length ->
{"tokens": ["a", "b", "<|endoftext|>"], "token_logprobs": [-0.5, -3.5, -99.0], "top_logprobs": [
    {"a": -0.5, "c": -1.5}, {"c": -1.5, "d": -2.5, "b": -3.5},
    {"c": -2.5, "d": -3.5, "<|endoftext|>": -99.0}
], "text_offset": [0, 1, 2]}

{"prompt": [195, 169, 97], "logprobs": 0, "echo": true} [195, 169] length ->
{"tokens": ["bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3", "bytes:\\xa9"],
 "token_logprobs": [null, -0.5, -3.5, -0.5, -3.5], "top_logprobs": [
    null, {"bytes:\\xa9": -0.5}, {"a": -3.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -3.5}
], "text_offset": [0, 0, 1, 2, 2]}

{"messages": [{"role": "user", "content": "x"}],
 "logprobs": true, "top_logprobs": 1} [97, 169] length ->
{"content": [
    {"token": "a", "logprob": -0.5, "bytes": [97],
     "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]},
    {"token": "bytes:\\xa9", "logprob": -3.5, "bytes": [169],
     "top_logprobs": [{"token": "c", "logprob": -1.5, "bytes": [99]}]}
], "refusal": null}

{"messages": [{"role": "user", "content": "x"}], "logprobs": true} [97] length ->
{"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}], "refusal": null}
"""


@pytest.mark.parametrize("fields, tokens, reason, expected", [*rows(LOGPROBS, "\n\n")])
def test_log_probabilities(fields, tokens, reason, expected):
    body = (ChatRequest if "messages" in fields else CompletionRequest)(**fields)
    (chunk,) = chunks_of(choice_of(body, fields.get("prompt", [120])), tokens, reason)
    assert chunk["choices"][0]["logprobs"] == expected


# --------------------------------------------------------------------------------------------------
# Streams

TOKENS = st.lists(st.sampled_from([97, 98, 195, 169, 255, END]), min_size=1, max_size=9)
STOPS = st.sampled_from(["a", "b", "ba", "ab", "éa", "é", "bb"])
FIELDS = {
    "stop": st.lists(STOPS, max_size=3),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 3),
    "return_token_ids": st.booleans(),
}


def joined(chunks: list[dict]) -> dict:
    """Return the whole answer that the chunks of a stream add up to."""
    whole = {}
    for chunk in chunks:
        choice = dict(chunk["choices"][0])
        delta = choice.pop("delta", {})
        choice["text"] = choice.get("text", delta.get("content", ""))
        choice |= choice.pop("logprobs") or {}
        for name, value in choice.items():
            if name == "text" or isinstance(value, list):
                value = whole.get(name, value[:0]) + value
            whole[name] = value
    return whole


@seed(0)
@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from([*LEAST]),
    answer=st.tuples(TOKENS, st.sampled_from(["stop", "length"])),
    cuts=st.sets(st.integers(1, 8)),
    pauses=st.sets(st.integers(0, 8)),
    prompt=TOKENS,
    fields=st.fixed_dictionaries(FIELDS),
    n=st.none() | st.integers(0, 4),
    echo=st.booleans(),
)
def test_a_stream_says_the_same_however_it_is_cut(
    kind, answer, cuts, pauses, prompt, fields, n, echo
):
    is_chat = kind is ChatRequest
    if is_chat:
        fields |= {"messages": HELLO} | ({} if n is None else {"logprobs": True, "top_logprobs": n})
    else:
        fields |= {"prompt": prompt, "echo": echo, "logprobs": n}
    (whole,) = chunks_of(choice_of(kind(**fields), prompt), *answer)
    asked = fields["return_token_ids"]
    usage = {"include_usage": asked, "continuous_usage_stats": True}  # has no effect by itself
    streamed = kind(**fields, stream=True, stream_options=usage)
    chunks = chunks_of(choice_of(streamed, prompt), *answer, cuts, pauses)
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = joined([whole])
    if is_chat:
        message = expected.pop("message")
        assert message == {"role": "assistant", "content": message["content"]}
        expected["text"] = message["content"]
        roles, *deltas, last = [choice["delta"] for choice in choices]
        assert (roles, last) == ({"role": "assistant", "content": ""}, {})
        assert all(delta.keys() == {"content"} for delta in deltas)
    assert joined(chunks) == expected
    # only the last chunk has the reason
    reasons = [choice["stop_reason"] for choice in choices if choice["finish_reason"] is None]
    assert reasons == [None] * (len(chunks) - 1)
    # the prompt's ids come once; all tokens come; the usage of each chunk counts the tokens so far
    first, *others = chunks if is_chat else choices
    assert first.get("prompt_token_ids") == (prompt if asked else None)
    assert not any("prompt_token_ids" in other for other in others)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    tokens = [choice["token_ids"] for choice in choices if asked]
    assert counts == [*accumulate(map(len, tokens))]


def test_scores_of_a_prompt_come_with_one_of_its_choices():
    """
    Only one row has them, in any order, but all choices get them. An echo waits for them.
    Previously, if a grammar refused that choice's first token, a stream sent the others without.
    """
    body = CompletionRequest(prompt=[[97, 98]], n=2, echo=True, logprobs=0, stream=True)
    first, second = choices = [choice_of(body, [97, 98]) for _ in range(2)]
    for choice in choices:
        choice.siblings = choices
    assert not first.has_unsent()
    unscored = CompletionRequest(prompt=[[97, 98]], echo=True, stream=True)
    assert choice_of(unscored, [97, 98]).has_unsent()
    second.add_tokens([99], "length", 0, scores_of([99], 0))
    assert not second.has_unsent()
    first.add_tokens([100], None, 0, scores_of([100], 0), scores_of([98], 0))
    for choice, token in zip(choices, "dc", strict=True):
        (chunk,) = choice.chunks()
        logprobs = chunk["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b", token]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5]


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"logprobs": 0}])
def test_a_token_without_text_is_news_only_where_tokens_are_asked_for(fields):
    choice = choice_of(CompletionRequest(prompt="x", stream=True, **fields), [97])
    unsent = []
    for token, reason in ((0xC3, None), (0xA9, None), (END, "stop")):
        choice.add_tokens([token], reason, 0, scores_of([token], choice.num_logprobs))
        unsent.append(choice.has_unsent())
        choice.mark_sent()
        assert not choice.has_unsent()
    assert unsent == [bool(fields), True, True]


def test_a_long_echo_is_text_at_once(monkeypatch):
    """Previously 128 choices with a prompt of 30,000 tokens were decoded token by token."""
    body = CompletionRequest(prompt="x", echo=True, stop="x")
    prompt = [*("xé€".encode() * 500)[:-1]]
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", lambda *_: 1 / 0)
        choice = choice_of(body, prompt)
    assert choice.text == "xé€" * 499 + "xé"
    choice.add_tokens([0xAC, ord("y")], "length", 0)  # this character began in the prompt
    assert choice.text == "xé€" * 500 + "y"
