"""The line of tiles is shared out whole, evenly, and its cuts are what the merge is told. In the interpreter."""

import pytest
import torch

from covering import covering
from fused_rows import UNEVEN, tiles_seen
from interpreted import rerun_interpreted
from tercet.triton_kernels.decode_shares import EXTRA_PLACES, make_decode_shares, plan_decode_shares
from tercet.triton_kernels.dispatch import INTERPRETED

TILE = 32


@pytest.mark.skipif(not INTERPRETED, reason="the kernel, in the interpreter")
@covering(
    2,
    lengths=[
        *UNEVEN,
        torch.randint(0, 900, (70,)).tolist(),
        torch.randint(0, 90, (2100,)).tolist(),
    ],
    kv_heads=[1, 3, 8],
    window=[0, 2, 33, 64, 100],
)
def test_every_tile_has_one_worker(lengths: list[int], kv_heads: int, window: int) -> None:
    num_workers = 20
    slots = torch.randperm(len(lengths)).int()
    shares = make_decode_shares(
        torch.tensor(lengths).int(), num_workers, 2 * kv_heads, kv_heads, 64, TILE, window=window
    )
    shares.workers_WN.fill_(-7)
    plan_decode_shares(slots, shares, kv_heads)
    alive = [row for row, length in enumerate(lengths) if length]
    tiles = {row: tiles_seen(lengths[row], TILE, window) or range(1) for row in alive}
    records = [(row, int(slots[row]), lengths[row] - 1, tiles[row].stop) for row in alive]
    assert shares.rows_B4[: len(alive)].tolist() == [list(record) for record in records]

    line = [(row, head, tile) for row in alive for head in range(kv_heads) for tile in tiles[row]]
    workers = shares.workers_WN.tolist()
    taken, parts = [], {}
    for worker, (index, head, tile, pairs, count, *_) in enumerate(workers):
        if not count:
            assert pairs == 0
            continue
        own = line[len(taken) : len(taken) + count]
        assert own[0] == (alive[index], head, tile)
        names = list(dict.fromkeys(place[:2] for place in own))
        assert len(names) == pairs
        for number, name in enumerate(names):
            if len([place for place in own if place[:2] == name]) < len(tiles[name[0]]):
                parts.setdefault(name, []).append(2 * worker + min(number, 1))
        taken += own
    assert taken == line
    # Evenly, if a pair counts as some tiles more: at most one place more than a share, and nothing for the extra ones.
    loads = [count + EXTRA_PLACES * pairs for (*_, pairs, count) in (record[:5] for record in workers)]
    total = len(line) + EXTRA_PLACES * kv_heads * len(alive)
    assert max(loads) <= -(-total // max(1, min(num_workers, total // 2))) + EXTRA_PLACES

    told = {}
    for worker, (row, head, first, count) in enumerate(record[5:9] for record in workers):
        if count:
            told[(row, head)] = [first, *(2 * other for other in range(worker + 1, worker + count))]
    assert told == parts


def test_in_the_interpreter() -> None:
    rerun_interpreted(__file__)
