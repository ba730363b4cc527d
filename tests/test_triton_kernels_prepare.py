"""Step inputs against a plain loop over rows and tokens, by the reference and by the interpreted kernel."""

import random

import pytest
import torch

from interpreted import rerun_interpreted
from slot_tables import empty_step, random_table
from tercet.triton_kernels.prepare import prepare

PAGE, PAGES_EACH, SLOTS = 16, 5, 9
DUMMY = SLOTS - 1
NUM_PAGES = SLOTS * PAGES_EACH + 1


@pytest.mark.parametrize(
    ("num_decodes", "pad_decodes", "num_chunks", "pad_chunks", "pad_tokens"),
    [
        (3, 0, 0, 0, 0),
        (0, 0, 3, 0, 0),
        (4, 3, 2, 0, 0),
        (2, 90, 3, 4, 70),
        (0, 2, 0, 3, 5),
        (1, 0, 1, 1, 0),
        (2, 60, 3, 2045, 50),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_and_token(
    num_decodes: int, pad_decodes: int, num_chunks: int, pad_chunks: int, pad_tokens: int, seed: int
) -> None:
    rng = random.Random(seed)
    table = random_table(SLOTS, PAGES_EACH, PAGE, 1000, seed, tables=1 + seed)
    slots = rng.sample(range(SLOTS - 1), num_decodes + num_chunks)
    decodes = [*slots[:num_decodes], *[DUMMY] * pad_decodes]
    if num_decodes > 1:
        table.done_S[decodes[0]] = 1
    chunks = []
    for index, slot in enumerate(slots[num_decodes:]):
        known = int(table.length_S[slot])
        start = rng.randrange(known)
        final = index % 2 == 0 or start + 1 == known
        chunks.append((slot, start, known - start if final else rng.randint(1, known - start - 1)))
    real_tokens = sum(length for _, _, length in chunks)
    chunks += [(DUMMY, 0, 0)] * pad_chunks
    inputs, rows = empty_step(decodes, chunks, real_tokens + pad_tokens, tables=1 + seed)
    prepare(rows, table, inputs, page_size=PAGE, num_pages=NUM_PAGES)

    ids, positions, kv_slots = [], [], []

    def add(slot: int, position: int) -> None:
        ids.append(int(table.token_ids_SL[slot, position]))
        positions.append(position + int(table.shift_S[slot]))
        pages = [int(pages_SM[slot, position // PAGE]) for pages_SM in table.page_tables]
        kv_slots.append([page * PAGE + position % PAGE for page in pages])

    def add_padding() -> None:
        ids.append(0)
        positions.append(0)
        kv_slots.append(None)

    lengths, sample_positions, sample_rows = [], [], []
    for row, slot in enumerate(decodes):
        alive = not table.done_S[slot]
        length = int(table.length_S[slot])
        if alive:
            add(slot, length - 1)
        else:
            add_padding()
        lengths.append(length if alive else 0)
        sample_positions.append(length if alive else -1)
        sample_rows.append(row)
    starts = [0]
    for slot, start, length in chunks:
        for position in range(start, start + length):
            add(slot, position)
        starts.append(starts[-1] + length)
        final = length and start + length == int(table.length_S[slot])
        sample_positions.append(start + length if final else -1)
        sample_rows.append(len(decodes) + max(starts[-1] - 1, 0))
    for _ in range(pad_tokens):
        add_padding()

    assert inputs.input_ids_T.tolist() == ids
    assert inputs.positions_T.tolist() == positions
    for got, wanted in zip(inputs.kv_slots_XT.T.tolist(), kv_slots, strict=True):
        assert all(0 <= one < PAGE for one in got) if wanted is None else got == wanted
    assert inputs.decode_lengths_B.tolist() == lengths
    assert inputs.query_starts_C1.tolist() == starts
    assert rows.positions_R.tolist() == sample_positions
    sampling = [row for row, position in enumerate(sample_positions) if position >= 0]
    got_rows = inputs.sample_rows_R.tolist()
    assert [got_rows[row] for row in sampling] == [sample_rows[row] for row in sampling]
    assert all(0 <= row < max(len(ids), 1) for row in got_rows)


def test_full_slot_samples_nothing() -> None:
    table = random_table(3, 2, PAGE, 100, 0)
    table.length_S[0] = 2 * PAGE
    inputs, rows = empty_step([0], [], 0)
    prepare(rows, table, inputs, page_size=PAGE, num_pages=NUM_PAGES)
    assert rows.positions_R.tolist() == [-1]


def test_pages_outside_the_cache_are_padding() -> None:
    table = random_table(3, 2, PAGE, 100, 0)
    table.length_S[0] = 3
    table.page_table_SM[0, 0] = NUM_PAGES
    inputs, rows = empty_step([0], [], 0)
    prepare(rows, table, inputs, page_size=PAGE, num_pages=NUM_PAGES)
    assert 0 <= int(inputs.kv_slots_XT[0, 0]) < PAGE


def test_wrong_shapes_are_refused() -> None:
    table = random_table(3, 2, PAGE, 100, 0)
    inputs, _ = empty_step([0, 1], [], 0)
    _, rows = empty_step([0], [], 0)
    with pytest.raises(ValueError, match=r"slots: got shape \[1\], wanted \[2\]"):
        prepare(rows, table, inputs, page_size=PAGE, num_pages=NUM_PAGES)
    inputs, rows = empty_step([0], [], 0)
    rows.positions_R.resize_(3)
    with pytest.raises(ValueError, match="sample positions"):
        prepare(rows, table, inputs, page_size=PAGE, num_pages=NUM_PAGES)
    inputs, rows = empty_step([0], [], 0)
    object.__setattr__(inputs, "kv_slots_XT", torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"kv_slots: got torch\.int32"):
        prepare(rows, table, inputs, page_size=PAGE, num_pages=NUM_PAGES)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
