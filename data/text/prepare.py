"""
A corpus of your own texts, in UTF-8. Each file is a document, closed by the end-of-text token.

    python data/text/prepare.py book.txt                            # its last tenth is held out
    python data/text/prepare.py notes/ more.txt --out data/notes    # every tenth file is
    python data/text/prepare.py notes/ --init DIR                   # in the tokens of a checkpoint
    python train.py --data text                                     # or notes

Of a folder all files are read, those in its folders, too, but no hidden ones. Without --init a
byte-level BPE is learnt from the texts to train on.
"""

import sys
from glob import glob
from pathlib import Path

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/../.."

from common import Parser, add_flag
from tokenizer import load_tokenizer
from training.corpus import hold_out, write_documents


def read_texts(sources: list[Path]) -> list[str]:
    """The texts of all files that are not empty, sorted by name. Exits if one cannot be read."""
    texts = []
    for source in sources:
        for name in sorted(glob("**", root_dir=source, recursive=True)) or [""]:
            path = source / name
            if path.is_dir():
                continue
            try:
                texts.append(path.read_bytes().decode())
            except (OSError, ValueError) as error:
                sys.exit(f"{path} cannot be read as UTF-8 ({error}): convert it or leave it out")
    return [text for text in texts if text]


def main(argv: list[str] | None = None):
    parser = Parser(description="Make a corpus of your own texts, for train.py --data.")
    about = "texts in UTF-8; of a folder all files, but no hidden ones"
    parser.add_argument("sources", nargs="+", type=Path, metavar="FILE-OR-FOLDER", help=about)
    add_flag(parser, "--init", "checkpoint whose tokenizer to use; default: one learnt from them")
    add_flag(parser, "--out", "folder of the corpus", Path(__file__).parent, Path)
    args = parser.parse_args(argv)
    train, val = hold_out(read_texts(args.sources))
    try:
        tokenizer = load_tokenizer(args.init) if args.init else None
        write_documents(args.out, train, val, tokenizer)
    except ValueError as error:  # of the tokenizer, and written to be read
        sys.exit(str(error))


if __name__ == "__main__":
    main()
