"""
train.py: what a run leaves behind, that it can be stopped, killed and resumed, its flags, and how
it ends where it cannot go on.
"""

import math
import os
import random
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
    """Here and in transformers the same: a Llama, with dropout, which no file of a Llama says."""
    train.main([*tiny, "--steps=40"])
    steps = read_log(out, "loss")
    evaluations = read_log(out, "val_loss")
    assert [line["step"] for line in steps] == list(range(1, 41))
    assert [line["step"] for line in evaluations] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert steps[0]["loss"] == pytest.approx(math.log(300), abs=0.1)  # as good as chance
    last = evaluations[-1]
    assert last["val_loss"] < steps[0]["loss"] - 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert assert_loads(out)["step"] == 40
    held_out = load_tokenizer(out).decode_bytes(read_corpus(corpus, "val").tolist())
    bits = last["val_loss"] * 1001 / math.log(2) / len(held_out)
    assert last["bits_per_byte"] == pytest.approx(bits, abs=1e-4)
    printed = capsys.readouterr().out
    parameters = 300 * 16 + 4 * 16 * 16 + 3 * 40 * 16 + 3 * 16
    assert f"model:  llama, {parameters / 1e6:.2f}M parameters: 1 layer of width 16" in printed
    assert "held out: 1,001 tokens, each scored once, in windows of 32\n" in printed
    assert f"val loss: {last['val_loss']:.4f}"[:-1] in printed  # both are rounded
    assert f"bits per byte: {bits:.3f}" in printed
    reference = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert isinstance(reference, transformers.LlamaForCausalLM)
    tokens = torch.randint(300, (2, 32))
    with torch.no_grad():
        logits, _ = load_checkpoint(out)(tokens)
        assert (reference(tokens).logits - logits).abs().max() < 1e-4


# between two evaluations; then at once, at one, and in the long windows of the last quarter
@pytest.mark.parametrize("stops", [(7,), (1, 2, 10, 16)], ids=str)
def test_a_stopped_run_resumes_to_the_losses_of_an_uninterrupted_one(
    tiny, out, tmp_path, monkeypatch, capsys, stops
):
    """To the bit, dropout included: batches and noise are functions of (seed, step)."""
    whole = tmp_path / "whole"
    train.main([*tiny, "--steps=20", f"--out={whole}"])
    stop_after(monkeypatch, stops)
    flags = [*tiny, "--steps=20"]
    for stop in stops:
        train.main(flags)  # returns: exit status 0
        flags = ["--resume", f"--out={out}"]
        assert f"stopped and saved at step {stop}" in capsys.readouterr().out
        assert assert_loads(out)["step"] == stop
        assert read_log(out)[-1]["step"] == stop
    train.main(flags)
    # a run that is asked to stop does not evaluate before it does
    lines = read_log(whole)
    expected = [line for line in lines if "loss" in line or line["step"] not in stops]
    assert read_log(out) == expected
    assert same(load_checkpoint(whole).state_dict(), load_checkpoint(out).state_dict())
    train.main(flags)  # a finished run only reports again
    assert read_log(out) == expected
    assert "val loss:" in capsys.readouterr().out


def test_windows_are_short_first_and_whole_at_the_end(tiny, out, monkeypatch, capsys):
    """A step has as many tokens in both; an evaluation on the way is in windows of that length."""
    shapes = []
    windows = []

    def noted_evaluate(model, corpus, process, T=None, limit=None):
        windows.append((T, limit))
        return 7.5, 3

    monkeypatch.setattr(train, "evaluate", noted_evaluate)
    after_update(monkeypatch, lambda run, result: shapes.append(run.next_batch()[0].shape))
    train.main([*tiny, "--steps=20"])
    assert shapes == 14 * [(8, 16)] + 6 * [(4, 32)]  # of the batch after each step
    assert windows == [(16, 64), (16, 64), (32, 64), (None, None)]
    assert [line["val_loss"] for line in read_log(out, "val_loss")] == [2.5] * 4
    shown = "step 5, 25% of the run: held-out loss 2.500 nats a token; a sample:"
    assert shown in capsys.readouterr().out


def break_loss(run, result):
    return result * math.nan


def break_weights(run, result):
    """Noticed by an evaluation: the loss of the step is that before its update."""
    run.model.wte.weight.data.fill_(math.nan)


# step -> what breaks in it, the message, the step of the checkpoint that is left
DIVERGED = {
    8: (break_loss, "^step 8: loss nan", 5),
    10: (break_weights, "^step 10: held-out loss nan", 5),
    20: (break_weights, "^step 20: held-out loss nan", 20),
}


@pytest.mark.parametrize("at", DIVERGED)
def test_a_loss_that_is_not_a_number_stops_the_run(tiny, out, monkeypatch, at):
    react, message, kept = DIVERGED[at]
    after_update(monkeypatch, lambda run, result: react(run, result) if run.step == at else None)
    with pytest.raises(SystemExit, match=f"{message}.*stopped.* lower --matrix_lr"):
        train.main([*tiny, "--steps=20"])
    state = torch.load(out / "train_state.pt", weights_only=True)
    assert state["step"] == kept
    if kept < at:
        assert_loads(out)


def test_a_learning_rate_that_explodes_is_caught(tiny, out):
    """Nothing patched: the real thing, before anything was saved."""
    with pytest.raises(SystemExit, match=r"gradient norm .* stopped"):
        train.main([*tiny, "--steps=20", "--vector_lr=1e30", "--eval_every=20"])
    assert not (out / "config.json").exists()


def test_of_steps_that_are_read_together_the_first_bad_one_is_named(tiny, corpus):
    run = new_run(tiny, corpus)
    run.out.mkdir()
    run.step = 30
    losses = torch.ones(3, 2)
    losses[1, 1] = losses[2, 0] = math.nan
    with pytest.raises(SystemExit, match=r"^step 29: loss 1\.0, gradient norm nan: stopped"):
        run.record_steps(losses.tolist())


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
    with pytest.raises(SystemExit, match=r"out cannot be written \(unexpected.* make room"):
        train.main([*tiny, "--steps=20"])
    assert assert_loads(out)["step"] == 5
    assert not [*out.glob("*.tmp")]
    (out / "file").write_text("")
    with pytest.raises(SystemExit, match=r"file/out cannot be written .* name another --out"):
        train.main([*tiny, "--steps=2", f"--out={out / 'file' / 'out'}"])


def test_runs_without_the_optional_packages(tiny, out, monkeypatch, capsys):
    for name in ("matplotlib", "matplotlib.figure", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None)
    train.main([*tiny, "--steps=5"])
    assert "no loss.png: matplotlib is not installed" in capsys.readouterr().out
    assert_loads(out)


# --------------------------------------------------------------------------------------------------
# Flags


MISTAKES = {
    "--resume --steps=9 --seed=1": "leave out --seed, --steps",
    "--device=cuda": "--device cuda:0: the number of GPUs here is 0",
    "--data=nowhere": "exists; there is shakespeare_char, stdlib",
    "--n_head=3": "n_embd 16 is not a multiple of n_head 3",
    "--bias": "--bias: Llama has no biases, leave it out or take --arch gpt2",
    "--context_length=1000000": "training tokens are too few for windows of 1000000",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_get_a_message_and_delete_nothing(tiny, out, flags, monkeypatch, capsys):
    """`--overwrite --data TYPO` deleted the model before it refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out.mkdir()
    (out / "config.json").write_text("{}")
    argv = flags.split()
    if "--resume" not in argv:
        argv = [*tiny, "--steps=2", "--overwrite", *argv]
    with pytest.raises(SystemExit) as error:
        train.main(argv)
    assert error.value.code not in (0, None)
    assert MISTAKES[flags] in str(error.value) + capsys.readouterr().err
    assert (out / "config.json").exists()


def test_a_directory_with_a_model_is_not_overwritten_by_accident(tiny, out):
    train.main([*tiny, "--steps=2"])
    choices = "--resume continues it, --overwrite starts again, --out names another"
    with pytest.raises(SystemExit, match=choices):
        train.main([*tiny, "--steps=2", "--seed=7"])
    assert assert_loads(out)["args"]["seed"] == 1337
    train.main([*tiny, "--steps=2", "--overwrite", "--seed=7", "--n_embd=32"])
    assert assert_loads(out)["args"]["seed"] == 7
    assert load_checkpoint(out).config.n_embd == 32


def test_nothing_to_resume(tmp_path):
    state = tmp_path / "train_state.pt"

    def assert_refused():
        with pytest.raises(SystemExit, match=r"nothing to resume, .*train_state\.pt cannot be rea"):
            train.main(["--resume", f"--out={tmp_path}"])

    assert_refused()
    state.write_bytes(b"torn")
    assert_refused()
    torch.save({"step": tmp_path}, state)  # whose unpickling could run anything
    assert_refused()


SMALL = {"n_layer": 2, "context_length": 512, "short_context": 128, "steps": None, "arch": "llama"}
GPU = {"n_layer": 6, "arch": "gpt2", "dropout": 0.1, "steps": 1500, "short_context": 256}
SETTINGS = {
    "": SMALL | {"activation": "silu", "out": "out/stdlib", "clip": 1.0},
    "bf16": SMALL | {"n_layer": 3},
    "bf16 --n_layer=2 --minutes=5": SMALL | {"minutes": 5},
    "--context_length=64": {"short_context": 64},
    "--device=cuda": GPU,
    "--device=cuda --minutes=5 --steps=7": GPU | {"steps": 7},
    "--device=cuda --minutes=5": GPU | {"steps": None},
    "bf16 --preset=gpt2-124M": {"arch": "gpt2", "activation": "gelu_new", "steps": 2000},
    "--activation=relu2": SMALL | {"activation": "relu2"},
}


@pytest.mark.parametrize("flags", SETTINGS)
def test_flags_come_before_the_preset_of_the_device_and_that_before_defaults(flags, monkeypatch):
    monkeypatch.setattr(train, "has_bfloat16", lambda device: "bf16" in flags)
    argv = [flag for flag in flags.split() if flag != "bf16"]
    args = vars(train.parse_args(["--device=cpu", *argv]))
    assert args | SETTINGS[flags] == args


def test_presets_know_only_flags():
    flags = vars(train.build_parser().parse_args([])).keys()
    for preset in train.PRESETS.values():
        assert all(settings.keys() <= flags for settings in preset.values())


def test_a_llama_has_the_weights_of_a_gpt2(corpus):
    """Biases and GPT-2's activation are GPT-2's alone."""
    flags = ["--device=cpu", "--preset=gpt2-124M", "--arch=llama", "--n_layer=1"]
    config = new_run(flags, corpus).model.config
    assert (config.norm, config.activation, config.gated) == ("rms", "silu", True)
    assert (config.n_inner, config.bias, config.tied) == (2048, False, True)
    widths = {1: 8, 3: 8, 6: 16, 128: 344, 256: 680, 384: 1024}
    assert {n: train.gated_width(n) for n in widths} == widths


def test_a_resumed_run_may_change_its_directory_and_its_machine(tiny, out, tmp_path, monkeypatch):
    train.main([*tiny, "--steps=1"])
    asked = []

    def note(args):
        asked.append(vars(args))
        sys.exit()

    monkeypatch.setattr(train, "init_process", note)
    moved = out.rename(tmp_path / "moved")
    with pytest.raises(SystemExit):
        train.main(["--resume", f"--out={moved}", "--device=cuda", "--compile"])
    changed = {"out": str(moved), "resume": True, "device": "cuda", "compile": True}
    assert asked == [vars(train.parse_args([*tiny, "--steps=1"])) | changed]


# --------------------------------------------------------------------------------------------------
# The output of a run


def test_without_an_end_of_text_token_the_first_token_has_no_score(out, tmp_path):
    """Nothing comes before it; nor do its bytes count among those that the bits are divided by."""
    tokenizer = char_tokenizer("abcé\n")
    val = "éab\ncab\n" * 5
    write_corpus(tmp_path, tokenizer, tokenizer.encode("abcé\n" * 30), tokenizer.encode(val))
    train.main([*TINY, "--steps=1", f"--data={tmp_path}", f"--out={out}"])
    (last,) = read_log(out, "bits_per_byte")
    nats = last["val_loss"] * (len(val) - 1)
    bits = nats / math.log(2) / len(val[1:].encode())
    assert last["bits_per_byte"] == pytest.approx(bits, abs=1e-4)


def test_a_sample_ends_where_the_model_ends_it(tiny, corpus, monkeypatch):
    """Text behind the end of a text is another text."""
    run = new_run(tiny, corpus)
    line = run.corpus.tokenizer.encode("x = 1\n")
    end = [299]
    rows = torch.tensor([end + line + end + line, end + line + line + end])
    monkeypatch.setattr(run.model, "generate", lambda prompts, length, choose: rows)
    assert report.generate_texts(run, 2, 64) == ["x = 1\n", "x = 1\nx = 1\n"]


def test_samples_follow_the_temperature_and_the_seed(tiny, corpus, monkeypatch):
    """Of two tokens, the second is drawn as often as softmax(difference / temperature)."""
    run = new_run(tiny, corpus)
    logits = torch.tensor([[0.0, 1.0]]).repeat(20_000, 1)
    drawn = []

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
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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
    moments = random.Random(kills)
    step = 0
    flags = [*tiny, "--steps=1000000", "--eval_every=1", "--sample_tokens=1"]
    state = out / "train_state.pt"

    def written() -> int:
        return state.stat().st_mtime_ns if (out / "config.json").exists() else 0

    for sign in [signal.SIGKILL] * kills + [signal.SIGINT]:
        with open(tmp_path / "stdout", "w") as log:
            command = [sys.executable, str(ROOT / "train.py"), *flags]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for _ in range(2):  # a resumed run saves before its first step
            mark = written()
            wait_until(lambda mark=mark: written() > mark, process)
        time.sleep(moments.random() * 0.2)
        process.send_signal(sign)
        status = process.wait(60)
        assert status == (-sign if sign == signal.SIGKILL else 0)
        before = step
        step = assert_loads(out)["step"]
        assert step > before
        flags = ["--resume", f"--out={out}"]
    assert f"stopped and saved at step {step}" in (tmp_path / "stdout").read_text()
