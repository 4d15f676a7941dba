"""
examples/ray_serve.py on a real Ray cluster on this machine: two replicas of a server, each with its
own engine. There is only one test, because a cluster takes half a minute to start. The first checks
need both replicas whole; then their engines are killed; finally the cluster is shut down.
"""

import os
import signal
import socket
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from processes import ROOT, wait_until

pytestmark = pytest.mark.slow

# Does what `serve run` does, except for the port, the number of cores, and how it ends.
RUN = """
import sys
import ray
from ray import serve
from examples.ray_serve import app

port, *options = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"port": int(port)})
serve.run(app(dict(option.split("=") for option in options)))
print("ready", flush=True)
sys.stdin.readline()
serve.delete("default")
print("deleted", flush=True)
sys.stdin.readline()
serve.shutdown()
"""
KEY = "sesame"
PROMPTS = ["def ", "import torch\n", "class Block:\n    ", "    return", "# blocks ", "x"]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}


class Cluster:
    """A Ray cluster with `app`, in its own process and with its own folders."""

    def __init__(self, bin: Path, folder: str, *options: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        own = {"HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(ROOT), "PAGEDGPT_API_KEY": KEY}
        own |= {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
        own |= {"RAY_worker_niceness": "0"}  # else another test takes all of its time
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.log = Path(folder, "log")
        command = [bin / "python", "-c", RUN, str(port), *options]
        environment = os.environ | own
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, **pipes)
        self.read_until("ready")
        headers = {"Authorization": f"Bearer {KEY}"}
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=30)

    def read_until(self, word: str):
        timer = threading.Timer(600, self.process.kill)
        timer.start()
        lines = (line.strip() for line in self.process.stdout)
        found = word in lines
        timer.cancel()
        if not found:
            pytest.fail(f"Ray ended: {self.log.read_text()[-3000:]}")

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def descendants(self) -> dict[int, str]:
        """Return pid -> command line of all its child processes, at any depth."""
        listing = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True)
        rows = [line.split(None, 2) for line in listing.stdout.splitlines()[1:]]
        found = {self.process.pid: ""}
        for _ in range(5):  # parents may come later in the list
            found |= {int(pid): args for pid, parent, args in rows if int(parent) in found}
        return found

    def engines(self) -> list[int]:
        return sorted(pid for pid, args in self.descendants().items() if "spawn_main" in args)

    def complete(self, **fields) -> httpx.Response:
        return self.http.post("/v1/completions", json=GREEDY | fields)


def test_two_replicas_on_a_cluster(bin, checkpoint):
    options = f"model={checkpoint}", "replicas=2", "drain-seconds=120"
    # paths of its sockets may have at most 107 bytes, and pytest's own folders are too deep
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cluster = Cluster(bin, folder, *options)
        try:
            check_answers(cluster)
            check_gate(cluster)
            check_killed_engines(cluster)
            check_end(cluster)
        finally:
            left = cluster.descendants()
            cluster.process.kill()
            cluster.process.communicate()
            for pid in left:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)


def check_answers(cluster):
    """Check that concurrent calls each get the answer that they get alone."""

    def tokens(prompt: str) -> list[int]:
        return cluster.complete(prompt=prompt).json()["choices"][0]["token_ids"]

    alone = list(map(tokens, PROMPTS))
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(tokens, PROMPTS * 4)) == alone * 4
    assert len(set(map(str, alone))) == len(PROMPTS)


def check_gate(cluster):
    """
    Check that the gate sees through Ray's proxy: who calls, from which page, and the size of a
    body.
    """
    assert httpx.get(f"{cluster.url}/v1/models").status_code == 401
    for origin, status in (cluster.url, 200), ("http://evil", 403):
        answer = cluster.http.get("/v1/models", headers={"Origin": origin})
        assert answer.status_code == status
    assert cluster.complete(prompt="x" * 5_000_000).status_code == 413
    answer = cluster.http.get("/readyz", headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def check_killed_engines(cluster):
    """
    Kill an engine twice. First its replica restarts it, then Ray restarts the replica. Meanwhile
    the other replica answers calls, or they are refused; none waits.
    """
    victim, other = cluster.engines()
    for _ in range(2):
        os.kill(victim, signal.SIGKILL)
        statuses = []

        def is_whole(statuses=statuses):
            statuses.append(cluster.complete(prompt="def ").status_code)
            return len(statuses) > 20 and statuses[-20:] == [200] * 20

        wait_until(is_whole, pause=0.2)
        assert set(statuses) <= {200, 500, 503}, statuses
        wait_until(lambda: len(cluster.engines()) == 2)
        (victim,) = set(cluster.engines()) - {other}


def check_end(cluster):
    """Delete the application. Running calls are answered, and then no process is left."""
    body = GREEDY | {"prompt": "def ", "stream": True, "max_tokens": 900}
    with cluster.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        cluster.go_on()
        *_, last, done = filter(None, lines)
    assert '"finish_reason":"length"' in last and done == "data: [DONE]"
    cluster.read_until("deleted")
    assert not cluster.engines()
    processes = cluster.descendants()
    cluster.go_on()
    assert cluster.process.wait(60) == 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
