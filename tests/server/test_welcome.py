"""First contact: wrong flags of each command."""

import argparse
import re

import pytest

import bench
import serve
import train
from assets.commands import build_parser
from common import FOREIGN, add_flag, announce, plural

PARSERS = {"serve": serve.parse_args, "train": train.build_parser().parse_args}
PARSERS["bench"] = build_parser("", bench.COMMANDS, bench.FLAGS).parse_args

# the command, what is typed -> what the first line ends with. The rows after the empty one have
# flags of nanoGPT, transformers, vLLM, SGLang or llama.cpp: by spelling --max_iters was "did you
# mean --minutes?", --lr --n_layer, --ctx-size other.
WRONG = """
serve --porte 3 -> unrecognized arguments: --porte; did you mean --port?
serve --kv_blocks=3 -> unrecognized arguments: --kv_blocks=3; did you mean --kv-blocks?
serve --max_num_seqs=3 -> unrecognized arguments: --max_num_seqs=3; did you mean --max-num-seqs?
serve --max-num-seq=3 -> unrecognized arguments: --max-num-seq=3; did you mean --max-num-seqs?
serve --nothing-like-it -> unrecognized arguments: --nothing-like-it
train --steps 1 --batch-sise 4 -> arguments: --batch-sise 4; did you mean --batch_size?
bench server --stream_s 4 -> unrecognized arguments: --stream_s 4; did you mean --streams?
bench server --streams 0 -> --streams: 0 is too small, wanted at least 1

train --max_iters -> ; --max_iters is --steps here
train --block_size -> ; --block_size is --context_length here
train --lr -> ; --lr is --matrix_lr and --vector_lr here
train --learning-rate -> ; --learning-rate is --matrix_lr and --vector_lr here
train --out_dir -> ; --out_dir is --out here
train --dataset=x -> ; --dataset is --data here
train --eval_interval -> ; --eval_interval is --eval_every here
train --num_train_epochs -> unrecognized arguments: --num_train_epochs
train --max-num-batched-tokens -> unrecognized arguments: --max-num-batched-tokens
serve --max-num-batched-tokens -> ; --max-num-batched-tokens is --token-budget here
serve --ctx-size -> ; --ctx-size is --max-model-len here
serve -c -> ; -c is --max-model-len here
serve --n-predict -> ; --n-predict is --max-tokens here
serve --max_new_tokens=9 -> ; --max_new_tokens is --max-tokens here
serve --gpu-memory-utilization -> ; --gpu-memory-utilization is --kv-blocks here
serve --enforce-eager -> ; --enforce-eager is --no-graphs here
serve --tensor-parallel-size -> unrecognized arguments: --tensor-parallel-size
serve --max_iters -> unrecognized arguments: --max_iters
"""


@pytest.mark.parametrize("row", [row for row in WRONG.splitlines() if row])
def test_a_wrong_flag_has_two_lines(row, capsys):
    """There were 27 lines of usage before the one that says what is wrong."""
    typed, problem = row.split(" -> ")
    program, *flags = typed.split()
    with pytest.raises(SystemExit) as end:
        PARSERS[program](flags)
    line, usage = capsys.readouterr().err.splitlines()
    assert line.endswith(problem)
    assert end.value.code == 2
    assert usage.endswith(" --help lists the flags")


def test_names_of_other_programs_lead_to_flags_that_are_there(capsys):
    """Would catch: a flag that was renamed."""
    for program in "train", "serve":
        with pytest.raises(SystemExit):
            PARSERS[program](["--help"])
    flags = [ours.split()[0] for ours, _ in FOREIGN if ours.startswith("--")]
    assert {*flags} <= {*re.findall(r"  (--[\w-]+)", capsys.readouterr().out)}


def test_counts_have_their_noun():
    counts = [plural(n, "old block") for n in (0, 1, 6400, 1.0, 2.25)]
    assert counts[:3] == ["0 old blocks", "1 old block", "6,400 old blocks"]
    assert counts[3:] == ["1 old block", "2.25 old blocks"]


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
