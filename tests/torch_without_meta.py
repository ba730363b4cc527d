"""PyTorch without its kernels for tensors that have no memory: they are a fourth of its import, which engines repeat.

A worker computes with tensors that have. What needs such a kernel all the same fails: it is not imported later.
"""

import sys
from types import ModuleType


def leave_out_meta() -> None:
    """In a process that has not imported torch yet."""
    sys.modules["torch._meta_registrations"] = ModuleType("torch._meta_registrations")
