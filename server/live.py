"""
The live page at /, and GET /events for it and other clients: the engine's record, as server-sent
events.

    Response(page(), headers=page_headers(page()))

    listeners = Listeners(client, tokens=False)
    app = listeners.join("key 0")           # an ASGI application: the answer to one call

Not run by itself: app.py has the path. events.py publishes lines at most ten times a second; an
event is a list of them. The last lines are kept, so that a page that is loaded again, or whose
engine has died, has a history. Token ids are texts: they are sent only under --log-requests. And no
listener is sent the names or texts of requests of other API keys.
"""

import asyncio
import base64
from functools import cache
from hashlib import sha256
from pathlib import Path

import orjson

from server.client import EngineClient
from server.protocol import ApiError

# The files of the page, in the order in which they are joined; and the record of its tour.
PAGE = ("index.html", "page.css", "state.js", "pool.js", "timeline.js", "talk.js")
TOUR = Path(__file__).parents[1] / "assets/tour.jsonl"
PING_SECONDS = 10  # how often a silent stream sends a comment, or proxies would take it for dead
PING = b": ping\n\n"
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
MAX_LISTENERS = 16  # of an HTTP process
KEPT_LINES = 2000  # the last ones, from the snapshot before them on
LINES_AN_EVENT = 200  # at most, so that no other call waits for a long history
SNAPSHOT = '{"event":"snapshot"'
ENDED = '{"event":"engine","state":"ended"}'


class Listeners:
    """
    All calls of GET /events that this HTTP process answers, and the lines that they are sent. The
    engine publishes to all HTTP processes as soon as one of them listens.
    """

    def __init__(self, client: EngineClient, tokens: bool):
        self.client = client
        self.tokens = tokens
        self.all: set[Listener] = set()
        self.lines: list[str] = []  # the last ones, of which the first is a snapshot
        self.num_dropped = 0  # lines before these
        client.on_events = self.publish

    def join(self, key: str) -> "Listener":
        """A new listener, which may read all that belongs to this key. Raises ApiError (429)."""
        if len(self.all) >= MAX_LISTENERS:
            message = f"{MAX_LISTENERS} clients listen already: close one, or try again later"
            raise ApiError(429, message, code="too_many_listeners")
        return Listener(self, key)

    def enter(self, listener: "Listener"):
        self.all.add(listener)
        if len(self.all) == 1:
            self.client.listen(True, self.tokens)

    def leave(self, listener: "Listener"):
        self.all.discard(listener)
        if not self.all:
            self.client.listen(False)

    def publish(self, lines: list[str]):
        """Lines of the engine; none if it publishes no more: the next would come after a gap."""
        self.lines += lines
        count = 0 if lines else len(self.lines)  # to be dropped
        spare = max(0, len(self.lines) - KEPT_LINES)
        for i, line in enumerate(self.lines[: spare + 1]):
            if line.startswith(SNAPSHOT):
                count = max(count, i)
        del self.lines[:count]
        self.num_dropped += count
        for listener in self.all:
            listener.changed.set()

    def engine_ended(self):
        """Its process is gone. Its lines are kept, and followed by those of the next one."""
        if self.lines:
            self.publish([ENDED])

    def engine_started(self):
        """It knows nothing of the listeners, and former ones may come back."""
        if self.all or self.lines:
            self.client.listen(True, self.tokens)
            if not self.all:
                self.client.listen(False)

    def end(self):
        """The server stops, and with it all streams."""
        for listener in self.all:
            listener.end()


class Listener:
    """
    One call of GET /events, as an ASGI application. A client that reads so slowly that its next
    line was dropped goes on from the first one that is kept: a snapshot.
    """

    def __init__(self, listeners: Listeners, key: str):
        self.listeners = listeners
        self.key = key
        self.own: set[int] = set()  # the requests of the key, by their numbers
        self.num_sent = 0  # lines, those that were dropped included
        self.is_over = False
        self.changed = asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.listeners.enter(self)
        self.changed.set()  # there may be a history
        watcher = asyncio.create_task(self.watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            while body := await self.next_event():
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            watcher.cancel()
            self.listeners.leave(self)

    async def watch(self, receive):
        """End when the client hangs up, which ASGI reports only when it is asked."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end()

    def end(self):
        """Send the lines that have come, and no more."""
        self.is_over = True
        self.changed.set()

    async def next_event(self) -> bytes:
        """The next lines, or a ping if none have come for PING_SECONDS; b"" at the end."""
        while not (lines := self.next_lines()):
            if self.is_over:
                return b""
            self.changed.clear()
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self.changed.wait()
            except TimeoutError:
                return PING
        if self.key:  # without API keys nothing is hidden
            lines = [orjson.dumps(self.view(orjson.loads(line))).decode() for line in lines]
        return f"data: [{','.join(lines)}]\n\n".encode()

    def next_lines(self) -> list[str]:
        start = max(0, self.num_sent - self.listeners.num_dropped)
        lines = self.listeners.lines[start : start + LINES_AN_EVENT]
        self.num_sent = self.listeners.num_dropped + start + len(lines)
        return lines

    def view(self, line: dict) -> dict:
        """The line, now without texts and names of other keys."""
        if line["event"] == "snapshot":  # of another engine, perhaps, whose numbers begin again
            self.own.clear()
        for request in [*line.get("requests", ()), *line.get("new", ())]:
            hidden = {"key"}
            if request["key"] == self.key:
                self.own.add(request["r"])
            else:
                hidden |= {"name", "tokens"}
            for name in hidden & request.keys():
                del request[name]
        if "tokens" in line:
            line["tokens"] = [[r, token] for r, token in line["tokens"] if r in self.own]
        self.own -= {r for r, *_ in line.get("ended", [])}
        return line


# --------------------------------------------------------------------------------------------------
# The page


@cache
def page() -> str:
    """The page at /, as HTML: the files of page/ and the tour's record, joined to one document."""
    folder = Path(__file__).with_name("page")
    html, style, *scripts = (folder.joinpath(name).read_text(encoding="utf-8") for name in PAGE)
    html = html.replace("<style></style>", f"<style>\n{style}</style>")
    html = html.replace("<script></script>", "<script>\n{}</script>".format("\n".join(scripts)))
    if not TOUR.exists():
        return html
    return with_record(html, "tour-lines", TOUR.read_text(encoding="utf-8"))


def page_with_record(record: str) -> str:
    """The page as one file with a record inside, to be hosted anywhere, its policy included."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{content_policy(page())}">'
    html = page().replace("<style>", f"{policy}\n<style>", 1)
    return with_record(html, "record", record)


def with_record(html: str, name: str, record: str) -> str:
    """The page with a record's lines in an element of this name, before the script that reads it"""
    # in JSON a "<" is in a text; as it stands there "</script>" would end the element
    lines = record.replace("<", "\\u003c")
    element = f'<script type="application/json" id="{name}">{lines}</script>'
    return html.replace("<script>", f"{element}\n<script>", 1)


def content_policy(html: str) -> str:
    """
    The Content Security Policy of the page: nothing runs but its own script, and nothing is asked
    for but from its own origin.
    """
    script, style = (hash_of(html, element) for element in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def hash_of(html: str, element: str) -> str:
    """How a Content Security Policy names the one element of this kind, by its content."""
    content = html.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(sha256(content.encode()).digest()).decode()}'"


def page_headers(html: str) -> dict[str, str]:
    """With its policy; and no other page frames it (clickjacking)."""
    return {
        "Content-Security-Policy": f"{content_policy(html)}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
