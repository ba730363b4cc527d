"""Attention against attention written out query by query, over pages full of NaN where nothing is.

The references here; the kernels in Triton's interpreter, by running this file once more.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from tercet.triton_kernels.attention import decode_attention, plan_last_queries, plan_prefill, prefill_attention
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.dispatch import use_kernels

SLOTS, PAGES_EACH, SCALE = 6, 6, 0.3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"softcap": 3.0},
    {"alibi_slopes_H": True},
    {"window": 9, "softcap": 2.0, "alibi_slopes_H": True},
    {"sinks_H": True},
    {"window": 7, "sinks_H": True},
]


class Paged:
    """Random sequences in a paged cache, and attention to them the slow way."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, page: int, options: dict[str, Any], cells: torch.dtype
    ) -> None:
        self.num_heads, self.group = num_heads, num_heads // num_kv_heads
        self.options = dict(options)
        if "alibi_slopes_H" in options:
            self.options["alibi_slopes_H"] = torch.rand(num_heads)
        if "sinks_H" in options:
            self.options["sinks_H"] = torch.rand(num_heads) * 8 - 2
        num_pages = SLOTS * PAGES_EACH + 1
        self.k_cache = torch.full((num_pages, num_kv_heads, page, head_dim), float("nan")).to(cells)
        self.v_cache = self.k_cache.clone()
        self.table = torch.randperm(num_pages - 1)[: SLOTS * PAGES_EACH].view(SLOTS, -1).int() + 1
        self.lengths = [0, 1, page, page + 1, 5 * page + 3, 2 * page + 5]
        self.keys, self.values = (
            [torch.randn(length, num_kv_heads, head_dim).to(cells).float() for length in self.lengths] for _ in range(2)
        )
        for slot, length in enumerate(self.lengths):
            for position in range(length):
                at = int(self.table[slot, position // page]), slice(None), position % page
                self.k_cache[at], self.v_cache[at] = (x[slot][position].to(cells) for x in (self.keys, self.values))

    def attend(self, q_HD: Tensor, slot: int, position: int) -> Tensor:
        out = torch.zeros_like(q_HD)
        first = max(0, position + 1 - self.options.get("window", position + 1))
        seen = slice(first, position + 1)
        for head in range(self.num_heads):
            scores = self.keys[slot][seen, head // self.group] @ q_HD[head] * SCALE
            if cap := self.options.get("softcap"):
                scores = cap * torch.tanh(scores / cap)
            if "alibi_slopes_H" in self.options:
                scores -= self.options["alibi_slopes_H"][head] * (position - torch.arange(first, position + 1))
            weights = scores.exp()
            total = weights.sum() + (self.options["sinks_H"][head].exp() if "sinks_H" in self.options else 0)
            out[head] = weights / total @ self.values[slot][seen, head // self.group]
        return out


SHAPES = [
    (6, 2, 16, 16, torch.float32),
    (4, 4, 24, 16, torch.float32),
    (7, 1, 8, 32, torch.float32),
    (6, 2, 24, 16, FP8),
    (2, 1, 144, 32, torch.float32),
    (2, 1, 320, 16, torch.float32),
]
CASES = [
    # Each option with two of the shapes, and each shape with three options or more, but for the widest.
    (pytest.param if which < 4 and (number + which) % 2 == 0 else long)(*shape, options)
    for number, options in enumerate(OPTIONS)
    for which, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "cells", "options"),
    CASES,
    ids=lambda value: "+".join(value) or "plain" if isinstance(value, dict) else None,
)
def test_decode_and_prefill(
    heads: int, kv_heads: int, head_dim: int, page: int, cells: torch.dtype, options: dict[str, Any]
) -> None:
    paged = Paged(heads, kv_heads, head_dim, page, options, cells)
    caches = paged.k_cache, paged.v_cache, paged.table

    order = torch.randperm(SLOTS)
    lengths = torch.tensor(paged.lengths)[order].int()
    q = torch.randn(SLOTS, heads, head_dim)
    out = torch.full_like(q, float("nan"))
    got = decode_attention(q, *caches, order.int(), lengths, SCALE, out=out, **paged.options)
    assert got is out
    for row, slot in enumerate(order.tolist()):
        length = paged.lengths[slot]
        wanted = paged.attend(q[row], slot, length - 1) if length else torch.zeros(heads, head_dim)
        torch.testing.assert_close(out[row], wanted, rtol=1e-4, atol=1e-5)

    tries = 3  # of a row's last tokens some or all, the first of them always
    seen = []
    for row, slot in enumerate(order.tolist()):
        count = min(tries - row % 2, paged.lengths[slot])
        first = paged.lengths[slot] - count + 1
        seen += [*range(first, first + count), *[0] * (tries - count)]
    q = torch.randn(SLOTS * tries, heads, head_dim)
    out = torch.full_like(q, float("nan"))
    lengths_T = torch.tensor(seen).int()
    decode_attention(
        q, *caches, order.int(), lengths, SCALE, tries=tries, lengths_T=lengths_T, out=out, **paged.options
    )  # fmt: skip
    for token, length in enumerate(seen):
        slot = int(order[token // tries])
        wanted = paged.attend(q[token], slot, length - 1) if length else torch.zeros(heads, head_dim)
        torch.testing.assert_close(out[token], wanted, rtol=1e-4, atol=1e-5)

    chunks = [(4, 0, 20), (5, 30, 7), (1, 0, 1), (0, 0, 0), (2, page - 1, 1)]  # slot, start, count
    slots, starts, counts = (torch.tensor(column).int() for column in zip(*chunks, strict=True))
    begins = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    q = torch.randn(int(counts.sum()) + 3, heads, head_dim)  # three tokens of padding
    out = torch.full_like(q, float("nan"))
    prefill_attention(q, *caches, slots, starts, begins, SCALE, out=out, **paged.options)
    token = 0
    for slot, start, count in chunks:
        for position in range(start, start + count):
            wanted = paged.attend(q[token], slot, position)
            torch.testing.assert_close(out[token], wanted, rtol=1e-4, atol=1e-5)
            token += 1
    assert out[token:].count_nonzero() == 0
    if not use_kernels(q):
        return
    # Of each chunk the last token alone: the same bits.
    work = plan_prefill(slots, starts, begins, *q.shape[:2], paged.k_cache, Scoring(SCALE, **paged.options))
    last = torch.full_like(q, float("nan"))
    few = plan_last_queries(slots, starts, begins, work)
    prefill_attention(q, *caches, slots, starts, begins, SCALE, work=few, out=last, **paged.options)
    ends = (begins[1:] - 1)[counts > 0].long()
    assert torch.equal(last[ends], out[ends])


def test_layers_of_other_sinks_share_a_plan() -> None:
    one, other = (Scoring(SCALE, 5, sinks_H=torch.rand(3)) for _ in range(2))
    assert len({one, other}) == 1
    assert Scoring(SCALE).is_plain
    assert not Scoring(SCALE, sinks_H=torch.rand(3)).is_plain


@pytest.mark.parametrize("cells", [torch.float32, FP8])
@pytest.mark.parametrize(("normed", "norm_values"), [(False, False), (True, False), (True, True)])
def test_prologue(normed: bool, norm_values: bool, cells: torch.dtype) -> None:
    T, heads, kv_heads, head_dim, page = 5, 6, 2, 8, 16
    qkv = torch.randn(T, (heads + 2 * kv_heads) * head_dim)
    if cells == FP8:
        qkv[1] *= 300  # more than it holds
    most = torch.finfo(cells).max
    positions = torch.tensor([3, 0, 17, 17, 40]).int()
    angles = torch.outer(torch.arange(64.0), 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    q_norm, k_norm = torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5
    k_cache = torch.full((4, kv_heads, page, head_dim), float("nan")).to(cells)
    v_cache = k_cache.clone()
    kv_slots = torch.tensor([3 * page + 3, page, 2 * page + 1, page + 1, 3 * page + 8])
    norms = (q_norm, k_norm) if normed else (None, None)
    arguments = (positions, kv_slots, cos_sin, *norms, 1e-6, k_cache, v_cache, heads)
    q_THD = attention_prologue(qkv.clone(), *arguments, norm_values=norm_values)

    def wanted(x_HD: Tensor, token: int, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x_HD = x_HD / (x_HD.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm
        # A pair (first half, second half) is one complex number, turned by its angle.
        pairs = torch.complex(x_HD[:, : head_dim // 2], x_HD[:, head_dim // 2 :])
        turned = pairs * torch.polar(torch.ones(head_dim // 2), angles[int(positions[token])])
        return torch.cat((turned.real, turned.imag), 1)

    for token in range(T):
        q, k, v = qkv[token].view(-1, head_dim).split([heads, kv_heads, kv_heads])
        at = int(kv_slots[token]) // page, slice(None), int(kv_slots[token]) % page
        torch.testing.assert_close(q_THD[token], wanted(q, token, norms[0]), rtol=1e-4, atol=1e-5)
        near = {"rtol": 1.01 / 16, "atol": 2.0**-10} if cells == FP8 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(k_cache[at].float(), wanted(k, token, norms[1]).clamp(-most, most), **near)
        if norm_values:
            v = v / (v.square().mean(1, keepdim=True) + 1e-6).sqrt()
            torch.testing.assert_close(v_cache[at].float(), v, **near)
        else:
            assert torch.equal(v_cache[at].float(), v.clamp(-most, most).to(cells).float())
    assert int(k_cache.float().isfinite().sum()) == T * kv_heads * head_dim  # nothing else was written


def test_kernels_in_the_interpreter() -> None:
    rerun_interpreted(__file__)
