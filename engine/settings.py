"""
Every default of serving, stated once.

    engine = Engine(model, Settings(block_size=32, max_num_seqs=8))

A field made by `setting` is a flag of serve.py too, with this help text and these limits. What the
scheduler reads is declared in `SchedulerSettings` (paged.py), from which `Settings` inherits. None
stands for a value that depends on the machine or the model; engine/sizing.py finds it. Imports no
torch.
"""

from dataclasses import dataclass

from paged import POLICIES, SchedulerSettings, setting

# what suits a device: requests at once, and tokens in a step
GPU_SEQS = 256
GPU_TOKENS = 8192
CPU_SEQS = 64
CPU_TOKENS = 512


@dataclass(frozen=True)
class Settings(SchedulerSettings):
    """How an `Engine` serves its model. Raises ValueError for what is out of range."""

    # how large
    block_size: int = setting(16, "tokens in a KV block", least=1)
    num_blocks: int | None = setting(
        None,
        "KV blocks in the pool; not given: for --max-num-seqs texts of full length, on a CPU for "
        "three quarters of them, if there is memory",
        least=1,
        flag="--kv-blocks",
    )
    max_num_seqs: int | None = setting(
        None,
        f"requests that run at once; not given: {GPU_SEQS} on a GPU, {CPU_SEQS} on a CPU",
        least=1,
    )
    token_budget: int | None = setting(
        None,
        f"tokens computed in a step; not given: {GPU_TOKENS} on a GPU, {CPU_TOKENS} on a CPU",
        least=1,
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus answer, in tokens; not given: what fits", least=1
    )
    watermark: float = 0.01  # share of the blocks kept for running requests at an admission

    # in which order
    policy: str = setting(
        "priority",
        "which request goes first: the oldest (fcfs), the lowest `priority` (priority), the "
        "shortest (sjf)",
        choices=tuple(POLICIES),
    )

    # how it is computed
    attention: str = setting(
        "auto", "attention backend: triton, flex or torch; auto takes the fastest here"
    )
    quantize: str = setting("none", "int8: weights as integers, on a CPU", choices=("none", "int8"))
    compile: bool = setting(False, "on a CPU: compile the step of a lone request, 10 to 60 s once")
    # the help text is that of the flag, which turns it off
    graphs: bool = setting(True, "on a GPU: no CUDA graphs, for debugging", flag="--no-graphs")
    # asynchronous scheduling: plan a step while the one before runs; None: on a GPU
    overlap: bool | None = None
    seed: int | None = None  # for drawing the seeds of requests without one; None: from the system

    # for debugging
    check: bool = setting(False, "verify the scheduler's invariants after each step")
