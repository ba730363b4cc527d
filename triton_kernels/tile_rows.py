"""Rows of tiles that an encoder looks at each by itself: patches with their learned positions, behind one row that is
no patch's.

Shape suffixes: P patches, T rows, D hidden size, G positions of a tile: that of the first row, then its patches', line
by line.
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
def _tile_rows_kernel(
    x_ptr, first_ptr, table_ptr, places_ptr, out_ptr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (SIDE * SIDE + 1, tiles): one program makes one row of a tile."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    index, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    numbers = tl.arange(0, BLOCK_D)
    mask = numbers < D
    if index == 0:
        x_ptr = first_ptr
        position = 0
    else:
        patch = tile * (SIDE * SIDE) + index - 1
        x_ptr += patch * D
        row, column = tl.load(places_ptr + patch * 2) % SIDE, tl.load(places_ptr + patch * 2 + 1) % SIDE
        position = 1 + row * SIDE + column
    x = tl.load(x_ptr + numbers, mask=mask, other=0.0).to(tl.float32)
    y = x + tl.load(table_ptr + position * D + numbers, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (tile * (SIDE * SIDE + 1) + index) * D + numbers, y.to(out_ptr.dtype.element_ty), mask=mask)


def tile_rows(x_PD: Tensor, first_D: Tensor, table_GD: Tensor, places_P2: Tensor) -> Tensor:
    """[P, D] -> [T, D]: of each tile's G - 1 patches G rows, `first_D` ahead of them, all with their positions added.

    `places_P2`: each patch's row and column in its tile or in what tiles make up, int32. Mutates nothing; fp32 inside,
    rounded once; graph-safe.
    """
    check_dtype("x", x_PD, *FLOATS)
    check_shape("x", x_PD, None, None)
    check_contiguous("x", x_PD)
    P, D = x_PD.shape
    for name, tensor, shape in (("first", first_D, (D,)), ("table", table_GD, (None, D))):
        check_shape(name, tensor, *shape)
        check_same(name, tensor, x_PD)
    G, side = len(table_GD), math.isqrt(len(table_GD) - 1)
    if side * side != G - 1 or not side:
        raise ValueError(f"table: got {G} rows, wanted a square and one more")
    if P % (G - 1):
        raise ValueError(f"x: got {P} rows, wanted a multiple of {G - 1}")
    check_indices("places", places_P2, x_PD, P, 2)
    if not use_kernels(x_PD):
        return tile_rows_reference(x_PD, first_D, table_GD, places_P2)
    tiles = P // (G - 1)
    out_TD = torch.empty(tiles * G, D, dtype=x_PD.dtype, device=x_PD.device)
    if tiles:
        block = next_power_of_2(D)
        _tile_rows_kernel[(G, tiles)](
            x_PD, first_D, table_GD, places_P2, out_TD, D=D, BLOCK_D=block, SIDE=side,
            num_warps=min(max(block // 512, 1), 8), **overlap_options(x_PD),
        )  # fmt: skip
    return out_TD


def tile_rows_reference(x_PD: Tensor, first_D: Tensor, table_GD: Tensor, places_P2: Tensor) -> Tensor:
    """The same in PyTorch."""
    G, D = table_GD.shape
    side = math.isqrt(G - 1)
    within_P2 = places_P2.long() % side
    patches_PD = x_PD.float() + table_GD[1 + within_P2[:, 0] * side + within_P2[:, 1]].float()
    tiles = patches_PD.view(-1, G - 1, D)
    first = (first_D.float() + table_GD[0].float()).expand(len(tiles), 1, D)
    return torch.cat((first, tiles), 1).view(-1, D).to(x_PD.dtype)
