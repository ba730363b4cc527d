"""The inputs of a step in which each slot tries several tokens at once: its last one, and guesses of those to come.

What is guessed follows in the slot's own tokens where its last few have been before: the longest such run, and of equal
ones the latest. Where what follows there comes to the slot's end, it is taken to go on from the run again. As
`prepare.py` does for other steps, this says which tokens there are, where their keys and values go, and what each row
samples; which guesses were right is `accept.py`'s matter.

Shape suffixes: B slots, N tokens of each, T tokens of the step, padding included; S slots, L positions, M pages.
"""

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

MOST_GUESSES = 15
"""Of a slot."""
MOST_REPEATED = 8
"""Tokens of a run that are looked at."""
_BLOCK, _WARPS = 2048, 8
_SIZES = ["B", "T", "S", "L", "M", "num_pages"]


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
    slots_ptr, page_table_ptr, token_ids_ptr, length_ptr, max_length_ptr, done_ptr, input_ids_ptr, positions_ptr,
    kv_slots_ptr, lengths_ptr, row_slots_ptr, sample_positions_ptr, starts_ptr, query_starts_ptr, num_tokens_ptr,
    B, T, S, L, M, num_pages,
    N: tl.constexpr, BLOCK_N: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B + 1,): one program owns a slot's tokens, the last one the padding."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    if row == B:
        for start in range(B * N, T, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            inside = token < T
            tl.store(input_ids_ptr + token, 0, mask=inside)
            tl.store(positions_ptr + token, 0, mask=inside)
            tl.store(kv_slots_ptr + token, (token % PAGE).to(tl.int64), mask=inside)
            tl.store(lengths_ptr + token, 0, mask=inside)
            tl.store(row_slots_ptr + token, S - 1, mask=inside)
            tl.store(sample_positions_ptr + token, -1, mask=inside)
        tl.store(query_starts_ptr + B, B * N)
        tl.store(num_tokens_ptr, B * N)
    else:
        slot = tl.load(slots_ptr + row)
        alive = (slot >= 0) & (slot < S)
        length = tl.load(length_ptr + slot, mask=alive, other=0)
        alive &= (tl.load(done_ptr + slot, mask=alive, other=1) == 0) & (length > 0) & (length <= L)
        length = tl.where(alive, length, 0)
        ids_ptr = token_ids_ptr + slot.to(tl.int64) * L
        behind = _find_run(ids_ptr, length, LONGEST, SHORTEST, BLOCK)
        # A guess is tried only if the token behind it may be sampled.
        room = tl.minimum(tl.load(max_length_ptr + slot, mask=alive, other=0), L) - length
        tried = tl.where(behind >= 0, tl.minimum(room, N), 1)
        place = tl.arange(0, BLOCK_N)
        own = place < N
        real = alive & (place < tl.maximum(tried, 1))
        period = tl.maximum(length - behind, 1)
        known = tl.where(place == 0, length - 1, behind + (place - 1) % period)
        token = row * N + place
        position = length - 1 + place
        ids = tl.load(ids_ptr + known, mask=real, other=0)
        tl.store(input_ids_ptr + token, ids, mask=own)
        tl.store(positions_ptr + token, tl.where(real, position, 0), mask=own)
        cell = kv_slot(page_table_ptr, slot, position, real, PAGE, M, num_pages, token)
        tl.store(kv_slots_ptr + token, cell, mask=own)
        tl.store(lengths_ptr + token, tl.where(real, position + 1, 0), mask=own)
        tl.store(row_slots_ptr + token, tl.zeros([BLOCK_N], tl.int32) + slot, mask=own)
        tl.store(sample_positions_ptr + token, tl.where(real & (position + 1 < L), position + 1, -1), mask=own)
        tl.store(starts_ptr + row, tl.maximum(length - 1, 0))
        tl.store(query_starts_ptr + row, row * N)


def guess(
    slots_B: Tensor, rows: StepRows, table: SlotTable, inputs: StepInputs, *, num_guesses: int, repeated: tuple[int, int],
    page_size: int, num_pages: int,
) -> None:  # fmt: skip
    """Fill `inputs` and `rows` for slots that try `num_guesses` tokens behind their last one, from the table alone.

    `repeated`: how many tokens at least, and at most, are looked for among earlier ones. Every token of the step is a
    row, of slot `rows.slots_R`: it samples for position `rows.positions_R`, or where that is -1 nothing. `inputs` says
    the same in both ways that attention may take it: each token a decode row, `num_guesses` + 1 of them behind each
    other, or each slot a chunk. Integers only; graph-safe.
    """
    B, T, N = len(slots_B), len(inputs.input_ids_T), num_guesses + 1
    _check(slots_B, rows, table, inputs, num_guesses, repeated)
    if not use_kernels(slots_B):
        guess_reference(
            slots_B, rows, table, inputs, num_guesses=num_guesses, repeated=repeated, page_size=page_size,
            num_pages=num_pages,
        )  # fmt: skip
        return
    S, L = table.token_ids_SL.shape
    shortest, longest = repeated
    _guess_kernel[(B + 1,)](
        slots_B, table.page_table_SM, table.token_ids_SL, table.length_S, table.max_length_S, table.done_S,
        inputs.input_ids_T, inputs.positions_T, inputs.kv_slots_T, inputs.decode_lengths_B, rows.slots_R,
        rows.positions_R, inputs.chunk_starts_C, inputs.query_starts_C1, inputs.num_tokens_1,
        B, T, S, L, table.page_table_SM.shape[1], num_pages,
        N=N, BLOCK_N=next_power_of_2(N), LONGEST=longest, SHORTEST=shortest, BLOCK=_BLOCK, BLOCK_T=64, PAGE=page_size,
        num_warps=_WARPS, **overlap_options(slots_B),
    )  # fmt: skip


def guess_reference(
    slots_B: Tensor, rows: StepRows, table: SlotTable, inputs: StepInputs, *, num_guesses: int, repeated: tuple[int, int],
    page_size: int, num_pages: int,
) -> None:  # fmt: skip
    """The same in plain Python and PyTorch."""
    B, N = len(slots_B), num_guesses + 1
    S, L = table.token_ids_SL.shape
    for tensor in (inputs.input_ids_T, inputs.positions_T, inputs.kv_slots_T, inputs.decode_lengths_B):
        tensor.zero_()
    rows.slots_R.fill_(S - 1)
    rows.positions_R.fill_(-1)
    inputs.query_starts_C1.copy_(torch.arange(B + 1, dtype=torch.int32) * N)
    inputs.num_tokens_1[0] = B * N
    for row, slot in enumerate(slots_B.tolist()):
        first = row * N
        rows.slots_R[first : first + N] = slot
        length = int(table.length_S[slot])
        alive = length > 0 and not table.done_S[slot]
        inputs.chunk_starts_C[row] = length - 1 if alive else 0
        if not alive:
            continue
        room = min(int(table.max_length_S[slot]), L) - length
        known_ids = table.token_ids_SL[slot, :length]
        ids = [int(known_ids[-1]), *_guesses(known_ids, min(room - 1, num_guesses), repeated)]
        last = first + len(ids)
        positions_N = torch.arange(length - 1, length - 1 + len(ids))
        pages_N = table.page_table_SM[slot, positions_N // page_size].long()
        pages_N = torch.where(pages_N < num_pages, pages_N, 0)
        inputs.input_ids_T[first:last] = torch.tensor(ids, dtype=torch.int32)
        inputs.positions_T[first:last] = positions_N.int()
        inputs.kv_slots_T[first:last] = torch.where(pages_N > 0, pages_N * page_size + positions_N % page_size, 0)
        inputs.decode_lengths_B[first:last] = positions_N.int() + 1
        rows.positions_R[first:last] = torch.where(positions_N + 1 < L, positions_N + 1, -1).int()


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


def _check(
    slots_B: Tensor, rows: StepRows, table: SlotTable, inputs: StepInputs, num_guesses: int, repeated: tuple[int, int]
) -> None:
    shortest, longest = repeated
    if not 1 <= num_guesses <= MOST_GUESSES:
        raise ValueError(f"num_guesses: got {num_guesses}, wanted 1 to {MOST_GUESSES}")
    if not 1 <= shortest <= longest <= MOST_REPEATED:
        raise ValueError(f"repeated: got {repeated}, wanted two numbers from 1 to {MOST_REPEATED} in order")
    B, T = len(slots_B), len(inputs.input_ids_T)
    if T < B * (num_guesses + 1):
        raise ValueError(f"input_ids: got {T} tokens, wanted at least {num_guesses + 1} for each of {B} slots")
    wanted = {
        "slots": (slots_B, B),
        "input_ids": (inputs.input_ids_T, T),
        "positions": (inputs.positions_T, T),
        "kv_slots": (inputs.kv_slots_T, T),
        "decode_lengths": (inputs.decode_lengths_B, T),
        "chunk_starts": (inputs.chunk_starts_C, B),
        "query_starts": (inputs.query_starts_C1, B + 1),
        "num_tokens": (inputs.num_tokens_1, 1),
        "rows' slots": (rows.slots_R, T),
        "sample positions": (rows.positions_R, T),
    }
    for name, (tensor, size) in wanted.items():
        check_shape(name, tensor, size)
        check_dtype(name, tensor, torch.int64 if name == "kv_slots" else torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, table.length_S)
