"""
The families of models that are served: GPT-2, Llama, Mistral, Qwen, Gemma. All are the one decoder
of model.py; a family is a row of the table `FAMILIES`: how config.json spells the fields of
GPTConfig, what it leaves unsaid because the family's class knows it, and the names of the weights.

    config = read_fields(parsed_config_json, parsed_generation_config_json)
    saved = hub_config(config, family_of(config), torch.float32)     # and back

Whatever would change the computation and is not understood is refused by its name.
"""

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from model import ACTIVATIONS, GPTConfig, Rope, check_size


class CheckpointError(ValueError):
    """A directory that holds no model we can load; the message says what to run."""


# what transformers writes as the end of text where none was named, whatever the vocabulary
DEFAULT_EOS = 50256

# --------------------------------------------------------------------------------------------------
# Families


def columns(table: str, read: Callable) -> dict[str, dict]:
    """
    The columns of a table by the names in its first line: row -> what is read of the cell, without
    those that are "-".
    """
    names, *rows = map(str.split, table.strip().splitlines())
    found = {name: {} for name in names}
    for row, *cells in rows:
        for name, cell in zip(names, cells, strict=True):
            if cell != "-":
                found[name][row] = read(cell)
    return found


# A module of ours -> the hub's; where it has several, they are stacked in this order. What is not
# here has the same name there: all of GPT-2.
table = """
wte                 embed_tokens
h.{}.ln_1           layers.{}.input_layernorm
h.{}.attn.c_attn    layers.{}.self_attn.q_proj layers.{}.self_attn.k_proj layers.{}.self_attn.v_proj
h.{}.attn.q_norm    layers.{}.self_attn.q_norm
h.{}.attn.k_norm    layers.{}.self_attn.k_norm
h.{}.attn.c_proj    layers.{}.self_attn.o_proj
h.{}.ln_2           layers.{}.post_attention_layernorm
h.{}.mlp.c_fc       layers.{}.mlp.gate_proj layers.{}.mlp.up_proj
h.{}.mlp.c_proj     layers.{}.mlp.down_proj
ln_f                norm
"""
LLAMA_WEIGHTS = {ours: theirs for ours, *theirs in map(str.split, table.strip().splitlines())}
GEMMA_WEIGHTS = LLAMA_WEIGHTS | {
    # not Llama's norm of that name, which stands before the MLP
    "h.{}.attn.post_norm": ["layers.{}.post_attention_layernorm"],
    "h.{}.ln_2": ["layers.{}.pre_feedforward_layernorm"],
    "h.{}.mlp.post_norm": ["layers.{}.post_feedforward_layernorm"],
}

# our field -> its name in config.json
table = """
                    gpt2                  llama
vocab_size          vocab_size            vocab_size
context_length      n_positions           max_position_embeddings
n_layer             n_layer               num_hidden_layers
n_head              n_head                num_attention_heads
n_kv_head           n_kv_head             num_key_value_heads
head_size           -                     head_dim
n_embd              n_embd                hidden_size
n_inner             n_inner               intermediate_size
norm_epsilon        layer_norm_epsilon    rms_norm_eps
activation          activation_function   hidden_act
bias                bias                  -
dropout             resid_pdrop           -
tied                tie_word_embeddings   tie_word_embeddings
"""
NAMES = columns(table, str)  # gpt2's n_kv_head and bias are ours: transformers has neither
BIASED = NAMES["llama"] | {"qkv_bias": "attention_bias", "proj_bias": "attention_bias"}
GEMMA_NAMES = BIASED | {
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}


# what config.json need not say: the defaults of transformers' classes; "-": it has no such key
table = """
                          llama  mistral   qwen2   qwen3  gemma2  gemma3_text
vocab_size                32000    32000  151936  151936  256000       262208
hidden_size                4096     4096    4096    4096    2304         2304
intermediate_size         11008    14336   22016   22016    9216         9216
num_hidden_layers            32       32      32      32      26           26
num_attention_heads          32       32      32      32       8            8
num_key_value_heads           -        8      32      32       4            4
head_dim                      -        -       -     128     256          256
max_position_embeddings    2048   131072   32768   32768    8192       131072
rms_norm_eps               1e-6     1e-6    1e-6    1e-6    1e-6         1e-6
tie_word_embeddings       false    false   false   false    true         true
eos_token_id                  2        2    null    null       1            1
rope_theta                10000    10000   10000   10000   10000      1000000
rope_local_base_freq          -        -       -       -       -        10000
rope_scaling               null     null    null    null    null         null
rope_parameters            null     null    null    null    null         null
sliding_window                -     4096    4096    4096    4096         4096
layer_types                   -        -    null    null    null         null
use_sliding_window            -        -   false   false       -            -
max_window_layers             -        -      28      28       -            -
sliding_window_pattern        -        -       -       -       -            6
query_pre_attn_scalar         -        -       -       -     256          256
attn_logit_softcapping        -        -       -       -    50.0            -
final_logit_softcapping       -        -       -       -    30.0         null
hidden_act               "silu"   "silu"  "silu"  "silu"    null         null
hidden_activation             -        -       -       -    "gelu_pytorch_tanh"  "gelu_pytorch_tanh"
"""
DEFAULTS = columns(table, json.loads)


def every_layer(saved: dict, i: int) -> bool:
    """Mistral's, if it has a window."""
    return True


def upper_layers(saved: dict, i: int) -> bool:
    """Qwen's."""
    return i >= saved["max_window_layers"]


def every_other_layer(saved: dict, i: int) -> bool:
    """Gemma 2's: the first slides."""
    return i % 2 == 0


def most_layers(saved: dict, i: int) -> bool:
    """Gemma 3's: of so many layers the last one sees all."""
    n = saved.get("_sliding_window_pattern", saved["sliding_window_pattern"])
    return (i + 1) % n != 0


class Family(NamedTuple):
    """How the hub keeps models of one class."""

    architecture: str  # the name of transformers' class
    prefix: str  # of the weights' names
    weights: dict[str, list[str]]  # our module -> theirs, without the prefix
    names: dict[str, str]  # our field -> its name in config.json
    fields: dict  # our fields that config.json never says
    defaults: dict  # what it need not say
    slides: Callable[[dict, int], bool] = every_layer  # (config.json, i): has layer i the window?
    norm_offset: float = 0.0  # Gemma keeps the weights of norms less 1


GPT2_DEFAULTS = {"tie_word_embeddings": True, "eos_token_id": DEFAULT_EOS}
GPT2 = Family("GPT2LMHeadModel", "transformer.", {}, NAMES["gpt2"], {}, GPT2_DEFAULTS)
LLAMA = Family(
    architecture="LlamaForCausalLM",
    prefix="model.",
    weights=LLAMA_WEIGHTS,
    names=BIASED | {"mlp_bias": "mlp_bias"},
    fields={"norm": "rms", "bias": False, "gated": True},
    defaults=DEFAULTS["llama"],
)
MISTRAL = LLAMA._replace(
    architecture="MistralForCausalLM",
    names=NAMES["llama"],
    defaults=DEFAULTS["mistral"],
)
QWEN2 = LLAMA._replace(
    architecture="Qwen2ForCausalLM",
    names=NAMES["llama"],
    fields=LLAMA.fields | {"qkv_bias": True},
    defaults=DEFAULTS["qwen2"],
    slides=upper_layers,
)
QWEN3 = LLAMA._replace(
    architecture="Qwen3ForCausalLM",
    names=BIASED,
    fields=LLAMA.fields | {"qk_norm": True},
    defaults=DEFAULTS["qwen3"],
    slides=upper_layers,
)
GEMMA2 = LLAMA._replace(
    architecture="Gemma2ForCausalLM",
    weights=GEMMA_WEIGHTS,
    names=GEMMA_NAMES,
    fields=LLAMA.fields | {"post_norm": True},
    defaults=DEFAULTS["gemma2"],
    slides=every_other_layer,
    norm_offset=1.0,
)
GEMMA3 = GEMMA2._replace(
    architecture="Gemma3ForCausalLM",
    names={ours: theirs for ours, theirs in GEMMA_NAMES.items() if ours != "attention_softcap"},
    fields=GEMMA2.fields | {"qk_norm": True},
    defaults=DEFAULTS["gemma3_text"],
    slides=most_layers,
)
FAMILIES = {  # config.json's model_type -> its family
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
}
# other names of activations
ACTIVATION_NAMES = {
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_python": "gelu",
    "swish": "silu",
}

# Keys of config.json that change nothing in what is computed here. A key that is neither among them
# nor read is an error if it says something: not if it is false, null, 0 or empty.
NOTES = [
    "architectures",
    "attention_dropout",
    "auto_map",
    "cache_implementation",
    "dtype",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_length",
    "mm_tokens_per_image",
    "model_type",
    "n_ctx",
    "pretraining_tp",
    "reorder_and_upcast_attn",
    "return_dict",
    "task_specific_params",
    "text_config",
    "tokenizer_class",
    "torch_dtype",
    "use_cache",
]
NOTE_PREFIXES = ("_", "output_", "summary_", "transformers", "unsloth_")
NOTE_SUFFIXES = ("_id", "_pdrop", "_token_index")
# the hub's word for a layer that has no window, and for one that has
LAYER_KINDS = {False: "full_attention", True: "sliding_attention"}
# keys whose "no" would change the computation, and the only value that is computed
FIXED_OPTIONS = {"scale_attn_weights": True, "is_causal": True, "partial_rotary_factor": 1.0}


def hub_names(name: str, family: Family) -> list[str]:
    """The hub's names, without the prefix, of our weight "h.3.attn.c_attn.weight"."""
    module, kind = name.rsplit(".", 1)
    layer = ""
    if module.startswith("h."):
        _, layer, rest = module.split(".", 2)
        module = "h.{}." + rest
    theirs = family.weights.get(module, [module])
    return [f"{their.format(layer)}.{kind}" for their in theirs]


# --------------------------------------------------------------------------------------------------
# GPTConfig -> config.json


def family_of(config: GPTConfig) -> str:
    """
    The family whose config.json says all of this configuration. Raises CheckpointError where none
    does.
    """
    for name in FAMILIES:
        try:
            read = read_fields(hub_config(config, name, torch.float32))
        except (ValueError, KeyError, ArithmeticError):
            continue  # this family has no words for it
        read.dropout = config.dropout  # a matter of training: the file of GPT-2 alone says it
        if read == config:
            return name
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
    saved["eos_token_id"] = ends if len(ends) > 1 else config.eos_token_id
    saved["bos_token_id"] = config.eos_token_id
    saved["dtype"] = str(dtype).removeprefix("torch.")
    if family is GPT2:
        saved["embd_pdrop"] = config.dropout
        saved["attn_pdrop"] = config.dropout
        return saved
    if config.activation == "gelu_new":
        saved[family.names["activation"]] = "gelu_pytorch_tanh"
    window = max(config.windows)
    if "sliding_window" in family.defaults:
        saved["sliding_window"] = window or None
    if "layer_types" in family.defaults:
        saved["layer_types"] = [LAYER_KINDS[size > 0] for size in config.windows]
    if "use_sliding_window" in family.defaults:
        saved["use_sliding_window"] = window > 0
    if "query_pre_attn_scalar" in family.defaults:
        saved["query_pre_attn_scalar"] = round(config.attention_scale**-2)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in saved:
            saved[key] = saved[key] or None  # to transformers, 0 is a cap
    rope = config.rope.get(0) or next(iter(config.rope.values()), Rope(0.0))
    saved["rope_theta"] = rope.theta
    if window and "rope_local_base_freq" in family.defaults:
        saved["rope_local_base_freq"] = config.rope[window].theta
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
    saved = saved | (saved.get("text_config") or {})
    name = saved.get("model_type", None if "hidden_size" in saved else "gpt2")
    if name not in FAMILIES:
        raise unknown("model_type", name, ", ".join(FAMILIES))
    return FAMILIES[name]


def read_fields(saved: dict, *others: dict) -> GPTConfig:
    """
    The configuration of a parsed config.json, and what `others` say of the tokens that end a text.
    Raises CheckpointError, ValueError, ...
    """
    saved = saved | (saved.get("text_config") or {})  # of a larger model's text part
    family = family_named(saved)
    check_keys(saved, family)
    if saved.get("tie_word_embeddings", False) is None:
        del saved["tie_word_embeddings"]
    saved = family.defaults | saved
    ours = {field: saved[key] for field, key in family.names.items() if key in saved}
    ours["eos_token_ids"] = read_eos(saved, *others)
    if "activation" in ours:
        name = ours["activation"]
        ours["activation"] = ACTIVATION_NAMES.get(name, name)
        if ours["activation"] not in ACTIVATIONS:
            raise unknown(family.names["activation"], name, ", ".join(ACTIVATIONS))
    if family is GPT2:
        return GPTConfig(**ours)
    check_size("num_hidden_layers", ours["n_layer"], 2**16)
    ours["windows"] = read_windows(saved, family, ours["n_layer"])
    ours["rope"] = read_ropes(saved, ours["windows"])
    if "query_pre_attn_scalar" in family.defaults:  # Gemma
        ours["attention_scale"] = saved["query_pre_attn_scalar"] ** -0.5
        ours["embedding_scale"] = ours["n_embd"] ** 0.5
        for field in ("attention_softcap", "logit_softcap"):
            ours[field] = ours.get(field) or 0.0
    return GPTConfig(**ours | family.fields)


def check_keys(saved: dict, family: Family):
    """Raises CheckpointError for a key or value that would change the computation."""
    understood = {*NOTES, *family.names.values(), *family.defaults}
    for key, value in saved.items():
        if key in understood or key.startswith(NOTE_PREFIXES) or key.endswith(NOTE_SUFFIXES):
            continue
        wanted = FIXED_OPTIONS.get(key)
        is_off = not value and not wanted  # false, null, 0, an empty list
        if value != wanted and not is_off:
            raise unknown(key, value, repr(wanted) if wanted else "models without it")


def read_windows(saved: dict, family: Family, n_layer: int) -> tuple[int, ...]:
    """The window of each layer, 0 for those that see all."""
    window = saved.get("sliding_window") or 0
    if "use_sliding_window" in family.defaults and not saved["use_sliding_window"]:
        window = 0
    kinds = saved.get("layer_types")
    if kinds is None:
        return tuple(window if family.slides(saved, i) else 0 for i in range(n_layer))
    sizes = {LAYER_KINDS[False]: 0, LAYER_KINDS[True]: window}
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
    given = saved["rope_scaling"] or saved["rope_parameters"] or {}
    if saved["rope_scaling"] and saved["rope_parameters"]:
        raise unknown("rope_scaling", given, "models without it where rope_parameters is given")
    by_kind = not given.keys().isdisjoint(LAYER_KINDS.values())
    has_two = "rope_local_base_freq" in saved
    if by_kind and "layer_types" not in saved:
        raise unknown("rope_parameters", given, "those of all layers alike")
    if has_two and saved["rope_parameters"] and not by_kind:
        raise unknown("rope_parameters", given, "those of each kind of layer")
    ropes = {}
    for window in dict.fromkeys(windows):
        unsaid = {"rope_theta": saved["rope_theta"]}
        unsaid["original_max_position_embeddings"] = saved["max_position_embeddings"]
        parameters = given
        if window and has_two:  # what is given for all is not for these
            unsaid["rope_theta"] = saved["rope_local_base_freq"]
            parameters = {}
        if by_kind:
            parameters = given[LAYER_KINDS[window > 0]]
        ropes[window] = read_rope(unsaid | parameters)
    return ropes


# the numbers that make up each kind of rotary positions
ROPE_TYPES = {"default": ["rope_theta"], "linear": ["rope_theta", "factor"]}
ROPE_TYPES["llama3"] = [*ROPE_TYPES["linear"], "low_freq_factor", "high_freq_factor"]
ROPE_TYPES["llama3"] += ["original_max_position_embeddings"]


def read_rope(parameters: dict) -> Rope:
    """One kind of rotary positions. Raises CheckpointError for scalings that are not computed."""
    old_name = parameters.get("type", "default")
    kind = parameters.get("rope_type", old_name)
    if kind not in ROPE_TYPES:
        raise unknown("rope_type", kind, ", ".join(ROPE_TYPES))
    names = ROPE_TYPES[kind]
    understood = {*names, "type", "rope_type", "original_max_position_embeddings"}
    for key, value in parameters.items():
        # a factor of 1, such as partial_rotary_factor, changes nothing
        if key not in understood and value not in (None, 1):
            raise unknown(key, value, f"rope_type {kind} without it")
    for name in names:
        number = parameters[name]
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise ValueError(f"{name} is {number!r}: a positive number is wanted")
    theta, *scaling = (float(parameters[name]) for name in names)
    if kind == "llama3":
        if not scaling[1] < scaling[2]:
            raise ValueError("low_freq_factor is not below high_freq_factor")
        return Rope(theta, scaling[0], tuple(scaling[1:]))
    return Rope(theta, *scaling)


def read_eos(saved: dict, *others: dict) -> tuple[int, ...]:
    """The tokens that end a text, config.json's first; each file has one, a list, or none."""
    ids = []
    for config in (saved, *others):
        value = config.get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    ids = list(dict.fromkeys(ids))
    if DEFAULT_EOS in ids and saved.get("vocab_size", DEFAULT_EOS + 1) <= DEFAULT_EOS:
        ids.remove(DEFAULT_EOS)
    return tuple(ids)
