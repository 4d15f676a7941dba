"""
What answers a path, for any service behind the Gate; and the smallest service: the page with a
record to replay, without a model.

    site = ReplaySite(args, keys)               # python serve.py --replay FILE
    problem = run_on_loop(site.run(sock))

Not run by itself: serve.py starts a ReplaySite, and in each HTTP process the `Service` of api.py,
which is a Site, too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, ClassVar, NamedTuple

import uvicorn
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from serving import protocol, welcome
from serving.connection import Connection
from serving.gate import Gate
from serving.metrics import Metrics
from serving.protocol import ApiError
from serving.record import RecordError
from serving.replay import open_record
from serving.workers import Seat

LINGER_SECONDS = 2  # when the server stops, how long clients have to send or to fetch what is left
MODEL_PATH = "/v1/models/"  # before a model's name, which may have slashes of its own
CHUNK = 2**18  # bytes of a record that are read at a time


class Route(NamedTuple):
    """What answers a path: a method of the site, which gets the body where there is one."""

    handler: Callable
    fields: str = ""  # of the answer's JSON
    body: type[protocol.Body] | None = None
    text: str = ""  # the media type of an answer that is no JSON


class Site:
    """
    What the Gate and the connections ask for: the flags, the API keys, the place of this HTTP
    process among all, the counts of answers, and what answers a call.
    """

    routes: ClassVar[dict[str, Route]] = {}  # "GET /path" -> its route

    def __init__(self, args, keys: list[str], name: str, seat: Seat | None = None):
        self.args = args
        self.keys = keys
        self.seat = seat or Seat()
        self.metrics = Metrics(name)

    async def answer_to(self, http):
        """The ASGI application that answers a call. Raises ApiError."""
        route = self.route(http.method, http.scope["path"])
        bodies = [await self.parse_body(http, route.body)] if route.body else []
        return await route.handler(self, http, *bodies)

    def route(self, method: str, path: str) -> Route:
        """Raises ApiError (404, 405) that says what to call instead."""
        is_model = path.startswith(MODEL_PATH) and path != MODEL_PATH
        known = "/v1/models/{id}" if is_model else path
        if route := self.routes.get(f"{'GET' if method == 'HEAD' else method} {known}"):
            return route  # to HEAD, uvicorn sends the headers alone
        calls = [call.split() for call in self.routes]
        message = welcome.not_found(method, path, calls)
        methods = [method for method, other in calls if other == known]
        if not methods:
            raise ApiError(404, message)
        if "GET" in methods:
            methods.append("HEAD")
        raise ApiError(405, message, headers={"Allow": ", ".join(methods)})

    async def show_page(self, http):
        """The page is the same for all: it asks for the key, and for what happens, by itself."""
        page = welcome.page()
        return Response(page, headers=welcome.page_headers(page), media_type="text/html")

    def make_server(self, on_signal: Callable) -> uvicorn.Server:
        """The HTTP server in front of this site; signals are for on_signal."""
        config = uvicorn.Config(
            Gate(self),
            http=Connection,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=LINGER_SECONDS,
        )
        server = uvicorn.Server(config)
        server.handle_exit = on_signal
        return server


def chunks(file: BinaryIO) -> Iterator[bytes]:
    """All of a file, which is closed with the last of it, or with the answer that it is for."""
    with file:
        yield from iter(partial(file.read, CHUNK), b"")


class ReplaySite(Site):
    """The page, and the record of --replay: it may have texts in it, so it is behind the key."""

    def __init__(self, args, keys: list[str]):
        super().__init__(args, keys, args.replay)

    async def show_page(self, http):
        if "replay" not in http.query_params:
            return RedirectResponse("./?replay=record")  # relative: a proxy may add a path
        return await super().show_page(http)

    async def show_record(self, http):
        """In chunks: it may be larger than the memory, and still grow."""
        try:
            file = open_record(self.args.replay)
        except RecordError as error:  # somebody has taken it away
            raise ApiError(404, str(error)) from None
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        return StreamingResponse(chunks(file), headers=headers, media_type="application/jsonl")

    async def show_liveness(self, http):
        return JSONResponse({"status": "alive"})

    routes: ClassVar = {
        "GET /": Route(show_page, text="text/html"),
        "GET /record": Route(show_record, text="application/jsonl"),
        "GET /livez": Route(show_liveness, "status"),
    }

    async def run(self, sock):
        """Serve until a signal."""
        server = self.make_server(lambda *_: setattr(server, "should_exit", True))
        print(f"showing {self.args.replay} at {welcome.base_url(sock)}", flush=True)
        await server.serve(sockets=[sock])
