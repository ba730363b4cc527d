"""Sums over ranks through peer memory: ranks write rows into each other's inboxes and add what they received.

The kind of inbox says how a rank sees that a row has come: from numbers beside all its words, which is the shortest way
for few bytes, or from one flag a row, which moves half the bytes. The sum is the same to the bit: over ranks in order,
in fp32, rounded once. All ranks must make the same calls, with as many rows, on one stream.

Shape suffixes: T rows, D hidden size, P ranks.
"""

from typing import assert_never

import torch
from torch import Tensor

from tercet.triton_kernels.all_reduce_rows import sum_rows, sum_rows_add_rms_norm
from tercet.triton_kernels.all_reduce_words import sum_words, sum_words_add_rms_norm
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.inbox import Inboxes, RowInboxes, WordInboxes
from tercet.triton_kernels.residual_add import check_update


def all_reduce(x_TD: Tensor, inboxes: Inboxes) -> Tensor:
    """Sum over ranks, in place. Graph-safe; all ranks call it with the same shape."""
    _sum(x_TD, 1, x_TD, inboxes)
    return x_TD


def all_reduce_parts(x_STD: Tensor, dtype: torch.dtype, inboxes: Inboxes) -> Tensor:
    """Sum over ranks what each has in parts, fp32, which it sums in order and rounds first. As `all_reduce`."""
    check_dtype("x", x_STD, torch.float32)
    check_contiguous("x", x_STD)
    check_shape("x", x_STD, None, None, None)
    out_TD = x_STD.new_empty(x_STD.shape[1:], dtype=dtype)
    _sum(x_STD, x_STD.shape[0], out_TD, inboxes)
    return out_TD


def _sum(x: Tensor, parts: int, out_TD: Tensor, inboxes: Inboxes) -> None:
    _check(out_TD, inboxes)
    match inboxes:
        case WordInboxes():
            sum_words(x, parts, out_TD, inboxes)
        case RowInboxes():
            sum_rows(x, parts, out_TD, inboxes)
        case _:
            assert_never(inboxes)


def all_reduce_add_rms_norm(
    update_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, inboxes: Inboxes
) -> Tensor:
    """Add the sum over ranks of `update_TD` into `residual_TD` in place; return that, normed and scaled.

    `update_TD` may be an update's parts, [S, T, D] in fp32, which each rank sums in order and rounds first. The
    residual is to the bit what `all_reduce` and `add_rms_norm` make of it; the norm sums in another order. Graph-safe;
    all ranks call it with the same shape.
    """
    parts = check_update(update_TD, residual_TD)
    _check(residual_TD, inboxes)
    check_shape("weight", weight_D, residual_TD.shape[1])
    check_same("weight", weight_D, residual_TD, torch.float32)
    out_TD = torch.empty_like(residual_TD)
    match inboxes:
        case WordInboxes():
            sum_words_add_rms_norm(update_TD, parts, residual_TD, weight_D, out_TD, eps, inboxes)
        case RowInboxes():
            sum_rows_add_rms_norm(update_TD, parts, residual_TD, weight_D, out_TD, eps, inboxes)
        case _:
            assert_never(inboxes)
    return out_TD


def sum_in_order(x_PTD: Tensor) -> Tensor:
    """Of every rank's rows, what `all_reduce` makes of them: a sum in rank order, in fp32, rounded once."""
    total_TD = x_PTD[0].float()
    for part_TD in x_PTD[1:]:
        total_TD = total_TD + part_TD
    return total_TD.to(x_PTD.dtype)


def _check(x_TD: Tensor, inboxes: Inboxes) -> None:
    check_dtype("x", x_TD, *FLOATS)
    check_contiguous("x", x_TD)
    check_shape("x", x_TD, None, None)
    inboxes.check_room(x_TD.shape[0], x_TD.shape[1] * x_TD.element_size())
