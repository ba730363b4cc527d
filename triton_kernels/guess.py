"""Guesses of a slot's next tokens that are looked up among its own: what followed where its last few have been before.

Of all such runs the longest counts, and of equal ones the latest. Where what follows there comes to the slot's end, it
is taken to go on from the run again. What is found is tried at once (`trials.py`).

Shape suffixes: as there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tiles import next_power_of_2
from tercet.triton_kernels.trials import (
    SIZES,
    Trials,
    begin_trials,
    check_trials,
    lay_out_counted,
    num_tried,
    room_for_trials,
    store_trials,
    trial_sizes,
    trial_tensors,
)

MOST_REPEATED = 8
"""Tokens of a run that are looked at."""
_BLOCK, _WARPS = 2048, 8


@triton.jit
def _find_run(ids_ptr, length, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr):
    """Where the last tokens have been before: the place behind that run, or -1."""
    best = tl.full([BLOCK], -1, tl.int32)
    # Runs of a token more count more than any place.
    unit = length + 1
    for start in range(0, length, BLOCK):
        end = 1 + start + tl.arange(0, BLOCK)
        same = end < length
        count = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(1, LONGEST + 1):
            wanted = tl.load(ids_ptr + length - back, mask=back <= length, other=-1)
            same &= end >= back
            same &= tl.load(ids_ptr + end - back, mask=same, other=-1) == wanted
            count += same.to(tl.int32)
        best = tl.maximum(best, tl.where(count >= SHORTEST, count * unit + end, -1))
    found = tl.max(best)
    return tl.where(found >= 0, found % unit, -1)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def _guess_kernel(
    slots_ptr, page_table_ptr, token_ids_ptr, length_ptr, max_length_ptr, done_ptr, shift_ptr, ends_ptr, input_ids_ptr,
    positions_ptr, kv_slots_ptr, lengths_ptr, row_slots_ptr, next_positions_ptr, num_tokens_ptr,
    B, S, L, M, stride, num_pages,
    N: tl.constexpr, BLOCK_N: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr,
    X: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,): one program owns a slot's tokens."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot, length, alive = begin_trials(slots_ptr, length_ptr, done_ptr, row, S, L)
    ids_ptr = token_ids_ptr + slot.to(tl.int64) * L
    behind = _find_run(ids_ptr, length, LONGEST, SHORTEST, BLOCK)
    # A guess is tried only if the token behind it may be sampled.
    room = room_for_trials(max_length_ptr, slot, length, alive, L)
    count = tl.where(behind >= 0, tl.maximum(tl.minimum(room, N), 1), 1)
    count = tl.where(alive, count, 0)
    place = tl.arange(0, BLOCK_N)
    tried = place < count
    period = tl.maximum(length - behind, 1)
    known = tl.where(place == 0, length - 1, behind + (place - 1) % period)
    ids = tl.load(ids_ptr + known, mask=tried, other=0)
    tl.store(ids_ptr + length - 1 + place, ids, mask=tried & (place > 0))
    store_trials(
        ends_ptr, input_ids_ptr, positions_ptr, kv_slots_ptr, lengths_ptr, row_slots_ptr, next_positions_ptr,
        num_tokens_ptr, page_table_ptr, shift_ptr, row, slot, length, count, place, ids, B, S, L, M, stride, num_pages,
        N, X, PAGE,
    )  # fmt: skip


def guess(
    trials: Trials, table: SlotTable, *, num_guesses: int, repeated: tuple[int, int], page_size: int, num_pages: int
) -> None:
    """Fill `trials` for slots that try up to `num_guesses` tokens behind their last one, from the table alone.

    `repeated`: how many tokens at least, and at most, are looked for among earlier ones. Guesses are also written into
    the table, behind the slot's length, for whoever counts what is ahead of a position. Integers only; graph-safe.
    """
    B, N = len(trials.slots_B), num_guesses + 1
    check_trials(trials, table, num_guesses)
    shortest, longest = repeated
    if not 1 <= shortest <= longest <= MOST_REPEATED:
        raise ValueError(f"repeated: got {repeated}, wanted two numbers from 1 to {MOST_REPEATED} in order")
    if not use_kernels(trials.slots_B):
        guess_reference(
            trials, table, num_guesses=num_guesses, repeated=repeated, page_size=page_size, num_pages=num_pages
        )  # fmt: skip
        return
    _guess_kernel[(B,)](
        *trial_tensors(trials, table), *trial_sizes(trials, table), num_pages, N=N, BLOCK_N=next_power_of_2(N),
        LONGEST=longest, SHORTEST=shortest, BLOCK=_BLOCK, X=table.num_page_tables, PAGE=page_size, num_warps=_WARPS,
        **overlap_options(trials.slots_B),
    )  # fmt: skip


def guess_reference(
    trials: Trials, table: SlotTable, *, num_guesses: int, repeated: tuple[int, int], page_size: int, num_pages: int
) -> None:
    """The same in plain Python and PyTorch."""
    counts = []
    for slot in trials.slots_B.tolist():
        if count := num_tried(table, slot, num_guesses):
            length = int(table.length_S[slot])
            guesses = _guesses(table.token_ids_SL[slot, :length], count - 1, repeated)
            table.token_ids_SL[slot, length : length + len(guesses)] = torch.tensor(guesses, dtype=torch.int32)
            count = 1 + len(guesses)
        counts.append(count)
    lay_out_counted(trials, table, counts, page_size=page_size, num_pages=num_pages)


def _guesses(known_ids: Tensor, wanted: int, repeated: tuple[int, int]) -> list[int]:
    length = len(known_ids)
    shortest, longest = repeated
    for count in range(min(longest, length - 1), shortest - 1, -1):
        runs = known_ids[: length - 1].unfold(0, count, 1)  # each ends ahead of the last token
        places = (runs == known_ids[length - count :]).all(1).nonzero()
        if len(places):
            behind = int(places[-1]) + count
            return [int(known_ids[behind + index % (length - behind)]) for index in range(wanted)]
    return []
