"""Compile kernels for a GPU that is not here, or that another process has: what CI checks, and what fills the cache.

Inside `compiling_for(...)` every launch compiles and nothing runs, so the wrappers' own launch code says what is built.
Tensors live on the meta device. A kernel that needs more shared memory than the GPU has is refused as there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from tercet.triton_kernels.dispatch import Gpu, pretending, shared_bytes

_MULTIPROCESSORS = {80: 108, 89: 128, 90: 132}


class _AbsentGpu:
    """A driver that knows the target and can run nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # Apart from real devices, whose compiled kernels Triton keeps by this number.
        return -int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling_for(gpu: Gpu | int, claim: Callable[[str], bool] = lambda what: True) -> Iterator[list[CompiledKernel]]:
    """Launches within compile for this GPU and add their kernels to the list that this yields.

    `gpu`: or a compute capability, 80, 89 or 90, of a card that no table knows. `claim`: told what makes a launch's
    kernel another one, whether it is to be compiled. OutOfResources as on the GPU itself.
    """
    card = Gpu("", gpu, _MULTIPROCESSORS[gpu]) if isinstance(gpu, int) else gpu
    most_shared = shared_bytes(card.capability)
    kernels: list[CompiledKernel] = []

    def launcher(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            if not claim(_constants(kernel, args, kwargs)):
                return
            compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            if compiled.metadata.shared > most_shared:
                what = f"shared memory of {compiled.name}"
                raise OutOfResources(compiled.metadata.shared, most_shared, what)
            kernels.append(compiled)

        return launch

    absent = _AbsentGpu(GPUTarget("cuda", card.capability, 32))
    with (
        pretending(card),
        patch.object(driver, "_active", absent),
        patch.object(JITFunction, "__getitem__", launcher),
    ):
        yield kernels


def _constants(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What makes a kernel another one, nearly: its name, its constants and the types of what it is given."""
    named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    numbers = {one.name for one in kernel.params if not one.is_constexpr}
    return f"{kernel.__name__} {[(name, _type_or_value(one, name in numbers)) for name, one in sorted(named.items())]}"


def _type_or_value(one: Any, is_number: bool) -> object:
    if isinstance(one, torch.Tensor):
        return one.dtype
    if isinstance(one, tuple | list):
        return [_type_or_value(each, is_number) for each in one]
    if hasattr(one, "block_shape"):
        return one.base.dtype, one.block_shape
    return "" if is_number and isinstance(one, int | float) else one
