"""
store_kv and paged_attention against an fp64 reference that walks the block tables token by token.

Block tables are permuted, lengths odd, and every slot that belongs to nobody (the sink, the tails of last blocks, the
blocks that pad the tables) is NaN: whoever reads it has NaN in the output. A backend's error may be at most twice that
of plain torch attention in the same dtype. A new backend is one more name in BACKENDS.
"""

import doctest
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
import paged
from kernels import Batch, choose_backend, length_classes
from model import GPT, GPTConfig
from paged import KVBlockPool, gather_kv_from_pool, write_kv_to_pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch"] + (["triton"] if kernels.triton else [])  # on a CPU in Triton's interpreter: see conftest.py


# ----------------------------------------------------------------------------------------------------------------------
# A step with made-up requests


@dataclass
class Shape:
    """Requests as (new tokens, context length after the step); the first num_decodes of them have one new token."""

    requests: list[tuple[int, int]]
    num_decodes: int = 0
    H: int = 4
    Hk: int = 4
    D: int = 32
    S: int = 16
    dtype: torch.dtype = torch.float32

    def __str__(self):
        return f"H{self.H}-Hk{self.Hk}-D{self.D}-S{self.S}-{str(self.dtype)[6:]}-{len(self.requests)}requests"


class Step:
    """Tensors of a step: q [T, H, D], new k and v [T, Hk, D], one layer's pool kv, and the batch."""

    def __init__(self, shape: Shape, backend: str, seed: int = 0):
        self.shape, S, D = shape, shape.S, shape.D
        g = torch.Generator().manual_seed(seed)
        blocks_of = [-(-context // S) for _, context in shape.requests]
        num_blocks, M = sum(blocks_of) + 3, max(blocks_of) + 2
        ids = torch.randperm(num_blocks, generator=g).tolist()
        tables = [[ids.pop() for _ in range(n)] for n in blocks_of]  # three blocks are nobody's
        self.tables = tables
        T = sum(n for n, _ in shape.requests)
        heads = torch.randn(T, shape.H + 2 * shape.Hk, D, generator=g).to(shape.dtype)
        self.q, self.k, self.v = heads.split((shape.H, shape.Hk, shape.Hk), dim=1)  # views, as the model has them
        self.kv = torch.full((2, num_blocks + 1, shape.Hk, S, D), torch.nan, dtype=shape.dtype)
        positions = [p for n, context in shape.requests for p in range(context - n, context)]
        owners = [i for i, (n, _) in enumerate(shape.requests) for _ in range(n)]
        self.slots = [tables[i][p // S] * S + p % S for i, p in zip(owners, positions, strict=True)]
        for (n, context), table in zip(shape.requests, tables, strict=True):
            for p in range(context - n):  # what earlier steps have cached
                self.kv[:, table[p // S], :, p % S] = torch.randn(2, shape.Hk, D, generator=g).to(shape.dtype)
        query_lens, context_lens = [n for n, _ in shape.requests], [context for _, context in shape.requests]
        self.batch = Batch(
            tokens=torch.zeros(T, dtype=torch.int64),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(self.slots),
            query_start=torch.tensor([sum(query_lens[:i]) for i in range(len(query_lens) + 1)], dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=torch.tensor([t + ids[:1] * (M - len(t)) for t in tables], dtype=torch.int32),
            rows=torch.arange(len(tables)),
            logits_index=torch.zeros(0, dtype=torch.int64),
            num_decodes=shape.num_decodes,
            query_lens_host=query_lens,
            context_lens_host=context_lens,
            backend=choose_backend(backend, DEVICE),
        )
        for name, value in vars(self.batch).items():
            setattr(self.batch, name, value.to(DEVICE) if isinstance(value, torch.Tensor) else value)
        self.batch.prepared = self.batch.backend.prepare(self.batch, shape.H, shape.Hk, D, S)

    def store(self):
        kv = self.kv.to(DEVICE)
        self.batch.backend.store_kv(self.k.to(DEVICE), self.v.to(DEVICE), kv, self.batch)
        self.kv = kv.cpu()

    def attend(self) -> torch.Tensor:
        return self.batch.backend.paged_attention(self.q.to(DEVICE), self.kv.to(DEVICE), self.batch).cpu()

    def run(self) -> torch.Tensor:
        self.store()
        return self.attend()

    def context(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of request i, slot by slot: [C, Hk, D] each."""
        S, (_, context) = self.shape.S, self.shape.requests[i]
        both = torch.stack([self.kv[:, self.tables[i][p // S], :, p % S] for p in range(context)])  # [C, 2, Hk, D]
        return both[:, 0], both[:, 1]

    def reference(self) -> torch.Tensor:
        """softmax(q k / sqrt(D)) v in fp64, one request, one query and one head at a time."""
        shape, out, t = self.shape, torch.empty(self.q.shape, dtype=torch.float64), 0
        for i, (n, context) in enumerate(shape.requests):
            k, v = (x.double() for x in self.context(i))
            for position in range(context - n, context):
                for h in range(shape.H):
                    mine = h // (shape.H // shape.Hk)
                    scores = k[: position + 1, mine] @ self.q[t, h].double() / shape.D**0.5
                    out[t, h] = scores.softmax(0) @ v[: position + 1, mine]
                t += 1
        return out

    def plain_torch(self) -> torch.Tensor:
        """The same in the dtype at hand, by torch's own attention on contiguous K and V."""
        shape, out, t = self.shape, torch.empty_like(self.q), 0
        for i, (n, context) in enumerate(shape.requests):
            k, v = (x.transpose(0, 1).repeat_interleave(shape.H // shape.Hk, 0)[None] for x in self.context(i))
            mask = torch.arange(context) <= torch.arange(context - n, context)[:, None]
            q = self.q[t : t + n].transpose(0, 1)[None]  # [1, H, n, D]
            y = F.scaled_dot_product_attention(*(x.to(DEVICE) for x in (q, k, v)), attn_mask=mask.to(DEVICE))
            out[t : t + n] = y[0].transpose(0, 1).cpu()
            t += n
        return out


def check_attention(shape: Shape, backend: str, seed: int = 0):
    step = Step(shape, backend, seed)
    out = step.run()
    assert out.dtype == shape.dtype and out.shape == step.q.shape
    reference = step.reference()
    assert reference.isfinite().all()
    error = (out.double() - reference).abs().max().item()
    own = (step.plain_torch().double() - reference).abs().max().item()
    assert error <= 2 * own + 1e-7, f"error {error:.2e}, plain torch has {own:.2e}"  # NaN fails


ODD = [1, 15, 16, 17, 339, 799]
DECODES = Shape([(1, context) for context in ODD], num_decodes=6)
PROMPTS = Shape([(n, n) for n in (1, 15, 16, 17, 339)])
MIXED = Shape([(1, 1), (1, 16), (1, 339), (1, 17), (1, 1), (7, 7), (16, 48), (33, 100), (1, 20)], num_decodes=4)
SKEWED = Shape([(1, 799), *[(1, 1 + i) for i in range(15)], (5, 30)], num_decodes=16)


def variants() -> list[Shape]:
    """Every block size, head size, grouping and dtype at least once, each with decodes, prompts and mixtures."""
    shapes = []
    for S in 1, 2, 3, 7, 16, 24, 100, 128:
        shapes += [Shape(MIXED.requests, 4, S=S), Shape(DECODES.requests, 6, S=S)]
    for D in 16, 64, 80, 96, 128:
        shapes.append(Shape(MIXED.requests, 4, D=D))
    for H, Hk in (6, 2), (4, 1), (1, 1), (12, 12):
        shapes += [Shape(MIXED.requests, 4, H=H, Hk=Hk, S=5), Shape(PROMPTS.requests, H=H, Hk=Hk, S=16)]
    for dtype in torch.bfloat16, torch.float16, torch.float32:
        for base in DECODES, PROMPTS, MIXED, SKEWED:
            shapes.append(Shape(base.requests, base.num_decodes, H=4, Hk=2, D=64, dtype=dtype))
    return shapes


def cases() -> list[tuple[Shape, str]]:
    """Every shape with every backend; but the interpreter takes a second for each, and has no bf16 dot product."""
    all_cases = [(shape, backend) for backend in BACKENDS for shape in variants()]
    if DEVICE == "cpu":
        few = [shape for shape in variants() if shape.dtype != torch.bfloat16][1::3]
        all_cases = [(shape, backend) for shape, backend in all_cases if backend == "torch" or shape in few]
    return all_cases


@pytest.mark.parametrize(("shape", "backend"), cases(), ids=str)
def test_attention_through_permuted_block_tables(shape, backend):
    """Mask flipped or off by one, wrong block, wrong head of a group, stale slot read, requests or heads mixed up."""
    check_attention(shape, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_prompt_of_799_tokens_and_the_last_part_of_one(backend):
    """A chunk whose first query is not at position 0 sees what was cached before it, and no more."""
    check_attention(Shape([(799, 799), (100, 799)], H=2, Hk=1, D=16), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_any_mixture(backend):
    """What the list above does not think of."""

    @settings(max_examples=40 if backend == "torch" or DEVICE == "cuda" else 8, derandomize=True, deadline=None)
    @given(st.data())
    def any_mixture(data):
        check_attention_of(data, backend)

    any_mixture()


def check_attention_of(data, backend: str):
    decodes = data.draw(st.lists(st.integers(1, 70).map(lambda context: (1, context)), max_size=6))
    chunk = st.tuples(st.integers(1, 20), st.integers(0, 40)).map(lambda nc: (nc[0], sum(nc)))
    chunks = data.draw(st.lists(chunk, min_size=0 if decodes else 1, max_size=3))
    Hk = data.draw(st.integers(1, 3))
    H, D, S = Hk * data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 24, 80])), data.draw(st.integers(1, 20))
    check_attention(Shape(decodes + chunks, len(decodes), H, Hk, D, S), backend, seed=S)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_of_another_dtype_than_the_model(backend):
    """K, V are kept in fp16 under an fp32 model: what comes out is fp32 again, within fp16's rounding."""
    step = Step(Shape(MIXED.requests, 4), backend)
    exact = step.run()
    step.kv = step.kv.half()
    out = step.run()
    assert out.dtype == torch.float32
    assert 0 < (out - exact).abs().max() < 0.005


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("S", [1, 5, 16])
def test_store_writes_the_addressed_slots_and_no_other_byte(backend, dtype, S):
    """V written into the K cache, a head's row into its neighbour, or one slot too far: into another request's text."""
    step = Step(Shape(MIXED.requests, 4, H=6, Hk=3, S=S, dtype=dtype), backend)
    as_bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
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
    step.batch.backend.paged_attention(step.q.to(DEVICE), kv, step.batch)
    assert torch.equal(kv.cpu().view(torch.int32), before.view(torch.int32))


def test_an_unknown_backend_is_named_with_those_there_are():
    """A typo must not fall back in silence."""
    assert choose_backend("auto").name in BACKENDS
    with pytest.raises(ValueError, match="'trition' does not work on cpu; there is auto, torch"):
        choose_backend("trition")


# ----------------------------------------------------------------------------------------------------------------------
# Memory of the torch path


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=40))
def test_length_classes_at_most_double_the_memory(lens):
    """Padding all to the longest, one context of 4,096 among 31 short ones takes 30 times the memory it needs."""
    groups = length_classes(lens)
    assert sorted(i for group in groups for i in group) == list(range(len(lens)))
    assert sum(len(group) * max(lens[i] for i in group) for group in groups) <= 2 * sum(lens)
    assert len(groups) <= max(lens).bit_length()


def test_one_long_context_among_short_ones_gathers_hardly_more_than_there_is():
    """The same, counted in what a step really gathers: rows of K, and as many of V."""
    shape = Shape([(1, 4096)] + [(1, 10)] * 31 + [(64, 200)], num_decodes=32, H=2, Hk=2, D=16)
    gathers = Step(shape, "torch").batch.prepared.gathers
    rows = sum(gather.kv_rows.numel() for gather in gathers)
    assert rows == shape.Hk * sum(context for _, context in shape.requests)
    assert len(gathers) == 3  # the long decode, the short ones together, the chunk


def test_equal_decodes_are_one_gather():
    """One SDPA for each decode would cost more than the attention itself."""
    step = Step(Shape([(1, 500 + i) for i in range(32)], num_decodes=32, D=16), "torch")
    assert len(step.batch.prepared.gathers) == 1


def test_block_ids_of_a_pool_beyond_2_to_the_31():
    """Would catch: block tables, which are int32, multiplied as such. A pool of that size is not needed: the rows that
    the torch path would read and write are numbers."""
    batch = Step(Shape([(1, 18), (2, 2)], num_decodes=1, D=1, Hk=4, S=16), "torch").batch
    block = 2**27
    batch.block_tables[:, :2] = torch.tensor([[block, block + 1], [block + 2, 0]])
    batch.slot_mapping = torch.tensor([(block + 1) * 16 + 1, (block + 2) * 16, (block + 2) * 16 + 1])
    plan = kernels.prepare_torch(batch, 4, 4, 1, 16)
    first = [block * 64 + head * 16 for head in range(4)]  # of block 2^27, for each head: 2^33 and more
    assert plan.gathers[0].kv_rows.tolist() == [[[*range(n, n + 16), n + 64, n + 65] for n in first]]
    assert plan.gathers[1].kv_rows.tolist() == [[[n + 128, n + 129] for n in first]]
    assert plan.store_rows.tolist() == [n + offset for offset in (65, 128, 129) for n in first]


# ----------------------------------------------------------------------------------------------------------------------
# The pool


def test_copies_read_all_sources_before_they_write():
    """Block by block, a chain of copies 0 -> 1 -> 2 would put block 0 everywhere."""
    pool = KVBlockPool(4, 2, n_layer=2, n_head=3, head_size=5)
    pool.kv[:] = torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(0))
    before = pool.kv.clone()
    pool.copy_blocks({1: 0, 2: 1, 0: 2})
    assert torch.equal(pool.kv, before[:, :, [2, 0, 1, 3, 4]])


@pytest.mark.parametrize("S", [1, 3, 4])
def test_the_tutorials_write_and_gather_agree_with_the_kernels(S):
    """The post's helpers address one head of one layer; a reader may mix them with the engine's pool."""
    L, Hk, D, table, n = 2, 3, 8, [5, 0, 6, 2, 4, 1, 3], 7
    pool = KVBlockPool(7, S, L, Hk, D)
    pool.kv[:] = torch.nan
    k, v = torch.randn(2, Hk, 1, n, D, generator=torch.Generator().manual_seed(0))
    for head in range(Hk):
        for start, end in (0, 2), (2, 3), (3, n):
            k_new, v_new = k[head, :, start:end], v[head, :, start:end]
            write_kv_to_pool(pool, table, S, start, k_new, v_new, layer=1, head=head)
    for head in range(Hk):
        found_k, found_v = gather_kv_from_pool(pool, table, S, n, layer=1, head=head)
        assert torch.equal(found_k, k[head]) and torch.equal(found_v, v[head])
        for p in range(n):
            assert torch.equal(pool.kv[1, :, table[p // S], head, p % S], torch.stack([k[head, 0, p], v[head, 0, p]]))
    assert pool.kv[0].isnan().all() and pool.kv[1].isfinite().sum() == 2 * Hk * n * D


# ----------------------------------------------------------------------------------------------------------------------
# The model


def paged_logits(model, kv, tables, texts, computed, new, S, backend) -> torch.Tensor:
    """One step that computes new[i] further tokens of texts[i]; logits at each of them, (T, V)."""
    config, who = model.config, sorted(range(len(texts)), key=lambda i: new[i] > 1)  # single tokens are decodes
    who = [i for i in who if new[i]]
    at = [(i, p) for i in who for p in range(computed[i], computed[i] + new[i])]
    query_lens, context_lens = [new[i] for i in who], [computed[i] + new[i] for i in who]
    batch = Batch(
        tokens=torch.tensor([texts[i][p] for i, p in at]),
        positions=torch.tensor([p for _, p in at]),
        slot_mapping=torch.tensor([tables[i][p // S] * S + p % S for i, p in at]),
        query_start=torch.tensor([sum(query_lens[:j]) for j in range(len(who) + 1)], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.tensor([tables[i] for i in who], dtype=torch.int32),
        rows=torch.tensor(who),
        logits_index=torch.arange(len(at)),
        num_decodes=sum(n == 1 for n in query_lens),
        query_lens_host=query_lens,
        context_lens_host=context_lens,
        backend=choose_backend(backend),
    )
    batch.prepared = batch.backend.prepare(batch, config.n_head, config.n_kv_head, config.head_size, S)
    logits = model.forward_paged(batch, kv)
    return {i: logits[[j for j, (owner, _) in enumerate(at) if owner == i]] for i in who}


@pytest.mark.parametrize("backend", ["torch"])  # in fp64, where a wrong token cannot hide in rounding
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_paged_logits_of_chunked_prompts_equal_the_dense_models(backend, n_kv_head):
    """Positions that restart with each chunk, layers that share a cache, logits taken from a neighbour's token."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=61, context_length=64, n_layer=3, n_head=4, n_embd=32, n_kv_head=n_kv_head, activation="relu2"
    )
    model, S = GPT(config).double().eval(), 5
    for parameter in model.parameters():  # GPT-2's initialisation is so small that all logits look alike
        torch.nn.init.normal_(parameter, std=0.3)
    texts = [torch.randint(61, (n,)).tolist() for n in (23, 9, 31)]
    pool = KVBlockPool(21, S, config.n_layer, n_kv_head, config.head_size, dtype=torch.float64)
    pool.kv[:] = torch.nan
    ids = torch.randperm(21).tolist()
    tables, computed = [ids[:7], ids[7:14], ids[14:]], [0, 0, 0]
    found = {i: [] for i in range(3)}
    with torch.no_grad():
        for new in (7, 1, 0), (1, 4, 13), (0, 1, 1), (14, 1, 1), (1, 2, 16):
            for i, logits in paged_logits(model, pool.kv, tables, texts, computed, new, S, backend).items():
                found[i].append(logits)
                computed[i] += new[i]
        assert computed == [23, 9, 31]
        for i, text in enumerate(texts):
            dense, _ = model(torch.tensor([text]))
            assert (torch.cat(found[i]) - dense[0]).abs().max() < 1e-10
            assert (dense[0, 1:] - dense[0, :-1]).abs().amax(-1).min() > 0.01  # or taking a neighbour's shows nothing


@pytest.mark.parametrize("module", [kernels, paged])
def test_examples_in_docstrings_are_true(module):
    """An example that is wrong teaches the wrong thing."""
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0
