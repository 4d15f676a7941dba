"""
Several HTTP processes, real ones, on one port, with one fake engine behind them: what holds for one
server holds for all of them together.
"""

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fake_server import FakeEngine, bytes_directory, read_until, wait_until
from wires import Clock, request

import serve
from engine.links import Links
from server import workers as workers_module
from server.workers import Seat, Workers, share_port

pytestmark = pytest.mark.skipif(
    os.uname().sysname != "Linux", reason="one port for several processes is Linux's"
)


class Crew:
    """
    HTTP processes, the first of which would lead; here the test does, with its event loop in a
    thread.
    """

    def __init__(self, folder, count):
        self.engine = FakeEngine()
        self.folder = folder
        self.args = serve.parse_args(
            ["--model", bytes_directory(), "--port", "0", "--no-access-log"]
        )
        self.listener = serve.listen_for_links(str(folder))
        self.engine.links = Links(self.listener)
        sockets = share_port(serve.listen(self.args), count)
        self.address = sockets[0].getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self.deaths = []
        self.workers = Workers(self.start, sockets)
        self.workers.on_death = self.deaths.append
        self.thread = threading.Thread(target=asyncio.run, args=(self.watch(),), daemon=True)

    def start(self, sock, seat):
        """Seat 1 plays the first: it alone counts what the engine says of itself."""
        if seat.number == 1:
            seat = Seat(0, seat.num_processes, seat.orders)
        return serve.start_process(
            serve.worker_process, self.args, [], self.listener.getsockname(), sock, seat
        )

    async def watch(self):
        self.loop = asyncio.get_running_loop()
        self.workers.watch()
        while self.workers.processes or not self.workers.stopping:
            await asyncio.sleep(0.005)

    def __enter__(self):
        self.thread.start()
        wait_until(lambda: self.listener and len(self.pids()) == len(self.workers.sockets))
        self.engine.start()
        self.wait_for_links(len(self.workers.sockets))
        return self

    def wait_for_links(self, count):
        wait_until(lambda: len(self.engine.links.links) == count)
        wait_until(lambda: all(self.get("/readyz").status_code == 200 for _ in range(8)))

    def __exit__(self, *exception):
        self.engine.gate.set()
        for _ in range(2):
            self.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.engine.join(10)
        self.listener.close()

    def stop(self):
        with contextlib.suppress(RuntimeError):  # its loop has ended already
            self.loop.call_soon_threadsafe(self.workers.stop)

    def pids(self):
        return [process.pid for process in self.workers.processes.values()]

    def get(self, path):
        """On a connection of its own: to whichever process the kernel chooses."""
        return httpx.get(f"{self.url}{path}", timeout=30)

    def post(self):
        body = {"prompt": "say hi", "max_tokens": 9}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)

    def connect(self, **body) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=30)
        sock.sendall(request("POST", "/v1/completions", body))
        return sock

    def spread(self, **body) -> list[socket.socket]:
        """Connections with a request each, until every process has one."""
        socks, before = [], len(self.engine.added)
        while len({message["link"] for message in self.engine.added[before:]}) < len(
            self.workers.sockets
        ):
            socks.append(self.connect(**body))
            wait_until(lambda: len(self.engine.added) == before + len(socks))
        return socks

    def metric(self, name):
        shown = re.findall(rf"^vllm:{name}{{.*}} (\S+)", self.get("/metrics").text, re.MULTILINE)
        return sum(map(float, shown))


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crew")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
        with Crew(folder, 2) as crew:
            yield crew


def test_metrics_are_of_all_processes(crew):
    """
    Each answers with the sum; what the engine says of itself reaches all of them and counts once.
    """
    names = ("generation_tokens_total", "prefix_cache_queries_total")
    before = [crew.metric(name) for name in names]
    socks = crew.spread(prompt="say hi", max_tokens=9)
    for sock in socks:
        assert b'"text":"hi"' in read_until(sock, b"}}}")
    after = [before[0] + 3 * len(socks), before[1] + 6 * len(socks)]
    for _ in range(6):  # whichever process is asked
        wait_until(lambda: [crew.metric(name) for name in names] == after)


def test_a_process_that_dies_is_started_again(crew, capfd):
    """
    Its requests end in the engine; the other process's clients notice nothing.
    """
    crew.engine.gate.clear()
    socks = crew.spread(prompt="loop", max_tokens=50)
    crew.engine.aborted.clear()
    os.kill(crew.workers.processes[2].pid, 9)
    wait_until(lambda: len(crew.deaths) == 1 and crew.engine.aborted)
    crew.engine.gate.set()
    answers = []
    for sock in socks:
        with contextlib.suppress(ConnectionError):
            answers.append(read_until(sock, b"}}}"))
    whole = [answer for answer in answers if b'"length"' in answer]
    assert whole and crew.engine.aborted
    assert len(whole) + len(crew.engine.aborted) == len(socks)
    crew.wait_for_links(2)
    wait_until(lambda: len(crew.pids()) == 2)
    for sock in crew.spread(prompt="say hi", max_tokens=9):
        assert b'"text":"hi"' in read_until(sock, b"}}}")


def test_a_process_that_starts_late_refuses_nobody(crew, monkeypatch):
    """
    Connections that waited in its socket were answered "loading" when the engine, busy with a step,
    greeted the process a moment later.
    """
    accept = crew.engine.links.accept
    monkeypatch.setattr(crew.engine.links, "accept", lambda: (time.sleep(0.6), accept()))
    os.kill(crew.workers.processes[2].pid, 9)
    wait_until(lambda: len(crew.engine.links.links) == 1)
    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(lambda _: crew.post().status_code, range(12))]
    assert answers == [200] * 12
    crew.wait_for_links(2)


def test_all_processes_drain(tmp_path, monkeypatch):
    """
    After the order: new work refused, running work finished in each of them, then the port is
    closed.
    """
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with Crew(tmp_path, 2) as crew:
        crew.engine.gate.clear()
        socks = crew.spread(prompt="say hi", max_tokens=9)
        crew.stop()
        wait_until(lambda: crew.get("/readyz").status_code == 503)
        assert crew.post().status_code == 503 and len(crew.pids()) == 2
        crew.engine.gate.set()
        for sock in socks:
            assert b'"text":"hi"' in read_until(sock, b"}}}")
        crew.thread.join(30)
        assert not crew.pids() and not crew.engine.aborted
        with pytest.raises(OSError):
            socket.create_connection(crew.address).close()


def test_a_port_is_shared_with_nobody_else():
    """
    SO_REUSEPORT lets any process of the same user in: two servers would share one port's clients,
    in silence.
    """
    with contextlib.ExitStack() as stack:
        sockets = share_port(serve.listen(serve.parse_args(["--port", "0"])), 3)
        for sock in sockets:
            stack.enter_context(sock)
        assert len({sock.getsockname() for sock in sockets}) == 1
        with pytest.raises(SystemExit, match="choose another --port"):
            serve.listen(serve.parse_args(["--port", str(sockets[0].getsockname()[1])]))


def test_too_many_processes_are_refused_at_once():
    """
    `--http-workers 99999` ended with "Too many open files", about a folder that it then could not
    remove.
    """
    with pytest.raises(ValueError, match="--http-workers 65: at most 64"):
        serve.serve_http(serve.parse_args(["--http-workers", "65"]))


# --------------------------------------------------------------------------------------------------
# Without processes, on a clock of the test's own


class Played:
    """A worker's process that ends when the test says so."""

    def __init__(self, seat):
        self.seat = seat
        self.sentinel = 100 + seat.number
        self.orders = os.dup(seat.orders.fileno())  # a real one has its own, too
        self.is_killed = False
        self.is_joined = False

    def join(self):
        self.is_joined = True

    def kill(self):
        self.is_killed = True

    def heard(self) -> bytes:
        os.set_blocking(self.orders, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(self.orders, 100)
        return b"nothing"


class Office:
    """Workers, their processes and sockets, as the first HTTP process has them."""

    def __init__(self, count: int):
        self.clock = Clock()
        self.readers = {}
        self.clock.add_reader = lambda fd, call, *args: self.readers.__setitem__(fd, (call, args))
        self.clock.remove_reader = self.readers.pop
        self.started = []
        self.deaths = []
        self.sockets = [socket.socket() for _ in range(count)]
        self.workers = Workers(self.start, self.sockets)
        self.workers.on_death = self.deaths.append
        self.do(self.workers.watch)

    def start(self, sock, seat):
        assert sock is self.sockets[seat.number - 1] and seat.num_processes == 3
        self.started.append(Played(seat))
        return self.started[-1]

    def do(self, call, *args):
        self.clock.call_soon(call, *args)
        self.clock.settle()
        assert not self.clock.failures

    def end(self, number: int):
        """The process of that number ends."""
        call, args = self.readers[100 + number]
        self.do(call, *args)


@pytest.fixture
def office():
    office = Office(2)
    yield office
    for sock in office.sockets:
        sock.close()
    for played in office.started:
        os.close(played.orders)
    office.clock.close()


def test_a_worker_that_died_is_started_again_a_second_later(office):
    """
    At its socket and number.
    """
    assert [played.seat.number for played in office.started] == [1, 2] and sorted(
        office.readers
    ) == [101, 102]
    first = office.started[0]
    office.end(1)
    assert office.deaths == [first] and first.is_joined and sorted(office.readers) == [102]
    office.clock.run(0.9)
    assert len(office.started) == 2
    office.clock.run(0.2)
    assert [played.seat.number for played in office.started] == [1, 2, 1] and sorted(
        office.readers
    ) == [101, 102]
    office.end(1)
    assert office.deaths == [first, office.started[2]]


def test_workers_that_were_told_to_stop_are_not_started_again(office):
    """Not those that die afterwards, nor one that had died before."""
    office.end(1)
    office.do(office.workers.stop)
    assert office.started[1].heard() == b"." and all(sock.fileno() == -1 for sock in office.sockets)
    office.do(office.workers.stop)
    assert office.started[1].heard() == b"."
    office.end(2)
    office.clock.run(5)
    assert len(office.started) == 2 and len(office.deaths) == 1 and not office.workers.processes


def test_workers_that_do_not_end_in_time_are_killed(office):
    task = office.clock.create_task(office.workers.end_within(3))
    office.clock.run(1)
    office.end(1)
    office.clock.run(1.9)
    assert not task.done() and not office.started[1].is_killed
    office.clock.run(0.2)
    assert task.done() and office.started[1].is_killed and not office.started[0].is_killed


def test_the_end_of_the_first_process_is_seen_by_the_others(office):
    """The file of its orders ends: nobody else holds its end open, nor ours in a worker."""
    office.workers.orders[1].close()
    assert office.started[0].heard() == b"" and office.started[1].heard() == b"nothing"


CORES = [(1, "Linux", 1), (4, "Linux", 1), (7, "Linux", 1), (8, "Linux", 2), (16, "Linux", 4)]
CORES += [(192, "Linux", 8), (None, "Linux", 1), (64, "Darwin", 1)]


@pytest.mark.parametrize("cores, system, count", CORES)
def test_how_many_processes_there_are_by_default(monkeypatch, cores, system, count):
    monkeypatch.setattr(workers_module.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(workers_module, "can_share_port", lambda: system == "Linux")
    assert workers_module.num_processes(None) == count
