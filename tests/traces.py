"""
Random traces of valid requests against a real server, for hours: a fuzzer, like GRIEF (arXiv
2605.11202).

    python -m tests.traces --hours 8           # each round has its own tiny model and settings
    python -m tests.traces --seed 7 --hours 0  # round 7 again
    python -m tests.traces --url URL           # a running server or router, with a context of 512
                                               # tokens or more, the model's name tiny, and the keys
                                               # sesame and simsim

A trace is a list of requests: when each arrives, with which key, its fields, and after how many
seconds its client hangs up. Every request is valid, so these are faults:

    crash       an answer that is neither a 200 nor the 429 of a full queue, or that ends early; any
                output in the server's log, which runs with --check and so reports broken invariants
    hang        no answer, /livez silent, or work and blocks left when all has ended
    answer      not the one that the request gets alone, by its log-probabilities
    leak        more cached prompt tokens than this key and salt can have put there
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import signal
import string
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

import httpx

from common import end_with_one_line
from tests.processes import ROOT, Process
from training.corpus import bpe_tokenizer

OUT = ROOT / "out/traces"
KEYS = ["sesame", "simsim"]
CONTEXT = 512  # tokens of the models' context and, at least, of the pool; a letter is a token
LONGEST = 480  # prompt and answer of a request
ROUND = 10  # traces against the same server
HANG = 120.0  # seconds without an answer
SILENCE = 5.0  # seconds for /livez, on a busy machine
TOLERANCE = 1e-3  # of log-probabilities

# --------------------------------------------------------------------------------------------------
# Traces

VALUES = {  # of requests
    "key": [0, 1],
    "abort_after": [None, None, None, 0.003, 0.03, 0.1, 0.3, 1],
    "max_tokens": [1, 2, 10, 33, 100, 300],
    "n": [1, 1, 2, 4],
    "priority": [-1000, -1, 0, 1, 1000],
    "cache_salt": ["", "pepper", "thyme"],
    "seed": range(9),
    "temperature": [0, 0.5, 1, 1.5],
    "top_p": [0.5, 0.9, 1],
    "top_k": [-1, 1, 5],
    "frequency_penalty": [0, 0.5, 2],
    "ignore_eos": [True, False],
    "stream": [True, False],
    "shared": [0, 17, 40, 128, 200],  # tokens of a prompt that it shares with others
    "own": [1, 7, 8, 16, 60, 250],  # tokens after the shared ones
}
PAUSES = [0, 0, 0.01, 0.1, 0.3]  # seconds between two arrivals
MODELS = ["qwen3", "mistral"]  # all layers of mistral have windows, so blocks are freed
POOLS = ["4 --kv-blocks 128", "4 --kv-blocks 300", "8 --kv-blocks 70", "16 --kv-blocks 32"]
POOLS += ["16 --kv-blocks 48", "16 --kv-blocks 300", "32 --kv-blocks 24"]
SETTINGS = [
    [f"--block-size {pool}" for pool in POOLS],
    ["--max-num-seqs 2", "--max-num-seqs 8", "--max-num-seqs 32"],
    ["--token-budget 32", "--token-budget 64", "--token-budget 512"],
    ["--max-queue 8", "--max-queue 64", "--max-queue 256"],
    ["--policy fcfs", "--policy priority", "--policy sjf"],
    ["--prefill-share 0", "--prefill-share 0.25", "--prefill-share 0.9"],
]


def text(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_lowercase, k=length))


def draw_trace(rng: random.Random) -> list[dict]:
    """
    Return requests that have much in common, because each field has few values. `at` and
    `abort_after` are seconds: from the trace's start, and from `at`.
    """
    values = {name: rng.choices(VALUES[name], k=rng.choice([1, 1, 2, 9])) for name in VALUES}
    pause = rng.choice(PAUSES)
    trace = []
    for i in range(rng.randint(1, 40)):
        request = {name: rng.choice(values[name]) for name in values}
        prompt = text(-1, request.pop("shared")) + text(rng.randrange(99), request.pop("own"))
        request["prompt"] = prompt[: LONGEST - request["max_tokens"]]
        trace.append(request | {"at": pause * i})
    return trace


# --------------------------------------------------------------------------------------------------
# Answers, and what is wrong with them


@dataclass
class Reply:
    """
    What a client got: the tokens of each choice with their log-probabilities, and how it ends.
    """

    status: int | None = None  # None: nothing, or it hung up
    error: str = ""
    tokens: dict[int, list[tuple[str, float]]] = field(default_factory=dict)
    ends: dict[int, str | None] = field(default_factory=dict)
    cached: int = 0  # tokens of the prompt

    @property
    def text(self) -> str:
        """Return the text of the only choice."""
        return "".join(token for token, _ in self.tokens.get(0, []))

    def read(self, response: httpx.Response):
        """Read a response. Raises ValueError or LookupError if it is no answer."""
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
            self.error = self.error or str(chunk.get("error", ""))
            for choice in chunk.get("choices", []):
                index = choice["index"]
                scores = choice["logprobs"]
                pairs = zip(scores["tokens"], scores["token_logprobs"], strict=True)
                self.tokens.setdefault(index, []).extend(pairs)
                self.ends[index] = choice["finish_reason"]
            if chunk.get("usage"):
                self.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]


def wrong_answer(reply: Reply, alone: Reply) -> str:
    """
    Return how it differs from the answer given alone. Where tokens first differ, both must be
    equally likely: another batch rounds sums differently. What follows cannot be compared.
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


def realm(request: dict) -> tuple:
    """Return the key and salt within which prefixes are shared."""
    return request["key"], request["cache_salt"]


# --------------------------------------------------------------------------------------------------
# Rounds

# those without "total" are levels, which return to 0
METRIC = r"^\w+:(num_preemptions_total|prefix_cache_hits_total|num_requests_\w+|"
METRIC += r"kv_cache_usage_perc|requests_refused_total|"
METRIC += r'request_success_total{finished_reason="\w+").* (\S+)$'


class Round:
    """A server, everything that it was sent, and what was wrong."""

    def __init__(self, url: str, block_size: int):
        self.url = url
        self.block_size = block_size
        self.salt = str(time.time())  # a server at --url may have been sent requests before
        self.sent: list[dict] = []
        self.alone: dict[str, Reply] = {}
        self.seen = Counter()  # the maximum of each metric
        self.faults: list[str] = []

    async def play(self, trace: list[dict]):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        options = {"limits": limits, "timeout": HANG, "verify": False}
        async with httpx.AsyncClient(base_url=self.url, **options) as self.client:
            watch = asyncio.create_task(self.watch())
            replies = await asyncio.gather(*map(self.send, trace))
            watch.cancel()
            await self.check_idle()
            for request, reply in zip(trace, replies, strict=True):
                if reply.status != 200 or self.faults:
                    continue
                if wrong := wrong_answer(reply, await self.ask_alone(request)):
                    self.faults.append(f"answer: {wrong}; {request}")

    async def send(self, request: dict) -> Reply:
        await asyncio.sleep(request["at"])
        try:
            async with asyncio.timeout(request["abort_after"]):
                return await self.ask(request)
        except TimeoutError:
            return Reply()

    async def ask(self, request: dict) -> Reply:
        body = {"model": "tiny", "logprobs": 0} | request
        headers = {"Authorization": f"Bearer {KEYS[body.pop('key')]}"}
        del body["at"], body["abort_after"]
        body["cache_salt"] = self.salt + body["cache_salt"]
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        self.sent.append(request)
        reply = Reply()
        try:
            reply.read(await self.client.post("/v1/completions", json=body, headers=headers))
        except (httpx.HTTPError, ValueError, LookupError) as error:
            reply.error = repr(error)
        if reply.error:
            self.faults.append(f"crash: {reply.status} {reply.error}; {request}")
        if reply.cached >= self.most_cached(request):
            self.faults.append(f"leak: {reply.cached} cached tokens; {request}")
        return reply

    def most_cached(self, request: dict) -> int:
        """
        Return how many tokens may be in the cache. Only this key and salt may have put them there:
        what they sent, and less than a block of answers, which may continue as the prompt does.
        """
        own = [sent for sent in self.sent if sent is not request and realm(sent) == realm(request)]
        prompts = [[request["prompt"], sent["prompt"]] for sent in own]
        lengths = [len(commonprefix(pair)) for pair in prompts]  # noqa: RUF071
        # without any, there is no block
        return max(lengths, default=1 - self.block_size) + self.block_size

    async def ask_alone(self, request: dict) -> Reply:
        """Ask with a unique salt, so that nothing is in the cache."""
        same = {"at": 0, "key": 0, "abort_after": None, "stream": False, "priority": 0}
        name = json.dumps(request | same | {"cache_salt": ""}, sort_keys=True)
        if name not in self.alone:
            same["cache_salt"] = f"alone {len(self.alone)}"
            self.alone[name] = await self.ask(request | same)
        return self.alone[name]

    async def levels(self) -> dict[str, float]:
        """
        Return what runs, waits or owns blocks; all metrics go into `seen`. A router has none of
        them.
        """
        headers = {"Authorization": f"Bearer {KEYS[0]}"}
        lines = (await self.client.get("/metrics", headers=headers)).text
        found = {name: float(number) for name, number in re.findall(METRIC, lines, re.MULTILINE)}
        self.seen |= Counter(found)
        return {name: level for name, level in found.items() if "total" not in name}

    async def watch(self):
        """Ask /livez all the time, and note the highest levels."""
        while True:
            try:
                # in a thread: this loop may itself be late, because it reads all the answers
                livez = self.client.base_url.join("/livez")
                response = await asyncio.to_thread(httpx.get, livez, timeout=SILENCE)
                if response.status_code not in (200, 404):  # 404: a router
                    self.faults.append(f"hang: /livez says {response.text}")
                await self.levels()
            except httpx.HTTPError as error:
                self.faults.append(f"hang: {error!r} of /livez")
            await asyncio.sleep(0.2)

    async def check_idle(self):
        """Check that, now that all has ended, soon nothing runs, waits or owns a block."""
        for _ in range(100):
            levels = await self.levels()
            if not any(levels.values()):
                return
            await asyncio.sleep(0.1)
        self.faults.append(f"hang: when all had ended there was left {levels}")


def save_models(folder: Path):
    """Save tiny models, in which every token of the text matters; and the keys."""
    from tests.tiny_models import make

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = bpe_tokenizer([])  # one token per byte
    sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": CONTEXT}
    for name in MODELS:
        model = make(name, eos_token_id=tokenizer.eos_token_id, **sizes)
        model.save_pretrained(folder / name)
        tokenizer.save(folder / name)
    (folder / "keys").write_text("\n".join(KEYS))


def play_round(seed: int, folder: Path = OUT, url: str | None = None) -> Round:
    """Play traces until there is a fault. The models are those saved in this folder."""
    rng = random.Random(seed)
    checkpoint = folder / rng.choice(MODELS)
    flags = " ".join(map(rng.choice, SETTINGS)).split()
    with contextlib.ExitStack() as stack:
        process = None
        if not url:
            names = ["--served-model-name", "tiny", "--api-key-file", str(folder / "keys")]
            process = stack.enter_context(Process(checkpoint, *flags, *names))
        round = Round(url or process.url, int(flags[1]) if process else 16)
        for _ in range(ROUND):
            asyncio.run(round.play(draw_trace(rng)))
            if process and (words := process.new_output().strip()):
                round.faults.append(f"crash: the log says {words}")
            if round.faults:
                break
    return round


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=8.0, help="the last round is played out")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--url", help="of a server that runs, whose settings are not changed")
    args = parser.parse_args()
    end = time.monotonic() + 3600 * args.hours
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so the server ends
    save_models(OUT)
    for seed in itertools.count(args.seed):
        round = play_round(seed, OUT, args.url)
        print(f"round {seed}: {len(round.sent)} requests", *round.faults, sep="\n", flush=True)
        if round.faults or time.monotonic() > end:
            return bool(round.faults)


if __name__ == "__main__":
    end_with_one_line()
    sys.exit(main())
