"""
The output of a training run: its settings, its progress, samples of its model, and at the end how
good the model is, or why it cannot go on. Of several runs: their curves in one picture.

    print(introduce(run))
    print_progress(run, loss, step_seconds)         # after some steps
    generate_text(run)
    report_result(run, nats, count)
    compare(["out/a", "out/b"])                     # -> compare.png
"""

import fcntl
import json
import os
import sys
import textwrap
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from safetensors import SafetensorError

from common import MALFORMED, plural, write_atomically

SAMPLE_TOKENS = 64
TEMPERATURE = 0.6  # at 0.8 a small model stumbles over its rarer choices, at 0.4 it repeats itself

# --------------------------------------------------------------------------------------------------
# Before


def introduce(run) -> str:
    """The settings of a run, a line each."""
    args = run.args
    corpus = run.corpus
    c = run.model.config
    length = plural(args.steps, "step") if args.steps else plural(args.minutes, "minute")
    if run.step:
        length += f", from step {run.step}, {run.share:.0%} done"
    return (
        f"device: {run.process}\n"
        f"model:  {args.init or args.arch}, {run.model.num_weights / 1e6:.2f}M parameters: "
        f"{plural(c.n_layer, 'layer')} of width {c.n_embd}, "
        f"{plural(c.n_head, 'head')}, {c.activation}, context {c.context_length}\n"
        f"data:   {args.data}: {len(corpus.train):,} tokens of {c.vocab_size:,} kinds, "
        f"{len(corpus.val):,} held out\n"
        f"run:    {length}, {args.batch_size} x {args.context_length} tokens a step "
        f"-> {run.out}"
    )


# --------------------------------------------------------------------------------------------------
# Meanwhile


def print_progress(run, loss: float, step_seconds: float):
    """
    Print a line that, on a terminal, the next one overwrites. MFU is the share of the machine's
    arithmetic as PaLM's appendix B counts it: 6 operations a step for each weight and token, and 12
    L H D T a token for attention, as if each saw its whole window.
    """
    process = run.process
    if not (process.is_main and sys.stderr.isatty()):
        return
    args = run.args
    rate = args.batch_size * args.context_length / step_seconds
    line = f"step {run.step}, {run.share:.0%}: loss {loss:.3f}, {rate / 1e3:.1f}k tokens/s"
    if process.peak:
        c = run.model.config
        weights = run.model.num_weights
        operations = 6 * weights + 12 * c.n_layer * c.n_head * c.head_size * run.window()
        line += f", MFU {rate * operations / process.peak / process.world:.0%}"
    seconds = args.steps * step_seconds if args.steps else 60 * args.minutes
    line += f", {seconds * (1 - run.share) / 60:.1f} min left\x1b[K"
    print(line, end="\r", file=sys.stderr, flush=True)


def sample_prompt(run) -> list[int]:
    """
    The tokens that a sample follows. Of dialogues, the first question held out, as the template
    writes it: what is not predicted there. Of texts, the tokenizer's BOS, else its end-of-text
    token, else token 0: of characters, a newline.
    """
    val = run.corpus.val[: run.args.context_length]
    tokenizer = run.corpus.tokenizer
    question = (~val[: (val >= 0).argmax()]).tolist()
    return question or tokenizer.bos or [tokenizer.eos_token_id or 0]


def generate_text(run) -> str:
    """
    A sample: at most SAMPLE_TOKENS, or until the model ends the text. A question stands before it.
    """
    device = run.process.device
    prompt = sample_prompt(run)
    generator = torch.Generator(device).manual_seed(run.args.seed)

    def choose(logits, position):
        probabilities = (logits.float() / TEMPERATURE).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    run.model.eval()
    with run.process.autocast(), run.process.uncompiled():
        tokens = torch.tensor([prompt], device=device)
        [row] = run.model.generate(tokens, SAMPLE_TOKENS, choose).tolist()
    run.model.train()
    ends = run.model.config.eos_token_ids
    answer = takewhile(lambda token: token not in ends, row[len(prompt) :])
    shown = prompt if len(prompt) > 1 else []
    return run.corpus.tokenizer.decode([*shown, *answer])


# --------------------------------------------------------------------------------------------------
# At the end


def report_result(run, nats: float, count: int):
    """
    Log and print how well the last `count` held-out tokens were predicted, `nats` in all; show
    a sample, and draw loss.png. Only the main process prints and writes.
    """
    bits = run.corpus.bits_per_byte(nats, count)
    run.record(step=run.step, val_loss=round(nats / count, 5), bits_per_byte=round(bits, 5))
    if not run.process.is_main:
        return
    run.write_log()
    print(
        f"held out: {count:,} tokens, each scored once, in windows of {run.args.context_length}\n"
        f"val loss: {nats / count:.4f} nats a token"
    )
    print(f"a sample:\n{textwrap.indent(generate_text(run), '    ')}")
    print(f"bits per byte: {bits:.3f}")
    curves = {"training": curve(run.log, "loss"), "held out": curve(run.log, "val_loss")}
    draw(curves, run.out / "loss.png")  # last: for the Makefile, this is what ends a training


def compare(directories: list[str]):
    """Print how far each of these runs is, and draw compare.png. Exits where one has no loss."""
    curves = {}
    for directory in directories:
        path = Path(directory, "log.jsonl")
        try:
            log = [*map(json.loads, path.read_text().splitlines())]
            curves[directory] = points = curve(log, "val_loss")
            print(
                f"{directory}: step {log[-1]['step']}, held-out loss {points[-1][1]}, "
                f"bits per byte {log[-1].get('bits_per_byte', '(at the end)')}"
            )
        except (OSError, *MALFORMED):
            sys.exit(f"{path} has no held-out loss: name directories of runs that were evaluated")
    draw(curves, Path("compare.png"))


def curve(log: list[dict], name: str) -> list[tuple]:
    """(step, value) of each line that has this field."""
    return [(line["step"], line[name]) for line in log if name in line]


def draw(curves: dict[str, list[tuple]], path: Path):
    """Losses by step, each curve under its name, as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, points in curves.items():
        style = "-" if name == "training" else "o-"
        axes.plot(*zip(*points, strict=True), style, lw=0.8, label=name)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    save = partial(figure.savefig, format="png", dpi=120, bbox_inches="tight")
    with exit_if_unwritable(path):
        write_atomically(path, save)


@contextmanager
def exit_if_unwritable(out: Path | str):
    """Exits with a message where a file cannot be written, as on a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError
        sys.exit(
            f"{out} cannot be written ({error}): make room or name another --out; a checkpoint "
            "that was saved before is whole, --resume continues it"
        )


@contextmanager
def only_run_in(out: str):
    """
    Makes the directory, and holds a lock on it until the body, or the process, ends. Exits with a
    message where another run holds it: they would write over each other's checkpoints. Without such
    locks, as on some network file systems, the run goes on. A run that was refused leaves none.
    """
    with exit_if_unwritable(out):
        os.makedirs(out, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)
    try:
        if os.environ.get("RANK", "0") == "0":  # of torchrun's processes the one that writes
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run is writing to {out}: wait until it ends, or name another --out")
    except OSError:
        pass  # no locks here
    try:
        yield
    finally:
        os.close(lock)
        with suppress(OSError):
            os.rmdir(out)  # only if it is empty
