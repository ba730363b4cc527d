"""The mean of each so many rows: of a token's patches, which lie together, one row; it may be shifted and scaled.

Shape suffixes: P patches, N tokens, D hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 512


@triton.jit
def _mean_rows_kernel(
    x_ptr, bias_ptr, scale_ptr, out_ptr,
    D: tl.constexpr, COUNT: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (N, ceil(D / BLOCK)): one program makes BLOCK numbers of a token, from its patches one after the other."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = numbers < D
    x_ptr += token * COUNT * D + numbers
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(COUNT):
        total += tl.load(x_ptr + row * D, mask=mask, other=0.0).to(tl.float32)
    total *= FACTOR / COUNT
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + numbers, mask=mask, other=0.0)
        total = (total - bias) * tl.load(scale_ptr + numbers, mask=mask, other=0.0)
    tl.store(out_ptr + token * D + numbers, total.to(out_ptr.dtype.element_ty), mask=mask)


def mean_rows(
    x_PD: Tensor, count: int, factor: float = 1.0, standard: tuple[Tensor, Tensor] | None = None
) -> Tensor:  # fmt: skip
    """[N * count, D] -> [N, D]: means times `factor`. `standard`: what numbers lose then, and what they are multiplied
    by in the end, fp32 [D] each. Mutates nothing; fp32 inside, rounded once; graph-safe."""
    check_dtype("x", x_PD, *FLOATS)
    check_shape("x", x_PD, None, None)
    check_contiguous("x", x_PD)
    P, D = x_PD.shape
    if count < 1 or P % count:
        raise ValueError(f"x: got {P} rows, wanted a multiple of {count}")
    for name, numbers_D in zip(("bias", "scale"), standard or (), strict=False):
        check_shape(name, numbers_D, D)
        check_dtype(name, numbers_D, torch.float32)
        check_device(name, numbers_D, x_PD)
    if not use_kernels(x_PD):
        return mean_rows_reference(x_PD, count, factor, standard)
    out_ND = torch.empty(P // count, D, dtype=x_PD.dtype, device=x_PD.device)
    if out_ND.numel():
        _mean_rows_kernel[(P // count, cdiv(D, _BLOCK))](
            x_PD, *(standard or (None, None)), out_ND,
            D=D, COUNT=count, FACTOR=factor, BLOCK=_BLOCK, num_warps=4, **overlap_options(x_PD),
        )  # fmt: skip
    return out_ND


def mean_rows_reference(
    x_PD: Tensor, count: int, factor: float = 1.0, standard: tuple[Tensor, Tensor] | None = None
) -> Tensor:  # fmt: skip
    """The same in PyTorch."""
    mean_ND = x_PD.float().view(-1, count, x_PD.shape[1]).mean(1) * factor
    if standard is not None:
        bias_D, scale_D = standard
        mean_ND = (mean_ND - bias_D) * scale_D
    return mean_ND.to(x_PD.dtype)
