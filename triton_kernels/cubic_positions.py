"""Learned positions of a square of patches, laid over an image of any shape and added to its patches.

Unlike in `grid_positions.py` it is edges that meet, not the middles of the outermost patches, and between positions a
curve goes through four of them each way.

Shape suffixes: P patches, D hidden size, G positions (a square, row by row).
"""

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.grid_positions import side_of_square
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2

_BEND = -0.75
"""How steep a curve is at its ends; as PyTorch's bicubic interpolation has it."""


@triton.jit
def _share(distance, BEND: tl.constexpr):
    """Of a position so far away, 0 to 2."""
    d = tl.abs(distance)
    near = ((BEND + 2.0) * d - (BEND + 3.0)) * d * d + 1.0
    far = ((d - 5.0) * d + 8.0) * d * BEND - 4.0 * BEND
    return tl.where(d <= 1.0, near, far)


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["rows", "columns"])
def _cubic_positions_kernel(
    x_ptr, table_ptr, places_ptr, rows, columns,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, BEND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (P,): one program adds one patch's mean of sixteen positions."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    patch = tl.program_id(0).to(tl.int64)
    row = tl.load(places_ptr + patch * 2).to(tl.float32)
    column = tl.load(places_ptr + patch * 2 + 1).to(tl.float32)
    down = tl.div_rn((row + 0.5) * SIDE, rows.to(tl.float32)) - 0.5
    along = tl.div_rn((column + 0.5) * SIDE, columns.to(tl.float32)) - 0.5
    numbers = tl.arange(0, BLOCK_D)
    mask = numbers < D
    table_ptr += numbers
    sum_D = tl.zeros((BLOCK_D,), tl.float32)
    for vertical in tl.static_range(-1, 3):
        y = tl.floor(down) + vertical
        line = tl.minimum(tl.maximum(y.to(tl.int32), 0), SIDE - 1) * SIDE
        line_D = tl.zeros((BLOCK_D,), tl.float32)
        for horizontal in tl.static_range(-1, 3):
            x = tl.floor(along) + horizontal
            position = line + tl.minimum(tl.maximum(x.to(tl.int32), 0), SIDE - 1)
            learned_D = tl.load(table_ptr + position * D, mask=mask, other=0.0).to(tl.float32)
            line_D += learned_D * _share(along - x, BEND)
        sum_D += line_D * _share(down - y, BEND)
    x_D = tl.load(x_ptr + patch * D + numbers, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + patch * D + numbers, (x_D + sum_D).to(x_ptr.dtype.element_ty), mask=mask)


def add_cubic_positions(x_PD: Tensor, table_GD: Tensor, places_P2: Tensor, rows: int, columns: int) -> None:
    """Add to each patch, in place, what lies below its middle when the table is laid over so many rows and columns.

    Beyond its edges the table goes on as it is there. `places_P2`: each patch's row and column, int32; nobody looks
    whether they are inside. fp32 inside, rounded once; graph-safe.
    """
    side = side_of_square(x_PD, table_GD, places_P2)
    P, D = x_PD.shape
    if not use_kernels(x_PD):
        add_cubic_positions_reference(x_PD, table_GD, places_P2, rows, columns)
    elif P:
        block = next_power_of_2(D)
        _cubic_positions_kernel[(P,)](
            x_PD, table_GD, places_P2, rows, columns, D=D, BLOCK_D=block, SIDE=side, BEND=_BEND,
            num_warps=min(max(block // 512, 1), 8), **overlap_options(x_PD),
        )  # fmt: skip


def add_cubic_positions_reference(
    x_PD: Tensor, table_GD: Tensor, places_P2: Tensor, rows: int, columns: int
) -> None:  # fmt: skip
    """The same in PyTorch: of both directions the shares of four positions, and their products."""
    side = math.isqrt(len(table_GD))
    size_2 = torch.tensor([rows, columns], device=x_PD.device)
    exact_P2 = (places_P2.float() + 0.5) * side / size_2 - 0.5
    taps_P24 = exact_P2.floor()[..., None] + torch.arange(-1, 3, device=x_PD.device)
    distance_P24 = (exact_P2[..., None] - taps_P24).abs()
    near_P24 = ((_BEND + 2) * distance_P24 - (_BEND + 3)) * distance_P24**2 + 1
    far_P24 = ((distance_P24 - 5) * distance_P24 + 8) * distance_P24 * _BEND - 4 * _BEND
    share_P24 = torch.where(distance_P24 <= 1, near_P24, far_P24)
    at_P24 = taps_P24.long().clamp(0, side - 1)
    sum_PD = torch.zeros_like(x_PD, dtype=torch.float32)
    for vertical, horizontal in itertools.product(range(4), range(4)):
        share_P = share_P24[:, 0, vertical] * share_P24[:, 1, horizontal]
        learned_PD = table_GD[at_P24[:, 0, vertical] * side + at_P24[:, 1, horizontal]]
        sum_PD += learned_PD.float() * share_P[:, None]
    x_PD.copy_(x_PD.float() + sum_PD)
