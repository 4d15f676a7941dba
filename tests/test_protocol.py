"""
The rules of a request body, as tables: what passes and becomes what, what is refused with which
words. Without a server, so that a rule costs a line here.
"""

import contextlib
import json
import math
import time

import pytest
from openai.types import completion_create_params as text_create_params
from openai.types.chat import completion_create_params
from pydantic import ValidationError

from serving import protocol
from serving.protocol import (
    IGNORED,
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    body_refusal,
    error_body,
    error_response,
)


def parse(**body):
    return CompletionRequest.model_validate({"prompt": "p"} | body)


HELLO = [{"role": "user", "content": "x"}]


def refusal(**body) -> ApiError:
    """The error that a body ends in, as serve.py makes it."""
    with pytest.raises((ApiError, ValidationError)) as caught:
        parse(**body)
    error = caught.value
    return body_refusal(error) if isinstance(error, ValidationError) else error


def test_defaults():
    """OpenAI's and vLLM's. Null asks for the default, as leaving out does."""
    nothing = {name: None for name in CompletionRequest.model_fields if name != "prompt"}
    assert parse() == parse(**nothing)
    assert parse().model_dump() == {
        "model": None, "prompt": ["p"], "max_tokens": 16, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0,
        "n": 1, "seed": None, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None, "allowed_token_ids": None, "stream": False, "stop": [],
        "stream_options": {"include_usage": False, "continuous_usage_stats": False},
        "include_stop_str_in_output": False, "stop_token_ids": [], "ignore_eos": False,
        "min_tokens": 0,
        "skip_special_tokens": True, "prompt_logprobs": None, "echo": False, "logprobs": None,
        "return_token_ids": False, "priority": 0, "cache_salt": None, "request_id": None,
        "add_special_tokens": True,
    }  # fmt: skip


def test_defaults_of_chats():
    """As those of completions, but for the length and the log-probabilities."""
    chat, text = ChatRequest(messages=HELLO).model_dump(), parse().model_dump()
    own = {
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "add_generation_prompt",
        "chat_template_kwargs",
    }
    own |= {"add_special_tokens"}
    assert {name: chat[name] for name in own} == {
        "messages": [{"role": "user", "content": "x", "name": None}], "max_tokens": None,
        "max_completion_tokens": None, "logprobs": False, "top_logprobs": None,
        "add_generation_prompt": True, "chat_template_kwargs": {},
        "add_special_tokens": False,
    }  # fmt: skip
    others = text.keys() - own - {"prompt", "echo"}
    assert chat.keys() == own | others and all(chat[name] == text[name] for name in others)
    nothing = {name: None for name in ChatRequest.model_fields if name != "messages"}
    assert ChatRequest(messages=HELLO, **nothing) == ChatRequest(messages=HELLO)


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([0], [[0]]),
    ],
)
def test_four_forms_of_prompt(prompt, prompts):
    assert parse(prompt=prompt).prompt == prompts


PROMPT_FORM = (
    "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
)
PROMPT_EMPTY = "prompt is empty: give at least one character or token id for each answer"


@pytest.mark.parametrize(
    "prompt, message",
    [
        (3, PROMPT_FORM),
        ({}, PROMPT_FORM),
        ({"a": 1}, PROMPT_FORM),
        ([True], PROMPT_FORM),
        ([1.0], PROMPT_FORM),
        (["a", 1], PROMPT_FORM),
        ([[1], "a"], PROMPT_FORM),
        ([["a"]], PROMPT_FORM),
        ([[[1]]], PROMPT_FORM),
        ("", PROMPT_EMPTY),
        ([], PROMPT_EMPTY),
        (["a", ""], PROMPT_EMPTY),
        ([[]], PROMPT_EMPTY),
        ([[1], []], PROMPT_EMPTY),
        (None, "prompt is missing"),
    ],
)
def test_other_prompts_are_refused(prompt, message):
    error = refusal(prompt=prompt)
    assert (error.status, error.param, error.message) == (400, "prompt", message)


# field, the values at the edges that pass, the values just outside with the end of their message
RANGES = [
    (
        "max_tokens",
        [1, 2**31 - 1],
        {-1: "greater than or equal to 0, got -1", 2**31: f"less than {2**31}, got {2**31}"},
    ),
    (
        "temperature",
        [0, 0.0, 2],
        {-0.1: "greater than or equal to 0, got -0.1", 2.1: "less than or equal to 2, got 2.1"},
    ),
    (
        "n",
        [1, 128],
        {0: "greater than or equal to 1, got 0", 129: "less than or equal to 128, got 129"},
    ),
    (
        "logprobs",
        [0, 20],
        {-1: "greater than or equal to 0, got -1", 21: "less than or equal to 20, got 21"},
    ),
    (
        "prompt_logprobs",
        [0, 20],
        {-1: "greater than or equal to 0, got -1", 21: "less than or equal to 20, got 21"},
    ),
    (
        "presence_penalty",
        [-2, 2],
        {-2.1: "or equal to -2, got -2.1", 2.1: "less than or equal to 2, got 2.1"},
    ),
    (
        "frequency_penalty",
        [-2, 2],
        {-2.1: "or equal to -2, got -2.1", 2.1: "less than or equal to 2, got 2.1"},
    ),
    (
        "repetition_penalty",
        [1e-9, 10],
        {0: "greater than 0, got 0", 10.1: "less than or equal to 10, got 10.1"},
    ),
    (
        "min_tokens",
        [0, 16],
        {-1: "greater than or equal to 0, got -1", 0.5: "a valid integer, got 0.5"},
    ),
    (
        "priority",
        [-1000, 1000],
        {-1001: "or equal to -1000, got -1001", 1001: "less than or equal to 1000, got 1001"},
    ),
    ("top_p", [1e-9, 1], {0: "greater than 0, got 0", 1.01: "less than or equal to 1, got 1.01"}),
    (
        "top_k",
        [-1, 0, 2**31 - 1],
        {-2: "greater than or equal to -1, got -2", 2**31: f"less than {2**31}, got {2**31}"},
    ),
    (
        "min_p",
        [0, 1],
        {-1: "greater than or equal to 0, got -1", 2: "less than or equal to 1, got 2"},
    ),
    (
        "seed",
        [-(2**63), 2**63 - 1],
        {2**63: f"less than {2**63}, got {2**63}", 0.5: "a valid integer, got 0.5"},
    ),
]
SEEDS = {-(2**63) - 1: f"greater than or equal to {-(2**63)}, got {-(2**63) - 1}"}
RANGES += [
    ("seed", [0, -1], SEEDS),
    ("min_tokens", [0], {2**31: f"less than {2**31}, got {2**31}"}),
]


@pytest.mark.parametrize("name, inside, outside", RANGES, ids=[name for name, *_ in RANGES])
def test_numbers_have_ranges(name, inside, outside):
    """
    Exactly at the edge passes; one past it is refused with both numbers. A bool is no number, a
    string neither.
    """
    for value in inside:
        assert getattr(parse(**{name: value}), name) == value
    for value, message in outside.items():
        error = refusal(**{name: value})
        assert (error.status, error.param) == (400, name)
        assert error.message.startswith(f"{name}: input should be ") and error.message.endswith(
            message
        )
    for value in (True, "1", [1], {}):
        assert refusal(**{name: value}).param == name


# The range of a chat's own fields; all others are inherited.
OF_CHATS = [
    ("max_tokens", 1, 2**31 - 1),
    ("max_completion_tokens", 1, 2**31 - 1),
    ("top_logprobs", 0, 20),
]


@pytest.mark.parametrize(("name", "least", "most"), OF_CHATS)
def test_numbers_of_chats_have_ranges(name, least, most):
    for value in (least, most):
        assert getattr(ChatRequest(messages=HELLO, logprobs=True, **{name: value}), name) == value
    for value in (least - 1, most + 1):
        error = chat_refusal(logprobs=True, **{name: value})
        assert error.status == 400 and error.message.endswith(f", got {value}")


# field, a value of that size, the largest size that passes
SIZES = [
    ("prompt", lambda size: ["a"] * size, 4096),
    ("stop", lambda size: ["a"] * size, 64),
    ("stop", lambda size: ["a" * (size - 4), "\u20ac", "b"], 2**14),  # in bytes
    ("stop_token_ids", lambda size: [1] * size, 64),
    ("logit_bias", lambda size: dict.fromkeys(map(str, range(size)), 0), 1024),
    ("allowed_token_ids", lambda size: list(range(size)), 2**18),
    ("cache_salt", lambda size: "a" * size, 1000),
    ("request_id", lambda size: "a" * size, 128),
]


@pytest.mark.parametrize(
    ("name", "make", "most"), SIZES, ids=[f"{name} {most}" for name, _, most in SIZES]
)
def test_lists_and_texts_have_a_largest_size(name, make, most):
    """Exactly so large passes, unchanged; one more is refused by its name."""
    value = make(most)
    taken = getattr(parse(**{name: value}), name)
    assert taken == ({int(i): bias for i, bias in value.items()} if name == "logit_bias" else value)
    error = refusal(**{name: make(most + 1)})
    assert (error.status, error.param) == (400, name) and len(error.message) < 300


@pytest.mark.parametrize("kind", [ChatRequest, TokenizeRequest])
def test_a_conversation_has_a_most_of_messages(kind):
    assert len(kind(messages=HELLO * 4096).messages) == 4096
    for count in (0, 4097):
        with pytest.raises(ValidationError) as caught:
            kind.model_validate({"messages": HELLO * count})
        assert body_refusal(caught.value).param == "messages"


@pytest.mark.parametrize("name", ["!", "~", "req-1/2:3"])
def test_request_ids_are_printable_ascii(name):
    """
    They become a header and a line of the log: blanks, line ends and what is no ASCII are refused.
    """
    assert parse(request_id=name).request_id == name
    for bad in (f"{name} ", f" {name}", f"{name}\n", f"{name}\r\n", f"{name}\x7f", f"{name}é", ""):
        assert refusal(request_id=bad).param == "request_id"


def test_biases_are_of_token_ids():
    """JSON's names are texts, and Python takes many a text for a number."""
    taken = parse(logit_bias={"0": -100, "50256": 100, "7": 0.5, "12345678901": 1}).logit_bias
    assert taken == {0: -100, 50256: 100, 7: 0.5, 12345678901: 1}
    assert {type(bias) for bias in taken.values()} == {float}
    for name in (
        "",
        " 1",
        "1 ",
        "+1",
        "-1",
        "1.0",
        "1_0",
        "0x1",
        "\u0663",
        "\u00b2",
        "123456789012",
        "a",
    ):
        assert refusal(logit_bias={name: 1}).message == f"logit_bias: {name!r} is no token id"
    for bias in (-100.1, 100.1, math.nan, math.inf, "1", None, [1], True):
        assert refusal(logit_bias={"1": bias}).message.endswith("is no number from -100 to 100")
    assert (
        refusal(logit_bias=[1]).message == "logit_bias must be an object of at most 1024 token ids"
    )


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(name, value):
    assert refusal(**{name: value}).param == name


@pytest.mark.parametrize(
    "name", ["stream", "echo", "ignore_eos", "return_token_ids", "include_stop_str_in_output"]
)
def test_flags_are_bools(name):
    assert refusal(**{name: 1}).message == f"{name}: input should be a valid boolean, got 1"


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({"stop": ["a"] * 65}, "stop", None),
        ({"stop": ""}, "stop", "stop.0: string should have at least 1 character, got ''"),
        (
            {"stop": ["a", "\u20ac" * 5461 + "b"]}, "stop",
            "stop: 16385 bytes of stop strings, at most 16384 are taken: shorten them",
        ),
        ({"stop": ["a", 1]}, "stop", "stop.1: input should be a valid string, got 1"),
        ({"stop_token_ids": [True]}, "stop_token_ids",
        "stop_token_ids.0: input should be a valid integer, got True"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, wanted at least 1; 0 is only for echo"),
        (
            {"stream_options": {"include_usage": True}}, "stream_options",
            "stream_options is for streams: send stream true or leave it out",
        ),
        (
            {"stream": True, "stream_options": {"usage": True}}, "stream_options",
            "there is no field 'stream_options.usage'",
        ),
        ({"request_id": "a b"}, "request_id", None),
        ({"request_id": "a" * 129}, "request_id", None),
        ({"temprature": 1}, "temprature",
        "there is no field 'temprature'; did you mean 'temperature'?"),
        ({"xyzzy": None, "plugh": 0}, "plugh", "there is no field 'plugh'"),
        ({"best_of": 2}, "best_of", "best_of is not served here: leave it out or send 1"),
        (
            {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs",
            "prompt_logprobs is not for streams: send stream false",
        ),
        ({"min_tokens": 17}, "min_tokens", "min_tokens is 17, above max_tokens, 16"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: 'a' is no token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias: 101 is no number from -100 to 100"),
        ({"logit_bias": {"1": True}}, "logit_bias",
        "logit_bias: True is no number from -100 to 100"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias", None),
        ({"allowed_token_ids": []}, "allowed_token_ids", None),
        ({"cache_salt": ""}, "cache_salt", None),
    ],
)  # fmt: skip
def test_refusals_name_field_and_remedy(body, param, message):
    error = refusal(**body)
    assert (error.status, error.param, error.message) == (400, param, message or error.message)


@pytest.mark.parametrize(
    "body",
    [{f"x{i}": 1 for i in range(10**5)}, {"stream_options": {f"x{i}": 1 for i in range(10**5)}}],
)
def test_many_unknown_fields_end_at_the_first(body):
    """pydantic collected a finding for each: 400,000 fields held up the event loop for seconds."""
    started = time.process_time()
    assert refusal(**body).message.startswith("there is no field ")
    assert time.process_time() - started < 0.5


def test_too_many_prompts_are_not_looked_at():
    assert len(parse(prompt=["a"] * 4096).prompt) == 4096
    assert (
        refusal(prompt=[[1]] * 4097).message
        == "prompt has 4097 prompts, at most 4096 are taken: split it"
    )


def test_only_the_first_wrong_item_is_reported():
    """A list of a million numbers as stop made a million findings: nine seconds of nothing else."""
    with pytest.raises(ValidationError) as caught:
        parse(stop=[1] * 1000)
    assert caught.value.error_count() == 1


def test_allowed_combinations():
    """The positive controls of the refusals above."""
    assert len(parse(stop=["a"] * 64).stop) == 64
    longest = ["a", "\u20ac" * 5461]  # 16384 bytes
    assert parse(stop=longest).stop == longest
    assert parse(stop="a").stop == ["a"]
    assert parse(max_tokens=0, echo=True).max_tokens == 0
    assert parse(stream=True, stream_options={"include_usage": True}).stream_options.include_usage
    assert not parse(stream=True).stream_options.include_usage
    assert parse(request_id="a" * 128).request_id == "a" * 128


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_not_served(name):
    """
    Clients send such fields with the value that asks for nothing: that passes. Anything else would
    be silently wrong if it passed, so it is refused by name; a bool where a number belongs too.
    """
    assert parse(**{name: NEUTRAL[name]}) == parse()
    neutral = NEUTRAL[name]
    wrong = [not neutral if isinstance(neutral, bool) else 7, "other"]
    wrong += [bool(neutral)] if neutral in (0, 1) and not isinstance(neutral, bool) else []
    wrong += [int(neutral)] if isinstance(neutral, bool) else []
    for value in wrong:
        error = refusal(**{name: value})
        assert (error.status, error.param) == (400, name)
        assert (
            error.message
            == f"{name} is not served here: leave it out or send {json.dumps(neutral)}"
        )


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_ignored_fields(name):
    assert parse(**{name: {"any": "thing"}}) == parse()


def test_every_field_of_the_openai_client_is_known():
    """
    service_tier, safety_identifier, prompt_cache_key and verbosity were typing errors to us. A
    field that the client has is served, ignored, or refused as not served.
    """
    chat = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    text = set(text_create_params.CompletionCreateParamsBase.__annotations__)
    assert chat - ChatRequest.model_fields.keys() - ChatRequest.ignored == {
        "audio", "function_call", "functions", "modalities", "moderation", "reasoning_effort",
        "response_format",
        "tool_choice", "tools", "web_search_options",
    }  # fmt: skip
    assert chat <= ChatRequest.model_fields.keys() | ChatRequest.ignored | NEUTRAL_IN_CHAT.keys()
    assert text <= CompletionRequest.model_fields.keys() | IGNORED | NEUTRAL.keys()


def test_ignored_fields_of_stream_options():
    options = parse(
        stream=True, stream_options={"include_obfuscation": True, "continuous_usage_stats": True}
    )
    assert (
        options.stream_options.continuous_usage_stats and not options.stream_options.include_usage
    )


def test_each_field_reaches_the_sampler_under_its_name():
    """Each with a value of its own, so that none can stand for another."""
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "top_k": 7,
        "seed": 11,
        "min_tokens": 3,
    }
    given |= {
        "presence_penalty": 0.75,
        "frequency_penalty": -0.75,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
    }
    given |= {
        "logit_bias": {"2": -1.5},
        "allowed_token_ids": [5, 4],
        "stop_token_ids": [9],
        "max_tokens": 12,
    }
    wanted = given | {"logit_bias": {2: -1.5}, "allowed_token_ids": [4, 5], "logprobs": 6}
    assert parse(**given, logprobs=6).sampling_params(0, 99) == wanted
    # the candidates of the prompt are not those of the answer
    assert parse(**given, logprobs=6, prompt_logprobs=8, echo=True).sampling_params(0, 99) == wanted
    assert (
        ChatRequest(messages=HELLO, logprobs=True, top_logprobs=6, **given).sampling_params(0, 99)
        == wanted
    )
    unscored = ChatRequest(messages=HELLO, **given).sampling_params(0, 99)
    assert unscored == wanted | {"logprobs": None}
    assert ChatRequest(messages=HELLO, logprobs=True, **given).sampling_params(0, 99) == wanted | {
        "logprobs": 0
    }


@pytest.mark.parametrize(("top_k", "taken"), [(-1, 0), (0, 0), (1, 1), (50, 50)])
def test_top_k_of_minus_one_is_none(top_k, taken):
    assert parse(top_k=top_k).sampling_params(0, 9)["top_k"] == taken


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, 16),
        ({"max_tokens": None}, 16),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 0, "echo": True}, 1),
    ],
)
def test_length_of_a_completion(fields, max_tokens):
    """
    The default is OpenAI's; the engine computes a token even if only the prompt is to be scored.
    """
    assert parse(**fields).sampling_params(0, 1000)["max_tokens"] == max_tokens


@pytest.mark.parametrize(
    ("fields", "candidates"),
    [
        ({}, None),
        ({"logprobs": 3}, None),  # of the answer alone
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3}, 3),
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 2, "logprobs": 4}, 2),
        ({"prompt_logprobs": 2, "logprobs": 4, "echo": True}, 4),
        ({"prompt_logprobs": 5, "logprobs": 4, "echo": True}, 5),
    ],
)
def test_candidates_of_a_prompt(fields, candidates):
    """
    As many as either wants. 0 is not none: the prompt is scored, without others beside its tokens.
    """
    assert parse(**fields).num_prompt_logprobs == candidates


def test_sampling_params_are_those_of_the_engine():
    """
    The names must be the engine's: they cross to another process, where a typo would be a refused
    request.
    """
    from serving.params import SamplingParams

    params = parse(top_k=-1, stop_token_ids=[1], seed=-1).sampling_params(0, 16)
    sent = json.loads(json.dumps(params))
    assert SamplingParams(**sent).top_k == 0 and SamplingParams(**sent).seed == -1
    assert sent.keys() == SamplingParams.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    "length, max_tokens, fits", [(4, 6, True), (4, 7, False), (10, 0, True), (11, 0, False)]
)
def test_length(length, max_tokens, fits):
    """
    The longest prompt counts; together exactly max_model_len fits, one more is refused with the
    numbers.
    """
    request = parse(max_tokens=max_tokens, echo=True)
    prompts = [[1], [1] * length, [1]]
    if fits:
        request.check_fits(prompts, vocab_size=2, max_model_len=10)
        return
    with pytest.raises(
        ApiError, match=f"{length} prompt tokens and max_tokens {max_tokens} make 11: "
    ) as caught:
        request.check_fits(prompts, vocab_size=2, max_model_len=10)
    # litellm knows an error of length by these words, others by the code
    assert caught.value.message.startswith("this model's maximum context length is 10 tokens, ")
    assert caught.value.code == "context_length_exceeded"


def test_more_scores_than_can_be_told_are_refused():
    """
    Four prompts, 128 choices of each with 20 log-probabilities a token: 183 MB of JSON, and 21 s
    for which /livez was silent.
    """
    prompts, limits = [[1] * 256] * 2, {"vocab_size": 5, "max_model_len": 1000}
    for n in 32, 33:
        request = parse(prompt_logprobs=15, n=n)
        if n == 32:
            request.check_fits(prompts, **limits)
        else:
            with pytest.raises(ApiError) as caught:
                request.check_fits(prompts, **limits)
            assert "270336 log-probabilities in one answer, at most 262144" in caught.value.message


def test_scores_of_what_is_generated_count_too():
    """
    128 choices of 250 tokens with 20 log-probabilities each took 1.9 s to tell, with /livez silent
    meanwhile.
    """
    limits = {"vocab_size": 5, "max_model_len": 1000}
    parse(n=64, max_tokens=195, logprobs=20).check_fits([[1]], **limits)
    with pytest.raises(ApiError, match="672000 log-probabilities in one answer") as caught:
        parse(n=128, max_tokens=250, logprobs=20).check_fits([[1]], **limits)
    assert caught.value.param == "logprobs"


def test_allowed_tokens_of_all_prompts_are_limited():
    """
    320 prompts with a list of 262,144 each, half a megabyte of body, took 36 s and kept 650 MiB of
    the engine.
    """
    ids = [3, 1, 3, 2] * 2**16
    assert parse(allowed_token_ids=ids).allowed_token_ids == [
        1,
        2,
        3,
    ]  # said again means nothing more
    limits, allowed = {"vocab_size": 2**17, "max_model_len": 10}, list(range(2**17))
    parse(allowed_token_ids=allowed, max_tokens=1).check_fits([[1]] * 2, **limits)
    with pytest.raises(
        ApiError, match="allowed_token_ids of all prompts are 393216, at most 262144"
    ) as caught:
        parse(allowed_token_ids=allowed, max_tokens=1).check_fits([[1]] * 3, **limits)
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
@pytest.mark.parametrize(
    "number", ["9" * 4300, "-" + "9" * 4300, "9" * 5000, "1e999", "-1e999", "1" + "0" * 4299]
)
def test_numbers_of_any_length_are_refused(kind, number):
    """
    max_tokens of 4,300 nines: the longest that JSON may bring, and a sum with it was too long to be
    told: a 500.
    """
    start = (
        b'{"prompt": "p", '
        if kind is CompletionRequest
        else b'{"messages": [{"role": "user", "content": "x"}], '
    )
    # a template's variables may be anything
    for name in kind.model_fields.keys() - {"chat_template_kwargs"}:
        for value in (number, f"[{number}]", f'{{"1": {number}}}'):
            with pytest.raises((ApiError, ValidationError)) as caught:
                body = start + f'"{name}": {value}}}'.encode()
                kind.model_validate_json(body).check_fits([[1]], vocab_size=5, max_model_len=9)
            error = caught.value
            error = body_refusal(error) if isinstance(error, ValidationError) else error
            assert error.status == 400 and len(error_body(error)) < 1000


def test_token_ids_are_in_the_vocabulary():
    parse(stop_token_ids=[0, 4]).check_fits([[0, 4]], vocab_size=5, max_model_len=100)
    with pytest.raises(ApiError, match=r"token id 5 is outside the vocabulary, 0..4") as caught:
        parse().check_fits([[1], [4, 5]], vocab_size=5, max_model_len=100)
    assert caught.value.param == "prompt"
    with pytest.raises(ApiError, match=r"token id -1 is outside") as caught:
        parse(stop_token_ids=[-1]).check_fits([[1]], vocab_size=5, max_model_len=100)
    assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize("name", ["prompt", "stop_token_ids", "logit_bias", "allowed_token_ids"])
@pytest.mark.parametrize(("token", "fits"), [(0, True), (4, True), (5, False), (2**30, False)])
def test_every_token_id_is_in_the_vocabulary(name, token, fits):
    """
    Also those that are not the first of their list. -1 has its own test: not all forms can spell
    it.
    """
    value = {"1": 0, str(token): 0} if name == "logit_bias" else [1, token]
    if name != "logit_bias" and not fits:
        value.append(1)
    request = parse(**{name: value})
    prompts = request.prompt if name == "prompt" else [[1]]
    if fits:
        request.check_fits(prompts, vocab_size=5, max_model_len=100)
        return
    with pytest.raises(ApiError) as caught:
        request.check_fits(prompts, vocab_size=5, max_model_len=100)
    assert caught.value.message == f"token id {token} is outside the vocabulary, 0..4"
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(("min_tokens", "fits"), [(0, True), (5, True), (6, True), (7, False)])
def test_a_chat_without_a_length_has_room_for_its_least(min_tokens, fits):
    """
    Without max_tokens an answer is as long as the context allows: that must be at least min_tokens,
    and 1.
    """
    chat = ChatRequest(messages=HELLO, min_tokens=min_tokens)
    if fits:
        chat.check_fits([[1] * 4], vocab_size=2, max_model_len=10)
    else:
        with pytest.raises(ApiError, match="4 prompt tokens and max_tokens 7 make 11"):
            chat.check_fits([[1] * 4], vocab_size=2, max_model_len=10)
    with pytest.raises(
        ApiError, match=f"10 prompt tokens and max_tokens {max(1, min_tokens)} make"
    ):
        chat.check_fits([[1] * 10], vocab_size=2, max_model_len=10)


@pytest.mark.parametrize(
    ("fields", "length", "fits"),
    [
        ({"max_tokens": 0, "echo": True}, 10, True),
        ({"max_tokens": 0, "echo": True}, 11, False),
        (
            {"max_tokens": 0, "echo": True, "logprobs": 0},
            9,
            True,
        ),  # a score needs a step, and that makes a token
        ({"max_tokens": 0, "echo": True, "logprobs": 0}, 10, False),
    ],
)
def test_an_echo_alone_may_fill_the_context(fields, length, fits):
    with contextlib.nullcontext() if fits else pytest.raises(ApiError, match="make 11: "):
        parse(**fields).check_fits([[1] * length], vocab_size=2, max_model_len=10)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 0),
        ({"logprobs": 0, "max_tokens": 7}, 7),
        ({"logprobs": 2, "max_tokens": 7}, 21),
        ({"logprobs": 2, "max_tokens": 7, "n": 3}, 63),
        ({"prompt_logprobs": 0, "max_tokens": 7}, 5),
        ({"prompt_logprobs": 4, "max_tokens": 7}, 25),
        ({"prompt_logprobs": 4, "max_tokens": 7, "n": 2, "logprobs": 1}, 2 * (25 + 14)),
        ({"echo": True, "logprobs": 1, "max_tokens": 0}, 10),
    ],
)
def test_how_many_scores_an_answer_has(fields, count):
    """
    Of a prompt of 5 tokens: (1 + candidates) for each token, and each choice tells its prompt's
    again.
    """
    assert parse(**fields).num_scores(5, 100) == count


def test_scores_without_a_length_are_those_of_the_context():
    chat = ChatRequest(messages=HELLO, logprobs=True, top_logprobs=2)
    assert chat.num_scores(5, 100) == 3 * 95


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 131_067),
        ({"logprobs": True}, 131_067),
        ({"logprobs": True, "n": 2}, 131_067),
        ({"logprobs": True, "n": 4}, 65_536),
        ({"logprobs": True, "top_logprobs": 20}, 12_483),
        ({"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}, 12_478),
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": 12_000}, 12_000),
    ],
)
def test_chats_with_scores_fit_in_a_large_context(fields, length):
    """Llama's of 131,072 tokens: without a max_tokens each chat with top_logprobs was refused."""
    chat = ChatRequest(messages=HELLO, **fields)
    chat.check_fits([[1] * 5], 10, 131_072)
    assert chat.sampling_params(5, 131_072)["max_tokens"] == length
    assert chat.num_scores(5, 131_072) <= protocol.MAX_SCORES


def test_a_length_that_a_chat_asks_for_is_refused_if_it_cannot_be_told():
    for fields in {"max_tokens": 12_484}, {"min_tokens": 12_484}:
        chat = ChatRequest(messages=HELLO, logprobs=True, top_logprobs=20, **fields)
        with pytest.raises(ApiError, match="log-probabilities in one answer, at most 262144"):
            chat.check_fits([[1] * 5], 10, 131_072)


def test_nothing_but_ends_of_text_to_say():
    """Without allowed_token_ids all of the vocabulary is allowed."""
    request = parse(min_tokens=1, stop_token_ids=[0, 1])
    request.check_fits([[1]], vocab_size=3, max_model_len=100)
    with pytest.raises(ApiError, match="all tokens that are allowed are stop tokens"):
        request.check_fits([[1]], vocab_size=3, max_model_len=100, eos_token_ids=[2])
    parse(stop_token_ids=[0, 1, 2]).check_fits([[1]], vocab_size=3, max_model_len=100)


def test_min_tokens_leaves_something_to_say():
    """
    Nothing but stop tokens allowed, and none of them yet: every logit was -inf, which ended as our
    own error.
    """
    request = parse(min_tokens=2, allowed_token_ids=[3, 4], stop_token_ids=[3])
    request.check_fits([[1]], vocab_size=5, max_model_len=100)
    with pytest.raises(ApiError, match="all tokens that are allowed are stop tokens"):
        request.check_fits([[1]], vocab_size=5, max_model_len=100, eos_token_ids=[3, 4])


@pytest.mark.parametrize(
    "body, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_chats_that_are_refused(body, param):
    with pytest.raises((ApiError, ValidationError)) as caught:
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | body)
    error = caught.value
    error = body_refusal(error) if isinstance(error, ValidationError) else error
    assert (error.status, error.param) == (400, param)


def chat_refusal(**body) -> ApiError:
    with pytest.raises((ApiError, ValidationError)) as caught:
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | body)
    error = caught.value
    return body_refusal(error) if isinstance(error, ValidationError) else error


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required", "tools": [{"type": "function"}]},
        {
            "parallel_tool_calls": False,
            "n": "wrong",
            "tools": [{"type": "function"}],
            "tool_choice": "auto",
        },
    ],
)
def test_tools_are_what_clients_with_tools_are_told_about(body):
    """
    instructor, pydantic-ai and llama-index send tool_choice too, and were told to leave out that.
    """
    error = chat_refusal(**body)
    assert error.param == "tools"
    assert error.message == (
        "tools is not served here: leave tools and tool_choice out and ask for the form of the "
        "answer in a message, "
        "or use vLLM"
    )


HARMLESS = {
    "id": "m1",
    "refusal": None,
    "annotations": [],
    "tool_calls": [],
    "function_call": None,
    "audio": None,
}
HARMLESS |= {"reasoning_content": "hm", "timestamp": 1.5, "prefix": False, "metadata": {"a": 1}}


def test_what_changes_nothing_in_a_message_is_ignored():
    """
    Clients keep whole answers as their history and send them back, with all fields that those had.
    """
    part = {
        "type": "text",
        "text": "x",
        "annotations": [],
        "prompt_cache_breakpoint": {"mode": "explicit"},
    }
    message = {"role": "assistant", "content": [part], "name": "bot"}
    chat = ChatRequest.model_validate({"messages": [message | HARMLESS]})
    assert chat.messages[0].model_dump() == {"role": "assistant", "content": "x", "name": "bot"}


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    "message, path",
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            "messages.1.tool_calls",
        ),
        (
            {"role": "assistant", "content": "x", "function_call": {"name": "f"}},
            "messages.1.function_call",
        ),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages.1.audio"),
        ({"role": "assistant", "content": "x", "prefix": True}, "messages.1.prefix"),
        ({"role": "user", "content": "x", "images": ["aGk="]}, "messages.1.images"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]},
            "messages.1.content.1.image_url",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.1.content.0.type"),
        ({"role": "user", "content": ["x"]}, "messages.1.content.0.type"),
        ({"role": "user", "content": [{"type": "x" * 1000}]}, "messages.1.content.0.type"),
    ],
)
def test_what_would_change_the_answer_is_refused_with_its_path(message, path):
    error = chat_refusal(messages=[{"role": "user", "content": "x"}, message])
    assert error.param == "messages" and error.message.startswith(f"{path} is not served here: ")


def test_chat_takes_text_parts_and_both_names_of_the_length():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    chat = ChatRequest.model_validate(
        {"messages": messages, "max_tokens": 3, "max_completion_tokens": 5, "tools": []}
    )
    assert chat.messages[0].content == "ab" and chat.max_tokens == 5
    assert chat.sampling_params(0, 9)["max_tokens"] == 5
    assert (
        ChatRequest(messages=[{"role": "user", "content": "x"}]).sampling_params(0, 6)["max_tokens"]
        == 6
    )


def test_the_newer_name_of_the_length_goes_first_whichever_is_larger():
    for fields in (
        {"max_tokens": 3, "max_completion_tokens": 5},
        {"max_tokens": 9, "max_completion_tokens": 5},
    ):
        assert ChatRequest(messages=HELLO, **fields).sampling_params(0, 99)["max_tokens"] == 5
    assert (
        ChatRequest(messages=HELLO, max_tokens=3, max_completion_tokens=None).sampling_params(0, 9)[
            "max_tokens"
        ]
        == 3
    )


def test_top_logprobs_need_logprobs():
    """0, too: it asks for the log-probability of each token."""
    for number in (0, 5):
        assert chat_refusal(top_logprobs=number).message == (
            "top_logprobs needs logprobs: send logprobs true or leave it out"
        )
        assert (
            ChatRequest(messages=HELLO, logprobs=True, top_logprobs=number).num_logprobs == number
        )


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_roles(role):
    assert ChatRequest(messages=[{"role": role, "content": "x"}]).messages[0].role == role


@pytest.mark.parametrize("name", NEUTRAL_IN_CHAT)
def test_fields_that_chats_do_not_serve(name):
    """The neutral value passes, as leaving out does; others are refused by name."""
    neutral = NEUTRAL_IN_CHAT[name]
    assert ChatRequest(messages=HELLO, **{name: neutral}) == ChatRequest(messages=HELLO)
    for value in ("other", {"other": 1}, [1]):
        error = chat_refusal(**{name: value})
        assert (error.status, error.param) == (
            400,
            name,
        ) and f"{name} is not served here: " in error.message


def test_what_asks_for_nothing():
    """A table of its own, so that one value can be taken for another nowhere."""
    assert NEUTRAL == {
        "best_of": 1, "length_penalty": 1, "suffix": "", "use_beam_search": False,
        "early_stopping": False,
        "spaces_between_special_tokens": True,
    }  # fmt: skip
    of_templates = {"chat_template": None, "continue_final_message": False}
    assert NEUTRAL | of_templates == {k: NEUTRAL_IN_CHAT[k] for k in (NEUTRAL | of_templates)}
    assert {k: v for k, v in NEUTRAL_IN_CHAT.items() if k not in NEUTRAL | of_templates} == {
        "tools": [], "tool_choice": "none", "functions": [], "function_call": "none",
        "response_format": {"type": "text"}, "modalities": ["text"], "echo": False,
        "reasoning_effort": None,
        "web_search_options": None, "audio": None, "moderation": None,
    }  # fmt: skip
    assert TokenizeRequest(prompt="x", **of_templates) == TokenizeRequest(prompt="x")


def test_tokenize_takes_a_prompt_or_messages():
    assert (
        TokenizeRequest(prompt="").prompt == ""
        and TokenizeRequest(messages=HELLO).messages[0].content == "x"
    )
    for body in ({}, {"prompt": None}, {"prompt": "x", "messages": HELLO}):
        with pytest.raises(ApiError, match="give either prompt or messages"):
            TokenizeRequest.model_validate(body)
    made = TokenizeRequest(prompt="x")
    assert (made.add_generation_prompt, made.return_token_strs, made.add_special_tokens) == (
        True,
        False,
        None,
    )


@pytest.mark.parametrize(
    ("token", "fits"), [(0, True), (2**31 - 1, True), (-1, False), (2**31, False), (True, False)]
)
def test_detokenize_takes_ids(token, fits):
    if fits:
        assert DetokenizeRequest(tokens=[1, token]).tokens == [1, token]
        return
    with pytest.raises(ValidationError) as caught:
        DetokenizeRequest(tokens=[1, token])
    assert body_refusal(caught.value).message.startswith("tokens.1: input should be ")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"), ("Temperature", "temperature"), ("bestof", "best_of"),
        ("best_off", "best_of"),
        ("stops", "stop"), ("x" * 100_000, None), ("banana", None),
    ],
)  # fmt: skip
def test_what_an_unknown_name_may_have_meant(name, meant):
    """Also one of those that are not served: to be told of it is better than to be told nothing."""
    message = refusal(**{name: 1}).message
    assert message == f"there is no field {name[:200]!r}" + (
        f"; did you mean {meant!r}?" if meant else ""
    )


def test_a_long_name_is_compared_with_ours_by_its_beginning(monkeypatch):
    """
    The comparison takes time in proportion to the product of the lengths: one of 4 MB took minutes.
    """
    compared = []
    monkeypatch.setattr(
        protocol.difflib, "get_close_matches", lambda name, *_, **__: compared.append(name) or []
    )
    refusal(**{"x" * 10**6: 1})
    assert compared == ["x" * 50]


def test_the_log_quotes_no_value():
    """
    What a refusal quotes may be a client's text; the log has the code, or the words before the
    value.
    """
    assert ApiError(400, "n: input should be a valid integer, got 'my secret'").reason == (
        "n: input should be a valid integer"
    )
    assert (
        ApiError(404, "there is no model", "model", "model_not_found").reason == "model_not_found"
    )
    assert ApiError(400, "x" * 1000).reason == "x" * 200


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "invalid_request_error"), (404,
        "invalid_request_error"),
        (413, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error"), (503,
        "server_error"),
    ],
)  # fmt: skip
def test_kinds_of_errors(status, kind):
    """Client libraries make exceptions of their own of them, and some try again."""
    response = error_response(ApiError(status, "no", "n"))
    assert json.loads(response.body)["error"] == {
        "message": "no",
        "type": kind,
        "param": "n",
        "code": None,
    }
    assert response.status_code == status and response.headers["content-type"] == "application/json"


def test_refusals_of_long_names_are_short():
    """The way to the field has names that the client chose: as long as the body."""
    for field in ({"stream": True, "stream_options": {"x" * 10**6: 1}}, {"stop": {"x" * 10**6: 1}}):
        assert len(error_body(refusal(**field))) < 1000
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate([])
    assert body_refusal(caught.value).message == "the body must be a JSON object"


def test_error_shape():
    error = ApiError(429, "full", None, "queue_full", {"Retry-After": "1"})
    assert error_response(error).headers["retry-after"] == "1"
    assert json.loads(error_body(error)) == {
        "error": {
            "message": "full",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
    }
