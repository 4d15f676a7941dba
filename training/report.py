"""
What a training run shows: what it chose, how far it is, and at the end how good its model is, or
why it cannot go on.

    print(introduce(run))
    bar = progress_bar(run)
    move_bar(bar, run, losses, tokens_per_second)    # after some steps
    report_result(run, nats, count)
"""

import gzip
import lzma
import math
import shutil
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from tqdm import tqdm

from files import write_atomically
from training.samples import last_samples
from training.sizes import SIZES

# --------------------------------------------------------------------------------------------------
# Before


def introduce(run) -> str:
    """What was chosen and what to expect, a line each."""
    args = run.args
    corpus = run.corpus
    c = run.model.config
    millions = sum(p.numel() for p in run.model.parameters()) / 1e6
    lines = [f"device: {run.process}"]
    if args.size:
        lines.append(f"size:   {args.size} (--size names one of {', '.join(SIZES)})")
    lines += [
        f"model:  {args.arch}, {millions:.2f}M parameters: {c.n_layer} layers of width {c.n_embd}, "
        f"{c.n_head} heads, {c.activation}",
        f"data:   {args.data}: {len(corpus.train):,} tokens of {c.vocab_size:,} kinds, "
        f"{len(corpus.val):,} held out",
        f"run:    {describe_length(run)}, {args.batch_size} x {args.context_length} tokens a step "
        f"-> {run.out}",
    ]
    expected = getattr(args, "expected", None)
    if expected and not args.steps:
        lines.append(f"expect: about {expected:.2f} bits per byte on the held-out text")
    return "\n".join(lines)


def describe_length(run) -> str:
    """How long a run is, and where a resumed one begins."""
    args = run.args
    if args.steps:
        text = f"{args.steps} steps"
    else:
        text = minutes_and_seconds(60 * args.minutes)
        if args.max_minutes > args.minutes:
            latest = minutes_and_seconds(60 * args.max_minutes)
            text += f", up to {latest} if the machine becomes busy"
    if run.step:
        text += f", from step {run.step}, {run.share:.0%} done"
    return text


def minutes_and_seconds(seconds: float) -> str:
    """143.2 is "2 min 23 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# --------------------------------------------------------------------------------------------------
# Meanwhile


def progress_bar(run):
    """tqdm's bar, or None where the output goes to no terminal."""
    if not run.process.leads or not sys.stderr.isatty():
        return None
    return tqdm(total=run.args.steps, initial=run.step, unit="step", dynamic_ncols=True)


def move_bar(bar, run, losses: list, tokens_per_second: float):
    """Move the bar by as many steps as there are losses."""
    if bar is None:
        return
    if run.share > 0:  # the first step of a timed run does not tell how many there will be
        bar.total = round(run.step / run.share)
    rate = tokens_per_second / 1e3
    bar.set_postfix_str(f"loss {losses[-1][0]:.3f}, {rate:.1f}k tokens/s", refresh=False)
    bar.update(len(losses))


# --------------------------------------------------------------------------------------------------
# At the end


def report_result(run, nats: float, count: int):
    """
    Log and print how well the last `count` held-out tokens were predicted, `nats` in all; show
    samples, and draw loss.png.
    """
    data = run.corpus.scored_bytes(count)
    bits = bits_per_byte(nats, data)
    run.record(step=run.step, val_loss=round(nats / count, 5), bits_per_byte=round(bits, 5))
    print(
        f"held out: {count:,} tokens, {len(data):,} bytes, each scored once, in windows of "
        f"{run.args.context_length}"
    )
    print(f"val loss: {nats / count:.4f} nats a token")
    if run.args.sample_tokens > 0:
        print(last_samples(run))
    print(compare_with_compressors(nats, data))
    draw(run.log, run.out / "loss.png")  # last: for the Makefile, this is what ends a training


def bits_per_byte(nats: float, data: bytes) -> float:
    """nats: the loss of all tokens together; data: the bytes that they spell."""
    return nats / math.log(2) / len(data)


def compare_with_compressors(nats: float, data: bytes) -> str:
    """The model's bits per byte beside gzip's and xz's on the same bytes."""
    model = bits_per_byte(nats, data)
    gz = 8 * len(gzip.compress(data, 9)) / len(data)
    xz = 8 * len(lzma.compress(data, preset=9)) / len(data)
    return (
        f"bits per byte: model {model:.3f}, gzip -9 {gz:.3f}, xz -9 {xz:.3f} "
        f"({abs(1 - model / gz):.0%} {'below' if model < gz else 'above'} gzip)"
    )


def draw(log: list[dict], path: Path):
    """The loss curve of the run as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no loss.png: matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, style, label in (("loss", "-", "training"), ("val_loss", "o-", "held out")):
        points = [(line["step"], line[name]) for line in log if name in line]
        axes.plot(*zip(*points, strict=True), style, lw=0.8, label=label)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    save = partial(figure.savefig, format="png", dpi=120, bbox_inches="tight")
    write_atomically(path, save)


# --------------------------------------------------------------------------------------------------
# Where it cannot go on


@contextmanager
def exit_if_unwritable(out: Path):
    """Exits with a message where a file cannot be written, as on a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError
        free = shutil.disk_usage(out).free / 2**20
        sys.exit(
            f"{out} cannot be written ({error}), {free:,.1f} MiB are free there: make room or name "
            "another --out; a checkpoint that was saved before is whole, --resume continues it"
        )
