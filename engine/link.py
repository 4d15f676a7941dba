"""
The engine's end of its link to the HTTP process: a Unix socket, without waiting for its other end.

    link = Link(sock)                   # one of a connected pair, of which client.py has the other
    for message in link.receive(timeout=None):
        link.queue({"op": "error", "id": message["id"], "message": "no", "kind": "invalid"})
    link.flush(engine.stats())

A message is one line of JSON (in which a line break inside of a text is \\n), never a pickle, so
neither side can run code in the other. Not run by itself: the engine's loop (process.py) uses it.

Backpressure: a busy HTTP process must not hold up the engine. So the socket does not block, and
while it has not taken all of the last message, none is sent. Meanwhile the tokens of a request are
joined to one row, which is sent when there is room: what waits is the requests' tokens, no more.
"""

import selectors
import socket

import orjson

READ_SIZE = 2**18  # bytes received at a time

# id, tokens, finish_reason, cached_tokens, scores and prompt_scores (None: not asked for)
Row = list


def to_line(message: dict) -> bytes:
    """A message as it goes over a link. Keys may be token ids."""
    return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def join_rows(row: Row, later: Row):
    """Append `later`, which a later step brought for the same request, to `row`, in place."""
    row[1] += later[1]
    row[2] = later[2]
    if later[4]:
        row[4] = (row[4] or []) + later[4]


def read_messages(unread: bytearray, data: bytes) -> list[dict]:
    """
    The messages that end in these data, at either end of a link. `unread`, the beginning of a
    message, is kept in place: one may come in many parts, or many at once.
    """
    unread += data
    if b"\n" not in data:  # most of a long prompt, say
        return []
    *lines, rest = unread.split(b"\n")
    unread[:] = rest
    return [orjson.loads(line) for line in lines]


class Link:
    """The HTTP process, as the engine sees it."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.is_open = True
        self.unread = bytearray()  # the beginning of a message
        self.unsent = bytearray()  # the end of a message, for which the socket had no room
        self.rows: dict[str, Row] = {}  # of steps, by request: to be sent
        self.messages: list[dict] = []  # others to be sent
        self.stats: dict = {}  # as they were sent last
        self.selector = selectors.DefaultSelector()
        sock.setblocking(False)
        self.selector.register(sock, selectors.EVENT_READ)

    def receive(self, timeout: float | None) -> list[dict]:
        """
        The messages that have arrived, perhaps none, after waiting up to `timeout` seconds (None:
        for ever) for some, or for room for what is `unsent`. At the end of the file `is_open`
        becomes False.
        """
        if not self.selector.select(timeout):
            return []
        if self.unsent:
            self.send()
        try:
            data = self.sock.recv(READ_SIZE)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            self.is_open = False
        return read_messages(self.unread, data)

    def queue(self, message: dict):
        """Have a message sent at the next flush."""
        self.messages.append(message)

    def queue_row(self, row: Row):
        """Have a step's row sent at the next flush, joined to those that still wait."""
        waiting = self.rows.setdefault(row[0], row)
        if waiting is not row:
            join_rows(waiting, row)

    def flush(self, stats: dict):
        """Send what is queued with the engine's stats, unless nothing is new: a step always is."""
        if not self.rows and not self.messages and stats == self.stats:
            return
        step = {"op": "step", "out": list(self.rows.values()), "stats": stats}
        self.send(step, *self.messages)  # errors come after the tokens before them
        self.rows = {}
        self.messages = []
        self.stats = stats

    def send(self, *messages: dict):
        """
        Send these messages after what is `unsent`, as far as there is room; the selector watches
        for more room.
        """
        self.unsent += b"".join(map(to_line, messages))
        try:
            sent = self.sock.send(self.unsent)
            del self.unsent[:sent]
        except BlockingIOError:
            pass  # no room: all of it stays in `unsent`
        except ConnectionError:
            self.is_open = False
        room = selectors.EVENT_WRITE if self.unsent else 0
        self.selector.modify(self.sock, selectors.EVENT_READ | room)
