"""
What clients may do to a connection, byte by byte, before anybody knows who they are: over wires
that the tests hold, where each limit is met exactly and time is the tests' own, and over real
sockets, with the fake engine of server.py behind the server.
"""

import contextlib
import json
import socket
import time

import httpx
import pytest
from server import HEAD, FakeEngine, Server, read_until, wait_until
from wires import House, request

from serving import connection
from serving.protocol import ApiError
from serving.workers import Counts, Seat

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


# --------------------------------------------------------------------------------------------------
# Limits, met exactly


@pytest.fixture
def house():
    with House() as house:
        yield house


ASK = request("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 4})
GET = request("GET", "/livez")
CHUNKED_ASK = ASK.partition(b"\r\nContent-Length")[0] + b"\r\nTransfer-Encoding: chunked\r\n\r\n"


def head_of(size: int) -> bytes:
    """A whole request whose first line and headers have so many bytes as the server counts them."""
    start, line = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n", b"a: \r\n"
    counted = len("/livez") + len("Host: localhost\r\n") + len(line)
    return start + line[:3] + b"x" * (size - counted) + b"\r\n\r\n"


@pytest.mark.parametrize("split", [False, True])
def test_a_head_may_be_64_kib_long(house, split):
    """
    A byte more ends the connection, at once; only the time-out of 30 s did when the limit was gone,
    and the test that was here passed all the same.
    """
    for size, is_served in ((2**16, True), (2**16 + 1, False)):
        caller = house.connect()
        head = head_of(size)
        if split:  # the parser tells of a header only when its line has ended
            caller.send(head[:40_000])
            caller.send(head[40_000:60_000])
            caller.send(head[60_000:])
        else:
            caller.send(head)
        assert caller.closed == ((None, None) if is_served else ("abort", 0))
        assert not is_served or caller.answer().status == 200


@pytest.mark.parametrize(
    "start, line",
    [
        (b"GET /livez HTTP/1.1\r\n", b"a: " + b"x" * 60_000 + b"\r\n"),
        (b"GET /livez HTTP/1.1\r\n", b"a:b\r\n" * 12_000),
        (CHUNKED_ASK + b"1\r\nx\r\n0\r\n", b"a: " + b"x" * 60_000 + b"\r\n"),
        (CHUNKED_ASK + b"1\r\nx\r\n0\r\n", b"a:b\r\n" * 12_000),
        (CHUNKED_ASK + b"1;", b"x" * 60_000),
        (b"GET /", b"x" * 60_000),
    ],
    ids=["a header", "headers", "a trailer", "trailers", "a chunk's extension", "a path"],
)
def test_what_is_no_body_and_has_no_end_is_cut_off_at_once(house, start, line):
    """Not by the 30 s that a client may take."""
    caller = house.connect()
    caller.send(start)
    for _ in range(3):
        assert caller.wire.closed != "close", caller.said  # it is HTTP
        caller.send(line)
    assert caller.closed == ("abort", 0)


def test_a_line_without_an_end_is_cut_off_at_64_kib(house):
    """In pieces that each end nothing."""
    caller = house.connect()
    caller.send(b"GET /livez HTTP/1.1\r\na: ")
    for sent in range(1000, 2**16 - 1000, 1000):
        caller.send(b"x" * 1000)
        assert caller.closed == (None, None), sent
    caller.send(b"x" * 2000)
    assert caller.closed == ("abort", 0)


def test_each_request_of_a_connection_has_a_head_of_its_own(house):
    caller = house.connect()
    for _ in range(3):
        caller.send(head_of(2**16))
    assert [answer.status for answer in caller.answers()] == [200] * 3 and caller.closed == (
        None,
        None,
    )


def test_a_long_body_is_no_head(house):
    caller = house.connect()
    prompt = b'{"prompt": "%s", "max_tokens": 1}' % (b"x" * 900)
    body = prompt + b" " * 100_000
    caller.send(request("POST", "/v1/completions", body))
    assert house.choices and caller.closed == (None, None)


@pytest.mark.parametrize("number, status", [(127, 200), (128, 431), (5000, 431)])
def test_128_headers_are_taken(house, number, status):
    caller = house.connect()
    caller.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * number + b"\r\n")
    assert caller.answer().status == status
    assert len(caller.wire.protocol.headers) <= connection.MAX_HEADERS + 1


BEGINNINGS = {
    "nothing": b"",
    "half a line": b"GET /li",
    "half a head": b"GET /livez HTTP/1.1\r\nHost: localhost\r\n",
    "half a body": ASK[:-5],
    "half a chunked body": CHUNKED_ASK + b"5\r\nhel",
}


@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize("start", BEGINNINGS)
def test_a_client_has_30_s_for_a_whole_request(house, start, drips):
    """Also if a byte comes now and then, and for each request of a connection anew."""
    caller = house.connect()
    if start != "nothing":
        caller.send(GET)
        house.clock.run(3)
        caller.began += 3
        caller.send(BEGINNINGS[start])
    for _ in range(299):
        house.clock.run(0.1)
        if drips and start not in ("nothing", "half a body"):
            caller.send(b"x" if start != "half a chunked body" else b"")
    assert caller.wire.closed is None
    house.clock.run(0.2)
    assert caller.closed == ("abort", 30)


def test_who_has_asked_may_wait(house):
    """The 30 s are for sending: an answer may take as long as it takes."""
    caller = house.connect()
    caller.send(ASK)
    house.clock.run(100)
    assert caller.wire.closed is None
    house.engine.step({"0": b"x"}, "length")
    assert caller.answer().status == 200


def test_a_kept_connection_ends_after_five_idle_seconds(house):
    """uvicorn's own limit, which a next request must lift."""
    caller = house.connect()
    caller.send(GET)
    house.clock.run(4.9)
    caller.send(ASK)
    house.clock.run(10)
    house.engine.step({"0": b"x"}, "length")
    assert [answer.status for answer in caller.answers()] == [
        200,
        200,
    ] and caller.wire.closed is None
    house.clock.run(5.1)
    assert caller.closed == ("close", 19.9)


def test_a_client_has_30_s_to_read_what_waits_for_it(house):
    """Reading on in time starts the time anew; what it was computing ends with it."""
    caller = house.connect()
    caller.send(
        request("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 99, "stream": True})
    )
    assert caller.wire.limits == {"high": 0, "low": None}  # whatever is not read counts
    house.engine.step({"0": b"x"})
    caller.stop_reading()
    house.clock.run(29)
    caller.read_on()
    house.clock.run(29)
    caller.stop_reading()
    house.clock.run(29)
    assert caller.wire.closed is None and house.choices
    house.clock.run(2)
    assert caller.closed == ("abort", 29 + 29 + 30) and not house.choices
    assert [message["id"] for message in house.engine.of("abort")] == ["0"]


def test_eight_requests_may_wait_behind_one(house):
    for number, is_served in ((8, True), (9, False)):
        caller = house.connect()
        caller.send(ASK + GET * number)
        assert caller.closed == ((None, None) if is_served else ("abort", 0))
        assert bool(house.choices) == is_served
        if is_served:
            house.engine.step({"0": b"x"}, "length")
            assert [answer.status for answer in caller.answers()] == [200] * (1 + number)


def test_a_body_that_waits_may_not_grow_for_ever():
    """Behind a request in work nobody reads it, so nobody else counts it."""
    with House("--max-body-mib", "0.5") as house:
        caller = house.connect()
        caller.send(
            ASK + b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n"
        )
        caller.send(b" " * 2**18)
        caller.send(b" " * 2**18)
        assert caller.wire.closed is None and caller.wire.is_reading and house.choices
        caller.send(b" ")
        assert caller.closed == ("abort", 0) and not house.choices


@pytest.mark.parametrize("how", ["goes on", "ends", "hangs up"])
def test_who_is_refused_early_has_a_second_to_read_why(how):
    """It may still be sending: a connection that is closed with bytes unread loses its answer."""
    with House(keys=["sesame"]) as house:
        caller = house.connect()
        caller.send(ASK[:-3])
        assert caller.answer().status == 401 and caller.answer().headers["connection"] == "close"
        assert caller.wire.closed is None
        house.clock.run(0.5)
        if how == "goes on":
            caller.send(ASK[-3:-1])
            house.clock.run(0.4)
            assert caller.wire.closed is None
            house.clock.run(0.2)
            assert caller.closed == ("close", 1)
        elif how == "ends":
            caller.send(ASK[-3:])
            assert caller.closed == ("close", 0.5)
        else:
            caller.hang_up()
            assert not house.state.tasks
        assert caller.answer().status == 401  # and nothing after it


def test_a_chunked_body_that_is_refused_early_is_the_last():
    with House(keys=["sesame"]) as house:
        caller = house.connect()
        caller.send(CHUNKED_ASK)
        assert caller.answer().status == 401 and caller.answer().headers["connection"] == "close"


def test_an_answer_after_the_whole_body_keeps_the_connection():
    with House(keys=["sesame"]) as house:
        caller = house.connect()
        for _ in range(2):
            caller.send(
                request("POST", "/v1/completions", {"prompt": 3}, Authorization="Bearer sesame")
            )
        answers = caller.answers()
        assert [answer.status for answer in answers] == [400, 400] and caller.wire.closed is None
        assert not any("connection" in answer.headers for answer in answers)


def test_a_body_of_no_bytes_is_none(house):
    """Content-Length: 0 announces no body, so the answer is not the connection's last."""
    for length in ("0", "00"):
        caller = house.connect()
        for _ in range(2):
            caller.send(request("GET", "/livez", Content_Length=length))
        assert [answer.headers.get("connection") for answer in caller.answers()] == [None, None]


# --------------------------------------------------------------------------------------------------
# Clients that end their side, or hang up


def test_whether_a_client_is_still_there_is_asked_twice_at_once_and_then_each_second(house):
    caller = house.connect()
    caller.send(ASK)
    caller.end_side()
    asked = []
    for _ in range(30):
        asked.append(caller.said.count("100 Continue"))
        house.clock.run(0.1)
    assert asked[:2] == [1, 2] and asked[-1] == 4 and caller.wire.closed is None
    house.engine.step({"0": b"x"}, "length")
    said = caller.answer()
    assert (
        said.status == 200
        and said.headers["connection"] == "close"
        and caller.wire.closed == "close"
    )
    house.clock.run(5)
    assert caller.said.endswith(said.body)


def test_a_stream_asks_with_comments(house):
    """Before its headers as others do; then in whole chunks, between its own."""
    caller = house.connect()
    caller.send(
        request("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 9, "stream": True})
    )
    caller.end_side()
    house.clock.run(0.5)
    house.engine.step({"0": b"x"})
    house.clock.run(3)
    house.engine.step({"0": b"y"}, "length")
    body = caller.answer().body
    assert caller.said.count("100 Continue") == 2 and body.count(": ping\n\n") == 3
    assert caller.events[-1] == "[DONE]" and caller.wire.closed == "close"


def test_the_request_that_is_answered_decides_how_it_is_asked(house):
    """Behind a stream that has ended, chunks of a stream would be the beginning of an answer."""
    caller = house.connect()
    caller.send(
        request("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 9, "stream": True}) + ASK
    )
    house.engine.step({"0": b"x"}, "length")
    before = len(caller.said)
    caller.end_side()
    assert caller.said[before:] == connection.CONTINUE.decode()


@pytest.mark.parametrize("start", ["nothing", "half a head", "half a body", "HTTP/1.0"])
def test_who_ends_its_side_without_a_whole_request_is_closed(house, start):
    caller = house.connect()
    caller.send(BEGINNINGS.get(start, ASK.replace(b"HTTP/1.1", b"HTTP/1.0")))
    caller.end_side()
    assert caller.closed == ("close", 0) and not house.choices and not house.state.tasks


def test_all_requests_of_a_connection_end_with_it(house):
    """uvicorn told the last one only."""
    caller = house.connect()
    caller.send(ASK + GET + ASK)
    caller.hang_up()
    assert not house.choices and not house.state.tasks and not house.state.connections
    assert [message["id"] for message in house.engine.of("abort")] == ["0"]
    assert house.clock.due() == float("inf")  # no timer is left that could do anything


# --------------------------------------------------------------------------------------------------
# How many


def counts_of(house) -> tuple[int, int]:
    """Connections that are open, and idle ones among them, as other HTTP processes see them."""
    return house.service.seat.counts.open[0], house.service.seat.counts.idle[0]


def test_connections_are_counted_as_they_come_work_and_go(house):
    first, second = house.connect(), house.connect()
    assert counts_of(house) == (2, 2)
    first.send(ASK[:-1])  # its head is complete
    assert counts_of(house) == (2, 1)
    first.send(ASK[-1:] + GET)
    second.send(ASK)
    assert counts_of(house) == (2, 0)
    house.engine.step({"0": b"x"}, "length")
    assert counts_of(house) == (2, 1)
    second.hang_up()
    assert counts_of(house) == (1, 1)
    first.hang_up()
    assert counts_of(house) == (0, 0)


def test_who_was_refused_and_still_sends_makes_room():
    with House("--max-connections", "1", keys=["sesame"]) as house:
        caller = house.connect()
        caller.send(ASK[:-3])
        assert caller.answer().status == 401 and caller.wire.closed is None
        house.clock.run(0.5)
        house.connect().send(GET)
        assert caller.closed == ("abort", 0.5)


def test_as_many_connections_as_there_may_be_are_served():
    """Each of them talks. One more, with all others at work, is the one that goes."""
    with House("--max-connections", "3") as house:
        busy = [house.ask() for _ in range(3)]
        assert len(house.choices) == 3 and not any(caller.wire.closed for caller in busy)
        one_more = house.connect()
        assert one_more.closed == ("abort", 0) and counts_of(house) == (3, 0)
        house.engine.step({"0": b"x", "1": b"y", "2": b"z"}, "length")
        assert [caller.answer().json["choices"][0]["text"] for caller in busy] == ["x", "y", "z"]
        assert counts_of(house) == (3, 3)
        for caller in busy:
            caller.send(GET)
        assert [len(caller.answers()) for caller in busy] == [2, 2, 2]


def test_the_connection_that_is_idle_for_longest_makes_room():
    """Idle since its last answer, or since it came. One that works stays, though it came first."""
    with House("--max-connections", "4") as house:
        busy = house.ask()
        idle = []
        for _ in range(3):
            idle.append(house.connect())
            house.clock.run(1)
        silent, asking, half = idle
        asking.send(GET)
        house.clock.run(1)
        half.send(BEGINNINGS["half a head"])
        for gone in (silent, half, asking):
            house.clock.run(1)
            house.connect().send(GET)
            assert gone.wire.closed == "abort"
            assert counts_of(house) == (4, 3)
        assert busy.wire.closed is None and len(house.state.connections) == 4


class Held:
    """A connection as `make_room` sees it."""

    def __init__(self, idle_since: float, is_idle: bool = True):
        self.idle_since = idle_since
        self.is_idle = is_idle
        self.is_closed = False
        self.num_counted = 0
        self.transport = self

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self):
        self.is_closed = True

    def count(self):
        self.num_counted += 1


@pytest.mark.parametrize(
    "number, open, idle, most, gone",
    [
        (0, [3, 0], [3, 0], 3, []),
        (0, [3, 1], [3, 1], 3, [1.0]),
        (0, [3, 1], [3, 0], 3, [1.0]),
        (0, [3, 3], [3, 1], 3, [1.0, 2.0, 3.0]),  # no more than there are
        (0, [5, 9], [3, 4], 12, []),  # the other has more idle ones, and enough
        (1, [9, 5], [4, 3], 12, []),
        (1, [9, 5], [2, 3], 12, [1.0, 2.0]),  # here are the most
        (0, [9, 5], [3, 3], 12, [1.0, 2.0]),  # of two with as many the first
        (1, [5, 9], [3, 3], 12, []),
        (0, [3, 9], [3, 1], 10, [1.0, 2.0]),
        (1, [9, 3], [4, 3], 7, [1.0, 2.0, 3.0]),  # all that are elsewhere would not do
    ],
)
def test_who_closes_how_many_where_there_are_several_processes(number, open, idle, most, gone):
    """
    The process with the most idle connections closes those that are too many; the others only where
    these are not enough. The ones that work, and those that are closing already, are left alone.
    """
    held = [Held(2.0), Held(0.5, is_idle=False), Held(1.0), Held(3.0), Held(0.1)]
    held[-1].is_closed = True
    connection.make_room(set(held), Seat(number, Counts(open, idle)), most)
    closed = sorted(c.idle_since for c in held[:-1] if c.is_closed)
    assert closed == gone and [c.num_counted for c in held] == [
        int(c.idle_since in gone) for c in held
    ]


@pytest.mark.parametrize(
    "idle, number", [([1, 1], 0), ([1, 2], 1), ([2, 2, 1], 0), ([0, 3, 9], 2), ([5], 0)]
)
def test_one_process_makes_room(idle, number):
    """The one with the most idle connections, of several the first."""
    for process in range(len(idle)):
        held = Held(1.0)
        connection.make_room({held}, Seat(process, Counts(idle, idle)), sum(idle) - 1)
        assert held.is_closed == (process == number)


@pytest.mark.parametrize("name", sorted(connection.SINGLE_HEADERS))
def test_a_header_that_decides_is_there_once(name):
    connection.check_head([(name, b"a"), (b"cookie", b"a"), (b"cookie", b"b")])
    with pytest.raises(ApiError) as caught:
        connection.check_head([(name, b"a"), (b"x", b"y"), (name, b"b"), (name, b"c")])
    assert caught.value.status == 400
    assert caught.value.message == f"the header {name.decode()} is there 3 times: send it once"


def test_the_headers_that_decide_are_these():
    names = "host authorization origin content-length content-type transfer-encoding"
    assert {name.decode() for name in connection.SINGLE_HEADERS} == set(names.split())


# --------------------------------------------------------------------------------------------------
# Over sockets: how much


@pytest.mark.parametrize("piece", [b"a:b\r\n" * 1000, b"x" * 5000], ids=["lines", "one line"])
@pytest.mark.parametrize(
    "start",
    [HEAD, CHUNKED + b"1\r\nx\r\n0\r\na: ", CHUNKED + b"1;"],
    ids=["head", "trailers", "chunk"],
)
def test_what_is_no_body_ends_somewhere(server, start, piece):
    """
    51 MiB of trailers took 1.3 GiB of memory and 8 s, in which nobody else was served; nobody asked
    for a key.
    """
    with connect(server) as sock:
        sock.sendall(start)
        wait_until(lambda: server.service.server.server_state.connections)
        assert (
            send_until_closed(sock, piece, limit=2**26) < 2**25
        )  # of which the socket's buffers take most
    assert server.get("/livez") == 200


@pytest.mark.parametrize(
    "number, status", [(connection.MAX_HEADERS - 3, 200), (connection.MAX_HEADERS + 1, 431)]
)
def test_number_of_headers(server, number, status):
    """64 KiB of short headers took 1.7 MB of memory, in each connection."""
    data = answers(server, LIVEZ[:-2] + b"a:b\r\n" * number + b"Connection: close\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 %d " % status)


def test_trailers_are_never_headers(locked):
    """
    With the trailers in the packet of the head, they were read before who asks: the last
    Authorization counted.
    """
    trailers = (
        b"Authorization: Bearer sesame\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n"
    )
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


# --------------------------------------------------------------------------------------------------
# Refused before the body is read


@pytest.mark.parametrize(
    "start, status",
    [
        (CHUNKED, 401),
        (HEAD + b"Content-Length: 50000\r\n\r\n", 401),
        (
            b"POST /nowhere HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            b"sesame\r\nContent-Length: 9\r\n\r\n",
            404,
        ),
        (
            b"POST /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            b"sesame\r\nContent-Length: 9\r\n\r\n",
            405,
        ),
        (HEAD + b"Authorization: Bearer sesame\r\nContent-Length: 999999\r\n\r\n", 413),
        (
            HEAD + b"Authorization: Bearer sesame\r\nExpect: 100-continue\r\nContent-Length: "
            b"999999\r\n\r\n",
            413,
        ),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", 200),
    ],
)
def test_what_the_head_decides_is_said_at_once_and_last(locked, start, status):
    """
    A body after an early 401 was read without end, for whoever sent it. Now the answer does not
    wait for the body, says that the connection ends, and comes whole though the client is still
    sending.
    """
    with connect(locked) as sock:
        sock.sendall(start)
        said = read_until(sock, b"}")
        assert said.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in said
        began = time.monotonic()
        send_until_closed(sock, b"1\r\nx\r\n" * 1000, limit=2**40)
        assert time.monotonic() - began < connection.REFUSED_SECONDS + 30
    assert locked.get("/livez") == 200


def test_a_refused_client_that_sends_all_before_it_reads_gets_its_answer(locked):
    """Closing with bytes unread resets the connection, and the answer is lost on its way."""
    assert (
        httpx.post(f"{locked.http.base_url}/v1/completions", content=b" " * 10**7).status_code
        == 401
    )
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


# --------------------------------------------------------------------------------------------------
# Several requests in one connection, and its end


@pytest.mark.parametrize(
    "behind", [LIVEZ, LIVEZ * 3, HEAD + b"Content-Length: 99999\r\n\r\n" + b" " * 90_000]
)
@pytest.mark.parametrize("how", ["close", "reset"])
def test_who_hangs_up_with_requests_waiting_is_noticed(behind, how):
    """
    uvicorn told the last request of the connection only, and stopped reading: 22,000 tokens for a
    client that was gone.
    """
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
        wait_until(lambda: server.engine.aborted == ["0"])


def test_pipelined_requests_are_answered_in_order(server):
    last = LIVEZ[:-2] + b"Connection: close\r\n\r\n"
    data = answers(server, CALL + LIVEZ + CALL + last)
    assert [data.count(text) for text in (b"HTTP/1.1 200 OK", b'"text":"hi"', b"alive")] == [
        4,
        2,
        2,
    ]
    assert data.index(b"hi") < data.index(b"alive") < data.rindex(b"hi") < data.rindex(b"alive")


def test_few_requests_may_wait_in_a_connection():
    """
    Each of the 5,000 that a packet holds was made a request of its own, with or without a key.
    """
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
    """
    `printf ... | nc -N` ends its side after the request. It was taken for gone, and got no answer.
    """
    body = json.dumps(
        {"prompt": "say " + "hello" * 20, "max_tokens": 999, "stream": stream}
    ).encode()
    server.engine.gate.clear()
    with connect(server) as sock:
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.service.client.choices)
        time.sleep(0.05)
        server.engine.gate.set()
        data = read_until(sock, b"no such end")
    assert (
        data.startswith(connection.CONTINUE)
        and b"HTTP/1.1 200 OK" in data
        and b"connection: close" in data
    )
    assert data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n") if stream else b"hello" * 20 in data


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
def test_offers_of_another_protocol_are_ignored(server, size, offer):
    """
    `curl --http2` and the JDK's client offer HTTP/2 in each request: its body was lost, the answer
    a 400, and the connection deaf from then on.
    """
    upgrade = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: "
        b"AAMAAABkAAQCAAAAAAIAAAAA\r\n" % offer
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
    """
    Each is parsed again without its offer, with all that follows it: a packet of them must not cost
    its square.
    """
    began = time.process_time()
    offer = b"GET /livez HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with connect(server) as sock, contextlib.suppress(OSError):
        sock.sendall(offer * 4000)
        read_until(sock, b"no such end")
    assert time.process_time() - began < 1 and server.get("/livez") == 200


# --------------------------------------------------------------------------------------------------
# How many


def test_idle_connections_make_room():
    """
    512 connections that asked nothing shut everybody out, who has a key and who asks /livez, for 30
    s each time. The one that is idle for longest goes: never spoken, half a head, kept alive, or
    refused and still sending.
    """
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    starts = [
        b"",
        head,
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head + b"Content-Length: 99\r\n\r\n{",
    ]
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
            assert (
                httpx.get(
                    f"{server.http.base_url}/livez", headers={"Connection": "close"}
                ).status_code
                == 200
            )
            new = stack.enter_context(socket.create_connection(server.address, timeout=30))
            wait_until(lambda: len(server.service.server.server_state.connections) <= 6)
            assert [is_closed(sock) for sock in idle[:number]] == [True] * number
        assert not is_closed(new) and not is_closed(busy)
        server.engine.gate.set()
        assert b'"text":"hi"' in read_until(busy, b"}}}")
        busy.close()
