"""
Line-by-line records of what the engine does, for a file and for the page at /.

    recorder = engine.stages["record"]
    recorder.listen(print)                  # prints a line of JSON for each step

Lines are only computed while there are listeners. A record begins with a snapshot of the state.
Each line after that has the changes made by one step: the contents of its `Plan`, and the block
tables that differ.

    {"event": "snapshot", "num_blocks": 32, "block_size": 16, .., "requests": [], "idle": []}
    {"event": "step", "step": 0, "admitted": [[1, 0, 20]], "chunks": [[1, 0, 20]], "resolved": 0,
     "sampled": 1, "new": [{"r": 1, "prompt": 20, ..}], "tables": [[1, 0, [0, 1]]], ..}
    {"event": "idle"}

REFERENCE.md lists all fields. Records are parsed by state.js on the page, and by assets/records.py
in Python. This file does not import torch.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from datetime import date
from itertools import takewhile

from common import say
from engine.step import Stage, Step
from paged import Request

VERSION = 2  # version of the format
SETTINGS = ("num_blocks", "block_size", "token_budget", "max_num_seqs", "max_model_len")
LINES_A_SNAPSHOT = 1000  # lines from one snapshot to the next; a reader can start at any snapshot
PUBLISH_SECONDS = 0.1  # minimum time between two messages to listeners
KEEP_SECONDS = 600  # how long to keep recording with no listeners, to allow for page reloads
compact_json = json.JSONEncoder(separators=(",", ":")).encode


class Recorder(Stage):
    """
    Passes each line to all `listeners`, which are functions that take a string. If `has_tokens`,
    the lines include token ids, which reveal the texts.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self.listeners: list[Callable[[str], None]] = []
        self.has_tokens = False
        self.time = -math.inf  # time of the last line, in seconds since the engine started

    def listen(self, listener: Callable[[str], None], tokens: bool = False):
        """
        Call `listener` with each line from now on. The first listener decides whether the lines
        include token ids.
        """
        if not self.listeners:
            self.has_tokens = tokens
            self.scheduler = self.engine.scheduler
            self.line = {}  # the fields of the next line
            self._save_state()
        self.listeners.append(listener)

    def _save_state(self):
        """
        Save the current state, as shown in a snapshot. Later lines have the changes since then.
        """
        scheduler = self.scheduler
        everyone = scheduler.waiting + scheduler.running
        # the block tables as known to a reader of the lines so far
        self.tables = {r: r.block_table.copy() for r in everyone}
        self.changed: list[Request] = []  # requests whose block tables may differ from these
        self.decodes: list[int] = []  # in the last step that was planned
        self.num_added = scheduler.num_added
        self.num_idled = scheduler.block_allocator.num_idled
        self.lines_left = LINES_A_SNAPSHOT  # number of lines until the next snapshot

    # -- in a server's loop ------------------------------------------------------------------------

    def connect(self, link, directory: str):
        self.publisher = Publisher(self, link)

    def due_in(self) -> float | None:
        return self.publisher.due_in()

    def arrived(self, messages: Iterable[dict]) -> Iterable[dict]:
        for message in messages:
            if message["op"] == "listen":
                self.publisher.listen(message["on"], message["tokens"])
            else:
                yield message

    def sent(self):
        self.publisher.publish()

    # -- what the engine calls ---------------------------------------------------------------------

    def planned(self, step: Step):
        """
        Record a step's plan before the step starts, while its tokens do not count as filled yet. A
        plan with nothing to compute is also recorded if it has preempted a request.
        """
        plan = step.plan
        is_step = bool(plan.decodes or plan.chunks)
        if not self.listeners or not (is_step or plan.preempted or plan.tables_changed):
            return
        if is_step:
            self.line["step"] = step.number
            decodes = numbers(plan.decodes)
            if decodes != self.decodes:
                self.decodes = decodes
                self.line["decodes"] = decodes
        admitted = [[r.arrival_number, r.num_filled_slots, r.num_tokens] for r in plan.admitted]
        # A copy is attributed to the request that has the new block. If that request was preempted
        # in the same plan, no request has the block any more, and the copy is left out.
        S = self.scheduler.block_size
        writers = {
            block: r.arrival_number
            for r in plan.tables_changed
            for block in r.block_table[r.num_filled_slots // S :]
        }
        copies = [
            [writers[copy], copy, source] for copy, source in plan.copies.items() if copy in writers
        ]
        self._add(preempted=numbers(plan.preempted), admitted=admitted)
        self._add(chunks=[[r.arrival_number, r.prefill_cursor, n] for r, n in plan.chunks])
        self._add(copies=copies, evicted=plan.evicted)
        shortfall = self.scheduler.admission_shortfall
        if shortfall:
            self.line["lack"] = [self.scheduler.waiting[0].arrival_number, *shortfall]
        self.changed += plan.preempted + plan.admitted + plan.tables_changed

    def resolved(self, step: Step):
        """Record the tokens of a finished step, and the blocks that it has committed."""
        if not self.listeners:
            return
        tokens = step.tokens
        sampled = sum(map(len, tokens.values()))
        self.line |= {"resolved": step.number, "sampled": sampled}
        guesses = step.plan.guesses
        right = {r: len(tokens[r]) - 1 for r in guesses if tokens.get(r)}
        drafts = [[r.arrival_number, n] for r, n in right.items() if n]
        self._add(drafts=drafts, committed=self.scheduler.committed)
        # wrong guesses may have released blocks; a request that was aborted may already be gone
        self.changed += [r for r in guesses if r in self.tables]
        if self.has_tokens:
            self._add(tokens=[(r.arrival_number, t) for r, new in tokens.items() for t in new])
        if not all(tokens.values()):  # a request was sent back, and is waiting
            self.failed()

    def failed(self):
        """Ask for a snapshot, because the lines do not contain this step's changes."""
        self.lines_left = 0

    def between(self):
        """Write a line with the changes since the last line, if there are any."""
        if not self.listeners:
            return
        self._add_new()
        self._add_tables()
        self._add_ended()
        self._add_idle()
        has_changed = bool(self.line)
        if has_changed:
            self._write(self._text("step", self.line))
            self.line = {}
        if self.lines_left <= 0:
            self._save_state()
            self._write(self.snapshot())
        if has_changed and not self.engine.has_work:
            self._write(self._text("idle", {}))

    # -- a line ------------------------------------------------------------------------------------

    def _text(self, event: str, fields: dict) -> str:
        """
        Return a line. Its time is always later than the previous line's, so a reader can tell which
        lines it already has.
        """
        now = time.monotonic() - self.engine.started
        self.time = round(max(now, self.time + 1e-5), 5)
        return compact_json({"event": event, "time": self.time} | fields)

    def _write(self, line: str):
        self.lines_left -= 1
        for listener in self.listeners:
            listener(line)

    def _add(self, **lists: list):
        """Add these fields to the next line, leaving out empty lists."""
        self.line |= {name: values for name, values in lists.items() if values}

    def _add_new(self):
        """Add the requests that have been queued or forked since the last line."""
        scheduler = self.scheduler
        if scheduler.num_added == self.num_added:
            return
        # a new request may have ended in this same step; it is then only in `changed`
        everyone = dict.fromkeys(scheduler.waiting + scheduler.running + self.changed)
        new = [r for r in everyone if r.arrival_number > self.num_added]
        self.num_added = scheduler.num_added
        self.changed += new
        self.tables |= {r: [] for r in new}
        self._add(new=[identity(r) for r in new])

    def _add_tables(self):
        """Add the block tables that have changed, each starting at its first changed entry."""
        if self.scheduler.after_commit:  # sliding windows may have changed any table
            self.changed = self.scheduler.running + self.changed
        tables = []
        for r in dict.fromkeys(self.changed):
            sent = self.tables[r]
            if r.block_table == sent:
                continue
            # usually, the table has only grown, or its last block has been replaced by a copy
            start = max(0, min(len(sent), len(r.block_table)) - 1)
            if sent[:start] != r.block_table[:start]:
                start = 0
            sent[start:] = r.block_table[start:]
            tables.append([r.arrival_number, start, sent[start:]])
        self.changed = []
        self._add(tables=tables)

    def _add_ended(self):
        scheduler = self.scheduler
        if len(scheduler.waiting) + len(scheduler.running) == len(self.tables):
            return
        ended = [r for r in self.tables if r.status == "done"]
        for r in ended:
            del self.tables[r]
        self._add(ended=[[r.arrival_number, r.finish_reason, r.num_generated] for r in ended])

    def _add_idle(self):
        """Add the blocks that have become idle, oldest first."""
        allocator = self.scheduler.block_allocator
        newest_first = reversed(allocator.idle.items())
        new = takewhile(lambda item: item[1] > self.num_idled, newest_first)
        self._add(idle=[block for block, _ in new][::-1])
        self.num_idled = allocator.num_idled

    def snapshot(self) -> str:
        """Return a line with the complete state. Must be called between two steps."""
        settings = {name: getattr(self.engine.settings, name) for name in SETTINGS}
        state = {
            "version": VERSION,
            # identifies the engine; a process id would be the same in a restarted container
            "engine": round(self.engine.started * 1e6),
            "step": self.engine.num_steps,
            "overlap": self.engine.overlap,
            "requests": [self._describe(r) for r in self.tables],
            "decodes": [r for r in numbers(self.tables) if r in self.decodes],
            "committed": [*self.scheduler.block_cache.contents],
            "idle": [*self.scheduler.block_allocator.idle],
            "totals": self.engine.counts(),
        }
        return self._text("snapshot", settings | state)

    def _describe(self, r: Request) -> dict:
        # leave out a draft in flight: a later line will have the guesses that were right
        guessed = max(0, r.num_to_come - 1)
        described = {
            "filled": r.num_filled_slots - guessed,
            "target": r.prefill_target,
            "hits": r.num_hit_tokens,
            "preemptions": r.num_preemptions,
            "generated": r.num_generated - guessed,
            "table": r.block_table,
        }
        if self.has_tokens:
            described["tokens"] = r.tokens_so_far[: r.num_tokens - r.num_to_come]
        return identity(r) | described


def identity(r: Request) -> dict:
    """
    Return the fields that describe a request in a line. The first part of the cache salt identifies
    the request's API key.
    """
    return {
        "r": r.arrival_number,
        "name": r.name,
        "key": r.cache_salt.partition(":")[0],
        "choice": r.index,
        "prompt": len(r.prompt_tokens),
        "max_tokens": r.max_new_tokens,
        "status": r.status,
        "filled": r.num_filled_slots,
    }


def numbers(requests: Iterable[Request]) -> list[int]:
    return [r.arrival_number for r in requests]


def title(**fields) -> str:
    """Return the first line of a record, with fields such as the model and the machine."""
    return compact_json({"event": "title", "date": date.today().isoformat(), **fields})


# --------------------------------------------------------------------------------------------------
# Listeners: the HTTP process (for GET /events) and the --record file


class Publisher:
    """
    Sends recorded lines to the HTTP process while anyone is listening there. The first message is a
    snapshot. Each later one has the lines since the previous message, and is sent at least
    PUBLISH_SECONDS after it. If the link is still busy with its last message when the next one is
    due, the lines are dropped and the next message is a snapshot. KEEP_SECONDS after the last
    listener has left, recording ends with a message without lines.
    """

    def __init__(self, recorder: Recorder, link):
        self.recorder = recorder
        self.link = link
        self.is_on = False
        self.ends_at = math.inf  # when recording ends, once the last listener has left
        self.is_up_to_date = False  # whether the link has taken all lines so far
        self.lines: list[str] = []  # lines since the last message
        self.sent_at = 0.0

    def listen(self, has_listeners: bool, tokens: bool):
        """Remember whether the HTTP process now has listeners, and start recording if it does."""
        self.ends_at = math.inf if has_listeners else time.monotonic() + KEEP_SECONDS
        if has_listeners and not self.is_on:
            self.is_on = True
            self.recorder.listen(self.lines.append, tokens)

    def due_in(self) -> float | None:
        """Return the seconds until a message is due, or None if there is nothing to send."""
        if not self.is_on or (self.is_up_to_date and not self.lines):
            return None
        return max(0.0, self.sent_at + PUBLISH_SECONDS - time.monotonic())

    def publish(self):
        """Send a message if one is due. Called between two steps."""
        if not self.is_on:
            return
        now = time.monotonic()
        if self.due_in() == 0:
            self.sent_at = now
            has_room = not self.link.unsent
            if has_room:
                self.send(self.lines if self.is_up_to_date else [self.recorder.snapshot()])
            self.is_up_to_date = has_room
            self.lines.clear()
        if now > self.ends_at:
            self.recorder.listeners.remove(self.lines.append)
            self.send([])
            self.is_on = self.is_up_to_date = False

    def send(self, lines: list[str]):
        """
        Send the lines as one string, so that the HTTP process can forward them without parsing.
        """
        self.link.send({"op": "events", "lines": "\n".join(lines)})


def record_to(path: str, engine, tokens: bool = False, **fields):
    """
    Append a line to a file for each step of an engine. The fields are for the title, such as the
    model and the machine. If a line cannot be written, the file ends there, but the server
    continues.
    """
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the engine is)

    def write(line: str):
        if file.closed:
            return
        data = f"{line}\n".encode()
        try:
            end = file.tell()
            # the file is unbuffered, so that a killed process leaves only whole lines
            if file.write(data) < len(data):
                file.truncate(end)
                raise OSError("no space is left for the next lines")
        except OSError as error:
            say(f"--record {path} ends here: {error}")
            file.close()

    recorder = engine.stages["record"]
    recorder.listen(write, tokens)
    write(title(**fields))
    write(recorder.snapshot())
