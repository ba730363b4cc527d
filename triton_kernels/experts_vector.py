"""Products of few pairs of a token and an expert, each by itself: a row times its expert's weights, no matrix units.

That is for pairs of which hardly any two have the same expert. Sums have an order of their own, that of
`matmul_vector.py` and `matmul_vector_scaled.py`: not for deterministic mode.

The first product waits for who was chosen, and lets the next kernel start only then: so the second one, which is next,
knows who it was and loads its first weights before it waits for its rows.

Shape suffixes: K reduced size, N output columns of one expert.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tercet.triton_kernels.clamped_gate import gate_columns, load_own
from tercet.triton_kernels.matmul_epilogue import CLAMPED, SQUARED, STORE, is_gate
from tercet.triton_kernels.matmul_vector_scaled import (
    begin_vectors,
    end_vectors,
    layout_of_vectors,
    rows_from,
    store_vector,
)
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.relu_squared import squared


@triton.jit
def _who(
    experts_ptr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EPILOGUE: tl.constexpr, PDL: tl.constexpr
):
    """A program's pair, the first of its outputs, the pair's expert, and whether there is such a one. Of the first
    product the kernel ahead may be that which chooses."""
    if EPILOGUE != STORE:
        wait_for_previous(PDL)
        let_next_start(PDL)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pair = tl.program_id(0) // num_n
    expert = tl.load(experts_ptr + pair)
    return pair, tl.program_id(0) % num_n * BLOCK_N, expert, (expert >= 0) & (expert < ROWS // N)


@triton.jit
def _await_rows(EPILOGUE: tl.constexpr, PDL: tl.constexpr):
    """Of the second product."""
    if EPILOGUE == STORE:
        let_next_start(PDL)
        wait_for_previous(PDL)


@triton.jit
def experts_vector_kernel(
    x_ptr, w_ptr, experts_ptr, bias_ptr, limit, slope, out_ptr, PER_ROW: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (pairs * ceil(N / BLOCK_N),): one program owns BLOCK_N outputs of a pair, whose row is pair // PER_ROW.
    ROWS: of all experts' weights. No expert has a number beyond them, or below 0."""
    pair, start_n, expert, there = _who(experts_ptr, N, ROWS, BLOCK_N, EPILOGUE, PDL)
    rows = tl.minimum(start_n + tl.arange(0, BLOCK_N), N - 1)
    columns = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + (expert.to(tl.int64) * N + rows)[:, None] * K + columns[None, :]
    w = tl.load(w_ptrs, mask=(there & (columns < K))[None, :], other=0.0)
    if EPILOGUE == CLAMPED:
        own = load_own(bias_ptr, tl.where(there, expert, 0), start_n + tl.arange(0, BLOCK_N), N)
    _await_rows(EPILOGUE, PDL)
    x_ptrs = x_ptr + (pair // PER_ROW).to(tl.int64) * K + columns
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_ptrs + k, mask=columns < K - k, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if k + BLOCK_K < K:
            w = tl.load(w_ptrs + k + BLOCK_K, mask=(there & (columns < K - k - BLOCK_K))[None, :], other=0.0)
    y = tl.sum(acc, 1)[None, :]
    width: tl.constexpr = N // 2 if is_gate(EPILOGUE) else N
    if EPILOGUE == CLAMPED:
        y += own.to(tl.float32)[None, :]
    if EPILOGUE == SQUARED:
        y = squared(y)
    elif EPILOGUE != STORE:
        y = gate_columns(y, limit, slope, 1, BLOCK_N, EPILOGUE)
        start_n //= 2
    places = start_n + tl.arange(0, y.shape[1])[None, :]
    tl.store(
        out_ptr + pair.to(tl.int64) * width + places, y.to(out_ptr.dtype.element_ty), mask=there & (places < width)
    )


@gluon.jit
def experts_vector_scaled_kernel(
    x_ptr, w_ptr, scales_ptr, experts_ptr, bias_ptr, limit, slope, out_ptr, PER_ROW: gl.constexpr, N: gl.constexpr,
    K: gl.constexpr, X: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, FOUR: gl.constexpr,
    BLOCK_N: gl.constexpr, EPILOGUE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The same with weights of eight bits or four. Of their K columns x has the first X."""
    WIDTH: gl.constexpr = 32 if FOUR else 16
    L: gl.constexpr = layout_of_vectors(BLOCK_N, gl.num_warps())
    pair, start_n, expert, there = _who(experts_ptr, N, ROWS, BLOCK_N, EPILOGUE, PDL)
    own_rows = rows_from(start_n, N, L)
    expert = gl.where(there, expert, 0)
    rows = expert * N + own_rows
    num_units = gl.where(there, K // WIDTH, 0)
    w_ptrs, scale_ptrs, words, scales = begin_vectors(w_ptr, scales_ptr, rows, num_units, ROWS, K, GROUP, WIDTH, L)
    if EPILOGUE == CLAMPED:
        own = load_own(bias_ptr, expert, own_rows, N)
    _await_rows(EPILOGUE, PDL)
    x_ptr += (pair // PER_ROW).to(gl.int64) * X
    y_N = end_vectors(x_ptr, w_ptrs, scale_ptrs, words, scales, num_units, ROWS, K, X, GROUP, FOUR, WIDTH, L)
    if EPILOGUE == CLAMPED:
        y_N += gl.convert_layout(own, y_N.type.layout).to(gl.float32)
    out_ptr += pair.to(gl.int64) * (N if EPILOGUE == STORE else N // 2)
    store_vector(y_N, limit, slope, start_n, gl.where(there, N, 0), out_ptr, EPILOGUE)
