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

# the command, what is typed -> how the first line ends ("..." stands for any text). After the empty
# row come flags of nanoGPT, transformers, vLLM, SGLang and llama.cpp. When only the spelling
# counted, --max_iters got "did you mean --minutes?", --lr got --n_layer, and --ctx-size another
# wrong one. While the default hid that --model was sent, `b --model out/stdlib` served b.
WRONG = """
serve --porte 3 -> unrecognized arguments: --porte; did you mean --port?
serve --kv_blocks=3 -> unrecognized arguments: --kv_blocks=3; did you mean --kv-blocks?
serve --max_num_seqs=3 -> unrecognized arguments: --max_num_seqs=3; did you mean --max-num-seqs?
serve --max-num-seq=3 -> unrecognized arguments: --max-num-seq=3; did you mean --max-num-seqs?
serve --nothing-like-it -> unrecognized arguments: --nothing-like-it
train --steps 1 --batch-sise 4 -> arguments: --batch-sise 4; did you mean --batch_size?
bench server --stream_s 4 -> unrecognized arguments: --stream_s 4; did you mean --streams?
bench server --streams 0 -> --streams: 0 is too small, wanted at least 1
serve --max-tokens 0 -> 0 is too small, wanted at least 1
serve --max-connections 0 -> 0 is too small, wanted at least 1
serve --block-size 0 -> 0 is too small, wanted at least 1
serve --kv-blocks 0 -> 0 is too small, wanted at least 1
serve --max-model-len 0 -> 0 is too small, wanted at least 1
serve --max-num-seqs 0 -> 0 is too small, wanted at least 1
serve --kv-blocks 2147483648 -> is too large, wanted less than 2147483648
serve --token-budget 16777216 -> is too large, wanted less than 16777216
serve --max-num-seqs 1048576 -> is too large, wanted less than 1048576
serve --client-seconds -0.25 -> -0.25 is too small, wanted at least 0
serve --request-seconds -0.25 -> -0.25 is too small, wanted at least 0
serve --drain-seconds -0.25 -> -0.25 is too small, wanted at least 0
serve --max-body-mib nan -> nan is too small, wanted at least 0
serve --max-queue -1 -> -1 is too small, wanted at least 0
serve --port -1 -> -1 is too small, wanted at least 0
serve --port 65536 -> 65536 is too large, wanted less than 65536
serve --max-tokens x -> invalid int value: 'x'
serve --dtype int8 -> invalid choice: 'int8'...
serve --device mps -> invalid choice: 'mps', wanted cpu, cuda or cuda:1
serve --device gpu -> invalid choice: 'gpu', wanted cpu, cuda or cuda:1
serve --attention flex -> attention flex has been withdrawn; use `python examples/flex_attention.py` instead
serve --prefill-share 1.5 -> prefill_share is 1.5, wanted a share of the token budget: 0 or more, below 1
serve --device cuda: -> invalid choice: 'cuda:', wanted cpu, cuda or cuda:1
serve --model a b -> b and --model a: give only one of them
serve b --model out/stdlib -> b and --model out/stdlib: give only one of them
serve --model a --ctx-size 9 -> unrecognized arguments: --ctx-size; --ctx-size is --max-model-len here
serve a b -> unrecognized arguments: b
serve --replay F -> arguments: --replay; --replay is `python assets/draw.py page FILE` here
serve --temp 1 -> unrecognized arguments: --temp; --temp is --temperature here
serve --prompt x --chat -> not allowed with argument --prompt
serve --api-key a --api-key-file f -> not allowed with argument --api-key
serve --allowed-origins example.com -> 'example.com' is not an origin, wanted SCHEME://HOST...
serve --allowed-origins http://a/b -> 'http://a/b' is not an origin...
serve --allowed-origins localhost:3000 -> 'localhost:3000' is not an origin...
serve --allowed-origins http://a:3000/ -> 'http://a:3000/' is not an origin...
serve --allowed-origins http:// -> 'http://' is not an origin...
serve --allowed-origins= -> '' is not an origin, wanted SCHEME://HOST or SCHEME://HOST:PORT without a path, null or *
serve --allowed-origins https://*.example -> 'https://*.example' is not an origin...
serve --allowed-origins http://a://b -> 'http://a://b' is not an origin...
serve --default-chat-template-kwargs a=1 -> Expecting value...
serve --default-chat-template-kwargs [1] -> must be a JSON object
serve --default-chat-template-kwargs {"tools":1} -> has a name that a caller may not set: leave it out, got 'tools'
serve --default-chat-template-kwargs DEEP -> recursion...

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
serve --tensor-parallel-size 2 -> --tensor-parallel-size is `vllm serve DIR --tensor-parallel-size N` here
serve --max_iters -> unrecognized arguments: --max_iters
serve --enable-prefix-caching -> ; --enable-prefix-caching is on by default here
serve --top-k 5 -> ; --top-k is a field of requests here
serve --reasoning-parser qwen3 -> ; --reasoning-parser is --reasoning here
train --decay_lr=True -> ; --decay_lr is on by default here
train --beta1=0.9 -> ; --beta1 is fixed here
train --minutes inf -> inf is too large, wanted less than 1000000
train --compile=False -> ignored explicit argument 'False': a switch has no value
train config/train_shakespeare_char.py -> ; config is --preset here
"""  # noqa: E501


@pytest.mark.parametrize("row", [row for row in WRONG.splitlines() if row])
def test_a_wrong_flag_has_two_lines(row, capsys):
    """
    Previously 27 lines of usage came before the one that says what is wrong. And train.py began
    with --minutes=inf, and ended after three steps in a traceback about NaN.
    """
    typed, problem = row.split(" -> ")
    program, *flags = typed.replace("DEEP", "[" * 100_000).split()
    with pytest.raises(SystemExit) as end:
        PARSERS[program](flags)
    line, usage = capsys.readouterr().err.splitlines()
    assert problem.removesuffix("...") in line
    assert line.endswith(problem) or problem.endswith("...")
    assert end.value.code == 2
    assert usage.endswith(" --help lists the flags")


def test_vllms_names_of_dtypes_are_known():
    dtypes = [serve.parse_args(["--dtype", name]).dtype for name in ("bfloat16", "half", "fp32")]
    assert dtypes == ["bf16", "fp16", "fp32"]


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
    for name, default in {"three": 3, "zero": 0, "none": None, "switch": False}.items():
        add_flag(parser, f"--{name}", "a flag", default)
    add_flag(parser, "--list", "a flag", [], nargs="*")
    shown = re.findall(r"\(default: (.*)\)", parser.format_help())
    assert shown == ["3", "0"]
