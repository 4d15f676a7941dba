"""
The operators of cpu.c: built with the C compiler when they are first used, and called.

    machine = CpuKernels(threads=2)
    x, y = machine.add_norm(x, delta, norm)       # at once: each has the signature of its twin in
                                                  # model.py
    hidden = machine.record(model, kv, ops, T, B, M)     # or a whole step as one call
    x = hidden(batch)

What a CUDA graph is to a GPU, a recorded step is to a CPU: a list of operators, with the addresses
of all that they read and write. Model and operators are those of model.py; they are only asked
once. Letters: T tokens, B requests, M blocks per table, H query heads, Hk KV heads, D head size, S
block size; of a layer, R rows, K inputs, N outputs.
"""

import ctypes
import hashlib
import mmap
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
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from kernels import Batch
from model import ACTIVATIONS, GPT, Attention, Ops, RMSNorm
from ops.packed import Int8Linear, largest_activation, quantized_if_asked, shared_copy

# --------------------------------------------------------------------------------------------------
# The compiler

SOURCE = Path(__file__).with_name("cpu.c")
# no -ffast-math: with gcc before 13 it would switch off denormal numbers in the whole process
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")  # where the CPU has such


def c_compiler() -> list[str]:
    """The command of the C compiler, $CC or cc; [] if there is none."""
    command = shlex.split(os.environ.get("CC", "cc"))
    return command if command and shutil.which(command[0]) else []


def library(compiler: list[str]) -> Path:
    """
    cpu.c as a shared library, in the user's cache: compiled if none of this source, compiler and
    CPU is there, which takes a second. Raises ValueError with the compiler's words if it fails.
    """
    command = [*compiler, *FLAGS]
    run = partial(subprocess.run, capture_output=True)
    # the macros that it defines tell its version and the CPU's instructions
    macros = run([*command, "-dM", "-E", "-x", "c", os.devnull]).stdout
    made_of = hashlib.sha256(SOURCE.read_bytes() + macros + shlex.join(command).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pagedgpt"
    path = cache / f"cpu-{made_of.hexdigest()[:16]}.so"
    if path.exists():
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"no room for the compiled ops/cpu.c ({error}): let XDG_CACHE_HOME name a folder with "
            "room to write, or choose --attention torch"
        ) from error
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        new = Path(folder) / path.name
        result = run([*command, SOURCE, "-o", new, "-lm"], text=True)
        if result.returncode:
            raise ValueError(
                f"the C compiler failed ({shlex.join(compiler)}): mend it, let CC name another, or "
                f"choose --attention torch. Its words:\n{result.stderr.strip()}"
            )
        new.rename(path)  # another process may have done so: they are the same
    return path


# --------------------------------------------------------------------------------------------------
# The weights

PANEL = 32  # outputs whose weights are kept together, as in cpu.c


def padded(rows: Tensor, parts: int) -> Tensor:
    """Rows [parts * N, ..] with zeros behind each part, up to a whole panel."""
    rows = rows.detach().unflatten(0, (parts, -1))
    missing = -rows.shape[1] % PANEL
    if missing:
        zeros = rows.new_zeros(parts, missing, *rows.shape[2:])
        rows = torch.cat([rows, zeros], 1)
    return rows.flatten(0, 1)


class PanelLinear(nn.Module):
    """
    A layer as cpu.c takes it: weights in panels of 32 outputs, fp32 [N / 32, K, 32] or int8 [N / 32
    * 32, K]. `parts`: 2 for a gated one, which has twice as many weights as outputs.
    """

    def __init__(self, layer: nn.Linear | Int8Linear, parts: int = 1):
        super().__init__()
        weight = padded(layer.weight, parts)
        self.N = layer.out_features // parts
        self.scale = None
        if weight.dtype == torch.int8:
            self.scale = padded(layer.scale, parts)
        else:
            weight = weight.float().unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
        self.weight = weight
        self.bias = None if layer.bias is None else layer.bias.detach().float()


def packed_for_kernels(model: GPT, quantize: str = "none") -> GPT:
    """A copy of the model with `PanelLinear` for its linear layers, quantized if asked for."""
    model = shared_copy(quantized_if_asked(model, quantize))
    for block in model.h:
        attn = block.attn
        mlp = block.mlp
        attn.c_attn = PanelLinear(attn.c_attn)
        attn.c_proj = PanelLinear(attn.c_proj)
        mlp.c_fc = PanelLinear(mlp.c_fc, parts=2 if mlp.gated else 1)
        mlp.c_proj = PanelLinear(mlp.c_proj)
    model.lm_head = PanelLinear(model.lm_head)
    if model.config.tied:
        model.wte = model.lm_head
    move_to_huge_pages([layer for layer in model.modules() if isinstance(layer, PanelLinear)])
    return model.float()


def move_to_huge_pages(layers: list[PanelLinear]):
    """
    Put their weights one behind the other into pages of 2 MB, if the system gives such: a step
    reads them all, and finds the next page sooner.
    """
    room = [-(-layer.weight.nbytes // 64) * 64 for layer in layers]
    memory = mmap.mmap(-1, sum(room), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    at = 0
    for layer, size in zip(layers, room, strict=True):
        old = layer.weight
        new = torch.frombuffer(memory, dtype=old.dtype, count=old.numel(), offset=at)
        layer.weight = new.view(old.shape).copy_(old)
        at += size


# --------------------------------------------------------------------------------------------------
# The operators

KINDS = ("embed", "rotation", "add_norm", "round", "heads", "attend", "linear")  # as OPERATORS
POINTERS = (
    "x y weight x_scale scale bias delta k_norm rotation kv tokens positions slots requests tables"
)
NUMBERS = "N K H Hk D S M k_to_v window panel activation gated rms"


class Op(ctypes.Structure):
    """One operator, as cpu.c declares it. Pointers are given as tensors, which it keeps."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int64) for name in NUMBERS.split()),
        ("factor", ctypes.c_double),
        ("cap", ctypes.c_double),
    ]

    def __init__(self, kind: str):
        super().__init__(KINDS.index(kind))
        self.tensors = []

    def __setattr__(self, name: str, value):
        if isinstance(value, Tensor):
            assert value.is_contiguous(), f"{name} must be contiguous"
            self.tensors.append(value)
            value = value.data_ptr()
        super().__setattr__(name, value)

    def set_weights(self, layer: nn.Module):
        """Of a `PanelLinear` or an embedding."""
        self.weight = layer.weight
        self.scale = getattr(layer, "scale", None)
        self.panel = PANEL if layer.weight.ndim == 3 else 1

    def set_pool(self, attn: Attention, kv: Tensor):
        """Heads, and a layer's pool [2, num_blocks + 1, Hk, S, D]."""
        _, _, self.Hk, self.S, self.D = kv.shape
        self.H = attn.H
        self.kv = kv
        self.k_to_v = kv.stride(0)


class Tables(NamedTuple):
    """What batch.prepared holds for each window."""

    tables: Tensor  # [B, M] int32 block tables
    requests: Tensor  # [T] int64: whose table a token has


def prepare(batch: Batch, H: int, kv: Tensor, window: int = 0) -> Tables:
    lens = torch.tensor(batch.query_lens_host)
    requests = torch.arange(len(lens))
    if len(lens) < len(batch.tokens):
        requests = requests.repeat_interleave(lens)
    return Tables(batch.block_tables.contiguous(), requests)


class CpuKernels:
    """The library and its pool of threads. Raises ValueError if it cannot be built."""

    def __init__(self, compiler: list[str], threads: int | None = None):
        self.library = ctypes.CDLL(str(library(compiler)))
        self.library.open_pool.restype = ctypes.c_void_p
        self.library.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p] + 2 * [ctypes.c_int64]
        threads = threads or torch.get_num_threads()
        self.pool = self.library.open_pool(threads)
        weakref.finalize(self, self.library.close_pool, ctypes.c_void_p(self.pool))
        self.recorded: list | None = None  # operators, while a step is recorded
        self.buffers: dict[tuple, Tensor] = {}  # of the recorded step

    def table(self, other: Ops) -> Ops:
        """The table of these operators, and for what they do not do those of another."""
        return other._replace(
            name="cpu",
            embed=self.embed,
            rotation=self.rotation,
            add_norm=self.add_norm,
            project_qkv=self.project_qkv,
            attend=self.attend,
            linear=self.linear,
            head=self.head,
            prepare=prepare,
            pack_weights=packed_for_kernels,
            record=self.record,
        )

    def compute(self, op: Op, R: int):
        """Compute an operator for R rows, or record it."""
        if self.recorded is None:
            self.library.run(self.pool, ctypes.byref(op), 1, R)
        else:
            self.recorded.append(op)

    def rows(self, role: str, R: int, width: int, dtype=torch.float32) -> Tensor:
        """
        Room for a result [R, width]. In a recorded step all results of one role and width share
        theirs: none is read again once the next is written.
        """
        new = torch.empty(R, width, dtype=dtype)
        return new if self.recorded is None else self.buffers.setdefault((role, width), new)

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
        x = self.rows("x", len(tokens), op.K)
        op.y = x
        self.compute(op, len(tokens))
        return x

    def rotation(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """[T, D]: D / 2 cosines, then as many sines."""
        T = len(positions)
        op = Op("rotation")
        op.D = 2 * len(frequencies)
        op.positions = positions
        op.weight = frequencies
        y = torch.empty(T, op.D)
        op.y = y
        self.compute(op, T)
        return y

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        R, K = x.shape
        op = Op("add_norm")
        op.K = K
        op.x = x
        op.delta = delta
        op.weight = norm.weight
        op.bias = norm.bias
        op.factor = norm.eps
        op.rms = isinstance(norm, RMSNorm)
        y = self.rows("norm", R, K)
        op.y = y
        self.compute(op, R)
        return x, y

    def project_qkv(self, y: Tensor, attn: Attention, kv: Tensor, batch: Batch):
        """Queries, keys and values [T, (H + 2 Hk) D], which `attend` takes; and the pool."""
        qkv = self.product("qkv", y, attn.c_attn)
        op = Op("heads")
        op.set_pool(attn, kv)
        op.x = qkv
        op.slots = batch.slot_mapping
        op.rotation = batch.rotations.get(attn.window)
        if attn.q_norm is not None:
            op.weight = attn.q_norm.weight
            op.k_norm = attn.k_norm.weight
            op.factor = attn.q_norm.eps
        self.compute(op, len(qkv))
        return qkv, kv

    def attend(self, qkv: Tensor, kv: Tensor, attn: Attention, batch: Batch) -> Tensor:
        T = len(qkv)
        tables, requests = batch.prepared[attn.window]
        op = Op("attend")
        op.set_pool(attn, kv)
        op.x = qkv
        op.positions = batch.positions
        op.requests = requests
        op.tables = tables
        op.M = tables.shape[1]
        op.window = attn.window
        op.factor = attn.scale
        op.cap = attn.softcap
        y = self.rows("attend", T, attn.H * attn.D)
        op.y = y
        self.compute(op, T)
        return y.view(T, attn.H, attn.D)

    def linear(self, x: Tensor, layer, activation=None, gated=False, partial_sums=False) -> Tensor:
        role = "wide" if activation else "delta"
        return self.product(role, x, layer, activation, gated)

    def head(self, x: Tensor, layer, softcap: float = 0.0) -> Tensor:
        return self.product("logits", x.contiguous(), layer, softcap=softcap)

    def product(
        self, role: str, x: Tensor, layer, activation=None, gated=False, softcap=0.0
    ) -> Tensor:
        """x [R, K] times the layer's weights, rounded before if these are integers."""
        R, K = x.shape
        op = Op("linear")
        op.set_weights(layer)
        op.bias = layer.bias
        op.N = layer.N
        op.K = K
        op.gated = gated
        op.cap = softcap
        if activation:
            op.activation = 1 + list(ACTIVATIONS).index(activation)
        op.x = x
        if op.scale:
            op.x, op.x_scale = self.rounded(x)
        y = self.rows(role, R, op.N)
        op.y = y
        self.compute(op, R)
        return y

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, K] as integers of 16 bits, and the size of a step of each row."""
        R, K = x.shape
        integers = self.rows("integers", R, K, torch.int16)
        step = self.rows("step", R, 1)
        op = Op("round")
        op.K = K
        op.x = x
        op.y = integers
        op.x_scale = step
        op.factor = largest_activation(K)
        self.compute(op, R)
        return integers, step

    # -- a step ------------------------------------------------------------------------------------

    def record(self, model: GPT, kv: Tensor, ops: Ops, T: int, B: int, M: int) -> Callable:
        """
        The model's `hidden` for steps of at most T tokens and B requests with M blocks, as
        hidden(batch) -> x [T, width], which the next step overwrites.
        """
        tokens, positions, slots, requests = torch.zeros(4, T, dtype=torch.int64).unbind()
        tables = torch.zeros(B, M, dtype=torch.int32)
        none = torch.empty(0)
        batch = Batch(tokens, positions, slots, none, none, tables, none, 0, [], [], ops)
        batch.prepared = {window: Tables(tables, requests) for window in model.config.windows}
        self.recorded = []
        self.buffers = {}
        x = model.hidden(batch, kv)
        kept = self.recorded  # and with it the tensors that the operators have addresses of
        self.recorded = None
        program = (Op * len(kept))(*kept)

        def hidden(batch: Batch) -> Tensor:
            plan = next(iter(batch.prepared.values()))
            n = len(batch.tokens)
            tokens[:n] = batch.tokens
            positions[:n] = batch.positions
            slots[:n] = batch.slot_mapping
            requests[:n] = plan.requests
            b, m = plan.tables.shape
            tables[:b, :m] = plan.tables
            self.library.run(self.pool, program, len(kept), n)
            return x[:n]

        return hidden
