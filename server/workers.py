"""
Several HTTP processes on one port. The first of them, which serve.py is, starts the others, starts
again those that die, and ends them when it ends.

    workers = Workers(start, sockets[1:])                # start(sock, slot) -> the process
    workers.watch()                                      # on the event loop
    workers.stop()                                       # drain; the second time: now

Each process has a listening socket of its own on the same port (SO_REUSEPORT: the kernel spreads
connections among them) and a link of its own to the engine (client.py), and keeps its share of
--max-connections. Not run by itself.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RESTART_SECONDS = 1.0  # before a restart: a process that cannot start must not keep a core busy
CORES_EACH = 4  # cores for each HTTP process where no number is given
MAX_BY_DEFAULT = 8  # HTTP processes, however many cores there are
MAX_WORKERS = 64  # where a number is given: each has sockets and files of counts in the first one
# Of each `stop`. One that has not begun to serve is ended by it.
STOP_SIGNAL = signal.SIGUSR1
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's variable: where processes count

# Not a fork, which would inherit sockets, and keep the port open, and the event loop; and CUDA does
# not survive one.
context = multiprocessing.get_context("spawn")


@dataclass
class WorkerSlot:
    """The place of an HTTP process among all."""

    number: int = 0  # 0: the first
    num_processes: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0


def num_processes(requested: int | None) -> int:
    """
    How many HTTP processes to run: as many as requested, else one on small machines, and on large
    ones as many as keep up with a GPU's 256 streams. Raises ValueError.
    """
    if requested is None:
        most = MAX_BY_DEFAULT if can_share_port() else 1
        return max(1, min(most, (os.cpu_count() or 1) // CORES_EACH))
    if requested > 1 and not can_share_port():
        raise ValueError(
            f"--http-workers {requested}: this system does not spread connections over processes, "
            "leave the flag out"
        )
    if requested > MAX_WORKERS:
        raise ValueError(
            f"--http-workers {requested}: at most {MAX_WORKERS} are started, each takes 60 MB and "
            "a core"
        )
    return requested


def can_share_port() -> bool:
    """Whether the kernel spreads connections among the sockets of a port. macOS does not."""
    return os.uname().sysname == "Linux"


def open_port(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """A socket that listens there; at :: for IPv4, too."""
    family = socket.getaddrinfo(host, None)[0][0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    sock = socket.create_server(
        (host, port), family=family, dualstack_ipv6=both, reuse_port=is_shared
    )
    # without Nagle's algorithm, which would hold answers back for 40 ms; connections inherit it
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def share_port(first: socket.socket, count: int) -> list[socket.socket]:
    """
    The socket and further ones on its port. The first was opened without SO_REUSEPORT, so no other
    server listens there.
    """
    if count == 1:
        return [first]
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    host, port = first.getsockname()[:2]
    return [first, *(open_port(host, port, is_shared=True) for _ in range(count - 1))]


class Workers:
    """
    All HTTP processes but the first, which owns this object. A worker's socket stays open here
    while the worker is started again: connections made meanwhile wait for the next one.
    """

    def __init__(self, start: Callable, sockets: list[socket.socket]):
        self.start = start
        self.sockets = sockets
        self.processes: dict[int, Any] = {}  # by number
        self.stopping = False
        for number in range(1, len(sockets) + 1):
            self._start(number)

    def _start(self, number: int):
        slot = WorkerSlot(number, 1 + len(self.sockets))
        self.processes[number] = self.start(self.sockets[number - 1], slot)

    def watch(self):
        """From now on, start workers that die again."""
        for number in self.processes:
            self._watch(number)

    def _watch(self, number: int):
        sentinel = self.processes[number].sentinel
        asyncio.get_running_loop().add_reader(sentinel, self._ended, number)

    def _ended(self, number: int):
        loop = asyncio.get_running_loop()
        process = self.processes.pop(number)
        loop.remove_reader(process.sentinel)
        process.join()
        if not self.stopping:
            self.on_death(process)
            loop.call_later(RESTART_SECONDS, self._restart, number)

    def _restart(self, number: int):
        if not self.stopping:
            self._start(number)
            self._watch(number)

    def on_death(self, process):
        """Called when a worker has died; the owner may replace it."""

    def stop(self):
        """
        Have all workers drain: refuse new work and end when theirs is done. The second time, have
        them end at once.
        """
        self.stopping = True
        for sock in self.sockets:
            sock.close()  # the port is closed when the last worker closes its own
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, STOP_SIGNAL)

    async def end_within(self, seconds: float):
        """Wait until all workers have ended; kill those that take longer than so many seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.processes and loop.time() < deadline:
            await asyncio.sleep(0.02)
        self.kill()

    def kill(self):
        for process in self.processes.values():
            process.kill()
