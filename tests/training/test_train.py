"""
train.py: what a run leaves behind, that it can be stopped, killed and resumed, its flags, and how
it ends where it cannot go on.
"""

import json
import math
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
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
from common import write_json
from tokenizer import load_tokenizer
from training import report
from training.corpus import char_tokenizer, read_corpus, train_bpe, write_corpus

# --------------------------------------------------------------------------------------------------
# The whole run


def test_a_run_learns_and_leaves_a_checkpoint(pictures, tiny, corpus, out, capsys):
    """It prints its result, logs each step, and draws the loss."""
    train.main([*tiny, "--steps=40"])
    steps = read_log(out, "loss")
    evaluations = read_log(out, "val_loss")
    assert [line["step"] for line in steps] == list(range(1, 41))
    assert [line["step"] for line in evaluations] == list(range(5, 41, 5))
    chance = math.log(300)
    assert steps[0]["loss"] == pytest.approx(chance, abs=0.1)
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
    assert "scoring 1,001 held-out tokens ..\n" in printed
    assert printed.splitlines()[-1].startswith("40 steps, ")


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
    printed = capsys.readouterr().out
    assert "100% done" in printed and "scoring 1,001" in printed  # it took 33 s without a word
    assert "val loss:" in printed


@pytest.mark.parametrize("level", [None, "1"])
def test_a_stopped_run_names_the_command_that_continues_it(tiny, out, monkeypatch, capsys, level):
    """After `make run` it named `python`, which without the environment has no torch."""
    monkeypatch.delenv("MAKELEVEL", raising=False)
    if level:
        monkeypatch.setenv("MAKELEVEL", level)
    stop_after(monkeypatch, [2])
    train.main([*tiny, "--steps=20"])
    command = "make run" if level else f"python train.py --resume --out {out}"
    assert f"stopped and saved at step 2: `{command}` continues\n" in capsys.readouterr().out


def test_what_torchrun_starts_again_goes_on(tiny, out, monkeypatch, capsys):
    """
    With --max-restarts, the same command ended with "holds a model". Would catch: what the first
    start has filled in, here the dtype, taken for a flag of another run.
    """
    tiny = [flag for flag in tiny if not flag.startswith("--dtype")]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    stop_after(monkeypatch, [7])
    for _ in range(2):  # nothing was saved before the first
        train.main([*tiny, "--steps=20"])
    assert "20 steps, from step 7, 35% done" in capsys.readouterr().out
    assert read_log(out)[-1]["step"] == 20
    with pytest.raises(SystemExit, match="out holds a model"):
        train.main([*tiny, "--steps=19"])  # another run, which was refused before the restart
    assert read_log(out)[-1]["step"] == 20


def test_no_graph_is_left_when_processes_part(tiny, monkeypatch):
    """NCCL would wait for ever for the end of a graph that has its messages."""
    runs = []
    left = []
    monkeypatch.setattr(train, "introduce", runs.append)
    monkeypatch.setattr(train.Process, "shut_down", lambda process: left.append(runs[0].train_step))
    train.main([*tiny, "--steps=1"])
    assert left == [None]


def test_runs_are_compared(pictures, tiny, out, tmp_path, monkeypatch, capsys):
    """
    Would catch: a run that is begun, or a model that is overwritten; a run that was stopped taken
    for one without a log; another field, or another run's.
    """
    ended = tmp_path / "ended"
    stop_after(monkeypatch, [7])
    train.main([*tiny, "--steps=20"])
    train.main([*tiny, "--steps=6", f"--out={ended}"])
    monkeypatch.chdir(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    curves = []
    draw = report.draw
    monkeypatch.setattr(report, "draw", lambda *args: curves.append(args[0]) or draw(*args))
    train.main(["--compare", "out", "ended"])
    first, second = capsys.readouterr().out.splitlines()
    [five] = read_log(out, "val_loss")
    log = read_log(ended, "val_loss")
    loss, bits = log[-1]["val_loss"], log[-1]["bits_per_byte"]
    assert first == f"out: step 7, held-out loss {five['val_loss']}, bits per byte (at the end)"
    assert second == f"ended: step 6, held-out loss {loss}, bits per byte {bits}"
    points = [(line["step"], line["val_loss"]) for line in log]
    assert curves == [{"out": [(5, five["val_loss"])], "ended": points}]
    picture = tmp_path / "compare.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    now = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert now == files | {picture: now[picture]}


BROKEN_LOGS = {"torn": b'{"step"', "bytes": b"\xff", "number": b"5", "stepless": b'{"val_loss": 1}'}


def test_a_directory_without_losses_is_not_compared(tiny, out, tmp_path, monkeypatch):
    """Be it no run's, or a run's that was stopped before it was evaluated."""
    monkeypatch.chdir(tmp_path)
    stop_after(monkeypatch, [2])
    train.main([*tiny, "--steps=20"])
    for name, log in BROKEN_LOGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_bytes(log)
    for name in ("out", "nowhere", *BROKEN_LOGS):
        with pytest.raises(SystemExit, match=f"^{name}/log.jsonl has no held-out loss: name dir"):
            train.main(["--compare", name])
    assert not (tmp_path / "compare.png").exists()


def test_windows_are_short_first_and_whole_at_the_end(tiny, out, monkeypatch, capsys):
    """A step has as many tokens in both; an evaluation on the way is in windows of that length."""
    shapes = []
    windows = []

    def noted_evaluate(model, corpus, process, T, limit=None):
        windows.append((T, limit))
        return 7.5, 3

    monkeypatch.setattr(train, "evaluate", noted_evaluate)

    def note_shape(run, result):
        tokens, _ = run.next_batch()
        shapes.append(tokens.shape)

    after_update(monkeypatch, note_shape)
    train.main([*tiny, "--steps=20"])
    assert shapes == 14 * [(8, 16)] + 6 * [(4, 32)]  # of the batch after each step
    assert windows == [(16, 64), (16, 64), (32, 64), (32, None)]
    assert [line["val_loss"] for line in read_log(out, "val_loss")] == [2.5] * 4
    shown = "step 5, 25% of the run: held-out loss 2.500 nats a token; a sample:"
    assert shown in capsys.readouterr().out


def break_loss(run, result):
    return result * math.nan


def break_norm(run, result):
    return result * torch.tensor([1, math.inf])


def break_weights(run, result):
    """Noticed by an evaluation: the loss of the step is that before its update."""
    run.model.wte.weight.data.fill_(math.nan)


# step -> what breaks in it, the message, the step of the checkpoint that is left
DIVERGED = {
    8: (break_loss, "^step 8, loss nan, norm nan: stopped", 5),
    9: (break_norm, r"^step 9, loss [\d.]+, norm inf: stopped", 5),
    10: (break_weights, "^step 10, val_loss nan: stopped", 5),
    20: (break_weights, "^step 20, val_loss nan, bits_per_byte nan: stopped", 20),
}


@pytest.mark.parametrize("stride", [1, 10])
@pytest.mark.parametrize("at", DIVERGED)
def test_a_number_that_is_not_finite_stops_the_run(tiny, out, monkeypatch, at, stride):
    """Of steps whose losses are read together, the first bad one is named."""
    react, message, kept = DIVERGED[at]
    monkeypatch.setitem(train.STRIDES, "cpu", stride)

    def react_once(run, result):
        return react(run, result) if run.step == at else None

    after_update(monkeypatch, react_once)
    with pytest.raises(SystemExit, match=f"{message}.* lower --matrix_lr"):
        train.main([*tiny, "--steps=20"])
    state = torch.load(out / "train_state.pt", weights_only=True)
    assert state["step"] == kept
    last = read_log(out, "loss")[-1]
    assert last["step"] == at - (at < 10)  # an evaluation follows its step


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
    (out / "loss.png.tmp").mkdir()  # cannot be written
    with pytest.raises(SystemExit, match=r"loss\.png cannot be written"):
        report.draw({"training": [(1, 2.0)]}, out / "loss.png")


def test_two_runs_do_not_write_to_one_directory(tiny, out, monkeypatch):
    """
    Each wrote over what the other had saved; or one ended, where both renamed a file at once, with
    the advice to make room.
    """

    def start_another(run, result):
        if run.step == 2:
            with pytest.raises(SystemExit, match=r"another run is writing to .*out: wait"):
                train.main([*tiny, "--steps=1"])

    after_update(monkeypatch, start_another)
    for more in ([], ["--overwrite"]):  # the first has given the directory back
        train.main([*tiny, "--steps=2", *more])
    assert_loads(out)


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
    "--data=nowhere": "does not exist; there is stdlib and shakespeare_char, and data/text",
    "--n_embd=10000000": "GiB free: lower --n_embd or --n_layer",
    "--n_embd=1000000000": "--n_embd: 1000000000 is too large, wanted less than 16777216",
    "--n_head=3": "n_embd 16 is not a multiple of n_head 3",
    "--bias": "--bias: Llama has no biases, leave it out or take --arch gpt2",
    "--dropout=2": "--dropout: 2 is too large, wanted less than 1",
    "--context_length=1000000": "training tokens are too few for windows of 1000000",
}


def test_a_run_that_is_refused_leaves_no_directory(tiny, out):
    with pytest.raises(SystemExit, match="too few for windows"):
        train.main([*tiny, "--context_length=1000000"])
    assert not out.exists()


UNASKED = {  # what may not go on by itself -> the question or the remedy
    "--overwrite": "--overwrite deletes a model: name its directory with --out DIR",
    "--overwrite --preset=shakespeare_char": "name its directory with --out DIR",
    "--minutes=0": "--minutes: 0 is too small, wanted at least 0.01",
    "--minutes=nan": "--minutes: nan is too small",
    "--data=CORPUS": "has the tokens of smollm2: did you mean --init smollm2?",
    "--data=CORPUS --n_layer=1": "",
    "--data=CORPUS --arch=gpt2 --out=a --overwrite": "",
}


@pytest.mark.parametrize("flags", UNASKED)
def test_no_model_is_deleted_or_begun_by_mistake(flags, corpus, tmp_path, capsys):
    """
    `--overwrite` deleted out/stdlib, which had not been named; `--data chat` without --init trained
    a new model of three layers for minutes.
    """
    folder = tmp_path / "chat"
    shutil.copytree(corpus, folder)
    write_json(folder / "meta.json", {"dtype": "int32", "init": "smollm2"})
    typed = flags.replace("CORPUS", str(folder)).split()
    with pytest.raises(SystemExit) if UNASKED[flags] else nullcontext():
        train.parse_args(typed)
    assert UNASKED[flags] in capsys.readouterr().err


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


def test_nothing_to_resume(tmp_path):
    """Nor from a version with other flags: a state with a weight decay ended in a traceback."""
    path = tmp_path / "train_state.pt"
    older = vars(train.parse_args([])) | {"weight_decay": 0.1}
    contents = {
        "No such file": None,
        "": b"torn",
        "Weights only load failed": {"args": tmp_path},  # whose unpickling could run anything
        "another version of train.py wrote it": {"args": older, "step": 3},
    }
    for reason, content in contents.items():
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content:
            torch.save(content, path)
        with pytest.raises(
            SystemExit, match=rf"nothing to resume, .*pt cannot be read \(.*{reason}"
        ) as error:
            train.main(["--resume", f"--out={tmp_path}"])
        assert "\n" not in str(error.value)  # torch explains itself in ten lines


@pytest.mark.parametrize("change", ["tokenizer", "tokens", "fewer"])
def test_a_corpus_that_was_made_anew_is_not_resumed(change, tiny, corpus, out, tmp_path):
    """
    In as many other tokens the run went on, and its model learnt what it could not read; with fewer
    it ended in the advice to lower --context_length, which --resume refuses.
    """
    train.main([*tiny, "--steps=1"])
    before = {path: path.read_bytes() for path in out.iterdir()}
    other = train_bpe([string.printable * 2 + "wholly other words, and quixotic ones " * 2], 300)
    assert other.vocab_size == 300
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    state = torch.load(out / "train_state.pt")
    state["args"]["data"] = str(folder)
    torch.save(state, out / "train_state.pt")
    if change == "tokenizer":
        other.save(folder)
    else:
        ids = read_corpus(folder, "train").tolist()[::-1]
        count = 40 if change == "fewer" else len(ids)
        np.array(ids[:count], "int32").tofile(folder / "train.bin")
    with pytest.raises(SystemExit, match=r"--data .*corpus has other tokens than .*out: make it"):
        train.main(["--resume", f"--out={out}"])
    del before[out / "train_state.pt"]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_file_with_tokens_in_its_name_is_not_a_models(tiny, out):
    """Any *token*.json in --out was deleted, without --overwrite."""
    out.mkdir()
    for name in ("my_tokens.json", "added_tokens.json"):
        (out / name).write_text("[]")
    train.main([*tiny, "--steps=1"])
    assert (out / "my_tokens.json").exists()
    assert not (out / "added_tokens.json").exists()


# as they are typed -> some of the settings
SETTINGS = """
 -> {"n_layer": 3, "context_length": 512, "short_context": 128, "steps": null, "arch": "llama"}
 -> {"activation": "silu", "out": "out/stdlib", "matrix_lr": 0.03}
--data=text -> {"n_layer": 3, "arch": "llama", "out": "out/text"}
--preset=gpt2-124M --data=/a/notes/ -> {"out": "out/notes"}
--preset=gpt2-124M --data=a/b --out=c -> {"out": "c"}
--n_layer=2 --minutes=5 -> {"n_layer": 2, "minutes": 5, "arch": "llama", "steps": null}
--context_length=64 -> {"short_context": 64}
--device=cuda -> {"n_layer": 6, "arch": "gpt2", "dropout": 0.1, "steps": 1500, "short_context": 256}
--device=cuda --minutes=5 --steps=7 -> {"n_layer": 6, "arch": "gpt2", "steps": 7}
--device=cuda --minutes=5 -> {"n_layer": 6, "arch": "gpt2", "steps": null}
--preset=gpt2-124M -> {"arch": "gpt2", "steps": 1000, "vector_lr": 2e-3, "n_embd": 768}
--activation=relu2 -> {"n_layer": 3, "arch": "llama", "activation": "relu2"}
--preset=shakespeare_char -> {"n_layer": 3, "n_head": 2, "batch_size": 16, "dropout": 0.0}
--preset=shakespeare_char --device=cuda -> {"n_layer": 6, "dropout": 0.2, "matrix_decay": 2.0}
"""


@pytest.mark.parametrize("row", SETTINGS.strip("\n").splitlines())
def test_flags_come_before_the_preset_of_the_device_and_that_before_defaults(row):
    typed, settings = row.split(" -> ")
    args = vars(train.parse_args(["--device=cpu", *typed.split()]))
    assert args | json.loads(settings) == args
    defaults = train.build_parser().parse_args([])
    assert args.keys() == vars(defaults).keys()


def test_a_llama_has_the_weights_of_a_gpt2(corpus):
    """Biases and GPT-2's activation are GPT-2's alone."""
    flags = ["--device=cpu", "--preset=gpt2-124M", "--arch=llama", "--n_layer=1"]
    config = new_run(flags, corpus).model.config
    assert (config.norm, config.activation, config.gated) == ("rms", "silu", True)
    assert (config.n_inner, config.bias, config.tied) == (2048, False, True)
    widths = {3: 8, 6: 16, 128: 344, 256: 680, 384: 1024}
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


def test_the_optimizers_have_the_settings_of_the_new_machine(tiny, corpus, out):
    """A CPU's AdamW, which is not `capturable`, kept a resumed GPU from its graph."""
    train.main([*tiny, "--steps=2"])
    state = torch.load(out / "train_state.pt", weights_only=True)
    for group in state["optimizers"][1]["param_groups"]:
        group["capturable"] = True
    run = new_run([*tiny, "--steps=2"], corpus)
    run.load(state)
    assert not any(group["capturable"] for group in run.optimizers[1].param_groups)


# --------------------------------------------------------------------------------------------------
# The output of a run


def test_without_an_end_of_text_token_the_first_token_has_no_score(out, tmp_path):
    """Nothing comes before it; nor do its bytes count among those that the bits are divided by."""
    tokenizer = char_tokenizer("abcé\n")
    val = "éab\ncab\n" * 5
    ids = tokenizer.encode("abcé\n" * 30)
    write_corpus(tmp_path, [ids], [tokenizer.encode(val)], tokenizer)
    train.main([*TINY, "--steps=1", f"--data={tmp_path}", f"--out={out}"])
    (last,) = read_log(out, "bits_per_byte")
    nats = last["val_loss"] * (len(val) - 1)
    bits = nats / math.log(2) / len(val[1:].encode())
    assert last["bits_per_byte"] == pytest.approx(bits, abs=1e-4)


def test_samples_follow_temperature_and_seed_and_end_where_the_model_ends_them(
    tiny, corpus, monkeypatch
):
    """
    Text behind the end of a text is another text; a BOS goes before that end. Of two tokens, the
    second is drawn as often as softmax(difference / temperature). A chat model's answers followed
    an end of text, and looked broken: now the first question held out.
    """
    run = new_run(tiny, corpus)
    line = run.corpus.tokenizer.encode("x = 1\n")
    end = [299]
    logits = torch.tensor([[0.0, 1.0]]).repeat(20_000, 1)
    drawn = []

    def generate(prompts, length, choose):
        assert prompts.tolist() == [prompt]
        assert length == report.SAMPLE_TOKENS
        drawn.append(choose(logits, 0).double())
        return torch.tensor([prompt + line + end + line])

    monkeypatch.setattr(run.model, "generate", generate)
    prompt = end
    for run.args.seed in (1, 2, 1):
        assert report.generate_text(run) == "x = 1\n"
    first, other, again = drawn
    prompt = run.corpus.tokenizer.bos = [7]
    assert report.generate_text(run) == "x = 1\n"
    prompt = run.corpus.tokenizer.encode("1 + 1?") + end + [7]
    run.corpus.val = ~np.array(prompt * 2)
    run.corpus.val[len(prompt) :] = 5
    shown = run.corpus.tokenizer.decode([*prompt, *line])
    assert report.generate_text(run) == shown
    share = 1 / (1 + math.exp(-1 / report.TEMPERATURE))
    assert first.mean().item() == pytest.approx(share, abs=0.02)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# --------------------------------------------------------------------------------------------------
# Real processes, real signals


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_second_signal_kills(monkeypatch, capfd, rank):
    """
    The first asks for an end after the step under way, and is answered; the second does not wait
    for it. Steps of a large model take a minute: Ctrl-C seemed to do nothing, and a second one lost
    the run.
    """
    monkeypatch.setenv("RANK", rank)
    caught = train.catch_signals()
    for number in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
        os.kill(os.getpid(), number)
        assert caught[-1] == number
        assert signal.getsignal(number) is signal.SIG_DFL
    answer = "a second signal ends the run unsaved\n"
    assert capfd.readouterr().err.count(answer) == (rank == "0")


def test_a_signal_stops_a_run_whose_terminal_is_gone(monkeypatch):
    """Would catch: the answer raises OSError in the middle of the step, and nothing is saved."""
    monkeypatch.setenv("RANK", "0")
    caught = train.catch_signals()
    monkeypatch.setattr(os, "write", MagicMock(side_effect=OSError("Input/output error")))
    os.kill(os.getpid(), signal.SIGTERM)
    assert caught == [signal.SIGTERM]


@pytest.mark.slow
def test_kill_9_at_random_moments_leaves_a_loadable_checkpoint(tiny, out):
    """
    Each life saves after every step, so that most kills fall into a save; the next life resumes
    what is left. The last one ends by Ctrl-C, with status 0 and what it had.
    """
    moments = random.Random(0)
    step = 0
    flags = [*tiny, "--steps=1000000", "--eval_every=1"]
    for sign in [signal.SIGKILL] * 25 + [signal.SIGINT]:
        command = [sys.executable, str(ROOT / "train.py"), *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        evaluations = (line for line in process.stdout if line.startswith("step "))
        for _ in range(2):  # it saves after each
            next(evaluations)
        time.sleep(moments.random() * 0.2)
        process.send_signal(sign)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == (0 if sign == signal.SIGINT else -sign)
        before = step
        step = assert_loads(out)["step"]
        assert step > before
        flags = ["--resume", f"--out={out}"]
    assert f"stopped and saved at step {step}" in printed
