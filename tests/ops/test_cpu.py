"""
Weights in bf16 and int8 on a CPU: what the two layers compute, and that an engine with them is the
same model run densely, whatever shares the batch.
"""

import inspect
import os
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from checkpoint import serving_dtype
from engine.engine import Engine
from model import GPT, RMSNorm
from ops import compiled, cpu
from ops.cpu import (
    Int8Linear,
    PackedLinear,
    ShortRMSNorm,
    UnpackedLinear,
    can_pack,
    int8_is_exact,
    packed_for_cpu,
)
from params import SamplingParams, Settings
from test_paged import prompt, raises, trained_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
ROOT = Path(__file__).parents[2]
needs_vnni = pytest.mark.skipif(not int8_is_exact(), reason="needs a CPU with VNNI")
needs_compiler = pytest.mark.skipif(not cpu.cpp_compiler(), reason="needs a C++ compiler")
ROWS = (1, 3, 8, 64, 257)
FORMATS = [
    ("fp32", "none"),
    ("bf16", "none"),
    pytest.param("fp32", "int8", marks=needs_vnni),
    pytest.param("bf16", "int8", marks=needs_vnni),
]
each_format = pytest.mark.parametrize(("dtype", "quantize"), FORMATS)
each_count = pytest.mark.parametrize("count", ROWS)


def layer(out: int, into: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, one output ten times as large as the next, and biases."""
    generator = torch.Generator().manual_seed(out)
    weight = torch.randn(out, into, generator=generator) * 0.02
    weight[::2] *= 10
    weight[5] = 0
    return weight, torch.randn(out, generator=generator)


def rows(count: int, into: int) -> torch.Tensor:
    """Rows of very different size, one of them zero where there are several."""
    x = torch.randn(count, into, generator=torch.Generator().manual_seed(count))
    x *= 10.0 ** (torch.arange(count) % 5 - 2)[:, None]
    x[1:2] = 0
    return x


def model_in(dtype: str) -> GPT:
    model = GPT(trained_model().config).eval()
    model.load_state_dict(trained_model().state_dict())
    return model.to(serving_dtype(dtype, "cpu"))


def error(y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    assert y.dtype == torch.float32
    return (y - exact).norm()


@needs_vnni
@each_count
@pytest.mark.parametrize(("out", "into"), [(339, 799), (64, 48)])
def test_int8_errs_by_half_steps(count, out, into):
    """
    Weights and rows are off by at most half a step of their own scales; the product of the integers
    is exact.
    """
    weight, bias = layer(out, into)
    x = rows(count, into)
    w_half = weight.abs().amax(1) / 254
    x_half = x.abs().amax(1, keepdim=True) / 254
    bound = x.abs().sum(1, keepdim=True) * w_half
    bound += x_half * weight.abs().sum(1)
    bound += into * x_half * w_half
    product = F.linear(x.double(), weight.double())
    linear = Int8Linear(weight, bias)
    y = linear(x)
    assert torch.equal(linear(x[-1:]), y[-1:])  # alone, a row has the same numbers
    off = y - bias - product
    assert (off.abs() <= 1.001 * bound + 1e-6).all()
    typical = off.norm(dim=1) / product.norm(dim=1)
    assert typical[x.any(1)].max() < 0.02
    assert torch.equal(Int8Linear(weight, None)(x) + bias, y)


@pytest.mark.parametrize("linear", [PackedLinear, UnpackedLinear])
@each_count
def test_bf16_errs_as_torch(count, linear):
    """At most twice the error of plain torch in bf16, against fp64 with the same weights."""
    if linear is PackedLinear and not can_pack(torch.ones(1, dtype=torch.bfloat16)):
        pytest.skip("oneDNN packs bf16 on CPUs with AVX-512")
    weight, bias = (w.bfloat16() for w in layer(339, 799))
    x = rows(count, 799)
    exact = F.linear(x.double(), weight.double(), bias.double())
    plain = F.linear(x.bfloat16(), weight, bias).float()
    assert error(linear(weight, bias)(x), exact) <= 2 * error(plain, exact)


@each_count
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_errs_as_torch(count, eps):
    """At most twice the error of torch's own against fp64; a row of zeros stays zero."""
    norm = RMSNorm(576, eps)
    norm.weight.data = layer(576, 1)[0][:, 0] * 1e2
    x = rows(count, 576)
    exact = F.rms_norm(x.double(), (576,), norm.weight.double(), eps)
    scale = exact.abs().amax(1, keepdim=True).clamp(min=1e-30)
    short, plain = ((y - exact) / scale for y in (ShortRMSNorm(norm)(x), norm(x)))
    assert short.abs().max() <= 2 * plain.abs().max() + 1e-7
    assert torch.equal(x, rows(count, 576))


@each_format
def test_engine_is_the_same_model_run_densely(dtype, quantize):
    """
    Alone and in a batch of decodes and chunks. Another token than the dense model's is allowed only
    if the best two logits are close.
    """
    model = model_in(dtype)
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [prompt(i, 5 + 5 * i) for i in range(8)]
    tight = {"block_size": 4, "max_num_seqs": 5, "token_budget": 16, "check": True}
    crowded = Engine(model, Settings(quantize=quantize, **tight))
    roomy = Engine(model, Settings(quantize=quantize))
    for engine, texts in (crowded, prompts), (crowded, prompts[3:4]), (roomy, prompts):
        answers = engine.generate(texts, params, progress=False)
        check_greedy(model, quantize, texts, answers)


@torch.no_grad()
def check_greedy(model: GPT, quantize: str, prompts: list[list[int]], answers: list[list[int]]):
    """
    That answers are the likeliest tokens of the model run densely; of two within `tie`, now and
    then the other.
    """
    reference = packed_for_cpu(model, quantize)
    is_exact = model.wte.weight.dtype == torch.float32 and quantize == "none"
    tie = 1e-4 if is_exact else 0.05
    unlike = 0
    for text, answer in zip(prompts, answers, strict=True):
        logits = reference(torch.tensor([text + answer]))[0][0, len(text) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        behind = logits.amax(1) - chosen
        assert behind.max() <= tie
        unlike += behind.count_nonzero().item()
    assert unlike <= 0.01 * sum(map(len, answers))


@needs_compiler
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "quantize"), FORMATS[:3])
def test_compiled_steps_are_the_same_model(dtype, quantize, compiler, monkeypatch):
    """
    Alone, after others and beside them, a prompt of one token too; a second engine's model is not
    taken for the first's, though both compile the same function. "eager" runs the graph that was
    captured as it is: writing C++ for it takes ten seconds a format, in `make test-all`.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    prompts = [prompt(i, n) for i, n in enumerate((1, 2, 17, 30))]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (24, 9, 20, 30)]
    for sign in 1, -1:
        model = model_in(dtype)
        model.wpe.weight.data *= sign
        engine = Engine(model, Settings(block_size=4, quantize=quantize, compile=True, check=True))
        decode_one = Mock(side_effect=engine.runner.decode_one)
        engine.runner.decode_one = decode_one
        alone = []
        for text, p in zip(prompts, params, strict=True):
            alone += engine.generate([text], p, progress=False)
        steps = sum(p.max_tokens - 1 for p in params)
        assert decode_one.call_count == steps
        together = engine.generate(prompts, params, progress=False)
        assert decode_one.call_count > steps  # the longest ends alone
        check_greedy(model, quantize, prompts + prompts, alone + together)


@pytest.mark.parametrize("plain_rows", [0, 1, 16])
def test_few_rows_take_the_plain_weights_where_those_are_faster(plain_rows, monkeypatch):
    """
    The packed product of one row took 1.2 times Hugging Face's time with AVX2. Whichever product a
    CPU is found to prefer, the model stays the same, few rows take that one, and the head's plain
    weights are the embedding's, no copy.
    """
    monkeypatch.setattr(cpu, "rows_of_plain", lambda weights: plain_rows)
    model = model_in("fp32")
    packed = packed_for_cpu(model)
    if plain_rows:
        assert packed.lm_head.plain.data_ptr() == packed.wte.weight.data_ptr()
        assert packed.lm_head.plain_rows == 1
    else:
        assert packed.lm_head.plain is None
    layer = packed.h[0].mlp.c_fc
    right = model.h[0].mlp.c_fc
    weight = layer.weight
    for count in (*ROWS, 16):
        x = rows(count, right.in_features)
        layer.weight = None if count <= plain_rows else weight  # None: a use of it fails
        assert error(layer(x), right(x)) <= 1e-5 * x.norm()


@pytest.mark.parametrize(("fast", "expected"), [((1, 16), 16), ((1,), 1), ((), 0)])
def test_the_faster_product_is_found_by_measuring(fast, expected, monkeypatch):
    """
    For 16 rows, else for one, else for none; a gain of less than 15% is not worth weights kept
    twice.
    """

    def repeat(sweep, number, repeat):
        variables = inspect.getclosurevars(sweep).nonlocals
        count = len(variables["inputs"][0])
        if isinstance(variables["layers"][0], PackedLinear):
            return [1.0]
        return [0.8 if count in fast else 0.9]

    monkeypatch.setattr(cpu.timeit, "repeat", repeat)
    assert cpu.rows_of_plain([torch.ones(64, 48)] * 2) == expected


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE", "AVX512_CORE_VNNI"])
def test_int8_is_refused_where_its_sums_overflow(isa):
    """
    The refusal asked what the CPU has, not what oneDNN uses of it: with the second alone limited,
    sums of the largest products were wrong, and nothing was refused.
    """
    script = """
import torch
from ops.cpu import Int8Linear, int8_is_exact
y = Int8Linear(torch.ones(3, 64), None)(torch.ones(2, 64))
assert int8_is_exact() == bool((y - 64).abs().max() < 0.01), y
print(int8_is_exact())
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
    assert "VNNI" in isa or run.stdout == b"False\n"


@needs_vnni
def test_packing_leaves_the_model_alone():
    model = model_in("bf16")
    before = deepcopy(model.state_dict())
    packed = packed_for_cpu(model, "int8")
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, before[name])
    assert {w.dtype for w in packed.parameters()} == {torch.float32}
    kinds = [type(module) for module in packed.modules()]
    assert kinds.count(Int8Linear) == 4 * model.config.n_layer + 1


def test_refusals(monkeypatch):
    assert serving_dtype("auto", "cpu") == torch.float32
    assert serving_dtype("auto", "cuda:1") == torch.bfloat16
    with raises(ValueError, "fp16", "fp32 or bf16"):
        serving_dtype("fp16", "cpu")
    monkeypatch.setattr(cpu, "int8_is_exact", lambda: False)
    with raises(ValueError, "int4", "none and int8"):
        Engine(trained_model(), Settings(quantize="int4"))
    with raises(ValueError, "--quantize int8", "VNNI"):
        Engine(trained_model(), Settings(quantize="int8"))


def test_refusals_of_compile(monkeypatch):
    """Without a compiler, or with one that fails, one message says what to change."""
    monkeypatch.setattr(cpu.shutil, "which", lambda name: "/usr/bin/" + name)
    with raises(ValueError, "--compile", "not flex", "leave one of them out"):
        Engine(trained_model(), Settings(compile=True, attention="flex"))

    error = "backend='inductor' raised:\nCppCompileError: C++ compile error\n\nCommand: g++ .."
    broken = Mock(side_effect=RuntimeError(error))
    monkeypatch.setattr(compiled, "compiled_step", lambda *_: broken)
    reasons = ("CppCompileError: C++ compile error)", "TORCHINDUCTOR_CACHE_DIR")
    with raises(ValueError, "--compile", *reasons):
        Engine(trained_model(), Settings(compile=True))
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "/nowhere")
    with raises(ValueError, "--compile", "C++ compiler", "'/nowhere'", "leave --compile out"):
        Engine(trained_model(), Settings(compile=True))
