"""
The default corpus: the Python standard library of the interpreter that runs this. Nothing is
downloaded. `python train.py` makes it where it is missing:

    train.bin, val.bin, meta.json and a byte-level BPE, learnt from the training files

With `--data stdlib_gpt2`, as for `--preset gpt2-124M`, the tokens are GPT-2's.
"""

import hashlib
import sys
import sysconfig
from pathlib import Path

from tokenizer import Tokenizer
from training.corpus import train_bpe, write_corpus

VOCAB_SIZE = 4096
# Folders that are left out: packages from elsewhere, tests with their data, tables.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
LEFT_OUT |= {"encodings", "pydoc_data"}
GENERATED = ("_sysconfigdata", "config-")  # names that begin so are left out, too
HELD_OUT = 1 / 20  # of the files


def is_included(name: Path) -> bool:
    """Whether a file of the library, by its relative name, belongs to the corpus."""
    return not any(part in LEFT_OUT or part.startswith(GENERATED) for part in name.parts)


def is_held_out(name: str) -> bool:
    """
    By a hash of the name, so that a file is on the same side on every machine and in every version
    of Python.
    """
    digest = hashlib.sha256(name.encode()).hexdigest()
    return int(digest[:8], 16) < HELD_OUT * 16**8


def read_library(root: Path) -> tuple[list[bytes], list[bytes]]:
    """
    The files to train on and those held out, each in the order of their names. Exits if there are
    none.
    """
    train: list[bytes] = []
    val: list[bytes] = []
    for name in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        if is_included(name):
            side = val if is_held_out(name.as_posix()) else train
            side.append((root / name).read_bytes())
    if not train or not val:
        sys.exit(
            f"{len(train)} files to train on and {len(val)} to hold out under {root}, at least one "
            "of each is wanted: run an interpreter that has its library as .py files, or choose "
            "another corpus with --preset"
        )
    return train, val


def tokenize(tokenizer: Tokenizer, documents: list[bytes]) -> list[int]:
    """All documents behind each other, each closed by the end-of-text token."""
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document.decode("utf-8", "replace"))
        ids.append(tokenizer.eos_token_id)
    return ids


def prepare(folder: Path, tokenizer: Tokenizer | None = None):
    """
    Write the corpus to a folder, with a tokenizer learnt from the training files unless one is
    given.
    """
    train, val = read_library(Path(sysconfig.get_path("stdlib")))
    if tokenizer is None:  # held-out text must not shape the vocabulary that it is measured with
        texts = (document.decode("utf-8", "replace") for document in train)
        tokenizer = train_bpe(texts, VOCAB_SIZE)
    train_ids = tokenize(tokenizer, train)
    val_ids = tokenize(tokenizer, val)
    write_corpus(folder, tokenizer, train_ids, val_ids)
    print(
        f"{folder.name}: {len(train)} files, {len(train_ids):,} training tokens; {len(val)} files, "
        f"{len(val_ids):,} tokens held out"
    )
