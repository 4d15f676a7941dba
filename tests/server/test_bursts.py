"""Many clients at once, and clients that hang up or do not read."""

import asyncio

import pytest
from fake_server import FakeEngine, Server, wait_until

import serve
from assets import load
from engine.links import Links
from server.client import EngineClient

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


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


def test_slow_readers_are_cut_off():
    """Who does not read keeps neither a connection nor blocks."""
    engine = FakeEngine(pace=0, max_model_len=10**9)
    with Server("--client-seconds", "0.3", engine=engine, send_buffer=4096) as server:
        sock = server.connect(prompt="loop", max_tokens=10**5, stream=True, return_token_ids=True)
        wait_until(lambda: server.engine.aborted == ["0"])
        wait_until(lambda: not server.service.client.choices)
        sock.close()


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
