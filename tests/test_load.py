"""
The load generator's own arithmetic, and its streams over socket pairs: what it reports as the
server's lateness must not be its own.
"""

import json
import socket
from types import SimpleNamespace

import pytest

from assets import load


@pytest.fixture
def clock(monkeypatch):
    """Seconds, for a test to set."""
    now = [100.0]
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def stream():
    """
    A stream of 3 tokens, due 2 s after the start at 100, with the server's end of its connection.
    """
    own = load.Stream(("127.0.0.1", 1), load.completion([1, 2], 3, at=2.0), 100.0)
    own.sock, server = socket.socketpair()
    with own.sock, server:
        yield own, server


def test_a_request_says_how_much_and_when():
    request = load.completion([1, 2], 7, at=0.5, speed=100)
    assert (request["tokens"], request["at"], request["bytes a second"]) == (7, 0.5, 100)
    body = {
        "prompt": [1, 2],
        "max_tokens": 7,
        "temperature": 0.6,
        "ignore_eos": True,
        "stream": True,
    }
    assert request["body"] == body | {"stream_options": {"include_usage": True}}
    assert load.completion([1], 1)["bytes a second"] is None


def test_a_row_is_measured_from_when_it_was_due(clock, stream):
    """
    Not from when it was sent: a generator that is late must not make the server look early.
    Arrivals without a text, as headers and pings, are none.
    """
    own, server = stream
    for seconds, data in (
        (102.5, b"HTTP/1.1 200 OK\r\n\r\n"),
        (103.0, b'data: {"text":"a"}\n\n'),
        (103.2, b": ping\n\n"),
        (104.0, b'data: {"text":"b"}\n\ndata: {"text":"c"}\n\n'),
        (105.5, b'data: {"choices":[],"usage":{"completion_tokens":3,"total_tokens":5}}\n\n'),
    ):
        clock[0] = seconds
        server.sendall(data)
        assert own.receive() is True
    server.close()
    assert own.receive() is False
    assert own.row() == {
        "first": pytest.approx(1.0),
        "gaps": [pytest.approx(1.0)],
        "end": pytest.approx(4),
        "tokens": 3,
    }


def test_an_answer_that_is_not_whole_is_no_measurement(clock, stream):
    own, server = stream
    server.sendall(
        b'data: {"text":"a"}\n\ndata: {"usage":{"completion_tokens":33,"total_tokens":5}}\n\n'
    )
    own.receive()
    with pytest.raises(ValueError, match="wanted 3 tokens, the answer ends with data: "):
        own.row()


def test_the_count_is_found_though_it_comes_in_two_parts(clock, stream):
    own, server = stream
    for part in (b'{"text":"' + b"x" * 3000, b'"}{"completion_tok', b'ens":3,'):
        server.sendall(part)
        own.receive()
    assert own.row()["tokens"] == 3 and len(own.tail) < 2000


def test_a_slow_client_sips(stream):
    """So many bytes a second, however much is there."""
    own, server = stream
    own.speed = 50
    server.sendall(b"x" * 100)
    own.receive()
    assert len(own.tail) == 50 * load.SLOW_READ_SECONDS
    own.sock.setblocking(False)
    sipping = [own]
    for _ in range(25):
        load.read_slowly(sipping)
    assert len(own.tail) == 100 and sipping == [own]  # nothing is there to read: it is no end
    server.close()
    load.read_slowly(sipping)
    assert sipping == []


def test_what_is_sent_is_http():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = load.Stream(listener.getsockname(), load.completion([1], 1), 0)
        own.connect()
        accepted, _ = listener.accept()
        with accepted, own.sock:
            data = accepted.recv(10_000).decode()
    head, _, body = data.partition("\r\n\r\n")
    lines = head.split("\r\n")
    assert lines[0] == "POST /v1/completions HTTP/1.1" and "Connection: close" in lines
    assert f"Content-Length: {len(body)}" in lines and json.loads(body) == own.request["body"]


@pytest.mark.parametrize(
    "count, wanted", [(1, (7, 7, 7)), (2, (8, 8, 8)), (100, (57, 97, 106)), (1000, (507, 907, 997))]
)
def test_percentiles(count, wanted):
    """The value that so many in a hundred are below; in milliseconds, of seconds in any order."""
    values = [(7 + i) / 1000 for i in reversed(range(count))]
    assert tuple(load.percentiles(values).values()) == wanted and list(load.percentiles([])) == [
        "p50",
        "p90",
        "p99",
    ]


def test_a_run_ends_with_its_last_token():
    rows = [
        {"first": 0.5, "gaps": [0.1, 0.3], "end": 4.0, "tokens": 6},
        {"first": 0.7, "gaps": [], "end": 2.0, "tokens": 2},
    ]
    assert load.summary(rows) == {
        "output tok/s": 2,
        "s": 4.0,
        "first token, ms": {"p50": 700, "p90": 700, "p99": 700},
        "gaps, ms": {"p50": 300, "p90": 300, "p99": 300},
        "tokens an event": 2.0,
    }
