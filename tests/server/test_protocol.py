"""
The rules of a request body, as tables: values that pass, and refusals with their words. Without a
server, so that a rule costs a line here.
"""

import json
import math
import time
from dataclasses import fields as fields_of

import pytest
from openai.types import completion_create_params as text_create_params
from openai.types.chat import completion_create_params
from pydantic import ValidationError

from params import RANGES, SamplingParams
from server import protocol
from server.protocol import (
    IGNORED,
    INT32,
    MAX_SCORES,
    NOT_SERVED,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    body_refusal,
    error_body,
    error_response,
)

HELLO = [{"role": "user", "content": "x"}]
LEAST = {CompletionRequest: {"prompt": "p"}, ChatRequest: {"messages": HELLO}}
LEAST |= {TokenizeRequest: {"prompt": "p"}, DetokenizeRequest: {"tokens": [1]}}
BOTH = pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])


def parse(kind=CompletionRequest, **body):
    return kind.model_validate(LEAST[kind] | body)


def chat(**body) -> ChatRequest:
    return parse(ChatRequest, **body)


def refusal(kind=CompletionRequest, **body) -> ApiError:
    """The error that a body ends in, as app.py makes it."""
    with pytest.raises(ValidationError) as caught:
        parse(kind, **body)
    error = body_refusal(caught.value)
    assert error.status == 400 and len(error_body(error)) < 1000
    return error


# --------------------------------------------------------------------------------------------------
# Values of fields

BOUNDS = {name: limits.bounds for name, limits in RANGES.items()}
BOUNDS |= {"top_k": {"ge": -1, "lt": INT32}, "n": {"ge": 1, "le": 128}}
BOUNDS |= {"priority": {"ge": -1000, "le": 1000}}
OF_KIND = {
    CompletionRequest: {"max_tokens": {"ge": 0, "lt": INT32}},
    ChatRequest: {
        "max_completion_tokens": BOUNDS["max_tokens"],
        "top_logprobs": BOUNDS["logprobs"],
    },
}
# the other fields that such a value needs
NEEDS = {"max_tokens": {"echo": True}, "min_tokens": {"max_tokens": INT32 - 1}}
NEEDS |= {"top_logprobs": {"logprobs": True}}


def edges(bounds: dict) -> list[tuple[float, bool]]:
    """Values exactly at the edges of a range and one past them, each with whether it passes."""
    values = []
    for name, bound in bounds.items():
        step = 1 if name in ("lt", "le") else -1
        inside = 1e-9 if name == "gt" else bound - step  # no whole number lies between 0 and 1
        values += [(bound, True), (bound + step, False)] if name in ("le", "ge") else []
        values += [(inside, True), (bound, False)] if name in ("lt", "gt") else []
    return values


@BOTH
def test_numbers_have_ranges(kind):
    """A number exactly at an edge passes, one past it is refused. A bool is no number."""
    ranges = BOUNDS | OF_KIND[kind]
    if kind is ChatRequest:
        del ranges["logprobs"]  # there it is a bool
    for name, bounds in ranges.items():
        needs = {k: v for k, v in NEEDS.get(name, {}).items() if k in kind.model_fields}
        for value, passes in edges(bounds):
            if passes:
                assert getattr(parse(kind, **needs, **{name: value}), name) == value
            else:
                error = refusal(kind, **needs, **{name: value})
                assert error.param in (name, "max_tokens")
                assert error.message.startswith(f"{error.param}: input should be ")
                assert error.message.endswith(f", got {value}")
        for value in (True, "1", [1], {}, math.nan, math.inf, -math.inf):
            assert refusal(kind, **{name: value}).param in (name, "max_tokens")


FLAGS = ["stream", "echo", "ignore_eos", "return_token_ids", "skip_special_tokens"]


@pytest.mark.parametrize("name", [*FLAGS, "add_special_tokens"])
def test_flags_are_bools(name):
    assert getattr(parse(**{name: True}), name) is True
    assert refusal(**{name: 1}).message == f"{name}: input should be a valid boolean, got 1"


@BOTH
def test_null_and_ignored_fields_count_as_not_sent(kind):
    nothing = dict.fromkeys(kind.model_fields.keys() - LEAST[kind])
    assert parse(kind, **nothing, **dict.fromkeys(IGNORED, "anything")) == parse(kind)


# A field that is not served -> its neutral value, which clients send, and None where there is none
NEUTRAL = {
    "best_of": 1, "suffix": "", "echo": False, "response_format": {"type": "text"},
    "modalities": ["text"], "use_beam_search": False, "length_penalty": 1, "early_stopping": False,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "return_token_strs": False, "continue_final_message": False, "tools": [],
    "tool_choice": "none", "tool_calls": [], "functions": [], "function_call": "none",
    "images": [], "prefix": False, "reasoning_effort": None, "web_search_options": None,
    "audio": None, "moderation": None, "allowed_token_ids": None, "structured_outputs": None,
    "prompt_logprobs": None, "chat_template": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAST)
def test_fields_that_are_not_served(kind):
    """
    The neutral value passes. Anything else would change the answer, so it is refused by name; also
    a bool in place of a number, as Python takes True for 1.
    """
    assert NOT_SERVED == NEUTRAL
    for name, neutral in NEUTRAL.items():
        if name in kind.model_fields:
            continue
        assert parse(kind, **{name: neutral}) == parse(kind)
        wrong = ["other", {"other": 1}, 7]
        wrong += [int(neutral), not neutral] if isinstance(neutral, bool) else []
        wrong += [True] if type(neutral) is int else []
        for value in wrong:
            error = refusal(kind, **{name: value})
            assert error.param == name
            assert error.message.startswith(f"{name} is not served here: leave ")


def test_clients_that_send_tools_are_refused_for_the_tools():
    """instructor, pydantic-ai and llama-index send tool_choice too."""
    fields = {"tool_choice": "auto", "parallel_tool_calls": False, "n": "wrong"}
    error = refusal(ChatRequest, **fields, tools=[{"type": "function"}])
    assert error.message == f"tools is not served here: {protocol.NO_TOOLS}"


def test_every_field_of_the_openai_client_is_known():
    """It is served, ignored, or refused as not served."""
    pairs = {CompletionRequest: text_create_params, ChatRequest: completion_create_params}
    for kind, module in pairs.items():
        names = module.CompletionCreateParamsBase.__annotations__.keys()
        assert names <= kind.model_fields.keys() | IGNORED | NOT_SERVED.keys()


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([0, 2], [[0, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_four_forms_of_prompt(prompt, prompts):
    assert parse(prompt=prompt).prompt == prompts


FORM = "must be a string, a list of strings, a list of token ids, or a list of such lists"
OTHER_FORMS = [3, {}, {"a": 1}, [True], [1.0], ["a", 1], [[1], "a"], [["a"]], [[[1]]]]
EMPTY = "is empty: give at least one character or token id for each answer"
TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
NO_TEXT = f"is not served here: {protocol.NO_IMAGES}"
LONG = "x" * 10**6


def message(**fields) -> dict:
    return {"messages": [*HELLO, {"role": "assistant", "content": "x"} | fields]}


# fields, the name that is refused, and the words after it
REFUSED = [
    *(({"prompt": value}, "prompt", FORM) for value in OTHER_FORMS),
    *(({"prompt": value}, "prompt", EMPTY) for value in ("", [], ["a", ""], [[]], [[1], []])),
    ({"prompt": None}, "prompt", "is missing"),
    ({"prompt": [[1]] * 4097}, "prompt", "has 4097 prompts, at most 4096 are taken: split it"),
    ({"stop": ""}, "stop.0", ": string should have at least 1 character, got ''"),
    ({"stop": ["a", 1]}, "stop.1", ": input should be a valid string, got 1"),
    ({"stop": ["€" * 5461, "ab"]}, "stop", "has 16385 bytes, at most 16384 are taken: shorten it"),
    ({"stop_token_ids": [True]}, "stop_token_ids.0", ": input should be a valid integer, got True"),
    ({"max_tokens": 0}, "max_tokens", "is 0, wanted at least 1; 0 is only for echo"),
    ({"min_tokens": 17}, "min_tokens", "is 17, above max_tokens, 16"),
    ({"stream_options": {}}, "stream_options", "is for streams: send stream true or leave it out"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "is no field here"),
    ({"temprature": 1}, "temprature", "is no field here; did you mean 'temperature'?"),
    ({"bestof": 1}, "bestof", "is no field here; did you mean 'best_of'?"),
    ({"xyzzy": None, "plugh": 0}, "plugh", "is no field here"),
    ({LONG: 1}, LONG[:200], "is no field here"),
    ({"stream": True, "stream_options": {LONG: 1}}, f"stream_options.{LONG[:200]}", None),
    ({"stop": {LONG: 1}}, "stop", None),
    ({"best_of": 2}, "best_of", "is not served here: leave it out or send 1"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object of at most 1024 token ids"),
    *(({"request_id": f"a{bad}"}, "request_id", None) for bad in " \n\r\x7fé"),
    ({"request_id": ""}, "request_id", None),
    ({"cache_salt": ""}, "cache_salt", None),
]
REFUSED_IN_CHATS = [
    ({"prompt": "x"}, "prompt", "is no field here"),
    ({"messages": []}, "messages", None),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", None),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
    ({"logprobs": 2}, "logprobs", ": input should be a valid boolean, got 2"),
    ({"top_logprobs": 0}, "top_logprobs", "needs logprobs: send logprobs true or leave it out"),
    (message(content=None, tool_calls=[{}]), "messages.1.tool_calls", None),
    (message(function_call={"name": "f"}), "messages.1.function_call", None),
    (message(audio={"id": "a"}), "messages.1.audio", None),
    (message(prefix=True), "messages.1.prefix", None),
    (message(images=["aGk="]), "messages.1.images", None),
    (message(content=[TEXT | {"text": 1}]), "messages.1.content.0.text", NO_TEXT),
    (message(content=[TEXT, IMAGE]), "messages.1.content.1.image_url", NO_TEXT),
    *(
        (message(content=[part]), "messages.1.content.0.type", NO_TEXT)
        for part in ({"type": "text"}, "x", {"type": LONG})
    ),
]  # fmt: skip
CASES = [(CompletionRequest, *case) for case in REFUSED]
CASES += [(ChatRequest, *case) for case in REFUSED_IN_CHATS]
CASES += [
    (TokenizeRequest, fields, "prompt", "or messages must be sent, and not both")
    for fields in ({"prompt": None}, {"messages": HELLO})
]
CASES += [(DetokenizeRequest, {"tokens": [1, bad]}, "tokens.1", None) for bad in (-1, INT32, True)]


@pytest.mark.parametrize("kind, body, name, words", CASES)
def test_refusals_name_field_and_remedy(kind, body, name, words):
    error = refusal(kind, **body)
    assert error.param == name.partition(".")[0] and error.message.startswith(name)
    rest = error.message.removeprefix(name)
    assert rest.lstrip(" ") == (words or rest.lstrip(" "))


def test_a_body_is_an_object():
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate([])
    assert body_refusal(caught.value).message == "the body must be a JSON object"


SIZES = [  # kind, field, a value of that size, the largest size that passes
    (CompletionRequest, "prompt", lambda size: ["a"] * size, 4096),
    (CompletionRequest, "stop", lambda size: ["a"] * size, 64),
    (CompletionRequest, "stop", lambda size: ["a" * (size - 4), "€", "b"], 2**14),  # in bytes
    (CompletionRequest, "stop_token_ids", lambda size: [1] * size, 64),
    (CompletionRequest, "logit_bias", lambda size: dict.fromkeys(map(str, range(size)), 0), 1024),
    (CompletionRequest, "cache_salt", lambda size: "a" * size, 1000),
    (CompletionRequest, "request_id", lambda size: "!~" * (size // 2) + "a" * (size % 2), 128),
    (ChatRequest, "messages", lambda size: HELLO * size, 4096),
    (TokenizeRequest, "messages", lambda size: HELLO * size, 4096),
]


@pytest.mark.parametrize("kind, name, make, most", SIZES)
def test_lists_and_texts_have_a_largest_size(kind, name, make, most):
    """Exactly so large passes; one more is refused by its name."""
    other = {"prompt": None} if kind is TokenizeRequest else {}
    assert len(getattr(parse(kind, **other, **{name: make(most)}), name)) == len(make(most))
    assert refusal(kind, **other, **{name: make(most + 1)}).param == name


def test_biases_are_of_token_ids():
    """JSON's names are texts, and Python takes many a text for a number."""
    biases = parse(logit_bias={"0": -100, "50256": 100, "7": 0.5, "12345678901": 1}).logit_bias
    assert biases == {0: -100, 50256: 100, 7: 0.5, 12345678901: 1}
    for name in ("", " 1", "+1", "-1", "1.0", "1_0", "0x1", "\u0663", "\u00b2", "1" * 12, "a"):
        assert refusal(logit_bias={name: 1}).message == f"logit_bias.{name} is no token id"
    for bias in (-100.1, 100.1, math.nan, math.inf, "1", None, [1], True):
        words = f"logit_bias.1 is no number from -100 to 100, got {bias!r}"
        assert refusal(logit_bias={"1": bias}).message == words


def test_the_first_problem_is_the_only_one():
    """pydantic collected one for each of a million items: nine seconds of nothing else."""
    many = {f"x{i}": 1 for i in range(10**5)}
    started = time.process_time()
    for body in (many, {"stream_options": many}, {"stop": [1] * 10**6}):
        with pytest.raises(ValidationError) as caught:
            parse(**body)
        assert caught.value.error_count() == 1
    assert time.process_time() - started < 1


def test_a_long_name_is_compared_with_ours_by_its_beginning(monkeypatch):
    """The comparison takes time in proportion to the product of the lengths."""
    compared = []
    monkeypatch.setattr(
        protocol.difflib, "get_close_matches", lambda name, *_, **__: compared.append(name) or []
    )
    refusal(**{LONG: 1})
    assert compared == ["x" * 50]


@BOTH
@pytest.mark.parametrize("number", ["9" * 4300, "-" + "9" * 4300, "9" * 5000, "1e999", "-1e999"])
def test_numbers_of_any_length_are_refused(kind, number):
    """max_tokens of 4,300 nines, the longest that JSON may bring, was a 500."""
    start = json.dumps(LEAST[kind])[:-1]
    # a template's variables may be anything
    for name in kind.model_fields.keys() - {"chat_template_kwargs"}:
        for value in (number, f"[{number}]", f'{{"1": {number}}}'):
            with pytest.raises((ApiError, ValidationError)) as caught:
                body = kind.model_validate_json(f'{start}, "{name}": {value}}}')
                body.check_fits([[1]], vocab_size=5, max_model_len=9)
            error = caught.value
            error = body_refusal(error) if isinstance(error, ValidationError) else error
            assert error.status == 400 and len(error_body(error)) < 1000


# --------------------------------------------------------------------------------------------------
# Messages


def test_a_message_may_have_the_fields_of_an_answer():
    """Clients keep whole answers as their history and send them back."""
    part = {"type": "text", "text": "x", "annotations": []}
    fields = {"id": "m1", "refusal": None, "annotations": [], "tool_calls": [], "audio": None}
    fields |= {"reasoning_content": "hm", "timestamp": 1.5, "prefix": False, "metadata": {"a": 1}}
    for role in ("system", "developer", "user", "assistant"):
        sent = {"role": role, "content": [part, part], "name": "bot"}
        (taken,) = chat(messages=[sent | fields]).messages
        assert taken.model_dump() == sent | {"content": "xx"}


def test_tokenize_takes_a_prompt_or_messages():
    assert parse(TokenizeRequest, prompt="").prompt == ""
    assert parse(TokenizeRequest, prompt=None, messages=HELLO).messages[0].content == "x"
    assert parse(DetokenizeRequest, tokens=[0, INT32 - 1]).tokens == [0, INT32 - 1]


# --------------------------------------------------------------------------------------------------
# What the engine gets

SENT = {
    "temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "top_k": 7, "seed": -11, "min_tokens": 3,
    "presence_penalty": 0.75, "frequency_penalty": -0.75, "repetition_penalty": 1.5,
    "ignore_eos": True, "logit_bias": {"2": -1.5}, "stop_token_ids": [9], "max_tokens": 12,
}  # fmt: skip


@BOTH
def test_each_field_reaches_the_sampler_under_its_name(kind):
    """Each with a value of its own, so that none can stand for another."""
    fields = {"logprobs": 6} if kind is CompletionRequest else {"logprobs": True, "top_logprobs": 6}
    params = parse(kind, **SENT, **fields).sampling_params(0, 99)
    assert params == SENT | {"logit_bias": {2: -1.5}, "logprobs": 6}
    assert params.keys() == {field.name for field in fields_of(SamplingParams)}
    SamplingParams(**params)
    plain = parse(kind, top_k=-1).sampling_params(0, 16)
    defaults = SamplingParams(max_tokens=16, stop_token_ids=[])
    assert SamplingParams(**plain) == defaults


SCORED = {"logprobs": True}
LENGTHS = [  # fields, the length that the engine gets for a prompt of 5 in a context of 100
    (CompletionRequest, {}, 16),
    (CompletionRequest, {"max_tokens": 5}, 5),
    (CompletionRequest, {"max_tokens": 0, "echo": True}, 1),  # a prompt's scores take a step
    (ChatRequest, {}, 95),
    (ChatRequest, {"max_tokens": 3, "max_completion_tokens": 5}, 5),
    (ChatRequest, {"max_tokens": 9, "max_completion_tokens": 5}, 5),
    (ChatRequest, {"max_tokens": 3, "max_completion_tokens": None}, 3),
]


@pytest.mark.parametrize("kind, fields, length", LENGTHS)
def test_the_length_of_an_answer(kind, fields, length):
    assert parse(kind, **fields).sampling_params(5, 100)["max_tokens"] == length


@pytest.mark.parametrize(
    "fields, n",
    [
        ({"logprobs": 3}, None),  # of the answer alone
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3}, 3),
    ],
)
def test_candidates_of_a_prompt(fields, n):
    """0 is not none: the prompt is scored, without others beside its tokens."""
    assert parse(**fields).num_prompt_logprobs == n


ECHO = {"max_tokens": 0, "echo": True}
FITS = [  # fields, the longest prompt that fits into a context of 10, the tokens counted with it
    (CompletionRequest, {"max_tokens": 6}, 4, 6),
    (CompletionRequest, ECHO, 10, 0),
    (CompletionRequest, ECHO | {"logprobs": 0}, 9, 1),  # scores take a step, which makes a token
    (ChatRequest, {}, 9, 1),
    (ChatRequest, {"min_tokens": 6}, 4, 6),
]


@pytest.mark.parametrize("kind, fields, longest, length", FITS)
def test_the_longest_prompt_must_fit(kind, fields, longest, length):
    body = parse(kind, **fields)
    body.check_fits([[1], [1] * longest, [1]], vocab_size=2, max_model_len=10)
    with pytest.raises(ApiError) as caught:
        body.check_fits([[1], [1] * (longest + 1), [1]], vocab_size=2, max_model_len=10)
    # litellm knows an error of length by these words, others by the code
    assert caught.value.message == (
        f"this model's maximum context length is 10 tokens, {longest + 1} prompt tokens and "
        f"max_tokens {length} make 11: shorten the prompt or lower max_tokens"
    )
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


@pytest.mark.parametrize("name", ["prompt", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("token, fits", [(0, True), (4, True), (5, False), (2**30, False)])
def test_every_token_id_is_in_the_vocabulary(name, token, fits):
    """Also those that are not the first of their list, and -1, which logit_bias cannot spell."""
    for bad in (token, -1) if name != "logit_bias" and not fits else (token,):
        value = {"1": 0, str(bad): 0} if name == "logit_bias" else [1, bad, 1]
        body = parse(**{name: value})
        prompts = body.prompt if name == "prompt" else [[1]]
        if fits:
            body.check_fits(prompts, vocab_size=5, max_model_len=100)
            continue
        with pytest.raises(ApiError) as caught:
            body.check_fits(prompts, vocab_size=5, max_model_len=100)
        assert caught.value.message == f"token id {bad} is outside the vocabulary, 0..4"
        assert (caught.value.status, caught.value.param) == (400, name)


def test_min_tokens_leaves_something_to_say():
    """Every token forbidden was an error of ours."""
    body = parse(min_tokens=1, stop_token_ids=[0, 1])
    body.check_fits([[1]], vocab_size=3, max_model_len=100)
    with pytest.raises(ApiError, match="all tokens are stop tokens"):
        body.check_fits([[1]], vocab_size=3, max_model_len=100, eos_token_ids=[2])
    parse(stop_token_ids=[0, 1, 2]).check_fits([[1]], vocab_size=3, max_model_len=100)


SCORES = [  # fields, log-probabilities in the answer to a prompt of 5 tokens in a context of 100
    (CompletionRequest, {}, 0),
    (CompletionRequest, {"logprobs": 0, "max_tokens": 7}, 7),
    (CompletionRequest, {"logprobs": 2, "max_tokens": 7, "n": 3}, 63),
    (CompletionRequest, {"logprobs": 1, "echo": True, "max_tokens": 0}, 10),
    (CompletionRequest, {"logprobs": 1, "echo": True, "max_tokens": 7, "n": 2}, 2 * (10 + 14)),
    (ChatRequest, SCORED | {"top_logprobs": 2}, 3 * 95),
]


@pytest.mark.parametrize("kind, fields, count", SCORES)
def test_the_number_of_scores_in_an_answer(kind, fields, count):
    """(1 + candidates) for each token, and each choice repeats its prompt's."""
    assert parse(kind, **fields).num_scores(5, 100) == count


@pytest.mark.parametrize(
    "kind, fields, prompts, param",
    [
        (CompletionRequest, {"n": 64, "max_tokens": 195, "logprobs": 20}, 1, None),
        (CompletionRequest, {"n": 128, "max_tokens": 250, "logprobs": 20}, 1, "logprobs"),
        (CompletionRequest, ECHO | {"n": 32, "logprobs": 15}, 102, None),
        (CompletionRequest, ECHO | {"n": 32, "logprobs": 15}, 103, "prompt"),
        (ChatRequest, SCORED | {"top_logprobs": 20, "max_tokens": 12_484}, 1, "logprobs"),
        (ChatRequest, SCORED | {"top_logprobs": 20, "min_tokens": 12_484}, 1, "logprobs"),
    ],
)
def test_more_scores_than_can_be_sent_are_refused(kind, fields, prompts, param):
    """183 MB of JSON took 21 s, in which /livez was silent."""
    body = parse(kind, **fields)
    if param is None:
        body.check_fits([[1] * 5] * prompts, 5, 131_072)
        return
    with pytest.raises(ApiError, match=f"one answer, at most {MAX_SCORES} are sent") as caught:
        body.check_fits([[1] * 5] * prompts, 5, 131_072)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields, length",
    [
        ({}, 131_067),
        (SCORED | {"n": 2}, 131_067),
        (SCORED | {"n": 4}, 65_536),
        (SCORED | {"top_logprobs": 20}, 12_483),
        (SCORED | {"top_logprobs": 20, "max_tokens": 12_000}, 12_000),
    ],
)
def test_chats_with_scores_fit_in_a_large_context(fields, length):
    """Llama's of 131,072 tokens: without max_tokens each chat with top_logprobs was refused."""
    body = chat(**fields)
    body.check_fits([[1] * 5], 10, 131_072)
    assert body.sampling_params(5, 131_072)["max_tokens"] == length


# --------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    "status, kind",
    [(s, "invalid_request_error") for s in (400, 401, 404, 413)]
    + [(429, "rate_limit_error"), (500, "server_error"), (503, "server_error")],
)
def test_the_shape_of_errors(status, kind):
    """Client libraries make exceptions of status and type, and some try again."""
    response = error_response(ApiError(status, "no", "n", "why"))
    error = {"message": "no", "type": kind, "param": "n", "code": "why"}
    assert json.loads(response.body) == {"error": error}
    assert response.status_code == status and response.media_type == "application/json"
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_the_log_quotes_no_value():
    """A value in a refusal may be a client's text: the log has the code, or the words before it."""
    reason = "n: input should be a valid integer"
    assert ApiError(400, f"{reason}, got 'my secret'").reason == reason
    assert ApiError(404, "no", "model", "model_not_found").reason == "model_not_found"
    assert ApiError(400, "x" * 1000).reason == "x" * 200
