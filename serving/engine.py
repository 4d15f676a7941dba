"""
One step of serving: plan -> batch -> forward -> sample -> update.

    engine = Engine(load_checkpoint("out/stdlib"))
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))     # prompts and answers are lists of token ids

The `Scheduler` (paged.py) decides what a step computes, the `Runner` (runner.py) computes it on the
device, and the `Engine` ties both to requests that come and go. `run` is its own loop, for a thread
or a process of its own. Letters: B requests, T tokens, M blocks per table, S block size, R sampled
tokens.
"""

import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from model import GPT
from paged import Plan, Request, Scheduler, SchedulerSettings
from serving.links import Link, Links
from serving.params import GREEDY, SamplingParams
from serving.runner import InFlight, Runner
from serving.settings import Settings
from serving.sizing import with_pool_size, with_step_size

MAX_DELAYS = 10_000  # seconds of each kind that wait to be asked for: a server asks each step, other programs never

# --------------------------------------------------------------------------------------------------
# The engine


class Output(NamedTuple):
    """What a step brought for one request."""

    id: int | str
    tokens: list[int]  # new ones; a stop token is included
    finish_reason: str | None = None  # stop, length or error; None while it goes on
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None
    logprobs: list | None = (
        None  # [log-probability of the token, the likeliest ids, their log-probabilities]
    )
    prompt_logprobs: list[list] | None = (
        None  # with the first token: such a score of each prompt token but the first
    )


@contextmanager
def memory_for(what: str):
    """Turns torch's error into a ValueError that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        mend = "lower --kv-blocks, --max-num-seqs or --token-budget, or try --no-graphs"
        raise ValueError(f"the GPU has no memory for {what}: {mend} ({error})") from error


def weights_statement(model: GPT, settings: Settings) -> str:
    size = sum(w.nbytes for w in model.parameters()) / 2**20
    dtype = str(model.wte.weight.dtype).removeprefix("torch.")
    said = f"{size:,.0f} MiB of weights ({dtype}, quantize {settings.quantize})"
    return said + (", and a second copy for the compiled step" if settings.compile else "")


def build_runner(model: GPT, settings: Settings) -> Runner:
    return Runner(
        model,
        settings.num_blocks,
        settings.block_size,
        settings.max_num_seqs,
        attention=settings.attention,
        quantize=settings.quantize,
        compile=settings.compile,
        graphs=settings.graphs,
        token_budget=settings.token_budget,
    )


class Engine:
    """Requests in, tokens out, a step at a time. All its methods belong to one thread."""

    def __init__(self, model: GPT, settings: Settings | None = None):
        on_gpu = model.wte.weight.is_cuda
        settings = with_step_size(settings or Settings(), on_gpu)
        if on_gpu and settings.num_blocks is None:  # what a step takes is not free for the pool
            with memory_for("the weights and a step"):
                build_runner(model, replace(settings, num_blocks=1, graphs=False)).warm_up()
        self.settings = settings = with_pool_size(settings, model)
        self.config = model.config
        self.num_blocks = settings.num_blocks
        self.max_model_len = settings.max_model_len
        self.scheduler = Scheduler(
            settings.policy,
            settings.token_budget,
            settings.num_blocks * settings.block_size,
            settings.block_size,
            settings=settings,
        )
        self.weights = weights_statement(model, settings)
        pool = f"a KV pool of {self.num_blocks} blocks of {settings.block_size}"
        with memory_for(f"{self.weights} and {pool}"):
            self.runner = build_runner(model, settings)
        self.overlap = on_gpu if settings.overlap is None else settings.overlap
        self.in_flight: InFlight | None = None
        self.requests: dict[int | str, Request] = {}  # waiting or running
        self.num_choices: dict[
            int | str, int
        ] = {}  # of those whose other choices are still to be forked
        self.prompt_scores: dict[int | str, list] = {}  # of those whose prompts are being scored
        self.seeds = random.Random(settings.seed)
        self.delays = {name: deque(maxlen=MAX_DELAYS) for name in ("waited", "prefilled")}
        self.trace = settings.trace
        self.check = settings.check
        self.num_steps = self.num_prefill_tokens = self.num_decode_tokens = 0

    @property
    def num_at_work(self) -> int:
        """Choices that wait or run, those still to be forked included."""
        return len(self.requests) + sum(n - 1 for n in self.num_choices.values())

    def statement(self) -> str:
        """
        What was built: memory, room, graphs and the way of attention, to be said once before it
        serves.
        """
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
        Queue a request; with the priority policy, a lower priority is served first. With n > 1,
        further choices with the ids "id.1", "id.2", ... are forked from it once its prompt is
        computed; should it fail before, they never are. Raises ValueError at once, with the
        numbers, for what can never be served.
        """
        prompt_tokens, V = list(prompt_tokens), self.config.vocab_size
        params.check_vocabulary(V)
        if type(n) is not int or n < 1:
            raise ValueError(f"n is {n!r}: wanted a whole number, at least 1")
        if prompt_logprobs is not None and not (
            type(prompt_logprobs) is int and 0 <= prompt_logprobs <= V
        ):
            raise ValueError(f"prompt_logprobs is {prompt_logprobs!r}: wanted 0 to {V}, or None")
        for taken in (id, *(f"{id}.{choice}" for choice in range(1, n))):
            promised = any(
                taken == f"{first}.{i}"
                for first, m in self.num_choices.items()
                for i in range(1, m)
            )
            if taken in self.requests or promised:
                raise ValueError(f"request id {taken!r} is in use: choose another")
        if not prompt_tokens:
            raise ValueError("the prompt is empty: give it at least one token")
        for t in prompt_tokens:
            if (
                type(t) is not int or not 0 <= t < V
            ):  # an array's numbers are no int either: .tolist() makes them so
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
        eos = () if params.ignore_eos else self.config.eos_token_ids
        request = Request(
            id,
            prompt_tokens,
            params.max_tokens,
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=frozenset(params.stop_token_ids).union(eos),
            params=params
            if params.seed is not None
            else replace(params, seed=self.seeds.getrandbits(63)),
        )
        self.scheduler.add_request(request)
        self.requests[id] = request
        if n > 1:
            self.num_choices[id] = n
        return request

    def _fork_choices(self, first: Request):
        """
        The other choices of a prompt that was just computed. A fork shares all its blocks and
        computes only its last token again, which gives the logits to sample from. Where that cannot
        be (no row is free, the first choice has ended, the last block is full and committed) a
        choice waits like any request and finds the blocks in the cache.
        """
        P = len(first.prompt_tokens)
        can_share = first.status == "active" and first.num_committed * self.scheduler.block_size < P
        for choice in range(1, self.num_choices.pop(first.id, 1)):
            id, own = f"{first.id}.{choice}", {"choice": choice, "prompt_logprobs": None}
            if can_share and self.scheduler.free_rows:
                own["block_table"] = first.block_table[: self.scheduler.blocks_for(P)]
                fork = self.scheduler.fork(
                    first, id, generated_tokens=[], num_filled_slots=P - 1, **own
                )
                self.runner.place(fork)
            else:
                shared = (
                    "prompt_tokens",
                    "max_new_tokens",
                    "arrival_time",
                    "priority",
                    "stop_token_ids",
                    "cache_salt",
                )
                same = {name: getattr(first, name) for name in (*shared, "params")}
                fork = Request(id, **same, **own)
                self.scheduler.add_request(fork)
            self.requests[id] = fork

    def abort(self, id: int | str):
        """
        Forget a request in whatever state, and free its blocks. One that has finished already is no
        error.
        """
        self.num_choices.pop(id, None), self.prompt_scores.pop(id, None)
        request = self.requests.pop(id, None)
        if request is not None:
            request.finish_reason = "abort"
            self.scheduler.complete(request)

    def step(self) -> list[Output]:
        """
        Compute one step; with overlap, start one and return what the one before has brought, so
        that the host works while the device does. Should a step fail, the requests that took part
        end with an error and the others go on.
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
        self._note_admissions(plan)  # now: on a CPU, launching a step is computing it
        try:
            if self.check:
                self.scheduler.check(plan)
            flight = self.runner.launch(plan)
        except BaseException as error:
            return self._fail(plan, error), None
        if self.trace:
            print(describe(plan, self.scheduler))
        self.num_decode_tokens += len(plan.decodes)
        self.num_prefill_tokens += plan.num_tokens - len(plan.decodes)
        self.scheduler.advance(plan)
        return [], flight

    def _note_admissions(self, plan: Plan):
        """
        A request waits until its first admission: what comes after a preemption counts as work.
        """
        now = time.monotonic()
        for request in plan.admitted:
            if not request.num_preemptions:
                request.admitted_time = now
                self.delays["waited"].append(now - request.arrival_time)

    def _note_first_tokens(self, completed_prefills: list[Request]):
        """
        Note how long each first token took, but not of requests that had tokens before a
        preemption.
        """
        now = time.monotonic()
        for request in completed_prefills:
            known = request.num_generated - request.num_to_come
            if known == 1 and request.admitted_time is not None:
                self.delays["prefilled"].append(now - request.admitted_time)

    def _collect(self, flight: InFlight) -> list[Output]:
        plan = flight.plan
        try:
            tokens = self.runner.collect(flight)
        except BaseException as error:
            return self._fail(plan, error)
        for request, (start, found) in plan.prompt_scores.items():
            if self.requests.get(request.id) is request:  # not aborted since
                self.prompt_scores.setdefault(request.id, [])[start:] = (
                    found  # after a preemption, from 0 again
                )
        live = [
            r.num_to_come for r in plan.sampled
        ]  # the others have ended since they were planned
        # before `resolve`, which ends some of them; whoever was aborted since the launch has no
        # token to come
        completed_prefills = [r for r in plan.sampled[len(plan.decodes) :] if r.num_to_come]
        for request in self.scheduler.resolve(plan, tokens):
            del self.requests[request.id]
        self._note_first_tokens(completed_prefills)
        for request in completed_prefills if self.num_choices else ():
            self._fork_choices(request)
        if self.check:
            self.scheduler.check()
        new = zip(plan.sampled, tokens, live, strict=True)
        if plan.logprobs or self.prompt_scores or min(tokens, default=0) < 0:
            return [self._output(r, token, plan) for r, token, n in new if n]
        rest = (
            None,
            None,
            None,
        )  # the hot loop: of 256 outputs, Output(..) would take 25 us more than this
        return [
            tuple.__new__(Output, (r.id, [token], r.finish_reason, r.num_hit_tokens, *rest))
            for r, token, n in new
            if n
        ]

    def _output(self, r: Request, token: int, plan: Plan) -> Output:
        if token < 0:  # the sampler's word for logits that are not numbers
            self.abort(r.id)
            return Output(
                r.id,
                [],
                "error",
                error="the model's logits are not numbers: its weights are broken",
            )
        found = plan.logprobs.get(r), self.prompt_scores.pop(r.id, None)
        return Output(r.id, [token], r.finish_reason, r.num_hit_tokens, None, *found)

    def _fail(self, plan: Plan, error: BaseException) -> list[Output]:
        """
        End whoever took part in a step: what it wrote of their K, V and device state is unknown,
        after Ctrl-C too, which goes on from here.
        """
        took_part = dict.fromkeys(plan.decodes + [r for r, _ in plan.chunks] + plan.admitted)
        failed = [
            r for r in took_part if self.requests.get(r.id) is r
        ]  # the others have ended since
        for request in failed:
            self.abort(request.id)
            request.finish_reason = "error"
        if not isinstance(error, Exception):
            raise error
        return [Output(r.id, [], "error", error=f"{type(error).__name__}: {error}") for r in failed]

    def generate(
        self,
        prompts: Iterable[list[int]],
        params: SamplingParams | list[SamplingParams],
        progress: bool = True,
    ) -> list[list[int]]:
        """
        Continue all prompts (lists of token ids), batched continuously, by one SamplingParams or
        one for each prompt. Returns the answers in order, a stop token included. Raises ValueError
        for what does not fit, RuntimeError if a step failed; either way, and after Ctrl-C, nothing
        of the call stays in the engine.
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
                self.in_flight = (
                    None  # what is on the device's stream is before whatever uses its blocks again
                )
        return [r.generated_tokens for r in requests]

    def _run_until_done(self, total: int, progress: bool):
        """
        Step until idle, with a progress bar on stderr a few times a second and the counts at the
        end.
        """
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
                print(
                    f"\r[{bar:20}] {done}/{total} requests, {new / seconds:,.0f} tok/s",
                    end="",
                    file=sys.stderr,
                )
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
        """
        What a server's metrics show. `waited` has the seconds in the queue of each request that was
        admitted since the last call, `prefilled` those from there to the first token, of each that
        got its first.
        """
        scheduler = self.scheduler
        delays = {name: list(values) for name, values in self.delays.items()}
        for values in self.delays.values():
            values.clear()
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_usage": 1 - scheduler.block_allocator.num_free / self.num_blocks,
            "queries": scheduler.num_queried_tokens,
            "hits": scheduler.num_hit_tokens,
            "preemptions": scheduler.num_preemptions,
            "at_work": self.num_at_work,
            **delays,
        }

    def summary(self, before: dict[str, int], seconds: float) -> str:
        """What happened since the counts were `before`; the peak is of the engine's whole life."""
        new = {name: count - before[name] for name, count in self.counts().items()}
        hit_rate = new.pop("hit tokens") / max(1, new.pop("queried tokens"))
        counts = ", ".join(f"{count:,} {name}" for name, count in new.items())
        peak = f"peak {self.scheduler.peak_blocks} of {self.num_blocks} blocks"
        return f"{counts}, prefix hit rate {hit_rate:.0%}, {peak}, {seconds:.2f} s"

    @torch.inference_mode()
    def beam_search(
        self, prompt_tokens: list[int], width: int, max_tokens: int
    ) -> list[tuple[list[int], float]]:
        """
        The `width` likeliest answers that beam search finds, best first, each with its
        log-probability; an answer ends at max_tokens or after the end-of-text token. Beams are
        forks: they share the blocks of what they have in common, and copy the last one on write.
        Needs the engine for itself; raises ValueError for what does not fit.
        """
        self._check_beams(len(prompt_tokens), width, max_tokens)
        first = self.add_request(
            "beam", prompt_tokens, replace(GREEDY, max_tokens=max_tokens, ignore_eos=True)
        )
        beams, answers = (
            {first: 0.0},
            [],
        )  # request -> log-probability; (tokens, log-probability), best first
        try:
            # log-probabilities only fall: a beam behind the worst of enough answers stays behind
            while beams and (len(answers) < width or max(beams.values()) > answers[-1][1]):
                plan = self.scheduler.plan(self.num_steps)
                self.num_steps += 1
                wanted, _, _, logits, _ = self.runner.start(plan)
                if not plan.sampled:  # a long prompt takes several steps
                    self.scheduler.update(plan, [])
                    continue
                beams, ended = self._extend_beams(
                    plan, beams, logits[wanted].float().log_softmax(-1), width
                )
                answers = sorted(answers + ended, key=lambda answer: -answer[1])[:width]
        finally:
            for request in list(self.requests.values()):
                self.abort(request.id)
        return answers

    def _check_beams(self, P: int, width: int, max_tokens: int):
        """
        Raises ValueError unless `width` beams of P + max_tokens tokens have rows and blocks, all at
        once.
        """
        S, rows = self.scheduler.block_size, self.scheduler.max_num_seqs
        if self.has_work:
            raise ValueError(
                f"beam search needs the engine for itself, {len(self.requests)} requests are under way"
            )
        if not 1 <= width <= rows:
            raise ValueError(
                f"a beam width of {width} needs as many rows, there are {rows}: change width or max_num_seqs"
            )
        needed = P // S + width * (
            self.scheduler.blocks_for(P + max_tokens) - P // S
        )  # full prompt blocks are shared
        if needed > self.num_blocks:
            raise ValueError(
                f"{width} beams need {needed} blocks, the pool has {self.num_blocks}: change width or pool"
            )

    def _extend_beams(
        self, plan: Plan, beams: dict[Request, float], logprobs: torch.Tensor, width: int
    ):
        """
        Replace the beams by their best `width` extensions, given the log-probabilities (R, V) of
        their next tokens. Returns these, {request: log-probability}, and the answers that ended
        here, [(tokens, log-probability)].
        """
        scores = logprobs + torch.tensor([[beams[r]] for r in plan.sampled], device=logprobs.device)
        V, best = (
            scores.shape[1],
            scores.flatten().topk(min(2 * width, scores.numel())),
        )  # at most `width` are ends
        ended, going = [], []  # (beam, token, log-probability), best first
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            beam, token = plan.sampled[index // V], index % V
            last = (
                token in self.config.eos_token_ids or beam.num_generated + 1 == beam.max_new_tokens
            )
            (ended if last else going).append((beam, token, score))
        answers = [([*beam.generated_tokens, token], score) for beam, token, score in ended]
        own = {
            beam: token for beam, token, _ in reversed(going[:width])
        }  # each beam's first, its best, wins
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
    """
    One line of trace: who decodes, which chunk of whom is prefilled, and how the blocks stand.
    """
    allocator, S = scheduler.block_allocator, scheduler.block_size
    chunks = [f"{r.id}[{r.prefill_cursor}:{r.prefill_cursor + n}]" for r, n in plan.chunks]
    used = sum(count > 0 for count in allocator.ref_counts)
    lengths = {r: r.num_filled_slots for r in scheduler.running}  # and after the step:
    for request, n in [(r, 1) for r in plan.decodes] + plan.chunks:
        lengths[request] += n
    filled = {
        b: min(S, n - i * S)
        for r, n in lengths.items()
        for i, b in enumerate(r.block_table[: -(-n // S)])
    }
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


# --------------------------------------------------------------------------------------------------
# Two loops around a step: the tutorial's, and a server's


def interleaved_generate(
    model: GPT,
    requests: list[Request],
    policy: str = "fcfs",
    token_budget: int = 16,
    max_kv_tokens: int = 256,
) -> Scheduler:
    """
    The tutorial's loop: serve all requests, greedily or by their `params`, in a pool of
    max_kv_tokens; the answers are in their `generated_tokens`. Returns the scheduler, for its
    counts.
    """
    for r in requests:
        if len(r.prompt_tokens) + r.max_new_tokens > model.config.context_length:
            raise ValueError(
                f"request {r.id}: {len(r.prompt_tokens)} prompt tokens + {r.max_new_tokens} new ones do not fit into "
                f"the context length of {model.config.context_length}: shorten one of them"
            )
    settings = SchedulerSettings(max_num_seqs=max(1, len(requests)))
    scheduler = Scheduler(policy, token_budget, max_kv_tokens, settings=settings)
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


def run(engine: Engine, links: Links, max_queue: int | None = None):
    """
    The engine's own loop, for a thread or a process: take in what has arrived, compute a step, send
    out what it brought, until all other sides are gone. Over each link go (links.py has the wire):

        in   {"op": "add", "id", "prompt", "params", "options": more arguments of add_request, if any}
             {"op": "abort", "id"}
        out  {"op": "ready", "max_model_len", "max_num_seqs", "vocab_size", "eos_token_ids"}
             {"op": "step", "out": [[id, tokens, finish_reason, cached_tokens, scores...], ...], "stats": of the engine}
             {"op": "error", "id", "message", "kind"}: "invalid" for what the client can change, "full" when more than
             `max_queue` choices would wait for a row, else "internal"

    Ids are the link's own. What a link has added ends with it.
    """
    limits = {"max_model_len": engine.max_model_len, "max_num_seqs": engine.scheduler.max_num_seqs}
    limits |= {"vocab_size": engine.config.vocab_size, "eos_token_ids": engine.config.eos_token_ids}
    links.greet({"op": "ready"} | limits)
    while links.is_wanted:
        turn(engine, links, max_queue)


def turn(engine: Engine, links: Links, max_queue: int | None):
    """
    One round of `run`: take messages in, compute a step, send its tokens out. Waits only if nothing
    is in work.
    """
    for link, message in links.receive(timeout=0 if engine.has_work else None):
        take_in(engine, link, message, max_queue)
    for output in engine.step():
        send_out(links, output)
    links.flush(engine.stats())


def take_in(engine: Engine, link: Link, message: dict, max_queue: int | None):
    """Carry out what an HTTP process wants."""
    match message["op"]:
        case "add":
            try:
                if problem := no_room(engine, message, max_queue):
                    link.put(
                        {"op": "error", "id": message["id"], "message": problem, "kind": "full"}
                    )
                else:
                    add(engine, link, message)
            except (ValueError, TypeError) as error:
                link.put(
                    {"op": "error", "id": message["id"], "message": str(error), "kind": "invalid"}
                )
        case "abort":
            engine.abort(f"{link.number}:{message['id']}")
        case "gone":
            for id in [*engine.requests, *engine.num_choices]:
                if id.startswith(f"{link.number}:"):
                    engine.abort(id)


def add(engine: Engine, link: Link, message: dict):
    """Raises ValueError or TypeError for what the engine does not take."""
    params = message["params"]
    if bias := params.get("logit_bias"):
        params["logit_bias"] = {
            int(token): value for token, value in bias.items()
        }  # JSON's keys are texts
    if allowed := params.get("allowed_token_ids"):
        params["allowed_token_ids"] = array("q", allowed)  # 8 bytes for each, a list takes 40
    id = f"{link.number}:{message['id']}"
    engine.add_request(
        id, message["prompt"], SamplingParams(**params), **message.get("options", {})
    )


def no_room(engine: Engine, message: dict, max_queue: int | None) -> str:
    """
    Why the queue cannot take a request, "" if it can. Decided here, since here all HTTP processes'
    requests meet.
    """
    if max_queue is None:
        return ""
    count, at_work = message.get("options", {}).get("n", 1), engine.num_at_work
    capacity = engine.scheduler.max_num_seqs + max_queue
    if count + at_work <= capacity:
        return ""
    return f"{count} choices beside {at_work} in work are more than {capacity}: try again later"


def send_out(links: Links, output: Output):
    """Give what a step brought for a request to the link that added it."""
    number, _, id = output.id.partition(":")
    link = links.links.get(int(number))
    if link is None:  # its process is gone, and this was on its way
        return
    if output.error:
        link.put({"op": "error", "id": id, "message": output.error, "kind": "internal"})
        return
    row = [id, output.tokens, output.finish_reason, output.cached_tokens]
    if output.logprobs or output.prompt_logprobs:
        row += [output.logprobs and [output.logprobs], output.prompt_logprobs]
    link.put_row(row)
