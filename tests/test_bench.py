"""bench.py: workloads are what their names say, kernels are counted right, each command runs."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import bench
from bench import offline_workload
from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from ops import cpu
from training.corpus import train_bpe, write_corpus

ROOT = Path(__file__).parents[1]


def test_the_workload_is_the_one_that_others_measure():
    """Other lengths, and no figure could be compared."""
    work = offline_workload()
    assert bench.num_tokens(work) == (142_827, 133_966)
    small = offline_workload(96, 8, 65)
    sizes = [(len(prompt), n) for prompt, n in small]
    assert sizes == [(len(prompt) // 8, n // 8) for prompt, n in work[:96]]
    assert {token for prompt, _ in small for token in prompt} == {*range(65)}


def test_kernels_that_overlap_count_once():
    """With programmatic dependent launch a kernel starts early, and waits for the one before."""
    launches = [(0.0, 10.0, "decode_kernel"), (8.0, 15.0, "nvjet_hsh_128")]
    launches += [(9.0, 12.0, "Memcpy DtoD"), (20.0, 21.0, "add_norm_kernel")]
    seconds = bench.seconds_by_kind(launches)
    microseconds = {kind: round(1e6 * value, 6) for kind, value in seconds.items() if value}
    assert microseconds == {"attention": 10, "linear layers": 5, "norms": 1}


def test_kinds_of_kernels_go_by_their_names():
    """A kernel of ours that was renamed would be counted as "rest"."""
    files = [ROOT / "kernels.py", *(ROOT / "ops").glob("*.py")]
    source = "".join(path.read_text() for path in files)
    ours = re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    rest = {name for name in ours if bench.kind_of(name) == "rest"}
    assert rest == {"order_kernel", "decode_inputs_kernel", "embed_kernel"}


# --------------------------------------------------------------------------------------------------
# Every command once: its figures are of a toy


@pytest.fixture
def toy(monkeypatch, tmp_path) -> Path:
    """Small workloads, each measured once; and a model directory with its corpus."""
    workload, seconds = bench.offline_workload, bench.median_seconds

    def small_workload(n=256, scale=1, *rest, **named):
        return workload(min(n, 4), 4 * scale, *rest, **named)

    monkeypatch.setattr(bench, "offline_workload", small_workload)
    monkeypatch.setattr(bench, "median_seconds", lambda call, repeats, *rest: seconds(call, 1))
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e9)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32}
    monkeypatch.setitem(bench.MODELS, "10M", GPTConfig(65, 256, **sizes))
    text = (ROOT / "paged.py").read_text()
    tokenizer = train_bpe([text], 300)
    ids = tokenizer.encode(text)
    write_corpus(tmp_path, tokenizer, ids[:-500], ids[-500:])
    save_checkpoint(GPT(GPTConfig(tokenizer.vocab_size, 128, **sizes)), tmp_path)
    return tmp_path


def run(monkeypatch, command: str):
    monkeypatch.setattr(sys, "argv", ["bench.py", *command.split()])
    bench.main(bench.__doc__, bench.COMMANDS)


FIGURES = {  # of a command: its flags, and a name in its answer
    "scheduler": ("", "a step, ms"),
    "kernels": ("", "a layer, ms"),
    "generate": ("", "8 at once"),
    "quality": ("--model DIR --data DIR", "bf16"),
    "engine": ("--model DIR", "32 at once"),
    "equality": ("--model DIR", "fp32, tokens unlike the dense model's"),
    "server": ("--model DIR --streams 3 --repeats 2 --http-workers 2", "3 streams"),
    "overhead": ("--model DIR", "floor, ms"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", bench.COMMANDS)
def test_a_command_runs(name, toy, monkeypatch, capsys):
    """A name that had changed in another module was noticed by a reader, as a traceback."""
    if name == "kernels" and torch.cuda.is_available():
        pytest.skip("on a GPU it measures for minutes")
    flags, figure = FIGURES[name]
    run(monkeypatch, f"{name} {flags.replace('DIR', str(toy))}")
    result = json.loads(capsys.readouterr().out)
    assert result[figure] is not None
    assert result["bench"] == name
    for equal, count in re.findall(r"'equal answers': '(\d+) of (\d+)'", str(result)):
        assert equal == count
    assert result.get("fp32, tokens unlike the dense model's", 0) == 0


def test_quality_leaves_out_the_formats_that_this_cpu_refuses(toy, monkeypatch, capsys):
    """Without VNNI instructions the whole command ended in int8's refusal."""
    monkeypatch.setattr(cpu, "int8_is_exact", lambda: False)
    run(monkeypatch, f"quality --model {toy} --data {toy}")
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "bf16" in result
    assert "int8" not in result
    assert "int8 is left out: --quantize int8 needs a CPU with VNNI" in err


def test_each_help_can_be_printed(capsys):
    """A bare % in a help text would be a TypeError."""
    for command in bench.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            bench.build_parser("", bench.COMMANDS).parse_args([command, "--help"])
        assert f"usage: {Path(sys.argv[0]).name} {command}" in capsys.readouterr().out
