"""Adds what other ranks sent as whole messages: the sum, residual add and norm, as soon as flags say that it is there.

A message is this rank's part of an update for some rows; the others' parts of it lie in this rank's memory, brought by
copies that no kernel waits for. Behind each part its sender writes a flag: the number of the step. The sum runs over
ranks in order, in fp32, and is rounded once: the same bits as `all_reduce` and then `add_rms_norm`.

Knows where parts lie; knows nothing of how they came.

Shape suffixes: T rows of a message, D hidden size, Q places of messages in turn, P other ranks, M rows that a place has
room for, N messages of a step.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.add_rms_norm import row_warps
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@dataclass(frozen=True)
class Arrivals:
    """Memory of one rank that the others write to."""

    rank: int
    parts_QPMD: Tensor
    """Message n of a step is in place n % Q; the other ranks in order."""
    flags_NP: Tensor
    """int32, zero at first: the last step whose message n is there."""
    step_1: Tensor
    """int32: the number of this step, which `begin_step` counts."""


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["first"])
def _begin_step_kernel(step_ptr, num_tokens_ptr, rest_ptr, first):
    """Grid (1,)."""
    tl.store(step_ptr, tl.load(step_ptr) + 1)
    tl.store(rest_ptr, tl.maximum(tl.load(num_tokens_ptr) - first, 0))


@triton.jit(do_not_specialize=["number", "M"], do_not_specialize_on_alignment=["number", "M"])
def _add_arrived_kernel(
    update_ptr, parts_ptr, flags_ptr, step_ptr, number, M, residual_ptr, weight_ptr, out_ptr, rows_ptr, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr,
    NORM: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program waits for one row's parts, adds their sum into the residual and norms the total."""
    TYPE: tl.constexpr = residual_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS and row >= tl.load(rows_ptr):
        return
    step = tl.load(step_ptr)
    own = tl.load(update_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    update = tl.zeros((BLOCK_D,), tl.float32)
    for other in tl.static_range(P + 1):
        if other == RANK:
            update += own
        else:
            place = other if other < RANK else other - 1
            # Whoever sees the flag by this sees what was written before it; a plain load would not do. (Triton makes a
            # load of it that acquires, and would make nothing of it if nobody used the result.)
            while tl.atomic_add(flags_ptr + number * P + place, 0, sem="acquire", scope="sys") != step:
                pass
            # Past the L1 cache, which knows no peers.
            part_ptr = parts_ptr + ((number % Q * P + place).to(tl.int64) * M + row) * D
            update += tl.load(part_ptr + columns, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    # Rounded before each step: the same numbers as when other kernels had written the sum and the residual.
    total = (residual + update.to(TYPE).to(tl.float32)).to(TYPE)
    tl.store(residual_ptr + row * D + columns, total, mask=mask)
    if NORM:
        total = total.to(tl.float32)
        y = total * tl.rsqrt(tl.sum(total * total) / D + eps) * weight
        tl.store(out_ptr + row * D + columns, y.to(TYPE), mask=mask)


def begin_step(arrivals: Arrivals, num_tokens_1: Tensor, first: int) -> Tensor:
    """Count a step, on every rank; how many of its tokens lie behind the first `first`: int32 [1]. Graph-safe."""
    rest_1 = torch.empty_like(num_tokens_1)
    # Launched without overlap: what follows may read both before it waits.
    _begin_step_kernel[(1,)](arrivals.step_1, num_tokens_1, rest_1, first, num_warps=1)
    return rest_1


def add_arrived(
    update_TD: Tensor,
    arrivals: Arrivals,
    number: int,
    residual_TD: Tensor,
    rows: Tensor | None = None,
    *,
    overlap: bool = True,
) -> None:
    """Add message `number`'s sum over ranks into `residual_TD`, in place. Waits on the device; graph-safe.

    `overlap`: whether it may start before the kernel ahead of it has ended.
    """
    _launch(update_TD, arrivals, number, residual_TD, None, 0.0, rows, overlap)


def add_arrived_rms_norm(
    update_TD: Tensor,
    arrivals: Arrivals,
    number: int,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    rows: Tensor | None = None,
) -> Tensor:
    """`add_arrived`; returns the total, normed and scaled."""
    check_shape("weight", weight_D, update_TD.shape[-1])
    check_same("weight", weight_D, update_TD, torch.float32)
    return _launch(update_TD, arrivals, number, residual_TD, weight_D, eps, rows, True)


def _launch(
    update_TD: Tensor,
    arrivals: Arrivals,
    number: int,
    residual_TD: Tensor,
    weight_D: Tensor | None,
    eps: float,
    rows: Tensor | None,
    overlap: bool,
) -> Tensor:
    check_dtype("update", update_TD, *FLOATS)
    check_contiguous("update", update_TD)
    Q, P, M, D = arrivals.parts_QPMD.shape
    check_shape("update", update_TD, None, D)
    check_same("parts", arrivals.parts_QPMD, update_TD)
    check_shape("residual", residual_TD, *update_TD.shape)
    check_same("residual", residual_TD, update_TD)
    T = update_TD.shape[0]
    if not 0 < T <= M or not 0 <= number < arrivals.flags_NP.shape[0]:
        raise ValueError(
            f"update: got message {number} of {T} rows, wanted one below {arrivals.flags_NP.shape[0]} of 1 to {M} rows"
        )
    out_TD = update_TD if weight_D is None else torch.empty_like(update_TD)
    block = next_power_of_2(D)
    _add_arrived_kernel[(T,)](
        update_TD, arrivals.parts_QPMD, arrivals.flags_NP, arrivals.step_1, number, M, residual_TD,
        update_TD if weight_D is None else weight_D, out_TD, update_TD if rows is None else rows, eps,
        D=D, BLOCK_D=block, Q=Q, P=P, RANK=arrivals.rank, NORM=weight_D is not None, HAS_ROWS=rows is not None,
        num_warps=row_warps(D), **(overlap_options(update_TD) if overlap else {"PDL": False}),
    )  # fmt: skip
    return out_TD
