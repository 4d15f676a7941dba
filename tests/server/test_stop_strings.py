"""The end of a text at a stop string, however tokens cut it, and at a cost that does not grow."""

from functools import partial
from itertools import pairwise
from time import process_time
from timeit import repeat
from types import SimpleNamespace

from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from server.answers import CompletionChoice
from server.protocol import CompletionRequest
from tokenizer import TextStream
from training.corpus import bpe_tokenizer


def naive_stop(text, stops):
    """
    Return (start, end, stop) of the first stop string to be complete when the text is read one
    character at a time.
    """
    for end in range(1, len(text) + 1):
        stop = max(filter(text[:end].endswith, stops), key=len, default="")
        if stop:
            return end - len(stop), end, stop
    return len(text), len(text), None


def certain(text, stops):
    """
    Return what can already be shown of a text without stop strings: all except the longest end that
    may become one.
    """
    return next(
        text[:i]
        for i in range(len(text) + 1)
        if i == len(text) or any(s.startswith(text[i:]) for s in stops)
    )


@seed(0)
@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab€", max_size=14),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=8),
    cuts=st.sets(st.integers(1, 40)),
)
@example(text="ab", stops=["b", "ab"], cuts=set())
def test_stop_strings_do_not_depend_on_tokens(text, stops, cuts):
    """
    However the bytes of a text are cut into tokens, even within characters, it ends where the plain
    text does. Each token releases exactly what is certain by then. The token that completes the
    stop string is the last one used.
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
    assert stream.flush().strip("\ufffd") == ""


def test_late_tokens_cost_as_little_as_early_ones():
    """
    With stop strings and scores, the cost does not grow with the text. A busy machine may spoil
    some measurements, but growth would show in all.
    """
    request = CompletionRequest(prompt="x", stop=["never", "xxxy"], logprobs=1)
    job = SimpleNamespace(ahead=[])

    def add_tokens(choice: CompletionChoice):
        for _ in range(1000):
            choice.add_tokens([120], None, 0, [[-2.0, [121], [-1.0]]])
            assert choice.has_unsent() and choice.chunks()
            choice.mark_sent()

    def growth() -> float:
        choice = CompletionChoice(job, 0, request, [120], bpe_tokenizer([]), [256])
        times = repeat(partial(add_tokens, choice), timer=process_time, number=1, repeat=10)
        return min(times[-3:]) / min(times[:3])

    assert any(growth() < 2 for _ in range(8))


def test_many_stop_strings_cost_as_little_as_few():
    """
    Previously each token's text was searched for each stop string, and each of its ends compared
    with the beginning of each. 64 long ones took 80 times as long as one, or a thousand times if
    the text begins like them.
    """

    def seconds(stops: list[str], token: bytes) -> float:
        def push_all():
            stream = TextStream(lambda _: token, lambda _: token)
            stream.stop_at(stops)
            for number in range(1250):
                stream.push(number)
            assert stream.matched is None

        return min(repeat(push_all, timer=process_time, number=1, repeat=5))

    few = seconds(["\nclass"], b"the fox ")
    letters = [letter + "ZQ" * 120 for letter in "abcdefghijklmnopqrstuvwxyz\n0123456789"]
    assert seconds(letters, b"the fox ") < 60 * few
    alike = ["xy" * 4000 + "z", *["y" * 100 + "z"] * 60]
    assert seconds(alike, b"xyxy") < 60 * few
