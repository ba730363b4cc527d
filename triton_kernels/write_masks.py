"""Masks of tokens on their way into a table: a run of words that a plan brought, one row for each slot that it names.

Knows rows and slots; what a mask forbids is `logits.py`'s matter.

Shape suffixes: N masks of a run, W words of a mask, S slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import cdiv

_BLOCK = 1024


@triton.jit(do_not_specialize=["S", "first_slot"], do_not_specialize_on_alignment=["S", "first_slot"])
def _write_masks_kernel(run_ptr, first_slot, table_ptr, S, W: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N, tiles of a mask): one program copies BLOCK words; those of a slot outside the table go nowhere."""
    mask, word = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(run_ptr + first_slot + mask)
    if (slot >= 0) & (slot < S):
        inside = word < W
        words = tl.load(run_ptr + mask.to(tl.int64) * W + word, mask=inside)
        tl.store(table_ptr + slot.to(tl.int64) * W + word, words, mask=inside)


def write_masks(run_X: Tensor, count: int, table_SW: Tensor) -> None:
    """Copy each of `count` masks, with which the run begins, into the row of its slot, in place.

    The slots stand behind the masks, all different; those outside the table are dropped. All int32.
    """
    check_dtype("table", table_SW, torch.int32)
    check_contiguous("table", table_SW)
    check_shape("table", table_SW, None, None)
    check_dtype("run", run_X, torch.int32)
    check_contiguous("run", run_X)
    check_device("run", run_X, table_SW)
    S, W = table_SW.shape
    if run_X.dim() != 1 or len(run_X) < count * (W + 1):
        raise ValueError(f"run: got shape {tuple(run_X.shape)}, wanted at least {count * (W + 1)} words in one row")
    if not use_kernels(table_SW):
        write_masks_reference(run_X, count, table_SW)
    elif count:
        _write_masks_kernel[(count, cdiv(W, _BLOCK))](run_X, count * W, table_SW, S, W=W, BLOCK=_BLOCK)


def write_masks_reference(run_X: Tensor, count: int, table_SW: Tensor) -> None:
    """The same in PyTorch."""
    S, W = table_SW.shape
    slots_N = run_X[count * W : count * (W + 1)]
    inside_N = (slots_N >= 0) & (slots_N < S)
    table_SW[slots_N[inside_N].long()] = run_X[: count * W].view(count, W)[inside_N]
