"""
Converts a nanochat checkpoint (up to nanochat's commit 2c4473d of January 2026) to a directory that
serve.py can open:

    python examples/from_nanochat.py ~/.cache/nanochat/chatsft_checkpoints/d20/model_000650.pt DIR
    python serve.py --model DIR

meta_000650.json must be next to the checkpoint, and tokenizer/tokenizer.pkl two folders above it.
Code in the files is never run. Models from later commits have parts that this decoder does not
support; they are refused.
"""

import json
import re
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/.."
    from common import end_with_one_line

    end_with_one_line()

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from checkpoint import empty_model, save_checkpoint
from examples import from_nanogpt
from families import read_fields
from tokenizer import ALPHABET, Tokenizer

BOS = "<|bos|>"
END = "<|assistant_end|>"
TEMPLATE = """{{ "<|bos|>" }}
{%- set said = namespace(first="") -%}
{%- for message in messages -%}
    {%- if message.role == "system" and loop.first -%}
        {%- set said.first = message.content + "\\n\\n" -%}
    {%- elif message.role == "user" -%}
        {{ "<|user_start|>" + said.first + message.content + "<|user_end|>" }}
        {%- set said.first = "" -%}
    {%- elif message.role == "assistant" -%}
        {{ "<|assistant_start|>" + message.content + "<|assistant_end|>" }}
    {%- else -%}
        {{ raise_exception("nanochat does not know messages with role " + message.role) }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|assistant_start|>" }}{%- endif -%}
"""


class Encoding:
    """A stand-in for tiktoken's class, with only what is in the pickle: `mergeable_ranks`, .."""


class EncodingUnpickler(from_nanogpt.PlainUnpickler):
    def find_class(self, module: str, name: str):
        if (module, name) == ("tiktoken.core", "Encoding"):
            return Encoding
        return super().find_class(module, name)


def convert(path: Path, directory: Path):
    """Convert a checkpoint. Raises ValueError, OSError or, for a broken file, any other error."""
    meta = path.with_name(path.name.replace("model_", "meta_")).with_suffix(".json")
    sizes = json.loads(meta.read_text())["model_config"]
    tokenizer = read_tokenizer(path.parents[2] / "tokenizer" / "tokenizer.pkl")
    ends = [tokenizer.control[END], tokenizer.control[BOS]]
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    weights = {name.removeprefix("_orig_mod."): weight for name, weight in saved.items()}
    config_json = {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": sizes["sequence_len"],
        "num_hidden_layers": sizes["n_layer"],
        "num_attention_heads": sizes["n_head"],
        "num_key_value_heads": sizes["n_kv_head"],
        "hidden_size": sizes["n_embd"],
        "intermediate_size": 4 * sizes["n_embd"],
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "final_logit_softcapping": 15.0,
        "eos_token_id": ends,
        "bos_token_id": ends[1],
    }
    model = empty_model(read_fields(config_json))
    model.config_json = config_json
    model.load_state_dict(renamed(weights, model), assign=True)
    tokenizer.save(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    save_checkpoint(model, directory)


def renamed(weights: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """
    Return the weights in fp32 under this repo's names. Raises ValueError if there are weights that
    the model does not have.
    """
    ours = {}
    for name in model.state_dict():
        theirs = [name if name.startswith("lm_head") else f"transformer.{name}"]
        if "c_attn" in name:
            theirs = [theirs[0].replace("c_attn", f"c_{x}") for x in "qkv"]
        # rows beyond the vocabulary are padding
        parts = [weights.pop(other)[: model.config.vocab_size] for other in theirs]
        ours[name] = torch.cat(parts).float()
    if weights:
        kinds = sorted({re.sub(r"\.\d+|\.weight", "", name) for name in weights})
        raise ValueError(f"it has {', '.join(kinds)}: wanted a model from 2c4473d or earlier")
    return ours


def read_tokenizer(path: Path) -> Tokenizer:
    """Rebuild tiktoken's pickled tokenizer from parts of the `tokenizers` library."""
    with path.open("rb") as file:
        encoding = EncodingUnpickler(file).load()
    ranks = encoding.mergeable_ranks
    pieces = {token: "".join(ALPHABET[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        if len(token) > 1:
            merges.append(tuple(pieces[half] for half in halves(token, ranks)))
    vocabulary = {pieces[token]: rank for token, rank in ranks.items()}
    backend = Backend(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Split(Regex(encoding.pat_str), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    specials = encoding.special_tokens
    backend.add_special_tokens(sorted(specials, key=specials.get))
    if backend.get_vocab() != vocabulary | specials:
        raise ValueError(f"{path} numbers its tokens in an unknown order")
    bos = (BOS, specials[BOS])
    template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    backend.post_processor = template
    return Tokenizer(backend, END)


def halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """
    Return the two tokens that were merged into this one. They are found by applying earlier merges
    to its bytes.
    """
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


main = partial(from_nanogpt.main, convert=convert, checkpoint="nanochat's model_STEP.pt")

if __name__ == "__main__":
    main(*sys.argv[1:])
