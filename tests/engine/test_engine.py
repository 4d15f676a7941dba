"""
Single rules of the engine: settings and sizes, refusals, messages of HTTP processes, failures and
interrupts, the summary. Most run without a model (simulated_runner.py). Right answers are proved in
test_paged.py and test_runner.py, and random lives are the simulator's.
"""

import dataclasses
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine import engine as engine_module
from engine import sizing
from engine.engine import Engine
from engine.process import handle_message, serve
from engine.sizing import with_step_size
from model import GPT, GPTConfig
from paged import POLICIES, Plan
from params import SamplingParams, Settings
from test_paged import (
    assert_equals_dense,
    assert_idle,
    mixed_params,
    new_engine,
    prompt,
    raises,
    trained_model,
)
from test_paged import (
    serve as serve_all,
)
from tests.simulated_runner import (
    VOCABULARY,
    NoModel,
    SimulatedRunner,
    finish,
    greedy,
    greedy_answer,
    simulated_engine,
    tokens_of,
)

# --------------------------------------------------------------------------------------------------
# Settings and sizes


def test_a_count_is_a_whole_number_of_at_least_1():
    """NaN passed, 10**30 ended in an OverflowError, and others in a TypeError without the name."""
    counts = [f.name for f in dataclasses.fields(Settings) if "least" in f.metadata]
    assert len(counts) == 5
    for name in counts:
        assert getattr(Settings(**{name: 1}), name) == 1
        for wrong in 0, -1, 2**31, 10**30, 1.5, float("nan"), "1", []:
            with raises(ValueError, f"{name} is {wrong!r}, wanted at least 1, a whole number"):
                Settings(**{name: wrong})
    with raises(ValueError, "block_size is None"):  # it has a default on every machine
        Settings(block_size=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().block_size = 32


def test_the_share_of_prompts_is_below_1():
    for share in 0, 0.25, 0.999:
        assert Settings(prefill_share=share).prefill_share == share
    for wrong in -0.001, 1, float("nan"):
        with raises(ValueError, f"prefill_share is {wrong}", "0 or more, below 1"):
            Settings(prefill_share=wrong)


def test_every_setting_reaches_the_scheduler():
    """
    Would catch: a flag that is taken and does nothing, a share of blocks taken for one of tokens.
    """
    settings = {"policy": "sjf", "token_budget": 40, "block_size": 2, "prefix_cache": False}
    scheduler = simulated_engine(num_blocks=70, watermark=0.1, prefill_share=0.5, **settings)
    scheduler = scheduler.scheduler
    assert scheduler.queue_key is POLICIES["sjf"] and not scheduler.settings.prefix_cache
    assert (scheduler.token_budget, scheduler.prefill_tokens) == (40, 20)
    assert (scheduler.block_size, scheduler.watermark) == (2, 7)
    scheduler = simulated_engine(num_blocks=200).scheduler
    assert scheduler.queue_key is POLICIES["priority"] and scheduler.settings.prefix_cache
    assert (scheduler.watermark, scheduler.prefill_tokens, scheduler.max_num_seqs) == (2, 4, 8)


@pytest.mark.parametrize(
    ("on_gpu", "max_num_seqs", "token_budget", "sizes"),
    [
        (False, None, None, (64, 512)),
        (True, None, None, (256, 8192)),
        (False, 600, None, (600, 600)),
        (True, None, 256, (256, 256)),
    ],
)
def test_the_sizes_of_a_step(on_gpu, max_num_seqs, token_budget, sizes):
    settings = Settings(max_num_seqs=max_num_seqs, token_budget=token_budget)
    settings = with_step_size(settings, on_gpu)
    assert (settings.max_num_seqs, settings.token_budget) == sizes


def test_the_pool_has_room_for_three_quarters_of_the_rows_at_full_length():
    """
    A context that is no multiple of the block size needs a block more a row, not one less; a text
    of full length always fits. So a small model's pool can overflow, and shows a preemption.
    """

    def room(num_rows: int, context_length=32) -> int:
        sizes = {"num_blocks": None, "max_num_seqs": num_rows, "token_budget": 64}
        engine = simulated_engine(context_length=context_length, **sizes)
        assert engine.max_model_len == context_length
        return engine.num_blocks

    assert (room(4), room(4, 30), room(4, 29), room(4, 28)) == (24, 24, 24, 21)
    assert (room(64), room(3), room(2), room(1)) == (64 * 6, 18, 12, 8)
    assert simulated_engine(context_length=30, num_blocks=7).max_model_len == 28
    assert simulated_engine(context_length=30, num_blocks=8).max_model_len == 30
    assert simulated_engine(context_length=30, num_blocks=8, max_model_len=9).max_model_len == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token_budget": 7}, "token_budget is 7, wanted at least max_num_seqs, 8"),
        ({"max_model_len": 65}, "max_model_len is 65, possible is 1 to 64"),
        ({"max_model_len": 41, "num_blocks": 10}, "possible is 1 to 40 (context length 64, KV pool "
            "of 10 blocks of 4): lower --max-model-len or raise --kv-blocks"),
        ({"num_blocks": 21}, "21 blocks of 4 tokens takes 0.0 GiB, cpu has 0.0: lower --kv-blocks"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings, message, monkeypatch):
    """Would catch: a limit silently lowered, or a death in the middle of serving."""
    monkeypatch.setattr(sizing, "memory_of", lambda device: (160, 160))  # 20 blocks of 8 bytes
    monkeypatch.setattr(sizing, "bytes_per_block", lambda model, block_size: 8)
    with raises(ValueError, message):
        simulated_engine(**({"num_blocks": 20} | settings))
    assert simulated_engine(num_blocks=20, token_budget=8).num_blocks == 20


@pytest.mark.parametrize(("free", "num_blocks"), [(10**13, 9 * 16), (640, 5), (639, 4), (9, 1)])
def test_on_a_cpu_the_pool_takes_a_quarter_of_free_memory(free, num_blocks, monkeypatch):
    """A block: 2 (K, V) * 4 tokens * 4 bytes."""
    monkeypatch.setattr(sizing, "memory_of", lambda device: (free, 2**60))
    assert simulated_engine(num_blocks=None, max_num_seqs=12).num_blocks == num_blocks


def engine_on_a_gpu(monkeypatch, **settings) -> tuple[Engine, list[str]]:
    """
    An engine that believes its weights to be on a GPU with room for 100 blocks, of 1,000, and how
    its runners were built.
    """
    built = []

    class Noted(SimulatedRunner):
        def __init__(self, model, settings):
            built.append(f"{settings.num_blocks} blocks")
            super().__init__(model, settings)

        def warm_up(self):
            built.append("warmed up")

    model = NoModel(9, 64)
    model.config = GPTConfig(9, 64, n_layer=3, n_head=6, n_embd=30, n_kv_head=2)
    device = SimpleNamespace(type="cuda")
    weight = {"is_cuda": True, "device": device, "dtype": torch.bfloat16, "nbytes": 0}
    model.wte = SimpleNamespace(weight=SimpleNamespace(**weight))
    monkeypatch.setattr(engine_module, "Runner", Noted)
    # a block: 2 (K, V) * 3 layers * 2 KV heads * 5 * 4 tokens * 2 bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (48_000, 480_000))
    return Engine(model, Settings(block_size=4, **settings)), built


def test_the_defaults_on_a_gpu(monkeypatch):
    """The pool takes 90% of what is free after a step, whose kernels and tensors need memory."""
    engine, built = engine_on_a_gpu(monkeypatch)
    assert engine.num_blocks == 90 and built == ["1 blocks", "warmed up", "90 blocks"]
    assert engine.overlap and engine.scheduler.max_num_seqs == 256
    engine, built = engine_on_a_gpu(monkeypatch, num_blocks=1000, overlap=False)
    assert built == ["1000 blocks"] and not engine.overlap
    with raises(ValueError, "1,001 blocks of 4", "lower --kv-blocks"):
        engine_on_a_gpu(monkeypatch, num_blocks=1001)
    assert not simulated_engine().overlap and simulated_engine(overlap=True).overlap


def test_out_of_memory_says_what_to_change():
    """A reader of torch's message learns how many bytes, and not which flag."""

    def no_memory(*arguments):
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    with raises(ValueError, "a KV pool of 32 blocks of 4", "lower --kv-blocks", "5 GiB"):
        simulated_engine(num_blocks=32, build=no_memory)


# --------------------------------------------------------------------------------------------------
# Requests and messages in


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([1, 12], {}, "token 12, outside 0..11: encode it with this model's tokenizer"),
        ([-1], {}, "token -1, outside 0..11"),
        ([True], {}, "token True, outside"),
        ([1.0], {}, "token 1.0, outside"),
        (torch.tensor([1]).numpy(), {}, "token np.int64(1), outside"),
        ([], {}, "the prompt is empty"),
        ([0] * 31, {}, "31 prompt tokens + 10 max_tokens = 41 do not fit into 40 (context length "
            "64, KV pool of 10 blocks of 4): shorten the prompt"),
        ([1], {"cache_salt": None}, "cache_salt is None: wanted a string"),
        ([1], {"n": 0}, "n is 0: wanted a whole number, at least 1"),
        ([1], {"n": True}, "n is True"),
        ([1], {"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ([1], {"prompt_logprobs": True}, "prompt_logprobs is True"),
        ([1], {"id": "a"}, "request id 'a' is in use"),
        ([1], {"id": "a.2"}, "request id 'a.2' is in use"),
        ([1], {"id": "b", "n": 3}, "request id 'b.2' is in use"),
    ],
)  # fmt: skip
def test_a_request_that_can_never_be_served_is_refused_at_once(tokens, options, message):
    """
    Would catch: a limit off by one, a request queued although it was refused, a bool taken for
    token 1.
    """
    engine = simulated_engine(num_blocks=10)
    engine.add_request("a", [1], greedy(1), n=3)
    engine.add_request("b.2", [1], greedy(1))
    with raises(ValueError, message):
        engine.add_request(**({"id": "new", "prompt_tokens": tokens} | options), params=greedy(10))
    engine.add_request("new", [0] * 29 + [11], greedy(10), prompt_logprobs=12)
    engine.add_request("b", [1], greedy(1), n=2)
    assert len(tokens_of(finish(engine), "new")) == 10
    engine.add_request("a", [1], greedy(1))  # its id is free again


class FakeLinks:
    """
    Links that say what a test has them say, a list of (link, message) a turn, and keep what they
    are sent.
    """

    def __init__(self, *turns):
        self.turns, self.links = list(turns), {}
        self.greeting, self.timeouts, self.stats = None, [], []

    def link(self, number: int):
        link = SimpleNamespace(number=number, messages=[], rows=[])
        link.queue, link.queue_row = link.messages.append, link.rows.append
        self.links[number] = link
        return link

    @property
    def is_wanted(self) -> bool:
        return bool(self.turns)

    def set_greeting(self, message):
        self.greeting = message

    def receive(self, timeout):
        self.timeouts.append(timeout)
        return self.turns.pop(0)

    def flush(self, stats):
        self.stats.append(stats)


def add(id: str, max_tokens=30, params=(), **options) -> dict:
    params = {"temperature": 0.0, "max_tokens": max_tokens, **dict(params)}
    return {"op": "add", "id": id, "prompt": [1, 2], "params": params, "options": options}


@pytest.mark.parametrize("overlap", [False, True])
def test_once_around_the_loop_for_each_message(overlap):
    """
    The loop greets, waits only where there is nothing to do, and reports the engine's state after
    every turn.
    """
    engine = simulated_engine(eos=(3,), max_model_len=20, overlap=overlap)
    links = FakeLinks()
    link = links.link(0)
    long = add("a", 15, {"ignore_eos": True})
    links.turns = [[(link, long)], [], [], [], [(link, {"op": "abort", "id": "a"})], [], []]
    assert serve(engine, links) is None
    limits = {"max_model_len": 20, "max_num_seqs": 8, "vocab_size": VOCABULARY}
    assert links.greeting == {"op": "ready", "eos_token_ids": (3,), **limits}
    assert links.timeouts == [None, 0, 0, 0, 0, None, None]
    assert [stats["at_work"] for stats in links.stats] == [1, 1, 1, 1, 0, 0, 0]
    tokens = [t for row in link.rows for t in row[1]]
    assert tokens == greedy_answer([1, 2], 4 - overlap)
    assert_idle(engine)


def test_requests_end_with_their_link_and_no_others_do():
    """
    Link 1 went, and with it link 10's requests, or its own that still waited, or choices to be
    forked.
    """
    engine = simulated_engine(max_num_seqs=2)
    one, ten = map(FakeLinks().link, (1, 10))
    for link in one, ten:
        handle_message(engine, link, add("a", n=2), None)
        handle_message(engine, link, add("b"), None)
    engine.step()
    handle_message(engine, one, {"op": "abort", "id": "b"}, None)
    assert "1:b" not in engine.requests and "10:b" in engine.requests
    handle_message(engine, one, {"op": "gone"}, None)
    assert {id.split(":")[0] for id in [*engine.requests, *engine.promised]} == {"10"}
    assert len(engine.requests) >= 2
    handle_message(engine, ten, {"op": "gone"}, None)
    assert_idle(engine)


def test_the_queue_takes_so_many_choices_and_no_more():
    """max_queue counts choices beyond the rows, promised ones too; 0 is a limit, None is none."""
    engine = simulated_engine(max_num_seqs=2)
    link = FakeLinks().link(0)
    for id, n, max_queue in ("a", 3, 3), ("b", 3, 3), ("c", 2, 3), ("d", 1, 3), ("e", 4, None):
        handle_message(engine, link, add(id, n=n), max_queue)
    assert list(engine.requests) == ["0:a", "0:c", "0:e"]
    full = "3 choices beside 3 in work: at most 5 are taken, try again later"
    assert link.messages[0] == {"op": "error", "id": "b", "message": full, "kind": "full"}
    engine = simulated_engine(max_num_seqs=2)
    for id in "abc":
        handle_message(engine, link, add(id), 0)
    assert list(engine.requests) == ["0:a", "0:b"]


def test_an_add_message_carries_parameters_and_options():
    """JSON has texts as keys."""
    engine, link = simulated_engine(policy="priority"), FakeLinks().link(4)
    options = {"priority": -3, "prompt_logprobs": 1, "cache_salt": "pepper"}
    handle_message(engine, link, add("a", 3, {"logit_bias": {"5": 2.5}}, **options), None)
    request = engine.requests["4:a"]
    assert request.params.logit_bias == {5: 2.5}
    assert {name: getattr(request, name) for name in options} == options
    wrong = {"max_tokens": 0}, {"temprature": 1}, {"temperature": "hot"}, {"id": "'4:a' is in use"}
    for params in wrong:
        handle_message(engine, link, add("a", params=params) | params, None)
        error = link.messages.pop()
        assert (error["op"], error["kind"]) == ("error", "invalid")
        assert next(iter(params)) in error["message"]
    assert list(engine.requests) == ["4:a"]


# --------------------------------------------------------------------------------------------------
# Answers


def test_each_of_several_ends_of_text_ends_it():
    """Only the first of config.json's list ended a text, or the list was refused."""
    text = greedy_answer([1, 2], 20)
    later = next(token for token in text if token != text[0])
    for ends in (later, text[0]), (text[0], later), (later, 11):
        engine = simulated_engine(eos=ends)
        engine.add_request("a", [1, 2], greedy(20))
        engine.add_request("ignored", [1, 2], greedy(20, ignore_eos=True))
        outputs = finish(engine)
        length = 1 + min(text.index(token) for token in ends if token in text)
        assert tokens_of(outputs, "a") == text[:length]
        assert tokens_of(outputs, "ignored") == text


def test_requests_without_a_seed_are_drawn_one():
    """
    Every start of the server or of the terminal said the same text again: the seeds were always
    drawn from 0. With a seed, an engine's runs can be repeated.
    """

    def draw(**settings) -> list[int]:
        engine = simulated_engine(**settings)
        params = SamplingParams(max_tokens=16)
        return [engine.add_request(id, [1], params).params.seed for id in "ab"]

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert len({*draw(), *draw()}) == 4


@pytest.mark.parametrize(("P", "max_num_seqs", "forks"), [(7, 8, 3), (7, 2, 0), (8, 8, 0)])
def test_choices_are_forks_where_a_row_and_a_partial_block_are_there(P, max_num_seqs, forks):
    """Other choices wait, and find the prompt's blocks in the prefix cache."""
    engine = simulated_engine(max_num_seqs=max_num_seqs)
    engine.add_request("other", [9], greedy(20))
    engine.add_request("a", [*range(P)], greedy(5), n=4)
    outputs = finish(engine)
    assert engine.scheduler.num_forks == forks
    assert {output.id for output in outputs} == {"a", "a.1", "a.2", "a.3", "other"}


def test_two_engines_in_one_process():
    """Would catch: state of a module or a class that two engines share."""
    engines = [new_engine(trained_model(h), block_size=s) for h, s in ((2, 4), (4, 8))]
    params = mixed_params(10, 5)
    requests = []
    for engine in engines:
        for i in range(5):
            requests.append((engine, engine.add_request(i, prompt(i, 8 + 3 * i), params[i])))
    while any(engine.has_work for engine in engines):
        for engine in engines:
            engine.step()
    for engine, r in requests:
        assert_equals_dense(engine.reference, r.prompt_tokens, r.generated_tokens, r.params)


def test_overlap_starts_a_step_before_it_takes_in_the_last():
    """So the host works while the device does; each request has at most one token too many."""
    engine, order = simulated_engine(overlap=True), []
    launch, wait_for = engine.runner.launch, engine.runner.wait_for
    engine.runner.launch = lambda plan: order.append("launch") or launch(plan)
    engine.runner.wait_for = lambda flight: order.append("wait_for") or wait_for(flight)
    engine.add_request("a", [1, 2], greedy(3))
    assert engine.step() == [] and engine.has_work
    finish(engine)
    assert order == ["launch", "launch", "wait_for", "launch", "wait_for", "wait_for"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_hundred_steps_without_waiting_for_the_device():
    """One `.item()` in a step, and the device waits for the host from then on."""
    engine = Engine(deepcopy(trained_model()).cuda(), Settings(max_num_seqs=8, block_size=4))
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
# `generate`, its summary, and what is printed before serving


def test_the_statement_says_how_many_texts_fit():
    engine = simulated_engine(num_blocks=2000, max_model_len=60, quantize="int8")
    engine.runner.pool = SimpleNamespace(kv=SimpleNamespace(nbytes=5 * 2**20))
    engine.runner.ops = SimpleNamespace(name="torch")
    engine.runner.reason = "because"
    engine.runner.graphs, engine.runner.graph_statement = {1: 2}, "7 graphs"
    pool = "KV pool of 5 MiB: 2,000 blocks of 4, 8,000 tokens, 133 texts of 60"
    pool += " (the model's context has 64)"
    weights = "0 MiB of weights (float32, quantize int8)"
    assert engine.statement() == f"{weights}; {pool}; attention: torch, because; 7 graphs"


def test_delays_that_nobody_asks_for_are_forgotten(monkeypatch):
    """`generate` in a program never asks: two numbers of each request were kept for ever."""
    monkeypatch.setattr(engine_module, "MAX_DELAYS", 2)
    engine = simulated_engine()
    engine.generate([[1]] * 3, greedy(2), progress=False)
    stats = engine.stats()
    assert len(stats["waited"]) == len(stats["prefilled"]) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_generate_leaves_the_requests_of_others_as_they_are(fails):
    """
    With overlap it dropped the step under way, and with it a token of a request that somebody else
    had added.
    """
    engine = simulated_engine(overlap=True)
    engine.add_request("generate-2", [1, 2, 3], greedy(12))
    outputs = engine.step() + engine.step()
    if fails:
        with raises(ValueError, "prompt is empty"):
            engine.generate([[1, 2], []], greedy(2), progress=False)
        with raises(ValueError, "'generate-2' is in use"):
            engine.generate([[1, 2]] * 3, greedy(2), progress=False)
        with raises(ValueError, "shorter"):
            engine.generate([[1, 2]] * 2, [greedy(2)], progress=False)
        assert list(engine.requests) == ["generate-2"]
        outputs += finish(engine)
        assert tokens_of(outputs, "generate-2") == greedy_answer([1, 2, 3], 12)
    else:
        answers = engine.generate([[4, 5], [6]], [greedy(2), greedy(3)], progress=False)
        assert answers == [greedy_answer([4, 5], 2), greedy_answer([6], 3)]
    assert_idle(engine)


# --------------------------------------------------------------------------------------------------
# Steps that fail, and that come late


def fail(engine: Engine, error: BaseException, nth=1, when=lambda plan: True):
    """Let the nth launch of such a plan raise."""
    launch = engine.runner.launch
    plans = []

    def failing(plan: Plan):
        plans.extend([plan] * when(plan))
        if len(plans) == nth:
            engine.runner.launch = launch
            raise error
        return launch(plan)

    engine.runner.launch = failing


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (FloatingPointError("bad"), RuntimeError, "failed: FloatingPointError: bad"),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_generate_raises_errors_and_leaves_an_idle_pool(error, kind, message):
    """
    Would catch: an answer cut short and returned as if it were whole; Ctrl-C leaving requests that
    the next call would serve again, or that go on with a device state one step ahead of their own.
    """
    engine = simulated_engine()
    fail(engine, error, nth=5)
    mine = engine.add_request("mine", [9, 9], greedy(20))
    with raises(kind, message):
        engine.generate([[i] for i in range(12)], greedy(8), progress=False)
    assert mine.status == "done" and mine.finish_reason == "error"
    assert_idle(engine)
    assert engine.generate([[3]], greedy(8), progress=False) == [greedy_answer([3], 8)]


def test_ctrl_c_under_overlap_takes_in_the_step_under_way():
    """
    The interrupted plan has preempted a prompt of which a chunk was under way. Admitted again
    before that step was taken in, the prompt had the chunk counted twice, and blocks committed
    before their K, V were there.
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
    assert engine.in_flight is None and list(engine.requests) == ["long"]
    assert tokens_of(finish(engine), "long") == greedy_answer(long, 9)
    assert_idle(engine)


def test_a_late_prefill_of_an_aborted_request_forks_and_reports_nothing():
    """
    Preempted with a token, it had computed its prompt again when it was aborted, before that step's
    token was known: the step then reported its delay a second time, and forked the choices of the
    next owner of its id, from its prompt.
    """
    sizes = {"block_size": 1, "num_blocks": 9, "max_num_seqs": 2, "watermark": 0}
    engine = simulated_engine(prefix_cache=False, overlap=True, **sizes)
    engine.add_request("long", [1, 2, 3, 4], greedy(5))
    old = engine.add_request("a", [5, 6], greedy(5))
    while not (old.num_preemptions and old.num_to_come):
        engine.step()
    assert old.num_generated > old.num_to_come == 1
    engine.stats()
    engine.abort("a")
    engine.add_request("a", [7, 8], greedy(2), n=2)
    outputs = engine.step()
    assert "a.1" not in engine.requests and not engine.stats()["prefilled"]
    outputs += finish(engine)
    for id in "a", "a.1":
        assert tokens_of(outputs, id) == greedy_answer([7, 8], 2)


# --------------------------------------------------------------------------------------------------
# Windows: every layer slides


def windowed_model(*windows: int) -> GPT:
    """The model of the tests, whose layers see so much alone; it looks 13 tokens back."""
    whole = trained_model()
    model = GPT(replace(whole.config, windows=windows)).eval()
    model.load_state_dict(whole.state_dict())
    return model


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_texts_longer_than_the_pool_are_the_dense_models(device, attention, overlap):
    """
    A window of 16 touches 5 blocks of 4, and the pool has 7: so blocks are left, found and taken by
    others all the time. Every token is the dense model's, which computes whole texts.
    """
    model = windowed_model(8, 16)
    sizes = {"num_blocks": 7, "max_num_seqs": 3, "token_budget": 12, "watermark": 0}
    model_there = deepcopy(model).to(device)
    engine = new_engine(model_there, overlap=overlap, attention=attention, **sizes)
    engine.reference = model
    assert "1 text of 64" in engine.statement()
    prompts = [prompt(seed, length) for seed, length in enumerate([40, 6, 8, 30, 7])]
    serve_all(engine, prompts, 24)
    assert engine.scheduler.num_preemptions and not engine.scheduler.num_hit_tokens
    serve_all(engine, prompts[:1], 1)
    serve_all(engine, [prompts[0] + prompt(9, 4)], 20)  # its beginning is gone from the cache
    assert engine.scheduler.num_hit_tokens == 40
    with raises(ValueError, "max_model_len is 60, possible is 1 to 16"):
        new_engine(model, num_blocks=4, max_model_len=60)


def test_a_layer_that_sees_all_keeps_all():
    """Would catch: blocks given back for the layers that slide, though another one reads them."""
    engine = new_engine(windowed_model(8, 0), num_blocks=16)
    assert engine.settings.window == 0
    serve_all(engine, [prompt(0, 40)], 24)
    assert engine.scheduler.peak_blocks == 16
