"""Products with weights in FP8 against float64: kernels in the interpreter, wrappers and references anywhere; on a GPU
the bits of products with the numbers that the weights stand for."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from tercet.triton_kernels import choose_scaled as chooser
from tercet.triton_kernels.checks import FP8
from tercet.triton_kernels.choose_scaled import choose_scaled
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending
from tercet.triton_kernels.matmul import matmul, matmul_add, matmul_silu_and_mul, rms_norm_matmul
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.matmul_parts import matmul_parts
from tercet.triton_kernels.scaled_weight import ScaledWeight, expand
from test_triton_kernels_matmul import EPS, distance, exact, gated

META = torch.device("meta")
HOPPER = Gpu("", 90, 132)
CONFIGS = [
    MatmulConfig("skinny", 16, 16, 32, 1),
    MatmulConfig("skinny", 32, 32, 32, 4),
    MatmulConfig("scaled", 16, 32, 32, 4),
    MatmulConfig("scaled", 128, 16, 32, 4),
]
# M, N, K and groups; the last fits no block.
SIZES = [(1, 64, 64, 2), (7, 48, 96, 3), (37, 144, 96, 1), (5, 44, 100, 1)]


def scaled(N: int, K: int, groups: int, dtype: torch.dtype, device: str = "cpu") -> ScaledWeight:
    """Fresh each time; products of it are about as large as what they multiply."""
    numbers = torch.randn(N, K, device=device).mul_(64).clamp_(-448, 448).to(FP8)
    return ScaledWeight(numbers, (torch.rand(groups, N, device=device) + 0.5) * K**-0.5 / 64, dtype)


def meant(w: ScaledWeight) -> Tensor:
    """The numbers that it stands for: in float64 the product is exact, and so is rounded once to fp32."""
    scales = w.scales_GN.double().T.repeat_interleave(w.group, 1)
    return (w.numbers_NK.double() * scales).float().to(w.dtype)


def of_meta(N: int, K: int, groups: int) -> ScaledWeight:
    numbers, scales = torch.empty(N, K, dtype=FP8, device=META), torch.empty(groups, N, device=META)
    return ScaledWeight(numbers, scales, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("N", "K", "groups"), [(1, 1, 1), (5, 96, 3), (3, 5000, 1), (2, 8448, 66), (7, 60, 60)])
def test_expand(N: int, K: int, groups: int, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter rounds such numbers in its own way")
    w = scaled(N, K, groups, dtype)
    assert torch.equal(expand(w), meant(w))


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kernel}{c.block_m}x{c.block_n}")
@pytest.mark.parametrize("epilogue", ["store", "add", "gate"])
def test_kernels(config: MatmulConfig, epilogue: str) -> None:
    for M, N, K, groups in SIZES:
        if config.kernel == "scaled" and K % 16:
            continue
        x, w, bias = torch.randn(M, K).half(), scaled(N, K, groups, torch.float16), torch.randn(N).half()
        before = torch.randn(M, N).half() if epilogue == "add" else torch.full((M, N), float("nan")).half()
        out = before[:, : N // 2].contiguous() if epilogue == "gate" else before.clone()
        wanted = exact(x, meant(w), bias)
        wanted = gated(wanted) if epilogue == "gate" else wanted + before.double() if epilogue == "add" else wanted
        launch_matmul(config, x, w, out, epilogue, bias)
        assert distance(out, wanted) < 1e-3, (M, N, K)


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kernel}{c.block_m}x{c.block_n}")
def test_parts_and_rows(config: MatmulConfig) -> None:
    M, N, K, counted = 40, 80, 192, 21
    x, w = torch.randn(M, K).half(), scaled(N, K, 3, torch.float16)
    parts = torch.full((2, M, N), float("nan"))
    launch_matmul(MatmulConfig(**{**vars(config), "parts": 2}), x, w, parts, "parts")
    for part, columns in zip(parts, (slice(0, 96), slice(96, 192)), strict=True):
        assert distance(part, exact(x[:, columns], meant(w)[:, columns])) < 1e-6
    out = torch.full((M, N), float("nan")).half()
    launch_matmul(config, x, w, out, rows=torch.tensor([counted], dtype=torch.int32))
    assert distance(out[:counted], exact(x[:counted], meant(w))) < 1e-3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("rows", "groups"), [(0, 1), (1, 1), (20, 2), (70, 1), (3, 64), (300, 2)])
def test_wrappers(rows: int, groups: int, deterministic: bool) -> None:
    for dtype, near in ((torch.float32, 4e-6), (torch.float16, 2e-3)):
        check_wrappers(rows, 40, 128, groups, dtype, deterministic, "cpu", near)


def check_wrappers(
    M: int, N: int, K: int, groups: int, dtype: torch.dtype, deterministic: bool, device: str, near: float
) -> None:
    x, w = torch.randn(M, K, device=device).to(dtype), scaled(N, K, groups, dtype, device)
    bias, norm = torch.randn(N, device=device).to(dtype), (torch.rand(K, device=device) + 0.5).to(dtype)
    out = torch.full((M, N), float("nan"), dtype=dtype, device=device)
    residual = torch.randn(M, N, device=device).to(dtype)
    added = residual.clone()
    matmul_add(x, w, added, deterministic=deterministic)
    for got, wanted in (
        (matmul(x, w, bias, deterministic=deterministic), exact(x, meant(w), bias)),
        (matmul(x, w, out=out, deterministic=deterministic), exact(x, meant(w))),
        (matmul_silu_and_mul(x, w, deterministic=deterministic), gated(exact(x, meant(w)))),
        (rms_norm_matmul(x, norm, EPS, w, deterministic=deterministic), exact(x, meant(w), norm=norm)),
        (added, residual.double() + exact(x, meant(w))),
    ):
        assert got.dtype == dtype
        assert M == 0 or distance(got, wanted) < near, (M, N, K)
    parts = matmul_parts(x, w)
    assert parts is None or distance(parts.sum(0), exact(x, meant(w))) < 1e-5


def bad_calls() -> Iterator[tuple[str, object]]:
    x, w = torch.randn(3, 8), scaled(6, 8, 2, torch.float32)
    numbers, scales = w.numbers_NK, w.scales_GN
    yield "w: got FP8 numbers for torch.float32, wanted torch.float16", lambda: matmul(x.half(), w)
    yield "w: got shape", lambda: matmul(x[:, :4].contiguous(), w)
    yield "w's scales: got 3 groups, wanted", lambda: matmul(x, ScaledWeight(numbers, scales.repeat(2, 1)[:3], w.dtype))
    yield "w's scales: got shape", lambda: matmul(x, ScaledWeight(numbers, scales[:, :5], w.dtype))
    yield "w's scales: got torch.float64", lambda: matmul(x, ScaledWeight(numbers, scales.double(), w.dtype))
    yield "w: got torch.int8", lambda: matmul(x, ScaledWeight(numbers.view(torch.int8), scales, w.dtype))
    yield "w's scales: got strides", lambda: matmul(x, ScaledWeight(numbers, scales.T.contiguous().T, w.dtype))
    yield "w's scales: got strides", lambda: expand(w[1:])
    yield "w: got 5 rows", lambda: matmul_silu_and_mul(x, scaled(5, 8, 1, torch.float32))


@pytest.mark.parametrize(("message", "call"), list(bad_calls()), ids=lambda value: str(value)[:24])
def test_bad_input(message: str, call: object) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_what_is_chosen() -> None:
    """Deterministic mode has plain order alone; tiles are full, blocks share scales, parts are whole blocks."""
    sizes = product((1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 1024), (4096, 24576, 1000), (4096, 12288), (1, 32, 128))
    for M, N, K, groups in sizes:
        x, w = torch.empty(M, K, dtype=torch.bfloat16, device=META), of_meta(N, K, groups)
        with pretending(HOPPER):
            fixed = choose_scaled(x, w, deterministic=True)
            free = choose_scaled(x, w, deterministic=False, in_parts=True)
        assert fixed is not None
        assert free is not None
        assert fixed.kernel == "scaled"  # the other has an order of its own
        assert fixed.parts == 1
        assert K % (free.parts * free.block_k) == 0
        for config in (fixed, free):
            assert groups == 1 or (K // groups) % config.block_k == 0
            assert config.block_m > M or M % config.block_m == 0
        with pretending(Gpu("", 89, 128)):
            elsewhere = choose_scaled(x, w, deterministic=False)
            assert (elsewhere is None) == (M > 256)
            assert choose_scaled(x, w, deterministic=True) is None
    with pretending(HOPPER):
        assert choose_scaled(torch.empty(1025, 4096, dtype=torch.bfloat16, device=META), w, deterministic=False) is None
        x = torch.empty(9, 4096, dtype=torch.bfloat16, device=META)
        assert choose_scaled(x, of_meta(4096, 4096, 256), deterministic=False) is None  # groups of 16
        assert choose_scaled(x.float(), of_meta(4096, 4096, 32), deterministic=False) is None


ALL = [tile.config for tile in chooser._TILES]


FEW = ALL[1::5]
LONG = [pytest.param(config, marks=pytest.mark.long) for config in ALL if config not in FEW]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("config", [*FEW, *LONG], ids=lambda c: f"{c.block_m}x{c.block_k}s{c.num_stages}")
def test_compile_for_hopper(config: MatmulConfig) -> None:
    """No weights are widened while a product may still read the last ones in registers."""
    M = 4 * config.block_m
    x, out = (torch.empty(M, size, dtype=torch.bfloat16, device=META) for size in (2048, 1024))
    with compiling_for(90) as kernels:
        launch_matmul(config, x, of_meta(1024, 2048, 16), out, "add")
    (kernel,) = kernels
    waits = [line for line in kernel.asm["ttgir"].splitlines() if "warp_group_dot_wait" in line]
    assert waits
    assert all("pendings = 0" in line for line in waits)
    assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("M", [1, 16, pytest.param(200, marks=pytest.mark.long)])
def test_compile_few_rows(M: int, capability: int) -> None:
    x = torch.empty(M, 2048, dtype=torch.bfloat16, device=META)
    with compiling_for(capability) as kernels:
        matmul(x, of_meta(1024, 2048, 16))
    assert [bool(kernel.asm["cubin"]) for kernel in kernels] == [True]


def test_interpreted() -> None:
    rerun_interpreted(__file__)


# N, K and groups of Qwen3-8B; per row; of 4B on two ranks; groups of 64, of 32, of 40, and rows of 360 columns.
GPU_SIZES = [
    (6144, 4096, 32),
    (4096, 12288, 96),
    (24576, 4096, 32),
    (4096, 4096, 1),
    (2560, 4864, 38),
    (1000, 4096, 64),
    (3072, 2048, 64),
    (1024, 400, 10),
    (1000, 360, 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("N", "K", "groups"), GPU_SIZES)
def test_gpu(N: int, K: int, groups: int, deterministic: bool) -> None:
    for M in (1, 2, 8, 13, 33, 64, 100, 192, 256, 500, 1030):
        check_wrappers(M, N, K, groups, torch.bfloat16, deterministic, "cuda", 1.2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K", "groups"), GPU_SIZES)
def test_bits_of_the_numbers_that_they_stand_for(N: int, K: int, groups: int) -> None:
    """In deterministic mode: each number of rows, again and again, since what races is right most of the time."""
    w = scaled(N, K, groups, torch.bfloat16, "cuda")
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
