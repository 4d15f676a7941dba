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

llguidance reads the grammars, in processes of its own (matcher.py says why). A `Compiler` stands
before the server's loop, and has the grammars of its messages compiled, by turns of their clients.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cache
from multiprocessing import connection
from pathlib import Path

import numpy as np

from engine.matcher import COMPILE_MIB, COMPILE_SECONDS, COUNT, MASK, OFFER, STEP_MIB, STEP_SECONDS
from model import GPTConfig

MASK_SECONDS = 0.002  # how long a step waits for verdicts, then for masks; the late sit out
KEPT_MIB = 256  # of compiled grammars, together
PROCESS_MIB = 4  # of a kept grammar: two processes have as much beside it
MOST_BYTES = 2**18  # of a reply: the mask of two million tokens

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
        compiled.wait(None)
        return self.finish(compiled)

    def begin(self, kind: str, text: str) -> "Compiled":
        """Begin to compile a grammar, unless it is kept. Raises OSError: no files, no processes."""
        key = kind, text
        if key in self.kept and not self.kept[key].has_ended:
            return self.kept[key]
        if self.process.poll() is not None:
            self.sock.close()
            self.start()
        return Compiled(key, self.sock)

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


def connect(parent: socket.socket, *fds: int) -> socket.socket:
    """Have the process behind `parent` fork one that gets these files. Returns the link to it."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    parent.settimeout(1)  # it has been sent more than it could take
    with theirs:
        socket.send_fds(parent, [b"+"], [theirs.fileno(), *fds])
    return ours


def receive(sock: socket.socket, seconds: float | None) -> bytes | None:
    """Return the next message: b"" where the process has ended, None if none comes in time."""
    sock.settimeout(seconds)
    try:
        return sock.recv(MOST_BYTES)
    except (BlockingIOError, TimeoutError):
        return None
    except OSError:
        return b""


class Compiled:
    """
    A grammar in a process, which compiles it, and then forks a process for each answer. It ends
    when nothing refers to this object.

    mask      of the first position, [V / 32] int32; None while it is not compiled, or was refused
    reason    why it was refused
    size      bytes that it takes
    """

    def __init__(self, key: tuple[str, str], server: socket.socket):
        self.key = key
        self.is_done = False
        self.mask: np.ndarray | None = None
        self.reason = TOO_LARGE
        self.size = 0
        with open(os.memfd_create("grammar"), "w+") as file:
            json.dump(dict(zip(("kind", "text"), key, strict=True)), file)
            file.seek(0)
            self.sock = connect(server, file.fileno())

    def wait(self, seconds: float | None) -> bool:
        """Wait for at most so long. Returns whether it is done: compiled or refused."""
        if not self.is_done and (report := receive(self.sock, seconds)) is not None:
            self.is_done = True
            if report.startswith(b"+"):
                self.size = int.from_bytes(report[1:9], "little") + PROCESS_MIB * 2**20
                self.mask = np.frombuffer(report[9:], np.int32)
            elif report:
                self.reason = report[1:].decode(errors="replace")
        return self.is_done

    @property
    def has_ended(self) -> bool:
        """Whether its process was killed since, for want of memory."""
        return receive(self.sock, 0) == b""

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
        self.waiting: dict[str, dict] = {}  # messages by id
        self.turns: dict[str, list[str]] = {}  # ids that wait by owner, in the order of turns
        self.owner = ""  # whose turn it was last
        self.id = ""  # of the message whose grammar is being compiled
        self.compiled: Compiled | None = None

    def pass_on(self, arrived: Iterable[dict]) -> Iterator[dict]:
        """
        The messages that can be handled now. A grammar in one, {"kind", "text"}, has become a
        Future that is done.
        """
        for message in arrived:
            if message.get("grammar"):
                self.waiting[message["id"]] = message
                self.turns.setdefault(message["owner"], []).append(message["id"])
                continue
            if message["op"] == "abort":
                self.forget(message["id"])
            yield message
        while self.waiting:
            self.id = self.id or self._next_id()
            message = self.waiting[self.id]
            outcome = self._outcome_of(message["grammar"])
            if not outcome:
                return
            del self.waiting[self.id]
            self.id = ""
            message["grammar"] = outcome
            yield message

    def _next_id(self) -> str:
        """Have the owner whose turn it was last stand behind all who came meanwhile."""
        if self.owner in self.turns:
            self.turns[self.owner] = self.turns.pop(self.owner)
        self.owner, (id, *others) = next(iter(self.turns.items()))
        self._set_ids(self.owner, others)
        return id

    def _set_ids(self, owner: str, ids: list[str]):
        if ids:
            self.turns[owner] = ids
        else:
            del self.turns[owner]

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
        self.compiled = None
        return outcome

    def forget(self, id: str):
        """A request was aborted. A process that compiles its grammar ends at once."""
        message = self.waiting.pop(id, None)
        if not message:
            return
        if id == self.id:
            self.id = ""
            self.compiled = None
        else:
            owner = message["owner"]
            self._set_ids(owner, [other for other in self.turns[owner] if other != id])


class Grammar:
    """
    The parser state of one answer, after all its known tokens. It is in a process of its own, which
    is asked with messages; only the reply to the last of them counts.

    mask          of the next position, [V / 32] int32; None: not computed
    wants_mask    the mask was begun: no token counts without it
    """

    def __init__(self, compiled: Compiled):
        self.compiled = compiled
        self.mask = compiled.mask
        self.wants_mask = True
        self.sock: socket.socket | None = None  # its process starts with the first question
        self.accepted: list[int] = []  # tokens that the process does not know yet
        self.offered: int | None = None  # the token that was asked about
        self.num_owed = 0  # replies
        self.reply = b""
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
            is_allowed = has_reply and self.reply == b"\1"
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
        return draft[: self.reply[0]] if self._wait(soon()) and self.reply else []

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
            if self.reply.startswith(b"+"):
                self.mask = np.frombuffer(self.reply[1:], np.int32)
            else:
                self.mask = np.zeros_like(self.compiled.mask)
                self.reason = self.reply[1:].decode() or self.reason
        return self.mask is not None

    def failure(self) -> str:
        """Why no token may come next."""
        return STUCK + self.reason

    def _ask(self, kind: int, tokens: list[int]):
        self.reply = b""
        message = array("i", [kind, len(self.accepted), *self.accepted, *tokens])
        self.accepted = []
        try:
            self.sock = self.sock or connect(self.compiled.sock)
            self.sock.send(message)
            self.num_owed += 1
        except OSError:
            self._end()

    def _wait(self, deadline: float) -> bool:
        """Wait for the reply to the last question. Returns whether it is there."""
        while self.num_owed:
            reply = receive(self.sock, max(0, deadline - time.monotonic()))
            if reply is None:
                return False
            if not reply:
                self._end()
                return True
            self.num_owed -= 1
            self.reply = reply
        return True

    def _end(self):
        """The process has ended: no token may come."""
        self.num_owed = 0
        self.reply = b""
        self.reason = TOO_SLOW

    def __del__(self):
        if self.sock:
            self.sock.close()


def soon() -> float:
    """The time until which a step waits."""
    return time.monotonic() + MASK_SECONDS


def wait_for_any(grammars: Iterable[Grammar]):
    """Wait until one of these has the mask that was begun. Each has a process."""
    connection.wait([grammar.sock for grammar in grammars])
