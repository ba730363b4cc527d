"""Random sequences in a paged cache on any device, and attention to them in float64 with nothing clever about it.

Whatever no sequence owns is NaN: cells beyond a sequence's end, pages of nobody, and the page that entries of the page
table name beyond a sequence's end, and where windows have gone on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tercet.engine.page_need import PageNeed
from tercet.triton_kernels.attention import decode_attention, plan_last_queries, plan_prefill, prefill_attention
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.decode_work import make_decode_work, plan_decode_work
from tercet.triton_kernels.dispatch import use_kernels


@dataclass(frozen=True)
class Heads:
    """Sizes of one layer's attention, and what its scores are made of."""

    num_q: int
    num_kv: int
    dim: int
    page: int
    window: int = 0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        options = [f"window{self.window}"] * bool(self.window) + ["softcap"] * bool(self.softcap)
        options += ["alibi"] * self.alibi + ["sinks"] * self.sinks
        return "-".join([f"{self.num_q}q{self.num_kv}kv", f"{self.dim}d", f"page{self.page}", *options])


@dataclass
class PagedCache:
    """One layer's K and V of sequences of given lengths; slot i holds sequence i."""

    heads: Heads
    lengths: list[int]
    device: str
    dtype: torch.dtype
    cells: torch.dtype | None = None
    """What the cache holds, if not `dtype`."""
    images: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By slot, the first position of each image, and that behind it: its tokens see each other."""
    slopes_H: Tensor | None = field(init=False, default=None)
    sinks_H: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        heads, page = self.heads, self.heads.page
        pages_each = -(-max(self.lengths) // page) + 1
        num_slots = len(self.lengths)
        # The last page belongs to nobody.
        num_pages = num_slots * pages_each + 2
        shape = num_pages, heads.num_kv, page, heads.dim
        self.k_cache, self.v_cache = (
            torch.full(shape, float("nan"), device=self.device).to(self.cells or self.dtype) for _ in range(2)
        )
        table = torch.randperm(num_pages - 2)[: num_slots * pages_each].view(num_slots, pages_each) + 1
        self.keys, self.values = [], []
        for slot, length in enumerate(self.lengths):
            position = torch.arange(length)
            at = table[slot, position // page], slice(None), position % page
            for cache, sequences in ((self.k_cache, self.keys), (self.v_cache, self.values)):
                rows = torch.randn(length, heads.num_kv, heads.dim).to(self.device, cache.dtype)
                cache[at] = rows
                sequences.append(rows)
            table[slot, -(-length // page) :] = num_pages - 1
        self.table = table.int().to(self.device)
        if heads.alibi:
            self.slopes_H = torch.rand(heads.num_q, device=self.device)
        if heads.sinks:
            # As much as hundreds of keys have together, or next to nothing.
            self.sinks_H = (torch.rand(heads.num_q) * 8 - 2).to(self.device, self.dtype)

    @property
    def _options(self) -> dict[str, object]:
        options = {"window": self.heads.window, "softcap": self.heads.softcap}
        return {**options, "alibi_slopes_H": self.slopes_H, "sinks_H": self.sinks_H}

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, self.heads.num_q, self.heads.dim).to(self.device, self.dtype)

    def ints(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def table_from(self, positions: Iterable[tuple[int, int]]) -> Tensor:
        """The page table when of each of these slots nothing is computed any longer ahead of a position."""
        heads, table = self.heads, self.table.clone()
        need = PageNeed((heads.window,), heads.page, 1)
        for slot, position in () if self.images else positions:
            table[slot, : need.first_seen(heads.window, position)] = len(self.k_cache) - 1
        return table

    def decode(self, q_BHD: Tensor, slots: list[int], lengths: list[int], *, deterministic: bool) -> Tensor:
        """Our kernels: row b attends to the first `lengths[b]` positions of `slots[b]`."""
        heads = self.heads
        work = make_decode_work(
            len(slots), len(slots) * self.table.shape[1], heads.page, heads.num_q, heads.num_kv, heads.dim,
            q_BHD.device, deterministic=deterministic, window=heads.window,
        )  # fmt: skip
        plan_decode_work(self.ints(lengths), self.ints(slots), work, heads.num_kv)
        least = {slot: min(at for one, at in zip(slots, lengths, strict=True) if one == slot) - 1 for slot in slots}
        caches = self.k_cache, self.v_cache, self.table_from(least.items()), self.ints(slots), self.ints(lengths)
        out = torch.full_like(q_BHD, float("nan"))
        return decode_attention(q_BHD, *caches, heads.dim**-0.5, work=work, out=out, **self._options)  # type: ignore[arg-type]

    def prefill(
        self, q_THD: Tensor, chunks: list[tuple[int, int, int]], *, only_last: bool = False, deep: int = 0
    ) -> Tensor:
        """Our kernel: chunks of (slot, start, count), packed; tokens beyond the last chunk are padding.

        `only_last`: no more is computed than what the chunks' last tokens need; `deep`: tiles are cut by keys too.
        """
        ends = [0]
        for _, _, count in chunks:
            ends.append(ends[-1] + count)
        slots, starts = (self.ints([chunk[part] for chunk in chunks]) for part in range(2))
        table = self.table_from((slot, start) for slot, start, count in chunks if count)
        caches = self.k_cache, self.v_cache, table, slots, starts, self.ints(ends)
        out = torch.full_like(q_THD, float("nan"))
        scale = self.heads.dim**-0.5
        scoring = Scoring(scale, **self._options)  # type: ignore[arg-type]
        ends_T = self._ends(chunks, len(q_THD)) if self.images else None
        work = None
        if use_kernels(q_THD):
            work = plan_prefill(*caches[3:], *q_THD.shape[:2], self.k_cache, scoring, deep=deep, ends_T=ends_T)
        if only_last:
            assert work is not None
            work = plan_last_queries(*caches[3:], work)
        return prefill_attention(q_THD, *caches, scale, work=work, ends_T=ends_T, out=out, **self._options)  # type: ignore[arg-type]

    def _ends(self, chunks: list[tuple[int, int, int]], num_tokens: int) -> Tensor:
        """As the kernels are told of images."""
        ends = []
        for slot, start, count in chunks:
            for position in range(start, start + count):
                ends.append(next((stop for first, stop in self.images.get(slot, ()) if first <= position < stop), 0))
        return self.ints([*ends, *[0] * (num_tokens - len(ends))])

    def exact(self, q_THD: Tensor, slot: int, start: int) -> Tensor:
        """Attention in float64 of queries at positions `start` and on of a slot."""
        heads = self.heads
        end = start + q_THD.shape[0]
        group = heads.num_q // heads.num_kv
        k, v = (rows[slot][:end].double().repeat_interleave(group, 1) for rows in (self.keys, self.values))
        scores = torch.einsum("thd,lhd->htl", q_THD.double(), k) * heads.dim**-0.5
        if heads.softcap:
            scores = heads.softcap * torch.tanh(scores / heads.softcap)
        distance = torch.arange(start, end)[:, None] - torch.arange(end)
        distance = distance.to(self.device)
        if self.slopes_H is not None:
            scores -= self.slopes_H.double()[:, None, None] * distance
        hidden = distance < 0
        for first, stop in self.images.get(slot, ()):
            hidden[max(first - start, 0) : max(stop - start, 0), first:stop] = False
        if heads.window:
            hidden |= distance >= heads.window
        weights = scores.masked_fill(hidden, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks_H is not None:
            total += self.sinks_H.double().exp()[:, None, None]
        return torch.einsum("htl,lhd->thd", weights / total, v)


def assert_near(cache: PagedCache, q_THD: Tensor, got: Tensor, chunks: list[tuple[int, int, int]], near: float) -> None:
    """What prefill gave for chunks of (slot, start, count), packed, and zeros for the padding behind them."""
    token = 0
    for slot, start, count in chunks:
        own = slice(token, token + count)
        assert distance(got[own], cache.exact(q_THD[own], slot, start)) < near, (slot, start, count)
        token += count
    assert not got[token:].count_nonzero()


def distance(got: Tensor, wanted: Tensor) -> float:
    """The largest error over the vectors in the last dimension, each relative to its length."""
    if not wanted.numel():
        return 0.0
    return float(((got.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).nan_to_num(nan=float("inf")).max())
