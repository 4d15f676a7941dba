"""
Attention, and the operators of --deterministic, each by itself: a row's bits, whatever the other
rows of a step are. (Whether they are right, test_kernels.py asks; whole answers are compared in
test_bits.py.)

On a CPU they run in Triton's interpreter, with `multiply_in_order`. So here it is seen that masks,
splits and tiles change no bit; that a GPU's products and reductions do not, only a GPU shows.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interpreting import multiply_in_order, quick_on_a_cpu
from torch import Tensor, nn

import kernels
import model as model_module
from engine.engine import flat_batch
from model import GPTConfig
from ops import deterministic, linear, sampling
from ops.choice import TORCH, choose_ops
from paged import KVBlockPool, Plan, Request

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
# Attention


class Text:
    """A text of LENGTH tokens in a pool, with a query at each; and steps that attend from some."""

    LENGTH = 333

    def __init__(self, Hk=2, G=1, D=16, S=16, window=0, softcap=0.0, dtype=torch.float32, ops=None):
        generator = torch.Generator().manual_seed(G * D)
        count = -(-self.LENGTH // S)
        self.pool = KVBlockPool(count, S, 1, Hk, D, DEVICE, dtype)
        numbers = torch.randn(self.pool.kv.shape, generator=generator)
        self.pool.kv.copy_(numbers)
        self.pool.kv[:, :, count] = torch.nan  # the sink
        self.table = torch.randperm(count, generator=generator).tolist()
        self.q = 3 * torch.randn(self.LENGTH, G * Hk, D, generator=generator).to(DEVICE, dtype)
        windows = {"n_layer": 1, "n_head": G * Hk, "windows": (window,)}
        self.model = SimpleNamespace(config=GPTConfig(n_embd=G * Hk, **windows))
        self.attn = SimpleNamespace(window=window, scale=D**-0.5, softcap=softcap)
        self.ops = ops or choose_ops("triton", DEVICE)[0]

    def attend(self, decodes=(), chunks=(), groups=(), layers=1) -> list[Tensor]:
        """
        Of one step, which decodes with so many tokens before and with it, and has chunks (new
        tokens, tokens after them): the outputs [n, H, D] of each, in the last of several layers.
        Groups (first, end, tokens) of decodes share a prefix. All but the first find NaN there.
        """
        plan = Plan()
        pieces = [(1, context) for context in decodes] + list(chunks)
        for i, (n, context) in enumerate(pieces):
            request = Request(i, [0] * context, 1, block_table=self.table)
            request.num_filled_slots = context - n
            if i < len(decodes):
                plan.decodes.append(request)
            else:
                plan.chunks.append((request, n))
        batch = flat_batch(plan, self.model, self.pool)
        H, kv = self.q.shape[1], self.pool.kv[0]
        window, S = self.attn.window, kv.shape[3]
        if groups:
            shared = torch.zeros(len(decodes), dtype=torch.int64)
            for first, end, tokens in groups:
                shared[first:end] = tokens
                if not window:
                    batch.block_tables[first + 1 : end, : tokens // S] = len(self.table)
            firsts, ends, _ = torch.tensor([*groups, (0, 0, 0)]).T.contiguous()  # one is padding
            batch.groups = tuple(x.to(DEVICE) for x in (shared, firsts, ends))
        batch.prepared = {window: self.ops.prepare(batch, H, kv, window)}
        q = torch.cat([self.q[context - n : context] for n, context in pieces])
        for _ in range(layers):
            out = self.ops.attend(q, kv, self.attn, batch)
        return out.split([n for n, _ in pieces])

    def differences(self) -> int:
        """Tokens with other bits than in a whole prompt, in steps of every kind."""
        (whole,) = self.attend(chunks=[(self.LENGTH, self.LENGTH)])
        assert whole.isfinite().all()
        count = 0
        for decodes, *others in STEPS:
            ends = [*decodes, *(end for chunks in others[:1] for _, end in chunks)]
            for out, end in zip(self.attend(decodes, *others), ends, strict=True):
                same = bits(out) == bits(whole[end - len(out) : end])
                count += int((~same.flatten(1).all(1)).sum())
        return count


# around the ends of splits, which are tiles of 64 keys
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 320, 321, 333]
CUTS = [[(100, 100), (28, 128), (1, 129), (64, 193), (63, 256), (77, 333)], [(333, 333)]]
CUTS += [[(5, 192), (2, 194), (139, 333)], [(1, n) for n in EDGES]]
# decodes, chunks beside them, groups of decodes
STEPS = [(EDGES,), (EDGES[-1:],), (EDGES[::-5],), *(([193, 17], chunks) for chunks in CUTS)]
STEPS += [(EDGES, [], [(4, 7, 64), (7, 16, 128)]), ([333, 333, 321], [], [(0, 3, 320)])]
KINDS = [{}, {"G": 3, "Hk": 1, "S": 24}, {"D": 40, "softcap": 5.0}, {"window": 70}]
KINDS += [{"window": 64, "G": 2}, {"window": 5, "softcap": 2.0}, {"window": 200, "G": 4, "Hk": 1}]
KINDS += [{"dtype": DTYPES[1]}, {"dtype": DTYPES[1], "D": 64, "G": 2, "window": 130}]


@pytest.mark.parametrize("at_once", [1, 1000], ids=["whole", "splits"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@quick_on_a_cpu("{'window': 70}-splits", "{'G': 3, *-whole", "{'G': 3, *-splits")
def test_a_token_gets_the_same_bits_from_decodes_chunks_and_groups(kind, at_once, monkeypatch):
    """
    Would catch: splits that follow the number of requests, or begin where a window, a chunk or a
    group's rest does; a masked key that rescales a sum; splits merged in the order in which
    programs finish; a row of a group that gets its neighbour's state.
    """
    monkeypatch.setattr(kernels, "programs_at_once", lambda D: at_once)
    monkeypatch.setattr(kernels, "MERGED_AT_ONCE", 128)  # two or more states: soon interpreted
    assert Text(**kind).differences() == 0


@pytest.mark.parametrize("groups", [[], [(1, 3, 128)]])
def test_each_layer_finds_what_the_first_one_found(groups):
    """Would catch: counters that a layer leaves behind, so that the next merges no splits."""
    text = Text(G=2)
    steps = {"decodes": [1, 130, 333], "chunks": [] if groups else [(40, 300)], "groups": groups}
    outputs = zip(text.attend(**steps), text.attend(**steps, layers=3), strict=True)
    assert all(torch.equal(first, last) for first, last in outputs)


def test_these_comparisons_can_fail():
    """Torch's attention adds up in the order of its batch."""
    assert Text(ops=TORCH).differences() > 3


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
