"""
The named sizes of the default training run, and the choice among them: the largest that a machine
has time for.

    python train.py                # measures the machine and chooses
    python train.py --size small   # this one

A size is a model with a recipe that was tuned for it. All were compared at the same computing time:
a slow machine does best with a small model that sees many tokens.
"""

import math
from argparse import Namespace
from dataclasses import dataclass

import numpy as np

from families import FAMILIES
from model import GPTConfig, Rope


@dataclass(frozen=True)
class Size:
    """A model, and what it takes to train it well: the values of train.py's flags."""

    n_layer: int
    n_embd: int  # heads are of 64
    # with fewer, the next smaller size is better after the same time; of GPT-2
    least_steps: int
    # no flag: time of a training step, in steps of the size "small"; of GPT-2, on 2 cores
    cost: float
    # no flag: arch -> {steps, ascending: bits per byte of held-out text}, as measured: for Llama at
    # few points yet
    results: dict[str, dict[int, float]]

    # Tuned with GPT-2 for all sizes together, 8 to 16 combinations each: between half and twice
    # these learning rates the result differs by 0.02 bits per byte. A vocabulary of 4,096, that of
    # data/stdlib, beat 512, 1,024 and 2,048 even for the smallest model (1.69 against 1.95 with
    # 1,024): its logits cost more, but each token is more text. Batches of 16 x 128 tokens beat 4
    # to 12 sequences and contexts of 192 and 256, where computing time is scarce.
    context_length: int = 128
    batch_size: int = 16
    matrix_lr: float = 0.012
    vector_lr: float = 0.02
    momentum: float = 0.9
    beta2: float = 0.99
    decay: float = 0.6
    minutes: float = 2.35
    max_minutes: float = 3.05
    eval_every: int = 200

    def flags(self) -> dict:
        """The flags of train.py that make a run of this size, by name."""
        flags = vars(self) | {"n_head": self.n_embd // 64}
        del flags["cost"]
        del flags["results"]
        return flags

    def expected(self, arch: str, steps: float) -> float | None:
        """
        Bits per byte after so many steps: linear in log(steps) between the measured points, outside
        them the nearest one's; None where nothing was measured.
        """
        results = self.results.get(arch)
        if not results:
            return None
        measured = np.log(list(results))
        bits = list(results.values())
        return float(np.interp(math.log(max(steps, 1)), measured, bits))


SIZES = {
    "tiny": Size(
        n_layer=2,
        n_embd=64,
        least_steps=400,
        cost=0.55,
        results={"gpt2": {360: 1.77, 550: 1.69, 820: 1.62}},
    ),
    "small": Size(
        n_layer=2,
        n_embd=128,
        least_steps=420,
        cost=1.0,
        results={
            "gpt2": {200: 1.82, 300: 1.71, 450: 1.61, 850: 1.49, 1690: 1.38},
            "llama": {450: 1.58, 1408: 1.39},
        },
    ),
    "medium": Size(
        n_layer=3,
        n_embd=128,
        least_steps=1050,
        cost=1.25,
        results={"gpt2": {720: 1.50, 1355: 1.38, 2400: 1.29}, "llama": {1401: 1.32}},
    ),
    "large": Size(
        n_layer=4,
        n_embd=256,
        least_steps=2500,
        cost=3.3,
        context_length=256,
        batch_size=8,
        results={"gpt2": {900: 1.41, 1500: 1.29, 2500: 1.17}},
    ),
}
PROBE = "small"  # the size whose step is timed
RESERVE = 1.15  # a size needs time for so many times its least steps, in case steps become slower


def choose_size(step_seconds: float, seconds: float) -> str:
    """
    The name of the largest size for whose least steps `seconds` are enough, or of the smallest of
    all; `step_seconds` is what a step of the size PROBE takes.
    """
    for name, size in reversed(SIZES.items()):
        needed = size.least_steps * size.cost * step_seconds
        if RESERVE * needed <= seconds:
            return name
    return next(iter(SIZES))


# --------------------------------------------------------------------------------------------------
# Architectures of one size

# what --arch sets where a flag is not given
ARCHS = {"gpt2": {}, "llama": {"activation": "silu"}}
THETA = 10000.0  # the base of Llama's rotary frequencies


def model_fields(args: Namespace) -> dict:
    """The fields of GPTConfig that train.py's flags decide."""
    names = GPTConfig.__dataclass_fields__
    chosen = {name: value for name, value in vars(args).items() if name in names}
    if args.arch == "llama":
        chosen |= {"n_inner": gated_width(args.n_embd), "rope": {0: Rope(THETA)}}
    return chosen | FAMILIES[args.arch].fields


def gated_width(n_embd: int) -> int:
    """
    How wide an MLP of three matrices is that has as many weights as GPT-2's, of two and 4 n_embd
    wide: 8 / 3 n_embd, to the nearest multiple of 8, and for the wide models that GPUs train of 64,
    since they multiply in tiles.
    """
    tile = 64 if n_embd >= 384 else 8
    return max(1, round(8 * n_embd / 3 / tile)) * tile
