"""Attention's answers times the sigmoid of the numbers that gate them.

Shape suffixes: T tokens, H numbers of all heads, N numbers of the rows that hold the gates.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_indices, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.gated_head_norm import check_gates
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["first_column"], do_not_specialize_on_alignment=["first_column"])
def _gate_by_sigmoid_kernel(
    x_ptr, gates_ptr, rows_ptr, first_column,
    H: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, H / BLOCK): one program owns BLOCK numbers of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        mask &= token < tl.load(rows_ptr)
    x = tl.load(x_ptr + token * H + columns, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gates_ptr + token * N + first_column + columns, mask=mask, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-gates))
    tl.store(x_ptr + token * H + columns, y.to(x_ptr.dtype.element_ty), mask=mask)


def gate_by_sigmoid(x_TH: Tensor, gates_TN: Tensor, first_column: int, *, rows: Tensor | None) -> None:
    """Multiply `x_TH`, in place, by the sigmoid of H columns of `gates_TN` from `first_column` on.

    `rows`: how many tokens there are in truth, int32 [1] on the device; those behind may be left as they are. fp32
    inside, rounded once; graph-safe.
    """
    check_dtype("x", x_TH, *FLOATS)
    check_shape("x", x_TH, None, None)
    check_contiguous("x", x_TH)
    check_gates("gates", gates_TN, first_column, x_TH, x_TH.shape[1])
    if rows is not None:
        check_indices("rows", rows, x_TH, 1)
    if not use_kernels(x_TH):
        gate_by_sigmoid_reference(x_TH, gates_TN, first_column)
    elif x_TH.numel():
        T, H = x_TH.shape
        _gate_by_sigmoid_kernel[(T, cdiv(H, _BLOCK))](
            x_TH, gates_TN, x_TH if rows is None else rows, first_column,
            H=H, N=gates_TN.shape[1], BLOCK=_BLOCK, HAS_ROWS=rows is not None, num_warps=4, **overlap_options(x_TH),
        )  # fmt: skip


def gate_by_sigmoid_reference(x_TH: Tensor, gates_TN: Tensor, first_column: int) -> None:
    """The same in PyTorch; in fp64, for in fp32 sigmoids are rounded otherwise at the end of a tensor."""
    gates_TH = gates_TN[:, first_column : first_column + x_TH.shape[1]].double().sigmoid()
    x_TH.copy_(x_TH.float() * gates_TH.float())
