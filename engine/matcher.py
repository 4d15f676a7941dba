"""
The processes that compile grammars, and check answers against them.

    engine -- fork server -- a process for each grammar, with the matchers for all its answers

A client's grammar can make the library use any amount of time and memory, either while it is being
compiled or a hundred tokens later. A failed allocation ends the process in which the library runs.
So the library never runs in the engine. The kernel kills a process that exceeds its limits. The
engine then sees that the socket is closed, and ends all answers that follow this grammar, because
each of them could run into the same trap.

This file is not run by itself; engine/grammar.py starts the fork server, and has the other ends of
the sockets. The sockets keep message boundaries (SOCK_SEQPACKET). There are no threads here,
because threads do not survive a fork.

    to the fork server          a socket for the grammar's process, and (kind, text, before)
    from a grammar's process    a report: (bytes of its address space before and after it has
                                compiled the grammar, the first mask), or (why the grammar is
                                refused, numbers of the tools at fault). If the process ends without
                                a report, the fork server sends one.
    to a grammar's process      a list of questions about its answers, once per step
    from a grammar's process    lists of replies, in the order of the questions

Messages are encoded by `marshal`, which is the fastest way to encode lists of numbers. A question
is (id of the answer, kind, tokens accepted since the answer's last question, tokens to check). A
new id starts a new answer. The kinds of question and the replies to them:

    COUNT    how many of the tokens to check are allowed, counting from the first
    OFFER    1 if the token to check is allowed, otherwise the reply to MASK
    MASK     the mask (bytes), or the reason why no token is allowed (str)
    END      the answer is gone; the reply is the size of the process's address space in bytes
"""

import fcntl
import gc
import json
import marshal
import os
import re
import resource
import select
import signal
import socket
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from engine.rules import check_ends, check_tokens, endless
from engine.schemas import all_schemas, check_schema, target_of
from tokenizer import Tokenizer, load_tokenizer

COMPILE_SECONDS = 2
COMPILE_MIB = 256
STEP_SECONDS = 0.05  # CPU time allowed for one question
STEP_MIB = 64  # memory that all answers together may add to that of their grammar
TOO_LARGE = f"compiling it takes more than {COMPILE_SECONDS} s or {COMPILE_MIB} MB: make it smaller"
MOST_BYTES = 2**19  # size of the largest message to receive; more than a socket buffers
REPLY_BYTES = 2**17  # size of the largest message of replies to send
# llguidance recurses along chains of rules or references, so 64 KB of text can take 32 MB of stack
STACK = 128 * 2**20
# at most one space between parts of JSON, because a small model might write newlines forever
JSON_OPTIONS = {"whitespace_pattern": "[ ]?", "whitespace_flexible": True, "lenient": False}
OFFER, COUNT, MASK, END = range(4)
# the library's own limits; when it refuses a grammar, it names the limit
LIMITS = {"max_grammar_size": 20_000, "max_items_in_row": 10_000, "verbose_errors": False}
TRIED = 8  # number of tokens of an answer that are tried out before a grammar is accepted
NO_TOKEN = "the vocabulary has no token for what must come next"
NOTHING = {"enum": []}  # a schema that no value matches
DEAD_END = "its patternProperties match only properties that are also declared: leave them out"
ENDLESS = "values of {} never end: allow null there, or require less"
# part of a library message that users would not understand -> a clearer message
CLEARER = {
    "coerce_one_of": "oneOf is not supported if its schemas may overlap: use anyOf",
    "too many expressions": "it has too many expressions: make its regular expressions smaller",
    "Failed to generate regex": "a bound is too large: choose one of at most 2^53 in size",
    "recursion depth": "it is nested too deeply",
    "decimal literal": "it has a length or count above 4,294,967,295: choose a smaller one",
    "Too many items": "it never ends, or has too many short rules",
}


class Vocabulary:
    """
    A tokenizer in the form that llguidance expects. `V` is the model's vocabulary size, which is at
    least the tokenizer's.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, V: int, eos: list[int]):
        self.encode = tokenizer.encode
        self.eos_token_id = eos[0]
        self.tokens = [tokenizer.spelled_bytes(token) for token in range(V)]
        self.special_token_ids = sorted({*tokenizer.control.values(), *eos})

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


class Library:
    """llguidance, set up for one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, V: int, eos: list[int]):
        import llguidance

        self.module = llguidance
        self.eos = eos
        self.ends = {id: name for name, id in tokenizer.control.items() if id in eos}
        wrapped = llguidance.TokenizerWrapper(Vocabulary(tokenizer, V, eos))
        self.tokenizer = llguidance.LLTokenizer(wrapped, eos_token=eos)
        self.limits = llguidance.LLParserLimits(**LIMITS)

    def compile(self, kind: str, text: str, before: str = ""):
        """
        Compile a grammar, and return the library's matcher. `Grammars.begin` explains the
        arguments. Raises ValueError if a check refuses the grammar.
        """
        schemas = [text] if kind == "json" else []
        if kind == "tools":
            (text, schemas), kind = json.loads(text), "lark"
        if kind == "grammar":
            if "x-guidance" in unescaped(text):
                raise ValueError("the grammar has x-guidance, whose options clients may not set")
            schemas = schemas_within(text)
            text = self.module.grammar_from("gbnf" if "::=" in text else "lark", text)
            kind = "lark"
            check_tokens(text, self.ends)
            check_ends(text)
        for schema in schemas:
            check_schema(schema)
        matcher = self.matcher(kind, text, JSON_OPTIONS, before)
        if not matcher.is_error():
            for schema in schemas:
                self.check_dead_end(schema)
                self.check_end(schema)
        return matcher

    def matcher(self, kind: str, text: str, options: dict, before: str = ""):
        """
        Return the library's matcher. `options` only apply if the grammar is a schema. Raises
        ValueError.
        """
        if kind == "json":
            # a schema can have options of its own ("x-guidance"), which must be overridden by ours
            text = self.module.LLMatcher.grammar_from_json_schema(text, overrides=options)
        else:
            text = self.module.grammar_from(kind, text)
        if before:
            is_json = text.lstrip().startswith("{")  # otherwise it is Lark
            parts = json.loads(text)["grammars"] if is_json else [{"lark_grammar": text}]
            parts[0]["name"] = "answer"
            text = json.dumps({"grammars": [{"lark_grammar": before}, *parts]})
        return self.module.LLMatcher(self.tokenizer, text, log_level=0, limits=self.limits)

    def check_dead_end(self, schema: str):
        """
        Raise ValueError if patternProperties match only declared properties. The library does not
        notice that such a property can never be written. It still allows the comma or brace before
        it, and then the answer is stuck: for example, no quote is allowed after `{`.
        """
        nodes = [*all_schemas(json.loads(schema), with_targets=True)]
        declared = [node.get(key) for node in nodes for key in ("properties", "required")]
        names = [str(name) for each in declared if isinstance(each, dict | list) for name in each]
        probe = {"type": "object", "minProperties": 1, "additionalProperties": False}
        # all declared names, because allOf may combine this schema with others
        probe["properties"] = dict.fromkeys(names, False)
        for node in nodes:
            match node:
                case {"patternProperties": dict(patterns), "additionalProperties": False}:
                    probe["patternProperties"] = {pattern: {} for pattern in patterns}
                    grammar = json.dumps(probe), {"whitespace_flexible": False}
                    if self.matcher("json", *grammar).compute_ff_bytes() == b"{":
                        raise ValueError(DEAD_END)

    def check_end(self, text: str):
        """
        Raise ValueError if the target of a reference has no finite value. A target is known to have
        a finite value if some value matches it without using the references that are still
        unresolved.
        """
        root = json.loads(text)
        nodes = all_schemas(root, with_targets=True)
        refs = [str(node["$ref"]) for node in nodes if "$ref" in node]
        if not refs:
            return
        schemas = {ref: json.dumps({"allOf": [target_of(ref, root)]}) for ref in [*refs, "#"]}
        names = endless(schemas, self.has_value)
        if names:
            raise ValueError(ENDLESS.format(names))

    def has_value(self, text: str, endless) -> bool:
        """Return whether some value matches a schema without using the references in `endless`."""
        schema = json.loads(text)
        for node in all_schemas(schema):
            if "$ref" in node:
                is_endless = node["$ref"] in endless
                node.clear()
                node |= NOTHING if is_endless else {}
        library = self.module.LLMatcher
        grammar = library.grammar_from_json_schema(json.dumps(schema))
        return not library.validate_grammar(grammar).startswith("Unsatisfiable")

    def try_to_compile(self, kind: str, *texts: str) -> tuple:
        """Return (the matcher, its first mask), or (None, the reason for a refusal)."""
        try:
            matcher = self.compile(kind, *texts)
            mask = mask_of(matcher, "no text matches it")
            if isinstance(mask, bytes):
                check_start(matcher.deep_copy(), mask)
                return matcher, mask
        except MemoryError:
            raise
        except Exception as error:
            mask = plain(str(error), "the grammar library refuses it")
        except BaseException:  # a panic in the library's Rust code
            mask = plain("panic")
        if kind != "grammar":  # line numbers and quotes refer to the library's translation
            mask = re.sub(r"^at \d+\(\d+\): ", "", mask).partition("\n")[0]
        return None, mask

    def refusal(self, reason: str, kind: str, text: str, *_) -> tuple:
        """Return the reason why a grammar is refused, and the numbers of the tools at fault."""
        _, schemas = json.loads(text) if kind == "tools" else ("", [])
        tried = [self.try_to_compile("json", schema) for schema in schemas]
        reasons = {i: why for i, (matcher, why) in enumerate(tried) if not matcher}
        return next(iter(reasons.values()), reason), [*reasons]


def schemas_within(lark: str) -> list[str]:
    """Return the JSON schemas in a Lark grammar."""
    schemas = []
    for found in re.finditer(r"%json\s*(?=\{)", lark):
        with suppress(ValueError):  # the library reports where the error is
            schemas.append(json.dumps(json.JSONDecoder().raw_decode(lark, found.end())[0]))
    return schemas


def unescaped(text: str) -> str:
    """Return JSON with its \\u escapes decoded, because names can be spelled with escapes."""
    return re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)


def mask_of(matcher, otherwise: str = "") -> bytes | str:
    """
    Return the mask for the next position, with a bit for each token. If no token is allowed, return
    the reason, or `otherwise` if the library does not give one.
    """
    mask = matcher.compute_bitmask()
    first = first_token(mask)
    # The library's mask is wrong in two cases. After an error, it allows the end of the text. And
    # if no token contains the only byte that may come next, it allows tokens for what follows that
    # byte.
    is_right = first >= 0 and (matcher.is_stopped() or matcher.validate_tokens([first]))
    if is_right and not matcher.is_error():
        return mask
    return plain(matcher.get_error(), otherwise)


def first_token(mask: bytes) -> int:
    """Return the first token that a mask allows, or -1 if it does not allow any."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def check_start(answer, mask: bytes):
    """Try out the first tokens of an answer. Raises ValueError if the answer gets stuck."""
    for _ in range(TRIED):
        answer.consume_token(first_token(mask))
        if answer.is_stopped() and not answer.is_error():
            return
        mask = mask_of(answer, NO_TOKEN)
        if isinstance(mask, str):
            raise ValueError(f"its answers cannot go on: {mask}")


def plain(error: str, otherwise: str = "") -> str:
    """Return the library's reason without codes, internal notation, backtraces or panics."""
    error = error.encode(errors="replace").decode()  # schemas may spell "\ud800"
    if error.startswith("panic"):
        return "the grammar library crashes on it"
    for part, message in CLEARER.items():
        if part in error:
            return message
    reason = error.partition("\n<")[0].partition(":  (")[0].strip().replace(" f64 ", " a number ")
    _, found, cause = reason.partition("\nerror: ")
    if found:
        return f"invalid regex: {cause}".partition("\n")[0]
    return reason if " " in reason else otherwise


# --------------------------------------------------------------------------------------------------
# Processes


def main(directory: str, V: str, *eos: str):
    """Compile grammars for the model in this directory. stdin is the socket to the engine."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise, it starts threads
    with suppress(OSError):
        # if the machine runs out of memory, these processes are killed before the engine
        Path("/proc/self/oom_score_adj").write_text("1000")
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_STACK, STACK)
    library = Library(load_tokenizer(directory), int(V), [*map(int, eos)])
    gc.disable()  # garbage collection would write to memory that the forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that forks leave no zombies
    serve_forks(socket.socket(fileno=0), library)


def serve_forks(sock: socket.socket, library: Library):
    """
    Fork a process for each grammar that arrives, until the engine closes its end. Only one process
    compiles at a time; the next one starts when that one has reported or ended. Raises OSError if
    there are too many processes.
    """
    while True:
        message, fds, _, _ = socket.recv_fds(sock, MOST_BYTES, 1)
        if not message:
            return
        with socket.socket(fileno=fds[0]) as theirs:
            if has_hung_up(theirs):
                continue
            end, compiles = os.pipe()
            if os.fork() == 0:
                sock.close()
                try:
                    run_grammar(library, theirs, compiles, *marshal.loads(message))
                finally:
                    os._exit(0)
            os.close(compiles)
            if not os.read(end, 1):  # the process has ended without a report
                with suppress(OSError):  # the engine has hung up
                    theirs.send(marshal.dumps([(TOO_LARGE, [])]))
        os.close(end)


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the engine has closed its end. It sends nothing before the report."""
    readable, _, _ = select.select([sock], [], [], 0)
    return bool(readable)


def run_grammar(library: Library, sock: socket.socket, compiles: int, *grammar: str):
    """
    Compile the grammar, send the report, then reply to questions. A byte is written to the file
    descriptor `compiles` as soon as the next process may compile.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the library writes to stderr
    # from here on, SIGIO ends this process if the engine hangs up
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, os.O_ASYNC)
    if has_hung_up(sock):
        return
    signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)
    let_grow(COMPILE_MIB)
    before = address_space()
    try:
        matcher, mask = library.try_to_compile(*grammar)
        refusal = None if matcher else library.refusal(mask, *grammar)
    except MemoryError:
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    os.write(compiles, b"1")
    sock.send(marshal.dumps([refusal or (before, address_space(), mask)]))
    if matcher:
        let_grow(STEP_MIB)
        matchers = defaultdict(matcher.deep_copy)  # id of an answer -> its matcher
        serve_answers(sock, matchers, library.eos, max(1, REPLY_BYTES // len(mask)))


def serve_answers(sock: socket.socket, matchers: dict, eos: list[int], most: int):
    """Reply to questions until the engine closes its end. A message has at most `most` replies."""
    while message := sock.recv(MOST_BYTES):
        questions = marshal.loads(message)
        for i in range(0, len(questions), most):
            replies = [reply_to(matchers, eos, *q) for q in questions[i : i + most]]
            sock.send(marshal.dumps(replies))


def reply_to(
    matchers: dict, eos: list[int], id: int, kind: int, accepted: list[int], tokens: list[int]
) -> int | bytes | str:
    """Append the accepted tokens, and return the reply about `tokens` (see the table above)."""
    signal.setitimer(signal.ITIMER_PROF, STEP_SECONDS)  # each question restarts the timer
    if kind == END:
        matchers.pop(id, None)
        return address_space()
    matcher = matchers[id]
    if accepted:
        matcher.consume_tokens(accepted)
    if kind == MASK:
        return mask_of(matcher)
    if matcher.is_stopped():
        count = int(not matcher.is_error() and tokens[0] in eos)
    else:
        count = matcher.validate_tokens(tokens)
    return count if count or kind == COUNT else mask_of(matcher)


def let_grow(mib: int):
    """Limit this process to its current address space plus `mib` MiB."""
    set_limit(resource.RLIMIT_AS, address_space() + mib * 2**20)


def address_space() -> int:
    """Return the size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def set_limit(kind: int, limit: int):
    """Set a limit for this process and its forks. A lower limit set by the user is kept."""
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    main(*sys.argv[1:])
