"""Helpers for tests of real processes and sockets: a place, a wait, a read, a run of Python."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def wait_until(condition, seconds=30, pause=0.01):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


def read_until(sock, end):
    data = b""
    while end not in data and (part := sock.recv(65536)):
        data += part
    return data


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
