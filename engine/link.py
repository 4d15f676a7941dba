"""
The engine's end of its link to the HTTP process: a Unix socket that never blocks.

    link = Link(sock)                   # one of a connected pair; client.py has the other one
    for message in link.receive(timeout=None):
        link.queue({"op": "error", "id": message["id"], "message": "no", "kind": "invalid"})
    link.flush(engine.stats())

Each message is one line of JSON; line breaks inside strings are escaped as \\n. Messages are never
pickles, so neither side can run code in the other. This file is not run by itself; the engine's
loop (process.py) uses it.

Backpressure: a busy HTTP process must not delay the engine, so the socket does not block. The next
message is not sent until the socket has taken all of the last one. Meanwhile, the new tokens of
each request are joined into one row, so only tokens accumulate.
"""

import selectors
import socket

import orjson

READ_SIZE = 2**18  # maximum number of bytes received at a time

# id, tokens, finish_reason, cached_tokens, scores, prompt_scores; scores are None if not requested
Row = list


def to_line(message: dict) -> bytes:
    """Return a message as a line of JSON. Object keys may be token ids."""
    return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)


def add_row(rows: dict[str, Row], row: Row):
    """
    Add a row to `rows`, whose keys are request ids. If there is a row from an earlier step of the
    same request, append to that row in place. Used at both ends of a link.
    """
    earlier = rows.setdefault(row[0], row)
    if earlier is row:
        return
    earlier[1] += row[1]
    earlier[2] = row[2]
    if row[4]:
        earlier[4] = (earlier[4] or []) + row[4]


def read_messages(unread: bytearray, data: bytes) -> list[dict]:
    """
    Return the messages that are complete once `data` is added. Used at both ends of a link. A
    message may arrive in many parts, and many messages may arrive together. `unread` holds the
    beginning of the next message, and is updated in place.
    """
    unread += data
    if b"\n" not in data:  # for example a part of a long prompt
        return []
    *lines, rest = unread.split(b"\n")
    unread[:] = rest
    return [orjson.loads(line) for line in lines]


class Link:
    """The engine's end of the link to the HTTP process."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.is_open = True
        self.unread = bytearray()  # the beginning of a message whose rest has not arrived yet
        self.unsent = bytearray()  # the part of a message that the socket has not taken yet
        self.rows: dict[str, Row] = {}  # request id -> its row, to be sent
        self.messages: list[dict] = []  # other messages to be sent
        self.stats: dict = {}  # the last stats that were sent
        self.selector = selectors.DefaultSelector()
        sock.setblocking(False)
        self.selector.register(sock, selectors.EVENT_READ)

    def receive(self, timeout: float | None) -> list[dict]:
        """
        Return the messages that have arrived, if any. Waits up to `timeout` seconds (None means no
        limit) for messages, or until the socket can take some of `unsent`. Sets `is_open` to False
        if the other end has closed the socket.
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
        """Queue a message for the next flush."""
        self.messages.append(message)

    def queue_row(self, row: Row):
        """
        Queue a row for the next flush, or join it to a row that is queued for the same request.
        """
        add_row(self.rows, row)

    def flush(self, stats: dict):
        """
        Send everything that is queued, together with the engine's stats. Does nothing if nothing is
        queued and the stats have not changed (they count steps, so each step changes them).
        """
        if not self.rows and not self.messages and stats == self.stats:
            return
        step = {"op": "step", "out": list(self.rows.values()), "stats": stats}
        self.send(step, *self.messages)  # an error comes after the tokens that preceded it
        self.rows = {}
        self.messages = []
        self.stats = stats

    def send(self, *messages: dict):
        """
        Send what is `unsent`, then these messages, as far as the socket takes them. If anything is
        left over, `receive` also wakes up when the socket can take more.
        """
        self.unsent += b"".join(map(to_line, messages))
        try:
            sent = self.sock.send(self.unsent)
            del self.unsent[:sent]
        except BlockingIOError:
            pass  # the socket is full: everything stays in `unsent`
        except ConnectionError:
            self.is_open = False
        writing = selectors.EVENT_WRITE if self.unsent else 0
        self.selector.modify(self.sock, selectors.EVENT_READ | writing)
