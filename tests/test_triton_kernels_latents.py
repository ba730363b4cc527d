"""Attention to latents against attention written out query by query, over pages full of NaN where nothing is.

The references here; the kernels in Triton's interpreter, by running this file once more.
"""

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from tercet.triton_kernels.attention import plan_last_queries
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.latent_attention import (
    latent_decode_attention,
    latent_prefill_attention,
    plan_latent_decode,
    plan_latent_prefill,
)
from tercet.triton_kernels.latent_heads import latent_queries, latent_values
from tercet.triton_kernels.latent_prologue import latent_prologue

SLOTS, PAGES_EACH, SCALE = 6, 6, 0.2


class Paged:
    """Random sequences in a paged cache, and attention to them the slow way."""

    def __init__(self, num_heads: int, rank: int, turned: int, page: int, cells: torch.dtype) -> None:
        self.num_heads, self.rank, self.dim = num_heads, rank, rank + turned
        num_pages = SLOTS * PAGES_EACH + 1
        self.cache = torch.full((num_pages, 1, page, self.dim), float("nan")).to(cells)
        self.table = torch.randperm(num_pages - 1)[: SLOTS * PAGES_EACH].view(SLOTS, -1).int() + 1
        self.lengths = [0, 1, page, page + 1, 5 * page + 3, 2 * page + 5]
        self.rows = [torch.randn(length, self.dim).to(cells).float() for length in self.lengths]
        for slot, length in enumerate(self.lengths):
            for position in range(length):
                at = int(self.table[slot, position // page]), 0, position % page
                self.cache[at] = self.rows[slot][position].to(cells)

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, self.num_heads, self.dim)

    def attend(self, q_HD: Tensor, slot: int, seen: int) -> Tensor:
        rows = self.rows[slot][:seen].double()
        weights = (q_HD.double() @ rows.T * SCALE).softmax(-1) if seen else rows.new_zeros(self.num_heads, 0)
        return (weights @ rows[:, : self.rank]).float()


CASES = [
    (5, 40, 8, 16, torch.float32),
    (6, 24, 8, 16, FP8),
    long(70, 32, 16, 32, torch.float32),  # more heads than one program takes
    long(16, 72, 10, 64, torch.float32),
]
SIZES = ("heads", "rank", "turned", "page", "cells")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tries", [1, 3])
@pytest.mark.parametrize(SIZES, CASES)
def test_decode(
    heads: int, rank: int, turned: int, page: int, cells: torch.dtype, tries: int, deterministic: bool
) -> None:
    paged = Paged(heads, rank, turned, page, cells)
    order = torch.randperm(SLOTS)
    lengths = torch.tensor(paged.lengths)[order].int()
    seen = []  # of a row's last tokens some or all, the first of them always
    for row, slot in enumerate(order.tolist()):
        count = min(tries - row % 2 * (tries > 1), paged.lengths[slot])
        first = paged.lengths[slot] - count + 1
        seen += [*range(first, first + count), *[0] * (tries - count)]
    lengths_T = torch.tensor(seen).int() if tries > 1 else None
    q = paged.queries(SLOTS * tries)
    out = torch.full((len(q), heads, rank), float("nan"))
    rows = order.int(), lengths
    work = None
    if use_kernels(q):
        work = plan_latent_decode(
            *rows[::-1], paged.table, paged.cache, heads, rank, deterministic=deterministic, tries=tries,
            lengths_T=lengths_T,
        )  # fmt: skip
    how = {"work": work, "tries": tries, "lengths_T": lengths_T}
    got = latent_decode_attention(q, paged.cache, paged.table, *rows, SCALE, rank, out=out, **how)  # type: ignore[arg-type]
    assert got is out
    for token, count in enumerate(seen):
        wanted = paged.attend(q[token], int(order[token // tries]), count)
        torch.testing.assert_close(out[token], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(SIZES, CASES)
def test_prefill(heads: int, rank: int, turned: int, page: int, cells: torch.dtype) -> None:
    paged = Paged(heads, rank, turned, page, cells)
    chunks = [(4, 0, 20), (5, page + 9, 7), (1, 0, 1), (0, 0, 0), (2, page - 1, 1)]  # slot, start, count
    slots, starts, counts = (torch.tensor(column).int() for column in zip(*chunks, strict=True))
    begins = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    q = paged.queries(int(counts.sum()) + 3)  # three tokens of padding
    out = torch.full((len(q), heads, rank), float("nan"))
    places = paged.cache, paged.table, slots, starts, begins, SCALE, rank
    latent_prefill_attention(q, *places, out=out)
    token = 0
    for slot, start, count in chunks:
        for position in range(start, start + count):
            wanted = paged.attend(q[token], slot, position + 1)
            torch.testing.assert_close(out[token], wanted, rtol=1e-4, atol=1e-5)
            token += 1
    assert out[token:].count_nonzero() == 0
    if not use_kernels(q):
        return
    # Of each chunk the last token alone: the same bits.
    few = plan_last_queries(slots, starts, begins, plan_latent_prefill(slots, starts, begins, len(q), heads))
    last = latent_prefill_attention(q, *places, work=few, out=torch.full_like(out, float("nan")))
    ends = (begins[1:] - 1)[counts > 0].long()
    assert torch.equal(last[ends], out[ends])


def turned(x_THR: Tensor, angles_TF: Tensor, in_pairs: bool) -> Tensor:
    """By complex numbers, in halves."""
    x_THR = x_THR.double()
    first, second = (x_THR[..., ::2], x_THR[..., 1::2]) if in_pairs else x_THR.chunk(2, -1)
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angles_TF), angles_TF)[:, None]
    return torch.cat((product.real, product.imag), -1)


@pytest.mark.parametrize("cells", [torch.float32, FP8])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_prologue(in_pairs: bool, normed: bool, cells: torch.dtype) -> None:
    T, Q, L, R, page = 5, 52, 24, 12, 16
    x = torch.randn(T, Q + L + R)
    angles = torch.outer(torch.arange(64.0), 100.0 ** (-torch.arange(0, R, 2) / R))
    positions, slots = torch.randint(0, 64, (T,)).int(), torch.randperm(3 * page)[:T] + page
    latent_norm, query_norm = torch.rand(L) + 0.5, torch.rand(Q) + 0.5
    cache = torch.full((4, 1, page, L + R), float("nan")).to(cells)
    q = latent_prologue(
        x, positions, slots, torch.cat((angles.cos(), angles.sin()), 1), latent_norm, query_norm if normed else None,
        0.1, cache, in_pairs=in_pairs,
    )  # fmt: skip

    def norm(x_TD: Tensor, weight: Tensor) -> Tensor:
        wide = x_TD.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight

    behind = turned(x[:, None, Q + L :], angles.double()[positions.long()], in_pairs)[:, 0]
    wanted = torch.cat((norm(x[:, Q : Q + L], latent_norm), behind), 1)
    got = cache[slots // page, 0, slots % page].float()
    near = {"rtol": 1e-5, "atol": 1e-5} if cells == torch.float32 else {"rtol": 0.07, "atol": 1e-3}
    torch.testing.assert_close(got, wanted.float(), **near)
    assert int(cache.float().isfinite().sum()) == T * (L + R)  # nothing else was written
    torch.testing.assert_close(q, norm(x[:, :Q], query_norm).float() if normed else x[:, :Q], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [3, long(37)])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_heads(in_pairs: bool, T: int) -> None:
    H, S, V, L, R = 3, 18, 70, 130, 12
    fused = torch.randn(T, H * (S + R) + 9)
    q, up = fused[:, : H * (S + R)], torch.randn(H, S + V, L)
    angles = torch.outer(torch.arange(64.0), 100.0 ** (-torch.arange(0, R, 2) / R))
    positions = torch.randint(0, 64, (T,)).int()
    got = latent_queries(q, up, S, positions, torch.cat((angles.cos(), angles.sin()), 1), in_pairs=in_pairs)
    heads = q.unflatten(1, (H, -1))
    still = torch.einsum("ths,hsl->thl", heads[..., :S].double(), up[:, :S].double())
    wanted = torch.cat((still, turned(heads[..., S:], angles.double()[positions.long()], in_pairs)), 2)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-4)
    attended = torch.randn(T, H, L)
    values = torch.einsum("thl,hvl->thv", attended.double(), up[:, S:].double())
    torch.testing.assert_close(latent_values(attended, up, S), values.float(), rtol=1e-5, atol=1e-4)


def test_bad_input() -> None:
    paged = Paged(4, 24, 8, 16, torch.float32)
    ints = torch.zeros(3).int()
    rows = paged.cache, paged.table, ints, ints, SCALE
    with pytest.raises(ValueError, match=r"rank: got 32, wanted a part of the cache's 32 numbers"):
        latent_decode_attention(paged.queries(3), *rows, 32)
    with pytest.raises(ValueError, match=r"q: got 3 queries, tries 2; wanted as many of each row"):
        latent_decode_attention(paged.queries(3), *rows, 24, tries=2)
    with pytest.raises(ValueError, match=r"cache: got shape \[37, 2, 16, 32\], wanted \[\*, 1, \*, 32\]"):
        latent_decode_attention(paged.queries(3), paged.cache.expand(-1, 2, -1, -1).contiguous(), *rows[1:], 24)
    with pytest.raises(ValueError, match=r"query_starts: got shape \[3\], wanted \[4\]"):
        latent_prefill_attention(paged.queries(3), *rows[:-1], ints, SCALE, 24)
    up, table = torch.randn(4, 12, 24), torch.zeros(9, 8)
    with pytest.raises(ValueError, match=r"num_still: got 12, wanted a part of the 12 rows of a head's matrix"):
        latent_values(torch.randn(3, 4, 24), up, 12)
    with pytest.raises(ValueError, match=r"q: got shape \[3, 40\], wanted \[\*, 60\]"):
        latent_queries(torch.randn(3, 40), up, 7, ints, table, in_pairs=True)
    with pytest.raises(ValueError, match=r"x: got rows of 32, wanted more than the cache's 32"):
        norm = torch.ones(24)
        latent_prologue(
            torch.randn(3, 32), ints, ints.long(), table, norm, None, 1e-6, paged.cache, in_pairs=True
        )  # fmt: skip


def test_with_kernels() -> None:
    rerun_interpreted(__file__)
