"""Kernels of Mamba-2's rule in tiles of 64 tokens (`mamba_prefill.py`): states from tile to tile, then answers.

Between them lies, by tile and head, in scratch: the state before the tile, transposed. Places of tiles are as in
`delta_tiles.py`.
"""

import triton
import triton.language as tl

from tercet.triton_kernels.delta_tiles import decays, first_place, tokens_of_place
from tercet.triton_kernels.overlap import let_next_start, wait_for_previous


@triton.jit
def _load_steps(gates_ptr, first, offsets, inside, head, H: tl.constexpr):
    """Of a tile's tokens: log decays summed up to each, and time steps; of none, nothing more."""
    gates_ptrs = gates_ptr + first.to(tl.int64) * (2 * H) + offsets * (2 * H) + head
    summed = tl.cumsum(tl.load(gates_ptrs, mask=inside, other=0.0), 0)
    return summed, tl.load(gates_ptrs + H, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def carry_tiles_kernel(
    qkv_ptr, gates_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, before_ptr, states_ptr, S,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (V / BLOCK_V times D / BLOCK_D, H, chunks): one program owns a part of a head's state through a whole chunk.

    The last of V may have less than BLOCK_V. What a tile adds does not depend on the state, so parts of it need not
    know of each other.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    head, chunk = tl.program_id(1), tl.program_id(2)
    slot = tl.load(chunk_slots_ptr + chunk).to(tl.int64)
    begin, end = tl.load(query_starts_ptr + chunk), tl.load(query_starts_ptr + chunk + 1)
    if begin < end:
        C: tl.constexpr = 2 * K * D + H * V
        PARTS: tl.constexpr = D // BLOCK_D
        offsets = tl.arange(0, TILE)
        keys = tl.program_id(0) % PARTS * BLOCK_D + tl.arange(0, BLOCK_D)
        values = tl.program_id(0) // PARTS * BLOCK_V + tl.arange(0, BLOCK_V)
        real = values < V
        kept = (slot >= 0) & (slot < S) & real[:, None]
        states_ptrs = states_ptr + (slot * H + head) * (D * V) + keys[None, :] * V + values[:, None]
        started = kept & (tl.load(chunk_starts_ptr + chunk) > 0)
        state = tl.load(states_ptrs, mask=started & (keys[None, :] >= 0), other=0.0).to(tl.float32)
        k_ptrs = qkv_ptr + (K + head // (H // K)) * D + offsets[:, None] * C + keys[None, :]
        v_ptrs = qkv_ptr + 2 * K * D + head * V + offsets[:, None] * C + values[None, :]
        place = first_place(begin, chunk, TILE)
        for first in tl.range(begin, end, TILE, num_stages=STAGES):
            inside = first + offsets < end
            row = tl.cast(first, tl.int64) * C
            k = tl.load(k_ptrs + row, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptrs + row, mask=inside[:, None] & real[None, :], other=0.0)
            summed, steps = _load_steps(gates_ptr, tl.cast(first, tl.int32), offsets, inside, head, H)
            last = tl.sum(tl.where(offsets == TILE - 1, summed, 0.0), 0)
            scratch = place.to(tl.int64) * H + head
            before_ptrs = before_ptr + scratch * (D * V) + values[:, None] * D + keys[None, :]
            tl.store(before_ptrs, state.to(before_ptr.dtype.element_ty), mask=real[:, None])
            left = v.to(tl.float32) * (steps * tl.exp(last - summed))[:, None]
            state = tl.dot(tl.trans(left.to(k.dtype)), k, state * tl.exp(last), input_precision=PRECISION)
            place += 1
        tl.store(states_ptrs, state.to(states_ptr.dtype.element_ty), mask=kept & (keys[None, :] >= 0))


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["num_chunks"])
def answer_mamba_tiles_kernel(
    qkv_ptr, gates_ptr, skip_ptr, query_starts_ptr, before_ptr, out_ptr, num_chunks,
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
        inside = first + offsets < end
        rows_ptr = qkv_ptr + first.to(tl.int64) * C + offsets[:, None] * C
        q_ptrs = rows_ptr + head // (H // K) * D + keys[None, :]
        q = tl.load(q_ptrs, mask=inside[:, None], other=0.0)
        k = tl.load(q_ptrs + K * D, mask=inside[:, None], other=0.0)
        v_ptrs = rows_ptr + 2 * K * D + head * V + values[None, :]
        real = values < V
        v = tl.load(v_ptrs, mask=inside[:, None] & real[None, :], other=0.0).to(tl.float32)
        summed, steps = _load_steps(gates_ptr, first, offsets, inside, head, H)
        scratch = place.to(tl.int64) * H + head
        before_ptrs = before_ptr + scratch * (D * V) + values[:, None] * D + keys[None, :]
        before = tl.load(before_ptrs, mask=real[:, None], other=0.0)
        weights = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decays(summed, True, TILE)
        out = tl.dot(q, tl.trans(before), input_precision=PRECISION) * tl.exp(summed)[:, None]
        added = (v * steps[:, None]).to(q.dtype)
        out = tl.dot(weights.to(q.dtype), added, out, input_precision=PRECISION) + tl.load(skip_ptr + head) * v
        out_ptrs = out_ptr + (first.to(tl.int64) * H + head) * V + offsets[:, None] * (H * V) + values[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & real[None, :])
