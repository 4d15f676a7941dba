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


def test_a_missing_model_gets_the_commands_that_make_one():
    """One message: train, download, or have transformers write the files."""
    message = common.missing_file(Path("a/b/config.json"))
    assert message.startswith("no model in a/b: config.json is missing")
    for command in ("make run", "python train.py --out a/b", "hf download", "save_pretrained"):
        assert command in message
