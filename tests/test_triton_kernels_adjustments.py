"""Penalties and biases on their way into the table of slots, by the reference and by the kernel."""

from array import array
from dataclasses import fields

import numpy as np
import pytest
import torch

from interpreted import rerun_interpreted
from plan_driver import GREEDY, pack
from tercet.ipc.step_messages import Adjustments, Enter, Step
from tercet.model.extras import Extras
from tercet.triton_kernels.adjustments import RECORD_WORDS, AdjustmentTable, make_adjustment_table, write_adjustments
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED

CPU = torch.device("cpu")
NUM_SLOTS, BASE = 5, 11


def enter(slot: int, adjustments: Adjustments | None) -> Enter:
    sampling = type(GREEDY)(0.0, 0, 1.0, 0.0, 0, 16, 0, b"", adjustments)
    return Enter(slot, pack(1), 1, sampling)


def written(table: AdjustmentTable, *enters: Enter, extras: Extras, capacity: int = 5000) -> int:
    """As the runner does; returns the number of runs."""
    runs = list(extras.pack(Step(0, 1, b"", enters, b"", b"", b""), BASE, capacity))
    for words, num_records in runs:
        assert len(words) <= capacity
        buffer = torch.full((BASE + capacity,), -12345, dtype=torch.int32)
        buffer[BASE : BASE + len(words)] = torch.from_numpy(np.array(words))
        write_adjustments(buffer, BASE, num_records, table)
    return len(runs)


def random_adjustments(num_biases: int, seed: int) -> Adjustments:
    g = torch.Generator().manual_seed(seed)
    repetition, presence, frequency = (torch.rand(3, generator=g) * 2).tolist()
    ids = torch.randperm(50_000, generator=g)[:num_biases].tolist()
    return Adjustments(
        repetition, presence, frequency, pack(*ids), array("f", torch.randn(num_biases, generator=g)).tobytes()
    )


@pytest.mark.parametrize("capacity", [2100, 5000])
def test_each_slot_has_what_entered_it_last(capacity: int) -> None:
    table = make_adjustment_table(NUM_SLOTS, CPU)
    extras = Extras(NUM_SLOTS, CPU)
    wanted: dict[int, Adjustments | None] = {}
    for seed, slots in enumerate([[3, 0, 1], [0, 2, 4], [3, 4, 1], [1, 2]]):
        sizes = [1024, 0, 17, 1, 700]
        news = {slot: None if (seed + slot) % 3 == 0 else random_adjustments(sizes[slot], seed) for slot in slots}
        wanted |= news
        written(table, *(enter(slot, one) for slot, one in news.items()), extras=extras, capacity=capacity)
        for slot, one in wanted.items():
            expected = one or Adjustments()
            got = table.repetition_S[slot], table.presence_S[slot], table.frequency_S[slot]
            penalties = expected.repetition_penalty, expected.presence_penalty, expected.frequency_penalty
            assert torch.equal(torch.stack(got), torch.tensor(penalties))
            ids = array("i", expected.bias_ids)
            assert table.bias_ids_SK[slot].tolist() == [*ids, *[-1] * (1024 - len(ids))]
            assert table.bias_SK[slot, : len(ids)].tolist() == list(array("f", expected.biases))
            assert extras.wanted(np.array([slot])) == (one is not None)


def test_plain_requests_in_plain_slots_write_nothing() -> None:
    extras = Extras(NUM_SLOTS, CPU)
    table = make_adjustment_table(NUM_SLOTS, CPU)
    assert written(table, enter(0, None), enter(3, None), extras=extras) == 0
    assert not extras.wanted(np.arange(NUM_SLOTS))


def test_what_points_outside_is_dropped() -> None:
    table = make_adjustment_table(NUM_SLOTS, CPU)
    before = {field.name: getattr(table, field.name).clone() for field in fields(AdjustmentTable)}
    words = torch.zeros(2 * RECORD_WORDS, dtype=torch.int32)
    words[0], words[RECORD_WORDS] = -1, NUM_SLOTS
    write_adjustments(words, 0, 2, table)
    for name, tensor in before.items():
        assert torch.equal(getattr(table, name), tensor)
    with pytest.raises(ValueError, match="got 3 records at 0 of 12"):
        write_adjustments(words, 0, 3, table)


def test_too_many_biases() -> None:
    with pytest.raises(ValueError, match="slot 2: got 1025 biases, wanted at most 1024"):
        written(
            make_adjustment_table(NUM_SLOTS, CPU), enter(2, random_adjustments(1025, 0)), extras=Extras(NUM_SLOTS, CPU)
        )


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 90])
def test_compile(capability: int) -> None:
    meta = torch.device("meta")
    with compiling_for(capability) as kernels:
        write_adjustments(torch.empty(4096, dtype=torch.int32, device=meta), 0, 2, make_adjustment_table(9, meta))
    assert [bool(kernel.asm["cubin"]) for kernel in kernels] == [True]


def test_interpreted() -> None:
    rerun_interpreted(__file__)
