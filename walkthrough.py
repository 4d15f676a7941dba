"""
One decode step of eight requests, served eleven ways: from no cache at all to what the engine does.

    python walkthrough.py        # stages 0 to 10, half a minute; on a terminal, Enter goes on
    python walkthrough.py 3      # that stage alone

The prompts have 20 to 400 tokens, and each request has got the first token of its answer: the step
computes that token, to find the second. The model is small and random: 4 layers, 4 heads of 32, in
fp32, so keys and values (K and V) of a token take 2 * 4 * 4 * 32 numbers, 4 KiB. Each stage says
how many KiB of them it keeps, copies to append a token to each text, and gathers to attend to them,
and its launches, to store, gather and attend. All give the same logits. Answers: REFERENCE.md.
"""

# ruff: noqa: E402  triton is imported only once it is known where kernels run
import os
import sys
from contextlib import redirect_stdout, suppress
from functools import partial

from common import announce, end_with_one_line

if __name__ == "__main__":
    end_with_one_line()
    announce("loading torch")

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("TRITON_INTERPRET", "1" if DEVICE == "cpu" else "0")

import model
import paged
from assets.workloads import fixed_length, median_seconds
from engine.engine import Engine
from kernels import INTERPRETED, jit, tl, triton
from ops import gather, inputs
from ops.choice import TORCH_OPS
from params import Settings

LENGTHS = (20, 30, 40, 60, 80, 130, 250, 400)  # tokens of the prompts
REAL = 1018  # tokens that have K and V after the step: the prompts', and one more of each request
IN_BLOCKS = 16 * 68  # tokens that their 2 + 2 + 3 + 4 + 6 + 9 + 16 + 26 blocks have room for
L, H, D, S = 4, 4, 32, 16  # layers, heads, head size, block size


def prefilled(kind: str) -> Engine:
    """An engine that has computed the prompts (see stage 6), into blocks in no order."""
    torch.manual_seed(8)
    config = model.GPTConfig(512, 512, n_layer=L, n_head=H, n_embd=H * D)
    gpt = model.GPT(config).to(DEVICE)
    for weight in gpt.requires_grad_(False).parameters():
        weight *= 5 if weight.dim() == 2 else 1  # else attention would hardly change a logit
    engine = Engine(gpt, Settings(num_blocks=80, token_budget=2048, attention=kind, overlap=False))
    engine.scheduler.block_allocator.free = torch.randperm(80).tolist()
    engine.device.pool.kv.fill_(1e3)  # so that reading an unwritten slot is noticed
    for n in LENGTHS:
        engine.add_request(n, torch.randint(512, (n,)).tolist(), fixed_length(100))
    engine.step()
    return engine


def next_step(engine, kv=None, **own):
    """
    The inputs of the engine's next step, a kernels.Batch, and a function that computes its logits
    [8, V], of the first eight requests, with plain torch and, in its place, `own` operators; on the
    pool, or on `kv`, which has something for each layer. The engine itself does not move.
    """
    plan = engine.scheduler.plan()
    device = engine.device
    device.fill_rows(*plan.admitted or plan.decodes)
    packed = engine.runner.pack(plan)
    uploaded = inputs.upload(packed.inputs, DEVICE)
    batch, _ = inputs.lay_out(uploaded, packed.shape, plan, device.known, TORCH_OPS._replace(**own))
    pool = device.pool.kv
    batch.attention_plans = {0: gather.plan_attention_torch(batch, H, pool[0])}

    def compute():
        x = device.model.hidden(batch, pool if kv is None else kv)
        return device.model.logits(x[batch.logits_index], batch.ops)[:8]

    return batch, compute


def next_logits(engine):
    """Let the engine launch its next step, overlapped, whose logits these will be."""
    engine.overlap = True
    engine.step()
    return engine.in_flight.launched.logits


def row(name: str, values, width: int = 7):
    print(f"{name:14}" + "".join(f"{value:>{width}}" for value in values))


def no_cache(engine):
    """0. No cache: the whole text again for each token
    Attention mixes, for each token, the values of all tokens up to itself, weighted by how well
    their keys fit its query. So the newest token needs K and V of the whole text, and those of
    earlier tokens never change. Without a cache a step computes them all again: 1,018 for 8 new.
    Now read model.py: GPT.generate. Of all tokens that one call computes, whose logits are used?"""
    texts = [torch.tensor([r.tokens_so_far], device=DEVICE) for r in engine.scheduler.active]
    whole = [partial(engine.device.model, text) for text in texts]
    row("prompt, tokens", LENGTHS)
    row("ms", [f"{1e3 * median_seconds(compute, 3):.1f}" for compute in whole])
    return lambda: torch.cat([compute()[0][:, -1] for compute in whole])


def unpaged(engine):
    """All K, V out of their blocks, in the order of the texts: [L, 2, 8, 512, H, D]."""
    tables = engine.device.known.block_tables[:8].long()
    return engine.device.pool.kv[:, :, tables].transpose(4, 5).flatten(3, 4)


def attend_each(q, caches, attn, batch):
    """One request after the other attends to its K, V [2, n, H, D]. Returns [8, H, D]."""
    pairs = zip(q[:, :, None], caches, strict=True)
    attend = partial(model.attention, attn_mask=None, scale=attn.scale)
    mixed = [attend(x, *kv.transpose(1, 2)) for x, kv in pairs]
    return torch.stack(mixed)[:, :, 0]


def cat(engine):
    """1. A cache that grows: torch.cat
    K and V are kept, a tensor for each request and layer, and a step computes one token for each
    request. But a tensor does not grow in place: torch.cat makes a new one, of all tokens so far
    and one more. So a text is copied again for each of its tokens. Better: reserve room.
    Now read walkthrough.py: cat. How many tokens does a text of 1,000 copy in all?"""
    lengths = list(enumerate(LENGTHS))
    caches = [[kv[:, i, :n] for i, n in lengths] for kv in unpaged(engine)]

    def append(k, v, kv, batch):  # k, v [8, H, D]
        new = torch.stack((k, v), 1)[:, :, None]  # [8, 2, 1, H, D]
        return [torch.cat(pair, 1) for pair in zip(kv, new, strict=True)]

    return next_step(engine, caches, store_kv=append, attend=attend_each)[1]


def slabs(engine):
    """2. Slabs against blocks: a map of memory
    Each request gets a slab as long as its text may become, here 512 tokens, and a step writes in
    place: nothing is copied. But most of a slab stays empty (internal fragmentation). Slabs that
    are just long enough leave holes when they end (external fragmentation): in the map, 1,400
    tokens are free, but no hole is long enough for g. So memory is cut into blocks, here of 16
    tokens. They may lie anywhere, so each free one is of use; a text wastes at most 15 slots.
    Now read paged.py: BlockAllocator. Why is no free block ever too small or in a wrong place?"""

    def store(k, v, kv, batch):
        kv[:, range(8), batch.positions] = torch.stack((k, v))
        return [kv[:, i, : n + 1] for i, n in enumerate(LENGTHS)]

    print(f"slabs of 512: {REAL:,} of 4,096 tokens are filled, {1 - REAL / 4096:.1%} waste")
    print(f"blocks of 16: {REAL:,} of {IN_BLOCKS:,} are filled, {1 - REAL / IN_BLOCKS:.1%} waste")
    used = f"{8 * 'a'}{12 * '.'}{10 * 'c'}{10 * '.'}{12 * 'e'}{6 * '.'}"  # of 50 tokens each
    print(f"{used} 50 tokens each; b, d, f ended: {50 * used.count('.'):,} free, 600 together")
    print(f"{used.replace('.', 'g', 16)} in blocks of 50, g has the {50 * 16} tokens that it wants")
    return next_step(engine, unpaged(engine), store_kv=store, attend=attend_each)[1]


def post(engine):
    """3. The post's pool: gather, pad on the left
    A block table says which block has a request's tokens 0 to 15, which the next 16, and so on. A
    token's place, its slot, is block_table[position // 16] * 16 + position % 16. Three blocks have
    slots for positions 0 to 47; for the 49th token the table gets a fourth. "Adding Paged Attention
    to NanoGPT" keeps its model, which wants K and V side by side: for every layer, request and head
    they are gathered from the blocks and padded on the left to the longest, so that all requests
    are one batch. Memory is well used, but K and V are copied again, in many pieces, and padded.
    Now read paged.py: gather_kv_from_pool. In which slot are K and V of request 2's token 35?"""
    layers = [block.attn for block in engine.device.model.h]
    longest = LENGTHS[-1] + 1

    def attend(q, kv, attn, batch):
        padded = q.new_zeros(2, 8, H, longest, D)
        mask = q.new_zeros(8, 1, 1, longest)
        for i, r in enumerate(engine.scheduler.active):
            n = r.num_tokens
            mask[i, ..., :-n] = -torch.inf
            for head in range(H):
                where = engine.device.pool, r.block_table, S, n, layers.index(attn), head
                padded[:, i, head, -n:] = torch.cat(paged.gather_kv_from_pool(*where))
        return model.attention(q[:, :, None], *padded, mask, attn.scale)[:, :, 0]

    a, b, c = engine.scheduler.active[2].block_table
    print(f"request 2, block table {[a, b, c]}: positions 0 to 15 in slots {a * S} to {a * S + 15}")
    print(f"16 to 31 in {b * S} to {b * S + 15}, 40 in block_table[40 // 16] * 16 + 8: {c * S + 8}")
    print(f"{2 * L * 8 * H} gathers of K or V, filled to {1 - REAL / 8 / longest:.0%} with padding")
    return next_step(engine, attend=attend)[1]


def pool(engine):
    """4. One tensor and a slot mapping: a gather for each layer
    The pool is one tensor, so one indexing with all block tables gathers K and V of all requests
    and heads. Writing takes no table: the slots of a step's tokens, the slot mapping, are found
    once for all layers. In a layer's pool, [2, blocks, H, S, D], a slot has a row of D numbers for
    each head: row (block * H + head) * S + offset. In each layer one gather does for the 64 before.
    It still pads, now on the right, so most of what it copies is not real.
    Now read ops/gather.py: pool_rows. With S = 4 and 2 heads, which are the rows of slot 21?"""
    kv = engine.device.pool.kv[0]
    batch, compute = next_step(engine)
    width = batch.block_tables.shape[1] * S
    everything = gather.gather(batch, slice(8), slice(8), width, H, kv, 0)
    batch.attention_plans[0].calls[:] = [everything]
    rows = gather.pool_rows(batch.slot_mapping, kv)[0]
    slot = batch.slot_mapping[2].item()
    print(f"slot {slot}: offset {slot % S} of block {slot // S}; K in rows {rows[:, 2].tolist()}")
    return compute


def flat(engine):
    """5. One flat token axis: decodes and a chunk of a prompt in one pass
    A ninth request comes, with a prompt of 64 tokens. In a rectangle, all nine would be padded to
    64 tokens, and most rows of the model's matrix products would be padding. But each token is
    computed by itself, except for attention. So all new tokens are laid on one axis, one request
    behind the other; `query_start` says where each begins, its context length what it sees. (The
    repo's gather pads only contexts of similar length to each other, so it copies less, too.)
    Now read kernels.py: Batch. How many rows are 3 decodes and a chunk of 100; how many, padded?"""
    engine.add_request(64, torch.randint(512, (64,)).tolist(), fixed_length(1))
    batch, compute = next_step(engine)
    for name, values in ("position", batch.positions), ("slot", batch.slot_mapping):
        first = values[:11].tolist()
        row(name, [*first, "..", values[-1].item()], 6)
    row("query_start", batch.query_start.tolist(), 6)
    row("context_lens", batch.context_lens_host, 6)
    print(f"padded 9 * 64 = {9 * max(batch.query_lens_host)} rows, on one axis {len(batch.tokens)}")
    return compute


def planned(engine):
    """6. The scheduler: who computes what, in which blocks
    Before each step the scheduler plans it: every running request decodes a token, the rest of a
    budget (here 16 tokens) goes to chunks of prompts: c[0:+11] computes c's first 11 tokens. Below,
    four requests and f, a fork of a, have six blocks of four tokens and meet it all: backpressure,
    a hit, copy-on-write, eviction, preemption, resume. The page's guided tour explains them.
    Now read paged.py: Scheduler._preempt_for. Who would go if d needed a block, not c?"""
    scheduler = paged.Scheduler(max_kv_tokens=24)  # six blocks of four
    prompts = {"a": b"ABCDEFGHIJ", "b": b"ABCDEFGH", "c": b"KLMNOPQRSTU", "d": b"klmnopqrs"}
    print(f"  {'computes':25} {'block tables':29} what happens")
    for step, coming in enumerate(["a", "b", "cd"] + 5 * [""]):
        for name in coming:
            scheduler.add_request(paged.Request(name, list(prompts[name]), 3))
        plan = scheduler.plan(step)
        work = " ".join(f"{r.id}[{r.num_filled_slots}:+{n}]" for r, n in plan.work)
        tables = " ".join(f"{r.id}{r.block_table}" for r in scheduler.running)
        notes = [f"{r.id} enters, {r.num_filled_slots} hit" for r in plan.admitted]
        notes += [f"block {block} evicted" for block in plan.evicted]
        notes += [f"block {old} copied to {new}" for new, old in plan.copies.items()]
        notes += [f"{r.id} preempted" for r in plan.preempted]
        notes += [f"{r.id} waits" for r in scheduler.waiting]
        ended = scheduler.update(plan, [100] * len(plan.sampled))
        notes += [f"{r.id} ends" for r in ended]
        print(f"{step} {work:25} {tables:29} {', '.join(notes)}")
        if step == 0:
            scheduler.fork(scheduler.active[0], "f")
    return partial(next_logits, engine)


def online(engine):
    """7. Online softmax: attention block by block
    A softmax divides by a sum over all keys, so it seems to need them at once. Online softmax takes
    a block at a time and keeps, for each query, the maximum of the scores, the sum of the weights
    e^(score - maximum), and the total of the values, so weighted. When a block has a new maximum,
    sum and total are first multiplied by e^(old - new). At the end total / sum is the answer. (So
    two parts merge, too: bring both to the higher maximum, then add.) Blocks are read in place.
    Now read kernels.py: merge. What if two parts were merged without factors e^(..)?"""

    def attend(q, kv, attn, batch):
        out = torch.empty_like(q)
        for i, r in enumerate(engine.scheduler.active):
            top, weights, total = q.new_tensor(-torch.inf), 0.0, 0.0
            for j, block in enumerate(r.block_table):
                k, v = kv[:, block, :, : r.num_tokens - j * S]  # views, [H, 16, D]
                score = k @ q[i, :, :, None] * attn.scale  # [H, 16, 1]
                new_top = torch.maximum(top, score.amax(1, keepdim=True))
                weight = (score - new_top).exp()
                shrink = (top - new_top).exp()
                weights = weights * shrink + weight.sum(1, keepdim=True)
                total = total * shrink + weight.mT @ v  # [H, 1, D]
                top = new_top
            out[i] = (total / weights)[:, 0]
        return out

    return next_step(engine, attend=attend)[1]


@jit
def attend_kernel(
    q, kv, out, lse, block_tables, context_lens, scale, k_to_v, M,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A program: one head of one request, TILE keys at a time. `split`, `lse`: see stage 9."""
    head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, d = tl.arange(0, TILE)[:, None], tl.arange(0, D)[None, :]
    query = tl.load(q + (request * H + head) * D + d)  # [1, D]
    context = tl.load(context_lens + request)
    top, weights = tl.full([1, 1], -float("inf"), tl.float32), tl.zeros([1, 1], tl.float32)
    total = tl.zeros([1, D], tl.float32)
    for start in range(split * TILE, context, SPLITS * TILE):
        position, real = start + t, start + t < context  # [TILE, 1]
        block = tl.load(block_tables + request * M + position // S, mask=real)
        at = kv + ((block * H + head) * S + position % S) * D + d  # stage 4's rows
        k = tl.load(at, mask=real, other=0.0)  # [TILE, D]
        v = tl.load(at + k_to_v, mask=real, other=0.0)
        score = tl.where(real, tl.sum(k * query, axis=1, keep_dims=True) * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0, keep_dims=True))
        weight, shrink = tl.exp(score - new_top), tl.exp(top - new_top)
        weights = weights * shrink + tl.sum(weight, axis=0, keep_dims=True)
        total = total * shrink + tl.sum(weight * v, axis=0, keep_dims=True)
        top = new_top
    to = (request * H + head) * SPLITS + split
    weights = tl.maximum(weights, 1e-30)  # a split may have no tile
    tl.store(out + to * D + d, total / weights)
    tl.store(lse + to + tl.zeros([1, 1], tl.int32), top + tl.log(weights))


def launch(q, kv, attn, batch, splits):
    """Launch the kernel, and merge the splits: [8, H, D]."""
    out = q.new_empty(8, H, splits, D)
    lse = q.new_empty(8, H, splits)
    pointers = q.contiguous(), kv, out, lse, batch.block_tables, batch.context_lens
    sizes = kv.stride(0), batch.block_tables.stride(0), H, S, D, 64, splits
    attend_kernel[H, 8, splits](*pointers, attn.scale, *sizes)
    return (lse.softmax(-1)[..., None] * out).sum(2)


def kernel(engine):
    """8. The same as one kernel: a program for each KV head and request
    A GPU runs a kernel as many programs at once. Here a program is stage 7's inner loop for one KV
    head of one request: it reads the block table, then K and V where they are. So attention of a
    layer is one launch, and copies nothing. (On a CPU Triton interprets it: that shows that it is
    right, not how fast.) But an H200 has 132 processors, and one request gives 4 of them work.
    Now read kernels.py: attention_kernel. Why are a KV head's query heads in one program?"""
    print(f"{H} KV heads * 8 requests = {H * 8} programs; {H} for a request alone")
    return next_step(engine, attend=partial(launch, splits=1))[1]


def splits(engine):
    """9. Splits: several programs for one context (flash-decoding)
    One more axis of the grid cuts a context: of 4 splits the first takes the tiles (of 64 keys) 0,
    4, 8, .., the second 1, 5, 9, .. Each leaves its own mixture, total / sum, and its log-sum-exp,
    maximum + log(sum): the logarithm of the sum of its e^score. Its share of the whole softmax is
    e^lse, divided by that of all splits together. The mixtures, weighted by share, are the answer.
    Now read kernels.py: load_state. Why are splits merged in order, not as they come?"""
    print(f"request 7's tiles, by split: {[list(range(split, 7, 4)) for split in range(4)]}")
    print(f"{H} heads * 4 splits * 8 requests = {H * 4 * 8} programs; {H * 4} for a request alone")
    return next_step(engine, attend=partial(launch, splits=4))[1]


def overlapped(engine):
    """10. Graphs and overlap: the host out of the way
    Between two steps little changes in what the host sends: which rows decode, and the last block
    of each, new once in 16 steps. Tokens, positions and lengths stay on the device, where the next
    step reads them. If rows are padded, after all, to a few sizes, steps of a size are the same
    launches on the same memory: recorded once as a CUDA graph, they are one. A plan needs lengths,
    not tokens: the host plans the next step while the device computes this one, with None for a
    token to come (overlap). So a step takes the longer of both times; on a CPU it takes their sum,
    and is recorded, too (ops/cpu.py: record).
    Now read engine/engine.py: Engine.step. What would a plan have to wait for, without overlap?"""
    done = [next_logits(engine).clone()]
    print("request 0's answer while it is computed:", engine.scheduler.active[0].generated_tokens)
    return lambda: done.pop() if done else next_logits(engine)


STAGES = [no_cache, cat, slabs, post, pool, flat, planned, online, kernel, splits, overlapped]
TABLE = """\
KiB of K and V in a step, launches      kept    copied  gathered  launches
0. No cache                                0         0         0        32
1. A cache that grows                  4,072     4,040         0        64
2. Slabs against blocks               16,384         0         0        36
3. The post's pool                     4,352         0    12,832       264
4. One tensor and a slot mapping       4,352         0    13,312        12
5. One flat token axis                 4,352         0     4,928        52
6. The scheduler                       4,352         0     4,672        44
7. Online softmax                      4,352         0         0       276
8. The same as one kernel              4,352         0         0         8
9. Splits                              4,352         0         0        12
10. Graphs and overlap, with a GPU     4,352         0         0         1
"""


def show(number, before):
    """Run a stage, with its text before and after. Returns its logits, which must be as before."""
    *text, question = STAGES[number].__doc__.split("\n")
    print(*text, "", sep="\n")
    if number in (8, 9) and not triton:
        print("this stage is left out: it needs the package triton (pip install triton)\n")
        return before
    compute = STAGES[number](prefilled("auto" if number == 10 else "torch"))
    heading, *accounts = TABLE.splitlines()
    print(heading)
    print(accounts[number])
    logits = compute()
    if number in (8, 9) and INTERPRETED:
        print("interpreted: no time")
    else:
        print(f"{1e3 * median_seconds(lambda: compute().cpu(), 3):.1f} ms a step")
    if before is not None:
        torch.testing.assert_close(logits, before, atol=1e-4, rtol=0)
        print(f"logits as before, to {(logits - before).abs().max():.0e}")
    print(question + "\n")
    return logits


def main():
    numbers = [str(number) for number in range(11)]
    chosen = sys.argv[1:] or numbers
    if chosen[0] in ("-h", "--help"):
        return print(__doc__)
    if not set(chosen) <= set(numbers):
        sys.exit(f"{' '.join(chosen)}: wanted a stage, 0 to 10, or nothing for all of them")
    torch.set_num_threads(1)  # the tensors are tiny
    logits = None
    if chosen[0] != "0":
        with redirect_stdout(None):
            logits = show(int(chosen[0]) - 1, None)
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()  # neither is piped
    for i, number in enumerate(chosen):
        if i > 0 and on_terminal:
            input("Enter goes on ")
        logits = show(int(number), logits)
    if chosen == numbers:
        print(TABLE)


if __name__ == "__main__":
    with suppress(EOFError, KeyboardInterrupt):  # Ctrl-D and Ctrl-C end it
        main()
