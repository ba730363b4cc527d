"""Mamba-2's rule of prefill chunks, in tiles of 64 tokens: within a tile by products, from tile to tile by state.

Of a tile with queries q, keys k, values v, time steps t, and log decays summed up to each token g, a token i finds
exp(g_i) q_i S, S the state before the tile, and of each token j up to itself (q_i k_j) exp(g_i - g_j) t_j v_j. Chunks
begin at multiples of 64 positions: so a token's tile, and with it its bits, are the same however a prompt is cut.

Shape suffixes: T tokens of chunks, C channels (`delta_heads.py`) or chunks, S slots, H value heads, D numbers of a key,
V of a value.
"""

from functools import partial

import torch
from torch import Tensor

from tercet.triton_kernels.delta_heads import DeltaHeads, check_chunks, check_of_heads, check_out, check_states
from tercet.triton_kernels.delta_prefill import TILE, advance_by_tile, decays_in_tile, split_heads, walk_tiles
from tercet.triton_kernels.dispatch import has_little_shared_memory, use_kernels
from tercet.triton_kernels.mamba_tiles import answer_mamba_tiles_kernel, carry_tiles_kernel
from tercet.triton_kernels.overlap import overlap_options
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_CARRIED = 64
"""Numbers of a key of one program that carries a state: what has few heads has more programs so."""


def mamba_prefill(
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    skip_H: Tensor,
    states_SHDV: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    *,
    num_key_heads: int,
    out_THV: Tensor,
) -> None:
    """Write `out_THV` and the new state of each chunk's slot, from the tokens of chunks alone. fp32 sums; graph-safe.

    `gates_T2H`: log decays, then time steps; `skip_H` as of `delta_decode`. A chunk that starts at position 0 begins
    from zeros, whatever lies in its slot. Empty chunks change nothing; rows of no chunk's token stay as they are.
    """
    heads = check_states(qkv_TC, gates_T2H, states_SHDV, num_key_heads, corrects=False)
    check_of_heads("skip", skip_H, heads.H, states_SHDV)
    check_out(out_THV, qkv_TC, heads)
    check_chunks(chunk_slots_C, chunk_starts_C, query_starts_C1, qkv_TC)
    chunks = chunk_slots_C, chunk_starts_C, query_starts_C1
    if not use_kernels(qkv_TC):
        mamba_prefill_reference(qkv_TC, gates_T2H, skip_H, states_SHDV, *chunks, heads=heads, out_THV=out_THV)
    elif qkv_TC.shape[0] and chunk_slots_C.shape[0]:
        _launch(qkv_TC, gates_T2H, skip_H, states_SHDV, *chunks, heads, out_THV)


def _launch(
    qkv_TC: Tensor, gates_T2H: Tensor, skip_H: Tensor, states_SHDV: Tensor, chunk_slots_C: Tensor,
    chunk_starts_C: Tensor, query_starts_C1: Tensor, heads: DeltaHeads, out_THV: Tensor,
) -> None:  # fmt: skip
    """Two launches: states from tile to tile, and what tiles answer."""
    K, H, D, V = heads
    num_chunks = chunk_slots_C.shape[0]
    places = qkv_TC.shape[0] // TILE + num_chunks  # of tiles: no more, wherever chunks begin
    before = qkv_TC.new_empty(places, H, V, D)
    wide = qkv_TC.dtype == torch.float32
    # Three products of halves of fp32 each: nearly all its digits, and as fast as products of nothing else are.
    how = {"K": K, "H": H, "D": D, "V": V, "TILE": TILE, "PRECISION": "tf32x3", "num_warps": 8 if wide else 4}
    how |= overlap_options(qkv_TC)
    # Not the largest that divides V: products of 16 columns read beyond their shared memory (Triton 3.7.1).
    block_v, block_d = min(next_power_of_2(V), 32 if wide else 64), min(D, _CARRIED)
    stages = 1 if wide else 2 if has_little_shared_memory(qkv_TC.device) else 4
    carry_tiles_kernel[(cdiv(V, block_v) * (D // block_d), H, num_chunks)](
        qkv_TC, gates_T2H, chunk_slots_C, chunk_starts_C, query_starts_C1, before, states_SHDV, states_SHDV.shape[0],
        BLOCK_D=block_d, BLOCK_V=block_v, STAGES=stages, **how,
    )  # fmt: skip
    answer_mamba_tiles_kernel[(cdiv(V, block_v), H, places)](
        qkv_TC, gates_T2H, skip_H, query_starts_C1, before, out_THV, num_chunks,
        BLOCK_V=block_v, BLOCK_C=next_power_of_2(num_chunks), **how,
    )  # fmt: skip


def mamba_prefill_reference(
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    skip_H: Tensor,
    states_SHDV: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    *,
    heads: DeltaHeads,
    out_THV: Tensor,
) -> None:
    """The same, by `walk_tiles`."""
    chunks = chunk_slots_C, chunk_starts_C, query_starts_C1
    walk_tiles(qkv_TC, gates_T2H, states_SHDV, *chunks, out_THV, partial(_tile_reference, heads, skip_H))


def _tile_reference(
    heads: DeltaHeads, skip_H: Tensor, qkv_TC: Tensor, gates_T2H: Tensor, state_HDV: Tensor
) -> tuple[Tensor, Tensor]:
    """The state behind a tile, and its answers."""
    q_HTD, k_HTD, v_HTV = split_heads(qkv_TC, heads)
    log_decays_HT, steps_HT = gates_T2H.T.chunk(2)
    added_HTV = steps_HT.float()[:, :, None] * v_HTV
    state_HDV, out_HTV = advance_by_tile(state_HDV, q_HTD, k_HTD, added_HTV, *decays_in_tile(log_decays_HT))
    return state_HDV, out_HTV + skip_H[:, None, None] * v_HTV
