"""
Text <-> token ids: characters, byte-level BPE trained on a corpus, and GPT-2's, behind one small
surface.

    tokenizer = load_tokenizer("out/stdlib")       # what train.py saved, or a GPT-2 directory from the hub
    ids = tokenizer.encode("def hello():")         # list[int]
    text = tokenizer.decode(ids)                   # str; decode_bytes(ids) for the bytes themselves
    piece = tokenizer.token_bytes(ids[0])          # the bytes of one token, b"" for a control token

All three are one file, tokenizer.json in the format of the `tokenizers` library, so
`transformers.AutoTokenizer` reads what we save and gives the same ids. `tokenizers` itself is
needed only to train a BPE; running one is tiktoken's job. This file also holds what the corpora in
data/ share: writing files that are never half there, and token files.
"""

import bisect
import codecs
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

END_OF_TEXT = "<|endoftext|>"
# How GPT-2 cuts a text into pieces before it merges bytes within each: contractions, words and
# numbers and punctuation with at most one space before them, and runs of white space that leave
# their last space to the word that follows.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# tiktoken's regular expressions give up on a run of a million blanks, so a longer run than this is
# cut here. That is the one place where the ids may differ from those of transformers: the two ends
# of a cut are not merged.
MAX_BLANKS = 500_000
# Without the look behind, a run just below the limit would be tried again from each of its blanks.
ENDLESS_BLANKS = re.compile(rf"(?<!\s)(?:\s{{{MAX_BLANKS}}})+")

# Ids index a list, so one of 10**9 would cost gigabytes; the largest vocabularies in use have
# 262,144 tokens.
MAX_VOCABULARY = 2**20
# Files of other tokenizers, and of GPT-2's before there was tokenizer.json.
FOREIGN_TOKENIZERS = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json")
MAX_NAME = 256  # characters of a control token's name; real ones have up to 40


class TokenizerError(ValueError):
    """
    A tokenizer that cannot be read, or text that it cannot encode; the message says what to change.
    """


def byte_alphabet() -> list[str]:
    """
    The character that stands for each of the 256 bytes in tokenizer.json (GPT-2's convention): a
    visible Latin-1 character is itself, all others get the characters from U+0100 on, in order. A
    space is "Ġ", a newline "Ċ".
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}


class Tokenizer:
    """
    What both kinds share: the parsed tokenizer.json (`spec`), the bytes of every id, and the
    end-of-text token.

    `vocab_size` counts the control tokens; `eos_token_id` is None where there is no such token
    (character level).
    """

    has_known_pattern = True  # how it cuts texts takes time in proportion to their length, for sure

    def __init__(
        self, spec: dict, piece_bytes: Callable[[str], bytes], eos_token: str = END_OF_TEXT
    ):
        self.spec = spec
        self.control = read_control_tokens(spec)
        self.vocab: dict[str, int] = spec["model"]["vocab"]
        check_ids(self.vocab, self.control)
        self.vocab_size = max([*self.vocab.values(), *self.control.values()]) + 1
        self.eos_token_id: int | None = self.control.get(eos_token)
        # a control token has no text: it decodes to nothing, wherever it stands
        text = {
            i: piece_bytes(piece) for piece, i in self.vocab.items() if piece not in self.control
        }
        self._bytes = [text.get(i, b"") for i in range(self.vocab_size)]
        self.names = {i: name for name, i in self.control.items()}
        # the longest first: of two names that begin alike, transformers takes the longer
        longest_first = sorted(self.control, key=len, reverse=True)
        self.control_names = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
            if self.control
            else None
        )

    def encode(
        self,
        text: str | bytes,
        allow_special: bool = False,
        stand_ins: dict[int, str] | None = None,
    ) -> list[int]:
        """
        Token ids of a text, or of bytes. Text that spells a control token is text; with
        allow_special=True it is that token, as in transformers. `stand_ins`, for `str.translate`,
        says which characters stand for others from then on: a name that is spelled with them is
        text in any case. Raises TokenizerError.
        """
        if isinstance(text, bytes):
            return self._encode_bytes(text, allow_special)
        # every second piece is a name
        pieces = self.control_names.split(text) if allow_special and self.control else [text]
        ids = []
        for i, piece in enumerate(pieces):
            if i % 2:
                ids.append(self.control[piece])
            else:
                ids += self._encode_text(piece.translate(stand_ins) if stand_ins else piece)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """
        The bytes of one token; possibly a part of a UTF-8 character. b"" for a control token, and
        for an id beyond the vocabulary: a model may have more rows than there are tokens, to be a
        multiple of 64.
        """
        return self._bytes[token] if token < len(self._bytes) else b""

    def spelled_bytes(self, token: int) -> bytes:
        """The same, but a control token is spelled by its name, "<|endoftext|>"."""
        return self.names[token].encode() if token in self.names else self.token_bytes(token)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, directory: str | Path):
        """Write tokenizer.json and tokenizer_config.json, each atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # Without this class name transformers guesses from config.json that the tokenizer is
        # GPT-2's own.
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if self.eos_token_id is not None:
            name = next(name for name, i in self.control.items() if i == self.eos_token_id)
            config |= {"bos_token": name, "eos_token": name}
        write_json(directory / "tokenizer.json", self.spec)
        write_json(directory / "tokenizer_config.json", config)


class CharTokenizer(Tokenizer):
    """
    One token a character: the tokenizer of nanoGPT's shakespeare_char. A character it does not know
    is an error.
    """

    def __init__(self, spec: dict, eos_token: str = END_OF_TEXT):
        if read_pattern(spec) != EVERY_CHARACTER or spec.get("normalizer"):
            raise foreign("is a WordLevel of other pieces than single characters")
        check_around(spec, decoder="Fuse")
        super().__init__(spec, str.encode, eos_token)

    def _encode_bytes(self, data: bytes, allow_special: bool) -> list[int]:
        return self.encode(data.decode("utf-8"), allow_special)

    def _encode_text(self, text: str) -> list[int]:
        """Raises TokenizerError that names the first unknown character."""
        try:
            return [self.vocab[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise TokenizerError(
                f"character {character!r} (U+{ord(character):04X}, at position {text.index(character)}) is not among "
                f"the {self.vocab_size} this tokenizer knows: remove it, or train with a BPE, which knows every byte"
            ) from None


class BPETokenizer(Tokenizer):
    """
    Byte-level BPE, run by tiktoken: every text and every sequence of bytes has an encoding, and
    comes back.
    """

    def __init__(self, spec: dict, eos_token: str = END_OF_TEXT):
        self.normalize = read_normalizer(spec)
        pattern = read_pattern(spec)
        self.has_known_pattern = pattern == GPT2_PATTERN
        check_around(spec, decoder="ByteLevel")
        check_model(spec)
        super().__init__(spec, lambda piece: bytes(BYTE_OF[c] for c in piece), eos_token)
        # tiktoken merges the pair with the lowest id first, so ids must rise in the order in which
        # merges were learnt.
        merges = [m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"]]
        merged = list(dict.fromkeys(self.vocab[a + b] for a, b in merges))
        if merged != sorted(merged):
            raise foreign("numbers its tokens in another order than its merges")
        self.byte_ids = [self.vocab[character] for character in byte_alphabet()]
        ranks = {self._bytes[i]: i for i in [*self.byte_ids, *merged]}
        if spec["model"].get("ignore_merges") and len(ranks) < len(
            self.vocab.keys() - self.control.keys()
        ):
            raise foreign("has tokens that no merge makes (ignore_merges)")
        self.bpe = tiktoken.Encoding(
            "tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )

    def _encode_text(self, text: str) -> list[int]:
        """A lone surrogate, which no UTF-8 can hold, is read as U+FFFD."""
        try:
            return [
                i
                for piece in cut_blanks(self.normalize(text))
                for i in self.bpe.encode_ordinary(piece)
            ]
        except ValueError as error:  # of tiktoken's regular expressions
            raise TokenizerError(
                f"the tokenizer's pattern gives up on this text: shorten it ({error})"
            ) from None

    def _encode_bytes(self, data: bytes, allow_special: bool) -> list[int]:
        """What is not UTF-8 is spelt byte by byte, so that it comes back."""
        ids = []
        # surrogateescape turns each byte that is not UTF-8 into U+DC80..U+DCFF; every second piece
        # is a run of those
        for i, piece in enumerate(
            re.split("([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape"))
        ):
            ids += (
                [self.byte_ids[ord(c) - 0xDC00] for c in piece]
                if i % 2
                else self.encode(piece, allow_special)
            )
        return ids


def cut_blanks(text: str) -> list[str]:
    """
    The text, cut inside runs of more than MAX_BLANKS blanks; once through it, whatever the runs.
    """
    edges = [0]
    for run in ENDLESS_BLANKS.finditer(text):
        edges += range(run.start() + MAX_BLANKS, run.end() + 1, MAX_BLANKS)
    return [text[start:end] for start, end in pairwise([*edges, len(text)])]


def token_name(data: bytes) -> str:
    """
    A token's text; bytes that are no whole characters are spelled out, so that no two tokens are
    called the same.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# --------------------------------------------------------------------------------------------------
# What a tokenizer.json may say: all of it is understood, or it is refused by name

EVERY_CHARACTER = r"[\s\S]"
# Where tokenizers' regular expressions (Oniguruma's) mean something else than tiktoken's, or a
# match depends on more than the text from there on: anchors, back references, and a few escapes and
# quantifiers.
FOREIGN_REGEX = re.compile(r"(?<![\[\\])\^|(?<!\\)\$|\\[1-9AGHKRXZhkz]|\}\+|\(\?[<P]?[#&0-9R]")


def foreign(what: str) -> TokenizerError:
    return TokenizerError(
        f"tokenizer.json {what}: not supported here, vLLM or transformers open such a directory"
    )


def read_control_tokens(spec: dict) -> dict[str, int]:
    """
    {name: id} of the added tokens. Raises TokenizerError for those that are more than a name for an
    id.
    """
    added = spec.get("added_tokens") or []
    for token in added:
        check_added_token(token, spec.get("normalizer") is not None)
    ids = {token["content"]: token["id"] for token in added}
    if len(ids) < len(added):
        raise TokenizerError("tokenizer.json has an added token twice: restore it")
    return ids


def check_added_token(token: dict, has_normalizer: bool):
    for flag in ("lstrip", "rstrip", "single_word"):
        if token.get(flag):
            raise foreign(f"has the added token {token['content']!r} with {flag}")
    if has_normalizer and token.get("normalized"):
        raise foreign(f"has the added token {token['content']!r} that is found in normalized text")
    if not token.get("special"):
        raise foreign(f"has the added token {token['content']!r} that is text (special: false)")
    if not 0 < len(token["content"]) <= MAX_NAME:
        raise TokenizerError(
            f"tokenizer.json has an added token of {len(token['content'])} characters: restore it"
        )


def check_ids(vocab: dict[str, int], control: dict[str, int]):
    """
    Raises TokenizerError unless each token has an id of its own, a whole number below
    MAX_VOCABULARY.
    """
    ids = vocab | control
    for name, i in ids.items():
        if type(i) is not int or not 0 <= i < MAX_VOCABULARY:
            raise TokenizerError(
                f"token {name!r:.100} has the id {i!r:.30}, wanted 0 to {MAX_VOCABULARY - 1}: restore it"
            )
        if vocab.get(name, i) != i:
            raise TokenizerError(
                f"token {name!r:.100} has two ids, {vocab[name]} and {i}: restore it"
            )
    if len(set(ids.values())) < len(ids):
        counts = Counter(ids.values()).most_common(1)
        raise TokenizerError(f"{counts[0][1]} tokens share the id {counts[0][0]}: restore it")


def check_around(spec: dict, decoder: str):
    """
    Raises TokenizerError for a post-processor that adds tokens, and for a decoder that is not the
    one expected.
    """
    post = spec.get("post_processor") or {"type": "ByteLevel"}
    for part in post.get("processors", [post]):
        plain_template = part["type"] == "TemplateProcessing" and not part.get("special_tokens")
        if part["type"] != "ByteLevel" and not plain_template:
            raise foreign(f"adds tokens to every text (post-processor {part['type']})")
    found = (spec.get("decoder") or {}).get("type")
    if found != decoder:
        raise foreign(f"makes text of tokens by {found}")


def check_model(spec: dict):
    """
    Raises TokenizerError for options of a BPE that change what it does to bytes, and for bytes that
    it lacks.
    """
    model = spec["model"]
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise foreign(f"is a BPE with {option}")
    if missing := BYTE_OF.keys() - model["vocab"].keys():
        raise foreign(f"lacks {len(missing)} of the 256 bytes")


def read_pattern(spec: dict) -> str:
    """
    The regular expression that cuts a text into pieces. Raises TokenizerError for what tiktoken
    cannot do.
    """
    pre = spec.get("pre_tokenizer") or {}
    parts = pre["pretokenizers"] if pre.get("type") == "Sequence" else [pre]
    kinds = [part.get("type") for part in parts]
    if any(part.get("add_prefix_space") for part in parts):
        raise foreign("puts a prefix space before every text")
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return GPT2_PATTERN
    if kinds == ["Split"] or (
        kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True)
    ):
        return read_split(parts[0])
    raise foreign(
        f"cuts text by {' and '.join(map(str, kinds))}, supported are ByteLevel or one Split"
    )


def read_split(split: dict) -> str:
    pattern = split["pattern"].get("Regex")
    behavior = str(split.get("behavior"))
    if pattern is None or behavior.lower() != "isolated" or split.get("invert"):
        raise foreign(
            f"cuts text by a Split (behaviour {behavior}) other than of isolated regular expressions"
        )
    if FOREIGN_REGEX.search(pattern):
        raise foreign(f"cuts text by the regular expression {pattern!r:.200}")
    if pattern == EVERY_CHARACTER:
        return pattern
    # tiktoken drops what no piece matches; to the tokenizers library it is a piece, too
    return rf"{pattern}|(?:(?!{pattern}){EVERY_CHARACTER})+"


def read_normalizer(spec: dict) -> Callable[[str], str]:
    kind = (spec.get("normalizer") or {"type": None})["type"]
    if kind not in (None, "NFC"):
        raise foreign(f"normalizes text by {kind}, supported are none and NFC")
    return (lambda text: unicodedata.normalize("NFC", text)) if kind else (lambda text: text)


# --------------------------------------------------------------------------------------------------
# Tokens to text, as they come


class TextStream:
    """
    Tokens of one answer in, text out as soon as it is certain: whole UTF-8 characters, nothing of a
    stop string.

    `token_bytes(id)` gives the bytes of a token. A stop string ends the text where it first is
    complete, so how the text is cut into tokens makes no difference. `matched` is then that string,
    and the text ends before it, or after it with include_stop.

        stream = TextStream(tokenizer.token_bytes, stop=["\\n\\n"])
        text = "".join(stream.push(token) for token in tokens) + stream.flush()
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop: list[str] = (), include_stop: bool = False
    ):
        self.token_bytes, self.include_stop = token_bytes, include_stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(
            "replace"
        )  # keeps the bytes of a character not yet whole
        self.num_characters = 0  # decoded so far
        self.held = ""  # the longest end of the text that a stop string begins with
        self.matched: str | None = None
        self.stop_at(stop)

    def stop_at(self, stop: list[str]):
        """From here on end the text at these strings."""
        self.stop = tuple(sorted(stop))
        self.first_characters = frozenset(string[0] for string in stop)
        self.last_characters = frozenset(string[-1] for string in stop)

    def push(self, token: int) -> str:
        """The text that this token makes certain, often but not always the token's own."""
        return self._release(self.decoder.decode(self.token_bytes(token)))

    def push_all(self, tokens: list[int]) -> str:
        """
        The text of many tokens, in a fraction of the time. They are not searched for stop strings.
        """
        text = self.decoder.decode(b"".join(map(self.token_bytes, tokens)))
        self.num_characters += len(text)
        return text

    def flush(self) -> str:
        """
        The rest, when no token follows: half a character becomes U+FFFD, and what was held is text
        after all.
        """
        text = self._release(self.decoder.decode(b"", final=True)) + self.held
        self.held = ""
        return text

    def _release(self, text: str) -> str:
        self.num_characters += len(text)
        if not self.held and self.first_characters.isdisjoint(text):
            return text  # most tokens: no stop string is under way and none begins here
        certain = []
        for character in text:
            certain.append(self._read(character))
            if self.matched is not None:
                break
        return "".join(certain)

    def _read(self, character: str) -> str:
        """
        Read on by a character, as the automaton of Aho and Corasick does, with `held` as its state;
        returns what can be no part of a stop string any more. Each character is held and let go
        once, so a text costs no more than a few steps a character, however many stop strings there
        are.
        """
        text = self.held + character
        start = 0
        while not self._begins_stop(text[start:]):
            start += 1
        certain, self.held = text[:start], text[start:]
        if character in self.last_characters and self.held.endswith(self.stop):
            self.matched = max(filter(self.held.endswith, self.stop), key=len)
            certain += self.held if self.include_stop else self.held.removesuffix(self.matched)
            self.held = ""
        return certain

    def _begins_stop(self, text: str) -> bool:
        """
        Whether a stop string begins with this text; in sorted order that one comes next. "" begins
        anything.
        """
        place = bisect.bisect_left(self.stop, text)
        return not text or (place < len(self.stop) and self.stop[place].startswith(text))


# --------------------------------------------------------------------------------------------------
# Making a tokenizer


def char_tokenizer(text: str) -> CharTokenizer:
    """The character tokenizer of a text: its distinct characters, sorted, numbered from 0."""
    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    split = {
        "type": "Split",
        "pattern": {"Regex": EVERY_CHARACTER},
        "behavior": "Isolated",
        "invert": False,
    }
    # no character is longer than one, so this unknown token is never found and an unknown character
    # stays an error
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unknown>"}
    return CharTokenizer(make_spec(model, split, {"type": "Fuse"}))


def bpe_tokenizer(
    merges: list[tuple[bytes, bytes]], byte_order: Iterable[int] = range(256)
) -> BPETokenizer:
    """
    Number the bytes first, then what each merge makes, the end-of-text token last, as GPT-2 does.
    """
    spell = byte_alphabet()
    pairs = [["".join(spell[byte] for byte in part) for part in pair] for pair in merges]
    vocab = {
        piece: i
        for i, piece in enumerate(
            dict.fromkeys([*(spell[b] for b in byte_order), *map("".join, pairs)])
        )
    }
    model = {"type": "BPE", "vocab": vocab, "merges": pairs}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    end = {"id": len(vocab), "content": END_OF_TEXT, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return BPETokenizer(make_spec(model, level, level, [end]))


def make_spec(
    model: dict, pre_tokenizer: dict, decoder: dict, added_tokens: Iterable[dict] = ()
) -> dict:
    spec = {
        "version": "1.0",
        "added_tokens": list(added_tokens),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
    }
    return spec | {"post_processor": None, "decoder": decoder, "model": model}


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """
    Learn a byte-level BPE of at most `vocab_size` tokens, end of text included. Needs the
    `tokenizers` library.
    """
    try:
        from tokenizers import Tokenizer as Learner
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError:
        raise TokenizerError(
            "training a BPE needs the `tokenizers` package: pip install tokenizers"
        ) from None
    learner = Learner(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(BYTE_OF),
        show_progress=False,
        special_tokens=[],
    )
    learner.train_from_iterator(texts, trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return bpe_tokenizer(
        [tuple(bytes(BYTE_OF[c] for c in part) for part in pair) for pair in merges]
    )


def gpt2_tokenizer() -> BPETokenizer:
    """
    GPT-2's tokenizer, from tiktoken's copy of it. Raises TokenizerError with what to set when
    offline.
    """
    try:
        ranks: dict[bytes, int] = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except Exception as error:  # tiktoken lets the errors of its HTTP client through
        raise TokenizerError(
            f"GPT-2's vocabulary is not at hand ({type(error).__name__}): connect to the network once, or set "
            "TIKTOKEN_CACHE_DIR to a folder in which tiktoken has stored it"
        ) from error
    tokens = sorted(ranks, key=ranks.get)
    return bpe_tokenizer(
        [last_merge(t, ranks) for t in tokens if len(t) > 1], [t[0] for t in tokens if len(t) == 1]
    )


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """
    Merge the bytes of a token, lowest rank first, until two parts are left: the merge that made the
    token.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        i = rank.index(min(rank))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """
    Read tokenizer.json: ours, or a byte-level BPE from the hub. Raises TokenizerError with what to
    change.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(no_tokenizer(path))
    try:
        spec = read_json(path)
        config = read_json(path.with_name("tokenizer_config.json"))
        kinds = {"WordLevel": CharTokenizer, "BPE": BPETokenizer}
        kind = spec["model"]["type"]
        if kind not in kinds:
            raise foreign(
                f"is of the kind {kind}, supported are byte-level BPE and single characters"
            )
        tokenizer = kinds[kind](spec, token_text(config.get("eos_token")) or END_OF_TEXT)
        check_config(tokenizer, config)
        check_fits_model(tokenizer, path.parent)
        return tokenizer
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise TokenizerError(
            f"{path} is not a tokenizer this code reads ({why}): restore it"
        ) from error


def no_tokenizer(missing: Path) -> str:
    """What to say of a directory without tokenizer.json: how it can be had."""
    folder = missing.parent
    found = [name for name in FOREIGN_TOKENIZERS if (folder / name).is_file()]
    if found:
        how = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        return f"{missing} is missing, the tokenizer is in {found[0]}: let transformers write it: {how}"
    if (folder / "config.json").is_file():
        return f"{missing} is missing: copy it there, from where the model is"
    return f"no tokenizer in {folder}: run `python train.py --out {folder}`, or copy it there"


def read_json(path: Path) -> dict:
    """What a file says, {} where there is none. Raises ValueError or RecursionError."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def token_text(token: str | dict | None) -> str | None:
    """The hub writes a control token as a text or as a dictionary."""
    return token["content"] if isinstance(token, dict) else token


def check_config(tokenizer: Tokenizer, config: dict):
    """
    Raises TokenizerError for control tokens that only tokenizer_config.json has: transformers reads
    them, too.
    """
    for token in config.get("added_tokens_decoder", {}).values():
        check_added_token(token, tokenizer.spec.get("normalizer") is not None)
        if token["content"] not in tokenizer.control:
            raise foreign(f"lacks {token['content']!r}, which tokenizer_config.json adds")


def check_fits_model(tokenizer: Tokenizer, directory: Path):
    """Raises TokenizerError if the model beside it, if there is one, lacks rows for some tokens."""
    try:
        rows = read_json(directory / "config.json").get("vocab_size")
    except (ValueError, AttributeError, RecursionError):
        return  # whoever reads the model says it better
    if type(rows) is int and rows < tokenizer.vocab_size:
        raise TokenizerError(
            f"it has {tokenizer.vocab_size} tokens, but config.json beside it says that the model has {rows}: "
            "they do not belong together, copy the model's own tokenizer there"
        )


# --------------------------------------------------------------------------------------------------
# Files


def write_atomically(path: Path, write: Callable[[Path], None]):
    """
    Let `write` fill a temporary file beside `path`, flush it to disk, then rename: readers see the
    old file or the new one, never half of one, whenever the process dies.
    """
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with open(temporary, "rb") as f:
        os.fsync(f.fileno())
    os.replace(temporary, path)


def write_json(path: Path, content: dict):
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_corpus(directory: Path, tokenizer: Tokenizer, train: list[int], val: list[int]):
    """
    Write train.bin and val.bin (bare token ids, two bytes each, four if the vocabulary needs them),
    the tokenizer, and last meta.json: a corpus without it is not there.
    """
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    (directory / "meta.json").unlink(missing_ok=True)
    tokenizer.save(directory)
    for name, ids in (("train", train), ("val", val)):
        write_atomically(directory / f"{name}.bin", np.array(ids, dtype=dtype).tofile)
    meta = {
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "train_tokens": len(train),
        "val_tokens": len(val),
    }
    write_json(directory / "meta.json", meta | {"val_bytes": len(tokenizer.decode_bytes(val))})


def read_corpus(directory: Path, split: str) -> np.ndarray:
    """The tokens of "train" or "val", memory-mapped and read-only."""
    meta = json.loads((directory / "meta.json").read_text())
    return np.memmap(directory / f"{split}.bin", dtype=meta["dtype"], mode="r")
