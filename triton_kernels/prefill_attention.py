"""Prefill attention in Triton: chunks of queries, each over its sequence's paged keys and values, causal.

A chunk starts anywhere in its sequence: what is before it was computed earlier, or found in the prefix cache. K and V
of the chunk itself are in the cache already. The kernel here serves every head size and option; where Hopper's own
kernel (`prefill_hopper.py`) can, it takes over.

Shape suffixes: T prefill tokens, H q heads, D head size, S slots, M pages of a slot; caches are
[page, kv head, token of the page, D].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.triton_kernels import prefill_load
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.cells import as_factor
from tercet.triton_kernels.checks import FP8, check_dtype
from tercet.triton_kernels.dispatch import INTERPRETED, is_hopper, multiprocessors
from tercet.triton_kernels.merge_splits import merge_splits
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.prefill_fp8 import fp8_prefill_kernel
from tercet.triton_kernels.prefill_hopper import hopper_prefill_kernel
from tercet.triton_kernels.prefill_tile import attend, load_cells
from tercet.triton_kernels.prefill_work import RECORD, PrefillWork
from tercet.triton_kernels.sinks import begin_with_sinks
from tercet.triton_kernels.tiles import cdiv, dot_block, hopper_descriptor, next_power_of_2

HOPPER_ROWS: int = prefill_load.ROWS.value
HOPPER_PIECE: int = prefill_load.PIECE.value
_TILES_AT_ONCE = 3
"""Of a multiprocessor, by the portable kernel; of huge heads one."""
_FEWEST_IN_WINDOW = 4
"""Tiles of keys in a window from which on Hopper's own kernel is ahead: of less, beginnings and ends are too much."""
_HUGE = 256
"""Heads of more numbers fill registers and shared memory sooner than others."""
_FEW_TILES = 2
"""Small tiles a multiprocessor up to which they are the better ones: they deal out more evenly, each takes longer."""


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["M"])
def _prefill_kernel(
    q_ptr, k_cache, v_cache, page_table_ptr, tiles_ptr, ends_ptr, slopes_ptr, sinks_ptr, out_ptr, partial_ptr,
    stats_ptr, scale, softcap, M,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, tiles): one program owns one tile of queries of one head, or writes the zeros of a tile of padding.

    `ends_ptr`: where images end, or None; `PARTS`: whether tiles are cut by keys too, of which `KEYS` are one, so that
    a program may own a part.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    record_ptr = tiles_ptr + tl.program_id(1) * RECORD
    num_queries = tl.load(record_ptr + 1)
    length = tl.load(record_ptr + 4)
    indices = tl.arange(0, BLOCK_Q)
    rows = (tl.load(record_ptr) + indices).to(tl.int64)
    q_mask = (indices < num_queries)[:, None] & (columns < D)[None, :]
    out_ptrs = out_ptr + (rows * H + head)[:, None] * D + columns[None, :]
    if length == 0:
        tl.store(out_ptrs, tl.zeros((BLOCK_Q, BLOCK_D), out_ptr.dtype.element_ty), mask=q_mask)
    else:
        first_query = tl.load(record_ptr + 2)
        pages_ptr = page_table_ptr + tl.load(record_ptr + 3).to(tl.int64) * M
        kv_head = head // (H // KV_HEADS)
        q = tl.load(q_ptr + (rows * H + head)[:, None] * D + columns[None, :], mask=q_mask, other=0.0)
        q = as_factor(q, q.dtype, k_cache.dtype if TMA else k_cache.dtype.element_ty)
        queries = first_query + indices
        last_seen = queries
        if ends_ptr is not None:
            last_seen = tl.maximum(queries, tl.load(ends_ptr + rows, mask=indices < num_queries, other=0) - 1)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(first_query - WINDOW + 1, 0) // TILE * TILE
        # Tiles that every query sees whole need no mask.
        whole = low
        if WINDOW == 0:
            whole = (first_query + 1) // TILE * TILE
        first_tile = 0
        num_parts = 1
        if PARTS:
            first_tile = tl.load(record_ptr + 6)
            low = first_tile * KEYS
            whole = tl.minimum(tl.maximum(whole, low), length)
            num_parts = tl.load(record_ptr + 7)
        tokens = tl.arange(0, TILE)
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_ptr + head)
        largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_Q,), tl.float32)
        if SINKS:
            # Of a tile's parts the first counts it.
            sink, one = begin_with_sinks(sinks_ptr, head, first_tile == 0)
            largest = tl.full((BLOCK_Q,), sink, tl.float32)
            weight = tl.full((BLOCK_Q,), one, tl.float32)
        acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        for start in tl.range(low, whole, TILE, num_stages=STAGES):
            page = tl.load(pages_ptr + start // PAGE).to(tl.int64)
            cell = (page * KV_HEADS + kv_head) * PAGE + start % PAGE
            k = load_cells(k_cache, cell, tokens, columns, D, BLOCK_D, TMA)
            v = load_cells(v_cache, cell, tokens, columns, D, BLOCK_D, TMA)
            largest, weight, acc = attend(
                q, k, v, largest, weight, acc, start + tokens, queries, last_seen, length, scale, softcap,
                slope, False, WINDOW, SOFTCAP, ALIBI, PRECISION,
            )  # fmt: skip
        for start in tl.range(whole, length, TILE, num_stages=STAGES):
            page = tl.load(pages_ptr + start // PAGE).to(tl.int64)
            cell = (page * KV_HEADS + kv_head) * PAGE + start % PAGE
            k = load_cells(k_cache, cell, tokens, columns, D, BLOCK_D, TMA)
            v = load_cells(v_cache, cell, tokens, columns, D, BLOCK_D, TMA)
            largest, weight, acc = attend(
                q, k, v, largest, weight, acc, start + tokens, queries, last_seen, length, scale, softcap,
                slope, True, WINDOW, SOFTCAP, ALIBI, PRECISION,
            )  # fmt: skip
        if num_parts == 1:
            y = acc / weight[:, None]
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            places = (tl.program_id(1) * BLOCK_Q + indices).to(tl.int64) * H + head
            tl.store(partial_ptr + places[:, None] * D + columns[None, :], acc, mask=(columns < D)[None, :])
            tl.store(stats_ptr + places * 2, largest)
            tl.store(stats_ptr + places * 2 + 1, weight)


def keys_at_once(k_cache: Tensor) -> int:
    """Where tiles are cut by keys too, parts are so many long, or some times as many."""
    return int(prefill_load.keys_of(k_cache.shape[3]))


def can_use_hopper(k_cache: Tensor, scoring: Scoring) -> bool:
    """Whether Hopper's own kernel knows these shapes and this way of scoring."""
    page_size, head_dim = k_cache.shape[2:]
    sizes = (64, 128, 256) if k_cache.dtype.itemsize == 2 else (64, 128)
    fits = k_cache.dtype.itemsize <= 2 and head_dim in sizes and page_size % HOPPER_PIECE == 0
    knows = not scoring.softcap and scoring.alibi_slopes_H is None
    pays = not scoring.window or scoring.window >= _FEWEST_IN_WINDOW * keys_at_once(k_cache)
    return knows and fits and pays and is_hopper(k_cache.device)


def query_tile(num_tokens: int, num_heads: int, k_cache: Tensor, scoring: Scoring) -> int:
    """How many queries a program of the kernel that will serve them takes.

    A token's bits must not follow its chunk's. In Hopper's kernel they do not depend on this; in the other the size
    decides how a row is summed, so that on a GPU it is always the same.
    """
    if can_use_hopper(k_cache, scoring):
        few = cdiv(num_tokens, HOPPER_ROWS) * num_heads <= _FEW_TILES * multiprocessors(k_cache.device)
        return HOPPER_ROWS if few else 2 * HOPPER_ROWS
    tile = _tiles(k_cache).queries
    return min(tile, max(16, next_power_of_2(num_tokens))) if INTERPRETED else tile


def parts_at_once(k_cache: Tensor, scoring: Scoring) -> int:
    """How many parts of a tile, of one head or of as many as a program takes, run at a time."""
    alone = can_use_hopper(k_cache, scoring) or k_cache.shape[3] > _HUGE
    return (1 if alone else _TILES_AT_ONCE) * multiprocessors(k_cache.device)


class _Tiles(NamedTuple):
    """Of the portable kernel."""

    queries: int
    keys: int
    stages: int
    warps: int = 4


def _tiles(k_cache: Tensor) -> _Tiles:
    """What fits shared memory and registers."""
    head_dim, hopper = k_cache.shape[3], is_hopper(k_cache.device)
    half, stages = k_cache.dtype.itemsize == 2, 2 if k_cache.dtype == torch.float32 else 3
    if head_dim > _HUGE:
        if k_cache.dtype == torch.float32:
            return _Tiles(32, 16, 2, warps=8) if hopper else _Tiles(16, 16, 1, warps=8)
        return _Tiles(64, 32, 2, warps=8) if hopper else _Tiles(32, 16, 2, warps=8)
    if head_dim <= 128:
        return _Tiles(64, 64 if k_cache.dtype != torch.float32 else 32, stages)
    return _Tiles(64, 32, stages) if half or hopper else _Tiles(32, 16, stages)


def launch_prefill_attention(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, scoring: Scoring, work: PrefillWork,
    ends_T: Tensor | None, out_THD: Tensor,
) -> None:  # fmt: skip
    """Graph-safe: the grid covers any way of cutting T tokens into chunks; `work` is planned."""
    if not q_THD.shape[0]:
        return
    if can_use_hopper(k_cache, scoring):
        _launch_hopper(q_THD, k_cache, v_cache, page_table_SM, scoring, work, ends_T, out_THD)
    else:
        _launch(q_THD, k_cache, v_cache, page_table_SM, scoring, work, ends_T, out_THD)
    if (parts := work.parts) is not None:
        sums = parts.counts_T, parts.starts_T, parts.sums_QHD, parts.stats_QH2
        merge_splits(*sums, out_THD, stride=work.block_q)


def _launch(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, scoring: Scoring, work: PrefillWork,
    ends_T: Tensor | None, out_THD: Tensor,
) -> None:  # fmt: skip
    _, H, D = q_THD.shape
    kv_heads, page_size = k_cache.shape[1:3]
    half = q_THD.dtype.itemsize == 2
    tiles = _tiles(k_cache)
    tile = min(page_size, tiles.keys)
    slopes, sinks = scoring.alibi_slopes_H, scoring.sinks_H
    # A tile of a page is one block of memory: the copy engine fetches it whole.
    tma = is_hopper(q_THD.device) and half and dot_block(D) == D
    keys, values = k_cache, v_cache
    if tma:
        keys = TensorDescriptor.from_tensor(k_cache.view(-1, D), [tile, D])
        values = TensorDescriptor.from_tensor(v_cache.view(-1, D), [tile, D])
    _prefill_kernel[(H, work.num_tiles)](
        q_THD, keys, values, page_table_SM, work.tiles_N8, ends_T, q_THD if slopes is None else slopes,
        q_THD if sinks is None else sinks, out_THD, *_sums(work, out_THD), scoring.scale, scoring.softcap,
        page_table_SM.shape[1],
        H=H, KV_HEADS=kv_heads, D=D, PAGE=page_size, TILE=tile, BLOCK_Q=work.block_q,
        BLOCK_D=dot_block(D), PARTS=work.parts is not None, KEYS=keys_at_once(k_cache), WINDOW=scoring.window,
        SOFTCAP=bool(scoring.softcap), ALIBI=slopes is not None, SINKS=sinks is not None, TMA=tma,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32", STAGES=tiles.stages, RECORD=RECORD,
        num_warps=tiles.warps, **overlap_options(q_THD),
    )  # fmt: skip


def _launch_hopper(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, scoring: Scoring, work: PrefillWork,
    ends_T: Tensor | None, out_THD: Tensor,
) -> None:  # fmt: skip
    check_dtype("q", q_THD, torch.bfloat16, torch.float16)
    T, H, D = q_THD.shape
    num_pages, kv_heads, page_size = k_cache.shape[:3]
    num_pairs = work.num_tiles * (H // work.heads)
    num_programs = min(multiprocessors(q_THD.device), num_pairs)
    groups = work.heads * work.block_q // HOPPER_ROWS
    # Two groups' queries of heads of 256 leave no room for those of the next tile.
    ahead = 1 if num_pairs <= num_programs or (D > 128 and groups == 2) else 2
    fp8 = k_cache.dtype == FP8
    kernel, piece = (fp8_prefill_kernel, D) if fp8 else (hopper_prefill_kernel, HOPPER_PIECE)
    kernel[(num_programs,)](
        hopper_descriptor(q_THD.view(T, H * D), HOPPER_ROWS, D),
        hopper_descriptor(k_cache.view(-1, D), HOPPER_PIECE, piece),
        hopper_descriptor(v_cache.view(-1, D), HOPPER_PIECE, piece),
        work.tiles_N8, page_table_SM, ends_T, scoring.sinks_H, out_THD, *_sums(work, out_THD), scoring.scale,
        work.num_tiles, page_table_SM.shape[1], num_pages,
        H=H, KV_HEADS=kv_heads, D=D, PAGE=page_size, PARTS=work.parts is not None, WINDOW=scoring.window,
        HEADS=work.heads, STAGES=2, GROUPS=groups, AHEAD=ahead, NUM_PROGRAMS=num_programs, PDL=True, num_warps=4,
        launch_pdl=True,
    )  # fmt: skip


def _sums(work: PrefillWork, unused: Tensor) -> tuple[Tensor, Tensor]:
    return (unused, unused) if work.parts is None else (work.parts.sums_QHD, work.parts.stats_QH2)
