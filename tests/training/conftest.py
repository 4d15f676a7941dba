"""For each test of training: a corpus, the flags of a tiny run, and no lasting side effects."""

import os
import signal
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from runs import PICTURE, ROOT, TINY

import train
from training.corpus import train_bpe, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Return a prepared folder: this repo's own source code in 300 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    tokenizer = train_bpe([text], 300)
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    write_corpus(folder, [ids[:-1001]], [ids[-1001:]], tokenizer)
    return folder


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def tiny(corpus, out) -> list[str]:
    """Return the flags of a run of milliseconds into `out`."""
    return [*TINY, f"--data={corpus}", f"--out={out}"]


@pytest.fixture
def train_tiny(tiny):
    """Return a function that trains as `tiny` says, with more flags."""
    return lambda *flags: train.main([*tiny, *flags])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """
    Hide the GPU, because a run with --device=cpu that is resumed without that flag would use it.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """
    Use one thread, because two processes share the tests, and losses depend on the number of
    threads.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def pictures():
    """Give a test that requests this fixture real pictures."""


@pytest.fixture(autouse=True)
def nothing_slow(request, monkeypatch):
    """
    Skip fsync on the real disk, and matplotlib's drawing: they take half of a short run's time.
    """
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    if "pictures" not in request.fixturenames:
        figure = MagicMock()
        figure.savefig.side_effect = lambda path, **how: Path(path).write_bytes(PICTURE)
        module = MagicMock(Figure=lambda **size: figure)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", module)


@pytest.fixture(autouse=True)
def leave_signals_alone():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
