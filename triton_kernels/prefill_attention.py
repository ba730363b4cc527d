"""Prefill attention in Triton: chunks of queries, each over its sequence's paged keys and values, causal.

A chunk starts anywhere in its sequence: what is before it was computed earlier, or found in the prefix cache. K and V
of the chunk itself are in the cache already.

Shape suffixes: T prefill tokens, C chunks, C1 = C + 1, H q heads, D head size, S slots, M pages of a slot; caches are
[page, kv head, token of the page, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.dispatch import is_hopper
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous


@triton.jit
def _load_cells(cache, cell, tokens, columns, D: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """The cells from `cell` on: one tile of keys or values."""
    if TMA:
        tile = cache.load([cell.to(tl.int32), 0])
    else:
        pointers = cache + (cell + tokens)[:, None] * D + columns[None, :]
        tile = tl.load(pointers) if D == BLOCK_D else tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    return tile


@triton.jit
def _bend(
    products, scale, softcap, slopes_ptr, head, queries, positions, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr
):  # fmt: skip
    """Scores in units of log 2 from products, where the score is more than the scaled product."""
    scores = products * scale
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp2(2 * 1.4426950408889634 / softcap * scores) + 1))
    if ALIBI:
        scores += tl.load(slopes_ptr + head) * (positions[None, :] - queries[:, None]).to(tl.float32)
    return scores * 1.4426950408889634


@triton.jit(do_not_specialize=["C", "T", "M"], do_not_specialize_on_alignment=["C", "T", "M"])
def _prefill_kernel(
    q_ptr, k_cache, v_cache, page_table_ptr, slots_ptr, chunk_starts_ptr, query_starts_ptr, slopes_ptr, out_ptr,
    scale, softcap, C, T, M,
    H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, tiles of BLOCK_Q queries, at most T / BLOCK_Q + C): one program owns one tile of one head.

    Each program counts the chunks' tiles to find its own. The last tiles of long chunks have most to do and go first.
    Programs beyond the last tile write the zeros of tokens that belong to no chunk.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    chunks = tl.arange(0, BLOCK_C)
    begins = tl.load(query_starts_ptr + chunks, mask=chunks < C, other=0)
    ends = tl.load(query_starts_ptr + chunks + 1, mask=chunks < C, other=0)
    tiles = tl.cdiv(ends - begins, BLOCK_Q)
    last_tiles = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    tile = num_tiles - 1 - tl.program_id(1)
    if tile < 0:
        num_tokens = tl.load(query_starts_ptr + C)
        padding = num_tokens + (-1 - tile) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        pad_ptrs = out_ptr + (padding.to(tl.int64) * H + head)[:, None] * D + columns[None, :]
        zeros = tl.zeros((BLOCK_Q, BLOCK_D), out_ptr.dtype.element_ty)
        tl.store(pad_ptrs, zeros, mask=(padding < T)[:, None] & (columns < D)[None, :])
    else:
        chunk = tl.sum((last_tiles <= tile).to(tl.int32), 0)
        is_own = chunks == chunk
        offset = (tile - tl.sum(tl.where(is_own, last_tiles - tiles, 0), 0)) * BLOCK_Q
        begin = tl.sum(tl.where(is_own, begins, 0), 0)
        count = tl.sum(tl.where(is_own, ends - begins, 0), 0)
        chunk_start = tl.load(chunk_starts_ptr + chunk)
        pages_ptr = page_table_ptr + tl.load(slots_ptr + chunk).to(tl.int64) * M
        kv_head = head // (H // KV_HEADS)

        indices = offset + tl.arange(0, BLOCK_Q)
        rows = (begin + indices).to(tl.int64)
        q_mask = (indices < count)[:, None] & (columns < D)[None, :]
        q_ptrs = q_ptr + (rows * H + head)[:, None] * D + columns[None, :]
        q = tl.load(q_ptrs, mask=q_mask, other=0.0)
        queries = chunk_start + indices
        first_query = chunk_start + offset
        length = chunk_start + tl.minimum(offset + BLOCK_Q, count)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(first_query - WINDOW + 1, 0) // TILE * TILE
        # Tiles that every query sees whole need no mask.
        whole = low
        if WINDOW == 0:
            whole = (first_query + 1) // TILE * TILE
        tokens = tl.arange(0, TILE)
        unit = 1.0 if SOFTCAP or ALIBI else scale * 1.4426950408889634
        largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        for start in tl.range(low, whole, TILE, num_stages=STAGES):
            page = tl.load(pages_ptr + start // PAGE).to(tl.int64)
            cell = (page * KV_HEADS + kv_head) * PAGE + start % PAGE
            k = _load_cells(k_cache, cell, tokens, columns, D, BLOCK_D, TMA)
            v = _load_cells(v_cache, cell, tokens, columns, D, BLOCK_D, TMA)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SOFTCAP or ALIBI:
                scores = _bend(scores, scale, softcap, slopes_ptr, head, queries, start + tokens, SOFTCAP, ALIBI)
            new = tl.maximum(largest, tl.max(scores, 1) * unit)
            weights = tl.exp2(scores * unit - new[:, None])
            rescale = tl.exp2(largest - new)
            weight = weight * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            largest = new
        for start in tl.range(whole, length, TILE, num_stages=STAGES):
            page = tl.load(pages_ptr + start // PAGE).to(tl.int64)
            cell = (page * KV_HEADS + kv_head) * PAGE + start % PAGE
            k = _load_cells(k_cache, cell, tokens, columns, D, BLOCK_D, TMA)
            v = _load_cells(v_cache, cell, tokens, columns, D, BLOCK_D, TMA)
            positions = start + tokens
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SOFTCAP or ALIBI:
                scores = _bend(scores, scale, softcap, slopes_ptr, head, queries, positions, SOFTCAP, ALIBI)
            seen = positions[None, :] <= queries[:, None]
            if WINDOW > 0:
                seen &= positions[None, :] > queries[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
            # Cells beyond the end may hold anything, NaN too.
            v = tl.where((positions < length)[:, None], v, 0.0)
            new = tl.maximum(largest, tl.max(scores, 1) * unit)
            finite = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores * unit - finite[:, None])
            rescale = tl.exp2(largest - finite)
            weight = weight * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            largest = new
        y = acc / weight[:, None]
        tl.store(
            out_ptr + (rows * H + head)[:, None] * D + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=q_mask
        )


def launch_prefill_attention(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, chunk_slots_C: Tensor,
    chunk_starts_C: Tensor, query_starts_C1: Tensor, scoring: Scoring, out_THD: Tensor,
) -> None:  # fmt: skip
    """One launch, graph-safe: the grid covers any way of cutting T tokens into C chunks."""
    T, H, D = q_THD.shape
    C = chunk_slots_C.shape[0]
    kv_heads, page_size = k_cache.shape[1:3]
    half = q_THD.dtype.itemsize == 2
    block_q = min(64, max(16, triton.next_power_of_2(T)))
    tile = min(page_size, 64 if half and D <= 128 else 32)
    slopes = scoring.alibi_slopes_H
    # A tile of a page is one block of memory: the copy engine fetches it whole.
    tma = is_hopper(q_THD.device) and half and triton.next_power_of_2(D) == D
    keys, values = k_cache, v_cache
    if tma:
        keys = TensorDescriptor.from_tensor(k_cache.view(-1, D), [tile, D])
        values = TensorDescriptor.from_tensor(v_cache.view(-1, D), [tile, D])
    _prefill_kernel[(H, triton.cdiv(T, block_q) + C)](
        q_THD, keys, values, page_table_SM, chunk_slots_C, chunk_starts_C, query_starts_C1,
        q_THD if slopes is None else slopes, out_THD, scoring.scale, scoring.softcap, C, T, page_table_SM.shape[1],
        H=H, KV_HEADS=kv_heads, D=D, PAGE=page_size, TILE=tile, BLOCK_Q=block_q,
        BLOCK_C=triton.next_power_of_2(max(C, 1)), BLOCK_D=triton.next_power_of_2(D), WINDOW=scoring.window,
        SOFTCAP=bool(scoring.softcap), ALIBI=slopes is not None, TMA=tma,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32", STAGES=3 if half else 2,
        num_warps=4, **overlap_options(q_THD),
    )  # fmt: skip
