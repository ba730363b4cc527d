"""The matrices of adapters (LoRA) for one product, and in PyTorch what they add to it: y += (x down^T) up^T.

Knows no model; scales are part of `up`.

Shape suffixes: T rows (tokens), K reduced size, N output size, A adapters, Q rank of a module, R of all modules.
"""

from dataclasses import dataclass

from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm_reference
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape

RANK_MULTIPLE = 16
"""Ranks are padded to it with zeros."""
MOST_MODULES = 4
"""Of one product."""


@dataclass(frozen=True)
class LowRank:
    """Of one product of a layer: those of all adapters. Where an adapter leaves a module as it is, zeros.

    Modules of one product (q, k and v) have rows of `down` behind each other, and rows of y of their own.
    """

    down_ARK: Tensor
    up_ANQ: Tensor
    starts: tuple[int, ...] = (0,)
    """The first row of y of each module; of gates and what they are multiplied by, (0, 1): they come in turns."""

    def __len__(self) -> int:
        """How many adapters there are."""
        return len(self.down_ARK)

    @property
    def in_turns(self) -> bool:
        return self.starts == (0, 1)

    def check(self) -> None:
        """Refuse what does not fit together."""
        A, R, _ = self.down_ARK.shape
        Q = R // len(self.starts)
        check_dtype("down", self.down_ARK, *FLOATS)
        check_contiguous("down", self.down_ARK)
        if len(self.starts) > MOST_MODULES:
            raise ValueError(f"starts: got {len(self.starts)} modules, wanted {MOST_MODULES} at most")
        if not A or R % (RANK_MULTIPLE * len(self.starts)):
            wanted = f"some, each of {len(self.starts)} times a multiple of {RANK_MULTIPLE}"
            raise ValueError(f"down: got {A} adapters of {R} rows, wanted {wanted}")
        check_shape("up", self.up_ANQ, A, None, Q)
        check_same("up", self.up_ANQ, self.down_ARK)

    def whole_up(self, adapter: int) -> Tensor:
        """One adapter's second matrix as if it were one module's: [N, R], with zeros."""
        N, Q = self.up_ANQ.shape[1:]
        whole_NR = self.up_ANQ.new_zeros(N, Q * len(self.starts))
        for module, start in enumerate(self.starts):
            step = 2 if self.in_turns else None
            end = N if self.in_turns or module + 1 == len(self.starts) else self.starts[module + 1]
            rows = slice(start, end, step)
            whole_NR[rows, module * Q : (module + 1) * Q] = self.up_ANQ[adapter, rows]
        return whole_NR


@dataclass(frozen=True)
class Norm:
    """Of the rows of x: the product norms them itself."""

    weight_K: Tensor
    eps: float


def add_low_rank_reference(
    y_TN: Tensor, x_TK: Tensor, low_rank: LowRank, adapters_T: Tensor, norm: Norm | None = None
) -> None:
    """The sum in PyTorch, in place."""
    if norm is not None:
        x_TK = rms_norm_reference(x_TK, norm.weight_K, norm.eps)
    for adapter in adapters_T.unique().tolist():
        if adapter >= 0:
            own_T = adapters_T == adapter
            low_TR = (x_TK[own_T].float() @ low_rank.down_ARK[adapter].float().t()).to(x_TK.dtype)
            added_TN = low_TR.float() @ low_rank.whole_up(adapter).float().t()
            y_TN[own_T] = (y_TN[own_T].float() + added_TN).to(y_TN.dtype)
