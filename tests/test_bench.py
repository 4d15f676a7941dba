"""bench.py: workloads are what their names say, kernels are counted right, each command runs."""

import json
import math
import re
import shlex
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from test_data import ALONE

import bench
from assets import workloads
from assets.commands import build_parser, main
from assets.workloads import MODELS, offline_workload
from checkpoint import load_checkpoint, load_config, save_checkpoint
from families import hub_config
from model import GPT, GPTConfig
from training.corpus import load_corpus, train_bpe, write_corpus

ROOT = Path(__file__).parents[1]


def test_the_workload_is_the_one_that_others_measure():
    """With other lengths no figure could be compared."""
    work = offline_workload()
    assert workloads.num_tokens(work) == (142_827, 133_966)
    small = offline_workload(96, 8, 65)
    sizes = [(len(prompt), n) for prompt, n in small]
    assert sizes == [(len(prompt) // 8, n // 8) for prompt, n in work[:96]]
    assert {token for prompt, _ in small for token in prompt} == {*range(65)}


def test_kernels_that_overlap_count_once():
    """With programmatic dependent launch a kernel starts early, and waits for the previous one."""
    launches = [(0.0, 10.0, "attention_kernel"), (8.0, 15.0, "nvjet_hsh_128")]
    launches += [(9.0, 12.0, "Memcpy DtoD"), (20.0, 21.0, "add_norm_kernel")]
    seconds = bench.seconds_by_kind(launches)
    microseconds = {kind: round(1e6 * value, 6) for kind, value in seconds.items() if value}
    assert microseconds == {"attention": 10, "linear layers": 5, "norms": 1}


def test_kinds_of_kernels_go_by_their_names():
    """If one of our kernels were renamed, it would be counted as "rest"."""
    files = [ROOT / "kernels.py", *(ROOT / "ops").glob("*.py")]
    source = "".join(path.read_text() for path in files)
    ours = re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    rest = {name for name in ours if bench.kind_of(name) == "rest"}
    assert rest == {"order_kernel", "decode_inputs_kernel", "embed_kernel", "send_kernel"}


# --------------------------------------------------------------------------------------------------
# Every command once, with the figures of a toy


@pytest.fixture
def toy(monkeypatch, tmp_path) -> Path:
    """
    Return a model directory with its corpus, and make workloads small. Each is measured once, on a
    CPU, because on a GPU the first one would take all memory.
    """
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    workload, seconds = workloads.offline_workload, workloads.median_seconds

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
    write_corpus(tmp_path, [ids[:-500]], [ids[-500:]], tokenizer)
    torch.manual_seed(0)
    save_checkpoint(GPT(GPTConfig(tokenizer.vocab_size, 128, **sizes)), tmp_path)
    return tmp_path


@pytest.fixture
def run(toy, monkeypatch, capsys):
    """Return a function that runs a command with the toy, and returns its figures."""

    def run(command: str) -> dict:
        monkeypatch.setattr(
            sys, "argv", ["bench.py", *shlex.split(command.replace("DIR", str(toy)))]
        )
        main(bench.__doc__, bench.COMMANDS, bench.FLAGS)
        return json.loads(capsys.readouterr().out)

    return run


FIGURES = {  # of a command: its flags, and a name in its answer
    "scheduler": ("", "a step, ms"),
    "generate": ("", "8 x 64 in, 64 out"),
    "quality": ("--model DIR --data DIR", "int8"),
    "drafts": ("--model DIR", "code, greedy"),
    "grammar": ("--model DIR --repeats 1", "constrained, tok/s"),
    "engine": ("--model DIR", "32 concurrent"),
    "equality": ("--model DIR", "fp32, tokens unlike the dense model's"),
    "server": ("--model DIR --streams 3 --repeats 2", "3 streams"),
    "overhead": ("--model DIR", "floor, ms"),
    "choices": ("--model DIR", "choices, tok/s"),
    "train": (
        "--seeds 1 2 --goal 9 --recipe '--data=DIR --steps=20 --n_layer=1 --n_embd=16 "
        "--context_length=16 --batch_size=2 --device=cpu'",
        "s to goal",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_a_command_runs(name, run):
    """
    Previously a name that had changed in another module was only noticed by a reader, as a
    traceback.
    """
    flags, figure = FIGURES[name]
    result = run(f"{name} {flags}")
    assert result[figure] is not None
    assert result["bench"] == name
    for equal, count in re.findall(r"'equal answers': '(\d+) of (\d+)'", str(result)):
        assert equal == count


def test_the_floor_is_of_the_weights_as_they_are_kept(run, monkeypatch):
    """
    Would catch: one-byte integers compared with the floor of four bytes, which they would always
    beat.
    """
    monkeypatch.setattr(bench, "CASES", ())
    floors = [run(f"generate --quantize {kind}")["floor, ms"] for kind in ("none", "int8")]
    weights = sum(weight.numel() for weight in workloads.build_model("10M").parameters())
    assert floors == [round(4e-6 * weights, 3), round(1e-6 * weights, 3)]  # at 1 GB/s


LLAMA_CPP = """#!{python}
# stands in for a Python with llama_cpp, with the answers of our model of the file
import json, sys
sys.path[:0] = ["tests", "."]
import torch
from test_bench import read_gguf
torch.set_num_threads(1)
model = read_gguf(sys.argv[2])
print("ready", flush=True)
for line in sys.stdin:
    texts, n = json.loads(line)
    if n:
        result = model.generate(torch.tensor(texts), n)[:, -n:].tolist()
    else:
        logits = model(torch.tensor(texts))[0].log_softmax(-1)
        result = sum(logits[0, i, token].item() for i, token in enumerate(texts[0][1:]))
    print(json.dumps(result), flush=True)
"""


def read_gguf(path: str):
    """Return our model of a GGUF file, with its weights as transformers reads them."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"])
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(load_gguf_checkpoint(path, True, theirs)["tensors"], strict=False)
    theirs.tie_weights()
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return load_checkpoint(folder)


@pytest.fixture
def llama(toy, monkeypatch) -> Path:
    """Return a stand-in for a Python that has llama_cpp, with a Llama in the toy's directory."""
    pytest.importorskip("gguf")
    config = load_config(toy)
    shape = workloads.llama(
        config.vocab_size, n_layer=2, n_head=4, n_embd=64, n_kv_head=2, n_inner=96
    )
    shape.context_length = 1024
    monkeypatch.setitem(bench.MODELS, "tiny", shape)
    torch.manual_seed(0)
    model = GPT(shape)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:  # Q8_0 rounds nothing: whole numbers, the largest of each 32 is 127
            weight.data = (torch.randn_like(weight) * (64 if "c_attn" in name else 26)).round()
            weight.data = weight.data.clamp(-127, 127)
            weight.data[:, ::32] = torch.tensor(127.0).copysign(weight.data[:, ::32])
            weight.data /= 4 if "attn.c_proj" in name else 128  # attention outweighs the rest
    save_checkpoint(model, toy)
    python = toy / "python"
    python.write_text(LLAMA_CPP.format(python=sys.executable))
    python.chmod(0o755)
    return python


def test_llama_cpp_gets_the_same_model(llama, run):
    """
    Would catch: heads whose halves are not interleaved; a matrix under another's name; an epsilon
    or base that the file lacks.
    """
    result = run(f"quality --model DIR --data DIR --limit 300 --llama {llama}")
    assert result["llama.cpp's Q8_0"] == pytest.approx(result["fp32"], rel=1e-4)
    assert result["int8"] == pytest.approx(result["fp32"], rel=1e-2)


VLLM = """
# stands in for the package, with the answers of our model of the directory
import torch, params
from checkpoint import load_checkpoint
from engine.engine import Engine
torch.set_num_threads(1)
print("INFO: vLLM writes its log to stdout")
__version__ = "0.26.0"
def SamplingParams(detokenize, **fields):
    return params.SamplingParams(**fields)
class LLM:
    def __init__(self, directory, **options):
        self.engine = Engine(load_checkpoint(directory))
    def generate(self, prompts, params, use_tqdm):
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        answers = self.engine.generate(tokens, params, progress=use_tqdm)
        return [Output(answer) for answer in answers]
class Output:
    def __init__(self, tokens):
        self.token_ids = tuple(tokens)
        self.outputs = [self]
"""


def test_vllm_gets_the_same_work(run, toy, monkeypatch):
    """Would catch: its log taken for an answer; other weights; lengths in another order."""
    (toy / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", f"{toy}:{ROOT}")
    result = run(f"engine --model DIR --vllm {sys.executable}")
    assert result["vLLM"] == f"0.26.0, torch {torch.__version__}"
    for case, n in ("offline", 4), ("1 concurrent", 1), ("32 concurrent", 32):
        assert result[case]["vLLM"]["equal answers"] == f"{6 * n} of {6 * n}"
        assert result[case]["vLLM"]["tok/s"] > 0


def test_equality_with_a_short_context(toy, monkeypatch):
    """Previously a model whose context was shorter than 256 tokens was refused."""
    monkeypatch.setattr(bench, "offline_workload", partial(workloads.offline_workload, 4))
    result = bench.bench_equality(str(toy))
    assert result["tokens"] > 100
    assert result["fp32, tokens unlike the dense model's"] == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_can_be_saved_for_vllm(name):
    """`engine --model qwen3-0.6B --vllm` ended in a refusal, though README names the command."""
    hub_config(MODELS[name])


def test_a_python_that_is_not_there(run):
    with pytest.raises(SystemExit, match="'/no/python': give the path of a Python"):
        run("engine --model DIR --vllm /no/python")


DEATHS = {"echo no AMX >&2; kill -ILL $$": -4, "echo ready; read line; echo no AMX >&2; exit 3": 3}


@pytest.mark.parametrize("script", DEATHS)
def test_the_last_words_of_llama_cpp_are_shown(script, llama, run):
    """Previously the message was "Expecting value: line 1 column 1 (char 0)"."""
    llama.write_text(f"#!/bin/sh\n{script}")
    with pytest.raises(SystemExit, match=f"ended with status {DEATHS[script]}; .*: no AMX$"):
        run(f"quality --model DIR --data DIR --limit 300 --llama {llama}")


def test_quality_scores_each_token_once(llama, toy, run):
    """
    Would catch: a window's last token left out or counted twice; the bytes of another tokenizer.
    Previously a corpus with tokens that are not predicted, as in dialogues, was an OverflowError.
    """
    val = np.fromfile(toy / "val.bin", np.int32)
    np.concatenate([~val[:9], val[9:]]).tofile(toy / "val.bin")
    result = run("quality --model DIR --data DIR --limit 450")
    model = load_checkpoint(toy)
    corpus = load_corpus(str(toy), ALONE)
    tokens = val[:450].tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]))[0].log_softmax(-1)
    nats = -sum(logits[0, i, token].item() for i, token in enumerate(tokens[1:]))
    size = len(corpus.tokenizer.decode_bytes(tokens[1:]))
    assert result["fp32"] == pytest.approx(nats / math.log(2) / size, abs=2e-5)


def test_a_slow_server_too_gets_requests_at_seven_tenths_of_its_rate(toy, monkeypatch):
    """
    Previously the rate was rounded to tenths of a request per second: 0.124 to 0.1, and 0.04 to 0,
    with which all requests were sent together.
    """
    rates = []

    def measure_load(address, work, rate=0.0) -> dict:
        rates.append(rate)
        return {"s": 50.0}

    monkeypatch.setattr(bench, "measure_load", measure_load)
    monkeypatch.setattr(bench, "server", lambda model: nullcontext(["127.0.0.1", "1"]))
    result = bench.bench_server(str(toy), streams=(3,))
    assert rates == [0, 0, 0.7 * 3 / 50]
    assert [*result] == ["3 streams", "3 at 0.042/s"]


SIZES = {"cpu": (32, 512, 900, 65), "cuda": (256, 8192, 2048, 90)}


@pytest.mark.parametrize("device", SIZES)
def test_in_the_steps_that_are_measured_all_requests_decode(device, monkeypatch):
    """
    On a CPU, with a GPU's sizes. Previously the steps in which some requests decoded while others
    still had to begin were not counted. So if the context was short, requests ended in the steps
    that `overhead` measures, and otherwise some were preempted in the last ones.
    """
    n, token_budget, context_length, steps = SIZES[device]
    monkeypatch.setattr(bench, "DEVICE", device)
    monkeypatch.setattr("engine.sizing.CPU_SEQS", n)
    monkeypatch.setattr("engine.sizing.CPU_TOKENS", token_budget)
    config = GPTConfig(65, context_length, n_layer=1, n_head=1, n_embd=8)
    engine, num_requests, context = bench.engine_for_decodes(
        GPT(config).eval().requires_grad_(False), 900
    )
    workloads.let_decode(engine, num_requests, context)
    for _ in range(steps):
        engine.step()
    assert len(engine.scheduler.active) == n
    assert engine.counts()["preemptions"] == 0


def test_each_help_can_be_printed(capsys):
    """A bare % in a help text would be a TypeError."""
    for command in bench.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            build_parser("", bench.COMMANDS, bench.FLAGS).parse_args([command, "--help"])
        assert f"usage: {Path(sys.argv[0]).name} {command}" in capsys.readouterr().out
