"""The inputs of a step in which each slot tries several tokens at once: its last one, and guesses of those to come.

What is guessed follows in the slot's own tokens where its last few have been before: the longest such run, and of equal
ones the latest. Where what follows there comes to the slot's end, it is taken to go on from the run again. As
`prepare.py` does for other steps, this says which tokens there are, where their keys and values go, and what each row
samples; which guesses were right is `accept.py`'s matter.

Shape suffixes: B slots, N tokens of each, T tokens of the step; S slots, L positions, M pages.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.prepare import StepInputs, StepRows, kv_slot
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tiles import next_power_of_2
from tercet.triton_kernels.tried_tokens import TriedTokens

MOST_GUESSES = 15
"""Of a slot."""
MOST_REPEATED = 8
"""Tokens of a run that are looked at."""
_BLOCK, _WARPS = 2048, 8
_SIZES = ["B", "S", "L", "M", "num_pages"]


@dataclass(frozen=True)
class Trials:
    """The tokens of a step with guesses, as many of each slot, those of a slot behind each other. All but the plan's
    own slots is written by `guess`. int32, but for `kv_slots_T`."""

    slots_B: Tensor
    ends_B: Tensor
    """Tokens of the slot with the guesses that it tries; 0 once it is done."""
    input_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    """int64: where keys and values go, as `StepInputs` has it."""
    lengths_T: Tensor
    """Tokens of the slot up to this one; 0 where nothing is tried."""
    slots_T: Tensor
    next_positions_T: Tensor
    """Position of the token that a row samples; -1 where it samples none."""
    num_tokens_1: Tensor

    @property
    def rows(self) -> StepRows:
        """Every token is one."""
        none = self.ends_B[:0]
        return StepRows(self.slots_T, none, none, self.next_positions_T)

    @property
    def tokens(self) -> TriedTokens:
        """Whose they are."""
        return TriedTokens(self.slots_T, self.lengths_T, len(self.slots_T) // max(len(self.slots_B), 1))

    def inputs(self, *, apart: bool) -> StepInputs:
        """What layers read. `apart`: each token is a decode row of its own; else those of a slot are one together."""
        none = self.ends_B[:0]
        return StepInputs(
            input_ids_T=self.input_ids_T,
            positions_T=self.positions_T,
            kv_slots_T=self.kv_slots_T,
            decode_slots_B=self.slots_T if apart else self.slots_B,
            decode_lengths_B=self.lengths_T if apart else self.ends_B,
            chunk_slots_C=none,
            chunk_starts_C=none,
            query_starts_C1=self.num_tokens_1,  # of no chunk
            sample_rows_R=none,  # each token is a row
            num_tokens_1=self.num_tokens_1,
            tries=1 if apart else self.tokens.each,
            lengths_T=None if apart else self.lengths_T,
            tried=self.tokens,
        )


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


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _guess_kernel(
    slots_ptr, page_table_ptr, token_ids_ptr, length_ptr, max_length_ptr, done_ptr, ends_ptr, input_ids_ptr,
    positions_ptr, kv_slots_ptr, lengths_ptr, row_slots_ptr, next_positions_ptr, num_tokens_ptr,
    B, S, L, M, num_pages,
    N: tl.constexpr, BLOCK_N: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,): one program owns a slot's tokens."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    alive = (slot >= 0) & (slot < S)
    length = tl.load(length_ptr + slot, mask=alive, other=0)
    alive &= (tl.load(done_ptr + slot, mask=alive, other=1) == 0) & (length > 0) & (length <= L)
    length = tl.where(alive, length, 0)
    ids_ptr = token_ids_ptr + slot.to(tl.int64) * L
    behind = _find_run(ids_ptr, length, LONGEST, SHORTEST, BLOCK)
    # A guess is tried only if the token behind it may be sampled.
    room = tl.minimum(tl.load(max_length_ptr + slot, mask=alive, other=0), L) - length
    count = tl.where(behind >= 0, tl.maximum(tl.minimum(room, N), 1), 1)
    count = tl.where(alive, count, 0)
    place = tl.arange(0, BLOCK_N)
    own = place < N
    tried = place < count
    period = tl.maximum(length - behind, 1)
    known = tl.where(place == 0, length - 1, behind + (place - 1) % period)
    token = row * N + place
    position = length - 1 + place
    ids = tl.load(ids_ptr + known, mask=tried, other=0)
    tl.store(input_ids_ptr + token, ids, mask=own)
    tl.store(ids_ptr + position, ids, mask=tried & (place > 0))
    tl.store(positions_ptr + token, tl.where(tried, position, 0), mask=own)
    cell = kv_slot(page_table_ptr, slot, position, tried, PAGE, M, num_pages, token)
    tl.store(kv_slots_ptr + token, cell, mask=own)
    tl.store(lengths_ptr + token, tl.where(tried, position + 1, 0), mask=own)
    tl.store(row_slots_ptr + token, tl.zeros([BLOCK_N], tl.int32) + slot, mask=own)
    tl.store(next_positions_ptr + token, tl.where(tried & (position + 1 < L), position + 1, -1), mask=own)
    tl.store(ends_ptr + row, tl.where(alive, length + count - 1, 0))
    if row == 0:
        tl.store(num_tokens_ptr, B * N)


def guess(
    trials: Trials, table: SlotTable, *, num_guesses: int, repeated: tuple[int, int], page_size: int, num_pages: int
) -> None:
    """Fill `trials` for slots that try up to `num_guesses` tokens behind their last one, from the table alone.

    `repeated`: how many tokens at least, and at most, are looked for among earlier ones. Guesses are also written into
    the table, behind the slot's length, for whoever counts what is ahead of a position. Integers only; graph-safe.
    """
    B, N = len(trials.slots_B), num_guesses + 1
    _check(trials, table, num_guesses, repeated)
    if not use_kernels(trials.slots_B):
        guess_reference(
            trials, table, num_guesses=num_guesses, repeated=repeated, page_size=page_size, num_pages=num_pages
        )  # fmt: skip
        return
    S, L = table.token_ids_SL.shape
    shortest, longest = repeated
    _guess_kernel[(B,)](
        trials.slots_B, table.page_table_SM, table.token_ids_SL, table.length_S, table.max_length_S, table.done_S,
        trials.ends_B, trials.input_ids_T, trials.positions_T, trials.kv_slots_T, trials.lengths_T, trials.slots_T,
        trials.next_positions_T, trials.num_tokens_1, B, S, L, table.page_table_SM.shape[1], num_pages,
        N=N, BLOCK_N=next_power_of_2(N), LONGEST=longest, SHORTEST=shortest, BLOCK=_BLOCK, PAGE=page_size,
        num_warps=_WARPS, **overlap_options(trials.slots_B),
    )  # fmt: skip


def guess_reference(
    trials: Trials, table: SlotTable, *, num_guesses: int, repeated: tuple[int, int], page_size: int, num_pages: int
) -> None:
    """The same in plain Python and PyTorch."""
    N, L = num_guesses + 1, table.token_ids_SL.shape[1]
    for tensor in (trials.input_ids_T, trials.positions_T, trials.kv_slots_T, trials.lengths_T, trials.ends_B):
        tensor.zero_()
    trials.next_positions_T.fill_(-1)
    trials.num_tokens_1[0] = len(trials.slots_T)
    for row, slot in enumerate(trials.slots_B.tolist()):
        first = row * N
        trials.slots_T[first : first + N] = slot
        length = int(table.length_S[slot])
        if length == 0 or table.done_S[slot]:
            continue
        room = min(int(table.max_length_S[slot]), L) - length
        known_ids = table.token_ids_SL[slot, :length]
        ids = [int(known_ids[-1]), *_guesses(known_ids, min(room - 1, num_guesses), repeated)]
        last = first + len(ids)
        positions_N = torch.arange(length - 1, length - 1 + len(ids), dtype=torch.int32)
        pages_N = table.page_table_SM[slot, positions_N // page_size].long()
        pages_N = torch.where(pages_N < num_pages, pages_N, 0)
        trials.input_ids_T[first:last] = torch.tensor(ids, dtype=torch.int32)
        table.token_ids_SL[slot, length : length + len(ids) - 1] = trials.input_ids_T[first + 1 : last]
        trials.positions_T[first:last] = positions_N
        trials.kv_slots_T[first:last] = torch.where(pages_N > 0, pages_N * page_size + positions_N % page_size, 0)
        trials.lengths_T[first:last] = positions_N + 1
        trials.next_positions_T[first:last] = torch.where(positions_N + 1 < L, positions_N + 1, -1)
        trials.ends_B[row] = positions_N[-1] + 1


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


def _check(trials: Trials, table: SlotTable, num_guesses: int, repeated: tuple[int, int]) -> None:
    shortest, longest = repeated
    if not 1 <= num_guesses <= MOST_GUESSES:
        raise ValueError(f"num_guesses: got {num_guesses}, wanted 1 to {MOST_GUESSES}")
    if not 1 <= shortest <= longest <= MOST_REPEATED:
        raise ValueError(f"repeated: got {repeated}, wanted two numbers from 1 to {MOST_REPEATED} in order")
    B = len(trials.slots_B)
    sizes = {"slots_B": B, "ends_B": B, "num_tokens_1": 1}
    for field in fields(trials):
        name, tensor = field.name, getattr(trials, field.name)
        check_shape(name, tensor, sizes.get(name, B * (num_guesses + 1)))
        check_dtype(name, tensor, torch.int64 if name == "kv_slots_T" else torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, table.length_S)
