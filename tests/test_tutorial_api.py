"""
The names of "Adding Paged Attention to NanoGPT", with the meaning they have there. Readers of the
post can rely on these tests. test_paged.py tests blocks, forks, admission and preemption, and that
answers equal the dense model's. test_post.py runs the post's loop with the other names: schedule,
promote and complete, and the functions that write and gather K and V.
"""

import inspect
from dataclasses import replace
from itertools import product

import pytest
import torch

import paged
from engine import device, engine
from interleaved import flat_batch, interleaved_generate
from ops import inputs
from paged import (
    BlockAllocator,
    KVBlockPool,
    Request,
    Scheduler,
    commit_completed_blocks,
    find_cached_prefix,
    maybe_allocate_block,
)
from params import GREEDY
from test_paged import CONTEXT, new_engine, prompt, raises, trained_model

SIGNATURES = """
KVBlockPool(num_blocks, block_size, n_layer, n_head, head_size, device
BlockAllocator(num_blocks, block_size=4)
Request(id, prompt_tokens, max_new_tokens, generated_tokens=, status='waiting', prefill_cursor=0, \
block_table=, num_filled_slots=0,
Scheduler(policy='fcfs', token_budget=16, max_kv_tokens=256, block_size=4,
write_kv_to_pool(pool, block_table, block_size, start_pos, k_new, v_new, layer, head)
gather_kv_from_pool(pool, block_table, block_size, num_filled_slots, layer, head)
maybe_allocate_block(request, block_allocator, block_size)
commit_completed_blocks(request, block_cache, block_size, pool=
interleaved_generate(model, requests, policy='fcfs', token_budget=16, max_kv_tokens=256)
"""


@pytest.mark.parametrize("signature", SIGNATURES.strip().splitlines())
def test_signatures_are_the_posts(signature):
    """Would catch: a renamed, reordered or missing parameter, or another default."""
    name, _, parameters = signature.partition("(")
    function = getattr(paged, name, interleaved_generate)
    names = []
    for p in inspect.signature(function).parameters.values():
        default = "" if p.default is p.empty else f"={p.default!r}"
        names.append(p.name + default.replace("=<factory>", "=").replace("=None", "="))
    assert f"{', '.join(names)}) ".startswith(parameters)


def test_pool_hands_out_views_of_each_head():
    """Would catch: a view of another layer, of V instead of K, or including the padding block."""
    pool = KVBlockPool(5, 4, 3, 2, 8, "cpu")
    pool.kv.copy_(torch.arange(pool.kv.numel()).view(pool.kv.shape))
    assert list(pool.k_pool) == list(pool.v_pool) == [*product(range(3), range(2))]
    for layer, head in pool.k_pool:
        views = torch.stack([pool.k_pool[layer, head], pool.v_pool[layer, head]])
        assert torch.equal(views, pool.kv[layer, :, :5, head])


def test_request_fields():
    """
    Would catch: a field of the post that is missing, means something else, or cannot be assigned.
    """
    request = Request("r", [5, 6, 7], 2)
    assert request.arrival_time == 0
    assert not request.is_fully_prefilled
    request.num_filled_slots = request.prefill_cursor = 3
    assert request.num_tokens_in_cache == 3
    assert request.is_fully_prefilled
    request.generated_tokens.append(8)
    assert request.tokens_so_far == [5, 6, 7, 8]
    assert not request.is_done
    request.generated_tokens.append(9)
    assert request.is_done
    assert request.status == "waiting"


def test_maybe_allocate_block():
    """Would catch: a block allocated too early or too late, or two."""
    allocator = BlockAllocator(2)
    request = Request("r", [1], 20)
    for filled in range(8):
        request.num_filled_slots = filled
        maybe_allocate_block(request, allocator, 4)
        assert request.block_table == ([0] if filled < 4 else [0, 1])
    request.num_filled_slots = 8
    with raises(RuntimeError, "wanted 1", "available 0 of 2"):
        maybe_allocate_block(request, allocator, 4)


def test_commit_completed_blocks():
    """
    Would catch: a partial block committed; a generated block forgotten; a block committed with the
    tokens of another, or found after a gap; an allocator that cannot be assigned, or whose idle
    blocks do not count.
    """
    scheduler = Scheduler()
    scheduler.block_allocator = allocator = BlockAllocator(3)
    cache = scheduler.block_cache
    request = Request("r", [1, 2, 3, 4, 5, 6], 9, generated_tokens=[7, 8, 9])
    request.block_table = allocator.allocate_n(3)
    for filled, blocks in (3, []), (4, [0]), (7, [0]), (8, [0, 1]):
        request.num_filled_slots = filled
        commit_completed_blocks(request, cache, 4, pool=None)
        held = [content.tokens for content in cache.contents.values()]
        assert held == [(1, 2, 3, 4), (5, 6, 7, 8)][: len(blocks)]
        assert find_cached_prefix(request, cache, 4) == blocks
    request.clear_cache(allocator)
    assert list(allocator.idle) == [1, 0]
    cache.forget(0)
    assert find_cached_prefix(request, cache, 4) == [], "nothing after a gap"


def test_interleaved_generate_returns_the_scheduler():
    """
    Would catch: another return value; a refusal without numbers; a policy or budget that has no
    effect; fewer rows than requests; a missing import that readers of the post use.
    """
    assert engine.interleaved_generate is interleaved_generate
    model = trained_model()
    requests = [Request(i, prompt(i, 6), 3) for i in range(3)]
    scheduler = interleaved_generate(model, requests, "priority", 5, 48)
    assert scheduler.delay is paged.POLICIES["priority"]
    assert (scheduler.token_budget, scheduler.block_size, scheduler.max_num_seqs) == (5, 4, 3)
    assert scheduler.block_allocator.num_free == 12
    assert interleaved_generate(model, []).is_done()
    exact = Request("exact", prompt(0, CONTEXT - 4), 4)
    interleaved_generate(model, [exact])
    assert exact.num_generated == 4
    exact.max_new_tokens = 5
    with raises(ValueError, "request exact", f"{CONTEXT - 4} prompt tokens + 5", f"of {CONTEXT}"):
        interleaved_generate(model, [exact])


def test_the_flat_batch_is_the_runners(monkeypatch):
    """
    Compare the batch made from lists, for readers, with the one made on the device: decodes and
    chunks.
    """
    model = trained_model()
    engine = new_engine(model, attention="torch", token_budget=12)
    kinds = set()

    def compared(packed, shape, plan, known, ops):
        ours = flat_batch(plan, model, engine.device.pool)
        batch, rows = inputs.lay_out(packed, shape, plan, known, ops)
        kinds.add((bool(plan.decodes), bool(plan.chunks)))
        sampled = [i for i, (r, _) in enumerate(plan.work) if r in plan.sampled]
        others = vars(batch) | {"logits_index": batch.logits_index[sampled].int()}
        others |= {"attention_plans": ours.attention_plans, "ops": ours.ops}
        M = batch.block_tables.shape[1]
        ours.block_tables = ours.block_tables[:, :M]
        for name, value in vars(ours).items():
            other = others[name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other), name
                assert value.dtype == other.dtype, name
            else:
                assert value == other, name
        return batch, rows

    monkeypatch.setattr(device, "lay_out", compared)
    prompts = [prompt(i, length) for i, length in enumerate((3, 6, 14))]
    engine.generate(prompts, replace(GREEDY, max_tokens=4), progress=False)
    assert (True, True) in kinds
