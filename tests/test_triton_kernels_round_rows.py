"""Rows rounded to eight bits: to the bit those of the reference, and within half a step of what they stand for."""

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from scaled_weights import rounded_rows
from tercet.triton_kernels.checks import FP8_MOST
from tercet.triton_kernels.round_rows import round_rows, round_rows_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "K"), [(37, 384), (1, 128), (0, 256)])
def test_rows(M: int, K: int, dtype: torch.dtype) -> None:
    x = rows_of_all_sizes(M, K, dtype)
    numbers, scales = round_rows(x)
    wanted, wanted_scales = round_rows_reference(x)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(numbers.view(torch.uint8), wanted.view(torch.uint8))


def test_the_reference() -> None:
    """Three bits behind the point, of the largest number in 128; what is much smaller has fewer."""
    x = rows_of_all_sizes(50, 512, torch.float32)
    most = x.unflatten(1, (-1, 128)).abs().amax(2).double().repeat_interleave(128, 1)
    error = (rounded_rows(*round_rows_reference(x)) - x.double()).abs()
    assert (error <= x.double().abs() * 2**-4 * 1.0001 + most / FP8_MOST * 2**-10 * 1.0001).all()
    assert error.norm() / x.double().norm() < 0.03


def test_columns() -> None:
    with pytest.raises(ValueError, match="got 192 columns, wanted a multiple of 128"):
        round_rows(torch.randn(3, 192))


def rows_of_all_sizes(M: int, K: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Zeros among them, and one number much larger than its neighbours."""
    x = torch.randn(M, K, device=device) * torch.logspace(-3, 2, max(M, 1), device=device)[:M, None]
    x[:1, :128] = 0
    x[M // 2 :, 5] *= 30
    return x.to(dtype)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
