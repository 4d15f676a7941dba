"""
Memory: a model that does not fit is refused before it is loaded, packing copies only matrices, and
integers are made while a model is loaded.
"""

import io
import os
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from test_checkpoint import LLAMA, SHAPE, random_model, same

import serve
from checkpoint import SavedWeights, load_checkpoint, save_checkpoint
from engine import sizing
from engine.engine import Engine
from engine.sizing import check_fits
from model import GPT, GPTConfig
from ops import packed
from ops.choice import choose_ops
from ops.packed import (
    PackedLinear,
    UnpackedLinear,
    packed_for_cpu,
    quantized,
    quantized_if_asked,
)
from params import SamplingParams, Settings

ROOT = Path(__file__).parents[1]


def set_memory(monkeypatch, free: float, total: float = 2**60):
    monkeypatch.setattr(sizing, "memory_of", lambda device: (free, total))


def refused(words: str):
    return pytest.raises(ValueError, match=f"^the model does not fit: its weights in {words}")


def test_what_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    """
    At one byte too few, not at just enough: on a CPU bf16 weights twice and embeddings in fp32,
    too, and a pool for 33 tokens. A GPU holds the weights once, and K and V in their dtype.
    """
    ours = random_model(**LLAMA)
    save_checkpoint(ours, tmp_path)
    pool = 3 * 2 * 3 * 2 * 8 * 16 * 4  # 3 blocks: K and V, layers, KV heads, head size, slots, fp32
    once = 2 * sum(w.numel() for w in ours.parameters())
    enough = 2 * once + 4 * ours.wte.weight.numel() + pool
    loaded = []
    read = SavedWeights.read
    monkeypatch.setattr(SavedWeights, "read", lambda *a: loaded.append(a) or read(*a))
    load = partial(load_checkpoint, tmp_path, dtype=torch.bfloat16)
    set_memory(monkeypatch, enough - 1)
    words = r"bfloat16, loaded and packed, take 0 MiB and the smallest KV pool 0, cpu has 0 free: "
    words += r"end .*--max-model-len, or .*--dtype bf16, on a CPU --quantize int8"
    with refused(words):
        load(check=partial(check_fits, Settings()))
    assert not loaded
    set_memory(monkeypatch, enough)
    load(check=partial(check_fits, Settings()))
    assert loaded
    with refused("bfloat16"):
        check_fits(Settings(num_blocks=4), ours, torch.bfloat16, "cpu")
    on_gpu = partial(check_fits, Settings(), ours, torch.bfloat16, "cuda")
    set_memory(monkeypatch, once + pool // 2)
    on_gpu()
    set_memory(monkeypatch, once + pool // 2 - 1)
    with refused("bfloat16 take .* cuda has"):
        on_gpu()


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_weights_in_fp32_count_twice_where_they_are_packed(attention, monkeypatch):
    """Would catch: a copy that the operators make and that is not counted, or the other way."""
    ours = random_model(**LLAMA)
    ops, _ = choose_ops(attention)
    is_packed = ops.pack_weights(ours).h[0].mlp.c_fc is not ours.h[0].mlp.c_fc
    pool = 3 * 2 * 3 * 2 * 8 * 16 * 4
    enough = (1 + is_packed) * sum(w.nbytes for w in ours.parameters()) + pool
    check = partial(check_fits, Settings(attention=attention), ours, torch.float32, "cpu")
    set_memory(monkeypatch, enough)
    check()
    set_memory(monkeypatch, enough - 1)
    with refused("float32, loaded and packed," if is_packed else "float32 take"):
        check()


def test_integers_count_once(tmp_path, monkeypatch):
    """
    A byte each, a scale for each row, and the largest matrix in fp32. Would catch: a model refused
    that would fit, as if it were loaded in fp32 or packed; and integers on a GPU that are refused
    only when all is loaded.
    """
    save_checkpoint(random_model(**LLAMA), tmp_path)
    ours = quantized(random_model(**LLAMA))
    pool = 3 * 2 * 3 * 2 * 8 * 16 * 4
    matrices = 2 * [(97, 32)] + 3 * [(64, 32), (32, 32), (256, 32), (32, 128)]
    integers = sum(n * k + 4 * n for n, k in matrices)
    enough = integers + 7 * 32 * 4 + 256 * 32 * 4 + pool  # norms, and the largest
    convert = partial(quantized_if_asked, quantize="int8")
    check = partial(check_fits, Settings(quantize="int8"))
    load = partial(load_checkpoint, tmp_path, check=check, convert=convert)
    set_memory(monkeypatch, enough)
    assert same(load(), ours)
    set_memory(monkeypatch, enough - 1)
    with refused("int8, loaded and packed, take"):
        load()
    with pytest.raises(ValueError, match="--quantize int8 is for CPUs, here the device is cuda"):
        load(device="cuda")


# --------------------------------------------------------------------------------------------------
# Integers


KINDS = {"gpt2": {}, "untied": LLAMA, "tied": LLAMA | {"tied": True, "mlp_bias": True}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_integers_made_while_loading_are_those_of_the_model(kind, dtype, tmp_path):
    """
    Would catch: a matrix left in fp32, a part of a stacked one, GPT-2's transposed, rounded by
    another's scale; a tied head with integers of its own; an engine that makes integers of integers
    or serves a bias in bf16.
    """
    fields = KINDS[kind] | {"vocab_size": 2100}  # more rows than are rounded at once
    save_checkpoint(random_model(**fields), tmp_path)
    loaded = load_checkpoint(tmp_path, dtype=dtype)
    expected = quantized(loaded)
    model = load_checkpoint(tmp_path, dtype=dtype, convert=quantized)
    assert same(quantized(model), expected)
    is_tied = model.config.tied
    assert (model.lm_head.weight is model.wte.weight) == is_tied
    assert (model.lm_head.scale is model.wte.scale) == is_tied
    params = SamplingParams(temperature=0, max_tokens=9)
    answers = []
    for given, quantize in (loaded, "int8"), (model, "int8"), (model, "none"):
        engine = Engine(given, Settings(block_size=4, quantize=quantize))
        answers.append(engine.generate([[1, 2, 3]], params, progress=False))
        assert engine.runner.model.lm_head.weight.dtype == torch.int8
        without_compiler = packed_for_cpu(given, quantize).lm_head.weight
        is_shared = without_compiler.data_ptr() == model.lm_head.weight.data_ptr()
        assert is_shared == (given is model)
    assert answers[0] == answers[1] == answers[2]
    assert engine.weights.endswith("(int8)")


def test_serve_loads_integers(tmp_path):
    """Would catch: all in fp32 first, and integers made by the engine."""
    save_checkpoint(random_model(**LLAMA), tmp_path)
    args = serve.parse_args(["--model", str(tmp_path), "--device", "cpu", "--quantize", "int8"])
    assert serve.build_engine(args).weights.endswith("(int8)")


MEASURE = """
import sys, threading, time
import torch
from checkpoint import load_checkpoint
from ops.packed import quantized
def resident():
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) * 1024
torch.set_num_threads(1)
load_checkpoint(sys.argv[2], convert=quantized)  # what torch itself needs
before = peak = resident()
loading = True
def watch():
    global peak
    while loading:
        peak = max(peak, resident())
        time.sleep(0.0005)
watcher = threading.Thread(target=watch)
watcher.start()
model = load_checkpoint(sys.argv[1], convert=quantized)
loading = False
watcher.join()
size = sum(p.nbytes for p in model.parameters())
print(peak - before, resident() - before, size, "torch._dynamo" in sys.modules)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_integers_are_made_of_one_matrix_at_a_time(tmp_path):
    """
    In anonymous memory: at the peak the integers and the largest matrix in fp32, then the integers
    alone, each with 8 MiB to spare. Would catch: the model in fp32 first; temporaries as large as a
    matrix; and torch's compiler imported, to round a model without weights. Arrays are mapped one
    by one, so that those that are freed do not count.
    """
    fields = SHAPE | {"n_layer": 6, "n_embd": 1024, "vocab_size": 9_000}
    save_checkpoint(GPT(GPTConfig(**fields)).bfloat16(), tmp_path / "large")
    save_checkpoint(random_model(), tmp_path / "tiny")
    command = [sys.executable, "-c", MEASURE, tmp_path / "large", tmp_path / "tiny"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)},
    )
    *sizes, with_compiler = done.stdout.split()
    peak, after, size = map(int, sizes)
    assert 84e6 < size < 86e6
    assert 0.9 * size < after <= size + 2**23
    assert peak <= size + 4 * 9000 * 1024 + 2**23
    assert with_compiler == "False"


# --------------------------------------------------------------------------------------------------
# Memory that is free, and copies


MEMINFO = """\
MemTotal:        8000000 kB
MemFree:          300000 kB
MemAvailable:    6000000 kB
Buffers:          100000 kB
Cached:          5500000 kB
SwapFree:        9000000 kB
HugePages_Total:       0
"""


def test_memory_that_holds_cached_files_is_free(monkeypatch):
    """
    Of a machine that has just read a model nearly all is cached files: with MemFree for
    MemAvailable its pool was tiny, or the model did not fit. Without such a file, as on macOS,
    all of it counts.
    """
    monkeypatch.setattr(sizing, "open", lambda path: io.StringIO(MEMINFO), raising=False)
    monkeypatch.setattr(sizing.os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 10}.get)
    assert sizing.memory_of(torch.device("cpu")) == (6_000_000 * 1024, 163840)

    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(sizing, "open", missing)
    assert sizing.memory_of(torch.device("cpu")) == (163840, 163840)


def test_block_tables_are_as_long_as_texts_may_be():
    """
    A context of 131,072 made tables of 8,192 blocks, gathered in each step, whatever
    --max-model-len said.
    """
    model = random_model(**LLAMA)
    settings = Settings(block_size=4, num_blocks=9, max_num_seqs=2, max_model_len=17)
    engine = Engine(model, settings)
    assert engine.runner.known.block_tables.shape == (3, 5)
    prompts = [list(range(13)), list(range(20, 29))]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answers = engine.generate(prompts, params, progress=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        [tokens] = model.generate(torch.tensor([prompt]), 4).tolist()
        assert tokens == prompt + answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("can_pack", [True, False])
def test_packing_copies_only_what_it_packs(dtype, can_pack, monkeypatch):
    """
    The whole model was copied first: three times the memory at the start. Matrices that cannot be
    packed are the model's own. Without AVX-512 a bf16 model was served as it is, its norms and sums
    between layers in bf16 as well: all but matrices is fp32.
    """
    if not can_pack:
        monkeypatch.setattr(packed, "can_pack", lambda weight: False)
    model = random_model(**LLAMA | {"tied": True}).to(dtype)
    kind = PackedLinear if packed.can_pack(model.wte.weight) else UnpackedLinear
    tokens = torch.arange(9)[None]
    before = model(tokens)[0]
    served = packed_for_cpu(model)
    assert all(w.dtype == dtype and w.requires_grad for w in model.parameters())
    assert torch.equal(model(tokens)[0], before)
    embedding = model.wte.weight
    assert model.lm_head.weight is embedding
    assert {w.dtype for w in served.parameters()} == {torch.float32}
    assert not served.wte.weight.requires_grad
    is_shared = served.wte.weight.data_ptr() == embedding.data_ptr()
    assert is_shared == (dtype == torch.float32)
    matrices = {model.h[0].mlp.c_fc.weight: served.h[0].mlp.c_fc, embedding: served.lm_head}
    for weight, layer in matrices.items():
        assert isinstance(layer, kind)
        if kind is UnpackedLinear:
            assert layer.weight.dtype == dtype
            assert layer.weight.data_ptr() == weight.data_ptr()
    exact = deepcopy(model).float()(tokens)[0]
    error = (served(tokens)[0] - exact).abs().max()
    assert kind is PackedLinear or error <= (before - exact).abs().max() + 1e-5
