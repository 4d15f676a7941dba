"""
train.py: what it learns from, that a run can be stopped, killed and resumed, and what it says.
"""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import serve
import train
from checkpoint import load_checkpoint
from model import GPT, TORCH, GPTConfig, Rope, WholeTexts, rotation
from tokenizer import load_tokenizer
from training import clock as run_clock
from training import machine as run_machine
from training import muon, report, samples
from training.corpus import char_tokenizer, read_corpus, train_bpe, write_corpus
from training.fast import training_ops

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "context_length": 32,
    "batch_size": 4,
    "warmup": 2,
    "dropout": 0.1,
}
SIZES |= {
    "dtype": "float32",
    "threads": 1,
    "device": "cpu",
    "eval_every": 5,
    "eval_tokens": 64,
    "sample_tokens": 4,
}
SIZES |= {"size": "tiny"}  # named, so that nothing is measured
TINY = [f"--{name}={value}" for name, value in SIZES.items()]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared folder: this repo's own sources in 300 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(path.read_text() for path in sorted(ROOT.glob("*.py")))
    tokenizer = train_bpe([text], 300)
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    write_corpus(folder, tokenizer, ids[:-1001], ids[-1001:])
    return folder


@pytest.fixture
def tiny(corpus, tmp_path) -> list[str]:
    """The flags of a run of milliseconds into tmp_path/out."""
    return [*TINY, "--data", str(corpus), "--out", str(tmp_path / "out")]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """A run with --device=cpu that is resumed without that flag would go on there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def leave_signals_alone():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def losses(out: Path) -> list[tuple]:
    """All that log.jsonl says, except how long it took."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [tuple((k, v) for k, v in line.items() if k != "tokens_per_second") for line in lines]


def assert_loads(out: Path):
    """All three ways to open the directory work, and its model is no wreck."""
    model, tokenizer = load_checkpoint(out), load_tokenizer(out)
    state = torch.load(out / "train_state.pt", "cpu", weights_only=True)
    assert model.config.vocab_size == tokenizer.vocab_size == 300
    assert model.config.eos_token_id == tokenizer.eos_token_id == 299
    assert all(w.isfinite().all() for w in [*model.state_dict().values(), *state["model"].values()])
    return state


# --------------------------------------------------------------------------------------------------
# The whole run


def test_a_run_learns_and_leaves_a_checkpoint(tiny, corpus, tmp_path, capsys):
    train.main([*tiny, "--steps", "40"])
    out = tmp_path / "out"
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "loss" in line] == list(range(1, 41))
    assert [line["step"] for line in log if "val_loss" in line] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert log[0]["loss"] == pytest.approx(
        math.log(300), abs=0.1
    )  # an untrained model knows nothing
    assert log[-1]["val_loss"] < log[0]["loss"] - 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert assert_loads(out)["step"] == 40
    printed = capsys.readouterr().out
    told = float(re.search(r"val loss: ([\d.]+)", printed)[1])
    assert told == pytest.approx(log[-1]["val_loss"], abs=1e-4)  # both are rounded
    held_out = load_tokenizer(out).decode_bytes(read_corpus(corpus, "val").tolist())
    bits = log[-1]["val_loss"] * 1001 / math.log(2) / len(held_out)
    assert log[-1]["bits_per_byte"] == pytest.approx(bits, abs=1e-4)
    assert f"bits per byte: model {bits:.3f}, gzip" in printed
    assert (
        f"held out: 1,001 tokens, {len(held_out):,} bytes, each scored once, in windows of 32"
        in printed
    )
    assert "held out: 1,001 tokens" in printed and "gzip -9" in printed and "xz -9" in printed


# between two evaluations, at one, and often
@pytest.mark.parametrize("stops", [(7,), (10,), (1, 2, 5, 19)], ids=["between", "at", "often"])
def test_a_stopped_run_resumes_to_the_losses_of_an_uninterrupted_one(
    tiny, tmp_path, monkeypatch, capsys, stops
):
    """To the bit, dropout included: batches and noise are functions of (seed, step)."""
    train.main([*tiny, "--steps", "20", "--out", str(tmp_path / "whole")])
    update, out = train.Run.update, tmp_path / "out"

    def update_then_terminate(self, *batch):
        result = update(self, *batch)
        if self.step in stops:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(train.Run, "update", update_then_terminate)
    lives = [[*tiny, "--steps", "20"], *[["--resume", "--out", str(out)] for _ in stops]]
    for flags, stop in zip(lives, stops, strict=False):
        train.main(flags)  # returns: exit status 0
        assert f"stopped and saved at step {stop}" in capsys.readouterr().out
        assert assert_loads(out)["step"] == stop
        with open(out / "log.jsonl", "a") as f:  # as a kill after the last save would leave it
            f.write('{"step": 99, "loss": 1.0}\n{"step"')
    train.main(lives[-1])
    # a run that is asked to stop does not evaluate before it does
    evaluations = [line for line in losses(tmp_path / "whole") if "loss" not in dict(line)]
    left_out = [line for line in evaluations if dict(line)["step"] in stops]
    assert losses(out) == [line for line in losses(tmp_path / "whole") if line not in left_out]
    whole, resumed = load_checkpoint(tmp_path / "whole"), load_checkpoint(out)
    assert all(torch.equal(w, resumed.state_dict()[name]) for name, w in whole.state_dict().items())


def test_resuming_a_finished_run_only_reports_again(tiny, tmp_path, capsys):
    train.main([*tiny, "--steps", "5"])
    before = losses(tmp_path / "out")
    train.main(["--resume", "--out", str(tmp_path / "out")])
    assert losses(tmp_path / "out") == before
    assert capsys.readouterr().out.count("val loss:") == 2


def test_a_state_from_before_the_head_had_a_name_is_resumed(tiny, tmp_path, capsys):
    """The head's weights are those of the embedding; older states name only these."""
    train.main([*tiny, "--steps", "5"])
    path = tmp_path / "out" / "train_state.pt"
    state = torch.load(path, weights_only=True)
    assert torch.equal(state["model"].pop("lm_head.weight"), state["model"]["wte.weight"])
    torch.save(state, path)
    before = load_checkpoint(tmp_path / "out").state_dict()
    train.main(["--resume", "--out", str(tmp_path / "out")])
    after = load_checkpoint(tmp_path / "out").state_dict()
    assert all(torch.equal(w, after[name]) for name, w in before.items())


LLAMA = ["--arch=llama", "--n_embd=48", "--n_head=3"]


def test_a_llama_is_trained_resumed_and_opens_in_transformers_as_one(tiny, tmp_path, capsys):
    """With dropout, which no file of a Llama says: it was refused after the first hundred steps."""
    flags = [*tiny, *LLAMA, "--steps=20"]
    train.main([*flags, "--out", str(tmp_path / "whole")])
    assert "model:  llama, 0." in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        update = train.Run.update

        def stop_after_seven(self, *batch):
            if self.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return update(self, *batch)

        patch.setattr(train.Run, "update", stop_after_seven)
        train.main(flags)
    out = tmp_path / "out"
    train.main(["--resume", "--out", str(out)])
    assert (out / "loss.png").is_file() and losses(out) == losses(tmp_path / "whole")
    assert losses(out)[-1][1][1] < math.log(300) - 1  # held-out nats a token: it has learnt
    saved = json.loads((out / "config.json").read_text())
    told = {name: saved[name] for name in ("model_type", "architectures", "hidden_act")}
    assert told == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
    }
    assert saved["intermediate_size"] == 128 and saved["tie_word_embeddings"] is True
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert isinstance(theirs, transformers.LlamaForCausalLM)
    tokens = torch.randint(300, (2, 32))
    with torch.no_grad():
        logits, _ = load_checkpoint(out)(tokens)
        assert (theirs(tokens).logits - logits).abs().max() < 1e-4


def test_a_state_from_before_there_were_architectures_is_of_gpt2(tiny, tmp_path):
    train.main([*tiny, "--arch=gpt2", "--steps=5"])
    path = tmp_path / "out" / "train_state.pt"
    state = torch.load(path, weights_only=True)
    assert state["args"].pop("arch") == "gpt2"
    torch.save(state, path)
    train.main(["--resume", "--out", str(tmp_path / "out")])
    assert load_checkpoint(tmp_path / "out").config.norm == "layer"


def test_a_loss_that_is_no_number_stops_with_the_last_good_checkpoint(tiny, tmp_path, monkeypatch):
    update = train.Run.update

    def poisoned(self, *batch):
        result = update(self, *batch)
        return result * math.nan if self.step == 8 else result

    monkeypatch.setattr(train.Run, "update", poisoned)
    with pytest.raises(
        SystemExit, match=r"step 8: loss nan.*checkpoint of step 5 is in .*lower --matrix_lr"
    ) as error:
        train.main([*tiny, "--steps", "20"])
    assert error.value.code not in (0, None)
    with pytest.raises(SystemExit, match=r"step 8: .* checkpoint of step 5 is in"):
        train.main(["--resume", "--out", str(tmp_path / "out")])
    assert assert_loads(tmp_path / "out")["step"] == 5


def test_a_model_that_a_step_broke_stops_before_it_is_sampled_or_saved(tiny, tmp_path, monkeypatch):
    """
    The loss of a step is known before its update breaks the weights. Sampling from them raised an
    error of torch, with a traceback.
    """
    update = train.Run.update

    def breaking(self, *batch):
        result = update(self, *batch)
        if self.step == 10:
            with torch.no_grad():
                self.model.wte.weight.fill_(math.nan)
        return result

    monkeypatch.setattr(train.Run, "update", breaking)
    with pytest.raises(SystemExit, match=r"^step 10: held-out loss nan.*checkpoint of step 5 is"):
        train.main([*tiny, "--steps", "20"])
    assert assert_loads(tmp_path / "out")["step"] == 5
    with pytest.raises(SystemExit, match=r"^held-out loss nan.*lower --matrix_lr"):
        train.main([*tiny, "--overwrite", "--steps", "10"])


def test_a_full_disk_ends_the_run_with_a_message_and_keeps_what_was_saved(
    tiny, tmp_path, monkeypatch
):
    """It was a traceback, of torch's about an unexpected position, and half a file stayed."""
    save = torch.save
    saved = []

    def full(state, path):
        save(state, path)
        saved.append(state["step"])
        if len(saved) == 2:
            raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match=r"out cannot be written .* MiB are free there: make room"):
        train.main([*tiny, "--steps", "20"])
    assert assert_loads(out)["step"] == 5
    assert not [*out.glob("*.tmp")]
    (out / "log.jsonl").unlink()
    (out / "log.jsonl").mkdir()
    with pytest.raises(SystemExit, match=r"out cannot be written .*directory"):
        train.main(["--resume", "--out", str(out)])


def test_a_gradient_that_is_no_number_stops_too(tiny, corpus):
    """
    The loss of its step is still one. Of several steps that are looked at together, the first bad
    one is named.
    """
    run = train.Run(train.parse_args(tiny), train.load_corpus(str(corpus), MACHINE), MACHINE)
    run.out.mkdir()
    run.step = 30
    run.record_steps([[1.0, 2.0], [1e30, 0.0]], 1.0)
    for bad in (math.nan, math.inf):
        with pytest.raises(SystemExit, match=f"^step 29: loss 1.0, gradient norm {bad}: stopped"):
            run.record_steps([[1.0, 1.0], [1.0, bad], [bad, 1.0]], 1.0)


def test_a_learning_rate_that_explodes_is_caught(tiny, tmp_path):
    """Nothing patched: the real thing, before anything was saved."""
    with pytest.raises(SystemExit, match=r"gradient norm .* stopped, nothing is saved yet"):
        train.main([*tiny, "--steps", "20", "--vector_lr", "1e30", "--eval_every", "20"])
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_directory_with_a_model_is_not_overwritten_by_accident(tiny, tmp_path):
    train.main([*tiny, "--steps", "2"])
    out = tmp_path / "out"
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(
        SystemExit, match="--resume continues it, --overwrite starts again, --out names another"
    ):
        train.main([*tiny, "--steps", "2"])
    assert (out / "model.safetensors").read_bytes() == before
    train.main([*tiny, "--steps", "2", "--overwrite", "--seed", "7", "--n_embd", "32"])
    assert assert_loads(out)["args"]["seed"] == 7 and load_checkpoint(out).config.n_embd == 32


@pytest.mark.parametrize(
    ("parse_args", "default"),
    [(serve.parse_args, "(default: 8000)"), (train.parse_args, "(default: 0.0)")],
)
def test_help_names_only_defaults_that_say_something(parse_args, default, capsys):
    """
    Beside --no-graphs stood "(default: True)", as if graphs were off, and beside 20 flags
    "(default: None)".
    """
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    told = capsys.readouterr().out
    assert default in told
    assert not re.search(r"\(default:\s+(None|True|False|\[\])\)", told)


MISTAKES = {
    "there is no such corpus": (
        ["--data", "typo"],
        "--data typo: .* has neither meta.json nor prepare.py",
    ),
    "an impossible model": (["--n_head", "3"], "n_embd 16 is not a multiple of n_head 3"),
    "too long a context": (
        ["--context_length", "1000000"],
        "training tokens are too few for windows of 1000000",
    ),
}


@pytest.mark.parametrize(("flags", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistaken_flag_beside_overwrite_deletes_nothing(tiny, tmp_path, flags, message):
    """
    `--overwrite --data TYPO` deleted the trained model, and then said that there is no such corpus.
    """
    train.main([*tiny, "--steps", "2"])
    with pytest.raises(SystemExit, match=message):
        train.main([*tiny, "--steps", "2", "--overwrite", *flags])
    assert assert_loads(tmp_path / "out")["step"] == 2


def test_minutes_end_the_run_in_time(tiny, tmp_path):
    """
    Four seconds of them are for what follows the last step; the learning rate reaches its end with
    the clock.
    """
    train.main([*tiny, "--steps", "1"])  # the first step in a process loads more of torch
    started = time.perf_counter()
    train.main([*tiny, "--minutes", "0.08", "--overwrite"])
    assert 0.5 < time.perf_counter() - started < 60 * 0.08 + 30  # a unit wrong is ten times as long
    state = assert_loads(tmp_path / "out")
    assert state["share"] == 1 and state["step"] > 5
    assert all(
        group["lr"] < 0.01
        for optimizer in state["optimizers"]
        for group in optimizer["param_groups"]
    )


def test_a_slow_first_step_does_not_end_the_run(tiny, tmp_path, monkeypatch):
    """
    It allocates, or compiles. The time for what follows the last step was reckoned from it, was
    more than there was, and the run ended untrained after it.
    """
    clock, update = Clock(), train.Run.update

    def timed_update(self, *batch):
        clock.now += 1.0 if self.step else 20.0
        return update(self, *batch)

    replace_time(monkeypatch, clock)
    monkeypatch.setattr(train.Run, "update", timed_update)
    train.main([*tiny, "--minutes", "1"])
    # of 60 s the first step takes 20 and what follows the last 12
    assert 26 <= assert_loads(tmp_path / "out")["step"] <= 30


def test_the_clock_keeps_time_for_what_follows_the_last_step(tiny, corpus):
    args = train.parse_args(tiny)
    machine = train.init_process(args)
    run = train.Run(args, train.load_corpus(str(corpus), machine), machine)
    # Batches of 4 x 32 tokens, each a forward pass of 0.4 steps: of 1,001 held-out tokens, and of
    # 16 samples that grow from 8 tokens by 8. And 4 seconds for the rest.
    assert run_clock.closing_seconds(run, step_seconds=2.0) == pytest.approx(
        0.4 * 2.0 * (1001 + 16 * 8 * 12) / 128 + 4
    )


def test_runs_without_the_optional_packages(tiny, tmp_path, monkeypatch, capsys):
    for name in ("matplotlib", "matplotlib.figure", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    train.main([*tiny, "--steps", "5"])
    printed = capsys.readouterr().out
    assert "no loss.png: matplotlib is not installed" in printed
    assert_loads(tmp_path / "out")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n_layers", "3"], "unrecognized arguments: --n_layers"),
        (["--preset", "gpt5"], "invalid choice: 'gpt5'"),
        (["--resume", "--steps", "9", "--seed=1"], "leave out --seed, --steps"),
        (["--eval_every", "0"], "argument --eval_every: 0 is too small, wanted at least 1"),
        (["--seed", "-1"], "argument --seed: -1 is too small, wanted at least 0"),
        (["--seed", str(2**70)], "argument --seed: 1180591620717411303424 is too large"),
        (["--threads", "9" * 20], "argument --threads: 99999999999999999999 is too large"),
        (["--decay", "0"], "argument --decay: 0 is too small"),
        (["--momentum", "1"], "argument --momentum: 1 is too large, wanted less than 1"),
        (["--matrix_lr", "nan"], "argument --matrix_lr: nan is too small"),
        (["--clip", "-1"], "argument --clip: -1 is too small, wanted at least 0"),
        (["--device", "x"], "--device x: no such device, there is cpu"),
        (["--device", "meta"], "--device meta: no such device, there is cpu"),
        (["--device", "cuda"], "--device cuda:0: the number of GPUs here is 0"),
        (["--data", "nowhere"], "there is shakespeare_char, stdlib"),
        (["--size", "huge"], "argument --size: invalid choice: 'huge' (choose from "),
        (["--preset", "gpt2-124M"], "--size is for the preset stdlib, gpt2-124M has one size"),
        (["--n_head", "3"], "n_embd 16 is not a multiple of n_head 3"),
        (["--arch=llama", "--n_head=1", "--n_embd=15"], "head_size 15 is odd: rotary positions"),
        (["--arch=mamba"], "argument --arch: invalid choice: 'mamba' (choose from "),
        (
            ["--arch=llama", "--bias"],
            "--bias: Llama has no biases, leave it out or take --arch gpt2",
        ),
        (["--context_length", "1000000"], "too few for windows of 1000000"),
    ],
)
def test_mistakes_get_a_message(tiny, flags, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    flags = flags if "--resume" in flags else [*tiny, "--steps", "2", *flags]
    with pytest.raises(SystemExit) as error:
        train.main(flags)
    assert error.value.code not in (0, None)
    assert message in str(error.value) + capsys.readouterr().err


def test_nothing_to_resume(tmp_path):
    with pytest.raises(SystemExit, match="nothing to resume in"):
        train.main(["--resume", "--out", str(tmp_path)])
    (tmp_path / "train_state.pt").write_bytes(b"torn")
    with pytest.raises(
        SystemExit, match=r"train_state\.pt cannot be read .*: start again with --overwrite"
    ):
        train.main(["--resume", "--out", str(tmp_path)])
    torch.save(
        {"step": tmp_path}, tmp_path / "train_state.pt"
    )  # whose unpickling could run anything
    with pytest.raises(SystemExit, match=r"train_state\.pt cannot be read"):
        train.main(["--resume", "--out", str(tmp_path)])


def test_presets_fill_in_and_flags_win():
    args = train.parse_args(["--preset", "gpt2-124M", "--n_layer", "2", "--device", "cpu"])
    assert (args.n_layer, args.n_embd, args.data, args.out) == (
        2,
        768,
        "stdlib_gpt2",
        "out/gpt2-124M",
    )
    assert (
        train.parse_args(["--preset", "gpt2-124M", "--device", "cpu", "--minutes", "1"]).steps
        is None
    )
    assert train.parse_args([]).out == "out/stdlib"
    args = train.parse_args(["--size", "tiny", "--n_embd", "32"])
    assert (args.n_layer, args.n_embd, args.matrix_lr) == (2, 32, 0.012)
    parser = train.build_parser()
    assert all(action.help for action in parser._actions)
    knobs = {action.dest for action in parser._actions}
    assert all(
        set(preset) <= knobs for sizes in train.PRESETS.values() for preset in sizes.values()
    )


def test_a_gpu_gets_the_recipe_of_a_gpu_unless_a_size_is_named():
    args = train.parse_args(["--device=cuda"])
    assert (args.n_layer, args.n_embd, args.batch_size, args.steps, args.dropout) == (
        6,
        384,
        64,
        1500,
        0.1,
    )
    assert (args.arch, args.activation) == ("gpt2", "relu2")  # what it was measured with
    args = train.parse_args(["--device=cuda", "--preset=shakespeare_char", "--dropout=0.3"])
    assert args.arch == "gpt2"
    assert (args.data, args.n_embd, args.dropout, args.out) == (
        "shakespeare_char",
        384,
        0.3,
        "out/shakespeare_char",
    )
    args = train.parse_args(["--device=cuda", "--size=small"])
    assert (args.size, args.n_layer, args.n_embd, args.steps, args.dropout) == (
        "small",
        2,
        128,
        None,
        0.0,
    )


def test_every_preset_is_there_as_a_llama(corpus):
    """GPT-2's biases and its activation are of GPT-2 alone; what is typed counts."""
    loaded = train.load_corpus(str(corpus), MACHINE)
    for device in ("cpu", "cuda"):
        for preset in train.PRESETS:
            flags = [f"--device={device}", f"--preset={preset}", "--arch=llama", "--n_layer=1"]
            config = train.Run(train.parse_args(flags), loaded, MACHINE).model.config
            inner = {128: 344, 256: 680, 384: 1024, 768: 2048}[config.n_embd]
            assert (config.norm, config.activation, config.gated) == ("rms", "silu", True)
            assert (config.n_inner, config.bias, config.tied) == (inner, False, True)
    assert train.parse_args(["--device=cpu", "--arch=gpt2"]).activation == "relu2"
    assert train.parse_args(["--arch=llama", "--activation=relu2"]).activation == "relu2"
    assert train.parse_args(["--preset=gpt2-124M", "--arch=gpt2"]).activation == "gelu_new"


def test_minutes_and_steps_that_are_named_hold():
    args = train.parse_args(["--size=tiny", "--minutes=5"])
    assert (args.minutes, args.max_minutes, args.steps) == (5, 5, None)
    args = train.parse_args(["--size=tiny", "--minutes=5", "--max_minutes=6"])
    assert (args.minutes, args.max_minutes) == (5, 6)
    assert train.parse_args(["--device=cuda", "--minutes=5", "--steps=7"]).steps == 7
    assert train.parse_args(["--device=cuda", "--max_minutes=5"]).steps == 1500


def test_what_a_resumed_run_may_change(capsys):
    args = train.parse_args(
        ["--resume", "--out=x", "--device=cpu", "--threads=3", "--compile", "--preset=stdlib"]
    )
    assert (args.out, args.device, args.threads, args.compile) == ("x", "cpu", 3, True)
    actions = {
        flag: action
        for action in train.build_parser()._actions
        for flag in action.option_strings
        if action.dest not in train.RESUMABLE
    }
    for flag in sorted(set(actions) - {"-h", "--help", "--size"}):
        number = "0.5" if flag in ("--momentum", "--beta2") else "1"  # these are below 1
        value = [] if actions[flag].nargs == 0 else [number]
        with pytest.raises(SystemExit):
            train.parse_args(["--resume", flag, *value])
        assert "leave out" in capsys.readouterr().err or actions[flag].choices


# Each was tuned or measured, and README's figures are of these. What changes here is to be measured
# again.
DEFAULTS = """
    preset stdlib, data stdlib, resume False, overwrite False, arch llama,
    n_layer 4, n_head 2, n_embd 256, context_length 256, activation silu, bias False, dropout 0.0,
    minutes 2.25, max_minutes 2.25, least_steps 1, batch_size 8, matrix_lr 0.02, vector_lr 0.004,
    momentum 0.95, beta2 0.95, weight_decay 0.0, warmup 10, decay 0.8, clip 1.0, seed 1337,
    eval_every 100, eval_tokens 16384, sample_tokens 64
"""
CHANGES = {
    ("--size=tiny",): "n_layer 2, n_head 1, n_embd 64, least_steps 400",
    ("--size=small",): "n_layer 2, n_embd 128, least_steps 420",
    ("--size=medium",): "n_layer 3, n_embd 128, least_steps 1050",
    ("--size=large",): "n_head 4, context_length 256, batch_size 8, least_steps 2500",
    (
        "--preset=shakespeare_char",
    ): "n_layer 3, n_embd 128, context_length 128, batch_size 16, data shakespeare_char, "
    "arch gpt2, activation relu2",
    (
        "--preset=gpt2-124M",
    ): """data stdlib_gpt2, n_layer 12, n_head 12, n_embd 768, context_length 1024, bias True,
        activation gelu_new, arch gpt2, batch_size 32, steps 2000,
        matrix_lr 0.01, vector_lr 0.001""",
}
OF_ALL_SIZES = "batch_size 16, context_length 128, matrix_lr 0.012, vector_lr 0.02, "
OF_ALL_SIZES += "momentum 0.9, beta2 0.99, decay 0.6, "
OF_ALL_SIZES += "minutes 2.35, max_minutes 3.05, eval_every 200, "


def settings(text: str) -> dict[str, str]:
    return dict(pair.split() for pair in text.split(","))


@pytest.mark.parametrize("flags", [(), *CHANGES], ids=str)
def test_settings_are_those_that_were_measured(flags):
    expected = settings(DEFAULTS)
    if flags:
        name = flags[0].partition("=")
        expected |= settings((OF_ALL_SIZES if name[0] == "--size" else "") + CHANGES[flags]) | {
            name[0][2:]: name[2]
        }
    args = vars(train.parse_args(["--device=cpu", *flags]))
    given = {name: str(value) for name, value in args.items() if value is not None}
    assert given == expected | {"device": "cpu", "out": f"out/{expected['preset']}"}


# --------------------------------------------------------------------------------------------------
# The choice of a size, and the clock


class Clock:
    """A clock that only a training step moves."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


def replace_time(monkeypatch, clock: Clock):
    for module in (train, run_clock, run_machine):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def measured(monkeypatch):
    """
    Pretend what steps of the probe take: {(dtype, threads): seconds}. Holds what was asked for, in
    order.
    """
    asked = []

    def pretend(seconds: dict):
        def time_step(args, process, make_run, dtype, threads, to_beat=math.inf):
            asked.append((dtype, threads))
            return seconds[dtype, threads]

        monkeypatch.setattr(run_machine, "time_step", time_step)
        monkeypatch.setattr(torch, "get_num_threads", lambda: max(n for _, n in seconds))
        monkeypatch.setattr(torch, "set_num_threads", lambda n: setattr(pretend, "threads", n))
        return asked

    return pretend


def fit(flags: list[str], corpus: Path, seconds_ago: float = 0.0):
    argv = ["--device", "cpu", "--data", str(corpus), *flags]
    return fit_args(train.parse_args(argv), argv, seconds_ago)


def fit_args(args, argv: list[str], seconds_ago: float = 0.0):
    started = time.perf_counter() - seconds_ago
    with_size = partial(train.parse_args, argv)
    return train.fit_to_machine(args, MACHINE, started, None, with_size)


@pytest.mark.parametrize(
    ("seconds", "size", "dtype", "threads"),
    [
        (
            {("float32", 2): 0.15, ("float32", 1): 0.28, ("bfloat16", 2): 0.90},
            "small",
            "float32",
            2,
        ),  # AVX2
        (
            {("float32", 2): 0.10, ("float32", 1): 0.19, ("bfloat16", 2): 0.07},
            "medium",
            "bfloat16",
            2,
        ),  # AMX
        (
            {("float32", 2): 3.70, ("float32", 1): 0.25, ("bfloat16", 1): 0.90},
            "small",
            "float32",
            1,
        ),  # a busy core
        ({("float32", 2): 9.00, ("float32", 1): 5.00, ("bfloat16", 1): 9.00}, "tiny", "float32", 1),
    ],
)
def test_what_the_machine_does_fastest_is_chosen(measured, corpus, seconds, size, dtype, threads):
    asked = measured(seconds)
    args, machine = fit([], corpus)
    assert (args.size, args.dtype, machine.dtype) == (size, dtype, getattr(torch, dtype))
    assert set(asked) == set(seconds)  # bfloat16 is timed with the better number of threads
    assert (
        args.n_embd == train.SIZES[size].n_embd
        and args.least_steps == train.SIZES[size].least_steps
    )
    assert measured.threads == threads
    # the default minutes but for four seconds at the end, and twenty steps' time for looking at the
    # model
    chosen, step = train.SIZES[size], min(seconds.values())
    expected = chosen.expected("llama", (60 * 2.25 - 4 - 20 * step) / (chosen.cost * step))
    assert args.expected == (expected and pytest.approx(expected, abs=1e-3))


def test_time_that_went_by_before_the_first_step_is_not_there_for_steps(measured, corpus):
    measured({("float32", 1): 0.08})
    flags = ["--dtype=float32", "--arch=gpt2"]
    chosen = [fit(flags, corpus, seconds_ago)[0] for seconds_ago in (0, 80, 100)]
    assert [args.size for args in chosen] == ["medium", "small", "tiny"]
    assert chosen[0].expected < chosen[1].expected < chosen[2].expected


def test_flags_leave_less_to_measure(measured, corpus):
    asked = measured(
        {("float32", 2): 0.15, ("float32", 1): 0.28, ("bfloat16", 2): 0.07, ("bfloat16", 1): 0.1}
    )
    for flags, timed in (
        (["--threads=2"], [("float32", 2), ("bfloat16", 2)]),
        (["--dtype=bfloat16"], [("bfloat16", 2), ("bfloat16", 1)]),
        (["--dtype=float32", "--threads=2"], [("float32", 2)]),
        (["--dtype=float32", "--threads=2", "--size=tiny"], []),
        (["--size=tiny", "--dtype=float32"], [("float32", 2), ("float32", 1)]),
    ):
        asked.clear()
        args, machine = fit(flags, corpus)
        assert asked == timed
        if timed:
            assert machine.dtype == getattr(torch, args.dtype) and args.dtype == min(timed)[0]


def test_all_processes_choose_the_same_size(measured, corpus, monkeypatch):
    """
    Each looked at its own clock: near a size's limit torchrun's processes could train models of
    different shapes.
    """
    measured({("float32", 2): 0.10, ("float32", 1): 0.19, ("bfloat16", 2): 0.07})
    monkeypatch.setattr(
        train.Process, "mean", lambda machine, seconds: seconds + 120
    )  # the others began long ago
    assert fit([], corpus)[0].size == "tiny"


def test_flags_win_over_the_chosen_size(measured, corpus):
    measured({("float32", 2): 0.15, ("float32", 1): 0.28})
    args, _ = fit(["--n_embd", "64", "--dtype", "float32", "--minutes", "2.3"], corpus)
    assert (args.size, args.n_layer, args.n_embd) == ("small", 2, 64)
    assert args.max_minutes == 2.3  # minutes that the user names are not stretched


def test_a_named_size_is_taken_on_any_machine():
    args = train.parse_args(["--size", "large", "--batch_size", "4"])
    assert (args.size, args.n_layer, args.context_length, args.batch_size, args.steps) == (
        "large",
        4,
        256,
        4,
        None,
    )
    assert args.max_minutes > args.minutes


def test_other_presets_keep_their_recipe(measured, corpus):
    """Only the dtype and the threads are measured for them."""
    measured({("float32", 2): 0.15, ("float32", 1): 0.28, ("bfloat16", 2): 0.9})
    args, _ = fit(["--preset", "shakespeare_char"], corpus)
    assert (args.size, args.n_layer, args.n_embd, args.matrix_lr, args.momentum) == (
        None,
        3,
        128,
        0.02,
        0.95,
    )
    assert (args.minutes, args.max_minutes, args.dtype) == (2.25, 2.25, "float32")


@pytest.mark.parametrize(("to_beat", "steps"), [(math.inf, 2), (0.4, 2), (0.3, 1)])
def test_a_step_is_timed_after_another_unless_that_was_hopeless(
    tiny, corpus, monkeypatch, to_beat, steps
):
    """The first step allocates. Where bfloat16 is emulated, two of its steps would take seconds."""
    clock, update, taken = Clock(), train.Run.update, []

    def timed_update(self, module, x, y):
        clock.now += 1.0
        config = self.model.config
        taken.append((self.process.dtype, tuple(x.shape), config.n_embd, config.norm))
        return update(self, module, x, y)

    replace_time(monkeypatch, clock)
    monkeypatch.setattr(train.Run, "update", timed_update)
    monkeypatch.setitem(train.SIZES, "small", train.SIZES["tiny"])  # less to compute
    loaded = train.load_corpus(str(corpus), MACHINE)
    make_run = partial(train.Run, corpus=loaded)
    for arch, norm in (("llama", "rms"), ("gpt2", "layer")):  # of what is to be trained
        taken.clear()
        args = train.parse_args([*tiny, f"--arch={arch}"])
        assert run_machine.time_step(args, MACHINE, make_run, "bfloat16", 1, to_beat) == 1.0
        assert taken == [(torch.bfloat16, (16, 128), 64, norm)] * steps


def test_the_chosen_size_is_stored_and_resumed(tiny, tmp_path, monkeypatch, measured, capsys):
    """
    On another machine, or a busier one, a resumed run would measure another size: that of the
    directory stays.
    """
    asked = measured({("float32", 1): 0.15})
    flags = [flag for flag in tiny if not flag.startswith("--size")]
    update = train.Run.update

    def update_then_terminate(self, *batch):
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "update", update_then_terminate)
        train.main([*flags, "--minutes", "2.35"])
    assert asked == [("float32", 1)]
    first = capsys.readouterr().out
    assert "size:   small (--size names one of tiny, small, medium, large)\n" in first
    assert "run:    2 min 21 s, 4 x 32 tokens a step" in first and "expect: about 1.4" in first
    measured({("float32", 1): 60.0})
    saved = torch.load(tmp_path / "out" / "train_state.pt", weights_only=True)["args"]
    monkeypatch.setattr(
        train, "train", lambda *run: False
    )  # what it would do is told before it begins
    train.main(["--resume", "--out", str(tmp_path / "out")])
    resumed = capsys.readouterr().out
    assert "size:   small" in resumed and "run:    2 min 21 s, from step 4, " in resumed
    assert asked == [("float32", 1)]
    assert (
        saved["size"] == "small" and 1.4 < saved["expected"] < 1.6 and saved["least_steps"] == 420
    )


def test_how_long_a_busy_machine_may_take_is_told(tiny, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda *run: False)
    train.main(tiny)
    assert (
        "run:    2 min 21 s, up to 3 min 3 s if the machine becomes busy, 4 x 32 tokens"
        in capsys.readouterr().out
    )


def test_a_resumed_run_from_before_there_were_sizes_keeps_its_shape(measured, corpus):
    """
    Its directory names no size: to measure one now would build another model than the one that is
    saved.
    """
    measured({("float32", 2): 0.15, ("float32", 1): 0.28})
    argv = ["--resume", "--device", "cpu"]
    args = train.parse_args(argv)
    args.dtype = "float32"  # of the directory
    args, _ = fit_args(args, argv)
    assert (args.size, args.n_layer, args.n_embd) == (None, 4, 256)


def test_a_resumed_run_expects_what_it_expected(measured, corpus):
    """What is measured now, of threads, is of what is left."""
    measured({("float32", 2): 0.15, ("float32", 1): 0.28})
    argv = ["--resume", "--device", "cpu"]
    args = train.parse_args(argv)
    args.size, args.dtype, args.expected = "small", "float32", 1.234
    args, _ = fit_args(args, argv)
    assert (args.size, args.expected, measured.threads) == ("small", 1.234, 2)


@pytest.mark.parametrize(
    ("step_seconds", "least_steps", "ends", "rate"),
    [
        (lambda step: 1.0, 20, 57, 1 / 56 / 0.6),  # quiet: as planned
        (lambda step: 1.0 if step < 10 else 2.5, 32, 65, 0.0561),  # busy: until 32 steps are done
        (
            lambda step: 1.0 if step < 10 else 20.0,
            30,
            70,
            0.3806,
        ),  # too busy: to the limit, less than a step beyond
    ],
)
def test_a_busy_machine_stretches_the_run_within_its_limit(
    tiny, tmp_path, monkeypatch, step_seconds, least_steps, ends, rate
):
    """
    Before, a run ended after its minutes whatever it had learnt; the learning rate reaches its end
    all the same.
    """
    clock, update = Clock(), train.Run.update

    def timed_update(self, *batch):
        clock.now += step_seconds(self.step)
        return update(self, *batch)

    replace_time(monkeypatch, clock)
    monkeypatch.setattr(train.Run, "update", timed_update)
    monkeypatch.setattr(run_clock, "closing_seconds", lambda run, seconds: 3.0)  # of 60 and of 72
    flags = [
        "--minutes",
        "1",
        "--max_minutes",
        "1.2",
        "--least_steps",
        str(least_steps),
        "--eval_every",
        "1000",
    ]
    train.main([*tiny, *flags])
    assert clock.now - 1000 == ends
    state = assert_loads(tmp_path / "out")
    assert state["share"] == 1
    last = [group["lr"] for optimizer in state["optimizers"] for group in optimizer["param_groups"]]
    assert max(last) / 0.02 == pytest.approx(rate, rel=1e-3)


@pytest.fixture
def seconds(monkeypatch):
    """
    A clock on which a training step takes a second and nothing else any time; and the steps taken:
    (share, rate).
    """
    clock, update = Clock(), train.Run.update

    def timed_update(self, *batch):
        share = self.share
        result = update(self, *batch)
        clock.now += 1.0
        rate = self.optimizers[0].param_groups[0]["lr"]
        clock.steps.append((share, rate / self.args.matrix_lr))
        if self.step in clock.stops:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    clock.steps, clock.stops = [], ()
    replace_time(monkeypatch, clock)
    monkeypatch.setattr(train.Run, "update", timed_update)
    return clock


def shares(begin: float, left: float) -> list[float]:
    """
    The share of a timed run that is done before each of its steps, of a second each, if it goes on
    from `begin` with so many seconds left. The first step does not count, for it may be slow; then
    each is its part of what is left.
    """
    return [
        begin,
        *(begin + (1 - begin) * step / (left - 1) for step in range(math.ceil(left) - 1)),
    ]


@pytest.mark.parametrize("stops", [(), (12,), (1, 7, 8, 20, 30)], ids=["never", "once", "often"])
def test_a_timed_run_that_is_resumed_has_the_rest_of_its_minutes(
    tiny, tmp_path, monkeypatch, seconds, stops
):
    """
    A resumed run took all its --minutes again, and its learning rate did not fall until they were
    nearly over. Its loading does not count, only that of the first life: there, the minutes are
    what the user waits for.
    """
    load_corpus = train.load_corpus

    def slowly(*arguments):
        seconds.now += 10
        return load_corpus(*arguments)

    monkeypatch.setattr(train, "load_corpus", slowly)
    monkeypatch.setattr(run_clock, "closing_seconds", lambda run, step_seconds: 2.5)
    seconds.stops = stops
    train.main([*tiny, "--minutes", "0.75", "--eval_every", "1000"])
    for _ in stops:
        seconds.now += 3600  # however long it lay there
        train.main(["--resume", "--out", str(tmp_path / "out")])
    expected = shares(0.0, 45 - 2.5 - 10)
    for stop in stops:
        begin = expected[stop]
        expected[stop:] = shares(begin, 45 * (1 - begin) - 2.5)
    assert [share for share, _ in seconds.steps] == pytest.approx(expected)
    args = assert_loads(tmp_path / "out")["args"]
    for step, (share, rate) in enumerate(seconds.steps):
        assert rate == pytest.approx(
            min(1, (step + 1) / args["warmup"]) * min(1, (1 - share) / args["decay"])
        )


def test_the_log_holds_what_each_step_gave(tiny, tmp_path, monkeypatch, seconds, capsys):
    """Its loss, the norm of its gradient, and how many tokens a second that was."""
    update, told = train.Run.update, []

    def noted(self, *batch):
        told.append(update(self, *batch))
        return told[-1]

    monkeypatch.setattr(train.Run, "update", noted)
    train.main([*tiny, "--steps", "6"])
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    steps = [line for line in log if "loss" in line]
    assert [[line["loss"], line["norm"]] for line in steps] == [
        pytest.approx(t.tolist(), abs=1e-4) for t in told
    ]
    assert {line["tokens_per_second"] for line in steps} == {4 * 32}
    assert "6 s in all; checkpoint in" in capsys.readouterr().out


def test_an_evaluation_on_the_way_is_of_a_part_and_the_last_one_of_all(
    tiny, tmp_path, monkeypatch, capsys
):
    limits = []
    monkeypatch.setattr(
        train,
        "evaluate",
        lambda model, corpus, machine, limit=None: limits.append(limit) or (7.5, 3),
    )
    train.main([*tiny, "--steps=10"])
    assert limits == [64, None]
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["val_loss"] for line in log if "val_loss" in line] == [2.5, 2.5]
    assert (
        "step 5, 50% of the run: held-out loss 2.500 nats a token; a sample:"
        in capsys.readouterr().out
    )


def test_where_nothing_ends_a_text_the_first_token_has_no_score(tmp_path, monkeypatch):
    """Nothing comes before it; nor do its bytes count among those that the bits are divided by."""
    tokenizer = char_tokenizer("abcé\n")
    write_corpus(
        tmp_path, tokenizer, tokenizer.encode("abcé\n" * 30), tokenizer.encode("éab\ncab\n" * 5)
    )
    data = []
    monkeypatch.setattr(
        report, "compare_with_compressors", lambda nats, text: data.append(text) or ""
    )
    train.main([*TINY, "--steps=1", f"--data={tmp_path}", f"--out={tmp_path / 'out'}"])
    assert data == [("éab\ncab\n" * 5)[1:].encode()]


def test_a_resumed_run_is_told_what_its_machine_is_now(tiny, tmp_path, monkeypatch):
    """All else is as it was begun."""
    train.main([*tiny, "--steps=1"])
    asked = []
    monkeypatch.setattr(train, "init_process", lambda args: sys.exit(asked.append(args)))
    (tmp_path / "out").rename(tmp_path / "moved")
    with pytest.raises(SystemExit):
        train.main(
            [
                "--resume",
                f"--out={tmp_path / 'moved'}",
                "--device=cuda:1",
                "--threads=3",
                "--compile",
            ]
        )
    now, begun = vars(asked[0]), vars(train.parse_args([*tiny, "--steps=1"]))
    changed = {
        "out": str(tmp_path / "moved"),
        "resume": True,
        "device": "cuda:1",
        "threads": 3,
        "compile": True,
    }
    assert {name: value for name, value in now.items() if name in begun} == begun | changed


def test_the_picture_is_of_the_log(tmp_path, monkeypatch):
    figure = MagicMock()
    figure.savefig.side_effect = lambda path, **how: path.write_bytes(b"picture")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", MagicMock(Figure=lambda **size: figure))
    log = [{"step": 1, "loss": 3.5}, {"step": 2, "loss": 2.5}, {"step": 2, "val_loss": 3.0}]
    report.draw(log, tmp_path / "loss.png")
    drawn = {call.kwargs["label"]: call.args[:2] for call in figure.subplots().plot.call_args_list}
    assert drawn == {"training": ((1, 2), (3.5, 2.5)), "held out": ((2,), (3.0,))}
    assert (tmp_path / "loss.png").read_bytes() == b"picture"


def test_a_progress_bar_counts_the_steps(tiny, tmp_path, monkeypatch, seconds, capsys):
    """
    To the number of --steps; without, to as many as there will be at this speed, which nobody knows
    after the first step: there, the default run died of a division by zero wherever there was a
    bar. A resumed one goes on.
    """
    bars = []

    def tqdm(**settings):
        bars.append(MagicMock(**{name: settings[name] for name in ("total", "initial")}))
        return bars[-1]

    monkeypatch.setattr("training.report.tqdm", tqdm)
    monkeypatch.setattr(run_clock, "closing_seconds", lambda run, step_seconds: 0.0)
    train.main([*tiny, "--steps", "6"])
    assert bars == []  # nobody looks
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    capsys.readouterr()
    seconds.stops = (2,)
    train.main([*tiny, "--steps", "7", "--overwrite"])
    train.main(["--resume", "--out", str(tmp_path / "out")])
    seconds.stops = ()
    train.main([*tiny, "--minutes", "0.5", "--overwrite", "--eval_every", "100"])
    assert [(bar.initial, bar.total) for bar in bars] == [(0, 7), (2, 7), (0, 30)]
    assert [sum(call.args[0] for call in bar.update.call_args_list) for bar in bars] == [2, 5, 30]
    assert all(bar.close.called for bar in bars)
    posts = [call.args[0] for call in bars[1].set_postfix_str.call_args_list]
    assert re.fullmatch(r"loss \d\.\d{3}, 0\.1k tokens/s", posts[0])
    assert "step 5, 71% of the run: held-out loss" in bars[1].write.call_args.args[0]
    assert "held-out loss" not in capsys.readouterr().out  # it would tear the bar


def test_what_a_run_is_told_before_it_begins(tiny, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda *run: False)
    train.main([*tiny, "--arch=gpt2", "--steps=9"])
    data = f"{len(read_corpus(corpus, 'train')):,} tokens of 300 kinds, 1,001 held out"
    parameters = 300 * 16 + 32 * 16 + 12 * 16 * 16 + 3 * 16
    told = capsys.readouterr().out.splitlines()
    assert told[:5] == [
        "device: CPU, 1 thread, float32",
        "size:   tiny (--size names one of tiny, small, medium, large)",
        f"model:  gpt2, {parameters / 1e6:.2f}M parameters: 1 layers of width 16, 2 heads, relu2",
        f"data:   {corpus}: {data}",
        f"run:    9 steps, 4 x 32 tokens a step -> {tmp_path / 'out'}",
    ]
    assert told[5].startswith("stopped and saved at step 0")  # of so many steps nothing is expected


def test_a_second_signal_kills(monkeypatch):
    """
    The first asks for an end after the step that runs: whoever asks twice does not want to wait for
    it.
    """
    caught = train.catch_signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
        os.kill(os.getpid(), number)
        assert caught[-1] == number and signal.getsignal(number) is signal.SIG_DFL
    assert len(caught) == 2


def test_an_out_that_cannot_be_made_gets_a_message(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SystemExit, match=r"--out .*file/out cannot be made \(.*\): name another directory"
    ):
        train.main([*tiny, "--steps=2", "--out", str(tmp_path / "file" / "out")])


# --------------------------------------------------------------------------------------------------
# The samples


@pytest.fixture
def run(tiny, corpus):
    args = train.parse_args([*tiny, "--sample_tokens", "64", "--context_length", "256"])
    return train.Run(args, train.load_corpus(str(corpus), MACHINE), MACHINE)


def test_the_last_samples_are_whole_lines_and_their_statements_are_counted(run, monkeypatch):
    """
    A line that the prompt began or that the length cut off would read badly, and parse by chance.
    """
    texts = [
        "rest\n",
        " rest\nx = 1\nif x:\n    y = = 2\nz = cut o",
        "\ndef f():\n    retu",
        "",
        "\na b\n",
        "no line",
    ]
    monkeypatch.setattr(samples, "generate_texts", lambda *arguments, **named: texts)
    lines = samples.last_samples(run).split("\n")
    assert lines[:4] == ["sample 1:", "    x = 1", "    if x:", "        y = = 2"]
    assert lines[4:8] == ["sample 2:", "    def f():", "sample 3:", "    a b"]
    # x = 1, if x: and def f(): parse, y = = 2 and a b do not
    assert re.fullmatch(
        r"statements that parse: 60% of the sampled, \d+% of the held-out text's", lines[8]
    )


def test_samples_that_are_the_truth_have_its_share_of_statements(run, monkeypatch):
    """Both shares are of text that is cut alike, so they compare."""
    val = run.corpus.val.tolist()

    def follow(run, prompts, length):
        starts = [
            next(i for i in range(len(val)) if val[i : i + len(p)] == p) + len(p) for p in prompts
        ]
        return [run.corpus.tokenizer.decode(val[i : i + length]) for i in starts]

    judged, share = [], samples.share_that_parses
    monkeypatch.setattr(
        samples, "share_that_parses", lambda texts: judged.append(texts) or share(texts)
    )
    monkeypatch.setattr(samples, "generate_texts", follow)
    shares = re.findall(r"(\d+)% of", samples.last_samples(run))
    assert len(shares) == 2 and shares[0] == shares[1]
    assert judged[0] == judged[1] and len(judged[0]) == 16
    for real, told in (
        (0.5, False),
        (0.51, True),
        (None, False),
    ):  # most of a corpus of Python parses
        monkeypatch.setattr(samples, "share_that_parses", lambda texts, real=real: real)
        assert ("statements that parse" in samples.last_samples(run)) == told


def test_a_corpus_that_is_no_python_gets_no_share_of_statements(run, monkeypatch):
    monkeypatch.setattr(
        samples, "generate_texts", lambda *arguments, **named: ["\nFirst Citizen:\nSpeak, speak.\n"]
    )
    monkeypatch.setattr(
        run.corpus.tokenizer, "decode", lambda ids: "\nSecond Citizen:\nOne word, good citizens.\n"
    )
    assert samples.last_samples(run) == "sample 1:\n    First Citizen:\n    Speak, speak."


def test_a_sample_ends_where_the_model_ends_it(run, monkeypatch):
    """Text behind the end of a text is another text."""
    line = run.corpus.tokenizer.encode("x = 1\n")
    rows = torch.tensor([[5, *line, 299, *line], [5, *line, *line, 299]])
    monkeypatch.setattr(run.model, "generate", lambda prompts, length, choose: rows)
    assert samples.generate_texts(run, [[5], [5]], 64) == ["x = 1\n", "x = 1\nx = 1\n"]


def test_samples_follow_the_temperature_and_the_seed(run, monkeypatch):
    """
    Of two words whose scores differ by 1, the second is drawn as often as softmax(1 / temperature)
    says.
    """
    logits, drawn = torch.tensor([[0.0, 1.0]]).repeat(20_000, 1), {}

    def choose_one(prompts, length, choose):
        drawn[seed, temperature] = choose(logits, 0).double()
        return prompts

    monkeypatch.setattr(run.model, "generate", choose_one)
    for seed, temperature in ((1, 0.6), (1, 2.0), (2, 0.6)):
        run.args.seed = seed
        monkeypatch.setattr(samples, "TEMPERATURE", temperature)
        samples.generate_texts(run, [[5]], 1)
        wanted = 1 / (1 + math.exp(-1 / temperature))
        assert drawn[seed, temperature].mean().item() == pytest.approx(wanted, abs=0.02)
    first, temperature = drawn[1, 0.6], 0.6
    monkeypatch.setattr(samples, "TEMPERATURE", temperature)
    assert not torch.equal(first, drawn[2, 0.6])
    seed = run.args.seed = 1
    samples.generate_texts(run, [[5]], 1)
    assert torch.equal(first, drawn[1, 0.6])


def test_the_last_samples_follow_texts_from_all_over_the_held_out_part(run, monkeypatch):
    """
    Sixteen, from its first token to its last; a prompt is a quarter of the context, and the rest
    fits behind it.
    """
    asked = []
    monkeypatch.setattr(
        samples, "generate_texts", lambda run, *given: asked.append(given) or ["\nx = 1\n"]
    )
    samples.last_samples(run)
    ((prompts, length),) = asked
    val = run.corpus.val.tolist()
    assert (len(prompts), length, samples.TEMPERATURE) == (16, 128, 0.6)
    assert prompts[0] == val[:64] and prompts[-1] == val[1001 - 128 - 64 : 1001 - 128]
    assert all(len(prompt) == 64 for prompt in prompts)
    run.args.sample_tokens = 1000
    samples.last_samples(run)
    assert asked[1][1] == 256 - 64
    run.corpus.val = run.corpus.val[:100]  # shorter than prompt and answer
    samples.last_samples(run)
    assert asked[2][0] == [val[:64]] * 16


# --------------------------------------------------------------------------------------------------
# Real processes, real signals


def start(flags: list[str], folder: Path) -> subprocess.Popen:
    log = open(folder / "stdout", "w")  # noqa: SIM115
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *flags], stdout=log, stderr=subprocess.STDOUT
    )


def wait_for(path: Path, process: subprocess.Popen):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment_leaves_a_loadable_checkpoint(tiny, tmp_path, kills):
    """
    Each life saves after every step, so that most kills fall into a save; the next life resumes
    what is left. The last one ends by Ctrl-C, with status 0 and what it had.
    """
    out, moments, step = tmp_path / "out", random.Random(kills), 0
    flags = [*tiny, "--steps", "1000000", "--eval_every", "1", "--sample_tokens", "0"]
    for sign in [signal.SIGKILL] * kills + [signal.SIGINT]:
        process = start(flags, tmp_path)
        wait_for(out / "config.json", process)
        mark = (out / "train_state.pt").stat().st_mtime_ns
        while (out / "train_state.pt").stat().st_mtime_ns == mark and process.poll() is None:
            time.sleep(0.001)
        time.sleep(moments.random() * 0.2)
        process.send_signal(sign)
        assert process.wait(60) == (-sign if sign == signal.SIGKILL else 0)
        state = assert_loads(out)
        assert state["step"] > step
        step, flags = state["step"], ["--resume", "--out", str(out)]
    assert f"stopped and saved at step {step}" in (tmp_path / "stdout").read_text()


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(tiny, tmp_path):
    """
    torchrun: gradients are averaged, so the weights agree with those of one process up to rounding.
    """
    flags = [*tiny, "--steps", "6", "--dropout", "0"]
    train.main([*flags, "--out", str(tmp_path / "one")])
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "29511",
    ]
    subprocess.run(
        [*torchrun, str(ROOT / "train.py"), *flags, "--out", str(tmp_path / "two")],
        check=True,
        timeout=120,
    )
    one, two = (
        load_checkpoint(tmp_path / "one").state_dict(),
        load_checkpoint(tmp_path / "two").state_dict(),
    )
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-3


# --------------------------------------------------------------------------------------------------
# The parts


MACHINE = train.Process(torch.device("cpu"), torch.float32, compile=False)


def test_an_epoch_is_every_window_once_in_another_order():
    tokens = np.arange(1005, dtype=np.uint16)
    batches = train.Batches(tokens, 9, 10, seed=3)
    assert batches.windows == 99
    epochs = [[batches.start(i) for i in range(e * 99, (e + 1) * 99)] for e in range(2)]
    for starts in epochs:
        offset = min(starts)
        assert 0 <= offset < 10 and sorted(starts) == list(range(offset, offset + 990, 10))
    assert epochs[0] != epochs[1]
    # whatever the offset, every token comes: no two epochs cut the text at the same places
    assert {batches.start(e * 99) % 10 for e in range(60)} == set(range(10))
    x, y = batches(13, MACHINE)  # of the second epoch
    assert x[:, 0].tolist() == epochs[1][18:27] and torch.equal(y, x + 1)


def test_the_shortest_corpus_is_two_windows_and_a_target():
    tokens = np.arange(21, dtype=np.uint16)
    x, y = train.Batches(tokens, 3, 10, seed=1)(0, MACHINE)
    assert x.dtype == torch.int64 and x.shape == (3, 10) and torch.equal(y, x + 1) and y.max() <= 20
    with pytest.raises(
        SystemExit, match="20 training tokens are too few for windows of 10: lower context_length"
    ):
        train.Batches(tokens[:20], 3, 10, seed=1)


def test_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(5000, dtype=np.uint16)

    def first(step, seed=1):
        return train.Batches(tokens, 8, 16, seed)(step, MACHINE)[0]

    forward = train.Batches(tokens, 8, 16, 1)
    in_order = [forward(step, MACHINE)[0] for step in range(60)]
    assert all(torch.equal(first(step), in_order[step]) for step in (59, 3, 40))
    assert not torch.equal(first(3), first(3, seed=2))
    two = [train.Process(MACHINE.device, torch.float32, False, rank, 2) for rank in (0, 1)]
    halves = torch.cat([forward(7, machine)[0] for machine in two])
    assert sorted(halves[:, 0].tolist()) == sorted(in_order[7][:, 0].tolist())


def test_evaluation_scores_every_token_once(corpus):
    """
    Against one window at a time, in plain torch: the last one is short, the first starts from the
    end of a text.
    """
    loaded = train.load_corpus(str(corpus), MACHINE)
    torch.manual_seed(0)
    model = GPT(GPTConfig(300, context_length=32, n_layer=1, n_head=2, n_embd=16))
    with torch.no_grad():
        model.wte.weight.mul_(20)  # far from uniform, so that each token counts
        stream = torch.tensor([299, *loaded.val.tolist()])
        expected = 0.0
        for i in range(0, len(stream) - 1, 32):
            targets = stream[i + 1 : i + 33]
            logits = model(stream[None, i : i + len(targets)])[0][0]
            expected += F.cross_entropy(logits, targets, reduction="sum").item()
    nats, count = train.evaluate(model, loaded, MACHINE)
    assert count == len(loaded.val) == 1001
    assert nats == pytest.approx(expected, rel=1e-5)
    assert (
        train.evaluate(model, loaded, MACHINE, limit=96)[1] == 96 - 32 + 1001 % 32
    )  # first, middle and last window
    assert train.evaluate(model, loaded, MACHINE, limit=1)[1] == 32


def test_nothing_is_dropped_while_the_model_is_looked_at(corpus, tiny):
    """Neither in an evaluation nor in a sample; afterwards training drops again."""
    args = train.parse_args([*tiny, "--arch=gpt2", "--dropout", "0.5"])
    run = train.Run(args, train.load_corpus(str(corpus), MACHINE), MACHINE)
    calm = GPT(
        GPTConfig(
            300, context_length=32, n_layer=1, n_head=2, n_embd=16, activation="relu2", bias=False
        )
    )
    calm.load_state_dict(run.model.state_dict())
    assert train.evaluate(run.model, run.corpus, MACHINE, 96) == train.evaluate(
        calm, run.corpus, MACHINE, 96
    )
    assert run.model.training
    modes = []
    run.model.register_forward_hook(lambda model, inputs, output: modes.append(model.training))
    samples.generate_texts(run, [[299]], 2)
    assert modes == [False, False] and run.model.training


def test_bits_per_byte():
    text = os.urandom(1000)
    told = report.compare_with_compressors(nats=4000 * math.log(2), data=text)
    assert (
        "model 4.000" in told and "gzip -9 8.18" in told
    )  # noise does not compress: 23 bytes more
    assert "(51% below gzip)" in told
    worse = report.compare_with_compressors(nats=1e6, data=text)  # was told as "-59% below gzip"
    assert re.search(r"\([\d,]+% above gzip\)", worse)


def test_learning_rate_rises_stays_and_falls():
    args = train.parse_args(["--warmup", "10", "--decay", "0.5"])
    shares = [train.learning_rate(step, step / 100, args) for step in range(100)]
    assert shares[:3] == [0.1, 0.2, pytest.approx(0.3)] and shares[9:51] == [1.0] * 42
    assert shares[75] == 0.5 and shares[99] == pytest.approx(0.02)
    assert train.learning_rate(1000, 1.0, args) == 0


def test_orthogonalize_evens_out_singular_values():
    torch.manual_seed(0)
    for shape in ((3, 32, 32), (2, 64, 16), (2, 16, 64)):
        values = torch.linalg.svdvals(muon.orthogonalize(torch.randn(shape)))
        assert values.shape[1] == min(shape[1:])
        # Newton-Schulz leaves the smallest of a square matrix behind; the others end near 1
        assert values.max() < 1.3 and values.quantile(0.1) > 0.5


def test_muon_moves_q_k_and_v_apart():
    """One stored matrix, three maps: a large gradient of q must not shrink the step of v."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(48, 16))
    gradient = torch.randn(48, 16)
    weight.grad = gradient * torch.tensor([1000.0, 1.0, 0.001]).repeat_interleave(16)[:, None]
    settings = {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.0}
    train.Muon({weight: [16] * 3}, torch.float32, **settings).step()
    for part, alone in zip(weight.detach().split(16), gradient.split(16), strict=True):
        assert torch.allclose(part, -0.1 * muon.orthogonalize(alone[None])[0], atol=1e-3)


def test_grouped_heads_are_maps_of_unequal_sizes():
    """
    Muon knew q, k and v by the shape of their matrix: with fewer KV heads they were one map, and an
    MLP three times as wide was three. Here k and v have a quarter of q's rows, which are more than
    its columns; two such matrices are updated together.
    """
    torch.manual_seed(0)
    config = GPTConfig(50, 8, n_layer=2, n_head=8, n_kv_head=2, head_size=4, n_embd=16, n_inner=48)
    model = GPT(config)
    matrices = {p: maps for block in model.h for p, maps in muon.maps_of(block).items()}
    wanted = [[32, 8, 8], [16], [48], [16]]  # c_attn, attn.c_proj, c_fc, mlp.c_proj
    assert list(matrices.values()) == 2 * wanted
    before = {p: p.detach().clone() for p in matrices}
    for p in matrices:
        p.grad = torch.randn_like(p) * torch.logspace(-2, 2, len(p))[:, None]
    train.Muon(matrices, torch.float32, lr=0.1, momentum=0.9, weight_decay=0.0).step()
    for p, maps in matrices.items():
        moved = (p.detach() - before[p]).split(maps)
        for part, alone in zip(moved, p.grad.split(maps), strict=True):
            scale = 0.1 * max(1, len(alone) / alone.shape[1]) ** 0.5
            assert torch.allclose(part, -scale * muon.orthogonalize(alone[None])[0], atol=1e-3)


def test_loss_in_chunks_is_the_loss():
    """
    The head's loss that never holds all logits, and its gradients, against torch's own, with
    targets left out.
    """
    torch.manual_seed(0)
    x = torch.randn(3, 200, 24)
    head = torch.nn.Linear(24, 77, bias=False)
    targets = torch.randint(77, (3, 200))
    targets[0, :50] = -100
    results = []
    for ops in (TORCH, training_ops("cpu")):
        leaf = x.clone().requires_grad_()
        loss = ops.loss(leaf, head, targets)
        results.append([loss, *torch.autograd.grad(3 * loss, [leaf, head.weight])])
    assert ops.loss is not TORCH.loss
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_attentions_that_train_are_the_references(dropout):
    """
    Training on a CPU takes one path in bfloat16 and another in fp32, and a GPU a third: the values
    and gradients of the one that is spelled out, within bfloat16. Those of a CPU leave out the same
    weights, for both draw the same numbers.
    """
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 50, 3, 16).bfloat16()
    cpu, gpu = training_ops("cpu"), training_ops("cuda")
    ways = [(cpu, torch.bfloat16), (cpu, torch.float32)]
    if not dropout:
        ways += [(gpu, torch.float32), (TORCH, torch.float32)]
    results = []
    for ops, dtype in ways:
        q, k, v = leaves = [x.to(dtype).requires_grad_() for x in qkv]
        torch.manual_seed(1)
        batch = WholeTexts(None, torch.arange(50), ops, dropout)
        attn = SimpleNamespace(window=0, scale=0.25, softcap=0.0)
        y = ops.attend(q, (k, v), attn, batch)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a.float() - b).abs().max() < 0.03 * b.abs().max()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler")
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_compiled_step_is_the_step(arch, tiny, corpus):
    """With the operators of a GPU, where this is how a model is trained."""
    args = train.parse_args([*tiny, f"--arch={arch}", "--steps=9"])
    loaded = train.load_corpus(str(corpus), MACHINE)
    told = []
    for compiled in (False, True):
        process = replace(MACHINE, compile=compiled, ops=training_ops("cuda"))
        run = train.Run(args, loaded, process)
        run.model.config.dropout = 0.0  # compiled, it draws other numbers
        module = run.forward_module()
        batches = train.Batches(loaded.train, args.batch_size, args.context_length, args.seed)
        told.append([run.update(module, *batches(step, process)).tolist() for step in range(4)])
    assert told[1] == [pytest.approx(step, rel=1e-3) for step in told[0]]


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_gpu_compiles_the_forward_pass_as_one_graph(arch, tiny, corpus):
    """A step of Python between two graphs would wait for the device; here no compiler is needed."""
    loaded = train.load_corpus(str(corpus), MACHINE)
    run = train.Run(train.parse_args([*tiny, f"--arch={arch}"]), loaded, MACHINE)
    compiled = torch.compile(run.model, backend="eager", fullgraph=True)
    tokens = torch.randint(300, (2, 33))
    run.model.config.dropout = 0.0
    losses = []
    for model in (run.model, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(tokens[:, :-1], tokens[:, 1:], training_ops("cuda"))
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llamas_operators_that_train_are_the_references(dtype):
    """
    Values and gradients, within twice what plain torch errs in the same dtype: with unequal numbers
    of heads, far positions, and vectors of all lengths before the norm.
    """
    torch.manual_seed(0)
    config = GPTConfig(
        50, 64, n_layer=1, n_head=4, n_kv_head=2, n_embd=32, n_inner=40, norm="rms", bias=False,
        gated=True, activation="silu", rope={0: Rope(100.0)},
    )  # fmt: skip
    model = GPT(config)
    block = model.h[0]
    with torch.no_grad():
        for p in block.parameters():
            p.normal_()
    x = torch.randn(2, 64, 32, dtype=torch.float64) * torch.logspace(-3, 3, 64)[:, None]
    weigh = torch.randn(3, 2, 64, 1, dtype=torch.float64)

    def results(ops, dtype):
        stream = torch.promote_types(dtype, torch.float32)  # of what flows from block to block
        block.to(dtype).ln_1.to(stream)
        leaf = x.to(stream).requires_grad_()
        batch = WholeTexts(None, torch.arange(1000, 1064), ops)
        batch.rotations = {0: rotation(batch.positions, model.frequencies_0)}
        if dtype == torch.float64:
            batch.rotations = {0: [t.double() for t in batch.rotations[0]]}
        if dtype == torch.float64:
            length = (3 * leaf).square().mean(-1, keepdim=True) + 1e-5
            y = 3 * leaf / length.sqrt() * block.ln_1.weight
        else:
            _, y = ops.add_norm(leaf, leaf * 2, block.ln_1)
        q, (k, v) = ops.project_qkv(y.to(dtype), block.attn, None, batch)
        wide = ops.linear(y.to(dtype), block.mlp.c_fc, "silu", True)
        outputs = [y, q, k, v, wide]
        total = 0
        for output, w in zip((q, k, wide), weigh, strict=True):
            total = total + (output.flatten(2) * w.to(dtype)).sum()
        weights = [block.ln_1.weight, block.attn.c_attn.weight, block.mlp.c_fc.weight]
        gradients = torch.autograd.grad(total, [leaf, *weights])
        return [t.double() for t in [*outputs, *gradients]]

    exact = results(TORCH, torch.float64)
    plain = results(TORCH, dtype)
    fast = results(training_ops("cpu"), dtype)
    for e, p, f in zip(exact, plain, fast, strict=True):
        assert (f - e).norm() <= 2 * (p - e).norm() + 1e-6 * e.norm()


def test_a_text_longer_than_the_context_is_refused_and_none_is_written():
    model = GPT(GPTConfig(50, context_length=8, n_layer=1, n_head=1, n_embd=16)).eval()
    assert model(torch.zeros(2, 8, dtype=torch.int64))[0].shape == (2, 8, 50)
    with pytest.raises(ValueError, match="9 tokens do not fit the model's context_length of 8"):
        model(torch.zeros(2, 9, dtype=torch.int64))
    seen = []

    def choose(logits, position):
        seen.append((tuple(logits.shape), position))
        return torch.tensor([position, position + 1])

    text = model.generate(torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]), 100, choose)
    assert text.tolist() == [[1, 2, 3, 4, 5, 5, 6, 7], [5, 4, 3, 2, 1, 6, 7, 8]]
    assert seen == [((2, 50), 5), ((2, 50), 6), ((2, 50), 7)]
    assert model.generate(text[:, :5], 2).shape == (2, 7)


def test_initial_weights_are_gpt2s():
    """
    N(0, 0.02), but the projections into the residual stream, of which two a layer add up, less;
    biases zero.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(500, context_length=200, n_layer=3, n_head=2, n_embd=64))
    for name, w in model.named_parameters():
        if w.ndim == 2:
            wanted = 0.02 / math.sqrt(6) if "c_proj" in name else 0.02
            assert (
                w.std().item() == pytest.approx(wanted, rel=0.05) and abs(w.mean()) < 0.1 * wanted
            ), name
        else:
            assert torch.all(w == (1 if "ln_" in name and name.endswith("weight") else 0)), name


def test_a_seed_is_of_the_initial_weights_too(tiny, corpus):
    loaded = train.load_corpus(str(corpus), MACHINE)
    first, again, other = (
        train.Run(train.parse_args([*tiny, f"--seed={seed}"]), loaded, MACHINE).model.wte.weight
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
