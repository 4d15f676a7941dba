"""
The engine tells what it does: to nobody, to listeners of GET /events, to a file. That what it tells
is right and complete is for test_replay.py and the simulator to say.
"""

import json
import resource

import pytest
from wires import House

import serve
from engine import events
from engine import process as loop
from engine.events import Recorder, Subscribers, record_to
from paged import TO_COME
from server import live as listeners
from tests.simulated_runner import finish, greedy, simulated_engine

SALT = "key 1:"


@pytest.fixture
def told():
    """told(engine, ..) is the list that the lines of a new Recorder go to, parsed."""

    def listen(engine, tokens=False) -> list[dict]:
        lines = []
        engine.recorder = Recorder(engine, tokens)
        engine.recorder.listeners.append(lambda text: lines.append(json.loads(text)))
        return lines

    return listen


def changes(line: dict) -> dict:
    """A line without its time."""
    return {name: value for name, value in line.items() if name != "time"}


# --------------------------------------------------------------------------------------------------
# Lines


def test_a_request_from_its_arrival_to_its_end(told):
    """Literally, as REFERENCE.md tells it: a pool of 8 blocks of 4, a prompt of 6, 3 tokens."""
    engine = simulated_engine(num_blocks=8, block_size=4, overlap=False)
    lines = told(engine)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], greedy(3), name="call", cache_salt=SALT)
    finish(engine)
    first, second, third, idle = map(changes, lines)
    new = {"r": 1, "name": "call", "key": "key 1", "choice": 0, "prompt": 6, "max_tokens": 3}
    assert first == {
        "event": "step",
        "new": [new | {"status": "waiting", "filled": 0}],
        "step": 0,
        "admitted": [[1, 0, 6]],
        "chunks": [[1, 0, 6]],
        "resolved": 0,
        "sampled": 1,
        "committed": [0],
        "tables": [[1, 0, [0, 1]]],
    }
    assert second == {"event": "step", "step": 1, "decodes": [1], "resolved": 1, "sampled": 1}
    assert third == {
        "event": "step",
        "step": 2,
        "resolved": 2,
        "sampled": 1,
        "committed": [1],
        "ended": [[1, "length", 3]],
        "idle": [1, 0],  # its tail is evicted first
    }
    assert idle == {"event": "idle"}


def test_token_ids_are_texts_and_told_only_where_asked_for(told):
    """In the lines of steps, and in snapshots: those of /events and the first of --record."""
    engine = simulated_engine(num_blocks=8, block_size=4)
    lines = told(engine, tokens=True)
    request = engine.add_request("a", [1, 2, 3], greedy(4))
    engine.step()
    assert json.loads(engine.recorder.snapshot())["requests"][0]["tokens"][:3] == [1, 2, 3]
    finish(engine)
    assert [t for line in lines for t in line.get("tokens", [])] == [
        [1, token] for token in request.generated_tokens
    ]
    lines = told(engine)
    engine.add_request("b", [1, 2, 3], greedy(4))
    engine.step()
    snapshot = json.loads(engine.recorder.snapshot())
    finish(engine)
    assert len(snapshot["requests"]) == 1
    for line in [*lines, snapshot]:
        assert "tokens" not in line and "tokens" not in str(line.get("requests", [])).replace(
            "max_tokens", ""
        )


@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_is_all_there_is(told, overlap):
    """Taken in the middle of an answer, with tokens under way."""
    engine = simulated_engine(num_blocks=8, block_size=4, overlap=overlap, max_num_seqs=1)
    told(engine, tokens=True)
    request = engine.add_request("a", [1, 2, 3, 4, 5], greedy(9))
    engine.add_request("b", [7], greedy(1))
    for _ in range(4):
        engine.step()
    line = json.loads(engine.recorder.snapshot())
    first, second = sorted(line["requests"], key=lambda q: q["r"])
    assert line["version"] == 2 and line["step"] == 4 and line["decodes"] == [1]
    assert (first["generated"], first["filled"], first["target"]) == (4, 5 + 3, 5)
    assert first["tokens"] == [t for t in request.tokens_so_far if t is not TO_COME]
    assert len(first["tokens"]) == 5 + 4 - overlap
    assert first["table"] == request.block_table
    assert (second["status"], second["table"]) == ("waiting", [])
    assert line["committed"] == request.block_table[: request.num_committed]


def test_why_the_first_in_the_queue_waits(told):
    """It needs 3 blocks (and leaves none of the pool's 8 in reserve), 2 are spare."""
    engine = simulated_engine(num_blocks=8, block_size=4, watermark=0, overlap=False)
    lines = told(engine)
    engine.add_request("a", [1, 2, 3] * 7, greedy(3))
    engine.add_request("b", [5] * 10, greedy(1))
    engine.step()
    assert lines[-1]["lack"] == [2, 3, 2]
    finish(engine)
    assert "lack" not in lines[-2]


def test_a_failed_step_is_followed_by_a_snapshot(told):
    """What its plan has moved no table shows: evicted blocks, hits that were given back."""
    engine = simulated_engine(num_blocks=8, block_size=4, overlap=False)
    lines = told(engine)
    engine.add_request("a", [1, 2, 3], greedy(4))
    launch = engine.runner.launch

    def break_down(plan):
        engine.runner.launch = launch
        raise RuntimeError("out of luck")

    engine.runner.launch = break_down
    engine.step()
    step, snapshot, idle = lines
    assert snapshot["event"] == "snapshot" and snapshot["requests"] == []
    assert "step" not in step and idle["event"] == "idle"


# --------------------------------------------------------------------------------------------------
# To HTTP processes


class FakeLinks:
    def __init__(self, count: int):
        self.links = {number: FakeLink() for number in range(count)}

    def send(self, link, message: dict):
        lines = message["lines"]
        link.told.append([json.loads(line) for line in lines.split("\n")] if lines else [])


class FakeLink:
    def __init__(self):
        self.unsent = b""
        self.told = []

    def take(self) -> list[list[str]]:
        """The events of the messages since the last time."""
        told = [[line["event"] for line in lines] for lines in self.told]
        self.told.clear()
        return told


class Told:
    """An engine, its Subscribers, and links, at a clock that the test counts."""

    def __init__(self, num_links: int = 1):
        self.engine = simulated_engine(num_blocks=8, block_size=4, overlap=False)
        self.audience = Subscribers(self.engine)
        self.links = FakeLinks(num_links)

    def step(self):
        self.engine.step()
        self.audience.publish(self.links)

    def tell_after(self, clock, seconds: float):
        clock.now += seconds
        self.audience.publish(self.links)

    def begin(self, clock, prompt=(1, 2, 3), max_tokens=20):
        """The first link listens; all were sent their snapshots, and a request is there."""
        self.audience.join(self.links.links[0], False)
        self.tell_after(clock, 1)
        for link in self.links.links.values():
            assert link.take() == [["snapshot"]]
        self.engine.add_request("1:a", [*prompt], greedy(max_tokens))


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which the test counts."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(events, "time", clock)
    return clock


def test_nothing_is_computed_before_somebody_listens(clock):
    told = Told()
    told.engine.add_request("a", [1, 2, 3], greedy(9))
    told.step()
    told.audience.leave(told.links.links[0])  # of a link that never listened, too
    told.tell_after(clock, 1)
    assert told.engine.recorder is None and told.audience.due_in(told.links) is None
    assert not told.links.links[0].told


def test_ten_minutes_after_the_last_listener_nothing_is_computed_any_more(clock):
    """Whoever comes back before that finds what happened meanwhile; then all are told the end."""
    told = Told(2)
    told.begin(clock)
    first, second = told.links.links.values()
    told.audience.join(second, False)
    told.audience.leave(first)
    told.tell_after(clock, 1000)  # one listens on
    told.audience.leave(second)
    told.tell_after(clock, 599)
    told.step()
    assert told.engine.recorder is not None and first.take() == second.take() == [["step"]]
    told.audience.join(first, False)
    told.audience.leave(first)
    told.tell_after(clock, 599)
    assert told.engine.recorder is not None
    told.tell_after(clock, 2)
    assert told.engine.recorder is None and first.take() == second.take() == [[]]
    told.step()
    told.tell_after(clock, 1)
    assert not first.told and told.audience.due_in(told.links) is None
    told.audience.join(second, False)  # and from a snapshot on again
    told.tell_after(clock, 1)
    assert first.take() == second.take() == [["snapshot"]]


def test_the_time_goes_on_where_nobody_listened(clock):
    """A page that slept for an hour took what it was told then for lines that it had."""
    told = Told()
    first, second = (json.loads(snapshot_at(told, clock, seconds)) for seconds in (5, 3600))
    assert (
        second["time"] - first["time"] == pytest.approx(3600)
        and first["engine"] == second["engine"]
    )
    other = json.loads(snapshot_at(Told(), clock, 1))
    assert other["engine"] != first["engine"]  # in the same process, as in a new container


def snapshot_at(told, clock, seconds: float) -> str:
    clock.now += seconds
    return Recorder(told.engine).snapshot()


def test_a_file_goes_on_without_listeners(clock, tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch()
    told = Told()
    record_to(str(path), told.engine)
    recorder = told.engine.recorder
    told.begin(clock)
    told.audience.leave(told.links.links[0])
    told.tell_after(clock, 601)
    assert told.engine.recorder is recorder and len(recorder.listeners) == 1


def test_links_are_told_ten_times_a_second_and_in_order(clock):
    """The first is a snapshot, at once; then all lines since the last time, as one message."""
    told = Told()
    link = told.links.links[0]
    told.audience.join(link, False)
    assert told.audience.due_in(told.links) == 0
    told.audience.publish(told.links)
    assert link.take() == [["snapshot"]]
    assert told.audience.due_in(told.links) is None
    told.engine.add_request("a", [1, 2, 3], greedy(5))
    for _ in range(3):
        told.step()
    assert not link.told and told.audience.due_in(told.links) == pytest.approx(0.1)
    told.tell_after(clock, 0.11)
    assert [line["step"] for line in link.told.pop()] == [0, 1, 2]
    finish(told.engine)
    told.tell_after(clock, 0.05)
    assert not link.told and told.audience.due_in(told.links) == pytest.approx(0.05)
    told.tell_after(clock, 0.06)
    assert link.take() == [["step", "step", "idle"]]


def test_all_http_processes_are_told_when_one_has_listeners(clock):
    """A page that is loaded again may reach another process; one that comes later is told, too."""
    told = Told(2)
    told.begin(clock)
    told.step()
    told.links.links[2] = FakeLink()
    told.tell_after(clock, 0.2)
    assert [link.take() for link in told.links.links.values()] == [
        [["step"]],
        [["step"]],
        [["snapshot"]],
    ]
    told.step()
    told.tell_after(clock, 0.2)
    assert [link.take() for link in told.links.links.values()] == [[["step"]]] * 3


def test_a_link_that_is_behind_gets_one_snapshot_and_then_lines_again(clock):
    """
    Its lines are not kept for it: memory is not for a reader that sleeps. It got a whole snapshot
    ten times a second for ever.
    """
    told = Told(2)
    told.begin(clock)
    slow, quick = told.links.links.values()
    slow.unsent = b"the end of a message"
    told.step()
    told.tell_after(clock, 0.2)
    assert not slow.told and quick.take() == [["step"]] and not told.audience.lines
    slow.unsent = b""
    told.step()
    told.tell_after(clock, 0.2)
    assert slow.take() == [["snapshot"]] and quick.take() == [["step"]]
    for _ in range(3):
        told.step()
        told.tell_after(clock, 0.2)
        assert slow.take() == quick.take() == [["step"]]
    told.tell_after(clock, 0.2)
    assert not slow.told and told.audience.due_in(told.links) is None


def test_a_link_that_dies_while_it_listens_is_forgotten(clock):
    """By the loop: the engine wrote to its closed socket, and died. Nobody is left: it ends."""
    told = Told(2)
    told.begin(clock)
    first, second = told.links.links.values()
    told.links.receive = lambda timeout: [(first, {"op": "gone"})]
    told.links.flush = lambda stats: None
    first.number = 0
    second.queue_row = lambda row: None
    del told.links.links[0]
    loop.serve_step(told.engine, told.links, told.audience, None)
    told.links.receive = lambda timeout: []
    clock.now += 1
    loop.serve_step(told.engine, told.links, told.audience, None)
    assert not told.audience.listening and first not in told.audience.up_to_date
    assert not first.told and second.take() == [["step", "step"]]
    told.tell_after(clock, 601)
    assert told.engine.recorder is None and not first.told


# --------------------------------------------------------------------------------------------------
# GET /events

KEYS = ("one", "two")
NEW = {"status": "waiting", "filled": 0, "choice": 0, "prompt": 3, "max_tokens": 4}


def snapshot(*requests: dict, **more) -> dict:
    return {"event": "snapshot", "requests": list(requests), **more}


def step(number: int, **more) -> dict:
    return {"event": "step", "step": number, **more}


def say(house, *lines: dict):
    text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    house.engine.say({"op": "events", "lines": text})


def told_to(caller) -> list:
    """The lines that a client has got, each as its event, or as the number of its step."""
    return [line.get("step", line["event"]) for lines in caller.events for line in lines]


ON = {"op": "listen", "on": True, "tokens": False}
OFF = ON | {"on": False}


def test_a_listener_is_told_from_a_snapshot_on():
    with House() as house:
        assert not house.engine.of("listen")
        caller = house.call("GET", "/events")
        assert house.engine.of("listen") == [ON]
        assert "200 OK" in caller.said and "text/event-stream" in caller.said
        say(house, snapshot())
        say(house, step(5))
        say(house, step(6), {"event": "idle"})
        events = [[line["event"] for line in lines] for lines in caller.events]
        assert events == [["snapshot"], ["step"], ["step", "idle"]]
        second = house.call("GET", "/events")
        assert told_to(second) == ["snapshot", 5, 6, "idle"], "the history"
        say(house, step(7))
        assert told_to(caller) == told_to(second) == ["snapshot", 5, 6, "idle", 7]
        caller.hang_up()
        assert house.engine.of("listen") == [ON]
        second.hang_up()
        assert house.engine.of("listen") == [ON, OFF]


def test_who_comes_back_has_the_history():
    """A page that is loaded again; what happened without it, too."""
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot(), step(1))
        caller.hang_up()
        say(house, step(2))
        assert told_to(house.call("GET", "/events")) == ["snapshot", 1, 2]
        assert house.engine.of("listen") == [ON, OFF, ON]


def test_history_ends_where_the_engine_tells_no_more():
    """Ten minutes after the last listener: what it tells later does not follow."""
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot(), step(1))
        caller.hang_up()
        say(house)  # no lines
        caller = house.call("GET", "/events")
        assert told_to(caller) == []
        say(house, snapshot(), step(9))
        assert told_to(caller) == ["snapshot", 9]


def test_the_last_lines_are_kept_from_a_snapshot_on():
    with House() as house:
        house.call("GET", "/events")
        for number in range(4000):
            if number % 1000 == 0:
                say(house, snapshot())
            say(house, step(number))
        kept = told_to(house.call("GET", "/events"))
        assert kept[0] == "snapshot" and 2000 <= len(kept) <= 3001
        assert kept[-1] == 3999 and kept[1] == 2000
        assert [n for n in kept if n != "snapshot"] == [*range(kept[1], 4000)]


def test_a_long_history_comes_in_parts():
    """Other calls are answered in between."""
    with House() as house:
        house.call("GET", "/events")
        say(house, snapshot(), *map(step, range(999)))
        lengths = [len(lines) for lines in house.call("GET", "/events").events]
        assert lengths == [listeners.LINES_AN_EVENT] * 5


def test_a_silent_stream_says_that_it_lives():
    with House() as house:
        caller = house.call("GET", "/events")
        house.clock.run(25)
        assert caller.said.count(": ping") == 2


def test_keys_do_not_read_each_other():
    """What requests of another key are called, and say, stays theirs: their numbers are told."""
    with House("--log-requests", keys=KEYS) as house:
        caller = house.call("GET", "/events", Authorization="Bearer two")
        assert house.engine.of("listen") == [ON | {"tokens": True}]
        mine = {"r": 1, "name": "a", "key": "key 1", "tokens": [5]}
        other = {"r": 2, "name": "b", "key": "key 0", "tokens": [6]}
        say(house, snapshot(mine, other))
        new = [NEW | {"r": r, "name": f"n{r}", "key": f"key {r % 2}"} for r in (3, 4)]
        tokens = [[1, 7], [2, 8], [3, 9], [4, 10]]
        say(house, step(0, new=new, tokens=tokens, ended=[[1, "stop", 1]]))
        say(house, step(1, tokens=[[1, 7], [3, 9]]))
        for told in (caller, house.call("GET", "/events", Authorization="Bearer two")):
            first, second, third = (line for lines in told.events for line in lines)
            assert first["requests"] == [{"r": 1, "name": "a", "tokens": [5]}, {"r": 2}]
            assert second["new"] == [NEW | {"r": 3, "name": "n3"}, NEW | {"r": 4}]
            assert second["tokens"] == [[1, 7], [3, 9]] and third["tokens"] == [[3, 9]]


def test_keys_do_not_read_each_other_after_a_restart():
    """
    Another engine's numbers begin at 1 again: a listener was told the tokens of another key's
    request that has the number of one of its own.
    """
    with House("--log-requests", keys=KEYS) as house:
        caller = house.call("GET", "/events", Authorization="Bearer two")
        say(house, snapshot({"r": 1, "name": "a", "key": "key 1", "tokens": [5]}, engine=1))
        house.engine.die()
        house.engine.ready()
        say(house, snapshot(engine=2))
        new = [NEW | {"r": 1, "name": "theirs", "key": "key 0"}]
        say(house, step(0, new=new, tokens=[[1, 7]]))
        for told in (caller, house.call("GET", "/events", Authorization="Bearer two")):
            last = told.events[-1][-1]
            assert last["tokens"] == [] and last["new"] == [NEW | {"r": 1}]


def test_it_stands_behind_the_key():
    with House(keys=KEYS) as house:
        assert house.get("/events").status == 401
        assert not house.engine.of("listen")


def test_a_loading_server_has_nothing_to_tell():
    with House(ready=False) as house:
        assert house.get("/events").status == 503


def test_only_so_many_listen():
    with House() as house:
        callers = [house.call("GET", "/events") for _ in range(listeners.MAX_LISTENERS)]
        answer = house.get("/events")
        assert answer.status == 429 and answer.json["error"]["code"] == "too_many_listeners"
        callers[0].hang_up()
        assert "200 OK" in house.call("GET", "/events").said


def test_a_slow_client_goes_on_from_a_snapshot(monkeypatch):
    """When the next line that it wants is kept no more. Then it gets lines again, each once."""
    monkeypatch.setattr(listeners, "KEPT_LINES", 20)
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot())
        caller.stop_reading()
        filler = "x" * 20_000  # so that the connection is full at once
        for number in range(100):
            if number % 10 == 9:
                say(house, snapshot())
            say(house, step(number, filler=filler))
        caller.read_on()
        told = told_to(caller)
        steps = [n for n in told if n != "snapshot"]
        assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 99
        gap = next(i for i, n in enumerate(steps) if n > i)
        assert gap < 20 and told[told.index(steps[gap]) - 1] == "snapshot"
        say(house, step(100))
        assert told_to(caller)[-2:] == [99, 100]


def test_head_is_no_listener():
    with House() as house:
        assert "text/event-stream" in house.call("HEAD", "/events").said
        assert not house.service.listeners.all and not house.engine.of("listen")


def test_a_dead_engine_is_told_at_once_and_the_next_one_listened_to():
    """Who watches saw a frozen picture for seconds. What was before is still there afterwards."""
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot(engine=1), step(1))
        house.engine.die()
        assert caller.events[-1] == [{"event": "engine", "state": "ended"}]
        house.engine.ready()
        assert house.engine.of("listen") == [ON]
        say(house, snapshot(engine=2), step(0))
        wanted = ["snapshot", 1, "engine", "snapshot", 0]
        assert told_to(caller) == told_to(house.call("GET", "/events")) == wanted


def test_another_engine_tells_though_nobody_listens_just_now():
    """A page that is loaded again meanwhile finds its history whole; after a while it ends."""
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot(), step(1))
        caller.hang_up()
        house.engine.die()
        house.engine.ready()
        assert house.engine.of("listen") == [ON, OFF]


def test_another_engine_is_not_asked_where_nobody_ever_listened():
    with House() as house:
        house.engine.die()
        house.engine.ready()
        assert house.engine.of("listen") == [] and not house.service.listeners.lines


def test_the_stream_ends_with_the_last_engine():
    """It was cut two seconds later, and the log said that the application had a bug."""
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot())
        house.engine.die()
        house.engine.ready()
        house.engine.die()
        assert house.service.client.state == "dead"
        house.clock.run(0.1)
        assert caller.said.endswith("0\r\n\r\n") and not house.service.listeners.all
        assert told_to(caller) == ["snapshot", "engine", "engine"]


def test_the_stream_ends_with_the_server():
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot())
        house.clock.call_soon(house.service.stop)
        house.clock.run(0.1)
        assert caller.said.endswith("0\r\n\r\n") and not house.service.listeners.all


# --------------------------------------------------------------------------------------------------
# --record


def test_a_record_begins_with_a_snapshot_and_ends_idle(tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch()
    engine = simulated_engine(num_blocks=8, block_size=4)
    record_to(str(path), engine, model="small")
    engine.add_request("a", [1, 2, 3], greedy(4))
    finish(engine)
    title, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert title["event"] == "title" and title["date"] and title["model"] == "small"
    assert [lines[0]["event"], lines[-1]["event"]] == ["snapshot", "idle"]
    assert sum(line.get("sampled", 0) for line in lines) == 4


def test_a_full_disk_ends_the_record_and_not_the_server(tmp_path, capsys):
    """
    With a whole line: half a one stayed, to which the next engine would have added its first. (A
    limit of this process stands for the disk.)
    """
    path = tmp_path / "run.jsonl"
    path.touch()
    engine = simulated_engine(num_blocks=8, block_size=4)
    record_to(str(path), engine)
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        engine.add_request("a", [1, 2, 3], greedy(4))
        assert finish(engine)[-1].finish_reason == "length"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capsys.readouterr().err.count(f"--record {path} ends here") == 1
    assert path.stat().st_size == size


def test_a_record_that_is_taken_away_is_not_begun_in_its_middle(tmp_path, capsys):
    """The next lines made a file without a snapshot, which nothing can read."""
    path = tmp_path / "run.jsonl"
    path.touch()
    engine = simulated_engine(num_blocks=8, block_size=4)
    record_to(str(path), engine)
    path.unlink()
    engine.add_request("a", [1, 2, 3], greedy(4))
    finish(engine)
    assert not path.exists() and f"--record {path} ends here" in capsys.readouterr().err


def test_a_start_that_failed_can_be_tried_again(tmp_path):
    """With its mistake mended, the record's name is still free: the file is empty."""
    record = ["--record", str(tmp_path / "r.jsonl"), "--model", "none"]
    for _ in range(2):
        with pytest.raises(SystemExit, match="none"):
            serve.main([*record, "--prompt", "x"])


@pytest.mark.parametrize("name", ["there.jsonl", "nowhere/run.jsonl", ""])
def test_a_record_is_written_to_a_new_file_or_nothing_is_loaded(tmp_path, name):
    there = tmp_path / "there.jsonl"
    there.write_text("what was")
    with pytest.raises(SystemExit) as ended:
        serve.main(["--record", str(tmp_path / name), "--prompt", "x", "--model", "none"])
    assert str(tmp_path / name) in str(ended.value) and "name" in str(ended.value)
    assert there.read_text() == "what was"
