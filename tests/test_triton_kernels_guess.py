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
from tercet.triton_kernels.sample import TokenRing, append_reference
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.trials import Trials

PAGE, PAGES_EACH, SLOTS, VOCAB = 16, 5, 9, 3
DUMMY, LENGTH = SLOTS - 1, PAGE * PAGES_EACH
NUM_PAGES = SLOTS * PAGES_EACH + 1


def rubbish(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full((size,), -77, dtype=dtype)


def empty_trials(slots: list[int], num_guesses: int, tables: int = 1) -> Trials:
    """These slots and room for their tokens, filled with nonsense."""
    num_tokens = len(slots) * (num_guesses + 1)
    return Trials(
        slots_B=torch.tensor(slots, dtype=torch.int32),
        ends_B=rubbish(len(slots)),
        input_ids_T=rubbish(num_tokens),
        positions_T=rubbish(num_tokens),
        kv_slots_XT=rubbish(tables * num_tokens, torch.int64).view(tables, -1),
        lengths_T=rubbish(num_tokens),
        slots_T=rubbish(num_tokens),
        next_positions_T=rubbish(num_tokens),
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


@pytest.mark.parametrize(
    ("num_slots", "num_guesses", "repeated"), [(1, 1, (1, 1)), (3, 3, (2, 4)), (8, 4, (1, 8)), (5, 15, (3, 8))]
)
@pytest.mark.parametrize("seed", range(2))
def test_every_token(num_slots: int, num_guesses: int, repeated: tuple[int, int], seed: int) -> None:
    rng = random.Random(seed)
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, seed, tables=1 + 2 * seed)
    slots = [*rng.sample(range(SLOTS - 1), num_slots), DUMMY]
    table.max_length_S[:DUMMY] = torch.tensor([rng.randint(int(n) + 1, LENGTH) for n in table.length_S[:DUMMY]])
    table.token_ids_SL[slots[0], : table.length_S[slots[0]]] = 1  # one token again and again
    if num_slots > 2:
        table.done_S[slots[1]] = 1
    width = num_guesses + 1
    trials = empty_trials(slots, num_guesses, tables=1 + 2 * seed)
    before = replace(table, **{name: getattr(table, name).clone() for name in SlotTable.__dataclass_fields__})
    guess(trials, table, num_guesses=num_guesses, repeated=repeated, page_size=PAGE, num_pages=NUM_PAGES)
    for row, slot in enumerate(slots):  # guesses are where they would be
        mine, length = slice(row * width + 1, row * width + width), int(table.length_S[slot])
        tried = trials.input_ids_T[mine][trials.lengths_T[mine] > 0]
        before.token_ids_SL[slot, length : length + len(tried)] = tried
    for name in SlotTable.__dataclass_fields__:
        assert torch.equal(getattr(table, name), getattr(before, name)), name
    assert int(trials.num_tokens_1) == len(trials.slots_T)
    for row, slot in enumerate(slots):
        length = int(table.length_S[slot])
        alive = not table.done_S[slot]
        ids = table.token_ids_SL[slot, :length].tolist()
        room = int(table.max_length_S[slot]) - length
        tried = [*ids[-1:], *plain_guesses(ids, min(num_guesses, room - 1), repeated)] if alive else []
        assert int(trials.ends_B[row]) == (length + len(tried) - 1 if alive else 0)
        for place, token in enumerate(range(row * width, row * width + width)):
            assert int(trials.slots_T[token]) == slot
            cells = trials.kv_slots_XT[:, token].tolist()
            if place >= len(tried):
                assert int(trials.next_positions_T[token]) == -1
                assert int(trials.lengths_T[token]) == int(trials.input_ids_T[token]) == 0
                assert all(0 <= cell < PAGE for cell in cells)  # of the page that is nobody's
                continue
            position = length - 1 + place
            assert int(trials.input_ids_T[token]) == tried[place]
            assert int(trials.positions_T[token]) == position + int(table.shift_S[slot])
            assert int(trials.lengths_T[token]) == position + 1
            assert int(trials.next_positions_T[token]) == (position + 1 if position + 1 < LENGTH else -1)
            pages = [int(pages_SM[slot, position // PAGE]) for pages_SM in table.page_tables]
            assert cells == [page * PAGE + position % PAGE for page in pages]


def test_a_run_far_back() -> None:
    """Of two, the longer one, ahead of blocks in which there is none."""
    table = random_table(2, 400, PAGE, 5000, 1)
    length = 400 * PAGE - 20
    table.length_S[0] = length
    ids = table.token_ids_SL[0]
    ids[:length] = torch.arange(length, dtype=torch.int32) + 10
    ids[length - 3 : length] = torch.tensor([1, 2, 3], dtype=torch.int32)
    ids[40:46] = torch.tensor([1, 2, 3, 7, 8, 9], dtype=torch.int32)
    ids[5000:5003] = torch.tensor([2, 3, 6], dtype=torch.int32)
    trials = empty_trials([0], 3)
    guess(trials, table, num_guesses=3, repeated=(2, 4), page_size=PAGE, num_pages=801)
    assert trials.input_ids_T.tolist() == [3, 7, 8, 9]


class _Oracle:
    """What would be sampled behind some tokens: mostly what has followed before, so that guesses are often right."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, ids: list[int]) -> int:
        rng = random.Random(f"{self._seed} {ids[-3:]}")
        return rng.randrange(VOCAB)


@pytest.mark.parametrize(("num_guesses", "seed"), [(1, 0), (3, 1), (3, 2), (4, 3)])
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
        trials = empty_trials(slots, num_guesses)
        guess(trials, table, num_guesses=num_guesses, repeated=(2, 4), page_size=PAGE, num_pages=NUM_PAGES)
        sampling = [row for row in range(len(trials.slots_T)) if trials.next_positions_T[row] >= 0]
        sampled = []
        for row in sampling:
            first = row // width * width
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
        for row, slot in enumerate(slots):
            here = slice(row * width, row * width + width)
            tried = int((trials.next_positions_T[here] >= 0).sum())
            kept = [token for token in tokens[here] if token >= 0]
            assert tokens[here] == kept + [WRONG] * (tried - len(kept)) + [-1] * (width - tried)
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
    trials = empty_trials([0, 1], 3)
    cases = [({"num_guesses": 16}, "num_guesses: got 16"), ({"num_guesses": 4}, r"input_ids_T: got shape \[8\]")]
    cases += [({"repeated": (3, 2)}, r"repeated: got \(3, 2\)"), ({"repeated": (1, 9)}, "two numbers from 1 to 8")]
    for changes, message in cases:
        options = {"num_guesses": 3, "repeated": (2, 4), "page_size": PAGE, "num_pages": NUM_PAGES, **changes}
        with pytest.raises(ValueError, match=message):
            guess(trials, table, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted 5 for each of 2"):
        accept(TokenRing(rubbish(8).view(1, -1), torch.zeros(1, dtype=torch.int32)), trials, table, num_guesses=4)
    with pytest.raises(ValueError, match=r"kv_slots: got torch\.int32"):
        guess(
            replace(trials, kv_slots_XT=rubbish(8)[None]), table, num_guesses=3, repeated=(2, 4), page_size=PAGE,
            num_pages=NUM_PAGES,
        )  # fmt: skip


def test_again_by_the_interpreted_kernels() -> None:
    rerun_interpreted(__file__)
