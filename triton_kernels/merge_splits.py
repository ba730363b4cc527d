"""Merges the splits of rows whose keys were cut, each row's splits at the same distance from one to the next.

Shape suffixes: B rows, H q heads, D head size, I splits.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.merge_parts import add_parts
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit
def _merged(
    partial_ptr, stats_ptr, start, count, head, columns, mask,
    H: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The splits of one row and head, BLOCK_I at a time."""
    # Below any score, and finite: of splits in which nothing is seen the largest is not.
    largest = -3.0e38
    weight = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, count, BLOCK_I):
        items = first + tl.arange(0, BLOCK_I)
        place = (start + items * STRIDE) * H + head
        own = tl.load(stats_ptr + place * 2, mask=items < count, other=float("-inf"))
        weights = tl.load(stats_ptr + place * 2 + 1, mask=items < count, other=0.0)
        sums = tl.load(
            partial_ptr + place[:, None] * D + columns[None, :], mask=(items < count)[:, None] & mask, other=0.0
        )
        acc, largest, weight = add_parts(acc, largest, weight, sums, own, weights)
    return tl.where(weight > 0, acc / tl.where(weight > 0, weight, 1.0), 0.0)


@triton.jit
def _merge_kernel(
    counts_ptr, starts_ptr, partial_ptr, stats_ptr, out_ptr,
    H: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, BLOCK_D: tl.constexpr, FEW: tl.constexpr,
    MANY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, B): one program merges the splits of one row and head, in their order. Rows of length 0 become zeros."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1)
    head = tl.program_id(0)
    count = tl.load(counts_ptr + row)
    start = tl.load(starts_ptr + row).to(tl.int64)
    if count != 1:
        columns = tl.arange(0, BLOCK_D)
        mask = columns < D
        # A long row's splits are many at a time, or their trips to memory add up. It depends on the row alone.
        if count <= FEW:
            y = _merged(partial_ptr, stats_ptr, start, count, head, columns, mask, H, D, STRIDE, BLOCK_D, FEW)
        else:
            y = _merged(partial_ptr, stats_ptr, start, count, head, columns, mask, H, D, STRIDE, BLOCK_D, MANY)
        tl.store(out_ptr + (row * H + head) * D + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def merge_splits(
    counts_B: Tensor, starts_B: Tensor, partial_IHD: Tensor, stats_IH2: Tensor, out_BHD: Tensor, *, stride: int = 1
) -> None:  # fmt: skip
    """Merge the splits of each row, in their order, where there are several; zeros where there are none. Graph-safe.

    `stride`: from one split of a row to the next.
    """
    B, H, D = out_BHD.shape
    block = next_power_of_2(D)
    _merge_kernel[(H, B)](
        counts_B, starts_B, partial_IHD, stats_IH2, out_BHD,
        H=H, D=D, STRIDE=stride, BLOCK_D=block, FEW=8, MANY=16, num_warps=max(1, block // 256),
        **overlap_options(out_BHD),
    )  # fmt: skip
