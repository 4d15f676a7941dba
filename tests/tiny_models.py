"""
Tiny random models of every family, made by transformers.

    theirs = make("gemma2")              # transformers' model
    theirs.save_pretrained(directory)    # what `load_checkpoint` must open
    spell_as_4(directory)                # the same, as transformers 4 wrote it

Their weights make everything matter: norms far from one, biases far from zero, attention that is
neither even nor blind, windows shorter than the texts, an epsilon that is felt. What a model would
say without one of its features is in WITHOUT: test_families.py holds that each is seen in its
log-probabilities.
"""

import json
from pathlib import Path

import torch
import transformers
from torch import Tensor

VOCABULARY = 101
WINDOW = 19  # divides no block, and ends inside of one
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 2304, "n_layer": 3, "n_head": 4, "n_embd": 64}
GPT2 |= {"layer_norm_epsilon": 1e-2, "eos_token_id": 7, "bos_token_id": 7}
ROPED = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2304,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
}


def rope(theta: float, **scaling) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


# Wavelengths of a head of 16 at theta 5000, in tokens: 6, 18, 53, 153, 444, ... So one is kept, one
# lies between and is blended, the others are scaled.
LLAMA3 = rope(
    5000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=40,
)
LINEAR = {"rope_type": "linear", "factor": 4.0}
# windows in an order that is no family's pattern
BY_NAME = {"use_sliding_window": True, "sliding_window": WINDOW}
BY_NAME |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# a head size that is neither the width's share of a head nor what the scale is made of
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}
GEMMA |= {"hidden_size": 96}  # whose square root is rounded in bf16
GEMMA2 = GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0} | rope(3000.0)
TWO_BASES = {
    "full_attention": rope(90000.0)["rope_parameters"] | LINEAR,
    "sliding_attention": rope(500.0)["rope_parameters"],
}
GEMMA3 = GEMMA | {"num_hidden_layers": 4, "sliding_window_pattern": 3}
GEMMA3 |= {"rope_parameters": TWO_BASES}

# name: (transformers' class, what its configuration says beside the sizes)
FAMILIES = {
    "gpt2": ("GPT2", {}),
    "gpt2-relu": ("GPT2", {"activation_function": "relu", "n_inner": 96}),
    "gpt2-untied": ("GPT2", {"activation_function": "gelu", "tie_word_embeddings": False}),
    "llama": ("Llama", rope(5000.0)),
    "llama-llama3": ("Llama", LLAMA3 | {"tie_word_embeddings": True}),
    "llama-linear": ("Llama", rope(5000.0, **LINEAR)),
    "llama-biases": ("Llama", rope(5000.0) | {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("Llama", rope(5000.0) | {"num_key_value_heads": 1, "head_dim": 32}),
    "mistral": ("Mistral", rope(5000.0) | {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", rope(7000.0)),
    "qwen2-windows": (
        "Qwen2",
        rope(7000.0)
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        | {"tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", rope(9000.0) | {"head_dim": 32}),
    "qwen3-windows": ("Qwen3", rope(9000.0) | {"head_dim": 32, "attention_bias": True} | BY_NAME),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3", GEMMA3),
}

# What engines forgot: with these changes the same weights must say something else.
EPSILON = {"rms_norm_eps": 1e-6}
ONE_MORE = {"sliding_window": WINDOW + 1}
WITHOUT = {
    "gpt2": [{"layer_norm_epsilon": 1e-5}, {"activation_function": "gelu"}],
    "gpt2-relu": [{"activation_function": "gelu_new"}],
    "gpt2-untied": [{"activation_function": "gelu_new"}, {"tie_word_embeddings": True}],
    "llama": [EPSILON, rope(10000.0), {"hidden_act": "gelu"}],
    "llama-llama3": [
        rope(5000.0),
        {"rope_parameters": LLAMA3["rope_parameters"] | {"factor": 4.0}},
        {"rope_parameters": LLAMA3["rope_parameters"] | {"high_freq_factor": 1.01}},
        {"rope_parameters": LLAMA3["rope_parameters"] | {"low_freq_factor": 3.99}},
    ],
    "llama-linear": [rope(5000.0)],
    "llama-biases": [],
    "llama-one-kv-head": [rope(10000.0)],
    "mistral": [EPSILON, ONE_MORE, {"sliding_window": None}],
    "qwen2": [EPSILON, rope(1e6)],
    "qwen2-windows": [
        ONE_MORE,
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["sliding_attention"] * 3},
    ],
    "qwen3": [EPSILON, rope(1e6)],
    "qwen3-windows": [EPSILON, ONE_MORE, {"layer_types": None}],
    "gemma2": [
        EPSILON,
        ONE_MORE,
        {"query_pre_attn_scalar": 32},
        {"query_pre_attn_scalar": 24},  # the width's share of a head
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"hidden_activation": "gelu"},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ],
    "gemma3": [
        EPSILON,
        ONE_MORE,
        {"query_pre_attn_scalar": 32},
        {"hidden_activation": "gelu"},
        {"layer_types": ["sliding_attention"] * 4},
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 3},
        {"rope_parameters": dict.fromkeys(TWO_BASES, TWO_BASES["full_attention"])},
        {"rope_parameters": dict.fromkeys(TWO_BASES, TWO_BASES["sliding_attention"])},
        {"rope_parameters": TWO_BASES | {"full_attention": rope(90000.0)["rope_parameters"]}},
        {"rope_parameters": {name: base | LINEAR for name, base in TWO_BASES.items()}},
    ],
}


def config_of(family: str, **changes):
    """transformers' configuration of a family's tiny model."""
    name, fields = FAMILIES[family]
    sizes = GPT2 if name == "GPT2" else ROPED
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    fields = {"tie_word_embeddings": name in ("GPT2", "Gemma2", "Gemma3")} | fields | changes
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"] and list(fields["layer_types"])
    return config(**sizes | fields)


def two_layers(family: str, window: int) -> dict:
    """
    Changes that make a smaller model: a layer of each kind that the family has, and such a window
    if it has any.
    """
    config = config_of(family)
    if config.model_type == "gpt2":
        return {"n_layer": 2}
    changes = {"num_hidden_layers": 2}
    if getattr(config, "sliding_window", None):
        changes["sliding_window"] = window
    if getattr(config, "layer_types", None):
        kinds = sorted(set(config.layer_types), reverse=True)
        changes["layer_types"] = tuple(2 * kinds)[:2]
    return changes


def build(config):
    """transformers' model of a configuration, its weights not yet made."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()


def make(family: str, **changes):
    """transformers' model of a family, the same each time."""
    return filled(build(config_of(family, **changes)))


@torch.no_grad()
def filled(model):
    """The model, its weights drawn so that each matters."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        fill(name, weight, model.config.model_type, generator)
    return model


def fill(name: str, weight: Tensor, family: str, generator: torch.Generator):
    module = name.split(".")[-2]
    if weight.ndim == 1 and name.endswith(".weight"):  # a norm's
        post = family.startswith("gemma") and module.startswith("post_")
        low = 2.5 if post else 1.0 if module in ("q_norm", "k_norm") else 0.5
        weight.uniform_(low, low + 1, generator=generator)
        if family.startswith("gemma"):
            weight -= 1  # which its norms add
        return
    if weight.ndim == 1:
        weight.normal_(0, 0.5, generator=generator)
        return
    if module in ("wte", "wpe", "embed_tokens", "lm_head"):
        std = 0.2 if family.startswith("gemma") else 0.5
    else:
        fan_in = weight.shape[0] if family.startswith("gpt2") else weight.shape[1]
        gain = 1.5 if module in ("q_proj", "k_proj", "c_attn", "o_proj") else 1.0
        std = gain / fan_in**0.5
    weight.normal_(0, std, generator=generator)


@torch.no_grad()
def changed(theirs, family: str, **changes):
    """The same weights, read as another configuration says."""
    other = build(config_of(family, **changes))
    other.load_state_dict(theirs.state_dict(), strict=False)
    return other


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


# --------------------------------------------------------------------------------------------------
# config.json


def edit(directory: Path, *without: str, **changes):
    """Change a directory's config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in without}))


def spell_as_4(directory: Path):
    """
    Write config.json as transformers 4 did, and as the hub's directories have it: theta and scaling
    apart, the layers' types by a pattern, and nothing that the family's class knows.
    """
    config = json.loads((directory / "config.json").read_text())
    kind = config["model_type"]
    config["torch_dtype"] = config.pop("dtype")
    spelled = config.pop("rope_parameters", None)
    if kind == "gemma3_text":
        local = spelled["sliding_attention"]
        spelled = spelled["full_attention"]
        config["rope_local_base_freq"] = local["rope_theta"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
    if spelled:
        config["rope_theta"] = spelled.pop("rope_theta")
        config["rope_scaling"] = None
        if spelled["rope_type"] == "linear" and kind == "llama":  # the oldest name
            config["rope_scaling"] = {"type": spelled.pop("rope_type")} | spelled
        elif spelled["rope_type"] != "default":
            config["rope_scaling"] = spelled
    if config.get("layer_types") != BY_NAME["layer_types"] or kind == "gemma2":
        config.pop("layer_types", None)
    if config["tie_word_embeddings"] == (kind in ("gpt2", "gemma2", "gemma3_text")):
        del config["tie_word_embeddings"]
    if kind == "llama" and config["head_dim"] == 16:  # a head's share of the width
        del config["head_dim"]
    (directory / "config.json").write_text(json.dumps(config))
