"""A Mamba-2 layer's answers, times SiLU of the numbers that gate them; then RMS norm of each group of them.

With several ranks a group may be of more than one: then each says the sum of its squares first.

Shape suffixes: T tokens, X numbers of all heads of this rank, G its groups or parts of one, N numbers of the rows that
hold the gates, P ranks that share a group.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_indices,
    check_same,
    check_shape,
)
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.gated_head_norm import check_gates
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2

_FEW = 2048
"""Numbers of a group up to which few warps norm it."""


@triton.jit
def _load_gated(x_ptr, z_ptr, token, first_column, columns, mask, X: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + token * X + columns, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * N + first_column + columns, mask=mask, other=0.0).to(tl.float32)
    return x * (z / (1.0 + tl.exp(-z)))


@triton.jit(do_not_specialize=["first_column"], do_not_specialize_on_alignment=["first_column"])
def _gated_squares_kernel(
    x_ptr, z_ptr, rows_ptr, squares_ptr, first_column,
    X: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program owns one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < X
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        mask &= token < tl.load(rows_ptr)
    y = _load_gated(x_ptr, z_ptr, token, first_column, columns, mask, X, N)
    tl.store(squares_ptr + token, tl.sum(y * y))


@triton.jit(do_not_specialize=["first_column", "T"], do_not_specialize_on_alignment=["first_column", "T"])
def _gated_group_norm_kernel(
    x_ptr, z_ptr, weight_ptr, squares_ptr, out_ptr, rows_ptr, eps, first_column, T,
    X: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, G): one program owns one group of one token, or this rank's part of it."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    columns, mask = tl.program_id(1) * SIZE + numbers, numbers < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        mask &= token < tl.load(rows_ptr)
    y = _load_gated(x_ptr, z_ptr, token, first_column, columns, mask, X, N)
    if RANKS == 1:
        squares = tl.sum(y * y)
    else:
        squares = tl.load(squares_ptr + token)
        for rank in tl.static_range(1, RANKS):
            squares += tl.load(squares_ptr + rank * T + token)
    y *= tl.rsqrt(squares / (SIZE * RANKS) + eps) * weight
    tl.store(out_ptr + token * X + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def gated_squares(x_TX: Tensor, z_TN: Tensor, first_column: int, *, rows: Tensor | None) -> Tensor:
    """Sums of squares of gated numbers: fp32 [T, 1]. Arguments as below; graph-safe."""
    _check(x_TX, z_TN, first_column, rows)
    if not use_kernels(x_TX):
        return _gated_reference(x_TX, z_TN, first_column).square().sum(1, keepdim=True)
    T, X = x_TX.shape
    squares_T1 = torch.empty(T, 1, dtype=torch.float32, device=x_TX.device)
    if T:
        _gated_squares_kernel[(T,)](
            x_TX, z_TN, x_TX if rows is None else rows, squares_T1, first_column,
            X=X, N=z_TN.shape[1], BLOCK=next_power_of_2(X), HAS_ROWS=rows is not None, num_warps=_warps(X),
            **overlap_options(x_TX),
        )  # fmt: skip
    return squares_T1


def gated_group_norm(
    x_TX: Tensor, z_TN: Tensor, first_column: int, weight_X: Tensor, num_groups: int, eps: float, *,
    rows: Tensor | None, squares_PT1: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[T, X] -> [T, X]: numbers times SiLU of their gates, each group of them normed, and scaled.

    The gates are X columns of `z_TN` from `first_column` on. `rows`: how many tokens there are in truth, int32 [1] on
    the device; those behind may be left as they are. `squares_PT1`: what `gated_squares` said on each rank that shares
    this one's only group. Mutates nothing; fp32 inside, rounded once; graph-safe.
    """
    _check(x_TX, z_TN, first_column, rows)
    T, X = x_TX.shape
    if num_groups < 1 or X % num_groups or (squares_PT1 is not None and num_groups > 1):
        raise ValueError(f"num_groups: got {num_groups}, wanted a divisor of {X}, or 1 of which ranks have parts")
    check_shape("weight", weight_X, X)
    check_dtype("weight", weight_X, torch.float32)
    check_device("weight", weight_X, x_TX)
    if squares_PT1 is not None:
        check_shape("squares", squares_PT1, None, T, 1)
        check_dtype("squares", squares_PT1, torch.float32)
        check_contiguous("squares", squares_PT1)
        check_device("squares", squares_PT1, x_TX)
    if not use_kernels(x_TX):
        return gated_group_norm_reference(x_TX, z_TN, first_column, weight_X, num_groups, eps, squares_PT1)
    out_TX, size = torch.empty_like(x_TX), X // num_groups
    if T:
        _gated_group_norm_kernel[(T, num_groups)](
            x_TX, z_TN, weight_X, weight_X if squares_PT1 is None else squares_PT1, out_TX,
            x_TX if rows is None else rows, eps, first_column, T,
            X=X, SIZE=size, N=z_TN.shape[1], RANKS=1 if squares_PT1 is None else len(squares_PT1),
            BLOCK=next_power_of_2(size), HAS_ROWS=rows is not None, num_warps=_warps(size), **overlap_options(x_TX),
        )  # fmt: skip
    return out_TX


def _warps(size: int) -> int:
    return 4 if size <= _FEW else 8


def gated_group_norm_reference(
    x_TX: Tensor, z_TN: Tensor, first_column: int, weight_X: Tensor, num_groups: int, eps: float,
    squares_PT1: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in PyTorch."""
    y_TGX = _gated_reference(x_TX, z_TN, first_column).unflatten(1, (num_groups, -1))
    if squares_PT1 is None:
        mean_TG1 = y_TGX.square().mean(-1, keepdim=True)
    else:
        mean_TG1 = (squares_PT1.sum(0) / (y_TGX.shape[-1] * len(squares_PT1)))[:, None]
    normed_TX = (y_TGX * (mean_TG1 + eps).rsqrt()).flatten(1)
    scaled_TX: Tensor = normed_TX * weight_X
    return scaled_TX.to(x_TX.dtype)


def _gated_reference(x_TX: Tensor, z_TN: Tensor, first_column: int) -> Tensor:
    """SiLU in fp64, for in fp32 it is rounded otherwise at the end of a tensor."""
    z_TX = z_TN[:, first_column : first_column + x_TX.shape[1]]
    return x_TX.float() * F.silu(z_TX.double()).float()


def _check(x_TX: Tensor, z_TN: Tensor, first_column: int, rows: Tensor | None) -> None:
    check_dtype("x", x_TX, *FLOATS)
    check_shape("x", x_TX, None, None)
    check_contiguous("x", x_TX)
    check_gates("z", z_TN, first_column, x_TX, x_TX.shape[1])
    check_same("z", z_TN, x_TX)
    if rows is not None:
        check_indices("rows", rows, x_TX, 1)
