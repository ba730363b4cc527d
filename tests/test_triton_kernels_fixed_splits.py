"""Rows are cut at fixed positions, every tile is in one split, and the merge is told where parts are."""

import pytest
import torch

from interpreted import rerun_interpreted
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.fixed_splits import make_fixed_splits, plan_fixed_splits

TILE, SPLIT = 32, 3


@pytest.mark.skipif(not INTERPRETED, reason="the kernel, in the interpreter")
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
def test_every_tile_is_in_one_split(lengths: list[int]) -> None:
    slots = torch.randperm(len(lengths)).int()
    plan = make_fixed_splits(torch.tensor(lengths).int(), 1100, 20, 4, 64, TILE, SPLIT)
    for memory in (plan.splits_I4, plan.num_splits_1, plan.counts_B, plan.starts_B):
        memory.fill_(-7)
    plan_fixed_splits(slots, plan)

    tiles = [max(1, -(-(length - 1) // TILE)) if length else 0 for length in lengths]
    counts = [-(-number // SPLIT) for number in tiles]
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
        row: [min((index + 1) * SPLIT, tiles[row]) for index in range(counts[row])]
        for row in ends.keys() | {row for row, length in enumerate(lengths) if length}
    }
    assert SPLIT not in sizes[sizes.count(SPLIT) :], "whole splits come first"


def test_interpreted() -> None:
    rerun_interpreted(__file__)
