"""
The engine's client, on a wire that the test controls: what it writes and when, how long it leaves
the link unread, and what it does if the engine does not read or is gone. The test also controls
time.
"""

import pytest

from engine.link import to_line
from server.client import IDLE


@pytest.fixture
def client(house):
    return house.service.client


def ops(house) -> list[tuple[str, str]]:
    """Return the messages that the engine was sent, in order."""
    return [(message["op"], message["id"]) for message in house.engine.heard]


def test_a_submission_that_raises_leaves_nothing(house, client, monkeypatch):
    """Previously its choices occupied places for ever, and an idle engine was reported dead."""
    write = client._write

    def fails_to_add(**message):
        if message["op"] == "add":
            raise TypeError("no message can carry this")
        write(**message)

    monkeypatch.setattr(client, "_write", fails_to_add)
    assert house.ask(["a", "b"], n=2).status == 500
    assert not house.choices
    assert not client.unsent


# --------------------------------------------------------------------------------------------------
# A link that is full


def test_a_full_link_is_filled_no_further(house, client):
    """Messages wait until it has room. It may be full again after taking the first one."""
    house.clock.do(client.pause_writing)
    for _ in range(3):
        house.ask()
    write = client.transport.write

    def write_and_pause(data):
        write(data)
        client.pause_writing()

    client.transport.write = write_and_pause
    for count in (1, 2, 3):
        house.clock.do(client.resume_writing)
        assert len(ops(house)) == count
        assert len(client.unsent) == 3 - count


def test_a_closed_link_that_has_room_again_is_sent_nothing(client):
    """The server stopped while the engine did not read, so resume_writing comes after close."""
    client.pause_writing()
    client.listen(True, False)
    client.close()
    client.resume_writing()
    assert client.unsent
    assert not client.is_full


def test_an_engine_that_does_not_read_is_not_sent_what_has_been_aborted(house, client):
    """
    If one choice of a prompt still waits, everything about the prompt is sent, including aborts.
    """
    before = house.ask()
    house.clock.do(client.pause_writing)
    callers = [house.ask(n=2), house.ask(n=2, max_tokens=9), house.ask()]
    for caller in (callers[0], callers[2], before):
        caller.hang_up()
    client.abort(house.choices["2.1"])
    house.clock.do(client.resume_writing)
    assert ops(house) == [("add", "0"), ("add", "2"), ("abort", "0"), ("abort", "2.1")]
    assert list(house.choices) == ["2"]


# --------------------------------------------------------------------------------------------------
# Rounds


def step_of(house, id: str, data: bytes) -> dict:
    out = [[id, list(data), None, 0, None, None]]
    return {"op": "step", "out": out, "stats": house.engine.stats}


def receive(house, data: bytes, seconds: float):
    """Receive a round whose work takes this long."""

    def work():
        house.clock.clock.now += seconds

    house.clock.call_soon(house.service.client.data_received, data)
    house.clock.do(work)


@pytest.mark.parametrize("seconds, pause", [(0.0009, 0), (0.002, 0.002), (3.0, 0.02)])
def test_the_engine_is_left_unread_for_as_long_as_a_round_took(house, client, seconds, pause):
    """The pause is at most 20 ms. A stream without company never waits."""
    house.ask(max_tokens=99, stream=True)
    receive(house, to_line(step_of(house, "0", b"x")), seconds)
    assert client.transport.is_reading == (pause == 0)
    if pause:
        house.clock.run(pause - 0.0001)
        assert not client.transport.is_reading
        house.clock.run(0.0002)
    assert client.transport.is_reading


def test_one_pause_at_a_time(house, client):
    """A message that was read before the pause began neither ends it nor begins another."""
    house.ask(max_tokens=99, stream=True)
    line = to_line(step_of(house, "0", b"x"))
    receive(house, line, 0.02)
    house.clock.run(0.01)
    receive(house, line, 0.005)
    assert not client.transport.is_reading
    house.clock.run(0.0051)
    assert client.transport.is_reading
    house.clock.run(1)
    assert client.transport.is_reading
    receive(house, line, 0.01)
    assert not client.transport.is_reading


def test_half_a_message_is_no_round(house, client):
    """It is also no sign of life."""
    heard = client.heard
    house.clock.run(1)
    receive(house, b'{"op": "st', 1)
    assert client.transport.is_reading
    assert client.heard == heard


def test_the_steps_of_a_round_are_one_event(house):
    """An error comes after the tokens before it, and these tokens come only once."""
    caller, other = (house.ask(max_tokens=99, stream=True) for _ in range(2))
    house.engine.step({"0": b"!", "1": b"?"})
    error = {"op": "error", "id": "0", "message": "broken", "kind": "internal"}
    steps = [step_of(house, id, data) for data in (b"a", b"b", b"c") for id in "01"]
    house.engine.say(*steps[:4], error, *steps[4:])
    *chunks, end = caller.events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["!", "ab"]
    assert end["error"]["message"] == "broken"
    assert "".join(event["choices"][0]["text"] for event in other.events) == "?abc"


# --------------------------------------------------------------------------------------------------
# An engine that is gone


def test_a_restart_begins_anew(house, client):
    """There is a new link, anything unsent or half read is forgotten, and no work is counted."""
    house.engine.step(running=3)
    house.clock.do(client.pause_writing)
    house.ask()
    house.engine.say({"op": "fatal", "message": "no memory"})
    house.engine.send(b'{"op": "st')
    house.engine.die()
    assert (client.stats, client.unsent, client.is_full) == (IDLE, {}, False)
    house.engine.ready(max_model_len=77)
    assert client.info["max_model_len"] == 77
    house.ask()
    assert ops(house) == [("add", "1")]
    house.engine.die()
    assert (client.state, client.reason) == ("dead", "the engine stopped unexpectedly")
