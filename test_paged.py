"""
Proof that paged attention changes where K and V are stored, but not a single token in any answer.

    python test_paged.py        # a line per test; needs torch, numpy, safetensors, tokenizers
    pytest test_paged.py        # the same tests

There are three parts, each of which builds on the previous one: who owns which block, which
requests are computed when, and a comparison of the whole engine with the dense model. The first two
parts do not use a model. The dense model does not have a cache, so it recomputes the whole text for
each token.

The block size is 4 almost everywhere, and pools have only a few blocks, so that tests can name
block ids. Before a model runs, the pool is filled with NaN and its free blocks are shuffled. So a
test fails if a request reads a slot that was never written, or another request's block.
"""

import gc
import random
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from signal import SIG_DFL, SIGPIPE, signal
from types import FunctionType, MethodType, ModuleType

from common import end_with_one_line

if __name__ == "__main__":
    end_with_one_line()
    signal(SIGPIPE, SIG_DFL)  # its reader may end first, as in `| head`

import torch

from engine.device import Device, PackedPlan
from engine.engine import Engine
from engine.runner import Runner
from engine.step import Answer
from interleaved import interleaved_generate
from model import GPT, GPTConfig
from ops.sampling import gumbel_noise, threshold
from paged import BlockAllocator, Plan, Request, Scheduler, SchedulerSettings, root_key
from params import GREEDY, SamplingParams, Settings

# --------------------------------------------------------------------------------------------------
# Shared by the tests


@contextmanager
def raises(kind: type[Exception], *parts: str):
    """
    Assert that the body raises `kind` with a message that contains all `parts`. This replaces
    pytest.raises, so that the file also runs without pytest.
    """
    try:
        yield
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        assert not missing, f"{missing} is not in the message: {error}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def step(scheduler: Scheduler) -> Plan:
    """Run a step without a model. Every sampled token is 1000 + the request's length."""
    plan = scheduler.plan()
    scheduler.check(plan)
    scheduler.update(plan, [1000 + r.num_tokens for r in plan.sampled])
    scheduler.check()
    return plan


def serve_alone(
    scheduler: Scheduler, id, prompt: list[int], max_new_tokens: int = 1, **fields
) -> Request:
    """Add a request and run the scheduler until it is idle."""
    request = Request(id, prompt, max_new_tokens, **fields)
    scheduler.add_request(request)
    while not scheduler.is_done():
        step(scheduler)
    return request


VOCABULARY = 32
PERIOD = 13
CONTEXT = 64


def echo_text(count: int, length: int, noise: float, generator: torch.Generator) -> torch.Tensor:
    """
    Return texts of random letters that repeat every PERIOD letters, so that a model must look far
    back to predict the next letter.
    """
    letters = torch.randint(VOCABULARY, (count, PERIOD), generator=generator)
    texts = letters[:, torch.arange(length) % PERIOD]
    other = torch.randint(VOCABULARY, texts.shape, generator=generator)
    return torch.where(torch.rand(texts.shape, generator=generator) < noise, other, texts)


def untrained_model(num_kv_heads: int) -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = {"n_head": 4, "n_kv_head": num_kv_heads}
        return GPT(GPTConfig(VOCABULARY, CONTEXT, n_layer=2, n_embd=64, **heads))


@cache
def train(num_kv_heads: int) -> GPT:
    """Train a small GPT to look back PERIOD tokens, which takes two seconds."""
    model = untrained_model(num_kv_heads)
    steps = 110
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (i + 1) / 40, 3 * (steps - i) / steps)
        text = echo_text(16, CONTEXT + 1, 0.1, generator)
        _, loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def trained_model(num_kv_heads: int = 2, eos_token_id: int | None = None) -> GPT:
    """
    Return the tests' model, which has four query heads and, by default, two KV heads. Its answers
    depend on tokens three or four blocks back, so a wrong block table, mask or position changes
    them. (An untrained model would repeat one token, no matter what is in its cache.) If an
    `eos_token_id` is given, return a copy with this end-of-text token.
    """
    model = train(num_kv_heads)
    if eos_token_id is None:
        return model
    copy = GPT(replace(model.config, eos_token_ids=(eos_token_id,))).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def prompt(seed: int, length: int) -> list[int]:
    return echo_text(1, length, 0.0, torch.Generator().manual_seed(seed))[0].tolist()


def mixed_params(max_tokens: int, count: int, first: int = 0) -> list[SamplingParams]:
    """
    Return greedy, sampled and filtered parameters in turn, so that every batch mixes all three. A
    greedy answer shows that the right slots were read. A sampled answer also shows that the numbers
    are right, because several tokens always have similar scores.
    """
    kinds = [
        GREEDY,
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.4, top_k=12, top_p=0.97, min_p=0.01),
    ]
    return [
        replace(kinds[i % 3], max_tokens=max_tokens, seed=7 - 5 * i)
        for i in range(first, first + count)
    ]


def scores(params: SamplingParams, logits: torch.Tensor, position: int) -> torch.Tensor:
    """
    Return the scores (1, V) whose maximum is the token at `position`: the filtered logits plus the
    request's own noise.
    """
    if params.temperature == 0:
        return logits
    filters = [torch.tensor([x]) for x in (params.top_k, params.top_p, params.min_p)]
    counter = [torch.tensor([x]) for x in (params.seed, position, 0)]
    noise = gumbel_noise(*counter, logits.shape[-1])
    scores = logits / params.temperature
    return scores.masked_fill(scores < threshold(scores, *filters), -torch.inf) + noise


compared = {"tokens": 0, "ties": 0}


def assert_equals_dense(
    model: GPT, prompt_tokens: list[int], answer: list[int], params: SamplingParams
):
    """
    Assert that the answer equals the dense model's. If the two highest scores are within 1e-4 of
    each other, rounding may decide between them. Such ties are counted, and the comparison
    continues from the engine's choice.
    """
    text = list(prompt_tokens)
    full = text + answer
    while len(text) < len(full):
        reference = model.generate(
            torch.tensor([text]),
            len(full) - len(text),
            lambda logits, position: scores(params, logits, position).argmax(-1),
        )[0].tolist()
        if reference == full:
            break
        first = next(i for i, (a, b) in enumerate(zip(reference, full, strict=True)) if a != b)
        with torch.no_grad():
            choice = scores(params, model(torch.tensor([full[:first]]))[0][:, -1], first)[0]
        gap = (choice[reference[first]] - choice[full[first]]).item()
        expected = reference[len(prompt_tokens) :]
        got = full[len(prompt_tokens) :]
        assert gap <= 1e-4, (
            f"token {first} of the text differs (by {gap:.4f} in score): dense {expected}, paged "
            f"{got}"
        )
        compared["ties"] += 1
        text = full[: first + 1]
    compared["tokens"] += len(answer)


def poison(device: Device, scheduler: Scheduler):
    """
    Fill every slot with NaN, and shuffle the free blocks, so that the first request does not simply
    get block 0.
    """
    device.pool.kv.fill_(torch.nan)
    random.Random(3).shuffle(scheduler.block_allocator.free)


def new_engine(model: GPT, **settings) -> Engine:
    sizes = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "token_budget": 64}
    engine = Engine(model, Settings(**({"check": True} | sizes | settings)))
    engine.reference = model  # the model to compare answers with
    poison(engine.device, engine.scheduler)
    return engine


def reachable_requests(engine: Engine, *beyond) -> list[Request]:
    """
    Return all requests that can be reached from the engine's data, without following functions,
    methods, or the objects in `beyond`.
    """
    code = type | ModuleType | FunctionType | MethodType
    seen = {id(thing): thing for thing in beyond}  # keeps objects alive, so that ids stay unique
    things = [engine]
    while things:
        for thing in gc.get_referents(things.pop()):
            if id(thing) not in seen and not isinstance(thing, code):
                seen[id(thing)] = thing
                things.append(thing)
    return [thing for thing in seen.values() if isinstance(thing, Request)]


def assert_idle(engine: Engine):
    """
    Assert that nothing has leaked: the engine does not hold any requests, rows or references, and
    the whole pool can be allocated.
    """
    scheduler = engine.scheduler
    allocator = scheduler.block_allocator
    scheduler.check()
    assert not engine.requests and scheduler.is_done(), f"{list(engine.requests)} are left"
    assert not engine.promised, "choices are left"
    kept = reachable_requests(engine)
    # one request is allowed, because a loop variable may still refer to the last request
    assert len(kept) <= 1, f"besides the last request, the engine keeps {kept}"
    assert sorted(scheduler.free_rows) == list(range(scheduler.max_num_seqs)), "a row was lost"
    assert sum(allocator.ref_counts) == 0, "references leaked"
    assert allocator.num_free == allocator.num_blocks, "blocks leaked"


def serve(
    engine: Engine, prompts: list[list[int]], max_tokens: int, first: int = 0
) -> list[list[int]]:
    """
    Answer all prompts, some of them greedily and some by sampling. Assert that every answer is
    complete and equals the dense model's.
    """
    params = mixed_params(max_tokens, len(prompts), first)
    answers = engine.generate(prompts, params, progress=False)
    for tokens, answer, p in zip(prompts, answers, params, strict=True):
        assert len(answer) == max_tokens, f"{len(answer)} tokens, wanted {max_tokens}"
        assert_equals_dense(engine.reference, tokens, answer, p)
    assert_idle(engine)
    return answers


# --------------------------------------------------------------------------------------------------
# 1. Blocks: free, referenced, or idle (cached)


def test_blocks_are_handed_out_taken_back_and_run_out():
    """
    Would catch: a block that is allocated twice or lost; an allocation of the padding block; a
    failed allocation that keeps some of the blocks.
    """
    allocator = BlockAllocator(num_blocks=4, block_size=4)
    assert allocator.allocate_n(3) == [0, 1, 2]
    allocator.free_blocks_for_request([1])
    assert allocator.allocate_one() == 1, "the block freed last is allocated next"
    allocator.free_blocks_for_request([0, 1, 2])
    assert allocator.allocate_n(2) == [0, 1], "the head is freed last, so it is allocated first"
    with raises(RuntimeError, "wanted 3", "available 2 of 4"):
        allocator.allocate_n(3)
    assert allocator.num_free == 2, "a failed allocation does not take any blocks"
    assert allocator.allocate_n(2) == [2, 3]
    with raises(RuntimeError, "wanted 1", "available 0 of 4"):
        allocator.allocate_one()
    allocator.free_blocks_for_request([0, 1, 2, 3])
    with raises(ValueError, "block 2 is freed twice"):
        allocator.free_blocks_for_request([2])


def test_life_of_a_shared_prefix():
    """
    Would catch: a hit that does not add a reference, so that the first request to finish frees
    blocks that the second still reads; a parent block that is evicted before its child, so that the
    child can never be found again; a finished request that does not free its blocks.
    """
    scheduler = Scheduler(max_kv_tokens=24)  # six blocks
    allocator = scheduler.block_allocator
    a = Request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    b = Request("b", [1, 2, 3, 4, 5, 6, 7, 8, 50], 3)
    scheduler.add_request(a)
    step(scheduler)
    assert a.block_table == [0, 1, 2]
    assert a.generated_tokens == [1009]

    scheduler.add_request(b)
    plan = step(scheduler)
    assert b.block_table == [0, 1, 3]
    assert allocator.ref_counts == [2, 2, 1, 1, 0, 0]
    assert plan.decodes == [a] and plan.chunks == [(b, 1)], "8 of b's 9 tokens were cached"

    step(scheduler)
    assert a.status == "done"
    assert allocator.ref_counts == [1, 1, 0, 1, 0, 0], "b still reads blocks 0 and 1"
    step(scheduler)
    assert b.status == "done"
    assert allocator.ref_counts == [0] * 6
    assert allocator.num_free == 6
    assert list(allocator.idle) == [1, 0], "full blocks stay cached; the tail is evicted first"

    assert allocator.allocate_n(4) == [3, 2, 4, 5], "free blocks are allocated first"
    assert allocator.evicted == []
    assert allocator.allocate_n(2) == [1, 0], "then idle blocks, the least recently used first"
    assert allocator.evicted == [1, 0]
    assert not scheduler.block_cache.contents
    assert not scheduler.block_cache.block_of


def test_least_recently_used_block_is_evicted_first():
    """
    Would catch: a hit that does not count as a use, so that even a prefix shared by all requests is
    evicted.
    """
    scheduler = Scheduler(max_kv_tokens=12)  # three blocks
    allocator = scheduler.block_allocator
    serve_alone(scheduler, "a", [1, 2, 3, 4, 5])  # block 0 stays cached
    serve_alone(scheduler, "b", [6, 7, 8, 9, 10])  # and so does block 1
    assert list(allocator.idle) == [0, 1]
    assert allocator.free == [2]
    assert serve_alone(scheduler, "a again", [1, 2, 3, 4, 11]).num_hit_tokens == 4
    assert list(allocator.idle) == [1, 0]
    assert allocator.allocate_n(2) == [2, 1], "the free block, then b's, as a's was used later"


def test_a_block_is_findable_only_once_it_is_computed():
    """
    Would catch: blocks that are committed on allocation, so that an identical request reads K and V
    that do not exist yet; generated tokens that are never cached; two blocks with the same key, one
    of which leaks.
    """
    scheduler = Scheduler(max_kv_tokens=32, token_budget=32)
    cache = scheduler.block_cache
    twins = [Request("a", list(range(9)), 4), Request("b", list(range(9)), 4)]
    for request in twins:
        scheduler.add_request(request)
    plan = scheduler.plan()
    assert [r.block_table for r in twins] == [[0, 1, 2], [3, 4, 5]], "there is nothing to share yet"
    assert not cache.contents, "nothing has been computed, so nothing may be found"
    scheduler.update(plan, [1009, 1009])
    assert list(cache.contents) == [0, 1], "only full blocks, and one per key"
    while not scheduler.is_done():
        step(scheduler)
    assert {block: content.tokens for block, content in cache.contents.items()} == {
        0: (0, 1, 2, 3),
        1: (4, 5, 6, 7),
        2: (8, 1009, 1010, 1011),
    }, "blocks from both the prompt and the answer"


def test_a_block_is_found_only_after_the_same_prefix():
    """
    Would catch: a key that ignores the parent or the salt; a lookup that trusts the hash without
    comparing the contents.
    """
    scheduler = Scheduler(max_kv_tokens=64)
    one = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    two = [11, 12, 13, 14, 5, 6, 7, 8, 9]  # the second block is the same
    for expected in (0, 8):
        hits = [serve_alone(scheduler, "again", tokens).num_hit_tokens for tokens in (one, two)]
        assert hits == [expected, expected], f"{hits} of the first eight tokens were cached"
    assert len(scheduler.block_cache.contents) == 4, "two of these have tokens 5, 6, 7, 8"
    assert serve_alone(scheduler, "other user", one, cache_salt="secret").num_hit_tokens == 0
    assert serve_alone(scheduler, "same user", one, cache_salt="secret").num_hit_tokens == 8
    assert root_key("salt") != root_key("pepper") != root_key()

    cache = scheduler.block_cache
    content = cache.contents[0]
    assert cache.lookup(content) == 0
    assert cache.lookup(content._replace(tokens=(1, 2, 3, 5))) is None, "a hash collision"
    assert cache.lookup(content._replace(parent=bytes(32))) is None


def test_a_prompt_found_whole_still_computes_its_last_block():
    """
    Would catch: a whole prompt that is taken from the cache, so that nothing is computed and there
    are no logits.
    """
    scheduler = Scheduler(max_kv_tokens=64)
    serve_alone(scheduler, "first", [1, 2, 3, 4, 5, 6, 7, 8], 2)
    again = Request("again", [1, 2, 3, 4, 5, 6, 7, 8], 2)
    scheduler.add_request(again)
    plan = step(scheduler)
    assert again.num_hit_tokens == 4
    assert plan.chunks == [(again, 4)]
    assert plan.sampled == [again]
    assert again.block_table[0] == 0 and again.block_table[1] != 1, "its second block is its own"


def test_forks_share_blocks_and_copy_the_last_on_write():
    """
    Would catch: two requests that write to the same partial block; a block that is copied although
    it is full; a child that shares its parent's list of tokens or of blocks.
    """
    scheduler = Scheduler(max_kv_tokens=24)
    allocator = scheduler.block_allocator
    parent = Request("parent", [1, 2, 3, 4, 5, 6], 6)
    scheduler.add_request(parent)
    with raises(ValueError, "waiting", "only an active request can be forked"):
        scheduler.fork(parent, "too early")
    step(scheduler)
    child = scheduler.fork(parent, "child")
    child.generated_tokens[-1] = 77
    assert parent.block_table == child.block_table == [0, 1]
    assert allocator.ref_counts == [2, 2, 0, 0, 0, 0]

    plan = step(scheduler)
    assert plan.copies == {2: 1}, "the first request to write copies block 1"
    assert parent.block_table == [0, 2]
    assert child.block_table == [0, 1]
    assert allocator.ref_counts == [2, 1, 1, 0, 0, 0]
    step(scheduler)
    # eight slots are filled, so the next token starts a new block
    grandchild = scheduler.fork(child, "grandchild")
    plan = step(scheduler)
    assert plan.copies == {}
    assert scheduler.num_copies == 1
    assert [r.block_table for r in (parent, child, grandchild)] == [[0, 2, 3], [0, 1, 4], [0, 1, 5]]
    while not scheduler.is_done():
        step(scheduler)
    assert parent.generated_tokens[0] == 1006
    assert child.generated_tokens[0] == 77
    assert allocator.num_free == 6

    full = Scheduler(max_kv_tokens=24, settings=SchedulerSettings(max_num_seqs=1))
    only = Request("only", [1, 2, 3], 4)
    full.add_request(only)
    step(full)
    with raises(RuntimeError, "wanted 1 row", "available 0 of 1"):
        full.fork(only, "second")


# --------------------------------------------------------------------------------------------------
# 2. The scheduler: admission, waiting, preemption


def test_admission_at_the_edge_of_the_pool():
    """
    Would catch: shared blocks that are counted as if they had to be allocated; an idle block that
    is a hit but is also counted as free; a request that is not admitted but keeps blocks.
    """
    scheduler = Scheduler(max_kv_tokens=16)  # four blocks
    allocator = scheduler.block_allocator
    prefix = [1, 2, 3, 4, 5, 6, 7, 8]
    first, second, third = (Request(i, [*prefix, 50 + i], 4) for i in range(3))
    scheduler.add_request(first)
    step(scheduler)
    scheduler.add_request(second)
    scheduler.add_request(third)
    step(scheduler)
    assert second.block_table == [0, 1, 3], "with two of its three blocks shared, it fits exactly"
    assert third.status == "waiting"
    assert allocator.num_free == 0
    assert allocator.ref_counts == [2, 2, 1, 1]
    while not scheduler.is_done():
        step(scheduler)
    assert third.num_generated == 4
    assert allocator.num_free == 4

    scheduler = Scheduler(max_kv_tokens=16)
    serve_alone(scheduler, "first", [*prefix, 9])  # blocks 0 and 1 are cached and idle
    scheduler.add_request(Request("small", [100, 101], 2))
    step(scheduler)
    # two of its blocks are cached and it needs two more, but only one is left
    large = Request("large", [*prefix, *range(10, 18)], 1)
    scheduler.add_request(large)
    assert scheduler.plan().admitted == []
    assert large.status == "waiting"

    scheduler = Scheduler(max_kv_tokens=16)
    serve_alone(scheduler, "first", [*prefix, 9])
    large = serve_alone(scheduler, "large", [*prefix, *range(10, 18)], 1)
    assert large.num_generated == 1 and large.num_hit_tokens == 8, "on its own, it fits exactly"


def test_a_request_that_does_not_fit_waits_and_keeps_its_place():
    """
    Would catch: small requests that keep overtaking the head of the queue; a watermark that keeps a
    request out even if no other is running; more rows in use than max_num_seqs.
    """
    scheduler = Scheduler(max_kv_tokens=16)
    lengths = (9, 6, 2)  # 3, 2, 1 blocks
    requests = [Request(i, [10 * i + j for j in range(n)], 2) for i, n in enumerate(lengths)]
    for request in requests:
        scheduler.add_request(request)
    step(scheduler)
    # the last request would fit, but must not overtake the second
    assert [r.status for r in requests] == ["active", "waiting", "waiting"]
    step(scheduler)
    assert requests[0].status == "done", "its blocks are free now"
    assert scheduler.plan().admitted == requests[1:]

    for watermark, admitted in ((1, True), (2, False)):
        scheduler = Scheduler(max_kv_tokens=16, settings=SchedulerSettings(watermark=watermark / 4))
        serve_alone(scheduler, "alone, the watermark does not matter", list(range(16)))
        scheduler.add_request(Request("running", [1, 2], 4))
        step(scheduler)
        # needs two of the three blocks that are left
        scheduler.add_request(Request("new", [21, 22, 23, 24, 25], 2))
        assert bool(scheduler.plan().admitted) == admitted

    scheduler = Scheduler(settings=SchedulerSettings(max_num_seqs=2))
    for i in range(3):
        scheduler.add_request(Request(i, [i + 1, 7], 2))
    assert len(scheduler.plan().admitted) == 2


def test_preemption_block_by_block():
    """
    Would catch: the wrong victim; a preempted request that keeps its blocks, is readmitted in the
    same step, loses its tokens, or samples before its generated tokens have been recomputed.
    """
    scheduler = Scheduler(max_kv_tokens=16)  # four blocks for two requests that need three each
    allocator = scheduler.block_allocator
    a = Request("a", [1, 2, 3, 4, 5, 6, 7], 5)
    b = Request("b", [11, 12, 13, 14, 15, 16, 17], 5)
    scheduler.add_request(a)
    scheduler.add_request(b)
    step(scheduler)
    step(scheduler)
    assert a.block_table == [0, 1]
    assert b.block_table == [2, 3]
    assert allocator.num_free == 0
    plan = step(scheduler)
    assert plan.preempted == [b]
    assert plan.decodes == [a]
    assert plan.admitted == []
    # b's last block was committed and idle, and has been evicted for a; its first is still cached
    assert a.block_table == [0, 1, 3]
    assert b.status == "waiting"
    assert b.block_table == []
    assert b.row is None
    assert b.generated_tokens == [1007, 1008]
    step(scheduler)
    assert b.status == "waiting", "it needs three blocks, but only one is cached and one is free"
    step(scheduler)
    assert a.status == "done"
    assert a.generated_tokens == [1007, 1008, 1009, 1010, 1011]
    plan = step(scheduler)
    assert b.block_table == [2, 3, 1], "a hit, the block freed last, and an evicted block"
    assert b.prefill_target == 9, "seven prompt tokens and two generated ones"
    assert plan.chunks == [(b, 5)], "all except the four cached tokens"
    assert b.generated_tokens == [1007, 1008, 1009]
    while not scheduler.is_done():
        step(scheduler)
    assert b.generated_tokens == [1007, 1008, 1009, 1010, 1011]
    assert b.num_preemptions == 1
    assert allocator.num_free == 4


def test_a_request_alone_that_cannot_grow():
    """
    Would catch: a request that preempts itself forever; a limit that is off by one block or token.
    """
    scheduler = Scheduler(max_kv_tokens=12)
    fits = serve_alone(scheduler, "fits", [1, 2, 3, 4, 5, 6, 7, 8], 5)
    assert fits.num_generated == 5, "the last token does not need a slot"
    scheduler = Scheduler(max_kv_tokens=12)
    numbers = ("holds 3 of 3 blocks for 12 tokens", "wanted 1 more")
    with raises(RuntimeError, "request large cannot grow", *numbers):
        serve_alone(scheduler, "large", [1, 2, 3, 4, 5, 6, 7, 8], 6)
    scheduler.check()
    scheduler.complete(scheduler.active[0])
    assert scheduler.block_allocator.num_free == 3
    assert scheduler.is_done()

    scheduler.add_request(Request("exactly", list(range(12)), 1))
    with raises(ValueError, "needs 4 blocks for its prompt", "the pool has 3"):
        scheduler.add_request(Request("one more", list(range(13)), 1))
    with raises(ValueError, "empty prompt"):
        scheduler.add_request(Request("nothing", [], 1))


def test_a_step_shares_its_budget():
    """
    Would catch: a prompt that blocks all other requests during its prefill; decodes that starve
    prefills, or the reverse; a token budget that is exceeded or not used up.
    """
    scheduler = Scheduler(token_budget=8)
    long = Request("long", list(range(20)), 8)
    short = Request("short", [31, 32, 33], 8)
    scheduler.add_request(long)
    scheduler.add_request(short)
    assert step(scheduler).chunks == [(long, 4), (short, 3)], "even shares of 4 out of 8 tokens"
    plan = step(scheduler)
    assert plan.decodes == [short], "decodes come first"
    assert plan.chunks == [(long, 7)], "the prompt gets the rest"

    scheduler = Scheduler(token_budget=4, settings=SchedulerSettings(prefill_share=0.5))
    running = [Request(i, [40 + i], 20) for i in range(4)]
    for request in running:
        scheduler.add_request(request)
    step(scheduler)
    scheduler.add_request(Request("late", [1, 2, 3, 4, 5, 6], 1))
    assert step(scheduler).decodes == running, "decodes take this step's whole budget"
    plan = step(scheduler)
    # now the prompt has been admitted, and half of the budget is reserved for it
    assert len(plan.decodes) == 2
    assert plan.num_tokens == 4
    decoded = plan.decodes + step(scheduler).decodes
    assert sorted(r.id for r in decoded) == [0, 1, 2, 3], "the decodes take turns"


# --------------------------------------------------------------------------------------------------
# 3. The engine: every answer equals the dense model's


def test_the_reference_is_worth_comparing_with():
    """
    Would catch: tests that cannot fail because the model's answers do not depend on what is in the
    cache.
    """
    for model in (trained_model(2), trained_model(4)):
        prompts = torch.tensor([prompt(seed, 20) for seed in range(20)])
        answers = model.generate(prompts, 20)[:, 20:]
        different = {tuple(answer) for answer in answers.tolist()}
        assert len(different) == 20, "every prompt gets a different answer"
        assert min(len(set(answer)) for answer in different) >= 6, "answers have many letters"
        other = prompts.clone()  # change one letter, the eleventh from the end
        other[:, 9] = (other[:, 9] + 1) % VOCABULARY
        changed = (model.generate(other, 20)[:, 20:] != answers).any(dim=1)
        assert changed.float().mean() > 0.9, "answers depend on tokens three blocks back"


def test_alone():
    """
    Would catch: a wrong slot, position, mask or length at a block boundary; an answer that is one
    token short.
    """
    for block_size, num_blocks in ((1, 64), (4, 16), (16, 4), (64, 1)):
        engine = new_engine(trained_model(), block_size=block_size, num_blocks=num_blocks)
        for i, length in enumerate((1, 3, 4, 5, 16, 33)):
            serve(engine, [prompt(length, length)], 12, first=i)
    serve(engine, [prompt(0, 40)], CONTEXT - 40)  # up to the end of the context


def test_mixed_batches():
    """
    Would catch: a request that reads another request's blocks, or gets another request's token,
    parameters or noise.
    """
    for token_budget in (64, 24):  # 24 also splits prompts
        engine = new_engine(trained_model(), num_blocks=128, token_budget=token_budget)
        serve(engine, [prompt(i, 3 + 5 * i % 37) for i in range(20)], 15)
        assert engine.scheduler.num_preemptions == 0


def test_requests_that_arrive_while_others_run():
    """
    Would catch: a reused row that still has its previous owner's table, length, seed or parameters.
    """
    engine = new_engine(trained_model(), max_num_seqs=3)
    params = [replace(p, max_tokens=5 + i) for i, p in enumerate(mixed_params(1, 9))]
    requests = []
    for i in range(9):
        requests.append(engine.add_request(i, prompt(20 + i, 30 - 3 * i), params[i]))
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    for request, p in zip(requests, params, strict=True):
        assert request.num_generated == p.max_tokens
        assert request.finish_reason == "length"
        assert_equals_dense(trained_model(), request.prompt_tokens, request.generated_tokens, p)
    assert_idle(engine)


def test_any_number_of_kv_heads():
    """
    Would catch: a query head that reads the wrong KV head. (In the other tests, four query heads
    share two KV heads.)
    """
    engine = new_engine(trained_model(num_kv_heads=4), token_budget=16)
    serve(engine, [prompt(i, 8 + 7 * i) for i in range(5)], 12)


def count_computed(engine: Engine) -> list[int]:
    """Return a list to which each step appends how many tokens the model computes."""
    computed = []
    run = engine.device.run

    def counting(packed: PackedPlan):
        launched = run(packed)
        computed.append(len(launched.hidden))
        return launched

    engine.device.run = counting
    return computed


def test_a_prefix_hit_computes_the_remainder_and_nothing_else():
    """
    Would catch: hits that are recomputed anyway, or that skip one token too many; hits with wrong K
    and V.
    """
    model = trained_model()
    prefix = prompt(5, 21)
    for extra, hits in (([], 20), ([3], 20), ([3, 1, 4], 20), (prompt(6, 7), 20)):
        engine = new_engine(model)
        serve(engine, [prefix], 1)
        computed = count_computed(engine)
        params = mixed_params(10, 3)[1]
        request = engine.add_request("hit", prefix + extra, params)
        outputs = engine.step()
        assert computed == [len(prefix) + len(extra) - hits]
        assert outputs[0].cached_tokens == hits
        while engine.has_work:
            engine.step()
        assert computed[1:] == [1] * 9
        assert_equals_dense(model, prefix + extra, request.generated_tokens, params)
    engine = new_engine(model, prefix_cache=False)
    serve(engine, [prefix], 1)
    computed = count_computed(engine)
    engine.generate([prefix], replace(GREEDY, max_tokens=1), progress=False)
    assert computed == [21], "without the prefix cache, everything is computed"


def test_prefix_hits_of_prompts_and_answers():
    """
    Would catch: a hit on a block that has not been computed yet, or on generated tokens when the
    last one's K and V are missing.
    """
    engine = new_engine(trained_model(), token_budget=8)
    shared = prompt(9, 22)
    prompts = [shared + prompt(30 + i, 2 * i) for i in range(4)]
    answers = serve(engine, prompts, 14)  # all at once, so none has computed the shared part
    texts = [tokens + answer for tokens, answer in zip(prompts, answers, strict=True)]
    before = engine.scheduler.num_hit_tokens
    # these prompts contain parts of the answers, like the next turn of a conversation
    serve(engine, [text[: 28 + i] for i, text in enumerate(texts)], 14)
    assert engine.scheduler.num_hit_tokens - before == 24 + 28 + 28 + 28


def test_chunked_prefill():
    """
    Would catch: chunks that see too many or too few of the earlier tokens, or that start at the
    wrong position.
    """
    for token_budget, max_num_seqs in ((1, 1), (3, 2), (7, 4)):
        engine = new_engine(trained_model(), token_budget=token_budget, max_num_seqs=max_num_seqs)
        serve(engine, [prompt(i, 40 - i) for i in range(5)], 8)
        assert engine.num_steps > 5 * 36 / token_budget, "prompts are computed in chunks"


def test_preempted_and_resumed():
    """
    Would catch: a request that resumes with stale K and V, a lost or repeated token, or different
    noise.
    """
    for prefix_cache in (True, False):
        settings = {"num_blocks": 15, "token_budget": 12, "watermark": 0}
        engine = new_engine(trained_model(), prefix_cache=prefix_cache, **settings)
        serve(engine, [prompt(i, 10 + i) for i in range(8)], 30)
        assert engine.scheduler.num_preemptions >= 5
        assert engine.scheduler.peak_blocks == 15, "the pool was full"


def test_forked():
    """
    Would catch: a fork that writes to another fork's block; a copy that is incomplete, or that
    copies the wrong block.
    """
    model = trained_model()
    text = prompt(11, 13)
    for steps in range(1, 6):  # fork at every offset within a block
        scheduler = Scheduler(max_kv_tokens=256, token_budget=32)
        settings = Settings(num_blocks=64, block_size=4, max_num_seqs=256, token_budget=256)
        device = Device(model, settings)
        runner = Runner(device, settings)
        poison(device, scheduler)
        parent = Request("parent", text, 16)
        scheduler.add_request(parent)
        family = [parent]
        forked_at = {"parent": 0}
        while not scheduler.is_done():
            plan = scheduler.plan()
            scheduler.check(plan)
            launched = runner.launch(plan)
            device.send(launched)
            scheduler.advance(plan)
            scheduler.resolve(plan, runner.wait_for(launched))
            # fork twice; the second child also shares blocks that the first child shares
            if parent.num_generated in (steps, steps + 1):
                child = scheduler.fork(parent, f"child {len(family)}")
                other = child.generated_tokens[-1] + len(family)  # continue with another token
                child.generated_tokens[-1] = other % VOCABULARY
                device.fill_rows(child)
                family.append(child)
                forked_at[child.id] = child.num_generated
        assert len(family) == 3
        assert scheduler.num_copies >= 1
        for request in family:
            own = forked_at[request.id]
            start = text + request.generated_tokens[:own]
            answer = request.generated_tokens[own:]
            assert len(answer) == 16 - own
            assert_equals_dense(model, start, answer, GREEDY)
        assert scheduler.block_allocator.num_free == 64


def test_the_same_call_twice_on_one_engine():
    """
    Would catch: leftovers from the first call, such as stale rows, old K and V in reused blocks, or
    wrong hits in a warm cache.
    """
    engine = new_engine(trained_model(), num_blocks=40, max_num_seqs=4)
    prompts = [prompt(40 + i, 12 + i) for i in range(6)]
    first = serve(engine, prompts, 10)
    assert engine.scheduler.num_hit_tokens == 0
    second = serve(engine, prompts, 10)
    assert second == first and engine.scheduler.num_hit_tokens > 6 * 8, "the cache was warm"
    serve(engine, [prompt(80 + i, 25) for i in range(12)], 10)
    num_hit_tokens = engine.scheduler.num_hit_tokens
    assert serve(engine, prompts, 10) == first
    assert engine.scheduler.num_hit_tokens == num_hit_tokens, "blocks were recycled"


def test_a_full_pool_serves_every_request():
    """
    Would catch: a deadlock or a wrong answer when many requests wait for a pool that has room for
    only two or three of them.
    """
    engine = new_engine(trained_model(), num_blocks=12, token_budget=16)
    serve(engine, [prompt(60 + i, 5 + 2 * i) for i in range(14)], 12)
    exactly = prompt(1, 38)
    serve(engine, [exactly], 10)  # 48 slots: the whole pool
    with raises(ValueError, "39 prompt tokens + 10 max_tokens = 49", "48", "12 blocks of 4"):
        engine.generate([prompt(1, 39)], replace(GREEDY, max_tokens=10), progress=False)
    assert_idle(engine)


def test_interleaved_generate_of_the_tutorial():
    """
    Would catch: answers from the post's loop that differ from the dense model's, for example after
    a preemption, or because the loop uses another request's parameters.
    """
    model = trained_model()
    requests = [Request(0, prompt(70, 9), 12)]  # without parameters, so it is greedy
    for i, p in enumerate(mixed_params(12, 4), 1):
        requests.append(Answer(i, prompt(70 + i, 9 + 4 * i), 12, arrival_time=i, params=p))
    scheduler = interleaved_generate(model, requests, token_budget=16, max_kv_tokens=48)
    assert scheduler.num_preemptions > 0
    assert scheduler.is_done()
    for r in requests:
        assert r.num_generated == 12
        assert r.status == "done"
        assert_equals_dense(
            model, r.prompt_tokens, r.generated_tokens, getattr(r, "params", GREEDY)
        )


def main():
    torch.set_num_threads(1)  # the tensors are tiny
    tests = {name: test for name, test in globals().items() if name.startswith("test_")}
    failed = []
    for name, test in tests.items():
        started = time.perf_counter()
        try:
            test()
        except Exception as error:  # an assertion or a crash; still run the other tests
            failed.append(name)
            print(f"FAIL {name}: {type(error).__name__}: {error}")
        else:
            print(f"ok   {name}  {time.perf_counter() - started:.2f} s", flush=True)
    passed = f"{len(tests) - len(failed)} of {len(tests)} passed"
    print(f"{passed}; {compared['tokens']:,} tokens equal the dense model's;")
    print(f"{compared['ties']} of them were ties within 1e-4, where rounding may choose either one")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
