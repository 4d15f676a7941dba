"""
The limits of a connection, byte by byte, before a client has shown a key. The tests control the
wires and the time, so each limit is met exactly.
"""

import time

import pytest
from wires import ASK, House, request

from server import connection
from server.protocol import ApiError

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
STREAM = request("/v1/completions", {"prompt": "ab", "max_tokens": 99, "stream": True})
GET = request("/livez")
START = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED_ASK = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
OPEN = (None, None)  # of a connection: not closed
KEY = b"Authorization: Bearer sesame\r\n"


@pytest.fixture
def locked():
    """Return a server with a key, and a limit of 1000 bytes for a body."""
    with House("--max-body-mib", str(1000 / 2**20), keys=["sesame"]) as house:
        yield house


def statuses(caller) -> list[int]:
    return [answer.status for answer in caller.answers]


# --------------------------------------------------------------------------------------------------
# How long


def head_of(size: int) -> bytes:
    """
    Return a request whose first line and headers have this many bytes as the server counts them.
    """
    counted = len("/livez" + "Host: localhost\r\n" + "a: \r\n")
    return START + b"a: " + b"x" * (size - counted) + b"\r\n\r\n"


@pytest.mark.parametrize("cuts", [[], [40_000, 60_000]])
def test_each_head_may_be_64_kib_long(house, cuts):
    """The parser reports a header only after its line has ended."""
    caller = house.connect()
    for size in (2**16, 2**16, 2**16 + 1):
        assert caller.closed == OPEN
        head = head_of(size)
        for start, end in zip([0, *cuts], [*cuts, None], strict=True):
            caller.send(head[start:end])
    assert statuses(caller) == [200, 200]
    assert caller.closed == ("abort", 0)


ENDLESS = {
    "headers": (START, b"a:b\r\n" * 12_000),
    "trailers": (CHUNKED_ASK + b"1\r\nx\r\n0\r\n", b"a:b\r\n" * 12_000),
    "a chunk's extension": (CHUNKED_ASK + b"1;", b"x" * 60_000),
    "a path": (b"GET /", b"x" * 60_000),
    "a line": (START + b"a: ", b"x" * 60_000),
}


@pytest.mark.parametrize("start, line", ENDLESS.values(), ids=ENDLESS)
def test_what_is_no_body_and_has_no_end_is_cut_off_at_once(house, start, line):
    """
    It is cut off before the 30 s that a client may take, but not before 50,000 bytes. Previously 51
    MiB of trailers took 1.3 GiB and 8 s, during which the server served no one else.
    """
    caller = house.connect()
    caller.send(start)
    caller.send(line[:50_000])
    assert caller.closed == OPEN
    for _ in range(2):
        caller.send(line)
    assert caller.closed == ("abort", 0)


@pytest.mark.parametrize("number, status", [(127, 200), (128, 431), (5000, 431)])
def test_128_headers_are_taken(house, number, status):
    caller = house.connect()
    caller.send(START + b"a:b\r\n" * number + b"\r\n")
    assert statuses(caller) == [status]
    assert len(caller.wire.protocol.headers) <= connection.MAX_HEADERS + 1


DECIDE = b"host authorization origin content-length content-type transfer-encoding"


@pytest.mark.parametrize("name", DECIDE.split())
def test_a_header_that_decides_is_sent_once(house, name):
    connection.check_head([(name, b"a"), (b"cookie", b"a"), (b"cookie", b"b")])
    with pytest.raises(ApiError, match="3 times: send it once"):
        connection.check_head([(name, b"a"), (b"x", b"y"), (name, b"b"), (name, b"c")])
    caller = house.connect()
    caller.send(START + b"Host: other\r\n\r\n")
    assert statuses(caller) == [400]


@pytest.mark.parametrize(
    "head, status", [(CHUNKED_ASK, 401), (CHUNKED_ASK[:-2] + KEY + b"\r\n", 400)]
)
def test_trailers_are_never_headers(locked, head, status):
    """
    Previously the last Authorization counted, and trailers in the same packet as the head were read
    before it.
    """
    caller = locked.connect()
    caller.send(head + b"5\r\nhello\r\n0\r\n" + KEY + b"Host: evil.example\r\n\r\n")
    assert statuses(caller) == [status]


@pytest.mark.parametrize("number, closed", [(8, OPEN), (9, ("abort", 0))])
def test_eight_requests_may_wait_behind_one(house, number, closed):
    caller = house.connect()
    caller.send(ASK + GET * number)
    assert caller.closed == closed
    assert bool(house.choices) == (closed == OPEN)
    house.engine.step({"0": b"x"}, "length")
    caller.send(GET)  # answered requests no longer count
    assert statuses(caller) == [200] * (2 + number) * (closed == OPEN)


def test_a_body_that_waits_may_not_grow_for_ever():
    """After a request in work it is not read, so only the connection counts its bytes."""
    with House("--max-body-mib", "0.5") as house:
        caller = house.connect()
        caller.send(ASK + HEAD + b"Content-Length: 9999999\r\n\r\n")
        caller.send(b" " * 2**18)
        caller.send(b" " * 2**18)
        assert caller.wire.closed is None
        assert caller.wire.is_reading
        assert house.choices
        caller.send(b" ")
        assert caller.closed == ("abort", 0)
        assert not house.choices


# --------------------------------------------------------------------------------------------------
# How slow


BEGINNINGS = [b"", b"GET /li", START, ASK[:-5], CHUNKED_ASK + b"5\r\nhel"]


@pytest.mark.parametrize("drip", [b"", b"x"])
@pytest.mark.parametrize("start", BEGINNINGS)
def test_a_client_has_30_s_for_a_whole_request(house, start, drip):
    """
    This holds even if a byte comes now and then, and separately for each request of a connection.
    """
    caller = house.connect()
    if start:
        caller.send(GET)
        house.clock.run(3)
        caller.began += 3
        caller.send(start)
    for _ in range(299):
        house.clock.run(0.1)
        if start.startswith(b"GET"):
            caller.send(drip)
    assert caller.wire.closed is None
    house.clock.run(0.2)
    assert caller.closed == ("abort", 30)


def test_an_answer_may_take_its_time_and_an_idle_connection_ends():
    """
    The next request lifts the limit. The default is longer than that of proxies, which otherwise
    send a request just when the server closes. uvicorn's own 5 s made them answer 502 at random.
    """
    limit = 9
    with House("--keep-alive-seconds", str(limit)) as house:
        caller = house.connect()
        caller.send(GET)
        house.clock.run(limit - 0.1)
        caller.send(ASK)
        house.clock.run(100)
        house.engine.step(b"x", "length")
        assert statuses(caller) == [200, 200]
        house.clock.run(limit - 0.1)
        assert caller.closed == OPEN
        house.clock.run(0.2)
        assert caller.closed == ("close", limit - 0.1 + 100 + limit)


def test_an_empty_line_after_a_request_is_no_request(house):
    """
    Old clients send one after a body. If it came in a packet of its own, the connection used to be
    cut off 30 s later, in the middle of an answer, or when it was idle.
    """
    caller = house.connect()
    caller.send(STREAM)
    caller.send(b"\r\n")
    house.clock.run(31)
    house.engine.step(b"x", "length")
    assert caller.answer.status == 200
    house.clock.run(1)
    caller.send(b"\r\n")
    house.clock.run(74)
    assert caller.closed == ("close", 31 + 75)


def test_a_client_has_30_s_to_read_what_waits_for_it(house):
    """
    This includes the last byte. Reading on in time restarts the clock. When the time is over, the
    client's requests also end.
    """
    caller = house.connect()
    caller.send(STREAM)
    for _ in range(2):
        caller.stop_reading()
        house.engine.step(b"x")
        house.clock.run(29)
        assert caller.closed == OPEN
        caller.read_on()
        house.clock.run(9)
    caller.stop_reading()
    house.engine.step(b"x")
    house.clock.run(20)
    caller.send(GET)  # does not restart the clock
    house.clock.run(9)
    assert caller.closed == OPEN
    assert house.choices
    house.clock.run(2)
    assert caller.closed == ("abort", 2 * 38 + 30)
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
    """The client may still be sending, so closing with bytes unread would lose the answer."""
    caller = locked.connect()
    caller.send(head)
    only = caller.answer
    assert (only.status, only.headers["connection"]) == (status, "close")
    assert caller.closed == OPEN
    caller.hang_up()
    assert not locked.state.tasks


@pytest.mark.parametrize(
    "size, sent, closed",
    [(1800, 1800, ("close", 0)), (9000, 2001, ("close", 0)), (1800, 0, ("abort", 30))],
)
def test_what_a_refused_client_still_sends_is_dropped(locked, size, sent, closed):
    """
    It is dropped to its end, up to twice the limit of a body, for the 30 s that any request may
    take.
    """
    caller = locked.connect()
    caller.send(HEAD + b"Content-Length: %d\r\n\r\n" % size + b" " * (sent - 1))
    assert caller.closed == OPEN
    if sent:
        caller.send(b" ")
    else:
        locked.clock.run(29.9)
        assert caller.closed == OPEN
        locked.clock.run(0.2)
    assert caller.closed == closed
    assert caller.status == 401
    assert not locked.state.tasks


def test_a_server_that_stops_does_not_wait_for_a_refused_client(locked):
    caller = locked.connect()
    caller.send(HEAD + b"Content-Length: 1800\r\n\r\n")
    (task,) = locked.state.tasks
    locked.clock.do(task.cancel)
    assert caller.closed == ("close", 0)
    assert not task.exception()


@pytest.mark.parametrize("length", [None, "0", "00"])
def test_an_answer_after_the_whole_body_keeps_the_connection(locked, length):
    """Content-Length: 0 announces no body."""
    caller = locked.connect()
    caller.send(request("/v1/completions", {"prompt": 3}, Authorization="Bearer sesame"))
    caller.send(request("/v1/models", Content_Length=length))
    caller.send(request("/livez", Content_Length=length))
    assert statuses(caller) == [400, 401, 200]
    assert caller.closed == OPEN
    assert not any("connection" in answer.headers for answer in caller.answers)


# --------------------------------------------------------------------------------------------------
# Clients that hang up


@pytest.mark.parametrize("how", ["hang_up", "reset"])
@pytest.mark.parametrize(
    "sent",
    [*BEGINNINGS, ASK, STREAM, ASK + GET, ASK + GET + ASK, ASK + CHUNKED_ASK],
)
def test_all_requests_of_a_connection_end_with_it(house, sent, how):
    """
    uvicorn only notifies the last one, and stops reading while requests wait, so a client that was
    gone got 22,000 tokens. A client that only closes its own side looks the same, and counts as
    gone.
    """
    caller = house.connect()
    caller.send(sent[: len(ASK)])
    caller.send(sent[len(ASK) :])
    assert caller.wire.is_reading
    was_asked = list(house.choices)
    getattr(caller, how)()
    assert not house.choices
    assert not house.state.tasks
    assert not house.state.connections
    assert [message["id"] for message in house.engine.of("abort")] == was_asked
    assert house.clock.due() == float("inf")  # no timer is left that could do anything


def test_when_the_server_ends_the_answer_under_way_says_that_it_is_the_last(house):
    """
    Previously, of several requests, only the last was marked. The others got neither an answer nor
    a reason.
    """
    caller = house.connect()
    caller.send(ASK + GET + GET)
    (served,) = house.state.connections
    served.shutdown()
    house.engine.step(b"x", "length")
    assert caller.answer.headers["connection"] == "close"
    assert caller.closed == ("close", 0)


# --------------------------------------------------------------------------------------------------
# Offers of other protocols


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("size", [10_000, 5])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
def test_offers_of_another_protocol_are_ignored(house, size, offer):
    """`curl --http2` and the JDK's client offer HTTP/2 in each request."""
    caller = house.connect()
    for _ in range(2):
        offers = [call.replace(b"\r\n", b"\r\n" + OFFER % offer, 1) for call in (ASK, GET)]
        sent = b"".join(offers)
        for start in range(0, len(sent), size):
            caller.send(sent[start : start + size])
        house.engine.step(b"x", "length")
    assert statuses(caller) == [200] * 4


def test_nothing_is_tunnelled(house):
    caller = house.connect()
    caller.send(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert statuses(caller) == [400]
    assert caller.wire.closed == "close"


def test_a_packet_full_of_offers_is_no_work(house):
    """
    Each offer makes the parser restart on everything after it. This must not cost the square of the
    packet's size.
    """
    began = time.process_time()
    offers = (START + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n") * 4000
    house.connect().send(offers)
    assert time.process_time() - began < 1


# --------------------------------------------------------------------------------------------------
# How many


def test_a_connection_too_many_is_refused():
    """The refusal makes clients retry. When a connection closes there is room again."""
    with House("--max-connections", "2") as house:
        idle, busy = house.connect(), house.connect()
        busy.send(ASK)
        assert len(house.choices) == 1
        one_more = house.connect()
        assert one_more.refusal[:2] == (503, "too_many_connections")
        assert one_more.closed == ("close", 0)
        assert idle.closed == OPEN
        idle.hang_up()
        assert house.get("/livez").status == 200
        house.engine.step(b"x", "length")
        assert busy.choice["text"] == "x"
