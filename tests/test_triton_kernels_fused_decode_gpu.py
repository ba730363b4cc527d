"""On Hopper: the decode kernel that takes q, k, v rows as they are, in bf16 against float64, and what it writes."""

import pytest
import torch
from torch import Tensor

from paged_attention import Heads, PagedCache, distance
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.fused_decode import can_fuse_decode, fused_decode_attention, plan_fused_decode

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")]

DEVICE, DTYPE = "cuda", torch.bfloat16
EPS, NEAR = 1e-6, 5e-3
LENGTHS = [0, 1, 2, 31, 32, 33, 34, 63, 64, 65, 66, 129, 511, 1000, 2300]
HEADS = [
    Heads(16, 8, 128, 64),
    Heads(32, 8, 128, 32),
    Heads(32, 2, 128, 64),
    Heads(7, 1, 128, 128),
    Heads(5, 5, 64, 64),
    Heads(9, 3, 64, 32),
    Heads(14, 2, 64, 64),
]


def normed_and_turned(x: Tensor, norm: Tensor | None, angles: Tensor) -> Tensor:
    """Heads of one row, in float64."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class Step:
    """Rows of one step, each in a slot of its own, its newest token not yet in the cache."""

    def __init__(self, heads: Heads, lengths: list[int], with_norms: bool) -> None:
        self.heads, self.lengths = heads, lengths
        self.cache = PagedCache(heads, lengths, DEVICE, DTYPE)
        assert can_fuse_decode(self.cache.k_cache, heads.num_q, heads.dim, Scoring(1.0))
        self.slots = torch.randperm(len(lengths)).tolist()
        self.qkv = torch.randn(len(lengths), (heads.num_q + 2 * heads.num_kv) * heads.dim).to(DEVICE, DTYPE)
        self.norms = [(torch.rand(heads.dim) + 0.5).to(DEVICE, DTYPE) for _ in range(2)] if with_norms else [None, None]
        frequencies = 10_000.0 ** (-torch.arange(0, heads.dim, 2).double() / heads.dim)
        self.angles = torch.outer(torch.arange(max(lengths) + 1).double(), frequencies).to(DEVICE)
        for slot, length in enumerate(lengths):
            if length:
                for cache in (self.cache.k_cache, self.cache.v_cache):
                    cache[self.cell(slot)] = float("nan")

    def cell(self, slot: int) -> tuple[int, slice, int]:
        """Where the newest token of a slot goes."""
        position, page = self.lengths[slot] - 1, self.heads.page
        return int(self.cache.table[slot, position // page]), slice(None), position % page

    def run(self) -> Tensor:
        heads, cache = self.heads, self.cache
        lengths = cache.ints([self.lengths[slot] for slot in self.slots])
        shares = plan_fused_decode(lengths, cache.ints(self.slots), heads.num_q, cache.k_cache)
        out = torch.full((len(self.slots), heads.num_q, heads.dim), float("nan"), device=DEVICE, dtype=DTYPE)
        cos_sin = torch.cat((self.angles.cos(), self.angles.sin()), 1).float()
        fused_decode_attention(
            self.qkv, cos_sin, *self.norms, EPS, cache.k_cache, cache.v_cache, cache.table, shares, heads.num_q,
            heads.dim**-0.5, out,
        )  # fmt: skip
        return out

    def check(self, out: Tensor) -> None:
        """What came out, and that of the caches the cells of the new tokens changed and nothing else."""
        heads, cache = self.heads, self.cache
        assert int(cache.k_cache.isfinite().sum()) == sum(self.lengths) * heads.num_kv * heads.dim
        for row, slot in enumerate(self.slots):
            if not self.lengths[slot]:
                assert not out[row].count_nonzero()
                continue
            position = self.lengths[slot] - 1
            q, k, v = self.qkv[row].view(-1, heads.dim).split([heads.num_q, heads.num_kv, heads.num_kv])
            q, k = (
                normed_and_turned(x, norm, self.angles[position]) for x, norm in zip((q, k), self.norms, strict=True)
            )
            torch.testing.assert_close(cache.k_cache[self.cell(slot)].double(), k, rtol=1.02 * 2**-8, atol=1e-5)
            assert torch.equal(cache.v_cache[self.cell(slot)], v)
            cache.keys[slot][position], cache.values[slot][position] = cache.k_cache[self.cell(slot)], v
            wanted = cache.exact(q.to(DTYPE)[None], slot, position)[0]
            assert distance(out[row], wanted) < NEAR, (row, self.lengths[slot])
            for kept, sequence in ((cache.k_cache, cache.keys[slot]), (cache.v_cache, cache.values[slot])):
                positions = torch.arange(position + 1, device=DEVICE)
                pages = cache.table[slot, positions // heads.page].long()
                assert torch.equal(kept[pages, :, positions % heads.page], sequence)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_against_float64(heads: Heads, with_norms: bool) -> None:
    for lengths in (LENGTHS * 3, [2300], [1], [0, 0], [0, 5000, 0, 1, 1]):
        step = Step(heads, lengths, with_norms)
        out = step.run()
        step.check(out)
        assert torch.equal(step.run(), out), "the same step gives the same bits"


def test_many_rows_of_any_length() -> None:
    for count in (17, 256):
        step = Step(HEADS[0], torch.randint(0, 1500, (count,)).tolist(), True)
        step.check(step.run())
