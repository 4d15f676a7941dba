"""
The machine of a training run: the processes of torchrun, their devices, on a CPU the number of
threads, and the clock of a run whose length is set by --minutes.

    process = init_process(args)
    clock = Clock(run, started)
    share = clock.part_of_rest(step_seconds)    # after each few steps

`process` goes wherever something depends on it: no function asks torch.distributed or the
environment again.
"""

import math
import os
import sys
import time
from argparse import Namespace
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from common import plural
from model import TORCH, Ops
from training.fast import training_ops
from training.report import LAST_SAMPLES, last_sample_tokens


@dataclass
class Process:
    """The device of this process, and its place among those that torchrun started."""

    device: torch.device
    dtype: torch.dtype  # of matrix products: weights, gradients and optimizer state are float32
    compile: bool
    rank: int = 0
    world: int = 1  # how many processes there are
    ops: Ops = TORCH  # the model's operators

    @property
    def is_main(self) -> bool:
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
        """Average plain numbers over the processes: all must decide alike."""
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.mean(x).tolist()

    def wait(self):
        """Wait until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def shut_down(self):
        """The end: a process that left while another still talks to it might be aborted."""
        self.wait()
        if self.world > 1:
            dist.destroy_process_group()

    def print(self, text: str):
        """Print from one process."""
        if self.is_main:
            print(text, flush=True)

    def __str__(self) -> str:
        """As train.py prints it: "CPU, 2 threads, bfloat16"."""
        if self.device.type == "cpu":
            name = f"CPU, {plural(torch.get_num_threads(), 'thread')}"
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


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies matrices in bfloat16 itself: emulated, it would be slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    in_hardware = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    # oneDNN, which multiplies, may have been limited by ONEDNN_MAX_CPU_ISA
    return bool(in_hardware) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def count_cores() -> int:
    """
    The CPUs that this process may use, one a physical core where there are more than two: those of
    one core share its arithmetic. torch's own number where OMP_NUM_THREADS decides, as torchrun
    sets it, or where the system does not say.
    """
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):  # macOS
        return torch.get_num_threads()
    cpus = os.sched_getaffinity(0)
    count = len(cpus)
    if count > 2:
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        count = len({read(topology.format(cpu)) or cpu for cpu in cpus})
    # a container's share of the CPUs, in microseconds: "200000 100000" are two
    quota, _, period = read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit():
        count = min(count, int(quota) // int(period))
    return max(1, count)


def read(path: str) -> str:
    """The text of a file of the system, "" where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def init_process(args: Namespace) -> Process:
    """
    Join the other processes of torchrun; take the device and what the flags say about it. Exits
    with a message where there is no such GPU.
    """
    device = pick_device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads or count_cores())
    else:
        count = torch.cuda.device_count()
        if device.index >= count:
            leave_out = "leave out the flag, or torchrun, to train on what there is"
            sys.exit(f"--device {device}: the number of GPUs here is {count}; {leave_out}")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 where products are in float32
    if args.dtype is None:
        args.dtype = "bfloat16" if has_bfloat16(device) else "float32"
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    compiled = device.type == "cuda" if args.compile is None else args.compile
    dtype = getattr(torch, args.dtype)
    rank = int(os.environ.get("RANK", 0))
    return Process(device, dtype, compiled, rank, world, training_ops(device))


# --------------------------------------------------------------------------------------------------
# The clock

# Of the end of a run, apart from the model's computation: compressing the held-out text, drawing
# the loss, saving twice.
CLOSING_SECONDS = 4
LEAST_STEPS = 200  # with fewer, not even the smallest model of a preset learns much
TIMED = 5  # steps after the first that show how many will fit
RESERVE = 1.15  # the minutes that a warning names are for so many times the steps


class Clock:
    """The clock of `run`, whose --minutes began at `started`, a time.perf_counter()."""

    def __init__(self, run, started: float):
        self.run = run
        self.started = started
        self.end = started + 60 * run.args.minutes
        self.counted = time.perf_counter()  # until when the run's time has been counted
        self.recent: deque | None = None  # seconds of the last steps
        self.fitting = math.inf  # steps that fit into the run's time, by the latest estimate
        self.needed = 0.0  # seconds for LEAST_STEPS
        self.may_warn = not (run.args.steps or run.args.resume)

    def part_of_rest(self, step_seconds: float) -> float:
        """
        The part of the run's remaining time that went by since the last call; 1 when time is up.
        `step_seconds`: of each step since then.
        """
        now = time.perf_counter()
        spent = now - self.counted
        self.counted = now
        if self.recent is None:  # a first step allocates, or compiles: the others are faster
            self.recent = deque(maxlen=20)
            return 0.0
        self.recent.append(step_seconds)
        step_seconds = median(self.recent)
        closing = closing_seconds(self.run, step_seconds)
        left = self.end - closing - now
        self.fitting = self.run.step + max(0.0, left) / step_seconds
        others = now - self.started - self.run.step * step_seconds  # such as compiling
        self.needed = RESERVE * LEAST_STEPS * step_seconds + max(0.0, others) + closing
        return spent / (spent + left) if left > 0 else 1.0

    def warning(self, is_over: bool) -> str:
        """Once, when some steps were timed: a warning if fewer than LEAST_STEPS fit. Else ""."""
        timed = len(self.recent or ())
        if not self.may_warn or not (is_over or timed >= TIMED):
            return ""
        self.may_warn = False
        if self.fitting >= LEAST_STEPS:
            return ""
        return (
            f"warning: only about {self.fitting:.0f} steps fit into {self.run.args.minutes:g} "
            f"minutes, and in fewer than {LEAST_STEPS} a model learns little: --minutes "
            f"{math.ceil(self.needed / 6) / 10} or more makes sense"
        )


def closing_seconds(run, step_seconds: float) -> float:
    """
    Estimated seconds from the last step to the end of the program: scoring the held-out text, the
    last samples, and the rest. `step_seconds`: of one training step.
    """
    args = run.args
    length = last_sample_tokens(args)
    # a sample reads, for each of its tokens, the text so far
    forward_tokens = len(run.corpus.val) + LAST_SAMPLES * length * length / 2
    # A forward pass is 2 of the 6 operations per weight and token that a training step takes, and
    # somewhat more with attention and norms.
    forward_seconds = 0.4 * step_seconds / (args.batch_size * args.context_length)
    return forward_seconds * forward_tokens + CLOSING_SECONDS
