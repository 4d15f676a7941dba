"""
Every number in the README, reproducible: one command each, the conditions first and one line of JSON last.

    python bench.py scheduler     # Python time of plan + update, per step
    python bench.py attention     # the torch path: one layer of a mixed step
    python bench.py generate      # engine against Hugging Face's generate, 1 and 8 requests at once
    python bench.py blockmap      # picture: who owned which block in each step of a mixed run

Each `bench_*` takes the flags and returns its figures; its docstring is the workload and is printed first. Seeds are
fixed, warm-up is not counted, times are medians. Nothing else should run beside them: a second busy process on two
cores makes 100 ms of a token of 1 ms, because threads that wait for each other spin.
"""

import argparse
import inspect
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine import Engine, Runner
from model import GPT, CheckpointError, GPTConfig, load_checkpoint, save_checkpoint
from paged import Plan, Request, Scheduler
from sampling import SamplingParams

# random weights of these shapes; the figures depend on the shape alone
MODELS = {
    "10M": GPTConfig(vocab_size=65, context_length=256, n_layer=6, n_head=6, n_embd=384),
    "gpt2-124M": GPTConfig(),
}


def median_ms(work: Callable, repeats: int, setup: Callable = lambda: ()) -> float:
    """Median milliseconds of work(*setup()), the set-up not counted, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        arguments = setup()
        started = time.perf_counter()
        work(*arguments)
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def read_bandwidth() -> float:
    """Bytes per second at which this machine reads memory, measured as the sum of 256 MB: no step is faster than it."""
    x = torch.ones(2**26)  # too many for any cache
    return x.nbytes / (1e-3 * median_ms(x.sum, 10))


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


def bench_attention(args) -> dict:
    """One layer of store_kv + paged_attention: 31 decodes at context 512 and a chunk of 256 tokens, 6 heads of 64."""
    H, D, S, B, M = 6, 64, 16, 32, 32  # M blocks of S: the 512 tokens of a context
    model = GPT(GPTConfig(vocab_size=65, context_length=M * S, n_layer=1, n_head=H, n_embd=H * D))
    runner = Runner(model, B * M, S, B, "torch")
    kv = runner.pool.kv.normal_()[0]
    tables = torch.randperm(B * M, generator=torch.manual_seed(0)).view(B, M)  # scattered, as after a long run
    requests = [Request(i, [0] * M * S, 1, block_table=table, row=i) for i, table in enumerate(tables.tolist())]
    *decodes, prompt = requests
    for request in decodes:
        request.num_filled_slots = M * S - 1

    def plan():
        for request in requests:
            runner.place(request)  # preparing a step moves the rows on: back to where they were
        return (Plan(decodes=decodes, chunks=[(prompt, 256)]),)

    layout = median_ms(runner.prepare, 20, setup=plan)
    batch = runner.prepare(*plan())
    q, k, v = torch.randn(3, len(batch.tokens), H, D)

    def layer():
        runner.backend.store_kv(k, v, kv, batch)
        runner.backend.paged_attention(q, kv, batch)

    return {
        "goal a layer, ms": 15,
        "a layer, ms": round(median_ms(layer, 50), 2),
        "layout of a step, ms": round(layout, 2),
    }


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
    64 tokens in, 128 out, greedy: milliseconds per token of one request, per step of eight. Engine and Hugging Face in
    turn, so that both see the same machine. The floor is the time to read all weights from memory once.
    """
    torch.manual_seed(0)
    model = GPT(MODELS[args.model]).eval() if args.model in MODELS else load_checkpoint(args.model)
    theirs, rng = hugging_face(model), random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    engine = Engine(model, prefix_cache=False)  # each answer is computed whole
    floor = 1e3 * sum(weight.nbytes for weight in model.parameters()) / read_bandwidth()
    result = {"model": args.model, "floor, ms a step": round(floor, 2)}
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


def bench_blockmap(args) -> dict:
    """
    A mixed run in a small pool: shared prefixes, chunked prefills, growth, preemption. Colours are requests, grey is
    cached and idle, white is free; a block that several requests hold at once is striped by turns.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    counts = engine.counts()
    return {"picture": str(args.out), "preemptions": counts["preemptions"], "hit tokens": counts["hit tokens"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("scheduler", help="Python time of plan + update").set_defaults(run=bench_scheduler)
    commands.add_parser("attention", help="one layer of the torch path").set_defaults(run=bench_attention)
    generate = commands.add_parser("generate", help="engine against Hugging Face's generate")
    generate.add_argument("--model", default="10M", help="10M or gpt2-124M (random weights), or a model directory")
    generate.add_argument("--repeats", type=int, default=5, help="counted runs of each; the median is printed")
    generate.set_defaults(run=bench_generate)
    blockmap = commands.add_parser("blockmap", help="picture of a mixed run")
    blockmap.add_argument("--out", type=Path, default=Path("assets/blockmap.png"), help="where to write the picture")
    blockmap.set_defaults(run=bench_blockmap)
    args = parser.parse_args()
    print(inspect.getdoc(args.run), file=sys.stderr)
    try:
        result = {"bench": args.command} | conditions() | args.run(args)
    except CheckpointError as error:  # a --model that is not there, or broken
        sys.exit(str(error))
    for name, value in result.items():
        print(f"{name:>24}: {value}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
