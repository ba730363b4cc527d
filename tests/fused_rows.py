"""Decode rows as a layer's fused kernel gets them, on any device, and what they must come to in float64."""

import torch
from torch import Tensor

from paged_attention import Heads, PagedCache, distance
from tercet.triton_kernels.fused_decode import FusedPlan, fused_decode_attention, plan_fused_decode

EPS = 1e-6
NEAR = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
UNEVEN = [[1], [0, 0, 0], [1025], [2, 1, 33, 34], [0, 700, 0, 0, 5, 64, 65, 0]]
"""Lengths of steps' rows, around a tile's edge and a page's; 0: padding."""


def normed_and_turned(x: Tensor, norm: Tensor | None, angles: Tensor) -> Tensor:
    """Heads of a row or of several, in float64. So many numbers turn as there are angles, twice."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    half = angles.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def tiles_seen(length: int, tile: int, window: int) -> range:
    """Tiles of a row with something in the cache, beside the newest token, that it sees."""
    seen = [position // tile for position in range(length - 1) if not window or position > length - 1 - window]
    return range(seen[0], seen[-1] + 1) if seen else range(0)


class Step:
    """Rows of one step, each in a slot of its own, its newest token not yet in the cache; with `tries`, its last few:
    as many as there is room for in each second slot, or fewer, and what is in rows behind them is NaN."""

    deterministic = False
    longest = 0

    def __init__(
        self,
        heads: Heads,
        lengths: list[int],
        with_norms: bool,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        cells: torch.dtype | None = None,
        tries: int = 1,
        shifted: bool = False,
        rotary_dim: int = 0,
        norm_values: bool = False,
    ) -> None:
        """`shifted`: slots are turned less far than they are counted, as behind images. `rotary_dim`: so many numbers
        of a head turn, and rows have something behind their heads; 0: all of them, and nothing."""
        self.norm_values = norm_values
        self.heads, self.lengths, self.device, self.dtype, self.tries = heads, lengths, device, dtype, tries
        self.counts = [min(length, 1 + slot * 5 % tries if slot % 2 else tries) for slot, length in enumerate(lengths)]
        self.cache = PagedCache(heads, lengths, device, dtype, cells)
        self.slots = torch.randperm(len(lengths)).tolist()
        row_size = (heads.num_q + 2 * heads.num_kv) * heads.dim
        self.longer = torch.randn(len(lengths), tries, row_size + 8 * (rotary_dim > 0)).to(device, dtype)
        self.longer[..., row_size:] = float("nan")
        self.qkv = self.longer[..., :row_size]
        self.norms = [(torch.rand(heads.dim) + 0.5).to(device, dtype) for _ in range(2)] if with_norms else [None, None]
        turned = rotary_dim or heads.dim
        frequencies = 10_000.0 ** (-torch.arange(0, turned, 2).double() / turned)
        self.angles = torch.outer(torch.arange(max(lengths) + 1).double(), frequencies).to(device)
        # As far as their first token is behind the first of all; one that is done has any.
        most = [length - count if length else 900 for length, count in zip(lengths, self.counts, strict=True)]
        self.shifts = [-int(torch.randint(one + 1, ())) if shifted else 0 for one in most]
        self.shifts_S = torch.tensor(self.shifts, dtype=torch.int32, device=device) if shifted else None
        for row, slot in enumerate(self.slots):
            self.qkv[row, self.counts[slot] :] = float("nan")
            for cache in (self.cache.k_cache, self.cache.v_cache):
                cache[self.cells(slot)] = float("nan")

    def positions(self, slot: int) -> Tensor:
        """Of the newest tokens of a slot."""
        length = self.lengths[slot]
        return torch.arange(length - self.counts[slot], length, device=self.device)

    @property
    def table(self) -> Tensor:
        """The page table, as far as windows still see it."""
        firsts = (
            (slot, length - count) for slot, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True))
        )
        return self.cache.table_from(firsts)

    def cells(self, slot: int) -> tuple[Tensor, slice, Tensor]:
        """Where they go."""
        positions, page = self.positions(slot), self.heads.page
        return self.cache.table[slot, positions // page].long(), slice(None), positions % page

    def plan(self, slots: list[int] | None = None) -> FusedPlan:
        slots, cache = self.slots if slots is None else slots, self.cache
        lengths = cache.ints([self.lengths[slot] for slot in slots])
        seen = [[*(self.positions(slot) + 1).tolist(), *[0] * self.tries][: self.tries] for slot in slots]
        return plan_fused_decode(
            lengths, cache.ints(slots), self.table, self.heads.num_q, cache.k_cache, window=self.heads.window,
            deterministic=self.deterministic, longest=self.longest, tries=self.tries,
            lengths_T=cache.ints([number for of_slot in seen for number in of_slot]) if self.tries > 1 else None,
        )  # fmt: skip

    def run(self, rows: list[int] | None = None) -> Tensor:
        """All rows, or those given; of several tokens each has its own."""
        rows = list(range(len(self.slots))) if rows is None else rows
        heads, cache, plan = self.heads, self.cache, self.plan([self.slots[row] for row in rows])
        # Launched without overlap, so that the kernel may read the plan before it waits.
        shape = len(rows) * self.tries, heads.num_q, heads.dim
        out = torch.full(shape, float("nan"), device=self.device, dtype=self.dtype)
        cos_sin = torch.cat((self.angles.cos(), self.angles.sin()), 1).float()
        qkv = self.longer[rows].flatten(0, 1)[:, : self.qkv.shape[2]]
        fused_decode_attention(
            qkv, cos_sin, *self.norms, EPS, cache.k_cache, cache.v_cache, self.table, plan, heads.num_q,
            heads.dim**-0.5, out, cache.sinks_H, self.shifts_S, norm_values=self.norm_values,
        )  # fmt: skip
        return out

    def caches(self) -> list[Tensor]:
        """As they are now."""
        return [cache.clone() for cache in (self.cache.k_cache, self.cache.v_cache)]

    def check_written(self, slot: int, before: list[Tensor]) -> None:
        """Of the caches nothing has changed but where this slot's new tokens go."""
        for cache, old in zip((self.cache.k_cache, self.cache.v_cache), before, strict=True):
            own = old.clone()
            own[self.cells(slot)] = cache[self.cells(slot)]
            torch.testing.assert_close(cache, own, rtol=0, atol=0, equal_nan=True)

    def check(self, out: Tensor) -> None:
        """What came out, and that of the caches the cells of the new tokens changed and nothing else."""
        heads, cache = self.heads, self.cache
        cells = torch.finfo(cache.k_cache.dtype)
        factors = torch.float16 if cache.cells else self.dtype  # FP8 is multiplied in fp16
        rounding, least = 1.02 / 2 * cells.eps, max(cells.smallest_normal * cells.eps / 2, 1e-5)
        assert int(cache.k_cache.float().isfinite().sum()) == sum(self.lengths) * heads.num_kv * heads.dim
        for row, slot in enumerate(self.slots):
            count, length = self.counts[slot], self.lengths[slot]
            of_slot = out.view(-1, self.tries, heads.num_q, heads.dim)[row]
            assert not of_slot[count:].count_nonzero()
            if not count:
                continue
            rows = self.qkv[row, :count].view(count, -1, heads.dim)
            q, k, v = rows.split([heads.num_q, heads.num_kv, heads.num_kv], 1)
            angles = self.angles[self.positions(slot) + self.shifts[slot], None]
            q, k = (normed_and_turned(x, norm, angles) for x, norm in zip((q, k), self.norms, strict=True))
            torch.testing.assert_close(cache.k_cache[self.cells(slot)].double(), k, rtol=rounding, atol=least)
            if self.norm_values:
                v = normed_and_turned(v, v.new_ones(heads.dim), self.angles[0, :0])
                torch.testing.assert_close(cache.v_cache[self.cells(slot)].double(), v, rtol=rounding, atol=least)
                v = cache.v_cache[self.cells(slot)]
            v = v.to(cache.v_cache.dtype)
            assert torch.equal(cache.v_cache[self.cells(slot)].double(), v.double())
            newest = slice(length - count, length)
            cache.keys[slot][newest], cache.values[slot][newest] = cache.k_cache[self.cells(slot)], v
            wanted = cache.exact(q.to(factors), slot, length - count)
            assert distance(of_slot[:count], wanted) < NEAR[self.dtype], (row, length, count)
            for kept, sequence in ((cache.k_cache, cache.keys[slot]), (cache.v_cache, cache.values[slot])):
                positions = torch.arange(length, device=self.device)
                pages = cache.table[slot, positions // heads.page].long()
                assert torch.equal(kept[pages, :, positions % heads.page].double(), sequence.double())
