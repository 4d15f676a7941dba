"""
common.py: whenever a process or a machine stops, a reader finds the old file or the new one; and
the message for a directory without a model.
"""

import os
from pathlib import Path

import pytest

import common


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ZeroDivisionError])
def test_a_file_is_old_or_new(tmp_path, monkeypatch, error):
    """It is on the disk before it has its name, or a machine that stops leaves an empty file."""
    calls = []
    for name in ("fsync", "replace"):
        do = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, do=do: calls.append(do.__name__) or do(*args))
    path = tmp_path / "file"
    path.write_text("old")

    def write(temporary: Path):
        temporary.write_text("half")
        if error:
            raise error
        temporary.write_text("new")

    if error:
        with pytest.raises(error):
            common.write_atomically(path, write)
    else:
        common.write_atomically(path, write)
        assert calls == ["fsync", "replace"]
    assert path.read_text() == ("old" if error else "new")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2_1B"])
def test_a_name_of_the_hub_gets_the_way_to_download_it(name, tmp_path, monkeypatch):
    """vLLM fetches such a model; here `--model Qwen/Qwen3-0.6B` was advised to train it."""
    monkeypatch.chdir(tmp_path)
    last = Path(name).name
    message = common.missing_file(Path(name) / "config.json")
    assert f"`hf download {name} --local-dir {last}`" in message
    assert message.endswith(f"`python serve.py --model {last}`")
    Path(name).mkdir(parents=True)
    assert "hf download" not in common.missing_file(Path(name) / "config.json")


# what is pasted into a shell, what train.py writes, what has no owner
NO_NAMES = ["out/stdlib", "gpt2", "/models/gpt2", "../gpt2", "a/b/c", "a b/c", "a/$(b)", "-a/b"]


@pytest.mark.parametrize("name", [*NO_NAMES, "a/-b", "a/é"])
def test_any_other_name_gets_the_way_to_train_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = common.missing_file(Path(name) / "config.json")
    assert message.startswith(f"no model in {name}: config.json is missing")
    assert message.endswith(f"or run `python train.py --out {name}`")


def test_a_download_is_not_advised_to_be_trained_over(tmp_path):
    """The message names the files that are there, and the way to rewrite them."""
    (tmp_path / "pytorch_model.bin").touch()
    message = common.missing_file(tmp_path / "model.safetensors")
    assert "model.safetensors is missing" in message and "there is pytorch_model.bin" in message
    assert "save_pretrained(NEW)" in message and message.endswith("train.py --out NEW`")
