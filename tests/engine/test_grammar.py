"""
Answers that must follow a grammar: each token is the one that masked sampling gives, whatever
happens to the request and whatever is served beside it. And nothing that a client sends delays the
other requests.

The oracle recomputes every position separately, with the dense model's logits, a mask from its own
matcher, and the sampling rules of oracle.py. The model is random, so most tokens are refused.
"""

import random
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from zlib import crc32

import numpy as np
import pytest
import torch
from oracle import possible_tokens, random_params
from tokenizer_kinds import save

from engine import grammar as grammar_module
from engine.drafts import GrowingText
from engine.engine import Engine, Output
from engine.grammar import Compiled, CompileQueue, Grammar, Grammars, Refused, soon
from engine.matcher import COUNT
from engine.process import handle_message, queue_output
from model import GPT, GPTConfig
from ops.sampling import masked
from params import SamplingParams
from test_paged import assert_idle, new_engine
from tests.engine.test_runner import capture
from tests.simulated_device import (
    VOCABULARY,
    SimulatedDevice,
    greedy,
    noise_key,
    seen,
    simulated_engine,
)
from tests.simulator import RecordedWorld
from tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_overlap = pytest.mark.parametrize("overlap", [False, True])
PERSON = """{"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 8},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3}
}, "required": ["name", "age"], "additionalProperties": false}"""
GRAMMARS = [
    ("json", PERSON),
    ("json", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}'),
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


@pytest.fixture
def window() -> int:
    return 0


@pytest.fixture
def model(tokenizer, window) -> GPT:
    """
    Return a model with random weights, more rows than the tokenizer has tokens, and two end-of-text
    tokens.
    """
    V, ends = tokenizer.vocab_size + 5, tuple(tokenizer.control.values())
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "windows": (window, window)}
    model = GPT(GPTConfig(V, 256, eos_token_ids=ends, **sizes))
    torch.manual_seed(1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model.eval().to(DEVICE)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Let no verdict and no mask be late, however busy the machine is."""
    monkeypatch.setattr(grammar_module, "MASK_SECONDS", 60)


@pytest.fixture
def late_replies(monkeypatch):
    """Let half of all verdicts and masks take longer than a step waits for them."""
    choose = random.Random(0)
    receive = Compiled._receive

    def receive_late(self, seconds: float) -> bool:
        return choose.random() < 0.5 and receive(self, seconds)

    monkeypatch.setattr(Compiled, "_receive", receive_late)


def open_grammars(directory: Path, rows: int = 0) -> Grammars:
    """
    Return the grammars of a model with more rows than its tokenizer has tokens. Each control token
    ends an answer.
    """
    tokenizer = load_tokenizer(directory)
    ends = tokenizer.control.values()
    V = tokenizer.vocab_size + rows
    return Grammars(directory, SimpleNamespace(vocab_size=V, eos_token_ids=ends))


@pytest.fixture(scope="module")
def grammars(directory) -> Grammars:
    return open_grammars(directory, rows=5)


def mask_of(grammar: Grammar) -> np.ndarray:
    """Return [V / 32] int32: a bit for each token that may come next."""
    grammar.begin_mask()
    while not grammar.has_mask(soon()):
        pass
    return grammar.mask.copy()


def allowed_tokens(grammar: Grammar) -> list[int]:
    bits = mask_of(grammar).view(np.uint8)
    return np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()


def walk(grammar: Grammar, count: int) -> list[int]:
    """Draw this number of tokens that the grammar allows, or fewer if no more are allowed."""
    choose = random.Random(0)
    tokens = []
    while len(tokens) < count and (allowed := allowed_tokens(grammar)):
        tokens.append(choose.choice(allowed))
        assert grammar.accept(tokens[-1])
    return tokens


def step(engine: Engine, answers: dict):
    """
    Run a step and add its outputs to the answers: id -> (tokens, finish_reason, error, scores).
    """
    for output in engine.step():
        assert output.tokens or output.error, "an output of no token"
        tokens, *_, scores = answers.get(output.id, ([], []))
        scores = scores + [output.logprobs] * len(output.tokens)
        answers[output.id] = tokens + output.tokens, output.finish_reason, output.error, scores


def finish(engine: Engine, answers: dict) -> dict:
    for _ in range(3000):
        if not engine.has_work:
            return answers
        step(engine, answers)
    raise AssertionError(f"{[*engine.requests]} never end")


def assert_follows(model: GPT, grammar: Grammar, prompt, params, answer, choice: int):
    """
    Check that each token of an answer is one that a sampler which always masks could give, and has
    the same score as without a mask.
    """
    tokens, _, _, scores = answer
    grammar = grammar.copy()
    text = torch.tensor([prompt + tokens], device=DEVICE)
    logits = model(text)[0][0, len(prompt) - 1 :].detach().double().cpu()
    for i, token in enumerate(tokens):
        wanted = possible_tokens(
            masked(logits[i : i + 1], torch.from_numpy(mask_of(grammar)[None]))[0],
            params,
            len(prompt) + i,
            choice=choice,
            prompt=prompt,
            generated=tokens[:i],
            stops={*model.config.eos_token_ids, *params.stop_token_ids},
        )
        assert token in wanted, f"token {i} is {token}, wanted {wanted}"
        assert grammar.accept(token)
    if params.logprobs:
        free = logits[:-1].log_softmax(-1)
        for row, token, (score, _, best) in zip(free, tokens, scores, strict=True):
            expected = [row[token], *row.topk(2).values]
            assert [score, *best] == pytest.approx([*map(float, expected)], abs=1e-3)


def play(model: GPT, grammars: Grammars, seed: int, attention="auto", **settings) -> Engine:
    """
    Serve random requests, with and without grammars, some of them aborted, in a pool that is too
    small, and check the answers. "graphs" means torch's operators with captured steps.
    """
    choose = random.Random(seed)
    V = model.config.vocab_size
    sizes = {"num_blocks": 20, "max_num_seqs": 6, "token_budget": 32}
    settings |= {"attention": "torch" if attention == "graphs" else attention}
    engine = new_engine(model, **sizes, **settings)
    if attention == "graphs":
        capture(engine)
    asked = {}
    answers = {}
    start = [choose.randrange(V) for _ in range(9)]
    for i in range(24):
        kind = choose.choice([None, *GRAMMARS])
        grammar = grammars.compile(*kind) if kind else None
        fields = {"seed": i, "max_tokens": choose.choice([5, 20, 40]), "grammar": grammar}
        fields |= {
            "logprobs": choose.choice([None, 2]),
            "stop_token_ids": choose.choice([(), (66,)]),
        }
        params = replace(random_params(choose, V, start), **fields)
        prompt = start + [choose.randrange(V) for _ in range(choose.randrange(1, 14))]
        n = choose.choice([1, 1, 1, 3])
        engine.add_request(f"r{i}", prompt, params, n=n)
        for choice in range(n):
            asked[f"r{i}.{choice}" if choice else f"r{i}"] = grammar, prompt, params
        if choose.random() < 0.3:
            engine.abort(f"r{choose.randrange(i + 1)}")
        if choose.random() < 0.5:
            step(engine, answers)
    finish(engine, answers)
    for id, answer in answers.items():
        if asked[id][0] and answer[1]:
            choice = int(id.partition(".")[2] or 0)
            assert_follows(model, *asked[id], answer, choice)
    assert_idle(engine)
    return engine


@pytest.mark.parametrize("attention", ["auto", "torch", *["graphs"] * (DEVICE == "cpu")])
@each_overlap
def test_tokens_are_those_of_masked_sampling(model, grammars, overlap, attention):
    """
    The requests meet preemptions, prefix hits, forks, aborts, filters, penalties, stops, scores and
    requests without a grammar. Would catch: a refused token that is kept, counted, scored or
    committed; a mask of another position or row; a mask that is not removed; filters applied before
    masks; a running step that still counts; a token sent before its mask has come.
    """
    for seed in range(2):
        engine = play(model, grammars, seed, attention, overlap=overlap)
        assert engine.stages["grammar"].num_refused > 20
        assert engine.scheduler.num_preemptions
        assert engine.scheduler.num_hit_tokens


@pytest.mark.parametrize("window", [0, 12])
@each_overlap
def test_requests_sit_out_until_their_masks_are_there(model, grammars, overlap, late_replies):
    """
    Would catch: a step that waits for a mask; a late verdict taken for the next one; a request that
    waits for ever, goes back too far, or reads a block that its window has left.
    """
    for seed in range(2):
        play(model, grammars, seed, overlap=overlap)


@each_overlap
def test_a_mask_is_waited_for_only_where_there_is_nothing_else_to_do(
    model, grammars, overlap, monkeypatch
):
    """
    Would catch: all requests waiting for one whose grammar is slow; an engine that keeps polling
    for a mask because another request needs the blocks of the one that waits for it.
    """
    waits = []

    def has_mask(grammar: Grammar, deadline: float = 0):
        if deadline:
            waits.append(grammar)

    monkeypatch.setattr(Grammar, "has_mask", has_mask)
    engine = new_engine(model, overlap=overlap, num_blocks=12, block_size=4)
    grammar = grammars.compile("regex", "(yes|no)+")
    engine.add_request("held", [5, 6, 7], greedy(9, grammar=grammar))
    engine.add_request("free", [5, 6, 7], greedy(9))
    answers = {}
    while "free" in engine.requests:
        assert not waits
        step(engine, answers)
    assert engine.scheduler.paused
    step(engine, answers)
    assert len(waits) == 1
    free = engine.scheduler.block_allocator.num_free
    engine.add_request("waits", [5] * (4 * free + 1), greedy(1))
    step(engine, answers)
    assert engine.scheduler.waiting and len(waits) == 2


def guess_now_and_then_wrongly(monkeypatch, answers: dict, choose: random.Random):
    """Guess what comes in the answers, lists of tokens by id; now and then guess wrongly."""

    def guess(text: GrowingText, most: int) -> list[int]:
        r = text.request
        num_known = r.num_generated - r.num_to_come
        draft = answers[r.id][num_known:][: choose.randint(0, max(0, most))]
        if draft and choose.random() < 0.4:
            draft[choose.randrange(len(draft))] = choose.randrange(VOCABULARY)
        return draft if text.can_guess else []

    monkeypatch.setattr(GrowingText, "guess", guess)


# --------------------------------------------------------------------------------------------------
# Messages to the engine's loop


def ask(id: str, owner: str = "") -> dict:
    """Return the message of a request whose grammar allows only its own id."""
    message = {"op": "add", "id": id, "prompt": [1], "params": {}, "owner": owner}
    return message | {"grammar": {"kind": "regex", "text": id}}


class SlowLibrary:
    """
    A stand-in for `Grammars`: a grammar is compiled once the test has put its text into `done`.
    """

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
    Would catch: a loop that waits for a grammar; a request added after its abort, or dropped
    together with another one; clients that hang up and leave others waiting behind grammars that
    are no longer wanted. Previously their prompts stayed in memory until their turn.
    """
    library = SlowLibrary()
    queue = CompileQueue(lambda: library)
    free = {"op": "add", "id": "c"}
    assert list(queue.pass_on([ask("a"), ask("b"), free, ask("d")])) == [free]
    aborts = [{"op": "abort", "id": id} for id in "bc"]
    assert list(queue.pass_on(aborts)) == aborts
    assert [message["prompt"] for message in queue.waiting[""]] == [[1], None, [1]]
    library.done.add("a")
    [message] = queue.pass_on([])
    assert (message["id"], message["grammar"].result()) == ("a", "a")
    assert library.begun == ["a", "d"]
    list(queue.pass_on([{"op": "abort", "id": "d"}]))
    assert not queue.waiting
    assert not list(queue.pass_on([ask("e")]))
    assert library.begun == ["a", "d", "e"]


def test_owners_take_turns():
    """Would catch: sixteen slow grammars of one key that are all compiled before another key's."""
    library = SlowLibrary()
    queue = CompileQueue(lambda: library)
    texts = ["x0", "x1", "x2", "y0", "y1", "z0"]
    asked = [ask(text, owner=text[0]) for text in texts]
    assert not [*queue.pass_on(asked[:3]), *queue.pass_on(asked[3:])]
    library.done.update(texts)
    passed = [message["id"] for message in queue.pass_on([])]
    assert passed == ["x0", "y0", "z0", "x1", "y1", "x2"]


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (ValueError("no regex"), "invalid", "no regex"),
        (ImportError("llguidance is not installed"), "invalid", "llguidance is not installed"),
        (OSError("no files"), "internal", "the grammar could not be compiled: no files"),
    ],
)
def test_only_the_librarys_refusal_is_the_clients_to_change(error, kind, message):
    """
    Would catch: the library's refusal reported as an internal error; a 400 when the server lacks
    files, processes or memory.
    """
    refusals = []
    queue = CompileQueue(Mock(side_effect=error))
    for passed in queue.pass_on([ask("a")]):
        handle_message(simulated_engine(), SimpleNamespace(queue=refusals.append), passed)
    assert (refusals[0].pop("kind"), refusals[0].pop("message")) == (kind, message)
    assert len(refusals) == 1


# --------------------------------------------------------------------------------------------------
# What is served beside an answer


@each_overlap
def test_what_cannot_go_on_fails_alone(model, grammars, tmp_path, overlap):
    """
    A request without a grammar runs beside them, and gets what it gets when served alone. Would
    catch: a dead end that ends a step or its neighbours; a token that the grammar forbids; an
    answer that never ends.
    """
    save("smollm2", tmp_path)  # has no token for a tab
    with_lacking = Grammars(tmp_path, model.config)
    params = SamplingParams(seed=1, max_tokens=30)
    engine = new_engine(model, overlap=overlap)
    [free] = engine.generate([[7, 8]], params, progress=False)

    def add(id: str, text: str, grammars: Grammars = grammars, **fields):
        grammar = grammars.compile("regex", text)
        engine.add_request(id, [7], replace(params, grammar=grammar, **fields))

    with pytest.raises(Refused, match="the vocabulary has no token"):
        add("at once", "a\tb", with_lacking)
    with pytest.raises(ValueError, match="end-of-text"):
        add("forever", "a", ignore_eos=True)
    engine.add_request("free", [7, 8], params)
    add("byte", "a{20}\tb", with_lacking)
    add("short", "a|b", min_tokens=9)
    answers = finish(engine, {})
    assert answers["free"][0] == free
    for id, words in {"byte": "no token is left", "short": "min_tokens"}.items():
        _, reason, error, _ = answers[id]
        assert reason == "error" and words in error
        queued = []  # not a 500, which clients retry
        queue_output(SimpleNamespace(queue=queued.append), Output(id, [], reason, error=error))
        assert queued[0]["kind"] == "invalid"
    assert_idle(engine)


# --------------------------------------------------------------------------------------------------
# On the simulated engine, where right answers are known beforehand


def allowed_after(tokens: list[int]) -> int:
    """Return a bit for each token that may follow: a third of all tokens, or a single one."""
    crc = crc32(bytes(tokens))
    bits = sum(1 << t for t in range(VOCABULARY) if crc32(bytes([t]), crc) % 3 == 0)
    return bits or 1 << crc % VOCABULARY


class FakeGrammar(Grammar):
    """A grammar whose process is simulated; its replies take time."""

    def __init__(self, choose: random.Random):
        super().__init__(Mock(mask=None, ids=count(), wait_for=self.reply_to))
        self.choose = choose
        self.tokens = []  # that have come
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
        if kind == COUNT and self.choose.random() < 0.3:
            n = len(asked)  # the library does not count the tokens of a rule
        is_number = kind == COUNT or n
        self.reply = n if is_number else np.array([bits], np.int32).tobytes()

    def reply_to(self, question: None, deadline: float) -> int | bytes | None:
        return None if self.choose.random() < 0.3 else self.reply


def masked_answer(prompt: list[int], max_tokens: int, key: int, window: int, is_free: bool):
    """Return the right tokens of an answer that ends with a 0."""
    tokens = []
    while len(tokens) < max_tokens and 0 not in tokens:
        token = crc32(seen(bytes(prompt + tokens), window), key) % VOCABULARY
        while not is_free and not allowed_after(tokens) >> token & 1:
            token = (token + 1) % VOCABULARY
        tokens.append(token)
    return tokens


class Reader(RecordedWorld):
    """Read the record of an engine as it runs; see RecordedWorld."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.step = engine.step
        self.lines = []
        self.begin_record()

    def read_step(self) -> list[Output]:
        """
        Run a step and check what was read. If the last token was withdrawn, no line says so, and
        only a snapshot shows it: with overlap no other token is sampled, and without drafts no
        token is left.
        """
        constraints = self.engine.stages["grammar"]
        settings = self.engine.settings
        num_refused = constraints.num_refused
        self.lines.clear()
        outputs = self.step()
        self.check_pool_state()
        is_refused = constraints.num_refused > num_refused
        if is_refused and settings.overlap and not settings.speculate:
            assert any('"snapshot"' in line for line in self.lines), "it has no snapshot"
        return outputs


@pytest.mark.parametrize("seed", range(50))
def test_simulated_lives(seed, monkeypatch):
    """
    The lives have preemptions, forks, aborts, windows, padding, late masks, overlap, filters,
    drafts, and a reader of the record. Would catch: a slot, block or row that keeps a refused token
    or a forbidden guess; a running step that counts for a request which has gone back; a request
    that waits for ever; another request's mask.
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
    guess_now_and_then_wrongly(monkeypatch, wanted, choose)
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
    for id, (tokens, reason, error, _) in answers.items():
        assert error is None
        assert tokens == wanted[id][: len(tokens)], f"{id} is wrong"
        assert reason is None or tokens == wanted[id]
    assert_idle(engine)
