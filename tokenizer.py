"""
Text <-> token ids: characters, byte-level BPE learnt from a corpus, and GPT-2's, all with the same
methods.

    tokenizer = load_tokenizer("out/stdlib")  # saved by train.py, or from the Hugging Face Hub
    ids = tokenizer.encode("def hello():")    # list[int]
    text = tokenizer.decode(ids)              # str; decode_bytes(ids) for the bytes themselves
    piece = tokenizer.token_bytes(ids[0])     # the bytes of one token, b"" for a control token

Every tokenizer is one file, tokenizer.json in the format of the `tokenizers` library:
`transformers.AutoTokenizer` reads what is saved here and gives the same ids. A BPE is run by
tiktoken; training/corpus.py makes new tokenizers, of a text or by learning a BPE.
"""

import bisect
import codecs
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path

import tiktoken

from files import how_to_download, read_json, write_json

END_OF_TEXT = "<|endoftext|>"
# Pre-tokenization of GPT-2: a text is cut into pieces, and bytes are merged only within a piece.
# Pieces are contractions; words, numbers and punctuation, each with at most one space before it;
# and runs of white space, except that a last space belongs to the word after it.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# tiktoken's regular expressions give up on a run of a million blanks, so runs longer than this are
# cut before. Only there may ids differ from those of transformers: no merge crosses a cut.
MAX_BLANKS = 500_000
# The look-behind keeps this linear: without it a run just below the limit is tried from each blank.
ENDLESS_BLANKS = re.compile(rf"(?<!\s)(?:\s{{{MAX_BLANKS}}})+")

# Limit of the ids, which are rows of tables: a single id of 10**9 would cost gigabytes. The largest
# vocabularies in use have 262,144 tokens.
MAX_VOCABULARY = 2**20
# Where other tokenizers are stored, and GPT-2's before there was tokenizer.json.
FOREIGN_TOKENIZERS = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json")
MAX_NAME = 256  # characters of a control token's name; real ones have up to 40


class TokenizerError(ValueError):
    """A tokenizer that cannot be read, or a text that cannot be encoded; says what to change."""


def byte_alphabet() -> list[str]:
    """
    The character that stands for each of the 256 bytes in tokenizer.json. GPT-2's convention: a
    visible Latin-1 character stands for itself, and U+0100, U+0101, .. for the other bytes in
    order. So a space is "Ġ" and a newline "Ċ".
    """
    substitutes = map(chr, range(0x100, 0x200))
    alphabet = []
    for character in map(chr, range(256)):
        is_visible = character.isprintable() and character != " "
        alphabet.append(character if is_visible else next(substitutes))
    return alphabet


ALPHABET = byte_alphabet()
BYTE_OF = {character: byte for byte, character in enumerate(ALPHABET)}


def piece_of(data: bytes) -> str:
    """How bytes are spelled in a byte-level vocabulary: b" a" is "Ġa"."""
    return "".join(ALPHABET[byte] for byte in data)


def piece_bytes(piece: str) -> bytes:
    """The bytes that such a piece spells: "Ġa" is b" a"."""
    return bytes(BYTE_OF[character] for character in piece)


class Tokenizer:
    """
    What both kinds share: the parsed tokenizer.json (`spec`), the bytes of every token, and the
    control tokens ("special tokens" in other libraries), such as end of text. `to_bytes(piece)`
    gives the bytes of a piece of the vocabulary, `_encode_text` the ids of a text without control
    tokens, `_encode_bytes` those of bytes.

    `vocab_size` is the largest id + 1, control tokens included. `eos_token_id` is None where there
    is no end-of-text token (characters). `has_known_pattern` is False where the directory brings
    its own regular expression, which may take more than linear time.
    """

    has_known_pattern = True

    def __init__(self, spec: dict, to_bytes: Callable[[str], bytes], eos_token: str = END_OF_TEXT):
        self.spec = spec
        self.vocab: dict[str, int] = spec["model"]["vocab"]
        self.control = read_control_tokens(spec)
        self.names = {i: name for name, i in self.control.items()}
        check_ids(self.vocab, self.control)
        self.vocab_size = max([*self.vocab.values(), *self.names]) + 1
        self.eos_token_id: int | None = self.control.get(eos_token)
        text_pieces = self.vocab.keys() - self.control.keys()
        self._bytes = {self.vocab[piece]: to_bytes(piece) for piece in text_pieces}
        # of two names that begin alike transformers takes the longer; (?!) matches nothing
        longest_first = sorted(self.control, key=len, reverse=True)
        any_name = "|".join(map(re.escape, longest_first)) or "(?!)"
        self.control_names = re.compile(f"({any_name})")

    def encode(
        self,
        text: str | bytes,
        allow_special: bool = False,
        stand_ins: dict[int, str] | None = None,
    ) -> list[int]:
        """
        Token ids of a text, or of bytes. The name of a control token in it is text, or with
        allow_special=True that token, as in transformers. `stand_ins` (code point -> text, as for
        `str.translate`): characters that stand in the text for others, which are put back after the
        names were found. So what a user wrote, its "<" replaced, never becomes a control token (see
        serving/chat.py). Raises TokenizerError.
        """
        if isinstance(text, bytes):
            return self._encode_bytes(text, allow_special)
        pieces = self.control_names.split(text) if allow_special else [text]
        ids = []
        for number, piece in enumerate(pieces):
            if number % 2:  # `split` returns text and names by turns
                ids.append(self.control[piece])
                continue
            if stand_ins:
                piece = piece.translate(stand_ins)
            ids += self._encode_text(piece)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """
        The bytes of one token, possibly part of a UTF-8 character. b"" for a control token and for
        an id without a token: a model may have more rows than tokens, to be a multiple of 64.
        """
        return self._bytes.get(token, b"")

    def spelled_bytes(self, token: int) -> bytes:
        """`token_bytes`, except that a control token has the bytes of its name."""
        if token in self.names:
            return self.names[token].encode()
        return self.token_bytes(token)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def save(self, directory: str | Path):
        """Write tokenizer.json and tokenizer_config.json, each atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # without this class name transformers takes the tokenizer for GPT-2's own, by config.json
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if self.eos_token_id is not None:
            name = self.names[self.eos_token_id]
            config |= {"bos_token": name, "eos_token": name}
        write_json(directory / "tokenizer.json", self.spec)
        write_json(directory / "tokenizer_config.json", config)


class CharTokenizer(Tokenizer):
    """One token a character, as in nanoGPT's shakespeare_char. An unknown character is an error."""

    def __init__(self, spec: dict, eos_token: str = END_OF_TEXT):
        if read_pattern(spec) != EVERY_CHARACTER or spec.get("normalizer"):
            raise foreign("is a WordLevel of other pieces than single characters")
        check_around(spec, decoder="Fuse")
        super().__init__(spec, str.encode, eos_token)

    def _encode_bytes(self, data: bytes, allow_special: bool) -> list[int]:
        return self.encode(data.decode(), allow_special)

    def _encode_text(self, text: str) -> list[int]:
        """Raises TokenizerError that names the first unknown character."""
        try:
            return [self.vocab[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise TokenizerError(
                f"character {character!r} (U+{ord(character):04X}, at position "
                f"{text.index(character)}) is not among the {self.vocab_size} this tokenizer "
                "knows: remove it, or train with a BPE, which knows every byte"
            ) from None


class BPETokenizer(Tokenizer):
    """
    Byte-level BPE, run by tiktoken. Every text and every sequence of bytes has an encoding; decoded
    it is the same, unless the tokenizer normalizes (NFC) or a lone surrogate was in the text.
    """

    def __init__(self, spec: dict, eos_token: str = END_OF_TEXT):
        self.normalize = read_normalizer(spec)
        pattern = read_pattern(spec)
        self.has_known_pattern = pattern == GPT2_PATTERN
        check_around(spec, decoder="ByteLevel")
        check_model(spec["model"])
        super().__init__(spec, piece_bytes, eos_token)
        # a merge is "a b" or ["a", "b"]; two merges may make the same piece
        pairs = (m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"])
        merged = [first + second for first, second in pairs]
        merged_ids = list(dict.fromkeys(self.vocab[piece] for piece in merged))
        if merged_ids != sorted(merged_ids):  # tiktoken merges the pair of the lowest id first
            raise foreign("numbers its tokens in another order than its merges")
        self.byte_ids = [self.vocab[character] for character in ALPHABET]
        ranks = {self._bytes[i]: i for i in [*self.byte_ids, *merged_ids]}
        if spec["model"].get("ignore_merges") and len(ranks) < len(self._bytes):
            raise foreign("has tokens that no merge makes (ignore_merges)")
        self.bpe = tiktoken.Encoding(
            "tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )

    def _encode_text(self, text: str) -> list[int]:
        """A lone surrogate, which UTF-8 cannot hold, is read as U+FFFD."""
        ids = []
        try:
            for part in cut_blanks(self.normalize(text)):
                ids += self.bpe.encode_ordinary(part)
        except ValueError as error:  # of tiktoken's regular expressions
            raise TokenizerError(
                f"the tokenizer's pattern gives up on this text: shorten it ({error})"
            ) from None
        return ids

    def _encode_bytes(self, data: bytes, allow_special: bool) -> list[int]:
        """What is not UTF-8 is encoded byte by byte, so that it comes back."""
        text = data.decode("utf-8", "surrogateescape")  # such a byte becomes U+DC80..U+DCFF
        ids = []
        for number, piece in enumerate(re.split("([\udc80-\udcff]+)", text)):
            if number % 2:  # `split` returns text and runs of such bytes by turns
                ids += [self.byte_ids[ord(character) - 0xDC00] for character in piece]
            else:
                ids += self.encode(piece, allow_special)
        return ids


def cut_blanks(text: str) -> list[str]:
    """The text, cut inside runs of more than MAX_BLANKS blanks. Linear in its length."""
    edges = [0]
    for run in ENDLESS_BLANKS.finditer(text):
        edges += range(run.start() + MAX_BLANKS, run.end() + 1, MAX_BLANKS)
    edges.append(len(text))
    return [text[start:end] for start, end in pairwise(edges)]


def token_name(data: bytes) -> str:
    """
    A token's text; where its bytes are no whole characters they are spelled out ("bytes:\\xc3"),
    so that different tokens have different names.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# --------------------------------------------------------------------------------------------------
# What a tokenizer.json may say: whatever is not understood is refused by its name

EVERY_CHARACTER = r"[\s\S]"
# What the regular expressions of `tokenizers` (Oniguruma's) understand differently from tiktoken's,
# or what makes a match depend on the text before it: anchors, back references, and a few escapes
# and quantifiers.
FOREIGN_REGEX = re.compile(r"(?<![\[\\])\^|(?<!\\)\$|\\[1-9AGHKRXZhkz]|\}\+|\(\?[<P]?[#&0-9R]")


def foreign(what: str) -> TokenizerError:
    """The error, to be raised, for a tokenizer.json with something that is not supported here."""
    return TokenizerError(
        f"tokenizer.json {what}: not supported here, vLLM or transformers open such a directory"
    )


def read_control_tokens(spec: dict) -> dict[str, int]:
    """
    {name: id} of the added tokens. Raises TokenizerError for an added token that is more than a
    name for an id.
    """
    added = spec.get("added_tokens") or []
    for token in added:
        check_added_token(token, spec)
    ids = {token["content"]: token["id"] for token in added}
    if len(ids) < len(added):
        raise TokenizerError("tokenizer.json has an added token twice: restore it")
    return ids


def check_added_token(token: dict, spec: dict):
    """Raises TokenizerError unless exactly the token's name, in any text, is the token."""
    name = token["content"]
    for flag in ("lstrip", "rstrip", "single_word"):
        if token.get(flag):
            raise foreign(f"has the added token {name!r} with {flag}")
    if spec.get("normalizer") and token.get("normalized"):
        raise foreign(f"has the added token {name!r} that is found in normalized text")
    if not token.get("special"):
        raise foreign(f"has the added token {name!r} that is text (special: false)")
    if not 0 < len(name) <= MAX_NAME:
        raise TokenizerError(
            f"tokenizer.json has an added token of {len(name)} characters: restore it"
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
                f"token {name!r:.100} has the id {i!r:.30}, wanted 0 to {MAX_VOCABULARY - 1}: "
                "restore it"
            )
        if vocab.get(name, i) != i:
            raise TokenizerError(
                f"token {name!r:.100} has two ids, {vocab[name]} and {i}: restore it"
            )
    [(shared, count)] = Counter(ids.values()).most_common(1)
    if count > 1:
        raise TokenizerError(f"{count} tokens share the id {shared}: restore it")


def check_around(spec: dict, decoder: str):
    """
    Raises TokenizerError for a post-processor that adds tokens, and for another decoder than the
    one named.
    """
    post = spec.get("post_processor") or {"type": "ByteLevel"}
    for part in post.get("processors", [post]):
        kind = part["type"]
        adds_nothing = kind == "TemplateProcessing" and not part.get("special_tokens")
        if kind != "ByteLevel" and not adds_nothing:
            raise foreign(f"adds tokens to every text (post-processor {kind})")
    found = (spec.get("decoder") or {}).get("type")
    if found != decoder:
        raise foreign(f"makes text of tokens by {found}")


def check_model(model: dict):
    """
    Raises TokenizerError for options of a BPE that change how bytes are merged, and for a
    vocabulary that lacks some of the 256 bytes.
    """
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise foreign(f"is a BPE with {option}")
    missing = BYTE_OF.keys() - model["vocab"].keys()
    if missing:
        raise foreign(f"lacks {len(missing)} of the 256 bytes")


def read_pattern(spec: dict) -> str:
    """
    The regular expression that cuts a text into pieces. Raises TokenizerError for what tiktoken
    cannot do.
    """
    steps = spec.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    if any(step.get("add_prefix_space") for step in steps):
        raise foreign("puts a prefix space before every text")
    match steps:
        case [{"type": "Split"} as split] | [
            {"type": "Split"} as split,
            {"type": "ByteLevel", "use_regex": False},
        ]:
            return read_split(split)
        case [{"type": "ByteLevel"} as level] if level.get("use_regex", True):
            return GPT2_PATTERN
    kinds = " and ".join(str(step.get("type")) for step in steps)
    raise foreign(f"cuts text by {kinds}, supported are ByteLevel or one Split")


def read_split(split: dict) -> str:
    """The regular expression of a pre-tokenizer "Split", for tiktoken. Raises TokenizerError."""
    pattern = split["pattern"].get("Regex")
    behavior = str(split.get("behavior"))
    if pattern is None or behavior.lower() != "isolated" or split.get("invert"):
        raise foreign(
            f"cuts text by a Split (behaviour {behavior}) other than of isolated regular "
            "expressions"
        )
    if FOREIGN_REGEX.search(pattern):
        raise foreign(f"cuts text by the regular expression {pattern!r:.200}")
    if pattern == EVERY_CHARACTER:
        return pattern
    # tiktoken drops text that the pattern does not match; for `tokenizers` it is a piece of its own
    return rf"{pattern}|(?:(?!{pattern}){EVERY_CHARACTER})+"


def read_normalizer(spec: dict) -> Callable[[str], str]:
    """What is done to a text before it is cut. Raises TokenizerError for all but none and NFC."""
    kind = (spec.get("normalizer") or {}).get("type")
    if kind is None:
        return str  # the text as it is
    if kind != "NFC":
        raise foreign(f"normalizes text by {kind}, supported are none and NFC")
    return partial(unicodedata.normalize, "NFC")


# --------------------------------------------------------------------------------------------------
# Streaming: tokens to text, as they come


class TextStream:
    """
    The text of one answer, released as soon as it is certain: whole UTF-8 characters, and nothing
    that may become part of a stop string.

    `token_bytes(id)` gives the bytes of a token. The text ends at the first place where a stop
    string is complete, so it does not matter how the text is cut into tokens. `matched` is then
    that string; the text ends before it, or behind it with include_stop.

        stream = TextStream(tokenizer.token_bytes, stop=["\\n\\n"])
        text = "".join(stream.push(token) for token in tokens) + stream.flush()
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop: list[str] = (), include_stop: bool = False
    ):
        self.token_bytes = token_bytes
        self.include_stop = include_stop
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds half characters
        self.num_characters = 0  # decoded so far
        self.held = ""  # the longest end of the text that a stop string begins with
        self.matched: str | None = None
        self.stop_at(stop)

    def stop_at(self, stop: list[str]):
        """From here on end the text at these strings."""
        self.stop = tuple(sorted(stop))
        self.first_characters = frozenset(string[0] for string in stop)

    def push(self, token: int) -> str:
        """The text that this token makes certain, often but not always the token's own."""
        text = self.decoder.decode(self.token_bytes(token))
        self.num_characters += len(text)
        if not self.held and self.first_characters.isdisjoint(text):
            return text  # most tokens: no stop string has begun before, and none begins here
        return self._release(text)

    def push_all(self, tokens: list[int]) -> str:
        """The text of many tokens, in a fraction of the time, without a search for stop strings."""
        text = self.decoder.decode(b"".join(map(self.token_bytes, tokens)))
        self.num_characters += len(text)
        return text

    def flush(self) -> str:
        """The rest, when no token follows: U+FFFD for half a character, and what was held back."""
        text = self.decoder.decode(b"", final=True)
        self.num_characters += len(text)
        text = self._release(text) + self.held
        self.held = ""
        return text

    def _release(self, text: str) -> str:
        """The part of the text, what was held back included, that no stop string can begin in."""
        text = self.held + text
        for end in range(len(self.held) + 1, len(text) + 1):
            if text.endswith(self.stop, 0, end):
                text = text[:end]
                self.held = ""
                self.matched = max(filter(text.endswith, self.stop), key=len)
                return text if self.include_stop else text.removesuffix(self.matched)
        # each round releases a character for good, so the work for a character does not grow with
        # the length or number of stop strings
        start = 0
        while not self._begins_stop(text[start:]):
            start += 1
        self.held = text[start:]
        return text[:start]

    def _begins_stop(self, text: str) -> bool:
        """Whether a stop string begins with this text: in sorted order it would come next."""
        if not text:
            return True
        place = bisect.bisect_left(self.stop, text)
        return place < len(self.stop) and self.stop[place].startswith(text)


# --------------------------------------------------------------------------------------------------
# Reading a tokenizer


KINDS = {"WordLevel": CharTokenizer, "BPE": BPETokenizer}  # by the model that tokenizer.json names


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
        eos_token = token_text(config.get("eos_token")) or END_OF_TEXT
        kind = spec["model"]["type"]
        if kind not in KINDS:
            raise foreign(
                f"is of the kind {kind}, supported are byte-level BPE and single characters"
            )
        tokenizer = KINDS[kind](spec, eos_token)
        check_config(tokenizer, config)
        check_fits_model(tokenizer, path.parent)
        return tokenizer
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerError(
            f"{path} is not a tokenizer this code reads ({type(error).__name__}: {error}): "
            "restore it"
        ) from error


def no_tokenizer(missing: Path) -> str:
    """What to say of a directory without tokenizer.json: how to get one."""
    folder = missing.parent
    for name in FOREIGN_TOKENIZERS:
        if (folder / name).is_file():
            return (
                f"{missing} is missing, the tokenizer is in {name}: let transformers write it: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
    if (folder / "config.json").is_file():
        return f"{missing} is missing: copy it there, from where the model is"
    here = f"no tokenizer in {folder}: run `python train.py --out {folder}`"
    return how_to_download(folder) or f"{here}, or copy it there"


def token_text(token: str | dict | None) -> str | None:
    """The hub writes a control token as a text or as a dictionary."""
    return token["content"] if isinstance(token, dict) else token


def check_config(tokenizer: Tokenizer, config: dict):
    """
    Raises TokenizerError for control tokens that only tokenizer_config.json has: transformers reads
    those, too.
    """
    for token in config.get("added_tokens_decoder", {}).values():
        check_added_token(token, tokenizer.spec)
        if token["content"] not in tokenizer.control:
            raise foreign(f"lacks {token['content']!r}, which tokenizer_config.json adds")


def check_fits_model(tokenizer: Tokenizer, directory: Path):
    """Raises TokenizerError where the model beside the tokenizer lacks rows for some tokens."""
    try:
        rows = read_json(directory / "config.json").get("vocab_size")
    except (ValueError, AttributeError, RecursionError):
        return  # a broken model is reported when the model is loaded
    if type(rows) is int and rows < tokenizer.vocab_size:
        raise TokenizerError(
            f"it has {tokenizer.vocab_size} tokens, but config.json beside it says that the model "
            f"has {rows}: they do not belong together, copy the model's own tokenizer there"
        )
