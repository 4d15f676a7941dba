"""
Every default and range of serving, stated once: `SamplingParams`, how a request asks to be
continued; `Settings`, how an engine serves; the defaults of a model's makers; and the few numbers
that the engine, its kernels and the HTTP process share.

    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64)
    RANGES["top_p"].bounds                      # {"gt": 0, "le": 1}, in pydantic's words
    engine = Engine(model, Settings(block_size=32, max_num_seqs=8))
    defaults, note = model_defaults("qwen3")    # {"temperature": 0.6, "top_k": 20, ..}

Imports no package, so that the HTTP process stays small. To add a sampling parameter:

    here                  a field of SamplingParams, a line of RANGES; the property that says
                          whether a request asks for it (filters, penalises, adjusts): without,
                          the sampler passes it over; TAKEN, if generation_config.json has it
    ops/sampling.py       a column in `Floats` or `Ints`, which `SamplingRow` fills; its use in
                          `threshold` (with its argument in `sample_torch`) or in `adjust`
    ops/sampling_kernels.py   the column's name and its use in `threshold_kernel` or
                          `load_adjusted`, whose early returns repeat that property
    server/protocol.py    a field of `SamplingRequest`
    tests                 its default and edges in test_params.py, a row of NUMBERS and a value
                          in SENT in test_protocol.py, the tokens that it allows in oracle.py,
                          batches that mix it in test_sampling.py
"""

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from common import MALFORMED, read_json, refuse_withdrawn
from engine.stages import require
from paged import POLICIES, SchedulerSettings, setting

GREEDY_BELOW = 1e-5  # temperatures below are taken for 0: dividing by less would overflow
LOWEST_LOGPROB = -9999.0  # in place of -infinity, which JSON does not have
NO_TOKEN = -1  # no token id: what the sampler gives where logits are NaN, or all infinite


class Range(NamedTuple):
    """The values that a field may have, and how a refusal describes them."""

    kind: object  # a type, or a union with None
    bounds: dict[str, float]  # gt, ge, lt, le: names of the module operator, and of pydantic
    wanted: str

    def admits(self, value) -> bool:
        """NaN is in no range, since it compares false; and True is no number here."""
        if not isinstance(value, self.kind) or isinstance(value, bool):
            return False
        if value is None:
            return True
        return all(getattr(operator, name)(value, bound) for name, bound in self.bounds.items())


NUMBER = int | float
RANGES = {
    "temperature": Range(NUMBER, {"ge": 0, "le": 2}, "a number from 0 (greedy) to 2"),
    "top_k": Range(int, {"ge": 0, "lt": 2**31}, "a whole number, 0 for all tokens, below 2**31"),
    "top_p": Range(NUMBER, {"gt": 0, "le": 1}, "a number above 0, up to 1"),
    "min_p": Range(NUMBER, {"ge": 0, "le": 1}, "a number from 0 to 1"),
    "max_tokens": Range(int, {"ge": 1, "lt": 2**31}, "a whole number, at least 1, below 2**31"),
    "min_tokens": Range(int, {"ge": 0, "lt": 2**31}, "a whole number, 0 to max_tokens"),
    "presence_penalty": Range(NUMBER, {"ge": -2, "le": 2}, "a number from -2 to 2"),
    "frequency_penalty": Range(NUMBER, {"ge": -2, "le": 2}, "a number from -2 to 2"),
    "repetition_penalty": Range(NUMBER, {"gt": 0, "le": 10}, "a number above 0, up to 10"),
    "seed": Range(int | None, {"ge": -(2**63), "lt": 2**63}, "a whole number of 64 bits, or None"),
    "logprobs": Range(int | None, {"ge": 0, "le": 20}, "a whole number, 0 to 20, or None"),
}
# each number in logit_bias
BIAS = Range(NUMBER, {"ge": -100, "le": 100}, "a number from -100 to 100")


@dataclass(frozen=True)
class SamplingParams:
    """
    How one request is continued. Applied in this order: logit_bias, min_tokens, the penalties
    (repetition, frequency, presence), temperature, top_k, top_p, min_p.
    Raises ValueError for a value outside RANGES.
    """

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # sample among the k most likely tokens and ties with the last; 0: among all
    top_p: float = 1.0  # sample among the most likely tokens that together have this probability
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    max_tokens: int = 16
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False  # go on after the end-of-text token
    seed: int | None = None  # 64 bits; None: the engine draws one
    presence_penalty: float = 0.0  # taken once off the logit of each token that was generated
    frequency_penalty: float = 0.0  # taken off as many times as the token was generated
    # divides positive, multiplies negative logits of tokens in prompt or answer
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None  # added to the logits of these tokens
    min_tokens: int = 0  # no stop token before this many tokens
    # how many log-probabilities are wanted besides the chosen token's; None: not even that
    logprobs: int | None = None
    grammar: object = None  # what the answer is held to: engine/grammar.py compiles it

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
        fits = self.logit_bias is None or is_bias(self.logit_bias)
        wanted = "a dict from token ids to numbers from -100 to 100, or None"
        self._require("logit_bias", fits, wanted)

    def _require(self, name: str, fits: bool, wanted: str):
        if not fits:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    def check_vocabulary(self, V: int):
        """
        Raises ValueError for a token id outside 0..V-1 in logit_bias. (A stop token that the
        vocabulary lacks is no error: it never comes.)
        """
        for token in self.logit_bias or ():
            if not 0 <= token < V:
                raise ValueError(f"logit_bias has token {token}, outside 0..{V - 1}: leave it out")

    def check_end(self, ends: Sequence[int]):
        """Raise ValueError where a grammar could end an answer, and no token does."""
        if self.grammar and not ends:
            raise ValueError("a grammar needs an end-of-text token: leave ignore_eos out")

    # The parts of the sampler that a request needs: computed once, read in every step.

    @cached_property
    def adjusts(self) -> bool:
        """Changes logits in any of the ways of `sampling.adjust`."""
        return bool(self.biases or self.penalises or self.min_tokens)

    @cached_property
    def penalises(self) -> bool:
        """Has any of the three penalties."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @cached_property
    def biases(self) -> bool:
        """Has a logit_bias."""
        return bool(self.logit_bias)

    @cached_property
    def filters(self) -> bool:
        """Has top_k, top_p or min_p, which mean nothing to a greedy one."""
        is_greedy = self.temperature < GREEDY_BELOW
        return bool(self.top_k or self.top_p < 1 or self.min_p) and not is_greedy


def is_bias(bias) -> bool:
    if not isinstance(bias, dict):
        return False
    return all(type(token) is int and BIAS.admits(value) for token, value in bias.items())


GREEDY = SamplingParams(temperature=0.0)


# --------------------------------------------------------------------------------------------------
# The engine's settings
#
# A field made by `setting` is a flag of serve.py too, with this help text and these limits. The
# settings that the scheduler reads are declared in `SchedulerSettings` (paged.py). None stands for
# a value that depends on the machine or the model; engine/sizing.py finds it.

# defaults for each kind of device: requests at once, and tokens in a step
GPU_SEQS = 256
GPU_TOKENS = 8192
CPU_SEQS = 64
CPU_TOKENS = 512


@dataclass(frozen=True)
class Settings(SchedulerSettings):
    """How an `Engine` serves its model. Raises ValueError for what is out of range."""

    # how large
    block_size: int = setting(16, "tokens in a KV block", least=1)
    num_blocks: int | None = setting(
        None,
        "KV blocks in the pool; not given: for --max-num-seqs texts of full length, on a CPU for "
        "three quarters of them, if there is memory",
        least=1,
        flag="--kv-blocks",
    )
    max_num_seqs: int | None = setting(
        None,
        f"requests that run at once; not given: {GPU_SEQS} on a GPU, {CPU_SEQS} on a CPU",
        least=1,
    )
    token_budget: int | None = setting(
        None,
        f"tokens computed in a step; not given: {GPU_TOKENS} on a GPU, {CPU_TOKENS} on a CPU",
        least=1,
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus answer, in tokens; not given: what fits", least=1
    )
    watermark: float = 0.01  # share of the blocks kept for running requests at an admission

    # in which order
    policy: str = setting(
        "priority",
        "which request goes first: the oldest (fcfs), the lowest `priority` (priority), the "
        "shortest (sjf)",
        choices=tuple(POLICIES),
    )

    # how it is computed
    attention: str = setting(
        "auto", "attention backend: triton, cpu or torch; auto takes the fastest here"
    )
    deterministic: bool = setting(
        False, "on a GPU: answers equal to the bit, whatever else is served; on a CPU they are"
    )
    quantize: str = setting("none", "int8: weights as integers, on a CPU", choices=("none", "int8"))
    # the help text is that of the flag, which turns it off
    graphs: bool = setting(True, "on a GPU: no CUDA graphs, for debugging", flag="--no-graphs")
    # asynchronous scheduling: plan a step while the one before runs; None: on a GPU
    overlap: bool | None = None
    speculate: bool = setting(
        False, "guess tokens from the text so far, and check several in one step"
    )
    seed: int | None = None  # for drawing the seeds of requests without one; None: from the system

    # for debugging
    check: bool = setting(False, "verify the scheduler's invariants after each step")

    def __post_init__(self):
        super().__post_init__()
        if self.speculate:
            require("drafts")
        refuse_withdrawn("attention", self.attention)


# --------------------------------------------------------------------------------------------------
# generation_config.json: the defaults of a model's makers

# name in the file -> ours; the same that vLLM takes
TAKEN = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
TAKEN["max_new_tokens"] = "max_tokens"


def model_defaults(model: str | Path, source: str = "auto") -> tuple[dict, str]:
    """
    The defaults of sampling that generation_config.json has, for requests without their own, and a
    line that says which were taken. `source` is that of --generation-config: "auto", the model's
    directory; "vllm", none; or another directory. Raises ValueError with what to change.
    """
    if source == "vllm":
        return {}, ""
    path = Path(model if source == "auto" else source) / "generation_config.json"
    try:
        if source != "auto" and not path.is_file():
            raise ValueError("there is no such file")
        content = read_json(path)
        given = [name for name in TAKEN if content.get(name) is not None]
        defaults = {TAKEN[name]: content[name] for name in given}
        if defaults.get("top_k") == -1:
            defaults["top_k"] = 0  # vLLM has two words for all tokens
        SamplingParams(**defaults)
    except MALFORMED as error:
        remedy = "correct it, or leave it out with --generation-config vllm"
        raise ValueError(f"{path}: {error!s:.300}: {remedy}") from None
    taken = ", ".join(f"{name} {value}" for name, value in defaults.items())
    note = f"{path}: by default {taken} (--generation-config vllm: without this file)"
    return defaults, note if defaults else ""


# --------------------------------------------------------------------------------------------------
# Variables of the chat template that a caller gives; server/text.py has the template

# Variables that are not a caller's: the conversation, what has a field of its own or is not served,
# and the template's functions. (The names of control tokens, bos_token, are not, either.)
OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
OWN_VARIABLES |= {"continue_final_message", "tokenize", "raise_exception", "strftime_now"}
MAX_VARIABLES = 2**14  # characters of a caller's variables as JSON


def check_variables(variables: dict) -> dict:
    """
    A caller's variables for the template, as they are. Raises ValueError for a name that is not the
    caller's, and for too much of them.
    """
    if not isinstance(variables, dict):
        raise ValueError("must be a JSON object")
    for name in variables:
        if name in OWN_VARIABLES or name.endswith("_token"):
            remedy = "which is not a caller's to set: leave it out"
            raise ValueError(f"has a name {remedy}, got {name!r:.100}")
    length = len(json.dumps(variables, allow_nan=False, ensure_ascii=False))
    if length > MAX_VARIABLES:
        raise ValueError(f"has {length} characters, at most {MAX_VARIABLES} are taken: shorten it")
    return variables
