"""
The sizes of an engine: fill in what `Settings` leaves open, based on the model and on the device's
memory.
"""

import platform
from contextlib import contextmanager
from dataclasses import replace

import torch

from checkpoint import memory_of
from common import plural
from engine.device import kv_dtype
from model import GPT, GPTConfig
from ops.choice import choose_ops
from params import CPU_SEQS, CPU_TOKENS, GPU_SEQS, GPU_TOKENS, Settings

# The share of the free memory that the pool takes by default. The rest is for CUDA graphs on a GPU,
# and for other programs on a CPU.
POOL_SHARE = {"cuda": 0.9, "cpu": 0.25}
SHORT_TEXT = 256  # tokens; a pool too small for one such text is useless


def with_step_size(settings: Settings, on_gpu: bool) -> Settings:
    """
    Fill in max_num_seqs and token_budget. Raises ValueError if the token budget is smaller than the
    number of requests that may decode in a step.
    """
    max_num_seqs = settings.max_num_seqs or (GPU_SEQS if on_gpu else CPU_SEQS)
    tokens = GPU_TOKENS if on_gpu else CPU_TOKENS
    token_budget = settings.token_budget or max(tokens, max_num_seqs)
    if token_budget < max_num_seqs:
        raise ValueError(
            f"token_budget is {token_budget}, wanted at least max_num_seqs, {max_num_seqs}, so "
            "that every running request can decode in every step: raise --token-budget or lower "
            "--max-num-seqs"
        )
    return replace(settings, max_num_seqs=max_num_seqs, token_budget=token_budget)


def with_pool_size(settings: Settings, model: GPT) -> Settings:
    """
    Fill in num_blocks and max_model_len. By default, there are enough blocks for max_num_seqs texts
    of full length (on a CPU, for three quarters of them), as far as free memory allows. Raises
    ValueError if the device cannot hold the pool, or if the pool cannot hold a text of
    max_model_len tokens.
    """
    S = settings.block_size
    context_length = model.config.context_length
    num_blocks = settings.num_blocks
    device = model.wte.weight.device
    free, total = memory_of(device)
    size = bytes_per_block(model, S)
    if num_blocks is None:
        text = -(-context_length // S)
        useful = settings.max_num_seqs * text
        if device.type == "cpu":
            # Few texts reach full length. Also, the pool of a small model is not limited by memory.
            # If it had room for all texts, it would never overflow, and readers would never see a
            # preemption.
            useful = max(text, useful * 3 // 4)
        possible = int(POOL_SHARE[device.type] * free // size)
        num_blocks = max(1, min(useful, possible))
    needed = num_blocks * size
    # a larger allocation may succeed, but the process is killed when it uses the memory
    if needed > total:
        raise ValueError(
            f"a KV pool of {plural(num_blocks, 'block')} of {S} tokens takes "
            f"{needed / 2**30:,.1f} GiB, but {device} has {total / 2**30:,.1f}: lower --kv-blocks "
            "or --block-size"
        )
    longest = min(context_length, num_blocks * S)
    max_model_len = settings.max_model_len or longest
    if max_model_len > longest:
        change = "lower --max-model-len"
        if longest < context_length:
            change += " or raise --kv-blocks"
        raise ValueError(
            f"max_model_len is {max_model_len}, wanted 1 to {longest} (context length "
            f"{context_length}, KV pool of {plural(num_blocks, 'block')} of {S}): {change}"
        )
    return replace(settings, num_blocks=num_blocks, max_model_len=max_model_len)


def bytes_per_block(model: GPT, block_size: int) -> int:
    """Return how many bytes the K and V of a block take, over all layers."""
    return numbers_per_block(model.config, block_size) * kv_dtype(model).itemsize


def packed_if_it_fits(settings: Settings, device: str, model: GPT) -> GPT:
    """
    Return the model with the layers that its engine will use. The model has no weights yet (meta
    device). Raises ValueError if the device does not have enough memory for the weights and for a
    KV pool with room for one short text. If layers are packed, their weights are converted one
    matrix at a time, so the largest matrix counts twice.
    """
    device = torch.device(device)
    config = model.config
    dtype = model.wte.weight.dtype
    served = torch.int8 if settings.quantize == "int8" else dtype
    ops, _ = choose_ops(settings.attention, device, served, settings.deterministic)
    packed = ops.pack_weights(model, settings.quantize)
    weights = sum(weight.nbytes for weight in packed.parameters())
    if packed is not model:
        weights += max(weight.nbytes for weight in model.parameters())
    kv_itemsize = 4 if device.type == "cpu" else dtype.itemsize
    tokens = min(settings.max_model_len or SHORT_TEXT, config.context_length)
    num_blocks = settings.num_blocks or -(-tokens // settings.block_size)
    pool = num_blocks * numbers_per_block(config, settings.block_size) * kv_itemsize
    free, _ = memory_of(device)
    if weights + pool > free:
        name = str(served).removeprefix("torch.")
        raise ValueError(
            f"the model does not fit: its weights in {name} take {weights / 2**20:,.0f} MiB and "
            f"{plural(num_blocks, 'KV block')} {pool / 2**20:,.0f} MiB, but {device} has "
            f"{free / 2**20:,.0f} MiB free: end other programs, lower --kv-blocks or "
            "--max-model-len, or choose --dtype bf16, --quantize int8 (on a CPU) or a smaller model"
        )
    return packed


def numbers_per_block(config: GPTConfig, block_size: int) -> int:
    """
    Return 2 (K and V) * layers * KV heads * head size * block size. For example, a token of
    Llama-2-7B takes half a MiB in fp16, and a text of 4,096 tokens takes 2 GiB:

    >>> llama_2_7b = GPTConfig(n_layer=32, n_head=32, n_embd=4096)
    >>> 2 * numbers_per_block(llama_2_7b, block_size=1) / 2**20
    0.5
    >>> 2 * numbers_per_block(llama_2_7b, block_size=4096) / 2**30
    2.0
    """
    return 2 * config.n_layer * config.n_kv_head * config.head_size * block_size


@contextmanager
def explain_lack_of_memory(what: str):
    """Convert torch's out-of-memory error in the body to a ValueError that suggests a fix."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the GPU does not have enough memory for {what}: lower --kv-blocks, --max-num-seqs or "
            f"--token-budget, or try --no-graphs ({error})"
        ) from error


def machine_name(device: str) -> str:
    """
    Return the name of the machine for figures and records, for example "NVIDIA H200" or
    "x86_64 CPU, 2 threads".
    """
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {plural(torch.get_num_threads(), 'thread')}"
