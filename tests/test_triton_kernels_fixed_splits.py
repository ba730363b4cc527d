"""Rows are cut at fixed positions, every tile is in one split, the merge is told where parts are, and adds them."""

import pytest
import torch

from fused_rows import tiles_seen
from interpreted import rerun_interpreted
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.fixed_splits import make_fixed_splits, plan_fixed_splits
from tercet.triton_kernels.merge_splits import merge_splits

TILE, SPLIT = 32, 3
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")


@needs_interpreter
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [0, 0, 0],
        [1025],
        [96, 97, 98, 193, 194],
        [0, 700, 0, 0, 5, 64, 65, 0],
        torch.randint(0, 900, (70,)).tolist(),
    ],
)
@pytest.mark.parametrize("window", [0, 2, 33, 64, 100, 200])
def test_every_tile_is_in_one_split(lengths: list[int], window: int) -> None:
    slots = torch.randperm(len(lengths)).int()
    plan = make_fixed_splits(torch.tensor(lengths).int(), 1100, 20, 4, 64, TILE, SPLIT, window=window)
    for memory in (plan.splits_I4, plan.num_splits_1, plan.counts_B, plan.starts_B):
        memory.fill_(-7)
    plan_fixed_splits(slots, plan)

    tiles = [(tiles_seen(length, TILE, window) or range(1)) if length else range(0) for length in lengths]
    splits = [sorted({tile // SPLIT for tile in own}) for own in tiles]
    counts = [len(own) for own in splits]
    assert plan.counts_B.tolist() == counts
    assert plan.starts_B.tolist() == [sum(counts[:row]) for row in range(len(lengths))]
    assert plan.num_splits_1.item() == sum(counts) <= len(plan.splits_I4)
    records = plan.splits_I4[: sum(counts)].tolist()
    assert all(record == [-7] * 4 for record in plan.splits_I4[sum(counts) :].tolist())
    ends: dict[int, list[int]] = {}
    sizes = []
    for row, slot, known, end in records:
        assert (slot, known) == (slots[row], lengths[row] - 1)
        ends.setdefault(row, []).append(end)
        sizes.append(end - (end - 1) // SPLIT * SPLIT)
    assert ends == {
        row: [min((index + 1) * SPLIT, tiles[row].stop) for index in splits[row]]
        for row in ends.keys() | {row for row, length in enumerate(lengths) if length}
    }
    assert SPLIT not in sizes[sizes.count(SPLIT) :], "splits that end where a cut is come first"


@pytest.mark.parametrize("head_dim", [64, 80])
@needs_interpreter
def test_splits_are_merged_in_order(head_dim: int) -> None:
    heads, counts = 3, [0, 1, 2, 8, 9, 31, 32, 33, 70]
    starts = [sum(counts[:row]) for row in range(len(counts))]
    sums = torch.randn(sum(counts), heads, head_dim)
    stats = torch.stack((torch.randn(sum(counts), heads) * 20, torch.rand(sum(counts), heads) + 1), 2)
    stats[starts[4] + 3, :, 0] = float("-inf")  # a split of which nothing is seen
    stats[starts[4] + 3, :, 1] = sums[starts[4] + 3] = 0
    out = torch.full((len(counts), heads, head_dim), float("nan"))
    merge_splits(torch.tensor(counts).int(), torch.tensor(starts).int(), sums, stats, out)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count == 1:
            assert out[row].isnan().all(), "its only split has written it"
            continue
        own = stats[start : start + count].double()
        factors = (own[..., 0] - own[..., 0].max(0).values).exp2() if count else own[..., 0]
        total = (sums[start : start + count].double() * factors[..., None]).sum(0)
        wanted = total / (own[..., 1] * factors).sum(0)[:, None] if count else total
        torch.testing.assert_close(out[row].double(), wanted, rtol=1e-5, atol=1e-6)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
