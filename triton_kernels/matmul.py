"""Products with weights, y = x W^T, and what is fused around them: bias, residual add, SiLU gate, norm before.

Knows which kernel serves which size; knows neither layers nor ranks.

Shape suffixes: M rows (tokens), K reduced size, N output size, F intermediate size, 2F gate and up rows in turns.
"""

import torch.nn.functional as F
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.checks import FLOATS, check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.silu_and_mul import silu_and_mul_interleaved


def matmul(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, out: Tensor | None = None, *, deterministic: bool = False
) -> Tensor:
    """x W^T (+ bias): [M, K] x [N, K] -> [M, N] in x's type, written to `out` if given. Sums in fp32; graph-safe.

    `deterministic`: a row's bits do not depend on M (K is summed in one order everywhere).
    """
    _check(x_MK, w_NK)
    if bias_N is not None:
        check_shape("bias", bias_N, w_NK.shape[0])
        check_same("bias", bias_N, x_MK)
    if out is not None:
        check_shape("out", out, x_MK.shape[0], w_NK.shape[0])
        check_same("out", out, x_MK)
    y_MN = matmul_reference(x_MK, w_NK, bias_N)
    return y_MN if out is None else out.copy_(y_MN)


def matmul_add(x_MK: Tensor, w_NK: Tensor, residual_MN: Tensor, *, deterministic: bool = False) -> None:
    """residual += x W^T, in place: [M, K] x [N, K] into [M, N]. Sums in fp32, rounds once; graph-safe."""
    _check(x_MK, w_NK)
    check_shape("residual", residual_MN, x_MK.shape[0], w_NK.shape[0])
    check_same("residual", residual_MN, x_MK)
    matmul_add_reference(x_MK, w_NK, residual_MN)


def matmul_silu_and_mul(x_MK: Tensor, w_2FK: Tensor, *, deterministic: bool = False) -> Tensor:
    """silu(gate) * up of x W^T, gate and up rows of W in turns: [M, K] x [2F, K] -> [M, F]. fp32 inside; graph-safe."""
    _check(x_MK, w_2FK)
    return matmul_silu_and_mul_reference(x_MK, w_2FK)


def rms_norm_matmul(
    x_MK: Tensor,
    norm_K: Tensor,
    eps: float,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """`matmul` of the normed rows of x, in one kernel where few rows make that pay. Mutates nothing; graph-safe."""
    return matmul(rms_norm(x_MK, norm_K, eps), w_NK, bias_N, deterministic=deterministic)


def rms_norm_matmul_silu_and_mul(
    x_MK: Tensor, norm_K: Tensor, eps: float, w_2FK: Tensor, *, deterministic: bool = False
) -> Tensor:
    """`matmul_silu_and_mul` of the normed rows of x, in one kernel where few rows make that pay. Graph-safe."""
    return matmul_silu_and_mul(rms_norm(x_MK, norm_K, eps), w_2FK, deterministic=deterministic)


def matmul_reference(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The same in PyTorch."""
    return F.linear(x_MK, w_NK, bias_N)


def matmul_add_reference(x_MK: Tensor, w_NK: Tensor, residual_MN: Tensor) -> None:
    """The same in PyTorch."""
    residual_MN.addmm_(x_MK, w_NK.t())


def matmul_silu_and_mul_reference(x_MK: Tensor, w_2FK: Tensor) -> Tensor:
    """The same in PyTorch; the product is rounded before the gate, unlike the kernel's."""
    return silu_and_mul_interleaved(F.linear(x_MK, w_2FK))


def _check(x_MK: Tensor, w_NK: Tensor) -> None:
    check_dtype("x", x_MK, *FLOATS)
    check_shape("x", x_MK, None, None)
    check_shape("w", w_NK, None, x_MK.shape[1])
    check_same("x", x_MK, x_MK)
    check_same("w", w_NK, x_MK)
    check_device("w", w_NK, x_MK)
