"""
The engine's links to HTTP processes, without an engine: nobody waits for anybody, nothing is lost
or mixed up.
"""

import json
import selectors
import socket

import pytest

from serve import listen_for_links
from serving import links as links_module
from serving.client import connect
from serving.links import Links, join_rows

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
    sock.settimeout(2)  # all that is said is there at once: both ends are in this thread
    links.accept()
    return sock


def tell(links, **stats):
    links.flush(STATS | stats)


def read(sock) -> list[dict]:
    """All messages that are there; waits for one."""
    data = sock.recv(2**24)
    while not data.endswith(b"\n"):
        data += sock.recv(2**24)
    return [json.loads(part) for part in data.splitlines()]


def test_a_link_that_is_behind_holds_up_nobody(links):
    """
    Would catch: an engine that waits for a busy HTTP process, and with it all other processes'
    streams; tokens lost, doubled or in another order when they are joined; memory that grows by
    more than the tokens.
    """
    slow, quick = link_to(links), link_to(links)
    got = []
    for step in range(8_000):  # some 0.8 MB, four times what a link holds
        for link in links.links.values():
            link.queue_row(["a", [step], None, 7])
        tell(links)
        got += read(quick)
    assert [message["out"] for message in got] == [
        [["a", [step], None, 7]] for step in range(8_000)
    ]
    behind = links.links[0]
    assert behind.awaits_room and list(behind.rows) == ["a"] and len(behind.unsent) < 1000
    behind.queue_row(["b", [1], "stop", 0])  # one that came and ended in the meantime
    tokens, rest = [], {}
    while "b" not in rest:
        for message in read(slow):
            rest = {row[0]: row for row in message["out"]}
            tokens += rest["a"][1] if "a" in rest else []
        links.receive(timeout=0)
        tell(links)
    assert tokens == list(range(8_000)) and rest["b"] == ["b", [1], "stop", 0]
    assert not behind.awaits_room and not behind.rows
    assert links.selector.get_key(behind.sock).events == selectors.EVENT_READ, (
        "else the engine would never rest again"
    )


def test_rows_are_joined_with_their_scores_and_their_end():
    """
    A prompt's scores come with the first token, its own score with each, the reason with the last.
    """
    row = ["a", [1], None, 4, [["s1"]], ["prompt"]]
    join_rows(row, ["a", [2], None, 4, [["s2"]], None])
    join_rows(row, ["a", [3], "length", 4, [["s3"]], None])
    assert row == ["a", [1, 2, 3], "length", 4, [["s1"], ["s2"], ["s3"]], ["prompt"]]
    plain = ["b", [1], None, 0]
    join_rows(plain, ["b", [2], "stop", 0])
    assert plain == ["b", [1, 2], "stop", 0]


def test_an_error_comes_after_the_tokens_before_it(links):
    sock = link_to(links)
    link = links.links[0]
    link.queue_row(["a", [1], None, 0])
    link.queue({"op": "error", "id": "a"})
    tell(links)
    assert [message["op"] for message in read(sock)] == ["step", "error"]
    link.queue_row(["b", [1], None, 0])
    tell(links)
    assert [message["op"] for message in read(sock)] == ["step"], "and is told once"


def test_links_hear_how_the_engine_is(links, monkeypatch):
    """
    Who gets no tokens hears at once when work has come or gone, and else now and then, so that it
    knows that the engine lives. Each hears of each wait in the queue once, however seldom it is
    told.
    """
    working, idle = link_to(links), link_to(links)
    for step in range(3):
        links.links[0].queue_row(["a", [step], None, 0])
        tell(links, at_work=1, waited=[step])
    assert [message["stats"]["waited"] for message in read(working)] == [[0], [1], [2]]
    assert [message["stats"] for message in read(idle)] == [{"at_work": 1, "waited": [0]}]
    tell(links, at_work=0)
    assert [message["stats"] for message in read(idle)] == [{"at_work": 0, "waited": [1, 2]}]
    tell(links, waited=[3])
    monkeypatch.setattr(links_module, "STATS_SECONDS", 0)
    tell(links)
    assert [message["stats"] for message in read(idle)] == [{"at_work": 0, "waited": [3]}]


@pytest.mark.parametrize("name", ["queries", "hits", "preemptions"])
def test_a_count_that_has_changed_is_told_at_once(links, name):
    """
    A request of another HTTP process that came and went in one step left the counters in /metrics
    behind until there was work again (found by the simulator of the HTTP side).
    """
    idle = link_to(links)
    tell(links, **{name: 1})
    tell(links, **{name: 5})
    tell(links, **{name: 5})
    assert [message["stats"][name] for message in read(idle)] == [1, 5]


def test_whoever_comes_is_greeted_and_whoever_goes_is_told_of(links):
    early = link_to(links)
    links.set_greeting({"op": "ready"})
    late = link_to(links)
    assert read(early) == read(late) == [{"op": "ready"}]
    assert links.is_wanted
    early.close()
    (link, message) = links.receive(timeout=10)[0]
    assert (link.number, message) == (0, {"op": "gone"})
    late.close()
    links.receive(timeout=10)
    assert not links.is_wanted


def test_messages_arrive_in_parts(links):
    """A part of a message is kept until its end comes, and several may come at once."""
    sock = link_to(links)
    found = []
    for part in (b'{"op": "add", "id"', b': "1"}\n{"op"', b': "abort"}\n{}\n'):
        sock.sendall(part)
        found.append([message for _, message in links.receive(timeout=10)])
    assert found == [[], [{"op": "add", "id": "1"}], [{"op": "abort"}, {}]]
