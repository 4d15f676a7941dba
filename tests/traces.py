"""
Timed traces of valid requests against a real server, mutated for hours: a fuzzer, as GRIEF is one
(arXiv 2605.11202).

    python -m tests.traces --hours 8         # serve.py with tiny models, other settings every 20
                                             # traces
    python -m tests.traces --url URL         # a server or a router that runs, with a context of
                                             # 512 tokens or more, the model's name tiny, and the
                                             # keys sesame and simsim
    python -m tests.traces --replay FILE     # a fault again, from the file that it left

A trace is a list of requests: when each arrives, with which key, its fields, and after how many
seconds its client hangs up. SEEDS has the first ones. A trace that reached something new, by the
server's metrics, is kept, and mutated further. Every request is valid, so these are faults:

    crash       an answer that is neither a 200 nor the 429 of a full queue, or that ends early; a
                word in the server's log, which runs with --check: a broken invariant is one
    hang        no answer, /livez silent, or work and blocks left when all has ended
    slowdown    more than 10 times as long as the requests take alone, one after the other
    answer      not the one that the request gets alone, by its log-probabilities
    memory      a process that has grown by 100 MB since its start; caches fill in so short a time
    leak        more cached prompt tokens than this key and salt can have put there

A fault is written to out/traces and shrunk, which takes some minutes.
"""

import argparse
import asyncio
import contextlib
import copy
import json
import random
import re
import signal
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import sub
from os.path import commonprefix
from pathlib import Path

import httpx

from tests.processes import ROOT, Process
from tests.shrink import shrink
from training.corpus import bpe_tokenizer

OUT = ROOT / "out/traces"
KEYS = ["sesame", "simsim"]
CONTEXT = 512  # tokens of the models, and at least of the pool; a letter is a token
LONGEST = 480  # prompt and answer of a request
MOST_REQUESTS = 60  # of a trace
ROUND = 20  # traces against the same server
MOST_FAULTS = 10  # of a campaign
HANG = 120.0  # seconds without an answer
SILENCE = 5.0  # seconds for /livez, on a busy machine
MOST_GROWN = 100_000  # kB, of a process
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


TRUNK = text(0, 200)
SEEDS = {
    "fill and squeeze": [ask(0, text(i, 60), 100, priority=i % 3) for i in range(12)],
    "hang-ups": [ask(0, text(i, 50), 200, abort_after=i / 20, n=1 + i % 3) for i in range(20)],
    "shared prefixes": [ask(i / 10, TRUNK[: 10 * i] + text(i, 5), 20) for i in range(20)],
    "forks": [ask(i / 20, TRUNK[:50] + text(i, 9), 60, n=4, temperature=0.8) for i in range(9)],
    "flood": [ask(i / 20, TRUNK + text(i // 9, 99), 9, key=int(i % 9 > 0)) for i in range(45)],
    "burst": [ask(0, text(i, 10 + i), 20, stream=True) for i in range(40)],
    "long beside short": [ask(i / 20, text(i, [9, 400][i % 2]), 60 - i) for i in range(20)],
    "steady": [ask(i / 10, text(i, 30), 30) for i in range(20)],
}
VALUES = {  # that mutations give to requests
    "at": [0, 0.01, 0.1, 0.5, 1, 2],
    "key": [0, 1],
    "abort_after": [None, None, 0.003, 0.03, 0.1, 0.3, 1],
    "prompt": [text(i, i) for i in (1, 7, 8, 16, 17, 40, 128, 200, 300, 450)],
    "max_tokens": [1, 2, 10, 16, 33, 100, 300],
    "n": [1, 2, 3, 4],
    "priority": [-1000, -1, 0, 1, 1000],
    "cache_salt": ["", "pepper", "thyme"],
    "seed": range(9),
    "temperature": [0, 0.5, 1, 1.5],
    "top_p": [0.5, 0.9, 1],
    "top_k": [-1, 1, 5],
    "frequency_penalty": [0, 0.5, 2],
    "ignore_eos": [True, False],
    "stream": [True, False],
}
MODELS = ["qwen3", "mistral"]  # all of mistral's layers have windows, so blocks are given back
POOLS = ["4 --kv-blocks 128", "4 --kv-blocks 300", "8 --kv-blocks 70", "16 --kv-blocks 32"]
POOLS += ["16 --kv-blocks 48", "16 --kv-blocks 300", "32 --kv-blocks 24"]
SETTINGS = [
    [f"{model} --block-size {pool}" for model in MODELS for pool in POOLS],
    ["--max-num-seqs 2", "--max-num-seqs 8", "--max-num-seqs 32"],
    ["--token-budget 32", "--token-budget 64", "--token-budget 512"],
    ["--max-queue 8", "--max-queue 64", "--max-queue 256"],
    ["--policy fcfs", "--policy priority", "--policy sjf"],
    ["--prefill-share 0", "--prefill-share 0.25", "--prefill-share 0.9"],
]
FIRST_SETTINGS = "qwen3 --block-size 16 --kv-blocks 48"  # of the seeds


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
        match rng.choice(["value", "value", "value", "prefix", "more", "less"]):
            case "value":
                name = rng.choice(list(VALUES))
                change = {name: rng.choice(VALUES[name])}
            case "prefix":
                trunk = rng.choice(requests + other)["prompt"]
                change = {"prompt": trunk[: rng.randint(0, len(trunk))] + rng.choice("xyz")}
            case "more":
                requests += some(rng, rng.choice([copy.deepcopy(requests), other]))
            case "less":
                requests = [request for request in requests if request not in chosen] or chosen
        for request in chosen:
            request |= change
    for request in requests:
        request["prompt"] = request["prompt"][: LONGEST - request["max_tokens"]]
    return requests[:MOST_REQUESTS]


# --------------------------------------------------------------------------------------------------
# Answers, and what is wrong with them


@dataclass
class Reply:
    """What a client got: of each choice tokens with their log-probabilities, and how it ends."""

    status: int | None = None  # None: nothing, or it hung up
    error: str = ""
    tokens: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    ends: dict[int, str | None] = field(default_factory=dict)
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
            for choice in chunk["choices"]:
                index = choice["index"]
                scores = choice["logprobs"]
                pairs = zip(scores["tokens"], scores["token_logprobs"], strict=True)
                self.tokens.setdefault(index, []).extend(pairs)
                self.ends[index] = choice["finish_reason"]
            if chunk.get("usage"):
                self.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]


def wrong_answer(reply: Reply, alone: Reply) -> str:
    """
    How it differs from the answer given alone. Where tokens differ first, both must be as likely:
    in another batch sums are rounded otherwise, and what follows has no comparison.
    """
    if reply.ends.keys() != alone.ends.keys():
        return f"choices {sorted(reply.ends)}, alone {sorted(alone.ends)}"
    for index, right in alone.tokens.items():
        tokens = reply.tokens[index]
        for i, (pair, right_pair) in enumerate(zip(tokens, right, strict=False)):
            if abs(pair[1] - right_pair[1]) > TOLERANCE:
                return f"choice {index}, token {i}: {pair}, alone {right_pair}"
            if pair[0] != right_pair[0]:
                break
        else:
            end = len(tokens), reply.ends[index]
            right_end = len(right), alone.ends[index]
            if end != right_end:
                return f"choice {index} ends with {end}, alone {right_end}"
    return ""


def leak(request: dict, reply: Reply, sent: list[dict], block_size: int) -> str:
    """
    More found in the cache than this key and salt have put there: what it sent, and less than a
    block of answers, which may go on as the prompt does.
    """
    own = [o["prompt"] for o in sent if o is not request and realm(o) == realm(request)]
    lengths = [len(commonprefix([request["prompt"], other])) for other in own]  # noqa: RUF071
    most = max(lengths, default=1 - block_size)  # without any, there is no block
    return f"{reply.cached} cached tokens" if reply.cached >= most + block_size else ""


def realm(request: dict) -> tuple:
    """Prefixes are shared within one."""
    return request["key"], request.get("cache_salt", "")


def is_slow(seconds: float, alone: float) -> bool:
    """One more second is a busy machine's."""
    return seconds > 10 * alone + 1


# --------------------------------------------------------------------------------------------------
# The replay of a trace

# those without "total" are levels, which return to 0
METRIC = r"^\w+:(num_preemptions_total|prefix_cache_hits_total|num_requests_\w+|"
METRIC += r"kv_cache_usage_perc|requests_refused_total|"
METRIC += r'request_success_total{finished_reason="\w+").* (\S+)$'


class Server:
    """A server, what it was sent so far, and answers that it or one like it gave alone."""

    def __init__(self, url: str, alone: dict, block_size: int = 16, process: Process | None = None):
        self.url = url
        self.alone: dict[str, Reply] = alone
        self.block_size = block_size
        self.process = process
        self.sent: list[dict] = []
        self.memory = process.memory() if process else ()
        self.salt = str(time.time())  # a server at --url has been sent more before

    def play(self, requests: list[dict]) -> "Run":
        """A slow run is measured again before it counts as slow."""
        for _ in range(3):
            run = Run(self, requests)
            try:
                asyncio.run(run.play())
            except httpx.HTTPError as error:  # of /metrics, before and after
                run.faults.append(f"crash: {error!r} of /metrics")
            seconds = run.seconds, run.alone_seconds
            if run.faults or not is_slow(*seconds):
                break
        else:
            run.faults.append(f"slowdown: {seconds[0]:.1f} s, alone {seconds[1]:.1f} s")
        if self.process and (words := self.process.new_output().strip()):
            run.faults.append(f"crash: the log says {words}")
        if self.process and not run.faults:
            grown = map(sub, self.process.memory(), self.memory)
            run.faults += [f"memory: {kb} kB more" for kb in grown if kb > MOST_GROWN]
        return run


def levels_of(metrics: dict[str, float]) -> dict[str, float]:
    return {name: level for name, level in metrics.items() if "total" not in name}


class Run:
    """One replay."""

    def __init__(self, server: Server, requests: list[dict]):
        self.server = server
        # a copy of each, although a mutation may have put the same one in twice: `leak` tells them
        # apart by identity
        self.requests = [dict(request) for request in requests]
        self.faults: list[str] = []
        self.counts: dict[str, float] = {}  # how often, and the highest levels
        self.seconds = 0.0  # after the last arrival
        self.alone_seconds = 0.0

    async def play(self):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        options = {"limits": limits, "timeout": HANG, "verify": False}
        async with httpx.AsyncClient(base_url=self.server.url, **options) as self.client:
            before = await self.metrics()
            watch = asyncio.create_task(self.watch())
            start = time.monotonic() + max(request["at"] for request in self.requests)
            replies = await asyncio.gather(*map(self.send, self.requests))
            self.seconds = time.monotonic() - start
            watch.cancel()
            for request, reply in zip(self.requests, replies, strict=True):
                if reply.error:
                    self.faults.append(f"crash: {reply.status} {reply.error}; {request}")
            after = await self.check_idle()
            for name in after:
                self.counts.setdefault(name, after[name] - before.get(name, 0))
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
        server = self.server
        body = {"model": "tiny", "logprobs": 0} | request
        key = KEYS[body.pop("key")]
        del body["at"], body["abort_after"]
        body["cache_salt"] = server.salt + body.get("cache_salt", "")
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        reply = Reply()
        server.sent.append(request)
        start = time.monotonic()
        try:
            headers = {"Authorization": f"Bearer {key}"}
            reply.read(await self.client.post("/v1/completions", json=body, headers=headers))
        except (httpx.HTTPError, ValueError, LookupError) as error:
            reply.error = repr(error)
        reply.seconds = time.monotonic() - start
        if leaked := leak(request, reply, server.sent, server.block_size):
            self.faults.append(f"leak: {leaked}; {request}")
        return reply

    async def ask_alone(self, request: dict) -> Reply:
        """With a salt of its own: nothing is in the cache."""
        known = self.server.alone
        same = {"at": 0, "key": 0, "abort_after": None, "stream": False, "priority": 0}
        request = request | same | {"cache_salt": ""}
        name = json.dumps(request, sort_keys=True)
        if name not in known:
            known[name] = await self.ask(request | {"cache_salt": f"alone {len(known)}"})
        return known[name]

    async def judge(self, request: dict, reply: Reply):
        if reply.status is None:  # it hung up, and was served until then
            self.alone_seconds += request["abort_after"]
        elif reply.status == 200:
            alone = await self.ask_alone(request)
            self.alone_seconds += alone.seconds
            if wrong := alone.error or wrong_answer(reply, alone):
                self.faults.append(f"answer: {wrong}; {request}")

    async def metrics(self) -> dict[str, float]:
        """A router has none of them."""
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        text = (await self.client.get("/metrics", headers=headers)).text
        found = re.findall(METRIC, text, re.MULTILINE)
        return {name: float(number) for name, number in found}

    async def watch(self):
        """Ask /livez all the time, and note the highest levels."""
        while True:
            try:
                # in a thread: this loop may be late by itself, with all the answers that it reads
                livez = self.client.base_url.join("/livez")
                response = await asyncio.to_thread(httpx.get, livez, timeout=SILENCE)
                if response.status_code not in (200, 404):  # 404: a router
                    self.faults.append(f"hang: /livez says {response.text}")
                for name, level in levels_of(await self.metrics()).items():
                    self.counts[name] = max(level, self.counts.get(name, 0))
            except httpx.HTTPError as error:
                self.faults.append(f"hang: {error!r} of /livez")
            await asyncio.sleep(0.2)

    async def check_idle(self) -> dict[str, float]:
        """All has ended: soon nothing runs, waits or holds a block. Returns the metrics."""
        for _ in range(100):
            metrics = await self.metrics()
            if not any(levels_of(metrics).values()):
                return metrics
            await asyncio.sleep(0.1)
        self.faults.append(f"hang: when all had ended there was left {metrics}")
        return metrics

    def reached(self) -> set[tuple[str, int]]:
        """What happened, and how often, by powers of two."""
        counts = self.counts.items()
        return {(name, int(10 * number).bit_length()) for name, number in counts if number}


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
def serve(settings: str, folder: Path, alone: dict) -> Iterator[Server]:
    """A server with these settings, a model and flags; or that at a URL."""
    model, *flags = settings.split()
    known = alone.setdefault(model, {})
    if len(known) > 2000:  # 100 MB
        known.clear()
    if not flags:
        yield Server(settings, known)
        return
    block_size = int(flags[1])
    flags += ["--served-model-name", "tiny", "--api-key-file", str(folder / "keys")]
    with Process(folder / model, *flags) as process:
        yield Server(process.url, known, block_size, process)


class Campaign:
    """Traces until the time is over."""

    def __init__(self, seed: int, folder: Path = OUT):
        self.rng = random.Random(seed)
        self.seed = seed
        self.folder = folder
        self.corpus = list(SEEDS.values())
        self.untried = list(self.corpus)
        self.alone: dict[str, dict] = {}
        self.reached: set[tuple[str, int]] = set()
        self.num_traces = 0
        self.num_requests = 0
        self.faults: list[str] = []
        self.start = time.monotonic()

    def run(self, seconds: float, url: str | None = None):
        """Ctrl-C ends it, too."""
        self.until = self.start + seconds
        settings = url or FIRST_SETTINGS
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < self.until and len(self.faults) < MOST_FAULTS:
                self.round(settings)
                settings = url or " ".join(map(self.rng.choice, SETTINGS))

    def round(self, settings: str):
        """Traces with one server, until there is a fault; SEEDS are played in any case."""
        traces = []
        faults = []
        with serve(settings, self.folder, self.alone) as server:
            while len(traces) < ROUND and not faults:
                if time.monotonic() > self.until and not self.untried:
                    break
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

    def report(self, settings: str, traces: list[list[dict]], fault: str):
        """
        Write it, first as it is, then, if the last trace is enough for it, with few of its
        requests. `traces` are all since the server was started.
        """
        self.faults.append(fault)
        self.alone.clear()  # they may be wrong
        path = self.folder / f"fault-{self.seed}-{self.num_traces}.json"
        content = {"fault": fault, "settings": settings, "traces": traces}
        path.write_text(json.dumps(content, indent=1))
        print(f"{fault}\npython -m tests.traces --replay {path}", flush=True)
        until = time.monotonic() + SHRINKING

        def fails(requests: list[dict]) -> bool:
            if not requests or time.monotonic() > until:
                return False
            with serve(settings, self.folder, {}) as server:
                return any(f[:4] == fault[:4] for f in server.play(requests).faults)

        with contextlib.suppress(AssertionError):  # where it does not fail again
            content["traces"] = [shrink(traces[-1], fails)]
            path.write_text(json.dumps(content, indent=1))

    def summary(self) -> str:
        hours = (time.monotonic() - self.start) / 3600
        reached = ", ".join(f"{name} {bits}" for name, bits in sorted(self.reached))
        lines = [f"{self.num_traces} traces, {self.num_requests} requests, {hours:.2f} hours"]
        return "\n".join([reached, *lines, f"{len(self.faults)} faults", *self.faults])


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
    campaign = Campaign(args.seed)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, or its server would stay
    campaign.run(3600 * args.hours, args.url)
    print(campaign.summary())
    return bool(campaign.faults)


if __name__ == "__main__":
    sys.exit(main())
