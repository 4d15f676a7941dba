"""
Opening directories: what config.json leaves unsaid, files in parts, dtypes, what loading takes.
"""

import json

import pytest

from checkpoint import CheckpointError, load_config
from families import FAMILIES, columns, read_fields
from model import Rope

transformers = pytest.importorskip("transformers")

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
