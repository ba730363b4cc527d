"""The decode kernel for few slots with several tokens each: against float64, and what it writes. In the interpreter."""

import pytest
import torch

from covering import long
from fused_rows import Step
from interpreted import rerun_interpreted
from paged_attention import Heads
from tercet.triton_kernels import fused_decode
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.few_rows import FewRows

interpreted = pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")


@interpreted
@pytest.mark.parametrize(
    ("heads", "tile", "tries", "lengths", "with_norms", "cells"),
    [
        (Heads(4, 2, 128, 64), 32, 4, [0, 33, 1, 200, 5], True, None),
        (Heads(3, 3, 64, 32), 32, 8, [31, 0, 32, 2], True, FP8),
        long(Heads(7, 1, 64, 64), 16, 2, [129], False, None),
        (Heads(16, 1, 64, 32), 64, 3, [100, 64, 67], False, FP8),
        (Heads(3, 1, 128, 64), 32, 5, [0, 0], True, None),
        long(Heads(2, 2, 64, 64), 32, 16, [900, 16, 15, 80], True, None),
        (Heads(4, 2, 64, 64, window=33, sinks=True), 32, 4, [0, 1, 2, 32, 33, 34, 35, 66, 97, 400], True, None),
        (Heads(3, 1, 128, 32, window=2), 64, 8, [0, 1, 2, 3, 64], False, None),
        long(Heads(8, 1, 64, 64, window=128), 64, 4, [127, 128, 129, 130, 192, 193], True, FP8),
        (Heads(3, 3, 64, 64, sinks=True), 32, 7, [0, 1, 31, 200], False, None),
    ],
    ids=str,
)
def test_against_float64(
    heads: Heads, tile: int, tries: int, lengths: list[int], with_norms: bool, cells: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fused_decode, "_FEW_TILE", tile)
    step = Step(heads, lengths, with_norms, "cpu", torch.float16, cells, tries)
    plan = step.plan()
    assert isinstance(plan, FewRows)
    assert plan.tries == tries
    step.check(step.run())


@interpreted
def test_behind_images() -> None:
    step = Step(Heads(4, 2, 64, 64), [9, 0, 70, 300], True, "cpu", torch.float16, tries=4, shifted=True)
    step.check(step.run())


@interpreted
def test_few_numbers_turn() -> None:
    step = Step(Heads(4, 2, 64, 64), [9, 0, 70, 300], True, "cpu", torch.float16, tries=4, rotary_dim=32)
    step.check(step.run())


@interpreted
@pytest.mark.parametrize(("heads", "cells"), [(Heads(4, 2, 64, 64), FP8), (Heads(2, 1, 256, 64, window=100), None)])
def test_values_that_are_normed(heads: Heads, cells: torch.dtype | None) -> None:
    step = Step(heads, [9, 0, 70, 300], True, "cpu", torch.float16, cells, tries=4, norm_values=True)
    step.qkv[..., heads.num_q * heads.dim :] *= 5
    step.check(step.run())


@interpreted
def test_sinks_of_any_size() -> None:
    step = Step(Heads(8, 2, 64, 64, sinks=True), [3, 0, 70, 300], True, "cpu", torch.float16, tries=4)
    assert step.cache.sinks_H is not None
    # Beside larger ones a lone key's weight has fewer digits in 16 bits.
    step.cache.sinks_H.copy_(torch.tensor([float("-inf"), -40, -9, 0, 2, 5, 6, 7]))
    step.check(step.run())


@interpreted
@pytest.mark.parametrize("page", [-1, 0, 10_000])
def test_pages_outside_are_neither_read_nor_written(page: int) -> None:
    """Of old tokens and of new ones: only the slot itself may suffer."""
    step = Step(Heads(2, 1, 64, 32), [66, 70], True, "cpu", torch.float16, tries=4)
    step.cache.table[0, 1] = page
    step.cache.table[0, 2] = page  # tokens 62 to 65 are new: two of them are here
    before = step.caches()
    out = step.run()
    others = out.view(2, 4, 2, 64)[step.slots.index(1), : step.counts[1]]
    assert others.isfinite().all()
    assert others.count_nonzero()
    step.check_written(1, before)


def test_in_the_interpreter() -> None:
    rerun_interpreted(__file__)
