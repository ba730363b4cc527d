"""What ranks gathered, put together: columns side by side, and sums to the bit in rank order, against float64."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from places import PLACES, Place
from tercet.triton_kernels import residual_add
from tercet.triton_kernels.all_reduce import sum_in_order
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.stacked import join_columns, sum_ranks


@pytest.fixture(params=PLACES)
def draw(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    place = Place.of(request)
    return lambda *shape: place.random(*shape) * 3


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "width"),
    [(2, 3, 5000, 10_000), (2, 1, 4096, 8191), (3, 7, 33, 98), (4, 2, 9001, 35_990), (2, 0, 8, 16), (3, 2, 8, 5)],
)
def test_columns_side_by_side(draw: Callable[..., Tensor], ranks: int, rows: int, columns: int, width: int) -> None:
    x = draw(ranks, rows, columns)
    got = join_columns(x, width)
    assert got.is_contiguous()
    assert torch.equal(got, torch.cat(list(x), 1)[:, :width])


@pytest.mark.parametrize("shape", [(2, 1, 576), (3, 33, 301), (4, 5, 4096), (2, 0, 64)], ids=str)
def test_sums(draw: Callable[..., Tensor], shape: tuple[int, int, int]) -> None:
    x = draw(*shape)
    out = torch.full_like(x[0], float("nan"))
    assert sum_ranks(x, out) is out
    assert torch.equal(out, sum_in_order(x))
    torch.testing.assert_close(out.double(), x.double().sum(0), rtol=2 * torch.finfo(x.dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("x: got shape [2, 3], wanted [*, *, *]", lambda: join_columns(torch.zeros(2, 3), 3)),
        ("width: got 7, wanted 1 to 6", lambda: join_columns(torch.zeros(2, 1, 3), 7)),
        ("x: got shape [2, 1, 3], wanted [*, 1, 4]", lambda: sum_ranks(torch.zeros(2, 1, 3), torch.zeros(1, 4))),
        ("out: got torch.float16", lambda: sum_ranks(torch.zeros(2, 1, 3), torch.zeros(1, 3).half())),
    ],
)
def test_wrong_arguments_are_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 90])
def test_compile(capability: int) -> None:
    x = torch.empty(2, 8, 75968, dtype=torch.bfloat16, device="meta")
    with compiling_for(capability) as kernels:
        join_columns(x, 151_936)
        sum_ranks(x, x[0])
        residual_add.residual_add(x[0], x[0])
    assert [kernel.name for kernel in kernels] == ["_join_columns_kernel", "_sum_ranks_kernel", "_residual_add_kernel"]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
