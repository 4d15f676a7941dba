"""
`--deterministic` on a GPU: linear layers whose results for a row are identical to the last bit,
whatever other rows are in the step. A sum of floats depends on the order of its additions, so here
that order never depends on the batch. A matrix product is a sum of parts (split-K), which are added
first to last. The number of parts depends only on the layer, and each part is summed in the order
of its inputs. The tile shape does not affect that order, because tensor cores add in the same order
for every tile shape. So the number of rows may determine the tiles, and which program adds up which
parts.

Attention is always deterministic (kernels.py). ops/choice.py builds the table of operators. Letters
are as in linear.py.
"""

from torch import Tensor

import model
from kernels import Batch, triton
from ops import fused
from ops.linear import ENOUGH_PROGRAMS, Tiles, head_tiles, launch_linear, layer_tiles, num_parts

# For up to APART_ROWS rows, tiles are chosen as in linear.py, and each part of a sum has its own
# program. For more rows, one program computes all parts, using the largest tiles that still give
# enough programs.
APART_ROWS = 512
LARGE = Tiles(128, 128, 64, warps=8, stages=4)
MIDDLE = Tiles(128, 64, 64, warps=8, stages=6)
SMALL = Tiles(64, 64, 64, warps=4, stages=8, swapped=True)


def tiles_for(R: int, layer, P=1) -> Tiles:
    """
    Return the tiles for a product of R rows that is the sum of P parts. The tiles do not affect the
    result at all.
    """
    N = len(layer.weight)
    if R <= APART_ROWS:
        tiles = layer_tiles(R, N, layer.weight.numel())
        return tiles._replace(apart=P)
    for tiles in (LARGE, MIDDLE, SMALL):
        programs = triton.cdiv(N, tiles.cols) * triton.cdiv(R, tiles.rows)
        if programs >= ENOUGH_PROGRAMS:
            break
    return tiles._replace(together=P)


def linear(x: Tensor, layer, activation=None, gated=False, partial_sums=False) -> Tensor:
    """Like linear.linear, but the number of parts depends only on the layer."""
    N, K = layer.weight.shape
    P = 1
    if partial_sums:
        programs = N // 64  # per part; most tiles have 64 columns
        P = num_parts(K, programs)
    tiles = tiles_for(len(x), layer, P)
    return launch_linear(x, layer, activation, gated, partial_sums, tiles=tiles)


def head(x: Tensor, layer, softcap: float = 0.0) -> Tensor:
    """Like linear.head, but use matrix_kernel whatever the number of rows."""
    logits = launch_linear(x, layer, tiles=head_tiles(len(x)))
    return model.soft_cap(logits, softcap)


def project_qkv(y: Tensor, attn: model.Attention, kv: Tensor, batch: Batch):
    """Like fused.project_qkv, but with the tiles from `tiles_for`."""
    if batch.rotations:
        return fused.project_and_rotate(y, attn, kv, batch)
    if attn.q_norm is not None:
        return model.project_qkv(y, attn, kv, batch)
    tiles = tiles_for(len(y), attn.c_attn)
    targets = (kv, batch.slot_mapping, None, None)
    q = launch_linear(y, attn.c_attn, targets=targets, tiles=tiles)
    return q.view(len(y), attn.H, attn.D), kv
