"""
data/: the same corpus on every run, held-out text kept apart, and files that are whole or absent.
"""

import hashlib
import runpy
from http.client import IncompleteRead
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tokenizer import load_tokenizer
from training import corpus
from training.corpus import char_tokenizer, read_corpus, train_bpe, write_corpus

ROOT = Path(__file__).resolve().parents[1]
stdlib = runpy.run_path(str(ROOT / "data" / "stdlib" / "prepare.py"))
shakespeare = runpy.run_path(str(ROOT / "data" / "shakespeare_char" / "prepare.py"))
# files of a library that do not belong to the corpus
LEFT_OUT = """test/a.py json/tests/b.py site-packages/c/d.py dist-packages/e.py encodings/f.py
    pydoc_data/g.py idlelib/idle_test/h.py _sysconfigdata_x.py config-3/i.py"""
INCLUDED = [f"{'package/' if i % 2 else ''}module{i}.py" for i in range(200)] + ["testing.py"]
ALONE = SimpleNamespace(is_main=True, wait=lambda: None)  # a process


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """
    Return a standard library of 201 small modules, one of them not UTF-8, and files to leave out.
    Previously, a link to a file that does not exist, such as an editor's lock, ended the recipe.
    """
    root = tmp_path / "library"
    root.mkdir()
    (root / ".#module1.py").symlink_to("user@host.1")
    for i, name in enumerate([*INCLUDED, *LEFT_OUT.split()]):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = b"def function%d(x):\n    return x + %d\n" % (i, i)
        path.write_bytes(text if i != 7 else text + b"# \xff\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"stdlib": str(root)}[name])
    return root


def prepare(out: Path) -> Path:
    out.mkdir()
    stdlib["prepare"](out)
    return out


def documents(folder: Path, split: str) -> list[bytes]:
    """Return the files of a split, cut after the end-of-text tokens."""
    tokenizer = load_tokenizer(folder)
    ids = read_corpus(folder, split)
    (ends,) = np.nonzero(ids == tokenizer.eos_token_id)
    assert ends[-1] == len(ids) - 1
    parts = np.split(ids, ends[:-1] + 1)
    return [tokenizer.decode_bytes(part.tolist()) for part in parts]


def test_stdlib_holds_every_file_once_on_its_side(library, tmp_path):
    """A byte that is not UTF-8 becomes U+FFFD. The hash of a file's name decides its split."""
    folder = prepare(tmp_path / "out")
    sides = {"train": [], "val": []}
    for name in sorted(INCLUDED, key=lambda name: Path(name).parts):
        digest = hashlib.sha256(name.encode()).hexdigest()
        side = "val" if int(digest[:8], 16) < 2**32 / 20 else "train"
        text = (library / name).read_text(errors="replace")
        sides[side].append(text.encode())
    assert {split: documents(folder, split) for split in sides} == sides


def test_stdlib_is_the_same_each_time_and_learns_nothing_from_held_out_text(library, tmp_path):

    def files(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in prepare(tmp_path / name).iterdir()}

    first = files("1")
    assert files("2") == first
    held_out = next(name for name in INCLUDED if stdlib["is_held_out"](name))
    (library / held_out).write_text("unheard_of = 'quixotic' # " * 100)
    third = files("3")
    assert third.pop("val.bin") != first.pop("val.bin")
    assert third == first


def test_a_name_with_gpt2_is_the_same_text_in_gpt2s_tokens(library, tmp_path, monkeypatch):
    recipe = tmp_path / "data" / "stdlib" / "prepare.py"
    recipe.parent.mkdir(parents=True)
    recipe.symlink_to(ROOT / "data" / "stdlib" / "prepare.py")
    monkeypatch.setattr(corpus, "ROOT", tmp_path)
    tokenizer = train_bpe(["def function0(x): return x + 1"], 280)
    monkeypatch.setattr(corpus, "gpt2_tokenizer", lambda: tokenizer)
    plain, gpt2 = (corpus.load_corpus(name, ALONE) for name in ("stdlib", "stdlib_gpt2"))
    # such a short text yields no more tokens than the latter
    assert plain.tokenizer.vocab_size > gpt2.tokenizer.vocab_size == 277
    for split in ("train", "val"):
        folder = tmp_path / "data"
        assert documents(folder / "stdlib_gpt2", split) == documents(folder / "stdlib", split)


FAILURES = {
    "no route to host": OSError("no route to host"),
    r"IncompleteRead\(5 bytes read, 995 more expected\)": IncompleteRead(b"First", 995),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_shakespeare_without_network_says_what_to_do(failure, tmp_path, monkeypatch):
    """
    The message has the address and the place, and no partial file is left. Previously a connection
    that broke off was a traceback.
    """

    def unreachable(address, timeout):
        raise FAILURES[failure]

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    message = rf"cannot fetch https://.*input\.txt \({failure}\): .* put it at .*/input\.txt"
    with pytest.raises(SystemExit, match=message):
        shakespeare["prepare"](tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_token_files_hold_large_ids_and_are_mapped(tmp_path):
    """Gemma's ids need more than two bytes."""
    write_corpus(tmp_path, [[0, ~262_143]], [[262_143, 0]], char_tokenizer("ab"))
    train = read_corpus(tmp_path, "train")
    assert train.tolist() == [0, ~262_143]
    assert isinstance(train, np.memmap)
