"""What a layer that guesses reads of a token: its hidden state and the next token's embedding, each normed, in one row.

Shape suffixes: T tokens, D hidden size, E = 2 D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import check_norm, norm_options, rms_norm_reference
from tercet.triton_kernels.checks import check_same, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous


@triton.jit
def _norm(x, weight, eps, D: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x) / D + eps) * weight


@triton.jit
def _join_normed_kernel(
    embedded_ptr, hidden_ptr, own_norm_ptr, token_norm_ptr, hidden_norm_ptr, out_ptr, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HAS_OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program owns a row of either."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    token_norm = tl.load(token_norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    hidden_norm = tl.load(hidden_norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    embedded = tl.load(embedded_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    hidden = tl.load(hidden_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_OWN:
        own_norm = tl.load(own_norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        # Rounded, as if another kernel had written it.
        hidden = _norm(hidden, own_norm, eps, D).to(out_ptr.dtype.element_ty).to(tl.float32)
    out_ptr += row * (2 * D) + columns
    token_row = _norm(embedded, token_norm, eps, D).to(out_ptr.dtype.element_ty)
    hidden_row = _norm(hidden, hidden_norm, eps, D).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr, token_row, mask=mask)
    tl.store(out_ptr + D, hidden_row, mask=mask)


def join_normed(
    embedded_TD: Tensor, hidden_TD: Tensor, own_norm_D: Tensor | None, token_norm_D: Tensor, hidden_norm_D: Tensor,
    eps: float, *, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """[T, D] each -> [T, 2 D]: the embeddings' half, then the hidden states'.

    `own_norm_D`: hidden states go through this norm before. Sums in fp32; mutates nothing; graph-safe.
    """
    for x_TD, norm_D in ((embedded_TD, token_norm_D), (hidden_TD, hidden_norm_D)):
        check_norm(x_TD, norm_D)
    check_same("hidden", hidden_TD, embedded_TD)
    T, D = embedded_TD.shape
    check_shape("hidden", hidden_TD, T, D)
    if own_norm_D is not None:
        check_norm(hidden_TD, own_norm_D)
    if not use_kernels(embedded_TD):
        return join_normed_reference(embedded_TD, hidden_TD, own_norm_D, token_norm_D, hidden_norm_D, eps)
    out_TE = torch.empty(T, 2 * D, dtype=embedded_TD.dtype, device=embedded_TD.device)
    if T:
        _join_normed_kernel[(T,)](
            embedded_TD, hidden_TD, hidden_norm_D if own_norm_D is None else own_norm_D, token_norm_D, hidden_norm_D,
            out_TE, eps, D=D, HAS_OWN=own_norm_D is not None,
            **norm_options(T, D, embedded_TD, deterministic),
        )  # fmt: skip
    return out_TE


def join_normed_reference(
    embedded_TD: Tensor, hidden_TD: Tensor, own_norm_D: Tensor | None, token_norm_D: Tensor, hidden_norm_D: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """The same in PyTorch."""
    if own_norm_D is not None:
        hidden_TD = rms_norm_reference(hidden_TD, own_norm_D, eps)
    halves = rms_norm_reference(embedded_TD, token_norm_D, eps), rms_norm_reference(hidden_TD, hidden_norm_D, eps)
    return torch.cat(halves, 1)
