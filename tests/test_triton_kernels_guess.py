"""Guesses and which of them hold: against plain loops, and against one token at a time."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from slot_tables import random_table
from tercet.triton_kernels.accept import WRONG, accept
from tercet.triton_kernels.guess import guess
from tercet.triton_kernels.prepare import StepInputs, StepRows
from tercet.triton_kernels.sample import TokenRing, append_reference
from tercet.triton_kernels.slot_table import SlotTable

PAGE, PAGES_EACH, SLOTS, VOCAB = 16, 5, 9, 3
DUMMY, LENGTH = SLOTS - 1, PAGE * PAGES_EACH
NUM_PAGES = SLOTS * PAGES_EACH + 1


def rubbish(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full((size,), -77, dtype=dtype)


def empty_trial(num_slots: int, num_tokens: int) -> tuple[StepInputs, StepRows]:
    """Room for so many slots and tokens, filled with nonsense."""
    row_slots_T, starts_B = rubbish(num_tokens), rubbish(num_slots)
    inputs = StepInputs(
        input_ids_T=rubbish(num_tokens),
        positions_T=rubbish(num_tokens),
        kv_slots_T=rubbish(num_tokens, torch.int64),
        decode_slots_B=row_slots_T,
        decode_lengths_B=rubbish(num_tokens),
        chunk_slots_C=rubbish(num_slots),
        chunk_starts_C=starts_B,
        query_starts_C1=rubbish(num_slots + 1),
        sample_rows_R=rubbish(num_tokens),
        num_tokens_1=rubbish(1),
    )
    return inputs, StepRows(row_slots_T, starts_B, rubbish(num_slots), rubbish(num_tokens))


def plain_guesses(ids: list[int], wanted: int, repeated: tuple[int, int]) -> list[int]:
    """What follows the longest run, of those the latest, that is as the last tokens are."""
    best = (0, -1)
    for end in range(1, len(ids)):
        count = 0
        while count < min(repeated[1], end) and ids[end - 1 - count] == ids[-1 - count]:
            count += 1
        if count >= repeated[0]:
            best = max(best, (count, end))
    if best[1] < 0:
        return []
    out = list(ids)
    for index in range(wanted):
        out.append(out[best[1] + index])
    return out[len(ids) :]


@pytest.mark.parametrize(("num_slots", "padding", "num_guesses"), [(1, 0, 1), (3, 5, 3), (8, 70, 4), (5, 0, 15)])
@pytest.mark.parametrize("repeated", [(1, 1), (2, 4), (3, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_every_token(num_slots: int, padding: int, num_guesses: int, repeated: tuple[int, int], seed: int) -> None:
    rng = random.Random(seed)
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, seed)
    slots = [*rng.sample(range(SLOTS - 1), num_slots - 1), DUMMY]
    table.max_length_S[:DUMMY] = torch.tensor([rng.randint(int(n) + 1, LENGTH) for n in table.length_S[:DUMMY]])
    table.token_ids_SL[slots[0], : table.length_S[slots[0]]] = 1  # one token again and again
    if num_slots > 2:
        table.done_S[slots[1]] = 1
    width = num_guesses + 1
    inputs, rows = empty_trial(num_slots, num_slots * width + padding)
    before = replace(table, **{name: getattr(table, name).clone() for name in SlotTable.__dataclass_fields__})
    guess(
        torch.tensor(slots, dtype=torch.int32), rows, table, inputs, num_guesses=num_guesses, repeated=repeated,
        page_size=PAGE, num_pages=NUM_PAGES,
    )  # fmt: skip
    for name in SlotTable.__dataclass_fields__:
        assert torch.equal(getattr(table, name), getattr(before, name)), name
    assert int(inputs.num_tokens_1) == num_slots * width
    assert inputs.query_starts_C1.tolist() == [row * width for row in range(num_slots + 1)]
    for row, slot in enumerate(slots):
        length = int(table.length_S[slot])
        alive = not table.done_S[slot]
        ids = table.token_ids_SL[slot, :length].tolist()
        room = int(table.max_length_S[slot]) - length
        wanted = [*ids[-1:], *plain_guesses(ids, min(num_guesses, room - 1), repeated)] if alive else []
        assert int(inputs.chunk_starts_C[row]) == (length - 1 if alive else 0)
        for place in range(width):
            token = row * width + place
            assert int(rows.slots_R[token]) == slot
            cell = int(inputs.kv_slots_T[token])
            if place >= len(wanted):
                assert int(rows.positions_R[token]) == -1
                assert int(inputs.decode_lengths_B[token]) == int(inputs.input_ids_T[token]) == 0
                assert 0 <= cell < PAGE  # of the page that is nobody's
                continue
            position = length - 1 + place
            assert int(inputs.input_ids_T[token]) == wanted[place]
            assert int(inputs.positions_T[token]) == position
            assert int(inputs.decode_lengths_B[token]) == position + 1
            assert int(rows.positions_R[token]) == (position + 1 if position + 1 < LENGTH else -1)
            assert cell == int(table.page_table_SM[slot, position // PAGE]) * PAGE + position % PAGE
    for token in range(num_slots * width, num_slots * width + padding):
        assert int(rows.slots_R[token]) == DUMMY
        assert int(rows.positions_R[token]) == -1
        assert int(inputs.input_ids_T[token]) == int(inputs.positions_T[token]) == 0
        assert 0 <= int(inputs.kv_slots_T[token]) < PAGE


class _Oracle:
    """What would be sampled behind some tokens: mostly what has followed before, so that guesses are often right."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, ids: list[int]) -> int:
        rng = random.Random(f"{self._seed} {ids[-3:]}")
        return rng.randrange(VOCAB)


@pytest.mark.parametrize("num_guesses", [1, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_one_at_a_time(num_guesses: int, seed: int) -> None:
    """Step by step, with stop ids that count only from some length on, until all are done."""
    rng = random.Random(seed)
    oracle = _Oracle(seed)
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, seed)
    table.length_S[:DUMMY] = torch.tensor([rng.randint(1, 30) for _ in range(DUMMY)])
    table.max_length_S[:DUMMY] = torch.tensor([rng.randint(int(n) + 1, LENGTH) for n in table.length_S[:DUMMY]])
    table.min_length_S[:DUMMY] = torch.tensor([rng.choice([0, 40]) for _ in range(DUMMY)])
    table.stop_ids_SE[::3, 1] = 2
    slots = [DUMMY, *rng.sample(range(DUMMY), DUMMY)]
    wanted = {}
    for slot in range(DUMMY):
        ids = table.token_ids_SL[slot, : table.length_S[slot]].tolist()
        while True:
            ids.append(oracle(ids))
            stopped = ids[-1] in table.stop_ids_SE[slot].tolist() and len(ids) > int(table.min_length_S[slot])
            if stopped or len(ids) >= int(table.max_length_S[slot]):
                break
        wanted[slot] = ids
    width = num_guesses + 1
    steps, told = 0, {slot: table.token_ids_SL[slot, : table.length_S[slot]].tolist() for slot in range(DUMMY)}
    while not table.done_S.all():
        inputs, rows = empty_trial(len(slots), len(slots) * width + 5)
        guess(
            torch.tensor(slots, dtype=torch.int32), rows, table, inputs, num_guesses=num_guesses, repeated=(2, 4),
            page_size=PAGE, num_pages=NUM_PAGES,
        )  # fmt: skip
        sampling = [row for row in range(len(rows.slots_R)) if rows.positions_R[row] >= 0]
        sampled = []
        for row in sampling:
            first = row // width * width
            known = table.token_ids_SL[rows.slots_R[row], : rows.positions_R[first]].tolist()
            sampled.append(oracle([*known, *inputs.input_ids_T[first + 1 : row + 1].tolist()]))
        rng.shuffle(together := list(zip(sampling, sampled, strict=True)))  # rows append in any order
        for row, token in together:
            one = torch.tensor([row])
            append_reference(
                torch.tensor([token], dtype=torch.int32), rows.slots_R[one].long(), rows.positions_R[one], table
            )  # fmt: skip
        ring = TokenRing(rubbish(2 * len(rows.slots_R)).view(2, -1), torch.ones(1, dtype=torch.int32))
        accept(
            ring, inputs.input_ids_T, rows.slots_R, rows.positions_R, table, num_slots=len(slots),
            num_guesses=num_guesses,
        )  # fmt: skip
        assert (ring.places_KR[0] == -77).all()
        for row, token in enumerate(ring.places_KR[1, : len(slots) * width].tolist()):
            tried = int(rows.positions_R[row]) >= 0
            assert (token >= 0 or token == WRONG) if tried else token == -1
            if token >= 0:
                assert row % width == 0 or ring.places_KR[1, row - 1] >= 0  # none behind a gap
                told[int(rows.slots_R[row])].append(token)
        for slot in range(DUMMY):
            assert table.token_ids_SL[slot, : table.length_S[slot]].tolist() == told[slot]
            assert bool(table.done_S[slot]) == (told[slot] == wanted[slot])
        steps += 1
    assert told == wanted
    assert steps < max(len(wanted[slot]) for slot in wanted)  # some guesses were right


def test_what_does_not_fit() -> None:
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, 0)
    inputs, rows = empty_trial(2, 8)
    slots = torch.zeros(2, dtype=torch.int32)
    cases = [({"num_guesses": 16}, "num_guesses: got 16"), ({"num_guesses": 4}, "got 8 tokens, wanted at least 5")]
    cases += [({"repeated": (3, 2)}, r"repeated: got \(3, 2\)"), ({"repeated": (1, 9)}, "two numbers from 1 to 8")]
    for changes, message in cases:
        options = {"num_guesses": 3, "repeated": (2, 4), "page_size": PAGE, "num_pages": NUM_PAGES, **changes}
        with pytest.raises(ValueError, match=message):
            guess(slots, rows, table, inputs, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted at least 5 for each of 2"):
        ring = TokenRing(rubbish(8).view(1, -1), torch.zeros(1, dtype=torch.int32))
        accept(ring, inputs.input_ids_T, rows.slots_R, rows.positions_R, table, num_slots=2, num_guesses=4)


def test_again_by_the_interpreted_kernels() -> None:
    rerun_interpreted(__file__)
