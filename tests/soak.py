"""
Half an hour of everything at once against a real server: clients that come, go, hang up, send
nonsense.

    python tests/soak.py --model out/stdlib --minutes 30

Exits with 1 on a 500, on blocks still held when all is quiet, or when either process grew by more
than --growth MB after the first tenth of the time, while caches fill. The last line is JSON.
test_soak.py runs half a minute.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
NUM_CLIENTS = 24
JSON = {"Content-Type": "application/json"}
NONSENSE = [b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "a", "n": 1e9}', b'{"prompt": "\xff"}']
TEXTS = ["def ", "import os\n", "class A:\n    ", "return x", " # ", "\u20ac"]
EXTRAS = [
    {"n": 3},
    {"logprobs": 5},
    {"logprobs": 1, "echo": True},
    {"stop": ["\n\n", "return"]},
    {"top_p": 0.9, "seed": 7},
    {"presence_penalty": 1, "logit_bias": {"5": 3}},
    {"stream": True},
    {"stream": True},
    {},
]
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
FINE = ("200", "400", "429", "hung up", "whole streams")


def memory(pid: int) -> float:
    """Resident memory of a process, in MB (Linux)."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1000


def memories(pid: int) -> tuple[float, float]:
    """Of the server and of the engine, its child with the most memory."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return memory(pid), max(memory(int(child)) for child in children)


def a_request(rng: random.Random) -> dict:
    text = "".join(rng.choices(TEXTS, k=rng.randint(1, 40)))
    prompt = rng.choice([text, [text, "x"]])
    body = {"prompt": prompt, "max_tokens": rng.randint(1, 100), "temperature": rng.choice([0, 1])}
    return body | rng.choice(EXTRAS)


async def client(url: str, rng: random.Random, until: float, counts: Counter):
    """One client after the other, each with a connection pool of its own."""
    while time.monotonic() < until:
        async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=120) as http:
            for _ in range(rng.randint(1, 30)):
                if time.monotonic() < until:
                    counts.update(await one_call(http, rng))


async def one_call(http: httpx.AsyncClient, rng: random.Random) -> list[str]:
    """What came of it, to be counted."""
    kind = rng.random()
    body = a_request(rng)
    content = rng.choice(NONSENSE) if kind > 0.85 else json.dumps(body).encode()
    try:
        async with asyncio.timeout(rng.random() * 0.3 if kind < 0.15 else None):
            response = await http.post("/completions", content=content, headers=JSON)
    except TimeoutError:
        return ["hung up"]
    except httpx.HTTPError as error:
        return [type(error).__name__]
    outcome = [str(response.status_code)]
    if response.headers["content-type"].startswith("text/event-stream"):
        is_whole = response.text.endswith("data: [DONE]\n\n")
        outcome.append("whole streams" if is_whole else "broken streams")
    return outcome


async def soak(url: str, pid: int, minutes: float) -> dict:
    started = time.monotonic()
    until = started + 60 * minutes
    counts: Counter = Counter()
    samples = []
    async with asyncio.TaskGroup() as clients:
        for i in range(NUM_CLIENTS):
            clients.create_task(client(url, random.Random(i), until, counts))
        while time.monotonic() < until:
            await asyncio.sleep(6 * minutes)
            samples.append(memories(pid))
    await asyncio.sleep(1)
    metrics = httpx.get(f"{url}/metrics").text
    idle = {name: float(re.search(rf"vllm:{name}{{.*?}} (\S+)", metrics)[1]) for name in GAUGES}
    growth = [after - before for before, after in zip(samples[0], samples[-1], strict=True)]
    return {"counts": counts, "idle": idle, "growth in MB": growth}


def problems(result: dict, most_growth: float) -> list[str]:
    """What must not have happened, of what `soak` measured."""
    counts, idle = result["counts"], result["idle"]
    wrong = [f"{count} times {name}" for name, count in counts.items() if name not in FINE]
    wrong += [f"{name} is {value} when all is quiet" for name, value in idle.items() if value]
    growth = result["growth in MB"]
    return wrong + [f"grown by {megabytes} MB" for megabytes in growth if megabytes > most_growth]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default="out/stdlib")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--growth", type=float, default=20.0, help="MB by which a process may grow")
    args = parser.parse_args()
    flags = "--port 0 --no-access-log --check --kv-blocks 60"  # so few that requests are preempted
    command = [sys.executable, "serve.py", "--model", args.model, *flags.split()]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            result = asyncio.run(soak(url, server.pid, args.minutes))
        finally:
            server.terminate()
    print(json.dumps(result))
    wrong = problems(result, args.growth)
    print(*wrong, sep="\n", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
