"""
One step of serving: plan -> batch -> forward -> sample -> update.

    engine = Engine(load_checkpoint("out/stdlib"))
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))     # prompts and answers are lists of token ids

The `Scheduler` (paged.py) decides what a step computes, the `Runner` here computes it on the device, the `Engine` ties
both to requests that come and go. `run` is the engine's own loop, for a thread or a process of its own.
Letters: B requests, T tokens, M blocks per table, S block size, R sampled tokens.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

import kernels
from model import GPT, packed_for_cpu
from paged import KVBlockPool, Plan, Request, Scheduler
from sampling import GREEDY, SamplingParams, SamplingRows, sample

# ----------------------------------------------------------------------------------------------------------------------
# The device side of a step


class Runner:
    """
    The model, the KV pool, and what the device must know of each running request, in arrays indexed by its row. A plan
    carries only what changed; the last token, its position and the block table are already here.
    """

    def __init__(
        self, model: GPT, num_blocks: int, block_size: int, max_num_seqs: int, attention="auto", quantize="none"
    ):
        config, device = model.config, model.wte.weight.device
        self.model, self.block_size = packed_for_cpu(model, quantize), block_size
        self.backend = kernels.choose_backend(attention, device)
        heads = config.n_kv_head, config.head_size
        self.pool = KVBlockPool(num_blocks, block_size, config.n_layer, *heads, device, kv_dtype(model))
        M = -(-config.context_length // block_size)
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # the next input of a decode
        self.context_len = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # tokens in the pool
        self.block_tables = torch.zeros(max_num_seqs, M, dtype=torch.int32, device=device)
        self.sampling = SamplingRows(max_num_seqs, config.vocab_size, device)

    def tensor(self, values: list, dtype=torch.int64) -> torch.Tensor:
        """A list of the host on the model's device."""
        return torch.tensor(values, dtype=dtype, device=self.last_token.device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[int]:
        """Compute a plan: write the K, V of its tokens and return one token for each of `plan.sampled`."""
        batch = self.prepare(plan)
        logits = self.model.forward_paged(batch, self.pool.kv)  # (R, V)
        rows = self.tensor([r.row for r in plan.sampled])  # [R]
        positions = batch.positions[batch.logits_index] + 1  # [R], of the tokens to come
        tokens = sample(logits, rows, positions, self.sampling, [r.params or GREEDY for r in plan.sampled])
        self.last_token[rows] = tokens  # the next input, without a way through the host
        return tokens.tolist()

    def prepare(self, plan: Plan) -> kernels.Batch:
        """Bring the device's arrays up to date with the plan and lay its requests out on the flat token axis."""
        if plan.copies:  # before the step writes into them
            self.pool.copy_blocks(plan.copies)
        for request in plan.admitted:
            self.place(request)
        if plan.grown:  # one new block each, at the end of its table
            columns = self.tensor([len(r.block_table) - 1 for r in plan.grown])
            blocks = self.tensor([r.block_table[-1] for r in plan.grown], torch.int32)
            self.block_tables[self.tensor([r.row for r in plan.grown]), columns] = blocks
        batch = self.batch(plan)
        batch.prepared = self.backend.prepare(batch, self.model.config.n_head, self.pool.kv[0])
        self.context_len[batch.rows] = batch.context_lens.long()
        return batch

    def place(self, request: Request):
        """Fill the row of a request that starts to run, starts again, or was forked."""
        row, params = request.row, request.params or GREEDY
        self.last_token[row] = (request.generated_tokens or request.prompt_tokens)[-1]
        self.block_tables[row, : len(request.block_table)] = self.tensor(request.block_table, torch.int32)
        self.context_len[row] = request.num_filled_slots
        texts = request.prompt_tokens, request.generated_tokens, request.stop_token_ids
        self.sampling.set(row, params, params.seed or 0, request.choice, *texts)

    def batch(self, plan: Plan) -> kernels.Batch:
        """
        The plan on the flat token axis, decodes first. What a decode needs is on the device already; only the tokens of
        chunks come from the host.
        """
        requests = plan.decodes + [request for request, _ in plan.chunks]
        query_lens = [1] * len(plan.decodes) + [n for _, n in plan.chunks]
        context_lens = [r.num_filled_slots + n for r, n in zip(requests, query_lens, strict=True)]
        rows = self.tensor([r.row for r in requests])  # [B]
        row_of = rows  # [T], of each token
        tokens, positions = self.last_token[rows], self.context_len[rows]  # [B], right for decodes
        if plan.chunks:
            decodes = slice(len(plan.decodes))
            new = [t for r, n in plan.chunks for t in r.tokens_between(r.prefill_cursor, r.prefill_cursor + n)]
            at = [p for r, n in plan.chunks for p in range(r.prefill_cursor, r.prefill_cursor + n)]
            tokens = torch.cat([tokens[decodes], self.tensor(new)])  # [T]
            positions = torch.cat([positions[decodes], self.tensor(at)])
            row_of = rows.repeat_interleave(self.tensor(query_lens))
        S, M = self.block_size, -(-max(context_lens) // self.block_size)  # no wider than the longest context needs
        query_start, sampled = [0, *accumulate(query_lens)], set(plan.sampled)
        last = [end - 1 for r, end in zip(requests, query_start[1:], strict=True) if r in sampled]
        return kernels.Batch(
            tokens=tokens,
            positions=positions,
            slot_mapping=self.block_tables[row_of, positions // S].long() * S + positions % S,
            query_start=self.tensor(query_start, torch.int32),
            context_lens=self.tensor(context_lens, torch.int32),
            block_tables=self.block_tables[rows, :M],
            rows=rows,
            logits_index=self.tensor(last),
            num_decodes=len(plan.decodes),
            query_lens_host=query_lens,
            context_lens_host=context_lens,
            backend=self.backend,
        )


# ----------------------------------------------------------------------------------------------------------------------
# The engine


@dataclass
class Output:
    """What a step brought for one request."""

    id: int | str
    tokens: list[int]  # new ones; a stop token is included
    finish_reason: str | None = None  # stop, length or error; None while it goes on
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None


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
    How many KV blocks there is memory for, when nobody says: 90% of what is free on the GPU, or a quarter of what is
    free on the CPU (others live there too), over the bytes of a block.
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


class Engine:
    """Requests in, tokens out, a step at a time. All its methods belong to one thread."""

    def __init__(
        self,
        model: GPT,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,  # None: room for max_num_seqs texts of full length, as far as memory allows
        max_num_seqs: int = 64,
        token_budget: int = 512,
        max_model_len: int | None = None,  # longest prompt plus answer; None: what model and pool allow
        attention: str = "auto",
        quantize: str = "none",  # or int8: weights and the rows that they multiply as integers; on a CPU
        prefix_cache: bool = True,
        policy: str = "fcfs",
        prefill_share: float = 0.25,  # of the token budget, for prompts while some are under way
        watermark: float = 0.01,  # share of the blocks kept free for running requests when a new one is admitted
        seed: int = 0,  # of the seeds drawn for requests that bring none
        trace: bool = False,  # print each step
        check: bool = False,  # verify the scheduler's invariants after each step
    ):
        if token_budget < max_num_seqs:
            raise ValueError(
                f"token_budget is {token_budget}, wanted at least max_num_seqs, {max_num_seqs}, so that every running "
                "request can decode in every step: raise --token-budget or lower --max-num-seqs"
            )
        config = model.config
        if num_blocks is None:
            wanted = max_num_seqs * -(-config.context_length // block_size)
            num_blocks = max(1, min(wanted, blocks_that_fit(model, block_size)))
        check_pool_fits(model, num_blocks, block_size)
        self.config, self.num_blocks = config, num_blocks
        most = min(config.context_length, num_blocks * block_size)
        if max_model_len is not None and not 1 <= max_model_len <= most:
            raise ValueError(
                f"max_model_len is {max_model_len}, possible is 1 to {most} (context length {config.context_length}, "
                f"KV pool of {num_blocks} blocks of {block_size}): lower --max-model-len or raise --kv-blocks"
            )
        self.max_model_len = max_model_len or most
        self.scheduler = Scheduler(
            policy,
            token_budget,
            num_blocks * block_size,
            block_size,
            max_num_seqs=max_num_seqs,
            watermark=int(watermark * num_blocks),
            prefill_share=prefill_share,
            prefix_cache=prefix_cache,
        )
        self.runner = Runner(model, num_blocks, block_size, max_num_seqs, attention, quantize)
        self.requests: dict[int | str, Request] = {}  # waiting or running
        self.seeds = random.Random(seed)
        self.trace, self.check = trace, check
        self.num_steps = self.num_prefill_tokens = self.num_decode_tokens = 0

    @property
    def has_work(self) -> bool:
        return not self.scheduler.is_done()

    def add_request(
        self, id: int | str, prompt_tokens: list[int], params: SamplingParams, priority: int = 0
    ) -> Request:
        """
        Queue a request; with the priority policy, a lower priority is served first. Raises ValueError at once, with
        the numbers, for what can never be served.
        """
        prompt_tokens, V = list(prompt_tokens), self.config.vocab_size
        if id in self.requests:
            raise ValueError(f"request id {id!r} is in use: choose another")
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
            stop_token_ids=frozenset(params.stop_token_ids).union(eos),
            params=params if params.seed is not None else replace(params, seed=self.seeds.getrandbits(63)),
        )
        self.scheduler.add_request(request)
        self.requests[id] = request
        return request

    def abort(self, id: int | str):
        """Forget a request in whatever state, and free its blocks. One that has finished already is no error."""
        request = self.requests.pop(id, None)
        if request is not None:
            request.finish_reason = "abort"
            self.scheduler.complete(request)

    def step(self) -> list[Output]:
        """Compute one step. Should it fail, the requests that took part end with an error and the others go on."""
        plan = self.scheduler.plan(self.num_steps)
        self.num_steps += 1
        try:
            if self.check:
                self.scheduler.check(plan)
            tokens = self.runner.run(plan)
        except BaseException as error:
            failed = self._fail(plan, error)  # after Ctrl-C too: the device is ahead of the scheduler, no way back
            if isinstance(error, Exception):
                return failed
            raise
        if self.trace:
            print(describe(plan, self.scheduler))
        self.num_decode_tokens += len(plan.decodes)
        self.num_prefill_tokens += plan.num_tokens - len(plan.decodes)
        for request in self.scheduler.update(plan, tokens):
            del self.requests[request.id]
        if self.check:
            self.scheduler.check()
        return [Output(r.id, r.generated_tokens[-1:], r.finish_reason, r.num_hit_tokens) for r in plan.sampled]

    def _fail(self, plan: Plan, error: BaseException) -> list[Output]:
        """End whoever took part in a step: what it wrote of their K, V and device state is unknown."""
        failed = dict.fromkeys(plan.decodes + [r for r, _ in plan.chunks] + plan.admitted)
        for request in failed:
            self.abort(request.id)
            request.finish_reason = "error"
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
                logits = self.runner.model.forward_paged(self.runner.prepare(plan), self.runner.pool.kv)
                if not plan.sampled:  # a long prompt takes several steps
                    self.scheduler.update(plan, [])
                    continue
                beams, ended = self._extend_beams(plan, beams, logits.float().log_softmax(-1), width)
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
    runner = Runner(model, scheduler.block_allocator.num_blocks, scheduler.block_size, scheduler.max_num_seqs)
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

        in   {"op": "add", "id", "prompt", "params"}   {"op": "abort", "id"}   {"op": "stop"}
        out  {"op": "ready", "max_model_len", "vocab_size", "eos_token_id"}
             {"op": "step", "out": [[id, tokens, finish_reason, cached_tokens], ...]}
             {"op": "error", "id", "message", "kind": "invalid" for what the client can change, else "internal"}
    """

    def send(op: str, **message):
        outbox.send_bytes(json.dumps({"op": op, **message}).encode())

    def take(message: dict) -> bool:
        if message["op"] == "add":
            try:
                engine.add_request(message["id"], message["prompt"], SamplingParams(**message["params"]))
            except (ValueError, TypeError) as error:
                send("error", id=message["id"], message=str(error), kind="invalid")
        elif message["op"] == "abort":
            engine.abort(message["id"])
        return message["op"] != "stop"

    limits = {"max_model_len": engine.max_model_len, "vocab_size": engine.config.vocab_size}
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
            good = [[o.id, o.tokens, o.finish_reason, o.cached_tokens] for o in outputs if not o.error]
            if good:
                send("step", out=good)
    except (EOFError, BrokenPipeError):  # the server is gone: nobody is left to answer
        return
