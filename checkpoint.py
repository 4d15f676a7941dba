"""
A checkpoint: a directory in the layout of the Hugging Face Hub ("the hub" below), config.json and
safetensors files beside the tokenizer's files.

    save_checkpoint(model, "out/stdlib")
    model = load_checkpoint("smollm2", device="cuda", dtype=torch.bfloat16)

What others trained opens here, if it is of one of the families (families.py), and what is saved
here opens in transformers and vLLM. Nothing is unpickled.
"""

import json
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from families import (
    FAMILIES,
    GPT2,
    CheckpointError,
    Family,
    family_named,
    family_of,
    hub_config,
    hub_names,
    read_fields,
)
from files import how_to_download, read_json, write_atomically, write_json
from model import GPT, GPTConfig, RMSNorm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# where a directory's weights have another prefix: saved without the head, or as part of a larger
# model
PREFIXES = ("transformer.", "model.language_model.", "language_model.model.", "model.")
PREFIXES += ("language_model.",)

# files that hold weights, in directories from elsewhere
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".gguf", ".h5", ".msgpack")
WEIGHT_SUFFIXES += (".bin", ".pt", ".pth")
# the head's weights: of a tied model no file holds them
HEAD = "lm_head.weight"


# --------------------------------------------------------------------------------------------------
# Writing


def save_checkpoint(model: GPT, directory: str | Path):
    """
    Write model.safetensors and config.json, each atomically. The tokenizer writes its own files
    beside them, before: config.json comes last, a directory without it holds no model. Raises
    CheckpointError for a model that is of no family.
    """
    directory = Path(directory)
    family = family_of(model.config)
    directory.mkdir(parents=True, exist_ok=True)
    save = partial(save_file, hub_weights(model, FAMILIES[family]), metadata={"format": "pt"})
    write_atomically(directory / "model.safetensors", save)
    saved = hub_config(model.config, family, model.wte.weight.dtype)
    write_json(directory / "config.json", saved)


def hub_weights(model: GPT, family: Family) -> dict[str, torch.Tensor]:
    """The weights under the names and in the layout of the family."""
    config = model.config
    ours = model.state_dict()
    if config.tied:
        del ours[HEAD]
    D = config.head_size
    parts = {"c_attn": [config.n_head * D, config.n_kv_head * D, config.n_kv_head * D]}
    parts["c_fc"] = [config.n_inner, config.n_inner]
    weights = {}
    for name, weight in ours.items():
        weight = changed(model, name, weight.cpu(), family, -family.norm_offset)
        theirs = hub_names(name, family)
        module = name.split(".")[-2]
        split = weight.split(parts[module]) if len(theirs) > 1 else [weight]
        for hub_name, part in zip(theirs, split, strict=True):
            prefix = "" if hub_name == HEAD else family.prefix
            weights[prefix + hub_name] = part.contiguous()
            is_embedding = name.startswith(("wte.", "wpe.", "lm_head."))
            if family is GPT2 and not config.bias and not is_embedding:
                # transformers' GPT-2 always has biases: zeros compute the same
                bias = prefix + hub_name.removesuffix("weight") + "bias"
                weights[bias] = part.new_zeros(part.shape[-1])
    return weights


def changed(model: GPT, name: str, weight: torch.Tensor, family: Family, offset: float):
    """
    A weight as the family keeps it, or back. GPT-2 keeps the matrices of its linear layers as [in,
    out], torch as [out, in]; Gemma the weights of norms less 1.
    """
    module = model.get_submodule(name.rsplit(".", 1)[0])
    is_layer = isinstance(module, torch.nn.Linear) and name != HEAD
    if is_layer and weight.ndim > 1 and family is GPT2:
        return weight.mT
    if isinstance(module, RMSNorm) and offset:
        return weight.float() + offset
    return weight


# --------------------------------------------------------------------------------------------------
# Reading


def serving_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """
    The dtype of that name, for `load_checkpoint`; "auto" is bf16 on a GPU, fp32 on a CPU. Raises
    ValueError for fp16 on a CPU.
    """
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu and name == "fp16":
        raise ValueError("--dtype fp16 is for GPUs: on a CPU choose fp32 or bf16")
    if name == "auto":
        name = "fp32" if on_cpu else "bf16"
    return DTYPES[name]


def load_config(directory: str | Path) -> GPTConfig:
    """
    Read config.json, and what generation_config.json adds to it: tokens that end a text. Raises
    CheckpointError where it is missing, broken or asks for what we do not compute.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(no_model(path))
    try:
        generation = read_json(path.with_name("generation_config.json"))
        return read_fields(read_json(path), generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{path} is not a model configuration ({error}): train again or restore the file"
        ) from error


def load_checkpoint(directory: str | Path, device="cpu", dtype: torch.dtype = torch.float32) -> GPT:
    """
    Build the model of a checkpoint directory, in evaluation mode; tensor by tensor, so that no
    second copy of all weights is in memory. Raises CheckpointError with what to change.
    """
    directory = Path(directory)
    config = load_config(directory)
    family = family_named(read_json(directory / "config.json"))
    saved = SavedWeights(directory)
    config.tied = config.tied and not saved.has_own_head(family)
    # First the sizes themselves: to build a model of a billion layers takes for ever, even without
    # weights.
    saved.check("wte.weight", (config.vocab_size, config.n_embd), family)
    saved.check(f"h.{config.n_layer - 1}.ln_1.weight", (config.n_embd,), family)
    with torch.device("meta"):
        model = GPT(config)
    wanted = model.state_dict()
    if config.tied:
        del wanted[HEAD]
    for name, weight in wanted.items():
        saved.check(name, tuple(changed(model, name, weight, family, 0).shape), family)
    saved.check_rest(wanted, family)
    weights = {}
    for name in wanted:
        parts = [saved.read(theirs) for theirs in hub_names(name, family)]
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        weight = changed(model, name, weight, family, family.norm_offset)
        is_norm = isinstance(model.get_submodule(name.rpartition(".")[0]), RMSNorm)
        weights[name] = weight.to(device, torch.float32 if is_norm else dtype).contiguous()
    if config.tied:
        weights[HEAD] = weights["wte.weight"]
    model.load_state_dict(weights, assign=True)
    if config.tied:
        model.lm_head.weight = model.wte.weight  # one parameter again
    return model.to(device).eval()


class SavedWeights:
    """
    The tensors in a directory's safetensors files, under the family's names without the prefix.
    Opened, not read: `read` reads one. Raises CheckpointError where a file is missing or damaged.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.files = {}  # name -> (open file, name there)
        for path in weight_files(directory):
            try:
                opened = safe_open(path, "pt")
                names = opened.keys()
            except FileNotFoundError:
                raise CheckpointError(no_model(path)) from None
            except Exception as error:  # safetensors raises its own types
                raise CheckpointError(
                    f"{path} cannot be read ({error}): train again or restore the file"
                ) from error
            for name in names:
                self.files[without_prefix(name)] = opened, name

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self.files:
            return None
        opened, there = self.files[name]
        return tuple(opened.get_slice(there).get_shape())

    def read(self, name: str) -> torch.Tensor:
        opened, there = self.files[name]
        return opened.get_tensor(there)

    def check(self, name: str, wanted: tuple[int, ...], family: Family):
        """Raises CheckpointError where our weight `name` is missing or has another shape."""
        theirs = hub_names(name, family)
        shapes = [self.shape(part) for part in theirs]
        found = shapes[0]
        if len(shapes) > 1 and None not in shapes:  # stacked
            found = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        if found != wanted:
            pairs = zip(theirs, shapes, strict=True)
            names = ", ".join(f"{part} is {shape}" for part, shape in pairs)
            raise CheckpointError(
                f"{self.directory}: the weights do not match config.json: {names}, wanted {wanted}"
            )

    def has_own_head(self, family: Family) -> bool:
        """Whether there is a head that is not the embedding: then the two are not tied."""
        [embedding] = hub_names("wte.weight", family)
        if HEAD not in self.files or embedding not in self.files:
            return False
        return not torch.equal(self.read(HEAD), self.read(embedding))

    def check_rest(self, wanted: dict, family: Family):
        """
        Raises CheckpointError for weights that the model does not have, unless it computes the same
        without them.
        """
        ours = {theirs for name in wanted for theirs in hub_names(name, family)}
        for name in self.files.keys() - ours - {HEAD}:
            # the hub's causal masks, and frequencies that are computed here
            is_known = name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
            # of a model saved without biases
            is_zero = name.endswith(".bias") and not self.read(name).any()
            if not (is_known or is_zero):
                raise CheckpointError(
                    f"{self.directory}: the weights do not match config.json: {name} is no part of "
                    "this model"
                )


def without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors or, where there is an index instead, the files that it names."""
    index = directory / "model.safetensors.index.json"
    whole = directory / "model.safetensors"
    if whole.is_file() or not index.is_file():
        return [whole]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is broken ({error}): restore the file") from error
    for name in names:
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory / name} is missing, {index.name} names it: download it, too"
            )
    return [directory / name for name in names]


def no_model(missing: Path) -> str:
    """The message for a directory that lacks a file which is read here: how it can be had."""
    folder = missing.parent
    names = sorted(path.name for path in folder.glob("*") if path.name != "train_state.pt")
    weights = [name for name in names if name.endswith(WEIGHT_SUFFIXES)]
    if not weights:
        return how_to_download(folder) or (
            f"no model in {folder}, {missing.name} is missing: run `python train.py --out "
            f"{folder}`, or name another directory"
        )
    if missing.name == "config.json":
        return f"{missing} is missing beside {weights[0]}: download it, too"
    return (
        f"{missing} is missing, the weights are in {', '.join(weights[:3])}: they are read from "
        "one safetensors file. Let transformers write it: GPT2LMHeadModel.from_pretrained(DIR)"
        ".save_pretrained(NEW, max_shard_size='100GB')"
    )
