"""
Make tiny random models of every family, with transformers.

    hf_model = make("gemma2")               # transformers' model
    hf_model.save_pretrained(directory)     # a directory that `load_checkpoint` must open

Their weights are chosen so that everything matters: norms are far from one and biases far from
zero, attention is neither uniform nor one-hot, windows are shorter than the texts, and the epsilon
has an effect. WITHOUT has configurations that each lack one feature; test_families.py checks that
each of them changes the log-probabilities.
"""

import json

import torch
import transformers
from torch import Tensor

VOCABULARY = 101  # a window of 19 is not a whole number of blocks, so it ends inside a block
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
    "eos_token_id": 7,
}


# name: (transformers' class, configuration in addition to the sizes).
# Llama 3: with a head size of 16 and a theta of 5000, the wavelengths are 6, 18, 53, 153, 444, ...
# tokens. So one is kept, one is blended because it lies in between, and the others are scaled.
# qwen3-windows: the order of its layers with windows is not any family's pattern.
# Gemma: the head size differs from the width divided by the number of heads, and from the number
# that gives the attention scale. The square root of the width is rounded in bf16.
FAMILIES = {
    "gpt2": ("GPT2", "{}"),
    "gpt2-relu": ("GPT2", '{"activation_function": "relu", "n_inner": 64}'),
    "gpt2-untied": ("GPT2", '{"activation_function": "gelu", "tie_word_embeddings": false}'),
    "llama": ("Llama", '{"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}'),
    "llama-llama3": (
        "Llama",
        """{"tie_word_embeddings": true, "rope_parameters": {"rope_type": "llama3",
        "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40}}""",
    ),
    "llama-linear": (
        "Llama",
        '{"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}',
    ),
    "llama-biases": (
        "Llama",
        """{"attention_bias": true, "mlp_bias": true,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}""",
    ),
    "llama-one-kv-head": (
        "Llama",
        """{"num_key_value_heads": 1, "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}""",
    ),
    "mistral": (
        "Mistral",
        """{"sliding_window": 19,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}""",
    ),
    "qwen2": ("Qwen2", '{"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}'),
    "qwen2-windows": (
        "Qwen2",
        """{"use_sliding_window": true, "sliding_window": 19, "max_window_layers": 1,
        "tie_word_embeddings": true,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}""",
    ),
    "qwen3": (
        "Qwen3",
        """{"head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}}""",
    ),
    "qwen3-windows": (
        "Qwen3",
        """{"head_dim": 32, "attention_bias": true, "use_sliding_window": true,
        "sliding_window": 19,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}}""",
    ),
    "gemma2": (
        "Gemma2",
        """{"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 19, "hidden_size": 96,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}""",
    ),
    "gemma3": (
        "Gemma3",
        """{"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 19, "hidden_size": 96,
        "num_hidden_layers": 4, "sliding_window_pattern": 3, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 90000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}""",
    ),
    "qwen3-yarn": (
        "Qwen3",
        """{"head_dim": 32, "rope_parameters": {"rope_type": "yarn", "rope_theta": 9000.0,
        "factor": 4.0, "beta_fast": 8, "original_max_position_embeddings": 600}}""",
    ),
    "smollm3": (
        "SmolLM3",
        """{"no_rope_layers": [1, 0, 1], "rope_parameters": {"rope_type": "yarn",
        "rope_theta": 5000.0, "factor": 8.0, "attention_factor": 1.3,
        "original_max_position_embeddings": 40}}""",
    ),
    "olmo2": ("Olmo2", '{"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}'),
    "olmo3": (
        "Olmo3",
        """{"sliding_window": 19, "num_hidden_layers": 4, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0,
        "attention_factor": 1.3, "original_max_position_embeddings": 40},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}}""",
    ),
    "granite": (
        "Granite",
        """{"embedding_multiplier": 6.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3,
        "logits_scaling": 3.0, "tie_word_embeddings": true,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}""",
    ),
    "granite4": (
        "GraniteMoeHybrid",
        """{"embedding_multiplier": 6.0, "attention_multiplier": 0.4, "residual_multiplier": 0.3,
        "logits_scaling": 2.0, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 80, "position_embedding_type": "rope", "mamba_n_heads": 2,
        "layer_types": ["full_attention", "full_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}""",
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        """{"head_dim": 32, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0,
        "alpha": 9.0, "factor": 1.0}}""",
    ),
    "nanochat": (
        "NanoChat",
        """{"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "final_logit_softcapping": 5.0}""",
    ),
}

# Features that engines have forgotten: with these changes, the same weights must give other
# log-probabilities. Gemma 2's 24 is the width divided by the number of heads.
WITHOUT = """
gpt2 {"layer_norm_epsilon": 1e-5}
gpt2 {"activation_function": "gelu"}
gpt2-relu {"activation_function": "gelu_new"}
gpt2-untied {"activation_function": "gelu_new"}
gpt2-untied {"tie_word_embeddings": true}
llama {"rms_norm_eps": 1e-6}
llama {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
llama {"hidden_act": "gelu"}
llama-llama3 {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
llama-llama3 {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}}
llama-llama3 {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.01, "original_max_position_embeddings": 40}}
llama-llama3 {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 3.99, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}}
llama-linear {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
llama-one-kv-head {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
mistral {"rms_norm_eps": 1e-6}
mistral {"sliding_window": 20}
mistral {"sliding_window": null}
qwen2 {"rms_norm_eps": 1e-6}
qwen2 {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
qwen2-windows {"sliding_window": 20}
qwen2-windows {"layer_types": ["full_attention", "full_attention", "full_attention"]}
qwen2-windows {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention"]}
qwen3 {"rms_norm_eps": 1e-6}
qwen3 {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
qwen3-windows {"rms_norm_eps": 1e-6}
qwen3-windows {"sliding_window": 20}
qwen3-windows {"layer_types": null}
gemma2 {"rms_norm_eps": 1e-6}
gemma2 {"sliding_window": 20}
gemma2 {"query_pre_attn_scalar": 32}
gemma2 {"query_pre_attn_scalar": 24}
gemma2 {"attn_logit_softcapping": null}
gemma2 {"final_logit_softcapping": null}
gemma2 {"hidden_activation": "gelu"}
gemma2 {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
gemma3 {"rms_norm_eps": 1e-6}
gemma3 {"sliding_window": 20}
gemma3 {"query_pre_attn_scalar": 32}
gemma3 {"hidden_activation": "gelu"}
gemma3 {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"]}
gemma3 {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]}
gemma3 {"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 90000.0, "factor": 4.0}, "sliding_attention": {"rope_type": "linear", "rope_theta": 90000.0, "factor": 4.0}}}
gemma3 {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}
gemma3 {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 90000.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}
gemma3 {"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 90000.0, "factor": 4.0}, "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}}
qwen3-yarn {"rope_parameters": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 4.0}}
qwen3-yarn {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9000.0, "factor": 4.0, "beta_fast": 8, "original_max_position_embeddings": 600, "attention_factor": 1.0}}
qwen3-yarn {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9000.0, "factor": 4.0, "original_max_position_embeddings": 600}}
qwen3-yarn {"rope_parameters": {"rope_type": "yarn", "rope_theta": 9000.0, "factor": 4.0, "beta_fast": 8, "beta_slow": 4, "original_max_position_embeddings": 600}}
smollm3 {"no_rope_layers": [1, 1, 1]}
olmo2 {"rms_norm_eps": 1e-6}
olmo3 {"sliding_window": 20}
olmo3 {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5000.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}}
granite {"embedding_multiplier": 5.9}
granite {"attention_multiplier": 0.25}
granite {"residual_multiplier": 0.29}
granite {"logits_scaling": 2.9}
granite {"rms_norm_eps": 1e-3}
granite4 {"residual_multiplier": 0.29}
hunyuan {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
nanochat {"final_logit_softcapping": null}
nanochat {"rms_norm_eps": 1e-6}
"""  # noqa: E501


def config_of(family: str, **changes):
    """Return transformers' configuration of a family's tiny model."""
    name, fields = FAMILIES[family]
    sizes = GPT2 if name == "GPT2" else ROPED
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    is_tied = {"tie_word_embeddings": name in ("GPT2", "Gemma2", "Gemma3")}
    fields = is_tied | json.loads(fields) | changes
    if fields.get("layer_types"):
        fields["layer_types"] = list(fields["layer_types"])
    return config(**sizes | fields)


def two_layers(family: str, window: int) -> dict:
    """
    Return changes that make a smaller model, with one layer of each type that the family has, and
    with this window if it has windows.
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
    """Return transformers' model for a configuration, before its weights are set by `make`."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()


@torch.no_grad()
def make(family: str, **changes):
    """Return transformers' model of a family, always the same, with weights that all matter."""
    model = build(config_of(family, **changes))
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(model.named_parameters()):
        fill(name, weight, model.config.model_type, generator)
    return model


def fill(name: str, weight: Tensor, family: str, generator: torch.Generator):
    module = name.split(".")[-2]
    is_gemma = family.startswith("gemma")
    if weight.ndim == 1 and name.endswith(".weight"):  # weight of a norm
        post = is_gemma and module.startswith("post_")
        low = 2.5 if post else 1.0 if module in ("q_norm", "k_norm") else 0.5
        weight.uniform_(low, low + 1, generator=generator)
        if is_gemma:
            weight -= 1  # Gemma's norms add 1
        return
    if weight.ndim == 1:
        std = 0.5
    elif module in ("wte", "wpe", "embed_tokens", "lm_head"):
        std = 0.2 if is_gemma else 0.5
    else:
        fan_in = weight.shape[0] if family.startswith("gpt2") else weight.shape[1]
        gain = 1.5 if module in ("q_proj", "k_proj", "c_attn", "o_proj") else 1.0
        std = gain / fan_in**0.5
    weight.normal_(0, std, generator=generator)


@torch.no_grad()
def changed(hf_model, family: str, **changes):
    """Return a model with the same weights and another configuration."""
    other = build(config_of(family, **changes))
    other.load_state_dict(hf_model.state_dict(), strict=False)
    return other


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()
