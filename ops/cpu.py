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
FLAGS = (
    "-std=gnu11 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math "
    "-shared -fPIC -pthread"
).split()
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
    return model.float()


# --------------------------------------------------------------------------------------------------
# The operators

KINDS = ("embed", "rotation", "add_norm", "round", "heads", "attend", "linear")  # as OPERATORS
POINTERS = (
    "x y weight x_scale scale bias delta k_norm rotation kv tokens positions slots requests tables"
)
NUMBERS = "N K H Hk D S M k_to_v window panel activation gated rms"


class Op(ctypes.Structure):
    """One operator, as cpu.c declares it."""

    _fields_ = [
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int64) for name in NUMBERS.split()),
        ("factor", ctypes.c_double),
        ("cap", ctypes.c_double),
    ]


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

    def compute(self, kind: str, R: int, **fields):
        """Compute an operator for R rows, or record it. Fields are those of `Op`."""
        op = Op(kind=KINDS.index(kind))
        for name, value in fields.items():
            if isinstance(value, Tensor):
                assert value.is_contiguous(), f"{name} must be contiguous"
                value = value.data_ptr()
            setattr(op, name, value)
        if self.recorded is None:
            self.library.run(self.pool, ctypes.byref(op), 1, R)
        else:
            self.recorded.append((op, fields))

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
        R = len(tokens)
        K = wte.weight.shape[1]
        x = self.rows("x", R, K)
        of_token = {"tokens": tokens, **weight_fields(wte)}
        of_position = {"positions": positions, "bias": None if wpe is None else wpe.weight}
        self.compute("embed", R, **of_token, **of_position, y=x, K=K, factor=scale)
        return x

    def rotation(self, positions: Tensor, frequencies: Tensor) -> Tensor:
        """[T, D]: D / 2 cosines, then as many sines."""
        R = len(positions)
        D = 2 * len(frequencies)
        y = torch.empty(R, D)
        self.compute("rotation", R, positions=positions, weight=frequencies, y=y, D=D)
        return y

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        R, K = x.shape
        y = self.rows("norm", R, K)
        kind = {"factor": norm.eps, "rms": isinstance(norm, RMSNorm)}
        of_norm = {"weight": norm.weight, "bias": norm.bias}
        self.compute("add_norm", R, x=x, delta=delta, y=y, K=K, **of_norm, **kind)
        return x, y

    def project_qkv(self, y: Tensor, attn: Attention, kv: Tensor, batch: Batch):
        """q is what `attend` takes it for: queries, keys and values [T, (H + 2 Hk) D]."""
        qkv = self.product("qkv", y, attn.c_attn)
        norms = {}
        if attn.q_norm is not None:
            norms = {"weight": attn.q_norm.weight, "k_norm": attn.k_norm.weight}
            norms["factor"] = attn.q_norm.eps
        rotation = batch.rotations.get(attn.window)
        place = {"slots": batch.slot_mapping} | pool_fields(attn, kv)
        self.compute("heads", len(y), x=qkv, rotation=rotation, **norms, **place)
        return qkv, kv

    def attend(self, qkv: Tensor, kv: Tensor, attn: Attention, batch: Batch) -> Tensor:
        T = len(qkv)
        tables, requests = batch.prepared[attn.window]
        y = self.rows("attend", T, attn.H * attn.D)
        seen = {"positions": batch.positions, "window": attn.window}
        seen |= {"requests": requests, "tables": tables, "M": tables.shape[1]}
        scores = {"factor": attn.scale, "cap": attn.softcap}
        self.compute("attend", T, x=qkv, y=y, **seen, **scores, **pool_fields(attn, kv))
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
        N = layer.N
        y = self.rows(role, R, N)
        x_scale = None
        if layer.weight.dtype == torch.int8:
            integers = self.rows("integers", R, K, torch.int16)
            x_scale = self.rows("x_scale", R, 1)
            limit = largest_activation(K)
            self.compute("round", R, x=x, y=integers, x_scale=x_scale, K=K, factor=limit)
            x = integers
        of_layer = {"bias": layer.bias, "N": N, "K": K, **weight_fields(layer)}
        end = {"activation": 0, "gated": gated, "cap": softcap}
        if activation:
            end["activation"] = 1 + list(ACTIVATIONS).index(activation)
        self.compute("linear", R, x=x, x_scale=x_scale, y=y, **of_layer, **end)
        return y

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
        program = (Op * len(kept))(*(op for op, _ in kept))

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


def weight_fields(layer: nn.Module) -> dict:
    """Weights, as `Op` has them, of `PanelLinear` or an embedding."""
    panel = PANEL if layer.weight.ndim == 3 else 1
    return {"weight": layer.weight, "scale": getattr(layer, "scale", None), "panel": panel}


def pool_fields(attn: Attention, kv: Tensor) -> dict:
    """A layer's pool [2, num_blocks + 1, Hk, S, D], as `Op` has it."""
    S = kv.shape[3]
    return {"kv": kv, "k_to_v": kv.stride(0), "H": attn.H, "Hk": attn.Hk, "D": attn.D, "S": S}
