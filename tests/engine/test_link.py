"""
The engine's link to the HTTP process, without an engine: neither side waits for the other, and
nothing is lost or mixed up.
"""

import json
import math
import selectors
import socket
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest

from engine.grammar import COMPILE_POLL
from engine.link import Link, to_line
from engine.process import serve_step
from tests.simulated_device import finish, greedy, simulated_engine, tokens_of

STATS = {"running": 0}


@pytest.fixture
def ends():
    """Return the link, and the socket of the HTTP process."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(2)  # both ends are in this thread, so messages are there immediately
    with ours, theirs:
        yield Link(ours), theirs


def row(id: str, *tokens: int, end: str | None = None) -> list:
    return [id, [*tokens], end, 7, None, None]


def connected(engine, link) -> Callable:
    """Connect an engine, and return a function that runs one iteration of its loop."""
    for stage in engine.stages.values():
        stage.connect(link, "")
    return partial(serve_step, engine, link)


def read(sock) -> list[dict]:
    """Return all messages that are there; wait for at least one."""
    data = sock.recv(2**24)
    while not data.endswith(b"\n"):
        data += sock.recv(2**24)
    return [json.loads(part) for part in data.splitlines()]


def test_tokens_and_delays_are_joined_while_the_link_is_full(ends):
    """They keep their order, and take no more memory than they need."""
    link, sock = ends
    engine, other = (simulated_engine(context_length=1000, num_blocks=300) for _ in range(2))
    turn = connected(engine, link)
    for each in engine, other:
        each.add_request("a", [1, 2, 3], greedy(900))
    while engine.has_work:  # five times what a link can buffer
        if engine.num_steps == 500:  # another request comes and ends in the meantime
            engine.add_request("b", [1, 2], greedy(2), prompt_logprobs=0)
        turn()
    assert list(link.rows) == ["a", "b"]
    assert len(link.unsent) < 1000
    messages = []
    while link.unsent:
        messages += read(sock)
        turn()
    messages += read(sock)
    rows = [row for message in messages for row in message["out"]]
    tokens = [token for id, new, *_ in rows if id == "a" for token in new]
    assert tokens == tokens_of(finish(other), "a")
    [of_b] = [row for row in rows if row[0] == "b"]
    assert of_b[2] == "length"
    assert len(of_b[5]) == 1, "a prompt's scores come with the first of its rows"
    assert sum(len(message["stats"]["waited"]) for message in messages) == 2
    assert not link.rows
    events = link.selector.get_key(link.sock).events
    assert events == selectors.EVENT_READ, "otherwise the engine would never sleep again"


def test_an_idle_engine_wakes_when_a_full_link_has_room(ends):
    """Would catch: the last tokens of an answer never coming."""
    link, sock = ends
    link.send({"text": "x" * 2**20})
    assert link.unsent
    while link.unsent:
        sock.recv(2**24)
        link.receive(timeout=2)


def test_an_error_comes_once_and_after_the_tokens_before_it(ends):
    link, sock = ends
    link.queue_row(row("a", 1))
    link.queue({"op": "error", "id": "a"})
    link.flush(STATS)
    assert [message["op"] for message in read(sock)] == ["step", "error"]
    link.queue_row(row("b", 1))
    link.flush(STATS)
    assert [message["op"] for message in read(sock)] == ["step"]


def test_stats_are_sent_when_they_change(ends):
    """
    They are also sent without tokens, because a prompt may take many steps. An idle engine is
    silent.
    """
    link, sock = ends
    for steps in (1, 1, 2, 2, 1):
        link.flush({"steps": steps})
    assert [message["stats"]["steps"] for message in read(sock)] == [1, 2, 1]


def test_a_link_ends_with_its_other_side(ends):
    """The other side may end with messages unread, or just when it is sent more."""
    link, sock = ends
    sock.sendall(to_line({"op": "abort", "id": "a"}))
    assert link.receive(timeout=None) == [{"op": "abort", "id": "a"}]
    sock.close()
    assert link.is_open
    link.flush(STATS)
    assert not link.is_open
    link.is_open = True
    assert link.receive(timeout=10) == []
    assert not link.is_open


def test_values_cross_a_link():
    """A message is one line, whatever its text contains. A seed has 64 bits. JSON has no NaN."""
    sent = [{5: 1.5}, -(2**63), 2**64 - 1, "line\nbreak \u2028 \x00 é", 1e-300]
    line = to_line({"value": [*sent, math.nan, -math.inf]})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"value": [{"5": 1.5}, *sent[1:], None, None]}


@pytest.mark.parametrize(
    ("has_work", "due_in", "compiles", "expected"),
    [
        (True, 0.05, True, 0),  # seconds
        (False, None, False, None),
        (False, 0.05, False, 0.05),
        (False, 0.0, False, 0.0),
        (False, None, True, COMPILE_POLL),
        (False, 0.05, True, COMPILE_POLL),
    ],
)
def test_how_long_an_engine_sleeps(has_work, due_in, compiles, expected):
    """Would catch: a grammar that waits until the next lines for a listener are due."""
    engine = simulated_engine()
    link = Mock()
    link.receive.return_value = []
    turn = connected(engine, link)
    engine.stages["record"].publisher.due_in = lambda: due_in
    engine.stages["grammar"].queue.waiting = compiles
    engine.stages["grammar"].queue.pass_on = lambda messages: messages
    if has_work:
        engine.add_request("a", [1], greedy(1))
    turn()
    link.receive.assert_called_once_with(expected)
