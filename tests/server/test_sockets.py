"""Behaviour of the kernel: real sockets, processes and signals."""

import contextlib
import json
import os
import signal

import pytest
from processes import python, read_until

import serve
from server import client
from server.workers import can_share_port, share_port


@pytest.mark.skipif(not can_share_port(), reason="one port for several processes")
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
