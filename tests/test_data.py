"""
data/: the same corpus on every run, held-out text kept apart, and files that are whole or absent.
"""

import hashlib
import os
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tokenizer import load_tokenizer
from training.corpus import char_tokenizer, read_corpus, train_bpe, write_corpus

ROOT = Path(__file__).resolve().parents[1]
stdlib = runpy.run_path(str(ROOT / "data" / "stdlib" / "prepare.py"))
shakespeare = runpy.run_path(str(ROOT / "data" / "shakespeare_char" / "prepare.py"))
# of a library's files, those that do not belong to the corpus
LEFT_OUT = """test/a.py json/tests/b.py site-packages/c/d.py dist-packages/e.py encodings/f.py
    pydoc_data/g.py idlelib/idle_test/h.py _sysconfigdata_x.py config-3/i.py"""
INCLUDED = [f"{'package/' if i % 2 else ''}module{i}.py" for i in range(200)] + ["testing.py"]


@pytest.fixture
def library(tmp_path) -> Path:
    """A standard library of 201 small modules, one of them not UTF-8, and files to leave out."""
    root = tmp_path / "library"
    for i, name in enumerate([*INCLUDED, *LEFT_OUT.split()]):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = b"def function%d(x):\n    return x + %d\n" % (i, i)
        path.write_bytes(text if i != 7 else text + b"# \xff\n")
    return root


def prepare(library: Path, out: Path) -> Path:
    out.mkdir()
    stdlib["prepare"](out, root=library)
    return out


def documents(folder: Path, split: str) -> list[bytes]:
    """The files of a split, cut behind the end-of-text tokens."""
    tokenizer, ids = load_tokenizer(folder), read_corpus(folder, split)
    (ends,) = np.nonzero(ids == tokenizer.eos_token_id)
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode_bytes(part.tolist()) for part in np.split(ids, ends[:-1] + 1)]


def test_stdlib_holds_every_file_once_on_its_side(library, tmp_path):
    """A byte that is not UTF-8 becomes U+FFFD; the hash of its name decides about a file's side."""
    folder = prepare(library, tmp_path / "out")
    names = sorted(INCLUDED, key=lambda name: Path(name).parts)
    sides = {"train": [], "val": []}
    for name in names:
        digest = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        side = "val" if digest < 2**32 / 20 else "train"
        sides[side].append((library / name).read_text(errors="replace").encode())
    assert 4 < len(sides["val"]) < 20
    assert {split: documents(folder, split) for split in sides} == sides


def test_stdlib_is_the_same_each_time_and_learns_nothing_from_held_out_text(library, tmp_path):
    first, second = prepare(library, tmp_path / "1"), prepare(library, tmp_path / "2")
    names = ("train.bin", "val.bin", "meta.json", "tokenizer.json", "tokenizer_config.json")
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    held_out = next(name for name in INCLUDED if stdlib["is_held_out"](name))
    (library / held_out).write_text("unheard_of = 'quixotic' # " * 100)
    third = prepare(library, tmp_path / "3")
    changed = [n for n in names if (third / n).read_bytes() != (first / n).read_bytes()]
    assert changed == ["val.bin"]


def test_stdlib_without_sources_says_so(tmp_path):
    message = r"0 files to train on and 0 to hold out .* choose another corpus"
    with pytest.raises(SystemExit, match=message):
        stdlib["prepare"](tmp_path, root=tmp_path)


def test_shakespeare_is_nanogpts(tmp_path):
    """65 symbols, 1,003,854 and 111,540 tokens, and the ids of nanoGPT's sorted vocabulary."""
    path = Path(
        os.environ.get("SHAKESPEARE_TXT")
        or ROOT.parent / "shared" / "data" / "tinyshakespeare" / "input.txt"
    )
    if not path.is_file():
        pytest.skip("the text is not at hand: set SHAKESPEARE_TXT")
    shakespeare["prepare"](tmp_path, source=path)
    train, val = read_corpus(tmp_path, "train"), read_corpus(tmp_path, "val")
    assert (len(train), len(val), load_tokenizer(tmp_path).vocab_size) == (1_003_854, 111_540, 65)
    assert train[:10].tolist() == [18, 47, 56, 57, 58, 1, 15, 47, 58, 47]  # "First Citi"


def test_the_last_tenth_of_shakespeare_is_held_out(tmp_path):
    """nanoGPT's split, int(0.9 n), and a vocabulary of all characters, in order."""
    text = "To be, or not to be, that is the question" * 3
    (tmp_path / "input.txt").write_text(text)
    shakespeare["prepare"](tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    train, val = (
        tokenizer.decode(read_corpus(tmp_path, split).tolist()) for split in ("train", "val")
    )
    assert (train, val) == (text[:110], text[110:])
    assert tokenizer.decode(range(tokenizer.vocab_size)) == "".join(sorted(set(text)))


def test_gpt2s_corpus_is_the_same_text_in_gpt2s_tokens(library, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(
        "training.corpus.gpt2_tokenizer", lambda: train_bpe(["def function0(x): return x + 1"], 280)
    )
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"stdlib": str(library)}[name])
    gpt2 = runpy.run_path(str(ROOT / "data" / "stdlib_gpt2" / "prepare.py"))
    gpt2["prepare"](tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").vocab_size == 277  # all that so short a text gives
    plain = prepare(library, tmp_path / "stdlib")
    for split in ("train", "val"):
        assert documents(tmp_path / "out", split) == documents(plain, split)


def test_the_commands_prepare_what_they_are_asked_to(tmp_path):
    """`--input FILE` of the text that is there; nothing is fetched."""
    folder = tmp_path / "data" / "shakespeare_char"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "data" / "shakespeare_char" / "prepare.py", folder)
    (tmp_path / "text").write_text("some text to prepare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", "--input", str(tmp_path / "text")])
        runpy.run_path(str(folder / "prepare.py"), run_name="__main__")
    assert (
        load_tokenizer(folder).decode(read_corpus(folder, "train").tolist()) == "some text to prepa"
    )


def test_shakespeare_without_network_says_what_to_do(tmp_path):
    """The address, the flag and the folder; and nothing half there."""
    address = "http://127.0.0.1:9/input.txt"
    with pytest.raises(SystemExit, match=f"cannot fetch {address} .*--input FILE.* {tmp_path} as"):
        shakespeare["fetch"](tmp_path / "input.txt", address)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match=r"--input .*nowhere\.txt is not a file"):
        shakespeare["prepare"](tmp_path, source=tmp_path / "nowhere.txt")


def test_token_files_take_four_bytes_above_65536_symbols(tmp_path):
    for symbols, dtype in ((65_536, np.uint16), (65_537, np.uint32)):
        tokenizer = char_tokenizer("".join(map(chr, range(0xE000, 0xE000 + symbols))))
        last = symbols - 1
        write_corpus(tmp_path, tokenizer, [0, last], [last])
        train = read_corpus(tmp_path, "train")
        assert train.dtype == dtype and train.tolist() == [0, last] and isinstance(train, np.memmap)
