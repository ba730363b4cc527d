"""Sums over ranks through peer memory: every rank writes its rows into the others' inboxes and adds what it received.

Each word of a row travels with the number of its row's call in one store of 8 bytes, so the reader sees from a word
itself that it has come: no fence, no barrier, one way over the link. Rows are independent. An inbox holds two calls in
turn: whoever sends call n of a row has received call n - 1 of it, and its sender had by then ended call n - 2, so what
is overwritten has been read. The sum runs over ranks in order, in fp32, and is rounded once: the same bits on every
rank. All must make the same calls, with as many rows, on one stream.

Rows are handled as int32 words: two numbers of 16 bits, or one of 32. Knows addresses, not how they came about.

Shape suffixes: T rows, D hidden size, W words of a row, P ranks, M rows that an inbox has places for.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous


@dataclass(frozen=True)
class Inboxes:
    """Where ranks write to each other. An inbox: int64 [2, P, M, W], all zero before the first call of any rank."""

    rank: int
    addresses: tuple[int, ...]
    """Where each rank's inbox begins, in this rank's address space."""
    calls_M: Tensor
    """int32, zero at first: how many calls each row has been in."""
    num_words: int
    owner: object
    """Keeps this rank's inbox, and its view of the others', in memory."""

    def hold(self, num_rows: int, num_words: int) -> bool:
        """Whether there is a place for so many rows of so many words."""
        return 0 < num_rows <= self.calls_M.shape[0] and num_words <= self.num_words


def inbox_shape(num_ranks: int, num_rows: int, num_words: int) -> tuple[int, int, int, int]:
    """Of int64: two calls in turn, from each rank, word by word."""
    return 2, num_ranks, num_rows, num_words


@triton.jit
def _low(words, TYPE: tl.constexpr):
    """The first number of each word, in fp32."""
    if TYPE.is_fp32():
        return words.to(tl.float32, bitcast=True)
    return words.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, TYPE: tl.constexpr):
    """The second number of each word, in fp32; zero where words hold one."""
    if TYPE.is_fp32():
        return (words * 0).to(tl.float32)
    return (words >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high, TYPE: tl.constexpr):
    """The words of rounded numbers."""
    if TYPE.is_fp32():
        return low.to(tl.int32, bitcast=True)
    low = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _pointer(address):
    """To an inbox. Memory is allocated at multiples of 16 bytes, and wide stores need to know."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _send(
    words, row, columns, mask, addresses, calls_ptr, M, RANK: tl.constexpr, P: tl.constexpr, PLACE_WORDS: tl.constexpr
):
    """Count a call of one row and write the row, every word with its number, into the others' inboxes: the number."""
    call = tl.load(calls_ptr + row) + 1
    packed = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    offset = (((call & 1) * P + RANK).to(tl.int64) * M + row) * PLACE_WORDS + columns
    for peer in tl.static_range(P):
        if peer != RANK:
            tl.store(_pointer(addresses[peer]) + offset, packed, mask=mask)
    # Keeps the stores ahead of the waiting that follows, and the count behind every warp's reading of it: one that came
    # late would take this call for the next.
    tl.debug_barrier()
    tl.store(calls_ptr + row, call)
    return call


@triton.jit
def _receive(
    source, call, row, columns, mask, addresses, M, RANK: tl.constexpr, P: tl.constexpr, PLACE_WORDS: tl.constexpr
):
    """Wait for the row of rank `source` in this call: its words."""
    inbox_ptr = _pointer(addresses[RANK])
    offset = (((call & 1) * P + source).to(tl.int64) * M + row) * PLACE_WORDS + columns
    packed = tl.load(inbox_ptr + offset, mask=mask, other=0, volatile=True)
    while tl.sum((((packed >> 32).to(tl.int32) != call) & mask).to(tl.int32)) > 0:
        packed = tl.load(inbox_ptr + offset, mask=mask, other=0, volatile=True)
    return packed.to(tl.int32)


@triton.jit
def _sum_over_ranks(
    words, row, columns, mask, addresses, calls_ptr, M,
    RANK: tl.constexpr, P: tl.constexpr, PLACE_WORDS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Exchange one row; its sum over ranks in rank order, rounded, as both numbers of each word in fp32."""
    call = _send(words, row, columns, mask, addresses, calls_ptr, M, RANK, P, PLACE_WORDS)
    low = (words * 0).to(tl.float32)
    high = low
    for source in tl.static_range(P):
        if source == RANK:
            part = words
        else:
            part = _receive(source, call, row, columns, mask, addresses, M, RANK, P, PLACE_WORDS)
        low += _low(part, TYPE)
        high += _high(part, TYPE)
    total = _word(low, high, TYPE)
    return _low(total, TYPE), _high(total, TYPE)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _all_reduce_kernel(
    x_ptr, addresses, calls_ptr, M,
    W: tl.constexpr, BLOCK_W: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr, PLACE_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program exchanges one row and writes the sum in its place."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_W)
    mask = columns < W
    x_words_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * W + columns
    let_next_start(PDL)
    wait_for_previous(PDL)
    words = tl.load(x_words_ptr, mask=mask, other=0)
    low, high = _sum_over_ranks(words, row, columns, mask, addresses, calls_ptr, M, RANK, P, PLACE_WORDS, TYPE)
    tl.store(x_words_ptr, _word(low, high, TYPE), mask=mask)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _all_reduce_add_rms_norm_kernel(
    update_ptr, residual_ptr, weight_ptr, out_ptr, eps, addresses, calls_ptr, M,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr,
    PLACE_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program exchanges one row, adds its sum into the residual and norms the rounded total."""
    TYPE: tl.constexpr = update_ptr.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_W)
    mask = columns < W
    offset = row.to(tl.int64) * W + columns
    weight = tl.load(weight_ptr.to(tl.pointer_type(tl.int32)) + columns, mask=mask, other=0)
    residual_words_ptr = residual_ptr.to(tl.pointer_type(tl.int32)) + offset
    let_next_start(PDL)
    wait_for_previous(PDL)
    words = tl.load(update_ptr.to(tl.pointer_type(tl.int32)) + offset, mask=mask, other=0)
    residual = tl.load(residual_words_ptr, mask=mask, other=0)
    low, high = _sum_over_ranks(words, row, columns, mask, addresses, calls_ptr, M, RANK, P, PLACE_WORDS, TYPE)
    total = _word(_low(residual, TYPE) + low, _high(residual, TYPE) + high, TYPE)
    tl.store(residual_words_ptr, total, mask=mask)
    low, high = _low(total, TYPE), _high(total, TYPE)
    scale = tl.rsqrt(tl.sum(low * low + high * high) / D + eps)
    out = _word(low * scale * _low(weight, TYPE), high * scale * _high(weight, TYPE), TYPE)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + offset, out, mask=mask)


@triton.jit(do_not_specialize=["M", "T"], do_not_specialize_on_alignment=["M", "T"])
def _stack_rows_kernel(
    x_ptr, out_ptr, addresses, calls_ptr, M, T,
    W: tl.constexpr, BLOCK_W: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr, PLACE_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program exchanges one row of words and writes every rank's."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_W)
    mask = columns < W
    let_next_start(PDL)
    wait_for_previous(PDL)
    words = tl.load(x_ptr + row * W + columns, mask=mask, other=0)
    call = _send(words, row, columns, mask, addresses, calls_ptr, M, RANK, P, PLACE_WORDS)
    for source in tl.static_range(P):
        if source == RANK:
            part = words
        else:
            part = _receive(source, call, row, columns, mask, addresses, M, RANK, P, PLACE_WORDS)
        tl.store(out_ptr + (source * T + row) * W + columns, part, mask=mask)


def all_reduce(x_TD: Tensor, inboxes: Inboxes) -> Tensor:
    """Sum over ranks, in place. Graph-safe; all ranks call it with the same shape."""
    T, W = _check(x_TD, inboxes)
    _all_reduce_kernel[(T,)](x_TD, inboxes.addresses, inboxes.calls_M, inboxes.calls_M.shape[0],
                             W=W, **_options(W, x_TD, inboxes))  # fmt: skip
    return x_TD


def all_reduce_add_rms_norm(
    update_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, inboxes: Inboxes
) -> Tensor:
    """Add the sum over ranks of `update_TD` into `residual_TD` in place; return that, normed and scaled.

    The residual is to the bit what `all_reduce` and `add_rms_norm` make of it; the norm sums in another order.
    Graph-safe; all ranks call it with the same shape.
    """
    T, W = _check(update_TD, inboxes)
    D = update_TD.shape[1]
    check_shape("residual", residual_TD, T, D)
    check_same("residual", residual_TD, update_TD)
    check_shape("weight", weight_D, D)
    check_same("weight", weight_D, update_TD)
    out_TD = torch.empty_like(update_TD)
    _all_reduce_add_rms_norm_kernel[(T,)](
        update_TD, residual_TD, weight_D, out_TD, eps, inboxes.addresses, inboxes.calls_M, inboxes.calls_M.shape[0],
        W=W, D=D, **_options(W, update_TD, inboxes),
    )  # fmt: skip
    return out_TD


def stack_rows(x_TW: Tensor, inboxes: Inboxes) -> Tensor:
    """Every rank's words: int32 [T, W] -> [P, T, W]. Graph-safe; all ranks call it with the same shape."""
    check_dtype("x", x_TW, torch.int32)
    check_contiguous("x", x_TW)
    check_shape("x", x_TW, None, None)
    T, W = x_TW.shape
    _check_room(T, W, inboxes)
    out_PTW = x_TW.new_empty(len(inboxes.addresses), T, W)
    _stack_rows_kernel[(T,)](x_TW, out_PTW, inboxes.addresses, inboxes.calls_M, inboxes.calls_M.shape[0], T,
                             W=W, **_options(W, x_TW, inboxes))  # fmt: skip
    return out_PTW


def sum_in_order(x_PTD: Tensor) -> Tensor:
    """Of every rank's rows, what `all_reduce` makes of them: a sum in rank order, in fp32, rounded once."""
    total_TD = x_PTD[0].float()
    for part_TD in x_PTD[1:]:
        total_TD = total_TD + part_TD
    return total_TD.to(x_PTD.dtype)


def words_of(row_size: int, dtype: torch.dtype) -> int:
    """int32 words that a row takes."""
    return row_size * dtype.itemsize // 4


def _check(x_TD: Tensor, inboxes: Inboxes) -> tuple[int, int]:
    check_dtype("x", x_TD, *FLOATS)
    check_contiguous("x", x_TD)
    check_shape("x", x_TD, None, None)
    T, D = x_TD.shape
    if D * x_TD.element_size() % 4:
        raise ValueError(f"x: got rows of {D} numbers of {x_TD.dtype}, wanted whole words of 4 bytes")
    W = words_of(D, x_TD.dtype)
    _check_room(T, W, inboxes)
    return T, W


def _check_room(num_rows: int, num_words: int, inboxes: Inboxes) -> None:
    if not inboxes.hold(num_rows, num_words):
        raise ValueError(
            f"x: got {num_rows} rows of {num_words} words, wanted 1 to {inboxes.calls_M.shape[0]} rows "
            f"of at most {inboxes.num_words}"
        )


def _options(W: int, x: Tensor, inboxes: Inboxes) -> dict[str, int | bool]:
    block = triton.next_power_of_2(W)
    return {
        "BLOCK_W": block,
        "RANK": inboxes.rank,
        "P": len(inboxes.addresses),
        "PLACE_WORDS": inboxes.num_words,
        "num_warps": min(max(block // 256, 1), 16),
        **overlap_options(x),
    }
