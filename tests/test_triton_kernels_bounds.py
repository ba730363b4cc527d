"""The memory checker of interpreted tests sees what it should: each number beyond a tensor's end, and no other."""

import pytest
import torch
import triton
import triton.language as tl

from interpreted import rerun_interpreted
from tercet.triton_kernels.dispatch import INTERPRETED


@triton.jit
def _copy_kernel(x_ptr, y_ptr, count, shift, BLOCK: tl.constexpr):
    """Grid (1,): copies `count` numbers from `shift` on."""
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at + shift, mask=at < count), mask=at < count)


@pytest.mark.skipif(not INTERPRETED, reason="the checker is the interpreter's")
def test_what_lies_outside_is_an_error() -> None:
    """Views are tensors too: memory that belongs to their neighbours is outside."""
    memory = torch.arange(100.0)
    x, y = memory[10:20], memory[50:60]
    _copy_kernel[(1,)](x, y, 10, 0, BLOCK=16)
    assert torch.equal(x, y)
    with pytest.raises(triton.TritonError, match="_copy_kernel reads 3 numbers outside"):
        _copy_kernel[(1,)](x, y, 10, 3, BLOCK=16)
    with pytest.raises(triton.TritonError, match="_copy_kernel reads 1 numbers outside"):
        _copy_kernel[(1,)](x, y, 1, -1, BLOCK=16)
    with pytest.raises(triton.TritonError, match="_copy_kernel writes 2 numbers outside"):
        _copy_kernel[(1,)](memory[10:30], y, 12, 0, BLOCK=16)
    _copy_kernel[(1,)](x[:0], y, 0, 0, BLOCK=16)


def test_interpreted() -> None:
    rerun_interpreted(__file__)
