"""
Text <-> token ids, by any tokenizer.json: those that train.py makes (characters, byte-level BPE),
and those of the Hugging Face Hub.

    tokenizer = load_tokenizer("out/stdlib")  # saved by train.py, or downloaded
    ids = tokenizer.encode("def hello():")    # list[int]
    text = tokenizer.decode(ids)              # str
    stream = tokenizer.stream(ids)            # tokens -> text as they come, after these ids

The `tokenizers` library runs all steps that the file names, so ids and texts are those of
`transformers.AutoTokenizer`; only single characters have a faster way here. training/corpus.py
makes new tokenizers, of a text or by learning a BPE.
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
    """A tokenizer that cannot be read, or a text that cannot be encoded; says what to change."""


def byte_alphabet() -> list[str]:
    """
    The character that stands for each of the 256 bytes in a byte-level vocabulary. GPT-2's
    convention: a visible Latin-1 character stands for itself, and U+0100, U+0101, .. for the other
    bytes in order. So a space is "Ġ" and a newline "Ċ".
    """
    substitutes = map(chr, range(0x100, 0x200))
    latin = map(chr, range(256))
    return [c if c.isprintable() and c != " " else next(substitutes) for c in latin]


ALPHABET = byte_alphabet()
BYTE_OF = {character: byte for byte, character in enumerate(ALPHABET)}


def piece_bytes(piece: str) -> bytes:
    """The bytes of a piece of a byte-level vocabulary: "Ġa" is b" a"; of another name its own."""
    if BYTE_OF.keys() >= set(piece):
        return bytes(BYTE_OF[character] for character in piece)
    return piece.encode()


class Tokenizer:
    """
    A tokenizer of the `tokenizers` library (`backend`), and the bytes of its tokens.

    Added tokens are found in a text by their names. Those that the file calls special are control
    tokens (`control`, name -> id), such as end of text: they have no text. `vocab_size` is the
    largest id + 1. `eos_token_id` is None where there is no end-of-text token (characters). `bos`
    has the token that is put before raw prompts, or is empty. `has_known_pattern` is False where
    the file brings a regular expression, which may take more than linear time. `longest`: see
    longest_token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str = END_OF_TEXT):
        self.backend = backend
        backend.no_truncation()  # as in transformers, whatever the file says
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.control = {token.content: i for i, token in added.items() if token.special}
        # one whose name normalizing changes is no longer special to the library, and so has a text
        pairs = self.control.items()
        self.names = {i: name for name, i in pairs if backend.id_to_token(i) == name}
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self.eos_token_id: int | None = self.control.get(eos_token)
        steps = str([state(backend.normalizer), state(backend.pre_tokenizer)])
        self.has_known_pattern = "Regex" not in steps
        self.longest = longest_token(backend, steps)
        empty = backend.encode("")  # to which a beginning-of-text token is added, or none
        self.bos = empty.ids[:1] if 1 in empty.special_tokens_mask[:1] else []
        kinds = decoding_steps(backend)
        self.is_byte_level = "ByteLevel" in kinds
        self.falls_back = "ByteFallback" in kinds
        # looked up for each token of an answer, computed once
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
        Token ids of a text. Raises TokenizerError.

        allow_special: the name of a control token in it is that token, as in transformers;
        otherwise it is text.
        add_special_tokens: with the tokens that the file's post-processor puts around a text: a
        beginning-of-text token (BOS), or none. For raw prompts; a chat template writes its own.
        stand_ins (code point -> text, as for `str.translate`): characters that stand in the text
        for others, which are put back after the names were found. So what a user wrote, its "<"
        replaced, never becomes a control token (see server/text.py).
        """
        self.backend.encode_special_tokens = not allow_special
        if stand_ins:
            return self._encode_disguised(text, stand_ins, add_special_tokens)
        return self._encode_text(text, add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """
        Return a number of tokens that the text has at least, without encoding it: 0 where nothing
        is certain.
        """
        return len(text) // self.longest if self.longest else 0

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        text = text.encode(errors="replace").decode()  # UTF-8 has no lone surrogates
        try:  # a batch of one: `encode` takes twice as long, to say where each token was
            encode = self.backend.encode_batch_fast
            [encoding] = encode([text], add_special_tokens=add_special_tokens)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # of the library's Rust: panics, where a pattern gives up
            raise TokenizerError(f"the tokenizer cannot encode this text: {error}") from None
        return encoding.ids

    def _encode_disguised(
        self, text: str, stand_ins: dict[int, str], add_special_tokens: bool
    ) -> list[int]:
        """
        Names are found before a text is normalized, so normalizing is when stand-ins are put back.
        Only names that the file wants found in normalized text, or has in its vocabulary (both are
        rare), are found again after that.
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
        for code, original in stand_ins.items():  # `translate` holds the GIL, 0.2 us a character
            spelled = spelled.replace(chr(code), original)
        for name, i in self.control.items():
            if name in spelled and ids.count(i) != disguised.count(i):
                raise TokenizerError(
                    f"this conversation spells {name!r}, and this tokenizer cannot encode that "
                    "control token's name as text: leave it out"
                )
        return ids

    # Ids -> text

    def token_bytes(self, token: int) -> bytes:
        """
        The bytes of one token within a text, possibly part of a UTF-8 character. b"" for a control
        token and for an id without a token: a model may have more rows than tokens, to be a
        multiple of 64.
        """
        return b"" if token in self.names else self.spelled_bytes(token)

    def spelled_bytes(self, token: int) -> bytes:
        """`token_bytes`, except that a control token has the bytes of its name."""
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if self.is_byte_level:
            return piece_bytes(piece)
        if self.falls_back and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)):
            return bytes([int(byte[1], 16)])
        return self._join(["a", piece])[1:].encode()

    def opening_bytes(self, token: int) -> bytes:
        """The bytes of a token that begins a text: some decoders drop its blank."""
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
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(
        self,
        context: Iterable[int] = (),
        skip_special_tokens: bool = True,
    ) -> "TextStream":
        """Return the text of tokens that come after those of `context`; see TextStream."""
        token_bytes = self.token_bytes if skip_special_tokens else self.spelled_bytes
        return TextStream(token_bytes, self.opening_bytes, context)

    def save(self, directory: str | Path):
        """Write tokenizer.json and tokenizer_config.json, each atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # without this class name transformers takes the tokenizer for GPT-2's own, by config.json
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config["clean_up_tokenization_spaces"] = False
        if self.eos_token_id is not None:
            name = self.names[self.eos_token_id]
            config |= {"bos_token": name, "eos_token": name}
        # the library's own `save` raises no OSError where a disk is full
        write_json(directory / "tokenizer.json", json.loads(self.backend.to_str()))
        write_json(directory / "tokenizer_config.json", config)


class CharTokenizer(Tokenizer):
    """
    One token a character and no control tokens, as in nanoGPT's shakespeare_char. An unknown
    character is an error. Through `tokenizers` the same takes 20 times as long.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.has_known_pattern = True
        self.longest = 1
        self.vocab = self.backend.get_vocab(with_added_tokens=False)

    def encode(self, text, allow_special=False, add_special_tokens=False, stand_ins=None):
        """
        Token ids of a text. The options are without effect, as there are no control tokens. Raises
        TokenizerError that names the first unknown character.
        """
        try:
            return [self.vocab[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise TokenizerError(
                f"character {character!r} (U+{ord(character):04X}, at position "
                f"{text.index(character)}) is not among the {self.vocab_size} this tokenizer "
                "knows: remove it, or train with a BPE, which knows every byte"
            ) from None


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
# Streaming: tokens to text, as they come


class TextStream:
    """
    The text of one answer, released as soon as it is certain: whole UTF-8 characters, and nothing
    that may become part of a stop string. Each token costs the same, however long the text is.

    `token_bytes(id)` gives the bytes of a token within a text, `opening_bytes(id)` those of one
    that begins it. The text ends at the first place where a stop string is
    complete, so it does not matter how the text is cut into tokens. `matched` is then that string,
    and the text ends before it.

        stream = tokenizer.stream(prompt)
        stream.stop_at(["\\n\\n"])
        text = "".join(stream.push(token) for token in tokens) + stream.flush()

    That is transformers' decode(prompt + tokens) without its decode(prompt): so an answer behind a
    text keeps its leading blank, and completes a character that the prompt has begun. Only where
    tokens of single bytes (byte fallback) make no UTF-8 does transformers, which sees all of them
    first, replace each byte, and whole characters before the broken one, too.
    """

    def __init__(self, token_bytes: Callable, opening_bytes: Callable, context: list[int] = ()):
        """Start after the tokens of `context`, which are not part of the text."""
        self.token_bytes = token_bytes  # others may take its place, for the tokens to come
        self.opening_bytes = opening_bytes
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds half characters
        self.num_characters = 0  # decoded so far
        self.held_back = ""  # the longest end of the text that a stop string begins with
        self.matched: str | None = None
        self.stop_at([])
        end = b""
        for token in reversed(context):
            end = token_bytes(token) + end
            if len(end) > 3:  # enough for half a character
                break
        self.has_begun = end != b""
        self.decoder.decode(end)
        # the context ends with half a character, which it has shown as U+FFFD
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
        """End the text at these strings from here on."""
        self.stop = tuple(sorted(stop))
        self.first_characters = frozenset(string[0] for string in stop)

    def push(self, token: int) -> str:
        """The text that this token makes certain, often but not always the token's own."""
        text = self._decode(self._bytes_of(token))
        if not self.held_back and self.first_characters.isdisjoint(text):
            return text  # most tokens: no stop string has begun before, and none begins here
        return self._release(text)

    def push_all(self, tokens: list[int]) -> str:
        """The text of many tokens, in a fraction of the time, without a search for stop strings."""
        return self._decode(b"".join(map(self._bytes_of, tokens)))

    def flush(self) -> str:
        """The rest, when no token follows: U+FFFD for half a character, and what was held back."""
        text = self._decode(b"", final=True)
        text = self._release(text) + self.held_back
        self.held_back = ""
        return text

    def _release(self, text: str) -> str:
        """The part of the text, what was held back included, that no stop string can begin in."""
        text = self.held_back + text
        for end in range(len(self.held_back) + 1, len(text) + 1):
            if text.endswith(self.stop, 0, end):
                text = text[:end]
                self.held_back = ""
                self.matched = max(filter(text.endswith, self.stop), key=len)
                return text.removesuffix(self.matched)
        # each round releases a character for good, so the work for a character does not grow with
        # the length or number of stop strings
        start = 0
        while not self._begins_stop(text[start:]):
            start += 1
        self.held_back = text[start:]
        return text[:start]

    def _begins_stop(self, text: str) -> bool:
        """
        Return whether a stop string begins with this text: in sorted order it would come next.
        """
        if not text:
            return True
        place = bisect.bisect_left(self.stop, text)
        return place < len(self.stop) and self.stop[place].startswith(text)


# --------------------------------------------------------------------------------------------------
# Reading a tokenizer

# All steps that the library knows, by their names in tokenizer.json.
STEPS = {*dir(normalizers), *dir(pre_tokenizers), *dir(models)}
STEPS |= {*dir(processors), *dir(decoders)}
EVERY_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated"}
EVERY_CHARACTER |= {"invert": False}
# steps that make one character or more of each, and one more as `str` shows it
KEEPING = {"ByteLevel", "Digits", "Metaspace", "Prepend", "Punctuation", "Sequence", "Split"}
BLANKS = str({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
# steps of decoders by which a token's text depends on nothing but whether it is the first
BY_TOKEN = {"ByteFallback", "Metaspace", "WordPiece", "Replace"}


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """
    Read tokenizer.json, and the tokens that tokenizer_config.json adds. The steps are those of the
    file; for some kinds of tokenizer_class transformers 5 builds others (GPT2Tokenizer: digits stay
    whole). Raises TokenizerError with what to change.
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
            f"{path} is not a tokenizer this code reads, or its tokenizer_config.json is broken "
            f"({type(error).__name__}: {error}): restore it"
        ) from error


def foreign(what: str) -> TokenizerError:
    """The error, to be raised, for a tokenizer.json with something that is not supported here."""
    return TokenizerError(
        f"tokenizer.json {what}: not supported here, vLLM or transformers open such a directory"
    )


def open_backend(path: Path) -> tokenizers.Tokenizer:
    """Raises TokenizerError for a step that the library does not know, and for BPE dropout."""
    text = path.read_bytes()
    for kind in set(re.findall(rb'"type":\s*"([^"\\]*)"', text)):
        if kind.decode() not in STEPS:
            raise foreign(f"has a step of the type {kind.decode()!r:.100}")
    try:
        backend = tokenizers.Tokenizer.from_buffer(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # of the library's Rust: plain ones, or panics
        raise ValueError(error) from None
    if getattr(backend.model, "dropout", None):
        raise foreign("is a BPE with dropout: a text has other ids each time")
    return backend


def state(step) -> dict:
    """A step as tokenizer.json has it; {} for no step."""
    return {} if step is None else json.loads(step.__getstate__())


def longest_token(backend: tokenizers.Tokenizer, steps: str) -> int | None:
    """
    Return the most characters of a text that one token stands for. None where there is no such
    number: where a step removes or joins characters (NFC joins a letter and its accents), where
    unknown ones become one token or none, or where a token takes the blanks beside it, too.
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
        and KEEPING.issuperset(kinds)
        and "Removed" not in steps
        and not any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())
    )
    return max(map(len, vocab)) if is_whole else None


def is_of_characters(backend: tokenizers.Tokenizer) -> bool:
    """Return whether each token is a character, and an unknown one has no token, as in ours."""
    if not isinstance(backend.model, models.WordLevel) or backend.get_added_tokens_decoder():
        return False
    plain = [{}, EVERY_CHARACTER, {}, {"type": "Fuse"}]
    steps = backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder
    return [*map(state, steps)] == plain and backend.token_to_id(backend.model.unk_token) is None


def decoding_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """
    The kinds of the steps that make text of tokens. Raises TokenizerError for those that a stream,
    which gets token by token, cannot follow.
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
            case kind:  # after a Fuse it would get the whole text
                can_stream = kind in BY_TOKEN and "Fuse" not in kinds[:i]
        if not can_stream:
            raise foreign(f"makes text of tokens by {json.dumps(step)[:100]}")
    return kinds


def read_config(directory: Path) -> dict:
    """tokenizer_config.json; for an older one, with the names that stand beside it."""
    config = read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(directory / "special_tokens_map.json")
    return config


def token_text(token: str | dict | None) -> str | None:
    """The hub writes a control token as a text or as a dictionary."""
    return token["content"] if isinstance(token, dict) else token


# The largest share of a model's rows that no token has. Makers pad to a multiple of 64 or more:
# Qwen 2.5 has 151,936 for 151,665 tokens (0.2%); the most found is DeepSeek LLM's, 102,400 for
# 100,015 (2.3%).
MOST_PADDING = 0.03

# The names that transformers knows, in the order in which it adds their tokens.
NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
FIELDS = {"content", "single_word", "lstrip", "rstrip", "normalized"}


def named_tokens(config: dict) -> dict[str, str | dict]:
    """{"eos_token": token, ..}, with those that only this model names."""
    named = dict.fromkeys(NAMED) | config
    named = {key: value for key, value in named.items() if key.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    return {key: value for key, value in named.items() if isinstance(value, str | dict)}


def add_tokens(backend: tokenizers.Tokenizer, config: dict):
    """Add the tokens that only tokenizer_config.json has, or that it describes otherwise."""
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
    Raises TokenizerError where the model beside the tokenizer lacks rows for its vocabulary or its
    end of text, or has more rows without a token than makers pad with, or its own end of text among
    them. Other added tokens (of images) may have none: a prompt with one is refused.
    """
    try:
        config = read_json(directory / "config.json")
        config = config.get("text_config") or config
        rows = config.get("vocab_size")
        ends = config.get("eos_token_id") or 0
        end = int(max(ends) if isinstance(ends, list) else ends)
    except MALFORMED:
        return  # a broken model is reported when the model is loaded
    ids = tokenizer.backend.get_vocab(with_added_tokens=False).values()
    needed = max([*ids, tokenizer.eos_token_id or 0]) + 1
    has = tokenizer.vocab_size
    if type(rows) is not int:
        return
    if needed > rows or rows - has > max(63, MOST_PADDING * rows) or rows > end >= has:
        raise TokenizerError(
            f"it has {has} tokens, but config.json beside it says that the model has {rows}: they "
            "do not belong together, copy the model's own tokenizer there"
        )
