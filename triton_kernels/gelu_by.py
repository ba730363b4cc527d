"""gelu(gate) times numbers of the token's own, which lie elsewhere; with the approximation by tanh.

Shape suffixes: T tokens that have such numbers, R rows, of all those tokens or of some, X numbers of a token in all, P
those of them that are meant.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.gelu_and_mul import gelu
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2

_SIZES = ["X", "first"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _gelu_by_kernel(gate_ptr, by_ptr, rows_ptr, X, first, P: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr):
    """Grid (R,): one program changes one row."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = row
    if rows_ptr is not None:
        token = tl.load(rows_ptr + row).to(tl.int64)
    columns = tl.arange(0, BLOCK_P)
    mask = columns < P
    gate = tl.load(gate_ptr + row * P + columns, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(by_ptr + token * X + first + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(gate_ptr + row * P + columns, (gelu(gate) * by).to(gate_ptr.dtype.element_ty), mask=mask)


def gelu_by(gate_RP: Tensor, by_TX: Tensor, first: int, rows_R: Tensor | None = None) -> Tensor:
    """Change `gate_RP` in place, and return it: row r by the numbers `first` and on of token `rows_R[r]` (int32), or
    r. fp32 inside, rounded once; graph-safe."""
    check_shape("gate", gate_RP, None, None)
    check_dtype("gate", gate_RP, *FLOATS)
    check_same("gate", gate_RP, gate_RP)
    R, P = gate_RP.shape
    check_shape("by", by_TX, R if rows_R is None else None, None)
    check_same("by", by_TX, gate_RP)
    X = by_TX.shape[1]
    if not 0 <= first <= X - P:
        raise ValueError(f"first: got {first}, wanted 0 to {X - P}")
    if rows_R is not None:
        check_indices("rows", rows_R, gate_RP, R)
    if not use_kernels(gate_RP):
        return gelu_by_reference(gate_RP, by_TX, first, rows_R)
    if R:
        block = next_power_of_2(P)
        _gelu_by_kernel[(R,)](
            gate_RP, by_TX, rows_R, X, first, P=P, BLOCK_P=block, num_warps=min(max(block // 256, 1), 8),
            **overlap_options(gate_RP),
        )  # fmt: skip
    return gate_RP


def gelu_by_reference(gate_RP: Tensor, by_TX: Tensor, first: int, rows_R: Tensor | None = None) -> Tensor:
    """The same in PyTorch."""
    by_RX = by_TX if rows_R is None else by_TX[rows_R]
    by_RP = by_RX[:, first : first + gate_RP.shape[1]]
    return gate_RP.copy_(F.gelu(gate_RP.float(), approximate="tanh") * by_RP.float())
