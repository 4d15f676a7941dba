"""
What a client's grammar may cost: an attack fails without harming others, within its limits, and
with a plain message.
"""

import gc
import json
import marshal
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from processes import python, wait_until
from simulated_device import simulated_engine
from test_grammar import ask, mask_of, open_grammars, walk
from tokenizer_kinds import save

from engine import grammar as grammar_module
from engine.grammar import KEPT_MIB, MASK, PROCESS_MIB, Compiled, Grammars, Refused
from engine.link import Link, to_line
from engine.process import serve
from tokenizer import load_tokenizer

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> Grammars:
    return open_grammars(save("gpt2", tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(grammar_module, "MASK_SECONDS", 60)


def lark(expressions: list[str], operator: str = " & ") -> str:
    return "start: T\nT: " + operator.join(expressions)


def chain(count: int) -> str:
    """Return a chain of rules, each of which is just the next one."""
    rules = [f"a{i} ::= a{i + 1}" for i in range(count)]
    return "\n".join(["root ::= a0", *rules, f'a{count} ::= "x"'])


def references(count: int) -> str:
    parts = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)}
    return json.dumps({"$defs": parts | {str(count): {}}, "$ref": "#/$defs/0"})


def of_properties(count: int) -> str:
    return json.dumps({"type": "object", "properties": {str(i): {} for i in range(count)}})


TOO_LARGE = "compiling it takes more than 2 s or 256 MB"
# traps that spring forty letters later
TRAPS = [f"/z{{40}}b*(cc(.|\\n)*a(.|\\n){{{i}}})?/" for i in range(17)]
ENDINGS = {f".*a.{{{i}}}b": {} for i in range(20)}
# Attacks, and the message for each. Where the outcome depends on the machine, any message will do.
TOO_SLOW = "takes more than 50 ms for a token or 64 MB"
# the answer goes on or has ended; a slow or busy machine may exceed either limit
SERVED = f"^$|parser stopped|{TOO_LARGE}|{TOO_SLOW}"
ATTACKS = {
    "GBNF's rules": ("grammar", chain(9000), TOO_LARGE),
    "trap": ("grammar", lark(TRAPS), TOO_SLOW),
    "small trap": ("grammar", lark(TRAPS[:8]), "too many expressions"),
    "references": ("json", references(1600), ""),
    "deep parentheses": ("regex", "(" * 500 + "a" + ")" * 500, "invalid regex"),
    "long words": ("regex", r"(\w{1,50} ?){1,500}", ""),
    "ambiguous rules": ("grammar", 'start: a\na: a a | "x" | ""', SERVED),
    "backtracking": ("regex", "(x+x+)+y", SERVED),
    "a million thousand": ("regex", "((a{0,1000}){0,1000}){0,1000}", SERVED),
    "three runs": ("regex", r"\w{0,3000}\d{0,3000}\w{0,3000}", SERVED),
}
SLOW = {
    "conjunctions": ("grammar", lark([f"/.*a.{{{i}}}/" for i in range(30)]), TOO_LARGE),
    "patternProperties": ("json", json.dumps({"patternProperties": ENDINGS}), ""),
    "determinised": ("regex", "(.*a.{25})+", ""),
    "common multiple": ("json", '{"allOf": [{"multipleOf": 7919}, {"multipleOf": 7907}]}', ""),
    "wide choice": ("choice", json.dumps([f"w{i}" for i in range(8000)]), SERVED),
    "2,000 properties": ("json", of_properties(2000), SERVED),
    "4,500 properties": ("json", of_properties(4500), f"too big|{TOO_LARGE}"),
}


def fate(grammars: Grammars, kind: str, text: str) -> str:
    """Return why it is refused, or why an answer of 60 random tokens cannot go on; "" if it can."""
    compiled = grammars.begin(kind, text)
    try:
        grammar = grammars.finish(compiled, time.monotonic() + 10)
    except Refused as error:
        return str(error)
    assert grammar, "it is still being compiled"
    return "" if len(walk(grammar, 60)) == 60 else grammar.failure


@pytest.mark.parametrize(
    "name", [*ATTACKS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_an_attack_ends_alone(grammars, name):
    """
    Would catch: a grammar that compiles for minutes and takes all memory; one that compiles in a
    millisecond and after 40 tokens takes for ever to say what may come next; a chain of rules that
    overflows the stack.
    """
    kind, text, reason = (ATTACKS | SLOW)[name]
    beside = grammars.compile("regex", "[a-y]+")
    said = fate(grammars, kind, text)
    assert re.search(reason, said)
    assert walk(beside, 9)
    assert grammars.compile("choice", json.dumps([name])).mask.any()


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def test_a_compiler_ends_when_its_client_hangs_up(grammars):
    """Would catch one that goes on for two seconds, while its client can hang up and call again."""
    server = grammars.process.pid
    grammars.compile("regex", "a")
    times = []
    for _ in range(3):  # the machine may be busy
        compiled = grammars.begin(*bomb(0))
        assert not grammars.finish(compiled, time.monotonic() + 0.1)
        busy = children(server)
        del compiled
        hung_up = time.monotonic()
        wait_until(lambda busy=busy: len(children(server)) < len(busy))
        times.append(time.monotonic() - hung_up)
    assert min(times) < 1


def bomb(i: int) -> tuple[str, str]:
    """Return a unique grammar that takes longer to compile than it may."""
    # each further one doubles the time it takes to find a string that fits them all
    parts = [{"type": "string", "pattern": f".*a.{{{n}}}"} for n in range(25 + i)]
    return "json", json.dumps({"allOf": parts})


def test_one_compiles_at_a_time_and_none_whose_client_has_gone(grammars):
    """
    Would catch: clients that hang up immediately, each leaving behind a process that compiles for
    two seconds. After 960 such calls a server answered no one for 17 seconds.
    """
    server = grammars.process.pid
    grammars.compile("regex", "a")
    before = {*children(server)}
    waiting = [grammars.begin(*bomb(i)) for i in range(2)]
    assert not grammars.finish(waiting[1], time.monotonic() + 0.3)
    assert len({*children(server)} - before) <= 1
    waiting.clear()
    for i in range(40):
        compiled = grammars.begin(*bomb(i))
        time.sleep(i / 10_000)
        del compiled
    grammars.compile("regex", "b{9}")
    assert len({*children(server)} - before) == 1  # only the last one's


GONE = """
import os, socket
from unittest.mock import Mock
from engine.matcher import run_grammar

ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
ours.close()
library = Mock()
try:
    run_grammar(library, theirs, os.dup(1), "regex", "a")
finally:
    print(library.try_to_compile.called)
"""


def test_none_is_compiled_whose_client_went_while_its_process_began():
    """The signal of a hang-up is requested after the fork, so a hang-up before it sends none."""
    assert python(GONE).stdout == "False\n"


@pytest.mark.parametrize("before", ["SIGSTOP", "SIGCONT"])
def test_who_waits_for_a_fork_server_that_was_killed_may_ask_again(tmp_path, before):
    """
    If memory is scarce, the kernel kills the fork server first. Previously the client got a 400
    that asked for a smaller grammar.
    """
    grammars = open_grammars(save("gpt2", tmp_path))
    grammars.process.send_signal(getattr(signal, before))
    compiled = grammars.begin("regex", "a+")  # it is still loading the tokenizer, or has stopped
    grammars.process.kill()
    with pytest.raises(OSError, match="try again"):
        grammars.finish(compiled, time.monotonic() + 60)
    grammars.process.wait(60)
    assert grammars.compile("regex", "a+").mask.any()


def test_a_compiler_ends_when_the_http_process_is_gone(monkeypatch):
    """Would catch: an engine that stays until grammars are compiled which are no longer wanted."""
    library = Mock(finish=Mock(return_value=None))  # as long as it compiles
    monkeypatch.setattr(grammar_module, "Grammars", lambda *_: library)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(to_line(ask("a")))
        theirs.shutdown(socket.SHUT_WR)
        serve(simulated_engine(), Link(ours))
    library.begin.assert_called_once_with(kind="regex", text="a")


def test_kept_grammars_are_bounded_by_their_memory(grammars, monkeypatch):
    """
    Would catch: 64 grammars of 175 MB; the one used last evicted first; a refused one that is kept.
    Previously one whose process had ended still counted, and others were evicted for it.
    """
    monkeypatch.setattr(grammars, "kept", {})

    def keep(key: str, mib: int, file: int = 9):
        sock = Mock(**{"fileno.return_value": file, "recv.side_effect": BlockingIOError})
        compiled = Compiled(key, sock, [])
        compiled.report.reply = PROCESS_MIB * 2**20, mib * 2**20, b""
        grammars.finish(compiled)

    for i in [*range(100), 0]:
        keep(f"small {i}", 1)
    keep("ended", KEPT_MIB - 1, file=-1)
    assert len(grammars.kept) == 100
    keep("large", KEPT_MIB - 1)
    with pytest.raises(Refused):
        grammars.compile("regex", "(")
    assert [*grammars.kept] == ["small 0", "large"]


def test_a_grammar_has_the_size_that_it_takes(grammars):
    """Would catch: the size of a grammar that includes the library's code, or is zero."""
    small = grammars.compile("regex", "ab").compiled.size
    large = grammars.compile("regex", "a{30000}").compiled.size
    assert small < 5 * 2**20 < large


def test_what_answers_leave_is_counted(grammars):
    """
    The memory is counted when an answer ends. Would catch: 68 kept grammars that take 534 MB
    together but are counted as when they were compiled; or counted so again when they are used
    again; a verdict taken for a size.
    """
    grammar = grammars.compile("regex", r"[\p{L} ]{1990}")
    compiled, before = grammar.compiled, grammar.compiled.size
    tokens = walk(grammar, 60)
    other = grammar.copy()
    assert all(other.accept(token) for token in tokens)
    assert len(tokens) == 60
    assert compiled.size == before > 0
    del grammar
    grammars.compile("regex", "abc")
    wait_until(lambda: compiled.receive_all() or compiled.size > before + 2**19)
    grown = compiled.size
    assert grammars.compile(*compiled.key).compiled is compiled
    assert compiled.size >= grown


def test_one_that_was_killed_is_compiled_anew_whatever_it_has_sent(grammars):
    """Would catch: its last reply, still unread, taken for a sign of life."""
    other = grammars.compile("regex", "[a-u]{7}")
    before = {*children(grammars.process.pid)}
    grammar = grammars.compile("regex", "[a-v]{7}")
    (pid,) = {*children(grammars.process.pid)} - before
    assert walk(grammar, 3)
    del grammar
    assert walk(other, 3)  # its first message also carries that the answer has ended
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in children(grammars.process.pid))
    assert len(walk(grammars.compile("regex", "[a-v]{7}"), 3)) == 3


def test_processes_are_refused_memory():
    code = "from engine.matcher import let_grow; let_grow(64); bytes(2**24); bytes(2**27)"
    assert python(code).stderr.splitlines()[-1] == "MemoryError"


def test_the_engine_gets_no_threads(grammars):
    """Would catch: threads of a library, and a default stack size that other threads then get."""
    before = threading.enumerate(), threading.stack_size()
    assert walk(grammars.compile("regex", "[a-x]+"), 9)
    assert (threading.enumerate(), threading.stack_size()) == before


@pytest.mark.parametrize("replies", [0, 1, 4])
def test_all_who_wait_are_told_that_a_process_has_ended(replies):
    """
    Also if no one waits any more. Would catch: only one of them gets the message now, the others
    later.
    """
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        compiled = Compiled(("regex", "a"), ours, [])
        questions = [compiled.report, *(compiled.ask(id, MASK, [], []) for id in range(3))]
        compiled._send()
        theirs.recv(999)
        if replies:
            theirs.send(marshal.dumps(["a reply"] * replies))
    assert compiled.is_gone()
    received = [question.reply for question in questions]
    assert received == ["a reply"] * replies + [compiled.limit] * (4 - replies)


def test_a_step_sends_a_message_a_grammar(grammars, monkeypatch):
    """Would catch: a message per answer, each of which costs 30 us."""
    compiled = [grammars.compile("regex", f"[a-{end}]+") for end in "rst"]
    [letter] = walk(compiled[0].copy(), 1)
    answers = [grammar.copy() for grammar in compiled for _ in range(9)]
    assert all(answer.accept(letter) for answer in answers)  # by the first mask
    messages = []
    send = Compiled._send
    monkeypatch.setattr(Compiled, "_send", lambda self: messages.append(self) or send(self))
    for answer in answers:
        answer.offer(letter)
    assert all(answer.accept(letter) for answer in answers)
    assert len(messages) == len({*messages}) == 3


def test_garbage_is_collected_while_a_question_is_sent(grammars, monkeypatch):
    """
    An answer that is part of a cycle asks its last question when it is collected, at any time. All
    later replies were then taken for those to other questions.
    """
    first = grammars.compile("choice", '["abc"]')
    answer, garbage = first.copy(), [first.copy()]
    tokens = walk(first, 3)
    dumps = marshal.dumps
    monkeypatch.setattr(marshal, "dumps", lambda message: (dumps(message), garbage.clear())[0])
    assert all(answer.accept(token, time.monotonic() + 9) for token in tokens)


def test_the_memory_of_answers_is_freed(grammars):
    """Would catch: a process that runs out of memory after 500 answers."""
    first = grammars.compile("choice", json.dumps([f"w{i}" for i in range(5000)]))
    for _ in range(800):
        assert len(walk(first.copy(), 2)) == 2


def test_grammars_that_are_gone_leave_nothing(tmp_path, monkeypatch):
    """Would catch: leaked files or processes that end a server after a thousand grammars."""
    monkeypatch.setattr(grammar_module, "KEPT_MIB", 0)
    grammars = open_grammars(save("gpt2", tmp_path))
    server = grammars.process.pid

    def books() -> list[int]:
        files = (len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), server))
        return [*files, len(children(server))]

    before = []
    for i in range(12):
        assert len(walk(grammars.compile("regex", f"a{{{i + 9}}}"), 3)) == 3
        before = before or books()
    gc.collect()
    wait_until(lambda: all(now <= then for now, then in zip(books(), before, strict=True)))


def test_ctrl_c_at_a_terminal_is_the_engines(grammars):
    """
    Would catch: answers that fail while a server drains, because a terminal signals a whole group.
    """
    grammars.compile("regex", "a")
    server = grammars.process.pid
    assert {os.getpgid(pid) for pid in (server, *children(server))} == {server}


def test_masks_of_a_large_vocabulary_come_in_parts(tmp_path):
    """They take a megabyte. Would catch: a message too large for any socket."""
    first = open_grammars(save("gpt2", tmp_path), rows=2**16).compile("regex", "[a-z]+")
    answers = [first.copy() for _ in range(100)]
    [letter] = load_tokenizer(tmp_path).encode("a")
    assert all(answer.accept(letter) for answer in answers)
    for answer in answers:
        answer.begin_mask()
    assert all(mask_of(answer).any() for answer in answers)
