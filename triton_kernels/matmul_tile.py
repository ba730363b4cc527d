"""Products for many rows, output tile by output tile, K in plain order: a pointer kernel for every card, and two
kernels that load through Hopper's tensor memory accelerator (TMA), for a wave of tiles and for many waves.

With HAS_ROWS the device says how many rows there are in truth: a graph is as large as its largest step, and tiles of
nothing but padding are left out.

Shape suffixes: M rows, K reduced size, N output size.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.matmul_draw import draw_tile
from tercet.triton_kernels.matmul_epilogue import ADD, GATE, SAMPLE, begin_draw, finish_tile, gate_pairs, turn_ring
from tercet.triton_kernels.overlap import let_next_start, prefetch, wait_for_previous


@triton.jit
def _tile_of(index, num_m, num_n, GROUP_M: tl.constexpr):
    """Tiles in groups of GROUP_M tile rows, so that tiles in flight together share what the L2 cache holds."""
    group = index // (GROUP_M * num_n)
    first_m = group * GROUP_M
    size_m = tl.minimum(num_m - first_m, GROUP_M)
    within = index % (GROUP_M * num_n)
    return first_m + within % size_m, within // size_m


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def tile_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows_ptr, draw, M, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / BLOCK_M) * ceil(N / BLOCK_N),): one program owns one output tile."""
    num_m = tl.cdiv(M, BLOCK_M)
    tile_m, tile_n = _tile_of(tl.program_id(0), num_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    start_n = tile_n * BLOCK_N
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    w_rows = tl.arange(0, BLOCK_N)
    if N % BLOCK_N:
        w_rows = tl.minimum(w_rows, N - 1 - start_n)
    columns = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (rows % M).to(tl.int64)[:, None] * K + columns[None, :]
    w_ptrs = w_ptr + start_n.to(tl.int64) * K + w_rows[None, :] * K + columns[:, None]
    facts = begin_draw(draw, rows, M, EPILOGUE)
    let_next_start(PDL)
    wait_for_previous(PDL)
    turn_ring(draw, EPILOGUE)
    if HAS_ROWS and tile_m * BLOCK_M >= tl.load(rows_ptr):
        return
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K:
            x = tl.load(x_ptrs + k, mask=(columns < K - k)[None, :], other=0.0)
            w = tl.load(w_ptrs + k, mask=(columns < K - k)[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + k)
            w = tl.load(w_ptrs + k)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    finish_tile(acc, facts, rows, start_n, tile_n, bias_ptr, out_ptr, draw, M, N, BLOCK_M, BLOCK_N, EPILOGUE, HAS_BIAS)


@triton.jit
def _finish_row_of_tiles(
    acc, right, facts, rows, start_n, tile, bias_ptr, out_ptr, draw, M, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EXTRA: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The end of an accumulator, and with EXTRA of the one to its right."""
    finish_tile(acc, facts, rows, start_n, tile, bias_ptr, out_ptr, draw, M, N, BLOCK_M, BLOCK_N, EPILOGUE, HAS_BIAS)
    if EXTRA:
        finish_tile(
            right, facts, rows, start_n + BLOCK_N, tile + 1, bias_ptr, out_ptr, draw, M,
            N, BLOCK_M, BLOCK_N // 2, EPILOGUE, HAS_BIAS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def wave_kernel(
    x_desc, half_x_desc, w_desc, half_w_desc, w_ptr, bias_ptr, out_ptr, rows_ptr, draw, M, N: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TALL: tl.constexpr,
    EXTRA: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr,
    PREFETCH: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / height) * ceil(N / width) * PARTS,): one program owns one output tile, with PARTS the sum of its
    part of K, in an output of its part's own; TMA clips what lies outside.

    width = BLOCK_N, or with EXTRA BLOCK_N * 3 / 2 in two accumulators: the size that deals N out to all multiprocessors
    is seldom a power of two. With TALL height = BLOCK_M * 3 / 2 in the same way. Programs on the same weights are
    neighbours.
    """
    height: tl.constexpr = BLOCK_M * 3 // 2 if TALL else BLOCK_M
    width: tl.constexpr = BLOCK_N * 3 // 2 if EXTRA else BLOCK_N
    num_m = tl.cdiv(M, height)
    tile_m = tl.program_id(0) % num_m
    part = tl.program_id(0) // num_m % PARTS
    tile_n = tl.program_id(0) // num_m // PARTS
    part_k: tl.constexpr = K // PARTS
    start_m, start_n = tile_m * height, tile_n * width
    if PREFETCH > 0 and tile_m == 0:
        start = w_ptr + start_n.to(tl.int64) * K + part * part_k
        prefetch(start, BLOCK_N, K, PREFETCH)
        if EXTRA:
            prefetch(start + BLOCK_N * K, BLOCK_N // 2, K, PREFETCH)
    rows = start_m + tl.arange(0, BLOCK_M)
    rows_below = start_m + BLOCK_M + tl.arange(0, BLOCK_M // 2)
    facts = begin_draw(draw, rows, M, EPILOGUE)
    facts_below = begin_draw(draw, rows_below, M, EPILOGUE)
    let_next_start(PDL)
    wait_for_previous(PDL)
    turn_ring(draw, EPILOGUE)
    if HAS_ROWS and start_m >= tl.load(rows_ptr):
        return
    if PARTS > 1:
        out_ptr += part.to(tl.int64) * M * N
    # What is not asked for is never used.
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    right = tl.zeros((BLOCK_M, BLOCK_N // 2), tl.float32)
    below = tl.zeros((BLOCK_M // 2, BLOCK_N), tl.float32)
    corner = tl.zeros((BLOCK_M // 2, BLOCK_N // 2), tl.float32)
    for step in range((part_k + BLOCK_K - 1) // BLOCK_K):
        k = part * part_k + step * BLOCK_K
        x = x_desc.load([start_m, k])
        w = w_desc.load([start_n, k]).T
        acc = tl.dot(x, w, acc)
        if TALL:
            more_x = half_x_desc.load([start_m + BLOCK_M, k])
            below = tl.dot(more_x, w, below)
        if EXTRA:
            more_w = half_w_desc.load([start_n + BLOCK_N, k]).T
            right = tl.dot(x, more_w, right)
            if TALL:
                corner = tl.dot(more_x, more_w, corner)
    first_tile = tile_n * 2 if EXTRA else tile_n
    _finish_row_of_tiles(
        acc, right, facts, rows, start_n, first_tile, bias_ptr, out_ptr, draw, M,
        N, BLOCK_M, BLOCK_N, EXTRA, EPILOGUE, HAS_BIAS,
    )  # fmt: skip
    if TALL:
        _finish_row_of_tiles(
            below, corner, facts_below, rows_below, start_n, first_tile, bias_ptr, out_ptr, draw, M,
            N, BLOCK_M // 2, BLOCK_N, EXTRA, EPILOGUE, HAS_BIAS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def persistent_kernel(
    x_desc, w_desc, bias_ptr, out_desc, rows_ptr, draw, M, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,), or fewer if there are fewer tiles: programs walk over them; TMA clips what lies outside."""
    if HAS_ROWS:
        M = tl.minimum(M, tl.load(rows_ptr))
    num_m = tl.cdiv(M, BLOCK_M)
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    let_next_start(PDL)
    wait_for_previous(PDL)
    turn_ring(draw, EPILOGUE)
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS, flatten=True):
        tile_m, tile_n = _tile_of(tile, num_m, num_n, GROUP_M)
        start_m, start_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range((K + BLOCK_K - 1) // BLOCK_K):
            x = x_desc.load([start_m, k * BLOCK_K])
            w = w_desc.load([start_n, k * BLOCK_K])
            acc = tl.dot(x, w.T, acc)
        if HAS_BIAS:
            columns = start_n + tl.arange(0, BLOCK_N)
            acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        # By halves: a draw takes fewer registers, a store less staging memory, which leaves room for a stage of loads.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        if EPILOGUE == SAMPLE:
            rows = start_m + tl.arange(0, BLOCK_M)
            facts = begin_draw(draw, rows, M, EPILOGUE)
            draw_tile(left, facts, rows, start_n, 2 * tile_n, draw, M, BLOCK_N // 2, x_desc.dtype)
            draw_tile(right, facts, rows, start_n + BLOCK_N // 2, 2 * tile_n + 1, draw, M, BLOCK_N // 2, x_desc.dtype)
        elif EPILOGUE == GATE:
            y = gate_pairs(acc, BLOCK_M, BLOCK_N)
            out_desc.store([start_m, start_n // 2], y.to(out_desc.dtype))
        else:
            if EPILOGUE == ADD:
                left += out_desc.load([start_m, start_n]).to(tl.float32)
            out_desc.store([start_m, start_n], left.to(out_desc.dtype))
            if EPILOGUE == ADD:
                right += out_desc.load([start_m, start_n + BLOCK_N // 2]).to(tl.float32)
            out_desc.store([start_m, start_n + BLOCK_N // 2], right.to(out_desc.dtype))
