"""
The operators of a CPU. First those of cpu.c: each is compared with torch, and must give the same
bits whatever shares the batch. Then a step as a program, the build of the file, and threads. Last,
what replaces cpu.c in bf16 and without a compiler.
"""

import ctypes
import errno
import mmap
import os
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from judging import dense, shortfall
from test_sampling import check_tokens
from torch import Tensor

from checkpoint import serving_dtype
from engine.engine import Engine
from interleaved import flat_batch
from kernels import Batch
from model import GPT, GPTConfig, Ops, RMSNorm, Rope
from ops import cpu, packed
from ops.choice import TORCH_OPS, choose_ops
from ops.packed import (
    LARGEST,
    Arena,
    Bf16Linear,
    Int8Embedding,
    Int8Linear,
    can_pack,
    largest_activation,
)
from paged import Plan, Request
from params import SamplingParams, Settings
from test_paged import prompt, raises, trained_model

ROOT = Path(__file__).parents[2]
COMPILER = cpu.c_compiler()
SHARING = [*COMPILER, "-DWORTH_SHARING=0"]  # threads share even the smallest work
needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs a C compiler")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
# another compiler or target CPU, available if the machine has this macro
CLANG = ["clang"] if shutil.which("clang") else [sys.executable, "-m", "ziglang", "cc"]
BUILDS = {"native": "", "gcc": "", "clang": ""}
BUILDS |= {"x86-64-v4": "__AVX512VL__", "haswell": "__AVX2__", "x86-64-v2": "__SSE4_2__"}


@cache
def macros() -> str:
    """Return the macros that the compiler defines for this CPU."""
    command = [*COMPILER, "-march=native", "-dM", "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, text=True).stdout


@cache
def machine(threads: int = 2, build: str = "native") -> Ops:
    """Return the operators of cpu.c, built this way."""
    if BUILDS[build] not in macros():
        pytest.skip(f"needs a CPU with {build}")
    compiler = SHARING
    flags = cpu.FLAGS
    if BUILDS[build]:
        flags = [flag.replace("native", build) for flag in flags]
    elif build == "clang":
        compiler = [*CLANG, SHARING[-1]]
    elif build == "gcc":
        if not shutil.which(build):
            pytest.skip("needs gcc")
        compiler = [build, SHARING[-1]]
    with patch.object(cpu, "FLAGS", flags):
        return cpu.CpuKernels(compiler, threads).table(TORCH_OPS)


# --------------------------------------------------------------------------------------------------
# The cases: models of odd sizes, and every operator of them

EVERYONE = list(range(100))  # rows, each the last token of a different request
CONTEXT = 71
POSITIONS = [37 * r % CONTEXT for r in EVERYONE]

CASES = tomllib.loads("""
[one]
sizes = {block_size = 16, n_embd = 3, n_head = 1, head_size = 8, n_inner = 1, vocab_size = 2}
kind = {}
[gelu_new]
sizes = {block_size = 3, n_embd = 48, n_head = 4}
kind = {}
[gelu]
sizes = {block_size = 4, n_embd = 20, n_head = 5, head_size = 7, n_inner = 20}
kind = {activation = "gelu", windows = [7], bias = false}
[deep]
sizes = {block_size = 16, n_embd = 40, n_head = 5, n_inner = 8200}
kind = {activation = "gelu"}
[relu]
sizes = {block_size = 1, n_embd = 799, n_head = 2, head_size = 128, n_inner = 339}
kind = {activation = "relu", windows = [1], mlp_bias = false}
[relu2]
sizes = {block_size = 64, n_embd = 130, n_head = 16, n_kv_head = 4, head_size = 34}
kind = {activation = "relu2", theta = 5000.0}
[silu]
sizes = {block_size = 16, n_embd = 339, n_head = 3, head_size = 256, n_inner = 50}
kind = {norm = "rms", activation = "silu", bias = false}
[gated]
sizes = {block_size = 16, n_embd = 576, n_head = 9, n_kv_head = 3, n_inner = 1536}
kind = {norm = "rms", gated = true, activation = "silu", bias = false, vocab_size = 1030}
[capped]
sizes = {block_size = 3, n_embd = 65, n_head = 4, n_kv_head = 1, head_size = 20, n_inner = 33}
kind = {norm = "rms", gated = true, windows = [19], theta = 3000.0, embedding_scale = 8.0, \
attention_softcap = 3.0, logit_softcap = 5.0}
[qk]
sizes = {block_size = 64, n_embd = 77, n_head = 6, n_kv_head = 3, head_size = 66, n_inner = 515}
kind = {norm = "rms", qk_norm = true, gated = true, activation = "gelu", windows = [40], \
theta = 9000.0}
""")
GENERAL = {
    "vocab_size": 101,
    "n_layer": 1,
    "context_length": CONTEXT,
    "norm_epsilon": 1e-3,
}
each_build = pytest.mark.parametrize("build", BUILDS)
each_case = pytest.mark.parametrize("case", CASES)
each_quantize = pytest.mark.parametrize("quantize", ["none", "int8"])


@cache
def numbers(width: int) -> Tensor:
    """Return a row per request, with very different magnitudes; one row is zero."""
    x = torch.randn(len(EVERYONE), width, generator=torch.Generator().manual_seed(width))
    x *= 10.0 ** (torch.arange(len(x)) % 5 - 2)[:, None]
    x[1] = 0
    return x


@cache
def model_of(case: str) -> GPT:
    """
    Return a model whose weights all matter: norms and biases far from one and zero, outputs of
    different size.
    """
    fields = CASES[case]["sizes"] | CASES[case]["kind"]
    del fields["block_size"]
    theta = fields.pop("theta", None)
    config = GPTConfig(**GENERAL | fields)
    if theta:
        config.rope = {config.windows[0]: Rope(theta)}
    model = GPT(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        weight.normal_(generator=generator)
        if weight.ndim == 1:
            weight += 1
        else:
            weight *= 1.5 / weight.shape[1] ** 0.5
            if "c_attn" not in name:
                weight[::2] *= 10
                weight[5:6] = 0
    return model


def in_fp64(model: GPT) -> GPT:
    """Return a copy that rounds nothing. Products of integers stay fp32, and count as exact."""
    exact = deepcopy(model).double()
    for module, original in zip(exact.modules(), model.modules(), strict=True):
        if isinstance(module, RMSNorm):
            weight = module.weight
            module.forward = partial(
                F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=module.eps
            )
        elif isinstance(module, Int8Linear):
            module.forward = lambda x, product=original: product(x.float()).double()
        elif isinstance(module, Int8Embedding):
            module.forward = lambda tokens, rows=original: rows(tokens).double()
    return exact


@cache
def weights_for(ops: Ops, case: str, quantize: str, is_exact: bool) -> GPT:
    model = ops.pack_weights(model_of(case), quantize)
    return in_fp64(model) if is_exact else model


@cache
def block_tables(S: int) -> tuple[Tensor, int]:
    """Return the block table of each request [100, M], permuted; and the padding block."""
    M = -(-CONTEXT // S)
    count = len(EVERYONE) * M
    blocks = torch.randperm(count, generator=torch.Generator().manual_seed(S))
    return blocks.view(-1, M).int(), count


def slots_of(requests: Tensor, positions: Tensor, S: int) -> Tensor:
    tables, _ = block_tables(S)
    return tables[requests, positions // S].long() * S + positions % S


@cache
def pool_of(Hk: int, D: int, S: int, window: int) -> Tensor:
    """
    Return one layer's pool, with K and V of the tokens before each request's row, from the block
    where its window begins. All other slots are NaN.
    """
    _, padding_block = block_tables(S)
    pool = torch.full((2, padding_block + 1, Hk, S, D), torch.nan)
    ends = torch.tensor(POSITIONS)[:, None]
    positions = torch.arange(CONTEXT)
    is_seen = positions < ends
    if window:
        is_seen &= positions >= (ends - window + 1) // S * S
    slots = slots_of(*is_seen.nonzero(as_tuple=True), S)
    generator = torch.Generator().manual_seed(D)
    seen = torch.randn(len(slots), 2, Hk, D, generator=generator)
    pool[:, slots // S, :, slots % S] = seen
    return pool


def step(ops: Ops, model: GPT, pool: Tensor, rows: list[int]) -> Batch:
    """Return a step in which each of these requests decodes a token."""
    config = model.config
    tables, padding_block = block_tables(pool.shape[-2])
    requests = []
    for row in rows:
        tokens = [(31 * row + 7) % config.vocab_size] * (POSITIONS[row] + 1)
        request = Request(row, tokens, 1, block_table=tables[row].tolist())
        request.num_filled_slots = POSITIONS[row]
        requests.append(request)
    shape = SimpleNamespace(kv=pool[None], padding_block=padding_block)
    batch = flat_batch(Plan(decodes=requests), model, shape)
    batch.ops = ops
    batch.attention_plans = {
        w: ops.plan_attention(batch, config.n_head, pool, w) for w in config.windows
    }
    batch.rotations = {}
    return batch


def results(ops: Ops, case: str, quantize: str, rows: list[int], is_exact: bool = False) -> dict:
    """
    Return what each operator computes for these rows, one of which has a NaN: tensors with one row
    per request, and a large number in place of NaN.
    """
    S = CASES[case]["sizes"]["block_size"]
    model = weights_for(ops, case, quantize, is_exact)
    config = model.config
    window = config.windows[0]
    dtype = torch.float64 if is_exact else torch.float32
    pool = pool_of(config.n_kv_head, config.head_size, S, window).to(dtype, copy=True)
    if ops.name == "cpu":
        pool[0] = pool[0].mT.reshape(pool[0].shape)  # K as [.., D, S]
    batch = step(ops, model, pool, rows)
    attn = model.h[0].attn
    mlp = model.h[0].mlp

    def x(width: int) -> Tensor:
        own = numbers(width).to(dtype, copy=True)
        own[2, -1] = torch.nan
        return own[rows]

    y = {}
    if config.rope:
        turns = ops.rotation(batch.positions, getattr(model, f"frequencies_{window}"))
        batch.rotations[window] = turns
        y["rotation"] = turns
        if isinstance(turns, tuple):  # torch's form
            y["rotation"] = torch.cat(turns, -1)
    C = config.n_embd
    places = (batch.tokens, batch.positions, model.wte, model.wpe)
    y["embed"] = ops.embed(*places, config.embedding_scale)
    y["first norm"] = ops.add_norm(x(C), None, model.ln_f)[1]
    delta = x(C).flip(1)
    y["sum"], y["norm"] = ops.add_norm(x(C), delta, model.h[0].ln_1)
    even = F.layer_norm(x(C), (C,))
    q, pool = ops.project_qkv(even, attn, pool, batch)
    y["attend"] = ops.attend(q, pool, attn, batch)
    slots = batch.slot_mapping
    if ops.name == "cpu":
        pool[0] = pool[0].view(pool[0].mT.shape).mT.clone()
    y["k, v"] = pool[:, slots // S, :, slots % S]
    y["back"] = ops.linear(x(config.n_head * config.head_size), attn.c_proj)
    y["wide"] = ops.linear(x(C), mlp.c_fc, config.activation, config.gated)
    y["narrow"] = ops.linear(x(config.n_inner), mlp.c_proj)
    y["logits"] = ops.head(x(C), model.lm_head, softcap=config.logit_softcap)
    return {name: rows.flatten(1).nan_to_num(1e9) for name, rows in y.items()}


def error(y: Tensor, exact: Tensor) -> float:
    """Return the norm of all errors, each relative to the largest number of its row."""
    size = exact.abs().amax(1, keepdim=True).clamp(min=1e-3)
    return ((y - exact) / size).norm().item()


@needs_compiler
@each_build
@each_quantize
@each_case
@pytest.mark.quick("*-native", "*-haswell")
def test_operators_err_as_torch(case, quantize, build):
    """
    The error against fp64 is at most twice that of torch's operators. Products of integers have no
    error: they equal `Int8Linear.forward` to the bit.
    """
    ours = results(machine(build=build), case, quantize, EVERYONE)
    plain = results(TORCH_OPS, case, quantize, EVERYONE)
    exact = results(TORCH_OPS, case, quantize, EVERYONE, is_exact=True)
    for name, y in exact.items():
        assert error(ours[name], y) <= 2 * error(plain[name], y), name


MIXES = [[*range(50, 50 + n)] for n in (1, 2, 7, 8, 17, 33)] + [EVERYONE[::-1], [98, 99, 0]]


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@each_quantize
@each_case
@pytest.mark.quick("*-none-3", "*-int8-8")
def test_a_row_is_the_same_in_any_company(case, quantize, threads):
    """
    The bits are the same whatever the other rows, the place in the batch, and the number of
    threads.
    """
    expected = results(machine(), case, quantize, EVERYONE)
    for rows in MIXES:
        ours = results(machine(threads), case, quantize, rows)
        for name, y in ours.items():
            assert torch.equal(y, expected[name][rows]), (name, len(rows))


def test_a_kernel_without_huge_pages():
    """Previously no model could be loaded there, because such a kernel refuses to give advice."""
    refusing = Mock(side_effect=OSError(errno.EINVAL, "Invalid argument"))
    with patch("mmap.mmap", type("Memory", (mmap.mmap,), {"madvise": refusing})):
        assert Arena().zeros(2, 32).tolist() == [[0.0] * 32] * 2


# --------------------------------------------------------------------------------------------------
# Integers


def int8_layer(weight: Tensor, bias: Tensor | None = None, parts: int = 1) -> Int8Linear:
    layer = Int8Linear(weight, bias, parts, Arena())
    layer.fill(weight)
    return layer


@needs_compiler
@pytest.mark.parametrize("K", [1, 5, 64, 799, 66_000])
def test_sums_of_integers_are_exact(K):
    """
    Both cpu.c and its slow twin give exactly what int64 computes from the same integers, with
    weights and rows that are all as large as possible.
    """
    weight = torch.rand(21, K) * 2 - 1
    weight[:, 0] = 1  # the largest of each row
    weight[0] = 1
    weight[1] = -1
    weight[2] = torch.arange(K) % 2 - 0.5
    x = numbers(K).clone()
    x[20] = 1
    x[21] = -1e30
    x[22] = weight[2]
    x[23] *= 1e-33
    columns = 1 / (1 + torch.arange(K) % 7)
    layer = int8_layer(weight * columns, torch.randn(21))
    assert torch.equal(layer.columns, columns)
    x /= columns
    most = largest_activation(K)
    x_of_columns = x * columns
    largest = x_of_columns.abs().amax(1, keepdim=True).clamp(min=1e-30)
    integers = (x_of_columns * (torch.full_like(largest, most) / largest)).round()
    sums = integers.long() @ layer.weight.long().T
    assert sums.abs().max() == 127 * most * K < 2**31
    expected = sums.float() * (layer.scale * (largest / most)) + layer.bias
    assert torch.equal(layer(x), expected)
    assert torch.equal(machine().linear(x, layer), expected)


@needs_compiler
@pytest.mark.parametrize("parts", [1, 2])
def test_a_large_column_spoils_no_other(parts):
    """
    A row's largest number is 127 steps. The rounding error of a weight is at most half a step,
    times the largest share that any weight of its column has of its row's maximum. An embedding
    shows it, and so does a layer, one input at a time, in cpu.c and in its slow twin. Would catch:
    one step for a whole row, where most weights are rounded to 0; columns scaled by only one half
    of a gated layer; a NaN that spoils the scale of its whole column.
    """
    N, K = 70, 40
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    weight[:, 7] *= 1000
    weight[: N // 2, 8] *= 50
    weight[N // 2 :, 9] *= 50
    weight[:, 10] = 0
    weight[11] = 0
    top = weight.abs().amax(1, keepdim=True).clamp(min=1e-12)
    share = (weight.abs() / top).amax(0)
    layer = int8_layer(weight, parts=parts)
    each = layer(torch.eye(K))
    assert ((each.T - weight).abs() <= 0.501 * top * share / LARGEST).all()
    ours = machine().linear(torch.eye(K), layer, gated=parts == 2)
    assert torch.equal(ours, each.unflatten(1, (parts, -1)).prod(1))
    if parts == 1:
        tokens = torch.arange(N)
        rows = Int8Embedding(layer)
        ours = machine().embed(tokens, tokens, rows, None, 1.0)
        assert torch.equal(ours, rows(tokens))
        assert torch.allclose(ours, each.T, rtol=1e-6, atol=0)
    weight[11, 3] = torch.nan
    broken = int8_layer(weight, parts=parts)(torch.eye(K))
    assert broken[:, 11].isnan().all()
    broken[:, 11] = 0
    assert torch.equal(broken, each)


# --------------------------------------------------------------------------------------------------
# The next token


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@each_build
def test_a_token_is_chosen_as_by_the_oracle(build):
    """This complements test_sampling.py: any CPU, whether or not V fills its vectors."""
    for R, V in (12, 1), (20, 6), (8, 63), (8, 256), (3, 20_001):
        check_tokens(machine(build=build).sample, R, V, torch.float32, seed=V)


# --------------------------------------------------------------------------------------------------
# The compiler


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """Replace cpu.c by a short source, and start with an empty cache."""
    source = tmp_path / "cpu.c"
    source.write_text("int answer = 42;\n")
    monkeypatch.setattr(cpu, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return source


def compiler(folder: Path, command: str) -> str:
    """Write a compiler that records how it was called."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{command}\n')
    script.chmod(0o755)
    return str(script)


@needs_compiler
def test_a_source_is_built_once(source, tmp_path, monkeypatch):
    """
    It is built by $CC, including the options after its name. It is built again for another source,
    compiler or CPU, because machines may share a home directory. Only libraries are left in the
    cache.
    """
    path = compiler(tmp_path, f'exec {shlex.join(COMPILER)} "$@"')
    monkeypatch.setenv("CC", f"{path} -DSIGN=1")
    first = cpu.library(cpu.c_compiler())
    assert "-DSIGN=1" in (tmp_path / "calls").read_text()
    built = first.stat()
    assert cpu.library(cpu.c_compiler()) == first
    assert first.stat() == built
    monkeypatch.setenv("CC", f"{path} -DSIGN=2")
    second = cpu.library(cpu.c_compiler())
    source.write_text("int answer = 43;\n")
    third = cpu.library(cpu.c_compiler())
    compiler(tmp_path, f'exec {shlex.join(COMPILER)} -DANOTHER_CPU "$@"')
    fourth = cpu.library(cpu.c_compiler())
    assert {*first.parent.iterdir()} == {first, second, third, fourth}
    assert len({first, second, third, fourth}) == 4


@needs_compiler
def test_some_that_build_at_once(source):
    """Each has compiled before one of them gives the library its name; all find it there."""
    barrier = threading.Barrier(3)
    rename = Path.rename

    def meet(path, to):
        barrier.wait(60)
        return rename(path, to)

    with patch.object(Path, "rename", meet), ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(cpu.library, 3 * [COMPILER])
    assert others == [first, first]
    assert first.read_bytes()[:4] == b"\x7fELF"
    assert [*first.parent.iterdir()] == [first]


@pytest.mark.parametrize("how", [">&2; exit 1", "; exit 1", ">&2"])
def test_a_compiler_that_fails_is_one_message(how, source, tmp_path, monkeypatch):
    """
    The message has the compiler's own words, wherever it prints them, and even if it reports
    success. Runs in torch or bf16 do not use the compiler, so they do not fail.
    """
    path = compiler(tmp_path, f"echo 'no room on the device' {how}")
    monkeypatch.setenv("CC", path)
    params = SamplingParams(temperature=0, max_tokens=2)
    engine = Engine(trained_model(), Settings(attention="torch"))
    assert engine.generate([[1, 2]], params, progress=False)
    assert choose_ops("auto", "cpu", torch.bfloat16)[0].name == "bf16"
    assert not (tmp_path / "calls").exists()
    for attention in "auto", "cpu":
        with raises(ValueError, path, "CC", "--attention torch", "no room on the device"):
            Engine(trained_model(), Settings(attention=attention))
    assert not list(tmp_path.glob("pagedgpt/*"))


@needs_compiler
def test_a_library_is_on_the_disk_before_it_has_its_name(source):
    """Otherwise a power cut could leave a part of it, which ended every later engine."""
    calls = Mock()
    with patch.object(os, "fsync", calls.fsync), patch.object(Path, "rename", calls.rename):
        cpu.library(COMPILER)
    assert [call[0] for call in calls.mock_calls] == ["fsync", "rename"]


NO_COMPILERS = {"false": "Its output:\n(none: is this a compiler?)"}
NO_COMPILERS["'"] = 'CC is "\'" (No closing quotation): correct it'


@pytest.mark.parametrize("name", NO_COMPILERS)
def test_a_compiler_without_a_word_is_told_as_such(name, source, monkeypatch):
    """
    Previously the message ended with "Its output:" and nothing more, or was "No closing quotation".
    """
    monkeypatch.setenv("CC", name)
    with raises(ValueError, NO_COMPILERS[name]):
        cpu.library(cpu.c_compiler())


@pytest.mark.parametrize("quantize", ["fp32", "int8"])
def test_without_a_compiler(quantize, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in None, "", "/nowhere/cc":
        monkeypatch.delenv("CC", raising=False)
        if name is not None:
            monkeypatch.setenv("CC", name)
        dtype = torch.int8 if quantize == "int8" else torch.float32
        ops, reason = choose_ops("auto", "cpu", dtype)
        assert ops is TORCH_OPS
        assert "no C compiler" in reason
        with raises(ValueError, "'cpu'", "a C compiler", "auto"):
            choose_ops("cpu", "cpu", dtype)


# --------------------------------------------------------------------------------------------------
# Threads and processes


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@needs_compiler
def test_a_fork_computes_alone():
    """
    A forked process has none of the pool's threads, so it computes without them, until it exits.
    Would catch, in one of twenty runs: a child that waits for a thread which was just about to wake
    or sleep.
    """
    owned = [cpu.CpuKernels(COMPILER, 8)]
    add_norm = owned[0].table(TORCH_OPS).add_norm
    norm = model_of("gelu_new").ln_f
    _, expected = add_norm(numbers(48), None, norm)
    for _ in range(60):
        time.sleep(0.002)  # the threads fall asleep
        add_norm(numbers(48), None, norm)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            _, first = add_norm(numbers(48), None, norm)
            _, second = add_norm(numbers(48), None, norm)
            del add_norm
            owned.clear()  # closes the pool
            os._exit(0 if torch.equal(first, second) and torch.equal(first, expected) else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0


class Pool(ctypes.Structure):
    """The beginning of cpu.c's pool, up to its count of runs for which threads were woken."""

    _fields_ = [
        *(("threads", ctypes.c_int), ("process", ctypes.c_int), ("ops", ctypes.c_void_p)),
        *(("count", ctypes.c_int64), ("R", ctypes.c_int64), ("counts", ctypes.c_void_p)),
        *(("state", ctypes.c_int), ("runs", ctypes.c_int)),
    ]


@needs_compiler
@pytest.mark.parametrize(("R", "before", "after"), [(1, 0, 0), (8, 0, 1), (8, 2**31 - 1, 1)])
def test_threads_share_a_run_for_all_of_its_products(R, before, after):
    """
    The run has a large layer and a norm. Would catch: all prompts computed by one core; a count of
    runs that overflows after some weeks to a negative number, which ends the threads.
    """
    kernels = cpu.CpuKernels(COMPILER, 2)
    Pool.from_address(kernels.pool).runs = before
    kernels.listed, kernels.buffers = [], {}
    layer = SimpleNamespace(N=512, weight=torch.ones(16, 512, 32), bias=None)
    y = kernels.linear(torch.ones(R, 512), layer)
    kernels.add_norm(y, None, torch.nn.LayerNorm(512))
    program = (cpu.Op * 2)(*kernels.listed)
    kernels.library.run(kernels.pool, program, 2, R)
    assert Pool.from_address(kernels.pool).runs == after


@needs_compiler
def test_denormal_numbers_live_on():
    """With -ffast-math, gcc before 13 links code that disables denormals for the whole process."""
    machine()
    assert torch.tensor([1e-40]) * 1 != 0


@needs_compiler
@needs_linux
def test_fewer_threads_than_asked_for():
    """
    A pool uses the threads that the system grants. Here there is memory for two or three stacks,
    and only the time changes. Would catch: counting a thread that does not exist.
    """
    expected = results(machine(), "gated", "int8", EVERYONE)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + 2**25
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        kernels = cpu.CpuKernels(SHARING, 99)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    threads = ctypes.c_int.from_address(kernels.pool)  # its first field
    assert 1 < threads.value < 99
    ours = results(kernels.table(TORCH_OPS), "gated", "int8", EVERYONE)
    assert all(torch.equal(y, expected[name]) for name, y in ours.items())


@pytest.fixture
def cores():
    """Restrict this thread, and those that it starts, to two cores."""
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores and Linux")
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    os.sched_setaffinity(0, cores)
    yield cores
    os.sched_setaffinity(0, before)


@contextmanager
def busy_process(cores: list[int]):
    """Run a process that keeps one of these cores busy."""
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as busy:
        os.sched_setaffinity(busy.pid, cores)
        try:
            yield
        finally:
            busy.kill()


def engine_with(threads: int) -> Engine:
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 256}
    with patch.object(torch, "get_num_threads", lambda: threads):
        return Engine(GPT(GPTConfig(1000, 64, **sizes)), Settings())


def seconds_a_token(engine: Engine) -> float:
    """Return the median time per token."""
    seconds = []
    engine.add_request("a", [1], SamplingParams(max_tokens=60))
    while engine.has_work and sum(seconds) < 2:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@needs_compiler
def test_a_thread_that_is_late_holds_up_no_other(cores):
    """
    One thread gets only what another process leaves of a core. The others do its share, so a token
    takes at most twice as long as without the process. (This is the median of five tries, because
    the machine may have other work.) Would catch: a fixed share per thread; a barrier for all
    threads.
    """
    ratios = []
    for _ in range(5):
        os.sched_setaffinity(0, cores[1:])
        with busy_process(cores[:1]):
            alone = seconds_a_token(engine_with(1))
        os.sched_setaffinity(0, cores)
        before = {*os.listdir("/proc/self/task")}
        engine = engine_with(2)
        [late] = {*os.listdir("/proc/self/task")} - before
        os.sched_setscheduler(int(late), os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(int(late), cores[:1])
        os.sched_setaffinity(0, cores[1:])
        with busy_process(cores[:1]):
            ratios.append(seconds_a_token(engine) / alone)
    assert statistics.median(ratios) < 2


def is_asleep(thread: str) -> bool:
    stat = Path(f"/proc/self/task/{thread}/stat").read_text()
    return stat.rpartition(") ")[2].startswith("S")


@needs_compiler
@needs_linux
def test_idle_threads_sleep():
    """Would catch: threads that poll for work for ever, whatever else the machine does."""
    before = {*os.listdir("/proc/self/task")}
    engine = engine_with(8)
    seconds_a_token(engine)
    threads = {*os.listdir("/proc/self/task")} - before
    end = time.monotonic() + 20
    while not all(map(is_asleep, threads)):
        assert time.monotonic() < end, "not all are asleep"
        time.sleep(0.05)
    assert len(threads) == 7


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("threads", [2, 8])
def test_beside_a_busy_process(threads, cores):
    """
    Another process wants one of two cores, or there are many threads. A token then takes at most
    three times as long as with two threads on idle cores (the median, best of three tries). Would
    catch: threads that wait for one without a core.
    """
    quick = engine_with(2)
    engine = engine_with(threads)
    ratios = []
    for _ in range(3):
        quiet = seconds_a_token(quick)
        with busy_process(cores):
            ratios.append(seconds_a_token(engine) / quiet)
    assert min(ratios) < 3


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    """Run the tests above again, with a library that checks all of its reads and writes."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: CUDA does not start under a sanitizer")
    name = "libasan.so" if sanitizer == "address" else "libtsan.so"
    find = [*COMPILER, f"-print-file-name={name}"]
    runtime = subprocess.run(find, capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"needs {name}")
    # a separate run, which shares nothing with this process
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {
        "CC": f"{shlex.join(COMPILER)} -g -fsanitize={sanitizer}",
        "LD_PRELOAD": runtime,
        "XDG_CACHE_HOME": str(tmp_path),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
    }
    tests = "native or exact or (company and qk) or (with_threads and trained)"
    command = f"setarch -R {sys.executable} -m pytest -qsx {__file__} tests/engine/test_bits.py -k"
    command = [*command.split(), tests]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Sanitizer" not in run.stderr, run.stderr


# --------------------------------------------------------------------------------------------------
# bf16, and no compiler

FORMATS = [("fp32", "none"), ("bf16", "none"), ("fp32", "int8"), ("bf16", "int8")]
NAMES = "trained gpt2 llama-biases qwen3 gemma2"


def model_in(dtype: str, name: str) -> GPT:
    model = trained_model()
    if name != "trained":
        _, model = pytest.importorskip("test_families").pair(name)
    return deepcopy(model).to(serving_dtype(dtype, "cpu"))


@pytest.mark.parametrize("count", [1, 8, 100])
@pytest.mark.parametrize("is_packed", [True, False])
def test_bf16_errs_as_torch(is_packed, count, monkeypatch):
    """
    The error against fp64, with the same weights, is at most twice that of plain torch in bf16.
    Would catch: weights that are lost when their memory is reused for the next layer.
    """
    if is_packed and not can_pack():
        pytest.skip("needs a CPU with AVX-512: oneDNN packs bf16 there")
    monkeypatch.setattr(packed, "can_pack", lambda: is_packed)
    layer = model_of("relu").h[0].attn.c_attn
    weight = layer.weight.detach().bfloat16()
    bias = layer.bias.bfloat16()
    x = numbers(799)[:count]
    exact = F.linear(x.double(), weight.double(), bias.double())
    plain = F.linear(x.bfloat16(), weight, bias).float()
    linear = Bf16Linear(weight, bias)
    linear.fill(weight)
    weight.zero_()
    assert linear.weight.is_mkldnn == is_packed
    y = linear(x)
    assert y.dtype == torch.float32
    assert error(y, exact) <= 2 * error(plain, exact)


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize(("dtype", "quantize"), FORMATS)
@pytest.mark.parametrize("name", NAMES.split())
@pytest.mark.quick(
    "trained-*-none-auto", "qwen3-fp32-*-auto", "gemma2-bf16-*-auto", "gpt2-fp32-*-torch"
)
def test_engine_is_the_same_model_run_densely(name, dtype, quantize, attention):
    """
    The engine runs decodes with chunks, and whole prompts, with a compiler ("auto") or without. A
    few tokens may differ from the dense model's, if the best two logits are close. Would catch: the
    scale or matrix of another layer.
    """
    model = model_in(dtype, name)
    if (dtype, quantize, attention) == ("bf16", "none", "torch"):
        attention = "bf16"  # "torch" computes everything in bf16, which is never the default
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [prompt(i, 5 + 5 * i) for i in range(8)]
    tight = {"block_size": 4, "max_num_seqs": 5, "token_budget": 16, "check": True}
    crowded = Engine(model, Settings(quantize=quantize, attention=attention, **tight))
    roomy = Engine(model, Settings(quantize=quantize, attention=attention))
    reference = packed.pack_weights(model, quantize, Bf16Linear)
    lost = []
    for engine in crowded, roomy:
        for text, answer in zip(prompts, engine.generate(prompts, params, False), strict=True):
            expected = dense(reference, text + answer)[len(text) - 1 : -1]
            lost.append(shortfall(expected, answer))
    lost = torch.cat(lost)
    is_exact = dtype == "fp32" and quantize == "none"
    assert lost.max() <= (1e-4 if is_exact else 0.05)
    assert lost.count_nonzero() <= 0.01 * len(lost)


def test_refusals():
    assert serving_dtype("auto", "cpu") == torch.float32
    assert serving_dtype("auto", "cuda:1") == torch.bfloat16
    with raises(ValueError, "fp16", "fp32 or bf16"):
        serving_dtype("fp16", "cpu")
    with raises(ValueError, "int4", "none or int8"):
        Engine(trained_model(), Settings(quantize="int4"))
