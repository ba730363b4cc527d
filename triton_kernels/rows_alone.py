"""A step's rows without its other tokens: what layers read that nobody but the rows goes through any more.

Each row is a decode row then, the last token of a chunk too: it sees all of its sequence up to itself, which is in the
cache. Tokens of an image see further, but none further than its chunk's last.

Shape suffixes: B decode rows, C chunks, C1 = C + 1, R = B + C rows, T tokens of the step.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.prepare import StepInputs
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 128
_SIZES = ["B", "R"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _rows_alone_kernel(
    decode_slots_ptr, decode_lengths_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, sample_rows_ptr,
    positions_ptr, slots_out_ptr, lengths_out_ptr, positions_out_ptr, B, R, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows,): one program owns BLOCK rows."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = row - B
    decodes, of_chunk = row < B, (row >= B) & (row < R)
    begin = tl.load(query_starts_ptr + chunk, mask=of_chunk, other=0)
    count = tl.load(query_starts_ptr + chunk + 1, mask=of_chunk, other=0) - begin
    start = tl.load(chunk_starts_ptr + chunk, mask=of_chunk, other=0)
    slot = tl.load(decode_slots_ptr + row, mask=decodes, other=0)
    slot = tl.where(of_chunk, tl.load(chunk_slots_ptr + chunk, mask=of_chunk, other=0), slot)
    length = tl.load(decode_lengths_ptr + row, mask=decodes, other=0)
    length = tl.where(of_chunk & (count > 0), start + count, length)
    position = tl.load(positions_ptr + tl.load(sample_rows_ptr + row, mask=row < R, other=0))
    tl.store(slots_out_ptr + row, slot, mask=row < R)
    tl.store(lengths_out_ptr + row, length, mask=row < R)
    tl.store(positions_out_ptr + row, position, mask=row < R)


def rows_alone(inputs: StepInputs) -> StepInputs:
    """What layers read of the rows of a step with chunks, in the order of `sample_rows_R`. Keys and values are written,
    and ids are looked up: nothing of both is left. Of padding rows, and chunks of nothing, the length is 0. Integers
    only; graph-safe."""
    assert inputs.tries == 1, "steps with guesses have no chunks"
    assert inputs.turned is None, "tokens turn by their positions"
    slots_R, lengths_R, positions_R = _find_rows(inputs)
    none_T, none_C = inputs.input_ids_T[:0], inputs.chunk_slots_C[:0]
    return replace(
        inputs, input_ids_T=none_T, positions_T=positions_R, kv_slots_XT=inputs.kv_slots_XT[:, :0],
        decode_slots_B=slots_R, decode_lengths_B=lengths_R,
        chunk_slots_C=none_C, chunk_starts_C=none_C, query_starts_C1=inputs.query_starts_C1[:1],
        sample_rows_R=none_T,  # each token is a row
        groups_T=inputs.groups_R, image_rows=None, ends=None,
    )  # fmt: skip


def _find_rows(inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, lengths and positions of the rows, int32 [R] each."""
    B, R = len(inputs.decode_slots_B), len(inputs.sample_rows_R)
    if not use_kernels(inputs.positions_T):
        return rows_alone_reference(inputs)
    slots_R, lengths_R, positions_R = (torch.empty_like(inputs.sample_rows_R) for _ in range(3))
    _rows_alone_kernel[(cdiv(R, _BLOCK),)](
        inputs.decode_slots_B, inputs.decode_lengths_B, inputs.chunk_slots_C, inputs.chunk_starts_C,
        inputs.query_starts_C1, inputs.sample_rows_R, inputs.positions_T, slots_R, lengths_R, positions_R,
        B, R, BLOCK=_BLOCK, num_warps=4, **overlap_options(slots_R),
    )  # fmt: skip
    return slots_R, lengths_R, positions_R


def rows_alone_reference(inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The same in PyTorch."""
    counts_C = inputs.query_starts_C1.diff()
    lengths_C = torch.where(counts_C > 0, inputs.chunk_starts_C + counts_C, 0)
    return (
        torch.cat([inputs.decode_slots_B, inputs.chunk_slots_C]),
        torch.cat([inputs.decode_lengths_B, lengths_C]),
        inputs.positions_T[inputs.sample_rows_R.long()],
    )
