"""examples/from_nanochat.py: a converted nanochat checkpoint gives the same answers here."""

import json
import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("tiktoken")
pytest.importorskip("transformers")

import tiktoken
import transformers
from judging import TOLERANCE, dense, distance, log_probabilities
from test_from_nanogpt import Evil
from tiny_models import make, text
from tokenizer_kinds import random_texts

from checkpoint import load_checkpoint
from examples import from_nanochat
from tokenizer import load_tokenizer

NAMES = "bos user_start user_end assistant_start assistant_end python_start python_end"
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s+"
)
RANKS = [bytes([i]) for i in reversed(range(256))]
RANKS += [b"th", b"he", b"the", b" the", "語".encode()[:2], "語".encode()]
V = len(RANKS) + len(NAMES.split())
ENCODING = tiktoken.Encoding(
    "rustbpe",
    pat_str=PATTERN,
    mergeable_ranks={token: i for i, token in enumerate(RANKS)},
    special_tokens={f"<|{name}|>": len(RANKS) + i for i, name in enumerate(NAMES.split())},
)
CHANGES = {"vocab_size": V, "intermediate_size": 256, "final_logit_softcapping": 15.0}
CHANGES |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
OURS = {"model.embed_tokens": "transformer.wte", "model.layers": "transformer.h"}
OURS |= {"self_attn.o_proj": "attn.c_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
OURS |= {f"self_attn.{x}_proj": f"attn.c_{x}" for x in "qkv"}


def write(folder: Path, encoding=ENCODING, **more):
    """Write files like nanochat's save_checkpoint, and return transformers' model of them."""
    hf_model = make("nanochat", **CHANGES)
    saved = {}
    for name, weight in hf_model.state_dict().items():
        for theirs, name_there in OURS.items():
            name = name.replace(theirs, name_there)
        if len(weight) == V:  # nanochat pads its vocabulary
            weight = torch.cat([weight, torch.ones(-V % 64, 64)])
        saved["_orig_mod." + name] = weight
    sizes = {"sequence_len": 256, "vocab_size": V, "n_layer": 3, "n_head": 4, "n_kv_head": 2}
    place = folder / "sft_checkpoints" / "d3"
    place.mkdir(parents=True)
    torch.save(saved | more, place / "model_000007.pt")
    (place / "meta_000007.json").write_text(json.dumps({"model_config": sizes | {"n_embd": 64}}))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    return hf_model


def convert(folder: Path):
    checkpoint = folder / "sft_checkpoints" / "d3" / "model_000007.pt"
    from_nanochat.main(str(checkpoint), str(folder / "dir"))


def test_a_checkpoint_says_the_same(tmp_path):
    hf_model = write(tmp_path)
    convert(tmp_path)
    ours = load_checkpoint(tmp_path / "dir")
    tokens = text(1, 40)
    assert distance(dense(ours, tokens), log_probabilities(hf_model, tokens)) <= TOLERANCE
    tokenizer = load_tokenizer(tmp_path / "dir")
    for sample in random_texts(300, seed=0):
        assert tokenizer.encode(sample) == ENCODING.encode_ordinary(sample)
    ends = [tokenizer.control[name] for name in ("<|assistant_end|>", "<|bos|>")]
    assert [*ours.config.eos_token_ids] == ends
    assert tokenizer.bos == ends[1:]
    chat = transformers.AutoTokenizer.from_pretrained(tmp_path / "dir")
    said = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Yes"), ("user", "So?")]
    messages = [{"role": role, "content": content} for role, content in said]
    expected = "<|bos|><|user_start|>Be kind.\n\nHi<|user_end|><|assistant_start|>Yes"
    expected += "<|assistant_end|><|user_start|>So?<|user_end|><|assistant_start|>"
    assert (
        chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == expected
    )


def test_what_is_not_converted(tmp_path, monkeypatch):
    """
    A newer model is refused with the names of its extra weights, and so is a pickle that would run
    code.
    """
    monkeypatch.chdir(tmp_path)
    newer = {"resid_lambdas": torch.ones(3), "value_embeds.1.weight": torch.ones(2, 2)}
    write(tmp_path / "newer", **newer)
    with pytest.raises(SystemExit, match=r"it has resid_lambdas, value_embeds: .* 2c4473d"):
        convert(tmp_path / "newer")
    write(tmp_path / "evil", Evil())
    with pytest.raises(SystemExit, match=r"it names .*open, which could run any code"):
        convert(tmp_path / "evil")
    assert not Path("evil", "dir").exists()
