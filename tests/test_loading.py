"""
Opening directories: what config.json leaves unsaid, files in parts, dtypes, what loading takes.
"""

import json
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_checkpoint import SHAPE, random_model

import checkpoint
import serve
from checkpoint import (
    CheckpointError,
    SavedWeights,
    load_checkpoint,
    load_config,
    save_checkpoint,
)
from families import FAMILIES, columns, read_fields
from model import GPT, GPTConfig, Rope
from serving import sizing
from serving.cpu import PackedLinear, can_pack, packed_for_cpu
from serving.engine import Engine
from serving.flags import parse_args
from serving.params import SamplingParams
from serving.settings import Settings
from serving.sizing import check_fits
from tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]

# --------------------------------------------------------------------------------------------------
# config.json


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_transformers_classes(name):
    """
    A key that a file of the hub omits, each by itself and all at once: as transformers' class of
    the family has it, and no default of ours that the class does not know.
    """
    said = transformers.AutoConfig.for_model(name).to_dict()
    said |= {"resid_pdrop": 0.0} if name == "gpt2" else {}  # only training uses it
    whole = read_fields(said)
    assert read_fields({"model_type": name}) == whole
    assert len(said) > 25
    for key in said.keys() - {"model_type"}:
        assert read_fields({k: v for k, v in said.items() if k != key}) == whole, key
    old = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"}
    assert FAMILIES[name].defaults.keys() <= said.keys() | old | {"hidden_act"}


@pytest.mark.parametrize("name", list(FAMILIES)[1:])
def test_each_key_that_is_read_is_felt(name):
    """Would catch a key that is listed as understood and then forgotten."""
    pattern = {"layer_types": None} if "layer_types" in FAMILIES[name].defaults else {}
    base = {"model_type": name, "num_hidden_layers": 30, "use_sliding_window": "qwen" in name}
    unlike = {
        "layer_types": ["full_attention"] * 30,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    unlike |= {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    unlike |= {"eos_token_id": 7, "sliding_window": 5, "rope_theta": 7.0, "max_window_layers": 3}
    unlike |= {
        "rms_norm_eps": 0.5,
        "hidden_size": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 2,
    }
    unlike |= {"hidden_act": "gelu", "hidden_activation": "gelu", "use_sliding_window": False}
    if name == "gemma3_text":  # it has them for each kind of layer alone
        kinds = ("full_attention", "sliding_attention")
        unlike["rope_parameters"] = dict.fromkeys(kinds, unlike["rope_parameters"])
    before = read_fields(base | pattern)
    for key in FAMILIES[name].defaults:
        value = unlike.get(key)
        if value is None:
            value = {True: False, False: True}.get(FAMILIES[name].defaults[key], 4)
        is_felt = read_fields(base | {key: value}) != before
        assert is_felt == (key != "hidden_act" or not name.startswith("gemma")), key


def test_null_is_no_value():
    """tie_word_embeddings: null was untied; a soft cap that is null is none."""
    for name, tied in (("llama", False), ("gemma2", True), ("gpt2", True)):
        assert read_fields({"model_type": name, "tie_word_embeddings": None}).tied is tied
    bare = {"model_type": "gemma2", "attn_logit_softcapping": None}
    assert read_fields(bare).attention_softcap == 0 and read_fields(bare).logit_softcap == 30
    # Mistral's window is null since version 0.2, and 4096 where nothing is said
    assert set(read_fields({"model_type": "mistral", "sliding_window": None}).windows) == {0}
    assert set(read_fields({"model_type": "mistral"}).windows) == {4096}
    assert read_fields({"model_type": "mistral", "num_key_value_heads": None}).n_kv_head == 32


@pytest.mark.parametrize("key", ["scale_attn_weights", "is_causal"])
@pytest.mark.parametrize("value", [False, None, 0])
def test_no_is_not_always_nothing(tmp_path, key, value):
    """
    Of an unknown key it is passed over; of these two it changes what is computed: transformers then
    neither scales, nor hides what comes later.
    """
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", key: value}))
    with pytest.raises(CheckpointError, match=f"{key} is {value!r}, this code computes only True"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", key + "_x": value}))
    load_config(tmp_path)


LAYERS = {"num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        # trap 5: the number has two names, and neither may be passed over
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, (9, 9, 0, 9, 9, 0)),
        ({"model_type": "gemma3_text", "_sliding_window_pattern": 3}, (9, 9, 0, 9, 9, 0)),
        ({"model_type": "gemma3_text"}, (9, 9, 9, 9, 9, 0)),
        ({"model_type": "gemma2"}, (9, 0, 9, 0, 9, 0)),
        ({"model_type": "mistral"}, (9,) * 6),
        ({"model_type": "qwen2", "max_window_layers": 2}, (0,) * 6),
        (
            {"model_type": "qwen3", "max_window_layers": 2, "use_sliding_window": True},
            (0, 0, 9, 9, 9, 9),
        ),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 6}, (0,) * 6),
        # no key of Gemma's: transformers passes over it
        ({"model_type": "gemma2", "use_sliding_window": False}, (9, 0, 9, 0, 9, 0)),
    ],
)
def test_windows(said, windows):
    assert read_fields(LAYERS | {"sliding_window": 9} | said).windows == windows


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = LLAMA3 | {"original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("said", "rope"),
    [
        ({}, Rope(10000.0)),
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(5e5, 2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, Rope(10000.0, 2.0)),
        (
            {"rope_scaling": LLAMA3_LENGTH | {"rope_type": "llama3"}},
            Rope(10000.0, 8.0, (1.0, 4.0, 512.0)),
        ),
        (
            {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "max_position_embeddings": 640},
            Rope(10000.0, 8.0, (1.0, 4.0, 640.0)),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7}}, Rope(7.0)),
        # what stands in the inner one holds
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, Rope(7.0)),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_type": "default"}}, Rope(5.0)),
    ],
)
def test_spellings_of_rotary_positions(said, rope):
    """Each is read as transformers reads it."""
    said = {"model_type": "llama", **said}
    assert read_fields(said).rope == {0: rope}
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(said))).to_dict()
    assert read_fields(theirs).rope == {0: rope}


def test_the_two_bases_of_gemma_3():
    """Scaling is for the layers that see all."""
    said = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    wanted = {4096: Rope(1e4), 0: Rope(1e6, 8.0)}
    assert read_fields(said).rope == wanted
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(said))).to_dict()
    assert read_fields(theirs).rope == wanted


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"rope_theta": 0}, "rope_theta is 0: a positive number is wanted"),
        ({"rope_theta": None}, "rope_theta is None: a positive number"),
        ({"rope_theta": 10**400}, "is not a model configuration"),
        ({"rope_scaling": {"type": "linear"}}, "is not a model configuration .'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True: a positive"),
        ({"rope_scaling": {"type": ["linear"]}}, "is not a model configuration"),
        ({"rope_scaling": "linear"}, "is not a model configuration"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "is not a model configuration"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -4}, "attention_scale is"),
        ({"text_config": 5}, "is not a model configuration"),
        # a larger model's, whose text part does not say what it is
        ({"model_type": "gemma3", "text_config": LAYERS}, "model_type is 'gemma3', this code"),
    ],
)
def test_what_is_no_configuration(tmp_path, said, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | said))
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


def test_a_table():
    text = """
         a    b
    x    1    -
    y    "s"  null
    """
    assert columns(text, json.loads) == {"a": {"x": 1, "y": "s"}, "b": {"y": None}}


def test_an_end_of_text_that_only_the_tokenizer_names(tmp_path):
    """Qwen's finetunes: <|im_end|> stood in tokenizer_config.json alone, and chats never ended."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    tokens = {"7": {"content": "<|im_end|>"}, "8": {"content": "<|im_start|>"}}
    for name, ends in (("<|im_end|>", (5, 6, 7)), ({"content": "<|im_end|>"}, (5, 6, 7))):
        said = {"eos_token": name, "added_tokens_decoder": tokens}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        assert load_config(tmp_path).eos_token_ids == ends
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "x"}))
    assert load_config(tmp_path).eos_token_ids == (5, 6)


# --------------------------------------------------------------------------------------------------
# Directories

LLAMA = SHAPE | {"norm": "rms", "bias": False, "gated": True, "activation": "silu"}
LLAMA |= {"rope": {0: Rope(1e4)}, "n_kv_head": 2, "tied": False}


def same(a: GPT, b: GPT) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(w, theirs[n]) for n, w in ours.items())


def in_shards(folder: Path) -> list[str]:
    """Spread the weights of a directory over three files, as the hub does; the files' names."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    where = {name: names[i % 3] for i, name in enumerate(sorted(weights))}
    for name in names:
        save_file({w: weights[w] for w in weights if where[w] == name}, folder / name)
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(index)
    return names


@pytest.mark.parametrize("fields", [SHAPE, LLAMA])
def test_shards(tmp_path, fields):
    """q, k and v of one layer lie in three files. What is missing or broken is named."""
    ours = random_model(**fields)
    save_checkpoint(ours, tmp_path)
    names = in_shards(tmp_path)
    assert same(load_checkpoint(tmp_path), ours)
    path = tmp_path / names[1]
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{names[1]} cannot be read .*download the file"):
        load_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{names[1]} is missing, .*index.json names it"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "place", ["../model.safetensors", "/tmp/model.safetensors", "a/b.safetensors"]
)
def test_an_index_names_files_beside_it(tmp_path, place):
    save_checkpoint(random_model(**SHAPE), tmp_path / "dir")
    in_shards(tmp_path / "dir")
    index = tmp_path / "dir" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": place}}))
    with pytest.raises(CheckpointError, match=r"names .*: only files beside it are read"):
        load_checkpoint(tmp_path / "dir")


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 5}', '{"weight_map": {"x": 5}}'])
def test_a_broken_index(tmp_path, content):
    save_checkpoint(random_model(**SHAPE), tmp_path)
    in_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is broken .*: restore the file"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_of_files(tmp_path, dtype):
    ours = random_model(**LLAMA)
    save_checkpoint(ours.to(dtype), tmp_path)
    assert same(load_checkpoint(tmp_path, dtype=torch.float32), ours.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64, torch.int32])
def test_other_dtypes_are_refused(tmp_path, dtype):
    """Quantized weights were read as if they were the numbers themselves."""
    save_checkpoint(random_model(**LLAMA), tmp_path)
    path = tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = load_file(path)
    save_file(weights | {name: weights[name].to(dtype)}, path)
    with pytest.raises(CheckpointError, match=rf"the dtype of {name} is .* F32, F16, BF16"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "prefix", ["", "model.", "model.language_model.", "language_model.model.", "language_model."]
)
def test_prefixes(tmp_path, prefix):
    """Of a model saved without its head, of parts of larger ones."""
    ours = random_model(**LLAMA)
    save_checkpoint(ours, tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {n.replace("model.", prefix, 1): weight for n, weight in load_file(path).items()}
    save_file(renamed, path)
    assert same(load_checkpoint(tmp_path), ours)


def test_a_padded_vocabulary(tmp_path):
    """GPT-2's 50257 tokens in 50304 rows: the rows are what config.json says."""
    ours = random_model(**SHAPE | {"vocab_size": 128})
    save_checkpoint(ours, tmp_path)
    assert same(load_checkpoint(tmp_path), ours)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 97}))
    with pytest.raises(CheckpointError, match=r"wte.weight is \(128, 32\), wanted \(97, 32\)"):
        load_checkpoint(tmp_path)


def test_once_loaded_the_files_may_change(tmp_path):
    """
    A mapped weight would change with its file, or end the process with SIGBUS, when `cp` writes
    another model over it.
    """
    ours = random_model(**SHAPE)
    save_checkpoint(ours, tmp_path)
    path = tmp_path / "model.safetensors"
    loaded = load_checkpoint(tmp_path)
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.write(b"\xff" * size)
    assert same(loaded, ours)
    with path.open("wb"):
        pass
    assert same(loaded, ours)


def test_large_weights_are_copied_in_pieces(tmp_path, monkeypatch):
    """Of odd numbers of rows, stacked and transposed ones too."""
    for fields in (SHAPE, LLAMA):
        ours = random_model(**fields)
        save_checkpoint(ours, tmp_path)
        for piece in (1, 100, 7 * 32):
            monkeypatch.setattr(checkpoint, "PIECE", piece)
            assert same(load_checkpoint(tmp_path), ours)


MEASURE = """
import sys, threading, time
from checkpoint import load_checkpoint
import torch
def resident():
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) * 1024
load_checkpoint(sys.argv[2])  # what torch itself needs
before = peak = resident()
loading = True
def watch():
    global peak
    while loading:
        peak = max(peak, resident())
        time.sleep(0.0005)
watcher = threading.Thread(target=watch)
watcher.start()
model = load_checkpoint(sys.argv[1], dtype=getattr(torch, sys.argv[3]))
loading = False
watcher.join()
size = sum(p.numel() * p.element_size() for p in model.parameters())
print(max(peak, resident()) - before, size, "torch._dynamo" in sys.modules)
"""


@pytest.fixture(scope="module")
def large_and_tiny(tmp_path_factory) -> list[Path]:
    """The directories of two models, the first one 100 MB of bf16."""
    folders = [tmp_path_factory.mktemp(name) for name in ("large", "tiny")]
    fields = SHAPE | {"n_embd": 1024, "vocab_size": 12_000, "context_length": 512}
    save_checkpoint(GPT(GPTConfig(**fields)).bfloat16(), folders[0])
    save_checkpoint(random_model(**SHAPE), folders[1])
    return folders


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_no_second_copy(large_and_tiny, dtype):
    """
    At the peak 1.3 times what is loaded, in anonymous memory. Nor is torch's compiler imported,
    which takes more than a second.
    """
    command = [sys.executable, "-c", MEASURE, *large_and_tiny, dtype]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    taken, size, with_compiler = done.stdout.split()
    assert 0.7 * int(size) < int(taken) <= 1.3 * int(size)
    assert with_compiler == "False"


# --------------------------------------------------------------------------------------------------
# What fits


def test_what_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    """
    At one byte too few, not at just enough: on a CPU weights twice and embeddings in fp32, too, and
    a pool for 33 tokens.
    """
    ours = random_model(**LLAMA)
    save_checkpoint(ours, tmp_path)
    pool = 3 * 2 * 3 * 2 * 8 * 16 * 4  # 3 blocks: K and V, layers, KV heads, head size, slots, fp32
    once = 2 * sum(w.numel() for w in ours.parameters())
    enough = 2 * once + 4 * ours.wte.weight.numel() + pool
    settings = Settings()
    check = partial(check_fits, settings)
    loaded = []
    read = SavedWeights.read_into
    monkeypatch.setattr(SavedWeights, "read_into", lambda *a: loaded.append(a) or read(*a))
    monkeypatch.setattr(sizing, "memory_of", lambda device: (enough - 1, 2**40))
    with pytest.raises(
        ValueError,
        match=r"^the model does not fit: its weights in bfloat16, loaded and packed, take 0 MiB "
        r"and the smallest KV pool 0, cpu has 0 free: end .*--max-model-len, or .*--dtype bf16",
    ):
        load_checkpoint(tmp_path, dtype=torch.bfloat16, check=check)
    assert not loaded
    monkeypatch.setattr(sizing, "memory_of", lambda device: (enough, 2**40))
    load_checkpoint(tmp_path, dtype=torch.bfloat16, check=check)
    assert loaded
    with pytest.raises(ValueError, match="does not fit"):
        check_fits(Settings(num_blocks=4), ours, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="does not fit"):
        check_fits(settings, ours, torch.float32, "cpu")
    # a GPU holds the weights once, and K and V in their dtype
    monkeypatch.setattr(sizing, "memory_of", lambda device: (once + pool // 2, 2**40))
    check_fits(settings, ours, torch.bfloat16, "cuda")
    monkeypatch.setattr(sizing, "memory_of", lambda device: (once + pool // 2 - 1, 2**40))
    with pytest.raises(ValueError, match=r"bfloat16 take .* cuda has"):
        check_fits(settings, ours, torch.bfloat16, "cuda")


def test_a_server_that_does_not_fit_says_so(tmp_path, monkeypatch):
    save_checkpoint(random_model(**LLAMA), tmp_path)
    monkeypatch.setattr(sizing, "memory_of", lambda device: (0, 2**40))
    args = parse_args(["--model", str(tmp_path), "--device", "cpu"])
    with pytest.raises(ValueError, match=r"^the model does not fit"):
        serve.build_engine(args)


def test_block_tables_are_as_long_as_texts_may_be():
    """
    A context of 131,072 made tables of 8,192 blocks, gathered in each step, whatever
    --max-model-len said.
    """
    model = random_model(**LLAMA)
    engine = Engine(model, Settings(block_size=4, num_blocks=7, max_num_seqs=2))
    assert engine.max_model_len == 28  # what fits: not the context's 33
    assert engine.runner.known.block_tables.shape == (3, 7)
    assert "1 texts of 28 (the model's context has 33)" in engine.statement()
    engine = Engine(model, Settings(block_size=4, num_blocks=9, max_num_seqs=2, max_model_len=17))
    assert engine.runner.known.block_tables.shape == (3, 5)
    prompts = [list(range(13)), list(range(20, 29))]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answers = engine.generate(prompts, params, progress=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert model.generate(torch.tensor([prompt]), 4)[0, len(prompt) :].tolist() == answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_copies_only_what_it_packs(dtype):
    """The whole model was copied first: three times the memory at the start."""
    model = random_model(**LLAMA | {"tied": True}).to(dtype)
    tokens = torch.arange(9)[None]
    before = model(tokens)[0]
    packed = packed_for_cpu(model)
    assert all(w.dtype == dtype and w.requires_grad for n, w in model.named_parameters())
    assert torch.equal(model(tokens)[0], before) and model.lm_head.weight is model.wte.weight
    assert packed.wte.weight.dtype == torch.float32 and not packed.wte.weight.requires_grad
    is_shared = packed.wte.weight.data_ptr() == model.wte.weight.data_ptr()
    assert is_shared == (dtype == torch.float32)
    assert isinstance(packed.h[0].mlp.c_fc, PackedLinear) or not can_pack(model.wte.weight)


# --------------------------------------------------------------------------------------------------
# nanoGPT's checkpoints

CHARACTERS = "\n !abcdefghijklmnopqrstuvwxyz"


def write_nanogpt(folder: Path, meta=None, prefix="", bias=True, vocab_size=29, **more) -> dict:
    """A ckpt.pt as nanoGPT's train.py writes it, made by hand; the weights in it."""
    torch.manual_seed(0)
    C, L, T = 32, 2, 24
    shapes = {"transformer.wte.weight": (vocab_size, C), "transformer.wpe.weight": (T, C)}
    for i in range(L):
        h = f"transformer.h.{i}."
        shapes |= {h + "ln_1.weight": (C,), h + "ln_2.weight": (C,)}
        shapes |= {h + "attn.c_attn.weight": (3 * C, C), h + "attn.c_proj.weight": (C, C)}
        shapes |= {h + "mlp.c_fc.weight": (4 * C, C), h + "mlp.c_proj.weight": (C, 4 * C)}
    shapes["transformer.ln_f.weight"] = (C,)
    if bias:
        layers = {n: s for n, s in shapes.items() if "wte" not in n and "wpe" not in n}
        shapes |= {n.removesuffix("weight") + "bias": s[:1] for n, s in layers.items()}
    weights = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, T, T).tril()  # without Flash Attention
    args = {"n_layer": L, "n_head": 4, "n_embd": C, "block_size": T, "bias": bias}
    saved = {
        "model": {prefix + name: weight for name, weight in weights.items()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3}]},
        "model_args": args | {"vocab_size": vocab_size, "dropout": 0.2},
        "iter_num": 3,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "letters", "out_dir": "out"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(saved | more, folder / "ckpt.pt")
    if meta is not None:
        with (folder / "meta.pkl").open("wb") as f:
            pickle.dump(meta, f)
    return weights


def letters() -> dict:
    itos = dict(enumerate(CHARACTERS))
    return {"vocab_size": len(itos), "itos": itos, "stoi": {c: i for i, c in itos.items()}}


def nanogpt_logits(weights: dict, tokens: torch.Tensor, bias: bool) -> torch.Tensor:
    """nanoGPT's forward pass, by its formulas: exact GELU, pre-norms, a tied head."""
    w = {n.removeprefix("transformer."): x for n, x in weights.items()}
    T, C = tokens.shape[1], w["wte.weight"].shape[1]

    def layer(x, name):
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    def norm(x, name):
        return F.layer_norm(x, (C,), w[name + ".weight"], w.get(name + ".bias"), 1e-5)

    x = w["wte.weight"][tokens] + w["wpe.weight"][:T]
    for i in range(2):
        q, k, v = layer(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(C, 2)
        q, k, v = (y.view(1, T, 4, C // 4).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + layer(y.reshape(1, T, C), f"h.{i}.attn.c_proj")
        y = F.gelu(layer(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
        x = x + layer(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_checkpoints(tmp_path, capsys, prefix, bias):
    """What it computed, here and in transformers; its characters; no code of it is run."""
    weights = write_nanogpt(tmp_path / "out", letters(), prefix, bias)
    checkpoint.main(["convert", str(tmp_path / "out" / "ckpt.pt"), str(tmp_path / "dir")])
    assert capsys.readouterr().out == f"python serve.py --model {tmp_path / 'dir'}\n"
    tokens = torch.arange(24)[None] % 29
    wanted = nanogpt_logits(weights, tokens, bias)
    ours = load_checkpoint(tmp_path / "dir")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "dir").eval()
    with torch.no_grad():
        assert (ours(tokens)[0] - wanted).abs().max() < 1e-4
        assert (theirs(tokens).logits - wanted).abs().max() < 1e-4
    assert ours.config.tied and ours.config.eos_token_ids == () and ours.config.dropout == 0.2
    tokenizer = load_tokenizer(tmp_path / "dir")
    assert tokenizer.encode("hi all\n") == [CHARACTERS.index(c) for c in "hi all\n"]
    Engine(ours, Settings(num_blocks=4))
    with pytest.raises(SystemExit, match=r"dir holds a model already: name another directory"):
        checkpoint.main(["convert", str(tmp_path / "out" / "ckpt.pt"), str(tmp_path / "dir")])


def test_nanogpts_corpus_may_lie_where_it_was_trained(tmp_path):
    write_nanogpt(tmp_path / "out-letters")
    (tmp_path / "data" / "letters").mkdir(parents=True)
    (tmp_path / "data" / "letters" / "meta.pkl").write_bytes(pickle.dumps(letters()))
    assert checkpoint.convert(tmp_path / "out-letters" / "ckpt.pt", tmp_path / "dir") == ""
    assert load_tokenizer(tmp_path / "dir").encode("a") == [3]


def test_nanogpts_gpt2_has_more_rows_than_tokens(tmp_path):
    """50304 rows for 50257 tokens; the tokenizer is copied, or it is said where to have it."""
    write_nanogpt(tmp_path, vocab_size=50304)
    left = checkpoint.convert(tmp_path / "ckpt.pt", tmp_path / "dir")
    assert "`hf download openai-community/gpt2 tokenizer.json tokenizer_config.json" in left
    config = load_checkpoint(tmp_path / "dir").config
    assert (config.vocab_size, config.eos_token_ids) == (50304, (50256,))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    assert checkpoint.convert(tmp_path / "ckpt.pt", tmp_path / "other") == ""
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "{}"


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("where", ["checkpoint", "meta"])
def test_code_in_a_pickle_is_not_run(tmp_path, where):
    write_nanogpt(
        tmp_path,
        letters() | {"itos": Evil(tmp_path / "evil") if where == "meta" else letters()["itos"]},
        **({"config": Evil(tmp_path / "evil")} if where == "checkpoint" else {}),
    )
    with pytest.raises(SystemExit, match=r"holds more than tensors, .* could run any code") as said:
        checkpoint.main(["convert", str(tmp_path / "ckpt.pt"), str(tmp_path / "dir")])
    assert "\n" not in str(said.value)
    assert not (tmp_path / "evil").exists() and not (tmp_path / "dir").exists()


def test_what_is_no_nanogpt(tmp_path):
    cases = {
        "empty": b"", "text": b"hello",
        "other": {"state": 5}, "list": [1, 2],
        "args": {"model": {}, "model_args": {"n_layer": 2}},
    }  # fmt: skip
    for name, content in cases.items():
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(SystemExit, match=r"is no checkpoint of nanoGPT's|could run any code"):
            checkpoint.main(["convert", str(path), str(tmp_path / "dir")])
    with pytest.raises(SystemExit, match=r"No such file"):
        checkpoint.main(["convert", str(tmp_path / "none"), str(tmp_path / "dir")])
    with pytest.raises(SystemExit, match=r"is a directory: name the file in it, as .*/ckpt\.pt$"):
        checkpoint.main(["convert", str(tmp_path), str(tmp_path / "dir")])
    few = letters()
    del few["itos"][len(few["itos"]) - 1]
    write_nanogpt(tmp_path, few)
    with pytest.raises(SystemExit, match=r"has 28 characters, the model 29: put the model's own"):
        checkpoint.main(["convert", str(tmp_path / "ckpt.pt"), str(tmp_path / "dir")])
    syllables = letters()
    syllables["itos"][3] = "ab"
    write_nanogpt(tmp_path, syllables)
    with pytest.raises(SystemExit, match=r"meta\.pkl has other than single characters"):
        checkpoint.main(["convert", str(tmp_path / "ckpt.pt"), str(tmp_path / "dir")])
    weights = write_nanogpt(tmp_path, letters())
    double = {name: weight.double() for name, weight in weights.items()}
    write_nanogpt(tmp_path, letters(), model=double)
    with pytest.raises(SystemExit, match=r"weights in torch.float64, wanted fp32, bf16, fp16"):
        checkpoint.main(["convert", str(tmp_path / "ckpt.pt"), str(tmp_path / "dir")])
    weights = write_nanogpt(tmp_path)
    del weights["transformer.ln_f.weight"]
    write_nanogpt(tmp_path, model=weights)
    with pytest.raises(SystemExit, match=r"is no checkpoint of nanoGPT's .*ln_f"):
        checkpoint.main(["convert", str(tmp_path / "ckpt.pt"), str(tmp_path / "dir")])
    assert not (tmp_path / "dir").exists()
