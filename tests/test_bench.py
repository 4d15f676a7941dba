"""
The benchmarks that need no quiet machine: workloads are what they are said to be, and waste is
counted right.
"""

import itertools
import json
import re
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bench
from bench import fill_pool, offline_workload, padded
from checkpoint import save_checkpoint
from model import GPT, GPTConfig
from training.corpus import train_bpe, write_corpus

ROOT = Path(__file__).parents[1]


def test_the_workload_is_the_one_that_others_measure_and_its_parts_fit():
    """
    Other lengths, and no figure could be compared; `bench.py batching` has room for 128 + 128
    tokens a text.
    """
    requests = offline_workload()
    assert sum(len(prompt) for prompt, _ in requests) == 142_827
    assert sum(n for _, n in requests) == 133_966
    small = offline_workload(96, 8, 65)
    assert [(len(prompt), n) for prompt, n in small] == [
        (len(prompt) // 8, n // 8) for prompt, n in requests[:96]
    ]
    assert max(len(prompt) for prompt, _ in small) <= 128
    assert max(max(prompt) for prompt, _ in small) == 64


def test_a_padded_batch_is_a_rectangle():
    """Were a short one to end early, a static batch would look better than it is."""
    assert padded([([1, 2, 3], 4), ([5], 9)]) == [([1, 2, 3], 9), ([0, 0, 5], 9)]


@pytest.mark.parametrize(
    ("S", "at_once", "inside"), [(2048, 16, 56.3), (16, 36.2, 0.8), (4, 36.4, 0.2)]
)
def test_waste_is_half_a_block_of_each_text(S, at_once, inside):
    """
    Slabs: 32,768 / 2,048 requests. Blocks: on average half a block of each request is empty, S / 2
    * 36 tokens.
    """
    row = fill_pool(S, 32_768)
    assert row["at once"] == at_once
    assert row["waste inside, %"] == inside
    assert row["tokens, %"] + row["waste inside, %"] + row["waste outside, %"] == pytest.approx(
        100, abs=0.2
    )


def test_kernels_that_overlap_count_once():
    """With programmatic dependent launch a kernel starts early, and waits for the one before."""
    launches = [
        (0.0, 10.0, "decode_kernel"),
        (8.0, 15.0, "nvjet_hsh_128"),
        (9.0, 12.0, "Memcpy DtoD"),  # while the one before runs
        (20.0, 21.0, "add_norm_kernel"),
    ]
    found = bench.seconds_by_kind(launches)
    microseconds = {kind: round(1e6 * seconds, 6) for kind, seconds in found.items() if seconds}
    assert microseconds == {"attention": 10, "linear layers": 5, "norms": 1}


def test_the_kinds_of_kernels_are_known_by_their_names():
    """A kernel of ours that was renamed would be counted as "rest"."""
    files = [ROOT / "kernels.py", *(ROOT / "serving").glob("*.py")]
    source = "".join(path.read_text() for path in files)
    ours = re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    for part in itertools.chain(*bench.KINDS.values()):
        if part.endswith("_kernel"):
            assert any(part in name for name in ours), part
    kinds = {name: bench.kind_of(name) for name in ours}
    rest = {name for name, kind in kinds.items() if kind == "rest"}
    assert rest == {"order_kernel", "decode_inputs_kernel", "embed_kernel"}


def test_the_work_of_a_step():
    """Counted twice or not at all, a share of the machine's speed would mean nothing."""
    gpt = GPT(GPTConfig(vocab_size=65, context_length=16, n_layer=2, n_head=2, n_embd=32))
    with FlopCounterMode(display=False) as counter:
        gpt(torch.zeros(1, 5, dtype=torch.int64))  # all tokens see all, and have logits
    operations, read = bench.work_of_step(gpt, 5, contexts=7, pairs=25, sampled=5)
    assert operations == counter.get_total_flops()
    # fp32: the matrices, 12 C^2 in each block; and K, V of 7 tokens, 2 C in each layer
    assert read == 4 * (2 * 12 * 32**2 + 65 * 32) + 4 * 7 * (2 * 2 * 32)


PICTURES = {
    name: ["FILE"] * ("file" in signature(run).parameters)
    for name, run in bench.COMMANDS.items()
    if "out" in signature(run).parameters and name != "record"
}


def tracked_files() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (ROOT / "assets").iterdir() if path.is_file()}


def run_bench(monkeypatch, capsys, *argv) -> dict:
    """The line of JSON that `bench.py ARGV` ends with."""
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, argv)])
    bench.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_goes_where_git_does_not_look(name):
    """
    `bench.py memory` and `blockmap` wrote over the README's pictures: a reader's first try changed
    the repo.
    """
    path = bench.build_parser().parse_args([name, *PICTURES[name]]).out
    assert path == Path(f"out/{name}.png")
    assert "out/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", ["blockmap", "memory"])
def test_drawing_leaves_the_tracked_pictures_alone(name, monkeypatch, capsys, tmp_path):
    """
    The same bug, by what the commands do: each writes one file, below the folder it is run in.
    """
    monkeypatch.setattr(bench, "offline_workload", lambda: offline_workload(64))
    tracked = tracked_files()
    monkeypatch.chdir(tmp_path)
    assert run_bench(monkeypatch, capsys, name)["picture"] == f"out/{name}.png"
    (written,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == tmp_path / "out" / f"{name}.png" and written.read_bytes().startswith(
        b"\x89PNG"
    )
    assert tracked == tracked_files()


@pytest.mark.parametrize("path", ["/proc/no/picture.png", "picture.nonsense"])
def test_a_picture_that_cannot_be_written_costs_no_figures(path, monkeypatch, capsys, tmp_path):
    """A wrong --out was found when all was measured, and a traceback was all that came of it."""
    monkeypatch.chdir(tmp_path)
    result = run_bench(monkeypatch, capsys, "blockmap", "--out", path)
    assert result["preemptions"] > 0
    assert path in result["picture"] and "choose another --out" in result["picture"]


# --------------------------------------------------------------------------------------------------
# Every command once: its figures are of a toy, but it runs, and says what it promises to

SIZES = {"context_length": 128, "n_layer": 1, "n_head": 2, "n_embd": 32}


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """
    Few and short requests, each time measured once, and a model directory with its corpus, in
    tmp_path.
    """
    workload, median = bench.offline_workload, bench.median_seconds

    def small_workload(n=256, scale=1, *rest, **named):
        if scale == 1:  # without a model it takes no time
            return workload(n, scale, *rest, **named)
        return workload(4 if n == 256 else n, 4 * scale, *rest, **named)

    monkeypatch.setattr(bench, "offline_workload", small_workload)
    monkeypatch.setattr(
        bench, "median_seconds", lambda work, repeats, *setup: median(work, 1, *setup)
    )
    monkeypatch.setattr(bench, "read_bandwidth", lambda device="cpu": 1e9)
    monkeypatch.setitem(bench.MODELS, "10M", GPTConfig(65, **SIZES | {"context_length": 256}))
    monkeypatch.setitem(bench.MODELS, "1M", GPTConfig(65, **SIZES))
    monkeypatch.setitem(
        bench.MODELS, "gpt2-124M", GPTConfig(65, **SIZES | {"context_length": 1025})
    )
    text = (ROOT / "paged.py").read_text()
    tokenizer = train_bpe([text], 300)
    ids = tokenizer.encode(text)
    write_corpus(tmp_path, tokenizer, ids[:-500], ids[-500:])
    save_checkpoint(GPT(GPTConfig(tokenizer.vocab_size, **SIZES)), tmp_path)
    return tmp_path


COMMANDS_AND_FIGURES = {  # what is typed, and what must be in the answer
    "scheduler": ["1 requests, ms", "32 requests, ms", "256 requests, ms"],
    "attention --repeats 1": ["a layer, ms", "8 decodes at 1024, 12 heads of 64, ms"],
    "generate --repeats 1": ["floor, ms a step", "1 at once", "8 at once"],
    "quality --model DIR --data DIR": ["fp32", "bf16", "int8"],
    "engine --model DIR --seeds 3": [
        "start-up, s",
        "engine",
        "offline, seed 3",
        "1 at once",
        "32 at once",
    ],
    "equality --model DIR": [
        "tokens",
        "fp32, tokens unlike the dense model's",
        "bf16, share of fp32's tokens",
    ],
    "server --model DIR --streams 1 3 --client-processes 1 --slow-clients 1": [
        "1 streams",
        "3 streams, 1 slow",
    ],
    "overhead --model DIR": ["1 requests", "8 requests", "32 requests"],
    "batching --repeats 1 --out DIR/x.png": [
        "one by one",
        "static batches",
        "continuous",
        "picture",
    ],
    "memory --out DIR/x.png": ["slabs of 2048", "blocks of 4", "append a token at, us", "picture"],
    "phases --repeats 1 --out DIR/x.png": ["a prompt", "decodes", "picture"],
    "record preemption --out DIR/x.jsonl": ["lines", "KB"],
    "replay assets/preemption.jsonl --out DIR/x.png": ["preemptions", "seconds", "picture"],
    "blockmap --out DIR/x.png": ["preemptions", "hit tokens", "picture"],
}


def test_no_command_is_left_out():
    """`bench.py kernels` needs a GPU: see below; `page` has no figures, test_replay.py runs it."""
    tried = {command.split()[0] for command in COMMANDS_AND_FIGURES}
    assert tried | {"kernels", "page"} == set(bench.COMMANDS)


@pytest.mark.parametrize("command", bench.COMMANDS)
def test_every_command_has_help(command, capsys):
    """A bare % in a flag's help is a format to argparse: --help of `server` was a TypeError."""
    with pytest.raises(SystemExit) as end:
        bench.build_parser().parse_args([command, "--help"])
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS_AND_FIGURES)
def test_a_command_runs(command, toy, monkeypatch, capsys):
    """
    No test ran them: a name that had changed in another module was found by a reader, as a
    traceback.
    """
    result = run_bench(monkeypatch, capsys, *command.replace("DIR", str(toy)).split())
    figures = [result[name] for name in COMMANDS_AND_FIGURES[command]]
    assert None not in figures and result["bench"] == command.split()[0]
    if "equal answers" in str(result):
        counts = re.findall(r"'equal answers': '(\d+) of (\d+)'", str(result))
        assert counts and all(equal == count for equal, count in counts)
    assert result.get("fp32, tokens unlike the dense model's", 0) == 0
    if "picture" in result:
        assert Path(result["picture"]).stat().st_size > 1000


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="here is the GPU that `bench.py kernels` wants"
)
def test_without_a_gpu_the_kernels_have_no_figures(monkeypatch, capsys):
    with pytest.raises(
        SystemExit, match=r"there is none: on a CPU run `python bench.py attention`"
    ):
        run_bench(monkeypatch, capsys, "kernels")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("generate --repeats 0", "0 is too small, wanted at least 1"),
        ("server --streams 1 0", "0 is too small, wanted at least 1"),
        ("server --rate nan", "nan is too small, wanted at least 0"),
        ("engine --seeds -1", "-1 is too small, wanted at least 0"),
        ("batching --device tpu", "invalid choice: 'tpu'"),
    ],
)
def test_flags_out_of_range_are_refused_before_anything_is_measured(
    monkeypatch, capsys, command, why
):
    """--repeats 0 measured, and ended in "no median for empty data"."""
    monkeypatch.setattr(sys, "argv", ["bench.py", *command.split()])
    with pytest.raises(SystemExit):
        bench.main()
    assert why in capsys.readouterr().err
