"""
checkpoint.py: transformers' GPT-2 computes the same logits from the same directory, both ways.
"""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import checkpoint
from checkpoint import CheckpointError, load_checkpoint, load_config, save_checkpoint
from model import GPT, GPTConfig

transformers = pytest.importorskip("transformers")
SHAPE = {"vocab_size": 97, "context_length": 33, "n_layer": 3, "n_head": 4, "n_embd": 32}


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


TOKENS = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(1))


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, **changes):
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu", "relu2"])
@pytest.mark.parametrize("bias", [True, False])
def test_transformers_opens_what_we_save(tmp_path, activation, bias):
    ours = random_model(activation=activation, bias=bias, eos_token_ids=(5,))
    save_checkpoint(ours, tmp_path)
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.config.eos_token_id == 5
    with torch.no_grad():
        assert (ours(TOKENS)[0] - theirs.eval()(TOKENS).logits).abs().max() <= 1e-4


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_we_open_what_transformers_saves(tmp_path, activation):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=33, n_layer=3, n_head=4, n_embd=32,
        activation_function=activation, layer_norm_epsilon=1e-3, eos_token_id=7, bos_token_id=7,
        initializer_range=0.3,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    assert (ours.config.eos_token_id, ours.config.activation, ours.config.bias) == (
        7,
        activation,
        True,
    )
    with torch.no_grad():
        assert (ours(TOKENS)[0] - theirs(TOKENS).logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False},
        {"n_kv_head": 2},
        {"eos_token_ids": (3,), "dropout": 0.1},
        {"n_inner": 48, "tied": False},
    ],
)
def test_what_we_save_comes_back_to_the_bit(tmp_path, changes):
    ours = random_model(**changes)
    save_checkpoint(ours, tmp_path)
    again = load_checkpoint(tmp_path)
    assert again.config == ours.config
    assert not again.training
    assert all(torch.equal(w, again.state_dict()[name]) for name, w in ours.state_dict().items())


def test_loads_in_the_dtype_asked_for(tmp_path):
    save_checkpoint(random_model(), tmp_path)
    assert {p.dtype for p in load_checkpoint(tmp_path, dtype=torch.bfloat16).parameters()} == {
        torch.bfloat16
    }


def test_opens_the_hubs_oldest_layout(tmp_path):
    """
    The hub's gpt2 has names without `transformer.`, causal masks among the weights, and sparse
    settings.
    """
    ours = random_model()
    save_checkpoint(ours, tmp_path)
    weights = {
        name.removeprefix("transformer."): w
        for name, w in load_file(tmp_path / "model.safetensors").items()
    }
    weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 33, 33).tril() for layer in range(3)}
    save_file(weights, tmp_path / "model.safetensors")
    config = {
        "model_type": "gpt2",
        "vocab_size": 97,
        "n_positions": 33,
        "n_ctx": 33,
        "n_layer": 3,
        "n_head": 4,
    }
    config |= {
        "n_embd": 32,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 50256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(load_checkpoint(tmp_path)(TOKENS)[0], ours(TOKENS)[0])


def test_a_directory_without_config_holds_no_model(tmp_path):
    """
    config.json is written last: a process killed during its first save leaves no checkpoint, not a
    broken one.
    """
    with pytest.raises(CheckpointError, match=r"run `python train\.py --out"):
        load_checkpoint(tmp_path)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        write = checkpoint.write_atomically

        def write_and_note(path, f):
            written.append(path.name)
            write(path, f)

        patch.setattr(checkpoint, "write_atomically", write_and_note)
        patch.setattr(checkpoint, "write_json", lambda path, content: written.append(path.name))
        save_checkpoint(random_model(), tmp_path)
    assert written == ["model.safetensors", "config.json"]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "[" * 100_000,
        '{"n_layer": "three"}', '{"n_layer": true}', '{"n_layer": 2.0}',
        '{"n_embd": 1' + "0" * 30 + "}", '{"n_inner": 0}', '{"resid_pdrop": "x"}',
        '{"resid_pdrop": 1}', '{"layer_norm_epsilon": "1e-5"}', '{"layer_norm_epsilon": NaN}',
        '{"bias": "no"}', '{"eos_token_id": [1, "2"]}', '{"eos_token_id": -1}',
        '{"eos_token_id": 1000000000}', '{"eos_token_id": true}',
        '{"n_kv_head": 0}', '{"n_head": 0}', '{"n_head": 7}', '{"n_head": 1000000000}',
        '{"n_layer": -1}', '{"n_layer": 1000000000}',
    ],
)  # fmt: skip
def test_broken_configurations(tmp_path, content):
    """
    Some of these were tracebacks, and an epsilon that is a string made every request to the server
    fail, later.
    """
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json is not a model configuration"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "size"),
    [("n_layer", 2**16 - 1), ("n_embd", 2**30), ("n_positions", 2**30), ("vocab_size", 2**30)],
)
def test_sizes_are_compared_with_the_file_first(tmp_path, name, size):
    """
    With "n_layer": 1000000000 loading never ended; of others torch said that a storage size
    overflowed.
    """
    save_checkpoint(random_model(), tmp_path)
    change_config(tmp_path, **{name: size})
    with pytest.raises(CheckpointError, match=r"weights do not match config\.json"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("model_type", "mixtral"),
        ("activation_function", "quick_gelu"),
        ("scale_attn_weights", False),
        ("scale_attn_weights", None),
        ("add_cross_attention", True),
        ("rope_theta", 10000.0),
    ],
)
def test_options_that_we_do_not_compute_are_refused(tmp_path, option, value):
    save_checkpoint(random_model(), tmp_path)
    change_config(tmp_path, **{option: value})
    with pytest.raises(
        CheckpointError, match=f"{option} is {value!r}, this code computes only .*: vLLM serves"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "option",
    [
        {"n_inner": 128},
        {"n_inner": None},
        {"scale_attn_by_inverse_layer_idx": None},
        {"add_cross_attention": None},
    ],
)
def test_options_that_say_what_we_compute_pass(tmp_path, option):
    """Four times the width is what there is without n_inner."""
    save_checkpoint(random_model(), tmp_path)
    change_config(tmp_path, **option)
    assert load_config(tmp_path) == random_model().config


def written_config(folder, **content) -> GPTConfig:
    (folder / "config.json").write_text(json.dumps(content))
    return load_config(folder)


def test_what_a_configuration_does_not_say_is_as_in_transformers(tmp_path):
    """But for the dropout, which only training uses."""
    ours, theirs = written_config(tmp_path, model_type="gpt2"), transformers.GPT2Config()
    for name, their_name in (
        ("context_length", "n_positions"),
        ("activation", "activation_function"),
    ):
        assert getattr(ours, name) == getattr(theirs, their_name)
    for name in ("vocab_size", "n_layer", "n_head", "n_embd"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert (ours.norm_epsilon, ours.tied) == (theirs.layer_norm_epsilon, theirs.tie_word_embeddings)
    assert (ours.bias, ours.dropout, ours.n_kv_head, ours.eos_token_ids) == (
        True,
        0.0,
        12,
        (50256,),
    )
    assert ours == GPTConfig(eos_token_ids=(50256,))


# a key of config.json, its value there, the field, its value
KEYS = [
    ("vocab_size", 97, "vocab_size", 97),
    ("n_positions", 33, "context_length", 33),
    ("n_layer", 3, "n_layer", 3),
    ("n_head", 6, "n_head", 6),
    ("n_embd", 24, "n_embd", 24),
    ("n_kv_head", 4, "n_kv_head", 4),
    ("activation_function", "relu", "activation", "relu"),
    ("bias", False, "bias", False),
    ("resid_pdrop", 0.25, "dropout", 0.25),
    ("layer_norm_epsilon", 0.001, "norm_epsilon", 0.001),
    ("layer_norm_epsilon", 0, "norm_epsilon", 0),
    ("n_inner", 100, "n_inner", 100),
    ("tie_word_embeddings", False, "tied", False),
    ("eos_token_id", 0, "eos_token_ids", (0,)),
    ("eos_token_id", 50256, "eos_token_ids", (50256,)),
]


@pytest.mark.parametrize(("key", "value", "field", "meant"), KEYS)
def test_each_key_of_a_configuration_sets_one_field(tmp_path, key, value, field, meant):
    wanted = {"eos_token_ids": (50256,) if key != "vocab_size" else ()} | {field: meant}
    assert written_config(tmp_path, **{key: value}) == GPTConfig(**wanted)


@pytest.mark.parametrize(("vocab_size", "ids"), [(50256, ()), (50257, (50256,)), (50304, (50256,))])
def test_gpt2s_end_of_text_counts_where_there_is_such_a_token(tmp_path, vocab_size, ids):
    """transformers writes 50256 for a GPT-2 of any vocabulary."""
    assert written_config(tmp_path, vocab_size=vocab_size, eos_token_id=50256).eos_token_ids == ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 30, "n_head": 4}, "n_embd 30 is not a multiple of n_head 4"),
        ({"n_embd": 32, "n_head": 4, "n_kv_head": 3}, "n_head 4 is not a multiple of n_kv_head 3"),
        ({"n_layer": 0}, "n_layer is 0: a whole number of at least 1"),
        (
            {"context_length": 2**31},
            "context_length is 2147483648: a whole number of at least 1, and below",
        ),
        ({"dropout": 1}, "dropout is 1: a number from 0 to below 1 is wanted"),
        ({"dropout": -0.1}, "dropout is -0.1: a number from 0 to below 1 is wanted"),
        ({"norm_epsilon": -1e-9}, "norm_epsilon is -1e-09: a number from 0"),
        ({"norm_epsilon": 1.0}, "norm_epsilon is 1.0: a number from 0"),
        ({"bias": 1}, "bias is 1: true or false is wanted"),
        (
            {"vocab_size": 5, "eos_token_ids": (5,)},
            "eos_token_id is 5: a token id, 0 to 4, or none",
        ),
        (
            {"vocab_size": 5, "eos_token_ids": (4, 5)},
            "eos_token_id is 5: a token id, 0 to 4",
        ),
        ({"activation": "swish"}, "activation 'swish' is unknown; there is gelu_new"),
    ],
)
def test_shapes_that_cannot_be(fields, message):
    with pytest.raises(ValueError) as caught:
        GPTConfig(**fields)
    assert str(caught.value).startswith(message)
    assert GPTConfig(
        vocab_size=5, eos_token_ids=(4,), n_embd=32, n_head=4, n_kv_head=2, dropout=0
    )  # at the edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_configuration_that_is_written(tmp_path, dtype):
    """All that other programs read of it, as they spell it."""
    folder = tmp_path / "a" / "b"  # which need not be there
    save_checkpoint(
        random_model(eos_token_ids=(5, 7), dropout=0.1, n_kv_head=2).to(dtype),
        folder,
    )
    assert json.loads((folder / "config.json").read_text()) == {
        "vocab_size": 97, "n_positions": 33, "n_layer": 3, "n_head": 4, "n_embd": 32,
        "n_kv_head": 2, "activation_function": "gelu_new", "bias": True, "resid_pdrop": 0.1,
        "embd_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "eos_token_id": [5, 7],
        "bos_token_id": 5, "model_type": "gpt2", "n_inner": 128,
        "tie_word_embeddings": True, "architectures": ["GPT2LMHeadModel"],
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # or transformers refuses it
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("bias", [True, False])
def test_matrices_are_written_as_gpt2_has_them(tmp_path, bias):
    """
    [in, out] for those of linear layers, biases of zeros for a model that has none; and loaded each
    row in one piece, as the kernels read them.
    """
    ours = random_model(bias=bias)
    save_checkpoint(ours, tmp_path)
    saved, state = load_file(tmp_path / "model.safetensors"), ours.state_dict()
    assert torch.equal(state.pop("lm_head.weight"), state["wte.weight"])  # tied: written once
    for name, weight in state.items():
        is_linear = (
            name.endswith("weight") and weight.dim() == 2 and not name.startswith(("wte", "wpe"))
        )
        assert torch.equal(saved[f"transformer.{name}"], weight.t() if is_linear else weight)
    biases = {name: weight for name, weight in saved.items() if name.endswith("bias")}
    assert len(biases) == 3 * 6 + 1 and len(saved) == 2 * len(biases) + 2
    for name, weight in biases.items():
        assert weight.shape == (saved[name.removesuffix("bias") + "weight"].shape[-1],)
        assert bias or not weight.any()
    again = load_checkpoint(tmp_path)
    assert all(weight.is_contiguous() for weight in again.state_dict().values())
    assert not again.training and {weight.dtype for weight in again.parameters()} == {torch.float32}


def test_masks_of_the_hub_are_no_weights(tmp_path):
    """Both kinds that its GPT-2s have."""
    save_checkpoint(random_model(), tmp_path)
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 33, 33).tril(),
        "h.2.attn.masked_bias": torch.tensor(-1e4),
    }
    change_weights(tmp_path, **masks)
    assert load_checkpoint(tmp_path).config == random_model().config


@pytest.mark.parametrize("shape", [(31,), (32, 1), (1, 32), (33,), ()])
def test_weights_of_another_shape_are_refused(tmp_path, shape):
    save_checkpoint(random_model(), tmp_path)
    change_weights(tmp_path, **{"transformer.h.1.ln_2.bias": torch.ones(shape)})
    with pytest.raises(CheckpointError, match=r"h\.1\.ln_2\.bias is .*, wanted \(32,\)"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(), (3,), (1, 1), (1, 32, 96)])
def test_matrices_of_another_shape_are_refused(tmp_path, shape):
    """They are transposed first, which torch refuses for three dimensions."""
    save_checkpoint(random_model(), tmp_path)
    change_weights(tmp_path, **{"transformer.h.1.attn.c_attn.weight": torch.ones(shape)})
    with pytest.raises(CheckpointError, match=r"h\.1\.attn\.c_attn\.weight is .*, wanted"):
        load_checkpoint(tmp_path)


def test_what_training_left_is_no_other_models_file(tmp_path):
    """train_state.pt stands beside what was never saved whole: that is still told to train."""
    (tmp_path / "train_state.pt").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"no model in .*, config\.json is missing: run `python train\.py"
    ):
        load_checkpoint(tmp_path)
    for number in range(1, 6):
        (tmp_path / f"model-0000{number}.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError,
        match=r"in model-00001.*00002.*00003\.safetensors: .*download .*index",
    ):
        load_checkpoint(tmp_path)


def test_broken_weights(tmp_path):
    save_checkpoint(random_model(), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for part in (b"", whole[:7], whole[:1000], whole[:-1]):
        path.write_bytes(part)
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(tmp_path)
    weights = load_file_from(whole, tmp_path)
    for change in ({"transformer.ln_f.weight": torch.ones(31)}, {"transformer.ln_f.weight": None}):
        save_file({n: w for n, w in (weights | change).items() if w is not None}, path)
        with pytest.raises(CheckpointError, match=r"ln_f\.weight is .*, wanted \(32,\)"):
            load_checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [
        (None, None, ()),
        (5, None, (5,)),
        ([5, 7], None, (5, 7)),
        ([5, 7], 7, (5, 7)),
        (None, 5, (5,)),
        (None, [5, 7], (5, 7)),
        (7, [5, 7, 9], (7, 5, 9)),
        ([], [], ()),
        (0, 0, (0,)),
        (50256, 5, (5,)),
    ],
)
def test_all_tokens_that_end_a_text_are_read(tmp_path, own, generation, ids):
    """A list was refused, and one that stands only in generation_config.json never ended a text."""
    save_checkpoint(random_model(), tmp_path)
    change_config(tmp_path, eos_token_id=own)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    config = load_config(tmp_path)
    assert config.eos_token_ids == ids
    assert config.eos_token_id == (ids[0] if ids else None)


def test_several_ends_of_text_come_back(tmp_path):
    ours = random_model(eos_token_ids=(5, 7, 9))
    save_checkpoint(ours, tmp_path)
    assert load_config(tmp_path) == ours.config
    assert transformers.GPT2Config.from_pretrained(tmp_path).eos_token_id == [5, 7, 9]


def test_an_end_of_text_outside_the_vocabulary_is_refused(tmp_path):
    """
    One of 10**9 in generation_config.json would never be seen; a negative one would be another
    token.
    """
    save_checkpoint(random_model(), tmp_path)
    for bad in (97, 10**9, -1, [5, 97]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(
            CheckpointError, match=r"eos_token_id is .*: a token id, 0 to 96, or none is wanted"
        ):
            load_config(tmp_path)


def test_a_head_of_its_own_opens(tmp_path):
    """
    A head that is not the embedding was ignored, then refused: whatever config.json says, it is the
    head that the file has.
    """
    save_checkpoint(random_model(), tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["transformer.wte.weight"]
    change_weights(tmp_path, **{"lm_head.weight": embedding.clone()})
    # a copy of the embedding is no other head
    assert load_checkpoint(tmp_path).config == random_model().config
    other = embedding + 1
    change_weights(tmp_path, **{"lm_head.weight": other})
    for said in (True, False, None):
        change_config(tmp_path, tie_word_embeddings=said)
        again = load_checkpoint(tmp_path)
        assert torch.equal(again.lm_head.weight, other)
        assert torch.equal(again.wte.weight, embedding) and not again.config.tied
    change_weights(tmp_path, **{"lm_head.weight": embedding[:96].clone()})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \(96, 32\), wanted \(97, 32\)"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["h.3.ln_1.weight", "h.0.attn.q_norm.weight", "score.weight", "h.0.crossattention.x"]
)
def test_weights_that_the_model_lacks_are_refused(tmp_path, name):
    """A file of four layers with n_layer 3 opened as another model."""
    save_checkpoint(random_model(), tmp_path)
    change_weights(tmp_path, **{f"transformer.{name}": torch.ones(32)})
    with pytest.raises(
        CheckpointError, match=f"weights do not match config.json: {name} is no part of this model"
    ):
        load_checkpoint(tmp_path)


def test_biases_beside_a_config_without_are_refused(tmp_path):
    """We save zeros for transformers' sake; others were ignored."""
    save_checkpoint(random_model(bias=False), tmp_path)
    change_weights(tmp_path, **{"transformer.ln_f.bias": torch.full((32,), 0.5)})
    with pytest.raises(CheckpointError, match=r"ln_f\.bias is no part of this model"):
        load_checkpoint(tmp_path)


def test_a_pipe_is_no_model(tmp_path):
    """To open one waits for a writer: the server hung without a word."""
    save_checkpoint(random_model(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no file: restore or"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["pytorch_model.bin"], r"from_pretrained\(DIR\)\.save_pretrained\(NEW\)"),
        (["tf_model.h5"], r"transformers 4, .*from_tf=True"),
        (["flax_model.msgpack"], r"transformers 4, .*from_flax=True"),
        (["model-q8_0.gguf"], r"gguf_file=FILE\)"),
        (["consolidated.00.pth", "params.json"], "in the layout of the Hugging Face Hub"),
        (["model-00001-of-00002.safetensors"], r"download model\.safetensors\.index\.json, too"),
        (["ckpt.pt"], r"nanoGPT's, run `python checkpoint\.py convert FILE NEW`"),
    ],
)
def test_downloads_are_not_told_to_train(tmp_path, files, advice):
    """
    Weights in shards or pickles were "missing: run train.py", which would have trained another
    model over them; then all were told to use GPT-2's class.
    """
    save_checkpoint(random_model(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in files:
        (tmp_path / name).write_bytes(b"")
    wanted = rf"model\.safetensors is missing, the weights are in {files[0]}: only .*{advice}"
    with pytest.raises(CheckpointError, match=wanted) as caught:
        load_checkpoint(tmp_path)
    assert "train.py" not in str(caught.value)
    (tmp_path / "config.json").unlink()
    wanted = rf"config\.json is missing beside {files[0]}: download it, too"
    if files[0].endswith((".pt", ".pth")):
        wanted = rf"config\.json is missing, the weights are in {files[0]}: only .*{advice}"
    with pytest.raises(CheckpointError, match=wanted):
        load_checkpoint(tmp_path)


def load_file_from(content: bytes, folder) -> dict[str, torch.Tensor]:
    (folder / "whole.safetensors").write_bytes(content)
    return load_file(folder / "whole.safetensors")
