"""
Which calls are let in: keys, host names (DNS rebinding), origins of web pages (CSRF, CORS). And the
log, with a line per call.
"""

import json
import os
import re
import sys
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
from wires import ASK, House

import serve
from server import gate
from training.corpus import bpe_tokenizer

KEY = {"Authorization": "Bearer sesame"}
ORIGINS = [
    "http://localhost:3000",
    "moz-extension://1f",
    "chrome-extension://abc",
    "tauri://localhost",
    "null",
]


@pytest.fixture(scope="module")
def locked():
    flags = ["--max-num-seqs", "1", "--max-queue", "0", "--allowed-origins", *ORIGINS]
    with House(*flags, keys=["sesame", "simsim", "s\udcffsam"]) as house:
        yield house


# --------------------------------------------------------------------------------------------------
# Keys


def test_every_path_but_four_needs_the_key(locked):
    """This includes paths that do not exist, and other methods."""
    routes = locked.service.router.routes
    calls = [(method, route.path_format) for route in routes for method in route.methods]
    calls += [("DELETE", "/")]
    calls += [("GET", path) for path in ("/nowhere", "/livez/", "/livez%0a", "/V1/models")]
    for method, path in calls:
        for headers in {}, KEY:
            caller = locked.call(path, method=method, **headers)
            is_refused = caller.said.startswith("HTTP/1.1 401 ")
            is_open = path in ("/livez", "/readyz", "/health", "/")
            assert is_refused == (not headers and not is_open), path
            assert is_refused == ("\r\nwww-authenticate: Bearer\r\n" in caller.said)
            assert caller.said
            caller.hang_up()


@pytest.mark.parametrize(
    "key", ["Bearer sesame", "bearer  sesame ", "BEARER simsim", "Bearer s\udcffsam"]
)
def test_a_key_is_one_of_the_keys(locked, key):
    """Bytes that are not UTF-8 previously ended the server, after the model had been loaded."""
    assert locked.get("/v1/models", Authorization=key).status == 200


NO_KEYS = ",Bearer,Bearer ,sesame,Basic sesame,Bearer sesam,Bearer sesamee,Bearer Sesame,"
NO_KEYS += "Bearer sesame simsim,Bearer key 0,Bearer s\u00e9same"


@pytest.mark.parametrize("key", NO_KEYS.split(","))
def test_a_wrong_key_is_refused_before_the_body_comes(locked, key):
    caller = locked.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\nAuthorization: "
    caller.send(head + key.encode() + b"\r\n\r\n")
    message = "send a valid API key: Authorization: Bearer KEY"
    assert caller.refusal == (401, "invalid_api_key", message)
    caller.hang_up()


def test_keys_have_prefix_caches_of_their_own(locked):
    """
    The salt combines the number of the key, not the key itself, with the client's own salt.
    Grammars wait by key, or else by address, so a salt brings no extra turns.
    """
    fields = {"cache_salt": "x", "structured_outputs": {"regex": "a"}}
    for number, key in enumerate(("sesame", "simsim")):
        body = {"prompt": "ab"} | fields
        caller = locked.call("/v1/completions", body, Authorization=f"Bearer {key}")
        added = locked.engine.added
        assert added["options"]["cache_salt"] == f"key {number}:x"
        assert added["owner"] == f"key {number}"
        caller.hang_up()
    with House() as house:
        house.ask(**fields)
        assert house.engine.added["owner"] == "127.0.0.1"


FILE = ["--api-key-file", "keys"]
KEYS = [  # flags, the environment's key, the file -> keys, or a refusal
    (["--api-key", " sesame "], "one", "", ["sesame"]),
    ([], " one\n", "", ["one"]),
    (FILE, None, "\ufeffone\n\n  two \none\n", ["one", "two"]),
    (FILE, None, "\n", "contains no keys"),
    ([*FILE[:1], "nowhere"], None, "", "--api-key-file nowhere cannot be read .*: name a file"),
    (["--api-key", " "], None, "", "--api-key is blank"),
    ([], "", "", "PAGEDGPT_API_KEY is blank"),  # like a secret that was not filled in
]


@pytest.mark.parametrize("flags, secret, content, expected", KEYS)
def test_keys_come_from_a_flag_the_environment_or_a_file(
    flags, secret, content, expected, tmp_path, monkeypatch
):
    """With a key, the server may listen to other machines."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text(content)
    if secret is not None:
        monkeypatch.setenv("PAGEDGPT_API_KEY", secret)
    args = serve.parse_args(["--host", "0.0.0.0", "--port", "0", *flags])
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            serve.api_keys(args)
    else:
        assert serve.api_keys(args) == expected
        serve.listen(args, expected).close()


def test_a_key_file_may_be_a_pipe(monkeypatch):
    """Previously it was read twice, and the second time nothing was left."""
    reader, writer = os.pipe()
    os.write(writer, b"sesame")
    os.close(writer)
    monkeypatch.setattr(serve.signal, "signal", Mock())
    monkeypatch.setattr(serve, "check_model", Mock())
    monkeypatch.setattr(serve, "client_and_encoder", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):  # the step after the keys
        serve.serve_http(serve.parse_args(["--port", "0", "--api-key-file", f"/dev/fd/{reader}"]))
    os.close(reader)


def test_a_key_file_that_others_can_read_is_reported(tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text("sesame")
    for mode, is_open in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        path.chmod(mode)
        serve.warn_of_readable_keys(path)
        assert (f"chmod 600 {path}" in capsys.readouterr().err) == is_open


# --------------------------------------------------------------------------------------------------
# Hosts and origins


# house, how it is called (KEY is GET with the key), path, Host, Origin -> status, the origin that
# may read the answer; "-" is an empty header, "none" is no header
CALLS = """
guarded GET /v1/models localhost none 200 none
guarded GET /v1/models LOCALHOST:8000 none 200 none
guarded GET /v1/models 127.0.0.1:1 none 200 none
guarded GET /v1/models 127.0.0.1 none 200 none
guarded GET /v1/models [::1]:8000 none 200 none
guarded GET /v1/models [::1] none 200 none
guarded GET /v1/models 10.0.0.7 none 200 none
guarded GET /v1/models gpt.EXAMPLE:80 none 200 none
guarded GET /v1/models gpt.local none 200 none
guarded GET /v1/models gpt none 403 none
guarded GET /v1/models evil.example none 403 none
guarded GET /v1/models localhost.evil.example none 403 none
guarded GET /v1/models 1.2.3 none 403 none
guarded GET /v1/models :80 none 403 none
guarded GET /v1/models - none 403 none
guarded GET /v1/models localhost: none 200 none
guarded GET /v1/models [::ffff:10.0.0.7]:80 none 200 none
guarded GET /v1/models [::1]evil.com none 403 none
guarded GET /v1/models [::1]:80@evil.com none 403 none
guarded GET /v1/models localhost:80@evil.com none 403 none
guarded GET /v1/models me@localhost none 403 none
guarded GET /v1/models localhost:80:80 none 403 none
guarded GET /v1/models localhost:http none 403 none
guarded GET /v1/models localhost/evil.com none 403 none
guarded GET /v1/models localhost,evil.com none 403 none
guarded GET /v1/models [::1%evil.com] none 403 none
guarded GET /v1/models [127.0.0.1] none 403 none
guarded GET /v1/models [localhost] none 403 none
guarded GET /v1/models [::1 none 403 none
guarded GET /v1/models ::1 none 403 none
guarded GET /v1/models localhost:8 http://localhost:8 200 none
guarded GET /v1/models localhost:8 HTTP://LocalHost:8 200 none
guarded GET /v1/models localhost:8 http://localhost:9 403 none
guarded GET /v1/models localhost:8 http://localhost 403 none
guarded GET /v1/models localhost:8 https://localhost:8 403 none
guarded GET /v1/models localhost:8 http://127.0.0.1:8 403 none
guarded GET /v1/models localhost:8 http://localhost:8.evil.example 403 none
guarded GET /v1/models localhost:8 tauri://localhost 200 tauri://localhost
guarded GET /v1/models localhost:8 tauri://localhost:8 403 none
guarded GET /v1/models localhost:8 null 403 none
guarded GET /v1/models localhost:8 - 403 none
guarded GET /v1/models evil.example tauri://localhost 403 tauri://localhost
guarded GET /v1/models gpt.example http://gpt.example 200 none
guarded GET /v1/models gpt.example http://evilgpt.example 403 none
guarded GET /v1/models gpt.example http://gpt.example.evil 403 none
guarded GET /v1/models gpt.example http://a.gpt.example 403 none
guarded GET /v1/models gpt.example gpt.example 403 none
locked KEY /v1/models any.example none 200 none
locked KEY /v1/models any.example http://any.example 200 none
locked KEY /v1/models any.example http://evil.example 403 none
locked GET /livez localhost http://evil.example 403 none
locked OPTIONS /v1/completions localhost http://localhost:3000 200 http://localhost:3000
locked KEY /v1/models localhost http://localhost:3000 200 http://localhost:3000
locked OPTIONS /v1/completions localhost moz-extension://1f 200 moz-extension://1f
locked KEY /v1/models localhost moz-extension://1f 200 moz-extension://1f
locked OPTIONS /v1/completions localhost chrome-extension://abc 200 chrome-extension://abc
locked KEY /v1/models localhost chrome-extension://abc 200 chrome-extension://abc
locked OPTIONS /v1/completions localhost tauri://localhost 200 tauri://localhost
locked KEY /v1/models localhost tauri://localhost 200 tauri://localhost
locked OPTIONS /v1/completions localhost null 200 null
locked KEY /v1/models localhost null 200 null
locked GET /v1/models localhost null 401 null
locked KEY /nowhere localhost null 404 null
locked GET /v1/models localhost http://localhost:3001 403 none
locked KEY /v1/models localhost http://localhost:3001 403 none
locked OPTIONS /v1/models localhost http://localhost:3001 403 none
locked GET /v1/models localhost https://localhost:3000 403 none
locked KEY /v1/models localhost https://localhost:3000 403 none
locked OPTIONS /v1/models localhost https://localhost:3000 403 none
any GET /v1/models localhost http://any.example 200 *
any GET /v1/models localhost null 200 *
any GET /livez evil.example none 403 none
plain GET /v1/models localhost http://localhost 200 none
plain OPTIONS /v1/models localhost http://localhost 405 none
locked GET /metrics localhost/livez? none 401 none
locked GET /metrics localhost/livez# none 401 none
locked GET /metrics /livez none 401 none
locked GET /metrics //x/livez none 401 none
locked GET /metrics a@localhost/ none 401 none
locked GET /metrics livez none 401 none
locked GET /metrics - none 401 none
locked GET http://localhost/metrics localhost/livez? none 401 none
locked GET http://localhost/metrics localhost/livez# none 401 none
locked GET http://localhost/metrics /livez none 401 none
locked GET http://localhost/metrics //x/livez none 401 none
locked GET http://localhost/metrics a@localhost/ none 401 none
locked GET http://localhost/metrics livez none 401 none
locked GET http://localhost/metrics - none 401 none
locked GET //livez/../metrics localhost/livez? none 401 none
locked GET //livez/../metrics localhost/livez# none 401 none
locked GET //livez/../metrics /livez none 401 none
locked GET //livez/../metrics //x/livez none 401 none
locked GET //livez/../metrics a@localhost/ none 401 none
locked GET //livez/../metrics livez none 401 none
locked GET //livez/../metrics - none 401 none
"""
HOUSES = {"plain": [], "any": ["--allowed-origins", "*"], "guarded": ["--host", "GPT.local"]}
HOUSES["guarded"] += ["--allowed-hosts", "GPT.example", "--allowed-origins", "tauri://localhost"]
PREFLIGHT = {
    "Access_Control_Request_Method": "POST",
    "Access_Control_Request_Headers": "authorization,content-type",
}
CALLERS = {"GET": {}, "KEY": KEY, "OPTIONS": PREFLIGHT}


@pytest.fixture(scope="module")
def houses(locked):
    with ExitStack() as stack:
        houses = {name: stack.enter_context(House(*flags)) for name, flags in HOUSES.items()}
        yield houses | {"locked": locked}


@pytest.mark.parametrize("row", CALLS.strip().splitlines())
def test_hosts_and_origins_are_checked(houses, row):
    """
    A web page can make its own name point to 127.0.0.1, but its requests then show it in Host or
    Origin. An origin consists of a scheme, a host and a port, and each part counts. With a key any
    host is served, but no other origin: a browser that stores a key must not lend it to another
    page. Errors also name an allowed origin, so that its page can show what was wrong. And no Host
    bypasses the key: the path is the one in the request's first line, whatever it becomes when
    combined with a Host.
    """
    name, method, path, host, origin, status, reader = row.split()
    values = {"-": "", "none": None}
    headers = {"Host": values.get(host, host), "Origin": values.get(origin, origin)}
    method, headers = method.replace("KEY", "GET"), headers | CALLERS[method]
    answer = houses[name].call(path, method=method, **headers).answer
    assert answer.status == int(status)
    assert answer.headers.get("access-control-allow-origin", "none") == reader
    assert (reader != "none") == ("access-control" in str(answer.headers))
    if status == "403":
        message = answer.error["message"]
        hint = "--allowed-hosts" if "Host" in message else "--allowed-origins {Origin} would"
        assert hint.format(**headers) in message


OLD = {"1.0\r\n": 200, "1.0\r\nHost:\r\n": 403, "1.0\r\nHost: evil\r\n": 403, "1.1\r\n": 403}


@pytest.mark.parametrize("head", OLD)
def test_only_http_1_0_needs_no_host(houses, head):
    """Load balancers check servers in this way, but no browser does. All got a 403."""
    caller = houses["plain"].connect()
    caller.send(f"GET /health HTTP/{head}\r\n".encode())
    assert caller.answer.status == OLD[head]


def test_pages_of_allowed_origins_are_served(locked):
    """A browser asks first, without the key."""
    asked = locked.call("/tokenize", method="OPTIONS", Origin="null", **PREFLIGHT).answer
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["x-request-id"]
    headers = locked.get("/v1/models", Origin="null", **KEY).headers
    assert headers["vary"] == "Origin"
    readable = "x-request-id, retry-after, x-unheld-tools"
    assert headers["access-control-expose-headers"] == readable


# --------------------------------------------------------------------------------------------------
# The log


@pytest.fixture
def logged(capfd):
    """Return a function that returns the lines since its last call."""

    def lines() -> list[dict]:
        lines = capfd.readouterr().err.splitlines()
        assert all(line.isprintable() and line.isascii() for line in lines)
        return [json.loads(line) for line in lines if line.startswith("{")]

    return lines


@pytest.fixture
def house():
    with House() as house:
        house.args.access_log = True
        yield house


def test_a_call_has_its_line_when_it_has_ended(house, logged):
    """
    The line has time, client, method, path, status, duration, id, seed, and the beginning of long
    texts.
    """
    caller = house.ask()
    seed = house.engine.of("add")[0]["params"]["seed"]
    assert logged() == []
    house.clock.run(1.5)
    house.engine.step(b"x", "length")
    house.call(f"/v1/x%0d%0a{'x' * 300}")
    done, missing = logged()
    id = caller.answer.headers["x-request-id"]
    assert caller.json["id"] == f"cmpl-{id}"
    call = {"time": 1_700_000_001.5, "event": "access", "client": "127.0.0.1", "id": id}
    call |= {"method": "POST", "path": "/v1/completions"}
    assert done == call | {"status": 200, "ms": 1500.0, "seed": seed, "tokens": 1}
    assert missing["path"] == f"/v1/x\r\n{'x' * 300}"[:200]
    assert len(missing["error"]) == 200


def test_the_log_says_why_a_call_ended(house, logged):
    """A client that hung up is logged as nginx's 499, unless a status was already sent."""
    callers = [house.ask(), house.ask(stream=True), house.connect(), house.ask(stream=True)]
    callers[2].send(ASK[:-3])
    house.engine.step({"1": b"x", "2": b"x"})
    house.engine.fail("the step failed", "2", "internal")
    for caller in callers[:3]:
        caller.hang_up()
    house.connect().send(b"this is no HTTP\r\n\r\n")
    lines = logged()
    gone = "the client is gone"
    assert [(line["status"], line["error"]) for line in lines] == [
        (200, "the step failed"),
        (499, gone),
        (200, gone),
        (499, gone),
        (400, "Invalid HTTP request received."),
    ]


# Calls that are refused, each with a text that must not be logged.
PRIVATE = """
/v1/completions {"prompt": {"TULIP": 1}}
/v1/completions {"prompt": "a", "seed": "TULIP"}
/v1/completions {"prompt": "a", "stop": ["TULIP", 1]}
/v1/completions {"prompt": "a", "model": "TULIP"}
/v1/completions {"prompt": "a", "cache_salt": ["TULIP"]}
/v1/completions {"prompt": "a", "request_id": "TULIP é"}
/v1/completions {"prompt": "a", "logit_bias": {"TULIP": 1}}
/v1/completions {"prompt": "a", "logit_bias": {"1": "TULIP"}}
/v1/completions {"prompt": "a", "response_format": {"type": "TULIP"}}
/v1/completions {"prompt": "a", "structured_outputs": {"regex": ["TULIP"]}}
/v1/completions {"prompt": "a", "structured_outputs": {"regex": "(?=TULIP)a"}}
/v1/completions {"prompt": "a", "structured_outputs": {"grammar": "TULIP"}}
/v1/completions {"prompt": "a", "response_format": {"type": "json_object", "schema": {"pattern": "TULIP"}}}
/v1/chat/completions {"messages": [{"role": "user", "content": "TULIP"}]}
/v1/chat/completions {"messages": [{"role": "TULIP", "content": "a"}]}
/v1/chat/completions {"messages": [{"role": "user", "content": [{"type": "TULIP"}]}]}
/v1/chat/completions {"messages": [{"role": "user", "content": [{"text": "TULIP"}]}]}
/v1/chat/completions {"messages": [{"role": "tool", "tool_call_id": "a", "content": {"TULIP": 1}}]}
/v1/chat/completions {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "TULIP !", "arguments": ""}}]}]}
/v1/chat/completions {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "TULIP"}}]}]}
/v1/chat/completions {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"TULIP_token": 1}}
/v1/chat/completions {"messages": [{"role": "user", "content": "a"}], "tool_choice": "TULIP"}
/v1/chat/completions {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "TULIP !"}}]}
/v1/chat/completions {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "TULIP", "parameters": {"TULIP": 1}}}]}
/detokenize {"tokens": "TULIP"}
"""  # noqa: E501


TALKATIVE = "{% if messages[0].content != 'a' %}{{ raise_exception(messages[0].content) }}"
TALKATIVE += "{% endif %}a"


@pytest.mark.parametrize("row", PRIVATE.strip().splitlines())
def test_no_refusal_logs_a_text(row, tmp_path, logged):
    """
    This must hold whichever library made the message. Templates and the grammar library quote a
    lot.
    """
    path, body = row.split(" ", 1)
    bpe_tokenizer([]).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TALKATIVE)
    with House(directory=tmp_path) as house:
        house.args.access_log = True
        caller = house.call(path, body.encode())
        for added in house.engine.of("add"):
            house.engine.fail(f"this grammar cannot be used: {added['grammar']}", added["id"])
        assert caller.status in (400, 404)
    (line,) = logged()
    assert line["error"]
    assert "TULIP" not in str(line)


def test_texts_are_logged_when_asked_for(logged):
    """
    Fields that were not sent are left out, and so is the salt, which is a secret. With
    --no-access-log, which `House` has, neither answered nor refused calls have a line.
    """
    with House("--log-requests") as house:
        house.ask("ab", user="me", request_id="r", cache_salt="secret", temperature=0.5)
        house.engine.step(b"x", "length")
        house.get("/nowhere")
    (line,) = logged()
    seed = house.engine.of("add")[0]["params"]["seed"]
    del line["time"]
    asked = {"prompt": ["ab"], "max_tokens": 4, "request_id": "r", "temperature": 0.5}
    assert line == asked | {"event": "request", "id": "cmpl-r", "seed": seed}


@pytest.mark.parametrize(("flags", "tokens"), [([], False), (["--log-requests"], True)])
def test_listeners_read_texts_where_the_log_has_them(flags, tokens):
    """No other flag of the log lets them read tokens, which reveal text."""
    with House(*flags) as house:
        house.args.access_log = True
        house.call("/events")
        assert house.engine.of("listen") == [{"op": "listen", "on": True, "tokens": tokens}]


@pytest.mark.parametrize("text", ["a", "x" * 128, "!~", "x" * 129, "", "a b", "caf\xe9"])
def test_a_clients_own_id_is_taken_if_it_can_be_a_header(house, text):
    id = house.get("/nowhere", X_Request_Id=text).headers["x-request-id"]
    is_taken = re.fullmatch("[!-~]{1,128}", text)
    assert id == text if is_taken else re.fullmatch("[0-9a-f]{32}", id)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_calls_that_nobody_asked_for_are_not_logged(capfd, monkeypatch, is_terminal):
    """
    These are calls of supervisors and, on a terminal, those of the page. A terminal's lines are
    short. Nothing that a client sends can make a line of its own, or control the terminal.
    """
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with House() as house:
        house.args.access_log = True
        paths = ["/", "/livez", "/readyz", "/health", "/v1/loads", "/v1/models", "/metrics"]
        for path in [*paths, "/v1/x%0a%1b[2Jevil"]:
            house.get(path)
        house.call("/events", method="HEAD")
        house.call("/tokenize", {"prompt": "a"})
        house.ask()
        house.engine.step(b"xy", "length")
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    if not is_terminal:
        paths = ["/v1/models", "/metrics", "/v1/x\n\x1b[2Jevil", "/events", "/tokenize"]
        assert [json.loads(line)["path"] for line in lines] == [*paths, "/v1/completions"]
        return
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    metrics, missing, completion = [line[9:] for line in lines]
    assert metrics == "GET /metrics 200 0.0 s"
    path = r"GET /v1/x\n\x1b[2Jevil"
    assert missing.startswith(f"{path} 404 0.0 s (there is no {path} here; there is /v1/comp")
    assert completion == "POST /v1/completions 200 0.0 s 2 tokens"


def test_every_event_has_a_short_line():
    access = {"client": None, "status": 400, "error": "no HTTP"}
    assert gate.short("access", access) == "400 (no HTTP)"
    assert gate.short("engine_died", {"reason": "it stopped"}) == "engine died reason=it stopped"
    request = {"id": "r", "prompt": ["\x1b\n"]}
    assert gate.short("request", request) == r"request id=r prompt=['\\x1b\\n']"
