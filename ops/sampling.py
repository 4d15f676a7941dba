"""
Sample tokens from logits, for a batch in which each request has its own parameters.

Randomness is a function, not state: a token's noise depends only on the request's seed, the token's
position and the choice index, never on what else is in the batch. So the same request with the same
seed gets the same tokens, whether it runs alone or in a large batch, and even if it is preempted.
Letters: R rows of logits, V vocabulary.

    rows = SamplingRows(num_rows=4, vocab_size=V, device="cpu")
    rows.fill(SamplingRow(2, SamplingParams(top_p=0.9), seed=7))
    tokens = sample_torch(logits, torch.tensor([2]), positions, rows)     # [1, V], [1] -> [1]

`sample_torch` is the reference and runs anywhere. On a GPU, its twin in sampling_kernels.py does
the same in two launches, whatever the requests' parameters, so a CUDA graph can contain them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.inputs import upload
from paged import Request
from params import GREEDY, GREEDY_BELOW, LOWEST_LOGPROB, NO_TOKEN, RANGES, SamplingParams

MOST_LOGPROBS = RANGES["logprobs"].bounds["le"]

# --------------------------------------------------------------------------------------------------
# Each request's parameters on the device


class Floats(NamedTuple):
    """
    A request's parameters that the device stores in fp32, in the order that the kernels rely on. In
    SamplingRows, each field is a column, with one number per row.
    """

    temperature: float
    top_p: float
    min_p: float
    repetition: float
    frequency: float
    presence: float


class Ints(NamedTuple):
    """A request's parameters that the device stores in int64, likewise in columns."""

    top_k: int  # 0: all tokens
    seed: int
    choice: int
    stop_from: int  # the position of the first token that may be a stop token
    biased: bool  # has a logit_bias
    penalised: bool  # has any of the three penalties


class SamplingRow(NamedTuple):
    """The content of a request's row in `SamplingRows`."""

    row: int
    params: SamplingParams
    seed: int
    choice: int = 0  # index of this answer among those to its prompt
    prompt_tokens: Sequence[int] = ()
    generated_tokens: Sequence[int] = ()  # not empty after a preemption
    stop_token_ids: Iterable[int] = ()

    def floats(self) -> Floats:
        p = self.params
        repetition = max(p.repetition_penalty, 1e-6)  # dividing logits by less could overflow
        temperature = p.temperature
        if temperature < GREEDY_BELOW:
            temperature = 0.0
        return Floats(
            temperature, p.top_p, p.min_p, repetition, p.frequency_penalty, p.presence_penalty
        )

    def ints(self) -> Ints:
        p = self.params
        stop_from = 0
        if p.min_tokens:
            stop_from = len(self.prompt_tokens) + p.min_tokens
        return Ints(p.top_k, self.seed, self.choice, stop_from, p.biases, p.penalises)


def sampling_row(request: Request) -> SamplingRow:
    """
    Return the row for a request that starts to run. Decoding is greedy unless the request has
    `params`.
    """
    params = getattr(request, "params", GREEDY)
    return SamplingRow(
        request.row,
        params,
        params.seed or 0,
        getattr(request, "index", 0),
        request.prompt_tokens,
        request.generated_tokens,
        request.stop_token_ids,
    )


def bias_vector(params: SamplingParams, V: int) -> Tensor:
    """Return logit_bias as a vector [V] fp32."""
    bias = torch.zeros(V)
    values = list(params.logit_bias.values())
    bias[list(params.logit_bias)] += torch.tensor(values)
    return bias


def token_flags(request: SamplingRow, V: int) -> Tensor:
    """Return a request's row for SamplingRows.token_flags, [V] int64."""
    generated = torch.tensor(request.generated_tokens, dtype=torch.int64)
    flags = 4 * generated.bincount(minlength=V)
    # += counts a repeated index only once
    stops = [token for token in request.stop_token_ids if 0 <= token < V]
    flags[stops] += 2
    flags[list(request.prompt_tokens)] += 1
    return flags


class SamplingRows:
    """
    Every running request's parameters and last token, in device arrays indexed by the request's
    row. The tensors are never replaced, because CUDA graphs store their addresses. If a request
    does not use an array, its row in that array is never read, so the row need not be cleared.
    """

    def __init__(self, num_rows: int, vocab_size: int, device):
        zeros = partial(torch.zeros, device=device)
        self.packed_floats = zeros(num_rows, len(Floats._fields))
        self.packed_ints = zeros(num_rows, len(Ints._fields), dtype=torch.int64)
        # views of the same numbers by name, each a column [num_rows]
        self.floats = Floats(*self.packed_floats.unbind(1))
        self.ints = Ints(*self.packed_ints.unbind(1))
        self.bias = zeros(num_rows, vocab_size)
        # per token: 4 * number of times generated + 2 if a stop token + 1 if in the prompt
        self.token_flags = zeros(num_rows, vocab_size, dtype=torch.int32)
        self.last_token = zeros(num_rows, dtype=torch.int64)  # each request's next input token

    def fill(self, *requests: SamplingRow):
        """
        Fill the requests' rows in place. This takes two small uploads for all rows together, plus
        an upload of V numbers for each bias and each row of flags that is used. The host does not
        wait for the uploads.
        """
        device = self.bias.device
        V = self.bias.shape[1]
        for request in requests:
            row = request.row
            params = request.params
            if params.biases:
                self.bias[row] = upload(bias_vector(params, V), device, torch.float32)
            if params.penalises or params.min_tokens:
                self.token_flags[row] = upload(token_flags(request, V), device, torch.int32)
        ints = upload([[r.row, *r.ints()] for r in requests], device)
        floats = upload([r.floats() for r in requests], device, torch.float32)
        rows = ints[:, 0]
        self.packed_ints[rows] = ints[:, 1:]
        self.packed_floats[rows] = floats

    def uncount(self, rows: Tensor, tokens: Tensor):
        """Remove these refused tokens [R] from the counts, to which `sample` has added them."""
        counted = 4 * self.ints.penalised[rows].int()
        self.token_flags.index_put_((rows, tokens), -counted, accumulate=True)


# --------------------------------------------------------------------------------------------------
# The reference


def masked(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """
    Return scores [R, V] with -inf for tokens that are not allowed. allowed [R, V / 32] int32 has
    one bit per token, lowest bit first; 0 means not allowed. If `allowed` is None, all tokens are.
    """
    if allowed is None:
        return scores
    _, V = scores.shape
    shifts = torch.arange(32, device=scores.device)
    bits = allowed[:, :, None] >> shifts
    bits = bits.flatten(1)[:, :V] & 1
    return scores.masked_fill(bits == 0, -torch.inf)


def choose(
    scores: Tensor,
    temperature: Tensor | None,
    lowest: Tensor | None,
    allowed: Tensor | None,
    *key: Tensor,
) -> Tensor:
    """
    Return each row's best token [R] int64 by scores [R, V] / temperature [R] + Gumbel noise. This
    is equivalent to sampling from the softmax (the Gumbel-max trick, Gumbel 1954). A token can be
    chosen only if it is `allowed` (see `masked`) and its score / temperature is at least `lowest`
    [R]. A row with temperature 0 is greedy: it gets no noise. If `temperature` is None, all rows
    are greedy. `key` holds the arguments for `gumbel_noise`. Ties go to the lowest token id. A row
    without a finite maximum (NaN anywhere, or all -inf) gets NO_TOKEN.
    """
    scores = masked(scores, allowed)
    if temperature is not None:
        is_greedy = temperature[:, None] == 0
        scores = scores / torch.where(is_greedy, 1.0, temperature[:, None])
        if lowest is not None:
            scores = scores.masked_fill(scores < lowest[:, None], -torch.inf)
        noise = gumbel_noise(*key, scores.shape[1])
        scores = torch.where(is_greedy, scores, scores + noise)
    best, tokens = scores.max(-1)
    is_valid = best.isfinite()
    return torch.where(is_valid, tokens, NO_TOKEN)


def sample_torch(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    per_row: SamplingRows,
    row_params: Sequence[SamplingParams] | None = None,
    allowed: Tensor | None = None,
    choose: Callable = choose,
    exp: Callable = torch.exp,
) -> Tensor:
    """
    Pick a token for each row of logits [R, V] (fp32, bf16 or fp16), using `choose`. rows [R] are
    the requests' rows in `per_row`, and positions [R] are the new tokens' positions. If
    `row_params`, the rows' SamplingParams, is given, work that no row needs is skipped. For
    `allowed`, see `masked`. Returns [R] int64, with NO_TOKEN where `choose` finds no token. In
    place, per_row.last_token is set to the tokens (0 for NO_TOKEN), and per_row.token_flags counts
    the tokens in rows with penalties.
    """
    # attributes of SamplingParams that are set in at least one row
    names = ("adjusts", "temperature", "filters", "penalises")
    used = {name for name in names if row_params is None or any(map(attrgetter(name), row_params))}
    floats = per_row.floats
    ints = per_row.ints
    scores = logits.float()
    if "adjusts" in used:
        scores = adjust(scores, rows, positions, per_row)
    temperature = lowest = None
    if "temperature" in used:
        temperature = floats.temperature[rows]
    if "filters" in used:  # top_k, top_p, min_p
        scores = masked(scores, allowed)
        divisor = torch.where(temperature == 0, 1.0, temperature)
        filters = (ints.top_k[rows], floats.top_p[rows], floats.min_p[rows])
        lowest = threshold(scores / divisor[:, None], *filters, exp)
    key = (ints.seed[rows], positions, ints.choice[rows])
    tokens = choose(scores, temperature, lowest, allowed, *key)
    last = tokens.clamp(min=0)
    if "penalises" in used:
        is_valid = tokens != NO_TOKEN
        counted = is_valid * ints.penalised[rows]
        new = 4 * counted.int()
        per_row.token_flags.index_put_((rows, last), new, accumulate=True)
    per_row.last_token[rows] = last
    return tokens


def adjust(scores: Tensor, rows: Tensor, positions: Tensor, per_row: SamplingRows) -> Tensor:
    """
    Return scores [R, V] fp32 after applying biases, banning stop tokens and applying penalties,
    with vLLM's formulas. For a banned token, -inf is added, not assigned, so that NaN stays NaN and
    makes its row invalid.
    """

    def column(values: Tensor) -> Tensor:
        return values[rows][:, None]  # [R, 1]

    floats = per_row.floats
    ints = per_row.ints
    flags = per_row.token_flags[rows]
    times = flags >> 2  # how often each token was generated
    is_stop = flags & 2 > 0
    in_text = (flags & 1) + times > 0

    # logit_bias
    scores = scores + torch.where(column(ints.biased) > 0, per_row.bias[rows], 0.0)

    # min_tokens
    banned = is_stop & (positions[:, None] < column(ints.stop_from))
    scores = scores + torch.where(banned, -torch.inf, 0.0)

    # the penalties: repetition, frequency, presence
    repetition = torch.where(in_text, column(floats.repetition), 1.0)
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = scores - column(floats.frequency) * times
    return scores - column(floats.presence) * (times > 0)


def threshold(
    scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, exp: Callable = torch.exp
) -> Tensor:
    """
    Return, for scores [R, V], the lowest score [R] that all filters [R] keep. This is the largest
    of the filters' own thresholds. Scores that tie with it are kept, so the best token is always
    kept. `exp` computes e^x elementwise for x [R, V].
    """
    V = scores.shape[1]
    ranked = scores.sort(dim=1, descending=True).values
    best = ranked[:, :1]  # [R, 1]

    # top_k: the k-th largest score; 0 keeps all
    k = torch.where(top_k > 0, top_k, V)
    k = k.clamp(max=V)
    of_top_k = ranked.gather(1, k[:, None] - 1)

    # top_p (nucleus sampling, Holtzman et al. 2020): the score of the last token that is needed to
    # reach this fraction of the probability that top_k keeps. First compute each token's
    # probability, relative to the best token's.
    shares = exp(ranked - best)
    weights = shares.masked_fill(ranked < of_top_k, 0.0)
    mass = weights.cumsum(1)
    share = top_p[:, None]
    needed = mass - weights < share * mass[:, -1:]  # the tokens before this one are not enough
    of_top_p = last_score(ranked, needed)
    # a top_p of 1 keeps all tokens, but due to rounding the sum may reach 1 before the last one
    of_top_p = torch.where(share < 1, of_top_p, -torch.inf)

    # min_p (Nguyen et al. 2024): the score at this fraction of the best token's probability
    likely = shares >= min_p[:, None]
    of_min_p = last_score(ranked, likely)
    highest = torch.maximum(of_top_k, of_top_p)
    return torch.maximum(highest, of_min_p)[:, 0]


def last_score(ranked: Tensor, kept: Tensor) -> Tensor:
    """
    Return the score [R, 1] of the last token that is kept, or of the first token if none is kept.
    Both arguments are [R, V], best first.
    """
    count = kept.sum(1, keepdim=True)
    return ranked.gather(1, count.clamp(min=1) - 1)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits [R, V], in fp32. The result may have a few extra columns."""
    if logits.is_cuda:  # the order of the sum depends on a row's alignment to 16 bytes
        logits = F.pad(logits, (0, -logits.shape[1] % 8), value=-torch.inf)
    # not logsumexp, because with only one row it splits the sum among several threads
    return logits.log_softmax(1, dtype=torch.float32)


def logprobs(
    logits: Tensor, tokens: Tensor, n: int, log_softmax: Callable = log_softmax
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Return log-probabilities: the log-softmax of the raw logits [R, V], before temperature and
    penalties. The three tensors are the log-probabilities [R] fp32 of the chosen tokens [R]; the
    ids [R, n] of the n most likely tokens, best first; and the log-probabilities [R, n] fp32 of
    these tokens. The lowest value is LOWEST_LOGPROB, which also stands for NaN in a row, and for
    NO_TOKEN. A row's results do not depend on other rows, the number of threads, or n.
    """
    _, V = logits.shape
    scores = log_softmax(logits)

    def finite(x: Tensor) -> Tensor:
        return x.nan_to_num(LOWEST_LOGPROB).clamp(LOWEST_LOGPROB, 0.0)

    # topk's choice among equal logits depends on how many it takes, so always take the maximum
    most = max(n, MOST_LOGPROBS) if n else 0
    ranked = sort_keys(logits) if logits.is_cuda else logits
    ids = ranked.topk(min(most, V)).indices[:, :n]
    chosen = scores.gather(1, tokens.clamp(min=0)[:, None])
    return finite(chosen)[:, 0], ids, finite(scores.gather(1, ids))


def sort_keys(logits: Tensor) -> Tensor:
    """
    Return integers [R, V] in the same order as logits [R, V]; among equal logits, the first gets
    the largest integer. On a GPU, topk's choice among equal numbers depends on the number of rows.
    """
    _, V = logits.shape
    words = logits.float().view(torch.int32).long()
    words = torch.where(words < 0, words ^ 0x7FFFFFFF, words)  # negative floats sort in reverse
    return (words << 32) - torch.arange(V, device=logits.device)


# --------------------------------------------------------------------------------------------------
# Noise: Philox4x32-10, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as
# easy as 1, 2, 3")

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
ROUNDS = 10


def philox(counter: tuple, key: tuple) -> tuple:
    """
    Return four random words for four 32-bit counter words and two key words, all given as int64
    tensors that broadcast. Each round treats words 0 and 2 alike, and words 1 and 3 alike. So each
    pair is held in one tensor, which halves the number of operations.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    even = torch.stack([c0, c2])  # [2, ...]
    odd = torch.stack([c1, c3])
    round_key = torch.stack(torch.broadcast_tensors(*key))
    constants = torch.tensor((MULTIPLIERS, KEY_STEPS), device=c0.device)
    multipliers, key_steps = constants.view(2, 2, *[1] * c0.dim())  # [2, 1, ...] each
    for _ in range(ROUNDS):
        product = even * multipliers  # 64 bits; the sign bit is a bit like any other
        high = (product >> 32) & MASK32
        even = high.flip(0) ^ odd ^ round_key
        odd = (product & MASK32).flip(0)
        round_key = (round_key + key_steps) & MASK32
    return even[0], odd[0], even[1], odd[1]


def gumbel_noise(seeds: Tensor, positions: Tensor, choices: Tensor, V: int) -> Tensor:
    """
    Return standard Gumbel noise [R, V] fp32 for seeds, positions and choices [R] int64. The key is
    the seed. The counter is (token id // 4, position, choice, 0), and token id t uses word t % 4. A
    word's upper 23 bits are converted to a number u in (0, 1), which is exact in fp32.
    """
    quads = torch.arange(math.ceil(V / 4), device=seeds.device)  # [V / 4]
    zero = torch.zeros_like(quads)
    positions = positions[:, None].long() & MASK32
    choices = choices[:, None] & MASK32
    low = seeds[:, None] & MASK32
    high = (seeds[:, None] >> 32) & MASK32
    words = philox((quads, positions, choices, zero), (low, high))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :V]  # [R, V / 4, 4] -> [R, V]
    u = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))
