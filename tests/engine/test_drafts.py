"""
Drafts (engine/drafts.py): what is guessed, what of it counts, and when the engine waits for it.
That answers stay the same whatever is guessed is shown by tests/engine/test_simulator.py, and that
their bits do by tests/engine/test_bits.py.
"""

import json
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from simulated_device import SimulatedDevice, finish, greedy, simulated_engine, tokens_of
from test_bits import needs_compiler

from engine import grammar as grammar_module
from engine.device import CHEAP_ROWS
from engine.drafts import LONGEST_PAUSE, Drafts, GrowingText, num_right
from engine.engine import Engine
from engine.grammar import Grammars
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


# a text, how many tokens are wanted -> the guess
GUESSES = """
1 2 3 4 5 6 1 2 3       3 -> 4 5 6
1 2 3 4 5 6 1 2 3       5 -> 4 5 6 1 2
1 2 3 4 5 6 1 2 3       8 -> 4 5 6 1 2 3 4 5
9 1 2 3 4 1 2 3 5 1 2 3 2 -> 5 1
7 7 7 7                 4 -> 7 7 7 7
7 7 7                   4 ->
1 2 3 4 9 2 3           4 ->
1 2                     4 ->
1 2 3 4 1 2 3           0 ->
"""


@pytest.mark.parametrize("row", GUESSES.strip().splitlines())
def test_a_text_goes_on_as_it_did(row):
    """Where three tokens stood last; the end of a text is no repetition of itself."""
    (*tokens, most), guessed = (list(map(int, part.split())) for part in row.split("->"))
    assert text_of(*tokens).guess(most) == guessed
    # the same if the last of them have come one by one
    text = text_of(tokens[0])
    for token in tokens[1:]:
        text.guess(1)
        text.request.generated_tokens.append(token)
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


def begin(num_blocks: int, watermark=0.0):
    """A request with a prompt of 6 tokens and its first token; blocks of 4."""
    settings = SchedulerSettings(max_num_seqs=4, watermark=watermark)
    scheduler = Scheduler("fcfs", 16, 4 * num_blocks, settings=settings)
    r = Answer("r", [0, 1, 2, 3, 4, 5], 50)
    scheduler.add_request(r)
    scheduler.update(scheduler.plan(), [6])
    engine = SimpleNamespace(
        settings=SimpleNamespace(speculate=True),
        scheduler=scheduler,
        device=SimpleNamespace(cheap_rows=CHEAP_ROWS),
    )
    return scheduler, Drafts(engine), r


def play(drafts: Drafts, guesses: dict) -> Step:
    """A step with these guesses."""
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
    scheduler.resolve(plan, step.tokens)
    scheduler.check()
    return step


def test_a_draft_takes_what_blocks_and_rows_are_free():
    scheduler, drafts, r = begin(num_blocks=2)
    step = play(drafts, {r: [7, 8, 9]})
    assert step.plan.guesses == {r: [7]}, "its block has two slots"
    scheduler, drafts, r = begin(num_blocks=4, watermark=0.5)
    step = play(drafts, {r: [7, 8, 9]})
    assert step.plan.guesses == {r: [7]}, "the others are kept for requests that must grow"
    scheduler, drafts, r = begin(num_blocks=16)
    step = play(drafts, {r: [*range(7, 20)]})
    assert step.plan.num_tokens == CHEAP_ROWS
    # a step that computes a prompt has none
    scheduler.add_request(Answer("other", [7] * 12, 5))
    step = play(drafts, {r: [1] * 9})
    assert step.plan.guesses == {}
    other = scheduler.active[1]
    before = drafts.num_guessed
    step = play(drafts, {r: [1] * 4, other: [1] * 9})
    assert step.plan.sampled == [r, other]
    assert drafts.num_guessed - before == CHEAP_ROWS - 2


def test_a_block_evicted_for_a_draft_is_told_at_once():
    """Would catch: a record that has a block in the cache which a draft has taken from it."""
    scheduler, drafts, r = begin(num_blocks=4)
    other = Request("other", [50] * 8, 1)
    scheduler.add_request(other)
    scheduler.update(scheduler.plan(), [7, 0])  # r holds 2 blocks, other's 2 are cached
    held = list(scheduler.block_allocator.idle)
    step = play(drafts, {r: [8, 9, 10]})
    assert step.plan.guesses == {r: [8, 9, 10]} and step.plan.evicted == held[:1]
    assert scheduler.block_allocator.evicted == []


# --------------------------------------------------------------------------------------------------
# Engines


def speculating(**settings) -> Engine:
    sizes = {"num_blocks": 100, "max_num_seqs": 4, "token_budget": 32, "attention": "cpu"}
    return new_engine(trained_model(), speculate=True, **sizes | settings)


@pytest.mark.parametrize(
    "row",
    [
        "-> 0",
        "98 -> 1",
        "98 99 97 -> 1",
        "97 97 97 97 97 -> 4",
        "98 319 98 -> 1",
        "319 -> 0",
        "256 -> 0",
    ],
)
def test_a_draft_is_cut_where_its_grammar_forbids_it(row, tmp_path, monkeypatch):
    """Nothing of it stays behind. It may have ids of rows without a token: a prompt has them."""
    draft, [allowed] = (list(map(int, part.split())) for part in row.split("->"))
    monkeypatch.setattr(grammar_module, "MASK_SECONDS", 60)  # no verdict is late
    bpe_tokenizer([]).save(tmp_path)
    grammars = Grammars(tmp_path, GPTConfig(320, eos_token_ids=(256,)))
    grammar = grammars.compile("regex", "[ab]{3,5}").copy()
    grammar.accept(97)
    for _ in range(2):
        assert grammar.allowed_part(draft) == draft[:allowed]
    assert grammar.accept(97)


@needs_compiler
def test_a_text_that_repeats_itself_takes_fewer_steps_and_comes_in_pieces():
    prompt = [5, 6, 7, 8] * 5
    plain = new_engine(trained_model(), attention="cpu")
    [answer] = plain.generate([prompt], greedy(40), progress=False)
    engine = speculating()
    engine.add_request("a", prompt, greedy(40))
    outputs = finish(engine)
    assert tokens_of(outputs, "a") == answer
    assert len(outputs) < 40 and max(len(o.tokens) for o in outputs) > 2
    assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
    stats = engine.stats()
    assert stats["guessed"] >= stats["right"] > 0
    assert engine.num_steps == plain.num_steps - stats["right"]


@needs_compiler
def test_logits_behind_a_wrong_guess_may_be_broken(monkeypatch):
    """Would catch: a text that ends with an error because of a token that it does not have."""
    monkeypatch.setattr(GrowingText, "guess", lambda text, most: [28] * most)
    engine = speculating()
    wait_for = engine.runner.wait_for

    def wait_for_broken(launched):
        tokens = wait_for(launched)
        for request in launched.packed.plan.guesses:
            tokens[request][-1] = NO_TOKEN
        return tokens

    engine.runner.wait_for = wait_for_broken
    params = SamplingParams(0.0, max_tokens=9, ignore_eos=True, logit_bias={28: -100.0})
    [answer] = engine.generate([[5, 6, 7, 8]], params, progress=False)
    assert len(answer) == 9 and 28 not in answer
    assert engine.stages["drafts"].num_guessed > 9


def test_a_record_has_the_copies_that_come_before_drafts(monkeypatch):
    """Would catch: the copy of a block that is not the last one, because a draft needs another."""
    monkeypatch.setattr(GrowingText, "guess", lambda text, most: [0] * most)
    engine = padded(speculate=True)
    lines = []
    engine.stages["record"].listen(lines.append)
    for i in range(4):
        engine.add_request(str(i), [5, 6, 7, 8, 5, 6], greedy(20), n=2)
        finish(engine)
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
    build = partial(SimulatedDevice, padded=True)
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


def test_a_text_that_repeats_itself_overlaps_until_it_promises_a_draft():
    engine = padded(window=2, speculate=True, overlap=True)
    answers, overlaps = lives_of(engine, [[0, 1, 2]])
    expected, plain = lives_of(padded(window=2, overlap=True), [[0, 1, 2]])
    assert answers == expected
    assert len(overlaps) < len(plain) / 2 and engine.stages["drafts"].num_right > 50
    first = overlaps.index(False, 1)
    assert first > 3 and not any(overlaps[first:-2])


def test_without_room_for_a_draft_none_is_waited_for():
    prompts = [[i, i + 1, i + 2] for i in range(CHEAP_ROWS)]
    sizes = {"window": 2, "overlap": True, "max_num_seqs": CHEAP_ROWS, "num_blocks": 999}
    engine = padded(speculate=True, **sizes)
    assert lives_of(engine, prompts) == lives_of(padded(**sizes), prompts)
    assert engine.stages["drafts"].num_guessed == 0


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
