"""
Requests in, tokens out: plan -> run -> update, a step at a time.

    engine = Engine(load_checkpoint("out/stdlib"), Settings(max_num_seqs=8))
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))   # lists of token ids

The `Scheduler` (paged.py) decides what a step computes, the `Runner` (runner.py) computes it on the
device, and the `Engine` ties both to requests that come and go: continuous batching. The server's
loop is in process.py, the post's at the end of this file.
"""

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from tqdm import tqdm

from common import plural
from engine.drafts import MOST_ROWS, MOST_ROWS_ON_GPU, Speculator, with_drafts
from engine.events import Recorder
from engine.grammar import soon
from engine.runner import InFlight, Runner, StepResult, kv_dtype, sampling_row
from engine.sizing import explain_lack_of_memory, with_pool_size, with_step_size
from engine.window import Window
from kernels import Batch
from model import GPT
from ops.choice import TORCH
from ops.inputs import flat_inputs, upload
from ops.sampling import SamplingRows, sample_torch
from paged import KVBlockPool, Plan, Request, Scheduler, SchedulerSettings
from params import NO_TOKEN, SamplingParams, Settings

MAX_DELAYS = 10_000  # of each kind are kept: `stats` empties them, but only servers call it


class Output(NamedTuple):
    """The result of a step for one request. A score: see `runner.StepResult`."""

    id: int | str
    tokens: list[int]  # new ones; a stop token is included
    finish_reason: str | None = None  # stop, length or error; None while it goes on
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None
    logprobs: list | None = None  # the score of the token
    # with the first token, if asked: the scores of all of the prompt's tokens but the first
    prompt_logprobs: list[list] | None = None


class Engine:
    """Requests come and go, `step` by step. Not thread-safe: one thread calls all methods."""

    def __init__(self, model: GPT, settings: Settings | None = None):
        """Raises ValueError for settings that cannot work here, with what to change."""
        on_gpu = model.wte.weight.is_cuda
        settings = with_step_size(settings or Settings(), on_gpu)
        if on_gpu and settings.num_blocks is None:  # what a step takes is not free for the pool
            with explain_lack_of_memory("the weights and a step"):
                Runner(model, replace(settings, num_blocks=1, graphs=False)).warm_up()
        settings = with_pool_size(settings, model)
        self.settings = settings
        self.config = model.config
        self.num_blocks = settings.num_blocks
        self.max_model_len = settings.max_model_len
        S = settings.block_size
        max_kv_tokens = self.num_blocks * S
        self.scheduler = Scheduler(
            settings.policy, settings.token_budget, max_kv_tokens, S, settings=settings
        )
        size = sum(w.nbytes for w in model.parameters()) / 2**20
        dtype = str(model.wte.weight.dtype).removeprefix("torch.")
        if settings.quantize not in ("none", dtype):
            dtype += f", quantize {settings.quantize}"
        self.weights = f"{size:,.0f} MiB of weights ({dtype})"
        with explain_lack_of_memory(f"{self.weights} and a KV pool of {self.blocks}"):
            self.runner = Runner(model, settings)
        self.window = Window(self)
        self.started = time.monotonic()
        self.overlap = on_gpu if settings.overlap is None else settings.overlap
        self.speculator = Speculator(self.scheduler, MOST_ROWS_ON_GPU if on_gpu else MOST_ROWS)
        self.in_flight: InFlight | None = None
        self.recorder: Recorder | None = None  # is sent what each step does
        self.requests: dict[int | str, Request] = {}  # waiting or running
        self.promised: dict[int | str, list[Request]] = {}  # other choices, still to be forked
        self.prompt_scores: dict[int | str, list] = {}  # of requests whose prompt is being scored
        self.constrained: list[Request] = []  # by grammars, until they end
        # tokens that grammars were asked about, and that they refused
        self.num_checked = self.num_refused = 0
        self.seeds = random.Random(settings.seed)
        self.delays = {name: deque(maxlen=MAX_DELAYS) for name in ("waited", "prefilled")}
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0

    @property
    def blocks(self) -> str:
        """The pool's, for messages: "40 blocks of 16"."""
        return f"{plural(self.num_blocks, 'block')} of {self.scheduler.block_size}"

    @property
    def has_work(self) -> bool:
        return self.in_flight is not None or bool(self.requests)

    # -- requests in -------------------------------------------------------------------------------

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
        name: str = "",
    ) -> Request:
        """
        Queue a request; a lower priority is served first. With n > 1, n - 1 further choices with
        the ids "id.1", "id.2", ... are forked from the request once its prompt is computed; if it
        fails before that, there are none. `prompt_logprobs`: score the prompt, with so many
        candidates for each token. `name`: what a record calls it. Returns the queued request.
        Raises ValueError at once, with the numbers, for what can never be served, and for an id
        that is in use.
        """
        prompt_tokens = list(prompt_tokens)
        params.check_vocabulary(self.config.vocab_size)
        if type(n) is not int or n < 1:
            raise ValueError(f"n is {n!r}: wanted a whole number, at least 1")
        is_count = type(prompt_logprobs) is int and prompt_logprobs >= 0
        if not is_count and prompt_logprobs is not None:
            raise ValueError(f"prompt_logprobs is {prompt_logprobs!r}: wanted 0 or more, or None")
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt is {cache_salt!r}: wanted a string")
        self._check_ids(id, n)
        self._check_prompt(prompt_tokens, params.max_tokens)
        if params.seed is None:
            params = replace(params, seed=self.seeds.getrandbits(63))
        eos = () if params.ignore_eos else self.config.eos_token_ids
        if params.grammar and not eos:
            raise ValueError("a grammar needs an end-of-text token: leave ignore_eos out")
        choice = partial(
            Request,
            prompt_tokens=prompt_tokens,
            max_new_tokens=params.max_tokens,
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            stop_token_ids=frozenset(params.stop_token_ids).union(eos),
            params=params,
            name=name,
        )
        request = choice(id, prompt_logprobs=prompt_logprobs)
        self.scheduler.add_request(request)
        self.requests[id] = request
        if n > 1:
            self.promised[id] = [choice(f"{id}.{i}", choice=i) for i in range(1, n)]
        if params.grammar:
            self._hold_to_grammar(request)
        return request

    def _hold_to_grammar(self, request: Request):
        request.grammar = request.params.grammar.copy()
        self.constrained.append(request)

    def _check_ids(self, id: int | str, n: int):
        in_use = {choice.id for choices in self.promised.values() for choice in choices}
        in_use.update(self.requests)
        for new in (id, *(f"{id}.{i}" for i in range(1, n))):
            if new in in_use:
                raise ValueError(f"request id {new!r} is in use: choose another")

    def _check_prompt(self, prompt_tokens: list[int], max_tokens: int):
        if not prompt_tokens:
            raise ValueError("the prompt is empty: give it at least one token")
        V = self.config.vocab_size
        for t in prompt_tokens:
            if type(t) is not int or not 0 <= t < V:  # numpy's numbers are no int either
                raise ValueError(
                    f"the prompt has token {t!r}, outside 0..{V - 1}: encode it with this model's "
                    "tokenizer, to a list"
                )
        length = len(prompt_tokens) + max_tokens
        if length > self.max_model_len:
            raise ValueError(
                f"{plural(len(prompt_tokens), 'prompt token')} + {max_tokens:,} max_tokens = "
                f"{length:,} do not fit into {self.max_model_len:,} (context length "
                f"{self.config.context_length:,}, KV pool of {self.blocks}): shorten the prompt, "
                "or lower max_tokens"
            )

    def _fork_choices(self, first: Request):
        """
        Start the other choices of `first`, whose prompt was just computed (parallel sampling). A
        fork shares all blocks of the prompt and computes only the prompt's last token again, which
        gives the logits to sample from. Where nothing can be shared (no row is free, the first
        choice has ended, the last block is full and committed) a choice waits like any request and
        finds the blocks in the prefix cache.
        """
        scheduler = self.scheduler
        P = len(first.prompt_tokens)
        prompt_blocks = first.block_table[: scheduler.blocks_for(P)]
        is_partial = first.num_committed * scheduler.block_size < P
        can_share = first.status == "active" and is_partial
        for choice in self.promised.pop(first.id):
            if can_share and scheduler.free_rows:
                choice = scheduler.fork(
                    first,
                    choice.id,
                    choice=choice.choice,
                    prompt_logprobs=None,
                    generated_tokens=[],
                    num_filled_slots=P - 1,
                    block_table=list(prompt_blocks),
                )
                self.runner.fill_rows(choice)
            else:
                scheduler.add_request(choice)
            self.requests[choice.id] = choice
            if choice.params.grammar:
                self._hold_to_grammar(choice)

    def abort(self, id: int | str):
        """
        Forget a request, in any state, and free its blocks. One that has finished already is no
        error. Choices that are not forked yet never are; the others have ids of their own.
        """
        self.promised.pop(id, None)
        self.prompt_scores.pop(id, None)
        request = self.requests.pop(id, None)
        if request is not None:
            request.finish_reason = "abort"
            self.scheduler.complete(request)

    # -- a step ------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """
        Compute one step; with overlap, start one and return what the one before has brought, so
        that the host works while the device does. For that the last token of a request stays on the
        device (`KnownRows.last_token`), where the next step reads it, and the host appends a place
        for it (`paged.TO_COME`) in `advance`, which `resolve` fills in a step later:

            host    plan 1, launch 1   plan 2, launch 2   resolve 1   plan 3, launch 3   resolve 2
            device                  [ step 1             ][ step 2                      ][ step 3 ..

        If a draft is likely, the step under way is resolved first: a guess needs all tokens before
        it. If a step fails, the requests that took part end with an error and the others go on.
        """
        outputs = []
        flight = self.in_flight
        if flight and self.settings.speculate and self.speculator.waits_for(flight.plan):
            self.in_flight = None
            outputs = self._resolve(flight)
            if self.recorder:
                self.recorder.end_step()
        flight = None
        try:
            failed, flight = self._launch()
            outputs += failed
        finally:
            # Also if Ctrl-C ended the launch: the next plan may admit a request again that this one
            # has preempted, and its chunk under way would then count for the new attempt.
            if self.overlap:
                flight, self.in_flight = self.in_flight, flight
            if flight is not None:
                outputs += self._resolve(flight)
        if self.recorder:
            self.recorder.end_step()
        return outputs

    def _launch(self) -> tuple[list[Output], InFlight | None]:
        """
        Plan a step and start it on the device. Returns it, or None where there is nothing to
        compute; and the outputs of the requests that have failed with it.
        """
        if self.scheduler.held:
            self._release_held()
        plan = self.scheduler.plan(self.num_steps)
        if self.settings.speculate:
            self.speculator.plan_drafts(plan)
        if not plan.decodes and not plan.chunks:
            if self.recorder and (plan.preempted or plan.grown):
                self.recorder.planned(plan)
            return [], None
        self.num_steps += 1
        for request in plan.admitted:  # noted now: on a CPU, launching a step is computing it
            if not request.num_preemptions:  # waiting again after that is not counted
                request.admitted_time = self._note_delay("waited", request.arrival_time)
        try:
            if self.settings.check:
                self.scheduler.check(plan)
            if self.constrained:
                plan.masked = [r for r in plan.sampled if has_mask(r)]
            flight = self.runner.launch(plan)
        except BaseException as error:
            return self._fail(plan, error), None
        if self.recorder:
            self.recorder.planned(plan)
        self.num_decode_tokens += len(plan.decodes)
        self.num_prefill_tokens += sum(n for _, n in plan.chunks)
        self.scheduler.advance(plan)
        if self.overlap and self.constrained:
            for r in plan.sampled:  # a mask needs the token before
                if r.grammar and r.params.filters and r.status == "active":
                    self.scheduler.hold(r)
        return [], flight

    def _note_delay(self, name: str, since: float) -> float:
        """For `stats`. Returns the time."""
        now = time.monotonic()
        self.delays[name].append(now - since)
        return now

    def _resolve(self, flight: InFlight) -> list[Output]:
        """Wait for a step, update the scheduler, fork choices; the outputs of its requests."""
        plan = flight.plan
        try:
            result = self.runner.wait_for(flight)
        except BaseException as error:
            return self._fail(plan, error)
        if plan.drafts:
            # a token is sampled again at its place, if its grammar refuses it
            flight.places = self.speculator.take_drafts(plan, result.tokens)
            tokens = [result.tokens[i] for i in flight.places]
            # logits behind a wrong guess may be broken
            pairs = zip(plan.sampled, tokens, strict=True)
            failed = {r: result.failed[r] for r, token in pairs if token == NO_TOKEN}
            result = result._replace(tokens=tokens, failed=failed)
            self.num_decode_tokens += sum(map(len, plan.drafts.values()))
        for request, (start, scores) in result.prompt_scores.items():
            if self.requests.get(request.id) is request:  # not aborted since
                kept = self.prompt_scores.setdefault(request.id, [])
                kept[start:] = scores  # chunk by chunk; after a preemption, from 0 again
        prefilled = [r for r in plan.completed if r.num_to_come]
        if self.constrained:
            self._check_grammars(flight, result)
        # a request that was aborted since the launch has no token to come; `resolve` ends others
        pairs = zip(plan.sampled, result.tokens, strict=True)
        new = [(r, [token]) for r, token in pairs if r.num_to_come]
        if plan.drafts:
            new = with_drafts(plan, new)
        for request in self.scheduler.resolve(plan, result.tokens):
            del self.requests[request.id]
        if self.recorder:
            self.recorder.resolved(plan, new)
        for request in prefilled:
            num_known = request.num_generated - request.num_to_come
            # one that is resumed after a preemption has had its first token; a fork has no time
            if num_known == 1 and request.admitted_time is not None:
                self._note_delay("prefilled", request.admitted_time)
            if request.id in self.promised:
                self._fork_choices(request)
        if self.settings.check:
            self.scheduler.check()
        if result.logprobs or result.failed or self.prompt_scores:
            return [self._output(r, tokens, result) for r, tokens in new]
        rest = (None, None, None)
        return [  # the hot loop: of 256 outputs, Output(..) would take 25 us more than this
            tuple.__new__(Output, (r.id, tokens, r.finish_reason, r.num_hit_tokens, *rest))
            for r, tokens in new
        ]

    def _output(self, r: Request, tokens: list[int], result: StepResult) -> Output:
        """The result of a step for a request. One that has failed is aborted."""
        if r in result.failed:
            self.abort(r.id)
            r.finish_reason = "error"
            return Output(r.id, [], "error", error=result.failed[r])
        logprobs = result.logprobs.get(r)
        prompt_logprobs = self.prompt_scores.pop(r.id, None)
        hits = r.num_hit_tokens
        return Output(r.id, tokens, r.finish_reason, hits, None, logprobs, prompt_logprobs)

    def _fail(self, plan: Plan, error: BaseException) -> list[Output]:
        """
        Abort the requests that took part in a step that failed: what it wrote of their K, V and
        device state is unknown. Returns their outputs; Ctrl-C (BaseException) is raised again.
        """
        took_part = dict.fromkeys([r for r, _ in plan.work] + plan.admitted)
        failed = [r for r in took_part if self.requests.get(r.id) is r]  # not ended since
        for request in failed:
            self.abort(request.id)
            request.finish_reason = "error"
        if self.recorder:
            self.recorder.failed()
        if not isinstance(error, Exception):
            self.runner.follow_turn()
            raise error
        return [Output(r.id, [], "error", error=f"{type(error).__name__}: {error}") for r in failed]

    # -- grammars: check first, mask on a miss -----------------------------------------------------

    def _check_grammars(self, flight: InFlight, result: StepResult):
        """
        Ask the grammars about the tokens that a step has brought, before anybody else sees them.
        Those that are refused are sampled again from its logits, with masks. Where the logits are
        gone (overlap) or a verdict or a mask is late, the request goes back by a token, and sits
        out until its mask is there: the others never wait for it.
        """
        self.constrained = [r for r in self.constrained if r.status != "done"]
        plan = flight.plan
        refused = {}
        asked = [
            (i, r, token)
            for i, (r, token) in enumerate(zip(plan.sampled, result.tokens, strict=True))
            if r.grammar and r.num_to_come and r not in result.failed
        ]
        for _, r, token in asked:
            r.grammar.offer(token)
        deadline = soon()
        for i, r, token in asked:
            # once a mask was begun for a position, no token counts without it
            is_masked = r in plan.masked
            counts = is_masked or not r.grammar.wants_mask
            if counts and r.grammar.accept(token, deadline):
                continue
            if is_masked:
                result.failed[r] = r.grammar.failure()
            else:
                refused[r] = i
        self.num_checked += len(asked)
        self.num_refused += len(refused)
        for r in refused:
            r.grammar.begin_mask()
        if refused and not self.overlap:
            in_time = {r: i for r, i in refused.items() if r.grammar.has_mask}
            if in_time:
                self.runner.sample_again(flight, result, in_time)
            for r, i in in_time.items():
                del refused[r]
                if result.tokens[i] == NO_TOKEN or not r.grammar.accept(result.tokens[i]):
                    result.failed[r] = r.grammar.failure()
        later = [self.in_flight.plan] if self.in_flight else []
        for r in refused:
            self.scheduler.go_back(r, plan, *later)
        if refused and self.recorder:
            self.recorder.failed()
        for r in plan.sampled:
            if r.grammar and r.params.filters:
                r.grammar.begin_mask()

    def _release_held(self):
        """
        Let the requests go on whose masks are there. Waits for the first where there is nothing
        else to do.
        """
        known = [r for r in self.scheduler.held if not r.num_to_come]
        ready = [r for r in known if not r.grammar.wants_mask or r.grammar.has_mask]
        if not ready and len(known) == len(self.requests):
            known[0].grammar.wait_for_mask(soon())
            ready = [r for r in known if r.grammar.has_mask]
        for r in ready:
            self.scheduler.release(r)
        if ready:
            self.runner.fill_rows(*ready)

    # -- offline -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Iterable[list[int]],
        params: SamplingParams | list[SamplingParams],
        progress: bool = True,
    ) -> list[list[int]]:
        """
        Continue all prompts (lists of token ids), batched continuously, by one SamplingParams or
        one for each prompt; `progress`: with a bar on stderr. Returns the answers in order, a stop
        token included. Raises ValueError for what does not fit, RuntimeError if a step failed;
        either way, and after Ctrl-C, nothing of the call stays in the engine.
        """
        prompts = list(prompts)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        requests = []
        try:
            for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
                requests.append(self.add_request(f"generate-{i}", prompt, p))
            with tqdm(total=len(prompts), unit=" requests", disable=not progress) as bar:
                while self.has_work:
                    for output in self.step():
                        if output.error:
                            raise RuntimeError(f"request {output.id} failed: {output.error}")
                        bar.update(output.finish_reason is not None)
        finally:
            for request in requests:
                self.abort(request.id)
            if not self.requests:
                # its results are of no use; later work on its blocks comes later on the same stream
                self.in_flight = None
        return [r.generated_tokens for r in requests]

    # -- for logs and metrics ----------------------------------------------------------------------

    def statement(self) -> str:
        """A line about memory, room, attention and graphs, printed before the engine serves."""
        runner = self.runner
        S = self.scheduler.block_size
        size = runner.pool.kv.nbytes / 2**20
        num_texts = self.num_blocks // self.scheduler.blocks_for(self.max_model_len)
        texts = f"{plural(num_texts, 'text')} of {self.max_model_len:,}"
        if self.max_model_len < self.config.context_length:
            texts += f" (the model's context has {self.config.context_length:,})"
        parts = [
            self.weights,
            f"KV pool of {size:,.0f} MiB: {self.blocks}, {self.num_blocks * S:,} tokens, {texts}",
            f"attention: {runner.ops.name}, {runner.reason}",
        ]
        if runner.graphs:
            parts.append(runner.graph_statement)
        return "; ".join(parts)

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
        """
        For a server's metrics. `waited` has the seconds in the queue of each request that was
        admitted since the last call, `prefilled` those from there to the first token, of each that
        got its first.
        """
        scheduler = self.scheduler
        delays = {name: list(values) for name, values in self.delays.items()}
        for values in self.delays.values():
            values.clear()
        return {
            "running": len(self.requests) - len(scheduler.waiting),
            "waiting": len(scheduler.waiting),
            "kv_usage": 1 - scheduler.block_allocator.num_free / self.num_blocks,
            "queries": scheduler.num_queried_tokens,
            "hits": scheduler.num_hit_tokens,
            "preemptions": scheduler.num_preemptions,
            "guessed": self.speculator.num_guessed,
            "right": self.speculator.num_right,
            "steps": self.num_steps,
            **delays,
        }


def has_mask(r: Request) -> bool:
    """Of its next position: with a token to come the mask there is that token's."""
    return r.grammar is not None and r.grammar.has_mask and not r.num_to_come


# --------------------------------------------------------------------------------------------------
# The post's loop


def flat_batch(plan: Plan, model: GPT, pool: KVBlockPool) -> Batch:
    """
    A step on one flat token axis, from lists: what `Runner.compute` makes with arrays that stay on
    the device. The logits wanted are those of `plan.sampled`, in that order.
    """
    _, _, _, _, S, _ = pool.kv.shape
    inputs, last = flat_inputs(plan, S)
    tokens, positions, slot_mapping, _ = zip(*inputs, strict=True)
    query_lens = [n for _, n in plan.work]
    context_lens = [r.num_filled_slots + n for r, n in plan.work]
    M = max(len(request.block_table) for request, _ in plan.work)
    padding = [pool.sink] * M
    tables = [(request.block_table + padding)[:M] for request, _ in plan.work]
    on_device = partial(torch.tensor, device=pool.kv.device)
    int32 = partial(on_device, dtype=torch.int32)
    batch = Batch(
        tokens=on_device(tokens),
        positions=on_device(positions),
        slot_mapping=on_device(slot_mapping),
        query_start=int32([0, *accumulate(query_lens)]),
        context_lens=int32(context_lens),
        block_tables=int32(tables),
        logits_index=int32(last),
        num_decodes=len(plan.decodes),
        query_lens_host=query_lens,
        context_lens_host=context_lens,
        ops=TORCH,
    )
    H = model.config.n_head
    windows = set(model.config.windows)
    batch.prepared = {w: TORCH.prepare(batch, H, pool.kv[0], w) for w in windows}
    return batch


@torch.inference_mode()
def interleaved_generate(
    model: GPT,
    requests: list[Request],
    policy: str = "fcfs",
    token_budget: int = 16,
    max_kv_tokens: int = 256,
) -> Scheduler:
    """
    Serve all requests, greedily or by their `params`, in a pool of max_kv_tokens, in plain torch;
    the answers are in their `generated_tokens`. Returns the scheduler, for its counts. Raises
    ValueError for a request that is longer than the context, RuntimeError for one that alone is
    larger than the pool. `Engine.step` does the same for requests that come and go.
    """
    config = model.config
    for r in requests:
        if len(r.prompt_tokens) + r.max_new_tokens > config.context_length:
            raise ValueError(
                f"request {r.id}: {len(r.prompt_tokens)} prompt tokens + {r.max_new_tokens} new "
                f"ones do not fit into the context length of {config.context_length}: shorten one "
                "of them"
            )
    settings = SchedulerSettings(max_num_seqs=max(1, len(requests)))
    scheduler = Scheduler(policy, token_budget, max_kv_tokens, settings=settings)
    pool = KVBlockPool(
        scheduler.block_allocator.num_blocks,
        scheduler.block_size,
        config.n_layer,
        config.n_kv_head,
        config.head_size,
        model.wte.weight.device,
        kv_dtype(model),
    )
    sampling = SamplingRows(scheduler.max_num_seqs, config.vocab_size, pool.kv.device)
    for request in requests:
        scheduler.add_request(request)
    step = 0
    while not scheduler.is_done():
        plan = scheduler.plan(step)
        for request in plan.admitted:
            sampling.fill(sampling_row(request))
        batch = flat_batch(plan, model, pool)
        x = model.hidden(batch, pool.kv)  # the one model call: each layer stores K, V and attends
        logits = model.logits(x[batch.logits_index], batch.ops)  # [R, V]
        where = [[r.row, r.num_tokens] for r in plan.sampled]  # its row, its new token's position
        rows, positions = upload(where, logits.device).view(-1, 2).unbind(1)
        tokens = sample_torch(logits, rows, positions, sampling)
        scheduler.update(plan, tokens.tolist())
        step += 1
    return scheduler
