"""Products with weights, y = x W^T, and what is fused around them: bias, residual add, SiLU gate, norm before.

Knows which kernel serves which size; knows neither layers nor ranks. `rows`: how many rows there are in truth, int32
[1] on the device; those behind may be left uncomputed.

Shape suffixes: M rows (tokens), K reduced size, N output size, F intermediate size, 2F gate and up rows in turns.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import rms_norm
from tercet.triton_kernels.checks import FLOATS, check_dtype, check_same, check_shape
from tercet.triton_kernels.choose_fp8 import choose_fp8
from tercet.triton_kernels.choose_scaled import choose_scaled
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.matmul_config import NEED_TMA, MatmulConfig
from tercet.triton_kernels.matmul_launch import can_be_early, can_use_tma, launch_matmul
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight, check_weight
from tercet.triton_kernels.silu_and_mul import silu_and_mul_reference
from tercet.triton_kernels.sum_parts import sum_parts
from tercet.triton_kernels.tuning import choose_matmul, row_bucket
from tercet.triton_kernels.untuned import heuristic
from tercet.triton_kernels.widen import expand, plain

_NORMING = ("vector", "split", "early")
_US_OF_SUM, _MOST_SUMMED = 1.0, 32
"""What each part costs where a kernel does nothing but add them, and up to how many rows that can pay."""


def matmul(
    x_MK: Tensor,
    w_NK: Weight,
    bias_N: Tensor | None = None,
    out: Tensor | None = None,
    *,
    deterministic: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """x W^T (+ bias): [M, K] x [N, K] -> [M, N] in x's type, or written to `out`, which may be of fp32. Sums in fp32;
    graph-safe.

    `deterministic`: a row's bits do not depend on M (K is summed in one order everywhere).
    """
    _check(x_MK, w_NK, bias_N)
    _check_out(out, x_MK, w_NK.shape[0], torch.float32)
    if not use_kernels(x_MK):
        y_MN = matmul_reference(x_MK, w_NK, bias_N)
        return y_MN if out is None else out.copy_(y_MN)
    if out is None:
        out = x_MK.new_empty(x_MK.shape[0], w_NK.shape[0])
    _run("matmul", x_MK, w_NK, out, "store", deterministic, bias_N, rows)
    return out


def matmul_add(
    x_MK: Tensor, w_NK: Weight, residual_MN: Tensor, *, deterministic: bool = False, rows: Tensor | None = None
) -> None:
    """residual += x W^T, in place: [M, K] x [N, K] into [M, N]. Sums in fp32, rounds once; graph-safe."""
    _check(x_MK, w_NK)
    check_shape("residual", residual_MN, x_MK.shape[0], w_NK.shape[0])
    check_same("residual", residual_MN, x_MK)
    if use_kernels(x_MK):
        _run("matmul_add", x_MK, w_NK, residual_MN, "add", deterministic, None, rows)
    else:
        matmul_add_reference(x_MK, w_NK, residual_MN)


def matmul_silu_and_mul(
    x_MK: Tensor,
    w_2FK: Weight,
    out: Tensor | None = None,
    *,
    deterministic: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """silu(gate) * up of x W^T, gate and up rows of W in turns: [M, K] x [2F, K] -> [M, F]. fp32 inside; graph-safe."""
    _check_pairs(x_MK, w_2FK)
    _check_out(out, x_MK, w_2FK.shape[0] // 2)
    if not use_kernels(x_MK):
        y_MF = matmul_silu_and_mul_reference(x_MK, w_2FK)
        return y_MF if out is None else out.copy_(y_MF)
    if out is None:
        out = x_MK.new_empty(x_MK.shape[0], w_2FK.shape[0] // 2)
    _run("matmul_silu_and_mul", x_MK, w_2FK, out, "gate", deterministic, None, rows)
    return out


def rms_norm_matmul(
    x_MK: Tensor,
    norm_K: Tensor,
    eps: float,
    w_NK: Weight,
    bias_N: Tensor | None = None,
    *,
    deterministic: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """`matmul` of the normed rows of x, in one kernel where few rows make that pay. Mutates nothing; graph-safe."""
    _check(x_MK, w_NK, bias_N)
    config = norming_config("rms_norm_matmul", x_MK, norm_K, w_NK, deterministic)
    if config is None:
        normed_MK = rms_norm(x_MK, norm_K, eps, rows, deterministic=deterministic)
        return matmul(normed_MK, w_NK, bias_N, deterministic=deterministic, rows=rows)
    out_MN = x_MK.new_empty(x_MK.shape[0], w_NK.shape[0])
    assert isinstance(w_NK, Tensor)
    launch_matmul(config, x_MK, w_NK, out_MN, "store", bias_N, norm_K, eps)
    return out_MN


def rms_norm_matmul_silu_and_mul(
    x_MK: Tensor,
    norm_K: Tensor,
    eps: float,
    w_2FK: Weight,
    *,
    deterministic: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """`matmul_silu_and_mul` of the normed rows of x, in one kernel where few rows make that pay. Graph-safe."""
    _check_pairs(x_MK, w_2FK)
    config = norming_config("rms_norm_matmul_silu_and_mul", x_MK, norm_K, w_2FK, deterministic)
    if config is None:
        normed_MK = rms_norm(x_MK, norm_K, eps, rows, deterministic=deterministic)
        return matmul_silu_and_mul(normed_MK, w_2FK, deterministic=deterministic, rows=rows)
    out_MF = x_MK.new_empty(x_MK.shape[0], w_2FK.shape[0] // 2)
    assert isinstance(w_2FK, Tensor)
    launch_matmul(config, x_MK, w_2FK, out_MF, "gate", None, norm_K, eps)
    return out_MF


def matmul_reference(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """The same in PyTorch."""
    return F.linear(x_MK, plain(w_NK), bias_N)


def matmul_add_reference(x_MK: Tensor, w_NK: Weight, residual_MN: Tensor) -> None:
    """The same in PyTorch."""
    residual_MN.addmm_(x_MK, plain(w_NK).t())


def matmul_silu_and_mul_reference(x_MK: Tensor, w_2FK: Weight) -> Tensor:
    """The same in PyTorch; the product is rounded before the gate, unlike the kernel's."""
    y_M2F = F.linear(x_MK, plain(w_2FK))
    return silu_and_mul_reference(y_M2F[:, 0::2], y_M2F[:, 1::2])


def _run(
    op: str,
    x_MK: Tensor,
    w_NK: Weight,
    out: Tensor,
    epilogue: str,
    deterministic: bool,
    bias_N: Tensor | None,
    rows: Tensor | None,
) -> None:
    if not out.numel():
        return
    if isinstance(w_NK, ScaledWeight):
        if not deterministic and (rounding := choose_fp8(x_MK, w_NK)) and can_use_tma(x_MK, out):
            launch_matmul(rounding, x_MK, w_NK, out, epilogue, bias_N, rows=rows)
            return
        in_parts = epilogue == "store" and not deterministic and len(x_MK) <= _MOST_SUMMED
        us_of_adding = _US_OF_SUM if in_parts else math.inf
        if scaled := choose_scaled(x_MK, w_NK, deterministic=deterministic, us_of_adding=us_of_adding):
            if scaled.parts > 1:
                parts_SMN = out.new_empty(scaled.parts, *out.shape, dtype=torch.float32)
                launch_matmul(scaled, x_MK, w_NK, parts_SMN, "parts", rows=rows)
                sum_parts(parts_SMN, out, bias_N)
            else:
                launch_matmul(scaled, x_MK, w_NK, out, epilogue, bias_N, rows=rows)
            return
        w_NK = expand(w_NK)
    config = _choose(op, x_MK, w_NK, deterministic)
    if out.dtype != x_MK.dtype:  # fp32, which no kernel brings by TMA
        config = heuristic(op, row_bucket(len(x_MK)), len(w_NK), w_NK.shape[1], x_MK.dtype, deterministic)
    elif config.kernel in NEED_TMA and not can_use_tma(x_MK, w_NK, out):
        config = MatmulConfig("tile", 128, 128, 32 if x_MK.dtype == torch.float32 else 64, num_warps=8)
    launch_matmul(config, x_MK, w_NK, out, epilogue, bias_N, rows=rows)


def _choose(op: str, x_MK: Tensor, w_NK: Tensor, deterministic: bool) -> MatmulConfig:
    N, K = w_NK.shape
    config = choose_matmul(op, x_MK.shape[0], N, K, x_MK.dtype, deterministic, x_MK.device)
    if config.parts == 1 and (config.kernel != "early" or can_be_early(config, x_MK, w_NK)):
        return config
    if x_MK.shape[0] == 1:
        return heuristic(op, 1, N, K, x_MK.dtype, deterministic)
    # In parts: whole, its tiles would be too few; deterministic mode has the best that are.
    return choose_matmul(op, x_MK.shape[0], N, K, x_MK.dtype, True, x_MK.device)


def norming_config(
    op: str, x_MK: Tensor, norm_K: Tensor, w_NK: Weight, deterministic: bool
) -> MatmulConfig | None:  # fmt: skip
    """The kernel that norms its own rows, or None: then the norm runs first, on its own.

    Deterministic mode always norms on its own: a fused norm sums in another order. So do weights of a norm in fp32,
    which few models have.
    """
    check_shape("norm", norm_K, x_MK.shape[1])
    check_same("norm", norm_K, x_MK, torch.float32)
    if deterministic or not x_MK.numel() or not use_kernels(x_MK) or norm_K.dtype != x_MK.dtype:
        return None
    if isinstance(w_NK, ScaledWeight):
        return None
    config = _choose(op, x_MK, w_NK, deterministic)
    return config if config.kernel in _NORMING else None


def _check(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> None:
    check_dtype("x", x_MK, *FLOATS)
    check_shape("x", x_MK, None, None)
    check_same("x", x_MK, x_MK)
    check_weight("w", w_NK, x_MK, None, x_MK.shape[1])
    if bias_N is not None:
        check_shape("bias", bias_N, w_NK.shape[0])
        check_same("bias", bias_N, x_MK)


def _check_pairs(x_MK: Tensor, w_2FK: Weight) -> None:
    _check(x_MK, w_2FK)
    if w_2FK.shape[0] % 2:
        raise ValueError(f"w: got {w_2FK.shape[0]} rows, wanted gate and up rows in turns: an even number")


def _check_out(out: Tensor | None, x_MK: Tensor, width: int, *more: torch.dtype) -> None:
    if out is not None:
        check_shape("out", out, x_MK.shape[0], width)
        check_same("out", out, x_MK, *more)
