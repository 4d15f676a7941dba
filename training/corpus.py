"""
A corpus: a tokenizer that fits its text, and files of token ids. It is made by a recipe, the
function `prepare` in data/NAME/prepare.py:

    def prepare(folder, tokenizer=None):                   # None: make one
        tokenizer = tokenizer or char_tokenizer(text)      # or train_bpe(texts, vocab_size=4096)
        write_corpus(folder, train_texts, val_texts, tokenizer)

train.py reads the corpus, after calling the recipe if necessary, and cuts batches from it:

    corpus = load_corpus("stdlib", process)
    rows = batch_rows(corpus.train, B=16, T=128, seed=1, step=0)    # (B, T + 1) int64

A token that is read but not predicted, for example a user's in a dialogue, is stored as ~id, which
is negative. Documents are packed: they are stored back to back, windows cut across them, and
attention also sees the earlier documents in its window.

Only `gpt2_tokenizer` needs tiktoken, which has GPT-2's vocabulary.
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
    Return the character tokenizer of a text: its distinct characters, sorted, numbered from 0.
    """
    vocab = {character: i for i, character in enumerate(sorted(set(text)))}
    # the unknown token is longer than a character, so it never matches: unknown stays an error
    backend = Backend(models.WordLevel(vocab, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return CharTokenizer(backend)


def bpe_tokenizer(merges: list[tuple[str, str]], alphabet: Iterable[str] = ALPHABET) -> Tokenizer:
    """
    Return a byte-level BPE tokenizer: every text and every sequence of bytes can be encoded, and
    decoding gives it back. merges: pairs of pieces, spelled as in a vocabulary (b" a" is "Ġa"), in
    the order in which they were learnt. alphabet: the pieces of one byte, which get the ids 0 to
    255. As in GPT-2, these are followed by the result of each merge and the end-of-text token.
    """
    # two merges may make the same piece
    pieces = dict.fromkeys([*alphabet, *map("".join, merges)])
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges))
    # GPT-2's pattern cuts a text into pieces, and bytes are merged only within a piece. The pieces
    # are contractions; words, numbers and punctuation, each with at most one space before it; and
    # runs of white space, except that the last space belongs to the word after it.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend)


def train_bpe(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Learn a byte-level BPE of at most `vocab_size` tokens, including end of text."""
    learner = Backend(models.BPE())
    # the time for a word grows with the square of its length (minutes for 1 MB), so cut it
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
    Return GPT-2's tokenizer, from the merges that tiktoken downloads and stores. Raises
    TokenizerError, which says what to do, if they are not available.
    """
    try:
        from tiktoken.load import read_file_cached

        text = read_file_cached(GPT2_MERGES).decode()
    except Exception as error:  # tiktoken lets the errors of its HTTP client through
        raise TokenizerError(
            f"GPT-2's vocabulary is not available ({error!r}): pip install tiktoken, and connect "
            "to the network once or set TIKTOKEN_CACHE_DIR to a folder in which it is stored"
        ) from error
    merges = [tuple(line.split()) for line in text.splitlines()[1:]]  # the first is a version
    # GPT-2 numbers bytes by their spelling: printable characters first
    return bpe_tokenizer(merges, sorted(ALPHABET))


# --------------------------------------------------------------------------------------------------
# Token files


def encode_documents(documents: Iterable, tokenizer: Tokenizer) -> list[int]:
    bos = [~token for token in tokenizer.bos]  # serve.py adds it to a prompt: never predicted
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = []
    for document in documents:
        ids += bos + tokenizer.encode(document) + end if isinstance(document, str) else document
    return ids


def write_corpus(directory: Path, train: list, val: Iterable, tokenizer: Tokenizer | None):
    """
    Write a corpus of documents. A document is either token ids, ~id where one is not predicted, or
    a text. A text gets the tokenizer's BOS before it and its end-of-text token after it, if it has
    them. Without a tokenizer, a byte-level BPE is learnt from the training texts. The files are the
    tokenizer, train.bin and val.bin (only token ids) and, last, meta.json, which says how the ids
    are stored: a folder without it counts as not prepared. Exits with a message if there is nothing
    to predict, if a file cannot be written, or if the directory holds a model.
    """
    if (directory / "config.json").exists():
        sys.exit(f"{directory} holds a model, which needs its own tokenizer: choose another --out")
    # held-out text must not shape the vocabulary that it is measured with
    tokenizer = tokenizer or train_bpe(train)
    train = encode_documents(train, tokenizer)
    val = encode_documents(val, tokenizer)
    # the first held-out token is not scored, because no end of text precedes it
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
        write_json(directory / "meta.json", {"dtype": dtype})
    except OSError as error:
        sys.exit(f"{directory} cannot be written ({error}): free space or choose another folder")
    print(f"{directory.resolve()}: {len(train):,} tokens to train on, {len(val):,} held out")


def hold_out(documents: list) -> tuple[list, list]:
    """
    Split documents into those to train on and those to hold out: every tenth document or, if there
    is only one, its last tenth.
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
    Run the command of a recipe that takes files: write a corpus, by default to `folder`.
    `read(source, init)` returns the documents of a file or folder, each under a key of its own. A
    document that is read twice counts once, and a document that is held out is not trained on.
    """
    parser = Parser(description="Make a corpus of your own files, for train.py --data.")
    parser.add_argument("sources", nargs="+", type=Path, help="files or folders")
    add_flag(parser, "--val", "files to hold out; default: every tenth document", kind=Path)
    add_flag(parser, "--init", "checkpoint whose tokenizer to use; default: learn one")
    add_flag(parser, "--out", "folder of the corpus", folder, Path)
    args = parser.parse_args(argv)
    try:
        tokenizer = args.init and load_tokenizer(args.init)
        documents = {}
        for source in filter(None, [*args.sources, args.val]):
            if args.out.resolve().is_relative_to(source.resolve()):
                sys.exit(f"--out {args.out} is in {source}, which is read: choose another --out")
            documents |= read(source, args.init)
        val = read(args.val, args.init) if args.val else {}
        train = [document for key, document in documents.items() if key not in val]
        split = (train, val.values()) if args.val else hold_out(train)
        folder = args.out.resolve()
        before = read_about(folder)
        write_corpus(folder, *split, tokenizer)
        if before:
            print(f"it replaces the corpus of {before.get('sources', 'other texts')}")
        about = {"sources": ", ".join(map(str, args.sources)), "init": args.init}
        write_json(folder / "meta.json", read_about(folder) | about)
    except (OSError, ValueError) as error:  # with messages for users
        sys.exit(str(error))


def read_corpus(directory: Path, split: str) -> np.ndarray:
    """
    Return the tokens of "train" or "val", memory-mapped and read-only. Raises ValueError if a file
    is missing or damaged.
    """
    try:
        dtype = read_json(directory / "meta.json")["dtype"]
        return np.memmap(directory / f"{split}.bin", dtype=dtype, mode="r")
    except (OSError, *MALFORMED) as error:
        raise ValueError(f"{directory} is an incomplete corpus ({error}): make it again") from error


def read_about(name: str | Path) -> dict:
    """
    Return what meta.json says about the corpus data/NAME: `sources`, and `init`, the checkpoint
    whose tokens it has. {} if the file is missing or damaged.
    """
    try:
        return dict(read_json(ROOT / "data" / name / "meta.json"))
    except MALFORMED:
        return {}


@dataclass
class Corpus:
    """The tokens of a run: those to train on, and those to evaluate it with."""

    tokenizer: Tokenizer
    train: np.ndarray  # memory-mapped tokens
    val: np.ndarray  # held-out tokens

    @cached_property
    def digest(self) -> int:
        """Return a number that other tokens, or another vocabulary, are unlikely to have."""
        vocabulary = json.dumps(self.tokenizer.backend.get_vocab(), sort_keys=True)
        return crc32(vocabulary.encode(), crc32(self.val, crc32(self.train)))

    def bits_per_byte(self, nats: float, count: int) -> float:
        """
        Return the loss in bits per byte of text, where `nats` is the total loss of the last `count`
        held-out tokens that are predicted. If no end-of-text token precedes the first token, it has
        no score, and its bytes are not counted.
        """
        predicted = self.val[self.val >= 0]
        text = self.tokenizer.decode_bytes(predicted[-count:].tolist())
        return nats / math.log(2) / len(text)


def load_corpus(name: str, process) -> Corpus:
    """
    Load the corpus in data/NAME, or in the folder NAME. If it has a recipe and does not exist yet,
    the main process makes it first. data/NAME_gpt2 is the same text in GPT-2's tokens. Exits with a
    message if there is no such corpus. `process`: see training/machine.py.
    """
    folder = ROOT / "data" / name
    if not (folder / "meta.json").is_file():
        recipe = ROOT / "data" / name.removesuffix("_gpt2") / "prepare.py"
        prepare = recipe.is_file() and runpy.run_path(str(recipe)).get("prepare")
        if not prepare:
            sys.exit(
                f"--data {name}: {folder / 'meta.json'} does not exist; choose stdlib or "
                "shakespeare_char, or make a corpus of your own files with data/text/prepare.py or "
                "data/chat/prepare.py"
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
    Return the number of windows, of T tokens and a target, in an epoch: one less than fit, to leave
    space for a random offset.
    """
    return (len(tokens) - 1) // T - 1


@lru_cache(maxsize=4)
def epoch_starts(windows: int, T: int, seed: int, epoch: int) -> np.ndarray:
    """
    Return where the windows of an epoch begin, shuffled. They cut the corpus from a random offset
    on and do not overlap, so an epoch has every token at most once.
    """
    random = np.random.default_rng((seed, epoch))
    return random.permutation(windows) * T + random.integers(T)


def batch_rows(tokens, B: int, T: int, seed: int, step: int, rank=0, world=1) -> np.ndarray:
    """
    Return the batch of a step, which is a function of (seed, step): B windows, each with the token
    after it. With several processes, return the share of one of them: (B / world, T + 1) int64.
    """
    windows = count_windows(tokens, T)
    first = step * B  # windows are numbered from the start of the run
    rows = []
    for number in range(first + rank, first + B, world):  # the processes take turns
        epoch, i = divmod(number, windows)
        start = epoch_starts(windows, T, seed, epoch)[i]
        rows.append(tokens[start : start + T + 1])
    return np.stack(rows).astype(np.int64)
