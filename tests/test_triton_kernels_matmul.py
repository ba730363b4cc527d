"""Products against float64: every kernel in the interpreter, wrappers and references anywhere, bits on a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from covering import covering
from interpreted import rerun_interpreted
from tercet.triton_kernels import tuning
from tercet.triton_kernels.dispatch import INTERPRETED, use_kernels
from tercet.triton_kernels.matmul import (
    matmul,
    matmul_add,
    matmul_silu_and_mul,
    rms_norm_matmul,
    rms_norm_matmul_silu_and_mul,
)
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.tuning import choose_matmul
from tercet.triton_kernels.untuned import heuristic

EPS = 1e-5
DTYPES = [torch.float32, torch.float16]
CONFIGS = [
    MatmulConfig("vector", 1, 4, 64, 4),
    MatmulConfig("vector", 1, 2, 128, 4),
    MatmulConfig("split", 8, 16, 32, 4, splits=2),
    MatmulConfig("split", 16, 16, 32, 4, splits=4),
    MatmulConfig("skinny", 16, 16, 32, 1),
    MatmulConfig("tile", 16, 32, 32, 4, group_m=2),
    MatmulConfig("persistent", 16, 32, 32, 4, group_m=2),
    MatmulConfig("wave", 16, 32, 32, 4),
    MatmulConfig("wave", 16, 32, 32, 4, extra=True),
    MatmulConfig("wave", 16, 32, 32, 4, tall=True),
    MatmulConfig("wave", 16, 32, 32, 4, extra=True, tall=True),
]
# The last pair fits no block; rows of TMA tensors are multiples of 16 bytes.
SHAPES = [(1, 64, 64), (7, 48, 96), (37, 80, 72), (5, 44, 100)]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def inputs(M: int, N: int, K: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, bias and norm weight, fresh each time."""
    x, w, bias = torch.randn(M, K), torch.randn(N, K) * K**-0.5, torch.randn(N)
    return tuple(tensor.to(device, dtype) for tensor in (x, w, bias, torch.rand(K) + 0.5))  # type: ignore[return-value]


def exact(x: Tensor, w: Tensor, bias: Tensor | None = None, norm: Tensor | None = None) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * norm.double()
    y = x @ w.double().T
    return y if bias is None else y + bias.double()


def gated(y: Tensor) -> Tensor:
    return F.silu(y[:, 0::2]) * y[:, 1::2]


@pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
@covering(2, config=CONFIGS, epilogue=["store", "add", "gate"], dtype=DTYPES)
def test_kernels(config: MatmulConfig, epilogue: str, dtype: torch.dtype) -> None:
    for M, N, K in SHAPES:
        if config.kernel == "vector" and M > 1:
            continue
        width = N // 2 if epilogue == "gate" else N
        if config.kernel in ("persistent", "wave") and any(size * dtype.itemsize % 16 for size in (K, width)):
            continue
        for normed in (False, True) if config.kernel in ("vector", "split") else (False,):
            x, w, bias, norm = inputs(M, N, K, dtype)
            out = torch.full((M, width), float("nan"), dtype=dtype)
            wanted = exact(x, w, bias, norm if normed else None)
            if epilogue == "gate":
                wanted = gated(wanted)
            if epilogue == "add":
                out = torch.randn(M, N).to(dtype)
                wanted = wanted + out.double()
            launch_matmul(config, x, w, out, epilogue, bias, norm if normed else None, EPS)
            assert distance(out, wanted) < tolerance(dtype), (M, N, K, normed)


@covering(2, rows=[0, 1, 3, 20, 70], deterministic=[False, True], dtype=DTYPES)
def test_wrappers(rows: int, deterministic: bool, dtype: torch.dtype) -> None:
    check_wrappers(rows, 40, 88, dtype, deterministic, "cpu")


def check_wrappers(M: int, N: int, K: int, dtype: torch.dtype, deterministic: bool, device: str) -> None:
    x, w, bias, norm = inputs(M, N, K, dtype, device)
    near = tolerance(dtype) * 2  # a fused norm scales after rounding, the references round before the gate
    for got, wanted in (
        (matmul(x, w, deterministic=deterministic), exact(x, w)),
        (matmul(x, w, bias, deterministic=deterministic), exact(x, w, bias)),
        (rms_norm_matmul(x, norm, EPS, w, deterministic=deterministic), exact(x, w, norm=norm)),
        (rms_norm_matmul(x, norm, EPS, w, bias, deterministic=deterministic), exact(x, w, bias, norm)),
        (matmul_silu_and_mul(x, w, deterministic=deterministic), gated(exact(x, w))),
        (
            rms_norm_matmul_silu_and_mul(x, norm, EPS, w, deterministic=deterministic),
            gated(exact(x, w, norm=norm)),
        ),
    ):
        assert got.shape == wanted.shape
        assert got.dtype == dtype
        assert M == 0 or distance(got, wanted) < near
    out = torch.full((M, N), float("nan"), dtype=dtype, device=device)
    assert matmul(x, w, out=out, deterministic=deterministic) is out
    assert M == 0 or distance(out, exact(x, w)) < near
    wide = torch.full((M, N), float("nan"), device=device)
    matmul(x, w, out=wide, deterministic=deterministic)
    near_wide = tolerance(torch.float32) if use_kernels(x) else near  # references round to the type of x
    assert M == 0 or distance(wide, exact(x, w)) < near_wide
    residual = torch.randn(M, N).to(device, dtype)
    wanted = residual.double() + exact(x, w)
    matmul_add(x, w, residual, deterministic=deterministic)
    assert M == 0 or distance(residual, wanted) < near


def bad_calls() -> Iterator[tuple[str, object]]:
    x, w = torch.randn(3, 8), torch.randn(6, 8)
    yield "w: got shape", lambda: matmul(x, torch.randn(6, 9))
    yield "w: got torch.float16", lambda: matmul(x, w.half())
    yield "x: got torch.int64", lambda: matmul(x.long(), w)
    yield "x: got shape", lambda: matmul(x[0], w)
    yield "x: got strides", lambda: matmul(torch.randn(8, 3).T, w)
    yield "w: got strides", lambda: matmul(x, torch.randn(8, 6).T)
    yield "bias: got shape", lambda: matmul(x, w, torch.randn(5))
    yield "out: got shape", lambda: matmul(x, w, out=torch.empty(6, 3))
    yield "residual: got shape", lambda: matmul_add(x, w, torch.randn(3, 5))
    yield "residual: got strides", lambda: matmul_add(x, w, torch.randn(6, 3).T)
    yield "w: got 5 rows", lambda: matmul_silu_and_mul(x, torch.randn(5, 8))
    yield "norm: got torch.float64", lambda: rms_norm_matmul(x, torch.randn(x.shape[1]).double(), EPS, w)
    yield "norm: got shape", lambda: rms_norm_matmul(x, torch.randn(7), EPS, w)


@pytest.mark.parametrize(("message", "call"), list(bad_calls()), ids=lambda value: str(value)[:24])
def test_bad_input(message: str, call: object) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_buckets_that_no_table_has_are_served_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """192 rows came late: older tables serve them as they did."""
    line = tuning.table_key("matmul", 512, 512, torch.bfloat16, True)
    few, some, many = (MatmulConfig("wave", size, 64, 64, 4) for size in (64, 128, 256))
    old = {64: few, 128: some, 256: many}
    tall = MatmulConfig("wave", 128, 128, 64, 8, 4, tall=True)
    tables = {"old": {line: old}, "new": {line: old | {192: tall}}}
    monkeypatch.setattr(tuning, "gpu_name", lambda device: device)
    monkeypatch.setattr(tuning, "is_hopper", lambda device: True)
    monkeypatch.setattr(tuning, "has_little_shared_memory", lambda device: False)
    monkeypatch.setattr(tuning, "load_table", tables.__getitem__)

    def chosen(gpu: str, rows: int) -> MatmulConfig:
        return choose_matmul("matmul", rows, 512, 512, torch.bfloat16, True, gpu)  # type: ignore[arg-type]

    sizes = (64, 65, 128, 129, 160, 192, 193, 256)
    assert [chosen("old", rows) for rows in sizes] == [few, *[some] * 2, *[many] * 5]
    assert [chosen("new", rows) for rows in sizes] == [few, *[some] * 2, *[tall] * 3, *[many] * 2]
    assert {chosen(gpu, 300) for gpu in tables} == {heuristic("matmul", 512, 512, 512, torch.bfloat16, True, True)}


def test_interpreted() -> None:
    rerun_interpreted(__file__)


# On a GPU: (N, K) of Qwen3-0.6B and 8B, and one that no table knows.
GPU_SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (1000, 360)]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("N", "K"), GPU_SHAPES)
def test_gpu(N: int, K: int, deterministic: bool) -> None:
    for M in (1, 2, 8, 13, 33, 64, 100, 256, 500, 1030, 3000):
        check_wrappers(M, N, K, torch.bfloat16, deterministic, "cuda")


HOPPER = [(128, 64, 8), (128, 128, 6), (128, 256, 4), (256, 128, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", ["store", "add", "gate"])
@pytest.mark.parametrize(("block_m", "block_n", "stages"), HOPPER)
def test_warp_groups(block_m: int, block_n: int, stages: int, epilogue: str) -> None:
    """Gluon knows no interpreter: tiles of every size, and the bits of the portable kernel."""
    config = MatmulConfig("hopper", block_m, block_n, 64, 4, stages)
    for M, N, K in ((1, 256, 64), (130, 1008, 360), (block_m, block_n, 128), (3001, 4096, 1024), (5000, 6144, 712)):
        x, w, _, _ = inputs(M, N, K, torch.bfloat16, "cuda")
        width = N // 2 if epilogue == "gate" else N
        before = torch.randn(M, width, device="cuda", dtype=torch.bfloat16)
        out, portable = before.clone(), before.clone()
        launch_matmul(config, x, w, out, epilogue)
        launch_matmul(MatmulConfig("tile", 128, 128, 64, 8), x, w, portable, epilogue)
        wanted = exact(x, w)
        wanted = gated(wanted) if epilogue == "gate" else wanted + before.double() * (epilogue == "add")
        assert distance(out, wanted) < tolerance(torch.bfloat16), (M, N, K)
        assert torch.equal(out, portable), (M, N, K)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), GPU_SHAPES)
def test_rows_keep_their_bits(N: int, K: int) -> None:
    """`deterministic`: a row alone and the same row anywhere among others, in every wrapper."""
    x, w, _, norm = inputs(4100, N, K, torch.bfloat16, "cuda")
    residual = torch.randn(4100, N, device="cuda", dtype=torch.bfloat16)

    def everything(rows: slice) -> list[Tensor]:
        added = residual[rows].clone()
        matmul_add(x[rows], w, added, deterministic=True)
        return [
            added,
            matmul(x[rows], w, deterministic=True),
            matmul_silu_and_mul(x[rows], w, deterministic=True),
            rms_norm_matmul(x[rows], norm, EPS, w, deterministic=True),
            rms_norm_matmul_silu_and_mul(x[rows], norm, EPS, w, deterministic=True),
        ]

    whole = everything(slice(0, 4100))
    for start, size in (
        (0, 1),
        (1111, 1),
        (7, 5),
        (64, 8),
        (5, 16),
        (300, 31),
        (9, 64),
        (128, 128),
        (1, 255),
        (0, 777),
    ):
        rows = slice(start, start + size)
        for got, wanted in zip(everything(rows), whole, strict=True):
            assert torch.equal(got, wanted[rows]), (start, size)
