"""Sampling when each rank has the logits of a part of the vocabulary: what ranks exchange is a score and an id a row.

The noise is keyed by the token id of the whole vocabulary, and a maximum is the same however the vocabulary is cut: all
ranks find the token that one rank would have found, and append it to their own tables. Only for rows that allow
everything: a threshold (top-k, top-p, min-p) needs the logits of all.

Shape suffixes: R rows of a step, V columns of this rank, K tiles of them, N rows that sample, P ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.noise import gumbel_reference
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.sample import (
    GREEDY_BELOW,
    TokenRing,
    append_reference,
    check_rows,
    launch_append,
    launch_scores,
)
from tercet.triton_kernels.slot_table import SlotTable


@dataclass(frozen=True)
class VocabShard:
    """Which token ids a rank's columns are, and how its ranks hear of each other."""

    first: int
    vocab_size: int
    """Of all ranks; columns beyond it are padding."""
    gather: Callable[[Tensor], Tensor]
    """Every rank's tensor, stacked: [...] -> [P, ...], int32. Graph-safe where sampling is to be."""

    def end(self, num_columns: int) -> int:
        """The token id after the last of this rank."""
        return max(self.first, min(self.first + num_columns, self.vocab_size))


@triton.jit
def _best_tile_kernel(scores_ptr, ids_ptr, best_ptr, none, K: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """Grid (R,): one program finds the best tile of its row and writes the score's bits and the id side by side."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK_K)
    scores = tl.load(scores_ptr + row * K + tile, mask=tile < K, other=float("-inf"))
    ids = tl.load(ids_ptr + row * K + tile, mask=tile < K, other=none)
    top = tl.max(scores)
    tl.store(best_ptr + row * 2, top.to(tl.int32, bitcast=True))
    tl.store(best_ptr + row * 2 + 1, tl.min(tl.where(scores == top, ids, none)))


def sample_shard(
    logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, shard: VocabShard
) -> Tensor:
    """As `sample` with all columns of all ranks, for rows that allow everything: int32 [R], the same on every rank."""
    R, _ = check_rows(logits_RV, slots_R, positions_R, table)
    if not use_kernels(logits_RV):
        return sample_shard_reference(logits_RV, slots_R, positions_R, table, shard)
    places_1R = torch.empty(1, R, dtype=torch.int32, device=logits_RV.device)
    turn_1 = torch.zeros(1, dtype=torch.int32, device=logits_RV.device)
    sample_shard_into(TokenRing(places_1R, turn_1), logits_RV, slots_R, positions_R, table, shard)
    return places_1R[0]


def sample_shard_into(
    ring: TokenRing, logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, shard: VocabShard
) -> None:
    """As `sample_shard`, with kernels only: the tokens go into the next place of the ring."""
    R, V = check_rows(logits_RV, slots_R, positions_R, table)
    if not R:
        return
    end = shard.end(V)
    scores_RK, ids_RK = launch_scores(logits_RV, slots_R, positions_R, table, ring, None, shard.first, end)
    K = scores_RK.shape[1]
    best_R2 = torch.empty(R, 2, dtype=torch.int32, device=logits_RV.device)
    _best_tile_kernel[(R,)](
        scores_RK, ids_RK, best_R2, shard.vocab_size - 1, K=K, BLOCK_K=triton.next_power_of_2(K), num_warps=1,
        **overlap_options(logits_RV),
    )  # fmt: skip
    best_RP2 = shard.gather(best_R2).transpose(0, 1)
    scores_RP = best_RP2.view(torch.float32)[..., 0]
    launch_append(scores_RP, best_RP2[..., 1], slots_R, positions_R, table, ring, shard.vocab_size)


def sample_shard_reference(
    logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable, shard: VocabShard
) -> Tensor:
    """The same in PyTorch. Every rank takes part, with the same rows."""
    token_ids_R = torch.full_like(positions_R, -1)
    rows_N = (positions_R >= 0).nonzero().squeeze(1)
    if not len(rows_N):
        return token_ids_R
    slots_N, positions_N = slots_R[rows_N].long(), positions_R[rows_N]
    first, end = shard.first, shard.end(logits_RV.shape[1])
    # A column of nothing, so that a rank with padding alone has an answer.
    scores_NV = logits_RV.new_full((len(rows_N), end - first + 1), float("-inf"), dtype=torch.float32)
    scores_NV[:, :-1] = logits_RV[rows_N, : end - first]
    stop_ids_NE = table.stop_ids_SE[slots_N].long() - first
    early_N1 = (positions_N < table.min_length_S[slots_N])[:, None]
    banned_NE = early_N1 & (stop_ids_NE >= 0) & (stop_ids_NE < end - first)
    scores_NV.scatter_(1, torch.where(banned_NE, stop_ids_NE, end - first), float("-inf"))
    random_N = (table.temperature_S[slots_N] >= GREEDY_BELOW).nonzero().squeeze(1)
    if len(random_N):
        slots = slots_N[random_N]
        noise = gumbel_reference(table.seed_S[slots], positions_N[random_N], end - first + 1, first)
        scores_NV[random_N] = scores_NV[random_N] * table.temperature_S[slots].reciprocal()[:, None] + noise
    scores_N, best_N = scores_NV.max(1)
    best_N2 = torch.stack((scores_N.view(torch.int32), best_N.int() + first), 1)
    best_PN2 = shard.gather(best_N2)
    scores_PN, ids_PN = best_PN2.view(torch.float32)[..., 0], best_PN2[..., 1]
    none = ids_PN.new_tensor(shard.vocab_size - 1)
    winner_N = torch.where(scores_PN == scores_PN.amax(0), ids_PN, none).amin(0).clamp_(max=shard.vocab_size - 1)
    token_ids_R[rows_N] = winner_N
    append_reference(winner_N, slots_N, positions_N, table)
    return token_ids_R
