"""
The measurements behind the figures in README.md and REFERENCE.md.

    python bench.py scheduler     # Python time of plan + update, per step
    python bench.py kernels       # one layer of attention: on a CPU a mixed step; on a GPU decodes,
                                  # prefill and mixed steps, block sizes, and the floor
    python bench.py engine        # tokens per second of a mixed workload, latency of 1 and 32
    python bench.py equality      # greedy answers with graphs, overlap, neither; the dense model's
    python bench.py overhead      # where the time of a decode step goes, on the device and the host
    python bench.py server        # the offline workload over HTTP, as 1, 32 and 256 streams
    python bench.py generate      # engine against Hugging Face's generate, 1 and 8 requests at once
    python bench.py quality       # bits per byte of held-out text in fp32, bf16 and int8 weights

assets/draw.py draws the pictures. Each command is a function. Its arguments are its flags, and
their defaults give the flags' types; its docstring is the workload and is printed first; it returns
its figures, which are printed behind the flags' values, as one line of JSON. Seeds are fixed,
warm-up is not counted, times are medians. The machine must be quiet: beside a second busy process
on two cores a token takes 100 ms instead of 1, because threads that wait for each other spin.
"""

import argparse
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, count, product
from operator import eq
from random import Random
from statistics import median
from time import perf_counter
from types import SimpleNamespace

from common import (
    SPINS_SERVING,
    Parser,
    add_flag,
    announce,
    collect_garbage_rarely,
    end_with_one_line,
    plural,
    positive,
)

os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)  # before torch is loaded
if __name__ == "__main__":
    end_with_one_line()
    announce("loading torch")

import torch

import kernels
from assets import load
from checkpoint import DTYPES, load_checkpoint, load_config, save_checkpoint, serving_dtype
from engine.engine import Engine
from engine.sizing import bytes_per_block, machine_name
from model import GPT, GPTConfig, RMSNorm, Rope
from ops.choice import choose_ops
from ops.cpu import packed_for_cpu
from paged import Request, Scheduler, SchedulerSettings
from params import SamplingParams, Settings

Work = list[tuple[list[int], int]]  # requests: a prompt, and how many tokens to answer
Answers = list[list[int]]  # token ids
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


llama = partial(
    GPTConfig, context_length=4096, norm="rms", bias=False, activation="silu", gated=True
)
MODELS = {  # random weights of these shapes; the figures depend on the shape alone
    "1M": GPTConfig(vocab_size=65, context_length=256, n_layer=4, n_head=4, n_embd=128),
    "10M": GPTConfig(vocab_size=65, context_length=256, n_layer=6, n_head=6, n_embd=384),
    "gpt2-124M": GPTConfig(context_length=2048),
    "smollm2-135M": llama(
        49152, n_layer=30, n_head=9, n_embd=576, n_kv_head=3, n_inner=1536, rope={0: Rope(1e5)}
    ),
    "llama-3.2-1B": llama(
        128256, n_layer=16, n_head=32, n_embd=2048, n_kv_head=8, n_inner=8192,
        rope={0: Rope(5e5, 32.0, (1.0, 4.0, 8192.0))},
    ),
    "qwen3-0.6B": llama(
        151936, n_layer=28, n_head=16, n_embd=1024, n_kv_head=8, n_inner=3072, head_size=128,
        qk_norm=True, rope={0: Rope(1e6)},
    ),
}  # fmt: skip

FLAGS = {  # what --help says; the commands' arguments have their defaults
    "--model": "a shape in MODELS, such as 10M, gpt2-124M or smollm2-135M (random weights), or a "
    "model directory",
    "--repeats": "runs of each number of streams; the median is printed",
    "--quantize": "int8: the engine's weights as integers",
    "--compile": "compile the engine's step of one request",
    "--data": "what the model was trained on: a name in data/, or a folder",
    "--streams": "numbers of requests at once",
    "--slow-clients": "how many clients read 1 KB/s",
    "--flags": "flags of serve.py, as in --flags='--dtype bf16'",
    "name": "which run: tour or preemption",
    "file": "a record: of serve.py --record, or in assets/",
}
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
    prompts = [random_tokens(rng, rng.randint(100, 1024), 10_001) for _ in range(256)]
    answers = [rng.randint(100, 1024) for _ in range(256)]
    work = []
    for prompt, answer in list(zip(prompts, answers, strict=True))[:n]:
        tokens = [token % V for token in prompt[: len(prompt) // scale]]
        work.append((tokens, answer // scale))
    return work


def scale_for(config: GPTConfig) -> int:
    """The divisor that makes the offline workload's lengths fit into the model's context."""
    return max(1, math.ceil(2048 / config.context_length))  # of the longest prompt and answer


def num_tokens(work: Work) -> tuple[int, int]:
    """Tokens in and tokens out."""
    return sum(len(prompt) for prompt, _ in work), sum(answer for _, answer in work)


def fixed_length(n: int, temperature=0.0, seed=0) -> SamplingParams:
    """For an answer of exactly n tokens, greedy by default."""
    return SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=seed)


def build_model(name: str, device="cpu") -> GPT:
    """
    Random weights of a shape in MODELS, or a model directory's: fp32 on a CPU, bf16 on a GPU, but
    norms in fp32, as if they were loaded so.
    """
    torch.manual_seed(0)
    model = GPT(MODELS[name]).eval() if name in MODELS else load_checkpoint(name)
    model.requires_grad_(False)
    dtype = serving_dtype("auto", device)
    for module in model.modules():
        if not isinstance(module, RMSNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return model.to(device)


# --------------------------------------------------------------------------------------------------
# Timing


def ms(seconds: float, digits=3) -> float:
    """Milliseconds, rounded."""
    return round(1e3 * seconds, digits)


def median_seconds(call: Callable, repeats: int, before: Callable = tuple) -> float:
    """
    Median seconds of call(), after one warm-up. `before` is called before each, and not counted; by
    default it does nothing.
    """
    times = []
    for _ in range(repeats + 1):
        before()
        started = perf_counter()
        call()
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


def timed(engine: Engine, work: Work, temperature=0.6) -> tuple[float, Answers]:
    """
    Seconds to serve requests that all wait at the start, and their answers. Asserts that all
    prompts were computed and all answers have their length.
    """
    prompts = [prompt for prompt, _ in work]
    params = [fixed_length(n, temperature, seed=i) for i, (_, n) in enumerate(work)]
    before = engine.counts()
    started = perf_counter()
    answers = engine.generate(prompts, params, progress=False)
    seconds = perf_counter() - started
    after = engine.counts()
    tokens_in, tokens_out = num_tokens(work)
    assert sum(map(len, answers)) == tokens_out, "an answer has not all of its tokens"
    if after["preemptions"] == before["preemptions"]:
        computed = after["prefill tokens"] - before["prefill tokens"]
        assert computed == tokens_in, f"{computed} of {tokens_in} prompt tokens were computed"
    return seconds, answers


# --------------------------------------------------------------------------------------------------
# The scheduler alone


def bench_scheduler() -> dict:
    """
    The scheduler's time for a step, `plan` and `update`, in which every request decodes: blocks of
    16 tokens, prompts of 100 to 1000, prefix cache on.
    """
    result = {}
    for n in (1, 32, 256):
        seconds = median_seconds(decode_step(n), 500)
        result[f"{plural(n, 'request')}, ms"] = ms(seconds, 4)
    return result


def decode_step(n: int) -> Callable:
    """The step of a scheduler in which n requests decode, as a function without arguments."""
    settings = SchedulerSettings(max_num_seqs=n, max_num_partial_prefills=n)
    scheduler = Scheduler("fcfs", n * 1000, n * 2048, block_size=16, settings=settings)
    rng = Random(0)
    for i in range(n):
        prompt = random_tokens(rng, rng.randint(100, 1000), 10_000)
        scheduler.add_request(Request(i, prompt, 10**6))
    scheduler.update(scheduler.plan(), [0] * n)  # all prompts in one step
    return lambda: scheduler.update(scheduler.plan(), range(n))


# --------------------------------------------------------------------------------------------------
# Attention, one layer

Step = list[tuple[int, int]]  # requests: new tokens, context length; those with one new token first
Heads = tuple[int, int, int]  # H query heads, Hk KV heads, D head size
GPT2_HEADS = (12, 12, 64)  # of gpt2-124M
GROUPED_HEADS = (16, 8, 128)  # of Qwen3-0.6B: two query heads share a KV head


def random_batch(requests: Step, S: int, device: str) -> kernels.Batch:
    """A step whose blocks are permuted all over a pool, without its operators."""
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
        ops=None,
    )


class Layer:
    """One layer's attention in a random step: in fp32 on a CPU, in bf16 on a GPU."""

    def __init__(self, requests: Step, heads: Heads, S=16, attention="auto", device="cpu"):
        H, Hk, D = heads
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        randn = partial(torch.randn, dtype=dtype, device=device)
        batch = random_batch(requests, S, device)
        batch.ops, _ = choose_ops(attention, device)
        T = len(batch.tokens)
        self.q = randn(T, H, D)
        self.k, self.v = randn(2, T, Hk, D)
        self.kv = randn(2, batch.block_tables.numel() + 1, Hk, S, D)
        batch.prepared = {0: batch.ops.prepare(batch, H, self.kv)}
        self.batch = batch
        self.attn = SimpleNamespace(window=0, scale=D**-0.5, softcap=0.0)

    def store(self):
        self.batch.ops.store_kv(self.k, self.v, self.kv, self.batch)

    def attend(self, kv: torch.Tensor):
        self.batch.ops.attend(self.q, kv, self.attn, self.batch)


DECODES = {  # heads -> steps of so many decodes, each with so much context
    GPT2_HEADS: [(256, 1024), (32, 1024), (1, 1024)],
    GROUPED_HEADS: [(256, 1024), (32, 1024), (1, 1024), (1, 32768)],
}


def bench_kernels() -> dict:
    """
    On a CPU: one layer of store_kv + attention in fp32, 31 decodes at context 512 and a chunk of
    256 tokens, 6 heads of 64. On a GPU: microseconds of one layer of paged attention in bf16, 16
    tokens a block unless said otherwise, block tables permuted, each call in a CUDA graph and on
    another pool than the one before. The floor is to read K and V once.
    """
    if DEVICE == "cpu":
        layer = Layer([(1, 512)] * 31 + [(256, 512)], (6, 6, 64))
        store = median_seconds(layer.store, 50)
        attend = median_seconds(lambda: layer.attend(layer.kv), 50)
        return {"a layer, ms": ms(store + attend, 2)}
    read = read_bandwidth("cuda")
    result = {"read, GB/s": round(read / 1e9)}
    for heads, steps in DECODES.items():
        for B, context in steps:
            result[f"{B} x {context}, {heads}"] = decode_row(B, context, heads, read)
    decodes = [(1, 1024)] * 128
    chunks = [(256, 768)] * 8
    others = {
        "prefill of 2048, 16 heads of 128": ([(2048, 2048)], (16, 16, 128)),
        "prefill of 2048, 16 heads of 64": ([(2048, 2048)], (16, 16, 64)),
        "128 decodes + 8 chunks": (decodes + chunks, GPT2_HEADS),
        "128 decodes": (decodes, GPT2_HEADS),
        "8 chunks": (chunks, GPT2_HEADS),
    }
    for name, step in others.items():
        result[name] = attention_us(*step)
    for heads in GPT2_HEADS, GROUPED_HEADS:
        sizes = (1, 4, 8, 16, 32, 64, 128)
        row = {S: attention_us([(1, 1024)] * 256, heads, S) for S in sizes}
        result[f"block sizes, 256 x 1024, {heads}"] = row
    return result


def decode_row(B: int, context: int, heads: Heads, read: float) -> dict:
    """Of each backend, microseconds and the share of the floor, or why it cannot do this step."""
    _, Hk, D = heads
    floor = 1e6 * 4 * B * context * Hk * D / read  # K and V in bf16
    row = {"floor": round(floor, 1)}
    for backend in ("triton", "flex", "torch"):
        try:
            us = attention_us([(1, context)] * B, heads, backend=backend)
            row[backend] = f"{us} ({floor / us:.0%})"
        except Exception as error:  # whatever a backend raises for a shape that it lacks
            row[backend] = repr(error)[:80]
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
    return round(graph_us(lambda i: layer.attend(pools[i]), number), 1)


# --------------------------------------------------------------------------------------------------
# A model on a CPU: against Hugging Face, and what smaller weights cost


def bench_generate(model="10M", quantize="none", compile=False) -> dict:
    """
    64 tokens in, 128 out, greedy: milliseconds per token of one request, per step of eight. Engine
    and Hugging Face, in fp32, in turn, so that both see the same machine.
    """
    gpt = build_model(model)
    transformers = hugging_face(gpt, model)
    # without prefix cache each answer is computed whole
    engine = Engine(gpt, Settings(prefix_cache=False, quantize=quantize, compile=compile))
    return {f"{n} at once": both_generate(engine, transformers, n) for n in (1, 8)}


def hugging_face(gpt: GPT, name: str) -> Callable[[Work], Answers]:
    """The same weights in transformers: greedy answers of 128 tokens to prompts of equal length."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        if name in MODELS:
            save_checkpoint(gpt, directory)
            name = directory
        transformers = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 128}

    @torch.inference_mode()
    def generate(work: Work) -> Answers:
        prompts = torch.tensor([prompt for prompt, _ in work])
        mask = torch.ones_like(prompts)
        texts = transformers.generate(prompts, attention_mask=mask, **options)
        return texts[:, -128:].tolist()

    return generate


def both_generate(engine: Engine, generate: Callable, n: int) -> dict:
    """n requests by the engine and by `generate`, in turn, other prompts each time."""
    seconds = []  # of both
    equal = 0
    for seed in range(6):
        work = even_workload(n, 64, 128, engine.config.vocab_size, seed)
        ours, answers = timed(engine, work, temperature=0)
        started = perf_counter()
        equal += sum(map(eq, answers, generate(work)))
        seconds.append((ours, perf_counter() - started))
    ours, transformers = map(median, zip(*seconds[1:], strict=True))  # the first is warm-up
    return {
        "ms a step": ms(ours / 128, 2),
        "Hugging Face, ms a step": ms(transformers / 128, 2),
        "equal answers": f"{equal} of {n * len(seconds)}",
    }


FORMATS = {"fp32": "none", "bf16": "none", "int8": "int8"}  # what a CPU serves -> --quantize


def bench_quality(model="out/stdlib", data="stdlib") -> dict:
    """
    Held-out text, each token scored once as at the end of training, with the weights in each format
    that this CPU serves.
    """
    from train import Process, evaluate
    from training.corpus import load_corpus

    process = Process(torch.device("cpu"), torch.float32, compile=False)
    corpus = load_corpus(data, process)
    result = {}
    for name, quantize in FORMATS.items():
        dtype = DTYPES.get(name, torch.float32)  # integers are made of fp32
        gpt = load_checkpoint(model, dtype=dtype)
        try:
            gpt = packed_for_cpu(gpt, quantize)
        except ValueError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        if gpt.config.vocab_size != corpus.tokenizer.vocab_size:
            raise ValueError(f"{model} was not trained on {data}: name its data with --data")
        nats, count = evaluate(gpt, corpus, process)
        bits = corpus.bits_per_byte(nats, count)
        result[name] = {"nats a token": round(nats / count, 5), "bits a byte": round(bits, 5)}
    return result


# --------------------------------------------------------------------------------------------------
# The engine: speed, equality, and where a step's time goes


def bench_engine(model="gpt2-124M") -> dict:
    """
    Offline: 256 requests at once, 100 to 1024 tokens in, as many out, temperature 0.6, for each of
    three seeds. Latency: 1 and 32 requests of 512 tokens in and 512 out. In bf16 on a GPU, fp32 on
    a CPU. Lengths are divided for a model of shorter context. Tokens in and out are asserted.
    """
    gpt = build_model(model, DEVICE)
    V = gpt.config.vocab_size
    engine = Engine(gpt)
    result = {"engine": engine.statement()}
    timed(engine, even_workload(4, 100, 8, V))  # warm-up
    collect_garbage_rarely()  # as the server's engine does
    for seed in range(3):
        work = offline_workload(256, scale_for(gpt.config), V, seed)
        seconds, _ = timed(engine, work)
        tokens_in, tokens_out = num_tokens(work)
        row = {"in": tokens_in, "out": tokens_out, "s": round(seconds, 2)}
        result[f"offline, seed {seed}"] = row | {"output tok/s": round(tokens_out / seconds)}
    for n in (1, 32):
        result[f"{n} at once"] = latency(engine, n)
    return result


def latency(engine: Engine, n: int) -> dict:
    """Milliseconds of a step in which n requests decode, and of a whole answer over its tokens."""
    N = min(512, engine.config.context_length // 2)
    V = engine.config.vocab_size
    prefill, _ = timed(engine, even_workload(n, N, 1, V, seed=n))
    whole, _ = timed(engine, even_workload(n, N, N, V, seed=-n - 1))  # without prefix hits
    step = (whole - prefill) / (N - 1)
    return {"ms a step": ms(step), "whole, ms a token": ms(whole / N)}


def bench_equality(model="out/stdlib") -> dict:
    """
    The offline workload on a trained model, lengths over 8, greedy: whether answers are the same
    with CUDA graphs and overlap on and off, and in fp32 those of the dense model, which reads
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
    equal = sum(map(eq, tokens, chain(*rounded)))
    return {
        "tokens": len(tokens),
        "fp32, graphs and overlap change": exact_changes,
        "bf16, graphs and overlap change": rounded_changes,
        "fp32, tokens unlike the dense model's": wrong,
        "bf16, share of fp32's tokens": round(equal / len(tokens), 4),
    }


def answers_four_ways(model: GPT, work: Work) -> tuple[Answers, int]:
    """
    Greedy answers with graphs and overlap; and of the other three ways, how many answer otherwise.
    """
    answers = []
    for graphs, overlap in product((True, False), repeat=2):
        settings = Settings(graphs=graphs, overlap=overlap)
        answers.append(timed(Engine(model, settings), work, temperature=0)[1])
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
    weights = sum(weight.nbytes for weight in gpt.parameters())
    numbers = (1, 32, 256) if on_gpu else (1, 8, 32)
    # no request ends in the steps below, and none is preempted
    context = min(900, gpt.config.context_length - 100)
    num_blocks = numbers[-1] * -(-(context + 100) // 16)
    engine = Engine(gpt, Settings(prefix_cache=False, num_blocks=num_blocks))
    rows = {}
    for n in numbers:
        let_decode(engine, n, context)
        seconds = median_seconds(engine.step, steps)
        kv_bytes = bytes_per_block(gpt, 1) * n * (context + steps / 2)  # halfway
        floor = (weights + kv_bytes) / bandwidth
        rows[n] = row = {"ms a step": ms(seconds), "floor, ms": ms(floor)}
        if on_gpu:
            # the device is idle when the step begins, so the host never waits for tokens: not for
            # those of the step before nor, with overlap, for those of the step that it launches
            row["host, ms"] = ms(median_seconds(engine.step, 16, torch.cuda.synchronize))
    if on_gpu:  # last: after a profiler each launch takes longer
        for n, row in rows.items():
            let_decode(engine, n, context)
            row |= device_time(engine, 8)
    return {plural(n, "request"): row for n, row in rows.items()}


def let_decode(engine: Engine, n: int, context: int):
    """Drop what the engine has, and bring it to where n requests decode at this context length."""
    for id in list(engine.requests):
        engine.abort(id)
    while engine.has_work:
        engine.step()
    room = engine.config.context_length - context
    work = even_workload(n, context, room, engine.config.vocab_size)
    for i, (prompt, _) in enumerate(work):
        engine.add_request(i, prompt, fixed_length(room, 0.6, seed=i))
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()


KINDS = {  # the work of a kernel -> parts of such a kernel's name
    "attention": "decode_kernel prefill_kernel",
    "linear layers": "vector_kernel matrix_kernel gemm cutlass nvjet gate_kernel",
    "norms": "norm_kernel",
    "sampling": "threshold_kernel gumbel_max_kernel",
    "store": "store_kv_kernel norm_rope_store_kernel",
}


def kind_of(kernel: str) -> str:
    """Which of the KINDS a kernel is by its name, or "rest"."""
    for kind, parts in KINDS.items():
        if any(part in kernel for part in parts.split()):
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
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    launches = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA  # the others are calls of the host
    )
    row = {kind: ms(seconds / steps) for kind, seconds in seconds_by_kind(launches).items()}
    return {"kernels": round(len(launches) / steps)} | row


# --------------------------------------------------------------------------------------------------
# The server

SLOW = 1000  # bytes a second that a slow client reads


def bench_server(
    model="out/stdlib", streams=(1, 32, 256), slow_clients=0, repeats=1, flags=""
) -> dict:
    """
    The offline workload over HTTP: as many requests as streams, all at once, and then again, with
    other prompts, at random times (Poisson) at 70% of the requests a second that were managed at
    once. The clients are processes of their own with raw sockets, see assets/load.py. Output tokens
    per second until the last token; milliseconds from when a request was due to its first token;
    milliseconds between arrivals of text. With --slow-clients N there are two more runs: N of the
    clients read at full speed, then at 1 KB/s; both rows are of the other clients. Where the
    model's context is too short, the workload's lengths are divided.
    """
    config = load_config(model)
    V = config.vocab_size
    seeds = count(1)
    processes = max(1, 3 * os.cpu_count() // 4)

    def new_work(n: int) -> Work:
        return offline_workload(n, scale_for(config), V, next(seeds))

    works = {n: [new_work(n) for _ in range(repeats)] for n in streams}
    result = {}
    with server(model, flags) as (host, port):

        def measure(work: Work, rate=0.0, num_slow=0, skip=0) -> dict:
            requests = completions(work, rate, num_slow)
            rows = load.run_clients(host, port, requests, processes)
            return load.summary(rows[skip:])

        measure(offline_workload(8, 8, V))  # warm-up
        for n in streams:
            runs = sorted((measure(work) for work in works[n]), key=lambda run: run["s"])
            result[plural(n, "stream")] = middle = runs[repeats // 2]
            if n == 1:
                continue
            rate = round(0.7 * n / middle["s"], 1)
            work = new_work(n)
            result[f"{n} at {rate}/s"] = measure(work, rate)
            for slow in (0, slow_clients) if 0 < slow_clients < n else ():
                # the same lengths, but no block is in the prefix cache
                work = [([(token + 1) % V for token in prompt], answer) for prompt, answer in work]
                result[f"{n} streams, {slow} slow"] = measure(work, 0, slow, slow_clients)
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


def completions(work: Work, rate=0.0, num_slow=0) -> list[dict]:
    """
    HTTP requests for assets/load.py: all at once or, with a rate, at the times of a Poisson
    process. The first num_slow of the clients are slow.
    """
    rng = Random(0)
    at = 0.0
    requests = []
    for i, (prompt, answer) in enumerate(work):
        if rate:
            at += rng.expovariate(rate)
        speed = SLOW if i < num_slow else None
        requests.append(load.completion(prompt, answer, at, speed))
    return requests


# --------------------------------------------------------------------------------------------------
# The command line


def add_argument(parser: argparse.ArgumentParser, argument: inspect.Parameter):
    """The flag of a command's argument; of a tuple it takes several values."""
    default = argument.default
    if default is argument.empty:
        parser.add_argument(argument.name, help=FLAGS[argument.name])
        return
    flag = "--" + argument.name.replace("_", "-")
    options = {"kind": positive, "nargs": "+"} if isinstance(default, tuple) else {}
    add_flag(parser, flag, FLAGS[flag], default, **options)


def commands_of(names: dict, prefix: str) -> dict[str, Callable]:
    """The functions whose names have the prefix, by the rest of their names."""
    return {name.removeprefix(prefix): f for name, f in names.items() if name.startswith(prefix)}


def build_parser(about: str, commands: dict[str, Callable]) -> Parser:
    lines_kept = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = Parser(description=about, **lines_kept)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run in commands.items():
        command = subparsers.add_parser(name, description=inspect.getdoc(run), **lines_kept)
        for argument in inspect.signature(run).parameters.values():
            add_argument(command, argument)
    return parser


def main(about: str, commands: dict[str, Callable]):
    arguments = vars(build_parser(about, commands).parse_args())
    name = arguments.pop("command")
    print(inspect.getdoc(commands[name]), file=sys.stderr)
    try:
        figures = commands[name](**arguments)
    except ValueError as error:  # a --model that is missing or broken; what this machine cannot do
        sys.exit(str(error))
    machine = {"device": machine_name(DEVICE), "torch": torch.__version__}
    result = {"bench": name} | arguments | machine | figures
    for name, value in result.items():
        print(f"{name:>24}: {value}", file=sys.stderr)
    print(json.dumps(result, default=str))  # a path is no JSON


COMMANDS = commands_of(globals(), "bench_")

if __name__ == "__main__":
    main(__doc__, COMMANDS)
