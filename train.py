"""
Train a small GPT and leave a checkpoint directory that serve.py, transformers and vLLM can open.

    python train.py                              # the Python standard library, 2 min 20 s
    python train.py --preset shakespeare_char    # nanoGPT's Shakespeare -> out/shakespeare_char
    python train.py --resume                     # continue a run that was stopped or killed
    torchrun --nproc_per_node 8 train.py --preset gpt2-124M

It prepares the corpus if that is missing, times a few steps, chooses a size that fits the time
(training/sizes.py) and says what it chose. Ctrl-C saves and stops. Everything random is a function
of (seed, step), so a resumed run sees the losses of an uninterrupted one. Below: knobs, data,
recipe, the run and its loop; `main` sums up. Letters: B sequences a step, T tokens of each.
"""

import json
import math
import os
import signal
import sys
import textwrap
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from commands import SPINS_TRAINING, Help, add_flag, at_least, not_negative, positive

os.environ.setdefault("GOMP_SPINCOUNT", SPINS_TRAINING)  # before torch is loaded

import numpy as np
import torch
import torch.nn.functional as F

from checkpoint import HEAD, save_checkpoint
from files import write_atomically
from model import GPT, GPTConfig
from training.clock import Clock
from training.corpus import Corpus, load_corpus
from training.machine import Process, fit_to_machine, init_process, pick_device
from training.muon import Muon, maps_of
from training.report import exit_if_unwritable, introduce, move_bar, progress_bar, report_result
from training.samples import generate_texts
from training.sizes import ARCHS, SIZES, model_fields

# --------------------------------------------------------------------------------------------------
# Knobs. A flag's default stands in its own line; a preset lists only what it changes, for CPUs and
# for GPUs. The default run on a CPU is one of the sizes in training/sizes.py, a Llama; what was
# tuned and measured with GPT-2 keeps it.

# 11M parameters, the size that nanoGPT trains on Shakespeare
MIDDLE_SIZED = {"n_layer": 6, "n_head": 6, "n_embd": 384, "batch_size": 64, "steps": 1500}
SHAKESPEARE = {"data": "shakespeare_char", "arch": "gpt2"}
SHAKESPEARE_CPU = {"n_layer": 3, "n_embd": 128, "context_length": 128, "batch_size": 16}
# GPT-2 small, with the biases and the activation that OpenAI gave it
GPT2 = {"arch": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "context_length": 1024}
GPT2 |= {"bias": True, "activation": "gelu_new", "data": "stdlib_gpt2", "batch_size": 32}
GPT2 |= {"steps": 2000, "matrix_lr": 0.01, "vector_lr": 1e-3}
PRESETS = {
    "stdlib": {"cpu": {}, "gpu": MIDDLE_SIZED | {"arch": "gpt2", "dropout": 0.1}},
    "shakespeare_char": {
        "cpu": SHAKESPEARE | SHAKESPEARE_CPU,
        "gpu": SHAKESPEARE | MIDDLE_SIZED | {"dropout": 0.2},
    },
    "gpt2-124M": {"cpu": GPT2, "gpu": GPT2},
}
# settings that may differ from the interrupted run when --resume continues it
RESUMABLE = {"out", "preset", "resume", "device", "threads", "compile"}


def build_parser() -> ArgumentParser:
    about = (
        "Train a small GPT. A preset or a size sets some of the flags; those that you give come "
        "before both. The defaults below hold where neither sets a flag."
    )
    parser = ArgumentParser(description=about, allow_abbrev=False, formatter_class=Help)
    with_no = BooleanOptionalAction  # --bias and --no-bias

    flag = partial(add_flag, parser)
    about = "a corpus with a model and a recipe sized for the device"
    flag("--preset", about, "stdlib", choices=PRESETS)
    about = "of the model of preset stdlib; not given: on a CPU, the best that there is time for"
    flag("--size", about, choices=SIZES)
    flag("--out", "directory of the checkpoint; not given: out/PRESET")
    flag("--resume", "continue the run in --out with its own settings", False)
    flag("--overwrite", "start again in an --out that holds a checkpoint, deleting it", False)
    about = "corpus: a folder under data/, prepared if it is not, or a prepared folder"
    flag("--data", about, "stdlib")

    flag = partial(add_flag, parser.add_argument_group("model"))
    about = "family: GPT-2, or Llama of the same size (RMSNorm, rotary positions, SwiGLU)"
    flag("--arch", about, "llama", choices=ARCHS)
    flag("--n_layer", "layers", 4)
    flag("--n_head", "attention heads", 2)
    flag("--n_embd", "width, a multiple of n_head", 256)
    flag("--context_length", "tokens the model sees", 256)
    about = "function in the MLP: gelu_new, gelu, relu, relu2 or silu; not given, Llama's is silu"
    flag("--activation", about, "relu2")
    about = "biases in linear layers and norms, of GPT-2 alone; not given: none"
    flag("--bias", about, False, action=with_no)
    flag("--dropout", "probability of dropout, for corpora that are read many times", 0.0)

    add_recipe_flags(parser.add_argument_group("recipe"))

    flag = partial(add_flag, parser.add_argument_group("watching"))
    flag("--eval_every", "steps between evaluations, samples and checkpoints", 100)
    flag("--eval_tokens", "held-out tokens to score each time; at the end, all of them", 16384)
    flag("--sample_tokens", "tokens of a sample; the last ones are twice as long", 64, at_least(0))

    flag = partial(add_flag, parser.add_argument_group("machine"))
    flag("--device", "cpu, cuda, cuda:1, ...; not given: the first GPU, else the CPU")
    about = "CPU threads; not given: as many as are fastest, at most one a core"
    flag("--threads", about, kind=positive)
    about = "of matrix products; not given: what is faster here"
    flag("--dtype", about, choices=("float32", "bfloat16"))
    flag("--compile", "torch.compile the model; not given: on GPUs only", action=with_no)
    return parser


def add_recipe_flags(group):
    flag = partial(add_flag, group)
    share = at_least(0, float, below=1)
    flag("--minutes", "time of the whole run, if --steps is not given", 2.25)
    about = "the end of a run that goes on for --least_steps; not given: --minutes"
    flag("--max_minutes", about, kind=not_negative)
    flag("--least_steps", "with fewer steps done, a run goes on after --minutes", 1)
    about = "optimizer steps, exactly; not given: as many as there is time for"
    flag("--steps", about, kind=positive)
    flag("--batch_size", "sequences a step, over all devices", 8)
    flag("--matrix_lr", "peak learning rate of Muon, which trains the matrices", 0.02)
    flag("--vector_lr", "peak learning rate of AdamW, which trains embeddings and norms", 4e-3)
    flag("--momentum", "of Muon: the share of its mean gradient that a step keeps", 0.95, share)
    flag(
        "--beta2", "of AdamW: the share of its mean squared gradient that a step keeps", 0.95, share
    )
    flag("--weight_decay", "of Muon, as a share of the learning rate", 0.0)
    flag("--warmup", "steps over which the learning rate rises", 10)
    flag(
        "--decay",
        "last share of the run, over which the learning rate falls to zero",
        0.8,
        at_least(0.001, float),
    )
    flag("--clip", "largest norm of the gradient", 1.0)
    flag(
        "--seed",
        "of initial weights, order of batches, dropout and samples",
        1337,
        at_least(0, below=2**62),
    )


def parse_args(argv: list[str] | None, size: str | None = None) -> Namespace:
    """
    Flags over size over preset over defaults. `size`: a name in SIZES, used where --size is not
    given. Exits with a message on unknown flags and impossible combinations.
    """
    parser = build_parser()
    defaults = vars(parser.parse_args([]))
    # argparse fills in its defaults only where a namespace has nothing
    typed = vars(parser.parse_args(argv, Namespace(**dict.fromkeys(defaults))))
    typed = {name: value for name, value in typed.items() if value is not None}
    args = Namespace(**defaults | typed)
    fixed = sorted(f"--{name}" for name in typed.keys() - RESUMABLE)
    if args.resume and fixed:
        parser.error(
            "--resume continues a run with the settings it began with: leave out "
            f"{', '.join(fixed)}"
        )
    size = args.size or size
    if size and args.preset != "stdlib":
        parser.error(
            f"--size is for the preset stdlib, {args.preset} has one size: leave out --size or "
            "--preset"
        )
    if size:
        settings = SIZES[size].flags() | {"size": size}
    else:
        kind = "cpu" if pick_device(args.device).type == "cpu" else "gpu"
        settings = PRESETS[args.preset][kind]
    if "minutes" in typed:  # exactly these, also where the preset has steps
        settings = settings | {"steps": None, "max_minutes": None}
    arch = (defaults | settings | typed)["arch"]
    if arch == "llama" and args.bias:
        parser.error("--bias: Llama has no biases, leave it out or take --arch gpt2")
    args = Namespace(**defaults | settings | ARCHS[arch] | typed)
    args.out = args.out or f"out/{args.preset}"
    args.max_minutes = args.max_minutes or args.minutes
    return args


# --------------------------------------------------------------------------------------------------
# Data


@dataclass
class Batches:
    """
    The training batch of a step as a function of (seed, step). An epoch cuts the corpus into
    windows of T tokens that do not overlap, from a random offset, and shuffles them: every token
    once an epoch.
    """

    tokens: np.ndarray
    B: int  # sequences a step, over all processes
    T: int  # tokens of each
    seed: int
    epoch: int | None = None  # the one that `starts` is of
    starts: np.ndarray | None = None  # where its windows begin, in their order

    def __post_init__(self):
        self.windows = (len(self.tokens) - 1) // self.T - 1  # one less than fit: for any offset
        if self.windows < 1:
            sys.exit(
                f"{len(self.tokens)} training tokens are too few for windows of {self.T}: lower "
                "context_length"
            )

    def start(self, i: int) -> int:
        """Where the i-th window of the run begins."""
        epoch, i = divmod(i, self.windows)
        if epoch != self.epoch:
            random = np.random.default_rng((self.seed, epoch))
            self.epoch = epoch
            self.starts = random.permutation(self.windows) * self.T + random.integers(self.T)
        return self.starts[i]

    def __call__(self, step: int, process: Process):
        """Tokens and targets (B / world, T) int64: this process's share of the batch."""
        # Windows are numbered from the start of the run, B a step; processes take them in turn.
        first = step * self.B
        mine = range(first + process.rank, first + self.B, process.world)
        starts = [self.start(i) for i in mine]
        windows = np.stack([self.tokens[s : s + self.T + 1] for s in starts])
        rows = torch.from_numpy(windows.astype(np.int64))  # (B / world, T + 1)
        if process.device.type == "cuda":
            # from pinned memory the copy overlaps with what the GPU still computes
            rows = rows.pin_memory().to(process.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]  # the target of a token is the one behind it


# --------------------------------------------------------------------------------------------------
# The recipe


def make_optimizers(model: GPT, args: Namespace, process: Process) -> list:
    """Muon for the matrices inside the blocks; AdamW for vectors and embeddings (also the head)."""
    # Orthogonal updates are for maps from hidden state to hidden state; an embedding is a table.
    matrices = {p: maps for block in model.h for p, maps in maps_of(block).items()}
    rest = [p for p in model.parameters() if p not in matrices]
    betas = (0.9, args.beta2)
    return [
        Muon(
            matrices,
            process.dtype,
            lr=args.matrix_lr,
            momentum=args.momentum,
            weight_decay=args.weight_decay,
        ),
        torch.optim.AdamW(
            rest, args.vector_lr, betas, weight_decay=0.0, fused=process.device.type == "cuda"
        ),
    ]


def learning_rate(step: int, share: float, args: Namespace) -> float:
    """
    Factor (0 to 1) of the peak learning rates: warmup-stable-decay (WSD), linear. `step` counts
    from 0, `share` is how much of the run is done.
    """
    warmup = min(1.0, (step + 1) / args.warmup)
    decay = min(1.0, (1 - share) / args.decay)
    return warmup * decay


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, process: Process, limit: int | None = None):
    """
    Cross-entropy on the held-out text: (nats in all, number of tokens scored). The text is cut into
    windows of T tokens, so that each token is scored once; the first one only where there is an
    end-of-text token to stand before it. `limit`: about so many tokens, in windows spread evenly.
    """
    T = model.config.context_length
    eos = corpus.tokenizer.eos_token_id
    # one long row of tokens, filled up so that it is cut into windows without a rest
    tokens = torch.from_numpy(corpus.val.astype(np.int64))
    if eos is not None:
        tokens = F.pad(tokens, (1, 0), value=eos)
    missing = -(len(tokens) - 1) % T
    tokens = F.pad(tokens, (0, missing), value=-100)  # -100: nothing to be scored
    windows = tokens.unfold(0, T + 1, T)  # (windows, T + 1): each begins with the last one's end
    if limit is not None:
        count = min(len(windows), max(process.world, limit // T))
        windows = windows[torch.linspace(0, len(windows) - 1, count).long()]
    # in float64: the order in which losses are added then hardly matters
    total = torch.zeros(2, dtype=torch.float64, device=process.device)
    model.eval()
    for rows in windows[process.rank :: process.world].split(32):
        rows = rows.to(process.device)  # (32, T + 1)
        targets = rows[:, 1:]
        with process.autocast():
            _, loss = model(rows[:, :-1].clamp(min=0), targets, process.ops)
        scored = (targets >= 0).sum()
        total += torch.stack([loss.double() * scored, scored.double()])
    model.train()
    nats, count = (process.mean(total) * process.world).tolist()
    return nats, round(count)


# --------------------------------------------------------------------------------------------------
# The run


class Run:
    """What is saved and resumed: weights, optimizers, the step, the settings, the log."""

    def __init__(self, args: Namespace, corpus: Corpus, process: Process):
        self.args = args
        self.corpus = corpus
        self.process = process
        self.out = Path(args.out)
        tokenizer = corpus.tokenizer
        eos = tokenizer.eos_token_id
        ends = () if eos is None else (eos,)
        config = GPTConfig(tokenizer.vocab_size, eos_token_ids=ends, **model_fields(args))
        torch.manual_seed(args.seed)
        # weights are drawn on the CPU, so that a seed means the same model on every device
        self.model = GPT(config).to(process.device)
        self.optimizers = make_optimizers(self.model, args, process)
        self.step = 0
        self.share = 0.0  # of the run that is done: of its steps, or of its minutes
        self.saved = 0  # the step of the checkpoint on disk
        self.log = []  # the lines of log.jsonl

    def forward_module(self):
        """The model as training calls it: compiled, averaging gradients over processes."""
        model = torch.compile(self.model) if self.process.compile else self.model
        if self.process.world > 1:
            return torch.nn.parallel.DistributedDataParallel(model)
        return model

    def update(self, module, x, y) -> torch.Tensor:
        """One step on x, y (B, T) int64; counts it. Returns loss, gradient norm (2,) on device."""
        args = self.args
        process = self.process
        # dropout, too, is a function of (seed, step): nothing about randomness has to be saved
        torch.manual_seed(args.seed + self.step * process.world + process.rank)
        with process.autocast():
            _, loss = module(x, y, process.ops)
        loss.backward()
        # a rare batch with a huge gradient would undo many steps
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
        rate = learning_rate(self.step, self.share, args)
        peaks = (args.matrix_lr, args.vector_lr)
        for optimizer, peak in zip(self.optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        if args.steps:
            self.share = self.step / args.steps
        return torch.stack([loss.detach(), norm])

    def record(self, **line):
        """One line of log.jsonl."""
        self.log.append(line)
        if self.process.leads:
            with exit_if_unwritable(self.out), open(self.out / "log.jsonl", "a") as f:
                print(json.dumps(line), file=f)

    def record_steps(self, losses: list, tokens_per_second: float):
        """
        Log the last steps, pairs of loss and gradient norm. Exits where one is not a number: what
        was saved before is good, what would follow is not.
        """
        rate = round(tokens_per_second)
        for i, (loss, norm) in enumerate(losses, self.step - len(losses) + 1):
            if not math.isfinite(loss + norm):
                self.exit_diverged(f"step {i}: loss {loss}, gradient norm {norm}")
            self.record(step=i, loss=round(loss, 5), norm=round(norm, 4), tokens_per_second=rate)

    def exit_diverged(self, found: str):
        kept = "nothing is saved yet"
        if self.saved:
            kept = f"the checkpoint of step {self.saved} is in {self.out}"
        sys.exit(
            f"{found}: stopped, {kept}. Start again with a lower --matrix_lr (now "
            f"{self.args.matrix_lr}) or --vector_lr (now {self.args.vector_lr})"
        )

    def evaluate_and_sample(self) -> str:
        """Evaluate on a part of the held-out text, and sample; what to print about it."""
        nats, count = evaluate(self.model, self.corpus, self.process, self.args.eval_tokens)
        if not math.isfinite(nats):  # a model that cannot be sampled, and is not to be saved
            self.exit_diverged(f"step {self.step}: held-out loss {nats}")
        self.record(step=self.step, val_loss=round(nats / count, 5))
        eos = self.corpus.tokenizer.eos_token_id
        prompt = self.corpus.val[:1].tolist() if eos is None else [eos]
        (text,) = generate_texts(self, [prompt], self.args.sample_tokens)
        return (
            f"step {self.step}, {self.share:.0%} of the run: held-out loss {nats / count:.3f} nats "
            f"a token; a sample:\n{textwrap.indent(text, '    ')}"
        )

    def save(self):
        """
        Write train_state.pt, which --resume reads, then the checkpoint, which everything else
        reads. A kill between the two leaves them of different steps; both load, and `load` writes
        the checkpoint anew.
        """
        if self.process.leads:
            state = {
                "step": self.step,
                "share": self.share,
                "args": vars(self.args),
                "log": self.log,
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            }
            with exit_if_unwritable(self.out):
                write_atomically(self.out / "train_state.pt", partial(torch.save, state))
                save_checkpoint(self.model, self.out)
        self.saved = self.step

    def load(self, state: dict):
        """Go on from what `save` wrote."""
        weights = state["model"]
        weights.setdefault(HEAD, weights["wte.weight"])  # older states lack it
        self.model.load_state_dict(weights)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = self.saved = state["step"]
        self.share = state["share"]
        self.log = state["log"]
        if self.process.leads:
            # after a kill, log.jsonl may be ahead of train_state.pt, and the checkpoint behind it
            lines = "".join(json.dumps(line) + "\n" for line in self.log)
            with exit_if_unwritable(self.out):
                write_atomically(self.out / "log.jsonl", lambda path: path.write_text(lines))
                save_checkpoint(self.model, self.out)


def open_out(args: Namespace) -> dict | None:
    """The state to resume from, None for a new run; or exit. Nothing is deleted yet."""
    out = Path(args.out)
    if args.resume:
        try:
            return torch.load(out / "train_state.pt", map_location="cpu", weights_only=True)
        except FileNotFoundError:
            sys.exit(
                f"nothing to resume in {out}: run without --resume, or name the run with --out"
            )
        except Exception as error:  # a damaged file raises errors of any kind
            sys.exit(
                f"{out / 'train_state.pt'} cannot be read ({error}): start again with --overwrite"
            )
    if (out / "config.json").exists() and not args.overwrite:
        sys.exit(
            f"{out} holds a model: --resume continues it, --overwrite starts again, --out names "
            "another directory"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {out} cannot be made ({error}): name another directory")
    return None


def delete_checkpoint(out: Path):
    """
    Delete the model that --overwrite gives up. Called when the new run can begin, so that a
    mistyped flag costs no model.
    """
    # loss.png tells the Makefile that the training is done, config.json makes a directory a
    # checkpoint: they go first
    for name in ("loss.png", "config.json", "model.safetensors", "train_state.pt", "log.jsonl"):
        (out / name).unlink(missing_ok=True)


def catch_signals() -> list[int]:
    """
    From now on Ctrl-C and SIGTERM are noted in the list returned, for the run to end after its
    step; a second one kills.
    """
    caught: list[int] = []

    def note(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return caught


def train(run: Run, batches: Batches, caught: list[int], started: float) -> bool:
    """
    Step until the run is done (True) or a signal was caught (False), and save. Without --steps the
    clock decides how much is done, counted from `started` (time.perf_counter()): the learning rate
    follows it, so the run ends in time and well, also where something else slows the machine down.
    """
    args = run.args
    process = run.process
    module = run.forward_module()
    bar = progress_bar(run)
    clock = Clock(run, started)
    # To read a loss is to wait for the device: after each step on a CPU, where that is free, else
    # after each tenth.
    stride = 1 if process.device.type == "cpu" else 10
    pending = []
    stop = 0.0
    while run.share < 1 and not stop:
        if not pending:
            began = time.perf_counter()
        x, y = batches(run.step, process)  # (B / world, T)
        pending.append(run.update(module, x, y))
        is_evaluated = run.step % args.eval_every == 0
        if run.step % stride and not is_evaluated and run.share < 1:
            continue
        losses = process.mean(torch.stack(pending)).tolist()  # waits for the device
        pending.clear()
        step_seconds = (time.perf_counter() - began) / len(losses)
        tokens_per_second = args.batch_size * args.context_length / step_seconds
        run.record_steps(losses, tokens_per_second)
        part = clock.part_of_rest(step_seconds)
        stop, part = process.mean_of(bool(caught), part)  # all processes must stop alike
        if not args.steps:  # with --steps, `update` knows the share
            run.share = 1.0 if part == 1 else run.share + (1 - run.share) * part
        move_bar(bar, run, losses, tokens_per_second)
        ends = run.share == 1 or stop
        if is_evaluated and not ends:
            process.print(run.evaluate_and_sample(), bar)
        if is_evaluated or ends:
            run.save()
    if bar is not None:
        bar.close()
    return run.share == 1


def main(argv: list[str] | None = None):
    started = time.perf_counter()  # --minutes begin here: the user waits for the preparation, too
    args = parse_args(argv)
    caught = catch_signals()
    state = open_out(args)
    if state is not None:  # the settings of the interrupted run, but for the machine's
        now = {name: getattr(args, name) for name in RESUMABLE - {"preset"}}
        # states from before there was a choice are of GPT-2
        args = Namespace(**vars(args) | {"arch": "gpt2"} | state["args"] | now)

    # corpus and model
    process = init_process(args)
    try:
        corpus = load_corpus(args.data, process)
        make_run = partial(Run, corpus=corpus)
        args, process = fit_to_machine(args, process, started, make_run, partial(parse_args, argv))
        if args.batch_size % process.world:
            sys.exit(
                f"--batch_size {args.batch_size} does not divide among {process.world} processes: "
                "take a multiple"
            )
        run = Run(args, corpus, process)
        batches = Batches(corpus.train, args.batch_size, args.context_length, args.seed)
    except ValueError as error:  # of the tokenizer or the configuration, and written to be read
        sys.exit(str(error))
    if state is not None:
        run.load(state)
    elif process.leads:
        with exit_if_unwritable(run.out):
            delete_checkpoint(run.out)
            corpus.tokenizer.save(run.out)
    process.print(introduce(run))

    # loop
    begun = started
    if args.resume:  # of its minutes, a resumed run has those left that it had not used
        begun = time.perf_counter() - run.share * 60 * args.minutes
    if train(run, batches, caught, begun):
        # every held-out token once, after the last checkpoint was written
        nats, count = evaluate(run.model, corpus, process)
        if not math.isfinite(nats):
            run.exit_diverged(f"held-out loss {nats}")
        if process.leads:
            report_result(run, nats, count)
    else:
        process.print(
            f"stopped and saved at step {run.step}: `python train.py --resume --out {run.out}` "
            "continues"
        )
    process.print(f"{time.perf_counter() - started:.0f} s in all; checkpoint in {run.out}")
    process.leave()


if __name__ == "__main__":
    main()
