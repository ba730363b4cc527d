"""Embedding rows times a factor, for families whose stream of hidden states begins so.

A kernel of its own: the table itself stays as it is, since it may be the head's too.

Shape suffixes: T tokens, V vocabulary rows of this rank, D hidden size.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.embedding import check_embedding, embedding_reference, launch_embedding
from tercet.triton_kernels.image_rows import FIRST_ID, IMAGE_IDS

_NUMBERS = ["vocab_start", "num_rows", "image_id"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NUMBERS)
def _scaled_embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, vocab_start, num_rows, factor, image_id, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Grid (T,): one program scales one row, or writes zeros where the id is another rank's."""
    token = tl.program_id(0).to(tl.int64)
    token_id = tl.load(ids_ptr + token)
    row = tl.where(token_id >= FIRST_ID, image_id, token_id).to(tl.int64) - vocab_start
    here = (row >= 0) & (row < num_rows)
    columns = tl.arange(0, BLOCK_D)
    x = tl.load(weight_ptr + row * D + columns, mask=here & (columns < D), other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + columns, (x * factor).to(out_ptr.dtype.element_ty), mask=columns < D)


def scaled_embedding(ids_T: Tensor, weight_VD: Tensor, vocab_start: int, factor: float, image_id: int = -1) -> Tensor:
    """`embedding` times `factor`: in fp32, rounded once. `image_id`: whose row tokens of images get; -1: zeros. Mutates
    nothing; graph-safe, and a border as that is."""
    check_embedding(ids_T, weight_VD)
    if not use_kernels(ids_T):
        return scaled_embedding_reference(ids_T, weight_VD, vocab_start, factor, image_id)
    return launch_embedding(_scaled_embedding_kernel, ids_T, weight_VD, vocab_start, factor, image_id)


def scaled_embedding_reference(
    ids_T: Tensor, weight_VD: Tensor, vocab_start: int, factor: float, image_id: int = -1
) -> Tensor:
    """The same in PyTorch."""
    ids_T = ids_T.masked_fill(ids_T >= IMAGE_IDS, image_id)
    return embedding_reference(ids_T, weight_VD, vocab_start).mul_(factor)
