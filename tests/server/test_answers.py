"""
answers.py: the answer that a client is sent, against a reference that has all of its tokens at
once. However the engine's steps cut the tokens, and whenever the client is sent something, the
pieces together say what the reference says.
"""

import codecs
from itertools import chain, pairwise

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.answers import CHOICES, Choice
from server.protocol import ChatRequest, CompletionRequest
from training.corpus import bpe_tokenizer

TOKENIZER = bpe_tokenizer([])  # a token a byte, and 256 is <|endoftext|>
END = 256
BYTES = [*b"ab", *"é".encode(), 0xFF, END]  # é is two tokens, 0xFF is no character
SPELLING = {0xC3: "bytes:\\xc3", 0xA9: "bytes:\\xa9", 0xFF: "bytes:\\xff", END: "<|endoftext|>"}


def choice_of(body, prompt: list[int], eos=(END,)) -> Choice:
    return CHOICES[type(body)](None, 7, body, prompt, TOKENIZER, eos)


def sent(chunks: list[dict]) -> list[dict]:
    """As JSON brings them."""
    return orjson.loads(orjson.dumps(chunks))


def decoded(data: bytes, final: bool = False) -> str:
    """The characters that are whole."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def score(place: int, token: int) -> list:
    """
    As the engine's: [log-probability of the token, the likeliest ids, their log-probabilities],
    more than a request asks for. The token is the likeliest, the third, or none of these.
    """
    likeliest = [99, 100, 101, 102, 103]
    if place % 3 < 2:
        likeliest.insert(2 * (place % 3), token)
    values = [-0.5 - place - rank for rank in range(len(likeliest))]
    own = values[likeliest.index(token)] if token in likeliest else -99.0
    return [own, likeliest, values]


def candidates(token: int, scored: list, n: int) -> dict[int, float]:
    """The n likeliest and, where it is none of them, the token itself."""
    own, ids, values = scored
    return dict(zip(ids[:n], values, strict=False)) | {token: own}


def name(token: int) -> str:
    return SPELLING.get(token) or chr(token)


class Reference:
    """The answer that a choice has to give, computed from all its tokens at once."""

    def __init__(self, body, prompt: list[int], tokens: list[int], finish_reason: str):
        self.body = body
        self.prompt = prompt
        spell = TOKENIZER.token_bytes if body.skip_special_tokens else TOKENIZER.spelled_bytes
        pieces = list(map(TOKENIZER.spelled_bytes if body.echo else spell, prompt))
        num_echoed = len(pieces) if body.echo else 0
        pieces += map(spell, tokens)
        if finish_reason == "stop":
            pieces[-1] = b""
        texts = [decoded(b"".join(pieces[:count])) for count in range(len(pieces) + 1)]
        texts.append(decoded(b"".join(pieces), final=True))
        if not body.echo:  # an answer completes a character that the prompt has begun
            begun = decoded(b"".join(pieces[: len(prompt)]), final=True)
            behind = texts[len(prompt)]
            texts = [
                text.removeprefix(begun if text.startswith(begun) else behind)
                for text in texts[len(prompt) :]
            ]
        self.tokens = tokens
        self.text = texts.pop()
        self.finish_reason = finish_reason
        self.stop_reason = None
        if finish_reason == "stop" and (body.ignore_eos or tokens[-1] != END):
            self.stop_reason = tokens[-1]
        self.end_at_stop_string(texts[num_echoed:])
        places = len(self.tokens) + (num_echoed if body.num_logprobs is not None else 0)
        start = num_echoed + len(self.tokens) - places
        self.offsets = [len(text) for text in texts[start:][:places]]

    def end_at_stop_string(self, texts: list[str]):
        searched_from = len(texts[: self.body.min_tokens + 1][-1])
        for end in range(searched_from + 1, len(texts[-1]) + 1):
            searched = texts[-1][searched_from:end]
            stop = max(filter(searched.endswith, self.body.stop), key=len, default="")
            if stop:
                self.finish_reason = "stop"
                self.stop_reason = stop
                self.text = texts[-1][: end - len(stop)]
                count = next(count for count, text in enumerate(texts) if len(text) >= end)
                self.tokens = self.tokens[:count]
                return

    def scored(self) -> list[dict | None]:
        """The candidates of each of `tokens`."""
        n = self.body.num_logprobs
        return [candidates(t, score(place, t), n) for place, t in enumerate(self.tokens)]

    def text_logprobs(self) -> dict:
        tokens = self.tokens
        scored = self.scored()
        if self.body.echo:
            n = self.body.num_logprobs
            of_prompt = zip(self.prompt[1:], prompt_scores(self.prompt), strict=True)
            scored = [None, *(candidates(t, s, n) for t, s in of_prompt), *scored]
            tokens = self.prompt + tokens
        return {
            "tokens": list(map(name, tokens)),
            "token_logprobs": [s and s[t] for t, s in zip(tokens, scored, strict=True)],
            "top_logprobs": [s and {name(i): p for i, p in s.items()} for s in scored],
            "text_offset": self.offsets,
        }

    def chat_logprobs(self) -> list:
        def entry(token: int, value: float) -> dict:
            data = list(TOKENIZER.spelled_bytes(token))
            return {"token": name(token), "logprob": value, "bytes": data}

        content = []
        for token, scored in zip(self.tokens, self.scored(), strict=True):
            top = [entry(*item) for item in scored.items()][: self.body.num_logprobs]
            content.append(entry(token, scored[token]) | {"top_logprobs": top})
        return content


def prompt_scores(prompt: list[int]) -> list[list]:
    return [score(place, token) for place, token in enumerate(prompt[1:])]


TOKENS = st.lists(st.sampled_from(BYTES), min_size=1, max_size=9)
ANSWERS = {
    "prompt": TOKENS,
    "tokens": TOKENS,
    "finish_reason": st.sampled_from(["stop", "length"]),
    "cuts": st.sets(st.integers(1, 8)),
    "pauses": st.sets(st.integers(0, 8)),
    "fields": st.fixed_dictionaries(
        {
            "stop": st.lists(st.sampled_from(["a", "b", "ba", "ab", "éa", "é", "bb"]), max_size=3),
            "skip_special_tokens": st.booleans(),
            "ignore_eos": st.booleans(),
            "min_tokens": st.integers(0, 3),
            "return_token_ids": st.booleans(),
        }
    ),
    "n": st.none() | st.integers(0, 4),
}


def give(choice: Choice, tokens, finish_reason, cuts=(), pauses=()) -> list[dict]:
    """
    The chunks that a client gets if the engine's steps end at `cuts`, and the client is busy during
    `pauses`.
    """
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    chunks = []
    for step, (start, end) in enumerate(pairwise(edges)):
        scores = of_prompt = None
        if choice.num_logprobs is not None:
            scores = [score(start + place, token) for place, token in enumerate(tokens[start:end])]
            of_prompt = prompt_scores(choice.prompt) if choice.body.echo and not step else None
        reason = finish_reason if end == len(tokens) else None
        choice.add_tokens(tokens[start:end], reason, 3, scores, of_prompt)
        if choice.has_unsent() and (step not in pauses or choice.finish_reason):
            chunks += sent(choice.chunks())
            choice.mark_sent()
        if choice.finish_reason:  # for a stop string: the engine is sent an abort
            break
    assert not choice.has_unsent() and choice.cached_tokens == 3
    return chunks


def check_the_ends(chunks: list[dict], expected: Reference):
    """
    Only the last chunk has the reason; each has the number of tokens until then, and their ids.
    """
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {choice["index"] for choice in choices} == {7}
    reasons = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices]
    end = (expected.finish_reason, expected.stop_reason)
    assert reasons == [(None, None)] * (len(chunks) - 1) + [end]
    asked = expected.body.return_token_ids
    assert all(("token_ids" in choice) == asked for choice in choices)
    if asked:
        ids = [choice["token_ids"] for choice in choices]
        assert [*chain(*ids)] == expected.tokens
        counts = [sum(map(len, ids[: i + 1])) for i in range(len(ids))]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == counts
    counts = {"prompt_tokens": len(expected.prompt), "completion_tokens": len(expected.tokens)}
    assert chunks[-1]["usage"] == counts | {"total_tokens": sum(counts.values())}


def check_the_prompts_ids(parts: list[dict], ids: dict):
    """They come once, with the first part, and only where they are asked for."""
    shown = [part.get("prompt_token_ids") for part in parts]
    assert shown == [ids.get("prompt_token_ids")] + [None] * (len(parts) - 1)


def ends_of(expected: Reference) -> dict:
    """The fields that whole answers of both kinds share."""
    ends = {"finish_reason": expected.finish_reason, "stop_reason": expected.stop_reason}
    return ends | ({"token_ids": expected.tokens} if expected.body.return_token_ids else {})


USAGE = {"include_usage": True, "continuous_usage_stats": True}
IN_CHUNKS = {"stream": True, "stream_options": USAGE}


@settings(max_examples=200, deadline=None)
@given(echo=st.booleans(), **ANSWERS)
def test_a_completion_says_the_same_however_it_is_cut(
    prompt, tokens, finish_reason, cuts, pauses, fields, n, echo
):
    fields = {"prompt": prompt, "echo": echo, "logprobs": n} | fields
    body = CompletionRequest(**fields, **IN_CHUNKS)
    expected = Reference(body, prompt, tokens, finish_reason)
    chunks = give(choice_of(body, prompt), tokens, finish_reason, cuts, pauses)
    check_the_ends(chunks, expected)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == expected.text
    ids = {"prompt_token_ids": prompt} if body.return_token_ids else {}
    check_the_prompts_ids(choices, ids)
    logprobs = None if n is None else expected.text_logprobs()
    parts = [choice["logprobs"] for choice in choices]
    if n is None:
        assert parts == [None] * len(parts)
    else:
        assert {key: [*chain(*(part[key] for part in parts))] for key in logprobs} == logprobs
    # the same at once
    (whole,) = give(choice_of(CompletionRequest(**fields), prompt), tokens, finish_reason)
    answer = {"text": expected.text, "index": 7, "logprobs": logprobs} | ids
    answer |= ends_of(expected)
    assert whole == {"choices": [answer]}


@settings(max_examples=200, deadline=None)
@given(**ANSWERS)
def test_a_chat_says_the_same_however_it_is_cut(
    prompt, tokens, finish_reason, cuts, pauses, fields, n
):
    fields = {"messages": [{"role": "user", "content": "x"}], **fields}
    fields |= {} if n is None else {"logprobs": True, "top_logprobs": n}
    body = ChatRequest(**fields, **IN_CHUNKS)
    expected = Reference(body, prompt, tokens, finish_reason)
    chunks = give(choice_of(body, prompt), tokens, finish_reason, cuts, pauses)
    check_the_ends(chunks, expected)
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert all(delta.keys() == {"content"} for delta in deltas[1:-1])
    assert "".join(delta["content"] for delta in deltas[:-1]) == expected.text
    ids = {"prompt_token_ids": prompt} if body.return_token_ids else {}
    check_the_prompts_ids(chunks, ids)
    content = [] if n is None else expected.chat_logprobs()
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [*chain(*(part["content"] for part in parts))] == content
    # the same at once
    (whole,) = give(choice_of(ChatRequest(**fields), prompt), tokens, finish_reason)
    answer = {"message": {"role": "assistant", "content": expected.text}, "index": 7}
    answer |= {"logprobs": None if n is None else {"content": content, "refusal": None}}
    answer |= ends_of(expected)
    assert whole == {"choices": [answer], **ids}


def test_scores_of_a_prompt_come_with_one_of_its_choices():
    """The others have them too, whichever row comes first; an echo waits for them."""
    body = CompletionRequest(prompt=[[97, 98]], n=2, echo=True, logprobs=0, stream=True)
    first, second = choices = [choice_of(body, [97, 98]) for _ in range(2)]
    for choice in choices:
        choice.siblings = choices
    assert first.text == "ab" and not first.has_unsent()
    unscored = CompletionRequest(prompt=[[97, 98]], echo=True, stream=True)
    assert choice_of(unscored, [97, 98]).has_unsent()
    second.add_tokens([99], None, 0, [score(0, 99)])
    first.add_tokens([100], None, 0, [score(0, 100)], prompt_scores([97, 98]))
    for choice, token in zip(choices, "dc", strict=True):
        (chunk,) = sent(choice.chunks())
        logprobs = chunk["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "b", token]
        assert logprobs["token_logprobs"] == [None, -0.5, -0.5]


@pytest.mark.parametrize("ignored", [False, True])
def test_of_several_ends_of_text_none_is_a_reason(ignored):
    """
    Llama's config.json names three. With ignore_eos they end a text only where stop_token_ids name
    them, and are then the reason.
    """
    body = CompletionRequest(prompt="x", ignore_eos=ignored, stop_token_ids=[7, 8, 9])
    for last, reason in ((7, None), (8, None), (9, 9)):
        choice = choice_of(body, [120], eos=(7, 8))
        choice.add_tokens([120, last], "stop", 0)
        reason = last if ignored else reason
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("x", "stop", reason)


@pytest.mark.parametrize(
    "fields, is_news", [({}, False), ({"return_token_ids": True}, True), ({"logprobs": 0}, True)]
)
def test_a_token_without_text_is_news_only_where_tokens_are_asked_for(fields, is_news):
    choice = choice_of(CompletionRequest(prompt="x", stream=True, **fields), [97])
    unsent = []
    for token, reason in ((0xC3, None), (0xA9, None), (END, "stop")):
        choice.add_tokens([token], reason, 0, [score(0, token)] if "logprobs" in fields else None)
        unsent.append((choice.has_unsent(), choice.text))
        choice.mark_sent()
        assert not choice.has_unsent()
    assert unsent == [(is_news, ""), (True, "é"), (True, "")]
