"""Matrices whose numbers lie beside scales in a checkpoint: how, and some of their rows as they are stored.

A number stands for itself, less its group's zero where there are any, times its group's scale: in fp32, to be rounded
once. One of MXFP4 is the code of what it stands for, times a power of two. Products read three kinds of them so
(`triton_kernels/scaled_weight.py`).

Shape suffixes: R rows, I input columns, G groups of columns.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.triton_kernels.checks import FP8, FP8_MOST
from tercet.triton_kernels.scaled_weight import E8M0, mx_numbers


class StoredAs(NamedTuple):
    """One of those kinds. `bits`: 8 are FP8 without zeros, 4 are 0 to 15 with them, or MXFP4. `group`: how many
    neighbouring columns share a scale, of which all are a multiple. `scales`: their type; E8M0 of MXFP4."""

    bits: int
    group: int
    scales: torch.dtype


Kept = Mapping[str, StoredAs]
"""Matrices, by their names, that are kept as they are stored, or may be."""


class ScaledRows(NamedTuple):
    """Numbers of any type, one each; scales in fp32. Of MXFP4 codes from 0 to 15, and scales in E8M0."""

    numbers_RI: Tensor
    scales_RG: Tensor
    zeros_RG: Tensor | None

    def rows(self, start: int, stop: int) -> "ScaledRows":
        zeros_RG = None if self.zeros_RG is None else self.zeros_RG[start:stop]
        return ScaledRows(self.numbers_RI[start:stop], self.scales_RG[start:stop], zeros_RG)

    def columns(self, start: int, stop: int) -> "ScaledRows":
        """Of neighbours in groups, none of which is cut."""
        group = self.numbers_RI.shape[1] // self.scales_RG.shape[1]
        groups = slice(start // group, -(-stop // group))
        zeros_RG = None if self.zeros_RG is None else self.zeros_RG[:, groups]
        return ScaledRows(self.numbers_RI[:, start:stop], self.scales_RG[:, groups], zeros_RG)

    def expanded(self, group_I: Tensor | None = None) -> Tensor:
        """What they stand for, in fp32. `group_I`: of each column, unless groups are neighbours, as many in each."""
        numbers, scales, zeros = self
        if scales.dtype is E8M0:
            return mx_numbers(numbers, scales.view(torch.uint8))
        if numbers.dtype is FP8:  # which knows no arithmetic
            numbers = numbers.float()
        if group_I is None:  # as nearly always: to index takes longer
            numbers, scales = numbers.unflatten(1, (scales.shape[1], -1)), scales[..., None]
            zeros = None if zeros is None else zeros[..., None]
        else:
            group_I = group_I.to(numbers.device)
            scales, zeros = scales[:, group_I], None if zeros is None else zeros[:, group_I]
        expanded: Tensor = (numbers if zeros is None else numbers - zeros) * scales
        return expanded.reshape(self.numbers_RI.shape)


def rounded(rows_RI: Tensor) -> ScaledRows:
    """Each number rounded to the nearest in FP8, times its row's scale, by which the row's largest is FP8's largest.

    One scale for all columns, which kernels read once: the numbers of FP8 have exponents, so those of smaller groups
    would be no nearer, but for some that are thousands of times smaller than others in their row.
    """
    wide_RI = rows_RI.float()
    most = wide_RI.new_full((1, 1), FP8_MOST)  # by a number GPUs do not divide, they multiply by its reciprocal
    # Rows of zeros, as padding has them, are zeros times this.
    scales_R1 = (wide_RI.abs().amax(1, keepdim=True) / most).clamp_min_(torch.finfo(torch.float32).tiny)
    return ScaledRows((wide_RI / scales_R1).to(FP8), scales_R1, None)
