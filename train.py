"""
Train a small GPT and leave a checkpoint directory that serve.py, transformers and vLLM can open.

    python train.py                              # the Python standard library, 2 min 15 s
    python train.py --preset shakespeare_char    # nanoGPT's Shakespeare -> out/shakespeare_char
    python train.py --resume                     # continue a run that was stopped or killed
    python train.py --data text                  # your texts, by data/text/prepare.py -> out/text
    python train.py --init smollm2 --data chat   # train further a model that exists
    torchrun --nproc_per_node 8 train.py --preset gpt2-124M
    python train.py --compare out/stdlib out/b   # their losses in one picture

It prepares the corpus if that is missing. Ctrl-C saves and stops. Everything random is a function
of (seed, step), so a resumed run sees the losses of an uninterrupted one. Below: knobs, recipe,
the run and its loop; `train_and_report` sums up. Letters: B sequences a step, T tokens of each.
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
from common import write_atomically
from families import FAMILIES
from model import GPT, GPTConfig, Rope
from tokenizer import Tokenizer
from training.corpus import Corpus, batch_rows, count_windows, load_corpus, read_about
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
# Knobs. A flag's default stands in its own line. A preset is flags, for a CPU and for a GPU, that
# stand before those typed: the last one counts. A recipe that was tuned with GPT-2 keeps it.

# Tuned for runs of two minutes on two cores. What counts is that the model learns to copy from
# further back, as code does: that takes three layers and some 600 steps, comes earlier with weight
# decay, and is worth 0.1 bits per byte. A vocabulary of 4,096, that of data/stdlib, beat smaller
# ones: its logits cost more, but each token is more text.
SMALL = (
    "--n_layer 3 --n_embd 128 --context_length 512 --short_context 128 --eval_every 200 "
    "--matrix_lr 0.03 --vector_lr 0.02 --momentum 0.9 --matrix_decay 0.5 --vector_decay 0.1 "
    "--beta2 0.99 --decay 0.6"
)
# 11M parameters, the size that nanoGPT trains on Shakespeare
MIDDLE_SIZED = "--n_layer 6 --n_head 6 --n_embd 384 --batch_size 64 --steps 1500"
SHAKESPEARE_CPU = (
    "--data shakespeare_char --arch gpt2 --n_layer 3 --n_embd 128 --context_length 128 "
    "--batch_size 16 --momentum 0.9"
)
SHAKESPEARE_CUDA = (
    f"{MIDDLE_SIZED} --data shakespeare_char --arch gpt2 --dropout 0.2 --matrix_decay 2.0 "
    "--vector_decay 2.0 --steps 1715 --eval_every 350"  # 28 epochs
)
# GPT-2 small, with OpenAI's activation; without biases, which take a GPU 3% of a step. It reads its
# corpus some ten times: dropout and decay bring the held-out loss from 2.21 to 1.69, rates to 1.63.
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
# with --init, instead of a preset; and flags that would describe another model
FINETUNE = "--batch_size 4 --vector_lr 5e-5 --eval_every 50 --out out/finetuned"
OF_A_MODEL = {"preset", "arch", "n_layer", "n_head", "n_embd", "activation", "bias"}
OF_A_MODEL |= {"matrix_lr", "matrix_decay", "momentum"}  # or of Muon
LONG_SHARE = 0.25  # the last share of a run, in windows of the whole context
# Losses are read after this many steps. To read one is to wait for the device: free on a CPU
STRIDES = {"cpu": 1, "cuda": 10}
# settings that may differ from the interrupted run when --resume continues it
RESUMABLE = {"out", "preset", "resume", "device", "compile"}


def build_parser() -> Parser:
    about = (
        "Train a small GPT. A preset sets some of the flags; a flag that you name overrides it. "
        "The defaults below apply where neither sets a flag."
    )
    parser = Parser(description=about, allow_abbrev=False)
    with_no = BooleanOptionalAction  # --bias and --no-bias

    flag = partial(add_flag, parser)
    flag("--preset", "a corpus, and model and recipe for the device", "stdlib", choices=PRESETS)
    flag("--init", "directory of a model to train further, all its weights; replaces a preset")
    about = "directory of the checkpoint; default: out/DATA, out/PRESET, with --init out/finetuned"
    flag("--out", about)
    flag("--resume", "continue the run in --out with its own settings", False)
    flag("--overwrite", "start again in the --out named, deleting the checkpoint there", False)
    flag(
        "--compare", "only draw the losses of these runs, in compare.png", nargs="+", metavar="DIR"
    )
    flag("--data", "corpus: a recipe's name under data/, or a folder that one has made", "stdlib")

    flag = partial(add_flag, parser.add_argument_group("model"))
    flag("--arch", "family: GPT-2, or a Llama of the same size", "llama", choices=("gpt2", "llama"))
    flag("--n_layer", "layers", 4)
    flag("--n_head", "attention heads", 2)
    # with more, not even the number of weights can be counted
    flag("--n_embd", "width, a multiple of n_head", 256, at_least(1, below=2**24))
    flag("--context_length", "tokens the model sees; nanoGPT calls it block_size", 256)
    about = "tokens of a window until the last quarter of the run; default: --context_length"
    flag("--short_context", about, kind=positive)
    about = "function in the MLP: gelu_new, gelu, relu, relu2 or silu; Llama's default is silu"
    flag("--activation", about, "relu2")
    flag("--bias", "biases in linear layers and norms, of GPT-2 alone", False, action=with_no)
    flag("--dropout", "for corpora that are read many times", 0.0, at_least(0, float, below=1))

    add_recipe_flags(parser.add_argument_group("recipe"))

    flag = partial(add_flag, parser.add_argument_group("watching"))
    flag("--eval_every", "steps between evaluations, samples and checkpoints", 100)
    flag("--eval_tokens", "held-out tokens to score each time; at the end, all of them", 16384)

    flag = partial(add_flag, parser.add_argument_group("machine"))
    about = "default: a GPU if there is one; CUDA_VISIBLE_DEVICES chooses which"
    flag("--device", about, choices=("cpu", "cuda"))
    about = "of matrix products; default: bfloat16 where the hardware has it"
    flag("--dtype", about, choices=("float32", "bfloat16"))
    about = "torch.compile the blocks, and replay a GPU's steps as CUDA graphs; default: on GPUs"
    flag("--compile", about, action=with_no)
    return parser


def add_recipe_flags(group):
    flag = partial(add_flag, group)
    share = at_least(0, float, below=1)
    about = "time of a run without --steps, once the corpus is made"
    flag("--minutes", about, 2.25, at_least(0.01, float))
    about = "optimizer steps, nanoGPT's max_iters; default: as many as there is time for"
    flag("--steps", about, kind=positive)
    flag("--batch_size", "sequences of context_length tokens a step, over all devices", 8)
    about = "parts in which a device computes its share of that, one by one, for less memory"
    flag("--accumulate", about, 1)
    flag("--matrix_lr", "peak learning rate of Muon, which trains the matrices", 0.02)
    flag("--vector_lr", "peak learning rate of AdamW: embeddings and norms, with --init all", 4e-3)
    flag("--momentum", "of Muon: the share of its mean gradient that a step keeps", 0.95, share)
    about = "of AdamW: the share of its mean squared gradient that a step keeps"
    flag("--beta2", about, 0.95, share)
    about = "weight decay of Muon, times the learning rate; it falls to zero with it, too"
    flag("--matrix_decay", about, 0.0)
    flag("--vector_decay", "weight decay of AdamW, for embeddings, with --init matrices", 0.0)
    flag("--warmup", "steps over which the learning rate rises", 10)
    about = "last share of the run, over which the learning rate falls to zero"
    flag("--decay", about, 0.8, at_least(0.001, float))
    flag("--clip", "largest norm of the gradient", 1.0)
    flag("--seed", "of weights, batches, dropout and samples", 1337, at_least(0, below=2**62))


def parse_args(argv: list[str] | None) -> Namespace:
    """
    Flags over preset over defaults. Exits with a message on unknown flags and impossible
    combinations.
    """
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    # argparse fills in its defaults only where a namespace has nothing
    typed = vars(parser.parse_args(argv, Namespace(**dict.fromkeys(vars(args)))))
    typed = {name for name, value in typed.items() if value is not None}
    reason = "--init brings the whole model, and AdamW trains it"
    fixed = typed & OF_A_MODEL if args.init else set()
    if args.resume:
        reason = "--resume continues a run with the settings it began with"
        fixed = typed - RESUMABLE
    if fixed:
        parser.error(f"{reason}: leave out {', '.join(f'--{name}' for name in sorted(fixed))}")
    if "overwrite" in typed and "out" not in typed:
        parser.error("--overwrite deletes a model: name its directory with --out DIR")
    base = read_about(args.data).get("init")
    if base and not (args.init or args.resume or typed & OF_A_MODEL):
        parser.error(
            f"--data {args.data} has the tokens of {base}: did you mean --init {base}? For a new "
            "model in these tokens name a flag of the model, such as --n_layer 4"
        )
    settings = PRESETS[args.preset][pick_device(args.device).type]
    if args.init:
        limit = load_config(args.init).context_length
        settings = f"{FINETUNE} --context_length {min(512, limit)}"
        if "context_length" in typed and args.context_length > limit:
            parser.error(f"--context_length is larger than the model's own, {limit}: lower it")
    args = parser.parse_args([*settings.split(), *argv])
    if "minutes" in typed and "steps" not in typed:  # exactly these: the preset may have steps
        args.steps = None
    if args.arch == "llama":
        if args.bias:
            parser.error("--bias: Llama has no biases, leave it out or take --arch gpt2")
        if "activation" not in typed:
            args.activation = "silu"
    source = args.data if "data" in typed else args.preset
    args.out = args.out or f"out/{Path(source).name}"
    args.short_context = min(args.short_context or args.context_length, args.context_length)
    return args


def model_fields(args: Namespace) -> dict:
    """The fields of GPTConfig that the flags decide."""
    names = GPTConfig.__dataclass_fields__
    fields = {name: value for name, value in vars(args).items() if name in names}
    if args.arch == "llama":
        fields |= {"n_inner": gated_width(args.n_embd), "rope": {0: Rope(10000.0)}}
    return fields | FAMILIES[args.arch].fields


def gated_width(n_embd: int) -> int:
    """
    The width of an MLP of three matrices with as many weights as GPT-2's, which has two and is
    4 n_embd wide: 8 / 3 n_embd, to the nearest multiple of 8, or of 64 for the wide models that
    GPUs train, since they multiply in tiles.
    """
    tile = 64 if n_embd >= 384 else 8
    return max(1, round(8 * n_embd / 3 / tile)) * tile


# --------------------------------------------------------------------------------------------------
# The recipe


def make_optimizers(model: GPT, args: Namespace, process: Process) -> list:
    """
    Muon for the matrices inside the blocks; AdamW for vectors and embeddings (also the head). With
    --init AdamW for all: that is how these models were trained before.
    """
    # Orthogonal updates are for maps from hidden state to hidden state; an embedding is a table.
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
    Factor (0 to 1) of the peak learning rates: warmup-stable-decay (WSD), linear. `step` counts
    from 0, `share` is how much of the run is done.
    """
    warmup = min(1.0, (step + 1) / args.warmup)
    decay = min(1.0, (1 - share) / args.decay)
    return warmup * decay


def tokens_and_targets(rows):
    """
    rows (B, T + 1) int64 of a corpus -> tokens (B, T), and targets (B, T), the token after each:
    -100, no target, where that is stored as ~id.
    """
    tokens = torch.maximum(rows, ~rows)
    targets = rows.masked_fill(rows < 0, -100)
    return tokens[:, :-1], targets[:, 1:]


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, process: Process, T: int, limit: int | None = None):
    """
    Cross-entropy on the held-out text: (nats in all, number of tokens scored). The text is cut into
    windows of T tokens. Each token is scored once; the very first only if the tokenizer has an
    end-of-text token to precede it. With `limit`, score about that many tokens, in evenly spaced
    windows.
    """
    eos = corpus.tokenizer.eos_token_id
    # one long row of tokens, filled up so that it is cut into windows without a rest
    tokens = torch.from_numpy(corpus.val.astype(np.int64))
    if eos is not None:
        tokens = F.pad(tokens, (1, 0), value=eos)
    missing = -(len(tokens) - 1) % T
    tokens = F.pad(tokens, (0, missing), value=-1)  # negative: not to be predicted
    windows = tokens.unfold(0, T + 1, T)  # (windows, T + 1): each begins with the last one's end
    windows = windows[(windows[:, 1:] >= 0).any(-1)]
    if limit is not None:
        count = min(len(windows), max(process.world, limit // T))
        windows = windows[torch.linspace(0, len(windows) - 1, count).long()]
    # in float64: the order in which losses are added then hardly matters
    total = torch.zeros(2, dtype=torch.float64, device=process.device)
    model.eval()
    own = windows[process.rank :: process.world]  # none, where processes are more than windows
    # few at a time: in a vocabulary of 256,000, the logits of 8,192 tokens take 8 GiB
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
    # weights are drawn on the CPU, so that a seed means the same model on every device
    return GPT(config)


class Run:
    """Everything that is saved and resumed: weights, optimizers, step, settings, log."""

    def __init__(self, args: Namespace, corpus: Corpus, process: Process):
        self.args = args
        self.corpus = corpus
        self.process = process
        self.out = Path(args.out)
        if count_windows(corpus.train, args.context_length) < 1:
            raise ValueError(
                f"{len(corpus.train)} training tokens are too few for windows of "
                f"{args.context_length}: take more text, or lower --context_length"
            )
        if args.init:
            model = load_to_train(args, corpus, process)
        else:
            model = new_model(args, corpus.tokenizer, process)
        self.model = model.to(process.device)
        self.optimizers = make_optimizers(self.model, args, process)
        if process.compile:
            for block in self.model.h:  # alike: what the first one took time for serves all
                block.compile(dynamic=False)
            if process.device.type == "cuda":
                self.train_step = CudaGraph(self.train_step)
        self.step = 0
        self.share = 0.0  # of the run that is done: of its steps, or of its minutes
        self.log = []  # the lines of log.jsonl

    def window(self) -> int:
        """
        Tokens of each sequence of the next step. Attention over short windows is cheap, so most of
        a run takes these; a model learns the rest of its context quickly.
        """
        is_long = self.share >= 1 - LONG_SHARE
        return self.args.context_length if is_long else self.args.short_context

    def next_batch(self):
        """Tokens and targets (B / world, T) int64 of the next step, this process's share."""
        args = self.args
        process = self.process
        T = self.window()
        B = args.batch_size * (args.context_length // T)  # as many tokens in short windows
        place = (args.seed, self.step, process.rank, process.world)
        rows = torch.from_numpy(batch_rows(self.corpus.train, B, T, *place))
        if process.device.type == "cuda":
            # from pinned memory the copy overlaps with what the GPU still computes
            rows = rows.pin_memory().to(process.device, non_blocking=True)
        return tokens_and_targets(rows)

    def update(self, x, y) -> torch.Tensor:
        """One step on x, y (B, T) int64; counts it. Returns loss, gradient norm (2,) on device."""
        args = self.args
        # dropout, too, is a function of (seed, step): nothing about randomness has to be saved
        torch.manual_seed(args.seed + self.step * self.process.world + self.process.rank)
        result = self.train_step(x, y, learning_rate(self.step, self.share, args))
        self.step += 1
        if args.steps:
            self.share = self.step / args.steps
        return result

    def train_step(self, x, y, rate) -> torch.Tensor:
        """
        `update` on the device: gradients, then weights. rate: a number, or a tensor () in a graph.
        """
        process = self.process
        parts = self.args.accumulate
        loss = torch.zeros((), device=x.device)
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with process.autocast():
                _, part = self.model(x_part, y_part, process.ops)
            # the mean over parts and processes, each of which has the mean of its own targets
            part = part / parts
            (part / process.world).backward()
            loss += part.detach()
        process.sum_gradients(self.model)
        # a rare batch with a huge gradient would undo many steps
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * rate
                group["rate"] = rate
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack([loss, norm])

    def record(self, **line: float):
        """
        Add a line to log.jsonl, which is written when the run is saved. Exits if a number is not
        finite: the last checkpoint is good, the model is not.
        """
        if all(map(math.isfinite, line.values())):
            self.log.append(line)
            return
        if self.process.is_main:
            self.write_log()
        numbers = ", ".join(f"{name} {value}" for name, value in line.items())
        sys.exit(
            f"{numbers}: stopped; what was saved before is kept. Start again with a lower "
            f"--matrix_lr (now {self.args.matrix_lr}, without effect beside --init) or --vector_lr "
            f"(now {self.args.vector_lr})"
        )

    def evaluate_and_sample(self) -> str:
        """Evaluate on a part of the held-out text, and sample. Returns the lines to print."""
        nats, count = evaluate(
            self.model, self.corpus, self.process, self.window(), self.args.eval_tokens
        )
        self.record(step=self.step, val_loss=round(nats / count, 5))
        return (
            f"step {self.step}, {self.share:.0%} of the run: held-out loss {nats / count:.3f} nats "
            f"a token; a sample:\n{textwrap.indent(generate_text(self), '    ')}"
        )

    def save(self):
        """
        Write train_state.pt, which --resume reads, then the checkpoint, which everything else
        reads. A kill between the two leaves them of different steps; both load, and `load` writes
        the checkpoint again.
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
        """Go on from what `save` wrote."""
        self.model.load_state_dict(state.pop("model"))  # no second copy stays in memory
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            # the settings are this run's: a GPU's differ from a CPU's
            optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["state"]})
        self.step = state["step"]
        self.share = state["share"]
        self.log = state["log"]
        self.save()  # after a kill, the checkpoint may be older


def open_out(args: Namespace) -> dict | None:
    """The state to resume from, None for a new run; or exit. Nothing is deleted yet."""
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
        except Exception as error:  # a damaged file raises errors of any kind
            sys.exit(
                f"nothing to resume, {path} cannot be read ({error!r:.200}): name the run with "
                "--out, or start anew: without --resume, with --overwrite where there is a model"
            )
    if args.init and Path(args.init).resolve() == out.resolve():
        sys.exit(f"--init and --out are both {out}: name another folder, as --out {out}-2")
    if (out / "config.json").exists() and not args.overwrite:
        sys.exit(
            f"{out} holds a model: --out {out}-2 trains another beside it, --resume --out {out} "
            f"alone continues it, --overwrite --out {out} deletes it and starts again"
        )
    return None


def is_same_run(saved: dict, args: Namespace) -> bool:
    """
    Return whether the flags are those of the run that was saved, except those that the run filled
    in.
    """
    names = saved.keys() - RESUMABLE - {"dtype", "init"}
    return all(saved[name] == getattr(args, name) for name in names)


def delete_checkpoint(out: Path):
    """
    Delete the model that --overwrite gives up. Called when the new run can begin, so that a
    mistyped flag costs no model.
    """
    # loss.png shows the Makefile that the training is done, config.json makes a directory a
    # checkpoint: they go first
    names = ["loss.png", "config.json", "model.safetensors", "train_state.pt", "log.jsonl"]
    for name in names + COMPANIONS:  # these of another model, perhaps
        for path in out.glob(name):
            path.unlink()


def train(run: Run, caught: list[int], clock: Clock) -> bool:
    """
    Step until the run is done (True) or a signal was caught (False), and save. Without --steps the
    clock decides how much is done: the learning rate follows it, so the run ends in time and well,
    also where something else slows the machine down.
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
        # all processes must stop alike
        votes = torch.tensor(
            [bool(caught), clock.share(step_seconds)], dtype=torch.float64, device=process.device
        )
        stop, share = process.mean(votes).tolist()
        if not args.steps:  # with --steps, `update` knows the share
            run.share = share
        print_progress(run, loss, step_seconds)
        ends = run.share == 1 or stop
        if is_evaluated and not ends:
            process.print(run.evaluate_and_sample())
        if is_evaluated or ends:
            run.save()
    return run.share == 1


def train_and_report(args: Namespace, state: dict | None, caught: list[int]):
    """A whole run: from `state`, or, if None, a new one. Exits where it cannot begin."""
    began = time.perf_counter()
    try:
        if state:  # the settings of the interrupted run, except the machine's
            now = {name: getattr(args, name) for name in RESUMABLE}
            args = Namespace(**state["args"] | now | {"resume": True})
            args.init = args.init and args.out  # it has all that is needed

        process = init_process(args)
        corpus = load_corpus(args.data, process)
        started = time.perf_counter()  # --minutes begin here: making the corpus is no part of them
        parts = process.world * args.accumulate
        if args.batch_size % parts:
            sys.exit(
                f"--batch_size {args.batch_size} does not divide into {parts} parts, processes "
                "times --accumulate: take a multiple"
            )
        if state and state.get("corpus", corpus.digest) != corpus.digest:
            sys.exit(
                f"the corpus has changed since: --data {args.data} has other tokens than "
                f"{args.out}: make it as it was, or begin a new run with another --out"
            )
        run = Run(args, corpus, process)
        if state:
            run.load(state)
        elif process.is_main:
            with exit_if_unwritable(run.out):
                delete_checkpoint(run.out)
                if args.init:  # all of it: a resumed run does without that directory
                    copy_companions(args.init, run.out)
                    save_checkpoint(run.model, run.out)
                else:
                    corpus.tokenizer.save(run.out)
    except ValueError as error:  # of a model or a tokenizer, and written to be read
        sys.exit(str(error))
    process.print(introduce(run))

    # loop
    clock = Clock(run, started)
    if train(run, caught, clock):
        process.print(f"scoring {len(corpus.val):,} held-out tokens ..")
        # every held-out token once, after the last checkpoint was written
        report_result(run, *evaluate(run.model, corpus, process, args.context_length))
        clock.warn_of_few_steps(run.step)
    else:
        again = f"python train.py --resume --out {run.out}"
        if "MAKELEVEL" in os.environ:  # `make run` was typed, perhaps without an active environment
            again = "make run"
        process.print(f"stopped and saved at step {run.step}: `{again}` continues")
    process.print(
        f"{plural(run.step, 'step')}, {time.perf_counter() - began:.0f} s in all; checkpoint in "
        f"{run.out}"
    )
    run.train_step = None  # NCCL waits for the end of a graph with its messages
    process.shut_down()


def main(argv: list[str] | None = None):
    try:
        args = parse_args(argv)
        if args.compare:
            return compare(args.compare)
        state = open_out(args)
    except ValueError as error:  # of a model, and written to be read
        sys.exit(str(error))
    if is_compiled(args):
        start_compiler(args)
    caught = catch_signals()  # not in the compiler's processes, which SIGTERM ends
    with only_run_in(args.out):
        train_and_report(args, state, caught)


if __name__ == "__main__":
    main()
