"""What /v1/chat/completions answers, and what vLLM's load generator needs of both kinds of call."""

import json

import pytest
from server import EOS, HELLO, Server, ask, error_of
from tokenizers.processors import TemplateProcessing

from tokenizer import load_tokenizer
from training.corpus import bpe_tokenizer


def test_a_chats_answer_has_exactly_these_fields(chat):
    answer = ask(chat, max_tokens=50).json()
    assert answer.pop("id").startswith("chatcmpl-") and answer.pop("created")
    message = {"role": "assistant", "content": "hello"}
    assert answer == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [{
            "message": message, "index": 0, "logprobs": None, "finish_reason": "stop",
            "stop_reason": None,
        }],
        "usage": {
            "prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }  # fmt: skip
    assert chat.engine.added[-1]["params"]["max_tokens"] == 50


def test_chat_may_be_as_long_as_the_context(chat):
    ask(chat)
    assert chat.engine.added[-1]["params"]["max_tokens"] == 100_000 - 9


def test_a_chats_stream_begins_with_the_role(chat):
    """
    First the role, then the text, last an empty delta with the reason; then the usage, if asked
    for.
    """
    response = ask(
        chat, stream=True, n=2, stream_options={"include_usage": True}, return_token_ids=True
    )
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and {chunk["object"] for chunk in chunks} == {
        "chat.completion.chunk"
    }
    assert chunks.pop()["usage"]["completion_tokens"] == 12
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in own[1:-1]) == "hello"
        assert own[-1]["delta"] == {} and [c["finish_reason"] for c in own] == [None] * (
            len(own) - 1
        ) + ["stop"]
        assert [token for choice in own for token in choice["token_ids"]] == [*b"hello", EOS]
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [
        list(b"say hello")
    ] * 2


def test_usage_may_be_in_every_chunk_of_a_chat(chat):
    """The role costs no token yet."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = ask(chat, stream=True, stream_options=options)
    chunks = [
        json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")
    ]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-3:] == [6, 6, 6]
    assert all(chunk["usage"]["prompt_tokens"] == 9 for chunk in chunks)


# What `vllm bench serve` of vLLM's commit 02cfb53 sends, which comes only with all of vLLM:
# --backend openai and --backend openai-chat, with and without --ignore-eos.
VLLM_BENCH = {"stream": True, "stream_options": {"include_usage": True}}


VLLM_BENCH_TEXT = {
    "model": "fake",
    "prompt": "say hello",
    "repetition_penalty": 1.0,
    "max_tokens": 4,
    "logprobs": None,
}


VLLM_BENCH_CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "max_completion_tokens": 4,
}


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True, "temperature": 0.0}])
def test_vllms_load_generator_counts_its_tokens(chat, more):
    """
    It takes a request for failed that has no chunk with a choice, and its number of tokens from a
    last chunk that has a usage and no choice.
    """
    calls = {"/v1/completions": VLLM_BENCH_TEXT, "/v1/chat/completions": VLLM_BENCH_CHAT}
    for path, body in calls.items():
        response = chat.http.post(
            path, json=VLLM_BENCH | body | more, headers={"x-request-id": "bench-0"}
        )
        assert response.status_code == 200, response.text
        *chunks, done = [
            event.removeprefix("data: ") for event in response.text.strip().split("\n\n")
        ]
        *chunks, last = [json.loads(chunk) for chunk in chunks]
        assert done == "[DONE]" and any(chunk["choices"] for chunk in chunks)
        assert not any(chunk["usage"] for chunk in chunks)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


def test_logprobs_of_a_chat_have_openais_shape(chat):
    content = ask(chat, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    top = {"token": "i", "logprob": -1.0, "bytes": [105]}
    assert content[0] == {"token": "h", "logprob": -2.0, "bytes": [104], "top_logprobs": [top]}
    assert [entry["token"] for entry in content] == [*"hello", "<end>"]
    content = ask(chat, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_variables_of_the_template(chat, tmp_path):
    """They were refused by name; the server's own hold where a request says nothing."""
    bpe_tokenizer([]).save(tmp_path)
    template = "say {{ messages[0].content }}{{ ' thinks' if thinks }}{{ more }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    flags = ["--default-chat-template-kwargs", '{"thinks": true}']
    with Server(*flags, directory=tmp_path) as server:
        for variables, said in (
            (None, " thinks"),
            ({}, " thinks"),
            ({"thinks": False}, ""),
            ({"more": [1, "<end>"]}, " thinks[1, '<end>']"),
            ({"thinks": False, "self": 1, "more": "."}, "."),
        ):
            fields = {"chat_template_kwargs": variables}
            answer = ask(server, **fields).json()
            assert answer["choices"][0]["message"]["content"] == f"hello{said}"
            tokens = server.http.post("/tokenize", json={"messages": HELLO} | fields).json()
            assert bytes(tokens["tokens"]) == f"say hello{said}".encode()
            assert tokens["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"tools": []}, "has 'tools', which is not a caller's to set: leave it out"),
        ({"a": "x" * 2**14}, "has 16393 characters, at most 16384 are taken: shorten it"),
        ([], ": input should be an object"),
        ("a", ": input should be an object"),
    ],
)
def test_variables_that_are_refused(chat, variables, message):
    for path, more in ("/v1/chat/completions", {"max_tokens": 9}), ("/tokenize", {}):
        body = {"messages": HELLO, "chat_template_kwargs": variables} | more
        response = chat.http.post(path, json=body)
        error = error_of(response)
        assert (response.status_code, error["param"]) == (400, "chat_template_kwargs")
        assert error["message"].startswith("chat_template_kwargs") and message in error["message"]


def test_chats_are_refused_with_reasons(chat, server):
    error = error_of(ask(server))
    assert "fake has no chat template" in error["message"] and error["param"] == "messages"
    assert (
        error_of(ask(chat, [{"role": "system", "content": "x"}]))["message"] == "no system message"
    )
    assert error_of(ask(chat, tools=[{"type": "function"}]))["param"] == "tools"
    assert ask(chat, model="other").status_code == 404


def test_a_bos_comes_once_to_prompts_and_chats(tmp_path, uvicorn_ends_soon):
    """
    A tokenizer puts it before a prompt, a template before a conversation: a chat had two of them.
    An echo has it only where it was sent.
    """
    tokenizer = bpe_tokenizer([])
    end = tokenizer.names[256]
    template = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 256)])
    tokenizer.backend.post_processor = template
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}say {{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "hi"}]
    with Server(directory=tmp_path, tokenizer=tokenizer) as server:

        def tokenized(**fields):
            return server.http.post("/tokenize", json=fields).json()["tokens"]

        assert tokenized(prompt="say hi") == [256, *b"say hi"] == tokenized(messages=chat)
        assert tokenized(prompt="say hi", add_special_tokens=False) == [*b"say hi"]
        assert tokenized(messages=chat, add_special_tokens=True) == [256, 256, *b"say hi"]
        for fields, bos in (({}, [256]), ({"add_special_tokens": False}, [])):
            answer = server.answer("say hi", return_token_ids=True, echo=True, **fields)
            assert answer["choices"][0]["text"] == "say hihi"
            assert server.engine.added[-1]["prompt"] == [*bos, *b"say hi"]
        for prompt in (f"{end}say hi", [256, *b"say hi"]):
            assert server.answer(prompt, echo=True)["choices"][0]["text"] == f"{end}say hihi"
        logprobs = server.answer("say hi", echo=True, logprobs=0)["choices"][0]["logprobs"]
        assert logprobs["tokens"][:3] == [end, "s", "a"] and logprobs["text_offset"][:3] == [
            0,
            0,
            1,
        ]
        ask(server, messages=chat)
        assert server.engine.added[-1]["prompt"] == [256, *b"say hi"]
