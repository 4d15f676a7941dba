"""
The engine beyond right answers (test_paged.py): refusals, aborts, failures, interrupts, its loop,
and that no request is changed by what happens to another.
"""

import io
import json
import random
import tempfile
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model import GPT
from paged import PRIORITY_AGEING, Plan, Request, Scheduler, SchedulerSettings, priority_delay
from serve import listen_for_links
from serving import engine as engine_module
from serving import loop, sizing
from serving.beam import beam_search
from serving.client import connect
from serving.engine import Engine
from serving.links import Links, to_line
from serving.params import GREEDY, SamplingParams
from serving.settings import Settings
from test_paged import (
    CONTEXT,
    VOCABULARY,
    assert_equals_dense,
    assert_idle,
    mixed_params,
    new_engine,
    prompt,
    raises,
    serve,
    step,
    trained_model,
)


class Faulty:
    """The model, but its `nth` paged forward from now raises `error`, once."""

    def __init__(self, engine: Engine, nth: int, error: BaseException):
        self.model, self.config, self.left, self.error = (
            engine.runner.model,
            engine.config,
            nth,
            error,
        )
        engine.runner.model = self

    def hidden(self, batch, kv):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.model.hidden(batch, kv)

    def logits(self, x, ops):
        return self.model.logits(x, ops)


def finish(engine: Engine) -> dict:
    """
    Step until idle. Returns for each id the tokens and the finish reason that the steps gave out.
    """
    answers = {}
    while engine.has_work:
        for output in engine.step():
            tokens, _ = answers.get(output.id, ([], None))
            answers[output.id] = (tokens + output.tokens, output.finish_reason)
    return answers


def greedy(max_tokens: int) -> SamplingParams:
    return replace(GREEDY, max_tokens=max_tokens)


# --------------------------------------------------------------------------------------------------
# In: what is refused, what is accepted at the limit


def test_what_can_never_be_served_is_refused_with_its_numbers():
    """
    Would catch: a limit off by one, a request queued although it was refused, a bool taken for
    token 1, a number of numpy's called outside the vocabulary without a word on which.
    """
    engine = new_engine(trained_model(), num_blocks=10)  # 40 slots, fewer than the context
    for bad in ([VOCABULARY], [-1], [True], [1.0], ["a"], torch.tensor([1]).numpy()):
        with raises(ValueError, f"token {bad[0]!r}, outside 0..{VOCABULARY - 1}", "tokenizer"):
            engine.add_request("bad", [1, 2, *bad], greedy(1))
    with raises(ValueError, "cache_salt is None: wanted a string"):
        engine.add_request("a", [1], greedy(1), cache_salt=None)
    with raises(ValueError, "prompt is empty"):
        engine.add_request("empty", [], greedy(1))
    with raises(
        ValueError,
        "31 prompt tokens + 10 max_tokens = 41",
        "into 40",
        "10 blocks of 4",
        "shorten the prompt",
    ):
        engine.add_request("long", prompt(0, 31), greedy(10))
    assert_idle(engine)
    engine.add_request("exact", [0, VOCABULARY - 1, *prompt(0, 28)], greedy(10))
    with raises(ValueError, "'exact' is in use"):
        engine.add_request("exact", prompt(0, 3), greedy(1))
    assert len(finish(engine)["exact"][0]) == 10
    engine.add_request(
        "exact", prompt(0, 3), greedy(1)
    )  # an id is free again when its request has finished
    finish(engine)
    assert_idle(engine)

    engine = new_engine(trained_model(), num_blocks=100)
    with raises(ValueError, f"= {CONTEXT + 1} do not fit", f"context length {CONTEXT}"):
        engine.add_request("long", prompt(0, CONTEXT), greedy(1))
    engine = new_engine(trained_model(), max_model_len=20)
    with raises(ValueError, "= 21 do not fit into 20"):
        engine.add_request("long", prompt(0, 20), greedy(1))
    engine.add_request("exact", prompt(0, 19), greedy(1))


def test_settings_that_cannot_work_are_refused():
    """
    Would catch: more running requests than a step has tokens, silently served by turns; a misspelt
    name ignored; a max_model_len that the model cannot hold, silently lowered.
    """
    model = trained_model()
    with raises(ValueError, "token_budget is 7", "at least max_num_seqs, 8", "--token-budget"):
        new_engine(model, token_budget=7, max_num_seqs=8)
    serve(new_engine(model, token_budget=8, max_num_seqs=8), [prompt(i, 5) for i in range(10)], 3)
    with raises(ValueError, "policy 'lifo'", "fcfs, priority, sjf"):
        new_engine(model, policy="lifo")
    for length, blocks, most in ((CONTEXT + 1, 100, CONTEXT), (41, 10, 40)):
        with raises(
            ValueError, f"max_model_len is {length}", f"1 to {most}", f"{blocks} blocks of 4"
        ):
            new_engine(model, max_model_len=length, num_blocks=blocks)
        assert new_engine(model, max_model_len=most, num_blocks=blocks).max_model_len == most
    with raises(ValueError, "'flash'", "there is auto, cpu, torch"):
        new_engine(model, attention="flash")
    for nothing in ({"token_budget": 0}, {"max_kv_tokens": 3}):
        with raises(ValueError, "at least 1"):
            Scheduler(**nothing)
    for nothing in ("block_size", "num_blocks", "max_num_seqs", "token_budget", "max_model_len"):
        with raises(ValueError, f"{nothing} is 0", "at least 1"):
            Settings(**{nothing: 0})


def test_the_pool_takes_its_share_of_free_memory_and_no_more_than_it_can_use(monkeypatch):
    """
    Would catch: another share of memory than POOL_SHARE; a pool of no block at
    all.
    """
    model = trained_model(
        num_kv_heads=2
    )  # a block: 2 * 2 layers * 2 KV heads of 16 * 4 tokens * 4 bytes = 2048
    for pages, blocks in ((10**9, 3 * CONTEXT // 4), (10, 5), (9, 4), (1, 1)):
        memory = 4096 * pages, 4096 * 10**9  # free, there
        monkeypatch.setattr(sizing, "memory_of", lambda device, memory=memory: memory)
        assert Engine(model, Settings(block_size=4, max_num_seqs=3)).num_blocks == blocks


def test_a_pool_beyond_all_memory_is_refused(monkeypatch):
    """
    A block or two too many in --kv-blocks were a MemoryError, or, the system being generous, a
    death much later.
    """
    model = trained_model(num_kv_heads=2)  # 2048 bytes a block, as above
    monkeypatch.setattr(sizing, "memory_of", lambda device: (40960, 40960))
    with raises(ValueError, "21 blocks of 4 tokens", "lower --kv-blocks"):
        Engine(model, Settings(block_size=4, num_blocks=21))
    assert Engine(model, Settings(block_size=4, num_blocks=20)).num_blocks == 20


def test_the_reference_stops_at_the_context_length():
    """
    Would catch: the dense model asked for a position it does not have, or stopping a token early.
    """
    model = trained_model()
    for length, new, total in (
        (60, 4, CONTEXT),
        (60, 9, CONTEXT),
        (60, 3, 63),
        (CONTEXT, 1, CONTEXT),
    ):
        assert model.generate(torch.tensor([prompt(0, length)]), new).shape == (1, total)
    with raises(ValueError, f"{CONTEXT + 1} tokens do not fit", f"context_length of {CONTEXT}"):
        model(torch.tensor([prompt(0, CONTEXT + 1)]))


# --------------------------------------------------------------------------------------------------
# Out: finished, aborted, failed, interrupted


def test_stop_tokens():
    """
    Would catch: an answer that goes on after its end, or loses its last token; ignore_eos ignored.
    """
    text = prompt(12, 17)
    eos, other = (
        text[7],
        text[10],
    )  # the model repeats the text: these are the fourth and the seventh token to come
    engine = new_engine(trained_model(eos_token_id=eos))
    full = trained_model().generate(torch.tensor([text]), 12)[0, 17:].tolist()
    assert full.index(eos) < full.index(other) < 11
    engine.add_request("eos", text, greedy(12))
    engine.add_request("ignored", text, replace(GREEDY, max_tokens=12, ignore_eos=True))
    engine.add_request(
        "other", text, replace(GREEDY, max_tokens=12, ignore_eos=True, stop_token_ids=(other,))
    )
    engine.add_request("both", text, replace(GREEDY, max_tokens=12, stop_token_ids=(other,)))
    engine.add_request("at the limit", text, greedy(full.index(eos) + 1))
    assert finish(engine) == {
        "eos": (full[: full.index(eos) + 1], "stop"),
        "ignored": (full, "length"),
        "other": (full[: full.index(other) + 1], "stop"),
        "both": (full[: full.index(eos) + 1], "stop"),
        "at the limit": (full[: full.index(eos) + 1], "stop"),
    }
    assert_idle(engine)


def test_several_ends_of_text():
    """
    Only the first of config.json's list ended a text, or the list was refused. All of them stop a
    request, none does before min_tokens or with ignore_eos, and beams end at each.
    """
    text = prompt(12, 17)
    first, second = text[7], text[10]
    full = trained_model().generate(torch.tensor([text]), 12)[0, 17:].tolist()
    assert full.index(first) < full.index(second) < 11
    for ends in ((first, second), (second, first)):
        model = trained_model(eos_token_id=ends[0])
        model.config.eos_token_ids = ends
        engine = new_engine(model)
        engine.add_request("either", text, greedy(12))
        engine.add_request("ignored", text, replace(GREEDY, max_tokens=12, ignore_eos=True))
        engine.add_request("late", text, replace(GREEDY, max_tokens=12, min_tokens=12))
        answers = finish(engine)
        assert answers["either"] == (full[: full.index(first) + 1], "stop")
        assert answers["ignored"] == (full, "length")
        assert not {*answers["late"][0][:11]} & {first, second}
        found = beam_search(engine, text, 3, 12)
        assert any(tokens[-1] == first and len(tokens) < 12 for tokens, _ in found)
        assert all(not {*tokens[:-1]} & {first, second} for tokens, _ in found)


def test_each_request_gets_its_own_number_of_logprobs():
    """A request with logprobs 1 beside a neighbour with 5 got 5 candidates."""
    engine = new_engine(trained_model())
    numbers = {"none": None, "chosen": 0, "one": 1, "five": 5}
    for number, (id, n) in enumerate(numbers.items()):
        engine.add_request(id, prompt(number, 9), replace(greedy(4), logprobs=n), prompt_logprobs=n)
    told = {id: [] for id in numbers}
    while engine.has_work:
        for output in engine.step():
            told[output.id] += [output.logprobs, *(output.prompt_logprobs or [])]
    assert all(score is None for score in told.pop("none"))
    for id, scores in told.items():
        assert [(len(ids), len(logprobs)) for _, ids, logprobs in scores] == [
            (numbers[id], numbers[id])
        ] * (4 + 8)


def test_abort_in_every_state():
    """
    Would catch: blocks or rows of an aborted request that are never given back, a request that
    comes back, another request's answer changed by it.
    """
    engine = new_engine(trained_model(), max_num_seqs=3, token_budget=8)
    active = engine.add_request("active", prompt(1, 5), greedy(20))
    stays = engine.add_request("stays", prompt(2, 6), mixed_params(20, 2)[1])
    for _ in range(5):
        engine.step()
    prefilling = engine.add_request("prefilling", prompt(3, 40), greedy(4))
    waiting = engine.add_request("waiting", prompt(4, 5), greedy(4))
    engine.step()
    requests = (active, prefilling, waiting)
    assert [r.status for r in requests] == ["active", "prefilling", "waiting"]
    for request in requests:
        engine.abort(request.id)
        engine.scheduler.check()
        assert (
            request.status == "done"
            and request.finish_reason == "abort"
            and request.block_table == []
        )
    engine.abort("never heard of")
    engine.abort("active")  # twice is no error
    assert list(engine.requests) == ["stays"] and len(engine.scheduler.running) == 1
    assert list(finish(engine)) == ["stays"]
    assert_equals_dense(trained_model(), stays.prompt_tokens, stays.generated_tokens, stays.params)
    engine.abort("stays")  # finished already: no error, and the reason stays
    assert stays.finish_reason == "length"
    assert_idle(engine)


def test_a_preempted_request_can_be_aborted():
    """Would catch: a preempted request taken for one that still holds blocks."""
    engine = new_engine(trained_model(), num_blocks=8, watermark=0)
    first, second = (engine.add_request(i, prompt(i, 13), greedy(16)) for i in range(2))
    while not second.num_preemptions:
        engine.step()
    assert second.status == "waiting" and second.num_generated > 0
    engine.abort(1)
    finish(engine)
    assert_equals_dense(trained_model(), first.prompt_tokens, first.generated_tokens, first.params)
    assert_idle(engine)


def test_a_failing_step_fails_its_own_requests_only():
    """
    Would catch: an engine that dies with one bad step, fails those who only wait, or goes on from a
    state that the failed step left half written.
    """
    for nth, failed in ((1, [0, 1, 2, 3, 4]), (2, [0, 1, 2, 3])):
        # five prompts share five tokens a step; in the second step the first four take all of them
        engine = new_engine(trained_model(), token_budget=5, max_num_seqs=5)
        params = mixed_params(8, 7)
        requests = [engine.add_request(i, prompt(i, 10 + i), params[i]) for i in range(7)]
        Faulty(engine, nth, FloatingPointError("bad number"))
        outputs = []
        while not any(output.error for output in outputs):
            outputs = engine.step()
        assert [(o.id, o.tokens, o.finish_reason) for o in outputs] == [
            (i, [], "error") for i in failed
        ]
        assert {o.error for o in outputs} == {"FloatingPointError: bad number"}
        engine.scheduler.check()
        finish(engine)
        for request in requests:
            if request.id in failed:
                assert request.finish_reason == "error" and request.num_generated == 0
            else:
                assert request.finish_reason == "length" and request.num_generated == 8
                assert_equals_dense(
                    trained_model(), request.prompt_tokens, request.generated_tokens, request.params
                )
        assert_idle(engine)


def test_generate_raises_what_failed_and_goes_on_next_time():
    """Would catch: an answer cut short by an error and returned as if it were whole."""
    engine = new_engine(trained_model())
    faulty = Faulty(engine, 4, FloatingPointError("bad number"))
    with raises(RuntimeError, "generate-0 failed", "FloatingPointError: bad number"):
        engine.generate([prompt(i, 9) for i in range(3)], greedy(8), progress=False)
    assert_idle(engine)
    engine.runner.model = faulty.model
    serve(engine, [prompt(i, 9) for i in range(3)], 8)


def test_an_interrupt_leaves_an_idle_pool():
    """
    Would catch: Ctrl-C in the middle of generate() leaving requests that the next call would serve
    again; a request of the interrupted step that goes on with a device state one step ahead of its
    own.
    """
    engine = new_engine(trained_model())
    faulty = Faulty(engine, 5, KeyboardInterrupt())
    mine = engine.add_request("mine", prompt(9, 9), greedy(20))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(i, 9) for i in range(12)], greedy(8), progress=False)
    assert mine.status == "done" and mine.finish_reason == "error"
    assert_idle(engine)
    engine.runner.model = faulty.model
    serve(engine, [prompt(i, 9) for i in range(12)], 8)


def test_a_refused_prompt_in_generate_leaves_nothing_behind():
    """
    Would catch: the prompts before the refused one served with the next call; somebody else's
    request taken along because its id is the one that generate() wanted.
    """
    engine = new_engine(trained_model())
    engine.add_request("generate-1", prompt(2, 5), greedy(3))
    with raises(ValueError, "'generate-1' is in use"):
        engine.generate([prompt(0, 5), prompt(1, 6)], greedy(8), progress=False)
    assert list(engine.requests) == ["generate-1"]
    assert len(finish(engine)["generate-1"][0]) == 3
    engine = new_engine(trained_model())
    with raises(ValueError, "61 prompt tokens + 8 max_tokens = 69"):
        engine.generate(
            [prompt(0, 5), prompt(1, 6), prompt(2, 61), prompt(3, 5)], greedy(8), progress=False
        )
    assert_idle(engine)
    with raises(ValueError, "shorter"):
        engine.generate([prompt(0, 5), prompt(1, 6)], [greedy(8)], progress=False)
    assert_idle(engine)
    assert engine.num_steps == 0
    assert engine.generate([], greedy(8), progress=False) == []


# --------------------------------------------------------------------------------------------------
# What it says


def test_generate_shows_progress_and_counts():
    """Would catch: counts of all calls instead of this one's, tokens counted twice."""
    engine = new_engine(trained_model(), num_blocks=32)
    prompts = [prompt(i, 10 + i) for i in range(3)]
    for hits in (0, 8 + 8 + 8):
        said = io.StringIO()
        with redirect_stderr(said):
            engine.generate(prompts, greedy(5))
        bar, summary = said.getvalue().strip().split("\n")
        assert "[====================] 3/3 requests" in bar and "tok/s" in bar
        assert summary.startswith(
            f"5 steps, {33 - hits} prefill tokens, 12 decode tokens, 0 preemptions, "
        )
        assert f"prefix hit rate {hits / 33:.0%}, peak " in summary and "of 32 blocks" in summary
    silent = io.StringIO()
    with redirect_stderr(silent), redirect_stdout(silent):
        engine.generate(prompts, greedy(5), progress=False)
    assert silent.getvalue() == ""


def test_trace_counts_a_shared_block_once():
    """
    Counted once for each request that holds it, a shared prefix was more slots than the pool has in
    use.
    """
    scheduler = Scheduler(token_budget=32, max_kv_tokens=64, block_size=4)
    scheduler.add_request(Request("a", list(range(10)), 9))
    scheduler.update(scheduler.plan(), [50])
    scheduler.add_request(
        Request("b", [*range(8), 90, 91], 9)
    )  # begins with the two full blocks of a
    line = engine_module.describe(scheduler.plan(1), scheduler)
    assert "decode a | prefill b[8:10]" in line
    assert (
        "blocks 12 free 4 referenced 0 cached | slots 13/16 | hits 8" in line
    )  # 8 shared, 3 of a, 2 of b


def test_trace_tells_each_step():
    """
    Would catch: a trace that does not say what happened: who decoded, which chunk, how the blocks
    stand.
    """
    engine = new_engine(
        trained_model(), num_blocks=5, token_budget=9, max_num_seqs=2, watermark=0, trace=True
    )
    said = io.StringIO()
    with redirect_stdout(said):
        engine.add_request("a", prompt(1, 6), greedy(7))
        engine.step()
        engine.add_request("b", prompt(2, 9), greedy(3))
        while engine.has_work:
            engine.step()
    assert said.getvalue().splitlines() == [
        "step    0 | decode - | prefill a[0:6] "
        "| blocks 3 free 2 referenced 0 cached | slots 6/8 | hits 0",
        "step    1 | decode a | prefill b[0:8] "
        "| blocks 0 free 5 referenced 0 cached | slots 15/20 | hits 0",
        "step    2 | decode a | prefill b[8:9] "
        "| blocks 0 free 5 referenced 0 cached | slots 17/20 | hits 0",
        # a needs a third block: b, two of whose blocks stay cached until one is needed, is sent
        # away
        "step    3 | decode a | prefill - "
        "| blocks 0 free 3 referenced 2 cached | slots 9/12 | hits 0 | preempted b",
        "step    4 | decode a | prefill - "
        "| blocks 0 free 3 referenced 2 cached | slots 10/12 | hits 0",
        "step    5 | decode a | prefill - "
        "| blocks 0 free 3 referenced 2 cached | slots 11/12 | hits 0",
        "step    6 | decode a | prefill - "
        "| blocks 0 free 3 referenced 2 cached | slots 12/12 | hits 0",
        "step    7 | decode - | prefill b[8:10] "
        "| blocks 0 free 3 referenced 2 cached | slots 10/12 | hits 8",
        "step    8 | decode b | prefill - "
        "| blocks 0 free 3 referenced 2 cached | slots 11/12 | hits 0",
    ]


# --------------------------------------------------------------------------------------------------
# Seeds, order, company


def test_a_seed_gives_the_same_tokens_in_any_company():
    """
    Would catch: noise that depends on the row, the batch, the step, the request's name or a
    preemption.
    """
    text, model = prompt(3, 11), trained_model()
    for seed in (0, 5, -(2**63), 2**63 - 1):
        params = SamplingParams(temperature=1.3, max_tokens=16, seed=seed)
        alone = new_engine(model).generate([text], params, progress=False)[0]
        assert_equals_dense(model, text, alone, params)
        crowd = [prompt(50 + i, 6 + i) for i in range(9)]
        engine = new_engine(model)
        answers = engine.generate([*crowd, text], [*mixed_params(16, 9), params], progress=False)
        assert answers[-1] == alone and engine.scheduler.num_preemptions == 0
        engine = new_engine(model, num_blocks=16, watermark=0)
        requests = [engine.add_request(i, tokens, greedy(16)) for i, tokens in enumerate(crowd[:2])]
        requests.append(engine.add_request("last", text, params))  # the first to be sent away
        finish(engine)
        assert requests[-1].generated_tokens == alone and requests[-1].num_preemptions > 0
    others = {
        tuple(new_engine(model).generate([text], replace(params, seed=s), progress=False)[0])
        for s in range(8)
    }
    assert len(others) == 8, "and another seed others"


def test_requests_without_a_seed_are_drawn_one():
    """
    Would catch: all requests without a seed sharing one; an engine whose runs cannot be repeated.
    """
    params = SamplingParams(max_tokens=16)
    runs = [
        new_engine(trained_model(), seed=s).generate([prompt(3, 11)] * 4, params, False)
        for s in (1, 1, 2)
    ]
    assert len({tuple(answer) for answer in runs[0]}) == 4
    assert runs[0] == runs[1] != runs[2]


def test_unseeded_engines_say_different_things():
    """
    Every start of the server or of the terminal said the same text again: the seeds that were drawn
    were always drawn from 0. The one that was drawn is told, and gives the text again.
    """
    params = SamplingParams(max_tokens=16)
    engine, other = new_engine(trained_model()), new_engine(trained_model())
    drawn = engine.add_request("a", prompt(3, 11), params).params.seed
    assert drawn != other.add_request("a", prompt(3, 11), params).params.seed
    answer, _ = finish(engine)["a"]
    assert new_engine(trained_model()).generate(
        [prompt(3, 11)], replace(params, seed=drawn), False
    ) == [answer]


@pytest.mark.parametrize("P", [1, 7, 8, 9, 21])
@pytest.mark.parametrize(
    "changes, forks",
    [
        ({}, 3),
        ({"prefix_cache": False}, 3),
        ({"max_num_seqs": 2}, 0),  # one row is the other request's: no room for a fork
        ({"num_blocks": 14}, 3),  # forks are preempted
    ],
)
def test_choices_are_forks_and_do_not_depend_on_room(P, changes, forks):
    """
    Four choices of one prompt: they share its blocks and differ by their noise alone, so the tokens
    are the same whether they were forked, waited for a row and hit the cache, or were preempted.
    """
    params = SamplingParams(max_tokens=20, seed=5, temperature=1.5)

    def choices(**changes):
        engine = new_engine(
            trained_model(),
            **(
                {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "token_budget": 16} | changes
            ),
        )
        engine.add_request("other", prompt(50, 5), greedy(30))
        engine.add_request("a", prompt(0, P), params, n=4)
        answers = finish(engine)
        assert_idle(engine)
        return answers, engine.scheduler.num_forks

    reference, _ = choices(prefix_cache=False)
    answers, num_forks = choices(**changes)
    assert sorted(answers) == ["a", "a.1", "a.2", "a.3", "other"] and answers == reference
    assert len({tuple(tokens) for tokens, _ in answers.values()}) == 5
    committed = P % 4 == 0 and changes.get(
        "prefix_cache", True
    )  # a full block is found in the cache instead
    assert num_forks == (0 if committed else forks)


@pytest.mark.parametrize("rows", [1, 3])
def test_choices_are_their_prompt_in_all_but_noise(rows):
    """
    Those that waited for a row lost their salt, and hit and filled everybody's cache, or lost their
    priority.
    """
    engine = new_engine(trained_model(), max_num_seqs=rows, policy="priority")
    text, params = prompt(0, 18), SamplingParams(max_tokens=6, seed=3, stop_token_ids=(5,))
    first = engine.add_request("a", text, params, -7, n=3, cache_salt="pepper", prompt_logprobs=1)
    engine.step()
    asked = (
        "prompt_tokens",
        "max_new_tokens",
        "arrival_time",
        "priority",
        "stop_token_ids",
        "cache_salt",
        "params",
    )
    for choice in 1, 2:
        request = engine.requests[f"a.{choice}"]
        assert request.status == ("waiting" if rows == 1 else "active")
        assert {name: getattr(request, name) for name in asked} == {
            name: getattr(first, name) for name in asked
        }
        assert (request.choice, request.prompt_logprobs, request.generated_tokens) == (
            choice,
            None,
            [],
        )
    finish(engine)
    for salt, hits in (("", 0), ("pepper", 16), ("salt", 0)):
        engine.add_request("b", text, greedy(1), cache_salt=salt)
        assert engine.step()[0].cached_tokens == hits


def test_choices_of_an_aborted_prompt_are_never_forked():
    engine = new_engine(trained_model(), max_num_seqs=8)
    engine.add_request("a", prompt(0, 20), greedy(5), n=4)
    engine.abort("a")
    assert finish(engine) == {} and not engine.num_choices
    engine.add_request(
        "b", prompt(0, 20), greedy(1), n=3
    )  # the first ends with its first token: nothing left to fork
    assert sorted(finish(engine)) == ["b", "b.1", "b.2"]
    assert_idle(engine)


@pytest.mark.parametrize("num_blocks", [64, 12])  # with 12 it is preempted and scored again
def test_scores_are_the_dense_models(num_blocks):
    """
    Log-probabilities of each prompt token and each answer, in chunks, beside others; no prefix hit
    hides one.
    """
    engine = new_engine(
        trained_model(), block_size=4, num_blocks=num_blocks, max_num_seqs=8, token_budget=16
    )
    finish_first = [engine.add_request(i, prompt(0, 23), greedy(4)) for i in range(2)]
    finish(engine)
    engine.add_request("other", prompt(9, 15), greedy(20))
    scored = engine.add_request(
        "a", prompt(0, 23), replace(greedy(6), logprobs=2), prompt_logprobs=3
    )
    found, prompt_scores = [], None
    while engine.has_work:
        for output in engine.step():
            assert output.id == "a" or (output.logprobs, output.prompt_logprobs) == (None, None)
            if output.id == "a":
                found.append(output.logprobs)
                prompt_scores = prompt_scores or output.prompt_logprobs
    tokens = scored.tokens_so_far
    assert len(finish_first) == 2 and scored.num_hit_tokens == 0
    assert (len(prompt_scores), len(found)) == (22, 6)
    logprobs = trained_model()(torch.tensor([tokens]))[0][0].log_softmax(-1)
    for position, (logprob, ids, top) in enumerate(prompt_scores + found):
        n = 3 if position < 22 else 2
        best = logprobs[position].topk(n)
        assert logprob == pytest.approx(logprobs[position, tokens[position + 1]].item(), abs=1e-3)
        assert top == pytest.approx(best.values.tolist(), abs=1e-3) and len(ids) == n
        assert logprobs[position, ids].tolist() == pytest.approx(top, abs=1e-3)


def test_logits_that_are_not_numbers_end_their_request_with_an_error():
    engine = new_engine(trained_model())
    engine.add_request("a", prompt(0, 5), greedy(5))
    model = engine.runner.model
    broken = {
        "hidden": lambda self, *a: model.hidden(*a) * torch.nan,
        "logits": model.logits,
    }
    engine.runner.model = type("Broken", (), broken | {"config": model.config})()
    (output,) = engine.step()
    assert output.finish_reason == "error" and "not numbers" in output.error
    assert_idle(engine)


def test_two_engines_in_one_process():
    """Would catch: state of a module or a class that two engines share."""
    engines = [
        new_engine(trained_model(heads), block_size=size) for heads, size in ((2, 4), (4, 8))
    ]
    params = mixed_params(10, 5)
    requests = [
        [e.add_request(i, prompt(i, 8 + 3 * i), params[i]) for i in range(5)] for e in engines
    ]
    while any(e.has_work for e in engines):
        for e in engines:
            if e.has_work:
                e.step()
    for heads, own in zip((2, 4), requests, strict=True):
        for request in own:
            assert_equals_dense(
                trained_model(heads),
                request.prompt_tokens,
                request.generated_tokens,
                request.params,
            )
    for e in engines:
        assert_idle(e)


def admission_order(scheduler: Scheduler, requests: list[Request]) -> list:
    for request in requests:
        scheduler.add_request(request)
    order = []
    while not scheduler.is_done():
        order += [r.id for r in step(scheduler).admitted]
    return order


def test_priority_and_its_ageing():
    """Would catch: a policy that is ignored, or under which low priority never has its turn."""
    waiting = [
        Request("late and low", [1], 2, arrival_time=10.0, priority=1),
        Request("early and low", [2], 2, arrival_time=0.0, priority=1),
        Request("before it has aged", [3], 2, arrival_time=59.0),
        Request("after it has aged", [4], 2, arrival_time=61.0),
        Request("urgent", [5], 2, arrival_time=61.0, priority=-1),
    ]
    by_priority = [
        "urgent",
        "before it has aged",
        "early and low",
        "after it has aged",
        "late and low",
    ]
    by_arrival = [
        "early and low",
        "late and low",
        "before it has aged",
        "after it has aged",
        "urgent",
    ]
    for policy, order in (("priority", by_priority), ("fcfs", by_arrival)):
        requests = [replace(r) for r in waiting]
        assert (
            admission_order(Scheduler(policy, settings=SchedulerSettings(max_num_seqs=1)), requests)
            == order
        )
    assert new_engine(trained_model(), policy="priority").scheduler.queue_key(waiting[0])[0] == 70.0


def test_no_priority_beats_ageing():
    """
    -2**63 went before all others for 10**13 years. Now any two priorities are less than 480 s
    apart, in their order; a server drops what is older than 600.
    """
    scheduler = Scheduler("priority", settings=SchedulerSettings(max_num_seqs=1))
    urgent = [
        Request(f"{when}", [1], 1, arrival_time=when, priority=-(10**400))
        for when in (1.0, 479.0, 480.0)
    ]
    old = Request("old", [1], 1, arrival_time=0.0, priority=10**400)
    assert admission_order(scheduler, [old, *urgent]) == ["1.0", "479.0", "old", "480.0"]
    delays = [priority_delay(priority) for priority in range(-1000, 1001)]
    assert delays == sorted(set(delays)) and delays[-1] < PRIORITY_AGEING


def test_the_engine_passes_its_limits_on_to_the_scheduler():
    """Would catch: a flag that is taken and does nothing."""
    limits = {
        "max_num_partial_prefills": 3,
        "max_long_partial_prefills": 2,
        "long_prefill_threshold": 7,
    }
    scheduler = new_engine(trained_model(), policy="sjf", **limits).scheduler
    assert {name: getattr(scheduler.settings, name) for name in limits} == limits
    assert (
        scheduler.queue_key(Request("r", [1] * 30, 10, arrival_time=1.0))[0] == 3.0
    )  # 0.05 s for each of 40 tokens


def test_nothing_leaks_whatever_happens():
    """
    Would catch: blocks, rows or requests lost in a mixture of finishing, aborting, failing and
    preempting.
    """
    rng = random.Random(0)
    engine = new_engine(trained_model(), num_blocks=24, max_num_seqs=6, token_budget=12)
    model, kept = engine.runner.model, []
    for i in range(60):
        length = rng.randint(1, 40)
        params = mixed_params(rng.randint(1, 20), 1, first=i)[0]
        kept.append(engine.add_request(i, prompt(i % 7, length), params))
        if rng.random() < 0.2:
            engine.abort(rng.choice(kept).id)
        if rng.random() < 0.1:
            engine.runner.model = model
            Faulty(engine, 1, FloatingPointError("bad number"))
        engine.step()
    finish(engine)
    assert_idle(engine)
    reasons = [r.finish_reason for r in kept]
    assert min(reasons.count(reason) for reason in ("length", "abort", "error")) >= 3
    assert engine.scheduler.num_preemptions > 0 and engine.scheduler.num_hit_tokens > 0
    for request in [r for r in kept if r.finish_reason == "length"][::4]:
        assert_equals_dense(
            trained_model(), request.prompt_tokens, request.generated_tokens, request.params
        )


# --------------------------------------------------------------------------------------------------
# The loop that a server runs


class Loop:
    """`run` in a thread, with one link to it, as an HTTP process has."""

    def __init__(self, max_queue=None, **settings):
        self.engine = new_engine(trained_model(), **settings)
        self.folder = tempfile.TemporaryDirectory()
        self.listener = listen_for_links(self.folder.name)
        self.links = [self.connect()]
        arguments = (self.engine, Links(self.listener), max_queue)
        self.thread = threading.Thread(target=loop.serve, args=arguments, daemon=True)
        self.thread.start()

    def connect(self):
        link = connect(self.listener.getsockname())
        link.settimeout(20)
        return link.makefile("rwb", 0)

    def send(self, op: str, link: int = 0, **message):
        self.links[link].write(to_line({"op": op, **message}))

    def receive(self, link: int = 0) -> dict:
        return json.loads(self.links[link].readline())

    def stop(self):
        for link in self.links:
            link.close()
        assert self.ended()

    def ended(self) -> bool:
        self.thread.join(20)
        return not self.thread.is_alive()


def test_the_loop_over_a_link():
    """
    Would catch: a message lost or mixed up, a refusal that ends the loop, an abort that is not
    carried out.
    """
    loop = Loop(max_num_seqs=4)
    assert loop.receive() == {
        "op": "ready",
        "max_model_len": CONTEXT,
        "max_num_seqs": 4,
        "vocab_size": VOCABULARY,
        "eos_token_ids": [],
    }
    params = {"temperature": 1.2, "seed": 3, "max_tokens": 20}
    loop.send("add", id="never ends", prompt=prompt(90, 5), params={"max_tokens": 50, "seed": 0})
    for i in range(3):
        loop.send("add", id=f"good {i}", prompt=prompt(i, 9 + i), params=params)
    loop.send("abort", id="never ends")
    invalid = [
        ("too long", prompt(0, 50), {"max_tokens": 15}, "50 prompt tokens + 15 max_tokens = 65"),
        ("bad value", prompt(0, 5), {"temperature": -1}, "temperature is -1"),
        ("bad name", prompt(0, 5), {"temprature": 1}, "temprature"),
        ("bad token", [VOCABULARY], {}, "outside"),
    ]
    for id, tokens, wrong, _ in invalid:
        loop.send("add", id=id, prompt=tokens, params=wrong)
    answers, errors, finished = {}, {}, {}
    while len(finished) < 3 or len(errors) < len(invalid):
        message = loop.receive()
        if message["op"] == "error":
            assert message["kind"] == "invalid"
            errors[message["id"]] = message["message"]
        else:
            for id, tokens, reason, cached in message["out"]:
                answers.setdefault(id, []).extend(tokens)
                assert cached == 0
                if reason:
                    finished[id] = reason
    loop.stop()
    assert_idle(loop.engine)  # what was aborted, too
    assert all(part in errors[id] for id, _, _, part in invalid)
    assert finished == {f"good {i}": "length" for i in range(3)}, "and never what was aborted"
    for i in range(3):
        assert_equals_dense(
            trained_model(), prompt(i, 9 + i), answers[f"good {i}"], SamplingParams(**params)
        )


def test_the_loop_reports_a_failed_step_and_serves_on():
    """
    Would catch: a failure that is not told to those who wait for an answer, or told as if it were
    their fault.
    """
    loop = Loop()
    loop.receive()
    Faulty(loop.engine, 3, FloatingPointError("bad number"))
    loop.send("add", id="a", prompt=prompt(0, 5), params={"max_tokens": 9})
    messages = [loop.receive() for _ in range(5)]
    assert [len(m["out"]) for m in messages[:4]] == [
        0,
        1,
        1,
        0,
    ]  # the first and last tell how the engine is
    assert messages[4] == {
        "op": "error",
        "id": "a",
        "message": "FloatingPointError: bad number",
        "kind": "internal",
    }
    loop.send("add", id="a", prompt=prompt(0, 5), params={"max_tokens": 1, "temperature": 0})
    assert loop.receive()["out"][0][2] == "length"
    loop.stop()


def test_the_loop_tells_that_the_last_work_is_gone():
    """
    No step follows an abort and would tell of it: the gauges showed a request at work until the
    next one came.
    """
    loop = Loop(max_num_seqs=1, num_blocks=64)
    loop.receive()
    gauges = "running", "waiting", "at_work", "kv_usage"
    for id in "ab":
        loop.send(
            "add",
            id=id,
            prompt=prompt(0, 9),
            params={"max_tokens": 50, "seed": 0},
            options={"n": 2},
        )
        seen = {}
        while seen.get("at_work") != 2 or seen["running"] != 1 or seen["waiting"] != 1:
            seen = loop.receive()["stats"]
        assert seen["kv_usage"] in {blocks / 64 for blocks in range(3, 16)}
        loop.send("abort", id=f"{id}.1")
        loop.send("abort", id=id)
        while seen["at_work"]:
            seen = loop.receive()["stats"]
        assert [seen[name] for name in gauges] == [0, 0, 0, 0]
    loop.stop()


def test_links_have_requests_of_their_own():
    """
    Two HTTP processes choose the same id. Would catch: tokens that reach another process's client;
    an engine that computes on for a process that died, or ends with it.
    """
    loop = Loop(max_num_seqs=4)
    loop.links.append(loop.connect())
    for link in (0, 1):
        loop.receive(link)
        params = {"max_tokens": 12 + 38 * link, "temperature": 0}
        loop.send("add", link, id="a", prompt=prompt(link, 7), params=params)
    loop.send("add", 1, id="b", prompt=prompt(3, 7), params={"max_tokens": 50}, options={"n": 3})
    while not loop.receive(1)["out"]:
        pass
    loop.links[1].close()
    tokens, reason = [], None
    while reason is None:
        for row in loop.receive(0)["out"]:
            tokens += row[1]
            reason = row[2]
    assert_equals_dense(trained_model(), prompt(0, 7), tokens, greedy(12))
    deadline = time.monotonic() + 60
    while loop.engine.requests and time.monotonic() < deadline:
        time.sleep(0.001)
    assert_idle(loop.engine)
    loop.stop()


def test_the_queue_has_one_limit_for_all_links():
    """
    Each HTTP process knows only its own requests; the engine counts those of all, choices to be
    forked included.
    """
    loop = Loop(max_num_seqs=2, max_queue=2)
    loop.links.append(loop.connect())
    long = {"max_tokens": 55, "seed": 0}
    loop.engine.step, step = (
        lambda: time.sleep(0.001) or [],
        loop.engine.step,
    )  # nothing ends meanwhile
    loop.send("add", 0, id="a", prompt=prompt(0, 5), params=long, options={"n": 3})
    answers = [loop.receive(0) for _ in range(2)]
    while not answers[-1].get("stats", {}).get("at_work"):
        answers.append(loop.receive(0))
    loop.send("add", 1, id="fits", prompt=prompt(0, 5), params=long)
    loop.send("add", 1, id="does not", prompt=prompt(0, 5), params=long)
    while (error := loop.receive(1))["op"] != "error":
        pass
    message = "1 choices beside 4 in work are more than 4: try again later"
    assert error == {"op": "error", "id": "does not", "message": message, "kind": "full"}
    loop.engine.step = step
    loop.stop()


def test_a_server_that_is_gone_before_the_engine_is_ready(tmp_path):
    """A server killed while its model loaded left a traceback at the terminal, seconds later."""
    with listen_for_links(str(tmp_path)) as listener:
        connect(listener.getsockname()).close()
        assert loop.serve(new_engine(trained_model()), Links(listener)) is None


def test_the_loop_ends_when_the_other_side_is_gone():
    """
    Would catch: an engine process that outlives its server, idle or busy, and keeps the memory.
    """
    for busy in (False, True):
        loop = Loop()
        loop.receive()
        if busy:
            loop.send("add", id="a", prompt=prompt(0, 5), params={"max_tokens": 55})
            loop.receive()
        loop.stop()


# --------------------------------------------------------------------------------------------------
# Overlap, and CUDA graphs where there is a GPU


def varied_work(engine: Engine, on_step=lambda step: None) -> dict:
    """Twenty requests of all kinds, two of them in three choices; their answers, by id."""
    for i in range(20):
        params = replace(mixed_params(24, 20)[i], seed=i, logprobs=2 if i % 5 == 0 else None)
        params = replace(
            params, presence_penalty=0.5 * (i % 3), min_tokens=i % 4, stop_token_ids=(3, 7 + i % 5)
        )
        engine.add_request(i, prompt(i % 7, 3 + 4 * (i % 9)), params, n=3 if i in (4, 11) else 1)
    answers, step = {}, 0
    while engine.has_work:
        on_step(step)
        step += 1
        for o in engine.step():
            answers.setdefault(o.id, []).append(
                (o.tokens, o.finish_reason, o.logprobs and o.logprobs[1])
            )
    assert_idle(engine)
    return answers


def test_delays_that_nobody_asks_for_are_forgotten(monkeypatch):
    """
    `generate` in a program, the terminal too, never asks: two numbers of each request were kept for
    ever.
    """
    monkeypatch.setattr(engine_module, "MAX_DELAYS", 2)
    engine = new_engine(trained_model())
    for _ in range(3):
        engine.generate([prompt(0, 5)], greedy(2), progress=False)
    stats = engine.stats()
    assert len(stats["waited"]) == len(stats["prefilled"]) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_delays_are_told_once_for_each_request(overlap, monkeypatch):
    """
    By a clock that counts launched steps. The prompt of 38 tokens takes three steps, and of its two
    choices only the first has a prefill; with overlap a token's value is known a step later. Would
    catch: the step that a launch computes counted as waiting, a preempted request told twice, a
    fork told at all.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    engine = new_engine(
        trained_model(), overlap=overlap, token_budget=16, max_num_seqs=2, num_blocks=17
    )
    engine.add_request("a", prompt(0, 38), greedy(26), n=2)
    clock.now = 7.0
    engine.add_request("late", prompt(50, 5), greedy(3))
    launch = engine.runner.launch

    def launch_in_a_second(plan):
        clock.now += 1
        return launch(plan)

    engine.runner.launch = launch_in_a_second
    waited, prefilled = [], []
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        waited += stats["waited"]
        prefilled += stats["prefilled"]
        forks = [r for r in engine.requests.values() if r.choice and not r.num_preemptions]
        assert all(fork.admitted_time is None for fork in forks)
    assert engine.scheduler.num_forks == 1 and engine.scheduler.num_preemptions > 0
    assert sorted(waited) == [0, 7]
    assert sorted(prefilled) == ([2, 4] if overlap else [1, 3])


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_overlap_changes_no_answer(num_blocks):
    """
    Planned a step ahead: a stop found late, a token that is not there yet when its block is
    committed, a request preempted with a token on its way, forks of a prompt that already decodes
    on.
    """
    sizes = {"block_size": 4, "num_blocks": num_blocks, "max_num_seqs": 8, "token_budget": 24}
    engines = [new_engine(trained_model(), overlap=overlap, **sizes) for overlap in (False, True)]
    plain, overlapped = map(varied_work, engines)
    assert overlapped == plain and len(plain) == 24
    assert (engines[1].counts()["preemptions"] > 0) == (num_blocks == 24)
    reasons = {answer[-1][1] for answer in plain.values()}
    assert reasons == {"stop", "length"}


def test_overlap_starts_a_step_before_it_takes_in_the_last():
    """
    That the host works while the device does; and each request has at most one token more than it
    may.
    """
    engine, order = new_engine(trained_model(), overlap=True), []
    launch, wait_for = engine.runner.launch, engine.runner.wait_for
    engine.runner.launch = lambda plan: order.append("launch") or launch(plan)
    engine.runner.wait_for = lambda flight: order.append("wait_for") or wait_for(flight)
    engine.add_request("a", prompt(0, 5), greedy(3))
    assert engine.step() == [] and engine.has_work
    finish(engine)
    assert order == ["launch", "launch", "wait_for", "launch", "wait_for", "wait_for"]


def test_an_abort_with_a_token_on_its_way_disturbs_nobody():
    """Its blocks are free at once, and the step under way still writes into one of them."""
    sizes = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "token_budget": 24}
    whole = varied_work(new_engine(trained_model(), overlap=True, **sizes))
    engine = new_engine(trained_model(), overlap=True, **sizes)
    aborted = {3: 2, 9: 8, 14: 12, 20: 0, 26: 17}  # step -> id
    answers = varied_work(engine, lambda step: step in aborted and engine.abort(aborted[step]))
    assert all(answers[id] == whole[id] for id in whole if id not in aborted.values())


def test_a_step_that_fails_under_overlap_ends_its_requests_only():
    """
    The step before it, already computed, still brings its tokens; those who come later are served.
    """
    engine = new_engine(trained_model(), overlap=True)
    engine.add_request("a", prompt(0, 5), greedy(9))
    Faulty(engine, 4, RuntimeError("broken"))
    tokens, reason = finish(engine)["a"]
    assert reason == "error" and len(tokens) <= 3
    assert_idle(engine)
    serve(engine, [prompt(1, 7)], 5)


def test_ctrl_c_under_overlap_takes_in_the_step_under_way():
    """
    The interrupted plan has preempted a prompt of which a chunk was under way. Admitted again
    before that step was taken in, the prompt had the chunk counted twice, and blocks committed
    before their K, V were there.
    """
    sizes = {"num_blocks": 12, "max_num_seqs": 2, "token_budget": 5, "watermark": 0}
    engine = new_engine(trained_model(), overlap=True, **sizes)
    engine.add_request("grows", prompt(0, 7), greedy(9))
    engine.step()
    engine.step()
    engine.add_request("long", prompt(1, 37), greedy(9))  # its 10 blocks are the rest of the pool
    launch = engine.runner.launch

    def interrupted(plan: Plan):
        if plan.preempted:
            raise KeyboardInterrupt
        return launch(plan)

    engine.runner.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    assert engine.in_flight is None and list(engine.requests) == ["long"]
    engine.runner.launch = launch
    tokens, _ = finish(engine)["long"]
    assert_equals_dense(trained_model(), prompt(1, 37), tokens, greedy(9))
    assert_idle(engine)


def test_a_late_step_brings_nothing_for_who_has_its_id_now():
    """
    Steps come back one late: the scores of an aborted prompt went to the next request of its name,
    and its choices continued the old prompt.
    """
    engine = new_engine(trained_model(), overlap=True)
    for scored in None, 0:
        engine.add_request("a", prompt(0, 9), greedy(4), prompt_logprobs=0)
        engine.step()
        engine.abort("a")
        engine.add_request("a", prompt(1, 7), greedy(1), prompt_logprobs=scored)
        assert engine.step() == [] and not engine.prompt_scores
        (output,) = engine.step()
        assert output.finish_reason == "length"
        assert len(output.prompt_logprobs or []) == (0 if scored is None else 6)
    engine.add_request("a", prompt(1, 9), greedy(4))
    engine.step()
    engine.abort("a")
    engine.add_request("a", prompt(2, 9), greedy(4), n=2)
    answers = finish(engine)
    assert answers["a"] == answers["a.1"]
    assert_equals_dense(trained_model(), prompt(2, 9), answers["a.1"][0], greedy(4))
    assert_idle(engine)


def test_a_request_that_has_stopped_has_no_part_in_the_next_steps_failure():
    """
    Its stop is found while one more step of it is under way; when that fails, it had both a stop
    and an error.
    """
    engine = new_engine(trained_model(), overlap=True)
    first = serve(new_engine(trained_model()), [prompt(0, 5)], 3)[0]
    engine.add_request("stops", prompt(0, 5), replace(greedy(9), stop_token_ids=(first[0],)))
    wait_for, calls = engine.runner.wait_for, []

    def broken_the_second_time(flight):
        calls.append(flight)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return wait_for(flight)

    engine.runner.wait_for = broken_the_second_time
    outputs = [output for _ in range(4) for output in engine.step()]
    assert [(o.id, o.finish_reason) for o in outputs] == [("stops", "stop")] and len(calls) == 2
    assert_idle(engine)


def test_a_choice_has_a_name_of_its_own():
    """A fork that took the place of a request of its name ended the engine's loop."""
    engine = new_engine(trained_model())
    engine.add_request("a.1", prompt(0, 5), greedy(4))
    with raises(ValueError, "'a.1' is in use"):
        engine.add_request("a", prompt(1, 5), greedy(4), n=2)
    engine.add_request("c", prompt(1, 5), greedy(4), n=3)
    with raises(ValueError, "'c.2' is in use"):
        engine.add_request("c.2", prompt(1, 5), greedy(4))
    for wrong in {"n": 0}, {"n": True}, {"prompt_logprobs": -1}, {"prompt_logprobs": 10**6}:
        with raises(ValueError, next(iter(wrong))):
            engine.add_request("b", prompt(1, 5), greedy(4), **wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu_graphs_and_overlap_change_no_answer(graphs):
    """
    Padded rows that count, a graph that reads what was there when it was captured, a second engine
    beside the first. In fp32 greedy tokens are the dense model's.
    """
    model = deepcopy(trained_model()).cuda()
    sizes = {
        "block_size": 4,
        "num_blocks": 200,
        "max_num_seqs": 8,
        "token_budget": 24,
        "graphs": graphs,
    }
    plain, overlapped = (
        varied_work(Engine(model, Settings(overlap=overlap, check=True, **sizes)))
        for overlap in (False, True)
    )
    assert plain == overlapped
    engine = Engine(model, Settings(**sizes))
    prompts = [prompt(i, 3 + 4 * i) for i in range(9)]
    for text, answer in zip(
        prompts, engine.generate(prompts, greedy(20), progress=False), strict=True
    ):
        dense = model.generate(torch.tensor([text], device="cuda"), len(answer))[0, len(text) :]
        assert answer == dense.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_hundred_steps_without_waiting_for_the_device():
    """One `.item()` in a step, and the device waits for the host from then on."""
    engine = Engine(deepcopy(trained_model()).cuda(), Settings(max_num_seqs=8, block_size=4))
    for i in range(6):
        engine.add_request(
            i, prompt(i, 5), SamplingParams(max_tokens=engine.max_model_len - 5, seed=i, top_p=0.9)
        )
    for _ in range(5):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(min(100, engine.max_model_len - 20)):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU nothing is warmed up")
def test_on_a_gpu_the_pool_is_sized_after_a_warm_up(monkeypatch):
    """What a step and its kernels take would be given to the pool, and missing later."""
    happened, warm_up = [], engine_module.Runner.warm_up

    def free(*device):
        happened.append("sized")
        return int(10.5 * 2 * 2 * 2 * 16 * 16 * 4 / 0.9), 2**30  # ten blocks and a half

    monkeypatch.setattr(
        engine_module.Runner, "warm_up", lambda self: (warm_up(self), happened.append("warmed up"))
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    engine = Engine(
        deepcopy(trained_model(num_kv_heads=2)).cuda(), Settings(block_size=16, max_num_seqs=8)
    )
    assert engine.num_blocks == 10 and happened[:2] == ["warmed up", "sized"]


def test_out_of_memory_says_what_to_change(monkeypatch):
    """A reader of torch's message learns how many bytes, and not which flag."""

    def no_memory(*arguments, **named):
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    monkeypatch.setattr(engine_module, "Runner", no_memory)
    with raises(ValueError, "a KV pool of 32 blocks of 4", "lower --kv-blocks", "5 GiB"):
        new_engine(trained_model(), num_blocks=32, block_size=4)


def test_the_statement_before_serving():
    """Who reads it must see why a long prompt will be refused, and which attention is at work."""
    text = new_engine(trained_model(), num_blocks=32, block_size=4).statement()
    for part in (
        "MiB of weights",
        "32 blocks of 4, 128 tokens",
        "attention: cpu, the fastest on a CPU",
    ):
        assert part in text


# --------------------------------------------------------------------------------------------------
# Windows: every layer slides


def windowed_model(*windows: int) -> GPT:
    """The model of the tests, whose layers see so much alone; it looks 13 tokens back."""
    whole = trained_model()
    model = GPT(replace(whole.config, windows=windows)).eval()
    model.load_state_dict(whole.state_dict())
    return model


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_A_GPU = [
    pytest.param("cuda", options, marks=needs_gpu)
    for options in ({}, {"graphs": False}, {"attention": "torch"})
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {}), ("cpu", {"attention": "torch"}), *ON_A_GPU]
)
def test_texts_longer_than_the_pool_are_the_dense_models(device, options, overlap):
    """
    A window of 16 touches 5 blocks of 4, and the pool has 7: so blocks are left, found and taken by
    others all the time. Every token is the dense model's, which computes whole texts.
    """
    model = windowed_model(8, 16)
    sizes = {"num_blocks": 7, "max_num_seqs": 3, "token_budget": 12, "watermark": 0}
    engine = new_engine(deepcopy(model).to(device), overlap=overlap, **sizes, **options)
    engine.reference = model
    assert engine.max_model_len == CONTEXT and "1 texts of 64" in engine.statement()
    prompts = [prompt(seed, length) for seed, length in enumerate([40, 6, 8, 30, 7])]
    serve(engine, prompts, 24)
    assert engine.scheduler.num_preemptions and not engine.scheduler.num_hit_tokens
    serve(engine, prompts[:1], 1)
    serve(engine, [prompts[0] + prompt(9, 4)], 20)  # it begins alike, and its beginning is gone
    assert engine.scheduler.num_hit_tokens == 40
    assert_idle(engine)
    with raises(ValueError, "max_model_len is 60, possible is 1 to 16"):
        new_engine(model, num_blocks=4, max_model_len=60)


def test_a_layer_that_sees_all_keeps_all():
    """Would catch: blocks given back for the layers that slide, though another one reads them."""
    engine = new_engine(windowed_model(8, 0), num_blocks=16)
    assert engine.settings.window == 0
    request = engine.add_request("a", prompt(0, 40), greedy(24))
    (answer,) = [tokens for tokens, _ in finish(engine).values()]
    assert_equals_dense(engine.reference, request.prompt_tokens, answer, greedy(24))
    assert engine.scheduler.peak_blocks == 16
    with raises(ValueError, "possible is 1 to 32"):
        new_engine(windowed_model(8, 0), num_blocks=8, max_model_len=64)


@pytest.mark.parametrize("P", [20, 21, 23, 24])
def test_choices_and_beams_of_a_model_that_slides(P):
    """
    In a pool that is as small as they allow, as in a large one. With P = 23 the first choice has
    left a block that the prompt's last token sees: the others wait, and find it in the cache.
    """
    params = SamplingParams(max_tokens=20, seed=5, temperature=1.5)
    found = []
    for sizes in {"num_blocks": 64, "prefix_cache": False}, {"num_blocks": 15, "watermark": 0}:
        engine = new_engine(windowed_model(8, 16), max_num_seqs=3, token_budget=16, **sizes)
        engine.add_request("a", prompt(0, P), params, n=3, prompt_logprobs=1)
        answers = finish(engine)
        assert_idle(engine)
        found.append((answers, beam_search(engine, prompt(0, P), width=3, max_tokens=30)))
        assert_idle(engine)
    (answers, beams), (few, few_beams) = found
    assert few == answers and len({tuple(tokens) for tokens, _ in answers.values()}) == 3
    assert [tokens for tokens, _ in few_beams] == [tokens for tokens, _ in beams]
    assert engine.scheduler.num_forks >= (0 if P in (23, 24) else 2)
    with raises(ValueError, "3 beams need 15 blocks, the pool has 14"):
        engine = new_engine(windowed_model(8, 16), max_num_seqs=3, num_blocks=14)
        beam_search(engine, prompt(0, P), width=3, max_tokens=30)
