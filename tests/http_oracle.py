"""
The answers that clients of simulator_http.py must have got, and the counts that the metrics must
show: by a reference as plain as can be, which has each answer whole at once.
"""

import json
from collections import Counter
from types import SimpleNamespace

from scripted_engine import script
from wires import EOS, Answer

from server.gate import LINGER_SECONDS, UNLOGGED_PATHS


class Expected(SimpleNamespace):
    """
    Of one choice: text, finish_reason, stop_reason, num_tokens, logprobs (of the tokens, or None).
    """


def prompts_of(call: dict) -> list[list[int]]:
    return [list(prompt.encode()) for prompt in call["body"]["prompt"]]


def count_of(call: dict) -> int:
    """How many choices a call asks for."""
    if not call["path"].endswith("completions"):
        return 0
    if "body" not in call:
        return 1  # a bad one, which may come as far as the queue
    return len(prompts_of(call)) * call["body"].get("n", 1)


def expected(call: dict) -> list[Expected]:
    """All choices of a call."""
    body = call["body"]
    choices = []
    for prompt in prompts_of(call):
        for choice in range(body.get("n", 1)):
            choices.append(one_expected(body, script(tuple(prompt), body["seed"], choice)))
    return choices


def one_expected(body: dict, said: list[int]) -> Expected:
    stop = body.get("stop")
    ends = {"finish_reason": "length", "stop_reason": None}
    tokens = []
    for token in said[: body["max_tokens"]]:
        tokens.append(token)
        text = text_of(tokens, "ignore")
        if stop and stop in text:
            ends = {"finish_reason": "stop", "stop_reason": stop}
            text = text[: text.index(stop)]
            break
        text = text_of(tokens, "replace")
        if token == EOS and not body.get("ignore_eos"):
            ends["finish_reason"] = "stop"
            break
    logprobs = None if body.get("logprobs") is None else [-float(token) for token in tokens]
    return Expected(text=text, num_tokens=len(tokens), logprobs=logprobs, **ends)


def text_of(tokens: list[int], errors: str) -> str:
    return bytes(token for token in tokens if token != EOS).decode("utf-8", errors)


def parse_answer(answer: Answer, call: dict) -> SimpleNamespace:
    """
    The content of an answer of status 200: its choices by index, its usage, its error, and whether
    its end has come.
    """
    said = SimpleNamespace(choices={}, usage=None, error=None, is_over=False)
    if not call["body"].get("stream"):
        read_chunk(said, json.loads(answer.body))
        said.is_over = True
        return said
    events = answer.body.split("\n\n")
    for event in events[:-1]:  # what is behind the last blank line has not all come
        if event.startswith(": "):
            continue
        assert not said.is_over, f"call {call['id']}: something comes after the end: {event!r}"
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            said.is_over = True
        else:
            read_chunk(said, json.loads(data))
    return said


def read_chunk(said: SimpleNamespace, chunk: dict):
    """Put a chunk behind those before it."""
    said.error = chunk.get("error")
    said.is_over = said.error is not None
    said.usage = chunk.get("usage") or said.usage
    for choice in chunk.get("choices", ()):
        index = choice["index"]
        so_far = said.choices.setdefault(
            index, Expected(text="", finish_reason=None, stop_reason=None, logprobs=[])
        )
        assert so_far.finish_reason is None, f"choice {index} goes on after its end"
        so_far.text += choice["text"]
        so_far.finish_reason = choice["finish_reason"]
        so_far.stop_reason = choice["stop_reason"]
        if choice["logprobs"] is not None:
            so_far.logprobs += choice["logprobs"]["token_logprobs"]


class Judge:
    """Of one call: whether what came of it may be."""

    def __init__(self, world, caller, call: dict, answer: Answer | None):
        self.world = world
        self.settings = world.settings
        self.caller = caller
        self.call = call
        self.answer = answer
        self.log = world.access.get(f"r{call['id']}", [])
        self.jobs = [job for job in world.jobs if job.call_id == f"r{call['id']}"]

    def wrong(self, what: str):
        raise AssertionError(f"call {self.call['id']}: {what}")

    def check(self):
        answer = self.answer
        if len(self.log) > 1:
            self.wrong(f"is logged {len(self.log)} times")
        if answer is None or not answer.whole:
            self.check_cut()
        if answer is None or answer.status is None:
            return
        if answer.headers.get("x-request-id") != f"r{self.call['id']}":
            return self.check_room()
        if self.log and self.log[0]["status"] not in (answer.status, 499):
            self.wrong(f"the log says {self.log[0]['status']}, the client got {answer.status}")
        if answer.whole and not self.log and self.call["path"] not in UNLOGGED_PATHS:
            self.wrong("has an answer, but is not logged")
        if answer.status != 200:
            if answer.whole:
                self.check_error(answer.status, json.loads(answer.body)["error"])
        elif self.call.get("refused"):
            self.wrong(f"is served, wanted {self.call['refused']}")
        elif "body" in self.call:
            self.check_completion()
            self.check_time()

    def check_room(self):
        """Its connection was one too many: the answer is to no call, and has an id of its own."""
        num_beside = len(self.world.beside(self.caller))
        if self.answer.status != 503 or num_beside < self.settings["max_connections"]:
            self.wrong("is refused a connection, though there is room")

    def check_time(self):
        """
        No answer takes longer than --request-seconds, and none begins when the server has been
        stopped.
        """
        settings = self.settings
        began = self.caller.began
        stopped = self.world.stopped_at
        if stopped is not None and began > stopped + 0.3 + self.world.pause:
            self.wrong(f"is served, {began - stopped:.2f} s after the server was stopped")
        most = settings["request_seconds"] + 1.0
        most += settings["encode_seconds"] * len(self.world.callers)
        took = self.caller.ended_at - began - 1000 * settings["turn_seconds"]
        is_plain = self.caller.is_quick and len(self.caller.calls) == 1
        if is_plain and self.answer.whole and took > most:
            self.wrong(f"took {took:.1f} s, at most {most:.1f} are allowed")

    def check_cut(self):
        """The answer is not there, or not all of it."""
        world = self.world
        caller = self.caller
        if caller.has_left or not caller.is_quick:
            return
        if world.pause >= self.settings["client_seconds"]:
            return
        if len(world.beside(caller)) >= self.settings["max_connections"]:
            return  # it was one too many, and cut off before it could read that
        ends = [at for at, state in world.states if state == "dead"]
        ends += [world.stopped_at] if world.stopped_at is not None else []
        if ends and (caller.sent_at is None or caller.sent_at > min(ends) - 0.1 - world.pause):
            return  # it was not yet taken in when the server ended
        self.wrong(f"has no whole answer; {caller.received[-200:]!r}")

    def check_completion(self):
        if not (self.answer.whole or self.call["body"].get("stream")):
            return
        said = parse_answer(self.answer, self.call)
        if self.answer.whole and not said.is_over:
            self.wrong("ends without an end")
        reference = expected(self.call)
        is_whole = self.answer.whole and not said.error
        indices = range(len(reference))
        if not set(said.choices) <= set(indices) or (is_whole and len(said.choices) < len(indices)):
            self.wrong(f"has choices {sorted(said.choices)}, wanted {len(indices)}")
        for index, choice in said.choices.items():
            self.compare(choice, reference[index], is_whole)
        if is_whole:
            self.check_usage(said.usage, reference)
        if said.error:
            code = said.error["code"]
            status = {"engine_dead": 500, None: 500}.get(code, 503)
            self.check_error(status, said.error)

    def compare(self, choice: Expected, reference: Expected, is_whole: bool):
        is_over = choice.finish_reason is not None
        if is_whole and not is_over:
            self.wrong("a choice has no end")
        text = reference.text
        logprobs = reference.logprobs or []
        if is_over:
            ends = choice.finish_reason, choice.stop_reason
            if ends != (reference.finish_reason, reference.stop_reason):
                self.wrong(f"a choice ended by {ends}, wanted {reference}")
        else:
            text = text[: len(choice.text)]
            logprobs = logprobs[: len(choice.logprobs)]
        if choice.text != text or choice.logprobs != logprobs:
            self.wrong(f"a choice is {choice}, wanted {reference}")

    def check_usage(self, usage: dict | None, reference: list[Expected]):
        body = self.call["body"]
        if body.get("stream") and "stream_options" not in body:
            if usage is not None:
                self.wrong("has a usage that was not asked for")
            return
        prompt = sum(map(len, prompts_of(self.call)))
        completion = sum(choice.num_tokens for choice in reference)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        counts["total_tokens"] = prompt + completion
        if usage is None or usage | counts != usage:
            self.wrong(f"its usage is {usage}, wanted {counts}")

    def check_error(self, status: int, error: dict):
        """Each error needs its reason."""
        code = error["code"]
        message = error["message"]
        refused = self.call.get("refused")
        if status == refused:
            return
        if refused == 401 or not self.may_be(status, code, message):
            self.wrong(f"is refused with {status} {code} {message!r}, without a reason")

    def may_be(self, status: int, code: str | None, message: str) -> bool:
        world = self.world
        began = self.caller.began
        ended = self.caller.ended_at
        states = [state for at, state in world.states if at <= ended]
        match status, code:
            case 503, "loading":
                return not any(s == "ready" and at < began for at, s in world.states)
            case 503, "restarting" | "dead":
                is_liveness = self.call["path"] == "/livez"
                if code in states or (is_liveness and "restarting" in states):
                    return True
                return "no step in" in message and world.pause > 0
            case 503, "stopping" if self.jobs:
                latest = world.drained_at + 1.5 + world.pause
                is_late = self.caller.is_quick and ended > latest
                return world.drained_at - 1e-6 <= ended and not is_late
            case 503, "draining" | "stopping":
                ends = [at for at, state in world.states if state == "dead"]
                ends += [world.stopped_at] if world.stopped_at is not None else []
                # a call that was not in work yet has less time than those that were
                lingered = LINGER_SECONDS if code == "stopping" else 0.0
                return bool(ends) and min(ends) + lingered <= ended
            case 503, "timeout":
                took = ended - began
                return took > self.settings["request_seconds"] - 1e-6 and self.is_unfinished()
            case 429, "queue_full":
                return self.may_be_full()
            case 400, None:
                return "in one call" in message and count_of(self.call) > world.most
            case 500, "engine_dead":
                ends = [at for at, state in world.states if state in ("restarting", "dead")]
                return bool(ends) and ends[-1] >= began
            case 500, None:
                is_planned = "RuntimeError: planned" in message or "not numbers" in message
                return is_planned and self.call["id"] in world.failed
        return False

    def is_unfinished(self) -> bool:
        """The engine has not done all of it."""
        return any(not choice.finish_reason for job in self.jobs for choice in job.choices)

    def may_be_full(self) -> bool:
        """The most choices that other calls can have had in work meanwhile are counted."""
        callers = [self.caller, *self.world.beside(self.caller)]
        counts = [count_of(call) for caller in callers for call in caller.calls]
        return sum(counts) > self.world.most


class Books:
    """The counts of the HTTP process, compared with its jobs."""

    def __init__(self, world):
        self.world = world
        self.values: dict = {}
        for family in world.service.metrics.registry.collect():
            for sample in family.samples:
                label = sample.labels.get("finished_reason")
                if "le" not in sample.labels:
                    self.values[sample.name.partition(":")[2], label] = sample.value

    def expect(self, name: str, expected: float, label: str | None = None):
        count = self.values.get((name, label), 0)
        what = f"{name} {label or ''}".strip()
        assert count == expected, f"The HTTP process counts {what} as {count}, expected {expected}"

    def check(self):
        choices = [choice for job in self.world.jobs for choice in job.choices]
        ended = [choice for choice in choices if choice.finish_reason]
        reasons = Counter(choice.finish_reason for choice in ended)
        for choice in choices:
            if choice.engine_id is not None and not choice.finish_reason:
                error = choice.job.error
                reasons["abort" if error is None or error.status == 499 else "error"] += 1
        for reason in ("stop", "length", "abort", "error"):
            self.expect("request_success_total", reasons[reason], reason)
        begun = [choice for choice in choices if choice.num_tokens or choice.finish_reason]
        self.expect("time_to_first_token_seconds_count", len(begun))
        firsts = [choice for choice in begun if choice.index % choice.body.n == 0]
        self.expect("prompt_tokens_total", sum(len(choice.prompt) for choice in firsts))
        self.expect("request_generation_tokens_sum", sum(choice.num_tokens for choice in ended))
