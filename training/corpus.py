"""
A corpus: a tokenizer that fits its texts, and files of token ids. A corpus is created by a recipe,
the function `prepare` in data/NAME/prepare.py:

    def prepare(folder, tokenizer=None):                   # None: create one
        tokenizer = tokenizer or char_tokenizer(text)      # or train_bpe(texts, vocab_size=4096)
        write_corpus(folder, train_texts, val_texts, tokenizer)

train.py calls the recipe if necessary, reads the corpus, and cuts batches from it:

    corpus = load_corpus("stdlib", process)
    rows = batch_rows(corpus.train, B=16, T=128, seed=1, step=0)    # (B, T + 1) int64

A token that is read but not predicted, such as a user's token in a dialogue, is stored as ~id,
which is negative. Documents are packed: they are stored back to back, windows cut across them, and
attention also sees earlier documents in the same window.

Only `gpt2_tokenizer` needs tiktoken, which provides GPT-2's vocabulary.
"""

import json
import math
import runpy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from common import (
    MALFORMED,
    Parser,
    add_flag,
    read_json,
    say,
    write_atomically,
    write_json,
)
from tokenizer import (
    ALPHABET,
    END_OF_TEXT,
    CharTokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)

ROOT = Path(__file__).resolve().parents[1]
GPT2_MERGES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"

# --------------------------------------------------------------------------------------------------
# Tokenizers


def char_tokenizer(text: str) -> CharTokenizer:
    """
    Return a character tokenizer for a text. Its distinct characters are sorted and numbered from 0.
    """
    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    # the unknown token is longer than a character, so it never matches: unknown characters are
    # errors
    backend = Backend(models.WordLevel(vocab, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return CharTokenizer(backend)


def bpe_tokenizer(merges: list[tuple[str, str]], alphabet: Iterable[str] = ALPHABET) -> Tokenizer:
    """
    Return a byte-level BPE tokenizer, which can encode and decode any text and any sequence of
    bytes. merges: pairs of pieces, spelled as in a vocabulary (b" a" is "Ġa"), in the order in
    which they were learnt. alphabet: the one-byte pieces, which get the ids 0 to 255. As in GPT-2,
    they are followed by the result of each merge, and then by the end-of-text token.
    """
    # two merges may produce the same piece
    pieces = dict.fromkeys([*alphabet, *map("".join, merges)])
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges))
    # GPT-2's pattern cuts a text into pieces, and bytes are merged only within a piece. The pieces
    # are contractions, words, numbers, punctuation and runs of white space. A word, number or
    # punctuation may include one space before it, which then does not belong to the run.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend)


def train_bpe(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Learn a byte-level BPE with at most `vocab_size` tokens, including the end-of-text token."""
    learner = Backend(models.BPE())
    # the time for a word grows with the square of its length (minutes for 1 MB), so cut long words
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.FixedLength(256)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(ALPHABET), show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return bpe_tokenizer([tuple(pair) for pair in merges])


def gpt2_tokenizer() -> Tokenizer:
    """
    Return GPT-2's tokenizer, built from the merges that tiktoken downloads and stores. If these are
    not available, raises TokenizerError, which says what to do.
    """
    try:
        from tiktoken.load import read_file_cached

        text = read_file_cached(GPT2_MERGES).decode()
    except Exception as error:  # tiktoken does not catch its HTTP client's errors
        raise TokenizerError(
            f"GPT-2's vocabulary is not available ({error!r}): run `pip install tiktoken`, and "
            "connect to the network once or set TIKTOKEN_CACHE_DIR to a folder that contains it"
        ) from error
    merges = [tuple(line.split()) for line in text.splitlines()[1:]]  # skips the version
    # GPT-2 numbers bytes by their spelling: printable characters first
    return bpe_tokenizer(merges, sorted(ALPHABET))


# --------------------------------------------------------------------------------------------------
# Token files


def encode_documents(documents: Iterable, tokenizer: Tokenizer) -> list[int]:
    bos = [~token for token in tokenizer.bos]  # never predicted, as serve.py adds it to prompts
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = []
    for document in documents:
        ids += bos + tokenizer.encode(document) + end if isinstance(document, str) else document
    return ids


def write_corpus(directory: Path, train: list, val: Iterable, tokenizer: Tokenizer | None, **about):
    """
    Write a corpus of documents. A document is either a text or token ids, with ~id for each token
    that is not predicted. The tokenizer's BOS token is added before a text and its end-of-text
    token after it, if the tokenizer has them. Without a tokenizer, a byte-level BPE is learnt from
    the training texts. The files are the tokenizer, train.bin and val.bin (which contain only token
    ids), and meta.json, which says how the ids are stored, and what `about` says. meta.json is
    written last, and a folder without it counts as not prepared. Exits with a message if there is
    nothing to predict, if a file cannot be written, or if the directory contains a model.
    """
    if (directory / "config.json").exists():
        sys.exit(f"{directory} holds a model, which needs its own tokenizer: choose another --out")
    # held-out text must not influence the vocabulary that it is evaluated with
    tokenizer = tokenizer or train_bpe(train)
    train = encode_documents(train, tokenizer)
    val = encode_documents(val, tokenizer)
    # the first held-out token is not scored, because no end-of-text token precedes it
    if not train or max(val[1:], default=-1) < 0:
        sys.exit(
            f"{directory}: {len(train)} tokens to train on and {len(val)} to hold out are too few: "
            "add texts or choose others"
        )
    dtype = "int32"
    try:
        (directory / "meta.json").unlink(missing_ok=True)
        tokenizer.save(directory)
        for split, ids in ("train", train), ("val", val):
            tokens = np.array(ids, dtype)
            write_atomically(directory / f"{split}.bin", tokens.tofile)
        write_json(directory / "meta.json", {"dtype": dtype, **about})
    except OSError as error:
        sys.exit(f"{directory} cannot be written ({error}): free space or choose another folder")
    counts = f"{len(train):,} tokens to train on, {len(val):,} held out"
    say(f"{directory.resolve()}: {counts}", sys.stdout)


def hold_out(documents: list) -> tuple[list, list]:
    """
    Split documents into those to train on and those to hold out. Every tenth document is held out
    or, if there is only one document, its last tenth.
    """
    if len(documents) == 1:
        [document] = documents
        cut = int(len(document) * 0.9)
        return [document[:cut]], [document[cut:]]
    train = documents[:]
    del train[::10]
    return train, documents[::10]


def run_recipe(read: Callable, folder: Path, argv=None):
    """
    Run a recipe that takes files as a command: write a corpus, by default to `folder`.
    `read(source, init)` returns the documents in a file or folder, each under its own key. A
    document that is read twice is used only once, and held-out documents are not trained on.
    """
    parser = Parser(description="Create a corpus from your own files, for train.py --data.")
    parser.add_argument("sources", nargs="+", type=Path, help="files or folders")
    add_flag(parser, "--val", "files to hold out; default: every tenth document", kind=Path)
    add_flag(parser, "--init", "checkpoint whose tokenizer to use; default: learn a new one")
    add_flag(parser, "--out", "folder for the corpus", folder, Path)
    args = parser.parse_args(argv)
    try:
        tokenizer = args.init and load_tokenizer(args.init)
        folder = args.out.resolve()
        documents = {}
        for source in filter(None, [*args.sources, args.val]):
            if folder.is_relative_to(source.resolve()):
                sys.exit(f"--out {args.out} is inside {source}, an input: choose another --out")
            documents |= read(source, args.init)
        val = read(args.val, args.init) if args.val else {}
        train = [document for key, document in documents.items() if key not in val]
        if val and not train:
            sys.exit(f"--val {args.val} holds out every document: add files to train on")
        split = (train, val.values()) if args.val else hold_out(train)
        before = read_about(folder)
        sources = ", ".join(map(str, args.sources))
        write_corpus(folder, *split, tokenizer, sources=sources, init=args.init)
        if before:
            sources = before.get("sources", "other texts")
            say(f"this replaces the corpus made from {sources}", sys.stdout)
    except OSError as error:
        sys.exit(f"{error.strerror}: {error.filename}; name files that can be read")
    except ValueError as error:  # its message is meant for users
        sys.exit(str(error))


def read_corpus(directory: Path, split: str) -> np.ndarray:
    """
    Return the "train" or "val" tokens, memory-mapped and read-only. Raises ValueError if a file is
    missing or damaged.
    """
    try:
        dtype = read_json(directory / "meta.json")["dtype"]
        return np.memmap(directory / f"{split}.bin", dtype=dtype, mode="r")
    except (OSError, *MALFORMED) as error:
        raise ValueError(f"{directory} is an incomplete corpus ({error}): recreate it") from error


def folder_of(name: str | Path) -> Path:
    """Return the folder data/NAME, or the folder NAME if only that one has a corpus."""
    folder = ROOT / "data" / name
    if not (folder / "meta.json").is_file() and Path(name, "meta.json").is_file():
        return Path(name)
    return folder


def read_about(name: str | Path) -> dict:
    """
    Return what meta.json says about a corpus (see `folder_of`): its `sources`, and `init`, the
    checkpoint whose tokenizer it uses. Return {} if the file is missing or damaged.
    """
    try:
        return dict(read_json(folder_of(name) / "meta.json"))
    except MALFORMED:
        return {}


@dataclass
class Corpus:
    """The tokens for a run: those to train on, and those to evaluate with."""

    tokenizer: Tokenizer
    train: np.ndarray  # memory-mapped tokens
    val: np.ndarray  # held-out tokens

    @cached_property
    def digest(self) -> int:
        """Return a checksum of the tokens and the vocabulary."""
        vocabulary = json.dumps(self.tokenizer.backend.get_vocab(), sort_keys=True)
        return crc32(vocabulary.encode(), crc32(self.val, crc32(self.train)))

    def bits_per_byte(self, nats: float, count: int) -> float:
        """
        Return the loss in bits per byte of text, where `nats` is the total loss of the last `count`
        held-out tokens that are predicted. The first token has no score if no end-of-text token
        precedes it, and its bytes are then not counted.
        """
        predicted = self.val[self.val >= 0]
        text = self.tokenizer.decode_bytes(predicted[-count:].tolist())
        return nats / math.log(2) / max(1, len(text))  # an end-of-text token has no bytes


def load_corpus(name: str, process) -> Corpus:
    """
    Load the corpus in data/NAME, or in the folder NAME. If there is none yet but data/NAME has a
    recipe, the main process creates it first. data/NAME_gpt2 has the same text in GPT-2's tokens.
    Exits with a message if there is no such corpus. `process`: see training/machine.py.
    """
    folder = folder_of(name)
    if not (folder / "meta.json").is_file():
        recipe = ROOT / "data" / name.removesuffix("_gpt2") / "prepare.py"
        prepare = recipe.is_file() and runpy.run_path(str(recipe)).get("prepare")
        if not prepare:
            sys.exit(
                f"--data {name}: {folder / 'meta.json'} does not exist; choose stdlib or "
                "shakespeare_char, or create a corpus from your own files with "
                "data/text/prepare.py or data/chat/prepare.py"
            )
        if process.is_main:
            tokenizer = gpt2_tokenizer() if name.endswith("_gpt2") else None
            folder.mkdir(exist_ok=True)
            prepare(folder, tokenizer)
    process.wait()  # until the main process has prepared it
    return Corpus(load_tokenizer(folder), read_corpus(folder, "train"), read_corpus(folder, "val"))


# --------------------------------------------------------------------------------------------------
# Batches


def count_windows(tokens: np.ndarray, T: int) -> int:
    """
    Return the number of windows (T tokens and a target each) in an epoch. It is one less than would
    fit, to leave room for a random offset.
    """
    return (len(tokens) - 1) // T - 1


@lru_cache(maxsize=4)
def epoch_starts(windows: int, T: int, seed: int, epoch: int) -> np.ndarray:
    """
    Return where an epoch's windows begin, shuffled. The windows start at a random offset and do not
    overlap, so an epoch contains each token at most once.
    """
    random = np.random.default_rng((seed, epoch))
    return random.permutation(windows) * T + random.integers(T)


def batch_rows(tokens, B: int, T: int, seed: int, step: int, rank=0, world=1) -> np.ndarray:
    """
    Return a step's batch, which depends only on (seed, step): B windows, each with the token that
    follows it. With several processes, return one process's share, (B / world, T + 1) int64.
    """
    windows = count_windows(tokens, T)
    first = step * B  # windows are numbered from the start of the run
    rows = []
    for number in range(first + rank, first + B, world):  # the processes take turns
        epoch, i = divmod(number, windows)
        start = epoch_starts(windows, T, seed, epoch)[i]
        rows.append(tokens[start : start + T + 1])
    return np.stack(rows).astype(np.int64)
