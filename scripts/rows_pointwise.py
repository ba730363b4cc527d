"""Rows of the kernel bench for what moves bytes and computes little: embedding, norms, rotary, gate, pages."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernel_rows import Row
from kernel_timing import Stopwatch
from tercet.triton_kernels.add_rms_norm import add_rms_norm, rms_norm
from tercet.triton_kernels.copy_pages import copy_pages
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.rotary import rotary
from tercet.triton_kernels.silu_and_mul import silu_and_mul

_EPS = 1e-6


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    yield from _page_rows()
    for T, D, width in ((1, 1024, 3072), (256, 1024, 3072), (8192, 1024, 3072), (8192, 4096, 12288)):
        xs, residual = stopwatch.rotation(T, D), torch.zeros(T, D, device="cuda", dtype=torch.bfloat16)
        weight, copies, size = stopwatch.cut(5, D), len(xs), 2.0 * T * D

        def norm(i: int, xs: list[torch.Tensor] = xs, weight: torch.Tensor = weight) -> None:
            rms_norm(xs[i], weight, _EPS)

        def peer_norm(i: int, xs: list[torch.Tensor] = xs, weight: torch.Tensor = weight, D: int = D) -> None:
            F.rms_norm(xs[i], (D,), weight, _EPS)

        yield Row("rms_norm", f"T={T} D={D}", norm, copies, 2 * size, peer=peer_norm, peer_name="torch")

        def add_norm(
            i: int, xs: list[torch.Tensor] = xs, residual: torch.Tensor = residual, weight: torch.Tensor = weight
        ) -> None:
            add_rms_norm(xs[i], residual, weight, _EPS)

        yield Row("add_rms_norm", f"T={T} D={D}", add_norm, copies, 4 * size)
        gates = stopwatch.rotation(T, 2 * width)

        def gate(i: int, gates: list[torch.Tensor] = gates) -> None:
            silu_and_mul(gates[i])

        yield Row("silu_and_mul", f"T={T} F={width}", gate, len(gates), 6.0 * T * width)
        table = stopwatch.cut(0, 151936, D)
        ids = [torch.randint(151936, (T,), device="cuda", dtype=torch.int32) for _ in range(8)]

        def look_up(i: int, ids: list[torch.Tensor] = ids, table: torch.Tensor = table) -> None:
            embedding(ids[i], table)

        yield Row("embedding", f"T={T} D={D}", look_up, len(ids), 2 * size)
        q, k = (torch.zeros(T, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 8))
        positions = torch.arange(T, device="cuda", dtype=torch.int32)
        cos_sin = torch.randn(T, 128, device="cuda")

        def turn(
            i: int,
            q: torch.Tensor = q,
            k: torch.Tensor = k,
            positions: torch.Tensor = positions,
            cos_sin: torch.Tensor = cos_sin,
        ) -> None:
            rotary(q, k, positions, cos_sin)

        yield Row("rotary", f"T={T} H=16+8 D=128", turn, 1, 2.0 * 2 * T * 24 * 128)


def _page_rows() -> Iterator[Row]:
    """Pages of an 8B model."""
    cache = torch.zeros(36, 2, 140, 8, 64, 128, device="cuda", dtype=torch.bfloat16)
    for P in (1, 7, 63):
        # One source, as for answers to one prompt; it and its copies together are larger than the L2 cache.
        pairs = [torch.tensor([[i, 10 + 64 * i + p] for p in range(P)], device="cuda") for i in range(2)]
        pairs = [one.to(torch.int32) for one in pairs]

        def copy(i: int, cache: torch.Tensor = cache, pairs: list[torch.Tensor] = pairs) -> None:
            copy_pages(cache, pairs[i])

        num_bytes = 2.0 * (P + 1) * cache[:, :, 0].numel()
        yield Row("copy_pages", f"P={P} 36 layers", copy, len(pairs), num_bytes)
