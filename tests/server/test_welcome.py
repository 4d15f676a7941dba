"""First contact: wrong flags of each command."""

import argparse
import re

import pytest

import bench
import serve
import train
from assets.commands import build_parser
from common import FOREIGN, add_flag, announce, plural

TRAIN = train.build_parser().parse_args
BENCH = build_parser("", bench.COMMANDS, bench.FLAGS).parse_args
FLAG = "unrecognized arguments: "
BATCH = "--batch-sise 4"
SEQS = "--max-num-seqs"


@pytest.mark.parametrize(
    ("parse", "typed", "problem"),
    [
        (serve.parse_args, "--porte 3", f"{FLAG}--porte; did you mean --port?"),
        (serve.parse_args, "--kv_blocks=3", f"{FLAG}--kv_blocks=3; did you mean --kv-blocks?"),
        (serve.parse_args, "--max_num_seqs=3", f"{FLAG}--max_num_seqs=3; did you mean {SEQS}?"),
        (serve.parse_args, "--max-num-seq=3", f"{FLAG}--max-num-seq=3; did you mean {SEQS}?"),
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


# the command; a flag of nanoGPT, transformers, vLLM, SGLang or llama.cpp; what is said of it
ELSEWHERE = """
train --max_iters --steps
train --block_size --context_length
train --lr --matrix_lr and --vector_lr
train --learning-rate --matrix_lr and --vector_lr
train --out_dir --out
train --dataset=x --data
train --eval_interval --eval_every
train --num_train_epochs
train --max-num-batched-tokens
serve --max-num-batched-tokens --token-budget
serve --ctx-size --max-model-len
serve -c --max-model-len
serve --n-predict --max-tokens
serve --max_new_tokens=9 --max-tokens
serve --gpu-memory-utilization --kv-blocks
serve --enforce-eager --no-graphs
serve --tensor-parallel-size
serve --max_iters
"""


@pytest.mark.parametrize("row", ELSEWHERE.strip().splitlines())
def test_a_flag_of_another_program_has_its_name_here(row, capsys):
    """By spelling --max_iters was "did you mean --minutes?", --lr --n_layer, --ctx-size other."""
    program, flag, *ours = row.split(" ", 2)
    with pytest.raises(SystemExit):
        {"train": TRAIN, "serve": serve.parse_args}[program]([flag])
    line, _ = capsys.readouterr().err.splitlines()
    name = flag.partition("=")[0]
    assert line.endswith(f"; {name} is {ours[0]} here" if ours else f"{FLAG}{flag}")


def test_names_of_other_programs_lead_to_flags_that_are_there(capsys):
    """Would catch: a flag that was renamed."""
    for parse in TRAIN, serve.parse_args:
        with pytest.raises(SystemExit):
            parse(["--help"])
    flags = [ours.split()[0] for ours, _ in FOREIGN if ours.startswith("--")]
    assert {*flags} <= {*re.findall(r"  (--[\w-]+)", capsys.readouterr().out)}


def test_counts_have_their_noun():
    counts = [plural(n, "old block") for n in (0, 1, 2, 6400, 1.0, 2.25)]
    assert counts[:4] == ["0 old blocks", "1 old block", "2 old blocks", "6,400 old blocks"]
    assert counts[4:] == ["1 old block", "2.25 old blocks"]


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
