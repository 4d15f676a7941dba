"""
Takes the measurements behind the figures in README.md and REFERENCE.md.

    python bench.py scheduler     # Python time of plan + update, per step
    python bench.py kernels       # one layer of attention on a GPU: each backend, several block
                                  # sizes, and the floor
    python bench.py engine        # tok/s with a mixed workload, and latency with 1 and 32 requests
    python bench.py equality      # compares greedy answers with and without graphs and overlap, and
                                  # with the dense model
    python bench.py overhead      # where a decode step's time goes, on the device and the host
    python bench.py choices       # decode steps for 256 answers to one prompt, and to 256 prompts
    python bench.py server        # the offline workload over HTTP, with 1, 32 and 256 streams
    python bench.py generate      # compares the engine with Hugging Face's generate and llama.cpp
    python bench.py quality       # bits per byte for held-out text, with fp32 and int8 weights
    python bench.py drafts        # answers with and without --speculate, one at a time
    python bench.py grammar       # answers with and without a JSON schema
    python bench.py train         # train.py's losses and times, using nanoGPT's estimate

Each command is a function in the table at the end of this file. assets/commands.py describes how
commands are called, and assets/workloads.py has the models and the requests. Seeds are fixed,
warm-up is not counted, and times are medians. Nothing else should run on the machine: in each step,
threads wait for each other, so slowing down one of them slows down the whole step.
"""

import gc
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count, pairwise, product
from operator import eq
from pathlib import Path
from random import Random
from statistics import mean, median
from time import perf_counter
from types import SimpleNamespace

from common import (
    SPINS_SERVING,
    SPINS_TRAINING,
    announce,
    collect_garbage_rarely,
    end_with_one_line,
    plural,
)

os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)  # before torch is loaded
if __name__ == "__main__":
    end_with_one_line()
    announce("loading torch")

import torch

import train
from assets import load
from assets.commands import main
from assets.workloads import (
    DEVICE,
    MODELS,
    Answers,
    Work,
    build_model,
    even_workload,
    fixed_length,
    graph_us,
    let_decode,
    median_seconds,
    ms,
    num_tokens,
    offline_workload,
    random_tokens,
    read_bandwidth,
    scale_for,
    timed,
)
from checkpoint import hub_weights, load_checkpoint, load_config, save_checkpoint
from engine.engine import Engine
from engine.sizing import bytes_per_block
from families import FAMILIES, hub_config
from interleaved import flat_batch
from model import GPT
from ops.choice import choose_ops
from paged import KVBlockPool, Plan, Request, Scheduler, SchedulerSettings
from params import SamplingParams, Settings
from tokenizer import load_tokenizer

FLAGS = {  # the help for each command argument
    "model": "a shape in MODELS, such as 10M, gpt2-124M or smollm2-135M (random weights), or a "
    "model directory",
    "quantize": "int8: store the engine's weights as 8-bit integers",
    "deterministic": "run the engine as serve.py --deterministic does",
    "llama": "path of a Python that has llama_cpp, to also measure llama.cpp",
    "vllm": "path of a Python that has vllm, to also measure vLLM",
    "limit": "number of held-out tokens to score",
    "data": "the model's training data: a name in data/, or a folder",
    "streams": "numbers of concurrent requests",
    "repeats": "number of runs for each; the run with the median time counts",
    "recipe": "flags for train.py, in quotes",
    "seeds": "seeds; there is one run for each",
    "goal": "measure the time to this loss, in nats per token",
}

# --------------------------------------------------------------------------------------------------
# Only the scheduler


def bench_scheduler() -> dict:
    """
    Measure how long the scheduler's `plan` and `update` take for a step in which 256 requests
    decode. Blocks hold 16 tokens, prompts have 100 to 1000 tokens, and the prefix cache is on.
    """
    n = 256
    settings = SchedulerSettings(max_num_seqs=n, max_num_partial_prefills=n)
    scheduler = Scheduler("fcfs", n * 1000, n * 2048, block_size=16, settings=settings)
    rng = Random(0)
    for i in range(n):
        prompt = random_tokens(rng, rng.randint(100, 1000), 10_000)
        scheduler.add_request(Request(i, prompt, 10**6))

    def step():
        scheduler.update(scheduler.plan(), range(n))

    step()  # computes all prompts
    return {"a step, ms": ms(median_seconds(step, 500), 4)}


# --------------------------------------------------------------------------------------------------
# Attention, one layer

B = 256  # number of decoding requests
CONTEXT = 1024
SHAPE = MODELS["gpt2-124M"]


def bench_kernels() -> dict:
    """
    Measure one layer of paged attention on a GPU, in microseconds, with bf16, 256 decodes at
    context length 1,024, and 12 heads of size 64. Each backend is measured with 16 tokens per
    block, and ours also with other block sizes. Block tables are permuted. Calls are in a CUDA
    graph, and each uses a different pool from the previous call. The floor, a lower bound, is the
    time it takes to read K and V once.
    """
    if DEVICE == "cpu":
        raise ValueError("kernels are measured on a GPU, and there is none: `generate` is for CPUs")
    bandwidth = read_bandwidth("cuda")
    floor = 1e6 * 4 * B * CONTEXT * SHAPE.n_embd / bandwidth  # K and V in bf16
    result = {"read, GB/s": round(bandwidth / 1e9), "floor, us": round(floor, 1)}
    for backend in ("triton", "torch"):
        us = attention_us(backend=backend)
        result[f"{backend}, us"] = f"{us} ({floor / us:.0%})"
    result["block sizes, us"] = {S: attention_us(S) for S in (1, 4, 8, 16, 32, 64, 128)}
    return result


def attention_us(S=16, backend="triton") -> float:
    """
    Return how many microseconds one layer's attention takes in bf16, over as many pools as fit in
    600 MB, at most 64.
    """
    torch.cuda.empty_cache()
    kv, attend = one_layer(S, backend)
    number = max(2, min(64, 600_000_000 // kv.nbytes))
    pools = [torch.randn_like(kv) for _ in range(number)]
    us = graph_us(lambda i: attend(pools[i]), number)
    return round(us, 1)


def one_layer(S: int, backend: str) -> tuple[torch.Tensor, Callable]:
    """Return a layer's pool, in which the blocks of all requests are permuted, and attend(pool)."""
    H = SHAPE.n_head
    D = SHAPE.head_size
    M = math.ceil(CONTEXT / S)
    plan = Plan()
    for i, table in enumerate(torch.randperm(B * M).view(B, M).tolist()):
        r = Request(i, [0] * CONTEXT, 1, block_table=table)
        r.num_filled_slots = CONTEXT - 1
        plan.decodes.append(r)
    pool = KVBlockPool(B * M, S, 1, H, D, DEVICE, torch.bfloat16)
    kv = pool.kv[0].normal_()
    batch = flat_batch(plan, SimpleNamespace(config=SHAPE), pool)  # no weights are needed
    ops, _ = choose_ops(backend, DEVICE)
    batch.attention_plans = {0: ops.plan_attention(batch, H, kv)}
    q = torch.randn(B, H, D, dtype=torch.bfloat16, device=DEVICE)
    attn = SimpleNamespace(window=0, scale=D**-0.5, softcap=0.0)
    return kv, lambda kv: ops.attend(q, kv, attn, batch)


# --------------------------------------------------------------------------------------------------
# A model on a CPU compared with Hugging Face and llama.cpp, and the cost of smaller weights


FORMATS = {"none": ("F32", 4), "int8": ("Q8_0", 1)}  # llama.cpp's name, and bytes per weight
TURNS = 6  # the first is a warm-up
CASES = ((1, 64, 64), (8, 64, 64), (1, 512, 1))  # requests, tokens in, tokens out


def bench_generate(model="10M", quantize="none", llama="") -> dict:
    """
    Measure 64 tokens in and 64 out, greedy, for one request and for eight concurrent requests, in
    milliseconds per step. If the context is long enough, also measure the time to the first token
    after a prompt of 512 tokens, in milliseconds. The systems are the engine, Hugging Face in fp32
    and, with --llama, llama.cpp in fp32 or Q8_0. They run alternately, under the same conditions,
    with new prompts in each turn. The floor, a lower bound on a step's time, is the time it takes
    to read the weights once.
    """
    gpt = build_model(model)
    # without the prefix cache, all answers are computed in full
    engine = Engine(gpt, Settings(prefix_cache=False, quantize=quantize))
    format, size = FORMATS[quantize]
    systems = {
        "engine": partial(timed, engine, temperature=0),
        "Hugging Face": clocked(hugging_face(gpt)),
    }
    if llama:
        systems["llama.cpp"] = clocked(llama_cpp(gpt, llama, format))
    num_bytes = size * gpt.num_weights
    result = {"floor, ms": ms(num_bytes / read_bandwidth("cpu"))}
    for n, tokens_in, tokens_out in CASES:
        if tokens_in + tokens_out < gpt.config.context_length:
            work = partial(even_workload, n, tokens_in, tokens_out, gpt.config.vocab_size)
            result[f"{n} x {tokens_in} in, {tokens_out} out"] = by_turns(systems, work)
    return result


def by_turns(systems: dict[str, Callable], work_of: Callable) -> dict:
    """
    Measure each system's milliseconds per step (one token for each request), and its output tokens
    per second, including the time for the prompts. Both are medians of five turns after a warm-up
    turn, each with new prompts. Also count how many of the answers are the same as the first
    system's.
    """
    first, *_ = systems
    rates = defaultdict(list)
    answers = defaultdict(list)
    for turn in range(TURNS):
        work = work_of(turn)
        for name, generate in systems.items():
            seconds, texts = generate(work)
            answers[name] += texts
            rates[name].append(sum(map(len, texts)) / seconds)
            print(f"turn {turn}: {name} {rates[name][-1]:.0f} tok/s", file=sys.stderr)
    result = {}
    for name, (_, *values) in rates.items():
        rate = median(values)
        equal = sum(map(eq, answers[name], answers[first]))
        result[name] = {
            "ms": ms(len(work) / rate),
            "tok/s": round(rate),
            "equal answers": f"{equal} of {len(answers[name])}",
        }
    return result


def clocked(generate: Callable) -> Callable:
    """Wrap generate(prompts, n), for answers of equal length, so that it is called like `timed`."""

    def run(work: Work):
        prompts, lengths = zip(*work, strict=True)
        started = perf_counter()
        answers = generate(prompts, lengths[0])
        return perf_counter() - started, answers

    return run


def hugging_face(gpt: GPT) -> Callable:
    """
    Return a function that generates greedy answers to prompts of equal length in transformers, with
    the same weights.
    """
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(gpt, folder)
        transformers = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"do_sample": False, "pad_token_id": None, "eos_token_id": None}

    @torch.inference_mode()
    def generate(prompts: Answers, n: int) -> Answers:
        texts = transformers.generate(torch.tensor(prompts), max_new_tokens=n, **options)
        return texts[:, -n:].tolist()

    return generate


def llama_cpp(gpt: GPT, python: str, format: str) -> Callable:
    """
    Return a function that queries llama.cpp, with the same weights in F32 or Q8_0 (see
    assets/llama.py).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        write_gguf(gpt, path, format)
        _, ask = start(python, "assets/llama.py", path, str(torch.get_num_threads()))
        return ask


def start(*command: str) -> tuple[str, Callable]:
    """
    Start a process that answers each line of JSON with a line. Return its first line, which it
    prints when it is ready, and a function that queries it. If the process ends, this function and
    the returned one raise ValueError with the end of its log.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115  open while the process runs
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    try:
        process = subprocess.Popen(command, text=True, **pipes)
    except OSError as error:
        raise ValueError(f"{error}: give the path of a Python") from error

    def read_line() -> str:
        if line := process.stdout.readline():
            return line
        status = process.wait()
        log.seek(0)
        end = log.read().decode(errors="replace").strip()[-1000:]
        raise ValueError(f"{command[0]} ended with status {status}; its log ends: {end}")

    def ask(*request):
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=process.stdin, flush=True)
        return json.loads(read_line())

    return read_line(), ask


def write_gguf(gpt: GPT, path: str, format: str):
    """
    Write a Llama model in llama.cpp's format, with its matrices in F32 or Q8_0, and without a
    tokenizer. Raises ValueError for other models.
    """
    import gguf

    config = gpt.config
    if hub_config(config)["model_type"] != "llama" or config.rope[0].llama3:
        raise ValueError("--llama needs a Llama model without scaled positions: omit it")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope[0].theta)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.n_layer)
    for name, weight in hub_weights(gpt, FAMILIES["llama"]).items():
        if "q_proj" in name or "k_proj" in name:  # llama.cpp's RoPE rotates neighbours, not halves
            halves = weight.unflatten(0, (-1, 2, config.head_size // 2))
            weight = halves.transpose(1, 2).flatten(0, 2)
        # Q8_0 needs groups of 32
        whole = weight.ndim == 2 and weight.shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType[format if whole else "F32"]
        data = gguf.quantize(weight.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bench_drafts(model="out/stdlib", quantize="none", deterministic=False) -> dict:
    """
    Compare answers with and without drafts (--speculate), one at a time, alternately. There are
    four cases: 16 tokens repeated over and over, greedy; code from paged.py (its bytes if weights
    are random), greedy; the same code at temperature 0.8; and random tokens at temperature 1. The
    figures are milliseconds per token, output tokens per second, how many of the answers are the
    same, and tokens per step with drafts.
    """
    settings = Settings(
        quantize=quantize, deterministic=deterministic, prefix_cache=False, max_num_seqs=8
    )
    gpt = build_model(model, DEVICE)
    engines = {}
    engines["with"] = Engine(gpt, replace(settings, speculate=True))
    engines["without"] = Engine(gpt, settings)
    length = min(256, engines["with"].max_model_len // 2)
    code = Path(__file__).with_name("paged.py").read_bytes()
    if model not in MODELS:
        code = load_tokenizer(model).encode(code.decode())
    V = gpt.config.vocab_size
    code = [token % V for token in code]
    codes = [code[i * length :][:length] for i in range(TURNS)]
    rng = Random(0)
    randoms = [random_tokens(rng, 64, V) for _ in range(TURNS)]
    times = length // 16
    repeated = [times * tokens[:16] for tokens in randoms]
    cases = {
        "repeated, greedy": (repeated, 0.0),
        "code, greedy": (codes, 0.0),
        "code, temperature 0.8": (codes, 0.8),
        "random tokens, temperature 1": (randoms, 1.0),
    }
    return {case: with_and_without(engines, length, *rest) for case, rest in cases.items()}


def with_and_without(
    engines: dict[str, Engine], length: int, prompts: Answers, temperature: float
) -> dict:
    """Measure answers of this length to the prompts, one prompt a turn (see `by_turns`)."""
    speculating = engines["with"]
    before = speculating.num_steps
    systems = {}
    for name, engine in engines.items():
        systems[name] = partial(timed, engine, temperature=temperature)
    row = by_turns(systems, lambda turn: [(prompts[turn], length)])
    steps = speculating.num_steps - before
    return row | {"tokens a step": round(TURNS * length / steps, 2)}


def bench_quality(model="out/stdlib", data="stdlib", limit=50_000, llama="") -> dict:
    """
    Measure bits per byte for held-out text in the model's own tokens (at most --limit tokens), with
    weights in fp32, in int8 and, with --llama, in llama.cpp's Q8_0. Each token except the first is
    scored once, in windows of 500 tokens, or fewer if the context is shorter.
    """
    from training.corpus import load_corpus

    corpus = load_corpus(data, SimpleNamespace(is_main=True, wait=tuple))
    # a token that is not predicted is stored as ~id
    text = corpus.tokenizer.decode([max(id, ~id) for id in corpus.val.tolist()])
    tokenizer = load_tokenizer(model)
    tokens = tokenizer.encode(text)[:limit]
    gpt = load_checkpoint(model)
    T = min(500, gpt.config.context_length - 2)
    windows = [tokens[i : i + T + 1] for i in range(0, len(tokens) - 1, T)]
    bits = math.log(2) * len(tokenizer.decode_bytes(tokens[1:]))
    scorers = {
        "fp32": partial(score, Engine(gpt)),
        "int8": partial(score, Engine(gpt, Settings(quantize="int8"))),
    }
    if llama:
        ask = llama_cpp(gpt, llama, "Q8_0")
        scorers["llama.cpp's Q8_0"] = lambda window: ask([window], 0)
    return {name: round(-sum(map(score, windows)) / bits, 5) for name, score in scorers.items()}


def score(engine: Engine, text: list[int]) -> float:
    """Return the log-probability of a text, in nats, given its first token."""
    engine.add_request(0, text, fixed_length(1), prompt_logprobs=0)
    while engine.has_work:
        for output in engine.step():
            scores = output.prompt_logprobs
    return sum(logprob for logprob, *_ in scores)


# --------------------------------------------------------------------------------------------------
# Grammars

# subject -> fields, each with a string's maximum length, an integer's range, or a list of choices
OBJECTS = {}
OBJECTS["the weather in Paris"] = {"city": 20, "celsius": (-50, 60)}
OBJECTS["the film Alien"] = {"title": 40, "year": (1900, 2030), "rating": ["good", "bad"]}
OBJECTS["a member of the club"] = {"name": 30, "age": (0, 120), "is_guest": [True, False]}
OBJECTS["a cold meal"] = {"mood": ["positive", "negative"], "reason": 60}
OBJECTS["a coffee in New York"] = {"item": 30, "price": (0, 100), "currency": ["USD", "EUR"]}


def schema_of(fields: dict) -> str:
    """Return the JSON schema for a flat object, one of OBJECTS."""
    properties = {}
    for name, values in fields.items():
        match values:
            case int():
                properties[name] = {"type": "string", "maxLength": values}
            case tuple((least, most)):
                properties[name] = {"type": "integer", "minimum": least, "maximum": most}
            case _:
                properties[name] = {"enum": values}
    schema = {"type": "object", "properties": properties, "required": list(fields)}
    return json.dumps(schema | {"additionalProperties": False})


def token_times(engine: Engine, requests: list[tuple]) -> list[list[float]]:
    """
    Return the times at which each request's tokens arrived, in ms. A request is a prompt and its
    SamplingParams.
    """
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(i, prompt, params)
    times = [[] for _ in requests]
    started = perf_counter()
    while engine.has_work:
        outputs = engine.step()
        now = perf_counter() - started
        for output in outputs:
            times[output.id].append(1e3 * now)
    return times


def p99_gap(times: list[list[float]]) -> float:
    """Return the 99th percentile of the times between a request's tokens."""
    pairs = chain.from_iterable(map(pairwise, times))
    gaps = sorted(after - before for before, after in pairs)
    return gaps[len(gaps) * 99 // 100]


def bench_grammar(model="out/stdlib", repeats=5) -> dict:
    """
    Measure 128 answers at temperature 0.7, 32 at a time, each constrained to one of five flat JSON
    schemas. Alternately, measure 128 free answers with the same lengths, and then one free answer
    among constrained ones. The figures are output tokens per second, the gaps between a request's
    tokens in ms (p99), the time for a free request among free and among constrained requests, and
    the fraction of tokens that grammars refused.
    """
    from engine.grammar import Grammars
    from server.text import load_chat

    gpt = load_checkpoint(model)
    tokenizer = load_tokenizer(model)
    chat = load_chat(model, tokenizer)
    engine = Engine(gpt, Settings(max_num_seqs=32))
    grammars = Grammars(model, gpt.config)
    stage = engine.stages["grammar"]
    prompts = []
    for subject, fields in OBJECTS.items():
        names = ", ".join(fields)
        text = f"Describe {subject} in JSON with the fields {names}."
        messages = [{"role": "user", "content": text}]
        prompts.append(chat.encode(messages) if chat else tokenizer.encode(text))
    schemas = list(map(schema_of, OBJECTS.values()))

    def serve(seed: int, lengths: list[int], num_free: int) -> list[list[float]]:
        """
        Serve a request of each length, and return their token times. The first `num_free` requests
        are free.
        """
        requests = []
        for i, length in enumerate(lengths):
            params = SamplingParams(0.7, max_tokens=length, seed=seed + i, ignore_eos=True)
            if i >= num_free:
                grammar = grammars.compile("json", schemas[i % 5])
                params = replace(params, grammar=grammar, ignore_eos=False)
            requests.append((prompts[i % 5], params))
        return token_times(engine, requests)

    rows = defaultdict(list)
    longest = [min(200, engine.max_model_len // 2)] * 128
    serve(0, longest, 1)  # warm-up
    for seed in range(1000, 1000 * (repeats + 1), 1000):
        stage.num_checked = 0
        stage.num_refused = 0
        constrained = serve(seed, longest, 0)
        refused = stage.num_refused / stage.num_checked
        rows["refused"].append(refused)
        lengths = list(map(len, constrained))
        free = serve(seed, lengths, 128)
        mixed = serve(seed, lengths, 1)
        for name, times in ("constrained", constrained), ("free", free):
            seconds = max(chain(*times)) / 1e3
            rate = sum(lengths) / seconds
            rows[f"{name}, tok/s"].append(rate)
            rows[f"{name}, p99 gap"].append(p99_gap(times))
        rows["free among free, ms"].append(free[0][-1])
        rows["free among constrained, ms"].append(mixed[0][-1])
    return {name: round(median(values), 3) for name, values in rows.items()}


# --------------------------------------------------------------------------------------------------
# The engine: speed, equality, and where a step's time goes


def bench_engine(model="gpt2-124M", deterministic=False, vllm="") -> dict:
    """
    Measure the engine's throughput and latency. Throughput is measured offline, with 256 requests
    that arrive together, 100 to 1024 tokens in and 100 to 1024 out, at temperature 0.6, for each of
    three seeds. Latency is measured with 1 and 32 concurrent requests, 512 tokens in and 512 out.
    The model is in bf16 on a GPU, and in fp32 on a CPU. If the model's context is shorter, lengths
    are divided. The numbers of tokens in and out are asserted. With --vllm, measure both engines
    alternately instead, on the same requests, greedily and without prefix caches.
    """
    gpt = build_model(model, DEVICE)
    V = gpt.config.vocab_size
    settings = Settings(deterministic=deterministic)
    if vllm:
        return beside_vllm(gpt, replace(settings, prefix_cache=False), vllm)
    engine = Engine(gpt, settings)
    result = {"engine": engine.statement()}
    timed(engine, even_workload(4, 100, 8, V))  # warm-up
    collect_garbage_rarely()  # as the server's engine does
    for seed in range(3):
        work = offline_workload(256, scale_for(gpt.config), V, seed)
        seconds, _ = timed(engine, work)
        _, tokens_out = num_tokens(work)
        result[f"seed {seed}, output tok/s"] = round(tokens_out / seconds)
    for n in (1, 32):
        result[f"{n} concurrent"] = latency(engine, n)
    return result


def beside_vllm(gpt: GPT, settings: Settings, python: str) -> dict:
    """Measure the engine and vLLM alternately (see assets/vllm_offline.py)."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(gpt, folder)
        versions, ask = start(python, "assets/vllm_offline.py", folder)
    engine = Engine(gpt, settings)  # uses the memory that vLLM leaves free
    collect_garbage_rarely()
    systems = {"engine": partial(timed, engine, temperature=0), "vLLM": lambda work: ask(*work)}
    V = gpt.config.vocab_size
    N = min(512, gpt.config.context_length // 2)
    offline = partial(offline_workload, 256, scale_for(gpt.config), V)
    result = {"vLLM": versions.strip(), "offline": by_turns(systems, offline)}
    for n in (1, 32):
        result[f"{n} concurrent"] = by_turns(systems, partial(even_workload, n, N, N, V))
    return result


def latency(engine: Engine, n: int) -> dict:
    """Return the milliseconds per step when n requests decode, and per token of a whole answer."""
    N = min(512, engine.config.context_length // 2)
    V = engine.config.vocab_size
    prefill, _ = timed(engine, even_workload(n, N, 1, V, seed=n))
    whole, _ = timed(engine, even_workload(n, N, N, V, seed=-n - 1))  # another seed: no prefix hits
    step = (whole - prefill) / (N - 1)
    return {"ms a step": ms(step), "whole, ms a token": ms(whole / N)}


def bench_equality(model="out/stdlib") -> dict:
    """
    Compare a trained model's greedy answers to the offline workload, with lengths divided by 8 or,
    if the model's context is short, by more. Count how many answers change when CUDA graphs and
    overlap are switched on and off. In fp32, also count the tokens that the dense model would not
    choose. It reads each answer, and must choose each token (unless its best two logits are within
    1e-4). In bf16, report the fraction of tokens that are the same as in fp32, position by
    position.
    """
    fp32 = load_checkpoint(model, DEVICE)
    bf16 = load_checkpoint(model, DEVICE, torch.bfloat16)
    scale = max(8, scale_for(fp32.config))
    work = offline_workload(scale=scale, V=fp32.config.vocab_size)
    exact, exact_changes = answers_four_ways(fp32, work)
    rounded, rounded_changes = answers_four_ways(bf16, work)
    wrong = 0
    for (prompt, _), answer in zip(work, exact, strict=True):
        wrong += not_greedy(fp32, prompt, answer)
    equal = list(map(eq, chain(*exact), chain(*rounded)))
    return {
        "tokens": len(equal),
        "fp32, graphs and overlap change": exact_changes,
        "bf16, graphs and overlap change": rounded_changes,
        "fp32, tokens unlike the dense model's": wrong,
        "bf16, share of fp32's tokens": round(mean(equal), 4),
    }


def answers_four_ways(model: GPT, work: Work) -> tuple[Answers, int]:
    """
    Return the greedy answers with graphs and overlap, and how many of the other three ways give
    different answers.
    """
    answers = []
    for graphs, overlap in product((True, False), repeat=2):
        engine = Engine(model, Settings(graphs=graphs, overlap=overlap))
        _, tokens = timed(engine, work, temperature=0)
        answers.append(tokens)
    return answers[0], sum(tokens != answers[0] for tokens in answers)


@torch.inference_mode()
def not_greedy(model: GPT, prompt: list[int], answer: list[int]) -> int:
    """
    Count the tokens in an answer that the dense model would not have chosen, ignoring near ties.
    """
    text = torch.tensor([prompt + answer], device=DEVICE)
    n = len(answer)
    logits, _ = model(text[:, :-1])
    logits = logits[0, -n:].float()  # [n, V]
    chosen = logits[range(n), answer]
    missed = logits.amax(1) - chosen > 1e-4
    return int(missed.sum())


def engine_for_decodes(gpt: GPT, longest: int) -> tuple[Engine, int, int]:
    """
    Return an engine, how many requests can decode in it for 90 steps (65 on a CPU), and the context
    length from which they start (at most `longest`). In these steps, no request ends or is
    preempted.
    """
    n = 256 if DEVICE == "cuda" else 32
    room = 124  # the first request decodes for 29 more steps (57 on a CPU), until the last one does
    context = min(longest, gpt.config.context_length - room)
    num_blocks = n * math.ceil((context + room) / 16)
    return Engine(gpt, Settings(prefix_cache=False, num_blocks=num_blocks)), n, context


def bench_overhead(model="gpt2-124M") -> dict:
    """
    Measure decode steps of 256 requests (32 on a CPU) at context length 900, in milliseconds per
    step. The floor, a lower bound, is the time it takes to read the weights, K and V from memory
    once. On a GPU, also measure how long the host works on a step, how many kernels the step has,
    and where the device's time goes. (A kernel's time counts from the end of the previous kernel.
    With programmatic dependent launch, a kernel may start earlier, but then it waits.)
    """
    steps = 64
    gpt = build_model(model, DEVICE)
    engine, n, context = engine_for_decodes(gpt, 900)
    let_decode(engine, n, context)
    seconds = median_seconds(engine.step, steps)
    weights = sum(weight.nbytes for weight in gpt.parameters())
    kv_bytes = bytes_per_block(gpt, 1) * n * (context + steps / 2)  # halfway
    floor = (weights + kv_bytes) / read_bandwidth(DEVICE)
    row = {"requests": n, "ms a step": ms(seconds), "floor, ms": ms(floor)}
    if DEVICE == "cuda":
        # the device is idle when the step begins, so the host never waits for tokens, neither the
        # previous step's nor, with overlap, those of the step that it launches
        row["host, ms"] = ms(median_seconds(engine.step, 16, torch.cuda.synchronize))
        row |= device_time(engine, 8)
    return row


def bench_choices(model="gpt2-124M") -> dict:
    """
    Measure decode steps of 256 answers (32 on a CPU) without a prefix cache, for 64 tokens after a
    context of 768 (or less, if the model's context is shorter). First, each answer has its own
    prompt. Then all are choices for one prompt, and share its blocks. The figures are output tokens
    per second.
    """
    engine, n, context = engine_for_decodes(build_model(model, DEVICE), 768)
    result = {"answers": n}
    for name, choices in ("prompts", 1), ("choices", n):
        let_decode(engine, n, context, choices)
        seconds = median_seconds(engine.step, 64)
        result[f"{name}, tok/s"] = round(n / seconds)
    return result


KINDS = {  # kind of work -> pattern in the names of its kernels
    "attention": "attention_kernel",
    "linear layers": "(vector|matrix|gate)_kernel|gemm|cutlass|nvjet",
    "norms": "norm_kernel",
    "sampling": "(threshold|gumbel_max)_kernel",
    "store": "store_kv_kernel|norm_rope_store_kernel",
    "rest": "",
}


def kind_of(kernel: str) -> str:
    """Return the first of the KINDS whose pattern matches the kernel's name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel))


def seconds_by_kind(launches: Iterable[tuple]) -> dict[str, float]:
    """
    Return how many seconds each kind of kernel takes. launches: (start, end, name) of each kernel,
    in microseconds, sorted. A kernel's time counts from the end of the previous kernel, because
    while both run, the later kernel waits for the earlier one's data.
    """
    seconds = dict.fromkeys(KINDS, 0.0)
    last_end = 0.0
    for start, end, name in launches:
        start = max(start, last_end)
        last_end = max(end, last_end)
        seconds[kind_of(name)] += 1e-6 * (last_end - start)
    return seconds


def device_time(engine: Engine, steps: int) -> dict:
    """
    Return the number of kernels per step, and how many milliseconds per step the device spends on
    each kind.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()  # earlier work does not count
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA  # other events are host calls
    events = [event for event in profiler.events() if event.device_type == on_device]
    launches = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    row = {"kernels": round(len(launches) / steps)}
    for kind, seconds in seconds_by_kind(launches).items():
        row[kind] = ms(seconds / steps)
    return row


# --------------------------------------------------------------------------------------------------
# The server


def bench_server(model="out/stdlib", streams=(1, 32, 256), repeats=1) -> dict:
    """
    Measure the offline workload over HTTP. For each number of streams, that many requests are first
    sent together. Then the same number, with other prompts, are sent at random times (Poisson), at
    70% of the request rate that was just reached. The clients are separate processes with raw
    sockets (see assets/load.py). The figures are output tokens per second until the last token,
    milliseconds from when a request was due to its first token, and milliseconds between arrivals
    of text. If the model's context is too short, the workload's lengths are divided.
    """
    config = load_config(model)
    seeds = count(1)

    def measure(n: int, rate=0.0) -> dict:
        runs = []
        for _ in range(repeats):
            work = offline_workload(n, scale_for(config), config.vocab_size, next(seeds))
            runs.append(measure_load(address, work, rate))
        return sorted(runs, key=lambda run: run["s"])[repeats // 2]

    result = {}
    with server(model) as address:
        measure_load(address, even_workload(8, 12, 64, config.vocab_size))  # warm-up
        for n in streams:
            row = result[plural(n, "stream")] = measure(n)
            if n > 1:
                rate = 0.7 * n / row["s"]
                result[f"{n} at {rate:.3g}/s"] = measure(n, rate)
    return result


@contextmanager
def server(model: str) -> Iterator[list[str]]:
    """Run serve.py in its own process. Yields its host and port."""
    command = [sys.executable, "serve.py", "--model", model, "--port", "0", "--no-access-log"]
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
    """Send all requests together or, with a rate, at the times of a Poisson process."""
    rng = Random(0)
    delay = 0.0
    requests = []
    for prompt, answer in work:
        delay += rng.expovariate(rate) if rate else 0
        requests.append(load.completion(prompt, answer, delay))
    processes = max(1, 3 * os.cpu_count() // 4)
    rows = load.run_clients(*address, requests, processes)
    return load.summary(rows)


# --------------------------------------------------------------------------------------------------
# Training

ESTIMATES = 20  # estimates of the held-out loss, per run


def bench_train(recipe="--preset shakespeare_char", seeds=(1, 2, 3, 4, 5), goal=1.4655) -> dict:
    """
    Measure runs of train.py, one for each seed. The held-out loss is nanoGPT's estimate, from 200
    batches of random windows, and is measured 20 times per run. Only the time spent in steps
    counts. The first twentieth of a run includes compiling, so the second twentieth's time is used
    instead. Before that, train.py itself is timed from start to end with the first seed, with
    nothing compiled yet. The recipe must set the number of steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = [*recipe.split(), "--overwrite", "--out", f"{folder}/out", "--seed"]
        runs = [train.parse_args([*flags, str(seed)]) for seed in seeds]
        if (runs[0].steps or 0) < ESTIMATES:
            raise ValueError(f"--recipe has too few steps: add --steps, at least {ESTIMATES}")
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        env = os.environ | caches | {"GOMP_SPINCOUNT": SPINS_TRAINING}
        command = [sys.executable, "train.py", *flags, str(seeds[0])]
        began = perf_counter()
        subprocess.run(command, env=env, check=True)
        seconds = perf_counter() - began
    rows = [train_once(run, goal) for run in runs]
    figures = {"whole process, s": round(seconds, 1)}
    for name in rows[0]:
        figures[name] = [row[name] for row in rows]
    return figures


def train_once(args, goal: float) -> dict:
    """Train once. Returns the run's losses and times."""
    gc.collect()  # frees the previous run and its graph
    process = train.init_process(args)
    run = train.Run(args, train.load_corpus(args.data, process), process)
    times = []
    losses = []
    for i in range(1, ESTIMATES + 1):
        began = perf_counter()
        while run.step < args.steps * i // ESTIMATES:
            last = run.update(*run.next_batch())
        last.tolist()  # waits for the device
        times.append(perf_counter() - began)
        losses.append(estimate(run))
    times[0] = times[1]
    at_goal = None
    good = [i for i, loss in enumerate(losses, 1) if loss <= goal]
    if good:
        at_goal = round(sum(times[: good[0]]), 1)
    steps = args.steps / ESTIMATES
    tokens = steps * args.batch_size * args.context_length
    rate = tokens / median(times)
    best = min(losses)
    return {
        "best": round(best, 4),
        "last": round(losses[-1], 4),
        "s to goal": at_goal,
        "s": round(sum(times), 1),
        "ktok/s": round(rate / 1e3, 1),
    }


@torch.no_grad()
def estimate(run: train.Run) -> float:
    """Return nanoGPT's estimate of the held-out loss, in nats per token."""
    process = run.process
    B = run.args.batch_size
    T = run.args.context_length
    text = torch.from_numpy(run.corpus.val.astype("int64"))
    windows = text.unfold(0, T + 1, 1)
    random = torch.Generator().manual_seed(0)
    total = 0.0
    run.model.eval()
    for _ in range(200):
        chosen = torch.randint(len(windows), (B,), generator=random)
        rows = windows[chosen].to(process.device)
        x, y = train.tokens_and_targets(rows)
        with process.autocast(), process.uncompiled():
            _, loss = run.model(x, y, process.ops)
        total += loss
    run.model.train()
    return float(total) / 200


COMMANDS = {
    "scheduler": bench_scheduler,
    "kernels": bench_kernels,
    "engine": bench_engine,
    "equality": bench_equality,
    "overhead": bench_overhead,
    "choices": bench_choices,
    "server": bench_server,
    "generate": bench_generate,
    "quality": bench_quality,
    "drafts": bench_drafts,
    "grammar": bench_grammar,
    "train": bench_train,
}

if __name__ == "__main__":
    main(__doc__, COMMANDS, FLAGS)
