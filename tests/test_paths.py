"""What other paths answer: models, the page for browsers, /openapi.json; and unknown paths."""

import json
import os
import subprocess
from urllib.parse import quote

import pytest
from server import Server, error_of

import serve
from serving import api, welcome

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


def test_models_are_listed(server):
    models = server.http.get("/v1/models").json()
    assert models["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [
        ("fake", "model", 100_000)
    ]
    assert server.http.get("/v1/models/fake").json() == models["data"][0]


@pytest.mark.parametrize("name", ["out/stdlib", "/data/model", "models/", "a b%2F"])
def test_one_model_is_found_by_its_name(name):
    """
    `models.retrieve` was a 404. The name of a model may be a path; clients write its slashes as
    they are, or not.
    """
    with Server("--served-model-name", name) as server:
        for path in (quote(name), quote(name, safe="")):
            assert server.http.get(f"/v1/models/{path}").json()["id"] == name
        missing = server.http.get("/v1/models/other")
    assert missing.status_code == 404 and error_of(missing)["code"] == "model_not_found"
    assert error_of(missing)["message"] == f"there is no model 'other' here; there is {name!r}"


def test_the_page_is_the_same_for_all(tmp_path):
    """
    It was an error in JSON. It needs no key, so nothing of this server is on it: neither the name
    of the model nor what the Host header says, which could become markup.
    """
    keys = tmp_path / "keys"
    keys.write_text("sesame")
    with Server("--api-key-file", str(keys), "--served-model-name", "<script>x</script>") as server:
        page = server.http.get("/", headers={"Host": '"><b>x'})
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert page.text == welcome.page()


def as_curl_sees_it(greeting, environment):
    """The arguments that a shell makes of the greeting's command."""
    command = greeting.splitlines()[1].strip().removeprefix("curl ")
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {command}"], env=environment, capture_output=True, text=True
    )
    return done.stdout.splitlines() if done.returncode == 0 else done.stderr


def test_the_greetings_command_works_as_it_stands(tmp_path):
    """
    With a key it lacked it, and with a chat template it asked for a completion. The key itself is
    not printed.
    """
    keys = tmp_path / "my keys"
    keys.write_text("\n sesame \nsimsim\n")

    def greeting(*flags, chats=False):
        args = serve.parse_args(list(flags))
        return welcome.greeting("m", "http://h:1", chats, serve.key_in_shell(args))

    text = ["http://h:1/v1/completions", "-H", "Content-Type: application/json"]
    body = ["-d", '{"prompt": "def ", "max_tokens": 64, "temperature": 0.6}']
    assert as_curl_sees_it(greeting(), {}) == [*text, *body]
    with_key = greeting("--api-key-file", str(keys))
    assert "sesame" not in with_key
    assert as_curl_sees_it(with_key, os.environ) == [
        *text,
        "-H",
        "Authorization: Bearer  sesame ",
        *body,
    ]
    with_key = greeting("--api-key", "sesame")
    assert "sesame" not in with_key
    set = {"PAGEDGPT_API_KEY": "sesame"}
    assert as_curl_sees_it(with_key, set) == [*text, "-H", "Authorization: Bearer sesame", *body]
    assert "set it to the key of the server" in as_curl_sees_it(with_key, {})
    url, *_, body = as_curl_sees_it(greeting(chats=True), {})
    assert url == "http://h:1/v1/chat/completions"
    assert json.loads(body)["messages"] == [{"role": "user", "content": "Hello"}]


def test_openapi_describes_what_is_taken_and_answered(server):
    """
    Fuzzers and client generators read it: a path or a limit that is not in it is none to them.
    """
    document = server.http.get("/openapi.json").json()
    assert {f"{m.upper()} {path}" for path, calls in document["paths"].items() for m in calls} == (
        set(api.Service.routes)
    )
    completions, schemas = (
        document["paths"]["/v1/completions"]["post"],
        document["components"]["schemas"],
    )
    assert completions["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/CompletionRequest"
    )
    assert schemas["CompletionRequest"]["properties"]["temperature"]["maximum"] == 2
    assert {"200", "400", "401", "404", "429", "503"} <= completions["responses"].keys()


IN_OPENAI = ", as this is OpenAI's API"


@pytest.mark.parametrize(
    "call, hint",
    [
        ("POST /chat/completions", "call /v1/chat/completions, a base URL ends in /v1"),
        ("GET /models", "call /v1/models, a base URL ends in /v1"),
        ("POST /v1/v1/completions", "call POST /v1/completions"),
        ("POST /v1/tokenize", "call POST /tokenize"),
        ("GET /v1/", "call GET /v1/models"),
        ("POST /v1/completions/", "call POST /v1/completions"),
        ("POST /api/generate", f"call POST /v1/completions{IN_OPENAI}"),
        ("POST /api/chat", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("GET /api/tags", f"call GET /v1/models{IN_OPENAI}"),
        ("POST /v1/responses", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("GET /v1/responses/resp_1", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("POST /v1/messages", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("POST /v1/messages/count_tokens", f"call POST /v1/chat/completions{IN_OPENAI}"),
        ("POST /v1/embeddings", "embeddings are not served, vLLM serves them"),
    ],
)
def test_paths_of_other_servers_are_told_what_to_call(server, call, hint):
    response = server.http.request(*call.split())
    assert response.status_code == 404
    assert (
        error_of(response)["message"]
        == f"there is no {call} here; {hint}; /openapi.json lists what there is"
    )


def test_unknown_paths_are_quoted_shortly(server):
    response = server.http.get("/" + "x" * 10_000)
    assert response.status_code == 404 and len(response.content) < 1000
    assert error_of(response)["message"].endswith("x here; /openapi.json lists what there is")


def test_other_methods_are_told_which_there_are(server):
    for method, path, allowed in [
        ("DELETE", "/v1/completions", "POST"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/fake", "GET, HEAD"),
    ]:
        response = server.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path", ["/", "/livez", "/v1/models", "/v1/models/fake", "/openapi.json", "/nowhere"]
)
def test_head_is_get_without_a_body(server, path):
    """It was a 405: load balancers and download tools ask with it first."""
    whole, head = server.http.get(path), server.http.head(path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
