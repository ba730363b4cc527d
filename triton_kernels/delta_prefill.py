"""The gated delta rule of prefill chunks, in tiles of 64 tokens: within a tile by products, from tile to tile by state.

Of a tile with keys k, values v, betas b, and log decays summed up to each token g, A is the part below the diagonal of
b_i (k_i k_j) exp(g_i - g_j). What its tokens add to the state, each for its key, are then the rows of
(I + A)^-1 b (v - exp(g) k S), S the state before the tile. Chunks begin at multiples of 64 positions: so a token's
tile, and with it its bits, are the same however a prompt is cut.

Shape suffixes: T tokens of chunks, C channels (`delta_heads.py`) or chunks, S slots, H value heads, D numbers of a key,
V of a value.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.triton_kernels.delta_heads import DeltaHeads, check_chunks, check_out, check_states
from tercet.triton_kernels.delta_tiles import answer_tiles_kernel, scan_tiles_kernel, solve_tiles_kernel
from tercet.triton_kernels.dispatch import has_little_shared_memory, use_kernels
from tercet.triton_kernels.overlap import overlap_options
from tercet.triton_kernels.tiles import next_power_of_2

TILE = 64
_BLOCK, _LEVELS = 16, 2
"""Of the triangular inverse: TILE is _BLOCK * 2 ** _LEVELS."""
_SOLVE_REGISTERS = 168
"""A thread has, so that three programs share a multiprocessor: each waits for itself most of its time."""


def delta_prefill(
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    states_SHDV: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    *,
    num_key_heads: int,
    out_THV: Tensor,
) -> None:
    """Write `out_THV` and the new state of each chunk's slot, from the tokens of chunks alone. Graph-safe.

    A chunk that starts at position 0 begins from zeros, whatever lies in its slot. Empty chunks change nothing; rows of
    no chunk's token stay as they are.
    """
    heads = check_states(qkv_TC, gates_T2H, states_SHDV, num_key_heads)
    check_out(out_THV, qkv_TC, heads)
    check_chunks(chunk_slots_C, chunk_starts_C, query_starts_C1, qkv_TC)
    chunks = chunk_slots_C, chunk_starts_C, query_starts_C1
    if not use_kernels(qkv_TC):
        delta_prefill_reference(qkv_TC, gates_T2H, states_SHDV, *chunks, heads=heads, out_THV=out_THV)
    elif qkv_TC.shape[0] and chunk_slots_C.shape[0]:
        _launch(qkv_TC, gates_T2H, states_SHDV, *chunks, heads, out_THV)


def _launch(
    qkv_TC: Tensor, gates_T2H: Tensor, states_SHDV: Tensor, chunk_slots_C: Tensor, chunk_starts_C: Tensor,
    query_starts_C1: Tensor, heads: DeltaHeads, out_THV: Tensor,
) -> None:  # fmt: skip
    """Three launches: tiles by themselves, tile after tile, and what they answer."""
    K, H, D, V = heads
    num_chunks = chunk_slots_C.shape[0]
    places = qkv_TC.shape[0] // TILE + num_chunks  # of tiles: no more, wherever chunks begin
    keys, values = qkv_TC.new_empty(places, H, TILE, D), qkv_TC.new_empty(places, H, V, TILE)
    before, summed = qkv_TC.new_empty(places, H, V, D), gates_T2H.new_empty(places, H, TILE)
    wide = qkv_TC.dtype == torch.float32
    # Three products of halves of fp32 each: nearly all its digits, and as fast as products of nothing else are.
    how = {"K": K, "H": H, "D": D, "V": V, "TILE": TILE, "PRECISION": "tf32x3", "num_warps": 8 if wide else 4}
    how |= overlap_options(qkv_TC)
    find = {"BLOCK_C": next_power_of_2(num_chunks)}
    solve_tiles_kernel[(H, places)](
        qkv_TC, gates_T2H, query_starts_C1, summed, keys, values, num_chunks, BLOCK=_BLOCK, LEVELS=_LEVELS,
        INVERSE="tf32x3" if wide else "halves", maxnreg=None if wide else _SOLVE_REGISTERS, **how, **find,
    )  # fmt: skip
    block_v = min(V, 16 if wide else 64)
    stages = 1 if wide else 2 if has_little_shared_memory(qkv_TC.device) else 4
    scan_tiles_kernel[(V // block_v, H, num_chunks)](
        qkv_TC, chunk_slots_C, chunk_starts_C, query_starts_C1, summed, keys, values, before, states_SHDV,
        states_SHDV.shape[0], BLOCK_V=block_v, STAGES=stages, **how,
    )  # fmt: skip
    block_v = min(V, 32 if wide else 64)
    answer_tiles_kernel[(V // block_v, H, places)](
        qkv_TC, query_starts_C1, summed, values, before, out_THV, num_chunks, BLOCK_V=block_v, **how, **find
    )  # fmt: skip


def delta_prefill_reference(
    qkv_TC: Tensor,
    gates_T2H: Tensor,
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
    walk_tiles(qkv_TC, gates_T2H, states_SHDV, *chunks, out_THV, partial(_tile_reference, heads))


def walk_tiles(
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    states_SHDV: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    out_THV: Tensor,
    of_tile: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    """A rule of chunks, tile by tile, all of them of 64 rows: then a row's sums are of one order, whatever is beside
    it. `of_tile`: from channels in fp32, gates in fp64 and the state before, the state behind a tile and its answers,
    [H, TILE, V]."""
    begins = query_starts_C1.tolist()
    for chunk, (slot, start) in enumerate(zip(chunk_slots_C.tolist(), chunk_starts_C.tolist(), strict=True)):
        begin, end = begins[chunk : chunk + 2]
        if begin >= end:
            continue
        kept = 0 <= slot < states_SHDV.shape[0]
        state_HDV = states_SHDV.new_zeros(states_SHDV.shape[1:], dtype=torch.float32)
        if kept and start > 0:
            state_HDV = states_SHDV[slot].float()
        for first in range(begin, end, TILE):
            tokens = slice(first, min(first + TILE, end))
            padding = 0, 0, 0, TILE - (tokens.stop - first)
            qkv, gates = F.pad(qkv_TC[tokens].float(), padding), F.pad(gates_T2H[tokens].double(), padding)
            state_HDV, out_HTV = of_tile(qkv, gates, state_HDV)
            out_THV[tokens] = out_HTV[:, : tokens.stop - first].transpose(0, 1)
        if kept:
            states_SHDV[slot] = state_HDV


def _tile_reference(heads: DeltaHeads, qkv_TC: Tensor, gates_T2H: Tensor, state_HDV: Tensor) -> tuple[Tensor, Tensor]:
    """The state behind a tile, and its answers."""
    q_HTD, k_HTD, v_HTV = split_heads(qkv_TC, heads)
    log_decays_HT, betas_HT = gates_T2H.T.chunk(2)
    decays_HTT, kept_HT1, left_HT1 = decays_in_tile(log_decays_HT)
    betas_HT1 = betas_HT.float()[:, :, None]
    system_HTT = betas_HT1 * (k_HTD @ k_HTD.transpose(1, 2)) * decays_HTT
    missing_HTV = betas_HT1 * (v_HTV - kept_HT1 * (k_HTD @ state_HDV))
    added_HTV = torch.linalg.solve_triangular(system_HTT, missing_HTV, upper=False, unitriangular=True)
    return advance_by_tile(state_HDV, q_HTD, k_HTD, added_HTV, decays_HTT, kept_HT1, left_HT1)


def split_heads(qkv_TC: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Of a tile, queries and keys of each value head, and values."""
    K, H, D, V = heads
    q, k, v = qkv_TC.split((K * D, K * D, H * V), 1)
    q_HTD, k_HTD = (x.view(TILE, K, D).transpose(0, 1).repeat_interleave(H // K, 0) for x in (q, k))
    return q_HTD, k_HTD, v.view(TILE, H, V).transpose(0, 1)


def decays_in_tile(log_decays_HT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From column's token to row's, from what is before the tile to each token, and from each to the tile's end."""
    summed_HT = log_decays_HT.cumsum(1)
    above = torch.ones(TILE, TILE, dtype=torch.bool, device=log_decays_HT.device).triu(1)
    # Where it would be the exponential of something positive nobody looks.
    decays_HTT = (summed_HT[:, :, None] - summed_HT[:, None]).masked_fill(above, float("-inf")).exp().float()
    return decays_HTT, summed_HT.exp().float()[:, :, None], decays_HTT[:, -1, :, None]


def advance_by_tile(
    state_HDV: Tensor, q_HTD: Tensor, k_HTD: Tensor, added_HTV: Tensor, decays_HTT: Tensor, kept_HT1: Tensor,
    left_HT1: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state behind a tile whose tokens add so much for their keys, and what its queries find."""
    out_HTV = kept_HT1 * (q_HTD @ state_HDV) + (q_HTD @ k_HTD.transpose(1, 2) * decays_HTT) @ added_HTV
    return kept_HT1[:, -1:] * state_HDV + (left_HT1 * k_HTD).transpose(1, 2) @ added_HTV, out_HTV
