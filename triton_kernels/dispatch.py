"""Whether a tensor's work runs in Triton or in the PyTorch reference, and what its GPU can do.

A tensor on the meta device is one of a GPU that is not here, for who compiles for it (`pretending`). Knows devices and
Triton's interpreter; knows no kernel.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import triton
from torch import Tensor

# Triton reads the variable when it decorates a kernel: later changes must not change our mind either.
INTERPRETED: bool = triton.knobs.runtime.interpret


class Gpu(NamedTuple):
    """What the choice of kernels depends on."""

    name: str
    capability: int
    """90 for Hopper."""
    multiprocessors: int

    @property
    def in_words(self) -> str:
        """As messages call it."""
        return "{} of compute capability {}.{}".format(self.name or "a GPU", *divmod(self.capability, 10))


_SHARED_KIB = {75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_LITTLE_SHARED_KIB = 99
"""As nearly all others have."""
_PRETENDED: ContextVar[Gpu | None] = ContextVar("pretended", default=None)


@contextmanager
def pretending(gpu: Gpu) -> Iterator[None]:
    """Within, meta tensors are on this GPU."""
    token = _PRETENDED.set(gpu)
    try:
        yield
    finally:
        _PRETENDED.reset(token)


def gpu_of(device: torch.device) -> Gpu | None:
    if device.type == "meta":
        return _PRETENDED.get()
    return _real_gpu(device) if device.type == "cuda" else None


def use_kernels(tensor: Tensor) -> bool:
    """True on a GPU, and anywhere under `TRITON_INTERPRET=1`."""
    return INTERPRETED or tensor.is_cuda or (tensor.is_meta and _PRETENDED.get() is not None)


def gpu_name(device: torch.device) -> str:
    gpu = gpu_of(device)
    return "" if gpu is None else gpu.name


def is_hopper(device: torch.device) -> bool:
    """Whether kernels may use what Hopper has: TMA, warp group products, programmatic dependent launch."""
    gpu = gpu_of(device)
    return gpu is not None and gpu.capability // 10 == 9


def shared_bytes(capability: int) -> int:
    """Shared memory of one block."""
    return 1024 * _SHARED_KIB.get(capability, _LITTLE_SHARED_KIB)


def has_little_shared_memory(device: torch.device) -> bool:
    """Whether kernels must do with fewer stages than on the cards of data centres."""
    gpu = gpu_of(device)
    return gpu is not None and shared_bytes(gpu.capability) <= 1024 * _LITTLE_SHARED_KIB


def multiprocessors(device: torch.device) -> int:
    gpu = gpu_of(device)
    return 4 if gpu is None else gpu.multiprocessors


@functools.cache
def _real_gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, 10 * properties.major + properties.minor, properties.multi_processor_count)
