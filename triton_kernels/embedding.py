"""Embedding rows of token ids, from the part of the vocabulary that this rank holds.

Shape suffixes: T tokens, V vocabulary rows of this rank, D hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit(do_not_specialize=["vocab_start", "num_rows"], do_not_specialize_on_alignment=["vocab_start", "num_rows"])
def _embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, vocab_start, num_rows, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Grid (T,): one program copies one row, or writes zeros where the id is another rank's."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64) - vocab_start
    here = (row >= 0) & (row < num_rows)
    columns = tl.arange(0, BLOCK_D)
    x = tl.load(weight_ptr + row * D + columns, mask=here & (columns < D), other=0.0)
    tl.store(out_ptr + token * D + columns, x, mask=columns < D)


def embedding(ids_T: Tensor, weight_VD: Tensor, vocab_start: int = 0) -> Tensor:
    """Rows of `weight_VD` for ids from `vocab_start` on: [T] int32 -> [T, D]. Ids outside the shard give zero rows.

    Mutates nothing; graph-safe.
    """
    check_embedding(ids_T, weight_VD)
    if not use_kernels(ids_T):
        return embedding_reference(ids_T, weight_VD, vocab_start)
    return launch_embedding(_embedding_kernel, ids_T, weight_VD, vocab_start)


def check_embedding(ids_T: Tensor, weight_VD: Tensor) -> None:
    """Ids and a table in which to look them up, or raise."""
    check_shape("ids", ids_T, None)
    check_dtype("ids", ids_T, torch.int32, torch.int64)
    check_contiguous("ids", ids_T)
    check_shape("weight", weight_VD, None, None)
    check_dtype("weight", weight_VD, *FLOATS)
    check_contiguous("weight", weight_VD)
    check_device("weight", weight_VD, ids_T)


def launch_embedding(
    kernel: JITFunction[Any], ids_T: Tensor, weight_VD: Tensor, vocab_start: int, *factor: float
) -> Tensor:
    """The rows that a kernel of this grid makes: [T, D]. Without overlap: who plans ahead of it relies on that."""
    T, D = ids_T.shape[0], weight_VD.shape[1]
    out_TD = torch.empty(T, D, dtype=weight_VD.dtype, device=ids_T.device)
    if T:
        block = next_power_of_2(D)
        num_warps = min(max(block // 512, 1), 8)
        kernel[(T,)](
            ids_T, weight_VD, out_TD, vocab_start, weight_VD.shape[0], *factor, D=D, BLOCK_D=block, num_warps=num_warps
        )
    return out_TD


def embedding_reference(ids_T: Tensor, weight_VD: Tensor, vocab_start: int = 0) -> Tensor:
    """The same in PyTorch."""
    rows_T = ids_T - vocab_start
    elsewhere_T = (rows_T < 0) | (rows_T >= weight_VD.shape[0])
    out_TD = F.embedding(rows_T.masked_fill(elsewhere_T, 0), weight_VD)
    return out_TD.masked_fill_(elsewhere_T[:, None], 0.0)
