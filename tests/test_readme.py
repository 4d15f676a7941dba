"""The README is held to the repo: its tour, commands, flags and numbers."""

import re
import shutil
import subprocess
from inspect import signature
from pathlib import Path

import pytest

import bench
import chat
import connection
import encoder
import protocol
import serve
import tokenizer
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


# the beginning of a row in the README's table of limits, and what its second column says, from where the limit is kept
LIMITS = [
    ("CPU time and memory to encode", f"{encoder.JOB_SECONDS} s (4 MiB take 1 to 5), {encoder.JOB_MEMORY >> 30} GiB"),
    ("text that a chat template makes", f"{chat.MAX_RENDERED >> 20} Mi characters"),
    ("texts that wait to be encoded", f"{encoder.MAX_WAITING >> 20} Mi characters"),
    ("tokens that `/tokenize` spells out", f"{encoder.MAX_NAMES:,}"),
    ("a request's head with its trailers", f"{connection.MAX_HEAD >> 10} KiB, {connection.MAX_HEADERS} headers"),
    ("requests that wait behind another", f"{connection.MAX_PIPELINED}"),
    ("log-probabilities in one answer", f"{protocol.MAX_SCORES:,}: tokens"),
    ("`allowed_token_ids`", f"{protocol.MAX_ALLOWED:,}: different ids"),
    ("`priority`", f"-{protocol.MAX_PRIORITY} to {protocol.MAX_PRIORITY};"),
    ("stop strings", f"{protocol.MAX_STOPS}, {protocol.MAX_STOP_BYTES >> 10} KiB together"),
    (
        "prompts, messages, choices of a prompt (`n`), `logit_bias`, `stop_token_ids`",
        f"{protocol.MAX_PROMPTS:,}, {protocol.MAX_MESSAGES:,}, {protocol.MAX_CHOICES}, {protocol.MAX_BIASES:,}, "
        f"{protocol.MAX_STOP_IDS}",
    ),
]


@pytest.mark.parametrize(("begins", "says"), LIMITS, ids=[begins for begins, _ in LIMITS])
def test_limits_are_as_told(begins, says):
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {begins}")]
    assert row.split(" | ")[1].startswith(says)


def test_limits_that_are_flags_have_the_defaults_that_are_told():
    table = README[README.index("| limit | value") : README.index("A request that its head alone refuses")]
    told = re.findall(r"`--([\w-]+) (\d+)`", table)
    args = vars(serve.parse_args([]))
    assert len(told) == 6
    assert {name: float(number) for name, number in told} == {name: args[name.replace("-", "_")] for name, _ in told}
    prose = f"Texts of more than {encoder.SHORT:,} characters and all chat templates", "A run of more than "
    assert prose[0] in README and f"{prose[1]}{tokenizer.MAX_BLANKS:,} blanks" in README
