"""What a layer that guesses is given: which tokens come behind which, rows to go on from, and rows of two norms."""

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from interpreted import rerun_interpreted
from slot_tables import empty_step, random_table
from tercet.triton_kernels.guess_rows import GuessRows, guess_rows
from tercet.triton_kernels.join_normed import join_normed
from tercet.triton_kernels.next_ids import next_ids
from tercet.triton_kernels.prepare import prepare
from tercet.triton_kernels.spread_logits import spread_logits
from tercet.triton_kernels.trials import lay_out
from test_triton_kernels_guess import empty_trials

PAGE, PAGES_EACH, SLOTS, VOCAB = 16, 5, 9, 1000
DUMMY, LENGTH = SLOTS - 1, PAGE * PAGES_EACH
NUM_PAGES = SLOTS * PAGES_EACH + 1
SIZES = {"page_size": PAGE, "num_pages": NUM_PAGES}


@pytest.mark.parametrize("seed", range(3))
def test_the_ids_behind_each_token(seed: int) -> None:
    """Of decodes and of chunks, some empty, in the middle of a prompt and at its end; and behind them padding."""
    rng = random.Random(seed)
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, seed)
    slots = rng.sample(range(DUMMY), DUMMY)
    decodes, chunks = [*slots[:3], DUMMY], []
    for slot in slots[3:]:
        start = rng.randrange(LENGTH - 20)
        chunks.append((slot, start, rng.choice([0, 1, 7, 20])))
        table.length_S[slot] = max(start + chunks[-1][2], 1)
    table.length_S[slots[0]] = LENGTH  # nothing can come behind it
    rng.shuffle(chunks)
    num_tokens = sum(length for _, _, length in chunks)
    inputs, rows = empty_step(decodes, chunks, num_tokens + 9)
    prepare(rows, table, inputs, **SIZES)
    table.token_ids_SL[slots[1], int(table.length_S[slots[1]])] = 777  # what was sampled
    out_T = torch.full((len(inputs.input_ids_T),), -77, dtype=torch.int32)
    next_ids(inputs, rows.slots_R, table, out_T)
    wanted = [
        int(table.token_ids_SL[slot, length]) if (length := int(table.length_S[slot])) < LENGTH else 0
        for slot in decodes[:3]
    ]
    assert out_T[:3].tolist() == wanted
    assert wanted[1] == 777
    behind = [
        int(table.token_ids_SL[slot, position + 1])
        for slot, start, length in chunks
        for position in range(start, start + length)
    ]
    assert out_T[4 : 4 + num_tokens].tolist() == behind
    assert ((out_T >= 0) & (out_T < VOCAB)).all()


def empty_rows(num_slots: int, num_guesses: int) -> GuessRows:
    def rubbish(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, -77, dtype=dtype)

    each = num_guesses, num_slots
    wide = rubbish(*each, dtype=torch.int64)
    return GuessRows(rubbish(num_slots), rubbish(*each), rubbish(*each), wide, rubbish(*each), rubbish(1))


@pytest.mark.parametrize(("num_tries", "num_guesses"), [(1, 1), (1, 3), (3, 2), (5, 4), (16, 15)])
@pytest.mark.parametrize("seed", range(2))
def test_rows_to_go_on_from(num_tries: int, num_guesses: int, seed: int) -> None:
    """Of slots of which some tokens were kept: those that are done, full, or sampled nothing guess nothing."""
    rng = random.Random(seed)
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, seed)
    slots = [*rng.sample(range(DUMMY), DUMMY), DUMMY]
    sampled, kept = [], []
    for slot in slots[:-1]:
        first, count = rng.randint(1, LENGTH - num_tries), rng.randint(1, num_tries)
        table.length_S[slot] = first + count
        table.max_length_S[slot] = rng.choice([LENGTH, first + count, min(first + count + 1, LENGTH)])
        sampled.append(first)
        kept.append(count)
    table.done_S[slots[1]], sampled[2] = 1, -1
    sampled_R = torch.full((len(slots), num_tries), -1, dtype=torch.int32)
    sampled_R[:-1, 0] = torch.tensor(sampled)
    rows = empty_rows(len(slots), num_guesses)
    guess_rows(rows, torch.tensor(slots, dtype=torch.int32), sampled_R.flatten(), table, **SIZES)
    assert int(rows.num_tokens_1) == len(slots)
    for row, slot in enumerate(slots):
        length, most = int(table.length_S[slot]), int(table.max_length_S[slot])
        silent = row in (1, 2, len(slots) - 1)
        if not silent:
            assert int(rows.picks_B[row]) == row * num_tries + kept[row] - 1
        assert row * num_tries <= int(rows.picks_B[row]) < (row + 1) * num_tries
        for guess in range(num_guesses):
            cell = int(rows.kv_slots_KB[guess, row])
            if silent or length + guess >= most:
                assert int(rows.next_positions_KB[guess, row]) == -1
                assert int(rows.lengths_KB[guess, row]) == int(rows.positions_KB[guess, row]) == 0
                assert 0 <= cell < PAGE
                continue
            position = length - 2 + guess
            assert int(rows.next_positions_KB[guess, row]) == length + guess
            assert int(rows.positions_KB[guess, row]) == position + int(table.shift_S[slot])
            assert int(rows.lengths_KB[guess, row]) == position + 1
            if position // PAGE <= (sampled[row] + num_tries - 2) // PAGE:
                assert cell == int(table.page_table_SM[slot, position // PAGE]) * PAGE + position % PAGE
            else:  # that page may be another's
                assert 0 <= cell < PAGE
    cut = rows.cut(4)
    assert [tuple(getattr(cut, field.name).shape) for field in fields(cut)][1:5] == [(num_guesses, 4)] * 4
    inputs = cut.inputs(num_guesses - 1, torch.zeros(4, dtype=torch.int32), torch.tensor(slots[:4], dtype=torch.int32))
    assert inputs.decode_lengths_B.is_contiguous()
    assert len(inputs.kv_slots_XT[0]) == 4


@pytest.mark.parametrize("num_guesses", [1, 4])
def test_guesses_that_stand_in_the_table_are_laid_out(num_guesses: int) -> None:
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, num_guesses)
    slots = [3, 0, DUMMY, 5, 2]
    table.length_S[0], table.length_S[5], table.max_length_S[2] = LENGTH - 2, 1, table.length_S[2] + 2
    table.done_S[3] = 1
    trials, N = empty_trials(slots, num_guesses), num_guesses + 1
    lay_out(trials, table, num_guesses=num_guesses, **SIZES)
    assert int(trials.num_tokens_1) == len(slots) * N
    for row, slot in enumerate(slots):
        length, here = int(table.length_S[slot]), slice(row * N, row * N + N)
        room = min(int(table.max_length_S[slot]), LENGTH) - length
        count = 0 if slot in (3, DUMMY) else max(min(room, N), 1)
        rest, places = N - count, range(length - 1, length - 1 + count)
        assert trials.slots_T[here].tolist() == [slot] * N
        assert trials.input_ids_T[here].tolist() == [*table.token_ids_SL[slot, list(places)].tolist(), *[0] * rest]
        shift = int(table.shift_S[slot])
        assert trials.positions_T[here].tolist() == [*(place + shift for place in places), *[0] * rest]
        assert trials.lengths_T[here].tolist() == [*(place + 1 for place in places), *[0] * rest]
        assert trials.next_positions_T[here].tolist() == [*(place + 1 for place in places), *[-1] * rest]
        assert int(trials.ends_B[row]) == (length + count - 1 if count else 0)
        cells = [int(table.page_table_SM[slot, place // PAGE]) * PAGE + place % PAGE for place in places]
        assert trials.kv_slots_XT[0, here].tolist()[:count] == cells
        assert all(0 <= cell < PAGE for cell in trials.kv_slots_XT[0, here].tolist()[count:])


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 48), (5, 1000), (0, 64)])
@pytest.mark.parametrize("own", [True, False])
def test_two_norms_side_by_side(num_tokens: int, size: int, own: bool) -> None:
    embedded_TD, hidden_TD = torch.randn(num_tokens, size), torch.randn(num_tokens, size) * 5
    own_D, token_D, hidden_D = torch.rand(3, size).add(0.5).unbind()
    got_TE = join_normed(embedded_TD, hidden_TD, own_D if own else None, token_D, hidden_D, 1e-5)

    def normed(x_TD: Tensor, weight_D: Tensor) -> Tensor:
        wide_TD = x_TD.double()
        return wide_TD / (wide_TD.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight_D

    halves = [normed(embedded_TD, token_D), normed(normed(hidden_TD, own_D) if own else hidden_TD, hidden_D)]
    torch.testing.assert_close(got_TE.double(), torch.cat(halves, 1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("num_rows", "few", "whole"), [(3, 97, 1500), (1, 8, 8), (0, 4, 9)])
def test_logits_of_few_tokens_spread_over_all(num_rows: int, few: int, whole: int) -> None:
    logits_RU = torch.randn(num_rows, few + 5)[:, :few]  # rows with something between them
    known = torch.randperm(whole)[:few]
    places_V = torch.full((whole,), -1, dtype=torch.int32).index_put((known,), torch.arange(few, dtype=torch.int32))
    got_RV = spread_logits(logits_RU, places_V)
    wanted_RV = torch.full((num_rows, whole), float("-inf"))
    wanted_RV[:, known] = logits_RU
    assert torch.equal(got_RV, wanted_RV)
    with pytest.raises(ValueError, match=r"places: got torch\.int64"):
        spread_logits(logits_RU, places_V.long())


def test_what_does_not_fit() -> None:
    x_TD, norm_D = torch.randn(3, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"hidden: got shape \[2, 8\], wanted \[3, 8\]"):
        join_normed(x_TD, x_TD[:2], None, norm_D, norm_D, 1e-5)
    with pytest.raises(ValueError, match=r"weight: got shape \[4\], wanted \[8\]"):
        join_normed(x_TD, x_TD, norm_D[:4], norm_D, norm_D, 1e-5)
    table = random_table(SLOTS, PAGES_EACH, PAGE, VOCAB, 0)
    slots_B = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="sampled: got 3 rows, wanted as many of each of 2 slots"):
        guess_rows(empty_rows(2, 1), slots_B, torch.zeros(3, dtype=torch.int32), table, **SIZES)
    with pytest.raises(ValueError, match=r"picks_B: got shape \[3\], wanted \[2\]"):
        guess_rows(empty_rows(3, 1), slots_B, slots_B, table, **SIZES)
    inputs, rows = empty_step([0], [(1, 0, 4)], 4)
    with pytest.raises(ValueError, match=r"out: got shape \[4\], wanted \[5\]"):
        next_ids(inputs, rows.slots_R, table, torch.zeros(4, dtype=torch.int32))


def test_again_by_the_interpreted_kernels() -> None:
    rerun_interpreted(__file__)
