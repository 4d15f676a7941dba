"""
Several servers behind smg, as examples/replicas.py starts them. smg is one of the programs that
conftest.py installs.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, partialmethod

import httpx
import pytest
import torch
from processes import ROOT, wait_until

import serve
from examples.replicas import main, router_command, shares_of_the_machine, wait_until_ready
from tests.traces import Reply

KEY = "alpha"  # for servers that require one
get = partial(httpx.get, timeout=30, headers={"Authorization": f"Bearer {KEY}"})
slow = pytest.mark.slow


# --------------------------------------------------------------------------------------------------
# Servers, a router, calls


def are_free(first: int) -> bool:
    """Return True if a router's four ports are free."""
    for port in range(first, first + 4):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
    return True


class Replicas:
    """Two servers and their router, of the programs in `bin`, ready. They use no GPU."""

    def __init__(self, bin, checkpoint, *flags):
        # each test process has its own range
        places = range(20_000 + os.getpid() % 3_000 * 4, 65_000, 4)
        self.port = next(filter(are_free, places))
        self.url, *self.servers = (f"http://127.0.0.1:{self.port + i}" for i in range(3))
        command = [sys.executable, ROOT / "examples/replicas.py", "--model", checkpoint]
        command += ["--port", str(self.port), "--no-access-log", "--check", *flags]
        own = {"PATH": f"{bin}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        options = {"env": os.environ | own, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **options)
        assert self.process.stdout.readline().split()[-1] == self.url
        self.ask = partial(ask, self.url, str(checkpoint))
        self.ask_one = partial(ask, self.servers[0], str(checkpoint))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.terminate()
        self.process.wait(60)

    def pid(self, number: int) -> int:
        """Return the pid of server 0 or 1."""
        pattern = f"serve.py.*--port {self.port + 1 + number}$"
        found = subprocess.run(["pgrep", "-f", "--", pattern], capture_output=True, text=True)
        return int(found.stdout)

    def metric(self, name: str) -> list[int]:
        """Return this metric of each server."""
        texts = [get(f"{server}/metrics").text for server in self.servers]
        return [int(float(re.search(rf"\n{name}\S* (\S+)", text)[1])) for text in texts]

    # the choices being computed, and those of which any token was sent
    running = partialmethod(metric, "vllm:num_requests_running")
    begun = partialmethod(metric, "vllm:time_to_first_token_seconds_count")

    def is_ready(self, number: int) -> bool:
        with suppress(httpx.HTTPError):
            return get(f"{self.servers[number]}/readyz").is_success
        return False


def ask(url: str, model: str, key: str = KEY, **fields) -> Reply:
    body = {"model": model, "ignore_eos": True, "logprobs": 0} | fields
    body |= {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    headers = {"Authorization": f"Bearer {key}"}
    reply = Reply()
    reply.read(httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=200))
    return reply


def calls(count: int, max_tokens: int) -> list[dict]:
    """
    Return calls of 60 different kinds, repeated. Some prompts begin alike; every other is a stream.
    """
    prompts = [f"def {'call' * (i % 5)}_{i}(self, " for i in range(60)]
    fields = {"max_tokens": max_tokens, "temperature": 1.0}
    return [
        {"prompt": prompts[i % 60], "seed": i % 60, "stream": i % 2 > 0, **fields}
        for i in range(count)
    ]


def ask_all(ask, calls: list[dict], threads: int = 16) -> list[Reply]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda call: ask(**call), calls))


# --------------------------------------------------------------------------------------------------
# Starting


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--replicas 0", "argument --replicas: "),
        ("--replicates 2", "unrecognized arguments: --replicates\n"),
        ("--record x", "only work with one server: leave them out"),
        ("--api-key-file nowhere", "No such file or directory: 'nowhere'"),
        ("--host 0.0.0.0", "opens the model to other machines"),
        ("", "the router smg is not installed: pip install smg"),
    ],
)
def test_what_cannot_start_says_why(flags, message, monkeypatch, capsys):
    """It says so before a model is loaded."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["replicas.py", "--port", "0", *flags.split()])
    with pytest.raises((SystemExit, OSError, ValueError)) as refusal:
        main()
    assert message in f"{refusal.value}{capsys.readouterr().err}"


def test_the_router_beside_this_python_is_found(tmp_path, monkeypatch):
    """
    Previously `.venv/bin/python examples/replicas.py`, without activation, said smg was not
    installed.
    """
    smg = tmp_path / "smg"
    smg.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    args = serve.parse_args(["--port", "0"])
    assert router_command(args, [], range(1, 3))[:2] == [str(smg), "launch"]


def test_each_server_has_its_share(monkeypatch):
    """Each gets a GPU of those that may be used or, if there is none, a share of the threads."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert shares_of_the_machine(2, None) == ["OMP_NUM_THREADS=4"] * 2
    assert shares_of_the_machine(10, None) == ["OMP_NUM_THREADS=1"] * 10
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert shares_of_the_machine(2, "cpu") == ["OMP_NUM_THREADS=4"] * 2
    gpu = "CUDA_VISIBLE_DEVICES="
    assert shares_of_the_machine(2, None) == [f"{gpu}0", f"{gpu}1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    assert shares_of_the_machine(2, None) == [f"{gpu}3", f"{gpu}GPU-7"]
    with pytest.raises(SystemExit, match="3: each needs a GPU of its own, but there are 2"):
        shares_of_the_machine(3, None)


def test_a_server_that_cannot_start_ends_all():
    """It has already said why."""
    with subprocess.Popen("false") as server, pytest.raises(SystemExit):
        wait_until_ready(server, "http://127.0.0.1:9")


# --------------------------------------------------------------------------------------------------
# Requests


@slow
def test_two_servers_answer_as_one_and_finish_what_runs(bin, checkpoint, tmp_path):
    """Each key has its own prefix hits, and no process is left."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\nbeta\n")
    keys.chmod(0o600)
    with Replicas(bin, checkpoint, "--api-key-file", str(keys)) as replicas:
        answers = ask_all(replicas.ask, calls(60, 24))
        assert min(replicas.begun()) > 0
        alone = ask_all(replicas.ask_one, calls(60, 24))
        assert [answer.error for answer in answers] == [""] * 60
        assert [answer.text for answer in answers] == [answer.text for answer in alone]
        call = {"prompt": "def forward(self, x):\n" * 12, "max_tokens": 2, "temperature": 0}
        asked = [replicas.ask(key=key, **call) for key in (KEY, KEY, "beta", "gamma")]
        assert [answer.cached > 0 for answer in asked] == [False, True, False, False]
        assert asked[-1].status == 401
        pids = [replicas.pid(0), replicas.pid(1)]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask_all, replicas.ask, calls(8, 900))
            wait_until(lambda: sum(replicas.begun()) == 60 + 60 + 3 + 8)
            replicas.process.send_signal(signal.SIGHUP)
            answers = asked.result()
        assert [answer.error for answer in answers] == [""] * 8
        assert replicas.process.wait(60) == 0
        assert are_free(replicas.port)
        left = ["pgrep", "-s", ",".join(map(str, pids))]  # their sessions, with their engines
        wait_until(lambda: not subprocess.run(left, capture_output=True).stdout)


@slow
def test_a_server_that_is_killed_loses_no_request(bin, checkpoint):
    """
    There are 500 requests. Those that the killed server had not begun to answer go to the other
    one. A stream that it had begun ends with an error event. Then the server comes back. Finally
    two signals end everything, whatever is running.
    """
    with Replicas(bin, checkpoint) as replicas, ThreadPoolExecutor(3) as pool:
        alone = ask_all(replicas.ask_one, calls(60, 16))
        long = {"prompt": "of nobody else", "n": 32, "max_tokens": 900, "stream": True}
        begun = pool.submit(replicas.ask, **long)
        wait_until(lambda: sum(replicas.running()) == 32)
        one = replicas.running().index(32)  # the server that got it
        pid = replicas.pid(one)
        asked = pool.submit(ask_all, replicas.ask, calls(500, 16))
        wait_until(lambda: replicas.running()[one] > 32)
        os.kill(pid, signal.SIGKILL)
        answers = asked.result()
        assert begun.result().error
        failed = [i for i, answer in enumerate(answers) if answer.error]
        assert all(i % 2 for i in failed) and len(failed) <= 16  # streams
        for i, answer in enumerate(answers):
            whole = alone[i % 60].text
            assert whole.startswith(answer.text) if i in failed else answer.text == whole
        wait_until(lambda: replicas.is_ready(one), 0.1)
        assert replicas.pid(one) != pid

        def is_asked() -> bool:
            """
            Return True once the router trusts the new server. The prompts are new, so no cache
            attracts them.
            """
            new = [{"prompt": str(random.random()), "max_tokens": 8} for _ in range(60)]
            ask_all(replicas.ask, new)
            return replicas.begun()[one] > 0

        wait_until(is_asked, 0.3)
        cut = pool.submit(replicas.ask, **long)
        wait_until(lambda: sum(replicas.running()) == 32)
        replicas.process.terminate()
        wait_until(lambda: not replicas.is_ready(0))  # it drains
        replicas.process.terminate()
        assert replicas.process.wait(60) == 0
        assert cut.exception() or cut.result().error
        assert are_free(replicas.port)


@slow
def test_prompts_that_begin_alike_go_to_one_cache(bin, checkpoint):
    """
    There are 400 requests with 16 prefixes of 96 tokens. The router's choice of a server for a new
    prefix depends on chance. But the prefix must be computed there only, so almost all are computed
    once. Round robin computes each one twice.
    """
    rng = random.Random(0)
    # letters of two bytes, each of which is a token
    prefixes = ["".join(rng.choices("абвгдежз", k=48)) for _ in range(16)]
    asked = [{"prompt": f"{rng.choice(prefixes)}{i:04}", "max_tokens": 1} for i in range(400)]
    with Replicas(bin, checkpoint) as replicas:
        # in sequence, because a busy server's prefixes may go to the other one
        answers = ask_all(replicas.ask, asked, threads=1)
    num_computed = [answer.cached for answer in answers].count(0)
    assert 16 <= num_computed <= 20
