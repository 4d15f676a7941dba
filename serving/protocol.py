"""
What the JSON of a call may say: its fields, their kinds and limits, and how a refusal reads.

    body = CompletionRequest.model_validate_json(b'{"prompt": "def ", "max_tokens": 8}')
    body.prompt, body.sampling_params(4, 99)   # ["def "], {"temperature": 1.0, "max_tokens": 8, ..}

Not run by itself: api.py parses each call with it. Fields follow OpenAI's API and vLLM's extras;
the defaults and ranges of sampling are those of `SamplingParams` (params.py), but for defaults that
the model brings, which are pydantic's `context`. Three rules hold for every field: types are strict
(a bool is no int), numbers are finite and in a stated range, and `null` means "not given". Bad
input is a 400 that names the field, because clients retry 408, 409, 429 and everything from 500 up.

Three things could be called a request. In the rooms of HTTP a `body` is the parsed JSON, `http` is
Starlette's request, and the engine's is `paged.Request`.
"""

import difflib
import json
import reprlib
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from serving.chat import check_variables
from serving.params import BIAS, RANGES, SamplingParams

# What OpenAI calls the kinds of error; a client library turns status and type into an exception of
# its own.
ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
RETRY = {"Retry-After": "1"}  # seconds; for 429 and 503, which are trouble that passes

# Accepted for other servers' sake: they change nothing in the answer. They are about bills, caches
# and statistics, or (verbosity, prediction) hints that a server may follow or not.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"}
IGNORED |= {"prediction", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}

# Fields that would change the answer and that this server does not serve, each with the value that
# asks for nothing (None: only null does). To implement one, move it from here to a field of a body.
NEUTRAL = {"best_of": 1, "length_penalty": 1, "suffix": "", "use_beam_search": False}
NEUTRAL |= {"early_stopping": False, "spaces_between_special_tokens": True}
NEUTRAL_IN_TEMPLATES = {"chat_template": None, "continue_final_message": False}
NEUTRAL_OF_TOOLS = {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none"}
NEUTRAL_IN_CHAT = NEUTRAL | NEUTRAL_IN_TEMPLATES | NEUTRAL_OF_TOOLS
NEUTRAL_IN_CHAT |= {"response_format": {"type": "text"}, "modalities": ["text"], "echo": False}
NEUTRAL_IN_CHAT |= dict.fromkeys(("reasoning_effort", "web_search_options", "audio", "moderation"))
# Of a message nothing else is refused: clients send back whole answers, with all their fields.
NEUTRAL_IN_MESSAGE = {"tool_calls": [], "function_call": None, "audio": None, "images": []}
NEUTRAL_IN_MESSAGE |= {"prefix": False}

# What to do without a field, where leaving it out is not all there is to say.
NO_TOOLS = (
    "leave tools and tool_choice out and ask for the form of the answer in a message, or use vLLM"
)
NO_IMAGES = "only text is, send parts of the type text"
REMEDIES = dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), NO_TOOLS)

MAX_STOPS = 64
MAX_STOP_BYTES = 2**14  # of all stop strings of a call: what is held back of a text can be as long
MAX_SCORES = 2**18  # log-probabilities in one answer, prompts' and generated: 18 MB of JSON
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_ALLOWED = 2**18  # of allowed_token_ids, for all prompts of a call
MAX_CHOICES = 128  # of a prompt: `n`
MAX_PROMPTS = 4096
MAX_MESSAGES = 4096
MAX_PRIORITY = 1000
INT32 = 2**31  # counts are below: numbers in JSON have no limit, and sums of them must be printed


# --------------------------------------------------------------------------------------------------
# Refusals


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal. `param` names the field at fault, `code` is for programs ("model_not_found")."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None

    @property
    def reason(self) -> str:
        """
        For the log: the code, else the message without the value that it quotes, which may be a
        client's text.
        """
        return self.code or self.message.partition(", got ")[0][:200]


class ClientGone(ApiError):
    """The client hung up: the status is nginx's, and only the log gets to see it."""

    def __init__(self):
        super().__init__(499, "the client is gone")


def error_body(error: ApiError) -> bytes:
    """The one shape of every error."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error")
    shown = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return json.dumps({"error": shown}).encode()


def error_response(error: ApiError) -> Response:
    headers = RETRY if error.status in (429, 503) else error.headers
    return Response(error_body(error), error.status, headers, "application/json")


def bad_field(name, problem) -> ApiError:
    return ApiError(400, f"{name} {problem}", name)


def body_refusal(found: ValidationError) -> ApiError:
    """
    Turn pydantic's findings on a body into one 400 about the first of them. Our own validators
    raise ApiError themselves, which pydantic lets through: they know best what to say.
    """
    error = found.errors(include_url=False)[0]
    kind = error["type"]
    context = error.get("ctx", {})
    path = [str(part)[:200] for part in error["loc"]]  # a name may be as long as the body
    if "field" in context:
        path.append(context["field"])
    name = ".".join(path)  # stop.1
    if kind in MESSAGES:
        message = MESSAGES[kind].format(name=name, **context)
    elif not path:
        message = "the body must be a JSON object"
    else:
        message = f"{name}: {error['msg'].lower()}, got {reprlib.repr(error['input'])}"
    return ApiError(400, message, path[0] if path else None)


# What a refusal says, by the type of pydantic's finding. The last two are findings of our own
# validators, inside of lists and objects, where only pydantic knows the way to the field, such as
# ("messages", 0): `body_refusal` puts it before the field's name.
MESSAGES = {
    "json_invalid": "the body is not JSON: {error}",
    "missing": "{name} is missing",
    "unknown": "there is no field {name!r}{remedy}",
    "not_served": "{name} is not served here: {remedy}",
    "value_error": "{name} {error}",
}


def finding(kind, field, remedy) -> PydanticCustomError:
    """
    A finding of the kind "unknown" or "not_served", about a field of the object that is being
    validated: tool_calls, 1.image_url.
    """
    return PydanticCustomError(kind, "refused", {"field": field[:200], "remedy": remedy})


# --------------------------------------------------------------------------------------------------
# The kinds of values


def is_list_of(kind: type, items) -> bool:
    """Whether it is a list of this very type; isinstance would take True for an int."""
    return isinstance(items, list) and set(map(type, items)) <= {kind}


def list_of_prompts(value) -> list:
    """
    Bring the four forms of `prompt` into one: a list of texts, or a list of lists of token ids.
    Raises ApiError (400), as the other checks of values here do.
    """
    is_one = isinstance(value, str) or is_list_of(int, value)
    prompts = [value] if is_one else value
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS:  # before each is looked at
        raise bad_field(
            "prompt", f"has {len(prompts)} prompts, at most {MAX_PROMPTS} are taken: split it"
        )
    of_ids = is_list_of(list, prompts) and all(is_list_of(int, prompt) for prompt in prompts)
    if not (of_ids or is_list_of(str, prompts)):
        raise bad_field(
            "prompt",
            "must be a string, a list of strings, a list of token ids, or a list of such lists",
        )
    if not all(prompts):
        raise bad_field(
            "prompt", "is empty: give at least one character or token id for each answer"
        )
    return prompts


def bias_of_ids(value) -> dict[int, float]:
    """JSON's keys are texts: {"50256": -100} becomes {50256: -100.0}."""
    name = "logit_bias"
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise bad_field(name, f"must be an object of at most {MAX_BIASES} token ids")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            raise ApiError(400, f"{name}: {token!r:.200} is no token id", name)
        if not BIAS.admits(bias):
            wanted = f"number from {BIAS.bounds['ge']} to {BIAS.bounds['le']}"
            raise ApiError(400, f"{name}: {reprlib.repr(bias)} is no {wanted}", name)
    return {int(token): float(bias) for token, bias in value.items()}


def content_text(value):
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
        raise finding("not_served", f"{number}.{field}", NO_IMAGES)
    return "".join(texts)


def stops_that_fit(stops: list[str]) -> list[str]:
    total = sum(len(stop.encode()) for stop in stops)
    if total > MAX_STOP_BYTES:
        most = f"at most {MAX_STOP_BYTES} are taken: shorten them"
        raise ApiError(400, f"stop: {total} bytes of stop strings, {most}", "stop")
    return stops


def check_vocabulary(param, tokens, vocab_size):
    """Raises ApiError (400), about the field `param`, for ids outside 0..vocab_size-1."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            ids = f"the vocabulary, 0..{vocab_size - 1}"
            raise ApiError(400, f"token id {reprlib.repr(token)} is outside {ids}", param)


AnyPrompt = str | list[str] | list[int] | list[list[int]]
Prompts = Annotated[list, PlainValidator(list_of_prompts, json_schema_input_type=AnyPrompt)]
# fail_fast: a finding for each of a million wrong items would hold up the event loop for seconds
Ids = Annotated[list[int], Field(fail_fast=True)]
# a client may repeat its ids for ever
AllowedIds = Annotated[Ids, AfterValidator(lambda ids: sorted(set(ids)))]
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
AnyContent = str | list[dict[str, str]]
Content = Annotated[str, BeforeValidator(content_text, json_schema_input_type=AnyContent)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(check_variables)]
NumLogprobs = Annotated[int, Field(**RANGES["logprobs"].bounds)]


def sampling_field(name: str):
    """A field with the default and the range that it has in SamplingParams."""
    return Field(getattr(SamplingParams, name), **RANGES[name].bounds)


# --------------------------------------------------------------------------------------------------
# The bodies


class Body(BaseModel):
    """
    A JSON object with no other fields than ours. Nulls, ignored fields and neutral values count as
    not given.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar = IGNORED
    neutral: ClassVar = {}

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, body):
        """
        The JSON object without nulls, ignored fields and neutral values. Raises for the first field
        that is unknown or not served: pydantic would first collect all of them, which takes seconds
        for the hundred thousands that a body can hold.
        """
        if not isinstance(body, dict):
            return body
        given = {}
        # Clients that send tools send fields beside them that mean nothing without: the refusal is
        # to be about the tools.
        for name in [*(body.keys() & {"tools"}), *body]:
            value = body[name]
            if value is None or name in cls.ignored:
                continue
            if name in cls.model_fields:
                given[name] = value
            elif name in cls.neutral:
                cls.check_neutral(name, value)
            elif cls.model_config["extra"] == "forbid":
                raise finding("unknown", name, cls.hint(name))
        return given

    @classmethod
    def check_neutral(cls, name, value):
        neutral = cls.neutral[name]
        same_kind = isinstance(value, bool) == isinstance(neutral, bool)  # to Python True is 1
        if value != neutral or not same_kind:
            remedy = f"leave it out or send {json.dumps(neutral)}"
            raise finding("not_served", name, REMEDIES.get(name, remedy))

    @classmethod
    def hint(cls, name: str) -> str:
        """What an unknown name may have meant."""
        known = [*cls.model_fields, *cls.neutral]
        close = difflib.get_close_matches(name[:50], known, 1, cutoff=0.85)
        return f"; did you mean {close[0]!r}?" if close else ""


class StreamOptions(Body):
    ignored: ClassVar = {"include_obfuscation"}  # OpenAI's random padding of chunks

    include_usage: bool = False
    continuous_usage_stats: bool = False  # only beside include_usage, as in vLLM


class SamplingRequest(Body):
    """
    What both kinds of completions share. Raises ApiError or pydantic's ValidationError.
    """

    model: str | None = None  # None: the one model there is
    max_tokens: int | None = Field(None, ge=0, lt=INT32)
    temperature: float = sampling_field("temperature")
    top_p: float = sampling_field("top_p")
    top_k: int = Field(SamplingParams.top_k, ge=-1, lt=INT32)  # 0 and, as in vLLM, -1: all tokens
    min_p: float = sampling_field("min_p")
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = sampling_field("seed")
    presence_penalty: float = sampling_field("presence_penalty")
    frequency_penalty: float = sampling_field("frequency_penalty")
    repetition_penalty: float = sampling_field("repetition_penalty")
    logit_bias: Bias | None = None
    allowed_token_ids: AllowedIds | None = Field(None, min_length=1, max_length=MAX_ALLOWED)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Stops = []
    include_stop_str_in_output: bool = False
    stop_token_ids: Ids = Field([], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    min_tokens: int = sampling_field("min_tokens")
    skip_special_tokens: bool = True
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool = False
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # lower is served first
    # prefixes are shared within one salt
    cache_salt: str | None = Field(None, min_length=1, max_length=1000)
    # printable ASCII: it becomes the answer's id
    request_id: str | None = Field(None, pattern="^[!-~]{1,128}$")

    # a limit of the model's own, for answers without max_tokens; where max_tokens has a default it
    # goes before this, as in vLLM
    _usual_tokens: int = PrivateAttr(INT32)

    @model_validator(mode="before")
    @classmethod
    def fill_in(cls, body, info: ValidationInfo):
        """What a request does not say is as the model's makers want it."""
        if not isinstance(body, dict):
            return body
        unsaid = {name for name in info.context or () if body.get(name) is None}
        return body | {name: info.context[name] for name in unsaid - {"max_tokens"}}

    @model_validator(mode="after")
    def take_limit(self, info: ValidationInfo):
        self._usual_tokens = (info.context or {}).get("max_tokens", INT32)
        return self

    @model_validator(mode="after")
    def check_combinations(self):
        if "stream_options" in self.model_fields_set and not self.stream:
            raise bad_field("stream_options", "is for streams: send stream true or leave it out")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_field("prompt_logprobs", "is not for streams: send stream false")
        if self.max_tokens == 0 and not self.echo:
            raise bad_field("max_tokens", "is 0, wanted at least 1; 0 is only for echo")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise bad_field(
                "min_tokens", f"is {self.min_tokens}, above max_tokens, {self.max_tokens}"
            )
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        """
        How many log-probabilities are wanted at each place of the prompt, besides its token's;
        None: the prompt is not scored.
        """
        wanted = [self.prompt_logprobs, self.num_logprobs if self.echo else None]
        return max((n for n in wanted if n is not None), default=None)

    def sampling_params(self, prompt_length: int, max_model_len: int) -> dict:
        """The fields of SamplingParams, as plain data for the engine's process."""
        params = {field.name: getattr(self, field.name) for field in fields(SamplingParams)}
        params["max_tokens"] = max(1, self.most_tokens(prompt_length, max_model_len))
        params["logprobs"] = self.num_logprobs
        params["top_k"] = max(self.top_k, 0)
        return params

    def check_fits(self, prompts, vocab_size: int, max_model_len: int, eos_token_ids=()):
        """
        Refuse at once what the model can never take: ApiError (400) with wanted, available, what to
        change.
        """
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            check_vocabulary(name, getattr(self, name) or (), vocab_size)
        for prompt in prompts:
            check_vocabulary("prompt", prompt, vocab_size)
        listed = len(self.allowed_token_ids or ()) * len(prompts)
        if listed > MAX_ALLOWED:
            raise bad_field(
                "allowed_token_ids",
                f"of all prompts are {listed}, at most {MAX_ALLOWED} are taken: split the call",
            )
        stops = {*self.stop_token_ids, *eos_token_ids}
        if self.min_tokens and stops.issuperset(self.allowed_token_ids or range(vocab_size)):
            message = "min_tokens: all tokens that are allowed are stop tokens"
            raise ApiError(400, message, "min_tokens")
        self.check_length(max(map(len, prompts)), max_model_len)
        scores = sum(self.num_scores(len(prompt), max_model_len) for prompt in prompts)
        if scores > MAX_SCORES:
            message = f"{scores} log-probabilities in one answer, at most {MAX_SCORES} are told: "
            message += "lower max_tokens, n or the number of log-probabilities, or split the call"
            param = "logprobs" if self.num_prompt_logprobs is None else "prompt"
            raise ApiError(400, message, param)

    def check_length(self, longest: int, max_model_len: int):
        """
        Raises ApiError if a prompt of so many tokens, and the tokens asked for, are more than the
        model takes.
        """
        wanted = self.max_tokens
        if wanted is None:
            wanted = max(1, self.min_tokens)
        elif wanted == 0 and self.num_prompt_logprobs is not None:
            wanted = 1  # the prompt's scores take a step, and that makes a token
        total = longest + wanted
        if total > max_model_len:
            # client libraries look for these very words, and for the code
            limit = f"this model's maximum context length is {max_model_len} tokens"
            numbers = f"{longest} prompt tokens and max_tokens {wanted} make {total}"
            message = f"{limit}, {numbers}: shorten the prompt or lower max_tokens"
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")

    def num_scores(self, prompt_length: int, max_model_len: int) -> int:
        """
        The most log-probabilities that an answer to such a prompt can have; each choice repeats
        the prompt's.
        """
        scores = self.num_prompt_scores(prompt_length)
        if self.num_logprobs is not None:
            scores += self.most_tokens(prompt_length, max_model_len) * (1 + self.num_logprobs)
        return self.n * scores

    def num_prompt_scores(self, prompt_length: int) -> int:
        wanted = self.num_prompt_logprobs
        return 0 if wanted is None else prompt_length * (1 + wanted)

    def most_tokens(self, prompt_length: int, max_model_len: int) -> int:
        """
        The length of an answer: max_tokens; where none was given, all that the context has room
        for, but no more than the model's own limit, nor than MAX_SCORES allows (a context of
        131,072 tokens would refuse every chat with log-probabilities).
        """
        if self.max_tokens is not None:
            return self.max_tokens
        most = min(self._usual_tokens, max_model_len - prompt_length)
        if self.num_logprobs is not None:
            scores = MAX_SCORES // self.n - self.num_prompt_scores(prompt_length)
            most = min(most, scores // (1 + self.num_logprobs))
        return max(1, self.min_tokens, most)


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    neutral: ClassVar = NEUTRAL

    prompt: Prompts
    max_tokens: int | None = Field(SamplingParams.max_tokens, ge=0, lt=INT32)  # 0: score the prompt
    # of the model's distribution, before temperature and penalties
    logprobs: NumLogprobs | None = None
    echo: bool = False
    add_special_tokens: bool = True  # what the tokenizer puts around a text: its BOS, if any
    messages: ClassVar = ()

    @property
    def num_logprobs(self) -> int | None:
        """
        How many log-probabilities are wanted besides the chosen token's; None: not even that.
        """
        return self.logprobs


class Message(Body):
    model_config = ConfigDict(extra="ignore")  # besides the neutral ones
    neutral: ClassVar = NEUTRAL_IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


Messages = Annotated[list[Message], Field(fail_fast=True)]


class ChatRequest(SamplingRequest):
    """
    POST /v1/chat/completions. Without max_completion_tokens an answer may be as long as the context
    allows.
    """

    # it means nothing without tools, and these are refused first
    ignored: ClassVar = IGNORED | {"parallel_tool_calls"}
    neutral: ClassVar = NEUTRAL_IN_CHAT
    echo: ClassVar = False

    messages: Messages = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, **RANGES["max_tokens"].bounds)
    # goes before the older max_tokens
    max_completion_tokens: int | None = Field(None, **RANGES["max_tokens"].bounds)
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool = True
    # variables of the template, such as Qwen3's enable_thinking
    chat_template_kwargs: TemplateVariables = {}
    add_special_tokens: bool = False  # beside those of the template: most write a BOS themselves

    @model_validator(mode="before")
    @classmethod
    def prefer_the_newer_name(cls, body):
        if isinstance(body, dict) and body.get("max_completion_tokens") is not None:
            return body | {"max_tokens": body["max_completion_tokens"]}
        return body

    @model_validator(mode="after")
    def check_logprobs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs: send logprobs true or leave it out")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As in completions."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    neutral: ClassVar = NEUTRAL_IN_TEMPLATES
    model: str | None = None
    prompt: str | None = None
    messages: Messages = Field([], min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None  # true for a prompt, false for messages
    add_generation_prompt: bool = True
    chat_template_kwargs: TemplateVariables = {}  # as in chats
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one(self):
        if (self.prompt is None) == (not self.messages):
            raise ApiError(400, "give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=INT32)]], Field(fail_fast=True)]
