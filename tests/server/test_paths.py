"""What other paths answer: models, the page for browsers, /openapi.json; and unknown paths."""

from urllib.parse import quote

import pytest
from wires import House

from server import gate, welcome


@pytest.fixture(scope="module")
def house():
    with House() as house:
        yield house


def test_a_model_is_described(house):
    model = {
        "id": "fake",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "pagedgpt",
        "max_model_len": 1000,
        "chat": False,  # it has no template
    }
    assert house.get("/v1/models/fake").json == model
    assert house.get("/v1/models").json == {"object": "list", "data": [model]}


@pytest.mark.parametrize("name", ["out/stdlib", "/data/model", "models/", "a b%2F"])
def test_one_model_is_found_by_its_name(name):
    """It may be a path; clients write its slashes as they are, or not."""
    with House("--served-model-name", name) as house:
        for path in (quote(name), quote(name, safe="")):
            assert house.get(f"/v1/models/{path}").json["id"] == name
        missing = house.get("/v1/models/other")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
    message = f"there is no model 'other' here; there is {name!r}"
    assert missing.json["error"]["message"] == message


def test_the_page_is_the_same_for_all():
    """
    It needs no key, so nothing of this server is on it: neither the name of the model nor what the
    Host header says, which could become markup.
    """
    with House("--served-model-name", "<script>x</script>", keys=["sesame"]) as house:
        page = house.get("/", Host='"><b>x')
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert page.body == welcome.page()


def test_openapi_describes_what_is_taken(house):
    """Fuzzers and client generators read it."""
    document = house.get("/openapi.json").json
    calls = {
        (method.upper(), path): call
        for path, methods in document["paths"].items()
        for method, call in methods.items()
    }
    assert set(calls) == set(gate.calls_of(house.service.router))
    for (method, _), call in calls.items():
        assert ("requestBody" in call) == (method == "POST")
    content = calls["POST", "/v1/completions"]["requestBody"]["content"]
    schema = {"$ref": "#/components/schemas/CompletionRequest"}
    assert content == {"application/json": {"schema": schema}}
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["temperature"]["maximum"] == 2


def test_unknown_paths_are_quoted_shortly(house):
    answer = house.get("/" + "x" * 10_000)
    assert answer.status == 404 and len(answer.body) < 1000
    assert answer.json["error"]["message"].endswith("x here; /openapi.json lists what there is")


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("DELETE", "/v1/completions", {"POST"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
        ("POST", "/v1/models/fake", {"GET", "HEAD"}),
    ],
)
def test_other_methods_learn_which_there_are(house, method, path, allowed):
    answer = house.call(method, path).answer()
    assert (answer.status, set(answer.headers["allow"].split(", "))) == (405, allowed)


@pytest.mark.parametrize("path", ["/", "/livez", "/v1/models", "/v1/models/fake", "/nowhere"])
def test_head_is_get_without_a_body(house, path):
    """Load balancers and download tools ask with it first."""
    whole, head = house.get(path), house.call("HEAD", path).answer("HEAD")
    assert (head.status, head.body) == (whole.status, "")
    assert head.headers["content-type"] == whole.headers["content-type"]
