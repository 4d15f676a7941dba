"""
A step's fused Triton operators, except linear layers and norms (linear.py). They prepare the inputs
and embeddings, and process q, k and v between the QKV product and the attention kernel. In plain
torch, a decode step of a small model makes about 230 kernel launches, which take most of its time.
Here it makes 70 to 90, and most of them overlap thanks to programmatic dependent launch. Attention
and the KV pool are in kernels.py. ops/choice.py combines all operators in one table.

    q, kv = project_qkv(y, attn, kv, batch)    # one or two launches, which also store K and V

Each operator has the same signature as its torch twin in model.py. Letters: n requests that decode,
M blocks per table, S block size, R rows, P parts of a sum (split-K).
"""

from torch import Tensor

import model
from kernels import Batch, gdc_wait, jit, pdl_options, pdl_wait, pool_offset, tl, triton
from ops.inputs import KnownRows, ModelInputs, StepInputs
from ops.linear import launch_linear, let_attention_start, use_triton, wait

# --------------------------------------------------------------------------------------------------
# Inputs and embeddings


@jit
def decode_inputs_kernel(
    rows, last_blocks, given_tokens, given_positions, last_token, context_len, block_tables,
    tokens, positions, slots, lens, tables, padding_row, M,
    WIDTH: tl.constexpr, S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n,): each program does what decode_inputs does, for one row."""
    pdl_wait(PDL)
    i = tl.program_id(0)
    m = tl.arange(0, WIDTH)
    row = tl.load(rows + i)
    last_block = tl.load(last_blocks + i)
    given = tl.load(given_tokens + i)
    token = tl.where(given < 0, tl.load(last_token + row), given)
    position = tl.where(given < 0, tl.load(context_len + row), tl.load(given_positions + i))
    table = block_tables + row * M
    blocks = tl.load(table + m, mask=m < M, other=0).to(tl.int64)
    blocks = tl.where(m == position // S, last_block, blocks)
    tl.store(table + position // S, last_block.to(tl.int32))
    tl.store(tables + i.to(tl.int64) * M + m, blocks.to(tl.int32), mask=m < M)
    tl.store(tokens + i, token)
    tl.store(positions + i, position)
    tl.store(slots + i, last_block * S + position % S)
    tl.store(lens + i, (position + 1).to(tl.int32))
    tl.store(context_len + row, position + 1, mask=row != padding_row)


def decode_inputs(step: StepInputs, known: KnownRows) -> ModelInputs:
    """Like inputs.decode_inputs, but with one launch instead of a dozen."""
    last_token, context_len, block_tables, _, S = known
    rows = step.rows
    n = len(rows)
    M = block_tables.shape[1]
    tokens, positions, slots = rows.new_empty(3, n)
    lens = block_tables.new_empty(n)
    tables = block_tables.new_empty(n, M)
    results = ModelInputs(tokens, positions, slots, lens, tables)
    if n == 0:
        return results
    state = (rows, step.last_blocks, step.given_tokens, step.given_positions)
    state += (last_token, context_len, block_tables)
    padding_row = len(last_token) - 1
    width = triton.next_power_of_2(M)
    shape = {"WIDTH": width, "S": S}
    decode_inputs_kernel[(n,)](*state, *results, padding_row, M, **shape, **pdl_options(rows))
    return results


@jit
def embed_kernel(
    tokens, positions, wte, wpe, out, scale,
    C: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """
    Grid (T,): each program does what embed does, for one token. It does not call pdl_wait, which
    would let the next kernel start early. Later kernels read the step's inputs without waiting,
    which is safe only if everything before this kernel has ended.
    """
    if PDL:
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    x = tl.load(wte + tl.load(tokens + t) * C + c, mask=c < C).to(tl.float32) * scale
    if wpe is not None:
        x += tl.load(wpe + tl.load(positions + t) * C + c, mask=c < C).to(tl.float32)
    tl.store(out + t * C + c, x.to(out.dtype.element_ty), mask=c < C)


def embed(tokens: Tensor, positions: Tensor, wte, wpe, scale: float) -> Tensor:
    """
    Return scale * wte(tokens) + wpe(positions), shape [T, C]. Tokens and positions are int64 [T],
    and wpe may be None.
    """
    assert wte.weight.is_contiguous(), "embeddings must be contiguous"
    wpe_weight = None
    if wpe is not None:
        wpe_weight = wpe.weight
        assert wpe_weight.is_contiguous(), "embeddings must be contiguous"
    T = len(tokens)
    C = wte.weight.shape[1]
    out = wte.weight.new_empty(T, C)
    operands = (tokens, positions, wte.weight, wpe_weight)
    width = triton.next_power_of_2(C)
    shape = {"C": C, "WIDTH": width}
    embed_kernel[(T,)](*operands, out, scale, **shape, **pdl_options(out))
    return out


# --------------------------------------------------------------------------------------------------
# Queries, keys and values

HEADS_AT_ONCE = 4  # heads per program in norm_rope_store_kernel


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arguments unchanged: norm_rope_store computes cosines and sines itself."""
    return positions, frequencies


@jit
def norm_weights(
    q_weight, k_weight, h, i, H: tl.constexpr, Hk: tl.constexpr, HALF: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """
    Load half of the norm weights of heads h, from q_weight for the first H heads and from k_weight
    for the next Hk. The weights of consecutive heads are APART numbers apart, or 0 if all heads
    share the same weights.
    """
    q = (h < H)[:, None]
    k = (h >= H)[:, None] & (h < H + Hk)[:, None]
    real = (i < HALF)[None, :]
    of_q = tl.load(q_weight + h[:, None] * APART + i[None, :], mask=real & q, other=0.0)
    of_k = tl.load(k_weight + (h - H)[:, None] * APART + i[None, :], mask=real & k, other=0.0)
    return of_q + of_k


@jit
def norm_rope_store_kernel(
    parts, positions, frequencies, q_weight, k_weight, q, kv, slot_mapping, k_to_v, eps, R,
    P: tl.constexpr, H: tl.constexpr, Hk: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr, LATE: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """
    Grid (R, (H + 2 Hk) / HEADS): each program handles HEADS heads of one token. It adds up the P
    parts in parts [P, R, (H + 2 Hk) D]. It normalises the heads of q and k with q_weight and
    k_weight, unless these are None, and rotates the heads as model.rotate does. It stores q to q
    [R, H, D], and k and v to their slots in the layer's pool. WIDE: all heads of q are normalised
    together, as are all heads of k, so each program handles all heads. LATE: normalise after the
    rotation. ALONE: R is 1, and attention has so few programs that it may start at once.
    """
    ALL: tl.constexpr = H + 2 * Hk
    HALF: tl.constexpr = D // 2
    r = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, WIDTH)
    real = (h < ALL)[:, None] & (i < HALF)[None, :]
    slot = tl.load(slot_mapping + r)
    angle = tl.load(positions + r).to(tl.float32)
    angle *= tl.load(frequencies + i, mask=i < HALF, other=0.0)
    cos = tl.cos(angle)[None, :]
    sin = tl.sin(angle)[None, :]
    wait(PDL, not ALONE)
    start = parts + (r * ALL + h)[:, None] * D + i[None, :]
    first = tl.zeros([HEADS, WIDTH], tl.float32)
    second = tl.zeros([HEADS, WIDTH], tl.float32)
    for part in tl.static_range(P):
        of_part = start + part * R * ALL * D
        first += tl.load(of_part, mask=real, other=0.0).to(tl.float32)
        second += tl.load(of_part + HALF, mask=real, other=0.0).to(tl.float32)
    let_attention_start(PDL, not ALONE)
    is_q = (h < H)[:, None]
    is_v = (h >= H + Hk)[:, None]
    x = first
    y = second
    if q_weight is not None:
        square = tl.sum(x * x + y * y, axis=1) / D
        if WIDE:
            of_q = tl.sum(tl.where(h < H, square, 0.0), axis=0) / H
            of_k = tl.sum(tl.where((h >= H) & (h < H + Hk), square, 0.0), axis=0) / Hk
            square = tl.where(h < H, of_q, of_k)
        scale = tl.rsqrt(square + eps)[:, None]
        APART: tl.constexpr = D if WIDE else 0
        of_x = scale * norm_weights(q_weight, k_weight, h, i, H, Hk, HALF, APART)
        of_y = scale * norm_weights(q_weight + HALF, k_weight + HALF, h, i, H, Hk, HALF, APART)
        if not LATE:
            x *= of_x
            y *= of_y
    turned = x * cos - y * sin
    y = y * cos + x * sin
    x = turned
    if LATE:
        x *= of_x
        y *= of_y
    x = tl.where(is_v, first, x)
    y = tl.where(is_v, second, y)
    to_q = q + (r * H + h)[:, None] * D + i[None, :]
    tl.store(to_q, x.to(q.dtype.element_ty), mask=real & is_q)
    tl.store(to_q + HALF, y.to(q.dtype.element_ty), mask=real & is_q)
    to_kv = kv + pool_offset(slot // S, slot % S, (h - H) % Hk, Hk, S, D)[:, None] + i[None, :]
    to_kv += tl.where(is_v, k_to_v, 0)
    tl.store(to_kv, x.to(kv.dtype.element_ty), mask=real & ~is_q)
    tl.store(to_kv + HALF, y.to(kv.dtype.element_ty), mask=real & ~is_q)


def norm_rope_store(parts: Tensor, attn: model.Attention, kv: Tensor, batch: Batch) -> Tensor:
    """
    Return the queries [R, H, D], in the dtype of the weights, from parts [R, (H + 2 Hk) D] or [P,
    R, ..]. Queries and keys are normalised and rotated. Keys and values are stored in their slots
    in kv, one layer's pool, in place.
    """
    R, N = parts.shape[-2:]
    heads = HEADS_AT_ONCE if R > 8 else 1  # each head has its own warp, so results are identical
    all_heads = attn.H + 2 * attn.Hk
    assert parts.is_contiguous() and kv.is_contiguous(), "parts and the pool must be contiguous"
    norms = (None, None)
    eps = 0.0
    order = {"WIDE": False, "LATE": False}
    if attn.q_norm is not None:
        norms = (attn.q_norm.weight, attn.k_norm.weight)
        eps = attn.q_norm.eps
        order["LATE"] = attn.norms_late
        if len(attn.q_norm.weight) > attn.D:
            order["WIDE"] = True
            heads = triton.next_power_of_2(all_heads)
    q = attn.c_attn.weight.new_empty(R, attn.H, attn.D)
    operands = (parts, *batch.rotations[attn.rope], *norms)
    pool = (kv, batch.slot_mapping, kv.stride(0))
    shape = {"H": attn.H, "Hk": attn.Hk, "S": kv.shape[3], "D": attn.D}
    width = triton.next_power_of_2(attn.D // 2)
    cut = {"HEADS": heads, "WIDTH": width, "num_warps": min(heads, 8)}
    P = parts.numel() // (R * N)
    grid = (R, triton.cdiv(all_heads, heads))
    options = shape | cut | order | pdl_options(q)
    norm_rope_store_kernel[grid](*operands, q, *pool, eps, R, P=P, ALONE=R == 1, **options)
    return q


def project_qkv(y: Tensor, attn: model.Attention, kv: Tensor, batch: Batch):
    """
    Return the queries [T, H, D] for y [T, C], and kv, one layer's pool [2, num_blocks + 1, Hk, S,
    D]. Keys and values have been stored in their slots in the pool, in place.
    """
    R = len(y)
    rotation = (None, None)
    if batch.rotations:
        if R > 1 or attn.q_norm is not None:
            return project_and_rotate(y, attn, kv, batch)
        rotation = batch.rotations[attn.rope]
    elif not use_triton(R, attn.c_attn) or attn.q_norm is not None:
        return model.project_qkv(y, attn, kv, batch)
    q = launch_linear(y, attn.c_attn, targets=(kv, batch.slot_mapping, *rotation))
    return q.view(R, attn.H, attn.D), kv


def project_and_rotate(y: Tensor, attn: model.Attention, kv: Tensor, batch: Batch):
    """Like project_qkv, for models with rotary positions, in two launches."""
    parts = batch.ops.linear(y, attn.c_attn, partial_sums=True)
    return norm_rope_store(parts, attn, kv, batch), kv


# --------------------------------------------------------------------------------------------------
# Tokens to the host


@jit
def send_kernel(
    tokens, ring, num_sent, R,
    ROUNDS: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (1,), one warp: see `send`."""
    pdl_wait(PDL)
    r = tl.arange(0, WIDTH)
    t = tl.load(num_sent)
    tl.store(ring + t % ROUNDS * MOST + r, tl.load(tokens + r, mask=r < R), mask=r < R)
    tl.store(num_sent, t + 1)


def send(tokens: Tensor, ring: Tensor, num_sent: Tensor):
    """
    Copy tokens [R] int64 to the next row of `ring` [rounds, R or more] int64, which is in pinned
    host memory. num_sent [1] int64 counts the calls, and so selects the row. As the last kernel in
    a CUDA graph, `send` takes less time than a torch copy between two graphs.
    """
    rounds, most = ring.shape
    shape = {"ROUNDS": rounds, "MOST": most, "WIDTH": triton.next_power_of_2(most)}
    operands = (tokens, ring, num_sent, len(tokens))
    send_kernel[(1,)](*operands, **shape, num_warps=1, **pdl_options(tokens))
