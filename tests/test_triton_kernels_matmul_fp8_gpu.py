"""On a GPU: products of rows and weights that both have eight bits, against float64 of what those stand for."""

import pytest
import torch

from scaled_weights import meant, rounded_rows, scaled, unrounded, with_blocks
from tercet.triton_kernels.choose_fp8 import _TILES, _TILES_OF_ROWS
from tercet.triton_kernels.dispatch import is_hopper
from tercet.triton_kernels.expert_work import deal_out
from tercet.triton_kernels.matmul import matmul, matmul_add, matmul_silu_and_mul
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_experts import matmul_experts, matmul_experts_gated
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.round_rows import round_rows, round_rows_reference, round_whole_rows
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
"""What it takes to round sums to 16 bits, and that the matrix units add FP8's products up in fewer than 24."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [False, True])
def test_rows(whole: bool, dtype: torch.dtype) -> None:
    x = rows_of_all_sizes(301, 1152, dtype, "cuda")
    numbers, scales = round_whole_rows(x) if whole else round_rows(x)
    scales = scales[:, None] if whole else scales
    wanted, wanted_scales = round_rows_reference(x, 1152 if whole else 128)
    assert (scales / wanted_scales - 1).abs().max() < 3e-7  # a GPU's division errs in the last bit
    assert (numbers.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() < 1e-3
    assert distance(rounded_rows(numbers, scales), rounded_rows(wanted, wanted_scales)) < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "config", [tile.config for tile in (*_TILES, *_TILES_OF_ROWS)], ids=lambda c: f"{c.kernel}-{c.height}x{c.block_n}"
)
def test_tiles(config: MatmulConfig, dtype: torch.dtype) -> None:
    K, of_rows = 1152, config.kernel == "fp8_rows"
    for M, N in ((1, 136), (77, 136), (300, 1008), (1030, 1008)):
        w = scaled(N, K, 1 if of_rows else 9, dtype, "cuda")
        w = with_tile_scales(w) if of_rows else with_blocks(w)
        x, bias = torch.randn(M, K, device="cuda").to(dtype), torch.randn(N, device="cuda").to(dtype)
        product = rounded_rows(*round_rows_reference(x, K if of_rows else 128)) @ unrounded(w).t()
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
    for M in (65, 192, 256, 500, 1024, 3000):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_rows", [False, True])
def test_experts(of_rows: bool, dtype: torch.dtype) -> None:
    """Of some hundred pairs each, one of none."""
    T, each, E, K, F = 1100, 2, 9, 512, 384
    x = torch.randn(T, K, device="cuda").to(dtype)
    chosen = torch.rand(T, E - 1, device="cuda").argsort(1)[:, :each].int()
    work = deal_out(chosen, E, 128)
    pairs = chosen.flatten().long()
    first, second = (
        with_tile_scales(scaled(E * rows, columns, 1, dtype, "cuda")) if of_rows
        else with_blocks(scaled(E * rows, columns, columns // 128, dtype, "cuda"))
        for rows, columns in ((2 * F, K), (K, F))
    )  # fmt: skip
    rounded = rounded_rows(*round_rows_reference(x, K if of_rows else 128)).repeat_interleave(each, 0)
    wanted = gated(torch.einsum("pk,pnk->pn", rounded, unrounded(first).view(E, 2 * F, K)[pairs]))
    both = torch.einsum("pk,pnk->pn", rounded, unrounded(first).view(E, 2 * F, K)[pairs])
    curved = torch.nn.functional.gelu(both[:, 0::2], approximate="tanh") * both[:, 1::2]
    assert distance(matmul_experts_gated(x, first, work, each, gelu=True), curved) < NEAR
    got = matmul_experts_gated(x, first, work, each)
    assert distance(got, wanted) < NEAR
    rounded = rounded_rows(*round_rows_reference(got, F if of_rows else 128))
    wanted = torch.einsum("pf,pkf->pk", rounded, unrounded(second).view(E, K, F)[pairs])
    assert distance(matmul_experts(got, second, work), wanted) < NEAR
