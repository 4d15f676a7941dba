"""
Who computes: the table of operators (`model.Ops`) for a device, chosen once, when an engine is
built.

    ops, reason = choose_ops("auto", "cuda")      # the table, and why this one

    TORCH     torch for everything, attention spelled out: the reference, on any device
    CPU       packed weights, scaled dot-product attention of gathered K and V
    TRITON    fused kernels that read K and V where they are; CUDA graphs can hold a step
    flex      the device's own table with FlexAttention

Each batch carries its table, so nothing further down asks where it is.
"""

from functools import partial

import torch
from torch import Tensor

import kernels
import model
from serving import cpu, flex, fused, inputs, sampling, sampling_kernels


def project_qkv(y: Tensor, attention: model.Attention, kv: Tensor, batch: kernels.Batch):
    """
    As model.project_qkv, but K and V (T, Hk, D) go to their slots in the layer's pool, which is
    returned.
    """
    qkv = batch.ops.linear(y, attention.c_attn)
    q, k, v = attention.heads(qkv)
    batch.ops.store_kv(k, v, kv, batch)
    return q, kv


TORCH = model.TORCH._replace(
    project_qkv=project_qkv,
    attend=partial(kernels.paged_attention_torch, attention=model.attention),
    prepare=kernels.prepare_torch,
    store_kv=kernels.store_kv_torch,
    decode_inputs=inputs.decode_inputs,
    sample=sampling.sample_torch,
    pack=cpu.pack_if_quantized,
)
CPU = TORCH._replace(
    name="cpu",
    add_norm=cpu.add_norm,
    attend=kernels.paged_attention_torch,
    pack=cpu.packed_for_cpu,
)
TRITON = model.Ops(
    name="triton",
    embed=fused.embed,
    add_norm=fused.add_norm,
    project_qkv=fused.project_qkv,
    attend=kernels.paged_attention_triton,
    linear=fused.linear,
    head=fused.head,
    prepare=kernels.prepare_triton,
    store_kv=kernels.store_kv_triton,
    decode_inputs=fused.decode_inputs,
    sample=sampling_kernels.sample_triton,
    pack=cpu.pack_if_quantized,
    fixed_shapes=True,
)
FLEX = {"name": "flex", "prepare": flex.prepare_flex, "attend": flex.paged_attention_flex}


def choose_ops(
    attention: str = "auto", device: str | torch.device = "cpu"
) -> tuple[model.Ops, str]:
    """
    The table of that name, or with "auto" the fastest for the device, and why. Raises ValueError
    where it does not work.
    """
    on_gpu = torch.device(device).type == "cuda"
    compiler = kernels.triton if on_gpu else cpu.cpp_compiler()
    own = TORCH if on_gpu else CPU
    if on_gpu and kernels.triton:
        own = TRITON
    there = {"auto": own, own.name: own, "torch": TORCH}
    if compiler:
        there["flex"] = own._replace(**FLEX, fixed_shapes=False)
    if kernels.triton and (on_gpu or kernels.INTERPRETED):
        there["triton"] = TRITON
    if attention in there:
        reason = "as asked"
        if attention == "auto":
            reason = f"the fastest on {'CUDA' if on_gpu else 'a CPU'}"
            if own is TORCH:
                reason = "the package triton is not installed"
        return there[attention], reason
    needs = {
        "triton": "needs a CUDA device and the package triton",
        "flex": "needs triton on CUDA, a C++ compiler elsewhere",
    }
    why = needs.get(attention, "is unknown")
    names = ", ".join(there)
    raise ValueError(f"attention backend {attention!r} {why}; on {device} there is {names}")
