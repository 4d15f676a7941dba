"""examples/from_nanogpt.py: a converted nanoGPT checkpoint gives the same answers here."""

import pickle
from pathlib import Path

import pytest
import torch
from test_checkpoint import random_model

from checkpoint import load_checkpoint
from examples import from_nanogpt
from model import GPT
from tokenizer import load_tokenizer
from training.corpus import bpe_tokenizer

CHARACTERS = "\n !abcdefghijklmnopqrstuvwxyz"
LETTERS = {"itos": dict(enumerate(CHARACTERS))}
V, T = len(CHARACTERS), 24
NAMES = """wte wpe h.0.ln_1 h.0.attn.c_attn h.0.attn.c_proj h.0.ln_2 h.0.mlp.c_fc h.0.mlp.c_proj
    ln_f lm_head"""


def write(folder: Path, prefix="", bias=True, meta=LETTERS, V=V, **more) -> GPT:
    """Write a ckpt.pt like nanoGPT's train.py, and return its model, which has the exact GELU."""
    sizes = {"vocab_size": V, "n_layer": 1, "n_head": 4, "n_embd": 32, "bias": bias}
    model = random_model(context_length=T, activation="gelu", **sizes)
    saved = {prefix + "transformer.h.0.attn.bias": torch.ones(1, 1, T, T).tril()}  # a causal mask
    for name, weight in model.state_dict().items():
        assert name.rpartition(".")[0] in NAMES.split()
        part = "" if name == "lm_head.weight" else "transformer."
        saved[prefix + part + name] = weight
    whole = {"model": saved, "model_args": sizes | {"block_size": T, "dropout": 0.2}}
    torch.save(whole | more, folder / "pt")
    if meta:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return model


def convert(folder: Path):
    from_nanogpt.main(str(folder / "pt"), str(folder / "dir"))


@pytest.mark.parametrize(("prefix", "bias"), [("", True), ("_orig_mod.", False)])
def test_a_checkpoint_says_the_same(tmp_path, capsys, prefix, bias):
    model = write(tmp_path, prefix, bias)
    convert(tmp_path)
    assert capsys.readouterr().out == f"python serve.py --model {tmp_path / 'dir'}\n"
    tokens = torch.arange(T)[None] % V
    ours = load_checkpoint(tmp_path / "dir")
    with torch.no_grad():
        logits, _ = ours(tokens)
        expected, _ = model(tokens)
    assert (logits - expected).abs().max() < 1e-4
    assert load_tokenizer(tmp_path / "dir").encode("hi!") == [*map(CHARACTERS.index, "hi!")]
    with pytest.raises(SystemExit, match="dir exists: name a new directory"):
        convert(tmp_path)


def test_more_rows_than_tokens(tmp_path):
    """GPT-2's 50257 tokens have 50304 rows. Its tokenizer is beside the checkpoint."""
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
    ({"meta": {"itos": LETTERS["itos"] | {3: "ab"}}}, "single characters in sorted order"),
    ({"meta": {"itos": dict(enumerate(CHARACTERS + "~"))}}, "has 30 tokens, but the model 29"),
    ({"meta": None}, "tokenizer.json is missing"),
    ({"model": {}}, "Missing key"),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN)
def test_a_file_that_cannot_be_converted(tmp_path, monkeypatch, changes, words):
    """None of its code is run, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **changes)
    with pytest.raises(SystemExit, match=words):
        convert(tmp_path)
    assert not Path("evil").exists()
    assert not Path("dir").exists()


def test_a_file_that_is_no_checkpoint(tmp_path):
    """Previously the message was torch's, about mmap."""
    (tmp_path / "pt").write_text("# nanoGPT")
    with pytest.raises(SystemExit, match=r"pt is not a checkpoint of torch\.save: name nanoGPT's"):
        convert(tmp_path)


def test_a_wrong_number_of_arguments_gets_a_message():
    """Previously it got a traceback."""
    for paths in ([], ["ckpt.pt"], ["ckpt.pt", "dir", "more"]):
        with pytest.raises(SystemExit, match=f"^{len(paths)} arguments, wanted 2: nanoGPT's"):
            from_nanogpt.main(*paths)
