"""
Several HTTP processes on one port: their lives on a clock of the test's own. test_api.py has the
rules of each of them, test_end_to_end.py two real ones, and how all of them end.
"""

import socket
from types import SimpleNamespace

import pytest
from virtual import Loop, Signal

import serve
from server import workers as workers_module
from server.workers import STOP_SIGNAL, Workers


def test_too_many_processes_are_refused_at_once():
    """
    `--http-workers 99999` ended with "Too many open files", about a folder that it then could not
    remove.
    """
    with pytest.raises(ValueError, match="--http-workers 65: at most 64"):
        serve.serve_http(serve.parse_args(["--http-workers", "65"]))


class FirstProcess:
    """Two workers, their processes and sockets, as the first HTTP process has them."""

    def __init__(self):
        self.clock = Loop()
        self.started = []
        self.calls = []  # what was done to processes: (name, number)
        self.deaths = []
        self.sockets = [socket.socket() for _ in range(2)]
        self.workers = Workers(self.start, self.sockets)
        self.workers.on_death = self.deaths.append
        self.do(self.workers.watch)

    def start(self, sock, slot):
        assert sock is self.sockets[slot.number - 1]
        assert slot.num_processes == 3
        process = SimpleNamespace(pid=slot.number, sentinel=Signal())
        process.join = lambda: self.calls.append(("join", slot.number))
        process.kill = lambda: self.calls.append(("kill", slot.number))
        self.started.append(process)
        return process

    def do(self, call, *args):
        self.clock.do(call, *args)
        assert not self.clock.errors

    def end(self, process):
        """It ends. Its sentinel stays readable."""
        for _ in range(2):
            self.do(process.sentinel.end)


@pytest.fixture
def first(monkeypatch):
    first = FirstProcess()
    kill = lambda pid, number: first.calls.append((number, pid))  # noqa: E731
    monkeypatch.setattr(workers_module.os, "kill", kill)
    yield first
    for sock in first.sockets:
        sock.close()
    first.clock.close()


def test_a_worker_that_died_is_started_again_a_second_later(first):
    """At its socket and number, each time."""
    first.end(first.started[0])
    assert first.deaths == first.started[:1]
    assert first.calls == [("join", 1)]
    first.clock.run(0.9)
    assert len(first.started) == 2
    first.clock.run(0.2)
    assert [process.pid for process in first.started] == [1, 2, 1]
    first.end(first.started[2])
    assert first.deaths == first.started[::2]


def test_workers_that_were_stopped_are_not_started_again(first):
    """Not those that die afterwards, nor one that had died before. Each stop is a signal."""
    first.end(first.started[0])
    for _ in range(2):
        first.do(first.workers.stop)
    assert first.calls[1:] == [(STOP_SIGNAL, 2)] * 2
    assert [sock.fileno() for sock in first.sockets] == [-1, -1]
    first.end(first.started[1])
    first.clock.run(5)
    assert len(first.started) == 2
    assert len(first.deaths) == 1
    assert not first.workers.processes


def test_workers_that_do_not_end_in_time_are_killed(first):
    first.do(first.workers.stop)
    task = first.clock.create_task(first.workers.end_within(3))
    first.clock.run(1)
    first.end(first.started[0])
    first.clock.run(1.9)
    assert not task.done()
    first.clock.run(0.2)
    assert task.done()
    assert first.calls[2:] == [("join", 1), ("kill", 2)]
    first.end(first.started[1])
    task = first.clock.create_task(first.workers.end_within(3))
    first.clock.run(0.1)
    assert task.done()


CORES = [(1, "Linux", 1), (4, "Linux", 1), (7, "Linux", 1), (8, "Linux", 2), (16, "Linux", 4)]
CORES += [(192, "Linux", 8), (None, "Linux", 1), (64, "Darwin", 1)]


@pytest.mark.parametrize("cores, system, count", CORES)
def test_how_many_processes_there_are_by_default(monkeypatch, cores, system, count):
    monkeypatch.setattr(workers_module.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(workers_module, "can_share_port", lambda: system == "Linux")
    assert workers_module.num_processes(None) == count
