"""A product whose K is divided among programs: each part's sum is an output of its own, for the norm behind to add.

For 17 to some hundred rows and narrow outputs: too few tiles for all multiprocessors, unless they are so small that
reading x and weights over and over from the L2 cache takes longer than the products. The norm runs anyway and reads a
residual anyway: that it reads some sums as well costs nearly nothing.

Knows when that pays, from the table's lines for the whole product; adds nothing up itself.

Shape suffixes: S parts, M rows (tokens), K reduced size, N output size.
"""

import torch
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_dtype, check_same, check_shape
from tercet.triton_kernels.choose_fp8 import choose_fp8
from tercet.triton_kernels.choose_scaled import choose_scaled
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.matmul_config import NEED_TMA
from tercet.triton_kernels.matmul_launch import can_be_early, can_divide, can_use_tma, launch_matmul
from tercet.triton_kernels.scaled_weight import ScaledWeight, Weight, check_weight
from tercet.triton_kernels.tuning import choose_matmul
from tercet.triton_kernels.widen import plain


def matmul_parts(x_MK: Tensor, w_NK: Weight, rows: Tensor | None = None, *, whole: str = "matmul_add") -> Tensor | None:
    """x W^T by parts of K: [M, K] x [N, K] -> [S, M, N] in fp32; None where it is better done whole. Graph-safe.

    Which it is depends on the bucket of M: not for deterministic mode. `rows`: how many rows there are in truth, int32
    [1] on the device; those behind may be left uncomputed. `whole`: what would do it whole; the table says of that.
    """
    check_dtype("x", x_MK, *FLOATS)
    check_shape("x", x_MK, None, None)
    check_same("x", x_MK, x_MK)
    check_weight("w", w_NK, x_MK, None, x_MK.shape[1])
    (M, K), N = x_MK.shape, w_NK.shape[0]
    if isinstance(w_NK, ScaledWeight):
        config = None if choose_fp8(x_MK, w_NK, in_parts=True) else choose_scaled(x_MK, w_NK, us_of_adding=0.0)
    else:
        config = choose_matmul(whole, M, N, K, x_MK.dtype, False, x_MK.device)
    if config is None or config.parts == 1 or not can_divide(config, K) or not M * N:
        return None
    if not use_kernels(x_MK):
        return matmul_parts_reference(x_MK, w_NK, config.parts)
    if isinstance(w_NK, Tensor):
        if config.kernel in NEED_TMA and not can_use_tma(x_MK, w_NK):
            return None
        if config.kernel == "early" and not can_be_early(config, x_MK, w_NK, config.parts):
            return None
    out_SMN = x_MK.new_empty(config.parts, M, N, dtype=torch.float32)
    launch_matmul(config, x_MK, w_NK, out_SMN, "parts", rows=rows)
    return out_SMN


def matmul_parts_reference(x_MK: Tensor, w_NK: Weight, parts: int) -> Tensor:
    """The same in PyTorch."""
    cut = zip(x_MK.float().chunk(parts, 1), plain(w_NK).float().chunk(parts, 1), strict=True)
    return torch.stack([x @ w.t() for x, w in cut])
