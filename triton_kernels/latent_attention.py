"""Attention over a paged cache of latents, of which keys are all numbers and values the first: for all heads the same.

Knows pages and positions; what is in the cache of the queries' own tokens is there already. Queries come as
`latent_heads.py` makes them, and what leaves is for it to make values of.

Shape suffixes: B decode rows, C chunks, C1 = C + 1, T prefill tokens or queries of decode rows, H heads, D numbers of
a query and of a cell, L those of a latent, S slots, M pages of a slot; the cache is [page, 1, token of the page, D].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.triton_kernels.attention import plan_last_queries, rows_of_queries
from tercet.triton_kernels.attention_reference import (
    Scoring,
    decode_attention_reference,
    prefill_attention_reference,
)
from tercet.triton_kernels.checks import FLOATS, FP8, check_dtype, check_indices, check_same, check_shape
from tercet.triton_kernels.decode_work import DecodeWork, make_decode_work, plan_decode_work
from tercet.triton_kernels.dispatch import multiprocessors, use_kernels
from tercet.triton_kernels.latent_decode import latent_blocks, launch_latent_decode
from tercet.triton_kernels.latent_hopper import room_query_tile
from tercet.triton_kernels.latent_prefill import latent_query_tile, launch_latent_prefill
from tercet.triton_kernels.latent_room import Room, plan_room
from tercet.triton_kernels.prefill_work import PrefillWork, make_prefill_work, plan_prefill_work


def latent_decode_attention(
    q_THD: Tensor,
    cache: Tensor,
    page_table_SM: Tensor,
    decode_slots_B: Tensor,
    decode_lengths_B: Tensor,
    scale: float,
    rank: int,
    *,
    work: DecodeWork | None = None,
    tries: int = 1,
    lengths_T: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[T, H, D] -> [T, H, L], L = `rank`: query b attends to the first `decode_lengths_B[b]` positions of slot
    `decode_slots_B[b]`. All else is as in `decode_attention`; `work` comes from `plan_latent_decode`. Graph-safe.
    """
    _check(q_THD, cache, page_table_SM, rank)
    T, H, _ = q_THD.shape
    B = rows_of_queries(q_THD, tries, lengths_T)
    check_indices("decode_slots", decode_slots_B, q_THD, B)
    check_indices("decode_lengths", decode_lengths_B, q_THD, B)
    out = _output(q_THD, rank, out)
    if not T:
        return out
    if use_kernels(q_THD):
        if work is None:
            work = plan_latent_decode(
                decode_lengths_B, decode_slots_B, page_table_SM, cache, H, rank, deterministic=False, tries=tries,
                lengths_T=lengths_T,
            )  # fmt: skip
        launch_latent_decode(q_THD, cache, page_table_SM, scale, work, out)
        return out
    slots_T, seen_T = decode_slots_B, decode_lengths_B
    if lengths_T is not None:
        slots_T, seen_T = decode_slots_B.repeat_interleave(tries), lengths_T
    whole_THD = torch.empty_like(q_THD)
    decode_attention_reference(q_THD, cache, cache, page_table_SM, slots_T, seen_T, Scoring(scale), whole_THD)
    return out.copy_(whole_THD[..., :rank])


def plan_latent_decode(
    decode_lengths_B: Tensor, decode_slots_B: Tensor, page_table_SM: Tensor, cache: Tensor, num_heads: int, rank: int,
    *, deterministic: bool, tries: int = 1, lengths_T: Tensor | None = None,
) -> DecodeWork:  # fmt: skip
    """Cut a step's rows into splits. Graph-safe: once per step, before the first layer."""
    B = len(decode_slots_B)
    # Not the cache's pages: with shared prefixes the rows can be longer, all together, than the cache.
    num_pages, blocks = B * page_table_SM.shape[1], latent_blocks(num_heads, tries)
    # A multiprocessor has room for one program, and what that does around its tiles takes as long as some of them.
    most = max(1, multiprocessors(cache.device) // blocks)
    work = make_decode_work(
        B, num_pages, cache.shape[2], num_heads, blocks, rank, cache.device, deterministic=deterministic, tries=tries,
        lengths_T=lengths_T, most=most,
    )  # fmt: skip
    plan_decode_work(decode_lengths_B, decode_slots_B, work, blocks, most=most)
    return work


def latent_prefill_attention(
    q_THD: Tensor,
    cache: Tensor,
    page_table_SM: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    scale: float,
    rank: int,
    *,
    work: PrefillWork | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[T, H, D] -> [T, H, L], L = `rank`, causal: tokens `query_starts_C1[c]` and on are chunk c's, at positions
    `chunk_starts_C[c]` and on of slot `chunk_slots_C[c]`. All else is as in `prefill_attention`; `work` comes from
    `plan_latent_prefill`. Graph-safe."""
    _check(q_THD, cache, page_table_SM, rank)
    T, H, _ = q_THD.shape
    C = len(chunk_slots_C)
    check_indices("chunk_slots", chunk_slots_C, q_THD, C)
    check_indices("chunk_starts", chunk_starts_C, q_THD, C)
    check_indices("query_starts", query_starts_C1, q_THD, C + 1)
    out = _output(q_THD, rank, out)
    if not T:
        return out
    if use_kernels(q_THD):
        if work is None:
            work = plan_latent_prefill(chunk_slots_C, chunk_starts_C, query_starts_C1, T, H)
        launch_latent_prefill(q_THD, cache, page_table_SM, scale, work, out)
        return out
    chunks, whole_THD = (chunk_slots_C, chunk_starts_C, query_starts_C1), torch.empty_like(q_THD)
    prefill_attention_reference(q_THD, cache, cache, page_table_SM, *chunks, Scoring(scale), whole_THD)
    return out.copy_(whole_THD[..., :rank])


def plan_latent_prefill(
    chunk_slots_C: Tensor, chunk_starts_C: Tensor, query_starts_C1: Tensor, num_tokens: int, num_heads: int
) -> PrefillWork:
    """Cut a step's chunks into tiles. Graph-safe: once per step, before the first layer."""
    work = make_prefill_work(num_tokens, len(chunk_slots_C), latent_query_tile(num_heads), chunk_slots_C.device)
    plan_prefill_work(chunk_slots_C, chunk_starts_C, query_starts_C1, num_tokens, work)
    return work


@dataclass(frozen=True)
class LatentPrefill:
    """How a step's chunks, or their last tokens, are attended to."""

    by_latents: PrefillWork
    room: Room | None
    in_room: PrefillWork | None
    """Where there is room: then either this or that has all tiles, and the other none."""


def plan_latent_chunks(
    chunk_slots_C: Tensor, chunk_starts_C: Tensor, query_starts_C1: Tensor, num_tokens_1: Tensor, num_decodes: int,
    num_tokens: int, num_heads: int, room: Room | None,
) -> tuple[LatentPrefill, LatentPrefill]:  # fmt: skip
    """Cut a step's chunks into tiles, of all tokens and of the last ones. Graph-safe: once per step, before the first
    layer. `num_decodes`: tokens of the step ahead of the `num_tokens` of chunks."""
    starts, in_room, last_in_room = query_starts_C1, None, None
    if room is not None:
        plan_room(chunk_starts_C, query_starts_C1, num_tokens_1, num_decodes, room)
        starts = room.latent_starts_C1
        places = chunk_slots_C, chunk_starts_C, room.expanded_starts_C1
        tile = room_query_tile(num_tokens, num_heads, chunk_slots_C.device)
        in_room = make_prefill_work(num_tokens, len(chunk_slots_C), tile, chunk_slots_C.device)
        plan_prefill_work(*places, num_tokens, in_room)
        last_in_room = plan_last_queries(*places, in_room)
    by_latents = plan_latent_prefill(chunk_slots_C, chunk_starts_C, starts, num_tokens, num_heads)
    last = plan_last_queries(chunk_slots_C, chunk_starts_C, starts, by_latents)
    return LatentPrefill(by_latents, room, in_room), LatentPrefill(last, room, last_in_room)


def _output(q_THD: Tensor, rank: int, out: Tensor | None) -> Tensor:
    if out is None:
        return q_THD.new_empty(*q_THD.shape[:2], rank)
    check_shape("out", out, *q_THD.shape[:2], rank)
    check_same("out", out, q_THD)
    return out


def _check(q_THD: Tensor, cache: Tensor, page_table_SM: Tensor, rank: int) -> None:
    check_dtype("q", q_THD, *FLOATS)
    check_shape("q", q_THD, None, None, None)
    check_same("q", q_THD, q_THD)
    check_shape("cache", cache, None, 1, None, q_THD.shape[2])
    check_same("cache", cache, q_THD, FP8)
    check_indices("page_table", page_table_SM, q_THD, None, None)
    if not 0 < rank < q_THD.shape[2]:
        raise ValueError(f"rank: got {rank}, wanted a part of the cache's {q_THD.shape[2]} numbers")
