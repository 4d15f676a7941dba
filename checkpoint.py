"""
A checkpoint is a directory in the Hugging Face layout: config.json and model.safetensors, with the
tokenizer's files.

    save_checkpoint(model, "out/stdlib")
    model = load_checkpoint("out/stdlib", device="cuda", dtype=torch.bfloat16)

`GPT2LMHeadModel.from_pretrained` opens it, and what it saves opens here. Nothing is ever unpickled.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model import GPT, GPTConfig
from tokenizer import write_atomically, write_json

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
# What transformers writes for a GPT-2 of any vocabulary when nobody names an end of text.
DEFAULT_EOS = 50256
# Of a directory from elsewhere: what holds weights, but not those that are read here.
FOREIGN_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
)


def is_transposed(name: str) -> bool:
    """GPT-2 keeps the matrices of its linear layers as [in, out], torch as [out, in]."""
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def save_checkpoint(model: GPT, directory: str | Path):
    """
    Write model.safetensors and config.json, each atomically. The tokenizer writes its own files
    beside them, before: config.json comes last, a directory without it holds no model.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {CONFIG_NAMES.get(k, k): v for k, v in vars(model.config).items()}
    config |= FIXED_OPTIONS | {
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": model.config.eos_token_id,
    }
    if more := config.pop("more_eos_token_ids"):
        config["eos_token_id"] = [model.config.eos_token_id, *more]
    config |= {"embd_pdrop": model.config.dropout, "attn_pdrop": model.config.dropout}
    config["dtype"] = str(model.wte.weight.dtype).removeprefix("torch.")
    tensors = {name: w.detach().cpu() for name, w in model.state_dict().items()}
    del tensors["lm_head.weight"]  # tied to wte.weight
    if not model.config.bias:  # transformers' GPT-2 always has biases: zeros compute the same
        biased = {n: w for n, w in tensors.items() if n not in ("wte.weight", "wpe.weight")}
        tensors |= {
            n.removesuffix("weight") + "bias": w.new_zeros(w.shape[0]) for n, w in biased.items()
        }
    tensors = {
        f"transformer.{n}": (w.t() if is_transposed(n) else w).contiguous()
        for n, w in tensors.items()
    }
    write_atomically(
        directory / "model.safetensors", lambda path: save_file(tensors, path, {"format": "pt"})
    )
    write_json(directory / "config.json", config)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def serving_dtype(name: str, device: str | torch.device) -> torch.dtype:
    """
    The dtype of that name, for `load_checkpoint`; "auto" is bf16 on a GPU, fp32 on a CPU. Raises
    ValueError.
    """
    cpu = torch.device(device).type == "cpu"
    if cpu and name == "fp16":
        raise ValueError("--dtype fp16 is for GPUs: on a CPU choose fp32 or bf16")
    return DTYPES[("fp32" if cpu else "bf16") if name == "auto" else name]


class CheckpointError(ValueError):
    """A directory that holds no model we can load; the message says what to run."""


def load_config(directory: str | Path) -> GPTConfig:
    """
    Read config.json, and what generation_config.json adds to it: tokens that end a text. Raises
    CheckpointError where it is missing, broken or asks for what we do not compute.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(no_model(path))
    try:
        saved = json.loads(path.read_text())
        check_options(path, saved)
        ours = {
            field: saved.get(CONFIG_NAMES.get(field, field))
            for field in GPTConfig.__dataclass_fields__
        }
        ours["activation"] = ACTIVATION_NAMES.get(ours["activation"], ours["activation"])
        eos = read_eos(path, saved)
        ours["eos_token_id"] = eos[0] if eos else None
        ours["more_eos_token_ids"] = tuple(eos[1:])
        return GPTConfig(**{field: value for field, value in ours.items() if value is not None})
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a model configuration ({error}): train again or restore the file"
        ) from error


def no_model(missing: Path) -> str:
    """What to say of a directory that lacks a file which is read here: how it can be had."""
    folder = missing.parent
    found = sorted(
        {path.name for pattern in FOREIGN_WEIGHTS for path in folder.glob(pattern)}
        - {"train_state.pt"}
    )
    if not found:
        mend = f"run `python train.py --out {folder}`, or name another directory"
        return f"no model in {folder}, {missing.name} is missing: {mend}"
    if missing.name == "config.json":
        return f"{missing} is missing beside {found[0]}: download it, too"
    return (
        f"{missing} is missing, the weights are in {', '.join(found[:3])}: they are read from one safetensors file. "
        "Let transformers write it: GPT2LMHeadModel.from_pretrained(DIR).save_pretrained(NEW, max_shard_size='100GB')"
    )


def check_options(path: Path, saved: dict):
    """Raises CheckpointError for options that change the computation."""
    for name, wanted in FIXED_OPTIONS.items():
        value = saved.get(name, wanted)
        same = value == wanted or (value is None and wanted is False)
        if not same and not (name == "n_inner" and value == 4 * saved["n_embd"]):
            mend = "vLLM serves such a directory"
            raise CheckpointError(
                f"{path}: {name} is {value!r}, this code computes only {wanted!r}: {mend}"
            )


def read_eos(path: Path, saved: dict) -> list[int]:
    """The tokens that end a text, config.json's first; each file has one, a list, or none."""
    other_path = path.with_name("generation_config.json")
    other = json.loads(other_path.read_text()) if other_path.is_file() else {}
    ids = []
    for value in (saved.get("eos_token_id"), other.get("eos_token_id")):
        if value is not None:
            ids += value if isinstance(value, list) else [value]
    ids = list(dict.fromkeys(ids))
    if DEFAULT_EOS in ids and saved.get("vocab_size", DEFAULT_EOS + 1) <= DEFAULT_EOS:
        ids.remove(DEFAULT_EOS)
    return ids


def load_checkpoint(directory: str | Path, device="cpu", dtype: torch.dtype = torch.float32) -> GPT:
    """
    Build the model of a checkpoint directory, in evaluation mode. Raises CheckpointError with what
    to change.
    """
    config, path = load_config(directory), Path(directory) / "model.safetensors"
    try:
        saved = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(no_model(path)) from None
    except Exception as error:  # safetensors raises its own types for truncated or foreign files
        raise CheckpointError(
            f"{path} cannot be read ({error}): train again or restore the file"
        ) from error
    # the hub's GPT-2 has no prefix
    saved = {n.removeprefix("transformer."): w for n, w in saved.items()}
    saved = {n: w.t() if is_transposed(n) else w for n, w in saved.items()}
    found = {n: tuple(w.shape) for n, w in saved.items()}
    V, C = config.vocab_size, config.n_embd
    # first the sizes themselves: a model of a billion layers takes for ever to build, even without
    # its weights
    check_shapes(path, found, {"wte.weight": (V, C), "wpe.weight": (config.context_length, C)})
    check_shapes(path, found, {f"h.{config.n_layer - 1}.ln_1.weight": (C,)})
    with torch.device("meta"):
        model = GPT(config)
    wanted = {n: tuple(w.shape) for n, w in model.state_dict().items() if n != "lm_head.weight"}
    check_shapes(path, found, wanted)
    check_rest(path, saved, wanted)
    weights = {n: saved[n].to(device, dtype).contiguous() for n in wanted}
    model.load_state_dict(weights | {"lm_head.weight": weights["wte.weight"]}, assign=True)
    model.lm_head.weight = model.wte.weight  # one parameter again
    return model.eval()


def check_rest(path: Path, saved: dict[str, torch.Tensor], wanted: dict):
    """
    Raises CheckpointError for weights that the model does not have, unless it computes the same
    without them.
    """
    for name, weight in saved.items():
        if name in wanted or name.endswith(
            (".attn.bias", ".attn.masked_bias")
        ):  # the hub's causal masks
            continue
        if name == "lm_head.weight":
            if not torch.equal(weight, saved["wte.weight"]):
                what = "the head, lm_head.weight, is not the embedding"
                raise CheckpointError(
                    f"{path}: {what}: untied heads are not computed here, vLLM serves such a directory"
                )
        elif (
            not name.endswith(".bias") or weight.any()
        ):  # a model without biases is saved with zeros
            raise CheckpointError(
                f"{path} does not match config.json: {name} is no part of this model"
            )


def check_shapes(path: Path, found: dict[str, tuple], wanted: dict[str, tuple]):
    for name, shape in wanted.items():
        if found.get(name) != shape:
            raise CheckpointError(
                f"{path} does not match config.json: {name} is {found.get(name)}, wanted {shape}"
            )
