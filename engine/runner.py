"""
The device side of a step: the scheduler's `Plan`, computed and sampled.

The `Runner` has the model, the KV pool and what the device must know of each running request, so a
plan carries only what changed. inputs.py lays a plan out on the flat token axis. On a GPU a step is
one launch, of a CUDA graph. `launch` starts a step and `wait_for` waits for it: between the two the
engine (engine.py) plans the next one.
Letters: B requests, T tokens, M blocks per table, S block size, V vocabulary; N rows, one for each
request that may run at once, and row N for padding; of a step, n decodes and C chunks.
"""

import gc
import itertools
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.drafts import MOST_ROWS_ON_GPU
from model import GPT
from ops import prefix
from ops.choice import choose_ops
from ops.fused import send
from ops.inputs import (
    KnownRows,
    StepShape,
    lay_out,
    num_decode_rows,
    pack,
    sizes,
    upload,
)
from ops.sampling import Row, SamplingRows
from paged import KVBlockPool, Plan, Request
from params import GREEDY, NO_TOKEN, Settings


def kv_dtype(model: GPT) -> torch.dtype:
    """
    The dtype of the KV pool: the weights', but fp32 on a CPU, where attention of one query in bf16
    is slow.
    """
    weight = model.wte.weight
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


@dataclass
class InFlight:
    """A step under way: its plan, and where its results arrive, in tensors on the host."""

    plan: Plan
    places: list[int]  # of plan.sampled among the n decodes, with padding, and C chunks
    logits: Tensor  # [n + C, V], on the device until the next step: for walkthrough.py
    tokens: Tensor  # [n + C], or longer
    sampled: Tensor  # [n + C] the same, on the device until the next step
    # requests that want their token scored, and what `logprobs` gives for these tokens
    sampled_scores: tuple[list[Request], list[Tensor]] = ((), ())
    # request, start, and what `logprobs` gives for its prompt's tokens start + 1 ..
    prompt_scores: list[tuple[Request, int, list[Tensor]]] = field(default_factory=list)
    done: torch.cuda.Event | None = None


class StepResult(NamedTuple):
    """
    The results of a step. A score: [log-probability of the token, ids of the likeliest tokens,
    log-probabilities of these].
    """

    tokens: list[int]  # of plan.sampled, in its order; that of a `failed` request is no token id
    failed: dict[Request, str]  # got no token, and why
    logprobs: dict[Request, list]  # the score of the sampled token, of requests that asked
    prompt_scores: dict[Request, tuple[int, list]]  # (start, scores of prompt tokens start + 1 ..)


FIRST_SHAPE_WITH_CHUNKS = 128  # tokens; the next ones are twice as large
BROKEN = "the model's logits are not numbers: its weights are broken"
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


def sharing_shapes(N: int, G: int) -> list[StepShape]:
    """
    The shapes of steps of at most N decodes that share prefixes, with G query heads to a KV head.
    Fewer, as each is a graph more: such a step has time to spare.
    """
    least = prefix.LEAST_REQUESTS
    if least > N:
        return []
    fewer = [n for n in (least, *range(2 * least, N, 2 * least)) if n < N]
    return [StepShape(n, 0, 0, prefix.num_groups(n, G)) for n in (*fewer, N)]


class Runner:
    """
    The model, the KV pool, and what the device must know of each running request, in arrays indexed
    by its row. A plan carries only what changed; the last token, its position and the block table
    are already here. Nothing in a step waits for the device but `wait_for`. The last row belongs to
    padding, and its block table is all sink.

    Where the operators allow it (`Ops.fixed_shapes`), steps are padded to a few shapes, each
    captured once as a CUDA graph: forward, sampling and the update of these arrays are one launch.
    """

    def __init__(self, model: GPT, settings: Settings):
        """
        In `settings` the sizes are numbers, not None (sizing.py). Raises ValueError for operators
        that do not work here.
        """
        config = model.config
        device = model.wte.weight.device
        self.device = device
        dtype = torch.int8 if settings.quantize == "int8" else model.wte.weight.dtype
        self.ops, self.reason = choose_ops(
            settings.attention, device, dtype, settings.deterministic
        )
        self.model = self.ops.pack_weights(model, settings.quantize)
        self.pool = KVBlockPool(
            settings.num_blocks,
            settings.block_size,
            config.n_layer,
            config.n_kv_head,
            config.head_size,
            device,
            kv_dtype(model),
        )
        self.windows = set(config.windows)
        N = settings.max_num_seqs
        M = -(-(settings.max_model_len or config.context_length) // settings.block_size)
        self.padding_row = N
        most_rows = max(N, MOST_ROWS_ON_GPU) if settings.speculate else N
        self.sampling = SamplingRows(N + 1, config.vocab_size, device)
        self.known = KnownRows(
            last_token=self.sampling.last_token,
            context_len=torch.zeros(N + 1, dtype=torch.int64, device=device),
            block_tables=torch.full((N + 1, M), self.pool.sink, dtype=torch.int32, device=device),
            counting=torch.arange(most_rows + 1, dtype=torch.int32, device=device),
            S=settings.block_size,
        )
        self.S_with_drafts = settings.block_size if settings.speculate else 0  # for `pack`
        self.scored_rows: set[int] = set()  # whose tokens' log-probabilities are wanted
        self.shapes = []  # to which steps are padded, if they are
        if self.ops.fixed_shapes and device.type == "cuda":
            self.shapes = padded_shapes(most_rows, settings.token_budget)
        self.finder = None  # of the groups of decodes that share prefixes
        self.sharing_shapes = []
        if self.ops.shares_prefixes and 0 in config.windows:  # some layer sees whole prefixes
            G = config.n_head // config.n_kv_head
            self.finder = prefix.GroupFinder(G, settings.block_size)
            if self.shapes:
                self.sharing_shapes = sharing_shapes(N, G)
        self.graphs: dict[StepShape, tuple] = {}  # -> (graph, its outputs)
        # where graphs send their tokens, and how often they have: see fused.send
        self.ring: Tensor | None = None
        self.turn: Tensor | None = None
        self.last_inputs = array("q")  # what `static_inputs`, the graphs' input, begins with now
        self.recorded = None
        if self.ops.record:
            self.recorded = self.ops.record(
                self.model, self.ops, self.pool.kv, self.known, settings.token_budget
            )
        if settings.graphs and self.shapes:
            self.capture_all()

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
        for r in requests:
            self.scored_rows.discard(r.row)
            if r.params is not None and r.params.logprobs is not None:
                self.scored_rows.add(r.row)

    def fill_tables(self, requests: Iterable[Request]):
        """Fill the block tables of requests, padded with the sink to the longest."""
        M = max(len(r.block_table) for r in requests)
        tables = array("q")
        for r in requests:
            missing = M - len(r.block_table)
            tables.extend([r.row, *r.block_table] + [self.pool.sink] * missing)
        tables = upload(tables, self.device).view(-1, 1 + M)
        self.known.block_tables[tables[:, 0], :M] = tables[:, 1:].int()

    def padded_shape(self, plan: Plan) -> StepShape:
        """
        The smallest padded shape that holds a plan. If none does, the plan's own shape, with only
        its decodes padded, if steps are padded at all.
        """
        n = num_decode_rows(plan)
        C = len(plan.chunks)
        T = sum(m for _, m in plan.chunks)
        for shape in self.shapes:  # the smallest come first
            if shape.n >= n and shape.C >= C and shape.T >= T:
                return shape
        if n and self.shapes:
            n = min(shape.n for shape in self.shapes if shape.n >= n)
        return StepShape(n, C, T)

    def sharing_shape(self, n: int) -> StepShape:
        """The smallest padded shape for n decodes that share prefixes, or n itself unpadded."""
        for shape in self.sharing_shapes:
            if shape.n >= n:
                return shape
        return StepShape(n, 0, 0, prefix.num_groups(n, self.finder.G))

    # -- a step on the device ----------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        """
        Start to compute a plan: write the K, V of its tokens, sample, and bring the results to the
        host.
        """
        if plan.copies:  # copy-on-write, before the step writes into them
            to = upload(list(plan.copies), self.device)
            source = upload(list(plan.copies.values()), self.device)
            self.pool.copy_blocks(to, source)
        if plan.admitted:
            self.fill_rows(*plan.admitted)
        # A decode's new block is among the inputs that `pack` makes. The device needs whole tables
        # where that is not enough: for drafts, whose later tokens may see more new blocks; and for
        # recorded steps.
        if self.recorded or plan.drafts:
            changed = [r for r in plan.grown if r.row is not None]
            if changed:
                self.fill_tables(changed)
        shape = self.padded_shape(plan)
        groups = None
        if self.finder and not plan.chunks and not plan.drafts:
            groups = self.finder.find(plan.decodes)
        if groups:
            shape = self.sharing_shape(shape.n)
        places = list(range(num_decode_rows(plan)))
        places += [shape.n + i for i, (r, _) in enumerate(plan.chunks) if r in plan.completed]
        on_host = None  # a graph sends its tokens itself
        if self.recorded:
            places = range(len(plan.sampled))
            outputs = self.compute(None, shape, plan)
        else:
            constants = (self.padding_row, self.pool.sink, self.S_with_drafts)
            packed = pack(plan, shape, *constants, groups or ())
            if shape in self.graphs:
                graph, *outputs = self.graphs[shape]
                if packed != self.last_inputs:  # else the same requests decode on in their blocks
                    upload(packed, self.device, to=self.static_inputs)
                    self.last_inputs = packed
                graph.replay()
                on_host = next(self.sent)
            else:
                outputs = self.compute(upload(packed, self.device), shape, plan)
        tokens, logits, x = outputs
        if plan.masked or self.scored_rows:
            place_of = dict(zip(plan.sampled, places, strict=True))
        if plan.masked:
            self.sample_masked({r: place_of[r] for r in plan.masked}, tokens, logits)
        if on_host is None or plan.masked:
            on_host = tokens.to("cpu", non_blocking=True)
        flight = InFlight(plan, places, logits, on_host, tokens)
        if self.scored_rows:
            flight.sampled_scores = self.score_sampled(place_of, tokens, logits)
        if plan.chunks:
            flight.prompt_scores = self.score_prompts(plan, shape.n, x)
        if tokens.is_cuda:
            flight.done = torch.cuda.Event()
            flight.done.record()
        return flight

    def compute(self, packed: Tensor | None, shape: StepShape, plan: Plan | None = None):
        """
        A step of n decodes and C chunks of T tokens together. Returns the sampled tokens [n + C] of
        all of them, their logits [n + C, V], and the hidden states of the last layer [n + T,
        width]. With `fixed_shapes` the host does not wait for the device, so a CUDA graph can hold
        it; `plan` (None at a capture) shows what can be skipped. A recorded step (`Ops.record`)
        takes all from the plan, and its tokens and logits are those of `plan.sampled`.
        """
        if self.recorded:
            x, logits, rows, positions = self.recorded(plan)
        else:
            batch, rows = lay_out(packed, shape, plan, self.known, self.ops)
            positions = batch.context_lens
            H = self.model.config.n_head
            kv = self.pool.kv[0]
            batch.prepared = {w: self.ops.prepare(batch, H, kv, w) for w in self.windows}
            x = self.model.hidden(batch, self.pool.kv)
            last = x[batch.logits_index] if shape.C else x  # of decodes alone, every token's
            logits = self.model.logits(last, self.ops)
        # a request without params is greedy, which asks for nothing
        asked = [r.params for r in plan.sampled if r.params] if plan else None
        sampled = self.ops.sample(logits, rows, positions, self.sampling, asked)
        return sampled, logits, x

    def score_sampled(self, places: dict[Request, int], tokens, logits):
        """
        Start to score sampled tokens, each request's at its place. Returns the requests that want
        it and, for these in order, the tensors of `logprobs`, under way to the host.
        """
        scored = {r: i for r, i in places.items() if r.row in self.scored_rows}
        if not scored:
            return (), ()
        at = upload(list(scored.values()), self.device)
        most = max(r.params.logprobs for r in scored)
        return list(scored), to_host(self.ops.logprobs(logits[at], tokens[at], most))

    @torch.inference_mode()
    def sample_masked(self, requests: dict[Request, int], tokens: Tensor, logits: Tensor):
        """
        Sample for these requests once more, each with its grammar's mask. They have places in
        tokens [n + C], changed in place, and in logits [n + C, V].
        """
        at = upload(list(requests.values()), self.device)
        rows = upload([r.row for r in requests], self.device)
        positions = upload([r.num_tokens - r.num_to_come for r in requests], self.device)
        allowed = np.stack([r.grammar.mask for r in requests])
        allowed = upload(torch.from_numpy(allowed), self.device, torch.int32)
        self.sampling.uncount(rows, tokens[at])
        asked = [r.params for r in requests]
        tokens[at] = self.ops.sample(logits[at], rows, positions, self.sampling, asked, allowed)

    def sample_again(self, flight: InFlight, result: StepResult, refused: dict[Request, int]):
        """
        From the logits of the last step, with masks, for requests whose tokens were refused: their
        places in plan.sampled. Changes `result`.
        """
        places = {r: flight.places[i] for r, i in refused.items()}
        self.sample_masked(places, flight.sampled, flight.logits)
        tokens = flight.sampled.tolist()
        for r, i in refused.items():
            result.tokens[i] = tokens[places[r]]
        scores = self.score_sampled(places, flight.sampled, flight.logits)
        scores = scores_by_request(*scores)
        result.logprobs.update(scores)

    def score_prompts(self, plan: Plan, first: int, x) -> list[tuple[Request, int, list]]:
        """
        Start to score prompts, whose chunks begin at row `first` of the hidden states x [n + T,
        width]. Returns (request, start, the scores of its prompt tokens start + 1 .., under way to
        the host) of each.
        """
        scores = []
        for request, n in plan.chunks:
            count = num_scored(request, n)
            if count:
                start = request.prefill_cursor
                targets = request.prompt_tokens[start + 1 : start + 1 + count]
                targets = upload(targets, self.device)
                logits = self.model.logits(x[first : first + count], self.ops)
                tensors = self.ops.logprobs(logits, targets, request.prompt_logprobs)
                scores.append((request, start, to_host(tensors)))
            first += n
        return scores

    def wait_for(self, flight: InFlight) -> StepResult:
        """Wait until a step is done. Returns its results."""
        if flight.done:
            flight.done.synchronize()
        plan = flight.plan
        computed = flight.tokens.tolist()
        n = num_decode_rows(plan)
        tokens = computed[:n] + [computed[i] for i in flight.places[n:]]
        result = StepResult(tokens, {}, {}, {})
        if NO_TOKEN in tokens:
            pairs = zip(plan.sampled, tokens, strict=True)
            for r, token in pairs:
                if token == NO_TOKEN:
                    result.failed[r] = r.grammar.failure() if r in plan.masked else BROKEN
        result.logprobs.update(scores_by_request(*flight.sampled_scores))
        for request, start, tensors in flight.prompt_scores:
            result.prompt_scores[request] = start, rows_of(tensors)
        return result

    # -- CUDA graphs -------------------------------------------------------------------------------

    def follow_turn(self):
        """
        Read on from the row that the next graph sends its tokens to. After Ctrl-C, too, which may
        have come between a graph and the host's turn.
        """
        if self.ring is not None:
            turn = self.turn.item() % len(self.ring)
            self.sent = itertools.islice(itertools.cycle(self.ring), turn, None)

    def padding(self, shape: StepShape) -> array:
        """The inputs of a step of padding alone."""
        return pack(Plan(), shape, self.padding_row, self.pool.sink)

    @torch.inference_mode()
    def warm_up(self):
        """
        Compute the largest step there is, of padding alone: so its kernels are compiled, and its
        memory is taken. Does nothing where steps are not padded.
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
        shapes = self.shapes + self.sharing_shapes
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
            packed = upload(self.padding(shape), self.device, to=self.static_inputs)
            stream.wait_stream(torch.cuda.current_stream())  # which made all that it reads
            with torch.cuda.stream(stream):
                tokens, *_ = self.compute(packed, shape)
                send(tokens, self.ring, self.turn)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self.compute(packed, shape)
                send(outputs[0], self.ring, self.turn)
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


def to_host(tensors) -> list[Tensor]:
    """Start to copy tensors to the host: they are valid once the step's event is done."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]


def rows_of(tensors: list[Tensor]) -> list[list]:
    """Tensors [R, ..] as R lists, each with one row of all of them."""
    columns = [tensor.tolist() for tensor in tensors]
    return [list(row) for row in zip(*columns, strict=True)]


def scores_by_request(requests: list[Request], tensors: list[Tensor]) -> dict[Request, list]:
    """The score of each: the tensors have as many candidates as any of them wants."""
    scores = {}
    for request, score in zip(requests, rows_of(tensors), strict=True):
        logprob, ids, candidates = score
        most = request.params.logprobs
        scores[request] = [logprob, ids[:most], candidates[:most]]
    return scores


def sampling_row(r: Request) -> Row:
    params = r.params or GREEDY
    seed = params.seed or 0
    texts = (r.prompt_tokens, r.generated_tokens)
    return Row(r.row, params, seed, r.choice, *texts, r.stop_token_ids)


def num_scored(request: Request, n: int) -> int:
    """
    How many of a request's next n prefill tokens predict a token of its prompt that is to be
    scored.
    """
    # after a preemption, with tokens generated before it, the prompt was scored already
    if request.prompt_logprobs is None or request.generated_tokens:
        return 0
    return min(n, len(request.prompt_tokens) - 1 - request.prefill_cursor)
