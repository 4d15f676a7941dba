"""
store_kv and paged_attention against an fp64 reference that walks the block tables token by token.

Block tables are permuted, lengths odd, and every slot that belongs to no request (the sink, the
tails of last blocks, the blocks that pad the tables, what lies before a window) is NaN: if it is
read, there is NaN in the output. FlexAttention reads whole tiles and weighs what is masked by zero,
so for it such slots hold large numbers. A backend's error may be at most twice that of plain torch
attention in the same dtype, or what rounding explains. A new backend is one more name in BACKENDS.
"""

import ctypes
import doctest
import multiprocessing
from collections import defaultdict
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import model as model_module
import paged
from engine import runner, sizing
from kernels import Batch
from model import ACTIVATIONS, Attention, GPTConfig
from ops import flex, fused, gather, inputs, linear, sampling, sampling_kernels
from ops.choice import choose_ops
from paged import KVBlockPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch"]
if DEVICE == "cpu":
    BACKENDS.append("cpu")
if kernels.triton:  # on a CPU in Triton's interpreter: see conftest.py
    BACKENDS.append("triton")
GARBAGE = {"flex": 1e4}  # what slots hold that belong to no request, NaN by default


# --------------------------------------------------------------------------------------------------
# A step with made-up requests


@dataclass
class Shape:
    """
    Requests as (new tokens, context length after the step); the first num_decodes of them have one
    new token.
    """

    requests: list[tuple[int, int]]
    num_decodes: int = 0
    H: int = 4
    Hk: int = 4
    D: int = 32
    S: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0  # tokens that each sees, itself included; 0: all before it

    def __str__(self):
        heads = f"H{self.H}-Hk{self.Hk}-D{self.D}-S{self.S}-W{self.window}"
        return f"{heads}-{str(self.dtype)[6:]}-{len(self.requests)}requests"

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) if self.window else 0


class Step:
    """
    Tensors of a step: q [T, H, D], new k and v [T, Hk, D], one layer's pool kv, and the batch.
    """

    def __init__(self, shape: Shape, backend: str, seed: int = 0):
        self.shape, S, D = shape, shape.S, shape.D
        g = torch.Generator().manual_seed(seed)
        blocks_of = [-(-context // S) for _, context in shape.requests]
        num_blocks, M = sum(blocks_of) + 3, max(blocks_of) + 2
        ids = torch.randperm(num_blocks, generator=g).tolist()
        tables = [[ids.pop() for _ in range(n)] for n in blocks_of]  # three blocks are in no table
        self.tables = tables
        known = []  # what the device has; blocks that were left are the sink, or in use again
        for (n, context), table in zip(shape.requests, tables, strict=True):
            left = shape.first_seen(context - n) // S
            known.append(([num_blocks, table[-1]] * left)[:left] + table[left:])
        T = sum(n for n, _ in shape.requests)
        heads = torch.randn(T, shape.H + 2 * shape.Hk, D, generator=g).to(shape.dtype)
        self.q, self.k, self.v = heads.split(
            (shape.H, shape.Hk, shape.Hk), dim=1
        )  # views, as the model has them
        self.kv = torch.full(
            (2, num_blocks + 1, shape.Hk, S, D), GARBAGE.get(backend, torch.nan), dtype=shape.dtype
        )
        positions = [p for n, context in shape.requests for p in range(context - n, context)]
        owners = [i for i, (n, _) in enumerate(shape.requests) for _ in range(n)]
        self.slots = [tables[i][p // S] * S + p % S for i, p in zip(owners, positions, strict=True)]
        for (n, context), table in zip(shape.requests, tables, strict=True):
            for p in range(
                shape.first_seen(context - n), context - n
            ):  # what earlier steps have cached
                self.kv[:, table[p // S], :, p % S] = torch.randn(2, shape.Hk, D, generator=g).to(
                    shape.dtype
                )
        query_lens = [n for n, _ in shape.requests]
        context_lens = [context for _, context in shape.requests]
        self.batch = Batch(
            tokens=torch.zeros(T, dtype=torch.int64),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(self.slots),
            query_start=F.pad(torch.tensor(query_lens).cumsum(0), (1, 0)).int(),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [t + ids[:1] * (M - len(t)) for t in known], dtype=torch.int32
            ),
            logits_index=torch.zeros(0, dtype=torch.int64),
            num_decodes=shape.num_decodes,
            query_lens_host=query_lens,
            context_lens_host=context_lens,
            ops=choose_ops(backend, DEVICE)[0],
        )
        for name, value in vars(self.batch).items():
            if isinstance(value, torch.Tensor):
                setattr(self.batch, name, value.to(DEVICE))
        self.attn = SimpleNamespace(window=shape.window, scale=D**-0.5, softcap=0.0)
        self.prepare(self.kv.to(DEVICE))

    def prepare(self, kv: torch.Tensor):
        prepared = self.batch.ops.prepare(self.batch, self.shape.H, kv, self.shape.window)
        self.batch.prepared = {self.shape.window: prepared}

    def store(self):
        kv = self.kv.to(DEVICE)
        self.batch.ops.store_kv(self.k.to(DEVICE), self.v.to(DEVICE), kv, self.batch)
        self.kv = kv.cpu()

    def attend(self) -> torch.Tensor:
        q, kv = self.q.to(DEVICE), self.kv.to(DEVICE)
        return self.batch.ops.attend(q, kv, self.attn, self.batch).cpu()

    def run(self) -> torch.Tensor:
        self.store()
        return self.attend()

    def context(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of request i, slot by slot: [C, Hk, D] each."""
        S, (_, context) = self.shape.S, self.shape.requests[i]
        both = torch.stack(
            [self.kv[:, self.tables[i][p // S], :, p % S] for p in range(context)]
        )  # [C, 2, Hk, D]
        return both[:, 0], both[:, 1]

    def reference(self) -> tuple[torch.Tensor, float]:
        """
        softmax(q k / sqrt(D)) v in fp64, one request, one query and one head at a time; and the
        largest error that fp32 can make of it, in whatever order it is computed (see `rounding`).
        """
        shape, out, t = self.shape, torch.empty(self.q.shape, dtype=torch.float64), 0
        allowed = 0.0
        for i, (n, context) in enumerate(shape.requests):
            k, v = (x.double() for x in self.context(i))
            for position in range(context - n, context):
                seen = slice(shape.first_seen(position), position + 1)
                for h in range(shape.H):
                    mine = h // (shape.H // shape.Hk)
                    q, keys, values = self.q[t, h].double(), k[seen, mine], v[seen, mine]
                    weights = (keys @ q / shape.D**0.5).softmax(0)
                    out[t, h] = weights @ values
                    allowed = max(allowed, rounding(q, keys, values, weights))
                t += 1
        return out, allowed

    def plain_torch(self) -> torch.Tensor:
        """The same in the dtype at hand, by torch's own attention on contiguous K and V."""
        shape, out, t = self.shape, torch.empty_like(self.q), 0
        for i, (n, context) in enumerate(shape.requests):
            first = shape.first_seen(context - n)
            k, v = (
                x[first:].transpose(0, 1).repeat_interleave(shape.H // shape.Hk, 0)[None]
                for x in self.context(i)
            )
            positions, keys = (
                torch.arange(context - n, context)[:, None],
                torch.arange(first, context),
            )
            mask = (keys <= positions) & (keys > positions - (shape.window or context))
            q = self.q[t : t + n].transpose(0, 1)[None]  # [1, H, n, D]
            y = F.scaled_dot_product_attention(
                *(x.to(DEVICE) for x in (q, k, v)), attn_mask=mask.to(DEVICE)
            )
            out[t : t + n] = y[0].transpose(0, 1).cpu()
            t += n
        return out


U = 2.0**-24  # what rounding to fp32 changes a number by at most, as a share of it
EXP = 40 * U  # the same of the fastest exp in use: SLEEF's exp_u20, 20 units in the last place


def rounding(q, k, v, weights) -> float:
    """
    How far fp32 may be off for a query q [D] that sees k and v [C, D] with these weights [C]. A sum
    of n products, in any order, is off by at most n U times the sum of their magnitudes (Higham,
    Accuracy and Stability of Numerical Algorithms, 3.1), to first order in U:

    a score is a sum of D products, times the scale: D + 2 roundings, the scale's own included;
    a weight is exp(score - largest): that difference is rounded, and exp errs itself. What the
    score is off by is the share that its weight is off by;
    the result is a weighted sum over the sum of weights: two sums of C, each rescaled at most C
    times by an online softmax. Both have the weights' errors.
    """
    C, D = k.shape
    scores = k @ q / D**0.5
    score_errors = (D + 2) * U * (k.abs() @ q.abs()) / D**0.5
    differences = scores.max() - scores
    weight_errors = score_errors + U * differences + EXP
    share = 2 * weight_errors.max() + 2 * (2 * C + 1) * U
    return (share * (weights @ v.abs()).max()).item()


def check_attention(shape: Shape, backend: str, seed: int = 0):
    """
    At most twice the error of plain torch in the same dtype, or what fp32, in which every backend
    adds up, may be off by. In fp32 plain torch's own error is a matter of luck where outputs are
    few: of 80 numbers it was 9.9e-8 on a CPU with AVX2, and ours 3.2e-7.
    """
    step = Step(shape, backend, seed)
    out = step.run()
    assert out.dtype == shape.dtype and out.shape == step.q.shape
    reference, allowed = step.reference()
    assert reference.isfinite().all()
    error = (out.double() - reference).abs().max().item()
    own = (step.plain_torch().double() - reference).abs().max().item()
    why = f"error {error:.2e}, plain torch has {own:.2e}, rounding explains {allowed:.2e}"
    assert error <= max(2 * own, allowed), why  # NaN fails


ODD = [1, 15, 16, 17, 339, 799]
DECODES = Shape([(1, context) for context in ODD], num_decodes=6)
PROMPTS = Shape([(n, n) for n in (1, 15, 16, 17, 339)])
MIXED = Shape(
    [(1, 1), (1, 16), (1, 339), (1, 17), (1, 1), (7, 7), (16, 48), (33, 100), (1, 20)],
    num_decodes=4,
)
SKEWED = Shape([(1, 799), *[(1, 1 + i) for i in range(15)], (5, 30)], num_decodes=16)


def variants() -> list[Shape]:
    """
    Every block size, head size, grouping and dtype at least once, each with decodes, prompts and
    mixtures.
    """
    shapes = []
    for S in 1, 2, 3, 7, 16, 24, 100, 128:
        shapes += [Shape(MIXED.requests, 4, S=S), Shape(DECODES.requests, 6, S=S)]
    for D in 16, 64, 80, 96, 128:
        shapes.append(Shape(MIXED.requests, 4, D=D))
    for H, Hk in (6, 2), (4, 1), (1, 1), (12, 12):
        shapes += [
            Shape(MIXED.requests, 4, H=H, Hk=Hk, S=5),
            Shape(PROMPTS.requests, H=H, Hk=Hk, S=16),
        ]
    for window in 1, 5, 16, 100:
        shapes += [
            Shape(MIXED.requests, 4, window=window, S=8),
            Shape(DECODES.requests, 6, H=6, Hk=2, window=window),
        ]
    for dtype in torch.bfloat16, torch.float16, torch.float32:
        for base in DECODES, PROMPTS, MIXED, SKEWED:
            shapes.append(Shape(base.requests, base.num_decodes, H=4, Hk=2, D=64, dtype=dtype))
    return shapes


def cases() -> list[tuple[Shape, str]]:
    """
    Every shape with every backend; but the interpreter takes a second for each, and has no bf16 dot
    product.
    """
    all_cases = [(shape, backend) for backend in BACKENDS for shape in variants()]
    if DEVICE == "cpu":
        few = [shape for shape in variants() if shape.dtype != torch.bfloat16][1::3]
        all_cases = [
            (shape, backend) for shape, backend in all_cases if backend == "torch" or shape in few
        ]
    return all_cases


@pytest.mark.parametrize(("shape", "backend"), cases(), ids=str)
def test_attention_through_permuted_block_tables(shape, backend):
    """
    Mask flipped or off by one, wrong block, wrong head of a group, stale slot read, requests or
    heads mixed up.
    """
    check_attention(shape, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_prompt_of_799_tokens_and_the_last_part_of_one(backend):
    """
    A chunk whose first query is not at position 0 sees what was cached before it, and no more.
    """
    check_attention(Shape([(799, 799), (100, 799)], H=2, Hk=1, D=16), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_any_mixture(backend):
    """What the list above does not think of."""

    @settings(
        max_examples=40 if backend == "torch" or DEVICE == "cuda" else 8,
        derandomize=True,
        deadline=None,
    )
    @given(st.data())
    def any_mixture(data):
        check_attention_of(data, backend)

    any_mixture()


def check_attention_of(data, backend: str):
    decodes = data.draw(st.lists(st.integers(1, 70).map(lambda context: (1, context)), max_size=6))
    chunk = st.tuples(st.integers(1, 20), st.integers(0, 40)).map(lambda nc: (nc[0], sum(nc)))
    chunks = data.draw(st.lists(chunk, min_size=0 if decodes else 1, max_size=3))
    Hk = data.draw(st.integers(1, 3))
    H, D, S = (
        Hk * data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([16, 24, 80])),
        data.draw(st.integers(1, 20)),
    )
    window = data.draw(st.sampled_from([0, 0, 1, 7, 30]))
    check_attention(
        Shape(decodes + chunks, len(decodes), H, Hk, D, S, window=window), backend, seed=S
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_of_another_dtype_than_the_model(backend):
    """
    K, V are kept in fp16 under an fp32 model: what comes out is fp32 again, within fp16's rounding.
    """
    step = Step(Shape(MIXED.requests, 4), backend)
    exact = step.run()
    step.kv = step.kv.half()
    step.prepare(step.kv.to(DEVICE))
    out = step.run()
    assert out.dtype == torch.float32
    assert 0 < (out - exact).abs().max() < 0.005


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("S", [1, 5, 16])
def test_store_writes_the_addressed_slots_and_no_other_byte(backend, dtype, S):
    """
    V written into the K cache, a head's row into its neighbour, or one slot too far: into another
    request's text.
    """
    step = Step(Shape(MIXED.requests, 4, H=6, Hk=3, S=S, dtype=dtype), backend)
    as_bits = torch.int32 if dtype == torch.float32 else torch.int16
    step.kv = torch.randn(step.kv.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = step.kv.clone()
    for t, slot in enumerate(step.slots):
        wanted[0, slot // S, :, slot % S] = step.k[t]
        wanted[1, slot // S, :, slot % S] = step.v[t]
    step.store()
    assert torch.equal(step.kv.view(as_bits), wanted.view(as_bits))


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_only_reads_the_pool(backend):
    """Written in one layer, it would be wrong in the next step."""
    step = Step(Shape(MIXED.requests, 4), backend)
    step.run()
    before, kv = step.kv, step.kv.to(DEVICE, copy=True)
    step.batch.ops.attend(step.q.to(DEVICE), kv, step.attn, step.batch)
    assert torch.equal(kv.cpu().view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_rows_get_zeros_and_leave_the_others_alone(backend):
    """
    The padding of a CUDA graph: no context, K and V into the sink. A division by its sum of
    weights, 0, is NaN.
    """
    step = Step(Shape([(1, 33), (1, 1), (1, 70), (1, 1)], num_decodes=4), backend)
    wanted, batch, sink = step.run(), step.batch, step.kv.shape[1] - 1
    step = Step(step.shape, backend)
    batch, padding = step.batch, [1, 3]
    batch.context_lens[padding], batch.block_tables[padding] = 0, sink
    batch.slot_mapping[padding] = sink * step.shape.S
    batch.context_lens_host = batch.context_lens.tolist()
    step.prepare(step.kv.to(DEVICE))
    out = step.run()
    assert (out[[0, 2]] - wanted[[0, 2]]).abs().max() < 1e-6
    assert torch.equal(out[padding], torch.zeros_like(out[padding]))
    one, other = (
        torch.stack([step.k[row], step.v[row]]) for row in padding
    )  # into one slot, at the same time
    written = step.kv[:, sink, :, 0]
    assert ((written == one) | (written == other)).all()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name == "triton"])
def test_one_preparation_serves_all_lengths(backend):
    """
    A captured graph replays the launches of its capture: nothing of them may hang on a length. One
    that changes on the device, as there, from 799 tokens to 1 or from one split to many, must be
    right.
    """
    shape = Shape([(1, 799), (1, 40), (1, 650)], num_decodes=3, H=2, Hk=1)
    step = Step(shape, backend)
    step.store()
    for lens in [799, 40, 650], [1, 3, 2], [17, 40, 640], [799, 1, 64]:
        step.batch.context_lens[:] = torch.tensor(lens)  # shorter texts in the same blocks
        step.shape = Shape([(1, n) for n in lens], 3, H=2, Hk=1)
        reference, allowed = step.reference()
        assert (step.attend().double() - reference).abs().max() <= allowed


def in_a_child(check, *arguments):
    """
    On a CPU an address that overflowed is a SIGSEGV: in a process of its own, so that pytest lives
    to say whose it was. On a GPU it is an exception (and CUDA does not outlive a fork).
    """
    if DEVICE == "cuda":
        return check(*arguments)
    child = multiprocessing.get_context("fork").Process(target=check, args=arguments, daemon=True)
    child.start()
    child.join(300)
    assert child.exitcode == 0, (
        f"{check.__name__} ended with exit code {child.exitcode} (-11: a wild address)"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_2_to_the_31(backend):
    """
    Block ids are int32, and so is their product with the size of a block unless it is cast: K and V
    of another request, or a crash. The pool is virtual memory of which a few blocks are touched.
    """
    in_a_child(attend_beyond_2_to_the_31, backend)


def attend_beyond_2_to_the_31(backend: str):
    shape = Shape([(1, 18), (2, 20)], num_decodes=1, H=2, Hk=1, D=16, dtype=torch.float16)
    step = Step(shape, backend)
    wanted, far = step.run(), 2**31 // (16 * 16)
    moved = Step(shape, backend)
    kv = torch.empty(2, far + 16, 1, 16, 16, dtype=torch.float16, device=DEVICE)
    kv[:, far : far + moved.kv.shape[1]] = moved.kv.to(DEVICE)
    moved.batch.block_tables += far
    moved.batch.slot_mapping += far * 16
    moved.prepare(kv)
    moved.batch.ops.store_kv(moved.k.to(DEVICE), moved.v.to(DEVICE), kv, moved.batch)
    out = moved.batch.ops.attend(moved.q.to(DEVICE), kv, moved.attn, moved.batch)
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.skipif("triton" not in BACKENDS, reason="triton is not installed")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, kv: (q, kv.transpose(2, 3)), "the pool of a layer must be contiguous"),
        (lambda q, kv: (q.transpose(0, 1), kv), "wanted the heads of a token together"),
        (lambda q, kv: (q[..., :16], kv), "heads of 16 for a pool of heads of 32"),
        (lambda q, kv: (q, kv.double()), "the kernels compute in float32"),
        (lambda q, kv: (q.long(), kv), "wanted floating point"),
    ],
)
def test_the_launchers_check_what_their_kernels_assume(change, message):
    """As above, for what only Triton assumes."""
    step = Step(Shape(MIXED.requests, 4), "triton")
    with pytest.raises(AssertionError, match=message):
        q, kv = change(step.q.to(DEVICE), step.kv.to(DEVICE))
        step.batch.ops.attend(q, kv, step.attn, step.batch)


def test_the_choice_of_a_backend_has_a_reason(monkeypatch):
    """
    A typo, or a backend that is not there, must not fall back in silence. A GPU's sampler is
    Triton's: torch's is right there too, but waits for the device.
    """
    ops, reason = choose_ops("auto")
    assert ops.name == "cpu" and reason == "the fastest on a CPU"
    assert ops.sample is sampling.sample_torch
    assert choose_ops("flex")[1] == "as asked"
    with pytest.raises(ValueError, match="'trition' is unknown; on cpu there is auto, cpu, torch,"):
        choose_ops("trition")
    if kernels.triton:
        ops, reason = choose_ops("auto", "cuda:1")
        assert ops.name == "triton" and ops.prepare is kernels.prepare_triton
        assert reason == "the fastest on CUDA" and ops.sample is sampling_kernels.sample_triton
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ValueError, match="needs a CUDA device and the package triton; on cpu"):
        choose_ops("triton")
    monkeypatch.setattr(kernels, "triton", None)
    ops, reason = choose_ops("auto", "cuda")
    assert ops.name == "torch" and reason == "the package triton is not installed"
    assert ops.sample is sampling.sample_torch
    with pytest.raises(ValueError, match="'flex' needs triton on CUDA, a C"):
        choose_ops("flex", "cuda")


# --------------------------------------------------------------------------------------------------
# FlexAttention: the compiler takes 10 s for each kind of call, so that is for `make test-all`;
# without it takes one

FLEX = [
    Shape(MIXED.requests, 4, H=4, Hk=2),
    *[Shape(MIXED.requests, 4, H=6, Hk=3, S=S) for S in (1, 4, 7, 8, 24, 100, 128)],
    *[Shape(MIXED.requests, 4, S=16, window=window) for window in (1, 5, 31, 100)],
    Shape(DECODES.requests, 6, H=6, Hk=1, D=80),
    Shape([*PROMPTS.requests, (100, 799)], H=2, Hk=1, D=16),
    *[Shape(MIXED.requests, 4, D=64, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)],
]


FLEX_CALLS = [(shape, "eager") for shape in (DECODES, FLEX[0], FLEX[9])]
FLEX_CALLS += [
    pytest.param(shape, "inductor", marks=pytest.mark.slow) for shape in (DECODES, *FLEX)
]


@pytest.mark.parametrize(("shape", "compiler"), FLEX_CALLS, ids=str)
def test_flex_attention(shape, compiler, monkeypatch):
    """
    As for the other backends: wrong tile, mask off by one, heads or requests mixed up, a tile
    counted twice.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    monkeypatch.setattr(flex, "compiled_flex", cache(flex.compiled_flex.__wrapped__))
    torch._dynamo.reset()
    check_attention(shape, "flex")


@pytest.mark.parametrize("shape", FLEX, ids=str)
def test_what_flex_attention_is_to_see(shape):
    """
    The same without the compiler: for each token the mask shows the slots of its own text and no
    other, and each tile with such slots is listed once, as whole only if it needs no mask.
    """
    batch, S = (step := Step(shape, "flex")).batch, shape.S
    owners = [i for i, (n, _) in enumerate(shape.requests) for _ in range(n)]
    for call in batch.prepared[shape.window].calls:
        mask, (rows, tile), num_keys = call.mask, call.mask.BLOCK_SIZE, call.mask.seq_lengths[1]
        keys = torch.arange(num_keys, device=DEVICE)
        for t, b, query in zip(
            range(*call.tokens.indices(len(owners))), call.request, call.offset, strict=True
        ):
            position = batch.positions[t].item()
            for h in range(shape.Hk):
                entry, table = b * shape.Hk + h, step.tables[owners[t]]
                context = range(shape.first_seen(position), position + 1)
                expected = sorted((table[p // S] * shape.Hk + h) * S + p % S for p in context)
                assert mask.mask_mod(entry, 0, query, keys).nonzero()[:, 0].tolist() == expected
                row = entry, 0, query // rows
                some = mask.kv_indices[row][: mask.kv_num_blocks[row]].tolist()
                whole = mask.full_kv_indices[row][: mask.full_kv_num_blocks[row]].tolist()
                assert len({*some, *whole}) == len(some + whole), "a tile is listed twice"
                assert {key // tile for key in expected} <= {*some, *whole}, "a tile is left out"
                assert {
                    key for first in whole for key in range(first * tile, (first + 1) * tile)
                } <= {*expected}


@pytest.mark.slow
def test_flex_attention_compiles_once_and_copies_no_keys():
    """
    A compilation for each new number of requests is seconds in every step; a gather of K and V, or
    a repacked pool, is what paging is there to avoid.
    """
    torch._dynamo.reset()
    for seed, contexts in enumerate([(2000, 1999, 2000), (1990, 2000), (2000, 5, 1, 1800)]):
        step = Step(Shape([(1, n) for n in contexts], len(contexts), H=8, Hk=8, D=64), "flex", seed)
        step.kv = F.pad(
            step.kv, (0, 0, 0, 0, 0, 0, 0, 600 - step.kv.shape[1])
        )  # a pool keeps its size
        step.prepare(step.kv.to(DEVICE))
        step.run()
        if seed == 1:
            compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    kv, q = step.kv.to(DEVICE), step.q.to(DEVICE)
    assert peak_memory(lambda: step.batch.ops.attend(q, kv, step.attn, step.batch)) < kv.nbytes / 4


@pytest.mark.parametrize(("backend", "copies"), [("torch", True), ("triton", False)])
def test_the_memory_that_attention_takes(backend, copies):
    """The same for Triton; that torch gathers shows that the measure notices."""
    if backend not in BACKENDS:
        pytest.skip("triton is not installed")
    step = Step(Shape([(1, 3000), (1, 3001)], 2, H=8, Hk=8, D=64), backend)
    step.store()
    kv, q = step.kv.to(DEVICE), step.q.to(DEVICE)
    peak = peak_memory(lambda: step.batch.ops.attend(q, kv, step.attn, step.batch))
    assert (peak > kv.nbytes / 4) == copies


def peak_memory(work) -> int:
    """
    Bytes by which memory in use grows while `work` runs, at most: on CPUs, what is touched, not
    what is reserved.
    """
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's count of the memory that a process has touched")

    def in_use(name: str) -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split(name + ":")[1].split()[0])

    with suppress(AttributeError):  # not of glibc
        ctypes.CDLL(None).malloc_trim(0)  # or `work` would get what earlier tests have freed
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = in_use("VmRSS")
    work()
    return in_use("VmHWM") - before


# --------------------------------------------------------------------------------------------------
# What else a decode step launches: its inputs, and linear layers with what stands around them

needs_triton = pytest.mark.skipif("triton" not in BACKENDS, reason="triton is not installed")


@needs_triton
@pytest.mark.parametrize("at_once", [1, 100])
def test_decodes_are_right_whether_they_start_at_once_or_in_order(at_once, monkeypatch):
    """The longest first, where not all programs start at once; a small batch never had an order."""
    monkeypatch.setattr(kernels, "programs_at_once", lambda D: at_once)
    check_attention(Shape(SKEWED.requests, SKEWED.num_decodes, H=12, Hk=12), "triton")


@needs_triton
@pytest.mark.parametrize("n", [1, 3, 7])
def test_the_inputs_of_decodes_in_one_launch(n):
    """
    A position one off, or the neighbour's table, is another text; so is a new block that only this
    step knows of. The padding's row must stay as it is.
    """
    g, S, N, M = torch.Generator().manual_seed(0), 4, 8, 6
    last = torch.randint(50, (N + 1,), generator=g)
    lens = torch.randint(M * S, (N + 1,), generator=g)
    lens[N] = 0
    tables = torch.randint(100, (N + 1, M), generator=g, dtype=torch.int32)
    rows = torch.tensor([5, N, 0, 3, N, 7, 1][:n])
    blocks = tables[rows, lens[rows] // S].long()
    blocks[0] = 70
    blocks[3:4] = 71
    after = tables.clone()
    after[rows, lens[rows] // S] = blocks.int()
    results = []
    for module in inputs, fused:
        tensors = [x.clone().to(DEVICE) for x in (rows, blocks, last, lens, tables)]
        known_rows = inputs.KnownRows(*tensors[2:], None, S)
        results.append(module.decode_inputs(*tensors[:2], known_rows))
        new_lens, new_tables = tensors[3:]
        assert new_lens[N] == 0 and new_lens[5] == lens[5] + 1
        assert torch.equal(new_tables.cpu(), after)
    for name in results[0]._fields:
        assert torch.equal(*(getattr(result, name) for result in results)), name
    assert results[1].slot_mapping[0] == 70 * S + lens[5] % S
    assert results[1].block_tables[0].tolist() == after[5].tolist()


@needs_triton
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
)
@pytest.mark.parametrize(
    ("R", "N", "K", "activation"),
    [
        (1, 50, 130, "gelu_new"),
        (3, 96, 48, "gelu_new"),
        (33, 200, 64, "gelu_new"),
        (70, 65, 48, "gelu_new"),
    ]
    + [(17, 40, 96, activation) for activation in (None, *ACTIVATIONS)]
    + [(2, 8200, 24, None)],
)
def test_linear_layers_with_their_activations(R, N, K, activation, dtype):
    """Rows or columns beyond the last, a bias that is not there, a wrong GELU."""
    torch.manual_seed(R)
    for bias in True, False:
        layer, x = torch.nn.Linear(K, N, bias=bias), 3 * torch.randn(R, K) + 1
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)

        def apply(function, device, dtype, layer=layer, x=x):
            with torch.no_grad():
                return (
                    function(
                        x.to(device, dtype), deepcopy(layer).to(device, dtype), activation, False
                    )
                    .cpu()
                    .double()
                )

        exact, plain = (
            apply(model_module.linear, "cpu", torch.float64),
            apply(model_module.linear, "cpu", dtype),
        )
        error = (apply(linear.launch_linear, DEVICE, dtype) - exact).abs().max()
        assert error <= 2 * (plain - exact).abs().max() + 1e-6 * exact.abs().max()


@needs_triton
@pytest.mark.parametrize("limit", [0, 10**9])
def test_many_rows_with_few_weights_and_with_many(limit, monkeypatch):
    """Each has tiles of its own."""
    monkeypatch.setattr(linear, "SMALL_WEIGHT", limit)
    test_linear_layers_with_their_activations(130, 65, 48, "gelu_new", torch.float32)


@needs_triton
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
)
@pytest.mark.parametrize(
    ("R", "N", "K"), [(1, 48, 100), (3, 40, 1600), (20, 130, 800), (2, 48, None)]
)
def test_what_a_layer_adds_and_the_norm_after_it(R, N, K, dtype):
    """
    A part of the sum that is left out or added twice, its bias in each part, an x that does not
    grow, a norm of what x was before. K None: nothing is added.
    """
    torch.manual_seed(R)
    for bias in True, False:
        layer, norm = torch.nn.Linear(K or 1, N, bias=bias), torch.nn.LayerNorm(N, bias=bias)
        for parameter in [*layer.parameters(), *norm.parameters()]:
            torch.nn.init.normal_(parameter, std=0.5)
        x, before = torch.randn(R, K or 1), 3 * torch.randn(R, N) + 1

        def apply(linear, add_norm, device, dtype, both=(layer, norm), tensors=(x, before)):
            (layer, norm), (x, before) = (
                deepcopy(both),
                (t.to(device, dtype, copy=True) for t in tensors),
            )
            with torch.no_grad():
                delta = linear(x, layer.to(device, dtype), partial_sums=True) if K else None
                before, y = add_norm(before, delta, norm.to(device, dtype))
            return torch.stack([before, y]).cpu().double(), delta

        (exact, _), (plain, _) = (
            apply(model_module.linear, model_module.add_norm, "cpu", d)
            for d in (torch.float64, dtype)
        )
        found, delta = apply(linear.launch_linear, linear.norm_now, DEVICE, dtype)
        assert (found - exact).abs().max() <= 2 * (
            plain - exact
        ).abs().max() + 1e-6 * exact.abs().max()
        assert (
            R == 1 or not K or len(delta) == (4 if K == 1600 else 2)
        )  # else the parts are not tested


@needs_triton
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_a_norm_adds_the_epsilon_that_it_was_given(eps):
    """
    Rows of ordinary size are the same with any: 1e-6 for a model's own passed. These are so small
    that it decides, alone and after something is added, and one is all zeros.
    """
    x = torch.randn(4, 37, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-4], [3e-3], [0.1], [0]]
    )
    norm = torch.nn.LayerNorm(37, eps=eps).requires_grad_(False).to(DEVICE)
    for parts in 0, 1, 3:
        exact = F.layer_norm((parts + 1) * x.double(), (37,), eps=eps)
        delta = x.to(DEVICE).repeat(parts, 1, 1) if parts else None
        _, found = linear.norm_now(x.to(DEVICE, copy=True), delta, norm)
        assert (found.cpu() - exact).abs().max() < 2e-6 * max(1, exact.abs().max())


@needs_triton
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("K", [20, 64])
def test_one_row_is_normalised_by_the_product_that_reads_it(K, rms, gated):
    """
    A sum that is stored by no program or before it is whole, a norm of the row without what is
    added; and somebody who takes the row itself, not a product of it, gets it normalised.
    """
    torch.manual_seed(K)
    norm = model_module.RMSNorm(K, 1e-3) if rms else torch.nn.LayerNorm(K, eps=1e-3)
    layer = torch.nn.Linear(K, 48)
    for parameter in [*norm.parameters(), *layer.parameters()]:
        torch.nn.init.normal_(parameter)
    x, delta = torch.randn(1, K), torch.randn(2, 1, K)
    with torch.no_grad():
        total = x + delta.sum(0)
        wanted = model_module.linear(norm(total), layer, "silu" if gated else None, gated)
        norm, layer = norm.to(DEVICE), layer.to(DEVICE)
        found, y = linear.add_norm(x.to(DEVICE), delta.to(DEVICE), norm)
        assert isinstance(y, linear.LazyNorm)
        out = linear.linear(y, layer, "silu" if gated else None, gated)
        assert (found.cpu() - total).abs().max() < 1e-6
        assert (out.cpu() - wanted).abs().max() < 1e-5 * wanted.abs().max()
        _, y = linear.add_norm(x.to(DEVICE), delta.to(DEVICE), norm)
        for _ in range(2):  # the second time the sum had been added again
            assert (y[:].cpu() - norm.cpu()(total)).abs().max() < 1e-5
            norm.to(DEVICE)
    wide = torch.zeros(1, linear.NORMED_ROW + 1, device=DEVICE)
    norm = torch.nn.LayerNorm(wide.shape[1]).to(DEVICE)
    assert isinstance(linear.add_norm(wide, wide.clone(), norm)[1], torch.Tensor)


@needs_triton
def test_embeddings_of_tokens_and_positions():
    """A token's position taken for the token, a row of the neighbour."""
    wte, wpe = (torch.nn.Embedding(n, 24).requires_grad_(False) for n in (50, 9))
    tokens, positions = torch.tensor([49, 0, 7, 7, 3]), torch.tensor([8, 2, 1, 0, 5])
    there = (t.to(DEVICE) for t in (tokens, positions, deepcopy(wte), deepcopy(wpe)))
    wanted = model_module.embed(tokens, positions, wte, wpe, 1.0)
    assert torch.equal(fused.embed(*there, 1.0).cpu(), wanted)


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
    attention, x = Attention(config, 0).requires_grad_(False), torch.randn(R, H * D)
    slots, found = torch.randperm(20 * 8)[:R], []
    for device, project in ("cpu", model_module.project_qkv), (DEVICE, fused.project_qkv):
        kv = torch.full((2, 21, Hk, 8, D), 7.0, device=device)
        batch = SimpleNamespace(slot_mapping=slots.to(device), ops=choose_ops("torch")[0])
        batch.rotations = {}
        store_rows = gather.pool_rows(slots[:, None], kv).flatten()
        batch.prepared = {0: SimpleNamespace(store_rows=store_rows)}
        q, _ = project(x.to(device), deepcopy(attention).to(device), kv, batch)
        found.append((q.view(R, H, D).cpu(), kv.cpu()))
    for wanted, triton in zip(*found, strict=True):
        assert torch.allclose(wanted, triton, atol=1e-5)
    assert (found[1][1] == 7).sum() == kv.numel() - 2 * R * Hk * D


@needs_triton
@pytest.mark.parametrize("R", [1, 3])
def test_keys_and_values_are_stored_beyond_2_to_the_31(R):
    """As above: a product of slots and sizes in int32. Three blocks of the pool are touched."""
    in_a_child(store_beyond_2_to_the_31, R)


def store_beyond_2_to_the_31(R: int):
    attention, far = (
        Attention(GPTConfig(vocab_size=8, n_layer=1, n_head=1, n_embd=16), 0),
        2**31 // 256,
    )
    attention, x = (
        attention.to(DEVICE, torch.float16).requires_grad_(False),
        torch.randn(R, 16, dtype=torch.float16),
    )
    slots = 16 * (far + torch.arange(R)) + 5
    found = []
    for first in far, 0:
        kv = torch.empty(2, far + 3 if first else 3, 1, 16, 16, dtype=torch.float16, device=DEVICE)
        slot_mapping = (slots - 16 * (far - first)).to(DEVICE)
        batch = SimpleNamespace(slot_mapping=slot_mapping, rotations={})
        fused.project_qkv(x.to(DEVICE), attention, kv, batch)
        found.append(kv[:, first : first + R, :, 5].cpu())
    assert torch.equal(*found) and found[0].abs().sum() > 0


class Rows(SimpleNamespace):
    """Rows of a matrix, as far as the choice of a kernel looks at them."""

    def __len__(self):
        return self.rows

    def element_size(self):
        return self.bytes


def test_which_products_are_ours_on_a_gpu(monkeypatch):
    """
    Few rows, where launches cost most, and the head in 16 bits or of one row; all else is cuBLAS's.
    Would catch: a limit off by one, a bias or an activation that is lost on one of the ways.
    """
    monkeypatch.setattr(
        linear,
        "launch_linear",
        lambda x, layer, activation=None, gated=False, partial_sums=False, is_head=False: (
            f"ours {activation} {partial_sums} {is_head}"
        ),
    )
    monkeypatch.setattr(
        torch,
        "_addmm_activation",
        lambda bias, x, weight, use_gelu: f"cuBLAS {bias} gelu {use_gelu}",
    )
    monkeypatch.setattr(
        model_module, "linear", lambda x, layer, activation: f"torch {activation} {layer.bias}"
    )

    class Layer(SimpleNamespace):
        weight = torch.empty(8, 1)

        def __call__(self, x):
            return f"torch {self.bias}"

    class Large(Layer):
        weight = torch.empty(2**14, 2**14, device="meta")

    class Head(SimpleNamespace):
        def __call__(self, x):
            return "torch"

    few, many, gelu = linear.LINEAR_ROWS, linear.LINEAR_ROWS + 1, "gelu_new"
    for rows, size, bias, activation, wanted in (
        (1, 4, "b", None, "ours None True False"),
        (few, 4, "b", gelu, "ours gelu_new True False"),
        (many, 2, "b", gelu, "cuBLAS b gelu True"),
        (many, 2, None, gelu, "torch gelu_new None"),
        (many, 2, "b", "gelu", "torch gelu b"),
        (many, 2, "b", None, "torch None b"),
    ):
        x = Rows(rows=rows, bytes=size)
        found = linear.linear(x, Layer(bias=bias), activation, partial_sums=True)
        assert found == wanted, (rows, size, bias, activation)
    for rows, wanted in (linear.FEW_ROWS, "ours"), (linear.FEW_ROWS + 1, "torch"):
        assert linear.linear(Rows(rows=rows), Large(bias=None)).startswith(wanted), rows
    ours = "ours None False True"
    for rows, V, dtype, wanted in (
        (1, 8, torch.float32, ours),
        (2, 8, torch.float32, "torch"),
        (linear.FEW_ROWS, 8, torch.float16, ours),
        (linear.FEW_ROWS + 1, 8, torch.float16, "torch"),
        (many, 9, torch.float16, ours),
    ):
        head = Head(weight=torch.empty(V, 1, dtype=dtype))
        assert linear.head(Rows(rows=rows), head) == wanted, (rows, V, dtype)


def test_keys_and_values_of_a_cpu_are_fp32():
    """One query at a time in bf16 is slow there; on a GPU they are as the model's weights."""
    for device, expected in ("cpu", torch.float32), ("meta", torch.bfloat16):
        weight = torch.empty(1, device=device, dtype=torch.bfloat16)
        assert runner.kv_dtype(SimpleNamespace(wte=SimpleNamespace(weight=weight))) == expected


@pytest.mark.skipif(
    DEVICE == "cpu", reason="needs a GPU: cuBLAS and the choice between it and our kernels"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("R", [1, 256, 257, 600])
def test_on_a_gpu_linear_layers_of_any_size_are_right(R, dtype):
    """A long prompt takes other ways than a decode."""
    torch.manual_seed(R)
    layer, norm, x = torch.nn.Linear(48, 72), torch.nn.LayerNorm(72), torch.randn(R, 48)
    for activation in None, "gelu_new", "gelu":
        found = []
        for device, kind in ("cpu", torch.float64), ("cpu", dtype), (DEVICE, dtype):
            here, normed = deepcopy(layer).to(device, kind), deepcopy(norm).to(device, kind)
            with torch.no_grad():
                table = linear if device == DEVICE else model_module
                y = table.linear(x.to(device, kind), here, activation)
                _, norm_of_sum = table.add_norm(y.clone(), y, normed)
                found.append(torch.stack([y, norm_of_sum[:]]).double().cpu())
        exact, plain, ours = found
        # the tanh that cuBLAS computes as it stores a product is off by 2.2e-5, whatever the dtype
        off = 1e-4 if activation == "gelu_new" and R > linear.LINEAR_ROWS else 1e-6
        assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + off


@needs_triton
@pytest.mark.parametrize("chip", [101_376, 166_912, 232_448])  # an L4, an A100, an H200
def test_tiles_fit_into_the_shared_memory(chip, monkeypatch):
    """
    Tuned on an H200, the six stages of a layer of GPT-2 were too large for an L4, and heads of 256
    in fp32 for an H200 itself.
    """
    launched = []
    for module in kernels, linear:
        monkeypatch.setattr(module, "shared_memory", lambda device: chip)
    monkeypatch.setattr(
        linear, "matrix_kernel", defaultdict(lambda: lambda *_, **given: launched.append(given))
    )
    for dtype in torch.bfloat16, torch.float32:
        for R in 2, 17, 33, 64, 65, 128, 129, 256:
            for N, is_head in (768, False), (3072, False), (50257, True):
                layer = SimpleNamespace(weight=torch.empty(N, 768, dtype=dtype), bias=None)
                linear.launch_linear(torch.empty(R, 768, dtype=dtype), layer, is_head=is_head)
                given = launched.pop()
                tile = (given["ROWS"] + given["COLS"]) * given["BLOCK"] * dtype.itemsize
                assert 1 <= given["num_stages"] <= chip // tile
    stages = [
        kernels.stages_that_fit(torch.empty(2, 1, 1, 16, D)) for D in (64, 128, 256)
    ]  # as compiled
    assert stages == {101_376: [2, 2, 2], 166_912: [3, 2, 2], 232_448: [3, 3, 2]}[chip]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter compiles nothing")
def test_nothing_compiles_after_the_first_steps():
    """
    A kernel that is compiled for each width of the block tables, or number of rows, stops a server
    for seconds.
    """
    for contexts in ([5], [17, 40], [300], [31, 2, 900]):
        check_attention(
            Shape([(1, n) for n in contexts], len(contexts), D=64, dtype=torch.bfloat16), "triton"
        )
    compiled = kernels.decode_kernel.device_caches[torch.cuda.current_device()][0]
    count = len(compiled)
    for contexts in ([6], [1999], [170, 41], [32, 200, 700], [1]):
        check_attention(
            Shape([(1, n) for n in contexts], len(contexts), D=64, dtype=torch.bfloat16), "triton"
        )
    assert len(compiled) == count


# --------------------------------------------------------------------------------------------------
# Memory of the torch path


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=40))
def test_length_classes_at_most_double_the_memory(lens):
    """
    Padding all to the longest, one context of 4,096 among 31 short ones takes 30 times the memory
    it needs.
    """
    groups = gather.length_classes(lens)
    assert sorted(i for group in groups for i in group) == list(range(len(lens)))
    assert sum(len(group) * max(lens[i] for i in group) for group in groups) <= 2 * sum(lens)
    assert len(groups) <= max(lens).bit_length()


@pytest.mark.parametrize(
    ("requests", "window", "widths"),
    [
        # the long decode, the short ones together, the chunk: no row of K or V too many
        ([(1, 4096)] + [(1, 10)] * 31 + [(64, 200)], 0, [4096, 10, 200]),
        # one SDPA for each decode would cost more than the attention itself
        ([(1, 500 + i) for i in range(32)], 0, [531]),
        # decodes of any length pad each other to the window, not to the longest of them
        ([(1, 4096), (1, 700), (1, 40), (1, 20)], 32, [32]),
    ],
)
def test_requests_of_similar_length_are_one_gather(requests, window, widths):
    num_decodes = sum(n == 1 for n, _ in requests)
    step = Step(Shape(requests, num_decodes, H=2, Hk=2, D=16, window=window), "torch")
    gathers = step.batch.prepared[window].gathers
    assert [call.kv_rows.shape[-1] for call in gathers] == widths
    assert sum(call.kv_rows.shape[1] for call in gathers) == len(requests)


def test_block_ids_of_a_pool_beyond_2_to_the_31():
    """
    Would catch: block tables, which are int32, multiplied as such. A pool of that size is not
    needed: the rows that the torch path would read and write are numbers.
    """
    batch = Step(Shape([(1, 18), (2, 2)], num_decodes=1, D=1, Hk=4, S=16), "torch").batch
    block = 2**27
    batch.block_tables[:, :2] = torch.tensor([[block, block + 1], [block + 2, 0]])
    batch.slot_mapping = torch.tensor(
        [(block + 1) * 16 + 1, (block + 2) * 16, (block + 2) * 16 + 1]
    )
    num_blocks = block + 3
    plan = gather.prepare_torch(batch, 4, torch.empty(2, num_blocks, 4, 16, 1, device="meta"))
    of_k = [
        block * 64 + head * 16 for head in range(4)
    ]  # of block 2^27, for each head: 2^33 and more
    firsts = of_k, [n + num_blocks * 64 for n in of_k]  # and V's
    long, short = [*range(16), 64, 65], [128, 129]
    for call, offsets in zip(plan.gathers, (long, short), strict=True):
        assert call.kv_rows.tolist() == [
            [[[n + i for i in offsets] for n in first]] for first in firsts
        ]
    assert plan.store_rows.tolist() == [
        n + offset for first in firsts for offset in (65, 128, 129) for n in first
    ]


# --------------------------------------------------------------------------------------------------
# The pool


def test_copies_read_all_sources_before_they_write():
    """Block by block, a chain of copies 0 -> 1 -> 2 would put block 0 everywhere."""
    pool = KVBlockPool(4, 2, n_layer=2, n_head=3, head_size=5)
    pool.kv[:] = torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(0))
    before = pool.kv.clone()
    pool.copy_blocks([1, 2, 0], [0, 1, 2])
    assert torch.equal(pool.kv, before[:, :, [2, 0, 1, 3, 4]])


# --------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize("module", [gather, inputs, paged, sizing])
def test_examples_in_docstrings_are_true(module):
    """An example that is wrong teaches the wrong thing."""
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
