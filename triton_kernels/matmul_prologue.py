"""The product that makes q, k, v of many tokens, on Hopper, with attention's prologue at its end: head norms, rotary,
and the write of K and V into the cache. q, k, v rows never go through memory.

A tile is as wide as two heads, so that a warp group has heads whole: half a head's numbers and the other half, which
turn together, are in the same threads. Sums are not rounded before they are normed and turned.

Shape suffixes: T tokens, K reduced size, N = q heads + 2 kv heads times head size, H q heads, D head size, P positions;
caches are of one layer, [page, kv head, token of the page, D].
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tercet.triton_kernels.attention_prologue import attention_prologue_reference, check_prologue
from tercet.triton_kernels.checks import check_contiguous, check_dtype, check_same, check_shape
from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.matmul import matmul_reference
from tercet.triton_kernels.matmul_hopper import load_stages, make_ring, multiply_stages, tile_of
from tercet.triton_kernels.matmul_launch import can_use_tma
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.scaled_weight import Weight, check_weight
from tercet.triton_kernels.tiles import cdiv, hopper_descriptor
from tercet.triton_kernels.widen import plain

_HEAD_DIM = 128
_BLOCK_M, _BLOCK_K, _STAGES = 128, 64, 4
_GROUP = 64
"""Tiles of rows that share weights in the L2 cache. With a number of programs that it divides, a program keeps to one
tile of rows, and loads its cosines and sines once."""
_BUSY = 0.8
"""Where fewer programs would have a tile, products have better tiles than these."""
_SIZES = ["M", "P", "num_cells", "first_row"]


@gluon.jit
def _norm_and_turn(left, right, norm, cos, sin, eps, NORM: gl.constexpr):
    """A head of some tokens in two halves, normed and turned by their position: as `norm_and_turn`, in Gluon."""
    HALF: gl.constexpr = left.shape[1]
    if NORM:
        columns: gl.constexpr = gl.SliceLayout(0, left.type.layout)
        inverse = gl.rsqrt(gl.sum(left * left + right * right, 1) / (2 * HALF) + eps)[:, None]
        left *= inverse * norm.slice(0, HALF).load(columns)[None, :]
        right *= inverse * norm.slice(HALF, HALF).load(columns)[None, :]
    return left * cos - right * sin, right * cos + left * sin


@gluon.jit
def _write(staging, cache_ptr, cells, kv_head, num_cells, KV_HEADS: gl.constexpr, PAGE: gl.constexpr):
    """A kv head of some tokens from `staging` to their cells."""
    HALF: gl.constexpr = staging.shape[2]
    LAYOUT: gl.constexpr = cells.type.layout.parent
    columns = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    kept = ((cells >= 0) & (cells < num_cells))[:, None]
    places = ((cells // PAGE * KV_HEADS + kv_head) * PAGE + cells % PAGE) * (2 * HALF)
    ptrs = cache_ptr + places[:, None] + columns[None, :]
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    gl.store(ptrs, staging.index(0).load(LAYOUT).to(dtype), mask=kept)
    gl.store(ptrs + HALF, staging.index(1).load(LAYOUT).to(dtype), mask=kept)


@gluon.jit
def _finish(
    y, row, head, q_desc, staging, norms, cos, sin, cells, eps, k_cache_ptr, v_cache_ptr, num_cells,
    H: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """One head of a warp group's tokens, from sums to where it belongs."""
    HALF: gl.constexpr = y.shape[1] // 2
    LAYOUT: gl.constexpr = cos.type.layout
    left, right = gl.split(gl.permute(gl.reshape(y, (y.shape[0], 2, HALF)), (0, 2, 1)))
    left = gl.convert_layout(left, LAYOUT)
    right = gl.convert_layout(right, LAYOUT)
    if head < H + KV_HEADS:
        left, right = _norm_and_turn(left, right, norms.index((head >= H).to(gl.int32)), cos, sin, eps, NORM)
    tma.store_wait(0)
    staging.index(0).store(left.to(q_desc.dtype))
    staging.index(1).store(right.to(q_desc.dtype))
    if head < H:
        fence_async_shared()
        tma.async_copy_shared_to_global(q_desc, [row, head * (2 * HALF)], staging.index(0))
        tma.async_copy_shared_to_global(q_desc, [row, head * (2 * HALF) + HALF], staging.index(1))
    elif head < H + 2 * KV_HEADS:  # of an odd number of heads the last tile has only one
        cache_ptr = v_cache_ptr
        if head < H + KV_HEADS:
            cache_ptr = k_cache_ptr
        _write(staging, cache_ptr, cells, (head - H) % KV_HEADS, num_cells, KV_HEADS, PAGE)


@gluon.jit
def _project(
    x_ring, w_ring, free, full, q_desc, staging, norms, positions_ptr, cells_ptr, cos_sin_ptr, eps, k_cache_ptr,
    v_cache_ptr, M, P, num_cells, num_m, num_k, H: gl.constexpr, KV_HEADS: gl.constexpr,
    PAGE: gl.constexpr, NORM: gl.constexpr, WHICH: gl.constexpr, GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One warp group: half of each tile's rows, from the first product to the store."""
    ROWS: gl.constexpr = x_ring.shape[1] // 2
    D: gl.constexpr = w_ring.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    WRITE_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    num_pairs: gl.constexpr = (H + 2 * KV_HEADS + 1) // 2
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    write_rows = gl.arange(0, ROWS, gl.SliceLayout(1, WRITE_LAYOUT))
    columns = gl.arange(0, D // 2, gl.SliceLayout(0, LAYOUT))
    count = 0
    previous = -1
    cos = gl.zeros((ROWS, D // 2), gl.float32, LAYOUT)
    sin = gl.zeros((ROWS, D // 2), gl.float32, LAYOUT)
    cells = gl.zeros((ROWS,), gl.int64, gl.SliceLayout(1, WRITE_LAYOUT))
    for tile in range(gl.program_id(0), num_m * num_pairs, NUM_PROGRAMS):
        tile_m, pair = tile_of(tile, num_m, num_pairs, GROUP_M)
        head = pair * 2
        row = tile_m * (2 * ROWS) + WHICH * ROWS
        if tile_m != previous:  # what the ends of its tiles need comes while products run
            previous = tile_m
            inside = row + rows < M
            positions = gl.load(positions_ptr + row + rows, mask=inside, other=0)
            positions = gl.minimum(gl.maximum(positions, 0), P - 1).to(gl.int64)
            turn_ptrs = cos_sin_ptr + positions[:, None] * D + columns[None, :]
            cos = gl.load(turn_ptrs, mask=inside[:, None], other=0.0)
            sin = gl.load(turn_ptrs + D // 2, mask=inside[:, None], other=0.0)
            cells = gl.load(cells_ptr + row + write_rows, mask=row + write_rows < M, other=-1)
        acc, count = multiply_stages(x_ring, w_ring, free, full, count, num_k, WHICH)
        first, second = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, D)), (0, 2, 1)))
        _finish(
            first, row, head, q_desc, staging, norms, cos, sin, cells, eps, k_cache_ptr, v_cache_ptr, num_cells,
            H, KV_HEADS, PAGE, NORM,
        )  # fmt: skip
        _finish(
            second, row, head + 1, q_desc, staging, norms, cos, sin, cells, eps, k_cache_ptr, v_cache_ptr, num_cells,
            H, KV_HEADS, PAGE, NORM,
        )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def matmul_prologue_kernel(
    x_desc, w_desc, q_desc, positions_ptr, cells_ptr, cos_sin_ptr, q_norm_ptr, k_norm_ptr, eps, k_cache_ptr,
    v_cache_ptr, rows_ptr, M, P, num_cells, first_row,
    H: gl.constexpr, KV_HEADS: gl.constexpr, K: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, NUM_PROGRAMS: gl.constexpr, NORM: gl.constexpr, HAS_ROWS: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): one program a multiprocessor walks over tiles of tokens and two heads."""
    if HAS_ROWS:  # how many there are in truth
        M = gl.minimum(M, gl.load(rows_ptr) - first_row)
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    D: gl.constexpr = w_desc.block_shape[0] // 2
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    num_m = gl.cdiv(M, BLOCK_M)
    num_n: gl.constexpr = (H + 2 * KV_HEADS + 1) // 2
    num_k: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    x_ring, w_ring, free, full = make_ring(x_desc, w_desc, STAGES)
    staging0 = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_M // 2, D // 2], q_desc.layout)
    staging1 = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_M // 2, D // 2], q_desc.layout)
    norms = gl.allocate_shared_memory(gl.float32, [2, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if NORM:
        columns = gl.arange(0, D, gl.BlockedLayout([1], [32], [4], [0]))
        norms.index(0).store(gl.load(q_norm_ptr + columns).to(gl.float32))
        norms.index(1).store(gl.load(k_norm_ptr + columns).to(gl.float32))
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    let_next_start(True)
    wait_for_previous(True)
    gl.warp_specialize(
        [
            (
                _project,
                (x_ring, w_ring, free, full, q_desc, staging0, norms, positions_ptr, cells_ptr, cos_sin_ptr, eps,
                 k_cache_ptr, v_cache_ptr, M, P, num_cells, num_m, num_k,
                 H, KV_HEADS, PAGE, NORM, zero, GROUP_M, NUM_PROGRAMS),
            ),
            (
                _project,
                (x_ring, w_ring, free, full, q_desc, staging1, norms, positions_ptr, cells_ptr, cos_sin_ptr, eps,
                 k_cache_ptr, v_cache_ptr, M, P, num_cells, num_m, num_k,
                 H, KV_HEADS, PAGE, NORM, one, GROUP_M, NUM_PROGRAMS),
            ),
            (load_stages, (x_desc, w_desc, x_ring, w_ring, free, full, num_m, num_n, num_k, GROUP_M, NUM_PROGRAMS)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def can_fuse_prologue(num_tokens: int, w_NK: Weight, k_cache: Tensor, rotary_dim: int) -> bool:
    """Whether `matmul_prologue` knows these shapes, and is the better way for so many tokens."""
    if not (is_hopper(w_NK.device) and w_NK.dtype.itemsize == 2 and k_cache.shape[3] == _HEAD_DIM == rotary_dim):
        return False
    programs = _num_programs(w_NK.device)
    tiles = cdiv(num_tokens, _BLOCK_M) * cdiv(len(w_NK), 2 * _HEAD_DIM)
    fits = can_use_tma(w_NK) if isinstance(w_NK, Tensor) else w_NK.shape[1] % 8 == 0
    return fits and 0 < _BUSY * programs * cdiv(tiles, programs) <= tiles


def _num_programs(device: torch.device) -> int:
    """At most one a multiprocessor."""
    most = multiprocessors(device)
    return most // _GROUP * _GROUP or most


def matmul_prologue(
    x_TK: Tensor,
    w_NK: Weight,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    cos_sin_PD: Tensor,
    q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    q_THD: Tensor,
    rows: Tensor | None = None,
    first_row: int = 0,
) -> None:
    """Into `q_THD` [T, H, D] the queries of [T, K] x [N, K], normed and turned; K and V go into the caches at
    `kv_slots_T`.

    For what `can_fuse_prologue` says. fp32 inside, rounded once, and once more for a cache in FP8; graph-safe. `rows`:
    how many rows there are in truth, int32 [1] on the device, counted from `first_row` rows ahead of these; those
    behind may be left as they are.
    """
    check_shape("q", q_THD, None, None, _HEAD_DIM)
    check_shape("k_cache", k_cache, None, None, None, _HEAD_DIM)
    T, num_heads, head_dim = q_THD.shape
    num_pages, num_kv_heads, page_size, _ = k_cache.shape
    check_dtype("x", x_TK, torch.bfloat16, torch.float16)
    check_shape("x", x_TK, T, None)
    check_contiguous("x", x_TK)
    check_weight("w", w_NK, x_TK, (num_heads + 2 * num_kv_heads) * head_dim, x_TK.shape[1])
    check_same("q", q_THD, x_TK)
    check_shape("cos_sin", cos_sin_PD, None, _HEAD_DIM)
    check_prologue(x_TK, positions_T, kv_slots_T, cos_sin_PD, q_norm_weight_D, k_norm_weight_D, k_cache, v_cache, rows)
    if not T:
        return
    num_programs = _num_programs(x_TK.device)
    matmul_prologue_kernel[(num_programs,)](
        hopper_descriptor(x_TK, _BLOCK_M, _BLOCK_K), hopper_descriptor(plain(w_NK), 2 * head_dim, _BLOCK_K),
        hopper_descriptor(q_THD.view(T, -1), _BLOCK_M // 2, head_dim // 2), positions_T, kv_slots_T, cos_sin_PD,
        x_TK if q_norm_weight_D is None else q_norm_weight_D, x_TK if k_norm_weight_D is None else k_norm_weight_D, eps,
        k_cache, v_cache, positions_T if rows is None else rows, T, cos_sin_PD.shape[0], num_pages * page_size,
        first_row, H=num_heads, KV_HEADS=num_kv_heads, K=x_TK.shape[1], PAGE=page_size, STAGES=_STAGES, GROUP_M=_GROUP,
        NUM_PROGRAMS=num_programs, NORM=q_norm_weight_D is not None, HAS_ROWS=rows is not None, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip


def matmul_prologue_reference(
    x_TK: Tensor,
    w_NK: Weight,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    cos_sin_PD: Tensor,
    q_norm_weight_D: Tensor | None,
    k_norm_weight_D: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    q_THD: Tensor,
) -> None:
    """The same, step by step."""
    q_THD.copy_(
        attention_prologue_reference(
            matmul_reference(x_TK, w_NK), positions_T, kv_slots_T, cos_sin_PD, q_norm_weight_D, k_norm_weight_D, eps,
            k_cache, v_cache, q_THD.shape[1],
        )
    )  # fmt: skip
