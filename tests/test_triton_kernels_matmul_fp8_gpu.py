"""On a GPU: products of rows and weights that both have eight bits, against float64 of what those stand for."""

import pytest
import torch

from scaled_weights import meant, rounded_rows, scaled, unrounded, with_blocks
from tercet.triton_kernels.choose_fp8 import _TILES
from tercet.triton_kernels.dispatch import is_hopper
from tercet.triton_kernels.matmul import matmul, matmul_add, matmul_silu_and_mul
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.round_rows import round_rows, round_rows_reference
from tercet.triton_kernels.scaled_weight import with_tile_scales
from test_triton_kernels_matmul import distance, exact, gated
from test_triton_kernels_round_rows import rows_of_all_sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not is_hopper(torch.device("cuda", 0)), reason="needs a Hopper GPU"
    ),
]
NEAR = 3e-3
"""What it takes to round sums to 16 bits."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows(dtype: torch.dtype) -> None:
    x = rows_of_all_sizes(301, 1152, dtype, "cuda")
    (numbers, scales), (wanted, wanted_scales) = round_rows(x), round_rows_reference(x)
    assert (scales / wanted_scales - 1).abs().max() < 3e-7  # a GPU's division errs in the last bit
    assert (numbers.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() < 1e-3
    assert distance(rounded_rows(numbers, scales), rounded_rows(wanted, wanted_scales)) < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [9, 1])
@pytest.mark.parametrize("config", [tile.config for tile in _TILES], ids=lambda c: f"{c.height}x{c.block_n}")
def test_tiles(config: MatmulConfig, groups: int, dtype: torch.dtype) -> None:
    K = 1152
    for M, N in ((1, 136), (77, 136), (300, 1008), (1030, 1008)):
        w = scaled(N, K, groups, dtype, "cuda")
        w = with_blocks(w) if groups > 1 else with_tile_scales(w)
        x, bias = torch.randn(M, K, device="cuda").to(dtype), torch.randn(N, device="cuda").to(dtype)
        product = rounded_rows(*round_rows_reference(x)) @ unrounded(w).t()
        out = torch.full((M, N), float("nan"), dtype=dtype, device="cuda")
        launch_matmul(config, x, w, out, bias_N=bias)
        assert distance(out, product + bias.double()) < NEAR
        residual = torch.randn(M, N, device="cuda").to(dtype)
        added = residual.clone()
        launch_matmul(config, x, w, added, "add")
        assert distance(added, residual.double() + product) < NEAR
        halves = torch.full((M, N // 2), float("nan"), dtype=dtype, device="cuda")
        if N // 2 % 8 == 0:  # as the copy engine wants rows
            launch_matmul(config, x, w, halves, "gate")
            assert distance(halves, gated(product)) < NEAR
        counted = torch.tensor([M // 2], dtype=torch.int32, device="cuda")
        out.fill_(float("nan"))
        launch_matmul(config, x, w, out, rows=counted)
        assert M == 1 or distance(out[: M // 2], product[: M // 2]) < NEAR


@pytest.mark.parametrize(("N", "K", "groups"), [(6144, 4096, 32), (4096, 12288, 96), (2560, 4864, 38), (4096, 4096, 1)])
def test_what_rounding_takes(N: int, K: int, groups: int) -> None:
    """By the wrappers, again and again: a race would be right most of the time."""
    w = scaled(N, K, groups, torch.bfloat16, "cuda")
    w = with_blocks(w) if groups > 1 else with_tile_scales(w)
    plain = meant(w)
    for M in (129, 192, 256, 500, 1024, 3000):
        x, residual = (torch.randn(M, size, device="cuda").bfloat16() for size in (K, N))
        wanted = exact(x, plain)
        out = matmul(x, w)
        assert 1e-2 < distance(out, wanted) < 4e-2
        added = residual.clone()
        matmul_add(x, w, added)
        assert distance(added, residual.double() + wanted) < 4e-2
        assert distance(matmul_silu_and_mul(x, w), gated(wanted)) < 6e-2
        for _ in range(20):
            assert torch.equal(matmul(x, w), out)
