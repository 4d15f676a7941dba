"""
Single rules of the engine: settings and sizes, refusals, messages, failures and interrupts. Most
tests run without a model (simulated_device.py). test_paged.py and test_runner.py prove that answers
are right; the simulator runs random lives, with the server's loop.
"""

import dataclasses
import json
import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from engine import engine as engine_module
from engine import sizing
from engine.engine import Engine
from engine.process import handle_message
from engine.sizing import with_step_size
from model import GPT, GPTConfig
from paged import POLICIES, Plan
from params import SamplingParams, Settings
from test_paged import assert_idle, new_engine, prompt, raises, trained_model
from tests.simulated_device import (
    NoModel,
    SimulatedDevice,
    finish,
    greedy,
    greedy_answer,
    simulated_engine,
    tokens_of,
)

# --------------------------------------------------------------------------------------------------
# Settings and sizes


def test_a_count_is_a_whole_number_of_at_least_1_and_a_share_below_1():
    """
    Previously NaN was accepted, 10**30 ended in an OverflowError, and other values in a TypeError
    that did not name the setting.
    """
    counts = [f.name for f in dataclasses.fields(Settings) if "least" in f.metadata]
    assert len(counts) == 5
    for name in counts:
        assert getattr(Settings(**{name: 1}), name) == 1
        for wrong in 0, -1, 2**31, 10**30, 1.5, float("nan"), "1", []:
            with raises(ValueError, f"{name} is {wrong!r}, wanted at least 1, a whole number"):
                Settings(**{name: wrong})
    with raises(ValueError, "block_size is None"):  # it has a default on every machine
        Settings(block_size=None)
    assert Settings(prefill_share=0.999).prefill_share == 0.999
    for wrong in -0.001, 1, float("nan"):
        with raises(ValueError, f"prefill_share is {wrong}", "0 or more, below 1"):
            Settings(prefill_share=wrong)


def test_every_setting_reaches_the_scheduler():
    """
    Would catch: a flag that is accepted but does nothing; a share of blocks taken for one of
    tokens.
    """
    settings = {"policy": "sjf", "token_budget": 40, "block_size": 2, "prefix_cache": False}
    engine = simulated_engine(num_blocks=70, watermark=0.1, prefill_share=0.5, **settings)
    scheduler = engine.scheduler
    assert scheduler.delay is POLICIES["sjf"]
    assert not scheduler.settings.prefix_cache
    assert (scheduler.token_budget, scheduler.prefill_tokens) == (40, 20)
    assert (scheduler.block_size, scheduler.watermark_blocks) == (2, 7)


@pytest.mark.parametrize(
    ("on_gpu", "asked", "sizes"),
    [
        (False, (None, None), (64, 512)),
        (True, (None, None), (256, 8192)),
        (False, (600, None), (600, 600)),
        (True, (None, 256), (256, 256)),
    ],
)
def test_the_sizes_of_a_step(on_gpu, asked, sizes):
    max_num_seqs, token_budget = asked
    settings = Settings(max_num_seqs=max_num_seqs, token_budget=token_budget)
    settings = with_step_size(settings, on_gpu)
    assert (settings.max_num_seqs, settings.token_budget) == sizes


def test_the_pool_has_room_for_three_quarters_of_the_rows_at_full_length():
    """
    If the context is no multiple of the block size, each row needs one block more, not one less. A
    text of full length always fits. So a small model's pool can still overflow, which shows a
    preemption.
    """

    def room(num_rows: int, context_length=32) -> int:
        sizes = {"num_blocks": None, "max_num_seqs": num_rows, "token_budget": 64}
        engine = simulated_engine(context_length=context_length, **sizes)
        assert engine.max_model_len == context_length
        return engine.num_blocks

    assert (room(4), room(4, 30), room(4, 29), room(4, 28)) == (24, 24, 24, 21)
    assert (room(3), room(2), room(1)) == (18, 12, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_budget": 7}, "token_budget is 7, wanted at least max_num_seqs, 8"),
        ({"max_model_len": 65}, "max_model_len is 65, wanted 1 to 64"),
        ({"max_model_len": 41, "num_blocks": 10}, "wanted 1 to 40 (context length 64, KV pool "
            "of 10 blocks of 4): lower --max-model-len or raise --kv-blocks"),
        ({"num_blocks": 21}, "21 blocks of 4 tokens takes 0.0 GiB, but cpu has 0.0: lower"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings, message, monkeypatch):
    """Would catch: a limit lowered silently, or a crash in the middle of serving."""
    monkeypatch.setattr(sizing, "memory_of", lambda device: (160, 160))  # 20 blocks of 8 bytes
    monkeypatch.setattr(sizing, "bytes_per_block", lambda model, block_size: 8)
    sizes = {"num_blocks": 20, "token_budget": 8}
    simulated_engine(**sizes)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        simulated_engine(**(sizes | settings))
    # more blocks would not help if the context is the limit
    assert ("raise --kv-blocks" in str(refused.value)) == (settings.get("num_blocks") == 10)


@pytest.mark.parametrize(("free", "num_blocks"), [(10**13, 9 * 16), (640, 5), (639, 4), (9, 1)])
def test_on_a_cpu_the_pool_takes_a_quarter_of_free_memory(free, num_blocks, monkeypatch):
    """A block takes 2 (K, V) * 4 tokens * 4 bytes."""
    monkeypatch.setattr(sizing, "memory_of", lambda device: (free, 2**60))
    assert simulated_engine(num_blocks=None, max_num_seqs=12).num_blocks == num_blocks


def test_the_defaults_on_a_gpu(monkeypatch):
    """
    The pool takes 90% of what is free after one step, because its kernels and tensors also need
    memory. Here 100 of 1,000 blocks are free.
    """
    built = []

    class Noted(SimulatedDevice):
        def __init__(self, model, settings):
            built.append(settings.num_blocks)
            super().__init__(model, settings)

        def warm_up(self):
            built.append("warm")

    model = NoModel(9, 64)
    model.config = GPTConfig(9, 64, n_layer=3, n_head=6, n_embd=30, n_kv_head=2)
    weight = SimpleNamespace(is_cuda=True, device=SimpleNamespace(type="cuda"), nbytes=0)
    weight.dtype = torch.bfloat16
    model.wte = SimpleNamespace(weight=weight)
    monkeypatch.setattr(engine_module, "Device", Noted)
    # a block: 2 (K, V) * 3 layers * 2 KV heads * 5 * 4 tokens * 2 bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (48_000, 480_000))
    engine = Engine(model, Settings(block_size=4))
    assert engine.num_blocks == 90
    assert engine.overlap
    engine = Engine(model, Settings(block_size=4, num_blocks=1000, overlap=False))
    assert built == [1, "warm", 90, 1000]
    assert not engine.overlap and not simulated_engine().overlap
    with raises(ValueError, "1,001 blocks of 4", "lower --kv-blocks"):
        Engine(model, Settings(block_size=4, num_blocks=1001))


def test_out_of_memory_says_what_to_change():
    """torch's message only says how many bytes were wanted; ours says which flag to change."""

    def no_memory(*arguments):
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    with raises(ValueError, "a KV pool of 32 blocks of 4", "lower --kv-blocks", "5 GiB"):
        simulated_engine(num_blocks=32, build=no_memory)


def test_the_statement_says_how_many_texts_fit():
    engine = simulated_engine(num_blocks=2000, max_model_len=60, quantize="int8")
    device = engine.device
    device.pool = SimpleNamespace(kv=SimpleNamespace(nbytes=5 * 2**20))
    device.ops = SimpleNamespace(name="torch")
    device.reason = "because"
    device.graphs = {1: 2}
    device.graph_statement = "7 graphs"
    pool = "KV pool of 5 MiB: 2,000 blocks of 4, 8,000 tokens, 133 texts of 60"
    pool += " (the model's context has 64)"
    weights = "0 MiB of weights (float32, quantize int8)"
    assert engine.statement() == f"{weights}; {pool}; attention: torch, because; 7 graphs"


# --------------------------------------------------------------------------------------------------
# Requests in


REFUSED = """
{"prompt_tokens": [1, 12]} -> token 12, outside 0..11: encode it to a list with this model's
{"prompt_tokens": [-1]} -> token -1, outside 0..11
{"prompt_tokens": [true]} -> token True, outside
{"prompt_tokens": []} -> has an empty prompt: give it at least one token
{"cache_salt": null} -> cache_salt is None: wanted a string
{"n": 0} -> n is 0: wanted a whole number, at least 1
{"n": true} -> n is True
{"prompt_logprobs": -1} -> prompt_logprobs is -1
{"prompt_logprobs": true} -> prompt_logprobs is True
{"prompt_logprobs": false} -> prompt_logprobs is False
{"id": "a"} -> request id 'a' is in use
{"id": "a.2"} -> request id 'a.2' is in use
{"id": "b", "n": 3} -> request id 'b.2' is in use
"""
REFUSED = [row.split(" -> ") for row in REFUSED.strip().splitlines()]
REFUSED = [(json.loads(fields), message) for fields, message in REFUSED]
REFUSED += [
    ({"prompt_tokens": torch.tensor([1]).numpy()}, "token np.int64(1), outside"),
    (
        {"prompt_tokens": [0] * 31},
        "31 prompt tokens + 10 max_tokens = 41 do not fit into 40 (context length 64, KV pool "
        "of 10 blocks of 4): shorten the prompt",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_request_that_can_never_be_served_is_refused_at_once(fields, message):
    """
    Would catch: a limit off by one; a request queued although it was refused; a bool taken for
    token 1.
    """
    engine = simulated_engine(num_blocks=10)
    engine.add_request("a", [1], greedy(1), n=3)
    engine.add_request("b.2", [1], greedy(1))
    request = {"id": "new", "prompt_tokens": [1], "params": greedy(10)}
    with raises(ValueError, message):
        engine.add_request(**(request | fields))
    engine.add_request("new", [0] * 29 + [11], greedy(10), prompt_logprobs=12)
    engine.add_request("b", [1], greedy(1), n=2)
    assert len(tokens_of(finish(engine), "new")) == 10
    engine.add_request("a", [1], greedy(1))  # its id is free again


def test_an_add_message_carries_a_bias_and_is_refused_with_the_reason():
    """JSON has strings as keys. The simulator checks all other fields of a message."""
    engine = simulated_engine()
    errors = []
    link = SimpleNamespace(queue=errors.append)
    message = {"op": "add", "id": "a", "prompt": [1]}
    handle_message(engine, link, message | {"params": {"logit_bias": {"5": 2.5}}})
    assert engine.requests["a"].params.logit_bias == {5: 2.5}
    for wrong in "max_tokens", "temprature":
        handle_message(engine, link, message | {"id": "b", "params": {wrong: 0}})
        error = errors.pop()
        assert (error["id"], error["kind"]) == ("b", "invalid")
        assert wrong in error["message"]
    assert list(engine.requests) == ["a"]


def test_requests_without_a_seed_are_drawn_one():
    """
    Previously every start of the server or the terminal gave the same text again, because seeds
    were always drawn from 0. If a seed is set, an engine's runs can be repeated.
    """

    def draw(**settings) -> list[int]:
        engine = simulated_engine(**settings)
        params = SamplingParams(max_tokens=16)
        return [engine.add_request(id, [1], params).params.seed for id in "ab"]

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert len({*draw(), *draw()}) == 4


# --------------------------------------------------------------------------------------------------
# Answers


def test_each_of_several_ends_of_text_ends_it():
    """
    Previously only the first entry of config.json's list ended a text, or the list was refused.
    """
    text = greedy_answer([1, 2], 20)
    later = next(token for token in text if token != text[0])
    for ends in (later, text[0]), (text[0], later), (later, 11):
        engine = simulated_engine(eos=ends)
        answers = engine.generate(
            2 * [[1, 2]], [greedy(20), greedy(20, ignore_eos=True)], progress=False
        )
        length = 1 + min(text.index(token) for token in ends if token in text)
        assert answers == [text[:length], text]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_hundred_steps_without_waiting_for_the_device():
    """A single `.item()` in a step would make the device wait for the host from then on."""
    sizes = {"max_num_seqs": 8, "block_size": 4, "num_blocks": 200}  # others also use the GPU
    engine = Engine(deepcopy(trained_model()).cuda(), Settings(**sizes))
    params = SamplingParams(max_tokens=engine.max_model_len - 5, top_p=0.9)
    for i in range(6):
        engine.add_request(i, prompt(i, 5), params)
    for _ in range(5):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(min(100, engine.max_model_len - 20)):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --------------------------------------------------------------------------------------------------
# `generate`


def test_delays_that_are_never_asked_for_are_forgotten(monkeypatch):
    """
    A program that uses `generate` never reads them: two numbers per request were kept for ever.
    """
    monkeypatch.setattr(engine_module, "MAX_DELAYS", 2)
    engine = simulated_engine()
    engine.generate([[1]] * 3, greedy(2), progress=False)
    stats = engine.stats()
    assert len(stats["waited"]) == len(stats["prefilled"]) == 2


def test_generate_leaves_the_requests_of_others_as_they_are():
    """
    With overlap it dropped the running step, and with it a token of a request that another caller
    had added.
    """
    engine = simulated_engine(overlap=True)
    generate = partial(engine.generate, progress=False)
    engine.add_request("generate-2", [1, 2, 3], greedy(12))
    outputs = engine.step() + engine.step()
    with raises(ValueError, "an empty prompt"):
        generate([[1, 2], []], greedy(2))
    assert list(engine.requests) == ["generate-2"]
    outputs += finish(engine)
    assert tokens_of(outputs, "generate-2") == greedy_answer([1, 2, 3], 12)
    answers = generate([[4, 5], [6]], [greedy(2), greedy(3)])
    assert answers == [greedy_answer([4, 5], 2), greedy_answer([6], 3)]
    assert_idle(engine)


# --------------------------------------------------------------------------------------------------
# Steps that fail or come late


def fail(engine: Engine, error: BaseException, nth=1, when=lambda plan: True):
    """Make the nth launch of a plan for which `when` is true raise this error."""
    launch = engine.runner.launch
    plans = []

    def failing(plan: Plan):
        plans.extend([plan] * when(plan))
        if len(plans) == nth:
            engine.runner.launch = launch
            raise error
        return launch(plan)

    engine.runner.launch = failing


def test_generate_raises_errors_and_leaves_an_idle_pool():
    """
    Would catch: a partial answer returned as if it were whole; requests left by Ctrl-C, which the
    next call would serve again, or which would go on with a device state one step ahead of their
    own.
    """
    engine = simulated_engine()
    fail(engine, FloatingPointError("bad"), nth=5)
    request = engine.add_request("mine", [9, 9], greedy(20))
    with raises(RuntimeError, "failed: FloatingPointError: bad"):
        engine.generate([[i] for i in range(12)], greedy(8), progress=False)
    assert request.status == "done"
    assert request.finish_reason == "error"
    assert_idle(engine)
    assert engine.generate([[3]], greedy(8), progress=False) == [greedy_answer([3], 8)]


def test_ctrl_c_as_an_answer_ends():
    """
    Previously `generate` raised an AttributeError instead, and its other requests remained in the
    engine for ever.
    """
    engine = simulated_engine()
    broken = SimpleNamespace(resolved=Mock(side_effect=KeyboardInterrupt))
    engine.acting["resolved"].append(broken)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2]], [greedy(1), greedy(8)], progress=False)
    engine.acting["resolved"].remove(broken)
    assert_idle(engine)


@pytest.mark.parametrize("moment", ["planned", "launched"])
def test_a_stage_that_fails_ends_the_requests_of_its_step(moment):
    """
    Would catch: a request that the plan admitted but the device does not know. It would go on with
    the row of the request before it.
    """
    engine = simulated_engine(max_num_seqs=2)
    engine.add_request("first", [7, 8], greedy(9))
    engine.step()
    engine.add_request("admitted", [9, 9], greedy(20))
    engine.add_request("waits", [3], greedy(8))
    broken = SimpleNamespace(**{moment: Mock(side_effect=KeyboardInterrupt)})
    engine.acting[moment].append(broken)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.acting[moment].remove(broken)
    assert list(engine.requests) == ["waits"]
    assert tokens_of(finish(engine), "waits") == greedy_answer([3], 8)
    assert_idle(engine)


def test_ctrl_c_under_overlap_takes_in_the_step_under_way():
    """
    The interrupted plan preempted a prompt while a chunk of it was running. Previously the prompt
    could be admitted again before that step was resolved. Then the chunk was counted twice, and
    blocks were committed before their K and V existed.
    """
    sizes = {"num_blocks": 12, "max_num_seqs": 2, "token_budget": 5, "watermark": 0}
    engine = simulated_engine(overlap=True, **sizes)
    engine.add_request("grows", [1] * 7, greedy(9))
    engine.step()
    engine.step()
    long = [i % 11 for i in range(37)]  # its 10 blocks are the rest of the pool
    engine.add_request("long", long, greedy(9))
    fail(engine, KeyboardInterrupt(), when=lambda plan: bool(plan.preempted))
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    assert engine.in_flight is None
    assert list(engine.requests) == ["long"]
    assert tokens_of(finish(engine), "long") == greedy_answer(long, 9)
    assert_idle(engine)


# --------------------------------------------------------------------------------------------------
# Windows


def test_a_layer_that_sees_all_keeps_all():
    """
    Would catch: blocks freed because some layers have windows, although another layer reads them.
    """
    model = GPT(replace(trained_model().config, windows=(8, 0))).eval()
    engine = new_engine(model, num_blocks=16)
    engine.generate([prompt(0, 40)], greedy(24), progress=False)
    assert engine.scheduler.peak_blocks == 16
