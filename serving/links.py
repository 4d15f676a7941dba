"""
The engine's end of its links to the HTTP processes: who says what, and nobody waits for anybody.

    links = Links(listener)                     # a listening Unix socket; an HTTP process connects to its path
    for link, message in links.receive(timeout=None):
        link.put({"op": "error", "id": message["id"], "message": "no", "kind": "invalid"})
    links.flush(engine.stats())

A message is one line of JSON (JSON writes line breaks inside of texts as \\n), never a pickle, so
neither side can run code in the other. Not run by itself: the engine's loop, `engine.run`, uses it.

An HTTP process that is busy must not hold up the engine, nor the streams of the other HTTP
processes. So nothing here blocks, and a link that has not taken all of its last message gets no new
one: meanwhile the tokens of a request are joined to one row, and go out as one when there is room.
What waits for a link is no more than its requests' tokens, and two numbers for each request of all
links, which are for the metrics.
"""

import json
import selectors
import socket
import time

READ_SIZE = 2**18  # bytes taken from a link at a time
NEWS = (
    "at_work",
    "queries",
    "hits",
    "preemptions",
)  # stats that a link hears of at once when they change
STATS_SECONDS = (
    0.1  # a link whose requests get no tokens hears at least this often how the engine is
)

encode = json.JSONEncoder(separators=(",", ":")).encode

Row = list  # [id, tokens, finish_reason, cached_tokens] or that and [scores, prompt_scores]


def line(message: dict) -> bytes:
    """A message as it goes over a link."""
    return encode(message).encode() + b"\n"


def join(row: Row, later: Row):
    """Add what a later step brought for the same request."""
    row[1] += later[1]
    row[2] = later[2]
    if len(later) > len(row):
        row += [None, None]
    if len(later) > 4 and later[4]:
        row[4] = (row[4] or []) + later[4]


class Messages:
    """
    The messages that arrive at either end of a link, of which one may come in many parts, or many
    at once.
    """

    def __init__(self):
        self.unread = bytearray()  # the beginning of a message

    def read(self, data: bytes) -> list[dict]:
        """The messages that end in what has arrived."""
        if b"\n" not in data:  # most of a long prompt, say
            self.unread += data
            return []
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Link:
    """An HTTP process, as the engine sees it. `number` is the place in the order of arrival."""

    def __init__(self, sock: socket.socket, number: int):
        self.sock = sock
        self.number = number
        self.is_open = True
        self.incoming = Messages()
        self.unsent = bytearray()  # the end of a message
        self.is_behind = False  # it had no room for all of it
        self.rows: dict[str, Row] = {}  # of steps that the link was not told yet, by request
        self.messages: list[dict] = []  # what else it was not told yet
        self.lists: dict[str, list] = {}  # those in the engine's stats, gathered until it is told
        self.told = 0.0  # when it heard last
        self.heard: dict = {}  # the engine's stats as it heard them then
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

    def put(self, message: dict):
        """Have a message sent at the next flush."""
        self.messages.append(message)

    def put_row(self, row: Row):
        """Have a step's row sent at the next flush, or joined to those that still wait."""
        waiting = self.rows.setdefault(row[0], row)
        if waiting is not row:
            join(waiting, row)

    def gather(self, lists: dict[str, list]):
        """
        Keep what `stats` says of the time since it was asked last, for those who were not told yet.
        """
        for name, values in lists.items():
            self.lists[name] = self.lists.get(name, []) + values

    def compose(self, stats: dict):
        """Make one message of all rows, and lines of all other messages, in `unsent`."""
        step = {"op": "step", "out": list(self.rows.values()), "stats": stats | self.lists}
        messages = [step, *self.messages]  # an error comes after the tokens before it
        self.unsent += b"".join(map(line, messages))
        self.rows = {}
        self.messages = []
        self.lists = {}
        self.told = time.monotonic()
        self.heard = stats

    def send(self):
        """Send as much of `unsent` as there is room for."""
        try:
            sent = self.sock.send(self.unsent)
            del self.unsent[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_open = False


class Links:
    """
    All HTTP processes, those to come included: they connect to `listener`, whenever they start.
    """

    def __init__(self, listener: socket.socket):
        self.listener = listener
        self.links: dict[int, Link] = {}
        self.num_accepted = 0
        self.greeting: dict = {}  # the first message of each
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    @property
    def is_wanted(self) -> bool:
        """Somebody is there, or nobody has come yet."""
        return bool(self.links) or not self.num_accepted

    def accept(self):
        """Take in whoever has connected."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            link = Link(sock, self.num_accepted)
            self.num_accepted += 1
            self.links[link.number] = link
            self.selector.register(sock, selectors.EVENT_READ, link)
            self._greet(link)

    def greet(self, message: dict):
        """Make this the first message of everybody, those who are linked already included."""
        self.greeting = message
        for link in list(self.links.values()):
            self._greet(link)

    def _greet(self, link: Link):
        if self.greeting:
            link.unsent += line(self.greeting)
            self._send(link)

    def receive(self, timeout: float | None) -> list[tuple[Link, dict]]:
        """
        What has arrived, and from whom; where nothing has, what comes first within `timeout`
        seconds (None: ever). {"op": "gone"} is the last message of a link that was closed from the
        other side.
        """
        found = []
        for key, events in self.selector.select(timeout):
            link = key.data
            if link is None:
                self.accept()
                continue
            if events & selectors.EVENT_WRITE:
                self._send(link)
            if events & selectors.EVENT_READ:
                found += [(link, message) for message in link.receive()]
            if not link.is_open:
                self._forget(link)
                found.append((link, {"op": "gone"}))
        return found

    def flush(self, stats: dict):
        """
        Send what was put, with the engine's stats, to all links that took their last message whole.
        The others hear the stats alone, when what counts has changed, or when they were told
        nothing for a while.
        """
        now = time.monotonic()
        lists = {name: value for name, value in stats.items() if isinstance(value, list)}
        for link in list(self.links.values()):
            link.gather(lists)
            has_news = (
                link.rows
                or link.messages
                or any(link.heard.get(name) != stats.get(name) for name in NEWS)
            )
            if (has_news or now - link.told > STATS_SECONDS) and not link.unsent:
                link.compose(stats)
                self._send(link)

    def _send(self, link: Link):
        link.send()
        if bool(link.unsent) != link.is_behind:
            link.is_behind = not link.is_behind
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.is_behind else 0)
            self.selector.modify(link.sock, events, link)

    def _forget(self, link: Link):
        self.selector.unregister(link.sock)
        link.sock.close()
        del self.links[link.number]

    def close(self):
        """
        End all links; the other sides read the end of the file. `listener` stays open for whoever
        comes next.
        """
        for link in list(self.links.values()):
            self._forget(link)
        self.selector.close()
