"""What newcomers are told, as plain texts: each hint names a path that is there."""

import argparse
import base64
import hashlib

import pytest

from commands import Help
from serving import api, welcome
from serving.protocol import CompletionRequest

ROUTES = [
    *(
        ("POST", path)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    ),
    *(
        ("GET", path)
        for path in (
            "/v1/models",
            "/v1/models/{id}",
            "/",
            "/livez",
            "/readyz",
            "/health",
            "/metrics",
        )
    ),
    ("GET", "/openapi.json"),
]


def test_all_hints_are_of_paths_that_are_there():
    for prefix, call in welcome.INSTEAD.items():
        assert tuple(call.split()) in ROUTES
        for path in (prefix, f"{prefix}/", f"{prefix}/x"):
            said = welcome.not_found("POST", path, ROUTES)
            assert f"there is no POST {path} here; call {call}, as this is OpenAI's API; " in said
        assert call not in welcome.not_found("POST", f"{prefix}x", [])
    assert {call.split()[1] for call, route in api.Service.routes.items() if route.body} <= {
        path for _, path in ROUTES
    }


@pytest.mark.parametrize(
    "path, hint",
    [
        ("/completions", "call /v1/completions, a base URL ends in /v1; "),
        ("/models", "call /v1/models, a base URL ends in /v1; "),
        ("/v1/tokenize", "call POST /tokenize; "),
        ("/v1", "call GET /v1/models; "),
        ("/v1/completion", "call POST /v1/completions; "),
        ("/metric", "call GET /metrics; "),
        ("/nothing/like/it", ""),
        ("/v1/embeddings", "embeddings are not served, vLLM serves them; "),
        ("/api/embed", "embeddings are not served, vLLM serves them; "),
    ],
)
def test_hints(path, hint):
    assert welcome.hint_for(path, ROUTES) == hint
    said = welcome.not_found("GET", path, ROUTES)
    assert said == f"there is no GET {path} here; {hint}/openapi.json lists what there is"


@pytest.mark.parametrize("chats", [False, True])
@pytest.mark.parametrize("key", ["", "K"])
def test_the_example_is_a_call_that_is_served(chats, key):
    url, content_type, *rest = welcome.example_call("http://h:1", chats, key)
    assert url == "curl http://h:1/v1/" + ("chat/completions" if chats else "completions")
    assert content_type == "-H 'Content-Type: application/json'"
    assert rest[:-1] == (['-H "Authorization: Bearer K"'] if key else [])
    body = rest[-1].removeprefix("-d '").removesuffix("'")
    model = api.protocol.ChatRequest if chats else CompletionRequest
    assert model.model_validate_json(body).max_tokens == (32 if chats else 64)


def test_only_the_pages_own_script_runs_and_nothing_frames_it():
    """The hashes are those of its one script and its one style; what is added to it is not run."""
    html = "<p><style>a{}</style><script>go()</script><script type='x'>data</script>"
    headers = welcome.page_headers(html)
    policy = dict(
        part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
    )
    closed = ("default-src", "base-uri", "form-action", "frame-ancestors")
    assert {name: policy.get(name) for name in closed} == dict.fromkeys(closed, "'none'")
    assert policy["img-src"] == "data:" and policy["connect-src"] == "'self'"
    for name, content in (("script-src", b"go()"), ("style-src", b"a{}")):
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert policy[name] == f"'sha256-{digest}'"
    others = {
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    assert headers.items() >= others.items()


def test_help_names_defaults_that_are_some():
    parser = argparse.ArgumentParser(formatter_class=Help)
    parser.add_argument("--number", default=3, help="a number")
    parser.add_argument("--none", help="nothing")
    parser.add_argument("--list", nargs="*", default=[], help="a list")
    parser.add_argument("--switch", action="store_true", help="a switch")
    parser.add_argument("--zero", default=0, help="a zero")
    said = parser.format_help()
    assert (
        "a number (default: 3)" in said
        and "a zero (default: 0)" in said
        and said.count("(default") == 2
    )
