"""
store_kv and paged_attention against an fp64 reference that knows the block tables of each request.

Block tables are permuted, lengths odd, and every slot that belongs to no request (the sink, the
tails of last blocks, the blocks that pad the tables, what lies before a window) is NaN: if it is
read, there is NaN in the output. A backend's error may be at most twice that of plain torch
attention in the same dtype, or what rounding explains. A new backend is one more name in BACKENDS.
"""

import doctest
import math
import multiprocessing
import os
import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting import quick_on_a_cpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
import model as model_module
import paged
from engine import device as engine_device
from engine import sizing
from engine.engine import flat_batch
from model import ACTIVATIONS, Attention, GPTConfig
from ops import cpu, fused, gather, inputs, linear, prefix, sampling, sampling_kernels
from ops.choice import DETERMINISTIC, choose_ops
from paged import KVBlockPool, Plan, Request
from params import NO_TOKEN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch"]
if kernels.triton:  # on a CPU in Triton's interpreter: see conftest.py
    BACKENDS += ["triton", "deterministic"]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# the interpreter has no bf16 dot product
KERNEL_FLOATS = FLOATS if DEVICE == "cuda" else FLOATS[:2]
all_backends = pytest.mark.parametrize("backend", BACKENDS)
needs_triton = pytest.mark.skipif("triton" not in BACKENDS, reason="needs triton")


# --------------------------------------------------------------------------------------------------
# A step with made-up requests


@dataclass
class Shape:
    """Requests: decodes by their context lengths, then chunks as (new tokens, context length)."""

    decodes: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    Hk: int = 4
    G: int = 1
    D: int = 32
    S: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0  # tokens that each sees, itself included; 0: all before it

    def __str__(self):
        requests = f"{len(self.decodes)}+{len(self.chunks)}"
        sizes = f"Hk{self.Hk}-G{self.G}-D{self.D}-S{self.S}-W{self.window}"
        return f"{requests}-{sizes}-{str(self.dtype)[6:]}"

    @property
    def requests(self) -> list[tuple[int, int]]:
        return [(1, context) for context in self.decodes] + self.chunks

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) if self.window else 0


def ops_of(backend: str):
    if backend == "deterministic":
        return choose_ops("triton", DEVICE, deterministic=True)[0]
    return choose_ops(backend, DEVICE)[0]


class Step:
    """
    Tensors of a step: q [T, H, D], new k and v [T, Hk, D], one layer's pool kv, and the batch.
    """

    def __init__(self, shape: Shape, backend: str, seed: int = 0):
        self.shape = shape
        self.generator = torch.Generator().manual_seed(seed)
        S, Hk, G, D = shape.S, shape.Hk, shape.G, shape.D
        counts = [math.ceil(context / S) for _, context in shape.requests]
        num_blocks = sum(counts) + 3  # three blocks are in no table
        ids = torch.randperm(num_blocks, generator=self.generator).tolist()
        pool = KVBlockPool(num_blocks, S, 1, Hk, D, DEVICE, shape.dtype)
        self.kv = pool.kv[0].fill_(torch.nan)
        plan = Plan()
        for i, (n, context) in enumerate(shape.requests):
            table = [ids.pop() for _ in range(counts[i])]
            first = shape.first_seen(context - n)
            for p in range(first, context - n):  # what earlier steps have cached
                self.kv[:, table[p // S], :, p % S] = self.randn(2, Hk, D)
            for index in range(first // S):  # blocks that were left are the sink, or others'
                table[index] = [num_blocks, ids[1]][index % 2]
            request = Request(i, [0] * context, 1, block_table=table + ids[:2])
            request.num_filled_slots = context - n
            if i < len(shape.decodes):
                plan.decodes.append(request)
            else:
                plan.chunks.append((request, n))
        self.tables = [request.block_table for request, _ in plan.work]
        windows = {"n_layer": 1, "n_head": G * Hk, "windows": (shape.window,)}
        model = SimpleNamespace(config=GPTConfig(n_embd=G * Hk, **windows))
        self.batch = flat_batch(plan, model, pool)
        self.batch.ops = ops_of(backend)
        self.slots = self.batch.slot_mapping.tolist()
        heads = self.randn(len(self.slots), G * Hk + 2 * Hk, D)
        # views, as the model has them
        self.q, self.k, self.v = heads.split((G * Hk, Hk, Hk), dim=1)
        self.attn = SimpleNamespace(window=shape.window, scale=D**-0.5, softcap=0.0)
        self.prepare()

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(DEVICE, self.shape.dtype)

    def prepare(self):
        shape = self.shape
        plan = self.batch.ops.prepare(self.batch, shape.G * shape.Hk, self.kv, shape.window)
        self.batch.prepared = {shape.window: plan}

    def store(self):
        self.batch.ops.store_kv(self.k, self.v, self.kv, self.batch)

    def attend(self) -> Tensor:
        return self.batch.ops.attend(self.q, self.kv, self.attn, self.batch)

    def run(self) -> Tensor:
        self.store()
        return self.attend()

    def texts(self, dtype: torch.dtype):
        """Of each request q [H, n, D], the k and v [H, C, D] that it sees, and the mask [n, C]."""
        queries = self.q.split(self.batch.query_lens_host)
        for q, table, (n, context) in zip(queries, self.tables, self.shape.requests, strict=True):
            first = self.shape.first_seen(context - n)
            of_slots = self.kv[:, table].transpose(2, 3).flatten(1, 2)  # [2, slots, Hk, D]
            heads = of_slots[:, first:context].repeat_interleave(self.shape.G, 2)
            k, v = heads.transpose(1, 2).to(dtype)
            positions = torch.arange(context - n, context)[:, None]
            keys = torch.arange(first, context)
            is_near = keys > positions - (self.shape.window or context)
            mask = (keys <= positions) & is_near
            yield q.transpose(0, 1).to(dtype), k, v, mask.to(DEVICE)

    def reference(self) -> tuple[Tensor, float]:
        """
        softmax(q k / sqrt(D)) v in fp64; and the largest error that fp32 can make of it, in
        whatever order it is computed (see `rounding`).
        """
        outputs = []
        allowed = []
        for q, k, v, mask in self.texts(torch.float64):
            scores = q @ k.mT / self.shape.D**0.5
            scores = scores.masked_fill(~mask, -torch.inf)
            weights = scores.softmax(-1)
            outputs.append((weights @ v).transpose(0, 1))
            allowed.append(rounding(q, k, v, mask, scores, weights))
        return torch.cat(outputs), max(allowed)

    def plain_torch(self) -> Tensor:
        """The same in the dtype at hand, by torch's own attention on contiguous K and V."""
        outputs = []
        for q, k, v, mask in self.texts(self.shape.dtype):
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


U = 2.0**-24  # what rounding to fp32 changes a number by at most, as a share of it
EXP = 40 * U  # the same of the fastest exp in use: SLEEF's exp_u20, 20 units in the last place


def rounding(q, k, v, mask, scores, weights) -> float:
    """
    How far fp32 may be off for queries q [H, n, D] that see k and v [H, C, D] with these weights
    [H, n, C]. A sum of n products, in any order, is off by at most n U times the sum of their
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1), to first order in U:

    a score is a sum of D products, times the scale: D + 2 roundings, the scale's own included;
    a weight is exp(score - largest): that difference is rounded, and exp errs itself. What the
    score is off by is the share that its weight is off by;
    the result is a weighted sum over the sum of weights: two sums of C, each rescaled at most C
    times by an online softmax. Both have the weights' errors.
    """
    D = q.shape[-1]
    C = mask.sum(-1)  # [n]
    score_errors = (D + 2) * U * (q.abs() @ k.abs().mT) / D**0.5
    differences = scores.amax(-1, keepdim=True) - scores
    weight_errors = score_errors + U * differences + EXP
    worst = weight_errors.masked_fill(~mask, 0).amax(-1)  # [H, n]
    share = 2 * worst + 2 * (2 * C + 1) * U
    return (share[..., None] * (weights @ v.abs())).max().item()


def bits(x: Tensor) -> Tensor:
    """To compare, NaN included."""
    return x.view(torch.int16)


def check_attention(shape: Shape, backend: str, seed: int = 0) -> Step:
    """
    At most twice the error of plain torch in the same dtype, or what fp32, in which every backend
    adds up, may be off by. In fp32 plain torch's own error is a matter of luck where outputs are
    few: of 80 numbers it was 9.9e-8 on a CPU with AVX2, and ours 3.2e-7. And attention only reads
    the pool: what it wrote in one layer would be wrong in the next step.
    """
    step = Step(shape, backend, seed)
    step.store()
    before = step.kv.clone()
    out = step.attend()
    assert torch.equal(bits(step.kv), bits(before))
    assert out.dtype == shape.dtype
    assert out.shape == step.q.shape
    reference, allowed = step.reference()
    assert reference.isfinite().all()
    error = (out - reference).abs().max().item()
    own = (step.plain_torch() - reference).abs().max().item()
    why = f"error {error:.2e}, plain torch has {own:.2e}, rounding explains {allowed:.2e}"
    assert error <= max(2 * own, allowed), why  # NaN fails
    return step


DECODES = Shape([1, 15, 16, 17, 339, 799])
PROMPTS = Shape(chunks=[(n, n) for n in (1, 15, 16, 17, 339)])
MIXED = Shape([1, 16, 339, 17], [(1, 1), (7, 7), (16, 48), (33, 100), (1, 20)])
SKEWED = Shape([799, *range(1, 16)], [(5, 30)])
# a chunk whose first query is not at position 0 sees what was cached before it, and no more
LONG = Shape(chunks=[(799, 799), (100, 799)], Hk=1, G=2, D=16)


def variants() -> list[Shape]:
    """
    Every block size, head size, grouping and dtype at least once, each with decodes, prompts and
    mixtures.
    """
    shapes = []
    for S in 1, 2, 3, 7, 16, 24, 100, 128:
        shapes += [replace(MIXED, S=S), replace(DECODES, S=S)]
    for D in 16, 64, 80, 96, 128:
        shapes.append(replace(MIXED, D=D))
    for Hk, G in (2, 3), (1, 4), (1, 1), (12, 1):
        shapes += [replace(MIXED, Hk=Hk, G=G, S=5), replace(PROMPTS, Hk=Hk, G=G)]
    for window in 1, 5, 16, 100:
        shapes.append(replace(MIXED, window=window, S=8))
        shapes.append(replace(DECODES, window=window, Hk=2, G=3))
    for dtype in torch.bfloat16, torch.float16, torch.float32:
        for base in DECODES, PROMPTS, MIXED, SKEWED:
            shapes.append(replace(base, Hk=2, G=2, D=64, dtype=dtype))
    return shapes


def cases() -> list[tuple[Shape, str]]:
    """
    Every shape with every backend; but the interpreter takes a second for each, and has no bf16 dot
    product.
    """
    few = variants()
    if DEVICE == "cpu":
        few = [shape for shape in few if shape.dtype != torch.bfloat16][1::3]
    shapes = {backend: [LONG, *few] for backend in BACKENDS}
    shapes["torch"] = [LONG, *variants()]
    return [(shape, backend) for backend in BACKENDS for shape in shapes[backend]]


@pytest.mark.parametrize(("shape", "backend"), cases(), ids=str)
@quick_on_a_cpu("*-torch", "*-float16-*", "*-W5-*", "*-W16-*", "*-S3-*", "*-Hk2-G3-*")
def test_attention_through_permuted_block_tables(shape, backend):
    """
    Mask flipped or off by one, wrong block, wrong head of a group, stale slot read, requests or
    heads mixed up.
    """
    check_attention(shape, backend)


MIXTURES = st.builds(
    Shape,
    decodes=st.lists(st.integers(1, 70), max_size=6),
    chunks=st.lists(
        st.builds(lambda n, cached: (n, n + cached), st.integers(1, 20), st.integers(0, 40)),
        max_size=3,
    ),
    Hk=st.integers(1, 3),
    G=st.integers(1, 3),
    D=st.sampled_from([16, 24, 80]),
    S=st.integers(1, 20),
    window=st.sampled_from([0, 0, 1, 7, 30]),
).filter(lambda shape: shape.requests)


@all_backends
def test_attention_of_any_mixture(backend):
    """Random mixtures, for cases that the list above has missed."""
    is_fast = backend == "torch" or DEVICE == "cuda"

    @settings(max_examples=40 if is_fast else 8, deadline=None)
    @given(MIXTURES)
    def any_mixture(shape):
        check_attention(shape, backend, seed=shape.S)

    any_mixture()


@needs_triton
@pytest.mark.parametrize("at_once", [1, 100])
def test_decodes_are_right_whether_they_start_at_once_or_in_order(at_once, monkeypatch):
    """The longest first, where not all programs start at once; a small batch never had an order."""
    monkeypatch.setattr(kernels, "programs_at_once", lambda D: at_once)
    check_attention(replace(SKEWED, Hk=12), "triton")


@all_backends
def test_a_pool_of_another_dtype_than_the_model(backend):
    """
    K, V are kept in fp16 under an fp32 model: what comes out is fp32 again, within fp16's rounding.
    """
    step = Step(MIXED, backend)
    exact = step.run()
    step.kv = step.kv.half()
    step.prepare()
    out = step.run()
    assert out.dtype == torch.float32
    assert 0 < (out - exact).abs().max() < 0.005


@all_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("S", [1, 5, 16])
def test_store_writes_the_addressed_slots_and_no_other_byte(backend, dtype, S):
    """
    V written into the K cache, a head's row into its neighbour, or one slot too far: into another
    request's text.
    """
    step = Step(replace(MIXED, Hk=3, G=2, S=S, dtype=dtype), backend)
    expected = step.kv.clone()
    for slot, k, v in zip(step.slots, step.k, step.v, strict=True):
        expected[0, slot // S, :, slot % S] = k
        expected[1, slot // S, :, slot % S] = v
    step.store()
    assert torch.equal(bits(step.kv), bits(expected))


@all_backends
def test_padded_rows_get_zeros_and_leave_the_others_alone(backend):
    """
    The padding of a CUDA graph: no context, K and V into the sink. A division by its sum of
    weights, 0, is NaN.
    """
    shape = Shape([33, 1, 70, 1])
    exact = Step(shape, backend).run()
    step = Step(shape, backend)
    batch = step.batch
    padding = [1, 3]
    sink = step.kv.shape[1] - 1
    batch.context_lens[padding] = 0
    batch.block_tables[padding] = sink
    batch.slot_mapping[padding] = sink * shape.S
    batch.context_lens_host = batch.context_lens.tolist()
    step.prepare()
    out = step.run()
    assert (out[::2] - exact[::2]).abs().max() < 1e-6
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))
    # into one slot, at the same time
    one, other = torch.stack([step.k, step.v], 1)[padding]
    written = step.kv[:, sink, :, 0]
    assert ((written == one) | (written == other)).all()


@needs_triton
def test_one_preparation_serves_all_lengths():
    """
    A captured graph replays the launches of its capture: nothing of them may hang on a length. One
    that changes on the device, as there, from 799 tokens to 1 or from one split to many, must be
    right.
    """
    step = Step(Shape([799, 40, 650], Hk=1, G=2), "triton")
    step.store()
    for lens in [799, 40, 650], [1, 3, 2], [17, 40, 430], [799, 1, 64]:
        step.batch.context_lens[:] = torch.tensor(lens)  # shorter texts in the same blocks
        step.shape = replace(step.shape, decodes=lens)
        reference, allowed = step.reference()
        assert (step.attend() - reference).abs().max() <= allowed


forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def in_a_child(check, *arguments):
    """
    On a CPU an address that overflowed is a SIGSEGV: in a process of its own, so that pytest lives
    to report it. On a GPU it is an exception (and CUDA does not outlive a fork).
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
    Block ids are int32, and so are their products with sizes unless they are cast: K and V of
    another request, or a crash. With heads of one number the rows of the pool pass 2^31, too. The
    pool is virtual memory of which a few blocks are touched.
    """
    in_a_child(attend_beyond_2_to_the_31, backend)


def attend_beyond_2_to_the_31(backend: str):
    shape = Shape([18], [(2, 20)], Hk=1, G=2, D=1, dtype=torch.float16)
    exact = Step(shape, backend).run()
    step = Step(shape, backend)
    near = step.kv
    far = 2**31 // shape.S
    step.kv = near.new_empty(2, far + near.shape[1], *near.shape[2:])
    step.kv[:, far:] = near
    step.batch.block_tables += far
    step.batch.slot_mapping += far * shape.S
    step.prepare()
    assert torch.equal(step.run(), exact)


@needs_triton
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kv", lambda kv: kv.transpose(2, 3), "the pool of a layer must be contiguous"),
        ("q", lambda q: q.transpose(0, 1), "wanted the heads of a token together"),
        ("q", lambda q: q[..., :16], "heads of 16 for a pool of heads of 32"),
        ("kv", Tensor.double, "the kernels compute in float32"),
        ("q", Tensor.long, "wanted floating point"),
    ],
)
def test_the_launchers_check_what_their_kernels_assume(name, change, message):
    """As above, for what only Triton assumes."""
    step = Step(MIXED, "triton")
    setattr(step, name, change(getattr(step, name)))
    with pytest.raises(AssertionError, match=message):
        step.attend()


@needs_triton
def test_a_gpu_has_tritons_operators():
    """Its sampler, too: torch's is right there, but waits for the device."""
    ops, reason = choose_ops("auto", "cuda:1")
    assert ops.name == "triton"
    assert ops.prepare is prefix.prepare
    assert reason == "the fastest on CUDA"
    assert ops.sample is sampling_kernels.sample_triton
    assert choose_ops("auto", "cuda", deterministic=True) == (DETERMINISTIC, "--deterministic")


def test_the_choice_of_a_backend_has_a_reason(monkeypatch):
    """A typo, or a backend that is not there, must not fall back in silence."""
    ops, reason = choose_ops("auto")
    assert ops.name == "cpu"
    assert reason == "the fastest on a CPU"
    assert isinstance(ops.sample.__self__, cpu.CpuKernels)
    assert choose_ops("torch")[1] == "as asked"
    with pytest.raises(ValueError, match="'trition' is unknown; on cpu there is auto, torch"):
        choose_ops("trition")
    assert choose_ops("auto", deterministic=True)[0].name == "cpu"
    for attention, dtype in ("torch", torch.float32), ("auto", torch.bfloat16):
        with pytest.raises(ValueError, match=r"attention is (torch|bf16) .*: leave it out"):
            choose_ops(attention, "cpu", dtype, deterministic=True)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ValueError, match="needs a CUDA device and the package triton; on cpu"):
        choose_ops("triton")
    monkeypatch.setattr(kernels, "triton", None)
    ops, reason = choose_ops("auto", "cuda")
    assert ops.name == "torch"
    assert reason.startswith("as there is no package triton: ")
    assert ops.sample is sampling.sample_torch


class Largest(TorchDispatchMode):
    """The bytes of the largest result of torch's operators, views of the pool apart."""

    def __init__(self, pool: Tensor):
        super().__init__()
        self.pool = pool.untyped_storage().data_ptr()
        self.nbytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() != self.pool:
                self.nbytes = max(self.nbytes, x.nbytes)
        return result


@pytest.mark.parametrize(
    ("backend", "copies"),
    [("torch", True), pytest.param("triton", False, marks=needs_triton)],
)
def test_the_memory_that_attention_takes(backend, copies):
    """
    A gather of K and V, or a repacked pool, is what paging is there to avoid; that torch gathers
    shows that the measure notices.
    """
    step = Step(Shape([300, 301], Hk=8, D=64), backend)
    step.store()
    with Largest(step.kv) as largest:
        step.attend()
    assert (largest.nbytes > step.kv.nbytes / 4) == copies


# --------------------------------------------------------------------------------------------------
# The other launches of a decode step: its inputs, and linear layers with their neighbours


@needs_triton
@pytest.mark.parametrize("n", [1, 3, 7])
def test_the_inputs_of_decodes_in_one_launch(n):
    """
    A position one off, or the neighbour's table, is another text; so is a new block that only this
    step knows of, or a given token in place of the last one. The padding's row must stay as it is.
    """
    torch.manual_seed(0)
    S, N, M = 4, 8, 6
    last = torch.randint(50, (N + 1,))
    lens = torch.randint(M * S, (N + 1,))
    lens[N] = 0
    tables = torch.randint(100, (N + 1, M), dtype=torch.int32)
    rows = torch.tensor([5, N, 0, 3, N, 7, 1][:n])
    blocks = torch.randint(100, (n,))
    blocks[rows == N] = tables[N, 0].long()  # padding's rows all write the same
    tokens = torch.tensor([NO_TOKEN, NO_TOKEN, 7, 0, NO_TOKEN, 9, NO_TOKEN][:n])
    positions = torch.tensor([0, 0, 21, 0, 0, 3, 0][:n])
    results = []
    for module in inputs, fused:
        tensors = [x.to(DEVICE, copy=True) for x in (last, lens, tables)]
        known = inputs.KnownRows(*tensors, None, S)
        fields = [None] * len(inputs.StepInputs._fields)
        step = inputs.StepInputs(*fields)._replace(
            rows=rows.to(DEVICE),
            last_blocks=blocks.to(DEVICE),
            given_tokens=tokens.to(DEVICE),
            given_positions=positions.to(DEVICE),
        )
        results.append([*module.decode_inputs(step, known), *tensors[1:]])
    assert lens[N] == results[0][5][N] == 0
    for x, y in zip(*results, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@needs_triton
def test_tokens_are_sent_to_the_next_row_of_the_ring():
    """Into another row, or another step's place in it, a request would get another's token."""
    ring = torch.full((3, 5), -1, pin_memory=DEVICE == "cuda")
    turn = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for n in (1, 5, 2, 3):
        fused.send(10 * n + torch.arange(n, device=DEVICE), ring, turn)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    rows = [[30, 31, 32, -1, -1], [50, 51, 52, 53, 54], [20, 21, -1, -1, -1]]
    assert ring.tolist() == rows and turn.item() == 4


def calculate(operator, device: str, dtype: torch.dtype, *arguments) -> Tensor:
    """operator(*arguments), copied to a device, floating-point numbers to a dtype; in fp64."""

    def copy(x):
        if not isinstance(x, nn.Module | Tensor):
            return x
        is_float = isinstance(x, nn.Module) or x.is_floating_point()
        return deepcopy(x).to(device, dtype if is_float else None)

    with torch.no_grad():
        return operator(*map(copy, arguments)).cpu().double()


def check_operator(operator, reference, dtype: torch.dtype, *arguments, slack=1e-6):
    """At most twice the error of the reference in the same dtype, and `slack`, against fp64."""
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
LAYERS = [(1, 50, 130), (3, 96, 48), (33, 200, 64), (70, 65, 48)]
LAYERS = [(*sizes, "gelu_new") for sizes in LAYERS] + [(2, 8200, 24, None)]
LAYERS += [(17, 40, 96, activation) for activation in (None, *ACTIVATIONS)]


@needs_triton
@both_biases
@all_floats
@pytest.mark.parametrize(("R", "N", "K", "activation"), LAYERS)
def test_linear_layers_with_their_activations(R, N, K, activation, dtype, bias):
    """Rows or columns beyond the last, a bias that is not there, a wrong GELU."""
    torch.manual_seed(R)
    (layer,) = randomised(nn.Linear(K, N, bias=bias))
    x = 3 * torch.randn(R, K) + 1
    check_operator(linear.launch_linear, model_module.linear, dtype, x, layer, activation)


@needs_triton
@both_biases
@pytest.mark.parametrize("R", [1, 5])
def test_each_half_of_a_gated_layer_has_its_own_bias(R, bias):
    torch.manual_seed(R)
    (layer,) = randomised(nn.Linear(70, 2 * 40, bias=bias))
    operators = (
        partial(f, activation="silu", gated=True) for f in (linear.linear, model_module.linear)
    )
    check_operator(*operators, torch.float32, torch.randn(R, 70), layer)


@needs_triton
@pytest.mark.parametrize("limit", [0, 10**9])
def test_many_rows_with_few_weights_and_with_many(limit, monkeypatch):
    """Each has tiles of its own."""
    monkeypatch.setattr(linear, "SMALL_WEIGHT", limit)
    test_linear_layers_with_their_activations(130, 65, 48, "gelu_new", torch.float32, True)


@needs_triton
@both_biases
@all_floats
@pytest.mark.parametrize(
    ("R", "N", "K", "parts"), [(1, 48, 100, 1), (3, 40, 1600, 4), (20, 130, 800, 2), (2, 48, 0, 0)]
)
def test_the_sum_of_x_and_a_layer_and_the_norm_after_it(R, N, K, parts, dtype, bias):
    """
    A part of the sum that is left out or added twice, its bias in each part, an x that does not
    grow, a norm of what x was before, or with another epsilon. Without parts nothing is added.
    """
    torch.manual_seed(R)
    norm = nn.LayerNorm(N, eps=0.5, bias=bias)
    modules = randomised(nn.Linear(max(K, 1), N, bias=bias), norm)
    x = torch.randn(R, max(K, 1))
    before = 3 * torch.randn(R, N) + 1

    def operator(linear, add_norm, parts: int):
        def add(x, before, layer, norm):
            delta = linear(x, layer, partial_sums=True) if parts else None
            assert parts < 2 or len(delta) == parts  # else the parts are not tested
            return torch.stack(add_norm(before, delta, norm))

        return add

    ours = operator(linear.launch_linear, linear.norm_now, parts)
    reference = operator(model_module.linear, model_module.add_norm, min(parts, 1))
    check_operator(ours, reference, dtype, x, before, *modules)


@needs_triton
@torch.no_grad()
@pytest.mark.parametrize(("gated", "activation"), [(False, None), (True, "silu")])
@pytest.mark.parametrize("kind", [nn.LayerNorm, model_module.RMSNorm])
@pytest.mark.parametrize("K", [20, 64])
def test_one_row_is_normalised_by_the_product_that_reads_it(K, kind, gated, activation):
    """
    A sum that is stored by no program or before it is whole, a norm of the row without what is
    added; and if the row itself is taken, not a product of it, it is normalised.
    """
    torch.manual_seed(K)
    norm, layer = randomised(kind(K, eps=1e-3), nn.Linear(K, 48))
    x = torch.randn(1, K)
    delta = torch.randn(2, 1, K)
    total = x + delta.sum(0)
    normalised = norm(total)
    exact = model_module.linear(normalised, layer, activation, gated)
    x, delta, norm, layer = (each.to(DEVICE) for each in (x, delta, norm, layer))
    added, y = linear.add_norm(x, delta, norm)
    assert isinstance(y, linear.LazyNorm)
    for _ in range(2):  # the second time the sum had been added again
        assert (y[:].cpu() - normalised).abs().max() < 1e-5
    out = linear.linear(y, layer, activation, gated)
    assert (added.cpu() - total).abs().max() < 1e-6
    assert (out.cpu() - exact).abs().max() < 1e-5 * exact.abs().max()


@needs_triton
def test_a_row_too_wide_for_a_program_is_normalised_at_once():
    wide = torch.zeros(1, linear.NORMED_ROW + 1, device=DEVICE)
    norm = nn.LayerNorm(wide.shape[1], device=DEVICE)
    assert isinstance(linear.add_norm(wide, wide.clone(), norm)[1], Tensor)


@needs_triton
def test_embeddings_of_tokens_and_positions():
    """A token's position taken for the token, a row of the neighbour."""
    tokens = torch.tensor([49, 0, 7, 7, 3])
    positions = torch.tensor([8, 2, 1, 0, 5])
    arguments = (tokens, positions, nn.Embedding(50, 24), nn.Embedding(9, 24), 1.0)
    check_operator(fused.embed, model_module.embed, torch.float32, *arguments, slack=0)


def project(project_qkv, attention: Attention, x: Tensor, slots: Tensor, kv: Tensor) -> Tensor:
    """q [R, H, D]; K and V are stored in kv."""
    ops = choose_ops("torch")[0]
    batch = SimpleNamespace(slot_mapping=slots.to(x.device), rotations={}, ops=ops)
    store_rows = gather.pool_rows(batch.slot_mapping[:, None], kv).flatten()
    batch.prepared = {0: gather.GatherPlan(store_rows, [])}
    q, _ = project_qkv(x, attention.to(x.device), kv, batch)
    return q.view(len(x), attention.H, attention.D)


@needs_triton
@pytest.mark.parametrize(("H", "Hk", "D"), [(4, 4, 16), (6, 2, 24), (1, 1, 40)])
@pytest.mark.parametrize("R", [1, 5, 70])
def test_queries_are_returned_and_keys_and_values_stored(R, H, Hk, D):
    """
    Heads of K taken for those of V or q, a slot of another row, tokens beyond the last that write
    to slot 0.
    """
    torch.manual_seed(R)
    config = GPTConfig(vocab_size=8, n_layer=1, n_head=H, n_kv_head=Hk, n_embd=H * D)
    attention = Attention(config, 0).requires_grad_(False)
    x = torch.randn(R, H * D)
    slots = torch.randperm(20 * 8)[:R]
    expected = torch.full((2, 21, Hk, 8, D), 7.0)
    kv = expected.to(DEVICE, copy=True)
    exact = project(model_module.project_qkv, attention, x, slots, expected)
    q = project(fused.project_qkv, attention, x.to(DEVICE), slots, kv)
    assert torch.allclose(q.cpu(), exact, atol=1e-5)
    assert torch.allclose(kv.cpu(), expected, atol=1e-5)
    assert torch.equal(kv.cpu() == 7, expected == 7)


@forks
@needs_triton
@pytest.mark.parametrize("R", [1, 3])
def test_keys_and_values_are_stored_beyond_2_to_the_31(R):
    """As above: a product of slots and sizes in int32. Three blocks of the pool are touched."""
    in_a_child(store_beyond_2_to_the_31, R)


def store_beyond_2_to_the_31(R: int):
    attention = Attention(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=16), 0)
    attention = attention.half().requires_grad_(False)
    x = torch.randn(R, 16, dtype=torch.float16).to(DEVICE)
    stored = []
    for first in 2**31 // 256, 0:
        kv = x.new_empty(2, first + 3, 1, 16, 16)
        slots = 16 * (first + torch.arange(R)) + 5
        project(fused.project_qkv, attention, x, slots, kv)
        stored.append(kv[:, first : first + R, :, 5])
    assert torch.equal(*stored)
    assert stored[0].abs().sum() > 0


FEW = linear.FEW_ROWS
MANY = linear.LINEAR_ROWS + 1
HALF = torch.float16
LARGE = 2**14  # a layer with as many inputs and outputs has more products than are ours
# rows, inputs and outputs, activation, bias
LAYER_WAYS = {
    (1, 8, None, True): "ours None",
    (MANY - 1, 8, "gelu_new", True): "ours gelu_new",
    (MANY, 8, "gelu_new", True): "cuBLAS with GELU",
    (MANY, 8, "gelu_new", False): "torch gelu_new",
    (MANY, 8, "gelu", True): "torch gelu",
    (MANY, 8, None, True): "torch None",
    (FEW, LARGE, None, False): "ours None",
    (FEW + 1, LARGE, None, False): "torch None",
}
HEAD_WAYS = {
    (1, 8, torch.float32): "ours head",
    (2, 8, torch.float32): "cuBLAS",
    (FEW, 8, HALF): "ours head",
    (FEW + 1, 8, HALF): "cuBLAS",
    (MANY, 9, HALF): "ours head",
}


def test_which_products_are_ours_on_a_gpu(monkeypatch):
    """
    Few rows, where launches cost most, and the head in 16 bits or of one row; all else is cuBLAS's.
    Would catch: a limit off by one, a bias or an activation that is lost on one of the ways.
    """

    def launch(x, layer, activation=None, gated=False, partial_sums=False, is_head=False):
        assert is_head or partial_sums
        return "ours head" if is_head else f"ours {activation}"

    def gelu(bias, x, weight, use_gelu: bool):
        assert use_gelu
        assert len(bias) == 8
        return "cuBLAS with GELU"

    monkeypatch.setattr(linear, "launch_linear", launch)
    monkeypatch.setattr(torch, "_addmm_activation", gelu)
    monkeypatch.setattr(model_module, "linear", lambda x, layer, name: f"torch {name}")
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: "cuBLAS")
    for case, way in LAYER_WAYS.items():
        R, N, activation, bias = case
        layer = nn.Linear(N, N, bias=bias, device="meta")
        x = torch.empty(R, N, device="meta")
        assert linear.linear(x, layer, activation, partial_sums=True) == way, case
    for case, way in HEAD_WAYS.items():
        R, N, dtype = case
        layer = nn.Linear(N, N, bias=False, dtype=dtype, device="meta")
        x = torch.empty(R, N, dtype=dtype, device="meta")
        assert linear.head(x, layer) == way, case


@pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("is_head", [False, True])
@pytest.mark.parametrize("R", [1, 8, 40])
def test_nothing_is_read_behind_the_weights(R, is_head):
    """
    Outputs or inputs that are no multiple of a tile, as GPT-2's 50,257 words. interpreting.Memory
    holds the kernels to it. Would catch: an illegal access on a GPU.
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
    """Would catch: an interpreter that reads what lies beside a tensor."""
    numbers = torch.arange(12.0)[4:9]
    ends = pytest.raises(Exception, match="outside") if read in (-1, 5) else nullcontext()
    with ends:
        copy_one[(1,)](numbers, torch.zeros(1), read)


def test_keys_and_values_of_a_cpu_are_fp32():
    """One query at a time in bf16 is slow there; on a GPU they are as the model's weights."""
    for device, expected in ("cpu", torch.float32), ("meta", torch.bfloat16):
        wte = nn.Embedding(1, 1, device=device, dtype=torch.bfloat16)
        assert engine_device.kv_dtype(SimpleNamespace(wte=wte)) == expected


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: cuBLAS, and when it is chosen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("R", [1, 256, 257, 600])
@pytest.mark.parametrize("activation", [None, "gelu_new", "gelu"])
def test_on_a_gpu_linear_layers_of_any_size_are_right(activation, R, dtype):
    """A long prompt takes other ways than a decode."""
    torch.manual_seed(R)
    x = torch.randn(R, 48)

    def operator(table):
        def apply(x, layer, norm):
            y = table.linear(x, layer, activation)
            _, normalised = table.add_norm(y.clone(), y, norm)
            return torch.stack([y, normalised[:]])

        return apply

    # The tanh that cuBLAS computes as it stores a product is off by 2.2e-5, whatever the dtype. A
    # share of the largest number, about 4.
    slack = 2.5e-5 if activation == "gelu_new" and R > linear.LINEAR_ROWS else 2.5e-7
    arguments = (x, nn.Linear(48, 72), nn.LayerNorm(72))
    check_operator(operator(linear), operator(model_module), dtype, *arguments, slack=slack)


@needs_triton
@pytest.mark.parametrize(
    ("chip", "stages"),
    [(101_376, [2, 1, 1]), (166_912, [3, 2, 1]), (232_448, [3, 3, 2])],
    ids=["L4", "A100", "H200"],
)
def test_tiles_fit_into_the_shared_memory(chip, stages, monkeypatch):
    """
    Tuned on an H200, the six stages of a layer of GPT-2 were too large for an L4, and heads of 256
    in fp32 for an H200 itself.
    """
    kernel = MagicMock()
    monkeypatch.setattr(kernels, "shared_memory", lambda device: chip)
    monkeypatch.setattr(linear, "shared_memory", lambda device: chip)
    monkeypatch.setattr(linear, "matrix_kernel", kernel)
    for dtype in torch.bfloat16, torch.float32:
        for N in 768, 3072, 50257:
            layer = nn.Linear(768, N, bias=False, dtype=dtype, device="meta")
            for R in 2, 17, 33, 64, 65, 128, 129, 256:
                x = torch.empty(R, 768, dtype=dtype, device="meta")
                linear.launch_linear(x, layer, is_head=N == 50257)
                options = kernel.__getitem__.return_value.call_args.kwargs
                tile = (options["ROWS"] + options["COLS"]) * options["BLOCK"] * dtype.itemsize
                assert 1 <= options["num_stages"] <= chip // tile
    pools = [torch.empty(2, 1, 1, 16, D) for D in (64, 128, 256)]
    assert [kernels.stages_that_fit(pool) for pool in pools] == stages  # as compiled


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter compiles nothing")
def test_nothing_compiles_after_the_first_steps():
    """
    A kernel that is compiled for each width of the block tables, or number of rows, stops a server
    for seconds.
    """
    first = [[5], [17, 40], [300], [31, 2, 900]]
    later = [[6], [1999], [170, 41], [32, 200, 700], [1]]
    counts = []
    for steps in first, later:
        for contexts in steps:
            check_attention(Shape(contexts, D=64, dtype=torch.bfloat16), "triton")
        compiled = kernels.decode_kernel.device_caches[torch.cuda.current_device()][0]
        counts.append(len(compiled))
    assert counts[0] == counts[1]


# --------------------------------------------------------------------------------------------------
# Memory of the torch path


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=40))
def test_length_classes_at_most_double_the_memory(lens):
    """
    Padding all to the longest, one context of 4,096 among 31 short ones takes 30 times the memory
    it needs.
    """
    groups = gather.length_classes(lens)
    assert sorted(i for group in groups for i in group) == list(range(len(lens)))
    memory = [len(group) * max(lens[i] for i in group) for group in groups]
    assert sum(memory) <= 2 * sum(lens)
    assert len(groups) <= max(lens).bit_length()


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        # the long decode, the short ones together, the chunk: no row of K or V too many
        (Shape([4096] + [10] * 31, [(64, 200)]), [4096, 10, 200]),
        # one SDPA for each decode would cost more than the attention itself
        (Shape([*range(500, 532)]), [531]),
        # decodes of any length pad each other to the window, not to the longest of them
        (Shape([4096, 700, 40, 20], window=32), [32]),
    ],
    ids=str,
)
def test_requests_of_similar_length_are_one_gather(shape, widths):
    step = Step(replace(shape, Hk=2, D=16), "torch")
    gathers = step.batch.prepared[shape.window].calls
    assert [call.kv_rows.shape[-1] for call in gathers] == widths
    assert sum(call.kv_rows.shape[1] for call in gathers) == len(shape.requests)


# --------------------------------------------------------------------------------------------------
# The pool, and examples


def test_copies_read_all_sources_before_they_write():
    """Block by block, a chain of copies 0 -> 1 -> 2 would put block 0 everywhere."""
    pool = KVBlockPool(4, 2, n_layer=2, n_head=3, head_size=5)
    torch.nn.init.normal_(pool.kv)
    before = pool.kv.clone()
    pool.copy_blocks([1, 2, 0], [0, 1, 2])
    assert torch.equal(pool.kv, before[:, :, [2, 0, 1, 3, 4]])


@pytest.mark.parametrize("module", [gather, inputs, paged, sizing])
def test_examples_in_docstrings_are_true(module):
    """An example that is wrong teaches the wrong thing."""
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
    By Triton's compiler, which needs no GPU; and without its warning that a later one will not fuse
    by itself.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error:TRITON_DEFAULT", "-c", COMPILE]
    subprocess.run(command, cwd=Path(__file__).parents[2], env=env, check=True)
