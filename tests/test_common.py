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


def test_a_file_is_for_those_who_may_read_a_new_one(tmp_path):
    """A model was its trainer's alone: safetensors makes files that nobody else may read."""
    new = tmp_path / "new"
    new.touch()
    path = tmp_path / "file"
    common.write_atomically(path, lambda temporary: temporary.touch() or temporary.chmod(0o600))
    assert path.stat().st_mode == new.stat().st_mode


def test_a_missing_model_gets_the_commands_that_make_one():
    """vLLM fetches a model of the hub; here `--model Qwen/Qwen3-0.6B` was advised to train it."""
    message = common.missing_file(Path("Qwen/Qwen3-0.6B/config.json"))
    assert message.startswith("no model in Qwen/Qwen3-0.6B: config.json is missing. ")
    for way in "`make run`", "`hf download OWNER/NAME --local-dir DIR`", "save_pretrained(NEW)":
        assert way in message


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
@pytest.mark.parametrize("limit, available", [(2**29, "512 MiB (ulimit -v)"), (-1, "this machine")])
def test_a_start_without_memory_has_words(error, limit, available, monkeypatch):
    """Under `ulimit -v 600000` they were "MemoryError: "."""
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit, limit))
    words = common.last_words(error)
    for part in ("wanted are", available, "raise the limit", str(error)):
        assert part in words


def test_the_last_words_about_a_bug_name_its_kind():
    assert common.last_words(KeyError("x")) == "KeyError: 'x'"
