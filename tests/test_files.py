"""
files.py: whenever a process or a machine stops, a reader finds the old file or the new one; and who
opens a directory that is not there is told how it can be had.
"""

import os
from pathlib import Path

import pytest

import files
import serve
from checkpoint import load_checkpoint
from serving.encoder import Encoder


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Or a machine that stops leaves an empty file where there was a whole one."""
    happened = []
    for name in ("fsync", "replace"):
        do = getattr(os, name)
        monkeypatch.setattr(
            files.os, name, lambda *args, name=name, do=do: happened.append(name) or do(*args)
        )
    path = tmp_path / "file"
    files.write_atomically(
        path, lambda temporary: happened.append(temporary.name) or temporary.write_text("new")
    )
    assert happened == ["file.tmp", "fsync", "replace"]
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]
    with pytest.raises(ZeroDivisionError):
        files.write_atomically(path, lambda temporary: temporary.write_text("half") / 0)
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def half(temporary):
        temporary.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(path, half)
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]
    files.write_atomically(path, lambda temporary: temporary.write_text("new"))
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("name", "is_named"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("./meta-llama/Llama-3.2_1B/", True),
        ("out/stdlib", False),  # where train.py writes
        ("gpt2", False),
        ("/models/gpt2", False),
        ("../models/gpt2", False),
        ("models/a/b", False),
        ("a b/c", False),
        ("a/$(b)", False),  # it is to be pasted into a shell
        ("-a/b", False),
        ("a/-b", False),
        ("a/é", False),
    ],
)
def test_names_of_the_hub_are_told_how_to_download(name, is_named, tmp_path, monkeypatch):
    """vLLM fetches such a model; here `--model Qwen/Qwen3-0.6B` was told to train it."""
    monkeypatch.chdir(tmp_path)
    told = files.how_to_download(Path(name))
    assert bool(told) == is_named
    if is_named:
        owner, last = Path(name).parts
        assert f"`hf download {owner}/{last} --local-dir {last}`" in told
        assert told.endswith(f"`python serve.py --model {last}`")
        (tmp_path / name).mkdir(parents=True)
        assert files.how_to_download(Path(name)) == ""


def test_whoever_opens_such_a_directory_tells_it(tmp_path, monkeypatch):
    """bench.py, the terminal and the server."""
    monkeypatch.chdir(tmp_path)
    name = "Qwen/Qwen3-0.6B"
    told = files.how_to_download(Path(name))
    for open_directory in (load_checkpoint, Encoder):
        with pytest.raises(ValueError) as raised:
            open_directory(name)
        assert str(raised.value) == told
    for flags in (["--prompt", "x"], ["--chat"]):
        with pytest.raises(SystemExit) as ended:
            serve.main(["--model", name, *flags])
        assert ended.value.code == told
