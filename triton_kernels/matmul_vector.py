"""Products for one row: each program multiplies a few weight rows with the row and sums, no matrix units.

The order of the sum is the reduction tree's, not that of the matrix kernels: not for deterministic mode.

Shape suffixes: K reduced size, N output size.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.matmul_epilogue import begin_draw, finish_with, load_bias, load_residual, turn_ring
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous


@triton.jit
def vector_kernel(
    x_ptr, norm_ptr, eps, w_ptr, bias_ptr, out_ptr, draw, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(N / BLOCK_N),): one program owns BLOCK_N outputs. Its first weights load before it waits for x."""
    start_n = tl.program_id(0) * BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    if N % BLOCK_N:
        rows = tl.minimum(rows, N - 1 - start_n)
    columns = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + start_n.to(tl.int64) * K + rows[:, None] * K + columns[None, :]
    w = tl.load(w_ptrs, mask=(columns < K)[None, :], other=0.0) if BLOCK_K > K else tl.load(w_ptrs)
    if NORM:
        norm = tl.load(norm_ptr + columns, mask=columns < K, other=0.0)
    bias = load_bias(bias_ptr, start_n, N, BLOCK_N, HAS_BIAS)
    one = tl.arange(0, 1)
    facts = begin_draw(draw, one, 1, EPILOGUE)
    let_next_start(PDL)
    wait_for_previous(PDL)
    turn_ring(draw, EPILOGUE)
    residual = load_residual(out_ptr, one, start_n, 1, N, 1, BLOCK_N, EPILOGUE)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_ptr + k + columns, mask=columns < K - k, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= norm.to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if k + BLOCK_K < K:
            if NORM:
                norm = tl.load(norm_ptr + k + BLOCK_K + columns, mask=columns < K - k - BLOCK_K, other=0.0)
            w = tl.load(w_ptrs + k + BLOCK_K, mask=(columns < K - k - BLOCK_K)[None, :], other=0.0)
    y = tl.sum(acc, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    tile = tl.program_id(0)
    finish_with(y[None, :], bias, residual, facts, one, start_n, tile, out_ptr, draw, 1, N, 1, BLOCK_N, EPILOGUE)
