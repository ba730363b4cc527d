"""Prefill attention to keys and values in their room, on Hopper: a warp that only loads, and warp groups that only
compute, in Gluon.

As in `prefill_hopper.py`, whose turns and softmax these are; but a key is longer than a value: behind what is made of a
latent, in the room, stand the numbers that turn, which all heads have in the cache. Queries and keys come in pieces of
64 numbers, and their scores are sums over pieces.

Shape suffixes: T prefill tokens, H heads, S numbers of a head's key that do not turn, V of its value, L of a latent, M
pages of a slot.
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

from tercet.triton_kernels.dispatch import multiprocessors
from tercet.triton_kernels.latent_room import ROOM_PAGE, Room
from tercet.triton_kernels.prefill_load import PIECE, RECORD, ROWS, num_turns, pair_of, start_next
from tercet.triton_kernels.prefill_softmax import hide, weigh
from tercet.triton_kernels.prefill_store import store_rows
from tercet.triton_kernels.prefill_work import PrefillWork
from tercet.triton_kernels.tiles import cdiv, hopper_descriptor

_STAGES = 2
_Q_PIECES = gl.constexpr(4)
"""Of each group's queries at most: the same memory is where its rows are put in order at the end."""


@gluon.jit
def _multiply(q_ring, k_ring, first_q, stage, PIECES: gl.constexpr):
    """Queries times a tile of keys, begun."""
    TILE: gl.constexpr = k_ring.shape[1]
    s = gl.zeros((ROWS, TILE), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16]))
    for piece in gl.static_range(PIECES):
        k = k_ring.index(stage * PIECES + piece).permute((1, 0))
        s = warpgroup_mma(q_ring.index(first_q + piece), k, s, is_async=True)
    return s


@gluon.jit
def _advance(
    rings, acc, p, largest, weight, unit, query, start, count, move, WHICH: gl.constexpr, HIDE: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Scores of tile `count` of the ring and values of the tile before it, together; then the softmax of the scores."""
    q_ring, k_ring, v_ring, _, _, _, k_full, k_free, v_full, v_free, turns = rings
    STAGES: gl.constexpr = v_ring.shape[0]
    stage = count % STAGES
    previous = (count - 1) % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    # Two groups take turns: one multiplies while the other is at its softmax. Of one, each turn is its own.
    mbarrier.wait(turns.index(WHICH), move & 1)
    s = _multiply(q_ring, k_ring, WHICH * _Q_PIECES, stage, PIECES)
    acc = warpgroup_mma(p, v_ring.index(previous), acc, is_async=True)
    mbarrier.arrive(turns.index((WHICH + 1) % turns.shape[0]))
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    if HIDE:
        s = hide(s, query, start, None, 0)
    weights, new, shrink = weigh(s, largest, unit, HIDE)
    weight = weight * shrink + gl.sum(weights, 1)
    # A branch between them keeps the compiler from moving the softmax behind the products' end.
    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    mbarrier.arrive(v_free.index(previous))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(weights.to(v_ring.dtype), p.type.layout)
    return acc, p, new, weight


@gluon.jit
def _attend(
    rings, tiles_ptr, out_ptr, unit, num_pairs,
    H: gl.constexpr, V: gl.constexpr, PIECES: gl.constexpr, WHICH: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One warp group: its share of each tile's queries, from the first scores to the store."""
    q_ring, k_ring, v_ring, staging, q_full, q_free, k_full, k_free, v_full, v_free, _turns = rings
    STAGES: gl.constexpr = v_ring.shape[0]
    TILE: gl.constexpr = v_ring.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    OFFSET: gl.constexpr = WHICH * ROWS
    count = 0
    move = 0
    for turn in range(num_turns(num_pairs, NUM_PROGRAMS)):
        pair = pair_of(turn, NUM_PROGRAMS)
        head = pair % H
        record_ptr = tiles_ptr + pair // H * RECORD
        first = gl.load(record_ptr) + OFFSET
        num_queries = gl.load(record_ptr + 1) - OFFSET
        query = gl.load(record_ptr + 2) + OFFSET
        last = gl.cdiv(gl.load(record_ptr + 4), TILE)
        # In tiles that every query of the group sees whole nothing is hidden.
        whole = gl.minimum(gl.maximum((query + 1) // TILE, 1), last)
        mbarrier.wait(q_full, turn & 1)
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        s = _multiply(q_ring, k_ring, WHICH * _Q_PIECES, stage, PIECES)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(stage))
        if query + 1 < TILE:
            s = hide(s, query, 0, None, 0)
        nothing = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        weights, largest, _ = weigh(s, nothing, unit, False)
        p = gl.convert_layout(weights.to(v_ring.dtype), WEIGHTS)
        weight = gl.sum(weights, 1)
        acc = gl.zeros((ROWS, V), gl.float32, SUMS)
        mbarrier.wait(v_full.index(stage), count // STAGES & 1)
        for tile in range(1, whole):
            count += 1
            acc, p, largest, weight = _advance(
                rings, acc, p, largest, weight, unit, query, tile * TILE, count, move, WHICH, False, PIECES
            )
            move += 1
        for tile in range(whole, last):
            count += 1
            acc, p, largest, weight = _advance(
                rings, acc, p, largest, weight, unit, query, tile * TILE, count, move, WHICH, True, PIECES
            )
            move += 1
        acc = warpgroup_mma(p, v_ring.index(count % STAGES), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(v_free.index(count % STAGES))
        count += 1
        # Of the queries nothing is needed any more.
        store_rows(acc, weight, staging.index(WHICH * (256 // V)), out_ptr, first, num_queries, head, H, V)
        fence_async_shared()
        mbarrier.arrive(q_free)


@gluon.jit
def _load(
    copies, work,
    H: gl.constexpr, S: gl.constexpr, V: gl.constexpr, L: gl.constexpr, TILE: gl.constexpr, CACHE_PAGE: gl.constexpr,
    PAGE: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, NUM_PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The loading warp: queries of a tile, then its keys and values, tile after tile."""
    descs, q_ring, k_parts, v_parts, q_full, q_free, k_full, k_free, v_full, v_free = copies
    q_desc, turned_desc, room_desc, cache_desc = descs
    tiles_ptr, page_table_ptr, first_pages_ptr, num_pairs, M, num_cells = work
    STILL: gl.constexpr = S // PIECE
    PIECES: gl.constexpr = STILL + 1
    PARTS: gl.constexpr = TILE // PIECE
    count = 0
    for turn in range(num_turns(num_pairs, NUM_PROGRAMS)):
        pair = pair_of(turn, NUM_PROGRAMS)
        head = pair % H
        record_ptr = tiles_ptr + pair // H * RECORD
        first = gl.load(record_ptr)
        pages_ptr = page_table_ptr + gl.load(record_ptr + 3).to(gl.int64) * M
        seen = gl.load(record_ptr + 4)
        room_page = gl.load(first_pages_ptr + gl.load(record_ptr + 6))
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        mbarrier.expect(q_full, GROUPS * PIECES * ROWS * PIECE * 2)
        for group in gl.static_range(GROUPS):
            row = first + group * ROWS
            for piece in gl.static_range(STILL):
                place = q_ring.index(group * _Q_PIECES + piece)
                tma.async_copy_global_to_shared(q_desc, [row, head * (S + PIECE) + piece * PIECE], q_full, place)
            place = q_ring.index(group * _Q_PIECES + STILL)
            tma.async_copy_global_to_shared(turned_desc, [row, head * (L + PIECE) + L], q_full, place)
        for start in range(0, seen, TILE):
            stage = count % STAGES
            parity = (count // STAGES & 1) ^ 1
            row = ((room_page + start // PAGE) * H + head) * PAGE + start % PAGE
            bar = k_full.index(stage)
            mbarrier.wait(k_free.index(stage), parity)
            mbarrier.expect(bar, PIECES * TILE * PIECE * 2)
            for part in gl.static_range(PARTS):
                for piece in gl.static_range(STILL):
                    place = k_parts.index((stage * PIECES + piece) * PARTS + part)
                    tma.async_copy_global_to_shared(room_desc, [row + part * PIECE, piece * PIECE], bar, place)
                position = start + part * PIECE
                # What a table holds beyond its sequence's end is loaded, and counts for nothing.
                page = gl.load(pages_ptr + gl.minimum(position // CACHE_PAGE, M - 1))
                cell = page * CACHE_PAGE + position % CACHE_PAGE
                cell = gl.minimum(gl.maximum(cell, 0), num_cells - PIECE)
                place = k_parts.index((stage * PIECES + STILL) * PARTS + part)
                tma.async_copy_global_to_shared(cache_desc, [cell, L], bar, place)
            bar = v_full.index(stage)
            mbarrier.wait(v_free.index(stage), parity)
            mbarrier.expect(bar, TILE * V * 2)
            for part in gl.static_range(PARTS):
                for piece in gl.static_range(V // PIECE):
                    place = v_parts.index((stage * (V // PIECE) + piece) * PARTS + part)
                    tma.async_copy_global_to_shared(room_desc, [row + part * PIECE, S + piece * PIECE], bar, place)
            count += 1


@gluon.jit(do_not_specialize=["N", "M", "num_cells"], do_not_specialize_on_alignment=["N", "M", "num_cells"])
def _room_prefill_kernel(
    q_desc, turned_desc, room_desc, cache_desc, tiles_ptr, page_table_ptr, first_pages_ptr, out_ptr, scale, N, M,
    num_cells,
    H: gl.constexpr, S: gl.constexpr, V: gl.constexpr, L: gl.constexpr, TILE: gl.constexpr, CACHE_PAGE: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, NUM_PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (NUM_PROGRAMS,): one program a multiprocessor, each with its share of the pairs of a tile and a head."""
    dtype: gl.constexpr = room_desc.dtype
    PIECES: gl.constexpr = S // PIECE + 1
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_ring = gl.allocate_shared_memory(dtype, [GROUPS * _Q_PIECES, ROWS, PIECE], LAYOUT)
    staging = q_ring._reinterpret(dtype, [GROUPS * (256 // V), ROWS, V], LAYOUT)
    k_parts = gl.allocate_shared_memory(dtype, [STAGES * PIECES * (TILE // PIECE), PIECE, PIECE], LAYOUT)
    v_parts = gl.allocate_shared_memory(dtype, [STAGES * (V // PIECE) * (TILE // PIECE), PIECE, PIECE], LAYOUT)
    # Pieces side by side are laid out as one tile is.
    k_ring = k_parts._reinterpret(dtype, [STAGES * PIECES, TILE, PIECE], LAYOUT)
    v_ring = v_parts._reinterpret(dtype, [STAGES, TILE, V], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=GROUPS)
        mbarrier.init(v_free.index(stage), count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=GROUPS)
    mbarrier.arrive(turns.index(0))
    start_next(PDL)
    num_pairs = gl.load(tiles_ptr + N * RECORD) * H
    unit = scale * 1.4426950408889634
    rings = q_ring, k_ring, v_ring, staging, q_full, q_free, k_full, k_free, v_full, v_free, turns
    descs = q_desc, turned_desc, room_desc, cache_desc
    copies = descs, q_ring, k_parts, v_parts, q_full, q_free, k_full, k_free, v_full, v_free
    work = tiles_ptr, page_table_ptr, first_pages_ptr, num_pairs, M, num_cells
    zero: gl.constexpr = 0
    one: gl.constexpr = 1
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (rings, tiles_ptr, out_ptr, unit, num_pairs, H, V, PIECES, zero, NUM_PROGRAMS)),
                (_attend, (rings, tiles_ptr, out_ptr, unit, num_pairs, H, V, PIECES, one, NUM_PROGRAMS)),
                (_load, (copies, work, H, S, V, L, TILE, CACHE_PAGE, PAGE, GROUPS, STAGES, NUM_PROGRAMS)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (rings, tiles_ptr, out_ptr, unit, num_pairs, H, V, PIECES, zero, NUM_PROGRAMS)),
                (_load, (copies, work, H, S, V, L, TILE, CACHE_PAGE, PAGE, GROUPS, STAGES, NUM_PROGRAMS)),
            ],
            [1],
            [40],
        )  # fmt: skip


def room_query_tile(num_tokens: int, num_heads: int, device: torch.device) -> int:
    """How many queries a program takes: of few tokens few, so that more programs have some."""
    few = cdiv(num_tokens, ROWS) * num_heads <= 2 * multiprocessors(device)
    return int(ROWS) if few else 2 * int(ROWS)


def attend_in_room(
    q_TQ: Tensor, queries_THD: Tensor, cache: Tensor, page_table_SM: Tensor, scale: float, num_still: int,
    work: PrefillWork, room: Room, out_THV: Tensor,
) -> None:  # fmt: skip
    """Attention of the prefill tokens that the room serves, [T, H (S + R)] -> [T, H, V]: others stay as they are.

    Of `q_TQ` each head's first `num_still` numbers are read, and of `queries_THD`, as `latent_queries` makes them, the
    last, which are turned. Softmax in fp32. Graph-safe; `work` and `room` are planned, the room filled.
    """
    T, H, V = out_THV.shape
    D = cache.shape[3]
    piece = int(PIECE)
    tile = 128 if num_still + piece + V <= 320 else 64
    num_programs = min(multiprocessors(cache.device), work.num_tiles * H)
    _room_prefill_kernel[(num_programs,)](
        hopper_descriptor(q_TQ, int(ROWS), piece), hopper_descriptor(queries_THD.view(T, H * D), int(ROWS), piece),
        hopper_descriptor(room.pages_WHPX.view(-1, room.pages_WHPX.shape[3]), piece, piece),
        hopper_descriptor(cache.view(-1, D), piece, piece), work.tiles_N8, page_table_SM, room.first_pages_C, out_THV,
        scale, work.num_tiles, page_table_SM.shape[1], cache.shape[0] * cache.shape[2],
        H=H, S=num_still, V=V, L=D - piece, TILE=tile, CACHE_PAGE=cache.shape[2], PAGE=ROOM_PAGE, STAGES=_STAGES,
        GROUPS=work.block_q // int(ROWS), NUM_PROGRAMS=num_programs, PDL=True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
