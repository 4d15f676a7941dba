"""
The clock of a training run whose length is given by --minutes: which part of the time that was
left each step has taken.

    clock = Clock(run, started)
    part = clock.part_of_rest(step_seconds)    # after each few steps
"""

import time
from collections import deque
from statistics import median

from training.samples import sample_tokens_in_all

# Of the end of a run, apart from what the model computes: compressing the held-out text with gzip
# and xz, drawing the loss, saving twice.
CLOSING_SECONDS = 4


class Clock:
    """The clock of `run`, whose --minutes began at `started`, a time.perf_counter()."""

    def __init__(self, run, started: float):
        self.run = run
        self.started = started
        self.counted = time.perf_counter()  # until when the run's time has been counted
        self.recent: deque | None = None  # what the last steps took, in seconds

    def part_of_rest(self, step_seconds: float) -> float:
        """
        The part of what was left of the run's time that went by since the last call; 1 when time is
        up. `step_seconds`: what each step since then took.
        """
        now = time.perf_counter()
        elapsed = now - self.started
        spent = now - self.counted
        self.counted = now
        if self.recent is None:  # a first step allocates, or compiles: the others are faster
            self.recent = deque(maxlen=20)
            return 0.0
        self.recent.append(step_seconds)
        step_seconds = median(self.recent)
        args = self.run.args
        closing = closing_seconds(self.run, step_seconds)
        steps_left = args.least_steps - self.run.step
        planned = 60 * args.minutes - closing
        latest = 60 * args.max_minutes - closing
        left = end_of_run(elapsed, steps_left, step_seconds, planned, latest) - elapsed
        return spent / (spent + left) if left > 0 else 1.0


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


def end_of_run(
    elapsed: float, steps_left: int, step_seconds: float, planned: float, latest: float
) -> float:
    """
    When a run ends, in seconds since its start: as planned, unless the machine has become too busy
    for the steps that it needs at least; then later, but never later than `latest`.
    """
    needed = elapsed + steps_left * step_seconds
    return min(max(planned, needed), max(planned, latest))
