"""
checkpoint.py: a directory is either served as transformers would, or refused with a message that
says what to change. There is a table for each file: a mutation of it, and what becomes of the
directory.
"""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointError, load_checkpoint, load_config, save_checkpoint
from families import FAMILIES, read_fields
from model import GPT, GPTConfig, Rope

transformers = pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).parents[1]
SHAPE = {"vocab_size": 97, "context_length": 33, "n_layer": 3, "n_head": 4, "n_embd": 32}
LLAMA = SHAPE | {"norm": "rms", "bias": False, "gated": True, "activation": "silu"}
LLAMA |= {"rope": {0: Rope(1e4)}, "n_kv_head": 2, "tied": False}
RANDOM = torch.Generator().manual_seed(1)
TOKENS = torch.randint(97, (2, 33), generator=RANDOM)
EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"


def random_model(**changes) -> GPT:
    """
    Return a GPT whose parameters are all far from zero and one, so that a lost bias or norm shows.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE | changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def same(a: GPT, b: GPT) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    has_all = a.config == b.config and ours.keys() == theirs.keys()
    return has_all and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a directory with a small GPT-2."""
    save_checkpoint(random_model(), tmp_path)
    return tmp_path


def change_weights(folder: Path, **changes):
    """Change weights in the file; None removes one."""
    path = folder / "model.safetensors"
    weights = load_file(path) | changes
    save_file({name: weight for name, weight in weights.items() if weight is not None}, path)


def refused(folder: Path, words: str):
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(folder)


# --------------------------------------------------------------------------------------------------
# Written, and read again


OPENED = [{"activation": "gelu"}, {"activation": "relu2", "bias": False}, LLAMA]
OPENED += [{"activation": "gelu_new", "n_inner": 48, "tied": False}]
OPENED += [LLAMA | {"qk_norm": True, "head_size": 16}]
OPENED += [LLAMA | {"qkv_bias": True, "proj_bias": True, "mlp_bias": True, "tied": True}]


@pytest.mark.parametrize("fields", OPENED)
def test_transformers_opens_a_saved_model(tmp_path, fields):
    """No weight is missing or left over. A GPT-2 without biases gets zeros for biases there."""
    ours = random_model(eos_token_ids=(5,), **fields)
    save_checkpoint(ours, tmp_path)
    open_saved = transformers.AutoModelForCausalLM.from_pretrained
    hf_model, info = open_saved(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert hf_model.config.eos_token_id == 5
    with torch.no_grad():
        expected = hf_model.eval()(TOKENS).logits
        logits, _ = ours(TOKENS)
    assert (logits - expected).abs().max() <= 1e-4


SAVED = [*OPENED, {"n_kv_head": 2, "eos_token_ids": (3, 5), "dropout": 0.1}]


@pytest.mark.parametrize("fields", SAVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.quick("dtype0-*", "*-fields1", "*-fields2")
def test_a_saved_model_comes_back_to_the_bit(tmp_path, fields, dtype):
    """
    It must not change when its files change later: a mapped weight would change with them, or end
    the process with SIGBUS. Matrices are contiguous, because the kernels read them that way.
    """
    folder = tmp_path / "a" / "b"
    ours = random_model(**fields).to(dtype)
    save_checkpoint(ours, folder)
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # or transformers 4 refuses it
    weights = load_file(path)
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert (HEAD in weights) == (not ours.config.tied)  # without the prefix of the others
    again = load_checkpoint(folder)
    lower = load_checkpoint(folder, dtype=torch.bfloat16).state_dict()
    keeps_norms = lower["ln_f.weight"].dtype == torch.float32
    assert keeps_norms == (ours.config.norm == "rms")
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    path.write_bytes(b"")
    assert same(again, ours.float())
    assert not again.training
    assert all(weight.is_contiguous() for weight in again.state_dict().values())
    assert (again.lm_head.weight is again.wte.weight) == again.config.tied


WRITTEN = """{"architectures": ["GPT2LMHeadModel"], "dtype": "float32", "bos_token_id": 5,
    "eos_token_id": [5, 7], "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}"""


def test_other_programs_read_the_rest_of_a_configuration(tmp_path):
    save_checkpoint(random_model(eos_token_ids=(5, 7), dropout=0.1), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config | json.loads(WRITTEN) == config


UNSAVED = [{"rope": {0: Rope(1e4, 2.0)}}, {"qk_norm": True, "qk_norm_late": True}]
UNSAVED += [{"rope": {}}]


def test_only_three_families_are_saved(tmp_path):
    """Another model's config.json would be wrong: scaled positions, late norms, RMS in GPT-2."""
    refused = pytest.raises(CheckpointError, match="only a new GPT-2, Llama or Qwen 3")
    for fields in UNSAVED:
        with refused:
            save_checkpoint(random_model(**LLAMA | fields), tmp_path)
    assert not any(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# config.json

SPELLED = """{"model_type": "gpt2", "vocab_size": 97, "n_positions": 33, "n_layer": 3, "n_head": 6,
    "n_embd": 24, "n_inner": 100, "n_kv_head": 2, "activation_function": "relu", "bias": false,
    "resid_pdrop": 0.25, "layer_norm_epsilon": 0, "tie_word_embeddings": false,
    "eos_token_id": [7, 0], "n_ctx": 5}"""
FIELDS = """{"vocab_size": 97, "context_length": 33, "n_layer": 3, "n_head": 6, "n_embd": 24,
    "n_inner": 100, "n_kv_head": 2, "activation": "relu", "bias": false, "dropout": 0.25,
    "norm_epsilon": 0, "tied": false}"""


def test_each_key_of_a_configuration_sets_one_field():
    """
    The other fields are as in transformers' class, except for the dropout, which is only used in
    training.
    """
    fields = json.loads(FIELDS)
    assert read_fields(json.loads(SPELLED)) == GPTConfig(eos_token_ids=(7, 0), **fields)
    defaults = transformers.GPT2Config(resid_pdrop=0.0).to_dict()
    gpt2 = json.loads(PLAIN)
    nothing = dict.fromkeys(["tie_word_embeddings", "n_inner", "add_cross_attention"])
    assert read_fields(gpt2) == read_fields(gpt2 | nothing) == read_fields(defaults)


def test_gpt2s_end_of_text_counts_where_there_is_such_a_token():
    """transformers writes 50256 for a GPT-2 of any vocabulary."""
    for vocab_size, ends in {50256: (), 50257: (50256,)}.items():
        config = read_fields(json.loads(PLAIN) | {"vocab_size": vocab_size})
        assert config.eos_token_ids == ends


ROPED = """{"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 64, "rms_norm_eps": 1e-5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 101,
    "max_position_embeddings": 640, "hidden_act": "silu", "eos_token_id": 7}"""
PLAIN = """{"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257,
    "n_positions": 1024, "resid_pdrop": 0.0, "layer_norm_epsilon": 1e-5, "eos_token_id": 50256,
    "activation_function": "gelu_new"}"""
OWN = {  # keys that only this family has
    "mistral": '{"sliding_window": 9}',
    "qwen2": '{"sliding_window": null}',
    "qwen3": '{"head_dim": 32, "sliding_window": null}',
    "olmo3": '{"sliding_window": 9}',
    "granitemoehybrid": """{"shared_intermediate_size": 40, "position_embedding_type": "rope",
        "layer_types": ["attention", "attention", "attention", "attention", "attention",
        "attention"], "num_local_experts": 0, "mamba_n_heads": 8, "logits_scaling": 4,
        "residual_multiplier": 0.2, "embedding_multiplier": 12, "attention_multiplier": 0.1}""",
    "gemma": """{"sliding_window": 9, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16,
        "query_pre_attn_scalar": 20, "attn_logit_softcapping": null,
        "final_logit_softcapping": null}""",
}


def changed(changes: str) -> dict:
    """
    Return a small config.json with these changes (JSON). It is a Llama's unless they name another
    family.
    """
    changes = json.loads(changes)
    name = changes.get("model_type", "llama")
    if name == "gpt2":
        return json.loads(PLAIN) | changes
    own = OWN.get("gemma" if name.startswith("gemma") else name, "{}")
    return json.loads(ROPED) | json.loads(own) | changes


SERVED = """
{"model_type": "gemma3_text"}
{"model_type": "gemma3_text", "sliding_window_pattern": 3, "torch_dtype": "bfloat16"}
{"model_type": "gemma3_text", "rope_local_base_freq": 500.0, "rope_theta": 90000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
{"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 2}}
{"model_type": "gemma2"}
{"model_type": "gemma2", "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention", "full_attention", "full_attention"]}
{"model_type": "gemma2", "tie_word_embeddings": null}
{"model_type": "gemma2", "final_logit_softcapping": 30.0}
{"model_type": "smollm3", "max_window_layers": 2}
{"model_type": "smollm3", "no_rope_layers": [1, 1, 0, 0, 1, 1]}
{"model_type": "olmo2"}
{"model_type": "olmo3", "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0}}
{"model_type": "granite", "logits_scaling": 8.0, "residual_multiplier": 0.22, "embedding_multiplier": 12, "attention_multiplier": 0.015625}
{"model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_experts_per_tok": 0}
{"model_type": "hunyuan_v1_dense", "head_dim": 16, "use_qk_norm": true, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}}
{"model_type": "nanochat", "hidden_act": "relu2", "final_logit_softcapping": 15.0}
{"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
{"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0}}
{"model_type": "mistral"}
{"model_type": "mistral", "sliding_window": null}
{"model_type": "qwen2"}
{"model_type": "qwen2", "use_sliding_window": false, "sliding_window": 9, "max_window_layers": 2}
{"model_type": "qwen3", "use_sliding_window": true, "sliding_window": 9, "max_window_layers": 2}
{"rope_theta": 5e5}
{"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}}
{"rope_scaling": {"type": "linear", "factor": 2.0}}
{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}}
{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
{"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
{"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}
{"rope_theta": 5.0, "rope_parameters": {"rope_type": "default"}}
{"rope_parameters": {"rope_theta": 7.0, "rope_type": "default", "partial_rotary_factor": 1.0}}
{"tie_word_embeddings": null}
{"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {"rope_type": "linear", "factor": 2}}
{"num_key_value_heads": null}
{"quantization_config": null, "attention_sinks": 0, "unsloth_version": "1"}
"""  # noqa: E501


# All keys of a file of each family, with the sizes of a small one. Published files have the keys of
# Granite 3 and Hunyuan; for the others, they are those of transformers' tests and classes.
PUBLISHED = """
{"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": null, "initializer_range": 0.02, "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention", "full_attention", "full_attention"], "max_window_layers": 28, "mlp_bias": false, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1, 1], "pad_token_id": 128004, "pretraining_tp": 2, "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": false, "use_sliding_window": false}
{"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "initializer_range": 0.02, "pad_token_id": 100277, "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "float32", "transformers_version": "4.47.0", "use_cache": true}
{"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "dtype": "bfloat16", "initializer_range": 0.02, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"], "pad_token_id": 100277, "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 80, "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window": 9, "tie_word_embeddings": false, "transformers_version": "4.57.1", "use_cache": true}
{"model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "initializer_range": 0.02, "logits_scaling": 8.0, "mlp_bias": false, "pad_token_id": 0, "residual_multiplier": 0.22, "rope_scaling": null, "rope_theta": 10000000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.49.0", "use_cache": true}
{"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 100257, "embedding_multiplier": 12, "initializer_range": 0.1, "logits_scaling": 10, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": false, "normalization_function": "rmsnorm", "num_experts_per_tok": 0, "output_router_logits": false, "pad_token_id": 100256, "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.01, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.56.0", "use_cache": true}
{"model_type": "hunyuan_v1_dense", "add_classification_head": false, "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": false, "attention_dropout": 0.1, "attention_head_dim": 16, "bos_token_id": 120000, "cla_share_factor": 2, "class_num": 0, "dense_list": [1024, 0], "head_dim": 16, "im_end_id": 6, "im_newline_id": 12, "im_start_id": 5, "initializer_range": 0.02, "mask_init_id": 13, "mlp_bias": false, "norm_type": "rms", "org_vocab_size": 101, "pad_id": 120002, "pad_token_id": 120002, "pool_type": "last", "pretraining_tp": 1, "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"}, "rope_theta": 10000.0, "sep_token_id": 120007, "text_end_id": 8, "text_start_id": 7, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": true, "use_cla": false, "use_qk_norm": true, "use_rotary_pos_emb": true}
{"model_type": "nanochat", "architectures": ["NanoChatForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0, "dtype": "bfloat16", "final_logit_softcapping": 15.0, "hidden_act": "relu2", "initializer_range": 0.02, "pad_token_id": 1, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": false, "transformers_version": "5.0.0.dev0", "use_cache": true}
"""  # noqa: E501


@pytest.mark.parametrize("changes", [*SERVED.strip().splitlines(), *PUBLISHED.strip().splitlines()])
def test_a_configuration_is_read_as_transformers_reads_it(changes):
    """
    Both spellings are read: that of version 4, and that of version 5, which states everything.
    """
    saved = changed(changes)
    ours = read_fields(saved)
    if saved.get("tie_word_embeddings", 0) is None:  # transformers takes null for false
        del saved["tie_word_embeddings"]
    hf_model = transformers.AutoConfig.for_model(**json.loads(json.dumps(saved)))
    assert read_fields(hf_model.to_dict()) == ours


def test_the_other_name_of_gemmas_pattern():
    """The number has two names, and neither may be ignored."""
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        saved = changed('{"model_type": "gemma3_text"}')
        config = read_fields(saved | {name: 3})
        assert config.windows == (9, 9, 0, 9, 9, 0), name


REQUIRED = """vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size
    max_position_embeddings rms_norm_eps sliding_window query_pre_attn_scalar hidden_activation
    n_layer n_head n_embd n_positions layer_norm_epsilon activation_function"""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_must_be_there(name):
    """
    Files on the hub leave some keys out, and then transformers' defaults apply. A missing size or
    epsilon would have to be guessed.
    """
    saved = changed(json.dumps({"model_type": name}))
    for key in saved.keys() & set(REQUIRED.split()) & set(FAMILIES[name].names.values()):
        with pytest.raises(CheckpointError, match=f"{key} is missing: restore or download"):
            read_fields({other: value for other, value in saved.items() if other != key})
    whole = transformers.AutoConfig.for_model(**saved).to_dict() | {"eos_token_id": None}
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings", "use_sliding_window"):
        without = {other: value for other, value in whole.items() if other != key}
        assert read_fields(without) == read_fields(whole), key


ADDED = '[{"id": 7, "content": "<|im_end|>"}, {"id": 8, "content": "<|im_start|>"}]'
LISTED = '{"7": {"content": "<|im_end|>"}, "8": {"content": "<|im_start|>"}}'


@pytest.mark.parametrize("name", ['"<|im_end|>"', '{"content": "<|im_end|>"}'])
@pytest.mark.parametrize("is_old", [False, True])
def test_the_tokens_that_end_a_text(tmp_path, name, is_old):
    """
    Any of three files may name one. In Qwen's finetunes only tokenizer_config.json had <|im_end|>,
    and chats never ended. Where the model is part of a larger one, the larger one's end was lost.
    """
    part = json.dumps(changed('{"eos_token_id": 5}'))
    listed = "null" if is_old else LISTED  # as transformers 5 saves them: only in tokenizer.json
    files = {
        "config.json": f'{{"eos_token_id": [5, 4], "text_config": {part}}}',
        "generation_config.json": '{"eos_token_id": [5, 6]}',
        "tokenizer_config.json": f'{{"eos_token": {name}, "added_tokens_decoder": {listed}}}',
        "tokenizer.json": f'{{"added_tokens": {ADDED if is_old else "[]"}}}',
    }
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    assert load_config(tmp_path).eos_token_ids == (5, 4, 6, 7)


BROKEN = """
{"model_type": "gpt2", "n_layer": "three"}
{"model_type": "gpt2", "n_layer": true}
{"model_type": "gpt2", "n_layer": 2.0}
{"model_type": "gpt2", "n_layer": 0}
{"model_type": "gpt2", "n_layer": 1000000000}
{"model_type": "gpt2", "n_embd": 1000000000000000000000000000000}
{"model_type": "gpt2", "n_embd": 30}
{"model_type": "gpt2", "n_head": 0}
{"model_type": "gpt2", "n_head": 7}
{"model_type": "gpt2", "n_kv_head": 0}
{"model_type": "gpt2", "n_kv_head": 5}
{"model_type": "gpt2", "n_inner": 0}
{"model_type": "gpt2", "n_positions": 2147483648}
{"model_type": "gpt2", "resid_pdrop": "x"}
{"model_type": "gpt2", "resid_pdrop": 1}
{"model_type": "gpt2", "resid_pdrop": -0.1}
{"model_type": "gpt2", "layer_norm_epsilon": "1e-5"}
{"model_type": "gpt2", "layer_norm_epsilon": NaN}
{"model_type": "gpt2", "layer_norm_epsilon": -1e-9}
{"model_type": "gpt2", "layer_norm_epsilon": 1.0}
{"model_type": "gpt2", "bias": "no"}
{"model_type": "gpt2", "eos_token_id": [1, "2"]}
{"model_type": "gpt2", "eos_token_id": -1}
{"model_type": "gpt2", "eos_token_id": 50257}
{"model_type": "gpt2", "eos_token_id": true}
{"model_type": "gpt2", "text_config": [5]}
{"num_hidden_layers": 1000000000}
{"model_type": "mistral", "sliding_window": -1}
{"head_dim": 15}
{"rope_scaling": {"type": "linear"}}
{"rope_scaling": {"type": "linear", "factor": true}}
{"rope_scaling": "linear"}
{"rope_scaling": {"type": ["linear"]}}
{"rope_theta": 0}
{"rope_theta": Infinity}
{"rope_theta": null}
{"model_type": "gemma2", "query_pre_attn_scalar": 0}
{"model_type": "gemma2", "query_pre_attn_scalar": -4}
{"model_type": "gemma2", "query_pre_attn_scalar": null}
{"model_type": "gemma2", "attn_logit_softcapping": -1}
"""
NO_CONFIGURATION = ["", "{", "[]", "null", "[" * 100_000, '{"model_type": ["gpt2"]}']


@pytest.mark.parametrize("content", [*NO_CONFIGURATION, *BROKEN.strip().splitlines()])
def test_broken_configurations(tmp_path, content):
    """Previously an epsilon that was a string made every request to the server fail."""
    if content not in NO_CONFIGURATION:
        content = json.dumps(changed(content))
    (tmp_path / "config.json").write_text(content)
    message = r"config\.json is not a model .* generation_config\.json .* \(.*: restore or download"
    refused(tmp_path, message)


REFUSED = """
{"model_type": "mixtral"} -> model_type is 'mixtral', .* gpt2, llama,.* qwen3
{"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": true} -> scale_attn_by
{"model_type": "gpt2", "scale_attn_weights": false} -> scale_attn_weights is False
{"model_type": "gpt2", "is_causal": 0} -> is_causal is 0
{"model_type": "gpt2", "activation_function": "quick_gelu"} -> activation_function is 'quick_gelu'
{"model_type": "gpt2", "rope_theta": 1e4} -> rope_theta
{"num_local_experts": 8} -> num_local_experts is 8
{"model_type": "gemma3_text", "vision_config": {"depth": 2}} -> vision_config
{"quantization_config": {"bits": 4}} -> quantization_config
{"hidden_act": "quick_gelu"} -> hidden_act is 'quick_gelu'
{"model_type": "gemma2", "hidden_activation": "mish"} -> hidden_activation is 'mish'
{"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]} -> layer_types is 'chunked_attention'
{"model_type": "qwen3", "layer_types": ["full_attention"]} -> 1 windows for 6 layers
{"partial_rotary_factor": 0.5} -> partial_rotary_factor is 0.5
{"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}} -> partial_rotary_factor is 0.5
{"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 7, "mscale": 2.0}} -> mscale is 2.0
{"rope_parameters": {"full_attention": {"rope_theta": 7}}} -> full_attention is
{"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}} -> full_attention
{"model_type": "gemma2", "use_bidirectional_attention": true} -> use_bidirectional_attention
{"attn_logit_softcapping": 50.0} -> attn_logit_softcapping is 50.0
{"model_type": "mistral", "attention_bias": true} -> attention_bias is True
{"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}} -> not below
{"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]} -> layer_types is 'mamba'
{"model_type": "granitemoehybrid", "num_local_experts": 8} -> num_local_experts is 8
{"model_type": "granitemoehybrid", "position_embedding_type": "nope"} -> position_embedding_type is 'nope'
{"model_type": "hunyuan_v1_dense", "use_cla": true} -> use_cla is True
{"model_type": "smollm3", "sliding_window": 9, "use_sliding_window": true} -> sliding_window is 9
{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": false}} -> truncate is False
{"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", "factor": 4.0}} -> rope_type is 'longrope'
{"model_type": "qwen2", "rope_scaling": {"type": "dynamic", "factor": 4.0}} -> rope_type is 'dynamic'
"""  # noqa: E501


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_key_that_would_change_the_computation_is_refused(tmp_path, row):
    changes, words = row.split(" -> ")
    (tmp_path / "config.json").write_text(json.dumps(changed(changes)))
    refused(tmp_path, rf"config\.json(:| is not a model configuration).* ?{words}")


# --------------------------------------------------------------------------------------------------
# Weights


def shards(folder: Path) -> list[Path]:
    """
    Spread the weights of a directory over files as the hub does, here with one file per weight.
    """
    weights = load_file(folder / "model.safetensors")
    hub.save_torch_state_dict(weights, folder, max_shard_size=1)
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize("fields", [SHAPE, LLAMA])
def test_shards(tmp_path, fields):
    """A missing or broken shard is named."""
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
    os.mkfifo(path)  # opening it would wait for a writer
    refused(tmp_path, f"{path.name} is missing")


BROKEN_INDEX = ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"x": 5}}']


def test_a_broken_index(folder):
    shards(folder)
    index = folder / "model.safetensors.index.json"
    for content in BROKEN_INDEX:
        index.write_text(content)
        refused(folder, r"index\.json is broken .*: restore the file")
    index.write_text('{"weight_map": {"x": "/etc/../etc/passwd"}}')  # only files beside it are read
    refused(folder, f"no model in {folder}: passwd is missing")
    save_checkpoint(random_model(), folder)  # a whole file is preferred to an index and its shards
    save_file({EMBEDDING: torch.zeros(2)}, folder / "model.fp16.safetensors")  # or another format
    load_checkpoint(folder)


PREFIXES = ["", "model.", "model.language_model.", "language_model.model.", "language_model."]


@pytest.mark.parametrize("fields", [SHAPE, LLAMA])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(tmp_path, fields, prefix):
    """
    A model may have been saved without its head, or as part of a larger one. The oldest files have
    causal masks of two kinds.
    """
    ours = random_model(**fields)
    save_checkpoint(ours, tmp_path)
    path = tmp_path / "model.safetensors"
    weights = {"h.2.attn.masked_bias": torch.tensor(-1e4)}
    weights["h.2.attn.bias"] = torch.ones(1, 1, 33, 33).tril()
    for name, weight in load_file(path).items():
        weights[re.sub(r"^(transformer|model)\.", prefix, name)] = weight
    save_file(weights, path)
    assert same(load_checkpoint(tmp_path), ours)


@pytest.mark.parametrize("is_tied", [True, False, None])
def test_a_head_of_its_own_opens(folder, is_tied):
    """Some config.json say that a separate head is tied. The weights decide, as in transformers."""
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
    if is_tied is False:
        refused(folder, r"lm_head\.weight is missing")
    for change in 0, 1:
        change_weights(folder, **{HEAD: embedding + change})
        again = load_checkpoint(folder)
        assert again.config.tied == (change == 0 and is_tied is not False)
        assert torch.equal(again.wte.weight, embedding)
        assert torch.equal(again.lm_head.weight, embedding + change)


# name, shape and dtype of weights (`none` is missing) -> the refusal. Previously a file of four
# layers opened as another model with n_layer 3. Biases of zeros are saved because transformers
# needs them; other biases were ignored. Quantized weights were read as if they were the numbers
# themselves.
MISMATCHES = r"""
transformer.ln_f.weight             | 32    | none          -> ln_f\.weight is missing, wanted \(32,\)
lm_head.weight                      | 96 32 | float32       -> lm_head\.weight is \(96, 32\), wanted \(97, 32\)
transformer.h.3.ln_1.weight         | 32    | float32       -> h.3.ln_1.weight is not part of this model
wte.weight                          | 97 32 | float32       -> wte.weight exists twice
transformer.h.0.attn.c_attn.wide.bias | 32  | float32       -> wide.bias is not part
transformer.h.3.ln_1.bias           | 32    | float32       -> ln_1.bias is not part
transformer.h.1.ln_2.bias           | 1 32  | float32       -> h\.1\.ln_2\.bias is .*, wanted \(32,\)
transformer.h.1.ln_2.bias           |       | float32       -> h\.1\.ln_2\.bias is .*, wanted \(32,\)
transformer.h.1.attn.c_attn.weight  | 96 32 | float32       -> c_attn\.weight is .*, wanted
transformer.h.1.attn.c_attn.weight  | 32 96 | float8_e4m3fn -> dtype of h.1.attn.c_attn.weight is .* F32, F16, BF16
transformer.h.1.attn.c_attn.weight  | 32 96 | int8          -> dtype of h.1.attn.c_attn.weight is .* F32, F16, BF16
transformer.h.1.attn.c_attn.weight  | 32 96 | float64       -> dtype of h.1.attn.c_attn.weight is .* F32, F16, BF16
"""  # noqa: E501


@pytest.mark.parametrize("row", MISMATCHES.strip().splitlines())
def test_weights_that_do_not_match_are_refused(folder, row):
    weight, words = row.split(" -> ")
    name, shape, dtype = map(str.strip, weight.split("|"))
    weight = torch.ones([*map(int, shape.split())])
    changes = {name: None if dtype == "none" else weight.to(getattr(torch, dtype))}
    change_weights(folder, **changes)
    refused(folder, words)


# about a tensor of 32 numbers, or about the length of the file's header
LIES = """
{"data_offsets": [0, 1099511627776]}
{"data_offsets": [1099511627776, 1099511627904]}
{"data_offsets": [128, 0]}
{"data_offsets": [-128, 0]}
{"data_offsets": [64, 192]}
{"shape": [33]}
{"shape": [4611686018427387904, 4]}
{"shape": [4294967296, 4294967296]}
{"shape": [-32]}
{"dtype": "F64"}
{"length": 0}
{"length": 9}
{"length": 100000001}
{"length": 9223372036854775808}
{"length": 18446744073709551615}
"""


@pytest.mark.parametrize("lie", LIES.strip().splitlines())
def test_a_file_that_lies_about_its_tensors_is_refused(folder, lie):
    """
    Whoever made the file, nothing outside of it is read, and no memory allocated for what it
    claims.
    """
    lie = json.loads(lie)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["transformer.ln_f.weight"] |= {name: lie[name] for name in lie if name != "length"}
    text = json.dumps(header).encode()
    length = lie.get("length", len(text))
    path.write_bytes(length.to_bytes(8, "little") + text + data[end:])
    refused(folder, "cannot be read .*: restore or download the file")


MISFITS = [
    ({"windows": (8, 8), "rope": {0: Rope(1e4)}}, "rope has windows [0], layers have (8, 8)"),
    ({"qk_norm": True}, "qk_norm needs norm 'rms'"),
    ({"norm": "batch"}, "norm 'batch' is unknown; choose one of layer, rms"),
    ({"activation": "selu"}, "activation 'selu' is unknown"),
]


@pytest.mark.parametrize(("fields", "message"), MISFITS, ids=str)
def test_fields_that_do_not_go_together(fields, message):
    """Would catch: a KeyError in the first forward pass; a model that computes something else."""
    with pytest.raises(ValueError, match=re.escape(message)):
        GPTConfig(**({"n_layer": 2, "n_head": 2, "n_embd": 8} | fields))
