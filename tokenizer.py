"""
Convert between text and token ids with any tokenizer.json, whether made by train.py (characters or
byte-level BPE) or downloaded from the Hugging Face Hub.

    tokenizer = load_tokenizer("out/stdlib")  # saved by train.py, or downloaded
    ids = tokenizer.encode("def hello():")    # list[int]
    text = tokenizer.decode(ids)              # str
    stream = tokenizer.stream(ids)            # converts tokens that follow `ids`, one by one

The `tokenizers` library runs all the steps in the file, so ids and texts are the same as with
`transformers.AutoTokenizer`. Only character tokenizers use a faster path here. training/corpus.py
makes new tokenizers, either of characters or by training a BPE.
"""

import bisect
import codecs
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from common import MALFORMED, missing_file, read_json, write_json

END_OF_TEXT = "<|endoftext|>"


class TokenizerError(ValueError):
    """A tokenizer cannot be read, or a text cannot be encoded; the message says what to change."""


def byte_alphabet() -> list[str]:
    """
    Return the characters that stand for the 256 bytes in a byte-level vocabulary. By GPT-2's
    convention, a visible Latin-1 character stands for itself, and U+0100, U+0101, .. stand for the
    other bytes, in order. For example, a space is "Ġ" and a newline is "Ċ".
    """
    substitutes = map(chr, range(0x100, 0x200))
    latin = map(chr, range(256))
    return [c if c.isprintable() and c != " " else next(substitutes) for c in latin]


ALPHABET = byte_alphabet()
BYTE_OF = {character: byte for byte, character in enumerate(ALPHABET)}


def piece_bytes(piece: str) -> bytes:
    """
    Return the bytes of a piece in a byte-level vocabulary, for example b" a" for "Ġa". A name that
    is not byte-level, such as a control token's, is encoded as it is.
    """
    if BYTE_OF.keys() >= set(piece):
        return bytes(BYTE_OF[character] for character in piece)
    return piece.encode()


class Tokenizer:
    """
    Wraps a tokenizer from the `tokenizers` library (`backend`), and knows the bytes of its tokens.

    Added tokens are recognised in a text by their names. Added tokens that the file marks as
    special are control tokens (`control`, name -> id), such as end of text, which do not produce
    any text. `vocab_size` is the largest id + 1. `eos_token_id` is None if there is no end-of-text
    token (characters). `bos` contains the token that is put before raw prompts, or is empty.
    `has_known_pattern` is False if the file has its own regular expression, because matching it may
    take more than linear time. For `longest`, see longest_token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str = END_OF_TEXT):
        self.backend = backend
        backend.no_truncation()  # like transformers, regardless of the file
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.control = {token.content: i for i, token in added.items() if token.special}
        # if normalization changes a token's name, the library does not treat the token as special
        self.names = {i: name for name, i in self.control.items() if backend.id_to_token(i) == name}
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self.eos_token_id: int | None = self.control.get(eos_token)
        steps = str([state(backend.normalizer), state(backend.pre_tokenizer)])
        self.has_known_pattern = "Regex" not in steps
        self.longest = longest_token(backend, steps)
        empty = backend.encode("")  # contains just the beginning-of-text token, if there is one
        self.bos = empty.ids[:1] if 1 in empty.special_tokens_mask[:1] else []
        kinds = decoding_steps(backend)
        self.is_byte_level = "ByteLevel" in kinds
        self.falls_back = "ByteFallback" in kinds
        # cached, because they are called for each token of an answer
        self.token_bytes = cache(self.token_bytes)
        self.spelled_bytes = cache(self.spelled_bytes)

    # Text -> ids

    def encode(
        self,
        text: str,
        allow_special: bool = False,
        add_special_tokens: bool = False,
        stand_ins: dict[int, str] | None = None,
    ) -> list[int]:
        """
        Return the token ids of a text. Raises TokenizerError.

        allow_special: encode the name of a control token as that token, as transformers does;
        otherwise encode the name as text.
        add_special_tokens: add the tokens that the file's post-processor puts around a text (a
        beginning-of-text token, BOS, or none). This is for raw prompts, because a chat template
        adds its own tokens.
        stand_ins (code point -> text, as for `str.translate`): characters in the text that stand
        for other characters. They are replaced after control tokens have been recognised. So if the
        "<" in a user's text is replaced by a stand-in, the text is never encoded as a control token
        (see server/text.py).
        """
        self.backend.encode_special_tokens = not allow_special
        if stand_ins:
            return self._encode_disguised(text, stand_ins, add_special_tokens)
        return self._encode_text(text, add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """
        Return a lower bound on the number of tokens in a text, without encoding it, or 0 if no
        better bound is known.
        """
        return len(text) // self.longest if self.longest else 0

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        text = text.encode(errors="replace").decode()  # UTF-8 has no lone surrogates
        try:  # a batch of one: `encode` takes twice as long, because it also computes offsets
            [encoding] = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library panics if a regular expression gives up
            raise TokenizerError(f"the tokenizer cannot encode this text: {error}") from None
        return encoding.ids

    def _encode_disguised(
        self, text: str, stand_ins: dict[int, str], add_special_tokens: bool
    ) -> list[int]:
        """
        Encode a text with stand-ins. Control tokens' names are recognised before a text is
        normalized, so stand-ins are replaced by the normalizer. In rare tokenizers, a name can
        still be recognised after that, because it is matched in normalized text or is in the
        vocabulary itself. A text with such a name is refused.
        """
        disguised = self._encode_text(text, add_special_tokens)
        normalizer = self.backend.normalizer
        steps = [normalizers.Replace(chr(code), original) for code, original in stand_ins.items()]
        if normalizer:
            steps.append(normalizer)
        self.backend.normalizer = normalizers.Sequence(steps)
        try:
            ids = self._encode_text(text, add_special_tokens)
        finally:
            self.backend.normalizer = normalizer
        spelled = text
        # `translate` would hold the GIL, for 0.2 us per character
        for code, original in stand_ins.items():
            spelled = spelled.replace(chr(code), original)
        for name, i in self.control.items():
            if name in spelled and ids.count(i) != disguised.count(i):
                raise TokenizerError(
                    f"this conversation has {name!r} in it, but this tokenizer cannot encode that "
                    "control token's name as text: leave it out"
                )
        return ids

    # Ids -> text

    def token_bytes(self, token: int) -> bytes:
        """
        Return the bytes of one token within a text, which may be only part of a UTF-8 character.
        Return b"" for a control token, and for an id without a token (a model's rows may be padded
        to a multiple of 64).
        """
        return b"" if token in self.names else self.spelled_bytes(token)

    def spelled_bytes(self, token: int) -> bytes:
        """Return the bytes of one token; for a control token, the bytes of its name."""
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if self.is_byte_level:
            return piece_bytes(piece)
        if self.falls_back and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)):
            return bytes.fromhex(byte[1])
        return self._join(["a", piece])[1:].encode()

    def opening_bytes(self, token: int) -> bytes:
        """
        Return the bytes of a token at the beginning of a text, where some decoders drop its space.
        """
        data = self.spelled_bytes(token)
        if self.is_byte_level or (len(data) == 1 and not data.isascii()):
            return data
        return self._join([self.backend.id_to_token(token)]).encode()

    def _join(self, pieces: list[str]) -> str:
        decoder = self.backend.decoder
        return " ".join(pieces) if decoder is None else decoder.decode(pieces)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of some tokens. Bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, context: Iterable[int] = (), skip_special_tokens: bool = True) -> "TextStream":
        """Return a TextStream for tokens that follow `context`."""
        token_bytes = self.token_bytes if skip_special_tokens else self.spelled_bytes
        return TextStream(token_bytes, self.opening_bytes, context)

    def save(self, directory: str | Path):
        """Write tokenizer.json and tokenizer_config.json, each atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # without this class name, transformers infers GPT-2's tokenizer from config.json
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if self.eos_token_id is not None:
            name = self.names[self.eos_token_id]
            config |= {"bos_token": name, "eos_token": name}
        # the library's own `save` does not raise OSError if a disk is full
        write_json(directory / "tokenizer.json", json.loads(self.backend.to_str()))
        write_json(directory / "tokenizer_config.json", config)


class CharTokenizer(Tokenizer):
    """
    One token per character, and no control tokens, as in nanoGPT's shakespeare_char. An unknown
    character is an error. (With `tokenizers`, encoding would take 20 times as long.)
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.has_known_pattern = True
        self.longest = 1
        self.vocab = self.backend.get_vocab(with_added_tokens=False)

    def encode(self, text, allow_special=False, add_special_tokens=False, stand_ins=None):
        """
        Return the token ids of a text. The options have no effect, because there are no control
        tokens. Raises TokenizerError with the first unknown character.
        """
        try:
            return [self.vocab[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise TokenizerError(
                f"character {character!r} (U+{ord(character):04X}, at position "
                f"{text.index(character)}) is not among the {self.vocab_size} that this tokenizer "
                "knows: remove it, or train with a BPE, which knows every byte"
            ) from None


def token_name(data: bytes) -> str:
    """
    Return a token's text. If its bytes are not whole characters, spell them out ("bytes:\\xc3"), so
    that different tokens have different names.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# --------------------------------------------------------------------------------------------------
# Streaming: from tokens to text, one by one


class TextStream:
    """
    Converts the tokens of one answer to text, and returns text as soon as it is certain: only whole
    UTF-8 characters, and nothing that may be the beginning of a stop string. The time per token
    does not depend on the length of the text.

        stream = tokenizer.stream(prompt)
        stream.stop_at(["\\n\\n"])
        text = "".join(stream.push(token) for token in tokens) + stream.flush()

    `token_bytes(id)` returns a token's bytes within a text, and `opening_bytes(id)` returns its
    bytes at the beginning of a text. The text ends before the first complete stop string, which is
    then stored in `matched`. How the text is divided into tokens does not matter.

    The result is the same as transformers' decode(prompt + tokens) without the initial
    decode(prompt). So an answer keeps its leading space, and can complete a character that was
    begun in the prompt. There is one exception: if single-byte tokens (byte fallback) are not valid
    UTF-8, transformers replaces each of their bytes, even whole characters before the broken one. A
    stream has already returned those characters.
    """

    def __init__(self, token_bytes: Callable, opening_bytes: Callable, context: list[int] = ()):
        """Start after the tokens of `context`, which are not part of the text."""
        self.token_bytes = token_bytes  # may be replaced at any time, for the tokens that follow
        self.opening_bytes = opening_bytes
        # the decoder keeps the bytes of incomplete characters
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_characters = 0  # number of characters decoded so far
        self.held_back = ""  # the longest suffix of the text that could begin a stop string
        self.matched: str | None = None
        self.stop_at([])
        end = b""
        for token in reversed(context):
            end = token_bytes(token) + end
            if len(end) > 3:  # enough for an incomplete character
                break
        self.has_begun = end != b""
        self.decoder.decode(end)
        # True if the context ends within a character, so that decode(context) ends in U+FFFD
        self.is_half = self.decoder.getstate()[0] != b""

    def _bytes_of(self, token: int) -> bytes:
        data = self.token_bytes(token)
        if data and not self.has_begun:
            self.has_begun = True
            return self.opening_bytes(token)
        return data

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self.decoder.decode(data, final)
        if text and self.is_half:
            text = text.removeprefix("\ufffd")
            self.is_half = False
        self.num_characters += len(text)
        return text

    def stop_at(self, stop: list[str]):
        """Use these stop strings from now on."""
        self.stop = tuple(sorted(stop))
        self.first_characters = frozenset(string[0] for string in stop)

    def push(self, token: int) -> str:
        """Add a token. Return the text that is now certain, usually the token's own text."""
        text = self._decode(self._bytes_of(token))
        if not self.held_back and self.first_characters.isdisjoint(text):
            return text  # the usual case: no stop string has begun
        return self._release(text)

    def push_all(self, tokens: list[int]) -> str:
        """Add many tokens, and return their text. This is much faster, but ignores stop strings."""
        return self._decode(b"".join(map(self._bytes_of, tokens)))

    def flush(self) -> str:
        """
        Return what remains after the last token: `held_back`, and U+FFFD for an incomplete
        character.
        """
        text = self._decode(b"", final=True)
        text = self._release(text) + self.held_back
        self.held_back = ""
        return text

    def _release(self, text: str) -> str:
        """Add text to `held_back`. Remove and return the part in which no stop string can begin."""
        text = self.held_back + text
        for end in range(len(self.held_back) + 1, len(text) + 1):
            if text.endswith(self.stop, 0, end):
                text = text[:end]
                self.held_back = ""
                self.matched = max(filter(text.endswith, self.stop), key=len)
                return text.removesuffix(self.matched)
        # Each iteration releases one character for good, so the work per character does not grow
        # with the length or number of stop strings.
        start = 0
        while not self._begins_stop(text[start:]):
            start += 1
        self.held_back = text[start:]
        return text[:start]

    def _begins_stop(self, text: str) -> bool:
        """
        Return whether a stop string begins with this text. If so, it comes next in sorted order.
        """
        if not text:
            return True
        place = bisect.bisect_left(self.stop, text)
        return place < len(self.stop) and self.stop[place].startswith(text)


# --------------------------------------------------------------------------------------------------
# Reading a tokenizer

# All steps that the library supports, by their names in tokenizer.json.
STEPS = {
    *dir(normalizers),
    *dir(pre_tokenizers),
    *dir(models),
    *dir(processors),
    *dir(decoders),
}
EVERY_CHARACTER = {
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}
# steps that never shorten a text, and one further step, written as `str` formats it
NOT_SHORTENING = {"ByteLevel", "Digits", "Metaspace", "Prepend", "Punctuation", "Sequence", "Split"}
BLANKS = str({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
# decoder steps with which a token's text depends only on the token and on whether it is the first
BY_TOKEN = {"ByteFallback", "Metaspace", "WordPiece", "Replace"}


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """
    Read tokenizer.json, and the tokens that tokenizer_config.json adds. The steps are always those
    in the file. (For some values of tokenizer_class, transformers 5 builds its own steps instead.
    With GPT2Tokenizer, for example, digits are not separated.) Raises TokenizerError with a message
    that says what to change.
    """
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(missing_file(path))
    try:
        backend = open_backend(path)
        config = read_config(path.parent)
        add_tokens(backend, config)
        kind = CharTokenizer if is_of_characters(backend) else Tokenizer
        tokenizer = kind(backend, token_text(config.get("eos_token")) or END_OF_TEXT)
        check_fits_model(tokenizer, path.parent)
        return tokenizer
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except MALFORMED as error:
        raise TokenizerError(
            f"{path} is not a tokenizer that this code can read, or tokenizer_config.json beside "
            f"it is broken ({type(error).__name__}: {error}): restore it"
        ) from error


def foreign(what: str) -> TokenizerError:
    """Return the error to raise if a tokenizer.json needs something that is not supported."""
    return TokenizerError(
        f"tokenizer.json {what}: this is not supported; use vLLM or transformers instead"
    )


def open_backend(path: Path) -> tokenizers.Tokenizer:
    """Read tokenizer.json. Raises TokenizerError for unknown types of steps and for BPE dropout."""
    text = path.read_bytes()
    for kind in set(re.findall(rb'"type":\s*"([^"\\]*)"', text)):
        if kind.decode() not in STEPS:
            raise foreign(f"has a step of the type {kind.decode()!r:.100}")
    try:
        backend = tokenizers.Tokenizer.from_buffer(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # an error or a panic in the library's Rust code
        raise ValueError(error) from None
    if getattr(backend.model, "dropout", None):
        raise foreign("is a BPE with dropout, which encodes a text differently each time")
    return backend


def state(step) -> dict:
    """Return a step in the format of tokenizer.json, or {} if there is no step."""
    return {} if step is None else json.loads(step.__getstate__())


def longest_token(backend: tokenizers.Tokenizer, steps: str) -> int | None:
    """
    Return the maximum number of a text's characters that one token can stand for, or None if there
    is no such limit. There is no limit if a step removes or joins characters (for example, NFC
    joins a letter and its accent), if unknown characters become one token or no token, or if a
    token also includes the spaces beside it.
    """
    model = backend.model
    vocab = backend.get_vocab()
    pieces = ALPHABET if "'ByteLevel'" in steps else BYTE_PIECES
    kinds = re.findall(r"'type': '(\w+)'", steps.replace(BLANKS, ""))
    is_whole = (
        isinstance(model, models.BPE)
        and (model.byte_fallback or pieces is ALPHABET)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and vocab.keys() >= {*pieces}
        and NOT_SHORTENING.issuperset(kinds)
        and "Removed" not in steps
        and not any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())
    )
    return max(map(len, vocab)) if is_whole else None


def is_of_characters(backend: tokenizers.Tokenizer) -> bool:
    """Return whether each token is one character, and unknown characters are errors, as in ours."""
    if not isinstance(backend.model, models.WordLevel) or backend.get_added_tokens_decoder():
        return False
    plain = [{}, EVERY_CHARACTER, {}, {"type": "Fuse"}]
    steps = backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder
    return [*map(state, steps)] == plain and backend.token_to_id(backend.model.unk_token) is None


def decoding_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """
    Return the types of the decoder's steps, which convert tokens to text. Raises TokenizerError for
    a step that cannot be applied token by token, as streaming requires.
    """
    whole = state(backend.decoder)
    steps = whole.get("decoders", [whole] if whole else [])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return kinds
    for i, step in enumerate(steps):
        match step["type"]:
            case "Strip":
                can_stream = step["start"] <= 1 and step["stop"] == 0
            case "Fuse":
                can_stream = True
            case kind:  # after a Fuse, a step would get the whole text
                can_stream = kind in BY_TOKEN and "Fuse" not in kinds[:i]
        if not can_stream:
            raise foreign(f"has the decoder step {json.dumps(step)[:100]}")
    return kinds


def read_config(directory: Path) -> dict:
    """Read tokenizer_config.json and, for older tokenizers, special_tokens_map.json beside it."""
    config = read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(directory / "special_tokens_map.json")
    return config


def token_text(token: str | dict | None) -> str | None:
    """Return a control token's text. In files, the token is a string or a dictionary."""
    return token["content"] if isinstance(token, dict) else token


# The largest fraction of a model's rows that may lack a token. Models pad their rows to a multiple
# of 64 or more: Qwen 2.5 has 151,936 rows for 151,665 tokens (0.2%). The largest fraction found was
# in DeepSeek LLM, which has 102,400 rows for 100,015 tokens (2.3%).
MOST_PADDING = 0.03

# Names of control tokens in transformers, in the order in which it adds the tokens.
NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
FIELDS = {"content", "single_word", "lstrip", "rstrip", "normalized"}


def named_tokens(config: dict) -> dict[str, str | dict]:
    """Return {"eos_token": token, ..}, including names that only this model has."""
    named = dict.fromkeys(NAMED) | config
    named = {key: value for key, value in named.items() if key.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    return {key: value for key, value in named.items() if isinstance(value, str | dict)}


def add_tokens(backend: tokenizers.Tokenizer, config: dict):
    """Add tokens that only tokenizer_config.json has, or that it describes differently."""
    listed = config.get("added_tokens_decoder", {})
    backend.add_tokens([AddedToken(**listed[i]) for i in sorted(listed, key=int)])
    existing = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = []
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    for token in [*named_tokens(config).values(), *(extra if isinstance(extra, list) else [])]:
        if isinstance(token, str):
            token = {"content": token}
        if token["content"] not in existing:
            fields = {key: token[key] for key in FIELDS & token.keys()}
            new.append(AddedToken(**fields, special=True))
    backend.add_tokens(new)


def check_fits_model(tokenizer: Tokenizer, directory: Path):
    """
    Raise TokenizerError if the tokenizer does not belong to the model in the same directory. In
    that case, the model has too few rows for the vocabulary or the end-of-text token, or more rows
    without a token than padding explains, or one of these rows is the model's own end-of-text
    token. Other added tokens (for example, for images) may lack a row; a prompt with such a token
    is refused.
    """
    try:
        config = read_json(directory / "config.json")
        config = config.get("text_config") or config
        rows = config.get("vocab_size")
        ends = config.get("eos_token_id") or 0
        end = int(max(ends) if isinstance(ends, list) else ends)
    except MALFORMED:
        return  # loading the model will report that it is broken
    ids = tokenizer.backend.get_vocab(with_added_tokens=False).values()
    needed = max([*ids, tokenizer.eos_token_id or 0]) + 1
    has = tokenizer.vocab_size
    if type(rows) is not int:
        return
    if needed > rows or rows - has > max(63, MOST_PADDING * rows) or rows > end >= has:
        raise TokenizerError(
            f"it has {has} tokens, but config.json beside it says that the model has {rows}: they "
            "do not belong together; copy the model's own tokenizer there"
        )
