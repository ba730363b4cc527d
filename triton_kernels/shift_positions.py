"""Positions by which tokens that are tried are turned: those behind images less far than they are counted.

Shape suffixes: T tokens, S slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_indices
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.overlap import let_next_start, overlap_options, wait_for_previous
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 64
_SIZES = ["T", "S"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _shift_positions_kernel(
    positions_ptr, slots_ptr, lengths_ptr, shifts_ptr, T, S, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (ceil(T / BLOCK),): one program shifts BLOCK tokens."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < T
    slot = tl.load(slots_ptr + token, mask=mask, other=-1)
    tried = (tl.load(lengths_ptr + token, mask=mask, other=0) > 0) & (slot >= 0) & (slot < S)
    shift = tl.load(shifts_ptr + slot, mask=tried, other=0)
    position = tl.load(positions_ptr + token, mask=tried, other=0)
    tl.store(positions_ptr + token, position + shift, mask=tried)


def shift_positions(positions_T: Tensor, slots_T: Tensor, lengths_T: Tensor, shifts_S: Tensor) -> None:
    """Add to each token's position, in place, what its slot's are shifted by; those of length 0 are no tokens. Integers
    only; graph-safe."""
    T = len(positions_T)
    for name, tensor, size in (("slots", slots_T, T), ("lengths", lengths_T, T), ("shifts", shifts_S, None)):
        check_indices(name, tensor, positions_T, size)
    if not use_kernels(positions_T):
        shift_positions_reference(positions_T, slots_T, lengths_T, shifts_S)
    elif T:
        _shift_positions_kernel[(cdiv(T, _BLOCK),)](
            positions_T, slots_T, lengths_T, shifts_S, T, len(shifts_S), BLOCK=_BLOCK, num_warps=2,
            **overlap_options(positions_T),
        )  # fmt: skip


def shift_positions_reference(positions_T: Tensor, slots_T: Tensor, lengths_T: Tensor, shifts_S: Tensor) -> None:
    """The same in PyTorch."""
    tried_T = (lengths_T > 0) & (slots_T >= 0) & (slots_T < len(shifts_S))
    positions_T += torch.where(tried_T, shifts_S[slots_T.clamp(0, len(shifts_S) - 1).long()], 0)
