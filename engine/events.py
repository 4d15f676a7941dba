"""
What the engine does, told line by line: to the page at /, to who asks for GET /events, to a file.

    engine.recorder = Recorder(engine)
    engine.recorder.listeners.append(print)     # a line for each step, as JSON

While there is no Recorder nothing is computed. A record begins with a snapshot, of which the lines
after it tell the changes: what the step's `Plan` says, and whose block tables are others now.

    {"event": "snapshot", "num_blocks": 32, "block_size": 16, .., "requests": [], "idle": []}
    {"event": "step", "new": [{"r": 1, "prompt": 20, ..}], "step": 0, "admitted": [[1, 0, 20]],
     "chunks": [[1, 0, 20]], "resolved": 0, "sampled": 1, "tables": [[1, 0, [0, 1]]], ..}
    {"event": "idle"}

REFERENCE.md has all fields. A reader keeps three tallies: block tables, how many of them hold each
block, and which blocks are committed, in the order in which they became idle (replay.py, and the
page's state.js). Imports no torch.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from functools import cache
from itertools import takewhile

from paged import Plan, Request
from params import NO_TOKEN

VERSION = 2  # of the lines
SETTINGS = ("num_blocks", "block_size", "token_budget", "max_num_seqs", "max_model_len", "window")
LINES_A_SNAPSHOT = 1000  # whoever keeps the last lines can begin with a snapshot
PUBLISH_SECONDS = 0.1  # between two messages to listeners
KEEP_SECONDS = 600  # that the engine goes on to tell without listeners: one may reload its page
FLUSH_SECONDS = 0.1  # the end of a record that a killed process loses
compact_json = json.JSONEncoder(separators=(",", ":")).encode
IDLE = '{"event":"idle"'


class Recorder:
    """
    Tells `listeners`, functions of a text, what the engine does. The engine calls `planned`,
    `resolved` and `failed` during a step, and `end_step` after it. With `tokens` the lines have
    token ids, which are text.
    """

    def __init__(self, engine, tokens: bool = False):
        self.engine = engine
        self.scheduler = engine.scheduler
        self.has_tokens = tokens
        self.listeners: list[Callable[[str], None]] = []
        self.line = {}  # of the step under way
        self.is_idle = False
        self._take_stock()

    def _take_stock(self):
        """From here on changes are told to what is now, which a snapshot tells."""
        scheduler = self.scheduler
        everyone = scheduler.waiting + scheduler.running
        self.tables = {r: r.block_table.copy() for r in everyone}  # as they were told
        self.changed: list[Request] = []  # whose tables may be others now
        self.decodes: list[Request] = []
        self.num_added = scheduler.num_added
        self.num_idled = scheduler.block_allocator.num_idled
        self.lines_left = LINES_A_SNAPSHOT  # until the next one

    # -- what the engine calls ---------------------------------------------------------------------

    def planned(self, plan: Plan):
        """
        A step was started, and its tokens are not counted as filled yet; or a plan with nothing to
        compute has preempted somebody.
        """
        self._tell_new()  # now: who ends with this step is no longer there afterwards
        if plan.decodes or plan.chunks:
            self.line["step"] = plan.step
            if plan.decodes != self.decodes:
                self.decodes = plan.decodes.copy()
                self.line["decodes"] = numbers(plan.decodes)
        admitted = [[r.arrival_number, r.num_filled_slots, r.num_tokens] for r in plan.admitted]
        # by its new block; one that was preempted after all has no use for it
        writers = {r.block_table[-1]: r.arrival_number for r in plan.grown if r.block_table}
        copies = [[writers[to], to, of] for to, of in plan.copies.items() if to in writers]
        self._add("preempted", numbers(plan.preempted))
        self._add("admitted", admitted)
        self._add("chunks", [[r.arrival_number, r.prefill_cursor, n] for r, n in plan.chunks])
        self._add("copies", copies)
        self._add("evicted", plan.evicted)
        shortfall = self.scheduler.admission_shortfall
        if shortfall:
            self.line["lack"] = [self.scheduler.waiting[0].arrival_number, *shortfall]
        self.changed += plan.preempted + plan.admitted + plan.grown

    def resolved(self, plan: Plan, new: list[tuple[Request, int]]):
        """The tokens of a step are known, and its full blocks committed."""
        self.line |= {"resolved": plan.step, "sampled": len(new)}
        self._add("committed", plan.committed)
        if self.has_tokens:
            tokens = [[r.arrival_number, token] for r, token in new if token != NO_TOKEN]
            self._add("tokens", tokens)

    def failed(self):
        """A step failed: what its plan has moved is in no line, so a snapshot follows."""
        self.lines_left = 0

    def end_step(self):
        """Write the line of what has changed since the last one, if anything has."""
        self._tell_new()
        self._tell_tables()
        self._tell_ended()
        self._tell_idle()
        if self.line:
            self._write(self._line("step") | self.line)
            self.line = {}
            self.is_idle = False
        if self.lines_left <= 0:
            self._take_stock()
            self._write(self._snapshot())
        if not self.is_idle and not self.engine.has_work:
            self._write(self._line("idle"))
            self.is_idle = True

    def snapshot(self) -> str:
        """A line with all that is, to be asked for between two steps."""
        return compact_json(self._snapshot())

    # -- a line ------------------------------------------------------------------------------------

    def _line(self, event: str) -> dict:
        return {"event": event, "time": round(time.monotonic() - self.engine.started, 5)}

    def _write(self, line: dict):
        self.lines_left -= 1
        text = compact_json(line)
        for listener in self.listeners:
            listener(text)

    def _add(self, name: str, values: list):
        """Empty lists are left out."""
        if values:
            self.line[name] = values

    def _tell_new(self):
        """Requests that came since the last line: to the queue, or forked from an active one."""
        scheduler = self.scheduler
        if scheduler.num_added == self.num_added:
            return
        everyone = scheduler.waiting + scheduler.running
        new = [r for r in everyone if r.arrival_number > self.num_added]
        self.num_added = scheduler.num_added
        self.changed += new
        told = self.line.setdefault("new", [])
        for r in new:
            self.tables[r] = []
            # a fork is active from its beginning; any other was admitted at most
            as_fork = {"status": "active", "filled": r.num_filled_slots}
            as_others = {"status": "waiting", "filled": 0}
            told.append(identity(r) | (as_fork if r.status == "active" else as_others))

    def _tell_tables(self):
        """Which block tables are others than was told, from where on."""
        if self.scheduler.window:  # any may have left blocks behind
            self.changed = self.scheduler.running + self.changed
        tables = []
        for r in dict.fromkeys(self.changed):
            told = self.tables.get(r)
            if told is None or r.block_table == told:  # it has ended, or is as it was
                continue
            # mostly it has grown, or its last block is a copy
            start = max(0, min(len(told), len(r.block_table)) - 1)
            if told[:start] != r.block_table[:start]:
                start = 0
            told[start:] = r.block_table[start:]
            tables.append([r.arrival_number, start, told[start:]])
        self.changed = []
        self._add("tables", tables)

    def _tell_ended(self):
        scheduler = self.scheduler
        num_alive = len(scheduler.waiting) + scheduler.max_num_seqs - len(scheduler.free_rows)
        if num_alive == len(self.tables):
            return
        ended = [r for r in self.tables if r.status == "done"]
        for r in ended:
            del self.tables[r]
        self._add("ended", [[r.arrival_number, r.finish_reason, r.num_generated] for r in ended])

    def _tell_idle(self):
        """The blocks that have become idle, in the order in which they did."""
        allocator = self.scheduler.block_allocator
        newest_first = reversed(allocator.idle.items())
        new = takewhile(lambda item: item[1] > self.num_idled, newest_first)
        self._add("idle", [block for block, _ in new][::-1])
        self.num_idled = allocator.num_idled

    def _snapshot(self) -> dict:
        line = self._line("snapshot")
        for name in SETTINGS:
            line[name] = getattr(self.engine.settings, name)
        return line | {
            "version": VERSION,
            # not its process id, which a container that is started again has again
            "engine": round(self.engine.started * 1e6),
            "step": self.engine.num_steps,
            "overlap": self.engine.overlap,
            "requests": [self._describe(r) for r in self.tables],
            "decodes": numbers(self.decodes),
            "committed": [*self.scheduler.block_cache.held],
            "idle": [*self.scheduler.block_allocator.idle],
            "totals": self.engine.counts(),
        }

    def _describe(self, r: Request) -> dict:
        described = {
            "status": r.status,
            "filled": r.num_filled_slots,
            "target": r.prefill_target,
            "committed": r.num_committed,
            "hits": r.num_hit_tokens,
            "preemptions": r.num_preemptions,
            "generated": r.num_generated,
            "table": r.block_table,
        }
        if self.has_tokens:
            described["tokens"] = r.tokens_so_far[: r.num_tokens - r.num_to_come]
        return identity(r) | described


def identity(r: Request) -> dict:
    """What never changes of a request. Its key, of the prefix cache, names the API key."""
    return {
        "r": r.arrival_number,
        "name": r.name,
        "key": r.cache_salt.partition(":")[0],
        "choice": r.choice,
        "prompt": len(r.prompt_tokens),
        "max_tokens": r.max_new_tokens,
    }


def numbers(requests: Iterable[Request]) -> list[int]:
    return [r.arrival_number for r in requests]


def title(**fields) -> str:
    """The first line of a record: which model, what machine, .."""
    return compact_json({"event": "title", "date": date.today().isoformat(), **fields})


# --------------------------------------------------------------------------------------------------
# Listeners: HTTP processes, for GET /events, and the file of --record


class Subscribers:
    """
    The HTTP processes' links. As soon as one of them has listeners, all are sent the lines since
    the last message, every PUBLISH_SECONDS at most. A link that is new, or had not read its last
    message when the next one was due, is sent a snapshot in their place. KEEP_SECONDS after the
    last listener has left, a message without lines is the last one, and nothing is computed any
    more.
    """

    def __init__(self, engine):
        self.engine = engine
        self.is_on = False
        self.listening = set()  # whose HTTP processes have listeners
        self.left_at = 0.0  # when the last one of them left
        self.up_to_date = set()  # that were sent all lines so far
        self.lines: list[str] = []  # since the last time
        self.sent_at = 0.0

    def join(self, link, tokens: bool):
        """The HTTP process has listeners."""
        self.listening.add(link)
        if self.is_on:
            return
        self.is_on = True
        if self.engine.recorder is None:
            self.engine.recorder = Recorder(self.engine, tokens)
        self.engine.recorder.listeners.append(self.lines.append)

    def leave(self, link):
        """It has none any more, or is gone."""
        if link in self.listening:
            self.listening.remove(link)
            self.left_at = time.monotonic()

    def due_in(self, links) -> float | None:
        """Seconds until something is to be sent; None: nothing is."""
        if not self.is_on or not (self.lines or {*links.links.values()} - self.up_to_date):
            return None
        return max(0.0, self.sent_at + PUBLISH_SECONDS - time.monotonic())

    def publish(self, links):
        """Send what is due, between two steps."""
        if self.due_in(links) == 0:
            self.sent_at = time.monotonic()
            news = to_message(self.lines)
            snapshot = cache(self.engine.recorder.snapshot)
            ready = {link for link in links.links.values() if not link.unsent}
            for link in ready & self.up_to_date if self.lines else ():
                links.send(link, news)
            for link in ready - self.up_to_date:
                links.send(link, to_message([snapshot()]))
            self.up_to_date = ready
            self.lines.clear()
        if self.is_on and not self.listening and time.monotonic() > self.left_at + KEEP_SECONDS:
            self.end(links)

    def end(self, links):
        """Without listeners there is no Recorder, and nothing is computed."""
        recorder = self.engine.recorder
        recorder.listeners.remove(self.lines.append)
        if not recorder.listeners:
            self.engine.recorder = None
        for link in self.up_to_date & {*links.links.values()}:
            links.send(link, to_message([]))
        self.is_on = False
        self.up_to_date = set()
        self.lines.clear()


def to_message(lines: list[str]) -> dict:
    """
    Lines as a message of the link. They go as one text, so that an HTTP process can hand them on
    without parsing them.
    """
    return {"op": "events", "lines": "\n".join(lines)}


class RecordFile:
    """
    The file of --record, a listener that writes FLUSH_SECONDS at a time. When that fails, it says
    so, and the server goes on.
    """

    def __init__(self, path: str):
        self.path = path
        self.unwritten: list[str] = []
        self.written_at = 0.0
        self.is_broken = False

    def write(self, line: str):
        if self.is_broken:
            return
        self.unwritten.append(line + "\n")
        now = time.monotonic()
        if now - self.written_at < FLUSH_SECONDS and not line.startswith(IDLE):
            return
        self.written_at = now
        data = "".join(self.unwritten).encode()
        try:
            # not made anew where somebody has taken it away: it would begin without a snapshot
            with open(self.path, "r+b", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                # at once, so that what a killed process leaves are whole lines
                if file.write(data) < len(data):
                    file.truncate(end)
                    raise OSError("no space is left for the next lines")
        except OSError as error:
            self.is_broken = True
            print(f"--record {self.path} ends here: {error}", file=sys.stderr, flush=True)
        self.unwritten = []


def record_to(path: str, engine, tokens: bool = False, **fields):
    """
    Have an engine write every step to a file that is there, after what is in it. The fields are
    those of its title: which model, what machine.
    """
    engine.recorder = Recorder(engine, tokens)
    file = RecordFile(path)
    file.write(title(**fields))
    file.write(engine.recorder.snapshot())
    engine.recorder.listeners.append(file.write)
