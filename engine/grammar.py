"""
Answers held to a grammar: a JSON schema, a regular expression, a choice, or rules.

    grammars = Grammars("out/stdlib", model.config)
    grammar = grammars.compile("json", '{"type": "object"}')       # milliseconds, at most 2 s
    engine.add_request("a", prompt, SamplingParams(max_tokens=99, grammar=grammar))

Check first, mask on a miss. A token is sampled as the argmax of scores plus noise, where the noise
is a function of the request's seed and the position. So if the grammar allows the winner among all
tokens, it is also the winner among the allowed ones, bit for bit. To ask costs 4 to 10 us, a mask
of the vocabulary 10 to 500. Only where the grammar refuses a token is the mask computed, and the
position sampled again (`Constraints`). top_k, top_p and min_p choose among what a mask leaves: with
them, the next position's mask is begun as soon as a token is known.

llguidance reads the grammars, in processes of its own (matcher.py says why). Questions about the
answers of a grammar gather until the first of them waits, and are sent together. A `CompileQueue`
looks at the messages of the server's loop first, and has their grammars compiled, by turns of their
clients.
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
from functools import cache, partial
from itertools import chain, count
from pathlib import Path

import numpy as np

from engine.matcher import (
    COUNT,
    END,
    MASK,
    MOST_BYTES,
    OFFER,
    STEP_MIB,
    STEP_SECONDS,
)
from engine.step import STUCK, Answer, Stage, Step
from model import GPTConfig
from paged import Request
from params import NO_TOKEN

MASK_SECONDS = 0.002  # how long a step waits for verdicts; the late sit out
COMPILE_POLL = 0.002  # seconds between two looks of an idle engine whether a grammar is compiled
KEPT_MIB = 256  # of compiled grammars, together
PROCESS_MIB = 4  # of a kept grammar: its process has as much beside it

NOTHING_ALLOWED = "no token is left: of those that the grammar allows next, the vocabulary has none"
NOTHING_ALLOWED += ", or min_tokens and logit_bias forbid them"
GONE = "the process that compiles grammars has ended: try again"
TOO_SLOW = f"its grammar takes more than {1000 * STEP_SECONDS:.0f} ms for a token or {STEP_MIB} MB "
TOO_SLOW += "in all: make the grammar simpler"


class Refused(ValueError):
    """A grammar is refused. `tools`: numbers of those that are at fault, if it is of tools."""

    def __init__(self, reason: str, tools: list[int]):
        super().__init__(f"this grammar cannot be served: {reason:.500}")
        self.tools = tools


class Grammars:
    """Compiles the grammars of one model's requests. Raises ImportError without llguidance."""

    def __init__(self, directory: str | Path, config: GPTConfig):
        importlib.import_module("llguidance")
        model = [os.path.abspath(directory), config.vocab_size, *config.eos_token_ids]
        self.command = [sys.executable, "-m", "engine.matcher", *map(str, model)]
        self.kept: dict[tuple, Compiled] = {}  # by their texts, the least recently used first
        self.unsent: list[Compiled] = []  # those that have something to send
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
                process_group=0,  # Ctrl-C at a terminal is the engine's
            )

    def compile(self, *key: str) -> "Grammar":
        """
        Compile a grammar. It stands at the beginning, and is kept to be copied. The arguments are
        those of `begin`. Raises Refused with the library's reason.
        """
        compiled = self.begin(*key)
        while not (grammar := self.finish(compiled, soon())):
            pass
        return grammar

    def begin(self, kind: str, text: str, before: str = "") -> "Compiled":
        """
        Begin to compile a grammar, unless it is kept. `kind`: "json", a schema; "regex"; "choice",
        a JSON list of texts; "grammar", in Lark's notation or llama.cpp's (GBNF); "tools", the
        server's own (server/tools.py). `before`: Lark for all of an answer, in which the grammar is
        `@answer`; none: it is all. Raises OSError: no files, no processes, or a text of 400 KB.
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
        self.sock.settimeout(1)  # it has been sent more than it could take
        with theirs:
            socket.send_fds(self.sock, [marshal.dumps(key)], [theirs.fileno()])
        return compiled

    def finish(self, compiled: "Compiled", deadline: float = 0) -> "Grammar | None":
        """
        Keep what was compiled and return it, or None if it is not compiled by the deadline. Raises
        Refused, and OSError if the fork server has ended.
        """
        report = compiled.wait_for(compiled.report, deadline)
        if report is None:
            return None
        if isinstance(report, str):
            raise OSError(report)
        if len(report) == 2:
            raise Refused(*report)
        compiled.set_report(*report)
        self.kept.pop(compiled.key, None)
        self.kept[compiled.key] = compiled
        for one in self.kept.values():
            one.receive_all()
        while sum(one.size for one in self.kept.values()) > KEPT_MIB * 2**20:
            del self.kept[next(iter(self.kept))]
        return Grammar(compiled)

    def __del__(self):
        self.sock.close()
        self.process.wait()


class Question:
    """`reply`: None until it comes. It is text if the process has ended: why."""

    def __init__(self, kind: int | None = None):
        self.kind = kind
        self.reply: int | bytes | str | tuple | None = None


class Compiled:
    """
    A grammar in a process. The process compiles it, then replies to questions about all answers
    that follow it, and ends when nothing refers to this object.

    mask    of the first position, [V / 32] int32
    size    bytes that it takes with all that its answers left, told when one of them ends
    """

    def __init__(self, key: tuple[str, ...], sock: socket.socket, unsent: list["Compiled"]):
        self.key = key
        self.sock = sock
        self.unsent = unsent  # shared with other grammars
        self.outbox: list[tuple] = []
        self.report = Question()
        self.asked = deque([self.report])  # replies come in this order
        self.ids = count()  # of answers
        self.limit = GONE  # the reason if its process ends

    def set_report(self, before: int, now: int, mask: bytes):
        self.not_counted = before - PROCESS_MIB * 2**20  # of the address space
        self.size = now - self.not_counted
        self.mask = np.frombuffer(mask, np.int32)
        self.limit = TOO_SLOW

    def ask(self, id: int, kind: int, came: list[int], asked: list[int]) -> Question:
        """Ask about an answer (see matcher.py), with the next message."""
        if not self.outbox:
            self.unsent.append(self)
        self.outbox.append((id, kind, came, asked))
        self.asked.append(Question(kind))
        return self.asked[-1]

    def wait_for(self, question: Question, deadline: float):
        """Have all grammars send their messages. Return the reply, or None if it is late."""
        while self.unsent:
            self.unsent.pop()._send()
        while question.reply is None and self._receive(max(0, deadline - time.monotonic())):
            pass
        return question.reply

    def _send(self):
        message = marshal.dumps(self.outbox)
        self.outbox = []
        try:
            self.sock.settimeout(0)
            self.sock.send(message)
        except OSError:  # it has ended, or reads no more
            self.sock.close()

    def _receive(self, seconds: float) -> bool:
        """Take a message of replies. Returns whether one came in time, or none will ever come."""
        try:
            self.sock.settimeout(seconds)
            message = self.sock.recv(MOST_BYTES)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            message = b""
        if not message:
            self.sock.close()
        for reply in marshal.loads(message) if message else [self.limit] * len(self.asked):
            question = self.asked.popleft()
            question.reply = reply
            if question.kind == END and isinstance(reply, int):
                self.size = reply - self.not_counted
        return True

    def receive_all(self):
        """Take all messages that have come."""
        while not self.is_closed and self._receive(0):
            pass

    def is_gone(self) -> bool:
        """Return whether its process has ended: it exceeded its limits, or was killed."""
        self.receive_all()
        return self.is_closed

    @property
    def is_closed(self) -> bool:
        return self.sock.fileno() < 0

    def __del__(self):
        self.sock.close()


class CompileQueue:
    """
    Has the grammars of messages compiled, one at a time, by turns of their owners. A message waits
    for its own, the others go by. `open_grammars` makes the `Grammars` for the first.
    """

    def __init__(self, open_grammars: Callable[[], Grammars]):
        self.open_grammars = cache(open_grammars)
        # messages by owner, in the order of turns: the first of the first is being compiled
        self.waiting: dict[str, list[dict]] = {}
        self.compiled: Compiled | None = None

    def pass_on(self, arrived: Iterable[dict]) -> Iterator[dict]:
        """
        Yield the messages that can be handled now. The grammar of a message, {"kind", "text"}, is
        replaced by a Future that is done.
        """
        for message in arrived:
            if message.get("grammar"):
                self.waiting.setdefault(message["owner"], []).append(message)
                continue
            if message["op"] == "abort":
                self._forget(message["id"])
            yield message
        while self.waiting:
            message = next(iter(self.waiting.values()))[0]
            if message["grammar"] and not self._compile(message):
                return
            self._end_turn()
            if message["grammar"]:
                yield message

    def _compile(self, message: dict) -> bool:
        """Begin to compile a message's grammar, or go on. Returns whether this is done."""
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

    def _end_turn(self):
        """Move the owner whose turn it was to the end, after all who came meanwhile."""
        self.compiled = None  # a process that still compiles ends at once
        owner = next(iter(self.waiting))
        _, *others = self.waiting.pop(owner)
        if others:
            self.waiting[owner] = others

    def _forget(self, id: str):
        """Drop the grammar of an aborted request, so that its turn takes no time."""
        for message in chain(*self.waiting.values()):
            if message["id"] == id:
                message["grammar"] = None


class Grammar:
    """
    The parser state of one answer, after all its known tokens. The matcher is in the grammar's
    process, which is asked with messages; only the reply to the last question counts.

    mask          of the next position, [V / 32] int32; None: not computed
    wants_mask    the mask was begun: no token counts without it
    """

    def __init__(self, compiled: Compiled):
        self.compiled = compiled
        self.id = next(compiled.ids)
        self.mask = compiled.mask
        self.wants_mask = True
        self.accepted: list[int] = []  # tokens that the process does not know yet
        self.offered: int | None = None  # the token that was asked about
        self.question: Question | None = None  # the last
        self.failure = STUCK + NOTHING_ALLOWED  # why no token may come next

    def copy(self) -> "Grammar":
        """Return the state of another answer, at its beginning."""
        return Grammar(self.compiled)

    def offer(self, token: int):
        """Ask whether this token may come next, unless a mask was begun. See `accept`."""
        if not self.wants_mask:
            self.offered = token
            self._ask(OFFER, [token])

    def accept(self, token: int, deadline: float | None = None) -> bool:
        """
        Append this token if it is allowed. A refusal brings the mask. A verdict that is late
        (default: MASK_SECONDS from now) counts as a refusal without a mask: after it a mask must be
        begun, or the token offered again.
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
        """Return the first tokens of a draft, up to one that is refused; [] after begin_mask."""
        if self.wants_mask:
            return []
        self._ask(COUNT, draft)
        reply = self.compiled.wait_for(self.question, soon())
        return draft[:reply] if isinstance(reply, int) else []

    def begin_mask(self):
        """Have the mask of the next position computed, unless it was begun."""
        if not self.wants_mask:
            self.wants_mask = True
            self._ask(MASK, [])

    def has_mask(self, deadline: float = 0) -> bool:
        """Return whether a mask that was begun is there by the deadline, by default now."""
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
    """Return the time until which a step waits for verdicts and masks."""
    return time.monotonic() + MASK_SECONDS


# --------------------------------------------------------------------------------------------------
# The stage: what grammars do to the engine's steps


class Constraints(Stage):
    """
    The grammars of an engine's requests. A request whose token is refused goes back by that token.
    It is held, and sits out, until its mask is computed: the others never wait for it.
    """

    def __init__(self, engine):
        super().__init__(engine)
        self.grammars: dict[Request, Grammar] = {}
        self.num_checked = 0  # tokens that grammars were asked about, and that they refused
        self.num_refused = 0

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
        Let the requests go on whose masks are computed. A mask before filters needs the token
        before it, which with overlap is not known yet: then a request is held from one token to the
        next.
        """
        if not self.grammars:
            return
        scheduler = self.engine.scheduler
        for r in self.grammars:
            if r.params.filters and r.status == "active" and r.num_to_come:
                scheduler.move(r, "paused")
        # the mask of each was begun: with the refusal of its token, or with the token before it
        ready = [r for r in self._sitting_out() if self.grammars[r].has_mask()]
        for r in ready:
            scheduler.move(r, "active")
        if ready:
            self.engine.device.fill_rows(*ready)

    def _sitting_out(self) -> list[Request]:
        """
        Return the requests that wait for the mask of a position, where all tokens before it are
        known.
        """
        return [r for r in self.engine.scheduler.paused if not r.num_to_come]

    def planned(self, step: Step):
        """
        Drop guesses from the first that is forbidden on; choose who is sampled with a mask. Waits
        for a mask if there is nothing else to do.
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
        held_to = [r for r in step.plan.sampled if r in self.grammars]
        # while a token is to come, the mask belongs to that token
        masked = [r for r in held_to if not r.num_to_come and self.grammars[r].has_mask()]
        step.notes[self] = masked

    def launched(self, step: Step):
        masked = step.notes[self]
        if masked:
            self._sample_masked(step, dict.fromkeys(masked, 0))

    def _sample_masked(self, step: Step, requests: dict[Request, int]):
        masks = [self.grammars[r].mask for r in requests]
        self.engine.device.sample_masked(step.launched, requests, masks)

    def settled(self, step: Step):
        """
        Ask the grammars about the step's tokens, before the scheduler sees them. If a token is
        refused, or its verdict is late, it and those after it are taken away. Without overlap its
        logits still exist, so its position is sampled again if the mask comes in time. Otherwise
        the request is held until the mask of that position is computed.
        """
        if not self.grammars:
            return
        for r in step.notes[self]:
            if step.tokens.get(r) == [NO_TOKEN]:
                step.failed[r] = self.grammars[r].failure
        sampled = step.tokens.items()
        asked = [r for r, new in sampled if r in self.grammars and NO_TOKEN not in new]
        for r in asked:
            self.grammars[r].offer(step.tokens[r][0])
        deadline = soon()
        refused = [r for r in asked if not self._check(r, step, deadline)]
        self.num_checked += len(asked)
        self.num_refused += len(refused)
        for r in refused:
            self.grammars[r].begin_mask()
        in_time = [r for r in refused if not self.engine.overlap and self.grammars[r].has_mask()]
        if in_time:
            self._sample_again(step, in_time)
        for r in refused:
            if r not in in_time:
                self._send_back(r)
        for r in asked:
            if r.params.filters:
                self.grammars[r].begin_mask()

    def _check(self, r: Request, step: Step, deadline: float) -> bool:
        """Cut a request's tokens before the first that is refused. Returns whether none is."""
        grammar = self.grammars[r]
        tokens = step.tokens[r]
        is_masked = r in step.notes[self]
        # once a mask was begun for a position, no token counts without it
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
        """Sample from the step's logits, with masks, one token after those that each keeps."""
        kept = {r: len(step.tokens[r]) for r in requests}
        self._sample_masked(step, kept)
        place_of = step.launched.place_of()
        sampled = step.launched.tokens.tolist()
        for r, n in kept.items():
            token = sampled[place_of[r] + n]
            if token == NO_TOKEN or not self.grammars[r].accept(token):
                step.failed[r] = self.grammars[r].failure
            step.tokens[r].append(token)

    def _send_back(self, r: Request):
        """It sits out, and no later step under way counts for it."""
        later = self.engine.in_flight
        if later:
            later.dropped.add(r)
        if r.row is not None:  # not preempted since
            self.engine.scheduler.move(r, "paused")
