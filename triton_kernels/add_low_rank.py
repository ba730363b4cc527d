"""What adapters (LoRA) add to a product, with the matrices of each row's own adapter.

Shape suffixes: as in `low_rank.py`.
"""

import torch
from torch import Tensor

from tercet.triton_kernels.checks import check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.low_rank import LowRank, Norm, add_low_rank_reference
from tercet.triton_kernels.low_rank_row import RowAddition
from tercet.triton_kernels.low_rank_tiles import TileAddition
from tercet.triton_kernels.row_groups import RowGroups
from tercet.triton_kernels.silu_and_mul import silu_and_mul_reference


class Addition:
    """What adapters make of rows of x (normed, if there is a norm), to be added to what a product makes of them.

    Made before the product: what that frees is not to be had while it is in use. Where the product's kernels are
    launched within `next_starts_late`, the first of this runs beside them.
    """

    def __init__(self, x_TK: Tensor, low_rank: LowRank, groups: RowGroups, norm: Norm | None = None) -> None:
        low_rank.check()
        T, K = len(groups), low_rank.down_ARK.shape[2]
        check_shape("x", x_TK, T, K)
        check_same("x", x_TK, low_rank.down_ARK)
        if norm is not None:
            check_shape("norm", norm.weight_K, K)
            check_same("norm", norm.weight_K, x_TK)
        self._x_TK, self._low_rank, self._groups, self._norm = x_TK, low_rank, groups, norm
        self._kernels: RowAddition | TileAddition | None = None
        if T and use_kernels(x_TK):
            if T == 1 and not groups.deterministic:
                self._kernels = RowAddition(x_TK, low_rank, groups.adapters_T, norm)
            else:
                self._kernels = TileAddition(x_TK, low_rank, groups, norm)

    def to(self, y_TN: Tensor, *, gate: bool = False) -> Tensor:
        """Add it to y, in place, in x's type or fp32: y. A row of adapter -1 stays as it is.

        `gate`: silu(even columns) * odd columns of the sum, rounded before that, which y is not then: [T, N / 2].
        Sums in fp32, rounded between the two products and at last; graph-safe.
        """
        T, N = len(self._x_TK), self._low_rank.up_ANQ.shape[1]
        check_shape("y", y_TN, T, N)
        check_same("y", y_TN, self._x_TK, torch.float32)
        if not use_kernels(y_TN):
            add_low_rank_reference(y_TN, self._x_TK, self._low_rank, self._groups.adapters_T, self._norm)
            return silu_and_mul_reference(y_TN[:, ::2], y_TN[:, 1::2]) if gate else y_TN
        out = y_TN.new_empty(T, N // 2) if gate else y_TN
        if self._kernels is not None:
            self._kernels.shrink()
            self._kernels.expand(y_TN, out, gate=gate)
        return out
