"""
The names of "Adding Paged Attention to NanoGPT", with the meaning they have there. A reader who
comes from the post may rely on what stands here; that answers equal the dense model's is in
test_paged.py.
"""

import inspect
from dataclasses import fields, replace

import torch

from engine.engine import flat_batch, interleaved_generate
from engine.runner import Runner
from engine.settings import Settings
from ops import inputs
from paged import (
    POLICIES,
    BlockAllocator,
    KVBlockPool,
    Request,
    Scheduler,
    commit_completed_blocks,
    gather_kv_from_pool,
    maybe_allocate_block,
    root_key,
    write_kv_to_pool,
)
from test_paged import (
    CONTEXT,
    assert_equals_dense,
    mixed_params,
    prompt,
    raises,
    trained_model,
)


def positional(function) -> list[tuple]:
    """(name, default) of the parameters that the post passes by position."""
    parameters = inspect.signature(function).parameters.values()
    return [
        (p.name, None if p.default is p.empty else p.default)
        for p in parameters
        if p.kind != p.KEYWORD_ONLY
    ]


def test_signatures_are_the_posts():
    """Would catch: a renamed, reordered or missing parameter, another default."""
    pool = [(name, None) for name in ("num_blocks", "block_size", "n_layer", "n_head", "head_size")]
    assert positional(KVBlockPool)[:5] == pool and positional(KVBlockPool)[5][0] == "device"
    assert positional(BlockAllocator) == [("num_blocks", None), ("block_size", 4)]
    request = [("id", None), ("prompt_tokens", None), ("max_new_tokens", None)]
    assert positional(Request)[:3] == request
    sizes = [("policy", "fcfs"), ("token_budget", 16), ("max_kv_tokens", 256)]
    assert positional(Scheduler) == [*sizes, ("block_size", 4)]
    assert positional(interleaved_generate) == [("model", None), ("requests", None), *sizes]
    names = {
        write_kv_to_pool: "pool block_table block_size start_pos k_new v_new layer head",
        gather_kv_from_pool: "pool block_table block_size num_filled_slots layer head",
        maybe_allocate_block: "request block_allocator block_size",
        commit_completed_blocks: "request block_cache block_size pool",
    }
    for function, expected in names.items():
        assert [name for name, _ in positional(function)] == expected.split()


def test_pool_hands_out_views_of_each_head():
    """Would catch: a view of another layer, of V for K, with the sink block in it, or a copy."""
    pool = KVBlockPool(5, 4, 3, 2, 8, "cpu")
    keys = {(layer, head) for layer in range(3) for head in range(2)}
    assert set(pool.k_pool) == set(pool.v_pool) == keys
    numbers = torch.arange(pool.kv.numel(), dtype=torch.float32)
    pool.kv.copy_(numbers.view(pool.kv.shape))
    for (layer, head), k in pool.k_pool.items():
        v = pool.v_pool[(layer, head)]
        assert k.shape == v.shape == (5, 4, 8)
        for block in range(5):
            assert torch.equal(k[block], pool.kv[layer, 0, block, head])
            assert torch.equal(v[block], pool.kv[layer, 1, block, head])
    pool.k_pool[(1, 0)][2, 3] = -1
    assert (pool.kv[1, 0, 2, 0, 3] == -1).all(), "writing to the view writes the pool"
    assert (pool.kv == -1).sum() == 8, "and nothing but this slot"


def test_write_and_gather_through_a_permuted_table():
    """
    Would catch: logical block taken for physical, K for V, one head or layer for another, an offset
    lost where a write begins or ends within a block.
    """
    generator = torch.Generator().manual_seed(0)
    pool = KVBlockPool(9, 4, 2, 2, 8, "cpu")
    pool.kv.fill_(torch.nan)
    table, n = [7, 2, 5, 0], 14
    written = {}
    for key in pool.k_pool:
        k, v = torch.randn(2, 1, n, 8, generator=generator)
        for start, end in ((0, 3), (3, 4), (4, 9), (9, 14)):  # as chunks come
            write_kv_to_pool(pool, table, 4, start, k[:, start:end], v[:, start:end], *key)
        written[key] = (k, v)
    for key, (k, v) in written.items():
        for filled in (1, 4, 5, 14):
            got_k, got_v = gather_kv_from_pool(pool, table, 4, filled, *key)
            assert torch.equal(got_k, k[:, :filled]) and torch.equal(got_v, v[:, :filled])
        # position 10: third block, which is 5, offset 2
        assert torch.equal(pool.k_pool[key][5, 2], k[0, 10])
    touched = sorted(set(pool.kv.isfinite().nonzero()[:, 2].tolist()))
    assert touched == [0, 2, 5, 7], "no other block was written, nor the sink"
    assert pool.kv[:, :, 0, :, 2:].isnan().all(), "nor the two slots behind the end"


def test_allocator_counts_and_complains():
    """
    Would catch: num_free that forgets cached and idle blocks, an error without its numbers, other
    block ids.
    """
    allocator = BlockAllocator(3)
    assert (allocator.num_blocks, allocator.block_size, allocator.num_free) == (3, 4, 3)
    assert allocator.allocate_one() == 0
    assert allocator.allocate_n(2) == [1, 2] and allocator.num_free == 0
    with raises(RuntimeError, "wanted 1", "available 0"):
        allocator.allocate_one()
    allocator.free_blocks_for_request([1])
    with raises(RuntimeError, "wanted 2", "available 1"):
        allocator.allocate_n(2)
    assert allocator.allocate_one() == 1, "a freed, uncommitted block is the next one handed out"

    request = Request("r", [1, 2, 3, 4, 5], 1, block_table=[0, 1], num_filled_slots=5)
    scheduler = Scheduler(max_kv_tokens=12)
    scheduler.block_allocator = allocator  # assignable, and its cache goes with it
    assert scheduler.block_cache is allocator.block_cache
    commit_completed_blocks(request, scheduler.block_cache, 4, pool=None)
    request.clear_cache(allocator)
    assert request.block_table == [] and request.num_filled_slots == 0
    assert request.tokens_so_far == [1, 2, 3, 4, 5]
    assert allocator.num_free == 2, "free, and cached and idle"
    assert allocator.free == [1] and list(allocator.idle) == [0]
    assert allocator.allocate_n(2) == [1, 0], "the committed block goes last"


def test_request_fields():
    """
    Would catch: a field of the post that is missing, means something else, or cannot be assigned.
    """
    request = Request("r", [5, 6, 7], 2)
    assert request.status == "waiting" and request.generated_tokens == []
    assert request.block_table == [] and type(request.block_table) is list
    assert request.prefill_cursor == request.num_filled_slots == request.arrival_time == 0
    assert not request.is_fully_prefilled and not request.is_done
    request.num_filled_slots = 3
    request.prefill_cursor = 3
    request.arrival_time = 1.5
    assert request.num_tokens_in_cache == 3 and request.is_fully_prefilled
    request.generated_tokens.append(8)
    assert request.tokens_so_far == [5, 6, 7, 8]
    assert request.num_generated == 1 and not request.is_done
    request.generated_tokens.append(9)
    assert request.is_done, "done means enough tokens, or the status"
    assert request.status == "waiting"
    assert replace(request, generated_tokens=[], status="done").is_done


def test_the_posts_fields_stand_first():
    """A reader looks for these eight, not for one of ours among them."""
    names = [field.name for field in fields(Request)]
    assert names[:3] == ["id", "prompt_tokens", "max_new_tokens"]
    assert names[3:5] == ["generated_tokens", "status"]
    assert names[5:8] == ["prefill_cursor", "block_table", "num_filled_slots"]


def test_maybe_allocate_block():
    """Would catch: a block too early, too late, or two."""
    allocator = BlockAllocator(2)
    request = Request("r", [1], 20)
    tables = []
    for filled in range(8):
        request.num_filled_slots = filled
        maybe_allocate_block(request, allocator, 4)
        tables.append(list(request.block_table))
    assert tables == [[0]] * 4 + [[0, 1]] * 4
    request.num_filled_slots = 8
    with raises(RuntimeError, "wanted 1", "available 0 of 2"):
        maybe_allocate_block(request, allocator, 4)


def test_commit_completed_blocks():
    """
    Would catch: a partial block committed, a generated one forgotten, a block committed under
    another's tokens.
    """
    scheduler = Scheduler()
    request = Request("r", [1, 2, 3, 4, 5, 6], 9, generated_tokens=[7, 8, 9])
    request.block_table = [30, 10, 20]
    for filled, held in (
        (3, {}),
        (4, {30: (1, 2, 3, 4)}),
        (7, {30: (1, 2, 3, 4)}),
        (8, {30: (1, 2, 3, 4), 10: (5, 6, 7, 8)}),
    ):
        request.num_filled_slots = filled
        commit_completed_blocks(request, scheduler.block_cache, 4, pool=None)
        found = {block: content.tokens for block, content in scheduler.block_cache.held.items()}
        assert found == held
    assert scheduler.block_cache.held[30].parent == root_key()
    salted = Request("s", [1, 2, 3, 4], 9, cache_salt="pepper")
    salted.block_table = [40]
    salted.num_filled_slots = 4
    commit_completed_blocks(salted, scheduler.block_cache, 4)
    assert scheduler.block_cache.held[40].parent == root_key(salt="pepper"), "salts share nothing"


def test_maybe_admit_allocates_exactly_the_prompts_blocks():
    """
    Would catch: a block too many or too few at the edges, admission that reserves room for the
    answer.
    """
    for length, blocks in ((1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        scheduler = Scheduler(max_kv_tokens=12)
        request = Request("r", list(range(length)), 1000)  # max_new_tokens does not matter here
        scheduler.add_request(request)
        assert request.status == "waiting" and request.block_table == []
        scheduler._maybe_admit(0)
        assert request.status == "prefilling" and request.block_table == list(range(blocks))
        assert scheduler.block_allocator.num_free == 3 - blocks


def test_admission_keeps_what_does_not_fit_waiting():
    """
    Would catch: a request refused, dropped or half admitted because the pool is full at the moment.
    """
    scheduler = Scheduler(max_kv_tokens=12)
    large = Request("large", [1, 2, 3, 4, 5], 1)
    small = Request("small", [11, 12, 13, 14, 15], 1)
    scheduler.add_request(large)
    scheduler.add_request(small)
    scheduler._maybe_admit(0)
    assert (large.status, small.status) == ("prefilling", "waiting")
    assert small.block_table == [] and scheduler.block_allocator.num_free == 1
    scheduler.complete(large)
    scheduler._maybe_admit(1)
    assert small.status == "prefilling"
    assert small.block_table == [0, 1], "freed, uncommitted: handed out again at once"


def test_schedule_is_a_view_of_the_plan():
    """
    Would catch: a pair in the other order, a request both prefilled and decoded, a plan of its own.
    """
    scheduler, twin = Scheduler(token_budget=8), Scheduler(token_budget=8)
    requests = []
    for s in (scheduler, twin):
        requests.append([Request("a", [1, 2, 3], 9), Request("b", list(range(20, 40)), 9)])
        assert s.schedule(0) == (None, [])
        s.add_request(requests[-1][0])
        s.update(s.plan(0), [4])
        s.add_request(requests[-1][1])
    (a, b), (twin_a, twin_b) = requests
    prefill, decodes = scheduler.schedule(1)
    plan = twin.plan(1)
    assert prefill is b and decodes == [a]
    assert plan.chunks == [(twin_b, 7)] and plan.decodes == [twin_a]
    assert a.status == "active" and b.status == "prefilling"
    scheduler.add_request(Request("c", list(range(50, 70)), 9))
    prefill, _ = scheduler.schedule(2)
    assert prefill is b, "the first of several"


def test_promote_and_complete():
    """
    Would catch: a promoted request that stays among the prefilling; complete() that commits, or
    cannot end a request that is still prefilling or waiting.
    """
    scheduler = Scheduler()
    request = Request("r", list(range(8)), 5)
    scheduler.add_request(request)
    prefill, _ = scheduler.schedule(0)
    prefill.prefill_cursor = prefill.num_filled_slots = 8  # the post's loop computes and assigns
    scheduler.promote(prefill)
    assert request.status == "active"
    assert scheduler.active == [request] and scheduler.prefilling == []
    request.generated_tokens.append(8)
    scheduler.complete(request)
    assert request.status == "done" and request.is_done and scheduler.is_done()
    assert scheduler.block_allocator.num_free == 64, "freed"
    assert not scheduler.block_cache.held, "and nothing committed"

    prefilling = Request("p", list(range(30)), 5)
    waiting = Request("w", [1, 2], 5)
    scheduler.add_request(prefilling)
    scheduler.schedule(1)
    prefilling.num_filled_slots = prefilling.prefill_cursor = 16
    scheduler.add_request(waiting)
    assert not scheduler.is_done()
    for request, status in ((prefilling, "prefilling"), (waiting, "waiting")):
        assert request.status == status
        scheduler.complete(request)
        assert request.status == "done" and request.block_table == []
    assert scheduler.is_done()
    assert scheduler.block_allocator.num_free == 64 and not scheduler.block_cache.held
    scheduler.check()


def test_interleaved_generate_returns_the_scheduler():
    """Would catch: another return value, a refusal without numbers, a request left behind."""
    requests = [Request(i, prompt(i, 6 + i), 4) for i in range(3)]
    scheduler = interleaved_generate(trained_model(), requests)
    assert isinstance(scheduler, Scheduler) and scheduler.is_done()
    assert scheduler.block_allocator.num_blocks == 64
    assert scheduler.block_size == 4 and scheduler.token_budget == 16
    assert [r.num_generated for r in requests] == [4, 4, 4]
    assert scheduler.block_allocator.num_free == 64
    assert isinstance(interleaved_generate(trained_model(), []), Scheduler)
    numbers = (f"{CONTEXT - 4} prompt tokens + 5", f"context length of {CONTEXT}")
    with raises(ValueError, "request long", *numbers):
        interleaved_generate(trained_model(), [Request("long", prompt(0, CONTEXT - 4), 5)])
    exact = Request("exact", prompt(0, CONTEXT - 4), 4)
    interleaved_generate(trained_model(), [exact])
    assert exact.num_generated == 4
    with raises(RuntimeError, "cannot grow", "holds 3 of 3 blocks for 12 tokens"):
        alone = Request("alone", prompt(0, 10), 4)
        interleaved_generate(trained_model(), [alone], max_kv_tokens=12)
    fits = Request("alone", prompt(0, 10), 3)
    interleaved_generate(trained_model(), [fits], max_kv_tokens=12)
    assert fits.num_generated == 3
    with raises(ValueError, "unknown policy 'lifo'"):
        interleaved_generate(trained_model(), [], policy="lifo")


def test_interleaved_generate_uses_what_it_is_given():
    """
    Would catch: a policy or a budget that is taken and does nothing, fewer rows than requests.
    """
    requests = [Request(i, prompt(i, 6), 3, arrival_time=float(i)) for i in range(3)]
    scheduler = interleaved_generate(trained_model(), requests, "priority", 5, 48)
    assert scheduler.queue_key is POLICIES["priority"] and scheduler.token_budget == 5
    assert (scheduler.block_allocator.num_blocks, scheduler.max_num_seqs) == (12, 3)


def test_interleaved_generate_samples_by_params():
    """Would catch: greedy for all, the noise of another request, row or position."""
    model = trained_model()
    params = mixed_params(10, 5)
    prompts = [prompt(20 + i, 5 + 3 * i) for i in range(5)]
    requests = [Request(i, prompts[i], 10, params=params[i]) for i in range(5)]
    scheduler = interleaved_generate(model, requests, max_kv_tokens=56)
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert_equals_dense(model, request.prompt_tokens, request.generated_tokens, request.params)


def test_the_flat_batch_is_the_runners():
    """The one made of lists, to be read, and the one made on the device: decodes and chunks."""
    model = trained_model()
    scheduler = Scheduler(token_budget=12)
    runner = Runner(model, Settings(max_num_seqs=256, num_blocks=64, block_size=4, token_budget=12))
    for i, length in enumerate((3, 6, 14)):
        scheduler.add_request(Request(i, prompt(i, length), 9))
    kinds = set()
    for step in range(5):
        plan = scheduler.plan(step)
        if plan.admitted:
            runner.fill_rows(*plan.admitted)
        kinds.add((len(plan.decodes), len(plan.chunks)))
        ours = flat_batch(plan, model, runner.pool)
        chunk_tokens = sum(n for _, n in plan.chunks)
        shape = inputs.StepShape(len(plan.decodes), len(plan.chunks), chunk_tokens)
        packed = inputs.pack(plan, shape, runner.padding_row, runner.pool.sink)
        step_inputs = inputs.split(inputs.upload(packed, runner.device), shape)
        theirs = inputs.lay_out(step_inputs, shape, plan, runner.known, ours.ops)
        sampled = [i for i, (r, _) in enumerate(plan.work) if r in plan.sampled]
        assert torch.equal(ours.logits_index, theirs.logits_index[sampled])
        for name in ("tokens", "positions", "slot_mapping", "query_start", "context_lens"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        M = theirs.block_tables.shape[1]
        assert torch.equal(ours.block_tables[:, :M], theirs.block_tables)
        for name in ("num_decodes", "query_lens_host", "context_lens_host"):
            assert getattr(ours, name) == getattr(theirs, name), name
        tokens = list(range(len(plan.sampled)))
        for request, token in zip(plan.sampled, tokens, strict=True):
            runner.known.last_token[request.row] = token
        scheduler.update(plan, tokens)
    assert any(decodes and chunks for decodes, chunks in kinds)
