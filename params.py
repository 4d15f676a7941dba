"""
All defaults and ranges for serving, in one place: `SamplingParams` (how to continue one request),
`Settings` (how an engine serves), the defaults that come with a model, and a few constants shared
by the engine, its kernels and the HTTP process.

    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64)
    RANGES["top_p"].bounds                      # {"gt": 0, "le": 1}, named as in pydantic
    engine = Engine(model, Settings(block_size=32, max_num_seqs=8))
    defaults, note = model_defaults("qwen3")    # {"temperature": 0.6, "top_k": 20, ..}

This module does not import any packages, so the HTTP process stays small. To add a sampling
parameter, change:

    here                  add a field to SamplingParams and a line to RANGES; extend the property
                          that tells whether a request needs it (filters, penalises or adjusts),
                          or else the sampler will skip it; add it to GENERATION_FIELDS if
                          generation_config.json can have it
    ops/sampling.py       add a column to `Floats` or `Ints`, and fill it in `SamplingRow`; use it
                          in `threshold` (and its call in `sample_torch`) or in `adjust`
    ops/sampling_kernels.py   add the column's name, and use it in `threshold_kernel` or
                          `load_adjusted`; their early returns must match that property
    server/protocol.py    add a field to `SamplingRequest`
    tests                 add its default and limits to test_params.py, a row in NUMBERS and a value
                          in SENT to test_protocol.py, the tokens that it allows to oracle.py, and
                          batches that mix it to test_sampling.py
"""

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common import MALFORMED, read_json, refuse_withdrawn
from engine.stages import require
from paged import POLICIES, SchedulerSettings, setting

GREEDY_BELOW = 1e-5  # lower temperatures count as 0, because dividing by them would overflow
LOWEST_LOGPROB = -9999.0  # replaces -infinity, which JSON cannot represent
NO_TOKEN = -1  # not a token id: the sampler's result if the best logit is not finite


class Range(NamedTuple):
    """The values that a field may have, and a description of these values for error messages."""

    kind: object  # a type, or its union with None
    bounds: dict[str, float]  # keys gt, ge, lt, le, named as in pydantic and in module operator
    wanted: str

    def admits(self, value) -> bool:
        """Return whether the value is in range. NaN is never in range, and True is not a number."""
        if not isinstance(value, self.kind) or isinstance(value, bool):
            return False
        if value is None:
            return True
        return all(getattr(operator, name)(value, bound) for name, bound in self.bounds.items())


NUMBER = int | float
RANGES = {
    "temperature": Range(NUMBER, {"ge": 0, "le": 2}, "a number from 0 (greedy) to 2"),
    "top_k": Range(int, {"ge": 0, "lt": 2**31}, "a whole number from 0 (all tokens) to 2**31 - 1"),
    "top_p": Range(NUMBER, {"gt": 0, "le": 1}, "a number above 0, up to 1"),
    "min_p": Range(NUMBER, {"ge": 0, "le": 1}, "a number from 0 to 1"),
    "max_tokens": Range(int, {"ge": 1, "lt": 2**31}, "a whole number from 1 to 2**31 - 1"),
    "min_tokens": Range(int, {"ge": 0, "lt": 2**31}, "a whole number from 0 to max_tokens"),
    "presence_penalty": Range(NUMBER, {"ge": -2, "le": 2}, "a number from -2 to 2"),
    "frequency_penalty": Range(NUMBER, {"ge": -2, "le": 2}, "a number from -2 to 2"),
    "repetition_penalty": Range(NUMBER, {"gt": 0, "le": 10}, "a number above 0, up to 10"),
    "seed": Range(int | None, {"ge": -(2**63), "lt": 2**63}, "a 64-bit whole number, or None"),
    "logprobs": Range(int | None, {"ge": 0, "le": 20}, "a whole number from 0 to 20, or None"),
}
# each number in logit_bias
BIAS = Range(NUMBER, {"ge": -100, "le": 100}, "a number from -100 to 100")


@dataclass(frozen=True)
class SamplingParams:
    """
    Options for continuing one request. They are applied in this order: logit_bias, min_tokens,
    penalties (repetition, frequency, presence), temperature, top_k, top_p, min_p. Raises ValueError
    for a value outside RANGES.
    """

    temperature: float = 1.0  # 0: always choose the most likely token
    top_k: int = 0  # sample from the k most likely tokens and ties with the last; 0: from all
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability
    min_p: float = 0.0  # drop tokens with less than this fraction of the best one's probability
    max_tokens: int = 16
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False  # continue after an end-of-text token
    seed: int | None = None  # 64 bits; None: the engine draws one
    presence_penalty: float = 0.0  # subtracted from the logit of each token in the answer
    frequency_penalty: float = 0.0  # subtracted once for each time that the token was generated
    # divides positive logits, and multiplies negative ones, of tokens in prompt or answer
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None  # added to the logits of these tokens
    min_tokens: int = 0  # ban stop tokens before this many tokens
    # return log-probabilities of the chosen token and of this many top tokens; None: of no tokens
    logprobs: int | None = None
    grammar: object = None  # constrains the answer; compiled in engine/grammar.py

    def __post_init__(self):
        if self.grammar:
            require("grammar")
        if self.logprobs is not None:
            require("scores")
        for name, limits in RANGES.items():
            self._require(name, limits.admits(getattr(self, name)), limits.wanted)
        fits = self.min_tokens <= self.max_tokens
        self._require("min_tokens", fits, RANGES["min_tokens"].wanted)
        ids = self.stop_token_ids
        fits = isinstance(ids, tuple | list) and set(map(type, ids)) <= {int}
        self._require("stop_token_ids", fits, "a tuple of token ids")
        self._require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        bias = {} if self.logit_bias is None else self.logit_bias
        fits = isinstance(bias, dict) and all(
            type(token) is int and BIAS.admits(value) for token, value in bias.items()
        )
        wanted = "a dict from token ids to numbers from -100 to 100, or None"
        self._require("logit_bias", fits, wanted)

    def _require(self, name: str, fits: bool, wanted: str):
        if not fits:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    def check_vocabulary(self, V: int):
        """
        Raise ValueError if logit_bias has a token id outside 0..V-1. (A stop token outside the
        vocabulary is not an error: it is never sampled.)
        """
        for token in self.logit_bias or ():
            if not 0 <= token < V:
                raise ValueError(f"logit_bias has token {token}, outside 0..{V - 1}: leave it out")

    def check_end(self, ends: Sequence[int]):
        """
        Raise ValueError if there is a grammar, but `ends` has no token that can end the answer.
        """
        if self.grammar and not ends:
            raise ValueError("a grammar needs an end-of-text token: leave ignore_eos out")

    # Which parts of the sampler a request needs. These are computed once, and read in every step.

    @cached_property
    def adjusts(self) -> bool:
        """True if `sampling.adjust` would change the logits."""
        return bool(self.biases or self.penalises or self.min_tokens)

    @cached_property
    def penalises(self) -> bool:
        """True if any of the three penalties is set."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @cached_property
    def biases(self) -> bool:
        """True if there is a logit_bias."""
        return bool(self.logit_bias)

    @cached_property
    def filters(self) -> bool:
        """True if top_k, top_p or min_p is set, and decoding is not greedy."""
        is_greedy = self.temperature < GREEDY_BELOW
        return bool(self.top_k or self.top_p < 1 or self.min_p) and not is_greedy


GREEDY = SamplingParams(temperature=0.0)


# --------------------------------------------------------------------------------------------------
# The engine's settings
#
# A field made by `setting` is also a flag of serve.py, with the same help text and limits. The
# scheduler's settings are inherited from `SchedulerSettings` (paged.py). None stands for a value
# that depends on the machine or the model, and is chosen by engine/sizing.py.

# defaults for each kind of device: number of running requests, and of tokens per step
GPU_SEQS = 256
GPU_TOKENS = 8192
CPU_SEQS = 64
CPU_TOKENS = 512


@dataclass(frozen=True)
class Settings(SchedulerSettings):
    """An engine's settings. Raises ValueError for a value out of range."""

    # sizes
    block_size: int = setting(16, "number of tokens per KV block", least=1)
    num_blocks: int | None = setting(
        None,
        "number of KV blocks in the pool; by default, enough for --max-num-seqs texts of full "
        "length (on a CPU, for three quarters of them), if there is enough memory",
        least=1,
        flag="--kv-blocks",
    )
    max_num_seqs: int | None = setting(
        None,
        f"maximum number of running requests; default: {GPU_SEQS} on a GPU, {CPU_SEQS} on a CPU",
        least=1,
    )
    token_budget: int | None = setting(
        None,
        f"maximum tokens per step; default: {GPU_TOKENS} on a GPU, {CPU_TOKENS} on a CPU",
        least=1,
    )
    max_model_len: int | None = setting(
        None, "maximum length of prompt plus answer, in tokens; default: as long as fits", least=1
    )
    watermark: float = 0.01  # fraction of blocks that admissions leave free for running requests

    # order
    policy: str = setting(
        "priority",
        "which request is served first: the oldest (fcfs), the one with the lowest `priority` "
        "(priority), or the shortest (sjf)",
        choices=tuple(POLICIES),
    )

    # computation
    attention: str = setting(
        "auto", "attention backend: triton, cpu or torch; auto: the fastest on this machine"
    )
    deterministic: bool = setting(
        False,
        "on a GPU, make answers identical to the last bit, whatever else is served; on a CPU, they "
        "always are",
    )
    quantize: str = setting("none", "int8: integer weights (CPU only)", choices=("none", "int8"))
    # the help text describes the flag, which turns graphs off
    graphs: bool = setting(True, "do not use CUDA graphs (for debugging)", flag="--no-graphs")
    # asynchronous scheduling: plan a step while the previous one runs; None: only on a GPU
    overlap: bool | None = None
    speculate: bool = setting(
        False, "guess tokens from the text so far, and check several in one step"
    )
    seed: int | None = None  # used to draw seeds for requests without one; None: a random seed

    # debugging
    check: bool = setting(False, "check the scheduler's invariants after each step")

    def __post_init__(self):
        super().__post_init__()
        if self.speculate:
            require("drafts")
        refuse_withdrawn("attention", self.attention)


# --------------------------------------------------------------------------------------------------
# generation_config.json: defaults that come with a model

# name in the file -> our name; vLLM reads the same fields
SAME_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
GENERATION_FIELDS = {name: name for name in SAME_NAMES} | {"max_new_tokens": "max_tokens"}


def model_defaults(model: str | Path, source: str = "auto") -> tuple[dict, str]:
    """
    Return the sampling defaults in generation_config.json, and a line of text that lists them.
    `source` is the value of --generation-config: "auto" for the model's directory, "vllm" for no
    file, or another directory. Raises ValueError with a message that says what to change.
    """
    if source == "vllm":
        return {}, ""
    path = Path(model if source == "auto" else source) / "generation_config.json"
    try:
        if source != "auto" and not path.is_file():
            raise ValueError("there is no such file")
        content = read_json(path)
        defaults = {
            ours: content[name]
            for name, ours in GENERATION_FIELDS.items()
            if content.get(name) is not None
        }
        if defaults.get("top_k") == -1:
            defaults["top_k"] = 0  # in vLLM, both -1 and 0 mean all tokens
        SamplingParams(**defaults)
    except MALFORMED as error:
        raise ValueError(
            f"{path}: {error!s:.300}: correct it, or ignore it with --generation-config vllm"
        ) from None
    taken = ", ".join(f"{name} {value}" for name, value in defaults.items())
    note = f"{path}: by default {taken} (to ignore this file: --generation-config vllm)"
    return defaults, note if defaults else ""


# --------------------------------------------------------------------------------------------------
# Chat template variables set by a caller (server/text.py renders the template)

# Names that a caller may not set: the conversation, variables that have their own field or are not
# supported, and the template's functions. (Names of control tokens, such as bos_token, may not be
# set either.)
RESERVED_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
RESERVED_VARIABLES |= {"continue_final_message", "tokenize", "raise_exception", "strftime_now"}
MAX_VARIABLES = 2**14  # maximum number of characters in a caller's variables, as JSON


def check_variables(variables: dict) -> dict:
    """
    Return a caller's template variables unchanged. Raises ValueError for a name that a caller may
    not set, or if the variables are too long.
    """
    if not isinstance(variables, dict):
        raise ValueError("must be a JSON object")
    if len(start_of_json(variables, MAX_VARIABLES, allow_nan=False)) > MAX_VARIABLES:
        raise ValueError(f"has more than {MAX_VARIABLES} characters: shorten it")
    for name in variables:
        if name in RESERVED_VARIABLES or name.endswith("_token"):
            raise ValueError(
                f"has a name that a caller may not set: leave it out, got {name!r:.100}"
            )
    return variables


def start_of_json(value, most: int, **options) -> str:
    """
    Return a value as JSON. If it has more than `most` characters, the rest may be missing, because
    a caller's value may take a tenth of a second to convert.
    """
    pieces = json.JSONEncoder(ensure_ascii=False, **options).iterencode(value)
    return "".join(islice(pieces, most + 1))  # none of them is empty
