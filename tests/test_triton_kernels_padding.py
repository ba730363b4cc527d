"""Steps are padded: what kernels are told of the rows there are in truth changes no bit of those, and spares the rest.

Padding rows begin as NaN. Kernels for few rows may compute them all the same; those for many must not touch what lies
behind the last tile with a row in it.
"""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from tercet.triton_kernels.add_normed import add_normed, add_normed_rms_norm
from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.attention_prologue import attention_prologue
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.matmul import matmul, matmul_add, matmul_silu_and_mul, rms_norm_matmul
from tercet.triton_kernels.matmul_config import MatmulConfig
from tercet.triton_kernels.matmul_launch import launch_matmul

EPS, PAGE = 1e-6, 16
NAN = float("nan")
DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)


def kernels(test: Callable[..., None]) -> Callable[..., None]:
    """For where there are kernels: a GPU, or the interpreter."""
    missing = not INTERPRETED and not torch.cuda.is_available()
    test = pytest.mark.skipif(missing, reason="needs a CUDA device")(test)
    return test if INTERPRETED else pytest.mark.gpu(test)


FOR_MANY = [
    MatmulConfig("tile", 16, 32, 32, 4, group_m=2),
    MatmulConfig("persistent", 16, 32, 32, 4, group_m=2),
    MatmulConfig("wave", 16, 32, 32, 4, extra=True, tall=True),
]
ON_GPU = [
    MatmulConfig("tile", 128, 128, 64, 8),
    MatmulConfig("persistent", 128, 256, 64, 8, 3),
    MatmulConfig("wave", 128, 128, 64, 4, 6),
    MatmulConfig("wave", 128, 128, 64, 8, 4, extra=True, tall=True),
    MatmulConfig("hopper", 128, 256, 64, 4, 4),
    MatmulConfig("hopper", 256, 128, 64, 4, 4, 4),
]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def padded(x: Tensor, size: int) -> Tensor:
    return torch.cat((x, torch.full((size - len(x), *x.shape[1:]), NAN, device=DEVICE, dtype=DTYPE)))


def rows_of(count: int) -> Tensor:
    return torch.tensor([count], dtype=torch.int32, device=DEVICE)


@kernels
@pytest.mark.parametrize("config", FOR_MANY if INTERPRETED else ON_GPU, ids=lambda c: f"{c.kernel}{c.height}")
@pytest.mark.parametrize("epilogue", ["store", "add", "gate"])
def test_products(config: MatmulConfig, epilogue: str) -> None:
    M, N, K = (75, 96, 64) if INTERPRETED else (3000, 1024, 512)
    w = draw(N, K) * K**-0.5
    for count in (0, 1, config.height, random.randint(1, M), M):
        x, before = draw(count, K), draw(M, N // 2 if epilogue == "gate" else N)
        alone, whole = before[:count].clone(), before.clone()
        if count:
            launch_matmul(config, x, w, alone, epilogue)
        launch_matmul(config, padded(x, M), w, whole, epilogue, rows=rows_of(count))
        assert torch.equal(whole[:count], alone), count
        spared = -(-count // config.height) * config.height
        assert torch.equal(whole[spared:], before[spared:]), count


@kernels
@pytest.mark.parametrize("size", [40, 300] if INTERPRETED else [40, 300, 700, 1500, 5000])
def test_wrappers(size: int) -> None:
    N, K = (64, 48) if INTERPRETED else (1024, 1024)
    w, norm = draw(N, K) * K**-0.5, draw(K)
    count = random.randint(1, size - 1)
    x, rows = padded(draw(count, K), size), rows_of(count)
    clean = torch.where(x.isnan(), 0.0, x)
    residual = draw(size, N)
    wanted, got = residual.clone(), residual.clone()
    matmul_add(clean, w, wanted, deterministic=True)
    matmul_add(x, w, got, deterministic=True, rows=rows)
    assert torch.equal(got[:count], wanted[:count])
    for result, reference in (
        (matmul(x, w, deterministic=True, rows=rows), matmul(clean, w, deterministic=True)),
        (matmul_silu_and_mul(x, w, deterministic=True, rows=rows), matmul_silu_and_mul(clean, w, deterministic=True)),
        (
            rms_norm_matmul(x, norm, EPS, w, deterministic=True, rows=rows),
            rms_norm_matmul(clean, norm, EPS, w, deterministic=True),
        ),
    ):
        assert torch.equal(result[:count], reference[:count])


@kernels
@pytest.mark.parametrize("size", [37] if INTERPRETED else [37, 2048, 5003])
def test_norms(size: int) -> None:
    count = random.randint(1, size - 1)
    x, weight, residual = padded(draw(count, 200), size), draw(200), draw(size, 200)
    normed = rms_norm(x, weight, EPS, rows_of(count), deterministic=True)
    assert torch.equal(normed[:count], rms_norm(x[:count].clone(), weight, EPS, deterministic=True))
    alone, whole = residual[:count].clone(), residual.clone()
    wanted = add_rms_norm(x[:count].clone(), alone, weight, EPS, deterministic=True)
    assert torch.equal(add_rms_norm(x, whole, weight, EPS, rows_of(count), deterministic=True)[:count], wanted)
    assert torch.equal(whole[:count], alone)
    assert torch.equal(whole[count:], residual[count:])
    wanted = add_normed_rms_norm(x[:count].clone(), alone, weight, weight, EPS, deterministic=True)
    got = add_normed_rms_norm(x, whole, weight, weight, EPS, rows_of(count), deterministic=True)
    assert torch.equal(got[:count], wanted)
    assert torch.equal(add_normed(x, whole, weight, EPS, rows_of(count), deterministic=True), whole)
    add_normed(x[:count].clone(), alone, weight, EPS, deterministic=True)
    assert torch.equal(whole[:count], alone)
    assert torch.equal(whole[count:], residual[count:])


@kernels
@pytest.mark.parametrize("size", [23] if INTERPRETED else [23, 1000])
def test_prologue(size: int) -> None:
    """`first` rows of the step lie ahead of these; no cell of a padding row is written."""
    heads, kv_heads, dim, first = 4, 2, 32, 5
    count, pages = random.randint(1, size - 1), size // PAGE + 2
    qkv = padded(draw(count, (heads + 2 * kv_heads) * dim), size)
    positions = torch.randint(0, 900, (size,), dtype=torch.int32, device=DEVICE)
    cells = torch.randperm(pages * PAGE, device=DEVICE)[:size]
    cos_sin, norms = torch.randn(900, dim, device=DEVICE), (draw(dim), draw(dim))

    def run(rows: int, told: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        caches = [torch.full((pages, kv_heads, PAGE, dim), 7.0, device=DEVICE, dtype=DTYPE) for _ in range(2)]
        q = attention_prologue(
            qkv[:rows].clone(), positions[:rows], cells[:rows], cos_sin, *norms, EPS, *caches, heads, told, first
        )
        return q[:count], caches[0], caches[1]

    for got, wanted in zip(run(size, rows_of(first + count)), run(count, None), strict=True):
        assert torch.equal(got, wanted)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
