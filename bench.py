"""
Every number in the README, reproducible: one command each, the conditions first and one line of
JSON last.

    python bench.py scheduler     # Python time of plan + update, per step
    python bench.py attention     # on a CPU, one layer: a mixed step; decodes against Hugging Face's attention
    python bench.py kernels       # on a GPU, one layer: decodes, prefill, mixed; block sizes and layouts; the floor
    python bench.py engine        # tokens per second of a mixed workload, latency of 1 and of 32 requests
    python bench.py equality      # the same greedy answers with graphs, overlap, neither; those of the dense model
    python bench.py overhead      # where the time of a decode step goes, on the device and on the host
    python bench.py server        # the offline workload over HTTP, as 1, 32 and 256 streams
    python bench.py generate      # engine against Hugging Face's generate, 1 and 8 requests at once
    python bench.py batching      # one by one, in static batches, continuously: the same requests and kernels
    python bench.py memory        # contiguous slabs against blocks: who fits, what is wasted, what an append costs
    python bench.py quality       # bits per byte of held-out text in fp32, bf16 and int8 weights
    python bench.py blockmap      # picture: who owned which block in each step of a mixed run

Each `bench_*` takes the flags and returns its figures; its docstring is the workload and is printed
first. Seeds are fixed, warm-up is not counted, times are medians. Nothing else should run beside
them: a second busy process on two cores makes 100 ms of a token of 1 ms, because threads that wait
for each other spin.
"""

import argparse
import inspect
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from commands import SPINS_SERVING

os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)  # before torch is loaded

import torch

import kernels
from model import (
    DTYPES,
    GPT,
    GPTConfig,
    load_checkpoint,
    load_config,
    packed_for_cpu,
    save_checkpoint,
    serving_dtype,
)
from paged import Request, Scheduler, SchedulerSettings
from serving import fused as layers
from serving import load
from serving.engine import Engine
from serving.params import SamplingParams
from serving.settings import Settings

# random weights of these shapes; the figures depend on the shape alone
MODELS = {
    "1M": GPTConfig(vocab_size=65, context_length=256, n_layer=4, n_head=4, n_embd=128),
    "10M": GPTConfig(vocab_size=65, context_length=256, n_layer=6, n_head=6, n_embd=384),
    "gpt2-124M": GPTConfig(context_length=2048),
}


FLAGS = {  # what --help says of them; which a command has, and their defaults, stands above its function
    "--model": "1M, 10M or gpt2-124M (random weights), or a model directory",
    "--repeats": "counted runs of each, in turn; the median is printed",
    "--backends": "ways of attention to measure",
    "--block-size": "tokens per KV block",
    "--dtype": "of our weights",
    "--quantize": "our weights as integers",
    "--compile": "our step of one request",
    "--data": "what the model was trained on: a name in data/, or a folder",
    "--seeds": "of the workloads, once each",
    "--no-graphs": "launch each kernel by itself",
    "--no-overlap": "wait for each step before the next is planned",
    "--streams": "requests at once",
    "--client-processes": "that the clients are spread over",
    "--slow-clients": "how many of them read 1 KB/s",
    "--rate": "requests a second of the run at random times; 0: by what was managed at once",
    "--flags": "of serve.py, as in --flags='--dtype bf16'",
    "--device": "cpu, in fp32, or cuda, in bf16",
    "--out": "where to write the picture; those of the README are in assets/",
}
COMMANDS: dict[
    str, tuple[Callable, dict]
] = {}  # name -> its function, its flags with their defaults
SLOW = 1000  # bytes a second that a slow client reads
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Work = list[tuple[list[int], int]]  # requests: a prompt, and how many tokens to answer


def command(**defaults) -> Callable:
    """
    Makes `bench_NAME(args)` the command NAME, with these flags: a list takes several values, False
    is switched on, and of a tuple one is chosen, by default the first.
    """

    def register(bench: Callable) -> Callable:
        COMMANDS[bench.__name__.removeprefix("bench_")] = bench, defaults
        return bench

    return register


def median_ms(work: Callable, repeats: int, setup: Callable = lambda: ()) -> float:
    """Median milliseconds of work(*setup()), the set-up not counted, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        arguments = setup()
        started = time.perf_counter()
        work(*arguments)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def graph_us(work: Callable, number: int, repeats: int = 15) -> float:
    """
    Median microseconds of work(i) on the GPU, captured for i in 0 .. number - 1 in one CUDA graph:
    no launch is waited for, and with other data for each i nothing is found in the cache.
    """
    for i in range(number):
        work(i)  # compiles
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(number):
            work(i)
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / number)
    return statistics.median(times[1:])


def read_bandwidth(device: str = "cpu") -> float:
    """
    Bytes per second at which memory is read, measured as the sum of numbers too many for any cache.
    """
    x = torch.ones(2**26 if device == "cpu" else 2**30, device=device)
    return x.nbytes / (
        1e-3 * median_ms(x.sum, 10) if device == "cpu" else 1e-6 * graph_us(lambda i: x.sum(), 4)
    )


def conditions() -> dict:
    """What the figures depend on besides the code."""
    cpu = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else cpu
    return {"device": device, "python": platform.python_version(), "torch": torch.__version__}


def a_model(name: str, device: str = "cpu") -> GPT:
    """
    Random weights of a named shape, or the model in a directory: in fp32 on a CPU, in bf16 on a
    GPU.
    """
    torch.manual_seed(0)
    model = GPT(MODELS[name]).eval() if name in MODELS else load_checkpoint(name)
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).requires_grad_(
        False
    )


def exactly(n: int, temperature: float = 0, seed: int | None = None) -> SamplingParams:
    """An answer of n tokens, greedy if not said otherwise."""
    return SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=seed)


def even_workload(n: int, tokens_in: int, tokens_out: int, V: int, seed: int = 0) -> Work:
    """n requests of the same size, with random prompts."""
    rng = random.Random(seed)
    return [([rng.randrange(V) for _ in range(tokens_in)], tokens_out) for _ in range(n)]


def offline_workload(n: int = 256, scale: int = 1, V: int = 10_001, seed: int = 0) -> Work:
    """
    nano-vLLM's workload of 256 requests (prompt, tokens to answer), 100 to 1024 tokens each; or the
    first n of them, lengths over `scale`, in a vocabulary of V.
    """
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    answers = [rng.randint(100, 1024) for _ in range(256)]
    totals = sum(map(len, prompts)), sum(answers)
    assert seed != 0 or totals == (142_827, 133_966), "not the workload that others measure"
    both = list(zip(prompts, answers, strict=True))[:n]
    return [
        ([token % V for token in prompt[: len(prompt) // scale]], answer // scale)
        for prompt, answer in both
    ]


def scale_for(config: GPTConfig) -> int:
    """What the offline workload's lengths must be divided by to fit."""
    return max(1, -(-2048 // config.context_length))


def timed(engine: Engine, work: Work, temperature: float = 0.6) -> tuple[float, list[list[int]]]:
    """
    Seconds to serve requests that are all there at the start, and the answers. Tokens in and out
    are asserted.
    """
    prompts, lengths = map(list, zip(*work, strict=True))
    params = [exactly(n, temperature, seed=i) for i, n in enumerate(lengths)]
    before, started = engine.counts(), time.perf_counter()
    answers = engine.generate(prompts, params, progress=False)
    seconds, after = time.perf_counter() - started, engine.counts()
    assert [len(answer) for answer in answers] == lengths, "a request has not its tokens"
    computed, again = (after[name] - before[name] for name in ("prefill tokens", "preemptions"))
    assert again or computed == sum(map(len, prompts)), f"{computed} prompt tokens computed"
    return seconds, answers


def a_figure(columns: int = 1):
    """A figure of matplotlib, which needs no display, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, columns, figsize=(9, 4.2), layout="constrained")


def save_picture(figure, path: Path) -> dict:
    """
    Write the figure and say where, or why it could not be: the figures of a long run are printed
    all the same.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except (
        OSError,
        ValueError,
    ) as error:  # ValueError: a kind of file that matplotlib does not write
        return {"picture": f"not written to {path} ({error}): choose another --out"}
    return {"picture": str(path)}


@command()
def bench_scheduler(args) -> dict:
    """
    plan + update of steps in which every request decodes, S = 16, prompts of 100 to 1000 tokens,
    prefix cache on.
    """
    result = {}
    for n in (1, 32, 256):
        scheduler = Scheduler(
            token_budget=n * 1000,
            max_kv_tokens=n * 2048,
            block_size=16,
            settings=SchedulerSettings(max_num_seqs=n, max_num_partial_prefills=n),
        )
        rng = random.Random(0)
        for i in range(n):
            scheduler.add_request(
                Request(i, [rng.randrange(10000) for _ in range(rng.randint(100, 1000))], 10**6)
            )
        plan = scheduler.plan()  # the budget is large enough for all prompts in one step
        scheduler.update(plan, [0] * len(plan.sampled))
        tokens = list(range(n))

        def step(scheduler=scheduler, tokens=tokens):
            scheduler.update(scheduler.plan(), tokens)

        result[f"{n} requests, ms"] = round(median_ms(step, 500), 4)
    return result | {"goal at 256, ms": 0.15}


def made_up_batch(
    requests: list[tuple[int, int]], S: int, backend: str, device: str
) -> kernels.Batch:
    """
    A step of requests (new tokens, context), those with one new token first, in blocks all over a
    pool.
    """
    query_lens, lens = [n for n, _ in requests], [context for _, context in requests]
    M = -(-max(lens) // S)
    tables = torch.randperm(len(lens) * M, device=device).view(len(lens), M).int()
    positions = torch.tensor(
        [p for n, context in requests for p in range(context - n, context)], device=device
    )
    owner = torch.arange(len(lens), device=device).repeat_interleave(
        torch.tensor(query_lens, device=device)
    )
    return kernels.Batch(
        tokens=positions,
        positions=positions,
        slot_mapping=tables[owner, positions // S].long() * S + positions % S,
        query_start=torch.tensor(
            [0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device
        ),
        context_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=tables,
        rows=torch.arange(len(lens), device=device),
        logits_index=positions[:0],
        num_decodes=query_lens.count(1),
        query_lens_host=query_lens,
        context_lens_host=lens,
        backend=kernels.choose_backend(backend, device),
    )


@command(repeats=5)
def bench_attention(args) -> dict:
    """
    One layer of store_kv + paged_attention on a CPU, torch's path: 31 decodes at context 512 and a
    chunk of 256 tokens, 6 heads of 64; then 8 decodes, against transformers' attention, which
    appends to a contiguous cache. In turn.
    """
    result: dict = {"goal a layer, ms": 15}
    mixed = attention_layer([(1, 512)] * 31 + [(256, 512)], 6, 64)
    result["a layer, ms"] = round(median_ms(mixed, 50), 2)
    for H, context in (6, 128), (6, 512), (12, 512), (12, 1024):
        ours, theirs = (
            attention_layer([(1, context)] * 8, H, 64),
            hugging_face_attention(8, H, 64, context),
        )
        times = [(median_ms(ours, 20), median_ms(*theirs)) for _ in range(args.repeats)]
        ms = [round(statistics.median(each), 3) for each in zip(*times, strict=True)]
        result[f"8 decodes at {context}, {H} heads of 64, ms"] = {
            "ours": ms[0],
            "Hugging Face": ms[1],
        }
    return result


def attention_layer(requests: list[tuple[int, int]], H: int, D: int) -> Callable:
    """One layer of torch's path in fp32 on a CPU, S = 16, as a function without arguments."""
    batch = made_up_batch(requests, 16, "torch", "cpu")
    kv = torch.randn(2, batch.block_tables.numel() + 1, H, 16, D)
    batch.prepared = batch.backend.prepare(batch, H, kv)
    q, k, v = torch.randn(3, len(batch.tokens), H, D)

    def layer():
        batch.backend.store_kv(k, v, kv, batch)
        return batch.backend.paged_attention(q, kv, batch)

    return layer


def hugging_face_attention(B: int, H: int, D: int, context: int) -> tuple[Callable, int, Callable]:
    """
    One layer of transformers' attention, append one token to its cache and attend, as arguments of
    `median_ms`: the work, how often, and what makes a cache of context - 1 tokens.
    """
    from transformers import DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = torch.randn(3, B, H, 1, D)
    module = torch.nn.Module()
    module.is_causal = True

    def a_cache():
        cache = DynamicCache()
        cache.update(*torch.randn(2, B, H, context - 1, D), 0)
        return (cache,)

    return (
        lambda cache: sdpa_attention_forward(module, q, *cache.update(k, v, 0), None),
        20,
        a_cache,
    )


# batch, context, H, Hk, D and what to beat: microseconds of one layer's decode attention on an H200
DECODES = [
    (256, 1024, 12, 12, 64, 195),
    (32, 1024, 12, 12, 64, 31),
    (1, 1024, 12, 12, 64, 6),
    (256, 1024, 16, 8, 128, 245),
    (32, 1024, 16, 8, 128, 35),
    (1, 1024, 16, 8, 128, 6),
    (1, 32768, 16, 8, 128, 36),
    (64, 4096, 32, 8, 128, 243),
    (64, 2048, 16, 16, 128, 250),
]


def attention_us(
    requests: list[tuple[int, int]], H: int, Hk: int, D: int, S: int = 16, backend: str = "triton"
) -> float:
    """
    Microseconds of one layer's attention in bf16, over as many pools as make 600 MB, at most 64.
    """
    torch._dynamo.reset()  # FlexAttention compiles for each shape, and has a limit
    torch.cuda.empty_cache()
    batch = made_up_batch(requests, S, "torch" if backend == "varlen" else backend, "cuda")
    shape = 2, batch.block_tables.numel() + 1, Hk, S, D
    number = max(2, min(64, 600_000_000 // (2 * math.prod(shape))))
    pools = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(number)]
    q = torch.randn(len(batch.tokens), H, D, dtype=torch.bfloat16, device="cuda")
    if backend == "varlen":  # torch's own paged attention; its pools are [blocks, S, Hk, D]
        return varlen_us(batch, q, [pool.transpose(2, 3).contiguous() for pool in pools])
    batch.prepared = batch.backend.prepare(batch, H, pools[0])
    return graph_us(lambda i: batch.backend.paged_attention(q, pools[i], batch), number)


def varlen_us(batch: kernels.Batch, q: torch.Tensor, pools: list[torch.Tensor]) -> float:
    """The same decodes by torch.nn.attention.varlen, where it takes a block table."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(batch.context_lens_host)
    paged = {"seqused_k": batch.context_lens, "block_table": batch.block_tables, "enable_gqa": True}

    def attend(i):
        varlen_attn(q, *pools[i], batch.query_start, None, 1, longest, **paged)

    return graph_us(attend, len(pools))


@command(backends=["triton", "flex", "torch", "varlen"], block_size=16)
def bench_kernels(args) -> dict:
    """
    One layer of paged attention in bf16 on a GPU, S = 16 unless said otherwise, block tables
    permuted, each call in a CUDA graph and on another pool than the one before. Microseconds, and
    the share of the time that reading K and V once takes. Token-major pools, [slots, Hk, D], are
    blocks of one token.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "bench.py kernels measures a GPU, there is none: on a CPU run `python bench.py attention`"
        )
    read = read_bandwidth("cuda")
    result: dict = {"read, GB/s": round(read / 1e9)}
    for B, context, H, Hk, D, goal in DECODES:
        floor = 1e6 * 4 * B * context * Hk * D / read
        row: dict = {"floor": round(floor, 1), "goal": goal}
        for backend in args.backends:
            try:
                us = attention_us([(1, context)] * B, H, Hk, D, args.block_size, backend)
                row[backend] = f"{us:.1f} ({floor / us:.0%})"
            except Exception as error:  # one that cannot do a shape says so in its place
                row[backend] = f"{type(error).__name__}: {error}".split("\n")[0][:80]
        result[f"{B} x {context}, {H}/{Hk} x {D}"] = row
    for H, D, goal in (16, 128, 300), (16, 64, 220):
        us = attention_us([(2048, 2048)], H, H, D)
        result[f"prefill of 2048, {H} x {D}"] = {
            "TFLOP/s": round(2 * 2048 * 2048 * H * D / us / 1e6),
            "goal": goal,
        }
    decodes, chunks = [(1, 1024)] * 128, [(256, 768)] * 8
    both, *apart = (
        round(attention_us(part, 12, 12, 64), 1) for part in (decodes + chunks, decodes, chunks)
    )
    result["128 decodes + 8 chunks"] = {
        "together": both,
        "apart": apart,
        "goal": round(sum(apart), 1),
    }
    for B, context, H, Hk, D, _ in (DECODES[0], DECODES[3]):
        sizes = {
            S: round(attention_us([(1, context)] * B, H, Hk, D, S), 1)
            for S in (1, 4, 8, 16, 32, 64, 128)
        }
        result[f"block sizes, {B} x {context}, {H}/{Hk} x {D}"] = {
            "token-major": sizes.pop(1)
        } | sizes
    return result


def hugging_face(model: GPT) -> Callable:
    """
    The same weights in transformers, as a function: a workload of prompts as long as each other ->
    answers.
    """
    from transformers import GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(model, directory)
        theirs = GPT2LMHeadModel.from_pretrained(directory).eval()

    @torch.inference_mode()
    def generate(work: Work) -> list[list[int]]:
        prompts = torch.tensor([prompt for prompt, _ in work])
        greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        lengths = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": work[0][1]}
        return theirs.generate(prompts, **greedy, **lengths)[:, prompts.shape[1] :].tolist()

    return generate


@command(
    model="10M", repeats=5, dtype=("auto", "fp32", "bf16"), quantize=("none", "int8"), compile=False
)
def bench_generate(args) -> dict:
    """
    64 tokens in, 128 out, greedy: milliseconds per token of one request, per step of eight. Engine
    and Hugging Face, in fp32, in turn, so that both see the same machine. The floor is the time to
    read all weights from memory once.
    """
    model = a_model(args.model)
    theirs, V = hugging_face(model), model.config.vocab_size
    model.to(dtype := serving_dtype(args.dtype, "cpu"))
    # without prefix cache each answer is computed whole
    engine = Engine(
        model, Settings(prefix_cache=False, quantize=args.quantize, compile=args.compile)
    )
    size = 1 if args.quantize == "int8" else dtype.itemsize
    floor = 1e3 * size * sum(weight.numel() for weight in model.parameters()) / read_bandwidth()
    weights = {"dtype": args.dtype, "quantize": args.quantize, "compile": args.compile}
    result = {"model": args.model} | weights | {"floor, ms a step": round(floor, 2)}
    for concurrent in (1, 8):
        times, equal = [], []
        for seed in range(args.repeats + 1):
            work = even_workload(concurrent, 64, 128, V, seed)
            seconds, answers = timed(engine, work, temperature=0)
            started = time.perf_counter()
            equal += [a == b for a, b in zip(answers, theirs(work), strict=True)]
            times.append((1e3 * seconds / 128, 1e3 * (time.perf_counter() - started) / 128))
        ms, theirs_ms = (
            statistics.median(each) for each in zip(*times[1:], strict=True)
        )  # the first is warm-up
        row = {"ms a step": round(ms, 2), "tok/s": round(1e3 * concurrent / ms)}
        row |= {
            "Hugging Face, ms a step": round(theirs_ms, 2),
            "equal answers": f"{sum(equal)} of {len(equal)}",
        }
        result[f"{concurrent} at once"] = row
    return result


@command(model="out/stdlib", data="stdlib")
def bench_quality(args) -> dict:
    """
    Held-out text, each token scored once as at the end of training, with the weights in each format
    that a CPU serves.
    """
    from train import Machine, evaluate, load_corpus

    machine = Machine(torch.device("cpu"), torch.float32, compile=False)
    corpus, result = load_corpus(args.data, machine), {"model": args.model, "data": args.data}
    for name, dtype, quantize in (
        ("fp32", "fp32", "none"),
        ("bf16", "bf16", "none"),
        ("int8", "fp32", "int8"),
    ):
        model = packed_for_cpu(load_checkpoint(args.model, dtype=DTYPES[dtype]), quantize)
        if model.config.vocab_size != corpus.tokenizer.vocab_size:
            raise ValueError(
                f"{args.model} was not trained on {args.data}: name its data with --data"
            )
        nats, count = evaluate(model, corpus, machine)
        # where the first token could not be scored, its bytes do not count either
        data = corpus.tokenizer.decode_bytes(corpus.val[-count:].tolist())
        bits = nats / math.log(2) / len(data)
        result[name] = {"nats a token": round(nats / count, 5), "bits a byte": round(bits, 5)}
    return result


@command(
    model="gpt2-124M",
    seeds=[0, 1, 2],
    block_size=16,
    no_graphs=False,
    no_overlap=False,
)
def bench_engine(args) -> dict:
    """
    Offline: 256 requests at once, 100 to 1024 tokens in, as many out, temperature 0.6, for each
    seed. Latency: 1 and 32 requests of 512 tokens in and 512 out. In bf16 on a GPU, fp32 on a CPU.
    Lengths are divided for a model of shorter context. Tokens in and out are asserted. The floor of
    a run is to read the weights from memory once for each token of the longest answer, and K and V
    for each token of all.
    """
    model, bandwidth, started = (
        a_model(args.model, DEVICE),
        read_bandwidth(DEVICE),
        time.perf_counter(),
    )
    V, overlap = model.config.vocab_size, False if args.no_overlap else None
    engine = Engine(
        model, Settings(block_size=args.block_size, graphs=not args.no_graphs, overlap=overlap)
    )
    result: dict = {"model": args.model, "start-up, s": round(time.perf_counter() - started, 1)}
    result["engine"] = engine.statement()
    timed(engine, even_workload(4, 100, 8, V))  # warm-up
    for seed in args.seeds:
        work = offline_workload(256, scale_for(model.config), V, seed)
        engine.runner.num_rows = engine.runner.num_padded_rows = 0
        seconds, tokens = timed(engine, work)[0], sum(n for _, n in work)
        row = {"in": sum(len(prompt) for prompt, _ in work), "out": tokens, "s": round(seconds, 2)}
        row["padded rows"] = f"{engine.runner.num_padded_rows / engine.runner.num_rows:.1%}"
        bytes_read = sum(
            n * len(prompt) + n * (n + 1) / 2 for prompt, n in work
        ) * kv_bytes_per_token(engine)
        bytes_read += max(n for _, n in work) * sum(w.nbytes for w in model.parameters())
        row["share of the floor"] = round(bytes_read / bandwidth / seconds, 3)
        result[f"offline, seed {seed}"] = row | {"output tok/s": round(tokens / seconds)}
    N = min(512, model.config.context_length // 2)
    for n in (1, 32):
        first, _ = timed(engine, even_workload(n, N, 1, V, seed=n))
        whole, _ = timed(
            engine, even_workload(n, N, N, V, seed=-n - 1)
        )  # other prompts: none is in the cache
        row = {"ms a step": 1e3 * (whole - first) / (N - 1), "whole, ms a token": 1e3 * whole / N}
        result[f"{n} at once"] = {name: round(ms, 3) for name, ms in row.items()}
    return result


@command(model="out/stdlib")
def bench_equality(args) -> dict:
    """
    The offline workload on a trained model, lengths over 8, greedy: whether answers are the same
    with CUDA graphs and overlap on and off, and in fp32 those of the dense model, which is given
    each answer and must choose each of its tokens (unless its best two logits lie within 1e-4). In
    bf16, the share of tokens equal to fp32's, place by place.
    """
    models = {
        dtype: load_checkpoint(args.model, DEVICE, DTYPES[dtype]) for dtype in ("fp32", "bf16")
    }
    config, answers = models["fp32"].config, {}
    work = [
        (p[-(config.context_length - n) :], n)
        for p, n in offline_workload(scale=8, V=config.vocab_size)
    ]
    for dtype, model in models.items():
        for graphs, overlap in itertools.product((True, False), repeat=2):
            engine = Engine(model, Settings(graphs=graphs, overlap=overlap))
            answers[dtype, graphs, overlap] = timed(engine, work, temperature=0)[1]
    exact, rounded = answers["fp32", True, True], answers["bf16", True, True]
    wrong = sum(
        not_greedy(models["fp32"], p, answer) for (p, _), answer in zip(work, exact, strict=True)
    )
    equal = [
        a == b
        for one, other in zip(exact, rounded, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return {
        "tokens": len(equal),
        "fp32, graphs and overlap change": sum(
            answers[key] != exact for key in answers if key[0] == "fp32"
        ),
        "bf16, graphs and overlap change": sum(
            answers[key] != rounded for key in answers if key[0] == "bf16"
        ),
        "fp32, tokens unlike the dense model's": wrong,
        "bf16, share of fp32's tokens": round(sum(equal) / len(equal), 4),
    }


@torch.inference_mode()
def not_greedy(model: GPT, prompt: list[int], answer: list[int]) -> int:
    """How many tokens of an answer the dense model would not have chosen, near-ties aside."""
    logits, _ = model(torch.tensor([prompt + answer[:-1]], device=model.wte.weight.device))
    logits = logits[0, len(prompt) - 1 :].float()  # [n, V]
    chosen = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
    return int((logits.amax(1) - chosen > 1e-4).sum())


@command(
    model="out/stdlib",
    streams=[1, 32, 256],
    client_processes=max(1, 3 * os.cpu_count() // 4),
    slow_clients=0,
    rate=0.0,
    repeats=1,
    flags="",
)
def bench_server(args) -> dict:
    """
    The offline workload over HTTP: as many requests as streams, all at once, and then again, with
    other prompts, at random times (Poisson) at --rate requests a second (0: at 70% of what was
    managed at once). The clients are processes of their own with raw sockets, see load.py. Output
    tokens per second until the last token; milliseconds from when a request was due to its first
    token; milliseconds between arrivals of text. --slow-clients of the streams read 1 KB/s: once as
    fast as the others, then slowly; both rows are of the others. Where the model's context is too
    short, the workload's lengths are divided. Afterwards the same requests, all at once, without a
    server, by Engine.generate with as many threads as the server's engine has: the share of that
    speed that is left over HTTP.
    """
    from serve import build_engine, engine_threads, parse_args

    config, result, seconds, seeds = (
        load_config(args.model),
        {"model": args.model},
        {},
        itertools.count(1),
    )
    works = {n: [offline_workload(n, scale_for(config), config.vocab_size, next(seeds)) for _ in range(args.repeats)]
             for n in args.streams}  # fmt: skip
    with server(args) as (host, port):
        ask = partial(load.load, host, port, processes=args.client_processes)
        ask(requests(offline_workload(8, 8, config.vocab_size)))  # warm-up
        for n in args.streams:
            runs = [load.summary(ask(requests(work))) for work in works[n]]
            seconds[n] = statistics.median(run["s"] for run in runs)
            result[f"{n} streams"] = sorted(runs, key=lambda run: run["s"])[len(runs) // 2]
            if n == 1:
                continue
            rate = args.rate or round(0.7 * n / seconds[n], 1)
            work = offline_workload(n, scale_for(config), config.vocab_size, next(seeds))
            result[f"{n} at {rate}/s"] = load.summary(ask(requests(work, rate)))
            for slow in [0, args.slow_clients] if 0 < args.slow_clients < n else []:
                work = other_tokens(work, config.vocab_size)
                others = ask(requests(work, num_slow=slow))[args.slow_clients :]
                result[f"{n} streams, {slow} slow"] = load.summary(others)
    torch.set_num_threads(engine_threads())
    engine = build_engine(parse_args(["--model", args.model, *args.flags.split()]))
    timed(engine, offline_workload(8, 8, config.vocab_size, seed=99))  # warm-up
    for n in args.streams:
        alone = statistics.median(timed(engine, work)[0] for work in works[n])
        result[f"{n} streams"]["of the engine alone"] = f"{alone / seconds[n]:.0%}"
    return result


@contextmanager
def server(args):
    """serve.py with --model and --flags in a process of its own: its host and port."""
    command = [
        sys.executable,
        "serve.py",
        "--model",
        args.model,
        "--port",
        "0",
        "--no-access-log",
        *args.flags.split(),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        greeting = process.stdout.readline()
        if not greeting:
            raise ValueError("the server did not start: see above")
        yield greeting.split("//")[1].strip().split(":")
    finally:
        process.terminate()
        process.wait(60)


def other_tokens(work: Work, V: int) -> Work:
    """Requests of the same lengths of which nothing is in the prefix cache."""
    return [([(token + 1) % V for token in prompt], tokens) for prompt, tokens in work]


def requests(work: Work, rate: float = 0, num_slow: int = 0) -> list[dict]:
    """
    What load.py sends: all at once or, with a rate, as a Poisson process; the first num_slow
    clients are slow.
    """
    rng, at, found = random.Random(0), 0.0, []
    for i, (prompt, tokens) in enumerate(work):
        at += rng.expovariate(rate) if rate else 0.0
        found.append(load.completion(prompt, tokens, at, SLOW if i < num_slow else None))
    return found


@command(model="gpt2-124M")
def bench_overhead(args) -> dict:
    """
    Decode steps of 1, 32 and 256 requests at context 900: milliseconds a step, what part of it the
    host works, kernels a step, and on a GPU where the device's time goes (each kernel started only
    when the one before has ended, for else they overlap). The floor is to read weights, K and V
    from memory once.
    """
    model, bandwidth, steps = a_model(args.model, DEVICE), read_bandwidth(DEVICE), 64
    context = min(900, model.config.context_length - steps - 2)  # no request ends meanwhile
    numbers = (1, 32, 256) if DEVICE == "cuda" else (1, 8, 32)
    weights = sum(w.nbytes for w in model.parameters())
    engine = Engine(model, Settings(prefix_cache=False))
    kv_bytes = kv_bytes_per_token(engine)
    result: dict = {"model": args.model}
    for n in numbers:
        let_decode(engine, n, context)
        seconds, host = step_times(engine, steps)
        floor = (weights + n * (context + steps / 2) * kv_bytes) / bandwidth
        row = {"ms a step": seconds, "host, ms": host, "floor, ms": floor}
        result[f"{n} requests"] = {name: round(1e3 * value, 3) for name, value in row.items()}
    if DEVICE == "cuda":
        kernels.early = layers.early = lambda x: {"EARLY": False}
        engine = Engine(model, Settings(prefix_cache=False))
        for n in numbers:
            let_decode(engine, n, context)
            result[f"{n} requests"] |= device_time(engine, 8)
    return result


def kv_bytes_per_token(engine: Engine) -> float:
    return engine.runner.pool.kv.nbytes / (engine.num_blocks + 1) / engine.scheduler.block_size


def let_decode(engine: Engine, n: int, context: int):
    """
    Instead of what the engine does, have it decode n requests from a prompt of so many tokens on.
    """
    for id in list(engine.requests):
        engine.abort(id)
    while engine.has_work:
        engine.step()
    most, V = engine.config.context_length - context, engine.config.vocab_size
    for i, (prompt, _) in enumerate(even_workload(n, context, most, V)):
        engine.add_request(i, prompt, exactly(most, 0.6, seed=i))
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()


def step_times(engine: Engine, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and of what the host does in it besides waiting for the device."""
    collect, times, waits = engine.runner.collect, [], []

    def noted(flight):
        started = time.perf_counter()
        if flight.done:
            flight.done.synchronize()
        waits.append(time.perf_counter() - started)
        return collect(flight)

    engine.runner.collect = noted
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    engine.runner.collect = collect
    return statistics.median(times), statistics.median(
        t - w for t, w in zip(times, waits, strict=True)
    )


KINDS = {  # what a kernel's name says of its work
    "attention": ("decode_kernel", "prefill_kernel"),
    "linear layers": ("vector_kernel", "matrix_kernel", "gemm", "cutlass", "nvjet"),
    "norms": ("norm_kernel",),
    "sampling": ("threshold_kernel", "pick_kernel"),
    "store": ("store_kv_kernel",),
}


def device_time(engine: Engine, steps: int) -> dict:
    """
    Kernels a step, and the milliseconds of a step that the device spends in each kind of them.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()  # what was under way does not count
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    ms, launches = dict.fromkeys([*KINDS, "rest"], 0.0), 0
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # the others are calls of the host
            kind = next(
                (k for k, names in KINDS.items() if any(name in event.name for name in names)),
                "rest",
            )
            ms[kind] += event.device_time / 1e3 / steps
            launches += 1
    return {"kernels": round(launches / steps)} | {
        kind: round(time, 3) for kind, time in ms.items()
    }


def serve_batches(engine: Engine, batches: list[Work]) -> tuple[list[float], list[list[int]]]:
    """
    Serve a batch when the last has ended, greedily. Returns the seconds from the start at which
    requests ended, and the answers.
    """
    ended, requests, started = [], [], time.perf_counter()
    for batch in batches:
        for prompt, n in batch:
            requests.append(engine.add_request(len(requests), prompt, exactly(n)))
        while engine.has_work:
            num_ended = sum(output.finish_reason is not None for output in engine.step())
            ended += [time.perf_counter() - started] * num_ended
    return ended, [r.generated_tokens for r in requests]


def padded(batch: Work) -> Work:
    """The batch as a rectangle: every prompt as long as the longest, every answer too."""
    P, n = max(len(prompt) for prompt, _ in batch), max(n for _, n in batch)
    return [([0] * (P - len(prompt)) + prompt, n) for prompt, _ in batch]


@command(model="1M", device="cpu", repeats=3, out=Path("out/batching.png"))
def bench_batching(args) -> dict:
    """
    96 requests, all there at the start: prompts and answers of 12 to 128 tokens (the offline
    workload's 100 to 1024 over 8), greedy, one model, the same engine and kernels, KV memory for
    4,096 tokens. One by one; in static batches of 16, a slab of 256 tokens each, padded to the
    longest prompt and run to the longest answer; continuously, 16 at once; and continuously with as
    many as blocks of 16 have room for. Only tokens that were asked for count.
    """
    model = a_model(args.model, args.device)
    requests = offline_workload(96, 8, model.config.vocab_size)
    lengths = [n for _, n in requests]
    ways = {
        "one by one": (1, [[request] for request in requests]),
        "static batches": (16, [padded(requests[i : i + 16]) for i in range(0, 96, 16)]),
        "continuous, 16 at once": (16, [requests]),
        "continuous": (64, [requests]),
    }
    result: dict = {
        "tokens in": sum(len(prompt) for prompt, _ in requests),
        "tokens out": sum(lengths),
    }
    figure, axes = a_figure()
    runs: dict = {name: [] for name in ways}
    for _ in range(args.repeats):  # in turn, so that all see the same machine
        for name, (at_once, batches) in ways.items():
            engine = Engine(
                model,
                Settings(num_blocks=256, max_num_seqs=at_once, watermark=0, prefix_cache=False),
            )
            serve_batches(engine, [[(prompt, 2) for prompt, _ in requests[:at_once]]])  # warm-up
            runs[name].append(serve_batches(engine, batches))
    for name, (_, batches) in ways.items():
        ended, answers = sorted(runs[name], key=lambda run: run[0][-1])[
            args.repeats // 2
        ]  # the median run
        if name == "one by one":
            seconds, alone = ended[-1], answers
        result[name] = row = {
            "requests/s": round(96 / ended[-1], 1),
            "tok/s": round(sum(lengths) / ended[-1]),
        }
        row["times one by one"] = round(seconds / ended[-1], 1)
        if batches == [requests]:
            assert [len(answer) for answer in answers] == lengths, (
                "not the tokens that were asked for"
            )
            row["equal answers"] = (
                f"{sum(a == b for a, b in zip(answers, alone, strict=True))} of 96"
            )
        axes.step([0, *ended], range(97), where="post", label=f"{name}: {row['tok/s']} tok/s")
    axes.set(
        xlabel="seconds",
        ylabel="requests ended",
        title="96 requests, the same model, kernels and KV memory",
    )
    axes.legend()
    return result | save_picture(figure, args.out)


def fill_pool(S: int, room: int) -> dict:
    """
    Serve the offline workload from a pool of `room` tokens in blocks of S, by the scheduler and
    without a model. Returns means over the steps in which somebody waits.
    """
    scheduler = Scheduler(
        "fcfs", 2**20, room, S, settings=SchedulerSettings(prefix_cache=False)
    )  # any prompt is computed in a step
    for i, (prompt, n) in enumerate(offline_workload()):
        scheduler.add_request(Request(i, prompt, n))
    allocator, crowded = (
        scheduler.block_allocator,
        [],
    )  # of each crowded step: requests, taken, filled
    while not scheduler.is_done():
        plan = scheduler.plan()
        if scheduler.waiting:
            taken = (allocator.num_blocks - allocator.num_free) * S
            filled = sum(r.num_filled_slots for r in scheduler.running) + plan.num_tokens
            crowded.append((len(scheduler.running), taken, filled))
        scheduler.update(plan, [0] * len(plan.sampled))
    at_once, taken, filled = (statistics.mean(each) for each in zip(*crowded, strict=True))
    return {
        "at once": round(at_once, 1),
        "tokens, %": round(100 * filled / room, 1),
        "waste inside, %": round(100 * (taken - filled) / room, 1),
        "waste outside, %": round(100 * (room - taken) / room, 1),
        "preemptions": scheduler.num_preemptions,
    }


def append_us(context: int, H: int = 12, D: int = 64) -> dict[str, float]:
    """
    Microseconds to append one token's K, V to a text in one layer, two ways; it has `context`
    tokens then.
    """
    batch = made_up_batch([(1, context)], 16, "torch", "cpu")
    kv = torch.zeros(2, batch.block_tables.numel() + 1, H, 16, D)
    batch.prepared = batch.backend.prepare(batch, H, kv)
    k, v = torch.randn(2, 1, H, D)
    K, V = torch.zeros(2, 1, H, context - 1, D)
    cat = median_ms(
        lambda: (torch.cat([K, k[:, :, None]], 2), torch.cat([V, v[:, :, None]], 2)), 100
    )
    store = median_ms(lambda: batch.backend.store_kv(k, v, kv, batch), 100)
    return {"torch.cat": round(1e3 * cat, 1), "store_kv": round(1e3 * store, 1)}


@command(out=Path("out/memory.png"))
def bench_memory(args) -> dict:
    """
    KV memory for 32,768 tokens, as slabs of the longest text (2,048) or as blocks: how many of 256
    requests (prompts and answers of 100 to 1024 tokens) run at once while others wait; waste inside
    (taken, but no token is there) and outside (free, but too little for the next prompt). A slab is
    a block as long as the longest text. Then one layer of gpt2-124M in fp32 on a CPU: microseconds
    to append a token to a text, by torch.cat to contiguous K and V, and by store_kv to the pool.
    """
    sizes = (2048, 128, 64, 32, 16, 8, 4)
    pools = {f"{'slabs' if S == 2048 else 'blocks'} of {S}": fill_pool(S, 32_768) for S in sizes}
    appends = {context: append_us(context) for context in (128, 256, 512, 1024, 2048)}
    figure, (left, right) = a_figure(2)
    ticks, bottom = [name.replace(" of ", "\n") for name in pools], [0.0] * len(pools)
    for part in ("tokens, %", "waste inside, %", "waste outside, %"):
        heights = [row[part] for row in pools.values()]
        bars = left.bar(ticks, heights, bottom=bottom, label=part)
        if part == "tokens, %":
            left.bar_label(
                bars,
                [f"{row['at once']:.0f}" for row in pools.values()],
                label_type="center",
                color="w",
            )
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    left.set(title="KV memory while others wait;\nin white: requests at once")
    left.legend(loc="lower right")
    for way in ("torch.cat", "store_kv"):
        right.plot(
            [f"{context}" for context in appends],
            [us[way] for us in appends.values()],
            "o-",
            label=way,
        )
    right.set(
        xlabel="tokens so far", title="microseconds of a layer\nto append a token", yscale="log"
    )
    right.legend()
    return pools | {"append a token at, us": appends} | save_picture(figure, args.out)


@command(out=Path("out/blockmap.png"))
def bench_blockmap(args) -> dict:
    """
    A mixed run in a small pool: shared prefixes, chunked prefills, growth, preemption. Colours are
    requests, grey is cached and idle, white is free; a block that several requests hold at once is
    striped by turns.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, context_length=64, n_layer=1, n_head=1, n_embd=16)).eval()
    engine = Engine(
        model, Settings(block_size=4, num_blocks=32, max_num_seqs=8, token_budget=16, watermark=0)
    )
    allocator, rng = engine.scheduler.block_allocator, random.Random(0)
    prefix, arrivals = [rng.randrange(64) for _ in range(12)], {}
    for i in range(9):  # one every four steps; every second one begins like the others
        prompt = (prefix if i % 2 else []) + [rng.randrange(64) for _ in range(rng.randint(4, 24))]
        arrivals[4 * i] = i, prompt, exactly(rng.randint(12, 36))
    colours = [f"C{i}" for i in range(10) if i != 7]  # which is grey
    columns: list[list[str]] = []  # [step][block] -> colour, by its name in matplotlib
    while arrivals or engine.has_work:
        if len(columns) in arrivals:
            engine.add_request(*arrivals.pop(len(columns)))
        engine.step()
        running, step = engine.scheduler.running, len(columns)
        owners = {
            b: [r.id for r in running if b in r.block_table] for b in range(allocator.num_blocks)
        }
        idle = ["lightgrey" if block in allocator.idle else "white" for block in owners]
        columns.append(
            [colours[o[step % len(o)]] if o else idle[block] for block, o in owners.items()]
        )
    from matplotlib.colors import to_rgb

    figure, axes = a_figure()
    image = [[to_rgb(name) for name in row] for row in zip(*columns, strict=True)]
    axes.imshow(image, aspect="auto", interpolation="nearest", origin="lower")
    title = "9 requests in a pool of 32 blocks: a colour is a request, grey is cached and idle"
    axes.set(xlabel="step", ylabel="block", title=title)
    return {name: engine.counts()[name] for name in ("preemptions", "hit tokens")} | save_picture(
        figure, args.out
    )


def add_flag(parser: argparse.ArgumentParser, name: str, default):
    """A flag as `command` describes it."""
    name = "--" + name.replace("_", "-")
    kind: dict = {"default": default, "type": type(default)}
    if default is False:
        kind = {"action": "store_true"}
    elif isinstance(default, list):
        kind = {"default": default, "type": type(default[0]), "nargs": "+"}
    elif isinstance(default, tuple):
        kind = {"default": default[0], "choices": default}
    parser.add_argument(name, help=FLAGS[name], **kind)


def build_parser() -> argparse.ArgumentParser:
    as_it_stands = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **as_it_stands)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (bench, defaults) in COMMANDS.items():
        command = commands.add_parser(name, description=inspect.getdoc(bench), **as_it_stands)
        for flag, default in defaults.items():
            add_flag(command, flag, default)
    return parser


def main():
    args = build_parser().parse_args()
    bench, _ = COMMANDS[args.command]
    print(inspect.getdoc(bench), file=sys.stderr)
    try:
        result = {"bench": args.command} | conditions() | bench(args)
    except (
        ValueError
    ) as error:  # a --model that is not there, or broken; what this machine cannot do
        sys.exit(str(error))
    for name, value in result.items():
        print(f"{name:>24}: {value}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
