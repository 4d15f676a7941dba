"""
The server's jobs and its life. The test plays the engine and controls time, and checks what the
engine is sent, what a client is sent, and when.
"""

import asyncio
import gc
import io
import json
import sys

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from wires import ASK, House, request

from server import answers
from server.protocol import NOT_SERVED, ApiError, CompletionRequest

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAMED = pytest.mark.parametrize("stream", [False, True])


def texts(events) -> dict[int, str]:
    """Return the text of each choice in the events of a stream."""
    joined: dict[int, str] = {}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


def aborted(house) -> list[str]:
    return [message["id"] for message in house.engine.of("abort")]


# --------------------------------------------------------------------------------------------------
# How many at a time


def hold_prompts(house: House) -> tuple[asyncio.Event, list]:
    """
    Let no prompt be encoded until the event is set. The list has the calls that have come so far.
    """
    release = asyncio.Event()
    asked = []
    encode = house.service.encode

    async def wait(*call):
        asked.append(call)
        await release.wait()
        return await encode(*call)

    house.service.encode = wait
    return release, asked


@STREAMED
def test_a_burst_does_not_pass_the_queue(stream):
    """
    Previously there was room for each of them before their prompts were encoded, and all twelve
    went to the engine. A call for which there is no room is refused before its prompt is encoded.
    (More than could ever fit is a 400, because retrying would not help: see test_paths.py.)
    """
    with House("--max-num-seqs", "2", "--max-queue", "3") as house:
        release, asked = hold_prompts(house)
        callers = [house.ask(["a"] * n, stream=stream) for n in (1, 2, 1, 2, 1, 1)]
        assert len(asked) == 6
        assert not house.choices
        house.clock.do(release.set)
        refusals = [caller.refusal for caller in callers if caller.said]
        words = "in progress: at most 5 are accepted, try again later"
        assert refusals == [
            (429, "queue_full", f"2 choices on top of 4 {words}"),
            (429, "queue_full", f"1 choice on top of 5 {words}"),
        ]
        assert len(house.choices) == 2 + 3
        assert house.ask(n=2).status == 429
        assert len(asked) == 6


# --------------------------------------------------------------------------------------------------
# Bodies


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size, status", [(1024, 400), (1025, 413)])
def test_a_body_may_be_as_long_as_the_flag_says(size, status, chunked):
    """
    The length is either announced or counted. A body at the limit is read, and found to be no JSON.
    One that is too long is refused before its end has come.
    """
    with House("--max-body-mib", str(1024 / 2**20)) as house:
        caller = house.connect()
        caller.send(ASK.partition(b"Content-Length")[0])
        if chunked:
            caller.send(b"Transfer-Encoding: chunked\r\n\r\n400\r\n%s\r\n" % (b" " * 1024))
            assert not caller.said
            caller.send(b"0\r\n\r\n" if size == 1024 else b"1\r\n \r\n")
        else:
            caller.send(b"Content-Length: %d\r\n\r\n%s" % (size, b" " * 1024))
        assert caller.status == status


def test_a_body_may_have_no_limit():
    """Previously, with --max-body-mib inf, each body got a 500 (OverflowError)."""
    with House("--max-body-mib", "inf") as house:
        caller = house.ask()
        house.engine.step(b"x", "length")
        assert caller.status == 200


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
SCALARS |= st.sampled_from([10**4299, -(10**4299), 2**63])
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=2)
)
NAMES = st.sampled_from([*CompletionRequest.model_fields, *NOT_SERVED]) | st.text(max_size=5)


@pytest.fixture(scope="module")
def patient():
    with House() as house:
        yield house


@seed(0)
@settings(max_examples=80, deadline=None)
@given(body=st.dictionaries(NAMES, VALUES, max_size=4), prompted=st.booleans())
def test_no_body_makes_a_500(patient, body, prompted):
    """
    Any JSON in any field gets an answer or a refusal in the right shape, never an internal error.
    """
    body = ({"prompt": "say hi"} if prompted else {}) | body | {"max_tokens": 5}
    caller = patient.call("/v1/completions", json.dumps(body).encode())
    patient.engine.step(b"x", "length")
    caller.hang_up()
    answer = caller.answer
    assert answer.status in (200, 400, 404), answer.body
    assert answer.status == 200 or caller.refusal[2]


# without their line ends, which a piece may lack
PIECES = rb"""GET /livez HTTP/1.1|Host: localhost|Content-Length: 5|Content-Length: -1||{}|0|hello|
Transfer-Encoding: chunked|5|FFFFFFFFFFFFFFFFFF|: x|PRI * HTTP/2.0|Expect: 100-continue|
Upgrade: websocket|Connection: Upgrade|
GET http://[ HTTP/1.1|CONNECT x:1 HTTP/1.1|Content-Length: 16|
Content-Length: 99|{"prompt": "sa"}|Content-Type: application/json|POST /v1/completions HTTP/1.1"""
PIECES = PIECES.replace(b"\n", b"").split(b"|")
PIECES = [piece + end for piece in PIECES for end in (b"\r\n", b"\r\n\r\n", b"")]
PIECES += [ASK, GET, b"A" * 3000, b"GET \xff\xfe HTTP/1.1\r\n", b"\0\xff"]


@seed(0)
@settings(max_examples=120, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.binary(max_size=20), min_size=1, max_size=8),
    ends=st.booleans(),
)
def test_no_bytes_make_a_500(patient, pieces, ends):
    """
    Whatever comes over the wire, whole or cut off in the middle, there is no internal error,
    nothing is left behind, and the server goes on serving.
    """
    caller = patient.connect()
    for piece in pieces:
        caller.send(piece)
    if ends and not caller.wire.closed:
        caller.hang_up()
    patient.engine.step(b"x", "length")
    patient.clock.run(1)
    assert "HTTP/1.1 500" not in caller.said
    caller.hang_up()
    assert not patient.choices
    assert not patient.state.tasks
    assert not patient.state.connections
    assert patient.get("/livez").status == 200


# --------------------------------------------------------------------------------------------------
# Streams


def test_a_stream_begins_with_its_first_event(house):
    """
    Its headers wait for that event, so that a failure before it gets its own status. Text that may
    be the beginning of a stop string makes no event.
    """
    caller = house.ask(stream=True, max_tokens=9, stop="xyz")
    house.engine.step(b"x")
    assert not caller.said
    house.engine.step(b"w")
    head = caller.said.lower()
    assert head.startswith("http/1.1 200 ok\r\n")
    assert "\r\nx-request-id: " in head
    assert "\r\ncontent-type: text/event-stream; charset=utf-8" in head
    assert "\r\ncache-control: no-cache" in head
    house.engine.step(b"yz", "length")
    assert texts(caller.events) == {0: "xwyz"}
    assert caller.events[-1] == "[DONE]"


@STREAMED
def test_choices_end_on_their_own_and_an_answer_with_the_last(house, stream):
    """
    A stream has the texts by index, a whole answer prompt by prompt. The cached tokens of each
    prompt count once. Its other choices share its blocks, so their hits save the client nothing.
    """
    options = {"stream_options": {"include_usage": True}} if stream else {}
    caller = house.ask(["ab", "cd"], n=2, stream=stream, max_tokens=9, **options)
    house.engine.step({"0": b"a", "1.1": b"d"}, cached=1)
    house.engine.step({"0.1": b"b", "1": b"c"}, "length", cached=10)
    house.engine.step({"0": b"A"}, "length", cached=100)
    whole = {0: "aA", 1: "b", 2: "c", 3: "d"}
    house.engine.step(b"D", "stop", cached=1000)  # a stop token has no text
    assert not aborted(house)
    *chunks, last = caller.events[:-1] if stream else [caller.json]
    counts = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert last["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 110}}
    if not stream:
        assert list(texts([last]).items()) == list(whole.items())
        return
    assert texts(chunks) == whole
    assert last["choices"] == []
    heads = [(event["id"], event["created"], event["object"]) for event in [*chunks, last]]
    assert set(heads) == {(last["id"], last["created"], "text_completion")}
    assert all(chunk["usage"] is None for chunk in chunks)


def test_a_silent_stream_pings_every_ten_seconds(house):
    """It also pings before its first token. Text makes a ping unnecessary."""
    caller = house.ask(stream=True, max_tokens=9)
    house.clock.run(9.9)
    assert not caller.said
    # seconds, what comes after them -> the pings until then; \xe2 is a third of a character
    for seconds, data, pings in ((0.2, b"", 1), (10, b"x", 2), (0, b"\xe2", 2), (10, b"", 3)):
        house.clock.run(seconds)
        house.engine.step(data)
        assert caller.said.count(": ping\n\n") == pings


# --------------------------------------------------------------------------------------------------
# Ends


def test_an_answer_that_is_done_in_time_is_no_timeout():
    """
    Previously the limit could pass between the last token and its sending, here because the client
    reads slowly. Then a finished stream ended in an error, and a finished answer was replaced by
    one. While a client does not read, tokens are collected for a single event.
    """
    with House("--request-seconds", "7") as house:
        caller = house.ask(stream=True)
        house.engine.step(b"a")
        caller.stop_reading()
        for text in (b"b", b"c", b"d", b"e"):
            house.engine.step(text)
        house.engine.step(b"f", "length")
        house.clock.run(8)
        caller.read_on()
        assert texts(caller.events) == {0: "abcdef"}
        assert len(caller.events) == 5  # b had no room, c waited for it, then came the rest
        whole = house.ask()

        def finish_late():
            (choice,) = house.choices.values()
            house.choices.clear()
            choice.job.on_tokens(choice, [97], "length", 0)
            choice.job.fail(ApiError(503, "too late"))

        house.clock.do(finish_late)
        assert whole.choice["text"] == "a"


@STREAMED
def test_a_bug_while_an_answer_is_sent_ends_a_calls_work(house, monkeypatch, stream):
    """Otherwise the engine would go on although no one waits for the answer."""
    monkeypatch.setattr(answers.CompletionChoice, "chunk", lambda *_: {}["a bug"])
    caller = house.ask(["ab", "cd"], max_tokens=2, stream=stream)
    house.engine.step({"0": b"x"}, "length")
    house.engine.step({"1": b"x"}, "length" if not stream else None)
    refusal = (500, None, "a bug in this server: KeyError")
    assert caller.refusal == refusal
    assert not house.choices
    assert not asyncio.all_tasks(house.clock)


def test_a_call_that_is_cancelled_is_refused_and_aborted(house):
    """When the server stops, uvicorn cancels calls that do not end."""
    waiting, stream, half = house.ask(), house.ask(stream=True), house.connect()
    house.engine.step({"1": b"x"})
    half.send(ASK[:-3])
    hold_prompts(house)
    encoded = house.ask()
    for task in list(house.state.tasks):
        task.cancel()
    house.clock.settle()
    for caller in (waiting, half, encoded):
        assert caller.refusal[:2] == (503, "stopping")
    assert texts(stream.events) == {0: "x"}
    assert not house.choices
    assert sorted(aborted(house)) == ["0", "1"]


# --------------------------------------------------------------------------------------------------
# Requests to the engine


def test_each_prompt_without_a_seed_has_its_own(house):
    """Equal prompts of one call get different answers. With a seed, the seed decides."""
    house.ask(["a"] * 3, n=2)
    house.ask(["a"] * 2, seed=7)
    house.ask("a")
    seeds = [message["params"]["seed"] for message in house.engine.of("add")]
    first, second, third, *fixed, other = seeds
    assert (second, third) == (first + 1, first + 2)
    assert fixed == [7, 7]
    assert other != first
    assert all(0 <= seed < 2**48 + 3 for seed in seeds)


# --------------------------------------------------------------------------------------------------
# Long answers


def test_long_answers_go_out_in_slices():
    """Each slice waits until the previous one is on its way."""
    sent = []

    async def send(message):
        sent.append(message)

    data = bytes(answers.SLICE)
    for part in (data, data + b"1"):
        asyncio.run(answers.send_json(send, part))
    lengths = [message["headers"][1] for message in sent if "headers" in message]
    assert lengths == [(b"content-length", b"262144"), (b"content-length", b"262145")]
    parts = [(message["body"], message["more_body"]) for message in sent if "body" in message]
    assert parts == [(data, False), (data, True), (b"1", False)]


def test_four_long_answers_are_in_memory_at_once(house, monkeypatch):
    """
    They stay in memory until their clients have read them. A short answer does not wait for a turn.
    """
    asked = []
    encode = house.encoder.encode

    async def note(texts, *more):
        asked.append(len(texts[0]))
        return await encode(texts, *more)

    monkeypatch.setattr(house.encoder, "encode", note)
    callers = [house.connect() for _ in range(6)]
    for length, caller in enumerate(callers, start=70_000):
        caller.stop_reading()
        caller.send(request("/tokenize", {"prompt": "a" * length}))
    house.call("/tokenize", {"prompt": "a" * 60_000})
    assert asked == [70_000, 70_001, 70_002, 70_003, 60_000]
    callers[0].read_on()
    assert callers[0].json["count"] == 70_000
    callers[1].hang_up()
    assert asked[5:] == [70_004, 70_005]


# --------------------------------------------------------------------------------------------------
# The life of the server


def stop(house):
    house.clock.do(house.service.stop)


def is_over(house) -> bool:
    return house.service.server.should_exit


def test_while_it_loads_it_is_alive_and_accepts_nothing():
    with House(ready=False) as house:
        assert house.get("/livez").json == {"status": "alive"}
        refusal = (503, "loading", "the server is loading: try again later")
        routers = ("/server_info", "/model_info", "/v1/loads")
        for path in ("/readyz", "/health", "/v1/models", "/v1/models/fake", *routers):
            assert house.call(path).refusal == refusal
        assert house.ask().refusal == refusal
        house.engine.ready()
        for path in ("/readyz", "/health"):
            assert house.get(path).json == {"status": "ready"}


def test_a_refused_call_leaves_no_prompt_behind(house):
    """
    The error referred to the frames that had raised it, and they to the error and megabytes of
    prompts, until garbage was collected, which is rare. So each prompt of 4 MiB leaked 40 MB.
    """
    gc.disable()
    try:
        assert house.ask([5] * 1234).refusal[0] == 400
        assert not [x for x in gc.get_objects() if type(x) is list and len(x) == 1234]
    finally:
        gc.enable()


@pytest.mark.parametrize("seconds, signals", [(5, 1), (2, 2)])
def test_calls_that_run_may_finish_after_the_signal(seconds, signals, capsys):
    """
    They may run until --drain-seconds have passed, or until the second signal. New calls are
    refused, also one whose body was still coming. An idle server ends as soon as listeners have
    its last lines.
    """
    with House("--drain-seconds", "5") as house:
        quick, slow, half = house.ask(), house.ask(), house.connect()
        half.send(ASK[:-3])
        stop(house)
        half.send(ASK[-3:])
        refusal = (503, "draining", "the server is draining: try again later")
        assert half.refusal == house.ask().refusal == house.call("/readyz").refusal == refusal
        assert house.get("/livez").status == 200
        house.engine.step({"0": b"x"}, "length")
        assert quick.status == 200
        house.clock.run(seconds - 0.1)
        assert not slow.said
        assert not is_over(house)
        if signals == 2:
            stop(house)
        house.clock.run(0.2)
        message = "the server stopped before this was finished"
        assert slow.refusal == (503, "stopping", message)
        assert is_over(house)
        assert not house.choices
        said = capsys.readouterr().err
        assert said == "finishing 2 requests; a second signal ends them\n"
    with House() as house:
        house.call("/events")
        for event, is_last in ("snapshot", False), ("step", False), ("idle", True):
            house.engine.say({"op": "events", "lines": f'{{"event":"{event}"}}'})
            if event == "step":
                stop(house)
            house.clock.run(0.1)
            assert is_over(house) == is_last  # the page said "23 running" of a server that was gone
        assert capsys.readouterr().err == ""


def test_a_dead_engine_is_started_again_once(house, capfd):
    """
    Waiting calls are refused each time, also those whose prompts are being encoded. After the
    second death the server ends.
    """
    callers = [house.ask(), house.ask(stream=True)]
    release, _ = hold_prompts(house)
    encoded = house.ask()
    house.engine.die()
    house.clock.do(release.set)
    reason = "the engine stopped unexpectedly, a new one is starting"
    assert [caller.refusal for caller in callers] == [(500, "engine_dead", reason)] * 2
    restarting = (503, "restarting", f"the server is restarting: {reason}")
    assert encoded.refusal == house.call("/readyz").refusal == restarting
    assert house.call("/livez").refusal == (
        503,
        "dead",
        f"the engine is down: {reason}",
    )
    assert f'"event": "engine_died", "reason": "{reason}"' in capfd.readouterr().err
    assert not house.choices
    house.engine.ready()
    assert house.get("/livez").status == 200
    house.engine.die()
    assert is_over(house)


class Full(io.TextIOBase):
    def write(self, text: str):
        raise OSError("no space left on device")


def test_words_that_nobody_takes_do_not_stop_the_server(house, monkeypatch):
    """
    Previously, on a full disk, or once the reader of a pipe was gone, an engine that died was not
    restarted, and a busy server never ended after SIGTERM.
    """
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Full())
    house.args.access_log = True
    house.ask()
    house.engine.die()
    house.engine.ready()
    assert house.get("/readyz").status == 200
    caller = house.ask()
    stop(house)
    house.engine.step(b"x", "length")
    house.clock.run(0.1)
    assert caller.status == 200
    assert is_over(house)


def test_an_engine_that_cannot_be_started_again_ends_the_server(house, monkeypatch):
    """
    Previously, with too many open files for example, the server said "restarting" for ever, and
    neither served nor ended.
    """

    def fail():
        raise OSError("too many open files")

    monkeypatch.setattr(house.service.client, "start", fail)
    caller = house.ask()
    house.engine.die()
    assert caller.refusal[:2] == (500, "engine_dead")
    reason = "the engine stopped unexpectedly, and no new one can start: too many open files"
    assert house.call("/readyz").refusal == (
        503,
        "dead",
        f"the server is dead: {reason}",
    )
    assert is_over(house)


def test_an_engine_with_work_that_is_silent_for_two_minutes_is_not_alive(house):
    """An idle engine may be silent; its silence counts from the first request on."""
    house.clock.run(3600)
    assert house.get("/livez").status == 200
    house.ask(max_tokens=9)
    for _ in range(2):
        house.clock.run(119)
        assert house.get("/livez").status == 200
        house.engine.step()
    house.clock.run(121)
    refusal = (503, "dead", "the engine is down: no step in 120 s")
    assert house.call("/livez").refusal == refusal
    house.engine.step(b"x", "length")
    house.clock.run(3600)
    assert house.get("/livez").status == 200
    for _ in range(3):  # a request that comes while it is silent is no sign of life
        house.ask()
        house.clock.run(50)
    assert house.get("/livez").status == 503
