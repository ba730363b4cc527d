"""On a GPU: attention to latents in bf16 against float64, over pages full of NaN where nothing is; a row's own bits."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paged_attention import distance
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.latent_attention import (
    latent_decode_attention,
    latent_prefill_attention,
    plan_latent_chunks,
    plan_latent_decode,
)
from tercet.triton_kernels.latent_heads import latent_queries, latent_values
from tercet.triton_kernels.latent_hopper import attend_in_room
from tercet.triton_kernels.latent_room import expand_latents, room_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEAR = 5e-3
NEAR_IN_ROOM = 7e-3
"""Keys and values are rounded, too."""
SCALE = 192**-0.5
LENGTHS = [0, 1, 2, 63, 64, 65, 511, 512, 513, 1024, 1777, 2300]
SIZES = [(16, 512, 64, 64), (20, 512, 64, 64), (128, 512, 64, 64), (5, 512, 64, 16), (40, 256, 32, 64), (7, 96, 16, 16)]
"""Heads, numbers of a latent, those behind it, tokens of a page."""


class Paged:
    def __init__(self, heads: int, rank: int, turned: int, page: int, cells: torch.dtype) -> None:
        self.heads, self.rank, self.dim = heads, rank, rank + turned
        pages_each = max(LENGTHS) // page + 2
        num_pages = len(LENGTHS) * pages_each + 2
        cache = torch.full((num_pages, 1, page, self.dim), float("nan"), dtype=torch.bfloat16).to(cells)
        table = torch.randperm(num_pages - 2)[: len(LENGTHS) * pages_each].view(len(LENGTHS), -1) + 1
        self.rows = []
        for slot, length in enumerate(LENGTHS):
            position = torch.arange(length)
            rows = torch.randn(length, self.dim).to(cells)
            cache[table[slot, position // page], 0, position % page] = rows
            self.rows.append(rows.cuda())
            table[slot, -(-length // page) :] = num_pages - 1  # which belongs to nobody
        self.cache, self.table = cache.cuda(), table.int().cuda()

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, self.heads, self.dim, device="cuda", dtype=torch.bfloat16)

    def exact(self, q_THD: Tensor, slot: int, start: int) -> Tensor:
        """Of queries at positions `start` and on."""
        rows = self.rows[slot][: start + len(q_THD)].double()
        scores = torch.einsum("thd,ld->htl", q_THD.double(), rows) * SCALE
        hidden = torch.arange(start, start + len(q_THD))[:, None] < torch.arange(len(rows))
        weights = scores.masked_fill(hidden.cuda(), float("-inf")).softmax(-1)
        return torch.einsum("htl,ld->thd", weights, rows[:, : self.rank])

    def decode(self, q: Tensor, slots: list[int], deterministic: bool, seen: list[int] | None = None) -> Tensor:
        """`seen`: by queries, where a slot has several."""
        rows = ints(slots), ints([LENGTHS[slot] for slot in slots])
        tries, lengths_T = len(q) // len(slots), None if seen is None else ints(seen)
        work = plan_latent_decode(
            *rows[::-1], self.table, self.cache, self.heads, self.rank, deterministic=deterministic, tries=tries,
            lengths_T=lengths_T,
        )  # fmt: skip
        out = q.new_full((len(q), self.heads, self.rank), float("nan"))
        return latent_decode_attention(
            q, self.cache, self.table, *rows, SCALE, self.rank, work=work, tries=tries, lengths_T=lengths_T, out=out
        )  # fmt: skip


def ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("cells", [torch.bfloat16, FP8])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "rank", "turned", "page"), SIZES)
def test_decode(heads: int, rank: int, turned: int, page: int, deterministic: bool, cells: torch.dtype) -> None:
    paged = Paged(heads, rank, turned, page, cells)
    many = [slot for slot in range(len(LENGTHS)) for _ in range(3)]
    random.shuffle(many)
    for slots in (many, [10], [4, 0, 11]):
        q = paged.queries(len(slots))
        got = paged.decode(q, slots, deterministic)
        for row, slot in enumerate(slots):
            if LENGTHS[slot]:
                wanted = paged.exact(q[row : row + 1], slot, LENGTHS[slot] - 1)[0]
                assert distance(got[row], wanted) < NEAR, (slot, LENGTHS[slot])
            else:
                assert not got[row].count_nonzero()
        if deterministic:
            for row in random.sample(range(len(slots)), min(5, len(slots))):
                alone = paged.decode(q[row : row + 1], slots[row : row + 1], deterministic)
                assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "rank", "turned", "page"), SIZES[:4])
def test_several_queries_of_a_row(heads: int, rank: int, turned: int, page: int, deterministic: bool) -> None:
    """Of its last tokens some or all, the first of them always; others are none."""
    paged, tries = Paged(heads, rank, turned, page, torch.bfloat16), 3
    seen = []
    for slot, length in enumerate(LENGTHS):
        count = min(tries - slot % 2, length)
        seen += [*range(length - count + 1, length + 1), *[0] * (tries - count)]
    q = paged.queries(len(seen))
    got = paged.decode(q, list(range(len(LENGTHS))), deterministic, seen)
    for token, length in enumerate(seen):
        if length:
            wanted = paged.exact(q[token : token + 1], token // tries, length - 1)[0]
            assert distance(got[token], wanted) < NEAR, (token, length)
        else:
            assert not got[token].count_nonzero()


@pytest.mark.parametrize("cells", [torch.bfloat16, FP8])
@pytest.mark.parametrize(("heads", "rank", "turned", "page"), SIZES)
def test_prefill(heads: int, rank: int, turned: int, page: int, cells: torch.dtype) -> None:
    paged = Paged(heads, rank, turned, page, cells)
    ends = [(11, 1000, 1300), (0, 0, 0), (5, 0, 65), (9, 1023, 1), (10, 1500, 277), (8, 1, 512), (3, 2, 3)]
    middle = [(7, 100, 65), (6, 0, 64), (10, 777, 1), (4, 0, 1)]
    for chunks, padding in ((ends, 70), (middle, 0), ([(10, 1770, 7)], 9), ([(0, 0, 0)], 5)):
        q = paged.queries(sum(count for _, _, count in chunks) + padding)
        got = prefill(paged, q, chunks)
        token = 0
        for slot, start, count in chunks:
            own = slice(token, token + count)
            assert distance(got[own], paged.exact(q[own], slot, start)) < NEAR, (slot, start, count)
            token += count
        assert not got[token:].count_nonzero()
    # Cut otherwise: the same bits.
    q = paged.queries(300)
    whole = prefill(paged, q, [(11, 1000, 300)])
    for at in (1, 37, 128, 299):
        parts = prefill(paged, q[:at], [(11, 1000, at)]), prefill(paged, q[at:], [(11, 1000 + at, 300 - at)])
        assert torch.equal(torch.cat(parts), whole), at


def prefill(paged: Paged, q: Tensor, chunks: list[tuple[int, int, int]]) -> Tensor:
    begins = [0]
    for _, _, count in chunks:
        begins.append(begins[-1] + count)
    slots, starts = (ints([chunk[part] for chunk in chunks]) for part in range(2))
    out = q.new_full((len(q), paged.heads, paged.rank), float("nan"))
    places = paged.cache, paged.table, slots, starts, ints(begins)
    return latent_prefill_attention(q, *places, SCALE, paged.rank, out=out)


@pytest.mark.parametrize(
    ("heads", "still", "value", "rank", "page"),
    [(16, 128, 128, 512, 64), (20, 192, 256, 512, 64), (3, 64, 128, 128, 128), (5, 128, 256, 256, 64)],
)
def test_in_room(heads: int, still: int, value: int, rank: int, page: int) -> None:
    """Keys and values made first: as when they are made in float64."""
    paged = Paged(heads, rank, 64, page, torch.bfloat16)
    up = torch.randn(heads, still + value, rank, device="cuda", dtype=torch.bfloat16) * rank**-0.5
    ends = [(11, 1000, 1300), (0, 0, 0), (5, 0, 65), (9, 1023, 1), (10, 1500, 277), (8, 1, 512), (3, 2, 3)]
    for chunks, padding in ((ends, 70), ([(7, 100, 258)], 6), ([(10, 1400, 377), (6, 0, 511), (0, 0, 0)], 0)):
        q = torch.randn(sum(chunk[2] for chunk in chunks) + padding, heads * (still + 64), device="cuda").bfloat16()
        turned = paged.queries(len(q))
        got, last, few = in_room(paged, up, still, q, turned, chunks)
        token = 0
        for slot, start, count in chunks:
            own = slice(token, token + count)
            wanted = exact_in_heads(paged, up, still, q[own], turned[own], slot, start)
            assert distance(got[own], wanted) < NEAR_IN_ROOM, (slot, start, count)
            if count:
                assert torch.equal(last[token + count - 1], got[token + count - 1])
            token += count
        assert got[token:].isnan().all()
        assert few.isnan().all()  # where there is no room for all, for none


def in_room(
    paged: Paged, up: Tensor, still: int, q: Tensor, turned: Tensor, chunks: list[tuple[int, int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens', the last of chunks' alone, and all with too little room."""
    begins = [0]
    for _, _, count in chunks:
        begins.append(begins[-1] + count)
    slots, starts = (ints([chunk[part] for chunk in chunks]) for part in range(2))
    heads, value = len(up), up.shape[1] - still
    answers = []
    for which in ("whole", "last", "few"):
        room = room_for(len(q), len(chunks), 9999, heads, still, 64, value, paged.cache)
        assert room is not None
        room.pages_WHPX.fill_(float("nan"))
        if which == "few":
            seen = sum(-(-(start + count) // 128) for _, start, count in chunks if count)
            room = replace(room, pages_WHPX=room.pages_WHPX[: seen - 1])
        works = plan_latent_chunks(slots, starts, ints(begins), ints([begins[-1] + 8]), 8, len(q), heads, room)
        work = works[which == "last"].in_room
        assert work is not None
        assert int(room.latent_rows_1) == (begins[-1] + 8 if which == "few" else 8)
        expand_latents(paged.cache, up, paged.table, slots, starts, ints(begins), room)
        out = q.new_full((len(q), heads, value), float("nan"))
        attend_in_room(q, turned, paged.cache, paged.table, SCALE, still, work, room, out)
        answers.append(out)
    return answers[0], answers[1], answers[2]


def exact_in_heads(paged: Paged, up: Tensor, still: int, q: Tensor, turned: Tensor, slot: int, start: int) -> Tensor:
    rows = paged.rows[slot][: start + len(q)].double()
    latents, behind = rows[:, : paged.rank], rows[:, paged.rank :]
    keys = torch.einsum("ld,hsd->lhs", latents, up[:, :still].double())
    values = torch.einsum("ld,hvd->lhv", latents, up[:, still:].double())
    heads = q.unflatten(1, (len(up), -1)).double()[..., :still]
    scores = torch.einsum("ths,lhs->htl", heads, keys)
    scores += torch.einsum("thr,lr->htl", turned[..., paged.rank :].double(), behind)
    hidden = torch.arange(start, start + len(q))[:, None] < torch.arange(len(rows))
    weights = (scores * SCALE).masked_fill(hidden.cuda(), float("-inf")).softmax(-1)
    return torch.einsum("htl,lhv->thv", weights, values)


@pytest.mark.parametrize(
    ("heads", "still", "value", "rank"), [(16, 128, 128, 512), (20, 192, 256, 512), (5, 24, 20, 96)]
)
def test_heads(heads: int, still: int, value: int, rank: int) -> None:
    turned = 64
    up = torch.randn(heads, still + value, rank, device="cuda", dtype=torch.bfloat16) * rank**-0.5
    angles = torch.rand(512, turned // 2, device="cuda") * 6
    table = torch.cat((angles.cos(), angles.sin()), 1)
    whole: list[Tensor] = []
    rows = torch.randn(300, heads * (still + turned) + 64, device="cuda", dtype=torch.bfloat16)
    attended = torch.randn(300, heads, rank, device="cuda", dtype=torch.bfloat16)
    positions = torch.randint(0, 512, (300,), device="cuda", dtype=torch.int32)
    for count in (300, 17, 1):
        q = rows[:count, : heads * (still + turned)]
        got = latent_queries(q, up, still, positions[:count], table, in_pairs=True)
        x = q.unflatten(1, (heads, -1)).double()
        wanted = torch.einsum("ths,hsl->thl", x[..., :still], up[:, :still].double())
        assert distance(got[..., :rank], wanted) < NEAR
        pairs = torch.view_as_complex(x[..., still:].unflatten(-1, (-1, 2)).contiguous())
        turns = torch.polar(torch.ones_like(angles), angles)[positions[:count].long(), None]
        product = pairs * turns.to(pairs.dtype)
        assert distance(got[..., rank:], torch.cat((product.real, product.imag), -1)) < NEAR
        values = latent_values(attended[:count], up, still)
        wanted = torch.einsum("thl,hvl->thv", attended[:count].double(), up[:, still:].double())
        assert distance(values, wanted) < NEAR
        # A token's bits are its own, in tiles of any size.
        whole = whole or [got, values]
        assert torch.equal(got, whole[0][:count])
        assert torch.equal(values, whole[1][:count])
