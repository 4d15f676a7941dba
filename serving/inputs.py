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
from itertools import accumulate
from typing import NamedTuple

import torch

from paged import Plan


class StepShape(NamedTuple):
    """What a step is padded to."""

    n: int  # decodes
    C: int  # chunks
    T: int  # tokens of all chunks


class StepInputs(NamedTuple):
    """The layout of a step's inputs, in this order; int64 each. `padding` and `sizes` follow it."""

    rows: torch.Tensor  # [n] the rows of the requests that decode
    last_blocks: torch.Tensor  # [n] the block that each one's token goes to, which may be new
    chunk_rows: torch.Tensor  # [C] the rows of the requests with a chunk
    sampling_rows: (
        torch.Tensor
    )  # [C] the same where the chunk completes the prompt, else the padding row
    chunk_starts: torch.Tensor  # [C + 1] where each chunk begins among the T tokens, and the end
    chunk_contexts: torch.Tensor  # [C] tokens in the pool after the chunk
    tokens: torch.Tensor  # [T] of all chunks
    positions: torch.Tensor  # [T] of each in its own request
    token_rows: torch.Tensor  # [T] the row of the request that each belongs to


def sizes(shape: StepShape) -> StepInputs:
    """The length of each field."""
    n, C, T = shape
    starts = C + 1 if C else 0
    return StepInputs(n, n, C, C, starts, C, T, T, T)


def pack(plan: Plan, shape: StepShape, padding_row: int, sink: int) -> array:
    """The fields one after the other, each padded to its size with requests of the padding row."""
    starts = list(accumulate((m for _, m in plan.chunks), initial=0))
    completed = [is_completed(r, m) for r, m in plan.chunks]
    spans = [(r, r.prefill_cursor, r.prefill_cursor + m) for r, m in plan.chunks]
    fields = StepInputs(
        rows=[r.row for r in plan.decodes],
        last_blocks=[r.block_table[-1] for r in plan.decodes],
        chunk_rows=[r.row for r, _ in plan.chunks],
        sampling_rows=[
            r.row if done else padding_row
            for (r, _), done in zip(plan.chunks, completed, strict=True)
        ],
        chunk_starts=starts if shape.C else [],
        chunk_contexts=[end for _, _, end in spans],
        tokens=[token for r, start, end in spans for token in r.tokens_between(start, end)],
        positions=[position for _, start, end in spans for position in range(start, end)],
        token_rows=[r.row for r, start, end in spans for _ in range(start, end)],
    )
    no_row = padding_row
    padding = StepInputs(no_row, sink, no_row, no_row, starts[-1], 0, 0, 0, no_row)
    packed = array("q")  # which a tensor is made of ten times as fast as of a list
    for values, size, value in zip(fields, sizes(shape), padding, strict=True):
        packed.extend(values)
        packed.extend([value] * (size - len(values)))
    return packed


def split(packed: torch.Tensor, shape: StepShape) -> StepInputs:
    """Views of the fields of a packed tensor, which may be longer."""
    lengths = sizes(shape)
    return StepInputs(*packed[: sum(lengths)].split(lengths))


def is_completed(request, m: int) -> bool:
    """Whether a chunk of m tokens completes what the request has to compute before it samples."""
    return request.prefill_cursor + m == request.prefill_target


class DecodeInputs(NamedTuple):
    """Of n requests that decode one token each, as in kernels.Batch."""

    tokens: torch.Tensor  # [n] int64
    positions: torch.Tensor  # [n] int64
    slot_mapping: torch.Tensor  # [n] int64
    context_lens: torch.Tensor  # [n] int32
    block_tables: torch.Tensor  # [n, M] int32


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
