"""
How a server begins and ends, with real signals, sockets and processes; on the tests' own clock, see
test_api.py.
"""

import json
import os
import signal
import socket

import pytest
from fake_server import HEAD, FakeEngine, Server, python, read_until, wait_until

import serve
from server import client as client_module
from server import gate

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


def test_stopping_does_not_wait_for_those_who_neither_read_nor_send(capfd, monkeypatch):
    """
    Half a body, and an answer that nobody reads, each left a traceback of 60 lines when the server
    was stopped.
    """
    monkeypatch.setattr(gate, "LINGER_SECONDS", 0.2)
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
