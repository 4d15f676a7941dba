"""
What clients may do to a connection, byte by byte, before anybody knows who they are. Over wires
that the tests hold, each limit is met exactly and time is the tests' own; over real sockets, with
the fake engine of fake_server.py, where it matters how TCP behaves.
"""

import contextlib
import socket
import time

import pytest
from fake_server import HEAD, FakeEngine, Server, read_until, wait_until
from wires import House, request

from server import connection
from server.protocol import ApiError
from server.workers import WorkerSlot

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")

ASK = request("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 4})
STREAM = request("POST", "/v1/completions", {"prompt": "ab", "max_tokens": 99, "stream": True})
GET = request("GET", "/livez")
START = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKED_ASK = HEAD + CHUNKED
OPEN = (None, None)  # of a connection: not closed
KEY = b"Authorization: Bearer sesame\r\n"


@pytest.fixture
def house():
    with House() as house:
        yield house


@pytest.fixture
def locked():
    """A server with a key, and 1000 bytes for a body."""
    with House("--max-body-mib", str(1000 / 2**20), keys=["sesame"]) as house:
        yield house


def statuses(caller) -> list[int]:
    return [answer.status for answer in caller.answers()]


# --------------------------------------------------------------------------------------------------
# How long


def head_of(size: int) -> bytes:
    """A whole request whose first line and headers have so many bytes as the server counts them."""
    line = b"a: \r\n"
    counted = len("/livez") + len("Host: localhost\r\n") + len(line)
    return START + line[:3] + b"x" * (size - counted) + b"\r\n\r\n"


@pytest.mark.parametrize("cuts", [[], [40_000, 60_000]])
def test_a_head_may_be_64_kib_long(house, cuts):
    """The parser reports a header only when its line has ended."""
    for size, closed in ((2**16, OPEN), (2**16 + 1, ("abort", 0))):
        caller = house.connect()
        head = head_of(size)
        for start, end in zip([0, *cuts], [*cuts, None], strict=True):
            caller.send(head[start:end])
        assert caller.closed == closed
        assert statuses(caller) == [200] * (closed == OPEN)


def test_each_request_of_a_connection_has_a_head_of_its_own(house):
    caller = house.connect()
    for _ in range(3):
        caller.send(head_of(2**16))
    assert statuses(caller) == [200] * 3 and caller.closed == OPEN


ENDLESS = {
    "a header": (START, b"a: " + b"x" * 60_000 + b"\r\n"),
    "headers": (START, b"a:b\r\n" * 12_000),
    "a trailer": (CHUNKED_ASK + b"1\r\nx\r\n0\r\n", b"a: " + b"x" * 60_000 + b"\r\n"),
    "trailers": (CHUNKED_ASK + b"1\r\nx\r\n0\r\n", b"a:b\r\n" * 12_000),
    "a chunk's extension": (CHUNKED_ASK + b"1;", b"x" * 60_000),
    "a path": (b"GET /", b"x" * 60_000),
    "a line": (START + b"a: ", b"x" * 60_000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_is_no_body_and_has_no_end_is_cut_off_at_once(house, name):
    """Not after the 30 s that a client may take; and not before 50,000 bytes."""
    start, line = ENDLESS[name]
    caller = house.connect()
    caller.send(start)
    caller.send(line[:50_000])
    assert caller.closed == OPEN
    for _ in range(2):
        caller.send(line)
    assert caller.closed == ("abort", 0)


def test_a_long_body_is_no_head(house):
    caller = house.connect()
    body = b'{"prompt": "x", "max_tokens": 1}' + b" " * 100_000
    caller.send(request("POST", "/v1/completions", body))
    assert house.choices and caller.closed == OPEN


@pytest.mark.parametrize("number, status", [(127, 200), (128, 431), (5000, 431)])
def test_128_headers_are_taken(house, number, status):
    caller = house.connect()
    caller.send(START + b"a:b\r\n" * number + b"\r\n")
    assert statuses(caller) == [status]
    assert len(caller.wire.protocol.headers) <= connection.MAX_HEADERS + 1


@pytest.mark.parametrize("name", sorted(connection.SINGLE_HEADERS))
def test_a_header_that_decides_is_sent_once(name):
    connection.check_head([(name, b"a"), (b"cookie", b"a"), (b"cookie", b"b")])
    with pytest.raises(ApiError, match="3 times: send it once") as caught:
        connection.check_head([(name, b"a"), (b"x", b"y"), (name, b"b"), (name, b"c")])
    assert caught.value.status == 400


def test_the_headers_that_decide_are_these(house):
    names = "host authorization origin content-length content-type transfer-encoding"
    assert {name.decode() for name in connection.SINGLE_HEADERS} == set(names.split())
    caller = house.connect()
    caller.send(START + b"Host: other\r\n\r\n")
    assert statuses(caller) == [400]


def test_trailers_are_never_headers(locked):
    """The last Authorization counted: trailers in the packet of the head were read before it."""
    body = b"5\r\nhello\r\n0\r\n" + KEY + b"Host: evil.example\r\n\r\n"
    for head, status in ((CHUNKED_ASK, 401), (CHUNKED_ASK[:-2] + KEY + b"\r\n", 400)):
        caller = locked.connect()
        caller.send(head + body)
        assert statuses(caller) == [status]
        caller.hang_up()


def test_eight_requests_may_wait_behind_one(house):
    for number, closed in ((8, OPEN), (9, ("abort", 0))):
        caller = house.connect()
        caller.send(ASK + GET * number)
        assert caller.closed == closed and bool(house.choices) == (closed == OPEN)
        if house.choices:
            house.engine.step({"0": b"x"}, "length")
            assert statuses(caller) == [200] * (1 + number)
            assert "choices" in caller.answers()[0].json and caller.answers()[1].json


def test_a_body_that_waits_may_not_grow_for_ever():
    """Behind a request in work nobody reads it, so nobody else counts it."""
    with House("--max-body-mib", "0.5") as house:
        caller = house.connect()
        caller.send(ASK + HEAD + b"Content-Length: 9999999\r\n\r\n")
        caller.send(b" " * 2**18)
        caller.send(b" " * 2**18)
        assert caller.wire.closed is None and caller.wire.is_reading and house.choices
        caller.send(b" ")
        assert caller.closed == ("abort", 0) and not house.choices


# --------------------------------------------------------------------------------------------------
# How slow


BEGINNINGS = {
    "nothing": b"",
    "half a line": b"GET /li",
    "half a head": START,
    "half a body": ASK[:-5],
    "half a chunked body": CHUNKED_ASK + b"5\r\nhel",
}


@pytest.mark.parametrize("drip", [b"", b"x"])
@pytest.mark.parametrize("start", BEGINNINGS)
def test_a_client_has_30_s_for_a_whole_request(house, start, drip):
    """Also if a byte comes now and then, and for each request of a connection anew."""
    caller = house.connect()
    if start != "nothing":
        caller.send(GET)
        house.clock.run(3)
        caller.began += 3
        caller.send(BEGINNINGS[start])
    for _ in range(299):
        house.clock.run(0.1)
        if "line" in start or "head" in start:
            caller.send(drip)
    assert caller.wire.closed is None
    house.clock.run(0.2)
    assert caller.closed == ("abort", 30)


def test_an_answer_may_take_its_time_and_an_idle_connection_ends_after_5_s(house):
    """uvicorn's own limit, which a next request must lift."""
    caller = house.connect()
    caller.send(GET)
    house.clock.run(4.9)
    caller.send(ASK)
    house.clock.run(100)
    house.engine.step({"0": b"x"}, "length")
    assert statuses(caller) == [200, 200] and caller.closed == OPEN
    house.clock.run(5.1)
    assert caller.closed == ("close", 4.9 + 100 + 5)


def test_a_client_has_30_s_to_read_what_waits_for_it(house):
    """Reading on in time starts the time anew; what it was computing ends with it."""
    caller = house.connect()
    caller.send(STREAM)
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


# --------------------------------------------------------------------------------------------------
# Answers before the body has come


TOO_LONG = HEAD + KEY + b"Content-Length: 1001\r\n"
EARLY = [
    (CHUNKED_ASK, 401),
    (HEAD + b"Content-Length: 900\r\n\r\n", 401),
    (b"POST /no HTTP/1.1\r\nHost: x\r\n" + KEY + b"Content-Length: 9\r\n\r\n", 404),
    (b"POST /metrics HTTP/1.1\r\nHost: x\r\n" + KEY + b"Content-Length: 9\r\n\r\n", 405),
    (TOO_LONG + b"\r\n", 413),
    (TOO_LONG + b"Expect: 100-continue\r\n\r\n", 413),
    (START + b"Content-Length: 9\r\n\r\n", 200),
]


@pytest.mark.parametrize("head, status", EARLY)
def test_what_the_head_decides_is_answered_at_once_and_last(locked, head, status):
    """The client may still be sending: closing with bytes unread would lose the answer."""
    caller = locked.connect()
    caller.send(head)
    only = caller.answer()
    assert (only.status, only.headers["connection"]) == (status, "close")
    assert caller.closed == OPEN
    caller.hang_up()
    assert not locked.state.tasks


@pytest.mark.parametrize("how", ["goes on", "ends", "stops", "stops when the server does"])
def test_what_a_refused_client_still_sends_is_dropped(locked, how):
    """Up to twice the limit of a body, and for the 30 s that any request may take."""
    caller = locked.connect()
    size = 9000 if how == "goes on" else 1800
    caller.send(HEAD + b"Content-Length: %d\r\n\r\n" % size)
    if how == "goes on":
        caller.send(b" " * 2000)
        assert caller.closed == OPEN
        caller.send(b" ")
        assert caller.closed == ("close", 0)
    elif how == "ends":
        caller.send(b" " * 1799)
        assert caller.closed == OPEN
        caller.send(b" ")
        assert caller.closed == ("close", 0)
    elif how == "stops":
        locked.clock.run(29.9)
        assert caller.closed == OPEN
        locked.clock.run(0.2)
        assert caller.closed == ("abort", 30)
    else:
        (task,) = locked.state.tasks
        caller.do(task.cancel)
        assert caller.closed == ("close", 0) and not task.exception()
    assert caller.answer().status == 401 and not locked.state.tasks  # and nothing after it


@pytest.mark.parametrize("length", [None, "0", "00"])
def test_an_answer_after_the_whole_body_keeps_the_connection(locked, length):
    """Content-Length: 0 announces no body."""
    keyed = {"Authorization": "Bearer sesame"}
    calls = [
        request("POST", "/v1/completions", {"prompt": 3}, **keyed),
        request("GET", "/v1/models", Content_Length=length),
        request("GET", "/livez", Content_Length=length),
    ]
    caller = locked.connect()
    for call in calls:
        caller.send(call)
    assert statuses(caller) == [400, 401, 200] and caller.closed == OPEN
    assert not any("connection" in answer.headers for answer in caller.answers())
    caller.hang_up()


def test_a_client_that_sends_5_mb_reads_its_413():
    with Server() as server:
        for head in (b"Content-Length: 5000000\r\n\r\n", CHUNKED + b"4c4b40\r\n"):
            with socket.create_connection(server.address, timeout=30) as sock:
                sock.sendall(HEAD + head)
                sock.sendall(b" " * 5_000_000)
                assert read_until(sock, b"}}").startswith(b"HTTP/1.1 413 ")


# --------------------------------------------------------------------------------------------------
# Clients that hang up


@pytest.mark.parametrize("how", ["end_side", "hang_up"])
@pytest.mark.parametrize(
    "sent",
    [*BEGINNINGS.values(), ASK, STREAM, ASK + GET, ASK + GET + ASK, ASK + CHUNKED_ASK],
)
def test_all_requests_of_a_connection_end_with_it(house, sent, how):
    """uvicorn tells the last one only. A client that closes its own side alone has hung up too."""
    caller = house.connect()
    caller.send(sent)
    was_asked = list(house.choices)
    getattr(caller, how)()
    assert caller.closed == ("abort", 0)
    assert not house.choices and not house.state.tasks and not house.state.connections
    assert [message["id"] for message in house.engine.of("abort")] == was_asked
    assert house.clock.due() == float("inf")  # no timer is left that could do anything


@pytest.mark.parametrize("behind", [b"", GET, HEAD + b"Content-Length: 99999\r\n\r\n" + b" " * 9])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_hang_up_with_requests_waiting_is_noticed(behind, how):
    """uvicorn stops reading then: 22,000 tokens for a client that was gone."""
    with Server(engine=FakeEngine(max_model_len=10**9)) as server:
        sock = server.connect(prompt="loop", max_tokens=20_000)
        sock.sendall(behind)
        wait_until(lambda: server.engine.added)
        time.sleep(0.05)
        assert not server.engine.aborted
        if how == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
        wait_until(lambda: server.engine.aborted == ["0"])


# --------------------------------------------------------------------------------------------------
# Offers of other protocols


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("size", [10_000, 5])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
def test_offers_of_another_protocol_are_ignored(house, size, offer):
    """`curl --http2` and the JDK's client offer HTTP/2 in each request."""
    caller = house.connect()
    for number in range(2):
        for call in (ASK, GET):
            line, rest = call.split(b"\r\n", 1)
            call = line + b"\r\n" + OFFER % offer + rest
            for start in range(0, len(call), size):
                caller.send(call[start : start + size])
            if b"POST" in line:
                house.engine.step({str(number): b"x"}, "length")
    assert statuses(caller) == [200] * 4


def test_nothing_is_tunnelled(house):
    caller = house.connect()
    caller.send(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert statuses(caller) == [400] and caller.wire.closed == "close"


def test_a_packet_full_of_offers_is_no_work(house):
    """Each is parsed again, with all that follows it: that must not cost the packet's square."""
    began = time.process_time()
    offers = (START + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n") * 4000
    house.connect().send(offers)
    assert time.process_time() - began < 1


# --------------------------------------------------------------------------------------------------
# How many


@pytest.mark.parametrize("most, slot", [(3, WorkerSlot()), (7, WorkerSlot(1, 2))])
def test_a_process_serves_its_share_of_the_connections(most, slot):
    """One more is refused in a way that clients try again; when one leaves there is room."""
    with House("--max-connections", str(most), slot=slot) as house:
        idle, *busy = [house.connect() for _ in range(3)]
        for caller in busy:
            caller.send(ASK)
        assert len(house.choices) == 2
        one_more = house.connect()
        answer = one_more.answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json["error"]["code"] == "too_many_connections"
        assert one_more.closed == ("close", 0) and idle.closed == OPEN
        idle.hang_up()
        assert house.get("/livez").status == 200
        house.engine.step({"0": b"x", "1": b"y"}, "length")
        assert [caller.answer().json["choices"][0]["text"] for caller in busy] == ["x", "y"]


def test_each_process_serves_some():
    with House("--max-connections", "1", slot=WorkerSlot(1, 8)) as house:
        assert house.get("/livez").status == 200


# --------------------------------------------------------------------------------------------------
# Attacks that stopped the server


@pytest.mark.parametrize("start", [HEAD, CHUNKED_ASK + b"1\r\nx\r\n0\r\na: "])
def test_the_server_is_alive_while_headers_and_trailers_have_no_end(start):
    """51 MiB of trailers took 1.3 GiB and 8 s, in which nobody else was served."""
    with Server() as server, socket.create_connection(server.address, timeout=30) as sock:
        sock.sendall(start)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 2**26:
                sent += sock.send(b"a:b\r\n" * 1000)
        assert sent < 2**25  # of which the socket's buffers take most
        began = time.monotonic()
        assert server.get("/livez") == 200 and time.monotonic() - began < 1
