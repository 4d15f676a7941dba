"""
What passes through a step, and the stages that may act on it.

A step is a list of requests and how many tokens of each (`paged.Plan`). Whatever else an engine can
do is a `Stage` around it, in a file of its own; stages.py lists them. `Engine.step` calls each at
these moments, in this order:

    waits_for    a step is under way: must it end before the next one is planned?
    begin        before the scheduler plans
    planned      the plan is made, and may still be changed
    launched     the device computes it: its logits and tokens can be used there
    settled      the tokens are on the host: a stage may take some of them away
    resolved     the scheduler has the tokens, and the outputs are written
    between      two steps; nothing is half done

With overlap a step is planned and launched before the one before it is settled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.stages import require
from paged import Plan, Request
from params import GREEDY, SamplingParams

# begins messages of errors that are not the server's fault
STUCK = "the answer cannot go on: "


@dataclass(slots=True, eq=False)
class Answer(Request):
    """A request with what the engine must know to sample for it. A plain one is greedy."""

    params: SamplingParams = GREEDY
    index: int = 0  # which answer to its prompt this is; enters the noise of sampling
    stop_token_ids: frozenset[int] = frozenset()
    name: str = ""  # what its client calls it
    admitted_time: float | None = None  # first admitted then; None: not yet, or it is a fork


class Output(NamedTuple):
    """The result of a step for one request. A score: see scores.py."""

    id: int | str
    tokens: list[int]  # new ones; a stop token is included
    finish_reason: str | None = None  # stop, length or error; None while it goes on
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None
    logprobs: list | None = None  # the score of the token
    # with the first token, if asked: the scores of all of the prompt's tokens but the first
    prompt_logprobs: list[list] | None = None


@dataclass(eq=False)
class Step:
    """One step, from its plan to its outputs."""

    number: int
    plan: Plan
    launched: object = None  # what the device computes (device.Launched)
    # once it is settled: the tokens that each request of plan.sampled got
    tokens: dict[Request, list[int]] = field(default_factory=dict)
    dropped: set[Request] = field(default_factory=set)  # for these the step does not count
    failed: dict[Request, str] = field(default_factory=dict)  # got no token, and why
    outputs: dict[Request, Output] = field(default_factory=dict)
    notes: dict = field(default_factory=dict)  # stage -> what it must know of this step


def check_prompt_logprobs(count: int | None):
    """Raise ValueError unless a prompt's tokens can be scored with `count` candidates each."""
    if count is None:
        return
    require("scores")
    if type(count) is not int or count < 0:
        raise ValueError(f"prompt_logprobs is {count!r}: wanted 0 or more, or None")


MOMENTS = ("waits_for", "begin", "planned", "launched", "settled", "resolved", "between")


def by_moment(stages: Iterable["Stage"]) -> dict[str, list["Stage"]]:
    """Return, for each moment of a step, the stages that do something then: mostly a few."""
    acting = {}
    for moment in MOMENTS:
        nothing = getattr(Stage, moment)
        acting[moment] = [s for s in stages if getattr(type(s), moment) is not nothing]
    return acting


class Stage:
    """One thing that an engine does beside computing tokens. It overrides the moments it needs."""

    def __init__(self, engine):
        self.engine = engine

    def added(self, request: Answer):
        """A request was queued, or forked from another."""

    def ended(self, request: Answer):
        """A request has ended, in whatever way."""

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
        """A step has failed: its requests end, and it is neither settled nor resolved."""

    def between(self):
        pass

    def stats(self) -> dict:
        """Return its part of `Engine.stats`."""
        return {}

    # in a server's loop (process.py)

    def connect(self, link, directory: str):
        """The engine serves the model in this directory, over a link.Link."""

    def due_in(self) -> float | None:
        """Return the seconds until it has something to do without a message; None: nothing."""

    def arrived(self, messages: Iterable[dict]) -> Iterable[dict]:
        """Return the messages that the engine may handle now: not those that it keeps itself."""
        return messages

    def sent(self):
        """A step's tokens are on their way."""
