"""
What the engine does, told line by line: to the page at /, to who asks for GET /events, to a file.

    engine.recorder = Recorder(engine)
    engine.recorder.listeners.append(print)     # a line for each step, as JSON

While there is no Recorder nothing is computed. It looks at the scheduler when a step is planned and
when it has ended, and tells the differences, so scheduler and allocator know nothing of it. A
record begins with a snapshot, of which the lines after it tell the changes:

    {"event": "snapshot", "num_blocks": 32, "block_size": 16, .., "requests": [], "idle": []}
    {"event": "step", "step": 0, "new": [{"r": 1, "prompt": 20, ..}], "admitted": [[1, 0]],
     "chunks": [[1, 0, 20]], "tables": [[1, 0, [0, 1]]], "blocks": [[1, 1, 0], [0, 1, 1]], ..}
    {"event": "idle"}

REFERENCE.md has all fields. replay.py reads and checks the lines, page.html draws them. Imports no
torch.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

from paged import Plan, Request
from serving.links import Link, Links, compact_json, to_line
from serving.params import NO_TOKEN

VERSION = 1  # of the lines
MAX_SHOWN = 100  # waiting requests that a line names
IDLE = '{"event":"idle"'
TELL_SECONDS = 0.1  # between two messages to listeners
FLUSH_SECONDS = 0.1  # the end of a record that a killed process loses


@dataclass
class Told:
    """What the lines so far say of a request."""

    table: list[int] = field(default_factory=list)
    num_committed: int = 0


class Recorder:
    """
    Tells `listeners`, functions of a text, what the engine does. The engine calls `planned`,
    `resolved` and `failed` during a step, and `end_step` after it. With `tokens` the lines have
    token ids, which are text.
    """

    def __init__(self, engine, tokens: bool = False):
        self.engine = engine
        self.scheduler = engine.scheduler
        self.sink = engine.scheduler.block_allocator.sink  # in tables, of blocks given back
        self.has_tokens = tokens
        self.listeners: list[Callable[[str], None]] = []
        self.started = time.monotonic()
        self._take_stock()

    def _take_stock(self):
        """From here on differences are told to what is now."""
        scheduler = self.scheduler
        self.line = {}  # of the step under way
        # blocks that the line has to tell of
        self.gained: set[int] = set()  # that came into a table
        self.lost: set[int] = set()  # that left one
        self.passed: set[int] = set()  # that `committed` passes
        everyone = scheduler.waiting + scheduler.running
        self.told = {r: Told(r.block_table.copy(), r.num_committed) for r in everyone}
        self.num_added = scheduler.num_added
        self.queue_state = self._queue_state()
        self.decodes: list[Request] = []
        self.changed: list[Request] = []  # whose blocks may have changed
        # by step: those whose blocks it may fill
        self.filling: dict[int, list[Request]] = {}
        if self.engine.in_flight:  # it was planned before
            plan = self.engine.in_flight.plan
            self.filling[plan.step] = [r for r, _ in plan.work]
        self.is_lost = False
        self.is_idle = False

    def _queue_state(self) -> tuple:
        """Three numbers that do not all stay the same when the queue changes."""
        scheduler = self.scheduler
        return len(scheduler.waiting), scheduler.num_added, scheduler.num_preemptions

    # -- what the engine calls ---------------------------------------------------------------------

    def planned(self, plan: Plan):
        """
        A step was started, and its tokens are not counted as filled yet; or a plan with nothing to
        compute has preempted somebody.
        """
        if plan.decodes or plan.chunks:
            self.line["step"] = plan.step
            if plan.decodes != self.decodes:
                self.decodes = plan.decodes.copy()
                self.line["decodes"] = numbers(plan.decodes)
        for r in plan.preempted:  # in this plan it may have got one more block, and lost it
            held = [block for block in self.told[r].table if block != self.sink]
            self._add("preempted", [[r.arrival_number, len(held)]])
        self._add("admitted", [[r.arrival_number, r.num_filled_slots] for r in plan.admitted])
        self._add("chunks", [[r.arrival_number, r.prefill_cursor, n] for r, n in plan.chunks])
        self._add("copied", [[to, source] for to, source in plan.copies.items()])
        self._add("evicted", plan.evicted)
        # a victim may have got such a block in this plan, and lost it: no table has shown it
        self.lost.update(plan.evicted)
        self._add("lack", self.scheduler.lack)
        prefilled = [r for r, _ in plan.chunks]
        # now: a request that ends with this step has no table afterwards
        self._tell_new()
        self._tell_tables(plan.admitted + plan.preempted + plan.grown + prefilled)
        last_slot = self.scheduler.block_size - 1
        full = [r for r in plan.decodes if r.num_filled_slots % (last_slot + 1) == last_slot]
        self.filling[plan.step] = full + prefilled

    def resolved(self, plan: Plan, new: list[tuple[Request, int]]):
        """The tokens of a step are known."""
        self.line |= {"resolved": plan.step, "sampled": len(new)}
        if self.has_tokens:
            tokens = [[r.arrival_number, token] for r, token in new if token != NO_TOKEN]
            self._add("tokens", tokens)
        self.changed += self.filling.pop(plan.step, [])

    def failed(self):
        """A step failed: its plan may have moved blocks that no table shows."""
        self.is_lost = True

    def end_step(self):
        """Write the line of what has changed since the last one, if anything has."""
        self._tell_new()
        self._tell_ended()
        self._tell_tables(self.changed)
        self.changed = []
        self._tell_queue()
        self._tell_blocks()
        line = self.line
        self.line = {}
        if line:
            self.is_idle = False
            self._write({"event": "step", "time": self._now()} | line | self._counts())
        if self.is_lost:
            self._take_stock()
            self._write(self._snapshot("a step failed"))
        if not self.is_idle and not self.engine.has_work:
            self.is_idle = True
            self._write({"event": "idle", "time": self._now()})

    def snapshot(self, why: str = "") -> str:
        """
        A line with all that is. To be asked for between two steps; `why` says what it mends, if it
        is not the first.
        """
        return compact_json(self._snapshot(why))

    # -- a line ------------------------------------------------------------------------------------

    def _write(self, line: dict):
        text = compact_json(line)
        for listener in self.listeners:
            listener(text)

    def _now(self) -> float:
        return round(time.monotonic() - self.started, 5)

    def _add(self, name: str, values: Iterable):
        """Empty lists are left out."""
        if values:
            self.line.setdefault(name, []).extend(values)

    def _tell_new(self):
        """Requests that came since the last line: to the queue, or forked from an active one."""
        scheduler = self.scheduler
        if scheduler.num_added == self.num_added:
            return
        everyone = scheduler.waiting + scheduler.running
        new = [r for r in everyone if r.arrival_number > self.num_added]
        self.num_added = scheduler.num_added
        self.changed += new
        for r in sorted(new, key=lambda r: r.arrival_number):
            self.told[r] = Told()
            is_fork = r.status == "active"  # any other was admitted at most
            status = "active" if is_fork else "waiting"
            filled = r.num_filled_slots if is_fork else 0
            self._add("new", [identity(r) | {"status": status, "filled": filled}])

    def _tell_tables(self, requests: list[Request]):
        """Which of these have other block tables, or more committed blocks, than was told."""
        tables = []
        committed = []
        for r in requests:
            told = self.told.get(r)
            if told is None:  # it has ended, and that was told
                continue
            table = r.block_table
            if table != told.table:
                start = num_equal(table, told.table)
                gained = table[start:]
                tables.append([r.arrival_number, start, gained])
                self.lost.update(told.table[start:])
                self.gained.update(gained)
                told.table[start:] = gained
            if r.num_committed != told.num_committed:
                self.passed.update(table[told.num_committed : r.num_committed])
                told.num_committed = r.num_committed
                if table:
                    committed.append([r.arrival_number, r.num_committed])
        self._add("tables", tables)
        self._add("committed", committed)

    def _tell_ended(self):
        scheduler = self.scheduler
        num_alive = len(scheduler.waiting) + scheduler.max_num_seqs - len(scheduler.free_rows)
        if num_alive == len(self.told):
            return
        ended = [r for r in self.told if r.status == "done"]
        self._tell_tables(ended)
        for r in ended:
            del self.told[r]
            self._add("ended", [[r.arrival_number, r.finish_reason, r.num_generated]])

    def _tell_queue(self):
        if self.queue_state != self._queue_state():
            self.queue_state = self._queue_state()
            self.line |= self._queue()

    def _queue(self) -> dict:
        waiting = self.scheduler.waiting
        return {"waiting": numbers(waiting[:MAX_SHOWN]), "queue": len(waiting)}

    def _tell_blocks(self):
        """
        The state of each block that has changed. Left out are the most of them: those that `tables`
        of this line shows, if they have one reference and are not committed, and those that are in
        the prefix cache since `committed` passed them. Those that became idle come last, in the
        order in which they did: that of eviction.
        """
        allocator = self.scheduler.block_allocator
        counts = allocator.ref_counts
        held = allocator.block_cache.held
        for some in (self.gained, self.lost, self.passed):
            some.discard(self.sink)
        moved = self.gained | self.lost
        new = self.gained - self.passed
        new = {block for block in new if counts[block] == 1 and block not in held}
        cached = {block for block in self.passed - moved if block in held}
        states = []
        became_idle = set()
        for block in (moved | self.passed) - new - cached:
            if block in held and not counts[block]:
                became_idle.add(block)
            else:
                states.append([block, counts[block], int(block in held)])
        in_order = []
        for block in reversed(allocator.idle):
            if not became_idle:
                break
            became_idle.discard(block)
            in_order.append([block, 0, 1])
        self._add("blocks", states + in_order[::-1])
        for some in (self.gained, self.lost, self.passed):
            some.clear()

    def _counts(self) -> dict:
        allocator = self.scheduler.block_allocator
        return {"free": len(allocator.free), "cached": len(allocator.idle)}

    def _snapshot(self, why: str = "") -> dict:
        scheduler = self.scheduler
        settings = self.engine.settings
        line = {"event": "snapshot", "version": VERSION, "time": self._now()}
        if why:
            line["why"] = why
        for name in ("num_blocks", "block_size", "token_budget", "max_num_seqs", "max_model_len"):
            line[name] = getattr(settings, name)
        return line | {
            "window": settings.window,
            "overlap": self.engine.overlap,
            "step": self.engine.num_steps,
            "requests": [self._describe(r) for r in self.told],
            "decodes": numbers(self.decodes),
            "committed": [*scheduler.block_cache.held],
            "idle": [*scheduler.block_allocator.idle],
            "totals": self.engine.counts(),
            **self._queue(),
            **self._counts(),
        }

    def _describe(self, r: Request) -> dict:
        described = {
            "status": r.status,
            "filled": r.num_filled_slots,
            "committed": r.num_committed,
            "hits": r.num_hit_tokens,
            "preemptions": r.num_preemptions,
            "generated": r.num_generated - r.num_to_come,
            "table": r.block_table,
        }
        if r.num_to_come:
            described["to_come"] = r.num_to_come
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


def numbers(requests: list[Request]) -> list[int]:
    return [r.arrival_number for r in requests]


def num_equal(one: list, other: list) -> int:
    """How many of their first elements are equal."""
    if one[: len(other)] == other:  # mostly: it has grown
        return len(other)
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))


# --------------------------------------------------------------------------------------------------
# Who listens: HTTP processes, for GET /events, and the file of --record


class Audience:
    """
    The links whose HTTP processes have listeners: at most every TELL_SECONDS each is sent all lines
    since the last time, as one message, and then, where somebody began to listen, a snapshot for
    those. A link that has not read its last message when the next one is due misses lines: it is
    sent a snapshot as its next line.
    """

    def __init__(self, engine):
        self.engine = engine
        self.needs_snapshot: dict[Link, bool] = {}  # of the links that listen
        self.behind: set[Link] = set()  # those that missed lines
        self.lines: list[str] = []  # since the last time
        self.told_at = 0.0

    def join(self, link: Link, tokens: bool):
        """From now on a link listens; if it does so already, it is sent another snapshot."""
        if self.engine.recorder is None:
            self.engine.recorder = Recorder(self.engine, tokens)
        if not self.needs_snapshot:
            self.engine.recorder.listeners.append(self.lines.append)
        self.needs_snapshot[link] = True

    def leave(self, link: Link):
        """Without listeners there is no Recorder, and nothing is computed."""
        recorder = self.engine.recorder
        self.behind.discard(link)
        if self.needs_snapshot.pop(link, None) is None or self.needs_snapshot:
            return
        self.lines.clear()
        recorder.listeners.remove(self.lines.append)
        if not recorder.listeners:
            self.engine.recorder = None

    def due_in(self) -> float | None:
        """Seconds until something is to be sent; None: nothing is."""
        if not (self.lines or self.behind or any(self.needs_snapshot.values())):
            return None
        return max(0.0, self.told_at + TELL_SECONDS - time.monotonic())

    def tell(self, links: Links):
        """Send what is due, between two steps."""
        if self.due_in() != 0:
            return
        self.told_at = time.monotonic()
        news = self.lines.copy()
        self.lines.clear()
        snapshot = cache(self.engine.recorder.snapshot)
        for link, needs_snapshot in self.needs_snapshot.items():
            if link.unsent:
                self.behind.add(link)
                continue
            lines = [snapshot("lines were missed")] if link in self.behind else news
            self.behind.discard(link)
            if lines:
                links.send(link, message(lines))
            if needs_snapshot:
                self.needs_snapshot[link] = False
                links.send(link, message([snapshot()], is_snapshot=True))


def message(lines: list[str], is_snapshot: bool = False) -> bytes:
    """
    Lines as a message of the link. They go as a text, which an HTTP process can hand on without
    parsing it.
    """
    return to_line({"op": "events", "lines": ",".join(lines), "is_snapshot": is_snapshot})


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


def record_to(path: str, engine, tokens: bool = False):
    """Have an engine write every step to a file that is there, after what is in it."""
    engine.recorder = Recorder(engine, tokens)
    file = RecordFile(path)
    file.write(engine.recorder.snapshot())
    engine.recorder.listeners.append(file.write)
