"""RMS norm of all queries of a token as one row, and of all its keys as another, where they lie beside its values.

Ranks have some of the heads each. Where there are several, each sums its squares first, and all are told the sums.

Shape suffixes: T tokens, N q, k and v columns of this rank, J those of q and k, P ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit
def _load_part(row_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    return tl.load(row_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)


@triton.jit
def _squares_kernel(
    qkv_ptr, squares_ptr, N: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program sums the squares of one token's queries, and those of its keys."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    q = _load_part(qkv_ptr + row * N, Q, BLOCK_Q)
    k = _load_part(qkv_ptr + row * N + Q, K, BLOCK_K)
    tl.store(squares_ptr + row * 2, tl.sum(q * q))
    tl.store(squares_ptr + row * 2 + 1, tl.sum(k * k))


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["T"])
def _qk_norm_kernel(
    qkv_ptr, weight_ptr, squares_ptr, eps, T, N: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program norms one token's queries and keys in place. One rank sums its squares here."""
    q_columns, k_columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    q_weight = _load_part(weight_ptr, Q, BLOCK_Q)
    k_weight = _load_part(weight_ptr + Q, K, BLOCK_K)
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    q_ptr = qkv_ptr + row * N
    q, k = _load_part(q_ptr, Q, BLOCK_Q), _load_part(q_ptr + Q, K, BLOCK_K)
    if RANKS == 1:
        q_squares, k_squares = tl.sum(q * q), tl.sum(k * k)
    else:
        q_squares, k_squares = 0.0, 0.0
        for rank in tl.static_range(RANKS):
            q_squares += tl.load(squares_ptr + (rank * T + row) * 2)
            k_squares += tl.load(squares_ptr + (rank * T + row) * 2 + 1)
    # Keys that several ranks have count as often in the sum as in the number of columns.
    q *= tl.rsqrt(q_squares / (RANKS * Q) + eps) * q_weight
    k *= tl.rsqrt(k_squares / (RANKS * K) + eps) * k_weight
    tl.store(q_ptr + q_columns, q.to(qkv_ptr.dtype.element_ty), mask=q_columns < Q)
    tl.store(q_ptr + Q + k_columns, k.to(qkv_ptr.dtype.element_ty), mask=k_columns < K)


def qk_squares(qkv_TN: Tensor, num_q: int, num_k: int) -> Tensor:
    """Sums of squares of the first `num_q` columns and of the `num_k` behind them: fp32 [T, 2]. Graph-safe."""
    _check(qkv_TN, num_q + num_k)
    if not use_kernels(qkv_TN):
        return qk_squares_reference(qkv_TN, num_q, num_k)
    squares_T2 = torch.empty(len(qkv_TN), 2, dtype=torch.float32, device=qkv_TN.device)
    if T := len(qkv_TN):
        _squares_kernel[(T,)](qkv_TN, squares_T2, **_sizes(qkv_TN, num_q, num_k))
    return squares_T2


def qk_norm(
    qkv_TN: Tensor, weight_J: Tensor, num_q: int, eps: float, squares_PT2: Tensor | None = None
) -> None:  # fmt: skip
    """Norm and scale the first `num_q` columns, and those behind them that have a weight, in place.

    fp32 inside, rounded once; graph-safe. `squares_PT2`: what `qk_squares` said on each of several ranks.
    """
    num_k = len(weight_J) - num_q
    _check(qkv_TN, num_q + num_k)
    check_same("weight", weight_J, qkv_TN)
    if squares_PT2 is not None:
        check_shape("squares", squares_PT2, None, len(qkv_TN), 2)
        check_dtype("squares", squares_PT2, torch.float32)
        check_contiguous("squares", squares_PT2)
        check_device("squares", squares_PT2, qkv_TN)
    if not use_kernels(qkv_TN):
        qk_norm_reference(qkv_TN, weight_J, num_q, eps, squares_PT2)
    elif T := len(qkv_TN):
        ranks = 1 if squares_PT2 is None else len(squares_PT2)
        _qk_norm_kernel[(T,)](
            qkv_TN, weight_J, qkv_TN if squares_PT2 is None else squares_PT2, eps, T,
            RANKS=ranks, **_sizes(qkv_TN, num_q, num_k),
        )  # fmt: skip


def qk_squares_reference(qkv_TN: Tensor, num_q: int, num_k: int) -> Tensor:
    """`qk_squares` in PyTorch."""
    q_TJ, k_TJ, _ = qkv_TN.float().split([num_q, num_k, qkv_TN.shape[1] - num_q - num_k], dim=1)
    return torch.stack((q_TJ.square().sum(1), k_TJ.square().sum(1)), 1)


def qk_norm_reference(
    qkv_TN: Tensor, weight_J: Tensor, num_q: int, eps: float, squares_PT2: Tensor | None = None
) -> None:
    """`qk_norm` in PyTorch."""
    num_k = len(weight_J) - num_q
    if squares_PT2 is None:
        squares_PT2 = qk_squares_reference(qkv_TN, num_q, num_k)[None]
    columns_2 = len(squares_PT2) * squares_PT2.new_tensor([num_q, num_k])
    inverse_T2 = (squares_PT2.sum(0) / columns_2 + eps).rsqrt()
    inverse_TJ = inverse_T2.repeat_interleave(torch.tensor([num_q, num_k]), dim=1)
    qkv_TN[:, : num_q + num_k] = qkv_TN[:, : num_q + num_k].float() * inverse_TJ * weight_J.float()


def _check(qkv_TN: Tensor, num_normed: int) -> None:
    check_dtype("qkv", qkv_TN, *FLOATS)
    check_shape("qkv", qkv_TN, None, None)
    check_contiguous("qkv", qkv_TN)
    if not 0 < num_normed <= qkv_TN.shape[1]:
        raise ValueError(f"qkv: got {qkv_TN.shape[1]} columns, wanted {num_normed} or more to norm")


def _sizes(qkv_TN: Tensor, num_q: int, num_k: int) -> dict[str, int | bool]:
    """Columns of one program, its warps, and how it is launched."""
    block_q, block_k = next_power_of_2(num_q), next_power_of_2(num_k)
    warps = min(max(block_q // 512, 1), 16)
    sizes = {"N": qkv_TN.shape[1], "Q": num_q, "K": num_k, "BLOCK_Q": block_q, "BLOCK_K": block_k}
    return {**sizes, "num_warps": warps, **overlap_options(qkv_TN)}
