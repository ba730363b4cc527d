"""How a kernel starts before the one ahead of it has ended: programmatic dependent launch (PDL), on Hopper.

The order that pays: load what no kernel of the step writes (weights), let the next kernel start, wait for the previous
one, load activations. Every kernel of a step that is launched with `launch_pdl` must wait, or one that comes later may
read what is not there yet. A kernel launched without starts when all before it is done and there to read, and so does
all that comes after it: what is written ahead of the last such kernel may be read before a wait. Triton's interpreter
knows none of this: PDL is a constexpr, off there.

Between `next_starts_late` and its end kernels let the next one start only when they have waited: it may read what is
ahead of them without a wait, runs beside them, and waits at its own end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import triton
import triton.language as tl
from torch import Tensor

from tercet.triton_kernels.dispatch import is_hopper

_LATE = 2
"""In place of True as PDL."""
_late = ContextVar("late", default=False)


@contextmanager
def next_starts_late() -> Iterator[None]:
    """Within, kernels that are launched let the next one start late."""
    token = _late.set(True)
    try:
        yield
    finally:
        _late.reset(token)


def overlap_options(tensor: Tensor) -> dict[str, int]:
    """Launch arguments of a kernel with a PDL constexpr: overlap where the GPU can."""
    if not is_hopper(tensor.device):
        return {"PDL": False}
    return {"PDL": _LATE if _late.get() else True, "launch_pdl": True}


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Programmatic dependent launch: the next kernel may start and load its weights now."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Programmatic dependent launch: from here on, what earlier kernels wrote is there to read."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    let_next_start_late(PDL)


@triton.jit
def let_next_start_late(PDL: tl.constexpr):
    """For a kernel that waits in a way of its own, behind that."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(start_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WANTED: tl.constexpr):
    """Ask for the first WANTED numbers of each of ROWS rows of COLUMNS to come to the L2 cache: nothing waits for them.

    In 128 pieces where there are fewer rows: threads that have no piece of their own would ask for others' again.
    """
    size: tl.constexpr = start_ptr.dtype.element_ty.primitive_bitwidth // 8
    each: tl.constexpr = WANTED * size
    pieces: tl.constexpr = 128 // ROWS if ROWS < 128 and each % (128 // ROWS * 16) == 0 else 1
    piece = tl.arange(0, ROWS * pieces)
    addresses = start_ptr.to(tl.int64) + piece // pieces * (COLUMNS * size) + piece % pieces * (each // pieces)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses, tl.full([ROWS * pieces], each // pieces, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
