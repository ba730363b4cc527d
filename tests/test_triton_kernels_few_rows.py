"""The decode kernel for few rows: its plan, and attention against float64 and what it writes. In the interpreter."""

import pytest
import torch

from covering import covering, long
from fused_rows import UNEVEN, Step, tiles_seen
from interpreted import rerun_interpreted
from paged_attention import Heads
from tercet.triton_kernels import fused_decode
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.few_rows import FewRows, make_few_rows, plan_few_rows

TILE, PAGE = 32, 64
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")


@interpreted
@covering(
    2,
    lengths=[
        *UNEVEN,
        torch.randint(0, 900, (7,)).tolist(),
    ],
    kv_heads=[1, 3, 8],
    num_workers=[4, 100],
    window=[0, 2, 33, 64, 100],
)
def test_every_tile_has_one_worker(lengths: list[int], kv_heads: int, num_workers: int, window: int) -> None:
    slots = torch.randperm(len(lengths)).int()
    lengths_B = torch.tensor(lengths).int()
    few = make_few_rows(lengths_B, num_workers, kv_heads, kv_heads, 64, TILE, window=window)
    few.workers_W8.fill_(-7)
    table = torch.randint(1, 1000, (len(lengths), 1 + max(lengths) // PAGE)).int()
    plan_few_rows(slots, table, few, PAGE, kv_heads)
    workers = few.workers_W8[:, :7].tolist()
    tiles = [tiles_seen(length, TILE, window) for length in lengths]
    loads, used = [], 0
    for row, (slot, known, first, count) in enumerate(few.rows_B4.tolist()):
        assert (slot, known) == (slots[row], lengths[row] - 1)
        assert first == used
        for head in range(kv_heads):
            taken = []
            for *own, begin, end, page in workers[used : used + count]:
                assert own == [row, head, slot, known]
                assert begin < end
                assert page == table[slot, begin * TILE // PAGE]
                taken += range(begin, end)
                loads.append(end - begin)
            assert taken == list(tiles[row])
            used += count
    assert all(begin == end for *_, begin, end, _ in workers[used:])
    # Nobody has more than the fewest with which there are workers enough; at the worst each pair wastes one.
    worst = -(-sum(loads) // (few.num_workers - len(lengths) * kv_heads))
    enough = (
        each for each in range(1, worst + 1) if sum(-(-len(own) // each) for own in tiles) * kv_heads <= few.num_workers
    )
    fewest = next(enough, 1)
    assert fewest <= max(loads, default=fewest) <= max(worst, 1)
    if fewest == -(-sum(loads) // few.num_workers):
        assert max(loads) == fewest


@interpreted
@pytest.mark.parametrize(("with_norms", "cells"), [(True, None), long(False, None), (True, FP8)])
@pytest.mark.parametrize(
    ("heads", "tile", "lengths"),
    [
        (Heads(4, 2, 128, 64), 32, [0, 33, 1, 200]),
        (Heads(3, 3, 64, 32), 32, [31, 0, 32, 2, 65]),
        (Heads(7, 1, 64, 64), 16, [129]),
        (Heads(16, 1, 64, 32), 64, [100, 64]),
        (Heads(3, 1, 128, 64), 32, [0, 0]),
        (Heads(3, 1, 64, 64), 32, [1500]),
        (Heads(4, 2, 64, 64, window=33, sinks=True), 32, [0, 1, 2, 32, 33, 34, 35, 64, 65, 66, 97, 400]),
        (Heads(3, 1, 128, 32, window=2), 64, [0, 1, 2, 3, 64, 65, 66, 129]),
        (Heads(16, 1, 64, 64, window=128), 64, [127, 128, 129, 130, 192, 193]),
        (Heads(3, 3, 64, 64, sinks=True), 32, [0, 1, 31, 200]),
    ],
    ids=str,
)
def test_against_float64(
    heads: Heads, tile: int, lengths: list[int], with_norms: bool, cells: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", len(lengths))
    monkeypatch.setattr(fused_decode, "_FEW_TILE", tile)
    step = Step(heads, lengths, with_norms, "cpu", torch.float16, cells)
    step.check(step.run())


@interpreted
def test_rows_behind_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 4)
    step = Step(Heads(4, 2, 64, 64), [9, 0, 70, 300], True, "cpu", torch.float16, shifted=True)
    step.check(step.run())


@interpreted
@pytest.mark.parametrize(
    ("heads", "rotary_dim", "with_norms", "cells"),
    [
        (Heads(4, 2, 64, 64), 32, True, None),
        (Heads(3, 1, 128, 32, window=40), 24, True, FP8),
        long(Heads(3, 3, 256, 64), 64, False, None),
    ],
    ids=str,
)
def test_few_numbers_turn(
    heads: Heads, rotary_dim: int, with_norms: bool, cells: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows are parts of longer ones."""
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 4)
    step = Step(heads, [9, 0, 70, 300], with_norms, "cpu", torch.float16, cells, rotary_dim=rotary_dim)
    step.check(step.run())


@interpreted
@pytest.mark.parametrize(
    ("heads", "cells"),
    [
        (Heads(4, 2, 64, 64), None),
        (Heads(3, 1, 64, 32, window=40, sinks=True), FP8),
        (Heads(2, 1, 256, 64, window=100), None),
        long(Heads(8, 1, 256, 64), FP8),
        (Heads(2, 1, 512, 64), None),
        long(Heads(8, 1, 512, 32), FP8),
    ],
    ids=str,
)
def test_values_that_are_normed(heads: Heads, cells: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 5)
    step = Step(heads, [9, 0, 70, 1, 300], True, "cpu", torch.float16, cells, norm_values=True)
    step.qkv[..., heads.num_q * heads.dim :] *= 5
    step.check(step.run())


@interpreted
@pytest.mark.parametrize("window", [0, 50])
def test_sinks_of_any_size(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 4)
    step = Step(Heads(8, 2, 64, 64, window=window, sinks=True), [9, 0, 70, 300], True, "cpu", torch.float16)
    assert step.cache.sinks_H is not None
    step.cache.sinks_H.copy_(torch.tensor([float("-inf"), -40, -9, 0, 2, 5, 8, 9]))
    step.check(step.run())


@interpreted
@pytest.mark.parametrize("longest", [70, 512])
def test_rows_that_are_known_to_be_short(longest: int) -> None:
    step = Step(Heads(4, 2, 64, PAGE), [70, 0, 33, 1], True, "cpu", torch.float16)
    assert not isinstance(step.plan(), FewRows)
    step.longest = longest
    assert isinstance(step.plan(), FewRows)
    step.check(step.run())


@interpreted
@pytest.mark.parametrize(("longest", "num_workers"), [(1, 4), (64, 4), (200, 14), (640, 40), (10_000, 400), (0, 0)])
def test_no_more_workers_than_tiles(longest: int, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a row of this length has, or one as long as its page table; a row that is longer is right, too."""
    monkeypatch.setattr(fused_decode, "_FEW_TILE", TILE)
    monkeypatch.setattr(fused_decode, "multiprocessors", lambda device: 100)
    step = Step(Heads(4, 2, 64, PAGE), [200], True, "cpu", torch.float16)
    step.longest = longest
    plan = step.plan()
    assert isinstance(plan, FewRows)
    assert plan.num_workers == (num_workers if longest else step.cache.table.shape[1] * PAGE // TILE * 2)
    step.check(step.run())


@interpreted
@pytest.mark.parametrize("page", [-1, 0, 10_000])
def test_pages_outside_are_neither_read_nor_written(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page table may name anything behind what a slot owns: only the row itself may suffer."""
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 2)
    step = Step(Heads(2, 1, 64, 32), [40, 70], True, "cpu", torch.float16)
    step.cache.table[0, 1] = page
    before = step.caches()
    out = step.run()
    assert out[step.slots.index(1)].isfinite().all()
    step.check_written(1, before)


def test_in_the_interpreter() -> None:
    rerun_interpreted(__file__)
