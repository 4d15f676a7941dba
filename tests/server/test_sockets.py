"""Behaviour of the kernel: real sockets, processes and signals."""

import json
import os
import signal

from processes import python, read_until

import serve


def test_signals_do_not_reach_the_engine():
    """
    Ctrl-C at a terminal goes to both processes. Previously the engine's process printed a traceback
    if it came while Python was starting.
    """
    before = signal.getsignal(signal.SIGINT)
    process, link = serve.start_engine(serve.parse_args(["--model", "/no/model"]))
    assert signal.getsignal(signal.SIGINT) is before
    for sig in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, sig)
    link.settimeout(60)
    assert "there is no directory /no/model" in json.loads(read_until(link, b"\n"))["message"]
    process.join(30)
    assert process.exitcode == 0
    link.settimeout(1)
    assert link.recv(1) == b"", "its end of the link is also open in this process"


def test_a_terminal_that_closes_ends_the_server_as_sigterm_does():
    """
    Previously SIGHUP cut all streams without draining. Under nohup, which ignores it, the server
    must go on.
    """
    code = """
import serve, signal
caught = []
signal.signal(signal.SIGTERM, lambda *_: caught.append("SIGTERM"))
for before in signal.SIG_IGN, signal.SIG_DFL:
    signal.signal(signal.SIGHUP, before)
    serve.terminate_on_hang_up()
    signal.raise_signal(signal.SIGHUP)
    caught.append(before.name)
assert caught == ["SIG_IGN", "SIGTERM", "SIG_DFL"]
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
