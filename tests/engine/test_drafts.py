"""
Drafts (engine/drafts.py): what is guessed, what of it counts, and that answers are to the bit those
without drafts, whatever was guessed, with overlap and without. Steps are computed by cpu.c; without
a C compiler, and as on a GPU, by the simulated runner. tests/engine/test_bits.py has the kernels.
"""

import json
import random
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from simulated_runner import SimulatedRunner, finish, greedy, simulated_engine, tokens_of
from test_bits import needs_compiler

from engine import grammar as grammar_module
from engine.drafts import LONGEST_PAUSE, Drafts, GrowingText, num_right
from engine.engine import Engine
from engine.grammar import Grammars
from engine.runner import CHEAP_ROWS
from engine.step import Answer, Step
from model import GPTConfig
from ops.inputs import StepShape, pack
from paged import TO_COME, Plan, Request, Scheduler, SchedulerSettings
from params import NO_TOKEN, SamplingParams
from test_paged import assert_idle, new_engine, trained_model
from training.corpus import bpe_tokenizer

# --------------------------------------------------------------------------------------------------
# What is guessed


def text_of(*tokens: int, answer=()) -> GrowingText:
    text = GrowingText(Request("r", list(tokens), 100, generated_tokens=list(answer)))
    text.length = CHEAP_ROWS
    return text


@pytest.mark.parametrize(
    ("tokens", "most", "guessed"),
    [
        ((1, 2, 3, 4, 5, 6, 1, 2, 3), 3, [4, 5, 6]),
        ((1, 2, 3, 4, 5, 6, 1, 2, 3), 5, [4, 5, 6, 1, 2]),
        ((1, 2, 3, 4, 5, 6, 1, 2, 3), 8, [4, 5, 6, 1, 2, 3, 4, 5]),  # and so on
        ((9, 1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3), 2, [5, 1]),  # what stood there last
        ((7, 7, 7, 7), 4, [7, 7, 7, 7]),
        ((7, 7, 7), 4, []),  # its end is no repetition of itself
        ((1, 2, 3, 4, 9, 2, 3), 4, []),  # two tokens are too few
        ((1, 2), 4, []),
        ((1, 2, 3, 4, 1, 2, 3), 0, []),
    ],
)
def test_a_text_goes_on_as_it_did(tokens, most, guessed):
    assert text_of(*tokens).guess(most) == guessed
    # the same if the last of them have come one by one
    text = text_of(tokens[0])
    for i in range(1, len(tokens)):
        text.guess(1)
        text.request.generated_tokens.append(tokens[i])
    assert text.guess(most) == guessed


def test_what_needs_more_than_its_logits_and_its_position_gets_no_draft():
    """Penalties count the tokens before it, filters need a mask; and scores are made of one."""

    def guess(**params) -> list[int]:
        request = Answer("r", [7] * 9, 100, params=SamplingParams(**params))
        return GrowingText(request).guess(1)

    assert guess() == guess(temperature=1.0, top_p=0.9, min_tokens=2, logit_bias={7: 1.0}) == [7]
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert guess(**{name: 0.5}) == []
    assert guess(logprobs=0) == []
    assert guess(grammar=Mock()) == [7]
    for name, value in (("top_k", 1), ("top_p", 0.5), ("min_p", 0.5)):
        assert guess(grammar=Mock(), temperature=1.0, **{name: value}) == []


def test_right_guesses_make_longer_ones_and_wrong_ones_a_pause():
    text = GrowingText(Request("r", [7] * 9, 100))
    lengths = []
    for right in (1, 3, 7, 2):
        lengths.append(len(text.guess(CHEAP_ROWS)))
        text.learn(right)
    assert lengths == [1, 3, 7, 8]
    assert len(text.guess(CHEAP_ROWS)) == 5
    pauses = []
    for _ in range(8):
        text.learn(0)
        text.request.generated_tokens.append(7)
        steps = 0
        while not text.guess(CHEAP_ROWS):
            steps += 1
            text.request.generated_tokens.append(7)
        pauses.append(steps)
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]
    assert len(text.guess(CHEAP_ROWS)) == 1, "after a wrong guess a short one"
    for _ in range(6):
        text.learn(1)
    text.learn(0)
    lengths = []
    for _ in range(2):
        text.request.generated_tokens.append(7)
        lengths.append(len(text.guess(2)))
    assert lengths == [0, 1], "right guesses make up for wrong ones"


def test_how_much_of_a_draft_counts():
    assert num_right([1, 2, 3], [1, 2, 9, 3], frozenset()) == 2
    assert num_right([1, 2, 3], [1, 2, 3, 4], frozenset()) == 3
    assert num_right([1, 2, 3], [2, 2, 3, 4], frozenset()) == 0
    assert num_right([1, 2, 3], [1, 2, 3, 4], frozenset([2])) == 1, "2 is the text's last token"


# --------------------------------------------------------------------------------------------------
# Blocks and books: a scheduler, and a model that counts up


def begin(max_new_tokens=50, num_blocks=8, watermark=0.0, **request):
    """A request with a prompt of 6 tokens and its first token; blocks of 4."""
    settings = SchedulerSettings(max_num_seqs=4, watermark=watermark)
    scheduler = Scheduler("fcfs", 16, 4 * num_blocks, settings=settings)
    r = Answer("r", [0, 1, 2, 3, 4, 5], max_new_tokens, **request)
    scheduler.add_request(r)
    scheduler.update(scheduler.plan(), [6])
    engine = SimpleNamespace(
        settings=SimpleNamespace(speculate=True),
        scheduler=scheduler,
        runner=SimpleNamespace(cheap_rows=CHEAP_ROWS),
    )
    return scheduler, Drafts(engine), r


def play(drafts: Drafts, guesses: dict) -> tuple[Step, list[Request]]:
    """A step with these guesses, and the requests that it ends."""
    scheduler = drafts.engine.scheduler
    for r in scheduler.active:
        drafts.texts[r] = Mock(guess=lambda most, r=r: guesses.get(r, [])[:most])
    step = Step(1, scheduler.plan())
    drafts.planned(step)
    plan = step.plan
    scheduler.check(plan)
    for r in plan.sampled:
        step.tokens[r] = [*range(r.num_tokens, r.num_tokens + plan.num_sampled(r))]
    drafts.launched(step)
    scheduler.advance(plan)
    drafts.settled(step)
    finished = scheduler.resolve(plan, step.tokens)
    scheduler.check()
    return step, finished


def test_right_tokens_count_and_wrong_ones_leave_nothing():
    scheduler, drafts, r = begin()
    allocator = scheduler.block_allocator
    assert r.block_table == [0, 1]
    # three slots more than its second block has: one of the draft's goes to a third
    draft = [7, 8, 99, 10, 11]
    step, _ = play(drafts, {r: draft})
    assert step.plan.grown == [r]
    assert step.plan.guesses == {r: draft}
    assert step.tokens == {r: [7, 8, 9]}
    assert r.generated_tokens == [6, 7, 8, 9]
    assert (r.num_filled_slots, r.num_computed_slots, r.num_to_come) == (9, 9, 0)
    assert r.block_table == [0, 1, 2] and allocator.free == [7, 6, 5, 4, 3]
    assert allocator.block_cache.held.keys() == {0, 1}
    assert scheduler.committed == [1]
    assert (drafts.num_guessed, drafts.num_right) == (5, 2)
    drafts.texts[r].learn.assert_called_with(2)
    # all wrong: a step as without a draft, and the block for it is free again
    play(drafts, {r: [0] * 6})
    assert r.generated_tokens == [6, 7, 8, 9, 10]
    assert r.block_table == [0, 1, 2] and allocator.free == [7, 6, 5, 4, 3]
    # all right, over two ends of blocks
    play(drafts, {r: [11, 12, 13, 14, 15, 16, 17]})
    assert r.generated_tokens == [*range(6, 19)]
    assert r.num_committed == 4
    held = allocator.block_cache.held
    assert [held[b].tokens for b in r.block_table[:4]] == [
        tuple(range(i, i + 4)) for i in (0, 4, 8, 12)
    ]
    play(drafts, {})
    assert r.generated_tokens == [*range(6, 20)]


def test_a_draft_ends_where_the_answer_does():
    scheduler, drafts, r = begin(max_new_tokens=5)
    step, finished = play(drafts, {r: [7, 8, 9, 10, 11, 12]})
    assert step.plan.guesses == {r: [7, 8, 9]}, "with the token after them these are the last"
    assert finished == [r] and r.finish_reason == "length"
    assert r.generated_tokens == [6, 7, 8, 9, 10]
    assert scheduler.is_done() and scheduler.block_allocator.num_free == 8
    # a wrong draft that could have been the last
    scheduler, drafts, r = begin(max_new_tokens=5)
    _, finished = play(drafts, {r: [7, 99, 9]})
    assert finished == [] and r.status == "active"
    assert r.generated_tokens == [6, 7, 8]


def test_a_stop_token_in_a_draft_ends_the_answer():
    scheduler, drafts, r = begin(stop_token_ids=frozenset([8]))
    step, finished = play(drafts, {r: [7, 8, 9]})
    assert finished == [r] and r.finish_reason == "stop"
    assert step.tokens == {r: [7, 8]} and drafts.num_right == 1
    assert r.generated_tokens == [6, 7, 8]
    assert scheduler.block_allocator.num_free == 8


def test_a_draft_takes_what_blocks_and_rows_are_free():
    scheduler, drafts, r = begin(num_blocks=2)
    step, _ = play(drafts, {r: [7, 8, 9]})
    assert step.plan.guesses == {r: [7]}, "its block has two slots"
    scheduler, drafts, r = begin(num_blocks=4, watermark=0.5)
    step, _ = play(drafts, {r: [7, 8, 9]})
    assert step.plan.guesses == {r: [7]}, "the others are kept for requests that must grow"
    scheduler, drafts, r = begin(num_blocks=16)
    step, _ = play(drafts, {r: [*range(7, 20)]})
    assert step.plan.num_tokens == CHEAP_ROWS
    # a step that computes a prompt has none
    scheduler.add_request(Answer("other", [7] * 12, 5))
    step, _ = play(drafts, {r: [1] * 9})
    assert step.plan.guesses == {}
    other = scheduler.active[1]
    before = drafts.num_guessed
    step, _ = play(drafts, {r: [1] * 4, other: [1] * 9})
    assert step.plan.sampled == [r, other]
    assert drafts.num_guessed - before == CHEAP_ROWS - 2


def test_a_block_evicted_for_a_draft_is_told_at_once():
    """Would catch: a record that has a block in the cache which a draft has taken from it."""
    scheduler, drafts, r = begin(num_blocks=4)
    other = Request("other", [50] * 8, 1)
    scheduler.add_request(other)
    scheduler.update(scheduler.plan(), [7, 0])  # r holds 2 blocks, other's 2 are cached
    held = list(scheduler.block_allocator.idle)
    step, _ = play(drafts, {r: [8, 9, 10]})
    assert step.plan.guesses == {r: [8, 9, 10]} and step.plan.evicted == held[:1]
    assert scheduler.block_allocator.evicted == []


def test_a_draft_is_written_into_blocks_of_its_own():
    """Would catch: a draft that is written into a block which a fork still reads."""
    scheduler, drafts, r = begin()
    fork = scheduler.fork(r, "fork")
    step, _ = play(drafts, {r: [7, 8], fork: [7]})
    assert len(step.plan.copies) == 1
    assert r.block_table[0] == fork.block_table[0] and r.block_table[1] != fork.block_table[1]
    assert r.generated_tokens == [6, 7, 8, 9] and fork.generated_tokens == [6, 7, 8]


# --------------------------------------------------------------------------------------------------
# Engines


def speculating(**settings) -> Engine:
    sizes = {"num_blocks": 100, "max_num_seqs": 4, "token_budget": 32, "attention": "cpu"}
    return new_engine(trained_model(), speculate=True, **sizes | settings)


def asks(n: int) -> list[tuple[list[int], SamplingParams]]:
    """Of all kinds: greedy, sampled, filtered; with penalties, biases and scores."""
    rng = random.Random(n)
    extras = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.9},
        {"temperature": 0.9, "min_p": 0.1, "logit_bias": {3: 2.0}},
        {"temperature": 0.7, "repetition_penalty": 1.2},
        {"logprobs": 2},
        {"temperature": 1.0, "stop_token_ids": [4, 9], "min_tokens": 3},
    ]
    work = []
    for i in range(n):
        prompt = 3 * [rng.randrange(29) for _ in range(rng.randint(1, 9))]
        own = {"temperature": 0.0, "max_tokens": rng.randint(3, 24), "seed": i} | extras[i % 7]
        work.append((prompt, SamplingParams(**own, ignore_eos=True)))
    return work


@pytest.fixture
def guesses_of(monkeypatch):
    """guesses_of(answers): guess by these, and now and then wrongly."""

    def begin_to_guess(answers: dict[tuple, list[int]]):
        rng = random.Random(0)

        def guess(text: GrowingText, most: int) -> list[int]:
            r = text.request
            answer = answers[tuple(r.prompt_tokens), r.params.seed]
            draft = answer[r.num_generated : r.num_generated + rng.randint(0, max(0, most))]
            if draft and rng.random() < 0.5:
                draft[rng.randrange(len(draft))] = rng.randrange(29)
            return draft if text.can_guess else []

        monkeypatch.setattr(GrowingText, "guess", guess)

    return begin_to_guess


def answers_alone(work: list[tuple], quantize: str = "none") -> list[list[int]]:
    """Of an engine without drafts, to one prompt after the other."""
    plain = new_engine(trained_model(), quantize=quantize, attention="cpu", max_num_seqs=1)
    return [plain.generate([prompt], params, progress=False)[0] for prompt, params in work]


def by_prompt(work: list[tuple], answers: list[list[int]]) -> dict[tuple, list[int]]:
    """By prompt and seed, for `guesses_of`."""
    return {(tuple(p), q.seed): answer for (p, q), answer in zip(work, answers, strict=True)}


@needs_compiler
@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1, "token_budget": 8},
        {"max_num_seqs": 3, "token_budget": 5, "prefix_cache": False},
        {"num_blocks": 24, "watermark": 0},  # preempts
        {"overlap": True},
        {"overlap": True, "num_blocks": 24, "watermark": 0, "token_budget": 9},
    ],
)
@pytest.mark.quick("*[024]-none", "*[135]-int8")
def test_answers_are_those_without_drafts(quantize, settings, guesses_of):
    """Whatever is guessed, in any batch."""
    work = asks(28)
    expected = answers_alone(work, quantize)
    guesses_of(by_prompt(work, expected))
    engine = speculating(quantize=quantize, check=True, **settings)
    prompts, params = zip(*work, strict=True)
    assert engine.generate(prompts, list(params), progress=False) == expected
    assert_idle(engine)
    drafts = engine.stages["drafts"]
    assert 20 < drafts.num_right < drafts.num_guessed - 20
    total = sum(map(len, expected))
    # with overlap a text that a stop token ends has one more under way
    is_simple = not engine.overlap and not engine.scheduler.num_preemptions
    assert engine.counts()["decode tokens"] == total - len(work) or not is_simple
    # and once more, with hits of blocks that drafts have filled
    assert engine.generate(prompts, list(params), progress=False) == expected


@needs_compiler
def test_random_lives(guesses_of):
    """Requests come, fork and hang up at any time, in tiny pools: those that end are right."""
    work = asks(28)
    expected = answers_alone(work)
    guesses_of(by_prompt(work, expected))
    num_right = num_preemptions = num_aborts = num_copies = 0
    for seed in range(12):
        rng = random.Random(seed)
        rows = rng.choice([1, 2, 5])
        settings = {"num_blocks": rng.choice([14, 40]), "prefix_cache": rng.random() < 0.7}
        settings |= {"max_num_seqs": rows, "token_budget": rows + rng.choice([1, 3, 20])}
        engine = speculating(overlap=rng.random() < 0.5, **settings)
        answers = {}
        waiting = rng.sample(range(28), 20)
        while engine.has_work or waiting:
            while waiting and rng.random() < 0.3:
                i = waiting.pop()
                prompt, params = work[i]
                n = 2 if params.temperature == 0 and rng.random() < 0.5 else 1
                request = engine.add_request(i, prompt, params, priority=rng.randrange(3), n=n)
                answers[i] = request
            if engine.requests and rng.random() < 0.02:
                id = rng.choice(list(engine.requests))
                engine.abort(id)
                answers.pop(id, None)
                num_aborts += 1
            engine.step()
        for i, request in answers.items():
            assert request.generated_tokens == expected[i], f"seed {seed}"
        assert_idle(engine)
        num_right += engine.stages["drafts"].num_right
        num_preemptions += engine.scheduler.num_preemptions
        num_copies += engine.scheduler.num_copies
    assert min(num_right, num_preemptions, num_aborts, num_copies) > 5


@pytest.mark.parametrize(
    "draft, allowed",
    [
        ([], 0),
        ([98], 1),
        ([98, 99, 97], 1),
        ([97] * 9, 4),
        ([319], 0),
        ([98, 319, 98], 1),
        ([256], 0),
    ],
)
def test_a_draft_is_cut_where_its_grammar_forbids_it(draft, allowed, tmp_path, monkeypatch):
    """Nothing of it stays behind. It may have ids of rows without a token: a prompt has them."""
    monkeypatch.setattr(grammar_module, "MASK_SECONDS", 60)  # no verdict is late
    bpe_tokenizer([]).save(tmp_path)
    grammars = Grammars(tmp_path, GPTConfig(320, eos_token_ids=(256,)))
    grammar = grammars.compile("regex", "[ab]{3,5}").copy()
    grammar.accept(97)
    for _ in range(2):
        assert grammar.allowed_part(draft) == draft[:allowed]
    assert grammar.accept(97)


@needs_compiler
def test_a_text_that_repeats_itself_takes_fewer_steps():
    engine = speculating()
    plain = new_engine(trained_model(), attention="cpu")
    prompt = [5, 6, 7, 8] * 5
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    answer = engine.generate([prompt], greedy, progress=False)
    assert answer == plain.generate([prompt], greedy, progress=False)
    assert engine.num_steps < plain.num_steps
    assert engine.num_steps == plain.num_steps - engine.stages["drafts"].num_right
    stats = engine.stats()
    assert stats["right"] == engine.stages["drafts"].num_right > 0
    assert stats["guessed"] >= stats["right"]


@needs_compiler
def test_an_answer_comes_in_pieces_of_several_tokens():
    engine = speculating()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    request = engine.add_request("a", [5, 6, 7, 8] * 5, params)
    outputs = finish(engine)
    assert [t for o in outputs for t in o.tokens] == request.generated_tokens
    assert len(outputs) < 40 and max(len(o.tokens) for o in outputs) > 2
    assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]


@needs_compiler
def test_a_step_with_drafts_that_fails_leaves_no_block_behind(guesses_of):
    engine = speculating()
    ask = partial(SamplingParams, temperature=0.0, max_tokens=20, ignore_eos=True, seed=1)
    guesses_of({(tuple([5, 6, 7, 8] * 3), 1): [0] * 20})
    engine.add_request("a", [5, 6, 7, 8] * 3, ask())
    while not engine.stages["drafts"].num_guessed:
        engine.step()
    engine.runner.wait_for = Mock(side_effect=RuntimeError("broken"))
    outputs = finish(engine)
    assert [o.error for o in outputs] == ["RuntimeError: broken"]
    del engine.runner.wait_for
    assert_idle(engine)


@needs_compiler
def test_logits_behind_a_wrong_guess_may_be_broken(monkeypatch):
    """Would catch: a text that ends with an error because of a token that it does not have."""
    monkeypatch.setattr(GrowingText, "guess", lambda text, most: [28] * most)
    engine = speculating()
    wait_for = engine.runner.wait_for

    def wait_for_broken(launched):
        tokens = wait_for(launched)
        for request in launched.plan.guesses:
            tokens[request][-1] = NO_TOKEN
        return tokens

    engine.runner.wait_for = wait_for_broken
    params = SamplingParams(0.0, max_tokens=9, ignore_eos=True, logit_bias={28: -100.0})
    [answer] = engine.generate([[5, 6, 7, 8]], params, progress=False)
    assert len(answer) == 9 and 28 not in answer
    assert engine.stages["drafts"].num_guessed > 9


@needs_compiler
def test_a_record_has_the_copies_that_come_before_drafts(guesses_of):
    """Would catch: the copy of a block that is not the last one, because a draft needs another."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=1)
    prompt = [5, 6, 7, 8, 5, 6]
    [answer] = speculating().generate([prompt], params, progress=False)
    guesses_of({(tuple(prompt), 1): answer})
    engine = speculating()
    lines = []
    engine.stages["record"].listen(lines.append)
    for i in range(4):
        engine.add_request(str(i), prompt, params, n=2)
        while engine.has_work:
            engine.step()
    copies = [copy for line in lines for copy in json.loads(line).get("copies", ())]
    assert len(copies) == engine.scheduler.num_copies > 3


def test_drafts_work_with_other_operators():
    """Whose answers are hardly ever others, if not to the bit the same."""
    prompts = [3 * [i, i + 5, i + 2] for i in range(3)]
    answers = []
    for speculate in (False, True):
        engine = new_engine(trained_model(), speculate=speculate, attention="torch")
        answers.append([engine.generate([p], greedy(40), progress=False) for p in prompts])
    assert engine.stages["drafts"].num_right > 10
    assert answers[0] == answers[1]


# --------------------------------------------------------------------------------------------------
# With overlap, and steps that are laid out and padded as on a GPU


def padded(window=0, **settings) -> Engine:
    """Its answers depend on their last `window` tokens, so sooner or later they go in circles."""
    build = partial(SimulatedRunner, padded=True)
    sizes = {"context_length": 200, "num_blocks": 128}
    return simulated_engine(build=build, window=window, **sizes | settings)


def lives_of(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[bool]]:
    """The answers, and of each step whether it was planned with another one under way."""
    requests = [engine.add_request(i, prompt, greedy(100)) for i, prompt in enumerate(prompts)]
    overlaps = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: overlaps.append(bool(engine.in_flight)) or launch(plan)
    finish(engine)
    assert_idle(engine)
    return [request.generated_tokens for request in requests], overlaps


@pytest.mark.parametrize("num_prompts", [1, 3, 7, 8])
@pytest.mark.parametrize(("matched", "window"), [(3, 2), (1, 3)])
@pytest.mark.parametrize("settings", [{}, {"block_size": 1}, {"overlap": True}])
def test_steps_laid_out_as_on_a_gpu_are_right(settings, matched, window, num_prompts, monkeypatch):
    """
    Would catch: a draft's token in another slot, or at another position; a row that sees another
    table; a last token or a length that the device has from a wrong guess.
    """
    monkeypatch.setattr("engine.drafts.MATCHED", matched)  # after one token some guesses are wrong
    prompts = [[i, i + 1, i + 2] for i in range(num_prompts)]
    sizes = {"max_num_seqs": num_prompts, "window": window, "token_budget": 40, "num_blocks": 999}
    sizes |= settings
    expected, plain = lives_of(padded(**sizes), prompts)
    engine = padded(speculate=True, **sizes)
    answers, overlaps = lives_of(engine, prompts)
    assert answers == expected
    right = engine.stages["drafts"].num_right
    guessed = engine.stages["drafts"].num_guessed
    if num_prompts == CHEAP_ROWS:
        assert guessed == 0, "without room none is waited for"
        assert overlaps == plain
        return
    assert guessed > 0 and (right < guessed) == (window > matched)
    if num_prompts == 1 and matched == 3:
        assert right > 50 and len(overlaps) < len(plain) / 2
        if engine.overlap:
            first = overlaps.index(False, 1)
            assert first > 3 and not any(overlaps[first:-2]), "until the text promises a draft"


def test_a_text_without_repetition_waits_for_nothing():
    """All of its steps overlap; where guesses are wrong, most of them do."""
    engine = padded(speculate=True, overlap=True)
    [answer], overlaps = lives_of(engine, [[1, 2]])
    [expected], _ = lives_of(padded(overlap=True), [[1, 2]])
    assert answer == expected
    new = {tuple(answer[i : i + 3]) for i in range(len(answer))}
    assert len(new) > 90, "it hardly repeats three tokens"
    assert engine.stages["drafts"].num_right < 5
    assert sum(overlaps) > 85


def test_a_promise_that_is_not_kept_is_a_wrong_guess(monkeypatch):
    """Would catch: an engine that waits in each step for a draft that does not come."""
    text_guess = GrowingText.guess

    def guess(text: GrowingText, most: int) -> list[int]:
        draft = text_guess(text, most)
        return draft if text.request.num_to_come else []

    monkeypatch.setattr(GrowingText, "guess", guess)
    engine = padded(window=2, speculate=True, overlap=True)
    _, overlaps = lives_of(engine, [[1, 2]])
    waits = overlaps.count(False)
    assert engine.stages["drafts"].num_guessed == 0
    assert 3 < waits < 9, "pauses of 1, 2, 4, 8, 16, 32 tokens"


def test_a_launch_that_fails_keeps_the_tokens_of_the_step_before_it():
    """With drafts one call of `step` resolves a step and launches the next: both have outputs."""
    engine = padded(window=2, speculate=True, overlap=True)
    requests = [engine.add_request(id, [1, 2 + id], greedy(60)) for id in range(2)]
    launch = engine.runner.launch

    def failing(plan: Plan):
        """After a step whose tokens this call of `step` has yet to return."""
        if engine.stages["drafts"].num_right and not engine.in_flight:
            raise RuntimeError("broken")
        return launch(plan)

    engine.runner.launch = failing
    outputs = finish(engine)
    for request in requests:
        tokens = tokens_of(outputs, request.id)
        assert tokens == request.generated_tokens and len(tokens) > 3, "no token is lost"
    assert [o.error for o in outputs if o.error] == 2 * ["RuntimeError: broken"]
    assert_idle(engine)


def test_choices_share_no_prefix_in_a_step_with_drafts(monkeypatch):
    """Would catch: groups, counted by requests, of other rows: those behind a draft's."""
    expected = answers_of_a_neighbour_and_choices(padded())
    guess = lambda text, most: [0] * min(most, text.request.id == "a")  # noqa: E731
    monkeypatch.setattr(GrowingText, "guess", guess)
    engine = padded(speculate=True)
    assert answers_of_a_neighbour_and_choices(engine) == expected
    assert engine.stages["drafts"].num_guessed > 5
    assert engine.runner.finder.groups, "where there is no draft they do"


def answers_of_a_neighbour_and_choices(engine: Engine) -> dict[str, list[int]]:
    engine.add_request("a", [1, 2], greedy(12))
    engine.add_request("b", list(range(10)), SamplingParams(max_tokens=20, seed=1), n=3)
    outputs = finish(engine)
    return {output.id: tokens_of(outputs, output.id) for output in outputs}


def test_steps_without_drafts_need_no_upload():
    """The same inputs as long as the host has no token to tell, and no new block."""
    r = Request("r", [5, 6, 7], 9, generated_tokens=[8], row=1, block_table=[4], num_filled_slots=3)
    sizes = (StepShape(2, 0, 0), 3, 64, 8)
    told = pack(Plan(decodes=[r]), *sizes)
    assert told.tolist() == [1, 3, 4, 64, 8, NO_TOKEN, 3, 0]
    inputs = []
    for _ in range(2):
        r.generated_tokens.append(TO_COME)
        r.num_to_come = 1
        r.num_filled_slots += 1
        inputs.append(pack(Plan(decodes=[r]), *sizes).tolist())
    assert inputs == 2 * [[1, 3, 4, 64, NO_TOKEN, NO_TOKEN, 0, 0]]


@needs_compiler
def test_a_request_may_hang_up_while_its_draft_is_under_way(guesses_of):
    """Would catch: tokens for nobody, and a neighbour who gets another one's."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=1)
    prompts = [[5, 6, 7, 8], [9, 8, 7], [1, 2]]
    expected = new_engine(trained_model(), attention="cpu").generate(prompts, params, False)
    pairs = zip(prompts, expected, strict=True)
    guesses_of({(tuple(prompt), 1): answer for prompt, answer in pairs})
    num_aborts = 0
    for first in range(3):
        engine = speculating(overlap=True)
        requests = [engine.add_request(i, p, params) for i, p in enumerate(prompts)]
        outputs = []
        while engine.has_work:
            outputs += engine.step()
            guesses = engine.in_flight.plan.guesses if engine.in_flight else {}
            if requests[first] in guesses and first in engine.requests:
                engine.abort(first)
                num_aborts += 1
                outputs = [o for o in outputs if o.id != first]
        answers = {r.id: r.generated_tokens for r in requests if r.id != first}
        assert answers == {i: expected[i] for i in answers}
        assert {o.id for o in outputs} == answers.keys()
        assert_idle(engine)
    assert num_aborts == 3
