"""Decode attention in Triton: one query a sequence, or its last few, over its paged keys and values.

A fixed number of programs works off the splits that a step's rows are cut into (`decode_work.py`), and a last kernel
merges the splits of a sequence in their order.

Shape suffixes: T queries of decode rows, H q heads, or those of all queries of a row, G q heads of one kv head, D head
size, S slots, M pages of a slot, I splits; caches are [page, kv head, token of the page, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.cells import as_factor
from tercet.triton_kernels.decode_work import DecodeWork
from tercet.triton_kernels.dispatch import has_little_shared_memory, is_hopper, multiprocessors
from tercet.triton_kernels.merge_splits import merge_splits
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.sinks import begin_with_sinks
from tercet.triton_kernels.tiles import dot_block

_PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit(do_not_specialize=["M", "num_programs"], do_not_specialize_on_alignment=["M", "num_programs"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, page_table_ptr, items_ptr, num_items_ptr, lengths_ptr, slopes_ptr, sinks_ptr, partial_ptr,
    stats_ptr, out_ptr, scale, softcap, M, num_programs,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    TRIES: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, PERSISTENT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (num_programs,): each program takes one pair of a split and a kv head, or every num_programs-th one.

    A split's q heads are the rows of the dot products, those of each of TRIES queries behind each other. Scores are in
    units of log 2.
    """
    G: tl.constexpr = H // KV_HEADS
    let_next_start(PDL)
    wait_for_previous(PDL)
    heads = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, TILE)
    column_mask = columns < D
    first_pair = tl.program_id(0)
    end_pair = first_pair + 1
    if PERSISTENT:
        end_pair = tl.load(num_items_ptr) * KV_HEADS
    for pair in range(first_pair, end_pair, num_programs):
        item = pair // KV_HEADS
        kv_head = pair % KV_HEADS
        row = tl.load(items_ptr + item * 8)
        begin = tl.load(items_ptr + item * 8 + 1)
        end = tl.load(items_ptr + item * 8 + 2)
        slot = tl.load(items_ptr + item * 8 + 3)
        length = tl.load(items_ptr + item * 8 + 4)
        count = tl.load(items_ptr + item * 8 + 5)
        if row < 0:
            begin = 0
            end = 0
            slot = 0
        first = begin
        if WINDOW > 0:
            first = tl.maximum(begin, (length - WINDOW - TRIES + 1) // TILE * TILE)
        pages_ptr = page_table_ptr + slot.to(tl.int64) * M
        real = heads < TRIES * G
        q_heads = kv_head * G + heads
        places = q_heads
        if TRIES > 1:
            q_heads = kv_head * G + heads % G
            places = heads // G * H + q_heads
            seen = tl.load(lengths_ptr + row * TRIES + heads // G, mask=real & (row >= 0), other=0)
        q_mask = real[:, None] & column_mask[None, :] & (row >= 0)
        q = tl.load(q_ptr + (row * (TRIES * H) + places)[:, None] * D + columns[None, :], mask=q_mask, other=0.0)
        q = as_factor(q, q.dtype, k_ptr.dtype.element_ty)
        largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_G,), tl.float32)
        if SINKS:
            # Of a row's splits the last counts them.
            largest, weight = begin_with_sinks(sinks_ptr, q_heads, real & (end == length))
        acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for start in tl.range(first, end, TILE, num_stages=STAGES):
            page = tl.load(pages_ptr + start // PAGE).to(tl.int64)
            cells = (page * KV_HEADS + kv_head) * PAGE + start % PAGE + tokens
            offsets = cells[:, None] * D + columns[None, :]
            if D == BLOCK_D:
                k = tl.load(k_ptr + offsets)
                v = tl.load(v_ptr + offsets)
            else:
                k = tl.load(k_ptr + offsets, mask=column_mask[None, :], other=0.0)
                v = tl.load(v_ptr + offsets, mask=column_mask[None, :], other=0.0)
            k = k.to(q.dtype)
            v = v.to(q.dtype)
            positions = start + tokens
            inside = positions < end
            if WINDOW > 0:
                inside &= positions >= length - WINDOW - TRIES + 1
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            if SOFTCAP:
                scores = softcap * (1 - 2 / (tl.exp2(2 * 1.4426950408889634 * scores / softcap) + 1))
            if ALIBI:
                slopes = tl.load(slopes_ptr + q_heads, mask=real, other=0.0)
                if TRIES > 1:
                    scores += slopes[:, None] * (positions[None, :] - (seen - 1)[:, None]).to(tl.float32)
                else:
                    scores += slopes[:, None] * (positions - (length - 1)).to(tl.float32)[None, :]
            scores = tl.where(inside[None, :], scores * 1.4426950408889634, float("-inf"))
            if TRIES > 1:
                scores = tl.where(positions[None, :] < seen[:, None], scores, float("-inf"))
                if WINDOW > 0:
                    scores = tl.where(positions[None, :] >= (seen - WINDOW)[:, None], scores, float("-inf"))
            # Cells beyond the end may hold anything, NaN too.
            v = tl.where(inside[:, None], v, 0.0)
            new = tl.maximum(largest, tl.max(scores, 1))
            finite = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - finite[:, None])
            rescale = tl.exp2(largest - finite)
            weight = weight * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            largest = new
        if count == 1:
            if TRIES > 1:  # those that are none have seen nothing
                weight = tl.where(weight > 0, weight, 1.0)
            y = acc / weight[:, None]
            out_ptrs = out_ptr + (row * (TRIES * H) + places)[:, None] * D + columns[None, :]
            tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=q_mask)
        else:
            place = item.to(tl.int64) * (TRIES * H) + places
            stats_mask = real & (row >= 0)
            tl.store(partial_ptr + place[:, None] * D + columns[None, :], acc, mask=q_mask)
            tl.store(stats_ptr + place * 2, largest, mask=stats_mask)
            tl.store(stats_ptr + place * 2 + 1, weight, mask=stats_mask)


def launch_decode_attention(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, scoring: Scoring, work: DecodeWork,
    out_THD: Tensor,
) -> None:  # fmt: skip
    """Two launches: the splits, and their merge. Graph-safe; `work` is planned."""
    wanted = scoring.window and scoring.window + work.tries - 1
    if work.window not in (0, wanted):
        raise ValueError(f"work: got what is planned for a window of {work.window}, wanted {wanted}")
    T, H, D = q_THD.shape
    kv_heads, page_size = k_cache.shape[1:3]
    block_g, itemsize = dot_block(work.tries * H // kv_heads), q_THD.dtype.itemsize
    tile = 64 if itemsize == 2 else 32
    if (D > 128 or block_g * itemsize > 256) and not is_hopper(q_THD.device):
        tile //= 2  # others have less shared memory
    # Of large heads a tile is so much that a third stage leaves no room for other programs.
    large, huge = D > 128, D > 256
    stages, warps = (2, 4) if large else (3, 2)
    if huge:
        tile, warps = max(tile // 2, 16), 8
        stages = 1 if has_little_shared_memory(q_THD.device) and block_g * itemsize >= 64 else 2
    # Fixed splits may be very many: then programs take several. Else the card hands pairs to whoever is free.
    num_programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(q_THD.device)
    if not work.fixed:
        num_programs = work.items_I8.shape[0] * kv_heads
    overlap = overlap_options(q_THD)
    slopes, sinks = scoring.alibi_slopes_H, scoring.sinks_H
    _decode_kernel[(num_programs,)](
        q_THD, k_cache, v_cache, page_table_SM, work.items_I8, work.num_items_1,
        work.items_I8 if work.lengths_T is None else work.lengths_T,
        q_THD if slopes is None else slopes, q_THD if sinks is None else sinks,
        work.partial_IHD, work.stats_IH2, out_THD,
        scoring.scale, scoring.softcap, page_table_SM.shape[1], num_programs,
        H=H, KV_HEADS=kv_heads, D=D, PAGE=page_size, TILE=min(page_size, tile),
        TRIES=work.tries, BLOCK_G=block_g, BLOCK_D=dot_block(D),
        PERSISTENT=work.fixed, WINDOW=scoring.window, SOFTCAP=bool(scoring.softcap),
        ALIBI=slopes is not None, SINKS=sinks is not None,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32", STAGES=stages,
        num_warps=warps, **overlap,
    )  # fmt: skip
    rows = out_THD.view(T // work.tries, work.tries * H, D)
    merge_splits(work.counts_B, work.starts_B, work.partial_IHD, work.stats_IH2, rows)
