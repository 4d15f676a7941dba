"""
train.py: what a run leaves behind, that it can be stopped and resumed, its flags, and how it ends
if it cannot continue.
"""

import io
import json
import math
import os
import shutil
import signal
import string
import sys
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from runs import (
    TINY,
    after_update,
    assert_loads,
    new_run,
    read_log,
    resume,
    same,
    stop_after,
)
from test_checkpoint import random_model

import train
from checkpoint import load_checkpoint, save_checkpoint
from common import end_with_one_line
from training import report
from training.corpus import char_tokenizer, read_corpus, train_bpe, write_corpus

# --------------------------------------------------------------------------------------------------
# The whole run


@pytest.mark.filterwarnings("error:No artists")  # in the legend
def test_a_run_learns_and_leaves_a_checkpoint(pictures, train_tiny, out, monkeypatch, capsys):
    """
    It prints its result, logs each step, and draws the loss. Previously a misspelt MPLBACKEND, or a
    name with a formula or bytes, ended in a traceback, and a name that begins with _ was left out.
    """
    monkeypatch.setenv("MPLBACKEND", "misspelt")
    train_tiny("--steps=40")
    steps = read_log(out, "loss")
    last = read_log(out, "val_loss")[-1]
    assert [line["step"] for line in steps] == list(range(1, 41))
    assert steps[0]["loss"] == pytest.approx(math.log(300), abs=0.1)  # chance
    assert last["val_loss"] < steps[0]["loss"] - 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    report.draw({os.fsdecode(b"_$x^{2_$ \xff"): [(1, 2.0)]}, out / "compare.png")
    assert assert_loads(out)["step"] == 40
    printed = capsys.readouterr().out
    parameters = 300 * 16 + 4 * 16 * 16 + 3 * 40 * 16 + 3 * 16
    assert f"model:  llama, {parameters / 1e6:.2f}M parameters: 1 layer of width 16" in printed
    assert "held out: 1,001 tokens, each scored once, in windows of 32\n" in printed
    assert f"val loss: {last['val_loss']:.4f}"[:-1] in printed  # both are rounded
    assert f"bits per byte: {last['bits_per_byte']:.3f}" in printed


# between two evaluations; then immediately, at an evaluation, and in the long windows of the last
# quarter
STOPS = {"by hand": (7,), "by make run": (1, 2, 10, 16)}


@pytest.mark.parametrize("typed", STOPS)
def test_a_stopped_run_resumes_to_the_losses_of_an_uninterrupted_one(
    typed, tiny, train_tiny, corpus, out, tmp_path, monkeypatch, capsys
):
    """
    They are equal to the bit, including dropout, because batches and noise are functions of (seed,
    step). Previously, after `make run`, the command to continue used `python`, which has no torch
    outside the environment. From another folder, a relative --data was not found. And without a
    tokenizer, or with that of another run, what was resumed could not be served. A shell can also
    read the command if --out has a blank.
    """
    out = out.with_name("my model")
    monkeypatch.chdir(corpus.parent)
    stops = STOPS[typed]
    monkeypatch.delenv("MAKELEVEL", raising=False)
    command = f"python train.py --resume --out '{out}'"
    if typed == "by make run":
        monkeypatch.setenv("MAKELEVEL", "1")
        command = "make run"
    whole = tmp_path / "whole"
    train_tiny("--steps=20", f"--out={whole}")
    stop_after(monkeypatch, stops)
    flags = [*tiny, "--steps=20", f"--data={corpus.name}", f"--out={out}"]
    for stop in stops:
        train.main(flags)  # returns: exit status 0
        flags = ["--resume", f"--out={out}"]
        printed = capsys.readouterr().out
        assert f"stopped and saved at step {stop}; to continue: `{command}`\n" in printed
        assert assert_loads(out)["step"] == stop
        assert read_log(out)[-1]["step"] == stop
        char_tokenizer("abc").save(out)
        monkeypatch.chdir(tmp_path)
    train.main(flags)
    # a run that is asked to stop does not evaluate first
    lines = read_log(whole)
    expected = [line for line in lines if "loss" in line or line["step"] not in stops]
    assert read_log(out) == expected
    assert same(load_checkpoint(whole).state_dict(), load_checkpoint(out).state_dict())
    train.main(flags)  # a finished run only reports again
    assert read_log(out) == expected
    printed = capsys.readouterr().out
    # scoring once took 33 s in silence
    assert "100% done" in printed and "held-out text, 1,001" in printed
    assert "val loss:" in printed


def test_what_torchrun_starts_again_goes_on(tiny, out, monkeypatch, capsys):
    """
    Previously, with --max-restarts, the same command ended with "holds a model". Would catch: a
    value filled in by the first start, here the dtype, taken for a flag of another run; a graph
    that remains when processes part, because NCCL would wait for ever for a process whose messages
    it still has.
    """
    tiny = [flag for flag in tiny if not flag.startswith("--dtype")]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    stop_after(monkeypatch, [7])
    runs = []
    left = []
    after_update(monkeypatch, lambda run, result: runs.append(run))
    monkeypatch.setattr(
        train.Process, "shut_down", lambda process: left.append(runs[-1].train_step)
    )
    for _ in range(2):  # nothing was saved before the first
        train.main([*tiny, "--steps=20"])
    assert left == [None, None]
    assert "20 steps, from step 7, 35% done" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="out holds a model"):
        train.main([*tiny, "--steps=19"])  # another run, which was refused before the restart
    assert read_log(out)[-1]["step"] == 20


# of no run; or of a run that was stopped before it was evaluated
WITHOUT_LOSS = {
    "torn": b'{"step"',
    "bytes": b"\xff",
    "number": b"5",
    "stepless": b'{"val_loss": 1}',
    "stopped": b'{"step": 2, "loss": 5}',
}


def test_runs_are_compared(train_tiny, out, tmp_path, monkeypatch, capsys):
    """
    Would catch: a run that is started; a run that was stopped taken for one without a log; another
    field, or another run's.
    """
    ended = tmp_path / "ended"
    stop_after(monkeypatch, [7])
    train_tiny("--steps=20")
    train_tiny("--steps=6", f"--out={ended}")
    for name, log in WITHOUT_LOSS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_bytes(log)
    monkeypatch.chdir(tmp_path)
    curves = []
    monkeypatch.setattr(report, "draw", lambda *args: curves.append(args))
    monkeypatch.setattr(train, "only_run_in", None)  # otherwise nothing is written
    capsys.readouterr()
    train.main(["--compare", "out", "ended"])
    first, second = capsys.readouterr().out.splitlines()
    [five] = read_log(out, "val_loss")
    log = read_log(ended, "val_loss")
    early = five["val_loss"]
    points = [(line["step"], line["val_loss"]) for line in log]
    bits = log[-1]["bits_per_byte"]
    assert first == f"out: step 7, held-out loss {early}, bits per byte (at the end)"
    assert second == f"ended: step 6, held-out loss {points[-1][1]}, bits per byte {bits}"
    assert curves == [({"out": [(5, early)], "ended": points}, Path("compare.png"))]
    with pytest.raises(SystemExit, match=r"^nowhere/log.jsonl: No such file or directory; name"):
        train.main(["--compare", "nowhere"])
    for name in WITHOUT_LOSS:
        with pytest.raises(SystemExit, match=f"^{name}/log.jsonl has no held-out loss: name dir"):
            train.main(["--compare", name])


def test_windows_are_short_first_and_whole_at_the_end(train_tiny, out, monkeypatch, capsys):
    """
    A step has as many tokens in both. An evaluation on the way uses windows of the current length.
    """
    shapes = []
    windows = []

    def noted_evaluate(model, corpus, process, T, limit=None):
        windows.append((T, limit))
        return 7.5, 3

    monkeypatch.setattr(train, "evaluate", noted_evaluate)
    # of the batch after each step
    after_update(monkeypatch, lambda run, result: shapes.append(run.next_batch()[0].shape))
    train_tiny("--steps=20")
    assert shapes == 14 * [(8, 16)] + 6 * [(4, 32)]
    assert windows == [(16, 64), (16, 64), (32, 64), (32, None)]
    logged = [(line["step"], line["val_loss"]) for line in read_log(out, "val_loss")]
    assert logged == [(5, 2.5), (10, 2.5), (15, 2.5), (20, 2.5)]
    shown = "step 5, 25% of the run: held-out loss 2.500 nats per token; a sample:"
    assert shown in capsys.readouterr().out


HEART = "warning: the held-out loss was 2.0 and rose to 2.2, probably because the model learnt its "


@pytest.mark.parametrize("losses", [(2.5, 2.0, 2.2, 1.0), (2.5, 2.0, 2.1, 9.0)])
def test_a_text_that_is_learnt_by_heart_is_remarked_on(losses, train_tiny, monkeypatch, capsys):
    """README's example read 92,000 tokens 15 times, and nothing said that it was too often."""
    left = iter(losses)
    monkeypatch.setattr(train, "evaluate", lambda *_: (3 * next(left), 3))
    train_tiny("--steps=20")
    assert (HEART in capsys.readouterr().out) == (losses[2] > 2.1)


# step, and how many are read together -> factors of its loss and norm, or of the weights, which an
# evaluation notices (the loss is that before its step's update); the message; the step that is kept
DIVERGED = {
    (8, 10): ([math.nan, math.nan], "^step 8, loss nan, norm nan: stopped", 5),
    (9, 1): ([1, math.inf], r"^step 9, loss [\d.]+, norm inf: stopped", 5),
    (10, 1): (math.nan, "^step 10, val_loss nan: stopped", 5),
    (20, 10): (math.nan, "^step 20, val_loss nan, bits_per_byte nan: stopped", 20),
}


@pytest.mark.parametrize(("at", "stride"), DIVERGED)
def test_a_number_that_is_not_finite_stops_the_run(at, stride, train_tiny, out, monkeypatch):
    """If the losses of several steps are read together, the first bad one is named."""
    factor, message, kept = DIVERGED[at, stride]

    def diverge(run, result):
        broken = run.model.wte.weight.data if factor is math.nan else result
        if run.step == at:
            broken *= torch.tensor(factor)

    monkeypatch.setitem(train.STRIDES, "cpu", stride)
    after_update(monkeypatch, diverge)
    advice = "; what was saved before is kept. Start again with a lower --matrix_lr"
    with pytest.raises(SystemExit, match=f"{message}{advice}"):
        train_tiny("--steps=20")
    state = torch.load(out / "train_state.pt", weights_only=True)
    assert state["step"] == kept
    # an evaluation follows its step
    assert read_log(out, "loss")[-1]["step"] == at - (at < 10)


@pytest.mark.parametrize("rank", ["0", ""])
def test_two_runs_do_not_write_to_one_directory(rank, train_tiny, out, monkeypatch):
    """
    Previously each overwrote what the other had saved. Or, if both renamed a file at the same time,
    one ended with the advice to make room. Later, this was only so if RANK was set, but empty.
    """
    monkeypatch.setenv("RANK", rank)

    def start_another(run, result):
        if run.step == 2:
            with pytest.raises(SystemExit, match=r"another run is writing to .*out: wait"):
                train_tiny("--steps=1")

    after_update(monkeypatch, start_another)
    for more in ([], ["--overwrite"]):  # the first has released the directory
        train_tiny("--steps=2", *more)
    assert_loads(out)


def test_runs_without_the_optional_packages(train_tiny, out, monkeypatch, capsys):
    for name in ("matplotlib", "matplotlib.figure", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None)
    train_tiny("--steps=5")
    assert "no loss.png: matplotlib is not installed" in capsys.readouterr().out
    assert_loads(out)


# --------------------------------------------------------------------------------------------------
# Flags


# as typed, where RUN stands for the flags of a run into a model's directory -> the message
MISTAKES = """
--resume --steps=9 --seed=1 -> leave out --seed, --steps
--overwrite --data=nowhere -> --overwrite deletes a model: name its directory with --out DIR
--minutes=0 -> --minutes: 0 is too small, wanted at least 0.01
--minutes=nan -> --minutes: nan is too small
--dropout=2 -> --dropout: 2 is too large, wanted less than 1
--n_embd=1000000000 -> --n_embd: 1000000000 is too large, wanted less than 16777216
--bias -> --bias: Llama has no biases; leave it out, or use --arch gpt2
--data=CHAT -> has tokens for smollm2: did you mean --init smollm2?
--init=nowhere -> there is no directory nowhere
--init=out --preset=gpt2-124M --no-bias --n_head=3 -> AdamW trains it: leave out --bias, --n_head, --preset
--init=out --arch=gpt2 --matrix_lr=0.1 --momentum=0.9 -> it: leave out --arch, --matrix_lr, --momentum
--init=out --context_length=34 -> --context_length is larger than the model's limit, 33
--init=out --out=out/../out --data=nowhere -> out: name another folder, for example --out
--init=out --out=out/../out --data=nowhere --overwrite -> --init and --out are both
RUN --device=cuda -> --device cuda:0: the number of GPUs here is 0
RUN --data=nowhere -> does not exist; choose stdlib or shakespeare_char, or create a corpus
RUN --n_embd=1000000 -> GiB free: lower --n_embd or --n_layer
RUN --batch_size=2000000000 -> GiB free: lower --batch_size 2000000000
RUN --out=LONG -> File name too long: 'aaa
--data=LONG -> File name too long
RUN --n_head=3 -> n_embd 16 is not a multiple of n_head 3
RUN --context_length=1000000 -> training tokens are too few for windows of 1000000
"""  # noqa: E501


@pytest.fixture
def chat(tmp_path, monkeypatch) -> str:
    """
    Make a corpus of dialogues, as far as flags see it, and two models, of contexts 33 and 600.
    """
    monkeypatch.chdir(tmp_path)
    save_checkpoint(random_model(), "out")
    save_checkpoint(random_model(context_length=600), "long")
    (tmp_path / "meta.json").write_text('{"init": "smollm2"}')
    return str(tmp_path)


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_mistakes_get_a_message_and_delete_nothing(row, chat, tiny, out, monkeypatch, capsys):
    """
    Previously `--overwrite` deleted out/stdlib, which had not been named, and `--overwrite --data
    TYPO` deleted the model before it was refused. `--data chat` without --init trained a new model
    of three layers for minutes. If --init and --out were the same, --overwrite deleted the model to
    begin from.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    typed, message = row.split(" -> ")
    run = " ".join([*tiny, "--steps=2 --overwrite"])
    typed = typed.replace("RUN", run).replace("CHAT", chat).replace("LONG", 300 * "a")
    with pytest.raises(SystemExit) as error:
        train.main(typed.split())
    assert error.value.code not in (0, None)
    assert message in f"{error.value}{capsys.readouterr().err}"
    assert load_checkpoint(out)


def test_nothing_to_resume(tmp_path):
    """
    A run of a version with other flags cannot be resumed, either: a state with a weight decay used
    to end in a traceback.
    """
    path = tmp_path / "train_state.pt"
    older = vars(train.parse_args([])) | {"weight_decay": 0.1}
    contents = {
        "No such file": None,
        "Weights only load failed": {"args": tmp_path},  # unpickling it could run anything
        "another version of train.py wrote it": {"args": older, "step": 3},
    }
    for reason, content in contents.items():
        if content:
            torch.save(content, path)
        message = rf"nothing to resume: .*pt cannot be read \(.*{reason}"
        with pytest.raises(SystemExit, match=message) as error:
            resume(tmp_path)
        assert "\n" not in str(error.value)  # torch's own explanation has ten lines


@pytest.mark.parametrize("changes", [{"model": {}}, {"optimizers": []}])
def test_a_state_with_other_contents_gets_a_message(changes, train_tiny, out):
    """Previously a state of another version with the same flags ended in a traceback."""
    train_tiny("--steps=1")
    torch.save(assert_loads(out) | changes, out / "train_state.pt")
    message = r"this version of train\.py cannot resume .*train_state\.pt \(.*\): use the one that"
    with pytest.raises(SystemExit, match=message) as error:
        resume(out)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["tokenizer", "val", "train", "less to train"])
def test_a_corpus_that_was_made_anew_is_not_resumed(change, train_tiny, corpus, out, tmp_path):
    """
    Previously, with as many other tokens, the run continued, and its model learned what it could
    not read. With fewer tokens it ended in the advice to lower --context_length, which --resume
    refuses.
    """
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    train_tiny("--steps=1", f"--data={folder}")
    before = {path: path.read_bytes() for path in out.iterdir()}
    if change == "tokenizer":
        text = string.printable * 2 + "wholly other words, and quixotic ones " * 2
        train_bpe([text], 300).save(folder)
    else:
        split = change.removeprefix("less to ")
        ids = np.array(read_corpus(folder, split))[::-1]
        ids[: 40 if change != split else None].tofile(folder / f"{split}.bin")
    changed = r"--data .*corpus has different tokens than when .*out was trained\. Restore it"
    with pytest.raises(SystemExit, match=changed):
        resume(out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


# as they are typed -> some of the settings
SETTINGS = """
 -> {"n_layer": 3, "context_length": 512, "short_context": 128, "steps": null, "arch": "llama"}
 -> {"activation": "silu", "out": "out/stdlib", "matrix_lr": 0.03}
--data=text -> {"n_layer": 3, "arch": "llama", "out": "out/text"}
--preset=gpt2-124M --data=/a/notes/ -> {"out": "out/notes"}
--preset=gpt2-124M --data=/a/b/.. -> {"out": "out/a"}
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
--data=CHAT --n_layer=1 -> {"n_layer": 1}
--data=CHAT --arch=gpt2 --out=a --overwrite -> {"out": "a"}
--init=out -> {"context_length": 33, "short_context": 33, "out": "out/finetuned", "batch_size": 4}
--init=long --data=x -> {"context_length": 512, "short_context": 512, "out": "out/finetuned"}
"""


@pytest.mark.parametrize("row", SETTINGS.strip("\n").splitlines())
def test_flags_come_before_the_preset_of_the_device_and_that_before_defaults(row, chat):
    """Previously --data=. meant --out=out itself, and --data=.. the folder that out is in."""
    typed, settings = row.replace("CHAT", chat).split(" -> ")
    args = vars(train.parse_args(["--device=cpu", *typed.split()]))
    assert args | json.loads(settings) == args
    defaults = train.build_parser().parse_args([])
    assert args.keys() == vars(defaults).keys()


def test_a_llama_has_the_weights_of_a_gpt2(corpus):
    """Only GPT-2 has biases and GPT-2's activation."""
    flags = f"--data={corpus} --device=cpu --preset=gpt2-124M --arch=llama --n_layer=1"
    config = new_run(flags.split()).model.config
    assert (config.norm, config.activation, config.gated) == ("rms", "silu", True)
    assert (config.n_inner, config.bias, config.tied) == (2048, False, True)
    widths = {1: 8, 128: 344, 376: 1000, 384: 1024}
    assert {n: train.gated_width(n) for n in widths} == widths


def test_a_resumed_run_may_change_its_directory_and_its_machine(
    tiny, train_tiny, out, tmp_path, monkeypatch
):
    train_tiny("--steps=1")
    asked = []

    def note(args):
        asked.append(vars(args))
        sys.exit()

    monkeypatch.setattr(train, "init_process", note)
    moved = out.rename(tmp_path / "moved")
    with pytest.raises(SystemExit):
        resume(moved, "--device=cuda", "--compile")
    changed = {"out": str(moved), "resume": True, "device": "cuda", "compile": True}
    assert asked == [vars(train.parse_args([*tiny, "--steps=1"])) | changed]


def test_the_optimizers_have_the_settings_of_the_new_machine(tiny, train_tiny, out):
    """
    Previously the AdamW of a CPU, which is not `capturable`, kept a resumed GPU run from its graph.
    """
    train_tiny("--steps=2")
    state = assert_loads(out)
    state["optimizers"][1]["param_groups"][0]["capturable"] = True
    run = new_run([*tiny, "--steps=2"])
    run.load(state)
    assert run.optimizers[1].param_groups[0]["capturable"] is False


# --------------------------------------------------------------------------------------------------
# The output of a run


def test_without_an_end_of_text_token_the_first_token_has_no_score(out, tmp_path):
    """Nothing comes before it. Its bytes do not count in the bits per byte, either."""
    tokenizer = char_tokenizer("abcé\n")
    val = "éab\ncab\n" * 5
    ids = tokenizer.encode("abcé\n" * 30)
    write_corpus(tmp_path, [ids], [tokenizer.encode(val)], tokenizer)
    train.main([*TINY, "--steps=1", f"--data={tmp_path}", f"--out={out}"])
    (last,) = read_log(out, "bits_per_byte")
    nats = last["val_loss"] * (len(val) - 1)
    bits = nats / math.log(2) / len(val[1:].encode())
    assert last["bits_per_byte"] == pytest.approx(bits, abs=1e-4)


STREAMS = {
    "a full disk": partial(open, "/dev/full", "w"),
    "closed": lambda: None,
    "of few characters": lambda: io.TextIOWrapper(io.BytesIO(), "latin-1"),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_run_that_cannot_print_goes_on(kind, train_tiny, out, tmp_path, monkeypatch):
    """Previously `train.py | head`, or a sample that the terminal could not show, ended it."""
    monkeypatch.chdir(tmp_path)
    for name in "stdout", "stderr":
        stream = STREAMS[kind]()
        if stream:
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, name, stream)
    for module in train, report:
        monkeypatch.setattr(module, "generate_text", lambda run: "語")
    monkeypatch.setattr(sys, "excepthook", None)  # end_with_one_line sets it
    end_with_one_line()  # as the command does
    train_tiny("--steps=6")
    assert (out / "loss.png").exists()
    report.compare([str(out)])


def test_a_checkpoint_is_saved_before_its_sample_is_printed(train_tiny, out, monkeypatch):
    """A terminal that was paused with Ctrl-S keeps a run waiting."""
    is_saved = []
    path = out / "train_state.pt"
    monkeypatch.setattr(train.Process, "print", lambda *_: is_saved.append(path.exists()))
    train_tiny("--steps=6")
    assert is_saved[:2] == [False, True]  # the settings, and step 5


def test_samples_follow_temperature_and_seed_and_end_where_the_model_ends_them(tiny, monkeypatch):
    """
    The text after the end of a text is another text; a BOS comes before that end. Of two tokens,
    the second is drawn as often as softmax(difference / temperature) says. Previously a chat
    model's samples followed an end of text, and looked broken. Now they answer the first held-out
    question.
    """
    run = new_run(tiny)
    line = run.corpus.tokenizer.encode("x = 1\n")
    end = [299]
    logits = torch.tensor([0.0, 1.0]).repeat(20_000, 1)
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
# Signals


@pytest.mark.parametrize(("rank", "answers"), [("0", 1), ("1", 0), ("terminal is gone", 0)])
def test_a_second_signal_kills(rank, answers, monkeypatch, capfd):
    """
    The first asks for an end after the running step, and is answered. The second does not wait for
    it. Steps of a large model take a minute. Previously Ctrl-C seemed to do nothing, and a second
    one lost the run. And if its terminal was gone, the answer raised OSError in the middle of the
    step.
    """
    monkeypatch.setenv("RANK", rank.replace("terminal is gone", "0"))
    caught = train.catch_signals()
    if rank == "terminal is gone":
        monkeypatch.setattr(os, "write", MagicMock(side_effect=OSError("Input/output error")))
    for number in (signal.SIGTERM, signal.SIGINT):
        assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
        os.kill(os.getpid(), number)
        assert caught[-1] == number
        assert signal.getsignal(number) is signal.SIG_DFL
    answer = "a second signal ends the run unsaved\n"
    assert capfd.readouterr().err.count(answer) == answers


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_terminal_that_closes_asks_for_an_end_unless_nohup_ignores_it(before):
    """Previously it killed the run unsaved. The shell and the terminal may each send SIGHUP."""
    signal.signal(signal.SIGHUP, before)
    caught = train.catch_signals()
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert caught == ([signal.SIGHUP] if before == signal.SIG_DFL else [])
