"""
Converts a nanoGPT checkpoint to a directory that serve.py can open:

    python examples/from_nanogpt.py out-shakespeare-char/ckpt.pt DIR
    python serve.py --model DIR

The tokenizer must be next to ckpt.pt. It is either the meta.pkl of nanoGPT's corpus (for
characters), or GPT-2's files (`hf download openai-community/gpt2 tokenizer.json
tokenizer_config.json --local-dir out-NAME`). Code in the files is never run.
"""

import pickle
import sys
from pathlib import Path
from zipfile import is_zipfile

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/.."
    from common import end_with_one_line

    end_with_one_line()

import torch

from checkpoint import empty_model, save_checkpoint
from model import GPTConfig
from tokenizer import Tokenizer, load_tokenizer
from training.corpus import char_tokenizer


class PlainUnpickler(pickle.Unpickler):
    """Reads a pickle of dicts, strings and numbers, and refuses to import anything."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run any code")


def convert(path: Path, directory: Path):
    """Convert a checkpoint. Raises ValueError, OSError or, for a broken file, any other error."""
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    args = saved["model_args"]
    tokenizer = read_tokenizer(path.parent)
    end = tokenizer.eos_token_id
    config = GPTConfig(
        **{name: args[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd", "bias")},
        context_length=args["block_size"],
        activation="gelu",  # exact, not the tanh approximation
        eos_token_ids=() if end is None else (end,),
    )
    if tokenizer.vocab_size > config.vocab_size:
        rows = config.vocab_size
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, but the model {rows}")
    weights = {}
    for name, weight in saved["model"].items():
        if not name.endswith(".attn.bias"):  # a causal mask
            weights[name.removeprefix("_orig_mod.").removeprefix("transformer.")] = weight
    model = empty_model(config)
    model.load_state_dict(weights, assign=True)
    tokenizer.save(directory)
    save_checkpoint(model, directory)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read meta.pkl if there is one, otherwise the files of the `tokenizers` library."""
    meta = folder / "meta.pkl"
    if not meta.exists():
        return load_tokenizer(folder)
    with meta.open("rb") as file:
        itos = PlainUnpickler(file).load()["itos"]
    tokenizer = char_tokenizer("".join(itos.values()))
    if tokenizer.vocab != {character: i for i, character in itos.items()}:
        raise ValueError(f"{meta} must list single characters in sorted order")
    return tokenizer


def main(*paths: str, convert=convert, checkpoint="nanoGPT's ckpt.pt"):
    """Convert the checkpoint, or exit with a one-line message. Also used by from_nanochat.py."""
    if len(paths) != 2:
        sys.exit(f"{len(paths)} arguments, wanted 2: {checkpoint}, and a new directory")
    path, directory = map(Path, paths)
    if directory.exists():
        sys.exit(f"{directory} exists: name a new directory")
    if path.is_file() and not is_zipfile(path):
        sys.exit(f"{path} is not a checkpoint of torch.save: name {checkpoint}")
    try:
        convert(path, directory)
    except Exception as error:  # torch.load raises many types of error
        sys.exit(f"{path} cannot be converted: {error}")
    print(f"python serve.py --model {directory}")


if __name__ == "__main__":
    main(*sys.argv[1:])
