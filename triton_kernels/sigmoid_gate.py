"""Attention's answers times the sigmoid of the numbers that gate them.

Shape suffixes: T tokens, H numbers of all heads, N numbers of the rows that hold the gates.
"""

from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_indices, check_shape
from tercet.triton_kernels.gated_head_norm import check_gates


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
    gate_by_sigmoid_reference(x_TH, gates_TN, first_column)


def gate_by_sigmoid_reference(x_TH: Tensor, gates_TN: Tensor, first_column: int) -> None:
    """The same in PyTorch; in fp64, for in fp32 sigmoids are rounded otherwise at the end of a tensor."""
    gates_TH = gates_TN[:, first_column : first_column + x_TH.shape[1]].double().sigmoid()
    x_TH.copy_(x_TH.float() * gates_TH.float())
