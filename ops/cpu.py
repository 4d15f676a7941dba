"""
The operators in cpu.c. This file compiles them on first use, and calls them.

    machine = CpuKernels(c_compiler(), threads=2)
    x, y = machine.add_norm(x, delta, norm)   # computed immediately; called like the twins in
                                              # model.py, but q, k and v stay one tensor
    forward = machine.program(model, ops, kv, known, T)   # or run a whole step in one call
    x, logits, rows, positions = forward(plan)

A program is the CPU's counterpart of a CUDA graph: a list of operators, with the addresses of
everything that they read and write. To record a program, the model is run once, and its operators
are listed instead of computed. Letters: T tokens, B requests, M blocks per table, H query heads, Hk
KV heads, D head size, S block size; for one layer, R rows, K inputs, N outputs.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from kernels import Batch
from model import ACTIVATIONS, GPT, Attention, Ops, RMSNorm
from ops.inputs import KnownRows, flat_inputs
from ops.packed import PANEL, PanelLinear, largest_activation, pack_weights
from ops.sampling import logprobs, sample_torch
from paged import Plan

# --------------------------------------------------------------------------------------------------
# The compiler

SOURCE = Path(__file__).with_name("cpu.c")
# no -ffast-math, even if CC contains it: it would change results, and before gcc 13 it would also
# disable denormal numbers in the whole process
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")  # if the CPU has vectors that wide


def c_compiler() -> list[str]:
    """
    Return the C compiler's command, $CC or cc, or [] if there is no compiler. Raises ValueError if
    $CC is not a command.
    """
    words = os.environ.get("CC", "cc")
    try:
        command = shlex.split(words)
    except ValueError as error:  # a quotation without its end
        raise ValueError(f"CC is {words!r} ({error}): correct it, or unset it") from None
    return command if command and shutil.which(command[0]) else []


def library(compiler: list[str]) -> Path:
    """
    Return the path of cpu.c's shared library in the user's cache. Unless the cache has a library
    for this source, compiler and CPU, compile one, which takes a second. Raises ValueError with the
    compiler's output if compilation fails.
    """
    command = [*compiler, *FLAGS]
    run = partial(subprocess.run, capture_output=True)
    # the predefined macros identify the compiler's version and the CPU's instruction set
    macros = run([*command, "-dM", "-E", "-x", "c", os.devnull]).stdout
    made_of = hashlib.sha256(SOURCE.read_bytes() + macros + shlex.join(command).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pagedgpt"
    path = cache / f"cpu-{made_of.hexdigest()[:16]}.so"
    if path.exists():
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=cache)
    except OSError as error:
        raise ValueError(
            f"the compiled ops/cpu.c cannot be stored ({error}): set XDG_CACHE_HOME to a writable "
            "folder with free space, or choose --attention torch"
        ) from error
    with folder:
        new = Path(folder.name) / path.name
        result = run([*command, SOURCE, "-o", new, "-lm"], text=True, errors="replace")
        if result.returncode or not new.exists():
            output = result.stderr.strip() or result.stdout.strip()
            raise ValueError(
                f"the C compiler failed ({shlex.join(compiler)}, exit status {result.returncode}): "
                "fix it, set CC to another compiler, or choose --attention torch. Its output:\n"
                + (output[:2000] or "(none: is this a compiler?)")
            )
        with open(new, "rb") as f:  # a library cut short, as by a power cut, would end the process
            os.fsync(f.fileno())
        new.rename(path)  # another process may have written it already; the files are identical
    return path


# --------------------------------------------------------------------------------------------------
# The operators

# in the same order as in cpu.c
KINDS = "embed rotation add_norm quantize heads exponentials log_softmax choose attend linear"
POINTERS = (
    "x y weight x_scale scale columns bias delta temperature lowest k_norm rotation kv tokens "
    "positions slots requests tables"
)
NUMBERS = "N K H Hk D S M k_to_v window panel activation gated rms wide late"


class Op(ctypes.Structure):
    """
    One operator, as declared in cpu.c. Pointers are set to tensors, which this object keeps alive.
    """

    _fields_ = [
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int64) for name in NUMBERS.split()),
        ("factor", ctypes.c_float),
        ("cap", ctypes.c_float),
    ]

    def __init__(self, kind: str, x: Tensor | None = None):
        super().__init__(KINDS.split().index(kind))
        self.tensors = []
        if x is not None:
            self.x = x
            self.K = x.shape[1]

    def __setattr__(self, name: str, value):
        if isinstance(value, Tensor):
            assert value.is_contiguous(), f"{name} must be contiguous"
            self.tensors.append(value)
            value = value.data_ptr()
        super().__setattr__(name, value)

    def set_weights(self, layer: nn.Module):
        """Set the weights to those of a `PanelLinear`, an `Int8Linear` or an embedding."""
        self.weight = layer.weight
        self.scale = getattr(layer, "scale", None)
        self.columns = getattr(layer, "columns", None)
        self.panel = PANEL if layer.weight.ndim == 3 else 1

    def set_norm(self, norm: nn.Module):
        self.weight = norm.weight
        self.bias = norm.bias
        self.factor = norm.eps
        self.rms = isinstance(norm, RMSNorm)

    def set_pool(self, attn: Attention, kv: Tensor):
        """
        Set the numbers of heads, and a layer's pool [2, num_blocks + 1, Hk, S, D], in which K is
        stored as [.., D, S].
        """
        _, _, self.Hk, self.S, self.D = kv.shape
        self.H = attn.H
        self.kv = kv
        self.k_to_v = kv.stride(0)


class CpuKernels:
    """
    The compiled library and its thread pool. Operators have the same names as in `Ops`. Raises
    ValueError if the library cannot be built or loaded.
    """

    def __init__(self, compiler: list[str], threads: int | None = None):
        path = library(compiler)
        try:
            self.library = ctypes.CDLL(str(path))
        except OSError as error:
            raise ValueError(
                f"the compiled ops/cpu.c cannot be loaded ({error}): remove {path}, set "
                "XDG_CACHE_HOME to a folder that may hold programs, or choose --attention torch"
            ) from error
        self.library.open_pool.restype = ctypes.c_void_p
        self.library.run.argtypes = 2 * [ctypes.c_void_p] + 2 * [ctypes.c_int64]
        self.pool = self.library.open_pool(threads or torch.get_num_threads())
        weakref.finalize(self, self.library.close_pool, ctypes.c_void_p(self.pool))
        self.listed: list | None = None  # operators recorded so far; None if not recording

    def table(self, other: Ops) -> Ops:
        """Return a copy of the table `other` that uses these operators."""
        exp = partial(self.unary, "exponentials")
        log_softmax = partial(self.unary, "log_softmax")
        return other._replace(
            name="cpu",
            embed=self.embed,
            rotation=self.rotation,
            add_norm=self.add_norm,
            norm=self.norm,
            project_qkv=self.project_qkv,
            attend=self.attend,
            linear=self.linear,
            head=self.linear,
            plan_attention=self.plan_attention,
            sample=partial(sample_torch, choose=self.choose, exp=exp),
            logprobs=partial(logprobs, log_softmax=log_softmax),
            pack_weights=partial(pack_weights, layer=PanelLinear),
            program=self.program,
            is_deterministic=True,
        )

    def result(self, role: str, R: int, width: int, dtype=torch.float32) -> Tensor:
        """
        Return memory for a result [R, width]. While a program is being recorded, all results with
        the same role and width share a buffer, because each is read for the last time before the
        next is written.
        """
        new = torch.empty(R, width, dtype=dtype)
        return new if self.listed is None else self.buffers.setdefault((role, width), new)

    def compute(self, op: Op, y: Tensor) -> Tensor:
        """Compute an operator for the rows of y or, while recording, list it. Returns y."""
        op.y = y
        if self.listed is None:
            self.library.run(self.pool, ctypes.byref(op), 1, len(y))
        else:
            self.listed.append(op)
        return y

    def plan_attention(self, batch: Batch, H: int, kv: Tensor, window: int = 0) -> Tensor:
        """Return the index of each token's request, and so of its block table, as [T] int64."""
        return torch.repeat_interleave(torch.tensor(batch.query_lens_host))

    def embed(
        self, tokens: Tensor, positions: Tensor, wte: nn.Module, wpe: nn.Module | None, scale: float
    ) -> Tensor:
        op = Op("embed")
        op.set_weights(wte)
        op.K = wte.weight.shape[1]
        op.tokens = tokens
        op.factor = scale
        if wpe is not None:
            op.positions = positions
            op.bias = wpe.weight
        return self.compute(op, self.result("x", len(tokens), op.K))

    def rotation(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """Return [T, D]: D / 2 cosines, then D / 2 sines."""
        op = Op("rotation")
        op.D = 2 * len(frequencies)
        op.positions = positions
        op.weight = frequencies
        return self.compute(op, torch.empty(len(positions), op.D))

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        op = Op("add_norm", x)
        op.delta = delta
        y = x
        if not isinstance(norm, nn.Identity):
            op.set_norm(norm)
            y = self.result("norm", *x.shape)
        return x, self.compute(op, y)

    def norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        op = Op("add_norm", x)
        op.set_norm(norm)
        return self.compute(op, x)

    def project_qkv(self, y: Tensor, attn: Attention, kv: Tensor, batch: Batch):
        """
        Return queries, keys and values in one tensor [T, (H + 2 Hk) D], as `attend` takes them, and
        also return the pool.
        """
        qkv = self.linear(y, attn.c_attn)
        op = Op("heads", qkv)
        op.set_pool(attn, kv)
        op.slots = batch.slot_mapping
        op.rotation = batch.rotations.get(attn.rope)
        if attn.q_norm is not None:
            op.wide = len(attn.q_norm.weight) > attn.D
            op.late = attn.norms_late
            op.weight = attn.q_norm.weight
            op.k_norm = attn.k_norm.weight
            op.factor = attn.q_norm.eps
        return self.compute(op, qkv), kv  # in place

    def attend(self, qkv: Tensor, kv: Tensor, attn: Attention, batch: Batch) -> Tensor:
        op = Op("attend", qkv)
        op.set_pool(attn, kv)
        op.positions = batch.positions
        op.requests = batch.attention_plans[attn.window]
        tables = batch.block_tables.contiguous()
        op.tables = tables
        op.M = tables.shape[1]
        op.window = attn.window
        op.factor = attn.scale
        op.cap = attn.softcap
        y = self.compute(op, self.result("attend", len(qkv), attn.H * attn.D))
        return y.unflatten(1, (attn.H, attn.D))

    def linear(
        self, x: Tensor, layer, activation=None, gated=False, partial_sums=False, softcap=0.0
    ) -> Tensor:
        """
        Multiply x [R, K] by the layer's weights. If the weights are integers, x is quantized first.
        """
        op = Op("linear", x)
        op.N = layer.N
        op.set_weights(layer)
        op.bias = layer.bias
        op.activation = [None, *ACTIVATIONS].index(activation)
        op.gated = gated
        op.cap = softcap
        if op.scale:
            op.x, op.x_scale = self.quantized(x, layer.columns)
        role = "wide" if activation else "delta"
        y = self.result(role, len(x), op.N)
        return self.compute(op, y)

    def quantized(self, x: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """
        Return x [R, K] times columns [K], rounded to 16-bit integers, and each row's step size.
        """
        op = Op("quantize", x)
        op.columns = columns
        step = self.result("step", len(x), 1)
        op.x_scale = step
        op.factor = largest_activation(op.K)
        y = self.result("integers", *x.shape, torch.int16)
        return self.compute(op, y), step

    def choose(self, scores: Tensor, temperature, lowest, allowed, *key: Tensor) -> Tensor:
        """Like sampling.choose, but takes a thirtieth of the time."""
        op = Op("choose", scores.contiguous())
        op.N = 32  # a score takes as long as about this many products, which `run` counts
        op.temperature = temperature
        op.lowest = lowest
        if allowed is not None:
            op.tables = allowed
            op.M = allowed.shape[1]
        op.tokens, op.positions, op.slots = (part.long() for part in key)
        y = torch.empty(len(scores), dtype=torch.int64)
        return self.compute(op, y)

    def unary(self, kind: str, x: Tensor) -> Tensor:
        """Return e^x ("exponentials") or each row's log-softmax ("log_softmax") for x [R, K]."""
        x = x.contiguous()
        op = Op(kind, x)
        op.N = 32  # as in `choose`
        return self.compute(op, torch.empty_like(x))

    # -- a step ------------------------------------------------------------------------------------

    def program(self, model: GPT, ops: Ops, kv: Tensor, known: KnownRows, T: int) -> Callable:
        """
        Return a function forward(plan) that runs the model for steps of at most T tokens. It
        returns the hidden states [n, width] of all tokens and, for `plan.sampled`, the logits, the
        rows, and the positions of the new tokens. The next step overwrites these results.
        """
        columns = torch.zeros(4, T, dtype=torch.int64)
        tokens, positions, slots, rows = columns
        none = torch.empty(0)
        tables = known.block_tables
        batch = Batch(tokens, positions, slots, none, none, tables, none, 0, [], [], ops)
        batch.attention_plans = dict.fromkeys(model.config.windows, rows)
        self.listed = []
        self.buffers = {}  # (role, width) -> buffer for results
        x = model.hidden(batch, kv)
        before_head = len(self.listed)
        logits = model.logits(x[: len(tables)], ops)  # for steps that only decode
        kept = self.listed  # also keeps alive the tensors that the operators point to
        self.listed = None
        program = (Op * len(kept))(*kept)

        def forward(plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            inputs, last = flat_inputs(plan, known.S, known.last_token.numpy())
            n = len(inputs)
            columns.numpy().T[:n] = inputs
            if plan.chunks or n > len(logits):
                self.library.run(self.pool, program, before_head, n)
                return x[:n], model.logits(x[last], ops), rows[last], positions[last] + 1
            self.library.run(self.pool, program, len(kept), n)
            return x[:n], logits[:n], rows[:n], positions[:n] + 1

        return forward
