"""
The operators of --deterministic, each by itself: the bits of a row do not depend on the other rows
of a step. test_kernels.py checks that results are right, and also attention's bits; test_bits.py
compares whole answers.

On a CPU they run in Triton's interpreter, with `multiply_in_order`. This shows that tiles change no
bit. Whether a GPU's own products and reductions change bits can only be seen on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch
from interpreting import multiply_in_order, quick_on_a_cpu
from torch import Tensor, nn

import kernels
import model as model_module
from model import GPTConfig
from ops import deterministic, sampling
from ops.choice import choose_ops

pytestmark = pytest.mark.skipif(not kernels.triton, reason="needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    if DEVICE == "cpu":
        multiply_in_order(monkeypatch)


def ops():
    return choose_ops("triton", DEVICE, deterministic=True)[0]


# --------------------------------------------------------------------------------------------------
# Products


def assert_no_row_matters(compute, *batches: list[int]):
    """
    Check that row 7 of compute(rows) [R, width] is the same in all batches of rows as by itself.
    """
    outputs = [compute(rows)[rows.index(7)] for rows in ([7], *batches)]
    for out in outputs:
        assert torch.equal(out.view(torch.int16), outputs[0].view(torch.int16))
    assert outputs[0].count_nonzero() > 0.9 * len(outputs[0])


PRODUCTS = [{}, {"activation": "gelu_new"}, {"activation": "silu", "gated": True}]
PRODUCTS += [{"partial_sums": True}]


@torch.no_grad()
@all_dtypes
@pytest.mark.parametrize(("N", "K"), [(48, 100), (130, 1100)])
@pytest.mark.parametrize("kind", PRODUCTS, ids=str)
@quick_on_a_cpu(
    "{'partial_sums': True}-130-1100-dtype0",
    "{'activation': 'silu', 'gated': True}-48-100-dtype0",
    "{}-48-100-dtype1",
)
def test_a_row_of_a_product_does_not_depend_on_the_others(kind, N, K, dtype, monkeypatch):
    """
    Would catch: parts of a sum that depend on the number of rows; a program that adds them in
    another order than the norm that follows; another kernel for a single row; a deferred norm.
    """
    monkeypatch.setattr(deterministic, "APART_ROWS", 80)
    torch.manual_seed(N)
    layer = nn.Linear(K, N).to(DEVICE, dtype)
    norm = nn.LayerNorm(K).to(DEVICE, dtype)
    norm_of_sum = nn.LayerNorm(N).to(DEVICE, dtype)
    x = torch.randn(100, K).to(DEVICE, dtype)
    delta = torch.randn(1, 100, K).to(DEVICE)
    before = torch.randn(100, N).to(DEVICE, dtype)

    def compute(rows: list[int]) -> Tensor:
        total, y = ops().add_norm(x[rows], delta[:, rows].contiguous(), norm)
        out = [ops().linear(y, layer, **kind)]
        if kind.get("partial_sums"):
            assert len(out[0]) == (4 if K > 1000 and len(rows) <= 80 else 1)
            out = ops().add_norm(before[rows], *out, norm_of_sum)
        elif not kind:
            out.append(ops().head(y, layer, 30.0))
        return torch.cat([total, *out], dim=1)

    assert_no_row_matters(compute, [6, 7, 8], [*range(40)], [*range(70)], [*range(100)])


@torch.no_grad()
@pytest.mark.parametrize(
    ("rope", "norm", "D"),
    [(False, False, 16), (True, False, 16), (True, True, 16), (True, True, 64), (True, True, 256)],
)
@quick_on_a_cpu("*-16")
def test_queries_keys_and_values_do_not_depend_on_the_other_rows(rope, norm, D, monkeypatch):
    """
    Would catch: heads whose norm is summed by more threads if there are fewer rows; parts of a sum
    that are added in another order when one program has them all; another kernel for a single row.
    """
    monkeypatch.setattr(deterministic, "APART_ROWS", 10)
    kind = {"rope": {0: model_module.Rope(1e4)}, "norm": "rms", "qk_norm": norm} if rope else {}
    sizes = {"n_embd": 600, "n_head": 4, "n_kv_head": 2, "head_size": D}
    torch.manual_seed(0)
    config = GPTConfig(64, 64, n_layer=1, **kind, **sizes)
    attention = model_module.Attention(config, 0, 0).to(DEVICE)
    y = torch.randn(20, 600).to(DEVICE)
    frequencies = torch.arange(D // 2, device=DEVICE) / D

    def compute(rows: list[int]) -> Tensor:
        slots = torch.tensor(rows, device=DEVICE)
        kv = torch.zeros(2, 2, 2, 16, D, device=DEVICE)
        batch = SimpleNamespace(slot_mapping=slots, ops=ops(), rotations={})
        if rope:
            batch.rotations[0] = (slots, frequencies)
        q, _ = ops().project_qkv(y[rows], attention, kv, batch)
        return torch.cat([q, *kv[:, slots // 16, :, slots % 16].unbind(1)], 1).flatten(1)

    assert_no_row_matters(compute, [6, 7], [*range(20)])


@pytest.mark.parametrize(("N", "K"), [(768, 768), (768, 3072), (3072, 768), (2048, 8192)])
def test_the_parts_of_a_sum_follow_from_the_layer(N, K, monkeypatch):
    """
    Would catch: more parts for few rows, which occupy few programs, since other parts give other
    bits; tiles of few rows used for many.
    """
    monkeypatch.setattr(deterministic, "launch_linear", lambda *args, tiles: tiles)
    layer = nn.Linear(K, N, device="meta")
    counts = set()
    for R in 1, 17, 64, 65, 512, 513, 2048:
        tiles = deterministic.linear(torch.empty(R, K, device="meta"), layer, partial_sums=True)
        counts.add(tiles.apart * tiles.together)
        assert min(R, 64) <= tiles.rows <= max(16, 2 * R)
    assert len(counts) == 1, f"{counts} parts"


# --------------------------------------------------------------------------------------------------
# Log-probabilities


@all_dtypes
@pytest.mark.parametrize("V", [1000, 50_257, 151_936])
def test_log_probabilities_do_not_depend_on_the_place_of_a_row(V, dtype):
    """
    Would catch: on a GPU, a sum that depends on the address of a row, since with an odd vocabulary
    each row is aligned differently; ties that are broken differently for one row than for many.
    """
    torch.manual_seed(V)
    row = torch.randn(V).round(decimals=1)
    results = set()
    for R, place in (1, 0), (2, 1), (5, 3), (30, 29), (70, 41):
        logits = torch.randn(R, V)
        logits[place] = row
        tokens = torch.full((R,), 5, device=DEVICE)
        scores = sampling.logprobs(logits.to(DEVICE, dtype), tokens, 20)
        results.add(str([x[place].tolist() for x in scores]))
    assert len(results) == 1


def test_sort_keys_are_in_the_order_of_logits():
    """Of equal logits the first is the largest; infinities are in order."""
    logits = torch.tensor([[1.5, -2.0, 0.0, 1.5, -torch.inf, 3e-41, -2.0, torch.inf, -1e-41]])
    order = sampling.sort_keys(logits).sort(descending=True).indices
    assert order.tolist() == [[7, 0, 3, 5, 2, 8, 1, 6, 4]]
