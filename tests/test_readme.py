"""The README is held to the repo: its tour, commands, flags and numbers."""

import re
import shutil
import subprocess
from inspect import signature
from pathlib import Path

import pytest

import bench
from engine import Engine

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TOUR = re.findall(r"^\| `([\w./]+)` \| (\d+) \|", README, re.MULTILINE)
COMMANDS = sorted(set(re.findall(r"python (\w+\.py)([^`\n]*)", README)))


def test_the_tour_names_every_file_at_the_root():
    """A file that is not in the tour is a room without a door."""
    told = {name for name, _ in TOUR}
    assert told >= {path.name for path in ROOT.glob("*.py")}
    assert all((ROOT / name).exists() for name in told), f"gone: {[n for n in told if not (ROOT / n).exists()]}"


@pytest.mark.parametrize(("name", "lines"), TOUR)
def test_line_counts_are_true(name, lines):
    """Prose drifts from code; within 5% it is still true."""
    files = [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py"))
    real = sum(len(path.read_text().splitlines()) for path in files)
    assert abs(real - int(lines)) <= 0.05 * real, f"{name} has {real} lines, the README says {lines}"


@pytest.mark.parametrize(("program", "arguments"), COMMANDS)
def test_flags_and_subcommands_exist(program, arguments):
    """A reader types what stands there."""
    if program == "bench.py":
        return bench.build_parser().parse_args(arguments.split())  # exits at what it does not know
    source = (ROOT / program).read_text()
    for flag in re.findall(r"--[a-z][\w-]*", arguments):
        assert f'"{flag}"' in source, f"{program} has no {flag}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert f"\n{target}:" in makefile, f"no make {target}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_run_serves_no_training_that_was_stopped(tmp_path):
    """train.py ends well when it is asked to stop: `make run` then served what had been learnt by the way."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    (tmp_path / ".venv" / "ready").touch()
    done = subprocess.run(["make", "run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "serve.py" not in done.stdout
    assert "the training was stopped: make run goes on from there" in done.stdout


def test_pictures_are_there_and_nothing_is_left_to_fill_in():
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).stat().st_size > 1000
    assert "{{" not in README


def test_numbers_in_prose():
    """The sizes that the text explains with are the ones that the code uses."""
    assert f"**blocks** of {signature(Engine).parameters['block_size'].default} tokens" in README
    picture = Path(bench.__file__).read_text()
    requests, blocks = re.search(r"(\w+) requests share (\d+) blocks", README).groups()
    assert f"num_blocks={blocks}" in picture and requests == "nine" and "range(9)" in picture
