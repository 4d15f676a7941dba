"""
Answers held to grammars: each token is the one that masked sampling gives, whatever happens to the
request and whatever stands beside it; and nothing that a client sends holds up the others.

The oracle recomputes every position alone: the dense model's logits, a mask of a matcher of its
own, and the sampling rules of oracle.py. The model is random, so that most tokens are refused.
"""

import gc
import json
import random
import sys
import time
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from zlib import crc32

import numpy as np
import pytest
import torch
from oracle import possible_tokens
from tokenizer_kinds import save

from engine import grammar as grammar_module
from engine.drafts import GrowingText
from engine.engine import Engine, Output
from engine.grammar import Compiled, CompileQueue, Constraints, Grammar, Grammars, Refused, soon
from engine.matcher import COUNT, TOO_LARGE
from engine.process import handle_message, queue_output
from engine.step import Answer, Step
from model import GPT, GPTConfig
from ops import cpu
from ops.sampling import masked
from paged import Plan
from params import SamplingParams
from test_paged import assert_idle, new_engine
from tests.engine.test_runner import capture
from tests.simulated_device import (
    VOCABULARY,
    SimulatedDevice,
    noise_key,
    seen,
    simulated_engine,
)
from tests.simulator import RecordedWorld
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
each_overlap = pytest.mark.parametrize("overlap", [False, True])
needs_cpu_c = pytest.mark.skipif(not cpu.c_compiler() or DEVICE == "cuda", reason="needs a CPU")
GRAMMARS = [
    ("json", json.dumps(PERSON)),
    ("json", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 4})),
    ("regex", "(ab|cd)+e[0-9]{2,5}"),
    ("choice", '["yes", "no", "yesterday"]'),
    ("grammar", 'start: "<" word ">"\nword: /[a-f]{3,6}/'),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save("gpt2", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory) -> Tokenizer:
    return load_tokenizer(directory)


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


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No verdict and no mask is late, however busy the machine."""
    monkeypatch.setattr(grammar_module, "MASK_SECONDS", 60)


@pytest.fixture
def late_replies(monkeypatch):
    make_late(monkeypatch)


def make_late(monkeypatch):
    """Half of all verdicts and masks take longer than a step waits for them."""
    choose = random.Random(0)

    def receive_late(self, seconds: float) -> bool:
        return choose.random() < 0.5 and receive(self, seconds)

    receive = Compiled._receive
    monkeypatch.setattr(Compiled, "_receive", receive_late)


def open_grammars(directory: Path, rows: int = 0) -> Grammars:
    """
    Those of a model with more rows than its tokenizer has tokens. Each control token ends an
    answer.
    """
    tokenizer = load_tokenizer(directory)
    ends = tokenizer.control.values()
    V = tokenizer.vocab_size + rows
    return Grammars(directory, SimpleNamespace(vocab_size=V, eos_token_ids=ends))


@pytest.fixture(scope="module")
def grammars(directory) -> Grammars:
    return open_grammars(directory, rows=5)


def step(engine: Engine, answers: dict):
    """A step, whose outputs go to the answers: id -> (tokens, finish_reason, error)."""
    for output in engine.step():
        assert output.tokens or output.error, "an output of no token"
        tokens, _, _ = answers.get(output.id, ([], None, None))
        answers[output.id] = (tokens + output.tokens, output.finish_reason, output.error)


def finish(engine: Engine, answers: dict) -> dict:
    for _ in range(3000):
        if not engine.has_work:
            return answers
        step(engine, answers)
    raise AssertionError(f"{[*engine.requests]} never end")


def assert_follows(model: GPT, grammar: Grammar, prompt, params, answer, choice=0):
    """Each token of an answer is what a sampler that always masks may give."""
    tokens, *_ = answer
    grammar = grammar.copy()
    ends = model.config.eos_token_ids
    for i, token in enumerate(tokens):
        text = torch.tensor([prompt + tokens[:i]], device=DEVICE)
        logits = model(text)[0][0, -1].double().cpu()
        wanted = possible_tokens(
            masked(logits[None], torch.from_numpy(mask_of(grammar)[None]))[0],
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
@each_overlap
def test_tokens_are_those_of_masked_sampling(model, grammars, overlap, attention):
    """
    With preemptions, prefix hits, forks, aborts, filters, penalties, stops and free requests.
    Would catch: a refused token that is kept, counted or committed; a mask of another position or
    row; a mask that stays; filters before masks; a step under way that still counts.
    """
    for seed in range(4):
        engine = play(model, grammars, seed, overlap=overlap, attention=attention)
        assert engine.stages["grammar"].num_refused > 20
        assert engine.scheduler.num_preemptions
        assert engine.scheduler.num_hit_tokens


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a CPU: it stands in for graphs")
def test_tokens_are_masked_where_graphs_have_sent_others(model, grammars, monkeypatch):
    original = new_engine

    def captured(*args, **settings) -> Engine:
        engine = original(*args, **settings)
        capture(engine)
        return engine

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[__name__], "new_engine", captured)
        engine = play(model, grammars, 0, overlap=True, attention="torch")
    assert engine.stages["grammar"].num_refused > 20


@pytest.mark.parametrize("window", [0, 12])
@each_overlap
def test_requests_sit_out_until_their_masks_are_there(model, grammars, overlap, late_replies):
    """
    Would catch: a step that waits for a mask; a late verdict that counts as the next one; a request
    that is held for ever, goes back too far, or reads a block that a window has left.
    """
    for seed in range(3):
        play(model, grammars, seed, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mask_is_waited_for_only_where_there_is_nothing_else_to_do(
    model, grammars, overlap, monkeypatch
):
    """
    Would catch: all requests that wait for one whose grammar is slow; an engine that looks again
    and again for a mask, because another request waits for the blocks of the one that is held.
    """
    waits = []

    def has_mask(grammar: Grammar, deadline: float = 0):
        if deadline:
            waits.append(grammar)

    monkeypatch.setattr(Grammar, "has_mask", has_mask)
    engine = new_engine(model, overlap=overlap, num_blocks=12, block_size=4)
    params = SamplingParams(max_tokens=9, temperature=0)
    held = replace(params, grammar=grammars.compile("regex", "(yes|no)+"))
    engine.add_request("held", [5, 6, 7], held)
    engine.add_request("free", [5, 6, 7], params)
    answers = {}
    while "free" in engine.requests:
        assert not waits
        step(engine, answers)
    assert engine.scheduler.held
    step(engine, answers)
    assert len(waits) == 1
    free = engine.scheduler.block_allocator.num_free
    engine.add_request("waits", [5] * (4 * free + 1), replace(params, max_tokens=1))
    step(engine, answers)
    assert engine.scheduler.waiting and len(waits) == 2


def guess_now_and_then_wrongly(monkeypatch, answers: dict, choose: random.Random, V: int):
    """Otherwise what comes in the answers, lists of tokens by id."""

    def guess(text: GrowingText, most: int) -> list[int]:
        r = text.request
        num_known = r.num_generated - r.num_to_come
        draft = answers[r.id][num_known:][: choose.randint(0, max(0, most))]
        if draft and choose.random() < 0.4:
            draft[choose.randrange(len(draft))] = choose.randrange(V)
        return draft if text.can_guess else []

    monkeypatch.setattr(GrowingText, "guess", guess)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_request_is_kept_that_has_ended(model, grammars, overlap):
    """
    Whatever asks for it: a grammar, drafts, scores, choices, a record. Each that comes may keep
    itself until the next one does. Would catch a book of requests that nobody closes.
    """
    engine = new_engine(model, speculate=not overlap, overlap=overlap)
    engine.stages["record"].listen(Mock())

    def serve(name: str):
        grammar = grammars.compile("regex", "[ab]*")
        for i, params in enumerate([{}, {"grammar": grammar}, {"logprobs": 2}, {"n": 3}] * 2):
            more = {"n": params.pop("n", 1), "prompt_logprobs": i if "logprobs" in params else None}
            params = SamplingParams(seed=i, max_tokens=9, temperature=0, **params)
            engine.add_request(f"{name} {i}", [5, 6, 7] * 4, params, **more)
        finish(engine, {})

    serve("first")
    serve("then")
    gc.collect()
    kept = [x.id for x in gc.get_objects() if type(x) is Answer and str(x.id).startswith("first")]
    assert not kept


def test_a_right_draft_counts_only_as_far_as_its_grammar_follows(tokenizer, grammars):
    """llguidance says before that all of it may come: it does not count the tokens of a rule."""
    a, b, c, d = (tokenizer.encode(letter)[0] for letter in "abcd")
    text = 'start: word "!"\nword[max_tokens=2]: /[a-z]+/'
    constraints = Constraints(Mock(in_flight=None, scheduler=Mock(held=[])))
    r = Answer("r", [1], 9, generated_tokens=[a], row=0)
    grammar = constraints.grammars[r] = grammars.compile("grammar", text).copy()
    grammar.accept(a)
    step = Step(1, Plan(decodes=[r], guesses={r: [b, c]}))
    constraints.planned(step)
    assert step.plan.guesses == {r: [b, c]}
    step.tokens = {r: [b, c, d]}
    constraints.settled(step)
    assert step.tokens == {r: [b]}
    constraints.engine.scheduler.move.assert_called_with(r, "held")
    assert allowed_tokens(grammar) == tokenizer.encode("!")


# --------------------------------------------------------------------------------------------------
# What a client must not do


def nested(depth: int) -> dict:
    if depth == 0:
        return {"type": "string"}
    return {"anyOf": [nested(depth - 1), {"type": "integer"}]}


def of_properties(count: int) -> dict:
    return {"type": "object", "properties": {str(i): {} for i in range(count)}}


LENIENT = {"lenient": True, "whitespace_pattern": "[ \\n]*"}
CHECKS_OFF = json.dumps({"x-guidance": LENIENT, "not": {}})
LONG_WORDS = r"(\w{1,50} ?){1,500}"  # grows too complex in the middle
# kind, text, and what the reason of its refusal says; if nothing, it is served
HOSTILE = r"""
a million                 | regex   | (a{1,1000}){1,1000}                     |
a million thousand        | regex   | ((a{0,1000}){0,1000}){0,1000}           |
three runs                | regex   | \w{0,3000}\d{0,3000}\w{0,3000}          |
backtracking              | regex   | (x+x+)+y                                |
open parenthesis          | regex   | (                                       | unclosed group
look-around               | regex   | (?=a)b                                  | look-around
look-around in JSON       | json    | {"type": "string", "pattern": "(?=a)b"} | look-around
not                       | json    | {"not": {"type": "string"}}             | "not"
uniqueItems               | json    | {"type": "array", "uniqueItems": true}  | uniqueItems
format                    | json    | {"type": "string", "format": "foo"}     | Unknown format: foo
itself                    | json    | {"$ref": "#"}                           | no value of # has an end
remote                    | json    | {"$ref": "http://x/y"}                  | nothing in it is http://x/y
a typo in Lark            | grammar | start "a"                               | Expected token ':'
overlapping oneOf         | json    | {"oneOf": [{}, {}]}                     | may overlap: say anyOf
no type                   | json    | {"type": "foo"}                         | Invalid type
no JSON                   | json    | {"type":                                | is no JSON
no schema                 | json    | [1]                                     | object
options                   | json    | CHECKS_OFF                              | "not"
options of a part         | json    | {"allOf": [CHECKS_OFF]}                 | "not"
options in Lark           | grammar | start: %json CHECKS_OFF                 | x-guidance
options, spelled          | grammar | start: %json SPELLED                    | x-guidance
options, a letter spelled | grammar | start: %json {"\u0078-guidance": {"lenient": true}, "uniqueItems": true} | x-guidance
not in Lark               | grammar | start: %json {"not": {}}                | "not"
"""  # noqa: E501
HOSTILE = HOSTILE.replace("SPELLED", CHECKS_OFF.replace("x-", r"\u0078\u002D"))
HOSTILE = HOSTILE.replace("CHECKS_OFF", CHECKS_OFF).strip().splitlines()
HOSTILE = {name: rest for name, *rest in (map(str.strip, row.split(" |")) for row in HOSTILE)}
HOSTILE |= {
    "12 nested anyOf": ("json", json.dumps(nested(12)), ""),
    "2,000 properties": ("json", json.dumps(of_properties(2000)), ""),
    "4,500 properties": ("json", json.dumps(of_properties(4500)), "too big"),
    "wide choice": ("choice", json.dumps([f"w{i}" for i in range(8000)]), ""),
    "long words": ("regex", LONG_WORDS, ""),
    "ambiguous rules": ("grammar", 'start: a\na: a a | "x" | ""', ""),
    "deep parentheses": ("regex", "(" * 500 + "a" + ")" * 500, "invalid regex"),
}


def mask_of(grammar: Grammar) -> np.ndarray:
    """[V / 32] int32: a bit for each token that may come next."""
    grammar.begin_mask()
    while not grammar.has_mask(soon()):
        pass
    return grammar.mask.copy()


def allowed_tokens(grammar: Grammar) -> list[int]:
    bits = mask_of(grammar).view(np.uint8)
    return np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()


def walk(grammar: Grammar, count: int) -> list[int]:
    """Draw this number of tokens that the grammar allows, fewer if no more is allowed."""
    choose = random.Random(0)
    tokens = []
    while len(tokens) < count and (allowed := allowed_tokens(grammar)):
        tokens.append(choose.choice(allowed))
        assert grammar.accept(tokens[-1])
    return tokens


# too much for two seconds on a busy machine
LARGE = {"2,000 properties", "4,500 properties", "wide choice"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in HOSTILE],
)
def test_hostile_grammars_are_served_or_refused(grammars, name):
    """
    Would catch: a keyword that is passed over; options of a client that switch checks off. Alone on
    a core the slowest takes half a second.
    """
    kind, text, reason = HOSTILE[name]
    if reason:
        for _ in range(3):  # a busy machine may need more than the two seconds
            with pytest.raises(ValueError) as refusal:
                grammars.compile(kind, text)
            if TOO_LARGE not in str(refusal.value):
                break
        assert reason in str(refusal.value)
        assert len(str(refusal.value)) < 600
    else:
        grammar = grammars.compile(kind, text).copy()
        assert walk(grammar, 20)


# --------------------------------------------------------------------------------------------------
# Messages to the engine's loop


def ask(id: str, kind: str | None = None, text: str = "", owner: str = "") -> dict:
    grammar = {"grammar": {"kind": kind, "text": text}, "owner": owner} if kind else {}
    return {"op": "add", "id": id, "prompt": [1], "params": {"max_tokens": 2}} | grammar


def passed_on(queue: CompileQueue) -> list[dict]:
    """All messages that wait, once their grammars are compiled."""
    messages = []
    while queue.waiting:
        messages += queue.pass_on([])
        time.sleep(0.001)
    return messages


class SlowLibrary:
    """Plays `Grammars`: a grammar is compiled once the test has put its text into `done`."""

    def __init__(self):
        self.begun = []
        self.done = set()

    def begin(self, kind: str, text: str) -> str:
        self.begun.append(text)
        return text

    def finish(self, text: str) -> str | None:
        return text if text in self.done else None


def test_messages_go_by_one_whose_grammar_is_compiled():
    """
    Would catch: a loop that waits for a grammar; a request that is added after its abort, or that
    is dropped with another's; clients that hang up and leave the others behind grammars that nobody
    wants.
    """
    library = SlowLibrary()
    queue = CompileQueue(lambda: library)
    first = [ask("a", "regex", "a"), ask("b", "regex", "b"), ask("c"), ask("d", "regex", "d")]
    assert [message["id"] for message in queue.pass_on(first)] == ["c"]
    aborts = [{"op": "abort", "id": id} for id in "bc"]
    assert list(queue.pass_on(aborts)) == aborts
    library.done.add("a")
    [message] = queue.pass_on([])
    assert (message["id"], message["grammar"].result()) == ("a", "a")
    assert library.begun == ["a", "d"]
    list(queue.pass_on([{"op": "abort", "id": "d"}]))
    assert not queue.waiting
    assert not list(queue.pass_on([ask("e", "regex", "e")]))
    assert library.begun == ["a", "d", "e"]


def test_owners_take_turns():
    """Would catch sixteen slow grammars of one key that are all compiled before another's."""
    library = SlowLibrary()
    queue = CompileQueue(lambda: library)
    texts = [(f"x{i}", "x") for i in range(16)] + [("y0", "y"), ("y1", "y"), ("z0", "z")]
    asked = [ask(text, "regex", text, owner) for text, owner in texts]
    assert not list(queue.pass_on(asked[:16]))
    assert not list(queue.pass_on(asked[16:]))
    library.done.update(text for text, _ in texts)
    passed = [message["id"] for message in queue.pass_on([])]
    assert passed[:6] == ["x0", "y0", "z0", "x1", "y1", "x2"]
    assert sorted(passed) == sorted(text for text, _ in texts)


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (ValueError("no regex"), "invalid", "no regex"),
        (ImportError("llguidance is not installed"), "invalid", "llguidance is not installed"),
        (OSError("no files"), "internal", "the grammar was not compiled: no files"),
    ],
)
def test_only_the_librarys_refusal_is_the_clients_to_change(model, error, kind, message):
    """Would catch: its reason as an internal error; a 400 for want of files, processes, memory."""
    refusals = []
    link = SimpleNamespace(queue=refusals.append)
    queue = CompileQueue(Mock(side_effect=error))
    passed = list(queue.pass_on([ask("a", "regex", "(")]))
    passed += passed_on(queue)
    engine = new_engine(model)
    handle_message(engine, link, *passed)
    said = {"op": "error", "id": "a", "kind": kind, "tools": [], "message": message}
    assert [refusal | {"tools": [*refusal["tools"]]} for refusal in refusals] == [said]
    assert_idle(engine)


# --------------------------------------------------------------------------------------------------
# What an answer is, and what stands beside it


@each_overlap
def test_scores_are_of_the_distribution_without_a_mask(model, grammars, overlap):
    """Would catch: the score of the token that was refused, or of what a mask has left."""
    engine = new_engine(model, overlap=overlap)
    outputs = []
    params = SamplingParams(seed=3, max_tokens=12, logprobs=3)
    engine.add_request("a", [5, 6], replace(params, grammar=grammars.compile("regex", "[a-z]{99}")))
    while engine.has_work:
        outputs += engine.step()
    assert engine.stages["grammar"].num_refused > 5
    text = [5, 6]
    for output in outputs:
        logits = model(torch.tensor([text], device=DEVICE))[0][0, -1]
        wanted = logits.log_softmax(-1)
        [token], (score, _, scores) = output.tokens, output.logprobs
        assert score == pytest.approx(wanted[token].item(), abs=1e-3)
        assert scores == pytest.approx(wanted.topk(3).values.tolist(), abs=1e-3)
        text += output.tokens
    assert len(text) == 14 and outputs[-1].finish_reason == "length"


@each_overlap
def test_what_cannot_go_on_fails_alone(model, grammars, tmp_path, overlap):
    """
    Beside a free request, which gets what it gets alone. Would catch: a dead end that ends a step,
    or its neighbours; a token that no grammar allows; an answer without an end.
    """
    save("smollm2", tmp_path)  # has no token for a tab
    with_lacking = Grammars(tmp_path, model.config)
    params = SamplingParams(seed=1, max_tokens=30)
    alone = new_engine(model, overlap=overlap)
    [free] = alone.generate([[7, 8]], params, progress=False)
    engine = new_engine(model, overlap=overlap)
    engine.add_request("free", [7, 8], params)
    with pytest.raises(Refused, match="the vocabulary has no token"):
        with_lacking.compile("regex", "a\tb")
    lacking = with_lacking.compile("regex", "a{20}\tb")
    engine.add_request("byte", [7], replace(params, grammar=lacking))
    late = replace(params, min_tokens=9)
    engine.add_request("short", [7], replace(late, grammar=grammars.compile("regex", "a|b")))
    long = replace(params, max_tokens=200)
    engine.add_request("complex", [7], replace(long, grammar=grammars.compile("regex", LONG_WORDS)))
    with pytest.raises(ValueError, match="end-of-text"):
        forever = replace(params, ignore_eos=True)
        engine.add_request("forever", [7], replace(forever, grammar=grammars.compile("regex", "a")))
    answers = finish(engine, {})
    assert answers["free"][0] == free
    for id, words in {"byte": "no token is left", "short": "min_tokens"}.items():
        _, reason, error = answers[id]
        assert reason == "error" and words in error
        queued = []  # not a 500, which clients send again and again
        queue_output(SimpleNamespace(queue=queued.append), Output(id, [], reason, error=error))
        assert queued[0]["kind"] == "invalid"
    _, reason, error = answers["complex"]
    assert (reason, error) == ("length", None) or "too many expressions" in error
    assert_idle(engine)


def test_json_has_an_end(tokenizer, grammars):
    """
    Would catch: newlines for ever; an end-of-text token, of the model's two, that is not one; two
    blanks between parts.
    """
    for end in tokenizer.control.values():
        grammar = grammars.compile("json", "{}").copy()
        assert all(grammar.accept(token) for token in tokenizer.encode("[1, 2]"))
        assert grammar.accept(end)
        grammar = grammars.compile("regex", "a+").copy()  # can end, and go on
        assert grammar.accept(tokenizer.encode("a")[0])
        assert grammar.accept(end)
    for space in ["  ", "\n", "\t"]:
        grammar = grammars.compile("json", "{}").copy()
        assert not all(grammar.accept(token) for token in tokenizer.encode(f"[1,{space}2]"))


# --------------------------------------------------------------------------------------------------
# On the simulated engine: right answers are known beforehand


def allowed_after(tokens: list[int]) -> int:
    """The bits of those that may follow: a third of all, or a single one."""
    crc = crc32(bytes(tokens))
    bits = sum(1 << t for t in range(VOCABULARY) if crc32(bytes([t]), crc) % 3 == 0)
    return bits or 1 << crc % VOCABULARY


class FakeGrammar(Grammar):
    """One whose process is played: its replies take their time."""

    def __init__(self, choose: random.Random):
        super().__init__(Mock(mask=None, ids=count(), wait_for=self.reply_to))
        self.choose = choose
        self.tokens = []  # that came
        self.wants_mask = False

    def copy(self) -> Grammar:
        return FakeGrammar(self.choose)

    def _ask(self, kind: int, asked: list[int]):
        self.tokens += self.accepted
        self.accepted = []
        bits = allowed_after(self.tokens)
        n = 0
        while n < len(asked) and allowed_after(self.tokens + asked[:n]) >> asked[n] & 1:
            n += 1
        is_number = kind == COUNT or n
        self.reply = n if is_number else np.array([bits], np.int32).tobytes()

    def reply_to(self, question: None, deadline: float) -> int | bytes | None:
        return None if self.choose.random() < 0.3 else self.reply


def masked_answer(prompt: list[int], max_tokens: int, key: int, window: int, is_free: bool):
    """The right tokens of an answer that ends with a 0."""
    tokens = []
    while len(tokens) < max_tokens and 0 not in tokens:
        token = crc32(seen(bytes(prompt + tokens), window), key) % VOCABULARY
        while not is_free and not allowed_after(tokens) >> token & 1:
            token = (token + 1) % VOCABULARY
        tokens.append(token)
    return tokens


class Reader(RecordedWorld):
    """Of the record of an engine, which it follows: see there."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.step = engine.step
        self.lines = []
        self.begin_record()

    def read_step(self) -> list[Output]:
        """
        A snapshot has what no line tells of, a token that was taken away: with overlap none is
        sampled again, and without drafts no token is left.
        """
        constraints = self.engine.stages["grammar"]
        settings = self.engine.settings
        num_refused = constraints.num_refused
        self.lines.clear()
        outputs = self.step()
        self.check_tallies()
        is_refused = constraints.num_refused > num_refused
        if is_refused and settings.overlap and not settings.speculate:
            assert any('"snapshot"' in line for line in self.lines), "it has no snapshot"
        return outputs


@pytest.mark.parametrize("seed", range(50))
def test_simulated_lives(seed, monkeypatch):
    """
    With preemptions, forks, aborts, windows, padding, late masks, overlap, filters and drafts,
    and a reader of the record.
    Would catch: a slot, a block or a row that keeps what was refused, or was a forbidden guess; a
    step under way that counts for a request that has gone back; a request that sits out for ever;
    another's mask.
    """
    choose = random.Random(seed)
    overlap = seed % 2 == 0
    window = choose.choice([0, 0, 6])
    build = partial(SimulatedDevice, padded=choose.random() < 0.5)
    S = choose.choice([1, 4])
    sizes = {"block_size": S, "num_blocks": 48 // S, "max_num_seqs": 4}
    sizes |= {"overlap": overlap, "speculate": choose.random() < 0.7}
    engine = simulated_engine((0,), 40, build, window, **sizes)
    engine.step = Reader(engine).read_step
    replies = random.Random(seed)
    answers = {}
    wanted = {}
    guess_now_and_then_wrongly(monkeypatch, wanted, choose, VOCABULARY)
    for i in range(12):
        prompt = [choose.randrange(1, VOCABULARY) for _ in range(choose.randrange(1, 12))]
        params = SamplingParams(
            max_tokens=choose.randrange(1, 20), seed=i, top_k=choose.choice([0, 0, 3])
        )
        is_free = choose.random() < 0.3
        grammar = None if is_free else FakeGrammar(replies)
        n = choose.choice([1, 1, 3])
        engine.add_request(f"r{i}", prompt, replace(params, grammar=grammar), n=n)
        for choice in range(n):
            id = f"r{i}.{choice}" if choice else f"r{i}"
            key = noise_key(i, choice)
            wanted[id] = masked_answer(prompt, params.max_tokens, key, window, is_free)
        for _ in range(choose.randrange(4)):
            step(engine, answers)
        if choose.random() < 0.2:
            engine.abort(f"r{choose.randrange(i + 1)}")
    finish(engine, answers)
    for id, (tokens, reason, error) in answers.items():
        assert error is None
        assert tokens == wanted[id][: len(tokens)], f"{id} is wrong"
        assert reason is None or tokens == wanted[id]
    assert_idle(engine)
