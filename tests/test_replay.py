"""
Records are read and checked: those of real engines replay clean, whatever happens to them; what is
changed in one is found; and nothing that a file may contain does harm. Also how records are shown:
`bench.py replay`, `bench.py page`, `serve.py --replay`.
"""

import copy
import io
import json
import os
import random
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

import bench
from serving import record as record_module
from serving import welcome
from serving.record import RecordError
from serving.replay import State, open_record, replay
from tests.simulator import RecordedWorld, write_record
from tests.swarm import a_life
from tests.test_simulator import forgets_the_last_block

ROOT = Path(__file__).parents[1]
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


def recorded_life(seed: int) -> list[dict]:
    world = RecordedWorld(*a_life(seed))
    world.run()
    return [json.loads(line) for line in world.lines]


@pytest.fixture(scope="module")
def lives() -> list[list[dict]]:
    """Short ones. 22: many preemptions; 128: a window leaves blocks while a plan is made."""
    return [recorded_life(seed) for seed in (*range(1, 13), 22, 128)]


def test_random_lives_replay_clean(lives):
    """
    Would catch: whatever the recorder forgets to tell, or the reader holds to be wrong. All that
    the reader knows of happens in these lives.
    """
    seen = Counter()
    for seed, lines in enumerate(lives):
        assert not why_wrong(lines), f"life {seed}"
        for line in lines:
            seen.update(name for name, value in line.items() if value)
            seen.update(f"ended: {reason}" for _, reason, _ in line.get("ended", ()))
            seen.update(f"new: {q['status']}" for q in line.get("new", ()))
            seen[line.get("why")] += 1
    known = ["copied", "preempted", "evicted", "lack", "overlap", "window", "a step failed"]
    known += [f"ended: {reason}" for reason in ("stop", "length", "abort", "error")]
    assert min(seen[name] for name in [*known, "new: waiting", "new: active"]) >= 3, seen


@pytest.mark.slow
def test_many_lives_replay_clean():
    for seed in (*range(24), *range(1000, 1400)):
        assert not why_wrong(recorded_life(seed)), f"life {seed}"


TOTALS = ("prefill tokens", "decode tokens", "preemptions", "hit tokens")


def facts(state: State, totals: Counter) -> dict:
    """What a snapshot says."""
    known = {name: getattr(state, name) for name in ("settings", "step", "waiting", "cached")}
    known |= {"idle": [*state.idle], "totals": [totals[name] for name in TOTALS]}
    names = [name for name in record_module.REQUEST if name not in ("r", "to_come")]
    for r, q in state.requests.items():
        known[r] = {name: getattr(q, name) for name in names}
    return copy.deepcopy(known)


MANY = pytest.param(range(13, 40), id="many", marks=pytest.mark.slow)
seeds = pytest.mark.parametrize("seeds", [pytest.param(range(1, 13), id="few"), MANY])


@seeds
def test_who_joins_is_told_what_is_known(seeds):
    """A snapshot at any time, with steps under way, says what the lines so far have said."""

    class Joined(RecordedWorld):
        def flush(self, stats):
            super().flush(stats)
            if self.steps % 7 == 0:
                self.lines.append(self.recorder.snapshot("joined"))

    for seed in seeds:
        world = Joined(*a_life(seed))
        world.run()
        lines = [json.loads(line) for line in world.lines]
        assert not why_wrong(lines), f"life {seed}"
        known = None
        file = as_file(lines)
        for state, line in replay(file):
            if line["event"] == "snapshot":
                totals = Counter(line["totals"])
                if line.get("why") == "joined":
                    assert facts(state, totals) == known, f"life {seed}, step {state.step}"
            if line["event"] == "step" and "step" in line:
                totals["decode tokens"] += len(state.decodes)
            totals["prefill tokens"] += sum(n for _, _, n in line.get("chunks", ()))
            totals["preemptions"] += len(line.get("preempted", ()))
            totals["hit tokens"] += sum(hits for _, hits in line.get("admitted", ()))
            here = file.tell()
            if b'"joined"' in file.readline():  # the next line
                known = facts(state, totals)
            file.seek(here)
        # whoever begins with such a snapshot can read what follows
        first = next(i for i, line in enumerate(lines) if line.get("why") == "joined")
        assert not why_wrong(lines[first:]), f"life {seed}"


@seeds
def test_a_recording_may_begin_at_any_time(seeds):
    """
    Would catch: a step under way, planned before anybody listened, that commits blocks untold. So
    it was where a step had failed with overlap, too.
    """

    class Renewed(RecordedWorld):
        def flush(self, stats):
            super().flush(stats)
            if self.steps % 5 == 0:
                self.begin_record()

    for seed in seeds:
        world = Renewed(*a_life(seed))
        world.run()
        assert not why_wrong([json.loads(line) for line in world.lines]), f"life {seed}"


def places(value, path: tuple) -> list:
    """All (list or dict, key, path) below a value of JSON; in a path a list's keys are *."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        where = (*path, key if isinstance(value, dict) else "*")
        found.append((value, key, where))
        if isinstance(inner, dict | list):
            found += places(inner, where)
    return found


# what may be changed without a contradiction: it enters nothing that is computed
FREE = {"time", "lack", "name", "key", "choice", "totals", "max_model_len", "max_num_seqs"}
FREE |= {"free", "cached", "hits", "preemptions", "queue", "decodes", "tokens", "token_budget"}


def test_a_number_that_is_changed_is_found(lives):
    """
    In the lines of steps. Not all: a token of a longer text might as well have been its last one,
    and the last lines are followed by nothing that could contradict them.
    """
    rng = random.Random(0)
    found = Counter()
    for lines in lives:
        if len(lines) < 30 or any(line.get("why") for line in lines):
            continue
        texts = as_file(lines).readlines()
        for _ in range(25):
            at = rng.randrange(1, len(lines) - 8)
            broken = copy.deepcopy(lines[at])
            numbers = [
                place
                for place in places(broken, ())
                if type(place[0][place[1]]) is int
                and not FREE.intersection(map(str, place[2]))
                and place[2][:1] != ("new",)
            ]
            if numbers:
                holder, key, path = rng.choice(numbers)
                holder[key] += 1
                is_found = bool(why_wrong([*texts[:at], broken, *texts[at + 1 :]]))
                found[is_found, path[0]] += 1
    missed = sum(count for (is_found, _), count in found.items() if not is_found)
    assert found.total() > 60 and missed <= found.total() / 50, found


def test_a_line_that_is_missing_or_there_twice_is_found(lives):
    rng = random.Random(0)
    tried = 0
    for lines in lives:
        steps = [i for i, line in enumerate(lines[:-3]) if "step" in line and i]
        if any(line.get("why") for line in lines):
            continue
        texts = as_file(lines).readlines()
        for at in rng.sample(steps, min(10, len(steps))):
            if lines[at + 1]["event"] == "snapshot":  # an engine that was started anew
                continue
            assert why_wrong(texts[:at] + texts[at + 1 :])
            assert why_wrong(texts[: at + 1] + texts[at:])
            tried += 1
    assert tried > 40


# --------------------------------------------------------------------------------------------------
# One thing wrong at a time, in a record that can be read by eye


SNAPSHOT = {"event": "snapshot", "version": 1, "time": 0, "step": 0, "num_blocks": 4}
SNAPSHOT |= {"block_size": 2, "token_budget": 4, "max_num_seqs": 2, "window": 0, "overlap": False}
SNAPSHOT |= {"requests": [], "waiting": [], "queue": 0, "committed": [], "idle": []}
SNAPSHOT |= {"free": 4, "cached": 0}


def new(r: int, prompt: int, max_tokens: int) -> dict:
    described = {"r": r, "prompt": prompt, "max_tokens": max_tokens, "status": "waiting"}
    return described | {"filled": 0}


def line(time: float, free: int, cached: int, **fields) -> dict:
    return {"event": "step", "time": time, "free": free, "cached": cached, **fields}


def a_record() -> list[dict]:
    """
    4 blocks of 2. Request 1, of 3 tokens, answers 2; request 2 finds its first block, and evicts
    nothing; request 3 needs all four blocks, so both of the idle ones are evicted.
    """
    return [
        SNAPSHOT,
        line(
            1, 2, 0, step=0, new=[new(1, 3, 2)], admitted=[[1, 0]], chunks=[[1, 0, 3]],
            tables=[[1, 0, [0, 1]]], resolved=0, sampled=1, committed=[[1, 1]],
            blocks=[[0, 1, 1], [1, 1, 0]],
        ),
        line(
            2, 2, 2, step=1, decodes=[1], resolved=1, sampled=1, ended=[[1, "length", 2]],
            tables=[[1, 0, []]], blocks=[[1, 0, 1], [0, 0, 1]],
        ),
        {"event": "idle", "time": 2},
        line(
            3, 1, 1, step=2, new=[new(2, 4, 1)], admitted=[[2, 2]], chunks=[[2, 2, 1]],
            decodes=[], tables=[[2, 0, [0, 2]]], committed=[[2, 1]], resolved=2, sampled=0,
            blocks=[[0, 1, 1], [2, 1, 0]],
        ),
        line(4, 2, 2, new=[new(3, 8, 1)], waiting=[3], queue=1, ended=[[2, "abort", 0]],
            tables=[[2, 0, []]], blocks=[[2, 0, 0], [0, 0, 1]]),
        line(
            5, 0, 0, step=3, admitted=[[3, 0]], chunks=[[3, 0, 4]], waiting=[], queue=0,
            tables=[[3, 0, [2, 3, 1, 0]]], evicted=[1, 0], resolved=3, sampled=0,
            committed=[[3, 2]], blocks=[[2, 1, 1], [3, 1, 1], [1, 1, 0], [0, 1, 0]],
        ),
        line(
            6, 0, 4, step=4, chunks=[[3, 4, 4]], resolved=4, sampled=1, committed=[[3, 4]],
            ended=[[3, "length", 1]], tables=[[3, 0, []]],
            blocks=[[0, 0, 1], [1, 0, 1], [3, 0, 1], [2, 0, 1]],
        ),
        {"event": "idle", "time": 6},
    ]  # fmt: skip


def test_the_record_that_is_to_be_broken_is_good():
    lines = a_record()
    assert not why_wrong(lines)
    says = "line 8, step 4: requests of an idle engine: wanted [], there is [3]"
    assert why_wrong([*lines[:7], lines[8]]) == says


# a line, what to change in it, and what must be said
WRONG = {
    "a gap in the steps": (2, {"step": 2}, "number of the step: wanted 1, there is 2"),
    "time goes back": (2, {"time": 0.5}, "time 0.5 after 1"),
    "one that waits decodes": (4, {"decodes": [2]}, "request 2, .* wanted 'active', .* 'prefill"),
    "one that ended decodes": (4, {"decodes": [1]}, "request 1 has not come yet, or has ended"),
    "a token is skipped": (4, {"chunks": [[2, 3, 1]]}, "first position .* wanted 2, there is 3"),
    "a token again": (7, {"chunks": [[3, 3, 4]]}, "position of request 3: wanted 4, there is 3"),
    "past the prompt": (7, {"chunks": [[3, 4, 5]], "token": 9}, "5 tokens, the budget is 4"),
    "over the budget": (6, {"chunks": [[3, 0, 5]]}, "5 tokens, the budget is 4"),
    "computes nothing": (6, {"chunks": [[3, 0, 0]]}, "0 tokens, the budget is 4"),
    "twice": (6, {"chunks": [[3, 0, 2], [3, 2, 2]]}, "request 3 computes 2 tokens, 6 are left, on"),
    "hits half a block": (4, {"admitted": [[2, 1]]}, "request 2 hits 1 of its 4 tokens"),
    "hits all": (4, {"admitted": [[2, 4]]}, "request 2 hits 4 of its 4 tokens"),
    "hits what is not cached": (4, {"tables": [[2, 0, [3, 2]]]}, "hits block 3, which is not comm"),
    "admitted twice": (4, {"admitted": [[2, 2], [2, 2]]}, "request 2 is admitted, and is prefill"),
    "comes again": (5, {"new": [new(2, 8, 1)]}, "request 2 is new, after request 2"),
    "another count": (5, {"blocks": [[2, 1, 0], [0, 0, 1]]}, "block 2, by .* wanted 0, there is 1"),
    "an unsaid block": (4, {"blocks": []}, "block 0, by the block tables: wanted 1, there is 0"),
    "copied, untold": (4, {"copied": [[2, 1]]}, r"copies: wanted .., there is \[\[2, 1\]\]"),
    "a lost block": (4, {"free": 0}, "free blocks: wanted 1, there is 0"),
    "an idle block more": (5, {"cached": 3}, "cached and idle blocks: wanted 2, there is 3"),
    "not evicted": (6, {"evicted": [1]}, "block 0 is not committed any more, and was not evicted"),
    "evicted too soon": (4, {"evicted": [0]}, r"evicted blocks: wanted \[1\], there is \[0\]"),
    "never committed": (6, {"evicted": [0, 1, 2]}, "block 2 is evicted, and was not committed"),
    "committed early": (6, {"committed": [[3, 3]]}, "3 blocks committed, 0 before, and 4 tokens"),
    "commit without owner": (5, {"blocks": [[2, 0, 0], [0, 0, 1], [3, 0, 1]]}, "block 3 is comm"),
    "a cached block is written": (4, {"tables": [[2, 0, [0, 1]]]}, "2 writes block 1, which is c"),
    "neither yes nor no": (5, {"blocks": [[2, 0, 2], [0, 0, 1]]}, "block 2 is 2, committed is 1"),
    "a block twice": (6, {"tables": [[3, 0, [2, 3, 1, 1]]]}, "holds a block twice"),
    "no such block": (6, {"tables": [[3, 0, [2, 4, 1, 0]]]}, "request 3 has left blocks, but"),
    "far away": (6, {"tables": [[3, 0, [2, 99, 1, 0]]]}, "block 99 in a pool of 4"),
    "a table with a hole": (6, {"tables": [[3, 1, [3]]]}, "has 0 blocks, told are those from 1"),
    "too few blocks": (6, {"tables": [[3, 0, [2]]]}, "request 3 fills 4 slots of 1 blocks"),
    "another step's tokens": (7, {"resolved": 3}, "their token of step 4: wanted .., there is .3"),
    "tokens of nobody": (7, {"sampled": 2}, "tokens sampled: wanted 1, there is 2"),
    "a token for another": (7, {"tokens": [[2, 7]]}, r"with a token: wanted \[3\], there is \[2\]"),
    "tokens lost": (7, {"ended": [[3, "length", 0]]}, "tokens sampled: wanted 0, there is 1"),
    "tokens more": (7, {"ended": [[3, "length", 2]]}, "3, which ends: wanted 1, there is 2"),
    "ends too early": (5, {"ended": [[2, "length", 0]]}, "ends with 'length' after 0 of 1 tokens"),
    "an unknown end": (5, {"ended": [[2, "bored", 0]]}, "ends with 'bored' after 0 of 1 tokens"),
    "does not end": (7, {"ended": []}, "go on after their last token: wanted \\[\\], .* \\[3\\]"),
    "nobody waits": (6, {"waiting": [3], "queue": 1}, "waiting requests: wanted 0, there is 1"),
    "somebody else waits": (5, {"waiting": [2]}, "in the queue are"),
    "lacks nothing": (5, {"lack": [2, 2]}, "needs 2 and 2 are spare"),
    "keeps its blocks": (5, {"tables": []}, "block table of request 2, which ends: wanted .., "),
    "preempted twice": (4, {"preempted": [[2, 1]]}, "request 2 is preempted, and does not run"),
    "gave back more": (5, {"preempted": [[2, 3]]}, "which is preempted: wanted 2, there is 3"),
}  # fmt: skip


@pytest.mark.parametrize("title", WRONG)
def test_what_is_wrong_is_said(title):
    at, changes, says = WRONG[title]
    lines = a_record()
    lines[at] = lines[at] | changes
    said = why_wrong(lines)
    assert re.fullmatch(rf"line {at + 1}, step \d+: .*{says}.*", said), said


def test_a_shared_block_is_not_written():
    """Request 2 has the second block of request 1 in its table, and neither has a copy."""
    first = a_record()[1] | {"new": [new(1, 3, 3)]}
    table = {"tables": [[2, 0, [0, 1]]], "blocks": [[0, 2, 1], [1, 2, 0]], "committed": [[2, 1]]}
    two = line(2, 2, 0, step=1, new=[new(2, 4, 1)], admitted=[[2, 2]], chunks=[[2, 2, 1]], **table)
    alone = two | {"decodes": [], "resolved": 1, "sampled": 0}
    says = "line 3, step 1: request 2 writes block 1, which others hold"
    assert why_wrong([SNAPSHOT, first, alone]) == says
    both = two | {"decodes": [1], "resolved": 1, "sampled": 1}
    assert "writes block 1, which others hold" in why_wrong([SNAPSHOT, first, both])
    copy = {"tables": [[2, 0, [0, 2]]], "blocks": [[0, 2, 1]], "free": 1, "decodes": [1]}
    assert not why_wrong([SNAPSHOT, first, both | copy])


OVERLAP = [
    SNAPSHOT | {"overlap": True},
    line(
        1, 2, 0, step=0, new=[new(1, 2, 9)], admitted=[[1, 0]], chunks=[[1, 0, 2]],
        tables=[[1, 0, [0, 1]]], blocks=[[0, 1, 0], [1, 1, 0]],
    ),
    line(2, 2, 0, step=1, decodes=[1], resolved=0, sampled=1, committed=[[1, 1]],
        blocks=[[0, 1, 1]]),
    line(3, 2, 0, step=2, resolved=1, sampled=1),
    line(4, 3, 1, resolved=2, sampled=1, ended=[[1, "stop", 3]], tables=[[1, 0, []]],
        blocks=[[1, 0, 0], [0, 0, 1]]),
]  # fmt: skip


def test_a_token_under_way_is_dropped():
    """With overlap a stop token in step 1 ends a request that step 2 computes already."""
    assert not why_wrong(OVERLAP)
    end = {"ended": [[1, "stop", 2]], "tables": [[1, 0, []]], "blocks": [[1, 0, 0], [0, 0, 1]]}
    stopped = OVERLAP[3] | end | {"free": 3, "cached": 1}
    late = line(4, 3, 1, resolved=2, sampled=0)
    assert not why_wrong([*OVERLAP[:3], stopped, late, {"event": "idle", "time": 5}])
    late = line(4, 3, 1, resolved=2, sampled=1)
    assert "tokens sampled: wanted 0, there is 1" in why_wrong([*OVERLAP[:3], stopped, late])
    # nor may the token of a request that goes on be lost
    lost = [*OVERLAP[:3], line(3, 2, 0, step=2), line(4, 2, 0, resolved=2, sampled=1)]
    assert "requests without their token of step 1: wanted []" in why_wrong(lost)


def test_a_failed_step_is_mended_by_the_snapshot_after_it():
    """Its plan may have moved what no line tells; without the snapshot it is a violation."""
    good = a_record()
    broken = [*good[:4], good[4] | {"free": 3}]
    anew = SNAPSHOT | {"time": 9, "step": 7, "why": "a step failed"}
    assert not why_wrong([*broken, anew])
    assert "free blocks: wanted 1, there is 3" in why_wrong([*broken, good[5]])
    assert "free blocks: wanted 1, there is 3" in why_wrong(broken)
    for other in ({}, {"why": "joined"}):  # an engine that was started anew; a listener that came
        assert "free blocks" in why_wrong([*broken, anew | {"why": None} | other])


def test_a_snapshot_replaces_what_was_known():
    """A server that was started again; and a listener that has missed lines."""
    assert not why_wrong([*a_record()[:3], SNAPSHOT])
    assert not why_wrong([*a_record()[:3], SNAPSHOT | {"why": "joined", "step": 7, "time": 7}])


# --------------------------------------------------------------------------------------------------
# Files that are no records, or hostile ones


def test_a_last_line_that_is_cut_off_is_told():
    lines = a_record()
    cut = json.dumps(lines[-2]).encode()[:-5]
    *_, (state, last) = replay(as_file([*lines[:-2], cut]))
    assert last == {"event": "cut"} and state.step == 4
    assert "wanted a snapshot, step or idle" in why_wrong([*lines[:-2], cut + b"\n", lines[-1]])
    *_, (_, last) = replay(as_file([*lines[:-1], json.dumps(lines[-1]).encode()]))
    assert last["event"] == "idle", "it lacks nothing but the line break"


NO_RECORDS = {
    "empty": (b"", "the file is empty"),
    "text": (b"# pagedGPT\n", "its first line is no snapshot"),
    "cut off": (b'{"event":"snapshot","ver', "its first line is no snapshot"),
    "no object": (b"[1, 2]\n", "its first line is no snapshot"),
    "another one": (b'{"event":"step"}\n', "its first line is no snapshot"),
    "an event that cannot be": (b'{"event":["snapshot"]}\n', "its first line is no snapshot"),
    "binary": (b"\x89PNG\r\n\x1a\n\xff\xfe", "its first line is no snapshot"),
    "deep": (b"[" * 10**6 + b"\n", "its first line is no snapshot"),
    "version": ([SNAPSHOT | {"version": 2}], "this reads version 1, there is 2"),
    "no version": ([{"event": "snapshot"}], "this reads version 1, there is None"),
    "too little": ([{"event": "snapshot", "version": 1, "time": 0}], "there is no step"),
    "a lost block": ([SNAPSHOT | {"free": 3}], "free blocks: wanted 4, there is 3"),
    "no pool": ([SNAPSHOT | {"num_blocks": 0}], "a pool of 0 blocks"),
}


@pytest.mark.parametrize("title", NO_RECORDS)
def test_what_is_no_record_is_refused(title, tmp_path):
    content, says = NO_RECORDS[title]
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else as_file(content).read())
    with pytest.raises(RecordError, match=says):
        open_record(path)


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


def test_whatever_stands_in_a_line_only_record_errors_are_raised(lives):
    """
    Would catch: a traceback, and memory that a number asks for. Each field of each kind of line
    gets values of other types, negative and huge ones.
    """
    good = a_record()
    kinds = {"a snapshot": 0, "a step": 1, "another step": 6, "idle": 3}
    for at in kinds.values():
        fields = record_module.SHAPES[good[at]["event"]]
        for name in [*fields, "event", "version", "unknown"]:
            for value in BAD_VALUES:
                why_wrong([*good[:at], good[at] | {name: value}, *good[at + 1 :]])
    for name in record_module.REQUEST:
        for value in BAD_VALUES:
            request = new(1, 3, 2) | {name: value}
            why_wrong([good[0], good[1] | {"new": [request]}])
            why_wrong([SNAPSHOT | {"requests": [request]}])
    rng = random.Random(0)
    beginnings = [(lines, as_file(lines[:40]).readlines()) for lines in lives]
    for _ in range(500):
        lines, texts = rng.choice(beginnings)
        at = rng.randrange(len(texts))
        bad = [copy.deepcopy(lines[at])]
        holder, key, _ = rng.choice(places(bad, ()))
        holder[key] = rng.choice(BAD_VALUES)
        why_wrong([*texts[:at], *bad, *texts[at + 1 :]])


def test_a_huge_pool_takes_no_memory():
    """Only blocks that are not free are kept; a picture shows some of them."""
    lines = a_record()[:2]
    lines[0] = lines[0] | {"num_blocks": 2**52, "free": 2**52}
    lines[1] = lines[1] | {"free": 2**52 - 2}
    for state, _ in replay(as_file(lines)):
        owners, *_ = bench.column_of(state)
        assert len(owners) <= bench.MAX_ROWS


def test_a_line_without_an_end_is_not_read_whole(monkeypatch):
    monkeypatch.setattr(record_module, "MAX_LINE", 1000)
    lines = [*a_record()[:2], b'{"event":"idle","time":' + b" " * 5000 + b"9}\n"]
    assert "line 3: wanted a snapshot, step or idle in JSON, in less than 1000 bytes" in why_wrong(
        lines
    )


# --------------------------------------------------------------------------------------------------
# How records are shown


@pytest.fixture
def file(tmp_path) -> Path:
    """A record in which a name would end the element of a page that it is put into."""
    lines = a_record()
    lines[1]["new"][0]["name"] = "</script><script>alert(1)</script><!-- \u2028"
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_file(lines).read())
    return path


def run_bench(monkeypatch, capsys, *argv) -> str:
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, argv)])
    bench.main()
    return capsys.readouterr().out


def test_bench_replay_checks_counts_and_draws(file, monkeypatch, capsys):
    out = file.with_name("x.png")
    figures = json.loads(run_bench(monkeypatch, capsys, "replay", file, "--out", out))
    wanted = {"requests": 3, "steps": 5, "tokens in": 12, "tokens out": 3, "hit tokens": 2}
    wanted |= {"evictions": 2, "preemptions": 0, "copies": 0, "peak blocks": 4, "seconds": 6}
    assert {name: figures[name] for name in wanted} == wanted
    assert out.read_bytes().startswith(b"\x89PNG")
    with file.open("ab") as record:
        record.write(b'{"event":"st')
    figures = json.loads(run_bench(monkeypatch, capsys, "replay", file, "--out", out))
    assert figures["last line"] == "cut off: the server was killed"
    with file.open("ab") as record:
        record.write(b"\n")
    with pytest.raises(SystemExit, match="line 10: wanted a snapshot, step or idle"):
        run_bench(monkeypatch, capsys, "replay", file, "--out", out)


def test_a_long_record_has_a_picture_of_bounded_size(monkeypatch):
    """Every so manieth step: the last column is of the last steps."""
    monkeypatch.setattr(bench, "MAX_COLUMNS", 8)
    drawn = []
    monkeypatch.setattr(bench.draw, "block_map", lambda *args: drawn.append(args) or {})
    lines = [SNAPSHOT | {"num_blocks": 64, "free": 64}]
    table = [*range(26)]
    lines.append(
        line(0, 38, 0, step=0, new=[new(1, 1, 99)], admitted=[[1, 0]], chunks=[[1, 0, 1]],
            resolved=0, sampled=1, tables=[[1, 0, table]], blocks=[[b, 1, 0] for b in table])
    )  # fmt: skip
    for i in range(1, 51):
        lines.append(line(i, 38, 0, step=i, decodes=[1], resolved=i, sampled=1))
    figures = bench.replayed(as_file(lines), Path("x.png"))
    ((columns, size, title, _),) = drawn
    assert figures["steps"] == 51 and size == (51, 64)
    assert 4 <= len(columns) <= 8 and columns[0][:2] == ([[1]] * 26 + [[]] * 38, set())
    assert columns[0][2] == {"active": 1}
    assert title == "1 requests in a pool of 64 blocks"


def test_a_shared_block_is_split_among_its_owners(monkeypatch, tmp_path):
    """In the picture: all owners at once, in every step alike."""
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb

    images = []
    monkeypatch.setattr(Axes, "imshow", lambda self, image, **options: images.append(image))
    columns = [([[1, 2], [], []], {1}, {}), ([[1, 2], [3], []], set(), {})]
    bench.draw.block_map(columns, (2, 3), "", tmp_path / "x.png")
    (image,) = images
    one, two, three = (to_rgb(bench.draw.COLOURS[r]) for r in (1, 2, 3))
    first = [row[0] for row in image]
    assert first[:160] == [one] * 80 + [two] * 80 == [row[1] for row in image][:160]
    assert first[160:] == [to_rgb("lightgrey")] * 160 + [to_rgb("white")] * 160
    assert [row[1] for row in image][160:320] == [three] * 160


def test_the_page_with_a_record_inside(file, monkeypatch, capsys):
    """One file: the record cannot leave its element, and the policy allows the page's own code."""
    page = run_bench(monkeypatch, capsys, "page", file)
    own = welcome.page()
    assert page.count("</script") == own.count("</script") + 1
    (record,) = re.findall(
        r'<script type="application/json" id="record">(.*?)</script>', page, re.DOTALL
    )
    lines = [json.loads(text) for text in file.read_bytes().splitlines()]
    assert json.loads(record) == lines and "<" not in record
    assert page.index('id="record"') < page.index("<script>"), "it is there when the script runs"
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    assert page.index(policy) < page.index("<style>")
    # of the code as it stands in the file; a browser says of frame-ancestors here that it is void
    assert policy == welcome.content_policy(page) == welcome.content_policy(own)
    assert "frame-ancestors" not in policy


def test_the_page_is_in_utf_8_whatever_the_terminal_reads(file, monkeypatch):
    with io.TextIOWrapper(io.BytesIO(), "ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["bench.py", "page", str(file)])
        bench.main()
        assert stdout.buffer.getvalue().decode().startswith("<!doctype html>")


def test_what_is_no_record_has_no_page(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="No such file"):
        run_bench(monkeypatch, capsys, "page", tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["forks", "preemption"])
def test_a_record_in_assets_is_made_by_its_command(name, monkeypatch, capsys, tmp_path):
    """But for the times: whoever doubts what it shows makes it again."""
    out = tmp_path / "x.jsonl"
    told = json.loads(run_bench(monkeypatch, capsys, "record", name, "--out", out))
    again = [json.loads(text) for text in out.read_bytes().splitlines()]
    assert told["lines"] == len(again)
    kept = [json.loads(text) for text in (ROOT / f"assets/{name}.jsonl").read_bytes().splitlines()]
    assert [one | {"time": 0} for one in again] == [one | {"time": 0} for one in kept]


def test_records_in_assets_show_what_they_are_for():
    """And they are small, and without texts."""
    seen = {path.stem: Counter() for path in RECORDS}
    for path in RECORDS:
        with open_record(path) as record:
            for _, told in replay(record):
                assert "tokens" not in told
                for name in ("copied", "preempted", "evicted"):
                    seen[path.stem][name] += len(told.get(name, ()))
                seen[path.stem]["hits"] += any(hits for _, hits in told.get("admitted", ()))
    assert seen["forks"]["copied"] >= 3 and seen["forks"]["hits"] >= 5
    assert seen["preemption"]["preempted"] >= 2 and seen["preemption"]["evicted"] >= 10
    assert sum(path.stat().st_size for path in RECORDS) <= 2**20


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
        (["--replay", "assets/forks.jsonl", "--chat", "--model", "x"], "leave out --model, --chat"),
    ],
)
def test_serve_replay_refuses_before_it_listens(flags, says):
    with serving(*flags) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1 and said.count("\n") == 1 and says in said


def test_a_failing_life_leaves_its_record(monkeypatch, tmp_path):
    """As far as it went, to be sent with a report; the reader finds what went wrong in it."""
    import paged

    monkeypatch.setattr(paged.Request, "clear_cache", forgets_the_last_block)
    settings, events = next(
        life for life in map(a_life, range(100)) if not life[0]["engine"]["overlap"]
    )
    path = tmp_path / "record.jsonl"
    write_record(path, settings, events)
    with pytest.raises(RecordError), open_record(path) as record:
        for _ in replay(record):
            pass
