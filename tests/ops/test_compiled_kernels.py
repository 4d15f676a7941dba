"""
Every Triton kernel is compiled for cards that we do not have. It must compile, and fit into the
card's shared memory.

A separate process, without Triton's interpreter, computes steps of an engine on torch's fake
tensors, which have shapes but no numbers. A launch compiles its kernel and does nothing else. Fake
GPU tensors would need a torch built for GPUs, so these are CPU tensors, and this file answers what
kernels.py asks about its GPU.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernels
from model import GPT, GPTConfig, Rope

ROOT = Path(__file__).parents[2]
# compute capability -> KiB of shared memory that a program may use
ROOM = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
GEMMA = GPTConfig(8192, 4096, n_layer=2, n_head=8, n_embd=1024, n_kv_head=4, head_size=256)
GEMMA = replace(GEMMA, norm="rms", qk_norm=True, bias=False, gated=True, attention_softcap=50.0)
GEMMA = replace(GEMMA, windows=(1024, 0), rope={0: Rope(1e6), 1024: Rope(1e4)})


@pytest.mark.slow
@pytest.mark.skipif(not kernels.triton, reason="needs the package triton")
@pytest.mark.parametrize("capability", ROOM)
def test_kernels_fit_a_card(capability, tmp_path):
    """Previously heads of 256 took 104 KiB, but an RTX 3090, 4090 or 5090 has only 99."""
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(capability)]
    done = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, check=True)
    names, compiled = json.loads(done.stdout)
    assert {row["kernel"] for row in compiled} == set(names), "a kernel that no step here launches"
    assert [row for row in compiled if row["shared"] > 1024 * ROOM[capability]] == []


def compile_kernels(capability: int):
    """
    Print the names of all kernels, and for each compiled one its name, bytes of shared memory and
    options.
    """
    from torch._subclasses import FakeTensor, FakeTensorMode
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Card:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    driver.set_active(Card())
    # the compiler uses whether a tensor begins at a multiple of 16 bytes
    FakeTensor.data_ptr = lambda self: self.storage_offset() * self.itemsize
    pdl = capability >= 90
    kernels.pdl_options = lambda x: {"PDL": pdl, "launch_pdl": pdl}
    kernels.shared_memory = lambda device: 1024 * ROOM[capability]
    kernels.num_processors = lambda device: 132
    # import only now, because these modules copy functions of kernels.py
    from assets.workloads import MODELS
    from engine import device as device_module
    from ops.choice import triton_tables
    from ops.fused import send
    from ops.inputs import StepShape, upload
    from params import Settings

    compiled = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        row = {"kernel": self.fn.__name__, "shared": kernel.metadata.shared}
        compiled[id(kernel)] = options | row, kernel

    JITFunction.run = compile_only

    def compute_steps(config: GPTConfig, dtype: torch.dtype, table, rows: tuple[int, ...] = ()):
        """
        Run steps with these numbers of rows, with chunks beside decodes, and with a shared prefix.
        """
        device_module.choose_ops = lambda *_: (table, "")
        device_module.kv_dtype = lambda model: dtype
        model = GPT(config).to(dtype).requires_grad_(False)
        with FakeTensorMode(allow_non_fake_inputs=True):
            settings = Settings(num_blocks=1000, max_num_seqs=256, token_budget=2048)
            device = device_module.Device(model, settings)
            shapes = [StepShape(n, 0, 0) for n in rows] + [StepShape(64, 16, 1024)]
            if device.finder:
                shapes += device.finder.shapes(256)[:1]
            for shape in shapes:
                tokens, *_ = device.compute(upload(device.padding(shape), device.device), shape)
            send(tokens, torch.zeros(4, 256).long(), torch.zeros(1).long())

    one_layer = {"n_layer": 1, "windows": (0,)}
    fast, deterministic = triton_tables()
    gpt2 = replace(MODELS["gpt2-124M"], **one_layer)
    qwen3 = replace(MODELS["qwen3-0.6B"], **one_layer, vocab_size=8192)
    compute_steps(gpt2, torch.float16, fast, (1, 16, 32, 64, 128, 256))  # each has its own tiles
    if capability == 86:  # it has the least memory; slow to compile
        compute_steps(qwen3, torch.float32, fast)
    smollm2 = replace(MODELS["smollm2-135M"], **one_layer, vocab_size=8192)
    compute_steps(smollm2, torch.bfloat16, fast, (1,))
    compute_steps(GEMMA, torch.bfloat16, fast, (1,))
    compute_steps(GEMMA, torch.bfloat16, deterministic)
    ours = [m for path, m in sys.modules.items() if path == "kernels" or path.startswith("ops.")]
    names = {name for module in ours for name in vars(module) if name.endswith("_kernel")}
    print(json.dumps([sorted(names), [row for row, _ in compiled.values()]], default=str))


if __name__ == "__main__":
    compile_kernels(int(sys.argv[1]))
