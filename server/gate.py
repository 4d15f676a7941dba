"""
Which calls are let in: API keys, host names, origins of web pages; and the log, a line a call.

    uvicorn.Config(Gate(service), http=Connection)      # app.py's Service answers what passes

Not run by itself: the Service makes the Gate, which is the ASGI application of the HTTP process.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import sys
import time

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from common import plural, say
from server.connection import check_head, close_after_early_answer
from server.protocol import ApiError, ClientGone, error_response

LINGER_SECONDS = 2  # when the server stops, how long clients have to send or to fetch what is left
OPEN_PATHS = ("/livez", "/readyz", "/health", "/")  # for supervisors and newcomers: without a key
UNLOGGED_PATHS = (*OPEN_PATHS, "/v1/loads")  # supervisors and routers ask every second
# The page at / calls these by itself: on a terminal they would drown the calls of a user.
PAGE_PATHS = ("/events", "/v1/models", "/tokenize", "/detokenize")
STOPPED = "the server stopped before this was finished"


def log(event: str, **fields):
    """
    One line on stderr, JSON unless that is a terminal: nothing that a client sends can look like a
    line of its own.
    """
    if sys.stderr.isatty():
        line = f"{time.strftime('%H:%M:%S')} {short(event, fields)}"
    else:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
    say(line)


def short(event: str, fields: dict) -> str:
    """Shorten an event for a reader at a terminal: "POST /v1/completions 200 0.8 s 64 tokens"."""
    if event == "access":
        words = [str(fields[name]) for name in ("method", "path", "status") if name in fields]
        if "ms" in fields:
            words.append(f"{fields['ms'] / 1000:.1f} s")
        if "tokens" in fields:
            words.append(plural(fields["tokens"], "token"))
        if "error" in fields:
            words.append(f"({fields['error']})")
    else:
        words = [event.replace("_", " "), *(f"{name}={value}" for name, value in fields.items())]
    return ascii(" ".join(words))[1:-1]  # without line ends, and what else steers a terminal


class Gate:
    """
    The ASGI application: lets calls in, gives errors the one shape that all have, and writes a line
    of log for each call.
    """

    def __init__(self, service):
        self.service = service
        self.args = service.args
        self.unlogged = UNLOGGED_PATHS + PAGE_PATHS if sys.stderr.isatty() else UNLOGGED_PATHS
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
            expose_headers=("x-request-id", "retry-after", "x-unheld-tools"),
            allow_private_network=True,
        )

    async def __call__(self, scope, receive, send):
        """Answer a call; where it comes from a page of an allowed origin, with CORS headers."""
        limit = 2 * self.args.max_body_mib * 2**20
        receive, send = close_after_early_answer(scope, receive, send, limit)
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
        call = scope["call"]
        logged = call.logged
        logged |= {"method": scope["method"], "path": scope["path"][:200], "id": call.id}
        scope["app"] = self  # so that the router raises HTTPException
        try:
            check_head(scope["headers"])
            call.salt = self.admit(scope)
            await self.service.router(scope, receive, send)
            error = call.job and call.job.error  # of a stream that had begun
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
                # whose frames hold this error, and megabytes of prompts until garbage is collected
                error.__traceback__ = None
            self.note_end(scope["client"], status, logged)

    def note_end(self, client, status, logged):
        """Count and log what has ended: a call, or a connection that did not speak HTTP."""
        self.service.metrics.count_answer(status)
        if self.args.access_log and logged.get("path") not in self.unlogged:
            log("access", client=client and client[0], status=status, **logged)

    def is_allowed(self, origin) -> bool:
        """
        Return whether --allowed-origins has the origin of the page that calls. "null", the origin
        of files and of sandboxed frames, is an origin like any other. None, from a program that is
        no browser, is not.
        """
        return origin is not None and self.cors.is_allowed_origin(origin.decode("latin-1"))

    def admit(self, scope) -> str:
        """
        Check the Host, the Origin and the API key: raises ApiError (401, 403). Returns the salt of
        the key's part of the prefix cache, "" where there are no keys: keys share no prompts.
        """
        headers = dict(scope["headers"])
        self.check_host(headers.get(b"host", b"").decode("latin-1"))
        self.check_origin(scope["scheme"], headers)
        if not self.salts or scope["path"] in OPEN_PATHS:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        sent = hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" else b""
        for digest, salt in self.salts.items():
            if hmac.compare_digest(digest, sent):
                return salt
        message = "send a valid API key: Authorization: Bearer KEY"
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=headers)

    def check_host(self, host: str):
        """
        Against DNS rebinding: a web page can point a host name of its own at 127.0.0.1, so without
        an API key only known names are served. Raises ApiError (403).
        """
        name = host_name(host)
        if not (self.salts or name in self.hosts or is_address(name)):
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
        case HTTPException(status_code=405):  # of the router, like the next
            allowed = " or ".join(sorted(problem.headers["Allow"].split(", ")))
            message = f"{scope['path']:.200} is for {allowed}, not {scope['method']}"
            return ApiError(405, message, headers=problem.headers)
        case HTTPException():
            return ApiError(problem.status_code, not_found(scope), headers=problem.headers)
        case ClientDisconnect():
            return ClientGone()
        case asyncio.CancelledError():  # the server stops
            if scope["call"].has_answer:  # the client does not read it
                return ClientGone()
            return ApiError(503, STOPPED, code="stopping")
        case _:
            return ApiError(500, f"a bug of this server: {type(problem).__name__}")


def not_found(scope) -> str:
    """The message for a path that nothing answers."""
    path = scope["path"]
    paths = [route.path_format for route in scope["router"].routes]
    hint = f"there is {', '.join(paths)}"
    name = "/".join(part for part in path.split("/") if part not in ("", "v1"))
    if f"/v1/{name}" in paths:
        hint = f"call /v1/{name}, a base URL ends in /v1"
    elif name and f"/{name}" in paths:
        hint = f"call /{name}"
    return f"there is no {scope['method']} {path:.200} here; {hint}"


def host_name(host: str) -> str | None:
    """
    The name in a Host header, without the port and the brackets of an IPv6 address. None for what
    is no Host, such as a name with a user before it.
    """
    found = re.fullmatch(r"(?:\[([0-9a-f.]*:[0-9a-f.:]*)\]|([a-z0-9._-]+))(:[0-9]*)?", host.lower())
    return found and (found[1] or found[2])


def is_address(host: str | None) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def base_url(sock) -> str:
    """The address to open, on this machine where the server listens at all."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
