"""
The parts of a training, each compared with another way to compute the same: batches, the
evaluation, the schedule, Muon, and the operators that train with those of model.py.
"""

import gc
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import MACHINE, ROOT, new_run
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch.utils.flop_counter import FlopCounterMode

import train
from model import GPT, TORCH_OPS, GPTConfig, Rope
from training import fast
from training.corpus import batch_rows, epoch_starts
from training.fast import training_ops

# --------------------------------------------------------------------------------------------------
# Batches


def test_an_epoch_is_every_window_once_in_another_order():
    tokens = np.arange(1005, dtype=np.uint16)
    epochs = [epoch_starts(99, 10, 3, epoch).tolist() for epoch in range(60)]
    for starts in epochs:
        offset = min(starts)
        assert sorted(starts) == list(range(offset, offset + 990, 10))
    # whatever the offset, every token comes: no two epochs cut the text at the same places
    assert {min(starts) for starts in epochs} == set(range(10))
    rows_of = partial(batch_rows, tokens, 9, 10, 3)
    rows = np.concatenate([rows_of(step) for step in range(12)])
    firsts = rows[:, 0]
    assert firsts.tolist() == epochs[0] + epochs[1][:9]
    assert np.array_equal(rows, firsts[:, None] + np.arange(11))
    shares = [rows_of(11, rank, 3) for rank in range(3)]
    together = np.stack(shares, 1).reshape(9, 11)
    assert np.array_equal(together, rows[-9:])
    assert epochs[0] != epoch_starts(99, 10, 4, 0).tolist()


def test_the_shortest_corpus_is_two_windows_and_a_target(tiny):
    """Tokens that are not predicted are read, but are no targets."""
    run = new_run(tiny)
    tokens = np.arange(65, dtype=np.int32)
    run.corpus.train = np.where(tokens % 3, tokens, ~tokens)
    x, y = train.Run(run.args, run.corpus, MACHINE).next_batch()
    assert x.dtype == torch.int64
    assert x.shape == (8, 16)
    assert x.max() < 64
    assert torch.equal(x[:, 1:], x[:, :-1] + 1)
    assert torch.equal(y, torch.where((x + 1) % 3 > 0, x + 1, -100))
    run.corpus.train = run.corpus.train[:64]
    message = "64 training tokens are too few for windows of 32: use more text, or lower"
    with pytest.raises(ValueError, match=message):
        train.Run(run.args, run.corpus, MACHINE)


# --------------------------------------------------------------------------------------------------
# The recipe


def small_gpt2() -> GPT:
    return GPT(GPTConfig(300, context_length=32, n_layer=1, n_head=2, n_embd=16))


def test_evaluation_scores_what_is_to_be_predicted_once(corpus):
    """
    Each token is scored given everything before it in its window, in plain torch one window at a
    time, also in the last, short window. The bits are per byte of what was scored. Previously, if
    one process had only windows without targets, its sum was divided by zero tokens. And a run that
    held out only an empty answer of a dialogue ended in a division by zero bytes.
    """
    loaded = train.load_corpus(str(corpus), MACHINE)
    ids = torch.from_numpy(loaded.val.astype(np.int64))
    before = torch.cat([torch.tensor([299]), ids[:-1]])
    torch.manual_seed(0)
    model = small_gpt2()
    model.wte.weight.data *= 20  # far from uniform, so that each token counts
    numbers = torch.arange(1001)
    every_second = (numbers % 2 > 0) & (numbers < 300)
    for is_predicted in numbers >= 0, every_second:
        loaded.val = torch.where(is_predicted, ids, ~ids).numpy()
        targets = torch.where(is_predicted, ids, -100)
        for T in 20, 32:
            expected = 0.0
            for tokens, wanted in zip(before.split(T), targets.split(T), strict=True):
                logits = model(tokens[None])[0][0]
                expected += F.cross_entropy(logits, wanted, reduction="sum").item()
            score = train.evaluate(model, loaded, MACHINE, T)
            assert score == (pytest.approx(expected, rel=1e-5), is_predicted.sum())
    assert train.evaluate(model, loaded, MACHINE, 32, limit=400) == score
    text = loaded.tokenizer.decode_bytes(ids[is_predicted].tolist())
    bits = loaded.bits_per_byte(*score)
    assert bits == pytest.approx(expected / math.log(2) / len(text), rel=1e-5)
    loaded.val = np.array([~5, 299], np.int32)
    assert loaded.bits_per_byte(math.log(2), 1) == 1


def test_an_evaluation_takes_some_windows_and_few_at_a_time(corpus):
    """
    32 windows of 2,048 tokens would have 40 GB of logits in Qwen's vocabulary, 16 times a training
    step's.
    """
    loaded = train.load_corpus(str(corpus), MACHINE)
    model = small_gpt2()

    def count(process=MACHINE, limit=None) -> int:
        return train.evaluate(model, loaded, process, 32, limit)[1]

    assert count(limit=96) == 96 - 32 + 1001 % 32  # first, middle, last window
    assert count(limit=1) == 32
    second = replace(MACHINE, rank=1, world=2)
    second.mean = lambda x: x
    # a window for each process, here the last one, times two
    assert count(second, limit=1) == 2 * (1001 % 32)
    # of 32 windows the 99th process has none: its NaN made the sum of all processes NaN
    assert train.evaluate(model, loaded, replace(MACHINE, rank=98), 32) == (0, 0)
    loaded.val = np.tile(loaded.val, 20)
    sizes = []
    model.register_forward_pre_hook(lambda model, inputs: sizes.append(inputs[0].numel()))
    assert count() == 20 * 1001
    assert max(sizes) == 8192


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_without_a_target_teaches_nothing(device, tiny):
    """Previously the mean of no losses was NaN, and ended the run."""
    run = new_run(tiny, replace(MACHINE, ops=training_ops(device)))
    x, y = run.next_batch()
    result = run.update(x, torch.full_like(y, -100))
    assert result.tolist() == [0, 0]
    assert all(w.isfinite().all() for w in run.model.parameters())
    assert run.update(x, y)[0] > 5


def test_nothing_is_dropped_while_the_model_is_looked_at(tiny):
    """
    This covers an evaluation and a sample, which ends at a context of 32. Then training drops
    again.
    """
    run = new_run(tiny)
    modes = []
    run.model.register_forward_hook(lambda model, inputs, output: modes.append(model.training))
    run.evaluate_and_sample()
    assert modes == [False] * (1 + 31)
    assert run.model.training
    score = train.evaluate(run.model, run.corpus, MACHINE, 32)
    assert score == train.evaluate(run.model, run.corpus, MACHINE, 32)


# --------------------------------------------------------------------------------------------------
# Operators


NEEDS_COMPILER = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
@pytest.mark.quick("eager-gpt2")
def test_a_compiled_step_is_the_step(arch, backend, tiny, monkeypatch):
    """
    It uses the operators of a GPU, where models are trained this way, in windows of both lengths.
    Each block is one graph, because Python between two graphs would wait for the device.
    """
    graphs = []

    def noted(*args, **options):
        graphs.append(args)
        return lookup_backend(backend)(*args, **options)

    torch._dynamo.reset()  # it compiles a function eight times, counting all tests
    compile_block = partial(torch.compile, backend=noted, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compile_block)
    flags = [*tiny, f"--arch={arch}", "--n_layer=2", "--steps=4", "--dropout=0"]
    plain = new_run(flags, replace(MACHINE, ops=training_ops("cuda")))
    machine = replace(MACHINE, compile=True, ops=training_ops("cuda", compiled=True))
    compiled = new_run(flags, machine)
    for _ in range(4):
        expected = plain.update(*plain.next_batch())
        result = compiled.update(*compiled.next_batch())
        assert result.tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert compiled.window() == 32
    assert len(graphs) == 5  # the loss; for each length the first block, and the others
    # a length known in advance makes faster kernels
    assert not any(isinstance(x, torch.SymInt) for _, inputs in graphs for x in inputs)
    assert compiled.evaluate_and_sample() == plain.evaluate_and_sample()
    assert len(graphs) == 5


@pytest.fixture
def start(monkeypatch):
    """Undo what `start_compiler` sets for the process."""
    monkeypatch.setenv("TORCHINDUCTOR_WORKER_START", "subprocess")
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_compiler_is_started_where_it_is_wanted(train_tiny, start, monkeypatch):
    """
    It starts before the run's lock is taken, which its processes would inherit, and before signals
    are caught.
    """
    events = []
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: events.append(gc.get_threshold()[0]))
    monkeypatch.setattr(train, "catch_signals", lambda: events.append("signals"))
    monkeypatch.setattr(train, "only_run_in", lambda out: nullcontext(events.append("lock")))
    monkeypatch.setattr(train, "train_and_report", lambda *args: events.append("run"))
    train_tiny()
    train_tiny("--device=cuda")
    assert events == ["signals", "lock", "run", 100_000, "signals", "lock", "run"]
    assert os.environ["TORCHINDUCTOR_WORKER_START"] == "subprocess"  # a value set by the user stays


KILLED = """
import multiprocessing.connection, os, signal, train
def kill_one(*args):
    first, second = multiprocessing.active_children()
    os.kill(first.pid, signal.SIGKILL)
    assert multiprocessing.connection.wait([second.sentinel], timeout=10)
train.train_and_report = kill_one
train.main()
"""


@pytest.mark.slow
def test_the_compilers_processes_are_there_at_once_and_end_when_one_dies(tmp_path):
    """
    This uses a private name of torch's, so it fails if a new torch has another. Previously the
    processes were forked with the first kernel of a GPU, and after a kill they held the run's lock
    for a minute. When one dies, torch ends the others by SIGTERM and waits, but with the run's
    handler they lived on.
    """
    command = [sys.executable, "-c", KILLED, "--device=cuda", "--compile", f"--out={tmp_path}"]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
    environment.pop("TORCHINDUCTOR_WORKER_START", None)
    assert subprocess.run(command, cwd=ROOT, env=environment, timeout=40).returncode == 0


def test_without_a_compiler_no_model_is_given_up(train_tiny, out, start, monkeypatch):
    """
    Previously it failed at the first step, when --overwrite had already deleted the model. If a
    process cannot be forked, those forked before are ended, because torch would wait for them for
    ever.
    """
    out.mkdir()
    model = out / "config.json"
    model.write_text("{}")
    child = MagicMock()
    error = BlockingIOError(11, "no more processes")
    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-g++"))
    monkeypatch.setattr(AsyncCompile, "wakeup", MagicMock(side_effect=error))
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
    flags = ["--compile", "--overwrite"]
    with pytest.raises(SystemExit, match=r"no-such-g.*: install g.., set CXX to a C.. compiler"):
        train_tiny(*flags)
    with pytest.raises(SystemExit, match=r"no more processes.*: raise `ulimit -u`, set TORCHIND"):
        train_tiny(*flags, "--device=cuda")
    assert model.exists()
    child.kill.assert_called_once_with()


LLAMA = {"norm": "rms", "gated": True, "activation": "silu", "rope": {0: Rope(100.0)}}
LLAMA |= {"n_inner": 40, "bias": False}


# as other models are made
OTHERS = LLAMA | {"windows": (19, 0), "rope": {0: Rope(100.0), 19: Rope(30.0)}}
CAPPED = OTHERS | {"attention_softcap": 2.0, "logit_softcap": 3.0}
NORMED = LLAMA | {"n_kv_head": 1, "post_norm": True, "qk_norm": True}
MODELS = {"llama": LLAMA | {"dropout": 0.3}, "gpt2": {"n_inner": 40}}
MODELS |= {"windows": OTHERS, "caps": CAPPED, "shared heads, all norms": NORMED}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "compiled"])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@pytest.mark.quick("*-cpu-*", "*-cuda-dtype0", "shared*-cuda-dtype1")
def test_operators_that_train_are_the_references(fields, device, dtype, monkeypatch):
    """
    The loss and all gradients are compared: in fp32 within rounding, in bfloat16 within twice the
    error of plain torch. Some targets are left out, there are more tokens and a larger vocabulary
    than a chunk of the loss, and dropout draws the same numbers. Compiled blocks are a GPU's, one
    graph each.
    """
    for name in "CPU_CHUNKS", "GPU_CHUNKS":
        monkeypatch.setattr(fast, name, getattr(fast, name)._replace(rows=100))
    torch.manual_seed(0)
    config = GPTConfig(77, 128, n_layer=2, n_head=4, n_embd=32, **fields)
    model = GPT(config)
    for p in model.parameters():
        p.data += torch.randn_like(p) * 0.3
    tokens = torch.randint(77, (3, 41))
    targets = tokens[:, 1:].clone()
    targets[0, :20] = -100

    def gradients(ops, dtype) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            _, loss = model(tokens[:, :-1], targets, ops)
        grads = torch.autograd.grad(3 * loss, model.parameters())
        return [loss, *grads]

    exact = gradients(TORCH_OPS, torch.float32)
    plain = gradients(TORCH_OPS, dtype)
    if device == "compiled":
        torch._dynamo.reset()  # it compiles a function eight times, counting all tests
        for block in model.h:
            block.compile(backend="eager", fullgraph=True, dynamic=False)
    found = gradients(training_ops(device.replace("compiled", "cuda")), dtype)
    unit = 1e-4 if dtype == torch.float32 else 2**-9  # for errors that cancel in plain torch
    for e, p, f in zip(exact, plain, found, strict=True):
        bound = 2 * (p - e).norm() + unit * e.norm()
        assert (f - e).norm() <= bound


def test_an_evaluation_multiplies_for_no_gradients():
    """
    Previously they took two thirds of the loss's time, because a weight still requires a gradient.
    """
    model = small_gpt2()
    batch = train.tokens_and_targets(torch.randint(60, (2, 20)))

    def operations(ops) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*batch, ops)
        return counter.get_total_flops()

    ops = TORCH_OPS._replace(loss=training_ops("cpu").loss)
    assert operations(ops) == operations(TORCH_OPS) > 0


# --------------------------------------------------------------------------------------------------
# The model that training begins with


def test_a_text_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="33 tokens do not fit the model's context_length of 32"):
        small_gpt2()(torch.zeros(2, 33, dtype=torch.int64))


def test_initial_weights_are_gpt2s_and_follow_the_seed(tiny):
    """
    They are N(0, 0.02), and smaller in the projections into the residual stream, because two of
    these per layer add up. Biases are zero.
    """
    flags = [*tiny, "--arch=gpt2", "--bias", "--n_layer=3", "--n_embd=64", "--context_length=200"]
    for name, w in new_run(flags).model.named_parameters():
        if w.ndim == 2:
            spread = 0.02 / math.sqrt(6) if "c_proj" in name else 0.02
            expected = pytest.approx(spread, rel=0.05)
            assert w.std().item() == expected, name
            assert abs(w.mean()) < 0.1 * spread, name
        else:
            assert torch.all(w == name.endswith("weight")), name  # of norms; biases

    first, again, other = (
        new_run([*tiny, f"--seed={seed}"]).model.wte.weight for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
