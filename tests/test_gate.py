"""Which calls are let in: keys, host names (DNS rebinding), origins of web pages (CSRF, CORS)."""

import threading
from types import SimpleNamespace

import pytest
from server import Server, error_of, wait_until

import serve
from serving.gate import Gate
from serving.protocol import ApiError

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


def test_a_key_opens_all_paths_and_has_a_cache_of_its_own(tmp_path):
    """
    With a key everything but what a supervisor asks needs it, and each key has a prefix cache of
    its own.
    """
    keys = tmp_path / "keys"
    keys.write_text("sesame\n\n simsim \n")
    with Server("--api-key-file", str(keys)) as server:
        paths = ["/v1/models", "/health", "/metrics", "/nowhere"]
        for header in (
            None,
            "sesame",
            "Bearer",
            "Bearer wrong",
            "Basic sesame",
            "Bearer sesame2",
            "Bearer s\u00e9same",
        ):
            headers = {"Authorization": header.encode()} if header else {}
            for path in paths:
                response = server.http.get(path, headers=headers)
                assert (
                    response.status_code == 401 and error_of(response)["code"] == "invalid_api_key"
                )
        assert response.headers["www-authenticate"] == "Bearer"
        assert server.post().status_code == 401
        assert [server.http.get(path).status_code for path in ("/livez", "/readyz")] == [200, 200]
        salts = set()
        for key in ("sesame", "simsim"):
            server.http.headers["Authorization"] = f"Bearer {key}"
            assert [server.get(path) for path in paths] == [200, 200, 200, 404]
            server.answer(cache_salt="x")
            salts.add(server.engine.added[-1]["options"]["cache_salt"])
        assert len(salts) == 2 and all(
            "sesame" not in salt and salt.endswith(":x") for salt in salts
        )


def test_a_key_may_stand_in_the_command():
    with Server("--api-key", " sesame ") as server:
        assert server.get("/v1/models") == 401
        server.http.headers["Authorization"] = "Bearer sesame"
        assert server.get("/v1/models") == 200
    with pytest.raises(ValueError, match="--api-key is blank"):
        serve.api_keys(serve.parse_args(["--api-key", " "]))


def test_two_places_of_keys_are_refused(capsys):
    with pytest.raises(SystemExit):
        serve.parse_args(["--api-key", "a", "--api-key-file", "f"])
    assert "--api-key-file: not allowed with argument --api-key" in capsys.readouterr().err


def test_keys_come_from_environment_or_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDGPT_API_KEY", "one")
    assert serve.api_keys(serve.parse_args([])) == ["one"]
    serve.listen(
        serve.parse_args(["--host", "0.0.0.0", "--port", "0"])
    ).close()  # it has a key: no need to force
    for blank in ("", " \n"):
        monkeypatch.setenv("PAGEDGPT_API_KEY", blank)
        with pytest.raises(
            ValueError, match="PAGEDGPT_API_KEY is blank: give it a key, or unset it"
        ):
            serve.listen(serve.parse_args(["--host", "0.0.0.0", "--port", "0"]))
    several = tmp_path / "several"
    several.write_text("\ufeffone\n\n  two \none\n")
    assert serve.api_keys(serve.parse_args(["--api-key-file", str(several)])) == ["one", "two"]
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="has no key in it"):
        serve.api_keys(serve.parse_args(["--api-key-file", str(empty)]))


def test_a_key_file_that_others_can_read_is_told(tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text("sesame")
    for mode, is_told in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        path.chmod(mode)
        serve.warn_of_readable_keys(path)
        assert (f"chmod 600 {path}" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:8000"}, 200),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "gpt.example:80"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:8", "Origin": "http://localhost:8"}, 200),
        ({"Host": "localhost:8", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:8", "Origin": "null"}, 403),
        ({"Host": "localhost:8", "Origin": "HTTP://LocalHost:8"}, 200),
        ({"Host": "localhost:8", "Origin": "http://localhost:9"}, 403),
        ({"Host": "localhost:8", "Origin": "http://localhost"}, 403),
        ({"Host": "localhost:8", "Origin": "https://localhost:8"}, 403),
        ({"Host": "localhost:8", "Origin": "http://127.0.0.1:8"}, 403),
        ({"Host": "localhost:8", "Origin": "http://localhost:8.evil.example"}, 403),
        ({"Host": "localhost:8", "Origin": "tauri://localhost"}, 200),
        ({"Host": "localhost:8", "Origin": "tauri://localhost:8"}, 403),
        ({"Host": "evil.example", "Origin": "tauri://localhost"}, 403),
    ],
)
def test_hosts_and_origins_are_checked(headers, status):
    """
    A page on the web can make its own name point to 127.0.0.1: its requests then say so in Host or
    Origin. Only the name of an origin was compared: another server's pages on this machine, at
    another port, passed for ours.
    """
    args = serve.parse_args(
        ["--allowed-hosts", "GPT.example", "--allowed-origins", "tauri://localhost"]
    )
    gate = Gate(SimpleNamespace(args=args, keys=[]))
    scope = {
        "path": "/v1/models",
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
    }
    scope["scheme"] = "http"
    if status == 200:
        assert gate.admit(scope) == ""
    else:
        with pytest.raises(ApiError) as caught:
            gate.admit(scope)
        assert caught.value.status == status


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


ORIGINS = [
    "http://localhost:3000",
    "moz-extension://1f",
    "chrome-extension://abc",
    "tauri://localhost",
    "null",
]


@pytest.fixture(scope="module")
def shared_server():
    flags = ["--api-key", "sesame", "--max-num-seqs", "1", "--max-queue", "0"]
    with Server("--allowed-origins", *ORIGINS, *flags) as server:
        yield server


@pytest.mark.parametrize("origin", ORIGINS)
def test_pages_of_allowed_origins_are_served(shared_server, origin):
    """
    They got a 403, with a valid key too, and no flag could change it. A browser first asks, without
    the key, and shows the page nothing that does not name its origin: errors do too, so that it can
    say what was wrong.
    """
    http, key = shared_server.http, {"Authorization": "Bearer sesame"}
    asked = http.options("/v1/completions", headers=PREFLIGHT | {"Origin": origin})
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == origin
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in asked.headers["access-control-allow-methods"] and asked.headers["x-request-id"]
    body = {"prompt": "say hi", "max_tokens": 9}
    answers = {
        200: http.post(
            "/v1/completions", json=body | {"stream": True}, headers={"Origin": origin} | key
        ),
        401: http.post("/v1/completions", json=body, headers={"Origin": origin}),
        400: http.post("/v1/completions", json={}, headers={"Origin": origin} | key),
        404: http.get("/nowhere", headers={"Origin": origin} | key),
    }
    shared_server.engine.gate.clear()
    waiting = threading.Thread(
        target=http.post, args=["/v1/completions"], kwargs={"json": body, "headers": key}
    )
    waiting.start()
    wait_until(lambda: shared_server.service.client.choices)
    answers[429] = http.post("/v1/completions", json=body, headers={"Origin": origin} | key)
    shared_server.engine.gate.set()
    waiting.join()
    for status, answer in answers.items():
        assert answer.status_code == status
        assert (
            answer.headers["access-control-allow-origin"] == origin
            and answer.headers["vary"] == "Origin"
        )
        assert answer.headers["access-control-expose-headers"] == "x-request-id, retry-after"


@pytest.mark.parametrize(
    "origin", ["http://localhost:3001", "https://localhost:3000", "moz-extension://2f"]
)
def test_pages_of_other_origins_are_told_of_the_flag(shared_server, origin):
    for method, headers in (
        ("GET", {}),
        ("OPTIONS", PREFLIGHT),
        ("GET", {"Authorization": "Bearer sesame"}),
    ):
        refused = shared_server.http.request(
            method, "/v1/models", headers=headers | {"Origin": origin}
        )
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
        message = f"pages of another origin, {origin!r}, are not served here: "
        message += f"--allowed-origins {origin} would let them in"
        assert error_of(refused)["message"] == message


def test_any_origin_may_be_allowed():
    with Server("--allowed-origins", "*") as server:
        for origin in ("http://any.example", "null"):
            answer = server.http.get("/v1/models", headers={"Origin": origin})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
            assert (
                server.http.options(
                    "/v1/models", headers=PREFLIGHT | {"Origin": origin}
                ).status_code
                == 200
            )
        assert server.http.get("/livez", headers={"Host": "evil.example"}).status_code == 403


def test_without_the_flag_nothing_speaks_of_origins(server):
    own = {"Origin": str(server.http.base_url).rstrip("/")}
    answer = server.http.post("/v1/completions", json={"prompt": "say hi"}, headers=own)
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert server.http.options("/v1/models", headers=PREFLIGHT | own).status_code == 405


@pytest.mark.parametrize(
    "given, taken",
    [
        ("http://LocalHost:3000", "http://localhost:3000"),
        ("http://a.example:80", "http://a.example"),
        ("https://a.example:443", "https://a.example"),
        ("https://a.example:80", "https://a.example:80"),
        ("http://[::1]:80", "http://[::1]"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_origins_are_taken_as_browsers_send_them(given, taken):
    assert serve.parse_args(["--allowed-origins", given]).allowed_origins == [taken]


@pytest.mark.parametrize(
    "text",
    [
        "localhost:3000",
        "http://localhost:3000/",
        "http://",
        "https://*.example",
        "http://a://b",
        "",
    ],
)
def test_what_is_no_origin_is_refused(text, capsys):
    """
    A path or a missing scheme would never match what a browser sends, and nobody would know why.
    """
    with pytest.raises(SystemExit):
        serve.parse_args(["--allowed-origins", text])
    wanted = f"{text!r} is no origin, wanted SCHEME://HOST or SCHEME://HOST:PORT without a path, "
    wanted += "null or *"
    assert wanted in capsys.readouterr().err
