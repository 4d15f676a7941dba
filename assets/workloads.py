"""
Models and requests to measure, and functions that time them, for bench.py, assets/draw.py and
walkthrough.py.

    model = build_model("gpt2-124M", DEVICE)
    work = offline_workload(16, scale_for(model.config), model.config.vocab_size)
    seconds, answers = timed(Engine(model), work)
    tokens_in, tokens_out = num_tokens(work)

Weights are random, because the figures depend only on a model's shape. Seeds are fixed.
"""

import math
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import median
from time import perf_counter

import torch

from checkpoint import load_checkpoint, serving_dtype
from engine.engine import Engine
from model import GPT, GPTConfig, RMSNorm, Rope
from params import SamplingParams

Work = list[tuple[list[int], int]]  # requests: a prompt, and the number of tokens to answer
Answers = list[list[int]]  # token ids
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

small = partial(GPTConfig, vocab_size=65, context_length=256)
llama = partial(GPTConfig, context_length=4096, norm="rms", rope={0: Rope(5e5)})
llama = partial(llama, bias=False, activation="silu", gated=True)
qwen3 = partial(llama, head_size=128, qk_norm=True)
MODELS = {
    "1M": small(n_layer=4, n_head=4, n_embd=128),
    "10M": small(n_layer=6, n_head=6, n_embd=384),
    "gpt2-124M": GPTConfig(context_length=2048),
    "smollm2-135M": llama(49152, n_layer=30, n_head=9, n_embd=576, n_kv_head=3, n_inner=1536),
    "llama-3.2-1B": llama(128256, n_layer=16, n_head=32, n_embd=2048, n_kv_head=8, n_inner=8192),
    "qwen3-0.6B": qwen3(151936, n_layer=28, n_head=16, n_embd=1024, n_kv_head=8, n_inner=3072),
}


def build_model(name: str, device="cpu") -> GPT:
    """
    Return the model in a directory, or a model with random weights and a shape in MODELS. The
    weights have the same dtypes as when loaded: fp32 on a CPU, and bf16 on a GPU, except for RMS
    norms, which are in fp32.
    """
    dtype = serving_dtype("auto", device)
    if name not in MODELS:
        return load_checkpoint(name, device, dtype)
    torch.manual_seed(0)
    model = GPT(MODELS[name]).eval().requires_grad_(False).to(device, dtype)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.float()
    return model


# --------------------------------------------------------------------------------------------------
# Requests


def random_tokens(rng: Random, n: int, V: int) -> list[int]:
    return [rng.randrange(V) for _ in range(n)]


def even_workload(n: int, tokens_in: int, tokens_out: int, V: int, seed=0) -> Work:
    """Return n requests of equal size, with random prompts."""
    rng = Random(seed)
    prompts = [random_tokens(rng, tokens_in, V) for _ in range(n)]
    return [(prompt, tokens_out) for prompt in prompts]


def offline_workload(n=256, scale=1, V=10_001, seed=0) -> Work:
    """
    Return nano-vLLM's offline benchmark: 256 requests, each with 100 to 1024 tokens in and 100 to
    1024 out. Or return the first n of them, with lengths divided by `scale` and token ids modulo
    the vocabulary size V.
    """
    rng = Random(seed)
    prompts = [random_tokens(rng, rng.randint(100, 1024), 10_001) for _ in range(256)]
    work = []
    for prompt in prompts:
        kept = prompt[: len(prompt) // scale]
        tokens = [token % V for token in kept]
        work.append((tokens, rng.randint(100, 1024) // scale))
    return work[:n]


def scale_for(config: GPTConfig) -> int:
    """Return the divisor that makes the offline workload fit in the model's context."""
    longest = 2048  # prompt and answer
    return max(1, math.ceil(longest / config.context_length))


def num_tokens(work: Work) -> tuple[int, int]:
    """Return the numbers of tokens in and tokens out."""
    prompts, answers = zip(*work, strict=True)
    return sum(map(len, prompts)), sum(answers)


def fixed_length(n: int, temperature=0.0, seed=0) -> SamplingParams:
    """Return the parameters for an answer of exactly n tokens, greedy by default."""
    return SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, seed=seed)


def let_decode(engine: Engine, n: int, context: int, choices=1):
    """
    Drop the engine's requests, then set it up so that n requests are decoding at this context
    length. Each prompt has `choices` of these requests.
    """
    for id in list(engine.requests):
        engine.abort(id)
    while engine.has_work:
        engine.step()
    length = engine.config.context_length - context
    work = even_workload(n // choices, context, length, engine.config.vocab_size)
    for i, (prompt, _) in enumerate(work):
        engine.add_request(i, prompt, fixed_length(length, 0.6, seed=i), n=choices)
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()


# --------------------------------------------------------------------------------------------------
# Timing


def ms(seconds: float, digits=3) -> float:
    """Return rounded milliseconds."""
    return round(1e3 * seconds, digits)


def median_seconds(call: Callable, repeats: int, before: Callable = tuple) -> float:
    """
    Return the median seconds that call() takes, after one warm-up call. `before` is called before
    each call and is not timed. By default, it does nothing.
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
    Return the median microseconds that call(i) takes on the GPU. One CUDA graph contains the calls
    for i in 0 .. number - 1, so that the GPU does not wait for launches. Each call should read its
    own data, so that none of the data is in the L2 cache.
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


def read_bandwidth(device: str) -> float:
    """
    Measure memory read bandwidth, in bytes per second, by summing a tensor that is too large for
    any cache.
    """
    if device == "cpu":
        x = torch.ones(2**26)
        seconds = median_seconds(x.sum, 10)
    else:
        x = torch.ones(2**30, device=device)
        seconds = 1e-6 * graph_us(lambda i: x.sum(), 4)
    return x.nbytes / seconds


def timed(engine: Engine, work: Work, temperature=0.6) -> tuple[float, Answers]:
    """
    Serve requests that are all waiting at the start. Returns how many seconds this took, and the
    answers. Asserts that all prompts were computed and all answers have the right length.
    """
    prompts = [prompt for prompt, _ in work]
    params = [fixed_length(n, temperature, seed=i) for i, (_, n) in enumerate(work)]
    before = engine.counts()["prefill tokens"]
    started = perf_counter()
    answers = engine.generate(prompts, params, progress=False)
    seconds = perf_counter() - started
    computed = engine.counts()["prefill tokens"] - before
    tokens_in, tokens_out = num_tokens(work)
    assert sum(map(len, answers)) == tokens_out, "an answer is incomplete"
    # more tokens are computed after a preemption
    assert computed >= tokens_in, f"{computed} of {tokens_in} prompt tokens were computed"
    return seconds, answers
