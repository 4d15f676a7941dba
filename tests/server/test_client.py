"""
The engine's client, over a wire that the test holds: what it writes and when, who is told what, how
long it listens, and what it does when the engine is silent, deaf or gone. Time is the test's own.
"""

from types import SimpleNamespace

import pytest
from wires import House

from engine.links import to_line
from server import client as client_module


@pytest.fixture
def house():
    with House() as house:
        yield house


@pytest.fixture
def client(house):
    return house.service.client


def ops(house) -> list[tuple[str, str]]:
    """What the engine heard, in its order."""
    return [(message["op"], message["id"]) for message in house.engine.heard]


def test_what_the_engine_is_told_of_a_request(house):
    """
    Ids of our own, for clients may choose the same; a choice's is its prompt's and its number, as
    the engine's.
    """
    house.ask(
        [[1, 2], [3]],
        n=2,
        max_tokens=5,
        priority=-3,
        seed=9,
        cache_salt="s",
        request_id="x",
        logprobs=1,
    )
    first, second = house.engine.heard
    assert (first["op"], first["id"], first["prompt"]) == ("add", "0", [1, 2])
    assert (second["op"], second["id"], second["prompt"]) == ("add", "1", [3])
    options = {"n": 2, "priority": -3, "cache_salt": ":s", "prompt_logprobs": None}
    assert first["options"].pop("name") == second["options"].pop("name") != ""  # X-Request-Id
    assert first["options"] == second["options"] == options
    assert (
        first["params"]["max_tokens"] == 5
        and first["params"]["seed"] == 9
        and first["params"]["logprobs"] == 1
    )
    assert list(house.choices) == ["0", "0.1", "1", "1.1"]
    assert [choice.index for choice in house.choices.values()] == [0, 1, 2, 3]


def test_an_ended_choice_is_nobodys_any_more(house, client):
    """Its row is dropped if it comes again; an abort of it is none."""
    house.ask(n=2, max_tokens=9)
    choice = house.choices["0"]
    house.engine.step({"0": b"x"}, "stop")
    assert list(house.choices) == ["0.1"] and client.abort(choice) is False
    house.engine.step({"0": b"y", "7": b"z"})
    assert choice.num_tokens == 1 and ops(house) == [("add", "0")]
    assert client.abort(house.choices["0.1"]) is True and ops(house)[1:] == [("abort", "0.1")]


def test_a_stop_string_ends_the_engines_work(house):
    """It knows nothing of them. With the last token there is nothing left to end."""
    house.ask(max_tokens=9, stop="b")
    house.engine.step({"0": b"ab"})
    assert ops(house) == [("add", "0"), ("abort", "0")] and not house.choices
    house.ask(max_tokens=9, stop="b")
    house.engine.step({"1": b"ab"}, "length")
    assert ops(house)[2:] == [("add", "1")]
    house.ask(["ab", "cd"], max_tokens=9, stop="b")  # a call goes on for its other prompts
    house.engine.step({"2": b"ab", "3": b"x"})
    assert ops(house)[3:] == [("add", "2"), ("add", "3"), ("abort", "2")] and list(
        house.choices
    ) == ["3"]


def test_errors_are_of_their_own_choice(house):
    one, other = house.ask(), house.ask()
    house.engine.say(
        {"op": "error", "id": "gone", "message": "whose?", "kind": "internal"},
        {"op": "error", "id": "1", "message": "no", "kind": "invalid"},
    )
    assert not one.said and other.answer().status == 400 and list(house.choices) == ["0"]


# --------------------------------------------------------------------------------------------------
# A link that is full


def test_what_a_full_link_has_no_room_for_waits_in_its_order(house, client):
    house.clock.call_soon(client.pause_writing)
    callers = [house.ask("a"), house.ask("b")]
    assert ops(house) == [] and list(house.choices) == ["0", "1"]
    house.clock.call_soon(client.resume_writing)
    house.clock.settle()
    assert ops(house) == [("add", "0"), ("add", "1")]
    callers[0].hang_up()
    assert ops(house)[2:] == [("abort", "0")] and not client.unsent


def test_a_full_link_is_filled_no_further(house, client):
    """While it takes the first of what waits, it may say again that it is full."""
    house.clock.call_soon(client.pause_writing)
    for _ in range(3):
        house.ask()
    write = house.engine.wire.write

    def write_and_pause(data):
        write(data)
        client.pause_writing()

    house.engine.wire.write = write_and_pause
    for count in (1, 2, 3):
        house.clock.call_soon(client.resume_writing)
        house.clock.settle()
        assert len(ops(house)) == count and len(client.unsent) == 3 - count


def test_a_closed_link_that_has_room_again_is_sent_nothing(client):
    """The server stopped while the engine did not read: resume_writing comes after close."""
    client.pause_writing()
    client.listen(True)
    client.close()
    client.resume_writing()
    assert client.unsent and not client.is_full


def test_an_engine_that_does_not_read_need_not_hear_of_who_has_gone(house, client):
    """Of a prompt of which somebody waits it hears all, its aborts too."""
    before = house.ask()
    house.clock.call_soon(client.pause_writing)
    callers = [house.ask(n=2), house.ask(n=2, max_tokens=9), house.ask()]
    for caller in (callers[0], callers[2], before):
        caller.hang_up()
    client.abort(house.choices["2.1"])
    house.clock.call_soon(client.resume_writing)
    house.clock.settle()
    assert ops(house) == [("add", "0"), ("add", "2"), ("abort", "0"), ("abort", "2.1")]
    assert list(house.choices) == ["2"]


# --------------------------------------------------------------------------------------------------
# Rounds


def step_of(house, id: str, data: bytes, finish: str | None = None) -> bytes:
    return to_line(
        {
            "op": "step",
            "out": [[id, list(data), finish, 0, None, None]],
            "stats": house.engine.stats,
        }
    )


def receive(house, data: bytes, takes: float):
    """A round whose work takes so many seconds."""
    wire = house.engine.wire
    house.clock.call_soon(wire.protocol.data_received, data)
    house.clock.call_soon(pass_seconds, house, takes)
    house.clock.settle()


def pass_seconds(house, seconds: float):
    house.clock.now += seconds


@pytest.mark.parametrize(
    "takes, pause", [(0.0, 0), (0.0009, 0), (0.002, 0.002), (0.02, 0.02), (3.0, 0.02)]
)
def test_the_engine_is_left_unread_for_as_long_as_a_round_took(house, takes, pause):
    """Up to 20 ms; a stream that is alone never waits."""
    house.ask(max_tokens=99, stream=True)
    receive(house, step_of(house, "0", b"x"), takes)
    assert house.engine.wire.is_reading == (pause == 0)
    if pause:
        house.clock.run(pause - 0.0001)
        assert not house.engine.wire.is_reading
        house.clock.run(0.0002)
    assert house.engine.wire.is_reading


def test_half_a_message_is_no_round(house):
    caller = house.ask(max_tokens=9, stream=True)
    data = step_of(house, "0", b"x")
    heard = house.service.client.heard
    receive(house, data[:20], 1)
    assert house.engine.wire.is_reading and not caller.said and house.service.client.heard == heard
    receive(house, data[20:], 0)
    assert caller.said


def test_one_pause_at_a_time(house):
    """A message that was read before the pause began ends none and begins none."""
    house.ask(max_tokens=99, stream=True)
    receive(house, step_of(house, "0", b"x"), 0.02)
    house.clock.run(0.01)
    receive(house, step_of(house, "0", b"y"), 0.005)
    assert not house.engine.wire.is_reading
    house.clock.run(0.0051)
    assert house.engine.wire.is_reading
    house.clock.run(1)
    assert house.engine.wire.is_reading
    receive(house, step_of(house, "0", b"z"), 0.01)
    assert not house.engine.wire.is_reading
    house.clock.run(0.0101)
    assert house.engine.wire.is_reading


def test_the_steps_of_a_round_are_one_event(house):
    """An error comes after the tokens before it, and these come once."""
    caller, other = (house.ask(max_tokens=99, stream=True) for _ in range(2))
    house.engine.step({"0": b"!", "1": b"?"})
    error = {"op": "error", "id": "0", "message": "broken", "kind": "internal"}
    *both, last = [
        {
            "op": "step",
            "out": [[id, [token], None, 0, None, None] for id in "01"],
            "stats": house.engine.stats,
        }
        for token in b"abc"
    ]
    house.engine.say(*both, error, last)
    *chunks, end = caller.events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["!", "ab"]
    assert end["error"]["message"] == "broken"
    assert "".join(event["choices"][0]["text"] for event in other.events) == "?abc"


def test_at_work_is_what_the_engine_said_last(house, client):
    stats = [house.engine.stats | {"at_work": number} for number in (4, 7)]
    heard = []
    client.on_stats = lambda news: heard.append(news["at_work"])
    house.engine.say(*({"op": "step", "out": [], "stats": each} for each in stats))
    assert client.at_work == 7 and heard == [4, 7]


# --------------------------------------------------------------------------------------------------
# An engine that is gone


class Process:
    """What `start` returns: the test says when it has ended."""

    def __init__(self, sentinel: int):
        self.sentinel = sentinel


@pytest.mark.parametrize(
    "words, reason", [(None, "the engine stopped unexpectedly"), ("no model here", "no model here")]
)
def test_an_engine_that_dies_before_it_took_the_link_in_is_noticed(words, reason):
    """Half a second after its process, in which its last words may still be read."""
    house = House(ready=False)
    client = house.service.client
    readers = {}
    client.process = Process(5)
    house.clock.add_reader = lambda fd, call, *args: readers.__setitem__(fd, (call, args))
    house.clock.remove_reader = readers.pop
    with house:
        call, args = readers[5]
        house.clock.call_soon(call, *args)
        house.clock.run(0.4)
        assert client.state == "loading" and not readers
        if words:
            house.engine.say({"op": "fatal", "message": words})
            house.engine.die()
            assert (client.state, client.reason) == ("dead", words)
        house.clock.run(0.2)
        assert (client.state, client.reason) == ("dead", reason) and len(house.engines) == 1
        assert house.service.server.should_exit


def test_a_process_that_ended_is_no_reason_to_end_another(house, client):
    """An engine that was ready is missed by its link; its successor is not its process."""
    old = client.process = Process(5)
    house.engine.die()
    client.process = Process(6)
    house.clock.call_soon(client._end_unheard, old)
    house.clock.settle()
    assert client.state == "restarting"
    house.engine.ready()
    house.clock.call_soon(client._end_unheard, client.process)
    house.clock.settle()
    assert client.state == "ready"


def test_another_engine_that_dies_before_it_took_the_link_in_is_noticed(house, client):
    """Clients would have waited for it for ever."""
    house.engine.die()
    house.clock.call_soon(client._end_unheard, client.process)
    house.clock.settle()
    assert client.state == "dead" and house.service.server.should_exit


def test_a_restart_begins_anew(house, client):
    """Another link, what was not sent or half read is forgotten, and nothing counts as in work."""
    started = []
    client.start = lambda: started.append(len(house.engines))
    house.engine.step(at_work=3)
    house.clock.call_soon(client.pause_writing)
    caller = house.ask()
    house.clock.call_soon(house.engine.wire.protocol.data_received, b'{"op": "st')
    house.clock.settle()
    house.engine.die()
    assert caller.answer().status == 500 and started == [
        2
    ]  # connected first: an engine without links ends
    assert (client.at_work, client.unsent, client.is_full, client.may_restart) == (
        0,
        {},
        False,
        False,
    )
    house.engine.ready(max_model_len=77)
    assert client.state == "ready" and client.info["max_model_len"] == 77
    house.ask()
    assert ops(house) == [("add", "1")]


def test_an_engine_that_dies_while_it_loads_is_not_started_again():
    with House(ready=False) as house:
        house.engine.die()
        assert house.service.client.state == "dead" and len(house.engines) == 1


def test_nobody_writes_to_an_engine_that_is_gone(house, client):
    house.ask()
    client.close()
    house.clock.settle()
    assert client.state == "ready" and len(house.engines) == 1  # it was us who closed it
    written = len(house.engine.wire.written)
    assert client.abort(house.choices["0"]) and len(house.engine.wire.written) == written


def test_trouble_is_silence_while_there_is_work(monkeypatch):
    """STALL_SECONDS of it; the silence of an idle engine is none."""
    now = [100.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(client_module, "connect", lambda path: None)
    client = client_module.EngineClient("nowhere")
    now[0] += 121
    assert client.trouble() == ""
    client.choices = {"a": None}
    assert client.trouble() == "no step in 120 s"
    now[0] -= 1
    assert client.trouble() == ""
    for state in ("restarting", "dead"):
        client.state, client.reason = state, "why"
        assert client.trouble() == "why"
