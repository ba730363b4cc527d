"""Products with weights of eight bits and four on a GPU: near float64, and in deterministic mode the bits of products
with the numbers that they stand for."""

import pytest
import torch

from scaled_weights import meant, scaled
from tercet.triton_kernels.matmul import matmul, matmul_add, matmul_silu_and_mul
from tercet.triton_kernels.widen import expand
from test_triton_kernels_scaled_weight import check_wrappers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# N, K and groups of Qwen3-8B; per row; of 4B on two ranks; groups of 64; odd sizes.
SIZES = [
    (6144, 4096, 32),
    (4096, 12288, 96),
    (24576, 4096, 32),
    (4096, 4096, 1),
    (2560, 4864, 38),
    (1000, 4096, 64),
    (1024, 448, 7),
    (1000, 320, 1),
]
WEIGHTS = [(*size, four, None) for size in SIZES for four in (False, True) if size[1] % 128 == 0 or not four]
WEIGHTS += [(*size, True, torch.float16) for size in SIZES[1::2] if size[1] % 128 == 0]  # scales, beside bf16


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("N", "K", "groups", "four", "of_scales"), WEIGHTS)
def test_gpu(
    N: int, K: int, groups: int, four: bool, of_scales: torch.dtype | None, deterministic: bool
) -> None:  # fmt: skip
    w = scaled(N, K, groups, torch.bfloat16, "cuda", four=four, of_scales=of_scales)
    for M in (1, 2, 8, 13, 33, 64, 100, 192, 256, 500, 1030):
        check_wrappers(M, w, deterministic, 1.2e-2)


@pytest.mark.parametrize(("N", "K", "groups", "four", "of_scales"), WEIGHTS)
def test_bits_of_the_numbers_that_they_stand_for(
    N: int, K: int, groups: int, four: bool, of_scales: torch.dtype | None
) -> None:  # fmt: skip
    """In deterministic mode: each number of rows, again and again, since what races is right most of the time."""
    w = scaled(N, K, groups, torch.bfloat16, "cuda", four=four, of_scales=of_scales)
    plain = meant(w)
    assert torch.equal(expand(w), plain)
    for M in (1, 3, 16, 31, 64, 127, 128, 192, 256, 384, 500, 512, 777, 1024, 1100):
        x, residual = (torch.randn(M, size, device="cuda").bfloat16() for size in (K, N))
        added = residual.clone()
        matmul_add(x, plain, added, deterministic=True)
        wanted = matmul(x, plain, deterministic=True), matmul_silu_and_mul(x, plain, deterministic=True), added
        for _ in range(20):
            added = residual.clone()
            matmul_add(x, w, added, deterministic=True)
            got = matmul(x, w, deterministic=True), matmul_silu_and_mul(x, w, deterministic=True), added
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True)), M
