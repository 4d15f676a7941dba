"""
Convert the scheduler's plan to the model's batch.

    packed = pack(plan, shape, padding_row, padding_block)      # on the host: one array, one copy
    packed = upload(packed, device)
    batch, rows = lay_out(packed, shape, plan, known, ops)      # on the device: the flat token axis
    inputs, last = flat_inputs(plan, S)                         # or use only what the host knows

Most of what a step needs is already on the device: each request's last token, context length and
block table, in arrays indexed by the request's row. `decode_inputs` derives the inputs for decodes
from these arrays. With guesses, a request decodes several tokens in a step, and the host supplies
those tokens that it knows. Letters: n decode tokens, C prefill chunks with T tokens in total, N
rows, M blocks per table, S block size.
"""

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import Batch
from model import Ops
from paged import TO_COME, Plan
from params import NO_TOKEN


class StepShape(NamedTuple):
    """The sizes that a step is padded to."""

    n: int  # number of decode tokens, including guesses
    C: int  # number of chunks
    T: int  # number of tokens in all chunks
    groups: int = 0  # number of groups that share a prefix (prefix.py); if any, C and T are 0


class StepInputs(NamedTuple):
    """
    A step's inputs, which are packed in this order into one int64 array. The fields' lengths
    (`sizes`) and padding values (in `pack`) are also held in StepInputs.
    """

    rows: Tensor  # [n] the rows of the requests that decode
    last_blocks: Tensor  # [n] the block that each token is written to, which may be new
    chunk_rows: Tensor  # [C] the rows of the requests with a chunk
    sampling_rows: Tensor  # [C] the chunk's row if it completes the prompt, else the padding row
    chunk_starts: Tensor  # [C + 1] where each chunk begins in the T tokens; then the last one's end
    chunk_contexts: Tensor  # [C] number of tokens in the pool after the chunk
    tokens: Tensor  # [T] the tokens of all chunks
    positions: Tensor  # [T] the position of each token in its own request
    token_rows: Tensor  # [T] the row of each token's request
    given_tokens: Tensor  # [n] input tokens of decodes; NO_TOKEN if only the device knows it
    given_positions: Tensor  # [n] positions of the given tokens
    # see prefix.Groups
    shared: Tensor  # [n], or empty without groups
    first: Tensor  # [groups]
    end: Tensor  # [groups]


def sizes(shape: StepShape) -> StepInputs:
    """Return the length of each field."""
    n, C, T, groups = shape
    starts = C + 1 if C else 0
    shared = n if groups else 0
    return StepInputs(n, n, C, C, starts, C, T, T, T, n, n, shared, groups, groups)


def pack(
    plan: Plan, shape: StepShape, padding_row: int, padding_block: int, S: int = 0, groups=()
) -> array:
    """
    Return the fields back to back, each padded to its size with requests in the padding row. The
    fields of `groups` (prefix.Groups), if any, come last. In this example, requests a and b decode.
    There is also a chunk with 3 tokens of c, padded to 4, which does not complete c's prompt:

         rows   last    chunk  sampling  chunk   chunk
                blocks  rows   rows      starts  contexts  tokens       positions  token rows
        | 3 0 | 7 2   | 5    | 8       | 0 3   | 5       | 22 23 24 0 | 2 3 4 0  | 5 5 5 8 |

    If S, the block size, is passed, decode tokens that the host knows are given. In the example it
    is not passed, so no tokens are given:

         given tokens  given positions
        | -1 -1       | 0 0            |

    >>> from paged import Request
    >>> a = Request("a", [11, 12], 9, row=3, block_table=[7])
    >>> b = Request("b", [13, 14, 15, 16, 17], 9, row=0, block_table=[6, 2])
    >>> c = Request("c", [20, 21, 22, 23, 24, 25], 9, row=5, prefill_cursor=2)
    >>> plan = Plan(decodes=[a, b], chunks=[(c, 3)])
    >>> pack(plan, StepShape(n=2, C=1, T=4), padding_row=8, padding_block=64).tolist()
    [3, 0, 7, 2, 5, 8, 0, 3, 5, 22, 23, 24, 0, 2, 3, 4, 0, 5, 5, 5, 8, -1, -1, 0, 0]
    """
    step = StepInputs(*([] for _ in StepInputs._fields))
    if S:
        decodes = Plan(decodes=plan.decodes, guesses=plan.guesses)
        inputs, _ = flat_inputs(decodes, S, [NO_TOKEN] * padding_row)
        for token, position, slot, row in inputs:
            step.rows.append(row)
            step.last_blocks.append(slot // S)
            step.given_tokens.append(token)
            # 0 if no token is given: the next step's inputs can then be identical, and not uploaded
            step.given_positions.append(position if token != NO_TOKEN else 0)
    else:
        step.rows.extend([r.row for r in plan.decodes])
        step.last_blocks.extend([r.block_table[-1] for r in plan.decodes])
    offset = 0
    for request, m in plan.chunks:
        start = request.prefill_cursor
        end = start + m
        step.chunk_rows.append(request.row)
        step.sampling_rows.append(request.row if request in plan.prefilled else padding_row)
        step.chunk_starts.append(offset)
        step.chunk_contexts.append(end)
        step.tokens.extend(request.tokens_between(start, end))
        step.positions.extend(range(start, end))
        step.token_rows.extend([request.row] * m)
        offset += m
    for values, of_groups in zip(step[-3:], groups, strict=False):
        values += of_groups
    row = padding_row
    padding = StepInputs(row, padding_block, row, row, offset, 0, 0, 0, row, NO_TOKEN, 0, 0, 0, 0)
    packed = []
    for values, size, value in zip(step, sizes(shape), padding, strict=True):
        packed += values
        packed += [value] * (size - len(values))
    return array("q", packed)  # torch converts an array ten times as fast as a list


def flat_inputs(plan: Plan, S: int, last_token=()) -> tuple[list[tuple], list[int]]:
    """
    Return a step's inputs as the host knows them: (id, position, slot, row of its request) for each
    token, decodes first. Also return the indices of the tokens whose logits are needed for
    `plan.sampled`. A token that the host does not know yet is taken from last_token [N], by row.
    """
    inputs = []
    last = []
    for request, n in plan.work:
        start = request.num_filled_slots
        tokens = request.tokens_between(start, start + n) + plan.guesses.get(request, [])
        first = request.num_tokens - 1  # from here on, logits are used to choose new tokens
        for position, token in enumerate(tokens, start):
            if token is TO_COME:
                token = last_token[request.row]
            slot = request.block_table[position // S] * S + position % S
            if position >= first:
                last.append(len(inputs))
            inputs.append((token, position, slot, request.row))
    return inputs, last


def upload(values, device, dtype=torch.int64, out: Tensor | None = None) -> Tensor:
    """
    Copy numbers from the host (a list, a tensor, or an array of the given dtype) to a device,
    either into a new tensor or to the start of `out`. The copy is made from pinned memory, so the
    host does not wait for it.
    """
    host = torch.asarray(values, dtype=dtype)
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    if out is None:
        return host.to(device, non_blocking=True)
    return out[: len(host)].copy_(host, non_blocking=True)


class ModelInputs(NamedTuple):
    """
    The model's inputs, named as in kernels.Batch. The shapes below are for decodes. For chunks, n
    is replaced by T in the first three fields, and by C in the last two. A step may have both
    decodes and chunks.
    """

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    slot_mapping: Tensor  # [n] int64
    context_lens: Tensor  # [n] int32
    block_tables: Tensor  # [n, M] int32


class KnownRows(NamedTuple):
    """
    The device's copy of each running request's state, indexed by row. The last row is for padding.
    """

    last_token: Tensor  # [N + 1] int64: the request's next input token
    context_len: Tensor  # [N + 1] int64: number of tokens in the pool
    block_tables: Tensor  # [N + 1, M] int32
    counting: Tensor  # [N + 1 or more] int32: 0, 1, 2, ...
    S: int


def decode_inputs(step: StepInputs, known: KnownRows) -> ModelInputs:
    """
    Return the inputs for n decodes. In place, step.last_blocks are added to known.block_tables, and
    known.context_len is advanced past the token; the padding row stays 0. After guesses, the
    context length is unspecified, because the host supplies the next token and its position.
    """
    last_token, context_len, block_tables, _, S = known
    rows = step.rows
    last_blocks = step.last_blocks
    is_given = step.given_tokens != NO_TOKEN
    tokens = torch.where(is_given, step.given_tokens, last_token[rows])
    positions = torch.where(is_given, step.given_positions, context_len[rows])
    block_tables[rows, positions // S] = last_blocks.int()
    context_len[rows] = positions + 1
    context_len[-1:].zero_()
    slots = last_blocks * S + positions % S
    context_lens = (positions + 1).int()
    return ModelInputs(tokens, positions, slots, context_lens, block_tables[rows])


def chunk_inputs(step: StepInputs, known: KnownRows) -> ModelInputs:
    """Return the inputs for chunks, per token [T] and per request [C]."""
    S = known.S
    blocks = known.block_tables[step.token_rows, step.positions // S]
    slots = blocks * S + step.positions % S
    tables = known.block_tables[step.chunk_rows]
    return ModelInputs(step.tokens, step.positions, slots, step.chunk_contexts.int(), tables)


def lay_out(
    packed: Tensor, shape: StepShape, plan: Plan | None, known: KnownRows, ops: Ops
) -> tuple[Batch, Tensor]:
    """
    Return a step's batch on one flat token axis, with decodes first and chunks after them. Also
    return the rows [n + C] of its requests, for the sampler. `packed` may be longer than the step.
    Without a plan, the whole step is padding. In place, known.context_len and known.block_tables
    are updated to their values after the step.
    """
    n, C, *_ = shape
    lengths = sizes(shape)
    step = StepInputs(*packed[: sum(lengths)].split(lengths))  # views of the fields
    inputs = ops.decode_inputs(step, known)
    query_start = known.counting[: n + 1]
    logits_index = query_start[:n]  # one token per row
    rows = step.rows
    if C:
        of_chunks = chunk_inputs(step, known)
        inputs = ModelInputs(*map(torch.cat, zip(inputs, of_chunks, strict=True)))
        chunk_starts = (n + step.chunk_starts).int()
        query_start = torch.cat([known.counting[:n], chunk_starts])
        logits_index = query_start[1:] - 1  # the last token of each request
        known.context_len[step.chunk_rows] = step.chunk_contexts
        rows = torch.cat([rows, step.sampling_rows])
    # The lengths on the host, which some operators use to divide up their work. The order is
    # decodes, padding, chunks, padding.
    plan = plan or Plan()
    no_chunk = [0] * (C - len(plan.chunks))
    query_lens = [1] * n + [m for _, m in plan.chunks] + no_chunk
    decodes = plan.work[: len(plan.decodes)]
    context_lens = [r.num_filled_slots + i + 1 for r, m in decodes for i in range(m)]
    context_lens += [1] * (n - len(context_lens))
    context_lens += [r.num_filled_slots + m for r, m in plan.chunks] + no_chunk
    longest = max(context_lens)
    M = inputs.block_tables.shape[1]
    assert longest <= M * known.S, f"a context of {longest} tokens does not fit into {M} blocks"
    if not ops.fixed_shapes:  # make the tables no wider than needed
        M = -(-longest // known.S)
        inputs = inputs._replace(block_tables=inputs.block_tables[:, :M])
    batch = Batch(
        **inputs._asdict(),
        query_start=query_start,
        logits_index=logits_index,
        num_decodes=n,
        query_lens_host=query_lens,
        context_lens_host=context_lens,
        ops=ops,
        groups=step[-3:] if shape.groups else None,
    )
    return batch, rows
