"""Products with weights of eight bits or four on Hopper: those go from shared memory to registers, where they become
the numbers that they stand for, and are the tall side of the matrix units.

K in plain order: a row's bits are those of every plain-order kernel with plain weights. For few rows on any card there
is `skinny_kernel`, too.

With FOUR, weights are of four bits, and zeros beside their scales (`packed` and `with_zeros` in scaled_weight.py).

Shape suffixes: M rows, K reduced size, N output size.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.matmul_epilogue import finish_tile, finish_with, load_bias, load_residual
from tercet.triton_kernels.overlap import let_next_start, prefetch, wait_for_previous
from tercet.triton_kernels.widen import awaited, load_wide, widen

_FEW = tl.constexpr(64)
"""Rows of a tile that has registers for the residual while products run."""


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def scaled_kernel(
    x_desc, w_desc, w_ptr, scales_ptr, bias_ptr, out_ptr, rows_ptr, M, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, FOUR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / BLOCK_M) * ceil(N / BLOCK_N) * PARTS,): one program owns one output tile, with PARTS the sum
    of its part of K, in an output of its part's own. GROUP columns share a scale; 64 divides it, or it is K.

    Programs on the same weights are neighbours.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    tile_m = tl.program_id(0) % num_m
    part = tl.program_id(0) // num_m % PARTS
    tile_n = tl.program_id(0) // num_m // PARTS
    part_k: tl.constexpr = K // PARTS
    start_m, start_n, start_k = tile_m * BLOCK_M, tile_n * BLOCK_N, part * part_k
    each: tl.constexpr = 2 if FOUR else 1  # numbers in a byte
    if PREFETCH > 0 and tile_m == 0:
        prefetch(w_ptr + start_n.to(tl.int64) * (K // each) + start_k // each, BLOCK_N, K // each, PREFETCH)
    rows = start_m + tl.arange(0, BLOCK_M)
    w_rows = tl.minimum(start_n + tl.arange(0, BLOCK_N), N - 1)
    scale_ptrs = scales_ptr + w_rows
    if GROUP == K and not FOUR:
        scales = tl.load(scale_ptrs)[:, None]
    few: tl.constexpr = BLOCK_M <= _FEW
    if few:
        bias = load_bias(bias_ptr, start_n, N, BLOCK_N, HAS_BIAS)
    let_next_start(PDL)
    wait_for_previous(PDL)
    if HAS_ROWS and start_m >= tl.load(rows_ptr):
        return
    if PARTS > 1:
        out_ptr += part.to(tl.int64) * M * N
    if few:
        residual = load_residual(out_ptr, rows, start_n, M, N, BLOCK_M, BLOCK_N, EPILOGUE)
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, part_k, BLOCK_K):
        x = x_desc.load([start_m, start_k + k])
        w = w_desc.load([start_n, (start_k + k) // each])
        if GROUP == K and not FOUR:
            wide = widen(w, scales, x.dtype, 1)
        else:
            wide = load_wide(w, scale_ptrs, start_k + k, N, GROUP, FOUR, BLOCK_K, x.dtype, 1)
        acc_NM = awaited(tl.dot(wide, x.T, acc_NM))
    acc = tl.trans(acc_NM)
    if few:
        finish_with(acc, bias, residual, rows, rows, start_n, tile_n, out_ptr, None, M, N, BLOCK_M, BLOCK_N, EPILOGUE)
    else:
        finish_tile(
            acc, rows, rows, start_n, tile_n, bias_ptr, out_ptr, None, M, N, BLOCK_M, BLOCK_N, EPILOGUE, HAS_BIAS
        )
