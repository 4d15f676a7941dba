"""
The post's loop, without the engine. The scheduler plans a step, one forward pass of the model
computes the step in plain torch, and the sampler picks the tokens.

    requests = [Request(0, prompt, max_new_tokens=64), Request(1, other, max_new_tokens=64)]
    scheduler = interleaved_generate(model, requests)       # answers: request.generated_tokens

Read this file before engine/engine.py. The engine runs the same loop, except that requests come and
go, inputs stay on the device, and each type of machine has its own operators.
"""

from functools import partial
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from kernels import Batch
from model import GPT
from ops.gather import TORCH_OPS
from ops.inputs import flat_inputs, upload
from ops.sampling import SamplingRows, sample_torch, sampling_row
from paged import KVBlockPool, Plan, Request, Scheduler, SchedulerSettings


def flat_batch(plan: Plan, model: GPT, pool: KVBlockPool) -> Batch:
    """
    Build a step's batch from lists, with all tokens on one flat axis. (`Device.compute` builds it
    from arrays that stay on the device.) Logits are computed for `plan.sampled`, in that order.
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
    tables = pad_sequence(tables, batch_first=True, padding_value=pool.padding_block)  # [B, M]
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
        ops=TORCH_OPS,
    )
    H = model.config.n_head
    batch.attention_plans = {}
    for window in set(model.config.windows):
        batch.attention_plans[window] = TORCH_OPS.plan_attention(batch, H, pool.kv[0], window)
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
    Serve all requests in plain torch, with a pool for max_kv_tokens tokens. Answers are stored in
    each request's `generated_tokens`: sampled if the request has `params`, otherwise greedy. Return
    the scheduler, which has the statistics. Raises ValueError if a request is longer than the
    context, and RuntimeError if one needs more than the whole pool. `Engine.step` does the same
    work for requests that come and go.
    """
    config = model.config
    for r in requests:
        if len(r.prompt_tokens) + r.max_new_tokens > config.context_length:
            raise ValueError(
                f"request {r.id}: {len(r.prompt_tokens)} prompt tokens + {r.max_new_tokens} new "
                f"ones do not fit the context length of {config.context_length}: shorten one of "
                "them"
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
    while not scheduler.is_done():
        plan = scheduler.plan()
        for request in plan.admitted:
            sampling.fill(sampling_row(request))
        batch = flat_batch(plan, model, pool)
        x = model.hidden(batch, pool.kv)  # in this call, each layer stores K and V, then attends
        logits = model.logits(x[batch.logits_index], TORCH_OPS)  # [R, V]
        rows = upload([r.row for r in plan.sampled], device)
        positions = upload([r.num_tokens for r in plan.sampled], device)  # of the new tokens
        tokens = sample_torch(logits, rows, positions, sampling)
        scheduler.update(plan, tokens.tolist())
    return scheduler
