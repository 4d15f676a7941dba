"""
Reads a record in Python: each line, and the state of the pool after it.

    with open_record("FILE.jsonl") as file:     # a file of `serve.py --record`, or one of assets/
        for state, line in replay(file):        # raises RecordError for a bad file
            print(line["event"], state and state.tables)

engine/events.py writes records. assets/draw.py and the tests read them with this file; the page has
its own reader, in state.js. A file may come from anyone, so memory must not grow faster than what
was read of it. Imports no torch.
"""

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import BinaryIO

from engine.events import VERSION

MAX_LINE = 2**24  # bytes to read at a time


class RecordError(ValueError):
    """What is wrong, and the line of the file where it is."""


class PoolState:
    """
    The state after a snapshot and the lines that followed it: which blocks each request holds,
    which blocks are committed, and which are idle, in the order in which they became idle.
    """

    def __init__(self, snapshot: dict):
        version = snapshot["version"]
        if version != VERSION:
            raise ValueError(f"this reads version {VERSION}, not {version!r:.20}")
        self.num_blocks = snapshot["num_blocks"]  # in old tables this entry is not a block
        self.tables = {q["r"]: q["table"] for q in snapshot["requests"]}
        self.committed = set(snapshot["committed"])
        self.idle = dict.fromkeys(snapshot["idle"])  # in the order of eviction

    def apply(self, line: dict):
        """Apply the changes of a step."""
        for q in line.get("new", ()):
            self.tables[q["r"]] = []
        evicted = line.get("evicted", ())
        idle = line.get("idle", ())
        used = [*evicted, *idle]  # a block that was idle before moves to the end
        for r, start, blocks in line.get("tables", ()):
            self.tables[r][start:] = blocks
            used += blocks
        self.committed.difference_update(evicted)
        self.committed.update(line.get("committed", ()))
        for r, *_ in line.get("ended", ()):
            del self.tables[r]
        for block in used:
            self.idle.pop(block, None)
        self.idle |= dict.fromkeys(idle)


def replay(file: BinaryIO) -> Iterator[tuple[PoolState | None, dict]]:
    """
    Yield each line, and the state after it: one object that changes, until a snapshot replaces it;
    None before the first snapshot. A last line that was cut off, because the server was killed, is
    left out. Raises RecordError.
    """
    state = None
    for number in count(1):
        data = file.readline(MAX_LINE)
        try:
            line = dict(json.loads(data))
            if line["event"] == "snapshot":
                state = PoolState(line)
            elif line["event"] == "step":
                state.apply(line)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if number > 1 and len(data) < MAX_LINE and not data.endswith(b"\n"):
                return  # it was cut off, or is empty
            raise RecordError(f"not a record: line {number} is {data[:60]!r}: {error}") from None
        yield state, line


def open_record(path: str | Path) -> BinaryIO:
    """Open a file that begins as a record does. Raises RecordError."""
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (the caller closes it)
        if not any(state for state, _ in islice(replay(file), 2)):
            raise RecordError("not a record: it does not begin with a snapshot")
        file.seek(0)
        return file
    except (OSError, RecordError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"{path}: {why}; name a file of serve.py --record") from None
