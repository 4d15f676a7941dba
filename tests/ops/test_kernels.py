"""
store_kv and paged_attention against an fp64 reference, and the other kernels of a GPU's step.

Block tables are permuted, lengths are odd, and every slot that belongs to no text is NaN: the
padding block, the tails of last blocks, the blocks that pad the tables, and everything before a
window. If such a slot is read, the output has NaN. A backend's error may be at most twice that of
plain torch attention in the same dtype, or what rounding explains. A new backend is one more name
in BACKENDS.
"""

import doctest
import math
import multiprocessing
import os
import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from interpreting import multiply_in_order, quick_on_a_cpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
import model as model_module
import paged
from engine import device as engine_device
from engine import sizing
from interleaved import flat_batch
from model import ACTIVATIONS, Attention, GPTConfig, Rope
from ops import cpu, fused, gather, inputs, linear, prefix, sampling, sampling_kernels
from ops.choice import choose_ops, triton_tables
from paged import KVBlockPool, Plan, Request
from params import NO_TOKEN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch"]
if kernels.triton:  # on a CPU in Triton's interpreter: see conftest.py
    BACKENDS.append("triton")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# the interpreter has no bf16 dot product
KERNEL_FLOATS = FLOATS if DEVICE == "cuda" else FLOATS[:2]
all_backends = pytest.mark.parametrize("backend", BACKENDS)
needs_triton = pytest.mark.skipif("triton" not in BACKENDS, reason="needs triton")
tensor = partial(torch.tensor, device=DEVICE)


# --------------------------------------------------------------------------------------------------
# Texts, and steps that attend from some of their tokens


class Texts:
    """
    Two texts in one layer's pool, whose other slots are NaN, with a query at each token: q [2,
    length, H, D], k and v [2, length, Hk, D].
    """

    def __init__(
        self, backend, Hk=2, G=1, D=16, S=16, window=0, softcap=0.0, dtype=torch.float32,
        pool_dtype=None, length=200,
    ):  # fmt: skip
        torch.manual_seed(G * D + S)
        count = math.ceil(length / S)
        tables = torch.randperm(2 * count + 4).view(2, -1)  # two belong to no text
        self.tables = tables.tolist()
        self.pool = KVBlockPool(2 * count + 4, S, 1, Hk, D, DEVICE, pool_dtype or dtype)
        self.kv = self.pool.kv[0].fill_(torch.nan)
        self.heads = torch.randn(2, length, G * Hk + 2 * Hk, D).to(DEVICE, dtype)
        # views, as in the model
        self.q, self.k, self.v = self.heads.split((G * Hk, Hk, Hk), dim=2)
        self.attn = SimpleNamespace(window=window, scale=D**-0.5, softcap=softcap)
        self.ops = choose_ops(backend, DEVICE)[0]
        self.length = length
        expected = self.kv.clone()
        at = torch.arange(length)
        for k, v, table in zip(self.k, self.v, tables, strict=True):
            expected[:, table[at // S], :, at % S] = torch.stack((k, v), 1).to(self.kv)
        batch, _ = self.step(chunks=[(length, length)] * 2)
        self.ops.store_kv(self.k.flatten(0, 1), self.v.flatten(0, 1), self.kv, batch)
        assert torch.equal(bits(self.kv), bits(expected))

    def step(self, decodes=(), chunks=(), groups=()):
        """
        Return the batch of a step, and where each of its pieces is in q. A decode is given by its
        context length, including the new token; a chunk by (new tokens, context length). Pieces
        alternate between the two texts. `groups` are (first, end, tokens) of decodes that share a
        prefix; then all pieces belong to one text. Table entries that must not be read point to
        NaN: blocks that a window has left, and the shared prefix, except that of a group's first
        decode.
        """
        window = self.attn.window
        _, blocks, _, S, _ = self.kv.shape
        plan = Plan()
        spans = []
        for i, (n, context) in enumerate([(1, context) for context in decodes] + list(chunks)):
            text = 0 if groups else i % 2
            start = context - n
            unseen = max(0, start - window + 1) // S if window else 0
            table = [blocks - 1] * unseen + self.tables[text][unseen:]
            request = Request(i, [0] * context, 1, block_table=table)
            request.num_filled_slots = start
            if i < len(decodes):
                plan.decodes.append(request)
            else:
                plan.chunks.append((request, n))
            spans.append((text, slice(start, context)))
        H = self.q.shape[2]
        windows = {"n_layer": 1, "n_head": H, "windows": (window,)}
        model = SimpleNamespace(config=GPTConfig(n_embd=H, **windows))
        batch = flat_batch(plan, model, self.pool)
        batch.ops = self.ops
        shared = torch.zeros(len(decodes), dtype=torch.int64)
        for first, end, tokens in groups:
            shared[first:end] = tokens
            if not window:
                batch.block_tables[first + 1 : end, : tokens // S] = blocks - 1
        if groups:
            firsts, ends, _ = torch.tensor([*groups, (0, 0, 0)]).T.contiguous()  # one is padding
            batch.groups = tuple(x.to(DEVICE) for x in (shared, firsts, ends))
        batch.attention_plans = {window: self.ops.plan_attention(batch, H, self.kv, window)}
        return batch, spans

    def attend(self, batch, spans) -> list[Tensor]:
        """
        Return the outputs [n, H, D] of each piece, after checking that the pool and counters are
        unchanged.
        """
        q = torch.cat([self.heads[span] for span in spans])[:, : self.q.shape[2]]
        before = self.kv.clone()
        out = self.ops.attend(q, self.kv, self.attn, batch)
        assert torch.equal(bits(self.kv), bits(before))
        assert (out.dtype, out.shape) == (q.dtype, q.shape)
        if self.ops.name == "triton":
            assert not batch.attention_plans[self.attn.window].finished.any()
        return out.split([span[1].stop - span[1].start for span in spans])

    def whole(self) -> Tensor:
        """Return the outputs of both texts as whole prompts, [2, length, H, D]."""
        return torch.stack(self.attend(*self.step(chunks=[(self.length, self.length)] * 2)))

    def reference(self) -> tuple[Tensor, float]:
        """
        Return softmax(q k / sqrt(D)) v in fp64, and the error allowed: twice that of plain torch in
        the same dtype, or what summing in fp32 explains (`rounding`).
        """
        G = self.q.shape[2] // self.k.shape[2]
        at = torch.arange(self.length, device=DEVICE)
        mask = model_module.may_see(at[:, None], at, self.attn.window)
        heads = (self.q, self.k.repeat_interleave(G, 2), self.v.repeat_interleave(G, 2))
        heads = [x.transpose(1, 2) for x in heads]  # [2, H, length, D]
        q, k, v = (x.double() for x in heads)
        scores = q @ k.mT * self.attn.scale
        if self.attn.softcap:
            scores = model_module.soft_cap(scores, self.attn.softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1)
        exact = weights @ v
        allowed = rounding(q, k, v, mask, scores, weights, torch.finfo(self.kv.dtype).eps)
        if not self.attn.softcap:
            heads = [x.to(self.kv.dtype) for x in heads]
            plain = F.scaled_dot_product_attention(*heads, attn_mask=mask)
            allowed = max(allowed, 2 * (plain - exact).abs().max().item())
        return exact.transpose(1, 2), allowed


U = 2.0**-24  # the largest relative error of rounding to fp32
EXP = 40 * U  # the same for the fastest exp in use: SLEEF's exp_u20, 20 units in the last place


def rounding(q, k, v, mask, scores, weights, eps: float) -> float:
    """
    Return how far off fp32 may be for queries q [H, n, D] that see k and v [H, C, D] with these
    weights [H, n, C]. A sum of n products, in any order, is off by at most n U times the sum of
    their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), to first order
    in U.

    A score is a sum of D products, times the scale: D + 2 roundings, including that of the scale.

    A weight is exp(score - largest). The difference is rounded, and exp has its own error. The
    absolute error of a score becomes the relative error of its weight.

    The result is the weighted sum divided by the sum of weights. Each is a sum of C terms, which an
    online softmax rescales at most C times, and each has the errors of the weights. Weights and
    result are also rounded to the dtype of the pool, by eps / 2 each.
    """
    D = q.shape[-1]
    C = mask.sum(-1)  # [n]
    score_errors = (D + 2) * U * (q.abs() @ k.abs().mT) / D**0.5
    differences = scores.amax(-1, keepdim=True) - scores
    weight_errors = score_errors + U * differences + EXP
    worst = weight_errors.masked_fill(~mask, 0).amax(-1)  # [H, n]
    share = 2 * worst + 2 * (2 * C + 1) * U + eps
    return (share[..., None] * (weights @ v.abs())).max().item()


def bits(x: Tensor) -> Tensor:
    """Return the bits, so that NaN can be compared."""
    return x.view(torch.int16)


# around the ends of blocks and of splits, which are tiles of 64 keys
EDGES = [1, 2, 63, 64, 65, 128, 129, 192, 193, 200]
CUTS = [[(100, 100), (28, 128), (1, 129), (64, 193), (63, 192), (8, 200)], [(9, 192), (2, 194)]]
# decodes, chunks beside them, groups of decodes
STEPS = [(EDGES,), (EDGES[-1:],), *(([193, 17], chunks) for chunks in CUTS)]
STEPS += [(EDGES, [], [(3, 5, 64), (5, 10, 128)]), ([200, 200, 193], [], [(0, 3, 192)])]
KINDS = [{}, {"G": 3, "Hk": 1, "S": 24}, {"D": 40, "softcap": 5.0}, {"window": 70}]
KINDS += [{"window": 64, "G": 2, "S": 3}, {"window": 5, "softcap": 2.0, "S": 8}]
KINDS += [{"S": 1, "D": 80, "G": 4, "Hk": 1}, {"S": 7, "D": 96, "window": 1}]
KINDS += [{"S": 100, "D": 128}, {"S": 128, "Hk": 12}, {"D": 64, "window": 130}]
KINDS += [{"dtype": dtype, "D": 64, "G": 2} for dtype in FLOATS[1:]]
KINDS += [{"pool_dtype": torch.float16}]
WAYS = ["torch", "whole", "splits"] if kernels.triton else ["torch"]  # one program, or several


def cases() -> list[tuple[str, dict]]:
    """
    Return each way with each kind, except bf16 in the interpreter, which has no bf16 dot product.
    """
    found = product(WAYS, KINDS)
    if DEVICE == "cuda":
        return [*found]
    return [(way, k) for way, k in found if way == "torch" or k.get("dtype") != torch.bfloat16]


@pytest.mark.parametrize(("way", "kind"), cases(), ids=str)
@quick_on_a_cpu("torch-*", "splits-{'window': 70}", "*-{'G': 3, *", "whole-{'dtype': *16, *")
def test_attention_is_right_and_the_same_whatever_is_beside_a_token(way, kind, monkeypatch):
    """
    Would catch: a mask that is flipped or off by one; wrong blocks, heads or requests; a stale slot
    that is read. Triton's outputs must be equal to the last bit, so it would also catch splits that
    depend on the number of requests, or begin where a window, a chunk or the rest of a group does;
    a masked key that rescales a sum; splits merged in the order in which programs finish; counters
    of another layer.
    """
    backend = "torch" if way == "torch" else "triton"
    if DEVICE == "cpu" and backend == "triton":
        multiply_in_order(monkeypatch)
    monkeypatch.setattr(kernels, "programs_at_once", lambda D: 1 if way == "whole" else 1000)
    monkeypatch.setattr(kernels, "MERGED_AT_ONCE", 128)  # few states, so it is interpreted sooner
    texts = Texts(backend, **kind)
    whole = texts.whole()
    exact, allowed = texts.reference()
    assert (whole - exact).abs().max() <= allowed  # fails if there is NaN
    for step in STEPS if backend == "triton" else STEPS[:-2]:
        batch, spans = texts.step(*step)
        for out, span in zip(texts.attend(batch, spans), spans, strict=True):
            assert (out - exact[span]).abs().max() <= allowed
            assert backend == "torch" or torch.equal(bits(out), bits(whole[span]))


@needs_triton
@pytest.mark.parametrize("groups", [[], [(0, 2, 64)]])
def test_one_preparation_serves_all_lengths(groups):
    """
    A captured graph replays its launches, so they must not depend on a length. Here lengths change
    on the device, down to 1, or from one split to many. Padding has length 0 and must give zeros;
    dividing by its sum of weights, 0, would give NaN.
    """
    texts = Texts("triton", Hk=1, G=2)
    exact, allowed = texts.reference()
    batch, spans = texts.step([200, 140, 150, 1], [], groups)
    batch.block_tables[-1] = texts.pool.padding_block
    for lens in [200, 140, 150], [65, 130, 1], [70, 200, 17]:
        batch.context_lens[:] = torch.tensor([*lens, 0])  # shorter texts in the same blocks
        spans[:3] = [(text, slice(n - 1, n)) for (text, _), n in zip(spans, lens, strict=False)]
        *outputs, padding = texts.attend(batch, spans)
        assert not padding.any()
        for out, span in zip(outputs, spans, strict=False):
            assert (out - exact[span]).abs().max() <= allowed


forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def in_a_child(check, *arguments):
    """
    Run `check` in a child process: on a CPU an address that overflowed is a SIGSEGV, and pytest
    must survive to report it. On a GPU it is an exception, and CUDA does not survive a fork, so run
    it here.
    """
    if DEVICE == "cuda":
        return check(*arguments)
    child = multiprocessing.get_context("fork").Process(target=check, args=arguments, daemon=True)
    child.start()
    child.join(300)
    code = child.exitcode
    assert code == 0, f"{check.__name__} ended with exit code {code} (-11: a wild address)"


@forks
@all_backends
def test_offsets_beyond_2_to_the_31(backend):
    """
    Block ids are int32, and so are their products with sizes unless they are cast. An overflow
    reads K and V of another request, or crashes. With heads of size one, even the row numbers of
    the pool exceed 2^31. The pool is virtual memory of which only a few blocks are touched.
    """
    in_a_child(attend_beyond_2_to_the_31, backend)


def attend_beyond_2_to_the_31(backend: str):
    texts = Texts(backend, Hk=1, G=2, D=1, dtype=torch.float16, length=20)
    exact = texts.whole()
    near = texts.kv
    S = near.shape[3]
    far = 2**31 // S
    texts.kv = near.new_empty(2, far + near.shape[1], *near.shape[2:])
    batch, _ = texts.step(chunks=[(20, 20)] * 2)
    batch.block_tables += far
    batch.slot_mapping += far * S
    batch.attention_plans = {0: texts.ops.plan_attention(batch, 2, texts.kv)}
    texts.ops.store_kv(texts.k.flatten(0, 1), texts.v.flatten(0, 1), texts.kv, batch)
    out = texts.ops.attend(texts.q.flatten(0, 1), texts.kv, texts.attn, batch)
    assert torch.equal(out.view_as(exact), exact)


@needs_triton
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kv", lambda kv: kv.transpose(2, 3), "a layer's pool must be contiguous"),
        ("q", lambda q: q.transpose(0, 1), "a token's heads must be contiguous"),
        ("q", lambda q: q[..., :8], "heads of size 8, but the pool's have size 16"),
        ("kv", Tensor.double, "the kernels compute in float32"),
        ("q", Tensor.long, "wanted floating point"),
    ],
)
def test_the_launchers_check_what_their_kernels_assume(name, change, message):
    """Like the test above, for what only Triton assumes."""
    texts = Texts("triton", length=5)
    batch, _ = texts.step([5])
    tensors = {"q": texts.q[0, 4:], "kv": texts.kv}
    tensors[name] = change(tensors[name])
    with pytest.raises(AssertionError, match=message):
        texts.ops.attend(*tensors.values(), texts.attn, batch)


@needs_triton
def test_a_gpu_has_tritons_operators():
    """This includes its sampler: torch's gives right tokens, but waits for the device."""
    ops, reason = choose_ops("auto", "cuda:1")
    assert ops.name == "triton"
    assert ops.plan_attention is kernels.plan_attention_triton
    assert reason == "the fastest on CUDA"
    assert ops.sample is sampling_kernels.sample_triton
    table = triton_tables()[1], "--deterministic"
    assert choose_ops("auto", "cuda", deterministic=True) == table


def test_the_choice_of_a_backend_has_a_reason(monkeypatch):
    """A typo or a missing backend must not lead to a silent fallback."""
    ops, reason = choose_ops("auto")
    assert ops.name == "cpu"
    assert reason == "the fastest on a CPU"
    assert isinstance(ops.linear.__self__, cpu.CpuKernels)
    assert choose_ops("torch")[1] == "as requested"
    with pytest.raises(ValueError, match="'trition' is unknown; cpu has auto, torch"):
        choose_ops("trition")
    assert choose_ops("auto", deterministic=True)[0].name == "cpu"
    for attention, dtype in ("torch", torch.float32), ("auto", torch.bfloat16):
        with pytest.raises(ValueError, match=r"attention is (torch|bf16) .*: leave the flag out"):
            choose_ops(attention, "cpu", dtype, deterministic=True)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ValueError, match="needs a CUDA device and the triton package; cpu has"):
        choose_ops("triton")
    monkeypatch.setattr(kernels, "triton", None)
    ops, reason = choose_ops("auto", "cuda")
    assert ops.name == "torch"
    assert reason.startswith("because there is no triton package: ")
    assert ops.sample is sampling.sample_torch


class Largest(TorchDispatchMode):
    """
    Records the bytes of the largest result of torch's operators, not counting views of the pool.
    """

    nbytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() != self.pool:
                self.nbytes = max(self.nbytes, x.nbytes)
        return result


@all_backends
def test_the_memory_that_attention_takes(backend):
    """
    Paging exists so that K and V are not gathered and the pool is not repacked. The torch backend
    does gather, which shows that the measurement works.
    """
    texts = Texts(backend, D=64)
    batch, _ = texts.step([199, 200])
    q = texts.q[:, 199].clone()
    with Largest() as largest:
        largest.pool = texts.kv.untyped_storage().data_ptr()
        texts.ops.attend(q, texts.kv, texts.attn, batch)
    assert (largest.nbytes > texts.kv.nbytes / 4) == (backend == "torch")


# --------------------------------------------------------------------------------------------------
# The other launches of a decode step: its inputs, and linear layers with their neighbours


@needs_triton
def test_the_inputs_of_decodes_in_one_launch():
    """
    Would catch: a position off by one; a neighbour's table; a new block that only this step knows
    but is not used; a given token ignored in favour of the last one; a change to the padding row.
    """
    torch.manual_seed(0)
    S, N, M = 4, 8, 6
    lens = torch.randint(M * S, (N + 1,))
    lens[N] = 0
    tables = torch.randint(100, (N + 1, M), dtype=torch.int32)
    blocks = torch.arange(7)
    blocks[[1, 4]] = 0  # all padding rows write the same
    step = inputs.StepInputs(*[None] * len(inputs.StepInputs._fields))._replace(
        rows=tensor([5, N, 0, 3, N, 7, 1]),
        last_blocks=blocks.to(DEVICE),
        given_tokens=tensor([NO_TOKEN, NO_TOKEN, 7, 0, NO_TOKEN, 9, NO_TOKEN]),
        given_positions=tensor([0, 0, 21, 0, 0, 3, 0]),
    )
    results = []
    for module in inputs, fused:
        state = [x.to(DEVICE, copy=True) for x in (torch.arange(N + 1) + 50, lens, tables)]
        known = inputs.KnownRows(*state, None, S)
        results.append([*module.decode_inputs(step, known), *state[1:]])
    assert results[0][5][N] == 0
    for x, y in zip(*results, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@needs_triton
def test_tokens_are_sent_to_the_next_row_of_the_ring():
    """
    Would catch: another row, or another step's place in it, where a request would get another's
    token.
    """
    ring = torch.full((3, 4), -1, pin_memory=DEVICE == "cuda")
    turn = tensor([0])
    for tokens in [1], [2, 3, 4, 5], [6, 7], [8, 9, 10]:
        fused.send(tensor(tokens), ring, turn)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert ring.tolist() == [[8, 9, 10, -1], [2, 3, 4, 5], [6, 7, -1, -1]]
    assert turn.item() == 4


def calculate(operator, device: str, dtype: torch.dtype, *arguments) -> Tensor:
    """
    Return operator(*arguments) in fp64, after copying tensors to the device, and floats to the
    dtype.
    """

    def copy(x):
        if not isinstance(x, nn.Module | Tensor):
            return x
        is_float = isinstance(x, nn.Module) or x.is_floating_point()
        return deepcopy(x).to(device, dtype if is_float else None)

    with torch.no_grad():
        return operator(*map(copy, arguments)).cpu().double()


def check_operator(operator, reference, dtype: torch.dtype, *arguments, slack=1e-6):
    """
    Check that the error against fp64 is at most twice that of the reference in this dtype, plus
    slack.
    """
    exact = calculate(reference, "cpu", torch.float64, *arguments)
    plain = calculate(reference, "cpu", dtype, *arguments)
    error = (calculate(operator, DEVICE, dtype, *arguments) - exact).abs().max()
    own = (plain - exact).abs().max()
    assert error <= 2 * own + slack * exact.abs().max()


def randomised(*modules: nn.Module) -> list[nn.Module]:
    for module in modules:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
    return modules


all_floats = pytest.mark.parametrize("dtype", KERNEL_FLOATS)
both_biases = pytest.mark.parametrize("bias", [True, False])
# rows, outputs, inputs, activation, gated: each activation, then each kind of tiles
LAYERS = [(17, 40, 96, activation, False) for activation in (None, *ACTIVATIONS)]
LAYERS += [(1, 50, 130, "gelu_new", False), (2, 24, 8200, None, False)]
LAYERS += [(40, 65, 48, "silu", False), (130, 65, 48, "gelu_new", False)]
LAYERS += [(1, 40, 70, "silu", True), (5, 40, 70, "silu", True)]


@needs_triton
@both_biases
@all_floats
@pytest.mark.parametrize(("R", "N", "K", "activation", "gated"), LAYERS)
def test_linear_layers_with_their_activations(R, N, K, activation, gated, dtype, bias, monkeypatch):
    """
    Would catch: rows or columns read beyond the last; a missing bias, or that of the other half; a
    wrong GELU.
    """
    if R == 130 and bias:  # as if there were many weights
        monkeypatch.setattr(linear, "SMALL_WEIGHT", 0)
    torch.manual_seed(R)
    (layer,) = randomised(nn.Linear(K, 2 * N if gated else N, bias=bias))
    x = 3 * torch.randn(R, K) + 1
    check_operator(linear.launch_linear, model_module.linear, dtype, x, layer, activation, gated)


# rows, width of the sum, inputs, parts of a sum
SUMS = [(1, 48, 100, 1), (3, 40, 1600, 4), (20, 130, 800, 2), (1, 65, 20, 1)]


@needs_triton
@both_biases
@all_floats
@pytest.mark.parametrize(("R", "N", "K", "parts"), SUMS)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_layer_the_sum_its_norm_and_the_layer_that_reads_it(
    R, N, K, parts, dtype, bias, monkeypatch
):
    """
    Would catch: a part of the sum left out or added twice; its bias added in each part; an x that
    is not updated; a norm of the old x, or with another epsilon. For a single row, whose norm the
    next product computes, also: a sum that no program stores, or one added again where the row
    itself is read.
    """
    monkeypatch.setattr(linear, "NORMED_ROW", 64)
    torch.manual_seed(R)
    norm = nn.LayerNorm(N, eps=0.5) if bias else model_module.RMSNorm(N, eps=0.5)
    modules = randomised(nn.Linear(K, N, bias=bias), norm, nn.Linear(N, 48))
    activation = None if bias else "silu"

    def operator(table):
        def compute(x, before, layer, norm, reader):
            delta = table.linear(x, layer, partial_sums=True)
            total, y = table.add_norm(before, delta, norm)
            if table is linear:
                assert R == 1 or len(delta) == parts  # else the parts are not tested
                assert isinstance(y, linear.LazyNorm) == (N == 48)
            rows = [y[:], y[:]]
            out = table.linear(y, reader, activation, gated=not bias)
            return torch.cat([total, *rows, out], dim=1)

        return compute

    x = (torch.randn(R, K), 3 * torch.randn(R, N) + 1)
    slack = 4 * torch.finfo(dtype).eps  # roundings of sum, norm and both halves may add up
    check_operator(operator(linear), operator(model_module), dtype, *x, *modules, slack=slack)


@needs_triton
def test_embeddings_of_tokens_and_positions():
    """Would catch: a token's position taken for the token; the row of a neighbour."""
    tokens = torch.tensor([49, 0, 7, 7, 3])
    positions = torch.tensor([8, 2, 1, 0, 5])
    arguments = (tokens, positions, nn.Embedding(50, 24), nn.Embedding(9, 24), 1.0)
    check_operator(fused.embed, model_module.embed, torch.float32, *arguments, slack=0)


# rows, heads, KV heads, head size, and the number of blocks before those of the slots; rotations
PROJECTIONS = [(1, 6, 2, 24, 0), (1, 6, 2, 24, 0, Rope(1e4)), (5, 4, 4, 16, 0), (70, 1, 1, 40, 0)]
PROJECTIONS += [(R, 1, 1, 16, 2**31 // (8 * 16)) for R in (1, 3)]
PROJECTIONS += [(R, 1, 1, 16, 2**31 // (8 * 16), Rope(1e4)) for R in (1, 3)]


@forks
@needs_triton
@pytest.mark.parametrize("case", PROJECTIONS)
def test_queries_are_returned_and_keys_and_values_stored(case):
    """
    Would catch: heads of K taken for those of V or q; a slot of another row; tokens beyond the last
    that write to slot 0; pairs of another head; rotated values; and, beyond 2^31 numbers, a product
    of slots and sizes in int32.
    """
    in_a_child(project, *case)


def project(R: int, H: int, Hk: int, D: int, first: int, rope: Rope | None = None):
    torch.manual_seed(R)
    config = GPTConfig(vocab_size=8, n_layer=1, n_head=H, n_kv_head=Hk, n_embd=H * D)
    if rope:
        config = replace(config, rope={0: rope})
    dtype = torch.float16 if first else torch.float32
    attention = Attention(config, 0, 0).requires_grad_(False).to(dtype)
    x = torch.randn(R, H * D).to(dtype)
    slots = torch.randperm(20 * 8)[:R]
    q, k, v = attention.c_attn(x).view(R, H + 2 * Hk, D).split([H, Hk, Hk], 1)
    rotations = {}
    if rope:
        positions, frequencies = torch.arange(R) + 7, rope.frequencies(D)
        q, k = model_module.rotate(q, k, model_module.rotation(positions, frequencies))
        rotations[0] = (positions.to(DEVICE), frequencies.to(DEVICE))
    expected = torch.full((2, 21, Hk, 8, D), 7.0).to(dtype)
    kv = torch.empty(2, first + 21, Hk, 8, D, device=DEVICE, dtype=dtype)
    kv[:, first:] = 7
    expected[:, slots // 8, :, slots % 8] = torch.stack([k, v], 1)
    batch = SimpleNamespace(slot_mapping=(8 * first + slots).to(DEVICE), rotations=rotations)
    batch.ops = choose_ops("triton", DEVICE)[0]
    queries, _ = fused.project_qkv(x.to(DEVICE), attention.to(DEVICE), kv, batch)
    close = partial(torch.testing.assert_close, rtol=0, atol=2e-3 if first else 1e-5)
    close(queries.cpu(), q)
    close(kv[:, first:].cpu(), expected)
    assert torch.equal(kv[:, first:].cpu() == 7, expected == 7)


FEW, MANY = linear.FEW_ROWS, linear.LINEAR_ROWS
# activation, gated, bias
LAYERS_OF_ALL_KINDS = [(None, False, True), ("silu", True, True), ("gelu", False, True)]
LAYERS_OF_ALL_KINDS += [("gelu_new", False, True), ("gelu_new", False, False)]
# rows, outputs, dtype, is_head -> whether the product is one of our kernels
WAYS_OF_PRODUCTS = {
    (1, 72, torch.float32, False): True,
    (MANY, 72, torch.float32, False): True,
    (MANY + 1, 72, torch.float32, False): False,
    (MANY + 1, 72, torch.bfloat16, False): False,
    (1, 72, torch.float32, True): True,
    (2, 72, torch.float32, True): False,
    (FEW, 72, torch.float16, True): True,
    (FEW + 1, 72, torch.float16, True): False,
    (MANY + 1, 73, torch.float16, True): True,
}


@needs_triton
@pytest.mark.parametrize(("case", "is_ours"), WAYS_OF_PRODUCTS.items(), ids=str)
def test_which_products_are_ours_on_a_gpu(case, is_ours, monkeypatch):
    """
    Ours are products of few rows, where launches cost most, and the head in 16 bits or with one
    row. All others are cuBLAS's. Would catch: a limit off by one; a bias or an activation lost on
    one path.
    """
    R, N, dtype, is_head = case
    launch = Mock(wraps=linear.launch_linear)
    monkeypatch.setattr(linear, "launch_linear", launch)
    cublas_gelu = Mock(wraps=torch._addmm_activation)
    monkeypatch.setattr(torch, "_addmm_activation", cublas_gelu)
    torch.manual_seed(R)
    x = torch.randn(R, 48)
    # The tanh that cuBLAS computes as it stores a product is off by 2.2e-5, whatever the dtype, and
    # the erf that a CPU uses instead by 5e-4. Both are relative to the largest number, about 4.
    of_gelu = 2.5e-5 if DEVICE == "cuda" else 2e-4
    if is_head:
        arguments = (x, nn.Linear(48, N, bias=False), 3.0)
        check_operator(linear.head, model_module.head, dtype, *arguments)
    for activation, gated, bias in [] if is_head else LAYERS_OF_ALL_KINDS:
        slack = of_gelu if activation == "gelu_new" and bias and not is_ours else 2.5e-7
        arguments = (x, nn.Linear(48, N, bias=bias), activation, gated)
        check_operator(linear.linear, model_module.linear, dtype, *arguments, slack=slack)
    assert launch.called == is_ours
    assert cublas_gelu.call_count == (not is_ours and not is_head)


def test_how_many_products_are_ours():
    large = nn.Linear(2**14, 2**14, device="meta")
    assert linear.use_triton(FEW, large) and not linear.use_triton(FEW + 1, large)


@pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("R", [1, 8, 40])
def test_nothing_is_read_behind_the_weights(R, is_head):
    """
    Outputs and inputs are no multiples of a tile, like GPT-2's vocabulary of 50,257.
    interpreting.Memory checks every access. Would catch: an illegal access on a GPU.
    """
    for N, K in product((97, 100), (64, 90)):
        layer = SimpleNamespace(weight=torch.ones(N, K), bias=None)
        out = linear.launch_linear(torch.ones(R, K), layer, is_head=is_head)
        assert (out == K).all()


@kernels.jit
def copy_one(numbers, out, at):
    kernels.tl.store(out, kernels.tl.load(numbers + at))


@pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("read", [-1, 0, 4, 5])
def test_an_access_outside_the_tensors_is_an_error(read):
    """Would catch: an interpreter that reads memory next to a tensor."""
    numbers = torch.arange(12.0)[4:9]
    ends = pytest.raises(Exception, match="outside") if read in (-1, 5) else nullcontext()
    with ends:
        copy_one[(1,)](numbers, torch.zeros(1), read)


def test_keys_and_values_of_a_cpu_are_fp32():
    """
    Attention of one query in bf16 is slow on a CPU; on a GPU they have the dtype of the weights.
    """
    for device, expected in ("cpu", torch.float32), ("meta", torch.bfloat16):
        wte = nn.Embedding(1, 1, device=device, dtype=torch.bfloat16)
        assert engine_device.kv_dtype(SimpleNamespace(wte=wte)) == expected


# L4, A100, H200
CHIPS = {101_376: [2, 1, 1, 2], 166_912: [3, 2, 1, 4], 232_448: [3, 3, 2, 5]}


@needs_triton
@pytest.mark.parametrize(("room", "stages"), CHIPS.items())
def test_tiles_fit_into_the_shared_memory(room, stages, monkeypatch):
    """
    Compiled for heads of 64, 128 and 256 in fp32, which used to be too large even for an H200, and
    for a gated layer with few rows. test_compiled_kernels.py covers all kernels.
    """
    launch = MagicMock()
    monkeypatch.setattr(linear, "matrix_kernel", launch)
    for module in kernels, linear:
        monkeypatch.setattr(module, "shared_memory", lambda device: room)
    pools = [torch.empty(2, 1, 1, 16, D) for D in (64, 128, 256)]
    of_heads = [kernels.stages_that_fit(pool) for pool in pools]
    layer = nn.Linear(768, 3072, device="meta", dtype=torch.half)
    linear.launch_linear(torch.empty_like(layer.weight[:9]), layer, "silu", gated=True)
    [call] = launch.__getitem__.return_value.mock_calls
    assert [*of_heads, call.kwargs["num_stages"]] == stages


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter compiles nothing")
def test_nothing_compiles_after_the_first_steps():
    """
    A kernel compiled again for each width of the block tables, or number of rows, would stop a
    server for seconds.
    """
    first = [[5], [17, 40], [300], [31, 2, 900]]
    later = [[6], [999], [170, 41], [32, 200, 700], [1]]
    counts = []
    for steps in first, later:
        for decodes in steps:
            texts = Texts("triton", D=64, dtype=torch.bfloat16, length=max(decodes))
            texts.attend(*texts.step(decodes))
        compiled = kernels.attention_kernel.device_caches[torch.cuda.current_device()][0]
        counts.append(len(compiled))
    assert counts[0] == counts[1]


# --------------------------------------------------------------------------------------------------
# Memory of the torch path


@seed(0)
@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=40))
def test_length_classes_at_most_double_the_memory(lens):
    """
    If all were padded to the longest, one context of 4,096 among 31 short ones would take 30 times
    the memory needed.
    """
    groups = gather.length_classes(lens)
    assert sorted(i for group in groups for i in group) == list(range(len(lens)))
    memory = [len(group) * max(lens[i] for i in group) for group in groups]
    assert sum(memory) <= 2 * sum(lens)
    assert len(groups) <= max(lens).bit_length()


@pytest.mark.parametrize(
    ("decodes", "chunks", "window", "widths"),
    [
        # the long decode, the short ones together, the chunk: no needless rows of K or V
        ([512] + [10] * 31, [(64, 200)], 0, [512, 10, 200]),
        # one SDPA per decode would cost more than the attention itself
        ([*range(480, 512)], [], 0, [511]),
        # decodes of any length are padded to the window, not to the longest of them
        ([512, 300, 40, 20], [], 32, [32]),
    ],
)
def test_requests_of_similar_length_are_one_gather(decodes, chunks, window, widths):
    texts = Texts("torch", window=window, length=512)
    batch, _ = texts.step(decodes, chunks)
    gathers = batch.attention_plans[window].calls
    assert [call.kv_rows.shape[-1] for call in gathers] == widths
    assert sum(call.kv_rows.shape[1] for call in gathers) == len(decodes + chunks)


# --------------------------------------------------------------------------------------------------
# The pool, and examples


def test_copies_read_all_sources_before_they_write():
    """Copied one block at a time, a chain 0 -> 1 -> 2 would put block 0 everywhere."""
    pool = KVBlockPool(4, 2, n_layer=2, n_head=3, head_size=5)
    torch.nn.init.normal_(pool.kv)
    before = pool.kv.clone()
    pool.copy_blocks([1, 2, 0], [0, 1, 2])
    assert torch.equal(pool.kv, before[:, :, [2, 0, 1, 3, 4]])


@pytest.mark.parametrize("module", [gather, inputs, paged, prefix, sizing])
def test_examples_in_docstrings_are_true(module):
    """A wrong example teaches the wrong thing."""
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from kernels import order_kernel
names = order_kernel.arg_names
types = ["*i32", "*i32", "*i32", "i32"] + 4 * ["constexpr"]
constants = {"WIDTH": 16, "Hk": 2, "HEADS": 2, "PDL": False}
source = triton.compiler.ASTSource(order_kernel, dict(zip(names, types)), constants)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert compiled.metadata.enable_fp_fusion, "products and sums are apart"
"""


@pytest.mark.slow
@needs_triton
def test_a_gpu_adds_a_product_without_rounding_it():
    """
    Triton's compiler shows it, and needs no GPU. It must also not warn that a later version will
    stop fusing by default.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error:TRITON_DEFAULT", "-c", COMPILE]
    subprocess.run(command, cwd=Path(__file__).parents[2], env=env, check=True)
