"""Whether a tensor's work runs in Triton or in the PyTorch reference, and what its GPU can do.

Knows devices and Triton's interpreter; knows no kernel.
"""

import functools

import torch
import triton
from torch import Tensor

# Triton reads the variable when it decorates a kernel: later changes must not change our mind either.
INTERPRETED: bool = triton.knobs.runtime.interpret


def use_kernels(tensor: Tensor) -> bool:
    """True on a GPU, and anywhere under `TRITON_INTERPRET=1`."""
    return INTERPRETED or tensor.is_cuda


@functools.cache
def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels may use what Hopper has: TMA, warp group products, programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
