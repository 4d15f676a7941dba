"""
Every number in the README, reproducible: one command each, the conditions first and one line of JSON last.

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

Each `bench_*` takes the flags and returns its figures; its docstring is the workload and is printed first. Seeds are
fixed, warm-up is not counted, times are medians. Nothing else should run beside them: a second busy process on two
cores makes 100 ms of a token of 1 ms, because threads that wait for each other spin.
"""

import argparse
import asyncio
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
from pathlib import Path

# Read when torch loads OpenMP: how long a thread that waits spins before it sleeps. Without a limit, one
# other busy process can make a step of 10 ms take 500; with a tenth of this, a token alone takes 15% longer.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")

import torch

import kernels
from engine import Engine
from model import DTYPES, GPT, GPTConfig, load_checkpoint, load_config, packed_for_cpu, save_checkpoint, serving_dtype
from paged import Request, Scheduler
from sampling import SamplingParams

# random weights of these shapes; the figures depend on the shape alone
MODELS = {
    "1M": GPTConfig(vocab_size=65, context_length=256, n_layer=4, n_head=4, n_embd=128),
    "10M": GPTConfig(vocab_size=65, context_length=256, n_layer=6, n_head=6, n_embd=384),
    "gpt2-124M": GPTConfig(context_length=2048),
}


def a_model(name: str) -> GPT:
    """Random weights of a named shape, or the model in a directory."""
    return GPT(MODELS[name]).eval() if name in MODELS else load_checkpoint(name)


class BenchError(ValueError):
    """What keeps a benchmark from running; the message says what to do."""


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
    Median microseconds of work(i) on the GPU, captured for i in 0 .. number - 1 in one CUDA graph: no launch is waited
    for, and with other data for each i nothing is found in the cache.
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
    """Bytes per second at which memory is read, measured as the sum of numbers too many for any cache."""
    x = torch.ones(2**26 if device == "cpu" else 2**30, device=device)
    return x.nbytes / (1e-3 * median_ms(x.sum, 10) if device == "cpu" else 1e-6 * graph_us(lambda i: x.sum(), 4))


def conditions() -> dict:
    """What the figures depend on besides the code."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def bench_scheduler(args) -> dict:
    """plan + update of steps in which every request decodes, S = 16, prompts of 100 to 1000 tokens, prefix cache on."""
    result = {}
    for n in (1, 32, 256):
        scheduler = Scheduler(
            token_budget=n * 1000, max_kv_tokens=n * 2048, block_size=16, max_num_seqs=n, max_num_partial_prefills=n
        )
        rng = random.Random(0)
        for i in range(n):
            scheduler.add_request(Request(i, [rng.randrange(10000) for _ in range(rng.randint(100, 1000))], 10**6))
        plan = scheduler.plan()  # the budget is large enough for all prompts in one step
        scheduler.update(plan, [0] * len(plan.sampled))
        tokens = list(range(n))

        def step(scheduler=scheduler, tokens=tokens):
            scheduler.update(scheduler.plan(), tokens)

        result[f"{n} requests, ms"] = round(median_ms(step, 500), 4)
    return result | {"goal at 256, ms": 0.15}


def made_up_batch(requests: list[tuple[int, int]], S: int, backend: str, device: str) -> kernels.Batch:
    """A step of requests (new tokens, context), those with one new token first, in blocks all over a pool."""
    query_lens, lens = [n for n, _ in requests], [context for _, context in requests]
    M = -(-max(lens) // S)
    tables = torch.randperm(len(lens) * M, device=device).view(len(lens), M).int()
    positions = torch.tensor([p for n, context in requests for p in range(context - n, context)], device=device)
    owner = torch.arange(len(lens), device=device).repeat_interleave(torch.tensor(query_lens, device=device))
    return kernels.Batch(
        tokens=positions,
        positions=positions,
        slot_mapping=tables[owner, positions // S].long() * S + positions % S,
        query_start=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_tables=tables,
        rows=torch.arange(len(lens), device=device),
        logits_index=positions[:0],
        num_decodes=query_lens.count(1),
        query_lens_host=query_lens,
        context_lens_host=lens,
        backend=kernels.choose_backend(backend, device),
    )


def bench_attention(args) -> dict:
    """
    One layer of store_kv + paged_attention on a CPU, torch's path: 31 decodes at context 512 and a chunk of 256 tokens,
    6 heads of 64; then 8 decodes, against transformers' attention, which appends to a contiguous cache. In turn.
    """
    result: dict = {"goal a layer, ms": 15}
    mixed = attention_layer([(1, 512)] * 31 + [(256, 512)], 6, 64)
    result["a layer, ms"] = round(median_ms(mixed, 50), 2)
    for H, context in (6, 128), (6, 512), (12, 512), (12, 1024):
        ours, theirs = attention_layer([(1, context)] * 8, H, 64), hugging_face_attention(8, H, 64, context)
        times = [(median_ms(ours, 20), median_ms(*theirs)) for _ in range(args.repeats)]
        ms = [round(statistics.median(each), 3) for each in zip(*times, strict=True)]
        result[f"8 decodes at {context}, {H} heads of 64, ms"] = {"ours": ms[0], "Hugging Face": ms[1]}
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
    One layer of transformers' attention, append one token to its cache and attend, as arguments of `median_ms`: the
    work, how often, and what makes a cache of context - 1 tokens.
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

    return lambda cache: sdpa_attention_forward(module, q, *cache.update(k, v, 0), None), 20, a_cache


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
    """Microseconds of one layer's attention in bf16, over as many pools as make 600 MB, at most 64."""
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


def bench_kernels(args) -> dict:
    """
    One layer of paged attention in bf16 on a GPU, S = 16 unless said otherwise, block tables permuted, each call in a
    CUDA graph and on another pool than the one before. Microseconds, and the share of the time that reading K and V
    once takes. Token-major pools, [slots, Hk, D], are blocks of one token.
    """
    if not torch.cuda.is_available():
        raise BenchError("bench.py kernels measures a GPU, there is none: on a CPU run `python bench.py attention`")
    read, (x, y) = read_bandwidth("cuda"), torch.empty(2, 2**29, device="cuda")
    copy = 2e6 * x.nbytes / graph_us(lambda i: torch.mul(x, 1, out=y), 4)
    result: dict = {"read, GB/s": round(read / 1e9), "copy, GB/s": round(copy / 1e9)}
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
        result[f"prefill of 2048, {H} x {D}"] = {"TFLOP/s": round(2 * 2048 * 2048 * H * D / us / 1e6), "goal": goal}
    decodes, chunks = [(1, 1024)] * 128, [(256, 768)] * 8
    both, *apart = (round(attention_us(part, 12, 12, 64), 1) for part in (decodes + chunks, decodes, chunks))
    result["128 decodes + 8 chunks"] = {"together": both, "apart": apart, "goal": round(sum(apart), 1)}
    for B, context, H, Hk, D, _ in (DECODES[0], DECODES[3]):
        sizes = {S: round(attention_us([(1, context)] * B, H, Hk, D, S), 1) for S in (1, 4, 8, 16, 32, 64, 128)}
        result[f"block sizes, {B} x {context}, {H}/{Hk} x {D}"] = {
            "token-major" if S == 1 else S: sizes[S] for S in sizes
        }
    return result


def hugging_face(model: GPT) -> Callable | None:
    """The same weights in transformers, as a function (prompts, max_tokens) -> answers; None if it is not installed."""
    try:
        from transformers import GPT2LMHeadModel
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(model, directory)
        theirs = GPT2LMHeadModel.from_pretrained(directory).eval()

    @torch.inference_mode()
    def generate(prompts, max_tokens):
        tokens = torch.tensor(prompts)
        answers = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return answers[:, tokens.shape[1] :].tolist()

    return generate


def bench_generate(args) -> dict:
    """
    64 tokens in, 128 out, greedy: milliseconds per token of one request, per step of eight. Engine and Hugging Face, in
    fp32, in turn, so that both see the same machine. The floor is the time to read all weights from memory once.
    """
    torch.manual_seed(0)
    model = a_model(args.model)
    theirs, rng = hugging_face(model), random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    model.to(dtype := serving_dtype(args.dtype, "cpu"))
    engine = Engine(model, prefix_cache=False, quantize=args.quantize)  # each answer is computed whole
    size = 1 if args.quantize == "int8" else dtype.itemsize
    floor = 1e3 * size * sum(weight.numel() for weight in model.parameters()) / read_bandwidth()
    weights = {"dtype": args.dtype, "quantize": args.quantize}
    result = {"model": args.model} | weights | {"floor, ms a step": round(floor, 2)}
    for concurrent in (1, 8):
        ours_ms, theirs_ms, equal = [], [], []
        for _ in range(args.repeats + 1):
            prompts = [[rng.randrange(model.config.vocab_size) for _ in range(64)] for _ in range(concurrent)]
            started = time.perf_counter()
            answers = engine.generate(prompts, params, progress=False)
            between = time.perf_counter()
            if theirs:
                equal += [a == b for a, b in zip(answers, theirs(prompts, 128), strict=True)]
            ours_ms.append(1e3 * (between - started) / 128)
            theirs_ms.append(1e3 * (time.perf_counter() - between) / 128)
        ms = statistics.median(ours_ms[1:])  # the first is warm-up
        result[f"{concurrent} at once"] = row = {"ms a step": round(ms, 2), "tok/s": round(1e3 * concurrent / ms)}
        if theirs:
            row["Hugging Face, ms a step"] = round(statistics.median(theirs_ms[1:]), 2)
            row["equal answers"] = f"{sum(equal)} of {len(equal)}"
    return result


def bench_quality(args) -> dict:
    """
    Held-out text, each token scored once as at the end of training, with the weights in each format that a CPU serves.
    """
    from train import Machine, evaluate, load_corpus

    machine = Machine(torch.device("cpu"), torch.float32, compile=False)
    corpus, result = load_corpus(args.data, machine), {"model": args.model, "data": args.data}
    for name, dtype, quantize in ("fp32", "fp32", "none"), ("bf16", "bf16", "none"), ("int8", "fp32", "int8"):
        model = packed_for_cpu(load_checkpoint(args.model, dtype=DTYPES[dtype]), quantize)
        if model.config.vocab_size != corpus.tokenizer.vocab_size:
            raise BenchError(f"{args.model} was not trained on {args.data}: name its data with --data")
        nats, count = evaluate(model, corpus, machine)
        # where the first token could not be scored, its bytes do not count either
        data = corpus.tokenizer.decode_bytes(corpus.val[-count:].tolist())
        bits = nats / math.log(2) / len(data)
        result[name] = {"nats a token": round(nats / count, 5), "bits a byte": round(bits, 5)}
    return result


def bench_model(name: str, device: str) -> GPT:
    """A named model with random weights, or a checkpoint; bf16 on a GPU."""
    torch.manual_seed(0)
    model = a_model(name)
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).requires_grad_(False)


def bench_engine(args) -> dict:
    """
    Offline: 256 requests at once, 100 to 1024 tokens in, as many out, temperature 0.6, for each seed. Latency: 1 and 32
    requests of 512 tokens in and 512 out. In bf16 on a GPU, fp32 on a CPU. Tokens in and out are asserted.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = bench_model(args.model, device)
    V, started = model.config.vocab_size, time.perf_counter()
    overlap = False if args.no_overlap else None
    engine = Engine(model, block_size=args.block_size, graphs=not args.no_graphs, overlap=overlap)
    result: dict = {"model": args.model, "start-up, s": round(time.perf_counter() - started, 1)}
    result["engine"] = engine.statement()

    def serve(prompts, lengths) -> float:
        params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True, seed=i) for i, n in enumerate(lengths)]
        before, started = engine.counts(), time.perf_counter()
        answers = engine.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - started
        assert [len(a) for a in answers] == lengths, "a request has not its tokens"
        again = engine.counts()["preemptions"] - before["preemptions"]
        computed = engine.counts()["prefill tokens"] - before["prefill tokens"]
        assert again or computed == sum(map(len, prompts)), f"{computed} prompt tokens computed"
        return seconds

    serve([[1] * 100] * 4, [8] * 4)
    for seed in args.seeds:
        prompts, lengths = map(list, zip(*offline_workload(args.requests, V=V, seed=seed), strict=True))
        rows = engine.runner.num_rows, engine.runner.num_padded_rows
        seconds = serve(prompts, lengths)
        rows = [
            new - old for new, old in zip((engine.runner.num_rows, engine.runner.num_padded_rows), rows, strict=True)
        ]
        result[f"offline, seed {seed}"] = {
            "in": sum(map(len, prompts)),
            "out": sum(lengths),
            "s": round(seconds, 2),
            "output tok/s": round(sum(lengths) / seconds),
            "padded rows": f"{rows[1] / max(1, rows[0]):.1%}",
        }
    rng = random.Random(1)
    for n in (1, 32):
        prompts = [[rng.randrange(V) for _ in range(args.latency_tokens)] for _ in range(n)]
        first = serve(prompts, [1] * n)  # also leaves the prompts in the prefix cache, so that what follows is decoding
        prompts = [[rng.randrange(V) for _ in range(args.latency_tokens)] for _ in range(n)]
        seconds = serve(prompts, [args.latency_tokens] * n)
        ms = 1e3 * (seconds - first) / (args.latency_tokens - 1)
        result[f"{n} at once"] = {
            "ms a step": round(ms, 3),
            "whole, ms a token": round(1e3 * seconds / args.latency_tokens, 3),
        }
    return result


def bench_equality(args) -> dict:
    """
    The offline workload on a trained model, lengths over 8, greedy: whether answers are the same with CUDA graphs and
    overlap on and off, and in fp32 those of the dense model, which is given each answer and must choose each of its
    tokens (unless its best two logits lie within 1e-4). In bf16, the share of tokens equal to fp32's, place by place.
    """
    device, answers = "cuda" if torch.cuda.is_available() else "cpu", {}
    models = {dtype: load_checkpoint(args.model, device, DTYPES[dtype]) for dtype in ("fp32", "bf16")}
    config = models["fp32"].config
    work = [(p[-(config.context_length - n) :], n) for p, n in offline_workload(scale=8, V=config.vocab_size)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
    for dtype, model in models.items():
        for graphs, overlap in itertools.product((True, False), repeat=2):
            engine = Engine(model, graphs=graphs, overlap=overlap)
            answers[dtype, graphs, overlap] = engine.generate([p for p, _ in work], params, progress=False)
    exact, rounded = answers["fp32", True, True], answers["bf16", True, True]
    wrong = sum(not_greedy(models["fp32"], p, answer) for (p, _), answer in zip(work, exact, strict=True))
    equal = [a == b for one, other in zip(exact, rounded, strict=True) for a, b in zip(one, other, strict=True)]
    return {
        "tokens": len(equal),
        "fp32, graphs and overlap change": sum(answers[key] != exact for key in answers if key[0] == "fp32"),
        "bf16, graphs and overlap change": sum(answers[key] != rounded for key in answers if key[0] == "bf16"),
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


def bench_server(args) -> dict:
    """
    The offline workload over HTTP, as many requests as streams, all at once: 1, 32 and 256. Output tokens per second,
    milliseconds to the first token, and between tokens, (last - first) / (tokens - 1) of a request. Client, HTTP and
    engine are three processes. Where the model's context is too short, the workload's lengths are divided. Afterwards
    the same without a server, by Engine.generate with all threads: the share of that speed that is left over HTTP.
    """
    from serve import build_engine, parse_args

    config = load_config(args.model)
    scale = max(1, -(-2048 // config.context_length))
    command = [sys.executable, "serve.py", "--model", args.model, "--port", "0", "--no-access-log", *args.flags]
    process, result = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), {"model": args.model}
    try:
        greeting = process.stdout.readline()
        if not greeting:
            raise BenchError("the server did not start: see above")
        host, port = greeting.split("//")[1].strip().split(":")
        asyncio.run(streams(host, int(port), offline_workload(8, 8, config.vocab_size)))  # warm-up
        for seed, n in enumerate(args.streams):
            work, started = offline_workload(n, scale, config.vocab_size, seed), time.perf_counter()
            times = asyncio.run(streams(host, int(port), work))
            seconds, tokens = time.perf_counter() - started, [answer for _, answer in work]
            first = [1e3 * (one - started) for one, _ in times]
            between = [1e3 * (last - one) / (t - 1) for (one, last), t in zip(times, tokens, strict=True) if t > 1]
            result[f"{n} streams"] = {"output tok/s": round(sum(tokens) / seconds), "s": round(seconds, 2)} | {
                f"{name} p{p}, ms": round(sorted(values)[min(len(values) - 1, len(values) * p // 100)], 2)
                for name, values in (("first token", first), ("inter-token", between))
                for p in (50, 99)
            }
    finally:
        process.terminate()
        process.wait(60)
    engine = build_engine(parse_args(["--model", args.model, *args.flags]))
    generate_speed(engine, offline_workload(8, 8, config.vocab_size))  # warm-up
    for seed, n in enumerate(args.streams):
        alone, over_http = generate_speed(engine, offline_workload(n, scale, config.vocab_size, seed)), f"{n} streams"
        result[over_http]["of the engine alone"] = f"{result[over_http]['output tok/s'] / alone:.0%}"
    return result


def generate_speed(engine: Engine, work: list[tuple[list[int], int]]) -> float:
    """Output tokens per second of Engine.generate."""
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for _, n in work]
    started = time.perf_counter()
    engine.generate([prompt for prompt, _ in work], params, progress=False)
    return sum(n for _, n in work) / (time.perf_counter() - started)


async def streams(host: str, port: int, work: list[tuple[list[int], int]]) -> list[tuple[float, float]]:
    """Send all requests (prompt, tokens to answer) at once; when the first and the last token of each came."""

    async def stream(prompt: list[int], tokens: int) -> tuple[float, float]:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.6, "ignore_eos": True, "stream": True}
        body = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        received, first, last = b"", 0.0, 0.0
        while chunk := await reader.read(65536):
            received = received[-4096:] + chunk
            if b'"text"' in chunk:
                last = time.perf_counter()
                first = first or last
        writer.close()
        if f'"completion_tokens":{tokens},'.encode() not in received.replace(b" ", b""):
            raise BenchError(f"wanted {tokens} tokens, the answer ends with {received[-300:].decode(errors='replace')}")
        return first, last

    return await asyncio.gather(*(stream(*request) for request in work))


def bench_overhead(args) -> dict:
    """
    Decode steps of 1, 32 and 256 requests at context 900: milliseconds a step, what part of it the host works, kernels
    a step, and on a GPU where the device's time goes (each kernel started only when the one before has ended, for else
    they overlap). The floor is to read weights, K and V from memory once.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, steps = bench_model(args.model, device), 64
    config, bandwidth, result = model.config, read_bandwidth(device), {"model": args.model}
    context, numbers = min(900, config.context_length // 2), (1, 32, 256) if device == "cuda" else (1, 8, 32)
    weights = sum(w.nbytes for w in model.parameters())
    engine = Engine(model, prefix_cache=False)
    kv_bytes = engine.runner.pool.kv.nbytes / (engine.num_blocks + 1) / engine.scheduler.block_size  # of a token
    for n in numbers:
        times, waits = [], []
        with decoding(engine, n, context):
            collect = waiting_time(engine, waits)
            for _ in range(steps):
                started = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - started)
            engine.runner.collect = collect
        host = statistics.median(t - w for t, w in zip(times, waits, strict=True))
        floor = (weights + n * (context + steps / 2) * kv_bytes) / bandwidth
        seconds = {"ms a step": statistics.median(times), "host, ms": host, "floor, ms": floor}
        result[f"{n} requests"] = {name: round(1e3 * value, 3) for name, value in seconds.items()}
    if device == "cuda":
        kernels.early = lambda x: {"EARLY": False}
        engine = Engine(model, prefix_cache=False)
        for n in numbers:
            with decoding(engine, n, context):
                result[f"{n} requests"] |= device_time(engine, 8)
    return result


@contextmanager
def decoding(engine: Engine, n: int, context: int):
    """Have n requests decode from a prompt of so many tokens on; afterwards they are gone."""
    most, rng = engine.config.context_length - context, random.Random(0)
    for i in range(n):
        prompt = [rng.randrange(engine.config.vocab_size) for _ in range(context)]
        engine.add_request(i, prompt, SamplingParams(temperature=0.6, max_tokens=most, ignore_eos=True, seed=i))
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    yield
    for i in range(n):
        engine.abort(i)
    while engine.has_work:
        engine.step()


def waiting_time(engine: Engine, waits: list[float]) -> Callable:
    """Have the engine note how long it waits for the device in each step. Returns what was there before."""
    collect = engine.runner.collect

    def noted(flight):
        started = time.perf_counter()
        if flight.done:
            flight.done.synchronize()
        waits.append(time.perf_counter() - started)
        return collect(flight)

    engine.runner.collect = noted
    return collect


KINDS = {  # what a kernel's name says of its work
    "attention": ("decode_kernel", "prefill_kernel"),
    "linear layers": ("vector_kernel", "matrix_kernel", "gemm", "cutlass", "nvjet"),
    "norms": ("norm_kernel",),
    "sampling": ("threshold_kernel", "pick_kernel"),
    "store": ("store_kv_kernel",),
}


def device_time(engine: Engine, steps: int) -> dict:
    """Kernels a step, and the milliseconds of a step that the device spends in each kind of them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    ms, launches = dict.fromkeys([*KINDS, "rest"], 0.0), 0
    for event in found.key_averages():
        kind = next((k for k, names in KINDS.items() if any(name in event.key for name in names)), "rest")
        ms[kind] += event.self_device_time_total / 1e3 / steps
        launches += event.count
    return {"kernels": round(launches / steps)} | {kind: round(time, 3) for kind, time in ms.items()}


def pyplot():
    """matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_picture(figure, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def offline_workload(n: int = 256, scale: int = 1, V: int = 10_001, seed: int = 0) -> list[tuple[list[int], int]]:
    """
    nano-vLLM's workload of 256 requests (prompt, tokens to answer), 100 to 1024 tokens each; or the first n of them,
    lengths over `scale`, in a vocabulary of V.
    """
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    answers = [rng.randint(100, 1024) for _ in range(256)]
    totals = sum(map(len, prompts)), sum(answers)
    assert seed != 0 or totals == (142_827, 133_966), "not the workload that others measure"
    both = list(zip(prompts, answers, strict=True))[:n]
    return [([token % V for token in prompt[: len(prompt) // scale]], answer // scale) for prompt, answer in both]


def serve_batches(engine: Engine, batches: list[list[tuple[list[int], int]]]) -> tuple[list[float], list[list[int]]]:
    """
    Serve batches of (prompt, tokens to answer), the next when the last has ended. Returns the seconds from the start
    at which requests ended, and the answers.
    """
    ended, requests, started = [], [], time.perf_counter()
    for batch in batches:
        for prompt, n in batch:
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
            requests.append(engine.add_request(len(requests), prompt, params))
        while engine.has_work:
            num_ended = sum(output.finish_reason is not None for output in engine.step())
            ended += [time.perf_counter() - started] * num_ended
    return ended, [r.generated_tokens for r in requests]


def padded(batch: list[tuple[list[int], int]]) -> list[tuple[list[int], int]]:
    """The batch as a rectangle: every prompt as long as the longest, every answer too."""
    P, n = max(len(prompt) for prompt, _ in batch), max(n for _, n in batch)
    return [([0] * (P - len(prompt)) + prompt, n) for prompt, _ in batch]


def bench_batching(args) -> dict:
    """
    96 requests, all there at the start: prompts and answers of 12 to 128 tokens (the offline workload's 100 to 1024
    over 8), greedy, one model, the same engine and kernels, KV memory for 4,096 tokens. One by one; in static batches
    of 16, a slab of 256 tokens each, padded to the longest prompt and run to the longest answer; continuously, 16 at
    once; and continuously with as many as blocks of 16 have room for. Only tokens that were asked for count.
    """
    torch.manual_seed(0)
    model = a_model(args.model).to(args.device, torch.float32 if args.device == "cpu" else torch.bfloat16)
    requests = offline_workload(96, 8, model.config.vocab_size)
    lengths = [n for _, n in requests]
    ways = {
        "one by one": (1, [[request] for request in requests]),
        "static batches": (16, [padded(requests[i : i + 16]) for i in range(0, 96, 16)]),
        "continuous, 16 at once": (16, [requests]),
        "continuous": (64, [requests]),
    }
    result: dict = {"tokens in": sum(len(prompt) for prompt, _ in requests), "tokens out": sum(lengths)}
    figure, axes = pyplot().subplots(figsize=(9, 4.2), layout="constrained")
    runs: dict = {name: [] for name in ways}
    for _ in range(args.repeats):  # in turn, so that all see the same machine
        for name, (at_once, batches) in ways.items():
            engine = Engine(model, num_blocks=256, max_num_seqs=at_once, watermark=0, prefix_cache=False)
            serve_batches(engine, [[(prompt, 2) for prompt, _ in requests[:at_once]]])  # warm-up
            runs[name].append(serve_batches(engine, batches))
    for name, (_, batches) in ways.items():
        ended, answers = sorted(runs[name], key=lambda run: run[0][-1])[args.repeats // 2]  # the median run
        if name == "one by one":
            seconds, alone = ended[-1], answers
        result[name] = row = {"requests/s": round(96 / ended[-1], 1), "tok/s": round(sum(lengths) / ended[-1])}
        row["times one by one"] = round(seconds / ended[-1], 1)
        if batches == [requests]:
            assert [len(answer) for answer in answers] == lengths, "not the tokens that were asked for"
            row["equal answers"] = f"{sum(a == b for a, b in zip(answers, alone, strict=True))} of 96"
        axes.step([0, *ended], range(97), where="post", label=f"{name}: {row['tok/s']} tok/s")
    axes.set(xlabel="seconds", ylabel="requests ended", title="96 requests, the same model, kernels and KV memory")
    axes.legend()
    save_picture(figure, args.out)
    return result | {"picture": str(args.out)}


def fill_pool(S: int, room: int) -> dict:
    """
    Serve the offline workload from a pool of `room` tokens in blocks of S, by the scheduler and without a model.
    Returns means over the steps in which somebody waits.
    """
    scheduler = Scheduler("fcfs", 2**20, room, S, prefix_cache=False)  # any prompt is computed in a step
    for i, (prompt, n) in enumerate(offline_workload()):
        scheduler.add_request(Request(i, prompt, n))
    allocator, crowded = scheduler.block_allocator, []  # of each crowded step: requests, taken, filled
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
    """Microseconds to append one token's K, V to a text in one layer, two ways; it has `context` tokens then."""
    batch = made_up_batch([(1, context)], 16, "torch", "cpu")
    kv = torch.zeros(2, batch.block_tables.numel() + 1, H, 16, D)
    batch.prepared = batch.backend.prepare(batch, H, kv)
    k, v = torch.randn(2, 1, H, D)
    K, V = torch.zeros(2, 1, H, context - 1, D)
    cat = median_ms(lambda: (torch.cat([K, k[:, :, None]], 2), torch.cat([V, v[:, :, None]], 2)), 100)
    store = median_ms(lambda: batch.backend.store_kv(k, v, kv, batch), 100)
    return {"torch.cat": round(1e3 * cat, 1), "store_kv": round(1e3 * store, 1)}


def bench_memory(args) -> dict:
    """
    KV memory for 32,768 tokens, as slabs of the longest text (2,048) or as blocks: how many of 256 requests (prompts
    and answers of 100 to 1024 tokens) run at once while others wait; waste inside (taken, but no token is there) and
    outside (free, but too little for the next prompt). A slab is a block as long as the longest text. Then one layer
    of gpt2-124M in fp32 on a CPU: microseconds to append a token to a text, by torch.cat to contiguous K and V, and by
    store_kv to the pool.
    """
    sizes = (2048, 128, 64, 32, 16, 8, 4)
    pools = {f"{'slabs' if S == 2048 else 'blocks'} of {S}": fill_pool(S, 32_768) for S in sizes}
    appends = {context: append_us(context) for context in (128, 256, 512, 1024, 2048)}
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    ticks, bottom = [name.replace(" of ", "\n") for name in pools], [0.0] * len(pools)
    for part in ("tokens, %", "waste inside, %", "waste outside, %"):
        heights = [row[part] for row in pools.values()]
        bars = left.bar(ticks, heights, bottom=bottom, label=part)
        if part == "tokens, %":
            left.bar_label(bars, [f"{row['at once']:.0f}" for row in pools.values()], label_type="center", color="w")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    left.set(title="KV memory while others wait;\nin white: requests at once")
    left.legend(loc="lower right")
    for way in ("torch.cat", "store_kv"):
        right.plot([f"{context}" for context in appends], [us[way] for us in appends.values()], "o-", label=way)
    right.set(xlabel="tokens so far", title="microseconds of a layer\nto append a token", yscale="log")
    right.legend()
    save_picture(figure, args.out)
    return pools | {"append a token at, us": appends, "picture": str(args.out)}


def bench_blockmap(args) -> dict:
    """
    A mixed run in a small pool: shared prefixes, chunked prefills, growth, preemption. Colours are requests, grey is
    cached and idle, white is free; a block that several requests hold at once is striped by turns.
    """
    plt = pyplot()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, context_length=64, n_layer=1, n_head=1, n_embd=16)).eval()
    engine = Engine(model, block_size=4, num_blocks=32, max_num_seqs=8, token_budget=16, watermark=0)
    allocator, rng = engine.scheduler.block_allocator, random.Random(0)
    prefix, arrivals = [rng.randrange(64) for _ in range(12)], {}
    for i in range(9):  # one every four steps; every second one begins like the others
        prompt = (prefix if i % 2 else []) + [rng.randrange(64) for _ in range(rng.randint(4, 24))]
        arrivals[4 * i] = i, prompt, SamplingParams(temperature=0, max_tokens=rng.randint(12, 36))
    colours = [colour for i, colour in enumerate(plt.cm.tab10.colors) if i != 7]  # its grey means cached here
    columns = []
    while arrivals or engine.has_work:
        if len(columns) in arrivals:
            engine.add_request(*arrivals.pop(len(columns)))
        engine.step()
        owners: dict[int, list[int]] = {block: [] for block in range(allocator.num_blocks)}  # who holds each block
        for request in engine.scheduler.running:
            for block in request.block_table:
                owners[block].append(request.id)
        step = len(columns)
        idle = [(0.82, 0.82, 0.82) if block in allocator.idle else (1.0, 1.0, 1.0) for block in owners]
        columns.append([colours[o[step % len(o)]] if o else idle[b] for b, o in owners.items()])
    image = list(zip(*columns, strict=True))  # [block][step] -> colour
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    axes.imshow(image, aspect="auto", interpolation="nearest", origin="lower")
    axes.set(
        xlabel="step",
        ylabel="block",
        title="9 requests in a pool of 32 blocks: a colour is a request, grey is cached and idle",
    )
    save_picture(figure, args.out)
    counts = engine.counts()
    return {"picture": str(args.out), "preemptions": counts["preemptions"], "hit tokens": counts["hit tokens"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("scheduler", help="Python time of plan + update").set_defaults(run=bench_scheduler)
    attention = commands.add_parser("attention", help="one layer of the torch path, on a CPU")
    attention.add_argument("--repeats", type=int, default=5, help="medians of ours and theirs, in turn")
    attention.set_defaults(run=bench_attention)
    layer = commands.add_parser("kernels", help="paged attention on a GPU against the floor")
    layer.add_argument("--backends", nargs="+", default=["triton", "flex", "torch", "varlen"], help="which to measure")
    layer.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    layer.set_defaults(run=bench_kernels)
    generate = commands.add_parser("generate", help="engine against Hugging Face's generate")
    generate.add_argument("--model", default="10M", help="1M, 10M or gpt2-124M (random weights), or a model directory")
    generate.add_argument("--repeats", type=int, default=5, help="counted runs of each; the median is printed")
    generate.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16"], help="of our weights")
    generate.add_argument("--quantize", default="none", choices=["none", "int8"], help="our weights as integers")
    generate.set_defaults(run=bench_generate)
    offline = commands.add_parser("engine", help="throughput and latency of the engine")
    offline.add_argument("--model", default="gpt2-124M", help="10M or gpt2-124M (random weights), or a model directory")
    offline.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the workloads, once each")
    offline.add_argument("--requests", type=int, default=256, help="of a workload")
    offline.add_argument("--latency-tokens", type=int, default=512, help="in, and out, when latency is measured")
    offline.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    offline.add_argument("--no-graphs", action="store_true", help="launch each kernel by itself")
    offline.add_argument("--no-overlap", action="store_true", help="wait for each step before the next is planned")
    offline.set_defaults(run=bench_engine)
    equality = commands.add_parser("equality", help="whether answers depend on how steps are computed")
    equality.add_argument("--model", default="out/stdlib", help="checkpoint directory")
    equality.set_defaults(run=bench_equality)
    server = commands.add_parser("server", help="throughput and latency over HTTP")
    server.add_argument("--model", default="out/stdlib", help="checkpoint directory")
    server.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256], help="requests at once")
    server.add_argument("--flags", type=str.split, default=[], help="of serve.py, as in --flags='--dtype bf16'")
    server.set_defaults(run=bench_server)
    overhead = commands.add_parser("overhead", help="where the time of a decode step goes")
    overhead.add_argument(
        "--model", default="gpt2-124M", help="10M or gpt2-124M (random weights), or a model directory"
    )
    overhead.set_defaults(run=bench_overhead)
    batching = commands.add_parser("batching", help="one by one, in static batches, continuously")
    batching.add_argument("--model", default="1M", help="1M, 10M or gpt2-124M (random weights), or a model directory")
    batching.add_argument("--device", default="cpu", help="cpu, in fp32, or cuda, in bf16")
    batching.add_argument("--repeats", type=int, default=3, help="runs of each; the median is printed")
    batching.set_defaults(run=bench_batching)
    memory = commands.add_parser("memory", help="contiguous slabs against blocks")
    memory.set_defaults(run=bench_memory)
    quality = commands.add_parser("quality", help="bits per byte in fp32, bf16 and int8")
    quality.add_argument("--model", default="out/stdlib", help="checkpoint directory")
    quality.add_argument("--data", default="stdlib", help="what it was trained on: a name in data/, or a folder")
    quality.set_defaults(run=bench_quality)
    blockmap = commands.add_parser("blockmap", help="picture of a mixed run")
    blockmap.set_defaults(run=bench_blockmap)
    for name, command in ("batching", batching), ("memory", memory), ("blockmap", blockmap):
        command.add_argument("--out", type=Path, default=Path(f"assets/{name}.png"), help="where to write the picture")
    args = parser.parse_args()
    print(inspect.getdoc(args.run), file=sys.stderr)
    try:
        result = {"bench": args.command} | conditions() | args.run(args)
    except ValueError as error:  # a --model that is not there, or broken; what this machine cannot do
        sys.exit(str(error))
    for name, value in result.items():
        print(f"{name:>24}: {value}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
