"""
The live page at /, and GET /events for it and other clients: the engine's record, as server-sent
events.

    Response(page(), headers=page_headers(page()))

    listeners = Listeners(client, tokens=False)
    app = listeners.join("key 0", "key 0")    # an ASGI application: the answer to one call

Not run by itself: app.py has the path. events.py publishes lines at most ten times a second; an
event is a list of them. The last lines are kept, so that a page that is loaded again, or whose
engine has died, has a history. Token ids are texts: they are sent only under --log-requests. And no
listener is sent the names or texts of requests of other API keys.
"""

import asyncio
import base64
import gzip
import re
from collections.abc import AsyncIterator
from functools import cache
from hashlib import sha256
from pathlib import Path

import orjson
from starlette.responses import StreamingResponse

from server.client import EngineClient
from server.protocol import ApiError

PING_SECONDS = 10  # how often a silent stream sends a comment, or proxies would take it for dead
PING = b": ping\n\n"
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
MAX_LISTENERS = 16  # at once
MAX_OF_ONE = 8  # of one API key, or without keys of one address
KEPT_LINES = 2000  # the last ones, from the snapshot before them on
LINES_AN_EVENT = 200  # at most, so that no other call waits for a long history
SNAPSHOT = '{"event":"snapshot"'
STEP = '{"event":"step"'
ENDED = '{"event":"engine","state":"ended"}'


class Listeners:
    """
    All calls of GET /events, and the lines that they are sent. The engine publishes as soon as
    there is one.
    """

    def __init__(self, client: EngineClient, tokens: bool):
        self.client = client
        self.tokens = tokens
        self.all: set[Listener] = set()
        self.lines: list[str] = []  # the last ones, of which the first is a snapshot
        client.on_events = self.publish

    def join(self, key: str, owner: str) -> "Listener":
        """
        A new listener, which may read all that belongs to this key; `owner` is counted: the key or
        an address. Raises ApiError (429).
        """
        own = sum(listener.owner == owner for listener in self.all)
        if len(self.all) >= MAX_LISTENERS or own >= MAX_OF_ONE:
            listening = f"{len(self.all)} clients listen already, {own} of them yours"
            most = f"possible are {MAX_LISTENERS}, {MAX_OF_ONE} of one key or address"
            message = f"{listening}; {most}: close one, or try again later"
            raise ApiError(429, message, code="too_many_listeners")
        return Listener(self, key, owner)

    def listen(self):
        """Have the engine publish while there are listeners."""
        self.client.listen(bool(self.all), self.tokens)

    def publish(self, lines: list[str]):
        """Lines of the engine; none if it publishes no more: the next would come after a gap."""
        self.lines += lines
        if not lines:
            self.lines.clear()
        spare = max(0, len(self.lines) - KEPT_LINES)
        oldest = enumerate(self.lines[: spare + 1])
        starts = [i for i, line in oldest if line.startswith(SNAPSHOT)]
        del self.lines[: max(starts, default=0)]
        for listener in self.all:
            listener.unsent += lines
            if len(listener.unsent) > len(self.lines):  # its next line is no longer kept
                listener.unsent = self.lines.copy()
            listener.changed.set()

    @property
    def behind(self) -> bool:
        """Whether a listener lacks the last lines: after the last step's comes "idle"."""
        return bool(self.all and self.lines) and self.lines[-1].startswith(STEP)

    def engine_ended(self):
        """
        Note that the engine's process has ended. Its lines are kept; those of the next engine
        follow.
        """
        if self.lines:
            self.publish([ENDED])

    def engine_started(self):
        """It knows nothing of the listeners, and former ones may come back."""
        if self.all or self.lines:
            self.client.listen(True, self.tokens)
            self.listen()

    def end(self):
        """The server stops, and with it all streams."""
        for listener in self.all:
            listener.is_over = True
            listener.changed.set()


class Listener(StreamingResponse):
    """
    One call of GET /events. A client that reads so slowly that its next line was dropped goes on
    from the first one that is kept: a snapshot.
    """

    def __init__(self, listeners: Listeners, key: str, owner: str):
        super().__init__(self.events())
        self.raw_headers = EVENTS
        self.listeners = listeners
        self.key = key
        self.owner = owner
        self.own: set[int] = set()  # the requests of the key, by their numbers
        self.unsent: list[str] = []
        self.is_over = False  # the lines that have come are sent, and no more
        self.changed = asyncio.Event()

    async def __call__(self, scope, receive, send):
        listeners = self.listeners
        self.unsent += listeners.lines
        listeners.all.add(self)
        listeners.listen()
        try:
            await super().__call__(scope, receive, send)
        finally:
            listeners.all.discard(self)
            listeners.listen()

    async def events(self) -> AsyncIterator[bytes]:
        """The next lines, or a ping if none have come for PING_SECONDS."""
        while self.unsent or not self.is_over:
            lines = self.unsent[:LINES_AN_EVENT]
            del self.unsent[:LINES_AN_EVENT]
            if lines:
                if self.key:  # without API keys nothing is hidden
                    lines = [orjson.dumps(self.view(orjson.loads(x))).decode() for x in lines]
                yield f"data: [{','.join(lines)}]\n\n".encode()
                continue
            self.changed.clear()
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self.changed.wait()
            except TimeoutError:
                yield PING

    def view(self, line: dict) -> dict:
        """The line, now without texts and names of other keys."""
        if line["event"] == "snapshot":  # of another engine, perhaps, whose numbers begin again
            self.own.clear()
        for request in [*line.get("requests", ()), *line.get("new", ())]:
            if request.pop("key") == self.key:
                self.own.add(request["r"])
            else:
                del request["name"]
                request.pop("tokens", None)
        if "tokens" in line:
            line["tokens"] = [[r, token] for r, token in line["tokens"] if r in self.own]
        return line


# --------------------------------------------------------------------------------------------------
# The page


@cache
def page() -> str:
    """The page at /, as one document: index.html, with each file that it names as /* FILE */"""
    folder = Path(__file__).with_name("page")

    def content(name: re.Match) -> str:
        text = (folder / name[1]).read_text("utf-8")
        return in_script(text) if name[1].endswith(".jsonl") else text

    return re.sub(r"/\* (\S+) \*/", content, (folder / "index.html").read_text("utf-8"))


@cache
def zipped_page() -> bytes:
    """The same, a third as long."""
    return gzip.compress(page().encode())


def in_script(record: str) -> str:
    """A record in an element: a text with "</script>" would end it, and JSON can spell a "<"."""
    return record.replace("<", "\\u003c")


def content_policy(html: str) -> str:
    """
    The Content Security Policy of the page: nothing runs but its own script, and nothing is asked
    for but from its own origin.
    """
    hashes = {}
    for name, content in re.findall(r"<(script|style)>(.*?)</\1>", html, re.DOTALL):
        digest = base64.b64encode(sha256(content.encode()).digest()).decode()
        hashes[name] = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def page_headers(html: str) -> dict[str, str]:
    """Return the page's headers: its policy, and that no other page may frame it (clickjacking)."""
    return {
        "Content-Security-Policy": f"{content_policy(html)}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
