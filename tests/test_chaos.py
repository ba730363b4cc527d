"""A few faults of every kind against live engines under traffic; `make chaos` runs hundreds."""

import pytest

from chaos import Record, run_episode


@pytest.mark.parametrize(("num_ranks", "num_faults", "seed"), [(1, 10, 11), (2, 4, 12)])
def test_nothing_is_lost_and_nothing_changes(num_ranks: int, num_faults: int, seed: int) -> None:
    record = Record()
    run_episode(num_ranks, num_faults, record, seed)
    assert record.wrong == []
    assert record.faults.total() > num_faults // 2
    assert record.finished > num_faults
