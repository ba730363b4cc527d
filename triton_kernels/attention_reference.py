"""Paged attention in PyTorch: what the attention kernels must compute, and what a CPU runs.

Rows are taken a few at a time: their pages are gathered next to each other, as much as fits a core's cache, since
large temporary tensors cost a CPU more in page faults than the arithmetic. Garbage beyond a sequence's end (NaN too)
has no effect.

Shape suffixes: B decode rows, C chunks, T prefill tokens, H q heads, G q heads of one kv head, L positions, D head
size, S slots, M pages of a slot; caches are [page, kv head, token of the page, D].
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_GATHER_NUMBERS = 2**18
"""Keys gathered at a time: 1 MiB in fp32."""


@dataclass(frozen=True)
class Scoring:
    """How scores come from products of queries and keys."""

    scale: float
    window: int = 0
    """How many positions back a query sees, its own included; 0: all."""
    softcap: float = 0.0
    alibi_slopes_H: Tensor | None = None
    sinks_H: Tensor | None = field(default=None, compare=False)
    """One score more of each q head's queries, not scaled, of no key: weights of values add up to less than one. Each
    layer has its own, and what is planned for one layer serves all whose scorings are equal: they are no part of it."""

    @property
    def is_plain(self) -> bool:
        extras = self.alibi_slopes_H, self.sinks_H
        return not self.window and not self.softcap and all(extra is None for extra in extras)


def decode_attention_reference(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_SM: Tensor,
    decode_slots_B: Tensor,
    decode_lengths_B: Tensor,
    scoring: Scoring,
    out_BHD: Tensor,
) -> None:
    """One query a row, the last of its `decode_lengths_B` positions. Rows of length 0 give zeros."""
    lengths, slots = decode_lengths_B.tolist(), decode_slots_B.tolist()
    num_kv_heads, page_size, head_dim = k_cache.shape[1:]
    # Rows of like length share a batch with little waste.
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    start = 0
    while start < len(order):
        row = order[start]
        if lengths[row] == 0:
            out_BHD[row] = 0
            start += 1
            continue
        stop = start + 1
        while stop < len(order):
            num_pages = -(-lengths[order[stop]] // page_size)
            if (stop + 1 - start) * num_pages * num_kv_heads * page_size * head_dim > _GATHER_NUMBERS:
                break
            stop += 1
        rows = order[start:stop]
        num_pages = -(-lengths[rows[-1]] // page_size)
        if len(rows) == 1:
            n = lengths[row]
            tables = page_table_SM[slots[row], None, :num_pages]
            k, v = (_gather(cache, tables, q_BHD.dtype)[0, :, :n] for cache in (k_cache, v_cache))
            out_BHD[row] = _attend(q_BHD[row : row + 1], k, v, n - 1, scoring)[0]
        else:
            tables = page_table_SM[[slots[row] for row in rows], :num_pages]
            group_lengths = [lengths[row] for row in rows]
            k, v = (_gather(cache, tables, q_BHD.dtype) for cache in (k_cache, v_cache))
            out_BHD[rows] = _attend_together(q_BHD[rows], k, v, group_lengths, scoring)
        start = stop


def prefill_attention_reference(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_SM: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    scoring: Scoring,
    out_THD: Tensor,
) -> None:
    """Causal, each chunk over its sequence up to and with itself. Tokens of no chunk give zeros."""
    page_size = k_cache.shape[2]
    ends = query_starts_C1.tolist()
    for slot, start, begin, end in zip(
        chunk_slots_C.tolist(), chunk_starts_C.tolist(), ends[:-1], ends[1:], strict=True
    ):
        if begin == end:
            continue
        length = start + end - begin
        tables = page_table_SM[slot, None, : -(-length // page_size)]
        k, v = (_gather(cache, tables, q_THD.dtype)[0, :, :length] for cache in (k_cache, v_cache))
        out_THD[begin:end] = _attend(q_THD[begin:end], k, v, start, scoring)
    out_THD[ends[-1] :] = 0


def _gather(cache: Tensor, tables: Tensor, dtype: torch.dtype) -> Tensor:
    """Pages of some sequences side by side: tables [rows, pages] -> [rows, kv head, pages x tokens, D]."""
    num_kv_heads, page_size, head_dim = cache.shape[1:]
    heads = torch.arange(num_kv_heads, device=cache.device)
    tiles = tables[:, None, :] * num_kv_heads + heads[:, None]
    # One layer's cache is contiguous, so a page of one head is a row of this view.
    gathered = cache.view(-1, page_size * head_dim).index_select(0, tiles.flatten()).to(dtype)
    return gathered.view(tables.shape[0], num_kv_heads, -1, head_dim)


def _attend(q_THD: Tensor, k: Tensor, v: Tensor, start: int, scoring: Scoring) -> Tensor:
    """Queries at positions `start` and on against one sequence's keys [kv head, L, D], all of them real."""
    num_queries, _, head_dim = q_THD.shape
    num_kv_heads, length = k.shape[:2]
    if scoring.is_plain and num_queries == 1:
        q = q_THD.view(1, num_kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(q, k[None], v[None], scale=scoring.scale).view(q_THD.shape)
    if scoring.is_plain and start == 0:
        out = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=scoring.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    # The queries of one kv head as one matrix, [kv head, G x T, D].
    q = q_THD.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    positions_T1 = torch.arange(start, length, device=k.device)[:, None]
    weights = _weights(q, k, positions_T1, scoring, num_queries)
    out = (weights @ v.float()).view(num_kv_heads, -1, num_queries, head_dim)
    return out.permute(2, 0, 1, 3).reshape(q_THD.shape).to(q_THD.dtype)


def _attend_together(q_BHD: Tensor, k: Tensor, v: Tensor, lengths: list[int], scoring: Scoring) -> Tensor:
    """Each row's last position against its own keys [B, kv head, L, D]; those beyond its length are garbage."""
    for row, length in enumerate(lengths):
        v[row, :, length:].zero_()  # weight 0 times NaN is NaN
    q = q_BHD.view(q_BHD.shape[0], k.shape[1], -1, q_BHD.shape[2])
    positions_B = torch.tensor(lengths, device=k.device) - 1
    weights = _weights(q, k, positions_B.view(-1, 1, 1, 1, 1), scoring, 1)
    return (weights @ v.float()).view(q_BHD.shape).to(q_BHD.dtype)


def _weights(q: Tensor, k: Tensor, positions: Tensor, scoring: Scoring, num_queries: int) -> Tensor:
    """Softmax over L of q [..., kv head, G x T, D] times k [..., kv head, L, D]; `positions` broadcasts to
    [..., kv head, G, T, L]."""
    products = (q.float() @ k.float().transpose(-1, -2)).mul_(scoring.scale)
    scores = products.view(*products.shape[:-2], -1, num_queries, products.shape[-1])
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    distances = positions - torch.arange(k.shape[-2], device=k.device)
    if scoring.alibi_slopes_H is not None:
        scores = scores - scoring.alibi_slopes_H.float().view(*scores.shape[-4:-2], 1, 1) * distances
    hidden = distances < 0
    if scoring.window:
        hidden |= distances >= scoring.window
    scores = scores.masked_fill_(hidden, -math.inf)
    if scoring.sinks_H is not None:
        sinks = scoring.sinks_H.float().view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    return scores.softmax(-1)[..., : k.shape[-2]].flatten(-3, -2)
