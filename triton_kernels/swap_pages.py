"""Copy whole pages of the KV cache to the host's memory and back, of all layers at once, beside the steps.

Knows the cache's shape, [layer, k/v, page, kv head, token, dim], or with one part in place of two, and that of the
host's: [place, layer, k/v, kv head, token, dim], so that a page lies in one piece there and in as many as there are
layers and parts here. Whose pages they are, and why they are copied, is the plan's matter.

A GPU reads and writes the host's memory where it is, which has to be pinned. What limits that is the way to the host,
and a few programs fill it: the others' multiprocessors are free for steps.

Shape suffixes: P pairs of pages and places.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_dtype, check_indices, check_shape
from tercet.triton_kernels.copy_pages import check_cache
from tercet.triton_kernels.dispatch import use_kernels
from tercet.triton_kernels.tiles import next_power_of_2

NUM_PROGRAMS = 4
"""So few bring what the way to the host takes, and leave the other multiprocessors to the steps beside them."""
_BLOCK_BYTES = 32768
"""On its way at a time, of each program."""
_SIZES = ["P", "SOURCE_ITEM", "SOURCE_RUN", "TARGET_ITEM", "TARGET_RUN"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SIZES)
def _swap_pages_kernel(
    sources_ptr,
    targets_ptr,
    pairs_ptr,
    P,
    SOURCE_ITEM,
    SOURCE_RUN,
    TARGET_ITEM,
    TARGET_RUN,
    RUNS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (any number,): the programs share the tiles of all runs of all pairs, each BLOCK numbers long.

    Run `r` of page or place `i` begins at number (i * ITEM + r * RUN) * SIZE.
    """
    tiles: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    for task in range(tl.program_id(0), P * RUNS * tiles, tl.num_programs(0)):
        pair, run = task // (RUNS * tiles), task // tiles % RUNS
        source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
        target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
        offset = task % tiles * BLOCK + tl.arange(0, BLOCK)
        mask = offset < SIZE
        numbers = tl.load(sources_ptr + (source * SOURCE_ITEM + run * SOURCE_RUN) * SIZE + offset, mask=mask)
        tl.store(targets_ptr + (target * TARGET_ITEM + run * TARGET_RUN) * SIZE + offset, numbers, mask=mask)


def store_pages(kv_cache: Tensor, host_pages: Tensor, pairs_P2: Tensor, num_programs: int = NUM_PROGRAMS) -> None:
    """Copy page `pairs_P2[p, 0]` of the cache over place `pairs_P2[p, 1]` of the host's memory, in place.

    The pairs are int32, on the cache's device, and inside; no place stands in two of them. Graph-safe.
    """
    _check(kv_cache, host_pages, pairs_P2)
    if not use_kernels(kv_cache):
        store_pages_reference(kv_cache, host_pages, pairs_P2)
    elif len(pairs_P2):
        runs, size = _runs(kv_cache)
        strides = 1, kv_cache.shape[2], runs, 1
        _swap_pages_kernel[(num_programs,)](
            kv_cache, host_pages, pairs_P2, len(pairs_P2), *strides,
            RUNS=runs, SIZE=size, BLOCK=_block(kv_cache, size), num_warps=8,
        )  # fmt: skip


def load_pages(kv_cache: Tensor, host_pages: Tensor, pairs_P2: Tensor, num_programs: int = NUM_PROGRAMS) -> None:
    """Copy place `pairs_P2[p, 0]` of the host's memory over page `pairs_P2[p, 1]` of the cache, in place.

    The pairs are int32, on the cache's device, and inside; no page stands in two of them. Graph-safe.
    """
    _check(kv_cache, host_pages, pairs_P2)
    if not use_kernels(kv_cache):
        load_pages_reference(kv_cache, host_pages, pairs_P2)
    elif len(pairs_P2):
        runs, size = _runs(kv_cache)
        strides = runs, 1, 1, kv_cache.shape[2]
        _swap_pages_kernel[(num_programs,)](
            host_pages, kv_cache, pairs_P2, len(pairs_P2), *strides,
            RUNS=runs, SIZE=size, BLOCK=_block(kv_cache, size), num_warps=8,
        )  # fmt: skip


def _runs(kv_cache: Tensor) -> tuple[int, int]:
    """In how many runs a page lies in the cache, and how many numbers each has."""
    return math.prod(kv_cache.shape[:2]), math.prod(kv_cache.shape[3:])


def _block(kv_cache: Tensor, size: int) -> int:
    return min(_BLOCK_BYTES // kv_cache.itemsize, next_power_of_2(size))


def store_pages_reference(kv_cache: Tensor, host_pages: Tensor, pairs_P2: Tensor) -> None:
    """The same in PyTorch."""
    pages_P, places_P = pairs_P2.long().unbind(1)
    host_pages[places_P] = kv_cache[:, :, pages_P].movedim(2, 0)


def load_pages_reference(kv_cache: Tensor, host_pages: Tensor, pairs_P2: Tensor) -> None:
    """The same in PyTorch."""
    places_P, pages_P = pairs_P2.long().unbind(1)
    kv_cache[:, :, pages_P] = host_pages[places_P].movedim(0, 2)


def _check(kv_cache: Tensor, host_pages: Tensor, pairs_P2: Tensor) -> None:
    check_cache(kv_cache)
    check_shape("host_pages", host_pages, None, *kv_cache.shape[:2], *kv_cache.shape[3:])
    check_dtype("host_pages", host_pages, kv_cache.dtype)
    check_contiguous("host_pages", host_pages)
    check_indices("pairs", pairs_P2, kv_cache, None, 2)
