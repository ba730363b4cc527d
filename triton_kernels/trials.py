"""The tokens of a step in which each slot tries several at once: its last one, and guesses of those to come.

Guesses stand in the slot table behind the slot's length, wherever they are from (`guess.py` looks them up, a layer of
the model may make them). As `prepare.py` does for other steps, this says which tokens there are, where their keys and
values go, and what each row samples; which guesses were right is `accept.py`'s matter.

Shape suffixes: B slots, N tokens of each, T tokens of the step; S slots, L positions, M pages.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.kv_slots import check_kv_slots, store_kv_slots
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.prepare import StepInputs, StepRows
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tiles import next_power_of_2
from tercet.triton_kernels.tried_tokens import TriedTokens

MOST_GUESSES = 15
"""Of a slot."""
SIZES = ["B", "S", "L", "M", "stride", "num_pages"]
"""What kernels of trials are not compiled anew for."""


@dataclass(frozen=True)
class Trials:
    """The tokens of a step with guesses, as many of each slot, those of a slot behind each other. All but the plan's
    own slots is written here. int32, but for `kv_slots_XT`."""

    slots_B: Tensor
    ends_B: Tensor
    """Tokens of the slot with the guesses that it tries; 0 once it is done."""
    input_ids_T: Tensor
    positions_T: Tensor
    """As `StepInputs` has it."""
    kv_slots_XT: Tensor
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
            kv_slots_XT=self.kv_slots_XT,
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
def begin_trials(slots_ptr, length_ptr, done_ptr, row, S, L):
    """A row's slot, its length, or 0 where nothing is tried, and whether something is."""
    slot = tl.load(slots_ptr + row)
    alive = (slot >= 0) & (slot < S)
    length = tl.load(length_ptr + slot, mask=alive, other=0)
    alive &= (tl.load(done_ptr + slot, mask=alive, other=1) == 0) & (length > 0) & (length <= L)
    return slot, tl.where(alive, length, 0), alive


@triton.jit
def room_for_trials(max_length_ptr, slot, length, alive, L):
    """Tokens of a slot that may be tried: behind each one may be sampled."""
    return tl.minimum(tl.load(max_length_ptr + slot, mask=alive, other=0), L) - length


@triton.jit
def store_trials(
    ends_ptr, input_ids_ptr, positions_ptr, kv_slots_ptr, lengths_ptr, row_slots_ptr, next_positions_ptr,
    num_tokens_ptr, page_table_ptr, shift_ptr, row, slot, length, count, place, ids, B, S, L, M, stride, num_pages,
    N: tl.constexpr, X: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Of one slot, which tries `count` tokens with these ids; 0: it is done."""
    own = place < N
    tried = place < count
    token = row * N + place
    position = length - 1 + place
    tl.store(input_ids_ptr + token, ids, mask=own)
    shift = tl.load(shift_ptr + slot, mask=count > 0, other=0)
    tl.store(positions_ptr + token, tl.where(tried, position + shift, 0), mask=own)
    store_kv_slots(
        kv_slots_ptr, page_table_ptr, token, slot, position, tried, own, token, S, M, stride, num_pages, X, PAGE
    )  # fmt: skip
    tl.store(lengths_ptr + token, tl.where(tried, position + 1, 0), mask=own)
    tl.store(row_slots_ptr + token, tl.zeros_like(place) + slot, mask=own)
    tl.store(next_positions_ptr + token, tl.where(tried & (position + 1 < L), position + 1, -1), mask=own)
    tl.store(ends_ptr + row, tl.where(count > 0, length + count - 1, 0))
    if row == 0:
        tl.store(num_tokens_ptr, B * N)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SIZES)
def _lay_out_kernel(
    slots_ptr, page_table_ptr, token_ids_ptr, length_ptr, max_length_ptr, done_ptr, shift_ptr, ends_ptr, input_ids_ptr,
    positions_ptr, kv_slots_ptr, lengths_ptr, row_slots_ptr, next_positions_ptr, num_tokens_ptr,
    B, S, L, M, stride, num_pages, N: tl.constexpr, BLOCK_N: tl.constexpr, X: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,): one program owns a slot's tokens."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot, length, alive = begin_trials(slots_ptr, length_ptr, done_ptr, row, S, L)
    room = room_for_trials(max_length_ptr, slot, length, alive, L)
    count = tl.where(alive, tl.maximum(tl.minimum(room, N), 1), 0)
    place = tl.arange(0, BLOCK_N)
    ids_ptr = token_ids_ptr + slot.to(tl.int64) * L + length - 1
    ids = tl.load(ids_ptr + place, mask=place < count, other=0)
    store_trials(
        ends_ptr, input_ids_ptr, positions_ptr, kv_slots_ptr, lengths_ptr, row_slots_ptr, next_positions_ptr,
        num_tokens_ptr, page_table_ptr, shift_ptr, row, slot, length, count, place, ids, B, S, L, M, stride, num_pages,
        N, X, PAGE,
    )  # fmt: skip


def lay_out(trials: Trials, table: SlotTable, *, num_guesses: int, page_size: int, num_pages: int) -> None:
    """Fill `trials` for slots that try the `num_guesses` tokens that stand behind their length in the table, or as many
    of them as may be sampled. Integers only; mutates nothing else; graph-safe."""
    B, N = len(trials.slots_B), num_guesses + 1
    check_trials(trials, table, num_guesses)
    if not use_kernels(trials.slots_B):
        lay_out_reference(trials, table, num_guesses=num_guesses, page_size=page_size, num_pages=num_pages)
    elif B:
        _lay_out_kernel[(B,)](
            *trial_tensors(trials, table), *trial_sizes(trials, table), num_pages, N=N, BLOCK_N=next_power_of_2(N),
            X=table.num_page_tables, PAGE=page_size, num_warps=1, **overlap_options(trials.slots_B),
        )  # fmt: skip


def trial_tensors(trials: Trials, table: SlotTable) -> tuple[Tensor, ...]:
    """What kernels of trials are given of both, in their order."""
    return (
        trials.slots_B, table.page_table_SM, table.token_ids_SL, table.length_S, table.max_length_S, table.done_S,
        table.shift_S, trials.ends_B, trials.input_ids_T, trials.positions_T, trials.kv_slots_XT, trials.lengths_T,
        trials.slots_T, trials.next_positions_T, trials.num_tokens_1,
    )  # fmt: skip


def trial_sizes(trials: Trials, table: SlotTable) -> tuple[int, ...]:
    """And which sizes."""
    B, (S, L) = len(trials.slots_B), table.token_ids_SL.shape
    return B, S, L, table.page_table_SM.shape[1], trials.kv_slots_XT.stride(0)


def lay_out_reference(trials: Trials, table: SlotTable, *, num_guesses: int, page_size: int, num_pages: int) -> None:
    """The same in plain Python and PyTorch."""
    counts = [num_tried(table, slot, num_guesses) for slot in trials.slots_B.tolist()]
    lay_out_counted(trials, table, counts, page_size=page_size, num_pages=num_pages)


def lay_out_counted(trials: Trials, table: SlotTable, counts: list[int], *, page_size: int, num_pages: int) -> None:
    """For references: each slot tries so many tokens, the last one of its length and those behind it."""
    N, L = len(trials.slots_T) // max(len(counts), 1), table.token_ids_SL.shape[1]
    for tensor in (trials.input_ids_T, trials.positions_T, trials.kv_slots_XT, trials.lengths_T, trials.ends_B):
        tensor.zero_()
    trials.next_positions_T.fill_(-1)
    trials.num_tokens_1[0] = len(trials.slots_T)
    for row, (slot, count) in enumerate(zip(trials.slots_B.tolist(), counts, strict=True)):
        first, last, length = row * N, row * N + count, int(table.length_S[slot])
        trials.slots_T[first : first + N] = slot
        if not count:
            continue
        positions_N = torch.arange(length - 1, length - 1 + count, dtype=torch.int32)
        trials.input_ids_T[first:last] = table.token_ids_SL[slot, length - 1 : length - 1 + count]
        trials.positions_T[first:last] = positions_N + table.shift_S[slot]
        for page_table_SM, kv_slots_T in zip(table.page_tables, trials.kv_slots_XT, strict=True):
            pages_N = page_table_SM[slot, positions_N // page_size].long()
            pages_N = torch.where(pages_N < num_pages, pages_N, 0)
            kv_slots_T[first:last] = torch.where(pages_N > 0, pages_N * page_size + positions_N % page_size, 0)
        trials.lengths_T[first:last] = positions_N + 1
        trials.next_positions_T[first:last] = torch.where(positions_N + 1 < L, positions_N + 1, -1)
        trials.ends_B[row] = positions_N[-1] + 1


def num_tried(table: SlotTable, slot: int, num_guesses: int) -> int:
    """Tokens that a slot tries of its last one and so many guesses; 0 once it is done. For references."""
    length, most = int(table.length_S[slot]), min(int(table.max_length_S[slot]), table.token_ids_SL.shape[1])
    return 0 if length == 0 or table.done_S[slot] else max(min(most - length, num_guesses + 1), 1)


def check_trials(trials: Trials, table: SlotTable, num_guesses: int) -> None:
    """Tensors of a step in which each slot tries so many guesses, or raise."""
    if not 1 <= num_guesses <= MOST_GUESSES:
        raise ValueError(f"num_guesses: got {num_guesses}, wanted 1 to {MOST_GUESSES}")
    B = len(trials.slots_B)
    sizes = {"slots_B": B, "ends_B": B, "num_tokens_1": 1}
    for field in fields(trials):
        name, tensor = field.name, getattr(trials, field.name)
        if name == "kv_slots_XT":
            check_kv_slots(tensor, table, B * (num_guesses + 1))
            continue
        check_shape(name, tensor, sizes.get(name, B * (num_guesses + 1)))
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, table.length_S)
