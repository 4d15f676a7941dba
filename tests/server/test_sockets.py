"""Where real sockets matter: large bodies that are refused, and many clients of assets/load.py."""

import socket

import pytest
from fake_server import HEAD, FakeEngine, Server, read_until

from assets import load

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


@pytest.mark.parametrize(
    "head", [b"Content-Length: 5000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n4c4b40\r\n"]
)
def test_a_client_that_sends_5_mb_reads_its_413(head):
    """Closing with bytes unread would reset the connection, and the answer would be lost."""
    with Server() as server, socket.create_connection(server.address, timeout=30) as sock:
        sock.sendall(HEAD + head)
        sock.sendall(b" " * 5_000_000)
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 413 ")


def test_the_load_generator_measures_what_it_says():
    """A row for each request, in their order."""
    with Server(engine=FakeEngine(pace=0.02)) as server:
        requests = [load.completion(list(b"loop"), 5 + i, at=0.1 * (i == 4)) for i in range(5)]
        rows = load.run_clients(*map(str, server.address), requests, processes=2)
        assert [row["tokens"] for row in rows] == [5, 6, 7, 8, 9]
        for row in rows:
            waited = row["first"] + sum(row["gaps"])
            assert 0 < row["first"] < waited and 0 < len(row["gaps"]) < row["tokens"]
            assert row["end"] == pytest.approx(waited + 0.1 * (row["tokens"] == 9))
        with pytest.raises(ValueError, match="wanted 3 tokens, the answer ends with HTTP"):
            load.run_clients(*map(str, server.address), [load.completion([300], 3)], processes=1)
