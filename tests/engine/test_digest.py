"""
One machine's answer is every machine's: with the operators of cpu.c, tokens, log-probabilities and
logits of a fixed model and fixed requests have one SHA-256, whoever compiles cpu.c, for whichever
CPU, with whatever torch. `python tests/engine/test_digest.py` prints the digests of this machine.

Weights are made of integers: those of torch.randn differ from CPU to CPU. The requests are those of
test_bits.py, which shows that an answer does not depend on what stands beside it.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from model import GPT, GPTConfig, Rope
from ops import cpu

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]
from test_bits import ASKS, Service, message, name_of, needs_compiler
from test_paged import new_engine

ROOT = Path(__file__).parents[2]
SHARED = {"vocab_size": 521, "context_length": 64, "n_layer": 2, "n_head": 4, "n_embd": 48}
LLAMA_3 = Rope(5e5, 8.0, (1.0, 4.0, 32.0))
MODELS = {
    "gpt2": {"n_inner": 300},
    "gelu": {"activation": "gelu", "head_size": 7, "n_inner": 33, "tied": False},
    "llama": {"norm": "rms", "gated": True, "activation": "silu", "bias": False, "n_kv_head": 2}
    | {"qk_norm": True, "windows": (7, 0), "rope": {7: Rope(1e4), 0: LLAMA_3}},
    "gemma": {"norm": "rms", "gated": True, "bias": False, "n_kv_head": 1, "head_size": 20}
    | {"post_norm": True, "rope": {0: Rope(1e4)}, "embedding_scale": 7.0}
    | {"attention_softcap": 3.0, "logit_softcap": 5.0, "activation": "relu2"},
}
FORMATS = ("none", "int8")
DIGESTS = {}


def hashed_numbers(count: int, key: int) -> Tensor:
    """[count] fp32 from -1 to 1, multiples of 2^-15: a hash of each place and the key."""
    x = torch.arange(count) * 2654435761 + key * 40503
    for multiplier in (2246822519, 3266489917):
        x = (x ^ x >> 15) * multiplier & 0xFFFFFFFF
    return ((x >> 8 & 0xFFFF) - 0x8000).float() / 0x8000


@cache
def model_of(name: str) -> GPT:
    """About as wide a spread as trained weights have; norms are around 1."""
    model = GPT(GPTConfig(**SHARED | MODELS[name])).eval().requires_grad_(False)
    for key, weight in enumerate(model.parameters()):
        numbers = hashed_numbers(weight.numel(), key).view(weight.shape)
        if weight.ndim == 1:
            weight.copy_(1 + numbers / 4)
        else:
            weight.copy_(numbers * 2.0 ** (2 - weight.shape[1].bit_length() // 2))
    return model


def digest(name: str, kind: str, threads: int = 1) -> str:
    """Of each request alone: all that its client is sent, and the logits of each step."""
    with patch.object(torch, "get_num_threads", lambda: threads):
        settings = {"num_blocks": 60, "max_num_seqs": 1, "prefix_cache": False, "block_size": 4}
        engine = new_engine(model_of(name), attention="cpu", quantize=kind, **settings)
    sha = hashlib.sha256()
    launch = engine.runner.launch

    def hashed(plan):
        flight = launch(plan)
        sha.update(flight.logits.numpy().tobytes())
        return flight

    engine.runner.launch = hashed
    service = Service(engine)
    service.run(*ASKS)
    for id, answer in service.answers.items():
        sha.update(f"{name_of(id)} {answer}".encode())
    return sha.hexdigest()


def differing(**options) -> list:
    """The cases of which this machine makes something else."""
    return [case for case in DIGESTS if digest(*case, **options) != DIGESTS[case]]
