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
from server.protocol import ChatRequest, CompletionRequest, StreamOptions
from tokenizer import TextStream
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
            texts = texts[len(prompt) :]
            begun = decoded(b"".join(pieces[: len(prompt)]), final=True)
            behind = texts[0]
            texts = [
                text.removeprefix(begun if text.startswith(begun) else behind) for text in texts
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
        whole = texts[-1]
        searched_from = len(texts[: self.body.min_tokens + 1][-1])
        for end in range(searched_from + 1, len(whole) + 1):
            searched = whole[searched_from:end]
            stop = max(filter(searched.endswith, self.body.stop), key=len, default="")
            if stop:
                self.finish_reason = "stop"
                self.stop_reason = stop
                self.text = whole[: end - len(stop)]
                count = next(count for count, text in enumerate(texts) if len(text) >= end)
                self.tokens = self.tokens[:count]
                return

    @property
    def usage(self) -> dict:
        counts = {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.tokens)}
        return counts | {"total_tokens": len(self.prompt) + len(self.tokens)}

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

    def chat_logprobs(self) -> dict:
        content = []
        for token, scored in zip(self.tokens, self.scored(), strict=True):
            top = [entry(*item) for item in scored.items()][: self.body.num_logprobs]
            content.append(entry(token, scored[token]) | {"top_logprobs": top})
        return {"content": content}


def entry(token: int, value: float) -> dict:
    data = list(TOKENIZER.spelled_bytes(token))
    return {"token": name(token), "logprob": value, "bytes": data}


def prompt_scores(prompt: list[int]) -> list[list]:
    return [score(place, token) for place, token in enumerate(prompt[1:])]


TOKENS = st.lists(st.sampled_from(BYTES), min_size=1, max_size=9)
ANSWERS = {
    "prompt": TOKENS,
    "tokens": TOKENS,
    "finish_reason": st.sampled_from(["stop", "length"]),
    "cuts": st.sets(st.integers(1, 8)),
    "pauses": st.sets(st.integers(0, 8)),
    "n": st.none() | st.integers(0, 4),
}
STOPS = st.sampled_from(["a", "b", "ba", "ab", "éa", "é", "bb"])
FIELDS = {
    "stop": st.lists(STOPS, max_size=3),
    "skip_special_tokens": st.booleans(),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 3),
    "return_token_ids": st.booleans(),
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


USAGE = {"include_usage": True, "continuous_usage_stats": True}


def check_answer(body, given: tuple, cuts, pauses):
    """The chunks of a stream, put together, and the whole answer say what the reference says."""
    prompt, *answer = given
    expected = Reference(body, prompt, *answer)
    is_chat = isinstance(body, ChatRequest)
    streamed = body.model_copy(update={"stream": True, "stream_options": StreamOptions(**USAGE)})
    chunks = give(choice_of(streamed, prompt), *answer, cuts, pauses)
    (whole,) = give(choice_of(body, prompt), *answer)
    choices = [chunk["choices"][0] for chunk in chunks]
    # only the last chunk has the reason
    assert {choice["index"] for choice in choices} == {7}
    reasons = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices]
    end = (expected.finish_reason, expected.stop_reason)
    assert reasons == [(None, None)] * (len(chunks) - 1) + [end]
    # the ids of tokens, and in each chunk's usage their number until then
    ids = [choice.get("token_ids", []) for choice in choices]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert chunks[-1]["usage"] == expected.usage
    assert all(("token_ids" in choice) == body.return_token_ids for choice in choices)
    if body.return_token_ids:
        assert [*chain(*ids)] == expected.tokens
        assert counts == [sum(map(len, ids[: i + 1])) for i in range(len(ids))]
    # the prompt's ids come once
    of_prompt = {"prompt_token_ids": prompt} if body.return_token_ids else {}
    shown = [part.get("prompt_token_ids") for part in (chunks if is_chat else choices)]
    assert shown == [of_prompt.get("prompt_token_ids")] + [None] * (len(shown) - 1)
    # text and log-probabilities
    if is_chat:
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
        assert all(delta.keys() == {"content"} for delta in deltas[1:-1])
        texts = [delta["content"] for delta in deltas[:-1]]
        content = {"message": {"role": "assistant", "content": expected.text}}
    else:
        texts = [choice["text"] for choice in choices]
        content = {"text": expected.text} | of_prompt
    assert "".join(texts) == expected.text
    logprobs = None
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if body.num_logprobs is not None:
        logprobs = expected.chat_logprobs() if is_chat else expected.text_logprobs()
        assert {key: [*chain(*(part[key] for part in parts))] for key in logprobs} == logprobs
        if is_chat:
            logprobs["refusal"] = None
    else:
        assert not parts
    # the same at once
    content |= {"index": 7, "logprobs": logprobs, "finish_reason": end[0], "stop_reason": end[1]}
    if body.return_token_ids:
        content["token_ids"] = expected.tokens
    assert whole == {"choices": [content]} | (of_prompt if is_chat else {})


@settings(max_examples=200, deadline=None)
@given(echo=st.booleans(), fields=st.fixed_dictionaries(FIELDS), **ANSWERS)
def test_a_completion_says_the_same_however_it_is_cut(
    prompt, tokens, finish_reason, cuts, pauses, n, fields, echo
):
    body = CompletionRequest(prompt=prompt, echo=echo, logprobs=n, **fields)
    check_answer(body, (prompt, tokens, finish_reason), cuts, pauses)


@settings(max_examples=200, deadline=None)
@given(fields=st.fixed_dictionaries(FIELDS), **ANSWERS)
def test_a_chat_says_the_same_however_it_is_cut(
    prompt, tokens, finish_reason, cuts, pauses, n, fields
):
    fields |= {} if n is None else {"logprobs": True, "top_logprobs": n}
    body = ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)
    check_answer(body, (prompt, tokens, finish_reason), cuts, pauses)


def test_usage_is_in_chunks_only_beside_the_last_one():
    """As in vLLM: continuous_usage_stats without include_usage asks for nothing."""
    options = {"continuous_usage_stats": True}
    body = CompletionRequest(prompt="x", stream=True, stream_options=options)
    (chunk,) = give(choice_of(body, [120]), [97], "length")
    assert "usage" not in chunk


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


def test_a_long_echo_is_text_at_once(monkeypatch):
    """128 choices with a prompt of 30,000 tokens were spelled token by token."""
    body = CompletionRequest(prompt="x", echo=True, stop="x")
    prompt = [*("xé€".encode() * 500)[:-1]]
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", lambda *_: 1 / 0)
        choice = choice_of(body, prompt)
    assert choice.text == "xé€" * 499 + "xé"
    choice.add_tokens([0xAC, ord("y")], "length", 0)  # a character that began in the prompt
    assert choice.text == "xé€" * 500 + "y"
