"""
A corpus of your own texts, in UTF-8. Each file is one document. As in serve.py's prompts, it starts
with a BOS token if the tokenizer adds one. It ends with the end-of-text token.

    python data/text/prepare.py book.txt                            # its last tenth is held out
    python data/text/prepare.py notes/ more.txt --out data/notes    # every tenth file is held out
    python data/text/prepare.py notes/ --init DIR                   # in a checkpoint's tokens
    python train.py --data text                                     # or notes; writes out/text

All files in a folder and its subfolders are read, except hidden files and pipes. Without --init, a
byte-level BPE is learnt from the training texts. Documents are packed: see training/corpus.py.
"""

import sys
from glob import glob
from pathlib import Path

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/../.."
    from common import end_with_one_line

    end_with_one_line()

from training.corpus import run_recipe


def read(source: Path, _) -> dict:
    """
    Return the texts in a file or folder by path, sorted, without empty texts. Raises OSError, and
    ValueError if a text is not UTF-8.
    """
    texts = {}
    for name in sorted(glob("**", root_dir=source, recursive=True)) or [""]:
        path = source / name
        if path.is_dir() or (name and not path.is_file()):  # a pipe would wait for its writer
            continue
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}): convert it or leave it out") from None
        if text:
            texts[path.resolve()] = text
    return texts


if __name__ == "__main__":
    run_recipe(read, Path(__file__).parent)
