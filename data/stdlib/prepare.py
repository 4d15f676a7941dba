"""
The default corpus: the standard library of the Python that runs this. Nothing is downloaded.
`python train.py` makes the corpus if it is missing:

    train.bin, val.bin, meta.json and a byte-level BPE, learnt from the training files

With `--data stdlib_gpt2`, as in `--preset gpt2-124M`, the tokens are GPT-2's.
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    sys.exit("train.py makes this corpus: python train.py")

from tokenizer import Tokenizer
from training.corpus import write_corpus

# Folders that are left out: third-party packages, tests with their data, tables.
LEFT_OUT = [
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
]
GENERATED = ("_sysconfigdata", "config-")  # names that begin like this are also left out
HELD_OUT = 1 / 20  # of the files


def is_held_out(name: str) -> bool:
    """
    Return whether a file is held out. A hash of its name decides, so that the file is on the same
    side on every machine and in every version of Python.
    """
    digest = hashlib.sha256(name.encode()).hexdigest()
    return int(digest[:8], 16) < HELD_OUT * 16**8


def read_library(root: Path) -> tuple[list[str], list[str]]:
    """Return the files to train on and those held out, each sorted by name."""
    train = []
    val = []
    for name in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        if any(part in LEFT_OUT or part.startswith(GENERATED) for part in name.parts):
            continue
        side = val if is_held_out(name.as_posix()) else train
        side.append((root / name).read_bytes().decode("utf-8", "replace"))
    return train, val


def prepare(folder: Path, tokenizer: Tokenizer | None = None):
    """
    Write the corpus to a folder, with a tokenizer learnt from the training files unless one is
    given.
    """
    train, val = read_library(Path(sysconfig.get_path("stdlib")))
    write_corpus(folder, train, val, tokenizer)
