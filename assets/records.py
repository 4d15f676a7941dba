"""
Reads a record in Python: each line, and the state that the lines so far describe.

    with open_record("FILE.jsonl") as file:     # a file of `serve.py --record`, or one of assets/
        for state, line in replay(file):      # raises RecordError for a bad one
            print(line["event"], state and state.tables)

engine/events.py writes them. Used by assets/draw.py and the tests; the page has its own reader, in
state.js. A file may come from anybody: nothing grows faster than what was read of it. Imports no
torch.
"""

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import BinaryIO

from engine.events import VERSION

MAX_LINE = 2**24  # bytes that are read at once


class RecordError(ValueError):
    """The mistake, and the line of the file that has it."""


class PoolState:
    """
    The state after a snapshot and the lines that followed it: which blocks each request holds, and
    which blocks are committed, in the order in which they became idle.
    """

    def __init__(self, snapshot: dict):
        version = snapshot["version"]
        if version != VERSION:
            raise ValueError(f"this reads version {VERSION}, there is {version!r:.20}")
        self.num_blocks = snapshot["num_blocks"]  # in old records an entry of this is no block
        self.tables = {q["r"]: q["table"] for q in snapshot["requests"]}
        self.committed = set(snapshot["committed"])
        self.idle = dict.fromkeys(snapshot["idle"])  # the next to be evicted first

    def apply(self, line: dict):
        """The changes of a step."""
        for q in line.get("new", ()):
            self.tables[q["r"]] = []
        evicted = line.get("evicted", ())
        idle = line.get("idle", ())
        used = [*evicted, *idle]  # one that was idle before is now after the others
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
    Each line, and the state after it: one object that changes, until a snapshot brings another;
    None before the first. A last line that was cut off, when the server was killed, is left out.
    Raises RecordError.
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
                return  # or there is none
            raise RecordError(f"no record: line {number} is {data[:60]!r}: {error}") from None
        yield state, line


def open_record(path: str | Path) -> BinaryIO:
    """Open a file that begins as a record does. Raises RecordError."""
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (the caller closes it)
        if not any(state for state, _ in islice(replay(file), 2)):
            raise RecordError("no record: it does not begin with a snapshot")
        file.seek(0)
        return file
    except (OSError, RecordError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"{path}: {why}; name a file of serve.py --record") from None
