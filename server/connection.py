"""
A client's connection: uvicorn's HTTP protocol, with limits on the resources a client may use.

    uvicorn.Config(Gate(service), http=Connection)      # the ASGI application of gate.py

Not run by itself: app.py puts it in front of the Gate. At this point, no client has presented an
API key. So, to protect against Slowloris and similar attacks, everything has a limit: the size and
number of headers, the time to send a request or read an answer, the number of requests waiting in a
connection, and the number of connections. This file does not interpret requests.
"""

import asyncio
import contextlib
import re
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.protocol import ApiError, error_response

MAX_HEAD = 2**16  # bytes of a request outside its body: request line, headers and trailers
MAX_HEADERS = 128  # each takes 20 times its size in memory
MAX_PIPELINED = 8  # requests that may wait in a connection while one is answered
REQUEST_ID = b"x-request-id"  # identifies a call to its client and in the log

# Protection against request smuggling: these headers decide which server gets a request, who sent
# it, and where it ends. If one of them were sent twice, a proxy in front of this server might use
# one copy and this server the other.
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
    Raise ApiError if there are too many headers (431), or if a header that must be unique is
    repeated (400). Names must be in lower case.
    """
    if len(headers) > MAX_HEADERS:
        raise ApiError(431, f"the request has more than {MAX_HEADERS} headers: send fewer")
    names = [name for name, _ in headers]
    for name in SINGLE_HEADERS:
        count = names.count(name)
        if count > 1:
            raise ApiError(400, f"the header {name.decode()} was sent {count} times: send it once")


def request_id(name: bytes) -> str:
    """Return the client's own X-Request-Id if it is short, printable ASCII, otherwise a new one."""
    return name.decode() if re.fullmatch(b"[!-~]{1,128}", name) else uuid.uuid4().hex


@dataclass
class Call:
    """Information about a call, stored in scope["call"]."""

    id: str  # its X-Request-Id
    logged: dict = field(default_factory=dict)  # fields for its line in the log
    salt: str = ""  # for the prefix cache, derived from its API key; "" without API keys
    owner: str = ""  # `salt` or, without API keys, the client's address; "" if the client is gone
    job: object = None  # answers.Job, if the call needs the engine
    has_answer: bool = False  # whether its answer has started


def close_after_early_answer(scope, receive, send, limit: float) -> tuple[Callable, Callable]:
    """
    Return ASGI's `receive` and `send` for a call. If an answer (usually a refusal) starts before
    the whole body has been read, it is the last answer on its connection. Closing the connection
    with unread bytes would reset it, and a client that is still sending would lose the answer. So
    up to `limit` bytes of the body are first read and dropped. `send` also records that the answer
    has started.
    """
    headers = dict(scope["headers"])
    has_length = headers.get(b"content-length", b"0").strip(b"0") != b""
    unread = has_length or b"transfer-encoding" in headers
    closes = False

    async def receive_part():
        nonlocal unread
        message = await receive()
        unread = message.get("more_body", False)
        return message

    async def send_part(message):
        nonlocal closes
        if message["type"] == "http.response.start":
            scope["call"].has_answer = True
            closes = unread
            if closes:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
        elif closes and not message.get("more_body"):
            # The whole answer has now been sent, except for its end, which makes uvicorn close the
            # connection. The end is sent after the body has been dropped.
            await send(message | {"more_body": True})
            dropped = 0
            with contextlib.suppress(asyncio.CancelledError):  # the server is stopping
                while unread and dropped <= limit:
                    dropped += len((await receive_part()).get("body", b""))
            message = {"type": "http.response.body"}
        await send(message)

    return receive_part, send_part


class Connection(HttpToolsProtocol):
    """
    uvicorn's connection, with limits. It is closed if

    - the client takes longer than --client-seconds to send a whole request, or to read the data
      waiting for it
    - the client sends too many bytes outside of bodies
    - there are too many connections
    - it is idle for --keep-alive-seconds

    When a connection ends, all computations for it are aborted.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        gate = self.config.app
        self.args = gate.args
        self.timeout_keep_alive = self.args.keep_alive_seconds
        self.note_end = gate.note_end
        self.timer = None  # runs while the client is sending a request, or not reading an answer
        self.is_sending = True  # whether the client is sending a request
        self.in_body = False  # whether the parser is past the request's head
        self.head_size = 0  # bytes of head and trailers that the parser has reported
        self.unparsed = 0  # bytes received since the parser's last report
        self.unanswered: deque = deque()  # uvicorn's cycles; the first is being answered

    def connection_made(self, transport):
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause writing if the client is not reading
        self.watch_client()
        most = self.args.max_connections
        if len(self.connections) > most:
            message = f"more than {most} connections: try again later"
            self.refuse(ApiError(503, message, code="too_many_connections"))

    def watch_client(self):
        """
        Start or stop the timer that disconnects a client that is too slow to send a request or to
        read an answer. One timer covers both, and it is not restarted while either is pending. So a
        client that starts to send a request while not reading an answer gets only the remaining
        time.
        """
        is_owing = self.is_sending or self.flow.write_paused
        if is_owing and not self.timer:
            self.timer = self.loop.call_later(self.args.client_seconds, self.transport.abort)
        elif self.timer and not is_owing:
            self.timer.cancel()
            self.timer = None

    # what the client sends

    def data_received(self, data):
        if self.is_sending or data.strip(b"\r\n"):  # empty lines may come between two requests
            self.is_sending = True
            self.watch_client()
            self._unset_keepalive_if_required()
        self.unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.refuse(ApiError(400, "Invalid HTTP request received."))
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
        # trailers (headers after a chunked body) count towards the limit but are not kept
        if not self.in_body and len(self.headers) <= MAX_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self):
        self.in_body = True
        if self.parser.should_upgrade() or self.transport.is_closing():
            return
        super().on_headers_complete()
        name = request_id(dict(self.headers).get(REQUEST_ID, b""))
        self.scope["call"] = Call(name)
        self.cycle.default_headers = [*self.cycle.default_headers, (REQUEST_ID, name.encode())]
        self.unanswered.append(self.cycle)
        if len(self.unanswered) > 1 + MAX_PIPELINED:
            self.transport.abort()
        # uvicorn stops reading while requests wait, so it would not notice a disconnect
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
        self.is_sending = False
        self.watch_client()

    def ignore_upgrade(self, rest: bytes):
        """
        Answer in HTTP/1.1 if a client offers to upgrade to HTTP/2 (h2c) or to a WebSocket. The
        parser assumes that such a request ends with its head. So the request is parsed again by a
        new parser, without the offer.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            return self.refuse(ApiError(400, "This is not a proxy: CONNECT is not supported."))
        if self.transport.is_closing():
            return
        head = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, self.url, b"".join(head), rest))

    def eof_received(self):
        """Treat a client that stops sending as disconnected, even if it has requests waiting."""
        self.transport.abort()

    # what the server sends

    def on_response_complete(self):
        self.unanswered.popleft()
        super().on_response_complete()

    def shutdown(self):
        """Close the connection after the current answer, because the server is stopping."""
        super().shutdown()
        for cycle in self.unanswered:  # uvicorn marks only the last one
            cycle.keep_alive = False

    def pause_writing(self):
        super().pause_writing()
        self.watch_client()

    def resume_writing(self):
        super().resume_writing()
        self.watch_client()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        for cycle in self.unanswered:  # uvicorn notifies only the last one
            cycle.disconnected = True
            cycle.message_event.set()
        if self.timer:
            self.timer.cancel()

    def refuse(self, error: ApiError):
        """Send an error and close the connection, for example if there are too many connections."""
        self.note_end(self.client, error.status, {"error": error.reason})
        response = error_response(error)
        response.headers["x-request-id"] = request_id(b"")
        response.headers["connection"] = "close"
        head = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + response.body)
        self.transport.close()
