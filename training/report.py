"""
The output of a training run: its settings, its progress, samples of its model, and at the end how
good the model is, or why it cannot go on.

    print(introduce(run))
    bar = progress_bar(run)
    move_bar(bar, run, losses, tokens_per_second)    # after some steps
    generate_texts(run, prompts=[[0]], length=64)
    report_result(run, nats, count)
"""

import gzip
import math
import shutil
import sys
import textwrap
from argparse import Namespace
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from tqdm import tqdm

from common import plural, write_atomically

LAST_SAMPLES = 3
TEMPERATURE = 0.6  # at 0.8 a small model stumbles over its rarer choices, at 0.4 it repeats itself

# --------------------------------------------------------------------------------------------------
# Before


def introduce(run) -> str:
    """The settings of a run, a line each."""
    args = run.args
    corpus = run.corpus
    c = run.model.config
    millions = sum(p.numel() for p in run.model.parameters()) / 1e6
    length = plural(args.steps, "step") if args.steps else f"{args.minutes:g} minutes"
    if run.step:
        length += f", from step {run.step}, {run.share:.0%} done"
    return (
        f"device: {run.process}\n"
        f"model:  {args.arch}, {millions:.2f}M parameters: {plural(c.n_layer, 'layer')} of width "
        f"{c.n_embd}, {plural(c.n_head, 'head')}, {c.activation}, context {c.context_length}\n"
        f"data:   {args.data}: {len(corpus.train):,} tokens of {c.vocab_size:,} kinds, "
        f"{len(corpus.val):,} held out\n"
        f"run:    {length}, {args.batch_size} x {args.context_length} tokens a step "
        f"-> {run.out}"
    )


# --------------------------------------------------------------------------------------------------
# Meanwhile


def progress_bar(run):
    """tqdm's bar, or None where the output goes to no terminal."""
    if not run.process.is_main or not sys.stderr.isatty():
        return None
    return tqdm(total=run.args.steps, initial=run.step, unit="step", dynamic_ncols=True)


def move_bar(bar, run, losses: list, tokens_per_second: float):
    """Move the bar by as many steps as there are losses."""
    if bar is None:
        return
    if run.share > 0:  # the first step of a timed run does not show how many will follow
        bar.total = round(run.step / run.share)
    rate = tokens_per_second / 1e3
    bar.set_postfix_str(f"loss {losses[-1][0]:.3f}, {rate:.1f}k tokens/s", refresh=False)
    bar.update(len(losses))


# --------------------------------------------------------------------------------------------------
# Samples


def generate_texts(run, prompts: list[list[int]], length: int) -> list[str]:
    """
    Continuations of equally long prompts: at most `length` tokens each, or until the model ends
    the text.
    """
    tokenizer = run.corpus.tokenizer
    device = run.process.device
    generator = torch.Generator(device).manual_seed(run.args.seed)

    def choose(logits, position):
        probabilities = (logits.float() / TEMPERATURE).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    run.model.eval()
    with run.process.autocast():
        rows = run.model.generate(torch.tensor(prompts, device=device), length, choose)
    run.model.train()
    texts = []
    for row in rows[:, len(prompts[0]) :].tolist():
        if tokenizer.eos_token_id in row:
            row = row[: row.index(tokenizer.eos_token_id)]
        texts.append(tokenizer.decode(row))
    return texts


def last_samples(run) -> str:
    """Continuations of three places in the held-out text, to be printed."""
    val = run.corpus.val
    prompt, length = sample_lengths(run.args)
    last = max(0, len(val) - prompt - length)
    places = np.linspace(0, last, LAST_SAMPLES).astype(int)
    prompts = [val[i : i + prompt].tolist() for i in places]
    lines = []
    for i, text in enumerate(generate_texts(run, prompts, length), 1):
        _, _, text = text.partition("\n")  # the prompt may have cut the first line
        lines += [f"sample {i}:", textwrap.indent(text.strip("\n"), "    ")]
    return "\n".join(lines)


def sample_lengths(args: Namespace) -> tuple[int, int]:
    """Tokens of the prompt and of the continuation of a last sample; both fit the context."""
    prompt = args.context_length // 4
    return prompt, min(2 * args.sample_tokens, args.context_length - prompt)


def sample_tokens_in_all(args: Namespace) -> float:
    """Tokens that the model reads for the last samples: for each new one, the text so far."""
    prompt, length = sample_lengths(args)
    return LAST_SAMPLES * length * (prompt + length / 2)


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
    gz = 8 * len(gzip.compress(data, 9)) / len(data)
    print(f"bits per byte: model {bits:.3f}, gzip -9 {gz:.3f}")
    draw(run.log, run.out / "loss.png")  # last: for the Makefile, this is what ends a training


def bits_per_byte(nats: float, data: bytes) -> float:
    """nats: the loss of all tokens together; data: the bytes that they spell."""
    return nats / math.log(2) / len(data)


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
# Full disks


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
