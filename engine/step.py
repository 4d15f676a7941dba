"""
The data of a step, and the stages that may act on it.

A step computes some tokens for each of its requests, as its `paged.Plan` says. Everything else that
an engine can do is done by a `Stage` in a file of its own; stages.py lists all stages.
`Engine.step` calls each stage at these moments, in this order:

    waits_for    a step is in flight: must it end before the next one is planned?
    begin        before the scheduler plans
    planned      the plan has been made, and may still be changed
    launched     the device is computing the step; logits and tokens can be used there
    settled      the tokens are on the host: a stage may remove some of them
    resolved     the scheduler has the tokens, and the outputs have been written
    between      between two steps, when no step is half done

With overlap, a step is planned and launched before the previous step is settled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.stages import require
from paged import Plan, Request
from params import GREEDY, SamplingParams

# prefix of messages for errors that are not the server's fault
STUCK = "the answer cannot go on: "


@dataclass(slots=True, eq=False)
class Answer(Request):
    """A request with what the engine needs to sample its tokens. A plain `Request` is greedy."""

    params: SamplingParams = GREEDY
    index: int = 0  # which answer to its prompt this is; also seeds the sampling noise
    stop_token_ids: frozenset[int] = frozenset()
    name: str = ""  # the client's name for the request
    admitted_time: float | None = None  # time of the first admission; None before it, and for forks


class Output(NamedTuple):
    """The result of a step for one request. Scores are explained in scores.py."""

    id: int | str
    tokens: list[int]  # the new tokens, including a stop token
    finish_reason: str | None = None  # stop, length or error; None while the request goes on
    cached_tokens: int = 0  # number of prompt tokens found in the prefix cache
    error: str | None = None
    logprobs: list | None = None  # the score of the token
    # the scores of all prompt tokens except the first; if requested, they come with the first token
    prompt_logprobs: list[list] | None = None


@dataclass(eq=False)
class Step:
    """One step, from its plan to its outputs."""

    number: int
    plan: Plan
    launched: object = None  # the results on the device (device.Launched)
    # from `settled` on: the new tokens of each request in plan.sampled
    tokens: dict[Request, list[int]] = field(default_factory=dict)
    dropped: set[Request] = field(default_factory=set)  # requests whose new tokens are ignored
    failed: dict[Request, str] = field(default_factory=dict)  # request -> why it got no token
    outputs: dict[Request, Output] = field(default_factory=dict)
    notes: dict = field(default_factory=dict)  # stage -> what it keeps about this step


def check_prompt_logprobs(count: int | None):
    """Raise ValueError unless a prompt's tokens can be scored with `count` candidates each."""
    if count is None:
        return
    require("scores")
    if type(count) is not int or count < 0:
        raise ValueError(f"prompt_logprobs is {count!r}: wanted 0 or more, or None")


MOMENTS = ("waits_for", "begin", "planned", "launched", "settled", "resolved", "between")


def by_moment(stages: Iterable["Stage"]) -> dict[str, list["Stage"]]:
    """Return, for each moment of a step, the stages that override the method of that name."""
    acting = {}
    for moment in MOMENTS:
        default = getattr(Stage, moment)
        acting[moment] = [s for s in stages if getattr(type(s), moment) is not default]
    return acting


class Stage:
    """
    One feature of an engine, apart from computing tokens. A stage overrides the methods for the
    moments at which it acts.
    """

    def __init__(self, engine):
        self.engine = engine

    def added(self, request: Answer):
        """Called when a request has been queued, or forked from another one."""

    def ended(self, request: Answer):
        """Called when a request has ended, for whatever reason."""

    def waits_for(self, step: Step) -> bool:
        return False

    def begin(self):
        pass

    def planned(self, step: Step):
        pass

    def launched(self, step: Step):
        pass

    def settled(self, step: Step):
        pass

    def resolved(self, step: Step):
        pass

    def failed(self):
        """
        Called when a step has failed. Its requests end, and the step is neither settled nor
        resolved.
        """

    def between(self):
        pass

    def stats(self) -> dict:
        """Return this stage's part of `Engine.stats`."""
        return {}

    # in a server's loop (process.py)

    def connect(self, link, directory: str):
        """Called once, with the link (link.Link) and the directory of the model being served."""

    def due_in(self) -> float | None:
        """Return in how many seconds this stage must act without a message; None if it need not."""

    def arrived(self, messages: Iterable[dict]) -> Iterable[dict]:
        """Return the messages that the engine may handle now. A stage may keep some for itself."""
        return messages

    def sent(self):
        """Called when a step's tokens have been sent."""
