"""Learned positions of a square of patches, stretched over an image's and added to its patches.

Shape suffixes: P patches, D hidden size, G positions (a square, row by row).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit
def _stretched(place, size, SIDE: tl.constexpr):
    """The position before a place in a row of so many, that behind, and how much of that one."""
    exact = tl.div_rn(place.to(tl.float32) * (SIDE - 1), tl.maximum(size - 1, 1).to(tl.float32))
    before = tl.floor(exact)
    return before.to(tl.int32), tl.minimum(before.to(tl.int32) + 1, SIDE - 1), exact - before


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["rows", "columns"])
def _grid_positions_kernel(
    x_ptr, table_ptr, places_ptr, rows, columns,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (P,): one program adds one patch's mean of four positions."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    patch = tl.program_id(0).to(tl.int64)
    top, bottom, down = _stretched(tl.load(places_ptr + patch * 2), rows, SIDE)
    left, right, along = _stretched(tl.load(places_ptr + patch * 2 + 1), columns, SIDE)
    numbers = tl.arange(0, BLOCK_D)
    mask = numbers < D
    table_ptr += numbers
    above = tl.load(table_ptr + (top * SIDE + left) * D, mask=mask, other=0.0).to(tl.float32) * (1 - along)
    above += tl.load(table_ptr + (top * SIDE + right) * D, mask=mask, other=0.0).to(tl.float32) * along
    below = tl.load(table_ptr + (bottom * SIDE + left) * D, mask=mask, other=0.0).to(tl.float32) * (1 - along)
    below += tl.load(table_ptr + (bottom * SIDE + right) * D, mask=mask, other=0.0).to(tl.float32) * along
    x = tl.load(x_ptr + patch * D + numbers, mask=mask, other=0.0).to(tl.float32)
    y = x + above * (1 - down) + below * down
    tl.store(x_ptr + patch * D + numbers, y.to(x_ptr.dtype.element_ty), mask=mask)


def side_of_square(x_PD: Tensor, table_GD: Tensor, places_P2: Tensor) -> int:
    """Of what a table of positions is, if it fits these patches, or raise."""
    check_dtype("x", x_PD, *FLOATS)
    check_shape("x", x_PD, None, None)
    check_contiguous("x", x_PD)
    check_shape("table", table_GD, None, x_PD.shape[1])
    check_same("table", table_GD, x_PD)
    side = math.isqrt(len(table_GD))
    if side * side != len(table_GD) or not side:
        raise ValueError(f"table: got {len(table_GD)} rows, wanted a square")
    check_indices("places", places_P2, x_PD, len(x_PD), 2)
    return side


def add_grid_positions(x_PD: Tensor, table_GD: Tensor, places_P2: Tensor, rows: int, columns: int) -> None:
    """Add to each patch, in place, what lies at its place when the table is stretched over so many rows and columns.

    The corners of both meet; between positions all is linear. `places_P2`: each patch's row and column, int32; nobody
    looks whether they are inside. fp32 inside, rounded once; graph-safe.
    """
    side = side_of_square(x_PD, table_GD, places_P2)
    P, D = x_PD.shape
    if not use_kernels(x_PD):
        add_grid_positions_reference(x_PD, table_GD, places_P2, rows, columns)
    elif P:
        block = next_power_of_2(D)
        _grid_positions_kernel[(P,)](
            x_PD, table_GD, places_P2, rows, columns, D=D, BLOCK_D=block, SIDE=side,
            num_warps=min(max(block // 512, 1), 8), **overlap_options(x_PD),
        )  # fmt: skip


def add_grid_positions_reference(
    x_PD: Tensor, table_GD: Tensor, places_P2: Tensor, rows: int, columns: int
) -> None:  # fmt: skip
    """The same in PyTorch."""
    side = math.isqrt(len(table_GD))
    last_2 = torch.tensor([rows - 1, columns - 1], device=x_PD.device).clamp(min=1)
    exact_P2 = places_P2.float() * (side - 1) / last_2
    before_P2 = exact_P2.long()
    behind_P2 = (before_P2 + 1).clamp(max=side - 1)
    y_PD = x_PD.float()
    for vertical in (0, 1):
        for horizontal in (0, 1):
            chosen_2 = torch.tensor([vertical, horizontal], device=x_PD.device, dtype=torch.bool)
            share_P2 = torch.where(chosen_2, exact_P2 - before_P2, 1 - (exact_P2 - before_P2))
            place_P2 = torch.where(chosen_2, behind_P2, before_P2)
            y_PD += table_GD[place_P2[:, 0] * side + place_P2[:, 1]].float() * share_P2.prod(1, keepdim=True)
    x_PD.copy_(y_PD)
