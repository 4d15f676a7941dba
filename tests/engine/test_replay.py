"""
Records are read: a reader's three tallies are the allocator's own, whatever happens to an engine,
and nothing that a file may contain does harm. Also `serve.py --replay`.
"""

import copy
import io
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from test_simulator import forgets_the_last_block

from engine import replay as replay_module
from engine.replay import RecordError, open_record, replay
from server import welcome
from tests.simulator import RecordedWorld, write_record
from tests.swarm import a_life

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "assets").glob("*.jsonl"))


def as_file(lines: list) -> io.BytesIO:
    """Lines as dicts, or as the bytes that they are to be."""
    texts = [x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines]
    return io.BytesIO(b"".join(texts))


def why_wrong(lines: list) -> str:
    """What the reader says of a record; "" if it is good."""
    try:
        for _ in replay(as_file(lines)):
            pass
    except RecordError as error:
        return str(error)
    return ""


# --------------------------------------------------------------------------------------------------
# What real engines do


def recorded_life(seed: int, world=RecordedWorld) -> list[dict]:
    """After each step the tallies are compared with the allocator: see `check_tallies`."""
    life = world(*a_life(seed))
    life.run()
    return [json.loads(line) for line in life.lines]


def test_tallies_drawn_from_the_lines_are_the_allocators_own():
    """
    Would catch: whatever the recorder forgets to tell. All that a line can tell happens in these
    lives: overlap, windows, forks, preemptions, failed steps among it. 22: many preemptions; 128: a
    window leaves blocks while a plan is made.
    """
    seen = Counter()
    for seed in (*range(1, 13), 22, 128):
        for line in recorded_life(seed):
            seen.update(name for name, value in line.items() if value)
            seen.update(f"ended: {reason}" for _, reason, _ in line.get("ended", ()))
            seen.update(f"new: {q['status']}" for q in line.get("new", ()))
    known = ["copies", "preempted", "evicted", "lack", "committed", "idle", "overlap", "window"]
    known += [f"ended: {reason}" for reason in ("stop", "length", "abort", "error")]
    assert min(seen[name] for name in [*known, "new: waiting", "new: active"]) >= 3, seen


@pytest.mark.slow
def test_many_tallies_are_the_allocators_own():
    for seed in (*range(24), *range(1000, 1400)):
        assert recorded_life(seed), f"life {seed}"


MANY = pytest.param(range(13, 40), id="many", marks=pytest.mark.slow)
seeds = pytest.mark.parametrize("seeds", [pytest.param(range(1, 13), id="few"), MANY])


class Joined(RecordedWorld):
    """At any time, with steps under way, somebody asks for a snapshot, and goes on from there."""

    def check_tallies(self):
        super().check_tallies()
        if self.steps % 7 == 0:
            self.hear(self.recorder.snapshot())
            super().check_tallies()


class Renewed(RecordedWorld):
    """A recording begins at any time, with steps under way that were planned before it."""

    def check_tallies(self):
        super().check_tallies()
        if self.steps % 5 == 0:
            self.begin_record()


@seeds
@pytest.mark.parametrize("world", [Joined, Renewed])
def test_one_may_begin_to_read_at_any_time(world, seeds):
    for seed in seeds:
        lines = recorded_life(seed, world)
        assert sum(line["event"] == "snapshot" for line in lines) > 3, f"life {seed}"


def test_a_long_record_has_a_snapshot_every_so_often(monkeypatch):
    """Whoever keeps the last lines can begin with one."""
    monkeypatch.setattr("engine.events.LINES_A_SNAPSHOT", 50)
    lines = recorded_life(3)
    places = [i for i, line in enumerate(lines) if line["event"] == "snapshot"]
    between = [b - a for a, b in pairwise(places)]
    assert len(places) > 3 and max(between) <= 52


def test_a_failing_life_leaves_its_record(monkeypatch, tmp_path):
    """As far as it went, to be sent with a report."""
    import paged

    monkeypatch.setattr(paged.Request, "clear_cache", forgets_the_last_block)
    settings, events = a_life(next(seed for seed in range(100)))
    path = tmp_path / "record.jsonl"
    write_record(path, settings, events)
    with open_record(path) as record:
        assert sum(line["event"] == "step" for _, line in replay(record)) >= 1


# --------------------------------------------------------------------------------------------------
# A record that can be read by eye


SNAPSHOT = {"event": "snapshot", "version": 2, "engine": 1, "time": 0, "step": 0, "num_blocks": 4}
SNAPSHOT |= {"block_size": 2, "token_budget": 4, "max_num_seqs": 2, "window": 0, "overlap": False}
SNAPSHOT |= {"requests": [], "decodes": [], "committed": [], "idle": []}


def new(r: int, prompt: int, max_tokens: int) -> dict:
    described = {"r": r, "name": "", "key": "", "choice": 0, "prompt": prompt}
    return described | {"max_tokens": max_tokens, "status": "waiting", "filled": 0}


def line(time: float, **fields) -> dict:
    return {"event": "step", "time": time, **fields}


def a_record() -> list[dict]:
    """
    4 blocks of 2. Request 1, of 3 tokens, answers 2; request 2 finds its first block, and evicts
    nothing; request 3 needs all four blocks, so both of the idle ones are evicted.
    """
    return [
        SNAPSHOT,
        line(
            1, new=[new(1, 3, 2)], step=0, admitted=[[1, 0, 3]], chunks=[[1, 0, 3]], resolved=0,
            sampled=1, committed=[0], tables=[[1, 0, [0, 1]]],
        ),
        line(2, step=1, decodes=[1], resolved=1, sampled=1, committed=[1], ended=[[1, "length", 2]],
            idle=[1, 0]),
        {"event": "idle", "time": 2},
        line(
            3, new=[new(2, 4, 1)], step=2, decodes=[], admitted=[[2, 2, 4]], chunks=[[2, 2, 1]],
            resolved=2, sampled=0, tables=[[2, 0, [0, 2]]],
        ),
        line(4, new=[new(3, 8, 1)], ended=[[2, "abort", 0]], idle=[0]),
        line(
            5, step=3, admitted=[[3, 0, 8]], chunks=[[3, 0, 4]], evicted=[1, 0], resolved=3,
            sampled=0, committed=[2, 3], tables=[[3, 0, [2, 3, 1, 0]]],
        ),
        line(
            6, step=4, chunks=[[3, 4, 4]], resolved=4, sampled=1, committed=[1, 0],
            ended=[[3, "length", 1]], idle=[0, 1, 3, 2],
        ),
        {"event": "idle", "time": 6},
    ]  # fmt: skip


def test_the_tallies_of_a_small_record():
    """By eye: who holds what, how often, and what is evicted next."""
    told = []
    for tallies, _ in replay(as_file(a_record())):
        references = {block: n for block, n in tallies.references.items() if n}
        told.append((copy.deepcopy(tallies.tables), references, [*tallies.idle]))
    assert told[1] == ({1: [0, 1]}, {0: 1, 1: 1}, [])
    assert told[2] == told[3] == ({}, {}, [1, 0])
    assert told[4] == ({2: [0, 2]}, {0: 1, 2: 1}, [1])
    assert told[5] == ({3: []}, {}, [1, 0])
    assert told[6] == ({3: [2, 3, 1, 0]}, dict.fromkeys((2, 3, 1, 0), 1), [])
    assert told[7] == ({}, {}, [0, 1, 3, 2])


@pytest.mark.parametrize(
    ("at", "changes", "says"),
    [
        (4, {"ended": [[7, "abort", 0]]}, "line 5 contradicts itself or others: KeyError(7)"),
        (4, {"tables": [[9, 0, [1]]]}, "line 5 contradicts itself or others: KeyError(9)"),
        (4, {"tables": [[2, 0]]}, "line 5 contradicts"),
        (0, {"version": 1}, "this reads version 2, there is 1"),
        (0, {"num_blocks": 0}, "a pool of 0 blocks"),
        (0, {"requests": [{}]}, "line 1 contradicts itself or others: KeyError('r')"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(at, changes, says):
    lines = a_record()
    lines[at] = lines[at] | changes
    assert says in why_wrong(lines)


# --------------------------------------------------------------------------------------------------
# Files that are no records, or hostile ones


def test_a_last_line_that_is_cut_off_is_left_out():
    lines = a_record()
    cut = json.dumps(lines[-2]).encode()[:-5]
    *_, (_, last) = replay(as_file([*lines[:-2], cut]))
    assert last == lines[-3]
    assert "this is no record: line 8 is" in why_wrong([*lines[:-2], cut + b"\n", lines[-1]])
    *_, (_, last) = replay(as_file([*lines[:-1], json.dumps(lines[-1]).encode()]))
    assert last["event"] == "idle", "it lacks nothing but the line break"


TITLE = {"event": "title", "name": "a", "date": "2026-11-23"}
NO_RECORDS = {
    "empty": (b"", "no record: line 1 is b''"),
    "text": (b"# pagedGPT\n", "no record: line 1 is b'# pagedGPT"),
    "cut off": (b'{"event":"snapshot","ver', "no record: line 1 is"),
    "no object": (b"[1, 2]\n", "no record: line 1 is"),
    "another one": (b'{"event":"step"}\n', "it does not begin with a snapshot"),
    "a title alone": ([TITLE], "it does not begin with a snapshot"),
    "a title and a step": ([TITLE, a_record()[1]], "it does not begin with a snapshot"),
    "an event that cannot be": (b'{"event":["snapshot"]}\n', "does not begin with a snapshot"),
    "no event": (b"{}\n", "line 1 contradicts itself or others: KeyError"),
    "binary": (b"\x89PNG\r\n\x1a\n\xff\xfe", "no record: line 1 is"),
    "deep": (b"[" * 10**6 + b"\n", "no record: line 1 is"),
    "version": ([SNAPSHOT | {"version": 1}], "this reads version 2, there is 1"),
    "no version": ([{"event": "snapshot"}], "line 1 contradicts itself or others: KeyError"),
}


@pytest.mark.parametrize("title", NO_RECORDS)
def test_what_is_no_record_is_refused(title, tmp_path):
    content, says = NO_RECORDS[title]
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else as_file(content).read())
    with pytest.raises(RecordError, match=says):
        open_record(path)


def test_a_title_may_stand_before_the_snapshot(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(as_file([TITLE, *a_record()]).read())
    with open_record(path) as record:
        told = [line["event"] for _, line in replay(record)]
    assert told[:2] == ["title", "snapshot"] and len(told) == 10


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(RecordError, match="nowhere: No such file or directory; name a file of"):
        open_record(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="Is a directory"):
        open_record(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR), "wb", buffering=0) as writer:
        writer.write(b"no record\n")  # without this it was waited for
        with pytest.raises(RecordError, match="this is a pipe"):
            open_record(tmp_path / "pipe")


BAD_VALUES = [-1, 2**60, 1.5, 1e400, float("nan"), True, None, "1", [], {}, [[]], [[1]], [{}]]
BAD_VALUES += [[-1], [["1", 2, 3]], [[1, 2, 3, 4]], [2**53], [[2**52, 2**52, 2**52]], [[1, 1, [1]]]]


def test_whatever_stands_in_a_line_only_record_errors_are_raised():
    """
    Would catch: a traceback, and memory that a number asks for. Each field of each kind of line
    gets values of other types, negative and huge ones.
    """
    good = a_record()
    for at, fields in enumerate(good):
        for name in [*fields, "copies", "preempted", "unknown"]:
            for value in BAD_VALUES:
                why_wrong([*good[:at], fields | {name: value}, *good[at + 1 :]])
    for name in [*new(1, 3, 2), "table", "target"]:
        for value in BAD_VALUES:
            request = new(1, 3, 2) | {"table": [], "target": 3, name: value}
            why_wrong([SNAPSHOT, good[1] | {"new": [request]}])
            why_wrong([SNAPSHOT | {"requests": [request]}])


def test_a_huge_pool_takes_no_memory():
    """Only blocks that are not free are kept."""
    lines = a_record()[:2]
    lines[0] = lines[0] | {"num_blocks": 2**52}
    for tallies, _ in replay(as_file(lines)):
        assert len(tallies.references) <= 3


def test_a_line_without_an_end_is_not_read_whole(monkeypatch):
    monkeypatch.setattr(replay_module, "MAX_LINE", 1000)
    lines = [*a_record()[:2], b'{"event":"idle","time":' + b" " * 5000 + b"9}\n"]
    assert "no record: line 3 is" in why_wrong(lines)


# --------------------------------------------------------------------------------------------------
# How records are shown


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_file(a_record()).read())
    return path


def lines_of(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_bytes().splitlines()]


def test_records_in_assets_show_what_they_are_for():
    """And they are small, and without texts."""
    seen = {path.stem: Counter() for path in RECORDS}
    for path in RECORDS:
        with open_record(path) as record:
            for _, told in replay(record):
                assert "tokens" not in told
                for name in ("copies", "preempted", "evicted", "new"):
                    seen[path.stem][name] += len(told.get(name, ()))
        title = lines_of(path)[0]
        assert title["name"] == path.stem and title["model"] and title["machine"] and title["date"]
    assert seen["preemption"]["preempted"] >= 2 and seen["preemption"]["evicted"] >= 10
    assert seen["h200"]["new"] == 256
    assert sum(path.stat().st_size for path in RECORDS) <= 350_000


def test_each_caption_of_the_tour_stands_at_what_it_tells():
    """[step, request, text], of two sentences each."""
    title, *lines = lines_of(ROOT / "assets/tour.jsonl")
    by_step = {told["step"]: told for told in lines if told["event"] == "step" and "step" in told}
    names = ["Admission", "A chunk", "The first decode", "A prefix hit", "A fork", "Copy-on-write"]
    tour = title["tour"]
    assert [text.split(".")[0] for *_, text in tour] == [*names, "Preemption", "Resume"]
    steps = [step for step, *_ in tour]
    assert steps == sorted(steps)
    happens = [
        lambda told, r: [r, 0] in [row[:2] for row in told["admitted"]],
        lambda told, r: r in [row[0] for row in told["chunks"]],
        lambda told, r: told["decodes"] == [r],
        lambda told, r: next(hits for q, hits, _ in told["admitted"] if q == r) >= 16,
        lambda told, r: r in [q["r"] for q in told["new"] if q["status"] == "active"],
        lambda told, r: r in [row[0] for row in told["copies"]],
        lambda told, r: r in told["preempted"],
        lambda told, r: r in [row[0] for row in told["admitted"]],
    ]
    for (step, r, text), happened in zip(tour, happens, strict=True):
        assert happened(by_step[step], r), text
        assert len(re.findall(r"[.:](?: |$)", text)) >= 3 and len(text) < 220


@contextmanager
def serving(*flags):
    """`serve.py` with these flags, where torch cannot be imported. The line that it prints."""
    code = "import sys; sys.modules['torch'] = None; import serve; serve.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "--port", "0", *map(str, flags)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def get(url: str, **headers) -> tuple[int, dict, bytes]:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_serve_replay_shows_the_page_alone(file):
    """Without a model, without torch: the page asks for the record that is served beside it."""
    with serving("--replay", file) as process:
        greeting = process.stdout.readline().strip()
        assert greeting.startswith(f"showing {file} at http://127.0.0.1:")
        url = greeting.rpartition(" ")[2]
        with urllib.request.urlopen(url, timeout=30) as page:  # follows the redirect
            assert page.url == f"{url}/?replay=record"
            assert page.read() == welcome.page().encode()
            assert "script-src 'sha256-" in page.headers["Content-Security-Policy"]
        status, headers, content = get(f"{url}/record")
        assert (status, content) == (200, file.read_bytes())
        assert headers["content-type"] == "application/jsonl"
        assert headers["x-content-type-options"] == "nosniff"
        with file.open("ab") as record:  # it is served as it is by now
            record.write(b"\n")
        assert get(f"{url}/record")[2] == file.read_bytes()
        assert get(f"{url}/livez")[0] == 200
        # a record may have texts in it: other pages do not read it
        assert get(f"{url}/record", Host="evil.example")[0] == 403
        assert get(f"{url}/record", Origin="http://evil.example")[0] == 403
        status, _, message = get(f"{url}/v1/models")
        assert status == 404 and b"there is /, /record, /livez" in message
        file.unlink()
        assert get(f"{url}/record")[0] == 404
        process.terminate()
        assert process.wait(30) == 0


def test_serve_replay_has_keys(file, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    with serving("--replay", file, "--api-key-file", keys) as process:
        url = process.stdout.readline().strip().rpartition(" ")[2]
        assert get(url)[0] == 200
        assert get(f"{url}/record")[0] == 401
        assert get(f"{url}/record", Authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--replay", "nowhere"], "nowhere: No such file or directory"),
        (["--replay", "README.md"], "README.md: this is no record"),
        (["--replay", "assets/tour.jsonl", "--chat", "--model", "x"], "leave out --model, --chat"),
    ],
)
def test_serve_replay_refuses_before_it_listens(flags, says):
    with serving(*flags) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1 and said.count("\n") == 1 and says in said
