"""Cosines and sines of tokens that have several positions: each frequency turns by one of them.

Knows a table for single positions; by which of a token's positions a frequency turns, it is told.

Shape suffixes: T tokens, A positions of one, P positions of the table, R rotary dimension (R/2 cosines, then R/2
sines), F frequencies (R / 2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import (
    check_contiguous,
    check_dtype,
    check_indices,
    check_same,
    check_shape,
)
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit(do_not_specialize=["num_positions"], do_not_specialize_on_alignment=["num_positions"])
def _axis_turns_kernel(
    cos_sin_ptr, positions_ptr, axis_ptr, else_ptr, out_ptr, num_positions,
    A: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program makes one token's row."""
    token = tl.program_id(0).to(tl.int64)
    frequencies = tl.arange(0, BLOCK_F)
    mask = frequencies < F
    axis = tl.load(axis_ptr + frequencies, mask=mask, other=0)
    let_next_start(PDL)
    wait_for_previous(PDL)
    position = tl.load(positions_ptr + token * A + axis, mask=mask, other=0)
    if else_ptr is not None:
        position = tl.where(position < 0, tl.load(else_ptr + token), position)
    position = tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64)
    row_ptr = cos_sin_ptr + position * (2 * F) + frequencies
    out_ptr += token * (2 * F) + frequencies
    tl.store(out_ptr, tl.load(row_ptr, mask=mask), mask=mask)
    tl.store(out_ptr + F, tl.load(row_ptr + F, mask=mask), mask=mask)


def axis_turns(
    cos_sin_PR: Tensor, positions_TA: Tensor, axis_F: Tensor, out_TR: Tensor, else_T: Tensor | None = None
) -> None:
    """Write to row t of `out_TR` of each frequency f what the table has for position `positions_TA[t, axis_F[f]]`.

    With `else_T` positions below 0 are what that says of their token. The tables are of fp32, indices of int32;
    positions outside the table use its ends; nobody looks whether axes are among a token's positions. Graph-safe.
    """
    check_shape("cos_sin", cos_sin_PR, None, None)
    check_dtype("cos_sin", cos_sin_PR, torch.float32)
    check_contiguous("cos_sin", cos_sin_PR)
    R = cos_sin_PR.shape[1]
    if R % 2 or not R or not len(cos_sin_PR):
        raise ValueError(f"cos_sin: got shape {list(cos_sin_PR.shape)}, wanted [1 or more, an even number]")
    check_indices("positions", positions_TA, cos_sin_PR, None, None)
    check_indices("axis", axis_F, cos_sin_PR, R // 2)
    if else_T is not None:
        check_indices("else", else_T, cos_sin_PR, len(positions_TA))
    check_shape("out", out_TR, len(positions_TA), R)
    check_same("out", out_TR, cos_sin_PR)
    if not use_kernels(cos_sin_PR):
        axis_turns_reference(cos_sin_PR, positions_TA, axis_F, out_TR, else_T)
    elif T := len(positions_TA):
        _axis_turns_kernel[(T,)](
            cos_sin_PR, positions_TA, axis_F, else_T, out_TR, len(cos_sin_PR),
            A=positions_TA.shape[1], F=R // 2, BLOCK_F=next_power_of_2(R // 2), num_warps=1,
            **overlap_options(cos_sin_PR),
        )  # fmt: skip


def axis_turns_reference(
    cos_sin_PR: Tensor, positions_TA: Tensor, axis_F: Tensor, out_TR: Tensor, else_T: Tensor | None = None
) -> None:
    """The same in PyTorch."""
    if else_T is not None:
        positions_TA = torch.where(positions_TA < 0, else_T[:, None], positions_TA)
    rows_TR = positions_TA.clamp(0, len(cos_sin_PR) - 1)[:, axis_F.repeat(2)]
    out_TR.copy_(cos_sin_PR.gather(0, rows_TR.long()))
