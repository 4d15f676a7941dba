"""Where the kernel's behaviour is the subject: real sockets, processes and signals."""

import contextlib
import json
import os
import re
import signal
import socket

import httpx
import pytest
import torch
from processes import python, read_until, wait_until
from test_end_to_end import Process, http_processes
from wires import request

import serve
from assets import load
from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from server import client
from server.workers import can_share_port, share_port
from training.corpus import bpe_tokenizer

on_linux = pytest.mark.skipif(not can_share_port(), reason="one port for several processes")
HEAD = request("POST", "/v1/completions", Content_Type="application/json")[:-2]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two HTTP processes, where there can be."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    save_checkpoint(GPT(GPTConfig(257, 64, n_layer=1, n_head=1, n_embd=16)), folder)
    bpe_tokenizer([]).save(folder)
    with Process(folder, "--http-workers", str(1 + can_share_port())) as server:
        yield server


def address_of(server) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


@on_linux
def test_two_processes_serve_as_one(server):
    """
    Each shows the counts of both. A process that is killed is started again, and meanwhile nobody
    is refused: connections wait in its socket.
    """
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}

    def complete() -> int:
        """On a connection of its own: to whichever process the kernel chooses."""
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code

    def counts() -> list[float]:
        """What all processes have counted, and what the engine says of itself."""
        text = httpx.get(f"{server.url}/metrics").text
        names = ("generation_tokens_total", "prefix_cache_queries_total")
        values = [re.findall(rf"^vllm:{name}{{.*}} (\S+)", text, re.M) for name in names]
        return [sum(map(float, value)) for value in values]

    _, port = address_of(server)
    processes = http_processes(port)
    assert len(processes) == 2
    assert [complete() for _ in range(12)] == [200] * 12
    for _ in range(6):
        wait_until(lambda: counts() == [12 * 3, 12 * 5])
    (worker,) = set(processes) - {server.process.pid}
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: worker not in http_processes(port))
    assert [complete() for _ in range(12)] == [200] * 12
    wait_until(lambda: len(http_processes(port)) == 2)


@pytest.mark.parametrize(
    "head", [b"Content-Length: 5000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n4c4b40\r\n"]
)
def test_a_client_that_sends_5_mb_reads_its_413(server, head):
    """Closing with bytes unread would reset the connection, and the answer would be lost."""
    with socket.create_connection(address_of(server), timeout=30) as sock:
        sock.sendall(HEAD + head)
        sock.sendall(b" " * 5_000_000)
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 413 ")


def test_the_load_generator_measures_what_it_says(server):
    """A row for each request, in their order."""
    host, port = map(str, address_of(server))
    requests = [load.completion(list(b"loop"), 40 + i, at=0.1 * (i == 4)) for i in range(5)]
    rows = load.run_clients(host, port, requests, processes=2)
    assert [row["tokens"] for row in rows] == [40, 41, 42, 43, 44]
    for row in rows:
        waited = row["first"] + sum(row["gaps"])
        assert 0 < row["first"] < waited and 0 < len(row["gaps"]) < row["tokens"]
        assert row["end"] == pytest.approx(waited + 0.1 * (row["tokens"] == 44))
    with pytest.raises(ValueError, match="wanted 3 tokens, the answer ends with HTTP"):
        load.run_clients(host, port, [load.completion([300], 3)], processes=1)


@on_linux
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


def test_signals_do_not_reach_the_engine(listener):
    """
    Ctrl-C at a terminal is for both processes; the engine's left a traceback if it came while
    Python started up.
    """
    before = signal.getsignal(signal.SIGINT)
    link = client.connect(listener.getsockname())
    args = serve.parse_args(["--model", "/no/model"])
    process = serve.start_process(serve.engine_process, args, listener)
    assert signal.getsignal(signal.SIGINT) is before
    for sig in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, sig)
    link.settimeout(60)
    assert "no model in /no/model" in json.loads(read_until(link, b"\n"))["message"]
    assert link.recv(1) == b""
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.parametrize("before, ends", [("SIG_DFL", 1), ("SIG_IGN", 0)])
def test_a_terminal_that_closes_ends_the_server_as_sigterm_does(before, ends):
    """
    SIGHUP cut all streams without a drain; under nohup, which ignores it, the server must go on.
    """
    code = f"""
import serve, signal
caught = []
signal.signal(signal.SIGHUP, signal.{before})
signal.signal(signal.SIGTERM, lambda *_: caught.append("SIGTERM"))
serve.terminate_on_hang_up()
signal.raise_signal(signal.SIGHUP)
assert caught == ["SIGTERM"] * {ends}
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
