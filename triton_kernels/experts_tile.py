"""Products of tokens with their experts' weights, a program to each output tile, on every card. K in plain order.

Shape suffixes: M places of a tile, K reduced size, N output columns of one expert.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.clamped_gate import gate_columns, load_own
from tercet.triton_kernels.matmul_epilogue import CLAMPED, SQUARED, STORE, is_gate
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.relu_squared import squared
from tercet.triton_kernels.widen import awaited, dealt_columns, load_wide


@triton.jit
def store_tile(
    acc, pairs, expert, start_n, bias_ptr, limit, slope, out_ptr,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = N // 2 if is_gate(EPILOGUE) else N
    columns = start_n + tl.arange(0, BLOCK_N)
    if EPILOGUE == CLAMPED:
        acc += load_own(bias_ptr, expert, columns, N).to(tl.float32)[None, :]
    if EPILOGUE == STORE:
        y = acc
    elif EPILOGUE == SQUARED:
        y = squared(acc)
    else:
        y = gate_columns(acc, limit, slope, BLOCK_M, BLOCK_N, EPILOGUE)
        columns = start_n // 2 + tl.arange(0, BLOCK_N // 2)
    pointers = out_ptr + pairs.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(pointers, y.to(out_ptr.dtype.element_ty), mask=(pairs >= 0)[:, None] & (columns < width)[None, :])


@triton.jit
def experts_kernel(
    x_ptr, w_ptr, pairs_ptr, tile_experts_ptr, bias_ptr, limit, slope, out_ptr, PER_ROW: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of pairs * ceil(N / BLOCK_N),): one program owns one output tile of one expert, if there is one."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // num_n
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        start_n = tl.program_id(0) % num_n * BLOCK_N
        pairs = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        rows = tl.maximum(pairs, 0) // PER_ROW
        w_rows = tl.minimum(start_n + tl.arange(0, BLOCK_N), N - 1)
        columns = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
        w_ptrs = w_ptr + expert.to(tl.int64) * N * K + w_rows[None, :] * K + columns[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            if K % BLOCK_K:
                x = tl.load(x_ptrs + k, mask=(columns < K - k)[None, :], other=0.0)
                w = tl.load(w_ptrs + k, mask=(columns < K - k)[:, None], other=0.0)
            else:
                x = tl.load(x_ptrs + k)
                w = tl.load(w_ptrs + k)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        store_tile(acc, pairs, expert, start_n, bias_ptr, limit, slope, out_ptr, N, BLOCK_M, BLOCK_N, EPILOGUE)


@triton.jit
def scaled_experts_kernel(
    x_ptr, w_ptr, scales_ptr, pairs_ptr, tile_experts_ptr, bias_ptr, limit, slope, out_ptr, PER_ROW: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, X: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EPILOGUE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The same with weights of eight bits or four, which are the tall side (`matmul_scaled.py`). ROWS: of all experts'
    weights. BLOCK_K divides K, of which x has the first X columns."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    each: tl.constexpr = 8 if FOUR == 3 else 2 if FOUR else 1  # numbers in a byte, or of MXFP4 in a word
    tile = tl.program_id(0) // num_n
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        start_n = tl.program_id(0) % num_n * BLOCK_N
        pairs = tl.load(pairs_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        rows = tl.maximum(pairs, 0) // PER_ROW
        w_rows = expert * N + tl.minimum(start_n + tl.arange(0, BLOCK_N), N - 1)
        columns = dealt_columns(BLOCK_K, TOGETHER)
        x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * X + columns[:, None]
        w_ptrs = w_ptr + w_rows.to(tl.int64)[:, None] * (K // each) + tl.arange(0, BLOCK_K // each)[None, :]
        scale_ptrs = scales_ptr + w_rows
        acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = tl.load(x_ptrs + k, mask=(columns < X - k)[:, None], other=0.0) if X < K else tl.load(x_ptrs + k)
            w = tl.load(w_ptrs + k // each)
            wide = load_wide(w, scale_ptrs, k, ROWS, GROUP, FOUR, BLOCK_K, x.dtype, TOGETHER)
            acc_NM = awaited(tl.dot(wide, x, acc_NM))
        acc = tl.trans(acc_NM)
        store_tile(acc, pairs, expert, start_n, bias_ptr, limit, slope, out_ptr, N, BLOCK_M, BLOCK_N, EPILOGUE)
