"""What a gated delta layer's convolution keeps of chunks: their last tokens' inputs, by slot (`delta_prologue.py`).

A kernel of its own behind the prologue's: there tokens of several programs read what this one writes.

Shape suffixes: T tokens, or of a slot's tails one less than there are taps; N numbers of a row; C channels of the
convolution, the first of those numbers, or chunks; S slots.
"""

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

BLOCK = 512


@triton.jit
def shift_tails(
    tails_ptr, x_ptr, first, count, started, columns,
    C: tl.constexpr, N: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Of a slot's tails and, behind them, `count` tokens from `first` on the last KEPT become its tails."""
    tails = tl.arange(0, BLOCK_T)[:, None]
    mask = (tails < KEPT) & (columns < C)
    source = tails + count
    is_old = source < KEPT
    old = tl.load(tails_ptr + source * C + columns, mask=mask & is_old & started, other=0.0)
    token = first + source - KEPT
    x = tl.load(x_ptr + token * N + columns, mask=mask & (source >= KEPT), other=0.0)
    tl.debug_barrier()  # other threads may yet read what these write
    tl.store(tails_ptr + tails * C + columns, tl.where(is_old, old, x), mask=mask)


@triton.jit(do_not_specialize=["B", "S"], do_not_specialize_on_alignment=["B", "S"])
def _chunk_tails_kernel(
    x_ptr, tails_ptr, chunk_slots_ptr, chunk_starts_ptr, query_starts_ptr, B, S,
    C: tl.constexpr, N: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, C / BLOCK): one program owns the tails of one chunk's slot in BLOCK channels."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    slot = tl.load(chunk_slots_ptr + chunk).to(tl.int64)
    begin = tl.load(query_starts_ptr + chunk)
    count = tl.load(query_starts_ptr + chunk + 1) - begin
    if (count > 0) & (slot >= 0) & (slot < S):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        started = tl.load(chunk_starts_ptr + chunk) > 0
        first = tl.cast(B + begin, tl.int64)
        shift_tails(tails_ptr + slot * (KEPT * C), x_ptr, first, count, started, columns, C, N, KEPT, BLOCK_T)


def keep_chunk_tails(
    x_TN: Tensor,
    tails_STC: Tensor,
    chunk_slots_C: Tensor,
    chunk_starts_C: Tensor,
    query_starts_C1: Tensor,
    num_rows: int,
) -> None:
    """Of `x_TN` the chunks' tokens come behind `num_rows` others. Graph-safe."""
    S, kept, C = tails_STC.shape
    if num_chunks := chunk_slots_C.shape[0]:
        _chunk_tails_kernel[(num_chunks, cdiv(C, BLOCK))](
            x_TN, tails_STC, chunk_slots_C, chunk_starts_C, query_starts_C1, num_rows, S,
            C=C, N=x_TN.shape[1], KEPT=kept, BLOCK_T=next_power_of_2(kept), BLOCK=BLOCK, num_warps=4,
            **overlap_options(x_TN),
        )  # fmt: skip
