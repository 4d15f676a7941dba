"""
What clients may do to a connection, byte by byte, before anybody knows who they are: the real server with the fake
engine of test_serve.py behind it.
"""

import contextlib
import json
import socket
import time

import httpx
import pytest
from test_serve import HEAD, FakeEngine, Server, read_until, wait_until

import connection

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "say hi", "max_tokens": 9}'
CALL = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    with Server("--max-body-mib", "0.1") as server:
        yield server
    assert not server.service.client.choices, "some test left a request behind"


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """A server with a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sesame")
    with Server("--api-key-file", str(keys), "--max-body-mib", "0.1") as server:
        yield server


def connect(server) -> socket.socket:
    return socket.create_connection(server.address, timeout=30)


def answers(server, *pieces: bytes) -> bytes:
    """All that the server says to these bytes until it closes the connection."""
    with connect(server) as sock:
        for piece in pieces:
            with contextlib.suppress(OSError):
                sock.sendall(piece)
        return read_until(sock, b"no such end")


def is_closed(sock) -> bool:
    """By the other side; what it had to say before is read."""
    with contextlib.suppress(ConnectionError):
        sock.settimeout(0.02)
        try:
            while sock.recv(65536):
                pass
        except TimeoutError:
            return False
    return True


def send_until_closed(sock, piece: bytes, limit: int) -> int:
    """How many bytes a client that goes on and on gets rid of until it is cut off."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < limit:
            sent += sock.send(piece)
    return sent


# ----------------------------------------------------------------------------------------------------------------------
# How much


@pytest.mark.parametrize("piece", [b"a:b\r\n" * 1000, b"x" * 5000], ids=["lines", "one line"])
@pytest.mark.parametrize(
    "start", [HEAD, CHUNKED + b"1\r\nx\r\n0\r\na: ", CHUNKED + b"1;"], ids=["head", "trailers", "chunk"]
)
def test_what_is_no_body_ends_somewhere(server, start, piece):
    """51 MiB of trailers took 1.3 GiB of memory and 8 s, in which nobody else was served; nobody asked for a key."""
    with connect(server) as sock:
        sock.sendall(start)
        wait_until(lambda: server.service.server.server_state.connections)
        assert send_until_closed(sock, piece, limit=2**26) < 2**25  # of which the socket's buffers take most
    assert server.get("/livez") == 200


@pytest.mark.parametrize("number, status", [(connection.MAX_HEADERS - 3, 200), (connection.MAX_HEADERS + 1, 431)])
def test_number_of_headers(server, number, status):
    """64 KiB of short headers took 1.7 MB of memory, in each connection."""
    data = answers(server, LIVEZ[:-2] + b"a:b\r\n" * number + b"Connection: close\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 %d " % status)


def test_trailers_are_never_headers(locked):
    """With the trailers in the packet of the head, they were read before who asks: the last Authorization counted."""
    trailers = b"Authorization: Bearer sesame\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n"
    chunk = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    assert answers(locked, CHUNKED + chunk + trailers).startswith(b"HTTP/1.1 401 ")
    key = b"Authorization: Bearer sesame\r\nConnection: close\r\n"
    call = HEAD + key + b"Transfer-Encoding: chunked\r\n\r\n" + chunk
    assert b'"text":"hi"' in answers(locked, call + trailers)


@pytest.mark.parametrize("name", sorted(connection.SINGLE_HEADERS))
@pytest.mark.parametrize("same", [True, False])
def test_headers_that_contradict_each_other_are_refused(server, name, same):
    """The last one counted, for whoever stands in front of this server perhaps the first."""
    values = {b"content-length": b"5", b"transfer-encoding": b"chunked"}
    line = name + b": " + values.get(name, b"localhost")
    twice = [line, line if same else line[:-1] + line[-1:].upper()]
    head = b"POST /livez HTTP/1.1\r\n" + (b"" if name == b"host" else b"Host: localhost\r\n")
    data = answers(server, head + b"\r\n".join(twice) + b"\r\nConnection: close\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 400 ")


# ----------------------------------------------------------------------------------------------------------------------
# Refused before the body is read


@pytest.mark.parametrize(
    "start, status",
    [
        (CHUNKED, 401),
        (HEAD + b"Content-Length: 50000\r\n\r\n", 401),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\nContent-Length: 9\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\nContent-Length: 9\r\n\r\n", 405),
        (HEAD + b"Authorization: Bearer sesame\r\nContent-Length: 999999\r\n\r\n", 413),
        (HEAD + b"Authorization: Bearer sesame\r\nExpect: 100-continue\r\nContent-Length: 999999\r\n\r\n", 413),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", 200),
    ],
)
def test_what_the_head_decides_is_said_at_once_and_last(locked, start, status):
    """A body after an early 401 was read without end, for whoever sent it. Now the answer does not wait for the body,
    says that the connection ends, and comes whole though the client is still sending."""
    with connect(locked) as sock:
        sock.sendall(start)
        said = read_until(sock, b"}")
        assert said.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in said
        began = time.monotonic()
        send_until_closed(sock, b"1\r\nx\r\n" * 1000, limit=2**40)
        assert time.monotonic() - began < connection.REFUSED_SECONDS + 5
    assert locked.get("/livez") == 200


def test_a_refused_client_that_sends_all_before_it_reads_gets_its_answer(locked):
    """Closing with bytes unread resets the connection, and the answer is lost on its way."""
    assert httpx.post(f"{locked.http.base_url}/v1/completions", content=b" " * 10**7).status_code == 401
    with connect(locked) as sock:
        sock.sendall(HEAD + b"Content-Length: 3000000\r\n\r\n" + b" " * 3000000)
        assert read_until(sock, b"no such end").startswith(b"HTTP/1.1 401 ")


def test_refusals_without_a_body_keep_the_connection(locked):
    for path in (b"/v1/models", b"/nowhere"):
        request = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path
        with connect(locked) as sock:
            for _ in range(2):
                sock.sendall(request)
                assert read_until(sock, b"}}").startswith(b"HTTP/1.1 401 ")


def test_draining_is_said_before_the_body_comes():
    with Server() as server:
        server.engine.gate.clear()
        with server.connect(prompt="say hi", max_tokens=9), connect(server) as sock:
            wait_until(lambda: server.service.client.choices)
            server.stop()
            wait_until(lambda: server.service.draining)
            sock.sendall(HEAD + b"Content-Length: 50000\r\n\r\n")
            assert read_until(sock, b"}}").startswith(b"HTTP/1.1 503 ")


# ----------------------------------------------------------------------------------------------------------------------
# Several requests in one connection, and its end


@pytest.mark.parametrize("behind", [LIVEZ, LIVEZ * 3, HEAD + b"Content-Length: 99999\r\n\r\n" + b" " * 90_000])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_who_hangs_up_with_requests_waiting_is_noticed(behind, how):
    """uvicorn told the last request of the connection only, and stopped reading: 22,000 tokens for a client that was
    gone."""
    with Server(engine=FakeEngine(max_model_len=10**9)) as server:
        body = b'{"prompt": "loop", "max_tokens": 20000}'
        sock = connect(server)
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) + behind)
        wait_until(lambda: server.engine.added)
        time.sleep(0.05)
        assert not server.engine.aborted
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
        wait_until(lambda: server.engine.aborted == ["0"], seconds=5)


def test_pipelined_requests_are_answered_in_order(server):
    last = LIVEZ[:-2] + b"Connection: close\r\n\r\n"
    data = answers(server, CALL + LIVEZ + CALL + last)
    assert [data.count(text) for text in (b"HTTP/1.1 200 OK", b'"text":"hi"', b"alive")] == [4, 2, 2]
    assert data.index(b"hi") < data.index(b"alive") < data.rindex(b"hi") < data.rindex(b"alive")


def test_few_requests_may_wait_in_a_connection():
    """Each of the 5,000 that a packet holds was made a request of its own, with or without a key."""
    with Server() as server:
        server.engine.gate.clear()
        with connect(server) as sock:
            sock.sendall(CALL + LIVEZ * connection.MAX_PIPELINED)
            wait_until(lambda: server.service.client.choices)
            assert not is_closed(sock)
            with contextlib.suppress(OSError):
                sock.sendall(LIVEZ * 5000)
            wait_until(lambda: is_closed(sock))
            wait_until(lambda: server.engine.aborted == ["0"])


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_only_nothing_more_to_ask_is_answered(server, stream):
    """`printf ... | nc -N` ends its side after the request. It was taken for gone, and got no answer."""
    body = json.dumps({"prompt": "say " + "hello" * 20, "max_tokens": 999, "stream": stream}).encode()
    server.engine.gate.clear()
    with connect(server) as sock:
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.service.client.choices)
        time.sleep(0.05)
        server.engine.gate.set()
        data = read_until(sock, b"no such end")
    assert data.startswith(connection.CONTINUE) and b"HTTP/1.1 200 OK" in data and b"connection: close" in data
    assert data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n") if stream else b"hello" * 20 in data


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
def test_offers_of_another_protocol_are_ignored(server, size, offer):
    """`curl --http2` and the JDK's client offer HTTP/2 in each request: its body was lost, the answer a 400, and the
    connection deaf from then on."""
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n" % offer
    )
    lines = CALL.split(b"\r\n", 1)
    call = lines[0] + b"\r\n" + upgrade + lines[1]
    get = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n"
    pieces = [call[i : i + size] for i in range(0, len(call), size)] if size else [call]
    with connect(server) as sock:
        for _ in range(2):
            for piece in pieces:
                sock.sendall(piece)
            assert b'"text":"hi"' in read_until(sock, b"}}}")
        sock.sendall(get + get[:-2] + b"Connection: close\r\n\r\n")
        assert read_until(sock, b"no such end").count(b"HTTP/1.1 200 OK") == 2


def test_nothing_is_tunnelled(server):
    assert answers(server, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_packet_full_of_offers_is_no_work(server):
    """Each is parsed again without its offer, with all that follows it: a packet of them must not cost its square."""
    began = time.process_time()
    offer = b"GET /livez HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with connect(server) as sock, contextlib.suppress(OSError):
        sock.sendall(offer * 4000)
        read_until(sock, b"no such end")
    assert time.process_time() - began < 1 and server.get("/livez") == 200


# ----------------------------------------------------------------------------------------------------------------------
# How many


def test_idle_connections_make_room():
    """512 connections that asked nothing shut everybody out, who has a key and who asks /livez, for 30 s each time. The
    one that is idle for longest goes: never spoken, half a head, kept alive, or refused and still sending."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    starts = [b"", head, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", head + b"Content-Length: 99\r\n\r\n{"]
    with Server("--max-connections", "6") as server, contextlib.ExitStack() as stack:
        server.engine.gate.clear()
        busy = server.connect(prompt="say hi", max_tokens=9)
        wait_until(lambda: server.service.client.choices)
        server.get("/livez")  # on a connection that is then the oldest
        idle = []
        for start in starts:
            sock = stack.enter_context(socket.create_connection(server.address, timeout=30))
            sock.sendall(start)
            idle.append(sock)
            assert not start or start == head or b"HTTP/1.1 " in read_until(sock, b"}")
        for number in range(5):
            assert httpx.get(f"{server.http.base_url}/livez", headers={"Connection": "close"}).status_code == 200
            new = stack.enter_context(socket.create_connection(server.address, timeout=30))
            wait_until(lambda: len(server.service.server.server_state.connections) <= 6)
            assert [is_closed(sock) for sock in idle[:number]] == [True] * number
        assert not is_closed(new) and not is_closed(busy)
        server.engine.gate.set()
        assert b'"text":"hi"' in read_until(busy, b"}}}")
        busy.close()
