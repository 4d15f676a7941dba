"""
What a training run computes on: the processes of torchrun, their devices, and on a CPU the number
of threads, the dtype and the model size that a few timed steps show to be best.

    process = init_process(args)
    args, process = fit_to_machine(args, process, started, make_run, with_size)

`process` goes wherever something depends on it: no function asks torch.distributed or the
environment again.
"""

import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from model import TORCH, Ops
from training.clock import CLOSING_SECONDS
from training.fast import training_ops
from training.sizes import PROBE, SIZES, choose_size

PROBE_SECONDS = 0.3  # for each of two or three ways to train: together about a second
LOOKING_STEPS = 20  # evaluations and samples of a run take as long as so many steps, about


@dataclass
class Process:
    """Where this process computes, and its place among those that torchrun started."""

    device: torch.device
    dtype: torch.dtype  # of matrix products: weights, gradients and optimizer state are float32
    compile: bool
    rank: int = 0
    world: int = 1  # how many processes there are
    ops: Ops = TORCH  # what the model computes with

    @property
    def leads(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0

    def autocast(self):
        lower = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=lower)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Average x over the processes (all-reduce), in place."""
        if self.world > 1:
            dist.all_reduce(x)
            x /= self.world
        return x

    def mean_of(self, *values) -> list[float]:
        """Average plain numbers over the processes: what all decide by must be the same for all."""
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.mean(x).tolist()

    def wait(self):
        """Wait until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def leave(self):
        """The end: a process that left while another still talks to it might be aborted."""
        self.wait()
        if self.world > 1:
            dist.destroy_process_group()

    def print(self, text: str, bar=None):
        """Print from one process, above tqdm's bar if there is one."""
        if not self.leads:
            return
        if bar is None:
            print(text, flush=True)
        else:
            bar.write(text)

    def __str__(self) -> str:
        """As train.py says it: "CPU, 2 threads, bfloat16"."""
        if self.device.type == "cpu":
            threads = torch.get_num_threads()
            name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        else:
            name = torch.cuda.get_device_name(self.device)
        processes = f" x {self.world}" if self.world > 1 else ""
        compiled = ", compiled" if self.compile else ""
        return f"{name}{processes}, {str(self.dtype).removeprefix('torch.')}{compiled}"


def pick_device(name: str | None) -> torch.device:
    """
    The device of that name; for None or "cuda" this process's GPU, for None the CPU where there is
    no GPU. Exits with a message for a name that is no CPU's or GPU's.
    """
    if name == "cuda" or (name is None and torch.cuda.is_available()):
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device("cpu" if name is None else name)
    except RuntimeError:  # not a name that torch knows
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        sys.exit(f"--device {name}: no such device, there is cpu and, with a GPU, cuda")
    return device


def init_process(args: Namespace) -> Process:
    """
    Join the other processes of torchrun; take the device and what the flags say about it. Exits
    with a message where there is no such GPU.
    """
    device = pick_device(args.device)
    if device.type == "cpu":
        has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
        torch.set_num_threads(args.threads or min(torch.get_num_threads(), cores))
    else:
        count = torch.cuda.device_count()
        if device.index >= count:
            leave_out = "leave out the flag, or torchrun, to train on what there is"
            sys.exit(f"--device {device}: the number of GPUs here is {count}; {leave_out}")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 where products are in float32
        if args.dtype is None:
            in_hardware = torch.cuda.is_bf16_supported(including_emulation=False)
            args.dtype = "bfloat16" if in_hardware else "float32"
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    compiled = device.type == "cuda" if args.compile is None else args.compile
    dtype = getattr(torch, args.dtype or "float32")
    rank = int(os.environ.get("RANK", 0))
    return Process(device, dtype, compiled, rank, world, training_ops(device))


def fit_to_machine(
    args: Namespace, process: Process, started: float, make_run: Callable, with_size: Callable
):
    """
    Choose what the flags leave open on a CPU, by training steps that are timed: how many threads,
    the dtype, the size. Sets the threads; returns the arguments and the process.

    started: time.perf_counter() when --minutes began
    make_run(args=.., process=..): a `Run` to be timed
    with_size(name): the arguments of a run of that size
    """
    size_is_open = args.preset == "stdlib" and args.size is None and not args.resume
    threads = torch.get_num_threads()
    threads_are_open = args.threads is None and threads > 1
    is_open = size_is_open or threads_are_open or args.dtype is None
    if process.device.type != "cpu" or not is_open:
        return args, process

    # Where another process keeps a core busy, one thread less is faster: a step waits for its
    # slowest thread.
    counts = [threads, threads - 1] if threads_are_open else [threads]
    dtype = args.dtype or "float32"
    time_probe = partial(time_step, args, process, make_run)
    seconds = {(dtype, n): time_probe(dtype, n) for n in counts}
    best = min(seconds, key=seconds.get)
    if args.dtype is None:  # bfloat16 is slow where the CPU lacks AVX512-BF16, AMX or SVE
        _, threads = best
        seconds["bfloat16", threads] = time_probe("bfloat16", threads, to_beat=seconds[best])
        best = min(seconds, key=seconds.get)

    # all processes must choose the same size: near a limit their clocks could differ
    step_seconds = seconds[best]
    (elapsed,) = process.mean_of(time.perf_counter() - started)
    seconds_left = 60 * args.minutes - elapsed - CLOSING_SECONDS - LOOKING_STEPS * step_seconds
    if size_is_open:
        args = with_size(choose_size(step_seconds, seconds_left))
    if args.size and not args.resume:
        size = SIZES[args.size]
        args.expected = size.expected(args.arch, seconds_left / (size.cost * step_seconds))
    args.dtype, threads = best
    torch.set_num_threads(threads)
    return args, replace(process, dtype=getattr(torch, args.dtype))


def time_step(args, process, make_run, dtype: str, threads: int, to_beat=math.inf) -> float:
    """
    Seconds of a training step of the size PROBE: the median of those in PROBE_SECONDS, averaged
    over the processes. The first step allocates, and does not count, unless it takes more than
    three times as long as `to_beat`, the seconds of the best way so far: then it decides alone.
    """
    torch.set_num_threads(threads)
    args = Namespace(**vars(args) | SIZES[PROBE].flags())
    run = make_run(args=args, process=replace(process, dtype=getattr(torch, dtype)))
    # random tokens, for how long a step takes does not depend on them
    shape = (2, args.batch_size, args.context_length)
    x, y = torch.randint(run.model.config.vocab_size, shape)
    seconds = []
    is_warm = False
    while sum(seconds) < PROBE_SECONDS:
        began = time.perf_counter()
        run.update(run.model, x, y)
        took = time.perf_counter() - began
        if is_warm or took > 3 * to_beat:
            seconds.append(took)
        is_warm = True
    (mean,) = process.mean_of(median(seconds))
    return mean
