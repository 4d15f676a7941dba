"""
Which calls are let in: API keys, host names, origins of web pages; and the log, a line a call.

    uvicorn.Config(Gate(service), http=Connection)      # the Service of api.py answers what passes

Not run by itself: `Service.run` makes the Gate, which is the ASGI application of an HTTP process.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import sys
import time

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request

from serving.connection import check_head, closing_early
from serving.protocol import ApiError, ClientGone, error_response

OPEN_PATHS = ("/livez", "/readyz", "/")  # for supervisors and newcomers: they need no key
STOPPED = "the server stopped before this was finished"


def log(event: str, **fields):
    """One line of JSON on stderr: nothing that a client sends can look like a line of its own."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
    print(line, file=sys.stderr, flush=True)


class Gate:
    """
    The ASGI application: lets calls in, gives errors the one shape that all have, and writes a line
    of log for each call.
    """

    def __init__(self, service):
        self.service = service
        self.args = service.args
        self.salts = {}  # of prefix caches, by the digest of the key
        for number, key in enumerate(service.keys):
            self.salts[hashlib.sha256(key.encode()).digest()] = f"key {number}"
        hosts = ["localhost", self.args.host, *self.args.allowed_hosts]
        self.hosts = set(map(str.lower, hosts))
        # CORS: pages of --allowed-origins may read answers, errors included. Their preflights
        # (OPTIONS, to ask whether they may) carry no key: they are answered before it is checked.
        self.cors = CORSMiddleware(
            self.respond,
            allow_origins=self.args.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
            allow_private_network=True,
        )

    async def __call__(self, scope, receive, send):
        """Answer a call; where it comes from a page of an allowed origin, with CORS headers."""
        receive, send = closing_early(scope, receive, send)
        origin = dict(scope["headers"]).get(b"origin")
        respond = self.cors if self.is_allowed(origin) else self.respond
        await respond(scope, receive, send)

    async def respond(self, scope, receive, send):
        """
        Answer a call that may come in; where something is raised, send its error instead. Count and
        log the call when it has ended.
        """
        started = time.perf_counter()
        status = 200
        error = None
        # what the log is to say of this call; its answer adds more
        logged = {"method": scope["method"], "path": scope["path"][:200], "id": scope["request_id"]}
        scope["logged"] = logged
        try:
            check_head(scope["headers"])
            scope["salt"] = self.admit(scope)
            answer = await self.service.answer_to(Request(scope, receive))
            await answer(scope, receive, send)
            error = getattr(answer, "error", None)  # of a stream that had begun
        except (Exception, asyncio.CancelledError) as problem:
            error = refusal_of(problem, scope)
            status = error.status
            if not isinstance(error, ClientGone):
                await error_response(error)(scope, receive, send)
            if status == 500 and error is not problem:
                raise  # a bug: uvicorn logs its traceback
        finally:
            logged["ms"] = round(1000 * (time.perf_counter() - started), 1)
            if error:
                logged["error"] = error.reason
            self.note_end(scope["client"], status, logged)

    def note_end(self, client, status, logged):
        """Count and log what has ended: a call, or a connection that did not speak HTTP."""
        self.service.metrics.count_answer(status)
        if self.args.access_log and logged.get("path") not in OPEN_PATHS:
            log("access", client=client and client[0], status=status, **logged)

    def is_allowed(self, origin) -> bool:
        """
        Whether --allowed-origins has the origin of the page that calls. "null", that of files and
        of sandboxed frames, is one like any other; None, of programs that are no browser, is not.
        """
        return origin is not None and self.cors.is_allowed_origin(origin.decode("latin-1"))

    def admit(self, scope) -> str:
        """
        Check the Host, the Origin and the API key: raises ApiError (401, 403). Returns the salt of
        the key's part of the prefix cache, "" where there are no keys: keys share no prompts.
        """
        headers = dict(scope["headers"])
        self.check_host(host_name(headers.get(b"host", b"")))
        self.check_origin(scope["scheme"], headers)
        if not self.salts or scope["path"] in OPEN_PATHS:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else b""
        for digest, salt in self.salts.items():
            if hmac.compare_digest(digest, given):
                return salt
        message = "send a valid API key: Authorization: Bearer KEY"
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=headers)

    def check_host(self, host: str):
        """
        Against DNS rebinding: a web page can point a host name of its own at 127.0.0.1, so without
        an API key only known names are served. Raises ApiError (403).
        """
        if not (self.salts or host in self.hosts or is_address(host)):
            message = f"the Host {host!r:.200} is not served here: --allowed-hosts adds names"
            raise ApiError(403, message)

    def check_origin(self, scheme, headers):
        """
        Against CSRF: raises ApiError (403) for a page of another origin (scheme, host and port)
        than ours and those allowed.
        """
        origin = headers.get(b"origin")
        ours = scheme.encode() + b"://" + headers.get(b"host", b"")
        if origin is None or origin.lower() == ours.lower() or self.is_allowed(origin):
            return
        name = origin.decode("latin-1")[:200]
        raise ApiError(
            403,
            f"pages of another origin, {name!r}, are not served here: --allowed-origins {name} "
            "would let them in",
        )


def refusal_of(problem, scope) -> ApiError:
    """The error that a client gets when this exception has ended its call."""
    match problem:
        case ApiError():
            return problem
        case ClientDisconnect():
            return ClientGone()
        case asyncio.CancelledError():  # the server stops
            is_unread = "is_last" in scope  # the answer has begun: the client does not read it
            return ClientGone() if is_unread else ApiError(503, STOPPED, code="stopping")
        case _:
            return ApiError(500, f"a bug of this server: {type(problem).__name__}")


def host_name(value: bytes) -> str:
    """The name in a Host header: without the port, and without the brackets of an IPv6 address."""
    text = value.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] or text


def is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False
