"""
Every machine gives the same answer. With the operators of cpu.c, the tokens, log-probabilities and
logits of a fixed model and fixed requests have one SHA-256, whichever compiler, CPU and torch is
used.

The weights are made from integers, because torch.randn differs from CPU to CPU. The requests are
those of test_bits.py, which shows that an answer does not depend on what is served beside it.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from test_bits import ASKS, Service, has_gpu, message, name_of, needs_compiler
from test_cpu import macros
from torch import Tensor

from engine.process import add_request
from kernels import triton
from model import GPT, GPTConfig, Rope
from ops import cpu, sampling
from test_paged import new_engine

ROOT = Path(__file__).parents[2]
SHARED = {"vocab_size": 521, "context_length": 64, "n_layer": 2, "n_head": 4, "n_embd": 48}
LLAMA_3 = Rope(5e5, 8.0, (1.0, 4.0, 32.0))
MODELS = {
    "gpt2": {"n_inner": 300},
    "gelu": {"activation": "gelu", "head_size": 7, "n_inner": 33, "tied": False},
    "llama": {"norm": "rms", "gated": True, "activation": "silu", "bias": False, "n_kv_head": 2}
    | {"qk_norm": True, "windows": (7, 0), "rope": {7: Rope(1e4), 0: LLAMA_3}},
    "gemma": {"norm": "rms", "gated": True, "bias": False, "n_kv_head": 1, "head_size": 20}
    | {"post_norm": True, "rope": {0: Rope(1e4)}, "embedding_scale": 7.0}
    | {"attention_softcap": 3.0, "logit_softcap": 5.0, "activation": "relu2"},
}
FORMATS = ("none", "int8")
DIGESTS = """\
gpt2 none 348ce44930d763eb19c4f302744b193ec98451c08ebce4eca6838f688cc6a57f
gpt2 int8 c25bea7ca85e3e501c9c9cd5eabf6ad773bcc1500328f9b82e90aba5b2e29a7e
gelu none a1a249a3951582c08461453a2e4c83c2d2ab945d13064f2d19e551f795606e7b
gelu int8 9e746bfd0ef451ecf16be7c25bfe8c5e3ce50ba7a5f212323826535ca408514a
llama none 90211559cc47354a1b03707d1b4142cf2e65fd5c8378bafdb4b9c41102a889b8
llama int8 7028ae5f0eafb3aa126b0157489ef54b2b318f60909d7f07d15841991d1ee6aa
gemma none fec9a4733532c56c4fe384dcfdf9aee04397d47b7ac7737daf1478474ab3837c
gemma int8 f7346dafae64b13039303cee076476cb39ada68da5b87019a4d6e8d15b105a05
""".splitlines()

PINNED_GPU = "NVIDIA H200, torch 2.11.0, triton 3.6.0"
GPU = "no GPU"
if has_gpu:
    GPU = torch.cuda.get_device_name()
    GPU += f", torch {torch.__version__.partition('+')[0]}, triton {triton.__version__}"
GPU_DIGESTS = """\
gpt2 bbc81b530f728839869b47c6fba67a7950c4f54f34f431ca11f6d12e2938ce53
gelu fb6b93c2509718b8630a17a9cbcdab0786019b357ee90ce355d284483ad79803
llama e32e4826584c74075eec98b0e00f54c2cbf14daf5fbf08609c345ac6736cb7ab
gemma 9bc6b0188f6cba5d7887e7c28e15efda8706069b36bb63e4684076e6a7fffd59
""".splitlines()


def hashed_numbers(count: int, key: int) -> Tensor:
    """Return [count] fp32 from -1 to 1, multiples of 2^-15: a hash of each position and the key."""
    x = torch.arange(count) * 2654435761 + key * 40503
    for multiplier in (2246822519, 3266489917):
        x = (x ^ x >> 15) * multiplier & 0xFFFFFFFF
    return ((x >> 8 & 0xFFFF) - 0x8000).float() / 0x8000


@cache
def model_of(name: str) -> GPT:
    """
    Return a model whose weights spread about as widely as trained ones, with norm weights around 1.
    """
    model = GPT(GPTConfig(**SHARED | MODELS[name])).eval().requires_grad_(False)
    for key, weight in enumerate(model.parameters()):
        numbers = hashed_numbers(weight.numel(), key).view(weight.shape)
        if weight.ndim == 1:
            weight.copy_(1 + numbers / 4)
        else:
            weight.copy_(numbers * 2.0 ** (2 - weight.shape[1].bit_length() // 2))
    return model


def digest(name: str, kind: str, threads: int = 1) -> str:
    """
    Return the SHA-256 of each request served separately. It covers everything that its client is
    sent and, for each step, the logits, the bounds of the filters, and the exponentials they use.
    """
    with patch.object(torch, "get_num_threads", lambda: threads):
        settings = {"num_blocks": 60, "max_num_seqs": 1, "prefix_cache": False, "block_size": 4}
        engine = new_engine(model_of(name), attention="cpu", quantize=kind, **settings)
    sha = hashlib.sha256()
    launch, threshold = engine.runner.launch, sampling.threshold

    def hashed_launch(plan):
        flight = launch(plan)
        sha.update(flight.logits.numpy().tobytes())
        return flight

    def hashed_threshold(scores, *filters) -> Tensor:
        exp = filters[-1]
        lowest = threshold(scores, *filters)
        sha.update(lowest.numpy().tobytes() + exp(scores).numpy().tobytes())
        return lowest

    engine.runner.launch = hashed_launch
    service = Service(engine)
    with patch.object(sampling, "threshold", hashed_threshold):
        service.run(*ASKS)
    for id, answer in service.answers.items():
        sha.update(f"{name_of(id)} {answer}".encode())
    return sha.hexdigest()


def digests(threads: int = 1) -> list[str]:
    """Return a line for each case, as this machine and the compiler in CC make them."""
    return [f"{n} {kind} {digest(n, kind, threads)}" for n, kind in product(MODELS, FORMATS)]


@pytest.fixture(autouse=True)
def threads_share_all(monkeypatch):
    """Share all work among threads, however small the models are."""
    monkeypatch.setenv("CC", shlex.join([*cpu.c_compiler(), "-DWORTH_SHARING=0"]))


# --------------------------------------------------------------------------------------------------
# Compilers and CPUs

ZIG = [sys.executable, "-m", "ziglang", "cc"]  # a newer clang, from the package ziglang
CLANG = "clang-16" if shutil.which("clang-16") else "clang"
# gcc 13's default on CPUs with AMX: it leaves some products and sums separate that it could fuse
HOSTILE = "gcc-512"
COMPILERS = {"default": [], "clang": [CLANG], "zig": ZIG}
COMPILERS[HOSTILE] = ["gcc", "--param=avoid-fma-max-bits=512"]
# a CPU, and the macro which shows that this machine has all of its instructions
CPUS = {"native": "", "x86-64-v4": "__AVX512VL__", "haswell": "__AVX2__", "x86-64-v2": ""}


def compiler(name: str) -> list[str]:
    command = COMPILERS[name] or cpu.c_compiler()
    if shutil.which(command[0]):
        run = subprocess.run([*command, "-E", "-x", "c", os.devnull], capture_output=True)
        if run.returncode == 0:
            return command
    pytest.skip(f"needs a C compiler that is {shlex.join(command)}")


def use(monkeypatch, name: str, level: str = "-O3", cpu_name: str = "native"):
    """Have cpu.c built with this compiler, level and CPU from now on."""
    monkeypatch.setenv("CC", shlex.join([*compiler(name), "-DWORTH_SHARING=0"]))
    if CPUS[cpu_name] not in macros():
        pytest.skip(f"needs a CPU with {CPUS[cpu_name]}")
    if name == "zig":  # zig has its own names for CPUs
        cpu_name = cpu_name.replace("-", "_")
    flags = [flag.replace("-O3", level).replace("native", cpu_name) for flag in cpu.FLAGS]
    monkeypatch.setattr(cpu, "FLAGS", flags)


@needs_compiler
@pytest.mark.parametrize("threads", range(1, 9))
@pytest.mark.parametrize("name", ["default", HOSTILE])
@pytest.mark.quick("*-3")
def test_one_digest(name, threads, monkeypatch):
    """
    Would catch: a product and a sum that only one compiler fuses; a sum whose order depends on the
    width of vectors; a function of torch or of the C library that rounds differently elsewhere.
    """
    use(monkeypatch, name)
    assert digests(threads) == DIGESTS


def gpu_digest(name: str) -> str:
    """
    Hash everything that clients are sent when all requests run together, with --deterministic in
    bf16.
    """
    model = deepcopy(model_of(name)).to("cuda", torch.bfloat16)
    service = Service(new_engine(model, deterministic=True, num_blocks=60, block_size=16))
    service.run(*ASKS)
    answers = [(name_of(id), answer) for id, answer in service.answers.items()]
    return hashlib.sha256(repr(answers).encode()).hexdigest()


@pytest.mark.skipif(GPU != PINNED_GPU, reason=f"needs {PINNED_GPU}")
def test_one_digest_on_a_gpu(monkeypatch):
    """
    --deterministic gives the same on two cards of a kind: pinned on one H200, found equal on
    another, and with triton 3.7.1.
    """
    monkeypatch.setenv("CC", cpu.c_compiler()[0])  # with options Triton could not compile
    assert [f"{name} {gpu_digest(name)}" for name in MODELS] == GPU_DIGESTS


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 CPU")
@pytest.mark.parametrize("cpu_name", CPUS)
@pytest.mark.parametrize("level", ["-O2", "-O3"])
@pytest.mark.parametrize("name", COMPILERS)
def test_one_digest_by_any_compiler(name, level, cpu_name, monkeypatch):
    use(monkeypatch, name, level, cpu_name)
    assert digests() == DIGESTS


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_one_digest_whatever_torch_uses(capability):
    """
    Would catch: powers, sines and exponentials computed by torch, which differ from CPU to CPU.
    """
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-m", "pytest", "-n0", f"{__file__}::test_one_digest[default-3]"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stdout


def test_frequencies_are_the_same_everywhere():
    """
    Would catch powers computed by torch: on CPUs with AVX2 one of them has a different last digit.
    """
    sha = hashlib.sha256()
    for theta in (1e4, 5e5, 1e6):
        sha.update(Rope(theta).frequencies(128).numpy().tobytes())
    assert sha.hexdigest() == "06a02e933312c0dc55531b8e49e07aaa113de3df8c4dcfdcc43790a877961072"


# --------------------------------------------------------------------------------------------------
# CPUs without a fused multiply-add instruction


HARD_SUMS = """
#include "ops/cpu.c"

// Count how many of these sums, drawn near ties and among the smallest numbers, differ from fmaf.
int64_t count_wrong(int64_t count)
{
    int64_t wrong = 0;
    uint64_t state = 1;
    for (int64_t i = 0; i < count; i++) {
        Number n[3];
        for (int j = 0; j < 3; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            // few bits of the fraction, so that products end near the half of a last place
            n[j].bits = (int32_t)(state >> 32) & (state & 1 << 20 ? -1 : (int32_t)0xfffff000);
        }
        if (state & 1 << 21) // sums of about the size of the product
            n[2].bits = n[0].bits + n[1].bits - 0x3f800000 - (state >> 22 & 31) * (1 << 23);
        Number ours = {fused(n[0].number, n[1].number, n[2].number)};
        Number exact = {fmaf(n[0].number, n[1].number, n[2].number)};
        wrong += ours.bits != exact.bits && !(isnan(ours.number) && isnan(exact.number));
    }
    return wrong;
}
"""


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 CPU")
def test_a_cpu_without_the_instruction_rounds_once(tmp_path):
    """Would catch: a sum rounded to double and then to float, which is wrong one time in 2^29."""
    source = tmp_path / "sums.c"
    source.write_text(HARD_SUMS)
    flags = [flag.replace("native", "x86-64-v2").replace("-O3", "-O0") for flag in cpu.FLAGS]
    path = tmp_path / "sums.so"
    command = [*cpu.c_compiler(), *flags, f"-I{ROOT}", source, "-o", path, "-lm"]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.count_wrong.restype = ctypes.c_int64
    assert library.count_wrong(ctypes.c_int64(1_000_000)) == 0


# --------------------------------------------------------------------------------------------------
# 64-bit Arm, emulated

ARM = ["aarch64-linux-gnu-gcc", "-static"]
POINTERS = cpu.POINTERS.split()


SIZES: dict[int, int] = {}  # of the tensors given to operators, by address


def noting_sizes(op, name: str, value):
    if isinstance(value, Tensor):
        place = value.data_ptr()
        memory = value.untyped_storage()
        rest = memory.nbytes() - (place - memory.data_ptr())
        # some are views of the first rows of a tensor given before
        SIZES[place] = min(max(SIZES.get(place, 0), value.nbytes), rest)
    SET_ATTRIBUTE(op, name, value)


SET_ATTRIBUTE = cpu.Op.__setattr__


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-O3", "-O2", "-O3 -march=armv8.2-a+sve"])
@pytest.mark.parametrize(("name", "kind"), [*product(MODELS, FORMATS)])
def test_arm_makes_the_same_of_each_step(name, kind, flags, tmp_path, monkeypatch):
    """
    Record each call of this machine's library: a prompt, decodes, sampling and scoring. replay.c
    then repeats it on an emulated Arm CPU, which must leave the same bytes in memory.
    """
    if not shutil.which(ARM[0]) or not shutil.which("qemu-aarch64"):
        pytest.skip(f"needs {ARM[0]} and qemu-aarch64")
    monkeypatch.setattr(cpu.Op, "__setattr__", noting_sizes)
    SIZES.clear()
    settings = {"num_blocks": 20, "max_num_seqs": 2, "token_budget": 40, "prefix_cache": False}
    engine = new_engine(model_of(name), attention="cpu", quantize=kind, **settings)
    calls = tmp_path / "calls"
    kernels = engine.device.ops.linear.__self__
    library = kernels.library

    def recorded(pool, ops, count: int, R: int):
        """Record a call, and the memory that its operators point to, before and after it."""
        program = getattr(ops, "_obj", ops)  # if wrapped by byref
        program = program[:count] if count > 1 else [program]
        places = {getattr(op, name) for op in program for name in POINTERS} - {None}
        file.write(struct.pack("4q", count, R, len(places), ctypes.sizeof(cpu.Op)))
        file.write(b"".join(map(bytes, program)))
        for after in (False, True):
            for place in places:
                size = SIZES[place]
                file.write(struct.pack("2q", place, size) + ctypes.string_at(place, size))
            if not after:
                library.run(pool, ops, count, R)

    monkeypatch.setattr(kernels, "library", SimpleNamespace(run=recorded))
    with open(calls, "wb") as file:
        for asked in ("min-p", "nucleus"):
            request = message(asked, SHARED["vocab_size"])
            request["params"] |= {"max_tokens": 3, "logprobs": 3}
            add_request(engine, request)
        while engine.has_work:
            engine.step()
    program = tmp_path / "replay"
    source = Path(__file__).with_name("replay.c")
    options = [flag for flag in cpu.FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    options = [flag for flag in options if not flag.startswith("-m")]
    command = [*ARM, *options, *flags.split(), f"-I{ROOT}", source, "-o", program, "-lm"]
    subprocess.run(command, check=True)
    run = subprocess.run(["qemu-aarch64", program, calls], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.split()[0]) > 8, "calls"
