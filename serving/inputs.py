"""
What a step is given: numbers that the device does not know yet, packed on the host and split on the
device.

    packed = pack(plan, shape, padding_row, sink)     # host: one array("q"), so that one copy brings all of it
    step = split(tensor, shape)                       # device: views of it, by name

Most of what a step needs is on the device already, in arrays indexed by a request's row: its last
token, its context length, its block table. `decode_inputs` makes the inputs of decodes from these.
Letters: n requests that decode, C prefill chunks with T tokens together, N rows, M blocks per
table, S block size.
"""

from array import array
from typing import NamedTuple

from torch import Tensor

from paged import Plan


class StepShape(NamedTuple):
    """What a step is padded to."""

    n: int  # decodes
    C: int  # chunks
    T: int  # tokens of all chunks


class StepInputs(NamedTuple):
    """The layout of a step's inputs, in this order; int64 each. `padding` and `sizes` follow it."""

    rows: Tensor  # [n] the rows of the requests that decode
    last_blocks: Tensor  # [n] the block that each one's token goes to, which may be new
    chunk_rows: Tensor  # [C] the rows of the requests with a chunk
    sampling_rows: Tensor  # [C] the same where the chunk completes the prompt, else the padding row
    chunk_starts: Tensor  # [C + 1] where each chunk begins among the T tokens, and the end
    chunk_contexts: Tensor  # [C] tokens in the pool after the chunk
    tokens: Tensor  # [T] of all chunks
    positions: Tensor  # [T] of each in its own request
    token_rows: Tensor  # [T] the row of the request that each belongs to


def sizes(shape: StepShape) -> StepInputs:
    """The length of each field."""
    n, C, T = shape
    starts = C + 1 if C else 0
    return StepInputs(n, n, C, C, starts, C, T, T, T)


def pack(plan: Plan, shape: StepShape, padding_row: int, sink: int) -> array:
    """The fields one after the other, each padded to its size with requests of the padding row."""
    step = StepInputs(*([] for _ in StepInputs._fields))
    step.rows.extend([r.row for r in plan.decodes])
    step.last_blocks.extend([r.block_table[-1] for r in plan.decodes])
    offset = 0
    for request, m in plan.chunks:
        start = request.prefill_cursor
        end = start + m
        samples = is_completed(request, m)
        step.chunk_rows.append(request.row)
        step.sampling_rows.append(request.row if samples else padding_row)
        step.chunk_starts.append(offset)
        step.chunk_contexts.append(end)
        step.tokens.extend(request.tokens_between(start, end))
        step.positions.extend(range(start, end))
        step.token_rows.extend([request.row] * m)
        offset += m
    row = padding_row
    padding = StepInputs(row, sink, row, row, offset, 0, 0, 0, row)
    packed = array("q")  # which a tensor is made of ten times as fast as of a list
    for values, size, value in zip(step, sizes(shape), padding, strict=True):
        missing = size - len(values)
        packed.extend(values)
        packed.extend([value] * missing)
    return packed


def split(packed: Tensor, shape: StepShape) -> StepInputs:
    """Views of the fields of a packed tensor, which may be longer."""
    lengths = sizes(shape)
    fields = packed[: sum(lengths)].split(lengths)
    return StepInputs(*fields)


def is_completed(request, m: int) -> bool:
    """Whether a chunk of m tokens completes what the request has to compute before it samples."""
    return request.prefill_cursor + m == request.prefill_target


class DecodeInputs(NamedTuple):
    """Of n requests that decode one token each, as in kernels.Batch."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    slot_mapping: Tensor  # [n] int64
    context_lens: Tensor  # [n] int32
    block_tables: Tensor  # [n, M] int32


def decode_inputs(rows, last_blocks, last_token, context_len, block_tables, S: int) -> DecodeInputs:
    """
    rows and last_blocks [n] int64: the requests' rows in last_token and context_len [N + 1] int64
    and block_tables [N + 1, M] int32, and the block of the new token. In place: the tables get
    these blocks, context_len grows by one, but for the last row, which is padding's.
    """
    positions = context_len[rows]
    block_tables[rows, positions // S] = last_blocks.int()
    context_len[rows] = positions + 1
    context_len[-1:].zero_()
    slots = last_blocks * S + positions % S
    context_lens = (positions + 1).int()
    return DecodeInputs(last_token[rows], positions, slots, context_lens, block_tables[rows])
