"""Where a text ends: stop strings, stop tokens and the end of text, however tokens cut them."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server import EOS, ByteTokenizer, FakeEngine, Server, fake_score, text_of, wait_until

from serving.answers import CompletionChoice
from serving.protocol import CompletionRequest
from tokenizer import TextStream

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


def naive_stop(text, stops):
    """
    Where the text ends if read a character at a time: (start, end, stop) of the first stop string
    to be complete.
    """
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), end, stop
    return len(text), len(text), None


def certain(text, stops):
    """
    What of a text without stop strings can be shown already: all but the longest end that may
    become one.
    """
    return next(
        text[:i]
        for i in range(len(text) + 1)
        if i == len(text) or any(s.startswith(text[i:]) for s in stops)
    )


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab€", max_size=14),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=8),
    cuts=st.sets(st.integers(1, 40)),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_tokens(text, stops, cuts, include):
    """
    However the bytes of a text are cut into tokens, through characters too, it ends where the plain
    text does; each token releases exactly what is certain by then, and the token that completes the
    stop string is the last taken.
    """
    data = text.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    tokens = [data[a:b] for a, b in pairwise(edges)]
    start, end, stop = naive_stop(text, stops)
    stream, shown, read = TextStream(tokens.__getitem__, stops, include), "", b""
    for number, token in enumerate(tokens):
        shown, read = shown + stream.push(number), read + token
        so_far = read.decode("utf-8", "ignore")
        if stream.matched is not None:
            assert (
                len(so_far) >= end
                and len(b"".join(tokens[:number]).decode("utf-8", "ignore")) < end
            )
            break
        assert shown == certain(so_far, stops)
    else:
        shown += stream.flush()
    assert (shown, stream.matched) == (text[: end if include else start], stop)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=3)))
def test_any_bytes_become_text(tokens):
    """
    A model may utter bytes that are no UTF-8: the pieces then still join to what decoding all at
    once gives.
    """
    stream = TextStream(tokens.__getitem__)
    pieces = [stream.push(i) for i in range(len(tokens))]
    assert "".join(pieces) + stream.flush() == b"".join(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("include, text", [(False, "a"), (True, "ab")])
def test_stop_token_id_ends_the_text(server, include, text):
    """vLLM's meaning: stop_reason is the id, and its text is left out unless asked for."""
    choice = server.answer(
        "say abc", stop_token_ids=[ord("b")], include_stop_str_in_output=include
    )["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        text,
        "stop",
        ord("b"),
    )


@pytest.mark.parametrize("command, count", [("say", 5), ("say3", 5)])
@pytest.mark.parametrize("include, text", [(False, "one"), (True, "oneTW")])
def test_a_stop_string_may_lie_over_several_tokens(server, command, count, include, text):
    """
    The stop string lies across tokens: none of it is shown, the tokens after it are neither shown
    nor counted (also when they came in the same step), and the engine hears at once that it need
    not go on.
    """
    fields = {"stop": ["zzz", "TW"], "include_stop_str_in_output": include}
    answer = server.answer(f"{command} oneTWO" + "more" * 500, **fields)
    assert answer["choices"][0] | {"index": 0} == answer["choices"][0]
    assert (answer["choices"][0]["text"], answer["choices"][0]["stop_reason"]) == (text, "TW")
    assert answer["usage"]["completion_tokens"] == count
    wait_until(lambda: server.engine.aborted[-1:] == [server.engine.added[-1]["id"]])
    assert text_of(server.stream(f"{command} oneTWO" + "more" * 500, **fields)) == text


def test_no_stop_string_before_min_tokens(server):
    """
    As in vLLM: what the first min_tokens say is no stop string, nor is a part of it the beginning
    of one.
    """
    assert server.answer("say abab", stop="b", min_tokens=2)["choices"][0]["text"] == "aba"
    assert server.answer("say abab", stop="ba", min_tokens=2)["choices"][0]["text"] == "abab"


def test_text_that_only_looked_like_a_stop_string_is_given_out(server):
    """Held back while it could become one, given out when the answer ends instead."""
    choice = server.answer("say abc", stop="cde")["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", None)


def test_stop_string_ends_its_own_prompt_only():
    """
    In a call of several prompts, one that met its stop string is aborted at once, not when the last
    one is done.
    """
    with Server(engine=FakeEngine(max_model_len=10**9)) as server:
        sock = server.connect(
            prompt=["loop", "say oneTWO" + "more" * 5000], stop="TWO", max_tokens=20_000
        )
        wait_until(lambda: server.engine.aborted == ["1"])
        assert list(server.engine.running) == ["0"]
        sock.close()


def test_the_end_of_text_that_is_ignored_is_a_stop_token_like_others():
    """With ignore_eos it ends a text only where stop_token_ids name it, and is then the reason."""
    for ignored, reason in ((True, EOS), (False, None)):
        request = CompletionRequest(prompt="x", ignore_eos=ignored, stop_token_ids=[EOS])
        choice = CompletionChoice(None, 0, request, [120], ByteTokenizer(), [EOS])
        choice.add_tokens([120, EOS], "stop", 0, None)
        assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)


@pytest.mark.parametrize("ignored", [False, True])
def test_of_several_ends_of_text_none_is_a_reason(ignored):
    """
    Llama's config.json names three: a chat ends with the last, and its id was the stop_reason of
    every answer. With ignore_eos they end a text only where stop_token_ids name them.
    """
    request = CompletionRequest(prompt="x", ignore_eos=ignored, stop_token_ids=[7, 8, 9])
    for last, reason in ((7, None), (8, None), (9, 9)):
        choice = CompletionChoice(None, 0, request, [120], ByteTokenizer(), (7, 8))
        choice.add_tokens([120, last], "stop", 0)
        reason = last if ignored else reason
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("x", "stop", reason)


def seconds_for_each_thousand(count: int) -> list[float]:
    """Of tokens told one by one, with stop strings, in this process's time."""
    request = CompletionRequest(prompt="x", stop=["never", "xxxy"], logprobs=1)
    choice, times = CompletionChoice(None, 0, request, [120], ByteTokenizer(), [EOS]), []
    for _ in range(count):
        started = time.process_time()
        for _ in range(1000):
            choice.add_tokens([120], None, 0, [fake_score(120, 1)])
            assert choice.has_unsent() and choice.chunks()
            choice.mark_sent()
        times.append(time.process_time() - started)
    return times


def test_late_tokens_cost_as_little_as_early_ones():
    """
    Of 10,000 tokens: nothing grows with the text. A busy machine may spoil some measurements,
    growth would all.
    """
    measured = (seconds_for_each_thousand(10) for _ in range(8))
    assert any(min(times[-3:]) < 2 * min(times[:3]) for times in measured)


def test_many_stop_strings_cost_as_little_as_few():
    """
    Each token's text was searched for each stop string, and each end of it tried as the beginning
    of each: 64 long ones took 80 times as long as one, where the text begins like them a thousand
    times as long.
    """
    text = ("the quick brown fox " * 250).encode()
    tokens = [text[i : i + 4] for i in range(0, len(text), 4)]

    def seconds(stops, tokens):
        stream = TextStream(tokens.__getitem__, stops)
        started = time.process_time()
        for number in range(len(tokens)):
            stream.push(number)
        assert stream.matched is None
        return time.process_time() - started

    few = min(seconds(["\nclass"], tokens) for _ in range(5))
    letters = [letter + "ZQ" * 120 for letter in "abcdefghijklmnopqrstuvwxyz\n0123456789"]
    assert min(seconds(letters, tokens) for _ in range(3)) < 60 * few
    alike = ["xy" * 4000 + "z", *["y" * 100 + "z"] * 60]
    assert min(seconds(alike, [b"xyxy"] * len(tokens)) for _ in range(3)) < 60 * few
