"""
The device side of a step: what the scheduler's `Plan` says, laid out on the flat token axis,
computed and sampled.

The `Runner` has the model, the KV pool and what the device must know of each running request, so a
plan carries only what changed. On a GPU a step is one launch, of a CUDA graph. `launch` starts a
step and `wait_for` waits for it: between the two the engine (engine.py) plans the next one. Letters:
B requests, T tokens, M blocks per table, S block size, V vocabulary; of a step, n decodes and C
chunks.
"""

import gc
import os
import sys
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import torch

import kernels
from model import GPT, compiled_decode, packed_for_cpu
from paged import KVBlockPool, Plan, Request
from serving import fused as layers
from serving.params import GREEDY, NO_TOKEN
from serving.sampling import Row, SamplingRows, logprobs, upload
from serving.sampling_kernels import sample


def kv_dtype(model: GPT) -> torch.dtype:
    """
    K and V are kept as the model computes; in fp32 on a CPU, where attention of one query in bf16
    is slow.
    """
    weight = model.wte.weight
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


@dataclass
class InFlight:
    """A step under way: its plan, and where its results arrive, in tensors on the host."""

    plan: Plan
    wanted: list[int]  # where the tokens of plan.sampled are in `tokens`
    tokens: torch.Tensor  # of the decodes, padding, and the chunks
    sampled_scores: tuple[list[Request], list] | None  # requests, and what `logprobs` says of each
    prompt_scores: list[tuple[Request, int, list]]  # request, start, and that of the tokens after
    done: torch.cuda.Event | None = None


class StepResult(NamedTuple):
    """What a step has brought. A score is [log-probability, the likeliest ids, theirs]."""

    tokens: list[int]  # of plan.sampled, in its order; that of a `broken` request is no token id
    broken: list[Request]  # their logits are not numbers
    logprobs: dict[Request, list]  # the score of the sampled token, of requests that asked
    prompt_scores: dict[Request, tuple[int, list]]  # (start, scores of prompt tokens start + 1 ..)


def padded_steps(N: int, token_budget: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """
    What steps of at most N decodes are padded to, graphs or not: numbers of decodes, and keys of
    decodes, chunks and their tokens, for steps without chunks and for those with up to
    `token_budget` tokens of them.
    """
    sizes = [n for n in (1, 2, 4, *range(8, N, 8)) if n < N] + [N]
    coarse = [
        n for n in sizes if n in (8, 32, 64, 128, 256, N)
    ]  # with N, no step has too many decodes
    mixed = [128 << i for i in range(20) if 128 << i < token_budget] + [token_budget] * (
        token_budget > 0
    )
    keys = [(n, 0, 0) for n in sizes]
    keys += [(n, max(8, T // 64), T) for T in mixed for n in coarse]
    return sizes, keys


class Runner:
    """
    The model, the KV pool, and what the device must know of each running request, in arrays indexed
    by its row. A plan carries only what changed; the last token, its position and the block table
    are already here. Nothing here waits for the device but `wait_for`. The last row is nobody's:
    padding uses it, and its block table is all sink.

    On CUDA with Triton, steps are padded to a few sizes, each captured once as a CUDA graph:
    forward, sampling and the update of these arrays are one launch.
    """

    def __init__(
        self,
        model: GPT,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        attention="auto",
        quantize="none",
        compile=False,
        graphs=True,
        token_budget=0,  # of the largest step that is captured
    ):
        config, device = model.config, model.wte.weight.device
        self.model, self.block_size, self.device = (
            packed_for_cpu(model, quantize),
            block_size,
            device,
        )
        self.backend = kernels.choose_backend(attention, device)
        heads = config.n_kv_head, config.head_size
        self.pool = KVBlockPool(
            num_blocks, block_size, config.n_layer, *heads, device, kv_dtype(model)
        )
        M, N = -(-config.context_length // block_size), max_num_seqs
        self.context_len = torch.zeros(
            N + 1, dtype=torch.int64, device=device
        )  # tokens in the pool
        self.block_tables = torch.full((N + 1, M), self.pool.sink, dtype=torch.int32, device=device)
        self.sampling = SamplingRows(N + 1, config.vocab_size, device)
        self.nobody, self.counting = N, torch.arange(N + 1, dtype=torch.int32, device=device)
        self.last_inputs = array("q")  # what `static_inputs`, the graphs' input, begins with now
        self.scored_rows: set[int] = set()  # whose tokens' log-probabilities are wanted
        padded = device.type == "cuda" and self.backend.name == "triton"
        self.sizes, self.keys = padded_steps(N, token_budget) if padded else ([], [])
        self.graphs: dict[tuple, tuple] = {}  # one of the keys -> (graph, its outputs)
        self.num_rows = self.num_padded_rows = 0  # of decodes, and of padding among them
        self.decode_one = None  # or a compiled step of one request
        if compile:
            self.compile(model, quantize)
        if graphs and padded:
            self.capture_all()

    # -- host to device ----------------------------------------------------------------------------

    def bring_up_to_date(self, plan: Plan):
        """Tell the device's arrays what the plan has changed; of new blocks, `inputs` tells."""
        if plan.copies:  # before the step writes into them
            self.pool.copy_blocks(
                *upload([list(plan.copies), list(plan.copies.values())], self.device)
            )
        if plan.admitted:
            self.place(*plan.admitted)

    def place(self, *requests: Request):
        """Fill the rows of requests that start to run, start again, or were forked."""
        starts = [
            (r.row, (r.generated_tokens or r.prompt_tokens)[-1], r.num_filled_slots)
            for r in requests
        ]
        rows, last_token, context_len = upload(starts, self.device).unbind(1)
        self.sampling.last_token[rows], self.context_len[rows] = last_token, context_len
        M, sink = max(len(r.block_table) for r in requests), [self.pool.sink]
        entries = chain.from_iterable(
            r.block_table + sink * (M - len(r.block_table)) for r in requests
        )
        self.block_tables[rows, :M] = upload(array("q", entries), self.device).view(-1, M).int()
        self.sampling.set(*map(sampling_row, requests))
        for r in requests:
            scored = r.params is not None and r.params.logprobs is not None
            (self.scored_rows.add if scored else self.scored_rows.discard)(r.row)

    def padded_sizes(self, plan: Plan) -> tuple[int, int, int]:
        """
        Decodes, chunks and tokens of chunks that a step is padded to: one of the keys, if one is
        large enough.
        """
        n, C, T = len(plan.decodes), len(plan.chunks), plan.num_tokens - len(plan.decodes)
        if not self.sizes:
            return n, C, T
        fitting = [
            key
            for key in self.keys
            if key[0] >= n and key[1] >= C and key[2] >= T and bool(key[1]) == bool(C)
        ]
        if fitting:
            return min(fitting, key=lambda key: (key[2], key[0]))
        return self.sizes[bisect_left(self.sizes, n)] if n else 0, C, T

    def inputs(self, plan: Plan, n: int, C: int, T: int) -> array:
        """
        What the device does not know yet: whose turn it is, who begins which block and, of chunks,
        their tokens. Padded to n decodes, C chunks with T tokens together; the parts are those that
        `compute` splits it into.
        """
        nobody, chunks, grown = self.nobody, plan.chunks, set(plan.grown)
        packed = [r.row for r in plan.decodes] + [nobody] * (n - len(plan.decodes))
        packed += [r.block_table[-1] if r in grown else -1 for r in plan.decodes] + [-1] * (
            n - len(plan.decodes)
        )
        if C:
            none, starts = (
                [nobody] * (C - len(chunks)),
                list(accumulate((m for _, m in chunks), initial=0)),
            )
            padding = T - starts[-1]
            packed += [r.row for r, _ in chunks] + none
            packed += [
                r.row if r.prefill_cursor + m == r.prefill_target else nobody for r, m in chunks
            ] + none
            packed += starts + starts[-1:] * len(none)
            packed += [r.prefill_cursor + m for r, m in chunks] + [0] * len(none)
            for r, m in chunks:
                packed += r.tokens_between(r.prefill_cursor, r.prefill_cursor + m)
            packed += [0] * padding
            for r, m in chunks:
                packed += range(r.prefill_cursor, r.prefill_cursor + m)
            packed += [0] * padding
            for r, m in chunks:
                packed += [r.row] * m
            packed += [nobody] * padding
        return array("q", packed)  # which a tensor is made of ten times as fast

    # -- a step on the device ----------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        """Start to compute a plan, and to bring its results to the host."""
        wanted, n, tokens, logits, x = self.start(plan)
        scores = self.score_sampled(plan, wanted, tokens, logits)
        prompt_scores = self.score_prompts(plan, n, x)
        [tokens_there] = to_host([tokens])
        flight = InFlight(plan, wanted, tokens_there, scores, prompt_scores)
        if tokens.is_cuda:
            flight.done = torch.cuda.Event()
            flight.done.record()
        return flight

    def start(self, plan: Plan):
        """
        Start to compute a plan: write the K, V of its tokens, and sample. Returns where the
        requests of plan.sampled are, the number of decodes with padding, and what `compute` does.
        """
        self.bring_up_to_date(plan)
        n, C, T = self.padded_sizes(plan)
        wanted = list(range(len(plan.decodes)))
        wanted += [
            n + i
            for i, (r, m) in enumerate(plan.chunks)
            if r.prefill_cursor + m == r.prefill_target
        ]
        self.num_rows, self.num_padded_rows = (
            self.num_rows + n,
            self.num_padded_rows + n - len(plan.decodes),
        )
        inputs = self.inputs(plan, n, C, T)
        if (n, C, T) not in self.graphs:
            return wanted, n, *self.compute(upload(inputs, self.device), n, C, T, plan)
        graph, *outputs = self.graphs[n, C, T]
        if (
            inputs != self.last_inputs
        ):  # else the same requests decode on in their blocks: it is all there
            upload(inputs, self.device, to=self.static_inputs)
            self.last_inputs = inputs
        graph.replay()
        return wanted, n, *outputs

    def compute(self, inputs: torch.Tensor, n: int, C: int, T: int, plan: Plan | None = None):
        """
        A step of n decodes and C chunks of T tokens together, from `inputs`. Returns the sampled
        tokens [n + C] of all of them, their logits (n + C, V), and what the last layer says of each
        token, (n + T, width), or None after a compiled step. The host looks at no tensor, and at
        `plan` only for what spares work (None: a graph is captured).
        """
        rows, S = inputs[:n], self.block_size
        decode_inputs = layers.decode_inputs_triton if self.sizes and n else layers.decode_inputs
        arrays = self.sampling.last_token, self.context_len, self.block_tables
        of_decodes = decode_inputs(rows, inputs[n : 2 * n], *arrays, S)
        tokens, positions, slots, context_lens, tables = of_decodes
        query_start, sampling_rows = self.counting[: n + 1], rows
        if C:
            parts = inputs[2 * n :].split((C, C, C + 1, C, T, T, T))
            chunk_rows, chunk_sampling_rows, starts, lens, chunk_tokens, chunk_positions, row_of = (
                parts
            )
            chunk_slots = self.block_tables[row_of, chunk_positions // S] * S + chunk_positions % S
            of_chunks = (
                chunk_tokens,
                chunk_positions,
                chunk_slots,
                lens.int(),
                self.block_tables[chunk_rows],
            )
            tokens, positions, slots, context_lens, tables = map(
                torch.cat, zip(of_decodes, of_chunks, strict=True)
            )
            sampling_rows, rows = (
                torch.cat([rows, chunk_sampling_rows]),
                torch.cat([rows, chunk_rows]),
            )
            query_start = torch.cat([self.counting[:n], (n + starts).int()])
            self.context_len[chunk_rows] = lens
        chunks = [(r.num_filled_slots + m, m) for r, m in plan.chunks] if plan else []
        chunks += [(0, 0)] * (C - len(chunks))
        lens = [r.num_filled_slots + 1 for r in plan.decodes] if plan else []
        lens += [1] * (n - len(lens)) + [length for length, _ in chunks]
        batch = kernels.Batch(
            tokens=tokens,
            positions=positions,
            slot_mapping=slots,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=tables
            if self.sizes
            else tables[:, : -(-max(lens) // S)],  # no wider than is needed
            rows=rows,
            logits_index=query_start[1:] - 1 if C else query_start[:n],  # the same: 0, 1, ..
            num_decodes=n,
            query_lens_host=[1] * n + [m for _, m in chunks],
            context_lens_host=lens,
            backend=self.backend,
        )
        batch.prepared = self.backend.prepare(batch, self.model.config.n_head, self.pool.kv[0])
        if self.decode_one and n == 1 and not C:
            x, logits = None, self.decode_one(batch)
        else:
            x = self.model.forward_paged(batch, self.pool.kv)  # (n + T, width)
            logits = self.model.logits(x[batch.logits_index] if C else x)  # (n + C, V)
        asked = None
        if plan:
            whom = plan.decodes + [None] * (n - len(plan.decodes)) + [r for r, _ in plan.chunks]
            asked = [GREEDY if r is None else r.params or GREEDY for r in whom]
        sampled = sample(logits, sampling_rows, context_lens, self.sampling, asked)
        return sampled, logits, x

    def score_sampled(self, plan: Plan, wanted: list[int], tokens, logits):
        """
        Start to score the sampled tokens of requests that want it: these requests, and tensors.
        """
        if not self.scored_rows:
            return None
        places = zip(plan.sampled, wanted, strict=True)
        asked = [(r, i) for r, i in places if r.row in self.scored_rows]
        if not asked:
            return None
        requests = [r for r, _ in asked]
        at = upload([i for _, i in asked], self.device)
        most = max(r.params.logprobs for r in requests)
        return requests, to_host(logprobs(logits[at], tokens[at], most))

    def score_prompts(self, plan: Plan, first: int, x) -> list[tuple[Request, int, list]]:
        """Start to score prompts, whose chunks begin at row `first` of x (tokens, width)."""
        found = []
        for request, n in plan.chunks:
            count = num_scored(request, n)
            if count:
                start = request.prefill_cursor
                targets = request.prompt_tokens[start + 1 : start + 1 + count]
                logits = self.model.logits(x[first : first + count])
                scores = logprobs(logits, upload(targets, self.device), request.prompt_logprobs)
                found.append((request, start, to_host(scores)))
            first += n
        return found

    def wait_for(self, flight: InFlight) -> StepResult:
        """Wait until a step is done; what it has brought."""
        if flight.done:
            flight.done.synchronize()
        plan = flight.plan
        computed = flight.tokens.tolist()
        n = len(plan.decodes)
        tokens = computed[:n] + [computed[i] for i in flight.wanted[n:]]
        result = StepResult(tokens, [], {}, {})
        if NO_TOKEN in tokens:
            pairs = zip(plan.sampled, tokens, strict=True)
            result.broken.extend(r for r, token in pairs if token == NO_TOKEN)
        if flight.sampled_scores:
            requests, tensors = flight.sampled_scores
            for request, score in zip(requests, rows_of(tensors), strict=True):
                # as many candidates were found as any of the requests wants
                n = request.params.logprobs
                result.logprobs[request] = [score[0], score[1][:n], score[2][:n]]
        for request, start, tensors in flight.prompt_scores:
            result.prompt_scores[request] = start, rows_of(tensors)
        return result

    def execute(self, plan: Plan) -> list[int]:
        """Compute a plan and wait for its tokens, one for each of `plan.sampled`."""
        return self.wait_for(self.launch(plan)).tokens

    @torch.inference_mode()
    def compile(self, model: GPT, quantize: str):
        """On a CPU: compile the step of one request that decodes."""
        if self.device.type != "cpu":
            raise ValueError(
                f"--compile is for CPUs, here the device is {self.device}: leave --compile out"
            )
        if self.backend.name != "torch":
            raise ValueError(
                f"--compile wants --attention torch, not {self.backend.name}: leave one of them out"
            )
        if not kernels.cpp_compiler():
            there = (
                f"CXX names {os.environ['CXX']!r}" if os.environ.get("CXX") else "there is no g++"
            )
            raise ValueError(
                f"--compile needs a C++ compiler, {there}: let CXX name one, or leave --compile out"
            )
        kv, zeros, started = (
            self.pool.kv,
            partial(torch.zeros, dtype=torch.int64),
            time.perf_counter(),
        )
        L, D = kv.shape[0], kv.shape[-1]
        print("compiling ..", end="", file=sys.stderr, flush=True)
        try:
            step = compiled_decode(model, quantize)
            step(zeros(1), zeros(1), zeros(2, 1, kv.shape[3], 3), kv)
        except Exception as error:  # of the compiler, its cache on disk, or torch
            print(file=sys.stderr)
            told = [
                line for line in str(error).splitlines() if line and not line.startswith("backend=")
            ]
            raise ValueError(
                f"--compile failed ({type(error).__name__}: {told[0] if told else ''}): mend the C++ compiler, let "
                "TORCHINDUCTOR_CACHE_DIR name a folder with room to write, or leave --compile out"
            ) from error
        print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr)

        def decode_one(batch: kernels.Batch) -> torch.Tensor:
            (gathered,), rows = batch.prepared.gathers, batch.prepared.store_rows
            logits, new = step(
                batch.tokens, batch.positions, gathered.kv_rows[..., :-1].contiguous(), kv
            )
            kv.view(L, -1, D).index_copy_(1, rows, new.view(L, -1, D))
            return logits

        self.decode_one = decode_one

    # -- CUDA graphs -------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self):
        """
        Compute the largest step there is, of padding alone: so its kernels are compiled, and its
        memory is taken.
        """
        for key in sorted(self.keys, key=lambda key: key[0] + key[2])[-1:]:
            self.compute(upload(self.inputs(Plan(), *key), self.device), *key)
            torch.cuda.synchronize()

    @torch.inference_mode()
    def capture_all(self):
        """
        Capture every size, largest first, so that the smaller find room in what the larger leave. A
        step runs once before: that compiles its kernels.
        """
        most = max(2 * n + 4 * C + 1 + 3 * T for n, C, T in self.keys)
        self.static_inputs = torch.full((most,), self.nobody, device=self.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        before, started = torch.cuda.memory_reserved(), time.perf_counter()
        for i, (n, C, T) in enumerate(sorted(self.keys, key=lambda key: -key[0] - key[2])):
            print(
                f"\rCUDA graphs: {i + 1} of {len(self.keys)} ", end="", file=sys.stderr, flush=True
            )
            inputs = upload(self.inputs(Plan(), n, C, T), self.device, to=self.static_inputs)
            stream.wait_stream(torch.cuda.current_stream())  # where all that it reads was made
            with torch.cuda.stream(stream):
                self.compute(inputs, n, C, T)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = self.compute(inputs, n, C, T)
            self.graphs[n, C, T] = graph, *outputs
        print(file=sys.stderr)
        gc.collect()
        gc.freeze()  # what is there by now stays: to look through all of it would hold up a step for 50 ms
        taken = (torch.cuda.memory_reserved() - before) / 2**20, time.perf_counter() - started
        self.graph_statement = "{} CUDA graphs, {:,.0f} MiB, captured in {:.1f} s".format(
            len(self.graphs), *taken
        )


def to_host(tensors) -> list[torch.Tensor]:
    """Start to copy tensors of the device."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]


def rows_of(tensors: list[torch.Tensor]) -> list[list]:
    columns = [tensor.tolist() for tensor in tensors]
    return [list(row) for row in zip(*columns, strict=True)]


def sampling_row(r: Request) -> Row:
    params = r.params or GREEDY
    return Row(
        r.row,
        params,
        params.seed or 0,
        r.choice,
        r.prompt_tokens,
        r.generated_tokens,
        r.stop_token_ids,
    )


def num_scored(request: Request, n: int) -> int:
    """
    How many of a request's next n prefill tokens predict a token of its prompt that is to be
    scored.
    """
    if (
        request.prompt_logprobs is None or request.generated_tokens
    ):  # the latter: computed again after a preemption
        return 0
    return min(n, len(request.prompt_tokens) - 1 - request.prefill_cursor)
