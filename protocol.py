"""
The JSON of the HTTP surface: what a request may say, what an answer looks like, how a refusal reads.

    request = CompletionRequest.model_validate({"prompt": "def ", "max_tokens": 8})
    request.prompt, request.sampling_params(8)       # ["def "], {"temperature": 1.0, ..., "max_tokens": 8}

Not run by itself: `serve.py` imports it. Shapes follow OpenAI's API and vLLM's extras. Three rules hold for every
field: types are strict (a bool is no int), numbers are finite and in a stated range, and `null` means "not given". Bad
input is a 400 that names the field, because clients retry 408, 409, 429 and everything from 500 up.
"""

import difflib
import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.responses import Response

# What OpenAI calls the kinds of error; a client library turns status and type into an exception of its own.
ERROR_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}

# Accepted for other servers' sake: they change nothing in the answer.
IGNORED = {"user", "metadata", "store"}

# Fields that would change the answer and that this server does not serve, each with the value that asks for nothing
# (None: only null does). To implement one, move it from here to a field of a request.
NEUTRAL = {"best_of": 1, "length_penalty": 1, "suffix": "", "use_beam_search": False, "early_stopping": False}
NEUTRAL |= {"spaces_between_special_tokens": True, "add_special_tokens": True}
NEUTRAL_IN_CHAT = NEUTRAL | {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none"}
NEUTRAL_IN_CHAT |= {"response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True}
NEUTRAL_IN_CHAT |= {"chat_template": None, "chat_template_kwargs": {}, "continue_final_message": False, "echo": False}
NEUTRAL_IN_CHAT |= {"add_special_tokens": False, "reasoning_effort": None}

MAX_STOPS, MAX_STOP_LENGTH = 4, 1000  # every token's text is searched for each stop string: both bound that work
MAX_STOP_IDS, MAX_BIASES, MAX_ALLOWED, MAX_LOGPROBS, MAX_CHOICES = 64, 1024, 2**18, 20, 128
MAX_PROMPTS, MAX_MESSAGES = 4096, 4096
INT64 = 2**63
LOWEST = -9999.0  # JSON has no infinity


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
        return ApiError(400, f"there is no field {name!r}", param)
    return ApiError(400, f"{name}: {error['msg'].lower()}, got {reprlib.repr(error['input'])}", param)


# ----------------------------------------------------------------------------------------------------------------------
# The kinds of values


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)  # isinstance takes True for an int


def list_of_prompts(value: Any) -> list[str | list[int]]:
    """Bring the four forms of `prompt` into one: a list of texts, or a list of lists of token ids."""
    prompts = [value] if isinstance(value, str) or (value and is_token_ids(value)) else value
    is_list = isinstance(prompts, list)
    if is_list and len(prompts) > MAX_PROMPTS:  # before each is looked at
        raise ApiError(400, f"prompt has {len(prompts)} prompts, at most {MAX_PROMPTS} are taken: split it", "prompt")
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


def bias_of_ids(value: Any) -> dict[int, float]:
    """JSON's keys are texts: {"50256": -100} becomes {50256: -100.0}."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ApiError(400, f"logit_bias must be an object of at most {MAX_BIASES} token ids", "logit_bias")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            raise ApiError(400, f"logit_bias: {token!r:.200} is no token id", "logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ApiError(400, f"logit_bias: {reprlib.repr(bias)} is no number from -100 to 100", "logit_bias")
    return {int(token): float(bias) for token, bias in value.items()}


def content_text(value: Any) -> Any:
    """A message's content: a text, or parts of which each is a text."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not (isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"):
            raise ApiError(400, 'content has a part that is no {"type": "text", "text": ...}', "messages")
        if not isinstance(part["text"], str):
            raise ApiError(400, "content has a part whose text is no string", "messages")
    return "".join(part["text"] for part in value)


def wrap_string(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


PROMPT_FORMS = str | list[str] | list[int] | list[list[int]]
BIAS_FORM = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
Prompts = Annotated[list[str | list[int]], PlainValidator(list_of_prompts, json_schema_input_type=PROMPT_FORMS)]
# FailFast: a finding for each of a million wrong items would hold up the event loop for seconds
Stops = Annotated[
    list[str],
    FailFast(),
    AfterValidator(check_stops),
    BeforeValidator(wrap_string, json_schema_input_type=str | list[str]),
]
Ids = Annotated[list[int], FailFast()]
Bias = Annotated[dict[int, float], PlainValidator(bias_of_ids), WithJsonSchema(BIAS_FORM)]
Content = Annotated[str, BeforeValidator(content_text, json_schema_input_type=str | list[dict[str, str]])]
Candidates = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


# ----------------------------------------------------------------------------------------------------------------------
# The requests


class Strict(BaseModel):
    """A JSON object with no other fields than ours. Nulls, ignored fields and neutral values count as not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[dict] = {}

    @model_validator(mode="before")
    @classmethod
    def drop_what_asks_for_nothing(cls, body: Any) -> Any:
        """
        The first field that is left and unknown ends it here: pydantic would first collect all of them, which takes
        seconds for the hundred thousands that a body can hold.
        """
        if not isinstance(body, dict):
            return body
        given = {}
        for name, value in body.items():
            if value is None or name in IGNORED:
                continue
            if name in cls.model_fields:
                given[name] = value
                continue
            if name not in cls.neutral:
                close = difflib.get_close_matches(name[:50], [*cls.model_fields, *cls.neutral], 1, cutoff=0.85)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ApiError(400, f"there is no field {name!r:.200}{hint}", name[:200])
            neutral = cls.neutral[name]
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):  # to Python True is 1
                raise ApiError(400, f"{name} is not served here: leave it out or send {json.dumps(neutral)}", name)
        return given


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class SamplingRequest(Strict):
    """
    What both kinds of completions share. The defaults are OpenAI's and vLLM's; those of the Python API, which this
    process does not import, are in SamplingParams. Raises ApiError or pydantic's ValidationError.
    """

    model: str | None = None  # None: the one model there is
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)  # 0: always the most likely token
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1: all tokens
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: Bias = {}
    allowed_token_ids: Ids = Field([], min_length=1, max_length=MAX_ALLOWED)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Stops = []
    include_stop_str_in_output: bool = False
    stop_token_ids: Ids = Field([], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    skip_special_tokens: bool = True
    prompt_logprobs: Candidates | None = None
    return_token_ids: bool = False
    priority: int = Field(0, ge=-INT64, lt=INT64)  # lower is served first
    cache_salt: str | None = Field(None, min_length=1, max_length=1000)  # prefixes are shared within one salt
    request_id: str | None = Field(None, pattern="^[!-~]{1,128}$")  # printable ASCII: it becomes the answer's id

    @model_validator(mode="after")
    def check_combinations(self):
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams: send stream true or leave it out", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs is not for streams: send stream false", "prompt_logprobs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}"
            raise ApiError(400, message, "min_tokens")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def prompt_candidates(self) -> int | None:
        """How many candidates to score at each place of the prompt; None: the prompt is not scored."""
        return self.prompt_logprobs

    def sampling_params(self, max_tokens: int) -> dict:
        """The fields of the engine's SamplingParams as plain data: the HTTP process never imports torch."""
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        names += ("stop_token_ids", "ignore_eos", "min_tokens", "seed")
        params = {name: getattr(self, name) for name in names}
        params |= {"max_tokens": max(1, max_tokens), "logprobs": self.candidates, "logit_bias": self.logit_bias or None}
        params["allowed_token_ids"] = self.allowed_token_ids or None
        return params | {"top_k": max(self.top_k, 0)}

    def check_fits(
        self, prompts: list[list[int]], vocab_size: int, max_model_len: int, eos_token_id: int | None = None
    ) -> list[int]:
        """
        Refuse at once what the model can never take: ApiError (400) with wanted, available, what to change. Returns
        how many new tokens each prompt may get.
        """
        ids = [("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)]
        ids += [("allowed_token_ids", self.allowed_token_ids), *(("prompt", prompt) for prompt in prompts)]
        for param, tokens in ids:
            if min(tokens, default=0) < 0 or max(tokens, default=0) >= vocab_size:
                wrong = next(token for token in tokens if not 0 <= token < vocab_size)
                raise ApiError(400, f"token id {wrong} is outside the vocabulary, 0..{vocab_size - 1}", param)
        stops = {*self.stop_token_ids, eos_token_id}
        if self.min_tokens and not set(self.allowed_token_ids or range(vocab_size)) - stops:
            raise ApiError(400, "min_tokens: all tokens that are allowed are stop tokens", "min_tokens")
        longest, scored = max(map(len, prompts)), self.prompt_candidates is not None
        wanted = max(1, self.min_tokens) if self.max_tokens is None else self.max_tokens or int(scored)
        if longest + wanted > max_model_len:
            message = (
                f"{longest} prompt tokens and max_tokens {wanted} make {longest + wanted}, "
                f"this model takes {max_model_len}: shorten the prompt or lower max_tokens"
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        return [max_model_len - len(p) if self.max_tokens is None else self.max_tokens for p in prompts]


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    neutral: ClassVar[dict] = NEUTRAL
    id_prefix: ClassVar[str] = "cmpl-"
    objects: ClassVar[tuple[str, str]] = ("text_completion", "text_completion")  # of a whole answer, of a chunk

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=0)  # 0: score the prompt
    logprobs: Candidates | None = None  # of the model's distribution, before temperature and penalties
    echo: bool = False

    @model_validator(mode="after")
    def check_max_tokens(self):
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0, wanted at least 1; 0 is only for echo", "max_tokens")
        return self

    @property
    def candidates(self) -> int | None:
        return self.logprobs

    @property
    def prompt_candidates(self) -> int | None:
        both = [n for n in (self.prompt_logprobs, self.logprobs if self.echo else None) if n is not None]
        return max(both, default=None)

    def whole(self, news: "News") -> dict:
        choice = {"index": news.index, "text": news.text, "logprobs": None}
        choice |= {"finish_reason": news.finish_reason, "stop_reason": news.stop_reason}
        if self.logprobs is not None:
            choice["logprobs"] = text_logprobs(news, self.logprobs)
        if self.return_token_ids:
            choice |= {"token_ids": news.tokens} | ({"prompt_token_ids": news.prompt} if news.is_first else {})
        if self.prompt_logprobs is not None:
            choice["prompt_logprobs"] = vllm_prompt_logprobs(news, self.prompt_logprobs)
        return choice

    def chunks(self, news: "News") -> list[dict]:
        return [self.whole(news)]

    def outside(self, news: "News") -> dict:
        """What an answer says of the prompt, outside of its choices."""
        return {}


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


Messages = Annotated[list[Message], FailFast()]


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions. Without max_completion_tokens an answer may be as long as the context allows."""

    neutral: ClassVar[dict] = NEUTRAL_IN_CHAT
    id_prefix: ClassVar[str] = "chatcmpl-"
    objects: ClassVar[tuple[str, str]] = ("chat.completion", "chat.completion.chunk")
    echo: ClassVar[bool] = False

    messages: Messages = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # goes before the older max_tokens
    logprobs: bool = False
    top_logprobs: Candidates | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="before")
    @classmethod
    def prefer_the_newer_name(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("max_completion_tokens") is not None:
            return body | {"max_tokens": body["max_completion_tokens"]}
        return body

    @model_validator(mode="after")
    def check_logprobs(self):
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: send logprobs true or leave it out", "top_logprobs")
        return self

    @property
    def candidates(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def whole(self, news: "News") -> dict:
        return {"message": {"role": "assistant", "content": news.text}} | self.rest(news, news.finish_reason)

    def chunks(self, news: "News") -> list[dict]:
        """The first says the role, the last nothing but how it ended, what is between has the text."""
        deltas = [({"role": "assistant", "content": ""}, False)] if news.is_first else []
        deltas += [({"content": news.text}, True)] if news.text or news.tokens else []
        chunks = [{"delta": delta} | self.rest(news if tells else news.empty(), None) for delta, tells in deltas]
        return chunks + ([{"delta": {}} | self.rest(news.empty(), news.finish_reason)] if news.finish_reason else [])

    def rest(self, news: "News", finish_reason: str | None) -> dict:
        choice = {"index": news.index, "logprobs": None, "finish_reason": finish_reason}
        choice["stop_reason"] = news.stop_reason if finish_reason else None
        if self.logprobs and news.tokens:
            choice["logprobs"] = {"content": chat_logprobs(news, self.candidates), "refusal": None}
        return choice | ({"token_ids": news.tokens} if self.return_token_ids else {})

    def outside(self, news: "News") -> dict:
        """What an answer says of the prompt, outside of its choices."""
        ids = {"prompt_token_ids": news.prompt} if self.return_token_ids and news.is_first else {}
        if self.prompt_logprobs is None:
            return ids
        return ids | {"prompt_logprobs": vllm_prompt_logprobs(news, self.prompt_logprobs)}


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt, or the messages of a chat."""

    neutral: ClassVar[dict] = {"chat_template": None, "chat_template_kwargs": {}, "continue_final_message": False}
    model: str | None = None
    prompt: str | None = None
    messages: Messages = Field([], min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True  # our tokenizers add none
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one(self):
        if (self.prompt is None) == (not self.messages):
            raise ApiError(400, "give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]


# ----------------------------------------------------------------------------------------------------------------------
# The answers. They are written as plain dictionaries, a few microseconds each; the models below are their documentation


@dataclass(slots=True)
class News:
    """
    What the client was not told yet of one choice. A score is [log-probability of the token, the likeliest ids, their
    log-probabilities], or None for a first token, which nothing predicts.
    """

    index: int
    text: str
    tokens: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    is_first: bool
    prompt: list[int]
    spell: Callable[[int], bytes]  # the bytes of a token, a control token's name included
    scores: list = ()  # of what `offsets` counts: with echo the prompt's tokens, then `tokens`
    scored: list[int] = ()  # these tokens
    offsets: list[int] = ()  # where in the whole text each of them begins
    prompt_scores: list | None = None

    def empty(self) -> "News":
        return News(self.index, "", [], None, self.stop_reason, False, [], self.spell)


def token_name(data: bytes) -> str:
    """A token's text; bytes that are no whole characters are spelled out, so that no two tokens are called the same."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def candidates(token: int, score: list, n: int) -> dict[int, float]:
    """{id: log-probability} of the n likeliest tokens and of the token itself, likeliest first."""
    logprob, ids, logprobs = score
    found = dict(zip(ids[:n], logprobs[:n], strict=True))
    return {i: max(p, LOWEST) for i, p in (found | {token: found.get(token, logprob)}).items()}


def text_logprobs(news: News, n: int) -> dict:
    """OpenAI's shape for completions: four lists, an entry for each token."""
    names, values, tops = [], [], []
    for token, score in zip(news.scored, news.scores, strict=True):
        names.append(token_name(news.spell(token)))
        found = candidates(token, score, n) if score else None
        values.append(found[token] if score else None)
        tops.append({token_name(news.spell(i)): p for i, p in found.items()} if score else None)
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": list(news.offsets)}


def chat_logprobs(news: News, n: int) -> list[dict]:
    """OpenAI's shape for chats: an object for each token."""

    def entry(token: int, logprob: float) -> dict:
        data = news.spell(token)
        return {"token": token_name(data), "logprob": logprob, "bytes": list(data)}

    content = []
    for token, score in zip(news.scored, news.scores, strict=True):
        found = candidates(token, score, n)
        top = [entry(i, p) for i, p in list(found.items())[:n]]
        content.append(entry(token, found[token]) | {"top_logprobs": top})
    return content


def vllm_prompt_logprobs(news: News, n: int) -> list[dict | None]:
    """vLLM's shape: for each prompt token but the first {id: {logprob, rank, decoded_token}}; rank null: not known."""
    found = [candidates(t, score, n) for t, score in zip(news.prompt[1:], news.prompt_scores or [], strict=True)]
    spelled = [
        {
            str(i): {"logprob": p, "rank": rank if rank <= n else None, "decoded_token": token_name(news.spell(i))}
            for rank, (i, p) in enumerate(place.items(), 1)
        }
        for place in found
    ]
    return [None, *spelled]


class PromptTokensDetails(BaseModel):
    cached_tokens: int  # of all prompts: how many tokens were found in the prefix cache


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # null: a first token, which nothing predicts
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


class AnyChoice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length"] | None = None  # null while streaming
    stop_reason: str | int | None = None  # the stop string or stop id that ended it; null at the end of the text
    token_ids: list[int] | None = None  # with return_token_ids


class CompletionChoice(AnyChoice):
    text: str
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionAnswer(BaseModel):
    """The whole answer; with `usage` null or absent, one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Candidate(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Candidate):
    top_logprobs: list[Candidate]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] | None = None  # in a stream: only in the first delta
    content: str | None = None


class ChatChoice(AnyChoice):
    message: ChatMessage | None = None  # of a whole answer
    delta: ChatMessage | None = None  # of a chunk
    logprobs: ChatLogprobs | None = None


class ChatAnswer(BaseModel):
    """The whole answer, or one chunk of a stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    prompt: str


class ErrorAnswer(BaseModel):
    """The shape of `error_body`, for the OpenAPI page."""

    error: dict[Literal["message", "type", "param", "code"], str | None]
