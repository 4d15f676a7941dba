"""
examples/from_nanogpt.py: a checkpoint of nanoGPT's says the same here, and in transformers.
"""

import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from checkpoint import load_checkpoint
from examples import from_nanogpt
from tokenizer import load_tokenizer
from training.corpus import bpe_tokenizer

transformers = pytest.importorskip("transformers")
CHARACTERS = "\n !abcdefghijklmnopqrstuvwxyz"
LETTERS = {"itos": dict(enumerate(CHARACTERS))}
V, C, L, T = len(CHARACTERS), 32, 2, 24


def write(folder: Path, prefix="", bias=True, meta=LETTERS, V=V, **more) -> dict:
    """A ckpt.pt as nanoGPT's train.py writes it, made by hand; the weights in it."""
    torch.manual_seed(0)
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,)}
    for i in range(L):
        block = {"ln_1": (C,), "ln_2": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
        block |= {"mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
        shapes |= {f"h.{i}.{name}.weight": shape for name, shape in block.items()}
    if bias:
        layers = [name for name in shapes if not name.startswith("w")]
        shapes |= {name.replace("weight", "bias"): shapes[name][:1] for name in layers}
    weights = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    saved = {f"{prefix}transformer.{name}": weight for name, weight in weights.items()}
    saved[prefix + "lm_head.weight"] = weights["wte.weight"]
    saved[prefix + "transformer.h.0.attn.bias"] = torch.ones(1, 1, T, T).tril()  # a causal mask
    args = {"n_layer": L, "n_head": 4, "n_embd": C, "block_size": T, "bias": bias}
    args |= {"vocab_size": V, "dropout": 0.2}
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3}]}
    torch.save({"model": saved, "model_args": args, "optimizer": optimizer} | more, folder / "pt")
    if meta:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return weights


def nanogpt_logits(w: dict, tokens: torch.Tensor) -> torch.Tensor:
    """nanoGPT's forward pass, by its formulas: exact GELU, pre-norms, a tied head."""

    def layer(x, name):
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    def norm(x, name):
        return F.layer_norm(x, (C,), w[name + ".weight"], w.get(name + ".bias"), 1e-5)

    x = w["wte.weight"][tokens] + w["wpe.weight"][:T]
    for i in range(L):
        q, k, v = layer(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(C, 2)
        q, k, v = (y.view(1, T, 4, C // 4).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + layer(y.reshape(1, T, C), f"h.{i}.attn.c_proj")
        y = F.gelu(layer(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
        x = x + layer(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def convert(folder: Path):
    from_nanogpt.main([str(folder / "pt"), str(folder / "dir")])


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_says_the_same(tmp_path, capsys, prefix, bias):
    weights = write(tmp_path, prefix, bias)
    convert(tmp_path)
    assert capsys.readouterr().out == f"python serve.py --model {tmp_path / 'dir'}\n"
    tokens = torch.arange(T)[None] % V
    expected = nanogpt_logits(weights, tokens)
    ours = load_checkpoint(tmp_path / "dir")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "dir").eval()
    with torch.no_grad():
        assert (ours(tokens)[0] - expected).abs().max() < 1e-4
        assert (theirs(tokens).logits - expected).abs().max() < 1e-4
    assert load_tokenizer(tmp_path / "dir").encode("hi!") == [*map(CHARACTERS.index, "hi!")]
    with pytest.raises(SystemExit, match="dir exists: name a new directory"):
        convert(tmp_path)


def test_more_rows_than_tokens(tmp_path):
    """GPT-2's 50257 tokens have 50304 rows; its tokenizer lies beside the checkpoint."""
    bpe_tokenizer([]).save(tmp_path)
    write(tmp_path, meta=None, V=320)
    convert(tmp_path)
    config = load_checkpoint(tmp_path / "dir").config
    assert (config.vocab_size, config.eos_token_ids) == (320, (256,))


class Evil:
    def __reduce__(self):
        return open, ("evil", "w")


BROKEN = [
    ({"config": Evil()}, "Weights only load failed"),
    ({"meta": {"itos": Evil()}}, "it names .*open, which could run any code"),
    ({"meta": {"itos": LETTERS["itos"] | {3: "ab"}}}, "other than single characters"),
    ({"meta": {"itos": dict(enumerate(CHARACTERS + "~"))}}, "has 30 tokens, the model 29"),
    ({"meta": None}, "tokenizer.json is missing"),
    ({"model": {}}, "Missing key"),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN)
def test_a_file_that_cannot_be_converted(tmp_path, monkeypatch, changes, words):
    """No code in it is run, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **changes)
    with pytest.raises(SystemExit, match=words):
        convert(tmp_path)
    assert not Path("evil").exists() and not Path("dir").exists()
