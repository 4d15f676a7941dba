"""
The engine's state on its device, and how a step is computed there.

    device = Device(model, settings)
    device.fill_rows(request)           # for a request that has started
    launched = device.run(packed)       # a step: forward pass and sampling, in one of three ways
    device.send(launched)               # copy its tokens to the host

The host's part of a step is in runner.py. The code here never waits for the device during a step.
Letters: B requests, T tokens, M blocks per table, S block size, V vocabulary size. A step has n
decodes and C chunks. N is the maximum number of requests that run at the same time. Each of them
has a row, and row N is for padding.
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
    Return the dtype of the KV pool. On a GPU, this is the dtype of the weights. On a CPU it is
    fp32, because attention with a single query is slow in bf16.
    """
    weight = model.wte.weight
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


class PackedPlan(NamedTuple):
    """A plan, packed for the device."""

    plan: Plan
    shape: StepShape  # including padding
    # for each request in plan.prefilled, the index of its token in the sampled tokens [n + C]
    prefilled_indices: list[int]
    inputs: array  # see ops.inputs.pack; empty for a program, which reads the plan itself


@dataclass
class Launched:
    """A step that has been started on the device, and its results."""

    packed: PackedPlan
    # on the device, valid until the next step
    tokens: Tensor  # [n + C]
    logits: Tensor  # [n + C, V]
    hidden: Tensor  # [n + T, width], from the last layer
    # on the host, valid once `done` has happened
    on_host: Tensor | None = None  # the tokens [n + C]; any further entries are unused
    done: torch.cuda.Event | None = None

    def token_indices(self) -> dict[Request, int]:
        """Return, for each request, the index of its first token in `tokens`."""
        plan = self.packed.plan
        indices = {}
        index = 0
        for request in plan.decodes:
            indices[request] = index
            index += plan.num_sampled(request)
        return indices | dict(zip(plan.prefilled, self.packed.prefilled_indices, strict=True))


FIRST_SHAPE_WITH_CHUNKS = 128  # number of chunk tokens; each further shape has twice as many
# How many rows take hardly longer than one row. On a GPU, this is the smallest tile in
# ops/linear.py. On a CPU, it is how many rows ops/cpu.c multiplies together. A step with guesses
# has at most this many rows.
CHEAP_ROWS_ON_GPU = 16
CHEAP_ROWS = 8
# Numbers of decodes in shapes with chunks. There are only a few of them, because in a step with
# many tokens, a few more rows of padding hardly matter.
COARSE = (8, 32, 64, 128, 256)
TOKENS_OF_A_CHUNK = 64  # a shape with T chunk tokens has room for T / 64 chunks, and at least 8


def padded_shapes(N: int, token_budget: int) -> list[StepShape]:
    """
    Return the shapes to which steps with at most N decodes are padded, with or without CUDA graphs.
    Shapes without chunks come first. The others have chunks of up to `token_budget` tokens in
    total, and are sorted by the number of chunk tokens, then by the number of decodes.
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
            if n in COARSE or n == N:  # N always, so that every step fits
                shapes.append(StepShape(n, max(8, T // TOKENS_OF_A_CHUNK), T))
    return shapes


class Device:
    """
    The model, the KV pool, and the state of each running request. The state is kept in arrays that
    are indexed by the request's row, so a plan carries only what has changed. The last row is for
    padding, and its block table points only to the padding block.

    If the operators allow it (`Ops.fixed_shapes`), steps are padded to a few `shapes`. Each shape
    is captured once as a CUDA graph, so that the forward pass, sampling and the updates of the
    arrays take a single launch.
    """

    def __init__(self, model: GPT, settings: Settings):
        """
        Allocate the pool and the arrays. All sizes in `settings` must have been filled in (see
        sizing.py). Raises ValueError if the operators asked for do not work on this machine.
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
        self.shapes = []  # shapes that steps are padded to; if empty, there is no padding
        if self.ops.fixed_shapes and device.type == "cuda":
            self.shapes = padded_shapes(most_rows, settings.token_budget)
        self.finder = None  # finds groups of decodes with a common prefix
        self.shapes_with_groups = []
        if self.ops.group_finder and 0 in config.windows:  # some layer attends to whole prefixes
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
        # graphs send their tokens to the rows of a ring, and count the rows sent: see fused.send
        self.ring: Tensor | None = None
        self.last_inputs = array("q")  # the inputs last written to `static_inputs`
        if settings.graphs and self.shapes:
            self.capture_all()
            self.run = self.replay

    # -- host to device ----------------------------------------------------------------------------

    def fill_rows(self, *requests: Request):
        """Fill the rows of requests that have started, resumed, or been forked."""
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
        """Fill the block tables of requests, padding shorter tables with the padding block."""
        M = max(len(r.block_table) for r in requests)
        tables = array("q")
        for r in requests:
            missing = M - len(r.block_table)
            tables.extend([r.row, *r.block_table] + [self.pool.padding_block] * missing)
        tables = upload(tables, self.device).view(-1, 1 + M)
        self.known.block_tables[tables[:, 0], :M] = tables[:, 1:].int()

    def copy_blocks(self, copies: dict[int, int]):
        """Copy blocks, given as {copy: source}. All sources are read before any copy is written."""
        targets = upload(list(copies), self.device)
        sources = upload(list(copies.values()), self.device)
        self.pool.copy_blocks(targets, sources)

    # -- a step ------------------------------------------------------------------------------------

    # There are three ways to run a step; `run` is the one that this device uses. A program is a
    # list of calls into C. A batch is computed operator by operator. `replay` launches the CUDA
    # graph for the batch's shape, if there is one.

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
        # the inputs do not change if the same requests decode again in the same blocks
        if packed.inputs != self.last_inputs:
            upload(packed.inputs, self.device, out=self.static_inputs)
            self.last_inputs = packed.inputs
        graph.replay()
        return Launched(packed, *outputs, on_host=next(self.sent))

    def send(self, launched: Launched):
        """Start copying the tokens to the host, unless a graph already does so."""
        if launched.on_host is None:
            launched.on_host = launched.tokens.to("cpu", non_blocking=True)
        if launched.tokens.is_cuda:
            launched.done = torch.cuda.Event()
            launched.done.record()

    def compute(self, packed: Tensor, shape: StepShape, plan: Plan | None = None):
        """
        Compute a step with n decodes, and C chunks with T tokens in total. Returns the sampled
        tokens [n + C], their logits [n + C, V], and the hidden states of the last layer
        [n + T, width]. With `fixed_shapes`, the host never waits for the device in this method, so
        the step can be captured as a CUDA graph. `plan` shows which work can be skipped; it is None
        during a capture.
        """
        batch, rows = lay_out(packed, shape, plan, self.known, self.ops)
        H = self.model.config.n_head
        kv = self.pool.kv[0]
        batch.attention_plans = {w: self.ops.plan_attention(batch, H, kv, w) for w in self.windows}
        x = self.model.hidden(batch, self.pool.kv)
        last = x[batch.logits_index] if shape.C else x  # without chunks, every row is needed
        logits = self.model.logits(last, self.ops)
        return self.sample(logits, rows, batch.context_lens, plan), logits, x

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, plan: Plan | None) -> Tensor:
        """Sample a token for each of these rows. Requests without `params` are sampled greedily."""
        params = [getattr(r, "params", GREEDY) for r in plan.sampled] if plan else None
        return self.ops.sample(logits, rows, positions, self.sampling, params)

    @torch.inference_mode()
    def sample_masked(
        self, launched: Launched, requests: dict[Request, int], masks: list[np.ndarray]
    ):
        """
        Sample again for these requests, this time only from the tokens that each request's mask
        allows. A mask is [V / 32] int32. `requests` maps each request to the number of its tokens
        in this step that precede the new one.
        """
        index_of = launched.token_indices()
        indices = upload([index_of[r] + n for r, n in requests.items()], self.device)
        rows = upload([r.row for r in requests], self.device)
        known = [r.num_tokens - r.num_to_come + n for r, n in requests.items()]
        positions = upload(known, self.device)
        allowed = upload(np.stack(masks), self.device, torch.int32)
        tokens = launched.tokens
        self.sampling.uncount(rows, tokens[indices])
        params = [r.params for r in requests]
        logits = launched.logits[indices]
        tokens[indices] = self.ops.sample(logits, rows, positions, self.sampling, params, allowed)
        launched.on_host = None  # a graph may have sent the old tokens; `send` copies the new ones

    @torch.inference_mode()
    def sampled_logprobs(self, launched: Launched, indices: list[int], most: int) -> tuple:
        """
        Return the log-probabilities of the sampled tokens at these indices, with `most` candidates
        for each (see `logprobs` in ops/sampling.py).
        """
        indices = upload(indices, self.device)
        return self.ops.logprobs(launched.logits[indices], launched.tokens[indices], most)

    @torch.inference_mode()
    def prompt_logprobs(
        self, launched: Launched, rows: slice, targets: list[int], most: int
    ) -> list[Tensor]:
        """
        Return the log-probability of each target, as predicted by the hidden state in the
        corresponding row, with `most` candidates for each.
        """
        logits = self.model.logits(launched.hidden[rows], self.ops)
        targets = upload(targets, self.device)
        return self.ops.logprobs(logits, targets, most)

    # -- CUDA graphs -------------------------------------------------------------------------------

    def sync_ring(self):
        """
        Make the host read next from the row of the ring to which the next graph will send its
        tokens. Also called after Ctrl-C, which may have come after a graph was launched but before
        the host counted it.
        """
        if self.ring is not None:
            first = self.num_sent.item() % len(self.ring)
            self.sent = itertools.islice(itertools.cycle(self.ring), first, None)

    def padding(self, shape: StepShape) -> array:
        """Return the inputs of a step that contains only padding."""
        return pack(Plan(), shape, self.padding_row, self.pool.padding_block)

    @torch.inference_mode()
    def warm_up(self):
        """
        Run the largest step with only padding, to compile its kernels and allocate its memory. Does
        nothing if steps are not padded.
        """
        if self.shapes:
            largest = max(self.shapes, key=lambda shape: shape.n + shape.T)
            self.compute(upload(self.padding(largest), self.device), largest)
            torch.cuda.synchronize()

    @torch.inference_mode()
    def capture_all(self):
        """
        Capture every shape as a CUDA graph. The largest shape comes first, so that the smaller ones
        reuse its memory. Each step is run once before it is captured, to compile its kernels. At
        the end, all existing objects are exempted from garbage collection.
        """
        shapes = self.shapes + self.shapes_with_groups
        longest = max(sum(sizes(shape)) for shape in shapes)
        self.static_inputs = torch.full((longest,), self.padding_row, device=self.device)
        # at most two steps are in flight, so four rows are enough
        most = max(shape.n + shape.C for shape in shapes)
        self.ring = torch.zeros(4, most, dtype=torch.int64, pin_memory=True)
        self.num_sent = torch.zeros(1, dtype=torch.int64, device=self.device)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        reserved = torch.cuda.memory_reserved()
        started = time.perf_counter()
        largest_first = sorted(shapes, key=lambda shape: -shape.n - shape.T)
        for shape in tqdm(largest_first, "CUDA graphs", leave=False, disable=None):
            packed = upload(self.padding(shape), self.device, out=self.static_inputs)
            stream.wait_stream(torch.cuda.current_stream())  # which uploads the inputs
            with torch.cuda.stream(stream):
                tokens, *_ = self.compute(packed, shape)
                self.ops.send(tokens, self.ring, self.num_sent)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self.compute(packed, shape)
                self.ops.send(outputs[0], self.ring, self.num_sent)
            self.graphs[shape] = graph, *outputs
        self.sync_ring()
        gc.collect()
        # these objects live as long as the process; scanning them would delay a step by 50 ms
        gc.freeze()
        memory = (torch.cuda.memory_reserved() - reserved) / 2**20
        seconds = time.perf_counter() - started
        self.graph_statement = (
            f"{len(self.graphs)} CUDA graphs, {memory:,.0f} MiB, captured in {seconds:.1f} s"
        )
