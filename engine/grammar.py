"""
Answers that must follow a grammar: a JSON schema, a regular expression, choices, or rules.

    grammars = Grammars("out/stdlib", model.config)
    grammar = grammars.compile("json", '{"type": "object"}')       # takes milliseconds, at most 2 s
    engine.add_request("a", prompt, SamplingParams(max_tokens=99, grammar=grammar))

Check first, and compute a mask only on a miss. A token is sampled as the argmax of scores plus
noise, where the noise is a function of the request's seed and the position. So if the grammar
allows the winner among all tokens, the same token also wins among the allowed ones. A check takes 4
to 10 us, and a mask of the vocabulary takes 10 to 500 us. The mask is only computed if the grammar
refuses a token; the position is then sampled again (see `Constraints`). There is one exception:
top_k, top_p and min_p must only see tokens that the mask allows. With these filters, the next
position's mask is started as soon as a token is known.

llguidance interprets the grammars, each in a process of its own (matcher.py explains why).
Questions about the answers that follow a grammar are collected until a reply is needed, and are
then sent together. In a server, a `CompileQueue` reads the messages first. It has their grammars
compiled, and the clients take turns.
"""

import importlib
import marshal
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count
from pathlib import Path

import numpy as np

from engine.matcher import COUNT, END, MASK, MOST_BYTES, OFFER, STEP_MIB, STEP_SECONDS
from engine.step import STUCK, Answer, Stage, Step
from model import GPTConfig
from paged import Request
from params import NO_TOKEN

MASK_SECONDS = 0.002  # how long a step waits for verdicts; requests whose verdict is late sit out
COMPILE_POLL = 0.002  # how often, in seconds, an idle engine checks whether a grammar is compiled
KEPT_MIB = 256  # maximum total size of the compiled grammars that are kept
PROCESS_MIB = 4  # added to the size of each grammar to account for its process

NOTHING_ALLOWED = (
    "no token is left: the vocabulary has none of those that the grammar allows next, or "
    "min_tokens and logit_bias forbid them"
)
GONE = "the process that compiles grammars has ended: try again"
TOO_SLOW = (
    f"its grammar takes more than {1000 * STEP_SECONDS:.0f} ms for a token or {STEP_MIB} MB in "
    "all: make the grammar simpler"
)


class Refused(ValueError):
    """Raised for a grammar that is refused. `tools` has the numbers of any tools at fault."""

    def __init__(self, reason: str, tools: list[int]):
        super().__init__(f"this grammar cannot be used: {reason:.500}")
        self.tools = tools


class Grammars:
    """Compiles grammars for one model's requests. Raises ImportError without llguidance."""

    def __init__(self, directory: str | Path, config: GPTConfig):
        importlib.import_module("llguidance")
        model = [os.path.abspath(directory), config.vocab_size, *config.eos_token_ids]
        self.command = [sys.executable, "-m", "engine.matcher", *map(str, model)]
        self.kept: dict[tuple, Compiled] = {}  # arguments of `begin` -> grammar, LRU first
        self.unsent: list[Compiled] = []  # grammars with questions to send
        self.start()

    def start(self):
        """Start the fork server, which ends when its socket is closed."""
        self.sock, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        with theirs:
            self.process = subprocess.Popen(
                self.command,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
                process_group=0,  # so that Ctrl-C at a terminal only reaches the engine
            )

    def compile(self, *key: str) -> "Grammar":
        """
        Compile a grammar, and return its state at the beginning of an answer. Takes the same
        arguments as `begin`. Raises Refused with the library's reason.
        """
        compiled = self.begin(*key)
        while not (grammar := self.finish(compiled, soon())):
            pass
        return grammar

    def begin(self, kind: str, text: str, before: str = "") -> "Compiled":
        """
        Start compiling a grammar, unless it has been kept from an earlier request. `kind` is one of

            "json"      a JSON schema
            "regex"     a regular expression
            "choice"    a JSON list of strings
            "grammar"   rules in Lark's notation, or llama.cpp's (GBNF)
            "tools"     made by the server for tool calls (server/tools.py)

        `before` is a Lark grammar for the whole answer, in which `@answer` stands for the given
        grammar. If `before` is empty, the given grammar is for the whole answer. Raises OSError if
        no file descriptors or processes are left, or if the text is too long (more than about 400
        KB).
        """
        key = kind, text, before
        kept = self.kept.get(key)
        if kept and not kept.is_gone():
            return kept
        if self.process.poll() is not None:
            self.sock.close()
            self.start()
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        compiled = Compiled(key, ours, self.unsent)
        self.sock.settimeout(1)  # in case the fork server is too busy to read
        with theirs:
            socket.send_fds(self.sock, [marshal.dumps(key)], [theirs.fileno()])
        return compiled

    def finish(self, compiled: "Compiled", deadline: float = 0) -> "Grammar | None":
        """
        Return the compiled grammar and keep it for later requests. Return None if it has not been
        compiled by the deadline. Raises Refused if the grammar is refused, and OSError if the fork
        server has ended.
        """
        report = compiled.wait_for(compiled.report, deadline)
        if report is None:
            return None
        if isinstance(report, str):
            raise OSError(report)
        if len(report) == 2:
            raise Refused(*report)
        if self.kept.pop(compiled.key, None) is not compiled:  # later, it may have grown
            compiled.set_report(*report)
        self.kept[compiled.key] = compiled
        self.kept = {key: one for key, one in self.kept.items() if not one.is_gone()}
        while sum(one.size for one in self.kept.values()) > KEPT_MIB * 2**20:
            del self.kept[next(iter(self.kept))]
        return Grammar(compiled)

    def __del__(self):
        self.sock.close()
        self.process.wait()


@dataclass
class Question:
    """
    A question to a grammar's process (see matcher.py), and the `reply`. `reply` is None until it
    arrives. If the process ends without replying, `reply` is the reason (str).
    """

    id: int | None = None  # the answer's
    kind: int | None = None
    accepted: Iterable[int] = ()
    tokens: Iterable[int] = ()
    reply: int | bytes | str | tuple | None = None


class Compiled:
    """
    A grammar in a process of its own. The process compiles the grammar, then replies to questions
    about all answers that must follow it. The process ends when this object is garbage-collected.

    mask    the mask for the first position, [V / 32] int32
    size    bytes of the grammar, and of what its answers have left behind; updated when one ends
    """

    def __init__(self, key: tuple[str, ...], sock: socket.socket, unsent: list["Compiled"]):
        self.key = key
        self.sock = sock
        self.unsent = unsent  # shared by all grammars of one `Grammars` object
        self.outbox: list[Question] = []  # questions to send
        self.report = Question()
        self.pending = deque([self.report])  # questions sent; replies come in the same order
        self.ids = count()  # ids for answers
        self.limit = GONE  # the reason to give if the process ends

    def set_report(self, before: int, now: int, mask: bytes):
        # the part of the address space that does not count, because all forks share it
        self.not_counted = before - PROCESS_MIB * 2**20
        self.size = now - self.not_counted
        self.mask = np.frombuffer(mask, np.int32)
        self.limit = TOO_SLOW

    def ask(self, id: int, kind: int, accepted: list[int], tokens: list[int]) -> Question:
        """
        Queue a question about an answer, to be sent with the next message. Garbage collection may
        call this method, through `Grammar.__del__`, at any line that asks or sends.
        """
        question = Question(id, kind, accepted, tokens)
        if not self.outbox:
            self.unsent.append(self)
        self.outbox.append(question)
        return question

    def wait_for(self, question: Question, deadline: float):
        """Send the queued questions for all grammars. Returns the reply, or None if it is late."""
        while self.unsent:
            self.unsent.pop()._send()
        while question.reply is None and self._receive(max(0, deadline - time.monotonic())):
            pass
        return question.reply

    def _send(self):
        sent, self.outbox = self.outbox, []
        self.pending += sent
        message = [(one.id, one.kind, one.accepted, one.tokens) for one in sent]
        try:
            self.sock.settimeout(0)
            self.sock.send(marshal.dumps(message))
        except OSError:  # the process has ended or stopped reading
            self.sock.close()

    def _receive(self, seconds: float) -> bool:
        """
        Receive a message of replies. Returns False if none arrives in time. If the process has
        ended, every pending question gets the reason as its reply.
        """
        try:
            self.sock.settimeout(seconds)
            message = self.sock.recv(MOST_BYTES)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            message = b""
        if not message:
            self.sock.close()
        for reply in marshal.loads(message) if message else [self.limit] * len(self.pending):
            question = self.pending.popleft()
            question.reply = reply
            if question.kind == END and isinstance(reply, int):
                self.size = reply - self.not_counted
        return True

    def receive_all(self):
        """Receive all messages that have arrived."""
        while not self.is_closed and self._receive(0):
            pass

    def is_gone(self) -> bool:
        """Return whether the process has ended, because it exceeded its limits or was killed."""
        self.receive_all()
        return self.is_closed

    @property
    def is_closed(self) -> bool:
        return self.sock.fileno() < 0

    def __del__(self):
        self.sock.close()


class CompileQueue:
    """
    Has the grammars in messages compiled one at a time; owners take turns. A message waits until
    its grammar has been compiled. Messages without a grammar overtake it. `open_grammars` is called
    when the first grammar arrives.
    """

    def __init__(self, open_grammars: Callable[[], Grammars]):
        self.open_grammars = cache(open_grammars)
        # owner -> messages. Owners are in the order of their turns. The grammar of the first
        # owner's first message is being compiled.
        self.waiting: dict[str, list[dict]] = {}
        self.compiled: Compiled | None = None

    def pass_on(self, arrived: Iterable[dict]) -> Iterator[dict]:
        """
        Yield the messages that can be handled now. In these messages, a grammar's arguments
        ({"kind", "text"}) have been replaced with a finished Future.
        """
        for message in arrived:
            if message.get("grammar"):
                self.waiting.setdefault(message["owner"], []).append(message)
                continue
            if message["op"] == "abort":
                self._forget(message["id"])
            yield message
        while self.waiting:
            owner, [message, *others] = next(iter(self.waiting.items()))
            if message["grammar"] and not self._compile(message):
                return
            self.compiled = None  # a process that is still compiling ends when it is dropped
            del self.waiting[owner]
            if others:
                self.waiting[owner] = others  # at the end of the queue
            if message["grammar"]:
                yield message

    def _compile(self, message: dict) -> bool:
        """Start or continue compiling a message's grammar. Returns whether compilation is done."""
        outcome = Future()
        try:
            grammars = self.open_grammars()
            self.compiled = self.compiled or grammars.begin(**message["grammar"])
            grammar = grammars.finish(self.compiled)
            if not grammar:
                return False
            outcome.set_result(grammar)
        except (ValueError, ImportError, OSError) as error:
            outcome.set_exception(error)
        message["grammar"] = outcome
        return True

    def _forget(self, id: str):
        """Drop the grammar of an aborted request, so that it is not compiled."""
        for message in chain(*self.waiting.values()):
            if message["id"] == id:  # its turn may be minutes away, so drop its long parts now
                message |= {"grammar": None, "prompt": None}


class Grammar:
    """
    The parser state of one answer, after all of its known tokens. The matcher itself runs in the
    grammar's process, with which this object exchanges messages. Only the reply to the last
    question counts.

    mask          the mask for the next position, [V / 32] int32; None if not computed
    wants_mask    whether the mask has been started; if so, no token is accepted until it is known
    """

    def __init__(self, compiled: Compiled):
        self.compiled = compiled
        self.id = next(compiled.ids)
        self.mask = compiled.mask
        self.wants_mask = True
        self.accepted: list[int] = []  # accepted tokens that have not been sent to the process yet
        self.offered: int | None = None  # the token that was offered last
        self.question: Question | None = None  # the last question
        self.failure = STUCK + NOTHING_ALLOWED  # the reason if no token may come next

    def copy(self) -> "Grammar":
        """Return the state for another answer, at its beginning."""
        return Grammar(self.compiled)

    def offer(self, token: int):
        """Ask whether this token may come next, unless a mask has been started. See `accept`."""
        if not self.wants_mask:
            self.offered = token
            self._ask(OFFER, [token])

    def accept(self, token: int, deadline: float | None = None) -> bool:
        """
        Append this token if it is allowed, and return whether it is. A refusal comes with the mask.
        A verdict that misses the deadline (by default, MASK_SECONDS from now) counts as a refusal
        without a mask. The caller must then start a mask, or offer the token again.
        """
        if self.wants_mask:
            is_allowed = self.has_mask() and bool(self.mask[token >> 5] >> (token & 31) & 1)
        else:
            if self.offered != token:
                self.offer(token)
            reply = self.compiled.wait_for(self.question, deadline or soon())
            is_allowed = reply == 1
            self.wants_mask = reply is not None and not is_allowed
            self.offered = None
        if is_allowed:
            self.accepted.append(token)
            self.mask = None
            self.wants_mask = False
        return is_allowed

    def allowed_part(self, draft: list[int]) -> list[int]:
        """
        Return the tokens of a draft that precede the first refused one. Return [] if a mask has
        been started.
        """
        if self.wants_mask:
            return []
        self._ask(COUNT, draft)
        reply = self.compiled.wait_for(self.question, soon())
        return draft[:reply] if isinstance(reply, int) else []

    def begin_mask(self):
        """Start computing the mask for the next position, unless it has already been started."""
        if not self.wants_mask:
            self.wants_mask = True
            self._ask(MASK, [])

    def has_mask(self, deadline: float = 0) -> bool:
        """Return whether a started mask is known by the deadline (by default, now)."""
        if self.wants_mask and self.mask is None:
            reply = self.compiled.wait_for(self.question, deadline)
            if isinstance(reply, bytes):
                self.mask = np.frombuffer(reply, np.int32)
            elif reply is not None:
                self.mask = np.zeros_like(self.compiled.mask)
                self.failure = STUCK + (reply or NOTHING_ALLOWED)
        return self.mask is not None

    def _ask(self, kind: int, tokens: list[int]):
        self.question = self.compiled.ask(self.id, kind, self.accepted, tokens)
        self.accepted = []

    def __del__(self):
        self.compiled.ask(self.id, END, [], [])


def soon() -> float:
    """Return the deadline for a step that now starts waiting for verdicts or masks."""
    return time.monotonic() + MASK_SECONDS


# --------------------------------------------------------------------------------------------------
# The stage: how grammars act on the engine's steps


class Constraints(Stage):
    """
    Applies the grammars of an engine's requests. A refused token is taken back, and its request
    sits out (status "paused") until the mask has been computed. Other requests never wait for the
    mask.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self.grammars: dict[Request, Grammar] = {}
        self.num_checked = 0  # tokens that grammars have checked
        self.num_refused = 0  # tokens that grammars have refused

    def added(self, request: Answer):
        if request.params.grammar:
            self.grammars[request] = request.params.grammar.copy()

    def ended(self, request: Answer):
        self.grammars.pop(request, None)

    def connect(self, link, directory: str):
        self.queue = CompileQueue(partial(Grammars, directory, self.engine.config))

    def due_in(self) -> float | None:
        return COMPILE_POLL if self.queue.waiting else None

    def arrived(self, messages: Iterable[dict]) -> Iterable[dict]:
        return self.queue.pass_on(messages)

    def begin(self):
        """
        Resume the requests whose masks have been computed. With filters, every token needs a mask,
        which can only be computed once the previous token is known. With overlap, that token has
        not arrived yet, so the request sits out after every token.
        """
        if not self.grammars:
            return
        scheduler = self.engine.scheduler
        for r in self.grammars:
            if r.params.filters and r.status == "active" and r.num_to_come:
                scheduler.move(r, "paused")
        # the mask of each was started when its token was refused or, with filters, when the
        # previous token became known
        ready = [r for r in self._sitting_out() if self.grammars[r].has_mask()]
        for r in ready:
            scheduler.move(r, "active")
        if ready:
            self.engine.device.fill_rows(*ready)

    def _sitting_out(self) -> list[Request]:
        """
        Return the requests that are only waiting for a mask: all tokens before its position are
        known.
        """
        return [r for r in self.engine.scheduler.paused if not r.num_to_come]

    def planned(self, step: Step):
        """
        Cut each draft before its first forbidden guess, and choose the requests that are sampled
        with a mask. If there is nothing else to do, wait for a mask first.
        """
        step.notes[self] = []
        if not self.grammars:
            return
        sitting_out = self._sitting_out()
        if sitting_out and not step.plan.work and not self.engine.in_flight:
            self.grammars[sitting_out[0]].has_mask(soon())
        guesses = step.plan.guesses
        for r in [r for r in guesses if r in self.grammars]:
            guesses[r] = self.grammars[r].allowed_part(guesses[r])
            self.engine.scheduler.shorten(r, r.num_tokens + len(guesses[r]))
            if not guesses[r]:
                del guesses[r]
        constrained = [r for r in step.plan.sampled if r in self.grammars]
        # while a request's token is still to come, its mask is for that token
        step.notes[self] = [
            r for r in constrained if not r.num_to_come and self.grammars[r].has_mask()
        ]

    def launched(self, step: Step):
        masked = step.notes[self]
        if masked:
            self._sample_masked(step, dict.fromkeys(masked, 0))

    def _sample_masked(self, step: Step, requests: dict[Request, int]):
        masks = [self.grammars[r].mask for r in requests]
        self.engine.device.sample_masked(step.launched, requests, masks)

    def settled(self, step: Step):
        """
        Check the step's tokens before the scheduler gets them. If a token is refused, or its
        verdict is late, the token and all tokens after it are removed. Without overlap, the logits
        still exist, so the position is sampled again if its mask arrives in time. Otherwise, the
        request sits out until the mask has been computed.
        """
        if not self.grammars:
            return
        for r in step.notes[self]:
            if step.tokens.get(r) == [NO_TOKEN]:
                step.failed[r] = self.grammars[r].failure
        sampled = step.tokens.items()
        checked = [r for r, new in sampled if r in self.grammars and NO_TOKEN not in new]
        for r in checked:
            self.grammars[r].offer(step.tokens[r][0])
        deadline = soon()
        refused = [r for r in checked if not self._check(r, step, deadline)]
        self.num_checked += len(checked)
        self.num_refused += len(refused)
        for r in refused:
            self.grammars[r].begin_mask()
        in_time = [r for r in refused if not self.engine.overlap and self.grammars[r].has_mask()]
        if in_time:
            self._sample_again(step, in_time)
        for r in refused:
            if r not in in_time:
                self._send_back(r)
        for r in checked:
            if r.params.filters:
                self.grammars[r].begin_mask()

    def _check(self, r: Request, step: Step, deadline: float) -> bool:
        """
        Cut a request's tokens before the first refused one. Returns False if it must be sent back.
        """
        grammar = self.grammars[r]
        tokens = step.tokens[r]
        is_masked = r in step.notes[self]
        # once a mask has been started for a position, no token is accepted without it
        can_count = is_masked or not grammar.wants_mask
        n = 0
        while can_count and n < len(tokens) and grammar.accept(tokens[n], deadline):
            n += 1
        if n == len(tokens):
            return True
        step.tokens[r] = tokens[:n]
        if is_masked:
            step.failed[r] = grammar.failure
        return is_masked

    def _sample_again(self, step: Step, requests: list[Request]):
        """Sample one token with a mask for each request, to follow the tokens that it keeps."""
        kept = {r: len(step.tokens[r]) for r in requests}
        self._sample_masked(step, kept)
        index_of = step.launched.token_indices()
        sampled = step.launched.tokens.tolist()
        for r, n in kept.items():
            token = sampled[index_of[r] + n]
            if token == NO_TOKEN or not self.grammars[r].accept(token):
                step.failed[r] = self.grammars[r].failure
            step.tokens[r].append(token)

    def _send_back(self, r: Request):
        """
        Make a request sit out, and drop its token from the next step if that step is in flight.
        """
        later = self.engine.in_flight
        if later:
            later.dropped.add(r)
        if r.row is not None:  # it has not been preempted since
            self.engine.scheduler.move(r, "paused")
