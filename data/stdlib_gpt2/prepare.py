"""
The standard library in GPT-2's tokens: what `--preset gpt2-124M` trains on.

    python data/stdlib_gpt2/prepare.py

Same files and same split as data/stdlib, another tokenizer: GPT-2's, which tiktoken fetches once.
"""

import argparse
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common import end_with_one_line  # noqa: E402

if __name__ == "__main__":
    end_with_one_line()

from training.corpus import gpt2_tokenizer  # noqa: E402


def prepare(out: Path = HERE):
    """
    Make the corpus in the folder `out`. Raises TokenizerError where GPT-2's vocabulary cannot be
    had.
    """
    stdlib = runpy.run_path(str(HERE.parent / "stdlib" / "prepare.py"))
    stdlib["prepare"](out, tokenizer=gpt2_tokenizer())


if __name__ == "__main__":
    argparse.ArgumentParser(description="Prepare the stdlib_gpt2 corpus.").parse_args()
    prepare()
