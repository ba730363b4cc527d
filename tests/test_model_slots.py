"""The slot table and plans on their way into it: every run length, by the reference and by the kernels."""

from array import array
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

import pytest
import torch

from interpreted import rerun_interpreted
from plan_driver import GREEDY, pack
from slot_tables import random_table
from tercet.engine import logits_check, request_check, slot_arrays
from tercet.ipc.step_messages import Enter, Sampling, Step
from tercet.model.slots import PlanBuffer, make_slot_table, split_changes
from tercet.triton_kernels.adjustments import MAX_BIASES
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.slot_table import MAX_STOP_IDS, SlotTable, tokens_at
from tercet.triton_kernels.write_plan import HEADER_WORDS, RunSizes, write_plan, write_small_plan

CPU = torch.device("cpu")
BASE = 10
NUM_PAGES = 50


def test_the_tables_hold_what_requests_may_bring() -> None:
    """The engine knows no kernel, and so has these numbers of its own."""
    assert request_check.MAX_STOP_IDS == slot_arrays._MAX_STOP_IDS == MAX_STOP_IDS
    assert logits_check.MAX_BIASES == MAX_BIASES


def apply(
    table: SlotTable, step: Step, capacity: int, small: bool = False, shifts: Mapping[int, int] = MappingProxyType({})
) -> int:
    """As the runner does, or `small`: as its graph; returns the number of runs."""
    buffer = PlanBuffer(BASE + HEADER_WORDS + capacity, CPU, 2)
    runs = split_changes(step, capacity, shifts)
    for changes in runs:
        words = buffer.begin()
        words[:] = -12345  # nothing of an earlier run is left to rely on
        rows = torch.full((BASE,), 7, dtype=torch.int32)
        sizes = changes.write(words, BASE, 4)
        if small:
            assert sizes.are_small
            write_small_plan(buffer.words_W, rows, BASE, table, NUM_PAGES)
        else:
            write_plan(buffer.words_W, rows, sizes, table, NUM_PAGES)
        assert rows.tolist() == [-12345] * 4 + [7] * (BASE - 4)
    return len(runs)


def make_step(enter: tuple[Enter, ...], pages: tuple[int, ...]) -> Step:
    return Step(0, 1, pack(7), enter, pack(*pages), b"", b"")


SAMPLING = Sampling(
    temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=2**62 + 12345, max_tokens=5, min_tokens=2,
    stop_ids=array("i", [2, 99]).tobytes(),
)  # fmt: skip


@pytest.mark.parametrize(("capacity", "small"), [(60, False), (100, False), (1000, False), (1000, INTERPRETED)])
def test_requests_enter(capacity: int, small: bool) -> None:
    table = make_slot_table(6, 200, 16, CPU)
    untouched = make_slot_table(6, 200, 16, CPU)
    a, b = [5, 6, 7], list(range(100, 260))
    enters = (Enter(4, pack(*a), 2, SAMPLING), Enter(1, pack(*b), len(b), GREEDY))
    runs = apply(table, make_step(enters, (1, 0, 3, 1, 1, 4, 4, 0, 9)), capacity, small, {1: -12})
    assert (runs == 1) == (capacity == 1000)
    assert table.token_ids_SL[4, :3].tolist() == a
    assert table.token_ids_SL[1, : len(b)].tolist() == b
    assert table.length_S.tolist() == [0, len(b), 0, 0, 3, 0, 0]
    assert int(table.num_prompt_S[4]), int(table.max_length_S[4]) == (2, 7)
    assert int(table.min_length_S[4]) == 4
    assert table.done_S.tolist() == [1, 0, 1, 1, 0, 1, 1]
    assert float(table.temperature_S[4]) == pytest.approx(0.7)
    assert int(table.top_k_S[4]) == 40
    assert float(table.top_p_S[4]) == pytest.approx(0.9)
    assert float(table.min_p_S[4]) == pytest.approx(0.05)
    assert int(table.seed_S[4]) == 2**62 + 12345
    assert table.shift_S.tolist() == [0, -12, 0, 0, 0, 0, 0]
    assert table.stop_ids_SE[4].tolist() == [2, 99, -1, -1, -1, -1, -1, -1]
    assert table.stop_ids_SE[1].tolist() == [-1] * 8
    assert table.page_table_SM[1, :3].tolist() == [3, 4, 0]
    assert int(table.page_table_SM[4, 0]) == 9
    for field in fields(SlotTable):
        rest = [0, 2, 3, 5, 6]
        assert torch.equal(getattr(table, field.name)[rest], getattr(untouched, field.name)[rest]), field.name


def test_entries_of_several_page_tables() -> None:
    """Those of all slots of one lie behind those of another; what is behind the last is dropped."""
    table = make_slot_table(2, 100, 16, CPU, 3)
    apply(table, make_step((), (1, 0, 5, 3, 6, 6, 8, 7, 7, 9, 0, 8, 4, 8, 9)), 100)
    first, second, third = (pages_SM.tolist() for pages_SM in table.page_tables)
    assert first == [[0] * 8, [5, *[0] * 7], [0] * 8]
    assert second == [[*[0] * 6, 6, 0], [0] * 8, [0] * 8]
    assert third == [[0] * 8, [0] * 8, [*[0] * 7, 7]]


@pytest.mark.parametrize("capacity", [60, 1000])
def test_what_is_cached_is_not_brought(capacity: int) -> None:
    table = make_slot_table(6, 200, 16, CPU)
    late, whole = list(range(100, 160)), list(range(7))
    enters = (Enter(4, pack(*late), 150, SAMPLING, 96), Enter(1, pack(*whole), 7, GREEDY))
    runs = apply(table, make_step(enters, ()), capacity)
    assert (runs == 1) == (capacity == 1000)
    assert table.token_ids_SL[4, :156].tolist() == [0] * 96 + late
    assert table.token_ids_SL[1, :8].tolist() == [*whole, 0]
    assert (int(table.length_S[4]), int(table.num_prompt_S[4]), int(table.max_length_S[4])) == (156, 150, 155)
    assert table.done_S.tolist() == [1, 0, 1, 1, 1, 1, 1]


def test_which_plans_are_small() -> None:
    """One program more than there are records, and as many tiles as the longest part has."""
    assert RunSizes(0, 8, 8, 16 * 1024, 3).are_small
    assert RunSizes(16 * 1024, 16 * 1024, 0, 0, 16 * 1024).are_small
    for large in (RunSizes(0, 8, 9, 1, 0), RunSizes(0, 8, 1, 16 * 1024 + 1, 0), RunSizes(0, 8, 0, 0, 16 * 1024 + 1)):
        assert not large.are_small


def test_seeds_of_every_size() -> None:
    for seed in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1):
        table = make_slot_table(1, 64, 16, CPU)
        sampling = Sampling(1.0, 0, 1.0, 0.0, seed, 1, 0, b"")
        apply(table, make_step((Enter(0, pack(1), 1, sampling),), ()), 100)
        assert int(table.seed_S[0]) == seed


def test_preempted_request_that_had_ended_stays_done() -> None:
    table = make_slot_table(1, 64, 16, CPU)
    apply(table, make_step((Enter(0, pack(*range(7)), 2, SAMPLING),), ()), 100)
    assert int(table.done_S[0]) == 1


def test_what_points_outside_is_dropped() -> None:
    table = random_table(4, 2, 16, 100, 0)
    before = {field.name: getattr(table, field.name).clone() for field in fields(SlotTable)}
    pages = (9, 0, 1, -1, 0, 1, 0, 2, 1, 0, -1, 1, 0, 0, NUM_PAGES, 0, 0, -1)
    apply(table, make_step((Enter(4, pack(1), 1, GREEDY), Enter(-1, pack(1), 1, GREEDY)), pages), 200)
    for name, tensor in before.items():
        assert torch.equal(getattr(table, name), tensor), name


def test_tokens_are_looked_up() -> None:
    table = random_table(4, 2, 16, 100, 0)
    slots = torch.tensor([3, 0, 1, 4, -1, 2, 2], dtype=torch.int32)
    positions = torch.tensor([31, 0, 5, 1, 1, 32, -1], dtype=torch.int32)
    ids = table.token_ids_SL.tolist()
    assert tokens_at(slots, positions, table).tolist() == [ids[3][31], ids[0][0], ids[1][5], -1, -1, -1, -1]


def test_too_many_stop_ids() -> None:
    sampling = Sampling(1.0, 0, 1.0, 0.0, 0, 1, 0, pack(*range(9)))
    with pytest.raises(ValueError, match="slot 3: got 9 stop ids, wanted at most 8"):
        apply(make_slot_table(4, 64, 16, CPU), make_step((Enter(3, pack(1), 1, sampling),), ()), 100)


def test_a_step_without_changes_sends_nothing() -> None:
    assert split_changes(make_step((), ()), 100, {}) == []


def test_interpreted() -> None:
    rerun_interpreted(__file__)
