"""
The engine tells what it does: to nobody, to listeners of GET /events, to a file. That what it tells
is right and complete is for test_replay.py and the simulator to say.
"""

import json
import resource

import pytest
from pretend import finish, greedy, pretend_engine
from wires import House

import serve
from paged import TO_COME
from serving import events, listeners
from serving.events import Audience, Recorder, record_to

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
    engine = pretend_engine(num_blocks=8, block_size=4, overlap=False)
    lines = told(engine)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], greedy(3), name="call", cache_salt=SALT)
    finish(engine)
    first, second, third, idle = map(changes, lines)
    new = {"r": 1, "name": "call", "key": "key 1", "choice": 0, "prompt": 6, "max_tokens": 3}
    assert first == {
        "event": "step",
        "step": 0,
        "new": [new | {"status": "waiting", "filled": 0}],
        "admitted": [[1, 0]],
        "chunks": [[1, 0, 6]],
        "tables": [[1, 0, [0, 1]]],
        "resolved": 0,
        "sampled": 1,
        "committed": [[1, 1]],
        "waiting": [],
        "queue": 0,
        "blocks": [[0, 1, 1]],  # block 1 is as `tables` says: held once, not committed
        "free": 6,
        "cached": 0,
    }
    counts = {"sampled": 1, "free": 6, "cached": 0}
    assert second == {"event": "step", "step": 1, "decodes": [1], "resolved": 1} | counts
    assert third == {
        "event": "step",
        "step": 2,
        "resolved": 2,
        "sampled": 1,
        "tables": [[1, 0, []]],
        "ended": [[1, "length", 3]],
        "blocks": [[0, 0, 1], [1, 0, 1]][::-1],  # its tail is evicted first
        "free": 6,
        "cached": 2,
    }
    assert idle == {"event": "idle"}


def test_token_ids_are_texts_and_told_only_where_asked_for(told):
    engine = pretend_engine(num_blocks=8, block_size=4)
    lines = told(engine, tokens=True)
    request = engine.add_request("a", [1, 2, 3], greedy(4))
    finish(engine)
    assert [t for line in lines for t in line.get("tokens", [])] == [
        [1, token] for token in request.generated_tokens
    ]
    lines = told(engine)
    engine.add_request("b", [1, 2, 3], greedy(4))
    finish(engine)
    assert "tokens" not in json.dumps(lines).replace("max_tokens", "")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_is_all_there_is(told, overlap):
    """Taken in the middle of an answer: what was not told is not waited for."""
    engine = pretend_engine(num_blocks=8, block_size=4, overlap=overlap, max_num_seqs=1)
    told(engine, tokens=True)
    request = engine.add_request("a", [1, 2, 3, 4, 5], greedy(9))
    engine.add_request("b", [7], greedy(1))
    for _ in range(4):
        engine.step()
    line = json.loads(engine.recorder.snapshot("joined"))
    first, second = line["requests"]
    known = 4 - overlap
    assert line["why"] == "joined" and line["step"] == 4 and line["decodes"] == [1]
    assert (first["generated"], first.get("to_come", 0)) == (known, int(overlap))
    assert first["tokens"] == [t for t in request.tokens_so_far if t is not TO_COME]
    assert first["table"] == request.block_table and first["filled"] == 5 + 3
    assert (second["status"], line["waiting"], line["queue"]) == ("waiting", [2], 1)
    assert line["committed"] == request.block_table[: request.num_committed]


def test_why_the_first_in_the_queue_waits(told):
    """It needs 3 blocks (and leaves none of the pool's 8 in reserve), 2 are spare."""
    engine = pretend_engine(num_blocks=8, block_size=4, watermark=0, overlap=False)
    lines = told(engine)
    engine.add_request("a", [1, 2, 3] * 7, greedy(3))
    engine.add_request("b", [5] * 10, greedy(1))
    engine.step()
    assert lines[-1]["lack"] == [3, 2] and lines[-1]["waiting"] == [2]
    finish(engine)
    assert "lack" not in lines[-2] and lines[-2]["waiting"] == []


def test_a_failed_step_is_followed_by_a_snapshot(told):
    """What its plan has moved no table shows: evicted blocks, hits that were given back."""
    engine = pretend_engine(num_blocks=8, block_size=4, overlap=False)
    lines = told(engine)
    engine.add_request("a", [1, 2, 3], greedy(4))
    launch = engine.runner.launch

    def break_down(plan):
        engine.runner.launch = launch
        raise RuntimeError("out of luck")

    engine.runner.launch = break_down
    engine.step()
    step, snapshot, idle = lines
    assert snapshot["why"] == "a step failed" and snapshot["requests"] == []
    assert "step" not in step and idle["event"] == "idle"


# --------------------------------------------------------------------------------------------------
# To HTTP processes


class FakeLinks:
    def __init__(self):
        self.sent = []

    def send(self, link, data: bytes):
        message = json.loads(data)
        self.sent.append((link, json.loads(f"[{message['lines']}]")))
        self.is_for_new_ones = message["is_snapshot"]


class FakeLink:
    unsent = b""


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which the test counts."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(events, "time", clock)
    return clock


def test_nothing_is_computed_without_listeners(clock):
    engine = pretend_engine(num_blocks=8, block_size=4)
    audience = Audience(engine)
    link = FakeLink()
    assert engine.recorder is None and audience.due_in() is None
    audience.join(link, False)
    assert engine.recorder is not None
    audience.leave(link)
    audience.leave(link)  # of a link that never listened, too
    assert engine.recorder is None


def test_a_file_goes_on_without_listeners(clock, tmp_path):
    engine = pretend_engine(num_blocks=8, block_size=4)
    record_to(str(tmp_path / "run.jsonl"), engine)
    recorder = engine.recorder
    audience = Audience(engine)
    link = FakeLink()
    audience.join(link, False)
    audience.leave(link)
    assert engine.recorder is recorder and len(recorder.listeners) == 1


def test_links_are_told_ten_times_a_second_and_in_order(clock):
    """The first is a snapshot, at once; then all lines since the last time, as one message."""
    engine = pretend_engine(num_blocks=8, block_size=4, overlap=False)
    audience = Audience(engine)
    links = FakeLinks()
    link = FakeLink()
    audience.join(link, False)
    assert audience.due_in() == 0
    audience.tell(links)
    (line,) = links.sent.pop()[1]
    assert line["event"] == "snapshot" and "why" not in line  # it is the first: nothing was missed
    assert audience.due_in() is None
    engine.add_request("a", [1, 2, 3], greedy(5))
    for _ in range(3):
        engine.step()
        audience.tell(links)
    assert not links.sent and audience.due_in() == pytest.approx(0.1)
    clock.now += 0.11
    audience.tell(links)
    assert [line["step"] for line in links.sent.pop()[1]] == [0, 1, 2]
    finish(engine)
    clock.now += 0.05
    audience.tell(links)
    assert not links.sent and audience.due_in() == pytest.approx(0.05)
    clock.now += 0.06
    audience.tell(links)
    assert [line["event"] for line in links.sent.pop()[1]] == ["step", "step", "idle"]


def test_a_link_that_is_behind_gets_a_snapshot(clock):
    """Its lines are not kept for it: memory is not for a reader that sleeps."""
    engine = pretend_engine(num_blocks=8, block_size=4, overlap=False)
    audience = Audience(engine)
    links = FakeLinks()
    slow = FakeLink()
    quick = FakeLink()
    for link in (slow, quick):
        audience.join(link, False)
    audience.tell(links)
    links.sent.clear()
    slow.unsent = b"the end of a message"
    engine.add_request("a", [1, 2, 3], greedy(20))
    engine.step()
    clock.now += 0.2
    audience.tell(links)
    assert [link for link, _ in links.sent] == [quick] and not audience.lines
    slow.unsent = b""
    engine.step()
    clock.now += 0.2
    audience.tell(links)
    told = {link: [line["event"] for line in lines] for link, lines in links.sent[1:]}
    assert told == {slow: ["snapshot"], quick: ["step"]}
    assert not links.is_for_new_ones and links.sent[1][1][0]["why"] == "lines were missed"


def test_who_joins_costs_others_no_lines(clock):
    """Two clients of one HTTP process: the snapshot is for the second one, and news is for both."""
    engine = pretend_engine(num_blocks=8, block_size=4, overlap=False)
    audience = Audience(engine)
    links = FakeLinks()
    link = FakeLink()
    audience.join(link, False)
    audience.tell(links)
    engine.add_request("a", [1, 2, 3], greedy(20))
    engine.step()
    audience.join(link, False)
    clock.now += 0.2
    audience.tell(links)
    told = [[line["event"] for line in lines] for _, lines in links.sent]
    assert told == [["snapshot"], ["step"], ["snapshot"]] and links.is_for_new_ones


# --------------------------------------------------------------------------------------------------
# GET /events

KEYS = ("one", "two")
NEW = {"status": "waiting", "filled": 0, "choice": 0, "prompt": 3, "max_tokens": 4}


def snapshot(*requests: dict, **more) -> dict:
    return {"event": "snapshot", "requests": list(requests), **more}


def say(house, *lines: dict):
    """A snapshot for those that have joined is a message of its own."""
    text = ",".join(map(json.dumps, lines))
    is_snapshot = lines[0].get("why") == "joined"
    house.engine.say({"op": "events", "lines": text, "is_snapshot": is_snapshot})


def test_a_listener_is_told_from_a_snapshot_on():
    with House() as house:
        assert not house.engine.of("listen")
        caller = house.call("GET", "/events")
        assert house.engine.of("listen") == [{"op": "listen", "on": True, "tokens": False}]
        assert "200 OK" in caller.said and "text/event-stream" in caller.said
        say(house, {"event": "step", "step": 4})  # before its snapshot: for others
        say(house, snapshot(why="joined"))
        say(house, {"event": "step", "step": 5})
        say(house, {"event": "step", "step": 6}, {"event": "idle"})
        events = [[line["event"] for line in lines] for lines in caller.events]
        assert events == [["snapshot"], ["step"], ["step", "idle"]]
        second = house.call("GET", "/events")
        say(house, snapshot(why="joined"))
        assert len(caller.events) == 3 and len(second.events) == 1  # it is news to one of them
        say(house, snapshot(why="a step failed"))
        assert len(caller.events) == 4 and len(second.events) == 2
        caller.hang_up()
        assert len(house.engine.of("listen")) == 2
        second.hang_up()
        assert house.engine.of("listen")[2:] == [{"op": "listen", "on": False, "tokens": False}]


def test_a_silent_stream_says_that_it_lives():
    with House() as house:
        caller = house.call("GET", "/events")
        house.clock.run(25)
        assert caller.said.count(": ping") == 2


def test_keys_do_not_read_each_other():
    """What requests of another key are called, and say, stays theirs: their numbers are told."""
    with House("--log-requests", keys=KEYS) as house:
        caller = house.call("GET", "/events", Authorization="Bearer two")
        assert house.engine.of("listen") == [{"op": "listen", "on": True, "tokens": True}]
        mine = {"r": 1, "name": "a", "key": "key 1", "tokens": [5]}
        other = {"r": 2, "name": "b", "key": "key 0", "tokens": [6]}
        say(house, snapshot(mine, other, why="joined"))
        new = [NEW | {"r": r, "name": f"n{r}", "key": f"key {r % 2}"} for r in (3, 4)]
        tokens = [[1, 7], [2, 8], [3, 9], [4, 10]]
        say(house, {"event": "step", "new": new, "tokens": tokens, "ended": [[1, "stop", 1]]})
        say(house, {"event": "step", "tokens": [[1, 7], [3, 9]]})
        first, second, third = (lines[0] for lines in caller.events)
        assert first["requests"] == [{"r": 1, "name": "a", "tokens": [5]}, {"r": 2}]
        assert second["new"] == [NEW | {"r": 3, "name": "n3"}, NEW | {"r": 4}]
        assert second["tokens"] == [[1, 7], [3, 9]] and third["tokens"] == [[3, 9]]


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


def test_a_slow_client_misses_lines_and_goes_on_from_a_snapshot(monkeypatch):
    monkeypatch.setattr(listeners, "MAX_UNSENT", 300)
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot(why="joined"))
        caller.stop_reading()
        for step in range(12):
            say(house, {"event": "step", "step": step})
        assert len(house.engine.of("listen")) == 2
        say(house, snapshot(why="joined", step=12))
        say(house, {"event": "step", "step": 12})
        caller.read_on()
        lines = [line for lines in caller.events for line in lines]
        assert [line["event"] for line in lines[-2:]] == ["snapshot", "step"]
        steps = [line["step"] for line in lines if line["event"] == "step"]
        assert steps == sorted(set(steps)) and len(steps) < 12


def test_no_snapshot_is_too_large(monkeypatch):
    monkeypatch.setattr(listeners, "MAX_UNSENT", 10)
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot(why="joined"))
        assert len(caller.events) == len(house.engine.of("listen")) == 1


def test_head_is_no_listener():
    with House() as house:
        assert "text/event-stream" in house.call("HEAD", "/events").said
        assert not house.service.listeners.all and not house.engine.of("listen")


def test_another_engine_is_listened_to_as_well():
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot(why="joined"))
        house.engine.die()
        house.engine.ready()
        assert house.engine.of("listen") == [{"op": "listen", "on": True, "tokens": False}]
        say(house, {"event": "step"})
        say(house, snapshot(why="joined", step=0))
        assert [line["event"] for line in caller.events[-1]] == ["snapshot"]


def test_the_stream_ends_with_the_last_engine():
    """It was cut two seconds later, and the log said that the application had a bug."""
    with House() as house:
        caller = house.call("GET", "/events")
        house.engine.die()
        house.engine.ready()
        house.engine.die()
        assert house.service.client.state == "dead"
        house.clock.run(0.1)
        assert caller.said.endswith("0\r\n\r\n") and not house.service.listeners.all


def test_the_stream_ends_with_the_server():
    with House() as house:
        caller = house.call("GET", "/events")
        say(house, snapshot(why="joined"))
        house.clock.call_soon(house.service.stop)
        house.clock.run(0.1)
        assert caller.said.endswith("0\r\n\r\n") and not house.service.listeners.all


# --------------------------------------------------------------------------------------------------
# --record


def test_a_record_begins_with_a_snapshot_and_ends_idle(tmp_path):
    path = tmp_path / "run.jsonl"
    path.touch()
    engine = pretend_engine(num_blocks=8, block_size=4)
    record_to(str(path), engine)
    engine.add_request("a", [1, 2, 3], greedy(4))
    finish(engine)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [lines[0]["event"], lines[-1]["event"]] == ["snapshot", "idle"]
    assert sum(line.get("sampled", 0) for line in lines) == 4


def test_a_full_disk_ends_the_record_and_not_the_server(tmp_path, capsys):
    """
    With a whole line: half a one stayed, to which the next engine would have added its first. (A
    limit of this process stands for the disk.)
    """
    path = tmp_path / "run.jsonl"
    path.touch()
    engine = pretend_engine(num_blocks=8, block_size=4)
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
    engine = pretend_engine(num_blocks=8, block_size=4)
    record_to(str(path), engine)
    path.unlink()
    engine.add_request("a", [1, 2, 3], greedy(4))
    finish(engine)
    assert not path.exists() and f"--record {path} ends here" in capsys.readouterr().err


def test_a_record_that_never_began_leaves_no_file(tmp_path):
    """Or the next start, with its mistake mended, would say that there is such a file."""
    with pytest.raises(SystemExit):
        serve.main(["--record", str(tmp_path / "r.jsonl"), "--prompt", "x", "--model", "none"])
    assert not list(tmp_path.iterdir())


def test_a_record_that_is_gone_hides_no_message(tmp_path, monkeypatch):
    """It ended with a traceback about the file, in place of why the start had failed."""
    path = tmp_path / "r.jsonl"

    def run(*_):
        path.unlink()
        raise ValueError("no model")

    monkeypatch.setattr(serve.terminal, "run", run)
    with pytest.raises(SystemExit, match="no model"):
        serve.main(["--record", str(path), "--prompt", "x", "--model", "none"])


@pytest.mark.parametrize("name", ["there.jsonl", "nowhere/run.jsonl", ""])
def test_a_record_is_written_to_a_new_file_or_nothing_is_loaded(tmp_path, name):
    there = tmp_path / "there.jsonl"
    there.write_text("what was")
    with pytest.raises(SystemExit) as ended:
        serve.main(["--record", str(tmp_path / name), "--prompt", "x", "--model", "none"])
    assert str(tmp_path / name) in str(ended.value) and "name" in str(ended.value)
    assert there.read_text() == "what was"
