"""Sums over ranks through peer memory with one flag a row: for many rows, where bytes count more than the way.

A program sends its row as it is, in wide stores, and then, behind a release that covers what all its warps have stored,
the number of the row's call to the flag of its place. Who has read that number and acquired may read the row: from the
L2 cache, where peers write; the L1 may hold what was there two calls ago. Two ranks send each other whole rows, as told
here; more take two hops (`all_reduce_slices.py`): the same sum to the bit, and fewer bytes from each rank.

Rows are independent, and places are taken in turn, as `all_reduce_words.py` has it: whoever sends call n of a row has
received call n - 1 of it, and its sender had by then ended call n - 2, so what is overwritten, row and flag, has been
read.

A grid may be larger than what a GPU holds at once. GPUs start programs in the order of their numbers, a program sends
before it waits, and it waits for its own row alone. So of all rows that are not done the first one has been started on
every rank, or will be without waiting for another of this kernel: it has been sent by all, and ends.

Knows addresses, not how they came about. Shape suffixes: T rows, D hidden size, P ranks, M rows that an inbox has
places for.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.all_reduce_slices import sum_by_slices
from tercet.triton_kernels.inbox import RowInboxes
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.row_places import flag_ptr, place_ptr
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit
def _send(
    x, row, columns, mask, addresses, calls_ptr, M,
    RANK: tl.constexpr, P: tl.constexpr, PLACE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Count a call of one row, write the row into the others' inboxes and then its flag: the call's number."""
    call = tl.load(calls_ptr + row) + 1
    for peer in tl.static_range(P):
        if peer != RANK:
            tl.store(place_ptr(addresses[peer], call, RANK, row, columns, M, P, PLACE, TYPE), x, mask=mask)
    # Every warp has stored its part and read the count: only now may one thread release them all, and write the count.
    tl.debug_barrier()
    for peer in tl.static_range(P):
        if peer != RANK:
            ptr = flag_ptr(addresses[peer], call, RANK, row, M, P, PLACE, TYPE)
            tl.atomic_xchg(ptr, call, sem="release", scope="sys")
    tl.store(calls_ptr + row, call)
    return call


@triton.jit
def _wait(
    call, row, addresses, M, RANK: tl.constexpr, P: tl.constexpr, PLACE: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Until the row of every other rank in this call has come and may be read."""
    for source in tl.static_range(P):
        if source != RANK:
            ptr = flag_ptr(addresses[RANK], call, source, row, M, P, PLACE, TYPE)
            # The addition is there to acquire, by one thread; compiled, it is a load.
            while tl.atomic_add(ptr, 0, sem="acquire", scope="sys") != call:
                pass
    # One thread has acquired: the others come behind it.
    tl.debug_barrier()


@triton.jit
def _sum_over_ranks(
    x, row, columns, mask, addresses, calls_ptr, M,
    D: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr, PLACE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Exchange one row; its sum over ranks in rank order, rounded."""
    if P > 2:
        return sum_by_slices(x, row, columns, mask, addresses, calls_ptr, M, D, RANK, P, PLACE, TYPE)
    call = _send(x, row, columns, mask, addresses, calls_ptr, M, RANK, P, PLACE, TYPE)
    _wait(call, row, addresses, M, RANK, P, PLACE, TYPE)
    total = tl.zeros_like(x).to(tl.float32)
    for source in tl.static_range(P):
        if source == RANK:
            part = x
        else:
            part_ptr = place_ptr(addresses[RANK], call, source, row, columns, M, P, PLACE, TYPE)
            part = tl.load(part_ptr, mask=mask, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total.to(TYPE)


@triton.jit
def _own_row(x_ptr, row, columns, mask, D: tl.constexpr, PARTS: tl.constexpr, TYPE: tl.constexpr):
    """This rank's row: of its parts the sum, rounded."""
    x_ptrs = x_ptr + row.to(tl.int64) * D + columns
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptrs + tl.num_programs(0).to(tl.int64) * (part * D), mask=mask, other=0.0)
    return x.to(TYPE)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _all_reduce_rows_kernel(
    x_ptr, out_ptr, addresses, calls_ptr, M,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr,
    PLACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program exchanges one row and writes the sum."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    let_next_start(PDL)
    wait_for_previous(PDL)
    x = _own_row(x_ptr, row, columns, mask, D, PARTS, TYPE)
    total = _sum_over_ranks(x, row, columns, mask, addresses, calls_ptr, M, D, RANK, P, PLACE, TYPE)
    tl.store(out_ptr + row.to(tl.int64) * D + columns, total, mask=mask)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _all_reduce_rows_add_rms_norm_kernel(
    update_ptr, residual_ptr, weight_ptr, out_ptr, eps, addresses, calls_ptr, M,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr,
    PLACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program exchanges one row, adds its sum into the residual and norms the rounded total."""
    TYPE: tl.constexpr = residual_ptr.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    offsets = row.to(tl.int64) * D + columns
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    let_next_start(PDL)
    wait_for_previous(PDL)
    update = _own_row(update_ptr, row, columns, mask, D, PARTS, TYPE)
    residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    update = _sum_over_ranks(update, row, columns, mask, addresses, calls_ptr, M, D, RANK, P, PLACE, TYPE)
    total = (residual.to(tl.float32) + update.to(tl.float32)).to(TYPE)
    tl.store(residual_ptr + offsets, total, mask=mask)
    total = total.to(tl.float32)
    out = total * tl.rsqrt(tl.sum(total * total) / D + eps) * weight.to(tl.float32)
    tl.store(out_ptr + offsets, out.to(TYPE), mask=mask)


def sum_rows(x: Tensor, parts: int, out_TD: Tensor, inboxes: RowInboxes) -> None:
    """Write the sum over ranks of an update or of its parts: what `all_reduce` has checked."""
    _all_reduce_rows_kernel[(out_TD.shape[0],)](
        x, out_TD, inboxes.addresses, inboxes.calls_M, inboxes.calls_M.shape[0], **_options(out_TD, parts, inboxes)
    )


def sum_rows_add_rms_norm(
    update: Tensor,
    parts: int,
    residual_TD: Tensor,
    weight_D: Tensor,
    out_TD: Tensor,
    eps: float,
    inboxes: RowInboxes,
) -> None:
    """Add the sum into the residual in place and write its norm: what `all_reduce_add_rms_norm` has checked."""
    _all_reduce_rows_add_rms_norm_kernel[(out_TD.shape[0],)](
        update, residual_TD, weight_D, out_TD, eps, inboxes.addresses, inboxes.calls_M, inboxes.calls_M.shape[0],
        **_options(out_TD, parts, inboxes),
    )  # fmt: skip


def _options(out_TD: Tensor, parts: int, inboxes: RowInboxes) -> dict[str, int | bool]:
    """Stores of 16 bytes a thread, one of a slice or two of a row, and so few registers that several rows' programs
    fit a multiprocessor."""
    D, itemsize, P = out_TD.shape[1], out_TD.element_size(), len(inboxes.addresses)
    block = next_power_of_2(D)
    return {
        "D": D,
        "BLOCK_D": block,
        "PARTS": parts,
        "RANK": inboxes.rank,
        "P": P,
        "PLACE": inboxes.row_bytes // itemsize,
        "num_warps": min(max(block * itemsize // (2048 if P > 2 else 1024), 1), 16),
        **overlap_options(out_TD),
    }
