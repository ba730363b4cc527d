"""Whether a tensor's work runs in Triton or in the PyTorch reference.

Knows devices and Triton's interpreter; knows no kernel.
"""

import triton
from torch import Tensor

# Triton reads the variable when it decorates a kernel: later changes must not change our mind either.
INTERPRETED: bool = triton.knobs.runtime.interpret


def use_kernels(tensor: Tensor) -> bool:
    """True on a GPU, and anywhere under `TRITON_INTERPRET=1`."""
    return INTERPRETED or tensor.is_cuda
