"""
The engine's end of its links to the HTTP processes: Unix sockets, without waiting for any of them.

    links = Links(listener)             # a listening Unix socket, to which HTTP processes connect
    for link, message in links.receive(timeout=None):
        link.queue({"op": "error", "id": message["id"], "message": "no", "kind": "invalid"})
    links.flush(engine.stats())

A message is one line of JSON (in which a line break inside of a text is \\n), never a pickle, so
neither side can run code in the other. Not run by itself: the engine's loop (process.py) uses it.

Backpressure: a busy HTTP process must not hold up the engine, nor the streams of the other HTTP
processes. So the sockets do not block, and a link that has not taken all of its last message gets
no new one. Meanwhile the tokens of a request are joined to one row, which is sent when there is
room: what waits for a link is its requests' tokens, and two delays of each request of all links
(`Engine.stats`), for the metrics.
"""

import selectors
import socket
import time

import orjson

READ_SIZE = 2**18  # bytes received from a link at a time
STATS_SECONDS = 0.1  # a link whose requests get no tokens is sent the stats at least this often

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


class Messages:
    """
    The messages that arrive at either end of a link, of which one may come in many parts, or many
    at once.
    """

    def __init__(self):
        self.unread = bytearray()  # the beginning of a message

    def read(self, data: bytes) -> list[dict]:
        """The messages that end in these data."""
        if b"\n" not in data:  # most of a long prompt, say
            self.unread += data
            return []
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [orjson.loads(line) for line in lines]


class Link:
    """An HTTP process, as the engine sees it. `number` is its place in the order of connecting."""

    def __init__(self, sock: socket.socket, number: int):
        self.sock = sock
        self.number = number
        self.is_open = True
        self.incoming = Messages()
        self.unsent = bytearray()  # the end of a message, for which the socket had no room
        self.awaits_room = False  # the selector watches for room
        self.rows: dict[str, Row] = {}  # of steps, by request: to be sent
        self.messages: list[dict] = []  # others to be sent
        self.delays: dict[str, list] = {}  # the lists of the engine's stats, until they are sent
        self.at_work: int | None = None  # as it was sent last
        self.sent_at = 0.0
        sock.setblocking(False)

    def receive(self) -> list[dict]:
        """The messages that have arrived. At the end of the file `is_open` becomes False."""
        try:
            data = self.sock.recv(READ_SIZE)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            self.is_open = False
        return self.incoming.read(data)

    def queue(self, message: dict):
        """Have a message sent at the next flush."""
        self.messages.append(message)

    def queue_row(self, row: Row):
        """Have a step's row sent at the next flush, joined to those that still wait."""
        waiting = self.rows.setdefault(row[0], row)
        if waiting is not row:
            join_rows(waiting, row)


class Links:
    """The HTTP processes: they connect to `listener` whenever they start."""

    def __init__(self, listener: socket.socket):
        self.listener = listener
        self.links: dict[int, Link] = {}
        self.num_accepted = 0
        self.greeting: dict = {}
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    @property
    def is_wanted(self) -> bool:
        """Whether an HTTP process is connected, or none has been yet."""
        return bool(self.links) or not self.num_accepted

    def accept(self):
        """Link all HTTP processes that have connected."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            link = Link(sock, self.num_accepted)
            self.num_accepted += 1
            self.links[link.number] = link
            self.selector.register(sock, selectors.EVENT_READ, link)
            if self.greeting:
                self.send(link, self.greeting)

    def set_greeting(self, message: dict):
        """The first message to each HTTP process: those that are linked get it now."""
        self.greeting = message
        for link in list(self.links.values()):
            self.send(link, message)

    def receive(self, timeout: float | None) -> list[tuple[Link, dict]]:
        """
        The messages that have arrived, perhaps none, after waiting up to `timeout` seconds for
        something to happen (None: for ever). {"op": "gone"} is the last message of a link that was
        closed from the other side.
        """
        arrived = []
        for key, events in self.selector.select(timeout):
            link = key.data
            if link is None:
                self.accept()
                continue
            if events & selectors.EVENT_WRITE:
                self.send(link)
            if events & selectors.EVENT_READ:
                arrived += [(link, message) for message in link.receive()]
            if not link.is_open:
                self._forget(link)
                arrived.append((link, {"op": "gone"}))
        return arrived

    def flush(self, stats: dict):
        """
        Send what is queued, with the engine's stats, to each link that took its last message whole.
        A link with nothing queued is sent the stats when other links' requests have come or ended,
        and now and then.
        """
        now = time.monotonic()
        delays = {name: value for name, value in stats.items() if isinstance(value, list)}
        for link in list(self.links.values()):
            for name, values in delays.items():
                link.delays.setdefault(name, []).extend(values)
            is_due = link.rows or link.messages or now - link.sent_at > STATS_SECONDS
            if (is_due or link.at_work != stats["at_work"]) and not link.unsent:
                step = {"op": "step", "out": list(link.rows.values()), "stats": stats | link.delays}
                self.send(link, step, *link.messages)  # errors come after the tokens before them
                link.rows = {}
                link.messages = []
                link.delays = {}
                link.at_work = stats["at_work"]
                link.sent_at = now

    def send(self, link: Link, *messages: dict):
        """
        Send these messages after what is `unsent`, as far as there is room; the selector watches
        for more room.
        """
        link.unsent += b"".join(map(to_line, messages))
        try:
            sent = link.sock.send(link.unsent)
            del link.unsent[:sent]
        except BlockingIOError:
            pass  # no room: all of it stays in `unsent`
        except ConnectionError:
            link.is_open = False
        if bool(link.unsent) != link.awaits_room:
            link.awaits_room = not link.awaits_room
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.awaits_room else 0)
            self.selector.modify(link.sock, events, link)

    def _forget(self, link: Link):
        self.selector.unregister(link.sock)
        link.sock.close()
        del self.links[link.number]

    def close(self):
        """End all links; the other sides read the end of the file. `listener` stays open."""
        for link in list(self.links.values()):
            self._forget(link)
        self.selector.close()
