"""
Reads a record in Python: each line, and the pool's state after it.

    with open_record("FILE.jsonl") as file:     # from `serve.py --record`, or in assets/
        for state, line in replay(file):        # raises RecordError if the file is bad
            print(line["event"], state and state.tables)

engine/events.py writes records. assets/draw.py and the tests read them with this file, and the page
has its own reader, in state.js. A file may come from anyone, so memory must not grow faster than
the amount of data read. This file does not import torch.
"""

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import BinaryIO

from engine.events import VERSION

MAX_LINE = 2**24  # maximum number of bytes to read at a time


class RecordError(ValueError):
    """Raised for a bad file. The message says what is wrong, and in which line."""


class PoolState:
    """
    The state after a snapshot and the lines that follow it: which blocks each request has, which
    blocks are committed, and which are idle, in the order in which they became idle.
    """

    def __init__(self, snapshot: dict):
        version = snapshot["version"]
        if version != VERSION:
            raise ValueError(f"this program reads version {VERSION}, not {version!r:.20}")
        self.num_blocks = snapshot["num_blocks"]  # in older tables, this number is not a block
        self.tables = {q["r"]: q["table"] for q in snapshot["requests"]}
        self.committed = set(snapshot["committed"])
        self.idle = dict.fromkeys(snapshot["idle"])  # in eviction order

    def apply(self, line: dict):
        """Apply the changes made by a step."""
        for q in line.get("new", ()):
            self.tables[q["r"]] = []
        evicted = line.get("evicted", ())
        idle = line.get("idle", ())
        used = [*evicted, *idle]  # a block that was already idle moves to the end
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
    Yield each line, and the state after it, which is None before the first snapshot. The state is a
    single object that changes until the next snapshot replaces it. If the last line was cut off
    because the server was killed, it is left out. Raises RecordError.
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
                return  # cut off or empty
            raise RecordError(f"not a record: line {number} is {data[:60]!r}: {error}") from None
        yield state, line


def open_record(path: str | Path) -> BinaryIO:
    """Open a file that begins like a record. Raises RecordError if it does not."""
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (the caller closes it)
        if not file.peek(1):
            raise RecordError("it is empty: the server was stopped before its engine was ready")
        if not any(state for state, _ in islice(replay(file), 2)):
            raise RecordError("not a record: it does not begin with a snapshot")
        file.seek(0)
        return file
    except (OSError, RecordError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"{path}: {why}; choose a file from serve.py --record") from None
