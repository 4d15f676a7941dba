"""
A checkpoint: a directory in the layout of the Hugging Face Hub ("the hub" below), config.json and
model.safetensors beside the tokenizer's files.

    save_checkpoint(model, "out/stdlib")
    model = load_checkpoint("out/stdlib", device="cuda", dtype=torch.bfloat16)

`GPT2LMHeadModel.from_pretrained` opens what is saved here, and what it saves opens here. Nothing is
unpickled.
"""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from files import how_to_download, read_json, write_atomically, write_json
from model import GPT, GPTConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# our name -> GPT-2's name in config.json
CONFIG_NAMES = {
    "context_length": "n_positions",
    "activation": "activation_function",
    "dropout": "resid_pdrop",
}
# GPT-2 options that would change the computation, with the only value that this code computes
FIXED_OPTIONS = {
    "model_type": "gpt2",
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
# transformers' other names for the tanh approximation
ACTIVATION_NAMES = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}
# what transformers writes as the end of text where none was named, whatever the vocabulary
DEFAULT_EOS = 50256
# files that hold weights, in directories from elsewhere
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".gguf", ".h5", ".msgpack")
WEIGHT_SUFFIXES += (".bin", ".pt", ".pth")
# the head's weights are those of wte: no file holds them
TIED = "lm_head.weight"


class CheckpointError(ValueError):
    """A directory that holds no model we can load; the message says what to run."""


def is_transposed(name: str) -> bool:
    """GPT-2 keeps the matrices of its linear layers as [in, out], torch as [out, in]."""
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


# --------------------------------------------------------------------------------------------------
# Writing


def save_checkpoint(model: GPT, directory: str | Path):
    """
    Write model.safetensors and config.json, each atomically. The tokenizer writes its own files
    beside them, before: config.json comes last, a directory without it holds no model.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save = partial(save_file, hub_weights(model), metadata={"format": "pt"})
    write_atomically(directory / "model.safetensors", save)
    write_json(directory / "config.json", hub_config(model.config, model.wte.weight.dtype))


def hub_weights(model: GPT) -> dict[str, torch.Tensor]:
    """The weights under the names and in the layout of transformers' GPT-2."""
    weights = {}
    ours = model.state_dict()
    del ours[TIED]
    for name, weight in ours.items():
        weight = weight.cpu()
        if is_transposed(name):
            weight = weight.t()
        weights[f"transformer.{name}"] = weight.contiguous()
        is_embedding = name.startswith(("wte.", "wpe."))
        if not model.config.bias and not is_embedding:
            # transformers' GPT-2 always has biases: zeros compute the same
            bias = name.removesuffix("weight") + "bias"
            weights[f"transformer.{bias}"] = weight.new_zeros(weight.shape[-1])
    return weights


def hub_config(config: GPTConfig, dtype: torch.dtype) -> dict:
    """What config.json says."""
    saved = {CONFIG_NAMES.get(name, name): value for name, value in vars(config).items()}
    del saved["more_eos_token_ids"]
    if config.more_eos_token_ids:
        saved["eos_token_id"] = list(config.eos_token_ids)
    saved |= FIXED_OPTIONS
    saved["architectures"] = ["GPT2LMHeadModel"]
    saved["bos_token_id"] = config.eos_token_id
    saved["embd_pdrop"] = config.dropout
    saved["attn_pdrop"] = config.dropout
    saved["dtype"] = str(dtype).removeprefix("torch.")
    return saved


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


def load_checkpoint(directory: str | Path, device="cpu", dtype: torch.dtype = torch.float32) -> GPT:
    """
    Build the model of a checkpoint directory, in evaluation mode. Raises CheckpointError with what
    to change.
    """
    config = load_config(directory)
    path = Path(directory) / "model.safetensors"
    saved = read_weights(path)
    found = shapes(saved)
    # First the sizes themselves: to build a model of a billion layers takes for ever, even without
    # weights.
    C = config.n_embd
    sizes = {"wte.weight": (config.vocab_size, C), "wpe.weight": (config.context_length, C)}
    sizes[f"h.{config.n_layer - 1}.ln_1.weight"] = (C,)
    check_shapes(path, found, sizes)
    with torch.device("meta"):
        model = GPT(config)
    wanted = shapes(model.state_dict())
    del wanted[TIED]
    check_shapes(path, found, wanted)
    check_rest(path, saved, wanted)
    weights = {name: saved[name].to(device, dtype).contiguous() for name in wanted}
    weights[TIED] = weights["wte.weight"]
    model.load_state_dict(weights, assign=True)
    model.lm_head.weight = model.wte.weight  # one parameter again
    return model.eval()


def load_config(directory: str | Path) -> GPTConfig:
    """
    Read config.json, and what generation_config.json adds to it: tokens that end a text. Raises
    CheckpointError where it is missing, broken or asks for what we do not compute.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(no_model(path))
    try:
        saved = read_json(path)
        check_options(path, saved)
        ours = {}
        for field in GPTConfig.__dataclass_fields__:
            value = saved.get(CONFIG_NAMES.get(field, field))
            if value is not None:
                ours[field] = value
        if ours.get("activation") in ACTIVATION_NAMES:
            ours["activation"] = ACTIVATION_NAMES[ours["activation"]]
        first, *more = read_eos(path, saved) or [None]
        return GPTConfig(**ours | {"eos_token_id": first, "more_eos_token_ids": tuple(more)})
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a model configuration ({error}): train again or restore the file"
        ) from error


def check_options(path: Path, saved: dict):
    """Raises CheckpointError for options that change the computation."""
    for name, wanted in FIXED_OPTIONS.items():
        value = saved.get(name, wanted)
        if value == wanted or (value is None and wanted is False):
            continue
        if name == "n_inner" and value == 4 * saved["n_embd"]:
            continue
        raise CheckpointError(
            f"{path}: {name} is {value!r}, this code computes only {wanted!r}: vLLM serves such a "
            "directory"
        )


def read_eos(path: Path, saved: dict) -> list[int]:
    """The tokens that end a text, config.json's first; each file has one, a list, or none."""
    ids = []
    for config in (saved, read_json(path.with_name("generation_config.json"))):
        value = config.get("eos_token_id")
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    ids = list(dict.fromkeys(ids))
    if DEFAULT_EOS in ids and saved.get("vocab_size", DEFAULT_EOS + 1) <= DEFAULT_EOS:
        ids.remove(DEFAULT_EOS)
    return ids


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """
    The tensors of a file, under our names and in our layout. Raises CheckpointError where it is
    missing or damaged.
    """
    try:
        saved = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(no_model(path)) from None
    except Exception as error:  # safetensors raises its own types for truncated or foreign files
        raise CheckpointError(
            f"{path} cannot be read ({error}): train again or restore the file"
        ) from error
    weights = {}
    for name, weight in saved.items():
        name = name.removeprefix("transformer.")  # which the hub's own GPT-2 does not have
        weights[name] = weight.mT if is_transposed(name) and weight.ndim > 1 else weight
    return weights


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


def shapes(weights: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def check_shapes(path: Path, found: dict[str, tuple], wanted: dict[str, tuple]):
    """Raises CheckpointError where a tensor is missing or has another shape."""
    for name, shape in wanted.items():
        if found.get(name) != shape:
            raise CheckpointError(
                f"{path} does not match config.json: {name} is {found.get(name)}, wanted {shape}"
            )


def check_rest(path: Path, saved: dict[str, torch.Tensor], wanted: dict):
    """
    Raises CheckpointError for weights that the model does not have, unless it computes the same
    without them.
    """
    for name, weight in saved.items():
        is_mask = name.endswith((".attn.bias", ".attn.masked_bias"))  # the hub's causal masks
        is_zero = name.endswith(".bias") and not weight.any()  # of a model saved without biases
        if name in wanted or is_mask or is_zero:
            continue
        if name != TIED:
            raise CheckpointError(
                f"{path} does not match config.json: {name} is no part of this model"
            )
        if not torch.equal(weight, saved["wte.weight"]):
            raise CheckpointError(
                f"{path}: the head, {TIED}, is not the embedding: untied heads are not computed "
                "here, vLLM serves such a directory"
            )
