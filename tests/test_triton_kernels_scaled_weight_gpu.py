"""Products with weights of eight bits and four on a GPU: near float64, and in deterministic mode the bits of products
with the numbers that they stand for."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from scaled_weights import meant, scaled, unrounded
from tercet.triton_kernels.choose_scaled import _TILES_OF_FOUR, _TILES_OF_FP8
from tercet.triton_kernels.matmul import matmul, matmul_add, matmul_silu_and_mul
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.widen import expand
from test_triton_kernels_matmul import distance, exact, gated
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


@pytest.mark.parametrize("epilogue", ["store", "add", "gate"])
@pytest.mark.parametrize(
    ("dtype", "of_scales"), [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float16)]
)
def test_one_row(epilogue: str, dtype: torch.dtype, of_scales: torch.dtype | None) -> None:
    """By vectors of any size: more of them than K is long, or not all of one full, and outputs that are no multiple."""
    for (N, K, groups), four, (block_n, warps) in product(
        [(1002, 4096, 32), (6, 128, 1), (1030, 4864, 38), (250, 12288, 96), (1000, 2560, 5)],
        [False, True] if of_scales is None else [True],
        [(2, 1), (4, 4), (8, 2), (16, 8)],
    ):
        w = scaled(N, K, groups, dtype, "cuda", four=four, of_scales=of_scales)
        x, bias, residual = (torch.randn(1, size, device="cuda").to(dtype) for size in (K, N, N))
        out = residual.clone() if epilogue == "add" else torch.full_like(residual, float("nan"))
        out = out[:, : N // 2].contiguous() if epilogue == "gate" else out
        total = exact(x, unrounded(w), bias[0])
        wanted = {"store": total, "add": total + residual.double(), "gate": gated(total)}[epilogue]
        config = MatmulConfig("vector", 1, block_n, warps * 32 * (32 if four else 16), warps)
        launch_matmul(config, x, w, out, epilogue, bias[0])
        assert distance(out, wanted) < (4e-3 if dtype == torch.bfloat16 else 5e-4), (N, K, four, config)


@pytest.mark.parametrize(
    ("config", "four"),
    [(tile.config, False) for tile in _TILES_OF_FP8] + [(tile.config, True) for tile in _TILES_OF_FOUR],
    ids=lambda c: f"{c.kernel}{c.block_m}x{c.block_n}s{c.num_stages}" if isinstance(c, MatmulConfig) else str(c),
)
def test_every_tile(config: MatmulConfig, four: bool) -> None:
    """Sizes that are no multiples of a tile's, each way to end it, parts, and fewer rows in truth, or none."""
    N, K = 1004, 2048
    w = scaled(N, K, 8, torch.bfloat16, "cuda", four=four)
    plain, bias = meant(w), torch.randn(N, device="cuda").bfloat16()
    for M in (1, 70, 700):
        x, residual = (torch.randn(M, size, device="cuda").bfloat16() for size in (K, N))
        for epilogue in ("store", "add", "gate"):
            out = residual.clone() if epilogue == "add" else torch.full_like(residual, float("nan"))
            out = out[:, : N // 2].contiguous() if epilogue == "gate" else out
            total = exact(x, plain, bias)
            wanted = {"store": total, "add": total + residual.double(), "gate": gated(total)}[epilogue]
            launch_matmul(config, x, w, out, epilogue, bias)
            assert distance(out, wanted) < 1.2e-2, (M, epilogue)
        parts = torch.full((4, M, N), float("nan"), device="cuda")
        launch_matmul(replace(config, parts=4), x, w, parts, "parts")
        for part, of_x, of_w in zip(parts, x.chunk(4, 1), plain.chunk(4, 1), strict=True):
            assert distance(part, exact(of_x, of_w)) < 1e-5, M
        counted = torch.tensor([M // 2], dtype=torch.int32, device="cuda")
        launch_matmul(replace(config, parts=4), x, w, parts.fill_(float("nan")), "parts", rows=counted)
        assert M == 1 or distance(parts[3, : M // 2], exact(x[: M // 2, -K // 4 :], plain[:, -K // 4 :])) < 1e-5, M
        for counted in (0, M // 2):
            out = torch.full_like(residual, float("nan"))
            launch_matmul(config, x, w, out, rows=torch.tensor([counted], dtype=torch.int32, device="cuda"))
            assert counted == 0 or distance(out[:counted], exact(x, plain)[:counted]) < 1.2e-2, M
