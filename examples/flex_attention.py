"""
FlexAttention over the pool of KV blocks: paged attention expressed as a mask. Each text is
continued twice, by an engine in plain torch and by an engine that uses the attention in this file.
The answers must be equal.

    python examples/flex_attention.py out/stdlib "def" "import os"    # a model, and texts

The operators for a machine are in a table (ops/choice.py), so a different attention only has to
replace two entries. FlexAttention sees the pool as one long sequence of keys, page after page. A
page is the part of a block that belongs to one KV head. For example, with 2 heads:

    keys     | 0 .. S - 1      | S .. 2 S - 1    | 2 S .. 3 S - 1  | 3 S .. 4 S - 1  | ..
    page     | block 0, head 0 | block 0, head 1 | block 1, head 0 | block 1, head 1 | ..

The mask converts a key's index in that sequence back to the key's position in a text. Here,
FlexAttention runs eagerly on a CPU: it computes all scores, then masks them. It is designed for
GPUs, where torch.compile(flex_attention) skips the tiles that are completely masked.

Letters: T tokens in a step, B requests, M blocks per table, H query heads, Hk KV heads, D head
size, S block size.
"""

import sys
import warnings

if __name__ == "__main__":  # as a command, from any folder
    sys.path[0] += "/.."

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from checkpoint import load_checkpoint
from engine.engine import Engine
from model import may_see, soft_cap
from ops.gather import GatherPlan, pool_rows
from params import GREEDY, Settings
from tokenizer import load_tokenizer

TEXTS = ("def add(a, b):", "import os\n" * 20, "import os\n" * 20 + "import ", "class")
TILE = 128  # queries per tile of the mask


def plan_attention(batch, H, kv, window=0):
    """
    Build the block mask for a step, once for all layers with this window. Decodes and chunks are on
    one flat token axis, so they share the mask. Returns a `GatherPlan` with the mask as its
    `calls`.
    """
    _, num_blocks, Hk, S, _ = kv.shape  # including the padding block
    B, M = batch.block_tables.shape
    # the inverse of the block tables: [request, physical block] -> logical block
    logical = torch.full((B, num_blocks), -1)
    numbers = torch.arange(M).expand(B, M)
    # A block released by a sliding window may be allocated to the same text again, at a later
    # place. The block then appears twice in the table, and the last entry wins.
    is_own = numbers * S < batch.context_lens[:, None]
    logical.scatter_reduce_(1, batch.block_tables.long(), numbers.where(is_own, -1), "amax")
    logical[logical < 0] = 2**40  # blocks of other texts: as if they came after this text's end
    request = torch.arange(B).repeat_interleave(batch.query_start.diff())  # [T]

    def sees(_, head, query, key):
        page = key // S
        block = logical[request[query], page // Hk]
        position = block * S + key % S
        is_own_head = page % Hk == head // (H // Hk)
        return is_own_head & may_see(batch.positions[query], position, window)

    sizes = (1, H, len(request), num_blocks * Hk * S)
    # a tile of keys is a page; tiles in which no query sees any key can be skipped
    mask = create_block_mask(sees, *sizes, "cpu", (TILE, S))
    store_rows = pool_rows(batch.slot_mapping[:, None], kv)
    return GatherPlan(store_rows.flatten(), mask)


def attend(q, kv, attn, batch):
    """
    Compute attention of q [T, H, D] to one layer's pool kv [2, num_blocks + 1, Hk, S, D], without
    copying the pool. Returns [T, H, D]. Masked keys have weight 0, and 0 * NaN is NaN, so the pool
    must not contain NaN.
    """
    k, v = kv.reshape(2, 1, 1, -1, attn.D)  # views: [1, 1, (num_blocks + 1) Hk S, D]
    options = {"block_mask": batch.attention_plans[attn.window].calls, "enable_gqa": True}
    if attn.softcap:
        options["score_mod"] = lambda score, *_: soft_cap(score, attn.softcap)
    queries = q.transpose(0, 1)[None]  # [1, H, T, D]
    mixed = flex_attention(queries, k, v, scale=attn.scale, **options)
    return mixed[0].transpose(0, 1)


def answers(model, prompts, **operators):
    """Return the greedy answers of an engine in plain torch with these operators replaced."""
    settings = Settings(attention="torch", num_blocks=64, max_num_seqs=8, token_budget=32)
    engine = Engine(model, settings)
    engine.device.ops = engine.device.ops._replace(**operators)
    return engine.generate(prompts, GREEDY)


def main(directory="out/stdlib", *texts):
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    model = load_checkpoint(directory)
    tokenizer = load_tokenizer(directory)
    prompts = [tokenizer.encode(text) for text in texts or TEXTS]
    plain = answers(model, prompts)
    flex = answers(model, prompts, plan_attention=plan_attention, attend=attend)
    for expected, answer in zip(plain, flex, strict=True):
        print(f"torch {tokenizer.decode(expected)!r}\nflex  {tokenizer.decode(answer)!r}")
    if plain != flex:
        sys.exit("the answers differ")
    print("the answers are equal")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:  # about the model, or a text that is too long
        sys.exit(str(error))
