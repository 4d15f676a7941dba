"""
The families of models that are served: GPT-2, Llama, Mistral, Qwen, Gemma. All are the one decoder
of model.py; a family is a row of the table `FAMILIES`: how config.json spells the fields of
GPTConfig, what it leaves unsaid because the family's class knows it, and the names of the weights.

    config = read_fields(parsed_config_json, parsed_generation_config_json)
    saved = hub_config(config, family_of(config), torch.float32)     # and back

Whatever would change the computation and is not understood is refused by its name.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from model import GPTConfig, Rope, check_size


class CheckpointError(ValueError):
    """A directory that holds no model we can load; the message says what to run."""


# --------------------------------------------------------------------------------------------------
# Families

# our module -> the hub's; where it has several, they are stacked in this order
GPT2_WEIGHTS = {
    "wte": ["wte"],
    "wpe": ["wpe"],
    "h.{}.ln_1": ["h.{}.ln_1"],
    "h.{}.attn.c_attn": ["h.{}.attn.c_attn"],
    "h.{}.attn.c_proj": ["h.{}.attn.c_proj"],
    "h.{}.ln_2": ["h.{}.ln_2"],
    "h.{}.mlp.c_fc": ["h.{}.mlp.c_fc"],
    "h.{}.mlp.c_proj": ["h.{}.mlp.c_proj"],
    "ln_f": ["ln_f"],
    "lm_head": ["lm_head"],
}
LAYER = "layers.{}."
LLAMA_WEIGHTS = {
    "wte": ["embed_tokens"],
    "h.{}.ln_1": [LAYER + "input_layernorm"],
    "h.{}.attn.c_attn": [LAYER + f"self_attn.{x}_proj" for x in "qkv"],
    "h.{}.attn.c_proj": [LAYER + "self_attn.o_proj"],
    "h.{}.ln_2": [LAYER + "post_attention_layernorm"],
    "h.{}.mlp.c_fc": [LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"],
    "h.{}.mlp.c_proj": [LAYER + "mlp.down_proj"],
    "ln_f": ["norm"],
    "lm_head": ["lm_head"],
}
QK_NORMS = {f"h.{{}}.attn.{x}_norm": [LAYER + f"self_attn.{x}_norm"] for x in "qk"}
GEMMA_WEIGHTS = LLAMA_WEIGHTS | {
    # not Llama's norm of that name, which stands before the MLP
    "h.{}.attn.post_norm": [LAYER + "post_attention_layernorm"],
    "h.{}.ln_2": [LAYER + "pre_feedforward_layernorm"],
    "h.{}.mlp.post_norm": [LAYER + "post_feedforward_layernorm"],
}

# our field -> its name in config.json
GPT2_NAMES = {
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "n_inner": "n_inner",
    "norm_epsilon": "layer_norm_epsilon",
    "activation": "activation_function",
    "dropout": "resid_pdrop",
    "tied": "tie_word_embeddings",
    "n_kv_head": "n_kv_head",  # these two are ours: transformers' GPT-2 has neither
    "bias": "bias",
}
LLAMA_NAMES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_kv_head": "num_key_value_heads",
    "head_size": "head_dim",
    "n_inner": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "activation": "hidden_act",
    "tied": "tie_word_embeddings",
}
BIASED = {"qkv_bias": "attention_bias", "proj_bias": "attention_bias"}
GEMMA_NAMES = LLAMA_NAMES | {
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}

# fields that config.json never says
ROPED = {"norm": "rms", "bias": False, "gated": True}
GEMMA = ROPED | {"post_norm": True}

# what config.json need not say: the defaults of transformers' classes
LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
QWEN_DEFAULTS = LLAMA_DEFAULTS | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "hidden_act": None,  # older files have it, too; not read
    "use_sliding_window": True,  # not read
}


def no_layer(saved: dict, i: int) -> bool:
    return False


def every_layer(saved: dict, i: int) -> bool:
    return True


def upper_layers(saved: dict, i: int) -> bool:
    """Qwen's."""
    return saved["use_sliding_window"] and i >= saved["max_window_layers"]


def most_layers(saved: dict, i: int) -> bool:
    """Gemma's: of so many layers the last one sees all."""
    n = saved.get("_sliding_window_pattern") or saved["sliding_window_pattern"]
    return (i + 1) % n != 0


def no_scales(saved: dict) -> dict:
    return {}


def gemma_scales(saved: dict) -> dict:
    return {
        "attention_scale": saved["query_pre_attn_scalar"] ** -0.5,
        "embedding_scale": saved["hidden_size"] ** 0.5,
    }


class Family(NamedTuple):
    """How the hub keeps models of one class."""

    architecture: str  # the name of transformers' class
    prefix: str  # of the weights' names
    weights: dict[str, list[str]]  # our module -> theirs, without the prefix
    names: dict[str, str]  # our field -> its name in config.json
    fields: dict  # our fields that config.json never says
    defaults: dict  # what it need not say
    slides: Callable[[dict, int], bool]  # (config.json, i) -> whether layer i has a window
    scales: Callable[[dict], dict] = no_scales  # config.json -> fields that are computed
    norm_offset: float = 0.0  # Gemma keeps the weights of norms less 1


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "transformer.",
        GPT2_WEIGHTS,
        GPT2_NAMES,
        {},
        {"tie_word_embeddings": True},
        no_layer,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "model.",
        LLAMA_WEIGHTS,
        LLAMA_NAMES | BIASED | {"mlp_bias": "mlp_bias"},
        ROPED,
        LLAMA_DEFAULTS | {"eos_token_id": 2},
        no_layer,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "model.",
        LLAMA_WEIGHTS,
        LLAMA_NAMES,
        ROPED,
        LLAMA_DEFAULTS
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
        | {"eos_token_id": 2},
        every_layer,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "model.",
        LLAMA_WEIGHTS,
        LLAMA_NAMES,
        ROPED | {"qkv_bias": True},
        QWEN_DEFAULTS,
        upper_layers,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "model.",
        LLAMA_WEIGHTS | QK_NORMS,
        LLAMA_NAMES | BIASED,
        ROPED | {"qk_norm": True},
        QWEN_DEFAULTS | {"head_dim": 128},
        upper_layers,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "model.",
        GEMMA_WEIGHTS,
        GEMMA_NAMES | BIASED,
        GEMMA,
        GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "rope_theta": 10000.0}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        | {"sliding_window_pattern": 2},
        most_layers,
        gemma_scales,
        norm_offset=1.0,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "model.",
        GEMMA_WEIGHTS | QK_NORMS,
        GEMMA_NAMES | BIASED,
        GEMMA | {"qk_norm": True},
        GEMMA_DEFAULTS
        | {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
        | {"sliding_window_pattern": 6},
        most_layers,
        gemma_scales,
        norm_offset=1.0,
    ),
}
# the hub's names of activations -> ours
ACTIVATION_NAMES = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
# keys of config.json with the only value that this code computes, which is not "no" or "none"
FIXED_OPTIONS = {
    "scale_attn_weights": True,
    "is_causal": True,
    "partial_rotary_factor": 1.0,
}
# keys that change nothing in what is computed when serving; _names are notes, too
NOTES = [
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "auto_map",
    "bos_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "eos_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "max_length",
    "mm_tokens_per_image",
    "model_type",
    "n_ctx",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "problem_type",
    "reorder_and_upcast_attn",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
]
NOTE_PREFIXES = ("_", "summary_")
NOTE_SUFFIXES = ("_token_id", "_token_index")
# keys that are understood in every family
ALWAYS_READ = {"eos_token_id", "text_config"}
ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
# what transformers writes as the end of text where none was named, whatever the vocabulary
DEFAULT_EOS = 50256


def hub_names(name: str, family: Family) -> list[str]:
    """The hub's names, without the prefix, of our weight "h.3.attn.c_attn.weight"."""
    module, kind = name.rsplit(".", 1)
    layer = ""
    if module.startswith("h."):
        _, layer, rest = module.split(".", 2)
        module = "h.{}." + rest
    return [f"{theirs.format(layer)}.{kind}" for theirs in family.weights[module]]


# --------------------------------------------------------------------------------------------------
# GPTConfig -> config.json


def family_of(config: GPTConfig) -> str:
    """
    The family whose config.json says all of this configuration. Raises CheckpointError where none
    does.
    """
    for name in FAMILIES:
        try:
            if read_fields(hub_config(config, name, torch.float32)) == config:
                return name
        except CheckpointError:
            continue  # it does not compute what the others call so
    raise CheckpointError(
        f"no family of models computes {config}; there are {', '.join(FAMILIES)}: change a field"
    )


def hub_config(config: GPTConfig, name: str, dtype: torch.dtype) -> dict:
    """What config.json says, in a spelling that transformers 4 and 5 read."""
    family = FAMILIES[name]
    saved = {theirs: getattr(config, ours) for ours, theirs in family.names.items()}
    saved["model_type"] = name
    saved["architectures"] = [family.architecture]
    ends = list(config.eos_token_ids)
    saved["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    saved["bos_token_id"] = next(iter(ends), None)
    saved["dtype"] = str(dtype).removeprefix("torch.")
    if name == "gpt2":
        saved["embd_pdrop"] = config.dropout
        saved["attn_pdrop"] = config.dropout
        return saved
    if config.activation == "gelu_new":
        saved[family.names["activation"]] = "gelu_pytorch_tanh"
    windows = set(config.windows) - {0}
    saved["sliding_window"] = max(windows, default=None)
    if name.startswith(("gemma", "qwen")):
        kinds = {0: "full_attention"}
        saved["layer_types"] = [kinds.get(w, "sliding_attention") for w in config.windows]
        saved["use_sliding_window"] = bool(windows)
    if "attn_logit_softcapping" in saved:
        scalar = round(config.attention_scale**-2, 6)
        saved["query_pre_attn_scalar"] = int(scalar) if scalar.is_integer() else scalar
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            saved[key] = saved[key] or None
    rope = config.rope.get(0) or next(iter(config.rope.values()), Rope(0.0))
    saved["rope_theta"] = rope.theta
    if windows and "rope_local_base_freq" in family.defaults:
        saved["rope_local_base_freq"] = config.rope[max(windows)].theta
    if rope.llama3:
        low, high, length = rope.llama3
        saved["rope_scaling"] = {"rope_type": "llama3", "factor": rope.factor}
        saved["rope_scaling"] |= {"low_freq_factor": low, "high_freq_factor": high}
        saved["rope_scaling"]["original_max_position_embeddings"] = length
    elif rope.factor != 1:
        saved["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    return saved


# --------------------------------------------------------------------------------------------------
# config.json -> GPTConfig


def unknown(key: str, value, wanted: str = "nothing of that name") -> CheckpointError:
    """The error, to be raised, for what would change the computation and is not understood."""
    return CheckpointError(
        f"{key} is {value!r:.200}, this code computes only {wanted}: vLLM serves such a directory"
    )


def family_named(saved: dict) -> Family:
    name = (saved.get("text_config") or saved).get("model_type", "gpt2")
    if name not in FAMILIES:
        raise unknown("model_type", name, ", ".join(FAMILIES))
    return FAMILIES[name]


def read_fields(saved: dict, generation: dict | None = None) -> GPTConfig:
    """The configuration of a parsed config.json. Raises CheckpointError, ValueError, ..."""
    saved = saved | (saved.get("text_config") or {})  # of a larger model's text part
    family = family_named(saved)
    check_keys(saved, family)
    if saved.get("tie_word_embeddings", False) is None:
        del saved["tie_word_embeddings"]
    saved = family.defaults | saved
    ours = {field: saved[key] for field, key in family.names.items() if key in saved}
    if family.architecture != "GPT2LMHeadModel":
        for field in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner"):
            if field not in ours:
                raise CheckpointError(f"{family.names[field]} is missing: restore it")
        check_size("num_hidden_layers", ours["n_layer"], 2**16)
        ours["windows"] = read_windows(saved, family, ours["n_layer"])
        ours["rope"] = read_ropes(saved, ours["windows"])
    for field in ("attention_softcap", "logit_softcap"):
        ours[field] = ours.get(field) or 0.0
    if "activation" in ours:
        activation = ours["activation"]
        if activation not in ACTIVATION_NAMES:
            raise unknown(family.names["activation"], activation, ", ".join(ACTIVATION_NAMES))
        ours["activation"] = ACTIVATION_NAMES[activation]
    ours["eos_token_ids"] = read_eos(saved, generation or {})
    return GPTConfig(**ours | family.fields | family.scales(saved))


def check_keys(saved: dict, family: Family):
    """Raises CheckpointError for a key or value that would change the computation."""
    understood = ALWAYS_READ.union(NOTES) | set(family.names.values()) | family.defaults.keys()
    if family.fields:
        understood |= ROPE_KEYS
    for key, value in saved.items():
        if key in understood or key.startswith(NOTE_PREFIXES) or key.endswith(NOTE_SUFFIXES):
            continue
        wanted = FIXED_OPTIONS.get(key)
        is_off = not value and not wanted  # false, null, 0, an empty list
        if value != wanted and not is_off:
            raise unknown(key, value, repr(wanted) if key in FIXED_OPTIONS else "without it")


def read_windows(saved: dict, family: Family, n_layer: int) -> tuple[int, ...]:
    """The window of each layer, 0 for those that see all."""
    window = saved.get("sliding_window") or 0
    if saved.get("use_sliding_window") is False:
        window = 0
    kinds = saved.get("layer_types")
    if kinds is None:
        return tuple(window if family.slides(saved, i) else 0 for i in range(n_layer))
    sizes = {"full_attention": 0, "sliding_attention": window}
    for kind in kinds:
        if kind not in sizes:
            raise unknown("layer_types", kind, ", ".join(sizes))
    return tuple(sizes[kind] for kind in kinds)


def read_ropes(saved: dict, windows: tuple[int, ...]) -> dict[int, Rope]:
    """
    The rotary positions of the layers of each window. transformers 5 has `rope_parameters`, for all
    layers or for each of their types; version 4 has `rope_theta`, `rope_scaling` and, for the
    layers that slide, `rope_local_base_freq`.
    """
    parameters = saved.get("rope_parameters")
    base = {"rope_theta": saved.get("rope_theta")}
    if parameters is None:
        everywhere = base | (saved.get("rope_scaling") or {})
        local = saved.get("rope_local_base_freq")
        sliding = {"rope_theta": local} if local else everywhere
        by_type = {"full_attention": everywhere, "sliding_attention": sliding}
    elif "full_attention" in parameters or "sliding_attention" in parameters:
        by_type = parameters
    else:
        everywhere = base | parameters
        by_type = {"full_attention": everywhere, "sliding_attention": everywhere}
    return {
        window: read_rope(by_type["sliding_attention" if window else "full_attention"])
        for window in dict.fromkeys(windows)
    }


ROPE_TYPES = {
    "default": [],
    "linear": ["factor"],
    "llama3": [
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ],
}


def read_rope(parameters: dict) -> Rope:
    """One kind of rotary positions. Raises CheckpointError for scalings that are not computed."""
    left = dict(parameters)
    old_name = left.pop("type", "default")
    kind = left.pop("rope_type", old_name)
    if kind not in ROPE_TYPES:
        raise unknown("rope_type", kind, ", ".join(ROPE_TYPES))
    numbers = [left.pop(name) for name in ["rope_theta", *ROPE_TYPES[kind]]]
    if left.pop("partial_rotary_factor", 1.0) != 1:
        raise unknown("partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
    for key, value in left.items():
        if value is not None:
            raise unknown(f"{key} of rope_type {kind}", value, "without it")
    for number in numbers:
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise CheckpointError(f"rotary positions of {parameters}: positive numbers are wanted")
    theta, *scaling = map(float, numbers)
    if kind == "llama3":
        return Rope(theta, scaling[0], tuple(scaling[1:]))
    return Rope(theta, *scaling)


def read_eos(saved: dict, generation: dict) -> tuple[int, ...]:
    """The tokens that end a text, config.json's first; each file has one, a list, or none."""
    ids = []
    for config in (saved, generation):
        value = config.get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    ids = list(dict.fromkeys(ids))
    if DEFAULT_EOS in ids and saved.get("vocab_size", DEFAULT_EOS + 1) <= DEFAULT_EOS:
        ids.remove(DEFAULT_EOS)
    return tuple(ids)
