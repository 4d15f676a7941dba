"""
The lines of a record: which fields they have, and how a file of them is read.

    for number, line in read_lines(file):       # raises RecordError for what is no record
        check_shape(line)                       # and for a field that is not of its form

Whether lines agree with each other, replay.py checks. Imports no torch. A file may come from
anybody: nothing here grows faster than what was read of it.
"""

import json
from collections.abc import Iterator
from typing import BinaryIO

from serving.events import VERSION

MAX_LINE = 2**24  # bytes
MAX_NUMBER = 2**53  # larger ones are not exact in JavaScript


class RecordError(ValueError):
    """What is wrong, and in which line of the file."""


# --------------------------------------------------------------------------------------------------
# Fields of lines: a type; [shape], a list of any length; (shape, ..), one of this length


def fields(names: str, shape=int) -> dict:
    return dict.fromkeys(names.split(), shape)


REQUEST = fields("r prompt max_tokens filled committed generated to_come")
REQUEST |= {"status": str, "table": [int]}
SETTINGS = fields("num_blocks block_size token_budget max_num_seqs window") | {"overlap": bool}
SNAPSHOT = SETTINGS | {"time": float, "requests": [REQUEST]}
SNAPSHOT |= fields("step queue free cached") | fields("waiting decodes committed idle", [int])
STEP = {"time": float, "new": [REQUEST], "ended": [(int, str, int)], "lack": (int, int)}
STEP |= fields("step resolved sampled queue free cached") | fields("decodes evicted waiting", [int])
STEP |= fields("admitted preempted copied committed tokens", [(int, int)])
STEP |= fields("chunks blocks", [(int, int, int)]) | {"tables": [(int, int, [int])]}
SHAPES = {"snapshot": SNAPSHOT, "step": STEP, "idle": {"time": float}}
# fields that are always there; others are left out where they are empty
HAS = {
    "snapshot": "time step num_blocks block_size token_budget max_num_seqs free cached",
    "step": "time free cached",
    "idle": "time",
}
REQUEST_HAS = ("r", "prompt", "max_tokens", "status")


def fits(value, shape) -> bool:
    """Whether a value of JSON has this shape. No number is negative, and none is too large."""
    match shape:
        case dict():
            if type(value) is not dict:
                return False
            return all(fits(value[name], shape[name]) for name in shape.keys() & value)
        case list():
            return type(value) is list and all(fits(item, shape[0]) for item in value)
        case tuple():
            has_length = type(value) is list and len(value) == len(shape)
            return has_length and all(map(fits, value, shape))
    if type(value) is int or (type(value) is float and shape is float):
        return shape in (int, float) and 0 <= value < MAX_NUMBER
    return type(value) is shape


def check_shape(line: dict):
    """Raises RecordError for a version or a field that is missing or is not as it should be."""
    event = line["event"]
    if event == "snapshot" and line.get("version") != VERSION:
        raise RecordError(f"this reads version {VERSION}, there is {line.get('version')!r:.20}")
    for name, shape in SHAPES[event].items():
        if name in line and not fits(line[name], shape):
            raise RecordError(f"{name} is not of the form that serving/events.py gives it")
    missing = [name for name in HAS[event].split() if name not in line]
    for q in [*line.get("requests", ()), *line.get("new", ())]:
        missing += [f"{name} of a request" for name in REQUEST_HAS if name not in q]
    if missing:
        raise RecordError(f"there is no {missing[0]}")


# --------------------------------------------------------------------------------------------------
# A file of lines


def read_lines(file: BinaryIO) -> Iterator[tuple[int, dict]]:
    """
    The number and the content of each line. A last one that is cut off, as the server was killed,
    has the event "cut". Raises RecordError for what is no record.
    """
    number = 0
    while data := file.readline(MAX_LINE):
        number += 1
        line = None
        try:
            line = json.loads(data)
        except (ValueError, RecursionError):
            if number > 1 and len(data) < MAX_LINE and not data.endswith(b"\n"):
                line = {"event": "cut"}
        event = line.get("event") if type(line) is dict else None
        if number == 1 and event != "snapshot":
            raise RecordError("this is no record: its first line is no snapshot of an engine")
        if event not in ("snapshot", "step", "idle", "cut"):
            wanted = f"wanted a snapshot, step or idle in JSON, in less than {MAX_LINE} bytes"
            raise RecordError(f"line {number}: {wanted}, there is {data[:60]!r}")
        yield number, line
    if number == 0:
        raise RecordError("this is no record: the file is empty")
