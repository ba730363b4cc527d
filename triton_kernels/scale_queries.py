"""Queries times a number of their position, where a model was trained so for sequences longer than the first ones.

Shape suffixes: T tokens, N numbers of a row, P positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_indices,
    check_shape,
)
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["P"])
def _scale_queries_kernel(
    x_ptr, positions_ptr, scales_ptr, rows_ptr, P,
    COLUMNS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, COLUMNS / BLOCK): one program owns BLOCK numbers of one token, which most positions leave alone."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    # Where tokens stand is in the plan, which may be read before the wait.
    position = tl.load(positions_ptr + token)
    scale = tl.load(scales_ptr + tl.minimum(tl.maximum(position, 0), P - 1))
    wait_for_previous(PDL)
    if HAS_ROWS and token >= tl.load(rows_ptr):
        scale = 1.0
    if scale != 1.0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * ROW + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
        tl.store(x_ptr + token * ROW + columns, (x * scale).to(x_ptr.dtype.element_ty), mask=columns < COLUMNS)


def scale_queries(
    x_TN: Tensor, num_columns: int, positions_T: Tensor, scales_P: Tensor, *, rows: Tensor | None = None
) -> None:
    """Multiply the first `num_columns` of each row, in place, by what `scales_P` (fp32) has for the token's position.
    Rows may be parts of longer ones.

    `rows`: how many tokens there are in truth, int32 [1] on the device; those behind may be left as they are. fp32
    inside, rounded once; graph-safe. Positions are read before the wait: between what wrote them and this there must be
    a kernel that is launched without overlap (see overlap.py).
    """
    check_dtype("x", x_TN, *FLOATS)
    check_shape("x", x_TN, None, None)
    check_contiguous("a row of x", x_TN[:1])
    if not 0 < num_columns <= x_TN.shape[1]:
        raise ValueError(f"x: got {x_TN.shape[1]} columns, wanted {num_columns} or more to scale")
    check_shape("positions", positions_T, len(x_TN))
    check_dtype("positions", positions_T, torch.int32, torch.int64)
    check_dtype("scales", scales_P, torch.float32)
    for name, tensor in (("positions", positions_T), ("scales", scales_P)):
        check_contiguous(name, tensor)
        check_device(name, tensor, x_TN)
    if rows is not None:
        check_indices("rows", rows, x_TN, 1)
    if not use_kernels(x_TN):
        scale_queries_reference(x_TN, num_columns, positions_T, scales_P)
    elif T := len(x_TN):
        _scale_queries_kernel[(T, cdiv(num_columns, _BLOCK))](
            x_TN, positions_T, scales_P, positions_T if rows is None else rows, len(scales_P),
            COLUMNS=num_columns, ROW=x_TN.stride(0), BLOCK=_BLOCK, HAS_ROWS=rows is not None, num_warps=4,
            **overlap_options(x_TN),
        )  # fmt: skip


def scale_queries_reference(x_TN: Tensor, num_columns: int, positions_T: Tensor, scales_P: Tensor) -> None:
    """The same in PyTorch."""
    of_token_T1 = scales_P[positions_T.long().clamp(0, len(scales_P) - 1)][:, None]
    x_TN[:, :num_columns] = x_TN[:, :num_columns].float() * of_token_T1
