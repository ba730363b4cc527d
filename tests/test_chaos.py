"""Some faults against a live engine under traffic, in the long run every kind of them once, also against one that tries
tokens ahead, and a few with two ranks; and with two replicas. `make chaos` runs hundreds."""

import pytest

from chaos import DECK, run_episode
from chaos_traffic import Record
from covering import long


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "num_faults", "seed"),
    [
        (1, 1, 3, 12),
        long(1, 1, 4, 12),
        long(1, 1, 6, 12),
        long(1, 1, len(DECK), 12),
        long(1, 1, len(DECK), 11),
        long(2, 1, 2, 240),
        long(1, 2, len(DECK), 12),
    ],
)
def test_nothing_is_lost_and_nothing_changes(num_ranks: int, num_replicas: int, num_faults: int, seed: int) -> None:
    record = Record()
    run_episode(num_ranks, num_faults, record, seed, num_replicas)
    assert record.wrong == []
    assert record.embedded > 0
    assert record.faults.total() > num_faults // 2
    assert min(record.finished["socket"], record.finished["http"]) >= num_faults
