"""Rows of the kernel bench for the end of a decode step: norm, lm_head and draw.

The peer is the same with logits in memory.
"""

from collections.abc import Iterator

import torch

from kernel_rows import Row
from kernel_timing import Stopwatch
from matmul_products import PRODUCTS, Product
from tercet.model.slots import make_slot_table
from tercet.triton_kernels.matmul import rms_norm_matmul
from tercet.triton_kernels.matmul_sample import rms_norm_matmul_sample
from tercet.triton_kernels.sample import TokenRing, sample_into
from tercet.triton_kernels.sample_shard import VocabShard

_EPS = 1e-6


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for product in PRODUCTS:
        if "lm_head" in product.name:
            for num_rows in (1, 8, 16, 32, 64, 128, 256):
                for temperature in (0.0, 1.0):
                    yield _row(stopwatch, product, num_rows, temperature)


def _row(stopwatch: Stopwatch, product: Product, num_rows: int, temperature: float) -> Row:
    N, K = product.N, product.K
    weights = stopwatch.rotation(N, K)
    hidden, norm = stopwatch.cut(1 << 30, num_rows, K), stopwatch.cut(7, K) * K**-0.5
    table = make_slot_table(num_rows, 256, 64, hidden.device)
    table.temperature_S.fill_(temperature)
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    positions = torch.full_like(slots, 100)
    places = torch.zeros(2, num_rows, dtype=torch.int32, pin_memory=True)
    ring = TokenRing(places, torch.zeros(1, dtype=torch.int32, device="cuda"))
    shard = VocabShard(0, N, None)

    def run(index: int) -> None:
        rms_norm_matmul_sample(ring, hidden, norm, _EPS, weights[index], slots, positions, table, shard)

    def apart(index: int) -> None:
        logits = rms_norm_matmul(hidden, norm, _EPS, weights[index])
        sample_into(ring, logits, slots, positions, table)

    return Row(
        kernel=f"lm_head and draw, {'greedy' if temperature == 0 else 'drawn'}",
        shape=f"{product.name} M={num_rows} {K}->{N}",
        run=run,
        copies=len(weights),
        num_bytes=2.0 * (N * K + num_rows * K),
        num_flops=2.0 * num_rows * N * K,
        peer=apart,
        peer_name="logits in memory",
    )
