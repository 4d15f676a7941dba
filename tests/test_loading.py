"""
Memory: a model that does not fit is refused before it is loaded, and packing copies only matrices.
"""

import io
from copy import deepcopy
from functools import partial

import pytest
import torch
from test_checkpoint import LLAMA, random_model

from checkpoint import SavedWeights, load_checkpoint, save_checkpoint
from engine import sizing
from engine.engine import Engine
from engine.sizing import check_fits
from ops import packed
from ops.packed import PackedLinear, UnpackedLinear, packed_for_cpu
from params import SamplingParams, Settings


def set_memory(monkeypatch, free: float, total: float = 2**60):
    monkeypatch.setattr(sizing, "memory_of", lambda device: (free, total))


def test_what_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    """
    At one byte too few, not at just enough: on a CPU weights twice and embeddings in fp32, too, and
    a pool for 33 tokens. A GPU holds the weights once, and K and V in their dtype.
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
    words = r"^the model does not fit: its weights in bfloat16, loaded and packed, take 0 MiB "
    words += r"and the smallest KV pool 0, cpu has 0 free: end .*--max-model-len, or .*--dtype bf16"
    with pytest.raises(ValueError, match=words):
        load(check=partial(check_fits, Settings()))
    assert not loaded
    set_memory(monkeypatch, enough)
    load(check=partial(check_fits, Settings()))
    assert loaded
    for settings, dtype in (Settings(num_blocks=4), torch.bfloat16), (Settings(), torch.float32):
        with pytest.raises(ValueError, match="does not fit"):
            check_fits(settings, ours, dtype, "cpu")
    on_gpu = partial(check_fits, Settings(), ours, torch.bfloat16, "cuda")
    set_memory(monkeypatch, once + pool // 2)
    on_gpu()
    set_memory(monkeypatch, once + pool // 2 - 1)
    with pytest.raises(ValueError, match=r"bfloat16 take .* cuda has"):
        on_gpu()


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
    packed = packed_for_cpu(model)
    assert all(w.dtype == dtype and w.requires_grad for w in model.parameters())
    assert torch.equal(model(tokens)[0], before)
    embedding = model.wte.weight
    assert model.lm_head.weight is embedding
    assert {w.dtype for w in packed.parameters()} == {torch.float32}
    assert not packed.wte.weight.requires_grad
    is_shared = packed.wte.weight.data_ptr() == embedding.data_ptr()
    assert is_shared == (dtype == torch.float32)
    matrices = {model.h[0].mlp.c_fc.weight: packed.h[0].mlp.c_fc, embedding: packed.lm_head}
    for weight, layer in matrices.items():
        assert isinstance(layer, kind)
        if kind is UnpackedLinear:
            assert layer.weight.dtype == dtype
            assert layer.weight.data_ptr() == weight.data_ptr()
    exact = deepcopy(model).float()(tokens)[0]
    error = (packed(tokens)[0] - exact).abs().max()
    assert kind is PackedLinear or error <= (before - exact).abs().max() + 1e-5
