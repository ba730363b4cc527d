"""A step's chunks are cut into tiles that hold each token once, the ones that see most first. In the interpreter."""

import random

import pytest
import torch

from covering import long
from interpreted import rerun_interpreted
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.prefill_work import make_last_tiles, make_prefill_work, plan_last_tiles, plan_prefill_work

CASES = [
    [],
    [(7, 0, 1)],
    [(7, 5, 0)],
    [(3, 0, 128), (1, 640, 129), (2, 0, 0), (9, 1000, 1), (0, 0, 127)],
    [(slot, 100, 64) for slot in range(9)],
    [(slot, random.randrange(3000), random.choice([1, 2, 16, 70, 128, 500])) for slot in range(70)],
    [(slot, 0, 1) for slot in range(300)],
    [(slot, slot % 50, slot % 3) for slot in range(1100)],
]


@pytest.mark.skipif(not INTERPRETED, reason="the kernel, in the interpreter")
@pytest.mark.parametrize("block_q", [16, 128])
@pytest.mark.parametrize("padding", [long(0), 1, 300])
@pytest.mark.parametrize("chunks", CASES, ids=lambda chunks: f"{len(chunks)}chunks")
def test_each_token_is_in_one_tile(chunks: list[tuple[int, int, int]], padding: int, block_q: int) -> None:
    """Chunks are (slot, start, count)."""
    begins = [0]
    for _, _, count in chunks:
        begins.append(begins[-1] + count)
    num_tokens = max(begins[-1] + padding, 1)  # a step without prefill tokens has no such plan
    slots, starts = (torch.tensor([chunk[part] for chunk in chunks], dtype=torch.int32) for part in range(2))
    work = make_prefill_work(num_tokens, len(chunks), block_q, torch.device("cpu"))
    work.tiles_N8.fill_(-7)
    plan_prefill_work(slots, starts, torch.tensor(begins, dtype=torch.int32), num_tokens, work)

    wanted = []
    for (slot, start, count), begin in zip(chunks, begins, strict=False):
        for offset in range(0, count, block_q):
            queries = min(block_q, count - offset)
            wanted.append([begin + offset, queries, start + offset, slot, start + offset + queries, start + count])
    tiles = [record[:6] for record in work.tiles_N8.tolist()]
    num_tiles = int(work.tiles_N8[work.num_tiles, 0])
    assert num_tiles == len(wanted)
    assert sorted(tiles[:num_tiles]) == sorted(wanted)
    seen = [tile[4] for tile in tiles[:num_tiles]]
    assert seen == sorted(seen, reverse=True)
    # The rest are tiles of padding, some of them empty.
    cleared: list[int] = []
    for first, queries, _, _, length, _ in tiles[num_tiles : work.num_tiles]:
        assert length == 0
        cleared += range(first, first + queries)
    assert cleared == list(range(begins[-1], num_tokens))

    last = make_last_tiles(len(chunks), work)
    last.tiles_N8.fill_(-7)
    plan_last_tiles(slots, starts, torch.tensor(begins, dtype=torch.int32), last)
    records = [record[:6] for record in last.tiles_N8.tolist()]
    ends = [begin for begin, (_, _, count) in zip(begins[1:], chunks, strict=True) if count]
    assert records[: len(ends)] == [next(tile for tile in wanted if tile[0] + tile[1] == end) for end in ends]
    assert [(record[1], record[4]) for record in records[len(ends) : -1]] == [(0, 0)] * (len(chunks) - len(ends))
    assert records[-1][:2] == [len(ends)] * 2


def test_interpreted() -> None:
    rerun_interpreted(__file__)
