"""Attention over a paged cache of keys and values: one query a sequence or a few (decode), or chunks of them (prefill).

Knows pages and positions; K and V of the queries' own tokens are in the cache already.

Shape suffixes: B decode rows, C chunks, C1 = C + 1, T prefill tokens or queries of decode rows, H q heads, D head size,
S slots, M pages of a slot; caches are of one layer, [page, kv head, token of the page, D].
"""

import torch
from torch import Tensor

from tercet.triton_kernels.attention_reference import (
    Scoring,
    decode_attention_reference,
    prefill_attention_reference,
)
from tercet.triton_kernels.checks import (
    FLOATS,
    FP8,
    check_dtype,
    check_indices,
    check_of_heads,
    check_same,
    check_shape,
)
from tercet.triton_kernels.decode_attention import launch_decode_attention
from tercet.triton_kernels.decode_work import DecodeWork, make_decode_work, plan_decode_work
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.prefill_attention import (
    can_use_hopper,
    keys_at_once,
    launch_prefill_attention,
    parts_at_once,
    query_tile,
)
from tercet.triton_kernels.prefill_parts import MOST_QUERIES, plan_prefill_parts
from tercet.triton_kernels.prefill_work import (
    PrefillWork,
    make_last_tiles,
    make_prefill_work,
    plan_last_tiles,
    plan_prefill_work,
)

DEEP = 2048
"""Tokens before a chunk from which on its keys are cut too: the kernel that merges is paid for by what tiles gain."""
DEEPER = 12_288
"""From here on by programs of two heads: keys and values come to half as many multiprocessors."""


def decode_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_SM: Tensor,
    decode_slots_B: Tensor,
    decode_lengths_B: Tensor,
    scale: float,
    *,
    work: DecodeWork | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes_H: Tensor | None = None,
    sinks_H: Tensor | None = None,
    tries: int = 1,
    lengths_T: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[T, H, D] -> [T, H, D]: query b attends to the first `decode_lengths_B[b]` positions of slot `decode_slots_B[b]`.

    With `tries` each row b has so many queries, from b `tries` on, of the row's last tokens: what query t sees is in
    `lengths_T[t]`, not more than its row's length, or 0, which gives zeros, as rows of length 0 do. Writes `out` if
    given and the memory in `work`; softmax in fp32. `work`: planned for these rows, once for all layers of a step with
    this window; without it the call plans for itself. `sinks_H`: see `Scoring`. Graph-safe.
    """
    _check(q_THD, k_cache, v_cache, page_table_SM, alibi_slopes_H, sinks_H)
    B = rows_of_queries(q_THD, tries, lengths_T)
    check_indices("decode_slots", decode_slots_B, q_THD, B)
    check_indices("decode_lengths", decode_lengths_B, q_THD, B)
    out = _output(q_THD, out)
    scoring = Scoring(scale, window, softcap, alibi_slopes_H, sinks_H)
    if not B:
        return out
    if use_kernels(q_THD):
        if work is None:
            heads, (num_pages, kv_heads, page_size, head_dim) = q_THD.shape[1], k_cache.shape
            sizes = (B, num_pages, page_size, heads, kv_heads, head_dim)
            work = make_decode_work(
                *sizes, q_THD.device, deterministic=False, window=window, tries=tries, lengths_T=lengths_T
            )  # fmt: skip
            plan_decode_work(decode_lengths_B, decode_slots_B, work, kv_heads)
        launch_decode_attention(q_THD, k_cache, v_cache, page_table_SM, scoring, work, out)
        return out
    slots_T, seen_T = decode_slots_B, decode_lengths_B
    if lengths_T is not None:
        slots_T, seen_T = decode_slots_B.repeat_interleave(tries), lengths_T
    decode_attention_reference(q_THD, k_cache, v_cache, page_table_SM, slots_T, seen_T, scoring, out)
    return out


def rows_of_queries(q_THD: Tensor, tries: int, lengths_T: Tensor | None) -> int:
    """How many rows have so many queries, or raise. `lengths_T`: what each of several sees."""
    T = q_THD.shape[0]
    if tries < 1 or T % tries or (tries > 1) != (lengths_T is not None):
        told = "" if lengths_T is None else " and lengths"
        raise ValueError(
            f"q: got {T} queries, tries {tries}{told}; wanted as many of each row, of several their lengths"
        )
    if lengths_T is not None:
        check_indices("lengths", lengths_T, q_THD, T)
    return T // tries


def prefill_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table_SM: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    scale: float,
    *,
    work: PrefillWork | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes_H: Tensor | None = None,
    sinks_H: Tensor | None = None,
    ends_T: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[T, H, D] -> [T, H, D], causal: tokens `query_starts_C1[c]` and on are chunk c's, at positions
    `chunk_starts_C[c]` and on of slot `chunk_slots_C[c]`.

    Tokens of no chunk give zeros. Writes `out` if given and mutates nothing else; softmax in fp32. `work`: planned for
    these chunks, once for all layers of a step; without it the call plans for itself. `sinks_H`: see `Scoring`.
    `ends_T`: tokens of an image see each other: the position behind the last of them, which is in the same chunk; 0 for
    others. Graph-safe.
    """
    _check(q_THD, k_cache, v_cache, page_table_SM, alibi_slopes_H, sinks_H)
    C = len(chunk_slots_C)
    check_indices("chunk_slots", chunk_slots_C, q_THD, C)
    check_indices("chunk_starts", chunk_starts_C, q_THD, C)
    check_indices("query_starts", query_starts_C1, q_THD, C + 1)
    if ends_T is not None:
        check_indices("ends", ends_T, q_THD, len(q_THD))
    out = _output(q_THD, out)
    scoring = Scoring(scale, window, softcap, alibi_slopes_H, sinks_H)
    if not q_THD.shape[0]:
        return out
    if use_kernels(q_THD):
        if work is None:
            T, H, _ = q_THD.shape
            work = plan_prefill(chunk_slots_C, chunk_starts_C, query_starts_C1, T, H, k_cache, scoring, ends_T=ends_T)
        launch_prefill_attention(q_THD, k_cache, v_cache, page_table_SM, scoring, work, ends_T, out)
        return out
    prefill_attention_reference(
        q_THD, k_cache, v_cache, page_table_SM, chunk_slots_C, chunk_starts_C, query_starts_C1, scoring, out,
        ends_T,
    )  # fmt: skip
    return out


def plan_prefill(
    chunk_slots_C: Tensor, chunk_starts_C: Tensor, query_starts_C1: Tensor, num_tokens: int, num_heads: int,
    k_cache: Tensor, scoring: Scoring, *, deep: int = 0, ends_T: Tensor | None = None,
) -> PrefillWork:  # fmt: skip
    """Cut a step's chunks into tiles for layers that score so. Graph-safe: once per step, before the first layer.

    `ends_T`: see `prefill_attention`. Then no tile is cut by keys: of a part's some query might see nothing.
    `deep`: of the tokens some come behind so many: from `DEEP` on cut tiles by keys too, where that gains anything
    (`most_deep`). A token's bits depend on it, and on the other chunks then.
    """
    block_q = query_tile(num_tokens, num_heads, k_cache, scoring)
    work = make_prefill_work(num_tokens, chunk_slots_C.shape[0], block_q, k_cache.device)
    plan_prefill_work(chunk_slots_C, chunk_starts_C, query_starts_C1, num_tokens, work, ends_T)
    if ends_T is None and 0 < num_tokens <= _most_in_parts(num_heads, k_cache, scoring, deep, block_q):
        sizes = num_tokens, num_heads, k_cache.shape[3], parts_at_once(k_cache, scoring), keys_at_once(k_cache)
        return plan_prefill_parts(work, *sizes, heads=_heads_at_once(num_heads, k_cache, scoring, deep))
    return work


def most_deep(num_heads: int, k_cache: Tensor, scoring: Scoring) -> dict[int, int]:
    """By the values of `deep` that make a difference, up to how many tokens `plan_prefill` makes something of them."""
    block_q = query_tile(1, num_heads, k_cache, scoring)
    depths = (DEEP, DEEPER) if _heads_at_once(num_heads, k_cache, scoring, DEEPER) > 1 else (DEEP,)
    most = {deep: _most_in_parts(num_heads, k_cache, scoring, deep, block_q) for deep in depths}
    return {deep: tokens for deep, tokens in most.items() if tokens}


def _most_in_parts(num_heads: int, k_cache: Tensor, scoring: Scoring, deep: int, block_q: int) -> int:
    """While two parts of each tile can run at once. Of a window there is little to cut."""
    if deep < DEEP or scoring.window:
        return 0
    heads = _heads_at_once(num_heads, k_cache, scoring, deep)
    return min(parts_at_once(k_cache, scoring) * heads // (2 * num_heads) * block_q, MOST_QUERIES)


def _heads_at_once(num_heads: int, k_cache: Tensor, scoring: Scoring, deep: int) -> int:
    """How many q heads, with the same keys, a program takes: two are faster at many keys, and not at few."""
    fits = can_use_hopper(k_cache, scoring) and num_heads // k_cache.shape[1] % 2 == 0
    return 2 if fits and deep >= DEEPER else 1


def plan_last_queries(
    chunk_slots_C: Tensor, chunk_starts_C: Tensor, query_starts_C1: Tensor, work: PrefillWork
) -> PrefillWork:
    """Of a step's chunks, cut as in `work`, only the tiles with their last tokens: `prefill_attention` with this leaves
    all others of its output as they were. A token's bits are the same. Graph-safe."""
    last = make_last_tiles(chunk_slots_C.shape[0], work)
    plan_last_tiles(chunk_slots_C, chunk_starts_C, query_starts_C1, last)
    return last


def _output(q: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty_like(q)
    check_shape("out", out, *q.shape)
    check_same("out", out, q)
    return out


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table_SM: Tensor, alibi_slopes_H: Tensor | None,
    sinks_H: Tensor | None,
) -> None:  # fmt: skip
    check_dtype("q", q, *FLOATS)
    check_shape("q", q, None, None, None)
    check_shape("k_cache", k_cache, None, None, None, q.shape[2])
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_same("k_cache", k_cache, q, FP8)
    check_same("v_cache", v_cache, k_cache)
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"q: got {q.shape[1]} heads, wanted a multiple of the cache's {k_cache.shape[1]}")
    check_indices("page_table", page_table_SM, q, None, None)
    for name, numbers_H in (("alibi_slopes", alibi_slopes_H), ("sinks", sinks_H)):
        if numbers_H is not None:
            check_of_heads(name, numbers_H, q.shape[1], q)
