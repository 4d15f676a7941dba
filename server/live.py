"""
The live page at /, and GET /events for the page and other clients, which sends the engine's record
as server-sent events.

    Response(page(), headers=page_headers(page()))

    listeners = Listeners(client, tokens=False)
    app = listeners.join("key 0", "key 0")    # an ASGI application: the answer to one call

Not run by itself: app.py has the path. engine/events.py publishes lines at most ten times a second;
an event is a list of lines. The last lines are kept. So a page has a history even after it was
reloaded, or after the engine has died. Token ids reveal texts, so they are sent only with
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

PING_SECONDS = 10  # a silent stream sends a comment this often, or proxies would close it
PING = b": ping\n\n"
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
MAX_LISTENERS = 16  # at the same time
MAX_OF_ONE = 8  # of the same API key or, without keys, of the same address
KEPT_LINES = 2000  # the last lines, and those before them back to a snapshot
LINES_AN_EVENT = 200  # at most, so that other calls need not wait for a long history
SNAPSHOT = '{"event":"snapshot"'
STEP = '{"event":"step"'
ENDED = '{"event":"engine","state":"ended"}'


class Listeners:
    """
    All calls of GET /events, and the lines that they receive. The engine publishes its record from
    the first call on.
    """

    def __init__(self, client: EngineClient, tokens: bool):
        self.client = client
        self.tokens = tokens
        self.all: set[Listener] = set()
        self.lines: list[str] = []  # the last lines; the first is a snapshot
        client.on_events = self.publish

    def join(self, key: str, owner: str) -> "Listener":
        """
        Return a new listener, which may read everything that belongs to this key. `owner`, the key
        or an address, may have MAX_OF_ONE listeners. Raises ApiError (429) if there are too many.
        """
        of_owner = sum(listener.owner == owner for listener in self.all)
        if len(self.all) >= MAX_LISTENERS or of_owner >= MAX_OF_ONE:
            listening = f"{len(self.all)} clients listen already, {of_owner} of them yours"
            limits = f"at most {MAX_LISTENERS} may, {MAX_OF_ONE} of one key or address"
            message = f"{listening}; {limits}: close one, or try again later"
            raise ApiError(429, message, code="too_many_listeners")
        return Listener(self, key, owner)

    def listen(self):
        """Have the engine publish while there are listeners."""
        self.client.listen(bool(self.all), self.tokens)

    def publish(self, lines: list[str]):
        """
        Pass on lines of the engine. If there are none, the engine has stopped publishing. Then the
        kept lines are dropped, because later lines would come after a gap.
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
        """Whether a listener lacks the last lines: after the last step's comes "idle"."""
        return bool(self.all and self.lines) and self.lines[-1].startswith(STEP)

    def engine_ended(self):
        """
        Note that the engine's process has ended. Its lines are kept, and the lines of the next
        engine follow.
        """
        if self.lines:
            self.publish([ENDED])

    def engine_started(self):
        """
        Have a new engine publish if there are listeners. If there only were some, it publishes for
        a while, because they may come back.
        """
        if self.all or self.lines:
            self.client.listen(True, self.tokens)
            self.listen()

    def end(self):
        """End all streams, because the server stops."""
        for listener in self.all:
            listener.is_over = True
            listener.changed.set()


class Listener(StreamingResponse):
    """
    One call of GET /events. If a client reads so slowly that its next line was dropped, it
    continues with the first line that is kept, which is a snapshot.
    """

    def __init__(self, listeners: Listeners, key: str, owner: str):
        super().__init__(self.events())
        self.raw_headers = EVENTS
        self.listeners = listeners
        self.key = key
        self.owner = owner
        self.own: set[int] = set()  # numbers of the requests that belong to the key
        self.unsent: list[str] = []
        self.is_over = False  # if True, the stream ends after the lines in `unsent`
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
        """Yield the next lines as an event, or a ping if there were none for PING_SECONDS."""
        while self.unsent or not self.is_over:
            lines = self.unsent[:LINES_AN_EVENT]
            del self.unsent[:LINES_AN_EVENT]
            if lines:
                if self.key:  # without API keys, everything is shown
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
        """Remove the texts and names of other keys from a line, in place. Returns the line."""
        if line["event"] == "snapshot":  # perhaps of a new engine, which numbers requests from 1
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
    """Return the page at / as one document: index.html, with files in place of each /* FILE */."""
    folder = Path(__file__).with_name("page")

    def content(name: re.Match) -> str:
        text = (folder / name[1]).read_text("utf-8")
        return in_script(text) if name[1].endswith(".jsonl") else text

    return re.sub(r"/\* (\S+) \*/", content, (folder / "index.html").read_text("utf-8"))


@cache
def zipped_page() -> bytes:
    """Return the page compressed by gzip, a third as long."""
    return gzip.compress(page().encode())


def in_script(record: str) -> str:
    """
    Escape a record for an element <script>. A text with "</script>" would end the element, so each
    "<" is written as a JSON escape.
    """
    return record.replace("<", "\\u003c")


def content_policy(html: str) -> str:
    """
    Return the Content Security Policy of the page. Only the page's own script runs, and it can
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
    Return the page's headers. Apart from the policy, they forbid other pages to show it in a frame
    (clickjacking).
    """
    return {
        "Content-Security-Policy": f"{content_policy(html)}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
