"""
/v1/completions and /v1/chat/completions over HTTP: what becomes of a prompt, and whole answers.
test_answers.py tests the text of a choice, test_api.py tests streams.
"""

import json
import re

import pytest
from tokenizers.normalizers import Strip
from tokenizers.processors import TemplateProcessing
from wires import House

from server.text import Encoder
from training.corpus import bpe_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}"
TEMPLATE += "{% endif %}say {{ messages[0].content }}{{ ' thinks' if thinks }}{{ more }}"
TEMPLATE += "{{ '!' if add_generation_prompt }}"


@pytest.fixture
def folder(tmp_path):
    """Return a checkpoint whose tokens are bytes, with a chat template."""
    bpe_tokenizer([]).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def chat(folder):
    with House(directory=folder) as house:
        yield house


def call(house, **fields):
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    return house.call(path, {"max_tokens": 9} | fields)


# fields, the engine's text and how it ends; then the answer, without the fields that all share
ANSWERS = r"""
{"prompt": "say hello", "return_token_ids": true, "request_id": "cmpl"} hello stop
{"object": "text_completion", "choices": [{
    "index": 0, "text": "hello", "logprobs": null, "finish_reason": "stop", "stop_reason": null,
    "prompt_token_ids": [115, 97, 121, 32, 104, 101, 108, 108, 111],
    "token_ids": [104, 101, 108, 108, 111, 256]
}], "usage": {
    "prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4}
}}

{"messages": HELLO, "return_token_ids": true, "request_id": "chatcmpl"} h length
{"object": "chat.completion",
"prompt_token_ids": [115, 97, 121, 32, 104, 101, 108, 108, 111, 33],
"choices": [{
    "index": 0, "message": {"role": "assistant", "content": "h"}, "finish_reason": "length",
    "stop_reason": null, "logprobs": null, "token_ids": [104]
}], "usage": {
    "prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 4}
}}"""

ROWS = ANSWERS.replace("HELLO", json.dumps(HELLO)).strip().split("\n\n")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.splitlines()[0])
def test_whole_answers_have_exactly_these_fields(chat, row):
    first, _, expected = row.partition("\n")
    fields, text, finish = first.rsplit(" ", 2)
    fields = json.loads(fields)
    caller = call(chat, **fields)
    end = [256] if finish == "stop" else []
    chat.engine.step([*text.encode(), *end], finish, cached=4)
    name = fields["request_id"]
    head = {"id": f"{name}-{name}", "model": "fake", "created": int(chat.clock.clock.time())}
    assert caller.json == head | json.loads(expected)


# --------------------------------------------------------------------------------------------------
# Prompts


def prompt_of(house, **fields) -> list[int]:
    """
    Return the tokens that the engine gets for a call, after checking that /tokenize counts and
    shows the same ones.
    """
    body = {name: value for name, value in fields.items() if name != "max_tokens"}
    caller = call(house, **fields)
    sent = house.engine.added["prompt"]
    caller.hang_up()
    tokens = house.call("/tokenize", body).json
    assert (tokens["tokens"], tokens["count"]) == (sent, len(sent))
    return sent


def test_variables_of_the_template(folder):
    """
    Previously they were refused by name. The server's own variables apply where a request has none.
    """
    with House(directory=folder) as house:
        house.service.encoder = Encoder(folder, variables={"thinks": True})
        for variables, text in (
            (None, " thinks!"),
            ({"more": [1, "<end>"]}, " thinks[1, '<end>']!"),
            ({"thinks": False, "self": 1, "more": "."}, ".!"),
        ):
            prompt = prompt_of(house, messages=HELLO, chat_template_kwargs=variables)
            assert bytes(prompt) == f"say hello{text}".encode()
        prompt = prompt_of(house, messages=HELLO, add_generation_prompt=False)
        assert bytes(prompt) == b"say hello thinks"


def test_a_template_may_refuse_a_chat(chat):
    error = call(chat, messages=[{"role": "system", "content": "x"}]).answer.error
    assert (error["message"], error["param"]) == ("no system message", "messages")


TOO_LONG = [{"prompt": "a" * 9000}, {"messages": [{"role": "user", "content": "a" * 9000}]}]


@pytest.mark.parametrize("fields", TOO_LONG)
def test_what_cannot_fit_is_refused_unencoded(folder, monkeypatch, fields):
    """/tokenize still counts them. 1,000 tokens of this model have at most 5,000 characters."""
    with House(directory=folder) as house:
        tokenizers = [house.encoder.tokenizer, *(lane.tokenizer for lane in house.encoder.lanes)]
        for tokenizer in tokenizers:
            monkeypatch.setattr(tokenizer, "least_tokens", lambda text: len(text) // 5)
        count = house.call("/tokenize", fields).json["count"]
        assert 9000 <= count < 9010
        for tokenizer in tokenizers:
            monkeypatch.setattr(tokenizer, "encode", None)
        answer = call(house, **fields).answer
    status, code, message = answer.refusal
    assert (status, code) == (400, "context_length_exceeded")
    assert answer.error["param"] == next(iter(fields))
    limit = "this model's maximum context length is 1000 tokens"
    assert re.fullmatch(f"{limit}, but the prompt has at least 1,80.: shorten it", message)


def test_a_prompt_that_has_text_but_no_tokens_is_refused(folder):
    """
    lm-eval sends echo and logprobs for each line of a text; such a prompt used to cause a 500.
    """
    tokenizer = bpe_tokenizer([])
    tokenizer.backend.normalizer = Strip()
    tokenizer.save(folder)
    with House(directory=folder) as house:
        for prompt in (" ", ["a", "  "]):
            error = call(house, prompt=prompt, echo=True, logprobs=1).answer.error
            assert (error["message"][:15], error["param"]) == ("prompt is empty", "prompt")
        tokens = house.call("/tokenize", {"prompt": " "}).json
        assert (tokens["tokens"], house.engine.of("add")) == ([], [])


def test_a_bos_comes_once_to_prompts_and_chats(folder):
    """
    A tokenizer puts it before a prompt, a template before a conversation. Previously a chat had
    two, and none of the tokenizer's if its text could be part of a control token's name ("a <"). An
    echo shows it only if the client sent it.
    """
    tokenizer = bpe_tokenizer([])
    end = tokenizer.names[256]
    template = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 256)])
    tokenizer.backend.post_processor = template
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}say {{ messages[0].content }}")
    cut_name = [{"role": "user", "content": "a <"}]
    with House(directory=folder) as house:
        for fields, tokens in (
            ({"prompt": "hi"}, [256, *b"hi"]),
            ({"prompt": "hi", "add_special_tokens": False}, [*b"hi"]),
            ({"messages": HELLO}, [256, *b"say hello"]),
            ({"messages": HELLO, "add_special_tokens": True}, [256, 256, *b"say hello"]),
            ({"messages": cut_name, "add_special_tokens": True}, [256, 256, *b"say a <"]),
        ):
            assert prompt_of(house, **fields) == tokens
        for prompt, echo in (("hi", "hi"), (f"{end}hi", f"{end}hi"), ([256, *b"hi"], f"{end}hi")):
            caller = call(house, prompt=prompt, echo=True, max_tokens=0, n=2)
            assert [choice["text"] for choice in caller.json["choices"]] == [echo] * 2
        caller = call(house, prompt="hi", echo=True, logprobs=0)
        (id,) = house.choices
        score = [-2.0, [], []]
        row = [id, [120], "length", 0, [score], [score] * 2]
        house.engine.say({"op": "step", "out": [row], "stats": house.engine.stats})
        logprobs = caller.choice["logprobs"]
        assert logprobs["tokens"][:2] == [end, "h"]
        assert logprobs["text_offset"][:3] == [0, 0, 1]
