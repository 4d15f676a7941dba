"""
The model families that can be served. All families share the single decoder in model.py. Each one
has an entry in the table `FAMILIES`: the names of GPTConfig's fields in config.json, the fields
that config.json omits because the family's class fixes their values, and the names of the weights.

    config = read_fields(parsed_config_json, parsed_generation_config_json)
    saved = hub_config(config)                    # the reverse, for new models

A key in config.json is an error if it is unknown here and could change the computation. To add a
family, start from the most similar one and describe the differences. For example, Phi-3 is like
Mistral, except that its files stack q, k and v, and the two halves of the MLP, as our model does:

    families.py           add the weight names that differ, and `"phi3": PHI3` to FAMILIES:
                              PHI3_WEIGHTS = WEIGHT_NAMES | pairs('''
                                  h.{}.attn.c_attn  layers.{}.self_attn.qkv_proj
                                  h.{}.mlp.c_fc     layers.{}.mlp.gate_up_proj
                              ''')
                              PHI3 = MISTRAL._replace(weights=PHI3_WEIGHTS)
                          Then the key `original_max_position_embeddings` is still refused. Add it
                          to IGNORED_KEYS if it does not change the computation, to the family's
                          `defaults` if it has a default, or to FIXED_OPTIONS if only one of its
                          values is supported. If a value must be converted, add a line to
                          `read_fields`
    model.py              change it only for something that no family has yet, which Phi-3 does not
                          need: add a field to GPTConfig, off by default, and use it in one place.
                          But first try to express the difference with existing fields. For example,
                          a layer without positions rotates by 0, and multipliers become scales and
                          epsilons. If that is impossible (as it was for the order and width of
                          norms), ops/ must change as well: cpu.c and cpu.py, fused.py (heads),
                          linear.py (norms)
    tests/tiny_models.py  add a row to FAMILIES, and a row to WITHOUT for each difference.
                          test_families.py compares these models with transformers, and
                          training/test_init.py trains and saves each of them
    tests/engine/test_bits.py   add the family's name to MODELS if ops/ has changed
    tests/test_checkpoint.py    add keys to OWN, files to SERVED, unsupported variants to REFUSED
    REFERENCE.md          add a line to "Families of models", and one to README's table of what is
                          included
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from model import ACTIVATIONS, GPTConfig, Rope, check_value


class CheckpointError(ValueError):
    """A directory does not contain a model that can be loaded. The message says what to do."""


# the end-of-text token that transformers writes if none was given, regardless of the vocabulary
DEFAULT_EOS = 50256

# --------------------------------------------------------------------------------------------------
# Families


def pairs(table: str) -> dict[str, str]:
    """Parse lines into a dict that maps each line's first word to the rest of the line."""
    return dict(line.split(maxsplit=1) for line in table.strip().splitlines())


# our module -> the hub's module, or several that are stacked in this order. Modules that are not
# listed have the same name in both; this includes all of GPT-2's modules.
WEIGHT_NAMES = pairs("""
    wte               embed_tokens
    h.{}.ln_1         layers.{}.input_layernorm
    h.{}.attn.c_attn  layers.{0}.self_attn.q_proj layers.{0}.self_attn.k_proj \
        layers.{0}.self_attn.v_proj
    h.{}.attn.q_norm  layers.{}.self_attn.q_norm
    h.{}.attn.k_norm  layers.{}.self_attn.k_norm
    h.{}.attn.c_proj  layers.{}.self_attn.o_proj
    h.{}.ln_2         layers.{}.post_attention_layernorm
    h.{}.mlp.c_fc     layers.{0}.mlp.gate_proj layers.{0}.mlp.up_proj
    h.{}.mlp.c_proj   layers.{}.mlp.down_proj
    ln_f              norm
""")
# here, post_attention_layernorm follows attention; Llama's norm with that name precedes the MLP
GEMMA_WEIGHTS = WEIGHT_NAMES | pairs("""
    h.{}.attn.post_norm  layers.{}.post_attention_layernorm
    h.{}.ln_2            layers.{}.pre_feedforward_layernorm
    h.{}.mlp.post_norm   layers.{}.post_feedforward_layernorm
""")

NANOCHAT_WEIGHTS = WEIGHT_NAMES | pairs("""
    h.{}.mlp.c_fc    layers.{}.mlp.fc1
    h.{}.mlp.c_proj  layers.{}.mlp.fc2
""")
GRANITE4_WEIGHTS = WEIGHT_NAMES | pairs("""
    h.{}.mlp.c_fc    layers.{}.shared_mlp.input_linear
    h.{}.mlp.c_proj  layers.{}.shared_mlp.output_linear
""")
HUNYUAN_WEIGHTS = WEIGHT_NAMES | pairs("""
    h.{}.attn.q_norm  layers.{}.self_attn.query_layernorm
    h.{}.attn.k_norm  layers.{}.self_attn.key_layernorm
""")

# our field -> its name in config.json
FIELD_NAMES = pairs("""
    vocab_size      vocab_size
    context_length  max_position_embeddings
    n_layer         num_hidden_layers
    n_head          num_attention_heads
    n_kv_head       num_key_value_heads
    head_size       head_dim
    n_embd          hidden_size
    n_inner         intermediate_size
    norm_epsilon    rms_norm_eps
    activation      hidden_act
    tied            tie_word_embeddings
""")
# n_kv_head and bias are our own fields; GPT-2 in transformers has neither
GPT2_NAMES = pairs("""
    vocab_size      vocab_size
    n_layer         n_layer
    n_head          n_head
    n_kv_head       n_kv_head
    n_embd          n_embd
    n_inner         n_inner
    bias            bias
    context_length  n_positions
    norm_epsilon    layer_norm_epsilon
    activation      activation_function
    dropout         resid_pdrop
    tied            tie_word_embeddings
""")
BIASES = {"qkv_bias": "attention_bias", "proj_bias": "attention_bias"}
# config.json has a single window for the whole model, see `read_windows`
WINDOW_NAMES = FIELD_NAMES | {"windows": "sliding_window"}
# Gemma's attention_scale is query_pre_attn_scalar to the power of -0.5
GEMMA_NAMES = WINDOW_NAMES | BIASES
GEMMA_NAMES |= pairs("""
    activation       hidden_activation
    attention_scale  query_pre_attn_scalar
    logit_softcap    final_logit_softcapping
""")
MULTIPLIERS = pairs("""
    embedding_scale  embedding_multiplier
    attention_scale  attention_multiplier
    residual_scale   residual_multiplier
    logit_scale      logits_scaling
""")

# Keys that published files may omit, with the defaults of transformers' classes. A file that omits
# any other key is refused.
DEFAULTS = {
    "tie_word_embeddings": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "attention_bias": False,
    "mlp_bias": False,
}
GPT2_DEFAULTS = {"tie_word_embeddings": True, "n_inner": None, "n_kv_head": None, "bias": True}
ROPE_DEFAULTS = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None}
LAYERS_DEFAULTS = ROPE_DEFAULTS | {"layer_types": None}
QWEN_DEFAULTS = LAYERS_DEFAULTS | {"use_sliding_window": False, "max_window_layers": None}
GEMMA_DEFAULTS = LAYERS_DEFAULTS | {"tie_word_embeddings": True}
GEMMA3_DEFAULTS = GEMMA_DEFAULTS | {
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}
SMOLLM3_DEFAULTS = QWEN_DEFAULTS | {
    "tie_word_embeddings": True,
    "rope_theta": 2e6,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
OLMO3_DEFAULTS = LAYERS_DEFAULTS | {"rope_theta": 5e5, "rope_local_base_freq": None}


class Family(NamedTuple):
    """The format in which the hub stores the models of one class."""

    weights: dict  # our module -> theirs, without the prefix
    names: dict  # our field -> its name in config.json
    fields: dict  # our fields that are never in config.json, with their values
    defaults: dict  # in addition to DEFAULTS
    has_window: Callable = lambda saved, i: True  # (config.json, i) -> whether layer i has a window
    norm_offset: float = 0.0  # Gemma stores its norms' weights minus 1


ROPED = {"norm": "rms", "bias": False, "gated": True}
GPT2 = Family({}, GPT2_NAMES, {}, GPT2_DEFAULTS)
LLAMA_NAMES = FIELD_NAMES | BIASES | {"mlp_bias": "mlp_bias"}
LLAMA = Family(WEIGHT_NAMES, LLAMA_NAMES, ROPED, ROPE_DEFAULTS)
MISTRAL = LLAMA._replace(names=WINDOW_NAMES)
QWEN2 = Family(
    WEIGHT_NAMES,
    WINDOW_NAMES,
    ROPED | {"qkv_bias": True},
    QWEN_DEFAULTS,
    has_window=lambda saved, i: i >= saved["max_window_layers"],
)
QWEN3 = QWEN2._replace(names=WINDOW_NAMES | BIASES, fields=ROPED | {"qk_norm": True})
GEMMA2 = Family(
    GEMMA_WEIGHTS,
    GEMMA_NAMES | {"attention_softcap": "attn_logit_softcapping"},
    ROPED | {"post_norm": True},
    GEMMA_DEFAULTS,
    has_window=lambda saved, i: i % 2 == 0,
    norm_offset=1.0,
)
GEMMA3 = Family(
    GEMMA_WEIGHTS,
    GEMMA_NAMES,
    ROPED | {"post_norm": True, "qk_norm": True},
    GEMMA3_DEFAULTS,
    has_window=lambda saved, i: (i + 1) % window_period(saved) != 0,
    norm_offset=1.0,
)
SMOLLM3 = LLAMA._replace(defaults=SMOLLM3_DEFAULTS)
OLMO_FIELDS = {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_wide": True}
OLMO2 = LLAMA._replace(weights=GEMMA_WEIGHTS, fields=ROPED | OLMO_FIELDS)
OLMO3 = OLMO2._replace(
    names=WINDOW_NAMES | BIASES,
    defaults=OLMO3_DEFAULTS,
    has_window=lambda saved, i: (i + 1) % 4 != 0,
)
GRANITE = LLAMA._replace(names=LLAMA_NAMES | MULTIPLIERS)
GRANITE4 = GRANITE._replace(
    weights=GRANITE4_WEIGHTS,
    names=GRANITE.names | {"n_inner": "shared_intermediate_size"},
    defaults=LAYERS_DEFAULTS | {"intermediate_size": None},  # the experts' width
)
HUNYUAN_FIELDS = ROPED | {"qk_norm": True, "qk_norm_late": True}
HUNYUAN = LLAMA._replace(weights=HUNYUAN_WEIGHTS, fields=HUNYUAN_FIELDS)
NANOCHAT_FIELDS = {
    "gated": False,
    "norm_weights": False,
    "qk_norm": True,
    "embedding_norm": True,
    "rope_backwards": True,
}
NANOCHAT = LLAMA._replace(
    weights=NANOCHAT_WEIGHTS,
    names=LLAMA_NAMES | {"logit_softcap": "final_logit_softcapping"},
    fields=ROPED | NANOCHAT_FIELDS,
)
FAMILIES = {  # config.json's model_type -> its family
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "granite": GRANITE,
    "granitemoehybrid": GRANITE4,
    "hunyuan_v1_dense": HUNYUAN,
    "nanochat": NANOCHAT,
}


def window_period(saved: dict) -> int:
    """Return Gemma 3's period p: in every p layers, the last one does not have a window."""
    return saved.get("_sliding_window_pattern", saved["sliding_window_pattern"])


# other names for activations
ACTIVATION_NAMES = pairs("""
    gelu_pytorch_tanh  gelu_new
    gelu_fast          gelu_new
    swish              silu
""")

# Keys in config.json that do not change the computation. A key that is neither listed here nor read
# elsewhere is an error, unless its value is false, null, 0 or empty.
IGNORED_KEYS = re.compile(
    r"""
    _.* | output_.* | mamba_.* | summary_.* | transformers.* | unsloth_.* | .*_id | .*_pdrop
    | .*_token_index | architectures | attention_dropout | auto_map | cache_implementation | dtype
    | hidden_act
    | id2label | initializer_range | is_llama_config | label2id | max_length | mm_tokens_per_image
    | model_type | n_ctx | pretraining_tp | reorder_and_upcast_attn | return_dict
    | num_experts_per_tok | router_aux_loss_coef | time_step_limit
    | attention_head_dim | cla_share_factor | dense_list | enable_lm_head_fp32 | org_vocab_size
    | pool_type | init_method | task_specific_params | text_config | tokenizer_class | torch_dtype
    | use_cache
    """,
    re.VERBOSE,
)
# rope_type -> its parameters
ROPE_TYPES = pairs("""
    default  rope_theta
    linear   rope_theta factor
    llama3   rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings
    yarn     rope_theta factor beta_fast beta_slow original_max_position_embeddings \
        attention_factor
""")
# keys that change the computation -> the only value that we support
FIXED_OPTIONS = {"scale_attn_weights": True, "is_causal": True, "partial_rotary_factor": 1.0}
# Granite, Hunyuan
FIXED_OPTIONS |= {
    "normalization_function": "rmsnorm",
    "position_embedding_type": "rope",
    "norm_type": "rms",
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}


def hub_names(name: str, family: Family) -> list[str]:
    """Return the hub names (without prefix) for one of our weights, such as "h.3.ln_1.weight"."""
    module, kind = name.rsplit(".", 1)
    layer = "".join(re.findall(r"^h\.(\d+)", module))
    module = re.sub(r"^h\.\d+", "h.{}", module)
    hub_modules = family.weights.get(module, module).format(layer)
    return [f"{hub_module}.{kind}" for hub_module in hub_modules.split()]


# --------------------------------------------------------------------------------------------------
# GPTConfig -> config.json


def hub_config(config: GPTConfig) -> dict:
    """
    Return the content of config.json (except for the dtype) for a GPT-2, a Llama or a Qwen 3. Both
    transformers 4 and 5 can read it. Raises CheckpointError for any other model.
    """
    name = "gpt2"
    if config.rope:
        name = "qwen3" if config.qk_norm else "llama"
    saved = {key: getattr(config, field) for field, key in FAMILIES[name].names.items()}
    ends = list(config.eos_token_ids)
    saved["model_type"] = name
    saved["eos_token_id"] = ends if len(ends) > 1 else config.eos_token_id
    saved["bos_token_id"] = config.eos_token_id
    if config.rope:
        saved["architectures"] = [f"{name.title()}ForCausalLM"]
        if name == "qwen3":
            saved["sliding_window"] = None
        saved["rope_theta"] = next(iter(config.rope.values())).theta
    else:
        saved["architectures"] = ["GPT2LMHeadModel"]
        saved["embd_pdrop"] = config.dropout
        saved["attn_pdrop"] = config.dropout
    read = read_fields(saved)
    read.dropout = config.dropout  # only used in training; not in Llama's file
    if read != config:
        raise CheckpointError(
            f"only a new GPT-2, Llama or Qwen 3 without scaled positions can be saved, not {config}"
        )
    return saved


# --------------------------------------------------------------------------------------------------
# config.json -> GPTConfig


def unknown(key: str, value, computed: str) -> CheckpointError:
    """Return the error to raise for an unsupported key that changes the computation."""
    return CheckpointError(
        f"{key} is {value!r:.200}, this code supports only {computed}: vLLM may serve this model"
    )


def family_named(saved: dict) -> Family:
    """Return a config.json's family. Raises CheckpointError if FAMILIES does not have it."""
    name = saved.get("model_type")
    if name not in FAMILIES:
        raise unknown("model_type", name, ", ".join(FAMILIES))
    return FAMILIES[name]


def without_nesting(saved: dict) -> dict:
    """Return a config.json with its text_config (the text part of a larger model) merged in."""
    return saved | (saved.get("text_config") or {})


def read_fields(saved: dict, *others: dict) -> GPTConfig:
    """
    Return the configuration in a parsed config.json. `others` are further parsed files that may
    name end-of-text tokens. Raises CheckpointError, or another of the errors in common.MALFORMED.
    """
    others = saved, *others  # a larger model may name further end-of-text tokens than its text part
    saved = without_nesting(saved)
    family = family_named(saved)
    check_keys(saved, family)
    if saved.get("tie_word_embeddings", False) is None:
        del saved["tie_word_embeddings"]
    saved = DEFAULTS | family.defaults | saved
    for key in family.names.values():
        if key not in saved:
            raise CheckpointError(f"{key} is missing: restore or download the file")
    fields = {field: saved[key] for field, key in family.names.items()}
    fields["eos_token_ids"] = read_eos(saved, *others)
    name = fields["activation"]
    fields["activation"] = ACTIVATION_NAMES.get(name, name)
    if fields["activation"] not in ACTIVATIONS:
        raise unknown(family.names["activation"], name, ", ".join(ACTIVATIONS))
    if family is GPT2:
        return GPTConfig(**fields)
    check_value(int, "num_hidden_layers", fields["n_layer"])
    fields["windows"] = read_windows(saved, family, fields["n_layer"])
    fields["rope"] = read_ropes(saved, fields["windows"])
    for rope in fields["rope"].values():
        if rope.yarn:  # Qwen's files give the context length without yarn
            longest = int(rope.factor * rope.yarn[-1])
            fields["context_length"] = max(fields["context_length"], longest)
    fields["no_rope"] = layers_without_rope(saved, fields["n_layer"])
    if "query_pre_attn_scalar" in saved:  # Gemma
        fields["attention_scale"] **= -0.5
        fields["embedding_scale"] = fields["n_embd"] ** 0.5
    for field in ("attention_softcap", "logit_softcap"):
        fields[field] = fields.get(field) or 0.0
    return GPTConfig(**fields | family.fields)


def check_keys(saved: dict, family: Family):
    """Raise CheckpointError if an unknown key or value could change the computation."""
    understood = {*family.names.values(), *family.defaults}
    for key, value in saved.items():
        if key in understood or IGNORED_KEYS.fullmatch(key):
            continue
        computed = FIXED_OPTIONS.get(key)
        is_off = not value and not computed  # false, null, 0 or an empty list
        if value != computed and not is_off:
            raise unknown(key, value, repr(computed) if computed else "models without it")


def read_windows(saved: dict, family: Family, n_layer: int) -> tuple[int, ...]:
    """Return each layer's window, where 0 means none."""
    window = saved.get("sliding_window") or 0
    if "use_sliding_window" in family.defaults and not saved["use_sliding_window"]:
        window = 0
    kinds = saved.get("layer_types")
    if kinds is None:
        return tuple(
            window if window and family.has_window(saved, i) else 0 for i in range(n_layer)
        )
    sizes = {"full_attention": 0, "attention": 0, "sliding_attention": window}
    for kind in kinds:
        if kind not in sizes:
            raise unknown("layer_types", kind, ", ".join(sizes))
    return tuple(sizes[kind] for kind in kinds)


def layers_without_rope(saved: dict, n_layer: int) -> tuple[int, ...]:
    """Return SmolLM3's layers without rotary positions, which a list or a period specifies."""
    if "no_rope_layers" not in saved:
        return ()
    period = saved["no_rope_layer_interval"]
    rotated = saved["no_rope_layers"] or [(i + 1) % period for i in range(n_layer)]
    return tuple(i for i in range(n_layer) if not rotated[i])


def read_ropes(saved: dict, windows: tuple[int, ...]) -> dict[int, Rope]:
    """
    Return the rotary positions for each window. There are two formats. Transformers 5 writes
    `rope_parameters`; for Gemma 3 and OLMo 3, these are separate for each type of layer.
    Transformers 4 wrote `rope_theta` and `rope_scaling`. In Gemma 3 and OLMo 3, this scaling does
    not apply to layers with a window, for which Gemma 3 has `rope_local_base_freq` instead. If a
    file has both formats, `rope_scaling` takes precedence over `rope_parameters`, as in
    transformers 5.
    """
    base = {"rope_theta": saved["rope_theta"]}
    base["original_max_position_embeddings"] = saved["max_position_embeddings"]
    new = saved["rope_parameters"]
    whole = sliding = base | (saved["rope_scaling"] or new or {})
    if "rope_local_base_freq" in saved:
        sliding = base | {"rope_theta": saved["rope_local_base_freq"] or saved["rope_theta"]}
        if new:
            whole = base | new["full_attention"]
            sliding = base | new["sliding_attention"]
    return {window: read_rope(sliding if window else whole, saved) for window in set(windows)}


def read_rope(parameters: dict, saved: dict) -> Rope:
    """Parse one set of rope parameters. Raises CheckpointError if the scaling is unsupported."""
    old_name = parameters.get("type", "default")
    kind = parameters.get("rope_type", old_name)
    if kind == "yarn":
        parameters = with_yarn_defaults(parameters)
    if kind == "dynamic" and saved["model_type"] == "hunyuan_v1_dense":  # just a different base
        D = saved["head_dim"]
        if D is None:
            D = saved["hidden_size"] // saved["num_attention_heads"]
        theta = parameters["rope_theta"] * parameters["alpha"] ** (D / (D - 2))
        kind, parameters = "default", {"rope_theta": theta}
    if kind not in ROPE_TYPES:
        raise unknown("rope_type", kind, ", ".join(ROPE_TYPES))
    names = ROPE_TYPES[kind].split()
    understood = {*names, "type", "rope_type", "original_max_position_embeddings"}
    for key, value in parameters.items():
        # a factor of 1, such as partial_rotary_factor, does not change anything
        if key not in understood and value not in (None, 1):
            raise unknown(key, value, f"rope_type {kind} without it")
    for name in names:
        number = parameters[name]
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise ValueError(f"{name} is {number!r}, wanted a positive number")
    theta, *scaling = (float(parameters[name]) for name in names)
    if kind == "llama3":
        if not scaling[1] < scaling[2]:
            raise ValueError("low_freq_factor is not below high_freq_factor")
        return Rope(theta, scaling[0], tuple(scaling[1:]))
    if kind == "yarn":
        factor, *yarn, attention_factor = scaling
        return Rope(theta, factor, yarn=tuple(yarn), attention_factor=attention_factor)
    return Rope(theta, *scaling)


def with_yarn_defaults(parameters: dict) -> dict:
    """Return yarn's parameters, with defaults for any that the file omits."""
    attention_factor = 1.0
    cancels = parameters.get("mscale") and parameters.get("mscale_all_dim")  # both are 1
    if parameters["factor"] > 1 and not cancels:
        attention_factor += 0.1 * math.log(parameters["factor"])
    defaults = {"beta_fast": 32, "beta_slow": 1, "attention_factor": attention_factor}
    return defaults | {key: value for key, value in parameters.items() if value is not None}


def read_eos(saved: dict, *others: dict) -> tuple[int, ...]:
    """Return the end-of-text tokens, config.json's first. A file may have one, a list, or none."""
    ids = []
    for config in (saved, *others):
        value = config.get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    ids = list(dict.fromkeys(ids))
    if DEFAULT_EOS in ids and saved["vocab_size"] <= DEFAULT_EOS:
        ids.remove(DEFAULT_EOS)
    return tuple(ids)
