"""What attention and its prologue are given is refused before any launch where a kernel would read something else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tercet.triton_kernels.attention import decode_attention, prefill_attention
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.decode_shares import make_decode_shares
from tercet.triton_kernels.fused_decode import fused_decode_attention, plan_fused_decode

B, HEADS, KV_HEADS, D, PAGE = 4, 4, 2, 64, 32
Q, QKV = torch.zeros(B, HEADS, D), torch.zeros(B, (HEADS + 2 * KV_HEADS) * D)
CACHES = torch.zeros(9, KV_HEADS, PAGE, D), torch.zeros(9, KV_HEADS, PAGE, D)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def decode(
    page_table: Tensor, decode_slots: Tensor, decode_lengths: Tensor, alibi_slopes: Tensor, sinks: Tensor
) -> None:
    of_heads = {"alibi_slopes_H": alibi_slopes, "sinks_H": sinks}
    decode_attention(Q, *CACHES, page_table, decode_slots, decode_lengths, 0.1, **of_heads)


def decode_several(page_table: Tensor, lengths: Tensor) -> None:
    """Two queries of each of two rows."""
    decode_attention(Q, *CACHES, page_table, ints(2), ints(2), 0.1, tries=2, lengths_T=lengths)


def prefill(
    page_table: Tensor,
    chunk_slots: Tensor,
    chunk_starts: Tensor,
    query_starts: Tensor,
    alibi_slopes: Tensor,
    sinks: Tensor,
) -> None:
    chunks, of_heads = (chunk_slots, chunk_starts, query_starts), {"alibi_slopes_H": alibi_slopes, "sinks_H": sinks}
    prefill_attention(Q, *CACHES, page_table, *chunks, 0.1, **of_heads)


def prologue(
    positions: Tensor, kv_slots: Tensor, cos_sin: Tensor, q_norm_weight: Tensor, k_norm_weight: Tensor, rows: Tensor
) -> None:
    turns = cos_sin, q_norm_weight, k_norm_weight, 1e-6
    attention_prologue(QKV.clone(), positions, kv_slots, *turns, *CACHES, HEADS, rows)


def plan(page_table: Tensor, decode_slots: Tensor, decode_lengths: Tensor) -> None:
    plan_fused_decode(decode_lengths, decode_slots, page_table, HEADS, CACHES[0])


def fused(page_table: Tensor, cos_sin: Tensor, q_norm_weight: Tensor, k_norm_weight: Tensor, sinks: Tensor) -> None:
    shares = make_decode_shares(ints(B), 8, HEADS, KV_HEADS, D, 32)
    turns = cos_sin, q_norm_weight, k_norm_weight, 1e-6
    fused_decode_attention(QKV, *turns, *CACHES, page_table, shares, HEADS, 0.1, torch.zeros(B, HEADS, D), sinks)


_TURNS = {"cos_sin": torch.zeros(90, D), "q_norm_weight": torch.zeros(D), "k_norm_weight": torch.zeros(D)}
_ROWS = {"page_table": ints(3, 5), "decode_slots": ints(B), "decode_lengths": ints(B)}
_CHUNKS = {"page_table": ints(3, 5), "chunk_slots": ints(2), "chunk_starts": ints(2), "query_starts": ints(3)}
_OF_HEADS = {"alibi_slopes": torch.zeros(HEADS), "sinks": torch.zeros(HEADS)}
GOOD: dict[Callable[..., None], dict[str, Tensor]] = {
    decode: {**_ROWS, **_OF_HEADS},
    decode_several: {"page_table": ints(3, 5), "lengths": ints(B)},
    prefill: {**_CHUNKS, **_OF_HEADS},
    prologue: {"positions": ints(B), "kv_slots": torch.arange(B), **_TURNS, "rows": ints(1)},
    plan: _ROWS,
    fused: {"page_table": ints(3, 5), **_TURNS, "sinks": _OF_HEADS["sinks"]},
}


def bad_calls() -> Iterator[Any]:
    for call, good in GOOD.items():
        for name, tensor in good.items():
            bad = {"got a tensor on meta, wanted cpu": tensor.to("meta"), "got shape .*, wanted": tensor[None]}
            if tensor.numel() > 1:
                bad["got strides .*, wanted contiguous"] = torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]
            # Of what heads have a kernel reads every type of float.
            other = tensor.double() if name in _OF_HEADS else tensor.half()
            bad[f"got {other.dtype}, wanted .*{tensor.dtype}"] = other
            for words, wrong in bad.items():
                yield pytest.param(call, name, wrong, words, id=f"{call.__name__}-{name}-{words.split()[1]}")


@pytest.mark.parametrize(("call", "name", "wrong", "words"), list(bad_calls()))
def test_what_a_kernel_would_misread(call: Callable[..., None], name: str, wrong: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {words}"):
        call(**{**GOOD[call], name: wrong})


@pytest.mark.parametrize(("tries", "lengths"), [(0, None), (3, ints(B)), (2, None), (1, ints(B))])
def test_queries_that_are_not_of_rows(tries: int, lengths: Tensor | None) -> None:
    with pytest.raises(ValueError, match=f"q: got {B} queries, tries {tries}"):
        decode_attention(Q, *CACHES, ints(3, 5), ints(2), ints(2), 0.1, tries=tries, lengths_T=lengths)


@pytest.mark.parametrize("call", [decode, decode_several, prefill, prologue])
def test_what_is_right(call: Callable[..., None]) -> None:
    call(**GOOD[call])
