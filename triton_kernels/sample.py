"""From logits to the next token of every row, and the token's way into the slot table.

token = argmax over the allowed set of logit / temperature + Gumbel(seed, position, token id): a draw from the softmax
over that set (`allowed.py`, `noise.py`). Temperature 0 takes the largest logit. Equal scores go to the lowest id. Stop
ids are no candidates at positions below the slot's min_length. A logit that is no number is never the best; a row of
nothing else gives id 0.

Shape suffixes: R rows of a step, V vocabulary, K tiles of the vocabulary, N rows of some kind, E stop ids of a slot.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.allowed import (
    EVERYTHING,
    launch_thresholds,
    masked_logits,
    threshold_reference,
)
from tercet.triton_kernels.candidates import order_key
from tercet.triton_kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.noise import gumbel, gumbel_reference, row_keys
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, SlotTable
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken for 0: dividing by them would leave the range of fp32."""


@dataclass(frozen=True)
class TokenRing:
    """Places for the tokens of steps in flight, in memory that the host can read. Each step moves on by one place."""

    places_KR: Tensor
    """int32, pinned: the device writes it across the bus."""
    turn_1: Tensor
    """int32 on the device: the place of the last step."""


_BLOCK = 1024
_SIZE_NAMES = ["S", "L", "place_size", "row_stride", "tile_stride"]
_SIZES = {"do_not_specialize": _SIZE_NAMES, "do_not_specialize_on_alignment": _SIZE_NAMES}


@triton.jit(do_not_specialize=["S", "depth"], do_not_specialize_on_alignment=["S", "depth"])
def _score_tiles_kernel(
    logits_ptr, slots_ptr, positions_ptr, threshold_ptr, temperature_ptr, seed_ptr, min_length_ptr, stop_ids_ptr,
    scores_ptr, ids_ptr, turn_ptr, smallest_temperature, S, depth,
    STRIDE: tl.constexpr, FIRST: tl.constexpr, V: tl.constexpr, E: tl.constexpr, THRESHOLDS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, K): one program finds the best score among TILE tokens of one row, and its lowest id.

    Columns are the token ids from FIRST up to V. A maximum is the same however the vocabulary is cut: tiles may follow
    the batch size. Without THRESHOLDS every row allows everything. The first program also moves the ring on.
    """
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    tile = tl.program_id(1)
    if (row == 0) & (tile == 0):
        tl.store(turn_ptr, (tl.load(turn_ptr) + 1) % depth)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    if (position >= 0) & (slot >= 0) & (slot < S):
        temperature = tl.load(temperature_ptr + slot)
        banned = position < tl.load(min_length_ptr + slot)
        inverse_temperature = 1.0 / tl.maximum(temperature, smallest_temperature)
        threshold = tl.load(threshold_ptr + row) if THRESHOLDS else EVERYTHING
        key_1, key_2 = row_keys(tl.load(seed_ptr + slot), position)
        row_ptr = logits_ptr + row.to(tl.int64) * STRIDE - FIRST
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_ids = FIRST + tile * TILE + tl.arange(0, BLOCK)
        for start in range(0, TILE, BLOCK):
            token_ids = FIRST + tile * TILE + start + tl.arange(0, BLOCK)
            score = masked_logits(row_ptr, token_ids, stop_ids_ptr + slot * E, banned, V, E)
            if temperature >= smallest_temperature:
                some = True
                if threshold > EVERYTHING:
                    score = tl.where(order_key(score) >= threshold, score, float("-inf"))
                    some = tl.max(score) > float("-inf")  # few blocks have any
                if some:
                    score = tl.fma(score, inverse_temperature, gumbel(token_ids, key_1, key_2))
            better = score > best
            best = tl.where(better, score, best)
            best_ids = tl.where(better, token_ids, best_ids)
        top = tl.max(best)
        tl.store(scores_ptr + row * tl.num_programs(1) + tile, top)
        best_id = tl.min(tl.where(best == top, best_ids, V - 1))
        tl.store(ids_ptr + row * tl.num_programs(1) + tile, best_id)


@triton.jit(**_SIZES)
def _append_kernel(
    scores_ptr, ids_ptr, slots_ptr, positions_ptr, token_ids_ptr, length_ptr, max_length_ptr, min_length_ptr, done_ptr,
    stop_ids_ptr, places_ptr, turn_ptr, S, L, place_size, row_stride, tile_stride,
    K: tl.constexpr, BLOCK_K: tl.constexpr, V: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R,): one program finds the best tile of its row and appends the token to the row's slot and to the ring."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    token = tl.full([], -1, tl.int32)
    if (position >= 0) & (position < L) & (slot >= 0) & (slot < S):
        tile = tl.arange(0, BLOCK_K)
        offset = row * row_stride + tile * tile_stride
        scores = tl.load(scores_ptr + offset, mask=tile < K, other=float("-inf"))
        ids = tl.load(ids_ptr + offset, mask=tile < K, other=V - 1)
        token = tl.min(tl.where(scores == tl.max(scores), ids, V - 1))
        tl.store(token_ids_ptr + slot.to(tl.int64) * L + position, token)
        tl.store(length_ptr + slot, position + 1)
        stop_ids = tl.load(stop_ids_ptr + slot * E + tl.arange(0, E))
        stopped = (tl.sum((stop_ids == token).to(tl.int32)) > 0) & (position >= tl.load(min_length_ptr + slot))
        ended = position + 1 >= tl.minimum(tl.load(max_length_ptr + slot), L)
        if stopped | ended:
            tl.store(done_ptr + slot, 1)
    tl.store(places_ptr + tl.load(turn_ptr) * place_size + row, token)


def sample(logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
    """Sample each row's token for its position and append it to its slot: int32 [R], -1 where the position is negative.

    Mutates the table: token ids, length, and `done` on a stop id or at max_length. A slot is in one row at most.
    Rows of `logits_RV` may lie apart; fp32 inside; graph-safe.
    """
    R, _ = check_rows(logits_RV, slots_R, positions_R, table)
    if not use_kernels(logits_RV):
        return sample_reference(logits_RV, slots_R, positions_R, table)
    places_1R = torch.empty(1, R, dtype=torch.int32, device=logits_RV.device)
    turn_1 = torch.zeros(1, dtype=torch.int32, device=logits_RV.device)
    _launch(logits_RV, slots_R, positions_R, table, TokenRing(places_1R, turn_1))
    return places_1R[0]


def sample_into(ring: TokenRing, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> None:
    """As `sample`, with kernels only: the tokens go into the next place of the ring. Graph-safe."""
    R, _ = check_rows(logits_RV, slots_R, positions_R, table)
    check_dtype("places", ring.places_KR, torch.int32)
    check_contiguous("places", ring.places_KR)
    if ring.places_KR.ndim != 2 or ring.places_KR.shape[1] < R:
        raise ValueError(f"places: got shape {list(ring.places_KR.shape)}, wanted [*, {R} or more]")
    check_shape("turn", ring.turn_1, 1)
    check_dtype("turn", ring.turn_1, torch.int32)
    _launch(logits_RV, slots_R, positions_R, table, ring)


def _launch(logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, ring: TokenRing) -> None:
    R, V = logits_RV.shape
    if not R:
        return
    thresholds_R = launch_thresholds(logits_RV, slots_R, positions_R, table, GREEDY_BELOW)
    scores_RK, ids_RK = launch_scores(logits_RV, slots_R, positions_R, table, ring, thresholds_R, 0, V)
    launch_append(scores_RK, ids_RK, slots_R, positions_R, table, ring, V)


def launch_scores(
    logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, ring: TokenRing,
    thresholds_R: Tensor | None, first: int, end: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Move the ring on; best score and its id for each row and tile of the token ids `first` to `end`: [R, K] each."""
    R = logits_RV.shape[0]
    tile = _BLOCK if R <= 16 else 8 * _BLOCK
    num_tiles = max(1, cdiv(end - first, tile))
    scores_RK = torch.empty(R, num_tiles, dtype=torch.float32, device=logits_RV.device)
    ids_RK = torch.empty(R, num_tiles, dtype=torch.int32, device=logits_RV.device)
    _score_tiles_kernel[(R, num_tiles)](
        logits_RV, slots_R, positions_R, thresholds_R, table.temperature_S, table.seed_S, table.min_length_S,
        table.stop_ids_SE, scores_RK, ids_RK, ring.turn_1, GREEDY_BELOW, table.length_S.shape[0],
        ring.places_KR.shape[0], STRIDE=logits_RV.stride(0), FIRST=first, V=end, E=MAX_STOP_IDS,
        THRESHOLDS=thresholds_R is not None, TILE=tile, BLOCK=_BLOCK, num_warps=4, **overlap_options(logits_RV),
    )  # fmt: skip
    return scores_RK, ids_RK


def launch_append(
    scores_RK: Tensor, ids_RK: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, ring: TokenRing,
    vocab_size: int,
) -> None:  # fmt: skip
    """Append the id of each row's best score, the lowest of equals. Both tensors have the same strides."""
    R, K = scores_RK.shape
    S, L = table.token_ids_SL.shape
    _append_kernel[(R,)](
        scores_RK, ids_RK, slots_R, positions_R, table.token_ids_SL, table.length_S, table.max_length_S,
        table.min_length_S, table.done_S, table.stop_ids_SE, ring.places_KR, ring.turn_1, S, L,
        ring.places_KR.shape[1], *scores_RK.stride(), K=K, BLOCK_K=next_power_of_2(K), V=vocab_size,
        E=MAX_STOP_IDS, num_warps=warps_for(next_power_of_2(K)), **overlap_options(scores_RK),
    )  # fmt: skip


def warps_for(num_tiles: int) -> int:
    """Warps of a program that compares so many tiles, a power of two: a thread holds 8 of them, or 16 of the most."""
    return max(1, min(8, num_tiles // 256))


def sample_reference(logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
    """The same in PyTorch. Rows of each kind cost what their kind needs."""
    token_ids_R = torch.full_like(positions_R, -1)
    rows_N = (positions_R >= 0).nonzero().squeeze(1)
    if not len(rows_N):
        return token_ids_R
    slots_N, positions_N = slots_R[rows_N].long(), positions_R[rows_N]
    logits_NV = logits_RV if len(rows_N) == len(logits_RV) else logits_RV[rows_N]
    logits_NV = _without_banned(logits_NV, slots_N, positions_N, table)
    best_N = logits_NV.argmax(1)
    if logits_NV.gather(1, best_N[:, None]).isnan().any():  # which argmax takes for the largest
        logits_NV = logits_NV.masked_fill(logits_NV.isnan(), float("-inf"))
        best_N = logits_NV.argmax(1)
    random_N = (table.temperature_S[slots_N] >= GREEDY_BELOW).nonzero().squeeze(1)
    if len(random_N):
        best_N[random_N] = _draw(logits_NV[random_N], slots_N[random_N], positions_N[random_N], table)
    token_ids_R[rows_N] = best_N.int()
    append_reference(best_N.int(), slots_N, positions_N, table)
    return token_ids_R


def _without_banned(logits_NV: Tensor, slots_N: Tensor, positions_N: Tensor, table: SlotTable) -> Tensor:
    stop_ids_NE = table.stop_ids_SE[slots_N].long()
    early_N = positions_N < table.min_length_S[slots_N]
    banned_NE = early_N[:, None] & (stop_ids_NE >= 0) & (stop_ids_NE < logits_NV.shape[1])
    if not banned_NE.any():
        return logits_NV
    rows, index = banned_NE.nonzero().unbind(1)
    return logits_NV.index_put((rows, stop_ids_NE[rows, index]), logits_NV.new_tensor(float("-inf")))


def _draw(logits_NV: Tensor, slots_N: Tensor, positions_N: Tensor, table: SlotTable) -> Tensor:
    temperature_N = table.temperature_S[slots_N]
    top_k_N, top_p_N, min_p_N = table.top_k_S[slots_N], table.top_p_S[slots_N], table.min_p_S[slots_N]
    filtered_N = ((top_k_N > 0) | (top_p_N < 1) | (min_p_N > 0)).nonzero().squeeze(1)
    scaled_NV = logits_NV.float() * temperature_N.reciprocal()[:, None]
    if len(filtered_N):
        some_NV, parameters = logits_NV[filtered_N], (temperature_N, top_k_N, top_p_N, min_p_N)
        threshold_N = threshold_reference(some_NV, *(parameter[filtered_N] for parameter in parameters))
        scaled_NV[filtered_N] = scaled_NV[filtered_N].masked_fill_(some_NV < threshold_N[:, None], float("-inf"))
    return scaled_NV.add_(gumbel_reference(table.seed_S[slots_N], positions_N, logits_NV.shape[1])).argmax(1)


def append_reference(token_ids_N: Tensor, slots_N: Tensor, positions_N: Tensor, table: SlotTable) -> None:
    """Append one token to each slot."""
    table.token_ids_SL[slots_N, positions_N.long()] = token_ids_N
    table.length_S[slots_N] = positions_N + 1
    stopped_N = (table.stop_ids_SE[slots_N] == token_ids_N[:, None]).any(1)
    stopped_N &= positions_N >= table.min_length_S[slots_N]
    ended_N = positions_N + 1 >= table.max_length_S[slots_N].clamp(max=table.token_ids_SL.shape[1])
    table.done_S[slots_N] |= (stopped_N | ended_N).int()


def check_rows(logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> tuple[int, int]:
    """What every way to sample asks of its rows; returns R and V."""
    check_dtype("logits", logits_RV, *FLOATS)
    check_shape("logits", logits_RV, None, None)
    R, V = logits_RV.shape
    if R and (logits_RV.stride(1) != 1 or V < 1):
        raise ValueError(f"logits: got shape [{R}, {V}], strides {list(logits_RV.stride())}, wanted rows without gaps")
    for name, tensor in (("slots", slots_R), ("positions", positions_R)):
        check_shape(name, tensor, R)
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, logits_RV)
    check_device("table", table.length_S, logits_RV)
    return R, V
