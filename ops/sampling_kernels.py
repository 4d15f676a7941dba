"""
The sampler's Triton twin. It picks tokens as `sampling.sample_torch` does, in two launches that
depend only on shapes. So one CUDA graph of these launches works for any sampling parameters.
Nothing is sorted, and the device skips steps that a row does not need.

    threshold_kernel     the lowest score that a row's top_k, top_p and min_p keep
    gumbel_max_kernel    argmax of score / temperature + Gumbel noise, over the kept scores

Letters: R rows of logits, V vocabulary.
"""

import torch
from torch import Tensor

import params
from kernels import INF, INTERPRETED, finishes_last, jit, pdl_options, pdl_wait, tl, triton
from ops.sampling import Floats, Ints, SamplingRows, masked

# Tuned on an H200, 2026-11-21, for GPT-2's vocabulary and 1 to 256 rows. On a GPU, `python bench.py
# overhead` measures the time of both kernels in a decode step ("sampling").
THRESHOLD_WIDTH = 2048  # number of tokens that a program reads at a time
THRESHOLD_WARPS = 16
QUADS = 256  # number of Philox calls that a program makes at a time, each for four tokens
GUMBEL_MAX_WARPS = 4
GUMBEL_MAX_PROGRAMS = 4096  # maximum number; four times as many as the chip runs at a time

GREEDY_BELOW = tl.constexpr(params.GREEDY_BELOW)
NO_TOKEN = tl.constexpr(params.NO_TOKEN)
# Columns: the fields of sampling.Floats and sampling.Ints, in that order
FLOATS = range(len(Floats._fields))
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = map(tl.constexpr, FLOATS)
INTS = range(len(Ints._fields))
TOP_K, SEED, CHOICE, STOP_FROM, BIASED, PENALISED = map(tl.constexpr, INTS)
NUM_FLOATS = tl.constexpr(len(FLOATS))
NUM_INTS = tl.constexpr(len(INTS))


@jit
def row_view(r, logits, rows, positions, floats, ints, bias, token_flags, stride, V):
    """
    Return row r of logits and its parameters, in the form that `load_adjusted` takes: pointers to
    the row's own numbers, and whether the row has a bias, must not stop yet, and has penalties.
    """
    row = tl.load(rows + r)
    floats, ints = floats + row * NUM_FLOATS, ints + row * NUM_INTS
    logits += r.to(tl.int64) * stride
    banned = tl.load(positions + r) < tl.load(ints + STOP_FROM)
    biased, penalised = tl.load(ints + BIASED) != 0, tl.load(ints + PENALISED) != 0
    return logits, floats, ints, bias + row * V, token_flags + row * V, V, biased, banned, penalised


@jit
def load_adjusted(view, t):
    """
    Load the logits of tokens t as fp32, adjusted as in `sampling.adjust`: biases and penalties are
    applied, and stop tokens are banned. Return -inf for t beyond the last token.
    """
    logits, floats, _, bias, token_flags, V, biased, banned, penalised = view
    score = tl.load(logits + t, mask=t < V, other=-INF).to(tl.float32)
    if biased:
        score += tl.load(bias + t, mask=t < V, other=0.0)
    if banned | penalised:
        flags = tl.load(token_flags + t, mask=t < V, other=0)
        count = flags >> 2
        score += tl.where(((flags & 2) > 0) & banned, -INF, 0.0)
        repetition = tl.where((flags & 1) + count > 0, tl.load(floats + REPETITION), 1.0)
        score = tl.where(score > 0, score / repetition, score * repetition)
        taken = tl.load(floats + FREQUENCY) * count.to(tl.float32)
        score -= taken + tl.where(count > 0, tl.load(floats + PRESENCE), 0.0)
    return score


# --------------------------------------------------------------------------------------------------
# The filters


@jit
def weight_above(
    scores, n, low, high, p1, p2, p3, top, rate, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr
):
    """
    Make one pass over n scores. Return the weight of the scores at or above each of three pivots,
    the smallest score that is at least `low`, and the largest score below `high`. The weight is the
    number of scores or, if WEIGHTED, their total probability times a constant, computed as the sum
    of 2^((score - top) * rate) with rate = log2(e) / temperature.
    """
    above1 = tl.zeros([WIDTH], tl.float32)
    above2 = tl.zeros([WIDTH], tl.float32)
    above3 = tl.zeros([WIDTH], tl.float32)
    smallest = tl.full([WIDTH], INF, tl.float32)
    largest = tl.full([WIDTH], -INF, tl.float32)
    for start in range(0, n, WIDTH):
        score = tl.load(scores + start + tl.arange(0, WIDTH))
        weight = tl.exp2((score - top) * rate) if WEIGHTED else 1.0
        above1 += tl.where(score >= p1, weight, 0.0)
        above2 += tl.where(score >= p2, weight, 0.0)
        above3 += tl.where(score >= p3, weight, 0.0)
        smallest = tl.minimum(smallest, tl.where(score >= low, score, INF))
        largest = tl.maximum(largest, tl.where(score < high, score, -INF))
    return (
        tl.sum(above1, axis=0),
        tl.sum(above2, axis=0),
        tl.sum(above3, axis=0),
        tl.min(smallest, axis=0),
        tl.max(largest, axis=0),
    )


@jit
def find_threshold(
    scores, n, smallest, top, target, rate, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr
):
    """
    Return the largest of n scores, among `smallest` .. `top`, for which the scores at or above it
    have a weight of at least `target` (k, or a fraction of the mass); see weight_above. Each pass
    divides the bracket low <= answer < high into four. It also finds the smallest and the largest
    score inside the previous bracket. When these two are equal, that score is the answer.
    """
    low, high, largest, rounds = smallest, top + INF, top, 0
    # fp32 has 2^8 binades, so 300 rounds are always enough; the limit ensures that no row makes the
    # kernel hang
    while (smallest < largest) & (rounds < 300):
        step = largest * 0.25 - smallest * 0.25
        p1, p2, p3 = smallest + step, smallest + 2 * step, smallest + 3 * step
        above1, above2, above3, smallest, largest = weight_above(
            scores, n, low, high, p1, p2, p3, top, rate, WEIGHTED, WIDTH
        )
        low = tl.where(
            above3 >= target,
            p3,
            tl.where(above2 >= target, p2, tl.where(above1 >= target, p1, low)),
        )
        high = tl.where(
            above1 < target,
            p1,
            tl.where(above2 < target, p2, tl.where(above3 < target, p3, high)),
        )
        smallest, largest = tl.maximum(smallest, low), tl.minimum(largest, high)
        rounds += 1
    return smallest


@jit
def compact(view, V, floor, scores, WIDTH: tl.constexpr):
    """
    Copy a row's scores that are at least `floor` to `scores`, in WIDTH columns side by side. Each
    lane fills its own column, so no lane waits for another. Shorter columns are padded with -inf.
    Returns how many numbers `scores` now holds, including padding.
    """
    lane = tl.arange(0, WIDTH)
    height = tl.zeros([WIDTH], tl.int32)
    for start in range(0, V, WIDTH):
        score = load_adjusted(view, start + lane)
        tl.store(scores + height * WIDTH + lane, score, mask=score >= floor)
        height += (score >= floor).to(tl.int32)
    highest = tl.max(height, axis=0)
    padding = tl.full([WIDTH], -INF, tl.float32)
    for i in range(0, highest):
        tl.store(scores + i * WIDTH + lane, padding, mask=i >= height)
    tl.debug_barrier()  # other threads will read the scores
    return highest * WIDTH


@jit
def threshold_kernel(
    logits, rows, positions, floats, ints, bias, token_flags, thresholds, finished, scratch,
    stride, scratch_stride, V,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """
    Grid (R,): each program finds the lowest score that its row's filters keep, as
    `sampling.threshold` does, but before dividing by the temperature. The result is -inf if there
    is nothing to filter. One or two passes over the row find bounds. A final pass copies the scores
    that may be the answer to `scratch`, so that only these few are searched. Also sets `finished`
    to zero, for gumbel_max_kernel.
    """
    pdl_wait(PDL)
    r, lane = tl.program_id(0), tl.arange(0, WIDTH)
    view = row_view(r, logits, rows, positions, floats, ints, bias, token_flags, stride, V)
    floats, ints, scratch = view[1], view[2], scratch + r.to(tl.int64) * scratch_stride
    temperature, top_p = tl.load(floats + TEMPERATURE), tl.load(floats + TOP_P)
    min_p, k = tl.load(floats + MIN_P), tl.load(ints + TOP_K)
    limited = (k > 0) & (k < V)
    tl.store(finished + r, 0)
    tl.store(thresholds + r, -INF)
    if (temperature < GREEDY_BELOW) | ((top_p >= 1) & (min_p <= 0) & (limited == 0)):
        return

    peak = tl.full([WIDTH], -INF, tl.float32)  # each lane's best score
    least = tl.full([WIDTH], INF, tl.float32)
    for start in range(0, V, WIDTH):
        score = load_adjusted(view, start + lane)
        peak = tl.maximum(peak, score)
        least = tl.minimum(least, tl.where(score > -INF, score, INF))
    top, floor = tl.max(peak, axis=0), tl.min(least, axis=0)
    # a row with an infinite score gets no token, so leave nothing to search
    floor = tl.where(top < INF, floor, top)
    rate = 1.4426950408889634 / temperature  # log2(e): weights are powers of two
    if limited | (top_p < 1):
        mass = 0.0
        # First find a cheap lower bound. For top_k, it is the k-th best peak, if at least k lanes
        # have one. For top_p, note that V tokens that each weigh less than (1 - top_p) * mass / V
        # together weigh less than what top_p drops.
        if limited:
            if tl.sum((peak > -INF).to(tl.int32), axis=0) >= k:
                tl.store(scratch + lane, peak)
                tl.debug_barrier()
                floor = find_threshold(
                    scratch, WIDTH, floor, top, k.to(tl.float32), rate, False, WIDTH
                )
        else:
            weights = tl.zeros([WIDTH], tl.float32)
            for start in range(0, V, WIDTH):
                score = load_adjusted(view, start + lane)
                weights += tl.exp2((score - top) * rate)
            mass = tl.sum(weights, axis=0)
            floor = tl.maximum(floor, top + (tl.log2((1 - top_p) * mass / V) - 0.01) / rate)
        n = compact(view, V, floor, scratch, WIDTH)
        if limited:
            floor = find_threshold(scratch, n, floor, top, k.to(tl.float32), rate, False, WIDTH)
            mass = weight_above(
                scratch, n, floor, floor, floor, floor, floor, top, rate, True, WIDTH
            )[0]
        if top_p < 1:  # a fraction of what top_k kept
            floor = find_threshold(scratch, n, floor, top, top_p * mass, rate, True, WIDTH)
    if min_p > 0:
        floor = tl.maximum(floor, top + tl.log(min_p) * temperature)
    tl.store(thresholds + r, floor)


# --------------------------------------------------------------------------------------------------
# Noise


@jit
def philox_words(seed, quad, position, choice):
    """
    Return the random words for tokens 4 * quad .. 4 * quad + 3, each uint32, as in
    `sampling.gumbel_noise`. tl.philox performs the same rounds.
    """
    return tl.philox(seed, quad, position.to(tl.int32), choice.to(tl.int32), 0)


if triton and not INTERPRETED:
    from triton.language.extra.cuda.libdevice import fast_log2f as fast_log2
else:

    @jit
    def fast_log2(x):
        return tl.log2(x)


@jit
def gumbel(word):
    """
    Return the Gumbel noise for uint32 words, as in `sampling.gumbel_noise`: -log(E) with E =
    -log(u). The hardware logarithm is three times as fast as an exact one, but inaccurate for u
    close to 1. Winning tokens have such values of u, so for these, E is computed from a series in 1
    - u.
    """
    # v is 1 - u, exactly (the factor is 2^-23). The xor computes ~, which older interpreters do not
    # support for unsigned words.
    v = ((word >> 9 ^ 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6 + v / 7))))))
    minus_log_2: tl.constexpr = -0.6931471805599453
    return minus_log_2 * fast_log2(tl.where(v < 0.125, series, minus_log_2 * fast_log2(1.0 - v)))


@jit
def running_argmax(best, token, score, t, noise, inverse, floor):
    """
    Return each lane's best perturbed score so far, and its token, after considering tokens t.
    `inverse` is 1 / temperature. NaN counts as infinity, so it wins and makes the row invalid.
    """
    score = tl.where(score < floor, -INF, score * inverse + noise)
    score = tl.where(score == score, score, INF)
    return tl.where(score > best, score, best), tl.where(score > best, t, token)


@jit
def gumbel_max_kernel(
    logits, rows, positions, floats, ints, bias, token_flags, thresholds, finished,
    partial, partial_token, tokens, last_token, stride, V,
    SPLITS: tl.constexpr, QUADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """
    Grid (R, SPLITS): each program searches every SPLITS-th tile of a row. A tile has QUADS Philox
    calls, for four tokens each. The last of a row's programs to finish compares all programs' best
    tokens, and stores the winner in `tokens` and `last_token`. If the row has penalties, it also
    counts the winner in `token_flags`. `finished` must be zero at the start.
    """
    pdl_wait(PDL)
    r, split = tl.program_id(0), tl.program_id(1)
    view = row_view(r, logits, rows, positions, floats, ints, bias, token_flags, stride, V)
    _, floats, ints, _, token_flags, _, _, _, penalised = view
    seed, choice, position = tl.load(ints + SEED), tl.load(ints + CHOICE), tl.load(positions + r)
    temperature, floor = tl.load(floats + TEMPERATURE), tl.load(thresholds + r)
    drawn = temperature >= GREEDY_BELOW
    inverse = 1.0 / tl.where(drawn, temperature, 1.0)
    best, token = tl.full([QUADS], -INF, tl.float32), tl.zeros([QUADS], tl.int32)
    for start in range(split * QUADS * 4, V, SPLITS * QUADS * 4):
        quad = start // 4 + tl.arange(0, QUADS)
        t, zero = 4 * quad, tl.zeros([QUADS], tl.float32)
        s0, s1 = load_adjusted(view, t), load_adjusted(view, t + 1)
        s2, s3 = load_adjusted(view, t + 2), load_adjusted(view, t + 3)
        noise = zero, zero, zero, zero
        # computing noise is most of the work, and few tiles have a token that the filters keep
        noisy = drawn
        if floor > -INF:
            noisy = tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), axis=0) >= floor
        if noisy:
            w0, w1, w2, w3 = philox_words(seed, quad, position, choice)
            noise = gumbel(w0), gumbel(w1), gumbel(w2), gumbel(w3)
        scores = s0, s1, s2, s3
        for i in tl.static_range(4):
            best, token = running_argmax(best, token, scores[i], t + i, noise[i], inverse, floor)
    highest = tl.max(best, axis=0)
    tl.store(partial + r * SPLITS + split, highest)
    first = tl.min(tl.where(best == highest, token, V), axis=0)  # ties go to the lowest token
    tl.store(partial_token + r * SPLITS + split, first)
    if finishes_last(finished + r, SPLITS):
        part = r * SPLITS + tl.arange(0, SPLITS)
        scores = tl.load(partial + part, cache_modifier=".cg")
        token_of = tl.load(partial_token + part, cache_modifier=".cg")
        highest = tl.max(scores, axis=0)
        winner = tl.min(tl.where(scores == highest, token_of, V), axis=0)
        valid = (highest > -INF) & (highest < INF)
        tl.store(tokens + r, tl.where(valid, winner, NO_TOKEN).to(tl.int64))
        tl.store(last_token + tl.load(rows + r), tl.where(valid, winner, 0).to(tl.int64))
        if valid & penalised:
            tl.atomic_add(token_flags + winner, 4)


def sample_triton(
    logits, rows, positions, per_row: SamplingRows, row_params=None, allowed=None
) -> Tensor:
    """Pick tokens on CUDA as `sampling.sample_torch` does. `row_params` is ignored."""
    logits = masked(logits, allowed)
    R, V = logits.shape
    assert logits.stride(1) == 1, f"logits have strides {logits.stride()}: rows must be contiguous"
    assert per_row.bias.shape[1] == V, f"logits for {V} tokens, rows for {per_row.bias.shape[1]}"
    contiguous = rows.is_contiguous() and positions.is_contiguous()
    assert contiguous, "rows and positions must be contiguous"
    tokens = torch.empty(R, dtype=torch.int64, device=logits.device)
    quads = min(QUADS, triton.next_power_of_2(triton.cdiv(V, 4)))
    tiles = triton.cdiv(V, 4 * quads)
    splits = triton.next_power_of_2(max(1, min(GUMBEL_MAX_PROGRAMS // R, tiles)))
    width = min(THRESHOLD_WIDTH, triton.next_power_of_2(V))
    thresholds = logits.new_empty(R, dtype=torch.float32)
    scratch = thresholds.new_empty(R, triton.cdiv(V, width) * width)  # mostly left unwritten
    finished = tokens.new_empty(R, dtype=torch.int32)
    partial = thresholds.new_empty(R * splits)
    partial_token = finished.new_empty(R * splits)
    stride = logits.stride(0)
    pdl = pdl_options(logits)
    of_rows = per_row.packed_floats, per_row.packed_ints, per_row.bias, per_row.token_flags
    args = logits, rows, positions, *of_rows, thresholds, finished
    threshold_kernel[(R,)](
        *args, scratch, stride, scratch.stride(0), V, WIDTH=width, num_warps=THRESHOLD_WARPS, **pdl
    )
    outs = partial, partial_token, tokens, per_row.last_token
    gumbel_max_kernel[(R, splits)](
        *args, *outs, stride, V, SPLITS=splits, QUADS=quads, num_warps=GUMBEL_MAX_WARPS, **pdl
    )
    return tokens
