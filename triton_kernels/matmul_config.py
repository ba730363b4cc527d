"""One way to run a product: which kernel, with which block sizes.

Knows what kernels there are and what each can do; chooses nothing and launches nothing.
"""

from dataclasses import dataclass

# Kernels that sum K in plain order: the same bits for a row whatever else is in the batch.
PLAIN_ORDER = ("skinny", "scaled", "groups", "tile", "wave", "persistent", "hopper")
KERNELS = ("vector", "split", "early", "fp8", *PLAIN_ORDER)
NEED_TMA = ("early", "fp8", "scaled", "groups", "wave", "persistent", "hopper")
# Kernels that can divide K among programs: see matmul_parts.py.
IN_PARTS = ("early", "skinny", "scaled", "groups", "wave")
# Kernels that can ask the L2 cache for their weights ahead.
ASKING = ("split", "skinny", "scaled", "wave")
# Kernels that read weights of eight bits or four.
SCALING = ("vector", "skinny", "scaled", "groups", "fp8")
EARLY_BYTES = 216 * 1024
"""Of weights that a program of the early kernel has in shared memory at most, beside its sums."""


@dataclass(frozen=True)
class MatmulConfig:
    """One way to run a product.

    `prefetch`: columns of its weights that a program asks the L2 cache for ahead; `extra`, `tall`: tiles half as wide
    again, half as high again. `splits`: of K within a program, among its warps; `parts`: of K among programs, each
    with its own sum, where what comes next adds them (matmul_parts.py); elsewhere they are left out. `hold`: weights
    are in registers before rows are there (matmul_early.py, whose `splits` are chunks of `block_k` at once).
    """

    kernel: str  # one of KERNELS, or "apart" for a fused norm that does not pay: it runs on its own
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 3
    splits: int = 1
    group_m: int = 8
    prefetch: int = 0
    extra: bool = False
    tall: bool = False
    parts: int = 1
    hold: bool = False

    @property
    def height(self) -> int:
        """Rows of one tile."""
        return self.block_m * 3 // 2 if self.tall else self.block_m

    @property
    def width(self) -> int:
        """Output columns of one tile."""
        return self.block_n * 3 // 2 if self.extra else self.block_n
