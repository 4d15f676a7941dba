"""
One decode step for eight requests, computed in eleven ways, from no cache at all to what the engine
does.

    python walkthrough.py        # stages 0 to 10, half a minute; in a terminal, Enter continues
    python walkthrough.py 3      # only stage 3

The prompts have 20 to 400 tokens, and each request already has the first token of its answer. The
step takes this token as input, to find the second one. The model is small, with random weights: 4
layers, 4 heads of size 32, fp32. So one token's keys and values (K and V) are 2 * 4 * 4 * 32
numbers, or 4 KiB.

Each stage prints how many KiB of K and V it keeps, how many it copies to append one token to each
text, and how many it gathers for attention. It also prints the number of launches (operations
started on the device) that store, gather and attend. All stages compute the same logits. Each stage
ends with a question; the answers are in REFERENCE.md. If a stage sends you to the solution of an
exercise (see exercises.py), you may want to do that exercise first.
"""

# ruff: noqa: E402  TRITON_INTERPRET must be set before triton is imported
import os
import sys
from contextlib import redirect_stdout, suppress
from functools import partial
from signal import SIG_DFL, SIGPIPE, signal

from common import announce, end_with_one_line

if __name__ == "__main__":
    end_with_one_line()
    signal(SIGPIPE, SIG_DFL)  # its reader may end first, as in `| head`
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

LENGTHS = (20, 30, 40, 60, 80, 130, 250, 400)  # tokens per prompt
REAL = 1018  # tokens with K and V after the step: all prompts, plus one token per request
IN_BLOCKS = 16 * 68  # slots in the requests' 2 + 2 + 3 + 4 + 6 + 9 + 16 + 26 blocks
L, H, D, S = 4, 4, 32, 16  # layers, heads, head size, block size


def prefilled(kind: str) -> Engine:
    """Return an engine that has computed the prompts (see stage 6), in randomly chosen blocks."""
    torch.manual_seed(8)
    config = model.GPTConfig(512, 512, n_layer=L, n_head=H, n_embd=H * D)
    gpt = model.GPT(config).to(DEVICE)
    for weight in gpt.requires_grad_(False).parameters():
        weight *= 5 if weight.dim() == 2 else 1  # else attention would hardly affect the logits
    engine = Engine(gpt, Settings(num_blocks=80, token_budget=2048, attention=kind, overlap=False))
    engine.scheduler.block_allocator.free = torch.randperm(80).tolist()
    engine.device.pool.kv.fill_(1e3)  # shows if a slot is read before it is written
    for n in LENGTHS:
        engine.add_request(n, torch.randint(512, (n,)).tolist(), fixed_length(100))
    engine.step()
    return engine


def next_step(engine, kv=None, **own):
    """
    Return the inputs for the engine's next step (a kernels.Batch), and a function that computes the
    first eight requests' logits [8, V]. The function uses plain torch except for the operators in
    `own`. It reads and writes `kv`, with one entry per layer, or by default the engine's pool. The
    engine itself does not advance.
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
    """Let the engine launch its next step, with overlap, and return that step's logits."""
    engine.overlap = True
    engine.step()
    return engine.in_flight.launched.logits


def row(name: str, values, width: int = 7):
    print(f"{name:14}" + "".join(f"{value:>{width}}" for value in values))


def no_cache(engine):
    """0. No cache: recompute the whole text for each token
    For each token, attention mixes the values of all tokens up to that one, weighted by how well
    their keys match its query. So the newest token needs K and V for the whole text. The K and V of
    earlier tokens never change, but without a cache, each step computes them all again. Here, it
    computes 1,018 tokens to get 8 new ones.
    Now read model.py: GPT.generate. One call computes many tokens. Whose logits are used?"""
    texts = [torch.tensor([r.tokens_so_far], device=DEVICE) for r in engine.scheduler.active]
    whole = [partial(engine.device.model, text) for text in texts]
    row("prompt, tokens", LENGTHS)
    row("ms", [f"{1e3 * median_seconds(compute, 3):.1f}" for compute in whole])
    return lambda: torch.cat([compute()[0][:, -1] for compute in whole])


def unpaged(engine):
    """Return all K and V [L, 2, 8, 512, H, D], copied from the blocks in text order."""
    tables = engine.device.known.block_tables[:8].long()
    return engine.device.pool.kv[:, :, tables].transpose(4, 5).flatten(3, 4)


def attend_each(q, caches, attn, batch):
    """Return attention [8, H, D], computed one request at a time from its K and V [2, n, H, D]."""
    pairs = zip(q[:, :, None], caches, strict=True)
    attend = partial(model.attention, attn_mask=None, scale=attn.scale)
    mixed = [attend(x, *kv.transpose(1, 2)) for x, kv in pairs]
    return torch.stack(mixed)[:, :, 0]


def cat(engine):
    """1. A cache that grows: torch.cat
    Keep K and V in one tensor for each request and layer. Then a step computes only one token per
    request. But a tensor cannot grow in place: torch.cat makes a new tensor that holds all tokens
    so far plus the new one. So the whole text is copied again for each new token. It would be
    better to reserve space in advance.
    Now read walkthrough.py: cat. How many tokens are copied in all while a text grows to 1,000?"""
    lengths = list(enumerate(LENGTHS))
    caches = [[kv[:, i, :n] for i, n in lengths] for kv in unpaged(engine)]

    def append(k, v, kv, batch):  # k, v [8, H, D]
        new = torch.stack((k, v), 1)[:, :, None]  # [8, 2, 1, H, D]
        return [torch.cat(pair, 1) for pair in zip(kv, new, strict=True)]

    return next_step(engine, caches, store_kv=append, attend=attend_each)[1]


def slabs(engine):
    """2. Slabs or blocks: a map of memory
    Give each request a slab for the longest text allowed (here 512 tokens), and write in place, so
    that nothing is copied. But most of a slab stays empty (internal fragmentation). Slabs that are
    just long enough would leave holes when their requests end (external fragmentation). In the map
    below, there is room for 1,400 tokens, but no hole is long enough for g. So cut the memory into
    blocks, here of 16 tokens. A text's blocks can be anywhere, so every free block is useful, and a
    text wastes at most 15 slots.
    Now read paged.py: BlockAllocator (exercise 1). Why is no free block too small or misplaced?"""

    def store(k, v, kv, batch):
        kv[:, range(8), batch.positions] = torch.stack((k, v))
        return [kv[:, i, : n + 1] for i, n in enumerate(LENGTHS)]

    print(f"slabs of 512: {REAL:,} of 4,096 slots are filled, {1 - REAL / 4096:.1%} waste")
    print(f"blocks of 16: {REAL:,} of {IN_BLOCKS:,} are filled, {1 - REAL / IN_BLOCKS:.1%} waste")
    used = f"{8 * 'a'}{12 * '.'}{10 * 'c'}{10 * '.'}{12 * 'e'}{6 * '.'}"  # 50 tokens per letter
    print(f"{used} 50 tokens each; b, d, f ended: {50 * used.count('.'):,} free, 600 in a row")
    print(f"{used.replace('.', 'g', 16)} in blocks of 50, g gets the {50 * 16} tokens it needs")
    return next_step(engine, unpaged(engine), store_kv=store, attend=attend_each)[1]


def post(engine):
    """3. The post's pool: gather, and pad on the left
    A request's block table says which block stores its tokens 0 to 15, which one stores the next
    16, and so on. A token's K and V are stored in slot block_table[position // 16] * 16 + position
    % 16. For example, three blocks have slots for positions 0 to 47, and the 49th token needs a
    fourth block. The blog post "Adding Paged Attention to NanoGPT" does not change its model, which
    needs contiguous K and V. So for every layer, request and head, the post gathers K and V from
    the blocks. It pads them on the left to the longest text, to put all requests into one batch.
    This approach makes good use of memory, but K and V are copied again, in many small pieces and
    with padding.
    Now read paged.py: gather_kv_from_pool (exercise 3). Which slot holds request 2's token 35?"""
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
    print(f"{2 * L * 8 * H} gathers of K or V; the result is {1 - REAL / 8 / longest:.0%} padding")
    return next_step(engine, attend=attend)[1]


def pool(engine):
    """4. One tensor and a slot mapping: one gather for each layer
    The pool is one tensor, so a single indexing operation with all block tables gathers K and V for
    all requests and heads. In each layer, this replaces the 64 gathers of stage 3. Writing does not
    need the tables: the slots for the step's new tokens (the slot mapping) are computed once for
    all layers. In one layer's pool [2, blocks, H, S, D], each slot has one row of D numbers per
    head, which is row (block * H + head) * S + offset. The gather still pads, now on the right, so
    most of what it copies is padding.
    Now read ops/gather.py: pool_rows. With S = 4 and 2 heads, which rows belong to slot 21?"""
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
    A ninth request arrives, with a prompt of 64 tokens. In a rectangular batch, all nine requests
    would be padded to 64 tokens, and most rows in the model's matrix products would be padding. But
    only attention mixes tokens. Everything else handles each token independently. So put all new
    tokens on one axis, one request after another. `query_start` says where each request begins, and
    the context lengths say how much each request sees. (From this stage on, the gather only pads
    contexts of similar length together, so it also copies less.)
    Now read kernels.py: Batch. How many rows do 3 decodes and a chunk of 100 take? And padded?"""
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
    The scheduler plans each step. Every running request decodes one token, and the rest of a token
    budget (here 16) goes to prompt chunks: c[0:+11] means that c computes 11 tokens, starting at
    position 0. In the table below, four requests (and f, a fork of a) share six blocks of four
    tokens. Step 1: b finds its first block in the prefix cache (a hit), and a copies the block that
    it shares with f before writing to it (copy-on-write). Step 2: c and d do not fit, so they wait
    (backpressure). Steps 3 and 4: c and d enter, and get blocks that are free or evicted from the
    cache. Step 5: c needs another block and none is left. So d, the request that arrived last, is
    preempted: it loses its blocks and waits. Step 6: d enters again, finds two of its blocks still
    in the cache, and only computes the rest.
    Now read paged.py: Scheduler._preempt_for (exercise 9). Who goes if d needs a block, not c?"""
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
    A softmax divides by a sum over all keys, so it seems to need all keys at once. But online
    softmax takes one block at a time. For each query, it keeps the maximum score so far, the sum of
    the weights e^(score - maximum), and the total of the values times their weights. If a block has
    a new maximum, first multiply sum and total by e^(old - new). At the end, total / sum is the
    answer. (Two separate parts of a text can be merged in the same way: rescale both to the higher
    maximum, then add.) Now blocks are read in place, without a gather.
    Now read kernels.py: merge (exercise 13). What would go wrong without the factors e^(..)?"""

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
    """One program: one head of one request, TILE keys at a time. Stage 9 explains split and lse."""
    head, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, d = tl.arange(0, TILE)[:, None], tl.arange(0, D)[None, :]
    query = tl.load(q + (request * H + head) * D + d)  # [1, D]
    context = tl.load(context_lens + request)
    top, weights = tl.full([1, 1], -float("inf"), tl.float32), tl.zeros([1, 1], tl.float32)
    total = tl.zeros([1, D], tl.float32)
    for start in range(split * TILE, context, SPLITS * TILE):
        position, real = start + t, start + t < context  # [TILE, 1]
        block = tl.load(block_tables + request * M + position // S, mask=real)
        rows = kv + ((block * H + head) * S + position % S) * D + d  # as in stage 4
        k = tl.load(rows, mask=real, other=0.0)  # [TILE, D]
        v = tl.load(rows + k_to_v, mask=real, other=0.0)
        score = tl.where(real, tl.sum(k * query, axis=1, keep_dims=True) * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0, keep_dims=True))
        weight, shrink = tl.exp(score - new_top), tl.exp(top - new_top)
        weights = weights * shrink + tl.sum(weight, axis=0, keep_dims=True)
        total = total * shrink + tl.sum(weight * v, axis=0, keep_dims=True)
        top = new_top
    index = (request * H + head) * SPLITS + split
    weights = tl.maximum(weights, 1e-30)  # avoids 0 / 0 for a split without any tiles
    tl.store(out + index * D + d, total / weights)
    tl.store(lse + index + tl.zeros([1, 1], tl.int32), top + tl.log(weights))


def launch(q, kv, attn, batch, splits):
    """Launch the kernel, and merge its splits. Return [8, H, D]."""
    out = q.new_empty(8, H, splits, D)
    lse = q.new_empty(8, H, splits)
    pointers = q.contiguous(), kv, out, lse, batch.block_tables, batch.context_lens
    sizes = kv.stride(0), batch.block_tables.stride(0), H, S, D, 64, splits
    attend_kernel[H, 8, splits](*pointers, attn.scale, *sizes)
    return (lse.softmax(-1)[..., None] * out).sum(2)


def kernel(engine):
    """8. Attention in one kernel: a program for each KV head and request
    On a GPU, a kernel runs many copies of a program in parallel. Here, a program is the inner loop
    of stage 7 for one KV head of one request: it reads the block table, then K and V in place. So
    each layer's attention is a single launch, and does not copy anything. (On a CPU, Triton
    interprets the kernel. This shows that the kernel is correct, but not how fast it is.) However,
    an H200 has 132 processors, and a single request keeps only 4 of them busy.
    Now read kernels.py: attention_kernel. Why are a KV head's query heads in one program?"""
    print(f"{H} KV heads * 8 requests = {H * 8} programs; {H} for a single request")
    return next_step(engine, attend=partial(launch, splits=1))[1]


def splits(engine):
    """9. Splits: several programs for one context (flash-decoding)
    A third axis of the grid divides each context. With 4 splits, the first program takes tiles 0,
    4, 8, .. (of 64 keys each), the second one takes tiles 1, 5, 9, .., and so on. Each split stores
    its own result, total / sum, as well as its log-sum-exp (lse), maximum + log(sum). The lse is
    the logarithm of the sum of e^score over the split's keys. A split's share of the whole softmax
    is its e^lse divided by the sum of all splits' e^lse. So the answer is the sum of the splits'
    results, each multiplied by its share.
    Now read kernels.py: load_state. If a split does not have any tiles, what is its share?"""
    print(f"request 7's tiles, by split: {[list(range(split, 7, 4)) for split in range(4)]}")
    print(f"{H} heads * 4 splits * 8 requests = {H * 4 * 8} programs; {H * 4} for a single request")
    return next_step(engine, attend=partial(launch, splits=4))[1]


def overlapped(engine):
    """10. Graphs and overlap: get the host out of the way
    For each step, the host only sends which rows decode, and each row's last block, which changes
    once in 16 steps. Tokens, positions and lengths stay on the device, where the next step reads
    them. If the number of rows is padded to one of a few sizes, steps of the same size make the
    same launches on the same memory. So these launches can be recorded once as a CUDA graph, and
    then replayed by a single launch. Moreover, a plan needs to know lengths but not tokens. So the
    host can plan the next step while the device computes this one, using None in place of a pending
    token (overlap). A step then takes only the longer of the two times. (On a CPU, it takes the sum
    of both. CPU steps are also recorded; see record in ops/cpu.py.)
    Now read engine/engine.py: Engine.step. What would a plan have to wait for without overlap?"""
    done = [next_logits(engine).clone()]
    print("request 0's answer during the step:", engine.scheduler.active[0].generated_tokens)
    return lambda: done.pop() if done else next_logits(engine)


STAGES = [no_cache, cat, slabs, post, pool, flat, planned, online, kernel, splits, overlapped]
TABLE = """\
KiB of K and V per step, and launches   kept    copied  gathered  launches
0. No cache                                0         0         0        32
1. A cache that grows                  4,072     4,040         0        64
2. Slabs or blocks                    16,384         0         0        36
3. The post's pool                     4,352         0    12,832       264
4. One tensor and a slot mapping       4,352         0    13,312        12
5. One flat token axis                 4,352         0     4,928        52
6. The scheduler                       4,352         0     4,672        44
7. Online softmax                      4,352         0         0       276
8. Attention in one kernel             4,352         0         0         8
9. Splits                              4,352         0         0        12
10. Graphs and overlap, with a GPU     4,352         0         0         1
"""


def show(number, before):
    """Print a stage's text and run it. Return its logits, which must equal `before`, if given."""
    *text, question = STAGES[number].__doc__.split("\n")
    print(*text, "", sep="\n")
    if number in (8, 9) and not triton:
        print("skipped: this stage needs the package triton (pip install triton)\n")
        return before
    compute = STAGES[number](prefilled("auto" if number == 10 else "torch"))
    heading, *accounts = TABLE.splitlines()
    print(heading)
    print(accounts[number])
    logits = compute()
    if number in (8, 9) and INTERPRETED:
        print("interpreted, so not timed")
    else:
        print(f"{1e3 * median_seconds(lambda: compute().cpu(), 3):.1f} ms per step")
    if before is not None:
        torch.testing.assert_close(logits, before, atol=1e-4, rtol=0)
        gap = (logits - before).abs().max()
        print("the same logits as before,", f"within {gap:.0e}" if gap else "to the bit")
    print(question + "\n")
    return logits


def main():
    numbers = [str(number) for number in range(11)]
    chosen = sys.argv[1:] or numbers
    if chosen[0] in ("-h", "--help"):
        return print(__doc__)
    if not set(chosen) <= set(numbers):
        sys.exit(f"{' '.join(chosen)}: wanted a stage from 0 to 10, or no argument for all of them")
    torch.set_num_threads(1)  # the tensors are tiny
    logits = None
    if chosen[0] != "0":
        with redirect_stdout(None):
            logits = show(int(chosen[0]) - 1, None)
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()  # neither is redirected
    for i, number in enumerate(chosen):
        if i > 0 and on_terminal:
            input("Press Enter to go on ")
        logits = show(int(number), logits)
    if chosen == numbers:
        print(TABLE)


if __name__ == "__main__":
    with suppress(EOFError, KeyboardInterrupt):  # exit quietly on Ctrl-D and Ctrl-C
        main()
