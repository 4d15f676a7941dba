"""
The clock of a training run whose length is set by --minutes: which part of the time that was left
each step has taken.

    clock = Clock(run, started)
    part = clock.part_of_rest(step_seconds)    # after each few steps
    print(clock.warning(is_over=part == 1))    # once, where the time is too short to learn
"""

import math
import time
from collections import deque
from statistics import median

from training.report import sample_tokens_in_all

# Of the end of a run, apart from the model's computation: compressing the held-out text, drawing
# the loss, saving twice.
CLOSING_SECONDS = 4
LEAST_STEPS = 200  # with fewer, not even the smallest model of a preset learns much
TIMED = 5  # steps after the first that show how many will fit
RESERVE = 1.15  # the minutes that a warning names are for so many times the steps


class Clock:
    """The clock of `run`, whose --minutes began at `started`, a time.perf_counter()."""

    def __init__(self, run, started: float):
        self.run = run
        self.started = started
        self.counted = time.perf_counter()  # until when the run's time has been counted
        self.recent: deque | None = None  # seconds of the last steps
        self.fitting = math.inf  # steps that fit into the run's time, by the latest estimate
        self.may_warn = not (run.args.steps or run.args.resume)

    def part_of_rest(self, step_seconds: float) -> float:
        """
        The part of what was left of the run's time that went by since the last call; 1 when time is
        up. `step_seconds`: of each step since then.
        """
        now = time.perf_counter()
        spent = now - self.counted
        self.counted = now
        if self.recent is None:  # a first step allocates, or compiles: the others are faster
            self.recent = deque(maxlen=20)
            return 0.0
        self.recent.append(step_seconds)
        step_seconds = median(self.recent)
        end = self.started + 60 * self.run.args.minutes
        left = end - closing_seconds(self.run, step_seconds) - now
        self.fitting = self.run.step + max(0.0, left) / step_seconds
        return spent / (spent + left) if left > 0 else 1.0

    def warning(self, is_over: bool) -> str:
        """
        A warning if fewer than LEAST_STEPS fit: how many do, and how many minutes make sense. Else
        "", also before a few steps were timed, and after the first answer.
        """
        timed = len(self.recent or ())
        if not self.may_warn or not (is_over or timed >= TIMED):
            return ""
        self.may_warn = False
        if self.fitting >= LEAST_STEPS:
            return ""
        step_seconds = median(self.recent)
        others = time.perf_counter() - self.started - self.run.step * step_seconds
        needed = RESERVE * LEAST_STEPS * step_seconds + max(0.0, others)
        minutes = (needed + closing_seconds(self.run, step_seconds)) / 60
        return (
            f"warning: only about {self.fitting:.0f} steps fit into {self.run.args.minutes:g} "
            f"minutes, and in fewer than {LEAST_STEPS} a model learns little: --minutes "
            f"{math.ceil(10 * minutes) / 10} or more makes sense"
        )


def closing_seconds(run, step_seconds: float) -> float:
    """
    Estimated seconds from the last step to the end of the program: scoring the held-out text, the
    last samples, and the rest. `step_seconds`: of one training step.
    """
    args = run.args
    forward_tokens = len(run.corpus.val) + sample_tokens_in_all(args)
    # A forward pass is 2 of the 6 operations per weight and token that a training step takes, and
    # somewhat more with attention and norms.
    forward_seconds = 0.4 * step_seconds / (args.batch_size * args.context_length)
    return forward_seconds * forward_tokens + CLOSING_SECONDS
