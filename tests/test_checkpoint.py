"""
checkpoint.py: a directory is served as transformers would, or refused with words that say what to
change. One table for each file: a mutation of it, and what becomes of the directory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import checkpoint
from checkpoint import CheckpointError, load_checkpoint, load_config, save_checkpoint
from families import FAMILIES, read_fields
from model import GPT, GPTConfig, Rope

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
SHAPE = {"vocab_size": 97, "context_length": 33, "n_layer": 3, "n_head": 4, "n_embd": 32}
LLAMA = SHAPE | {"norm": "rms", "bias": False, "gated": True, "activation": "silu"}
LLAMA |= {"rope": {0: Rope(1e4)}, "n_kv_head": 2, "tied": False}
TOKENS = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(1))
EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"


def random_model(**changes) -> GPT:
    """
    A GPT whose every parameter is far from zero and one, so that no bias or norm can be lost
    unseen.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE | changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def same(a: GPT, b: GPT) -> bool:
    weights = b.state_dict()
    is_same = [torch.equal(weight, weights[name]) for name, weight in a.state_dict().items()]
    return len(is_same) == len(weights) and all(is_same) and a.config == b.config


def change_config(folder: Path, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, **changes):
    """None removes one."""
    path = folder / "model.safetensors"
    weights = load_file(path) | changes
    save_file({name: weight for name, weight in weights.items() if weight is not None}, path)


def refused(folder: Path, words: str):
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(folder)


# --------------------------------------------------------------------------------------------------
# Written, and read again


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu", "relu2"])
def test_transformers_opens_a_saved_model(tmp_path, activation, bias):
    ours = random_model(activation=activation, bias=bias, eos_token_ids=(5,))
    save_checkpoint(ours, tmp_path)
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.config.eos_token_id == 5
    with torch.no_grad():
        assert (ours(TOKENS)[0] - theirs.eval()(TOKENS).logits).abs().max() <= 1e-4


SAVED = [{}, {"bias": False}, {"n_kv_head": 2}, {"eos_token_ids": (3, 5), "dropout": 0.1}]
SAVED += [{"n_inner": 48, "tied": False}, LLAMA]


@pytest.mark.parametrize("fields", SAVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_saved_model_comes_back_to_the_bit(tmp_path, fields, dtype):
    """
    Also after its files have changed: a mapped weight would change with them, or end the process
    with SIGBUS. Matrices are contiguous, as the kernels read them.
    """
    folder = tmp_path / "a" / "b"
    ours = random_model(**fields).to(dtype)
    save_checkpoint(ours, folder)
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # or transformers refuses it
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    assert (HEAD in load_file(path)) == (not ours.config.tied)  # without the others' prefix
    again = load_checkpoint(folder)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    path.write_bytes(b"")
    assert same(again, ours.float()) and not again.training
    assert all(weight.is_contiguous() for weight in again.state_dict().values())
    assert (again.lm_head.weight is again.wte.weight) == again.config.tied


def test_the_configuration_is_written_last(tmp_path, monkeypatch):
    """A process that is killed before leaves no model. Other programs read the rest of it, too."""
    written = []
    write = checkpoint.write_atomically
    note = lambda path, f: written.append(path.name) or write(path, f)  # noqa: E731
    monkeypatch.setattr(checkpoint, "write_atomically", note)
    monkeypatch.setattr("common.write_atomically", note)
    save_checkpoint(random_model(eos_token_ids=(5, 7), dropout=0.1), tmp_path)
    assert written == ["model.safetensors", "config.json"] == sorted(os.listdir(tmp_path))[::-1]
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {"architectures": ["GPT2LMHeadModel"], "dtype": "float32", "bos_token_id": 5}
    expected |= {"eos_token_id": [5, 7], "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    assert config | expected == config


@pytest.mark.parametrize("bias", [True, False])
def test_matrices_are_written_as_gpt2_has_them(tmp_path, bias):
    """[in, out] for those of linear layers; biases of zeros for a model that has none."""
    ours = random_model(bias=bias)
    save_checkpoint(ours, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, weight in ours.state_dict().items():
        if name != HEAD:  # tied: written once
            is_linear = weight.ndim == 2 and name not in ("wte.weight", "wpe.weight")
            assert torch.equal(saved.pop("transformer." + name), weight.T if is_linear else weight)
    assert len(saved) == (0 if bias else 3 * 6 + 1)
    assert all(name.endswith("bias") and not weight.any() for name, weight in saved.items())


# --------------------------------------------------------------------------------------------------
# config.json

GPT2 = {"model_type": "gpt2"}
SAID = {
    "vocab_size": 97,
    "n_positions": 33,
    "n_layer": 3,
    "n_head": 6,
    "n_embd": 24,
    "n_inner": 100,
}
SAID |= {"n_kv_head": 2, "activation_function": "relu", "bias": False, "resid_pdrop": 0.25}
SAID |= {"layer_norm_epsilon": 0, "tie_word_embeddings": False, "eos_token_id": [7, 0], "n_ctx": 5}
MEANT = {"vocab_size": 97, "context_length": 33, "n_layer": 3, "n_head": 6, "n_embd": 24}
MEANT |= {"n_kv_head": 2, "activation": "relu", "bias": False, "dropout": 0.25, "n_inner": 100}
MEANT |= {"norm_epsilon": 0, "tied": False, "eos_token_ids": (7, 0)}


def test_each_key_of_a_configuration_sets_one_field():
    """The others are as in transformers' class, but for the dropout, which only training uses."""
    assert read_fields(GPT2 | SAID) == GPTConfig(**MEANT)
    defaults = transformers.GPT2Config(resid_pdrop=0.0).to_dict()
    nothing = dict.fromkeys(["tie_word_embeddings", "n_inner", "add_cross_attention"])
    assert read_fields(GPT2) == read_fields(GPT2 | nothing) == read_fields(defaults)


@pytest.mark.parametrize(("vocab_size", "ids"), [(50256, ()), (50257, (50256,)), (50304, (50256,))])
def test_gpt2s_end_of_text_counts_where_there_is_such_a_token(vocab_size, ids):
    """transformers writes 50256 for a GPT-2 of any vocabulary."""
    assert read_fields(GPT2 | {"vocab_size": vocab_size}).eos_token_ids == ids


def llama(**changes) -> dict:
    """A small configuration of a rotary family, changed."""
    name = changes.pop("model_type", "llama")
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "num_key_value_heads": 2, "vocab_size": 101}
    said = sizes | {"max_position_embeddings": 640, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    if name.startswith("gemma"):
        said |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 20}
        said |= {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    if name not in ("llama", "qwen2", "qwen3"):
        said["sliding_window"] = 9
    if name == "qwen3":
        said["head_dim"] = 32
    return {"model_type": name} | said | changes


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BOTH = SCALING | {"original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 2}
QWEN = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
GEMMA2 = {"model_type": "gemma2"}
GEMMA3 = {"model_type": "gemma3_text"}
LLAMA3 = {"rope_type": "llama3"}
ROPE7 = {"rope_theta": 7.0}
SERVED = [
    GEMMA3,
    GEMMA3 | {"sliding_window_pattern": 3},
    GEMMA3 | {"rope_scaling": LINEAR},  # of the layers that see all
    GEMMA2,
    GEMMA2 | {"layer_types": ["full_attention"] * 6},
    GEMMA2 | {"tie_word_embeddings": None},
    GEMMA2 | {"final_logit_softcapping": 30.0},
    {"model_type": "mistral"},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "qwen2"},
    {"model_type": "qwen2"} | QWEN | {"use_sliding_window": False},
    {"model_type": "qwen3"} | QWEN,
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": LINEAR},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": BOTH | LLAMA3},
    {"rope_scaling": SCALING | LLAMA3},
    {"rope_parameters": ROPE7 | {"rope_type": "default"}},
    {"rope_theta": 5.0, "rope_parameters": ROPE7},  # the inner one holds
    {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default"}},
    {"tie_word_embeddings": None},
    {"num_key_value_heads": None},
    {"quantization_config": None, "attention_sinks": 0, "unsloth_version": "1"},
]


@pytest.mark.parametrize("changes", SERVED, ids=str)
def test_a_configuration_is_read_as_transformers_reads_it(changes):
    """In the spelling of version 4, and in that of version 5, which says everything."""
    saved = llama(**changes)
    ours = read_fields(saved)
    if saved.get("tie_word_embeddings", 0) is None:  # transformers takes null for false
        del saved["tie_word_embeddings"]
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(saved)))
    assert read_fields(theirs.to_dict()) == ours


def test_the_other_name_of_gemmas_pattern():
    """Trap 5: the number has two names, and neither may be passed over."""
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        windows = read_fields(llama(**GEMMA3 | {name: 3})).windows
        assert windows == (9, 9, 0, 9, 9, 0), name
    foreign = read_fields(llama(**GEMMA2 | {"use_sliding_window": False}))  # no key of Gemma's
    assert foreign == read_fields(llama(**GEMMA2))


@pytest.mark.parametrize("name", list(FAMILIES)[1:])
def test_a_key_that_must_be_there(name):
    """
    Files of the hub leave some keys out, and those have transformers' defaults. A size or an
    epsilon that is missing would be a guess.
    """
    required = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    required |= {"intermediate_size", "max_position_embeddings", "rms_norm_eps"}
    if name == "mistral" or name.startswith("gemma"):
        required.add("sliding_window")
    if name.startswith("gemma"):
        required |= {"query_pre_attn_scalar", "hidden_activation"}
    saved = llama(model_type=name)
    for key in required:
        with pytest.raises(CheckpointError, match=f"{key} is missing: restore or download"):
            read_fields({other: value for other, value in saved.items() if other != key})
    whole = transformers.AutoConfig.for_model(**saved).to_dict()
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings", "use_sliding_window"):
        without = {other: value for other, value in whole.items() if other != key}
        assert read_fields(without) == read_fields(whole), key


TOKENS_7_8 = [{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<|im_start|>"}]


@pytest.mark.parametrize("name", ["<|im_end|>", {"content": "<|im_end|>"}])
@pytest.mark.parametrize("is_old", [False, True])
def test_the_tokens_that_end_a_text(tmp_path, name, is_old):
    """
    Any of three files may name one. Qwen's finetunes: <|im_end|> stood in tokenizer_config.json
    alone, and chats never ended.
    """
    added = {token["id"]: token for token in TOKENS_7_8}
    files = {
        "config.json": llama(eos_token_id=5),
        "generation_config.json": {"eos_token_id": [5, 6]},
        "tokenizer_config.json": {"eos_token": name, "added_tokens_decoder": added},
        "tokenizer.json": {},
    }
    if is_old:
        del files["tokenizer_config.json"]["added_tokens_decoder"]
        files["tokenizer.json"] = {"added_tokens": TOKENS_7_8}
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    assert load_config(tmp_path).eos_token_ids == (5, 6, 7)


BROKEN = ["", "{", "[]", "null", "[" * 100_000, '{"model_type": ["gpt2"]}']
VALUES = {
    "n_layer": ["three", True, 2.0, 0, -1, 10**9],
    "n_embd": [10**30, 30],
    "n_head": [0, 7, 10**9],
    "n_kv_head": [0, 5],
    "n_inner": [0],
    "n_positions": [2**31],
    "resid_pdrop": ["x", 1, -0.1],
    "layer_norm_epsilon": ["1e-5", float("nan"), -1e-9, 1.0],
    "bias": ["no", 1],
    "eos_token_id": [[1, "2"], -1, 10**9, True],
    "text_config": [5],
}
BROKEN += [json.dumps(GPT2 | {k: v}) for k, values in VALUES.items() for v in values]
ROPES = [{"type": "linear"}, {"type": "linear", "factor": True}, "linear", {"type": ["linear"]}]
BROKEN += [json.dumps(llama(rope_scaling=scaling)) for scaling in ROPES]
BROKEN += [json.dumps(llama(rope_theta=theta)) for theta in (0, None, 10**400)]
BROKEN += [json.dumps(llama(model_type="gemma2", query_pre_attn_scalar=n)) for n in (0, -4, None)]


@pytest.mark.parametrize("content", BROKEN)
def test_broken_configurations(tmp_path, content):
    """An epsilon that is a string made every request to the server fail, later."""
    (tmp_path / "config.json").write_text(content)
    refused(tmp_path, r"config\.json is not a model configuration \(.*: restore or download")


OFF = "chunked_attention"
HALF = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}
REFUSED = [  # what stands in config.json, the key that the refusal names
    ({"model_type": "mixtral"}, "model_type is 'mixtral', .* gpt2, llama,.* qwen3"),
    (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by"),
    (GPT2 | {"activation_function": "quick_gelu"}, "activation_function"),
    (GPT2 | {"rope_theta": 1e4}, "rope_theta"),
    ({"num_local_experts": 8}, "num_local_experts is 8"),
    (GEMMA3 | {"vision_config": {"depth": 2}}, "vision_config"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
    (GEMMA2 | {"hidden_activation": "mish"}, "hidden_activation is 'mish'"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", OFF]}, f"layer_types is '{OFF}'"),
    ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "1 windows for 6 layers"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": HALF}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": LINEAR | {"rope_theta": 7, "mscale": 2.0}}, "mscale is 2.0"),
    ({"rope_parameters": HALF, "rope_scaling": LINEAR}, "rope_scaling is"),
    ({"rope_parameters": {"full_attention": YARN}}, "full_attention is"),
    (GEMMA3 | {"rope_parameters": YARN}, "full_attention"),
    (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True"),
    ({"rope_scaling": BOTH | {"rope_type": "llama3", "low_freq_factor": 4.0}}, "not below"),
]
for option in ("scale_attn_weights", "is_causal"):  # of these two a no is not nothing
    REFUSED += [(GPT2 | {option: no}, f"{option} is {no}") for no in (False, 0)]
for kind in ("yarn", "dynamic", "longrope", "proportional"):
    REFUSED.append(({"rope_parameters": YARN | {"rope_type": kind}}, f"rope_type is '{kind}'"))
    old = {"rope_scaling": {"type": kind, "factor": 4.0}}
    REFUSED.append(({"model_type": "qwen2"} | old, f"rope_type is '{kind}'"))


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=str)
def test_a_key_that_would_change_the_computation_is_refused(tmp_path, changes, words):
    path = tmp_path / "config.json"
    is_gpt2 = changes.get("model_type") == "gpt2"
    path.write_text(json.dumps(changes if is_gpt2 else llama(**changes)))
    refused(tmp_path, rf"config\.json(:| is not a model configuration).* ?{words}")


# --------------------------------------------------------------------------------------------------
# Weights


def shards(folder: Path) -> list[Path]:
    """Spread the weights of a directory over three files, as the hub does."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    paths = [folder / f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, path in enumerate(paths):
        save_file({name: weights[name] for name in sorted(weights)[i::3]}, path)
    where = {name: paths[i % 3].name for i, name in enumerate(sorted(weights))}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths


@pytest.mark.parametrize("fields", [SHAPE, LLAMA])
def test_shards(tmp_path, fields):
    """q, k and v of one layer lie in three files. A missing or broken one is named."""
    ours = random_model(**fields)
    save_checkpoint(ours, tmp_path)
    path = shards(tmp_path)[1]
    assert same(load_checkpoint(tmp_path), ours)
    content = path.read_bytes()
    for part in (b"", content[:7], content[:1000], content[:-1]):
        path.write_bytes(part)
        refused(tmp_path, f"{path.name} cannot be read .*download the file")
    path.unlink()
    refused(tmp_path, f"{path.name} is missing")
    os.mkfifo(path)  # to open one waits for a writer
    refused(tmp_path, f"{path.name} is missing")


BROKEN_INDEX = ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"x": 5}}']


@pytest.mark.parametrize("content", BROKEN_INDEX)
def test_a_broken_index(tmp_path, content):
    save_checkpoint(random_model(), tmp_path)
    shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    refused(tmp_path, r"index\.json is broken .*: restore the file")
    index.write_text('{"weight_map": {"x": "/etc/../etc/passwd"}}')  # only files beside it are read
    refused(tmp_path, f"no model in {tmp_path}: passwd is missing")
    save_checkpoint(random_model(), tmp_path)  # a whole file goes before an index
    load_checkpoint(tmp_path)


PREFIXES = ["", "model.", "model.language_model.", "language_model.model.", "language_model."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(tmp_path, prefix):
    """Of a model saved without its head, of parts of larger ones."""
    ours = random_model(**LLAMA)
    save_checkpoint(ours, tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {n.replace("model.", prefix, 1): weight for n, weight in load_file(path).items()}
    save_file(renamed, path)
    assert same(load_checkpoint(tmp_path), ours)


def test_the_hubs_oldest_layout(tmp_path):
    """Its gpt2 has names without `transformer.`, and causal masks of two kinds."""
    ours = random_model()
    save_checkpoint(ours, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = {n.removeprefix("transformer."): weight for n, weight in load_file(path).items()}
    weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 33, 33).tril() for layer in range(3)}
    save_file(weights | {"h.2.attn.masked_bias": torch.tensor(-1e4)}, path)
    assert same(load_checkpoint(tmp_path), ours)


@pytest.mark.parametrize("said", [True, False, None])
def test_a_head_of_its_own_opens(tmp_path, said):
    """Some config.json say tied of a head that is not; the file counts, as in transformers."""
    save_checkpoint(random_model(), tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    change_config(tmp_path, tie_word_embeddings=said)
    change_weights(tmp_path, **{HEAD: embedding.clone()})
    assert load_checkpoint(tmp_path).config.tied == (said is not False)
    change_weights(tmp_path, **{HEAD: embedding + 1})
    again = load_checkpoint(tmp_path)
    assert torch.equal(again.lm_head.weight, embedding + 1) and not again.config.tied
    assert torch.equal(again.wte.weight, embedding)


ATTENTION = "transformer.h.1.attn.c_attn.weight"
MISMATCHES = [  # weights, what they are
    ({"transformer.ln_f.weight": None}, r"ln_f\.weight is missing, wanted \(32,\)"),
    ({HEAD: torch.ones(96, 32)}, r"lm_head\.weight is \(96, 32\), wanted \(97, 32\)"),
    ({"transformer.h.3.ln_1.weight": torch.ones(32)}, "h.3.ln_1.weight is no part of this model"),
    ({"transformer.score.weight": torch.ones(32)}, "score.weight is no part"),
    ({"wte.weight": torch.ones(97, 32)}, "wte.weight is there twice"),
    ({"transformer.h.0.attn.c_attn.wide.bias": torch.ones(32)}, "wide.bias is no part"),
]
for shape in [(31,), (32, 1), (1, 32), ()]:
    changed = {"transformer.h.1.ln_2.bias": torch.ones(shape)}
    MISMATCHES.append((changed, r"h\.1\.ln_2\.bias is .*, wanted \(32,\)"))
for shape in [(), (3,), (1, 1), (1, 32, 96)]:
    MISMATCHES.append(({ATTENTION: torch.ones(shape)}, r"c_attn\.weight is .*, wanted"))
for dtype in (torch.float8_e4m3fn, torch.int8, torch.float64, torch.int32):
    # quantized weights were read as if they were the numbers themselves
    quantized = torch.ones(32, 96).to(dtype)
    MISMATCHES.append(({ATTENTION: quantized}, f"the dtype of {ATTENTION} is .* F32, F16, BF16"))


@pytest.mark.parametrize(("changes", "words"), MISMATCHES)
def test_weights_that_do_not_match_are_refused(tmp_path, changes, words):
    """A file of four layers with n_layer 3 opened as another model."""
    save_checkpoint(random_model(), tmp_path)
    change_weights(tmp_path, **changes)
    refused(tmp_path, words)


SIZES = {"n_layer": 2**16 - 1, "n_embd": 2**30, "n_positions": 2**30, "vocab_size": 2**30}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_compared_with_the_file_first(tmp_path, name):
    """To build a model of so many layers takes for ever; other sizes overflow in torch."""
    save_checkpoint(random_model(), tmp_path)
    change_config(tmp_path, **{name: SIZES[name]})
    refused(tmp_path, r"weights do not match config\.json: .*, wanted .*: restore or download both")


def test_biases_beside_a_config_without_are_refused(tmp_path):
    """Zeros are saved for transformers' sake; others were ignored."""
    save_checkpoint(random_model(bias=False), tmp_path)
    change_weights(tmp_path, **{"transformer.ln_f.bias": torch.full((32,), 0.5)})
    refused(tmp_path, r"ln_f\.bias is no part of this model")


# --------------------------------------------------------------------------------------------------
# Memory

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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_no_second_copy(tmp_path, dtype):
    """
    At the peak 1.3 times the loaded weights, in anonymous memory. Nor is torch's compiler imported,
    which takes more than a second.
    """
    fields = SHAPE | {"n_embd": 1024, "vocab_size": 12_000, "context_length": 512}
    save_checkpoint(GPT(GPTConfig(**fields)).bfloat16(), tmp_path / "large")  # 100 MB
    save_checkpoint(random_model(), tmp_path / "tiny")
    command = [sys.executable, "-c", MEASURE, tmp_path / "large", tmp_path / "tiny", dtype]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    taken, size, with_compiler = done.stdout.split()
    assert 0.7 * int(size) < int(taken) <= 1.3 * int(size)
    assert with_compiler == "False"
