"""
Train a small GPT, and write a checkpoint directory that serve.py, transformers and vLLM can open.

    python train.py                              # the Python standard library, 2 min 15 s
    python train.py --preset shakespeare_char    # nanoGPT's Shakespeare -> out/shakespeare_char
    python train.py --resume                     # continue a run that was stopped or killed
    python train.py --data text                  # texts from data/text/prepare.py -> out/text
    python train.py --init smollm2 --data chat   # finetune an existing model
    torchrun --nproc_per_node 8 train.py --preset gpt2-124M
    python train.py --compare out/stdlib out/b   # plot the losses of both runs in one picture

The corpus is prepared if it is missing. Ctrl-C saves and stops. Everything random is a function of
(seed, step), so a resumed run has the same losses as an uninterrupted one. This file has the flags,
the recipe, the run and its loop; for an overview, read `train_and_report`. Letters: B sequences per
step, T tokens per sequence.
"""

import json
import math
import os
import sys
import textwrap
import time
from argparse import BooleanOptionalAction, Namespace
from functools import partial
from pathlib import Path
from shlex import quote

from common import (
    SPINS_TRAINING,
    Parser,
    add_flag,
    announce,
    at_least,
    end_with_one_line,
    plural,
    positive,
)

os.environ.setdefault("GOMP_SPINCOUNT", SPINS_TRAINING)  # before torch is loaded
if __name__ == "__main__":
    end_with_one_line()
    announce("loading torch")

import numpy as np
import torch
import torch.nn.functional as F

from checkpoint import COMPANIONS, copy_companions, empty_model, load_config, save_checkpoint
from common import MALFORMED, write_atomically
from families import FAMILIES
from model import GPT, GPTConfig, Rope
from tokenizer import Tokenizer
from training.corpus import Corpus, batch_rows, count_windows, folder_of, load_corpus, read_about
from training.fast import CudaGraph, Muon, maps_of
from training.machine import (
    Clock,
    Process,
    catch_signals,
    check_memory,
    init_process,
    is_compiled,
    load_to_train,
    pick_device,
    start_compiler,
)
from training.report import (
    compare,
    exit_if_unwritable,
    generate_text,
    introduce,
    only_run_in,
    print_progress,
    report_result,
)

# --------------------------------------------------------------------------------------------------
# Flags. The defaults are in `build_parser`. A preset has two strings of flags, one for a CPU and
# one for a GPU. The string is put before the flags that were typed, so typed flags override it.
# Presets that were tuned with GPT-2's architecture still use it.

# Tuned for two-minute runs on two cores. In code, names recur, so the model must learn to copy from
# far back. This skill is worth 0.1 bits per byte. Learning it takes three layers and about 600
# steps, or fewer steps with weight decay. The vocabulary of data/stdlib has 4,096 tokens. Its
# logits cost more than those of a smaller vocabulary, but each token covers more text.
SMALL = (
    "--n_layer 3 --n_embd 128 --context_length 512 --short_context 128 --eval_every 200 "
    "--matrix_lr 0.03 --vector_lr 0.02 --momentum 0.9 --matrix_decay 0.5 --vector_decay 0.1 "
    "--beta2 0.99 --decay 0.6"
)
# 11M parameters, as in nanoGPT's Shakespeare model
MIDDLE_SIZED = "--n_layer 6 --n_head 6 --n_embd 384 --batch_size 64 --steps 1500"
SHAKESPEARE_CPU = (
    "--data shakespeare_char --arch gpt2 --n_layer 3 --n_embd 128 --context_length 128 "
    "--batch_size 16 --momentum 0.9"
)
SHAKESPEARE_CUDA = (
    f"{MIDDLE_SIZED} --data shakespeare_char --arch gpt2 --dropout 0.2 --matrix_decay 2.0 "
    "--vector_decay 2.0 --steps 1715 --eval_every 350"  # 28 epochs
)
# GPT-2 small with its original activation, but without biases, which would take 3% of a step on a
# GPU. The run reads its corpus about ten times, so dropout and weight decay lower the held-out loss
# from 2.21 to 1.69. Tuned learning rates lower it further, to 1.63.
GPT2 = (
    "--arch gpt2 --n_layer 12 --n_head 12 --n_embd 768 --context_length 1024 "
    "--activation gelu_new --data stdlib_gpt2 --batch_size 32 --steps 1000 --dropout 0.2 "
    "--matrix_decay 2.0 --vector_decay 2.0 --vector_lr 2e-3"
)
PRESETS = {
    "stdlib": {"cpu": SMALL, "cuda": f"{MIDDLE_SIZED} --arch gpt2 --dropout 0.1"},
    "shakespeare_char": {"cpu": SHAKESPEARE_CPU, "cuda": SHAKESPEARE_CUDA},
    "gpt2-124M": {"cpu": GPT2, "cuda": GPT2},
}
# flags used with --init instead of a preset, and flags that --init does not allow
FINETUNE = "--batch_size 4 --vector_lr 5e-5 --eval_every 50 --out out/finetuned"
MODEL_FLAGS = {"preset", "arch", "n_layer", "n_head", "n_embd", "activation", "bias"}
MODEL_FLAGS |= {"matrix_lr", "matrix_decay", "momentum"}  # Muon's flags; --init does not use Muon
LONG_SHARE = 0.25  # final fraction of a run, in which training uses windows of the full context
# Number of steps between reads of the losses. A read waits for the device, which costs nothing on a
# CPU.
STRIDES = {"cpu": 1, "cuda": 10}
# settings that --resume may change
RESUMABLE = {"out", "preset", "resume", "device", "compile"}
fraction = at_least(0, float, below=1)  # the type of some flags


def build_parser() -> Parser:
    about = (
        "Train a small GPT. A preset sets some of the flags; flags that you give override the "
        "preset. The defaults below apply to flags that are set by neither."
    )
    parser = Parser(description=about, allow_abbrev=False)
    with_no = BooleanOptionalAction  # --bias and --no-bias

    flag = partial(add_flag, parser)
    flag("--preset", "corpus, model and recipe, suited to the device", "stdlib", choices=PRESETS)
    flag("--init", "directory of a model to finetune (all its weights); replaces a preset")
    about = "checkpoint directory; default: out/DATA, out/PRESET or, with --init, out/finetuned"
    flag("--out", about)
    flag("--resume", "continue the run in --out with its own settings", False)
    flag("--overwrite", "delete the checkpoint in the given --out, and start a new run", False)
    flag("--compare", "only plot the losses of these runs in compare.png", nargs="+", metavar="DIR")
    flag("--data", "corpus: name of a recipe in data/, or a folder that a recipe made", "stdlib")

    flag = partial(add_flag, parser.add_argument_group("model"))
    flag("--arch", "GPT-2, or a Llama of the same size", "llama", choices=("gpt2", "llama"))
    flag("--n_layer", "number of layers", 4)
    flag("--n_head", "number of attention heads", 2)
    # above the limit, the number of weights would overflow
    flag("--n_embd", "width, a multiple of n_head", 256, at_least(1, below=2**24))
    flag("--context_length", "number of tokens the model sees (nanoGPT: block_size)", 256)
    about = "tokens per window until the last quarter of the run; default: --context_length"
    flag("--short_context", about, kind=positive)
    about = "activation in the MLP: gelu_new, gelu, relu, relu2 or silu; Llama's default is silu"
    flag("--activation", about, "relu2")
    flag("--bias", "use biases in linear layers and norms (GPT-2 only)", False, action=with_no)
    flag("--dropout", "dropout probability, useful if the corpus is read many times", 0.0, fraction)

    add_recipe_flags(parser.add_argument_group("recipe"))

    flag = partial(add_flag, parser.add_argument_group("monitoring"))
    flag("--eval_every", "number of steps between evaluations, samples and checkpoints", 100)
    flag("--eval_tokens", "held-out tokens to score each time; at the end, all are scored", 16384)

    flag = partial(add_flag, parser.add_argument_group("machine"))
    about = "default: a GPU if there is one; CUDA_VISIBLE_DEVICES selects which"
    flag("--device", about, choices=("cpu", "cuda"))
    about = "dtype of matrix products; default: bfloat16 if the hardware supports it"
    flag("--dtype", about, choices=("float32", "bfloat16"))
    about = "compile the blocks with torch.compile, and use CUDA graphs on a GPU; default: on GPUs"
    flag("--compile", about, action=with_no)
    return parser


def add_recipe_flags(group):
    flag = partial(add_flag, group)
    about = "duration of a run without --steps, not counting the time to make the corpus"
    flag("--minutes", about, 2.25, at_least(0.01, float, below=10**6))
    about = "number of optimizer steps (nanoGPT: max_iters); default: as many as fit into --minutes"
    flag("--steps", about, kind=positive)
    flag("--batch_size", "sequences per step, over all devices, of context_length tokens each", 8)
    flag("--accumulate", "number of parts to split each device's batch into, to save memory", 1)
    flag("--matrix_lr", "peak learning rate of Muon, which trains the matrices", 0.02)
    about = "peak learning rate of AdamW: embeddings and norms; with --init, all weights"
    flag("--vector_lr", about, 4e-3)
    flag("--momentum", "decay rate of Muon's running mean of the gradient", 0.95, fraction)
    flag("--beta2", "decay rate of AdamW's running mean of the squared gradient", 0.95, fraction)
    about = "Muon's weight decay; multiplied by the learning rate, so it also falls to zero"
    flag("--matrix_decay", about, 0.0)
    flag("--vector_decay", "AdamW's weight decay for embeddings or, with --init, all matrices", 0.0)
    flag("--warmup", "number of steps during which the learning rate rises", 10)
    about = "final fraction of the run, during which the learning rate falls to zero"
    flag("--decay", about, 0.8, at_least(0.001, float))
    flag("--clip", "maximum norm of the gradient; 0: no maximum", 1.0)
    flag("--seed", "seed for weights, batches, dropout and samples", 1337, at_least(0, below=2**62))


def parse_args(argv: list[str] | None) -> Namespace:
    """
    Parse the command line. Typed flags override the preset, and the preset overrides the defaults.
    Exit with a message if a flag is unknown, or if flags contradict each other.
    """
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    # argparse sets a default only if the namespace does not have the attribute yet
    typed = vars(parser.parse_args(argv, Namespace(**dict.fromkeys(vars(args)))))
    typed = {name for name, value in typed.items() if value is not None}
    reason = "--init fixes the model, and AdamW trains it"
    fixed = typed & MODEL_FLAGS if args.init else set()
    if args.resume:
        reason = "--resume continues a run with the settings it began with"
        fixed = typed - RESUMABLE
    if fixed:
        parser.error(f"{reason}: leave out {', '.join(f'--{name}' for name in sorted(fixed))}")
    if "overwrite" in typed and "out" not in typed:
        parser.error("--overwrite deletes a model: name its directory with --out DIR")
    base = read_about(args.data).get("init")
    if base and not (args.init or args.resume or typed & MODEL_FLAGS):
        parser.error(
            f"--data {args.data} has tokens for {base}: did you mean --init {base}? To train a new "
            "model on these tokens, set one of the model flags, such as --n_layer 4"
        )
    settings = PRESETS[args.preset][pick_device(args.device).type]
    if args.init:
        limit = load_config(args.init).context_length
        settings = f"{FINETUNE} --context_length {min(512, limit)}"
        if "context_length" in typed and args.context_length > limit:
            parser.error(f"--context_length is larger than the model's limit, {limit}: lower it")
    args = parser.parse_args([*settings.split(), *argv])
    if "minutes" in typed and "steps" not in typed:  # override a preset's --steps
        args.steps = None
    if args.arch == "llama":
        if args.bias:
            parser.error("--bias: Llama has no biases; leave it out, or use --arch gpt2")
        if "activation" not in typed:
            args.activation = "silu"
    source = args.data if "data" in typed else args.preset
    args.out = args.out or f"out/{os.path.basename(os.path.abspath(source))}"
    if folder_of(args.data) == Path(args.data):  # a path, which --resume may read from elsewhere
        args.data = str(Path(args.data).resolve())
    args.short_context = min(args.short_context or args.context_length, args.context_length)
    return args


def model_fields(args: Namespace) -> dict:
    """Return the fields of GPTConfig that the flags determine."""
    names = GPTConfig.__dataclass_fields__
    fields = {name: value for name, value in vars(args).items() if name in names}
    if args.arch == "llama":
        fields |= {"n_inner": gated_width(args.n_embd), "rope": {0: Rope(10000.0)}}
    return fields | FAMILIES[args.arch].fields


def gated_width(n_embd: int) -> int:
    """
    Return the width of a gated MLP that has as many weights as GPT-2's. GPT-2's MLP has two
    matrices and a width of 4 n_embd; a gated MLP has three matrices, so its width is 8 / 3 n_embd.
    The width is rounded to a multiple of 8, or of 64 for wide models, because GPUs multiply in
    tiles.
    """
    tile = 64 if n_embd >= 384 else 8
    return max(1, round(8 * n_embd / 3 / tile)) * tile


# --------------------------------------------------------------------------------------------------
# The recipe


def make_optimizers(model: GPT, args: Namespace, process: Process) -> list:
    """
    Return the optimizers: Muon for the matrices inside the blocks, and AdamW for vectors,
    embeddings and the head. With --init, use AdamW for everything, because such models were trained
    with it.
    """
    # Muon's orthogonal updates suit maps between hidden states, but an embedding is a table.
    blocks = [] if args.init else model.h
    matrices = {p: maps for block in blocks for p, maps in maps_of(block).items()}
    rest = [p for p in model.parameters() if p not in matrices]
    tables = {"params": [p for p in rest if p.ndim == 2], "weight_decay": args.vector_decay}
    vectors = {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0}
    betas = (0.9, args.beta2)
    on_gpu = process.device.type == "cuda"
    adamw = torch.optim.AdamW(
        [tables, vectors], args.vector_lr, betas, fused=on_gpu, capturable=on_gpu
    )
    if args.init:
        return [adamw]
    settings = {"lr": args.matrix_lr, "momentum": args.momentum, "weight_decay": args.matrix_decay}
    return [Muon(matrices, process, **settings), adamw]


def learning_rate(step: int, share: float, args: Namespace) -> float:
    """
    Return the factor (0 to 1) that multiplies the peak learning rates, according to a linear
    warmup-stable-decay (WSD) schedule. `step` counts from 0. `share` is the fraction of the run
    that is done.
    """
    warmup = min(1.0, (step + 1) / args.warmup)
    decay = min(1.0, (1 - share) / args.decay)
    return warmup * decay


def tokens_and_targets(rows):
    """
    Split rows (B, T + 1) int64 of a corpus into tokens (B, T) and targets (B, T), which are the
    next tokens. A corpus stores ~id for a token that should not be predicted; the target is then
    -100.
    """
    tokens = torch.maximum(rows, ~rows)
    targets = rows.masked_fill(rows < 0, -100)
    return tokens[:, :-1], targets[:, 1:]


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, process: Process, T: int, limit: int | None = None):
    """
    Return the cross-entropy on the held-out text, as (total nats, number of tokens scored). The
    text is cut into windows of T tokens. Each token is scored once, except that the very first is
    scored only if the tokenizer has an end-of-text token to put before it. If `limit` is given,
    score only about that many tokens, in evenly spaced windows.
    """
    eos = corpus.tokenizer.eos_token_id
    # one long row of tokens, padded to a whole number of windows
    tokens = torch.from_numpy(corpus.val.astype(np.int64))
    if eos is not None:
        tokens = F.pad(tokens, (1, 0), value=eos)
    missing = -(len(tokens) - 1) % T
    tokens = F.pad(tokens, (0, missing), value=-1)  # negative tokens are not predicted
    windows = tokens.unfold(0, T + 1, T)  # (windows, T + 1), overlapping by one token
    windows = windows[(windows[:, 1:] >= 0).any(-1)]
    if limit is not None:
        count = min(len(windows), max(process.world, limit // T))
        windows = windows[torch.linspace(0, len(windows) - 1, count).long()]
    # float64, so that the order of summation hardly matters
    total = torch.zeros(2, dtype=torch.float64, device=process.device)
    model.eval()
    own = windows[process.rank :: process.world]  # may be empty with more processes than windows
    # small batches: with a vocabulary of 256,000, the logits of 8,192 tokens take 8 GiB
    B = max(1, 2**13 // T)
    for start in range(0, len(own), B):
        rows = own[start : start + B].to(process.device)  # (B, T + 1)
        tokens, targets = tokens_and_targets(rows)
        with process.autocast(), process.uncompiled():
            _, loss = model(tokens, targets, process.ops)
        scored = (targets >= 0).sum()
        total += torch.stack([loss.double() * scored, scored.double()])
    model.train()
    nats, count = (process.mean(total) * process.world).tolist()
    return nats, round(count)


# --------------------------------------------------------------------------------------------------
# The run


def new_model(args: Namespace, tokenizer: Tokenizer, process: Process) -> GPT:
    eos = tokenizer.eos_token_id
    ends = () if eos is None else (eos,)
    config = GPTConfig(tokenizer.vocab_size, eos_token_ids=ends, **model_fields(args))
    check_memory(empty_model(config), args, process, "lower --n_embd or --n_layer")
    torch.manual_seed(args.seed)
    # initialise on the CPU, so that a seed gives the same model on every device
    return GPT(config)


class Run:
    """The state of a run, to save and resume it: weights, optimizers, step, settings and log."""

    def __init__(self, args: Namespace, corpus: Corpus, process: Process):
        self.args = args
        self.corpus = corpus
        self.process = process
        self.out = Path(args.out)
        if count_windows(corpus.train, args.context_length) < 1:
            raise ValueError(
                f"{len(corpus.train)} training tokens are too few for windows of "
                f"{args.context_length}: use more text, or lower --context_length"
            )
        if args.init:
            model = load_to_train(args, corpus, process)
        else:
            model = new_model(args, corpus.tokenizer, process)
        self.model = model.to(process.device)
        self.optimizers = make_optimizers(self.model, args, process)
        if process.compile:
            for block in self.model.h:  # blocks are alike: only the first takes long
                block.compile(dynamic=False)
            if process.device.type == "cuda":
                self.train_step = CudaGraph(self.train_step)
        self.step = 0
        self.share = 0.0  # fraction of the run's steps (or minutes) that is done
        self.log = []  # the lines of log.jsonl

    def window(self) -> int:
        """
        Return the number of tokens per sequence in the next step. Attention over short windows is
        cheap, so most of a run uses short windows. At the end, a model quickly learns to use its
        full context.
        """
        is_long = self.share >= 1 - LONG_SHARE
        return self.args.context_length if is_long else self.args.short_context

    def batch_shape(self) -> tuple[int, int]:
        """Return (B, T) for the next step. B T is constant if each T divides the context length."""
        T = self.window()
        return self.args.batch_size * (self.args.context_length // T), T

    def next_batch(self):
        """Return this process's tokens and targets (B / world, T) int64 for the next step."""
        args = self.args
        process = self.process
        B, T = self.batch_shape()
        place = (args.seed, self.step, process.rank, process.world)
        rows = torch.from_numpy(batch_rows(self.corpus.train, B, T, *place))
        if process.device.type == "cuda":
            # the copy from pinned memory overlaps with the GPU's current work
            rows = rows.pin_memory().to(process.device, non_blocking=True)
        return tokens_and_targets(rows)

    def update(self, x, y) -> torch.Tensor:
        """
        Train one step on x and y (B, T) int64. Return loss and gradient norm, (2,) on the device.
        """
        args = self.args
        # dropout is also a function of (seed, step), so no random state has to be saved
        torch.manual_seed(args.seed + self.step * self.process.world + self.process.rank)
        result = self.train_step(x, y, learning_rate(self.step, self.share, args))
        self.step += 1
        if args.steps:
            self.share = self.step / args.steps
        return result

    def train_step(self, x, y, rate) -> torch.Tensor:
        """
        Compute the gradients and update the weights: the part of `update` that runs on the device.
        `rate` is a number or, in a CUDA graph, a tensor ().
        """
        process = self.process
        parts = self.args.accumulate
        loss = torch.zeros((), device=x.device)
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with process.autocast():
                _, part = self.model(x_part, y_part, process.ops)
            # average over parts and processes; each has already averaged over its own targets
            part = part / parts
            (part / process.world).backward()
            loss += part.detach()
        process.sum_gradients(self.model)
        # without clipping, a rare batch with a huge gradient could undo many steps
        limit = self.args.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * rate
                group["rate"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack([loss, norm])

    def record(self, **line: float):
        """
        Append a line to the log (`save` writes log.jsonl). Exit if a number is not finite, because
        the model is then broken. The last checkpoint is still good.
        """
        if all(map(math.isfinite, line.values())):
            self.log.append(line)
            return
        if self.process.is_main:
            self.write_log()
        numbers = ", ".join(f"{name} {value}" for name, value in line.items())
        sys.exit(
            f"{numbers}: stopped; what was saved before is kept. Start again with a lower "
            f"--matrix_lr (now {self.args.matrix_lr}, no effect with --init) or --vector_lr "
            f"(now {self.args.vector_lr})"
        )

    def evaluate_and_sample(self) -> str:
        """
        Evaluate on part of the held-out text, and generate a sample. Return the lines to print.
        """
        nats, count = evaluate(
            self.model, self.corpus, self.process, self.window(), self.args.eval_tokens
        )
        self.record(step=self.step, val_loss=round(nats / count, 5))
        return (
            f"step {self.step}, {self.share:.0%} of the run: held-out loss {nats / count:.3f} nats "
            f"per token; a sample:\n{textwrap.indent(generate_text(self), '    ')}"
        )

    def save(self):
        """
        Write train_state.pt, which --resume reads, and then the checkpoint, which everything else
        reads. If the process is killed in between, they are from different steps. Both can still be
        loaded, and `load` writes the checkpoint again.
        """
        if self.process.is_main:
            state = {
                "step": self.step,
                "share": self.share,
                "args": vars(self.args),
                "log": self.log,
                "corpus": self.corpus.digest,
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            }
            with exit_if_unwritable(self.out):
                write_atomically(self.out / "train_state.pt", partial(torch.save, state))
                save_checkpoint(self.model, self.out)
                self.write_log()

    def write_log(self):
        lines = "".join(json.dumps(line) + "\n" for line in self.log)
        with exit_if_unwritable(self.out):
            write_atomically(self.out / "log.jsonl", lambda path: path.write_text(lines))

    def load(self, state: dict):
        """Restore the state that `save` wrote, and the other files of --out."""
        try:
            self.model.load_state_dict(state.pop("model"))  # pop, so as not to keep a second copy
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                # keep this run's settings, because a GPU's differ from a CPU's
                optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["state"]})
            self.step = state["step"]
            self.share = state["share"]
            self.log = state["log"]
        except (RuntimeError, *MALFORMED) as error:
            raise ValueError(
                f"this version of train.py cannot resume {self.out / 'train_state.pt'} "
                f"({error!r:.200}): use the one that wrote it, or start again with --overwrite"
            ) from error
        if self.process.is_main and not self.args.init:
            with exit_if_unwritable(self.out):
                self.corpus.tokenizer.save(self.out)  # it may be missing, or another run's
        self.save()  # after a kill, the checkpoint may be older


def open_out(args: Namespace) -> dict | None:
    """
    Return the state to resume from, or None for a new run. Exit if --out cannot be used. This
    function does not delete anything.
    """
    out = Path(args.out)
    path = out / "train_state.pt"
    # torchrun --max-restarts runs the same command again
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if args.resume or (restarted and path.exists()):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["args"].keys() != vars(args).keys():
                raise ValueError("another version of train.py wrote it")
            if args.resume or is_same_run(state["args"], args):
                return state
        except Exception as error:  # a damaged file can raise any error
            sys.exit(
                f"nothing to resume: {path} cannot be read ({error!r:.200}). Name the run with "
                "--out, or start a new one without --resume (with --overwrite if --out has a model)"
            )
    if args.init and Path(args.init).resolve() == out.resolve():
        sys.exit(f"--init and --out are both {out}: name another folder, for example --out {out}-2")
    if (out / "config.json").exists() and not args.overwrite:
        sys.exit(
            f"{out} holds a model: use --out {out}-2 to train another one, --resume --out {out} to "
            f"continue this one, or --overwrite --out {out} to delete it and start again"
        )
    return None


def is_same_run(saved: dict, args: Namespace) -> bool:
    """
    Return whether the flags are the same as in the saved run, ignoring flags that the run itself
    has set.
    """
    names = saved.keys() - RESUMABLE - {"dtype", "init"}
    return all(saved[name] == getattr(args, name) for name in names)


def delete_checkpoint(out: Path):
    """
    Delete the old model for --overwrite. This is called only when the new run is ready to start, so
    that a mistyped flag does not cost a model.
    """
    # Delete these two first: loss.png tells the Makefile that training is done, and config.json
    # marks a directory as a checkpoint.
    names = ["loss.png", "config.json", "model.safetensors", "train_state.pt", "log.jsonl"]
    for name in names + COMPANIONS:  # these files may belong to another model
        for path in out.glob(name):
            path.unlink()


def train(run: Run, caught: list[int], clock: Clock) -> bool:
    """
    Train until the run is done or a signal is caught, then save. Return True if the run is done.
    Without --steps, the clock determines what fraction of the run is done. The learning rate
    follows that fraction, so the run ends in time and with a full decay, even if something else
    slows the machine down.
    """
    args = run.args
    process = run.process
    stride = STRIDES[process.device.type]
    pending = []
    stop = 0.0
    while run.share < 1 and not stop:
        if not pending:
            began = time.perf_counter()
        pending.append(run.update(*run.next_batch()))
        is_evaluated = run.step % args.eval_every == 0
        if run.step % stride and not is_evaluated and run.share < 1:
            continue
        losses = process.mean(torch.stack(pending)).tolist()  # waits for the device
        pending.clear()
        step_seconds = (time.perf_counter() - began) / len(losses)
        for step, (loss, norm) in enumerate(losses, run.step - len(losses) + 1):
            run.record(step=step, loss=round(loss, 5), norm=round(norm, 4))
        # all processes must stop at the same step
        votes = torch.tensor(
            [bool(caught), clock.share(step_seconds)], dtype=torch.float64, device=process.device
        )
        stop, share = process.mean(votes).tolist()
        if not args.steps:  # with --steps, `update` sets the share
            run.share = share
        print_progress(run, loss, step_seconds)
        ends = run.share == 1 or stop
        text = run.evaluate_and_sample() if is_evaluated and not ends else None
        if is_evaluated or ends:
            run.save()  # before printing, which waits for a paused terminal
        if text:
            process.print(text)
    return run.share == 1


def train_and_report(args: Namespace, state: dict | None, caught: list[int]):
    """
    Carry out a whole run, new or resumed from `state`. Exit with a message if it cannot start.
    """
    began = time.perf_counter()
    try:
        if state:  # use the interrupted run's settings, except those in RESUMABLE
            now = {name: getattr(args, name) for name in RESUMABLE}
            args = Namespace(**state["args"] | now | {"resume": True})
            args.init = args.init and args.out  # --out has everything that --init had

        process = init_process(args)
        corpus = load_corpus(args.data, process)
        started = time.perf_counter()  # --minutes begins here, after the corpus is made
        parts = process.world * args.accumulate
        if args.batch_size % parts:
            sys.exit(
                f"--batch_size {args.batch_size} is not divisible by {parts}, the number of "
                "processes times --accumulate: choose a multiple"
            )
        if state and state.get("corpus", corpus.digest) != corpus.digest:
            sys.exit(
                f"the corpus has changed: --data {args.data} has different tokens than when "
                f"{args.out} was trained. Restore it, or start a new run with another --out"
            )
        run = Run(args, corpus, process)
        if state:
            run.load(state)
        elif process.is_main:
            with exit_if_unwritable(run.out):
                delete_checkpoint(run.out)
                if args.init:  # copy everything, so that resuming does not need --init's folder
                    copy_companions(args.init, run.out)
                    save_checkpoint(run.model, run.out)
                    run.save()  # so that a run killed in its first steps can be resumed
                else:
                    corpus.tokenizer.save(run.out)
    except (OSError, ValueError) as error:  # about a file or a model; the message is for the user
        sys.exit(str(error))
    process.print(introduce(run))

    clock = Clock(run, started)
    if train(run, caught, clock):
        process.print(f"scoring the held-out text, {len(corpus.val):,} tokens ..")
        # score every held-out token once, after the last checkpoint has been written
        report_result(run, *evaluate(run.model, corpus, process, args.context_length))
        clock.warn_of_few_steps(run.step)
    else:
        again = f"python train.py --resume --out {quote(str(run.out))}"
        if "MAKELEVEL" in os.environ:  # started by `make run`, maybe with no active environment
            again = "make run"
        process.print(f"stopped and saved at step {run.step}; to continue: `{again}`")
    process.print(
        f"{plural(run.step, 'step')}, {time.perf_counter() - began:.0f} s in total; checkpoint in "
        f"{run.out}"
    )
    run.train_step = None  # free the CUDA graph first, because NCCL's shutdown waits for it
    process.shut_down()


def main(argv: list[str] | None = None):
    try:
        args = parse_args(argv)
        if args.compare:
            return compare(args.compare)
        state = open_out(args)
    except (OSError, ValueError) as error:  # about a path or a model; the message is for the user
        sys.exit(str(error))
    if is_compiled(args):
        start_compiler(args)
    caught = catch_signals()  # after start_compiler, so that SIGTERM ends the compiler's processes
    with only_run_in(args.out):
        train_and_report(args, state, caught)


if __name__ == "__main__":
    main()
