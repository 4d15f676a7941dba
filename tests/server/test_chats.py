"""Chats: variables of the template, refusals, and where a BOS comes from."""

import pytest
from fake_server import HELLO, Server, ask, error_of
from tokenizers.processors import TemplateProcessing

from tokenizer import load_tokenizer
from training.corpus import bpe_tokenizer


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
