"""First contact: wrong flags of each command."""

import argparse

import pytest

import bench
import serve
import train
from common import add_flag, announce, plural

TRAIN, BENCH = train.build_parser().parse_args, bench.build_parser("", bench.COMMANDS).parse_args
FLAG = "unrecognized arguments: "
BATCH = "--batch-sise 4"


@pytest.mark.parametrize(
    ("parse", "typed", "problem"),
    [
        (serve.parse_args, "--porte 3", f"{FLAG}--porte 3; did you mean --port?"),
        (serve.parse_args, "--kv_blocks=3", f"{FLAG}--kv_blocks=3; did you mean --kv-blocks?"),
        (serve.parse_args, "--nothing-like-it", f"{FLAG}--nothing-like-it"),
        (TRAIN, f"--steps 1 {BATCH}", f"{FLAG}{BATCH}; did you mean --batch_size?"),
        (BENCH, "server --stream_s 4", f"{FLAG}--stream_s 4; did you mean --streams?"),
        (BENCH, "server --streams 0", "--streams: 0 is too small, wanted at least 1"),
    ],
)
def test_a_wrong_flag_has_two_lines(parse, typed, problem, capsys):
    """There were 27 lines of usage before the one that says what is wrong."""
    with pytest.raises(SystemExit) as end:
        parse(typed.split())
    line, usage = capsys.readouterr().err.splitlines()
    assert line.endswith(problem)
    assert end.value.code == 2
    assert usage.endswith(" --help lists the flags")


def test_counts_have_their_noun():
    counts = [plural(n, "old block") for n in (0, 1, 2, 6400)]
    assert counts == ["0 old blocks", "1 old block", "2 old blocks", "6,400 old blocks"]


def test_one_process_says_that_it_begins(monkeypatch, capsys):
    for rank in ("0", "1", "7"):
        monkeypatch.setenv("RANK", rank)
        announce(f"loading {rank}")
    assert capsys.readouterr().err == "loading 0 ..\n"


def test_help_names_defaults_that_are_some():
    parser = argparse.ArgumentParser()
    add_flag(parser, "--number", "a number", 3)
    add_flag(parser, "--none", "nothing")
    add_flag(parser, "--list", "a list", [], nargs="*")
    add_flag(parser, "--switch", "a switch", False)
    add_flag(parser, "--zero", "a zero", 0)
    text = parser.format_help()
    assert "a number (default: 3)" in text
    assert "a zero (default: 0)" in text
    assert text.count("(default") == 2
