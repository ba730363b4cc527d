"""The sum of a product's parts, where nothing that runs behind it anyway could add them.

Shape suffixes: S parts (matmul_parts.py), M rows, N output size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 512


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["size"])
def _sum_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, size, N: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(size / BLOCK),): one program sums BLOCK numbers, part after part."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    let_next_start(PDL)
    wait_for_previous(PDL)
    total = tl.load(parts_ptr + index, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * size.to(tl.int64) + index, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + index % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_parts(parts_SMN: Tensor, out_MN: Tensor, bias_N: Tensor | None = None) -> None:
    """`out` = the parts' sum, in order, and a bias: rounded once. Graph-safe."""
    check_dtype("out", out_MN, *FLOATS)
    check_shape("out", out_MN, None, None)
    check_contiguous("out", out_MN)
    check_dtype("parts", parts_SMN, torch.float32)
    check_shape("parts", parts_SMN, None, *out_MN.shape)
    check_contiguous("parts", parts_SMN)
    check_device("parts", parts_SMN, out_MN)
    if bias_N is not None:
        check_shape("bias", bias_N, out_MN.shape[1])
        check_same("bias", bias_N, out_MN)
    if not use_kernels(parts_SMN):
        out_MN.copy_(sum_parts_reference(parts_SMN, bias_N))
    elif size := out_MN.numel():
        _sum_parts_kernel[(cdiv(size, _BLOCK),)](
            parts_SMN, parts_SMN if bias_N is None else bias_N, out_MN, size, N=out_MN.shape[1], PARTS=len(parts_SMN),
            HAS_BIAS=bias_N is not None, BLOCK=_BLOCK, num_warps=4, **overlap_options(out_MN),
        )  # fmt: skip


def sum_parts_reference(parts_SMN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The same in PyTorch, in fp32."""
    return parts_SMN.sum(0) if bias_N is None else parts_SMN.sum(0) + bias_N
