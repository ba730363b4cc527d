"""From logits to the next token of every row, and the token's way into the slot table.

token = argmax over the allowed set of logit / temperature + Gumbel(seed, position, token id): a draw from the softmax
over that set. Temperature 0 takes the largest logit. Equal scores go to the lowest id. The allowed set is all tokens
whose scaled logit reaches a threshold: the k-th largest (top-k), then what keeps the likeliest tokens until their
probability among those reaches p (top-p), then the largest plus log min_p. Ties with the threshold are allowed.

Shape suffixes: R rows of a step, V vocabulary, N rows of some kind, E stop ids of a slot.
"""

import torch
from torch import Tensor

from tercet.triton_kernels.noise import gumbel_reference
from tercet.triton_kernels.slot_table import SlotTable

GREEDY_BELOW = 1e-5
"""Temperatures below this are taken for 0: dividing by them would leave the range of fp32."""


def sample(logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
    """Token of every row, int32 [R]; -1 where `positions_R` is negative. Mutates nothing; fp32 inside; graph-safe."""
    return sample_reference(logits_RV, slots_R, positions_R, table)


def append_tokens(token_ids_R: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> None:
    """Write each row's token at its position of the table, advance the length, and set `done` where it ends."""
    append_tokens_reference(token_ids_R, slots_R, positions_R, table)


def sample_reference(logits_RV: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> Tensor:
    """The same in PyTorch. Rows of each kind cost what their kind needs."""
    token_ids_R = torch.full_like(positions_R, -1)
    rows_N = (positions_R >= 0).nonzero().squeeze(1)
    if not len(rows_N):
        return token_ids_R
    slots_N, positions_N = slots_R[rows_N].long(), positions_R[rows_N]
    logits_NV = logits_RV if len(rows_N) == len(logits_RV) else logits_RV[rows_N]
    stop_ids_NE = table.stop_ids_SE[slots_N].long()
    banned_NE = (positions_N < table.min_length_S[slots_N])[:, None] & (stop_ids_NE >= 0)
    banned_NE &= stop_ids_NE < logits_RV.shape[1]
    if banned_NE.any():
        row_of_ban, index = banned_NE.nonzero().unbind(1)
        logits_NV = logits_NV.clone()
        logits_NV[row_of_ban, stop_ids_NE[row_of_ban, index]] = float("-inf")
    best_N = logits_NV.argmax(1)
    random_N = (table.temperature_S[slots_N] >= GREEDY_BELOW).nonzero().squeeze(1)
    if len(random_N):
        best_N[random_N] = _draw(logits_NV[random_N], slots_N[random_N], positions_N[random_N], table)
    token_ids_R[rows_N] = best_N.int()
    return token_ids_R


def _draw(logits_NV: Tensor, slots_N: Tensor, positions_N: Tensor, table: SlotTable) -> Tensor:
    scaled_NV = logits_NV.float() / table.temperature_S[slots_N][:, None]
    top_k_N, top_p_N, min_p_N = table.top_k_S[slots_N], table.top_p_S[slots_N], table.min_p_S[slots_N]
    filtered_N = ((top_k_N > 0) | (top_p_N < 1) | (min_p_N > 0)).nonzero().squeeze(1)
    if len(filtered_N):
        some_NV = scaled_NV[filtered_N]
        threshold_N = threshold_reference(some_NV, top_k_N[filtered_N], top_p_N[filtered_N], min_p_N[filtered_N])
        scaled_NV[filtered_N] = some_NV.masked_fill_(some_NV < threshold_N[:, None], float("-inf"))
    return scaled_NV.add_(gumbel_reference(table.seed_S[slots_N], positions_N, logits_NV.shape[1])).argmax(1)


def threshold_reference(scaled_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """The smallest scaled logit that each row allows: [N]. top_k 0, top_p 1 and min_p 0 allow all."""
    V = scaled_NV.shape[1]
    sorted_NV = scaled_NV.sort(dim=1, descending=True).values
    k_N = torch.where((top_k_N > 0) & (top_k_N < V), top_k_N, V).long()
    kth_N = sorted_NV.gather(1, k_N[:, None] - 1).squeeze(1)
    kept_NV = sorted_NV.double().masked_fill_(sorted_NV < kth_N[:, None], float("-inf"))
    mass_NV = kept_NV.softmax(1).cumsum(1)
    # The first index at which the mass reaches p is the number of indices before that.
    index_N = (mass_NV < top_p_N[:, None]).sum(1).clamp(max=V - 1)
    pth_N = sorted_NV.gather(1, index_N[:, None]).squeeze(1)
    pth_N = torch.where(top_p_N < 1, torch.maximum(pth_N, kth_N), kth_N)
    return torch.maximum(pth_N, sorted_NV[:, 0] + min_p_N.log())


def append_tokens_reference(token_ids_R: Tensor, slots_R: Tensor, positions_R: Tensor, table: SlotTable) -> None:
    """The same in PyTorch."""
    rows_N = positions_R >= 0
    slots_N, positions_N, token_ids_N = slots_R[rows_N].long(), positions_R[rows_N], token_ids_R[rows_N]
    table.token_ids_SL[slots_N, positions_N.long()] = token_ids_N
    table.length_S[slots_N] = positions_N + 1
    stopped_N = (table.stop_ids_SE[slots_N] == token_ids_N[:, None]).any(1)
    stopped_N &= positions_N >= table.min_length_S[slots_N]
    ended_N = positions_N + 1 >= table.max_length_S[slots_N].clamp(max=table.token_ids_SL.shape[1])
    table.done_S[slots_N] |= (stopped_N | ended_N).int()
