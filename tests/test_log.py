"""The log: a line for each call, the id that its answer has too, seeds, reasons; and no texts."""

import json

import pytest
from server import Server, wait_until

from serving import gate

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


@pytest.fixture
def logging_server(monkeypatch):
    """
    A server with the lines of its log in `server.log`, of its own: another test's last call may be
    logged when that test has ended. Tests read the log while it is written, which pytest's
    capturing does not allow: it empties its file after reading, and what is written in between is
    lost.
    """
    lines = []

    def note(line, file=None, flush=False):
        if file is not None:  # else it is the greeting
            lines.append(line)

    monkeypatch.setattr(gate, "print", note, raising=False)
    with Server() as server:
        server.log = lines
        server.args.access_log = True
        yield server


def access_log(server, count: int) -> list[dict]:
    """
    The log's first `count` lines. A call is logged when it has ended, which may be after its client
    knows it.
    """
    wait_until(lambda: len(server.log) >= count)
    return [json.loads(line) for line in server.log[:count]]


def test_every_answer_has_an_id(logging_server):
    """
    The client's own, or else a new one, also in the log and in the name of a completion: so a
    user's report, the answer and the line of the log are brought together.
    """
    server = logging_server
    ids = []
    for call in (("GET", "/"), ("GET", "/nowhere"), ("HEAD", "/livez"), ("OPTIONS", "/v1/models")):
        ids.append(server.http.request(*call).headers["x-request-id"])
    completion = server.post()
    assert completion.json()["id"] == f"cmpl-{completion.headers['x-request-id']}"
    ids += [completion.headers["x-request-id"], server.post(stream=True).headers["x-request-id"]]
    assert len(set(ids)) == len(ids) and all(len(id) == 32 for id in ids)
    own = {"X-Request-Id": "my-request:1"}
    assert server.http.get("/v1/models", headers=own).headers["x-request-id"] == "my-request:1"
    logged = [line["id"] for line in access_log(server, 5)]
    assert sorted(logged) == sorted(
        [ids[1], *ids[3:], "my-request:1"]
    )  # but those of the page and of /livez
    for other in ("a b", "x" * 129, "", "caf\u00e9"):
        answer = server.http.get("/livez", headers={"X-Request-Id": other.encode()})
        assert len(answer.headers["x-request-id"]) == 32


def test_an_unseeded_answer_can_be_had_again(logging_server):
    """
    Each start of the server said the same, and no two starts in a row anything else. Now each call
    draws a seed, which is in the log; equal prompts of a call have seeds of their own, so that
    their answers differ.
    """

    def seeds(prompt, **fields):
        added = logging_server.engine.added
        before = len(added)
        logging_server.answer(prompt, **fields)
        return [message["params"]["seed"] for message in added[before:]]

    (first,), (second,) = seeds("say hi"), seeds("say hi")
    several = seeds(["say hi"] * 3)
    given = seeds(["say hi"] * 2, seed=7)
    assert first != second and all(0 <= seed < 2**53 for seed in (first, second))
    assert several == [several[0], several[0] + 1, several[0] + 2] and given == [7, 7]
    logged = [line["seed"] for line in access_log(logging_server, 4)]
    assert sorted(logged) == sorted([first, second, several[0], 7])


def test_a_log_line_is_json_without_texts(capfd):
    """
    One line of JSON each; texts only with --log-requests; nothing a client sends makes a line of
    its own.
    """
    with Server("--log-requests") as server:
        server.args.access_log = True
        server.answer("say hi", user="me", request_id="r", cache_salt="a secret")
        server.get("/v1/x%0d%0aevil")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert all(line.pop("time") and line.pop("ms", 1) for line in lines)
    drawn = lines[0]["seed"]
    assert all(len(line.pop("id")) == 32 for line in lines if line["event"] == "access")
    # a call is logged when it has ended, which may be after its client sent the next
    client = {"event": "access", "client": "127.0.0.1"}
    missing = "there is no GET /v1/x\r\nevil here; /openapi.json lists what there is"
    assert sorted(lines, key=lambda line: line.get("path", "")) == [
        {
            "event": "request",
            "id": "cmpl-r",
            "max_tokens": 1000,
            "prompt": ["say hi"],
            "request_id": "r",
            "seed": drawn,
        },
        client | {"method": "POST", "path": "/v1/completions", "status": 200, "seed": drawn},
        client | {"method": "GET", "path": "/v1/x\r\nevil", "status": 404, "error": missing},
    ]


def test_the_log_says_why_a_call_was_refused(capfd):
    """
    It had the status alone: with 400 for every wrong field, nobody could help whom a server
    refused.
    """
    calls = [
        ({"model": 'x"}\n{"event": "forged"}'}, 404, "model_not_found"),
        ({"temperature": "secret"}, 400, "temperature: input should be a valid number"),
        ({"prompt": "break"}, 500, "the step failed"),
        (
            {"prompt": "break", "stream": True},
            200,
            "the step failed",
        ),  # after the headers, if these are out by then
    ]
    with Server() as server:
        server.args.access_log = True
        answered = [server.post(**fields).status_code for fields, _, _ in calls]
    wanted = [status for _, status, _ in calls]
    assert answered in (wanted, [*wanted[:-1], 500])
    text = capfd.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["event"] for line in lines] == ["access"] * len(calls)
    assert [line["status"] for line in lines] == answered
    assert all(
        line["error"].startswith(error) for line, (_, _, error) in zip(lines, calls, strict=True)
    )
    assert "secret" not in text


def test_texts_are_not_logged(capfd):
    with Server() as server:
        server.args.access_log = True
        server.answer("say secret")
    assert "secret" not in capfd.readouterr().err
