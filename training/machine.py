"""
The machine for a training run: torchrun's processes, their devices, torch's compiler, whether the
model fits in memory, signals, and the clock for runs whose length is set with --minutes.

    start_compiler(args)
    process = init_process(args)
    model = load_to_train(args, corpus, process)
    clock = Clock(run, started)
    run.share = clock.share(step_seconds)       # every few steps

`process` is passed to everything that depends on it, so no other file calls torch.distributed.
"""

import gc
import math
import multiprocessing
import os
import signal
import sys
import time
import timeit
from argparse import Namespace
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from checkpoint import load_checkpoint, memory_of
from common import is_main_process, plural, say
from model import GPT, TORCH_OPS, Ops
from ops.packed import can_pack
from tokenizer import load_tokenizer
from training.corpus import Corpus
from training.fast import training_ops
from training.report import SAMPLE_TOKENS, sample_prompt

# operations per second for dense bfloat16 matrix products, by GPU name
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}


@dataclass
class Process:
    """This process's device, and its rank among the processes that torchrun started."""

    device: torch.device
    dtype: torch.dtype  # for matrix products; weights, gradients and optimizer state are float32
    compile: bool
    rank: int = 0
    world: int = 1  # number of processes
    ops: Ops = TORCH_OPS  # the model's operators

    @property
    def is_main(self) -> bool:
        """Return whether this is the main process, the only one that prints and writes."""
        return self.rank == 0

    @cached_property
    def peak(self) -> float | None:
        """
        Return how many operations per second the device can do, or None for a GPU that is not in
        PEAKS. For a CPU, this is measured, which takes 10 to 100 ms.
        """
        if self.device.type == "cuda":
            return PEAKS.get(torch.cuda.get_device_name(self.device))
        square = torch.rand(1024, 1024, dtype=self.dtype)
        return 2 * 1024**3 / min(timeit.repeat(lambda: square @ square, number=1))

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def uncompiled(self):
        """
        Return a context in which blocks are not compiled, because compiling for texts of all
        lengths would take a minute.
        """
        return torch.compiler.set_stance("force_eager") if self.compile else nullcontext()

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Average x over the processes (all-reduce), in place."""
        if self.world > 1:
            dist.all_reduce(x)
            x /= self.world
        return x

    def sum_gradients(self, model: GPT):
        """Sum the gradients over the processes, in one message."""
        if self.world > 1:
            grads = [p.grad for p in model.parameters()]
            message = parameters_to_vector(grads)
            dist.all_reduce(message)
            vector_to_parameters(message, grads)  # gradients are now views of the message

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all processes' x (N, ..), concatenated to (world N, ..)."""
        if self.world == 1:
            return x
        every = torch.cat([x] * self.world)  # will be overwritten
        # torch 2.13 warns about the old name, but older versions have only that name
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(every, x.contiguous())
        return every

    def wait(self):
        """Wait until all processes have called this method."""
        if self.world > 1:
            dist.barrier()

    def shut_down(self):
        """
        Leave together, because a process that leaves while another still talks to it might be
        aborted.
        """
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def print(self, text: str):
        """
        Print text, but only in the main process. Training continues if a disk is full or the reader
        of a pipe is gone.
        """
        if self.is_main:
            say(text, sys.stdout)

    def __str__(self) -> str:
        """Describe the processes as train.py prints them: "1 x CPU, 2 threads, bfloat16"."""
        if self.device.type == "cpu":
            name = f"CPU, {plural(torch.get_num_threads(), 'thread')}"
        else:
            name = torch.cuda.get_device_name(self.device)
        compiled = ", compiled" if self.compile else ""
        return f"{self.world} x {name}, {str(self.dtype).removeprefix('torch.')}{compiled}"


def pick_device(name: str | None) -> torch.device:
    """
    Return the CPU for "cpu", and this process's GPU for "cuda". None means the GPU if there is one.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return torch.device(name)


def has_bfloat16(device: torch.device) -> bool:
    """
    Return whether the device multiplies bfloat16 matrices in hardware. Emulation would be slow.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    in_hardware = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    # ONEDNN_MAX_CPU_ISA may have limited oneDNN, which does the multiplications
    return in_hardware and can_pack()


def is_compiled(args: Namespace) -> bool:
    """Return whether a run compiles its blocks. By default, it does so only on a GPU."""
    return pick_device(args.device).type == "cuda" if args.compile is None else args.compile


def start_compiler(args: Namespace):
    """
    Load torch's compiler, which takes seconds. For a GPU, also fork the compiler's processes, so
    that they are ready for the first block. Call this before the run takes its lock, sets its
    signal handlers and opens its connections. Otherwise, the forked processes would inherit these,
    and hold them for up to a minute after this process is killed. Exits with a message if there is
    no C++ compiler for a CPU, or if no process can be forked.
    """
    gc.set_threshold(100_000)  # its objects are permanent, so searching for garbage wastes time
    os.environ.setdefault("TORCHINDUCTOR_WORKER_START", "fork")
    with suppress(ImportError, AttributeError):  # these names are private
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.cpp_builder import get_cpp_compiler

        if pick_device(args.device).type == "cpu":
            try:
                get_cpp_compiler()
            except RuntimeError as error:
                sys.exit(f"{error}: install g++, set CXX to a C++ compiler, or omit --compile")
            return  # the compiler runs in threads
        try:
            AsyncCompile.wakeup()  # `warm_pool` would fork only at the first kernel
        except OSError as error:
            for child in multiprocessing.active_children():
                child.kill()  # otherwise, Python would wait for these
            sys.exit(
                f"the compiler's processes cannot be forked ({error}): raise `ulimit -u`, set "
                "TORCHINDUCTOR_COMPILE_THREADS=1, or train with --no-compile"
            )


def count_cores() -> int:
    """
    Return the number of CPUs that this process may use. If there are more than two, CPUs that share
    a physical core count as one, because they share its arithmetic units. If OMP_NUM_THREADS is set
    (torchrun sets it), or the system does not provide the number, return torch's own number.
    """
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):  # macOS
        return torch.get_num_threads()
    cpus = os.sched_getaffinity(0)
    count = len(cpus)
    if count > 2:
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        count = len({read(topology.format(cpu)) or cpu for cpu in cpus})
    # a container's share of the CPUs, in microseconds: "200000 100000" means two CPUs
    quota, _, period = read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit():
        count = min(count, int(quota) // int(period))
    return max(1, count)


def read(path: str) -> str:
    """Return the text of a system file, or "" if the file does not exist."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def init_process(args: Namespace) -> Process:
    """
    Join torchrun's other processes, and choose the device and dtype according to the flags. Exits
    with a message if there is no GPU for this process.
    """
    device = pick_device(args.device)
    if device.type == "cpu":
        group = {"backend": "gloo"}
        torch.set_num_threads(count_cores())
    else:
        group = {"backend": "nccl", "device_id": device}
        count = torch.cuda.device_count()
        if device.index >= count:
            sys.exit(
                f"--device {device}: the number of GPUs here is {count}; omit the flag, or "
                "torchrun, to train on what there is"
            )
        torch.cuda.set_device(device)
        # the default stream cannot be captured as a graph
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.set_float32_matmul_precision("high")  # TF32 for float32 products
    if args.dtype is None:
        args.dtype = "bfloat16" if has_bfloat16(device) else "float32"
    rank = os.environ.get("RANK") or "0"
    world = os.environ.get("WORLD_SIZE") or "1"
    if not (rank + world).isdecimal() or int(rank) >= int(world):
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world} are not torchrun's: unset both")
    rank = int(rank)
    world = int(world)
    if world > 1:
        store = next(dist.rendezvous("env://"))[0]
        # On one machine, torchrun keeps the store when it restarts the processes. The new processes
        # would then wait at the addresses of dead ones, so each attempt has its own names.
        attempt = "0"
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(attempt, store)
        dist.init_process_group(store=store, rank=rank, world_size=world, **group)
    dtype = getattr(torch, args.dtype)
    compiled = is_compiled(args)
    return Process(device, dtype, compiled, rank, world, training_ops(device, compiled))


# --------------------------------------------------------------------------------------------------
# Memory, and loading a model for further training


def check_memory(model: GPT, args: Namespace, process: Process, remedy: str) -> str:
    """
    Return a text that says how much memory it takes to train a model. The model need not have its
    weights yet. Raises ValueError, with the remedy, if there is not enough free memory.
    """
    # Each weight takes four float32 numbers: the weight, its gradient, and either AdamW's means of
    # the gradient and its square, or Muon's momentum and update. With several processes, there is a
    # fifth number, because gradients are copied into one message.
    each = 16 if process.world == 1 else 20
    needed = each * model.num_weights
    if process.device.type == "cpu":  # torchrun's local processes share it
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free, _ = memory_of(process.device)
    text = (
        f"{model.num_weights / 1e6:.2f}M weights take {needed / 2**30:.2f} GiB to train, "
        f"{each} bytes each in every process, plus activations; "
        f"{process.device} has {free / 2**30:.2f} GiB free"
    )
    if args.resume:  # part is already in memory
        return text
    if needed > free:
        raise ValueError(f"{text}: {remedy}")
    # a step's tokens and targets are int64; its activations take far more
    tokens = 16 * args.batch_size * args.context_length // process.world
    if tokens > free:
        raise ValueError(
            f"the tokens of a step take {tokens / 2**30:.2f} GiB; {process.device} has "
            f"{free / 2**30:.2f} GiB free: lower --batch_size {args.batch_size}"
        )
    return text


def load_to_train(args: Namespace, corpus: Corpus, process: Process) -> GPT:
    """
    Load the --init model in float32, and print how much memory training it will take. Raises
    ValueError, before reading weights, if there is too little memory, if the corpus has other
    tokens, or if the model is part of a larger model, because it could not be saved then.
    """

    def check(model: GPT) -> GPT:  # the model has no weights yet
        if "text_config" in model.config_json:
            raise ValueError(
                f"{args.init} has a text_config, so it is part of a larger model: save only the "
                "text model, with transformers' class for it, and start from that"
            )
        vocabulary = load_tokenizer(args.init).backend.get_vocab()
        size = model.config.vocab_size
        parts = (corpus.train, corpus.val)  # tokens that are not predicted are ~id, at least -size
        has_rows = all(ids.max() < size and ids.min() >= -size for ids in parts)
        if corpus.tokenizer.backend.get_vocab() != vocabulary or not has_rows:
            raise ValueError(
                f"--data {args.data} has other tokens than {args.init}: make a corpus with `python "
                f"data/text/prepare.py FILES --init {args.init} --out data/NAME`, and train with "
                "--data NAME"
            )
        remedy = (
            "close other programs, start from a smaller model, or train adapters with peft and "
            "serve the merged model"
        )
        text = check_memory(model, args, process, remedy)
        process.print(f"memory: {text}")
        return model

    model = load_checkpoint(args.init, convert=check)
    model.config.dropout = args.dropout
    return model.train()


# --------------------------------------------------------------------------------------------------
# Signals and the clock


# A step may take a minute, and a user who sees no reaction will press Ctrl-C again.
STOPPING = b"\nfinishing the current step and saving; a second signal ends the run unsaved\n"


def catch_signals() -> list[int]:
    """
    Make Ctrl-C, SIGTERM and SIGHUP append to the returned list, so that the run can end after its
    current step. The first signal also prints a line, and a second one kills the process. Under
    nohup, SIGHUP remains ignored.
    """
    caught = []

    def note(number, frame):
        # not `print`, as the signal may have interrupted one; OSError if the terminal is gone
        if not caught and is_main_process():
            with suppress(OSError):
                os.write(2, STOPPING)
        caught.append(number)
        # a terminal that closes may send SIGHUP twice, itself and through its shell
        signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, note)
    return caught


# Seconds reserved for saving the model and drawing its loss at the end of a run. (Scoring the
# held-out text and sampling are counted separately.)
CLOSING_SECONDS = 5
LEAST_STEPS = 200  # with fewer steps, not even the smallest preset model learns much
LEAST_FINETUNING = 20  # minimum with --init; the learning rate rises over the first 10 steps
TIMED = 5  # number of timed steps after which to estimate how many steps will fit


class Clock:
    """
    The clock for `run`, whose --minutes began at `started` (from time.perf_counter). A resumed run
    gets only the minutes that it has not used yet.
    """

    def __init__(self, run, started: float):
        self.run = run
        self.begun = started - 60 * run.args.minutes * run.share
        self.end = self.begun + 60 * run.args.minutes
        self.counted = None  # end of the time counted so far; None before the first step
        self.recent = deque(maxlen=20)  # how many seconds each of the last steps took

    def share(self, step_seconds: float) -> float:
        """
        Return what share of the run is done, or 1 if time is up. The time since the last call
        counts as part of the time that was left then. `step_seconds` is how long each step has
        taken since then.
        """
        now = time.perf_counter()
        share = self.run.share
        if self.counted is None:  # the first step is slower: it allocates, and may compile
            self.counted = self.first_time = now
            self.first_step = self.run.step
            return share
        spent = now - self.counted
        self.counted = now
        self.recent.append(step_seconds)
        step_seconds = median(self.recent)
        left = max(0.0, self.end - closing_seconds(self.run, step_seconds) - now)
        timed = len(self.recent)
        if timed == TIMED or (timed < TIMED and not left):
            self.warn_of_few_steps(self.run.step + left / step_seconds)
        return share + (1 - share) * spent / (spent + left) if left else 1.0

    def warn_of_few_steps(self, steps: float):
        """
        Print a warning if a model would learn little in this many steps, and say how many minutes
        would be enough. With --steps, there is no warning, because the user chose the number.
        """
        args = self.run.args
        least = LEAST_FINETUNING if args.init else LEAST_STEPS
        if args.steps or steps >= least or not self.recent:
            return
        flags = f"--minutes {self.minutes_for(least)} --out {args.out} --overwrite"
        if "MAKELEVEL" in os.environ:  # the user ran `make run`
            flags = f"`{os.path.relpath(sys.executable)} train.py {flags}`, then make run"
        else:
            flags = f"the same flags and {flags}"
        self.run.process.print(
            f"warning: only about {steps:.0f} steps fit into {plural(args.minutes, 'minute')}, and "
            f"in fewer than {least} a model learns little: start again with {flags}"
        )

    def minutes_for(self, steps: int) -> int:
        """Return how many minutes this many steps take at the speed so far, plus a tenth."""
        step = self.run.step
        # the mean includes evaluations between steps; the median shows if the machine became busy
        mean = (self.counted - self.first_time) / (step - self.first_step)
        step_seconds = max(mean, median(self.recent))
        seconds = time.perf_counter() - self.begun + (steps - step) * step_seconds
        return math.ceil(1.1 * (seconds + closing_seconds(self.run, step_seconds)) / 60)


def closing_seconds(run, step_seconds: float) -> float:
    """
    Estimate how many seconds the program needs after the last step. `step_seconds` is the time for
    a training step.
    """
    # A training step takes 6 operations per weight and token, 2 of them for the forward pass. With
    # attention and norms, the forward pass's share is somewhat larger.
    forward_seconds = 0.4 * step_seconds / math.prod(run.batch_shape())
    # Without a cache, each sampled token takes a pass over all tokens before it. Reading the
    # weights takes as long as computing about 128 tokens.
    sampled = SAMPLE_TOKENS * (len(sample_prompt(run)) + 128)
    return forward_seconds * (len(run.corpus.val) + sampled) + CLOSING_SECONDS
