"""
train.py's whole update, compared with its formulas written a second time: clipping, Muon, AdamW,
decay and schedule, in float64. The gradients are autograd's, with the operators of model.py. No
knob has its default, and no two are alike, so that each term of each formula moves the weights.
"""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from runs import MACHINE, same

import train
from model import TORCH_OPS
from training import fast
from training.fast import training_ops

VOCAB = 23
FLAGS = """--device=cpu --dtype=float32 --n_layer=2 --n_head=3 --n_embd=24 --seed=5
    --context_length=7 --batch_size=3 --steps=6 --warmup=2 --decay=0.7 --momentum=0.8 --beta2=0.9
    --matrix_lr=0.03 --vector_lr=0.007 --clip=0.2 --matrix_decay=3 --vector_decay=4"""
LLAMA = "--arch=llama --dropout=0.2"
KINDS = {
    "all terms": ("--arch=gpt2 --dropout=0.2 --bias --activation=gelu_new", TORCH_OPS),
    # if neurons are dead, rounding decides the signs of updates, and the signs decide the decay
    "no biases, nothing to clip, in parts": (
        "--arch=gpt2 --activation=relu2 --clip=1000 --matrix_decay=0 --accumulate=3",
        TORCH_OPS,
    ),
    "llama": (LLAMA, TORCH_OPS),
    "llama, with the operators of a CPU": (LLAMA, training_ops("cpu")),
    "llama, with another gate": (LLAMA + " --activation=relu2", training_ops("cpu")),
}


def make_run(flags: str = "", **process) -> train.Run:
    """
    Return a run on random tokens, few enough that each has a gradient far from zero in every step.
    """
    args = train.parse_args([*FLAGS.split(), *flags.split()])
    tokens = np.random.default_rng(0).integers(VOCAB, size=500).astype(np.uint16)
    tokenizer = SimpleNamespace(vocab_size=VOCAB, eos_token_id=None)
    corpus = train.Corpus(tokenizer, tokens, tokens[:100])
    return train.Run(args, corpus, replace(MACHINE, **process))


# --------------------------------------------------------------------------------------------------
# The reference


def reference_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """
    Compute Newton-Schulz with Jordan's quintic by its effect on the singular values: five times s
    -> p(s).
    """
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def reference_muon(name, w, mean, gradient, lr: float, args) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the new weight and the new mean gradient: Nesterov momentum, orthogonal parts, and decay
    of weights that the update makes smaller. NaN marks an update so close to 0 that rounding
    decides this.
    """
    maps = 1
    if "c_attn" in name:
        maps = 3  # q, k and v
    elif args.arch == "llama" and "c_fc" in name:
        maps = 2  # gate and up
    mean = args.momentum * mean + (1 - args.momentum) * gradient
    ahead = args.momentum * mean + (1 - args.momentum) * gradient
    parts = [reference_orthogonal(part) for part in ahead.chunk(maps)]
    stretch = max(1, len(parts[0]) / w.shape[1]) ** 0.5
    update = torch.cat(parts)
    decay = lr * args.matrix_decay * lr / args.matrix_lr
    shrunk = torch.where(update.sign() == w.sign(), w * (1 - decay), w)
    new = shrunk - lr * stretch * update
    is_clear = update.abs() > 1e-3 * update.abs().mean()
    if args.matrix_decay:
        new[~is_clear] = torch.nan
    return new, mean


def reference_adamw(w, moments, gradient, lr: float, step: int, args) -> tuple[torch.Tensor, tuple]:
    """
    Return the new weight and the new moments, with the bias of the first steps corrected;
    embeddings decay.
    """
    first, second = moments
    first = 0.9 * first + 0.1 * gradient
    second = args.beta2 * second + (1 - args.beta2) * gradient**2
    corrected = first / (1 - 0.9**step)
    spread = (second / (1 - args.beta2**step)).sqrt()
    if w.ndim == 2:
        w = w * (1 - lr * args.vector_decay)
    return w - lr * corrected / (spread + 1e-8), (first, second)


def reference_step(model, state: dict, x, y, step: int, args) -> tuple[dict, float, float]:
    """
    Take step `step`, counted from 1, of the whole update. Returns the new weights, the loss and the
    norm of the gradient.
    """
    model = deepcopy(model)
    torch.manual_seed(args.seed + step - 1)
    _, loss = model(x, y)
    loss.backward()
    gradients = {name: w.grad.double() for name, w in model.named_parameters()}
    flat = [g.flatten() for g in gradients.values()]
    norm = torch.cat(flat).norm().item()
    rise = min(1, step / args.warmup)
    rest = 1 - (step - 1) / args.steps
    rate = rise * min(1, rest / args.decay)
    new = {}
    for name, w in model.named_parameters():
        g = gradients[name] * min(1, args.clip / norm)
        w = w.detach().double()
        zeros = torch.zeros_like(g)
        if name.startswith("h.") and w.ndim == 2:
            mean = state.get(name, zeros)
            lr = rate * args.matrix_lr
            new[name], state[name] = reference_muon(name, w, mean, g, lr, args)
        else:
            moments = state.get(name, (zeros, zeros))
            lr = rate * args.vector_lr
            new[name], state[name] = reference_adamw(w, moments, g, lr, step, args)
    return new, loss.item(), norm


# --------------------------------------------------------------------------------------------------
# The update


@pytest.mark.parametrize("kind", KINDS)
def test_four_updates_are_those_of_the_formulas(kind):
    """
    Would catch: one dropout mask for all steps; no clipping; Muon's momentum as 1 - momentum.
    Otherwise none of these would be noticed, because the loss still falls.
    """
    flags, ops = KINDS[kind]
    run = make_run(flags, ops=ops)
    for parameter in run.model.parameters():
        # biases and norms are also far from where they begin
        parameter.data += torch.randn_like(parameter) * 0.1
    state = {}
    for step in range(1, 5):
        before = deepcopy(run.model.state_dict())
        x, y = run.next_batch()
        expected, loss, norm = reference_step(run.model, state, x, y, step, run.args)
        result = run.update(x, y)
        assert result.tolist() == pytest.approx([loss, norm], rel=1e-4)
        for name, w in run.model.named_parameters():
            clear = expected[name].isfinite()
            assert clear.double().mean() > 0.98
            moved = (expected[name] - before[name]).abs()[clear].max()
            wrong = (w.detach().double() - expected[name]).abs()
            if name.endswith("attn.c_attn.bias"):
                # softmax does not see the bias of the keys: its gradient is rounding
                wrong[24:48] = 0
            wrong = wrong[clear].max()
            assert moved > 1e-4 and wrong < 2e-3 * moved, (
                f"step {step}: {name} is off by {wrong}, it moved {moved}"
            )
    assert run.step == 4
    assert run.share == 4 / 6


def test_a_clip_of_zero_is_no_clip():
    """
    As in nanoGPT. Previously it made all gradients zero, and the model silently learnt nothing.
    """
    runs = [make_run(f"{LLAMA} --clip={clip}") for clip in (0, 1000)]
    for run in runs:
        run.update(*run.next_batch())
    weights, others = (run.model.state_dict() for run in runs)
    assert same(weights, others)
    run = make_run(LLAMA)
    assert not same(weights, run.model.state_dict())


def test_a_training_pass_drops_everywhere(monkeypatch):
    """It drops embeddings and, in each of two layers, attention weights, attention and MLP."""
    drop = MagicMock(wraps=torch.nn.functional.dropout)
    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    run = make_run(LLAMA)
    run.update(*run.next_batch())
    assert [call.args[1] for call in drop.call_args_list] == [0.2] * 7


def test_dropout_differs_by_step_and_by_process_and_by_seed_and_by_nothing_else(monkeypatch):
    """The same step again drops the same."""
    monkeypatch.setattr(train.Process, "sum_gradients", lambda process, model: None)
    monkeypatch.setattr(train.Process, "gather", lambda process, x: x.repeat(4, 1, 1))
    still = "--dropout=0.5 --matrix_lr=0 --vector_lr=0 --batch_size=4"
    first = make_run(still)
    batch = first.next_batch()

    def loss(step: int, rank: int = 0, seed: int = 5) -> float:
        run = make_run(f"{still} --seed={seed}", rank=rank, world=4)
        run.model.load_state_dict(first.model.state_dict())
        run.step = step
        torch.rand(step + rank)  # draws before a step do not matter
        return run.update(*batch)[0].item()

    places = [(step, rank) for step in range(4) for rank in range(4)]
    losses = [loss(*place) for place in places]
    assert len(set(losses)) == len(places)
    assert [loss(*place) for place in places] == losses
    assert loss(3, seed=6) != loss(3)


def test_in_bfloat16_only_the_matrix_products_are(monkeypatch):
    """This includes Muon's. Weights, gradients and the optimizer's state stay in float32."""
    run = make_run(dtype=torch.bfloat16)
    dtypes = []
    orthogonalize = fast.orthogonalize

    def noted(x):
        dtypes.append(x.dtype)
        return orthogonalize(x)

    monkeypatch.setattr(fast, "orthogonalize", noted)
    layer = run.model.h[0].mlp.c_fc
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    run.update(*run.next_batch())
    assert len(dtypes) > 1 and set(dtypes) == {torch.bfloat16}
    values = [*run.model.parameters()]
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            values += state.values()
    assert {value.dtype for value in values} == {torch.float32}
