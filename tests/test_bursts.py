"""Many clients at once, and clients that hang up or do not read."""

import asyncio
from types import SimpleNamespace

import pytest
from server import FakeEngine, Server, read_until, text_of, wait_until

import serve
from assets import load
from serving import client as client_module
from serving.client import EngineClient
from serving.links import Links, to_line
from serving.protocol import CompletionRequest

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


class Listening:
    """A link's transport that only notes whether it is read."""

    is_read = True

    def pause_reading(self):
        self.is_read = False

    def resume_reading(self):
        self.is_read = True


@pytest.mark.parametrize(("took", "rests"), [(0.0, False), (0.005, True), (3.0, True)])
def test_after_a_round_the_engine_is_not_listened_to_for_as_long(
    listener, monkeypatch, took, rests
):
    """
    With a write for each token of 256 streams the loop did nothing else, and the requests of a
    burst were read after up to 2 s. A stream that is alone is never made to wait, and nobody for
    longer than MAX_PAUSE.
    """
    client, clock = EngineClient(listener.getsockname()), [100.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    client.transport = Listening()
    client.choices["a"] = choice = SimpleNamespace(finish_reason=None)
    waits = []

    def take(*_):
        clock[0] += took

    async def one_round():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(
            loop, "call_later", lambda wait, call, *args: waits.append((wait, call, args))
        )
        choice.job = SimpleNamespace(on_tokens=take)
        client.data_received(
            to_line({"op": "step", "out": [["a", [1], None, 0]], "stats": {"at_work": 1}})
        )
        assert (
            client.transport.is_read
        )  # until all that it wrote is out, and what had arrived was read
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(one_round())
    assert client.transport.is_read != rests and len(waits) == rests
    for wait, call, args in waits:
        assert wait == pytest.approx(min(took, client_module.MAX_PAUSE))
        call(*args)
        assert client.transport.is_read


def test_what_several_steps_brought_is_told_at_once(listener):
    """And an error comes after the tokens before it, as it was sent."""
    client, told = EngineClient(listener.getsockname()), []
    client.transport = Listening()
    job = SimpleNamespace(
        on_tokens=lambda choice, *row: told.append(row),
        on_refusal=lambda *error: told.append(error),
    )
    client.choices = {id: SimpleNamespace(job=job, finish_reason=None) for id in "ab"}

    def step(*rows):
        return to_line({"op": "step", "out": rows, "stats": {"at_work": 2}})

    data = step(["a", [1], None, 5, [["s"]], ["p"]], ["b", [7], None, 0]) + step(
        ["a", [2], None, 5, [["t"]], None]
    )
    error = to_line({"op": "error", "id": "b", "message": "broken", "kind": "internal"})
    data += error + step(["a", [3], "length", 5, [["u"]], None])

    async def receive():
        client.data_received(data[:50])
        client.data_received(data[50:])

    asyncio.run(receive())
    assert told == [
        ([1, 2], None, 5, [["s"], ["t"]], ["p"]),
        ([7], None, 0),
        ("internal", "broken"),
        ([3], "length", 5, [["u"]], None),
    ]


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2}, {"stop": ["never", "lo w"], "logprobs": 0}]
)
def test_joined_tokens_say_the_same(fields):
    """
    Text, log-probabilities, stop strings and usage do not depend on how many tokens came at a time.
    """

    def events(per_step):
        engine = FakeEngine(per_step=per_step, pace=0.02)  # a busy machine joins faster steps
        with Server(engine=engine) as server:
            found = server.stream(
                "say h\u20acllo world", stream_options={"include_usage": True}, **fields
            )
        logprobs = [
            choice["logprobs"]
            for event in found[:-1]
            for choice in event["choices"]
            if choice["logprobs"]
        ]
        joined = {
            name: [x for part in logprobs for x in part[name]] for name in (logprobs or [{}])[0]
        }
        return text_of(found), joined, found[-2]["usage"], len(found)

    *single, count = events(1)
    *several, fewer = events(4)
    assert (
        several == single and fewer <= count
    )  # on a busy machine tokens of several steps are one event, too
    assert single[0] == ("h\u20acl" if "stop" in fields else "h\u20acllo world")


def test_a_newcomer_is_served_while_128_streams_write():
    """
    All of them have news all the time; who comes meanwhile gets a whole answer long before any of
    them ends.
    """
    with Server(engine=FakeEngine(pace=0.02)) as server:
        socks = [server.connect(prompt="loop", max_tokens=2000, stream=True) for _ in range(128)]
        wait_until(lambda: len(server.engine.running) == 128)
        for path in ("/livez", "/metrics"):
            assert server.get(path) == 200
        assert server.answer("say hi")["choices"][0]["text"] == "hi"
        assert len(server.engine.running) == 128
        for sock in socks:
            sock.close()
        wait_until(lambda: not server.service.client.choices)


def test_the_load_generator_measures_what_it_says():
    """A row for each request, in their order; a slow client has none, and nobody waits for it."""
    with Server(engine=FakeEngine(pace=0.02)) as server:
        requests = [load.completion(list(b"loop"), 5 + i, at=0.1 * (i == 4)) for i in range(5)]
        requests.insert(1, load.completion(list(b"loop"), 4000, speed=100))
        rows = load.run_clients(*map(str, server.address), requests, processes=2)
        assert [row and row["tokens"] for row in rows] == [5, None, 6, 7, 8, 9]
        for row in filter(None, rows):
            waited = row["first"] + sum(row["gaps"])
            assert 0 < row["first"] < waited and 0 < len(row["gaps"]) < row["tokens"]
            assert row["end"] == pytest.approx(waited + 0.1 * (row["tokens"] == 9))
        wait_until(lambda: not server.service.client.choices)
        with pytest.raises(ValueError, match="wanted 3 tokens, the answer ends with HTTP"):
            load.run_clients(*map(str, server.address), [load.completion([300], 3)], processes=1)


def test_percentiles_are_of_all_rows():
    rows = [
        {"first": i / 1000, "gaps": [i / 500] * 2, "end": i, "tokens": 3} for i in range(1, 101)
    ]
    assert load.summary(rows) == {
        "output tok/s": 3,
        "s": 100,
        "first token, ms": {"p50": 51, "p90": 91, "p99": 100},
        "gaps, ms": {"p50": 102, "p90": 182, "p99": 200},
        "tokens an event": 1,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_disconnect_aborts_all_the_work_of_a_call(stream, started):
    """
    Streaming or not, before the first token or after: closing the connection ends all the work of
    the call.
    """
    with Server(engine=FakeEngine(max_model_len=10**9)) as server:
        if not started:
            server.engine.gate.clear()
        sock = server.connect(prompt=["loop", "loop"], max_tokens=20_000, stream=stream)
        wait_until(lambda: len(server.engine.added) == 2)
        if started and stream:
            read_until(sock, b"x")
        assert server.engine.aborted == []
        sock.close()
        wait_until(lambda: sorted(server.engine.aborted) == ["0", "1"])
        assert not server.service.client.choices


def test_slow_readers_are_cut_off():
    """Who does not read keeps neither a connection nor blocks."""
    engine = FakeEngine(pace=0, max_model_len=10**9)
    with Server("--client-seconds", "0.3", engine=engine, send_buffer=4096) as server:
        sock = server.connect(prompt="loop", max_tokens=10**5, stream=True, return_token_ids=True)
        wait_until(lambda: server.engine.aborted == ["0"])
        wait_until(lambda: not server.service.client.choices)
        sock.close()


def test_late_tokens_of_an_aborted_request_are_dropped(listener):
    """
    Between our abort and the engine's reading it, tokens of the request still come; they must do no
    harm.
    """
    client, stats = EngineClient(listener.getsockname()), {"at_work": 0}
    message = {
        "op": "step",
        "out": [["gone", [1], None, 0], ["gone", [2], "stop", 0]],
        "stats": stats,
    }

    async def receive():
        client.data_received(to_line(message))

    asyncio.run(receive())
    assert client.choices == {}


def test_a_message_larger_than_a_link_takes_at_a_time(listener):
    """
    The rest of a long message was an error once, taken for the engine's death; the
    log-probabilities of a prompt are such a message. It comes in many parts, and so does a long
    prompt on its way to the engine.
    """
    client, links = EngineClient(listener.getsockname()), Links(listener)
    states, found, long = [], [], "x" * 2**22
    client.on_state = states.append

    def engine():
        links.accept()
        links.set_greeting({"op": "ready", "padding": long})
        while not found:
            found.extend(links.receive(timeout=1))

    async def attached():
        await client.attach()
        client._write(op="add", padding=long)
        await asyncio.to_thread(engine)
        while not states:
            await asyncio.sleep(0.001)

    serve.run_on_loop(asyncio.wait_for(attached(), 10))
    assert states == ["ready"] and client.info["padding"] == long
    assert found[0][1] == {"op": "add", "padding": long}


def test_an_engine_that_does_not_read_costs_no_memory(listener):
    """
    40 calls that hung up while the engine was stopped left 300 MiB of requests for it, of which
    nobody waited.
    """
    client, links, heard = EngineClient(listener.getsockname()), Links(listener), []
    client.info["max_model_len"] = 10**6
    job = SimpleNamespace(salt="", call_id="")

    def choices(n):
        request = CompletionRequest(prompt="x", n=n)
        made = [SimpleNamespace(body=request, prompt=[7] * 50_000, job=job) for _ in range(n)]
        for choice in made:
            choice.siblings = made
        return made

    def waiting():
        return client.transport.get_write_buffer_size() + sum(map(len, client.unsent.values()))

    async def talk():
        await client.attach()
        calls = [choices(1 + i % 3) for i in range(40)]
        for call in calls:
            client.submit(call)
        before = waiting()
        for call in calls[:-2]:
            for choice in call:
                assert client.abort(choice)
        client.abort(calls[-2][-1])  # one choice of 3
        after = waiting()
        links.accept()
        while not heard or heard[-1].get("id") != "38.2":
            heard.extend(message for _, message in links.receive(timeout=0))
            await asyncio.sleep(0)
        return before, after

    before, after = serve.run_on_loop(asyncio.wait_for(talk(), 30))
    assert before > 3_000_000 > 5 * after
    added, aborted = ([m["id"] for m in heard if m["op"] == op] for op in ("add", "abort"))
    assert added[-2:] == ["38", "39"] and len(added) < 10 and set(added[:-2]) <= set(aborted)
