"""Memory for a matrix on a rank: plain, or as it is stored, where products can read that.

Knows what they can read (`triton_kernels/scaled_weight.py`), and no names.
"""

import torch

from tercet.model.scaled_rows import StoredAs
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.scaled_weight import BYTES, E8M0, MX_GROUP, ScaledWeight, Weight

_MULTIPLES = {8: (BYTES, BYTES), 4: (2 * BYTES, BYTES)}
"""Of which products want the columns of a matrix, and of its groups unless that is one: by a number's bits."""


def empty_matrix(
    way: StoredAs | None, rows: int, columns: int, whole: int, dtype: torch.dtype, device: torch.device
) -> Weight:
    """For `columns` columns of `whole`. `way`: how all that goes into it is stored, if in one way that may be kept: it
    is where neither a group nor what products read at once is cut."""
    if way is not None and way.scales == E8M0:
        return _empty_mx(rows, columns, dtype, device)
    if way is not None:
        of_columns, of_groups = _MULTIPLES[way.bits]
        group = columns if way.group == whole else way.group
        if columns % of_columns == 0 and (way.group == whole or (group % of_groups == 0 and columns % group == 0)):
            numbers, scales = (FP8, torch.float32) if way.bits == 8 else (torch.uint8, torch.int32)
            return ScaledWeight(
                torch.empty(rows, columns * way.bits // 8, dtype=numbers, device=device),
                torch.empty(columns // group, rows, dtype=scales, device=device),
                dtype,
                way.scales,
            )
    return torch.empty(rows, columns, dtype=dtype, device=device)


def _empty_mx(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Weight:
    """Products read whole blocks of columns, those of four groups: the last one is filled up."""
    if columns % MX_GROUP:
        return torch.empty(rows, columns, dtype=dtype, device=device)
    blocks = -(-columns // (2 * BYTES))
    numbers_NJ = torch.empty(rows, blocks * BYTES, dtype=torch.uint8, device=device)
    return ScaledWeight(numbers_NJ, torch.empty(blocks, rows, dtype=torch.int32, device=device), dtype, E8M0, columns)
