"""Queries times a number of their position against float64, and their wrapper's refusals."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from places import PLACES, Place
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.scale_queries import scale_queries


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


@pytest.mark.parametrize(("count", "queries", "row"), [(1, 2000, 2000), (9, 96, 130), (5, 64, 64), (0, 64, 64)])
def test_scaled_queries(place: Place, count: int, queries: int, row: int) -> None:
    """Rows may be parts of longer ones; positions outside the table count as its ends, padding stays as it is."""
    x, scales = place.random(count, row + 8)[:, :row], torch.rand(900, device=place.device) + 0.5
    scales[:40] = 1
    positions = torch.randint(0, 900, (count,)).tolist()[2:] + [3, 1000][:count]
    before, rows = x.clone(), place.ints([max(count - 3, 1)])
    scale_queries(x, queries, place.ints(positions), scales)
    of_rows = scales[torch.tensor(positions, dtype=torch.int64).clamp(max=899)].double()[:, None]
    place.check_rounded(x[:, :queries], before[:, :queries].double() * of_rows)
    assert torch.equal(x[:, queries:], before[:, queries:])
    told = before.clone()
    scale_queries(told, queries, place.ints(positions), scales, rows=rows)
    assert torch.equal(told[: max(count - 3, 1)], x[: max(count - 3, 1)])


X, INTS, SCALES = torch.randn(4, 8), torch.zeros(4, dtype=torch.int32), torch.ones(9)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("x: got 8 columns, wanted 9 or more to scale", lambda: scale_queries(X, 9, INTS, SCALES)),
        ("a row of x: got strides", lambda: scale_queries(X.T, 2, torch.cat((INTS, INTS)), SCALES)),
        ("positions: got shape [3], wanted [4]", lambda: scale_queries(X, 8, INTS[:3], SCALES)),
        ("positions: got torch.float32", lambda: scale_queries(X, 8, INTS.float(), SCALES)),
        ("scales: got torch.float16, wanted torch.float32", lambda: scale_queries(X, 8, INTS, SCALES.half())),
    ],
)
def test_wrong_arguments_are_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [90, long(80), long(89)])
def test_it_compiles_for_cards_that_are_not_here(capability: int) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    positions, scales = meta(7, dtype=torch.int32), meta(4096, dtype=torch.float32)
    with compiling_for(capability) as kernels:
        scale_queries(meta(7, 4096), 2048, positions, scales)
        scale_queries(meta(7, 4096), 2048, positions, scales, rows=positions[:1])
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability == 90)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
