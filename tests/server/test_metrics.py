"""
/metrics: each scenario states all numbers that change, and by how much. No other number may change,
so a count taken twice, under another name or not at all is always found. The test controls time, so
sums of seconds are exact.
"""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from wires import House

from server import metrics

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def shown(house: House) -> dict[str, float]:
    """
    Return {name without vllm:, with its labels: value} of everything /metrics shows of this model.
    """
    values = {}
    for family in text_string_to_metric_families(house.get("/metrics").body):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "fake"
            name = ":".join([sample.name.removeprefix("vllm:"), *sample.labels.values()])
            values[name] = sample.value
    return values


class Watched:
    """The numbers of a server that have changed since the last look."""

    def __init__(self, house: House):
        self.house = house
        self.before = shown(house)

    def moved(self) -> str:
        """
        Return a line for each number that changed, in alphabetical order: its name, and by how
        much. A histogram has its count and its sum. A gauge has its value, if it is not 0.
        """
        after = shown(self.house)
        moves = {}
        for name, value in after.items():
            change = value - (0 if name in GAUGES else self.before.get(name, 0))
            if change and not re.search("_bucket|_created|_sum", name):
                total = name.replace("_count", "_sum")
                sums = f" {after[total] - self.before[total]:g}" if total != name else ""
                moves[name.replace("_total", "")] = f"{change:g}{sums}"
        self.before = after
        return "".join(f"{name} {moves[name]}\n" for name in sorted(moves))

    def expect(self, moves: str):
        assert self.moved() == moves


@pytest.fixture
def watched(house):
    return Watched(house)


def test_the_numbers_of_several_choices(house, watched):
    """
    A prompt counts once, lengths and times for each choice. The longest choice counts when all
    choices of a prompt have ended.
    """
    house.ask(["abc", "de"], n=2, max_tokens=7)
    house.clock.run(1)
    house.engine.step({"0": b"x", "0.1": b"y"})
    watched.expect(
        """\
generation_tokens 2
prompt_tokens 3
time_to_first_token_seconds_count 2 2
"""
    )
    house.clock.run(1)
    house.engine.step({"0": b"x"}, "length")
    house.engine.step({"0.1": b"y"})
    watched.expect(
        """\
e2e_request_latency_seconds_count 1 2
generation_tokens 2
inter_token_latency_seconds_count 2 2
request_decode_time_seconds_count 1 1
request_generation_tokens_count 1 2
request_prompt_tokens_count 1 3
request_success:length 1
"""
    )
    house.clock.run(1)
    house.engine.step({"0.1": b"abc"}, "stop")
    house.engine.step({"1.1": b"xyz"}, "length")  # the second prompt: its second choice comes first
    watched.expect(
        """\
e2e_request_latency_seconds_count 2 6
generation_tokens 6
inter_token_latency_seconds_count 1 0.333333
request_decode_time_seconds_count 2 2
request_generation_tokens_count 2 8
request_max_num_generation_tokens_count 1 5
request_prompt_tokens_count 2 5
request_success:length 1
request_success:stop 1
time_to_first_token_seconds_count 1 3
"""
    )
    house.engine.step(b"xy", "length")
    watched.expect(
        """\
e2e_request_latency_seconds_count 1 3
generation_tokens 2
prompt_tokens 2
request_decode_time_seconds_count 1 0
request_generation_tokens_count 1 2
request_max_num_generation_tokens_count 1 3
request_prompt_tokens_count 1 2
request_success:length 1
time_to_first_token_seconds_count 1 3
"""
    )


def test_a_stop_string_counts_no_token_after_it(house, watched):
    """
    They were generated, so they count as work. The answer's length is what clients are charged for.
    """
    house.ask("ab", max_tokens=9, stop="yz")
    house.engine.step(b"xyzab")
    moved = watched.moved()
    assert "\ngeneration_tokens 5\n" in moved
    assert "\nrequest_generation_tokens_count 1 3\n" in moved
    assert "\nrequest_success:stop 1\n" in moved


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_do_not_end_well(house, watched, stream):
    """
    Each running choice has an end, but those that had ended before count no second time. A client
    that hangs up was not refused, nor was one whose stream had begun, with a 200.
    """
    caller = house.ask("ab", n=3, stream=stream)
    house.engine.step({"0": b"x"}, "length")
    watched.moved()
    caller.hang_up()
    watched.expect("request_success:abort 2\n")
    house.ask(["ab", "c"], stream=stream)
    house.engine.fail(id="2")
    watched.expect("pagedgpt:requests_refused:400 1\nrequest_success:error 2\n")
    house.ask(stream=stream)
    house.engine.step(b"x")
    watched.moved()
    house.engine.fail(id="3")
    refused = "" if stream else "pagedgpt:requests_refused:400 1\n"
    watched.expect(f"{refused}request_success:error 1\n")


def test_each_refusal_counts_once_by_its_status():
    """A full queue and a deadline also count."""
    flags = ["--request-seconds", "5", "--max-num-seqs", "1", "--max-queue", "0"]
    with House(*flags) as house:
        house.service.encode = lambda body: {}["a bug"]
        watched = Watched(house)
        house.call("/v1/models", Host="evil.example")
        watched.expect("pagedgpt:requests_refused:403 1\n")
        house.call("/nowhere")
        watched.expect("pagedgpt:requests_refused:404 1\n")
        house.call("/tokenize", {"prompt": "a"})
        watched.expect("pagedgpt:requests_refused:500 1\n")
        house.connect().send(b"this is no HTTP\r\n\r\n")
        watched.expect("pagedgpt:requests_refused:400 1\n")
        late, _ = house.ask([1]), house.ask([1])
        watched.expect("pagedgpt:requests_refused:429 1\n")
        house.clock.run(5)
        watched.expect("pagedgpt:requests_refused:503 1\nrequest_success:error 1\n")
        message = "not finished within 5 s, this server's limit"
        assert late.refusal == (503, "timeout", message)


def test_the_engines_own_numbers_are_shown(house, watched):
    """
    Gauges show their value, also when it falls. Totals and delays count once, under their own
    names.
    """
    house.engine.step(running=3, waiting=2, kv_usage=0.75, queries=20, hits=8, preemptions=1)
    watched.expect(
        """\
kv_cache_usage_perc 0.75
num_preemptions 1
num_requests_running 3
num_requests_waiting 2
prefix_cache_hits 8
prefix_cache_queries 20
"""
    )
    house.engine.step(queries=26, hits=8, preemptions=3, waited=[0.5, 0.25], prefilled=[2.0])
    watched.expect(
        """\
num_preemptions 2
prefix_cache_queries 6
request_prefill_time_seconds_count 1 2
request_queue_time_seconds_count 2 0.75
"""
    )


def test_without_a_stage_its_numbers_are_zero(house, watched):
    """Would catch: a server without engine/drafts.py that loses its engine with the first step."""
    del house.engine.stats["guessed"], house.engine.stats["right"]
    house.engine.step(running=3)
    watched.expect("num_requests_running 3\n")


def test_totals_go_on_after_another_engine(house, watched):
    """
    A new engine counts from 0, and a falling counter would look like a new server. Previously, only
    the part of the new engine's first count that exceeded the old one's was added. And the requests
    of the old engine were shown as running until the next one had work, for hours at night.
    """
    house.engine.step(queries=5, hits=5)
    house.engine.step(queries=7, hits=6, running=3, waiting=2, kv_usage=0.75)
    house.engine.die()
    house.clock.run(1)
    house.engine.ready()
    watched.expect("prefix_cache_hits 6\nprefix_cache_queries 7\n")
    house.engine.step(queries=9, hits=0)
    house.engine.step(queries=10, hits=4)
    watched.expect("prefix_cache_hits 4\nprefix_cache_queries 10\n")


# Each histogram, and a value at a bound, which belongs to that bucket
HISTOGRAMS = {
    "time_to_first_token_seconds": 2.5,
    "inter_token_latency_seconds": 5,
    "e2e_request_latency_seconds": 7.5,
    "request_decode_time_seconds": 5,
    "request_queue_time_seconds": 0.3,
    "request_prefill_time_seconds": 480,
    "request_prompt_tokens": 5,
    "request_generation_tokens": 2,
    "request_max_num_generation_tokens": 2,
}
# All of vLLM's own lists combined: https://docs.vllm.ai/en/stable/design/metrics
VLLMS_SECONDS = (
    "0.001 0.005 0.01 0.02 0.025 0.04 0.05 0.06 0.075 0.08 0.1 0.15 0.2 0.25 0.3 0.4 0.5 0.75 0.8 "
    "1 1.5 2 2.5 5 7.5 10 15 20 30 40 50 60 80 120 160 240 480 640 960 1920 2560 7680"
)
VLLMS_LENGTHS = "1 2 5 10 20 50 100 500000"


# Metrics that the twelve panels of vLLM's Grafana board query, besides the histograms
# (examples/observability/prometheus_grafana/grafana.json).
GRAFANA_BOARD = "num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total "
GRAFANA_BOARD += "generation_tokens_total request_success_total:stop request_success_total:length "
GRAFANA_BOARD += "request_success_total:abort request_success_total:error"


def test_a_board_of_vllms_has_its_metrics_and_buckets(house):
    """The metrics exist before anything is served. There are finer buckets besides vLLM's."""
    names = shown(house).keys()
    assert names >= set(GRAFANA_BOARD.split())
    house.ask("a" * 5, max_tokens=20)
    house.clock.run(2.5)
    house.engine.step(b"x")
    house.clock.run(5)
    house.engine.step(b"y", "length", waited=[0.3], prefilled=[480])
    samples = shown(house)
    for bounds, vllms in ((metrics.SECONDS, VLLMS_SECONDS), (metrics.LENGTHS, VLLMS_LENGTHS)):
        assert bounds == sorted(set(bounds))
        assert set(bounds) >= set(map(float, vllms.split()))
    for name, value in HISTOGRAMS.items():
        assert f"{name}_sum" in names
        bounds = metrics.SECONDS if name.endswith("seconds") else metrics.LENGTHS
        expected = {f"{name}_bucket:{float(bound)}": float(value <= bound) for bound in bounds}
        buckets = {key: count for key, count in samples.items() if key.startswith(f"{name}_bucket")}
        assert buckets == expected | {f"{name}_bucket:+Inf": 1.0}
