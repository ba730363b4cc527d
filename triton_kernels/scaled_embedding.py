"""Embedding rows times a factor, for families whose stream of hidden states begins so.

A kernel of its own: the table itself stays as it is, since it may be the head's too.

Shape suffixes: T tokens, V vocabulary rows of this rank, D hidden size.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.embedding import check_embedding, embedding_reference, launch_embedding


@triton.jit(do_not_specialize=["vocab_start", "num_rows"], do_not_specialize_on_alignment=["vocab_start", "num_rows"])
def _scaled_embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, vocab_start, num_rows, factor, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Grid (T,): one program scales one row, or writes zeros where the id is another rank's."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64) - vocab_start
    here = (row >= 0) & (row < num_rows)
    columns = tl.arange(0, BLOCK_D)
    x = tl.load(weight_ptr + row * D + columns, mask=here & (columns < D), other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + columns, (x * factor).to(out_ptr.dtype.element_ty), mask=columns < D)


def scaled_embedding(ids_T: Tensor, weight_VD: Tensor, vocab_start: int, factor: float) -> Tensor:
    """`embedding` times `factor`: in fp32, rounded once. Mutates nothing; graph-safe, and a border as that is."""
    check_embedding(ids_T, weight_VD)
    if not use_kernels(ids_T):
        return scaled_embedding_reference(ids_T, weight_VD, vocab_start, factor)
    return launch_embedding(_scaled_embedding_kernel, ids_T, weight_VD, vocab_start, factor)


def scaled_embedding_reference(ids_T: Tensor, weight_VD: Tensor, vocab_start: int, factor: float) -> Tensor:
    """The same in PyTorch."""
    return embedding_reference(ids_T, weight_VD, vocab_start).mul_(factor)
