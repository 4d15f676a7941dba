"""
Read a record of what an engine did: of `serve.py --record`, or in assets/.

    with open_record("FILE.jsonl") as file:
        for tallies, line in replay(file):      # raises RecordError for what is no record
            print(line["event"], tallies.tables, tallies.idle)

events.py writes the lines, and says what they tell. The page reads them the same way (state.js).
Imports no torch. A file may come from anybody: nothing here grows faster than what was read of it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import BinaryIO

from engine.events import VERSION

MAX_LINE = 2**24  # bytes


class RecordError(ValueError):
    """What is wrong, and in which line of the file."""


class Tallies:
    """
    What a snapshot says, and the lines after it: which blocks each request holds, how many hold
    each block, and which blocks are committed, in the order in which they became idle.
    """

    def __init__(self, snapshot: dict):
        if snapshot["version"] != VERSION:
            found = snapshot["version"]
            raise RecordError(f"this reads version {VERSION}, there is {found!r:.20}")
        self.num_blocks = snapshot["num_blocks"]  # an entry of this number is no block
        if type(self.num_blocks) is not int or self.num_blocks < 1:
            raise RecordError(f"a pool of {self.num_blocks!r:.20} blocks")
        self.tables: dict[int, list[int]] = {}  # request -> its block table
        self.references: Counter[int] = Counter()  # block -> block tables that hold it
        self.committed = set(snapshot["committed"])
        self.idle = dict.fromkeys(snapshot["idle"])  # the next to be evicted first
        for q in snapshot["requests"]:
            self.tables[q["r"]] = []
            self._hold(q["r"], 0, q["table"])

    def apply(self, line: dict):
        """The changes of a step."""
        for q in line.get("new", ()):
            self.tables[q["r"]] = []
        for block in line.get("evicted", ()):
            self.committed.discard(block)
            self.idle.pop(block, None)
        for r, start, blocks in line.get("tables", ()):
            self._hold(r, start, blocks)
        self.committed.update(line.get("committed", ()))
        for r, *_ in line.get("ended", ()):
            self._hold(r, 0, [])
            del self.tables[r]
        for block in line.get("idle", ()):
            self.idle.pop(block, None)
            self.idle[block] = None

    def _hold(self, r: int, start: int, blocks: list[int]):
        """From logical block `start` on, the table is now this."""
        table = self.tables[r]
        self.references.subtract(block for block in table[start:] if block != self.num_blocks)
        table[start:] = blocks
        for block in blocks:
            self.idle.pop(block, None)
        self.references.update(block for block in blocks if block != self.num_blocks)


def replay(file: BinaryIO) -> Iterator[tuple[Tallies | None, dict]]:
    """
    Each line, and the tallies after it: one object that changes, until a snapshot brings another;
    None before the first. Raises RecordError.
    """
    tallies = None
    for number, line in read_lines(file):
        try:
            if line["event"] == "snapshot":
                tallies = Tallies(line)
            elif tallies is None and line["event"] != "title":
                raise RecordError("this is no record: it does not begin with a snapshot")
            elif line["event"] == "step":
                tallies.apply(line)
        except RecordError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"line {number} contradicts itself or others: {error!r}") from None
        yield tallies, line


def read_lines(file: BinaryIO) -> Iterator[tuple[int, dict]]:
    """
    The number and the content of each line, but of a last one that is cut off, as the server was
    killed. Raises RecordError for what is no record.
    """
    for number in count(1):
        data = file.readline(MAX_LINE)
        try:
            yield number, dict(json.loads(data))
        except (ValueError, TypeError, RecursionError):
            if number > 1 and len(data) < MAX_LINE and not data.endswith(b"\n"):
                return  # or there is none
            raise RecordError(f"this is no record: line {number} is {data[:60]!r}") from None


def open_record(path: str | Path) -> BinaryIO:
    """A file that begins as a record does. Raises RecordError."""
    try:
        if Path(path).is_fifo():  # which may have nobody at its other end
            raise RecordError("this is a pipe, and a record is read twice: write it to a file")
        file = Path(path).open("rb")  # noqa: SIM115 (the caller closes it)
        if not any(tallies for tallies, _ in islice(replay(file), 2)):
            raise RecordError("this is no record: it does not begin with a snapshot")
        file.seek(0)
        return file
    except (OSError, RecordError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecordError(f"{path}: {why}; name a file of serve.py --record") from None
