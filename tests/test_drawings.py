"""
What docstrings draw is what the code does: their numbers are read from the drawing and found again
in a run. (The examples in docstrings are run by test_kernels.py.)
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from test_kernels import Shape, Step

import kernels
import paged
from kernels import decode_kernel
from model import GPT, GPTConfig
from paged import TO_COME, Request, Scheduler
from serving.engine import Engine
from serving.params import SamplingParams


def numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def test_the_ruler_of_cursors():
    """With overlap, between two steps: what is computed, under way and still to come."""
    drawn = {line.split()[0]: line for line in Request.__doc__.splitlines() if line.strip()}
    request = Request("r", [1, 2, 3, 4, 5, 6], 9)
    scheduler = Scheduler(max_kv_tokens=48, block_size=4)
    # the blocks that are handed out first are those of the drawing
    free = scheduler.block_allocator.free
    free.sort(key=[*numbers(drawn["block"])].__contains__)
    free[-3:] = reversed(numbers(drawn["block"]))
    scheduler.add_request(request)
    under_way = None
    while request.num_filled_slots < 10:
        plan = scheduler.plan()
        scheduler.advance(plan)
        if under_way:
            scheduler.resolve(under_way, [50] * len(under_way.sampled))
        under_way = plan
    assert numbers(drawn["position"]) == list(range(4 * len(request.block_table)))
    assert numbers(drawn["block"]) == request.block_table
    for name, reached in {
        "committed": 4 * request.num_committed,
        "computed": request.num_computed_slots,
        "filled": request.num_filled_slots,
        "allocated": 4 * len(request.block_table),
    }.items():
        assert numbers(drawn[name])[0] == reached
        assert drawn[name].index(">") == drawn["position"].index(f" {reached - 1}") + len(
            str(reached - 1)
        )
    assert request.tokens_so_far[10] is TO_COME and request.num_tokens == 11


@pytest.mark.skipif(not kernels.triton, reason="decode_kernel needs triton")
def test_the_tiles_of_each_split():
    """Each split attends to the tiles drawn for it: v is one-hot in the number of its tile."""
    lines = decode_kernel.fn.__doc__.splitlines()
    (top,) = (i for i, line in enumerate(lines) if "TILE = " in line)
    keys, *splits = lines[top : top + 3]
    *edges, tile = numbers(keys)
    firsts = edges[::2]
    context = edges[-1] + 1
    assert tile == kernels.TILE and firsts == list(range(0, context, tile))
    assert f"{context} keys of one request" in lines[top - 2]
    step = Step(Shape([(1, context)], 1, H=1, Hk=1), "triton")
    table = step.batch.block_tables[0].long()
    kv = torch.zeros_like(step.kv, device=table.device)
    for position in range(context):
        kv[1, table[position // 16], :, position % 16, position // tile] = 1.0
    parts = torch.full((len(splits), 32), torch.nan, device=table.device)
    plan = step.batch.prepared[0]._replace(splits=len(splits), partial_out=parts)
    step.batch.prepared = {0: plan}
    kernels.paged_attention_triton(step.q.to(table.device), kv, step.attn, step.batch)
    places = [keys.index(f"{first} ..") for first in firsts]
    for split, seen in zip(splits, parts.tolist(), strict=True):
        assert [split[place] == "█" for place in places] == [weight > 0 for weight in seen[:5]]


def test_which_of_the_posts_names_serving_runs():
    """A reader who sets a breakpoint in one that is only to be read waits for ever."""
    comment = Path(paged.__file__).read_text().partition("Of the post's names")[2]
    comment = comment.partition("\n\n\n")[0]
    runs, read = comment.split("to be read:")
    names = re.findall(r"[a-z_]+", runs.partition("serving runs:")[2])
    engine = Engine(GPT(GPTConfig(vocab_size=32, n_layer=1, n_head=1, n_embd=8)))
    called = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name))
    try:
        engine.generate([[1] * 40], SamplingParams(max_tokens=20), progress=False)
    finally:
        sys.setprofile(None)
    assert len(names) == 8 and set(names) <= called
    assert len(re.findall(r"\w+", read)) == 7 and not set(re.findall(r"\w+", read)) & called
