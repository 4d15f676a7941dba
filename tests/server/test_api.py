"""
The gate, the jobs and the life of the server, with the engine played by the test and time its own:
who may come in, what is answered with which status, header and body, what the engine is told, and
when.
"""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_connection import ASK, CHUNKED_ASK, GET
from wires import House, request

from server import answers
from server import app as api
from server.protocol import NOT_SERVED, CompletionRequest
from server.text import size_of
from server.workers import WorkerSlot


@pytest.fixture
def house():
    with House() as house:
        yield house


def error_of(answer) -> dict:
    """The error of an answer, after a check that it has OpenAI's shape and nothing else."""
    assert list(answer.json) == ["error"] and list(answer.json["error"]) == [
        "message",
        "type",
        "param",
        "code",
    ]
    return answer.json["error"]


def refusal_of(answer) -> tuple:
    """Status, code and message."""
    error = error_of(answer)
    return answer.status, error["code"], error["message"]


def texts(caller) -> dict[int, str]:
    """What a stream has said of each choice."""
    said: dict[int, str] = {}
    for event in caller.events:
        for choice in event["choices"] if event != "[DONE]" else ():
            said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    return said


# --------------------------------------------------------------------------------------------------
# How much at once


class Held:
    """A service whose prompts are not encoded until `release`."""

    def __init__(self, house: House):
        self.house = house
        self.gate = asyncio.Event()
        self.num_asked = 0
        self.encode = house.service.encode
        house.service.encode = self.wait

    async def wait(self, request):
        self.num_asked += 1
        await self.gate.wait()
        return await self.encode(request)

    def release(self):
        self.house.clock.call_soon(self.gate.set)
        self.house.clock.settle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_burst_does_not_pass_the_queue(stream):
    """
    There was room for each of them before their prompts were encoded: all twelve went to the
    engine. A call that comes when there is none is refused before its prompt is encoded.
    """
    with House("--max-num-seqs", "2", "--max-queue", "3") as house:
        held = Held(house)
        callers = [house.ask(n=n, stream=stream) for n in (1, 2, 1, 2, 1, 1, 1)]
        assert held.num_asked == 7 and not house.choices
        held.release()
        refused = [refusal_of(caller.answer())[:2] for caller in callers if caller.said]
        assert refused == [(429, "queue_full")] * 3
        assert [message["options"]["n"] for message in house.engine.of("add")] == [1, 2, 1, 1]
        assert len(house.choices) == 2 + 3
        assert house.ask().answer().status == 429 and held.num_asked == 7


@pytest.mark.parametrize(
    "fields, count",
    [({"n": 5}, 5), ({"prompt": ["a"] * 5}, 5), ({"prompt": ["a", "b"], "n": 2}, 4)],
)
def test_what_fits_is_taken_and_one_more_is_not(fields, count):
    """The queue counts choices. More than ever fit is a 400, for it is no use to try again."""
    with House("--max-num-seqs", "2", "--max-queue", "3") as house:
        house.ask(**fields)
        assert len(house.choices) == count
        answer = house.ask(prompt=["a"] * (6 - count)).answer()
        more = "1 choice" if count == 5 else "2 choices"
        message = f"{more} beside {count} in work: at most 5 are taken, try again later"
        assert (
            refusal_of(answer) == (429, "queue_full", message)
            and answer.headers["retry-after"] == "1"
        )
        answer = house.ask(prompt=["a", "b"], n=3).answer()
        assert refusal_of(answer) == (
            400,
            None,
            "6 prompts x n in one call, at most 5 are taken: split it",
        )
        assert error_of(answer)["param"] == "prompt" and "retry-after" not in answer.headers
        if count < 5:
            house.ask()
        assert len(house.choices) == 5


def test_the_queue_counts_what_other_processes_have_in_work():
    """
    The engine says how many choices it works at, of all HTTP processes; ours may be more than it
    has said.
    """
    with House("--max-num-seqs", "2", "--max-queue", "3") as house:
        house.engine.step(at_work=4)
        house.ask()
        assert len(house.choices) == 1
        house.engine.step(at_work=5)
        assert "beside 5 in work" in refusal_of(house.ask().answer())[2]
        house.engine.step(at_work=0)
        for _ in range(4):
            house.ask()
        assert "beside 5 in work" in refusal_of(house.ask().answer())[2]


def test_room_that_was_freed_is_there_again():
    with House("--max-num-seqs", "1", "--max-queue", "0") as house:
        for number, end in enumerate(("length", "stop", "hang up", "error")):
            caller = house.ask()
            assert list(house.choices) == [str(number)]
            if end == "hang up":
                caller.hang_up()
            elif end == "error":
                house.engine.say(
                    {"op": "error", "id": str(number), "message": "no", "kind": "internal"}
                )
            else:
                house.engine.step({str(number): b"x"}, end)
        assert not house.choices


# --------------------------------------------------------------------------------------------------
# Bodies


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size, status", [(1024, 400), (1025, 413)])
def test_a_body_may_be_as_long_as_the_flag_says(size, status, chunked):
    """Announced or counted: at the limit it is read, and found to be no JSON."""
    with House("--max-body-mib", str(1024 / 2**20)) as house:
        caller = house.connect()
        if chunked:
            caller.send(CHUNKED_ASK.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            half = b"%x\r\n%s\r\n" % (512, b" " * 512)
            caller.send(half)
            assert not caller.said
            caller.send(half if size == 1024 else half + b"1\r\n \r\n")
            caller.send(b"0\r\n\r\n")
        else:
            caller.send(request("POST", "/v1/completions", b" " * size))
        answer = caller.answer()
        assert answer.status == status
        too_long = "the body has more than 1024 bytes: shorten it or raise --max-body-mib"
        no_json = "the body is not JSON: EOF while parsing a value at line 1 column 1024"
        assert error_of(answer)["message"] == (no_json if status == 400 else too_long)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**4299, -(10**4299), 2**63])
    | st.text(st.characters(), max_size=5)
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=2)
)
NAMES = st.sampled_from([*CompletionRequest.model_fields, *NOT_SERVED]) | st.text(
    st.characters(), max_size=5
)


@pytest.fixture(scope="module")
def patient():
    with House() as house:
        yield house


@settings(max_examples=150, deadline=None)
@given(body=st.dictionaries(NAMES, VALUES, max_size=4), prompted=st.booleans())
def test_no_body_makes_a_500(patient, body, prompted):
    """Any JSON in any field: an answer or a refusal in the right shape, never a failure of ours."""
    body = ({"prompt": "say hi"} if prompted else {}) | body | {"max_tokens": 5}
    caller = patient.call("POST", "/v1/completions", json.dumps(body).encode())
    for choice in list(patient.choices.values()):
        scored = [[-1.0, [], []]] * (len(choice.prompt) - 1)
        added = patient.engine.of("add")[-1]
        row = [choice.engine_id, [120], "length", 0, None, None]
        if added["params"]["logprobs"] is not None:
            row[4] = [[-1.0, list(range(20)), [-2.0] * 20]]
        if added["options"]["prompt_logprobs"] is not None:
            row[5] = scored
        patient.engine.say({"op": "step", "out": [row], "stats": patient.engine.stats})
    answer = caller.answer()
    caller.hang_up()
    assert answer.status in (200, 400, 404), answer.body
    assert answer.status == 200 or error_of(answer)["message"]


PIECES = [
    *(
        b"GET /livez HTTP/1.1\r\n",
        b"Host: localhost\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
    ),
    b"\r\n",
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"FFFFFFFFFFFFFFFFFF\r\n",
        b"\0\xff",
        b"{}",
    ),
    *(ASK.partition(b"Content-Length")[0], b"PRI * HTTP/2.0\r\n\r\n", b"Expect: 100-continue\r\n"),
    *(
        b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
        b"GET \xff\xfe HTTP/1.1\r\n",
        b"GET http://[ HTTP/1.1\r\n",
    ),
    *(b"CONNECT x:1 HTTP/1.1\r\n", b"A" * 3000, b": x\r\n", ASK, GET),
    *(b'Content-Length: 16\r\n\r\n{"prompt": "sa"}', b'Content-Length: 99\r\n\r\n{"prompt": "sa"}'),
]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES) | st.binary(max_size=20), min_size=1, max_size=8),
    ends=st.booleans(),
)
def test_no_bytes_make_a_500(patient, pieces, ends):
    """
    Whatever comes over the wire, whole or cut off in the middle: no failure of ours, nothing left
    behind, and the server serves on.
    """
    caller = patient.connect()
    for piece in pieces:
        caller.send(piece)
    if ends and not caller.wire.closed:
        caller.end_side()
    for id in list(patient.choices):
        patient.engine.step({id: b"x"}, "length")
    patient.clock.run(1)
    assert "HTTP/1.1 500" not in caller.said
    caller.hang_up()
    assert not patient.choices and not patient.state.tasks and not patient.state.connections
    assert patient.get("/livez").status == 200


# --------------------------------------------------------------------------------------------------
# Streams


def test_a_stream_begins_with_its_first_event(house):
    """Its headers wait for it, so that what fails before has a status of its own."""
    caller = house.ask(stream=True, max_tokens=9)
    assert not caller.said
    house.engine.step({"0": b"x"})
    head = caller.said.partition("\r\n\r\n")[0].lower().split("\r\n")
    assert head[0] == "http/1.1 200 ok" and "content-type: text/event-stream; charset=utf-8" in head
    assert "cache-control: no-cache" in head and any(
        line.startswith("x-request-id: ") for line in head
    )
    house.engine.step({"0": b"yz"}, "length")
    assert texts(caller) == {0: "xyz"} and caller.events[-1] == "[DONE]"
    assert [event["choices"][0]["finish_reason"] for event in caller.events[:-1]] == [
        None,
        "length",
    ]


def test_a_slow_reader_gets_one_event_of_all_that_came(house):
    """
    While a client does not read, tokens gather; nothing is lost, and nobody else waits. (Over
    sockets this once failed on a busy machine: how much gathers depended on its speed.)
    """
    slow, quick = (house.ask(stream=True, max_tokens=99) for _ in range(2))
    house.engine.step({"0": b"a", "1": b"A"})
    slow.stop_reading()
    for number in range(1, 21):
        house.engine.step({"0": bytes([97 + number]), "1": bytes([65 + number])})
        assert len(quick.events) == 1 + number
    assert len(slow.events) == 1
    slow.read_on()
    assert len(slow.events) == 3  # the one that found the client reading no more, and all the rest
    assert texts(slow) == {0: bytes(range(97, 118)).decode()}
    house.engine.step({"0": b"!", "1": b"!"}, "length")
    assert texts(slow)[0][-1] == "!" and slow.events[-1] == quick.events[-1] == "[DONE]"


def test_events_say_what_is_new_of_each_choice(house):
    """In one write, if one round brought it."""
    caller = house.ask(
        ["ab", "cd"], n=2, stream=True, max_tokens=9, stream_options={"include_usage": True}
    )
    house.engine.step({"0": b"a", "1.1": b"d"})
    house.engine.step({"0.1": b"b", "1": b"c"}, "length")
    house.engine.step({"0": b"A"}, "length")
    assert texts(caller) == {0: "aA", 3: "d", 1: "b", 2: "c"} and "[DONE]" not in caller.events
    house.engine.step({"1.1": b"D"}, "stop", cached=2)
    *chunks, last, done = caller.events
    assert texts(caller)[3] == "d" and done == "[DONE]"  # a stop token is no text
    assert all(chunk["usage"] is None and chunk["created"] == last["created"] for chunk in chunks)
    assert len({event["id"] for event in [*chunks, last]}) == 1 and last["choices"] == []
    counts = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert last["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_cached_tokens_are_those_of_each_prompt_once(house):
    """Its other choices share its blocks: what they find is nothing that the client was spared."""
    caller = house.ask(["ab", "cd", "ef"], n=2)
    for id, cached in {"0": 1, "0.1": 2, "1": 10, "1.1": 20, "2": 100, "2.1": 200}.items():
        house.engine.step({id: b"x"}, "length", cached=cached)
    usage = caller.answer().json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 111}
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 6, 12)


def test_a_silent_stream_pings_every_ten_seconds(house):
    """Also before its first token. When text comes, there is no need for one."""
    caller = house.ask(stream=True, max_tokens=9)

    def pings():
        return caller.said.count(": ping\n\n")

    house.clock.run(9.9)
    assert not caller.said
    house.clock.run(0.2)
    assert pings() == 1 and caller.said.startswith("HTTP/1.1 200 OK")
    house.clock.run(10)
    assert pings() == 2
    house.engine.step({"0": b"x"})
    assert pings() == 2 and texts(caller) == {0: "x"}
    house.engine.step({"0": b"\xe2"})  # a third of a character: nothing to say
    assert pings() == 2
    house.clock.run(10)
    assert pings() == 3
    house.engine.step({"0": b"y"}, "length")
    house.clock.run(30)
    assert pings() == 3 and not house.state.tasks


def test_text_that_is_held_back_makes_no_event(house):
    caller = house.ask(stream=True, max_tokens=9, stop="xyz")
    house.engine.step({"0": b"ax"})
    house.engine.step({"0": b"y"})
    assert texts(caller) == {0: "a"} and len(caller.events) == 1
    house.engine.step({"0": b"w"})
    assert texts(caller) == {0: "axyw"} and len(caller.events) == 2


def test_an_error_ends_a_stream_that_had_begun(house):
    """And the other choices of the call; no [DONE] follows."""
    caller = house.ask(n=2, stream=True, max_tokens=9)
    house.engine.step({"0": b"x"})
    house.engine.say({"op": "error", "id": "0.1", "message": "the step failed", "kind": "internal"})
    error = {"message": "the step failed", "type": "server_error", "param": None, "code": None}
    assert caller.events[1:] == [{"error": error}] and caller.said.endswith("\r\n0\r\n\r\n")
    assert [message["id"] for message in house.engine.of("abort")] == ["0", "0.1"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_take_as_long_as_the_flag_says(stream):
    with House("--request-seconds", "7") as house:
        silent, begun = (house.ask(stream=stream, n=2, max_tokens=9) for _ in range(2))
        house.engine.step({"1": b"x"})
        house.clock.run(6.9)
        assert not silent.said and len(house.choices) == 4
        house.clock.run(0.2)
        message = "not finished within 7 s, what the server allows"
        assert refusal_of(silent.answer()) == (503, "timeout", message)
        assert silent.answer().headers["retry-after"] == "1"
        if stream:
            assert begun.events[-1]["error"]["code"] == "timeout"
            assert texts(SimpleNamespace(events=begun.events[:-1])) == {0: "x"}
        assert [message["id"] for message in house.engine.of("abort")] == ["0", "0.1", "1", "1.1"]


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_aborts_all_that_is_left(house, stream):
    """Of this call, not of others; at once."""
    other = house.ask()
    caller = house.ask(["ab", "cd"], n=2, stream=stream, max_tokens=9)
    house.engine.step({"1": b"x"}, "length")
    caller.hang_up()
    assert [message["id"] for message in house.engine.of("abort")] == ["1.1", "2", "2.1"]
    assert list(house.choices) == ["0"] and len(house.state.tasks) == 1
    house.engine.step({"0": b"x"}, "length")
    assert other.answer().status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answered_call_leaves_nothing_behind(house, stream):
    """
    No task that goes on watching or pinging for a client that has its answer, and keeps its
    connection.
    """
    caller = house.ask(stream=stream)
    house.engine.step({"0": b"x"})
    assert len(asyncio.all_tasks(house.clock)) == 2 + stream
    house.engine.step({"0": b"x"}, "length")
    assert not asyncio.all_tasks(house.clock) and not house.choices and caller.wire.closed is None
    house.clock.run(5)
    assert caller.wire.closed and house.clock.due() == float("inf")


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_while_it_is_told_ends_a_calls_work(house, monkeypatch, stream):
    """The engine would go on for nobody."""
    monkeypatch.setattr(answers.CompletionChoice, "chunk", lambda *_: {}["a bug"])
    caller = house.ask(["ab", "cd"], max_tokens=2, stream=stream)
    house.engine.step({"0": b"x"}, "length")
    house.engine.step({"1": b"x"}, "length" if not stream else None)
    answer = caller.answer()
    assert refusal_of(answer) == (500, None, "a bug of this server: KeyError") and not house.choices
    assert not asyncio.all_tasks(house.clock)


def test_a_call_that_is_cancelled_is_refused_and_aborted(house):
    """What uvicorn does to those that do not end when the server stops, whatever they wait for."""
    waiting, stream, half = house.ask(), house.ask(stream=True), house.connect()
    house.engine.step({"1": b"x"})
    half.send(ASK[:-3])
    Held(house)
    encoded = house.ask()
    for task in list(house.state.tasks):
        task.cancel()
    house.clock.settle()
    for caller in (waiting, half, encoded):
        assert refusal_of(caller.answer())[:2] == (503, "stopping")
    assert texts(stream) == {0: "x"} and not house.choices
    assert sorted(message["id"] for message in house.engine.of("abort")) == ["0", "1"]


def test_the_first_thing_that_went_wrong_is_told(house):
    caller = house.ask()
    job = house.choices["0"].job
    house.clock.call_soon(job.fail, api.ApiError(429, "first", code="queue_full"))
    house.clock.call_soon(job.fail, api.ApiError(500, "second"))
    house.clock.settle()
    assert refusal_of(caller.answer()) == (429, "queue_full", "first")


def test_an_answer_ends_with_its_last_choice(house):
    """Not with its first."""
    caller = house.ask(["ab", "cd"], max_tokens=2)
    house.engine.step({"0": b"xy"}, "length")
    assert not caller.said
    house.engine.step({"1": b"zw"}, "length")
    assert [choice["text"] for choice in caller.answer().json["choices"]] == ["xy", "zw"]


def test_echo_of_the_prompt_alone_is_no_work(house):
    """Unless its tokens are to be scored."""
    answer = house.ask("abc", echo=True, max_tokens=0, n=2).answer()
    assert [choice["text"] for choice in answer.json["choices"]] == ["abc", "abc"]
    assert {choice["finish_reason"] for choice in answer.json["choices"]} == {"length"}
    assert answer.json["usage"]["completion_tokens"] == 0 and not house.engine.of("add")
    house.ask("abc", echo=True, max_tokens=0, logprobs=0)
    assert house.engine.of("add")[0]["options"]["prompt_logprobs"] == 0


def test_each_prompt_without_a_seed_has_its_own(house):
    """Equal prompts of a call get different answers; with a seed they are what it says."""
    house.ask(["a"] * 3, n=2)
    house.ask(["a"] * 2, seed=7)
    house.ask("a")
    seeds = [message["params"]["seed"] for message in house.engine.of("add")]
    assert seeds[:3] == [seeds[0], seeds[0] + 1, seeds[0] + 2] and seeds[3:5] == [7, 7]
    assert len({seeds[0], seeds[5]}) == 2 and all(0 <= seed < 2**48 + 3 for seed in seeds)


# --------------------------------------------------------------------------------------------------
# Long answers


@pytest.mark.parametrize("size", [0, 1, answers.SLICE, answers.SLICE + 1, 3 * answers.SLICE])
def test_long_answers_go_out_in_slices(size):
    """
    Each waits until the one before is on its way; all of them together are what was announced.
    """
    sent = []

    async def send(message):
        sent.append(message)

    data = bytes(range(256)) * (size // 256 + 1)
    asyncio.run(answers.send_json(send, data[: max(1, size)]))
    start, *parts = sent
    headers = dict(start["headers"])
    assert start["status"] == 200 and headers[b"content-type"] == b"application/json"
    assert b"".join(part["body"] for part in parts) == data[: max(1, size)]
    assert int(headers[b"content-length"]) == max(1, size)
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert all(0 < len(part["body"]) <= answers.SLICE for part in parts)


def test_four_long_answers_are_there_at_once(house, monkeypatch):
    """Until their clients have read them; a short one needs no turn."""
    asked = []

    async def ask(job):
        size = size_of(job)
        asked.append(size)
        return b'"%s"' % (b"1" * size)

    monkeypatch.setattr(house.encoder, "ask", ask)
    callers = []
    for _ in range(6):
        caller = house.connect()
        caller.stop_reading()
        caller.send(request("POST", "/tokenize", {"prompt": "a" * 5000}))
        callers.append(caller)
    assert asked == [5000] * 4
    house.call("POST", "/tokenize", {"prompt": "a"})
    assert asked == [5000] * 4 + [1]
    callers[0].read_on()
    assert callers[0].answer().json == "1" * 5000 and asked[5:] == [5000]
    callers[1].hang_up()
    assert asked[6:] == [5000]


# --------------------------------------------------------------------------------------------------
# The life of the server


@pytest.fixture
def logged(capfd):
    """A function: the lines since it was called last."""

    def lines():
        err = capfd.readouterr().err
        return [json.loads(line) for line in err.splitlines() if line.startswith("{")]

    return lines


def test_while_it_loads_it_is_alive_and_takes_nothing():
    with House(ready=False) as house:
        assert house.get("/livez").status == 200
        message = "the server is loading: try again later"
        for path in ("/readyz", "/health", "/v1/models", "/v1/models/fake"):
            answer = house.get(path)
            assert (
                refusal_of(answer) == (503, "loading", message)
                and answer.headers["retry-after"] == "1"
            )
        assert refusal_of(house.ask().answer())[:2] == (503, "loading")
        house.engine.ready()
        assert (
            house.get("/readyz").json == {"status": "ready"} and house.get("/health").status == 200
        )
        assert house.get("/livez").json == {"status": "alive"}


def test_who_sent_its_body_while_the_server_began_to_drain_is_refused(house):
    caller = house.connect()
    caller.send(ASK[:-3])
    house.ask()
    stop(house)
    caller.send(ASK[-3:])
    assert refusal_of(caller.answer()) == (
        503,
        "draining",
        "the server is draining: try again later",
    )
    assert len(house.choices) == 1


def stop(house):
    house.clock.call_soon(house.service.stop)
    house.clock.settle()


def test_what_runs_may_finish_after_the_signal(house, capsys):
    caller = house.ask()
    stop(house)
    assert house.get("/readyz").status == 503 and house.get("/livez").status == 200
    assert refusal_of(house.ask().answer())[:2] == (503, "draining")
    assert not house.service.server.should_exit
    house.clock.run(29)
    house.engine.step({"0": b"x"}, "length")
    house.clock.run(0.1)
    assert caller.answer().status == 200 and house.service.server.should_exit
    assert capsys.readouterr().err == "finishing 1 request; a second signal ends them\n"


def test_what_does_not_finish_in_time_is_told():
    """After --drain-seconds, or at the second signal."""
    for seconds, signals in ((5, 1), (2, 2)):
        with House("--drain-seconds", "5") as house:
            caller = house.ask()
            stop(house)
            house.clock.run(seconds - 0.1)
            assert not caller.said and not house.service.server.should_exit
            if signals == 2:
                stop(house)
            house.clock.run(0.2)
            answer = caller.answer()
            message = "the server stopped before this was finished"
            assert (
                refusal_of(answer) == (503, "stopping", message)
                and answer.headers["retry-after"] == "1"
            )
            assert house.service.server.should_exit and not house.choices


def test_an_idle_server_ends_at_once(house, capsys):
    stop(house)
    house.clock.run(0.1)
    assert house.service.server.should_exit and capsys.readouterr().err == ""


def test_the_first_process_says_how_many_finish_anywhere(capsys):
    """And waits for the other processes; these say nothing."""
    with House() as house:
        house.engine.step(at_work=7)
        house.service.workers = SimpleNamespace(processes={1: None}, stop=lambda: None)
        stop(house)
        assert capsys.readouterr().err.startswith("finishing 7 requests")
        house.clock.run(10)
        assert not house.service.server.should_exit
        house.service.workers.processes.clear()
        house.clock.run(0.1)
        assert house.service.server.should_exit
    with House(slot=WorkerSlot(1, 2)) as house:
        house.ask()
        capsys.readouterr()
        stop(house)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_process_alone_greets_counts_and_takes_signals(number, capsys):
    """What the engine reports reaches every process. Each ends when the engine is gone for good."""
    is_first = number == 0
    with House(slot=WorkerSlot(number, 2)) as house:
        house.engine.step(queries=3)
        greeting = "serving fake at http://127.0.0.1:8000"
        assert (greeting in capsys.readouterr().out) == is_first
        counted = 'prefix_cache_queries_total{model_name="fake"} 3.0'
        assert (counted in house.get("/metrics").body) == is_first
        house.service.on_signal(15, None)
        house.clock.settle()
        assert house.service.draining == is_first
    with House(ready=False, slot=WorkerSlot(number, 2)) as house:
        house.engine.die()
        assert house.service.server.should_exit


def test_a_dead_engine_is_started_again_once(house, logged):
    """Whoever waits is told each time; after the second death the server ends."""
    callers = [house.ask(), house.ask(stream=True)]
    house.engine.die()
    reason = "the engine stopped unexpectedly, a new one is starting"
    assert [refusal_of(caller.answer()) for caller in callers] == [(500, "engine_dead", reason)] * 2
    assert refusal_of(house.get("/readyz")) == (
        503,
        "restarting",
        f"the server is restarting: {reason}",
    )
    assert refusal_of(house.get("/livez")) == (503, "dead", f"the engine is not alive: {reason}")
    assert [(line["event"], line["reason"]) for line in logged()] == [("engine_died", reason)]
    assert not house.choices and not house.service.server.should_exit and len(house.engines) == 2
    house.engine.ready()
    assert house.get("/livez").status == 200
    caller = house.ask()
    house.engine.step({"2": b"x"}, "length")
    assert caller.answer().status == 200
    house.engine.die()
    assert (
        house.service.server.should_exit
        and house.service.client.state == "dead"
        and len(house.engines) == 2
    )
    assert (
        refusal_of(house.get("/livez"))[2]
        == "the engine is not alive: the engine stopped unexpectedly"
    )


def test_who_was_being_encoded_when_the_engine_died_is_refused(house):
    held = Held(house)
    caller = house.ask()
    house.engine.die()
    held.release()
    assert refusal_of(caller.answer())[:2] == (503, "restarting")


def test_an_engine_with_work_that_is_silent_for_two_minutes_is_not_alive(house):
    """One that has nothing to do may be silent, and its silence counts from the first request."""
    house.clock.run(3600)
    assert house.get("/livez").status == 200
    house.ask(max_tokens=9)
    house.clock.run(119)
    assert house.get("/livez").status == 200
    house.engine.step()
    house.clock.run(119)
    assert house.get("/livez").status == 200
    house.clock.run(2)
    assert refusal_of(house.get("/livez")) == (
        503,
        "dead",
        "the engine is not alive: no step in 120 s",
    )
    house.engine.step({"0": b"x"}, "length")
    house.clock.run(3600)
    assert house.get("/livez").status == 200
    for _ in range(3):  # who comes while it is silent is no word of it
        house.ask()
        house.clock.run(50)
    assert house.get("/livez").status == 503


@pytest.fixture
def worker():
    """An HTTP process that is not the first, with a pipe for the first one's orders."""
    with House(slot=WorkerSlot(1, 2)) as house:
        reader, house.pipe = os.pipe()
        house.service.slot.control_pipe = SimpleNamespace(fileno=lambda: reader)
        house.clock.remove_reader = lambda number: None
        yield house
        os.close(reader)


@pytest.mark.parametrize("orders", [[b"."], [b".", b"."], [b""], [b".", b""]])
def test_orders_of_the_first_process_are_taken(worker, orders):
    """A byte is one stop; the end of the file is its death: stop now."""
    caller = worker.ask()
    for order in orders:
        assert not worker.service.server.should_exit
        os.write(worker.pipe, order)
        if not order:
            os.close(worker.pipe)
        worker.clock.call_soon(worker.service.on_order)
        worker.clock.run(0.1)
    is_now = orders != [b"."]
    assert worker.service.draining and worker.service.server.should_exit == is_now
    assert [answer.status for answer in caller.answers()] == [503] * is_now


def test_a_late_process_waits_a_second_for_the_engines_greeting():
    with House(ready=False, slot=WorkerSlot(1, 2)) as house:
        for greets in (False, True):
            task = house.clock.create_task(house.service.wait_for_greeting())
            house.clock.run(0.9)
            assert not task.done()
            if greets:
                house.engine.ready()
            house.clock.run(0.03 if greets else 0.11)
            assert task.done()


def test_the_prompts_limit_is_the_engines(house):
    """Its max_model_len, with the answer; counted before and after the text is encoded."""
    for prompt in ("a" * 997, [1] * 997, ["a", "a" * 997, "a"]):
        answer = house.ask(prompt, max_tokens=4).answer()
        assert refusal_of(answer)[:2] == (400, "context_length_exceeded")
        assert "maximum context length is 1000 tokens, 997 prompt tokens" in refusal_of(answer)[2]
    house.ask("a" * 996, max_tokens=4)
    house.ask([1] * 996, max_tokens=4)
    assert [len(message["prompt"]) for message in house.engine.of("add")] == [996, 996]


@pytest.mark.parametrize(
    "raised, status, code",
    [
        (api.TokenizerError("no such character"), 400, None),
        (api.EncoderBusy(), 429, "encoder_busy"),
    ],
)
def test_what_the_encoder_cannot_do_is_said(house, monkeypatch, raised, status, code):
    async def ask(job):
        raise raised

    monkeypatch.setattr(house.encoder, "ask", ask)
    for path, body, param in (
        ("/v1/completions", {"prompt": "a"}, "prompt"),
        ("/tokenize", {"prompt": "a"}, "prompt"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ):
        answer = house.call("POST", path, body).answer()
        error = error_of(answer)
        assert (answer.status, error["code"]) == (status, code)
        assert error["param"] == (param if status == 400 else None)
        assert answer.headers.get("retry-after") == (None if status == 400 else "1")


def test_ids_outside_the_vocabulary_are_no_tokens(house):
    """At the edge they are."""
    assert house.call("POST", "/detokenize", {"tokens": [97, 256]}).answer().json == {
        "prompt": "a<end>"
    }
    answer = house.call("POST", "/detokenize", {"tokens": [97, 257]}).answer()
    assert refusal_of(answer)[2] == "token id 257 is outside the vocabulary, 0..256"
    assert house.call("POST", "/detokenize", {"tokens": []}).answer().json == {"prompt": ""}


def test_a_refusal_of_the_engine_becomes_its_status(house):
    for number, (kind, status, code) in enumerate(
        [
            ("invalid", 400, None),
            ("full", 429, "queue_full"),
            ("internal", 500, None),
            ("other", 500, None),
        ]
    ):
        caller = house.ask()
        house.engine.say(
            {"op": "error", "id": str(number), "message": f"it is {kind}", "kind": kind}
        )
        answer = caller.answer()
        assert refusal_of(answer) == (status, code, f"it is {kind}")
        assert answer.headers.get("retry-after") == ("1" if kind == "full" else None)
