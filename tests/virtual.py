"""
Sockets and time in memory: what asyncio and the engine's link need from a system, without one.

    loop = Loop()                       # and its clock
    ours, theirs = pair(room=1000)      # a connection
    loop.run(60)                        # virtual seconds, which take no time

Nothing sleeps, there are no threads, and the order of everything is fixed, so the same program runs
the same way each time. When nothing is ready, the clock jumps to the next timer. Not run by itself:
wires.py has servers and clients on such a loop, simulator_http.py whole random runs.
"""

import asyncio
import itertools
import math
import time
from asyncio import events
from collections.abc import Callable
from types import SimpleNamespace

MAX_TURNS = 100_000  # of the event loop, without any time passing
START = 1000.0  # seconds: monotonic clocks begin anywhere
EPOCH = 1_700_000_000  # the calendar's time at that moment
READ_SIZE = 2**18  # bytes that a transport reads in a turn


class Clock:
    """Stands in for the module `time` in a program that asks for the time."""

    def __init__(self):
        self.now = START

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def time(self) -> float:
        return EPOCH + self.now - START

    def strftime(self, form: str) -> str:
        return time.strftime(form, time.gmtime(self.time()))


class Task(asyncio.Task):
    """
    A task with a number as its hash. Sets of tasks are iterated in the order of their hashes, which
    would otherwise be addresses.
    """

    def __init__(self, coroutine, *, loop: "Loop", **options):
        self.number = next(loop.numbers)  # first: asyncio keeps a set of all tasks
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


class Loop(asyncio.BaseEventLoop):
    """The event loop of everything simulated. Time passes only in `run`."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.turn_seconds = 0.0  # that a turn takes
        self.job_seconds = 0.0  # that a job takes in a thread
        self.free_at: dict[int, float] = {}  # when each thread will have done its jobs
        self.high = 2**16  # bytes a Unix connection buffers before it asks its protocol to pause
        self.errors: list[dict] = []  # exceptions that no code caught
        self._selector = self
        self._clock_resolution = 1e-9
        self.numbers = itertools.count()  # of tasks and connections, to order sets of them
        self.transports: list[Transport] = []  # all that were ever made
        self.set_task_factory(lambda loop, task, **options: Task(task, loop=loop, **options))
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    # what BaseEventLoop needs from a subclass

    def time(self) -> float:
        return self.clock.now

    def select(self, timeout: float | None) -> list:
        return []

    def _process_events(self, event_list: list):
        pass

    def _write_to_self(self):
        pass

    # what tests call

    @property
    def now(self) -> float:
        return self.clock.now

    def due(self) -> float:
        """Return when there is something to do; infinity if there never will be."""
        if self._ready:
            return self.now
        timers = self._scheduled  # a heap: the first is the earliest
        if timers and not timers[0].cancelled():
            return timers[0].when()
        return min((x.when() for x in timers if not x.cancelled()), default=math.inf)

    def run(self, seconds: float, is_over: Callable[[], bool] = lambda: False):
        """
        Let this much time pass, or less if `is_over()`. Each timer finds the clock at its own time.
        """
        until = self.now + seconds
        turns = 0  # without any time passing
        while not is_over():
            due = max(self.due(), self.now)
            if due > until:
                self.clock.now = max(self.now, until)
                return
            turns = turns + 1 if due == self.now and not self.turn_seconds else 0
            assert turns < MAX_TURNS, "it never rests: something calls itself again and again"
            self.clock.now = due
            events._set_running_loop(self)
            try:
                self._run_once()
            finally:
                events._set_running_loop(None)
            self.clock.now += self.turn_seconds

    def settle(self):
        """Do everything that is ready, and everything that becomes ready as a result."""
        while self.due() <= self.now:  # a callback may advance the clock
            self.run(0.0)

    def do(self, call: Callable, *args):
        """Call it as the loop does, and do everything that follows."""
        self.call_soon(call, *args)
        self.settle()

    def end_tasks(self):
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.run(0.0)

    # what programs call

    async def run_in_executor(self, executor, function: Callable, *args):
        """Run a job in a thread, which does one job after another."""
        free_at = max(self.free_at.get(id(executor), 0.0), self.now) + self.job_seconds
        self.free_at[id(executor)] = free_at
        await asyncio.sleep(free_at - self.now)
        return function(*args)

    async def create_unix_connection(self, factory: Callable, sock: "Socket"):
        transport = Transport(self, sock, factory())
        transport.set_write_buffer_limits(self.high)
        await asyncio.sleep(0)
        return transport, transport.protocol

    async def create_server(self, factory: Callable, *, sock: "Listener", **options):
        sock.serve(lambda connection: Transport(self, connection, factory()), self)
        return sock


# --------------------------------------------------------------------------------------------------
# Sockets


class Socket:
    """
    One end of a connection. It buffers `room` bytes that have arrived and were not read; one read
    returns at most `piece()` of them. A `hard` one is TCP: closing it with bytes unread, or sending
    to an end that is closed, resets the connection.
    """

    def __init__(self, room: int, piece: Callable[[], int], hard: bool):
        self.room = room
        self.piece = piece
        self.hard = hard
        self.peer: Socket | None = None
        self.arrived = bytearray()
        self.is_closed = False
        self.has_eof = False  # the other side sends no more
        self.is_reset = False
        self.on_change: Callable = lambda: None

    def setblocking(self, flag: bool):
        assert not flag

    @property
    def is_readable(self) -> bool:
        return bool(self.arrived) or self.has_eof or self.is_reset

    @property
    def is_writable(self) -> bool:
        return self.is_reset or self.peer.is_closed or len(self.peer.arrived) < self.peer.room

    def recv(self, size: int) -> bytes:
        if self.is_reset and (self.hard or not self.arrived):
            raise ConnectionResetError
        if not self.arrived:
            if self.has_eof:
                return b""
            raise BlockingIOError
        size = min(size, self.piece())
        data = bytes(self.arrived[:size])
        del self.arrived[:size]
        self.peer.on_change()  # there is room
        if self.is_readable:
            self.on_change()
        return data

    def send(self, data: bytes) -> int:
        if self.is_reset:
            raise ConnectionResetError
        if self.peer.is_closed:
            if not self.hard:
                raise BrokenPipeError
            self.reset()  # the answer to these bytes
            return len(data)
        free = self.peer.room - len(self.peer.arrived)
        if free <= 0:
            raise BlockingIOError
        self.peer.arrived += data[:free]
        self.peer.on_change()
        return min(free, len(data))

    def close(self):
        if self.is_closed:
            return
        self.is_closed = True
        if self.arrived:
            self.peer.reset()
        else:
            self.peer.has_eof = True
            self.peer.on_change()

    def reset(self):
        self.is_reset = True
        if self.hard:
            self.arrived.clear()
        self.on_change()


def pair(
    room: int = 2**30, piece: Callable[[], int] = lambda: READ_SIZE, hard: bool = True
) -> tuple[Socket, Socket]:
    ends = Socket(room, piece, hard), Socket(room, piece, hard)
    ends[0].peer = ends[1]
    ends[1].peer = ends[0]
    return ends


class Listener:
    """A listening socket: connections wait in `backlog` until a loop accepts them."""

    def __init__(self, make_pair: Callable[[], tuple[Socket, Socket]]):
        self.make_pair = make_pair
        self.backlog: list[Socket] = []
        self.is_closed = False
        self.take: Callable | None = None
        self.on_change: Callable = lambda: None

    def getsockname(self) -> tuple[str, int]:
        if self.is_closed:
            raise OSError
        return "127.0.0.1", 8000

    def connect(self) -> Socket:
        """Return a client's end. A refused connection is reset."""
        ours, theirs = self.make_pair()
        if self.is_closed:
            ours.reset()
        else:
            self.backlog.append(theirs)
            self.on_change()
        return ours

    def serve(self, take: Callable, loop: Loop):
        """Serve like asyncio's servers: `take` makes a transport of each connection."""
        self.take = take
        self.on_change = lambda: loop.call_soon(self._take_all)
        self.on_change()

    def _take_all(self):
        while self.backlog and self.take:
            self.take(self.backlog.pop(0))

    def close(self):
        self.is_closed = True
        self.take = None
        for connection in self.backlog:
            connection.peer.reset()
        self.backlog.clear()

    async def wait_closed(self):
        pass


class Selector:
    """
    selectors.DefaultSelector for one of these sockets. `on_ready` is called when a `select` would
    find something new.
    """

    READ = 1
    WRITE = 2

    def __init__(self):
        self.on_ready: Callable = lambda: None

    def register(self, sock, interest: int):
        self.sock = sock
        self.interest = interest
        sock.on_change = lambda: self.select(0) and self.on_ready()

    modify = register

    def select(self, timeout: float | None) -> list[int]:
        ready = self.READ * self.sock.is_readable + self.WRITE * self.sock.is_writable
        return [ready] if ready & self.interest else []


selectors_of_memory = SimpleNamespace(
    DefaultSelector=Selector, EVENT_READ=Selector.READ, EVENT_WRITE=Selector.WRITE
)


class Transport(asyncio.Transport):
    """
    asyncio's transport of a socket: it reads once per turn, and buffers what the socket has no room
    for. It notes how and when its protocol closed it.
    """

    def __init__(self, loop: Loop, sock: Socket, protocol: asyncio.Protocol):
        super().__init__({"peername": ("127.0.0.1", 5000), "sockname": ("127.0.0.1", 8000)})
        self.loop = loop
        self.sock = sock
        self.protocol = protocol
        self.unsent = bytearray()
        self.set_write_buffer_limits()
        self.is_behind = False  # the protocol was asked to pause
        self.is_reading = True
        self.closed: str | None = None  # close or abort
        self.closed_at: float | None = None
        self.is_lost = False
        self.is_awake = False
        loop.transports.append(self)
        loop.call_soon(protocol.connection_made, self)
        loop.call_soon(self._begin)

    def _begin(self):
        self.sock.on_change = self._wake
        self._wake()

    def _wake(self):
        if not self.is_awake:
            self.is_awake = True
            self.loop.call_soon(self._look)

    def _look(self):
        self.is_awake = False
        if self.is_lost:
            return
        if self.unsent:
            self._send()
        if self.is_reading and not self.closed and self.sock.is_readable:
            self._receive()

    def _receive(self):
        try:
            data = self.sock.recv(READ_SIZE)
        except ConnectionError as error:
            return self._lose(error)
        if data:
            self.protocol.data_received(data)
        elif not self.protocol.eof_received():
            self.close()

    def _send(self):
        try:
            sent = self.sock.send(self.unsent)
        except BlockingIOError:
            return
        except ConnectionError as error:
            return self._lose(error)
        del self.unsent[:sent]
        if self.is_behind and len(self.unsent) <= self.low:
            self.is_behind = False
            self.protocol.resume_writing()
        if self.closed and not self.unsent:
            self._lose(None)

    def _lose(self, error: Exception | None):
        if not self.is_lost:
            self.is_lost = True
            self.unsent.clear()
            self.loop.call_soon(self._report_lost, error)

    def _report_lost(self, error: Exception | None):
        try:
            self.protocol.connection_lost(error)
        finally:
            self.sock.close()

    def _note_end(self, how: str):
        if not self.is_closing():
            self.closed = how
            self.closed_at = self.loop.now

    # what protocols call

    def write(self, data: bytes):
        if self.is_lost or not data:
            return
        was_empty = not self.unsent
        self.unsent += data
        if was_empty:
            self._send()
        if len(self.unsent) > self.high and not self.is_behind:
            self.is_behind = True
            self.protocol.pause_writing()

    def close(self):
        self._note_end("close")
        if not self.unsent:
            self._lose(None)

    def abort(self):
        self._note_end("abort")
        self._lose(None)

    def is_closing(self) -> bool:
        return self.is_lost or self.closed is not None

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True
        self._wake()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None):
        self.high = 2**16 if high is None else high
        self.low = self.high // 4 if low is None else low
