"""
The engine beyond right answers (test_paged.py): refusals, aborts, failures, interrupts, its loop,
and that no request is changed by what happens to another.
"""

import json
import tempfile
import threading
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from engine import engine as engine_module
from engine import process as loop
from engine import sizing
from engine.engine import Engine
from engine.links import Links, to_line
from engine.settings import Settings
from model import GPT
from paged import PRIORITY_AGEING, Plan, Request, Scheduler, SchedulerSettings, priority_delay
from params import GREEDY, SamplingParams
from serve import listen_for_links
from server.client import connect
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


def test_the_pool_takes_its_share_of_free_memory_and_no_more_than_it_can_use(monkeypatch):
    """
    Would catch: another share of memory than POOL_SHARE; a pool of no block at
    all.
    """
    model = trained_model(
        num_kv_heads=2
    )  # a block: 2 * 2 layers * 2 KV heads of 16 * 4 tokens * 4 bytes = 2048
    for pages, blocks in ((10**9, 9 * CONTEXT // 16), (10, 5), (9, 4), (1, 1)):
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


def test_several_ends_of_text():
    """
    Only the first of config.json's list ended a text, or the list was refused. All of them stop a
    request, none does before min_tokens or with ignore_eos.
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


@pytest.mark.parametrize("P", [1, 8, 21])
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
            for id, tokens, reason, cached, *_ in message["out"]:
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


def varied_work(engine: Engine) -> dict:
    """Twenty requests of all kinds, two of them in three choices; their answers, by id."""
    for i in range(20):
        params = replace(mixed_params(24, 20)[i], seed=i, logprobs=2 if i % 5 == 0 else None)
        params = replace(
            params, presence_penalty=0.5 * (i % 3), min_tokens=i % 4, stop_token_ids=(3, 7 + i % 5)
        )
        engine.add_request(i, prompt(i % 7, 3 + 4 * (i % 9)), params, n=3 if i in (4, 11) else 1)
    answers = {}
    while engine.has_work:
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
    assert engine.max_model_len == CONTEXT and "1 text of 64" in engine.statement()
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
