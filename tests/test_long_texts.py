"""/tokenize and /detokenize, and texts that are too long to be encoded where clients are served."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from server import HELLO, Server, ask, error_of

from serving import encoder

pytestmark = pytest.mark.usefixtures("uvicorn_ends_soon")


def test_tokenize_and_detokenize_are_vllms(server):
    def post(path, **body):
        return server.http.post(path, json=body)

    answer = post("/tokenize", prompt="a€", model="fake", return_token_strs=True).json()
    assert answer == {
        "count": 4, "max_model_len": 100_000, "tokens": [97, 226, 130, 172],
        "token_strs": ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"],
    }  # fmt: skip
    assert post("/tokenize", prompt="").json()["tokens"] == []
    assert post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "a€"}
    assert (
        error_of(post("/detokenize", tokens=[257]))["message"]
        == "token id 257 is outside the vocabulary, 0..256"
    )
    assert error_of(post("/tokenize"))["message"] == "give either prompt or messages"
    assert error_of(post("/tokenize", prompt="\0"))["param"] == "prompt"
    assert post("/tokenize", prompt="a", model="other").status_code == 404
    assert (
        "no chat template"
        in error_of(post("/tokenize", messages=[{"role": "user", "content": "x"}]))["message"]
    )


@pytest.mark.parametrize("size", [2**18, pytest.param(2**22, marks=pytest.mark.slow)])
def test_no_text_holds_up_the_server(size):
    """
    8 runs of 499,999 blanks stopped the server for minutes, six calls with 4 MiB of one rare
    character for 60 s (with 869 MiB of memory): texts were encoded, and tokens named, where the
    interpreter was held. /livez answers within a second meanwhile, and so do short calls.
    """
    runs = (" " * (size // 8 - 1) + "x") * 8
    rare = "\U0001f9ff" * (size // 4)
    calls = [("/tokenize", {"prompt": text}) for text in (runs, rare, rare, rare)]
    calls.append(("/tokenize", {"prompt": rare, "return_token_strs": True}))
    calls.append(("/detokenize", {"tokens": [200] * (size // 5)}))
    calls.append(("/v1/completions", {"prompt": runs}))
    with Server("--max-body-mib", "16") as server, ThreadPoolExecutor(len(calls)) as pool:
        longest = 0.0
        answers = [
            pool.submit(server.http.post, path, json=body, timeout=250) for path, body in calls
        ]
        while not all(answer.done() for answer in answers):
            started = (
                time.process_time()
            )  # the server's, which is ours: another process's load is not counted
            assert server.get("/livez") == 200
            assert server.http.post("/tokenize", json={"prompt": "short"}).json()["count"] == 5
            longest = max(longest, time.process_time() - started)
            time.sleep(0.01)
        assert longest < 1
        results = [answer.result() for answer in answers]
    statuses = [200, 200, 200, 200, 200 if size <= 2**18 else 400, 200, 400]
    assert [result.status_code for result in results] == statuses
    assert results[0].json()["tokens"] == list(runs.encode())
    assert results[1].json()["tokens"] == list(rare.encode())
    assert results[5].json() == {"prompt": "\ufffd" * (size // 5)}
    assert error_of(results[6])["code"] == "context_length_exceeded"


def test_long_texts_are_not_encoded_where_clients_are_served(server):
    """
    With the process that encodes stopped, only calls with long texts wait: others, and /livez, are
    answered.
    """
    long = {"prompt": "a" * 5000}
    assert server.http.post("/tokenize", json=long).status_code == 200  # it has started
    pid = server.service.encoder.process.pid
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(3) as pool:
        calls = [
            ("/tokenize", long),
            ("/v1/completions", long),
            ("/detokenize", {"tokens": [97] * 5000}),
        ]
        answers = [pool.submit(server.http.post, path, json=body) for path, body in calls]
        try:
            for _ in range(20):
                assert server.get("/livez") == 200
                assert server.http.post("/tokenize", json={"prompt": "short"}).json()["count"] == 5
            assert not any(answer.done() for answer in answers)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [answer.result().status_code for answer in answers] == [200, 200, 200]


def test_what_cannot_be_encoded_now_is_refused_at_once(server, monkeypatch):
    monkeypatch.setattr(encoder, "MAX_WAITING", 0)
    response = server.http.post("/tokenize", json={"prompt": "a" * 5000})
    assert response.status_code == 429 and response.headers["retry-after"]
    assert "too much text is waiting to be encoded" in error_of(response)["message"]


def test_all_of_a_message_counts_as_waiting_text(chat, monkeypatch):
    """Only the contents were counted: names of 4 MiB each got past the limit of what waits."""
    monkeypatch.setattr(encoder, "MAX_WAITING", 100)
    assert ask(chat, max_tokens=1).status_code == 200
    response = ask(chat, [HELLO[0] | {"name": "n" * 100}])
    assert response.status_code == 429 and error_of(response)["code"] == "encoder_busy"


def test_the_process_that_encodes_is_started_again(server):
    """The client whose text it was working at gets one error, the next call another process."""
    long = {"prompt": "a" * 5000}
    assert server.http.post("/tokenize", json=long).status_code == 200
    server.service.encoder.process.kill()
    response = server.http.post("/tokenize", json=long)
    assert (
        response.status_code == 503
        and "the encoding process ended" in error_of(response)["message"]
    )
    assert server.http.post("/tokenize", json=long).json()["count"] == 5000
