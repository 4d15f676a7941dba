"""
The JSON of the HTTP surface: what a request may say, what an answer looks like, how a refusal
reads.

    request = CompletionRequest.model_validate_json(b'{"prompt": "def ", "max_tokens": 8}')
    request.prompt, request.sampling_params(99)      # ["def "], {"temperature": 1.0, ..., "max_tokens": 8}

Not run by itself: the server imports it. Shapes follow OpenAI's API and vLLM's extras. Three rules
hold for every field: types are strict (a bool is no int), numbers are finite and in a stated range,
and `null` means "not given". Bad input is a 400 that names the field, because clients retry 408,
409, 429 and everything from 500 up.
"""

import difflib
import json
import reprlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from tokenizer import TextStream, token_name

# What OpenAI calls the kinds of error; a client library turns status and type into an exception of
# its own.
ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}

# Accepted for other servers' sake: they change nothing in the answer. They are about bills, caches
# and statistics, or (verbosity, prediction) hints that a server may follow or not.
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "verbosity",
    "prediction",
}
IGNORED |= {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}

# Fields that would change the answer and that this server does not serve, each with the value that
# asks for nothing (None: only null does). To implement one, move it from here to a field of a
# request.
NEUTRAL = {
    "best_of": 1,
    "length_penalty": 1,
    "suffix": "",
    "use_beam_search": False,
    "early_stopping": False,
}
NEUTRAL |= {"spaces_between_special_tokens": True}
NEUTRAL_IN_CHAT = NEUTRAL | {
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
}
NEUTRAL_IN_CHAT |= {"response_format": {"type": "text"}, "modalities": ["text"]}
NEUTRAL_IN_TEMPLATES = {
    "chat_template": None,
    "chat_template_kwargs": {},
    "continue_final_message": False,
}
NEUTRAL_IN_CHAT |= NEUTRAL_IN_TEMPLATES | {"echo": False, "reasoning_effort": None}
NEUTRAL_IN_CHAT |= {"web_search_options": None, "audio": None, "moderation": None}
# Of a message nothing else is refused: clients send back whole answers, with all their fields.
NEUTRAL_IN_MESSAGE = {
    "tool_calls": [],
    "function_call": None,
    "audio": None,
    "images": [],
    "prefix": False,
}

# What to do without a field, where leaving it out is not all there is to say.
NO_TOOLS = (
    "leave tools and tool_choice out and ask for the form of the answer in a message, or use vLLM"
)
NO_IMAGES = "only text is, send parts of the type text"
REMEDIES = {
    "tools": NO_TOOLS,
    "functions": NO_TOOLS,
    "tool_calls": NO_TOOLS,
    "function_call": NO_TOOLS,
}

MAX_STOPS = 64
MAX_STOP_BYTES = 2**14  # of all stop strings of a call: what is held back of a text can be as long
MAX_SCORES = (
    2**18
)  # log-probabilities in one answer, of prompts and of what is generated: 18 MB of JSON
MAX_STOP_IDS, MAX_BIASES, MAX_ALLOWED, MAX_LOGPROBS, MAX_CHOICES = 64, 1024, 2**18, 20, 128
MAX_PROMPTS, MAX_MESSAGES = 4096, 4096
MAX_PRIORITY = 1000
INT32 = 2**31  # counts are below: sums of them can be told, those of JSON's longest numbers cannot
INT64 = 2**63
LOWEST = -9999.0  # JSON has no infinity


# --------------------------------------------------------------------------------------------------
# Refusals


class ApiError(Exception):
    """A refusal. `param` names the field at fault, `code` is for programs ("model_not_found")."""

    def __init__(
        self,
        status: int,
        message: str,
        param=None,
        code=None,
        headers: dict[str, str] | None = None,
    ):
        self.status, self.message, self.param, self.code, self.headers = (
            status,
            message,
            param,
            code,
            headers,
        )

    @property
    def reason(self) -> str:
        """
        For the log: the code, else the message without the value that it quotes, which may be a
        client's text.
        """
        return self.code or self.message.partition(", got ")[0][:200]


def error_body(error: ApiError) -> bytes:
    """The one shape of every error."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return json.dumps({"error": fields}).encode()


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, "application/json")


def body_refusal(found: ValidationError) -> ApiError:
    """
    Turn pydantic's findings on a request body into one 400 about the first of them. Our own
    validators raise ApiError themselves, which pydantic lets through: they know best what to say.
    """
    error = found.errors(include_url=False)[0]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}")
    if error["type"] in REFUSALS:
        return named_refusal(error)
    if not error["loc"]:
        return ApiError(400, "the body must be a JSON object")
    path = [str(part)[:200] for part in error["loc"]]  # a name may be as long as the body
    param = path[0]  # stop
    name = ".".join(path)  # stop.1
    if error["type"] == "missing":
        return ApiError(400, f"{name} is missing", param)
    return ApiError(
        400, f"{name}: {error['msg'].lower()}, got {reprlib.repr(error['input'])}", param
    )


# Errors of ours that pydantic gives a place: inside a validator only it knows the way to the field,
# "messages", 0.
REFUSALS = {
    "unknown": "there is no field {name!r}{remedy}",
    "not_served": "{name} is not served here: {remedy}",
}


def refusal(kind: str, field: str, remedy: str) -> PydanticCustomError:
    """
    An error of one of the REFUSALS, about a field of the object that is being validated:
    tool_calls, 1.image_url.
    """
    return PydanticCustomError(kind, "refused", {"field": field[:200], "remedy": remedy})


def named_refusal(error: dict) -> ApiError:
    """Put the way to a field before what `refusal` was told of it: messages.0.tool_calls."""
    field, remedy = error["ctx"]["field"], error["ctx"]["remedy"]
    path = [*map(str, error["loc"]), field]
    message = REFUSALS[error["type"]].format(name=".".join(path), remedy=remedy)
    return ApiError(400, message, path[0])


# --------------------------------------------------------------------------------------------------
# The kinds of values


def list_of_prompts(value: Any) -> list[str | list[int]]:
    """
    Bring the four forms of `prompt` into one: a list of texts, or a list of lists of token ids.
    """

    def all_are(kind: type, items: Any) -> bool:
        return isinstance(items, list) and set(map(type, items)) <= {
            kind
        }  # isinstance takes True for an int

    prompts = [value] if isinstance(value, str) or (value and all_are(int, value)) else value
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS:  # before each is looked at
        raise ApiError(
            400,
            f"prompt has {len(prompts)} prompts, at most {MAX_PROMPTS} are taken: split it",
            "prompt",
        )
    if not (
        all_are(str, prompts)
        or (all_are(list, prompts) and all(all_are(int, prompt) for prompt in prompts))
    ):
        message = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
        raise ApiError(400, message, "prompt")
    if not prompts or not all(prompts):
        raise ApiError(
            400,
            "prompt is empty: give at least one character or token id for each answer",
            "prompt",
        )
    return prompts


def bias_of_ids(value: Any) -> dict[int, float]:
    """JSON's keys are texts: {"50256": -100} becomes {50256: -100.0}."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ApiError(
            400, f"logit_bias must be an object of at most {MAX_BIASES} token ids", "logit_bias"
        )
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            raise ApiError(400, f"logit_bias: {token!r:.200} is no token id", "logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ApiError(
                400, f"logit_bias: {reprlib.repr(bias)} is no number from -100 to 100", "logit_bias"
            )
    return {int(token): float(bias) for token, bias in value.items()}


def content_text(value: Any) -> Any:
    """A message's content: a text, or parts of which each is a text."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
            continue
        # a part is named like what it has: {"type": "image_url", "image_url": ..}
        field = kind if isinstance(kind, str) and kind in part else "type"
        raise refusal("not_served", f"{number}.{field}", NO_IMAGES)
    return "".join(texts)


def stops_that_fit(stops: list[str]) -> list[str]:
    total = sum(len(stop.encode()) for stop in stops)
    if total > MAX_STOP_BYTES:
        message = (
            f"stop: {total} bytes of stop strings, at most {MAX_STOP_BYTES} are taken: shorten them"
        )
        raise ApiError(400, message, "stop")
    return stops


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        list_of_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]
# fail_fast: a finding for each of a million wrong items would hold up the event loop for seconds
Ids = Annotated[list[int], Field(fail_fast=True)]
AllowedIds = Annotated[
    Ids, AfterValidator(lambda ids: sorted(set(ids)))
]  # a client may repeat them for ever
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    AfterValidator(stops_that_fit),
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=str | list[str],
    ),
]
Bias = Annotated[
    dict[int, float], PlainValidator(bias_of_ids, json_schema_input_type=dict[str, float])
]
Content = Annotated[
    str, BeforeValidator(content_text, json_schema_input_type=str | list[dict[str, str]])
]
Candidates = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


# --------------------------------------------------------------------------------------------------
# The requests


class Strict(BaseModel):
    """
    A JSON object with no other fields than ours. Nulls, ignored fields and neutral values count as
    not given.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[set[str]] = IGNORED
    ignores_others: ClassVar[bool] = False  # fields of which nothing is known are ignored, too
    neutral: ClassVar[dict] = {}

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, body: Any) -> Any:
        """
        The first field that is left and unknown ends it here: pydantic would first collect all of
        them, which takes seconds for the hundred thousands that a body can hold.
        """
        if not isinstance(body, dict):
            return body
        given = {}
        # Whoever sends tools sends fields beside them that mean nothing without: tools are what to
        # speak of.
        for name in [*(body.keys() & {"tools"}), *body]:
            value = body[name]
            if value is None or name in cls.ignored:
                continue
            if name in cls.model_fields:
                given[name] = value
            elif name in cls.neutral:
                cls.check_neutral(name, value)
            elif not cls.ignores_others:
                raise refusal("unknown", name, cls.hint(name))
        return given

    @classmethod
    def check_neutral(cls, name: str, value: Any):
        neutral = cls.neutral[name]
        if value != neutral or isinstance(value, bool) != isinstance(
            neutral, bool
        ):  # to Python True is 1
            remedy = f"leave it out or send {json.dumps(neutral)}"
            raise refusal("not_served", name, REMEDIES.get(name, remedy))

    @classmethod
    def hint(cls, name: str) -> str:
        """What an unknown name may have meant."""
        close = difflib.get_close_matches(
            name[:50], [*cls.model_fields, *cls.neutral], 1, cutoff=0.85
        )
        return f"; did you mean {close[0]!r}?" if close else ""


class StreamOptions(Strict):
    ignored: ClassVar[set[str]] = {"include_obfuscation"}  # OpenAI's random padding of chunks

    include_usage: bool = False
    continuous_usage_stats: bool = False  # only beside include_usage, as in vLLM


class SamplingRequest(Strict):
    """
    What both kinds of completions share. The defaults are OpenAI's and vLLM's; those of the Python
    API, which this process does not import, are in SamplingParams. Raises ApiError or pydantic's
    ValidationError.
    """

    model: str | None = None  # None: the one model there is
    max_tokens: int | None = Field(None, ge=0, lt=INT32)
    temperature: float = Field(1.0, ge=0, le=2)  # 0: always the most likely token
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=INT32)  # 0 and -1: all tokens
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: Bias | None = None
    allowed_token_ids: AllowedIds | None = Field(None, min_length=1, max_length=MAX_ALLOWED)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Stops = []
    include_stop_str_in_output: bool = False
    stop_token_ids: Ids = Field([], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=INT32)
    skip_special_tokens: bool = True
    prompt_logprobs: Candidates | None = None
    return_token_ids: bool = False
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # lower is served first
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1000
    )  # prefixes are shared within one salt
    request_id: str | None = Field(
        None, pattern="^[!-~]{1,128}$"
    )  # printable ASCII: it becomes the answer's id

    @model_validator(mode="after")
    def check_combinations(self):
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ApiError(
                400,
                "stream_options is for streams: send stream true or leave it out",
                "stream_options",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                400, "prompt_logprobs is not for streams: send stream false", "prompt_logprobs"
            )
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens is 0, wanted at least 1; 0 is only for echo", "max_tokens"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}"
            raise ApiError(400, message, "min_tokens")
        return self

    @property
    def prompt_candidates(self) -> int | None:
        """
        How many candidates to score at each place of the prompt; None: the prompt is not scored.
        """
        wanted = [self.prompt_logprobs, self.candidates if self.echo else None]
        return max((n for n in wanted if n is not None), default=None)

    def sampling_params(self, room: int) -> dict:
        """
        The fields of the engine's SamplingParams as plain data: the HTTP process never imports
        torch. `room` is for as many tokens as the context has left.
        """
        names = "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty logit_bias seed "
        names += "allowed_token_ids stop_token_ids ignore_eos min_tokens"
        max_tokens = room if self.max_tokens is None else max(1, self.max_tokens)
        changed = {
            "max_tokens": max_tokens,
            "logprobs": self.candidates,
            "top_k": max(self.top_k, 0),
        }
        return {name: getattr(self, name) for name in names.split()} | changed

    def of_answer(self, choice: "Choice", tokens: list[int], finish_reason: str | None) -> dict:
        """What an answer says of a choice besides its text."""
        fields = {
            "index": choice.index,
            "logprobs": self.scores(choice, tokens),
            "finish_reason": finish_reason,
        }
        fields["stop_reason"] = choice.stop_reason if finish_reason else None
        return fields | ({"token_ids": tokens} if self.return_token_ids else {})

    def of_prompt(self, choice: "Choice") -> dict:
        """What an answer says of its prompt, the ids only once."""
        fields = (
            {"prompt_token_ids": choice.prompt} if self.return_token_ids and choice.is_first else {}
        )
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = vllm_prompt_logprobs(choice, self.prompt_logprobs)
        return fields

    def usage_so_far(self, choice: "Choice", num_tokens: int) -> dict:
        """
        What a chunk says of its own choice, if usage is wanted in every chunk; else nothing. As
        vLLM's.
        """
        options = self.stream_options
        if not (options.include_usage and options.continuous_usage_stats):
            return {}
        return {"usage": token_counts(len(choice.prompt), num_tokens)}

    def check_fits(
        self, prompts: list[list[int]], vocab_size: int, max_model_len: int, eos_token_ids=()
    ):
        """
        Refuse at once what the model can never take: ApiError (400) with wanted, available, what to
        change.
        """
        own = [
            (name, getattr(self, name) or ())
            for name in ("stop_token_ids", "logit_bias", "allowed_token_ids")
        ]
        for param, tokens in own + [("prompt", prompt) for prompt in prompts]:
            if min(tokens, default=0) < 0 or max(tokens, default=0) >= vocab_size:
                wrong = next(token for token in tokens if not 0 <= token < vocab_size)
                message = (
                    f"token id {reprlib.repr(wrong)} is outside the vocabulary, 0..{vocab_size - 1}"
                )
                raise ApiError(400, message, param)
        if (listed := len(self.allowed_token_ids or ()) * len(prompts)) > MAX_ALLOWED:
            message = f"allowed_token_ids of all prompts are {listed}, at most {MAX_ALLOWED} are taken: split the call"
            raise ApiError(400, message, "allowed_token_ids")
        stops = {*self.stop_token_ids, *eos_token_ids}
        if self.min_tokens and all(
            token in stops for token in self.allowed_token_ids or range(vocab_size)
        ):
            raise ApiError(
                400, "min_tokens: all tokens that are allowed are stop tokens", "min_tokens"
            )
        self.check_length(max(map(len, prompts)), max_model_len)
        scores = sum(self.num_scores(len(prompt), max_model_len) for prompt in prompts)
        if scores > MAX_SCORES:
            message = f"{scores} log-probabilities in one answer, at most {MAX_SCORES} are told: "
            message += "lower max_tokens, n or the number of log-probabilities, or split the call"
            raise ApiError(400, message, "logprobs" if self.prompt_candidates is None else "prompt")

    def check_length(self, longest: int, max_model_len: int):
        """
        Raises ApiError if a prompt of so many tokens, and the tokens asked for, are more than the
        model takes.
        """
        scored = self.prompt_candidates is not None
        wanted = (
            max(1, self.min_tokens) if self.max_tokens is None else self.max_tokens or int(scored)
        )
        if (total := longest + wanted) > max_model_len:
            # client libraries look for these very words, and for the code
            limit = f"this model's maximum context length is {max_model_len} tokens"
            numbers = f"{longest} prompt tokens and max_tokens {wanted} make {total}"
            message = f"{limit}, {numbers}: shorten the prompt or lower max_tokens"
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")

    def num_scores(self, prompt_length: int, max_model_len: int) -> int:
        """
        The most log-probabilities that an answer to such a prompt can have; each choice tells the
        prompt's too.
        """
        most_tokens = max_model_len - prompt_length if self.max_tokens is None else self.max_tokens
        generated = 0 if self.candidates is None else most_tokens * (1 + self.candidates)
        of_prompt = (
            0 if self.prompt_candidates is None else prompt_length * (1 + self.prompt_candidates)
        )
        return self.n * (generated + of_prompt)


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    neutral: ClassVar[dict] = NEUTRAL
    id_prefix: ClassVar[str] = "cmpl-"
    objects: ClassVar[tuple[str, str]] = (
        "text_completion",
        "text_completion",
    )  # of a whole answer, of a chunk

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=0, lt=INT32)  # 0: score the prompt
    logprobs: Candidates | None = (
        None  # of the model's distribution, before temperature and penalties
    )
    echo: bool = False
    add_special_tokens: bool = (
        True  # changes nothing: tokenizers that would add some are refused at start
    )
    messages: ClassVar[tuple] = ()

    @property
    def candidates(self) -> int | None:
        return self.logprobs

    def scores(self, choice: "Choice", tokens: list[int]) -> dict | None:
        return None if self.logprobs is None else text_logprobs(choice, self.logprobs)

    def answer(self, choices: list["Choice"]) -> dict:
        def whole(choice: Choice) -> dict:
            return {"text": choice.text} | self.of_answer(
                choice, choice.tokens, choice.finish_reason
            )

        return {"choices": [whole(choice) | self.of_prompt(choice) for choice in choices]}

    def chunks(self, choice: "Choice") -> list[dict]:
        return [self.answer([choice]) | self.usage_so_far(choice, choice.num_tokens)]


class Message(Strict):
    ignores_others: ClassVar[bool] = True
    neutral: ClassVar[dict] = NEUTRAL_IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


Messages = Annotated[list[Message], Field(fail_fast=True)]


class ChatRequest(SamplingRequest):
    """
    POST /v1/chat/completions. Without max_completion_tokens an answer may be as long as the context
    allows.
    """

    ignored: ClassVar[set[str]] = IGNORED | {
        "parallel_tool_calls"
    }  # without tools, which are told of first
    neutral: ClassVar[dict] = NEUTRAL_IN_CHAT
    id_prefix: ClassVar[str] = "chatcmpl-"
    objects: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    echo: ClassVar[bool] = False

    messages: Messages = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, lt=INT32)
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=INT32
    )  # goes before the older max_tokens
    logprobs: bool = False
    top_logprobs: Candidates | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # as in completions

    @model_validator(mode="before")
    @classmethod
    def prefer_the_newer_name(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("max_completion_tokens") is not None:
            return body | {"max_tokens": body["max_completion_tokens"]}
        return body

    @model_validator(mode="after")
    def check_logprobs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(
                400,
                "top_logprobs needs logprobs: send logprobs true or leave it out",
                "top_logprobs",
            )
        return self

    @property
    def candidates(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def scores(self, choice: "Choice", tokens: list[int]) -> dict | None:
        if not (self.logprobs and tokens):
            return None
        return {"content": chat_logprobs(choice, self.candidates), "refusal": None}

    def answer(self, choices: list["Choice"]) -> dict:
        def whole(choice: Choice) -> dict:
            message = {"role": "assistant", "content": choice.text}
            return {"message": message} | self.of_answer(
                choice, choice.tokens, choice.finish_reason
            )

        return {"choices": [whole(choice) for choice in choices]} | self.of_prompt(choices[0])

    def chunks(self, choice: "Choice") -> list[dict]:
        """
        The first says the role, the last nothing but how it ended, what is between has the text.
        """
        parts = [({"role": "assistant", "content": ""}, [], None)] if choice.is_first else []
        parts += (
            [({"content": choice.text}, choice.tokens, None)]
            if choice.text or choice.tokens
            else []
        )
        parts += [({}, [], choice.finish_reason)] if choice.finish_reason else []
        chunks = []
        num_tokens = choice.num_tokens - len(choice.tokens)  # that the client knows of
        for delta, tokens, finish_reason in parts:
            num_tokens += len(tokens)
            answer = {"delta": delta} | self.of_answer(choice, tokens, finish_reason)
            chunks.append({"choices": [answer]} | self.usage_so_far(choice, num_tokens))
        chunks[0] |= self.of_prompt(choice)
        return chunks


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt, or the messages of a chat."""

    neutral: ClassVar[dict] = NEUTRAL_IN_TEMPLATES
    model: str | None = None
    prompt: str | None = None
    messages: Messages = Field([], min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True  # as in completions
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one(self):
        if (self.prompt is None) == (not self.messages):
            raise ApiError(400, "give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=INT32)]], Field(fail_fast=True)]


# --------------------------------------------------------------------------------------------------
# The answers, as plain dictionaries: a few microseconds each


def token_counts(prompt_tokens: int, completion_tokens: int) -> dict:
    total = prompt_tokens + completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
    }


class Choice:
    """
    One continuation of a prompt, for a `job`: steps of the engine put tokens in; `text`, `tokens`,
    `scores` (one for each token, if asked for) and `offsets` (where in the whole text each token
    begins) are what the client was not told yet. `prompt_scores`, of each token of the prompt but
    the first, is one list for all choices of a prompt. A score is [log-probability of the token,
    the likeliest ids, their log-probabilities].
    """

    def __init__(
        self,
        job,
        index: int,
        request: SamplingRequest,
        prompt: list[int],
        prompt_scores: list,
        tokenizer,
        eos: list[int],
    ):
        self.job, self.index, self.request = job, index, request
        self.prompt, self.prompt_scores = prompt, prompt_scores
        # To vLLM the end of text, the first if there are several, is a stop without a reason; with
        # ignore_eos it is a token like any other.
        self.eos = None if request.ignore_eos or not eos else eos[0]
        self.engine_id: str | None = None
        self.num_tokens = self.cached_tokens = (
            0  # of the answer: none after a stop string; of the prompt
        )
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = (
            None  # of finish_reason "stop": the stop string or id; None: end of text
        )
        self.is_first, self.is_over = True, False  # nothing was told yet; all was
        self.first_step = self.last_step = 0.0  # when tokens came first, and last
        self.spell = (
            tokenizer.spelled_bytes
        )  # the bytes of a token, a control token's name included
        self.stream = TextStream(self.spell, [], request.include_stop_str_in_output)
        self.text, self.tokens, self.scores, self.offsets = "", [], [], []
        # An echo is the prompt as it was sent, with the names of control tokens. It is not searched
        # for stop strings, but a character may begin in it and end in the answer. Offsets are told
        # with log-probabilities, of which there are not many.
        if request.echo and request.candidates is None:
            self.text = self.stream.push_all(prompt)
        elif request.echo:
            for token in prompt:
                self.offsets.append(self.stream.num_characters)
                self.text += self.stream.push(token)
        self.stream.token_bytes = (
            tokenizer.token_bytes if request.skip_special_tokens else self.spell
        )

    def take(
        self,
        tokens: list[int],
        finish_reason: str | None,
        cached_tokens: int,
        scores=None,
        prompt_scores=None,
    ):
        """
        Add what a step brought, or several. With finish_reason "stop" the last token is the one
        that stopped: it is no text. `scores`, if asked for, has one for each token.
        """
        self.cached_tokens = cached_tokens
        self.prompt_scores[:] = prompt_scores or self.prompt_scores
        if self.request.max_tokens == 0:  # the prompt's scores were all that was wanted
            tokens, finish_reason = [], "length"
        stop_token = tokens[-1] if finish_reason == "stop" else None
        num_shown = len(tokens) - (
            stop_token is not None and not self.request.include_stop_str_in_output
        )
        for number, token in enumerate(tokens):
            self.num_tokens += 1
            self.tokens.append(token)
            if scores:
                self.scores.append(scores[number])
            self.offsets.append(self.stream.num_characters)
            if self.num_tokens == self.request.min_tokens + 1:
                self.stream.stop_at(self.request.stop)
            self.text += self.stream.push(token) if number < num_shown else ""
            if self.stream.matched is not None:
                break  # the tokens after a stop string do not count
        if finish_reason and self.stream.matched is None:
            self.text += self.stream.flush()
            self.finish_reason, self.stop_reason = (
                finish_reason,
                None if stop_token == self.eos else stop_token,
            )
        if self.stream.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self.stream.matched

    def has_news(self) -> bool:
        if self.is_over or (
            self.request.prompt_candidates is not None and not (self.tokens or self.finish_reason)
        ):
            return False  # an echo waits for its prompt's scores
        tokens = self.tokens and (
            self.request.return_token_ids or self.request.candidates is not None
        )
        return bool(self.text or tokens or self.finish_reason)

    def told(self):
        """The client knows all that there is until now."""
        self.text, self.tokens, self.scores, self.offsets = "", [], [], []
        self.is_first, self.is_over = False, self.finish_reason is not None


def candidates(token: int, score: list, n: int) -> dict[int, float]:
    """{id: log-probability} of the n likeliest tokens and of the token itself, likeliest first."""
    logprob, ids, logprobs = score
    found = dict(zip(ids[:n], logprobs[:n], strict=True))
    return {i: max(p, LOWEST) for i, p in (found | {token: found.get(token, logprob)}).items()}


def text_logprobs(choice: Choice, n: int) -> dict:
    """
    OpenAI's shape for completions: four lists, an entry for each token, an echo's too; null:
    nothing predicts it.
    """
    tokens, scores = choice.tokens, choice.scores
    if choice.is_first and choice.request.echo:
        tokens, scores = choice.prompt + tokens, [None, *choice.prompt_scores, *scores]
    names, values, tops = [], [], []
    for token, score in zip(tokens, scores, strict=True):
        names.append(token_name(choice.spell(token)))
        found = candidates(token, score, n) if score else None
        values.append(found[token] if score else None)
        tops.append({token_name(choice.spell(i)): p for i, p in found.items()} if score else None)
    return {
        "tokens": names,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": choice.offsets,
    }


def chat_logprobs(choice: Choice, n: int) -> list[dict]:
    """OpenAI's shape for chats: an object for each token."""

    def entry(token: int, logprob: float) -> dict:
        data = choice.spell(token)
        return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}

    content = []
    for token, score in zip(choice.tokens, choice.scores, strict=True):
        found = candidates(token, score, n)
        top = [entry(i, p) for i, p in list(found.items())[:n]]
        content.append(entry(token, found[token]) | {"top_logprobs": top})
    return content


def vllm_prompt_logprobs(choice: Choice, n: int) -> list[dict | None]:
    """
    vLLM's shape: for each prompt token but the first {id: {logprob, rank, decoded_token}}; rank
    null: not known.
    """

    def place(token: int, score: list) -> dict:
        ranked = enumerate(candidates(token, score, n).items(), 1)
        return {
            str(i): {
                "logprob": p,
                "rank": rank if rank <= n else None,
                "decoded_token": token_name(choice.spell(i)),
            }
            for rank, (i, p) in ranked
        }

    return [None, *map(place, choice.prompt[1:], choice.prompt_scores)]
