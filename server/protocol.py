"""
The bodies of calls: their fields, types and limits, and the messages when they are refused.

    body = CompletionRequest.model_validate_json(b'{"prompt": "def", "max_tokens": 8}')
    body.prompt, body.sampling_params(4, 99)   # ["def"], {"temperature": 1.0, "max_tokens": 8, ..}

Not run by itself: app.py uses it to parse each call. The fields are those of OpenAI's API, plus
vLLM's extensions. Sampling fields have the same defaults and ranges as `SamplingParams`
(params.py). A model's own defaults take precedence, and are passed as pydantic's `context`.

Three rules apply to every field. Types are strict: for example, a bool is not an int. Numbers must
be finite and within a stated range. And `null` means "not sent". Bad input gets a message that
names the field, and status 400, because clients retry 408, 409, 429 and anything from 500 up.

Three things could be called a request. In this folder, `body` is the parsed JSON, `http` is
Starlette's request, and `paged.Request` is the engine's request.
"""

import difflib
import json
import re
import reprlib
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json
from starlette.responses import Response

from common import plural
from engine.schemas import drop_neutral
from engine.stages import require
from params import BIAS, RANGES, SamplingParams, check_variables, start_of_json

# OpenAI's error types. Client libraries choose an exception by status and type.
ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
RETRY = {"Retry-After": "1"}  # seconds; for 429 and 503, which are temporary

# Fields that are accepted and ignored, because they do not change the answer. They are for billing,
# caching and statistics, or are hints that a server need not follow (verbosity, prediction).
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"}
IGNORED |= {"prediction", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
IGNORED |= {"include_obfuscation"}

# Fields that would change the answer, but are not supported. Each has a neutral value, which some
# clients send, and which has no effect. (None means that only null is neutral.)
NOT_SERVED = {
    "best_of": 1,
    "suffix": "",
    "echo": False,  # in a chat
    "modalities": ["text"],
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "return_token_strs": False,
    "continue_final_message": False,
    "tools": [],  # in a completion
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "images": [],
    "audio": None,
    "prefix": False,
}

KINDS = ("json", "regex", "choice", "grammar")  # kinds of structured_outputs
# vLLM's older names
OLD_NAMES = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in KINDS}

MAX_STOPS = 64
MAX_STOP_BYTES = 2**14  # total for a call's stop strings; up to this much text may be held back
MAX_SCORES = 2**18  # log-probabilities in an answer, including those of prompts: 18 MB of JSON
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_CHOICES = 128  # for each prompt (`n`)
MAX_PROMPTS = 4096
MAX_MESSAGES = 4096
MAX_PRIORITY = 1000
MAX_SCHEMA = 2**16  # bytes in a grammar, or in all tools' parameters together
MAX_TOOLS = 128
NO_PARAMETERS = {"type": "object", "properties": {}}
HAS_GRAMMARS = find_spec("llguidance") is not None
INT32 = 2**31  # counts must be smaller, as JSON numbers have no limit and messages print sums


# --------------------------------------------------------------------------------------------------
# Refusals


@dataclass(eq=False)
class ApiError(Exception):
    """
    A refusal. `param` names the field at fault. `code` is meant for programs, for example
    "model_not_found".
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None
    logged: str | None = None

    @property
    def reason(self) -> str:
        """
        Return the reason to log, which must not contain a client's text. It is the code if there is
        one, otherwise `logged`, otherwise the message without the value that it quotes.
        """
        return self.code or (self.logged or self.message).partition(", got ")[0][:200]


class ClientGone(ApiError):
    """The client has disconnected. The status is nginx's, and only appears in the log."""

    def __init__(self):
        super().__init__(499, "the client is gone")


def error_body(error: ApiError) -> bytes:
    """Return an error as JSON. All errors have this format."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    shown = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return json.dumps({"error": shown}).encode()


def error_response(error: ApiError) -> Response:
    headers = RETRY if error.status in (429, 503) else error.headers
    return Response(error_body(error), error.status, headers, "application/json")


class Refused(ValueError):
    """
    Raised by validators. The message follows the name of the field. pydantic knows the path to the
    value being validated, for example ("messages", 0), and `path` continues from there.
    """

    def __init__(self, problem: str, *path):
        super().__init__(problem)
        self.path = path


def unknown_field(name: str, known, *path) -> Refused:
    """
    Return the refusal for a field that is not in `known`. Its message suggests the field that was
    probably meant.
    """
    meant = difflib.get_close_matches(name[:64].lower(), known, 1, 0.8)  # a name may be megabytes
    meant = OLD_NAMES.get(name) or "".join(meant)
    remedy = f"did you mean {meant}?" if meant else "leave it out"
    return Refused(f"is not a known field: {remedy}", *path, name)


def check_known(value: dict, *known: str, path: tuple = ()):
    """Raise Refused for a field that is not in `known`. A null field counts as not sent."""
    for name in value:
        if value[name] is not None and name not in known:
            raise unknown_field(name, known, *path)


def body_refusal(findings: ValidationError) -> ApiError:
    """Convert pydantic's errors about a body to a refusal (400) about the first error."""
    error = findings.errors(include_url=False)[0]
    reason = error.get("ctx", {}).get("error")
    path = [*error["loc"], *getattr(reason, "path", ())]
    path = [str(part)[:200] for part in path]  # a name may be as long as the body
    name = ".".join(path)  # stop.1
    if not path:
        message = f"the body must be a JSON object: {error['msg']}"
    elif isinstance(reason, ValueError):
        message = f"{name} {reason}"
    else:
        message = f"{name}: {error['msg']}, got {reprlib.repr(error['input']):.200}"
    return ApiError(400, message, path[0] if path else None)


def check_encoding(content_encoding: str, data: bytes):
    """Raise ApiError (400) if a body is invalid because it is not plain UTF-8."""
    if content_encoding not in ("", "identity"):
        form = f"Content-Encoding {content_encoding}"
    elif data.startswith(b"\xef\xbb\xbf"):
        form = "a byte-order mark"
    elif 0 in data[:4]:  # perhaps after its byte-order mark
        form = "UTF-16"
    else:
        return
    raise ApiError(400, f"the body must be plain UTF-8, got {form:.99}")


# --------------------------------------------------------------------------------------------------
# Types of values


def is_list_of(kind: type, items) -> bool:
    """
    Return whether `items` is a list whose items have exactly this type. isinstance would accept
    True as an int.
    """
    return isinstance(items, list) and set(map(type, items)) <= {kind}


def list_of_prompts(value) -> list:
    """
    Convert the four formats of `prompt` to two: a list of strings, or a list of lists of token ids.
    """
    is_ids = isinstance(value, list) and is_list_of(int, value[:1])
    prompts = [value] if is_ids or isinstance(value, str) else value
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS:  # checked before the items
        raise Refused(f"has {len(prompts)} prompts, but the limit is {MAX_PROMPTS}: split it")
    of_ids = is_list_of(list, prompts) and all(is_list_of(int, prompt) for prompt in prompts)
    if not (of_ids or is_list_of(str, prompts)):
        raise Refused(
            "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if not all(prompts):
        raise Refused("is empty: each prompt needs at least one character or token id")
    return prompts


def bias_of_ids(value) -> dict[int, float]:
    """Convert the keys, which are strings in JSON: {"50256": -100} becomes {50256: -100.0}."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise Refused(f"must be an object with at most {MAX_BIASES} token ids")
    for token, bias in value.items():
        if not re.fullmatch("[0-9]{1,11}", token):
            raise Refused(f"has a key that is not a token id, got {reprlib.repr(token)}")
        if not BIAS.admits(bias):
            raise Refused(f"must be {BIAS.wanted}, got {reprlib.repr(bias)}", token)
    return {int(token): float(bias) for token, bias in value.items()}


def content_text(value, info: ValidationInfo):
    """
    Return a message's content as one string. Clients may send it as a list of text parts. An
    answer's content may be null.
    """
    if value is None and info.data.get("role") in ("assistant", "tool"):
        return ""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        match part:
            case (
                str(text)  # langchain's
                | {"type": "text", "text": str(text)}
                | {"type": "refusal", "refusal": str(text)}
            ):
                texts.append(text)
            case _:
                raise Refused(
                    "cannot be read: only parts of type text are supported, got "
                    f"{reprlib.repr(part)}",
                    number,
                )
    return "".join(texts)


def arguments_object(value):
    """
    Return a call's arguments as an object, which is what templates expect. Some servers send "" if
    there are no arguments. If max_tokens has cut off a call, its arguments may end anywhere.
    """
    if value in (None, "", "null"):
        return {}
    try:
        return from_json(value) if isinstance(value, str) else value
    except ValueError as error:
        if not str(error).startswith("EOF"):
            raise
        return from_json(value, allow_partial="trailing-strings")


def few_items(messages):
    """
    Refuse messages with too many tool calls or parts of content. Validating 60,000 calls would take
    seconds.
    """
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        return messages  # pydantic refuses them
    for name, items in (("tool_calls", "calls"), ("content", "parts of content")):
        lists = [m.get(name) for m in messages if isinstance(m, dict)]
        count = sum(len(made) for made in lists if isinstance(made, list))
        if count > MAX_MESSAGES:
            raise Refused(f"have {count} {items}, but the limit is {MAX_MESSAGES}: leave some out")
    return messages


def grammar_text(value, *path) -> str:
    """
    Return a schema or grammar as text for the engine. The engine compiles the text, and refuses it
    if it is invalid.
    """
    try:
        require("grammar")
    except ValueError as error:
        raise Refused(f"is not supported: {error}", *path) from None
    if not HAS_GRAMMARS:
        raise Refused("is not supported here: run `pip install llguidance`, or leave it out", *path)
    text = value if isinstance(value, str) else start_of_json(value, MAX_SCHEMA)
    if len(text.encode()) > MAX_SCHEMA:
        raise Refused(f"has more than {MAX_SCHEMA} bytes: shorten it", *path)
    return text


def schema_text(value) -> str:
    """Return a schema as text for the engine, without keywords that have no effect."""
    text = grammar_text(value)
    try:
        # `from_json` refuses lone surrogates, which cannot be sent in a message
        lean = drop_neutral(from_json(text))
        return json.dumps(lean, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # the engine will report what is wrong
        return text


def grammar_of_format(value) -> dict | None:
    """Convert `response_format` to the engine's grammar. Returns None for free text."""
    match value:
        case {"type": "text"}:
            return check_known(value, "type")
        case {"type": "json_object"} if isinstance(value.get("schema"), dict | None):
            check_known(value, "type", "schema")  # the schema is llama.cpp's extension
            schema = value.get("schema") or {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)} as named}:
            check_known(value, "type", "json_schema")
            check_known(named, "name", "description", "schema", "strict", path=("json_schema",))
        case _:
            raise Refused(
                "must be of type text, json_object, or json_schema with an object as "
                "json_schema.schema"
            )
    return {"kind": "json", "text": schema_text(schema)}


def grammar_of_outputs(value: dict) -> dict:
    """Convert vLLM's `structured_outputs` to the engine's grammar."""
    check_known(value, *KINDS, "structural_tag")
    match [field for field in value.items() if field[1] is not None]:
        case [("json", str() | dict() as schema)]:
            return {"kind": "json", "text": schema_text(schema)}
        case [("regex" | "grammar" as kind, str() as text)]:
            return {"kind": kind, "text": grammar_text(text)}
        case [("choice", [_, *_] as choices)] if is_list_of(str, choices):
            return {"kind": "choice", "text": grammar_text(choices)}
    raise Refused(
        "must have one of json (an object, or JSON in a string), regex, choice (a list of "
        "strings), grammar; structural_tag and others are not supported"
    )


def choice_of_tools(value) -> str | dict:
    """Return `tool_choice`: "none", "auto", "required", or {"name": ..} naming a function."""
    match value:
        case "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)} as function}:
            check_known(value, "type", "function")
            check_known(function, "name", path=("function",))
            return {"name": name}
    raise Refused(
        'must be "none", "auto", "required", or {"type": "function", "function": {"name": ..}}'
    )


def stops_that_fit(stops: list[str]) -> list[str]:
    """Refuse stop strings that are too long in total."""
    total = sum(len(stop.encode()) for stop in stops)
    if total > MAX_STOP_BYTES:
        raise Refused(f"has {total} bytes, but the limit is {MAX_STOP_BYTES}: shorten it")
    return stops


def check_vocabulary(param, tokens, vocab_size):
    """Raise ApiError (400) about the field `param` if any id is outside 0..vocab_size-1."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            ids = f"the vocabulary, 0..{vocab_size - 1}"
            raise ApiError(400, f"token id {reprlib.repr(token)} is outside {ids}", param)


Prompts = Annotated[list, PlainValidator(list_of_prompts)]
# fail_fast, because reporting a million wrong items would block the event loop for seconds
Ids = Annotated[list[int], Field(fail_fast=True)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    AfterValidator(stops_that_fit),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
Bias = Annotated[dict[int, float], PlainValidator(bias_of_ids)]
Content = Annotated[str, BeforeValidator(content_text)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(check_variables)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
NumTokens = Annotated[int, Field(**RANGES["max_tokens"].bounds)]
NumLogprobs = Annotated[int, Field(**RANGES["logprobs"].bounds)]


def sampling_field(name: str):
    """Return a field with the same default and range as in SamplingParams."""
    return Field(getattr(SamplingParams, name), **RANGES[name].bounds)


# --------------------------------------------------------------------------------------------------
# The bodies


class Body(BaseModel):
    """
    A JSON object. Unknown fields are refused. Nulls, ignored fields and neutral values count as not
    sent. Fields that are not sent get the model's defaults, from pydantic's context.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar = IGNORED
    not_served: ClassVar = NOT_SERVED
    nullable: ClassVar = ()  # fields in which null has a meaning

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, body, info: ValidationInfo):
        """
        Drop fields that count as not sent, and add the model's defaults. Refuse the first field
        that is unknown or not supported. (pydantic would first collect all such fields. A body can
        have hundreds of thousands, so this would take seconds.)
        """
        if not isinstance(body, dict):
            return body
        defaults = info.context or {}
        fields = {name: defaults[name] for name in defaults if name in cls.model_fields}
        fields.pop("max_tokens", None)  # see `most_tokens`
        names = body
        if cls.model_config["extra"] == "ignore":  # there may be hundreds of thousands of others
            names = [name for name in (*cls.model_fields, *cls.not_served) if name in body]
        for name in names:
            value = body[name]
            if name in cls.ignored or (value is None and name not in cls.nullable):
                continue
            if name in cls.model_fields:
                fields[name] = value
            elif name in cls.not_served:
                neutral = cls.not_served[name]
                same_kind = isinstance(value, bool) == isinstance(neutral, bool)  # True == 1
                if value != neutral or not same_kind:
                    remedy = f"leave it out or send {json.dumps(neutral)}"
                    raise Refused(f"is not supported: {remedy}", name)
            else:
                raise unknown_field(name, cls.model_fields)
        return fields


class Part(Body):
    """An object within a body."""

    ignored: ClassVar = ()
    not_served: ClassVar = {}


class StreamOptions(Part):
    ignored: ClassVar = {"include_obfuscation"}

    include_usage: bool = False
    continuous_usage_stats: bool = False  # only with include_usage, as in vLLM


class SamplingRequest(Body):
    """Fields common to completions and chats. Raises pydantic's ValidationError."""

    model: str | None = None  # None means the only model
    temperature: float = sampling_field("temperature")
    top_p: float = sampling_field("top_p")
    top_k: int = Field(SamplingParams.top_k, ge=-1, lt=INT32)  # 0 or (as in vLLM) -1: all tokens
    min_p: float = sampling_field("min_p")
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = sampling_field("seed")
    presence_penalty: float = sampling_field("presence_penalty")
    frequency_penalty: float = sampling_field("frequency_penalty")
    repetition_penalty: float = sampling_field("repetition_penalty")
    logit_bias: Bias | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Stops = []
    stop_token_ids: Ids = Field([], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    min_tokens: int = sampling_field("min_tokens")
    response_format: Annotated[dict | None, PlainValidator(grammar_of_format)] = None
    structured_outputs: Annotated[dict, AfterValidator(grammar_of_outputs)] | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # lower numbers go first
    # only calls with the same salt share prefixes
    cache_salt: str | None = Field(None, min_length=1, max_length=1000)
    # printable ASCII, because it becomes part of the answer's id
    request_id: str | None = Field(None, pattern="^[!-~]{1,128}$")

    # the model's own default for max_tokens; private, because of the underscore
    _usual_tokens: int = INT32

    @model_validator(mode="after")
    def check_combinations(self, info: ValidationInfo):
        self._usual_tokens = (info.context or {}).get("max_tokens", INT32)
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if "stream_options" in self.model_fields_set and not self.stream:
            raise Refused("is only for streams: send stream true or leave it out", "stream_options")
        if self.max_tokens == 0 and not self.echo:
            raise Refused("is 0, wanted at least 1; 0 is only for echo", "max_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise Refused(
                f"is {self.min_tokens}, above max_tokens ({self.max_tokens})", "min_tokens"
            )
        return self

    @property
    def constraints(self) -> list[str]:
        """Return the names of those sent fields that constrain the answer to a grammar."""
        names = ["response_format", "structured_outputs", "tools"]
        return [name for name in names if getattr(self, name)]

    @property
    def num_prompt_logprobs(self) -> int | None:
        """
        Return how many candidates to score for each token of an echoed prompt, besides the token
        itself. None means that the prompt is not scored.
        """
        return self.num_logprobs if self.echo else None

    def sampling_params(self, prompt_length: int, max_model_len: int) -> dict:
        """Return the fields of SamplingParams as plain data, for the engine's process."""
        names = {field.name for field in fields(SamplingParams)} - {"grammar"}
        params = {name: getattr(self, name) for name in names}
        params["max_tokens"] = max(1, self.most_tokens(prompt_length, max_model_len))
        params["logprobs"] = self.num_logprobs
        params["top_k"] = max(self.top_k, 0)
        return params

    def check_fits(self, prompts, vocab_size: int, max_model_len: int, eos_token_ids=()):
        """
        Raise ApiError (400) if the model could never answer this call. The message contains the
        requested number, the limit, and what to change.
        """
        for name in ("stop_token_ids", "logit_bias"):
            check_vocabulary(name, getattr(self, name) or (), vocab_size)
        if not all(prompts):
            message = "prompt is empty: the tokenizer has no tokens for its text, send another text"
            raise ApiError(400, message, "prompt")
        stops = {*self.stop_token_ids, *eos_token_ids}
        if self.min_tokens and stops.issuperset(range(vocab_size)):
            message = "min_tokens is above 0, but all tokens are stop tokens"
            raise ApiError(400, message, "min_tokens")
        self._check_constraints(eos_token_ids)
        longest = max(map(len, prompts))
        wanted = self.min_tokens if self.max_tokens is None else self.max_tokens
        wanted = max(wanted, int(self.needs_engine))
        if longest + wanted > max_model_len:
            # client libraries search for exactly the first words, and for the code
            message = (
                f"this model's maximum context length is {max_model_len} tokens, "
                f"{plural(longest, 'prompt token')} and max_tokens {wanted:,} make "
                f"{longest + wanted:,}: shorten the prompt or lower max_tokens"
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        for prompt in prompts:  # none is longer than the context
            check_vocabulary("prompt", prompt, vocab_size)
        scores = sum(self.num_scores(len(prompt), max_model_len) for prompt in prompts)
        if scores > MAX_SCORES:
            message = (
                f"{scores} log-probabilities in one answer, but the limit is {MAX_SCORES}: lower "
                "max_tokens, n or the number of log-probabilities, or split the call"
            )
            raise ApiError(400, message, "prompt" if self.echo else "logprobs")

    def _check_constraints(self, eos_token_ids):
        """Raise ApiError (400) if there are several grammars, or if the text could never end."""
        names = self.constraints + ["ignore_eos"] * self.ignore_eos
        names += ["max_tokens 0"] * (self.max_tokens == 0)
        names += ["a model without an end-of-text token"] * (not eos_token_ids)
        if self.constraints and names[1:]:
            message = f"{names[0]} cannot be combined with {names[1]}: leave one of them out"
            raise ApiError(400, message, names[0])

    @property
    def needs_engine(self) -> bool:
        """
        Return whether the engine must run. An echo without scores does not need it. To score a
        prompt, the engine also generates a token.
        """
        return self.max_tokens != 0 or self.num_prompt_logprobs is not None

    def num_scores(self, prompt_length: int, max_model_len: int) -> int:
        """
        Return the maximum number of log-probabilities in an answer to a prompt of this length. Each
        choice repeats the log-probabilities of an echoed prompt.
        """
        if self.num_logprobs is None:
            return 0
        num_tokens = self.most_tokens(prompt_length, max_model_len) + self.echo * prompt_length
        return self.n * num_tokens * (1 + self.num_logprobs)

    def most_tokens(self, prompt_length: int, max_model_len: int) -> int:
        """
        Return the maximum length of an answer, that is, max_tokens. A chat without max_tokens may
        fill the context, up to the model's own default. With log-probabilities, MAX_SCORES limits
        the length further. (Otherwise, a model with a context of 131,072 tokens would have to
        refuse every such chat.)
        """
        if self.max_tokens is not None:
            return self.max_tokens
        most = min(self._usual_tokens, max_model_len - prompt_length)
        if self.num_logprobs is not None:
            most = min(most, MAX_SCORES // (self.n * (1 + self.num_logprobs)))
        return max(1, self.min_tokens, most)


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(SamplingParams.max_tokens, ge=0, lt=INT32)  # 0: score the prompt
    # from the model's own distribution, that is, before temperature and penalties
    logprobs: NumLogprobs | None = None
    echo: bool = False
    add_special_tokens: bool = True  # whether the tokenizer adds its own, such as a BOS
    messages: ClassVar = ()
    tools: ClassVar = ()
    max_completion_tokens: ClassVar = None

    @property
    def num_logprobs(self) -> int | None:
        """
        Return how many candidates need log-probabilities, besides the chosen token. None means that
        the answer has no log-probabilities.
        """
        return self.logprobs


class CalledFunction(Part):
    model_config = ConfigDict(extra="ignore")  # openai-python adds parsed_arguments
    nullable: ClassVar = {"arguments"}

    name: FunctionName
    arguments: Annotated[dict[str, Any], BeforeValidator(arguments_object)]


class ToolCall(Part):
    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    model_config = ConfigDict(extra="ignore")  # clients send answers back with all their fields
    nullable: ClassVar = {"content"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    reasoning: str | None = None
    reasoning_content: str | None = None  # the older name, which templates use
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check_role(self):
        if self.tool_calls and self.role != "assistant":
            raise Refused("are only for the role assistant: leave them out", "tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise Refused("is for the role tool only, and required there", "tool_call_id")
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise Refused("is missing", "content")
        self.reasoning_content = self.reasoning = self.reasoning_content or self.reasoning
        return self


class Function(Part):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] = NO_PARAMETERS
    strict: bool = False  # no effect, because all calls follow the schema


class Tool(Part):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(few_items),
]


class ChatRequest(SamplingRequest):
    """
    POST /v1/chat/completions. Without max_completion_tokens or max_tokens, an answer may be as long
    as the context allows.
    """

    echo: ClassVar = False

    messages: Messages
    tools: Tools = []
    tool_choice: Annotated[str | dict, PlainValidator(choice_of_tools)] = "auto"
    parallel_tool_calls: bool = True
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None  # takes precedence over the older max_tokens
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool = True
    # template variables, such as Qwen3's enable_thinking
    chat_template_kwargs: TemplateVariables = {}
    add_special_tokens: bool = False  # if True, in addition to those in the template

    @model_validator(mode="after")
    def check_logprobs(self):
        if self.top_logprobs and not self.logprobs:
            raise Refused("needs logprobs: send logprobs true or leave it out", "top_logprobs")
        return self

    @model_validator(mode="after")
    def check_tools(self):
        if self.tool_choice == "none":
            self.tools = []
        elif not self.functions and "tool_choice" in self.model_fields_set:
            raise Refused("needs tools, and may only name one of them", "tool_choice")
        elif self.tools:
            grammar_text([function.parameters for function in self.functions], "tools")
            if self.tool_choice != "auto":
                self.stop = []  # stop strings only end text, and this answer has only calls
        if len({tool.function.name for tool in self.tools}) < len(self.tools):
            raise Refused("has two functions with the same name", "tools")
        return self

    @property
    def is_named(self) -> bool:
        """Return whether tool_choice names the function to call."""
        return isinstance(self.tool_choice, dict)

    @property
    def functions(self) -> list[Function]:
        """Return the functions that may be called."""
        name = self.tool_choice["name"] if self.is_named else None
        return [tool.function for tool in self.tools if name in (None, tool.function.name)]

    @property
    def num_logprobs(self) -> int | None:
        """Return the value that `logprobs` would have in a completion."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = []
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables = {}  # as in chats
    tools: Tools = []
    return_token_strs: bool = False  # used by the page to show a prompt's tokens

    @model_validator(mode="after")
    def check_one(self):
        if (self.prompt is None) == (not self.messages):
            raise Refused("or messages must be sent, but not both", "prompt")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
