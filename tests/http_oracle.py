"""
The answers that clients of simulator_http.py must get, and the counts that the metrics must show.
They come from a reference that is as plain as possible, and computes each answer at once.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass, field

from scripted_engine import script
from wires import EOS, Answer

from server.gate import LINGER_SECONDS, UNLOGGED_PATHS


@dataclass
class Choice:
    """One choice of an answer, or the beginning of one that is still streamed."""

    text: str = ""
    ends: tuple = (None, None)  # finish_reason, stop_reason
    scores: list[float] = field(default_factory=list)  # of its tokens


def prompts_of(call: dict) -> list[list[int]]:
    return [list(prompt.encode()) for prompt in call["body"]["prompt"]]


def count_of(call: dict) -> int:
    """Return how many choices a call asks for."""
    if not call["path"].endswith("completions"):
        return 0
    if "refused" in call:
        return 1  # it may get as far as the queue
    return len(prompts_of(call)) * call["body"].get("n", 1)


def expected(call: dict) -> list[Choice]:
    """Return all choices of a call."""
    body = call["body"]
    return [
        expected_choice(body, script(tuple(prompt), body["seed"], i))
        for prompt in prompts_of(call)
        for i in range(body.get("n", 1))
    ]


def expected_choice(body: dict, said: list[int]) -> Choice:
    choice = Choice(ends=("length", None))
    tokens = []
    stop = body.get("stop", "\0")
    for token in said[: body["max_tokens"]]:
        tokens.append(token)
        choice.scores.append(-float(token))
        choice.text = text_of(tokens, "ignore")
        if stop in choice.text:
            choice.text = choice.text[: choice.text.index(stop)]
            choice.ends = "stop", stop
            break
        choice.text = text_of(tokens, "replace")
        if token == EOS and not body.get("ignore_eos"):
            choice.ends = "stop", None
            break
    return choice


def text_of(tokens: list[int], errors: str) -> str:
    return bytes(token for token in tokens if token != EOS).decode("utf-8", errors)


class Judge:
    """Judges one call: whether its result is allowed."""

    def __init__(self, world, caller, call: dict, answer: Answer):
        self.world = world
        self.caller = caller
        self.call = call
        self.answer = answer
        self.id = f"r{call['id']}"
        self.jobs = [job for job in world.jobs if job.call.id == self.id]
        # the content of a 200
        self.choices: dict[int, Choice] = {}
        self.usage = None
        self.error = None
        self.is_over = False

    def check(self):
        call = self.call
        answer = self.answer
        logged = self.world.statuses[self.id]
        assert len(logged) <= 1, "it is logged more than once"
        assert answer.whole or self.may_be_cut(), "it has no whole answer"
        if answer.status is None:
            return
        if answer.headers.get("x-request-id") != self.id:
            # its connection was one too many: the answer is not for this call, and has its own id
            assert answer.status == 503 and self.is_too_many(), "it is refused a connection"
            return
        assert {*logged} <= {answer.status, 499}, f"the log says {logged}"
        assert logged or not answer.whole or call["path"] in UNLOGGED_PATHS, "it is not logged"
        if answer.status != 200:
            if answer.whole:
                self.check_error(answer.status, json.loads(answer.body)["error"])
            return
        assert "refused" not in call, "it is served"
        if "body" in call:
            self.check_completion()
        self.check_time()

    def is_too_many(self) -> bool:
        return len(self.world.beside(self.caller)) >= self.world.args.max_connections

    def check_time(self):
        """
        Check that no answer takes longer than --request-seconds, and none begins after the server
        was stopped.
        """
        args = self.world.args
        most = 1000 * args.turn_seconds
        if "body" in self.call:
            late = self.caller.began - self.world.stopped_at
            assert late <= 10 * args.turn_seconds, f"it is served {late:.2f} s after the end"
            most += args.request_seconds + 1.0 + args.encode_seconds * len(self.world.callers)
        took = self.caller.ended_at - self.caller.began
        if self.caller.is_quick and self.answer.whole and len(self.caller.calls) == 1:
            assert took <= most + 0.1, f"it took {took:.2f} s, at most {most:.2f} are allowed"

    def may_be_cut(self) -> bool:
        """Return True if the answer may be missing or incomplete."""
        world = self.world
        if not self.caller.is_quick or world.pause >= world.args.client_seconds:
            return True
        # the server may cut off one connection too many before it reads the refusal, and others if
        # it ended before accepting them
        return self.is_too_many() or self.caller.sent_at > min(world.ends) - 0.1 - world.pause

    def check_completion(self):
        body = self.call["body"]
        if body.get("stream"):
            self.read_stream()
        elif self.answer.whole:
            self.read_chunk(json.loads(self.answer.body))
            self.is_over = True
        else:
            return
        assert self.is_over or not self.answer.whole, "it ends without an end"
        reference = expected(self.call)
        if self.answer.whole and not self.error:
            assert len(self.choices) == len(reference), f"it has {len(self.choices)} choices"
            assert all(any(choice.ends) for choice in self.choices.values()), "one has no end"
            self.check_usage(reference)
        for index, choice in self.choices.items():
            wanted = reference[index]
            if "logprobs" not in body:
                wanted.scores = []
            if not any(choice.ends):
                text = wanted.text[: len(choice.text)]
                wanted = Choice(text, (None, None), wanted.scores[: len(choice.scores)])
            assert choice == wanted
        if self.error:
            code = self.error["code"]
            self.check_error({"engine_dead": 500, None: 500}.get(code, 503), self.error)

    def read_stream(self):
        events = self.answer.body.split("\n\n")
        for event in events[:-1]:  # after the last blank line an event is incomplete
            if event.startswith(": "):
                continue
            assert not self.is_over, f"something comes after the end: {event!r}"
            data = event.removeprefix("data: ")
            self.is_over = data == "[DONE]"
            if not self.is_over:
                self.read_chunk(json.loads(data))

    def read_chunk(self, chunk: dict):
        """Append a chunk to those before it."""
        self.error = chunk.get("error")
        self.is_over = self.error is not None
        self.usage = chunk.get("usage") or self.usage
        for part in chunk.get("choices", ()):
            choice = self.choices.setdefault(part["index"], Choice())
            assert not any(choice.ends), "a choice goes on after its end"
            choice.text += part["text"]
            choice.ends = part["finish_reason"], part["stop_reason"]
            choice.scores += (part["logprobs"] or {"token_logprobs": []})["token_logprobs"]

    def check_usage(self, reference: list[Choice]):
        body = self.call["body"]
        if body.get("stream") and "stream_options" not in body:
            assert self.usage is None, "it has a usage that was not requested"
            return
        prompt = sum(map(len, prompts_of(self.call)))
        completion = sum(len(choice.scores) for choice in reference)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        counts["total_tokens"] = prompt + completion
        assert self.usage and self.usage | counts == self.usage, f"wanted {counts}"

    def check_error(self, status: int, error: dict):
        """Check that an error has its reason."""
        refused = self.call.get("refused")
        is_right = status == refused or (
            refused != 401 and self.may_be(status, error["code"], error["message"])
        )
        assert is_right, f"is refused with {status} {error}, without a reason"

    def may_be(self, status: int, code: str | None, message: str) -> bool:
        world = self.world
        began = self.caller.began
        ended = self.caller.ended_at
        states = [(at, state) for at, state in world.states if at <= ended]
        match status, code:
            case 503, "loading":
                return not any(s == "ready" and at < began for at, s in states)
            case 503, "restarting" | "dead":
                is_liveness = self.call["path"] == "/livez"
                was = {state for _, state in states}
                if code in was or (is_liveness and "restarting" in was):
                    return True
                return "no step in" in message and world.pause > 0
            case 503, "stopping" if self.jobs:
                latest = world.drained_at + 1.5 + world.pause
                is_late = self.caller.is_quick and ended > latest
                return world.drained_at - 1e-6 <= ended and not is_late
            case 503, "draining" | "stopping":
                # a call that was not yet in work has less time than those that were
                return min(world.ends) + LINGER_SECONDS * (code == "stopping") <= ended
            case 503, "timeout":
                choices = [choice for job in self.jobs for choice in job.choices]
                is_done = all(choice.finish_reason for choice in choices)
                return not is_done and ended - began > world.args.request_seconds - 1e-6
            case 429, "queue_full":
                # count the most choices that other calls can have had in work at the time
                callers = [self.caller, *world.beside(self.caller)]
                calls = [call for caller in callers for call in caller.calls]
                return sum(map(count_of, calls)) > world.most
            case 400, None:
                return "in one call" in message and count_of(self.call) > world.most
            case 500, "engine_dead":
                ends = [at for at, state in world.states if state in ("restarting", "dead")]
                return max(ends, default=-math.inf) >= began
            case 500, None:
                is_planned = "RuntimeError: planned" in message or "not numbers" in message
                return is_planned and self.call["id"] in world.failed
        return False


def check_metrics(world):
    """Compare the counts of the HTTP process with its jobs and with the engine's counts."""
    found = Counter()
    for family in world.service.metrics.registry.collect():
        for sample in family.samples:
            label = sample.labels.get("finished_reason", "")
            if "le" not in sample.labels:
                found[sample.name.partition(":")[2] + label] = sample.value
    choices = [choice for job in world.jobs for choice in job.choices]
    ended = [choice for choice in choices if choice.finish_reason]
    begun = [choice for choice in choices if choice.num_tokens or choice.finish_reason]
    firsts = [choice for choice in begun if choice.index % choice.body.n == 0]
    reasons = Counter(choice.finish_reason for choice in ended)
    for choice in choices:
        if choice.engine_id is not None and not choice.finish_reason:
            error = choice.job.error
            reasons["abort" if error is None or error.status == 499 else "error"] += 1
    counts = {
        "time_to_first_token_seconds_count": len(begun),
        "prompt_tokens_total": sum(len(choice.prompt) for choice in firsts),
        "request_generation_tokens_sum": sum(choice.num_tokens for choice in ended),
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
    }
    for reason in ("stop", "length", "abort", "error"):
        counts[f"request_success_total{reason}"] = reasons[reason]
    if len(world.engines) == 1:
        engine = world.engines[0].engine
        counts |= {
            "prefix_cache_queries_total": engine.scheduler.num_queried_tokens,
            "prefix_cache_hits_total": engine.scheduler.num_hit_tokens,
            "num_preemptions_total": engine.scheduler.num_preemptions,
        }
    assert counts == {name: found[name] for name in counts}
