"""
A client's connection, and what one may cost: uvicorn's HTTP protocol with limits.

    uvicorn.Config(LastAnswers(gate), http=Connection)      # gate: the ASGI application, with `args`

Not run by itself: api.py puts it in front of its `Gate`. Nobody has shown a key yet, so everything
here is bounded: bytes and number of headers, time, requests that wait in a connection, connections.
Only Linux's and macOS's behaviour of TCP is assumed, nothing of the requests' meaning.
"""

import asyncio
import contextlib
import time
import uuid
from collections import deque

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.protocol import ApiError, error_body
from serving.workers import Seat

MAX_HEAD = 2**16  # bytes of a request besides its body: its first line, headers and trailers
MAX_HEADERS = 128  # each costs 20 times its bytes in memory
MAX_PIPELINED = 8  # requests of one connection that wait for the answer to the first
REFUSED_SECONDS = 1  # how long a client that still sends its body has to read why it is refused
PROBE_SECONDS = 1  # between two questions whether a client that ended its side is still there
ROOM_SECONDS = (
    0.1  # between two looks whether other HTTP processes have more connections than there may be
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PING_CHUNK = b"8\r\n: ping\n\n\r\n"

# Headers that decide who is asked, by whom, and where a request ends: with two of one kind, whoever
# stands in front of this server may have read the other.
SINGLE_HEADERS = {
    b"host",
    b"authorization",
    b"origin",
    b"content-length",
    b"content-type",
    b"transfer-encoding",
}


def check_head(headers: list[tuple[bytes, bytes]]):
    """
    Raises ApiError (400, 431) for headers that are too many or contradict each other. Names are in
    lower case.
    """
    if len(headers) > MAX_HEADERS:
        raise ApiError(431, f"the request has more than {MAX_HEADERS} headers: send fewer")
    names = [name for name, _ in headers if name in SINGLE_HEADERS]
    for name in names:
        if names.count(name) > 1:
            raise ApiError(
                400, f"the header {name.decode()} is there {names.count(name)} times: send it once"
            )


def announces_body(headers: list[tuple[bytes, bytes]]) -> bool:
    values = dict(headers)
    return b"transfer-encoding" in values or values.get(b"content-length", b"0").strip(b"0") != b""


class LastAnswers:
    """
    ASGI middleware: an answer that is given before the whole body was read, a refusal mostly, is
    the connection's last. What the client still sends is dropped, and not for long.
    """

    def __init__(self, app):
        self.app, self.args, self.not_http = app, app.args, app.not_http
        self.seat = app.service.seat

    async def __call__(self, scope, receive, send):
        if not announces_body(scope["headers"]):
            return await self.app(scope, receive, send)
        unread = True

        async def receive_part():
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def send_part(message):
            if message["type"] == "http.response.start":
                scope["is_last"] = unread
                close = [(b"connection", b"close")] if unread else []
                return await send(message | {"headers": [*message["headers"], *close]})
            if message.get("more_body") or not scope["is_last"]:
                return await send(message)
            await send(message | {"more_body": True})  # all of the answer goes out now,
            await drop_rest(receive)
            await send(
                {"type": "http.response.body"}
            )  # and with its end uvicorn closes the connection

        await self.app(scope, receive_part, send_part)


async def drop_rest(receive):
    """
    Drop what a client still sends until it ends, hangs up or REFUSED_SECONDS are over. A connection
    that is closed with bytes unread is reset, and a client that was still sending would lose the
    answer.
    """
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):  # the latter: the server stops
        async with asyncio.timeout(REFUSED_SECONDS):
            while (await receive()).get("more_body"):
                pass


def make_room(connections: set, seat: Seat, most: int):
    """
    Where all HTTP processes together have more than `most` connections, close those here that are
    idle for longest, the newest perhaps, which has sent nothing yet. Who has the most idle ones
    does it; the others let a newcomer in as long as it can, and it sees that within ROOM_SECONDS.
    """
    counts = seat.counts
    excess = sum(counts.open) - most
    idle_elsewhere = sum(counts.idle) - counts.idle[seat.number]
    if excess <= 0 or (excess <= idle_elsewhere and not counts.makes_room(seat.number)):
        return
    idle = [c for c in connections if c.is_idle and not c.transport.is_closing()]
    for connection in sorted(idle, key=lambda c: c.idle_since)[:excess]:
        connection.transport.abort()
        connection.count()


class Connection(HttpToolsProtocol):
    """
    uvicorn's connection, cut off when it takes longer than --client-seconds to send a whole request
    or to read what waits for it, or sends too much besides bodies; where there are too many, the
    one that is idle for longest goes. What it was computing ends with it.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.args, self.not_http = self.config.app.args, self.config.app.not_http
        self.seat = self.config.app.seat
        self.sending = self.reading = None  # timers: of the client's request, of our answer
        self.in_body = False
        self.is_upgrade = False  # of the request that is being parsed
        self.head_size = 0  # bytes of the request's head and trailers that the parser has told
        self.untold = 0  # and those that came since it told anything
        self.unanswered: deque = deque()  # uvicorn's cycles, the first is being answered
        self.idle_since = time.monotonic()
        self.counted_open = self.counted_idle = False  # what the other HTTP processes were told

    def connection_made(self, transport):
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever the client has not read pauses writing
        self.sending = self.cut_off_later()
        self.count()
        make_room(self.connections, self.seat, self.args.max_connections)

    def count(self):
        """
        Tell the other HTTP processes of this connection: --max-connections holds for all together.
        """
        number = self.seat.number
        is_open = self in self.connections and not self.transport.is_closing()
        is_idle = is_open and self.is_idle
        self.seat.counts.open[number] += is_open - self.counted_open
        self.seat.counts.idle[number] += is_idle - self.counted_idle
        self.counted_open, self.counted_idle = is_open, is_idle

    @property
    def is_idle(self) -> bool:
        """
        No request is in work: no head is complete, or what was asked has its answer, which says it
        is the last.
        """
        return all(cycle.scope.get("is_last") for cycle in self.unanswered)

    def cut_off_later(self):
        return self.loop.call_later(self.args.client_seconds, self.transport.abort)

    # what the client sends

    def data_received(self, data):
        self.sending = self.sending or self.cut_off_later()
        self._unset_keepalive_if_required()
        self.untold += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.head_size + self.untold > MAX_HEAD:
            self.transport.abort()

    def on_message_begin(self):
        super().on_message_begin()
        self.in_body = self.is_upgrade = False
        self.head_size = self.untold = 0

    def on_url(self, url):
        super().on_url(url)
        self.head_size += len(url)
        self.untold = 0

    def on_header(self, name, value):
        self.head_size += len(name) + len(value) + len(": \r\n")
        self.untold = 0
        if (
            not self.in_body and len(self.headers) <= MAX_HEADERS
        ):  # trailers are counted and forgotten
            super().on_header(name, value)

    def on_headers_complete(self):
        self.in_body = True
        self.is_upgrade = self.parser.should_upgrade()
        if self.is_upgrade or self.transport.is_closing():
            return
        super().on_headers_complete()
        self.unanswered.append(self.cycle)
        self.count()
        if len(self.unanswered) > 1 + MAX_PIPELINED:
            self.transport.abort()
        # uvicorn stops reading while requests wait, and then would not notice that the client hangs
        # up
        self.flow.resume_reading()

    def on_body(self, body):
        self.untold = 0
        super().on_body(body)
        if len(self.unanswered) > 1:
            self.flow.resume_reading()
            if len(self.cycle.body) > self.args.max_body_mib * 2**20:
                self.transport.abort()

    def on_message_complete(self):
        if self.is_upgrade or self.transport.is_closing():
            return
        super().on_message_complete()
        self.sending = self.sending and self.sending.cancel()

    def ignore_upgrade(self, rest: bytes):
        """
        A client that offers to go on in HTTP/2 (h2c) or as a WebSocket is answered in HTTP/1.1, as
        if it had not. The parser takes such a request for ended with its head: another one gets it
        again, without the offer.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            return self.send_400_response("This is no proxy: CONNECT is not served.")
        if self.transport.is_closing():
            return
        head = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, self.url, b"".join(head), rest))

    def eof_received(self):
        """The client has ended its side: what it has asked is answered, if it is still there."""
        if not self.unanswered or self.cycle.more_body or self.cycle.scope["http_version"] != "1.1":
            return False  # closes the connection
        self.cycle.keep_alive = False
        self.probe(PROBE_SECONDS / 100)
        return True

    def probe(self, seconds: float):
        """
        A client that hangs up sends what one sends that only has nothing more to ask. Its machine
        answers the first bytes after that with a reset, and the next then end the connection: so
        send some that mean nothing, twice at once, as most hang up, and then now and then.
        """
        if not self.unanswered or self.transport.is_closing():
            return
        cycle = self.unanswered[0]
        if not cycle.response_started:
            self.transport.write(CONTINUE)
        elif (
            cycle.chunked_encoding
        ):  # a stream of events: uvicorn writes whole chunks, so this is between two
            self.transport.write(PING_CHUNK)
        self.loop.call_later(seconds, self.probe, PROBE_SECONDS)

    # what it is sent

    def on_response_complete(self):
        self.unanswered.popleft()
        self.idle_since = time.monotonic()
        self.count()
        super().on_response_complete()

    def pause_writing(self):
        super().pause_writing()
        self.reading = self.reading or self.cut_off_later()

    def resume_writing(self):
        super().resume_writing()
        self.reading = self.reading and self.reading.cancel()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.count()
        for cycle in self.unanswered:  # uvicorn tells the last only
            cycle.disconnected = True
            cycle.message_event.set()
        for timer in (self.sending, self.reading):
            if timer:
                timer.cancel()

    def send_400_response(self, msg):
        """What is no HTTP gets an error of the same shape as all others."""
        self.not_http(self.client, msg)
        body = error_body(ApiError(400, msg))
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head += f"x-request-id: {uuid.uuid4().hex}\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
