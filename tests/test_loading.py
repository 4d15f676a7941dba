"""
Memory: a model that does not fit is refused before it is loaded. Weights that operators need in
another form, packed or as integers, are converted while they are loaded.
"""

import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from test_checkpoint import LLAMA, SHAPE, random_model
from test_cpu import FORMATS

import checkpoint
import serve
from checkpoint import DTYPES, empty_model, load_checkpoint, save_checkpoint
from engine import sizing
from engine.engine import Engine
from engine.sizing import packed_if_it_fits
from model import GPT, GPTConfig
from ops import packed
from ops.choice import choose_ops
from ops.packed import Bf16Linear
from params import Settings

ROOT = Path(__file__).parents[1]


def set_memory(monkeypatch, free: float):
    monkeypatch.setattr(sizing, "memory_of", lambda device: (free, 2**60))


def refused(words: str):
    return pytest.raises(ValueError, match=f"^the model does not fit: its weights in {words}")


# bytes: 3 blocks: K and V, layers, KV heads, head size, slots, fp32
POOL = 3 * 2 * 3 * 2 * 8 * 16 * 4
EMBEDDING = 97 * 32
MATRICES = 3 * (64 * 32 + 32 * 32 + 256 * 32 + 32 * 128)
LARGEST = 256 * 32
NORMS = 7 * 32


ROWS = 2 * 97 + 3 * (64 + 32 + 256 + 32)  # with one scale per row and column
COLUMNS = 2 * 32 + 3 * (32 + 32 + 32 + 128)
HAS_C = choose_ops("auto")[0].name == "cpu"
ZEROS = (128 - 97) * 32  # that pad the head for cpu.c
IN_FP32 = 4 * (2 * EMBEDDING + MATRICES + NORMS) + POOL
# what is served, device and dtype -> bytes that are just enough
ENOUGH = {
    "bf16 on a CPU": (
        (Settings(), "cpu", torch.bfloat16),
        2 * (EMBEDDING + MATRICES + LARGEST) + 4 * (EMBEDDING + NORMS) + POOL,
    ),
    "as it is, on a GPU": (
        (Settings(), "cuda", torch.bfloat16),
        2 * (2 * EMBEDDING + MATRICES) + 4 * NORMS + POOL // 2,
    ),
    "fp32": ((Settings(), "cpu", torch.float32), IN_FP32 + HAS_C * 4 * (LARGEST + ZEROS)),
    "fp32 by torch": ((Settings(attention="torch"), "cpu", torch.float32), IN_FP32),
    "integers": (
        (Settings(quantize="int8"), "cpu", torch.float32),
        2 * EMBEDDING + MATRICES + 4 * (ROWS + COLUMNS + NORMS + LARGEST) + POOL,
    ),
}


@pytest.mark.parametrize("kind", ENOUGH)
def test_a_model_is_refused_at_one_byte_too_few_and_not_at_just_enough(kind, monkeypatch):
    """
    On a CPU this counts bf16 matrices with embeddings and norms in fp32, or integers of one byte
    each; one more matrix; and a pool for 33 tokens. A GPU keeps the weights as they are, and K and
    V in their dtype. Would catch: a copy made by the operators that is not counted, or one counted
    but not made.
    """
    (settings, device, dtype), enough = ENOUGH[kind]
    model = empty_model(GPTConfig(**LLAMA), dtype)
    set_memory(monkeypatch, enough)
    packed_if_it_fits(settings, device, model)
    set_memory(monkeypatch, enough - 1)
    name = "int8" if settings.quantize == "int8" else str(dtype).removeprefix("torch.")
    with refused(f"{name} take .* {device} has"):
        packed_if_it_fits(settings, device, model)


def test_what_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    """Integers on a GPU are also refused."""
    save_checkpoint(random_model(**LLAMA), tmp_path)
    monkeypatch.setattr(checkpoint, "set_weight", lambda *_: pytest.fail("it is loaded"))
    set_memory(monkeypatch, 1000)

    def load(settings: Settings, device: str = "cpu"):
        convert = partial(packed_if_it_fits, settings, device)
        load_checkpoint(tmp_path, device, dtype=torch.bfloat16, convert=convert)

    words = "bfloat16 take 0 MiB and 3 KV blocks 0 MiB, but cpu has 0 MiB free: "
    words += r"end .*--max-model-len, or .*--dtype bf16, --quantize int8 \(on a CPU\)"
    with refused(words):
        load(Settings())
    with refused("bfloat16 take .* and 4 KV blocks"):
        load(Settings(num_blocks=4))
    with pytest.raises(ValueError, match="--quantize int8 is for CPUs, but the device is cuda"):
        load(Settings(quantize="int8"), "cuda")


# --------------------------------------------------------------------------------------------------
# Packed, or converted to integers, while they are loaded


KINDS = {"gpt2": {}, "untied": LLAMA, "tied": LLAMA | {"tied": True, "mlp_bias": True}}


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize(("dtype", "quantize"), FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("tied-*", "*-auto")
def test_a_model_packed_while_loading_is_the_model(kind, dtype, quantize, attention, tmp_path):
    """
    Its engine must not pack anything again. Would catch: a matrix that is not converted; a part of
    a stacked matrix, or GPT-2's transposed one, packed by itself; integers with another's scale; a
    separate copy of a tied head; an engine that quantizes integers again, or serves a bias in bf16.
    """
    fields = KINDS[kind] | {"vocab_size": 2100}  # more than a panel
    save_checkpoint(random_model(**fields), tmp_path)
    settings = Settings(block_size=4, quantize=quantize, attention=attention)
    convert = partial(packed_if_it_fits, settings, "cpu")
    plain = load_checkpoint(tmp_path, dtype=DTYPES[dtype])
    model = load_checkpoint(tmp_path, dtype=DTYPES[dtype], convert=convert)
    expected, ours = (Engine(given, settings) for given in (plain, model))
    served, other = ours.device.model.state_dict(), expected.device.model.state_dict()
    assert served.keys() == other.keys()
    for name, weight in served.items():
        assert torch.equal(*(w.to_dense() if w.is_mkldnn else w for w in (weight, other[name])))
    assert ours.weights.endswith(f"({str(model.wte.weight.dtype)[6:]})")
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not weight.is_mkldnn and weight.dtype != torch.bfloat16:
            assert served[name].data_ptr() == weight.data_ptr()
    if quantize == "int8":
        assert torch.int8 in {weight.dtype for weight in model.parameters()}
        assert (model.lm_head.weight is model.wte.weight) == model.config.tied


@pytest.mark.parametrize(("dtype", "quantize"), FORMATS[:3])
def test_serve_packs_each_matrix_once(dtype, quantize, tmp_path, monkeypatch):
    """
    Would catch: all weights loaded first, and then packed by the engine; weights packed twice.
    """
    save_checkpoint(random_model(**LLAMA), tmp_path)
    events = []

    def note(owner, name: str):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *call: events.append(name) or function(*call))

    note(checkpoint, "set_weight")
    for kind in packed.PanelLinear, packed.Int8Linear, packed.Bf16Linear:
        note(kind, "fill")
    flags = f"--model={tmp_path} --device=cpu --quantize={quantize} --dtype={dtype}"
    serve.build_engine(serve.parse_args(flags.split()))
    assert events.count("fill") == 13 + (quantize == "int8")  # including the embedding
    # each as soon as it is loaded; the first after the embedding and a norm
    assert events.index("fill") <= 3
    assert events[-2:] == ["set_weight", "fill"]


MEASURE = """
import sys, threading, time
import torch
from checkpoint import load_checkpoint
from ops import packed
layer = getattr(packed, sys.argv[3], None)
packed.ARENA = 2**24  # small, so that there are several
dtype = getattr(torch, sys.argv[4], torch.int8)
how = {"convert": lambda model: packed.pack_weights(model, sys.argv[4], layer)}
how = {"dtype": dtype} if dtype.is_floating_point else how
def resident():
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) * 1024
torch.set_num_threads(1)
load_checkpoint(sys.argv[2], **how)  # what torch itself needs
before = peak = resident()
loading = True
def watch():
    global peak
    while loading:
        peak = max(peak, resident())
        time.sleep(0.0005)
watcher = threading.Thread(target=watch, daemon=True)  # so it ends if loading fails
watcher.start()
model = load_checkpoint(sys.argv[1], **how)
loading = False
watcher.join()
size = sum(p.nbytes for p in model.parameters())
print(peak - before, resident() - before, size, not sys.modules.keys() & {"torch._dynamo", "sympy"})
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ("", "float32"),
        ("", "bfloat16"),
        ("", "int8"),
        ("PanelLinear", "none"),
        ("PanelLinear", "int8"),
    ],
)
@pytest.mark.quick("PanelLinear-int8")
def test_one_matrix_at_a_time_is_loaded_and_packed(layer, kind, tmp_path):
    """
    This counts anonymous memory. The peak is the loaded weights and the largest matrix in fp32, and
    afterwards only the weights, each with 8 MiB to spare. Would catch: a second copy, or first the
    model as it is in the files; temporaries as large as a matrix; importing torch's compiler, which
    takes more than a second. Arrays are mapped one by one, so that freed ones do not count.
    """
    fields = SHAPE | {"n_layer": 10, "n_embd": 512, "vocab_size": 9_000}
    save_checkpoint(GPT(GPTConfig(**fields)).bfloat16(), tmp_path / "large")
    save_checkpoint(random_model(), tmp_path / "tiny")
    folders = [tmp_path / "large", tmp_path / "tiny"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *folders, layer, kind],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)},
        timeout=120,
    )
    *sizes, is_without_compiler = done.stdout.split()
    peak, after, size = map(int, sizes)
    head = 9000 * 512
    parameters = size / {"int8": 1, "bfloat16": 2}.get(kind, 4)
    assert 36e6 < parameters < 37e6
    assert 0.9 * size < after <= size + 2**23
    assert peak <= size + 4 * head + 2**23
    assert is_without_compiler == "True"


# --------------------------------------------------------------------------------------------------
# Free memory, and copies


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
    After a machine has read a model, nearly all of its memory is cached files. Previously MemFree
    was used instead of MemAvailable, so the pool was tiny, or the model did not fit. Without
    /proc/meminfo, as on macOS, all memory counts as free.
    """
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 10}.get)
    for text, free in {MEMINFO: 6_000_000 * 1024, None: 163840}.items():
        opened = [io.StringIO(text)] if text else FileNotFoundError
        monkeypatch.setattr(checkpoint, "open", MagicMock(side_effect=opened), raising=False)
        assert checkpoint.memory_of(torch.device("cpu")) == (free, 163840)


def test_block_tables_are_as_long_as_texts_may_be():
    """
    Previously a context of 131,072 made tables of 8,192 blocks, gathered in each step, even if
    --max-model-len was smaller.
    """
    settings = Settings(block_size=4, num_blocks=9, max_num_seqs=2, max_model_len=17)
    engine = Engine(random_model(**LLAMA), settings)
    assert engine.device.known.block_tables.shape == (3, 5)


@pytest.mark.parametrize("can_pack", [True, False])
def test_bf16_is_for_matrices_alone(can_pack, monkeypatch):
    """
    Previously, without AVX-512, a bf16 model was served unchanged, so its norms and the sums
    between layers were also in bf16. Now all except the matrices is fp32. The model itself is not
    changed.
    """
    if not can_pack:
        monkeypatch.setattr(packed, "can_pack", lambda: False)
    model = random_model(**LLAMA | {"tied": True}).bfloat16()
    served = packed.pack_weights(model, layer=Bf16Linear)
    assert all(w.dtype == torch.bfloat16 and w.requires_grad for w in model.parameters())
    assert model.lm_head.weight is model.wte.weight
    for name, weight in served.named_parameters():
        is_matrix = "c_" in name or "head" in name
        assert weight.dtype == (torch.bfloat16 if is_matrix else torch.float32)
        assert not weight.requires_grad
