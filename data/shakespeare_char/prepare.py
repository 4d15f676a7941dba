"""
Tiny Shakespeare, character by character, with exactly nanoGPT's corpus, split and vocabulary.
`python train.py --preset shakespeare_char` creates the corpus if it is missing. It downloads 1.1 MB
once, or uses the text from input.txt in this folder. The files are

    train.bin (1,003,854 tokens), val.bin (111,540), meta.json and a tokenizer of 65 characters
"""

import sys
import urllib.request
from http.client import HTTPException
from pathlib import Path

if __name__ == "__main__":
    sys.exit("train.py creates this corpus: python train.py --preset shakespeare_char")

from common import write_atomically
from tokenizer import Tokenizer
from training.corpus import char_tokenizer, hold_out, write_corpus

ADDRESS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)


def fetch(path: Path) -> str:
    """
    Return the text, from `path` if it exists, otherwise from the network. If this fails, exits with
    a message that says what to do.
    """
    if not path.is_file():
        try:
            with urllib.request.urlopen(ADDRESS, timeout=20) as response:
                content = response.read()
        except (OSError, HTTPException) as error:  # the latter if it ends too early
            sys.exit(
                f"cannot fetch {ADDRESS} ({error}): download it elsewhere and put it at {path}"
            )
        write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return path.read_text(encoding="utf-8")


def prepare(folder: Path, tokenizer: Tokenizer | None = None):
    """Write the corpus to a folder, by default with a character tokenizer for the text."""
    text = fetch(folder / "input.txt")
    # nanoGPT's split: the last tenth of the text is held out
    write_corpus(folder, *hold_out([text]), tokenizer or char_tokenizer(text))
