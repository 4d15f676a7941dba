"""
A corpus of your own texts, in UTF-8. Each file is a document, once: begun as serve.py begins a
prompt, with a BOS or none, and closed by the end-of-text token.

    python data/text/prepare.py book.txt                            # its last tenth is held out
    python data/text/prepare.py notes/ more.txt --out data/notes    # every tenth file is
    python data/text/prepare.py notes/ --init DIR                   # in the tokens of a checkpoint
    python train.py --data text                                     # or notes; -> out/text

Of a folder all files are read, those in its folders, too, but no hidden ones or pipes. Without
--init a byte-level BPE is learnt from the texts to train on. Documents are packed:
training/corpus.py.
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
    The texts of a file or folder by their files, sorted by name, without empty ones. Raises
    ValueError if one is not UTF-8, and OSError.
    """
    texts = {}
    for name in sorted(glob("**", root_dir=source, recursive=True)) or [""]:
        path = source / name
        if path.is_dir() or (name and not path.is_file()):  # for a pipe's writer we would wait
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
