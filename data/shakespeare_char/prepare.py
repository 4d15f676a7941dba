"""
Tiny Shakespeare, character by character: nanoGPT's corpus, split and vocabulary to the letter.
`python train.py --preset shakespeare_char` makes it where it is missing; that fetches 1.1 MB once,
or takes the text from input.txt beside this file:

    train.bin (1,003,854 tokens), val.bin (111,540), meta.json and a tokenizer of 65 characters
"""

import sys
import urllib.request
from pathlib import Path

if __name__ == "__main__":
    sys.exit("train.py makes this corpus: python train.py --preset shakespeare_char")

from common import write_atomically
from tokenizer import Tokenizer
from training.corpus import char_tokenizer, hold_out, write_corpus

ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


def fetch(path: Path) -> str:
    """
    The text, from `path` if it is there, otherwise from the network once. Exits with what to do.
    """
    if not path.is_file():
        try:
            with urllib.request.urlopen(ADDRESS, timeout=20) as response:
                content = response.read()
        except OSError as error:  # every failure of the network is one of these
            sys.exit(
                f"cannot fetch {ADDRESS} ({error}): download it elsewhere and put it at {path}"
            )
        write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return path.read_text(encoding="utf-8")


def prepare(folder: Path, tokenizer: Tokenizer | None = None):
    """Write the corpus to a folder, by default with a tokenizer of the text's characters."""
    text = fetch(folder / "input.txt")
    # nanoGPT's split: the last tenth of the text is held out
    write_corpus(folder, *hold_out([text]), tokenizer or char_tokenizer(text))
