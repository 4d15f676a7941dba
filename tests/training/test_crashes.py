"""
Kills at each write, and full disks. Whenever a process dies while it trains, it leaves a directory
that is whole: it can be served, resumed or restarted, and is never a mixture.

Nothing is really killed. A `Disk` notes the files after each rename and each deletion, while a
training runs once, undisturbed. Each of these moments is then laid out in its own directory, and
opened in all ways.
"""

import io
import os
import resource
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from runs import (
    MACHINE,
    PICTURE,
    TINY,
    after_update,
    assert_loads,
    read_log,
    resume,
    same,
    stop_after,
)
from test_data import shakespeare

import train
from checkpoint import CheckpointError, load_checkpoint
from tokenizer import load_tokenizer
from training import report
from training.corpus import bpe_tokenizer, char_tokenizer, write_corpus

FLAGS = [*TINY, "--steps=2", "--eval_every=1", "--overwrite"]
TEXT = "a tale told by an idiot, full of sound and fury, signifying nothing. " * 9
TEXTS = {1: TEXT, 2: TEXT.upper()}


class Disk:
    """
    The files that a kill would leave in a folder, at each moment since this was made: `moments` are
    dictionaries, name -> bytes. Files appear by a rename, otherwise half of one might be left;
    test_common.py shows that all of it is on the disk by then.
    """

    def __init__(self, folder: Path, monkeypatch):
        self.folder = folder
        self.moments = [self.files()]
        for name in ("replace", "rename", "unlink", "remove"):
            monkeypatch.setattr(os, name, self.noted(getattr(os, name)))

    def files(self) -> dict[str, bytes]:
        """Return the files, without temporary ones, which are never read."""
        paths = [path for path in self.folder.glob("*.*") if path.suffix != ".tmp"]
        return {path.name: path.read_bytes() for path in paths}

    def noted(self, operation):
        """Return a rename or a deletion that takes notes."""

        def operate(*arguments, **named):
            assert self.files() == self.moments[-1], "a file was written in place"
            operation(*arguments, **named)
            self.moments.append(self.files())

        return operate


def whose(folder: Path, saved: dict) -> tuple | None:
    """Return (seed, step) of the save that serving finds in a folder, None if it finds no model."""
    try:
        served = load_checkpoint(folder).state_dict()
    except CheckpointError as error:
        assert "config.json is missing" in str(error)
        return None
    (place,) = [place for place, weights in saved.items() if same(weights, served)]
    seed, _ = place
    assert set(load_tokenizer(folder).decode(range(19))) == set(TEXTS[seed])
    return place


def resumed(folder: Path, saved: dict) -> tuple | None:
    """Return (seed, step) of the save that --resume finds, None if there is nothing to resume."""
    try:
        resume(folder)
    except SystemExit as error:
        assert "nothing to resume" in str(error)
        return None
    return whose(folder, saved)


def test_a_training_killed_at_any_write_is_served_and_resumed_or_begun_anew(tmp_path):
    """
    A first training runs, and then another in its place by --overwrite. Previously --overwrite left
    train_state.pt behind. If it was killed before its first save, --resume continued the training
    that it was meant to replace.
    """
    out = tmp_path / "out"
    out.mkdir()
    moments = []
    logs = {}
    saved = {}  # (seed, step) -> weights

    def note_weights(run, result):
        state = run.model.state_dict()
        saved[run.args.seed, run.step] = {name: w.clone() for name, w in state.items()}

    for seed, text in TEXTS.items():
        corpus = tmp_path / f"corpus{seed}"
        tokenizer = char_tokenizer(text)
        ids = tokenizer.encode(text)
        write_corpus(corpus, [ids], [ids[:100]], tokenizer)
        with pytest.MonkeyPatch.context() as patch:
            after_update(patch, note_weights)
            disk = Disk(out, patch)
            train.main([*FLAGS, f"--seed={seed}", f"--data={corpus}", f"--out={out}"])
        moments += disk.moments
        logs[seed] = read_log(out)
    verdicts = []
    for i, files in enumerate(moments):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        served = whose(folder, saved)
        if "loss.png" in files:  # for the Makefile: this training is done, and may be served
            assert files["loss.png"] == PICTURE
            assert served[1] == 2
        args = train.parse_args(["--out", str(folder)])
        if served is None:
            assert train.open_out(args) is None  # a new training may begin
        else:
            ways = f"--out {folder}-2 to .*, --resume --out {folder} to continue .*, or --overwrite"
            with pytest.raises(SystemExit, match=ways):
                train.open_out(args)
        end = resumed(folder, saved)
        if end is not None:  # an interrupted training learns nothing else
            assert read_log(folder) == logs[end[0]]
        verdicts.append(f"served {served}, resumed {end}")
    assert [verdict for verdict, _ in groupby(verdicts)] == [
        "served None, resumed None",
        "served None, resumed (1, 2)",  # train_state.pt comes first
        "served (1, 1), resumed (1, 2)",
        "served (1, 2), resumed (1, 2)",
        "served None, resumed (1, 2)",  # --overwrite: config.json is deleted first
        "served None, resumed None",
        "served None, resumed (2, 2)",
        "served (2, 1), resumed (2, 2)",
        "served (2, 2), resumed (2, 2)",
    ]


def test_a_corpus_killed_at_any_write_is_the_old_one_or_none_or_the_new_one(tmp_path, monkeypatch):
    """
    It is fetched whole, because half a text would be taken for the corpus from then on. It is
    prepared again with other characters, where the tokens of one and the tokenizer of the other
    would be nonsense. Without meta.json a folder is no corpus.
    """
    answers = iter([io.BytesIO(text.encode()) for text in TEXTS.values()])
    monkeypatch.setattr("urllib.request.urlopen", lambda address, timeout: next(answers))
    disk = Disk(tmp_path, monkeypatch)
    shakespeare["prepare"](tmp_path)
    assert disk.moments[:2] == [{}, {"input.txt": TEXT.encode()}]
    assert shakespeare["fetch"](tmp_path / "input.txt") == TEXT  # once
    (tmp_path / "input.txt").unlink()
    shakespeare["prepare"](tmp_path)
    has_meta = ["meta.json" in files for files in disk.moments]
    between = len({*disk.moments[-1]}) - 1  # the other files are written one by one
    assert has_meta == [*[False] * (between + 1), True, True, True, *[False] * between, True]
    corpus = train.load_corpus(str(tmp_path), MACHINE)
    decode = corpus.tokenizer.decode
    cut = int(0.9 * len(TEXT))  # nanoGPT's split
    assert decode(corpus.train.tolist()) == TEXTS[2][:cut]
    assert decode(corpus.val.tolist()) == TEXTS[2][cut:]


# --------------------------------------------------------------------------------------------------
# Full disks


@contextmanager
def full_disk(room: int):
    """Limit the size of every file, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_a_run_with_a_message_and_keeps_what_was_saved(
    train_tiny, out, monkeypatch
):
    """
    Previously it was a traceback, torch's about an unexpected position, and half a file stayed.
    """
    stop_after(monkeypatch, [5])
    train_tiny("--steps=20")
    with full_disk(20_000), pytest.raises(SystemExit, match=r"out cannot be written .* free space"):
        resume(out)
    assert assert_loads(out)["step"] == 5
    assert not [*out.glob("*.tmp")]
    (out / "file").touch()
    with pytest.raises(SystemExit, match=r"file/out cannot be written .* choose another --out"):
        train_tiny("--steps=2", f"--out={out / 'file' / 'out'}")
    (out / "loss.png.tmp").mkdir()  # cannot be written
    with pytest.raises(SystemExit, match=r"loss\.png cannot be written .*\. If a check"):
        report.draw({"training": [(1, 2.0)]}, out / "loss.png")


@pytest.mark.parametrize(("room", "count"), [(100, 0), (20_000, 2)])
def test_a_full_disk_leaves_no_corpus(room, count, tmp_path):
    """This holds if the tokenizer does not fit, and if the tokens do not."""
    tokenizer = bpe_tokenizer([])
    message = "cannot be written .*: free space or choose"
    with full_disk(room), pytest.raises(SystemExit, match=message):
        write_corpus(tmp_path, [[1] * 10_000], [[1, 1]], tokenizer)
    assert len([*tmp_path.iterdir()]) == count
