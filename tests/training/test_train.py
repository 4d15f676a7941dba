"""
train.py: what a run leaves behind, that it can be stopped, killed and resumed, its flags, and how
it ends where it cannot go on.
"""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
from runs import (
    ROOT,
    TINY,
    after_update,
    assert_loads,
    losses,
    new_run,
    read_log,
    same,
    stop_after,
)

import train
from checkpoint import load_checkpoint
from tokenizer import load_tokenizer
from training import report
from training.corpus import char_tokenizer, read_corpus, write_corpus

# --------------------------------------------------------------------------------------------------
# The whole run


def test_a_run_learns_and_leaves_a_checkpoint(tiny, corpus, out, capsys):
    train.main([*tiny, "--steps=40"])
    log = read_log(out)
    assert [line["step"] for line in log if "loss" in line] == list(range(1, 41))
    assert [line["step"] for line in log if "val_loss" in line] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert log[0]["loss"] == pytest.approx(math.log(300), abs=0.1)  # as good as chance
    assert log[-1]["val_loss"] < log[0]["loss"] - 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert assert_loads(out)["step"] == 40
    printed = capsys.readouterr().out
    val_loss = float(re.search(r"val loss: ([\d.]+)", printed)[1])
    assert val_loss == pytest.approx(log[-1]["val_loss"], abs=1e-4)  # both are rounded
    held_out = load_tokenizer(out).decode_bytes(read_corpus(corpus, "val").tolist())
    bits = log[-1]["val_loss"] * 1001 / math.log(2) / len(held_out)
    assert log[-1]["bits_per_byte"] == pytest.approx(bits, abs=1e-4)
    assert f"bits per byte: model {bits:.3f}, gzip -9 " in printed
    scored = f"held out: 1,001 tokens, {len(held_out):,} bytes, each scored once, in windows of 32"
    assert scored in printed


# between two evaluations, at one, in the long windows of the last quarter, and often
@pytest.mark.parametrize("stops", [(7,), (10,), (16,), (1, 2, 5, 19)], ids=str)
def test_a_stopped_run_resumes_to_the_losses_of_an_uninterrupted_one(
    tiny, out, tmp_path, monkeypatch, capsys, stops
):
    """To the bit, dropout included: batches and noise are functions of (seed, step)."""
    whole = tmp_path / "whole"
    train.main([*tiny, "--steps=20", f"--out={whole}"])
    stop_after(monkeypatch, stops)
    lives = [[*tiny, "--steps=20"], *[["--resume", f"--out={out}"] for _ in stops]]
    for flags, stop in zip(lives, stops, strict=False):
        train.main(flags)  # returns: exit status 0
        assert f"stopped and saved at step {stop}" in capsys.readouterr().out
        assert assert_loads(out)["step"] == stop
        with open(out / "log.jsonl", "a") as f:  # as a kill after the last save would leave it
            f.write('{"step": 99, "loss": 1.0}\n{"step"')
    train.main(lives[-1])
    # a run that is asked to stop does not evaluate before it does
    expected = [line for line in losses(whole) if "loss" in line or line["step"] not in stops]
    assert losses(out) == expected
    assert same(load_checkpoint(whole).state_dict(), load_checkpoint(out).state_dict())
    train.main(lives[-1])  # a finished run only reports again
    assert losses(out) == expected and "val loss:" in capsys.readouterr().out


def test_windows_are_short_first_and_whole_at_the_end(tiny, out, monkeypatch, capsys):
    """A step has as many tokens in both; an evaluation on the way is in windows of that length."""
    shapes, windows = [], []

    def noted_evaluate(model, corpus, process, T=None, limit=None):
        windows.append((T, limit))
        return 7.5, 3

    monkeypatch.setattr(train, "evaluate", noted_evaluate)
    after_update(monkeypatch, lambda run, result: shapes.append(run.next_batch()[0].shape))
    train.main([*tiny, "--steps=20"])
    assert shapes == 14 * [(8, 16)] + 6 * [(4, 32)]  # of the batch after each step
    assert windows == [(16, 64), (16, 64), (32, 64), (None, None)]
    assert [line["val_loss"] for line in read_log(out) if "val_loss" in line] == [2.5] * 4
    shown = "step 5, 25% of the run: held-out loss 2.500 nats a token; a sample:"
    assert shown in capsys.readouterr().out


def test_a_llama_is_trained_resumed_and_opens_in_transformers_as_one(tiny, out, capsys):
    """With dropout, which no file of a Llama says: it was refused after the first hundred steps."""
    train.main([*tiny, "--n_embd=48", "--n_head=3", "--steps=20"])
    assert "model:  llama, 0." in capsys.readouterr().out
    train.main(["--resume", f"--out={out}"])
    assert losses(out)[-1]["val_loss"] < math.log(300) - 1
    saved = json.loads((out / "config.json").read_text())
    assert (saved["model_type"], saved["hidden_act"]) == ("llama", "silu")
    assert (saved["intermediate_size"], saved["tie_word_embeddings"]) == (128, True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert isinstance(reference, transformers.LlamaForCausalLM)
    tokens = torch.randint(300, (2, 32))
    with torch.no_grad():
        logits, _ = load_checkpoint(out)(tokens)
        assert (reference(tokens).logits - logits).abs().max() < 1e-4


def break_weights(run):
    with torch.no_grad():
        run.model.wte.weight.fill_(math.nan)


# step -> what happens to its result or its model; the message; the step of the last checkpoint
DIVERGED = {
    "the loss": (8, lambda run, result: result * math.nan, "step 8: loss nan", 5),
    # a step's loss is known before its update breaks the model, which cannot be sampled or saved
    "the model": (10, lambda run, result: break_weights(run), "step 10: held-out loss nan", 5),
    "the last model": (20, lambda run, result: break_weights(run), "held-out loss nan", 20),
}


@pytest.mark.parametrize(("at", "react", "message", "kept"), DIVERGED.values(), ids=DIVERGED)
def test_numbers_that_are_none_stop_the_run(tiny, out, monkeypatch, at, react, message, kept):
    after_update(monkeypatch, lambda run, result: react(run, result) if run.step == at else None)
    ending = f"^{message}.*checkpoint of step {kept} is in .*lower --matrix_lr"
    with pytest.raises(SystemExit, match=ending) as error:
        train.main([*tiny, "--steps=20"])
    assert error.value.code not in (0, None)
    if kept < at:
        assert assert_loads(out)["step"] == kept


def test_a_learning_rate_that_explodes_is_caught(tiny, out):
    """Nothing patched: the real thing, before anything was saved."""
    with pytest.raises(SystemExit, match=r"gradient norm .* stopped, nothing is saved yet"):
        train.main([*tiny, "--steps=20", "--vector_lr=1e30", "--eval_every=20"])
    assert not (out / "config.json").exists()


def test_of_steps_that_are_read_together_the_first_bad_one_is_named(tiny, corpus):
    run = new_run(tiny, corpus)
    run.out.mkdir()
    run.step = 30
    message = r"^step 29: loss 1\.0, gradient norm nan: stopped, nothing is saved yet"
    with pytest.raises(SystemExit, match=message):
        run.record_steps([[1.0, 1.0], [1.0, math.nan], [math.nan, 1.0]], 1.0)


def test_a_full_disk_ends_the_run_with_a_message_and_keeps_what_was_saved(tiny, out, monkeypatch):
    """It was a traceback, of torch's about an unexpected position, and half a file stayed."""
    save = torch.save
    saved = []

    def full(state, path):
        save(state, path)
        saved.append(state["step"])
        if len(saved) == 2:
            raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match=r"out cannot be written .* MiB are free there: make room"):
        train.main([*tiny, "--steps=20"])
    assert assert_loads(out)["step"] == 5
    assert not [*out.glob("*.tmp")]
    (out / "log.jsonl").unlink()
    (out / "log.jsonl").mkdir()
    with pytest.raises(SystemExit, match=r"out cannot be written .*directory"):
        train.main(["--resume", f"--out={out}"])


def test_runs_without_the_optional_packages(tiny, out, monkeypatch, capsys):
    for name in ("matplotlib", "matplotlib.figure", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    train.main([*tiny, "--steps=5"])
    assert "no loss.png: matplotlib is not installed" in capsys.readouterr().out
    assert_loads(out)


# --------------------------------------------------------------------------------------------------
# Flags


MISTAKES = {
    "--n_layers=3": "unrecognized arguments: --n_layers",
    "--preset=gpt5": "invalid choice: 'gpt5'",
    "--resume --steps=9 --seed=1": "leave out --seed, --steps",
    "--eval_every=0": "argument --eval_every: 0 is too small, wanted at least 1",
    "--seed=-1": "argument --seed: -1 is too small, wanted at least 0",
    f"--seed={2**70}": f"argument --seed: {2**70} is too large",
    "--threads=99999999999": "argument --threads: 99999999999 is too large",
    "--decay=0": "argument --decay: 0 is too small",
    "--momentum=1": "argument --momentum: 1 is too large, wanted less than 1",
    "--matrix_lr=nan": "argument --matrix_lr: nan is too small",
    "--device=x": "--device x: no such device, there is cpu",
    "--device=meta": "--device meta: no such device, there is cpu",
    "--device=cuda": "--device cuda:0: the number of GPUs here is 0",
    "--data=nowhere": "has neither meta.json nor prepare.py; there is shakespeare_char, std",
    "--n_head=3": "n_embd 16 is not a multiple of n_head 3",
    "--n_head=1 --n_embd=15": "head_size 15 is odd: rotary positions",
    "--arch=mamba": "argument --arch: invalid choice: 'mamba' (choose from ",
    "--bias": "--bias: Llama has no biases, leave it out or take --arch gpt2",
    "--context_length=1000000": "training tokens are too few for windows of 1000000",
}


@pytest.mark.parametrize(("flags", "message"), MISTAKES.items(), ids=MISTAKES)
def test_mistakes_get_a_message_and_delete_nothing(tiny, out, flags, message, monkeypatch, capsys):
    """`--overwrite --data TYPO` deleted the model before it refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out.mkdir()
    (out / "config.json").write_text("{}")
    flags = flags.split()
    flags = flags if "--resume" in flags else [*tiny, "--steps=2", "--overwrite", *flags]
    with pytest.raises(SystemExit) as error:
        train.main(flags)
    assert error.value.code not in (0, None)
    assert message in str(error.value) + capsys.readouterr().err
    assert (out / "config.json").exists()


def test_a_directory_with_a_model_is_not_overwritten_by_accident(tiny, out):
    train.main([*tiny, "--steps=2"])
    before = (out / "model.safetensors").read_bytes()
    choices = "--resume continues it, --overwrite starts again, --out names another"
    with pytest.raises(SystemExit, match=choices):
        train.main([*tiny, "--steps=2"])
    assert (out / "model.safetensors").read_bytes() == before
    train.main([*tiny, "--steps=2", "--overwrite", "--seed=7", "--n_embd=32"])
    assert assert_loads(out)["args"]["seed"] == 7 and load_checkpoint(out).config.n_embd == 32
    (out / "file").write_text("")
    with pytest.raises(SystemExit, match=r"--out .*/file/out cannot be made \(.*\): name another"):
        train.main([*tiny, "--steps=2", f"--out={out / 'file' / 'out'}"])


def test_nothing_to_resume(tmp_path):
    state = tmp_path / "train_state.pt"

    def assert_refused(message: str):
        with pytest.raises(SystemExit, match=message):
            train.main(["--resume", f"--out={tmp_path}"])

    assert_refused("nothing to resume in")
    state.write_bytes(b"torn")
    assert_refused(r"train_state\.pt cannot be read .*: start again with --overwrite")
    torch.save({"step": tmp_path}, state)  # whose unpickling could run anything
    assert_refused(r"train_state\.pt cannot be read")


SMALL = {"n_layer": 2, "context_length": 512, "short_context": 128, "steps": None, "arch": "llama"}
GPU = {"n_layer": 6, "arch": "gpt2", "dropout": 0.1, "steps": 1500, "short_context": 256}
OF_GPT2 = {"arch": "gpt2", "bias": True, "activation": "gelu_new", "out": "out/gpt2-124M"}
SETTINGS = {
    "": SMALL | {"activation": "silu", "out": "out/stdlib", "beta2": 0.99, "clip": 1.0},
    "bf16": SMALL | {"n_layer": 3},
    "bf16 --n_layer=2 --minutes=5": SMALL | {"minutes": 5},
    "--context_length=64": {"context_length": 64, "short_context": 64},
    "--device=cuda": GPU,
    "--device=cuda --minutes=5": GPU | {"steps": None},
    "--device=cuda --minutes=5 --steps=7": GPU | {"steps": 7},
    "--preset=shakespeare_char": {"n_layer": 3, "data": "shakespeare_char", "activation": "relu2"},
    "bf16 --preset=gpt2-124M": OF_GPT2 | {"steps": 2000},
    "--arch=gpt2": SMALL | {"arch": "gpt2", "activation": "relu2"},
    "--activation=relu2": SMALL | {"activation": "relu2"},
}


@pytest.mark.parametrize("flags", SETTINGS)
def test_flags_come_before_the_preset_of_the_device_and_that_before_defaults(flags, monkeypatch):
    monkeypatch.setattr(train, "has_bfloat16", lambda device: "bf16" in flags)
    argv = [flag for flag in flags.split() if flag != "bf16"]
    args = vars(train.parse_args(["--device=cpu", *argv]))
    assert args | SETTINGS[flags] == args


def test_each_flag_has_a_help_and_each_preset_knows_only_flags():
    parser = train.build_parser()
    assert all(action.help for action in parser._actions)
    flags = {action.dest for action in parser._actions}
    presets = [preset for presets in train.PRESETS.values() for preset in presets.values()]
    assert all(preset.keys() <= flags for preset in presets)


def test_every_preset_is_there_as_a_llama(corpus):
    """With as many weights; GPT-2's biases and its activation are of GPT-2 alone."""
    for device in ("cpu", "cuda"):
        for preset in train.PRESETS:
            flags = [f"--device={device}", f"--preset={preset}", "--arch=llama", "--n_layer=1"]
            config = new_run(flags, corpus).model.config
            inner = {128: 344, 256: 680, 384: 1024, 768: 2048}[config.n_embd]
            assert (config.norm, config.activation, config.gated) == ("rms", "silu", True)
            assert (config.n_inner, config.bias, config.tied) == (inner, False, True)
    assert [train.gated_width(n) for n in (1, 2, 3, 6)] == [8, 8, 8, 16]


def test_a_resumed_run_may_change_its_directory_and_its_machine(tiny, out, tmp_path, monkeypatch):
    train.main([*tiny, "--steps=1"])
    asked = []
    monkeypatch.setattr(train, "init_process", lambda args: sys.exit(asked.append(vars(args))))
    moved = out.rename(tmp_path / "moved")
    with pytest.raises(SystemExit):
        train.main(["--resume", f"--out={moved}", "--device=cuda:1", "--threads=3", "--compile"])
    changed = {"out": str(moved), "resume": True, "device": "cuda:1", "threads": 3, "compile": True}
    assert asked == [vars(train.parse_args([*tiny, "--steps=1"])) | changed]


# --------------------------------------------------------------------------------------------------
# The output of a run


def test_a_run_introduces_itself(tiny, corpus, out, monkeypatch, capsys):
    monkeypatch.setattr(train, "train", lambda *run: False)
    tokens = f"{len(read_corpus(corpus, 'train')):,} tokens of 300 kinds, 1,001 held out"
    parameters = 300 * 16 + 32 * 16 + 12 * 16 * 16 + 3 * 16
    model = f"gpt2, {parameters / 1e6:.2f}M parameters: 1 layer of width 16, 2 heads, relu2"
    for flag, length in (("--steps=9", "9 steps"), ("--minutes=3.5", "3.5 minutes")):
        train.main([*tiny, "--arch=gpt2", flag])
        assert capsys.readouterr().out.splitlines()[:4] == [
            "device: CPU, 1 thread, float32",
            f"model:  {model}, context 32",
            f"data:   {corpus}: {tokens}",
            f"run:    {length}, 4 x 32 tokens a step -> {out}",
        ]


def test_where_nothing_ends_a_text_the_first_token_has_no_score(out, tmp_path):
    """Nothing comes before it; nor do its bytes count among those that the bits are divided by."""
    tokenizer = char_tokenizer("abcé\n")
    val = "éab\ncab\n" * 5
    write_corpus(tmp_path, tokenizer, tokenizer.encode("abcé\n" * 30), tokenizer.encode(val))
    train.main([*TINY, "--steps=1", f"--data={tmp_path}", f"--out={out}"])
    last = read_log(out)[-1]
    assert last["bits_per_byte"] == pytest.approx(
        last["val_loss"] * (len(val) - 1) / math.log(2) / len(val[1:].encode()), abs=1e-4
    )


def test_a_sample_ends_where_the_model_ends_it(tiny, corpus, monkeypatch):
    """Text behind the end of a text is another text."""
    run = new_run(tiny, corpus)
    line = run.corpus.tokenizer.encode("x = 1\n")
    rows = torch.tensor([[299, *line, 299, *line], [299, *line, *line, 299]])
    monkeypatch.setattr(run.model, "generate", lambda prompts, length, choose: rows)
    assert report.generate_texts(run, 2, 64) == ["x = 1\n", "x = 1\nx = 1\n"]


def test_samples_follow_the_temperature_and_the_seed(tiny, corpus, monkeypatch):
    """Of two tokens, the second is drawn as often as softmax(difference / temperature)."""
    run = new_run(tiny, corpus)
    logits, drawn = torch.tensor([[0.0, 1.0]]).repeat(20_000, 1), []

    def choose_one(prompts, length, choose):
        assert prompts.tolist() == [[299]] and length == 8
        drawn.append(choose(logits, 0).double())
        return prompts

    monkeypatch.setattr(run.model, "generate", choose_one)
    for run.args.seed in (1, 2, 1):
        report.generate_texts(run, 1, 8)
    first, other, again = drawn
    share = 1 / (1 + math.exp(-1 / report.TEMPERATURE))
    assert first.mean().item() == pytest.approx(share, abs=0.02)
    assert torch.equal(first, again) and not torch.equal(first, other)


# --------------------------------------------------------------------------------------------------
# Real processes, real signals


def test_a_second_signal_kills(monkeypatch):
    """The first asks for an end after the step under way; the second does not wait for it."""
    caught = train.catch_signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
        os.kill(os.getpid(), number)
        assert caught[-1] == number and signal.getsignal(number) is signal.SIG_DFL


def wait_until(condition, process: subprocess.Popen):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment_leaves_a_loadable_checkpoint(tiny, out, tmp_path, kills):
    """
    Each life saves after every step, so that most kills fall into a save; the next life resumes
    what is left. The last one ends by Ctrl-C, with status 0 and what it had.
    """
    moments, step = random.Random(kills), 0
    flags = [*tiny, "--steps=1000000", "--eval_every=1", "--sample_tokens=0"]
    state = out / "train_state.pt"

    def written() -> int:
        return state.stat().st_mtime_ns if (out / "config.json").exists() else 0

    for sign in [signal.SIGKILL] * kills + [signal.SIGINT]:
        with open(tmp_path / "stdout", "w") as log:
            command = [sys.executable, str(ROOT / "train.py"), *flags]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        mark = written()
        wait_until(lambda mark=mark: written() > mark, process)
        time.sleep(moments.random() * 0.2)
        process.send_signal(sign)
        assert process.wait(60) == (-sign if sign == signal.SIGKILL else 0)
        before, step = step, assert_loads(out)["step"]
        assert step > before
        flags = ["--resume", f"--out={out}"]
    assert f"stopped and saved at step {step}" in (tmp_path / "stdout").read_text()
