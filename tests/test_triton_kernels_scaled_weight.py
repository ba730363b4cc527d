"""Products with weights of eight bits and four against float64: kernels in the interpreter, wrappers and references
anywhere; on a GPU the bits of products with the numbers that the weights stand for."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from covering import covering, long
from interpreted import rerun_interpreted
from scaled_weights import META, meant, of_meta, scaled
from tercet.triton_kernels import choose_scaled as chooser
from tercet.triton_kernels.choose_scaled import choose_scaled
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED, Gpu, pretending
from tercet.triton_kernels.matmul import matmul, matmul_add, matmul_silu_and_mul, rms_norm_matmul
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.matmul_parts import matmul_parts
from tercet.triton_kernels.scaled_weight import ScaledWeight
from tercet.triton_kernels.widen import expand
from test_triton_kernels_matmul import EPS, distance, exact, gated

HOPPER = Gpu("", 90, 132)
CONFIGS = [
    MatmulConfig("skinny", 16, 16, 64, 1),
    MatmulConfig("skinny", 32, 32, 64, 4),
    MatmulConfig("scaled", 16, 32, 64, 4),
    MatmulConfig("scaled", 128, 16, 64, 4),
    MatmulConfig("skinny", 16, 16, 128, 1),
    MatmulConfig("scaled", 16, 32, 128, 4),
]
# M, N, K and groups.
SIZES = [(1, 64, 64, 1), (7, 48, 192, 3), (37, 144, 192, 1), (5, 44, 320, 5), (9, 48, 384, 6), (6, 32, 384, 2)]
# The same of four bits: groups of blocks, of half blocks, and across them.
SIZES_OF_FOUR = [(1, 64, 128, 1), (7, 48, 256, 2), (37, 44, 256, 4), (5, 80, 384, 1), (6, 32, 768, 4), (3, 16, 384, 6)]


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@covering(2, config=CONFIGS, four=[False, True], epilogue=["store", "add", "gate"])
def test_kernels(config: MatmulConfig, epilogue: str, four: bool) -> None:
    config = replace(config, block_k=2 * config.block_k) if four else config
    for M, N, K, groups in SIZES_OF_FOUR if four else SIZES:
        if K % config.block_k:
            continue
        x, bias = torch.randn(M, K).half(), torch.randn(N).half()
        w = scaled(N, K, groups, torch.float16, four=four)
        before = torch.randn(M, N).half() if epilogue == "add" else torch.full((M, N), float("nan")).half()
        out = before[:, : N // 2].contiguous() if epilogue == "gate" else before.clone()
        wanted = exact(x, meant(w), bias)
        wanted = gated(wanted) if epilogue == "gate" else wanted + before.double() if epilogue == "add" else wanted
        launch_matmul(config, x, w, out, epilogue, bias)
        assert distance(out, wanted) < 1e-3, (M, N, K)


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kernel}{c.block_m}x{c.block_n}x{c.block_k}")
@pytest.mark.parametrize("four", [False, True])
def test_parts_and_rows(config: MatmulConfig, four: bool) -> None:
    M, N, K, counted = 40, 80, 512, 21
    config = replace(config, block_k=2 * config.block_k) if four else config
    x, w = torch.randn(M, K).half(), scaled(N, K, 8, torch.float16, four=four)
    parts = torch.full((2, M, N), float("nan"))
    launch_matmul(replace(config, parts=2), x, w, parts, "parts")
    for part, columns in zip(parts, (slice(0, K // 2), slice(K // 2, K)), strict=True):
        assert distance(part, exact(x[:, columns], meant(w)[:, columns])) < 1e-6
    out = torch.full((M, N), float("nan")).half()
    launch_matmul(config, x, w, out, rows=torch.tensor([counted], dtype=torch.int32))
    assert distance(out[:counted], exact(x[:counted], meant(w))) < 1e-3


@pytest.mark.parametrize(
    ("rows", "groups", "deterministic"),
    [
        *((0, 1, False), (1, 1, False), (1, 1, True), (20, 2, True), (70, 1, False), (3, 2, False), (300, 2, True)),
        *((long(0, 1, True)), (long(20, 2, False)), (long(70, 1, True)), (long(3, 2, True)), (long(300, 2, False))),
    ],
)
def test_wrappers(rows: int, groups: int, deterministic: bool) -> None:
    for dtype, near in ((torch.float32, 4e-6), (torch.float16, 2e-3)):
        check_wrappers(rows, scaled(40, 128, groups, dtype), deterministic, near)
    check_wrappers(rows, scaled(40, 128, groups, torch.float16, four=True), deterministic, 2e-3)


def check_wrappers(M: int, w: ScaledWeight, deterministic: bool, near: float) -> None:
    (N, K), dtype, device = w.shape, w.dtype, w.device
    x = torch.randn(M, K, device=device).to(dtype)
    bias, norm = torch.randn(N, device=device).to(dtype), (torch.rand(K, device=device) + 0.5).to(dtype)
    out = torch.full((M, N), float("nan"), dtype=dtype, device=device)
    residual = torch.randn(M, N, device=device).to(dtype)
    added = residual.clone()
    matmul_add(x, w, added, deterministic=deterministic)
    plain = meant(w)
    product = exact(x, plain)
    for got, wanted in (
        (matmul(x, w, bias, deterministic=deterministic), exact(x, plain, bias)),
        (matmul(x, w, out=out, deterministic=deterministic), product),
        (matmul_silu_and_mul(x, w, deterministic=deterministic), gated(product)),
        (rms_norm_matmul(x, norm, EPS, w, deterministic=deterministic), exact(x, plain, norm=norm)),
        (added, residual.double() + product),
    ):
        assert got.dtype == dtype
        assert M == 0 or distance(got, wanted) < near, (M, N, K)
    parts = matmul_parts(x, w)
    assert parts is None or distance(parts.sum(0), product) < 1e-5


def bad_calls() -> Iterator[tuple[str, object]]:
    x, w = torch.randn(3, 128), scaled(6, 128, 2, torch.float32)
    numbers, scales = w.numbers_NJ, w.scales_GN
    yield "w: got numbers that stand for torch.float32, wanted torch.float16", lambda: matmul(x.half(), w)
    yield "w: got .6, 128. numbers, wanted", lambda: matmul(x[:, :64].contiguous(), w)
    yield "w's scales: got 3 groups, wanted", lambda: matmul(x, replace(w, scales_GN=scales.repeat(2, 1)[:3]))
    yield "w's scales: got shape", lambda: matmul(x, replace(w, scales_GN=scales[:, :5]))
    yield "w's scales: got torch.float64", lambda: matmul(x, replace(w, scales_GN=scales.double()))
    yield "w: got torch.int8", lambda: matmul(x, replace(w, numbers_NJ=numbers.view(torch.int8)))
    yield "w's scales: got strides", lambda: matmul(x, replace(w, scales_GN=scales.T.contiguous().T))
    yield "w's scales: got strides", lambda: expand(w[1:])
    yield "w: got 128 columns in groups of 32, wanted", lambda: matmul(x, replace(w, scales_GN=scales.repeat(2, 1)))
    y, four = torch.randn(3, 256).half(), scaled(6, 256, 2, torch.float16, four=True)
    both, words = four.numbers_NJ, four.scales_GN
    half, signed = y[:, :128].contiguous(), replace(four, numbers_NJ=both.view(torch.int8))
    yield "w: got .6, 256. numbers, wanted ", lambda: matmul(half, four)
    yield "w: got torch.int8, wanted", lambda: matmul(half, signed)
    yield "w's scales: got torch.float32, wanted torch.int32", lambda: matmul(y, replace(four, scales_GN=words.float()))
    yield "w: got torch.float32, wanted torch.bfloat16", lambda: matmul(y.float(), replace(four, dtype=torch.float32))
    of_bf16 = replace(four, of_scales=torch.bfloat16)
    yield "w's scales: got torch.bfloat16, wanted torch.float16", lambda: matmul(y, of_bf16)
    few = replace(four, scales_GN=words.repeat(4, 1))
    yield "w: got 256 columns in groups of 32, wanted", lambda: matmul(y, few)
    yield "w: got 5 rows", lambda: matmul_silu_and_mul(x, scaled(5, 128, 1, torch.float32))


@pytest.mark.parametrize(("message", "call"), list(bad_calls()), ids=lambda value: str(value)[:24])
def test_bad_input(message: str, call: object) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_what_is_chosen() -> None:
    """Nothing is in parts that nobody adds; tiles of few rows are full, all are of whole stored blocks, whose rows have
    a scale each where warp groups widen FP8, and parts are of whole tiles."""
    rows = (1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 768, 2000)
    for M, N, K, groups, four in product(rows, (4096, 24576, 1000), (4096, 12288), (1, 32, 64), (False, True)):
        x, w = torch.empty(M, K, dtype=torch.bfloat16, device=META), of_meta(N, K, groups, four=four)
        with pretending(HOPPER):
            fixed, free = choose_scaled(x, w), choose_scaled(x, w, us_of_adding=0.0)
        assert fixed is not None
        assert free is not None
        assert fixed.parts == 1
        for config in (fixed, free):
            assert config.block_k % (128 if four else 64) == 0
            assert K % (config.parts * config.block_k) == 0
            if config.kernel == "groups":
                assert M >= 64
                assert four or w.group % config.block_k == 0
            else:
                assert config.block_m > M or M % config.block_m == 0
        with pretending(Gpu("", 89, 128)):
            assert (choose_scaled(x, w) is None) == (M > 256)
    with pretending(HOPPER):
        for M, four in product((2048, 2049), (False, True)):  # it is no worse to expand weights for more
            x = torch.empty(M, 4096, dtype=torch.bfloat16, device=META)
            assert (choose_scaled(x, of_meta(4096, 4096, 32, four=four)) is None) == (M > 2048)
        x = torch.empty(9, 4096, dtype=torch.bfloat16, device=META)
        assert choose_scaled(x.float(), of_meta(4096, 4096, 32)) is None


TILES = [
    (tile.config, four)
    for four, tiles in ((False, chooser._TILES_OF_FP8), (True, chooser._TILES_OF_FOUR))
    for tile in tiles
]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(
    ("config", "four"),
    [pytest.param(*tile, marks=[] if number % 5 == 1 else pytest.mark.long) for number, tile in enumerate(TILES)],
    ids=lambda c: f"{c.block_m}x{c.block_k}s{c.num_stages}" if isinstance(c, MatmulConfig) else str(c),
)
def test_compile_for_hopper(config: MatmulConfig, four: bool) -> None:
    """No weights are widened while a product may still read the last ones in registers."""
    M = 4 * config.block_m
    x, out = (torch.empty(M, size, dtype=torch.bfloat16, device=META) for size in (2048, 1024))
    with compiling_for(90) as kernels:
        launch_matmul(config, x, of_meta(1024, 2048, 16, four=four), out, "add")
    (kernel,) = kernels
    waits = [line for line in kernel.asm["ttgir"].splitlines() if "warp_group_dot_wait" in line]
    assert waits
    assert all("pendings = 0" in line for line in waits)
    assert "wgmma.mma_async" in kernel.asm["ptx"]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("capability", "four"), [(80, True), (89, False), (90, False), (90, True)])
def test_compile_one_row(capability: int, four: bool) -> None:
    """By vectors, unless every row's sum must have the order that it has among others."""
    x, w = torch.empty(1, 2048, dtype=torch.bfloat16, device=META), of_meta(1000, 2048, 16, four=four)
    with compiling_for(capability) as kernels:
        matmul(x, w)
        matmul_add(x, w, x.new_empty(1, 1000))
        matmul_silu_and_mul(x, w)
        assert matmul_parts(x, w) is None
        assert [kernel.name for kernel in kernels] == ["vector_scaled_kernel"] * 3
        matmul(x, of_meta(1000, 2048, 32, four=four))
        matmul(x, w, deterministic=True)
    assert [kernel.name == "vector_scaled_kernel" for kernel in kernels[3:]] == [True, False]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize(("M", "four"), [(1, False), (16, True), pytest.param(200, True, marks=pytest.mark.long)])
def test_compile_few_rows(M: int, four: bool, capability: int) -> None:
    """Where a warp multiplies by itself, operands lie as `dealt_columns` says: or sums would be in another order."""
    x, out = (torch.empty(M, size, dtype=torch.bfloat16, device=META) for size in (2048, 1024))
    config = MatmulConfig("skinny", min(max(M, 8), 64), 32, 128, num_warps=2, num_stages=3)
    with compiling_for(capability) as kernels:
        launch_matmul(replace(config, block_k=256 if four else 128), x, of_meta(1024, 2048, 16, four=four), out)
    (kernel,) = kernels
    assert kernel.asm["cubin"]
    assert set(re.findall(r"kWidth = (\d+)", kernel.asm["ttgir"])) == {"8" if four else "4"}


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_compile_scales_of_another_type(capability: int) -> None:
    """For few rows, for some, and for many, which are expanded."""
    w = of_meta(1024, 2048, 16, four=True, of_scales=torch.float16)
    for M, count in ((4, 1), (128, 1), (2100, 2)):
        with compiling_for(capability) as kernels:
            matmul(torch.empty(M, 2048, dtype=torch.bfloat16, device=META), w, deterministic=True)
        assert [bool(kernel.asm["cubin"]) for kernel in kernels] == [True] * count


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("capability", "num_kernels"), [(89, 1), (90, 2)])
def test_compile_parts(capability: int, num_kernels: int) -> None:
    """A product of few rows and its sum."""
    x = torch.empty(4, 4096, dtype=torch.bfloat16, device=META)
    for deterministic, count in ((False, num_kernels), (True, 1)):
        with compiling_for(capability) as kernels:
            matmul(x, of_meta(1024, 4096, 32), deterministic=deterministic)
        assert [bool(kernel.asm["cubin"]) for kernel in kernels] == [True] * count


def test_interpreted() -> None:
    rerun_interpreted(__file__)
