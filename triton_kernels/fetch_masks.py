"""Masks of tokens on their way to the device: a step's rows fetch them where the host wrote them.

No copy is launched, and rows that have no mask fetch nothing. Knows rows and slots; what a mask forbids is the matter
of `logits.py`.

Shape suffixes: R rows, W words of a mask, S slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def _fetch_masks_kernel(slots_ptr, held_ptr, masks_ptr, table_ptr, S, W: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (R, tiles of a mask): one program copies BLOCK words; of a slot outside the table none."""
    slot, word = tl.load(slots_ptr + tl.program_id(0)), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(held_ptr + slot, mask=(slot >= 0) & (slot < S), other=0) != 0:
        inside, first = word < W, slot.to(tl.int64) * W
        tl.store(table_ptr + first + word, tl.load(masks_ptr + first + word, mask=inside), mask=inside)


def fetch_masks(slots_R: Tensor, held_S: Tensor, masks_SW: Tensor, table_SW: Tensor) -> None:
    """Copy the masks of the rows' slots into the table, in place: of those that are held, and inside it.

    A GPU reads `held_S` and `masks_SW` in pinned memory of the host. All int32. Graph-safe.
    """
    S, W = table_SW.shape
    check_shape("slots", slots_R, None)
    check_shape("held", held_S, S)
    check_shape("masks", masks_SW, S, W)
    for name, tensor in (("slots", slots_R), ("held", held_S), ("masks", masks_SW), ("table", table_SW)):
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
    if not use_kernels(table_SW):
        fetch_masks_reference(slots_R, held_S, masks_SW, table_SW)
    elif len(slots_R):
        grid = len(slots_R), cdiv(W, _BLOCK)
        _fetch_masks_kernel[grid](slots_R, held_S, masks_SW, table_SW, S, W=W, BLOCK=_BLOCK)


def fetch_masks_reference(slots_R: Tensor, held_S: Tensor, masks_SW: Tensor, table_SW: Tensor) -> None:
    """The same in PyTorch."""
    slots_N = slots_R[(slots_R >= 0) & (slots_R < len(table_SW))].long()
    slots_N = slots_N[held_S[slots_N] != 0]
    table_SW[slots_N] = masks_SW[slots_N]
