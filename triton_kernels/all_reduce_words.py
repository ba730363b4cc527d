"""Sums over ranks through peer memory with a number in every word: for few rows, the shortest way from rank to rank.

Each word of a row travels with the number of its row's call in one store of 8 bytes, so the reader sees from a word
itself that it has come: no fence, no barrier, one way over the link. Rows are independent. An inbox holds two calls in
turn: whoever sends call n of a row has received call n - 1 of it, and its sender had by then ended call n - 2, so what
is overwritten has been read. Large grids end as `all_reduce_rows.py` says.

Rows are handled as int32 words: two numbers of 16 bits, or one of 32. Knows addresses, not how they came about.

Shape suffixes: T rows, D hidden size, W words of a row, P ranks, M rows that an inbox has places for.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_dtype, check_shape
from tercet.triton_kernels.inbox import WordInboxes
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import next_power_of_2


@triton.jit
def _low(words, TYPE: tl.constexpr):
    """The first number of each word, in fp32."""
    if TYPE.is_fp32():
        low = words.to(tl.float32, bitcast=True)
    else:  # and no return above: Triton compiles what is behind one
        low = words.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return low


@triton.jit
def _high(words, TYPE: tl.constexpr):
    """The second number of each word, in fp32; zero where words hold one."""
    if TYPE.is_fp32():
        high = (words * 0).to(tl.float32)
    else:
        high = (words >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return high


@triton.jit
def _word(low, high, TYPE: tl.constexpr):
    """The words of rounded numbers."""
    if TYPE.is_fp32():
        words = low.to(tl.int32, bitcast=True)
    else:
        words = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = words | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


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


@triton.jit
def _own_words(x_ptr, row, columns, mask, W: tl.constexpr, PARTS: tl.constexpr, TYPE: tl.constexpr):
    """The words of this rank's row: of its parts the sum, rounded."""
    if PARTS == 1 and x_ptr.dtype.element_ty == TYPE:
        return tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * W + columns, mask=mask, other=0)
    # As wide as a word's numbers are in fp32: both at once.
    WIDE: tl.constexpr = tl.int32 if TYPE.is_fp32() else tl.int64
    low = tl.zeros(columns.shape, tl.float32)
    high = tl.zeros(columns.shape, tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * tl.num_programs(0) + row).to(tl.int64) * W
        pair = tl.load(x_ptr.to(tl.pointer_type(WIDE)) + place + columns, mask=mask, other=0)
        low += pair.to(tl.int32).to(tl.float32, bitcast=True)
        if not TYPE.is_fp32():
            high += (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return _word(low, high, TYPE)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _all_reduce_kernel(
    x_ptr, out_ptr, addresses, calls_ptr, M,
    W: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr,
    PLACE_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program exchanges one row and writes the sum."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_W)
    mask = columns < W
    let_next_start(PDL)
    wait_for_previous(PDL)
    words = _own_words(x_ptr, row, columns, mask, W, PARTS, TYPE)
    low, high = _sum_over_ranks(words, row, columns, mask, addresses, calls_ptr, M, RANK, P, PLACE_WORDS, TYPE)
    out_words_ptr = out_ptr.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * W + columns
    tl.store(out_words_ptr, _word(low, high, TYPE), mask=mask)


@triton.jit
def _weights(weight_ptr, columns, mask, TYPE: tl.constexpr):
    """Of both numbers of words of TYPE, for which there may be more than 16 bits."""
    if weight_ptr.dtype.element_ty == TYPE:
        words = tl.load(weight_ptr.to(tl.pointer_type(tl.int32)) + columns, mask=mask, other=0)
        low, high = _low(words, TYPE), _high(words, TYPE)
    else:
        low = tl.load(weight_ptr + 2 * columns, mask=mask, other=0.0)
        high = tl.load(weight_ptr + 2 * columns + 1, mask=mask, other=0.0)
    return low, high


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _all_reduce_add_rms_norm_kernel(
    update_ptr, residual_ptr, weight_ptr, out_ptr, eps, addresses, calls_ptr, M,
    W: tl.constexpr, D: tl.constexpr, BLOCK_W: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, P: tl.constexpr,
    PLACE_WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one program exchanges one row, adds its sum into the residual and norms the rounded total."""
    TYPE: tl.constexpr = residual_ptr.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_W)
    mask = columns < W
    offset = row.to(tl.int64) * W + columns
    weight_low, weight_high = _weights(weight_ptr, columns, mask, TYPE)
    residual_words_ptr = residual_ptr.to(tl.pointer_type(tl.int32)) + offset
    let_next_start(PDL)
    wait_for_previous(PDL)
    words = _own_words(update_ptr, row, columns, mask, W, PARTS, TYPE)
    residual = tl.load(residual_words_ptr, mask=mask, other=0)
    low, high = _sum_over_ranks(words, row, columns, mask, addresses, calls_ptr, M, RANK, P, PLACE_WORDS, TYPE)
    total = _word(_low(residual, TYPE) + low, _high(residual, TYPE) + high, TYPE)
    tl.store(residual_words_ptr, total, mask=mask)
    low, high = _low(total, TYPE), _high(total, TYPE)
    scale = tl.rsqrt(tl.sum(low * low + high * high) / D + eps)
    out = _word(low * scale * weight_low, high * scale * weight_high, TYPE)
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


def sum_words(x: Tensor, parts: int, out_TD: Tensor, inboxes: WordInboxes) -> None:
    """Write the sum over ranks of an update or of its parts: what `all_reduce` has checked."""
    W = _words_of_row(out_TD)
    _all_reduce_kernel[(out_TD.shape[0],)](
        x, out_TD, inboxes.addresses, inboxes.calls_M, inboxes.calls_M.shape[0], W=W, PARTS=parts,
        **_options(W, out_TD, inboxes),
    )  # fmt: skip


def sum_words_add_rms_norm(
    update: Tensor,
    parts: int,
    residual_TD: Tensor,
    weight_D: Tensor,
    out_TD: Tensor,
    eps: float,
    inboxes: WordInboxes,
) -> None:
    """Add the sum into the residual in place and write its norm: what `all_reduce_add_rms_norm` has checked."""
    T, D = out_TD.shape
    W = _words_of_row(out_TD)
    _all_reduce_add_rms_norm_kernel[(T,)](
        update, residual_TD, weight_D, out_TD, eps, inboxes.addresses, inboxes.calls_M, inboxes.calls_M.shape[0],
        W=W, D=D, PARTS=parts, **_options(W, out_TD, inboxes),
    )  # fmt: skip


def stack_rows(x_TW: Tensor, inboxes: WordInboxes) -> Tensor:
    """Every rank's words: int32 [T, W] -> [P, T, W]. Graph-safe; all ranks call it with the same shape."""
    check_dtype("x", x_TW, torch.int32)
    check_contiguous("x", x_TW)
    check_shape("x", x_TW, None, None)
    T, W = x_TW.shape
    inboxes.check_room(T, W * 4)
    out_PTW = x_TW.new_empty(len(inboxes.addresses), T, W)
    _stack_rows_kernel[(T,)](x_TW, out_PTW, inboxes.addresses, inboxes.calls_M, inboxes.calls_M.shape[0], T,
                             W=W, **_options(W, x_TW, inboxes))  # fmt: skip
    return out_PTW


def _words_of_row(x_TD: Tensor) -> int:
    """int32 words that a row takes."""
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    if row_bytes % 4:
        raise ValueError(f"x: got rows of {x_TD.shape[1]} numbers of {x_TD.dtype}, wanted whole words of 4 bytes")
    return row_bytes // 4


def _options(W: int, x: Tensor, inboxes: WordInboxes) -> dict[str, int | bool]:
    block = next_power_of_2(W)
    return {
        "BLOCK_W": block,
        "RANK": inboxes.rank,
        "P": len(inboxes.addresses),
        "PLACE_WORDS": inboxes.row_bytes // 4,
        "num_warps": min(max(block // 256, 1), 16),
        **overlap_options(x),
    }
