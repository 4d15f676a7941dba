"""
Tiny Shakespeare, character by character: nanoGPT's corpus, split and vocabulary to the letter.

    python data/shakespeare_char/prepare.py                   # fetches 1.1 MB once
    python data/shakespeare_char/prepare.py --input FILE      # without network

Writes train.bin (1,003,854 tokens), val.bin (111,540), meta.json and a tokenizer of 65 characters
beside this file. `python train.py --preset shakespeare_char` calls it by itself.
"""

import argparse
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common import end_with_one_line  # noqa: E402

if __name__ == "__main__":
    end_with_one_line()

from common import write_atomically  # noqa: E402
from training.corpus import char_tokenizer, write_corpus  # noqa: E402

ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


def fetch(path: Path, address: str = ADDRESS) -> str:
    """
    The text, from `path` if it is there, otherwise from the network once. Exits with what to do.
    """
    if not path.is_file():
        try:
            with urllib.request.urlopen(address, timeout=20) as response:
                content = response.read()
        except OSError as error:  # every failure of the network is one of these
            sys.exit(
                f"cannot fetch {address} ({error}): download it elsewhere and run `python "
                f"data/shakespeare_char/prepare.py --input FILE`, or put it in {path.parent} as "
                f"{path.name}"
            )
        write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return path.read_text(encoding="utf-8")


def prepare(out: Path = HERE, source: Path | None = None):
    """Tokenize the text (by default `out`/input.txt, fetched if missing) into `out`."""
    if source is not None and not source.is_file():
        sys.exit(f"--input {source} is not a file: name the text, or leave --input out to fetch it")
    text = fetch(source or out / "input.txt")
    tokenizer = char_tokenizer(text)
    cut = int(len(text) * 0.9)  # nanoGPT's split: the last tenth of the text is held out
    write_corpus(out, tokenizer, tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:]))
    print(
        f"shakespeare_char: {cut:,} training tokens, {len(text) - cut:,} held out, "
        f"{tokenizer.vocab_size} characters"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare the shakespeare_char corpus.")
    parser.add_argument("--input", type=Path, help="the text itself, instead of fetching it")
    prepare(source=parser.parse_args().input)
