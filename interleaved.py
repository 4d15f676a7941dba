"""
The post's loop, with nothing of the engine around it: the scheduler plans a step, one forward of
the model computes it in plain torch, the sampler picks the tokens.

    requests = [Request(0, prompt, max_new_tokens=64), Request(1, other, max_new_tokens=64)]
    scheduler = interleaved_generate(model, requests)       # answers: in their generated_tokens

To be read before the engine, which does the same for requests that come and go, with inputs that
stay on the device and the operators of each machine (engine/engine.py).
"""

from functools import partial
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from kernels import Batch
from model import GPT
from ops.gather import TORCH
from ops.inputs import flat_inputs, upload
from ops.sampling import SamplingRows, sample_torch, sampling_row
from paged import KVBlockPool, Plan, Request, Scheduler, SchedulerSettings


def flat_batch(plan: Plan, model: GPT, pool: KVBlockPool) -> Batch:
    """
    Return a step on one flat token axis, made from lists: what `Device.compute` makes from arrays
    that stay on the device. The logits wanted are those of `plan.sampled`, in that order.
    """
    device = pool.kv.device
    inputs, last = flat_inputs(plan, pool.kv.shape[-2])
    tokens, positions, slots, _ = zip(*inputs, strict=True)
    query_lens = []
    context_lens = []
    tables = []
    for request, n in plan.work:
        query_lens.append(n)
        context_lens.append(request.num_filled_slots + n)
        tables.append(torch.tensor(request.block_table))
    starts = [0, *accumulate(query_lens)]
    tables = pad_sequence(tables, batch_first=True, padding_value=pool.sink)  # [B, M]
    int32 = partial(upload, device=device, dtype=torch.int32)
    batch = Batch(
        tokens=upload(tokens, device),
        positions=upload(positions, device),
        slot_mapping=upload(slots, device),
        query_start=int32(starts),
        context_lens=int32(context_lens),
        block_tables=int32(tables),
        logits_index=int32(last),
        num_decodes=len(plan.decodes),
        query_lens_host=query_lens,
        context_lens_host=context_lens,
        ops=TORCH,
    )
    H = model.config.n_head
    batch.prepared = {}
    for window in set(model.config.windows):
        batch.prepared[window] = TORCH.prepare(batch, H, pool.kv[0], window)
    return batch


@torch.inference_mode()
def interleaved_generate(
    model: GPT,
    requests: list[Request],
    policy: str = "fcfs",
    token_budget: int = 16,
    max_kv_tokens: int = 256,
) -> Scheduler:
    """
    Serve all requests, greedily or by their `params`, in a pool of max_kv_tokens, in plain torch;
    the answers are in their `generated_tokens`. Returns the scheduler, for its counts. Raises
    ValueError for a request that is longer than the context, RuntimeError for one that alone is
    larger than the pool. `Engine.step` does the same for requests that come and go.
    """
    config = model.config
    for r in requests:
        if len(r.prompt_tokens) + r.max_new_tokens > config.context_length:
            raise ValueError(
                f"request {r.id}: {len(r.prompt_tokens)} prompt tokens + {r.max_new_tokens} new "
                f"ones do not fit into the context length of {config.context_length}: shorten one "
                "of them"
            )
    settings = SchedulerSettings(max_num_seqs=max(1, len(requests)))
    scheduler = Scheduler(policy, token_budget, max_kv_tokens, settings=settings)
    for request in requests:
        scheduler.add_request(request)
    weight = model.wte.weight
    device = weight.device
    blocks = scheduler.block_allocator.num_blocks, scheduler.block_size
    layers = config.n_layer, config.n_kv_head, config.head_size
    pool = KVBlockPool(*blocks, *layers, device, weight.dtype)
    sampling = SamplingRows(scheduler.max_num_seqs, config.vocab_size, device)
    step = 0
    while not scheduler.is_done():
        plan = scheduler.plan(step)
        for request in plan.admitted:
            sampling.fill(sampling_row(request))
        batch = flat_batch(plan, model, pool)
        x = model.hidden(batch, pool.kv)  # the one model call: each layer stores K, V and attends
        logits = model.logits(x[batch.logits_index], TORCH)  # [R, V]
        rows = upload([r.row for r in plan.sampled], device)
        positions = upload([r.num_tokens for r in plan.sampled], device)  # of the new tokens
        tokens = sample_torch(logits, rows, positions, sampling)
        scheduler.update(plan, tokens.tolist())
        step += 1
    return scheduler
