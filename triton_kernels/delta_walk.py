"""`delta_prologue` of many tokens: rows that walk over tokens of one chunk, and load each input once.

Shape suffixes as there.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.delta_tokens import convolve, follow_tokens, load_taps, nothing, store_gates
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous

_SIZES = ["T", "B", "S", "num_chunks"]


@triton.jit
def _walk(
    x_ptrs, qkv_ptrs, mask, inputs, taps, scale,
    NORM: tl.constexpr, N: tl.constexpr, C: tl.constexpr, W: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Of some rows LENGTH tokens each, whose inputs are loaded at once and turn into those before the next token."""
    loaded = nothing()
    for step in tl.static_range(LENGTH):
        loaded += (tl.load(x_ptrs + step * N, mask=mask, other=0.0),)
    for step in tl.static_range(LENGTH):
        inputs += (loaded[step].to(tl.float32),)
        y = convolve(inputs, taps, scale, NORM, W)
        tl.store(qkv_ptrs + step * C, y.to(qkv_ptrs.dtype.element_ty), mask=mask)
        inputs = inputs[1:]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def delta_walk_kernel(
    x_ptr, rates_ptr, tails_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr,
    chunk_starts_ptr, query_starts_ptr, rows_ptr, qkv_ptr, gates_ptr, T, B, S, num_chunks,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, BLOCK_T: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (2 K + H + 1, T / (BLOCK_T LENGTH)): as the kernel there, for many tokens of few chunks.

    Where all of a program's are of one chunk, they are BLOCK_T rows of LENGTH tokens, and each input is loaded once.
    """
    C: tl.constexpr = 2 * K * D + H * V
    SPAN: tl.constexpr = BLOCK_T * LENGTH
    tl.static_assert(LENGTH >= W - 1)
    head = tl.program_id(0)
    columns, own, taps = load_taps(conv_ptr, head, K, D, V, C, W, BLOCK)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS:
        T = tl.minimum(T, tl.load(rows_ptr))
    first = tl.program_id(1) * SPAN
    if head == 2 * K + H:
        tokens = first + tl.arange(0, SPAN)
        store_gates(rates_ptr, a_log_ptr, dt_bias_ptr, gates_ptr, tokens, tokens < T, ROW, H, BLOCK_H)
    elif first < T:
        chunks = tl.arange(0, BLOCK_C)
        ends = tl.load(query_starts_ptr + 1 + chunks, mask=chunks < num_chunks, other=2147483647)
        chunk = tl.minimum(tl.sum((ends <= first - B).to(tl.int32), 0), num_chunks - 1)
        begin, end = tl.load(query_starts_ptr + chunk), tl.load(query_starts_ptr + chunk + 1)
        if (first >= B + begin) & (first + SPAN <= tl.minimum(B + end, T)):
            ahead = first - B - begin
            slot = tl.load(chunk_slots_ptr + chunk).to(tl.int64)
            started = (slot >= 0) & (slot < S) & (tl.load(chunk_starts_ptr + chunk) > 0)
            rows = tl.arange(0, BLOCK_T)
            tokens = first.to(tl.int64) + rows * LENGTH
            x_ptrs = x_ptr + tokens[:, None] * N + columns[None, :]
            qkv_ptrs = qkv_ptr + tokens[:, None] * C + columns[None, :]
            tails_ptrs = tails_ptr + slot * ((W - 1) * C) + rows[:, None] * 0 + columns[None, :]
            inputs = nothing()
            for tap in tl.static_range(W - 1):
                back = W - 1 - tap
                behind = (rows > 0) | (ahead >= back)
                x = tl.load(x_ptrs - back * N, mask=behind[:, None] & own[None, :], other=0.0)
                is_tail = (started & (rows == 0) & (ahead < back))[:, None]
                tail = tl.load(tails_ptrs + (tap + ahead) * C, mask=is_tail & own[None, :], other=0.0)
                inputs += (tl.where(is_tail, tail, x).to(tl.float32),)
            mask = (rows[:, None] >= 0) & own[None, :]
            if head >= 2 * K:
                _walk(x_ptrs, qkv_ptrs, mask, inputs, taps, 1.0, False, N, C, W, LENGTH)
            else:
                scale = tl.where(head < K, D**-0.5, 1.0)
                _walk(x_ptrs, qkv_ptrs, mask, inputs, taps, scale, True, N, C, W, LENGTH)
        else:
            for step in range(LENGTH):
                follow_tokens(
                    x_ptr, tails_ptr, slots_ptr, lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr,
                    qkv_ptr, first + step * BLOCK_T, columns, own, taps, head, T, B, S, num_chunks,
                    K, C, D, N, W, BLOCK_T, BLOCK_C,
                )  # fmt: skip
