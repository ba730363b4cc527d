"""Tiles as the host counts and describes them, thousands of times while graphs are captured.

Triton's own counterparts are made for its compiler, and take some microseconds a call. Knows no kernel.
"""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor


def cdiv(size: int, tile: int) -> int:
    """Tiles that cover `size`."""
    return -(-size // tile)


def next_power_of_2(size: int) -> int:
    """The smallest that is not less."""
    return 1 << (size - 1).bit_length()


def dot_block(size: int) -> int:
    """Of a block that `tl.dot` multiplies: it takes no fewer than 16 rows, columns or terms of a sum."""
    return max(16, next_power_of_2(size))


def hopper_descriptor(tensor: Tensor, *block: int) -> HopperDescriptor:
    """Of tiles for Hopper's copy engine, in the layout that its products read."""
    return HopperDescriptor.from_tensor(tensor, list(block), hopper_layout(tensor.dtype, *block))


@functools.cache
def hopper_layout(dtype: torch.dtype, *block: int) -> gl.NVMMASharedLayout:
    """Of such a tile in shared memory."""
    numbers = gl.float8e4nv if dtype.itemsize == 1 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for(list(block), numbers)
