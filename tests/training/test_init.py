"""
train.py --init: a model of each family is trained further by the same forward that serves it, and
opens as that family in transformers again.
"""

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from runs import MACHINE, TINY, read_log, same, stop_after
from test_crashes import Disk, lay_out

import checkpoint
import train
from checkpoint import CheckpointError, hub_parts, load_checkpoint
from families import FAMILIES, family_named
from tokenizer import load_tokenizer
from training import machine
from training.corpus import bpe_tokenizer, write_corpus
from training.fast import training_ops

VOCABULARY = 320  # rows of the models; the corpus has 300 tokens
RECIPE = """--context_length=32 --batch_size=4 --warmup=2 --dtype=float32 --device=cpu --eval_every=5
    --eval_tokens=64 --vector_lr=0.01"""
CHAT = "{{ messages[0].content }}"


def make(family: str, folder: Path, corpus: Path, dtype=torch.float32, **changes):
    """A directory as the hub has them: the family's tiny model beside the corpus' tokenizer."""
    ends = {"eos_token_id": 299, "bos_token_id": 299}
    hf_model = tiny_models.make(family, vocab_size=VOCABULARY, **ends, **changes)
    hf_model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(corpus / name, folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    (folder / "README.md").write_text("no companion")


def flags_of(base: Path, corpus: Path, out: Path, *more: str) -> list[str]:
    return [*RECIPE.split(), f"--init={base}", f"--data={corpus}", f"--out={out}", *more]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_model_opens_as_its_family_again(family, corpus, out, tmp_path):
    """Not as a Llama, nor without Gemma's offset of norms or the head that it had."""
    base = tmp_path / "base"
    make(family, base, corpus)
    train.main(flags_of(base, corpus, out, "--steps=3"))
    open_saved = transformers.AutoModelForCausalLM.from_pretrained
    hf_model, info = open_saved(out, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values())
    before = open_saved(base)
    assert type(hf_model) is type(before)
    fields = before.config.to_dict()
    assert hf_model.config.to_dict() == fields
    moved = [not torch.equal(a, b) for a, b in zip(hf_model.parameters(), before.parameters())]
    assert all(moved)
    tokens = torch.randint(1, 300, (2, 50))
    ours = load_checkpoint(out)
    with torch.no_grad():
        logits, _ = ours(tokens)
        expected = hf_model.eval()(tokens).logits
    assert (logits - expected).abs().max() < 1e-4
