"""Rows of the kernel bench for products with weights of eight bits and four, beside those with plain weights.

As a layer on one card has them: what goes into the residual may be in parts, which the norm behind adds.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernel_rows import Row
from kernel_timing import Stopwatch
from matmul_products import PRODUCTS, Product
from random_weights import KINDS, random_blocks, random_weight
from tercet.triton_kernels.matmul import matmul, matmul_add, matmul_silu_and_mul
from tercet.triton_kernels.matmul_parts import matmul_parts
from tercet.triton_kernels.scaled_weight import Weight

_NAMES = ("8b.qkv", "8b.o", "8b.gate_up", "8b.down")


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for product in PRODUCTS:
        if product.name in _NAMES:
            plain = stopwatch.rotation(product.N, product.K)
            for kind, bits in KINDS.items():
                copies = stopwatch.copies(product.N * product.K * bits // 8)
                weights = [random_weight(bits, product.N, product.K) for _ in range(copies)]
                for num_rows in (1, 16, 64, 256, 1024):
                    for deterministic in (False, True):
                        yield _row(stopwatch, product, kind, weights, plain, num_rows, deterministic)
            blocks = [random_blocks(product.N, product.K) for _ in range(stopwatch.copies(product.N * product.K))]
            for num_rows in (192, 256, 512, 1024, 8192):
                yield _row(stopwatch, product, "fp8, rows too", blocks, plain, num_rows, deterministic=False)


def _row(
    stopwatch: Stopwatch, product: Product, kind: str, weights: Sequence[Weight], plain: list[Tensor], num_rows: int,
    deterministic: bool,
) -> Row:  # fmt: skip
    x = stopwatch.cut(1 << 30, num_rows, product.K)
    out = torch.zeros(num_rows, product.N, device="cuda", dtype=torch.bfloat16)
    return Row(
        kernel=f"{product.op} {kind}{' det.' if deterministic else ''}",
        shape=f"{product.name} M={num_rows} {product.K}->{product.N}",
        run=lambda index: _multiply(product, x, weights[index], out, deterministic),
        copies=len(weights),
        num_bytes=float(weights[0].nbytes + x.nbytes + out.nbytes),
        num_flops=2.0 * num_rows * product.N * product.K,
        peer=lambda index: _multiply(product, x, plain[index % len(plain)], out, deterministic),
        peer_name="plain weights",
        nodes=24 if num_rows <= 512 else 8,
    )


def _multiply(product: Product, x: Tensor, weight: Weight, out: Tensor, deterministic: bool) -> object:
    match product.op:
        case "matmul":
            return matmul(x, weight, out=out, deterministic=deterministic)
        case "matmul_silu_and_mul":
            return matmul_silu_and_mul(x, weight, deterministic=deterministic)
        case _:
            parts = None if deterministic else matmul_parts(x, weight)
            if parts is None:
                matmul_add(x, weight, out, deterministic=deterministic)
            return parts
