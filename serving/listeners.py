"""
GET /events: what the engine does, as server-sent events, for the page at / and whoever else asks.

    listeners = Listeners(client, tokens=False)
    app = listeners.join("key 0")           # an ASGI application: the answer to one call

Not run by itself: api.py has the path. events.py tells what happens, at most ten times a second; an
event is a list of its lines. Token ids are texts: they are told only under --log-requests. And what
the requests of other API keys are called, or say, is told to nobody.
"""

import asyncio
import json

from serving.answers import EVENTS, PING, PING_SECONDS
from serving.client import EngineClient
from serving.links import compact_json
from serving.protocol import ApiError

MAX_LISTENERS = 16  # of an HTTP process
MAX_UNSENT = 2**22  # characters that wait for a slow client; for more, it gets a snapshot


class Listeners:
    """All calls of GET /events that this HTTP process answers. The engine tells only if some do."""

    def __init__(self, client: EngineClient, tokens: bool):
        self.client = client
        self.tokens = tokens
        self.all: set[Listener] = set()
        client.on_events = self.tell

    def join(self, key: str) -> "Listener":
        """A new listener, which may read what belongs to this key. Raises ApiError (429)."""
        if len(self.all) >= MAX_LISTENERS:
            message = f"{MAX_LISTENERS} clients listen already: close one, or try again later"
            raise ApiError(429, message, code="too_many_listeners")
        return Listener(self, key)

    def leave(self, listener: "Listener"):
        self.all.discard(listener)
        if not self.all:
            self.client.listen(False)

    def tell(self, lines: str, is_snapshot: bool):
        """Lines of JSON, with commas between them."""
        for listener in self.all:
            listener.add(lines, is_snapshot)

    def start_again(self):
        """There is another engine, of which no listener knows anything."""
        for listener in self.all:
            listener.fall_behind()

    def end(self):
        """The server stops, and with it all streams."""
        for listener in self.all:
            listener.end()


class Listener:
    """
    One call of GET /events, as an ASGI application. While its client reads slowly, lines gather; a
    client that falls behind too far misses them, and goes on from a snapshot.
    """

    def __init__(self, listeners: Listeners, key: str):
        self.listeners = listeners
        self.key = key
        self.own: set[int] = set()  # the requests of the key, by their numbers
        self.lines: list[str] = []  # not sent yet
        self.is_behind = True  # until a snapshot comes
        self.is_over = False
        self.changed = asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.listeners.all.add(self)
        self.fall_behind()
        watcher = asyncio.create_task(self.watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            while not self.is_over:
                body = await self.next_event()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            watcher.cancel()
            self.listeners.leave(self)

    async def watch(self, receive):
        """ASGI says only when it is asked that the client hangs up."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end()

    def end(self):
        self.is_over = True
        self.changed.set()

    async def next_event(self) -> bytes:
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self.changed.wait()
        except TimeoutError:
            return PING
        self.changed.clear()
        lines = ",".join(self.lines)
        self.lines = []
        return f"data: [{lines}]\n\n".encode() if lines else b""

    def add(self, lines: str, is_snapshot: bool):
        """Take in what the engine has told. Without API keys nothing of it is hidden."""
        if is_snapshot != self.is_behind:
            return  # a snapshot for another listener; lines that its own snapshot will cover
        self.is_behind = False
        if self.key:
            lines = ",".join(compact_json(self.view(line)) for line in json.loads(f"[{lines}]"))
        self.lines.append(lines)
        # a snapshot is never too large, or it would be asked for again and again
        if sum(map(len, self.lines)) > MAX_UNSENT and not is_snapshot:
            self.fall_behind()
        self.changed.set()

    def fall_behind(self):
        """Forget what was not sent, and ask the engine for a snapshot."""
        self.lines = []
        self.is_behind = True
        self.listeners.client.listen(True, self.listeners.tokens)

    def view(self, line: dict) -> dict:
        """The line, without what belongs to other keys."""
        shown = dict(line)
        if line["event"] == "snapshot":
            self.own.clear()
        for name in ("requests", "new"):
            if name in line:
                shown[name] = [self.view_request(r) for r in line[name]]
        if "tokens" in line:
            shown["tokens"] = [[r, token] for r, token in line["tokens"] if r in self.own]
        self.own -= {r for r, *_ in line.get("ended", [])}
        return shown

    def view_request(self, request: dict) -> dict:
        hidden = {"key"}
        if request["key"] == self.key:
            self.own.add(request["r"])
        else:
            hidden |= {"name", "tokens"}
        return {name: value for name, value in request.items() if name not in hidden}
