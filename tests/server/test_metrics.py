"""
What /metrics shows: each scenario says all numbers that it moves, and by how much. Nothing else may
move, so a count taken twice, under another name, or not at all is found whichever it is. Time is
the test's own: sums of seconds are exact.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from wires import House, request

from engine import engine as engine_module
from engine import process as loop
from engine.engine import Engine
from model import GPT, GPTConfig
from params import Settings
from server import metrics

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def shown(house: House) -> dict[str, float]:
    """{name without vllm:, with its labels: value} of all that /metrics shows of this model."""
    found = {}
    for family in text_string_to_metric_families(house.get("/metrics").body):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "fake"
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            name = sample.name.removeprefix("vllm:")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


class Watched:
    """Of a server, the numbers that have moved since the last look."""

    def __init__(self, house: House):
        self.house = house
        self.before = shown(house)

    def moved(self) -> dict[str, float]:
        """{name: by how much}, for a gauge its value; buckets and times of creation aside."""
        after = shown(self.house)
        moves = {}
        for name, value in after.items():
            if re.search(r"_bucket|_created", name):
                continue
            if name in GAUGES:
                moves[name] = value
            elif value != self.before.get(name, 0):
                moves[name] = round(value - self.before.get(name, 0), 6)
        self.before = after
        return {name: value for name, value in moves.items() if value != 0}


def observed(name: str, *values: float) -> dict[str, float]:
    """What a histogram shows of these values."""
    shown = {f"{name}_count": len(values), f"{name}_sum": round(sum(values), 6)}
    return {name: value for name, value in shown.items() if value}


def success(reason: str, count: int = 1) -> dict[str, float]:
    return {f"request_success_total{{finished_reason={reason}}}": count}


def refused(status: int, count: int = 1) -> dict[str, float]:
    return {f"pagedgpt:requests_refused_total{{status={status}}}": count}


def gauges(running: float, waiting: float, usage: float) -> dict[str, float]:
    """As `Watched.moved` has them, that is without those that are 0."""
    values = dict(zip(GAUGES, (running, waiting, usage), strict=True))
    return {name: value for name, value in values.items() if value}


@pytest.fixture
def house():
    with House() as house:
        yield house


@pytest.fixture
def watched(house):
    return Watched(house)


FIRST = "time_to_first_token_seconds"
BETWEEN = "inter_token_latency_seconds"
WHOLE = "e2e_request_latency_seconds"
DECODE = "request_decode_time_seconds"
QUEUE = "request_queue_time_seconds"
PREFILL = "request_prefill_time_seconds"
PROMPT = "request_prompt_tokens"
LENGTH = "request_generation_tokens"
LONGEST = "request_max_num_generation_tokens"


def tokens(generated: int, prompt: int = 0) -> dict[str, float]:
    counts = {"generation_tokens_total": generated, "prompt_tokens_total": prompt}
    return {name: count for name, count in counts.items() if count}


def ended(reason: str, whole: float, decode: float, prompt: int, length: int) -> dict[str, float]:
    """What a choice adds when it ends."""
    times = observed(WHOLE, whole) | observed(DECODE, decode)
    return times | observed(PROMPT, prompt) | observed(LENGTH, length) | success(reason)


def test_the_numbers_of_one_request(house, watched):
    """
    First token after 3 s, two more 0.5 s later (0.25 s each), the last one after another second.
    """
    house.ask("abcde", max_tokens=40)
    house.clock.run(3)
    house.engine.step({"0": b"x"})
    assert watched.moved() == observed(FIRST, 3) | tokens(1, prompt=5)
    house.clock.run(0.5)
    house.engine.step({"0": b"yz"})
    assert watched.moved() == observed(BETWEEN, 0.25) | tokens(2)
    house.clock.run(1)
    house.engine.step({"0": b"!"}, "length")
    last = observed(BETWEEN, 1) | tokens(1)
    assert watched.moved() == last | ended("length", 4.5, 1.5, 5, 4) | observed(LONGEST, 4)


def test_the_numbers_of_several_choices(house, watched):
    """
    A prompt counts once, lengths and times for each choice, the longest when all choices of a
    prompt have ended.
    """
    house.ask(["abc", "de"], n=2, max_tokens=7)
    house.clock.run(1)
    house.engine.step({"0": b"x", "0.1": b"y"})
    first = observed(FIRST, 1, 1) | tokens(2, prompt=3)
    assert watched.moved() == first
    house.clock.run(1)
    house.engine.step({"0": b"x"}, "length")
    last = observed(BETWEEN, 1) | tokens(1)
    assert watched.moved() == last | ended("length", 2, 1, 3, 2)
    house.clock.run(1)
    house.engine.step({"0.1": b"abc"}, "stop")
    last = observed(BETWEEN, 2 / 3) | tokens(3)
    assert watched.moved() == last | ended("stop", 3, 2, 3, 4) | observed(LONGEST, 4)
    # the second prompt: its second choice has the first tokens
    house.engine.step({"1.1": b"x"}, "length")
    only = observed(FIRST, 3) | tokens(1)
    assert watched.moved() == only | ended("length", 3, 0, 2, 1)
    house.engine.step({"1": b"xy"}, "length")
    only = observed(FIRST, 3) | tokens(2, prompt=2)
    assert watched.moved() == only | ended("length", 3, 0, 2, 2) | observed(LONGEST, 2)


def test_a_stop_string_counts_no_token_after_it(house, watched):
    """
    Generated they were, so they count as work; the answer's length is what the client was charged
    for.
    """
    house.ask("ab", max_tokens=9, stop="yz")
    house.engine.step({"0": b"xyzab"})
    moved = watched.moved()
    assert moved["generation_tokens_total"] == 5 and moved[f"{LENGTH}_sum"] == 3
    assert moved["request_success_total{finished_reason=stop}"] == 1
    assert [message["id"] for message in house.engine.of("abort")] == ["0"]


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_is_an_abort_for_each_choice_that_ran(house, watched, stream):
    """Not for those that had ended; and nobody was refused."""
    caller = house.ask("ab", n=3, stream=stream)
    house.engine.step({"0": b"x"}, "length")
    watched.moved()
    caller.hang_up()
    assert watched.moved() == success("abort", 2)
    assert not house.choices


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind, status", [("invalid", 400), ("full", 429), ("internal", 500)])
def test_what_the_engine_refuses_is_an_error_for_each_choice(house, watched, kind, status, stream):
    caller = house.ask(["ab", "c"], stream=stream)
    house.engine.say({"op": "error", "id": "1", "message": "no", "kind": kind})
    assert caller.answer().status == status
    assert watched.moved() == success("error", 2) | refused(status)


def test_an_error_after_the_headers_is_no_refusal(house, watched):
    """Its status was 200; its choice ended with an error all the same."""
    caller = house.ask(stream=True)
    house.engine.step({"0": b"x"})
    watched.moved()
    house.engine.say({"op": "error", "id": "0", "message": "no", "kind": "internal"})
    assert caller.events[-1]["error"]["message"] == "no"
    assert watched.moved() == success("error")


REFUSALS = {
    400: ("POST", "/v1/completions", {"prompt": 3}, {}),
    401: ("GET", "/v1/models", None, {"Authorization": None}),
    403: ("GET", "/livez", None, {"Origin": "http://evil.example"}),
    404: ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, {}),
    405: ("DELETE", "/v1/completions", None, {}),
    413: ("POST", "/v1/completions", b" " * 2000, {}),
    431: ("GET", "/livez", None, {f"A{number}": "b" for number in range(200)}),
}


def test_each_refusal_counts_once_by_its_status():
    key = {"Authorization": "Bearer sesame"}
    with House("--max-body-mib", "0.001", keys=["sesame"]) as house:
        get = house.get
        house.get = lambda path: get(path, **key)
        watched = Watched(house)
        for status, (method, path, body, headers) in REFUSALS.items():
            for _ in range(2):
                caller = house.call(method, path, body, **(key | headers))
                assert caller.answer().status == status
                caller.hang_up()
            assert watched.moved() == refused(status, 2)
        house.connect().send(b"this is no HTTP\r\n\r\n")
        assert watched.moved() == refused(400)


def test_half_a_body_and_gone_is_no_refusal(house, watched):
    caller = house.connect()
    caller.send(request("POST", "/v1/completions", {"prompt": "a"})[:-1])
    caller.hang_up()
    assert watched.moved() == {}


def test_a_deadline_and_a_full_queue_count(house):
    with House("--request-seconds", "5", "--max-num-seqs", "1", "--max-queue", "0") as house:
        watched = Watched(house)
        first, second = house.ask(), house.ask()
        assert second.answer().status == 429 and watched.moved() == refused(429)
        house.clock.run(5)
        assert first.answer().status == 503 and watched.moved() == success("error") | refused(503)


def test_a_bug_counts_as_a_500(house, watched):
    house.service.encode = lambda request: {}["a bug"]
    assert house.ask().answer().status == 500 and watched.moved() == refused(500)


def test_what_the_engine_says_of_itself_is_shown(house, watched):
    """
    Gauges as they are, also when they fall; totals and delays once each, under their own names.
    """
    house.engine.step(running=3, waiting=2, kv_usage=0.75, queries=20, hits=8, preemptions=1)
    moved = gauges(3, 2, 0.75) | {"prefix_cache_queries_total": 20, "prefix_cache_hits_total": 8}
    assert watched.moved() == moved | {"num_preemptions_total": 1}
    house.engine.step(queries=26, hits=8, preemptions=3, waited=[0.5, 0.25], prefilled=[2.0])
    moved = {"prefix_cache_queries_total": 6, "num_preemptions_total": 2}
    moved |= observed(QUEUE, 0.5, 0.25) | observed(PREFILL, 2)
    assert watched.moved() == moved


def test_totals_go_on_after_another_engine(house, watched):
    """They begin at 0 again there; a counter that falls would look like a new server."""
    house.engine.step(queries=5, hits=5)
    house.engine.step(queries=7, hits=6)
    house.engine.die()
    house.clock.run(1)
    house.engine.ready()
    house.engine.step(queries=2, hits=0)
    house.engine.step(queries=3, hits=4)
    assert watched.moved() == {"prefix_cache_queries_total": 10, "prefix_cache_hits_total": 10}


def test_buckets_are_those_that_a_value_is_not_above(house, watched):
    """
    For each histogram: at the bound is inside. The bounds are the ones that vLLM's boards ask for.
    """
    house.ask("a" * 5, max_tokens=20)
    house.clock.run(2.5)
    house.engine.step({"0": b"x"})
    house.clock.run(5)
    house.engine.step({"0": b"y"}, "length", waited=[0.3], prefilled=[480])
    at = {FIRST: 2.5, BETWEEN: 5, WHOLE: 7.5, DECODE: 5, QUEUE: 0.3, PREFILL: 480}
    at |= {PROMPT: 5, LENGTH: 2, LONGEST: 2}
    bounds = {FIRST: metrics.FIRST_TOKENS, BETWEEN: metrics.TOKEN_GAPS}
    bounds |= dict.fromkeys((WHOLE, DECODE, QUEUE, PREFILL), metrics.LATENCIES)
    bounds |= dict.fromkeys((PROMPT, LENGTH, LONGEST), metrics.LENGTHS)
    samples = shown(house)
    for name, value in at.items():
        found = {key: count for key, count in samples.items() if key.startswith(f"{name}_bucket")}
        wanted = {
            f"{name}_bucket{{le={float(bound)}}}": float(value <= bound) for bound in bounds[name]
        }
        assert found == wanted | {f"{name}_bucket{{le=+Inf}}": 1.0}


# What the twelve panels of vLLM's Grafana board ask for, all of a histogram where there is one
# (examples/observability/prometheus_grafana/grafana.json).
GRAFANA_BOARD = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
GRAFANA_BOARD |= {"prompt_tokens_total", "generation_tokens_total", "request_success_total"}
GRAFANA_BOARD |= {
    f"{name}_{part}"
    for name in (FIRST, BETWEEN, WHOLE, DECODE, QUEUE, PREFILL, PROMPT, LENGTH, LONGEST)
    for part in ("bucket", "sum", "count")
}


def test_the_panels_of_vllms_grafana_board_have_their_metrics(house):
    """Also before anything was served."""
    assert {name.partition("{")[0] for name in shown(house)} >= GRAFANA_BOARD


# The whole of vLLM's own lists: https://docs.vllm.ai/en/stable/design/metrics
VLLMS_BOUNDS = {
    "FIRST_TOKENS": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 "
    "40 80 160 640 2560",
    "TOKEN_GAPS": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
    "LATENCIES": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
}


@pytest.mark.parametrize("name", VLLMS_BOUNDS)
def test_vllms_bounds_are_there_and_in_order(name):
    bounds = list(getattr(metrics, name))
    assert bounds == sorted(set(bounds)) and set(bounds) >= set(
        map(float, VLLMS_BOUNDS[name].split())
    )
    assert metrics.LENGTHS[:7] == [1, 2, 5, 10, 20, 50, 100] and metrics.LENGTHS[-1] == 500_000


# --------------------------------------------------------------------------------------------------
# With the real engine behind it


class Link:
    """
    The engine's end of the link to the one HTTP process: what is put waits for `house.engine` to
    say it.
    """

    number = 0

    def __init__(self):
        self.messages = []
        self.rows = []

    def queue(self, message):
        self.messages.append(message)

    def queue_row(self, row):
        self.rows.append(row)


class Driven:
    """The real engine, a step at a time, behind the real client, on the house's clock."""

    def __init__(self, house: House, **sizes):
        self.house = house
        torch.manual_seed(0)
        model = GPT(
            GPTConfig(vocab_size=257, context_length=64, n_layer=1, n_head=2, n_embd=16)
        ).eval()
        self.engine = Engine(model, Settings(block_size=4, check=True, **sizes))
        self.link = Link()
        self.links = SimpleNamespace(links={0: self.link})
        self.num_heard = 0

    def take_in(self):
        heard = self.house.engine.heard
        for message in heard[self.num_heard :]:
            loop.handle_message(self.engine, self.link, message, self.house.args.max_queue)
        self.num_heard = len(heard)

    def step(self, seconds: float = 1.0):
        """Take in what was sent; compute a step, which takes so long; send what it brought."""
        self.take_in()
        outputs = self.engine.step()
        self.house.clock.run(seconds)
        for output in outputs:
            loop.send_output(self.links, output)
        step = {"op": "step", "out": self.link.rows, "stats": self.engine.stats()}
        self.house.engine.say(step, *self.link.messages)
        self.link.rows = []
        self.link.messages = []


@pytest.fixture
def driven_house(monkeypatch):
    with House("--max-num-seqs", "2", "--max-queue", "3") as house:
        monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=house.clock.time))
        yield house


def gauges_of(moved: dict[str, float]) -> dict[str, float]:
    return {name: moved[name] for name in GAUGES if name in moved}


def shows(moved: dict[str, float], wanted: dict[str, float]) -> bool:
    return {name: moved.get(name, 0) for name in wanted} == wanted


def usage(answer) -> tuple[int, int, int]:
    """Prompt tokens, completion tokens and cached ones of an answer."""
    counts = answer.json["usage"]
    return (
        counts["prompt_tokens"],
        counts["completion_tokens"],
        counts["prompt_tokens_details"]["cached_tokens"],
    )


def test_the_numbers_of_a_real_engine(driven_house):
    """
    Ten blocks of 4 tokens and two rows: what runs, waits, is held, looked up and found, a step at a
    time, and nothing running, waiting or held in the end: what is only cached is free.
    """
    house = driven_house
    driven = Driven(house, num_blocks=10, max_num_seqs=2, token_budget=32)
    watched = Watched(house)
    prompts = ["abcdefghi", "vwxyz", "abcdefghj"]
    callers = [house.ask(prompt, max_tokens=3, temperature=0) for prompt in prompts]
    driven.take_in()
    house.clock.run(2)
    driven.step()
    moved = watched.moved()
    assert gauges_of(moved) == gauges(2, 1, (3 + 2) / 10)
    assert moved["prefix_cache_queries_total"] == 9 + 5 and "prefix_cache_hits_total" not in moved
    assert shows(moved, observed(QUEUE, 2, 2) | observed(FIRST, 3, 3))
    for _ in range(2):
        driven.step()
    assert [usage(caller.answer()) for caller in callers[:2]] == [(9, 3, 0), (5, 3, 0)]
    moved = watched.moved()
    assert gauges_of(moved) == gauges(0, 1, 0)
    assert shows(moved, observed(PREFILL))
    for _ in range(3):
        driven.step()
    assert usage(callers[2].answer()) == (9, 3, 8)
    moved = watched.moved()
    assert moved["prefix_cache_queries_total"] == 9 and moved["prefix_cache_hits_total"] == 8
    assert shows(moved, observed(QUEUE, 5))
    assert not gauges_of(moved)


def test_a_key_has_a_prefix_cache_of_its_own_for_all_its_choices(monkeypatch):
    """
    Three choices on one row: two wait, and look their prompt up. They find what their own key has
    computed, 8 of 9 tokens; another key's first choice finds nothing. Waiting choices once had no
    salt, and shared with all.
    """
    with House("--max-num-seqs", "1", keys=["sesame", "simsim"]) as house:
        monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=house.clock.time))
        driven = Driven(house, num_blocks=20, max_num_seqs=1, token_budget=32)
        hits = []
        for key in ("sesame", "simsim", "sesame"):
            body = {"prompt": "abcdefghi", "n": 3, "max_tokens": 2}
            caller = house.call("POST", "/v1/completions", body, Authorization=f"Bearer {key}")
            while house.choices:
                driven.step()
            hits.append((usage(caller.answer())[2], driven.engine.stats()["hits"]))
        assert hits == [(0, 8 + 8), (0, 2 * 16), (8, 2 * 16 + 3 * 8)]


def test_nothing_runs_after_the_last_client_hung_up(driven_house):
    """The gauges went on showing what had run until the next request came."""
    house = driven_house
    driven = Driven(house, num_blocks=10, max_num_seqs=2, token_budget=32)
    watched = Watched(house)
    callers = [house.ask(prompt, max_tokens=9) for prompt in ("abcde", "fghij", "klmno")]
    driven.step()
    assert watched.moved()["num_requests_waiting"] == 1
    for caller in callers:
        caller.hang_up()
    driven.step()
    moved = watched.moved()
    assert not gauges_of(moved) and shows(moved, success("abort", 3))
