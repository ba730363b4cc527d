"""Tiles as the host counts and describes them: what Triton's own functions say."""

import pytest
import torch
import triton
from triton.experimental.gluon import language as gl

from tercet.triton_kernels.tiles import cdiv, dot_block, hopper_descriptor, next_power_of_2
from tercet.triton_kernels.tuning import ROW_BUCKETS, row_bucket


def test_numbers() -> None:
    for size in [*range(1, 300), 2**20 - 1, 2**20, 2**20 + 1, 151_936]:
        assert next_power_of_2(size) == triton.next_power_of_2(size)
        assert dot_block(size) == max(16, next_power_of_2(size))
        for tile in (1, 3, 8, 64, 192):
            assert cdiv(size, tile) == triton.cdiv(size, tile)


def test_row_buckets() -> None:
    for size in range(1, ROW_BUCKETS[-1] + 1):
        assert row_bucket(size) == min(bucket for bucket in ROW_BUCKETS if bucket >= size)
    assert row_bucket(10 * ROW_BUCKETS[-1]) == ROW_BUCKETS[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 32)])
def test_descriptors(dtype: torch.dtype, block: tuple[int, int]) -> None:
    tensor = torch.zeros(256, 128, dtype=dtype)
    made = hopper_descriptor(tensor, *block)
    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    assert made.layout == gl.NVMMASharedLayout.get_default_for(list(block), kind)
    assert made.base is tensor
    assert (list(made.shape), list(made.strides), made.block_shape) == ([256, 128], [128, 1], list(block))
