"""Log-probabilities of chosen tokens and of the likeliest ones, from logits, without a sort.

Shape suffixes: R rows, V vocabulary, K likeliest tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels

_BLOCK = 4096


@triton.jit
def _log_probabilities_kernel(
    logits_ptr, token_ids_ptr, chosen_ptr, ranks_ptr, top_ids_ptr, top_ptr,
    STRIDE: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one program reads its row twice for the sum and the rank, and once for each of the K likeliest.

    Each of those is the largest logit below the last one found, or equal to it with a higher id.
    """
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * STRIDE
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(row_ptr + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, x)
    largest = tl.max(best)
    token = tl.load(token_ids_ptr + row)
    inside = (token >= 0) & (token < V)
    chosen = tl.load(row_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        x = tl.load(row_ptr + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - largest)
        above += (x > chosen).to(tl.int32)
    log_sum = largest + tl.log(tl.sum(total))
    tl.store(chosen_ptr + row, chosen - log_sum)
    tl.store(ranks_ptr + row, tl.where(inside, tl.sum(above) + 1, -1))
    last = tl.full([], float("inf"), tl.float32)
    last_id = tl.full([], -1, tl.int32)
    for k in range(K):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_id = tl.full([BLOCK], V, tl.int32)
        for start in range(0, V, BLOCK):
            ids = start + column
            x = tl.load(row_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            left = (ids < V) & ((x < last) | ((x == last) & (ids > last_id)))
            better = left & ((x > best) | (best_id == V))
            best = tl.where(better, x, best)
            best_id = tl.where(better, ids, best_id)
        last = tl.max(best)
        last_id = tl.min(tl.where(best == last, best_id, V))
        tl.store(top_ids_ptr + row * K + k, last_id)
        tl.store(top_ptr + row * K + k, last - log_sum)


def log_probabilities(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability (fp32) and rank (1: likeliest; int32) of each row's token, -inf and -1 for a token outside the
    vocabulary; ids [R, K] and log-probabilities [R, K] of the `num_top` likeliest, equal ones by id. Graph-safe."""
    check_dtype("logits", logits_RV, *FLOATS)
    check_shape("logits", logits_RV, None, None)
    R, V = logits_RV.shape
    if R and logits_RV.stride(1) != 1:
        raise ValueError(f"logits: got strides {list(logits_RV.stride())}, wanted rows without gaps")
    check_shape("token_ids", token_ids_R, R)
    check_dtype("token_ids", token_ids_R, torch.int32)
    check_contiguous("token_ids", token_ids_R)
    check_device("token_ids", token_ids_R, logits_RV)
    if not 0 <= num_top <= V:
        raise ValueError(f"num_top is {num_top}; want 0 to {V}")
    if not use_kernels(logits_RV):
        return log_probabilities_reference(logits_RV, token_ids_R, num_top)
    device = logits_RV.device
    chosen_R = torch.empty(R, dtype=torch.float32, device=device)
    ranks_R = torch.empty(R, dtype=torch.int32, device=device)
    top_ids_RK = torch.empty(R, num_top, dtype=torch.int32, device=device)
    top_RK = torch.empty(R, num_top, dtype=torch.float32, device=device)
    if R:
        _log_probabilities_kernel[(R,)](
            logits_RV, token_ids_R, chosen_R, ranks_R, top_ids_RK, top_RK,
            STRIDE=logits_RV.stride(0), V=V, K=num_top, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return chosen_R, ranks_R, top_ids_RK, top_RK


def log_probabilities_reference(
    logits_RV: Tensor, token_ids_R: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in PyTorch."""
    log_RV = logits_RV.float().log_softmax(1)
    inside_R = (token_ids_R >= 0) & (token_ids_R < logits_RV.shape[1])
    chosen_R = log_RV.gather(1, torch.where(inside_R, token_ids_R, 0).long()[:, None]).squeeze(1)
    ranks_R = torch.where(inside_R, (log_RV > chosen_R[:, None]).sum(1).int() + 1, -1)
    # A stable sort keeps equal ones in the order of their ids.
    sorted_RV, ids_RV = log_RV.sort(dim=1, descending=True, stable=True)
    chosen_R = chosen_R.masked_fill(~inside_R, float("-inf"))
    return chosen_R, ranks_R, ids_RV[:, :num_top].int().contiguous(), sorted_RV[:, :num_top].contiguous()
