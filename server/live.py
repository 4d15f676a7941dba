"""
The live page at /, and GET /events, which streams the engine's record to the page and other clients
as server-sent events.

    Response(page(), headers=page_headers(page()))

    listeners = Listeners(client, tokens=False)
    app = listeners.join("key 0", "key 0")    # an ASGI application: the answer to one call

Not run by itself: app.py has the paths. engine/events.py publishes lines at most ten times a
second, and each event is a list of lines. The most recent lines are kept. So a page has a history
even after it is reloaded or the engine dies. Token ids reveal texts, so they are sent only with
--log-requests. Names and texts of requests are sent only to listeners with the same API key.
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

PING_SECONDS = 10  # a silent stream sends a comment this often, so that proxies keep it open
PING = b": ping\n\n"
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
MAX_LISTENERS = 16  # at the same time
MAX_OF_ONE = 8  # listeners with the same API key or, without keys, the same address
KEPT_LINES = 2000  # number of most recent lines; those back to a snapshot are also kept
LINES_AN_EVENT = 200  # at most, so that other calls need not wait while a long history is sent
SNAPSHOT = '{"event":"snapshot"'
STEP = '{"event":"step"'
ENDED = '{"event":"engine","state":"ended"}'


class Listeners:
    """
    All calls of GET /events, and the lines that they receive. The engine starts to publish its
    record when the first call arrives.
    """

    def __init__(self, client: EngineClient, tokens: bool):
        self.client = client
        self.tokens = tokens
        self.all: set[Listener] = set()
        self.lines: list[str] = []  # the most recent lines; the first is a snapshot
        client.on_events = self.publish

    def join(self, key: str, owner: str) -> "Listener":
        """
        Return a new listener, which may read everything that belongs to this key. `owner` is the
        key or an address, and may have at most MAX_OF_ONE listeners. Raises ApiError (429) if there
        are too many.
        """
        of_owner = sum(listener.owner == owner for listener in self.all)
        if len(self.all) >= MAX_LISTENERS or of_owner >= MAX_OF_ONE:
            message = (
                f"{len(self.all)} clients are already listening, {of_owner} of them yours; at most "
                f"{MAX_LISTENERS} may, and {MAX_OF_ONE} for each key or address: close one, or try "
                "again later"
            )
            raise ApiError(429, message, code="too_many_listeners")
        return Listener(self, key, owner)

    def listen(self):
        """Tell the engine to publish if there are listeners, and to stop if there are none."""
        self.client.listen(bool(self.all), self.tokens)

    def publish(self, lines: list[str]):
        """
        Forward the engine's lines to the listeners. If there are none, the engine has stopped
        publishing. The kept lines are then dropped, because later lines would follow a gap.
        """
        self.lines += lines
        if not lines:
            self.lines.clear()
        spare = max(0, len(self.lines) - KEPT_LINES)
        oldest = enumerate(self.lines[: spare + 1])
        starts = [i for i, line in oldest if line.startswith(SNAPSHOT)]
        del self.lines[: max(starts, default=0)]
        for listener in self.all:
            listener.unsent += lines
            if len(listener.unsent) > len(self.lines):  # its next line was dropped
                listener.unsent = self.lines.copy()
            listener.changed.set()

    @property
    def behind(self) -> bool:
        """
        Return True if listeners still lack lines: after the last step's line comes an "idle" line.
        """
        return bool(self.all and self.lines) and self.lines[-1].startswith(STEP)

    def engine_ended(self):
        """
        Record that the engine's process has ended. Its lines are kept, followed by those of the
        next engine.
        """
        if self.lines:
            self.publish([ENDED])

    def engine_started(self):
        """
        Tell a new engine to publish if there are listeners. If there were listeners earlier, the
        engine publishes for a while, because they may return.
        """
        if self.all or self.lines:
            self.client.listen(True, self.tokens)
            self.listen()

    def end(self):
        """End all streams, because the server is stopping."""
        for listener in self.all:
            listener.is_over = True
            listener.changed.set()


class Listener(StreamingResponse):
    """
    One GET /events call. If a client reads so slowly that its next line has been dropped, it
    continues with the first kept line, which is a snapshot.
    """

    def __init__(self, listeners: Listeners, key: str, owner: str):
        super().__init__(self.events())
        self.raw_headers = EVENTS
        self.listeners = listeners
        self.key = key
        self.owner = owner
        self.own: set[int] = set()  # numbers of the key's own requests
        self.unsent: list[str] = []
        self.is_over = False  # if so, the stream ends after the lines in `unsent`
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
        """Yield the next lines as an event, or a ping if there have been none for PING_SECONDS."""
        while self.unsent or not self.is_over:
            lines = self.unsent[:LINES_AN_EVENT]
            del self.unsent[:LINES_AN_EVENT]
            if lines:
                if self.key:  # without API keys, listeners see everything
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
        """
        Remove the texts and names of other keys' requests from a line, in place. Returns the line.
        """
        if line["event"] == "snapshot":  # perhaps from a new engine, which numbers requests from 1
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
    """
    Return the page at / as one document: index.html with each /* FILE */ replaced by that file.
    """
    folder = Path(__file__).with_name("page")

    def content(name: re.Match) -> str:
        text = (folder / name[1]).read_text("utf-8")
        return in_script(text) if name[1].endswith(".jsonl") else text

    return re.sub(r"/\* (\S+) \*/", content, (folder / "index.html").read_text("utf-8"))


@cache
def zipped_page() -> bytes:
    """Return the page compressed with gzip, to about a third of its size."""
    return gzip.compress(page().encode())


def in_script(record: str) -> str:
    """
    Escape a record for use in a <script> element. The text "</script>" would end the element, so
    each "<" is written as a JSON escape.
    """
    return record.replace("<", "\\u003c")


def content_policy(html: str) -> str:
    """
    Return the page's Content Security Policy. Only the page's own script may run, and it may
    connect only to its own origin.
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
    """
    Return the page's headers. They contain the policy, and forbid other pages to show this page in
    a frame (clickjacking).
    """
    return {
        "Content-Security-Policy": f"{content_policy(html)}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
