"""
Helpers for tests of real processes and sockets: a place, a wait, a read, a run of Python, a server.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Use one thread, because such a small model gains nothing from two, and on a busy machine two lose
# seconds waiting for each other. On a CPU, in fp32, answers equal those of the dense model to the
# last token.
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
# the longest wait for anything, generous because machines can be busy
SECONDS = float(os.environ.get("WAIT_SECONDS", 120))
RUN = {"cwd": ROOT, "text": True, "env": os.environ | ON_CPU}


def wait_until(condition, pause=0.01):
    deadline = time.monotonic() + SECONDS
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


class Process:
    """serve.py as a user starts it, on a free port; ready when it says so."""

    def __init__(self, checkpoint, *flags, cwd=ROOT):
        command = [sys.executable, "serve.py", "--model", str(checkpoint), *flags]
        command += ["--port", "0", "--check"]
        command += [] if "--log-requests" in flags else ["--no-access-log"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, **RUN | {"cwd": cwd}, **pipes)
        output = ""
        self.greeting = ""
        while "http://" not in self.greeting:  # first come the engine's statement or its error
            self.greeting = self.process.stdout.readline()
            output += self.greeting
            assert self.greeting, f"the server ended: {output}"
        self.url = self.greeting.split()[-1]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()

    def new_output(self) -> str:
        """Return what it has written since the last call, at most 64 KiB."""
        pipe = self.process.stdout.fileno()
        os.set_blocking(pipe, False)
        try:
            return os.read(pipe, 2**16).decode(errors="replace")
        except BlockingIOError:
            return ""

    @property
    def engine_pid(self) -> int:
        """
        Return the pid of the child in which multiprocessing runs code (another child tracks
        resources).
        """
        command = ["pgrep", "-P", str(self.process.pid), "-f", "spawn_main"]
        return int(subprocess.check_output(command))
