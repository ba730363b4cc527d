"""What a row of the kernel bench is; each family of kernels lists its own rows in `rows_<family>.py`."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One kernel at one shape. `run(i)` and `peer(i)` launch it on the i-th of `copies` inputs; both are graph-safe.

    `num_bytes`: what must move at least; `num_flops`: what must be computed. The larger share of the card's ceiling is
    the one that is reported.
    """

    kernel: str
    shape: str
    run: Callable[[int], object]
    copies: int
    num_bytes: float
    num_flops: float = 0.0
    peer: Callable[[int], object] | None = None
    peer_name: str = ""
    recorded_us: float | None = None
    """What a peer that is not here took, once, on an H200."""
    recorded_name: str = ""
    nodes: int = 24
