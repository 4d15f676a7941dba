"""
Draws the README's pictures, and writes records to look at. Run it by hand when one of them changes.

    python assets/draw.py batching      # one by one, in static batches, continuously
    python assets/draw.py memory        # slabs and blocks: how much fits
    python assets/draw.py phases        # prefill and decode: tokens per second
    python assets/draw.py tables        # two texts, their block tables, and the pool
    python assets/draw.py record NAME   # writes a run as a record: tour or preemption
    python assets/draw.py replay FILE   # draws a record from `serve.py --record`, and counts events
    python assets/draw.py page FILE     # serve.py's page with a record inside, as a single file

Files are written to out/ in the current folder. The README's pictures are in assets/, where
blockmap.png is a replay of preemption.jsonl. Figures are printed as by bench.py.
"""

# ruff: noqa: E402  the root must be on the path before its files are imported
import math
import sys
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean
from time import perf_counter

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from common import announce, end_with_one_line

if __name__ == "__main__":
    end_with_one_line()
    announce("loading torch")

import torch

from assets.commands import main
from assets.records import PoolState, RecordError, open_record, replay
from assets.workloads import (
    DEVICE,
    Work,
    build_model,
    even_workload,
    fixed_length,
    let_decode,
    median_seconds,
    num_tokens,
    offline_workload,
    random_tokens,
)
from engine.engine import Engine
from engine.events import title
from engine.sizing import machine_name
from paged import Request, Scheduler, SchedulerSettings
from params import Settings
from server import live

OUT = Path("out")


def new_figure():
    """Return a figure and its axes. The figure is drawn in memory, so no display is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    return figure, figure.subplots()


def save(figure, name: str) -> dict:
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / name, dpi=110)
    return {"picture": OUT / name}


def write(name: str, text: str) -> dict:
    OUT.mkdir(exist_ok=True)
    (OUT / name).write_text(text, encoding="utf-8")
    return {"file": OUT / name}


# --------------------------------------------------------------------------------------------------
# Continuous batching, blocks, prefill and decode


def draw_batching() -> dict:
    """
    Serve 96 requests that are all waiting at the start, in four ways. Prompts and answers have 12
    to 128 tokens (the offline workload's 100 to 1024, divided by 8). Decoding is greedy, always
    with the same model, engine and kernels, and with KV memory for 4,096 tokens. The requests run
    one by one; in static batches of 16 (each request has a slab of 256 tokens, is padded to the
    longest prompt, and runs until the longest answer ends); continuously, 16 at once; and
    continuously, as many as fit with blocks of 16. Only requested tokens count.
    """
    gpt = build_model("10M")
    work = offline_workload(96, 8, gpt.config.vocab_size)
    rectangles = [padded(work[i : i + 16]) for i in range(0, 96, 16)]
    ways = {  # maximum concurrent requests, and the batches in order
        "one by one": (1, [work]),
        "static batches": (16, rectangles),
        "continuous, 16 at once": (16, [work]),
        "continuous": (64, [work]),
    }
    _, tokens_out = num_tokens(work)
    figure, axes = new_figure()
    result = {}
    for name, (at_once, batches) in ways.items():
        settings = Settings(num_blocks=256, max_num_seqs=at_once, watermark=0.1, prefix_cache=False)
        engine = Engine(gpt, settings)
        ended_times(engine, [work[:at_once]])  # warm-up
        ended = ended_times(engine, batches)
        rate = round(tokens_out / ended[-1])
        result[f"{name}, tok/s"] = rate
        label = f"{name}: {rate} tok/s"
        axes.step([0, *ended], range(97), where="post", label=label)
    axes.set_title("96 requests, the same model, kernels and KV memory")
    axes.set(xlabel="seconds", ylabel="requests ended")
    axes.legend()
    return result | save(figure, "batching.png")


def ended_times(engine: Engine, batches: list[Work]) -> list[float]:
    """Serve the batches in order. Returns how many seconds after the start each request ended."""
    ended = []
    started = perf_counter()
    for batch in batches:
        for i, (prompt, answer) in enumerate(batch):
            engine.add_request(i, prompt, fixed_length(answer))
        while engine.has_work:
            outputs = engine.step()
            now = perf_counter() - started
            ended += [now for output in outputs if output.finish_reason]
    return ended


def padded(batch: Work) -> Work:
    """
    Return the batch as a rectangle: all prompts are as long as the longest prompt, and all answers
    as long as the longest answer.
    """
    longest = max(len(prompt) for prompt, _ in batch)
    answer = max(n for _, n in batch)
    rectangle = []
    for prompt, _ in batch:
        padding = [0] * (longest - len(prompt))
        rectangle.append((padding + prompt, answer))
    return rectangle


SHARES = ("tokens, %", "waste inside, %", "waste outside, %")  # shares of a pool


def draw_memory() -> dict:
    """
    Compare KV memory for 32,768 tokens as slabs for the longest text (2,048 tokens) and as blocks.
    Measure how many of 256 requests (with prompts and answers of 100 to 1024 tokens) run at once
    while others wait, and how much memory is wasted inside (taken, but empty) and outside (free,
    but not enough for the next prompt). A slab is simulated as a block that is as long as the
    longest text.
    """
    pools = {S: fill_pool(S, 32_768) for S in (2048, 128, 64, 32, 16, 8, 4)}
    figure, axes = new_figure()
    ticks = ["slabs of\n2048", *(f"blocks of\n{S}" for S in pools if S < 2048)]
    bottom = 0
    for share in SHARES:
        heights = torch.tensor([pool[share] for pool in pools.values()])
        bars = axes.bar(ticks, heights, bottom=bottom, label=share)
        if share == SHARES[0]:
            counts = [round(pool["at once"]) for pool in pools.values()]
            axes.bar_label(bars, counts, label_type="center", color="w")
        bottom = bottom + heights
    axes.set_title("KV memory while others wait; in white: requests at once")
    axes.legend(loc="lower right")
    return pools | save(figure, "memory.png")


def fill_pool(S: int, capacity: int) -> dict:
    """
    Serve the offline workload with a pool of `capacity` tokens in blocks of S, using the scheduler
    but no model. Returns means over the steps in which a request waits.
    """
    budget = 2**20  # tokens per step, so any prompt fits in one step
    settings = SchedulerSettings(prefix_cache=False)
    scheduler = Scheduler("fcfs", budget, capacity, S, settings=settings)
    for i, (prompt, n) in enumerate(offline_workload()):
        scheduler.add_request(Request(i, prompt, n))
    allocator = scheduler.block_allocator
    crowded = []  # requests, tokens taken and tokens filled, for each step in which a request waits
    while not scheduler.is_done():
        plan = scheduler.plan()
        if scheduler.waiting:
            taken = (allocator.num_blocks - allocator.num_free) * S
            filled = sum(r.num_filled_slots for r in scheduler.running) + plan.num_tokens
            crowded.append((len(scheduler.running), taken, filled))
        scheduler.update(plan, [0] * len(plan.sampled))
    at_once, taken, filled = map(mean, zip(*crowded, strict=True))
    row = {"at once": round(at_once, 1)}
    for name, tokens in zip(SHARES, (filled, taken - filled, capacity - taken), strict=True):
        row[name] = round(100 * tokens / capacity, 1)
    return row


def draw_phases() -> dict:
    """
    Compare prefill and decode for gpt2-124M on a CPU, in tokens per second. Steps either compute a
    whole prompt of 1 to 1,024 tokens, or 1 to 64 decodes with contexts of about 128 tokens.
    """
    gpt = build_model("gpt2-124M")
    settings = Settings(
        num_blocks=1024, max_num_seqs=64, token_budget=1024, prefix_cache=False, overlap=False
    )
    engine = Engine(gpt, settings)
    prompts = {}
    for n in (1, 4, 16, 64, 256, 1024):
        ((prompt, _),) = even_workload(1, n, 1, gpt.config.vocab_size)
        add = partial(engine.add_request, "prompt", prompt, fixed_length(1))
        prompts[n] = round(n / median_seconds(engine.step, 11, add))
    decodes = {}
    for n in (1, 4, 16, 64):
        let_decode(engine, n, 128)
        decodes[n] = round(n / median_seconds(engine.step, 11))
    result = {"a prompt, tok/s": prompts, "decodes, tok/s": decodes}
    figure, axes = new_figure()
    for label, rates in result.items():
        axes.plot(list(rates), list(rates.values()), "o-", label=label)
    axes.set_xscale("log", base=4)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="tokens in the step", yscale="log")
    axes.legend()
    return result | save(figure, "phases.png")


# --------------------------------------------------------------------------------------------------
# Block tables

TABLES = {"a": [7, 2, 9], "b": [7, 4]}  # both texts start with the same 16 tokens
LENGTHS = {"a": 36, "b": 27}  # tokens
TOKEN = 35  # the last token of text a
S = 16
DIAGRAM = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 372" font-family="sans-serif" \
font-size="14">
<style>
svg {{ --page: #ffffff; --ink: #1f2328; --line: #8c959f; --a: #b6d7ff; --b: #ffd8a8; \
--mark: #d1242f }}
@media (prefers-color-scheme: dark) {{
svg {{ --page: #0d1117; --ink: #e6edf3; --line: #7d8590; --a: #1f4f8f; --b: #7a4a12; \
--mark: #ff7b72 }} }}
.page {{ fill: var(--page) }} .empty {{ fill: none }} .a {{ fill: var(--a) }}
.b {{ fill: var(--b) }} rect {{ stroke: var(--line) }} .page, .half {{ stroke: none }}
text {{ fill: var(--ink); text-anchor: middle }} .left {{ text-anchor: start }}
path {{ stroke: var(--ink); stroke-width: 1.5; fill: none; marker-end: url(#tip) }}
#tip path {{ fill: var(--ink); stroke: none }} .mark {{ fill: none; stroke: var(--mark); \
stroke-width: 3 }}
</style>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0 0L8 4L0 8z"/></marker>
<rect class="page" width="800" height="372"/>
{shapes}
</svg>
"""


def draw_tables() -> dict:
    """
    Draw two texts with the same beginning, their block tables, twelve blocks of 16, and a token's
    slot.
    """
    shapes = []
    for block in range(12):
        x = 112 + 56 * block
        shapes.append(box(x, 150, 56, "empty", block))
    # the heights of each table, of its captions, and of the start and end of its arrows
    for name, y, label, start, end in ("a", 44, 36, 88, 148), ("b", 250, 312, 250, 196):
        length = LENGTHS[name]
        shapes.append(caption(14, y + 18, f"text {name}:"))
        shapes.append(caption(14, y + 36, "block table"))
        for logical, block in enumerate(TABLES[name]):
            x = 112 + 150 * logical
            last = min(length, S * (logical + 1)) - 1
            shapes.append(box(x, y, 130, name, block))
            shapes.append(caption(x, label, f"tokens {S * logical} to {last}"))
            middle = 140 + 56 * block
            shapes.append(f'<path d="M{x + 65} {start}L{middle} {end}"/>')
            owners = [other for other in TABLES if block in TABLES[other]]
            height = 44 / len(owners)
            top = 150 + height * owners.index(name)
            shapes.insert(0, rectangle(112 + 56 * block, top, 56, height, f"{name} half"))
    shapes.append(caption(14, 177, "the pool"))
    return write("tables.svg", DIAGRAM.format(shapes="\n".join([*shapes, *slots_of_the_token()])))


def slots_of_the_token() -> list[str]:
    """Return the block that contains `TOKEN`, enlarged at the lower right. Each cell is a slot."""
    logical, offset = divmod(TOKEN, S)
    block = TABLES["a"][logical]
    slot = S * block + offset
    shapes = [f'<path d="M{140 + 56 * block} 194L{140 + 56 * block} 266"/>']
    for i in range(S):
        filled = "a" if i <= offset else "empty"
        shapes.append(rectangle(448 + 20 * i, 268, 20, 26, filled))
    shapes.append(rectangle(448 + 20 * offset, 268, 20, 26, "mark"))
    shapes.append(caption(448, 318, f"block {block}: slots {S * block} to {S * block + S - 1}"))
    rule = f"token {TOKEN}: logical block {logical}, offset {offset}"
    shapes.append(caption(448, 338, rule))
    shapes.append(caption(448, 358, f"its slot: {block} × {S} + {offset} = {slot}"))
    return shapes


def rectangle(x, y, width, height, kind: str) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height:g}"/>'


def box(x, y, width, kind: str, number: int) -> str:
    """Return a cell of the pool or of a block table, with the block's number."""
    text = f'<text x="{x + width // 2}" y="{y + 27}">{number}</text>'
    return rectangle(x, y, width, 44, kind) + text


def caption(x, y, text: str) -> str:
    return f'<text class="left" x="{x}" y="{y}">{text}</text>'


# --------------------------------------------------------------------------------------------------
# Records: runs to look at, and pictures of them

# Each line is a request: the step in which it arrives, then the numbers of tokens from a common
# beginning, of its own tokens, of tokens per answer, and of answers.
TOUR = """\
     0 40 20 32 1
     5 40 12 32 1
    10  0 20 32 3
    17  0 44 32 1
    20  0 90 32 1
"""
PREEMPTION = """\
     0  0  8 29 1
     4 12  7 13 1
     8  0 21 34 1
    12 12  7 30 1
    16  0 11 13 1
    20 12  6 26 1
    24  0 19 34 1
    28 12 11 31 1
    32  0  4 18 1
"""
small = partial(Settings, watermark=0, max_num_seqs=8)
RUNS = {
    "tour": (small(block_size=8, num_blocks=36, token_budget=32), TOUR),
    "preemption": (small(block_size=4, num_blocks=32, token_budget=16), PREEMPTION),
}


def recorded(settings: Settings, table: str) -> list[str]:
    """Return the lines of a run's record. The tokens are random, and are not in the record."""
    engine = Engine(build_model("1M"), settings)
    recorder = engine.stages["record"]
    lines = []
    recorder.listen(lines.append)
    lines.append(recorder.snapshot())
    rng = Random(0)
    beginning = random_tokens(rng, 40, 64)
    requests = [[int(number) for number in row.split()] for row in table.splitlines()]
    last, *_ = requests[-1]
    for step in count():
        for id, (arrival, common, own, answer, n) in enumerate(requests):
            if arrival == step:
                prompt = beginning[:common] + random_tokens(rng, own, 64)
                engine.add_request(id, prompt, fixed_length(answer, 0.8, seed=id), n=n)
        if step > last and not engine.has_work:
            return lines
        engine.step()


def draw_record(name: str) -> dict:
    """
    Write a run as a record to look at: "tour" shows what can happen to requests, and "preemption" a
    pool that is too small. The records in assets/ were made with this command. The tour's captions,
    in its first line, are kept.
    """
    if name not in RUNS:
        raise ValueError(f"{name}: choose {' or '.join(RUNS)}")
    with open_record(ROOT / f"assets/{name}.jsonl") as record:
        _, old = next(replay(record))
    captions = {"tour": old["tour"]} if "tour" in old else {}
    machine = machine_name(DEVICE)
    first = title(name=name, model="random weights", machine=machine, **captions)
    lines = [first, *recorded(*RUNS[name])]
    return write("record.jsonl", "".join(f"{line}\n" for line in lines))


def page_with_record(record: str) -> str:
    """
    Return the page with a record and a policy inside, as a single file that can be hosted anywhere.
    """
    page = live.page()
    policy = live.content_policy(page)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += f'<script type="application/json" id="record">{live.in_script(record)}</script>\n'
    return page.replace("<style>", f"{head}<style>", 1)


def draw_page(file: str) -> dict:
    """Write serve.py's page with a record inside, as a single file that can be hosted anywhere."""
    with open_record(file) as record:
        page = page_with_record(record.read().decode())
    return write("page.html", page)


MAX_COLUMNS = 1000  # maximum number of steps in a picture
MAX_ROWS = 1024  # maximum number of blocks in a picture
MOST_NUMBERED = 16  # with more requests, their numbers would cover the picture
PARTS = 384  # for all blocks together; requests that share a block divide its parts
COUNTED = {
    "requests": "new",
    "preemptions": "preempted",
    "copies": "copies",
    "evictions": "evicted",
}
COLOURS = [f"C{i}" for i in range(10) if i != 7]  # matplotlib's cycle, except C7, which is grey


def draw_replay(file: str) -> dict:
    """
    Show what happened in a record, in numbers and as a picture. Each request has its own colour,
    and is labelled with its number where it begins. Grey is cached and idle, white is free. A block
    that several requests share is split. At most 1024 blocks and 1000 steps are drawn, evenly
    spaced.
    """
    from matplotlib.colors import to_rgb

    record = open_record(file)
    counts = Counter()
    columns = []  # [step][block and part]
    begins = {}  # request number -> its first step, and its last block in that step
    every = 1  # draw one of this many steps
    for state, line in replay(record):
        if line["event"] != "step":
            continue
        for name, field in COUNTED.items():
            counts[name] += len(line.get(field, ()))
        counts["tokens in"] += sum(n for _, _, n in line.get("chunks", ()))
        counts["tokens out"] += line.get("sampled", 0)
        counts["hit tokens"] += sum(hits for _, hits, _ in line.get("admitted", ()))
        counts["steps"] += "step" in line
        for r, table in state.tables.items():
            if table:
                begins.setdefault(r, (counts["steps"], table[-1]))
        if counts["steps"] == every * (len(columns) + 1):
            columns.append([to_rgb(colour) for colour in column_of(state)])
        if len(columns) > MAX_COLUMNS:
            columns = columns[1::2]
            every *= 2
    if not columns:
        raise RecordError("this record has no step to draw, because its engine computed none")
    figure, axes = new_figure()
    image = list(zip(*columns, strict=True))  # [block and part][step]
    size = (0, counts["steps"], 0, state.num_blocks)
    axes.imshow(image, extent=size, aspect="auto", interpolation="nearest", origin="lower")
    if len(begins) <= MOST_NUMBERED:
        for r, (step, block) in begins.items():
            axes.text(step, block + 0.5, r, va="center", color="w", weight="bold")
    axes.set(title="a colour is a request, grey is cached and idle", xlabel="step", ylabel="block")
    return counts | save(figure, "replay.png")


def column_of(state: PoolState) -> list[str]:
    """
    Return the colours of each block's parts: those of the requests that have the block or, if there
    are none, the colour for idle or free blocks. For a large pool, only some blocks are included,
    evenly spaced.
    """
    blocks = range(0, state.num_blocks, math.ceil(state.num_blocks / MAX_ROWS))
    owners = {block: [] for block in blocks}
    for r, table in sorted(state.tables.items()):
        for block in owners.keys() & table:
            owners[block].append(COLOURS[r % len(COLOURS)])
    parts = max(1, PARTS // len(owners))  # number of parts per block
    column = []
    for block, colours in owners.items():
        colours = colours or ["lightgrey" if block in state.idle else "white"]
        column += [colours[part * len(colours) // parts] for part in range(parts)]
    return column


FLAGS = {  # the help for each command argument
    "name": "the run to record: tour or preemption",
    "file": "a record: from serve.py --record, or one in assets/",
}
COMMANDS = {
    "batching": draw_batching,
    "memory": draw_memory,
    "phases": draw_phases,
    "tables": draw_tables,
    "record": draw_record,
    "replay": draw_replay,
    "page": draw_page,
}

if __name__ == "__main__":
    main(__doc__, COMMANDS, FLAGS)
