"""The answer of each path; and refusals: their status, and messages that say why."""

import gzip
import json
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from wires import House

from server import live
from server.app import greeting
from server.protocol import ChatRequest, CompletionRequest


@pytest.fixture(scope="module")
def house():
    with House("--max-num-seqs", "8", "--max-queue", "8", "--max-body-mib", "0.1") as house:
        yield house


# --------------------------------------------------------------------------------------------------
# Refusals

# call and body -> status, the field at fault, code, message ("..." stands for any text). DEEP is a
# list nested in 90,000 others, NINES a number of 5,000 digits, LONG 90,000 characters.
REFUSED = """
POST /v1/completions {"prompt": -> 400 - - the body must be a JSON object: Invalid JSON: EOF while parsing a value at ...
POST /v1/completions x -> 400 - - the body must be a JSON object: Invalid JSON: expected value at line 1 column 1
POST /v1/completions [1] -> 400 - - the body must be a JSON object: ...
POST /v1/completions null -> 400 - - the body must be a JSON object: ...
POST /v1/completions {"prompt": "\xff"} -> 400 - - the body must be a JSON object: Invalid JSON: invalid unicode code point...
POST /v1/completions {"prompt": "\\ud800"} -> 400 - - the body must be a JSON object: Invalid JSON: ...
POST /v1/completions {"prompt": "a", "\\udc00": 1} -> 400 - - the body must be a JSON object: Invalid JSON: ...
POST /v1/completions {"prompt": "a", "seed": 18446744073709551616} -> 400 seed - seed: Input should...
POST /v1/completions {"prompt": "a", "seed": NINES} -> 400 - - the body must be a JSON object: Invalid JSON: number out of ...
POST /v1/completions {"prompt": "a", "top_p": NaN} -> 400 top_p - top_p: Input should be a finite ...
POST /v1/completions DEEP -> 400 - - the body must be a JSON object: Invalid JSON: recursion limit exceeded...
POST /v1/completions {"user": DEEP -> 400 - - the body must be a JSON object: Invalid JSON: recursion limit exceeded...
POST /v1/completions {"prompt": "a", "model": "LONG"} -> 404 model model_not_found there is no model 'xxx...
POST /v1/completions LONGLONG -> 413 - - the body has more than 104857 bytes: shorten it or raise --max-body-mib
POST /v1/completions {"prompt": "a", "model": ""} -> 404 model model_not_found there is no model '' here, only 'fake'
POST /v1/completions {"prompt": [18446744073709551616]} -> 400 prompt - token id 18446744073709551616 is outside the vocabulary, 0..256
POST /v1/completions {"prompt": "a\0b"} -> 400 - - the body must be a JSON object: Invalid JSON: ...
POST /v1/completions {"prompt": "abcd", "max_tokens": 997} -> 400 max_tokens context_length_exceeded this model's maximum context length is 1000 tokens, 4 prompt tokens and max_tokens 997 make 1,001: shorten the prompt or lower max_tokens
POST /v1/completions {"prompt": ["b", "abcd"], "max_tokens": 997} -> 400 max_tokens context_length_exceeded ...
POST /v1/completions {"prompt": [1, 1, 1, 1], "max_tokens": 997} -> 400 max_tokens context_length_exceeded ...
POST /v1/completions {"prompt": ["\\u0000", "a"], "n": 16} -> 400 prompt - 32 prompts x n in one call, but the limit is 16: split it
POST /v1/chat/completions {"messages": [{"role": "user", "content": "x"}]} -> 400 messages - fake has no chat template: use /v1/completions
POST /tokenize {"messages": [{"role": "user", "content": "x"}]} -> 400 messages - fake has no chat ...
POST /tokenize {"prompt": "a", "model": "other"} -> 404 model model_not_found there is no model 'other' here, only ...
POST /tokenize {} -> 400 prompt - prompt or messages must be sent, but not both
POST /detokenize {"tokens": [97, 257]} -> 400 tokens - token id 257 is outside the vocabulary, 0..256
POST /detokenize {"tokens": [97, -1]} -> 400 tokens - token id -1 is outside the vocabulary, 0..256
POST /detokenize {"tokens": [18446744073709551616]} -> 400 tokens - token id 18446744073709551616 is outside the vocabulary, 0..256
GET /v1/models/other -> 404 model model_not_found there is no model 'other' here, only 'fake'
GET /v1/models/ -> 404 - - there is no GET /v1/models/ here; call /v1/models (a base URL ends in /v1)
POST /v1/completions/ {} -> 404 - - there is no POST /v1/completions/ here; call /v1/completions (a base URL ends in /v1)
POST //v1/completions {} -> 404 - - there is no POST //v1/completions here; call /v1/completions (a base URL ends in /v1)
POST /v1/v1/chat/completions {} -> 404 - - there is no POST /v1/v1/chat/completions here; call /v1/chat/completions (a base ...
POST /v1/tokenize {} -> 404 - - there is no POST /v1/tokenize here; call /tokenize
GET /v1 -> 404 - - there is no GET /v1 here; there is /v1/completions, ...
POST /v1/completions \xef\xbb\xbf{"prompt": "a"} -> 400 - - the body must be plain UTF-8, got a byte-order mark
POST /v1/completions \xff\xfe{\0}\0 -> 400 - - the body must be plain UTF-8, got UTF-16
POST /v1/completions {\0}\0 -> 400 - - the body must be plain UTF-8, got UTF-16
POST /v1/completions \0{\0} -> 400 - - the body must be plain UTF-8, got UTF-16
GET /v1/nothing -> 404 - - there is no GET /v1/nothing here; there is /v1/completions, ...
GET /models -> 404 - - there is no GET /models here; call /v1/models (a base URL ends in /v1)
PUT /completions -> 404 - - there is no PUT /completions here; call /v1/completions (a base URL ends in /v1)
GET /LONG -> 404 - - there is no GET /xxx...
DELETE /v1/completions -> 405 - - /v1/completions is for POST, not DELETE
POST /metrics {} -> 405 - - /metrics is for GET or HEAD, not POST
"""  # noqa: E501
LONG_WORDS = {"DEEP": "[" * 90_000, "NINES": "9" * 5000, "LONG": "x" * 60_000}


@pytest.mark.parametrize("row", REFUSED.strip().splitlines(), ids=lambda row: row[:60].strip())
def test_calls_that_are_refused(house, row):
    call, expected = row.split(" -> ")
    for word, long in LONG_WORDS.items():
        call = call.replace(word, long)
    method, path, *body = call.split(" ", 2)
    answer = house.call(path, "".join(body).encode("latin-1"), method).answer
    status, code, message = answer.refusal
    assert len(answer.body) < 1000
    assert answer.error["type"] == "invalid_request_error"
    shown = f"{status} {answer.error['param'] or '-'} {code or '-'} {message}"
    assert shown.startswith(expected.removesuffix("..."))
    assert shown == expected or expected.endswith("...")
    assert not house.engine.of("add")
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("form", ["gzip", "br", "identity"])
def test_a_compressed_body_is_named(house, form):
    answer = house.call("/detokenize", b"\x1f\x8b", Content_Encoding=form).answer
    expected = "the body must be a JSON object"
    if form != "identity":
        expected = f"the body must be plain UTF-8, got Content-Encoding {form}"
    assert answer.refusal[2].startswith(expected)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/jsonp", "application/json-seq;"])
def test_a_body_needs_the_type_of_json(house, kind):
    """
    This protects against CSRF: a page of another origin may send other types without asking first.
    """
    message = "the body must be JSON, sent with the header Content-Type: application/json"
    body = {"tokens": [97, 256]}
    answer = house.call("/detokenize", body, Content_Type=kind).answer
    assert answer.refusal == (400, None, message)
    taken = house.call("/detokenize", body, Content_Type="Application/JSON; charset=utf-8")
    assert taken.json == {"prompt": "a<|endoftext|>"}


# --------------------------------------------------------------------------------------------------
# Answers


def test_so_many_tokens_are_named(house):
    """Previously the names of 4 million tokens took 60 s and 869 MiB."""
    for length, status in ((2**14, 200), (2**14 + 1, 400)):
        body = {"prompt": "a" * length, "return_token_strs": True}
        answer = house.call("/tokenize", body).answer
        assert answer.status == status
    assert answer.refusal[2].endswith("not 16385: leave it out")


def test_tokenize_and_detokenize_are_vllms(house):
    body = {"prompt": "a€", "model": "fake", "return_token_strs": True}
    answer = house.call("/tokenize", body).json
    assert answer == {
        "count": 4, "max_model_len": 1000, "tokens": [97, 226, 130, 172],
        "token_strs": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"],
    }  # fmt: skip
    for ids, text in ((answer["tokens"], "a€"), ([], "")):
        assert house.call("/detokenize", {"tokens": ids}).json == {"prompt": text}
        assert house.call("/tokenize", {"prompt": text}).json["tokens"] == ids


def test_a_model_is_described(house):
    """It has no template, so it does not chat."""
    model = {
        "id": "fake", "object": "model", "created": 1_700_000_000, "owned_by": "pagedgpt",
        "max_model_len": 1000, "chat": False,
    }  # fmt: skip
    assert house.get("/v1/models/fake").json == model
    assert house.get("/v1/models").json == {"object": "list", "data": [model]}


def test_a_router_learns_the_limits_and_the_load(house):
    """
    The fields have SGLang's names. The load is that of the engine's last message, or none at first.
    """
    limits = {"context_length": 1000, "max_running_requests": 8}
    names = {"served_model_name": "fake", "model_path": "fake", "is_generation": True}
    for path in ("/server_info", "/model_info"):
        assert house.get(path).json == names | limits
    idle = {
        "dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_reqs": 0,
        "token_usage": 0.0,
    }  # fmt: skip
    assert house.get("/v1/loads").json == {"dp_rank_count": 1, "loads": [idle]}
    house.engine.step(running=3, waiting=2, kv_usage=0.251)
    busy = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_total_reqs": 5}
    loads = [idle | busy | {"token_usage": 0.251}]
    assert house.get("/v1/loads").json == {"dp_rank_count": 1, "loads": loads}


@pytest.mark.parametrize("name", ["/data/model", "models/", "a b%2F", "a\udcff"])
def test_one_model_is_found_by_its_name(name):
    """
    The name may be a path, whose bytes may not be UTF-8. Clients may or may not quote its slashes.
    """
    with House("--served-model-name", name) as house:
        name = name.replace("\udcff", "?")
        for path in (quote(name), quote(name, safe="")):
            assert house.get(f"/v1/models/{path}").json["id"] == name


def test_a_server_without_its_page_says_so(house, monkeypatch):
    """Previously it was "a bug in this server: FileNotFoundError"."""
    monkeypatch.setattr(live, "page", Mock(side_effect=FileNotFoundError))
    assert house.call("/").refusal == (404, None, "this server has no page (server/page)")


def test_the_page_is_the_same_for_all():
    """
    It needs no key, so it must show nothing about this server: neither the name of the model nor
    the Host header, which could become markup.
    """
    with House("--served-model-name", "<script>x</script>", keys=["sesame"]) as house:
        page = house.get("/", Host='"><b>x', accept_encoding="gzip;q=0")
        zipped = house.get("/", accept_encoding="br, gzip")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert page.body == live.page() == gzip.decompress(live.zipped_page()).decode()
    assert zipped.headers["content-encoding"] == "gzip"
    assert zipped.headers["content-length"] == str(len(live.zipped_page()))


@pytest.mark.parametrize("path", ["/", "/livez", "/v1/models", "/nowhere"])
def test_head_is_get_without_a_body(house, path):
    """Load balancers and download tools use it first."""
    whole = house.get(path)
    head = house.call(path, method="HEAD").answer
    assert (head.status, head.body) == (whole.status, "")
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize(("chats", "kind"), [(False, CompletionRequest), (True, ChatRequest)])
def test_the_greetings_command_is_a_call_that_is_served(chats, kind):
    """The command for a chat also has a key."""
    first, second = greeting("m", "http://h:1", chats, has_key=chats).splitlines()
    assert first == "serving m at http://h:1"
    command, _, body = second.strip().removesuffix("'").partition(" -d '")
    path = "/v1/chat/completions" if chats else "/v1/completions"
    assert kind.model_validate(json.loads(body))
    key = " -H 'Authorization: Bearer YOUR_KEY'" if chats else ""
    assert command == f"curl http://h:1{path} -H 'Content-Type: application/json'{key}"
