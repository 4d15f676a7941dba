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


HUB = ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2_1B"]
# what train.py writes, what is pasted into a shell, what has no owner
OTHERS = ["out/stdlib", "gpt2", "/none/gpt2", "../gpt2", "a/b/c", "a b/c", "a/$(b)", "-a/b", "a/é"]


@pytest.mark.parametrize("name", HUB + OTHERS)
def test_a_missing_model_gets_the_commands_that_make_one(name, tmp_path, monkeypatch):
    """
    vLLM fetches a model of the hub; here `--model Qwen/Qwen3-0.6B` was advised to train it. A
    directory with some of the files gets neither: it would be trained over.
    """
    monkeypatch.chdir(tmp_path)
    message = common.missing_file(Path(name) / "config.json")
    last = Path(name).name
    if name in HUB:
        assert f"`hf download {name} --local-dir {last}`" in message
        assert message.endswith(f"`python serve.py --model {last}`")
    else:
        assert message.startswith(f"no model in {name}: config.json is missing. `make run` trains")
        assert f"`python train.py --out {name}`" in message and "--model DIR" in message
    (tmp_path / "pytorch_model.bin").touch()
    message = common.missing_file(tmp_path / "model.safetensors")
    assert "model.safetensors is missing" in message and "there is pytorch_model.bin" in message
    assert "save_pretrained(NEW)" in message and "train.py" not in message
    empty = Path("owner/name")
    empty.mkdir(parents=True)
    assert common.missing_file(empty / "config.json").startswith("no model in owner/name: config")
