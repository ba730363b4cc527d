"""A step's rows as decode rows, against a plain loop, by the reference and by the interpreted kernel."""

import random

import pytest
import torch

from interpreted import rerun_interpreted
from slot_tables import empty_step, random_table
from tercet.triton_kernels.prepare import prepare
from tercet.triton_kernels.rows_alone import rows_alone

PAGE, PAGES_EACH, SLOTS = 16, 5, 9
DUMMY = SLOTS - 1
NUM_PAGES = SLOTS * PAGES_EACH + 1


@pytest.mark.parametrize(
    ("num_decodes", "pad_decodes", "num_chunks", "pad_chunks", "pad_tokens"),
    [(0, 0, 3, 0, 0), (4, 3, 2, 0, 0), (2, 130, 3, 4, 70), (0, 2, 0, 3, 5), (1, 0, 1, 300, 0)],
)
@pytest.mark.parametrize("seed", range(2))
def test_every_row(
    num_decodes: int, pad_decodes: int, num_chunks: int, pad_chunks: int, pad_tokens: int, seed: int
) -> None:
    rng = random.Random(seed)
    table = random_table(SLOTS, PAGES_EACH, PAGE, 1000, seed)
    slots = rng.sample(range(SLOTS - 1), num_decodes + num_chunks)
    decodes = [*slots[:num_decodes], *[DUMMY] * pad_decodes]
    if num_decodes > 1:
        table.done_S[decodes[0]] = 1
    chunks = []
    for slot in slots[num_decodes:]:
        known = int(table.length_S[slot])
        start = rng.randrange(known)
        chunks.append((slot, start, rng.randint(1, known - start)))
    inputs, rows = empty_step(
        decodes, [*chunks, *[(DUMMY, 0, 0)] * pad_chunks], sum(length for *_, length in chunks) + pad_tokens
    )
    prepare(rows, table, inputs, page_size=PAGE, num_pages=NUM_PAGES)
    alone = rows_alone(inputs)

    wanted = []
    for slot in decodes:
        length = 0 if table.done_S[slot] else int(table.length_S[slot])
        wanted.append((slot, length, length - 1 + int(table.shift_S[slot])))
    for slot, start, length in chunks:
        wanted.append((slot, start + length, start + length - 1 + int(table.shift_S[slot])))
    got = torch.stack((alone.decode_slots_B, alone.decode_lengths_B, alone.positions_T), 1).tolist()
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=False)):
        assert ours[:2] == list(theirs[:2]), index
        assert ours[2] == theirs[2] or not theirs[1], "only of rows that compute something"
    assert [ours[:2] for ours in got[len(wanted) :]] == [[DUMMY, 0]] * pad_chunks
    assert not len(alone.chunk_slots_C)
    assert alone.told_tokens_1 is None


def test_with_kernels() -> None:
    rerun_interpreted(__file__)
