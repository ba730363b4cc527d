"""Guesses and which of them hold: against plain loops, and against one token at a time."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from slot_tables import random_table
from tercet.triton_kernels.accept import WRONG, accept
from tercet.triton_kernels.guess import Trials, guess
from tercet.triton_kernels.sample import TokenRing, append_reference
from tercet.triton_kernels.slot_table import SlotTable

PAGE, PAGES_EACH, SLOTS, VOCAB = 16, 5, 9, 3
DUMMY, LENGTH = SLOTS - 1, PAGE * PAGES_EACH
NUM_PAGES = SLOTS * PAGES_EACH + 1


def rubbish(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full((size,), -77, dtype=dtype)


def empty_trials(slots: list[int], num_tokens: int) -> Trials:
    """These slots and room for so many tokens, filled with nonsense."""
    return Trials(
        slots_B=torch.tensor(slots, dtype=torch.int32),
        input_ids_T=rubbish(num_tokens),
        positions_T=rubbish(num_tokens),
        kv_slots_T=rubbish(num_tokens, torch.int64),
        lengths_T=rubbish(num_tokens),
        slots_T=rubbish(num_tokens),
        next_positions_T=rubbish(num_tokens),
        starts_B=rubbish(len(slots)),
        query_starts_B1=rubbish(len(slots) + 1),
        num_tokens_1=rubbish(1),
    )


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
    trials = empty_trials(slots, num_slots * width + padding)
    before = replace(table, **{name: getattr(table, name).clone() for name in SlotTable.__dataclass_fields__})
    guess(trials, table, num_guesses=num_guesses, repeated=repeated, page_size=PAGE, num_pages=NUM_PAGES)
    for name in SlotTable.__dataclass_fields__:
        assert torch.equal(getattr(table, name), getattr(before, name)), name
    first = 0
    for row, slot in enumerate(slots):
        length = int(table.length_S[slot])
        alive = not table.done_S[slot]
        ids = table.token_ids_SL[slot, :length].tolist()
        count = min(width, int(table.max_length_S[slot]) - length) if alive else 0
        tried = [*ids[-1:], *plain_guesses(ids, count - 1, repeated)] if alive else []
        assert int(trials.starts_B[row]) == (length - 1 if alive else 0)
        assert int(trials.query_starts_B1[row]) == first
        for place, token in enumerate(range(first, first + count)):
            position = length - 1 + place
            assert int(trials.slots_T[token]) == slot
            assert int(trials.positions_T[token]) == position
            page = int(table.page_table_SM[slot, position // PAGE])
            assert int(trials.kv_slots_T[token]) == page * PAGE + position % PAGE
            assert int(trials.input_ids_T[token]) == (tried[place] if place < len(tried) else ids[-1])
            assert int(trials.lengths_T[token]) == (position + 1 if place < len(tried) else 0)
            samples = place < len(tried) and position + 1 < LENGTH
            assert int(trials.next_positions_T[token]) == (position + 1 if samples else -1)
        first += count
    assert int(trials.num_tokens_1) == int(trials.query_starts_B1[-1]) == first
    for token in range(first, num_slots * width + padding):
        assert int(trials.slots_T[token]) == DUMMY
        assert int(trials.next_positions_T[token]) == -1
        assert int(trials.input_ids_T[token]) == int(trials.positions_T[token]) == int(trials.lengths_T[token]) == 0
        assert 0 <= int(trials.kv_slots_T[token]) < PAGE  # of the page that is nobody's


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
        trials = empty_trials(slots, len(slots) * width + 5)
        guess(trials, table, num_guesses=num_guesses, repeated=(2, 4), page_size=PAGE, num_pages=NUM_PAGES)
        sampling = [row for row in range(len(trials.slots_T)) if trials.next_positions_T[row] >= 0]
        sampled = []
        for row in sampling:
            first = int(trials.query_starts_B1[trials.query_starts_B1 <= row].max())
            known = table.token_ids_SL[trials.slots_T[row], : trials.next_positions_T[first]].tolist()
            sampled.append(oracle([*known, *trials.input_ids_T[first + 1 : row + 1].tolist()]))
        rng.shuffle(together := list(zip(sampling, sampled, strict=True)))  # rows append in any order
        for row, token in together:
            one = slice(row, row + 1)
            sampled_1 = torch.tensor([token], dtype=torch.int32)
            append_reference(sampled_1, trials.slots_T[one].long(), trials.next_positions_T[one], table)
        ring = TokenRing(rubbish(2 * len(trials.slots_T)).view(2, -1), torch.ones(1, dtype=torch.int32))
        accept(ring, trials, table, num_guesses=num_guesses)
        assert (ring.places_KR[0] == -77).all()
        tokens = ring.places_KR[1, : len(slots) * width].tolist()
        for own, slot in enumerate(slots):
            first, end = trials.query_starts_B1[own : own + 2].tolist()
            tried = int((trials.next_positions_T[first:end] >= 0).sum())
            mine = tokens[own * width : (own + 1) * width]
            kept = [token for token in mine if token >= 0]
            assert mine == kept + [WRONG] * (tried - len(kept)) + [-1] * (width - tried)
            if slot != DUMMY:
                told[slot] += kept
        for slot in range(DUMMY):
            assert table.token_ids_SL[slot, : table.length_S[slot]].tolist() == told[slot]
            assert bool(table.done_S[slot]) == (told[slot] == wanted[slot])
        steps += 1
    assert told == wanted
    assert steps < max(len(wanted[slot]) for slot in wanted)  # some guesses were right


def test_what_does_not_fit() -> None:
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, 0)
    trials = empty_trials([0, 1], 8)
    cases = [({"num_guesses": 16}, "num_guesses: got 16"), ({"num_guesses": 4}, "got 8 tokens, wanted at least 5")]
    cases += [({"repeated": (3, 2)}, r"repeated: got \(3, 2\)"), ({"repeated": (1, 9)}, "two numbers from 1 to 8")]
    for changes, message in cases:
        options = {"num_guesses": 3, "repeated": (2, 4), "page_size": PAGE, "num_pages": NUM_PAGES, **changes}
        with pytest.raises(ValueError, match=message):
            guess(trials, table, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted at least 5 for each of 2"):
        accept(TokenRing(rubbish(8).view(1, -1), torch.zeros(1, dtype=torch.int32)), trials, table, num_guesses=4)
    with pytest.raises(ValueError, match=r"kv_slots_T: got torch\.int32"):
        guess(
            replace(trials, kv_slots_T=rubbish(8)), table, num_guesses=3, repeated=(2, 4), page_size=PAGE,
            num_pages=NUM_PAGES,
        )  # fmt: skip


def test_again_by_the_interpreted_kernels() -> None:
    rerun_interpreted(__file__)
