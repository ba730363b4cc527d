"""Copy what places hold, of all layers at once: pages on which answers part, states that later prompts may begin from.

Knows pools, [layer, place, ...]; what lies in them, and which are copied why, is the plan's matter.

Shape suffixes: S places, P pairs of them.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import FLOATS, FP8, check_contiguous, check_dtype, check_indices
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import cdiv, next_power_of_2

_BLOCK = 4096


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["S"])
def _copy_places_kernel(pools_ptr, pairs_ptr, S, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (P, layers, tiles of a place): one program copies BLOCK numbers. A pair outside is skipped."""
    source = tl.load(pairs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    if (source >= 0) & (source < S) & (target >= 0) & (target < S):
        first = tl.program_id(1).to(tl.int64) * S
        offset = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < SIZE
        numbers = tl.load(pools_ptr + (first + source) * SIZE + offset, mask=mask)
        tl.store(pools_ptr + (first + target) * SIZE + offset, numbers, mask=mask)


def copy_places(pools: Tensor, pairs_P2: Tensor) -> None:
    """Copy what place `pairs_P2[p, 0]` holds over that of place `pairs_P2[p, 1]`, in place. Graph-safe.

    A pair that points outside the pools, such as (-1, -1), does nothing. A place that is copied over stands in no other
    pair: the order of copies is open.
    """
    if pools.ndim < 3:
        raise ValueError(f"pools: got shape {list(pools.shape)}, wanted [layers, slots, ...]")
    check_dtype("pools", pools, *FLOATS, FP8)
    check_contiguous("pools", pools)
    check_indices("pairs", pairs_P2, pools, None, 2)
    if not use_kernels(pools):
        copy_places_reference(pools, pairs_P2)
    elif pairs_P2.shape[0] and pools.numel():
        num_layers, S = pools.shape[:2]
        size = math.prod(pools.shape[2:])
        block = min(_BLOCK, next_power_of_2(size))
        _copy_places_kernel[(pairs_P2.shape[0], num_layers, cdiv(size, block))](
            pools, pairs_P2, S, SIZE=size, BLOCK=block, num_warps=4
        )


def copy_places_reference(pools: Tensor, pairs_P2: Tensor) -> None:
    """The same in PyTorch."""
    inside_P = ((pairs_P2 >= 0) & (pairs_P2 < pools.shape[1])).all(1)
    sources_P, targets_P = pairs_P2[inside_P].long().unbind(1)
    pools[:, targets_P] = pools[:, sources_P]
