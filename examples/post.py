"""
The loop from "Adding Paged Attention to NanoGPT" (the post), as a reader of the post would type it
in. It runs on the pool, allocator, requests and scheduler in paged.py. Each function's docstring
says what replaces the function in this repo.

    python examples/post.py --prompt "def"    # with the model in out/stdlib, or --model DIR

A step of the loop, and the same step in interleaved.py (`interleaved_generate`):

    the post                                          this repo
    schedule                                          Scheduler.plan
    find_cached_prefix, load_cached_blocks            in `plan`: hits go into the block table
    ensure_blocks_for_new_tokens                      in `plan`: a new block if the last is full
    assemble_fused_batch, with assemble_paged_cache   flat_batch: one axis without padding
    the model: a head gets contiguous K and V         the model: a head reads the pool
    disassemble_paged_fused                           in the model: each layer stores its K and V
    softmax, multinomial                              sample_torch

Letters: B requests, T and P the largest numbers of new and past tokens, L layers, H query heads, Hk
KV heads, D head size, V vocabulary size.
"""

import argparse
import sys
from functools import partial

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/.."
    from common import end_with_one_line

    end_with_one_line()

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from checkpoint import load_checkpoint
from model import TORCH_OPS, WholeTexts
from paged import (
    KVBlockPool,
    Request,
    Scheduler,
    SchedulerSettings,
    commit_completed_blocks,
    find_cached_prefix,
    gather_kv_from_pool,
    write_kv_to_pool,
)
from tokenizer import load_tokenizer

pad_left = partial(pad_sequence, batch_first=True, padding_side="left")

# --------------------------------------------------------------------------------------------------
# Before the model


def load_cached_blocks(request, blocks, pool, block_size):
    """
    Copy cached blocks to the first blocks of the request, and count their tokens as computed.

    In this repo, nothing is copied: `Scheduler._admit` puts the cached blocks themselves into the
    block table, and adds a reference to each.
    """
    pool.copy_blocks(request.block_table[: len(blocks)], blocks)
    request.num_filled_slots = request.prefill_cursor = len(blocks) * block_size


def ensure_blocks_for_new_tokens(request, num_new, block_allocator, block_size):
    """
    Append blocks to a block table until num_new more tokens fit. Raises RuntimeError if the pool is
    exhausted.

    In this repo, `Scheduler.plan` allocates the blocks: for a whole prompt at admission, and for a
    decode in `_ensure_slot`. `schedule` calls `plan`, so in the loop below, the blocks have already
    been allocated.
    """
    while len(request.block_table) * block_size < request.num_filled_slots + num_new:
        request.block_table.append(block_allocator.allocate_one())


def assemble_paged_cache(requests, pool, block_size):
    """
    Gather the K and V of each request from the pool, left-padded to the longest request. Returns

        past_kvs[layer][head]   K and V, [B, P, D] each
        mask                    [B, 1, P], False for padding
        pad_lengths             length of each request's padding

    In this repo, nothing is gathered: attention reads the pool through the block tables
    (kernels.py, `attention_kernel`).
    """
    lengths = [request.num_filled_slots for request in requests]
    past_kvs = [[] for _ in pool.kv]
    for layer, head in pool.k_pool:
        pairs = []
        for request, n in zip(requests, lengths, strict=True):
            pair = gather_kv_from_pool(pool, request.block_table, block_size, n, layer, head)
            pairs.append(torch.cat(pair).transpose(0, 1))  # [n, 2, D]
        past_kvs[layer].append(pad_left(pairs).unbind(2))
    longest = max(lengths)
    pad_lengths = [longest - n for n in lengths]
    mask = torch.arange(longest) >= torch.tensor(pad_lengths)[:, None, None]
    return past_kvs, mask, pad_lengths


def assemble_fused_batch(decode_reqs, prefill_req, chunk_size, pool, block_size):
    """
    Put one token for each decode and a chunk of a prompt in a left-padded rectangle. Returns tokens
    and positions [B, T], past_kvs, a mask [B, 1, T, P + T] that is True where a token may attend to
    a key, and pad_lengths.

    In this repo, `flat_batch` (interleaved.py) puts all new tokens on one axis without padding. In
    a server, `lay_out` (ops/inputs.py) does the same with arrays on the device.
    """
    requests = list(decode_reqs)
    num_new = [1] * len(decode_reqs)
    if prefill_req is not None:
        requests.append(prefill_req)
        num_new.append(chunk_size)
    past_kvs, past_mask, pad_lengths = assemble_paged_cache(requests, pool, block_size)
    tokens = []
    positions = []
    for request, n in zip(requests, num_new, strict=True):
        start = request.num_filled_slots
        tokens.append(torch.tensor(request.tokens_between(start, start + n)))
        positions.append(torch.arange(start, start + n))
    T = max(num_new)
    is_new = torch.arange(T) >= T - torch.tensor(num_new)[:, None, None]  # [B, 1, T]
    before = torch.ones(T, T).tril().bool()
    seen = is_new & before | torch.eye(T).bool()  # padding attends to itself, to avoid NaN
    mask = torch.cat((past_mask.expand(-1, T, -1), seen), 2)
    return pad_left(tokens), pad_left(positions), past_kvs, mask[:, None], pad_lengths


# --------------------------------------------------------------------------------------------------
# The model, and after it


def call_model(model, tokens, pos, past_kvs, attn_mask):
    """
    Do what the post's `model(tokens, pos=pos, past_kvs=past_kvs, attn_mask=attn_mask)` does.
    Returns the logits [B, V] of each request's last token, and new_kvs[layer][head], which are K
    and V, [B, T, D] each. An attention head need not know about blocks, because its K and V are
    contiguous, and are written to the pool later.

    In this repo, attention does know about blocks: in `Attention.forward` (model.py), `project_qkv`
    writes to the pool and `attend` reads from it.
    """
    new_kvs = []

    def store_kv(k, v, past, batch):  # k, v [B, T, Hk, D]
        new_kvs.append(list(zip(k.unbind(2), v.unbind(2), strict=True)))
        past_k, past_v = (torch.stack(heads, 2) for heads in zip(*past, strict=True))
        return torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)

    def attend(q, kv, attn, batch):  # grouped-query attention if there are fewer KV heads
        q, k, v = (x.transpose(1, 2) for x in (q, *kv))  # [B, H, T, D], [B, Hk, P + T, D]
        options = {"scale": attn.scale, "enable_gqa": True}
        return F.scaled_dot_product_attention(q, k, v, attn_mask, **options).transpose(1, 2)

    batch = WholeTexts(tokens, pos, TORCH_OPS._replace(store_kv=store_kv, attend=attend))
    x = model.hidden(batch, past_kvs)
    return model.logits(x[:, -1], TORCH_OPS), new_kvs


def disassemble_paged_fused(all_reqs, new_kvs, num_new_per_req, pool, block_size):
    """
    Write the new K and V to the blocks of each request, and count the filled slots.

    In this repo, each layer stores its own K and V in the slots given by the batch's `slot_mapping`
    (`Attention.forward` in model.py), and `Scheduler.advance` counts the slots.
    """
    for i, request in enumerate(all_reqs):
        n = num_new_per_req[i]
        where = request.block_table, block_size, request.num_filled_slots
        for layer, heads in enumerate(new_kvs):
            for head, (k, v) in enumerate(heads):
                new = k[i : i + 1, -n:], v[i : i + 1, -n:]  # padding is on the left
                write_kv_to_pool(pool, *where, *new, layer, head)
        request.num_filled_slots += n


@torch.no_grad()
def interleaved_generate(
    model, requests, policy="fcfs", token_budget=16, max_kv_tokens=256, temperature=1.0
):
    """
    Serve all requests; their answers end up in `generated_tokens`. Raises ValueError for a model
    with sliding windows, which the mask from `assemble_fused_batch` does not support.

    In this repo, the loop is `interleaved_generate` in interleaved.py or, for requests that come
    and go, `Engine.step`.
    """
    config = model.config
    if any(config.windows):
        raise ValueError("the post has no sliding windows: serve this model with serve.py")
    # without the scheduler's own prefix cache, because this loop finds and loads blocks itself
    settings = SchedulerSettings(prefix_cache=False)
    scheduler = Scheduler(policy, token_budget, max_kv_tokens, settings=settings)
    S = scheduler.block_size
    allocator = scheduler.block_allocator
    sizes = config.n_layer, config.n_kv_head, config.head_size
    pool = KVBlockPool(allocator.num_blocks, S, *sizes, "cpu")
    for request in requests:
        scheduler.add_request(request)
    step = 0
    while not scheduler.is_done():
        prefill_req, decode_reqs = scheduler.schedule(step)
        all_reqs = list(decode_reqs)
        num_new = [1] * len(decode_reqs)
        chunk_size = 0
        if prefill_req is not None:
            if prefill_req.prefill_cursor == 0:
                hits = find_cached_prefix(prefill_req, scheduler.block_cache, S)
                load_cached_blocks(prefill_req, hits, pool, S)
            tokens_left = prefill_req.prefill_target - prefill_req.prefill_cursor
            chunk_size = min(token_budget - len(decode_reqs), tokens_left)
            all_reqs.append(prefill_req)
            num_new.append(chunk_size)
        for i, request in enumerate(all_reqs):
            ensure_blocks_for_new_tokens(request, num_new[i], allocator, S)

        tokens, positions, past_kvs, attn_mask, _ = assemble_fused_batch(
            decode_reqs, prefill_req, chunk_size, pool, S
        )
        logits, new_kvs = call_model(model, tokens, positions, past_kvs, attn_mask)
        disassemble_paged_fused(all_reqs, new_kvs, num_new, pool, S)

        # In this repo, `sample_torch` (ops/sampling.py) does this. There, a request's noise depends
        # only on its seed and position. Here, it depends on everything that was drawn before.
        idx_next = logits.argmax(-1)  # [B]
        if temperature > 0:
            probs = F.softmax(logits / temperature, dim=-1)
            idx_next = torch.multinomial(probs, num_samples=1)[:, 0]
        for i, request in enumerate(all_reqs):
            if request is prefill_req:
                request.prefill_cursor += chunk_size
                if not request.is_fully_prefilled:
                    continue  # its logits predict a token in the middle of the prompt
                commit_completed_blocks(request, scheduler.block_cache, S, pool)
                scheduler.promote(request)
            request.generated_tokens.append(idx_next[i].item())
            if request.is_done:
                scheduler.complete(request)
        step += 1
    return scheduler


def main():
    parser = argparse.ArgumentParser(description="The post's loop, on this repo's pool.")
    parser.add_argument("--model", default="out/stdlib", help="a checkpoint directory")
    parser.add_argument("--prompt", default="def add(a, b):", help="a text to continue three times")
    args = parser.parse_args()
    try:
        tokenizer = load_tokenizer(args.model)
        prompt = tokenizer.encode(args.prompt)
        requests = [Request(i, prompt, 24) for i in range(3)]
        interleaved_generate(load_checkpoint(args.model), requests)
    except ValueError as error:
        sys.exit(str(error))
    for request in requests:
        print(f"{args.prompt!r} + {tokenizer.decode(request.generated_tokens)!r}")


if __name__ == "__main__":
    main()
