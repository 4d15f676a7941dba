"""
Several HTTP processes on one port: their lives on a clock of the test's own. test_api.py has the
rules of each of them, test_sockets.py two real ones, test_end_to_end.py how all of them end.
"""

import contextlib
import os
import socket

import pytest
from virtual import Loop

import serve
from server import workers as workers_module
from server.workers import Workers


def test_too_many_processes_are_refused_at_once():
    """
    `--http-workers 99999` ended with "Too many open files", about a folder that it then could not
    remove.
    """
    with pytest.raises(ValueError, match="--http-workers 65: at most 64"):
        serve.serve_http(serve.parse_args(["--http-workers", "65"]))


class FakeProcess:
    """A worker's process that ends when the test says so."""

    def __init__(self, slot):
        self.number = slot.number
        self.sentinel = 100 + slot.number
        self.control_pipe = os.dup(slot.control_pipe.fileno())  # a real one has its own, too
        os.set_blocking(self.control_pipe, False)
        self.calls = []

    def join(self):
        self.calls.append("join")

    def kill(self):
        self.calls.append("kill")

    def read(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self.control_pipe, 100)
        return b"nothing"


class FirstProcess:
    """Two workers, their processes and sockets, as the first HTTP process has them."""

    def __init__(self):
        self.clock = Loop()
        self.readers = {}
        self.clock.add_reader = lambda fd, call, *args: self.readers.__setitem__(fd, (call, args))
        self.clock.remove_reader = self.readers.pop
        self.started = []
        self.deaths = []
        self.sockets = [socket.socket() for _ in range(2)]
        self.workers = Workers(self.start, self.sockets)
        self.workers.on_death = self.deaths.append
        self.do(self.workers.watch)

    def start(self, sock, slot):
        assert sock is self.sockets[slot.number - 1] and slot.num_processes == 3
        self.started.append(FakeProcess(slot))
        return self.started[-1]

    def do(self, call, *args):
        self.clock.do(call, *args)
        assert not self.clock.errors

    def end(self, number: int):
        """The process of that number ends."""
        call, args = self.readers[100 + number]
        self.do(call, *args)


@pytest.fixture
def first():
    first = FirstProcess()
    yield first
    for sock in first.sockets:
        sock.close()
    for process in first.started:
        os.close(process.control_pipe)
    first.clock.close()


def test_a_worker_that_died_is_started_again_a_second_later(first):
    """At its socket and number, each time."""
    first.end(1)
    assert first.deaths == [first.started[0]] and first.started[0].calls == ["join"]
    assert list(first.readers) == [102]
    first.clock.run(0.9)
    assert len(first.started) == 2
    first.clock.run(0.2)
    assert [process.number for process in first.started] == [1, 2, 1]
    first.end(1)
    assert first.deaths == first.started[::2]


def test_workers_that_were_stopped_are_not_started_again(first):
    """Not those that die afterwards, nor one that had died before. Each stop is a byte."""
    first.end(1)
    for _ in range(2):
        first.do(first.workers.stop)
        assert first.started[1].read() == b"."
    assert [sock.fileno() for sock in first.sockets] == [-1, -1]
    first.end(2)
    first.clock.run(5)
    assert len(first.started) == 2 and len(first.deaths) == 1 and not first.workers.processes


def test_workers_that_do_not_end_in_time_are_killed(first):
    task = first.clock.create_task(first.workers.end_within(3))
    first.clock.run(1)
    first.end(1)
    first.clock.run(1.9)
    assert not task.done() and first.started[1].calls == []
    first.clock.run(0.2)
    assert task.done() and first.started[1].calls == ["kill"]
    assert first.started[0].calls == ["join"]


def test_the_end_of_the_first_process_is_seen_by_the_others(first):
    """Their pipes end: nobody else holds the first one's end open, nor a worker's in the first."""
    first.workers.control_pipes[1].close()
    assert [process.read() for process in first.started] == [b"", b"nothing"]


CORES = [(1, "Linux", 1), (4, "Linux", 1), (7, "Linux", 1), (8, "Linux", 2), (16, "Linux", 4)]
CORES += [(192, "Linux", 8), (None, "Linux", 1), (64, "Darwin", 1)]


@pytest.mark.parametrize("cores, system, count", CORES)
def test_how_many_processes_there_are_by_default(monkeypatch, cores, system, count):
    monkeypatch.setattr(workers_module.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(workers_module, "can_share_port", lambda: system == "Linux")
    assert workers_module.num_processes(None) == count
