"""
The metrics at /metrics, in Prometheus' text format and under vLLM's names, so that its Grafana
boards and alerts work.

    metrics = Metrics("out/stdlib")
    metrics.count_tokens(choice, 3)        # a step brought three tokens of one continuation
    metrics.count_answer(404)
    metrics.update(engine_stats)           # `Engine.stats()`, as each step's message brings them
    metrics.text()

Not run by itself: the HTTP process has one. It counts the answers that clients get; the engine's
own numbers come with its messages.
"""

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Upper bounds of the histograms' buckets: vLLM's of all of its histograms, so that its boards and
# rules find them, and finer ones in front for what is faster here. They are the same for every
# model, because histograms of several servers can be added up only if their bounds agree.
SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.025, 0.04, 0.05, 0.06, 0.075, 0.08, 0.1]
SECONDS += [0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 0.8, 1, 1.5, 2, 2.5, 5, 7.5, 10, 15, 20, 30, 40]
SECONDS += [50, 60, 80, 120, 160, 240, 480, 640, 960, 1920, 2560, 7680]
LENGTHS = [m * 10**e for e in range(6) for m in (1, 2, 5)]  # 1 to 500,000 tokens


class Metrics:
    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self.totals = {}  # the last value of each of the engine's counters

        def metric(kind, name, about, **options):
            labels = ["model_name"]
            made = kind(f"vllm:{name}", about, labels, registry=self.registry, **options)
            return made.labels(model_name)  # there is one model: its label is found once

        # keyed by their names in Engine.stats()
        gauge = partial(metric, Gauge)
        counter = partial(metric, Counter)
        self.gauges = {
            "running": gauge("num_requests_running", "Choices being computed."),
            "waiting": gauge("num_requests_waiting", "Choices waiting for their turn."),
            "kv_usage": gauge("kv_cache_usage_perc", "Share of KV blocks held by requests, 0..1."),
        }
        guessed = counter("spec_decode_num_draft_tokens", "Tokens guessed (--speculate).")
        right = counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right.")
        self.counters = {
            "queries": counter("prefix_cache_queries", "Prompt tokens looked up in the cache."),
            "hits": counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
            "preemptions": counter("num_preemptions", "Requests preempted for lack of blocks."),
            "guessed": guessed,
            "right": right,
        }
        timing = partial(metric, Histogram, buckets=SECONDS)
        self.delays = {  # of each request; its n choices share a prompt
            "waited": timing("request_queue_time_seconds", "From the request to its first step."),
            "prefilled": timing("request_prefill_time_seconds", "From there to the first token."),
        }
        # counted in `count_tokens`, as tokens come
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens computed or found.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        about = "From the request to its first token."
        self.first_token = timing("time_to_first_token_seconds", about)
        about = "From one token of a choice to the next."
        self.inter_token = timing("inter_token_latency_seconds", about)

        # of each choice that has finished
        length = partial(metric, Histogram, buckets=LENGTHS)
        self.latency = timing("e2e_request_latency_seconds", "From the request to its last token.")
        self.decode_time = timing("request_decode_time_seconds", "From the first to the last.")
        self.prompt_length = length("request_prompt_tokens", "Tokens of a choice's prompt.")
        self.generation_length = length("request_generation_tokens", "Tokens of a choice.")

        # of each prompt whose n choices have finished
        about = "Tokens of the longest of n choices."
        self.longest_choice = length("request_max_num_generation_tokens", about)

        labels = ["model_name", "finished_reason"]
        about = "Choices finished, and how."
        success = Counter("vllm:request_success", about, labels, registry=self.registry)
        reasons = ("stop", "length", "abort", "error")
        # all from the start, so that each is shown with 0 before it happens
        self.finished = {reason: success.labels(model_name, reason) for reason in reasons}
        labels = ["model_name", "status"]
        about = "Calls refused or failed, by HTTP status; the access log says why."
        refused = Counter("pagedgpt:requests_refused", about, labels, registry=self.registry)
        self.refused = partial(refused.labels, model_name)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def count_tokens(self, choice, num_tokens):
        """A step, or several at once, brought so many tokens of a choice (answers.Choice)."""
        now = time.monotonic()
        self.generation_tokens.inc(num_tokens)
        if choice.first_step:  # tokens that come together share the time since those before
            self.inter_token.observe((now - choice.last_step) / max(1, num_tokens))
        else:
            choice.first_step = now
            self.first_token.observe(now - choice.job.started)
            # n choices share a prompt, which counts once
            if choice is choice.siblings[0]:
                self.prompt_tokens.inc(len(choice.prompt))
        choice.last_step = now
        if choice.finish_reason:
            self._count_finished(choice)

    def _count_finished(self, choice):
        """A choice came to its own end, at its last step."""
        self.finished[choice.finish_reason].inc()
        self.latency.observe(choice.last_step - choice.job.started)
        self.decode_time.observe(choice.last_step - choice.first_step)
        self.prompt_length.observe(len(choice.prompt))
        self.generation_length.observe(choice.num_tokens)
        if all(sibling.finish_reason for sibling in choice.siblings):
            self.longest_choice.observe(max(sibling.num_tokens for sibling in choice.siblings))

    def count_answer(self, status: int):
        """A call has ended with this status; 499, a client that hung up, was no refusal."""
        if status >= 400 and status != 499:
            self.refused(status).inc()

    def update(self, stats):
        """
        Show the numbers of Engine.stats(). Prometheus' counters must not fall, so they go on where
        the totals of a new engine begin at 0.
        """
        for name, gauge in self.gauges.items():
            gauge.set(stats[name])
        for name, counter in self.counters.items():
            counter.inc(stats[name] - self.totals.get(name, 0))
            self.totals[name] = stats[name]
        for name, histogram in self.delays.items():
            for delay in stats[name]:
                histogram.observe(delay)

    def engine_ended(self):
        """It holds nothing any more; the next one sends its numbers only once it has work."""
        self.totals.clear()
        for gauge in self.gauges.values():
            gauge.set(0)
