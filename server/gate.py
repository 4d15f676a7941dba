"""
Checks who may call: API keys, host names and the origins of web pages. Logs a line for each call.

    uvicorn.Config(Gate(service), http=Connection)      # app.py's Service answers admitted calls

Not run by itself: the Service creates the Gate, which is the HTTP process's ASGI application.
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

LINGER_SECONDS = 2  # time for clients to finish sending and reading when the server stops
OPEN_PATHS = ("/livez", "/readyz", "/health", "/")  # need no API key, for supervisors and new users
UNLOGGED_PATHS = (*OPEN_PATHS, "/v1/loads")  # called every second by supervisors and routers
# The page at / calls these paths by itself. On a terminal, their lines would bury those of the
# user's own calls.
PAGE_PATHS = ("/events", "/v1/models", "/tokenize", "/detokenize")
STOPPED = "the server stopped before this was finished"


def log(event: str, **fields):
    """
    Write a line to stderr, as JSON unless stderr is a terminal. Clients cannot forge log lines,
    because both formats escape line breaks in client data.
    """
    if sys.stderr.isatty():
        line = f"{time.strftime('%H:%M:%S')} {short(event, fields)}"
    else:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
    say(line)


def short(event: str, fields: dict) -> str:
    """
    Return a short form of an event for a terminal: "POST /v1/completions 200 0.8 s 64 tokens".
    """
    if event == "access":
        parts = [str(fields[name]) for name in ("method", "path", "status") if name in fields]
        if "ms" in fields:
            parts.append(f"{fields['ms'] / 1000:.1f} s")
        if "tokens" in fields:
            parts.append(plural(fields["tokens"], "token"))
        if "error" in fields:
            parts.append(f"({fields['error']})")
    else:
        parts = [event.replace("_", " "), *(f"{name}={value}" for name, value in fields.items())]
    return ascii(" ".join(parts))[1:-1]  # escapes line breaks and terminal control codes


class Gate:
    """
    The ASGI application. It checks who may call, gives all errors the same format, and logs a line
    for each call.
    """

    def __init__(self, service):
        self.service = service
        self.args = service.args
        self.unlogged = UNLOGGED_PATHS + PAGE_PATHS if sys.stderr.isatty() else UNLOGGED_PATHS
        self.salts = {}  # digest of an API key -> its salt for the prefix cache
        for number, key in enumerate(service.keys):
            sent = key.encode(errors="surrogateescape")  # bytes of a flag that are not UTF-8
            self.salts[hashlib.sha256(sent).digest()] = f"key {number}"
        hosts = ["localhost", self.args.host, *self.args.allowed_hosts]
        self.hosts = set(map(str.lower, hosts))
        # CORS: pages from --allowed-origins may read answers, including errors. Before a call, the
        # browser asks for permission (an OPTIONS preflight). A preflight has no API key, so it is
        # answered before keys are checked.
        self.cors = CORSMiddleware(
            self.respond,
            allow_origins=self.args.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after", "x-unheld-tools"),
            allow_private_network=True,
        )

    async def __call__(self, scope, receive, send):
        """Answer a call, with CORS headers if it comes from a page with an allowed origin."""
        limit = 2 * self.args.max_body_mib * 2**20
        receive, send = close_after_early_answer(scope, receive, send, limit)
        origin = dict(scope["headers"]).get(b"origin")
        respond = self.cors if self.is_allowed(origin) else self.respond
        await respond(scope, receive, send)

    async def respond(self, scope, receive, send):
        """
        Answer a call, or send an error if the call is refused or fails. When the call has ended,
        count and log it.
        """
        started = time.perf_counter()
        status = 200
        error = None
        call = scope["call"]
        logged = call.logged
        logged |= {"method": scope["method"], "path": scope["path"][:200], "id": call.id}
        scope["app"] = self  # makes the router raise HTTPException
        try:
            check_head(scope["headers"])
            call.salt = self.admit(scope)
            call.owner = call.salt or (scope["client"][0] if scope["client"] else "")
            await self.service.router(scope, receive, send)
            error = call.job and call.job.error  # set if a stream failed after it started
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
                # The traceback's frames refer to the error itself and to the prompts. This cycle
                # would keep megabytes of prompts in memory until the next garbage collection.
                error.__traceback__ = None
            self.note_end(scope["client"], status, logged)

    def note_end(self, client, status, logged):
        """Count and log a call that has ended, or a connection that was refused."""
        self.service.metrics.count_answer(status)
        if self.args.access_log and logged.get("path") not in self.unlogged:
            log("access", client=client and client[0], status=status, **logged)

    def is_allowed(self, origin) -> bool:
        """
        Return whether --allowed-origins contains this page origin. Files and sandboxed frames have
        the origin "null", which is treated like any other. For None, the caller is not a browser
        and needs no permission, so the result is False.
        """
        return origin is not None and self.cors.is_allowed_origin(origin.decode("latin-1"))

    def admit(self, scope) -> str:
        """
        Check the Host, the Origin and the API key. Returns this key's salt for the prefix cache, so
        that keys do not share cached prompts, or "" without API keys. Raises ApiError (401, 403).
        """
        headers = dict(scope["headers"])
        # load balancers' health checks may use HTTP/1.0, which has no Host; browsers never do
        if b"host" in headers or scope["http_version"] != "1.0":
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
        Raise ApiError (403) for an unknown host name if the server has no API keys. This protects
        against DNS rebinding, in which a web page points its own host name at 127.0.0.1.
        """
        name = host_name(host)
        if not (self.salts or name in self.hosts or is_address(name)):
            message = f"the Host {host!r:.200} is not allowed: add it with --allowed-hosts"
            raise ApiError(403, message)

    def check_origin(self, scheme, headers):
        """
        Raise ApiError (403) for a page whose origin (scheme, host and port) is neither this
        server's nor an allowed one. This protects against CSRF.
        """
        origin = headers.get(b"origin")
        ours = scheme.encode() + b"://" + headers.get(b"host", b"")
        if origin is None or origin.lower() == ours.lower() or self.is_allowed(origin):
            return
        name = origin.decode("latin-1")[:200]
        raise ApiError(
            403,
            f"pages from another origin, {name!r}, are not allowed: --allowed-origins {name} "
            "would allow them",
        )


def refusal_of(problem, scope) -> ApiError:
    """Return the error to send to a client whose call ended with this exception."""
    match problem:
        case ApiError():
            return problem
        case HTTPException(status_code=405):  # this and the next are raised by the router
            allowed = " or ".join(sorted(problem.headers["Allow"].split(", ")))
            message = f"{scope['path']:.200} is for {allowed}, not {scope['method']}"
            return ApiError(405, message, headers=problem.headers)
        case HTTPException():
            return ApiError(problem.status_code, not_found(scope), headers=problem.headers)
        case ClientDisconnect():
            return ClientGone()
        case asyncio.CancelledError():  # the server is stopping
            if scope["call"].has_answer:  # the client is not reading its answer
                return ClientGone()
            return ApiError(503, STOPPED, code="stopping")
        case _:
            return ApiError(500, f"a bug in this server: {type(problem).__name__}")


def not_found(scope) -> str:
    """Return the message for an unknown path, with a hint."""
    path = scope["path"]
    paths = [route.path_format for route in scope["router"].routes]
    hint = f"there is {', '.join(paths)}"
    name = "/".join(part for part in path.split("/") if part not in ("", "v1"))
    if f"/v1/{name}" in paths:
        hint = f"call /v1/{name} (a base URL ends in /v1)"
    elif name and f"/{name}" in paths:
        hint = f"call /{name}"
    return f"there is no {scope['method']} {path:.200} here; {hint}"


def host_name(host: str) -> str | None:
    """
    Return the name in a Host header, without the port and without the brackets of an IPv6 address.
    Return None for an invalid header, such as one with a user name before the host name.
    """
    found = re.fullmatch(r"(?:\[([0-9a-f.]*:[0-9a-f.:]*)\]|([a-z0-9._-]+))(:[0-9]*)?", host.lower())
    return found and (found[1] or found[2])


def is_address(host: str | None) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def base_url(sock) -> str:
    """
    Return the URL to open in a browser. If the server listens on all addresses, return the URL for
    this machine.
    """
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
