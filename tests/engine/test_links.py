"""
The engine's links to HTTP processes, without an engine: no process waits for another, and nothing
is lost or mixed up.
"""

import json
import math
import selectors
import socket

import pytest
from virtual import Clock

from engine import links as links_module
from engine.links import Links, to_line
from serve import listen_for_links
from server.client import connect

STATS = {"at_work": 0, "waited": []}


@pytest.fixture
def links(tmp_path):
    """Made before the sockets that a test connects, and closed after them."""
    with listen_for_links(str(tmp_path)) as listener:
        links = Links(listener)
        yield links
        links.close()


def link_to(links) -> socket.socket:
    sock = connect(links.listener.getsockname())
    sock.settimeout(2)  # both ends are in this thread: messages are there at once
    links.accept()
    return sock


def row(id: str, *tokens: int, end: str | None = None) -> list:
    return [id, [*tokens], end, 7, None, None]


def flush(links, **stats):
    links.flush(STATS | stats)


def read(sock) -> list[dict]:
    """All messages that are there; waits for one."""
    data = sock.recv(2**24)
    while not data.endswith(b"\n"):
        data += sock.recv(2**24)
    return [json.loads(part) for part in data.splitlines()]


def test_a_link_that_is_behind_holds_up_no_other(links):
    """Its tokens are joined, in their order, and take no more memory than tokens do."""
    slow = link_to(links)
    quick = link_to(links)
    received = []
    for step in range(8_000):  # some 0.8 MB, four times what a link holds
        for link in links.links.values():
            link.queue_row(row("a", step))
        flush(links)
        received += read(quick)
    assert [message["out"] for message in received] == [[row("a", step)] for step in range(8_000)]
    behind = links.links[0]
    assert behind.awaits_room
    assert list(behind.rows) == ["a"]
    assert len(behind.unsent) < 1000
    behind.queue_row(row("b", 1, end="stop"))  # one that came and ended in the meantime
    tokens = []
    rows = {}
    while "b" not in rows:
        for message in read(slow):
            rows = {row[0]: row for row in message["out"]}
            tokens += rows["a"][1] if "a" in rows else []
        links.receive(timeout=0)
        flush(links)
    assert tokens == list(range(8_000))
    assert rows["b"] == row("b", 1, end="stop")
    assert not behind.awaits_room
    assert not behind.rows
    events = links.selector.get_key(behind.sock).events
    assert events == selectors.EVENT_READ, "else the engine would never rest again"


def test_an_error_comes_once_and_after_the_tokens_before_it(links):
    sock = link_to(links)
    link = links.links[0]
    link.queue_row(row("a", 1))
    link.queue({"op": "error", "id": "a"})
    flush(links)
    assert [message["op"] for message in read(sock)] == ["step", "error"]
    link.queue_row(row("b", 1))
    flush(links)
    assert [message["op"] for message in read(sock)] == ["step"]


def test_links_are_sent_the_stats(links, monkeypatch):
    """
    A link without tokens is sent them at once when requests have come or ended, and else now and
    then, so that it knows that the engine lives. Each link is sent each delay once.
    """
    clock = Clock()
    monkeypatch.setattr(links_module, "time", clock)
    working = link_to(links)
    idle = link_to(links)
    for step in range(3):
        links.links[0].queue_row(row("a", step))
        flush(links, at_work=1, waited=[step])
    assert [message["stats"]["waited"] for message in read(working)] == [[0], [1], [2]]
    assert [message["stats"] for message in read(idle)] == [{"at_work": 1, "waited": [0]}]
    flush(links, at_work=0)
    assert [message["stats"] for message in read(idle)] == [{"at_work": 0, "waited": [1, 2]}]
    flush(links, waited=[3])
    clock.now += 0.09
    flush(links)
    clock.now += 0.02
    flush(links)
    assert [message["stats"] for message in read(idle)] == [STATS | {"waited": [3]}]


def test_greetings_and_ends(links):
    """An HTTP process may end with messages unread."""
    assert links.is_wanted
    early = link_to(links)
    links.set_greeting({"op": "ready"})
    late = link_to(links)
    assert read(early) == read(late) == [{"op": "ready"}]
    early.close()
    (link, message) = links.receive(timeout=10)[0]
    assert (link.number, message) == (0, {"op": "gone"})
    assert links.is_wanted
    flush(links)
    late.close()
    assert links.receive(timeout=10)[0][1] == {"op": "gone"}
    assert not links.is_wanted


@pytest.mark.parametrize(
    "value, received",
    [
        ({5: 1.5, 50256: -100.0}, {"5": 1.5, "50256": -100.0}),
        ([-(2**63), 2**64 - 1], [-(2**63), 2**64 - 1]),
        ("line\nbreak \u2028 \x00 é", "line\nbreak \u2028 \x00 é"),
        ([math.nan, -math.inf, 1e-300, -9999.0], [None, None, 1e-300, -9999.0]),
    ],
)
def test_values_cross_a_link(value, received):
    """A message is one line, whatever a text has in it; a seed has 64 bits; JSON has no NaN."""
    line = to_line({"value": value})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"value": received}
