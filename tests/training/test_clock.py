"""
The clock of machine.py: a run of so many minutes ends in time and well, whatever else slows it
down, and warns if the minutes are too few.
"""

import os
import sys
from unittest.mock import patch

import pytest
import torch
from runs import after_update, assert_loads, new_run, read_log, stop_after

import train
from training import machine


class Time:
    """A clock on which a training step takes `step_seconds` and nothing else any time."""

    def __init__(self):
        self.now = 1000.0
        self.step_seconds = lambda step: 1.0
        self.steps = []  # of each step: the share of the run before it, the learning rate's factor

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def seconds(monkeypatch) -> Time:
    time = Time()
    learning_rate = train.learning_rate

    def noted(step, share, args):
        factor = learning_rate(step, share, args)
        time.steps.append((share, factor))
        return factor

    def pass_time(run, result):
        time.now += time.step_seconds(run.step)

    for module in (train, machine):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(train, "learning_rate", noted)
    monkeypatch.setattr(machine, "closing_seconds", lambda run, step_seconds: 3.0)
    after_update(monkeypatch, pass_time)
    return time


def slowly(monkeypatch, owner, name: str, time: Time, seconds: float):
    """Have a function take so long."""
    function = getattr(owner, name)

    def take_time(*arguments):
        time.now += seconds
        return function(*arguments)

    monkeypatch.setattr(owner, name, take_time)


def test_the_clock_keeps_time_for_the_end(tiny, corpus):
    """
    1,001 held-out tokens, and 64 passes of a sample, at 0.4 of a step of 4 x 32; and 5 seconds for
    the rest. Samples of a model of 135M parameters took minutes for which no time was kept.
    """
    run = new_run(tiny, corpus)
    forward = 0.4 * 2.0 * (1001 + 64 * 129) / 128
    assert machine.closing_seconds(run, 2.0) == pytest.approx(forward + 5)


# a step's seconds -> steps done in a minute of which three seconds are kept for the end
PACES = {
    "steady": (lambda step: 1.0, 57),
    "a slow first step": (lambda step: 20.0 if step == 1 else 1.0, 38),
    "busy from the tenth step on": (lambda step: 1.0 if step < 10 else 2.5, 29),
    "far too busy": (lambda step: 1.0 if step < 10 else 20.0, 12),
}


@pytest.mark.parametrize("pace", PACES)
def test_a_busy_machine_does_fewer_steps_and_ends_well(tiny, out, seconds, pace):
    """Before, a slow first step, which allocates, ended the run."""
    seconds.step_seconds, steps = PACES[pace]
    train.main([*tiny, "--minutes=1", "--eval_every=1000"])
    assert assert_loads(out)["step"] == steps
    first = seconds.step_seconds(1)
    last = seconds.step_seconds(steps)
    assert 57 <= seconds.now - 1000 < 57 + last
    [*_, (share, factor)] = seconds.steps
    assert share > 1 - 2 * last / (57 - first)
    assert factor == pytest.approx(min(1, (1 - share) / 0.6))


def test_one_slow_step_does_not_end_a_run(tiny, out, seconds, monkeypatch):
    """The time for the end is estimated by the median step: else 25 s would be kept for it here."""
    monkeypatch.setattr(machine, "closing_seconds", lambda run, step_seconds: 5 * step_seconds)
    seconds.step_seconds = lambda step: 5.0 if step == 40 else 1.0
    train.main([*tiny, "--minutes=1", "--eval_every=1000"])
    assert assert_loads(out)["step"] == 51


def test_the_minutes_begin_when_the_corpus_is_made(tiny, out, monkeypatch, seconds, capsys):
    """In a fresh clone the corpus took most of the minutes: 2 steps, noise, and no word of it."""
    monkeypatch.setattr(machine, "LEAST_STEPS", 20)
    slowly(monkeypatch, train, "load_corpus", seconds, 46)
    train.main([*tiny, "--minutes=0.8"])
    assert assert_loads(out)["step"] == 45  # of 48 seconds three are for the end
    printed = capsys.readouterr().out
    assert "\n45 steps, 91 s in all; checkpoint in" in printed
    assert "warning: only about" not in printed


FEW = "warning: only about {} steps fit into {}, and in fewer than {} a model learns little: begin "
FEW += "again with "
FLAGS = "the same flags and --minutes {} --out OUT --overwrite"
WARNINGS = {
    "one short": (58, "--minutes=1", [57, "1 minute", 58, 2]),
    "just enough": (57, "--minutes=1", None),
    "steps": (400, "--steps=30", None),  # as asked for
    "at the end": (200, "--minutes=0.08", [2, "0.08 minutes", 200, 4]),  # nothing to wait for
}


@pytest.mark.parametrize("case", WARNINGS)
def test_too_few_minutes_are_warned_of(tiny, out, monkeypatch, seconds, capsys, case):
    """While there is time to begin again, and at the end; with the minutes that would do."""
    least, flags, numbers = WARNINGS[case]
    monkeypatch.setattr(machine, "LEAST_STEPS", least)
    monkeypatch.delenv("MAKELEVEL", raising=False)
    train.main([*tiny, flags, "--eval_every=10"])
    early, late = capsys.readouterr().out.split("scoring")
    warning = (FEW + FLAGS).format(*numbers).replace("OUT", str(out)) if numbers else "no warning"
    for printed in early.partition("step 10,")[0], late:
        assert (warning in printed) == ("warning" in printed) == bool(numbers)


def test_a_busy_machine_is_warned_of_what_became_of_its_minutes(tiny, seconds, capsys):
    """When it began there was time for 200 steps: a model of 84 was kept without a word."""
    seconds.step_seconds = lambda step: 0.25 if step < 20 else 2.0
    train.main([*tiny, "--minutes=1", "--eval_every=1000"])
    early, late = capsys.readouterr().out.split("scoring")
    assert "warning" not in early
    assert "warning: only about 46 steps fit into 1 minute, " in late
    assert " --minutes 7 " in late  # 57 s, 154 steps of 2 s, 3 s for the end; and a tenth


# seconds a step, an evaluation, and the end -> the steps of a minute, of 60, and minutes
ADVICE = {
    "slow": (4.0, 0.0, 3.0, 15, 5),
    "evaluations take longer than steps": (1.0, 9.0, 3.0, 12, 6),
    "the end takes longer than the run": (1.0, 0.0, 90.0, 2, 3),
}


@pytest.mark.parametrize("case", ADVICE)
def test_the_minutes_of_a_warning_suffice(tiny, monkeypatch, seconds, capsys, case):
    """As `make run` is told, with a command that can be pasted. 3 minutes were advised for 19."""
    step, evaluation, closing, steps, minutes = ADVICE[case]
    monkeypatch.setattr(machine, "LEAST_STEPS", 60)
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setattr(machine, "closing_seconds", lambda run, step_seconds: closing)
    slowly(monkeypatch, train.Run, "evaluate_and_sample", seconds, evaluation)
    seconds.step_seconds = lambda at: step
    often = f"--eval_every={2 if evaluation else 1000}"
    train.main([*tiny, "--minutes=1", often])
    late = capsys.readouterr().out.partition("scoring")[2]
    assert f"only about {steps} steps fit into 1 minute" in late
    command = f"`{os.path.relpath(sys.executable)} train.py --minutes {minutes} --out "
    assert command in late and "--overwrite`, then make run\n" in late
    train.main([*tiny, f"--minutes={minutes}", often, "--overwrite"])
    assert "warning:" not in capsys.readouterr().out.partition("scoring")[2]


@pytest.mark.parametrize("steps", [2, 19.9, 20, 57])
def test_a_finetune_needs_fewer_steps(tiny, corpus, capsys, seconds, steps):
    """`--init --minutes 1` made 2 steps, and said nothing."""
    run = new_run(tiny, corpus)
    run.args.init = "base"
    clock = machine.Clock(run, seconds.now)
    for run.step in (1, 2):
        clock.share(6.0)
        seconds.now += 6.0
    capsys.readouterr()
    clock.warn_of_few_steps(steps)
    printed = capsys.readouterr().out
    assert ("in fewer than 20 a model" in printed) == (steps < 20)
    assert steps > 2 or " --minutes 3 " in printed  # 12 s, 18 steps of 6 s, 3 s for the end


def test_evaluations_are_part_of_a_timed_run(tiny, monkeypatch, seconds):
    """
    Only the steps' own time made the learning rate fall: with evaluations in between, and on a GPU,
    where each tenth step alone is timed, a run ended at nearly its peak.
    """
    slowly(monkeypatch, train.Run, "evaluate_and_sample", seconds, 4.0)
    train.main([*tiny, "--minutes=1", "--eval_every=5"])
    shares = [share for share, _ in seconds.steps]
    # a step takes a second, each fifth is followed by four: 57 s are 33 steps and 6 evaluations ..
    assert len(shares) == 33
    assert seconds.now - 1000 == 57
    # .. and the first second, in which nothing is known yet, counts for the steps that follow
    for step, share in enumerate(shares):
        most = max(0, (step + 4 * (step // 5) - 1) / 56)
        # an evaluation is seen after the step behind it
        assert max(0, most - 4 / 56) - 1e-9 <= share <= most + 1e-9


# after which steps the run is stopped -> the share done before each life, the steps of all
STOPS = {"once": ([12], [0, 11 / 41], 42), "twice": ([1, 8], [0, 0, 6 / 41], 44)}


@pytest.mark.parametrize("case", STOPS)
def test_a_timed_run_that_is_resumed_has_the_rest_of_its_minutes(
    tiny, out, monkeypatch, seconds, capsys, case
):
    """
    A resumed run took all its --minutes again. Loading does not count, nor does the first step of
    each life, for it may be slow.
    """
    stops, begins, steps = STOPS[case]
    slowly(monkeypatch, train, "load_corpus", seconds, 10)
    stop_after(monkeypatch, stops)
    train.main([*tiny, "--minutes=0.75", "--eval_every=1000"])
    capsys.readouterr()
    for _ in stops:
        seconds.now += 3600  # however long it lay there
        train.main(["--resume", f"--out={out}"])
    shares = [share for share, _ in seconds.steps]
    assert [shares[i] for i in (0, *stops)] == pytest.approx(begins)
    assert sorted(shares) == shares
    assert len(shares) == steps


def test_the_log_and_a_terminal_have_the_numbers_of_each_step(
    tiny, out, monkeypatch, seconds, capsys
):
    """
    Its loss and the norm of its gradient; on a terminal, how many tokens a second that was, how
    much of the machine's arithmetic (7,792 weights, a window of 16), and how long the rest takes.
    """
    results = []
    after_update(monkeypatch, lambda run, result: results.append(result.tolist()))
    with monkeypatch.context() as patch:
        patch.setitem(train.STRIDES, "cpu", 4)  # as on a GPU: the last steps are fewer
        train.main([*tiny, "--steps=6"])
    assert "loss" not in capsys.readouterr().err  # no terminal
    logged = [[line["loss"], line["norm"]] for line in read_log(out, "loss")]
    assert logged == [pytest.approx(result, abs=1e-4) for result in results]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(train.Process, "peak", 2 * 128 * (6 * 7792 + 12 * 16 * 16))
    train.main([*tiny, "--steps=60", "--overwrite"])
    shown = f"step 24, 40%: loss {results[6 + 23][0]:.3f}, 0.1k tokens/s, MFU 50%, 0.6 min left"
    assert f"{shown}\x1b[K\r" in capsys.readouterr().err
    monkeypatch.setattr(train.Process, "peak", None)  # of another GPU
    train.main([*tiny, "--minutes=1", "--overwrite"])
    shown = capsys.readouterr().err
    assert "0.1k tokens/s, 1.0 min left" in shown
    assert shown.endswith("0.1k tokens/s, 0.0 min left\x1b[K\r")


def test_what_a_device_can_do():
    """Would catch: another GPU's figure; a product that is timed before it is computed."""
    for name, peak in {"NVIDIA H200": 989e12, "NVIDIA H100 PCIe": None}.items():
        with patch("torch.cuda.get_device_name", lambda device, name=name: name):
            assert train.Process(torch.device("cuda:0"), torch.bfloat16, True).peak == peak
    process = train.Process(torch.device("cpu"), torch.float32, False)
    assert 1e8 < process.peak < 1e14
