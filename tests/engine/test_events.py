"""
Records: which lines an engine writes, to whom they are sent, and how they are read back. Each scene
below is a table: a command, and after the arrow everything that results.
"""

import io
import json
import re
import resource
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest
from callers import save_caller
from wires import House, request

import serve
from assets import records
from assets.records import PoolState, RecordError, open_record, replay
from engine import events, process
from engine.events import compact_json, record_to
from server import live
from tests.simulated_device import finish, greedy, simulated_engine
from tests.simulator import RecordedWorld
from tests.swarm import a_life

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "assets").glob("*.jsonl"))


def play(scene: str, act, news):
    """Run each row: after act(*command), news() must be what the row has after its arrow."""
    for row in scene.strip().splitlines():
        command, _, expected = row.partition("=>")
        act(*command.split())
        assert news() == expected.strip(), row


# --------------------------------------------------------------------------------------------------
# Lines

LINES = """
{"event":"step","step":0,"admitted":[[1,0,6]],"chunks":[[1,0,6]],"lack":[2,7,6],"new":[{"r":2,"name":"","key":"","choice":0,"prompt":25,"max_tokens":1,"status":"waiting","filled":0},{"r":1,"name":"call","key":"key 1","choice":0,"prompt":6,"max_tokens":3,"status":"active","filled":6}],"tables":[[1,0,[0,1]]]}
{"event":"step","step":1,"decodes":[1],"lack":[2,7,6],"resolved":0,"sampled":1,"committed":[0],"tokens":[[1,7]],"new":[{"r":3,"name":"call","key":"key 1","choice":1,"prompt":6,"max_tokens":3,"status":"active","filled":5}],"tables":[[3,0,[0,1]]]}
{"event":"snapshot","num_blocks":8,"block_size":4,"token_budget":16,"max_num_seqs":3,"max_model_len":32,"version":2,"step":2,"overlap":true,"requests":[{"r":2,"name":"","key":"","choice":0,"prompt":25,"max_tokens":1,"status":"waiting","filled":0,"target":25,"hits":0,"preemptions":0,"generated":0,"table":[],"tokens":[7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7]},{"r":1,"name":"call","key":"key 1","choice":0,"prompt":6,"max_tokens":3,"status":"active","filled":7,"target":6,"hits":0,"preemptions":0,"generated":2,"table":[0,1],"tokens":[1,2,3,4,5,6,7]},{"r":3,"name":"call","key":"key 1","choice":1,"prompt":6,"max_tokens":3,"status":"active","filled":5,"target":6,"hits":0,"preemptions":0,"generated":0,"table":[0,1],"tokens":[1,2,3,4,5,6]}],"decodes":[1],"committed":[0],"idle":[],"totals":{"steps":2,"prefill tokens":6,"decode tokens":1,"preemptions":0,"queried tokens":6,"hit tokens":0}}
{"event":"step","step":2,"decodes":[1,3],"copies":[[1,2,1]],"lack":[2,7,5],"resolved":1,"sampled":1,"tokens":[[1,10]],"tables":[[1,1,[2]]]}
{"event":"step","step":3,"decodes":[3],"lack":[2,7,5],"resolved":2,"sampled":2,"committed":[2],"tokens":[[1,10],[3,7]],"ended":[[1,"length",3]],"idle":[2]}
{"event":"step","step":4,"lack":[2,7,6],"resolved":3,"sampled":1,"tokens":[[3,10]]}
{"event":"step","resolved":4,"sampled":1,"tokens":[[3,10]],"ended":[[3,"length",3]],"idle":[0]}
{"event":"step","step":5,"decodes":[],"admitted":[[2,0,25]],"chunks":[[2,0,16]],"evicted":[2],"tables":[[2,0,[1,3,4,5,6,7,2]]]}
{"event":"step","step":6,"chunks":[[2,16,9]],"resolved":5,"sampled":0,"committed":[1,3,4,5]}
{"event":"step","resolved":6,"sampled":1,"committed":[6,7],"tokens":[[2,0]],"ended":[[2,"length",1]],"idle":[7,6,5,4,3,1]}
{"event":"idle"}
"""  # noqa: E501


@pytest.mark.parametrize("tokens", [True, False])
def test_the_lines_of_a_run_are_those_of_the_reference(tokens, monkeypatch):
    """
    The lines are a call of two choices, and one that waits for 7 blocks of 8, whose tail is evicted
    first. Token ids reveal text, so only `tokens` puts them into lines. A snapshot is requested in
    mid-run. A page that reconnects gets everything later than its last line; previously, if two
    lines had the same time, it lost one.
    """
    engine = simulated_engine(num_blocks=8, max_num_seqs=3, watermark=0, overlap=True)
    monkeypatch.setattr(events.time, "monotonic", lambda: engine.started + 1)
    lines = []
    engine.stages["record"].listen(lines.append, tokens)
    engine.add_request("a", [1, 2, 3, 4, 5, 6], greedy(3), name="call", cache_salt="key 1:x:y", n=2)
    engine.add_request("b", [7] * 25, greedy(1))
    engine.step()
    engine.step()
    lines.append(engine.stages["record"].snapshot())
    finish(engine)
    expected = LINES if tokens else re.sub(r',"tokens":(\[\[.*?\]\]|\[.*?\])', "", LINES)
    text = "\n".join(lines)
    times = [float(time) for time in re.findall(r'"time":([\d.]+)', text)]
    assert times == sorted(set(times))
    assert re.sub(r',"(time|engine)":[\d.]+', "", text) == expected.strip()


EVERYTHING = """copies
preempted
evicted
lack
committed
drafts
idle
overlap
ended: stop
ended: length
ended: abort
ended: error
new: waiting
new: active"""


class Renewed(RecordedWorld):
    """
    A recording begins while steps are running, with what was planned before it; or a reader
    requests a snapshot and reads on from there.
    """

    def check_pool_state(self):
        super().check_pool_state()
        if self.steps % 5 == 0:
            self.recorder.listeners.clear()
            self.begin_record()
        if self.steps % 7 == 0:
            self.hear(self.recorder.snapshot())
            super().check_pool_state()


class Long(RecordedWorld):
    """A snapshot follows after every few lines, so that a reader can begin there."""

    def run(self):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(events, "LINES_A_SNAPSHOT", 7)
            super().run()
        assert not re.search(r"(\n(?!.*snapshot).*){10}", self.record().decode())


@pytest.mark.parametrize("seeds", [range(4, 20), pytest.param(range(150), marks=pytest.mark.slow)])
def test_tallies_drawn_from_the_lines_are_the_allocators_own(seeds):
    """
    The tallies must match after each step, wherever a reader begins; see RecordedWorld. Everything
    that a line can say happens in these lives: overlap, windows, forks, preemptions, failed steps.
    The quick lives are all short.
    """
    seen = Counter()
    for seed, world in zip(seeds, cycle([RecordedWorld, Renewed, Long]), strict=False):
        life = world(*a_life(seed))
        life.run()
        for line in map(json.loads, life.lines):
            seen.update(name for name, value in line.items() if value)
            seen.update(f"ended: {reason}" for _, reason, _ in line.get("ended", ()))
            seen.update(f"new: {q['status']}" for q in line.get("new", ()))
    assert not [name for name in EVERYTHING.splitlines() if seen[name] < 3], seen


# --------------------------------------------------------------------------------------------------
# To the HTTP process


class Stage:
    """The loop of an engine, its link and a clock; each command is one iteration of the loop."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(events, "time", self)
        self.now = 1000.0
        self.engine = simulated_engine(num_blocks=8, overlap=False)
        for stage in self.engine.stages.values():
            stage.connect(self, "")
        self.recorder = self.engine.stages["record"]
        self.messages = []
        self.sent = []
        self.unsent = False
        self.queue_row = self.flush = lambda ignored: None

    def monotonic(self) -> float:
        return self.now

    def receive(self, timeout):
        return self.messages

    def send(self, message: dict):
        names = [json.loads(line)["event"] for line in message["lines"].split("\n") if line]
        self.sent += names or ["end"]

    def act(self, command: str, argument=""):
        self.messages = []
        if command == "wait":
            self.now += float(argument)
        elif command == "request":
            self.engine.add_request("a", [1, 2, 3], greedy(20))
        elif command == "record":
            self.recorder.listen(str)
        elif command in ("clog", "read"):
            self.unsent = command == "clog"
        elif command in ("join", "leave"):
            self.messages = [{"op": "listen", "on": command == "join", "tokens": False}]
        process.serve_step(self.engine, self)

    def news(self) -> str:
        """
        Return the messages, whether the engine records, and in how many seconds a message is due.
        """
        words = [" ".join(self.sent)] if self.sent else []
        self.sent.clear()
        if not self.recorder.listeners:
            words.append("off")
        due = self.recorder.due_in()
        return "; ".join(words if due is None else [*words, f"due in {due:.2f}"])


SCENES = {
    # nothing is computed before the first listener, then a snapshot comes immediately; lines come
    # at most every 0.1 s
    "ten messages a second": """
        request     => off
        leave       => off
        join        => snapshot
        turn        => due in 0.10
        wait 0.06   => due in 0.04
        wait 0.06   => step step step
        wait 0.2    => step
    """,
    # its lines are not kept for it; it used to get a whole snapshot ten times a second for ever
    "a link that is behind gets one snapshot": """
        join        => snapshot
        request     => due in 0.10
        clog        => due in 0.10
        wait 0.2    => due in 0.10
        wait 0.2    => due in 0.10
        read        => due in 0.10
        wait 0.2    => snapshot
        wait 0.2    => step
        wait 0.2    => step
    """,
    # a page that is reloaded finds what happened meanwhile
    "ten minutes after the last listener recording ends": """
        join        => snapshot
        leave       =>
        wait 599    =>
        request     => step
        join        => due in 0.10
        wait 1000   => step step
        leave       => due in 0.10
        wait 599    => step step
        wait 2      => step end; off
        wait 1      => off
        join        => snapshot
    """,
    "a file is written without listeners": """
        record      =>
        join        => snapshot
        leave       =>
        wait 601    => end
    """,
}


@pytest.mark.parametrize("title", SCENES)
def test_the_http_process_gets_lines_while_it_has_listeners(title, monkeypatch):
    stage = Stage(monkeypatch)
    play(SCENES[title], stage.act, stage.news)


def test_the_time_goes_on_while_nobody_listens(monkeypatch):
    """Previously a page that had slept for an hour took the new lines for ones it already had."""
    stage = Stage(monkeypatch)
    lines = []
    for engine in stage.engine, stage.engine, simulated_engine():
        stage.now += 3600
        engine.stages["record"].listen(str)
        lines.append(json.loads(engine.stages["record"].snapshot()))
    first, second, other = lines
    assert second["time"] - first["time"] == pytest.approx(3600)
    assert second["engine"] == first["engine"] != other["engine"], "as in another container"


# --------------------------------------------------------------------------------------------------
# GET /events


def say(house, *words, **more):
    """Send lines of the engine: a number is that of a step, any other word the name of an event."""
    lines = []
    for word in map(str, words):
        step = {"event": "step", "step": int(word)} if word.isdecimal() else None
        lines.append(compact_json((step or {"event": word, "requests": []}) | more))
    house.engine.say({"op": "events", "lines": "\n".join(lines)})


def lines_of(caller) -> list:
    """
    Return the lines that a client has received: each as its event, or as the number of its step.
    """
    return [line.get("step", line["event"]) for lines in caller.events for line in lines]


EVENTS = {
    "from a snapshot on, the history first": """
        call a                  => listens
        say snapshot            => a: snapshot
        say 5                   => a: 5
        say 6 idle              => a: 6 idle
        call b                  => b: snapshot 5 6 idle; listens
        say 7                   => a: 7; b: 7
        hang a                  => listens
        hang b                  => left
        say 8                   =>
        call c                  => c: snapshot 5 6 idle 7 8; listens
    """,
    "history ends where the engine publishes no more": """
        call a                  => listens
        say snapshot 1          => a: snapshot 1
        hang a                  => left
        say                     =>
        call b                  => listens
        say snapshot 9          => b: snapshot 9
    """,
    # the page used to show a frozen picture for seconds; the next engine knows of no listeners
    "a dead engine is an event": """
        call a                  => listens
        say snapshot 1          => a: snapshot 1
        die                     => a: engine
        ready                   => listens
        say snapshot 0          => a: snapshot 0
        call b                  => b: snapshot 1 engine snapshot 0; listens
        hang a                  => listens
        hang b                  => left
        die                     =>
        wait 9                  =>
    """,
    "another engine is asked for lines while there is a history": """
        call a                  => listens
        say snapshot 1          => a: snapshot 1
        hang a                  => left
        die                     =>
        ready                   => listens; left
    """,
    "another engine is not asked where nobody ever listened": """
        die                     =>
        ready                   =>
        call a                  => listens
    """,
    # it used to be cut two seconds later, and the log said that the application had a bug
    "the stream ends with the last engine": """
        call a                  => listens
        say snapshot            => a: snapshot
        die                     => a: engine
        ready                   => listens
        die                     => a: engine over
    """,
    "the stream ends with the server; a silent one is pinged": """
        call a                  => listens
        say snapshot            => a: snapshot
        wait 25                 => a: ping ping
        stop                    => a: over; left
    """,
}


class Audience:
    """Clients of GET /events, by name."""

    def __init__(self, house: House):
        self.house = house
        self.callers = {}
        self.known = Counter()  # words of each client that `news` has already returned

    def act(self, command: str, *words: str):
        house = self.house
        if command == "call":
            self.callers[words[0]] = house.call("/events")
        elif command == "hang":
            self.callers[words[0]].hang_up()
        elif command == "say":
            say(house, *words)
        elif command == "wait":
            house.clock.run(float(words[0]))
        elif command == "stop":
            house.clock.call_soon(house.service.stop)
            house.clock.run(0.1)
        else:
            getattr(house.engine, command)()

    def news(self) -> str:
        news = []
        for name, caller in self.callers.items():
            assert "200 OK" in caller.said
            assert "text/event-stream" in caller.said
            words = [*lines_of(caller), *["ping"] * caller.said.count(": ping")]
            words += ["over"] if caller.said.endswith("0\r\n\r\n") else []
            fresh = words[self.known[name] :]
            self.known[name] = len(words)
            if fresh:
                news.append(f"{name}: {' '.join(map(str, fresh))}")
        heard = self.house.engine.of("listen")
        fresh = heard[self.known[self.house.engine] :]
        self.known[self.house.engine] = len(heard)
        words = ["listens" if message["on"] else "left" for message in fresh]
        return "; ".join([*news, *dict.fromkeys(words)])


@pytest.mark.parametrize("title", EVENTS)
def test_listeners_are_sent_lines(title):
    with House() as house:
        audience = Audience(house)
        play(EVENTS[title], audience.act, audience.news)


@pytest.mark.parametrize("keys", ["abc", ""], ids=["keys", "addresses"])
def test_nobody_takes_all_places_of_listeners(keys):
    """
    Previously sixteen listeners that never read could occupy all places for as long as they liked.
    """
    with House(keys=keys) as house:
        codes = []
        for owner in [*"a" * 9, *"b" * 9, "c"]:
            caller = house.connect()
            if not keys:
                caller.wire.protocol.client = owner, 5000
            caller.send(request("/events", Authorization=f"Bearer {owner}"))
            codes.append(caller.said[9:12])
    assert codes == [*["200"] * 8, "429"] * 2 + ["429"]


def test_the_last_lines_are_kept_from_a_snapshot_on_and_come_in_parts():
    """Other calls are answered between the parts."""
    with House() as house:
        house.call("/events")
        for number in range(4000):
            if number % 1000 == 0:
                say(house, "snapshot")
            say(house, number)
        caller = house.call("/events")
        parts = [len(lines) for lines in caller.events]
        assert lines_of(caller) == ["snapshot", *range(2000, 3000), "snapshot", *range(3000, 4000)]
        assert parts == [live.LINES_AN_EVENT] * 10 + [2]


# lines of two keys; then a restart, whose numbers begin at 1 again
SAID = """\
{"event":"snapshot","requests":[{"r":1,"name":"a","key":"key 1","tokens":[5]},\
{"r":2,"name":"b","key":"key 0","tokens":[6]}]}
{"event":"step","new":[{"r":3,"name":"c","key":"key 1"},{"r":4,"name":"d","key":"key 0"}],\
"tokens":[[1,7],[2,8],[3,9],[4,10]]}"""
SAID_NEXT = """\
{"event":"snapshot","requests":[]}
{"event":"step","new":[{"r":3,"name":"b","key":"key 0"}],"tokens":[[3,9]]}"""
READ = """\
{"event":"snapshot","requests":[{"r":1,"name":"a","tokens":[5]},{"r":2}]}
{"event":"step","new":[{"r":3,"name":"c"},{"r":4}],"tokens":[[1,7],[3,9]]}
{"event":"engine","state":"ended"}
{"event":"snapshot","requests":[]}
{"event":"step","new":[{"r":3}],"tokens":[]}"""


def test_keys_do_not_read_each_other():
    """
    Names and tokens of another key's requests are hidden, also in the history. Without a key
    nothing is sent.
    """
    bearer = {"Authorization": "Bearer two"}
    with House("--log-requests", keys=("one", "two")) as house:
        assert house.get("/events").status == 401
        assert not house.engine.of("listen")
        caller = house.call("/events", **bearer)
        assert house.engine.of("listen") == [{"op": "listen", "on": True, "tokens": True}]
        house.engine.say({"op": "events", "lines": SAID})
        house.engine.die()
        house.engine.ready()
        house.engine.say({"op": "events", "lines": SAID_NEXT})
        for reader in (caller, house.call("/events", **bearer)):
            lines = [line for lines in reader.events for line in lines]
            assert lines == [json.loads(line) for line in READ.splitlines()]


def test_a_slow_client_goes_on_from_a_snapshot(monkeypatch):
    """
    It continues from a snapshot if its next line is no longer kept. Then it gets lines again, each
    once.
    """
    monkeypatch.setattr(live, "KEPT_LINES", 20)
    with House() as house:
        caller = house.call("/events")
        say(house, "snapshot")
        caller.stop_reading()
        for number in range(100):
            if number % 10 == 9:
                say(house, "snapshot")
            # large lines, so that the connection fills up immediately
            say(house, number, filler="x" * 20_000)
        caller.read_on()
        kept = [*range(79, 89), "snapshot", *range(89, 99), "snapshot", 99]
        assert lines_of(caller) == ["snapshot", 0, 1, "snapshot", *kept]
        caller.stop_reading()
        for number in range(100, 125):  # more than are kept, but none is dropped yet
            say(house, number, filler="x" * 20_000)
        caller.read_on()
        assert lines_of(caller) == ["snapshot", 0, 1, "snapshot", *kept, *range(100, 125)]


def test_a_head_is_no_listener():
    with House() as house:
        assert "text/event-stream" in house.call("/events", method="HEAD").said
        assert not house.service.listeners.all
        assert not house.engine.of("listen")


# --------------------------------------------------------------------------------------------------
# --record


def test_a_record_is_a_title_a_snapshot_and_lines_until_the_disk_is_full(tmp_path, capsys):
    """
    The record then ends with a whole line, and the server goes on. Previously half a line stayed,
    and the next engine would have appended its first line to it. (A limit of this process stands in
    for a full disk.) The other file does not even take a title. Shortening it also failed, which
    ended the engine.
    """
    path = tmp_path / "run.jsonl"
    engine = simulated_engine(num_blocks=8)
    record_to(str(path), engine, model="small")
    record_to("/dev/full", engine)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (2**20, 20):
        engine.add_request("a", [1, 2, 3], greedy(4))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
        try:
            assert finish(engine)[-1].finish_reason == "length"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        title, *lines = map(json.loads, path.read_text().splitlines())
        assert title.pop("date")
        assert title == {"event": "title", "model": "small"}
        assert [lines[0]["event"], lines[-1]["event"]] == ["snapshot", "idle"]
        assert sum(line.get("sampled", 0) for line in lines) == 4
    said = capsys.readouterr().err
    assert [said.count(f"--record {file} ends here") for file in ("/dev/full", path)] == [1, 1]


@pytest.mark.parametrize("name", ["old.jsonl", "nowhere/run.jsonl", "", "new.jsonl"])
def test_a_record_is_written_to_a_new_file_or_nothing_is_loaded(tmp_path, name):
    """A start that fails leaves an empty file, whose name can still be used."""
    old = tmp_path / "old.jsonl"
    old.write_text("what was")
    says = "none" if name == "new.jsonl" else f"{tmp_path / name}.*name"
    for _ in range(2):
        with pytest.raises(SystemExit, match=says):
            serve.main(["--record", str(tmp_path / name), "--prompt", "x", "--model", "none"])
    assert old.read_text() == "what was"


# --------------------------------------------------------------------------------------------------
# Reading

TITLE = '{"event": "title", "name": "a"}'
TOUR_LINES = (ROOT / "assets/tour.jsonl").read_text().splitlines()
_, SNAPSHOT, STEP, *_ = TOUR_LINES
BAD = [
    ("", "file: it is empty: the server was stopped before"),
    ("[1, 2]", "not a record: line 1 is"),
    ("[" * 10**6, "not a record: line 1 is"),
    (TITLE, "it does not begin with a snapshot"),
    (f"{TITLE}\n{STEP}", "not a record: line 2 is"),
    ('{"event": "snapshot", "version": 1}', "this program reads version 2, not 1"),
    ('{"event": "snapshot"}', "not a record: line 1 is"),
    (f'{SNAPSHOT}\n{{"event": "step", "ended": [[7, "abort", 0]]}}', "not a record: line 2 is"),
    (f'{SNAPSHOT}\n{{"event": "idle", "x": "{"y" * 20_000}"}}', "not a record: line 2 is"),
    (None, "file: No such file or directory; choose a file"),
    (" ", r"not a record: line 1 is b' \n'"),
]


@pytest.mark.parametrize(("text", "says"), BAD, ids=range(len(BAD)))
def test_a_file_that_is_no_record_is_refused(text, says, tmp_path, monkeypatch):
    """A line without an end is not read whole."""
    monkeypatch.setattr(records, "MAX_LINE", 15_000)
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text + "\n" * bool(text))
    with pytest.raises(RecordError, match=re.escape(says)), open_record(path) as file:
        [*replay(file)]


def test_a_block_that_was_hit_and_given_up_in_one_step_is_evicted_last():
    state = PoolState(json.loads(SNAPSHOT) | {"committed": [1, 2], "idle": [1, 2]})
    state.apply({"event": "step", "idle": [1]})
    assert [*state.idle] == [2, 1]


def test_only_the_last_line_may_be_cut_off():
    """The end of the server may cut it off. It may also lack only its line break."""

    def read(text: str) -> list[str]:
        return [line["event"] for _, line in replay(io.BytesIO(text.encode()))]

    cut = f"{TITLE}\n{SNAPSHOT}\n{STEP}"
    assert read(cut) == ["title", "snapshot", "step"]
    assert read(cut[:-5]) == ["title", "snapshot"]
    with pytest.raises(RecordError, match="not a record: line 3 is"):
        read(f"{cut[:-5]}\n{STEP}\n")


# --------------------------------------------------------------------------------------------------
# Records in assets, and how they are shown


def test_records_in_assets_are_small_and_have_no_texts():
    requests = {}
    for path in RECORDS:
        with open_record(path) as record:
            (_, title), *lines = replay(record)
        assert title["name"] == path.stem
        assert title["model"] and title["machine"] and title["date"]
        assert not any("tokens" in line for _, line in lines)
        requests[path.stem] = sum(len(line.get("new", ())) for _, line in lines)
    assert requests["h200"] == 256
    assert sum(path.stat().st_size for path in RECORDS) <= 350_000


KINDS = ("new", "admitted", "chunks", "copies", "hit", "decodes", "preempted")
TOUR = """
Admission: new admitted chunks
A chunk: chunks
The first decode: decodes
A prefix hit: new admitted chunks hit
A fork: new
Copy-on-write: copies decodes
Preemption: preempted
Resume: admitted chunks hit
"""


def test_each_caption_of_the_tour_stands_at_what_it_tells():
    """
    The format is [step, request, text]. The text must say what its step does with the request.
    """
    title, *lines = map(json.loads, TOUR_LINES)
    steps = {line.get("step"): line for line in lines if line["event"] == "step"}
    shown = ""
    for step, r, text in title["tour"]:
        line = steps[step]
        line["hit"] = [entry for entry in line.get("admitted", []) if entry[1] >= 16]
        shown += f"{text.split('.')[0]}:"
        for name in KINDS:
            # {"r": 1, ..}, [1, ..] or 1
            first = [re.search(r"\d+", json.dumps(entry))[0] for entry in line.get(name, [])]
            shown += f" {name}" * (str(r) in first)
        shown += "\n"
    assert shown == TOUR.lstrip()
    assert title["tour"] == sorted(title["tour"], key=lambda caption: caption[0])


@pytest.mark.parametrize(("flags", "has_texts"), [([], False), (["--log-requests"], True)])
def test_a_record_has_texts_where_the_log_has_them(tmp_path, flags, has_texts):
    """Would catch: token ids, which reveal text, in a file although nobody asked for them."""
    save_caller(tmp_path / "model")
    path = tmp_path / "run.jsonl"
    named = ["--model", str(tmp_path / "model"), "--record", str(path), "--device", "cpu"]
    engine = serve.build_engine(serve.parse_args([*named, *flags]))
    engine.generate([[1, 2, 3]], greedy(4), progress=False)
    assert ('"tokens":' in path.read_text()) == has_texts
