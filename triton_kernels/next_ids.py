"""Of each token of a step, the id of the one behind it in its sequence, once the step has sampled.

Within a chunk of a prompt that is the chunk's next token; of all others the slot table has it: what was sampled, or how
a prompt goes on. Of rows of padding, and of a sequence's end, it is 0.

Shape suffixes: as in `prepare.py`; D rows that decode, each token of a trial (`trials.py`) among them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_BLOCK = 64
_MOST = 2**16
"""Pairs of a token and a chunk that one program compares."""
_SIZES = ["D", "T", "S", "L"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _next_ids_kernel(
    slots_ptr, positions_ptr, input_ids_ptr, query_starts_ptr, token_ids_ptr, shift_ptr, out_ptr, D, T, S, L,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T / BLOCK,): one program looks for BLOCK tokens."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < T
    slot = tl.load(slots_ptr + token, mask=token < D, other=-1)
    behind = tl.load(input_ids_ptr + token + 1, mask=(token >= D) & (token + 1 < T), other=0)
    is_last = token < D
    if C:
        chunk = tl.arange(0, BLOCK_C)
        start = tl.load(query_starts_ptr + chunk, mask=chunk < C, other=0)
        end = tl.load(query_starts_ptr + 1 + chunk, mask=chunk < C, other=0)
        ends = (end[None, :] == token[:, None] - D + 1) & (end > start)[None, :]
        ends_here = tl.max(ends.to(tl.int32), 1) > 0
        chunk_slot = tl.load(slots_ptr + D + chunk, mask=chunk < C, other=-1)
        slot = tl.where(ends_here, tl.max(tl.where(ends, chunk_slot[None, :], -1), 1), slot)
        is_last |= ends_here
    known = mask & is_last & (slot >= 0) & (slot < S)
    shift = tl.load(shift_ptr + slot, mask=known, other=0)
    position = tl.load(positions_ptr + token, mask=mask, other=0) - shift + 1
    known &= (position > 0) & (position < L)
    ids = tl.load(token_ids_ptr + slot.to(tl.int64) * L + position, mask=known, other=0)
    tl.store(out_ptr + token, tl.where(is_last, ids, behind), mask=mask)


def next_ids(inputs: StepInputs, slots_R: Tensor, table: SlotTable, out_T: Tensor) -> None:
    """Write `out_T`, int32. `slots_R`: of each token that decodes, then of each chunk. Integers only; graph-safe."""
    T, C = len(inputs.input_ids_T), len(inputs.chunk_slots_C)
    check_shape("out", out_T, T)
    check_dtype("out", out_T, torch.int32)
    check_contiguous("out", out_T)
    check_device("out", out_T, table.length_S)
    check_shape("slots", slots_R, None)
    check_dtype("slots", slots_R, torch.int32)
    check_contiguous("slots", slots_R)
    D = len(slots_R) - C
    if not 0 <= D <= T:
        raise ValueError(f"slots: got {len(slots_R)}, wanted those of {C} chunks and of {T} tokens at most")
    if not use_kernels(out_T):
        next_ids_reference(inputs, slots_R, table, out_T)
    elif T:
        S, L = table.token_ids_SL.shape
        block_c = next_power_of_2(max(C, 1))
        block = max(16, min(_BLOCK, _MOST // block_c))
        _next_ids_kernel[(cdiv(T, block),)](
            slots_R, inputs.positions_T, inputs.input_ids_T, inputs.query_starts_C1, table.token_ids_SL,
            table.shift_S, out_T, D, T, S, L,
            C=C, BLOCK_C=block_c, BLOCK=block, num_warps=2, **overlap_options(out_T),
        )  # fmt: skip


def next_ids_reference(inputs: StepInputs, slots_R: Tensor, table: SlotTable, out_T: Tensor) -> None:
    """The same in plain Python."""
    S, L = table.token_ids_SL.shape
    num_tokens, num_chunks = len(out_T), len(inputs.chunk_slots_C)
    num_decodes = len(slots_R) - num_chunks
    slots, bounds = slots_R.tolist(), inputs.query_starts_C1.tolist()
    own = dict(enumerate(slots[:num_decodes]))
    for chunk, slot in enumerate(slots[num_decodes:]):
        if bounds[chunk + 1] > bounds[chunk]:
            own[num_decodes + bounds[chunk + 1] - 1] = slot
    out_T[num_decodes : num_tokens - 1] = inputs.input_ids_T[num_decodes + 1 :]
    if num_decodes < num_tokens:
        out_T[-1] = 0
    for token, slot in own.items():
        if not 0 <= slot < S:
            out_T[token] = 0
            continue
        position = int(inputs.positions_T[token] - table.shift_S[slot]) + 1
        out_T[token] = table.token_ids_SL[slot, position] if 0 < position < L else 0
