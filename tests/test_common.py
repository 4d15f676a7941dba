"""
common.py: whenever a process or a machine stops, a reader finds either the old file or the new one.
And the message for a directory without a model.
"""

import io
import os
import runpy
import sys
from pathlib import Path

import pytest

import common


def test_a_file_is_old_or_new(tmp_path, monkeypatch):
    """
    It must be on the disk before it gets its name, or a machine that stops would leave an empty
    file. The usual users may read it, although safetensors makes files that only their owner may
    read.
    """
    calls = []
    for name in ("fsync", "replace"):
        do = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, do=do: calls.append(do.__name__) or do(*args))
    path = tmp_path / "file"
    path.write_text("old")
    mode = path.stat().st_mode

    def interrupted(temporary: Path):
        temporary.write_text("half")
        raise KeyboardInterrupt

    def write(temporary: Path):
        temporary.write_text("new")
        temporary.chmod(0o600)

    with pytest.raises(KeyboardInterrupt):
        common.write_atomically(path, interrupted)
    assert (path.read_text(), calls) == ("old", [])
    common.write_atomically(path, write)
    assert (path.read_text(), calls) == ("new", ["fsync", "replace"])
    assert path.stat().st_mode == mode
    assert list(tmp_path.iterdir()) == [path]


# files that are there; then what was named -> the message's first clause -> the next step
MODELS = "out/a/config.json out/b/config.json mine/config.json empty/notes.txt "
MODELS += "weights/x-q4.gguf lora/adapter_config.json lora/tokenizer.json old/ckpt.pt out/a/m.safe"
NAMED = """
out/txet -> there is no directory out/txet; models here: out/a, out/b; -> `make run`
txet -> there is no directory txet; models here: out/a, out/b; -> hf download
/nowhere/x -> there is no directory /nowhere/x; models here: out/a, out/b;
Qwen/Qwen3-0.6B -> the Hugging Face Hub may have Qwen/Qwen3-0.6B, -> `hf download Qwen/Qwen3-0.6B --local-dir DIR`
https://huggingface.co/Qwen/Qwen3-0.6B -> the Hugging Face Hub may have Qwen/Qwen3-0.6B, -> `hf download Qwen/Qwen3-0.6B --local
x.gguf -> GGUF files are for llama.cpp: `llama-server -m x.gguf` -> `hf download OWNER/NAME --local-dir DIR`
weights -> GGUF files are for llama.cpp: -> `hf download OWNER/NAME --local-dir DIR`
weights/x-q4.gguf -> GGUF files are for llama.cpp: `llama-server -m weights/x-q4.gguf` -> serves them
lora -> lora has an adapter without its model: -> merge_and_unload
out/a/m.safe -> out/a/m.safe is a file, -> name out/a,
old/ckpt.pt -> old/ckpt.pt is a file, -> `python examples/from_nanogpt.py old/ckpt.pt DIR`
empty -> no model in empty: config.json is missing. -> save_pretrained(NEW)
"""  # noqa: E501


@pytest.mark.parametrize("row", NAMED.strip().splitlines())
def test_what_is_no_model_is_named_with_the_next_step(row, tmp_path, monkeypatch):
    """
    Previously all got the same long line, and `--model Qwen/Qwen3-0.6B`, which vLLM would download,
    was just "missing".
    """
    for name in MODELS.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    named, clause, *step = row.split(" -> ")
    message = common.missing_file(Path(named, "config.json"))
    assert message.startswith(clause)
    assert step == [part for part in step if part in message]


def test_a_fresh_clone_has_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = common.missing_file(Path("out/stdlib/tokenizer.json"))
    assert message.startswith("there is no directory out/stdlib; models here: none; `make run`")


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "Cannot allocate memory")])
@pytest.mark.parametrize("limit, available", [(2**29, "512 MiB (ulimit -v)"), (-1, "this machine")])
def test_a_start_without_memory_has_words(error, limit, available, monkeypatch):
    """Previously, under `ulimit -v 600000`, the message was only "MemoryError: "."""
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit, limit))
    words = common.last_words(error)
    for part in ("wanted about", available, "Raise the limit", str(error)):
        assert part in words


def test_the_last_words_about_a_bug_name_its_kind():
    assert common.last_words(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize("file", ["train", "serve", "bench", "walkthrough", "exercises"])
def test_an_old_python_is_named(file, monkeypatch):
    """Python 3.10 was told to install orjson, or that it has no tomllib."""
    monkeypatch.setattr(sys, "version_info", (3, 10))
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.delitem(sys.modules, "common")
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or later, but .*\.venv/bin/python"):
        runpy.run_path(f"{file}.py")


def test_standard_output_shows_what_it_can(monkeypatch):
    """
    Previously, if it could not show --served-model-name, the server's greeting ended the link to
    the engine, and then the server: "the engine stopped unexpectedly". Other programs ended in a
    UnicodeEncodeError.
    """
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="ascii"))
    monkeypatch.setattr(sys, "excepthook", None)  # end_with_one_line sets it
    common.end_with_one_line()
    print("serving \u20ac", flush=True)
    assert data.getvalue() == b"serving ?\n"
