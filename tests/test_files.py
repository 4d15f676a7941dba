"""files.py: whenever a process or a machine stops, a reader finds the old file or the new one."""

import os

import pytest

import files


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
