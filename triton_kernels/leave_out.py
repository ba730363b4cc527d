"""Rows that sample nothing after all: their mask was late for the draw.

Shape suffixes: N rows that are left out, R rows of the step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["R"])
def _leave_out_kernel(rows_ptr, positions_ptr, R):
    """Grid (N,)."""
    row = tl.load(rows_ptr + tl.program_id(0))
    if (row >= 0) & (row < R):
        tl.store(positions_ptr + row, -1)


def leave_out(rows_N: Tensor, positions_R: Tensor) -> None:
    """Set the positions that these rows sample to -1, which is none, in place; rows outside are dropped. All int32."""
    check_shape("rows", rows_N, None)
    check_shape("positions", positions_R, None)
    for name, tensor in (("rows", rows_N), ("positions", positions_R)):
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
    check_device("rows", rows_N, positions_R)
    if not use_kernels(positions_R):
        leave_out_reference(rows_N, positions_R)
    elif len(rows_N):
        _leave_out_kernel[(len(rows_N),)](rows_N, positions_R, len(positions_R))


def leave_out_reference(rows_N: Tensor, positions_R: Tensor) -> None:
    """The same in PyTorch."""
    positions_R[rows_N[(rows_N >= 0) & (rows_N < len(positions_R))].long()] = -1
