"""
Timed traces of valid requests against a real server, mutated for hours: a fuzzer, as GRIEF is one
(arXiv 2605.11202).

    python -m tests.traces --hours 8         # serve.py with tiny models, other settings every 20
                                             # traces
    python -m tests.traces --url URL         # a server or a router that runs, with a context of
                                             # 512 tokens or more, and with the keys sesame, simsim
    python -m tests.traces --replay FILE     # a fault again, from the file that it left

A trace is a list of requests: when each arrives, with which key, its fields, and after how many
seconds its client hangs up. SEEDS has the first ones. A trace that reached something new, by the
server's metrics, is kept, and mutated further. Every request is valid, so these are faults:

    crash       an answer that is neither a 200 nor the 429 of a full queue, or that ends early; a
                word in the server's log, which runs with --check: a broken invariant is one
    hang        no answer, /livez silent, or work and blocks left when all has ended
    slowdown    more than 10 times as long as the requests take alone, one after the other
    answer      not the one that the request gets alone, by its log-probabilities
    leak        prompt tokens found in the cache that this key and salt have not sent

A fault is written to out/traces and shrunk, which takes some minutes.
"""

import argparse
import asyncio
import contextlib
import copy
import itertools
import json
import random
import re
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

import httpx

from tests.http_draws import KEYS
from tests.processes import ROOT, Process
from tests.shrink import shrink
from tests.swarm import fewer
from training.corpus import bpe_tokenizer

OUT = ROOT / "out/traces"
MODELS = ["qwen3", "mistral"]  # all of mistral's layers have windows, so blocks are given back
CONTEXT = 512  # tokens of the models, and at least of the pool; a letter is a token
LONGEST = 480  # prompt and answer of a request
MOST_REQUESTS = 60  # of a trace
ROUND = 20  # traces against the same server
MOST_FAULTS = 10  # of a campaign
HANG = 120.0  # seconds without an answer
SILENCE = 5.0  # seconds for /livez, on a busy machine
TOLERANCE = 1e-3  # of log-probabilities
SHRINKING = 300.0  # seconds

# --------------------------------------------------------------------------------------------------
# Traces


def text(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=length))


def ask(at: float, prompt: str, max_tokens: int, key=0, abort_after=None, **fields) -> dict:
    """A request. `at` and `abort_after` are seconds: from the trace's start, and from `at`."""
    request = {"at": at, "key": key, "abort_after": abort_after, "prompt": prompt}
    return request | {"max_tokens": max_tokens, "seed": 1, "ignore_eos": True} | fields


def body_of(request: dict) -> dict:
    return {name: request[name] for name in request if name not in ("at", "key", "abort_after")}


TRUNK = text(0, 200)
SEEDS = {
    "fill and squeeze": [ask(0, text(i, 60), 200, priority=i % 3) for i in range(12)],
    "hang-ups": [ask(0, text(i, 50), 200, abort_after=i / 20, n=1 + i % 3) for i in range(20)],
    "shared prefixes": [ask(i / 10, TRUNK[: 10 * i] + text(i, 5), 20) for i in range(20)],
    "forks": [ask(i / 20, TRUNK[:50] + text(i, 9), 60, n=4, temperature=0.8) for i in range(9)],
    "flood": [ask(i / 20, TRUNK + text(i // 9, 99), 9, key=int(i % 9 > 0)) for i in range(45)],
    "burst": [ask(0, text(i, 10 + i), 20, stream=True) for i in range(40)],
    "long beside short": [ask(i / 20, text(i, [9, 400][i % 2]), 60 - i) for i in range(20)],
    "steady": [ask(i / 10, text(i, 30), 30) for i in range(20)],
}

DRAWS = {  # of the fields of a request
    "at": lambda rng: rng.uniform(0, 2),
    "key": lambda rng: rng.randrange(2),
    "abort_after": lambda rng: rng.choice([None, rng.expovariate(4), rng.expovariate(1)]),
    "prompt": lambda rng: text(rng.randrange(99), rng.choice([1, 40, rng.randint(1, 450)])),
    "max_tokens": lambda rng: rng.choice([1, rng.randint(1, 40), rng.randint(1, 300)]),
    "n": lambda rng: rng.randint(1, 4),
    "priority": lambda rng: rng.choice([-1000, -1, 0, 1, 1000]),
    "cache_salt": lambda rng: rng.choice([None, "pepper", "thyme"]),
    "seed": lambda rng: rng.randrange(2**32),
    "temperature": lambda rng: rng.choice([0, 0.5, 1, 1.5]),
    "top_p": lambda rng: rng.choice([0.5, 0.9, 1]),
    "top_k": lambda rng: rng.choice([0, 1, 5]),
    "frequency_penalty": lambda rng: rng.choice([0, 0.5, 2]),
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "stream": lambda rng: rng.random() < 0.5,
}
MUTATIONS = ["field"] * 6 + ["prefix", "prefix", "pace", "repeat", "leave out", "splice"]
SETTINGS = {
    "--block-size": [4, 8, 16, 16, 32],
    "--max-num-seqs": [2, 8, 16, 32],
    "--token-budget": [32, 64, 512],
    "--max-queue": [8, 64, 256],
    "--policy": ["fcfs", "priority", "sjf"],
    "--prefill-share": [0.0, 0.25, 0.9],
    "--http-workers": [1, 1, 2],
}
FIRST_SETTINGS = {"model": "qwen3", "--block-size": 16, "--kv-blocks": 48}  # of the seeds


def draw_settings(rng: random.Random) -> dict:
    """Flags of serve.py, with its model."""
    settings = {name: rng.choice(values) for name, values in SETTINGS.items()}
    pool = CONTEXT * rng.choice([2, 3, 4, 16]) // 2
    return settings | {
        "model": rng.choice(MODELS),
        "--kv-blocks": pool // settings["--block-size"],
    }


def some(rng: random.Random, requests: list[dict]) -> list[dict]:
    """One, a few or all up to the last."""
    start = rng.randrange(len(requests))
    return requests[start : start + rng.choice([1, 1, 5, MOST_REQUESTS])]


def mutate(rng: random.Random, requests: list[dict], other: list[dict]) -> list[dict]:
    """A new trace: `requests` after a few mutations, with parts of `other`."""
    for _ in range(rng.randint(1, 5)):
        requests, other = copy.deepcopy([requests, other])
        chosen = some(rng, requests)
        change = {}
        match rng.choice(MUTATIONS):
            case "field":
                name = rng.choice(list(DRAWS))
                change = {name: DRAWS[name](rng)}
            case "prefix":
                trunk = rng.choice(requests + other)["prompt"]
                change = {"prompt": trunk[: rng.randint(0, len(trunk))] + rng.choice("xyz")}
            case "pace":
                pace = rng.choice([0, 0.3, 3])
                for request in requests:
                    request["at"] = min(3.0, pace * request["at"])
            case "repeat":
                requests += copy.deepcopy(chosen)
                change = {"at": rng.uniform(0, 2)}
            case "leave out":
                requests = [request for request in requests if request not in chosen] or chosen
            case "splice":
                requests += some(rng, other)
        for request in chosen:
            request |= change
    for request in requests:
        request["prompt"] = request["prompt"][: LONGEST - request["max_tokens"]]
    return requests[:MOST_REQUESTS]


def simpler(request: dict) -> Iterator[dict]:
    """Proposals for the shrinking."""
    plain = ask(0, request["prompt"], request["max_tokens"])
    if request != plain:
        yield plain
    for length in fewer(request["max_tokens"]):
        yield request | {"max_tokens": length}


# --------------------------------------------------------------------------------------------------
# Answers, and what is wrong with them


@dataclass
class Choice:
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Reply:
    """What a client got."""

    status: int | None = None  # None: nothing, or it hung up
    error: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    cached: int = 0  # tokens of the prompt
    seconds: float = 0.0

    def read(self, response: httpx.Response):
        """Raises ValueError or LookupError for what is no answer."""
        self.status = response.status_code
        if self.status != 200:
            is_full = self.status == 429 and "retry-after" in response.headers
            self.error = "" if is_full else response.text
            return
        events = re.findall("^data: (.*)$", response.text, re.MULTILINE)  # of a stream
        *events, last = events or [response.text, "[DONE]"]
        if last != "[DONE]":
            self.error = f"the stream ends with {last}"
        for chunk in map(json.loads, events):
            for part in chunk["choices"]:
                choice = self.choices.setdefault(part["index"], Choice())
                choice.tokens += part["logprobs"]["tokens"]
                choice.logprobs += part["logprobs"]["token_logprobs"]
                choice.finish_reason = part["finish_reason"]
            if chunk.get("usage"):
                self.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]


def wrong_answer(reply: Reply, alone: Reply) -> str:
    """
    How it differs from the answer given alone. Where tokens differ first, both must be as likely:
    in another batch sums are rounded otherwise, and what follows has no comparison.
    """
    if reply.choices.keys() != alone.choices.keys():
        return f"choices {sorted(reply.choices)}, alone {sorted(alone.choices)}"
    for index, right in alone.choices.items():
        choice = reply.choices[index]
        places = zip(choice.tokens, right.tokens, choice.logprobs, right.logprobs, strict=False)
        for i, (token, right_token, logprob, right_logprob) in enumerate(places):
            if abs(logprob - right_logprob) > TOLERANCE:
                scores = f"{token!r} {logprob:.4f}, alone {right_token!r} {right_logprob:.4f}"
                return f"choice {index}, token {i}: {scores}"
            if token != right_token:
                break
        else:
            ends = len(choice.tokens), choice.finish_reason
            right_ends = len(right.tokens), right.finish_reason
            if ends != right_ends:
                return f"choice {index} ends with {ends}, alone {right_ends}"
    return ""


def leak(request: dict, reply: Reply, sent: list[dict], block_size: int) -> str:
    """
    More found in the cache than this key and salt have put there: what it sent, and less than a
    block of answers, which may go on as the prompt does.
    """
    own = [other for other in sent if other is not request and realm(other) == realm(request)]
    prefixes = [commonprefix([request["prompt"], other["prompt"]]) for other in own]  # noqa: RUF071
    most = max(map(len, prefixes), default=0)
    is_possible = reply.cached < most + block_size if own else not reply.cached
    return "" if is_possible else f"{reply.cached} cached tokens, sent before were {most}"


def realm(request: dict) -> tuple:
    """Prefixes are shared within it."""
    return request["key"], request.get("cache_salt")


def is_slow(seconds: float, alone: float) -> bool:
    """One more second is a busy machine's."""
    return seconds > 10 * alone + 1


# --------------------------------------------------------------------------------------------------
# The replay of a trace

METRICS = {
    "preemptions": r"num_preemptions_total{.*} (\S+)",
    "prefix hits": r"prefix_cache_hits_total{.*} (\S+)",
    "hang-ups": r'request_success_total{.*"abort".*} (\S+)',
    "stops": r'request_success_total{.*"stop".*} (\S+)',
    "running": r"num_requests_running{.*} (\S+)",
    "waiting": r"num_requests_waiting{.*} (\S+)",
    "KV usage": r"kv_cache_usage_perc{.*} (\S+)",
}
LEVELS = ("running", "waiting", "KV usage")


class Server:
    """A server, what it was sent so far, and answers that it or one like it gave alone."""

    def __init__(self, url: str, alone: dict, process: Process | None = None, block_size: int = 16):
        self.url = url
        self.alone: dict[str, Reply] = alone
        self.process = process
        self.block_size = block_size
        self.sent: list[dict] = []
        models = httpx.get(f"{url}/v1/models", headers=bearer(0), timeout=30).json()
        self.model = models["data"][0]["id"]

    def play(self, requests: list[dict]) -> "Run":
        """A slow run is measured again before it counts as slow."""
        for _ in range(3):
            run = Run(self, requests)
            asyncio.run(run.play())
            seconds = run.seconds, run.alone_seconds
            if run.faults or not is_slow(*seconds):
                break
        else:
            run.faults.append(f"slowdown: {seconds[0]:.1f} s, alone {seconds[1]:.1f} s")
        if self.process and (words := self.process.new_output().strip()):
            run.faults.append(f"crash: the log says {words}")
        return run


def bearer(key: int) -> dict:
    return {"Authorization": f"Bearer {KEYS[key]}"}


class Run:
    """One replay."""

    def __init__(self, server: Server, requests: list[dict]):
        self.server = server
        self.requests = copy.deepcopy(requests)  # `leak` tells those of each run apart
        self.faults: list[str] = []
        self.counts = dict.fromkeys(METRICS, 0.0)  # how often, and the highest levels
        self.seconds = 0.0  # after the last arrival
        self.alone_seconds = 0.0

    async def play(self):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        options = {"limits": limits, "timeout": HANG, "verify": False}
        async with httpx.AsyncClient(base_url=self.server.url, **options) as self.client:
            before = await self.metrics()
            self.server.sent += self.requests
            watch = asyncio.create_task(self.watch())
            start = time.monotonic() + max(request["at"] for request in self.requests)
            replies = await asyncio.gather(*map(self.send, self.requests))
            self.seconds = time.monotonic() - start
            watch.cancel()
            after = await self.check_idle()
            for name in after.keys() - LEVELS:
                self.counts[name] = after[name] - before[name]
            for request, reply in zip(self.requests, replies, strict=True):
                if not self.faults:
                    await self.judge(request, reply)

    async def send(self, request: dict) -> Reply:
        await asyncio.sleep(request["at"])
        try:
            async with asyncio.timeout(request["abort_after"]):
                return await self.ask(request)
        except TimeoutError:
            return Reply()

    async def ask(self, request: dict) -> Reply:
        body = {"model": self.server.model, "logprobs": 0} | body_of(request)
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        reply = Reply()
        start = time.monotonic()
        try:
            headers = bearer(request["key"])
            response = await self.client.post("/v1/completions", json=body, headers=headers)
            reply.read(response)
        except (httpx.HTTPError, ValueError, LookupError) as error:
            reply.error = repr(error)
        reply.seconds = time.monotonic() - start
        return reply

    async def ask_alone(self, request: dict) -> Reply:
        """With a salt of its own: nothing is in the cache."""
        known = self.server.alone
        request = ask(0, "", 1) | body_of(request) | {"stream": False, "priority": 0}
        request["cache_salt"] = None
        name = json.dumps(request)
        if name not in known:
            known[name] = await self.ask(request | {"cache_salt": f"alone {len(known)}"})
        return known[name]

    async def judge(self, request: dict, reply: Reply):
        if reply.error:
            self.faults.append(f"crash: {reply.status} {reply.error}; {request}")
        if reply.error or reply.status != 200:
            return
        alone = await self.ask_alone(request)
        self.alone_seconds += alone.seconds
        if alone.error:
            self.faults.append(f"crash: alone, {alone.status} {alone.error}; {request}")
        elif wrong := wrong_answer(reply, alone):
            self.faults.append(f"answer: {wrong}; {request}")
        if leaked := leak(request, reply, self.server.sent, self.server.block_size):
            self.faults.append(f"leak: {leaked}; {request}")

    async def metrics(self) -> dict[str, float]:
        """A router has none of them."""
        response = await self.client.get("/metrics", headers=bearer(0))
        found = {name: re.search(pattern, response.text) for name, pattern in METRICS.items()}
        return {name: float(match[1]) for name, match in found.items() if match}

    async def watch(self):
        """Ask /livez all the time, and note the highest levels."""
        while True:
            try:
                response = await self.client.get("/livez", timeout=SILENCE)
                if response.status_code not in (200, 404):  # 404: a router
                    self.faults.append(f"hang: /livez says {response.text}")
                levels = await self.metrics()
            except httpx.HTTPError as error:
                self.faults.append(f"hang: {error!r} of /livez")
                levels = {}
            for name in levels.keys() & LEVELS:
                self.counts[name] = max(self.counts[name], levels[name])
            await asyncio.sleep(0.2)

    async def check_idle(self) -> dict[str, float]:
        """All has ended: soon nothing runs, waits or holds a block. Returns the metrics."""
        for _ in range(100):
            levels = await self.metrics()
            if not any(levels.get(name) for name in LEVELS):
                return levels
            await asyncio.sleep(0.1)
        self.faults.append(f"hang: when all had ended there was left {levels}")
        return levels

    def reached(self) -> set[tuple[str, int]]:
        """What happened, and how often by powers of two."""
        counts = self.counts | {"KV usage": 2 ** int(10 * self.counts["KV usage"])}  # by tenths
        return {(name, int(number).bit_length()) for name, number in counts.items() if number}


# --------------------------------------------------------------------------------------------------
# Campaigns


def save_models(folder: Path):
    """Tiny ones, in which every token of the text matters; and the keys."""
    from tests.tiny_models import make

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = bpe_tokenizer([])  # a token a byte
    sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": CONTEXT}
    for name in MODELS:
        model = make(name, eos_token_id=tokenizer.eos_token_id, **sizes)
        model.save_pretrained(folder / name)
        tokenizer.save(folder / name)
    (folder / "keys").write_text("\n".join(KEYS))


@contextlib.contextmanager
def serve(settings: dict, folder: Path, alone: dict) -> Iterator[Server]:
    """A server with these settings."""
    flags = [str(word) for item in settings.items() if item[0] != "model" for word in item]
    flags += ["--api-key-file", str(folder / "keys")]
    with Process(folder / settings["model"], *flags) as process:
        yield Server(process.url, alone, process, settings["--block-size"])


class Campaign:
    """Traces until the time is over."""

    def __init__(self, seed: int, folder: Path = OUT, url: str | None = None):
        self.rng = random.Random(seed)
        self.seed = seed
        self.folder = folder
        self.url = url
        self.corpus = list(SEEDS.values())
        self.untried = list(self.corpus)
        self.alone: dict[str, dict] = {name: {} for name in MODELS}
        self.reached: set[tuple[str, int]] = set()
        self.num_traces = 0
        self.num_requests = 0
        self.faults: list[str] = []
        self.start = time.monotonic()

    def run(self, seconds: float):
        """Ctrl-C ends it, too."""
        self.until = self.start + seconds
        most_faults = 1 if self.url else MOST_FAULTS
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < self.until and len(self.faults) < most_faults:
                is_first = self.num_traces == 0
                self.round(FIRST_SETTINGS if is_first else draw_settings(self.rng))

    def round(self, settings: dict):
        """Traces with one server, until there is a fault."""
        alone = self.alone[settings["model"]]
        traces = []
        faults = []
        if self.url:
            place = contextlib.nullcontext(Server(self.url, alone))
        else:
            place = serve(settings, self.folder, alone)
        with place as server:
            while len(traces) < ROUND and time.monotonic() < self.until and not faults:
                traces.append(self.next_trace())
                run = server.play(traces[-1])
                faults = run.faults
                self.num_traces += 1
                self.num_requests += len(traces[-1])
                if not run.reached() <= self.reached:
                    self.corpus.append(traces[-1])
                self.reached |= run.reached()
        if faults:
            self.report(settings, traces, faults[0])

    def next_trace(self) -> list[dict]:
        if self.untried:
            return self.untried.pop(0)
        return mutate(self.rng, self.rng.choice(self.corpus), self.rng.choice(self.corpus))

    def report(self, settings: dict, traces: list[list[dict]], fault: str):
        """Write it, and then shrunk. `traces` are all since the server was started."""
        self.faults.append(fault)
        path = self.folder / f"fault-{self.seed}-{self.num_traces}.json"
        content = {"fault": fault, "settings": settings, "traces": traces}
        path.write_text(json.dumps(content, indent=1))
        print(f"{fault}\npython -m tests.traces --replay {path}", flush=True)
        if not self.url:
            content["traces"] = self.shrunk(**content)
            path.write_text(json.dumps(content, indent=1))

    def shrunk(self, fault: str, settings: dict, traces: list[list[dict]]) -> list[list[dict]]:
        """A few requests of the last trace, if they are enough for a fault of this kind."""
        until = time.monotonic() + SHRINKING
        kind = fault.partition(":")[0]

        def fails(requests: list[dict]) -> bool:
            if not requests or time.monotonic() > until:
                return False
            with serve(settings, self.folder, {}) as server:
                return any(fault.startswith(kind) for fault in server.play(requests).faults)

        return [shrink(traces[-1], fails, simpler)] if fails(traces[-1]) else traces

    def summary(self) -> str:
        lines = []
        for name, pairs in itertools.groupby(sorted(self.reached), lambda pair: pair[0]):
            lines.append(f"{name:12} 2^{[bits - 1 for _, bits in pairs]}")
        hours = (time.monotonic() - self.start) / 3600
        lines.append(f"{self.num_traces} traces, {self.num_requests} requests, {hours:.2f} hours")
        return "\n".join([*lines, f"{len(self.faults)} faults", *self.faults])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a server that runs, whose settings are not changed")
    parser.add_argument("--replay", metavar="FILE", help="play what a fault has left")
    args = parser.parse_args()
    save_models(OUT)
    if args.replay:
        content = json.loads(Path(args.replay).read_text())
        with serve(content["settings"], OUT, {}) as server:
            faults = [fault for trace in content["traces"] for fault in server.play(trace).faults]
        print("\n".join(faults) or "no fault")
        return bool(faults)
    campaign = Campaign(args.seed, url=args.url)
    campaign.run(3600 * args.hours)
    print(campaign.summary())
    return bool(campaign.faults)


if __name__ == "__main__":
    sys.exit(main())
