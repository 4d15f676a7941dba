"""
A client's connection, and what it may cost: uvicorn's HTTP protocol with limits.

    uvicorn.Config(Gate(service), http=Connection)      # the ASGI application of gate.py

Not run by itself: `Service.run` (api.py) puts it in front of the Gate. Here no client has shown an
API key yet, so everything is bounded (against Slowloris and its kin): the bytes and number of
headers, the time of a request, the requests that wait in a connection, the number of connections.
It assumes how TCP behaves on Linux and macOS, and nothing about what requests mean.
"""

import asyncio
import contextlib
import re
import time
import uuid
from collections import deque
from collections.abc import Callable

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.protocol import ApiError, error_body
from serving.workers import Seat

MAX_HEAD = 2**16  # bytes of a request without its body: its first line, headers and trailers
MAX_HEADERS = 128  # each costs 20 times its bytes in memory
MAX_PIPELINED = 8  # requests of one connection that wait for the answer to the first
REFUSED_SECONDS = 1  # time to read a refusal, for a client that is still sending its body
PROBE_SECONDS = 1  # between two probes of a client that has closed its sending side
ROOM_SECONDS = 0.1  # between two looks at the number of connections of all HTTP processes
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
REQUEST_ID = b"x-request-id"  # names a call, for its client and in the log
PING_CHUNK = b"8\r\n: ping\n\n\r\n"

# Against request smuggling: headers that decide which server is asked, by whom, and where a request
# ends. Of two headers of one kind a proxy in front of this server may have obeyed the other.
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
    Raises ApiError (400, 431) for headers that are too many or that contradict each other. Names
    are in lower case.
    """
    if len(headers) > MAX_HEADERS:
        raise ApiError(431, f"the request has more than {MAX_HEADERS} headers: send fewer")
    names = [name for name, _ in headers]
    for name in SINGLE_HEADERS:
        count = names.count(name)
        if count > 1:
            message = f"the header {name.decode()} is there {count} times: send it once"
            raise ApiError(400, message)


def request_id(given: bytes) -> str:
    """The client's own X-Request-Id if it is printable ASCII and not long, else a new one."""
    return given.decode() if re.fullmatch(b"[!-~]{1,128}", given) else uuid.uuid4().hex


def closing_early(scope, receive, send) -> tuple[Callable, Callable]:
    """
    ASGI's `receive` and `send` for a call. Where the answer begins before the whole body was read,
    it is the last of its connection (mostly it is a refusal), and what the client still sends is
    dropped, for REFUSED_SECONDS at most. scope["is_last"] says so, once the answer has begun.
    """
    headers = dict(scope["headers"])
    has_length = headers.get(b"content-length", b"0").strip(b"0") != b""
    unread = has_length or b"transfer-encoding" in headers

    async def receive_part():
        nonlocal unread
        message = await receive()
        unread = message.get("more_body", False)
        return message

    async def send_part(message):
        if message["type"] == "http.response.start":
            scope["is_last"] = unread
            if unread:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif scope["is_last"] and not message.get("more_body"):
            # the whole answer goes out now; its end, with which uvicorn closes the connection, only
            # when the client has had time to read it
            await send(message | {"more_body": True})
            await drop_rest(receive)
            message = {"type": "http.response.body"}
        await send(message)

    return receive_part, send_part


async def drop_rest(receive):
    """
    Drop what a client still sends until it ends, hangs up or REFUSED_SECONDS are over. Closing a
    connection with bytes unread resets it, and a client that is still sending loses the answer.
    """
    # CancelledError: the server stops
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(REFUSED_SECONDS):
            while (await receive()).get("more_body"):
                pass


def make_room(connections: set, seat: Seat, most: int):
    """
    Where all HTTP processes together have more than `most` connections, close those of this process
    that have been idle for longest; where none but the newest is idle, that one. The process with
    the most idle connections does this. A newcomer elsewhere is let in as long as that process can
    make room for it, which it does within ROOM_SECONDS.
    """
    counts = seat.counts
    excess = sum(counts.open) - most
    idle_elsewhere = sum(counts.idle) - counts.idle[seat.number]
    most_idle = max(range(len(counts.idle)), key=counts.idle.__getitem__)
    if excess <= 0 or (excess <= idle_elsewhere and seat.number != most_idle):
        return
    idle = [c for c in connections if c.is_idle and not c.transport.is_closing()]
    for connection in sorted(idle, key=lambda c: c.idle_since)[:excess]:
        connection.transport.abort()
        connection.count()


class Connection(HttpToolsProtocol):
    """
    uvicorn's connection, closed when the client takes longer than --client-seconds to send a whole
    request or to read what waits for it, or sends too much besides bodies. Where there are too many
    connections, the one that has been idle for longest is closed. What was being computed for a
    connection ends with it.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        gate = self.config.app
        self.args = gate.args
        self.note_end = gate.note_end
        self.seat = gate.service.seat
        self.sending = self.reading = None  # timers: the client sends a request, reads an answer
        self.in_body = False  # the head of the request that is being parsed is complete
        self.head_size = 0  # bytes of the request's head and trailers that the parser has reported
        self.unparsed = 0  # bytes received since its last report
        self.unanswered: deque = deque()  # uvicorn's cycles; the first is being answered
        self.idle_since = time.monotonic()
        self.counted_open = self.counted_idle = False  # as the other HTTP processes see it

    def connection_made(self, transport):
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause writing while the client does not read
        self.sending = self.close_later()
        self.count()
        make_room(self.connections, self.seat, self.args.max_connections)

    def count(self):
        """
        Count this connection for the other HTTP processes: --max-connections is the limit of all.
        """
        number = self.seat.number
        is_open = self in self.connections and not self.transport.is_closing()
        is_idle = is_open and self.is_idle
        self.seat.counts.open[number] += is_open - self.counted_open
        self.seat.counts.idle[number] += is_idle - self.counted_idle
        self.counted_open = is_open
        self.counted_idle = is_idle

    @property
    def is_idle(self) -> bool:
        """
        Whether no request is being answered. One whose answer is sent, and whose body is still
        being dropped (`closing_early`), does not count.
        """
        return all(cycle.scope.get("is_last") for cycle in self.unanswered)

    def close_later(self):
        return self.loop.call_later(self.args.client_seconds, self.transport.abort)

    # what the client sends

    def data_received(self, data):
        self.sending = self.sending or self.close_later()
        self._unset_keepalive_if_required()
        self.unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.head_size + self.unparsed > MAX_HEAD:
            self.transport.abort()

    def on_message_begin(self):
        super().on_message_begin()
        self.in_body = False
        self.head_size = self.unparsed = 0

    def on_url(self, url):
        super().on_url(url)
        self.head_size += len(url)
        self.unparsed = 0

    def on_header(self, name, value):
        self.head_size += len(name) + len(value) + len(": \r\n")
        self.unparsed = 0
        # trailers, the headers after a chunked body, are counted and forgotten
        if not self.in_body and len(self.headers) <= MAX_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self):
        self.in_body = True
        if self.parser.should_upgrade() or self.transport.is_closing():
            return
        super().on_headers_complete()
        name = request_id(dict(self.headers).get(REQUEST_ID, b""))
        self.scope["request_id"] = name
        self.cycle.default_headers = [*self.cycle.default_headers, (REQUEST_ID, name.encode())]
        self.unanswered.append(self.cycle)
        self.count()
        if len(self.unanswered) > 1 + MAX_PIPELINED:
            self.transport.abort()
        # uvicorn stops reading while requests wait, and would not notice a client that hangs up
        self.flow.resume_reading()

    def on_body(self, body):
        self.unparsed = 0
        super().on_body(body)
        if len(self.unanswered) > 1:
            self.flow.resume_reading()
            if len(self.cycle.body) > self.args.max_body_mib * 2**20:
                self.transport.abort()

    def on_message_complete(self):
        if self.parser.should_upgrade() or self.transport.is_closing():
            return
        super().on_message_complete()
        if self.sending:
            self.sending.cancel()
            self.sending = None

    def ignore_upgrade(self, rest: bytes):
        """
        Answer in HTTP/1.1 a client that offers to go on in HTTP/2 (h2c) or as a WebSocket, as if it
        had not. The parser takes such a request to end with its head, so a new parser gets the
        request again, without the offer.
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
        """
        Half-close: the client has closed its sending side. Its requests are answered, if it is
        still there.
        """
        if not self.unanswered or self.cycle.more_body or self.cycle.scope["http_version"] != "1.1":
            return False  # closes the connection
        self.cycle.keep_alive = False
        self.probe(PROBE_SECONDS / 100)
        return True

    def probe(self, seconds: float):
        """
        Find out whether a client that has closed its sending side still reads. A client that hung
        up looks the same, but its machine answers the next bytes with a reset, and the bytes after
        these end the connection. So send bytes that mean nothing: twice at once, as most such
        clients did hang up, and then every PROBE_SECONDS.
        """
        if not self.unanswered or self.transport.is_closing():
            return
        cycle = self.unanswered[0]
        if not cycle.response_started:
            self.transport.write(CONTINUE)
        elif cycle.chunked_encoding:  # an event stream; uvicorn writes whole chunks, so between two
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
        self.reading = self.reading or self.close_later()

    def resume_writing(self):
        super().resume_writing()
        if self.reading:
            self.reading.cancel()
            self.reading = None

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self.count()
        for cycle in self.unanswered:  # uvicorn tells only the last one
            cycle.disconnected = True
            cycle.message_event.set()
        for timer in (self.sending, self.reading):
            if timer:
                timer.cancel()

    def send_400_response(self, msg):
        """The answer to what is not HTTP: an error of the same form as all others."""
        self.note_end(self.client, 400, {"error": msg})
        body = error_body(ApiError(400, msg))
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head += f"x-request-id: {request_id(b'')}\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
