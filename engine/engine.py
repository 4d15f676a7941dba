"""
Requests in, tokens out: each step is plan -> launch -> resolve.

    engine = Engine(load_checkpoint("out/stdlib"), Settings(max_num_seqs=8))
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))   # lists of token ids

The `Scheduler` (paged.py) decides what a step computes. The `Runner` (runner.py) sends each plan to
the `Device` (device.py). The `Engine` calls the scheduler and the runner as requests come and go;
this is continuous batching. Everything else that can happen in a step is done by stages (step.py).
The server's loop is in process.py, and the blog post's loop is in interleaved.py.
"""

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from tqdm import tqdm

from common import plural
from engine.device import Device
from engine.runner import Runner
from engine.sizing import explain_lack_of_memory, with_pool_size, with_step_size
from engine.stages import build_stages
from engine.step import Answer, Output, Step, by_moment, check_prompt_logprobs
from interleaved import interleaved_generate  # noqa: F401  readers of the post look for it here
from model import GPT
from paged import Scheduler
from params import NO_TOKEN, SamplingParams, Settings

# maximum number of delays of each kind to keep; `stats` empties the lists, but only servers call it
MAX_DELAYS = 10_000
BROKEN = "the model's logits are not numbers: its weights are broken"


class Engine:
    """
    Serves requests as they come and go. Each `step` computes some tokens for the running requests.
    Not thread-safe: call all methods from one thread.
    """

    def __init__(self, model: GPT, settings: Settings | None = None):
        """Raises ValueError if the settings cannot work; the message says what to change."""
        on_gpu = model.wte.weight.is_cuda
        settings = with_step_size(settings or Settings(), on_gpu)
        # allocate a step's own memory first, because the pool's size depends on the free memory
        if on_gpu and settings.num_blocks is None:
            with explain_lack_of_memory("the weights and a step"):
                Device(model, replace(settings, num_blocks=1, graphs=False)).warm_up()
        settings = with_pool_size(settings, model)
        self.settings = settings
        self.config = model.config
        self.num_blocks = settings.num_blocks
        self.max_model_len = settings.max_model_len
        S = settings.block_size
        self.scheduler = Scheduler(
            settings.policy, settings.token_budget, self.num_blocks * S, S, settings=settings
        )
        size = sum(w.nbytes for w in model.parameters()) / 2**20
        dtype = str(model.wte.weight.dtype).removeprefix("torch.")
        if settings.quantize not in ("none", dtype):
            dtype += f", quantize {settings.quantize}"
        self.weights = f"{size:,.0f} MiB of weights ({dtype})"
        with explain_lack_of_memory(f"{self.weights} and a KV pool of {self.blocks}"):
            self.device = Device(model, settings)
        self.runner = Runner(self.device, settings)
        self.started = time.monotonic()
        self.overlap = on_gpu if settings.overlap is None else settings.overlap
        self.stages = build_stages(self)
        self.acting = by_moment(self.stages.values())  # moment of a step -> stages that act at it
        self.in_flight: Step | None = None
        self.requests: dict[int | str, Answer] = {}  # waiting or running
        # id of a request with n > 1 -> its other answers, which have yet to be forked
        self.promised: dict[int | str, list[Answer]] = {}
        self.seeds = random.Random(settings.seed)
        self.delays = {name: deque(maxlen=MAX_DELAYS) for name in ("waited", "prefilled")}
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0

    @property
    def blocks(self) -> str:
        """The size of the pool as shown in messages, for example "40 blocks of 16"."""
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
    ) -> Answer:
        """
        Queue a request, and return it. Requests with lower `priority` values are served first. With
        n > 1, the request is forked once its prompt has been computed: n - 1 further answers get
        the ids "id.1", "id.2", and so on. If the request fails before that, they are never started.
        `prompt_logprobs` is the number of candidates per token if the prompt is to be scored.
        `name` is the client's name for the request. Raises ValueError if the request could never be
        served, or if its id is in use; the message gives the numbers.
        """
        prompt_tokens = list(prompt_tokens)
        params.check_vocabulary(self.config.vocab_size)
        if type(n) is not int or n < 1:
            raise ValueError(f"n is {n!r}: wanted a whole number, at least 1")
        check_prompt_logprobs(prompt_logprobs)
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt is {cache_salt!r}: wanted a string")
        self._check_ids(id, n)
        self._check_prompt(prompt_tokens, params.max_tokens)
        if params.seed is None:
            params = replace(params, seed=self.seeds.getrandbits(63))
        eos = () if params.ignore_eos else self.config.eos_token_ids
        params.check_end(eos)
        answer = partial(
            Answer,
            prompt_tokens=prompt_tokens,
            max_new_tokens=params.max_tokens,
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            stop_token_ids=frozenset(params.stop_token_ids).union(eos),
            params=params,
            name=name,
        )
        request = answer(id, prompt_logprobs=prompt_logprobs)
        self.scheduler.add_request(request)
        if n > 1:
            self.promised[id] = [answer(f"{id}.{i}", index=i) for i in range(1, n)]
        self._announce(request)
        return request

    def _announce(self, request: Answer):
        """Register a request that the scheduler already has, and notify the stages."""
        self.requests[request.id] = request
        for stage in self.stages.values():
            stage.added(request)

    def _check_ids(self, id: int | str, n: int):
        in_use = {answer.id for answers in self.promised.values() for answer in answers}
        in_use.update(self.requests)
        for new in (id, *(f"{id}.{i}" for i in range(1, n))):
            if new in in_use:
                raise ValueError(f"request id {new!r} is in use: choose another")

    def _check_prompt(self, prompt_tokens: list[int], max_tokens: int):
        V = self.config.vocab_size
        for t in prompt_tokens:
            if type(t) is not int or not 0 <= t < V:  # this also refuses numpy's integers
                raise ValueError(
                    f"the prompt has token {t!r}, outside 0..{V - 1}: encode it to a list with "
                    "this model's tokenizer"
                )
        length = len(prompt_tokens) + max_tokens
        if length > self.max_model_len:
            raise ValueError(
                f"{plural(len(prompt_tokens), 'prompt token')} + {max_tokens:,} max_tokens = "
                f"{length:,} do not fit into {self.max_model_len:,} (context length "
                f"{self.config.context_length:,}, KV pool of {self.blocks}): shorten the prompt, "
                "or lower max_tokens"
            )

    def _fork_answers(self, first: Answer):
        """
        Start the other answers to the prompt of `first`, which has just been computed (parallel
        sampling). A fork shares all of the prompt's blocks. It recomputes only the prompt's last
        token, to get logits to sample from. Sharing is not possible if no row is free, if the first
        answer has ended, or if the prompt's last block is full and committed. In these cases, the
        answers are queued like any other request, and find the blocks in the prefix cache.
        """
        scheduler = self.scheduler
        P = len(first.prompt_tokens)
        prompt_blocks = first.block_table[: scheduler.blocks_for(P)]
        is_partial = first.num_committed * scheduler.block_size < P
        can_share = first.status == "active" and is_partial
        for answer in self.promised.pop(first.id):
            if can_share and scheduler.free_rows:
                answer = scheduler.fork(
                    first,
                    answer.id,
                    index=answer.index,
                    prompt_logprobs=None,
                    generated_tokens=[],
                    num_filled_slots=P - 1,
                    block_table=list(prompt_blocks),
                    admitted_time=None,
                )
                self.device.fill_rows(answer)
            else:
                scheduler.add_request(answer)
            self._announce(answer)

    def abort(self, id: int | str):
        """
        Drop a request in any state, and free its blocks. Does nothing if the request has already
        finished. Other answers to its prompt are not started. Those already forked continue; to
        stop them, abort their own ids.
        """
        self.promised.pop(id, None)
        request = self.requests.get(id)
        if request is not None:
            if request.status != "done":  # Ctrl-C may have come before a finished one was forgotten
                request.finish_reason = "abort"
                self.scheduler.complete(request)
            self._forget(request)

    def _forget(self, request: Answer):
        del self.requests[request.id]
        for stage in self.stages.values():
            stage.ended(request)

    # -- a step ------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """
        Compute one step, and return its outputs. With overlap, start one step and return the
        outputs of the previous one, so that host and device work at the same time:

            host    plan 1, launch 1   plan 2, launch 2   resolve 1   plan 3, launch 3   resolve 2
            device                  [ step 1             ][ step 2                      ][ step 3 ..

        The next step can be planned before any token has reached the host: the last token of each
        request stays on the device (`KnownRows.last_token`), where the next step reads it. On the
        host, `advance` appends a placeholder (`paged.TO_COME`), and `resolve` replaces it one step
        later.

        Some stages must know all tokens before the next step is planned. For these, the step in
        flight is resolved first (`waits_for`). If a step fails, the requests in it end with an
        error and the others continue.
        """
        acting = self.acting
        outputs = []
        before = self.in_flight
        if before and any(stage.waits_for(before) for stage in acting["waits_for"]):
            self.in_flight = None
            outputs += self._resolve(before)
            for stage in acting["between"]:
                stage.between()
        step = None
        try:
            failed, step = self._launch()
            outputs += failed
        finally:
            # The previous step is resolved even if Ctrl-C has ended this launch. Otherwise, if this
            # plan has preempted a request and the next plan admits it again, the request's chunk in
            # flight would count towards the new attempt.
            if self.overlap:
                step, self.in_flight = self.in_flight, step
            if step is not None:
                outputs += self._resolve(step)
        for stage in acting["between"]:
            stage.between()
        return outputs

    def _launch(self) -> tuple[list[Output], Step | None]:
        """
        Plan a step and start it on the device. Returns the outputs of the requests that failed, and
        the step. The step is None if there was nothing to compute or the launch failed.
        """
        acting = self.acting
        for stage in acting["begin"]:
            stage.begin()
        plan = self.scheduler.plan()
        step = Step(self.num_steps, plan)
        try:
            for stage in acting["planned"]:
                stage.planned(step)
            if not plan.decodes and not plan.chunks:
                return [], None
            self.num_steps += 1
            # before the launch, which on a CPU only returns once the step has been computed
            for request in plan.admitted:
                if not request.num_preemptions:  # the wait after a preemption is not counted
                    request.admitted_time = self._note_delay("waited", request.arrival_time)
            if self.settings.check:
                self.scheduler.check(plan)
            step.launched = self.runner.launch(plan)
            for stage in acting["launched"]:
                stage.launched(step)
            self.device.send(step.launched)
        except BaseException as error:
            return self._fail(step, error), None
        self.num_decode_tokens += len(plan.decodes)
        self.num_prefill_tokens += sum(n for _, n in plan.chunks)
        self.scheduler.advance(plan)
        return [], step

    def _note_delay(self, name: str, since: float) -> float:
        """Record the time elapsed since `since`, for `stats`. Returns the current time."""
        now = time.monotonic()
        self.delays[name].append(now - since)
        return now

    def _resolve(self, step: Step) -> list[Output]:
        """Wait until a step is done, and pass its tokens to the scheduler. Returns the outputs."""
        plan = step.plan
        try:
            tokens = self.runner.wait_for(step.launched)
        except BaseException as error:
            return self._fail(step, error)
        prefilled = [r for r in plan.prefilled if r.num_to_come]
        # leave out requests that have been aborted or sent back since the launch
        dropped = step.dropped
        step.tokens = {r: t for r, t in tokens.items() if r.num_to_come and r not in dropped}
        for stage in self.acting["settled"]:
            stage.settled(step)
        for request, new in step.tokens.items():
            if NO_TOKEN in new:
                step.failed.setdefault(request, BROKEN)
        for request in step.failed:
            del step.tokens[request]
        for request in plan.guesses:
            self.num_decode_tokens += max(0, len(step.tokens.get(request, ())) - 1)
        finished = self.scheduler.resolve(plan, step.tokens)
        for request in prefilled:
            self._after_prefill(request, step)
        failed = [self._end_with(request, error) for request, error in step.failed.items()]
        if self.settings.check:
            self.scheduler.check()
        step.outputs = {
            r: Output(r.id, new, r.finish_reason, r.num_hit_tokens)
            for r, new in step.tokens.items()
            if new
        }
        for stage in self.acting["resolved"]:
            stage.resolved(step)
        for request in finished:
            self._forget(request)
        return failed + list(step.outputs.values())

    def _end_with(self, request: Answer, error: str) -> Output:
        self.abort(request.id)
        request.finish_reason = "error"
        return Output(request.id, [], "error", error=error)

    def _after_prefill(self, request: Answer, step: Step):
        """Record how long the first token took, and fork the other answers to the prompt."""
        # After a preemption, the token is not the first. A fork has no `admitted_time`.
        is_first = request.num_known == 1 and step.tokens.get(request)
        if is_first and request.admitted_time is not None:
            self._note_delay("prefilled", request.admitted_time)
        if request.id in self.promised:
            self._fork_answers(request)

    def _fail(self, step: Step, error: BaseException) -> list[Output]:
        """
        Abort the requests that took part in a failed step, because it is not known what the step
        has written to their K, V and device state. Returns their outputs. Re-raises Ctrl-C (any
        BaseException that is not an Exception).
        """
        took_part = dict.fromkeys([r for r, _ in step.plan.work] + step.plan.admitted)
        reason = f"{type(error).__name__}: {error}"
        # leave out requests that have ended since
        running = [r for r in took_part if self.requests.get(r.id) is r]
        failed = [self._end_with(request, reason) for request in running]
        for stage in self.stages.values():
            stage.failed()
        if not isinstance(error, Exception):
            self.device.sync_ring()
            raise error
        return failed

    # -- offline -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Iterable[list[int]],
        params: SamplingParams | list[SamplingParams],
        progress: bool = True,
    ) -> list[list[int]]:
        """
        Continue all prompts (lists of token ids) with continuous batching. `params` is one
        SamplingParams for all prompts, or a list with one for each. `progress` shows a progress bar
        on stderr. Returns the answers in the order of the prompts; an answer that ended with a stop
        token includes it. Raises ValueError if a prompt does not fit, and RuntimeError if a step
        fails. After an error or Ctrl-C, none of this call's requests remain in the engine.
        """
        prompts = list(prompts)
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        requests = []
        try:
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
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
                # The step in flight is no longer needed. Later steps may reuse its blocks, because
                # they run after it on the same stream.
                self.in_flight = None
        return [r.generated_tokens for r in requests]

    # -- for logs and metrics ----------------------------------------------------------------------

    def statement(self) -> str:
        """
        Return a line about memory, the pool, attention and graphs, to be printed before serving.
        """
        device = self.device
        S = self.scheduler.block_size
        size = device.pool.kv.nbytes / 2**20
        num_texts = self.num_blocks // self.scheduler.blocks_for(self.max_model_len)
        texts = f"{plural(num_texts, 'text')} of {self.max_model_len:,}"
        if self.max_model_len < self.config.context_length:
            texts += f" (the model's context has {self.config.context_length:,})"
        parts = [
            self.weights,
            f"KV pool of {size:,.0f} MiB: {self.blocks}, {self.num_blocks * S:,} tokens, {texts}",
            f"attention: {device.ops.name}, {device.reason}",
        ]
        if device.graphs:
            parts.append(device.graph_statement)
        return "; ".join(parts)

    def counts(self) -> dict[str, int]:
        """Return running totals since the engine was built."""
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
        Return the numbers for a server's metrics. Two lists cover the time since the last call.
        `waited` has the number of seconds in the queue for each request that was admitted.
        `prefilled` has the number of seconds from admission to the first token for each request
        that got its first token.
        """
        scheduler = self.scheduler
        delays = {name: list(values) for name, values in self.delays.items()}
        for values in self.delays.values():
            values.clear()
        stats = {
            "running": len(self.requests) - len(scheduler.waiting),
            "waiting": len(scheduler.waiting),
            "kv_usage": 1 - scheduler.block_allocator.num_free / self.num_blocks,
            "queries": scheduler.num_queried_tokens,
            "hits": scheduler.num_hit_tokens,
            "preemptions": scheduler.num_preemptions,
            "steps": self.num_steps,
            **delays,
        }
        for stage in self.stages.values():
            stats |= stage.stats()
        return stats
