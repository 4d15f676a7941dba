"""Calls that are refused: with which status, and in words that say what to change."""

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest
from server import Server, error_of, read_until, text_of, wait_until
from starlette.requests import Request

import serve
from serving import api
from serving.protocol import ApiError, CompletionRequest

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


JSON = {"content-type": "application/json"}


NO_TYPE = "the body must be JSON, sent with the header Content-Type: application/json"


NOT_JSON = "the body is not JSON: {} at line 1 column {}"


TOO_LONG = "the body has more than 104857 bytes: shorten it or raise --max-body-mib"


NO_MODEL = "there is no model {!r} here; there is 'fake'"
NO_TOKEN = "token id {} is outside the vocabulary, 0..256"
POST, GET = ("POST", "/v1/completions"), ("GET", "/v1/completions")


def nowhere(call, instead):
    return f"there is no {call} here; call {instead}; /openapi.json lists what there is"


@pytest.mark.parametrize(
    "call, headers, body, status, message",
    [
        (POST, JSON, b'{"prompt": ', 400, NOT_JSON.format("EOF while parsing a value", 11)),
        (POST, JSON, b"", 400, NOT_JSON.format("EOF while parsing a value", 0)),
        (POST, JSON, b"[1]", 400, "the body must be a JSON object"),
        (POST, JSON, b"null", 400, "the body must be a JSON object"),
        (POST, {}, b'{"prompt": "a"}', 400, NO_TYPE),
        (POST, {"content-type": "text/plain"}, b'{"prompt": "a"}', 400, NO_TYPE),
        (
            POST,
            {"content-type": "Application/JSON; charset=utf-8"},
            b"[1]",
            400,
            "the body must be a JSON object",
        ),
        (POST, JSON, b'{"prompt": "\xff"}', 400, NOT_JSON.format("invalid unicode code point", 13)),
        (
            POST,
            JSON,
            b'{"seed": ' + b"9" * 5000 + b"}",
            400,
            NOT_JSON.format("number out of range", 4311),
        ),
        (POST, JSON, b"[" * 90_000, 400, NOT_JSON.format("recursion limit exceeded", 202)),
        (
            POST,
            JSON,
            b'{"prompt": "a", "top_p": NaN}',
            400,
            "top_p: input should be a finite number, got nan",
        ),
        (POST, JSON, b'{"prompt": "a", "\\ud800": 1}', 400, None),  # half a character is no JSON
        (POST, JSON, b'{"prompt": "\\ud800"}', 400, None),
        (POST, JSON, b" " * 110_000, 413, TOO_LONG),
        (POST, {"content-type": "application/jsonp"}, b'{"prompt": "a"}', 400, NO_TYPE),
        (
            POST,
            {"content-type": "application/json-seq; charset=utf-8"},
            b'{"prompt": "a"}',
            400,
            NO_TYPE,
        ),
        (GET, {}, b"", 405, nowhere("GET /v1/completions", "POST /v1/completions")),
        (
            ("POST", "/v1/completion"),
            JSON,
            b"{}",
            404,
            nowhere("POST /v1/completion", "POST /v1/completions"),
        ),
        (("GET", "/v1/models/"), {}, b"", 404, nowhere("GET /v1/models/", "GET /v1/models")),
    ],
)
def test_bad_calls_are_told_what_is_wrong(server, call, headers, body, status, message):
    response = server.http.request(*call, headers=headers, content=body)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error" and error["message"] == (
        message or error["message"]
    )


def test_chunked_body_is_refused_too(server):
    """It announces no length."""
    parts = (b" " * 1000 for _ in range(1000))
    assert server.http.post("/v1/completions", headers=JSON, content=parts).status_code == 413


@pytest.mark.parametrize(
    "sizes, fits", [([10], True), ([6, 4], True), ([11], False), ([6, 5], False), ([4] * 9, False)]
)
def test_body_is_counted_as_it_comes(sizes, fits):
    """
    What counts is the sum of the parts, at most the limit; reading stops with the part that exceeds
    it.
    """
    parts, read = iter(sizes), []

    async def receive():
        read.append(next(parts))
        return {
            "type": "http.request",
            "body": b" " * read[-1],
            "more_body": sum(read) < sum(sizes),
        }

    service = SimpleNamespace(
        args=serve.parse_args(["--max-body-mib", str(10 / 2**20)]), check_ready=lambda: None
    )
    http = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
    with pytest.raises(ApiError) as caught:
        asyncio.run(api.Service.parse_body(service, http, CompletionRequest))
    assert sum(read[:-1]) <= 10
    wanted = (400, "the body is not JSON") if fits else (413, "the body has more than 10 bytes")
    assert caught.value.status == wanted[0] and caught.value.message.startswith(wanted[1])


@pytest.mark.parametrize(
    "fields, status, param, code, message",
    [
        ({"model": "gpt-5"}, 404, "model", "model_not_found", NO_MODEL.format("gpt-5")),
        ({"model": ""}, 404, "model", "model_not_found", NO_MODEL.format("")),
        ({"prompt": "a\0b"}, 400, "prompt", None, "character '\\x00' is not in the vocabulary"),
        ({"prompt": [1, 257]}, 400, "prompt", None, NO_TOKEN.format(257)),
        ({"prompt": [-1]}, 400, "prompt", None, NO_TOKEN.format(-1)),
        ({"stop_token_ids": [300]}, 400, "stop_token_ids", None, NO_TOKEN.format(300)),
        (
            {"prompt": "abcd", "max_tokens": 99_997},
            400,
            "max_tokens",
            "context_length_exceeded",
            "this model's maximum context length is 100000 tokens, 4 prompt tokens and max_tokens "
            "99997 make 100001: shorten the prompt or lower max_tokens",
        ),
        (
            {"prompt": ["a"] * 17},
            400,
            "prompt",
            None,
            "17 prompts x n in one call, at most 16 are taken: split it",
        ),
        ({"prompt": "invalid"}, 400, None, None, "the engine finds this invalid"),
        ({"prompt": "internal"}, 500, None, None, "the engine finds this internal"),
        ({"prompt": "full"}, 429, None, "queue_full", "the engine finds this full"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests_are_told_why(server, fields, status, param, code, message, stream):
    """A stream is refused with the same status: its headers wait for the first event."""
    response = server.post(stream=stream, **fields)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert (error["param"], error["code"], error["message"]) == (param, code, message)
    assert error["type"] == {429: "rate_limit_error", 500: "server_error"}.get(
        status, "invalid_request_error"
    )
    assert response.headers.get("retry-after") == ("1" if status == 429 else None)


def test_too_many_prompts_are_counted_before_they_are_encoded(server, monkeypatch):
    """
    A body of 4 MB holds 800,000 prompts; encoding them to say that they are too many held all
    clients up for 5 s.
    """
    monkeypatch.setattr(server.service, "encode", lambda request: 1 / 0)
    response = server.post(["a"] * 17)
    assert response.status_code == 400 and error_of(response)["message"].startswith("17 prompts")


@pytest.mark.parametrize("fields", [{"model": "x" * 90_000}, {"x" * 90_000: 1}])
def test_refusals_quote_little(server, fields):
    """The answer to a model's or a field's name of 4 MB was 4 and 8 MB long."""
    assert len(server.post(**fields).content) < 1000


def test_exactly_what_fits_is_served(server):
    """The positive control of the length check above."""
    assert server.answer("say", max_tokens=100_000 - 3)["choices"][0]["finish_reason"] == "stop"


def test_one_bad_prompt_ends_the_others(server):
    assert server.post(["loop", "invalid"]).status_code == 400
    wait_until(lambda: not server.engine.running)


def test_an_error_after_the_headers_ends_the_stream(server):
    """Too late for a status: the stream tells, and ends without [DONE]."""
    events = server.stream("break")
    assert text_of(events[:-1]) == "xx"
    assert (
        events[-1]["error"]["message"] == "the step failed"
        and events[-1]["error"]["type"] == "server_error"
    )


def test_a_bug_has_the_shape_of_an_error():
    """
    Should a bug of ours slip through, the client still gets JSON that its library can read, and no
    internals.
    """
    with Server() as server:
        server.service.encode = lambda request: {}["a bug"]
        response = server.post()
        assert response.status_code == 500
        assert error_of(response)["message"] == "a bug of this server: KeyError"
        assert error_of(response)["type"] == "server_error"


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET /livez HTTP/1.1\r\nHost localhost\r\n\r\n"]
)
def test_what_is_no_http_gets_an_error_in_json(server, data):
    """It was uvicorn's own plain text."""
    with socket.create_connection(server.address, timeout=30) as sock:
        sock.sendall(data)
        head, _, body = read_until(sock, b"no such end").partition(b"\r\n\r\n")
    assert (
        head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        and b"Content-Type: application/json" in head
    )
    error = {
        "message": "Invalid HTTP request received.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert json.loads(body) == {"error": error} and f"Content-Length: {len(body)}".encode() in head
    assert b"\r\nx-request-id: " in head
