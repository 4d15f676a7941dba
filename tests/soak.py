"""
Half an hour of everything at once against a real server: clients that come, go, hang up, send
nonsense.

    python tests/soak.py --model out/stdlib --minutes 30

Exits with 1 on a 500, on blocks still held when all is quiet, or when either process grew by more
than 20 MB after the first tenth of the time (at least --warm-up, while caches fill). The last line
is JSON. test_soak.py runs half a minute.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
NONSENSE = b"""{
[]
{"prompt": 1}
{"prompt": "a", "n": 1e9}
{"prompt": "\xff"}
{"temperature": NaN}""".splitlines()
TEXTS = ["def ", "import os\n", "class A:\n    ", "return x", " # ", "\u20ac"]
EXTRAS = """{"n": 3}
{"logprobs": 5}
{"logprobs": 1, "echo": true}
{"stop": ["\\n\\n", "return"]}
{"top_p": 0.9}
{"presence_penalty": 1}
{"logit_bias": {"5": 3}}
{"seed": 7}
{"stream": true}
{"stream": true}
{}""".splitlines()
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def memory(pid: int) -> float:
    """Resident memory of a process, in MB (Linux)."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1000


def children(pid: int) -> list[int]:
    """The engine's process is the child of the server with the most memory."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return sorted(map(int, text.split()), key=memory, reverse=True)


def a_request(rng: random.Random) -> dict:
    text = "".join(rng.choices(TEXTS, k=rng.randint(1, 40)))
    body = {"prompt": rng.choice([text, [text, "x"]]), "max_tokens": rng.randint(1, 100)}
    return body | {"temperature": rng.choice([0, 1])} | json.loads(rng.choice(EXTRAS))


async def client(url: str, rng: random.Random, until: float, counts: Counter):
    """One client after the other, each with a connection pool of its own."""
    while time.monotonic() < until:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            for _ in range(rng.randint(1, 30)):
                if time.monotonic() > until:
                    break
                try:
                    await one_call(http, rng, counts)
                except httpx.HTTPError as error:
                    counts[type(error).__name__] += 1


async def one_call(http: httpx.AsyncClient, rng: random.Random, counts: Counter):
    kind = rng.random()
    body = a_request(rng)
    if kind < 0.15:  # hang up, in whatever state
        try:
            async with asyncio.timeout(rng.random() * 0.3):
                await http.post("/v1/completions", json=body)
        except TimeoutError:
            counts["hung up"] += 1
    elif kind < 0.3:
        headers = {"Content-Type": "application/json"}
        nonsense = rng.choice(NONSENSE)
        response = await http.post("/v1/completions", content=nonsense, headers=headers)
        counts[response.status_code] += 1
    else:
        response = await http.post("/v1/completions", json=body)
        counts[response.status_code] += 1
        if response.status_code == 200 and body.get("stream"):
            is_whole = response.text.endswith("data: [DONE]\n\n")
            counts["whole streams" if is_whole else "broken streams"] += 1


async def soak(url: str, pid: int, args) -> dict:
    started = time.monotonic()
    until = started + 60 * args.minutes
    warm = started + 60 * max(args.warm_up, args.minutes / 10)
    counts: Counter = Counter()
    samples = []
    async with asyncio.TaskGroup() as clients:
        for i in range(args.clients):
            clients.create_task(client(url, random.Random(i), until, counts))
        while time.monotonic() < until:
            await asyncio.sleep(5)
            if time.monotonic() > warm:
                samples.append((memory(pid), memory(children(pid)[0])))
    await asyncio.sleep(1)
    metrics = httpx.get(f"{url}/metrics").text
    names = (*GAUGES, "generation_tokens_total", "num_preemptions_total")
    idle = {name: float(re.search(rf"vllm:{name}{{.*?}} (\S+)", metrics)[1]) for name in names}
    fifth = len(samples) // 5 or 1  # compare the means of the first and of the last fifth
    before = [statistics.mean(values) for values in zip(*samples[:fifth], strict=True)]
    after = [statistics.mean(values) for values in zip(*samples[-fifth:], strict=True)]
    growth = [round(b - a, 1) for a, b in zip(before, after, strict=True)]
    return {
        "minutes": args.minutes,
        "counts": {str(name): count for name, count in counts.items()},
        "idle": idle,
        "MB at the end": samples[-1],
        "growth in MB, server and engine": growth,
    }


def problems(result: dict, most_growth: float) -> list[str]:
    """What must not have happened, of what `soak` measured."""
    counts, idle = result["counts"], result["idle"]
    fine = ("200", "400", "429", "hung up", "whole streams")
    wrong = [f"{count} times {name}" for name, count in counts.items() if name not in fine]
    wrong += [f"{name} is {idle[name]} when all is quiet" for name in GAUGES if idle[name]]
    growth = result["growth in MB, server and engine"]
    return wrong + [f"grown by {megabytes} MB" for megabytes in growth if megabytes > most_growth]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="out/stdlib")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--warm-up", type=float, default=1.0, help="minutes before memory counts")
    parser.add_argument("--growth", type=float, default=20.0, help="MB by which a process may grow")
    args = parser.parse_args()
    flags = "--port 0 --no-access-log --check --kv-blocks 60"  # so few that requests are preempted
    command = [sys.executable, "serve.py", "--model", args.model, *flags.split()]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            result = asyncio.run(soak(url, server.pid, args))
        finally:
            server.terminate()
    print(json.dumps(result))
    wrong = problems(result, args.growth)
    print(*wrong, sep="\n", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
