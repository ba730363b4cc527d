"""RMS norm of each head of a gated delta layer's answers, times SiLU of the numbers that gate them.

Shape suffixes: T tokens, H heads of V numbers, N numbers of the rows that hold the gates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_indices, check_same, check_shape


def gated_head_norm(
    x_THV: Tensor, z_TN: Tensor, first_column: int, weight_V: Tensor, eps: float, *, rows: Tensor | None
) -> Tensor:
    """[T, H, V] -> [T, H V]: each head normed and scaled, times SiLU of its gates.

    The gates are H V columns of `z_TN` from `first_column` on. `rows`: how many tokens there are in truth, int32 [1] on
    the device; those behind may be left as they are. Mutates nothing; fp32 inside, rounded once; graph-safe.
    """
    check_dtype("x", x_THV, *FLOATS)
    check_shape("x", x_THV, None, None, None)
    check_contiguous("x", x_THV)
    _, H, V = x_THV.shape
    check_gates("z", z_TN, first_column, x_THV, H * V)
    check_shape("weight", weight_V, V)
    check_same("weight", weight_V, x_THV, torch.float32)
    if rows is not None:
        check_indices("rows", rows, x_THV, 1)
    return gated_head_norm_reference(x_THV, z_TN, first_column, weight_V, eps)


def gated_head_norm_reference(x_THV: Tensor, z_TN: Tensor, first_column: int, weight_V: Tensor, eps: float) -> Tensor:
    """The same in PyTorch; SiLU in fp64, for in fp32 it is rounded otherwise at the end of a tensor."""
    _, H, V = x_THV.shape
    z_THV = z_TN[:, first_column : first_column + H * V].unflatten(1, (H, V))
    normed_THV = F.rms_norm(x_THV.float(), (V,), weight_V.float(), eps)
    return (normed_THV * F.silu(z_THV.double()).float()).to(x_THV.dtype).flatten(1)


def check_gates(name: str, gates_TN: Tensor, first_column: int, like: Tensor, num_columns: int) -> None:
    """Rows of which so many columns are gates of the rows of `like`, or raise."""
    check_shape(name, gates_TN, like.shape[0], None)
    check_same(name, gates_TN, like)
    if not 0 <= first_column <= gates_TN.shape[1] - num_columns:
        raise ValueError(
            f"first_column: got {first_column}, wanted one with {num_columns} of the {gates_TN.shape[1]} columns behind"
        )
