"""
The training batches of a run.

    batches = Batches(corpus.train, B=16, T=128, seed=1)
    x, y = batches(step, process)    # tokens and targets of this process, (B / world, T) int64
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch

from training.machine import Process


@dataclass
class Batches:
    """
    The training batch of a step as a function of (seed, step). An epoch cuts the corpus into
    windows of T tokens that do not overlap, from a random offset, and shuffles them: every token
    once an epoch.
    """

    tokens: np.ndarray
    B: int  # sequences a step, over all processes
    T: int  # tokens of each
    seed: int
    epoch: int | None = None  # the one that `starts` is of
    starts: np.ndarray | None = None  # where its windows begin, in their order

    def __post_init__(self):
        self.windows = (len(self.tokens) - 1) // self.T - 1  # one less than fit: for any offset
        if self.windows < 1:
            sys.exit(
                f"{len(self.tokens)} training tokens are too few for windows of {self.T}: lower "
                "context_length"
            )

    def start(self, i: int) -> int:
        """The first token of the i-th window of the run."""
        epoch, i = divmod(i, self.windows)
        if epoch != self.epoch:
            random = np.random.default_rng((self.seed, epoch))
            self.epoch = epoch
            self.starts = random.permutation(self.windows) * self.T + random.integers(self.T)
        return self.starts[i]

    def __call__(self, step: int, process: Process):
        """Tokens and targets (B / world, T) int64: this process's share of the batch."""
        # Windows are numbered from the start of the run, B a step; processes take them in turn.
        first = step * self.B
        mine = range(first + process.rank, first + self.B, process.world)
        starts = [self.start(i) for i in mine]
        windows = np.stack([self.tokens[s : s + self.T + 1] for s in starts])
        rows = torch.from_numpy(windows.astype(np.int64))  # (B / world, T + 1)
        if process.device.type == "cuda":
            # from pinned memory the copy overlaps with what the GPU still computes
            rows = rows.pin_memory().to(process.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]  # the target of a token is the one behind it
