"""
Single rules of the engine, without a model (simulated_runner.py) or a socket: settings, sizes,
messages of HTTP processes, steps that come late, statement and summary. Random lives are the
simulator's.
"""

import io
from contextlib import redirect_stderr
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from engine import engine as engine_module
from engine.engine import (
    Engine,
    Output,
)
from engine.process import handle_message, send_output, serve
from engine.settings import Settings
from engine.sizing import with_step_size
from model import GPTConfig
from paged import POLICIES
from test_paged import assert_idle, raises
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


def test_every_setting_reaches_the_scheduler():
    """
    Would catch: a flag that is taken and does nothing, a share of blocks taken for one of tokens.
    """
    settings = {
        "policy": "sjf",
        "token_budget": 40,
        "block_size": 2,
        "max_num_seqs": 5,
        "prefill_share": 0.5,
        "max_num_partial_prefills": 3,
        "max_long_partial_prefills": 2,
        "long_prefill_threshold": 7,
        "prefix_cache": False,
    }
    scheduler = simulated_engine(num_blocks=70, watermark=0.1, **settings).scheduler
    assert scheduler.queue_key is POLICIES["sjf"] and scheduler.prefill_tokens == 20
    assert (scheduler.watermark, scheduler.block_allocator.num_blocks) == (7, 70)
    for name in "token_budget", "block_size", "max_num_seqs":
        assert getattr(scheduler, name) == settings[name]
    assert {name: getattr(scheduler.settings, name) for name in settings} == settings
    scheduler = simulated_engine(num_blocks=200).scheduler
    assert (
        scheduler.watermark == 2
        and scheduler.settings.prefix_cache
        and scheduler.queue_key is POLICIES["priority"]
    )
    limits = scheduler.settings
    long = limits.max_long_partial_prefills, limits.long_prefill_threshold
    assert (scheduler.prefill_tokens, limits.max_num_partial_prefills, long) == (4, 4, (1, 512))


def test_the_sizes_of_a_step():
    def sizes(on_gpu: bool, max_num_seqs: int | None, token_budget: int | None):
        asked = Settings(max_num_seqs=max_num_seqs, token_budget=token_budget)
        settings = with_step_size(asked, on_gpu)
        return settings.max_num_seqs, settings.token_budget

    assert sizes(False, None, None) == (64, 512)
    assert sizes(True, None, None) == (256, 8192)
    assert sizes(False, 600, None) == (600, 600)
    assert sizes(True, None, 256) == (256, 256)
    with raises(ValueError, "token_budget is 255, wanted at least max_num_seqs, 256"):
        sizes(True, None, 255)


def test_the_pool_has_room_for_three_quarters_of_the_rows_at_full_length():
    """
    A context that is no multiple of the block size needs a block more a row, not one less; a text
    of full length always fits. So a newcomer's pool can overflow, which was impossible.
    """

    def room(num_rows: int, context_length=32) -> int:
        engine = simulated_engine(
            num_blocks=None,
            context_length=context_length,
            max_num_seqs=num_rows,
            token_budget=64,
        )
        assert engine.max_model_len == context_length
        return engine.num_blocks

    assert (room(4), room(4, 30), room(4, 29), room(4, 28)) == (24, 24, 24, 21)
    assert (room(64), room(3), room(2), room(1)) == (64 * 6, 18, 12, 8)
    assert simulated_engine(context_length=30, num_blocks=7).max_model_len == 28
    assert simulated_engine(context_length=30, num_blocks=8).max_model_len == 30
    assert simulated_engine(context_length=30, num_blocks=8, max_model_len=9).max_model_len == 9


def engine_on_a_gpu(monkeypatch, free: float, total: float, **settings) -> tuple[Engine, list[str]]:
    """
    An engine that believes its weights to be on a GPU with so many bytes free, and how its runners
    were built.
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
    model.wte = SimpleNamespace(
        weight=SimpleNamespace(is_cuda=True, device=device, dtype=torch.bfloat16, nbytes=0)
    )
    monkeypatch.setattr(engine_module, "Runner", Noted)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    return Engine(model, Settings(block_size=4, **settings)), built


def test_what_an_engine_on_a_gpu_does_by_default(monkeypatch):
    """
    A block: 2 (K, V) * 3 layers * 2 KV heads * 5 * 4 tokens * 2 bytes = 480. Of what is free 90% is
    the pool's.
    """
    engine, built = engine_on_a_gpu(monkeypatch, free=480 * 100, total=480 * 1000)
    assert engine.num_blocks == 90 and built == ["1 blocks", "warmed up", "90 blocks"]
    assert engine.overlap and (engine.scheduler.max_num_seqs, engine.scheduler.token_budget) == (
        256,
        8192,
    )
    engine, built = engine_on_a_gpu(
        monkeypatch, 480 * 100, 480 * 1000, num_blocks=1000, overlap=False
    )
    assert engine.num_blocks == 1000 and built == ["1000 blocks"] and not engine.overlap
    with raises(ValueError, "1,001 blocks of 4", "lower --kv-blocks"):
        engine_on_a_gpu(monkeypatch, 480 * 100, 480 * 1000, num_blocks=1001)
    assert not simulated_engine().overlap and simulated_engine(overlap=True).overlap


def test_what_is_accepted_at_the_limit():
    engine = simulated_engine()
    for wrong in -1, VOCABULARY + 1, True, 1.0:
        with raises(ValueError, f"prompt_logprobs is {wrong!r}: wanted 0 to {VOCABULARY}"):
            engine.add_request("a", [1, 2], greedy(1), prompt_logprobs=wrong)
    engine.add_request("a", [1, 2], greedy(1), prompt_logprobs=VOCABULARY)
    assert len(engine.step()[0].prompt_logprobs[0][1]) == VOCABULARY
    with raises(ValueError, "n is 0"):
        engine.add_request("a", [1, 2], greedy(1), n=0)
    engine.add_request("a", [1, 2], greedy(9), n=3)
    for taken, n in (("a", 1), ("a.1", 1), ("a.2", 1)):
        with raises(ValueError, f"request id {taken!r} is in use"):
            engine.add_request(taken, [1], greedy(1), n=n)
    engine.add_request("a.3", [1], greedy(1))
    engine.add_request("b.2", [1], greedy(1))
    with raises(ValueError, "request id 'b.2' is in use"):
        engine.add_request("b", [1], greedy(1), n=3)
    engine.add_request("b", [1], greedy(1), n=2)


# --------------------------------------------------------------------------------------------------
# Messages


class FakeLinks:
    """
    Links that say what a test has them say, a list of (link, message) a turn, and keep what they
    are told.
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


def add(id: str, text: list[int], params: dict, **options) -> dict:
    return {"op": "add", "id": id, "prompt": text, "params": params, "options": options}


GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize("overlap", [False, True])
def test_once_around_the_loop_for_each_message(overlap):
    """
    The loop greets, waits only where there is nothing to do, and tells after every turn how the
    engine is.
    """
    engine = simulated_engine(eos=(3,), max_model_len=20, overlap=overlap)
    links = FakeLinks()
    link = links.link(0)
    long = add("a", [1, 2, 3], GREEDY | {"max_tokens": 15, "ignore_eos": True})
    links.turns = [[(link, long)], [], [], [], [(link, {"op": "abort", "id": "a"})], [], []]
    assert serve(engine, links) is None
    limits = {
        "max_model_len": 20,
        "max_num_seqs": 8,
        "vocab_size": VOCABULARY,
        "eos_token_ids": (3,),
    }
    assert links.greeting == {"op": "ready", **limits}
    assert links.timeouts == [None, 0, 0, 0, 0, None, None]
    assert [stats["at_work"] for stats in links.stats] == [1, 1, 1, 1, 0, 0, 0]
    tokens = [t for row in link.rows for t in row[1]]
    assert tokens == greedy_answer([1, 2, 3], 4 - overlap)
    assert_idle(engine)


def test_what_a_link_added_ends_with_it_and_nothing_else_does():
    """
    Link 1 went, and with it link 10's requests, or those of its own that still wait, or choices to
    be forked.
    """
    engine = simulated_engine(max_num_seqs=2)
    links = FakeLinks()
    one, ten, eleven = (links.link(number) for number in (1, 10, 11))
    for link in one, ten, eleven:
        handle_message(engine, link, add("a", [1, 2], GREEDY | {"max_tokens": 30}, n=2), None)
        handle_message(engine, link, add("b", [1, 2], GREEDY | {"max_tokens": 30}), None)
    engine.step()
    handle_message(engine, one, {"op": "abort", "id": "b"}, None)
    assert "1:b" not in engine.requests and {"10:b", "11:b"} <= set(engine.requests)
    handle_message(engine, one, {"op": "gone"}, None)
    assert {id.split(":")[0] for id in [*engine.requests, *engine.promised]} == {"10", "11"}
    assert len(engine.requests) >= 4
    for link in ten, eleven:
        handle_message(engine, link, {"op": "gone"}, None)
    assert_idle(engine)


def test_the_queue_takes_what_it_can_and_no_choice_more():
    """max_queue counts choices beyond the rows, promised ones too; 0 is a limit, None is none."""
    link = FakeLinks().link(0)

    def is_taken(engine, id, n, max_queue) -> bool:
        handle_message(
            engine,
            link,
            add(id, [1, 2], GREEDY | {"max_tokens": 9}, **({"n": n} if n > 1 else {})),
            max_queue,
        )
        return f"0:{id}" in engine.requests

    engine = simulated_engine(max_num_seqs=2)
    assert is_taken(engine, "a", 3, 3) and not is_taken(engine, "b", 3, 3)
    full = {
        "message": "3 choices beside 3 in work: at most 5 are taken, try again later",
        "kind": "full",
    }
    assert link.messages.pop() == {"op": "error", "id": "b", **full}
    assert is_taken(engine, "c", 2, 3) and not is_taken(engine, "d", 1, 3)
    assert is_taken(engine, "e", 4, None)
    engine = simulated_engine(max_num_seqs=2)
    assert (
        is_taken(engine, "a", 1, 0)
        and is_taken(engine, "b", 1, 0)
        and not is_taken(engine, "c", 1, 0)
    )


def test_what_an_add_message_carries():
    """
    JSON has texts as keys; options reach the request.
    """
    engine, link = simulated_engine(policy="priority"), FakeLinks().link(4)
    params = {
        "max_tokens": 3,
        "logit_bias": {"5": 2.5, "11": -1.0},
        "logprobs": 2,
    }
    handle_message(
        engine,
        link,
        add("a", [1, 2], params, priority=-3, prompt_logprobs=1, cache_salt="pepper"),
        None,
    )
    request = engine.requests["4:a"]
    assert request.params.logit_bias == {5: 2.5, 11: -1.0}
    assert (request.priority, request.prompt_logprobs, request.cache_salt) == (-3, 1, "pepper")
    for wrong in {"max_tokens": 0}, {"temprature": 1}, {"temperature": "hot"}:
        handle_message(engine, link, add("bad", [1, 2], wrong), None)
        error = link.messages.pop()
        assert (error["op"], error["id"], error["kind"]) == ("error", "bad", "invalid")
        assert any(word in error["message"] for word in wrong)
    handle_message(engine, link, add("a", [1, 2], {}), None)
    assert "'4:a' is in use" in link.messages.pop()["message"]
    assert list(engine.requests) == ["4:a"]


def test_each_output_goes_to_its_link_with_all_that_it_has():
    links = FakeLinks()
    links.link(1), links.link(12)
    s, t = [-0.5, [1], [-0.25]], [[-1.0, [], []]]
    outputs = [
        (Output("12:a:b", [7], None, 4), 12, ["a:b", [7], None, 4, None, None]),
        (Output("1:a", [7], "stop", 8, None, s), 1, ["a", [7], "stop", 8, [s], None]),
        (Output("1:b", [7], None, 0, None, None, t), 1, ["b", [7], None, 0, None, t]),
        (Output("1:c", [7], "length", 0, None, s, t), 1, ["c", [7], "length", 0, [s], t]),
    ]
    for output, number, row in outputs:
        send_output(links, output)
        assert links.links[number].rows.pop() == row
    send_output(links, Output("12:x", [], "error", error="broken"))
    assert links.links[12].messages == [
        {"op": "error", "id": "x", "message": "broken", "kind": "internal"}
    ]
    send_output(links, Output("2:a", [7]))  # its process is gone
    assert not any(link.rows for link in links.links.values())


# --------------------------------------------------------------------------------------------------
# What it says, and generate


def test_the_statement_tells_how_many_texts_fit():
    engine = simulated_engine(num_blocks=2000, block_size=4, context_length=64, max_model_len=60)
    engine.runner.pool = SimpleNamespace(kv=SimpleNamespace(nbytes=5 * 2**20))
    engine.runner.ops = SimpleNamespace(name="torch")
    engine.runner.reason = "because"
    engine.runner.graphs, engine.runner.graph_statement = {}, "7 graphs"
    pool = "KV pool of 5 MiB: 2,000 blocks of 4, 8,000 tokens, 133 texts of 60"
    pool += " (the model's context has 64)"
    assert engine.statement().split("; ")[1:] == [pool, "attention: torch, because"]
    engine.runner.graphs = {1: 2}
    assert engine.statement().endswith("; 7 graphs")


def test_weights_are_told_as_they_are(monkeypatch):
    """ "quantize none" said nothing."""
    weight = torch.zeros(2**20)
    model = SimpleNamespace(parameters=lambda: [weight], wte=SimpleNamespace(weight=weight))
    told = [engine_module.describe_weights(model, Settings(quantize=q)) for q in ("none", "int8")]
    assert told == [
        "4 MiB of weights (float32)",
        "4 MiB of weights (float32, quantize int8)",
    ]


def test_a_summary_counts_in_words():
    engine = simulated_engine(num_blocks=1)
    before = dict.fromkeys(engine.counts(), -1) | {"steps": -2, "hit tokens": 0}
    said = engine.summary(before, 1.5)
    assert said.startswith(
        "2 steps, 1 prefill token, 1 decode token, 1 preemption, prefix hit rate"
    )
    assert said.endswith("peak 0 of 1 block, 1.50 s")


def test_the_summary_is_of_this_call(monkeypatch):
    """By a clock of a second a look: counts and time of the first call came with the second."""
    seconds = count(1.0)  # of looks
    clock = SimpleNamespace(perf_counter=lambda: next(seconds), monotonic=lambda: 0.0)
    monkeypatch.setattr(engine_module, "time", clock)
    engine = simulated_engine(num_blocks=100)
    prompts = [[1, 2, 3, 4, 5, i] for i in range(3)]
    for steps_and_prefill, hits in (("5 steps, 18", "0%"), ("4 steps, 6", "67%")):
        said = io.StringIO()
        with redirect_stderr(said):
            engine.generate(prompts, greedy(4, ignore_eos=True))
        *_, bar, summary = said.getvalue().replace("\r", "\n").strip().split("\n")
        assert "3/3" in bar
        counts = f"{steps_and_prefill} prefill tokens, 9 decode tokens, 0 preemptions"
        assert summary == f"{counts}, prefix hit rate {hits}, peak 7 of 100 blocks, 1.00 s"


@pytest.mark.parametrize("fails", [False, True])
def test_generate_leaves_the_requests_of_others_as_they_are(fails):
    """
    With overlap it dropped the step under way, and with it a token of a request that somebody else
    had added.
    """
    engine = simulated_engine(overlap=True)
    engine.add_request("mine", [1, 2, 3], greedy(12))
    outputs = engine.step() + engine.step()
    if fails:
        with raises(ValueError, "prompt is empty"):
            engine.generate([[1, 2], []], greedy(2), progress=False)
        assert list(engine.requests) == ["mine"]
        outputs += finish(engine)
        assert tokens_of(outputs, "mine") == greedy_answer([1, 2, 3], 12)
    else:
        answers = engine.generate([[4, 5], [6]], [greedy(2), greedy(3)], progress=False)
        assert answers == [greedy_answer([4, 5], 2), greedy_answer([6], 3)]
    assert_idle(engine)


# --------------------------------------------------------------------------------------------------
# Steps that fail, and that come late


def fail_once(engine: Engine, name: str):
    """Let the next call of this method of the runner raise."""
    method = getattr(engine.runner, name)

    def fail(argument):
        setattr(engine.runner, name, method)
        raise FloatingPointError("bad number")

    setattr(engine.runner, name, fail)


def failed(id: str) -> Output:
    return Output(id, [], "error", error="FloatingPointError: bad number")


def test_a_late_prefill_of_an_aborted_request_forks_and_reports_nothing():
    """
    Preempted with a token, it had computed its prompt again when it was aborted, before that step's
    token was known: the step then reported its delay a second time, and forked the choices of
    whoever had its id by now, from its prompt.
    """
    engine = simulated_engine(
        block_size=1, num_blocks=9, max_num_seqs=2, watermark=0, prefix_cache=False, overlap=True
    )
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


def test_a_failed_step_ends_who_was_admitted_in_it_without_a_token():
    """
    Its row was not filled on the device: it would have gone on with the block table of who had the
    row before.
    """
    engine = simulated_engine(token_budget=3, max_num_seqs=3, prefill_share=0.0)
    fail_once(engine, "launch")
    for id in "ab":
        engine.add_request(id, [1, 2, 3, 4, 5], greedy(2))
    assert engine.step() == [failed(id) for id in "ab"]
    assert_idle(engine)


def test_a_late_failure_is_not_that_of_who_has_the_id_now():
    """
    A step that fails when its tokens are fetched ends those who took part, not others by their ids.
    """
    engine = simulated_engine(overlap=True)
    engine.add_request("a", [1, 2, 3], greedy(5))
    engine.add_request("b", [1, 2, 4], greedy(5))
    engine.step()
    engine.abort("a")
    engine.add_request("a", [7, 8], greedy(3))
    fail_once(engine, "wait_for")
    assert engine.step() == [failed("b")]
    assert tokens_of(finish(engine), "a") == greedy_answer([7, 8], 3)
    assert_idle(engine)
