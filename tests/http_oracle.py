"""
What every client of simulator_http.py must have got, and what the metrics must say: by a reference
as plain as can be, which has each answer whole at once.
"""

import json
from collections import Counter
from types import SimpleNamespace

from scripted_engine import EOS, FakeChat, Violation, script
from wires import Answer

from server.gate import OPEN_PATHS


class Expected(SimpleNamespace):
    """
    Of one choice: text, finish_reason, stop_reason, num_tokens, logprobs (of the tokens, or None).
    """


def prompts_of(call: dict) -> list[list[int]]:
    body = call["body"]
    if "messages" in body:
        return [FakeChat().encode(body["messages"])]
    prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
    return [list(prompt.encode()) for prompt in prompts]


def count_of(call: dict) -> int:
    """How many choices a call asks for."""
    if not call["path"].endswith("completions"):
        return 0
    if "body" not in call:
        return 1  # a bad one, which may come as far as the queue
    return len(prompts_of(call)) * call["body"].get("n", 1)


def expected(call: dict, seed: int) -> list[Expected]:
    """All choices of a call, by an oracle as plain as can be."""
    body = call["body"]
    choices = []
    for number, prompt in enumerate(prompts_of(call)):
        own_seed = seed if body.get("seed") is not None else seed + number
        for choice in range(body.get("n", 1)):
            choices.append(one_expected(body, prompt, script(tuple(prompt), own_seed, choice)))
    return choices


def one_expected(body: dict, prompt: list[int], said: list[int]) -> Expected:
    tokens = []
    reason = "length"
    stop = None
    for token in said[: body["max_tokens"]]:
        tokens.append(token)
        if token == EOS and not body.get("ignore_eos"):
            reason = "stop"
            break
        text = bytes(t for t in tokens if t != EOS).decode("utf-8", "ignore")
        matched = [stop for stop in body.get("stop", ()) if stop in text]
        if matched:
            reason = "stop"
            end = min(text.index(stop) + len(stop) for stop in matched)
            stop = max((stop for stop in matched if text[:end].endswith(stop)), key=len)
            text = text[: end - len(stop)]
            break
    if stop is None:
        text = bytes(t for t in tokens if t != EOS).decode("utf-8", "replace")
    logprobs = None
    if body.get("logprobs") is not None:
        logprobs = [-0.5 - token for token in tokens]
    if body.get("echo"):
        text = bytes(prompt).decode() + text
        if logprobs is not None:
            logprobs = [None, *(-0.5 - token for token in prompt[1:]), *logprobs]
    ends = {"finish_reason": reason, "stop_reason": stop}
    return Expected(text=text, num_tokens=len(tokens), logprobs=logprobs, **ends)


def parse_answer(
    answer: Answer, call: dict
) -> tuple[dict[int, Expected], dict | None, dict | None, bool]:
    """
    What an answer of status 200 says: its choices by index, its usage, its error, and whether it
    says its end.
    """
    if not call["body"].get("stream"):
        content = json.loads(answer.body)
        choices = {choice["index"]: said_of(choice) for choice in content["choices"]}
        return choices, content["usage"], None, True
    choices = {}
    usage = error = None
    is_done = False
    events = answer.body.split("\n\n")
    for event in events[:-1]:  # what is behind the last blank line has not all come
        if event.startswith(": "):
            continue
        if is_done or error:
            raise Violation(f"call {call['id']}: something comes after the end: {event!r}")
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
            continue
        content = json.loads(data)
        error = content.get("error")
        usage = content.get("usage") or usage
        for choice in content.get("choices", ()):
            add(choices, choice["index"], said_of(choice))
    return choices, usage, error, is_done or error is not None


def said_of(choice: dict) -> Expected:
    """Of a whole answer or of a chunk."""
    content = choice.get("message") or choice.get("delta") or choice
    logprobs = choice["logprobs"]
    if logprobs is not None and "content" in logprobs:
        logprobs = [entry["logprob"] for entry in logprobs["content"]]
    elif logprobs is not None:
        logprobs = logprobs["token_logprobs"]
    text = content.get("text") or content.get("content") or ""
    ends = {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return Expected(text=text, logprobs=logprobs, **ends)


def add(choices: dict[int, Expected], index: int, more: Expected):
    """Put a chunk behind those before it."""
    if index not in choices:
        choices[index] = more
        return
    so_far = choices[index]
    if so_far.finish_reason is not None:
        raise Violation(f"choice {index} goes on after its end")
    so_far.text += more.text
    so_far.finish_reason = more.finish_reason
    so_far.stop_reason = more.stop_reason
    if more.logprobs is not None:
        so_far.logprobs = (so_far.logprobs or []) + more.logprobs


class Judge:
    """Of one call: whether what came of it may be."""

    def __init__(self, world, caller, call: dict, answer: Answer | None):
        self.world = world
        self.settings = world.settings
        self.caller = caller
        self.call = call
        self.answer = answer
        self.log = world.access.get(f"r{call['id']}", [])

    def wrong(self, what: str):
        raise Violation(f"call {self.call['id']}: {what}")

    def check(self):
        answer = self.answer
        if len(self.log) > 1:
            self.wrong(f"is logged {len(self.log)} times")
        if answer is None or not answer.whole:
            self.world.is_known = self.world.is_known and self.call["path"] not in OPEN_PATHS
            self.check_cut()
        if answer is None or answer.status is None:
            return
        self.world.seen[answer.status] += 1
        if answer.headers.get("x-request-id") != f"r{self.call['id']}":
            if answer.status == 503:
                return self.check_room()
            self.wrong(f"its answer is named {answer.headers.get('x-request-id')}")
        if self.log and self.log[0]["status"] != answer.status and self.log[0]["status"] != 499:
            self.wrong(f"the log says {self.log[0]['status']}, the client got {answer.status}")
        if answer.whole and not self.log and self.call["path"] not in OPEN_PATHS:
            self.wrong("has an answer, but is not logged")
        if answer.status >= 400 and self.call["path"] in OPEN_PATHS:
            self.world.refused[answer.status] += 1  # which is not logged
        if answer.status != 200:
            if answer.whole:
                self.check_error(answer.status, json.loads(answer.body)["error"])
        elif self.call.get("refused"):
            self.wrong(f"is served, wanted {self.call['refused']}")
        elif self.call["path"].endswith("completions"):
            self.check_completion()
            self.check_time()
        elif self.call["path"] == "/tokenize" and answer.whole:
            tokens = list(self.call["body"]["prompt"].encode())
            content = json.loads(answer.body)
            if content["tokens"] != tokens or content["count"] != len(tokens):
                self.wrong(f"wrong tokens {content}")
        elif self.call["path"] == "/livez" and answer.whole:
            self.check_alive()

    def check_room(self):
        """Its connection was one too many: the answer is to no call, and has an id of its own."""
        if len(self.world.beside(self.caller)) < self.settings["max_connections"]:
            self.wrong("is refused a connection, though there is room")

    def check_time(self):
        """
        No answer takes longer than --request-seconds, and none begins when the server has been
        stopped.
        """
        settings, caller = self.settings, self.caller
        stopped = self.world.stopped_at
        if stopped is not None and caller.began > stopped + 0.3 + self.world.pause:
            self.wrong(f"is served, {caller.began - stopped:.2f} s after the server was stopped")
        is_plain = caller.is_quick and len(caller.calls) == 1
        most = settings["request_seconds"] + 1.0
        most += settings["encode_seconds"] * len(self.world.callers)
        took = caller.ended_at - caller.began - 1000 * settings["turn_seconds"]
        if is_plain and self.answer.whole and took > most:
            self.wrong(f"took {took:.1f} s, at most {most:.1f} are allowed")

    def check_cut(self):
        """The answer is not there, or not all of it."""
        world, caller = self.world, self.caller
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
        choices, usage, error, is_over = parse_answer(self.answer, self.call)
        if self.answer.whole and not is_over:
            self.wrong("ends without an end")
        seed = self.call["body"].get("seed")
        if seed is None:
            seed = self.log[0].get("seed") if self.log else None
        if seed is None:
            return
        reference = dict(enumerate(expected(self.call, seed)))
        is_whole = self.answer.whole and not error
        if not set(choices) <= set(reference) or (is_whole and set(choices) != set(reference)):
            self.wrong(f"has choices {sorted(choices)}, wanted {sorted(reference)}")
        for index, choice in choices.items():
            self.compare(index, choice, reference[index], is_whole)
        if is_whole:
            self.check_usage(usage, list(reference.values()))
            self.world.seen["whole answers"] += 1
        if error:
            self.world.seen["error in a stream"] += 1
            status = {"engine_dead": 500, None: 500, "queue_full": 429}.get(error["code"], 503)
            self.check_error(status, error)

    def compare(self, index: int, choice: Expected, reference: Expected, is_whole: bool):
        ended = choice.finish_reason is not None
        if is_whole and not ended:
            self.wrong(f"choice {index} has no end")
        if not (choice.text == reference.text if ended else reference.text.startswith(choice.text)):
            self.wrong(f"choice {index} is {choice.text!r}, wanted {reference.text!r}")
        ends = choice.finish_reason, choice.stop_reason
        if ended and ends != (reference.finish_reason, reference.stop_reason):
            self.wrong(f"choice {index} ended by {ends}, wanted {reference}")
        logprobs = choice.logprobs or []
        all_wanted = reference.logprobs or []
        if logprobs != (all_wanted if ended else all_wanted[: len(logprobs)]):
            self.wrong(f"choice {index} has log-probabilities {logprobs}, wanted {all_wanted}")

    def check_usage(self, usage: dict | None, reference: list[Expected]):
        body = self.call["body"]
        asked = not body.get("stream") or body.get("stream_options", {}).get("include_usage")
        if not asked:
            if usage is not None:
                self.wrong("has a usage that was not asked for")
            return
        if usage is None:
            self.wrong("has no usage")
        prompts = prompts_of(self.call)
        counts = [sum(map(len, prompts)), sum(choice.num_tokens for choice in reference)]
        counts.append(sum(counts))
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        if [usage[name] for name in names] != counts:
            self.wrong(f"its usage is {usage}, wanted {counts}")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        most = sum(self.most_cached(prompt) for prompt in prompts)
        if cached > most:
            self.wrong(f"{cached} tokens are said to be cached, at most {most} can be")

    def most_cached(self, prompt: list[int]) -> int:
        """Tokens of the longest beginning that some other prompt of the same salt has."""
        salt = self.world.salt_of(self.call)
        calls = [call for call in self.world.calls.values() if self.world.salt_of(call) == salt]
        others = [other for call in calls for other in prompts_of(call) if other != prompt]
        return max((num_common(prompt, other) for other in others), default=0)

    def check_alive(self):
        """A dead or stalled engine makes no healthy server."""
        states = {"loading"}
        for at, state in self.world.states:
            if at <= self.caller.began:
                states = {state}
            elif at <= self.caller.ended_at:
                states.add(state)
        if states <= {"dead", "restarting"}:
            self.wrong(f"hears that all is well, the engine is {states}")

    def check_error(self, status: int, error: dict):
        """Each error needs its reason."""
        code, message = error["code"], error["message"]
        self.world.seen[f"{status} {code}"] += 1
        refused = self.call.get("refused")
        if status == refused:
            return
        if refused == 401 or not self.may_be(status, code, message):
            self.wrong(f"is refused with {status} {code} {message!r}, without a reason")

    def may_be(self, status: int, code: str | None, message: str) -> bool:
        world, caller = self.world, self.caller
        began, ended = caller.began, caller.ended_at
        stopped = world.stopped_at is not None and world.stopped_at <= ended
        states = [state for at, state in self.world.states if at <= ended]
        match status, code:
            case 503, "loading":
                return not any(s == "ready" and at < began for at, s in self.world.states)
            case 503, "restarting" | "dead":
                is_liveness = self.call["path"] == "/livez"
                if code in states or (is_liveness and "restarting" in states):
                    return True
                return "no step in" in message and world.pause > 0
            case 503, "stopping" if world.stopped_at is not None:
                return (
                    world.drained_at <= ended + 1e-6
                    and ended <= world.drained_at + 1.5 + world.pause
                )
            case 503, "draining" | "stopping":
                return stopped or "dead" in states
            case 503, "timeout":
                return (
                    ended - began > self.settings["request_seconds"] - 1e-6 and self.is_unfinished()
                )
            case 429, "encoder_busy":
                return True
            case 429, "queue_full":
                return self.may_be_full(message)
            case 400, None:
                return "in one call" in message and count_of(self.call) > self.world.most
            case 500, "engine_dead":
                return any(
                    state in ("restarting", "dead") and at >= began
                    for at, state in self.world.states
                )
            case 500, None:
                planned = "RuntimeError: planned" in message or "not numbers" in message
                return planned and self.call["id"] in world.failed
        return False

    def is_unfinished(self) -> bool:
        """The engine has not done all of it."""
        jobs = [job for job in self.world.jobs if job.call_id == f"r{self.call['id']}"]
        return any(not choice.finish_reason for job in jobs for choice in job.choices)

    def may_be_full(self, message: str) -> bool:
        """The most choices that other calls can have had in work meanwhile are counted."""
        others = self.world.beside(self.caller)
        return (
            sum(count_of(call) for caller in [self.caller, *others] for call in caller.calls)
            > self.world.most
        )


def num_common(a: list[int], b: list[int]) -> int:
    """How many tokens both begin with."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


class Books:
    """What an HTTP process counts, beside what its jobs say."""

    def __init__(self, world):
        self.world = world
        self.values: dict = {}
        for family in world.service.metrics.registry.collect():
            for sample in family.samples:
                label = sample.labels.get("finished_reason") or sample.labels.get("status")
                if "le" not in sample.labels:
                    self.values[sample.name.partition(":")[2], label] = sample.value

    def expect(self, name: str, expected: float, label: str | None = None):
        count = self.values.get((name, label), 0)
        if count != expected:
            what = f"{name} {label or ''}".strip()
            raise Violation(f"The HTTP process counts {what} as {count}, expected {expected}")

    def check(self):
        jobs = self.world.jobs
        choices = [choice for job in jobs for choice in job.choices]
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
        for name in ("e2e_request_latency_seconds", "request_decode_time_seconds"):
            self.expect(f"{name}_count", len(ended))
        self.expect("request_prompt_tokens_sum", sum(len(choice.prompt) for choice in ended))
        self.expect("request_generation_tokens_sum", sum(choice.num_tokens for choice in ended))
        self.expect("request_generation_tokens_count", len(ended))
        self.check_prompts(jobs)
        if not any(choice.body.stop or choice.body.max_tokens == 0 for choice in choices):
            self.expect("generation_tokens_total", sum(choice.num_tokens for choice in choices))
        for status, count in self.world.refused.items() if self.world.is_known else ():
            self.expect("requests_refused_total", count, str(status))

    def check_prompts(self, jobs: list):
        """Counted once all choices of a prompt have ended."""
        whole = []
        for job in jobs:
            n = job.body.n
            groups = [job.choices[i : i + n] for i in range(0, len(job.choices), n)]
            whole += [group for group in groups if all(choice.finish_reason for choice in group)]
        longest = sum(max(choice.num_tokens for choice in group) for group in whole)
        self.expect("request_max_num_generation_tokens_sum", longest)
        self.expect("request_max_num_generation_tokens_count", len(whole))
