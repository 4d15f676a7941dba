"""
The default corpus: the standard library of the Python that runs this program. Nothing is
downloaded. `python train.py` creates the corpus if it is missing. The files are

    train.bin, val.bin, meta.json and a byte-level BPE, learnt from the training files

With `--data stdlib_gpt2`, as in `--preset gpt2-124M`, it uses GPT-2's tokens.
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    sys.exit("train.py creates this corpus: python train.py")

from tokenizer import Tokenizer
from training.corpus import write_corpus

# Folders to leave out: third-party packages, tests with their data, and tables.
LEFT_OUT = [
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
]
GENERATED = ("_sysconfigdata", "config-")  # also leave out names that begin with these
HELD_OUT = 1 / 20  # fraction of the files


def is_held_out(name: str) -> bool:
    """
    Return whether a file is held out. This depends on a hash of its name, so it is the same on
    every machine and in every version of Python.
    """
    digest = hashlib.sha256(name.encode()).hexdigest()
    return int(digest[:8], 16) < HELD_OUT * 16**8


def read_library(root: Path) -> tuple[list[str], list[str]]:
    """Return the texts to train on and those to hold out, both sorted by file name."""
    train = []
    val = []
    files = filter(Path.is_file, root.rglob("*.py"))  # a link may point to nothing
    for name in sorted(path.relative_to(root) for path in files):
        if any(part in LEFT_OUT or part.startswith(GENERATED) for part in name.parts):
            continue
        side = val if is_held_out(name.as_posix()) else train
        side.append((root / name).read_bytes().decode("utf-8", "replace"))
    return train, val


def prepare(folder: Path, tokenizer: Tokenizer | None = None):
    """
    Write the corpus to a folder. Unless a tokenizer is given, one is learnt from the training
    files.
    """
    train, val = read_library(Path(sysconfig.get_path("stdlib")))
    write_corpus(folder, train, val, tokenizer)
