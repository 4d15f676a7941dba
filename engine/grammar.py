"""
Answers held to a grammar: a JSON schema, a regular expression, a choice, or rules.

    grammars = Grammars(load_tokenizer("out/stdlib"), model.config)
    grammar = grammars.compile("json", '{"type": "object"}')       # milliseconds, up to a second
    engine.add_request("a", prompt, SamplingParams(max_tokens=99, grammar=grammar))

Check first, mask on a miss. A token is sampled as the argmax of scores plus noise, where the noise
is a function of the request's seed and the position. So if the grammar allows the winner among all
tokens, it is the winner among the allowed ones, too, bit for bit. To ask costs 2 us, a mask of the
vocabulary 10 to 500. Only where the grammar refuses a token is the mask computed, by a thread, and
the position sampled again (`Engine._check_grammars`). top_k, top_p and min_p choose among what a
mask leaves: with them, the next position's mask is begun as soon as a token is known.

llguidance reads the grammars. A `Compiler` stands before the server's loop, and compiles those of
its messages.
"""

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from model import GPTConfig
from tokenizer import Tokenizer

MASK_SECONDS = 0.002  # how long a step waits for masks: requests whose masks are late sit out
MAX_GRAMMARS = 64  # compiled ones that are kept
# JSON with no more than a blank between its parts: a small model can write newlines for ever
JSON_OPTIONS = {"whitespace_pattern": "[ ]?", "whitespace_flexible": True, "lenient": False}
# sizes at which the slowest grammar that was found takes less than a second, and 64 MB
LIMITS = {"max_grammar_size": 20_000, "max_items_in_row": 10_000, "verbose_errors": False}

# multiples of a number are found by an automaton with as many states, which no limit of the library
# bounds: 1,000,003 took 5.6 s and 300 MB, 4,294,967,291 all the memory
MAX_MULTIPLE = 50_000

MULTIPLE = r'"multipleOf"\s*:\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d{1,4})?)'

STUCK = "the answer cannot go on: "  # begins messages of errors that are not the server's fault
NOTHING_ALLOWED = "no token is left: of those that the grammar allows next, the vocabulary has none"
NOTHING_ALLOWED += ", or min_tokens and logit_bias forbid them"

# llguidance recurses along a chain of rules or references: 64 KB of text make it 32 MB deep
STACK = 128 * 2**20
# the library releases the GIL; a grammar that takes long holds up other new ones, but no masks
compilers = ThreadPoolExecutor(1, "grammar")
maskers = ThreadPoolExecutor(2, "mask")


def unescaped(text: str) -> str:
    """As a JSON parser reads the names in a text: they can be spelled with escapes."""
    return re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)


def check_multiples(text: str):
    """Raises ValueError where a number of `multipleOf`, or several together, are too large."""
    numbers = [Decimal(number) for number in re.findall(MULTIPLE, text)]
    if any(abs(number.adjusted()) > 9 for number in numbers):
        common = MAX_MULTIPLE + 1
    else:
        places = max((-number.as_tuple().exponent for number in numbers), default=0)
        common = math.lcm(*[int(number.scaleb(max(places, 0))) for number in numbers])
    if common > MAX_MULTIPLE:
        raise ValueError(f"multipleOf: the common multiple is above {MAX_MULTIPLE:,}")


class Vocabulary:
    """A tokenizer as llguidance asks for one. `V`: the model's vocabulary, which may have more."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, V: int, eos: tuple[int, ...]):
        self.encode = tokenizer.encode
        self.eos_token_id = eos[0]
        self.tokens = [tokenizer.spelled_bytes(token) for token in range(V)]
        self.special_token_ids = sorted({*tokenizer.control.values(), *eos})

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


class Grammars:
    """Compiles the grammars of one model's requests. Raises ImportError without llguidance."""

    def __init__(self, tokenizer: Tokenizer, config: GPTConfig):
        import llguidance
        import llguidance.numpy

        self.library = llguidance
        self.bitmasks = llguidance.numpy
        self.executor = llguidance.LLExecutor(2)
        self.V = config.vocab_size
        self.eos = tuple(config.eos_token_ids)
        vocabulary = Vocabulary(tokenizer, self.V, self.eos)
        wrapped = llguidance.TokenizerWrapper(vocabulary)
        self.tokenizer = llguidance.LLTokenizer(wrapped, eos_token=list(self.eos))
        self.limits = llguidance.LLParserLimits(**LIMITS)
        self.compile = lru_cache(MAX_GRAMMARS)(self.compile)

    def compile(self, kind: str, text: str) -> "Grammar":
        """
        `kind`: "json", a schema; "regex"; "choice", a JSON list of texts; "grammar", in Lark's
        notation or llama.cpp's (GBNF); "lark", the server's own (server/tools.py). It stands at the
        beginning, and is kept to be copied. Raises ValueError with the library's reason.
        """
        plain = unescaped(text)
        check_multiples(plain)
        if kind == "json":
            # a schema can bring options of its own ("x-guidance"): ours come last
            text = self.library.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        else:
            if kind == "grammar" and "x-guidance" in plain:
                raise ValueError(f"the {kind} has x-guidance, whose options are not a client's")
            text = self.library.grammar_from(kind, text)
        matcher = self.library.LLMatcher(self.tokenizer, text, log_level=0, limits=self.limits)
        grammar = Grammar(self, matcher)
        begin_masks([grammar])  # of the first position, once for all its copies
        if not grammar.mask.allowed().any():
            reason = matcher.get_error().replace("<non-verbose/>", "").strip()
            if reason in ("", "NoExtensionBias"):
                reason = "no text fits it"
            raise ValueError(f"this grammar cannot be served: {reason:.500}")
        return grammar

    def compute_masks(self, matchers: list) -> np.ndarray:
        """[n, V / 32] int32: see `Mask.allowed`."""
        bits = self.bitmasks.allocate_token_bitmask(len(matchers), self.V)
        pairs = list(zip(matchers, range(len(matchers)), strict=True))
        self.bitmasks.fill_next_token_bitmask_par(self.executor, pairs, bits)
        for matcher, row in zip(matchers, bits, strict=True):
            if matcher.is_error():  # then it has allowed the end
                row[:] = 0
        return bits


class Compiler:
    """
    Has the grammars of messages compiled by a thread: a message waits for its own, the others go
    by. `open_grammars` makes the `Grammars`, when the first message needs it.
    """

    def __init__(self, open_grammars: Callable[[], Grammars]):
        self.open_grammars = cache(open_grammars)
        self.waiting: dict[str, dict] = {}  # messages by id; each "grammar" is a Future

    def compile(self, kind: str, text: str) -> "Grammar":
        try:
            return self.open_grammars().compile(kind, text)
        except BaseException as error:  # of the library's Rust: panics, too
            raise ValueError(str(error)) from None

    def pass_on(self, arrived: Iterable[dict]) -> Iterator[dict]:
        """
        The messages that can be handled now. A grammar in one, {"kind", "text"}, has become a
        Future that is done.
        """
        for message in arrived:
            if message.get("grammar"):
                message["grammar"] = submit(compilers, self.compile, **message["grammar"])
                self.waiting[message["id"]] = message
                continue
            if message["op"] == "abort":
                self.forget(message["id"])
            yield message
        for id, message in [*self.waiting.items()]:
            if message["grammar"].done():
                yield self.waiting.pop(id)

    def forget(self, id: str):
        """A request was aborted: nobody waits for its grammar."""
        if id in self.waiting:
            self.waiting.pop(id)["grammar"].cancel()


class Mask(NamedTuple):
    """Of one position, computed by a job of a thread together with others."""

    job: Future  # brings [n, V / 32] int32
    index: int

    def allowed(self) -> np.ndarray:
        """
        [V / 32] int32: a bit for each token that may come next. None, where the vocabulary cannot
        go on, or where the library gives up.
        """
        return self.job.result()[self.index]


class Grammar:
    """
    One answer's place in its grammar: behind all of its tokens that are known. While its mask is
    computed nothing else may be asked.
    """

    def __init__(self, grammars: Grammars, matcher, mask: Mask | None = None):
        self.grammars = grammars
        self.matcher = matcher
        self.mask = mask  # of the next position, once it was begun

    def copy(self) -> "Grammar":
        return Grammar(self.grammars, self.matcher.deep_copy(), self.mask)

    @property
    def has_mask(self) -> bool:
        return self.mask is not None and self.mask.job.done()

    def accept(self, token: int) -> bool:
        """Go on behind this token, if it is allowed."""
        is_end = token in self.grammars.eos and self.matcher.is_stopped()
        is_allowed = is_end or self.matcher.try_consume_tokens([token]) == 1
        if is_allowed:
            self.mask = None
        return is_allowed

    def allowed_part(self, draft: list[int]) -> list[int]:
        """The first tokens of a draft that it allows; none where a mask was begun."""
        if self.mask:
            return []
        return draft[: self.matcher.validate_tokens(draft)]

    def failure(self) -> str:
        """Why no token may come next."""
        return STUCK + (self.matcher.get_error() or NOTHING_ALLOWED)


def submit(threads: ThreadPoolExecutor, function: Callable, *args, **options) -> Future:
    """To the threads, of which a call that finds none idle may start one more."""
    before = threading.stack_size(STACK)
    try:
        return threads.submit(function, *args, **options)
    finally:
        threading.stack_size(before)


def begin_masks(grammars: list[Grammar]):
    """Of these grammars, by a thread: all are done at once."""
    new = [grammar for grammar in grammars if grammar.mask is None]
    if new:
        matchers = [grammar.matcher for grammar in new]
        job = submit(maskers, new[0].grammars.compute_masks, matchers)
        for i, grammar in enumerate(new):
            grammar.mask = Mask(job, i)
