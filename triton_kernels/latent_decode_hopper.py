"""Decode attention to latents on Hopper: a warp that only loads, and a warp group that only computes, in Gluon.

As in `latent_decode.py`, whose splits these are. A program is all that a multiprocessor has room for: it takes split
after split, and while it computes its warp loads on, over the ends of splits too.

Shape suffixes: H heads, or those of all queries of a row, G of one program, L numbers of a latent, M pages of a slot.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tercet.triton_kernels.decode_work import DecodeWork
from tercet.triton_kernels.dispatch import is_hopper, multiprocessors
from tercet.triton_kernels.prefill_load import start_next
from tercet.triton_kernels.tiles import hopper_descriptor

_STAGES = 2
_AHEAD = gl.constexpr(2)
"""For how many splits' queries there is room."""
_TILE = gl.constexpr(64)
_PIECE = gl.constexpr(64)


@gluon.jit
def _load(
    copies, work,
    H: gl.constexpr, L: gl.constexpr, PAGE: gl.constexpr, BLOCKS: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The loading warp: a split's queries, then its cells, split after split."""
    q_desc, cache_desc, q_parts, q_behind, parts, behind, q_full, q_free, full, free = copies
    items_ptr, page_table_ptr, total, M, num_cells = work
    PIECES: gl.constexpr = L // _PIECE
    count = 0
    turn = 0
    for pair in range(gl.program_id(0), total, NUM_PROGRAMS):
        item_ptr = items_ptr + pair // BLOCKS * 8
        first = gl.load(item_ptr) * H + pair % BLOCKS * G
        begin = gl.load(item_ptr + 1)
        end = gl.load(item_ptr + 2)
        pages_ptr = page_table_ptr + gl.load(item_ptr + 3).to(gl.int64) * M
        place = turn % _AHEAD
        bar = q_full.index(place)
        mbarrier.wait(q_free.index(place), (turn // _AHEAD & 1) ^ 1)
        mbarrier.expect(bar, G * (L + _PIECE) * 2)
        for piece in gl.static_range(PIECES):
            tma.async_copy_global_to_shared(
                q_desc, [first, piece * _PIECE], bar, q_parts.index(place * PIECES + piece)
            )  # fmt: skip
        tma.async_copy_global_to_shared(q_desc, [first, L], bar, q_behind.index(place))
        for start in range(begin, end, _TILE):
            stage = count % STAGES
            page = gl.load(pages_ptr + start // PAGE)
            cell = gl.minimum(gl.maximum(page * PAGE + start % PAGE, 0), num_cells - _TILE)
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(bar, _TILE * (L + _PIECE) * 2)
            for piece in gl.static_range(PIECES):
                tma.async_copy_global_to_shared(
                    cache_desc, [cell, piece * _PIECE], bar, parts.index(stage * PIECES + piece)
                )  # fmt: skip
            tma.async_copy_global_to_shared(cache_desc, [cell, L], bar, behind.index(stage))
            count += 1
        turn += 1


@gluon.jit
def _clean(parts, stage, count, PIECES: gl.constexpr):
    """Cells behind the first `count` of a tile may hold anything, NaN too."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    cells = gl.arange(0, _TILE, gl.SliceLayout(1, LAYOUT))
    for piece in gl.static_range(PIECES):
        part = parts.index(stage * PIECES + piece)
        numbers = part.load(LAYOUT)
        part.store(gl.where((cells < count)[:, None], numbers, 0.0).to(parts.dtype))
    fence_async_shared()


@gluon.jit
def _attend(
    rings, work, outs, unit,
    H: gl.constexpr, L: gl.constexpr, TRIES: gl.constexpr, BLOCKS: gl.constexpr, G: gl.constexpr,
    STAGES: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The warp group: from a split's first scores to the store, split after split. A tile is the first factor of both
    products, as it lies and turned over; heads are columns. Scores are in units of log 2."""
    q_ring, q_behind, ring, parts, behind, weights_smem, q_full, q_free, full, free = rings
    items_ptr, total = work
    lengths_ptr, partial_ptr, stats_ptr, out_ptr = outs
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, G, 16])
    numbers = gl.arange(0, L, gl.SliceLayout(1, LAYOUT))
    cells = gl.arange(0, _TILE, gl.SliceLayout(1, LAYOUT))
    count = 0
    turn = 0
    for pair in range(gl.program_id(0), total, NUM_PROGRAMS):
        item = pair // BLOCKS
        item_ptr = items_ptr + item * 8
        row = gl.load(item_ptr)
        begin = gl.load(item_ptr + 1)
        end = gl.load(item_ptr + 2)
        num_splits = gl.load(item_ptr + 5)
        heads = pair % BLOCKS * G + gl.arange(0, G, gl.SliceLayout(0, LAYOUT))
        real = heads < H
        limits = heads * 0 + end
        if TRIES > 1:
            limits = gl.load(lengths_ptr + row * TRIES + heads // (H // TRIES), mask=real, other=0)
            limits = gl.minimum(limits, end)
        largest = gl.full((G,), float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
        weight = gl.zeros((G,), gl.float32, gl.SliceLayout(0, LAYOUT))
        acc = gl.zeros((L, G), gl.float32, LAYOUT)
        place = turn % _AHEAD
        mbarrier.wait(q_full.index(place), turn // _AHEAD & 1)
        q = q_ring.index(place).permute((1, 0))
        for start in range(begin, end, _TILE):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            tile = ring.index(stage)
            s = gl.zeros((_TILE, G), gl.float32, LAYOUT)
            s = warpgroup_mma(tile, q, s, is_async=True)
            s = warpgroup_mma(behind.index(stage), q_behind.index(place).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            if start + _TILE > end:
                _clean(parts, stage, end - start, L // _PIECE)
                s = gl.where((start + cells)[:, None] < limits[None, :], s, float("-inf"))
            elif TRIES > 1:
                s = gl.where((start + cells)[:, None] < limits[None, :], s, float("-inf"))
            new = gl.maximum(largest, gl.max(s, 0) * unit)
            finite = gl.where(new == float("-inf"), 0.0, new)
            weights = gl.exp2(s * unit - finite[None, :])
            shrink = gl.exp2(largest - finite)
            weights_smem.store(weights.to(parts.dtype))
            fence_async_shared()
            weight = weight * shrink + gl.sum(weights, 0)
            largest = new
            acc = acc * shrink[None, :]
            acc = warpgroup_mma(tile.permute((1, 0)), weights_smem, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(stage))
            count += 1
        mbarrier.arrive(q_free.index(place))
        turn += 1
        mask = (numbers < L)[:, None] & real[None, :]
        if num_splits == 1:
            # Those of several that are none have seen nothing.
            y = acc / gl.where(weight > 0, weight, 1.0)[None, :]
            places = row.to(gl.int64) * H + heads
            gl.store(out_ptr + places[None, :] * L + numbers[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            places = item.to(gl.int64) * H + heads
            gl.store(partial_ptr + places[None, :] * L + numbers[:, None], acc, mask=mask)
            gl.store(stats_ptr + places * 2, largest, mask=real)
            gl.store(stats_ptr + places * 2 + 1, weight, mask=real)


@gluon.jit(do_not_specialize=["M", "num_cells"], do_not_specialize_on_alignment=["M", "num_cells"])
def _latent_decode_kernel(
    q_desc, cache_desc, page_table_ptr, items_ptr, num_items_ptr, lengths_ptr, partial_ptr, stats_ptr, out_ptr, scale,
    M, num_cells,
    H: gl.constexpr, L: gl.constexpr, PAGE: gl.constexpr, TRIES: gl.constexpr, BLOCKS: gl.constexpr, G: gl.constexpr,
    STAGES: gl.constexpr, NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): each program takes every NUM_PROGRAMS-th pair of a split and a block of heads."""
    dtype: gl.constexpr = cache_desc.dtype
    PIECES: gl.constexpr = L // _PIECE
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * G, element_bitwidth=16, rank=2)
    q_parts = gl.allocate_shared_memory(dtype, [_AHEAD * PIECES, G, _PIECE], LAYOUT)
    q_behind = gl.allocate_shared_memory(dtype, [_AHEAD, G, _PIECE], LAYOUT)
    parts = gl.allocate_shared_memory(dtype, [STAGES * PIECES, _TILE, _PIECE], LAYOUT)
    behind = gl.allocate_shared_memory(dtype, [STAGES, _TILE, _PIECE], LAYOUT)
    weights_smem = gl.allocate_shared_memory(dtype, [_TILE, G], WEIGHTS)
    # Pieces side by side are laid out as one tile is.
    q_ring = q_parts._reinterpret(dtype, [_AHEAD, G, L], LAYOUT)
    ring = parts._reinterpret(dtype, [STAGES, _TILE, L], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [_AHEAD, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [_AHEAD, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for place in gl.static_range(_AHEAD):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(q_free.index(place), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    start_next(PDL)
    total = gl.load(num_items_ptr) * BLOCKS
    unit = scale * 1.4426950408889634
    copies = q_desc, cache_desc, q_parts, q_behind, parts, behind, q_full, q_free, full, free
    rings = q_ring, q_behind, ring, parts, behind, weights_smem, q_full, q_free, full, free
    tables = items_ptr, page_table_ptr, total, M, num_cells
    outs = lengths_ptr, partial_ptr, stats_ptr, out_ptr
    work = items_ptr, total
    gl.warp_specialize(
        [
            (_attend, (rings, work, outs, unit, H, L, TRIES, BLOCKS, G, STAGES, NUM_PROGRAMS)),
            (_load, (copies, tables, H, L, PAGE, BLOCKS, G, STAGES, NUM_PROGRAMS)),
        ],
        [1],
        [40],
    )  # fmt: skip


def can_use_hopper(cache: Tensor, rank: int) -> bool:
    """Whether this kernel knows such latents, and such a cache."""
    _, _, page_size, dim = cache.shape
    known = rank in (128, 256, 512) and dim - rank == int(_PIECE) and page_size % int(_TILE) == 0
    return known and cache.dtype in (torch.bfloat16, torch.float16) and is_hopper(cache.device)


def launch_splits(
    q_THD: Tensor, cache: Tensor, page_table_SM: Tensor, scale: float, work: DecodeWork, out_THL: Tensor, blocks: int,
    block_g: int,
) -> None:  # fmt: skip
    """All splits, by `blocks` of `block_g` heads; those of rows that have several are to be merged. Graph-safe."""
    _, H, D = q_THD.shape
    L, page_size = out_THL.shape[2], cache.shape[2]
    piece = int(_PIECE)
    num_programs = multiprocessors(cache.device)
    _latent_decode_kernel[(num_programs,)](
        hopper_descriptor(q_THD.view(-1, D), block_g, piece), hopper_descriptor(cache.view(-1, D), int(_TILE), piece),
        page_table_SM, work.items_I8, work.num_items_1, work.items_I8 if work.lengths_T is None else work.lengths_T,
        work.partial_IHD, work.stats_IH2, out_THL, scale, page_table_SM.shape[1], cache.shape[0] * page_size,
        H=work.tries * H, L=L, PAGE=page_size, TRIES=work.tries, BLOCKS=blocks, G=block_g, STAGES=_STAGES,
        NUM_PROGRAMS=num_programs, PDL=True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
