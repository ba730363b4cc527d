"""On Hopper: the decode kernels that take q, k, v rows as they are, against float64, and what they write."""

import pytest
import torch

from fused_rows import Step
from paged_attention import Heads
from tercet.triton_kernels import decode_few, fused_decode
from tercet.triton_kernels.attention_reference import Scoring
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.decode_shares import DecodeShares
from tercet.triton_kernels.few_rows import FewRows
from tercet.triton_kernels.fixed_splits import FixedSplits
from tercet.triton_kernels.fused_decode import can_fuse_decode

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")]

LENGTHS = [0, 1, 2, 31, 32, 33, 34, 63, 64, 65, 66, 129, 511, 1000, 2300]
HEADS = [
    Heads(16, 8, 128, 64),
    Heads(32, 8, 128, 32),
    Heads(32, 2, 128, 64),
    Heads(7, 1, 128, 128),
    Heads(5, 5, 64, 64),
    Heads(9, 3, 64, 32),
    Heads(14, 2, 64, 64),
    Heads(64, 8, 64, 64, sinks=True),
    Heads(7, 1, 128, 128, sinks=True),
    Heads(64, 8, 64, 64, window=128, sinks=True),
    Heads(16, 8, 128, 64, window=100),
    Heads(32, 2, 128, 64, window=33, sinks=True),
    Heads(9, 3, 64, 32, window=2),
    Heads(5, 5, 64, 64, window=1000),
    Heads(8, 4, 256, 64),
    Heads(8, 1, 256, 32, window=700),
    Heads(3, 3, 256, 128, window=129, sinks=True),
]
SEEING_FEW = [heads for heads in HEADS if heads.window]
WITH_SINKS = [heads for heads in HEADS if heads.sinks]
NORMING_VALUES = [
    Heads(32, 16, 256, 64, window=1024),
    Heads(8, 1, 256, 64, window=512),
    Heads(8, 2, 256, 32, window=512),
    Heads(8, 1, 256, 64),
    Heads(16, 2, 512, 64),
    Heads(8, 1, 512, 32),
    Heads(8, 2, 512, 64),
    Heads(4, 2, 512, 128, window=700),
]
"""As Gemma 4 has them, and some more."""

PLANS = {"few": FewRows, "many": DecodeShares, "fixed": FixedSplits}


@pytest.fixture(params=PLANS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the kernels, forced, whatever the number of rows."""
    name: str = request.param
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 1000 if name == "few" else 0)
    monkeypatch.setattr(fused_decode, "_FEW_SEEN", 0)
    monkeypatch.setattr(Step, "deterministic", name == "fixed")
    return name


@pytest.mark.parametrize(("with_norms", "cells"), [(False, None), (True, None), (True, FP8)])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_against_float64(heads: Heads, with_norms: bool, cells: torch.dtype | None, kernel: str) -> None:
    for lengths in (LENGTHS * 3, [2300], [1], [0, 0], [0, 5000, 0, 1, 1]):
        step = Step(heads, lengths, with_norms, cells=cells)
        scoring = Scoring(1.0, heads.window, sinks_H=step.cache.sinks_H)
        assert can_fuse_decode(step.cache.k_cache, heads.num_q, heads.dim, scoring)
        out = step.run()
        assert isinstance(step.plan(), PLANS[kernel])
        step.check(out)
        assert torch.equal(step.run(), out), "the same step gives the same bits"


@pytest.mark.parametrize("cells", [None, FP8])
@pytest.mark.parametrize("heads", SEEING_FEW, ids=str)
def test_rows_about_as_long_as_the_window(heads: Heads, cells: torch.dtype | None, kernel: str) -> None:
    near = [max(heads.window + more, 0) for more in (-65, -64, -33, -2, -1, 0, 1, 2, 31, 32, 63, 64, 65, 200)]
    for lengths in (near, [*near, *range(240, 290)], [heads.window + 1], [heads.window * 2 + 3000]):
        step = Step(heads, lengths, True, cells=cells)
        step.check(step.run())


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[3]], ids=str)
def test_rows_behind_images(heads: Heads, kernel: str) -> None:
    for lengths in (LENGTHS, [3000], torch.randint(0, 1500, (60,)).tolist()):
        step = Step(heads, lengths, True, shifted=True)
        step.check(step.run())


@pytest.mark.parametrize("cells", [None, FP8])
@pytest.mark.parametrize(
    ("heads", "rotary_dim"),
    [
        (Heads(16, 4, 256, 64), 64),
        (Heads(32, 2, 128, 64), 64),
        (Heads(48, 8, 128, 64), 64),
        (Heads(5, 5, 64, 64), 24),
        (Heads(8, 1, 256, 32, window=700), 128),
    ],
    ids=str,
)
def test_few_numbers_turn(heads: Heads, rotary_dim: int, cells: torch.dtype | None, kernel: str) -> None:
    """And rows are parts of longer ones."""
    for with_norms in (False, True):
        for lengths in (LENGTHS * 2, [2300], [1], [0, 5000, 0, 1, 1]):
            step = Step(heads, lengths, with_norms, cells=cells, rotary_dim=rotary_dim)
            step.check(step.run())


@pytest.mark.parametrize("heads", [Heads(16, 4, 256, 64), Heads(48, 8, 128, 64)], ids=str)
def test_several_tokens_of_which_few_numbers_turn(heads: Heads) -> None:
    for lengths in ([2300], [40, 129, 5000, 1040]):
        step = Step(heads, lengths, True, tries=4, rotary_dim=64)
        step.check(step.run())


@pytest.mark.parametrize("cells", [None, FP8])
@pytest.mark.parametrize("heads", NORMING_VALUES, ids=str)
def test_values_that_are_normed(heads: Heads, cells: torch.dtype | None, kernel: str) -> None:
    near = [max(heads.window + more, 0) for more in (-65, -1, 0, 1, 2, 33, 200)]
    for lengths in (LENGTHS * 3, near, [2300], [1], [0, 5000, 0, 1, 1], torch.randint(0, 1500, (200,)).tolist()):
        step = Step(heads, lengths, True, cells=cells, norm_values=True)
        step.qkv[..., heads.num_q * heads.dim :] *= 5
        scoring = Scoring(1.0, heads.window)
        assert can_fuse_decode(step.cache.k_cache, heads.num_q, heads.dim, scoring)
        out = step.run()
        assert isinstance(step.plan(), PLANS[kernel])
        step.check(out)
        assert torch.equal(step.run(), out), "the same step gives the same bits"


@pytest.mark.parametrize("cells", [None, FP8])
@pytest.mark.parametrize("heads", NORMING_VALUES, ids=str)
def test_several_tokens_whose_values_are_normed(heads: Heads, cells: torch.dtype | None) -> None:
    tries = fused_decode._MOST_TRIED // heads.dim * heads.num_kv // heads.num_q
    for lengths in ([2300], [1], [0, 0], [40, 129, 5000, 1040], LENGTHS) if tries > 1 else ():
        step = Step(heads, lengths, True, cells=cells, tries=min(tries, 4), norm_values=True)
        step.qkv[..., heads.num_q * heads.dim :] *= 5
        step.check(step.run())


@pytest.mark.parametrize("heads", WITH_SINKS, ids=str)
def test_sinks_of_any_size(heads: Heads, kernel: str) -> None:
    """Those beside which all else is next to nothing, those that are nothing beside it, and none at all."""
    step = Step(heads, [*LENGTHS, 5000], True)
    assert step.cache.sinks_H is not None
    step.cache.sinks_H.copy_((torch.rand(heads.num_q) - 0.5) * 100)
    step.cache.sinks_H[::3] = float("-inf")
    step.check(step.run())


def test_short_windows_are_for_few_rows() -> None:
    for count, kind in ((1, FewRows), (16, FewRows), (17, DecodeShares)):
        assert isinstance(Step(Heads(64, 8, 64, 64, window=128), [5000] * count, False).plan(), kind)
    scoring = Scoring(1.0, window=1)
    assert not can_fuse_decode(Step(HEADS[0], [1], False).cache.k_cache, 16, 128, scoring)


@pytest.mark.parametrize(
    ("dtype", "cells"), [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, FP8), (torch.float16, FP8)]
)
@pytest.mark.parametrize("count", range(1, 9))
def test_few_rows(count: int, dtype: torch.dtype, cells: torch.dtype | None, kernel: str) -> None:
    lengths = torch.tensor([0, 1, 31, 32, 33, 1000, 5000])
    for heads in (HEADS[0], HEADS[2], HEADS[3]):
        for _ in range(3):
            step = Step(
                heads, lengths[torch.randint(0, len(lengths), (count,))].tolist(), True, dtype=dtype, cells=cells
            )
            step.check(step.run())


@pytest.mark.parametrize(("with_norms", "cells"), [(False, None), (True, None), (True, FP8)])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_several_tokens_of_few_slots(heads: Heads, with_norms: bool, cells: torch.dtype | None) -> None:
    most = min(fused_decode._MOST_TRIED // heads.dim * heads.num_kv // heads.num_q, 16)
    scoring = Scoring(1.0, heads.window)
    for tries in {2, 3, 4, 8, most}:
        if tries > most:
            continue
        for lengths in ([2300], [1], [0, 0], [40, 129, 5000, 1040], LENGTHS):
            step = Step(heads, lengths, with_norms, cells=cells, tries=tries)
            assert can_fuse_decode(step.cache.k_cache, heads.num_q, heads.dim, scoring, tries=tries)
            out = step.run()
            step.check(out)
            assert torch.equal(step.run(), out), "the same step gives the same bits"


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[3]], ids=str)
def test_several_tokens_behind_images(heads: Heads) -> None:
    for lengths in ([2300], [40, 129, 0, 1040], LENGTHS):
        step = Step(heads, lengths, True, tries=4, shifted=True)
        step.check(step.run())


@pytest.mark.parametrize(("tile", "warps"), [(16, 1), (32, 2), (64, 2), (64, 4), (128, 4)])
def test_other_tiles_for_few_rows(tile: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "_FEW_ROWS", 1000)
    monkeypatch.setattr(fused_decode, "_FEW_TILE", tile)
    monkeypatch.setattr(decode_few, "_NUM_WARPS", warps)
    for heads in (HEADS[0], HEADS[5], SEEING_FEW[0]):
        step = Step(heads, LENGTHS, True)
        step.check(step.run())


@pytest.mark.parametrize("cells", [None, FP8])
def test_many_rows_of_any_length(cells: torch.dtype | None, kernel: str) -> None:
    for count in (17, 256):
        for heads in (HEADS[0], *SEEING_FEW[:2]):
            step = Step(heads, torch.randint(0, 1500, (count,)).tolist(), True, cells=cells)
            step.check(step.run())


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[5]], ids=str)
def test_too_large_for_fp8(heads: Heads, kernel: str) -> None:
    """Keys and values that FP8 has no number for become its largest."""
    step = Step(heads, [300, 1, 40], False, cells=FP8)
    step.qkv[:, heads.num_q * heads.dim :] *= 1000
    step.run()
    for slot in step.slots:
        for cache in (step.cache.k_cache, step.cache.v_cache):
            numbers = cache[step.cells(slot)].float()
            assert numbers.abs().max() == 448
            assert numbers.isfinite().all()


@pytest.mark.parametrize("cells", [None, FP8])
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[3], HEADS[5], WITH_SINKS[0], *SEEING_FEW], ids=str)
def test_fixed_splits_give_a_row_its_bits_in_any_batch(
    heads: Heads, cells: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Step, "deterministic", True)
    lengths = [*LENGTHS, 255, 256, 257, 258, 512, 513, 514, 5000, *torch.randint(0, 1500, (230,)).tolist()]
    step = Step(heads, lengths, True, cells=cells)
    whole = step.run()
    step.check(whole)
    for count in (1, 1, 2, 7, 40, 200, len(lengths)):
        rows = torch.randperm(len(lengths))[:count].tolist()
        assert torch.equal(step.run(rows), whole[rows]), count
