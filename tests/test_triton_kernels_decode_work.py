"""Rows are cut into splits that hold what their layers' window sees, once each, and next to nothing else."""

import pytest
import torch

from interpreted import rerun_interpreted
from tercet.triton_kernels.attention import decode_attention
from tercet.triton_kernels.decode_work import make_decode_work, plan_decode_work
from tercet.triton_kernels.dispatch import INTERPRETED

KV_HEADS = 2
FIXED, SHORTEST = 512, 64
"""Tokens of a fixed split, and of the shortest of others."""


@pytest.mark.skipif(not INTERPRETED, reason="the kernel, in the interpreter")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [0, 1, 64, 700, 4096])
@pytest.mark.parametrize(
    "lengths", [[1], [0, 0], [9000], [0, 700, 0, 65, 64, 4097, 4160], torch.randint(0, 9000, (40,)).tolist()]
)
def test_splits_are_what_a_window_sees(lengths: list[int], window: int, deterministic: bool) -> None:
    num_rows, device = len(lengths), torch.device("cpu")
    slots = torch.randperm(num_rows).int()
    work = make_decode_work(
        num_rows, num_rows * 150, 64, 4, KV_HEADS, 16, device, deterministic=deterministic, window=window
    )
    work.items_I8.fill_(-7)
    plan_decode_work(torch.tensor(lengths).int(), slots, work, KV_HEADS)
    unit = FIXED if deterministic else SHORTEST
    items = work.items_I8[: int(work.num_items_1)].tolist()
    wanted = {}
    for row, length in enumerate(lengths):
        own = [item for item in items if item[0] == row]
        assert int(work.counts_B[row]) == len(own)
        assert items[int(work.starts_B[row]) :][: len(own)] == own
        if not length:
            assert not own
            continue
        first = max(0, length - window) // unit * unit if window else 0
        begins, ends = [item[1] for item in own], [item[2] for item in own]
        assert [first, *ends] == [*begins, length], "one behind the other, from the window's first to the last token"
        assert {(*item[3:6],) for item in own} == {(int(slots[row]), length, len(own))}
        assert all(begin % unit == 0 for begin in begins)
        if deterministic:
            assert all(end % unit == 0 for end in ends[:-1])
        wanted[row] = own
    assert sum(map(len, wanted.values())) == len(items)
    if not deterministic:
        assert (work.items_I8[len(items) :, 0] == -1).all()


@pytest.mark.skipif(not INTERPRETED, reason="the kernel, in the interpreter")
def test_a_window_leaves_as_many_programs_as_its_tokens_take() -> None:
    """A long row with a short window is cut as finely as a short row, not into a few splits that see something."""

    def splits(length: int, window: int) -> int:
        one = torch.tensor([length], dtype=torch.int32)
        work = make_decode_work(1, 600, 64, 4, KV_HEADS, 16, torch.device("cpu"), deterministic=False, window=window)
        plan_decode_work(one, torch.zeros_like(one), work, KV_HEADS)
        return int(work.num_items_1)

    assert splits(32_000, 512) == splits(512, 0) > 1


@pytest.mark.skipif(not INTERPRETED, reason="the kernel, in the interpreter")
def test_work_for_another_window_is_refused() -> None:
    one = torch.ones(1, dtype=torch.int32)
    work = make_decode_work(1, 4, 16, 2, KV_HEADS, 16, torch.device("cpu"), deterministic=False, window=32)
    plan_decode_work(one, one - 1, work, KV_HEADS)
    cache, table = torch.randn(4, KV_HEADS, 16, 16), torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="work: got what is planned for a window of 32, wanted 64"):
        decode_attention(torch.randn(1, 2, 16), cache, cache, table, one - 1, one, 1.0, work=work, window=64)


def test_in_the_interpreter() -> None:
    rerun_interpreted(__file__)
