"""
Blocks, the prefix cache and the scheduler on tiny pools. This covers what test_paged.py (literal
block ids) and the simulator (random lives of the engine) do not: the bytes of a key, how a step's
budget is shared, the cost of a step, and that `Scheduler.check` can fail.
"""

import sys
from hashlib import sha256
from timeit import repeat

import pytest

import paged
from paged import (
    PRIORITY_AGEING,
    BlockAllocator,
    CachedBlock,
    Request,
    Scheduler,
    SchedulerSettings,
    block_key,
    priority_delay,
    root_key,
)
from test_paged import raises, serve_alone, step

# --------------------------------------------------------------------------------------------------
# The prefix cache


def test_keys_are_sha256_over_the_parents_key_and_the_tokens_as_64_bit_integers():
    """
    Different prefixes would get the same key if it left out its parent, or cut tokens to 16 bits.
    """
    root = root_key("pepper")
    assert root == sha256(b"pepper").digest()
    key = block_key(root, (1, 2, 65_536, 50_256))
    words = bytes.fromhex("0100000000000000 0200000000000000 0000010000000000 50c4000000000000")
    assert key == sha256(root + words).digest()
    assert key.hex() == "ac48f1d1d1c1c3a912955e810ee87340b20eeaed48d0bc4d3ed044e111385a9e"
    # half a character, which JSON can contain, is a salt like any other
    assert root_key("\ud800") != root_key("\ud801")


# --------------------------------------------------------------------------------------------------
# The scheduler


def new_scheduler(*requests: Request, block_size=4, token_budget=16, **settings) -> Scheduler:
    settings = SchedulerSettings(**settings)
    scheduler = Scheduler("fcfs", token_budget, 256, block_size, settings=settings)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


# name: length of the prompt; the settings; then the chunks of each step, beside a decode
PROMPTS_SHARE = {"b": 12, "c": 12, "d": 12}, {"max_num_partial_prefills": 2}
LONG_PROMPTS = {"b": 30, "c": 16, "d": 9}, {"long_prefill_threshold": 10}


@pytest.mark.parametrize(
    ("prompts", "settings", "chunks"),
    [
        (*PROMPTS_SHARE, "b5 c4, b5 c4, b2 c4 d3, d9, "),
        # c waits for b, which is also long, and gets what the others leave over; d does not wait
        (*LONG_PROMPTS, "b5 d4, b5 d4, b5 d1 c3, b9, b6 c3, c9, c1, "),
        # the cache has 12 of its 16 tokens, so c is not long
        ({"b": 30, "again": 16}, {"long_prefill_threshold": 10}, "b5 again4, b9, b9, b7, "),
    ],
    ids=["in even shares", "long ones in turn", "long but cached"],
)
def test_prompts_share_what_decodes_leave_of_the_budget(prompts, settings, chunks):
    """Otherwise one long prompt at the head of the queue would delay every short one after it."""
    scheduler = new_scheduler(Request("again", [ord("a")] * 16, 1), token_budget=10, **settings)
    while not scheduler.is_done():
        step(scheduler)
    decode = Request("decode", [1], 99)
    scheduler.add_request(decode)
    step(scheduler)
    for name, length in prompts.items():
        scheduler.add_request(Request(name, [ord(name[0])] * length, 1))
    for expected in chunks.split(","):
        plan = step(scheduler)
        assert plan.decodes == [decode]
        assert [f"{r.id}{n}" for r, n in plan.chunks] == expected.split()


def test_no_priority_outweighs_age():
    """
    Previously -2**63 went before all others for 10**13 years. Now any two priorities, in their
    order, are less than 480 s apart. A server drops requests that are older than 600 s.
    """
    scheduler = Scheduler("priority", settings=SchedulerSettings(max_num_seqs=1))
    scheduler.add_request(Request("old", [1], 1, priority=10**400))
    for when in 1, 479, 480:
        urgent = {"arrival_time": float(when), "priority": -(10**400)}
        scheduler.add_request(Request(when, [1], 1, **urgent))
    assert [step(scheduler).admitted[0].id for _ in range(4)] == [1, 479, "old", 480]
    requests = [Request(priority, [1], 1, priority=priority) for priority in range(-1000, 1001)]
    delays = [priority_delay(r) for r in requests]
    assert delays == sorted(set(delays))
    assert delays[-1] < PRIORITY_AGEING


def test_update_wants_one_token_for_each_sampled_request():
    scheduler = new_scheduler(Request("a", [1], 1))
    plan = scheduler.plan()
    for tokens in [], [1, 2]:
        with raises(ValueError, "for a plan that samples 1"):
            scheduler.update(plan, tokens)
    assert len(scheduler.update(plan, [1])) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "lifo"}, "unknown policy 'lifo': choose one of fcfs, priority, sjf"),
        ({"token_budget": 0}, "token_budget is 0, wanted at least 1"),
        ({"max_kv_tokens": 3}, "max_kv_tokens is 3, wanted at least 1 block of 4"),
    ],
)
def test_a_scheduler_that_could_never_run_a_request_is_refused(arguments, message):
    with raises(ValueError, message):
        Scheduler(**arguments)
    assert serve_alone(Scheduler("fcfs", 1, 4), "r", [1, 2, 3], 2).num_generated == 2


# --------------------------------------------------------------------------------------------------
# The cost of a step


def lines_executed(function) -> int:
    """
    Return how many lines of paged.py a call runs. Unlike time, this is the same on every machine.
    """
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != paged.__file__:  # a hook of the garbage collector
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_allocate_and_free_cost_the_same_in_a_pool_of_any_size():
    """
    Searching the free list, or popping from its front, would make each block of a large pool slower
    than the model.
    """
    seconds = []
    for num_blocks in 16, 100_000:
        allocator = BlockAllocator(num_blocks, 1)
        table = allocator.allocate_n(num_blocks)
        for block in table[::2]:
            allocator.block_cache.insert(block, CachedBlock(b"%d" % block, b"", (block,)))
        allocator.free_blocks_for_request(table)
        allocator.allocate_n(num_blocks // 2)  # from here on every allocation evicts

        def use(allocator=allocator):
            allocator.free_blocks_for_request(allocator.allocate_n(8))

        seconds.append(min(repeat(use, number=1, repeat=200)))
    assert seconds[1] < 20 * seconds[0]  # a search would take hundreds of times as long


def test_a_step_of_256_decodes_costs_the_same_at_any_context_length_and_little():
    """
    A plan that looks at whole block tables, or copies whole texts, grows with the context. At 0.15
    ms per step that soon exceeds the model's time.
    """
    counts = []
    for context in 17, 1025:
        settings = SchedulerSettings(max_num_seqs=256)
        budget = 256 * context
        scheduler = Scheduler("fcfs", budget, budget + 256 * 512, 16, settings=settings)
        for i in range(256):
            scheduler.add_request(Request(i, [i] * context, 500))
        scheduler.update(scheduler.plan(), [0] * 256)

        def one_step(scheduler=scheduler):
            scheduler.update(scheduler.plan(), [0] * 256)

        counts.append([lines_executed(one_step) for _ in range(16)])
    assert counts[0] == counts[1]
    assert min(counts[0]) <= 256 * 20  # lines per request when no block is full


# --------------------------------------------------------------------------------------------------
# `check`, on which all tests rely


SABOTAGE = """
allocator.free.pop()                                        | are not the pool's 128
allocator.ref_counts[0] += 1                                | reference counts say
b.block_table[-1] = a.block_table[-1]                       | reference counts say
allocator.free.append(allocator.idle.popitem()[0])          | committed but not in any block table
allocator.idle[allocator.free.pop()] = None                 | committed but not in any block table
cache.contents[0] = cache.contents[0]._replace(tokens=(9, 9)) | is not the hash of its parent
scheduler.free_rows.pop()                                   | rows lost or shared
a.num_filled_slots -= 1                                     | slots
scheduler.waiting.append(a)                                 | but on the waiting list
plan.chunks = [(b, 1)]                                      | 3 tokens planned, budget 2
plan.decodes, plan.chunks = [a], [(b, 0)]                   | to compute nothing
plan.decodes = [scheduler.fork(a, "fork")]                  | writes shared block
cache.insert(b.block_table[-1], content)                    | writes committed block
"""


@pytest.mark.parametrize("line", SABOTAGE.strip().splitlines())
def test_check_notices(line):
    sabotage, message = line.split("|")
    scheduler = new_scheduler(block_size=2, token_budget=2, prefill_share=0)
    serve_alone(scheduler, "done", [8, 8, 8])
    a, b = Request("a", [1, 2], 9), Request("b", [4, 5], 9)
    scheduler.add_request(a)
    scheduler.add_request(b)
    while len(scheduler.active) < 2:
        step(scheduler)
    plan = scheduler.plan()
    scheduler.check(plan)
    names = {"allocator": scheduler.block_allocator, "cache": scheduler.block_cache}
    content = CachedBlock(block_key(b"", (0, 0)), b"", (0, 0))
    exec(sabotage.strip(), globals() | names | locals())
    with raises(AssertionError, message.strip()):
        scheduler.check(plan)
