"""
The output of a training run: settings, progress, samples from the model and, at the end, how good
the model is or why the run cannot continue. Also draws the curves of several runs in one picture.

    print(introduce(run))
    print_progress(run, loss, step_seconds)         # every few steps
    generate_text(run)
    report_result(run, nats, count)
    compare(["out/a", "out/b"])                     # -> compare.png
"""

import fcntl
import json
import math
import os
import sys
import textwrap
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from safetensors import SafetensorError

from common import MALFORMED, is_main_process, plural, say, write_atomically

BY_HEART = 0.1  # nats per token by which the held-out loss has to rise to be remarked on
SAMPLE_TOKENS = 64
TEMPERATURE = 0.6  # at 0.8, small models pick too many rare tokens; at 0.4, they repeat themselves

# --------------------------------------------------------------------------------------------------
# Before training


def introduce(run) -> str:
    """Return the settings of a run, one per line."""
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
        f"data:   {args.data}: {len(corpus.train):,} tokens, vocabulary {c.vocab_size:,}, "
        f"{len(corpus.val):,} held out\n"
        f"run:    {length}, {args.batch_size} x {args.context_length} tokens a step "
        f"-> {run.out}"
    )


# --------------------------------------------------------------------------------------------------
# During training


def print_progress(run, loss: float, step_seconds: float):
    """
    Print a line that the next such line overwrites, if stderr is a terminal. MFU is the fraction of
    the machine's arithmetic speed that is used. It is counted as in appendix B of PaLM: for each
    token, 6 operations per weight, plus 12 L H D T for attention, as if each token saw its whole
    window.
    """
    process = run.process
    if not (process.is_main and sys.stderr.isatty()):
        return
    args = run.args
    rate = math.prod(run.batch_shape()) / step_seconds
    line = f"step {run.step}, {run.share:.0%}: loss {loss:.3f}, {rate / 1e3:.1f}k tokens/s"
    if process.peak:
        c = run.model.config
        weights = run.model.num_weights
        operations = 6 * weights + 12 * c.n_layer * c.n_head * c.head_size * run.window()
        used = rate * operations / process.world
        # a CPU may have been busy when its peak was measured
        line += f", MFU {used / max(used, process.peak):.0%}"
    seconds = args.steps * step_seconds if args.steps else 60 * args.minutes
    line += f", {seconds * (1 - run.share) / 60:.1f} min left\x1b[K"
    with suppress(OSError):  # the terminal is gone
        print(line, end="\r", file=sys.stderr, flush=True)


def sample_prompt(run) -> list[int]:
    """
    Return the tokens for a sample to continue. For dialogues, these are the first held-out question
    as the template writes it, that is, the tokens that are not predicted. For texts, return the
    tokenizer's BOS token, otherwise its end-of-text token, otherwise token 0 (a newline in a
    character tokenizer).
    """
    val = run.corpus.val[: run.args.context_length]
    tokenizer = run.corpus.tokenizer
    question = (~val[: (val >= 0).argmax()]).tolist()
    return question or tokenizer.bos or [tokenizer.eos_token_id or 0]


def generate_text(run) -> str:
    """
    Return a sample of at most SAMPLE_TOKENS tokens, which ends earlier if the model ends the text.
    If the prompt is a question, the sample begins with it.
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
# After training


def report_result(run, nats: float, count: int):
    """
    Log and print how well the last `count` held-out tokens were predicted (`nats` is their total
    loss). Also print a sample, and draw loss.png. Only the main process prints and writes files.
    """
    bits = run.corpus.bits_per_byte(nats, count)
    evaluated = curve(run.log, "val_loss")  # during the run, each on the same tokens
    run.record(step=run.step, val_loss=round(nats / count, 5), bits_per_byte=round(bits, 5))
    if not run.process.is_main:
        return
    run.write_log()
    run.process.print(
        f"held out: {count:,} tokens, each scored once, in windows of {run.args.context_length}\n"
        f"val loss: {nats / count:.4f} nats a token"
    )
    run.process.print(f"a sample:\n{textwrap.indent(generate_text(run), '    ')}")
    run.process.print(f"bits per byte: {bits:.3f}")
    losses = [loss for _, loss in evaluated]
    if losses and losses[-1] > min(losses) + BY_HEART:
        run.process.print(
            f"warning: the held-out loss was {min(losses)} and rose to {losses[-1]}, probably "
            f"because the model learnt its {len(run.corpus.train):,} tokens by heart: start again "
            "with more text, fewer --steps or --minutes, --dropout 0.2, or another model (--init)"
        )
    curves = {"training": curve(run.log, "loss"), "held out": curve(run.log, "val_loss")}
    draw(curves, run.out / "loss.png")  # last, because the Makefile waits for this file


def compare(directories: list[str]):
    """
    Print how far each of these runs got, and draw compare.png. Exits if a run has no held-out loss.
    """
    curves = {}
    for directory in directories:
        path = Path(directory, "log.jsonl")
        try:
            log = [*map(json.loads, path.read_text().splitlines())]
            curves[directory] = points = curve(log, "val_loss")
            say(
                f"{directory}: step {log[-1]['step']}, held-out loss {points[-1][1]}, "
                f"bits per byte {log[-1].get('bits_per_byte', '(at the end)')}",
                sys.stdout,
            )
        except OSError as error:
            sys.exit(f"{path}: {error.strerror}; name directories of runs")
        except MALFORMED:
            sys.exit(f"{path} has no held-out loss: name directories of runs that were evaluated")
    draw(curves, Path("compare.png"))


def curve(log: list[dict], name: str) -> list[tuple]:
    """Return (step, value) for each line that has this field."""
    return [(line["step"], line[name]) for line in log if name in line]


def draw(curves: dict[str, list[tuple]], path: Path):
    """Draw a picture of the losses by step, in which each curve has its name."""
    os.environ["MPLBACKEND"] = "agg"  # draws to files; matplotlib refuses to load a misspelt one
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say(f"no {path.name}: matplotlib is not installed", sys.stdout)
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, points in curves.items():
        style = "-" if name == "training" else "o-"
        # bytes that are not UTF-8 have no glyph, $ is for formulas, and _ at the start hides a name
        label = " " + os.fsencode(name).decode(errors="replace").replace("$", r"\$")
        axes.plot(*zip(*points, strict=True), style, lw=0.8, label=label)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    save = partial(figure.savefig, format="png", dpi=120, bbox_inches="tight")
    with exit_if_unwritable(path):
        write_atomically(path, save)


@contextmanager
def exit_if_unwritable(out: Path | str):
    """Exit with a message if a file cannot be written, for example on a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError
        sys.exit(
            f"{out} cannot be written ({error}): free space or choose another --out. If a "
            "checkpoint was saved earlier, it is intact, and --resume continues it"
        )


@contextmanager
def only_run_in(out: str):
    """
    Create the directory, and hold a lock on it until the `with` block or the process ends. Exits
    with a message if another run holds the lock, because the two would overwrite each other's
    checkpoints. If the file system does not support locks, as with some network file systems, the
    run continues without one. At the end, the directory is removed if it is empty.
    """
    with exit_if_unwritable(out):
        os.makedirs(out, exist_ok=True)
        lock = os.open(out, os.O_RDONLY)
    try:
        if is_main_process():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run is writing to {out}: wait until it ends, or choose another --out")
    except OSError:
        pass  # locks are not supported
    try:
        yield
    finally:
        os.close(lock)
        with suppress(OSError):
            os.rmdir(out)  # only if it is empty
