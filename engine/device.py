"""
What an engine has on its device, and what is computed there.

    device = Device(model, settings)
    device.fill_rows(request)           # which starts to run
    launched = device.run(packed)       # a step: forward and sampling, in one of three ways
    device.send(launched)               # its tokens, to the host

The host's part of a step is in runner.py. Nothing in a step waits for the device here.
Letters: B requests, T tokens, M blocks per table, S block size, V vocabulary; N rows, one for each
request that may run at once, and row N for padding; of a step, n decodes and C chunks.
"""

import gc
import itertools
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from model import GPT
from ops.choice import choose_ops
from ops.inputs import KnownRows, StepShape, lay_out, pack, sizes, upload
from ops.sampling import SamplingRows, sampling_row
from paged import KVBlockPool, Plan, Request
from params import GREEDY, Settings


def kv_dtype(model: GPT) -> torch.dtype:
    """
    The dtype of the KV pool: the weights', but fp32 on a CPU, where attention of one query in bf16
    is slow.
    """
    weight = model.wte.weight
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


class PackedPlan(NamedTuple):
    """A plan as the device takes it."""

    plan: Plan
    shape: StepShape  # of the step, with its padding
    places: list[int]  # of plan.completed among the tokens [n + C] that the step samples
    inputs: array  # see ops.inputs.pack; empty for a program, which reads the plan


@dataclass
class Launched:
    """A step on the device: where its results are."""

    packed: PackedPlan
    tokens: Tensor  # [n + C] on the device until the next step
    logits: Tensor  # [n + C, V] there
    hidden: Tensor  # [n + T, width] there, of the last layer
    on_host: Tensor | None = None  # [n + C], or longer
    done: torch.cuda.Event | None = None

    def place_of(self) -> dict[Request, int]:
        """Return the place in `tokens` of the first token of each request."""
        plan = self.packed.plan
        places = {}
        place = 0
        for request in plan.decodes:
            places[request] = place
            place += plan.num_sampled(request)
        return places | dict(zip(plan.completed, self.packed.places, strict=True))


FIRST_SHAPE_WITH_CHUNKS = 128  # tokens; the next ones are twice as large
# Rows of a step that cost little more than one: the smallest tiles of ops/linear.py, and what
# ops/cpu.c multiplies at once. The most tokens that may be guessed, all requests together.
CHEAP_ROWS_ON_GPU = 16
CHEAP_ROWS = 8
COARSE = (8, 32, 64, 128, 256)  # decodes beside chunks: a step of many tokens bears more padding
TOKENS_OF_A_CHUNK = 64  # a shape of T chunk tokens has room for T / this chunks, at least 8


def padded_shapes(N: int, token_budget: int) -> list[StepShape]:
    """
    The shapes that steps of at most N decodes are padded to, graphs or not: without chunks, then
    with chunks of up to `token_budget` tokens together; by tokens of chunks, then by decodes.
    """
    decodes = [n for n in (1, 2, 4, *range(8, N, 8)) if n < N]
    decodes.append(N)
    tokens = []
    T = FIRST_SHAPE_WITH_CHUNKS
    while token_budget > T:
        tokens.append(T)
        T *= 2
    tokens.append(token_budget)
    shapes = [StepShape(n, 0, 0) for n in decodes]
    for T in tokens:
        for n in decodes:
            if n in COARSE or n == N:  # with N, no step has too many decodes
                shapes.append(StepShape(n, max(8, T // TOKENS_OF_A_CHUNK), T))
    return shapes


class Device:
    """
    The model, the KV pool, and what must be known there of each running request, in arrays indexed
    by its row: a plan carries only what changed. The last row belongs to padding, and its block
    table is all padding.

    Where the operators allow it (`Ops.fixed_shapes`), steps are padded to a few `shapes`, each
    captured once as a CUDA graph: forward, sampling and the update of these arrays are one launch.
    """

    def __init__(self, model: GPT, settings: Settings):
        """
        Allocate the pool and the arrays of rows. `settings` has sizes that are numbers, not None
        (sizing.py). Raises ValueError for operators that do not work here.
        """
        config = model.config
        device = model.wte.weight.device
        self.device = device
        dtype = torch.int8 if settings.quantize == "int8" else model.wte.weight.dtype
        self.ops, self.reason = choose_ops(
            settings.attention, device, dtype, settings.deterministic
        )
        self.model = self.ops.pack_weights(model, settings.quantize)
        blocks = (settings.num_blocks, settings.block_size)
        layers = (config.n_layer, config.n_kv_head, config.head_size)
        self.pool = KVBlockPool(*blocks, *layers, device, kv_dtype(model))
        self.windows = set(config.windows)
        N = settings.max_num_seqs
        M = -(-(settings.max_model_len or config.context_length) // settings.block_size)
        self.padding_row = N
        self.cheap_rows = CHEAP_ROWS_ON_GPU if device.type == "cuda" else CHEAP_ROWS
        most_rows = max(N, CHEAP_ROWS_ON_GPU) if settings.speculate else N
        self.sampling = SamplingRows(N + 1, config.vocab_size, device)
        self.known = KnownRows(
            last_token=self.sampling.last_token,
            context_len=torch.zeros(N + 1, dtype=torch.int64, device=device),
            block_tables=torch.full(
                (N + 1, M), self.pool.padding_block, dtype=torch.int32, device=device
            ),
            counting=torch.arange(most_rows + 1, dtype=torch.int32, device=device),
            S=settings.block_size,
        )
        self.shapes = []  # to which steps are padded, if they are
        if self.ops.fixed_shapes and device.type == "cuda":
            self.shapes = padded_shapes(most_rows, settings.token_budget)
        self.finder = None  # of groups of decodes that begin alike
        self.shapes_with_groups = []
        if self.ops.group_finder and 0 in config.windows:  # some layer sees whole prefixes
            G = config.n_head // config.n_kv_head
            self.finder = self.ops.group_finder(G, settings.block_size)
            if self.shapes:
                self.shapes_with_groups = self.finder.shapes(N)
        self.run = self.run_batch
        self.program = None
        if self.ops.program:
            T = settings.token_budget
            self.program = self.ops.program(self.model, self.ops, self.pool.kv, self.known, T)
            self.run = self.run_program
        self.graphs: dict[StepShape, tuple] = {}  # -> (graph, its outputs)
        # where graphs send their tokens, and how often they have: see fused.send
        self.ring: Tensor | None = None
        self.turn: Tensor | None = None
        self.last_inputs = array("q")  # what `static_inputs`, the graphs' input, begins with now
        if settings.graphs and self.shapes:
            self.capture_all()
            self.run = self.replay

    # -- host to device ----------------------------------------------------------------------------

    def fill_rows(self, *requests: Request):
        """Fill the rows of requests that start to run, start again, or were forked."""
        starts = []
        for r in requests:
            tokens = r.generated_tokens or r.prompt_tokens
            starts.append((r.row, tokens[-1], r.num_filled_slots))
        rows, last_token, context_len = upload(starts, self.device).unbind(1)
        self.known.last_token[rows] = last_token
        self.known.context_len[rows] = context_len
        self.fill_tables(requests)
        self.sampling.fill(*map(sampling_row, requests))

    def fill_tables(self, requests: Iterable[Request]):
        """Fill the block tables of requests, padded with the padding block to the longest."""
        M = max(len(r.block_table) for r in requests)
        tables = array("q")
        for r in requests:
            missing = M - len(r.block_table)
            tables.extend([r.row, *r.block_table] + [self.pool.padding_block] * missing)
        tables = upload(tables, self.device).view(-1, 1 + M)
        self.known.block_tables[tables[:, 0], :M] = tables[:, 1:].int()

    def copy_blocks(self, copies: dict[int, int]):
        """Copy blocks, {to: from}: all are read before any is written."""
        to = upload(list(copies), self.device)
        source = upload(list(copies.values()), self.device)
        self.pool.copy_blocks(to, source)

    # -- a step ------------------------------------------------------------------------------------

    # Three ways to run a step; a device has one of them (`run`). A program is a list of calls into
    # C. A batch is computed operator by operator. `replay` launches the batch's CUDA graph, if one
    # was captured for its shape.

    @torch.inference_mode()
    def run_program(self, packed: PackedPlan) -> Launched:
        x, logits, rows, positions = self.program(packed.plan)
        tokens = self.sample(logits, rows, positions, packed.plan)
        return Launched(packed, tokens, logits, x)

    @torch.inference_mode()
    def run_batch(self, packed: PackedPlan) -> Launched:
        inputs = upload(packed.inputs, self.device)
        return Launched(packed, *self.compute(inputs, packed.shape, packed.plan))

    @torch.inference_mode()
    def replay(self, packed: PackedPlan) -> Launched:
        if packed.shape not in self.graphs:
            return self.run_batch(packed)
        graph, *outputs = self.graphs[packed.shape]
        if packed.inputs != self.last_inputs:  # else the same requests decode on in their blocks
            upload(packed.inputs, self.device, out=self.static_inputs)
            self.last_inputs = packed.inputs
        graph.replay()
        return Launched(packed, *outputs, on_host=next(self.sent))

    def send(self, launched: Launched):
        """Start to bring the tokens to the host, if a graph has not done so itself."""
        if launched.on_host is None:
            launched.on_host = launched.tokens.to("cpu", non_blocking=True)
        if launched.tokens.is_cuda:
            launched.done = torch.cuda.Event()
            launched.done.record()

    def compute(self, packed: Tensor, shape: StepShape, plan: Plan | None = None):
        """
        A step of n decodes and C chunks of T tokens together. Returns the sampled tokens [n + C] of
        all of them, their logits [n + C, V], and the hidden states of the last layer [n + T,
        width]. With `fixed_shapes` the host does not wait for the device, so a CUDA graph can hold
        it; `plan` (None at a capture) shows what can be skipped.
        """
        batch, rows = lay_out(packed, shape, plan, self.known, self.ops)
        H = self.model.config.n_head
        kv = self.pool.kv[0]
        batch.attention_plans = {w: self.ops.plan_attention(batch, H, kv, w) for w in self.windows}
        x = self.model.hidden(batch, self.pool.kv)
        last = x[batch.logits_index] if shape.C else x  # a decode needs every token's
        logits = self.model.logits(last, self.ops)
        return self.sample(logits, rows, batch.context_lens, plan), logits, x

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, plan: Plan | None) -> Tensor:
        """Sample by the parameters in these rows. A plain request is greedy."""
        asked = [getattr(r, "params", GREEDY) for r in plan.sampled] if plan else None
        return self.ops.sample(logits, rows, positions, self.sampling, asked)

    @torch.inference_mode()
    def sample_masked(
        self, launched: Launched, requests: dict[Request, int], masks: list[np.ndarray]
    ):
        """
        Sample for these requests once more: each among the tokens of its mask [V / 32] int32, after
        as many tokens of this step as `requests` says.
        """
        place_of = launched.place_of()
        places = [place_of[r] + n for r, n in requests.items()]
        at = upload(places, self.device)
        rows = upload([r.row for r in requests], self.device)
        known = [r.num_tokens - r.num_to_come + n for r, n in requests.items()]
        positions = upload(known, self.device)
        allowed = torch.from_numpy(np.stack(masks))
        allowed = upload(allowed, self.device, torch.int32)
        tokens = launched.tokens
        self.sampling.uncount(rows, tokens[at])
        asked = [r.params for r in requests]
        logits = launched.logits[at]
        tokens[at] = self.ops.sample(logits, rows, positions, self.sampling, asked, allowed)
        launched.on_host = None  # a graph has sent the others

    @torch.inference_mode()
    def sampled_logprobs(self, launched: Launched, places: list[int], most: int) -> tuple:
        """Return `logprobs` of the tokens at these places, with `most` candidates of each."""
        at = upload(places, self.device)
        return self.ops.logprobs(launched.logits[at], launched.tokens[at], most)

    @torch.inference_mode()
    def prompt_logprobs(
        self, launched: Launched, rows: slice, targets: list[int], most: int
    ) -> list[Tensor]:
        """Return `logprobs` of these tokens, after the hidden states in these rows."""
        logits = self.model.logits(launched.hidden[rows], self.ops)
        targets = upload(targets, self.device)
        return self.ops.logprobs(logits, targets, most)

    # -- CUDA graphs -------------------------------------------------------------------------------

    def follow_turn(self):
        """
        Go on reading at the row that the next graph sends its tokens to. Also called after Ctrl-C,
        which may have come after a graph was launched and before the host counted it.
        """
        if self.ring is not None:
            turn = self.turn.item() % len(self.ring)
            self.sent = itertools.islice(itertools.cycle(self.ring), turn, None)

    def padding(self, shape: StepShape) -> array:
        """Return the inputs of a step that is all padding."""
        return pack(Plan(), shape, self.padding_row, self.pool.padding_block)

    @torch.inference_mode()
    def warm_up(self):
        """
        Compute the largest step there is, all of it padding, so that its kernels are compiled and
        its memory is taken. Does nothing where steps are not padded.
        """
        if self.shapes:
            largest = max(self.shapes, key=lambda shape: shape.n + shape.T)
            self.compute(upload(self.padding(largest), self.device), largest)
            torch.cuda.synchronize()

    @torch.inference_mode()
    def capture_all(self):
        """
        Capture every shape as a CUDA graph, the largest first, so that the smaller ones reuse their
        memory. A step runs once before: that compiles its kernels. At the end all objects of the
        process are exempt from garbage collection.
        """
        shapes = self.shapes + self.shapes_with_groups
        longest = max(sum(sizes(shape)) for shape in shapes)
        self.static_inputs = torch.full((longest,), self.padding_row, device=self.device)
        # two steps are under way at most
        most = max(shape.n + shape.C for shape in shapes)
        self.ring = torch.zeros(4, most, dtype=torch.int64, pin_memory=True)
        self.turn = torch.zeros(1, dtype=torch.int64, device=self.device)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        reserved = torch.cuda.memory_reserved()
        started = time.perf_counter()
        largest_first = sorted(shapes, key=lambda shape: -shape.n - shape.T)
        for shape in tqdm(largest_first, "CUDA graphs", leave=False, disable=None):
            packed = upload(self.padding(shape), self.device, out=self.static_inputs)
            stream.wait_stream(torch.cuda.current_stream())  # which made all that it reads
            with torch.cuda.stream(stream):
                tokens, *_ = self.compute(packed, shape)
                self.ops.send(tokens, self.ring, self.turn)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self.compute(packed, shape)
                self.ops.send(outputs[0], self.ring, self.turn)
            self.graphs[shape] = graph, *outputs
        self.follow_turn()
        gc.collect()
        # all objects so far stay: to look through them would hold up a step for 50 ms
        gc.freeze()
        memory = (torch.cuda.memory_reserved() - reserved) / 2**20
        seconds = time.perf_counter() - started
        self.graph_statement = (
            f"{len(self.graphs)} CUDA graphs, {memory:,.0f} MiB, captured in {seconds:.1f} s"
        )
