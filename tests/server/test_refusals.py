"""Calls that are refused over HTTP: the status, and words that say what to change."""

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest
from fake_server import Server, error_of, read_until, text_of, wait_until
from starlette.requests import Request

import serve
from server import app
from server.protocol import ApiError, CompletionRequest

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")

JSON = "application/json"
NO_OBJECT = "the body must be a JSON object"
NO_TYPE = "the body must be JSON, sent with the header Content-Type: application/json"
TOO_LONG = "the body has more than 104857 bytes: shorten it or raise --max-body-mib"
NOT_JSON = "the body is not JSON: "
DEEP = b"[" * 90_000
BODIES = [  # media type, body, status, how the message begins
    (JSON, b'{"prompt": ', 400, f"{NOT_JSON}EOF while parsing a value at line 1 column 11"),
    (JSON, b"", 400, NOT_JSON),
    (JSON, b"[1]", 400, NO_OBJECT),
    (JSON, b"null", 400, NO_OBJECT),
    (JSON, b'{"prompt": "\xff"}', 400, NOT_JSON),
    (JSON, b'{"prompt": "\\ud800"}', 400, NOT_JSON),  # half a character
    (JSON, b'{"prompt": "a", "\\udc00": 1}', 400, NOT_JSON),
    (JSON, b'{"prompt": "a", "seed": 18446744073709551616}', 400, "seed: input should be "),
    (JSON, b'{"prompt": "a", "seed": %b}' % (b"9" * 5000), 400, f"{NOT_JSON}number out of range"),
    (JSON, b'{"prompt": [18446744073709551616]}', 400, "token id 18446744073709551616 is outside"),
    (JSON, DEEP, 400, f"{NOT_JSON}recursion limit exceeded"),
    (JSON, b'{"prompt": "a", "user": %b' % DEEP, 400, f"{NOT_JSON}recursion limit exceeded"),
    (JSON, b'{"prompt": "a", "top_p": NaN}', 400, "top_p: input should be a finite number"),
    (JSON, b'{"prompt": "a", "top_p": -Infinity}', 400, "top_p: input should be a finite number"),
    (JSON, b'{"prompt": "a", "model": "%b"}' % (b"x" * 90_000), 404, "there is no model 'xxx"),
    (JSON, b" " * 110_000, 413, TOO_LONG),
    ("Application/JSON; charset=utf-8", b"[1]", 400, NO_OBJECT),
    ("", b'{"prompt": "a"}', 400, NO_TYPE),
    ("text/plain", b'{"prompt": "a"}', 400, NO_TYPE),
    ("application/jsonp", b'{"prompt": "a"}', 400, NO_TYPE),
    ("application/json-seq; charset=utf-8", b'{"prompt": "a"}', 400, NO_TYPE),
]  # fmt: skip


@pytest.mark.parametrize("media_type, body, status, message", BODIES)
def test_bodies_that_are_refused(server, media_type, body, status, message):
    headers = {"content-type": media_type} if media_type else {}
    response = server.http.post("/v1/completions", headers=headers, content=body)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error" and error["message"].startswith(message)
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    "sizes, fits", [([10], True), ([6, 4], True), ([11], False), ([6, 5], False), ([4] * 9, False)]
)
def test_a_body_is_counted_as_it_comes(sizes, fits):
    """A chunked one announces no length; reading stops with the part that exceeds the limit."""
    parts = iter(sizes)
    read = []

    async def receive():
        read.append(next(parts))
        more = sum(read) < sum(sizes)
        return {"type": "http.request", "body": b" " * read[-1], "more_body": more}

    args = serve.parse_args(["--max-body-mib", str(10 / 2**20)])
    service = SimpleNamespace(args=args, check_ready=lambda: None)
    http = Request({"type": "http", "headers": [(b"content-type", JSON.encode())]}, receive)
    with pytest.raises(ApiError) as caught:
        asyncio.run(app.Service.parse_body(service, http, CompletionRequest))
    assert sum(read[:-1]) <= 10
    status, message = (400, NOT_JSON) if fits else (413, "the body has more than 10 bytes")
    assert caught.value.status == status and caught.value.message.startswith(message)


LONG = "this model's maximum context length is 100000 tokens, 4 prompt tokens and max_tokens 99,997"
REFUSED = [  # fields, status, param, code, how the message begins
    ({"model": "gpt-5"}, 404, "model", "model_not_found", "there is no model 'gpt-5' here; there"),
    ({"model": ""}, 404, "model", "model_not_found", "there is no model '' here; there is 'fake'"),
    ({"prompt": "a\0b"}, 400, "prompt", None, "character '\\x00' is not in the vocabulary"),
    ({"prompt": [1, 257]}, 400, "prompt", None, "token id 257 is outside the vocabulary, 0..256"),
    ({"stop_token_ids": [300]}, 400, "stop_token_ids", None, "token id 300 is outside"),
    (
        {"prompt": "abcd", "max_tokens": 99_997}, 400, "max_tokens", "context_length_exceeded",
        f"{LONG} make 100,001: shorten the prompt or lower max_tokens",
    ),
    ({"prompt": ["a"] * 17}, 400, "prompt", None, "17 prompts x n in one call, at most 16 are"),
    ({"prompt": "invalid"}, 400, None, None, "the engine finds this invalid"),
    ({"prompt": ["loop", "invalid"]}, 400, None, None, "the engine finds this invalid"),
    ({"prompt": "internal"}, 500, None, None, "the engine finds this internal"),
    ({"prompt": "full"}, 429, None, "queue_full", "the engine finds this full"),
]  # fmt: skip


@pytest.mark.parametrize("fields, status, param, code, message", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_are_refused(server, fields, status, param, code, message, stream):
    """A stream is refused with the same status: its headers wait for the first event."""
    response = server.post(stream=stream, **fields)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"].startswith(message)
    assert response.headers.get("retry-after") == ("1" if status == 429 else None)
    wait_until(lambda: not server.engine.running)  # a bad prompt ends the others


def test_too_many_prompts_are_counted_before_they_are_encoded(server, monkeypatch):
    """To encode 800,000 prompts, 4 MB, held up all clients for 5 s."""
    monkeypatch.setattr(server.service, "encode", lambda request: 1 / 0)
    response = server.post(["a"] * 17)
    assert response.status_code == 400 and error_of(response)["message"].startswith("17 prompts")


def test_an_error_after_the_headers_ends_the_stream(server):
    """Too late for a status: it is the last event, without [DONE]."""
    *events, end = server.stream("break")
    assert text_of(events) == "xx"
    assert end["error"]["message"] == "the step failed" and end["error"]["type"] == "server_error"


def test_a_bug_has_the_shape_of_an_error():
    """The client gets JSON that its library can read, and no internals."""
    with Server() as server:
        server.service.encode = lambda request: {}["a bug"]
        response = server.post()
        assert response.status_code == 500
        error = error_of(response)
        assert error["message"] == "a bug of this server: KeyError"
        assert error["type"] == "server_error"


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET /livez HTTP/1.1\r\nHost localhost\r\n\r\n"]
)
def test_bytes_that_are_not_http_get_an_error_in_json(server, data):
    """It was uvicorn's own plain text."""
    with socket.create_connection(server.address, timeout=30) as sock:
        sock.sendall(data)
        head, _, body = read_until(sock, b"no such end").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    for field in (b"content-type: application/json", b"content-length: %d" % len(body)):
        assert field in head
    error = {"message": "Invalid HTTP request received.", "type": "invalid_request_error"}
    assert json.loads(body) == {"error": error | {"param": None, "code": None}}
    assert b"\r\nx-request-id: " in head
