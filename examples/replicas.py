"""
Several servers on one machine behind one address: one for each GPU, or for its share of the cores.
In front of them stands a router, smg, which sends prompts that begin alike to the same server,
whose prefix cache then has them.

    pip install smg
    python examples/replicas.py --model DIR --replicas 2    # and flags of serve.py: --port ..

The servers listen at the ports after the router's, on this machine only. One that dies is started
again: a stream that it had begun ends with an error event, and other requests go to the others.
SIGTERM and Ctrl-C let running requests finish; a second one ends them. Not through the router, but
at each server's own port: the page, /events, /tokenize, /metrics (smg has its own metrics, at the
port after the last server's), and prompts as token ids. smg checks neither Host nor Origin: where a
browser runs, set a key. Servers on several machines need only the router: start serve.py on each
with a key and an address that the router reaches, then

    smg launch --worker-urls http://A:8000 http://B:8000 --policy cache_aware --api-key KEY \\
        --control-plane-api-keys me:me:admin:OTHER_KEY --prometheus-host 127.0.0.1
"""

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import end_with_one_line, positive
from flags import parse_args
from serve import api_keys, listen, terminate_on_hang_up
from server.gate import base_url

if __name__ == "__main__":
    end_with_one_line()

RESTART_SECONDS = 1.0  # before a restart: what cannot start must not keep a core busy
# in a session of its own, where Ctrl-C at the terminal does not reach it
start = partial(subprocess.Popen, stdout=subprocess.DEVNULL, start_new_session=True)


def shares_of_the_machine(replicas: int, device: str | None) -> list[str]:
    """A variable for each server: a GPU, or a number of threads. Exits where GPUs are too few."""
    import torch

    count = 0 if device == "cpu" else torch.cuda.device_count()
    if count == 0:
        threads = max(1, torch.get_num_threads() // replicas)
        return [f"OMP_NUM_THREADS={threads}"] * replicas
    if count < replicas:
        sys.exit(f"--replicas {replicas}: each wants a GPU of its own, and there are {count}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else range(count)
    return [f"CUDA_VISIBLE_DEVICES={gpu}" for gpu in gpus]


def router_command(args: Namespace, ports: range) -> list[str]:
    """Of smg in front of the servers at these ports. Exits where it is not installed."""
    smg = shutil.which("smg")
    if smg is None:
        sys.exit("the router smg is not installed: pip install smg")
    options = "--policy cache_aware --log-level error"
    options += f" --prometheus-host 127.0.0.1 --prometheus-port {ports.stop}"
    # a server that ended or is back, and the load of each, is soon known
    options += " --health-check-interval-secs 1 --health-check-endpoint /readyz"
    options += " --cb-timeout-duration-secs 1 --load-monitor-interval 1"
    options += f" --shutdown-grace-period-secs {args.drain_seconds:.0f}"
    # nobody may add or remove servers
    options += f" --control-plane-api-keys nobody:nobody:admin:{secrets.token_hex()}"
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [smg, "launch", "--worker-urls", *urls, *options.split()]
    for number, key in enumerate(api_keys(args)):
        # with the first, smg itself asks the servers for their load
        command += ["--tenant-api-key", f"{number}:{key}"] if number else ["--api-key", key]
    return [*command, "--host", args.host, "--port", str(args.port)]


def wait_until_ready(process: subprocess.Popen, url: str):
    """Exits where the process ends before; it has printed why."""
    while process.poll() is None:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:  # it does not listen yet, or it loads
            time.sleep(0.1)
    sys.exit(1)


def drain(processes: list[subprocess.Popen]):
    """Let the router finish its requests, then end the servers. A second signal ends all now."""
    try:
        for process in reversed(processes):
            process.terminate()
            process.wait()
    finally:
        for process in processes:
            process.kill()


def main():
    about = "Several servers behind a router. All other flags are those of serve.py."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--replicas", type=positive, default=2, help="how many (default: 2)")
    options, flags = parser.parse_known_args()
    args = parse_args(flags)
    with listen(args) as sock:
        url = base_url(sock)
        args.port = sock.getsockname()[1]  # that of --port 0
    ports = range(args.port + 1, args.port + 1 + options.replicas)
    router = router_command(args, ports)
    serve = [sys.executable, f"{sys.path[0]}/serve.py", *flags, "--host", "127.0.0.1", "--port"]
    shares = shares_of_the_machine(options.replicas, args.device)
    commands = [["env", shares[i], *serve, str(port)] for i, port in enumerate(ports)]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    terminate_on_hang_up()
    processes = []
    try:
        processes += map(start, commands)
        for process, port in zip(processes, ports, strict=True):
            wait_until_ready(process, f"http://127.0.0.1:{port}/readyz")
        commands.append(router)
        processes.append(start(router))
        wait_until_ready(processes[-1], f"{url}/readiness")
        print(f"serving {args.model} at {url}", flush=True)
        while True:
            time.sleep(RESTART_SECONDS)
            for i, process in enumerate(processes):
                if process.poll() is not None:
                    port = commands[i][-1]
                    print(f"port {port}: its process ended, starting it again", file=sys.stderr)
                    processes[i] = start(commands[i])
    finally:
        drain(processes)


if __name__ == "__main__":
    main()
