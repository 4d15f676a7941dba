"""The load generator must not report its own lateness as the server's."""

import socket
from types import SimpleNamespace

import pytest

from assets import load


@pytest.fixture
def stream():
    """
    Return a stream of 3 tokens, due 2 s after the start at 100, and the server's end of its socket.
    """
    own = load.Stream(("127.0.0.1", 1), load.completion([1, 2], 3, delay=2.0), 100.0)
    own.sock, server = socket.socketpair()
    with own.sock, server:
        yield own, server


ARRIVALS = [
    (102.5, b"HTTP/1.1 200 OK\r\n\r\n"),
    (103.0, b'data: {"text":"a"}\n\n'),
    (103.2, b": ping\n\n"),
    (104.0, b'data: {"text":"b"}\n\ndata: {"text":"' + b"c" * 3000 + b'"}\n\n'),
    (105.5, b'data: {"choices":[],"usage":{"completion_tok'),
    (105.5, b'ens":3,"total_tokens":5}}\n\n'),
]


def test_a_row_is_measured_from_when_it_was_due(monkeypatch, stream):
    """
    Times do not start when it was sent. Arrivals without text, such as headers and pings, do not
    count.
    """
    own, server = stream
    for seconds, data in ARRIVALS:
        clock = SimpleNamespace(monotonic=lambda seconds=seconds: seconds)
        monkeypatch.setattr(load, "time", clock)
        server.sendall(data)
        assert own.receive() is True
    server.close()
    assert own.receive() is False
    assert own.row() == {"first": 1.0, "gaps": [1.0], "end": 4.0, "tokens": 3}


def test_an_answer_that_is_not_whole_is_no_measurement(stream):
    own, server = stream
    server.sendall(b'data: {"text":"a"}\n\ndata: {"usage":{"completion_tokens":33,"total":5}}\n\n')
    own.receive()
    with pytest.raises(ValueError, match="wanted 3 tokens, but the answer ends with data: "):
        own.row()


def test_a_run_ends_with_its_last_token():
    """Percentiles are in milliseconds: the value that this many percent stay below."""
    rows = [{"first": i / 1000, "gaps": [], "end": 1.0, "tokens": 2} for i in reversed(range(99))]
    rows.append({"first": 0.7, "gaps": [0.1, 0.3], "end": 4.0, "tokens": 6})
    summary = load.summary(rows)
    assert summary["s"] == 4.0
    assert summary["output tok/s"] == 51
    assert summary["first token, ms"] == {"p50": 50, "p90": 90, "p99": 700}
    assert summary["gaps, ms"]["p90"] == 300
    assert summary["tokens an event"] == 2.0
