"""Rows of the kernel bench for products: the engine's wrappers as they choose by themselves, beside cuBLAS."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernel_rows import Row
from kernel_timing import Stopwatch
from matmul_products import PRODUCTS, Product
from tercet.triton_kernels.matmul import (
    matmul,
    matmul_add,
    matmul_silu_and_mul,
    rms_norm_matmul,
    rms_norm_matmul_silu_and_mul,
)

_EPS = 1e-6


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for num_rows in (1, 8, 64, 256, 8192):
        for product in PRODUCTS:
            if (num_rows > 256 and product.N > 50000) or (product.normed and num_rows > 8):
                continue
            for deterministic in (False, True):
                if not (deterministic and product.normed):
                    yield _row(stopwatch, product, num_rows, deterministic)
    for model in ("0.6b", "8b"):
        for num_rows in (1, 8, 64):
            for deterministic in (False, True):
                yield _layer(stopwatch, model, num_rows, deterministic)


def _row(stopwatch: Stopwatch, product: Product, num_rows: int, deterministic: bool) -> Row:
    N, K = product.N, product.K
    weights = stopwatch.rotation(N, K)
    x = stopwatch.cut(1 << 30, num_rows, K) * K**-0.5
    norm = stopwatch.cut(7, K) * K**-0.5
    residual = torch.zeros(num_rows, N, device="cuda", dtype=torch.bfloat16)

    def run(index: int) -> object:
        w = weights[index]
        match product.op:
            case "matmul":
                return matmul(x, w, out=residual, deterministic=deterministic)
            case "matmul_add":
                matmul_add(x, w, residual, deterministic=deterministic)
                return residual
            case "matmul_silu_and_mul":
                return matmul_silu_and_mul(x, w, deterministic=deterministic)
            case "rms_norm_matmul":
                return rms_norm_matmul(x, norm, _EPS, w, deterministic=deterministic)
            case _:
                return rms_norm_matmul_silu_and_mul(x, norm, _EPS, w, deterministic=deterministic)

    return Row(
        kernel=f"{product.op}{' det.' if deterministic else ''}",
        shape=f"{product.name} M={num_rows} {K}->{N}",
        run=run,
        copies=len(weights),
        num_bytes=2.0 * (N * K + num_rows * (N + K)),
        num_flops=2.0 * num_rows * N * K,
        peer=partial(_cublas, x, weights, torch.empty_like(residual)),
        peer_name="cuBLAS, bare product",
        nodes=24 if num_rows <= 512 else 4,
    )


def _layer(stopwatch: Stopwatch, model: str, num_rows: int, deterministic: bool) -> Row:
    """The products and norms of one decoder layer in their order, each on the result of the one before."""
    sizes = {product.name.removeprefix(f"{model}."): product for product in PRODUCTS if product.name.startswith(model)}
    qkv, o, gate_up, down = (stopwatch.rotation(sizes[n].N, sizes[n].K) for n in ("qkv", "o", "gate_up", "down"))
    copies = min(map(len, (qkv, o, gate_up, down)))
    D = sizes["qkv"].K
    norm = stopwatch.cut(7, D) * 0.01
    residual = stopwatch.cut(9, num_rows, D).clone()

    def run(i: int) -> None:
        x = rms_norm_matmul(residual, norm, _EPS, qkv[i], deterministic=deterministic)
        # Attention's place: a view of as many numbers as the next product takes.
        attended = x.view(-1)[: num_rows * sizes["o"].K].view(num_rows, sizes["o"].K)
        matmul_add(attended, o[i], residual, deterministic=deterministic)
        x = rms_norm_matmul_silu_and_mul(residual, norm, _EPS, gate_up[i], deterministic=deterministic)
        matmul_add(x, down[i], residual, deterministic=deterministic)

    weights = 2.0 * sum(sizes[n].N * sizes[n].K for n in ("qkv", "o", "gate_up", "down"))
    return Row(
        kernel=f"layer without attention{' det.' if deterministic else ''}",
        shape=f"{model} M={num_rows}",
        run=run,
        copies=copies,
        num_bytes=weights,
        nodes=28,
    )


def _cublas(x: Tensor, weights: list[Tensor], out: Tensor, index: int) -> None:
    torch.mm(x, weights[index].t(), out=out)
