"""
Answers held to grammars: each token is the one that masked sampling gives, whatever happens to the
request and whatever stands beside it; and nothing that a client sends holds up the others.

The oracle recomputes every position alone: the dense model's logits, a mask of a matcher of its
own, and the sampling rules of oracle.py. The model is random, so that most tokens are refused.
"""

import json
import random
import time
from dataclasses import replace
from functools import cache
from threading import Event

import numpy as np
import pytest
import torch
from oracle import possible_tokens
from tokenizer_kinds import save

from engine.engine import Engine
from engine.grammar import Compiler, Grammar, Grammars
from engine.process import send_output
from model import GPT, GPTConfig
from ops.sampling import masked
from params import SamplingParams
from test_paged import assert_idle, new_engine
from tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAMMARS = [
    ("json", json.dumps(PERSON)),
    ("json", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 4})),
    ("regex", "(ab|cd)+e[0-9]{2,5}"),
    ("choice", '["yes", "no", "yesterday"]'),
    ("grammar", 'start: "<" word ">"\nword: /[a-f]{3,6}/'),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(save("gpt2", tmp_path_factory.mktemp("tokenizer")))


@cache
def random_model(V: int, ends: tuple[int, ...], window: int = 0) -> GPT:
    """Its rows are more than the tokenizer's tokens, and it has two end-of-text tokens."""
    config = GPTConfig(V, 256, n_layer=2, n_head=2, n_embd=32, eos_token_ids=ends)
    if window:
        config = replace(config, windows=(window, window))
    model = GPT(config)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2, generator=generator)
    return model.eval()


@pytest.fixture
def window() -> int:
    return 0


@pytest.fixture
def model(tokenizer, window) -> GPT:
    ends = tuple(tokenizer.control.values())
    return random_model(tokenizer.vocab_size + 5, ends, window).to(DEVICE)


@pytest.fixture
def late_masks(monkeypatch):
    """Half of the masks take longer than a step waits for them."""
    compute = Grammars.compute_masks
    choose = random.Random(0)

    def compute_late(grammars: Grammars, matchers: list) -> np.ndarray:
        time.sleep(choose.choice([0, 0.004]))
        return compute(grammars, matchers)

    monkeypatch.setattr(Grammars, "compute_masks", compute_late)


@pytest.fixture
def grammars(tokenizer, model) -> Grammars:
    return Grammars(tokenizer, model.config)


def step(engine: Engine, answers: dict):
    """A step, whose outputs go to the answers: id -> (tokens, finish_reason, error)."""
    for output in engine.step():
        tokens, _, _ = answers.get(output.id, ([], None, None))
        answers[output.id] = (tokens + output.tokens, output.finish_reason, output.error)


def finish(engine: Engine, answers: dict) -> dict:
    while engine.has_work:
        step(engine, answers)
    return answers


def assert_follows(model: GPT, grammar: Grammar, prompt, params, answer, choice=0):
    """Each token of an answer is what a sampler that always masks may give."""
    tokens, *_ = answer
    grammar = grammar.copy()
    ends = model.config.eos_token_ids
    for i, token in enumerate(tokens):
        text = torch.tensor([prompt + tokens[:i]], device=DEVICE)
        logits = model(text)[0][0, -1].double().cpu()
        allowed = torch.from_numpy(grammar.grammars.compute_masks([grammar.matcher]))
        wanted = possible_tokens(
            masked(logits[None], allowed)[0],
            params,
            len(prompt) + i,
            choice=choice,
            prompt=prompt,
            generated=tokens[:i],
            stops={*ends, *params.stop_token_ids},
        )
        assert token in wanted, f"token {i} is {token}, wanted {wanted}"
        assert grammar.accept(token)


def draw(choose: random.Random, V: int, seed: int) -> SamplingParams:
    fields = {
        "top_k": choose.choice([0, 0, 0, 1, 5, 40]),
        "top_p": choose.choice([1, 1, 1, 0.6, 0.9]),
        "min_p": choose.choice([0, 0, 0, 0.1]),
        "frequency_penalty": choose.choice([0, 0, 0.7]),
        "repetition_penalty": choose.choice([1, 1, 1.3]),
        "min_tokens": choose.choice([0, 0, 3]),
        "logit_bias": choose.choice([None, None, {choose.randrange(V): 4.0}]),
        "stop_token_ids": choose.choice([(), (), (66,)]),
        "max_tokens": choose.choice([5, 20, 40]),
        "logprobs": choose.choice([None, None, 2]),
    }
    return SamplingParams(temperature=choose.choice([0, 0.7, 1, 1.5]), seed=seed, **fields)


def play(model: GPT, grammars: Grammars, seed: int, **settings) -> Engine:
    """
    Random requests, with grammars and without, some aborted, in a pool that is too small; the
    answers are judged.
    """
    choose = random.Random(seed)
    V = model.config.vocab_size
    sizes = {"num_blocks": 20, "max_num_seqs": 6, "token_budget": 32}
    engine = new_engine(model, **sizes | settings)
    asked = {}
    answers = {}
    start = [choose.randrange(V) for _ in range(9)]
    for i in range(24):
        kind = choose.choice([None, *GRAMMARS])
        params = draw(choose, V, seed=i)
        prompt = start + [choose.randrange(V) for _ in range(choose.randrange(1, 14))]
        n = choose.choice([1, 1, 1, 3])
        grammar = grammars.compile(*kind) if kind else None
        params = replace(params, grammar=grammar)
        engine.add_request(f"r{i}", prompt, params, n=n)
        for choice in range(n):
            id = f"r{i}.{choice}" if choice else f"r{i}"
            asked[id] = (kind, prompt, params, choice)
        if choose.random() < 0.3:
            engine.abort(f"r{choose.randrange(i + 1)}")
        if choose.random() < 0.5:
            step(engine, answers)
    finish(engine, answers)
    for id, answer in answers.items():
        kind, prompt, params, choice = asked[id]
        if kind and answer[1]:
            assert_follows(model, grammars.compile(*kind), prompt, params, answer, choice)
    assert_idle(engine)
    return engine


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_masked_sampling(model, grammars, overlap, attention):
    """
    With preemptions, prefix hits, forks, aborts, filters, penalties, stops and free requests.
    Would catch: a refused token that is kept, counted or committed; a mask of another position or
    row; a mask that stays; filters before masks; a step under way that still counts.
    """
    for seed in range(4):
        engine = play(model, grammars, seed, overlap=overlap, attention=attention)
        assert engine.num_refused > 20
        assert engine.scheduler.num_preemptions
        assert engine.scheduler.num_hit_tokens


@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_sit_out_until_their_masks_are_there(model, grammars, overlap, late_masks):
    """
    Would catch: a step that waits for a mask; a request that is held for ever, goes back too far,
    or reads a block that a window has left.
    """
    for seed in range(3):
        play(model, grammars, seed, overlap=overlap)


@pytest.mark.parametrize(
    "kind, text",
    [
        ("json", '{"type": "integer", "multipleOf": 4294967291}'),
        ("json", '{"type": "integer", "multipleOf": 4e9}'),
        ("json", '{"type": "integer", "multipleOf": -1000003}'),
        ("json", '{"type": "integer", "\\u006dultipleOf": 4294967291}'),
        ("json", '{"allOf": [{"multipleOf": 7919}, {"multipleOf": 7907}], "type": "integer"}'),
        ("json", '{"allOf": [{"multipleOf": 0.1}, {"multipleOf": 99991}], "type": "number"}'),
        ("json", '{"type": "number", "multipleOf": 1e-300}'),
        ("grammar", 'start: %json {"type": "integer", "multipleOf": 4294967291}'),
    ],
)
def test_large_multiples_are_refused(grammars, kind, text):
    """
    Would catch a schema of 46 bytes that the library compiles for ever, in all of the memory: then
    nobody's new grammar is compiled any more.
    """
    with pytest.raises(ValueError, match="common multiple is above 50,000"):
        grammars.compile(kind, text)


def test_usual_multiples_are_served(grammars):
    """Would catch fields that are multiplied with each other, or cents that are taken for 100."""
    price = {"type": "number", "multipleOf": 0.01}
    each = {f"price{i}": price for i in range(9)} | {"weight": {"multipleOf": 100}}
    grammars.compile("json", json.dumps({"type": "object", "properties": each}))


def test_options_spelled_with_escapes_are_refused(grammars):
    """Would catch a grammar that switches checks off by a name that only a JSON parser can read."""
    text = 'start: %json {"\\u0078-guidance": {"lenient": true}, "uniqueItems": true}'
    with pytest.raises(ValueError, match="x-guidance"):
        grammars.compile("grammar", text)


def test_grammars_of_aborted_requests_are_not_compiled(grammars, monkeypatch):
    """Would catch clients that hang up and leave the others behind grammars that nobody wants."""
    begun, go_on = [], Event()

    def compile(kind, text):
        begun.append(text)
        go_on.wait(10)

    monkeypatch.setattr(grammars, "compile", compile)
    compiler = Compiler(lambda: grammars)
    link = object()
    texts = [{"kind": "regex", "text": text} for text in "abcd"]
    adds = [{"op": "add", "id": text["text"], "grammar": text} for text in texts]
    assert not list(compiler.pass_on((link, add) for add in adds))
    ends = [{"op": "abort", "id": "b"}, {"op": "abort", "id": "c"}]
    list(compiler.pass_on((link, end) for end in ends))
    go_on.set()
    adds[3]["grammar"].result(10)
    assert [message["id"] for _, message in compiler.pass_on([])] == ["a", "d"]
    assert begun == ["a", "d"]


class Wire:
    """A link that keeps what it is to send."""

    def __init__(self):
        self.queued = []
        self.links = {0: self}

    def queue(self, message: dict):
        self.queued.append(message)


def test_an_answer_that_cannot_go_on_is_the_clients_to_change(model, grammars):
    """
    Would catch a 500, which clients send again and again, for a grammar whose text has ended before
    min_tokens.
    """
    engine = new_engine(model)
    grammar = grammars.compile("choice", '["a"]')
    engine.add_request("0:x", [1, 2], SamplingParams(min_tokens=9, grammar=grammar))
    wire = Wire()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    send_output(wire, outputs[-1])
    assert_idle(engine)
    [message] = wire.queued
    assert message["kind"] == "invalid"
    assert "min_tokens and logit_bias forbid them" in message["message"]
