"""Kernels of the gated delta rule in tiles of 64 tokens (`delta_prefill.py`): each tile by itself, then tile by tile.

Between them lie, by tile and head, in scratch: log decays summed up to each token, g; the rows (I + A)^-1 b exp(g) k;
(I + A)^-1 b v, transposed, in whose place come the values that are added for keys; the state before the tile, too.

A tile's place in scratch is where its chunk begins, in tiles, plus the chunk's number, plus its own number in the
chunk: no two are the same, and nobody sums up the tiles of chunks ahead.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.overlap import let_next_start, wait_for_previous
from tercet.triton_kernels.unit_lower import invert_unit_lower


@triton.jit
def first_place(begin, chunk, TILE: tl.constexpr):
    return begin // TILE + chunk


@triton.jit
def tokens_of_place(query_starts_ptr, place, num_chunks, TILE: tl.constexpr, BLOCK_C: tl.constexpr):
    """The first token of a tile, and the end of its chunk, which is not behind it where there is no such tile."""
    chunks = tl.arange(0, BLOCK_C)
    begins = tl.load(query_starts_ptr + chunks, mask=chunks < num_chunks, other=0)
    is_ahead = (first_place(begins, chunks, TILE) <= place) & (chunks < num_chunks)
    own = tl.sum(is_ahead.to(tl.int32), 0) - 1
    begin = tl.load(query_starts_ptr + own)
    end = tl.load(query_starts_ptr + own + 1)
    return begin + (place - first_place(begin, own, TILE)) * TILE, end


@triton.jit
def decays(summed, FROM_DIAGONAL: tl.constexpr, TILE: tl.constexpr):
    """From column's token to row's; zeros above the diagonal, or on it as well. Never of something positive."""
    tokens = tl.arange(0, TILE)
    seen = tokens[:, None] >= tokens[None, :] if FROM_DIAGONAL else tokens[:, None] > tokens[None, :]
    return tl.exp(tl.where(seen, summed[:, None] - summed[None, :], float("-inf")))


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["num_chunks"])
def solve_tiles_kernel(
    qkv_ptr, gates_ptr, query_starts_ptr, summed_ptr, keys_ptr, values_ptr, num_chunks,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (H, places of tiles): one program owns a head of a tile, apart from any state."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, place = tl.program_id(0), tl.program_id(1)
    first, end = tokens_of_place(query_starts_ptr, place, num_chunks, TILE, BLOCK_C)
    if first < end:
        C: tl.constexpr = 2 * K * D + H * V
        offsets, keys, values = tl.arange(0, TILE), tl.arange(0, D), tl.arange(0, V)
        inside = first + offsets < end
        gates_ptrs = gates_ptr + first.to(tl.int64) * (2 * H) + offsets * (2 * H) + head
        summed = tl.cumsum(tl.load(gates_ptrs, mask=inside, other=0.0), 0)
        beta = tl.load(gates_ptrs + H, mask=inside, other=0.0)
        rows_ptr = qkv_ptr + first.to(tl.int64) * C + offsets[:, None] * C
        k_ptrs = rows_ptr + (K + head // (H // K)) * D + keys[None, :]
        k = tl.load(k_ptrs, mask=inside[:, None], other=0.0)
        a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decays(summed, False, TILE) * beta[:, None]
        solved = invert_unit_lower(a, TILE, BLOCK, LEVELS, INVERSE) * beta[None, :]
        scratch = place.to(tl.int64) * H + head
        tl.store(summed_ptr + scratch * TILE + offsets, summed)
        decayed = (solved * tl.exp(summed)[None, :]).to(k.dtype)
        w = tl.dot(decayed, k, input_precision=PRECISION).to(k.dtype)
        tl.store(keys_ptr + scratch * (TILE * D) + offsets[:, None] * D + keys[None, :], w)
        v_ptrs = rows_ptr + 2 * K * D + head * V + values[None, :]
        v = tl.load(v_ptrs, mask=inside[:, None], other=0.0)
        u = tl.dot(solved.to(v.dtype), v, input_precision=PRECISION).to(v.dtype)
        tl.store(values_ptr + scratch * (TILE * V) + values[:, None] * TILE + offsets[None, :], tl.trans(u))


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def scan_tiles_kernel(
    qkv_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, summed_ptr, keys_ptr, values_ptr, before_ptr,
    states_ptr, S,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (V / BLOCK_V, H, chunks): one program owns some columns of a head's state, as rows, through a whole chunk.

    Transposed, both products of a tile take what is in registers from there.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, chunk = tl.program_id(1), tl.program_id(2)
    slot = tl.load(chunk_slots_ptr + chunk).to(tl.int64)
    begin, end = tl.load(query_starts_ptr + chunk), tl.load(query_starts_ptr + chunk + 1)
    if begin < end:
        C: tl.constexpr = 2 * K * D + H * V
        dtype = qkv_ptr.dtype.element_ty
        offsets, keys = tl.arange(0, TILE), tl.arange(0, D)
        values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        kept = (slot >= 0) & (slot < S)
        states_ptrs = states_ptr + (slot * H + head) * (D * V) + keys[None, :] * V + values[:, None]
        started = kept & (tl.load(chunk_starts_ptr + chunk) > 0)
        state = tl.load(states_ptrs, mask=started & (keys[None, :] >= 0), other=0.0).to(tl.float32)
        k_ptrs = qkv_ptr + (K + head // (H // K)) * D + offsets[:, None] * C + keys[None, :]
        place = first_place(begin, chunk, TILE)
        for first in tl.range(begin, end, TILE, num_stages=STAGES):
            scratch = place.to(tl.int64) * H + head
            w = tl.load(keys_ptr + scratch * (TILE * D) + offsets[:, None] * D + keys[None, :])
            k = tl.load(k_ptrs + tl.cast(first, tl.int64) * C, mask=(first + offsets < end)[:, None], other=0.0)
            values_ptrs = values_ptr + scratch * (TILE * V) + values[:, None] * TILE + offsets[None, :]
            u = tl.load(values_ptrs)
            summed = tl.load(summed_ptr + scratch * TILE + offsets)
            last = tl.load(summed_ptr + scratch * TILE + TILE - 1)
            rounded = state.to(dtype)
            tl.store(before_ptr + scratch * (D * V) + values[:, None] * D + keys[None, :], rounded)
            added = u.to(tl.float32) - tl.dot(rounded, tl.trans(w), input_precision=PRECISION)
            tl.store(values_ptrs, added.to(dtype))
            left = (added * tl.exp(last - summed)[None, :]).to(dtype)
            state = tl.dot(left, k, state * tl.exp(last), input_precision=PRECISION)
            place += 1
        tl.store(states_ptrs, state.to(states_ptr.dtype.element_ty), mask=kept & (keys[None, :] >= 0))


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["num_chunks"])
def answer_tiles_kernel(
    qkv_ptr, query_starts_ptr, summed_ptr, values_ptr, before_ptr, out_ptr, num_chunks,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (V / BLOCK_V, H, places of tiles): one program owns some columns of a head's answers to a tile."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, place = tl.program_id(1), tl.program_id(2)
    first, end = tokens_of_place(query_starts_ptr, place, num_chunks, TILE, BLOCK_C)
    if first < end:
        C: tl.constexpr = 2 * K * D + H * V
        offsets, keys = tl.arange(0, TILE), tl.arange(0, D)
        values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (first + offsets < end)[:, None]
        q_ptrs = qkv_ptr + first.to(tl.int64) * C + head // (H // K) * D + offsets[:, None] * C + keys[None, :]
        q = tl.load(q_ptrs, mask=inside, other=0.0)
        k = tl.load(q_ptrs + K * D, mask=inside, other=0.0)
        scratch = place.to(tl.int64) * H + head
        summed = tl.load(summed_ptr + scratch * TILE + offsets)
        before = tl.load(before_ptr + scratch * (D * V) + values[:, None] * D + keys[None, :])
        added = tl.load(values_ptr + scratch * (TILE * V) + values[:, None] * TILE + offsets[None, :])
        weights = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decays(summed, True, TILE)
        out = tl.dot(q, tl.trans(before), input_precision=PRECISION) * tl.exp(summed)[:, None]
        out = tl.dot(weights.to(q.dtype), tl.trans(added), out, input_precision=PRECISION)
        out_ptrs = out_ptr + (first.to(tl.int64) * H + head) * V + offsets[:, None] * (H * V) + values[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)
