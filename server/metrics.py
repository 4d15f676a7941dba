"""
The metrics at /metrics, in Prometheus' text format. They have the same names as vLLM's, so Grafana
dashboards and alerts made for vLLM work.

    metrics = Metrics("out/stdlib")
    metrics.count_tokens(choice, 3)        # a continuation has three new tokens
    metrics.count_answer(404)
    metrics.update(engine_stats)           # `Engine.stats()`, part of each step's message
    generate_latest(metrics.registry)      # the text

Not run by itself: the HTTP process has one Metrics, which counts the answers that clients get. The
engine sends its own metrics along with its messages.
"""

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# Upper bounds of the histogram buckets. They include the bounds of all of vLLM's histograms,
# because vLLM's dashboards and rules look for these. There are also smaller bounds, for values that
# are smaller here. The bounds are the same for all models, because histograms from several servers
# can only be added if their bounds match.
SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.025, 0.04, 0.05, 0.06, 0.075, 0.08, 0.1]
SECONDS += [0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 0.8, 1, 1.5, 2, 2.5, 5, 7.5, 10, 15, 20, 30, 40]
SECONDS += [50, 60, 80, 120, 160, 240, 480, 640, 960, 1920, 2560, 7680]
LENGTHS = [m * 10**e for e in range(6) for m in (1, 2, 5)]  # 1 to 500,000 tokens
KINDS = {
    "gauge": Gauge,
    "counter": Counter,
    "seconds": partial(Histogram, buckets=SECONDS),
    "tokens": partial(Histogram, buckets=LENGTHS),
}

# The metrics, in the order shown at /metrics. The columns are the source of the value, the kind,
# the name after "vllm:", and the help text. The sources in this table are fields of
# `Engine.stats()`. Delays are counted once for each prompt, even if n choices share it.
OF_THE_ENGINE = """\
running      gauge    num_requests_running             Choices being computed.
waiting      gauge    num_requests_waiting             Choices waiting to be computed.
kv_usage     gauge    kv_cache_usage_perc              Share of KV blocks in use by requests, 0..1.
guessed      counter  spec_decode_num_draft_tokens     Draft tokens (--speculate).
right        counter  spec_decode_num_accepted_tokens  Draft tokens that were accepted.
queries      counter  prefix_cache_queries             Prompt tokens looked up in the prefix cache.
hits         counter  prefix_cache_hits                Prompt tokens found in the prefix cache.
preemptions  counter  num_preemptions                  Requests preempted for lack of blocks.
waited       seconds  request_queue_time_seconds       Time from a request to its first step.
prefilled    seconds  request_prefill_time_seconds     Time from its first step to its first token.
"""
# The sources in this table are set in `Metrics.count_tokens` and `Metrics._count_finished`.
OF_CHOICES = """\
prompt         counter  prompt_tokens                      Prompt tokens, computed or cached.
generation     counter  generation_tokens                  Tokens generated.
first_token    seconds  time_to_first_token_seconds        Time from a request to its first token.
inter_token    seconds  inter_token_latency_seconds        Time between two tokens of a choice.
latency        seconds  e2e_request_latency_seconds        Time from a request to its last token.
decode         seconds  request_decode_time_seconds        Time from its first token to its last.
prompt_length  tokens   request_prompt_tokens              Tokens in a choice's prompt.
length         tokens   request_generation_tokens          Tokens in a choice.
longest        tokens   request_max_num_generation_tokens  Tokens in the longest of n choices.
"""
# How a choice can finish. Each reason has a metric from the start, which is 0 until the reason
# occurs.
FINISHED = ("stop", "length", "abort", "error")


class Metrics:
    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.totals = {}  # source -> the last value of the engine's counter
        self.of_the_engine = self._made(OF_THE_ENGINE)
        self.of_choices = self._made(OF_CHOICES)
        about = "Finished choices, by finish reason."
        finished = self._labelled(Counter, "vllm:request_success", about, "finished_reason")
        self.finished = {reason: finished(reason) for reason in FINISHED}
        about = "Calls that were refused or failed, by HTTP status; the access log has the reasons."
        self.refused = self._labelled(Counter, "pagedgpt:requests_refused", about, "status")

    def _made(self, table: str) -> dict:
        """Create the metrics in a table. Returns {source: metric}."""
        metrics = {}
        for row in table.splitlines():
            source, kind, name, about = row.split(maxsplit=3)
            metrics[source] = self._labelled(KINDS[kind], f"vllm:{name}", about)()
        return metrics

    def _labelled(self, kind, name: str, about: str, *labels: str) -> partial:
        """
        Create a metric labelled with the model's name. Returns a function of the other labels.
        """
        made = kind(name, about, ["model_name", *labels], registry=self.registry)
        return partial(made.labels, self.model_name)

    def count_tokens(self, choice, num_tokens):
        """Count a choice's (answers.Choice) new tokens, from one step or several steps together."""
        now = time.monotonic()
        metrics = self.of_choices
        metrics["generation"].inc(num_tokens)
        if choice.first_step:  # tokens that arrive together share the time since the previous ones
            metrics["inter_token"].observe((now - choice.last_step) / max(1, num_tokens))
        else:
            choice.first_step = now
            metrics["first_token"].observe(now - choice.job.started)
            # the n choices share the prompt, so it is counted only once
            if choice is choice.siblings[0]:
                metrics["prompt"].inc(len(choice.prompt))
        choice.last_step = now
        if choice.finish_reason:
            self._count_finished(choice)

    def _count_finished(self, choice):
        """Count a choice that has just finished normally, that is, without an abort or error."""
        self.finished[choice.finish_reason].inc()
        metrics = self.of_choices
        metrics["latency"].observe(choice.last_step - choice.job.started)
        metrics["decode"].observe(choice.last_step - choice.first_step)
        metrics["prompt_length"].observe(len(choice.prompt))
        metrics["length"].observe(choice.num_tokens)
        if all(sibling.finish_reason for sibling in choice.siblings):
            metrics["longest"].observe(max(sibling.num_tokens for sibling in choice.siblings))

    def count_answer(self, status: int):
        """
        Count a call that was refused or failed. Status 499 is neither: the client has disconnected.
        """
        if status >= 400 and status != 499:
            self.refused(status).inc()

    def update(self, stats):
        """
        Update the metrics from Engine.stats(). Prometheus' counters must never decrease. So when
        the totals drop to 0 (client.IDLE, or a new engine), the counters keep their values and
        continue from there.
        """
        for source, metric in self.of_the_engine.items():
            value = stats.get(source, 0)  # missing if its stage was deleted
            if isinstance(metric, Gauge):
                metric.set(value)
            elif isinstance(metric, Counter):
                metric.inc(max(0, value - self.totals.get(source, 0)))
                self.totals[source] = value
            else:
                for delay in value or ():
                    metric.observe(delay)
