"""
What a client's grammar may cost: each attack ends alone, within its limits, and in plain words.
"""

import gc
import json
import marshal
import os
import random
import re
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from callers import save_caller
from processes import Process, python, wait_until
from simulated_device import simulated_engine
from test_grammar import mask_of, open_grammars, walk
from tokenizer_kinds import save

from engine import grammar as grammar_module
from engine.grammar import KEPT_MIB, MASK, PROCESS_MIB, Compiled, Grammars, Refused
from engine.link import Link, to_line
from engine.matcher import DEAD_END, Library
from engine.matcher import mask_of as mask_in
from engine.process import serve
from tokenizer import load_tokenizer
from training.corpus import bpe_tokenizer

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> Grammars:
    return open_grammars(save("gpt2", tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(grammar_module, "MASK_SECONDS", 60)


def patterns(count: int) -> list[dict]:
    """Schemas of strings; to find that one fits them all takes twice as long for each."""
    return [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(count)]


def lark(expressions: list[str], operator: str = " & ") -> str:
    return "start: T\nT: " + operator.join(expressions)


def chain(count: int, is_gbnf: bool) -> str:
    """Rules, each of which is the next one."""
    start, colon = ("root", " ::= ") if is_gbnf else ("start", ": ")
    names = [start, *(f"a{i}" for i in range(count))]
    rules = [name + colon + following for name, following in pairwise(names)]
    return "\n".join([*rules, f'{names[-1]}{colon}"x"'])


def references(count: int) -> str:
    parts = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)}
    return json.dumps({"$defs": parts | {str(count): {}}, "$ref": "#/$defs/0"})


TOO_LARGE = "compiling it takes more than 2 s or 256 MB"
FAILS = "the grammar library fails at it"
# forty letters later
TRAPS = [f"/z{{40}}b*(cc(.|\\n)*a(.|\\n){{{i}}})?/" for i in range(17)]
FORMATS = [{"type": "string", "format": name} for name in ("email", "uri", "hostname", "date-time")]
SCHEMAS = [f'x{i}: %json {{"properties": {{"a{i}": {{"type": "number"}}}}}}' for i in range(300)]
SCHEMAS = "\n".join([f"start: {' '.join(f'x{i}' for i in range(300))}", *SCHEMAS])
QUICK = {
    "GBNF's rules": ("grammar", chain(9000, True), TOO_LARGE),
    "trap": ("grammar", lark(TRAPS), "takes more than 50 ms for a token or 64 MB"),
    "small trap": ("grammar", lark(TRAPS[:8]), "too many expressions"),
    "panic": ("grammar", 'start: a b\na[lazy]: /x*/\nb: "y"', FAILS),
    "references": ("json", references(1600), ""),
    "formats": ("json", json.dumps({"allOf": FORMATS}), "Regex is empty"),
}
SLOW = {
    "conjunctions": ("grammar", lark([f"/.*a.{{{i}}}/" for i in range(30)]), TOO_LARGE),
    "negations": ("grammar", lark([f"~/.*a.{{{i}}}/" for i in range(20)]), ""),
    "patternProperties": (
        "json",
        json.dumps({"patternProperties": {f".*a.{{{i}}}b": {} for i in range(20)}}),
        "",
    ),
    "a million": ("regex", "(a{1000}){1000}", ""),
    "nested quantifiers": ("regex", "((a+)+b?)+(.{0,300}x){0,300}", ""),
    "determinised": ("regex", "(.*a.{25})+", ""),
    "Lark's rules": ("grammar", chain(5000, False), ""),
    "patterns": ("json", json.dumps({"allOf": patterns(20)}), TOO_LARGE),
    "multiples": ("json", '{"type": "integer", "multipleOf": 4294967291}', ""),
    "spelled": ("json", '{"type": "integer", "\\u006dultipleOf": 1000003}', ""),
    "common multiple": ("json", '{"allOf": [{"multipleOf": 7919}, {"multipleOf": 7907}]}', ""),
    "300 schemas": ("grammar", SCHEMAS, ""),
    "enum": ("json", json.dumps({"enum": [f"w{i}" for i in range(7000)]}), ""),
    "lengths": ("json", json.dumps({"allOf": [p | {"minLength": 9} for p in patterns(12)]}), ""),
}
CODES = ["<", "panic", "NoExtension", "backtrace", "(And"]


def fate(grammars: Grammars, kind: str, text: str) -> str:
    """Why it is refused, or why an answer of 60 random tokens cannot go on. "": it can."""
    compiled = grammars.begin(kind, text)
    try:
        grammar = grammars.finish(compiled, time.monotonic() + 10)
    except ValueError as error:
        return str(error)
    assert grammar, "it is still being compiled"
    return "" if len(walk(grammar, 60)) == 60 else grammar.failure()


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_an_attack_ends_alone(grammars, name):
    """
    Would catch: a grammar that is compiled for minutes, in all of the memory; one that compiles in
    a millisecond, and after 40 tokens takes for ever to say what may come; a chain of rules that
    overflows the stack; words of the library that nobody else can read.
    """
    kind, text, reason = (QUICK | SLOW)[name]
    beside = grammars.compile("regex", "[a-y]+")
    said = fate(grammars, kind, text)
    assert reason in said
    assert not any(code in said for code in CODES if code not in text)
    assert walk(beside, 9)
    assert grammars.compile("choice", json.dumps([name])).mask.any()


# --------------------------------------------------------------------------------------------------
# Answers that can be finished

# Of these schemas, none names a property that could follow the comma that the library allows.
DEAD_ENDS = r"""
{"properties": {"a": {"type": "boolean"}}, "patternProperties": {"^a$": {"type": "boolean"}}, "additionalProperties": false}
{"properties": {"b": {}, "a": {}}, "required": ["a"], "patternProperties": {"^(a|b)$": true}, "additionalProperties": false}
{"required": ["a"], "patternProperties": {"^a$": {}}, "additionalProperties": false}
{"properties": {"a": {}}, "allOf": [{"patternProperties": {"^a$": {}}, "additionalProperties": false}]}
{"type": "array", "items": {"properties": {"é": {}}, "patternProperties": {"^é$": {"$ref": "#/items"}}, "additionalProperties": false}}
"""  # noqa: E501
# Every value of these has another one inside.
ENDLESS = r"""
{"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}
{"type": "array", "minItems": 1, "items": {"$ref": "#"}}
{"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#", "description": "d"}]}
{"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}}
{"type": "object", "allOf": [{"required": ["a"]}, {"properties": {"a": {"$ref": "#"}}}]}
{"anyOf": [{"type": "array", "minItems": 1, "items": {"$ref": "#"}}, {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}]}
{"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "object", "required": ["c"], "properties": {"c": {"$ref": "#/$defs/d"}}}, "d": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a~1b"}}}}
{"properties": {"a": {"type": "object", "required": ["b"], "properties": {"b": {"$ref": "#/properties/a"}}}}}
{"anyOf": [{"type": "integer"}, {"type": "array", "minItems": 1, "items": {"$ref": "#/anyOf/1"}}]}
{"items": {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/items"}}}}
{"$ref": "#a", "$defs": {"b": {"$anchor": "a", "type": "array", "minItems": 1, "items": {"$ref": "#a"}}}}
{"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a%20b"}}}}
{"$id": "http://a.example/b", "type": "array", "minItems": 1, "items": {"$ref": "http://a.example/b"}}
"""  # noqa: E501
WITH_AN_END = r"""
{"type": "object", "required": ["v", "next"], "properties": {"v": {}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
{"type": "object", "required": ["a"], "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}
{"type": "object", "properties": {"a": {"$ref": "#"}}}
{"required": ["a"], "properties": {"a": {"$ref": "#"}}}
{"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}}
{"type": "object", "properties": {"a": {"$ref": "#"}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
{"type": "object", "const": {"$ref": "#"}}
{"type": "object", "enum": [{"a": {"$ref": "#"}}]}
{"type": "object", "required": ["$ref"], "properties": {"$ref": {"type": "string"}}}
{"type": "object", "required": ["const"], "properties": {"const": {"type": "object", "properties": {"a": {"$ref": "#"}}}}}
{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "required": ["b"], "properties": {"b": {"$ref": "#/$defs/b"}}}, "b": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
"""  # noqa: E501


UNSERVED = [(schema, re.escape(DEAD_END)) for schema in DEAD_ENDS.strip().splitlines()]
UNSERVED += [(s, r"no value of #.* has an end") for s in ENDLESS.strip().splitlines()]


@pytest.mark.parametrize(("schema", "words"), UNSERVED, ids=next(zip(*UNSERVED, strict=True)))
def test_a_schema_with_a_dead_end_or_no_end_is_refused(grammars, schema, words):
    """Half of such an answer had been sent when nothing could follow, or it went on for ever."""
    with pytest.raises(Refused, match=f"^this grammar cannot be served: .*{words}"):
        grammars.compile("json", schema)
    tools = json.dumps([f"start: %json {schema}", ['{"type": "object"}', schema]])
    with pytest.raises(Refused, match=words) as caught:
        grammars.compile("tools", tools)
    assert caught.value.tools == [1]


@pytest.mark.parametrize("schema", WITH_AN_END.strip().splitlines())
def test_recursion_that_can_end_is_served(grammars, schema):
    """Would catch: each schema that names itself taken for endless."""
    assert grammars.compile("json", schema).mask.any()


@pytest.mark.parametrize("step", [1, -1])
def test_a_chain_of_references_is_served_in_either_order(grammars, step):
    """Would catch: one found at a time, until the time for compiling is over."""
    names = [f"#/$defs/{i}" for i in range(300)]
    schemas = [{"type": "array", "minItems": 1, "items": {"$ref": name}} for name in names[1:]]
    schemas = [*enumerate([*schemas, {}])][::step]
    schema = {"$ref": names[0], "$defs": {str(i): schema for i, schema in schemas}}
    assert grammars.compile("json", json.dumps(schema)).mask.any()


SCHEMAS_TO_FINISH = r"""
{}
{"type": "object"}
{"type": "string"}
{"type": "number"}
{"type": "integer"}
{"type": "boolean"}
{"type": "null"}
{"type": "array"}
{"type": ["string", "null", "integer"]}
{"enum": ["a", 1, null, {"b": [2]}]}
{"const": {"a": [1, {"b": null}], "required": true, "patternProperties": 5}}
{"type": "string", "minLength": 2, "maxLength": 4}
{"type": "string", "pattern": "^[a-f]+$"}
{"type": "string", "pattern": "^a.b$"}
{"type": "string", "pattern": "^[^ -~]$"}
{"type": "string", "pattern": "^[a-z]{2,5}$", "maxLength": 3}
{"type": "string", "format": "date"}
{"type": "string", "format": "date-time"}
{"type": "string", "format": "uuid"}
{"type": "string", "format": "email"}
{"type": "string", "format": "ipv4"}
{"type": "integer", "minimum": 3, "maximum": 12}
{"type": "integer", "exclusiveMinimum": -7, "exclusiveMaximum": 7}
{"type": "integer", "multipleOf": 5, "minimum": 1}
{"type": "number", "minimum": 0.25, "maximum": 0.75}
{"type": "number", "multipleOf": 0.1}
{"type": "array", "items": {"type": "integer", "minimum": 6, "maximum": 9, "multipleOf": 5}}
{"type": "array", "items": {"type": "integer", "minimum": 1.2, "maximum": 1.8}}
{"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}
{"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": false}
{"type": "array", "prefixItems": [{"type": "null"}, false]}
{"type": "array", "items": false}
{"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}}
{"type": "array", "items": {"type": "string", "pattern": "^abc$", "maxLength": 2}}
{"type": "array", "items": {"type": "string", "format": "uuid", "maxLength": 3}}
{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}
{"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]}
{"type": "object", "properties": {"a": {}, "b": {}}, "required": ["c"]}
{"type": "object", "properties": {"a": false, "b": {}}, "additionalProperties": false}
{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}}
{"type": "object", "properties": {"a b": {}, "é": {}}, "additionalProperties": false}
{"type": "object", "additionalProperties": {"type": "integer"}}
{"type": "object", "additionalProperties": false}
{"type": "object", "maxProperties": 2}
{"type": "object", "minProperties": 1, "additionalProperties": false, "properties": {"a": {}, "b": {}}}
{"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": false}
{"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}}
{"type": "object", "properties": {"a": {}}, "patternProperties": {"^[ab]$": {}}, "additionalProperties": false}
{"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}, "additionalProperties": {"type": "null"}}
{"type": "object", "patternProperties": {"^b": false}}
{"type": "object", "patternProperties": {"^a": {"type": "null"}, "^b": {"type": "null"}}, "additionalProperties": false}
{"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"a": {}}, "required": ["a"]}]}
{"anyOf": [false, {"type": "string", "maxLength": 1}]}
{"oneOf": [{"type": "integer"}, {"type": "string"}]}
{"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}, {"type": "null"}]}
{"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]}
{"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}
{"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": false}}}
{"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
{"type": "object", "properties": {"t": {"type": ["array", "null"], "items": {"$ref": "#"}}}, "additionalProperties": false}
"""  # noqa: E501
SHORT = b'",:{}[] 01aen'  # bytes that bring answers to an end, or to a corner


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS_TO_FINISH.strip().splitlines())
def test_no_answer_gets_stuck(schema, tmp_path):
    """Forty walks at random, of a token a byte: each ends, or goes on for long."""
    bpe_tokenizer([]).save(tmp_path)
    library = Library(load_tokenizer(tmp_path), 257, [256])
    first, _ = library.try_to_compile("json", schema)
    ends = 0
    for seed in range(40):
        choose = random.Random(seed)
        matcher = first.deep_copy()
        text = []
        while 256 not in text and len(text) < 150:
            mask = mask_in(matcher)
            assert isinstance(mask, bytes), bytes(text)
            bits = int.from_bytes(mask, "little")
            allowed = [i for i in range(257) if bits >> i & 1]
            short = [i for i in allowed if i == 256 or i in SHORT]
            text.append(choose.choice(short if short and choose.random() < 0.7 else allowed))
            matcher.consume_token(text[-1])
        if 256 in text:
            ends += 1
            json.loads(bytes(text[:-1]))
    assert ends


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def test_a_compiler_ends_when_its_client_hangs_up(grammars):
    """Would catch one that goes on for two seconds: a client may hang up and come again."""
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
    """A grammar of its own that takes longer to compile than it may."""
    return "json", json.dumps({"allOf": patterns(25 + i)})


def test_one_compiles_at_a_time_and_none_whose_client_has_gone(grammars):
    """
    Would catch: clients that hang up at once, and leave a process each that compiles for two
    seconds; a server of 960 such calls answered nobody for 17.
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
    assert len({*children(server)} - before) == 1  # the last one's


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
    """The signal of a hang-up is asked for after the fork: one before it sends none."""
    assert python(GONE).stdout == "False\n"


@pytest.mark.parametrize("before", ["SIGSTOP", "SIGCONT"])
def test_who_waits_for_a_fork_server_that_was_killed_may_ask_again(tmp_path, before):
    """
    The kernel ends it first where memory is scarce. A client was told, with a 400, to make its
    grammar smaller.
    """
    grammars = open_grammars(save("gpt2", tmp_path))
    grammars.process.send_signal(getattr(signal, before))
    compiled = grammars.begin("regex", "a+")  # it still loads the tokenizer, or has stopped
    grammars.process.kill()
    with pytest.raises(OSError, match="try again"):
        grammars.finish(compiled, time.monotonic() + 60)
    grammars.process.wait(60)
    assert grammars.compile("regex", "a+").mask.any()


def test_a_compiler_ends_when_the_http_process_is_gone(grammars, monkeypatch):
    """Would catch an engine that stays until grammars are compiled that nobody wants."""
    server = grammars.process.pid
    grammars.compile("regex", "a")
    before = {*children(server)}
    asked = [
        {"op": "add", "id": str(i), "prompt": [1], "params": {}, "owner": ""}
        | {"grammar": dict(zip(["kind", "text"], bomb(i), strict=True))}
        for i in range(10)
    ]
    monkeypatch.setattr(grammar_module, "Grammars", lambda *_: grammars)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(map(to_line, asked)))
        theirs.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        serve(simulated_engine(), Link(ours))
    wait_until(lambda: {*children(server)} <= before)
    assert time.monotonic() - began < 10  # each would take two seconds


def test_usual_multiples_are_served(grammars):
    """Would catch fields that are multiplied with each other."""
    price = {"type": "number", "multipleOf": 0.01}
    each = {f"price{i}": price for i in range(9)} | {"weight": {"multipleOf": 100}}
    grammars.compile("json", json.dumps({"type": "object", "properties": each}))


def test_kept_grammars_are_bounded_by_their_memory(grammars, monkeypatch):
    """Would catch 64 of 175 MB; the one used last thrown away first; a refused one that is kept."""
    monkeypatch.setattr(grammars, "kept", {})
    for i in range(100):
        grammars.finish(compiled_of(f"small {i}", 2**20))
    assert len(grammars.kept) == 100
    grammars.finish(compiled_of("small 0", 2**20))
    grammars.finish(compiled_of("large", (KEPT_MIB - 1) * 2**20))
    assert [*grammars.kept] == ["small 0", "large"]
    refused = compiled_of("refused", 0)
    refused.report.reply = ("why not", [])
    with pytest.raises(ValueError, match="why not"):
        grammars.finish(refused)
    assert "refused" not in grammars.kept


def compiled_of(key: str, size: int) -> Compiled:
    compiled = Compiled(key, Mock(fileno=lambda: -1), [])
    compiled.report.reply = (PROCESS_MIB * 2**20, size, b"")
    return compiled


def test_a_grammar_has_the_size_that_it_takes(grammars):
    """Would catch the memory of the library's code, or none, as that of a grammar."""
    small = grammars.compile("regex", "ab").compiled.size
    large = grammars.compile("regex", "a{100000}").compiled.size
    assert small < 5 * 2**20 < large


def test_what_answers_leave_is_counted(grammars):
    """
    When one of them ends. Would catch 68 kept grammars of 534 MB together, each counted as it was
    compiled; and a verdict taken for a size.
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


def test_one_that_was_killed_is_compiled_anew_whatever_it_has_sent(grammars):
    """Would catch its last reply, which nobody has read, taken for a sign of life."""
    other = grammars.compile("regex", "[a-u]{7}")
    before = {*children(grammars.process.pid)}
    grammar = grammars.compile("regex", "[a-v]{7}")
    (pid,) = {*children(grammars.process.pid)} - before
    assert walk(grammar, 3)
    del grammar
    assert walk(other, 3)  # with its first message goes that the answer has ended
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in children(grammars.process.pid))
    assert len(walk(grammars.compile("regex", "[a-v]{7}"), 3)) == 3


def test_processes_are_refused_memory():
    code = "from engine.matcher import let_grow; let_grow(64); bytes(2**24); bytes(2**27)"
    assert python(code).stderr.splitlines()[-1] == "MemoryError"


def test_the_engine_gets_no_threads(grammars):
    """Would catch threads of a library, and a default size of stacks that others then have."""
    before = threading.enumerate(), threading.stack_size()
    assert walk(grammars.compile("regex", "[a-x]+"), 9)
    assert (threading.enumerate(), threading.stack_size()) == before


def descendants(pid: int) -> list[int]:
    return [pid, *(each for child in children(pid) for each in descendants(child))]


def test_what_was_killed_starts_anew(grammars):
    """As by the system where memory is lacking. Would catch: no grammars from then on."""
    grammar = grammars.compile("regex", "[a-w]{99}")
    assert walk(grammar, 9)
    for pid in descendants(grammars.process.pid):
        os.kill(pid, signal.SIGKILL)
    assert not mask_of(grammar).any()
    assert "the answer cannot go on: its grammar takes more than" in grammar.failure()
    grammars.process.wait()
    for text in ("[a-w]{99}", "[a-v]{99}"):  # the first one was kept
        assert len(walk(grammars.compile("regex", text), 9)) == 9


def test_what_an_answer_exceeds_ends_all_of_its_grammar(grammars):
    """Would catch: an answer that waits for ever, or one of another grammar that ends, too."""
    kind, text, reason = QUICK["trap"]
    beside = grammars.compile("regex", "[a-u]{99}")
    first = grammars.compile(kind, text)
    others = [first.copy() for _ in range(3)]
    assert all(len(walk(answer, 3)) == 3 for answer in [*others, beside])
    assert len(walk(first, 60)) < 60
    assert not any(mask_of(answer).any() for answer in others)
    assert all(reason in answer.failure() for answer in [first, *others])
    assert len(walk(grammars.compile(kind, text), 3)) == 3
    assert len(walk(beside, 9)) == 9


@pytest.mark.parametrize("replies", [0, 1, 4])
def test_all_who_wait_are_told_that_a_process_has_ended(replies):
    """Also if nobody waits any more. Would catch: one of them that is told, the others later."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        compiled = Compiled(("regex", "a"), ours, [])
        questions = [compiled.report, *(compiled.ask(id, MASK, [], []) for id in range(3))]
        if replies:
            theirs.send(marshal.dumps(["a reply"] * replies))
    assert compiled.is_gone()
    told = [question.reply for question in questions]
    assert told == ["a reply"] * replies + [compiled.limit] * (4 - replies)


def test_a_step_sends_a_message_a_grammar(grammars, monkeypatch):
    """Would catch a message an answer, which costs 30 us."""
    answers = [grammars.compile("regex", f"[a-{end}]+").copy() for end in "rst" for _ in range(9)]
    tokens = [walk(answer, 1)[0] for answer in answers]
    messages = []
    send = Compiled._send
    monkeypatch.setattr(Compiled, "_send", lambda self: messages.append(self) or send(self))
    for answer, token in zip(answers, tokens, strict=True):
        answer.offer(token)
    assert all(answer.accept(token) for answer, token in zip(answers, tokens, strict=True))
    assert messages and len(messages) == len({*messages}) == 3


def test_the_memory_of_answers_is_freed(grammars):
    """Would catch a process that ends, for want of memory, after 500 answers."""
    first = grammars.compile("choice", json.dumps([f"w{i}" for i in range(5000)]))
    for _ in range(1200):
        assert len(walk(first.copy(), 2)) == 2


def test_grammars_that_are_gone_leave_nothing(tmp_path, monkeypatch):
    """Would catch files or processes that end a server after a thousand grammars."""
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
    """Would catch answers that fail while a server drains: a terminal signals a whole group."""
    grammars.compile("regex", "a")
    server = grammars.process.pid
    assert {os.getpgid(pid) for pid in (server, *children(server))} == {server}


def test_masks_of_a_large_vocabulary_come_in_parts(tmp_path):
    """A megabyte of them. Would catch a message that no socket takes."""
    first = open_grammars(save("gpt2", tmp_path), rows=2**18).compile("regex", "[a-z]+")
    answers = [first.copy() for _ in range(30)]
    [letter] = load_tokenizer(tmp_path).encode("a")
    assert all(answer.accept(letter) for answer in answers)
    for answer in answers:
        answer.begin_mask()
    assert all(mask_of(answer).any() for answer in answers)


@pytest.mark.slow
def test_a_server_with_little_memory_serves_on(tmp_path):
    """
    Sixteen calls of one key, each too large to be compiled. Would catch an engine that ends for
    want of memory, and another key's client that waits for all of them.
    """
    save_caller(tmp_path / "model")
    (tmp_path / "keys").write_text("a\nb\n")
    with Process(tmp_path / "model", "--api-key-file", str(tmp_path / "keys")) as server:
        engine = server.engine_pid
        # of torch built for CUDA the code alone takes more than `ulimit -v 1800000` allows
        pages = int(Path(f"/proc/{engine}/statm").read_text().split()[0])
        limit = max(1_800_000 * 1024, pages * resource.getpagesize() + 2**29)
        resource.prlimit(engine, resource.RLIMIT_AS, (limit, limit))

        def post(key: str, schema: dict) -> httpx.Response:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body = {"prompt": "x", "max_tokens": 9, "response_format": form}
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(
                f"{server.url}/v1/completions", json=body, headers=headers, timeout=90
            )

        assert post("b", {"enum": ["warm"]}).status_code == 200
        with ThreadPoolExecutor(16) as pool:
            large = [{"allOf": patterns(20 + i)} for i in range(16)]
            refused = [pool.submit(post, "a", schema) for schema in large]
            time.sleep(0.5)
            began = time.monotonic()
            assert post("b", {"enum": ["new"]}).status_code == 200
            waited = time.monotonic() - began
            assert all(TOO_LARGE in future.result().text for future in refused)
        assert waited < 5  # 2.2 s on an idle machine; after all of them it would be 30
        assert server.engine_pid == engine
