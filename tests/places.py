"""Where tests of kernels run, and in what type: references on the CPU, kernels in the interpreter, kernels on a GPU."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tercet.triton_kernels.dispatch import INTERPRETED

PLACES = [
    pytest.param(("cpu", torch.float32), id="cpu"),
    *([pytest.param(("cpu", torch.float16), id="half")] if INTERPRETED else []),
    pytest.param(("cuda", torch.bfloat16), id="gpu", marks=pytest.mark.gpu),
]
ROUNDING = {torch.float32: 2**-20, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Of one number; in fp32 that of a whole computation."""


@dataclass(frozen=True)
class Place:
    """A device and a type."""

    device: str
    dtype: torch.dtype

    @classmethod
    def of(cls, request: pytest.FixtureRequest) -> "Place":
        """Of a fixture with the parameters PLACES."""
        device, dtype = request.param
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        return cls(device, dtype)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def ints(self, numbers: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def nan_caches(self, *shape: int) -> list[Tensor]:
        return [torch.full(shape, float("nan"), device=self.device, dtype=self.dtype) for _ in range(2)]

    def check_rounded(self, got: Tensor, wanted: Tensor) -> None:
        """`got` is the float64 `wanted`, rounded once."""
        assert got.dtype == self.dtype
        torch.testing.assert_close(got.double(), wanted, rtol=1.02 * ROUNDING[self.dtype], atol=1e-5)
