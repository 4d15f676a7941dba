"""model.py's checkpoints: transformers' GPT-2 computes the same logits from the same directory, both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import GPT, CheckpointError, GPTConfig, load_checkpoint, load_config, save_checkpoint

transformers = pytest.importorskip("transformers")
SHAPE = {"vocab_size": 97, "context_length": 33, "n_layer": 3, "n_head": 4, "n_embd": 32}


def random_model(**changes) -> GPT:
    """A GPT whose every parameter is far from zero and one, so that no bias or norm can be lost unseen."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE | changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


TOKENS = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu", "relu2"])
@pytest.mark.parametrize("bias", [True, False])
def test_transformers_opens_what_we_save(tmp_path, activation, bias):
    ours = random_model(activation=activation, bias=bias, eos_token_id=5)
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
        vocab_size=97, n_positions=33, n_layer=3, n_head=4, n_embd=32, activation_function=activation,
        layer_norm_epsilon=1e-3, eos_token_id=7, bos_token_id=7, initializer_range=0.3,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = load_checkpoint(tmp_path)
    assert (ours.config.eos_token_id, ours.config.activation, ours.config.bias) == (7, activation, True)
    with torch.no_grad():
        assert (ours(TOKENS)[0] - theirs(TOKENS).logits).abs().max() <= 1e-4


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"n_kv_head": 2}, {"eos_token_id": 3, "dropout": 0.1}])
def test_what_we_save_comes_back_to_the_bit(tmp_path, changes):
    ours = random_model(**changes)
    save_checkpoint(ours, tmp_path)
    again = load_checkpoint(tmp_path)
    assert again.config == ours.config
    assert not again.training
    assert all(torch.equal(w, again.state_dict()[name]) for name, w in ours.state_dict().items())


def test_loads_in_the_dtype_asked_for(tmp_path):
    save_checkpoint(random_model(), tmp_path)
    assert {p.dtype for p in load_checkpoint(tmp_path, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_opens_the_hubs_oldest_layout(tmp_path):
    """The hub's gpt2 has names without `transformer.`, causal masks among the weights, and sparse settings."""
    ours = random_model()
    save_checkpoint(ours, tmp_path)
    weights = {name.removeprefix("transformer."): w for name, w in load_file(tmp_path / "model.safetensors").items()}
    weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 33, 33).tril() for layer in range(3)}
    save_file(weights, tmp_path / "model.safetensors")
    config = {"model_type": "gpt2", "vocab_size": 97, "n_positions": 33, "n_ctx": 33, "n_layer": 3, "n_head": 4}
    config |= {"n_embd": 32, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "eos_token_id": 50256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(load_checkpoint(tmp_path)(TOKENS)[0], ours(TOKENS)[0])


def test_a_directory_without_config_holds_no_model(tmp_path):
    """config.json is written last: a process killed during its first save leaves no checkpoint, not a broken one."""
    with pytest.raises(CheckpointError, match=r"run `python train\.py --out"):
        load_checkpoint(tmp_path)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        import model

        write = model.write_atomically
        patch.setattr(model, "write_atomically", lambda path, f: (written.append(path.name), write(path, f)))
        patch.setattr(model, "write_json", lambda path, content: written.append(path.name))
        save_checkpoint(random_model(), tmp_path)
    assert written == ["model.safetensors", "config.json"]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", "[" * 100_000, '{"n_layer": "three"}', '{"n_layer": true}', '{"n_layer": 2.0}',
        '{"n_embd": 1' + "0" * 30 + "}", '{"activation_function": "swish"}', '{"resid_pdrop": "x"}',
        '{"resid_pdrop": 1}', '{"layer_norm_epsilon": "1e-5"}', '{"layer_norm_epsilon": NaN}', '{"bias": "no"}',
        '{"eos_token_id": [1, 2]}',
    ],
)  # fmt: skip
def test_broken_configurations(tmp_path, content):
    """Some of these were tracebacks, and an epsilon that is a string made every request to the server fail, later."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json is not a model configuration"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["n_layer", "n_embd", "n_positions", "vocab_size"])
def test_sizes_are_compared_with_the_file_first(tmp_path, name):
    """With "n_layer": 1000000000 loading never ended; of others torch said that a storage size overflowed."""
    save_checkpoint(random_model(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: 2**30}))
    with pytest.raises(CheckpointError, match=r"does not match config\.json"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("option", "value"), [("scale_attn_by_inverse_layer_idx", True), ("model_type", "llama"), ("n_inner", 48)]
)
def test_options_that_we_do_not_compute_are_refused(tmp_path, option, value):
    save_checkpoint(random_model(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {option: value}))
    with pytest.raises(CheckpointError, match=f"{option} is {value!r}, this code computes only"):
        load_config(tmp_path)


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


def load_file_from(content: bytes, folder) -> dict[str, torch.Tensor]:
    (folder / "whole.safetensors").write_bytes(content)
    return load_file(folder / "whole.safetensors")
