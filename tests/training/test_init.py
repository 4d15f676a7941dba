"""
train.py --init: a model of each family is trained further by the same forward that serves it, and
opens as that family in transformers again.
"""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from runs import MACHINE, read_log, same, stop_after

import train
from checkpoint import load_checkpoint
from common import read_json, write_json
from training import machine
from training.corpus import batch_rows, char_tokenizer, load_corpus, read_corpus

VOCABULARY = 320  # rows of the models; the corpus has 300 tokens
RECIPE = """--context_length=32 --batch_size=4 --warmup=2 --dtype=float32 --device=cpu
    --eval_every=5 --eval_tokens=64 --vector_lr=0.01"""
COMPANIONS = {"chat_template.jinja": "{{ messages[0].content }}", "merges.txt": "#version"}
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
COMPANIONS |= {TOOL_TEMPLATE: "{{ tools }}"}


def make(family: str, folder: Path, corpus: Path, dtype=torch.float32, **changes):
    """A directory as the hub has them: the family's tiny model beside the corpus' tokenizer."""
    ends = {"eos_token_id": 299, "bos_token_id": 299}
    hf_model = tiny_models.make(family, vocab_size=VOCABULARY, **ends, **changes)
    hf_model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(corpus / name, folder)
    for name, text in COMPANIONS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def argv(base: Path, corpus: Path, out: Path, flags="--steps=1") -> list[str]:
    places = f" --init={base} --data={corpus} --out={out} "
    return (RECIPE + places + flags).split()


def finetune(*run):
    train.main(argv(*run))


KINDS = [(family, "bfloat16") for family in tiny_models.FAMILIES]
KINDS += [("llama", "float32"), ("gemma3", "float16")]
open_saved = partial(transformers.AutoModelForCausalLM.from_pretrained, attn_implementation="eager")


@pytest.mark.parametrize(("family", "dtype"), KINDS)
@pytest.mark.quick("gpt2-bfloat16", "llama-float32", "gemma3-bfloat16")
def test_a_model_opens_as_its_family_again(family, dtype, corpus, out, tmp_path):
    """
    Not as a Llama, nor without Gemma's offset of norms or the head that it had. Its first loss is
    transformers': GPT-2's config.json has dropout.
    """
    base = tmp_path / "base"
    make(family, base, corpus, getattr(torch, dtype))
    finetune(base, corpus, out, "--steps=3")
    hf_model, info = open_saved(out, output_loading_info=True)
    assert not any(info.values())
    before = open_saved(base, dtype=torch.float32)
    tokens = read_corpus(corpus, "train")
    rows = torch.tensor(batch_rows(tokens, B=4, T=32, seed=1337, step=0))
    expected = before(rows, labels=rows).loss.item()
    first, *_ = read_log(out)
    assert first["loss"] == pytest.approx(expected, abs=1e-4)
    for old, new in zip(before.parameters(), hf_model.parameters(), strict=True):
        assert new.dtype == torch.float32  # as it is trained
        assert 0 < (old - new).abs().max() < 0.1  # three steps of 0.01
    saved = read_json(base / "config.json") | {"dtype": "float32"}
    assert read_json(out / "config.json") == saved


# --------------------------------------------------------------------------------------------------
# What is left behind, and resumed


@pytest.fixture
def base(corpus, tmp_path) -> Path:
    """A small model with a window in one layer of two, and its own head."""
    folder = tmp_path / "base"
    make("qwen3-windows", folder, corpus, **tiny_models.two_layers("qwen3-windows", 9))
    return folder


def test_a_resumed_run_does_without_the_model_it_began_from(
    base, corpus, out, tmp_path, monkeypatch
):
    """To the losses and weights of a run that was not stopped, dropout included."""
    whole = tmp_path / "whole"
    flags = "--steps=6 --dropout=0.1 --eval_every=100"
    finetune(base, corpus, whole, flags)
    calm = tmp_path / "calm"
    finetune(base, corpus, calm)
    assert read_log(calm)[0] != read_log(whole)[0]
    stop_after(monkeypatch, [2, 4])
    finetune(base, corpus, out, flags)
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", *COMPANIONS]
    companions = {name: (base / name).read_bytes() for name in names}
    shutil.rmtree(base)
    moved = out.rename(tmp_path / "moved")
    for _ in range(2):
        train.main(["--resume", f"--out={moved}"])
    assert read_log(moved) == read_log(whole)
    ours, theirs = (load_checkpoint(folder).state_dict() for folder in (moved, whole))
    assert same(ours, theirs)
    for name in names:
        assert (moved / name).read_bytes() == companions[name]


def test_a_model_from_scratch_keeps_nothing_of_the_one_that_it_overwrites(base, tiny, corpus, out):
    """
    A generation_config.json of a larger vocabulary made it unreadable. But any *token*.json was
    deleted, the user's, too. What was overwritten said what its weights are: with the tied head
    that the base's config.json speaks of vLLM would have left out the model's own.
    """
    config = read_json(base / "config.json")
    old = config | {"tie_word_embeddings": True, "torch_dtype": "float16"}
    write_json(base / "config.json", old)
    finetune(base, corpus, out)
    assert read_json(out / "config.json") == config
    write_json(out / "generation_config.json", {"eos_token_id": 310})
    (out / "my_tokens.json").touch()
    train.main([*tiny, "--steps=1", "--overwrite"])
    assert load_checkpoint(out).config.eos_token_ids == (299,)
    assert not any((out / name).exists() for name in COMPANIONS)
    assert (out / "my_tokens.json").exists()


# --------------------------------------------------------------------------------------------------
# Models that cannot be trained


def test_a_corpus_of_other_tokens_is_refused(base, corpus, out):
    """
    Of images, for which the model has no rows; or of another tokenizer with as many tokens. One
    that is read and not predicted is ~token in a corpus.
    """
    loaded = load_corpus(str(corpus), MACHINE)
    args = train.parse_args(argv(base, corpus, out))
    refused = pytest.raises(ValueError, match=f"other tokens than .* --init {base} --out data/NAME")
    for split in "train", "val":
        for token in 320, ~320, 319, ~319:
            setattr(loaded, split, np.array([1, token] * 200, np.int32))
            with refused if token in (320, ~320) else nullcontext():
                machine.load_to_train(args, loaded, MACHINE)
    loaded.tokenizer = char_tokenizer("".join(map(chr, range(300, 600))))
    with refused:
        machine.load_to_train(args, loaded, MACHINE)


def test_a_model_too_large_to_train_is_refused_before_it_is_loaded(
    base, corpus, out, monkeypatch, capsys
):
    """
    16 bytes a weight and process, of which a machine's memory holds all and a GPU's one; 20 where
    gradients are also a message to other processes.
    """
    count = sum(p.numel() for p in load_checkpoint(base).parameters())
    free = 16 * count
    monkeypatch.setattr(machine, "memory_of", lambda device: (free, 2**60))
    finetune(base, corpus, out)
    needed = f"{count / 1e6:.2f}M weights take {free / 2**30:.2f} GiB to train, 16 bytes each"
    assert f"memory: {needed}" in capsys.readouterr().out
    free = 0  # to resume, what was saved is in memory before this is asked
    train.main(["--resume", f"--out={out}"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    loaded = load_corpus(str(corpus), MACHINE)
    args = train.parse_args(argv(base, corpus, out))
    gpu = replace(MACHINE, device=torch.device("cuda"))
    for process, each in ((MACHINE, 2 * 16), (gpu, 16), (replace(gpu, world=2), 20)):
        free = each * count
        machine.load_to_train(args, loaded, process)
        free -= 1
        with pytest.raises(ValueError, match=r"GiB to train, .* GiB free: close other"):
            machine.load_to_train(args, loaded, process)


def test_a_part_of_a_larger_model_and_a_broken_tokenizer_are_refused(base, corpus, out):
    """
    Saved under its whole's configuration nothing would find the part's weights. The tokenizer was
    reported as config.json.
    """
    config = read_json(base / "config.json")
    write_json(base / "config.json", {"model_type": "larger", "text_config": config})
    with pytest.raises(SystemExit, match=r"has a text_config, .* save only the text model"):
        finetune(base, corpus, out)
    write_json(base / "config.json", config)
    message = r"tokenizer\.json is not a tokenizer .* or its tokenizer_config.json .*: restore it"
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (base / name).write_text("{")
        with pytest.raises(SystemExit, match=message):
            finetune(base, corpus, out)
