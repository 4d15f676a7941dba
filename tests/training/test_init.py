"""
train.py --init: a model of each family is trained further by the same forward that serves it, and
opens in transformers as that family again.
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
from runs import MACHINE, after_update, read_log, resume, same, stop_after

import train
from checkpoint import load_checkpoint
from common import read_json, write_json
from training import machine
from training.corpus import batch_rows, char_tokenizer, load_corpus, read_corpus

VOCABULARY = 320  # rows of the models; the corpus has 300 tokens
RECIPE = """--context_length=32 --batch_size=4 --warmup=2 --dtype=float32 --device=cpu
    --eval_every=5 --eval_tokens=64 --vector_lr=0.01 --steps=1"""
COMPANIONS = {"chat_template.jinja": "{{ messages[0].content }}", "merges.txt": "#version"}
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
COMPANIONS |= {TOOL_TEMPLATE: "{{ tools }}"}


def make(family: str, folder: Path, corpus: Path, dtype=torch.float32, **changes):
    """
    Make a directory like those of the hub: the family's tiny model with the corpus' tokenizer.
    """
    ends = {"eos_token_id": 299, "bos_token_id": 299}
    hf_model = tiny_models.make(family, vocab_size=VOCABULARY, **ends, **changes)
    hf_model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(corpus / name, folder)
    for name, text in COMPANIONS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def flags(corpus, out, tmp_path) -> list[str]:
    """Return the flags of a run of one step from the model in tmp_path / "base"."""
    return [*RECIPE.split(), f"--init={tmp_path / 'base'}", f"--data={corpus}", f"--out={out}"]


@pytest.fixture
def finetune(flags):
    """Return a function that trains as `flags` says, with more flags."""
    return lambda *more: train.main([*flags, *more])


KINDS = [(family, "bfloat16") for family in tiny_models.FAMILIES]
KINDS += [("llama", "float32"), ("gemma3", "float16")]
open_saved = partial(transformers.AutoModelForCausalLM.from_pretrained, attn_implementation="eager")


@pytest.mark.parametrize(("family", "dtype"), KINDS)
@pytest.mark.quick("gpt2-bfloat16", "llama-float32", "gemma3-bfloat16")
def test_a_model_opens_as_its_family_again(family, dtype, finetune, corpus, out, tmp_path):
    """
    It must not become a Llama, nor lose Gemma's offset of norms or its separate head. Its first
    loss is transformers', although GPT-2's config.json has dropout.
    """
    base = tmp_path / "base"
    make(family, base, corpus, getattr(torch, dtype))
    finetune("--steps=3")
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
    """Return a small model with a window in one of two layers, and a separate head."""
    folder = tmp_path / "base"
    make("qwen3-windows", folder, corpus, **tiny_models.two_layers("qwen3-windows", 9))
    return folder


def test_a_resumed_run_does_without_the_model_it_began_from(
    base, finetune, out, tmp_path, monkeypatch
):
    """It reaches the losses and weights of a run that was not stopped, including dropout."""
    whole = tmp_path / "whole"
    flags = ["--steps=6", "--dropout=0.1", "--eval_every=100"]
    finetune(*flags, f"--out={whole}")
    calm = tmp_path / "calm"
    finetune(f"--out={calm}")
    assert read_log(calm)[0] != read_log(whole)[0]
    stop_after(monkeypatch, [2, 4])
    finetune(*flags)
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", *COMPANIONS]
    companions = {name: (base / name).read_bytes() for name in names}
    shutil.rmtree(base)
    moved = out.rename(tmp_path / "moved")
    for _ in range(2):
        resume(moved)
    assert read_log(moved) == read_log(whole)
    ours, theirs = (load_checkpoint(folder).state_dict() for folder in (moved, whole))
    assert same(ours, theirs)
    for name in names:
        assert (moved / name).read_bytes() == companions[name]


def test_a_model_from_scratch_keeps_nothing_of_the_one_that_it_overwrites(
    base, finetune, train_tiny, out
):
    """
    Previously the generation_config.json of a larger vocabulary made it unreadable. But then any
    *token*.json was deleted, even the user's. And the overwritten config.json described the new
    weights: since the base had a tied head, vLLM would have ignored the model's own.
    """
    config = read_json(base / "config.json")
    old = config | {"tie_word_embeddings": True, "torch_dtype": "float16"}
    write_json(base / "config.json", old)
    finetune()
    assert read_json(out / "config.json") == config
    write_json(out / "generation_config.json", {"eos_token_id": 310})
    (out / "my_tokens.json").touch()
    train_tiny("--steps=1", "--overwrite")
    assert load_checkpoint(out).config.eos_token_ids == (299,)
    assert not any((out / name).exists() for name in COMPANIONS)
    assert (out / "my_tokens.json").exists()


@pytest.mark.parametrize("way", ["--resume", "torchrun"])
def test_a_finetuning_killed_in_its_first_steps_goes_on(
    way, base, finetune, flags, out, monkeypatch
):
    """
    Previously its folder held a copy of the model, but nothing to resume: --resume failed, and so
    did each restart by torchrun, with "holds a model".
    """

    def kill(run, result):
        if run.step == 3:
            raise MemoryError

    with monkeypatch.context() as patch:
        after_update(patch, kill)
        with pytest.raises(MemoryError):
            finetune("--steps=4")
    assert same(load_checkpoint(base).state_dict(), load_checkpoint(out).state_dict())
    if way == "--resume":
        resume(out)
    else:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        finetune("--steps=4")
    assert [line["step"] for line in read_log(out, "loss")] == [1, 2, 3, 4]


# --------------------------------------------------------------------------------------------------
# Models that cannot be trained


def test_a_corpus_of_other_tokens_is_refused(base, flags):
    """
    It may have tokens of images, for which the model has no rows, or come from another tokenizer
    with as many tokens. A token that is read but not predicted is ~token in a corpus.
    """
    args = train.parse_args(flags)
    loaded = load_corpus(args.data, MACHINE)
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
    base, flags, finetune, out, monkeypatch, capsys
):
    """
    It takes 16 bytes per weight and process. A machine's memory must hold all processes, a GPU's
    one. It takes 20 if gradients are also sent to other processes.
    """
    count = sum(p.numel() for p in load_checkpoint(base).parameters())
    free = 16 * count
    monkeypatch.setattr(machine, "memory_of", lambda device: (free, 2**60))
    finetune()
    needed = f"{count / 1e6:.2f}M weights take {free / 2**30:.2f} GiB to train, 16 bytes each"
    assert f"memory: {needed}" in capsys.readouterr().out
    free = 0  # to resume, what was saved is already in memory when this is checked
    resume(out)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    args = train.parse_args(flags)
    loaded = load_corpus(args.data, MACHINE)
    gpu = replace(MACHINE, device=torch.device("cuda"))
    for process, each in ((MACHINE, 2 * 16), (gpu, 16), (replace(gpu, world=2), 20)):
        free = each * count
        machine.load_to_train(args, loaded, process)
        free -= 1
        with pytest.raises(ValueError, match=r"GiB to train, .* GiB free: close other"):
            machine.load_to_train(args, loaded, process)


def test_a_part_of_a_larger_model_and_a_broken_tokenizer_are_refused(base, finetune):
    """
    Saved under the configuration of the whole model, the part's weights would not be found.
    Previously the tokenizer was reported as config.json.
    """
    config = read_json(base / "config.json")
    write_json(base / "config.json", {"model_type": "larger", "text_config": config})
    with pytest.raises(SystemExit, match=r"has a text_config, .* save only the text model"):
        finetune()
    write_json(base / "config.json", config)
    message = r"tokenizer\.json is not a tokenizer .* or tokenizer_config.json .*: restore it"
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (base / name).write_text("{")
        with pytest.raises(SystemExit, match=message):
            finetune()
