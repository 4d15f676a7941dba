"""
train.py's update, whole, against its formulas written down once more: loss, dropout, clipping,
Muon, AdamW, decay and schedule. The reference is plain float64, with autograd for the gradients,
and shares no function with the repo. No knob has its default, and no two knobs are alike, so that
each term of each formula moves the weights.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import MACHINE

import train
from model import TORCH
from training.fast import training_ops

VOCAB = 23
FLAGS = """--device=cpu --dtype=float32 --n_layer=2 --n_head=3 --n_embd=24 --seed=5
    --context_length=7 --batch_size=3 --steps=6 --warmup=2 --decay=0.7 --momentum=0.8 --beta2=0.9
    --weight_decay=3 --matrix_lr=0.03 --vector_lr=0.007 --clip=0.2"""
LLAMA = "--arch=llama --dropout=0.2"
KINDS = {
    "all terms": ("--arch=gpt2 --dropout=0.2 --bias --activation=gelu_new", TORCH),
    "no biases, nothing to clip": ("--arch=gpt2 --activation=relu2 --clip=1000", TORCH),
    "llama": (LLAMA, TORCH),
    "llama, with the operators of a CPU": (LLAMA, training_ops("cpu")),
    "llama, with a GPU's": (LLAMA, training_ops("cuda")),
    "llama, with another gate": (LLAMA + " --activation=relu2", training_ops("cpu")),
}


def make_run(flags: str = "", **process) -> train.Run:
    """A run on a corpus of random tokens."""
    args = train.parse_args([*FLAGS.split(), *flags.split()])
    tokens = np.random.default_rng(0).integers(VOCAB, size=500).astype(np.uint16)
    tokenizer = SimpleNamespace(vocab_size=VOCAB, eos_token_id=None)
    corpus = train.Corpus(tokenizer, tokens, tokens[:100])
    return train.Run(args, corpus, replace(MACHINE, **process))


# --------------------------------------------------------------------------------------------------
# The reference


def reference_loss(
    w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, args
) -> torch.Tensor:
    """
    GPT-2's or Llama's mean cross-entropy in float64. Dropout draws its masks in float32, in the
    order of the layers.
    """
    llama = args.arch == "llama"

    def drop(values):
        return values * F.dropout(torch.ones(values.shape), args.dropout)

    def linear(name, values):
        return values @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(name, values):
        if not llama:
            values = values - values.mean(-1, keepdim=True)
        values = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return values * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)

    def activation(values):
        if args.activation == "relu2":
            return values.clamp(min=0) ** 2
        return (
            0.5
            * values
            * (1 + torch.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)))
        )

    def rotate(heads):
        """A pair of numbers, half a head apart, is a complex one: turned by position times rate."""
        pairs = torch.complex(*heads.chunk(2, -1))
        rates = 10000.0 ** -(torch.arange(D // 2).double() / (D // 2))
        pairs = pairs * torch.exp(1j * torch.arange(T).double()[:, None] * rates)
        return torch.cat([pairs.real, pairs.imag], -1)

    def mlp(name, values):
        values = linear(f"{name}.c_fc", values)
        if not llama:
            return linear(f"{name}.c_proj", activation(values))
        gate, up = values.chunk(2, -1)
        is_silu = args.activation != "relu2"
        gate = gate / (1 + torch.exp(-gate)) if is_silu else activation(gate)
        return linear(f"{name}.c_proj", gate * up)

    (B, T), H, D = x.shape, args.n_head, args.n_embd // args.n_head
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    h = drop(w["wte.weight"][x] + (0 if llama else w["wpe.weight"][:T]))
    for layer in range(args.n_layer):
        qkv = linear(f"h.{layer}.attn.c_attn", norm(f"h.{layer}.ln_1", h))
        q, k, v = qkv.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if llama:
            q, k = rotate(q), rotate(k)
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(future, -torch.inf)
        mixed = (drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(B, T, H * D)
        h = h + drop(linear(f"h.{layer}.attn.c_proj", mixed))
        h = h + drop(mlp(f"h.{layer}.mlp", norm(f"h.{layer}.ln_2", h)))
    logits = norm("ln_f", h) @ w["wte.weight"].T
    return -logits.log_softmax(-1).gather(-1, y[..., None]).mean()


def reference_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """
    Newton-Schulz with Jordan's quintic, told by what it does to the singular values: five times s
    -> p(s).
    """
    u, s, v = torch.linalg.svd(matrix / matrix.square().sum().sqrt(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def reference_muon(name, w, mean, gradient, lr: float, args) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The new weight and the new mean gradient: Nesterov momentum, orthogonal parts, decoupled weight
    decay.
    """
    maps = 3 if "c_attn" in name else 1  # q, k and v
    if args.arch == "llama" and "c_fc" in name:
        maps = 2  # gate and up
    mean = args.momentum * mean + (1 - args.momentum) * gradient
    ahead = args.momentum * mean + (1 - args.momentum) * gradient
    columns = w.shape[1]
    update = torch.cat(
        [
            reference_orthogonal(part) * max(1, len(part) / columns) ** 0.5
            for part in ahead.chunk(maps)
        ]
    )
    return w - lr * args.weight_decay * w - lr * update, mean


def reference_adamw(w, state, gradient, lr: float, step: int, args) -> tuple[torch.Tensor, tuple]:
    """The new weight and the new moments, with the bias of the first steps corrected. No decay."""
    first, second = state
    first = 0.9 * first + 0.1 * gradient
    second = args.beta2 * second + (1 - args.beta2) * gradient**2
    corrected = first / (1 - 0.9**step)
    spread = (second / (1 - args.beta2**step)).sqrt()
    return w - lr * corrected / (spread + 1e-8), (first, second)


def reference_step(w: dict, state: dict, x, y, step: int, args) -> tuple[dict, float, float]:
    """
    Step `step`, counted from 1, of the whole update: the new weights, the loss, the norm of the
    gradient.
    """
    torch.manual_seed(args.seed + step - 1)
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    loss = reference_loss(leaves, x, y, args)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    rise = min(1, step / args.warmup)
    fall = min(1, (1 - (step - 1) / args.steps) / args.decay)
    new = {}
    for name, value in w.items():
        g = gradients[name] * min(1, args.clip / norm)
        if name.startswith("h.") and value.ndim == 2:
            mean = state.get(name, torch.zeros_like(g))
            new[name], state[name] = reference_muon(
                name, value, mean, g, rise * fall * args.matrix_lr, args
            )
        else:
            moments = state.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
            new[name], state[name] = reference_adamw(
                value, moments, g, rise * fall * args.vector_lr, step, args
            )
    return new, loss.item(), norm


# --------------------------------------------------------------------------------------------------
# The update


@pytest.mark.parametrize(("flags", "ops"), KINDS.values(), ids=KINDS)
def test_four_updates_are_those_of_the_formulas(flags, ops):
    """
    One dropout mask for all steps, no clipping, Muon's momentum as 1 - momentum, weight decay not
    times the learning rate: nothing noticed, for the loss falls all the same.
    """
    run = make_run(flags, ops=ops)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(
                torch.randn_like(parameter) * 0.1
            )  # biases and norms, too, are far from where they begin
    state = {}
    for step in range(1, 5):
        before = {name: w.detach().double() for name, w in run.model.named_parameters()}
        x, y = run.next_batch()
        expected, loss, norm = reference_step(before, state, x, y, step, run.args)
        assert run.update(run.model, x, y).tolist() == pytest.approx([loss, norm], rel=1e-4)
        for name, w in run.model.named_parameters():
            moved = (expected[name] - before[name]).abs().max()
            wrong = (w.detach().double() - expected[name]).abs()
            if name.endswith("attn.c_attn.bias"):
                wrong[24:48] = (
                    0  # softmax does not see the bias of the keys: its gradient is rounding
                )
            wrong = wrong.max()
            assert moved > 1e-4 and wrong < 2e-3 * moved, (
                f"step {step}: {name} is off by {wrong}, it moved {moved}"
            )
    assert run.step == 4 and run.share == 4 / 6


def test_dropout_differs_by_step_and_by_process_and_by_seed_and_by_nothing_else():
    """The same step again leaves out the same."""
    still = "--dropout=0.5 --matrix_lr=0 --vector_lr=0 --batch_size=4"
    first = make_run(still)

    def loss(step: int, rank: int = 0, world: int = 1, seed: int = 5) -> float:
        run = make_run(f"{still} --seed={seed}", rank=rank, world=world)
        run.model.load_state_dict(first.model.state_dict())
        run.step = step
        torch.rand(step + rank)  # draws before a step do not matter
        return run.update(run.model, *first.next_batch())[0].item()

    places = [(step, rank, 4) for step in range(4) for rank in range(4)]
    losses = [loss(*place) for place in places]
    assert len(set(losses)) == len(places)
    assert [loss(*place) for place in places] == losses
    assert loss(3, seed=6) != loss(3)


def test_in_bfloat16_only_the_matrix_products_are():
    """Weights, gradients and the optimizer's state stay in float32."""
    run = make_run(dtype=torch.bfloat16)
    dtypes = []
    layer = run.model.h[0].mlp.c_fc
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    exact = make_run()
    losses = [r.update(r.model, *r.next_batch())[0].item() for r in (run, exact)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]
    assert dtypes == [torch.bfloat16]
    state = [value for o in run.optimizers for row in o.state.values() for value in row.values()]
    assert {value.dtype for value in [*run.model.parameters(), *state]} == {torch.float32}
