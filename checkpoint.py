"""
Save and load checkpoints. A checkpoint is a directory in the layout of the Hugging Face Hub ("the
hub" below), with config.json, safetensors files and the tokenizer's files.

    save_checkpoint(model, "out/stdlib")
    model = load_checkpoint("smollm2", device="cuda", dtype=torch.bfloat16)

Models from elsewhere can be loaded if they belong to a supported family (families.py). Models made
by train.py can also be loaded in transformers and vLLM. Files that could run code (pickles) are
never read.
"""

import os
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copyfile

import torch
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from common import MALFORMED, missing_file, read_json, write_atomically, write_json
from families import (
    GPT2,
    CheckpointError,
    Family,
    family_named,
    hub_config,
    hub_names,
    read_fields,
    unknown,
    without_nesting,
)
from model import GPT, GPTConfig, RMSNorm
from tokenizer import read_config, token_text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Prefix of weight names. It is shorter if the model was saved without its head, and longer if the
# model is part of a larger one.
PREFIX = re.compile(r"((transformer|model|language_model)\.)*")

# weight dtypes that can be loaded
READABLE = ("F32", "F16", "BF16")
# the head's weights, which a tied model's files do not have
HEAD = "lm_head.weight"
# Files for the tokenizer, chat and sampling. Finetuning does not change these files.
COMPANIONS = [
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "additional_chat_templates/*.jinja",
]


# --------------------------------------------------------------------------------------------------
# Writing


def save_checkpoint(model: GPT, directory: str | Path):
    """
    Write model.safetensors and config.json, each atomically. Save the tokenizer before calling this
    function: config.json is written last, because a directory without it does not count as a model.
    If the model was loaded from a checkpoint, it keeps its config.json. Raises CheckpointError if a
    new model is neither a GPT-2, a Llama nor a Qwen 3.
    """
    directory = Path(directory)
    saved = model.config_json or hub_config(model.config)
    saved.pop("torch_dtype", None)  # older name for dtype
    saved["dtype"] = str(model.wte.weight.dtype).removeprefix("torch.")
    saved["tie_word_embeddings"] = model.config.tied  # loading may have changed this
    directory.mkdir(parents=True, exist_ok=True)
    weights = hub_weights(model, family_named(saved))
    save = partial(save_file, weights, metadata={"format": "pt"})
    write_atomically(directory / "model.safetensors", save)
    write_json(directory / "config.json", saved)


def hub_weights(model: GPT, family: Family) -> dict[str, torch.Tensor]:
    """Return the model's weights with the family's own names and layout."""
    family_prefix = "transformer." if family is GPT2 else "model."
    ours = model.state_dict()
    if model.config.tied:
        del ours[HEAD]
    weights = {}
    for name, weight in ours.items():
        if isinstance(model.get_submodule(name.rpartition(".")[0]), RMSNorm):
            weight = weight - family.norm_offset
        if name == "ln_f.weight":
            weight = weight * model.config.logit_scale
        for hub_name, part in hub_parts(model.config, name, weight.cpu(), family).items():
            prefix = "" if hub_name == HEAD else family_prefix
            weights[prefix + hub_name] = part.contiguous()
            is_embedding = name.startswith(("wte.", "wpe.", "lm_head."))
            if family is GPT2 and not model.config.bias and not is_embedding:
                # transformers' GPT-2 always has biases, so write zeros
                bias = prefix + hub_name.removesuffix("weight") + "bias"
                weights[bias] = part.new_zeros(part.shape[-1])
    return weights


def hub_parts(config: GPTConfig, name: str, weight: torch.Tensor, family: Family) -> dict:
    """
    Return our weight `name` in the family's own layout, as {hub name without prefix: view}. A
    stacked weight is split into several. GPT-2 stores the matrices in its blocks as [in, out],
    while torch stores them as [out, in].
    """
    if family is GPT2 and name.startswith("h.") and weight.ndim == 2:
        weight = weight.mT
    names = hub_names(name, family)
    parts = weight.chunk(len(names))  # one part, or two: gate and up
    if len(names) == 3:  # queries, keys, values
        rows = config.n_kv_head * config.head_size
        parts = weight.split([len(weight) - 2 * rows, rows, rows])
    return dict(zip(names, parts, strict=True))


def copy_companions(source: str | Path, directory: Path):
    for pattern in COMPANIONS:
        for path in Path(source).glob(pattern):
            copy = directory / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            write_atomically(copy, partial(copyfile, path))


# --------------------------------------------------------------------------------------------------
# Reading


def serving_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """
    Return the dtype with this name, to pass to `load_checkpoint`. "auto" means bf16 on a GPU and
    fp32 on a CPU. Raises ValueError for fp16 on a CPU.
    """
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu and name == "fp16":
        raise ValueError("--dtype fp16 is for GPUs: on a CPU choose fp32 or bf16")
    if name == "auto":
        name = "fp32" if on_cpu else "bf16"
    return DTYPES[name]


def load_config(directory: str | Path) -> GPTConfig:
    """
    Read config.json, as well as the end-of-text tokens in generation_config.json and the
    tokenizer's files (as vLLM does). Raises CheckpointError if config.json is missing or broken, or
    describes a model that is not supported.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(missing_file(path))
    try:
        generation = read_json(path.with_name("generation_config.json"))
        return read_fields(read_json(path), generation, tokenizers_end(path.parent))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except MALFORMED as error:
        raise CheckpointError(
            f"{path} is not a model configuration, or generation_config.json beside it is broken "
            f"({error}): restore or download the file"
        ) from error


def tokenizers_end(directory: Path) -> dict:
    """
    Return the end-of-text token in tokenizer_config.json, as {"eos_token_id": its ids}. If a model
    was finetuned for chat, this may be the only file that names the token.
    """
    try:
        config = read_config(directory)
        name = token_text(config.get("eos_token"))
        tokens = config.get("added_tokens_decoder")
        if name and not tokens:  # transformers 5 only writes them to tokenizer.json
            added = read_json(directory / "tokenizer.json").get("added_tokens") or []
            tokens = {token["id"]: token for token in added}
        ids = [int(i) for i, token in (tokens or {}).items() if token["content"] == name]
    except MALFORMED:
        return {}  # loading the tokenizer will report that it is broken
    return {"eos_token_id": ids}


def load_checkpoint(
    directory: str | Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    convert: Callable | None = None,
) -> GPT:
    """
    Load the model in a checkpoint directory, and put it in evaluation mode. Files are memory-mapped
    and weights are copied one at a time, so memory never holds a second copy of the whole model.
    Once the model is loaded, the files may change. Raises CheckpointError with a message that says
    what to do.

    `convert` is called with the model before its weights are loaded. It may raise an error, or
    return a model with different layers that pack each weight as it is read (ops/packed.py).
    """
    directory = Path(directory)
    config = load_config(directory)
    config_json = read_json(directory / "config.json")
    family = family_named(without_nesting(config_json))
    weights = open_weights(directory)
    config.tied = config.tied and not has_own_head(weights, family)
    model = empty_model(config, dtype)
    model.config_json = config_json
    ours = dict(model.named_parameters())  # without the head if it is tied
    shapes = {}
    for name, weight in ours.items():
        for hub_name, part in hub_parts(config, name, weight, family).items():
            shapes[hub_name] = tuple(part.shape)
    check_weights(weights, shapes, directory)
    if convert:
        model = convert(model)
    # Use a single buffer for all weights that layers pack. A separate buffer for each weight would
    # leave gaps that the allocator neither reuses nor returns.
    largest = max(weight.numel() for weight in ours.values())
    buffer = torch.empty(largest, dtype=dtype)
    # tqdm's default lock is shared between processes, so Python would warn of a leak if the engine
    # were killed
    tqdm.set_lock(threading.RLock())
    for name in tqdm(ours, "loading", unit=" weights", leave=False, delay=2, disable=None):
        layer, _, kind = name.rpartition(".")
        module = model.get_submodule(layer)
        like = ours[name]
        if kind == "weight" and hasattr(module, "fill"):
            weight = buffer[: like.numel()].view(like.shape)
        else:
            weight = torch.empty(like.shape, dtype=like.dtype, device=device)
        for hub_name, part in hub_parts(config, name, weight, family).items():
            part.copy_(weights[hub_name][...])
        if isinstance(module, RMSNorm):
            weight.add_(family.norm_offset)
        if name == "ln_f.weight":  # to scale the logits; exact, as this norm is fp32
            weight.div_(config.logit_scale)
        set_weight(module, kind, weight)
    if model.lm_head.weight.is_meta:  # a tied head
        set_weight(model.lm_head, "weight", model.wte.weight)
    return model.to(device).eval()


def memory_of(device: torch.device) -> tuple[float, float]:
    """Return a device's memory in bytes: (free, total). Cached files count as free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as f:
            lines = dict(line.split(":") for line in f)
        return 1024 * int(lines["MemAvailable"].split()[0]), total
    except OSError:  # macOS has no such file
        return total, total


def set_weight(module: nn.Module, kind: str, weight: torch.Tensor):
    """Assign a weight to a module without copying it, or let the module pack it (ops/packed.py)."""
    if kind == "weight" and hasattr(module, "fill"):
        module.fill(weight.detach())
    else:
        module.load_state_dict({kind: weight}, strict=False, assign=True)


class Uninitialized(TorchFunctionMode):
    """
    Context in which torch.nn.init does nothing. Weights on the meta device do not have values, but
    torch would still import its compiler to initialise them, and so delay a server's start by 1.2
    seconds.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def empty_model(config: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """Return a model whose weights have shapes but do not have values yet."""
    with torch.device("meta"), Uninitialized():
        model = GPT(config)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.to(dtype)
    return model


def open_weights(directory: Path) -> dict:
    """
    Open the tensors in a directory's safetensors files. Return {hub name without prefix: tensor}.
    The tensors are memory-mapped, so reading one with [...] loads it. Raises CheckpointError if a
    file is missing or damaged.
    """
    weights = {}
    for path in weight_files(directory):
        if not path.is_file():  # also rejects a pipe, which would block
            raise CheckpointError(missing_file(path))
        try:
            opened = safe_open(path, "pt")
            names = opened.keys()
        except Exception as error:  # safetensors raises its own types
            raise CheckpointError(
                f"{path} cannot be read ({error}): restore or download the file"
            ) from error
        for name in names:
            short = PREFIX.sub("", name, 1)
            if short in weights:
                raise CheckpointError(f"{path}: {name} exists twice: restore the files")
            weights[short] = opened.get_slice(name)
    return weights


def check_weights(weights: dict, shapes: dict[str, tuple[int, ...]], directory: Path):
    """
    Raise CheckpointError if a tensor is missing or has the wrong shape or an unsupported dtype, or
    if there is an extra weight that could change the computation.
    """

    def mismatch(what: str) -> CheckpointError:
        return CheckpointError(
            f"the weights in {directory}/model*.safetensors do not match config.json: {what}: "
            "restore or download all of them"
        )

    for name, shape in shapes.items():
        if name not in weights:
            raise mismatch(f"{name} is missing, wanted {shape}")
        dtype = weights[name].get_dtype()
        if dtype not in READABLE:
            raise unknown(f"the dtype of {name}", dtype, ", ".join(READABLE))
        saved_shape = tuple(weights[name].get_shape())
        if saved_shape != shape:
            raise mismatch(f"{name} is {saved_shape}, wanted {shape}")
    for name in weights.keys() - shapes.keys() - {HEAD}:
        # causal masks, and frequencies that we compute ourselves
        is_known = name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
        # models without biases may be saved with zeros
        is_zero = name.endswith(".bias") and not weights[name][...].any()
        if not (is_known or is_zero):
            raise mismatch(f"{name} is not part of this model")


def has_own_head(weights: dict, family: Family) -> bool:
    """Return whether the head's weights differ from the embedding's, and so are not tied."""
    [embedding] = hub_names("wte.weight", family)
    if HEAD not in weights or embedding not in weights:
        return False
    return not torch.equal(weights[HEAD][...].float(), weights[embedding][...].float())


def weight_files(directory: Path) -> list[Path]:
    """Return the path to model.safetensors or, if there is only an index, to the files it names."""
    index = directory / "model.safetensors.index.json"
    whole = directory / "model.safetensors"
    if whole.is_file() or not index.is_file():
        return [whole]
    try:
        names = set(read_json(index)["weight_map"].values())
        return [directory / Path(name).name for name in sorted(names)]
    except MALFORMED as error:
        raise CheckpointError(f"{index} is broken ({error}): restore the file") from error
