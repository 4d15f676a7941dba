"""
The measurements behind the figures in README.md and REFERENCE.md.

    python bench.py scheduler     # Python time of plan + update, per step
    python bench.py kernels       # one layer of attention: on a CPU a mixed step; on a GPU decodes
                                  # by each backend, block sizes, and the floor
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
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, product
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

from assets import load
from checkpoint import DTYPES, load_checkpoint, load_config, save_checkpoint, serving_dtype
from engine.engine import Engine, flat_batch
from engine.sizing import bytes_per_block, machine_name
from model import GPT, GPTConfig, RMSNorm, Rope
from ops.choice import choose_ops
from ops.packed import packed_for_cpu
from paged import KVBlockPool, Plan, Request, Scheduler, SchedulerSettings
from params import SamplingParams, Settings

Work = list[tuple[list[int], int]]  # requests: a prompt, and how many tokens to answer
Answers = list[list[int]]  # token ids
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

small = partial(GPTConfig, vocab_size=65, context_length=256)
llama = partial(GPTConfig, context_length=4096, norm="rms", rope={0: Rope(5e5)})
llama = partial(llama, bias=False, activation="silu", gated=True)
qwen3 = partial(llama, head_size=128, qk_norm=True)
MODELS = {  # random weights of these shapes; the figures depend on the shape alone
    "1M": small(n_layer=4, n_head=4, n_embd=128),
    "10M": small(n_layer=6, n_head=6, n_embd=384),
    "gpt2-124M": GPTConfig(context_length=2048),
    "smollm2-135M": llama(49152, n_layer=30, n_head=9, n_embd=576, n_kv_head=3, n_inner=1536),
    "llama-3.2-1B": llama(128256, n_layer=16, n_head=32, n_embd=2048, n_kv_head=8, n_inner=8192),
    "qwen3-0.6B": qwen3(151936, n_layer=28, n_head=16, n_embd=1024, n_kv_head=8, n_inner=3072),
}

FLAGS = {  # the help of each argument of a command
    "model": "a shape in MODELS, such as 10M, gpt2-124M or smollm2-135M (random weights), or a "
    "model directory",
    "quantize": "int8: the engine's weights as integers",
    "compile": "compile the engine's step of one request",
    "data": "the model's training data: a name in data/, or a folder",
    "streams": "numbers of requests at once",
    "repeats": "runs of each, of which the one with the median time counts",
    "http_workers": "HTTP processes of the server, or auto",
    "name": "the run to record: tour or preemption",
    "file": "a record: of serve.py --record, or in assets/",
}

# --------------------------------------------------------------------------------------------------
# Workloads


def random_tokens(rng: Random, n: int, V: int) -> list[int]:
    return [rng.randrange(V) for _ in range(n)]


def even_workload(n: int, tokens_in: int, tokens_out: int, V: int, seed=0) -> Work:
    """n requests of the same size, with random prompts."""
    rng = Random(seed)
    prompts = [random_tokens(rng, tokens_in, V) for _ in range(n)]
    return [(prompt, tokens_out) for prompt in prompts]


def offline_workload(n=256, scale=1, V=10_001, seed=0) -> Work:
    """
    The offline benchmark of nano-vLLM: 256 requests, 100 to 1024 tokens in and as many out. Or the
    first n of them, lengths divided by `scale`, token ids modulo the vocabulary V.
    """
    rng = Random(seed)
    prompts = [random_tokens(rng, rng.randint(100, 1024), 10_001) for _ in range(256)]
    answers = [rng.randint(100, 1024) for _ in range(256)]
    work = []
    for prompt, answer in zip(prompts[:n], answers[:n], strict=True):
        tokens = [token % V for token in prompt[: len(prompt) // scale]]
        work.append((tokens, answer // scale))
    return work


def scale_for(config: GPTConfig) -> int:
    """The divisor that makes the offline workload's lengths fit into the model's context."""
    longest = 2048  # prompt and answer
    return max(1, math.ceil(longest / config.context_length))


def num_tokens(work: Work) -> tuple[int, int]:
    """Tokens in and tokens out."""
    prompts, answers = zip(*work, strict=True)
    return sum(map(len, prompts)), sum(answers)


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
    The scheduler's time for a step, `plan` and `update`, in which 256 requests decode: blocks of
    16 tokens, prompts of 100 to 1000, prefix cache on.
    """
    seconds = median_seconds(decode_step(256), 500)
    return {"a step, ms": ms(seconds, 4)}


def decode_step(n: int) -> Callable:
    """The step of a scheduler in which n requests decode, as a function without arguments."""
    settings = SchedulerSettings(max_num_seqs=n, max_num_partial_prefills=n)
    scheduler = Scheduler("fcfs", n * 1000, n * 2048, block_size=16, settings=settings)
    rng = Random(0)
    for i in range(n):
        length = rng.randint(100, 1000)
        prompt = random_tokens(rng, length, 10_000)
        scheduler.add_request(Request(i, prompt, 10**6))
    scheduler.update(scheduler.plan(), [0] * n)  # all prompts in one step
    return lambda: scheduler.update(scheduler.plan(), range(n))


# --------------------------------------------------------------------------------------------------
# Attention, one layer

Step = list[tuple[int, int]]  # requests: new tokens, context length
Heads = tuple[int, int, int]  # H query heads, Hk KV heads, D head size
GPT2_HEADS = (12, 12, 64)  # of gpt2-124M


class Layer:
    """
    One layer's attention in a step whose blocks are permuted all over a pool: in fp32 on a CPU, in
    bf16 on a GPU.
    """

    def __init__(self, requests: Step, heads: Heads, S=16, attention="auto", device="cpu"):
        H, Hk, D = heads
        B = len(requests)
        longest = max(context for _, context in requests)
        M = math.ceil(longest / S)
        tables = torch.randperm(B * M).view(B, M).tolist()
        plan = Plan()
        for i, (n, context) in enumerate(requests):
            r = Request(i, [0] * context, 1, block_table=tables[i])
            r.num_filled_slots = context - n
            if n == 1:
                plan.decodes.append(r)
            else:
                plan.chunks.append((r, n))
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        pool = KVBlockPool(B * M, S, 1, Hk, D, device, dtype)
        self.kv = pool.kv[0].normal_()
        config = GPTConfig(n_layer=1, n_head=H, n_kv_head=Hk, n_embd=H * D)
        model = SimpleNamespace(config=config)  # flat_batch needs no weights
        self.batch = flat_batch(plan, model, pool)
        self.ops, _ = choose_ops(attention, device)
        self.batch.prepared = {0: self.ops.prepare(self.batch, H, self.kv)}
        T = len(self.batch.tokens)
        randn = partial(torch.randn, dtype=dtype, device=device)
        self.q = randn(T, H, D)
        self.k = randn(T, Hk, D)
        self.v = randn(T, Hk, D)
        self.attn = SimpleNamespace(window=0, scale=D**-0.5, softcap=0.0)

    def store(self):
        self.ops.store_kv(self.k, self.v, self.kv, self.batch)

    def attend(self, kv: torch.Tensor):
        self.ops.attend(self.q, kv, self.attn, self.batch)


DECODES = [(1, 1024)] * 256


def bench_kernels() -> dict:
    """
    On a CPU: one layer of store_kv + attention in fp32, 31 decodes at context 512 and a chunk of
    256 tokens, 6 heads of 64. On a GPU: microseconds of one layer of paged attention in bf16, 256
    decodes at context 1,024, 12 heads of 64, by each backend with 16 tokens a block, and by ours
    with other block sizes; block tables permuted, each call in a CUDA graph and on another pool
    than the one before. The floor is to read K and V once.
    """
    if DEVICE == "cpu":
        layer = Layer([(1, 512)] * 31 + [(256, 512)], (6, 6, 64))
        store = median_seconds(layer.store, 50)
        attend = median_seconds(lambda: layer.attend(layer.kv), 50)
        return {"a layer, ms": ms(store + attend, 2)}
    bandwidth = read_bandwidth("cuda")
    _, Hk, D = GPT2_HEADS
    tokens = sum(context for _, context in DECODES)
    num_bytes = 4 * tokens * Hk * D  # K and V in bf16
    floor = 1e6 * num_bytes / bandwidth
    result = {"read, GB/s": round(bandwidth / 1e9), "floor, us": round(floor, 1)}
    for backend in ("triton", "flex", "torch"):
        us = attention_us(backend=backend)
        result[f"{backend}, us"] = f"{us} ({floor / us:.0%})"
    result["block sizes, us"] = {S: attention_us(S) for S in (1, 4, 8, 16, 32, 64, 128)}
    return result


def attention_us(S=16, backend="triton") -> float:
    """
    Microseconds of one layer's attention in bf16, over as many pools as make 600 MB, at most 64.
    """
    torch._dynamo.reset()  # FlexAttention compiles for each shape, and has a limit
    torch.cuda.empty_cache()
    layer = Layer(DECODES, GPT2_HEADS, S, backend, "cuda")
    number = max(2, min(64, 600_000_000 // layer.kv.nbytes))
    pools = [torch.randn_like(layer.kv) for _ in range(number)]
    us = graph_us(lambda i: layer.attend(pools[i]), number)
    return round(us, 1)


# --------------------------------------------------------------------------------------------------
# A model on a CPU: against Hugging Face, and what smaller weights cost


def bench_generate(model="10M", quantize="none") -> dict:
    """
    64 tokens in, 128 out, greedy: milliseconds per token of one request, per step of eight. Engine
    and Hugging Face, in fp32, in turn, so that both see the same machine.
    """
    gpt = build_model(model)
    transformers = hugging_face(gpt, model)
    # without prefix cache each answer is computed whole
    engine = Engine(gpt, Settings(prefix_cache=False, quantize=quantize))
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
        expected = generate(work)
        seconds.append((ours, perf_counter() - started))
        equal += sum(map(eq, answers, expected))
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
        _, tokens_out = num_tokens(work)
        result[f"seed {seed}, output tok/s"] = round(tokens_out / seconds)
    for n in (1, 32):
        result[f"{n} at once"] = latency(engine, n)
    return result


def latency(engine: Engine, n: int) -> dict:
    """Milliseconds of a step in which n requests decode, and of a whole answer over its tokens."""
    N = min(512, engine.config.context_length // 2)
    V = engine.config.vocab_size
    prompts = even_workload(n, N, 1, V, seed=n)
    prefill, _ = timed(engine, prompts)
    work = even_workload(n, N, N, V, seed=-n - 1)  # other prompts: no prefix hits
    whole, _ = timed(engine, work)
    step = (whole - prefill) / (N - 1)
    a_token = whole / N
    return {"ms a step": ms(step), "whole, ms a token": ms(a_token)}


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
    share = round(equal / len(tokens), 4)
    return {
        "tokens": len(tokens),
        "fp32, graphs and overlap change": exact_changes,
        "bf16, graphs and overlap change": rounded_changes,
        "fp32, tokens unlike the dense model's": wrong,
        "bf16, share of fp32's tokens": share,
    }


def answers_four_ways(model: GPT, work: Work) -> tuple[Answers, int]:
    """
    Greedy answers with graphs and overlap; and of the other three ways, how many answer otherwise.
    """
    answers = []
    for graphs, overlap in product((True, False), repeat=2):
        engine = Engine(model, Settings(graphs=graphs, overlap=overlap))
        _, tokens = timed(engine, work, temperature=0)
        answers.append(tokens)
    first, *others = answers
    return first, sum(other != first for other in others)


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
    Decode steps of 256 requests (32 on a CPU) at context 900: milliseconds a step; the floor is to
    read weights, K and V from memory once. On a GPU also how long the host works on a step, how
    many kernels the step has, and where the device's time goes (each kernel counts from the end of
    the one before: with programmatic dependent launch it may start earlier, and then waits).
    """
    steps = 64
    gpt = build_model(model, DEVICE)
    n = 256 if DEVICE == "cuda" else 32
    # no request ends in the steps below, and none is preempted
    context = min(900, gpt.config.context_length - 100)
    num_blocks = n * math.ceil((context + 100) / 16)
    engine = Engine(gpt, Settings(prefix_cache=False, num_blocks=num_blocks))
    let_decode(engine, n, context)
    seconds = median_seconds(engine.step, steps)
    weights = sum(weight.nbytes for weight in gpt.parameters())
    kv_bytes = bytes_per_block(gpt, 1) * n * (context + steps / 2)  # halfway
    floor = (weights + kv_bytes) / read_bandwidth(DEVICE)
    row = {"requests": n, "ms a step": ms(seconds), "floor, ms": ms(floor)}
    if DEVICE == "cuda":
        # the device is idle when the step begins, so the host never waits for tokens: not for
        # those of the step before nor, with overlap, for those of the step that it launches
        row["host, ms"] = ms(median_seconds(engine.step, 16, torch.cuda.synchronize))
        row |= device_time(engine, 8)
    return row


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


KINDS = {  # the work of a kernel -> a pattern in such a kernel's name
    "attention": "(decode|prefill)_kernel",
    "linear layers": "(vector|matrix|gate)_kernel|gemm|cutlass|nvjet",
    "norms": "norm_kernel",
    "sampling": "(threshold|gumbel_max)_kernel",
    "store": "store_kv_kernel|norm_rope_store_kernel",
}


def kind_of(kernel: str) -> str:
    """Which of the KINDS a kernel is by its name, or "rest"."""
    for kind, pattern in KINDS.items():
        if re.search(pattern, kernel):
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
    on_device = torch.autograd.DeviceType.CUDA  # the others are calls of the host
    events = [event for event in profiler.events() if event.device_type == on_device]
    launches = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    row = {"kernels": round(len(launches) / steps)}
    for kind, seconds in seconds_by_kind(launches).items():
        row[kind] = ms(seconds / steps)
    return row


# --------------------------------------------------------------------------------------------------
# The server


def bench_server(model="out/stdlib", streams=(1, 32, 256), repeats=1, http_workers="auto") -> dict:
    """
    The offline workload over HTTP: as many requests as streams, all at once, and then again, with
    other prompts, at random times (Poisson) at 70% of the requests a second that were managed at
    once. The clients are processes of their own with raw sockets, see assets/load.py. Output tokens
    per second until the last token; milliseconds from when a request was due to its first token;
    milliseconds between arrivals of text. Where the model's context is too short, the workload's
    lengths are divided.
    """
    config = load_config(model)
    seeds = count(1)

    def measure(n: int, rate=0.0) -> dict:
        runs = []
        for _ in range(repeats):
            work = offline_workload(n, scale_for(config), config.vocab_size, next(seeds))
            runs.append(measure_load(address, work, rate))
        runs.sort(key=lambda run: run["s"])
        return runs[repeats // 2]

    result = {}
    with server(model, http_workers) as address:
        measure_load(address, even_workload(8, 12, 64, config.vocab_size))  # warm-up
        for n in streams:
            row = measure(n)
            result[plural(n, "stream")] = row
            if n > 1:
                rate = round(0.7 * n / row["s"], 1)
                result[f"{n} at {rate}/s"] = measure(n, rate)
    return result


@contextmanager
def server(model: str, http_workers: str) -> Iterator[list[str]]:
    """serve.py in a process of its own: its host and port."""
    command = [sys.executable, "serve.py", "--model", model, "--port", "0", "--no-access-log"]
    if http_workers != "auto":
        command += ["--http-workers", http_workers]
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


def measure_load(address: list[str], work: Work, rate=0.0) -> dict:
    """Send all requests at once or, with a rate, at the times of a Poisson process."""
    rng = Random(0)
    at = 0.0
    requests = []
    for prompt, answer in work:
        if rate:
            at += rng.expovariate(rate)
        requests.append(load.completion(prompt, answer, at))
    processes = max(1, 3 * os.cpu_count() // 4)
    rows = load.run_clients(*address, requests, processes)
    return load.summary(rows)


# --------------------------------------------------------------------------------------------------
# The command line


def add_argument(parser: argparse.ArgumentParser, argument: inspect.Parameter):
    """The flag of a command's argument; of a tuple it takes several values."""
    name = argument.name
    default = argument.default
    if default is argument.empty:
        parser.add_argument(name, help=FLAGS[name])
        return
    options = {"kind": positive, "nargs": "+"} if isinstance(default, tuple) else {}
    flag = "--" + name.replace("_", "-")
    add_flag(parser, flag, FLAGS[name], default, **options)


def commands_of(module: dict, prefix: str) -> dict[str, Callable]:
    """The functions whose names have the prefix, by the rest of their names."""
    names = [name for name in module if name.startswith(prefix)]
    return {name.removeprefix(prefix): module[name] for name in names}


def build_parser(about: str, commands: dict[str, Callable]) -> Parser:
    as_written = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = Parser(description=about, **as_written)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run in commands.items():
        command = subparsers.add_parser(name, description=inspect.getdoc(run), **as_written)
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
    result = {"bench": name, **arguments, **machine, **figures}
    for name, value in result.items():
        print(f"{name:>24}: {value}", file=sys.stderr)
    print(json.dumps(result, default=str))  # a path is no JSON


COMMANDS = commands_of(globals(), "bench_")

if __name__ == "__main__":
    main(__doc__, COMMANDS)
