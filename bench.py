"""
Every number in the README, reproducible: one command each, the conditions first and one line of
JSON last.

    python bench.py scheduler     # Python time of plan + update, per step
    python bench.py attention     # CPU, one layer: a mixed step; against Hugging Face's attention
    python bench.py kernels       # GPU, one layer: decodes, prefill, mixed; block sizes; the floor
    python bench.py engine        # tokens per second of a mixed workload, latency of 1 and 32
    python bench.py equality      # greedy answers with graphs, overlap, neither; the dense model's
    python bench.py overhead      # where the time of a decode step goes, on the device and the host
    python bench.py server        # the offline workload over HTTP, as 1, 32 and 256 streams
    python bench.py generate      # engine against Hugging Face's generate, 1 and 8 requests at once
    python bench.py batching      # one by one, in static batches, continuously: the same requests
    python bench.py memory        # slabs against blocks: what fits, the waste, what an append costs
    python bench.py phases        # prefill against decode: what each asks of the machine, and gets
    python bench.py quality       # bits per byte of held-out text in fp32, bf16 and int8 weights
    python bench.py blockmap      # picture: which request owned which block in each step
    python bench.py record NAME   # writes such a run as a record: forks, preemption or h200
    python bench.py replay FILE   # checks a record of `serve.py --record`, and draws it
    python bench.py page FILE     # prints the page of serve.py with a record inside, as one file

Each command is a function. Its arguments are its flags, and their defaults give the flags' types;
its docstring is the workload and is printed first; it returns its figures, which are printed behind
the flags' values. Seeds are fixed, warm-up is not counted, times are medians. The machine must be
quiet: beside a second busy process on two cores a token takes 100 ms instead of 1, because threads
that wait for each other spin.
"""

import argparse
import inspect
import io
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, count, pairwise, product
from pathlib import Path
from random import Random
from statistics import mean, median
from time import perf_counter
from types import SimpleNamespace
from typing import BinaryIO

from commands import (
    SPINS_SERVING,
    add_flag,
    at_least,
    collect_garbage_rarely,
    not_negative,
)

os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)  # before torch is loaded

import torch

import kernels
from assets import draw, load
from checkpoint import DTYPES, load_checkpoint, load_config, save_checkpoint, serving_dtype
from model import GPT, GPTConfig, Ops, RMSNorm, Rope
from paged import Request, Scheduler, SchedulerSettings
from serving import gather, inputs
from serving.cpu import packed_for_cpu
from serving.engine import Engine
from serving.events import Recorder
from serving.ops import TORCH, choose_ops
from serving.params import SamplingParams
from serving.record import read_lines
from serving.replay import State, open_record, replay
from serving.settings import Settings
from serving.sizing import bytes_per_block
from serving.welcome import page_with_record

Work = list[tuple[list[int], int]]  # requests: a prompt, and how many tokens to answer
Answers = list[list[int]]  # token ids
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def llama_shape(V, n_layer, n_head, n_embd, n_kv_head, n_inner, rope, **more) -> GPTConfig:
    names = {"norm": "rms", "bias": False, "activation": "silu", "gated": True, "rope": {0: rope}}
    context = 4096
    return GPTConfig(
        V, context, n_layer, n_head, n_embd, n_kv_head, n_inner=n_inner, **names, **more
    )


MODELS = {  # random weights of these shapes; the figures depend on the shape alone
    "1M": GPTConfig(vocab_size=65, context_length=256, n_layer=4, n_head=4, n_embd=128),
    "10M": GPTConfig(vocab_size=65, context_length=256, n_layer=6, n_head=6, n_embd=384),
    "gpt2-124M": GPTConfig(context_length=2048),
    "smollm2-135M": llama_shape(49152, 30, 9, 576, 3, 1536, Rope(1e5)),
    "llama-3.2-1B": llama_shape(128256, 16, 32, 2048, 8, 8192, Rope(5e5, 32.0, (1.0, 4.0, 8192.0))),
    "qwen3-0.6B": llama_shape(
        151936, 28, 16, 1024, 8, 3072, Rope(1e6), head_size=128, qk_norm=True
    ),
}

COMMANDS: dict[str, Callable] = {}
FLAGS = {  # what --help says; the commands' arguments have their defaults
    "--model": "a shape in MODELS, such as 10M, gpt2-124M or smollm2-135M (random weights), or a "
    "model directory",
    "--repeats": "counted runs of each, in turn; the median is printed",
    "--backends": "ways of attention to measure: triton, flex, torch",
    "--block-size": "tokens per KV block",
    "--dtype": "of the engine's weights",
    "--quantize": "int8: the engine's weights as integers",
    "--compile": "compile the engine's step of one request",
    "--data": "what the model was trained on: a name in data/, or a folder",
    "--seeds": "of the workloads, each run once",
    "--no-graphs": "launch each kernel by itself",
    "--no-overlap": "wait for each step before the next is planned",
    "--streams": "numbers of requests at once",
    "--client-processes": "processes that the clients are spread over",
    "--slow-clients": "how many clients read 1 KB/s",
    "--rate": "requests a second at random times; 0: 70 percent of what was managed at once",
    "--flags": "flags of serve.py, as in --flags='--dtype bf16'",
    "--device": "cpu (in fp32) or cuda (in bf16)",
    "--out": "where to write the picture, or the record; those of the README are in assets/",
    "name": "which run",
    "file": "a record: of serve.py --record, or in assets/",
}
CHOICES = {
    "name": ["forks", "preemption", "h200"],
    "--dtype": ["auto", "fp32", "bf16"],
    "--quantize": ["none", "int8"],
    "--device": sorted({"cpu", DEVICE}),
}


def command(bench: Callable) -> Callable:
    """Make `bench_NAME` the command NAME."""
    COMMANDS[bench.__name__.removeprefix("bench_")] = bench
    return bench


# --------------------------------------------------------------------------------------------------
# Workloads


def random_tokens(rng: Random, n: int, V: int) -> list[int]:
    return [rng.randrange(V) for _ in range(n)]


def even_workload(n: int, tokens_in: int, tokens_out: int, V: int, seed=0) -> Work:
    """n requests of the same size, with random prompts."""
    rng = Random(seed)
    return [(random_tokens(rng, tokens_in, V), tokens_out) for _ in range(n)]


def offline_workload(n=256, scale=1, V=10_001, seed=0) -> Work:
    """
    The offline benchmark of nano-vLLM: 256 requests, 100 to 1024 tokens in and as many out. Or the
    first n of them, lengths divided by `scale`, token ids modulo the vocabulary V.
    """
    rng = Random(seed)
    draw_length = partial(rng.randint, 100, 1024)
    prompts = [random_tokens(rng, draw_length(), 10_001) for _ in range(256)]
    work = [(prompt, draw_length()) for prompt in prompts]
    if seed == 0:
        assert num_tokens(work) == (142_827, 133_966), "not the workload that others measure"
    scaled = []
    for prompt, answer in work[:n]:
        length = len(prompt) // scale
        tokens = [token % V for token in prompt[:length]]
        scaled.append((tokens, answer // scale))
    return scaled


def scale_for(config: GPTConfig) -> int:
    """The divisor that makes the offline workload's lengths fit into the model's context."""
    longest = 2048  # prompt and answer
    return max(1, math.ceil(longest / config.context_length))


def num_tokens(work: Work) -> tuple[int, int]:
    """Tokens in and tokens out."""
    return sum(len(prompt) for prompt, _ in work), sum(answer for _, answer in work)


def num_equal(ours: Iterable, theirs: Iterable) -> int:
    """In how many places two lists of equal length are equal."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def fixed_length(n: int, temperature=0.0, seed=0) -> SamplingParams:
    """For an answer of exactly n tokens, greedy by default."""
    return SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=seed)


def build_model(name: str, device="cpu") -> GPT:
    """Random weights of a shape in MODELS, or a model directory's: fp32 on a CPU, bf16 on a GPU."""
    torch.manual_seed(0)
    model = GPT(MODELS[name]) if name in MODELS else load_checkpoint(name)
    model.eval().requires_grad_(False)
    return in_dtype(model, torch.bfloat16 if device == "cuda" else torch.float32).to(device)


def in_dtype(model: GPT, dtype: torch.dtype) -> GPT:
    """The model itself, changed: weights in the dtype, norms in fp32, as if they were loaded so."""
    for module in model.modules():
        if not isinstance(module, RMSNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return model


# --------------------------------------------------------------------------------------------------
# Timing


def ms(seconds: float, digits=3) -> float:
    """Milliseconds, rounded."""
    return round(1e3 * seconds, digits)


def median_seconds(call: Callable, repeats: int, setup: Callable = tuple) -> float:
    """
    Median seconds of call(*setup()), after one warm-up; the set-up is not counted. By default there
    are no arguments: tuple() is empty.
    """
    times = []
    for _ in range(repeats + 1):
        arguments = setup()
        started = perf_counter()
        call(*arguments)
        times.append(perf_counter() - started)
    return median(times[1:])


def graph_us(call: Callable, number: int) -> float:
    """
    Median microseconds of call(i) on the GPU. One CUDA graph holds the calls for i in
    0 .. number - 1, so that the GPU waits for no launch; each should read data of its own, so that
    none of it is in the L2 cache.
    """
    for i in range(number):
        call(i)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(number):
            call(i)
    times = []
    for _ in range(16):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / number)
    return median(times[1:])


def read_bandwidth(device="cpu") -> float:
    """Bytes per second at which memory is read: the sum of a tensor too large for any cache."""
    if device == "cpu":
        x = torch.ones(2**26)
        seconds = median_seconds(x.sum, 10)
    else:
        x = torch.ones(2**30, device=device)
        seconds = 1e-6 * graph_us(lambda i: x.sum(), 4)
    return x.nbytes / seconds


def check_complete(answers: Answers, lengths: list[int]):
    assert [len(answer) for answer in answers] == lengths, "a request has not its tokens"


def timed(engine: Engine, work: Work, temperature=0.6) -> tuple[float, Answers]:
    """
    Seconds to serve requests that all wait at the start, and their answers. Asserts that all
    prompts were computed and all answers have their length.
    """
    prompts = [prompt for prompt, _ in work]
    lengths = [n for _, n in work]
    params = [fixed_length(n, temperature, seed=i) for i, n in enumerate(lengths)]
    before = engine.counts()
    started = perf_counter()
    answers = engine.generate(prompts, params, progress=False)
    seconds = perf_counter() - started
    after = engine.counts()
    check_complete(answers, lengths)
    if after["preemptions"] == before["preemptions"]:
        computed = after["prefill tokens"] - before["prefill tokens"]
        wanted, _ = num_tokens(work)
        assert computed == wanted, f"{computed} of {wanted} prompt tokens were computed"
    return seconds, answers


def weight_bytes(gpt: GPT) -> int:
    return sum(weight.nbytes for weight in gpt.parameters())


def conditions() -> dict:
    """What the figures depend on besides the code."""
    if DEVICE == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    result = {"device": device, "torch": torch.__version__}
    result["python"] = platform.python_version()
    return result


# --------------------------------------------------------------------------------------------------
# The scheduler alone


@command
def bench_scheduler() -> dict:
    """
    The scheduler's time for a step, `plan` and `update`, in which every request decodes: blocks of
    16 tokens, prompts of 100 to 1000, prefix cache on.
    """
    result = {}
    for n in (1, 32, 256):
        seconds = median_seconds(decode_step(n), 500)
        result[f"{n} requests, ms"] = ms(seconds, 4)
    return result


def decode_step(n: int) -> Callable:
    """The step of a scheduler in which n requests decode, as a function without arguments."""
    settings = SchedulerSettings(max_num_seqs=n, max_num_partial_prefills=n)
    budget = n * 1000  # for all prompts in one step
    scheduler = Scheduler("fcfs", budget, n * 2048, block_size=16, settings=settings)
    rng = Random(0)
    for i in range(n):
        length = rng.randint(100, 1000)
        prompt = random_tokens(rng, length, 10_000)
        scheduler.add_request(Request(i, prompt, 10**6))
    plan = scheduler.plan()
    scheduler.update(plan, [0] * len(plan.sampled))
    tokens = list(range(n))
    return lambda: scheduler.update(scheduler.plan(), tokens)


# --------------------------------------------------------------------------------------------------
# Attention, one layer

Step = list[tuple[int, int]]  # requests: new tokens, context length; those with one new token first
Heads = tuple[int, int, int]  # H query heads, Hk KV heads, D head size
GPT2_HEADS = (12, 12, 64)  # of gpt2-124M
GROUPED_HEADS = (16, 8, 128)  # of Qwen3-0.6B: two query heads share a KV head


def made_up_batch(requests: Step, S: int, ops: Ops, device: str) -> kernels.Batch:
    """A step whose blocks are permuted all over a pool."""
    query_lens = [n for n, _ in requests]
    lens = [context for _, context in requests]
    B = len(requests)
    M = math.ceil(max(lens) / S)
    with torch.device(device):
        tables = torch.randperm(B * M).view(B, M)
        positions = torch.cat([torch.arange(context - n, context) for n, context in requests])
        query_start = torch.tensor([0, *accumulate(query_lens)])
        context_lens = torch.tensor(lens)
        owner = torch.arange(B).repeat_interleave(query_start.diff())  # [T] whose token each is
    blocks = tables[owner, positions // S]  # [T]
    return kernels.Batch(
        tokens=positions,  # attention looks at no token ids
        positions=positions,
        slot_mapping=blocks * S + positions % S,
        query_start=query_start.int(),
        context_lens=context_lens.int(),
        block_tables=tables.int(),
        logits_index=positions[:0],
        num_decodes=query_lens.count(1),
        query_lens_host=query_lens,
        context_lens_host=lens,
        ops=ops,
    )


class Layer:
    """One layer's attention in a made-up step: in fp32 on a CPU, in bf16 on a GPU."""

    def __init__(self, requests: Step, heads: Heads, S=16, attention="auto", device="cpu"):
        H, Hk, D = heads
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        randn = partial(torch.randn, dtype=dtype, device=device)
        ops, _ = choose_ops(attention, device)
        batch = made_up_batch(requests, S, ops, device)
        T = len(batch.tokens)
        num_blocks = batch.block_tables.numel()
        self.q = randn(T, H, D)
        self.k, self.v = randn(2, T, Hk, D)
        self.kv = randn(2, num_blocks + 1, Hk, S, D)
        batch.prepared = {0: ops.prepare(batch, H, self.kv)}
        self.batch = batch
        self.attn = SimpleNamespace(window=0, scale=D**-0.5, softcap=0.0)

    def store(self):
        self.batch.ops.store_kv(self.k, self.v, self.kv, self.batch)

    def attend(self, kv: torch.Tensor):
        self.batch.ops.attend(self.q, kv, self.attn, self.batch)

    def run(self):
        self.store()
        self.attend(self.kv)


@command
def bench_attention(repeats=5) -> dict:
    """
    One layer of store_kv + attention on a CPU: 31 decodes at context 512 and a chunk of 256 tokens,
    6 heads of 64; then 8 decodes, against transformers' attention, which appends to a contiguous
    cache. The two are measured in turn.
    """
    mixed = [(1, 512)] * 31 + [(256, 512)]
    layer = Layer(mixed, (6, 6, 64))
    seconds = median_seconds(layer.run, 50)
    result = {"a layer, ms": ms(seconds, 2)}
    for H, context in (6, 128), (6, 512), (12, 512), (12, 1024):
        layer = Layer([(1, context)] * 8, (H, H, 64))
        attend, new_cache = hugging_face_attention(H, context)
        ours = []
        theirs = []
        for _ in range(repeats):
            ours.append(median_seconds(layer.run, 20))
            theirs.append(median_seconds(attend, 20, new_cache))
        row = {"ours": ms(median(ours))}
        row["Hugging Face"] = ms(median(theirs))
        result[f"8 decodes at {context}, {H} heads of 64, ms"] = row
    return result


def hugging_face_attention(H: int, context: int) -> tuple[Callable, Callable]:
    """
    One layer of transformers' attention for 8 decodes with H heads of 64, as a function that
    appends a token to a cache and attends; and one that makes such a cache, of context - 1 tokens.
    """
    from transformers import DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = torch.randn(3, 8, H, 1, 64)
    module = SimpleNamespace(is_causal=True)

    def new_cache() -> tuple:
        cache = DynamicCache()
        keys, values = torch.randn(2, 8, H, context - 1, 64)
        cache.update(keys, values, 0)
        return (cache,)

    def attend(cache):
        keys, values = cache.update(k, v, 0)
        sdpa_attention_forward(module, q, keys, values, None)

    return attend, new_cache


DECODES = {  # heads -> steps of so many decodes, each with so much context
    GPT2_HEADS: [(256, 1024), (32, 1024), (1, 1024)],
    GROUPED_HEADS: [(256, 1024), (32, 1024), (1, 1024), (1, 32768)],
    (32, 8, 128): [(64, 4096)],
    (16, 16, 128): [(64, 2048)],
}


@command
def bench_kernels(backends=("triton", "flex", "torch"), block_size=16) -> dict:
    """
    One layer of paged attention in bf16 on a GPU, S = 16 tokens a block unless said otherwise,
    block tables permuted, each call in a CUDA graph and on another pool than the one before.
    Microseconds, and which share of them it would take to read K and V once (the floor). Blocks of
    one token are what others call token-major pools, [slots, Hk, D].
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "bench.py kernels measures a GPU, there is none: "
            "on a CPU run `python bench.py attention`"
        )
    read = read_bandwidth("cuda")
    result = {"read, GB/s": round(read / 1e9)}
    for heads, steps in DECODES.items():
        H, Hk, D = heads
        for B, context in steps:
            decodes = [(1, context)] * B
            row = decode_row(decodes, heads, block_size, backends, read)
            result[f"{B} x {context}, {H}/{Hk} x {D}"] = row
    for D in (128, 64):
        us = attention_us([(2048, 2048)], (16, 16, D))
        # two products of 2 T T H D operations each; half, as a token sees none of the later ones
        teraflops = 2 * 2048**2 * 16 * D / us / 1e6
        result[f"prefill of 2048, 16 x {D}"] = {"TFLOP/s": round(teraflops)}
    decodes = [(1, 1024)] * 128
    chunks = [(256, 768)] * 8
    row = {}
    for name, step in ("together", decodes + chunks), ("decodes", decodes), ("chunks", chunks):
        us = attention_us(step, GPT2_HEADS)
        row[name] = round(us, 1)
    result["128 decodes + 8 chunks"] = row
    for heads in GPT2_HEADS, GROUPED_HEADS:
        H, Hk, D = heads
        row = {}
        for S in (1, 4, 8, 16, 32, 64, 128):
            us = attention_us([(1, 1024)] * 256, heads, S)
            row["token-major" if S == 1 else S] = round(us, 1)
        result[f"block sizes, 256 x 1024, {H}/{Hk} x {D}"] = row
    return result


def decode_row(step: Step, heads: Heads, S: int, backends: Sequence[str], read: float) -> dict:
    """Of each backend, microseconds and the share of the floor, or why it cannot do this step."""
    _, Hk, D = heads
    tokens = sum(context for _, context in step)
    floor = 1e6 * 4 * tokens * Hk * D / read  # K and V in bf16
    row = {"floor": round(floor, 1)}
    for backend in backends:
        try:
            us = attention_us(step, heads, S, backend)
            row[backend] = f"{us:.1f} ({floor / us:.0%})"
        except Exception as error:  # whatever a backend raises for a shape that it lacks
            reason = f"{type(error).__name__}: {error}"
            row[backend] = reason.split("\n")[0][:80]
    return row


def attention_us(requests: Step, heads: Heads, S=16, backend="triton") -> float:
    """
    Microseconds of one layer's attention in bf16, over as many pools as make 600 MB, at most 64.
    """
    torch._dynamo.reset()  # FlexAttention compiles for each shape, and has a limit
    torch.cuda.empty_cache()
    layer = Layer(requests, heads, S, backend, "cuda")
    number = max(2, min(64, 600_000_000 // layer.kv.nbytes))
    pools = [torch.randn_like(layer.kv) for _ in range(number)]
    return graph_us(lambda i: layer.attend(pools[i]), number)


# --------------------------------------------------------------------------------------------------
# A model on a CPU: against Hugging Face, and what smaller weights cost


@command
def bench_generate(model="10M", repeats=5, dtype="auto", quantize="none", compile=False) -> dict:
    """
    64 tokens in, 128 out, greedy: milliseconds per token of one request, per step of eight. Engine
    and Hugging Face, in fp32, in turn, so that both see the same machine. The floor is the time to
    read all weights from memory once.
    """
    gpt = build_model(model)
    theirs = hugging_face(gpt)
    in_dtype(gpt, serving_dtype(dtype, "cpu"))
    # without prefix cache each answer is computed whole
    settings = Settings(prefix_cache=False, quantize=quantize, compile=compile)
    engine = Engine(gpt, settings)
    bytes_read = weight_bytes(gpt)
    if quantize == "int8":
        bytes_read /= gpt.wte.weight.itemsize
    floor = bytes_read / read_bandwidth()
    result = {"floor, ms a step": ms(floor, 2)}
    for concurrent in (1, 8):
        result[f"{concurrent} at once"] = both_generate(engine, theirs, concurrent, repeats)
    return result


def hugging_face(model: GPT) -> Callable[[Work], Answers]:
    """The same weights in transformers: greedy answers to prompts of equal length."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(model, directory)
        theirs = AutoModelForCausalLM.from_pretrained(directory).eval()
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    @torch.inference_mode()
    def generate(work: Work) -> Answers:
        prompts = torch.tensor([prompt for prompt, _ in work])  # [B, P]
        _, P = prompts.shape
        _, longest = work[0]
        mask = torch.ones_like(prompts)
        texts = theirs.generate(prompts, attention_mask=mask, max_new_tokens=longest, **options)
        return texts[:, P:].tolist()

    return generate


def both_generate(engine: Engine, generate: Callable, concurrent: int, repeats: int) -> dict:
    """The same requests by the engine and by `generate`, in turn, other prompts each time."""
    ours = []
    theirs = []
    equal = 0
    for seed in range(repeats + 1):
        work = even_workload(concurrent, 64, 128, engine.config.vocab_size, seed)
        seconds, answers = timed(engine, work, temperature=0)
        ours.append(seconds)
        started = perf_counter()
        their_answers = generate(work)
        theirs.append(perf_counter() - started)
        equal += num_equal(answers, their_answers)
    seconds = median(ours[1:])  # the first is warm-up
    their_seconds = median(theirs[1:])
    row = {"ms a step": ms(seconds / 128, 2)}
    row["tok/s"] = round(128 * concurrent / seconds)
    row["Hugging Face, ms a step"] = ms(their_seconds / 128, 2)
    row["equal answers"] = f"{equal} of {concurrent * len(ours)}"
    return row


FORMATS = {"fp32": "none", "bf16": "none", "int8": "int8"}  # what a CPU serves -> --quantize


@command
def bench_quality(model="out/stdlib", data="stdlib") -> dict:
    """
    Held-out text, each token scored once as at the end of training, with the weights in each format
    that a CPU serves.
    """
    from train import Process, evaluate
    from training.corpus import load_corpus
    from training.report import bits_per_byte

    process = Process(torch.device("cpu"), torch.float32, compile=False)
    corpus = load_corpus(data, process)
    result = {}
    for name, quantize in FORMATS.items():
        dtype = DTYPES.get(name, torch.float32)  # integers are made of fp32
        gpt = packed_for_cpu(load_checkpoint(model, dtype=dtype), quantize)
        if gpt.config.vocab_size != corpus.tokenizer.vocab_size:
            raise ValueError(f"{model} was not trained on {data}: name its data with --data")
        nats, count = evaluate(gpt, corpus, process)
        bits = bits_per_byte(nats, corpus.scored_bytes(count))
        row = {"nats a token": round(nats / count, 5)}
        row["bits a byte"] = round(bits, 5)
        result[name] = row
    return result


# --------------------------------------------------------------------------------------------------
# The engine: speed, equality, and where a step's time goes


@command
def bench_engine(
    model="gpt2-124M", seeds=(0, 1, 2), block_size=16, no_graphs=False, no_overlap=False
) -> dict:
    """
    Offline: 256 requests at once, 100 to 1024 tokens in, as many out, temperature 0.6, for each
    seed. Latency: 1 and 32 requests of 512 tokens in and 512 out. In bf16 on a GPU, fp32 on a CPU.
    Lengths are divided for a model of shorter context. Tokens in and out are asserted. The floor of
    a run is to read the weights from memory once for each token of the longest answer, and K and V
    for each token of all.
    """
    gpt = build_model(model, DEVICE)
    V = gpt.config.vocab_size
    bandwidth = read_bandwidth(DEVICE)
    started = perf_counter()
    overlap = False if no_overlap else None
    settings = Settings(block_size=block_size, graphs=not no_graphs, overlap=overlap)
    engine = Engine(gpt, settings)
    seconds = perf_counter() - started
    result = {"start-up, s": round(seconds, 1)}
    result["engine"] = engine.statement()
    timed(engine, even_workload(4, 100, 8, V))  # warm-up
    collect_garbage_rarely()  # as the server's engine does
    for seed in seeds:
        work = offline_workload(256, scale_for(gpt.config), V, seed)
        result[f"offline, seed {seed}"] = throughput(engine, gpt, work, bandwidth)
    for n in (1, 32):
        result[f"{n} at once"] = latency(engine, n)
    return result


def throughput(engine: Engine, gpt: GPT, work: Work, bandwidth: float) -> dict:
    """The figures of one offline run."""
    seconds, _ = timed(engine, work)
    steps = max(answer for _, answer in work)
    contexts = 0  # K and V that are read, in tokens: by each token those of all before
    for prompt, answer in work:
        contexts += answer * len(prompt) + answer * (answer + 1) / 2
    bytes_read = steps * weight_bytes(gpt) + contexts * bytes_per_block(gpt, 1)
    floor = bytes_read / bandwidth
    tokens_in, tokens_out = num_tokens(work)
    row = {"in": tokens_in, "out": tokens_out}
    row["s"] = round(seconds, 2)
    row["share of the floor"] = round(floor / seconds, 3)
    row["output tok/s"] = round(tokens_out / seconds)
    return row


def latency(engine: Engine, n: int) -> dict:
    """Milliseconds of a step in which n requests decode, and of a whole answer over its tokens."""
    N = min(512, engine.config.context_length // 2)
    V = engine.config.vocab_size
    one_token = even_workload(n, N, 1, V, seed=n)
    prefill, _ = timed(engine, one_token)
    others = even_workload(n, N, N, V, seed=-n - 1)  # without prefix hits
    whole, _ = timed(engine, others)
    step = (whole - prefill) / (N - 1)
    row = {"ms a step": ms(step)}
    row["whole, ms a token"] = ms(whole / N)
    return row


@command
def bench_equality(model="out/stdlib") -> dict:
    """
    The offline workload on a trained model, lengths over 8, greedy: whether answers are the same
    with CUDA graphs and overlap on and off, and in fp32 those of the dense model, which is given
    each answer and must choose each of its tokens (unless its best two logits lie within 1e-4). In
    bf16, the share of tokens equal to fp32's, place by place.
    """
    fp32 = load_checkpoint(model, DEVICE, torch.float32)
    bf16 = load_checkpoint(model, DEVICE, torch.bfloat16)
    config = fp32.config
    work = []
    for prompt, answer in offline_workload(scale=8, V=config.vocab_size):
        room = config.context_length - answer
        work.append((prompt[-room:], answer))
    exact, exact_changes = answers_four_ways(fp32, work)
    rounded, rounded_changes = answers_four_ways(bf16, work)
    wrong = 0
    for (prompt, _), answer in zip(work, exact, strict=True):
        wrong += not_greedy(fp32, prompt, answer)
    tokens = list(chain(*exact))
    equal = num_equal(tokens, chain(*rounded))
    result = {"tokens": len(tokens)}
    result["fp32, graphs and overlap change"] = exact_changes
    result["bf16, graphs and overlap change"] = rounded_changes
    result["fp32, tokens unlike the dense model's"] = wrong
    result["bf16, share of fp32's tokens"] = round(equal / len(tokens), 4)
    return result


def answers_four_ways(model: GPT, work: Work) -> tuple[Answers, int]:
    """
    Greedy answers with graphs and overlap; and of the other three ways, how many answer otherwise.
    """
    answers = []
    for graphs, overlap in product((True, False), repeat=2):
        settings = Settings(graphs=graphs, overlap=overlap)
        _, found = timed(Engine(model, settings), work, temperature=0)
        answers.append(found)
    first = answers[0]
    return first, sum(other != first for other in answers)


@torch.inference_mode()
def not_greedy(model: GPT, prompt: list[int], answer: list[int]) -> int:
    """How many tokens of an answer the dense model would not have chosen, near-ties aside."""
    device = model.wte.weight.device
    text = torch.tensor(prompt + answer, device=device)
    P = len(prompt)
    logits, _ = model(text[None, :-1])
    logits = logits[0, P - 1 :].float()  # [n, V]
    chosen = logits.gather(1, text[P:, None])  # [n, 1]
    best = logits.amax(1, keepdim=True)
    missed = best - chosen > 1e-4
    return int(missed.sum())


@command
def bench_overhead(model="gpt2-124M") -> dict:
    """
    Decode steps of 1, 32 and 256 requests (1, 8 and 32 on a CPU) at context 900: milliseconds a
    step; the floor is to read weights, K and V from memory once. On a GPU also how long the host
    works on a step, how many kernels the step has, and where the device's time goes (each kernel
    counts from the end of the one before: with programmatic dependent launch it may start earlier,
    and then waits).
    """
    steps = 64
    on_gpu = DEVICE == "cuda"
    gpt = build_model(model, DEVICE)
    bandwidth = read_bandwidth(DEVICE)
    engine = Engine(gpt, Settings(prefix_cache=False))
    context = min(900, gpt.config.context_length - 100)  # no request ends in the steps below
    rows = {}
    for n in (1, 32, 256) if on_gpu else (1, 8, 32):
        let_decode(engine, n, context)
        seconds = step_seconds(engine, steps)
        contexts = n * (context + steps / 2)  # of all requests, halfway
        kv_bytes = contexts * bytes_per_block(gpt, 1)
        floor = (weight_bytes(gpt) + kv_bytes) / bandwidth
        row = {"ms a step": ms(seconds)}
        row["floor, ms"] = ms(floor)
        if on_gpu:
            host = step_seconds(engine, 16, wait_before=True)
            row["host, ms"] = ms(host)
        rows[n] = row
    if on_gpu:  # last: once there was a profiler, each launch takes longer
        for n, row in rows.items():
            let_decode(engine, n, context)
            row |= device_time(engine, 8)
    return {f"{n} requests": row for n, row in rows.items()}


def let_decode(engine: Engine, n: int, context: int):
    """Drop what the engine has, and bring it to where n requests decode at this context length."""
    for id in list(engine.requests):
        engine.abort(id)
    while engine.has_work:
        engine.step()
    room = engine.config.context_length - context
    work = even_workload(n, context, room, engine.config.vocab_size)
    for i, (prompt, answer) in enumerate(work):
        params = fixed_length(answer, 0.6, seed=i)
        engine.add_request(i, prompt, params)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()


def step_seconds(engine: Engine, steps: int, wait_before=False) -> float:
    """
    Median seconds of a step. With `wait_before`, of the host's work in it: the device has finished
    before the step begins, so the host finds the tokens of the step before there, and does not wait
    for those of the step that it launches (with overlap, as on a GPU).
    """
    times = []
    for _ in range(steps):
        if wait_before:
            torch.cuda.synchronize()
        started = perf_counter()
        engine.step()
        times.append(perf_counter() - started)
    return median(times)


def next_step(engine: Engine, kv=None, **own) -> tuple[kernels.Batch, Callable]:
    """
    The inputs of the engine's next step, for walkthrough.py, and a function that computes its
    logits [8, V], of the first eight requests, with plain torch and, in its place, `own` operators;
    on the pool, or on `kv`, which has something for each layer. The engine itself does not move.
    """
    plan = engine.scheduler.plan()
    runner = engine.runner
    runner.fill_rows(*plan.admitted or plan.decodes)
    shape = runner.padded_shape(plan)
    packed = inputs.pack(plan, shape, runner.padding_row, runner.pool.sink)
    step = inputs.split(inputs.upload(packed, runner.device), shape)
    batch = inputs.lay_out(step, shape, plan, runner.known, TORCH._replace(**own))
    pool = runner.pool.kv
    batch.prepared = {0: gather.prepare_torch(batch, runner.model.config.n_head, pool[0])}

    def compute() -> torch.Tensor:
        x = runner.model.hidden(batch, pool if kv is None else kv)
        return runner.model.logits(x[batch.logits_index], batch.ops)[:8]

    return batch, compute


def next_logits(engine: Engine) -> torch.Tensor:
    """Let the engine launch its next step, overlapped, whose logits these will be."""
    engine.overlap = True
    engine.step()
    return engine.in_flight.logits


KINDS = {  # parts of a kernel's name -> its work
    "attention": ("decode_kernel", "prefill_kernel"),
    "linear layers": ("vector_kernel", "matrix_kernel", "gemm", "cutlass", "nvjet", "gate_kernel"),
    "norms": ("norm_kernel",),
    "sampling": ("threshold_kernel", "gumbel_max_kernel"),
    "store": ("store_kv_kernel", "place_kernel"),
}


def kind_of(kernel: str) -> str:
    """Which of the KINDS a kernel is by its name, or "rest"."""
    for kind, parts in KINDS.items():
        if any(part in kernel for part in parts):
            return kind
    return "rest"


def seconds_by_kind(launches: Iterable[tuple]) -> dict[str, float]:
    """
    launches: (start, end, name) of each kernel, in microseconds, sorted. A kernel counts from the
    end of the one before: while both run, the later one waits for the earlier one's data.
    """
    seconds = dict.fromkeys([*KINDS, "rest"], 0.0)
    last_end = 0.0
    for start, end, name in launches:
        start = max(start, last_end)
        last_end = max(end, last_end)
        seconds[kind_of(name)] += 1e-6 * (last_end - start)
    return seconds


def device_time(engine: Engine, steps: int) -> dict:
    """Kernels a step, and the milliseconds of a step that the device spends in each kind."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()  # what was under way does not count
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    launches = []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # the others are calls of the host
            span = event.time_range
            launches.append((span.start, span.end, event.name))
    row = {"kernels": round(len(launches) / steps)}
    launches.sort()
    for kind, seconds in seconds_by_kind(launches).items():
        row[kind] = ms(seconds / steps)
    return row


# --------------------------------------------------------------------------------------------------
# The server

SLOW = 1000  # bytes a second that a slow client reads
CLIENT_PROCESSES = max(1, 3 * os.cpu_count() // 4)


@command
def bench_server(
    model="out/stdlib",
    streams=(1, 32, 256),
    client_processes=CLIENT_PROCESSES,
    slow_clients=0,
    rate=0.0,
    repeats=1,
    flags="",
) -> dict:
    """
    The offline workload over HTTP: as many requests as streams, all at once, and then again, with
    other prompts, at random times (Poisson) at --rate requests a second (0: at 70% of what was
    managed at once). The clients are processes of their own with raw sockets, see assets/load.py.
    Output tokens per second until the last token; milliseconds from when a request was due to its
    first token; milliseconds between arrivals of text. With --slow-clients N there are two more
    runs: N of the clients read at full speed, then at 1 KB/s; both rows are of the other clients.
    Where the model's context is too short, the workload's lengths are divided. Afterwards the same
    requests, all at once, without a server, by Engine.generate with as many threads as the server's
    engine has: the share of that speed that is left over HTTP.
    """
    from serve import build_engine, engine_threads, parse_args

    config = load_config(model)
    V = config.vocab_size
    seeds = count(1)

    def new_work(n: int) -> Work:
        return offline_workload(n, scale_for(config), V, next(seeds))

    works = {n: [new_work(n) for _ in range(repeats)] for n in streams}
    result = {}
    with server(model, flags) as (host, port):

        def measure(work: Work, rate=0.0, num_slow=0, skip=0) -> dict:
            requests = completions(work, rate, num_slow)
            rows = load.run_clients(host, port, requests, client_processes)
            return load.summary(rows[skip:])

        measure(offline_workload(8, 8, V))  # warm-up
        for n in streams:
            runs = [measure(work) for work in works[n]]
            runs.sort(key=lambda run: run["s"])
            middle = runs[repeats // 2]
            result[f"{n} streams"] = middle
            if n == 1:
                continue
            per_second = rate or round(0.7 * n / middle["s"], 1)
            work = new_work(n)
            result[f"{n} at {per_second}/s"] = measure(work, per_second)
            if not 0 < slow_clients < n:
                continue
            for slow in (0, slow_clients):
                work = other_tokens(work, V)
                result[f"{n} streams, {slow} slow"] = measure(work, 0, slow, slow_clients)
    torch.set_num_threads(engine_threads())
    args = parse_args(["--model", model, *flags.split()])
    engine = build_engine(args)
    timed(engine, offline_workload(8, 8, V, seed=99))  # warm-up
    for n in streams:
        row = result[f"{n} streams"]
        seconds = median(timed(engine, work)[0] for work in works[n])
        row["of the engine alone"] = f"{seconds / row['s']:.0%}"
    return result


@contextmanager
def server(model: str, flags: str) -> Iterator[list[str]]:
    """serve.py in a process of its own: its host and port."""
    command = [sys.executable, "serve.py", "--model", model, "--port", "0", "--no-access-log"]
    command += flags.split()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        greeting = process.stdout.readline()
        if not greeting:
            raise ValueError("the server did not start: see above")
        _, _, address = greeting.strip().rpartition("//")
        yield address.split(":")
    finally:
        process.terminate()
        process.wait(60)


def other_tokens(work: Work, V: int) -> Work:
    """Requests of the same lengths, none of whose blocks is in the prefix cache."""
    return [([(token + 1) % V for token in prompt], answer) for prompt, answer in work]


def completions(work: Work, rate=0.0, num_slow=0) -> list[dict]:
    """
    HTTP requests for assets/load.py: all at once or, with a rate, at the times of a Poisson
    process. The first num_slow of the clients are slow.
    """
    rng = Random(0)
    at = 0.0
    found = []
    for i, (prompt, answer) in enumerate(work):
        if rate:
            at += rng.expovariate(rate)
        speed = SLOW if i < num_slow else None
        found.append(load.completion(prompt, answer, at, speed))
    return found


# --------------------------------------------------------------------------------------------------
# What continuous batching and paged KV memory gain, with pictures


@command
def bench_batching(model="1M", device="cpu", repeats=3, out=Path("out/batching.png")) -> dict:
    """
    96 requests, all there at the start: prompts and answers of 12 to 128 tokens (the offline
    workload's 100 to 1024 over 8), greedy, one model, the same engine and kernels, KV memory for
    4,096 tokens. One by one; in static batches of 16, a slab of 256 tokens each, padded to the
    longest prompt and run to the longest answer; continuously, 16 at once; and continuously with as
    many as blocks of 16 have room for. Only tokens that were asked for count.
    """
    gpt = build_model(model, device)
    work = offline_workload(96, 8, gpt.config.vocab_size)
    rectangles = [padded(work[i : i + 16]) for i in range(0, 96, 16)]
    ways = {  # at most so many at once, and batches, one after the other
        "one by one": (1, [[request] for request in work]),
        "static batches": (16, rectangles),
        "continuous, 16 at once": (16, [work]),
        "continuous": (64, [work]),
    }
    runs = {name: [] for name in ways}
    for _ in range(repeats):  # in turn, so that all see the same machine
        for name, (at_once, batches) in ways.items():
            settings = Settings(
                num_blocks=256, max_num_seqs=at_once, watermark=0, prefix_cache=False
            )
            engine = Engine(gpt, settings)
            warm_up = [(prompt, 2) for prompt, _ in work[:at_once]]
            serve_batches(engine, [warm_up])
            run = serve_batches(engine, batches)
            runs[name].append(run)
    tokens_in, tokens_out = num_tokens(work)
    result = {"tokens in": tokens_in, "tokens out": tokens_out}
    curves = {}
    for name, found in runs.items():
        found.sort(key=lambda run: run[0][-1])
        ended, answers = found[repeats // 2]
        seconds = ended[-1]
        if name == "one by one":
            slowest = seconds
            alone = answers
        rate = round(tokens_out / seconds)
        row = {"requests/s": round(96 / seconds, 1)}
        row["tok/s"] = rate
        row["times one by one"] = round(slowest / seconds, 1)
        if name.startswith("continuous"):
            row["equal answers"] = f"{num_equal(answers, alone)} of 96"
        result[name] = row
        curves[f"{name}: {rate} tok/s"] = ended
    return result | draw.ended_requests(curves, out)


def serve_batches(engine: Engine, batches: list[Work]) -> tuple[list[float], Answers]:
    """
    Serve one batch after the other, greedily. Returns the seconds from the start at which requests
    ended, and the answers.
    """
    ended = []
    requests = []
    started = perf_counter()
    for batch in batches:
        for prompt, answer in batch:
            params = fixed_length(answer)
            request = engine.add_request(len(requests), prompt, params)
            requests.append(request)
        while engine.has_work:
            outputs = engine.step()
            now = perf_counter() - started
            ended += [now for output in outputs if output.finish_reason is not None]
    answers = [request.generated_tokens for request in requests]
    check_complete(answers, [n for _, n in chain(*batches)])
    return ended, answers


def padded(batch: Work) -> Work:
    """The batch as a rectangle: every prompt as long as the longest, every answer too."""
    longest = max(len(prompt) for prompt, _ in batch)
    answer = max(n for _, n in batch)
    rectangle = []
    for prompt, _ in batch:
        padding = [0] * (longest - len(prompt))
        rectangle.append((padding + prompt, answer))
    return rectangle


@command
def bench_memory(out=Path("out/memory.png")) -> dict:
    """
    KV memory for 32,768 tokens, as slabs of the longest text (2,048) or as blocks: how many of 256
    requests (prompts and answers of 100 to 1024 tokens) run at once while others wait; waste inside
    (taken, but no token is there) and outside (free, but too little for the next prompt). A slab is
    a block as long as the longest text. Then one layer of gpt2-124M in fp32 on a CPU: microseconds
    to append a token to a text, by torch.cat to contiguous K and V, and by store_kv to the pool.
    """
    pools = {}
    for S in (2048, 128, 64, 32, 16, 8, 4):
        kind = "slabs" if S == 2048 else "blocks"
        pools[f"{kind} of {S}"] = fill_pool(S, 32_768)
    contexts = (128, 256, 512, 1024, 2048)
    appends = {context: append_us(context) for context in contexts}
    result = pools | {"append a token at, us": appends}
    return result | draw.memory_use(pools, appends, out)


def fill_pool(S: int, room: int) -> dict:
    """
    Serve the offline workload from a pool of `room` tokens in blocks of S, by the scheduler and
    without a model. Returns means over the steps in which a request waits.
    """
    budget = 2**20  # tokens a step: any prompt is computed in one
    settings = SchedulerSettings(prefix_cache=False)
    scheduler = Scheduler("fcfs", budget, room, S, settings=settings)
    for i, (prompt, n) in enumerate(offline_workload()):
        scheduler.add_request(Request(i, prompt, n))
    allocator = scheduler.block_allocator
    crowded = []  # of each step in which a request waits: requests, tokens taken, tokens filled
    while not scheduler.is_done():
        plan = scheduler.plan()
        if scheduler.waiting:
            taken = (allocator.num_blocks - allocator.num_free) * S
            filled = sum(r.num_filled_slots for r in scheduler.running) + plan.num_tokens
            crowded.append((len(scheduler.running), taken, filled))
        scheduler.update(plan, [0] * len(plan.sampled))
    at_once, taken, filled = map(mean, zip(*crowded, strict=True))
    parts = {"tokens": filled}
    parts["waste inside"] = taken - filled
    parts["waste outside"] = room - taken
    row = {"at once": round(at_once, 1)}
    for name, tokens in parts.items():
        row[f"{name}, %"] = round(100 * tokens / room, 1)
    return row | {"preemptions": scheduler.num_preemptions}


def append_us(context: int) -> dict[str, float]:
    """
    Microseconds to append one token's K, V to a text in one layer, two ways; with it, the text has
    `context` tokens.
    """
    layer = Layer([(1, context)], GPT2_HEADS)
    k = layer.k[:, :, None]
    v = layer.v[:, :, None]
    K, V = torch.randn(2, 1, 12, context - 1, 64)

    def concatenate():
        torch.cat([K, k], 2)
        torch.cat([V, v], 2)

    row = {}
    for name, append in ("torch.cat", concatenate), ("store_kv", layer.store):
        us = 1e6 * median_seconds(append, 100)
        row[name] = round(us, 1)
    return row


PROMPTS = (1, 4, 16, 64, 256, 1024)  # tokens of a prompt that is one step
DECODES_AT_ONCE = (1, 4, 16, 64)
DECODED_CONTEXT = 128  # tokens before the first of these


@command
def bench_phases(model="gpt2-124M", device="cpu", repeats=11, out=Path("out/phases.png")) -> dict:
    """
    Prefill against decode: steps that compute a whole prompt of 1 to 1,024 tokens, and steps of 1
    to 64 decodes with contexts of about 128. Tokens per second; operations for each byte that must
    be read (all weights once, K and V of the contexts); and which share of what the machine can do
    that is: its speed of multiplying two large matrices, and of reading memory, measured first.
    """
    gpt = build_model(model, device)
    product = product_speed(gpt.wte.weight.dtype, device)
    read = read_bandwidth(device)
    room = max(DECODES_AT_ONCE) * 2 * DECODED_CONTEXT
    settings = Settings(
        num_blocks=room // 16,
        max_num_seqs=max(DECODES_AT_ONCE),
        token_budget=max(PROMPTS),
        watermark=0,
        prefix_cache=False,
        overlap=False,
    )
    engine = Engine(gpt, settings)
    prompts = {n: prompt_step(engine, n, repeats) for n in PROMPTS}
    decodes = {n: decodes_step(engine, n, repeats) for n in DECODES_AT_ONCE}
    rows = {}
    for name, steps in ("a prompt", prompts), ("decodes", decodes):
        rows[name] = {}
        for n, (seconds, contexts, pairs, sampled) in steps.items():
            operations, read_bytes = work_of_step(gpt, n, contexts, pairs, sampled)
            row = {"tok/s": round(n / seconds)}
            row["FLOP/byte"] = round(operations / read_bytes, 2)
            row["% of products"] = round(100 * operations / seconds / product, 1)
            row["% of memory"] = round(100 * read_bytes / seconds / read, 1)
            rows[name][n] = row
    result = {"products, GFLOP/s": round(product / 1e9), "read, GB/s": round(read / 1e9, 1)}
    result["equal at, FLOP/byte"] = round(product / read, 1)
    return result | rows | draw.phases(rows, out)


def product_speed(dtype: torch.dtype, device="cpu") -> float:
    """Operations per second of the product of two large matrices."""
    n = 2048 if device == "cpu" else 8192
    a, b = torch.randn(2, n, n, dtype=dtype, device=device)
    if device == "cpu":
        return 2 * n**3 / median_seconds(lambda: a @ b, 10)
    return 2e6 * n**3 / graph_us(lambda i: a @ b, 4)


Measured = tuple[float, int, int, int]  # seconds, tokens of the contexts, pairs, rows of logits


def prompt_step(engine: Engine, n: int, repeats: int) -> Measured:
    """A step that computes a whole prompt; of its n (n + 1) / 2 pairs a token sees the other."""
    prompt = random_tokens(Random(n), n, engine.config.vocab_size)
    params = fixed_length(1)

    def add():
        engine.add_request("prompt", prompt, params)
        return ()

    seconds = median_seconds(engine.step, repeats, add)
    return seconds, n, n * (n + 1) // 2, 1


def decodes_step(engine: Engine, n: int, repeats: int) -> Measured:
    """A step of n decodes; each sees its own context."""
    requests = []
    for i, (prompt, _) in enumerate(even_workload(n, DECODED_CONTEXT, 1, engine.config.vocab_size)):
        requests.append(engine.add_request(i, prompt, fixed_length(DECODED_CONTEXT)))
    while len(engine.scheduler.active) < n:
        engine.step()
    seconds = median_seconds(engine.step, repeats)
    contexts = sum(request.num_filled_slots for request in requests)
    for i in range(n):
        engine.abort(i)
    return seconds, contexts, contexts, n


def work_of_step(gpt: GPT, n: int, contexts: int, pairs: int, sampled: int) -> tuple[int, int]:
    """Operations of a step of n tokens (a product and a sum are two), and bytes that it reads."""
    config = gpt.config
    weights = sum(weight.numel() for weight in gpt.h.parameters() if weight.dim() == 2)
    head = config.vocab_size * config.n_embd
    in_attention = 4 * pairs * config.n_layer * config.n_head * config.head_size  # QK and AV
    operations = 2 * (n * weights + sampled * head) + in_attention
    read = (weights + head) * gpt.wte.weight.itemsize + contexts * bytes_per_block(gpt, 1)
    return operations, read


# --------------------------------------------------------------------------------------------------
# Records: runs to look at, their check, their picture

Arrivals = dict[int, list[dict]]  # step -> arguments of Engine.add_request


def tight_pool(device: str) -> tuple[Engine, Arrivals]:
    """
    Nine requests, one every four steps, in a pool that is too small for them; every second one
    begins like the others.
    """
    settings = Settings(block_size=4, num_blocks=32, max_num_seqs=8, token_budget=16, watermark=0)
    engine = Engine(build_model("1M", device), settings)
    rng = Random(0)
    prefix = random_tokens(rng, 12, 64)
    arrivals = {}
    for i in range(9):
        length = rng.randint(4, 24)
        prompt = random_tokens(rng, length, 64)
        if i % 2:
            prompt = prefix + prompt
        params = fixed_length(rng.randint(12, 36))
        arrivals[4 * i] = [{"id": i, "prompt_tokens": prompt, "params": params}]
    return engine, arrivals


def forks(device: str) -> tuple[Engine, Arrivals]:
    """
    Prompts that begin alike; of each third one four answers are sampled, forks that copy its last
    block when they write to it.
    """
    settings = Settings(block_size=8, num_blocks=96, max_num_seqs=16, token_budget=48)
    engine = Engine(build_model("1M", device), settings)
    rng = Random(0)
    prefix = random_tokens(rng, 40, 64)
    arrivals = {}
    for i in range(9):
        length = rng.randint(3, 29)
        prompt = prefix + random_tokens(rng, length, 64)
        params = fixed_length(rng.randint(16, 48), 0.8, seed=i)
        n = 4 if i % 3 == 1 else 1
        arrivals[6 * i] = [{"id": i, "prompt_tokens": prompt, "params": params, "n": n}]
    return engine, arrivals


def many_requests(device: str) -> tuple[Engine, Arrivals]:
    """The offline workload, its lengths divided by 4, all at once."""
    settings = Settings(num_blocks=3072, max_num_seqs=256)
    gpt = build_model("gpt2-124M", device)
    work = offline_workload(256, 4)
    timed(Engine(gpt, settings), work)  # compiles what there is to compile
    engine = Engine(gpt, settings)
    requests = []
    for i, (prompt, n) in enumerate(work):
        requests.append({"id": i, "prompt_tokens": prompt, "params": fixed_length(n, 0.6, seed=i)})
    return engine, {0: requests}


MAX_COLUMNS = 1000  # steps of a picture
MAX_ROWS = 1024  # and blocks
LISTS = {"requests": "new", "preemptions": "preempted", "copies": "copied", "evictions": "evicted"}
RUNS = {"forks": forks, "preemption": tight_pool, "h200": many_requests}


def recorded(engine: Engine, arrivals: Arrivals) -> bytes:
    """Serve requests that arrive at given steps. Returns the record."""
    engine.recorder = Recorder(engine)
    lines = [engine.recorder.snapshot()]
    engine.recorder.listeners.append(lines.append)
    turns = count()
    while arrivals or engine.has_work:
        for arguments in arrivals.pop(next(turns), ()):
            engine.add_request(**arguments)
        engine.step()
    return "".join(f"{line}\n" for line in lines).encode()


@command
def bench_record(name: str, device="cpu", out=Path("out/record.jsonl")) -> dict:
    """
    A run to look at, written as a record. forks: requests that begin alike, and forks with
    copy-on-write; preemption: a tight pool; h200: 256 requests at once, for a GPU. Those in assets/
    are made so. Their tokens are random, and not in the record.
    """
    record = recorded(*RUNS[name](device))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(record)
    return {"lines": record.count(b"\n"), "KB": len(record) // 1000}


@command
def bench_replay(file: str, out=Path("out/replay.png")) -> dict:
    """
    Check a record, line by line: no block is lost, reference counts are those of the block tables,
    what was idle for longest is evicted first, each token is computed once. Then draw the block
    map: at most 1024 of the blocks and 1000 of the steps, evenly spaced.
    """
    with open_record(file) as record:
        return replayed(record, out)


@command
def bench_blockmap(out=Path("out/blockmap.png")) -> dict:
    """
    A mixed run in a small pool: shared prefixes, chunked prefills, growth, preemption. Colours are
    requests, grey is cached and idle, white is free; a block that several requests hold is split.
    """
    return replayed(io.BytesIO(recorded(*tight_pool("cpu"))), out)


@command
def bench_page(file: str):
    """The page of serve.py with a record inside, as one file that can be hosted anywhere."""
    with open_record(file) as record:
        page = page_with_record(line for _, line in read_lines(record) if line["event"] != "cut")
    sys.stdout.buffer.write(page.encode())  # it says of itself that it is UTF-8


def replayed(record: BinaryIO, out: Path) -> dict:
    """Check a record and draw it; what happened in it."""
    counts = Counter()
    times = []
    columns = []
    every = 1  # of so many steps one is drawn
    for state, line in replay(record):
        for name, field in LISTS.items():
            counts[name] += len(line.get(field, ()))
        counts["tokens in"] += sum(n for _, _, n in line.get("chunks", ()))
        counts["tokens out"] += line.get("sampled", 0)
        counts["hit tokens"] += sum(hits for _, hits in line.get("admitted", ()))
        counts["peak blocks"] = max(counts["peak blocks"], len(state.owners))
        counts["steps"] += line["event"] == "step" and "step" in line
        if counts["steps"] == every * (len(columns) + 1):
            columns.append(column_of(state))
        if len(columns) > MAX_COLUMNS:
            columns = columns[1::2]
            every *= 2
        times.append(state.time)
    # from 0 again where the engine was restarted
    counts["seconds"] = round(sum(max(0, b - a) for a, b in pairwise(times)), 2)
    if line["event"] == "cut":
        counts["last line"] = "cut off: the server was killed"
    title = f"{counts['requests']} requests in a pool of {state.num_blocks} blocks"
    return counts | draw.block_map(columns, (counts["steps"], state.num_blocks), title, out)


def column_of(state: State) -> draw.Column:
    """
    Who holds which block, and which are idle: of a large pool some blocks, evenly spaced. And the
    requests in each status.
    """
    blocks = range(0, state.num_blocks, math.ceil(state.num_blocks / MAX_ROWS))
    owners = [sorted(state.owners.get(block, ())) for block in blocks]
    idle = {row for row, block in enumerate(blocks) if block in state.idle}
    return owners, idle, Counter(request.status for request in state.requests.values())


# --------------------------------------------------------------------------------------------------
# The command line


def add_argument(parser: argparse.ArgumentParser, argument: inspect.Parameter):
    """The flag of a command's argument; of a tuple it takes several values."""
    default = argument.default
    if default is argument.empty:
        choices = CHOICES.get(argument.name)
        parser.add_argument(argument.name, choices=choices, help=FLAGS[argument.name])
        return
    flag = "--" + argument.name.replace("_", "-")
    options = {}
    if flag in CHOICES:
        options["choices"] = CHOICES[flag]
    values = (default,)
    if isinstance(default, tuple):
        values = default
        options["nargs"] = "+"
    kind = type(values[0])
    if kind is int:  # 0 is for what may be 0 by default
        kind = at_least(min(1, *values))
    elif kind is float:
        kind = not_negative
    add_flag(parser, flag, FLAGS[flag], default, kind, **options)


def build_parser() -> argparse.ArgumentParser:
    as_it_stands = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **as_it_stands)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, bench in COMMANDS.items():
        command = commands.add_parser(name, description=inspect.getdoc(bench), **as_it_stands)
        for argument in inspect.signature(bench).parameters.values():
            add_argument(command, argument)
    return parser


def main():
    arguments = vars(build_parser().parse_args())
    name = arguments.pop("command")
    bench = COMMANDS[name]
    print(inspect.getdoc(bench), file=sys.stderr)
    try:
        figures = bench(**arguments)
    except ValueError as error:  # a --model that is missing or broken; what this machine cannot do
        sys.exit(str(error))
    if figures is None:  # it has printed what it makes
        return
    result = {"bench": name} | arguments | conditions() | figures
    for name, value in result.items():
        print(f"{name:>24}: {value}", file=sys.stderr)
    print(json.dumps(result, default=str))  # a path is no JSON


if __name__ == "__main__":
    main()
