"""Products for up to 64 rows: the weights stream once, as the tall side of the matrix units; rows are the narrow side.

Two kernels: one sums K in plain order (a row's bits are those of every other plain-order kernel), one cuts K over the
warps of a program and adds the parts in a fixed order (more loads in flight, other bits).

Shape suffixes: M rows, K reduced size, N output size; S parts of K.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.matmul_epilogue import begin_draw, finish_with, load_bias, load_residual, turn_ring
from tercet.triton_kernels.overlap import let_next_start, prefetch, wait_for_previous
from tercet.triton_kernels.widen import dealt_columns, load_wide, widen


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def skinny_kernel(
    x_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, draw, M, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, FOUR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / BLOCK_M) * ceil(N / BLOCK_N) * PARTS,): one program owns BLOCK_N outputs of BLOCK_M rows, or with
    PARTS the sum of its part of K, in an output of its part's own. Plain K order.

    Programs on the same weights are neighbours. With a GROUP weights are in FP8 or FOUR bits, and so many columns share
    a scale.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    tile_m = tl.program_id(0) % num_m
    part = tl.program_id(0) // num_m % PARTS
    tile_n = tl.program_id(0) // num_m // PARTS
    part_k: tl.constexpr = K // PARTS
    start_n = tile_n * BLOCK_N
    w_rows = tl.arange(0, BLOCK_N)
    if N % BLOCK_N:
        w_rows = tl.minimum(w_rows, N - 1 - start_n)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    each: tl.constexpr = 2 if FOUR else 1  # numbers in what is read
    w_start = w_ptr + start_n.to(tl.int64) * (K // each) + part * part_k // each
    if PREFETCH > 0 and tile_m == 0:
        prefetch(w_start, BLOCK_N, K // each, PREFETCH)
    w_ptrs = w_start + w_rows[:, None] * (K // each) + tl.arange(0, BLOCK_K // each)[None, :]
    # In place of rows that are not there come the others once more: the last one again and again would be as slow as
    # the one part of the L2 cache that has it.
    together: tl.constexpr = 4 if FOUR else 2
    x_columns = dealt_columns(BLOCK_K, together) if GROUP > 0 else columns
    x_ptrs = x_ptr + part * part_k + (rows % M)[None, :] * K + x_columns[:, None]
    if PARTS > 1:
        out_ptr += part.to(tl.int64) * M * N
    scale_ptrs = scales_ptr + start_n + w_rows
    if GROUP == K and not FOUR:
        scales = tl.load(scale_ptrs)[:, None]
    bias = load_bias(bias_ptr, start_n, N, BLOCK_N, HAS_BIAS)
    facts = begin_draw(draw, rows, M, EPILOGUE)
    let_next_start(PDL)
    wait_for_previous(PDL)
    turn_ring(draw, EPILOGUE)
    residual = load_residual(out_ptr, rows, start_n, M, N, BLOCK_M, BLOCK_N, EPILOGUE)
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, part_k, BLOCK_K):
        if part_k % BLOCK_K:
            w = tl.load(w_ptrs + k, mask=(columns < part_k - k)[None, :], other=0.0)
            x = tl.load(x_ptrs + k, mask=(x_columns < part_k - k)[:, None], other=0.0)
        else:
            w = tl.load(w_ptrs + k // each)
            x = tl.load(x_ptrs + k)
        if GROUP == K and not FOUR:
            w = widen(w, scales, x.dtype, together)
        elif GROUP > 0:
            w = load_wide(w, scale_ptrs, part * part_k + k, N, GROUP, FOUR, BLOCK_K, x.dtype, together)
        acc_NM = tl.dot(w, x, acc_NM, input_precision=PRECISION)
    finish_with(
        tl.trans(acc_NM), bias, residual, facts, rows, start_n, tile_n, out_ptr, draw, M, N, BLOCK_M, BLOCK_N, EPILOGUE
    )


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def split_kernel(
    x_ptr, norm_ptr, eps, w_ptr, bias_ptr, out_ptr, draw, M, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / BLOCK_M) * ceil(N / BLOCK_N),): one program owns BLOCK_N outputs of BLOCK_M rows.

    Part s of SPLITS takes the s-th BLOCK_K columns of every SPLITS * BLOCK_K. With NORM the rows enter times the norm's
    weight, and the product is scaled by the rows' inverse RMS afterwards: x is read once.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    tile_m = tl.program_id(0) % num_m
    tile_n = tl.program_id(0) // num_m
    start_n = tile_n * BLOCK_N
    w_rows = tl.arange(0, BLOCK_N)
    if N % BLOCK_N:
        w_rows = tl.minimum(w_rows, N - 1 - start_n)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns_SK = tl.arange(0, SPLITS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    step: tl.constexpr = SPLITS * BLOCK_K
    w_start = w_ptr + start_n.to(tl.int64) * K
    if PREFETCH > 0 and tile_m == 0:
        prefetch(w_start, BLOCK_N, K, PREFETCH)
    w_ptrs = w_start + w_rows[None, :, None] * K + columns_SK[:, None, :]
    x_ptrs = x_ptr + (rows % M)[None, None, :] * K + columns_SK[:, :, None]
    if PREFETCH > 0:
        # Weights that are loaded whole are in shared memory before what follows: too late to let the next kernel start.
        let_next_start(PDL)
    if step >= K:
        # The whole tile at once, on its way before the wait.
        w = tl.load(w_ptrs, mask=(columns_SK < K)[:, None, :], other=0.0)
        if NORM:
            norm_SK = tl.load(norm_ptr + columns_SK, mask=columns_SK < K, other=0.0)
    bias = load_bias(bias_ptr, start_n, N, BLOCK_N, HAS_BIAS)
    facts = begin_draw(draw, rows, M, EPILOGUE)
    if PREFETCH == 0:
        let_next_start(PDL)
    wait_for_previous(PDL)
    turn_ring(draw, EPILOGUE)
    residual = load_residual(out_ptr, rows, start_n, M, N, BLOCK_M, BLOCK_N, EPILOGUE)
    acc_SNM = tl.zeros((SPLITS, BLOCK_N, BLOCK_M), tl.float32)
    squares_SM = tl.zeros((SPLITS, BLOCK_M), tl.float32)
    for k in range(0, K, step):
        inside_SK = columns_SK < K - k
        if step < K:
            w = tl.load(w_ptrs + k, mask=inside_SK[:, None, :], other=0.0) if K % step else tl.load(w_ptrs + k)
        x = tl.load(x_ptrs + k, mask=inside_SK[:, :, None], other=0.0) if K % step else tl.load(x_ptrs + k)
        if NORM:
            wide = x.to(tl.float32)
            squares_SM += tl.sum(wide * wide, 1)
            if step < K:
                norm_SK = tl.load(norm_ptr + k + columns_SK, mask=inside_SK, other=0.0)
            x = (wide * norm_SK.to(tl.float32)[:, :, None]).to(x.dtype)
        acc_SNM = tl.dot(w, x, acc_SNM, input_precision=PRECISION)
    acc_NM = tl.sum(acc_SNM, 0)
    if NORM:
        acc_NM *= tl.rsqrt(tl.sum(squares_SM, 0) / K + eps)[None, :]
    finish_with(
        tl.trans(acc_NM), bias, residual, facts, rows, start_n, tile_n, out_ptr, draw, M, N, BLOCK_M, BLOCK_N, EPILOGUE
    )
