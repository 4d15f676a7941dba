"""
/v1/completions and /v1/chat/completions over HTTP: what becomes of a prompt, and whole answers.
What a choice makes of its tokens is in test_answers.py, and streams are in test_api.py.
"""

import json

import pytest
from tokenizers.processors import TemplateProcessing
from wires import House

from server.text import Encoder
from tokenizer import load_tokenizer
from training.corpus import bpe_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}"
TEMPLATE += "{% endif %}say {{ messages[0].content }}{{ ' thinks' if thinks }}{{ more }}"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint whose tokens are bytes, with a chat template."""
    bpe_tokenizer([]).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def chat(folder):
    with House(directory=folder) as house:
        yield house


def call(house, **fields):
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    return house.call("POST", path, {"max_tokens": 9} | fields)


def scores_of(count: int) -> list[list]:
    """Of so many tokens: the token itself is none of the likeliest."""
    return [[-2.0, [98, 99], [-1.0, -1.5]]] * count


def run(house, text: bytes, finish: str):
    """The engine answers all choices, a token a step; the last one ends a text, or is its limit."""
    tokens = [*text, 256][: len(text) + (finish == "stop")]
    for number, token in enumerate(tokens):
        rows = []
        for id, choice in house.choices.items():
            end = finish if number == len(tokens) - 1 else None
            row = [id, [token], end, 4, None, None]
            if choice.num_logprobs is not None:
                row[4] = scores_of(1)
            if choice.body.num_prompt_logprobs is not None and not number:
                row[5] = scores_of(len(choice.prompt) - 1)
            rows.append(row)
        house.engine.say({"op": "step", "out": rows, "stats": house.engine.stats})


# fields, what the engine says and how it ends; the answer but for what all of them share. A token's
# offset counts characters; bytes that are no character are spelled out.
ANSWERS = r"""
{"prompt": "say hello", "return_token_ids": true, "request_id": "cmpl"} hello stop
{"choices": [{
    "index": 0, "text": "hello", "logprobs": null, "finish_reason": "stop", "stop_reason": null,
    "prompt_token_ids": [115, 97, 121, 32, 104, 101, 108, 108, 111],
    "token_ids": [104, 101, 108, 108, 111, 256]
}], "usage": {
    "prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4}
}}

{"prompt": "é", "logprobs": 1, "echo": true} a€ length
{"choices": [{
    "index": 0, "text": "éa€", "finish_reason": "length", "stop_reason": null, "logprobs": {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"],
        "token_logprobs": [null, -2.0, -2.0, -2.0, -2.0, -2.0],
        "top_logprobs": [
            null, {"b": -1.0, "bytes:\\xa9": -2.0}, {"b": -1.0, "a": -2.0},
            {"b": -1.0, "bytes:\\xe2": -2.0}, {"b": -1.0, "bytes:\\x82": -2.0},
            {"b": -1.0, "bytes:\\xac": -2.0}
        ], "text_offset": [0, 0, 1, 2, 2, 2]
    }
}], "usage": {
    "prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 4}
}}

{"messages": HELLO, "logprobs": true, "top_logprobs": 1, "request_id": "chatcmpl"} h length
{"choices": [{
    "index": 0, "message": {"role": "assistant", "content": "h"}, "finish_reason": "length",
    "stop_reason": null, "logprobs": {"content": [{
        "token": "h", "logprob": -2.0, "bytes": [104],
        "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}]
    }], "refusal": null}
}], "usage": {
    "prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4}
}}"""

ROWS = ANSWERS.replace("HELLO", json.dumps(HELLO)).strip().split("\n\n")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.splitlines()[0])
def test_whole_answers_have_exactly_these_fields(chat, row):
    first, _, expected = row.partition("\n")
    fields, text, finish = first.rsplit(" ", 2)
    fields = json.loads(fields)
    is_chat = "messages" in fields
    caller = call(chat, **fields)
    run(chat, text.encode(), finish)
    answer = caller.answer().json
    id = fields.get("request_id") or answer["id"].partition("-")[2]
    head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{id}", "model": "fake"}
    head |= {"object": "chat.completion" if is_chat else "text_completion"}
    created = answer["created"]
    assert created == int(chat.clock.clock.time())
    assert answer == head | {"created": created} | json.loads(expected)


# --------------------------------------------------------------------------------------------------
# What becomes a prompt


def prompt_of(house, **fields) -> list[int]:
    """The tokens that the engine gets of a call, and /tokenize counts and shows."""
    body = {name: value for name, value in fields.items() if name != "max_tokens"}
    caller = call(house, **fields)
    sent = house.engine.of("add")[-1]["prompt"]
    caller.hang_up()
    tokens = house.call("POST", "/tokenize", body).answer().json
    assert (tokens["tokens"], tokens["count"]) == (sent, len(sent))
    return sent


def test_variables_of_the_template(folder):
    """They were refused by name; the server's own hold where a request has none."""
    with House(directory=folder) as house:
        house.service.encoder = Encoder(folder, variables={"thinks": True})
        for variables, text in (
            (None, " thinks"),
            ({"more": [1, "<end>"]}, " thinks[1, '<end>']"),
            ({"thinks": False, "self": 1, "more": "."}, "."),
        ):
            prompt = prompt_of(house, messages=HELLO, chat_template_kwargs=variables)
            assert bytes(prompt) == f"say hello{text}".encode()


def test_a_generation_prompt_may_be_left_out(folder):
    template = "{{ messages[0].content }}{{ '!' if add_generation_prompt }}"
    (folder / "chat_template.jinja").write_text(template)
    with House(directory=folder) as house:
        assert bytes(prompt_of(house, messages=HELLO)) == b"hello!"
        prompt = prompt_of(house, messages=HELLO, add_generation_prompt=False)
        assert bytes(prompt) == b"hello"


def test_chats_are_refused_with_reasons(chat):
    with House() as plain:
        error = call(plain, messages=HELLO).answer().json["error"]
    assert "fake has no chat template" in error["message"] and error["param"] == "messages"
    error = call(chat, messages=[{"role": "system", "content": "x"}]).answer().json["error"]
    assert (error["message"], error["param"]) == ("no system message", "messages")


def test_a_bos_comes_once_to_prompts_and_chats(folder):
    """
    A tokenizer puts it before a prompt, a template before a conversation: a chat had two of them,
    and none of the tokenizer's where its text could be part of a control token's name ("a <"). An
    echo has it only where it was sent.
    """
    tokenizer = bpe_tokenizer([])
    end = tokenizer.names[256]
    template = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 256)])
    tokenizer.backend.post_processor = template
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}say {{ messages[0].content }}")
    cut_name = [{"role": "user", "content": "a <"}]
    with House(directory=folder) as house:
        house.encoder.tokenizer = load_tokenizer(folder)
        for fields, tokens in (
            ({"prompt": "hi"}, [256, *b"hi"]),
            ({"prompt": "hi", "add_special_tokens": False}, [*b"hi"]),
            ({"messages": HELLO}, [256, *b"say hello"]),
            ({"messages": HELLO, "add_special_tokens": True}, [256, 256, *b"say hello"]),
            ({"messages": cut_name, "add_special_tokens": True}, [256, 256, *b"say a <"]),
        ):
            assert prompt_of(house, **fields) == tokens
        for prompt, echo in (("hi", "hi"), (f"{end}hi", f"{end}hi"), ([256, *b"hi"], f"{end}hi")):
            caller = call(house, prompt=prompt, echo=True, max_tokens=0)
            assert caller.answer().json["choices"][0]["text"] == echo
        caller = call(house, prompt="hi", echo=True, logprobs=0)
        run(house, b"x", "length")
        logprobs = caller.answer().json["choices"][0]["logprobs"]
        assert logprobs["tokens"][:2] == [end, "h"] and logprobs["text_offset"][:3] == [0, 0, 1]
