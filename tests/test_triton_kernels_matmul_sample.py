"""Norm, product and draw in one kernel say what the draw from logits in memory says, to the bit, in every kernel."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from slot_tables import random_table
from tercet.triton_kernels import matmul_sample
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.matmul import matmul, rms_norm_matmul
from tercet.triton_kernels.matmul_launch import launch_matmul
from tercet.triton_kernels.matmul_sample import rms_norm_matmul_sample, rms_norm_matmul_sample_into
from tercet.triton_kernels.sample import TokenRing, sample
from tercet.triton_kernels.sample_shard import VocabShard
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tuning import MatmulConfig, choose_matmul_sample

INTS = torch.int32
EPS = 1e-5
kernels = pytest.mark.skipif(not INTERPRETED, reason="the kernels, in the interpreter")
CONFIGS = [
    MatmulConfig("vector", 1, 4, 64, 4),
    MatmulConfig("vector", 1, 2, 128, 4),
    MatmulConfig("split", 8, 16, 32, 4, splits=2),
    MatmulConfig("skinny", 16, 16, 32, 1),
    MatmulConfig("tile", 16, 32, 32, 4, group_m=2),
    MatmulConfig("persistent", 16, 64, 32, 4, group_m=2),
    MatmulConfig("wave", 16, 64, 32, 4),
    MatmulConfig("wave", 16, 64, 32, 4, extra=True),
]


def copy_of(table: SlotTable) -> SlotTable:
    return SlotTable(**{field.name: getattr(table, field.name).clone() for field in fields(SlotTable)})


def mixed_rows(rows: int, vocab: int) -> tuple[Tensor, Tensor, SlotTable]:
    """Slots, positions and table of rows of every kind: greedy, drawn, padding, with banned stop ids, of no slot."""
    table = random_table(rows + 2, 4, 16, vocab, seed=int(torch.randint(2**31, ())))
    table.temperature_S[:] = torch.where(torch.rand(rows + 2) < 0.5, 0.0, torch.rand(rows + 2) * 2)
    slots = torch.randperm(rows).int()
    positions = table.length_S[slots.long()].clamp(max=62)
    table.length_S[slots.long()] = positions
    table.stop_ids_SE[:, :4] = torch.randint(0, vocab, (rows + 2, 4)).int()
    table.min_length_S[slots[::3].long()] = 63
    if rows > 4:
        positions[3] = -1
        slots[4] = rows + 2
    return slots, positions, table


def drawing(
    config: MatmulConfig, x: Tensor, w: Tensor, slots: Tensor, positions: Tensor, table: SlotTable, vocab: int
) -> Tensor:
    places = torch.full((2, len(x)), -9, dtype=INTS, device=x.device)
    ring = TokenRing(places, torch.zeros(1, dtype=INTS, device=x.device))
    matmul_sample._draw(config, ring, x, w, slots, positions, table, VocabShard(0, vocab, None))
    assert ring.turn_1.item() == 1
    assert (places[0] == -9).all()
    return places[1]


def check_same(got: SlotTable, wanted: SlotTable) -> None:
    for field in fields(SlotTable):
        assert torch.equal(getattr(got, field.name), getattr(wanted, field.name)), field.name


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kernel}{c.block_n}{'+' if c.extra else ''}")
def test_kernels(config: MatmulConfig, dtype: torch.dtype) -> None:
    for rows, vocab, padding, K in ((1, 333, 3, 96), (7, 150, 2, 40), (37, 97, 0, 64), (70, 161, 31, 32)):
        if config.kernel == "vector" and rows > 1:
            continue
        x, w = torch.randn(rows, K).to(dtype), (torch.randn(vocab + padding, K) * 3 * K**-0.5).to(dtype)
        w[vocab:] = x[0] * 100  # padding is the best of the first row, and must not be taken
        w[vocab // 2 :: vocab // 3] = w[5]  # ties
        if rows > 1:
            x[1] = 0
            x[2] = float("nan")
            x[6] = float("-inf")  # times weights of both signs: -inf, inf and NaN
        slots, positions, table = mixed_rows(rows, vocab)
        logits = torch.empty(rows, vocab + padding + -(vocab + padding) % 8, dtype=dtype)
        launch_matmul(config, x, torch.cat((w, w.new_zeros(logits.shape[1] - len(w), K))), logits)
        apart, fused = copy_of(table), copy_of(table)
        wanted = sample(logits[:, :vocab], slots, positions, apart)
        got = drawing(config, x, w, slots, positions, fused, vocab)
        assert got.tolist() == wanted.tolist(), (rows, vocab)
        check_same(fused, apart)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
