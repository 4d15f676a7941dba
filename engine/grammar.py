"""
Answers held to a grammar: a JSON schema, a regular expression, a choice, or rules.

    grammars = Grammars("out/stdlib", model.config)
    grammar = grammars.compile("json", '{"type": "object"}')       # milliseconds, at most 2 s
    engine.add_request("a", prompt, SamplingParams(max_tokens=99, grammar=grammar))

Check first, mask on a miss. A token is sampled as the argmax of scores plus noise, where the noise
is a function of the request's seed and the position. So if the grammar allows the winner among all
tokens, it is the winner among the allowed ones, too, bit for bit. To ask costs 20 us, a mask of the
vocabulary 10 to 500. Only where the grammar refuses a token is the mask computed, and the position
sampled again (`Engine._check_grammars`). top_k, top_p and min_p choose among what a mask leaves:
with them, the next position's mask is begun as soon as a token is known.

llguidance reads the grammars, in processes of its own (matcher.py says why). Questions about the
answers of a grammar gather until the first of them waits, and are sent together. A `Compiler`
stands before the server's loop, and has the grammars of its messages compiled, by turns of their
clients.
"""

import importlib
import json
import marshal
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np

from engine.matcher import (
    COMPILE_MIB,
    COMPILE_SECONDS,
    COUNT,
    END,
    MASK,
    MOST_BYTES,
    OFFER,
    STEP_MIB,
    STEP_SECONDS,
)
from model import GPTConfig

MASK_SECONDS = 0.002  # how long a step waits for verdicts, then for masks; the late sit out
KEPT_MIB = 256  # of compiled grammars, together
PROCESS_MIB = 2  # of a kept grammar: its process has as much beside it

STUCK = "the answer cannot go on: "  # begins messages of errors that are not the server's fault
NOTHING_ALLOWED = "no token is left: of those that the grammar allows next, the vocabulary has none"
NOTHING_ALLOWED += ", or min_tokens and logit_bias forbid them"
TOO_LARGE = f"compiling it takes more than {COMPILE_SECONDS} s or {COMPILE_MIB} MB: make it smaller"
TOO_SLOW = f"its grammar takes more than {1000 * STEP_SECONDS:.0f} ms for a token or {STEP_MIB} MB "
TOO_SLOW += "in all: make the grammar simpler"


class Grammars:
    """Compiles the grammars of one model's requests. Raises ImportError without llguidance."""

    def __init__(self, directory: str | Path, config: GPTConfig):
        importlib.import_module("llguidance")
        model = [os.path.abspath(directory), config.vocab_size, *config.eos_token_ids]
        self.command = [sys.executable, "-m", "engine.matcher", *map(str, model)]
        self.kept: dict[tuple, Compiled] = {}  # by kind and text, the least recently used first
        self.unsent: list[Compiled] = []  # those that have something to send
        self.start()

    def start(self):
        """Start the fork server, which ends when its socket is closed."""
        self.sock, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                self.command,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
                process_group=0,  # Ctrl-C at a terminal is the engine's
            )

    def compile(self, kind: str, text: str) -> "Grammar":
        """
        `kind`: "json", a schema; "regex"; "choice", a JSON list of texts; "grammar", in Lark's
        notation or llama.cpp's (GBNF); "lark", the server's own (server/tools.py). It stands at the
        beginning, and is kept to be copied. Raises ValueError with the library's reason.
        """
        compiled = self.begin(kind, text)
        while not compiled.wait(soon()):
            pass
        return self.finish(compiled)

    def begin(self, kind: str, text: str) -> "Compiled":
        """Begin to compile a grammar, unless it is kept. Raises OSError: no files, no processes."""
        key = kind, text
        kept = self.kept.get(key)
        if kept and not kept.is_gone():
            return kept
        if self.process.poll() is not None:
            self.sock.close()
            self.start()
        return Compiled(key, self.sock, self.unsent)

    def finish(self, compiled: "Compiled") -> "Grammar":
        """Keep what was compiled, and return it. Raises ValueError if it was refused."""
        if compiled.mask is None:
            raise ValueError(f"this grammar cannot be served: {compiled.reason:.500}")
        self.kept.pop(compiled.key, None)
        self.kept[compiled.key] = compiled
        while sum(one.size for one in self.kept.values()) > KEPT_MIB * 2**20:
            del self.kept[next(iter(self.kept))]
        return Grammar(compiled)

    def __del__(self):
        self.sock.close()
        self.process.wait()


def receive(sock: socket.socket, seconds: float) -> bytes | None:
    """Return the next message: b"" where the process has ended, None if none comes in time."""
    sock.settimeout(seconds)
    try:
        return sock.recv(MOST_BYTES)
    except (BlockingIOError, TimeoutError):
        return None
    except OSError:
        return b""


class Question:
    """`reply`: None until it comes; b"" if the process has ended."""

    reply: bytes | None = None


class Compiled:
    """
    A grammar in a process, which compiles it, and then answers questions about all answers that are
    held to it. It ends when nothing refers to this object.

    mask      of the first position, [V / 32] int32; None while it is not compiled, or was refused
    reason    why it was refused
    size      bytes that it takes
    """

    def __init__(self, key: tuple[str, str], server: socket.socket, unsent: list["Compiled"]):
        self.key = key
        self.unsent = unsent  # shared with other grammars
        self.outbox: list[tuple] = []
        self.report = Question()
        self.asked = deque([self.report])  # replies come in this order
        self.ids = count()  # of answers
        self.has_ended = False
        self.mask: np.ndarray | None = None
        self.reason = TOO_LARGE
        self.size = 0
        self.sock, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        server.settimeout(1)  # it has been sent more than it could take
        with theirs, open(os.memfd_create("grammar"), "w+") as file:
            json.dump(dict(zip(("kind", "text"), key, strict=True)), file)
            file.seek(0)
            socket.send_fds(server, [b"+"], [theirs.fileno(), file.fileno()])

    def wait(self, deadline: float) -> bool:
        """Wait until it is compiled or refused. Returns whether it is."""
        is_done = self.wait_for(self.report, deadline)
        report = self.report.reply or b""
        if report.startswith(b"+"):
            self.size = int.from_bytes(report[1:9], "little") + PROCESS_MIB * 2**20
            self.mask = np.frombuffer(report[9:], np.int32)
        elif report:
            self.reason = report[1:].decode(errors="replace")
        return is_done

    def ask(self, id: int, kind: int, came: list[int], asked: list[int]) -> Question:
        """Ask about an answer (see matcher.py), with the next message."""
        question = Question()
        self.asked.append(question)
        self._post((id, kind, came, asked))
        return question

    def end(self, id: int):
        """An answer is gone."""
        self._post((id, END, [], []))

    def _post(self, entry: tuple):
        if not self.outbox:
            self.unsent.append(self)
        self.outbox.append(entry)

    def wait_for(self, question: Question, deadline: float) -> bool:
        """Have all grammars send their messages, and wait for a reply. Returns whether it came."""
        while self.unsent:
            self.unsent.pop()._send()
        while question.reply is None:
            if not self._receive(max(0, deadline - time.monotonic())):
                return False
        return True

    def _send(self):
        message = marshal.dumps(self.outbox)
        self.outbox = []
        self.sock.settimeout(0)
        try:
            self.sock.send(message)
        except OSError:  # it has ended, or reads no more
            self.has_ended = True

    def _receive(self, seconds: float) -> bool:
        """Take a message of replies. Returns whether one came in time."""
        message = b"" if self.has_ended else receive(self.sock, seconds)
        if message is None:
            return False
        self.has_ended = not message
        for reply in marshal.loads(message) if message else [b""] * len(self.asked):
            self.asked.popleft().reply = reply
        return True

    def is_gone(self) -> bool:
        """Whether its process has ended since: it exceeded its limits, or was killed."""
        self._receive(0)
        return self.has_ended

    def __del__(self):
        if hasattr(self, "sock"):
            self.sock.close()


class Compiler:
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
        The messages that can be handled now. A grammar in one, {"kind", "text"}, has become a
        Future that is done.
        """
        for message in arrived:
            if message.get("grammar"):
                self.waiting.setdefault(message["owner"], []).append(message)
                continue
            if message["op"] == "abort":
                self.forget(message["id"])
            yield message
        while self.waiting:
            message = next(iter(self.waiting.values()))[0]
            outcome = self._outcome_of(message["grammar"])
            if not outcome:
                return
            self._end_turn()
            message["grammar"] = outcome
            yield message

    def _outcome_of(self, grammar: dict) -> Future | None:
        """Begin to compile a grammar, or go on. Returns the Grammar or the error, None: not yet."""
        outcome = Future()
        try:
            grammars = self.open_grammars()
            self.compiled = self.compiled or grammars.begin(**grammar)
            if not self.compiled.wait(0):
                return None
            outcome.set_result(grammars.finish(self.compiled))
        except (ValueError, ImportError, OSError) as error:
            outcome.set_exception(ValueError(str(error)))
        return outcome

    def _end_turn(self):
        """The owner whose turn it was goes to the end, after all who came meanwhile."""
        self.compiled = None
        owner = next(iter(self.waiting))
        _, *others = self.waiting.pop(owner)
        if others:
            self.waiting[owner] = others

    def forget(self, id: str):
        """A request was aborted. A process that compiles its grammar ends at once."""
        for i, (owner, messages) in enumerate([*self.waiting.items()]):
            if i == 0 and messages[0]["id"] == id:
                self._end_turn()
                continue
            messages[:] = [message for message in messages if message["id"] != id]
            if not messages:
                del self.waiting[owner]


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
        self.question = Question()  # the last
        self.reason = NOTHING_ALLOWED  # why no token may come next

    def copy(self) -> "Grammar":
        """Another answer, at the beginning."""
        return Grammar(self.compiled)

    def offer(self, token: int):
        """Ask whether this token may come next, unless a mask was begun. See `accept`."""
        if not self.wants_mask:
            self.offered = token
            self._ask(OFFER, [token])

    def accept(self, token: int, deadline: float | None = None) -> bool:
        """
        Go on behind this token if it is allowed. With a refusal comes the mask. A verdict that is
        late (default: MASK_SECONDS from now) counts as a refusal without one, after which a mask
        must be begun, or the token offered again.
        """
        if self.wants_mask:
            is_allowed = self.has_mask and bool(self.mask[token >> 5] >> (token & 31) & 1)
        else:
            if self.offered != token:
                self.offer(token)
            has_reply = self._wait(deadline or soon())
            is_allowed = has_reply and self.question.reply == b"\1"
            self.wants_mask = has_reply and not is_allowed
            self.offered = None
        if is_allowed:
            self.accepted.append(token)
            self.mask = None
            self.wants_mask = False
        return is_allowed

    def allowed_part(self, draft: list[int]) -> list[int]:
        """The first tokens of a draft that it allows; none where a mask was begun."""
        if self.wants_mask:
            return []
        self._ask(COUNT, draft)
        has_reply = self._wait(soon()) and self.question.reply
        return draft[: self.question.reply[0]] if has_reply else []

    def begin_mask(self):
        """Have the mask of the next position computed, unless it was begun."""
        if not self.wants_mask:
            self.wants_mask = True
            self._ask(MASK, [])

    @property
    def has_mask(self) -> bool:
        return self.wait_for_mask(0)

    def wait_for_mask(self, deadline: float) -> bool:
        """Wait for a mask that was begun. Returns whether it is there."""
        if self.wants_mask and self.mask is None and self._wait(deadline):
            reply = self.question.reply
            if reply.startswith(b"+"):
                self.mask = np.frombuffer(reply[1:], np.int32)
            else:
                self.mask = np.zeros_like(self.compiled.mask)
                self.reason = reply[1:].decode() or NOTHING_ALLOWED if reply else TOO_SLOW
        return self.mask is not None

    def failure(self) -> str:
        """Why no token may come next."""
        return STUCK + self.reason

    def _ask(self, kind: int, tokens: list[int]):
        self.question = self.compiled.ask(self.id, kind, self.accepted, tokens)
        self.accepted = []

    def _wait(self, deadline: float) -> bool:
        """Wait for the reply to the last question. Returns whether it is there."""
        return self.compiled.wait_for(self.question, deadline)

    def __del__(self):
        self.compiled.end(self.id)


def soon() -> float:
    """The time until which a step waits."""
    return time.monotonic() + MASK_SECONDS
