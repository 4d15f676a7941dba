"""
A `Device` without a model, the only one of its kind. A step takes microseconds, and the right
answer is known beforehand.

The pool holds token ids instead of K and V. A step writes each of its tokens at its slot. The next
token of a text is a hash of that text *as it is read back through the block table*, or of its
window if every layer has one. So a wrong table, slot, copy, commit, hit or stale row changes an
answer, just as it would change a real model's. The host's work is the real runner's: the layout of
a step's inputs, padding, and which tokens are sampled.

    engine = simulated_engine(num_blocks=8)          # for tests of single rules
    answer(prompt, max_tokens, stops, key, V)        # and the right answer

The simulator (simulator.py) plays random lives with it. scripted_engine.py runs a step in another
way, without slots, because it tests what the server does with tokens.
"""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from unittest import mock
from zlib import crc32

import torch

from engine import engine as engine_module
from engine.device import CHEAP_ROWS, Launched, PackedPlan
from engine.engine import Engine
from model import GPTConfig
from ops.inputs import StepInputs, StepShape, flat_inputs, sizes
from ops.prefix import GroupFinder, Groups, num_groups
from ops.sampling import sampling_row
from paged import Plan, Request
from params import GREEDY, NO_TOKEN, SamplingParams, Settings

# --------------------------------------------------------------------------------------------------
# The model's answers: pure functions of the text (tokens as bytes) and of the noise's seed and
# choice; with a window, of the end of the text


def noise_key(seed: int, choice: int) -> int:
    return crc32(f"{seed} {choice}".encode())


def score(text: bytes, token: int, n: int, V: int) -> list:
    """
    Return [log-probability of the token after this text, n likeliest ids, their log-probabilities].
    The values belong to no distribution, but they are negative and in order.
    """
    crc = crc32(text)
    scale = 0.1 + crc / 2**32
    likeliest = [(crc + i) % V for i in range(n)]
    return [-float(crc32(text, token)), likeliest, [-scale * (i + 1) for i in range(n)]]


def scores_of(prompt: list[int], n: int, V: int, window: int = 0) -> list[list]:
    """Return a score of each token except the first."""
    text = bytes(prompt)
    return [score(seen(text[:i], window), prompt[i], n, V) for i in range(1, len(prompt))]


def seen(text: bytes, window: int) -> bytes:
    """
    Return the part of a text that its last token sees: the whole text if there is no window (0).
    """
    return text[-window:]


def answer(
    prompt: list[int], max_tokens: int, stops: set[int], key: int, V: int, window: int = 0
) -> tuple[list[int], str]:
    """Return the right answer: its tokens, and how it ends."""
    text = bytearray(prompt)
    for length in range(1, max_tokens + 1):
        text.append(crc32(seen(text, window), key) % V)
        if text[-1] in stops:
            return [*text[-length:]], "stop"
    return [*text[-max_tokens:]], "length"


# --------------------------------------------------------------------------------------------------
# The device


class HostTokens(list):
    """A list, where the engine expects a tensor on the host."""

    def to(self, device, non_blocking=False):
        return self

    def tolist(self) -> list:
        return self


class SimulatedDevice:
    """Takes the real device's arguments, and `padded`: whether steps are padded, as on a GPU."""

    def __init__(self, model, settings, padded=False):
        N = settings.max_num_seqs
        self.V = model.config.vocab_size
        self.block_size = settings.block_size
        self.window = model.config.windows[0]
        padding_block = settings.num_blocks
        self.pool = SimpleNamespace(padding_block=padding_block)
        # the content of a slot that its owner has not written; no vocabulary reaches this value
        self.poison = b"\xff" * self.block_size
        self.blocks = [bytearray(self.poison) for _ in range(padding_block + 1)]
        # half of the lives with drafts have steps laid out as for ops/cpu.c
        self.program = settings.speculate and not padded
        self.run = self.run_program if self.program else self.run_batch
        self.cheap_rows = CHEAP_ROWS
        self.padding_row = N  # everything that follows is indexed by row
        self.context_len = [0] * (N + 1)
        self.last_token = [0] * (N + 1)
        self.key = [0] * (N + 1)
        most_blocks = -(-model.config.context_length // settings.block_size)
        self.block_tables = [[padding_block] * most_blocks for _ in range(N + 1)]
        decodes = sorted({1, 2, 4, N, max(N, CHEAP_ROWS)}) if padded else []
        self.finder = None if self.program or self.window else FindAll(G=16, S=self.block_size)
        self.shapes_with_groups = []
        self.shapes = [StepShape(n, 0, 0) for n in decodes]
        self.shapes += [
            StepShape(n, 2, T) for T in (4, settings.token_budget) for n in decodes[-2:]
        ]
        self.broken_logits: set[Request] = set()  # the next tokens of these are NO_TOKEN

    def poison_new_blocks(self, plan: Plan):
        for request, _ in plan.work:
            for block in request.block_table[-(-request.num_filled_slots // self.block_size) :]:
                self.blocks[block][:] = self.poison

    def copy_blocks(self, copies: dict[int, int]):
        """Copy blocks, reading all of them before any is written."""
        contents = [bytes(self.blocks[source]) for source in copies.values()]
        for block, content in zip(copies, contents, strict=True):
            self.blocks[block][:] = content

    def fill_rows(self, *requests: Request):
        for r in requests:
            row, _, seed, choice, *_ = sampling_row(r)
            self.last_token[row] = (r.generated_tokens or r.prompt_tokens)[-1]
            self.context_len[row] = r.num_filled_slots
            self.fill_tables([r])
            is_greedy = r.params.temperature == 0
            self.key[row] = noise_key(0, 0) if is_greedy else noise_key(seed, choice)

    def fill_tables(self, requests):
        for r in requests:
            self.block_tables[r.row][: len(r.block_table)] = r.block_table

    # Everything is written before anything is read. The texts before the sampled tokens stand in
    # for logits, and the position of each token of the step for hidden states.

    def run_batch(self, packed: PackedPlan) -> Launched:
        self.poison_new_blocks(packed.plan)
        numbers = iter(packed.inputs)
        step = StepInputs(*[[*islice(numbers, size)] for size in sizes(packed.shape)])
        ends = self.write_decodes(step)
        hidden = [*ends, *zip(step.token_rows, [i + 1 for i in step.positions], strict=True)]
        self.write_chunks(step)
        ends = ends + [(row, self.context_len[row]) for row in step.sampling_rows]
        return self.sample(packed, ends, hidden, self.read_prefixes(step))

    def run_program(self, packed: PackedPlan) -> Launched:
        """
        Launch as ops/cpu.c does, with `hidden`, the row of each token, and `ends`, the row and end
        of each text to be continued.
        """
        self.poison_new_blocks(packed.plan)
        S = self.block_size
        inputs, last = flat_inputs(packed.plan, S, self.last_token)
        for token, _, slot, _ in inputs:
            self.blocks[slot // S][slot % S] = token
        hidden = [(row, position + 1) for _, position, _, row in inputs]
        return self.sample(packed, [hidden[i] for i in last], hidden, {})

    def send(self, launched: Launched):
        launched.on_host = launched.tokens

    def sync_ring(self):
        pass

    def sample(self, packed: PackedPlan, ends: list, hidden: list, prefixes: dict[int, bytes]):
        """Sample after each text."""
        texts = []
        tokens = HostTokens()
        for row, end in ends:
            text = self.read(row, end)
            prefix = prefixes.get(row, b"")
            text = prefix + text[len(prefix) :]
            token = crc32(text, self.key[row]) % self.V
            self.last_token[row] = token
            texts.append(text)
            tokens.append(token)
        launched = Launched(packed, tokens, texts, hidden)
        for request, index in launched.token_indices().items():
            if request in self.broken_logits:
                tokens[index] = NO_TOKEN
                self.last_token[request.row] = 0
                self.broken_logits.discard(request)
                self.breaks(request)
        return launched

    def breaks(self, request: Request):
        """
        Called when the logits of a request are broken. The simulator overrides it to know which
        request must fail.
        """

    def sample_masked(self, launched: Launched, requests: dict[Request, int], masks: list):
        """Choose the next allowed token, counting from the refused one and wrapping around."""
        index_of = launched.token_indices()
        for (r, n), mask in zip(requests.items(), masks, strict=True):
            [bits] = mask.tolist()
            index = index_of[r] + n
            token = crc32(launched.logits[index], self.key[r.row]) % self.V
            while not bits >> token & 1:
                token = (token + 1) % self.V
            launched.tokens[index] = self.last_token[r.row] = token

    def write_decodes(self, step: StepInputs) -> list[tuple[int, int]]:
        """
        Write the given or last token of each row in the slot after its text. Returns each row, and
        where its text then ends. On a GPU no request sees a block of another one's new token in the
        same step, unless the device knew the block before.
        """
        lens = self.context_len
        S = self.block_size
        ends = []
        told = {row: self.block_tables[row].copy() for row in step.rows}
        for row, last_block, token, position in zip(
            step.rows, step.last_blocks, step.given_tokens, step.given_positions, strict=True
        ):
            if token == NO_TOKEN:
                token = self.last_token[row]
                position = lens[row]
            table = self.block_tables[row]
            assert table[: position // S] == told[row][: position // S], "it sees another table"
            table[position // S] = last_block
            self.blocks[last_block][position % S] = token
            lens[row] = position + 1
            lens[self.padding_row] = 0
            ends.append((row, position + 1))
        return ends

    def write_chunks(self, step: StepInputs):
        S = self.block_size
        for row, position, token in zip(step.token_rows, step.positions, step.tokens, strict=True):
            self.blocks[self.block_tables[row][position // S]][position % S] = token
        for row, end in zip(step.chunk_rows, step.chunk_contexts, strict=True):
            self.context_len[row] = end

    def read(self, row: int, end: int) -> bytes:
        """Return the text that token `end` - 1 of a row sees, read through its block table."""
        S = self.block_size
        start = max(0, end - self.window) if self.window else 0
        skipped = start // S
        table = self.block_tables[row][skipped : -(-end // S)]
        text = b"".join([self.blocks[block] for block in table])
        return text[start - skipped * S : end - skipped * S]

    def read_prefixes(self, step: StepInputs) -> dict[int, bytes]:
        """
        Return the shared prefix of each row in a group, read through the first row's block table.
        """
        prefixes = {}
        for first, end in zip(step.first, step.end, strict=True):
            for i in range(first, end):
                prefixes[step.rows[i]] = self.read(step.rows[first], step.shared[first])
        return prefixes

    def sampled_logprobs(self, launched: Launched, indices: list[int], most: int):
        return self.in_columns([(launched.logits[i], launched.tokens[i]) for i in indices], most)

    def prompt_logprobs(self, launched: Launched, rows: slice, targets: list[int], most: int):
        texts = [self.read(row, end) for row, end in launched.hidden[rows]]
        return self.in_columns([*zip(texts, targets, strict=True)], most)

    def in_columns(self, scored: list[tuple], n: int) -> list[HostTokens]:
        rows = [score(text, max(token, 0), n, self.V) for text, token in scored]
        return [HostTokens(column) for column in zip(*rows, strict=True)]


class FindAll(GroupFinder):
    """Finds groups of up to four decodes, which share all they can."""

    def worth_it(self, found):
        n = len(self.tables)
        groups = Groups([0] * n, [], [])
        for first, end, blocks in found[: num_groups(n, self.G)]:
            groups.shared[first:end] = [blocks * self.S] * (end - first)
            groups.first.append(first)
            groups.end.append(end)
        return groups if groups.first else None


# --------------------------------------------------------------------------------------------------
# The real engine on it


class NoModel:
    """The parts of a model that `Engine` itself reads."""

    def __init__(self, V: int, context_length: int, ends: tuple[int, ...] = (), window: int = 0):
        sizes = {"n_layer": 1, "n_head": 1, "n_embd": 1, "windows": (window,)}
        self.config = GPTConfig(V, context_length, eos_token_ids=ends, **sizes)
        self.wte = torch.nn.Embedding(1, 1)

    def parameters(self):
        return [self.wte.weight]


# --------------------------------------------------------------------------------------------------
# For tests of single rules

VOCABULARY = 12


def simulated_engine(
    eos: tuple = (), context_length: int = 64, build=SimulatedDevice, window=0, **settings
) -> Engine:
    sizes = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "token_budget": 16}
    model = NoModel(VOCABULARY, context_length, eos, window)
    with mock.patch.object(engine_module, "Device", build):
        return Engine(model, Settings(**(sizes | {"check": True} | settings)))


def finish(engine: Engine) -> list:
    """Return all outputs until it is idle."""
    outputs = []
    turns = 0
    while engine.has_work:
        outputs += engine.step()
        turns += 1
        assert turns < 1000, f"{[*engine.requests]} never end"
    return outputs


def tokens_of(outputs: list, id: str) -> list[int]:
    return [token for output in outputs if output.id == id for token in output.tokens]


def greedy(max_tokens: int, **others) -> SamplingParams:
    return replace(GREEDY, max_tokens=max_tokens, **others)


def greedy_answer(prompt: list[int], max_tokens: int) -> list[int]:
    """Return the answer of `simulated_engine` to `greedy(max_tokens)`."""
    tokens, _ = answer(prompt, max_tokens, set(), noise_key(0, 0), VOCABULARY)
    return tokens
