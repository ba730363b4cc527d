"""Paged attention in PyTorch: what the attention kernels must compute, and what a CPU runs.

Each decode row is computed alone, its pages gathered next to each other, and prompts in tiles at fixed positions: what
a query gets does not depend on its company, to the bit. Garbage beyond a sequence's end (NaN too) has no effect.

Shape suffixes: B decode rows, C chunks, T prefill tokens, H q heads, G q heads of one kv head, L positions, D head
size, S slots, M pages of a slot; caches are [page, kv head, token of the page, D].
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 32
"""Queries of a prompt that are computed together, from a multiple of it on: wherever chunks are cut, products then have
the same shapes for the same tokens, and so these get the same bits."""


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
    tiles_BKM = _tiles(page_table_SM[decode_slots_B], k_cache)
    for row, length in enumerate(decode_lengths_B.tolist()):
        if length:
            first = _first_seen(length - 1, scoring)
            k, v = (_gather(cache, tiles_BKM[row], first, length, q_BHD.dtype) for cache in (k_cache, v_cache))
            out_BHD[row] = _attend(q_BHD[row : row + 1], k, v, length - 1, scoring)[0]
        else:
            out_BHD[row] = 0


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
    ends_T: Tensor | None = None,
) -> None:
    """Causal, each chunk over its sequence up to and with itself; `ends_T`: but images up to their ends. Tokens of no
    chunk give zeros."""
    ends = query_starts_C1.tolist()
    for slot, start, begin, end in zip(
        chunk_slots_C.tolist(), chunk_starts_C.tolist(), ends[:-1], ends[1:], strict=True
    ):
        if begin < end:
            length, tiles_KM = start + end - begin, _tiles(page_table_SM[slot], k_cache)
            first = _first_seen(start, scoring)
            k, v = (_padded(_gather(cache, tiles_KM, first, length, q_THD.dtype)) for cache in (k_cache, v_cache))
            _attend_in_tiles(q_THD[begin:end], k, v, start, scoring, out_THD[begin:end])
            if ends_T is not None:
                _attend_in_images(q_THD[begin:end], k, v, start, scoring, ends_T[begin:end], out_THD[begin:end])
    out_THD[ends[-1] :] = 0


def _attend_in_images(
    q_THD: Tensor, k: Tensor, v: Tensor, start: int, scoring: Scoring, ends_T: Tensor, out_THD: Tensor
) -> None:
    """Once more those of a chunk's queries that see further than to themselves: image by image."""
    for image_end in ends_T.unique().tolist():
        if image_end:
            first, last = (ends_T == image_end).nonzero()[[0, -1], 0].tolist()
            own = slice(first, last + 1)
            _attend_in_tiles(q_THD[own], k, v, start + first, scoring, out_THD[own], image_end)


def _attend_in_tiles(
    q_THD: Tensor, k: Tensor, v: Tensor, start: int, scoring: Scoring, out_THD: Tensor, image_end: int = 0
) -> None:
    """A chunk's queries against their sequence's keys [kv head, L, D], zeros behind them up to the end of a tile."""
    end = start + len(q_THD)
    for tile in range(start // _TILE * _TILE, end, _TILE):
        first, last = max(start, tile), min(end, tile + _TILE)
        whole_THD = q_THD.new_zeros(_TILE, *q_THD.shape[1:])
        whole_THD[first - tile : last - tile] = q_THD[first - start : last - start]
        seen = max(tile + _TILE, image_end + -image_end % _TILE)
        attended_THD = _attend(whole_THD, k[:, :seen], v[:, :seen], tile, scoring, image_end)
        out_THD[first - start : last - start] = attended_THD[first - tile : last - tile]


def _padded(keys: Tensor) -> Tensor:
    """With zeros up to the end of a tile."""
    return F.pad(keys, (0, 0, 0, -keys.shape[1] % _TILE))


def _tiles(tables: Tensor, cache: Tensor) -> Tensor:
    """Where the pages of each kv head are, [..., kv head, M]: one layer's cache is contiguous, so a page of one head is
    a row of a view of it."""
    num_kv_heads = cache.shape[1]
    return tables[..., None, :] * num_kv_heads + torch.arange(num_kv_heads, device=cache.device)[:, None]


def _first_seen(position: int, scoring: Scoring) -> int:
    return max(position - scoring.window + 1, 0) if scoring.window else 0


def _gather(cache: Tensor, tiles_KM: Tensor, first: int, length: int, dtype: torch.dtype) -> Tensor:
    """A sequence's tokens side by side: [kv head, L, D]. Ahead of the `first` that is seen there may be another's by
    now: zeros."""
    num_kv_heads, page_size, head_dim = cache.shape[1:]
    tiles = tiles_KM[:, : -(-length // page_size)].flatten()
    gathered = cache.view(-1, page_size * head_dim).index_select(0, tiles).to(dtype)
    own = gathered.view(num_kv_heads, -1, head_dim)[:, :length]
    own[:, :first] = 0
    return own


def _attend(q_THD: Tensor, k: Tensor, v: Tensor, start: int, scoring: Scoring, image_end: int = 0) -> Tensor:
    """Queries at positions `start` and on against keys [kv head, L, D], of which they see those up to their own, and
    those ahead of `image_end`."""
    num_queries, _, head_dim = q_THD.shape
    num_kv_heads, length = k.shape[:2]
    if scoring.is_plain and num_queries == 1:
        q = q_THD.view(1, num_kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(q, k[None], v[None], scale=scoring.scale).view(q_THD.shape)
    positions_T1 = torch.arange(start, start + num_queries, device=k.device)[:, None]
    if scoring.is_plain:
        seen_TL = (positions_T1 + 1).clamp(min=image_end) > torch.arange(length, device=k.device)
        out = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None], k[None], v[None], attn_mask=seen_TL, scale=scoring.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    # The queries of one kv head as one matrix, [kv head, G x T, D].
    q = q_THD.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    weights = _weights(q, k, positions_T1, scoring, num_queries, image_end)
    out = (weights @ v.float()).view(num_kv_heads, -1, num_queries, head_dim)
    return out.permute(2, 0, 1, 3).reshape(q_THD.shape).to(q_THD.dtype)


def _weights(
    q: Tensor, k: Tensor, positions_T1: Tensor, scoring: Scoring, num_queries: int, image_end: int
) -> Tensor:  # fmt: skip
    """Softmax over L of q [kv head, G x T, D] times k [kv head, L, D]."""
    products = (q.float() @ k.float().transpose(-1, -2)).mul_(scoring.scale)
    scores = products.view(len(k), -1, num_queries, products.shape[-1])
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    positions_L = torch.arange(k.shape[1], device=k.device)
    distances = positions_T1 - positions_L
    if scoring.alibi_slopes_H is not None:
        scores = scores - scoring.alibi_slopes_H.float().view(*scores.shape[:2], 1, 1) * distances
    hidden = (positions_T1 + 1).clamp(min=image_end) <= positions_L
    if scoring.window:
        hidden |= distances >= scoring.window
    scores = scores.masked_fill_(hidden, -math.inf)
    if scoring.sinks_H is not None:
        sinks = scoring.sinks_H.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    return scores.softmax(-1)[..., : k.shape[1]].flatten(1, 2)
