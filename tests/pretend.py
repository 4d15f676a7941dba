"""
An engine without a model, for tests of its bookkeeping: the real scheduler, allocator and engine,
some thousand steps a second. `PretendRunner` stands where the Runner does. Each slot of its KV pool
holds one number that stands for the text up to that token and for its salt; a step writes these
through the block tables, and what comes next is a function of all that it reads back through them.
So a wrong block, row, copy or hit gives a wrong answer, and the right one is known from the request
alone: `answer_to`.

The simulators' runner (simulated_runner.py) shares the real one's work on the host and needs a
GPU's padding, rows and inputs to be right; this one takes a plan and nothing else, so that a test
of the engine's rules fails for these alone. Its slots say which salt wrote them, and its
log-probabilities add up, as beam search needs them.
"""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch

from paged import Plan, Request
from serving import engine as engine_module
from serving.engine import Engine
from serving.params import GREEDY, NO_TOKEN, SamplingParams
from serving.runner import StepResult, num_scored
from serving.settings import Settings

VOCABULARY = 12


def root_text(salt: str) -> int:
    return hash(tuple(salt.encode()))


def texts_of(tokens: list[int], salt: str = "") -> list[int]:
    """What the slots of these tokens hold."""
    texts = []
    text = root_text(salt)
    for token in tokens:
        text = hash((text, token))
        texts.append(text)
    return texts


def logprobs_after(context: list[int]) -> list[float]:
    """Log-probabilities of all tokens that may follow what these slots hold."""
    rng = random.Random(hash(tuple(context)))
    logits = [rng.gauss(0.0, 2.0) for _ in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    return [x - total for x in logits]


def next_token(context: list[int], params: SamplingParams, choice: int) -> int:
    """NO_TOKEN, where logits are not numbers, in one context of 200."""
    noise = (
        (params.seed, choice) if params.temperature else ()
    )  # hash(None) is not the same in every process
    token = hash((tuple(context), noise)) % (200 * VOCABULARY)
    return NO_TOKEN if token < VOCABULARY else token % VOCABULARY


def score(context: list[int], token: int, n: int) -> list:
    """[log-probability of the token, the n likeliest ids, their log-probabilities]"""
    logprobs = logprobs_after(context)
    best = sorted(range(VOCABULARY), key=lambda token: -logprobs[token])[:n]
    return [logprobs[token], best, [logprobs[i] for i in best]]


def answer_to(
    prompt: list[int], params: SamplingParams, choice: int = 0, salt: str = "", eos: tuple = ()
):
    """Tokens, how they end, and the score of each, as the engine must give them out."""
    tokens = []
    scores = []
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    while len(tokens) < params.max_tokens:
        context = texts_of(prompt + tokens, salt)
        token = next_token(context, params, choice)
        if token == NO_TOKEN:
            return tokens, "error", scores
        tokens.append(token)
        scores.append(None if params.logprobs is None else score(context, token, params.logprobs))
        if token in ends:
            return tokens, "stop", scores
    return tokens, "length", scores


class PretendRunner:
    """Stands where `Engine` has its Runner."""

    def __init__(self, model, settings):
        block_size = self.block_size = settings.block_size
        num_blocks = settings.num_blocks
        max_num_seqs = settings.max_num_seqs
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.tables = [[-1] * num_blocks for _ in range(max_num_seqs)]
        self.last_token = [0] * max_num_seqs
        self.context_len = [0] * max_num_seqs

    def fill_rows(self, *requests: Request):
        for r in requests:
            self.tables[r.row][: len(r.block_table)] = r.block_table
            self.last_token[r.row] = (r.generated_tokens or r.prompt_tokens)[-1]
            self.context_len[r.row] = r.num_filled_slots

    def context(self, row: int, end: int) -> list[int]:
        S, table = self.block_size, self.tables[row]
        return [self.kv[table[position // S]][position % S] for position in range(end)]

    def write(self, row: int, position: int, token: int, salt: str):
        S, table = self.block_size, self.tables[row]
        before = (
            self.kv[table[(position - 1) // S]][(position - 1) % S] if position else root_text(salt)
        )
        self.kv[table[position // S]][position % S] = hash((before, token))

    def compute(self, plan: Plan) -> list[list[int]]:
        """Write what the plan computes. Returns the context of each of plan.sampled."""
        copied = {to: list(self.kv[source]) for to, source in plan.copies.items()}
        for to, slots in copied.items():
            self.kv[to] = slots
        self.fill_rows(*plan.admitted)
        for r in plan.decodes:
            self.tables[r.row][len(r.block_table) - 1] = r.block_table[-1]
        for r in plan.decodes:
            self.write(r.row, self.context_len[r.row], self.last_token[r.row], r.cache_salt)
            self.context_len[r.row] += 1
        for r, n in plan.chunks:
            end = r.prefill_cursor + n
            for position, token in enumerate(
                r.tokens_between(r.prefill_cursor, end), start=r.prefill_cursor
            ):
                self.write(r.row, position, token, r.cache_salt)
            self.context_len[r.row] = end
        return [self.context(r.row, self.context_len[r.row]) for r in plan.sampled]

    def launch(self, plan: Plan):
        contexts = self.compute(plan)
        tokens = [
            next_token(c, r.params, r.choice) for r, c in zip(plan.sampled, contexts, strict=True)
        ]
        for r, token in zip(plan.sampled, tokens, strict=True):
            self.last_token[r.row] = token
        asked = [i for i, r in enumerate(plan.sampled) if r.params.logprobs is not None]
        scores = {
            plan.sampled[i]: score(contexts[i], tokens[i], plan.sampled[i].params.logprobs)
            for i in asked
        }
        prompt_scores = {
            r: self.score_prompt(r, num_scored(r, n)) for r, n in plan.chunks if num_scored(r, n)
        }
        flight = SimpleNamespace(
            plan=plan, tokens=tokens, scores=scores, prompt_scores=prompt_scores
        )
        # for beam search: where the requests of plan.sampled are, and their logits
        flight.wanted = list(range(len(tokens)))
        flight.logits = torch.tensor([logprobs_after(c) for c in contexts])
        return flight

    def score_prompt(self, r: Request, count: int) -> tuple[int, list]:
        start = r.prefill_cursor
        ends = range(start + 1, start + count + 1)
        return start, [
            score(self.context(r.row, end), r.prompt_tokens[end], r.prompt_logprobs) for end in ends
        ]

    def wait_for(self, flight) -> StepResult:
        pairs = zip(flight.plan.sampled, flight.tokens, strict=True)
        broken = [r for r, token in pairs if token == NO_TOKEN]
        return StepResult(flight.tokens, broken, flight.scores, flight.prompt_scores)

    def execute(self, plan: Plan) -> list[int]:
        return self.wait_for(self.launch(plan)).tokens


def pretend_model(eos: tuple = (), context_length: int = 64) -> SimpleNamespace:
    config = SimpleNamespace(
        vocab_size=VOCABULARY, context_length=context_length, eos_token_ids=eos
    )
    config.n_layer = config.n_kv_head = config.head_size = 1
    config.windows = (0,)
    return SimpleNamespace(
        config=config, wte=SimpleNamespace(weight=torch.zeros(1)), parameters=list
    )


def pretend_engine(eos: tuple = (), context_length: int = 64, **settings) -> Engine:
    defaults = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "token_budget": 16,
        "check": True,
    }
    with mock.patch.object(engine_module, "Runner", PretendRunner):
        return Engine(pretend_model(eos, context_length), Settings(**(defaults | settings)))


def finish(engine: Engine) -> list:
    """All outputs until it is idle."""
    outputs = []
    turns = 0
    while engine.has_work:
        outputs += engine.step()
        turns += 1
        assert turns < 1000, f"{[*engine.requests]} never end"
    return outputs


def greedy(max_tokens: int, **others) -> SamplingParams:
    return replace(GREEDY, max_tokens=max_tokens, **others)
