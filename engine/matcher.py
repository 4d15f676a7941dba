"""
The processes in which grammars are compiled, and answers are held to them.

    engine -- fork server -- a process for each grammar, with the matchers of all its answers

A client's text can make the library take any time and all memory, when it is compiled or a hundred
tokens later, and a failed allocation ends the library's process. So the library never runs in the
engine. The kernel ends a process that exceeds its limits, and the engine sees that its socket is
closed. Then all answers of this grammar end: each could have met the same trap.

Not run by itself: engine/grammar.py starts the fork server and is the other end of the sockets,
which keep messages apart (SOCK_SEQPACKET). No threads here: they do not survive a fork.

    to the fork server          a socket for the grammar's process, and (kind, text, before)
    from a grammar's process    a report: (bytes of its address space before and with the
                                grammar, the first mask), or (why it is refused, numbers of the
                                tools at fault); the fork server's, if it ends without one
    to a grammar's process      a list of questions about its answers, once a step
    from a grammar's process    lists of replies, in the order of the questions

All is written by `marshal`, which is the fastest for lists of numbers. A question is (the answer's
id, a kind, the tokens that came since, more tokens); a new id begins a new answer. Replies:

    COUNT    how many of these tokens may come
    OFFER    1 if this one may come, else as for MASK
    MASK     the mask (bytes), or why no token may come (text)
    END      bytes of the process's address space: the answer is gone
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
STEP_SECONDS = 0.05  # of CPU time, for a question
STEP_MIB = 64  # that all answers may add to their grammar
TOO_LARGE = f"compiling it takes more than {COMPILE_SECONDS} s or {COMPILE_MIB} MB: make it smaller"
MOST_BYTES = 2**19  # of a message: more than a socket takes
REPLY_BYTES = 2**17  # of a message with replies
# llguidance recurses along a chain of rules or references: 64 KB of text make it 32 MB deep
STACK = 128 * 2**20
# JSON with no more than a blank between its parts: a small model can write newlines for ever
JSON_OPTIONS = {"whitespace_pattern": "[ ]?", "whitespace_flexible": True, "lenient": False}
OFFER, COUNT, MASK, END = range(4)
# the library's own limits, which it names when it refuses
LIMITS = {"max_grammar_size": 20_000, "max_items_in_row": 10_000, "verbose_errors": False}
TRIED = 8  # tokens of an answer, before a grammar is served
NO_TOKEN = "the vocabulary has no token for what must come next"
NOTHING = {"enum": []}  # a schema that nothing fits
DEAD_END = "its patternProperties name only properties that are declared, too: leave them out"
ENDLESS = "no value of {} has an end: allow null there, or require less"
# words of the library that mean nothing to others, and ours
OWN_WORDS = {
    "coerce_one_of": "oneOf is not served where its schemas may overlap: say anyOf",
    "too many expressions": "it has too many expressions: make its regular expressions smaller",
    "Failed to generate regex": "a bound is too large: choose one of at most 2^53 in size",
    "recursion depth": "it is nested too deep",
    "decimal literal": "it has a length or count above 4,294,967,295: choose a smaller one",
    "Too many items": "it goes on without an end, or has too many short rules",
}


class Vocabulary:
    """A tokenizer as llguidance wants it. `V`: rows of the model, at least one for each token."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, V: int, eos: list[int]):
        self.encode = tokenizer.encode
        self.eos_token_id = eos[0]
        self.tokens = [tokenizer.spelled_bytes(token) for token in range(V)]
        self.special_token_ids = sorted({*tokenizer.control.values(), *eos})

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


class Library:
    """llguidance, and one model's tokenizer in its form."""

    def __init__(self, tokenizer: Tokenizer, V: int, eos: list[int]):
        import llguidance

        self.module = llguidance
        self.eos = eos
        self.ends = {id: name for name, id in tokenizer.control.items() if id in eos}
        wrapped = llguidance.TokenizerWrapper(Vocabulary(tokenizer, V, eos))
        self.tokenizer = llguidance.LLTokenizer(wrapped, eos_token=eos)
        self.limits = llguidance.LLParserLimits(**LIMITS)

    def compile(self, kind: str, text: str, before: str = ""):
        """Compile, as Grammars.begin says. Returns the library's matcher. Raises ValueError."""
        schemas = [text] if kind == "json" else []
        if kind == "tools":
            (text, schemas), kind = json.loads(text), "lark"
        if kind == "grammar":
            if "x-guidance" in unescaped(text):
                raise ValueError(f"the {kind} has x-guidance, whose options are not a client's")
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
        """Return the library's matcher, with these options for a schema. Raises ValueError."""
        if kind == "json":
            # a schema can bring options of its own ("x-guidance"): ours come last
            text = self.module.LLMatcher.grammar_from_json_schema(text, overrides=options)
        else:
            text = self.module.grammar_from(kind, text)
        if before:
            is_json = text.lstrip().startswith("{")  # else Lark
            parts = json.loads(text)["grammars"] if is_json else [{"lark_grammar": text}]
            parts[0]["name"] = "answer"
            text = json.dumps({"grammars": [{"lark_grammar": before}, *parts]})
        return self.module.LLMatcher(self.tokenizer, text, log_level=0, limits=self.limits)

    def check_dead_end(self, schema: str):
        """
        Raise ValueError if the library allows a comma or a brace before patternProperties that name
        nothing but declared properties. It does not notice: after `{` it can write no quote.
        """
        nodes = [*all_schemas(json.loads(schema), with_targets=True)]
        declared = [node.get(key) for node in nodes for key in ("properties", "required")]
        names = [str(name) for each in declared if isinstance(each, dict | list) for name in each]
        probe = {"type": "object", "minProperties": 1, "additionalProperties": False}
        probe["properties"] = dict.fromkeys(names, False)  # also what may be combined
        for node in nodes:
            match node:
                case {"patternProperties": dict(patterns), "additionalProperties": False}:
                    probe["patternProperties"] = {pattern: {} for pattern in patterns}
                    grammar = json.dumps(probe), {"whitespace_flexible": False}
                    if self.matcher("json", *grammar).compute_ff_bytes() == b"{":
                        raise ValueError(DEAD_END)

    def check_end(self, text: str):
        """
        Raise ValueError if a schema in it has no finite value. A reference has one if its schema
        can be met without those that are not known to have one.
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
        """Return whether something fits a schema without these references."""
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
        """Return (the matcher, its first mask), or (None, why it is refused)."""
        try:
            matcher = self.compile(kind, *texts)
            mask = mask_of(matcher, "no text fits it")
            if isinstance(mask, bytes):
                check_start(matcher.deep_copy(), mask)
                return matcher, mask
        except MemoryError:
            raise
        except Exception as error:
            mask = plain(str(error), "the grammar library refuses it")
        except BaseException:  # a panic of the library's Rust
            mask = plain("panic")
        if kind != "grammar":  # it would be shown in the library's form
            mask = re.sub(r"^at \d+\(\d+\): ", "", mask).partition("\n")[0]
        return None, mask

    def refusal(self, reason: str, kind: str, text: str, *_) -> tuple:
        """Return why a grammar is refused, and the numbers of the tools that are at fault."""
        _, schemas = json.loads(text) if kind == "tools" else ("", [])
        tried = [self.try_to_compile("json", schema) for schema in schemas]
        reasons = {i: why for i, (matcher, why) in enumerate(tried) if not matcher}
        return next(iter(reasons.values()), reason), [*reasons]


def schemas_within(lark: str) -> list[str]:
    """Return the JSON schemas in a Lark grammar."""
    schemas = []
    for found in re.finditer(r"%json\s*(?=\{)", lark):
        with suppress(ValueError):  # the library says where
            schemas.append(json.dumps(json.JSONDecoder().raw_decode(lark, found.end())[0]))
    return schemas


def unescaped(text: str) -> str:
    """Return a text as a JSON parser reads its names, which can be spelled with escapes."""
    return re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)


def mask_of(matcher, otherwise: str = "") -> bytes | str:
    """
    Compute the mask of the next position, a bit for each token. If no token may come, return the
    reason, or `otherwise` if the library gives none.
    """
    mask = matcher.compute_bitmask()
    bits = int.from_bytes(mask, "little")
    first = (bits & -bits).bit_length() - 1
    # With an error it allows the end. Where no token has the only byte that may come, it allows
    # what comes after that byte.
    is_right = matcher.is_stopped() or matcher.validate_tokens([first]) if bits else False
    if is_right and not matcher.is_error():
        return mask
    return plain(matcher.get_error(), otherwise)


def check_start(answer, mask: bytes):
    """Raise ValueError if the likes of an answer get stuck at one of its first tokens."""
    for _ in range(TRIED):
        bits = int.from_bytes(mask, "little")
        answer.consume_token((bits & -bits).bit_length() - 1)
        if answer.is_stopped() and not answer.is_error():
            return
        mask = mask_of(answer, NO_TOKEN)
        if isinstance(mask, str):
            raise ValueError(f"its answers cannot go on: {mask}")


def plain(error: str, otherwise: str = "") -> str:
    """Return the library's reason without its codes, its own notation, backtraces and panics."""
    if error.startswith("panic"):
        return "the grammar library fails at it"
    for words, own in OWN_WORDS.items():
        if words in error:
            return own
    reason = error.partition("\n<")[0].partition(":  (")[0].strip().replace(" f64 ", " a number ")
    _, found, cause = reason.partition("\nerror: ")
    if found:
        return f"invalid regex: {cause}".partition("\n")[0]
    return reason if " " in reason else otherwise


# --------------------------------------------------------------------------------------------------
# Processes


def main(directory: str, V: str, *eos: str):
    """Serve grammars for the model in this directory. The engine's socket is stdin."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or it starts threads
    with suppress(OSError):
        # where the machine lacks memory, these processes end before the engine does
        Path("/proc/self/oom_score_adj").write_text("1000")
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_STACK, STACK)
    library = Library(load_tokenizer(directory), int(V), [*map(int, eos)])
    gc.disable()  # it would write to memory that forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they leave nothing to wait for
    serve_forks(socket.socket(fileno=0), library)


def serve_forks(sock: socket.socket, library: Library):
    """
    Fork a process for each grammar that comes, until the engine closes its end. One compiles at a
    time: the next is begun when the one before has reported or ended. Raises OSError: too many
    processes.
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
            if not os.read(end, 1):  # it has ended without a report
                with suppress(OSError):  # the engine has hung up
                    theirs.send(marshal.dumps([(TOO_LARGE, [])]))
        os.close(end)


def has_hung_up(sock: socket.socket) -> bool:
    """Return whether the engine has closed its end. It sends nothing before the report."""
    readable, _, _ = select.select([sock], [], [], 0)
    return bool(readable)


def run_grammar(library: Library, sock: socket.socket, compiles: int, *grammar: str):
    """Compile the grammar, write to the file `compiles`, report, then answer questions."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the library writes to it
    # if the engine hangs up from here on, SIGIO ends this process
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
        matchers = defaultdict(matcher.deep_copy)  # by answer
        serve_answers(sock, matchers, library.eos, max(1, REPLY_BYTES // len(mask)))


def serve_answers(sock: socket.socket, matchers: dict, eos: list[int], most: int):
    """Reply to questions until the engine closes its end, at most `most` in a message."""
    while message := sock.recv(MOST_BYTES):
        questions = marshal.loads(message)
        for i in range(0, len(questions), most):
            replies = [reply_to(matchers, eos, *q) for q in questions[i : i + most]]
            sock.send(marshal.dumps(replies))


def reply_to(
    matchers: dict, eos: list[int], id: int, kind: int, came: list[int], asked: list[int]
) -> int | bytes | str:
    """Take the tokens that came. Returns the reply about those asked (see the file's top)."""
    signal.setitimer(signal.ITIMER_PROF, STEP_SECONDS)  # each question restarts it
    if kind == END:
        matchers.pop(id, None)
        return address_space()
    matcher = matchers[id]
    if came:
        matcher.consume_tokens(came)
    if kind == MASK:
        return mask_of(matcher)
    if matcher.is_stopped():
        count = int(not matcher.is_error() and asked[0] in eos)
    else:
        count = matcher.validate_tokens(asked)
    return count if count or kind == COUNT else mask_of(matcher)


def let_grow(mib: int):
    """Limit this process to `mib` MiB of address space more than it has now."""
    set_limit(resource.RLIMIT_AS, address_space() + mib * 2**20)


def address_space() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def set_limit(kind: int, limit: int):
    """Set a limit of this process and of its forks, as far as its user may."""
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    main(*sys.argv[1:])
