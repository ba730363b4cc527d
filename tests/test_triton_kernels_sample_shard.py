"""Sampling from parts of the vocabulary gives every rank the token, and the table, that one rank would have had."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from covering import long
from interpreted import rerun_interpreted
from slot_tables import random_table
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.sample import TokenRing, sample
from tercet.triton_kernels.sample_shard import VocabShard, sample_shard, sample_shard_into
from tercet.triton_kernels.slot_table import SlotTable

INTS = torch.int32
TYPES = [torch.float32, long(torch.float16)] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def copy_of(table: SlotTable) -> SlotTable:
    return SlotTable(**{field.name: getattr(table, field.name).clone() for field in fields(SlotTable)})


def shards_of(logits: Tensor, size: int) -> list[Tensor]:
    """Equal parts of the columns; padding has the best logits of all, and must not be taken."""
    columns = -(-logits.shape[1] // size)
    padded = torch.full((logits.shape[0], columns * size), 1000.0, dtype=logits.dtype)
    padded[:, : logits.shape[1]] = logits
    return [padded[:, rank * columns : (rank + 1) * columns] for rank in range(size)]


def sample_by_ranks(
    logits: Tensor, slots: Tensor, positions: Tensor, table: SlotTable, size: int
) -> list[tuple[Tensor, SlotTable]]:
    """Each rank's tokens and table. A first round finds what ranks say to each other; what it returns is dropped."""
    shards = shards_of(logits, size)
    said: list[Tensor] = []

    def listen(best: Tensor) -> Tensor:
        said.append(best.clone())
        return torch.stack([best] * size)

    def answer(best: Tensor) -> Tensor:
        rows = positions >= 0 if len(best) == len(positions) else slice(None)  # what padding says means nothing
        assert any(torch.equal(best[rows], other[rows]) for other in said)
        return torch.stack(said)

    parts = [VocabShard(rank * shards[0].shape[1], logits.shape[1], listen) for rank in range(size)]
    for part, shard in zip(parts, shards, strict=True):
        sample_shard(shard, slots, positions, copy_of(table), part)
    results = []
    for part, shard in zip(parts, shards, strict=True):
        own = copy_of(table)
        results.append((sample_shard(shard, slots, positions, own, replace(part, gather=answer)), own))
    return results


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("vocab", "size"), [(7, 2), (5, 4), (1025, 2), (2500, 4), (3 * 1024, 3)])
def test_every_rank_finds_the_token_of_one_rank(dtype: torch.dtype, vocab: int, size: int) -> None:
    rows = 12
    generator = torch.Generator().manual_seed(vocab + size)
    table = random_table(rows + 1, 4, 16, vocab, seed=vocab)
    table.length_S[:rows] = table.length_S[:rows].clamp(max=60)
    table.temperature_S[:rows:2] = torch.rand(rows // 2, generator=generator) * 1.5 + 0.1
    table.stop_ids_SE[:rows, :3] = torch.randint(0, vocab, (rows, 3), generator=generator).int()
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    logits[1] = 2.0  # all alike: the lowest id of the lowest rank
    logits[3] = -5.0
    logits[3, [vocab // 2, vocab - 1]] = 7.0
    logits[9, ::2] = float("nan")
    logits[10] = float("nan")
    slots = torch.randperm(rows, generator=generator).int()
    positions = table.length_S[slots.long()].clone()
    banned = slots[3:6].long()
    table.min_length_S[banned] = positions[3:6] + 1
    table.max_length_S[slots[7].long()] = positions[7] + 1
    positions[8] = -1  # padding
    alone = copy_of(table)
    wanted = sample(logits, slots, positions, alone)
    assert wanted[8] == -1
    assert wanted[10] == 0
    assert len(set(wanted.tolist())) > 3
    for tokens, own in sample_by_ranks(logits, slots, positions, table, size):
        assert tokens.tolist() == wanted.tolist()
        for field in fields(SlotTable):
            assert torch.equal(getattr(own, field.name), getattr(alone, field.name)), field.name


def test_the_ring_moves_on_by_one() -> None:
    table = random_table(4, 4, 16, 100, seed=0)
    ring = TokenRing(torch.full((3, 4), -7, dtype=INTS), torch.tensor([1], dtype=INTS))
    slots, positions = torch.tensor([0, 1], dtype=INTS), torch.tensor([5, -1], dtype=INTS)
    logits = torch.zeros(2, 50)
    logits[0, 13] = 1.0
    if not INTERPRETED:
        pytest.skip("kernels only")
    best = torch.tensor([[0, 77], [0, 0]], dtype=INTS)
    best[0, 0] = torch.tensor([3.0]).view(INTS)[0]  # another rank has 3 at id 77
    shard = VocabShard(0, 100, lambda own: torch.stack([own, best]))
    sample_shard_into(ring, logits, slots, positions, table, shard)
    assert ring.turn_1.item() == 2
    assert ring.places_KR.tolist() == [[-7] * 4, [-7] * 4, [77, -1, -7, -7]]
    assert table.token_ids_SL[0, 5] == 77
    assert table.length_S[0] == 6


def test_interpreted() -> None:
    rerun_interpreted(__file__)
