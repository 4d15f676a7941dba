"""
Tables of operators (`Ops`), one per kind of machine. One of them is chosen when an engine is built.

    ops, reason = choose_ops("auto", "cuda")      # the table, and why it was chosen

    TORCH_OPS      model.TORCH_OPS plus what serving needs, in torch; the reference on any device
    BF16           torch on a CPU, with matrices in bf16 (packed by oneDNN) and the rest in fp32
    cpu            the operators in cpu.c; needs a C compiler
    TRITON         fused kernels that read K and V from the pool; a CUDA graph can contain a step
    DETERMINISTIC  --deterministic: TRITON, with answers that do not depend on what shares a step

Each batch carries its table of operators, so no other code needs to know the device.
"""

import os
from functools import cache, partial

import torch

import kernels
from model import Ops
from ops import gather, inputs, packed, sampling

TORCH_OPS = gather.TORCH_OPS._replace(
    decode_inputs=inputs.decode_inputs,
    sample=sampling.sample_torch,
    logprobs=sampling.logprobs,
    pack_weights=packed.pack_weights,
)
BF16 = TORCH_OPS._replace(
    name="bf16", pack_weights=partial(packed.pack_weights, layer=packed.Bf16Linear)
)


@cache
def triton_tables() -> tuple[Ops, Ops]:
    """
    Return TRITON and DETERMINISTIC. Their modules are imported here because only a GPU needs them.
    """
    from ops import (  # one per line: a feature is deleted with its lines
        deterministic,
        fused,
        linear,
        prefix,
        sampling_kernels,
    )

    fastest = TORCH_OPS._replace(
        name="triton",
        embed=fused.embed,
        rotation=fused.rotation,
        add_norm=linear.add_norm,
        norm=linear.normalise,
        project_qkv=fused.project_qkv,
        store_kv=kernels.store_kv_triton,
        attend=kernels.paged_attention_triton,
        linear=linear.linear,
        head=linear.head,
        plan_attention=kernels.plan_attention_triton,
        decode_inputs=fused.decode_inputs,
        sample=sampling_kernels.sample_triton,
        send=fused.send,
        fixed_shapes=True,
        group_finder=prefix.GroupFinder,  # remove this and ops/prefix.py to turn sharing off
    )
    return fastest, fastest._replace(
        add_norm=linear.norm_now,
        project_qkv=deterministic.project_qkv,
        linear=deterministic.linear,
        head=deterministic.head,
        is_deterministic=True,
    )


NEEDS = {
    "triton": "needs a CUDA device and the triton package",
    "cpu": "needs a CPU, a C compiler, and weights in fp32 or int8",
}


def tables_for(on_gpu: bool, dtype: torch.dtype) -> dict[str, Ops]:
    """Return the tables that work on this kind of device without cpu.c, the fastest one first."""
    fastest = TORCH_OPS
    if dtype == torch.bfloat16:
        fastest = BF16
    if on_gpu:
        fastest = triton_tables()[0] if kernels.triton else TORCH_OPS
    tables = {fastest.name: fastest, "torch": TORCH_OPS}
    if kernels.INTERPRETED:
        tables["triton"] = triton_tables()[0]
    return tables


def choose_ops(
    attention: str = "auto",
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
) -> tuple[Ops, str]:
    """
    Return a table, and the reason for choosing it. The table is the one named `attention` or, with
    "auto", the fastest one for the device and for the dtype that weights are multiplied in. If
    `deterministic`, answers do not depend on what else is in a step. Raises ValueError if the table
    does not work here.
    """
    ops, reason = find_ops(attention, device, dtype)
    if not deterministic or ops.is_deterministic:
        return ops, reason
    if ops.name == "triton":
        return triton_tables()[1], "--deterministic"
    raise ValueError(
        f"--deterministic works only with --attention triton, which {NEEDS['triton']}, or cpu, "
        f"which {NEEDS['cpu']}; here attention is {ops.name} in {dtype}: leave the flag out"
    )


def find_ops(attention: str, device: str | torch.device, dtype: torch.dtype) -> tuple[Ops, str]:
    """Like `choose_ops`, but the table need not be deterministic."""
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu and dtype == torch.int8:
        raise ValueError(f"--quantize int8 is for CPUs, but the device is {device}: leave it out")
    tables = tables_for(on_gpu, dtype)
    if attention in tables:
        return tables[attention], "as requested"
    can_call = not on_gpu and dtype in (torch.float32, torch.int8)
    compiler = []
    if can_call:
        from ops import cpu

        compiler = cpu.c_compiler()
    if attention in ("auto", "cpu") and compiler:
        return cpu.CpuKernels(compiler).table(TORCH_OPS), "the fastest on a CPU"
    if attention != "auto":
        why = NEEDS.get(attention, "is unknown")
        names = ["auto", *tables]
        if compiler:
            names.append("cpu")
        available = ", ".join(names)
        raise ValueError(f"attention backend {attention!r} {why}; {device} has {available}")
    fastest = next(iter(tables.values()))
    if can_call:
        command = os.environ.get("CC", "cc")
        gain = "two to six times"
        if dtype == torch.int8:
            gain = "many times"
        reason = f"because there is no C compiler {command!r}: gcc would make it {gain} as fast"
    elif on_gpu and fastest is TORCH_OPS:
        reason = "because there is no triton package: it would make the GPU many times as fast"
    else:
        reason = "the fastest on CUDA" if on_gpu else "the fastest in bf16 on a CPU"
    return fastest, reason
