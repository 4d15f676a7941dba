"""The benchmarks that need no quiet machine: workloads are what they are said to be, and waste is counted right."""

import json
import sys
from pathlib import Path

import pytest

import bench
from bench import fill_pool, offline_workload, padded

ROOT = Path(__file__).parents[1]


def test_the_workload_is_the_one_that_others_measure_and_its_parts_fit():
    """Other lengths, and no figure could be compared; `bench.py batching` has room for 128 + 128 tokens a text."""
    requests = offline_workload()
    assert (sum(len(prompt) for prompt, _ in requests), sum(n for _, n in requests)) == (142_827, 133_966)
    small = offline_workload(96, 8, 65)
    assert [(len(prompt), n) for prompt, n in small] == [(len(prompt) // 8, n // 8) for prompt, n in requests[:96]]
    assert max(len(prompt) for prompt, _ in small) <= 128 and max(max(prompt) for prompt, _ in small) == 64


def test_a_padded_batch_is_a_rectangle():
    """Were a short one to end early, a static batch would look better than it is."""
    assert padded([([1, 2, 3], 4), ([5], 9)]) == [([1, 2, 3], 9), ([0, 0, 5], 9)]


@pytest.mark.parametrize(("S", "at_once", "inside"), [(2048, 16, 56.3), (16, 36.2, 0.8), (4, 36.4, 0.2)])
def test_waste_is_half_a_block_of_each_text(S, at_once, inside):
    """Slabs: 32,768 / 2,048 requests. Blocks: on average half a block of each request is empty, S / 2 * 36 tokens."""
    row = fill_pool(S, 32_768)
    assert row["at once"] == at_once
    assert row["waste inside, %"] == inside
    assert row["tokens, %"] + row["waste inside, %"] + row["waste outside, %"] == pytest.approx(100, abs=0.2)


PICTURES = [name for name, (_, defaults) in bench.COMMANDS.items() if "out" in defaults]


def run_bench(monkeypatch, capsys, *argv) -> dict:
    """The line of JSON that `bench.py ARGV` ends with."""
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, argv)])
    bench.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_goes_where_git_does_not_look(name):
    """`bench.py memory` and `blockmap` wrote over the README's pictures, so whoever tried them had a changed repo."""
    path = bench.build_parser().parse_args([name]).out
    assert path == Path(f"out/{name}.png") and "out/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", ["blockmap", "memory"])
def test_drawing_leaves_the_tracked_pictures_alone(name, monkeypatch, capsys, tmp_path):
    """The same bug, by what the commands do: each writes one file, below the folder it is run in."""
    monkeypatch.setattr(bench, "offline_workload", lambda: offline_workload(64))
    tracked = {path: path.read_bytes() for path in (ROOT / "assets").iterdir()}
    monkeypatch.chdir(tmp_path)
    assert run_bench(monkeypatch, capsys, name)["picture"] == f"out/{name}.png"
    (written,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == tmp_path / "out" / f"{name}.png" and written.read_bytes().startswith(b"\x89PNG")
    assert tracked == {path: path.read_bytes() for path in (ROOT / "assets").iterdir()}


@pytest.mark.parametrize("path", ["/proc/no/picture.png", "picture.nonsense"])
def test_a_picture_that_cannot_be_written_costs_no_figures(path, monkeypatch, capsys, tmp_path):
    """A wrong --out was found when all was measured, and a traceback was all that came of it."""
    monkeypatch.chdir(tmp_path)
    result = run_bench(monkeypatch, capsys, "blockmap", "--out", path)
    assert result["preemptions"] > 0
    assert path in result["picture"] and "choose another --out" in result["picture"]
