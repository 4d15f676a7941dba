"""
Train a small GPT and leave a checkpoint directory that serve.py (and transformers, and vLLM) can
open.

    python train.py                              # the Python standard library -> out/stdlib, 2 min 20 s
    python train.py --preset shakespeare_char    # nanoGPT's Shakespeare -> out/shakespeare_char
    python train.py --resume                     # continue a run that was stopped or killed
    torchrun --nproc_per_node 8 train.py --preset gpt2-124M

It prepares the corpus if that is missing, measures the machine, chooses a size that fits the time
(sizes.py) and says what it chose. Ctrl-C saves and stops. Everything random is a function of (seed,
step), so a resumed run sees the losses of an uninterrupted one.
"""

import argparse
import gzip
import json
import lzma
import math
import os
import runpy
import signal
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from commands import SPINS_TRAINING, Help

os.environ.setdefault("GOMP_SPINCOUNT", SPINS_TRAINING)  # before torch is loaded

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from model import GPT, GPTConfig, save_checkpoint
from tokenizer import Tokenizer, load_tokenizer, read_corpus, write_atomically
from training.samples import TEMPERATURE, last_samples, sample, sample_tokens_in_all
from training.sizes import PROBE, SIZES, choose_size, end_of_run, minutes_and_seconds

ROOT = Path(__file__).resolve().parent

# --------------------------------------------------------------------------------------------------
# Knobs. The argparse line of a knob holds its default; a preset lists only what it changes, for
# CPUs and for GPUs. The default run on a CPU is one of the sizes in sizes.py.

MIDDLE_SIZED = {"n_layer": 6, "n_head": 6, "n_embd": 384, "batch_size": 64, "steps": 1500}
GPT2 = {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "context_length": 1024,
    "bias": True,
    "activation": "gelu_new",
}
GPT2 |= {
    "data": "stdlib_gpt2",
    "batch_size": 32,
    "steps": 2000,
    "matrix_lr": 0.01,
    "vector_lr": 1e-3,
}
PRESETS = {
    "stdlib": {"cpu": {}, "gpu": MIDDLE_SIZED | {"dropout": 0.1}},
    "shakespeare_char": {
        "cpu": {
            "data": "shakespeare_char",
            "n_layer": 3,
            "n_embd": 128,
            "context_length": 128,
            "batch_size": 16,
        },
        "gpu": {"data": "shakespeare_char"} | MIDDLE_SIZED | {"dropout": 0.2},
    },
    "gpt2-124M": {"cpu": GPT2, "gpu": GPT2},
}
PROBE_SECONDS = 0.3  # for each of two or three ways to train: together about a second
CLOSING_SECONDS = (
    4  # what follows the last step and takes no tokens: the compressors, the picture, two saves
)
# what may differ from the interrupted run when --resume continues it
RESUMABLE = {"--out", "--preset", "--resume", "--device", "--threads", "--compile", "--no-compile"}


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    about = "Train a small GPT. A preset or a size sets what it needs, and your flags come before both: the defaults "
    about += "below are of what neither sets."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False, formatter_class=Help)
    switch = argparse.BooleanOptionalAction
    flag = parser.add_argument
    flag(
        "--preset",
        default="stdlib",
        choices=PRESETS,
        help="a corpus with a model and a recipe sized for the device",
    )
    flag(
        "--size",
        choices=SIZES,
        help="of the preset stdlib; not given: on a CPU, the best that there is time for",
    )
    flag("--out", help="directory of the checkpoint; not given: out/PRESET")
    flag("--resume", action="store_true", help="continue the run in --out with its own settings")
    flag(
        "--overwrite",
        action="store_true",
        help="start again in an --out that holds a checkpoint, deleting it",
    )
    flag(
        "--data",
        default="stdlib",
        help="corpus: a folder under data/, prepared if it is not, or a prepared folder",
    )

    flag = parser.add_argument_group("model").add_argument
    flag("--n_layer", type=positive, default=4, help="layers")
    flag("--n_head", type=positive, default=2, help="attention heads")
    flag("--n_embd", type=positive, default=256, help="width, a multiple of n_head")
    flag("--context_length", type=positive, default=256, help="tokens the model sees")
    flag("--activation", default="relu2", help="of the MLP: gelu_new, gelu, relu or relu2")
    flag(
        "--bias",
        action=switch,
        default=False,
        help="biases in linear layers and norms; not given: none",
    )
    flag(
        "--dropout",
        type=float,
        default=0.0,
        help="probability to drop, for corpora that are read many times",
    )

    flag = parser.add_argument_group("recipe").add_argument
    flag(
        "--minutes", type=float, default=2.25, help="time of the whole run, if --steps is not given"
    )
    flag(
        "--max_minutes",
        type=float,
        help="time it may take to reach --least_steps; not given: --minutes",
    )
    flag(
        "--least_steps",
        type=positive,
        default=1,
        help="steps for which a run goes on after --minutes",
    )
    flag(
        "--steps",
        type=positive,
        help="optimizer steps, exactly; not given: as many as there is time for",
    )
    flag("--batch_size", type=positive, default=8, help="sequences a step, over all devices")
    flag(
        "--matrix_lr",
        type=float,
        default=0.02,
        help="peak learning rate of Muon, which trains the matrices",
    )
    flag(
        "--vector_lr",
        type=float,
        default=4e-3,
        help="peak learning rate of AdamW, which trains embeddings and norms",
    )
    flag(
        "--momentum",
        type=float,
        default=0.95,
        help="of Muon: the share of its mean gradient that a step keeps",
    )
    flag(
        "--beta2",
        type=float,
        default=0.95,
        help="of AdamW: the share of its mean squared gradient that a step keeps",
    )
    flag(
        "--weight_decay",
        type=float,
        default=0.0,
        help="of the matrices, as a share of the learning rate",
    )
    flag("--warmup", type=positive, default=10, help="steps over which the learning rate rises")
    flag(
        "--decay",
        type=float,
        default=0.8,
        help="share of the run, at its end, over which it falls to zero",
    )
    flag("--clip", type=float, default=1.0, help="largest norm of the gradient")
    flag(
        "--seed",
        type=int,
        default=1337,
        help="of initial weights, order of batches, dropout and samples",
    )

    flag = parser.add_argument_group("watching").add_argument
    flag(
        "--eval_every",
        type=positive,
        default=100,
        help="steps between evaluations, samples and checkpoints",
    )
    flag(
        "--eval_tokens",
        type=positive,
        default=16384,
        help="held-out tokens of an evaluation but the last",
    )
    flag(
        "--sample_tokens",
        type=int,
        default=64,
        help="length of a sample; the last ones are twice as long",
    )

    flag = parser.add_argument_group("machine").add_argument
    flag("--device", help="cpu, cuda, cuda:1, ...; not given: the first GPU, else the CPU")
    flag(
        "--threads",
        type=positive,
        help="CPU threads; not given: as many as are fastest, at most one a core",
    )
    flag(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of matrix products; not given: what is faster here",
    )
    flag("--compile", action=switch, help="torch.compile the model; not given: on GPUs only")
    return parser


def parse_args(argv: list[str], size: str | None = None) -> argparse.Namespace:
    """
    Flags over size over preset over defaults; `size` is the one chosen where no flag names it.
    Exits with a message on unknown flags and impossible combinations.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    size = args.size or size
    if size and args.preset != "stdlib":
        parser.error(
            f"--size is for the preset stdlib, {args.preset} has one size: leave out --size or --preset"
        )
    kind = "cpu" if size or pick_device(args.device).type == "cpu" else "gpu"
    parser.set_defaults(**PRESETS[args.preset][kind])
    if size:
        parser.set_defaults(size=size, **SIZES[size].flags())
    args = parser.parse_args(argv)
    args.out = args.out or f"out/{args.preset}"
    given = {a.split("=")[0] for a in argv if a.startswith("--")}
    if args.resume and given - RESUMABLE:
        fixed = ", ".join(sorted(given - RESUMABLE))
        parser.error(f"--resume continues a run with the settings it began with: leave out {fixed}")
    if "--minutes" in given and "--steps" not in given:
        args.steps = None  # the user's minutes before the preset's steps
    if args.max_minutes is None or ("--minutes" in given and "--max_minutes" not in given):
        args.max_minutes = args.minutes  # and exactly these
    return args


def pick_device(name: str | None) -> torch.device:
    if name is None:
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@dataclass
class Machine:
    """Where this process computes, and how many others do the same."""

    device: torch.device
    dtype: (
        torch.dtype
    )  # of matrix products; weights, their gradients and the optimizer stay in float32
    compile: bool
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """The one process that prints and writes."""
        return self.rank == 0

    def autocast(self):
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Average over the processes, in place."""
        if self.world > 1:
            dist.all_reduce(x)
            x /= self.world
        return x

    def __str__(self) -> str:
        threads = torch.get_num_threads()
        cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        name = cpu if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        processes = f" x {self.world}" if self.world > 1 else ""
        compiled = ", compiled" if self.compile else ""
        return f"{name}{processes}, {str(self.dtype).removeprefix('torch.')}{compiled}"


def choose_machine(args: argparse.Namespace) -> Machine:
    """Join the other processes of torchrun, and take the device and what the flags say about it."""
    device = pick_device(args.device)
    if device.type == "cpu":
        allowed = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        torch.set_num_threads(args.threads or min(torch.get_num_threads(), allowed))
    else:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        if args.dtype is None:
            args.dtype = (
                "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
            )
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    compiled = device.type == "cuda" if args.compile is None else args.compile
    dtype = getattr(torch, args.dtype or "float32")
    return Machine(device, dtype, compiled, int(os.environ.get("RANK", 0)), world)


# --------------------------------------------------------------------------------------------------
# Data


@dataclass
class Corpus:
    tokenizer: Tokenizer
    train: np.ndarray  # memory-mapped tokens
    val: np.ndarray


def load_corpus(name: str, machine: Machine) -> Corpus:
    """
    The corpus in data/`name`, prepared first if it is not, or in the folder `name`. Exits with what
    there is.
    """
    folder = ROOT / "data" / name
    prepared, recipe = (folder / "meta.json").is_file(), folder / "prepare.py"
    if not prepared and not recipe.is_file():
        there = sorted(path.parent.name for path in ROOT.glob("data/*/prepare.py"))
        sys.exit(
            f"--data {name}: {folder} has neither meta.json nor prepare.py; there is {', '.join(there)}"
        )
    if machine.leads and not prepared:
        runpy.run_path(str(recipe))["prepare"]()
    if machine.world > 1:
        dist.barrier()
    return Corpus(load_tokenizer(folder), read_corpus(folder, "train"), read_corpus(folder, "val"))


class Batches:
    """
    The training batch of a step as a function of (seed, step). An epoch cuts the corpus into
    windows of T tokens that do not overlap, from a random offset, and takes them in random order:
    every token once an epoch.
    """

    def __init__(self, tokens: np.ndarray, batch_size: int, context_length: int, seed: int):
        self.tokens, self.B, self.T, self.seed = tokens, batch_size, context_length, seed
        self.windows = (
            len(tokens) - 1
        ) // self.T - 1  # one less than fit, so that any offset below T does
        if self.windows < 1:
            sys.exit(
                f"{len(tokens)} training tokens are too few for windows of {self.T}: lower context_length"
            )
        self.epoch, self.starts = -1, np.empty(0)

    def start(self, i: int) -> int:
        """Where the i-th window of the run begins."""
        epoch, i = divmod(i, self.windows)
        if epoch != self.epoch:
            random = np.random.default_rng((self.seed, epoch))
            self.epoch = epoch
            self.starts = random.permutation(self.windows) * self.T + random.integers(self.T)
        return self.starts[i]

    def __call__(self, step: int, machine: Machine) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets (B / world, T) int64: this process's share of the batch."""
        mine = range(step * self.B + machine.rank, (step + 1) * self.B, machine.world)
        rows = np.stack([self.tokens[(s := self.start(i)) : s + self.T + 1] for i in mine]).astype(
            np.int64
        )
        rows = torch.from_numpy(rows)
        if machine.device.type == "cuda":
            rows = rows.pin_memory().to(machine.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]


# --------------------------------------------------------------------------------------------------
# Optimizers


class Muon(torch.optim.Optimizer):
    """
    Momentum whose update is made orthogonal (Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon): every direction of a matrix moves equally far, so
    the rare ones are learnt, too. Ours rather than torch's because that one always multiplies in
    bfloat16, which many CPUs only emulate, and takes the matrices one by one.
    """

    def __init__(
        self, parameters, lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ):
        by_shape = {p.shape: [q for q in parameters if q.shape == p.shape] for p in parameters}
        groups = [
            {"params": same} for same in by_shape.values()
        ]  # each is orthogonalized as one batch
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.step_together(**group)

    def step_together(
        self, params: list[torch.Tensor], lr: float, momentum: float, weight_decay: float
    ):
        """Update matrices of one shape (rows, columns), in place."""
        updates = []
        for p in params:
            mean = (
                self.state[p]
                .setdefault("momentum", torch.zeros_like(p))
                .lerp_(p.grad, 1 - momentum)
            )
            updates.append(p.grad.lerp(mean, momentum))  # Nesterov's look ahead
        rows, columns = params[0].shape
        # q, k and v share one matrix but are three maps, each orthogonal on its own
        parts = 3 if rows == 3 * columns else 1
        stacked = torch.stack(updates).view(-1, rows // parts, columns).to(self.dtype)
        scale = lr * max(1, rows / parts / columns) ** 0.5
        for p, update in zip(
            params, orthogonalize(stacked).float().view(-1, rows, columns), strict=True
        ):
            p.mul_(1 - lr * weight_decay).sub_(update, alpha=scale)


def orthogonalize(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """
    Push the singular values of each matrix of x (N, rows, columns) towards 1: five steps of a
    Newton-Schulz iteration with Jordan's quintic, which ends between 0.7 and 1.2, near enough for
    an update.
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT, steps).mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        a = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, a, x, beta=3.4445)
    return x


def make_optimizers(
    model: GPT, args: argparse.Namespace, machine: Machine
) -> list[torch.optim.Optimizer]:
    """
    Muon for the matrices inside the blocks; AdamW for the embeddings (the head is one of them) and
    the vectors.
    """
    inside = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim < 2 or not name.startswith("h.")]
    fused = machine.device.type == "cuda"
    return [
        Muon(inside, args.matrix_lr, args.momentum, args.weight_decay, machine.dtype),
        torch.optim.AdamW(
            others, lr=args.vector_lr, betas=(0.9, args.beta2), weight_decay=0.0, fused=fused
        ),
    ]


def learning_rate(step: int, share: float, args: argparse.Namespace) -> float:
    """
    Part of the peak: a short rise, a plateau, and a straight fall to zero as the share of the run
    done nears 1.
    """
    return min(1.0, (step + 1) / args.warmup) * min(1.0, (1 - share) / args.decay)


# --------------------------------------------------------------------------------------------------
# Looking at the model


@torch.no_grad()
def evaluate(
    model: GPT, corpus: Corpus, machine: Machine, limit: int | None = None
) -> tuple[float, int]:
    """
    (nats, tokens scored) over held-out text, cut into windows of context_length so that each token
    is scored once. The first token is scored too where there is an end-of-text token to start from.
    With `limit`, windows spread evenly.
    """
    T, eos = model.config.context_length, corpus.tokenizer.eos_token_id
    stream = torch.from_numpy(corpus.val.astype(np.int64))
    stream = stream if eos is None else torch.cat([torch.tensor([eos]), stream])
    x, y = stream[:-1], stream[1:]
    x = F.pad(x, (0, -len(x) % T)).view(-1, T)
    y = F.pad(y, (0, -len(y) % T), value=-100).view(-1, T)
    if limit is not None:
        keep = torch.linspace(0, len(x) - 1, min(len(x), max(1, limit // T))).long()
        x, y = x[keep], y[keep]
    total = torch.zeros(2, dtype=torch.float64, device=machine.device)
    model.eval()
    for rows in torch.arange(machine.rank, len(x), machine.world).split(32):
        targets = y[rows].to(machine.device)
        with machine.autocast():
            loss = model(x[rows].to(machine.device), targets)[1]
        scored = (targets >= 0).sum()
        total += torch.stack([loss.double() * scored, scored.double()])
    model.train()
    nats, count = (machine.mean(total) * machine.world).tolist()
    return nats, round(count)


def compare_with_compressors(nats: float, data: bytes) -> str:
    """The model's bits per byte beside gzip's and xz's on the same bytes."""
    ours = nats / math.log(2) / len(data)
    gz = 8 * len(gzip.compress(data, 9)) / len(data)
    xz = 8 * len(lzma.compress(data, preset=9)) / len(data)
    compared = f"{abs(1 - ours / gz):.0%} {'below' if ours < gz else 'above'} gzip"
    return f"bits per byte: model {ours:.3f}, gzip -9 {gz:.3f}, xz -9 {xz:.3f} ({compared})"


def draw(log: list[dict], path: Path):
    """The loss curve of the run as a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no loss.png: matplotlib is not installed")
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, style, label in (("loss", "-", "training"), ("val_loss", "o-", "held out")):
        points = [(line["step"], line[name]) for line in log if name in line]
        axes.plot(*zip(*points, strict=True), style, lw=0.8, label=label)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    write_atomically(
        path, lambda path: figure.savefig(path, format="png", dpi=120, bbox_inches="tight")
    )


def progress_bar(run: "Run"):
    """
    tqdm's bar, or None where tqdm is not installed or nobody looks; evaluations print lines anyway.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return print("no progress bar: tqdm is not installed")
    looked_at = run.machine.leads and sys.stderr.isatty()
    return (
        tqdm(total=run.args.steps, initial=run.step, unit="step", dynamic_ncols=True)
        if looked_at
        else None
    )


def tell(text: str, machine: "Machine", bar=None):
    """Print from one process, above the bar if there is one."""
    if machine.leads:
        print(text, flush=True) if bar is None else bar.write(text)


# --------------------------------------------------------------------------------------------------
# The run


def fit_to_machine(
    args: argparse.Namespace, argv: list[str], corpus: Corpus, machine: Machine, started: float
):
    """
    Choose what the flags leave open on a CPU, by training steps that are timed: how many threads,
    the dtype, the size. Sets the threads; returns the arguments and the machine. `started`:
    time.monotonic() when --minutes began.
    """
    size_is_open = args.preset == "stdlib" and args.size is None and not args.resume
    threads = torch.get_num_threads()
    threads_are_open = args.threads is None and threads > 1
    if machine.device.type != "cpu" or not (size_is_open or threads_are_open or args.dtype is None):
        return args, machine
    # where another process keeps a core busy, a thread less is faster: each step waits for its
    # slowest thread
    counts = [threads, threads - 1] if threads_are_open else [threads]
    dtype = args.dtype or "float32"
    seconds = {(dtype, n): time_step(args, corpus, machine, dtype, n) for n in counts}
    if (
        args.dtype is None
    ):  # depends on the CPU's instructions (AVX512-BF16, AMX, SVE): emulation is slow
        _, fastest = min(seconds, key=seconds.get)
        to_beat = min(seconds.values())
        seconds["bfloat16", fastest] = time_step(
            args, corpus, machine, "bfloat16", fastest, to_beat
        )
    best = min(seconds, key=seconds.get)
    # the evaluations and the samples take as long as some twenty steps
    step_seconds = seconds[best]
    elapsed = machine.mean(
        torch.tensor(time.monotonic() - started, dtype=torch.float64)
    ).item()  # all choose alike
    seconds_left = 60 * args.minutes - elapsed - CLOSING_SECONDS - 20 * step_seconds
    if size_is_open:
        args = parse_args(argv, choose_size(step_seconds, seconds_left))
    if args.size and not args.resume:
        size = SIZES[args.size]
        args.expected = size.expected(seconds_left / (size.cost * step_seconds))
    args.dtype, threads = best
    torch.set_num_threads(threads)
    return args, replace(machine, dtype=getattr(torch, args.dtype))


def time_step(
    args: argparse.Namespace,
    corpus: Corpus,
    machine: Machine,
    dtype: str,
    threads: int,
    to_beat: float = math.inf,
) -> float:
    """
    Seconds of a training step of the probe, the mean over processes: the median of those in
    PROBE_SECONDS. A first step that takes three times as long as what is `to_beat` decides alone.
    """
    torch.set_num_threads(threads)
    args = argparse.Namespace(**vars(args) | SIZES[PROBE].flags())
    run = Run(args, corpus, replace(machine, dtype=getattr(torch, dtype)))
    tokens = torch.randint(corpus.tokenizer.vocab_size, (2, args.batch_size, args.context_length))
    began = time.perf_counter()
    run.update(run.model, *tokens)
    first = time.perf_counter() - began
    seconds = [first] if first > 3 * to_beat else []  # else it only warms up: it also allocates
    while sum(seconds) < PROBE_SECONDS:
        began = time.perf_counter()
        run.update(run.model, *tokens)
        seconds.append(time.perf_counter() - began)
    return machine.mean(torch.tensor(median(seconds), dtype=torch.float64)).item()


class Run:
    """
    What is saved and resumed: weights, optimizers, the step, and the settings that make the rest
    repeatable.
    """

    def __init__(self, args: argparse.Namespace, corpus: Corpus, machine: Machine):
        self.args, self.corpus, self.machine, self.out = args, corpus, machine, Path(args.out)
        tokenizer = corpus.tokenizer
        shape = {
            name: value
            for name, value in vars(args).items()
            if name in GPTConfig.__dataclass_fields__
        }
        torch.manual_seed(args.seed)
        self.model = GPT(
            GPTConfig(tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id, **shape)
        )
        self.model.to(machine.device)
        self.optimizers = make_optimizers(self.model, args, machine)
        self.peaks = [group["lr"] for group in self.groups()]
        self.step = 0
        self.share = 0.0  # of the run that is done: of its steps, or of its minutes
        self.saved = 0  # the step of the checkpoint on disk
        self.log: list[dict] = []

    def groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def forward_module(self) -> torch.nn.Module:
        """The model as training calls it: compiled, averaging gradients over processes."""
        model = torch.compile(self.model) if self.machine.compile else self.model
        return torch.nn.parallel.DistributedDataParallel(model) if self.machine.world > 1 else model

    def update(self, module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """
        One optimizer step on x, y (B, T) int64; the loss and the norm of the gradient (2,), still
        on the device.
        """
        # dropout, too, is a function of (seed, step): nothing about randomness has to be saved
        torch.manual_seed(self.args.seed + self.step * self.machine.world + self.machine.rank)
        with self.machine.autocast():
            loss = module(x, y)[1]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        for group, peak in zip(self.groups(), self.peaks, strict=True):
            group["lr"] = peak * learning_rate(self.step, self.share, self.args)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        if self.args.steps:
            self.share = self.step / self.args.steps
        return torch.stack([loss.detach(), norm])

    def check_finite(self, losses: list[list[float]]):
        """
        Exit if a loss or a gradient is not a number: what was saved before is good, what would
        follow is not.
        """
        for i, (loss, norm) in enumerate(losses, self.step - len(losses) + 1):
            if not math.isfinite(loss + norm):
                kept = (
                    f"the checkpoint of step {self.saved} is in {self.out}"
                    if self.saved
                    else "nothing is saved yet"
                )
                sys.exit(
                    f"step {i}: loss {loss}, gradient norm {norm}: stopped, {kept}. Start again with a lower "
                    f"--matrix_lr (now {self.args.matrix_lr}) or --vector_lr (now {self.args.vector_lr})"
                )

    def record(self, **line):
        """One line of log.jsonl."""
        self.log.append(line)
        if self.machine.leads:
            with open(self.out / "log.jsonl", "a") as f:
                f.write(json.dumps(line) + "\n")

    def look(self) -> str:
        """Evaluate on a part of the held-out text, and sample; what to print about it."""
        nats, count = evaluate(self.model, self.corpus, self.machine, self.args.eval_tokens)
        self.record(step=self.step, val_loss=round(nats / count, 5))
        eos = self.corpus.tokenizer.eos_token_id
        start = self.corpus.val[:1].tolist() if eos is None else [eos]
        (text,) = sample(self, [start], self.args.sample_tokens, TEMPERATURE)
        done = f"step {self.step}, {self.share:.0%} of the run"
        return (
            f"{done}: held-out loss {nats / count:.3f} nats a token; a sample:\n"
            + textwrap.indent(text, "    ")
        )

    def save(self):
        """
        Write train_state.pt, then the checkpoint for everybody else. Resuming reads train_state.pt
        alone, so both load if a kill between them leaves them of different steps; resuming then
        writes the later checkpoint.
        """
        if self.machine.leads:
            state = {
                "step": self.step,
                "share": self.share,
                "args": vars(self.args),
                "log": self.log,
            }
            state |= {
                "model": self.model.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
            }
            write_atomically(self.out / "train_state.pt", lambda path: torch.save(state, path))
            save_checkpoint(self.model, self.out)
        self.saved = self.step

    def load(self, state: dict):
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = self.saved = state["step"]
        self.share, self.log = state["share"], state["log"]
        # after a kill, log.jsonl may be ahead of train_state.pt, and the checkpoint behind it
        lines = "".join(json.dumps(line) + "\n" for line in self.log)
        if self.machine.leads:
            write_atomically(self.out / "log.jsonl", lambda path: path.write_text(lines))
            save_checkpoint(self.model, self.out)


def open_out(args: argparse.Namespace) -> dict | None:
    """
    The state to resume from, or None for a new run. Exits with what to change; nothing is deleted
    yet.
    """
    out = Path(args.out)
    if args.resume:
        try:
            return torch.load(out / "train_state.pt", map_location="cpu", weights_only=True)
        except FileNotFoundError:
            sys.exit(
                f"nothing to resume in {out}: run without --resume, or name the run with --out"
            )
        except Exception as error:  # a damaged file raises what it likes
            sys.exit(
                f"{out / 'train_state.pt'} cannot be read ({error}): start again with --overwrite"
            )
    if (out / "config.json").exists() and not args.overwrite:
        sys.exit(
            f"{out} holds a model: --resume continues it, --overwrite starts again, --out names another directory"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {out} cannot be made ({error}): name another directory")
    return None


def delete_checkpoint(out: Path):
    """
    Delete the model that --overwrite gives up: once the new run can begin, so that a mistyped flag
    costs none.
    """
    # loss.png tells the Makefile that the training is done, config.json makes a directory a
    # checkpoint: they go first
    for name in ("loss.png", "config.json", "model.safetensors", "train_state.pt", "log.jsonl"):
        (out / name).unlink(missing_ok=True)


def catch_signals() -> list[int]:
    """
    Ctrl-C and SIGTERM are noted in the list returned, and the run ends after its step; a second one
    kills.
    """
    caught: list[int] = []

    def note(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return caught


def closing_seconds(run: Run, step_seconds: float) -> float:
    """
    What comes after the last step: scoring the held-out text, the last samples, the compressors,
    the picture.
    """
    args = run.args
    forward_tokens = len(run.corpus.val) + sample_tokens_in_all(args)
    # of the 6 operations a weight takes part in per token, 2 are the forward pass; some more for
    # what is no matrix
    return (
        0.4 * step_seconds / (args.batch_size * args.context_length) * forward_tokens
        + CLOSING_SECONDS
    )


def share_of_rest(run: Run, elapsed: float, spent: float, step_seconds: float) -> float:
    """
    The part of what was left of the run that its last `spent` seconds were, by the clock: 1 when
    time is up. `elapsed`: seconds since its start.
    """
    closing = closing_seconds(run, step_seconds)
    steps_left = run.args.least_steps - run.step
    planned = 60 * run.args.minutes - closing
    latest = 60 * run.args.max_minutes - closing
    left = end_of_run(elapsed, steps_left, step_seconds, planned, latest) - elapsed
    return spent / (spent + left) if left > 0 else 1.0


def train(run: Run, batches: Batches, caught: list[int], started: float) -> bool:
    """
    Step until the run is done (True) or a signal was caught (False), and save. Without --steps the
    clock decides how much is done, counted from `started` (time.monotonic): the learning rate
    follows it, so the run ends in time and well, also where something else slows the machine down.
    """
    args, machine, bar = run.args, run.machine, progress_bar(run)
    module = run.forward_module()
    # To read a loss is to wait for the device: after each step on a CPU, where that is free, else
    # after each tenth.
    stride = 1 if machine.device.type == "cpu" else 10
    pending, seconds, mark = [], [], time.perf_counter()
    clock, stop = time.monotonic(), 0.0
    while run.share < 1 and not stop:
        pending.append(run.update(module, *batches(run.step, machine)))
        look = run.step % args.eval_every == 0
        if run.step % stride and not look and run.share < 1:
            continue
        losses = machine.mean(torch.stack(pending)).tolist()
        run.check_finite(losses)
        seconds = [*seconds[-20:], (time.perf_counter() - mark) / len(losses)]
        now = time.monotonic()
        # the first step allocates, or compiles: it tells nothing of how long the others take
        known = seconds[1:]
        part = share_of_rest(run, now - started, now - clock, median(known)) if known else 0.0
        clock = now
        # all processes must stop alike
        status = torch.tensor([float(bool(caught)), part], dtype=torch.float64)
        stop, part = machine.mean(status.to(machine.device)).tolist()
        if not args.steps:
            run.share = 1.0 if part == 1 else run.share + (1 - run.share) * part
        rate = args.batch_size * args.context_length / seconds[-1]
        for i, (loss, norm) in enumerate(losses, run.step - len(losses) + 1):
            run.record(
                step=i, loss=round(loss, 5), norm=round(norm, 4), tokens_per_second=round(rate)
            )
        if bar is not None:
            if (
                run.share > 0
            ):  # the first step of a timed run tells nothing of how many there will be
                bar.total = round(run.step / run.share)
            bar.set_postfix_str(
                f"loss {losses[-1][0]:.3f}, {rate / 1e3:.1f}k tokens/s", refresh=False
            )
            bar.update(len(losses))
        if look and run.share < 1 and not stop:
            tell(run.look(), machine, bar)
        if look or run.share == 1 or stop:
            run.save()
        pending, mark = [], time.perf_counter()
    if bar is not None:
        bar.close()
    return run.share == 1


def finish(run: Run):
    """Score every held-out token once and say how good that is."""
    nats, count = evaluate(run.model, run.corpus, run.machine)
    if not run.machine.leads:
        return
    # where the first token could not be scored, its bytes do not count either
    data = run.corpus.tokenizer.decode_bytes(run.corpus.val[-count:].tolist())
    run.record(
        step=run.step,
        val_loss=round(nats / count, 5),
        bits_per_byte=round(nats / math.log(2) / len(data), 5),
    )
    T = run.args.context_length
    print(f"held out: {count:,} tokens, {len(data):,} bytes, each scored once, in windows of {T}")
    print(f"val loss: {nats / count:.4f} nats a token")
    if run.args.sample_tokens > 0:
        print(last_samples(run))
    print(compare_with_compressors(nats, data))
    draw(run.log, run.out / "loss.png")  # last: for the Makefile, this is what ends a training


def introduce(run: Run) -> str:
    """What was chosen and what to expect, to be printed."""
    args, c, corpus = run.args, run.model.config, run.corpus
    millions = sum(p.numel() for p in run.model.parameters()) / 1e6
    lines = [f"device: {run.machine}"]
    if args.size:
        lines.append(f"size:   {args.size} (--size names one of {', '.join(SIZES)})")
    lines += [
        f"model:  {millions:.2f}M parameters: {c.n_layer} layers of width {c.n_embd}, {c.n_head} heads, {c.activation}",
        f"data:   {args.data}: {len(corpus.train):,} tokens of {c.vocab_size:,} kinds, {len(corpus.val):,} held out",
        f"run:    {describe_length(run)}, {args.batch_size} x {args.context_length} tokens a step -> {run.out}",
    ]
    expected = getattr(args, "expected", None)
    if expected and not args.steps:
        lines.append(f"expect: about {expected:.2f} bits per byte on the held-out text")
    return "\n".join(lines)


def describe_length(run: Run) -> str:
    """How long a run is, and where a resumed one begins."""
    args = run.args
    text = f"{args.steps} steps" if args.steps else minutes_and_seconds(60 * args.minutes)
    if not args.steps and args.max_minutes > args.minutes:
        text += f", up to {minutes_and_seconds(60 * args.max_minutes)} if the machine becomes busy"
    if run.step:
        text += f", from step {run.step}, {run.share:.0%} done"
    return text


def main(argv: list[str] | None = None):
    started = (
        time.monotonic()
    )  # --minutes counts from here: what the user waits for includes the preparation
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    caught = catch_signals()
    state = open_out(args)
    if state is not None:
        chosen = {
            name: getattr(args, name) for name in ("out", "resume", "device", "threads", "compile")
        }
        args = argparse.Namespace(**vars(args) | state["args"] | chosen)
    machine = choose_machine(args)
    try:
        corpus = load_corpus(args.data, machine)
        args, machine = fit_to_machine(args, argv, corpus, machine, started)
        if args.batch_size % machine.world:
            sys.exit(
                f"--batch_size {args.batch_size} does not divide among {machine.world} processes: take a multiple"
            )
        run = Run(args, corpus, machine)
        batches = Batches(corpus.train, args.batch_size, args.context_length, args.seed)
    except (
        ValueError
    ) as error:  # of the tokenizer or the model's configuration, and written to be read
        sys.exit(str(error))
    if state is not None:
        run.load(state)
    elif machine.leads:
        delete_checkpoint(run.out)
        run.corpus.tokenizer.save(run.out)
    tell(introduce(run), machine)
    # a resumed run has the share of its minutes left that it had not used
    if train(
        run,
        batches,
        caught,
        time.monotonic() - run.share * 60 * args.minutes if args.resume else started,
    ):
        finish(run)
    else:
        tell(
            f"stopped and saved at step {run.step}: `python train.py --resume --out {run.out}` continues",
            machine,
        )
    tell(f"{time.monotonic() - started:.0f} s in all; checkpoint in {run.out}", machine)
    if machine.world > 1:
        dist.barrier()  # who leaves while another still talks may be aborted
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
