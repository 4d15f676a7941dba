"""
Read a record of what an engine did, line by line, and check that it can be true.

    with open_record("FILE.jsonl") as file:
        for state, line in replay(file):        # raises RecordError at the first wrong line
            print(line["event"], state.step, state.owners)

`serve.py --record` writes records (events.py); the page and `bench.py replay` read them. The first
line is a snapshot, each other one says what changed. Applied to the `State`, each must keep the
laws of paging: a block is free, referenced or cached and idle; its reference count is the number of
block tables that hold it; of the idle ones the least recently used is evicted first; what is shared
or cached is not written; each token is computed once, and again only after a preemption.

Imports no torch. A file may come from anybody: nothing here grows faster than what was read of it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from serving.record import SETTINGS, RecordError, check_shape, read_lines


def want(what: str, found, wanted):
    if found != wanted:
        raise RecordError(f"{what}: wanted {wanted!r:.200}, there is {found!r:.200}")


def open_record(path: str | Path) -> BinaryIO:
    """A file that begins as a record does. Raises RecordError."""
    try:
        if Path(path).is_fifo():  # which may have nobody at its other end
            raise RecordError("this is a pipe, and a record is read twice: write it to a file")
        file = Path(path).open("rb")  # noqa: SIM115 (the caller closes it)
        next(replay(file))
        file.seek(0)
        return file
    except (OSError, RecordError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecordError(f"{path}: {why}; name a file of serve.py --record") from None


def replay(file: BinaryIO) -> Iterator[tuple["State", dict]]:
    """
    Each line, and the state after it: one object that changes, until a snapshot brings another.
    Raises RecordError.
    """
    state = None
    broken = None
    for number, line in read_lines(file):
        if broken and line.get("why") != "a step failed":
            raise broken
        broken = None
        try:
            if line["event"] != "cut":
                check_shape(line)
                if line["event"] == "snapshot":
                    state = State(line)
                else:
                    state.apply(line)
        except RecordError as error:
            # of a step that failed the changes are not all told: a snapshot mends it
            step = line.get("step", state.step if state else 0)
            broken = RecordError(f"line {number}, step {step!r:.20}: {error}")
        else:
            yield state, line
    if broken:
        raise broken


# --------------------------------------------------------------------------------------------------
# What is known after each line


@dataclass
class Recorded:
    """A request that waits or runs; names as in paged.Request, numbers instead of lists."""

    prompt: int
    max_tokens: int
    is_running: bool = False
    filled: int = 0  # slots, those of steps under way included
    computed: int = 0  # slots of steps that have ended
    committed: int = 0  # leading full blocks
    target: int = 0  # tokens to compute before it samples
    generated: int = 0
    to_come: int = 0  # tokens that steps under way will sample
    preemptions: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def status(self) -> str:
        if not self.is_running:
            return "waiting"
        if self.filled < self.target:
            return "prefilling"
        return "ending" if self.generated + self.to_come >= self.max_tokens else "active"


def from_snapshot(q: dict) -> Recorded:
    """A request as a REQUEST describes it, but for its table."""
    request = Recorded(q["prompt"], q["max_tokens"], q["status"] != "waiting")
    for name in ("filled", "committed", "generated", "to_come"):
        setattr(request, name, q.get(name, 0))
    request.computed = request.target = request.filled
    if q["status"] == "prefilling":
        request.target = request.prompt + request.generated
    elif request.is_running:
        request.to_come = max(0, request.filled + 1 - request.prompt - request.generated)
    return request


@dataclass
class Flight:
    """A step under way."""

    step: int
    # request -> it, its new tokens, and how often it had been preempted
    work: dict[int, tuple[Recorded, int, int]] = field(default_factory=dict)
    sampled: dict[int, Recorded] = field(default_factory=dict)


class State:
    """Blocks and requests. Of free blocks there is nothing in it: a pool may have any size."""

    def __init__(self, snapshot: dict):
        self.settings = {name: snapshot.get(name, kind()) for name, kind in SETTINGS.items()}
        self.num_blocks = self.settings["num_blocks"]
        self.block_size = self.settings["block_size"]
        if not self.num_blocks or not self.block_size:
            raise RecordError(f"a pool of {self.num_blocks} blocks of {self.block_size} tokens")
        self.time = snapshot["time"]
        self.step = snapshot["step"]  # the number of the next one
        self.decodes = snapshot.get("decodes", [])
        self.cached = set(snapshot.get("committed", ()))  # held by requests or idle
        self.idle = dict.fromkeys(snapshot.get("idle", ()))  # the least recently used first
        self.requests: dict[int, Recorded] = {}
        self.owners: dict[int, set[int]] = {}  # block -> requests in whose tables it is
        self.flights: deque[Flight] = deque()
        self.last = 0  # the highest number of a request
        self.begin_line()
        for q in snapshot.get("requests", ()):
            if q["r"] in self.requests:
                raise RecordError(f"request {q['r']} is there twice")
            self.requests[q["r"]] = from_snapshot(q)
            self.hold(q["r"], q.get("table", []))
            self.last = max(self.last, q["r"])
        self.refs = {block: len(owners) for block, owners in self.owners.items()}  # as told
        want("idle blocks", set(self.idle), self.cached - self.owners.keys())
        self.check_id(max(self.cached, default=0))
        self.check_pool(snapshot)
        self.take_queue(snapshot)
        if self.settings["overlap"] and self.step:  # maybe it is under way
            sampled = {r: request for r, request in self.requests.items() if request.to_come}
            self.flights.append(Flight(self.step - 1, {}, sampled))

    def apply(self, line: dict):
        """Raises RecordError for a line that contradicts itself or those before it."""
        if line["time"] < self.time:
            raise RecordError(f"time {line['time']} after {self.time}")
        self.time = line["time"]
        if line["event"] == "idle":
            want("requests of an idle engine", [*self.requests], [])
            return
        self.begin_line()
        self.take_requests(line)
        if "step" in line:
            self.take_work(line)
        self.take_tokens(line)
        self.take_ended(line.get("ended", ()))
        self.take_evicted(line)
        self.take_blocks(line)
        self.take_queue(line)

    def begin_line(self):
        self.gained: set[tuple[int, int]] = set()  # request, block: new in its table
        self.moved: set[int] = set()  # blocks that came into a table or left one
        self.passed: set[int] = set()  # blocks that a request is done with
        self.replaced: list[list[int]] = []  # the new block, and the one whose place it has
        self.given_back: dict[int, list[int]] = {}  # request -> the table that it had

    # -- requests, and their block tables ----------------------------------------------------------

    def request(self, r: int) -> Recorded:
        if r not in self.requests:
            raise RecordError(f"request {r} has not come yet, or has ended")
        return self.requests[r]

    def check_id(self, block: int):
        if block >= self.num_blocks:
            raise RecordError(f"block {block} in a pool of {self.num_blocks}")

    def hold(self, r: int, table: list[int]):
        """The request has this block table now. An entry num_blocks, the sink, is no block."""
        request = self.requests[r]
        before = {pair for pair in enumerate(request.table) if pair[1] != self.num_blocks}
        after = {pair for pair in enumerate(table) if pair[1] != self.num_blocks}
        if len({block for _, block in after}) < len(after):
            raise RecordError(f"request {r} holds a block twice: {table!r:.200}")
        if len(after) < len(table) and not self.settings["window"]:
            raise RecordError(f"request {r} has left blocks, but the model has no window")
        for _, block in before - after:
            self.owners[block].discard(r)
            if not self.owners[block]:
                del self.owners[block]
            self.moved.add(block)
        for index, block in after - before:
            self.check_id(block)
            if index < len(request.table):
                self.replaced.append([block, request.table[index]])
            self.owners.setdefault(block, set()).add(r)
            self.gained.add((r, block))
            self.moved.add(block)
        if not table:
            self.given_back[r] = request.table
        request.table = table

    def take_requests(self, line: dict):
        """Who came, was preempted, was admitted; then the block tables."""
        for q in line.get("new", ()):
            self.add(q)
        for r, count in line.get("preempted", ()):
            self.preempt(r, count)
        for r, hits in line.get("admitted", ()):
            self.admit(r, hits)
        for r, first, blocks in line.get("tables", ()):
            table = self.request(r).table
            if first > len(table):
                raise RecordError(
                    f"request {r} has {len(table)} blocks, told are those from {first}"
                )
            self.hold(r, table[:first] + blocks)
        for r, hits in line.get("admitted", ()):
            for block in self.requests[r].table[: hits // self.block_size]:
                if block not in self.cached and block != self.num_blocks:
                    raise RecordError(f"request {r} hits block {block}, which is not committed")

    def add(self, q: dict):
        r = q["r"]
        if r <= self.last:
            raise RecordError(f"request {r} is new, after request {self.last}")
        self.last = r
        request = self.requests[r] = from_snapshot(q)
        if request.is_running:  # a fork: its last token is known, and the input of its next step
            request.to_come = 0
            request.generated = request.filled + 1 - request.prompt
            if request.generated < 0:
                raise RecordError(f"request {r} is a fork, without all of its prompt")
        else:
            want(f"slots of request {r}, which is new", request.filled, 0)

    def preempt(self, r: int, count: int):
        request = self.request(r)
        if not request.is_running:
            raise RecordError(f"request {r} is preempted, and does not run")
        held = [block for block in request.table if block != self.num_blocks]
        want(f"blocks of request {r}, which is preempted", count, len(held))
        self.hold(r, [])
        request.is_running = False
        request.filled = request.computed = request.committed = 0
        request.preemptions += 1

    def admit(self, r: int, hits: int):
        request = self.request(r)
        tokens = request.prompt + request.generated
        if request.is_running or request.to_come:
            raise RecordError(f"request {r} is admitted, and is {request.status}")
        if hits >= tokens or hits % self.block_size:
            raise RecordError(f"request {r} hits {hits} of its {tokens} tokens")
        request.is_running = True
        request.target = tokens
        request.filled = request.computed = hits

    def take_ended(self, ended: list):
        for r, reason, count in ended:
            request = self.request(r)
            want(f"tokens of request {r}, which ends", count, request.generated)
            is_full = count == request.max_tokens
            if reason not in ("stop", "abort", "error") and not (reason == "length" and is_full):
                raise RecordError(
                    f"request {r} ends with {reason!r:.20} after {count} of "
                    f"{request.max_tokens} tokens"
                )
            want(f"block table of request {r}, which ends", request.table, [])
            del self.requests[r]
        late = [r for r, q in self.requests.items() if q.generated >= q.max_tokens]
        want("requests that go on after their last token", late, [])

    def take_queue(self, line: dict):
        """The waiting requests: all are counted, the first are named."""
        if "queue" in line:
            self.waiting = line.get("waiting", [])
            self.queue = line["queue"]
        waiting = {r for r, request in self.requests.items() if not request.is_running}
        want("waiting requests", self.queue, len(waiting))
        if not waiting.issuperset(self.waiting) or len({*self.waiting}) < len(self.waiting):
            raise RecordError(f"in the queue are {self.waiting!r:.100}, {waiting!r:.100} wait")
        most = self.settings["max_num_seqs"]
        running = len(self.requests) - len(waiting)
        if running > most:
            raise RecordError(f"{running} requests run, wanted at most {most}")
        needed, spare = line.get("lack", (1, 0))
        if needed <= spare:
            raise RecordError(f"one lacks blocks, needs {needed} and {spare} are spare")

    # -- a step: what it computes, and its tokens --------------------------------------------------

    def take_work(self, line: dict):
        want("number of the step", line["step"], self.step)
        self.decodes = line.get("decodes", self.decodes)
        chunks = line.get("chunks", ())
        num_tokens = len(self.decodes) + sum(n for _, _, n in chunks)
        if not 1 <= num_tokens <= self.settings["token_budget"]:
            raise RecordError(f"{num_tokens} tokens, the budget is {self.settings['token_budget']}")
        flight = Flight(self.step)
        for r in self.decodes:
            want(f"status of request {r}, which decodes", self.request(r).status, "active")
            self.compute(flight, r, self.requests[r].filled, 1)
        for r, first, n in chunks:
            want(f"status of request {r}, which has a chunk", self.request(r).status, "prefilling")
            self.compute(flight, r, first, n)
        self.step += 1
        self.flights.append(flight)
        copied = line.get("copied", [])
        if "preempted" in line:  # maybe one that had just got its copy
            copied = [pair for pair in copied if pair in self.replaced]
        want("copies", sorted(copied), sorted(self.replaced))
        self.check_written(flight, {*line.get("evicted", ())})

    def compute(self, flight: Flight, r: int, first: int, n: int):
        """A request computes its next n tokens, each once: from where it stands."""
        request = self.requests[r]
        want(f"first position of request {r}", first, request.filled)
        left = max(1, request.target - request.filled)
        if r in flight.work or not 1 <= n <= left:
            raise RecordError(f"request {r} computes {n} tokens, {left} are left, once a step")
        flight.work[r] = (request, n, request.preemptions)
        request.filled += n
        if request.filled >= request.target:
            request.to_come += 1
            flight.sampled[r] = request

    def check_written(self, flight: Flight, evicted: set[int]):
        """What a step writes has one owner, and is not in the prefix cache."""
        S = self.block_size
        writers = {}
        for r, (request, n, _) in flight.work.items():
            table = request.table or self.given_back.get(r, [])  # of one that this line ends
            if request.filled > len(table) * S:
                raise RecordError(
                    f"request {r} fills {request.filled} slots of {len(table)} blocks"
                )
            first = (request.filled - n) // S
            for block in table[first : (request.filled - 1) // S + 1]:
                if block == self.num_blocks:
                    continue
                sharers = {o for o in self.owners.get(block, ()) if o != r}
                # a fork that was made since, in this line, may be among them
                sharers -= {o for o in sharers if (o, block) in self.gained} - flight.work.keys()
                if sharers or writers.setdefault(block, r) != r:
                    raise RecordError(f"request {r} writes block {block}, which others hold")
                if block in self.cached and block not in evicted:
                    raise RecordError(f"request {r} writes block {block}, which is committed")

    def take_tokens(self, line: dict):
        """The tokens of a step that has ended, and the blocks that are committed with it."""
        taken = []
        if "resolved" in line:
            flight = self.landed(line["resolved"])
            # aborted before they had it
            lost = {r for r, _, n in line.get("ended", ()) if n == self.request(r).generated}
            for request, n, preemptions in flight.work.values():
                if request.preemptions == preemptions:
                    request.computed += n
            for r, request in flight.sampled.items():
                if self.requests.get(r) is request and r not in lost:
                    taken.append(r)
                    request.generated += 1
                    request.to_come -= 1
        want("tokens sampled", line.get("sampled", 0), len(taken))
        if "tokens" in line:
            told = [r for r, _ in line["tokens"]]
            broken = {r for r, reason, _ in line.get("ended", ()) if reason == "error"}
            want("requests with a token", sorted(told), sorted({*taken} - broken))
        for r, count in line.get("committed", ()):
            request = self.request(r)
            if not request.committed <= count <= request.computed // self.block_size:
                raise RecordError(
                    f"request {r} has {count} blocks committed, {request.committed} before, and "
                    f"{request.computed} tokens computed"
                )
            self.passed |= {*request.table[request.committed : count]} - {self.num_blocks}
            request.committed = count

    def landed(self, step: int) -> Flight:
        """
        This step, which was under way. Those before it have failed, so nobody waits for their
        tokens.
        """
        while self.flights:
            flight = self.flights.popleft()
            if flight.step == step:
                return flight
            lost = [r for r, q in flight.sampled.items() if self.requests.get(r) is q]
            want(f"requests without their token of step {flight.step}", lost, [])
        raise RecordError(f"step {step} has ended, and was not under way")

    # -- blocks ------------------------------------------------------------------------------------

    def take_evicted(self, line: dict):
        """The least recently used idle blocks, but those that were hit, and no block in use."""
        evicted = {*line.get("evicted", ())}
        if not evicted:
            return
        hit = {block for block, _, _ in line.get("blocks", ())} - evicted
        # what came idle in this line goes after all that was before
        count = len(self.idle) if evicted - self.idle.keys() else len(evicted)
        oldest = islice((block for block in self.idle if block not in hit), count)
        want("evicted blocks", sorted(evicted & self.idle.keys()), sorted(oldest))
        for block in evicted:
            if block not in self.cached:
                raise RecordError(f"block {block} is evicted, and was not committed")
            for r in self.owners.get(block, ()):
                if (r, block) not in self.gained:
                    raise RecordError(f"block {block} is evicted, and request {r} holds it")
        self.cached -= evicted

    def take_blocks(self, line: dict):
        """Reference counts, commits, the order of the idle blocks; no block is lost."""
        states = line.get("blocks", [])
        told = {block for block, _, _ in states}
        shown = {block for _, _, blocks in line.get("tables", ()) for block in blocks} & self.moved
        # what is not told of: new to a table, with one reference, and committed if that passed it
        left_out = [[block, 1, 0] for block in shown - self.passed - told]
        left_out += [[block, self.refs.get(block, 0), 1] for block in self.passed - told]
        for block, count, is_committed in left_out + states:
            self.check_id(block)
            if is_committed > 1:
                raise RecordError(f"block {block} is {is_committed}, committed is 1, not is 0")
            if is_committed and block not in self.cached:
                self.check_commit(block)
                self.cached.add(block)
            elif not is_committed and block in self.cached:
                raise RecordError(f"block {block} is not committed any more, and was not evicted")
            self.refs[block] = count
            self.idle.pop(block, None)
            if is_committed and not count:
                self.idle[block] = None
        for block in self.moved | told:
            found = self.refs.get(block, 0)
            count = len(self.owners.get(block, ()))
            want(f"reference count of block {block}, by the block tables", found, count)
            if not count:
                self.refs.pop(block, None)
        self.check_pool(line)

    def check_pool(self, line: dict):
        """Each block is free, referenced, or cached and idle."""
        want("free blocks", line["free"], self.num_blocks - len(self.owners) - len(self.idle))
        want("cached and idle blocks", line["cached"], len(self.idle))

    def check_commit(self, block: int):
        """A block is committed by a request that is done with it, or that has left it since."""
        owners = [self.requests[r] for r in self.owners.get(block, ())]
        done = [r for r in owners if block in r.table[: r.committed]]
        if not done and (owners or block not in self.moved):
            raise RecordError(f"block {block} is committed, and no request has filled it")
