"""Runs of milliseconds, for the tests of train.py."""

import json
import os
import signal
from pathlib import Path

import torch

import train
from checkpoint import load_checkpoint
from tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MACHINE = train.Process(torch.device("cpu"), torch.float32, compile=False)
FLAGS = """--n_layer=1 --n_head=2 --n_embd=16 --context_length=32 --short_context=16 --batch_size=4
    --warmup=2 --dropout=0.1 --dtype=float32 --device=cpu --eval_every=5 --eval_tokens=64"""
TINY = FLAGS.split()
PICTURE = b"the curve of a loss"


def new_run(flags: list[str], machine: train.Process = MACHINE) -> train.Run:
    args = train.parse_args(flags)
    return train.Run(args, train.load_corpus(args.data, MACHINE), machine)


def resume(out: Path, *flags: str):
    train.main(["--resume", f"--out={out}", *flags])


def after_update(monkeypatch, react):
    """Have `react(run, result)` called after each step."""
    update = train.Run.update

    def update_and_react(self, *batch):
        result = update(self, *batch)
        react(self, result)
        return result

    monkeypatch.setattr(train.Run, "update", update_and_react)


def stop_after(monkeypatch, steps):
    """Send SIGTERM in the middle of each of these steps."""

    def react(run, result):
        if run.step in steps:
            os.kill(os.getpid(), signal.SIGTERM)

    after_update(monkeypatch, react)


def read_log(out: Path, field: str = "step") -> list[dict]:
    """Return the lines that have this field."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line for line in lines if field in line]


def assert_loads(out: Path) -> dict:
    """
    Check all three ways to open the directory, and that its model is usable. Returns the state.
    """
    model = load_checkpoint(out)
    tokenizer = load_tokenizer(out)
    state = torch.load(out / "train_state.pt", "cpu", weights_only=True)
    assert model.config.vocab_size == tokenizer.vocab_size == 300
    assert model.config.eos_token_id == tokenizer.eos_token_id == 299
    for weights in model.state_dict(), state["model"]:
        assert all(w.isfinite().all() for w in weights.values())
    return state


def same(a: dict, b: dict) -> bool:
    """Return True if two state dictionaries have the same weights."""
    return all(torch.equal(w, b[name]) for name, w in a.items())
