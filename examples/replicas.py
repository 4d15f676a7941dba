"""
Several servers on one machine behind one address. Each server has a GPU of its own or, without
GPUs, its share of the cores. A router, smg, runs in front of them. It sends prompts with a common
prefix to the same server, which then finds the prefix in its cache.

    pip install smg
    python examples/replicas.py --model DIR --replicas 2    # and serve.py flags: --port ..

The servers listen on the ports after the router's, on this machine only. If a server dies, it is
restarted. The streams of that server end with an error event, and new requests go to the other
servers. SIGTERM and Ctrl-C let running requests finish; a second signal ends them. If this process
is killed with kill -9, the servers and the router keep running.

The router does not forward the page, /events, /tokenize, /metrics, requests without `model`, or
prompts given as token ids. Use a server's own port for these. smg validates requests itself, with
its own error messages, and has its own metrics on the port after the last server's. It does not
check Host or Origin, and shows /v1/models and /engine_metrics without a key. So set a key if a
browser runs on this machine.

To use servers on several machines, start serve.py on each machine with --host and --api-key-file.
Then start the router by hand; it listens on 127.0.0.1:30000. Give it one of the keys, and another
secret that allows adding and removing servers:

    smg launch --host 127.0.0.1 --worker-urls http://A:8000 http://B:8000 --policy cache_aware \\
        --api-key KEY --control-plane-api-keys me:me:admin:SECRET --health-check-interval-secs 1 \\
        --load-monitor-interval 1 --cb-timeout-duration-secs 1 --prometheus-host 127.0.0.1
"""

import argparse
import os
import secrets
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from time import sleep
from urllib.request import urlopen

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/.."
    from common import end_with_one_line

    end_with_one_line()

from common import positive
from flags import parse_args
from serve import api_keys, listen, terminate_on_hang_up
from server.gate import base_url

# in a session of its own, so that Ctrl-C at the terminal does not reach the process
start = partial(Popen, stdout=DEVNULL, start_new_session=True)


def shares_of_the_machine(replicas: int, device: str | None) -> list[str]:
    """
    Return an environment variable for each server, which assigns the server a GPU or a number of
    threads. Exits if there are too few GPUs.
    """
    import torch

    count = 0 if device == "cpu" else torch.cuda.device_count()
    if not count:
        threads = max(1, torch.get_num_threads() // replicas)
        return [f"OMP_NUM_THREADS={threads}"] * replicas
    if count < replicas:
        sys.exit(f"--replicas {replicas}: each needs a GPU of its own, but there are {count}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else range(count)
    return [f"CUDA_VISIBLE_DEVICES={gpu}" for gpu in gpus]


def router_command(args, keys: list[str], ports: range) -> list[str]:
    """
    Return the command that starts smg in front of the servers at these ports. Exits if smg is not
    installed.
    """
    # look next to this Python first, because its environment may not be active
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    smg = shutil.which("smg", path=search_path)
    if not smg:
        sys.exit("the router smg is not installed: pip install smg")
    options = "--policy cache_aware --log-level error"
    options += f" --prometheus-host 127.0.0.1 --prometheus-port {ports.stop}"
    # notice quickly when a server ends or comes back, and how busy each server is
    options += " --health-check-interval-secs 1 --health-check-endpoint /readyz"
    options += " --cb-timeout-duration-secs 1 --load-monitor-interval 1"
    # wait longer than the servers, so that their errors for the requests they cut off get through
    options += f" --shutdown-grace-period-secs {args.drain_seconds + 3:.0f}"
    # a random secret, so that clients cannot add or remove servers
    options += f" --control-plane-api-keys nobody:nobody:admin:{secrets.token_hex()}"
    command = [smg, "launch", *options.split(), "--worker-urls"]
    command += [f"http://127.0.0.1:{port}" for port in ports]
    for number, key in enumerate(keys):
        # smg itself uses the first key to ask the servers for their load
        command.append(f"--tenant-api-key={number}:{key}" if number else f"--api-key={key}")
    return [*command, "--host", args.host, "--port", str(args.port)]


def wait_until_ready(process: Popen, url: str):
    """Wait until the URL responds. If the process ends first, exit; it has printed the reason."""
    while process.poll() is None:
        try:
            return urlopen(url, timeout=5).close()
        except OSError:  # the server is not listening yet, or is still loading
            sleep(0.1)
    sys.exit(1)


def drain(processes: list[Popen]):
    """
    Let all processes finish their requests but accept no new ones. A second signal kills them.
    """
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()  # after this, its port is free


def main():
    parser = argparse.ArgumentParser(epilog="All other flags are passed to serve.py.")
    parser.add_argument("--replicas", type=positive, default=2, help="servers (default: 2)")
    options, flags = parser.parse_known_args()
    args = parse_args(flags)
    if args.record or args.prompt or args.chat:
        sys.exit("--record, --prompt and --chat only work with one server: leave them out")
    keys = api_keys(args)
    with listen(args, keys) as sock:
        url = base_url(sock)
        args.host, args.port = sock.getsockname()[:2]  # resolves a host name and port 0
    os.environ["no_proxy"] = f"127.0.0.1,{args.host}"
    ports = range(args.port + 1, args.port + 1 + options.replicas)
    router = router_command(args, keys, ports)  # may exit, so before torch is loaded (seconds)
    serve = [sys.executable, f"{sys.path[0]}/serve.py", *flags, "--host", "127.0.0.1", "--port"]
    shares = shares_of_the_machine(options.replicas, args.device)
    commands = [["env", shares[i], *serve, str(port)] for i, port in enumerate(ports)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
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
            sleep(1)  # so that a process that cannot start does not keep a core busy
            for i, process in enumerate(processes):
                if process.poll() is not None:
                    print("ended, restarting: port", commands[i][-1], file=sys.stderr)
                    processes[i] = start(commands[i])
    finally:
        drain(processes)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:  # about the API keys, for example
        sys.exit(error)
