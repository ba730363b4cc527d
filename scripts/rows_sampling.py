"""Rows of the kernel bench for the end of a decode step: norm, lm_head and draw, and what requests want of logits.

The peer of the former is the same with logits in memory, of the latter torch's topk.
"""

from collections.abc import Iterator

import torch

from kernel_rows import Row
from kernel_timing import Stopwatch
from matmul_products import PRODUCTS, Product
from tercet.model.slots import make_slot_table
from tercet.triton_kernels.log_probabilities import log_probabilities
from tercet.triton_kernels.matmul import rms_norm_matmul
from tercet.triton_kernels.matmul_sample import rms_norm_matmul_sample
from tercet.triton_kernels.sample import TokenRing, sample, sample_into
from tercet.triton_kernels.sample_shard import VocabShard

_EPS = 1e-6
_VOCABULARY = 151_936
_TEMPERATURE, _TOP, _TOP_P = 0.2, 20, 0.95
"""Of numbers as far apart as the pool's."""


def rows(stopwatch: Stopwatch) -> Iterator[Row]:
    for product in PRODUCTS:
        if "lm_head" in product.name:
            for num_rows in (1, 8, 16, 32, 64, 128, 256):
                for temperature in (0.0, 1.0):
                    yield _row(stopwatch, product, num_rows, temperature)
    for num_rows in (1, 8, 64, 256):
        yield _limited(stopwatch, num_rows)
        yield _logged(stopwatch, num_rows)


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


def _limited(stopwatch: Stopwatch, num_rows: int) -> Row:
    """A draw from logits in memory, as spread out as those of a real model at temperature 0.6."""
    logits = stopwatch.rotation(num_rows, _VOCABULARY)
    device = logits[0].device
    table = make_slot_table(num_rows, 256, 64, device)
    table.temperature_S.fill_(_TEMPERATURE)
    table.top_k_S.fill_(_TOP)
    table.top_p_S.fill_(_TOP_P)
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    positions = torch.full_like(slots, 100)
    noise = torch.empty(num_rows, _TOP, device=device).exponential_()

    def peer(index: int) -> torch.Tensor:
        top, ids = logits[index].float().topk(_TOP, dim=1)
        weights = (top / _TEMPERATURE).softmax(1)
        weights[weights.cumsum(1) - weights >= _TOP_P] = 0.0
        return ids.gather(1, (weights / noise).argmax(1, keepdim=True))

    return Row(
        kernel=f"draw, top_k {_TOP}, top_p {_TOP_P}",
        shape=f"logits M={num_rows} V={_VOCABULARY}",
        run=lambda index: sample(logits[index], slots, positions, table),
        copies=len(logits),
        num_bytes=2.0 * num_rows * _VOCABULARY,
        peer=peer,
        peer_name="torch topk",
    )


def _logged(stopwatch: Stopwatch, num_rows: int) -> Row:
    logits = stopwatch.rotation(num_rows, _VOCABULARY)
    token_ids = torch.randint(_VOCABULARY, (num_rows,), dtype=torch.int32, device=logits[0].device)

    def peer(index: int) -> object:
        log = logits[index].float().log_softmax(1)
        chosen = log.gather(1, token_ids.long()[:, None])
        return log.topk(_TOP, dim=1), chosen, (log > chosen).sum(1)

    return Row(
        kernel=f"log-probabilities, {_TOP} likeliest",
        shape=f"logits M={num_rows} V={_VOCABULARY}",
        run=lambda index: log_probabilities(logits[index], token_ids, _TOP),
        copies=len(logits),
        num_bytes=2.0 * num_rows * _VOCABULARY,
        peer=peer,
        peer_name="torch topk",
    )
