"""
A checkpoint: a directory in the layout of the Hugging Face Hub ("the hub" below), config.json and
safetensors files beside the tokenizer's files.

    save_checkpoint(model, "out/stdlib")
    model = load_checkpoint("smollm2", device="cuda", dtype=torch.bfloat16)

Models that others trained open here, if they are of one of the families (families.py). A model that
train.py made opens in transformers and vLLM. Nothing that could run code is unpickled.
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
# of the names in files: fewer where a model was saved without its head, more where it is part of a
# larger one
PREFIX = re.compile(r"((transformer|model|language_model)\.)*")

# the dtypes of weights in files
READABLE = ("F32", "F16", "BF16")
# the head's weights: of a tied model no file holds them
HEAD = "lm_head.weight"
# files of the tokenizer, of chat and of sampling: training a model further does not change them
COMPANIONS = ["tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"]
COMPANIONS += ["vocab.json", "merges.txt", "chat_template*", "generation_config.json"]
COMPANIONS += ["additional_chat_templates/*.jinja"]


# --------------------------------------------------------------------------------------------------
# Writing


def save_checkpoint(model: GPT, directory: str | Path):
    """
    Write model.safetensors and config.json, each atomically. The tokenizer writes its own files
    beside them, before: config.json comes last, a directory without it holds no model. A model that
    `load_checkpoint` made keeps its own config.json. Raises CheckpointError for another one that is
    neither a GPT-2 nor a Llama.
    """
    directory = Path(directory)
    saved = model.config_json or hub_config(model.config)
    saved.pop("torch_dtype", None)  # an older name of dtype
    saved["dtype"] = str(model.wte.weight.dtype).removeprefix("torch.")
    saved["tie_word_embeddings"] = model.config.tied  # which the file's head decides
    directory.mkdir(parents=True, exist_ok=True)
    weights = hub_weights(model, family_named(saved))
    save = partial(save_file, weights, metadata={"format": "pt"})
    write_atomically(directory / "model.safetensors", save)
    write_json(directory / "config.json", saved)


def hub_weights(model: GPT, family: Family) -> dict[str, torch.Tensor]:
    """The weights under the names and in the layout of the family."""
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
                # transformers' GPT-2 always has biases: zeros compute the same
                bias = prefix + hub_name.removesuffix("weight") + "bias"
                weights[bias] = part.new_zeros(part.shape[-1])
    return weights


def hub_parts(config: GPTConfig, name: str, weight: torch.Tensor, family: Family) -> dict:
    """
    Views of our weight `name` as the family keeps it, by their names there without the prefix: of a
    stacked weight its parts; GPT-2 keeps the matrices of its blocks as [in, out], torch as
    [out, in].
    """
    if family is GPT2 and name.startswith("h.") and weight.ndim == 2:
        weight = weight.mT
    names = hub_names(name, family)
    parts = weight.chunk(len(names))  # gate and up, or all of it
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
    Read config.json, and what generation_config.json and the tokenizer add to it: tokens that end a
    text, as in vLLM. Raises CheckpointError where it is missing, broken or asks for what we do not
    compute.
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
    """The end of text that tokenizer_config.json names; of a chat's finetune it may alone do so."""
    try:
        config = read_config(directory)
        name = token_text(config.get("eos_token"))
        tokens = config.get("added_tokens_decoder")
        if name and not tokens:  # transformers 5 writes them to tokenizer.json alone
            added = read_json(directory / "tokenizer.json").get("added_tokens") or []
            tokens = {token["id"]: token for token in added}
        ids = [int(i) for i, token in (tokens or {}).items() if token["content"] == name]
    except MALFORMED:
        return {}  # a broken tokenizer is reported when it is loaded
    return {"eos_token_id": ids}


def load_checkpoint(
    directory: str | Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    convert: Callable | None = None,
) -> GPT:
    """
    Build the model of a checkpoint directory, in evaluation mode. The files are mapped and their
    weights copied one by one: no second copy of them all is ever in memory, and once they are
    loaded the files may be changed. Raises CheckpointError with what to change.
    Before they are loaded, convert(model without weights) may refuse them, or return another model
    whose layers pack the same weights, each as it is read (ops/packed.py).
    """
    directory = Path(directory)
    config = load_config(directory)
    config_json = read_json(directory / "config.json")
    family = family_named(without_nesting(config_json))
    weights = open_weights(directory)
    config.tied = config.tied and not has_own_head(weights, family)
    model = empty_model(config, dtype)
    model.config_json = config_json
    ours = dict(model.named_parameters())  # of a tied model without the head's
    shapes = {}
    for name, weight in ours.items():
        for hub_name, part in hub_parts(config, name, weight, family).items():
            shapes[hub_name] = tuple(part.shape)
    check_weights(weights, shapes, directory)
    if convert:
        model = convert(model)
    # One buffer for all matrices that layers pack: one for each would leave gaps, which the
    # allocator neither fills nor gives back.
    largest = max(weight.numel() for weight in ours.values())
    buffer = torch.empty(largest, dtype=dtype)
    # by default a lock for processes: Python warns that it leaked when the engine's is killed
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
        if name == "ln_f.weight":  # before the head, in fp32: exact for any dtype
            weight.div_(config.logit_scale)
        give(module, kind, weight)
    if model.lm_head.weight.is_meta:  # tied, and the same weights
        give(model.lm_head, "weight", model.wte.weight)
    return model.to(device).eval()


def memory_of(device: torch.device) -> tuple[float, float]:
    """How many bytes are free, and how many the device has. Files that are cached are free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as f:
            lines = dict(line.split(":") for line in f)
        return 1024 * int(lines["MemAvailable"].split()[0]), total
    except OSError:  # macOS does not count the free pages
        return total, total


def give(module: nn.Module, kind: str, weight: torch.Tensor):
    """The tensor itself becomes the module's, unless it packs its weights (ops/packed.py)."""
    if kind == "weight" and hasattr(module, "fill"):
        module.fill(weight.detach())
    else:
        module.load_state_dict({kind: weight}, strict=False, assign=True)


class Uninitialized(TorchFunctionMode):
    """
    Within it torch.nn.init leaves weights as they are. Those on the meta device have no values, but
    to draw some torch would import its compiler: 1.2 s of a server's start.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def empty_model(config: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    """Its weights have shapes, and no values yet."""
    with torch.device("meta"), Uninitialized():
        model = GPT(config)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.to(dtype)
    return model


def open_weights(directory: Path) -> dict:
    """
    The tensors in a directory's safetensors files, under the family's names without the prefix:
    each is mapped, so in memory only where it is looked at, by [...]. Raises CheckpointError where
    a file is missing or damaged.
    """
    weights = {}
    for path in weight_files(directory):
        if not path.is_file():  # nor a pipe, whose writer would be waited for
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
                raise CheckpointError(f"{path}: {name} is there twice: restore the files")
            weights[short] = opened.get_slice(name)
    return weights


def check_weights(weights: dict, shapes: dict[str, tuple[int, ...]], directory: Path):
    """
    Raises CheckpointError where a tensor is missing, has another shape than it has in `shapes`,
    or numbers that are not read here; and for weights that the model does not have, unless it
    computes the same without them.
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
        # the hub's causal masks, and frequencies that are computed here
        is_known = name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
        # of a model saved without biases
        is_zero = name.endswith(".bias") and not weights[name][...].any()
        if not (is_known or is_zero):
            raise mismatch(f"{name} is no part of this model")


def has_own_head(weights: dict, family: Family) -> bool:
    """Whether there is a head that is not the embedding: then the two are not tied."""
    [embedding] = hub_names("wte.weight", family)
    if HEAD not in weights or embedding not in weights:
        return False
    return not torch.equal(weights[HEAD][...].float(), weights[embedding][...].float())


def weight_files(directory: Path) -> list[Path]:
    """model.safetensors or, where there is an index instead, the files beside it that it names."""
    index = directory / "model.safetensors.index.json"
    whole = directory / "model.safetensors"
    if whole.is_file() or not index.is_file():
        return [whole]
    try:
        names = set(read_json(index)["weight_map"].values())
        return [directory / Path(name).name for name in sorted(names)]
    except MALFORMED as error:
        raise CheckpointError(f"{index} is broken ({error}): restore the file") from error
