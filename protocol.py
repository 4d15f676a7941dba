"""
The JSON of the HTTP surface: what a request may say, what an answer looks like, how a refusal reads.

    request = CompletionRequest.model_validate({"prompt": "def ", "max_tokens": 8})
    request.prompt, request.sampling_params()        # ["def "], {"temperature": 1.0, ..., "max_tokens": 8}

Not run by itself: `serve.py` imports it. Shapes follow OpenAI's completions API and vLLM's extras. Three rules hold
for every field: types are strict (a bool is no int), numbers are finite and in a stated range, and `null` means "not
given". Bad input is a 400 that names the field, because clients retry 408, 409, 429 and everything from 500 up.
"""

import difflib
import json
import reprlib
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.responses import Response

# What OpenAI calls the kinds of error; a client library turns status and type into an exception of its own.
ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}

# Accepted for other servers' sake: they change nothing in the answer.
IGNORED = {"user", "metadata", "store"}

# Fields that would change the answer and that this server cannot serve yet, each with the value that asks for nothing
# (None: only null does). To implement one, move it from here to a field of CompletionRequest.
NEUTRAL = {"n": 1, "best_of": 1, "repetition_penalty": 1, "length_penalty": 1, "suffix": "", "logit_bias": {}}
NEUTRAL |= dict.fromkeys(["presence_penalty", "frequency_penalty", "min_tokens", "priority"], 0)
NEUTRAL |= dict.fromkeys(["logprobs", "prompt_logprobs", "allowed_token_ids", "cache_salt"], None)
NEUTRAL |= {"use_beam_search": False, "early_stopping": False}
NEUTRAL |= {"skip_special_tokens": True, "spaces_between_special_tokens": True}

MAX_STOPS, MAX_STOP_LENGTH = 4, 1000  # every token's text is searched for each stop string: both bound that work
MAX_STOP_IDS = 64
INT64 = 2**63


# ----------------------------------------------------------------------------------------------------------------------
# Refusals


class ApiError(HTTPException):
    """
    A refusal in OpenAI's shape. `param` names the field at fault, `code` is for programs ("model_not_found"),
    `retry_after` is in seconds and goes out as a header.
    """

    def __init__(self, status: int, message: str, param=None, code=None, retry_after: int | None = None):
        super().__init__(status, message, headers={"Retry-After": str(retry_after)} if retry_after else None)
        self.param, self.code = param, code


def error_body(error: HTTPException) -> bytes:
    """The one shape of every error, ours or the framework's (which has neither param nor code)."""
    kind = ERROR_TYPES.get(error.status_code, "invalid_request_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    # ASCII only: a message may quote half a surrogate pair, which JSON can spell and UTF-8 cannot hold
    return json.dumps({"error": {"message": error.detail, "type": kind, "param": param, "code": code}}).encode()


def error_response(error: HTTPException) -> Response:
    return Response(error_body(error), error.status_code, error.headers, "application/json")


def validation_error(errors: list[dict]) -> ApiError:
    """
    Turn pydantic's findings on a request body into one 400 about the first of them. Our own validators raise ApiError
    themselves, which pydantic lets through: they know best what to say.
    """
    error = errors[0]
    path = [str(part)[:200] for part in error["loc"] if part != "body"]  # a name may be as long as the body
    if error["type"] == "json_invalid":  # here the path is a position in the body
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']} at character {path[0]}")
    if not path:
        return ApiError(400, "the body must be a JSON object, sent with the header Content-Type: application/json")
    param, name = path[0], ".".join(path)  # stop, stop.1
    if error["type"] == "missing":
        return ApiError(400, f"{name} is missing", param)
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, [*CompletionRequest.model_fields, *NEUTRAL], 1, cutoff=0.85)
        return ApiError(400, f"there is no field {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""), param)
    return ApiError(400, f"{name}: {error['msg'].lower()}, got {reprlib.repr(error['input'])}", param)


# ----------------------------------------------------------------------------------------------------------------------
# The request


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)  # isinstance takes True for an int


def list_of_prompts(value: Any) -> list[str | list[int]]:
    """Bring the four forms of `prompt` into one: a list of texts, or a list of lists of token ids."""
    prompts = [value] if isinstance(value, str) or (value and is_token_ids(value)) else value
    is_list = isinstance(prompts, list)
    if not is_list or not (all(isinstance(p, str) for p in prompts) or all(is_token_ids(p) for p in prompts)):
        message = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
        raise ApiError(400, message, "prompt")
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt is empty: give at least one character or token id for each answer", "prompt")
    return prompts


def check_stops(stops: list[str]) -> list[str]:
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop has {len(stops)} strings, at most {MAX_STOPS} are taken", "stop")
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise ApiError(400, f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
    return stops


def wrap_string(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


PROMPT_FORMS = str | list[str] | list[int] | list[list[int]]
Prompts = Annotated[list[str | list[int]], PlainValidator(list_of_prompts, json_schema_input_type=PROMPT_FORMS)]
Stops = Annotated[
    list[str],
    FailFast(),  # a finding for each of a million wrong items would hold up the event loop for seconds
    AfterValidator(check_stops),
    BeforeValidator(wrap_string, json_schema_input_type=str | list[str]),
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False


class CompletionRequest(Strict):
    """
    POST /v1/completions. The defaults are OpenAI's; those of the Python API, which this process does not import, are in
    SamplingParams. Raises ApiError or pydantic's ValidationError.
    """

    model: str | None = None  # None: the one model there is
    prompt: Prompts
    max_tokens: int = Field(16, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)  # 0: always the most likely token
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1: all tokens
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stops = []
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    echo: bool = False
    return_token_ids: bool = False
    request_id: str | None = Field(None, pattern="^[!-~]{1,128}$")  # printable ASCII: it becomes the answer's id

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, body: Any) -> Any:
        """Remove nulls, ignored fields and neutral values, so that whatever is left and unknown is an error."""
        if not isinstance(body, dict):
            return body
        body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        for name in [name for name in body if name in NEUTRAL]:
            value, neutral = body.pop(name), NEUTRAL[name]
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):  # to Python True is 1
                message = f"{name} is not served here yet: leave it out or send {json.dumps(neutral)}"
                raise ApiError(400, message, name)
        return body

    @model_validator(mode="after")
    def check_combinations(self) -> "CompletionRequest":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams: send stream true or leave it out", "stream_options")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0, wanted at least 1; 0 is only for echo", "max_tokens")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self) -> dict:
        """The fields of the engine's SamplingParams as plain data: the HTTP process never imports torch."""
        names = ("temperature", "top_p", "min_p", "max_tokens", "stop_token_ids", "ignore_eos", "seed")
        return {name: getattr(self, name) for name in names} | {"top_k": max(self.top_k, 0)}

    def check_fits(self, prompts: list[list[int]], vocab_size: int, max_model_len: int):
        """Refuse at once what the model can never take. Raises ApiError (400): wanted, available, what to change."""
        for param, ids in [("stop_token_ids", self.stop_token_ids), *(("prompt", ids) for ids in prompts)]:
            if min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
                wrong = next(token for token in ids if not 0 <= token < vocab_size)
                raise ApiError(400, f"token id {wrong} is outside the vocabulary, 0..{vocab_size - 1}", param)
        longest = max(map(len, prompts))
        if longest + self.max_tokens > max_model_len:
            message = (
                f"{longest} prompt tokens and max_tokens {self.max_tokens} make {longest + self.max_tokens}, "
                f"this model takes {max_model_len}: shorten the prompt or lower max_tokens"
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")


# ----------------------------------------------------------------------------------------------------------------------
# The answer


class PromptTokensDetails(BaseModel):
    cached_tokens: int  # of all prompts: how many tokens were found in the prefix cache


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None  # null while streaming
    stop_reason: str | int | None = None  # the stop string or stop id that ended it; null at the end of the text
    prompt_token_ids: list[int] | None = None  # the last two only with return_token_ids
    token_ids: list[int] | None = None


class CompletionAnswer(BaseModel):
    """The whole answer; with `usage` null or absent, one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ErrorAnswer(BaseModel):
    """The shape of `error_body`, for the OpenAPI page."""

    error: dict[Literal["message", "type", "param", "code"], str | None]
