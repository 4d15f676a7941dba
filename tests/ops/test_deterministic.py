"""
The operators of --deterministic, each by itself: a row's bits, whatever the other rows of a step
are. (Whether they are right, test_kernels.py asks, also for attention's bits; whole answers are
compared in test_bits.py.)

On a CPU they run in Triton's interpreter, with `multiply_in_order`. So here it is seen that tiles
change no bit; that a GPU's products and reductions do not, only a GPU shows.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interpreting import multiply_in_order, quick_on_a_cpu
from torch import Tensor, nn

import kernels
import model as model_module
from model import GPTConfig
from ops import deterministic, linear, sampling
from ops.choice import choose_ops

pytestmark = pytest.mark.skipif(not kernels.triton, reason="needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    if DEVICE == "cpu":
        multiply_in_order(monkeypatch)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


def ops():
    return choose_ops("triton", DEVICE, deterministic=True)[0]


# --------------------------------------------------------------------------------------------------
# Products


def random_layer(N: int, K: int, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(N)
    layer = nn.Linear(K, N)
    nn.init.normal_(layer.weight, std=K**-0.5)
    nn.init.normal_(layer.bias)
    return layer.to(DEVICE, dtype)


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
    Would catch: parts that follow the number of rows, or are added up in another order by one
    program than by the norm that follows; one row by another kernel; a norm that is deferred.
    """
    monkeypatch.setattr(deterministic, "APART_ROWS", 200)
    layer = random_layer(N, K, dtype)
    norm = nn.LayerNorm(K).to(DEVICE, dtype)
    norm_of_sum = nn.LayerNorm(N).to(DEVICE, dtype)
    before = torch.randn(300, N).to(DEVICE, dtype)
    x = torch.randn(300, K).to(DEVICE, dtype)
    delta = torch.randn(1, 300, K).to(DEVICE)
    outputs = []
    for rows in [7], [6, 7, 8], range(40), range(100), range(300):
        rows = list(rows)
        total, y = ops().add_norm(x[rows], delta[:, rows].contiguous(), norm)
        out = ops().linear(y, layer, **kind)
        if kind.get("partial_sums"):
            assert len(out) == (4 if K > 1000 and len(rows) <= 200 else 1)
            out = torch.cat(ops().add_norm(before[rows], out, norm_of_sum), dim=1)
        out = out[rows.index(7)]
        if N == 48 and not kind:
            out = torch.cat([out, ops().head(y, layer, 30.0)[rows.index(7)]])
        outputs.append(torch.cat([out, total[rows.index(7)]]))
    for out in outputs[1:]:
        assert torch.equal(bits(out), bits(outputs[0]))


@torch.no_grad()
@pytest.mark.parametrize(("rope", "D"), [(False, 16), (True, 16), (True, 64), (True, 256)])
@quick_on_a_cpu("False-16", "True-16", "True-64")
def test_queries_keys_and_values_do_not_depend_on_the_other_rows(rope, D, monkeypatch):
    """
    Would catch: heads whose norm is added up by as many threads as there are rows to spare; parts
    of a sum that are added up in another order where they are one program's.
    """
    monkeypatch.setattr(deterministic, "APART_ROWS", 10)
    windows = {0: model_module.Rope(10_000.0)} if rope else {}
    norms = {"norm": "rms", "qk_norm": True} if rope else {}
    sizes = {"n_embd": 600, "n_head": 4, "n_kv_head": 2, "head_size": D}
    config = GPTConfig(64, 64, n_layer=1, rope=windows, **norms, **sizes)
    torch.manual_seed(0)
    attention = model_module.Attention(config, 0).to(DEVICE)
    y = torch.randn(20, 600).to(DEVICE)
    outputs = []
    for rows in [7], [6, 7], range(20):
        rows = torch.tensor(rows, device=DEVICE)
        kv = torch.zeros(2, 3, 2, 16, D, device=DEVICE)
        frequencies = torch.arange(D // 2, device=DEVICE) / D
        batch = SimpleNamespace(slot_mapping=rows, ops=ops())
        batch.rotations = {0: (rows, frequencies)} if rope else {}
        q, pool = ops().project_qkv(y[rows], attention, kv, batch)
        assert pool is kv
        outputs.append(torch.cat([q[rows.tolist().index(7)].flatten(), kv[:, 0, :, 7].flatten()]))
    assert outputs[0].abs().min() > 0
    for out in outputs[1:]:
        assert torch.equal(bits(out), bits(outputs[0]))


def test_tiles_follow_the_rows_and_fit_the_memory():
    """For every size, a program's tiles fit; many rows never get the tiles of few."""
    for N in 48, 768, 2304, 50_257:
        for R in 1, 16, 17, 32, 33, 64, 256, 2048:
            layer = nn.Linear(768, N, device="meta")
            tiles = deterministic.tiles_for(R, layer)
            assert tiles.rows >= min(R, 64) and tiles.rows <= max(16, 2 * R)
            assert 2 * (tiles.rows + 2 * tiles.cols) * tiles.block <= linear.TILES_MEMORY


@pytest.mark.parametrize(("N", "K"), [(768, 768), (768, 3072), (3072, 768), (2048, 8192)])
def test_the_parts_of_a_sum_follow_from_the_layer(N, K, monkeypatch):
    """Would catch: more parts for few rows, which have few programs. Other parts, other bits."""
    monkeypatch.setattr(deterministic, "launch_linear", lambda *args, tiles: tiles)
    layer = nn.Linear(K, N, device="meta")
    counts = set()
    for R in 1, 64, 65, 512, 513, 2048:
        x = torch.empty(R, K, device="meta")
        tiles = deterministic.linear(x, layer, partial_sums=True)
        counts.add(tiles.apart * tiles.together)
    assert len(counts) == 1, f"{counts} parts"


# --------------------------------------------------------------------------------------------------
# Log-probabilities


@all_dtypes
@pytest.mark.parametrize("V", [1000, 50_257, 151_936])
def test_log_probabilities_do_not_depend_on_the_place_of_a_row(V, dtype):
    """
    Would catch: on a GPU, a sum that follows the address of a row, which in a vocabulary of an odd
    number of tokens is another for each; of equal logits, others for one row than for many.
    """
    generator = torch.Generator().manual_seed(V)
    row = torch.randn(V, generator=generator).round(decimals=1)
    tokens = torch.tensor([5])
    results = []
    for R, place in (1, 0), (2, 1), (5, 3), (30, 29), (70, 41):
        logits = torch.randn(R, V, generator=generator)
        logits[place] = row
        logits = logits.to(DEVICE, dtype)
        logprob, ids, best = sampling.logprobs(logits, tokens.expand(R).to(DEVICE), 20)
        results.append((logprob[place].item(), ids[place].tolist(), best[place].tolist()))
    assert results[1:] == results[:-1]
    assert np.isfinite(results[0][2]).all() and len(set(results[0][1])) == 20


def test_sort_keys_are_in_the_order_of_logits():
    """Of equal ones the first is the largest; infinities have their place."""
    logits = torch.tensor([[1.5, -2.0, 0.0, 1.5, -torch.inf, 3e-41, -2.0, torch.inf, -1e-41]])
    order = sampling.sort_keys(logits).sort(descending=True).indices
    assert order.tolist() == [[7, 0, 3, 5, 2, 8, 1, 6, 4]]
