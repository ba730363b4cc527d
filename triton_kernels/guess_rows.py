"""Which rows a layer that guesses goes on from, and what it computes for guesses further ahead.

The layer reads a token's hidden state together with the token behind it, at the first one's position; what it makes of
them guesses the token behind both. So of each slot it begins with the last token that the model has computed. For the
next guess it takes its own hidden state for that of the token sampled last, and so on.

Shape suffixes: B slots, N tokens that each of them has in the step, K guesses; R rows, N of each slot; S slots, L
positions, M pages of the table.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.kv_slots import kv_slot
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tiles import next_power_of_2

_SIZES = ["B", "S", "L", "M", "num_pages"]


@dataclass(frozen=True)
class GuessRows:
    """Written by `guess_rows`; int32, but for `kv_slots_KB`. Of guess k of slot b:"""

    picks_B: Tensor
    """The row of the step whose hidden state the first guess is made from."""
    next_positions_KB: Tensor
    """Where the guess goes; -1 where nothing is guessed."""
    positions_KB: Tensor
    """By which the token that is computed for it is turned."""
    kv_slots_KB: Tensor
    """int64: where its keys and values go, as `StepInputs` has it: to page 0 beyond the pages that the step used, where
    the guess is as good as it is."""
    lengths_KB: Tensor
    """Tokens that it sees, itself among them; 0 where nothing is guessed."""
    num_tokens_1: Tensor
    """How many slots there are."""

    def cut(self, num_slots: int) -> "GuessRows":
        """For so many slots: each guess's own lie behind each other."""

        def cut(numbers: Tensor) -> Tensor:
            num_guesses = len(numbers)
            return numbers.view(-1)[: num_guesses * num_slots].view(num_guesses, num_slots)

        return GuessRows(
            self.picks_B[:num_slots],
            cut(self.next_positions_KB),
            cut(self.positions_KB),
            cut(self.kv_slots_KB),
            cut(self.lengths_KB),
            self.num_tokens_1,
        )

    def inputs(self, guess: int, input_ids_B: Tensor, slots_B: Tensor) -> StepInputs:
        """What a layer reads for a guess: a step in which each slot decodes one token."""
        none = slots_B[:0]
        return StepInputs(
            input_ids_T=input_ids_B,
            positions_T=self.positions_KB[guess],
            kv_slots_XT=self.kv_slots_KB[guess, None],
            decode_slots_B=slots_B,
            decode_lengths_B=self.lengths_KB[guess],
            chunk_slots_C=none,
            chunk_starts_C=none,
            query_starts_C1=self.num_tokens_1,  # of no chunk
            sample_rows_R=none,  # each token is a row
            num_tokens_1=self.num_tokens_1,
        )


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _guess_rows_kernel(
    slots_ptr, sampled_ptr, page_table_ptr, length_ptr, max_length_ptr, done_ptr, shift_ptr, picks_ptr,
    next_positions_ptr, positions_ptr, kv_slots_ptr, lengths_ptr, num_tokens_ptr, B, S, L, M, num_pages,
    N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B,): one program owns a slot's guesses."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    first = tl.load(sampled_ptr + row * N)
    alive = (slot >= 0) & (slot < S) & (first >= 0)
    alive &= tl.load(done_ptr + slot, mask=alive, other=1) == 0
    length = tl.load(length_ptr + slot, mask=alive, other=0)
    # Of the tokens that were tried one or more are right, and the last of those is the slot's newest.
    newest = length - 1 - first
    alive &= (newest >= 0) & (newest < N) & (length > 1)
    tl.store(picks_ptr + row, row * N + tl.where(alive, newest, 0))
    guess = tl.arange(0, BLOCK_K)
    own = guess < K
    most = tl.minimum(tl.load(max_length_ptr + slot, mask=alive, other=0), L)
    guessed = own & alive & (length + guess < most)
    position = tl.where(guessed, length - 2 + guess, 0)
    place = guess * B + row
    tl.store(next_positions_ptr + place, tl.where(guessed, length + guess, -1), mask=own)
    shift = tl.load(shift_ptr + slot, mask=alive, other=0)
    tl.store(positions_ptr + place, tl.where(guessed, position + shift, 0), mask=own)
    # What the table says of pages that the step has not used may be of the slot's former holder.
    own_page = position // PAGE <= (first + N - 2) // PAGE
    cell = kv_slot(page_table_ptr, slot, position, guessed & own_page, PAGE, M, num_pages, row)
    tl.store(kv_slots_ptr + place, cell, mask=own)
    tl.store(lengths_ptr + place, tl.where(guessed, position + 1, 0), mask=own)
    if row == 0:
        tl.store(num_tokens_ptr, B)


def guess_rows(
    rows: GuessRows, slots_B: Tensor, sampled_R: Tensor, table: SlotTable, *, page_size: int, num_pages: int
) -> None:
    """Fill `rows` for these slots. `sampled_R`: the positions that the step's rows sampled, each slot's behind each
    other; -1 where a row sampled nothing. Integers only; graph-safe."""
    B, K = len(slots_B), len(rows.positions_KB)
    N = _check(rows, slots_B, sampled_R, table)
    sizes = {"page_size": page_size, "num_pages": num_pages}
    if not use_kernels(slots_B):
        guess_rows_reference(rows, slots_B, sampled_R, table, **sizes)
    elif B:
        S, L = table.token_ids_SL.shape
        _guess_rows_kernel[(B,)](
            slots_B, sampled_R, table.page_table_SM, table.length_S, table.max_length_S, table.done_S,
            table.shift_S, rows.picks_B, rows.next_positions_KB, rows.positions_KB, rows.kv_slots_KB, rows.lengths_KB,
            rows.num_tokens_1,
            B, S, L, table.page_table_SM.shape[1], num_pages,
            N=N, K=K, BLOCK_K=next_power_of_2(K), PAGE=page_size, num_warps=1, **overlap_options(slots_B),
        )  # fmt: skip


def guess_rows_reference(
    rows: GuessRows, slots_B: Tensor, sampled_R: Tensor, table: SlotTable, *, page_size: int, num_pages: int
) -> None:
    """The same in plain Python."""
    B, (S, L) = len(slots_B), table.token_ids_SL.shape
    N = len(sampled_R) // max(B, 1)
    rows.next_positions_KB.fill_(-1)
    for numbers in (rows.positions_KB, rows.kv_slots_KB, rows.lengths_KB):
        numbers.zero_()
    rows.num_tokens_1[0] = B
    for row, slot in enumerate(slots_B.tolist()):
        rows.picks_B[row] = row * N
        first = int(sampled_R[row * N])
        if not 0 <= slot < S or first < 0 or table.done_S[slot]:
            continue
        length = int(table.length_S[slot])
        if not (0 <= length - 1 - first < N and length > 1):
            continue
        rows.picks_B[row] = row * N + length - 1 - first
        for guess in range(min(len(rows.positions_KB), min(int(table.max_length_S[slot]), L) - length)):
            position = length - 2 + guess
            page = int(table.page_table_SM[slot, position // page_size])
            if position // page_size > (first + N - 2) // page_size:
                page = 0
            rows.next_positions_KB[guess, row] = length + guess
            rows.positions_KB[guess, row] = position + table.shift_S[slot]
            rows.lengths_KB[guess, row] = position + 1
            if 0 < page < num_pages:
                rows.kv_slots_KB[guess, row] = page * page_size + position % page_size


def _check(rows: GuessRows, slots_B: Tensor, sampled_R: Tensor, table: SlotTable) -> int:
    """How many tokens each slot has."""
    B, K = len(slots_B), len(rows.positions_KB)
    for name, tensor in (("slots", slots_B), ("sampled", sampled_R)):
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, table.length_S)
    if B and (len(sampled_R) % B or not len(sampled_R)):
        raise ValueError(f"sampled: got {len(sampled_R)} rows, wanted as many of each of {B} slots")
    for field in fields(rows):
        name, tensor = field.name, getattr(rows, field.name)
        shape = (1,) if name == "num_tokens_1" else (B,) if name == "picks_B" else (K, B)
        check_shape(name, tensor, *shape)
        check_dtype(name, tensor, torch.int64 if name == "kv_slots_KB" else torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, table.length_S)
    return len(sampled_R) // B if B else 1
