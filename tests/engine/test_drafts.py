"""
Drafts (engine/drafts.py): what is guessed, which guesses count, and when the engine waits for them.
tests/engine/test_simulator.py shows that answers stay the same whatever is guessed, and
tests/engine/test_bits.py that their bits do.
"""

import json
from functools import partial
from unittest.mock import Mock

import pytest
from simulated_device import SimulatedDevice, finish, greedy, simulated_engine, tokens_of

from engine import grammar as grammar_module
from engine.device import CHEAP_ROWS
from engine.drafts import LONGEST_PAUSE, GrowingText
from engine.engine import Engine
from engine.grammar import Grammars
from engine.step import Answer
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
    """
    A guess continues from where the last three tokens stood before. The end of a text does not
    match itself.
    """
    (*tokens, most), guessed = (list(map(int, part.split())) for part in row.split("->"))
    assert text_of(*tokens).guess(most) == guessed
    # the result is the same if the last tokens come one by one
    text = text_of(tokens[0])
    for token in tokens[1:]:
        text.guess(1)
        text.request.generated_tokens.append(token)
    assert text.guess(most) == guessed


def test_what_needs_more_than_its_logits_and_its_position_gets_no_draft():
    """Penalties count the tokens before a position, and filters need a mask."""

    def guess(**params) -> list[int]:
        request = Answer("r", [7] * 9, 100, params=SamplingParams(**params))
        return GrowingText(request).guess(1)

    bias = {7: 1.0}
    assert guess(temperature=1.0, top_p=0.9, min_tokens=2, logit_bias=bias) == [7]
    assert guess(grammar=Mock()) == [7]
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert guess(**{name: 0.5}) == []
    assert guess(grammar=Mock(), temperature=1.0, top_k=1) == []


def test_right_guesses_make_longer_ones_and_wrong_ones_a_pause():
    text = GrowingText(Request("r", [7] * 9, 100))
    lengths = []
    for right in (1, 3, 7, 2):
        lengths.append(len(text.guess(CHEAP_ROWS)))
        text.learn(right)
    assert lengths == [1, 3, 7, 8]
    assert len(text.guess(CHEAP_ROWS)) == 5

    def pause() -> int:
        """Return how many tokens come without a draft after a wrong guess."""
        text.learn(0)
        text.request.generated_tokens.append(7)
        start = text.request.num_generated
        while not text.guess(CHEAP_ROWS):
            text.request.generated_tokens.append(7)
        return text.request.num_generated - start

    pauses = [pause() for _ in range(8)]
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]
    assert len(text.guess(CHEAP_ROWS)) == 1, "a short guess follows a wrong one"
    for _ in range(6):
        text.learn(1)
    assert pause() == 1, "right guesses make up for wrong ones"


def test_a_draft_leaves_the_blocks_that_requests_must_grow_into():
    settings = SchedulerSettings(max_num_seqs=4, watermark=0.5)
    scheduler = Scheduler("fcfs", token_budget=16, max_kv_tokens=16, settings=settings)
    r = Request("r", [0, 1, 2, 3, 4, 5], 50)
    scheduler.add_request(r)
    scheduler.update(scheduler.plan(), [6])
    assert scheduler.extend_if_free(r, 4) == 2, "two blocks of four are kept"


# --------------------------------------------------------------------------------------------------
# Engines


# a draft, as ids -> how many of its tokens are allowed after the "a" that has come
ALLOWED = """
                    -> 0
98                  -> 1
98 99 97            -> 1
97 97 97 97 97      -> 4
98 319 98           -> 1
319                 -> 0
256                 -> 0
"""


def test_a_draft_is_cut_where_its_grammar_forbids_it(tmp_path, monkeypatch):
    """
    The rest of the draft leaves no trace. A draft may include ids of rows without a token, because
    a prompt may.
    """
    monkeypatch.setattr(grammar_module, "MASK_SECONDS", 60)  # no verdict is late
    bpe_tokenizer([]).save(tmp_path)
    grammars = Grammars(tmp_path, GPTConfig(320, eos_token_ids=(256,)))
    grammar = grammars.compile("regex", "[ab]{3,5}").copy()
    grammar.accept(97)
    for row in 2 * ALLOWED.strip("\n").splitlines():
        draft, [allowed] = (list(map(int, part.split())) for part in row.split("->"))
        assert grammar.allowed_part(draft) == draft[:allowed], row
    assert grammar.accept(97)


def test_a_text_that_repeats_itself_takes_fewer_steps_and_comes_in_pieces():
    """With torch's operators the bits may differ, but the tokens are almost always the same."""
    prompt = [5, 6, 7, 8] * 5
    plain, engine = (
        new_engine(trained_model(), attention="torch", speculate=speculate, num_blocks=100)
        for speculate in (False, True)
    )
    [answer] = plain.generate([prompt], greedy(40), progress=False)
    engine.add_request("a", prompt, greedy(40))
    outputs = finish(engine)
    assert tokens_of(outputs, "a") == answer
    assert len(outputs) < 40 and max(len(o.tokens) for o in outputs) > 2
    assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert engine.num_steps == plain.num_steps - engine.stages["drafts"].num_right


def test_guesses_may_be_broken_and_fill_another_block(monkeypatch):
    """
    Would catch: a text that ends with an error because of a token it does not have; a record that
    lacks the copy of a block which is not the last one, because a draft needs another block.
    """
    monkeypatch.setattr(GrowingText, "guess", lambda text, most: [0] * most)
    engine = padded(speculate=True)
    lines = []
    engine.stages["record"].listen(lines.append)
    wait_for = engine.runner.wait_for

    def wait_for_broken(launched):
        tokens = wait_for(launched)
        for request in launched.packed.plan.guesses:
            if tokens[request][0] != 0:  # its first guess is wrong
                tokens[request][-1] = NO_TOKEN
        return tokens

    engine.runner.wait_for = wait_for_broken
    for i in range(4):
        engine.add_request(str(i), [5, 6, 7, 8, 5, 6], greedy(20), n=2)
        assert {output.error for output in finish(engine)} == {None}
    assert engine.stages["drafts"].num_guessed > 9
    copies = [copy for line in lines for copy in json.loads(line).get("copies", ())]
    assert len(copies) == engine.scheduler.num_copies > 3


# --------------------------------------------------------------------------------------------------
# With overlap, and steps laid out and padded as on a GPU


def padded(window=0, **settings) -> Engine:
    """
    Return an engine whose answers depend on their last `window` tokens, so they soon repeat
    themselves.
    """
    build = partial(SimulatedDevice, padded=True)
    sizes = {"context_length": 200, "num_blocks": 128}
    return simulated_engine(build=build, window=window, **sizes | settings)


def life_of(engine: Engine, prompt: list[int]) -> tuple[list[int], list[bool]]:
    """Return the answer, and for each step whether it was planned while another one was running."""
    request = engine.add_request("r", prompt, greedy(100))
    overlaps = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: overlaps.append(bool(engine.in_flight)) or launch(plan)
    finish(engine)
    assert_idle(engine)
    return request.generated_tokens, overlaps


def test_a_text_that_repeats_itself_overlaps_until_it_promises_a_draft():
    engine = padded(window=2, speculate=True, overlap=True)
    answer, overlaps = life_of(engine, [0, 1, 2])
    expected, plain = life_of(padded(window=2, overlap=True), [0, 1, 2])
    assert answer == expected
    assert len(overlaps) < len(plain) / 2 and engine.stages["drafts"].num_right > 50
    first = overlaps.index(False, 1)
    assert first > 3 and not any(overlaps[first:-2])


def test_a_promise_that_is_not_kept_is_a_wrong_guess(monkeypatch):
    """Would catch: an engine that waits in each step for a draft that never comes."""
    text_guess = GrowingText.guess

    def guess(text: GrowingText, most: int) -> list[int]:
        draft = text_guess(text, most)
        return draft if text.request.num_to_come else []

    monkeypatch.setattr(GrowingText, "guess", guess)
    engine = padded(window=2, speculate=True, overlap=True)
    _, overlaps = life_of(engine, [1, 2])
    waits = overlaps.count(False)
    assert engine.stages["drafts"].num_guessed == 0
    assert 3 < waits < 9, "pauses of 1, 2, 4, 8, 16, 32 tokens"


def test_a_launch_that_fails_keeps_the_tokens_of_the_step_before_it():
    """
    With drafts, one call of `step` resolves a step and launches the next. The outputs of both
    count.
    """
    engine = padded(window=2, speculate=True, overlap=True)
    request = engine.add_request("r", [1, 2], greedy(60))
    launch = engine.runner.launch

    def failing(plan: Plan):
        """Fail after a step whose tokens this call of `step` has not returned yet."""
        if engine.stages["drafts"].num_right and not engine.in_flight:
            raise RuntimeError("broken")
        return launch(plan)

    engine.runner.launch = failing
    outputs = finish(engine)
    tokens = tokens_of(outputs, "r")
    assert tokens == request.generated_tokens and len(tokens) > 3, "no token is lost"
    assert outputs[-1].error == "RuntimeError: broken"
    assert_idle(engine)


def test_steps_without_drafts_need_no_upload():
    """The inputs stay the same as long as the host has no new token or block to send."""
    r = Request("r", [5, 6, 7], 9, generated_tokens=[8], row=1, block_table=[4], num_filled_slots=3)
    inputs = []
    for _ in range(2):
        r.generated_tokens.append(TO_COME)
        r.num_to_come = 1
        r.num_filled_slots += 1
        inputs.append(pack(Plan(decodes=[r]), StepShape(2, 0, 0), 3, 64, 8).tolist())
    assert inputs == 2 * [[1, 3, 4, 64, NO_TOKEN, NO_TOKEN, 0, 0]]
