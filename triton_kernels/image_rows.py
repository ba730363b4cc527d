"""What a model's eye makes of images, in the place of the embeddings of their tokens.

Shape suffixes: T tokens, D hidden size.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2

IMAGE_IDS = 2**30
"""Token ids from here on stand for tokens of images; no vocabulary reaches them."""
FIRST_ID = tl.constexpr(IMAGE_IDS)


@triton.jit
def _place_image_rows_kernel(
    stream_ptr, ids_ptr, rows_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr
):
    """Grid (T,): one program writes one token's row, if it is an image's."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    if tl.load(ids_ptr + token) >= FIRST_ID:
        columns = tl.arange(0, BLOCK_D)
        mask = columns < D
        row = tl.load(rows_ptr + token * D + columns, mask=mask, other=0.0)
        if ADDS:
            there = tl.load(stream_ptr + token * D + columns, mask=mask, other=0.0)
            row = (there.to(tl.float32) + row.to(tl.float32)).to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + token * D + columns, row, mask=mask)


def place_image_rows(stream_TD: Tensor, ids_T: Tensor, rows_TD: Tensor, *, add: bool) -> None:
    """Where a token is an image's its row of `stream_TD` becomes that of `rows_TD`, or that is added to it, in place.

    Other rows of `rows_TD` are not read. fp32 inside, rounded once; graph-safe.
    """
    check_dtype("stream", stream_TD, *FLOATS)
    check_shape("stream", stream_TD, None, None)
    check_contiguous("stream", stream_TD)
    T, D = stream_TD.shape
    check_indices("ids", ids_T, stream_TD, T)
    check_shape("rows", rows_TD, T, D)
    check_same("rows", rows_TD, stream_TD)
    if not use_kernels(stream_TD):
        place_image_rows_reference(stream_TD, ids_T, rows_TD, add=add)
    elif T:
        block = next_power_of_2(D)
        _place_image_rows_kernel[(T,)](
            stream_TD, ids_T, rows_TD, D=D, BLOCK_D=block, ADDS=add, num_warps=min(max(block // 512, 1), 8),
            **overlap_options(stream_TD),
        )  # fmt: skip


def place_image_rows_reference(stream_TD: Tensor, ids_T: Tensor, rows_TD: Tensor, *, add: bool) -> None:
    """The same in PyTorch."""
    seen_T = ids_T >= IMAGE_IDS
    stream_TD[seen_T] = stream_TD[seen_T] + rows_TD[seen_T] if add else rows_TD[seen_T]
