"""The end of a text at a stop string, however tokens cut it, and at a cost that does not grow."""

import time
from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from server.answers import CompletionChoice
from server.protocol import CompletionRequest
from tokenizer import TextStream
from training.corpus import bpe_tokenizer


def naive_stop(text, stops):
    """
    Where the text ends if read a character at a time: (start, end, stop) of the first stop string
    to be complete.
    """
    for end in range(1, len(text) + 1):
        stop = max(filter(text[:end].endswith, stops), key=len, default="")
        if stop:
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
)
def test_stop_strings_do_not_depend_on_tokens(text, stops, cuts):
    """
    However the bytes of a text are cut into tokens, through characters too, it ends where the plain
    text does; each token releases exactly what is certain by then, and the token that completes the
    stop string is the last taken.
    """
    data = text.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    tokens = [data[a:b] for a, b in pairwise(edges)]
    start, end, stop = naive_stop(text, stops)
    stream = TextStream(tokens.__getitem__, tokens.__getitem__)
    stream.stop_at(stops)
    shown = ""
    read = b""
    for number, token in enumerate(tokens):
        shown += stream.push(number)
        read += token
        so_far = read.decode("utf-8", "ignore")
        if stream.matched is not None:
            before = b"".join(tokens[:number]).decode("utf-8", "ignore")
            assert len(before) < end <= len(so_far)
            break
        assert shown == certain(so_far, stops)
    else:
        shown += stream.flush()
    assert (shown, stream.matched) == (text[:start], stop)


def seconds_for_each_thousand(count: int) -> list[float]:
    """Of tokens added one by one, with stop strings, in this process's time."""
    request = CompletionRequest(prompt="x", stop=["never", "xxxy"], logprobs=1)
    choice = CompletionChoice(
        SimpleNamespace(ahead=[]), 0, request, [120], bpe_tokenizer([]), [256]
    )
    score = [-2.0, [121], [-1.0]]
    times = []
    for _ in range(count):
        started = time.process_time()
        for _ in range(1000):
            choice.add_tokens([120], None, 0, [score])
            assert choice.has_unsent()
            assert choice.chunks()
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
        stream = TextStream(tokens.__getitem__, tokens.__getitem__)
        stream.stop_at(stops)
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
