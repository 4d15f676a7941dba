"""
answers.py: what a client is told of an answer, against a reference that has the whole answer at
once. However the engine's steps cut the tokens, and whenever the client is told, the pieces
together say what the reference says.
"""

import codecs
import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.answers import CHOICES, Choice
from serving.protocol import ChatRequest, CompletionRequest
from training.corpus import bpe_tokenizer

TOKENIZER = bpe_tokenizer([])  # a token a byte, and 256 is <|endoftext|>
END = 256
BYTES = [*b"ab", *"é".encode(), 0xFF, END]  # é is two tokens, 0xFF is no character
SPELLING = {
    97: "a",
    98: "b",
    0xC3: "bytes:\\xc3",
    0xA9: "bytes:\\xa9",
    0xFF: "bytes:\\xff",
    END: "<|endoftext|>",
}


def choice_of(request, prompt: list[int], index: int = 0) -> Choice:
    return CHOICES[type(request)](None, index, request, prompt, TOKENIZER, [END])


def whole(choices: list[Choice]) -> dict:
    """An answer that is no stream, without its head and usage."""
    chunks = [chunk for choice in choices for chunk in choice.chunks()]
    assert len(chunks) == len(choices)
    return chunks[0] | {"choices": [choice for chunk in chunks for choice in chunk["choices"]]}


def decoded(data: bytes, final: bool = False) -> str:
    """The characters that are whole."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def score(place: int, token: int) -> list:
    """
    As the engine's: [log-probability of the token, the likeliest ids, their log-probabilities],
    more than anybody asks for. The token is the likeliest, the third, or none of these; one that
    cannot be has -inf.
    """
    likeliest = [[token, 99, 100, 101, 102], [99, 100, token, 101, 102], [99, 100, 101, 102, 103]][
        place % 3
    ]
    values = [-0.5 - place, -1.5 - place, -2.5 - place, -3.5 - place, -math.inf]
    own = values[likeliest.index(token)] if token in likeliest else -math.inf
    return [own, likeliest, values]


def wanted_candidates(token: int, scored: list, n: int) -> list[tuple[int, float]]:
    """
    The n likeliest and, where it is none of them, the token itself, with what JSON has for minus
    infinity.
    """
    own, ids, values = scored
    found = [(i, value) for i, value in zip(ids, values, strict=True) if ids.index(i) < n]
    found += [(token, own)] if token not in ids[:n] else []
    return [(i, -9999.0 if value == -math.inf else value) for i, value in found]


def name(token: int) -> str:
    return SPELLING.get(token) or chr(token)


class Reference:
    """The answer of which a choice is to tell, computed from all its tokens at once."""

    def __init__(self, request, prompt: list[int], tokens: list[int], finish_reason: str):
        self.request, self.prompt = request, prompt
        spell = TOKENIZER.token_bytes if request.skip_special_tokens else TOKENIZER.spelled_bytes
        pieces = list(map(TOKENIZER.spelled_bytes if request.echo else spell, prompt))
        num_echoed = len(pieces) if request.echo else 0
        pieces += map(spell, tokens)
        if finish_reason == "stop" and not request.include_stop_str_in_output:
            pieces[-1] = b""
        texts = [decoded(b"".join(pieces[:count])) for count in range(len(pieces) + 1)]
        texts.append(decoded(b"".join(pieces), final=True))
        if not request.echo:  # an answer completes a character that the prompt has begun
            begun, behind = decoded(b"".join(pieces[: len(prompt)]), final=True), texts[len(prompt)]
            texts = [
                text.removeprefix(begun if text.startswith(begun) else behind)
                for text in texts[len(prompt) :]
            ]
        self.tokens, self.text = tokens, texts.pop()
        self.finish_reason, self.stop_reason = finish_reason, None
        if finish_reason == "stop" and (request.ignore_eos or tokens[-1] != END):
            self.stop_reason = tokens[-1]
        searched_from = len(texts[num_echoed:][: request.min_tokens + 1][-1])
        self.end_at_stop_string(texts[num_echoed:], searched_from)
        places = len(self.tokens) + (num_echoed if request.num_logprobs is not None else 0)
        self.offsets = [
            len(text) for text in texts[num_echoed + len(self.tokens) - places :][:places]
        ]

    def end_at_stop_string(self, texts: list[str], searched_from: int):
        for end in range(searched_from + 1, len(texts[-1]) + 1):
            found = [
                stop for stop in self.request.stop if texts[-1][searched_from:end].endswith(stop)
            ]
            if found:
                stop = max(found, key=len)
                self.finish_reason, self.stop_reason = "stop", stop
                self.text = texts[-1][
                    : end if self.request.include_stop_str_in_output else end - len(stop)
                ]
                count = next(count for count, text in enumerate(texts) if len(text) >= end)
                self.tokens = self.tokens[:count]
                return

    @property
    def scores(self) -> list:
        return [score(place, token) for place, token in enumerate(self.tokens)]

    def text_logprobs(self, n: int) -> dict:
        tokens, scores = self.tokens, self.scores
        if self.request.echo:
            tokens, scores = self.prompt + tokens, [None, *prompt_scores(self.prompt), *scores]
        found = [
            s and wanted_candidates(token, s, n) for token, s in zip(tokens, scores, strict=True)
        ]
        return {
            "tokens": [name(token) for token in tokens],
            "token_logprobs": [
                f and dict(f)[token] for token, f in zip(tokens, found, strict=True)
            ],
            "top_logprobs": [f and {name(i): value for i, value in f} for f in found],
            "text_offset": self.offsets,
        }

    def chat_logprobs(self, n: int) -> list:
        def entry(token: int, value: float) -> dict:
            return {
                "token": name(token),
                "logprob": value,
                "bytes": list(TOKENIZER.spelled_bytes(token)),
            }

        content = []
        for token, s in zip(self.tokens, self.scores, strict=True):
            found = wanted_candidates(token, s, n)
            content.append(
                entry(token, dict(found)[token]) | {"top_logprobs": [entry(*f) for f in found[:n]]}
            )
        return content


def prompt_scores(prompt: list[int]) -> list[list]:
    return [score(place, token) for place, token in enumerate(prompt[1:])]


TOKENS = st.lists(st.sampled_from(BYTES), min_size=1, max_size=9)
FIELDS = st.fixed_dictionaries(
    {
        "stop": st.lists(st.sampled_from(["a", "b", "ba", "ab", "éa", "é", "bb"]), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 3),
        "return_token_ids": st.booleans(),
    }
)
CANDIDATES = st.none() | st.integers(0, 4)
ANSWERS = {
    "prompt": TOKENS,
    "tokens": TOKENS,
    "finish_reason": st.sampled_from(["stop", "length"]),
    "cuts": st.sets(st.integers(1, 8)),
    "pauses": st.sets(st.integers(0, 8)),
    "fields": FIELDS,
    "candidates": CANDIDATES,
}


def told(
    choice: Choice, tokens: list[int], finish_reason: str, cuts: set, pauses: set
) -> list[dict]:
    """
    The chunks that a client gets if the engine's steps end at `cuts`, and the client is busy during
    `pauses`.
    """
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    chunks = []
    for step, (start, end) in enumerate(pairwise(edges)):
        scores = [score(start + place, token) for place, token in enumerate(tokens[start:end])]
        reason = finish_reason if end == len(tokens) else None
        choice.add_tokens(
            tokens[start:end],
            reason,
            3,
            scores,
            prompt_scores(choice.prompt) if step == 0 else None,
        )
        if choice.has_unsent() and (step not in pauses or choice.finish_reason):
            chunks += choice.chunks()
            choice.mark_sent()
        if choice.finish_reason:  # of a stop string: the engine is told to end it
            break
    assert not choice.has_unsent() and choice.cached_tokens == 3
    json.dumps(chunks, allow_nan=False)
    return chunks


def check_the_ends(chunks: list[dict], wanted: Reference):
    """
    Only the last chunk says how it ended, each says how many tokens there were until then, with
    their ids.
    """
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {choice["index"] for choice in choices} == {7}
    reasons = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices]
    assert reasons == [(None, None)] * (len(chunks) - 1) + [
        (wanted.finish_reason, wanted.stop_reason)
    ]
    request = wanted.request
    if request.return_token_ids:
        ids = [choice["token_ids"] for choice in choices]
        assert [token for own in ids for token in own] == wanted.tokens
        counts = [sum(map(len, ids[: i + 1])) for i in range(len(ids))]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == counts
    assert chunks[-1]["usage"] == {
        "prompt_tokens": len(wanted.prompt), "completion_tokens": len(wanted.tokens),
        "total_tokens": len(wanted.prompt) + len(wanted.tokens),
    }  # fmt: skip
    assert all(("token_ids" in choice) == request.return_token_ids for choice in choices)


IN_CHUNKS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


@settings(max_examples=200, deadline=None)
@given(echo=st.booleans(), prompt_logprobs=CANDIDATES, **ANSWERS)
def test_a_completion_says_the_same_however_it_is_cut(
    prompt, tokens, finish_reason, cuts, pauses, fields, candidates, echo, prompt_logprobs
):
    fields = {"prompt": prompt, "echo": echo, "logprobs": candidates} | fields
    request = CompletionRequest(**fields, **IN_CHUNKS)
    wanted = Reference(request, prompt, tokens, finish_reason)
    chunks = told(choice_of(request, prompt, 7), tokens, finish_reason, cuts, pauses)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == wanted.text
    check_the_ends(chunks, wanted)
    assert [choice.get("prompt_token_ids") for choice in choices] == [
        prompt if request.return_token_ids else None, *[None] * (len(chunks) - 1)
    ]  # fmt: skip
    logprobs = None if candidates is None else wanted.text_logprobs(candidates)
    if logprobs is None:
        assert all(choice["logprobs"] is None for choice in choices)
    else:
        assert {
            key: [x for choice in choices for x in choice["logprobs"][key]] for key in logprobs
        } == logprobs
    # the same at once
    request = CompletionRequest(**fields, prompt_logprobs=prompt_logprobs)
    choice = choice_of(request, prompt, 7)
    scores = [score(*item) for item in enumerate(tokens)]
    choice.add_tokens(tokens, finish_reason, 3, scores, prompt_scores(prompt))
    answer = {
        "text": wanted.text,
        "index": 7,
        "logprobs": logprobs,
        "finish_reason": wanted.finish_reason,
    }
    answer["stop_reason"] = wanted.stop_reason
    if request.return_token_ids:
        answer |= {"token_ids": wanted.tokens, "prompt_token_ids": prompt}
    if prompt_logprobs is not None:
        answer["prompt_logprobs"] = wanted_prompt_logprobs(prompt, prompt_logprobs)
    assert whole([choice]) == {"choices": [answer]}


def wanted_prompt_logprobs(prompt: list[int], n: int) -> list[dict | None]:
    places = [None]
    for token, scored in zip(prompt[1:], prompt_scores(prompt), strict=True):
        ranks = [
            *range(1, n + 1),
            None,
        ]  # of a token that is none of the likeliest the rank is not known
        found = zip(wanted_candidates(token, scored, n), ranks, strict=False)
        places.append(
            {
                str(i): {"logprob": p, "rank": rank, "decoded_token": name(i)}
                for (i, p), rank in found
            }
        )
    return places


@settings(max_examples=200, deadline=None)
@given(**ANSWERS)
def test_a_chat_says_the_same_however_it_is_cut(
    prompt, tokens, finish_reason, cuts, pauses, fields, candidates
):
    fields = {"messages": [{"role": "user", "content": "x"}], **fields}
    fields |= {} if candidates is None else {"logprobs": True, "top_logprobs": candidates}
    request = ChatRequest(**fields, **IN_CHUNKS)
    wanted = Reference(request, prompt, tokens, finish_reason)
    chunks = told(choice_of(request, prompt, 7), tokens, finish_reason, cuts, pauses)
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert all(delta.keys() == {"content"} for delta in deltas[1:-1])
    assert "".join(delta["content"] for delta in deltas[:-1]) == wanted.text
    check_the_ends(chunks, wanted)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        prompt if request.return_token_ids else None, *[None] * (len(chunks) - 1)
    ]  # fmt: skip
    logprobs = (
        None
        if candidates is None
        else {"content": wanted.chat_logprobs(candidates), "refusal": None}
    )
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [x for part in parts for x in part["content"]] == (
        logprobs["content"] if logprobs else []
    )
    # the same at once
    choice = choice_of(ChatRequest(**fields), prompt, 7)
    choice.add_tokens(tokens, finish_reason, 3, [score(*item) for item in enumerate(tokens)])
    message = {"role": "assistant", "content": wanted.text}
    answer = {
        "message": message,
        "index": 7,
        "logprobs": logprobs,
        "finish_reason": wanted.finish_reason,
    }
    answer["stop_reason"] = wanted.stop_reason
    ids = {"prompt_token_ids": prompt} if request.return_token_ids else {}
    answer |= {"token_ids": wanted.tokens} if request.return_token_ids else {}
    assert whole([choice]) == {"choices": [answer], **ids}


@pytest.mark.parametrize(
    ("n", "found"), [(0, ["b"]), (1, ["y", "b"]), (3, ["y", "b", "x"]), (9, ["y", "b", "x"])]
)
def test_a_request_is_told_its_own_number_of_candidates(n, found):
    """A step scores as many candidates as any of its requests wants: the others got as many."""
    request = CompletionRequest(prompt="p", logprobs=n, max_tokens=1)
    choice = choice_of(request, [97])
    choice.add_tokens([98], "length", 0, [[-2.0, [121, 98, 120], [-1.0, -2.0, -3.0]]])
    (top,) = whole([choice])["choices"][0]["logprobs"]["top_logprobs"]
    assert [*top] == found and top["b"] == -2.0


def test_each_answer_has_its_own_prompt():
    """
    Of several prompts in a call; and all choices of a prompt share its scores, which come with the
    first token of one of them.
    """
    request = CompletionRequest(
        prompt=["x", "y"], n=2, return_token_ids=True, prompt_logprobs=0, max_tokens=1
    )
    choices = []
    for prompt in ([97, 98], [98, 97, 97]):
        siblings = [choice_of(request, prompt, len(choices) + i) for i in range(2)]
        for choice in siblings:
            choice.siblings = siblings
        choices += siblings
    for choice in (choices[1], choices[0], choices[2], choices[3]):
        choice.add_tokens(
            [97],
            "length",
            0,
            None,
            prompt_scores(choice.prompt) if choice.index in (1, 2) else None,
        )
    answers = whole(choices)["choices"]
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    for choice, answer in zip(choices, answers, strict=True):
        assert answer["prompt_token_ids"] == choice.prompt
        assert answer["prompt_logprobs"] == wanted_prompt_logprobs(choice.prompt, 0)


def test_a_scored_echo_waits_for_its_scores_and_only_that():
    """The text of an echo is there at once, its scores come with the first token."""
    for logprobs, waits in ((None, False), (0, True)):
        request = CompletionRequest(prompt="x", echo=True, logprobs=logprobs, stream=True)
        choice = choice_of(request, [97, 98])
        assert choice.has_unsent() != waits
        choice.add_tokens([97], None, 0, [score(0, 97)], prompt_scores([97, 98]))
        assert choice.has_unsent()


def test_an_answer_of_which_only_the_prompt_was_wanted():
    """
    max_tokens 0: the engine computes a token for the scores, of which nothing is told or counted.
    """
    request = CompletionRequest(prompt="x", echo=True, logprobs=1, max_tokens=0)
    choice = choice_of(request, [97, 98])
    choice.add_tokens([END], "stop", 0, [score(0, END)], prompt_scores([97, 98]))
    (answer,) = whole([choice])["choices"]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"], choice.num_tokens) == (
        "ab",
        "length",
        None,
        0,
    )
    assert answer["logprobs"]["tokens"] == ["a", "b"] and answer["logprobs"]["text_offset"] == [
        0,
        1,
    ]
    assert choice.has_unsent()  # in a stream, too, though no token is told


@pytest.mark.parametrize(
    ("fields", "is_news"),
    [({}, False), ({"return_token_ids": True}, True), ({"logprobs": 0}, True)],
)
def test_what_is_news(fields, is_news):
    """
    A token without text, half a character, is news to those who asked for tokens; to others text
    and the end are.
    """
    choice = choice_of(CompletionRequest(prompt="x", stream=True, **fields), [97])
    assert not choice.has_unsent()
    choice.add_tokens([0xC3], None, 0, [score(0, 0xC3)])
    assert choice.has_unsent() == is_news
    choice.mark_sent()
    assert not choice.has_unsent() and not choice.is_first
    choice.add_tokens([0xA9], None, 0, [score(1, 0xA9)])
    assert choice.has_unsent() and choice.text == "é"
    choice.mark_sent()
    choice.add_tokens([END], "stop", 0, [score(2, END)])
    assert choice.has_unsent() and choice.finish_reason == "stop"
    choice.mark_sent()
    assert not choice.has_unsent() and choice.is_end_sent


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "abab")]
)
def test_stop_strings_count_from_the_first_token_after_min_tokens(min_tokens, text):
    request = CompletionRequest(prompt="x", stop="b", min_tokens=min_tokens)
    choice = choice_of(request, [97])
    choice.add_tokens([*b"abab"], "length", 0)
    assert (choice.text, choice.stop_reason) == (text, "b" if min_tokens < 4 else None)


@pytest.mark.parametrize("request_of", [CompletionRequest, ChatRequest])
def test_json_has_no_infinity(request_of):
    """
    What cannot be sampled has a log-probability of minus infinity, which no client could read.
    """
    fields = {"prompt": "x", "logprobs": 1, "prompt_logprobs": 1}
    if request_of is ChatRequest:
        fields = {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 1,
        }
    choice = choice_of(request_of(**fields), [97, 98])
    choice.add_tokens(
        [98], "length", 0, [[-math.inf, [97], [-math.inf]]], [[-math.inf, [97], [-math.inf]]]
    )
    text = json.dumps(whole([choice]), allow_nan=False)
    assert text.count("-9999.0") == (5 if request_of is CompletionRequest else 2)
