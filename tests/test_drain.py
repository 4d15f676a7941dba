"""How a server begins and ends: loading, signals, draining, and an engine that dies."""

import asyncio
import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from server import HEAD, FakeEngine, Server, error_of, python, read_until, wait_until

import serve
from serving import client as client_module
from serving import site

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


def test_a_server_may_be_stopped_while_it_loads(capsys):
    """
    The engine was ready while the server ended: the greeting asked a closed socket for its address.
    """
    with Server(engine=FakeEngine(ready=False)) as server:
        server.stop()
        wait_until(lambda: server.service.draining)
        server.engine.say_ready()
        server.thread.join(30)
    assert server.result is None and "serving" not in capsys.readouterr().out


def test_signals_do_not_reach_the_engine(listener):
    """
    Ctrl-C at a terminal is for both processes; the engine's left a traceback if it came while
    Python started up.
    """
    before = signal.getsignal(signal.SIGINT)
    link = client_module.connect(listener.getsockname())
    process = serve.start_process(
        serve.engine_process, serve.parse_args(["--model", "/no/model"]), listener
    )
    assert signal.getsignal(signal.SIGINT) is before
    for sig in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, sig)
    link.settimeout(60)
    assert "no model in /no/model" in json.loads(read_until(link, b"\n"))["message"]
    assert link.recv(1) == b""
    process.join(30)
    assert process.exitcode == 0


@pytest.mark.parametrize("before, ended_by", [("SIG_DFL", "SIGTERM"), ("SIG_IGN", None)])
def test_a_terminal_that_closes_ends_the_server_as_sigterm_does(before, ended_by):
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
assert caught == {[ended_by] if ended_by else []}
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_a_drain_finishes_what_runs():
    """
    After SIGTERM: not ready, new work refused, running work finished, then the end without
    complaint.
    """
    with Server() as server:
        server.engine.gate.clear()
        running = [
            server.connect(prompt="say hi", max_tokens=9, stream=stream) for stream in (False, True)
        ]
        wait_until(lambda: len(server.engine.added) == 2)
        server.stop()
        wait_until(lambda: server.get("/readyz") == 503)
        assert (server.get("/livez"), server.get("/health")) == (200, 503)
        response = server.post()
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert error_of(response) == {
            "message": "the server is draining: try again later",
            "type": "server_error", "param": None, "code": "draining",
        }  # fmt: skip
        server.engine.gate.set()
        assert b'"text":"hi"' in read_until(running[0], b"}}}")
        assert b"[DONE]" in read_until(running[1], b"[DONE]")
        server.thread.join(30)
        assert server.result is None and server.engine.aborted == []


def test_a_drain_has_a_limit():
    """What does not finish in time ends with an error, not with a closed connection."""
    with Server("--drain-seconds", "0.1") as server:
        server.engine.gate.clear()
        whole = server.connect(prompt="loop", max_tokens=10**4)
        wait_until(lambda: len(server.engine.added) == 1)
        server.stop()
        answer = read_until(whole, b"}}")
        assert b" 503 " in answer and b"the server stopped before this was finished" in answer
        server.thread.join(30)
        assert server.result is None


def test_a_second_signal_stops_now():
    """Whoever cannot wait signals again; the clients still get an answer."""
    with Server("--drain-seconds", "60") as server:
        server.engine.gate.clear()
        sock = server.connect(prompt="loop", max_tokens=10**4)
        wait_until(lambda: len(server.engine.added) == 1)
        server.stop()
        wait_until(lambda: server.get("/readyz") == 503)
        assert server.thread.is_alive()
        server.stop()
        assert b"stopped before this was finished" in read_until(sock, b"}}")
        server.thread.join(30)
        assert server.result is None


def test_who_is_still_being_encoded_when_the_server_stops_is_told(monkeypatch):
    """
    With a long text being encoded, or half of it sent, SIGTERM ended in uvicorn's own 500, no JSON,
    after the linger. It is a 503 as for whatever else is not finished: clients try again.
    """
    monkeypatch.setattr(site, "LINGER_SECONDS", 0.2)
    with Server() as server, ThreadPoolExecutor(1) as pool:
        asked = threading.Event()

        async def ask(job):
            asked.set()
            await asyncio.sleep(30)

        monkeypatch.setattr(server.service.encoder, "ask", ask)
        with socket.create_connection(server.address, timeout=30) as half:
            answer = pool.submit(server.post)
            assert asked.wait(30)
            half.sendall(HEAD + b"Content-Length: 99\r\n\r\n{")
            wait_until(lambda: len(server.service.server.server_state.tasks) == 2)
            server.stop()
            assert b'"code": "stopping"' in read_until(half, b"}}")
        assert (
            answer.result(30).status_code == 503 and error_of(answer.result())["code"] == "stopping"
        )


def test_stopping_does_not_wait_for_those_who_neither_read_nor_send(capfd, monkeypatch):
    """
    Half a body, and an answer that nobody reads, each left a traceback of 60 lines when the server
    was stopped.
    """
    monkeypatch.setattr(site, "LINGER_SECONDS", 0.2)
    with Server(engine=FakeEngine(pace=0), send_buffer=4096) as server:
        unread = server.connect(
            prompt=["loop"] * 8, max_tokens=3000, stream=True, return_token_ids=True
        )
        half = socket.create_connection(server.address)
        half.sendall(HEAD + b'Content-Length: 99\r\n\r\n{"prompt": ')
        wait_until(lambda: len(server.engine.added) == 8 and not server.engine.running)
    unread.close(), half.close()
    error = capfd.readouterr().err
    assert "Cancel 2 running task(s)" in error and "Traceback" not in error


def test_the_death_of_the_engine_is_an_error_for_each_client():
    """
    Whoever waits gets an error, streaming or not, and the health pages say so. The first time
    another engine is started, and serves; when that one dies too, the server ends with exit code 1.
    """
    second = FakeEngine(ready=False)
    with Server(engine=FakeEngine(successor=second)) as server:
        server.engine.gate.clear()
        waiting = [
            server.connect(prompt="loop", max_tokens=9, stream=stream) for stream in (False, True)
        ]
        wait_until(lambda: len(server.engine.added) == 2)
        server.engine.die()
        for sock in waiting:
            answer = read_until(sock, b"}}")
            assert (
                b" 500 " in answer
                and b'"engine_dead"' in answer
                and b"it is started again" in answer
            )
        assert (server.get("/livez"), server.get("/health"), server.get("/readyz")) == (
            503,
            503,
            503,
        )
        assert (
            server.post().status_code == 503
            and error_of(server.http.get("/livez"))["code"] == "dead"
        )
        second.say_ready()
        wait_until(lambda: server.get("/readyz") == 200)
        assert server.get("/livez") == 200 and server.answer()["choices"][0]["text"] == "hi"
        second.die()
        server.thread.join(30)
        assert server.result == "the engine's process ended"  # exit code 1


def test_an_engine_that_cannot_start_says_why():
    """
    Its one line becomes the server's, and the server ends; that its link then ends too says nothing
    more.
    """
    engine = FakeEngine(ready=False)
    server = Server(engine=engine)
    engine.links.accept()
    engine.links.set_greeting({"op": "fatal", "message": "no model here: run `python train.py`"})
    engine.links.close()
    assert (
        serve.run_on_loop(server.service.run(server.sock)) == "no model here: run `python train.py`"
    )
