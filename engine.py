"""
One step of serving: plan -> batch -> forward -> sample -> update.

    engine = Engine(load_checkpoint("out/stdlib"))
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))     # prompts and answers are lists of token ids

The `Scheduler` (paged.py) decides what a step computes, the `Runner` here computes it on the device, the `Engine` ties
both to requests that come and go. `run` is the engine's own loop, for a thread or a process of its own.
Letters: B requests, T tokens, M blocks per table, S block size, R sampled tokens.
"""

import gc
import json
import os
import random
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import torch

import kernels
from model import GPT, GPTConfig, packed_for_cpu
from paged import KVBlockPool, Plan, Request, Scheduler
from sampling import GREEDY, Row, SamplingParams, SamplingRows, logprobs, sample, upload

# ----------------------------------------------------------------------------------------------------------------------
# The device side of a step


@dataclass
class InFlight:
    """A step under way: its plan, and where its results arrive."""

    plan: Plan
    tokens: torch.Tensor  # on the host; of the decodes, padding, and the chunks
    wanted: list[int]  # where those of plan.sampled are among them
    scores: list[tuple]  # (what is scored, log-probabilities, the likeliest ids, theirs), tensors on the host
    done: torch.cuda.Event | None = None


class Runner:
    """
    The model, the KV pool, and what the device must know of each running request, in arrays indexed by its row. A plan
    carries only what changed; the last token, its position and the block table are already here. Nothing here waits
    for the device but `collect`. The last row is nobody's: padding uses it, and its block table is all sink.

    On CUDA with Triton, steps are padded to a few sizes, each captured once as a CUDA graph: forward, sampling and the
    update of these arrays are one launch.
    """

    def __init__(
        self,
        model: GPT,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        attention="auto",
        quantize="none",
        graphs=True,
        token_budget=0,  # of the largest step that is captured
    ):
        config, device = model.config, model.wte.weight.device
        self.model, self.block_size, self.device = packed_for_cpu(model, quantize), block_size, device
        self.backend = kernels.choose_backend(attention, device)
        heads = config.n_kv_head, config.head_size
        self.pool = KVBlockPool(num_blocks, block_size, config.n_layer, *heads, device, kv_dtype(model))
        M, N = -(-config.context_length // block_size), max_num_seqs
        self.last_token = torch.zeros(N + 1, dtype=torch.int64, device=device)  # the next input of a decode
        self.context_len = torch.zeros(N + 1, dtype=torch.int64, device=device)  # tokens in the pool
        self.block_tables = torch.full((N + 1, M), self.pool.sink, dtype=torch.int32, device=device)
        self.sampling = SamplingRows(N + 1, config.vocab_size, device)
        self.nobody = N
        self.last_inputs = array("q")  # what `static_inputs`, the graphs' input, begins with now
        self.scored_rows: set[int] = set()  # whose tokens' log-probabilities are wanted
        padded = device.type == "cuda" and self.backend.name == "triton"
        self.sizes = [n for n in (1, 2, 4, *range(8, N, 8)) if n < N] + [N] if padded else []
        coarse = [n for n in self.sizes if n in (8, 32, 64, 128, 256, N)]  # with N, no step has too many decodes
        # decodes, chunks and their tokens: to these a step is padded where one is large enough, graphs or not
        self.keys = [(n, 0, 0) for n in self.sizes]
        mixed = [128 << i for i in range(20) if 128 << i < token_budget] + [token_budget] * (token_budget > 0)
        self.keys += [(n, max(8, T // 64), T) for T in mixed for n in coarse]
        self.graphs: dict[tuple, tuple] = {}  # one of the keys -> (graph, its outputs)
        self.num_rows = self.num_padded_rows = 0  # of decodes, and of padding among them
        if graphs and padded:
            self.capture_all()

    # -- host to device ------------------------------------------------------------------------------------------------

    def bring_up_to_date(self, plan: Plan):
        """Tell the device's arrays what the plan has changed; of new blocks, `inputs` tells."""
        if plan.copies:  # before the step writes into them
            self.pool.copy_blocks(*upload([list(plan.copies), list(plan.copies.values())], self.device))
        if plan.admitted:
            self.place(*plan.admitted)

    def place(self, *requests: Request):
        """Fill the rows of requests that start to run, start again, or were forked."""
        starts = [(r.row, (r.generated_tokens or r.prompt_tokens)[-1], r.num_filled_slots) for r in requests]
        rows, last_token, context_len = upload(starts, self.device).unbind(1)
        self.last_token[rows], self.context_len[rows] = last_token, context_len
        entries = chain.from_iterable((r.row, i, b) for r in requests for i, b in enumerate(r.block_table))
        rows, columns, blocks = upload(array("q", entries), self.device).view(-1, 3).unbind(1)
        self.block_tables[rows, columns] = blocks.int()
        self.sampling.set(*map(sampling_row, requests))
        for r in requests:
            scored = r.params is not None and r.params.logprobs is not None
            (self.scored_rows.add if scored else self.scored_rows.discard)(r.row)

    def padded_sizes(self, plan: Plan) -> tuple[int, int, int]:
        """Decodes, chunks and tokens of chunks that a step is padded to: one of the keys, if one is large enough."""
        n, C, T = len(plan.decodes), len(plan.chunks), plan.num_tokens - len(plan.decodes)
        if not self.sizes:
            return n, C, T
        fitting = [key for key in self.keys if key[0] >= n and key[1] >= C and key[2] >= T and bool(key[1]) == bool(C)]
        if fitting:
            return min(fitting, key=lambda key: (key[2], key[0]))
        return self.sizes[bisect_left(self.sizes, n)] if n else 0, C, T

    def inputs(self, plan: Plan, n: int, C: int, T: int) -> array:
        """
        What the device does not know yet: whose turn it is, who begins which block and, of chunks, their tokens. Padded
        to n decodes, C chunks with T tokens together; the parts are those that `compute` splits it into.
        """
        nobody, chunks, grown = self.nobody, plan.chunks, set(plan.grown)
        packed = [r.row for r in plan.decodes] + [nobody] * (n - len(plan.decodes))
        packed += [r.block_table[-1] if r in grown else -1 for r in plan.decodes] + [-1] * (n - len(plan.decodes))
        if C:
            none, starts = [nobody] * (C - len(chunks)), list(accumulate((m for _, m in chunks), initial=0))
            padding = T - starts[-1]
            packed += [r.row for r, _ in chunks] + none
            packed += [r.row if r.prefill_cursor + m == r.prefill_target else nobody for r, m in chunks] + none
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

    # -- a step on the device ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: Plan) -> InFlight:
        """Start to compute a plan, and to bring its results to the host."""
        wanted, n, tokens, logits, x = self.start(plan)
        scores = self.score(plan, wanted, n, tokens, logits, x)
        flight = InFlight(plan, tokens.to("cpu", non_blocking=True), wanted, scores)
        if tokens.is_cuda:
            flight.done = torch.cuda.Event()
            flight.done.record()
        return flight

    def start(self, plan: Plan):
        """
        Start to compute a plan: write the K, V of its tokens, and sample. Returns where the requests of plan.sampled
        are, the number of decodes with padding, and what `compute` does.
        """
        self.bring_up_to_date(plan)
        n, C, T = self.padded_sizes(plan)
        wanted = list(range(len(plan.decodes)))
        wanted += [n + i for i, (r, m) in enumerate(plan.chunks) if r.prefill_cursor + m == r.prefill_target]
        self.num_rows, self.num_padded_rows = self.num_rows + n, self.num_padded_rows + n - len(plan.decodes)
        inputs = self.inputs(plan, n, C, T)
        if (n, C, T) not in self.graphs:
            return wanted, n, *self.compute(upload(inputs, self.device), n, C, T, plan)
        graph, *outputs = self.graphs[n, C, T]
        if inputs != self.last_inputs:  # else the same requests decode on in their blocks: it is all there
            self.static_inputs[: len(inputs)] = upload(inputs, self.device)
            self.last_inputs = inputs
        graph.replay()
        return wanted, n, *outputs

    def compute(self, inputs: torch.Tensor, n: int, C: int, T: int, plan: Plan | None = None):
        """
        A step of n decodes and C chunks of T tokens together, from `inputs`. Returns the sampled tokens [n + C] of all
        of them, their logits (n + C, V), and what the last layer says of each token, (n + T, width). The host looks at
        no tensor, and at `plan` only for what spares work (None: a graph is captured).
        """
        rows, S, device = inputs[:n], self.block_size, inputs.device
        decode_inputs = kernels.decode_inputs_triton if self.sizes and n else kernels.decode_inputs
        of_decodes = decode_inputs(rows, inputs[n : 2 * n], self.last_token, self.context_len, self.block_tables, S)
        tokens, positions, slots, context_lens, tables = of_decodes
        query_start, sampling_rows = torch.arange(n + C + 1, dtype=torch.int32, device=device), rows
        if C:
            parts = inputs[2 * n :].split((C, C, C + 1, C, T, T, T))
            chunk_rows, chunk_sampling_rows, starts, lens, chunk_tokens, chunk_positions, row_of = parts
            chunk_slots = self.block_tables[row_of, chunk_positions // S] * S + chunk_positions % S
            of_chunks = chunk_tokens, chunk_positions, chunk_slots, lens.int(), self.block_tables[chunk_rows]
            tokens, positions, slots, context_lens, tables = map(torch.cat, zip(of_decodes, of_chunks, strict=True))
            sampling_rows, rows = torch.cat([rows, chunk_sampling_rows]), torch.cat([rows, chunk_rows])
            query_start = torch.cat([query_start[:n], (n + starts).int()])
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
            block_tables=tables if self.sizes else tables[:, : -(-max(lens) // S)],  # no wider than is needed
            rows=rows,
            logits_index=query_start[1:] - 1 if C else query_start[:n],  # the same: 0, 1, ..
            num_decodes=n,
            query_lens_host=[1] * n + [m for _, m in chunks],
            context_lens_host=lens,
            backend=self.backend,
        )
        batch.prepared = self.backend.prepare(batch, self.model.config.n_head, self.pool.kv[0])
        x = self.model.forward_paged(batch, self.pool.kv)  # (n + T, width)
        logits = self.model.logits(x[batch.logits_index] if C else x)  # (n + C, V)
        asked = None
        if plan:
            whom = plan.decodes + [None] * (n - len(plan.decodes)) + [r for r, _ in plan.chunks]
            asked = [GREEDY if r is None else r.params or GREEDY for r in whom]
        sampled = sample(logits, sampling_rows, context_lens, self.sampling, asked)
        self.last_token[sampling_rows] = sampled.clamp(min=0)  # the next input, without a way through the host
        return sampled, logits, x

    def score(self, plan: Plan, wanted: list[int], n: int, tokens, logits, x) -> list[tuple]:
        """Start to score the sampled tokens of requests that want it, and the prompts that are to be scored."""
        found = []
        whom = zip(plan.sampled, wanted, strict=True) if self.scored_rows else ()
        if asked := [(r, i) for r, i in whom if r.row in self.scored_rows]:
            at, most = upload([i for _, i in asked], self.device), max(r.params.logprobs for r, _ in asked)
            found.append(([r for r, _ in asked], *logprobs(logits[at], tokens[at], most)))
        for request, m in plan.chunks:
            if count := num_scored(request, m):
                start = request.prefill_cursor + 1
                targets = upload(request.prompt_tokens[start : start + count], self.device)
                scored = logprobs(self.model.logits(x[n : n + count]), targets, request.prompt_logprobs)
                found.append(((request, request.prefill_cursor), *scored))
            n += m
        return [(whom, *(part.to("cpu", non_blocking=True) for part in parts)) for whom, *parts in found]

    def collect(self, flight: InFlight) -> list[int]:
        """Wait for a step; the tokens of plan.sampled. Fills plan.logprobs and plan.prompt_scores."""
        if flight.done:
            flight.done.synchronize()
        for whom, *parts in flight.scores:
            rows = [list(row) for row in zip(*(part.tolist() for part in parts), strict=True)]
            if isinstance(whom, list):
                flight.plan.logprobs.update(zip(whom, rows, strict=True))
            else:
                flight.plan.prompt_scores[whom[0]] = whom[1], rows
        tokens, wanted = flight.tokens.tolist(), flight.wanted
        return tokens[: len(wanted)] if wanted[-1:] == [len(wanted) - 1] else [tokens[i] for i in wanted]

    def run(self, plan: Plan) -> list[int]:
        """Compute a plan and wait for its tokens, one for each of `plan.sampled`."""
        return self.collect(self.launch(plan))

    # -- CUDA graphs ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self):
        """Compute the largest step there is, of padding alone: so its kernels are compiled, and its memory is taken."""
        for key in sorted(self.keys, key=lambda key: key[0] + key[2])[-1:]:
            self.compute(upload(self.inputs(Plan(), *key), self.device), *key)
            torch.cuda.synchronize()

    @torch.inference_mode()
    def capture_all(self):
        """
        Capture every size, largest first, so that the smaller find room in what the larger leave. A step runs once
        before: that compiles its kernels.
        """
        most = max(2 * n + 4 * C + 1 + 3 * T for n, C, T in self.keys)
        self.static_inputs = torch.full((most,), self.nobody, device=self.device)
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        before, started = torch.cuda.memory_reserved(), time.perf_counter()
        for i, (n, C, T) in enumerate(sorted(self.keys, key=lambda key: -key[0] - key[2])):
            print(f"\rCUDA graphs: {i + 1} of {len(self.keys)} ", end="", file=sys.stderr, flush=True)
            empty = upload(self.inputs(Plan(), n, C, T), self.device)
            inputs = self.static_inputs[: len(empty)]
            inputs.copy_(empty)
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
        self.graph_statement = "{} CUDA graphs, {:,.0f} MiB, captured in {:.1f} s".format(len(self.graphs), *taken)


def sampling_row(r: Request) -> Row:
    params = r.params or GREEDY
    return Row(r.row, params, params.seed or 0, r.choice, r.prompt_tokens, r.generated_tokens, r.stop_token_ids)


def num_scored(request: Request, n: int) -> int:
    """How many of a request's next n prefill tokens predict a token of its prompt that is to be scored."""
    if request.prompt_logprobs is None or request.generated_tokens:  # the latter: computed again after a preemption
        return 0
    return min(n, len(request.prompt_tokens) - 1 - request.prefill_cursor)


# ----------------------------------------------------------------------------------------------------------------------
# The engine


class Output(NamedTuple):
    """What a step brought for one request."""

    id: int | str
    tokens: list[int]  # new ones; a stop token is included
    finish_reason: str | None = None  # stop, length or error; None while it goes on
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None
    logprobs: list | None = None  # [log-probability of the token, the likeliest ids, their log-probabilities]
    prompt_logprobs: list[list] | None = None  # with the first token: such a score of each prompt token but the first


def kv_dtype(model: GPT) -> torch.dtype:
    """K and V are kept as the model computes; in fp32 on a CPU, where attention of one query in bf16 is slow."""
    weight = model.wte.weight
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


def bytes_per_block(model: GPT, block_size: int) -> int:
    """2 (K and V) * layers * KV heads * head size * block size * bytes each."""
    config = model.config
    return 2 * config.n_layer * config.n_kv_head * config.head_size * block_size * kv_dtype(model).itemsize


def blocks_that_fit(model: GPT, block_size: int) -> int:
    """
    How many KV blocks there is memory for, when nobody says: 90% of what is free on the GPU (the rest is for CUDA
    graphs), or a quarter of what is free on the CPU (others live there too), over the bytes of a block.
    """
    device = model.wte.weight.device
    if device.type == "cuda":
        available = 0.9 * torch.cuda.mem_get_info(device)[0]
    else:
        pages = (
            "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        )  # macOS has no free ones
        available = 0.25 * os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return int(available // bytes_per_block(model, block_size))


def check_pool_fits(model: GPT, num_blocks: int, block_size: int):
    """Raises ValueError for a pool larger than all the device's memory: reserving it can succeed, filling it cannot."""
    device = model.wte.weight.device
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1]
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (wanted := num_blocks * bytes_per_block(model, block_size)) > memory:
        raise ValueError(
            f"a KV pool of {num_blocks} blocks of {block_size} tokens takes {wanted / 2**30:,.1f} GiB, {device} has "
            f"{memory / 2**30:,.1f}: lower --kv-blocks or --block-size"
        )


def pool_size(model: GPT, num_blocks: int | None, block_size: int, max_num_seqs: int) -> int:
    """
    The number of blocks asked for, or, for None, what texts of full length for all rows take, as far as there is room.
    Raises ValueError for a pool that memory cannot hold.
    """
    if num_blocks is None:
        wanted = max_num_seqs * -(-model.config.context_length // block_size)
        num_blocks = max(1, min(wanted, blocks_that_fit(model, block_size)))
    check_pool_fits(model, num_blocks, block_size)
    return num_blocks


def longest_text(config: GPTConfig, num_blocks: int, block_size: int, max_model_len: int | None) -> int:
    """The longest prompt plus answer: what is asked for, or else possible. Raises ValueError for more than that."""
    most = min(config.context_length, num_blocks * block_size)
    if max_model_len is not None and not 1 <= max_model_len <= most:
        raise ValueError(
            f"max_model_len is {max_model_len}, possible is 1 to {most} (context length {config.context_length}, "
            f"KV pool of {num_blocks} blocks of {block_size}): lower --max-model-len or raise --kv-blocks"
        )
    return max_model_len or most


def step_size(on_gpu: bool, max_num_seqs: int | None, token_budget: int | None) -> tuple[int, int]:
    """The most requests and tokens of a step: what is asked for, or else suits the device. May raise ValueError."""
    max_num_seqs = max_num_seqs or (256 if on_gpu else 64)
    token_budget = token_budget or max(8192 if on_gpu else 512, max_num_seqs)
    if token_budget < max_num_seqs:
        raise ValueError(
            f"token_budget is {token_budget}, wanted at least max_num_seqs, {max_num_seqs}, so that every running "
            "request can decode in every step: raise --token-budget or lower --max-num-seqs"
        )
    return max_num_seqs, token_budget


class Engine:
    """Requests in, tokens out, a step at a time. All its methods belong to one thread."""

    def __init__(
        self,
        model: GPT,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,  # None: room for max_num_seqs texts of full length, as far as memory allows
        max_num_seqs: int | None = None,  # None: 256 on a GPU, 64 on a CPU
        token_budget: int | None = None,  # tokens computed in a step; None: 8192 on a GPU, 512 on a CPU
        max_model_len: int | None = None,  # longest prompt plus answer; None: what model and pool allow
        attention: str = "auto",
        quantize: str = "none",  # or int8: weights and the rows that they multiply as integers; on a CPU
        prefix_cache: bool = True,
        policy: str = "fcfs",
        prefill_share: float = 0.25,  # of the token budget, for prompts while some are under way
        max_num_partial_prefills: int = 4,  # prompts that split the prefill tokens of a step evenly
        max_long_partial_prefills: int = 1,  # of these, how many may be long; short ones overtake the other long ones
        long_prefill_threshold: int = 512,  # long: more tokens than this, prefix hits aside
        watermark: float = 0.01,  # share of the blocks kept free for running requests when a new one is admitted
        seed: int = 0,  # of the seeds drawn for requests that bring none
        graphs: bool = True,  # on CUDA: capture steps; without, the same sizes run launch by launch
        overlap: bool | None = None,  # plan a step while the one before runs; None: on CUDA
        trace: bool = False,  # print each step
        check: bool = False,  # verify the scheduler's invariants after each step
    ):
        on_gpu = model.wte.weight.is_cuda
        max_num_seqs, token_budget = step_size(on_gpu, max_num_seqs, token_budget)
        self.config = model.config
        shape = {"block_size": block_size, "max_num_seqs": max_num_seqs, "token_budget": token_budget}
        build = partial(Runner, model, attention=attention, quantize=quantize, **shape)
        if on_gpu and num_blocks is None:  # what a step takes is not free for the pool
            build(num_blocks=1, graphs=False).warm_up()
        self.num_blocks = num_blocks = pool_size(model, num_blocks, block_size, max_num_seqs)
        self.max_model_len = longest_text(model.config, num_blocks, block_size, max_model_len)
        self.scheduler = Scheduler(
            policy,
            token_budget,
            num_blocks * block_size,
            block_size,
            max_num_seqs=max_num_seqs,
            watermark=int(watermark * num_blocks),
            prefill_share=prefill_share,
            max_num_partial_prefills=max_num_partial_prefills,
            max_long_partial_prefills=max_long_partial_prefills,
            long_prefill_threshold=long_prefill_threshold,
            prefix_cache=prefix_cache,
        )
        self.weights = f"{sum(w.nbytes for w in model.parameters()) / 2**20:,.0f} MiB of weights"
        self.weights += f" ({str(model.wte.weight.dtype).removeprefix('torch.')}, quantize {quantize})"
        try:
            self.runner = build(num_blocks=num_blocks, graphs=graphs)
        except torch.OutOfMemoryError as error:
            wanted = f"{self.weights} and a KV pool of {num_blocks} blocks of {block_size}"
            mend = "lower --kv-blocks, --max-num-seqs or --token-budget, or try --no-graphs"
            raise ValueError(f"the GPU has no memory for {wanted}: {mend} ({error})") from error
        self.overlap = on_gpu if overlap is None else overlap
        self.in_flight: InFlight | None = None
        self.requests: dict[int | str, Request] = {}  # waiting or running
        self.num_choices: dict[int | str, int] = {}  # of those whose other choices are still to be forked
        self.prompt_scores: dict[int | str, list] = {}  # of those whose prompts are being scored
        self.seeds = random.Random(seed)
        self.waited: list[float] = []  # seconds in the queue, of those admitted since the last `stats`
        self.trace, self.check = trace, check
        self.num_steps = self.num_prefill_tokens = self.num_decode_tokens = 0

    def statement(self) -> str:
        """What was built: memory, room, graphs and the way of attention, to be said once before it serves."""
        runner, S = self.runner, self.scheduler.block_size
        tokens, backend = self.num_blocks * S, runner.backend
        parts = [
            f"{self.weights}; KV pool of {runner.pool.kv.nbytes / 2**20:,.0f} MiB: {self.num_blocks:,} blocks of {S}, "
            f"{tokens:,} tokens, {tokens // self.max_model_len} texts of {self.max_model_len:,}",
            f"attention: {backend.name}, {backend.reason}",
        ]
        if runner.graphs:
            parts.append(runner.graph_statement)
        return "; ".join(parts)

    @property
    def has_work(self) -> bool:
        return self.in_flight is not None or not self.scheduler.is_done()

    def add_request(
        self,
        id: int | str,
        prompt_tokens: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        n: int = 1,
        prompt_logprobs: int | None = None,
        cache_salt: str = "",
    ) -> Request:
        """
        Queue a request; with the priority policy, a lower priority is served first. With n > 1, further choices with
        the ids "id.1", "id.2", ... are forked from it once its prompt is computed; should it fail before, they never
        are. Raises ValueError at once, with the numbers, for what can never be served.
        """
        prompt_tokens, V = list(prompt_tokens), self.config.vocab_size
        params.check_vocabulary(V)
        if type(n) is not int or n < 1:
            raise ValueError(f"n is {n!r}: wanted a whole number, at least 1")
        if prompt_logprobs is not None and not (type(prompt_logprobs) is int and 0 <= prompt_logprobs <= V):
            raise ValueError(f"prompt_logprobs is {prompt_logprobs!r}: wanted 0 to {V}, or None")
        for taken in (id, *(f"{id}.{choice}" for choice in range(1, n))):
            promised = any(taken == f"{first}.{i}" for first, m in self.num_choices.items() for i in range(1, m))
            if taken in self.requests or promised:
                raise ValueError(f"request id {taken!r} is in use: choose another")
        if not prompt_tokens:
            raise ValueError("the prompt is empty: give it at least one token")
        for t in prompt_tokens:
            if type(t) is not int or not 0 <= t < V:  # an array's numbers are no int either: .tolist() makes them so
                raise ValueError(
                    f"the prompt has token {t!r}, outside 0..{V - 1}: encode it with this model's tokenizer, to a list"
                )
        wanted = len(prompt_tokens) + params.max_tokens
        if wanted > self.max_model_len:
            raise ValueError(
                f"{len(prompt_tokens)} prompt tokens + {params.max_tokens} max_tokens = {wanted} do not fit into "
                f"{self.max_model_len} (context length {self.config.context_length}, KV pool of {self.num_blocks} "
                f"blocks of {self.scheduler.block_size}): shorten the prompt, or lower max_tokens"
            )
        eos = () if params.ignore_eos or self.config.eos_token_id is None else (self.config.eos_token_id,)
        request = Request(
            id,
            prompt_tokens,
            params.max_tokens,
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=frozenset(params.stop_token_ids).union(eos),
            params=params if params.seed is not None else replace(params, seed=self.seeds.getrandbits(63)),
        )
        self.scheduler.add_request(request)
        self.requests[id] = request
        if n > 1:
            self.num_choices[id] = n
        return request

    def _fork_choices(self, first: Request):
        """
        The other choices of a prompt that was just computed. A fork shares all its blocks and computes only its last
        token again, which gives the logits to sample from. Where that cannot be (no row is free, the first choice has
        ended, the last block is full and committed) a choice waits like any request and finds the blocks in the cache.
        """
        P = len(first.prompt_tokens)
        can_share = first.status == "active" and first.num_committed * self.scheduler.block_size < P
        for choice in range(1, self.num_choices.pop(first.id, 1)):
            id, own = f"{first.id}.{choice}", {"choice": choice, "prompt_logprobs": None}
            if can_share and self.scheduler.free_rows:
                own["block_table"] = first.block_table[: self.scheduler.blocks_for(P)]
                fork = self.scheduler.fork(first, id, generated_tokens=[], num_filled_slots=P - 1, **own)
                self.runner.place(fork)
            else:
                shared = ("prompt_tokens", "max_new_tokens", "arrival_time", "priority", "stop_token_ids", "cache_salt")
                same = {name: getattr(first, name) for name in (*shared, "params")}
                fork = Request(id, **same, **own)
                self.scheduler.add_request(fork)
            self.requests[id] = fork

    def abort(self, id: int | str):
        """Forget a request in whatever state, and free its blocks. One that has finished already is no error."""
        self.num_choices.pop(id, None), self.prompt_scores.pop(id, None)
        request = self.requests.pop(id, None)
        if request is not None:
            request.finish_reason = "abort"
            self.scheduler.complete(request)

    def step(self) -> list[Output]:
        """
        Compute one step; with overlap, start one and return what the one before has brought, so that the host works
        while the device does. Should a step fail, the requests that took part end with an error and the others go on.
        """
        outputs, flight = self._launch()
        if self.overlap:
            flight, self.in_flight = self.in_flight, flight
        return outputs + self._collect(flight) if flight else outputs

    def _launch(self) -> tuple[list[Output], InFlight | None]:
        plan = self.scheduler.plan(self.num_steps)
        if not plan.num_tokens:
            return [], None
        self.num_steps += 1
        try:
            if self.check:
                self.scheduler.check(plan)
            flight = self.runner.launch(plan)
        except BaseException as error:
            return self._fail(plan, error), None
        if self.trace:
            print(describe(plan, self.scheduler))
        now = time.monotonic()
        self.waited += [now - r.arrival_time for r in plan.admitted if not r.num_preemptions]
        self.num_decode_tokens += len(plan.decodes)
        self.num_prefill_tokens += plan.num_tokens - len(plan.decodes)
        self.scheduler.advance(plan)
        return [], flight

    def _collect(self, flight: InFlight) -> list[Output]:
        plan = flight.plan
        try:
            tokens = self.runner.collect(flight)
        except BaseException as error:
            return self._fail(plan, error)
        for request, (start, found) in plan.prompt_scores.items():
            if self.requests.get(request.id) is request:  # not aborted since
                self.prompt_scores.setdefault(request.id, [])[start:] = found  # after a preemption, from 0 again
        live = [r.num_to_come for r in plan.sampled]  # the others have ended since they were planned
        for request in self.scheduler.resolve(plan, tokens):
            del self.requests[request.id]
        for request in plan.sampled[len(plan.decodes) :] if self.num_choices else ():
            if request.num_generated:  # not aborted since
                self._fork_choices(request)
        if self.check:
            self.scheduler.check()
        new = [(r, token) for r, token, n in zip(plan.sampled, tokens, live, strict=True) if n]
        if plan.logprobs or self.prompt_scores or min(tokens, default=0) < 0:
            return [self._output(r, token, plan) for r, token in new]
        return [Output(r.id, [token], r.finish_reason, r.num_hit_tokens) for r, token in new]  # the hot loop

    def _output(self, r: Request, token: int, plan: Plan) -> Output:
        if token < 0:  # the sampler's word for logits that are not numbers
            self.abort(r.id)
            return Output(r.id, [], "error", error="the model's logits are not numbers: its weights are broken")
        found = plan.logprobs.get(r), self.prompt_scores.pop(r.id, None)
        return Output(r.id, [token], r.finish_reason, r.num_hit_tokens, None, *found)

    def _fail(self, plan: Plan, error: BaseException) -> list[Output]:
        """
        End whoever took part in a step: what it wrote of their K, V and device state is unknown, after Ctrl-C too,
        which goes on from here.
        """
        took_part = dict.fromkeys(plan.decodes + [r for r, _ in plan.chunks] + plan.admitted)
        failed = [r for r in took_part if self.requests.get(r.id) is r]  # the others have ended since
        for request in failed:
            self.abort(request.id)
            request.finish_reason = "error"
        if not isinstance(error, Exception):
            raise error
        return [Output(r.id, [], "error", error=f"{type(error).__name__}: {error}") for r in failed]

    def generate(
        self, prompts: Iterable[list[int]], params: SamplingParams | list[SamplingParams], progress: bool = True
    ) -> list[list[int]]:
        """
        Continue all prompts (lists of token ids), batched continuously, by one SamplingParams or one for each prompt.
        Returns the answers in order, a stop token included. Raises ValueError for what does not fit, RuntimeError if a
        step failed; either way, and after Ctrl-C, nothing of the call stays in the engine.
        """
        prompts = list(prompts)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        requests = []
        try:
            for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
                requests.append(self.add_request(f"generate-{i}", prompt, p))
            self._run_until_done(len(prompts), progress)
        finally:
            for request in requests:
                self.abort(request.id)
            if not self.requests:
                self.in_flight = None  # what is on the device's stream is before whatever uses its blocks again
        return [r.generated_tokens for r in requests]

    def _run_until_done(self, total: int, progress: bool):
        """Step until idle, with a progress bar on stderr a few times a second and the counts at the end."""
        started, before, done, shown = time.perf_counter(), self.counts(), 0, 0.0
        while self.has_work:
            for output in self.step():
                if output.error:
                    raise RuntimeError(f"request {output.id} failed: {output.error}")
                done += output.finish_reason is not None
            seconds = time.perf_counter() - started
            new = self.num_decode_tokens - before["decode tokens"]
            if progress and (seconds - shown > 0.2 or not self.has_work):
                shown = seconds
                bar = "=" * (20 * done // total)
                print(f"\r[{bar:20}] {done}/{total} requests, {new / seconds:,.0f} tok/s", end="", file=sys.stderr)
        if progress:
            print("\n" + self.summary(before, time.perf_counter() - started), file=sys.stderr)

    def counts(self) -> dict[str, int]:
        """Running totals since the engine was built."""
        return {
            "steps": self.num_steps,
            "prefill tokens": self.num_prefill_tokens,
            "decode tokens": self.num_decode_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "queried tokens": self.scheduler.num_queried_tokens,
            "hit tokens": self.scheduler.num_hit_tokens,
        }

    def stats(self) -> dict:
        """What a server's metrics show; `waited` is in seconds, one for each request admitted since the last time."""
        scheduler, waited, self.waited = self.scheduler, self.waited, []
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_usage": 1 - scheduler.block_allocator.num_free / self.num_blocks,
            "queries": scheduler.num_queried_tokens,
            "hits": scheduler.num_hit_tokens,
            "preemptions": scheduler.num_preemptions,
            "waited": waited,
        }

    def summary(self, before: dict[str, int], seconds: float) -> str:
        """What happened since the counts were `before`; the peak is of the engine's whole life."""
        new = {name: count - before[name] for name, count in self.counts().items()}
        hit_rate = new.pop("hit tokens") / max(1, new.pop("queried tokens"))
        counts = ", ".join(f"{count:,} {name}" for name, count in new.items())
        peak = f"peak {self.scheduler.peak_blocks} of {self.num_blocks} blocks"
        return f"{counts}, prefix hit rate {hit_rate:.0%}, {peak}, {seconds:.2f} s"

    @torch.inference_mode()
    def beam_search(self, prompt_tokens: list[int], width: int, max_tokens: int) -> list[tuple[list[int], float]]:
        """
        The `width` likeliest answers that beam search finds, best first, each with its log-probability; an answer ends
        at max_tokens or after the end-of-text token. Beams are forks: they share the blocks of what they have in
        common, and copy the last one on write. Needs the engine for itself; raises ValueError for what does not fit.
        """
        self._check_beams(len(prompt_tokens), width, max_tokens)
        first = self.add_request("beam", prompt_tokens, replace(GREEDY, max_tokens=max_tokens, ignore_eos=True))
        beams, answers = {first: 0.0}, []  # request -> log-probability; (tokens, log-probability), best first
        try:
            # log-probabilities only fall: a beam behind the worst of enough answers stays behind
            while beams and (len(answers) < width or max(beams.values()) > answers[-1][1]):
                plan = self.scheduler.plan(self.num_steps)
                self.num_steps += 1
                wanted, _, _, logits, _ = self.runner.start(plan)
                if not plan.sampled:  # a long prompt takes several steps
                    self.scheduler.update(plan, [])
                    continue
                beams, ended = self._extend_beams(plan, beams, logits[wanted].float().log_softmax(-1), width)
                answers = sorted(answers + ended, key=lambda answer: -answer[1])[:width]
        finally:
            for request in list(self.requests.values()):
                self.abort(request.id)
        return answers

    def _check_beams(self, P: int, width: int, max_tokens: int):
        """Raises ValueError unless `width` beams of P + max_tokens tokens have rows and blocks, all at once."""
        S, rows = self.scheduler.block_size, self.scheduler.max_num_seqs
        if self.has_work:
            raise ValueError(f"beam search needs the engine for itself, {len(self.requests)} requests are under way")
        if not 1 <= width <= rows:
            raise ValueError(
                f"a beam width of {width} needs as many rows, there are {rows}: change width or max_num_seqs"
            )
        needed = P // S + width * (self.scheduler.blocks_for(P + max_tokens) - P // S)  # full prompt blocks are shared
        if needed > self.num_blocks:
            raise ValueError(
                f"{width} beams need {needed} blocks, the pool has {self.num_blocks}: change width or pool"
            )

    def _extend_beams(self, plan: Plan, beams: dict[Request, float], logprobs: torch.Tensor, width: int):
        """
        Replace the beams by their best `width` extensions, given the log-probabilities (R, V) of their next tokens.
        Returns these, {request: log-probability}, and the answers that ended here, [(tokens, log-probability)].
        """
        scores = logprobs + torch.tensor([[beams[r]] for r in plan.sampled], device=logprobs.device)
        V, best = scores.shape[1], scores.flatten().topk(min(2 * width, scores.numel()))  # at most `width` are ends
        ended, going = [], []  # (beam, token, log-probability), best first
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            beam, token = plan.sampled[index // V], index % V
            last = token == self.config.eos_token_id or beam.num_generated + 1 == beam.max_new_tokens
            (ended if last else going).append((beam, token, score))
        answers = [([*beam.generated_tokens, token], score) for beam, token, score in ended]
        own = {beam: token for beam, token, _ in reversed(going[:width])}  # each beam's first, its best, wins
        if not own:
            return {}, answers
        self.scheduler.update(plan, [own.get(beam, 0) for beam in plan.sampled])
        for beam in plan.sampled:
            if beam not in own:
                self.abort(beam.id)
        extended: dict[Request, float] = {}
        for beam, token, score in going[:width]:
            if beam in extended:  # its own way is taken: a fork goes this one
                beam = self.scheduler.fork(beam, f"beam-{self.scheduler.num_forks}")
                beam.generated_tokens[-1] = token
                self.requests[beam.id] = beam
            self.runner.place(beam)
            extended[beam] = score
        return extended, answers


def describe(plan: Plan, scheduler: Scheduler) -> str:
    """One line of trace: who decodes, which chunk of whom is prefilled, and how the blocks stand."""
    allocator, S = scheduler.block_allocator, scheduler.block_size
    chunks = [f"{r.id}[{r.prefill_cursor}:{r.prefill_cursor + n}]" for r, n in plan.chunks]
    used = sum(count > 0 for count in allocator.ref_counts)
    lengths = {r: r.num_filled_slots for r in scheduler.running}  # and after the step:
    for request, n in [(r, 1) for r in plan.decodes] + plan.chunks:
        lengths[request] += n
    filled = {b: min(S, n - i * S) for r, n in lengths.items() for i, b in enumerate(r.block_table[: -(-n // S)])}
    parts = [
        f"step {plan.step:4}",
        "decode " + (" ".join(str(r.id) for r in plan.decodes) or "-"),
        "prefill " + (" ".join(chunks) or "-"),
        f"blocks {len(allocator.free)} free {used} referenced {len(allocator.idle)} cached",
        f"slots {sum(filled.values())}/{used * S}",  # a block that several share counts once
        f"hits {sum(r.num_filled_slots for r in plan.admitted)}",
    ]
    if plan.preempted:
        parts.append("preempted " + " ".join(str(r.id) for r in plan.preempted))
    if plan.copies:
        parts.append("copied " + " ".join(f"{source}->{to}" for to, source in plan.copies.items()))
    return " | ".join(parts)


# ----------------------------------------------------------------------------------------------------------------------
# Two loops around a step: the tutorial's, and a server's


def interleaved_generate(
    model: GPT, requests: list[Request], policy: str = "fcfs", token_budget: int = 16, max_kv_tokens: int = 256
) -> Scheduler:
    """
    The tutorial's loop: serve all requests, greedily or by their `params`, in a pool of max_kv_tokens; the answers are
    in their `generated_tokens`. Returns the scheduler, for its counts.
    """
    for r in requests:
        if len(r.prompt_tokens) + r.max_new_tokens > model.config.context_length:
            raise ValueError(
                f"request {r.id}: {len(r.prompt_tokens)} prompt tokens + {r.max_new_tokens} new ones do not fit into "
                f"the context length of {model.config.context_length}: shorten one of them"
            )
    scheduler = Scheduler(policy, token_budget, max_kv_tokens, max_num_seqs=max(1, len(requests)))
    sizes = scheduler.block_allocator.num_blocks, scheduler.block_size, scheduler.max_num_seqs
    runner = Runner(model, *sizes, graphs=False)
    for request in requests:
        scheduler.add_request(request)
    step = 0
    while not scheduler.is_done():
        plan = scheduler.plan(step)
        scheduler.update(plan, runner.run(plan))
        step += 1
    return scheduler


def run(engine: Engine, inbox, outbox):
    """
    The engine's own loop, for a thread or a process: take in what has arrived, compute a step, send out what it
    brought, until told to stop or the other side is gone. `inbox` and `outbox` are ends of `multiprocessing.Pipe`s;
    messages are JSON, never pickles, so neither side can run code in the other:

        in   {"op": "add", "id", "prompt", "params", "options": more arguments of add_request, if any}
             {"op": "abort", "id"}   {"op": "stop"}
        out  {"op": "ready", "max_model_len", "max_num_seqs", "vocab_size", "eos_token_id"}
             {"op": "step", "out": [[id, tokens, finish_reason, cached_tokens, scores...], ...], "stats": of the engine}
             {"op": "error", "id", "message", "kind": "invalid" for what the client can change, else "internal"}
    """

    def send(op: str, **message):
        outbox.send_bytes(json.dumps({"op": op, **message}).encode())

    def take(message: dict) -> bool:
        if message["op"] == "add":
            params, options = message["params"], message.get("options", {})
            if bias := params.get("logit_bias"):
                params["logit_bias"] = {int(token): value for token, value in bias.items()}  # JSON's keys are texts
            try:
                engine.add_request(message["id"], message["prompt"], SamplingParams(**params), **options)
            except (ValueError, TypeError) as error:
                send("error", id=message["id"], message=str(error), kind="invalid")
        elif message["op"] == "abort":
            engine.abort(message["id"])
            if not engine.has_work:  # no step will tell
                send("step", out=[], stats=engine.stats())
        return message["op"] != "stop"

    limits = {"max_model_len": engine.max_model_len, "max_num_seqs": engine.scheduler.max_num_seqs}
    limits |= {"vocab_size": engine.config.vocab_size}
    try:
        send("ready", **limits, eos_token_id=engine.config.eos_token_id)
        while True:
            while not engine.has_work or inbox.poll():  # idle: wait for a message; busy: take those that are there
                if not take(json.loads(inbox.recv_bytes())):
                    return
            outputs = engine.step()
            for output in outputs:
                if output.error:
                    send("error", id=output.id, message=output.error, kind="internal")
            good = [o for o in outputs if not o.error]
            rows = [[o.id, o.tokens, o.finish_reason, o.cached_tokens] for o in good]
            for row, o in zip(rows, good, strict=True):
                if o.logprobs or o.prompt_logprobs:
                    row += [o.logprobs, o.prompt_logprobs]
            send("step", out=rows, stats=engine.stats())
    except (EOFError, BrokenPipeError):  # the server is gone: nobody is left to answer
        return
